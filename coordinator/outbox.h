/* Output commit: what the core wants to be durable goes into batches, what it wants to tell waits behind them.
 *
 *    core --PERSIST--> batch of this turn --end_turn--> storage thread --done--> durable
 *    core --SEND, REPLY, EVENT, ...--> FIFO ---------------------------------------^ released in order, when everything
 *                                                                                    persisted before it is durable
 *
 * So nobody hears of anything that a crash could undo. While the disk is full the storage thread waits and so does the
 * FIFO; workers do not need it to keep stepping, and answers to mere questions pass by, so that people can see what is
 * going on. Any other failure of the store is final: mu_outbox_failure, and the
 * process must end.
 *
 * Threads: one core thread calls everything. Ownership: an item belongs to the outbox from hold on until its function
 * runs. */
#ifndef MU_COORDINATOR_OUTBOX_H
#define MU_COORDINATOR_OUTBOX_H

#include <stdbool.h>
#include <stdint.h>

#include "common/histogram.h"
#include "coordinator/core/core.h"
#include "proto/wire.h"
#include "storage/store.h"

enum {
    MU_OUTBOX_HELD_MAX = 1 << 20, /* items waiting; so many mean that the disk has been full for long while the cluster
                                     churns: a failure */
    MU_OUTBOX_BEHIND_BYTES = 8 << 20,
    MU_OUTBOX_BATCHES_MAX = 256, /* submitted and not durable; later turns are merged into one */
};

struct mu_outbox;
struct mu_outbox_item;

/* Carries the item out and frees it. With `drop` it only frees (shutdown). It may hold further items, but not release.
 */
typedef void mu_outbox_fn(void *ctx, struct mu_outbox_item *item, bool drop);

/* First member of what is held. */
struct mu_outbox_item {
    struct mu_outbox_item *next;
    mu_outbox_fn *run;
    uint64_t batch; /* the outbox's */
    bool may_pass;  /* likewise */
};

/* `wake` is called on the storage thread when something became durable or failed. `ctx` goes to the items' functions.
 */
enum mu_status mu_outbox_new(struct mu_store *store, void (*wake)(void *wake_arg), void *wake_arg, void *ctx,
                             struct mu_outbox **ret_outbox, struct mu_error *err) MU_WARN_UNUSED;
/* Writes what was submitted, drops what is held. NULL is fine. The store still belongs to the caller. */
void mu_outbox_free(struct mu_outbox *outbox);

enum mu_status mu_outbox_persist(struct mu_outbox *outbox, struct mu_wire_arena *arena, const struct mu_record *record,
                                 struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_outbox_forget(struct mu_outbox *outbox, const struct mu_record *record,
                                struct mu_error *err) MU_WARN_UNUSED;
/* What is not one of the core's records. */
enum mu_status mu_outbox_put(struct mu_outbox *outbox, const void *key, size_t key_bytes, const void *value,
                             size_t value_bytes, struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_outbox_delete(struct mu_outbox *outbox, const void *key, size_t key_bytes,
                                struct mu_error *err) MU_WARN_UNUSED;
void mu_outbox_hold(struct mu_outbox *outbox, struct mu_outbox_item *item, mu_outbox_fn *run);
/* The same for the answer to a question: while nothing can be written for want of space, it goes at once. */
void mu_outbox_hold_answer(struct mu_outbox *outbox, struct mu_outbox_item *item, mu_outbox_fn *run);

/* Runs what may go. Returns how many items ran. */
size_t mu_outbox_release(struct mu_outbox *outbox);
/* Hands what was persisted since the last turn to the storage thread, as one batch. */
enum mu_status mu_outbox_end_turn(struct mu_outbox *outbox, struct mu_error *err) MU_WARN_UNUSED;

/* MU_OK, or the failure of the store after which nothing is released any more. */
enum mu_status mu_outbox_failure(struct mu_outbox *outbox, struct mu_error *err);
/* The disk is full, or too slow for what is to be written: what is not needed had better not be added. */
bool mu_outbox_is_behind(const struct mu_outbox *outbox);
void mu_outbox_synced(struct mu_outbox *outbox, struct mu_histogram *ret_synced); /* the synced writes so far */
bool mu_outbox_idle(const struct mu_outbox *outbox);                              /* nothing unwritten, nothing held */
size_t mu_outbox_held(const struct mu_outbox *outbox);

#endif
