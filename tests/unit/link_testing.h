/* A twin of NCCL in memory (worker/nccl_link.h): ranks are threads, arrays the host's. An exchange returns when all of
 * it has moved, and checks what NCCL asks for: two members that exchange anything do so by the same calls, with the
 * same sizes in the same order. Included by one file per executable. */
#ifndef MU_TESTS_LINK_TESTING_H
#define MU_TESTS_LINK_TESTING_H

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "worker/nccl_link.h"

enum { TWIN_SIZE_MAX = 72, TWIN_PATIENCE_S = 120 };

struct twin_message {
    struct twin_message *next;
    uint32_t to;
    uint64_t call, exchange;
    const void *data;
    size_t size_bytes;
    bool *taken;
};

/* Members of one scope. */
struct twin {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct twin_message *sent[TWIN_SIZE_MAX]; /* by sender, oldest first */
    bool broken;
};

struct mu_nccl { /* of one member */
    struct twin *twin;
    uint32_t index;
    uint64_t calls[TWIN_SIZE_MAX]; /* with each other member */
    uint64_t bytes_sent, exchanges;
};

static inline void twin_init(struct twin *twin)
{
    *twin = (struct twin){0};
    pthread_mutex_init(&twin->lock, NULL);
    pthread_cond_init(&twin->changed, NULL);
}

/* Whoever waits gives up. */
static inline void twin_break(struct twin *twin)
{
    pthread_mutex_lock(&twin->lock);
    twin->broken = true;
    pthread_cond_broadcast(&twin->changed);
    pthread_mutex_unlock(&twin->lock);
}

static inline void twin_fini(struct twin *twin)
{
    pthread_mutex_destroy(&twin->lock);
    pthread_cond_destroy(&twin->changed);
}

static inline int twin_by_number(const void *a, const void *b)
{
    const struct mu_nccl_move *left = a, *right = b;
    if (left->peer != right->peer)
        return left->peer < right->peer ? -1 : 1;
    return left->exchange < right->exchange ? -1 : left->exchange > right->exchange;
}

static inline struct twin_message **twin_find(struct twin *twin, uint32_t from, uint32_t to)
{
    struct twin_message **at = &twin->sent[from];
    while (*at && (*at)->to != to)
        at = &(*at)->next;
    return at;
}

static inline bool twin_wait(struct twin *twin)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += TWIN_PATIENCE_S;
    if (!twin->broken && pthread_cond_timedwait(&twin->changed, &twin->lock, &until) != 0)
        twin->broken = true;
    return !twin->broken;
}

static inline enum mu_status twin_take(struct mu_nccl *nccl, const struct mu_nccl_move *move, struct mu_error *err)
{
    struct twin *twin = nccl->twin;
    struct twin_message **at;
    while (!*(at = twin_find(twin, move->peer, nccl->index)))
        if (!twin_wait(twin))
            return mu_fail(err, MU_ERR_UNAVAILABLE, "twin: %u got nothing from %u", nccl->index, move->peer);
    struct twin_message *message = *at;
    if (message->call != nccl->calls[move->peer] || message->exchange != move->exchange ||
        message->size_bytes != move->size_bytes) {
        twin->broken = true;
        pthread_cond_broadcast(&twin->changed);
        return mu_fail(err, MU_ERR_CORRUPT, "twin: %u to %u: call %d, number %llx, %zu bytes; call %d, %llx, %zu",
                       move->peer, nccl->index, (int)message->call, (unsigned long long)message->exchange,
                       message->size_bytes, (int)nccl->calls[move->peer], (unsigned long long)move->exchange,
                       move->size_bytes);
    }
    memcpy(move->data, message->data, move->size_bytes);
    *message->taken = true;
    *at = message->next;
    free(message);
    pthread_cond_broadcast(&twin->changed);
    return MU_OK;
}

static inline void twin_post(struct mu_nccl *nccl, const struct mu_nccl_move *move, bool *taken)
{
    struct twin_message *message = calloc(1, sizeof *message), **at = &nccl->twin->sent[nccl->index];
    MU_ASSERT(message);
    *message = (struct twin_message){.to = move->peer,
                                     .call = nccl->calls[move->peer],
                                     .exchange = move->exchange,
                                     .data = move->data,
                                     .size_bytes = move->size_bytes,
                                     .taken = taken};
    while (*at)
        at = &(*at)->next;
    *at = message;
    nccl->bytes_sent += move->size_bytes;
}

static inline enum mu_status twin_exchange(struct mu_nccl *nccl, enum mu_nccl_scope scope,
                                           const struct mu_nccl_move *moves, size_t count, struct CUstream_st *stream,
                                           struct mu_error *err)
{
    (void)scope;
    (void)stream;
    struct twin *twin = nccl->twin;
    struct mu_nccl_move *sorted = calloc(count + 1, sizeof *sorted);
    bool *taken = calloc(count + 1, sizeof *taken);
    enum mu_status status = MU_OK;
    MU_ASSERT(sorted && taken);
    memcpy(sorted, moves, count * sizeof *sorted);
    qsort(sorted, count, sizeof *sorted, twin_by_number);
    pthread_mutex_lock(&twin->lock);
    nccl->exchanges += count > 0;
    for (size_t i = 0; i < count; i++) {
        MU_ASSERT(sorted[i].peer < TWIN_SIZE_MAX && sorted[i].peer != nccl->index);
        nccl->calls[sorted[i].peer] += i == 0 || sorted[i].peer != sorted[i - 1].peer;
        if (sorted[i].send)
            twin_post(nccl, &sorted[i], &taken[i]);
    }
    pthread_cond_broadcast(&twin->changed);
    for (size_t i = 0; i < count && status == MU_OK; i++)
        if (!sorted[i].send)
            status = twin_take(nccl, &sorted[i], err);
    for (size_t i = 0; i < count && status == MU_OK; i++)
        while (sorted[i].send && !taken[i] && status == MU_OK)
            if (!twin_wait(twin))
                status = mu_fail(err, MU_ERR_UNAVAILABLE, "twin: %u took nothing from %u", sorted[i].peer, nccl->index);
    pthread_mutex_unlock(&twin->lock);
    free(sorted);
    if (status == MU_OK)
        free(taken); /* else another one may still write to it */
    return status;
}

static inline enum mu_status twin_progress(struct mu_nccl *nccl, struct mu_error *err)
{
    (void)nccl;
    (void)err;
    return MU_OK;
}

static inline enum mu_status twin_done(struct mu_nccl *nccl, struct CUstream_st *stream, uint64_t deadline_us,
                                       struct mu_error *err)
{
    (void)stream;
    (void)deadline_us;
    return twin_progress(nccl, err);
}

static const struct mu_nccl_ops twin_ops = {.progress = twin_progress, .wait = twin_done, .exchange = twin_exchange};

#endif
