/* The storage thread of the coordinator: group commit.
 *
 *   core thread --submit(batch, cookie)--> bounded queue --all that wait--> one synced write --done(cookies in
 * order)--> core's queue
 *
 * Completions come in the order of submission. One synced write a turn carries every batch that was waiting, so a burst
 * costs one fsync. MU_ERR_NO_SPACE is not an outcome: nothing was written, so the thread tells `stalled` and tries
 * again until there is room; whoever waits for the completion sees a slow disk. Any other failure is final: the failed
 * batches and all later ones complete with that status (a later batch may rest on a failed one), and the process should
 * exit and be started again. */
#ifndef MU_STORAGE_WRITER_H
#define MU_STORAGE_WRITER_H

#include <stddef.h>
#include <stdint.h>

#include "common/histogram.h"
#include "storage/store.h"

enum {
    MU_WRITER_CAPACITY_MAX = 1 << 16, /* batches waiting */
    MU_WRITER_RETRY_MS_DEFAULT = 500,
};

struct mu_writer_config {
    size_t capacity;   /* 1 to MU_WRITER_CAPACITY_MAX */
    uint32_t retry_ms; /* pause between tries while there is no space, >= 1 */
    /* All callbacks run on the storage thread. `cookies` is valid during the call; `err` is NULL on success. */
    void (*done)(void *arg, const uint64_t *cookies, size_t count, enum mu_status status, const struct mu_error *err);
    /* Once when writes begin to be refused for lack of space (err says why), once with NULL when they go on. May be
     * NULL. */
    void (*stalled)(void *arg, const struct mu_error *err);
    void *arg;
};

struct mu_writer_stats {
    uint64_t batches, writes, bytes; /* completed well; batches / writes is the mean group */
    uint64_t write_us_total, write_us_max;
    struct mu_histogram synced; /* the synced writes */
};

struct mu_writer;

/* The store is used by the storage thread only, from now until mu_writer_free returns; it still belongs to the caller.
 */
enum mu_status mu_writer_new(struct mu_store *store, const struct mu_writer_config *config,
                             struct mu_writer **ret_writer, struct mu_error *err) MU_WARN_UNUSED;
/* Takes the batch's content on MU_OK (`batch` is then empty and reusable); never blocks. MU_ERR_BUSY: the queue is
 * full, try again after a completion. MU_ERR_LIMIT or MU_ERR_NO_MEMORY: the batch itself is bad. An empty batch
 * completes in its turn. Any thread. */
enum mu_status mu_writer_submit(struct mu_writer *writer, struct mu_store_batch *batch, uint64_t cookie) MU_WARN_UNUSED;
size_t mu_writer_pending(struct mu_writer *writer); /* submitted, not written yet; any thread */
void mu_writer_stats(struct mu_writer *writer, struct mu_writer_stats *ret_stats); /* any thread */
/* Writes and completes everything submitted (while there is no space: completes it with MU_ERR_NO_SPACE), then ends the
 * thread. Nobody may submit any more. NULL is fine. */
void mu_writer_free(struct mu_writer *writer);

#endif
