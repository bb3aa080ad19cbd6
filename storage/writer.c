#include "storage/writer.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/clock.h"

enum { REUSED_BYTES_MAX = 64 << 10 }; /* a larger batch gives its memory back */

struct item {
    struct mu_store_batch batch;
    uint64_t cookie;
};

struct mu_writer {
    struct mu_store *store;
    struct mu_writer_config config;
    pthread_t thread;

    pthread_mutex_t lock; /* guards the ring, `ending` and `stats` */
    pthread_cond_t wake;  /* items or `ending` */
    struct item *ring;   /* [capacity]; entries outside [first, first + count) are empty batches with memory to reuse */
    size_t first, count; /* `first` is written by the storage thread only */
    bool ending;
    struct mu_writer_stats stats;

    /* Of the storage thread alone. */
    struct mu_store_batch merged;
    uint64_t *cookies;       /* [capacity] */
    struct mu_error failure; /* the first final failure; its status is MU_OK before */
};

/* Merges as many of the `waiting` oldest batches as fit into one. Needs no lock: they stay in the ring, where submit
 * touches only what comes after them, and `first` belongs to this thread. */
static size_t merge_waiting(struct mu_writer *writer, size_t waiting, enum mu_status *ret_status)
{
    size_t taken = 0;
    enum mu_status status = MU_OK;
    mu_store_batch_clear(&writer->merged);
    for (; taken < waiting; taken++) {
        struct item *item = &writer->ring[(writer->first + taken) % writer->config.capacity];
        status = mu_store_batch_append(&writer->merged, &item->batch);
        if (status != MU_OK)
            break;
        writer->cookies[taken] = item->cookie;
    }
    if (taken > 0)
        status = MU_OK; /* what did not fit waits for the next turn */
    else
        writer->cookies[taken++] = writer->ring[writer->first].cookie;
    *ret_status = status;
    return taken;
}

static void release(struct mu_writer *writer, size_t taken)
{
    for (size_t i = 0; i < taken; i++) {
        struct mu_store_batch *batch = &writer->ring[(writer->first + i) % writer->config.capacity].batch;
        if (batch->capacity_bytes > REUSED_BYTES_MAX)
            mu_store_batch_fini(batch);
        mu_store_batch_clear(batch);
    }
    writer->first = (writer->first + taken) % writer->config.capacity;
    writer->count -= taken;
}

/* Waits retry_ms for the end; true when the writer is ending. */
static bool pause_or_end(struct mu_writer *writer)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += writer->config.retry_ms / 1000;
    until.tv_nsec += writer->config.retry_ms % 1000 * 1000000L;
    if (until.tv_nsec >= 1000000000L) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000L;
    }
    pthread_mutex_lock(&writer->lock);
    while (!writer->ending && pthread_cond_timedwait(&writer->wake, &writer->lock, &until) == 0)
        ;
    bool ending = writer->ending;
    pthread_mutex_unlock(&writer->lock);
    return ending;
}

static enum mu_status write_merged(struct mu_writer *writer, struct mu_error *err)
{
    bool is_stalled = false;
    for (;;) {
        enum mu_status status = mu_store_write(writer->store, &writer->merged, err);
        if (status != MU_ERR_NO_SPACE) {
            if (is_stalled && writer->config.stalled)
                writer->config.stalled(writer->config.arg, NULL);
            return status;
        }
        if (!is_stalled && writer->config.stalled)
            writer->config.stalled(writer->config.arg, err);
        is_stalled = true;
        if (pause_or_end(writer))
            return status;
    }
}

static void count_write(struct mu_writer_stats *stats, size_t batches, size_t bytes, uint64_t took_us)
{
    stats->batches += batches;
    stats->writes++;
    stats->bytes += bytes;
    stats->write_us_total += took_us;
    mu_histogram_add(&stats->synced, took_us);
    if (took_us > stats->write_us_max)
        stats->write_us_max = took_us;
}

