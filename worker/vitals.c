#include "worker/vitals.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct mu_vitals_watch {
    pthread_t thread;
    uint32_t every_ms;
    void (*fill)(void *ctx, struct mu_vitals *vitals);
    void *ctx;
    pthread_mutex_t lock; /* what follows */
    pthread_cond_t changed;
    bool stopping, fresh;
    char disk[MU_PATH_SIZE];
    struct mu_vitals newest;
};

/* Under the lock: until the next one is due, or nobody wants any more. */
static void pause_until_due(struct mu_vitals_watch *watch)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    uint64_t nanoseconds = (uint64_t)until.tv_nsec + watch->every_ms * 1000000ull;
    until.tv_sec += (time_t)(nanoseconds / 1000000000);
    until.tv_nsec = (long)(nanoseconds % 1000000000);
    while (!watch->stopping && pthread_cond_timedwait(&watch->changed, &watch->lock, &until) == 0)
        continue;
}

static void *watch_main(void *arg)
{
    struct mu_vitals_watch *watch = arg;
    pthread_mutex_lock(&watch->lock);
    while (!watch->stopping) {
        char disk[MU_PATH_SIZE];
        struct mu_vitals vitals;
        memcpy(disk, watch->disk, sizeof disk);
        pthread_mutex_unlock(&watch->lock);
        mu_vitals_read("", disk, &vitals);
        if (watch->fill)
            watch->fill(watch->ctx, &vitals);
        pthread_mutex_lock(&watch->lock);
        watch->newest = vitals;
        watch->fresh = true;
        pause_until_due(watch);
    }
    pthread_mutex_unlock(&watch->lock);
    return NULL;
}

enum mu_status mu_vitals_watch_new(uint32_t every_ms, void (*fill)(void *ctx, struct mu_vitals *vitals), void *ctx,
                                   struct mu_vitals_watch **ret_watch, struct mu_error *err)
{
    struct mu_vitals_watch *watch = calloc(1, sizeof *watch);
    pthread_condattr_t attributes;
    if (!watch)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the vital signs");
    watch->every_ms = every_ms;
    watch->fill = fill;
    watch->ctx = ctx;
    pthread_mutex_init(&watch->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&watch->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    int reason = pthread_create(&watch->thread, NULL, watch_main, watch);
    if (reason != 0) {
        pthread_cond_destroy(&watch->changed);
        pthread_mutex_destroy(&watch->lock);
        free(watch);
        return mu_fail_errno(err, reason, "cannot start the thread that reads vital signs");
    }
    *ret_watch = watch;
    return MU_OK;
}

void mu_vitals_watch_free(struct mu_vitals_watch *watch)
{
    if (!watch)
        return;
    pthread_mutex_lock(&watch->lock);
    watch->stopping = true;
    pthread_cond_signal(&watch->changed);
    pthread_mutex_unlock(&watch->lock);
    pthread_join(watch->thread, NULL);
    pthread_cond_destroy(&watch->changed);
    pthread_mutex_destroy(&watch->lock);
    free(watch);
}

void mu_vitals_watch_disk(struct mu_vitals_watch *watch, const char *path)
{
    size_t length = strnlen(path, MU_PATH_SIZE - 1);
    pthread_mutex_lock(&watch->lock);
    memcpy(watch->disk, path, length);
    watch->disk[length] = 0;
    pthread_mutex_unlock(&watch->lock);
}

bool mu_vitals_watch_take(struct mu_vitals_watch *watch, bool again, struct mu_vitals *ret_vitals)
{
    if (!watch)
        return false;
    pthread_mutex_lock(&watch->lock);
    bool fresh = watch->fresh || (again && watch->newest.mono_us);
    if (fresh)
        *ret_vitals = watch->newest;
    watch->fresh = false;
    pthread_mutex_unlock(&watch->lock);
    return fresh;
}
