/* Whose device, kernels and data may work for a job, and beside each other. */
#include "coordinator/core/internal.h"

#include <string.h>

void refuse_worker(struct mu_coord *coord, struct job *job, const struct mu_hello *hello, uint64_t session,
                   const char *fmt, ...)
{
    char text[MU_TEXT_SIZE];
    __builtin_va_list args;
    __builtin_va_start(args, fmt);
    __builtin_vsnprintf(text, sizeof text, fmt, args);
    __builtin_va_end(args);
    reject(coord, session, MU_REJECT_IDENTITY, "%s", text);
    uint64_t hash = mu_xxh3_64(text, strlen(text), 1);
    for (uint32_t i = 0; i < job->refusal_count && i < MU_REFUSALS_KEPT; i++)
        if (job->refusals[i] == hash)
            return; /* whoever starts it again and again is no news */
    job->refusals[job->refusal_count++ % MU_REFUSALS_KEPT] = hash;
    event_of_name(coord, MU_EVENT_WARNING, "worker_refused", job, hello->name, "%s", text);
}

/* Names the kernels whose parts differ, or are known on one side only. */
static void name_differing_kernels(const struct mu_identity_parts *own, const struct mu_identity_parts *other,
                                   char *out, size_t size)
{
    size_t used = 0;
    uint32_t more = 0;
    out[0] = 0;
    for (uint32_t i = 0; i < other->count; i++) {
        uint32_t at = 0;
        while (at < own->count && strcmp(own->parts[at].name, other->parts[i].name) != 0)
            at++;
        if (at < own->count && own->parts[at].hash == other->parts[i].hash)
            continue;
        size_t length = strlen(other->parts[i].name);
        if (used + length + 24 > size) {
            more++;
            continue;
        }
        format_into(out + used, size - used, "%s%s", used ? ", " : " in kernel ", other->parts[i].name);
        used += strlen(out + used);
    }
    if (more)
        format_into(out + used, size - used, " and %u more", more);
}

static bool same_hash(const struct mu_hash128 *a, const struct mu_hash128 *b)
{
    return a->low == b->low && a->high == b->high;
}

/* The first worker's kernels bind the job. */
static void bind_identity(struct mu_coord *coord, struct job *job, const struct mu_hello *hello)
{
    struct mu_job_record *record = &job->record;
    const struct mu_hash128 *from = &record->origin.rebased_from, *to = &hello->numeric_identity;
    record->identity_set = true;
    record->numeric_identity = hello->numeric_identity;
    record->identity_parts = hello->identity_parts;
    record->data_hash = hello->data_hash;
    persist_job(coord, job);
    if (record->origin.rebased)
        event(coord, MU_EVENT_INFO, "job_rebased", job, NULL,
              "job %s goes on from step %llu under numeric identity %016llx%016llx, that of worker '%s' on %s; before: "
              "%016llx%016llx%s",
              record->spec.name, (unsigned long long)record->origin.step, (unsigned long long)to->high,
              (unsigned long long)to->low, hello->name, hello->host, (unsigned long long)from->high,
              (unsigned long long)from->low, same_hash(from, to) ? ", the same" : "");
}

/* The first worker's kernels and data bind the job; every later one must agree. A job that was branched has its
 * origin's data from the beginning, and its kernels unless it was rebased. */
bool accept_identity(struct mu_coord *coord, struct job *job, const struct mu_hello *hello, uint64_t session)
{
    const struct mu_job_record *record = &job->record;
    const struct mu_hash128 *a = &record->numeric_identity, *b = &hello->numeric_identity;
    if (record->identity_set && !same_hash(a, b)) {
        char kernels[96];
        name_differing_kernels(&record->identity_parts, &hello->identity_parts, kernels, sizeof kernels);
        refuse_worker(
            coord, job, hello, session,
            "numeric identity %016llx%016llx of worker '%s' on %s differs from the job's%s: its bits would differ; "
            "use the build and instruction set of the others",
            (unsigned long long)b->high, (unsigned long long)b->low, hello->name, hello->host, kernels);
        return false;
    }
    a = &record->data_hash;
    b = &hello->data_hash;
    if ((record->identity_set || a->low || a->high) && !same_hash(a, b)) {
        refuse_worker(coord, job, hello, session,
                      "data %s has content hash %016llx%016llx on %s, but the job's is %016llx%016llx: give this host "
                      "the same file",
                      record->spec.data.path, (unsigned long long)b->high, (unsigned long long)b->low, hello->host,
                      (unsigned long long)a->high, (unsigned long long)a->low);
        return false;
    }
    if (!record->identity_set)
        bind_identity(coord, job, hello);
    return true;
}

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
