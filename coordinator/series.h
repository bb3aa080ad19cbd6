/* Time series of jobs and workers, kept in the coordinator's store: what the dashboard draws.
 *
 * A series has tiers; each holds the means over buckets of its length, in a ring of a fixed number of buckets, so that
 * what is kept never grows:
 *
 *     jobs      2 s for 1 hour      30 s for 1 day      10 min for 30 days
 *     workers                       60 s for 1 day      10 min for 14 days
 *
 * A worker's bucket takes 81 bytes and its name (vital signs are kept to two or three digits): with 8 bytes of name
 * 141 kB a day, of which 308 kB are kept. A job's
 * takes 61 bytes and its key: 3.6 MB a day, of which 0.7 MB are kept.
 *
 * Values are sampled from the newest reports every SAMPLE_MS; buckets that are complete go to the store together every
 * FLUSH_MS, in one batch (what was not flushed when the process dies is lost). Keys are "s/<job>/" followed by one byte
 * for the tier, two for the group of workers (of WORKERS_PER_GROUP slots) and two for the bucket's place in the ring.
 * They are no records: snapshots leave them out.
 *
 * Threads: the core thread samples; mu_series_read may run on any thread where the store's scan may. */
#ifndef MU_COORDINATOR_SERIES_H
#define MU_COORDINATOR_SERIES_H

#include "coordinator/core/core.h"
#include "coordinator/sessions.h"
#include "storage/store.h"

enum {
    MU_SERIES_SAMPLE_MS = 1000,
    MU_SERIES_FLUSH_MS = 10000,
    MU_SERIES_WORKERS_PER_GROUP = 64,
    MU_SERIES_STEP_COLUMNS = 9, /* of a worker: of its steps, then its vital signs */
    MU_SERIES_WORKER_COLUMNS = MU_SERIES_STEP_COLUMNS + MU_VITAL_COUNT,
    MU_SERIES_JOB_COLUMNS = 14,
};
#define MU_SERIES_PREFIX "s/"

struct mu_series;

/* Takes rows on their way to the store. */
typedef enum mu_status mu_series_put_fn(void *ctx, const void *key, size_t key_bytes, const void *value,
                                        size_t value_bytes);

struct mu_series *mu_series_new(uint32_t max_jobs, uint32_t max_workers); /* NULL: no memory */
void mu_series_free(struct mu_series *series);                            /* NULL is fine */

/* When mu_series_sample wants to be called next (monotonic). */
uint64_t mu_series_next_us(const struct mu_series *series);
/* Samples, if it is time; `sessions` NULL: nobody tells vital signs. Failures of `put` lose buckets and are not told.
 */
void mu_series_sample(struct mu_series *series, const struct mu_coord *coord, struct mu_sessions *sessions,
                      uint64_t now_us, uint64_t wall_us, mu_series_put_fn *put, void *ctx);

/* All keys of the job's series, up to `limit`, to be deleted: calls `drop` for each. */
enum mu_status mu_series_forget(struct mu_store *store, const char *job, size_t limit,
                                void (*drop)(void *ctx, const void *key, size_t key_bytes), void *ctx,
                                struct mu_error *err) MU_WARN_UNUSED;

struct mu_series_query {
    char job[MU_JOB_NAME_SIZE], worker[MU_WORKER_NAME_SIZE]; /* worker empty: of the job */
    uint32_t seconds;                                        /* back from now; chooses the finest tier that has them */
    uint64_t now_wall_us;
};
/* {"job":..., "worker":..., "bucket_seconds":2, "columns":["time","step",...], "rows":[[...],...]}, ascending by time
 * (seconds since 1970); null where nothing is known. *ret_json is from malloc. */
enum mu_status mu_series_read(struct mu_store *store, const struct mu_series_query *query, char **ret_json,
                              size_t *ret_size_bytes, struct mu_error *err) MU_WARN_UNUSED;

#endif