static void *storage_thread(void *arg)
{
    struct mu_writer *writer = arg;
    pthread_mutex_lock(&writer->lock);
    for (;;) {
        while (writer->count == 0 && !writer->ending)
            pthread_cond_wait(&writer->wake, &writer->lock);
        if (writer->count == 0)
            break;
        size_t waiting = writer->count;
        pthread_mutex_unlock(&writer->lock);

        enum mu_status status;
        size_t taken = merge_waiting(writer, waiting, &status);
        struct mu_error err = {.status = MU_OK};
        uint64_t before_us = mu_clock_mono_us();
        if (writer->failure.status != MU_OK) {
            err = writer->failure;
            status = err.status;
        } else if (status != MU_OK) {
            mu_fail(&err, status, "store: no memory to merge the waiting batches");
        } else {
            status = write_merged(writer, &err);
        }
        uint64_t took_us = mu_clock_mono_us() - before_us;
        if (status != MU_OK)
            writer->failure = err;

        pthread_mutex_lock(&writer->lock);
        release(writer, taken);
        if (status == MU_OK)
            count_write(&writer->stats, taken, writer->merged.size_bytes, took_us);
        pthread_mutex_unlock(&writer->lock);
        writer->config.done(writer->config.arg, writer->cookies, taken, status, status == MU_OK ? NULL : &err);
        pthread_mutex_lock(&writer->lock);
    }
    pthread_mutex_unlock(&writer->lock);
    return NULL;
}

static void destroy(struct mu_writer *writer)
{
    if (writer->ring)
        for (size_t i = 0; i < writer->config.capacity; i++)
            mu_store_batch_fini(&writer->ring[i].batch);
    free(writer->ring);
    free(writer->cookies);
    mu_store_batch_fini(&writer->merged);
    pthread_cond_destroy(&writer->wake);
    pthread_mutex_destroy(&writer->lock);
    free(writer);
}

enum mu_status mu_writer_new(struct mu_store *store, const struct mu_writer_config *config,
                             struct mu_writer **ret_writer, struct mu_error *err)
{
    MU_ASSERT(config->done && config->retry_ms >= 1);
    if (config->capacity == 0 || config->capacity > MU_WRITER_CAPACITY_MAX)
        return mu_fail(err, MU_ERR_INVALID, "writer: a queue of %zu batches is not allowed: 1 to %d", config->capacity,
                       MU_WRITER_CAPACITY_MAX);
    struct mu_writer *writer = calloc(1, sizeof *writer);
    if (!writer)
        return mu_fail(err, MU_ERR_NO_MEMORY, "writer: no memory");
    writer->store = store;
    writer->config = *config;
    mu_store_batch_init(&writer->merged);
    pthread_mutex_init(&writer->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&writer->wake, &attr);
    pthread_condattr_destroy(&attr);
    writer->ring = calloc(config->capacity, sizeof *writer->ring);
    writer->cookies = calloc(config->capacity, sizeof *writer->cookies);
    enum mu_status status = MU_OK;
    if (!writer->ring || !writer->cookies)
        status = mu_fail(err, MU_ERR_NO_MEMORY, "writer: no memory for a queue of %zu batches", config->capacity);
    else {
        int reason = pthread_create(&writer->thread, NULL, storage_thread, writer);
        if (reason != 0)
            status = mu_fail_errno(err, reason, "writer: cannot start the storage thread");
    }
    if (status != MU_OK) {
        destroy(writer);
        return status;
    }
    *ret_writer = writer;
    return MU_OK;
}

enum mu_status mu_writer_submit(struct mu_writer *writer, struct mu_store_batch *batch, uint64_t cookie)
{
    if (batch->failed != MU_OK)
        return batch->failed;
    pthread_mutex_lock(&writer->lock);
    MU_ASSERT(!writer->ending);
    enum mu_status status = MU_ERR_BUSY;
    if (writer->count < writer->config.capacity) {
        struct item *item = &writer->ring[(writer->first + writer->count) % writer->config.capacity];
        /* A swap: the content moves to the ring, the ring's used memory to the caller. */
        struct mu_store_batch content = *batch;
        *batch = item->batch;
        item->batch = content;
        item->cookie = cookie;
        writer->count++;
        pthread_cond_signal(&writer->wake);
        status = MU_OK;
    }
    pthread_mutex_unlock(&writer->lock);
    return status;
}

size_t mu_writer_pending(struct mu_writer *writer)
{
    pthread_mutex_lock(&writer->lock);
    size_t count = writer->count;
    pthread_mutex_unlock(&writer->lock);
    return count;
}

void mu_writer_stats(struct mu_writer *writer, struct mu_writer_stats *ret_stats)
{
    pthread_mutex_lock(&writer->lock);
    *ret_stats = writer->stats;
    pthread_mutex_unlock(&writer->lock);
}

void mu_writer_free(struct mu_writer *writer)
{
    if (!writer)
        return;
    pthread_mutex_lock(&writer->lock);
    writer->ending = true;
    pthread_cond_signal(&writer->wake);
    pthread_mutex_unlock(&writer->lock);
    pthread_join(writer->thread, NULL);
    destroy(writer);
}
