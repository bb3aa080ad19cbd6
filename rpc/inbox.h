/* Hand-over from many threads to one: intrusive lists and a wake flag under one lock. The consumer takes everything
 * at once, so the lock is taken once a batch; the producer signals only when the consumer sleeps, so there is no system
 * call a message under load. No wake-up is lost: the consumer decides to sleep under the lock. Internal to rpc/. */
#ifndef MU_RPC_INBOX_H
#define MU_RPC_INBOX_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "rpc/server.h" /* struct mu_rpc_item */

struct mu_rpc_list {
    struct mu_rpc_item *first, **last;
};

void mu_rpc_list_init(struct mu_rpc_list *list);
void mu_rpc_list_push(struct mu_rpc_list *list, struct mu_rpc_item *item);
struct mu_rpc_item *mu_rpc_list_pop(struct mu_rpc_list *list); /* NULL when empty */
/* Moves all of `from` behind `to`. */
void mu_rpc_list_move(struct mu_rpc_list *to, struct mu_rpc_list *from);

/* What one turn of the consumer works through. */
struct mu_rpc_batch {
    struct mu_rpc_list urgent; /* completed operations that come before others */
    struct mu_rpc_list done;   /* of the others */
    struct mu_rpc_list posted; /* items of other threads */
    bool wake;
};

void mu_rpc_batch_init(struct mu_rpc_batch *batch);

struct mu_rpc_inbox {
    pthread_mutex_t lock;
    pthread_cond_t filled;
    struct mu_rpc_batch batch;
    bool sleeping;
    atomic_bool has_urgent; /* a hint, for a look without the lock */
};

void mu_rpc_inbox_init(struct mu_rpc_inbox *inbox);
void mu_rpc_inbox_fini(struct mu_rpc_inbox *inbox);
void mu_rpc_inbox_done(struct mu_rpc_inbox *inbox, struct mu_rpc_list *urgent,
                       struct mu_rpc_list *done); /* leaves both empty */
void mu_rpc_inbox_post(struct mu_rpc_inbox *inbox, struct mu_rpc_item *item);
void mu_rpc_inbox_wake(struct mu_rpc_inbox *inbox);
/* Waits until `until_us` (monotonic; UINT64_MAX: for ever) and adds all there is to `batch`. False: nothing came. */
bool mu_rpc_inbox_take(struct mu_rpc_inbox *inbox, uint64_t until_us, struct mu_rpc_batch *batch);

#endif
