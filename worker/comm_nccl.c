/* Life of a generation's communicators, waits, and what errors mean. */
#include "worker/comm_nccl_internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/clock.h"
#include "common/gpu_mutant.h"

const char *nccl_scope_name(enum mu_nccl_scope scope)
{
    static const char *const names[] = {"world", "tensor group", "replicas", "stages", "tied embedding"};
    return names[scope];
}

/* ---- failures ---- */

static const char *host_of(const struct mu_nccl *nccl, uint32_t rank)
{
    for (size_t i = 0; i < nccl->host_count; i++)
        if (nccl->hosts[i].rank == rank)
            return nccl->hosts[i].name;
    return NULL;
}

enum mu_status nccl_state(const struct mu_nccl *nccl, struct mu_error *err)
{
    if (err && nccl->failure.status != MU_OK)
        *err = nccl->failure;
    return nccl->failure.status;
}

enum mu_status nccl_fail(struct mu_nccl *nccl, enum mu_status status, struct mu_error *err, const char *fmt, ...)
{
    if (nccl->failure.status == MU_OK) {
        va_list args;
        va_start(args, fmt);
        nccl->failure.status = status;
        vsnprintf(nccl->failure.text, sizeof nccl->failure.text, fmt, args);
        va_end(args);
    }
    return nccl_state(nccl, err);
}

/* The state of the sockets. A connection that broke is a failure here too, with the host that NCCL would not name. */
static enum mu_status look_at_sockets(struct mu_nccl *nccl, struct mu_error *err)
{
    struct mu_error sockets = {0};
    struct mu_comm_failure first;
    enum mu_status status = nccl->group ? mu_comm_group_progress(nccl->group, &sockets) : MU_OK;
    if (status == MU_OK)
        return MU_OK;
    if (status != MU_ERR_UNAVAILABLE || mu_comm_group_failures(nccl->group, &first, 1) == 0)
        return nccl_fail(nccl, status, err, "%s", sockets.text);
    const char *host = host_of(nccl, first.peer_rank);
    return nccl_fail(nccl, status, err, "%s%s%s%s; during %s", sockets.text, host ? " [host " : "", host ? host : "",
                     host ? "]" : "", nccl->doing);
}

/* What a person can do about it; NULL: NCCL's own text says enough. */
static const char *advice(ncclResult_t result)
{
    switch (result) {
    case ncclSystemError:
        return "if hosts cannot reach each other, name the interface that does in NCCL_SOCKET_IFNAME";
    case ncclRemoteError:
        return "a peer or the network to it is gone";
    case ncclUnhandledCudaError:
        return "the GPU or its driver failed, see the kernel's log for Xid";
    case ncclInvalidUsage:
        return "each rank needs a GPU of its own, and all ranks the same NCCL_ settings";
    default:
        return NULL;
    }
}

enum mu_status nccl_blame(struct mu_nccl *nccl, ncclComm_t comm, ncclResult_t result, struct mu_error *err)
{
    char text[256]; /* of NCCL: taken now, later ones would replace it */
    snprintf(text, sizeof text, "%s", ncclGetLastError(comm));
    /* A peer that died breaks its sockets too, perhaps a little later: they say who it was. */
    uint64_t deadline_us = mu_clock_mono_us() + (nccl->group ? NCCL_BLAME_US : 0);
    struct nccl_pause pause = {0};
    while (nccl_turn(nccl, &pause, deadline_us, NULL) == MU_OK)
        ;
    nccl_turned(nccl, &pause);
    if (nccl_state(nccl, err) != MU_OK)
        return nccl->failure.status;
    const char *hint = advice(result);
    return nccl_fail(nccl, MU_ERR_UNAVAILABLE, err, "NCCL during %s: %s%s%s%s%s%s", nccl->doing,
                     ncclGetErrorString(result), text[0] ? ", " : "", text, hint ? " (" : "", hint ? hint : "",
                     hint ? ")" : "");
}

/* ---- waits ---- */

enum mu_status nccl_turn(struct mu_nccl *nccl, struct nccl_pause *pause, uint64_t deadline_us, struct mu_error *err)
{
    enum mu_status status = look_at_sockets(nccl, err);
    uint64_t now_us = mu_clock_mono_us();
    if (status != MU_OK)
        return status;
    if (now_us >= deadline_us)
        return MU_ERR_TIMEOUT;
    if (pause->since_us == 0) {
        pause->since_us = now_us;
        if (nccl->waiting)
            nccl->waiting(nccl->waiting_ctx, true);
    }
    if (now_us - pause->since_us < NCCL_SPIN_US)
        return MU_OK;
    pause->sleep_us = pause->sleep_us == 0 ? 1 : pause->sleep_us * 2;
    if (pause->sleep_us > NCCL_SLEEP_MAX_US)
        pause->sleep_us = NCCL_SLEEP_MAX_US;
    struct timespec sleep = {.tv_nsec = (long)pause->sleep_us * 1000};
    nanosleep(&sleep, NULL);
    return MU_OK;
}

void nccl_turned(struct mu_nccl *nccl, const struct nccl_pause *pause)
{
    if (pause->since_us && nccl->waiting)
        nccl->waiting(nccl->waiting_ctx, false);
}

