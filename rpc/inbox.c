#include "rpc/inbox.h"

#include <time.h>

void mu_rpc_list_init(struct mu_rpc_list *list)
{
    list->first = NULL;
    list->last = &list->first;
}

void mu_rpc_list_push(struct mu_rpc_list *list, struct mu_rpc_item *item)
{
    item->next = NULL;
    *list->last = item;
    list->last = &item->next;
}

struct mu_rpc_item *mu_rpc_list_pop(struct mu_rpc_list *list)
{
    struct mu_rpc_item *item = list->first;
    if (item) {
        list->first = item->next;
        if (!list->first)
            list->last = &list->first;
    }
    return item;
}

void mu_rpc_list_move(struct mu_rpc_list *to, struct mu_rpc_list *from)
{
    if (!from->first)
        return;
    *to->last = from->first;
    to->last = from->last;
    mu_rpc_list_init(from);
}

void mu_rpc_batch_init(struct mu_rpc_batch *batch)
{
    mu_rpc_list_init(&batch->urgent);
    mu_rpc_list_init(&batch->done);
    mu_rpc_list_init(&batch->posted);
    batch->wake = false;
}

void mu_rpc_inbox_init(struct mu_rpc_inbox *inbox)
{
    pthread_mutex_init(&inbox->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&inbox->filled, &attr);
    pthread_condattr_destroy(&attr);
    mu_rpc_batch_init(&inbox->batch);
    inbox->sleeping = false;
    atomic_init(&inbox->has_urgent, false);
}

void mu_rpc_inbox_fini(struct mu_rpc_inbox *inbox)
{
    pthread_cond_destroy(&inbox->filled);
    pthread_mutex_destroy(&inbox->lock);
}

/* Unlocks; then wakes the consumer if it sleeps (after the unlock, so that it does not run into the lock). */
static void unlock_and_signal(struct mu_rpc_inbox *inbox)
{
    bool signal = inbox->sleeping;
    inbox->sleeping = false;
    pthread_mutex_unlock(&inbox->lock);
    if (signal)
        pthread_cond_signal(&inbox->filled);
}

void mu_rpc_inbox_done(struct mu_rpc_inbox *inbox, struct mu_rpc_list *urgent, struct mu_rpc_list *done)
{
    pthread_mutex_lock(&inbox->lock);
    if (urgent->first)
        atomic_store(&inbox->has_urgent, true);
    mu_rpc_list_move(&inbox->batch.urgent, urgent);
    mu_rpc_list_move(&inbox->batch.done, done);
    unlock_and_signal(inbox);
}

void mu_rpc_inbox_post(struct mu_rpc_inbox *inbox, struct mu_rpc_item *item)
{
    pthread_mutex_lock(&inbox->lock);
    mu_rpc_list_push(&inbox->batch.posted, item);
    unlock_and_signal(inbox);
}

void mu_rpc_inbox_wake(struct mu_rpc_inbox *inbox)
{
    pthread_mutex_lock(&inbox->lock);
    inbox->batch.wake = true;
    unlock_and_signal(inbox);
}

static bool is_filled(const struct mu_rpc_batch *batch)
{
    return batch->urgent.first || batch->done.first || batch->posted.first || batch->wake;
}

bool mu_rpc_inbox_take(struct mu_rpc_inbox *inbox, uint64_t until_us, struct mu_rpc_batch *batch)
{
    struct timespec until = {.tv_sec = (time_t)(until_us / 1000000u), .tv_nsec = (long)(until_us % 1000000u) * 1000};
    pthread_mutex_lock(&inbox->lock);
    while (!is_filled(&inbox->batch) && until_us > 0) {
        inbox->sleeping = true;
        if (until_us == UINT64_MAX)
            pthread_cond_wait(&inbox->filled, &inbox->lock);
        else if (pthread_cond_timedwait(&inbox->filled, &inbox->lock, &until) != 0)
            break;
    }
    inbox->sleeping = false;
    bool filled = is_filled(&inbox->batch);
    atomic_store(&inbox->has_urgent, false);
    mu_rpc_list_move(&batch->urgent, &inbox->batch.urgent);
    mu_rpc_list_move(&batch->done, &inbox->batch.done);
    mu_rpc_list_move(&batch->posted, &inbox->batch.posted);
    batch->wake = batch->wake || inbox->batch.wake;
    inbox->batch.wake = false;
    pthread_mutex_unlock(&inbox->lock);
    return filled;
}
