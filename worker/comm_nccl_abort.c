/* The end of a generation's communicators: in good order, or at once. */
#include "worker/comm_nccl_internal.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "common/clock.h"
#include "common/gpu_mutant.h"

/* Shared with the threads that abort; the last one to leave frees it. */
struct farewell {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    ncclComm_t comms[MU_NCCL_SCOPES];
    uint32_t begun, left, users;
    ncclResult_t worst;
};

static void leave(struct farewell *farewell)
{
    pthread_mutex_lock(&farewell->lock);
    bool last = --farewell->users == 0;
    pthread_mutex_unlock(&farewell->lock);
    if (!last)
        return;
    pthread_cond_destroy(&farewell->changed);
    pthread_mutex_destroy(&farewell->lock);
    free(farewell);
}

static void *abort_one(void *arg)
{
    struct farewell *farewell = arg;
    pthread_mutex_lock(&farewell->lock);
    ncclComm_t comm = farewell->comms[farewell->begun++];
    pthread_mutex_unlock(&farewell->lock);
    ncclResult_t result = ncclCommAbort(comm);
    pthread_mutex_lock(&farewell->lock);
    if (result != ncclSuccess && result != ncclInProgress)
        farewell->worst = result;
    farewell->left--;
    pthread_cond_signal(&farewell->changed);
    pthread_mutex_unlock(&farewell->lock);
    leave(farewell);
    return NULL;
}

static struct farewell *farewell_new(void)
{
    struct farewell *farewell = calloc(1, sizeof *farewell);
    pthread_condattr_t attributes;
    if (!farewell)
        return NULL;
    pthread_mutex_init(&farewell->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&farewell->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    farewell->users = 1;
    return farewell;
}

/* A thread that nobody waits for. Counted before it starts. */
static bool start_one(struct farewell *farewell)
{
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    bool started = pthread_create(&thread, &attributes, abort_one, farewell) == 0;
    pthread_attr_destroy(&attributes);
    return started;
}

/* Aborts what there is now. Returns how many have not returned by the deadline; *worst: what one that did returned. */
static uint32_t abort_all(struct mu_nccl *nccl, uint64_t deadline_us, ncclResult_t *worst)
{
    struct farewell *farewell = farewell_new();
    uint32_t count = 0;
    if (!farewell)
        return MU_NCCL_SCOPES;
    for (int i = 0; i < MU_NCCL_SCOPES; i++) {
        ncclComm_t comm = nccl_load(&nccl->channels[i]);
        if (comm)
            farewell->comms[count++] = comm;
        nccl->channels[i].comm = NULL;
    }
    farewell->left = count;
    farewell->users += count;
    for (uint32_t i = 0; i < count; i++)
        if (!start_one(farewell)) /* then here: late rather than never */
            abort_one(farewell);
    struct timespec until = {.tv_sec = (time_t)(deadline_us / 1000000),
                             .tv_nsec = (long)(deadline_us % 1000000) * 1000};
    pthread_mutex_lock(&farewell->lock);
    int waited = 0;
    while (farewell->left > 0 && waited == 0)
        waited = pthread_cond_timedwait(&farewell->changed, &farewell->lock, &until);
    uint32_t left = farewell->left;
    if (farewell->worst != ncclSuccess)
        *worst = farewell->worst;
    pthread_mutex_unlock(&farewell->lock);
    leave(farewell);
    return left;
}

/* What was enqueued before is over, so that nothing touches its buffers. */
static enum mu_status drain_streams(const struct mu_nccl *nccl, uint64_t deadline_us, struct mu_error *err)
{
    for (uint32_t i = 0; i < nccl->stream_count; i++) {
        while (cudaStreamQuery(nccl->streams[i]) == cudaErrorNotReady) {
            struct timespec sleep = {.tv_nsec = NCCL_SLEEP_MAX_US * 1000};
            if (mu_clock_mono_us() >= deadline_us)
                return mu_fail(err, MU_ERR_TIMEOUT,
                               "the GPU still works on %s after NCCL was aborted: this process must end", nccl->doing);
            nanosleep(&sleep, NULL);
        }
    }
    return MU_OK;
}

enum mu_status mu_nccl_abort(struct mu_nccl *nccl, uint64_t deadline_us, struct mu_error *err)
{
    ncclResult_t worst = ncclSuccess;
    uint32_t left = abort_all(nccl, deadline_us, &worst);
    if (left == 0) /* a split that was under way may have stored its communicator meanwhile */
        left = abort_all(nccl, deadline_us, &worst);
    if (left == 0 && worst != ncclSuccess)
        return mu_fail(err, MU_ERR_IO, "NCCL cannot abort, after %s: %s: this process must end", nccl->doing,
                       ncclGetErrorString(worst));
    if (left > 0)
        return mu_fail(err, MU_ERR_TIMEOUT,
                       "%u of the communicators did not abort in time, after %s: this process must end", left,
                       nccl->doing[0] ? nccl->doing : "nothing");
    enum mu_status status = MU_GPU_MUTANT(MU_GPU_MUT_ABORT_RUNNING) ? MU_OK : drain_streams(nccl, deadline_us, err);
    if (status != MU_OK)
        return status;
    nccl->over = true;
    (void)nccl_fail(nccl, MU_ERR_CANCELLED, NULL, "the communicators of this generation were given up");
    return MU_OK;
}

/* Flushes one; children before the world that they were split from. */
static enum mu_status finish(struct mu_nccl *nccl, enum mu_nccl_scope scope, uint64_t deadline_us, struct mu_error *err)
{
    struct channel *channel = &nccl->channels[scope];
    if (!channel->comm)
        return MU_OK;
    snprintf(nccl->doing, sizeof nccl->doing, "the end of the %s", nccl_scope_name(scope));
    enum mu_status status = nccl_settle(nccl, channel->comm, ncclCommFinalize(channel->comm), deadline_us, err);
    if (status != MU_OK)
        return status;
    ncclResult_t result = ncclCommDestroy(channel->comm);
    channel->comm = NULL;
    return result == ncclSuccess || result == ncclInProgress ? MU_OK : nccl_blame(nccl, NULL, result, err);
}

enum mu_status mu_nccl_close(struct mu_nccl *nccl, uint64_t deadline_us, struct mu_error *err)
{
    struct mu_error late;
    enum mu_status status = mu_nccl_progress(nccl, err);
    for (int scope = MU_NCCL_SCOPES - 1; scope >= 0 && status == MU_OK; scope--)
        status = finish(nccl, (enum mu_nccl_scope)scope, deadline_us, err);
    if (status == MU_OK) {
        nccl->over = true;
        (void)nccl_fail(nccl, MU_ERR_CONFLICT, NULL, "the communicators of this generation are closed");
        return MU_OK;
    }
    enum mu_status aborted = mu_nccl_abort(nccl, mu_clock_mono_us() + NCCL_ABORT_US, &late);
    if (aborted != MU_OK && err)
        *err = late;
    return aborted != MU_OK ? aborted : status;
}