enum mu_status nccl_settle(struct mu_nccl *nccl, ncclComm_t comm, ncclResult_t result, uint64_t deadline_us,
                           struct mu_error *err)
{
    struct nccl_pause pause = {0};
    enum mu_status status = MU_OK;
    while (result == ncclInProgress && status == MU_OK) {
        ncclResult_t asked = ncclCommGetAsyncError(comm, &result);
        if (asked != ncclSuccess)
            result = asked;
        if (result == ncclInProgress)
            status = nccl_turn(nccl, &pause, deadline_us, err);
    }
    nccl_turned(nccl, &pause);
    if (status == MU_ERR_TIMEOUT && nccl->failure.status == MU_OK)
        return nccl_fail(nccl, MU_ERR_TIMEOUT, err, "%s: the other members did not come in time", nccl->doing);
    if (status != MU_OK)
        return status;
    return result == ncclSuccess ? MU_OK : nccl_blame(nccl, comm, result, err);
}

enum mu_status mu_nccl_progress(struct mu_nccl *nccl, struct mu_error *err)
{
    enum mu_status status = nccl_state(nccl, err);
    if (status == MU_OK)
        status = look_at_sockets(nccl, err);
    for (int i = 0; i < MU_NCCL_SCOPES && status == MU_OK; i++) {
        ncclComm_t comm = MU_GPU_MUTANT(MU_GPU_MUT_NO_POLL) ? NULL : nccl->channels[i].comm;
        ncclResult_t state = ncclSuccess, asked = comm ? ncclCommGetAsyncError(comm, &state) : ncclSuccess;
        if (asked != ncclSuccess || (state != ncclSuccess && state != ncclInProgress))
            status = nccl_blame(nccl, comm, asked != ncclSuccess ? asked : state, err);
    }
    return status;
}

enum mu_status mu_nccl_wait(struct mu_nccl *nccl, cudaStream_t stream, uint64_t deadline_us, struct mu_error *err)
{
    struct nccl_pause pause = {0};
    enum mu_status status = mu_nccl_progress(nccl, err);
    cudaError_t state = cudaSuccess;
    while (status == MU_OK && (state = cudaStreamQuery(stream)) == cudaErrorNotReady) {
        status = nccl_turn(nccl, &pause, deadline_us, err);
        if (status == MU_OK)
            status = mu_nccl_progress(nccl, err);
    }
    nccl_turned(nccl, &pause);
    if (status == MU_ERR_TIMEOUT && nccl->failure.status == MU_OK)
        return mu_fail(err, MU_ERR_TIMEOUT, "%s: not done by the deadline", nccl->doing);
    if (status == MU_OK && state != cudaSuccess)
        status = nccl_fail(nccl, MU_ERR_IO, err, "%s: the GPU failed: %s", nccl->doing, cudaGetErrorString(state));
    return status;
}

/* ---- opening ---- */

static enum mu_status copy_members(struct channel *channel, const struct mu_nccl_members *members, struct mu_error *err)
{
    channel->size = members->size;
    channel->index = members->index;
    channel->ranks = calloc(members->size + 1u, sizeof *channel->ranks);
    if (!channel->ranks)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for a group of %u ranks", members->size);
    for (uint32_t i = 0; i < members->size; i++)
        channel->ranks[i] = members->ranks ? members->ranks[i] : i;
    return MU_OK;
}

static enum mu_status copy_config(struct mu_nccl *nccl, const struct mu_nccl_config *config, struct mu_error *err)
{
    nccl->group = config->group;
    nccl->rank = config->rank;
    nccl->world = config->world;
    nccl->stall_us = config->stall_us;
    nccl->waiting = config->waiting;
    nccl->waiting_ctx = config->waiting_ctx;
    nccl->hosts = calloc(config->peer_count + 1, sizeof *nccl->hosts);
    if (!nccl->hosts)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the names of %zu hosts", config->peer_count);
    nccl->host_count = config->peer_count;
    for (size_t i = 0; i < config->peer_count; i++) {
        nccl->hosts[i].rank = config->peers[i].rank;
        snprintf(nccl->hosts[i].name, sizeof nccl->hosts[i].name, "%s", config->peers[i].host);
    }
    enum mu_status status = MU_OK;
    uint32_t largest = 0;
    for (int i = 0; i < MU_NCCL_SCOPES && status == MU_OK; i++) {
        const struct mu_nccl_members *members = &config->scopes[i];
        const struct mu_nccl_members world = {.size = config->world, .index = config->rank};
        MU_ASSERT(i == MU_NCCL_WORLD || members->size == 0 ||
                  (members->index < members->size && members->ranks[members->index] == config->rank));
        status = copy_members(&nccl->channels[i], i == MU_NCCL_WORLD ? &world : members, err);
        largest = nccl->channels[i].size > largest ? nccl->channels[i].size : largest;
    }
    nccl->nodes = calloc(largest, sizeof *nccl->nodes);
    nccl->adds = calloc(largest, sizeof *nccl->adds);
    nccl->partials = calloc(largest, sizeof *nccl->partials);
    if (status == MU_OK && (!nccl->nodes || !nccl->adds || !nccl->partials))
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for sums over %u ranks", largest);
    return status;
}

