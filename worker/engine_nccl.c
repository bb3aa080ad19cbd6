/* The GPUs' own connections (worker/comm_nccl.h) of a generation whose members all have NCCL: made once the sockets
 * stand, and gone before anything of the generation is freed. */
#include "worker/engine_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/log.h"

/* Of a peer's address, "...;tcp=192.0.2.1:4711": the host, for messages. */
static void host_of(const char *address, char out[MU_NCCL_HOST_SIZE])
{
    const char *tcp = strstr(address, "tcp="), *text = tcp ? tcp + 4 : address, *end = strrchr(text, ':');
    snprintf(out, MU_NCCL_HOST_SIZE, "%.*s", (int)(end ? end - text : (ptrdiff_t)strlen(text)), text);
}

struct scope_ranks {
    uint32_t ranks[MU_SLICES_MAX];
};
_Static_assert((int)MU_MESH_WORLD_MAX <= (int)MU_SLICES_MAX, "replicas fit too");

/* The ranks of this one's tensor group, or its replicas: of those not more than a mesh, beyond that gradients go along
 * a tree of sockets. */
static struct mu_nccl_members members_of(const struct engine_generation *now, enum mu_nccl_scope scope,
                                         struct scope_ranks *room)
{
    const struct mu_layout *layout = &now->layout;
    bool tensor = scope == MU_NCCL_TENSOR;
    uint32_t size = tensor ? layout->tp : layout->dp;
    if (size < 2 || (!tensor && size > MU_MESH_WORLD_MAX))
        return (struct mu_nccl_members){0};
    for (uint32_t i = 0; i < size; i++)
        room->ranks[i] =
            mu_layout_rank(layout, (struct mu_coords){tensor ? i : now->at.t, tensor ? now->at.d : i, now->at.p});
    return (struct mu_nccl_members){.ranks = room->ranks, .size = size, .index = tensor ? now->at.t : now->at.d};
}

/* Ids and versions come over the sockets. */
static enum mu_status meet(struct mu_engine *engine, uint32_t working, uint64_t deadline_us,
                           struct mu_nccl_meeting **ret_meeting, struct mu_error *err)
{
    const struct mu_nccl_meeting_config config = {
        .group = engine->now.group, .rank = engine->now.rank, .world = working, .host = engine->host};
    enum mu_status status = engine->nccl->meeting_new(&config, ret_meeting, err);
    return status == MU_OK ? engine->nccl->meeting_run(*ret_meeting, deadline_us, err) : status;
}

static enum mu_status open_link(struct mu_engine *engine, const struct mu_assign *assign, struct mu_nccl_config *config,
                                uint64_t deadline_us, struct mu_error *err)
{
    struct mu_nccl_peer *peers = calloc(assign->peer_count + 1u, sizeof *peers);
    char(*hosts)[MU_NCCL_HOST_SIZE] = calloc(assign->peer_count + 1u, sizeof *hosts);
    enum mu_status status = peers && hosts ? MU_OK : mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the names of hosts");
    for (uint32_t i = 0; i < assign->peer_count && status == MU_OK; i++) {
        host_of(assign->peers[i].address, hosts[i]);
        peers[i] = (struct mu_nccl_peer){.rank = assign->peers[i].rank, .host = hosts[i]};
    }
    config->peers = peers;
    config->peer_count = assign->peer_count;
    if (status == MU_OK)
        status = engine->nccl->open(config, deadline_us, &engine->now.link.nccl, err);
    free(peers);
    free(hosts);
    return status;
}

enum mu_status engine_nccl_open(struct mu_engine *engine, const struct mu_assign *assign, struct mu_error *err)
{
    struct engine_generation *now = &engine->now;
    uint32_t working = now->world - now->layout.idle;
    struct scope_ranks rooms[2];
    struct mu_nccl_config config = {
        .group = now->group, .rank = now->rank, .world = working, .waiting = engine_set_waiting, .waiting_ctx = engine};
    if (!assign->nccl || now->idle || working < 2)
        return MU_OK;
    if (!engine->nccl || mu_device_is_host(engine->device))
        return mu_fail(err, MU_ERR_INVALID, "assigned to exchange with NCCL, but this worker has none");
    config.scopes[MU_NCCL_TENSOR] = members_of(now, MU_NCCL_TENSOR, &rooms[0]);
    config.scopes[MU_NCCL_REPLICAS] = members_of(now, MU_NCCL_REPLICAS, &rooms[1]);
    if (config.scopes[MU_NCCL_TENSOR].size == 0 && config.scopes[MU_NCCL_REPLICAS].size == 0)
        return MU_OK; /* between stages blocks go over the sockets */
    uint64_t begin_us = mu_clock_mono_us(), deadline_us = begin_us + (uint64_t)engine->connect_timeout_ms * 1000;
    engine_set_waiting(engine, true);
    enum mu_status status = meet(engine, working, deadline_us, &now->meeting, err);
    if (status == MU_OK)
        config.ids = engine->nccl->meeting_ids(now->meeting, &config.id_count);
    if (status == MU_OK)
        status = open_link(engine, assign, &config, deadline_us, err);
    engine_set_waiting(engine, false);
    if (status == MU_OK) {
        uint32_t version = engine->nccl->version();
        MU_LOGI("generation %llu: %u GPUs exchange with NCCL %u.%u.%u, connected in %llu ms",
                (unsigned long long)now->generation, working, version / 10000, version / 100 % 100, version % 100,
                (unsigned long long)(mu_clock_mono_us() - begin_us) / 1000);
    }
    return status;
}

enum mu_status engine_nccl_failure(struct mu_engine *engine, struct mu_error *err)
{
    const struct mu_nccl_link *link = &engine->now.link;
    return link->nccl ? link->ops->progress(link->nccl, err) : MU_OK;
}

/* What hangs inside NCCL or the driver may write to memory at any time: nothing of it may be used again. */
static void give_up(struct mu_engine *engine, struct mu_nccl *nccl)
{
    struct mu_error err = {0};
    if (engine->nccl->abort(nccl, mu_clock_mono_us() + ENGINE_NCCL_ABORT_US, &err) == MU_OK)
        return;
    MU_LOGE("%s", err.text);
    _exit(ENGINE_NCCL_EXIT);
}

void engine_nccl_end(struct mu_engine *engine, struct engine_generation *generation)
{
    struct mu_nccl *nccl = generation->link.nccl;
    if (!nccl)
        return;
    give_up(engine, nccl);
    engine->nccl->free(nccl);
    generation->link.nccl = NULL;
}

void engine_nccl_watch(void *ctx)
{
    struct mu_engine *engine = ctx;
    uint64_t now_us = mu_clock_mono_us();
    if (!engine->now.link.nccl || engine->nccl_over || now_us - engine->watched_us < ENGINE_POLL_US)
        return;
    engine->watched_us = now_us;
    atomic_fetch_add_explicit(&engine->progress, 1, memory_order_relaxed);
    if (engine_nccl_failure(engine, NULL) == MU_OK)
        return;
    engine->nccl_over = true;
    give_up(engine, engine->now.link.nccl);
}
