/* Which GPUs may work for a job, and beside each other. */
#include "coordinator/core/internal.h"

#include <string.h>

/* Known before the worker has loaded anything. */
bool accept_compute(struct mu_coord *coord, struct job *job, const struct mu_hello *hello, uint64_t session)
{
    if (job->record.spec.compute != MU_COMPUTE_BF16 || hello->computes_bf16)
        return true;
    refuse_worker(coord, job, hello, session,
                  "compute: job '%s' is in bf16, which the device of worker '%s' on %s (%s) cannot: give it a GPU "
                  "(--device cuda:N), or rebase the job with --compute fp32",
                  job->record.spec.name, hello->name, hello->host, hello->backend);
    return false;
}

/* Ranks with different versions of NCCL cannot exchange: who is there binds those that come. */
bool accept_nccl(struct mu_coord *coord, struct job *job, const struct mu_hello *hello, uint64_t session)
{
    uint32_t own = hello->nccl_version;
    for (uint32_t rank = 0; own && rank < job->world; rank++) {
        const struct worker *member = member_at(coord, job, rank);
        uint32_t other = member && !member->lost ? member->nccl_version : 0;
        if (other == 0 || other == own || strcmp(member->name, hello->name) == 0)
            continue;
        refuse_worker(
            coord, job, hello, session,
            "worker '%s' on %s has NCCL %u.%u.%u, but %s on %s has %u.%u.%u: install the same libnccl.so.2 on all "
            "hosts",
            hello->name, hello->host, own / 10000, own / 100 % 100, own % 100, member->name, member->host,
            other / 10000, other / 100 % 100, other % 100);
        return false;
    }
    return true;
}

/* A GPU is shared by nobody: who has it, of whatever job, keeps it. One that is taken back holds state, and is not
 * asked. */
bool accept_gpu(struct mu_coord *coord, struct worker *worker, const struct mu_hello *hello, uint64_t session)
{
    uint64_t gpu = hello->gpu[0] ? mu_xxh3_64(hello->gpu, strlen(hello->gpu), 1) | 1 : 0;
    uint32_t slot = gpu ? map_get(&coord->by_gpu, gpu) : NONE;
    const struct worker *other = slot == NONE ? worker : &coord->workers[slot];
    if (other != worker && !other->lost && hello->status.generation == 0) {
        reject(coord, session, MU_REJECT_BUSY,
               "%s of %s is in use by the %s worker %s (pid %llu): give each worker a GPU of its own, as --device all "
               "does",
               hello->gpu, hello->host, other->session ? "live" : "silent", other->name,
               (unsigned long long)other->pid);
        return false;
    }
    worker->gpu = gpu;
    if (gpu)
        map_put(&coord->by_gpu, gpu, (uint32_t)(worker - coord->workers));
    return true;
}

void give_back_gpu(struct mu_coord *coord, const struct worker *worker)
{
    if (worker->gpu && map_get(&coord->by_gpu, worker->gpu) == (uint32_t)(worker - coord->workers))
        map_remove(&coord->by_gpu, worker->gpu);
}