/* An operation that waits for a peer holds its blocks of the GPU: beside kernels that compute not more than it needs to
 * move with a good part of NVLink's rate, and where it is posted long before (head chains) next to nothing.
 * NCCL_MAX_CTAS overrides. 0: as many as NCCL likes. */
static int blocks_at_most(enum mu_nccl_scope scope)
{
    static const int most[] = {
        [MU_NCCL_REPLICAS] = 16, [MU_NCCL_STAGES] = 16, [MU_NCCL_TIED] = 4, [MU_NCCL_SCOPES] = 0};
    return most[scope];
}

static ncclConfig_t config_of(enum mu_nccl_scope scope)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.commName = scope == MU_NCCL_WORLD ? "muster" : nccl_scope_name(scope);
    if (blocks_at_most(scope) > 0)
        config.maxCTAs = blocks_at_most(scope);
    return config;
}

static enum mu_status open_world(struct mu_nccl *nccl, const struct mu_nccl_id *ids, uint32_t id_count,
                                 uint64_t deadline_us, struct mu_error *err)
{
    struct channel *world = &nccl->channels[MU_NCCL_WORLD];
    ncclConfig_t config = config_of(MU_NCCL_WORLD);
    ncclUniqueId *copy = malloc(id_count * sizeof *copy);
    if (!copy)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for %u ids of NCCL", id_count);
    memcpy(copy, ids, id_count * sizeof *copy);
    snprintf(nccl->doing, sizeof nccl->doing, "the meeting of %u ranks", nccl->world);
    ncclResult_t result =
        id_count == 1
            ? ncclCommInitRankConfig(&world->comm, (int)nccl->world, copy[0], (int)nccl->rank, &config)
            : ncclCommInitRankScalable(&world->comm, (int)nccl->world, (int)nccl->rank, (int)id_count, copy, &config);
    enum mu_status status =
        world->comm ? nccl_settle(nccl, world->comm, result, deadline_us, err) : nccl_blame(nccl, NULL, result, err);
    free(copy);
    return status;
}

/* All ranks split for every scope that exists, also those that are alone in theirs. */
static enum mu_status open_scope(struct mu_nccl *nccl, enum mu_nccl_scope scope, uint64_t deadline_us,
                                 struct mu_error *err)
{
    struct channel *channel = &nccl->channels[scope];
    ncclComm_t world = nccl->channels[MU_NCCL_WORLD].comm;
    int color = channel->size > 1 ? (int)channel->ranks[0] : NCCL_SPLIT_NOCOLOR;
    ncclConfig_t config = config_of(scope);
    if (channel->size == 0)
        return MU_OK;
    snprintf(nccl->doing, sizeof nccl->doing, "the split into %s", nccl_scope_name(scope));
    ncclResult_t result = ncclCommSplit(world, color, (int)channel->index, &channel->comm, &config);
    enum mu_status status = nccl_settle(nccl, world, result, deadline_us, err);
    if (status != MU_OK || channel->size == 1)
        return status;
    ncclComm_t comm = nccl_load(channel);
    if (!comm)
        return nccl_fail(nccl, MU_ERR_INTERNAL, err, "NCCL made no communicator in %s", nccl->doing);
    return nccl_settle(nccl, comm, ncclInProgress, deadline_us, err);
}

enum mu_status mu_nccl_open(const struct mu_nccl_config *config, uint64_t deadline_us, struct mu_nccl **ret_nccl,
                            struct mu_error *err)
{
    MU_ASSERT(config->rank < config->world && (config->world == 1 || config->group));
    struct mu_nccl *nccl = calloc(1, sizeof *nccl);
    if (!nccl)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the communicators of %u ranks", config->world);
    enum mu_status status = copy_config(nccl, config, err);
    if (status == MU_OK && nccl->world > 1)
        status = open_world(nccl, config->ids, config->id_count, deadline_us, err);
    for (int scope = MU_NCCL_WORLD + 1; scope < MU_NCCL_SCOPES && status == MU_OK && nccl->world > 1; scope++)
        status = open_scope(nccl, (enum mu_nccl_scope)scope, deadline_us, err);
    if (status == MU_OK) {
        *ret_nccl = nccl;
        return MU_OK;
    }
    struct mu_error hung;
    if (mu_nccl_abort(nccl, mu_clock_mono_us() + NCCL_ABORT_US, &hung) != MU_OK && err) {
        size_t used = strlen(err->text);
        snprintf(err->text + used, sizeof err->text - used, "; %s", hung.text);
    }
    mu_nccl_free(nccl);
    return status;
}

void mu_nccl_free(struct mu_nccl *nccl)
{
    if (!nccl || !nccl->over)
        return;
    for (int i = 0; i < MU_NCCL_SCOPES; i++)
        free(nccl->channels[i].ranks);
    free(nccl->hosts);
    free(nccl->nodes);
    free(nccl->adds);
    free(nccl->partials);
    free(nccl->sorted);
    free(nccl);
}
