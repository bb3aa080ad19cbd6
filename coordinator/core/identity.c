/* Numeric identity and content of the data: the first worker's bind the job. */
#include "coordinator/core/internal.h"

#include <string.h>

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
        reject(coord, session, MU_REJECT_IDENTITY,
               "numeric identity %016llx%016llx of worker '%s' on %s differs from the job's%s: its bits would differ; "
               "use the build and instruction set of the others",
               (unsigned long long)b->high, (unsigned long long)b->low, hello->name, hello->host, kernels);
        return false;
    }
    a = &record->data_hash;
    b = &hello->data_hash;
    if ((record->identity_set || a->low || a->high) && !same_hash(a, b)) {
        reject(coord, session, MU_REJECT_IDENTITY,
               "data %s has content hash %016llx%016llx on %s, but the job's is %016llx%016llx: give this host the "
               "same file",
               record->spec.data.path, (unsigned long long)b->high, (unsigned long long)b->low, hello->host,
               (unsigned long long)a->high, (unsigned long long)a->low);
        return false;
    }
    if (!record->identity_set)
        bind_identity(coord, job, hello);
    return true;
}
