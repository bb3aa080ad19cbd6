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

/* ---- who is with whom ---- */

struct scopes {
    struct mu_nccl_members of[MU_NCCL_SCOPES];
    uint32_t *ranks; /* all of them, one scope after the other */
};

static uint32_t *add_scope(struct scopes *scopes, enum mu_nccl_scope scope, uint32_t *room, uint32_t size,
                           uint32_t index)
{
    scopes->of[scope] = (struct mu_nccl_members){.ranks = room, .size = size, .index = index};
    return room + size;
}

/* The ranks of this one's tensor group, its replicas, its stages, and the two of them that have a tied embedding;
 * whoever has none is alone there. */
static enum mu_status find_scopes(const struct mu_engine *engine, struct scopes *scopes, struct mu_error *err)
{
    const struct engine_generation *now = &engine->now;
    const struct mu_layout *layout = &now->layout;
    uint32_t tp = layout->tp, dp = layout->dp, pp = layout->pp;
    uint32_t *room = scopes->ranks = calloc(tp + dp + pp + 2u, sizeof *room);
    if (!room)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the ranks of %u groups", (uint32_t)MU_NCCL_SCOPES);
    if (tp > 1) {
        for (uint32_t t = 0; t < tp; t++)
            room[t] = mu_layout_rank(layout, (struct mu_coords){t, now->at.d, now->at.p});
        room = add_scope(scopes, MU_NCCL_TENSOR, room, tp, now->at.t);
    }
    if (dp > 1) {
        for (uint32_t d = 0; d < dp; d++)
            room[d] = mu_layout_rank(layout, (struct mu_coords){now->at.t, d, now->at.p});
        room = add_scope(scopes, MU_NCCL_REPLICAS, room, dp, now->at.d);
    }
    for (uint32_t p = 0; p < pp && pp > 1; p++)
        room[p] = mu_layout_rank(layout, (struct mu_coords){now->at.t, now->at.d, p});
    if (pp > 1)
        room = add_scope(scopes, MU_NCCL_STAGES, room, pp, now->at.p);
    if (pp == 1 || !mu_model_is_tied(&engine->job.model.config))
        return MU_OK;
    bool middle = now->at.p > 0 && now->at.p < pp - 1;
    room[0] = middle ? now->rank : scopes->of[MU_NCCL_STAGES].ranks[0];
    room[1] = scopes->of[MU_NCCL_STAGES].ranks[pp - 1];
    add_scope(scopes, MU_NCCL_TIED, room, middle ? 1 : 2, !middle && now->at.p > 0);
    return MU_OK;
}

/* ---- opening ---- */

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

/* ---- first words ---- */

enum { WORD_BYTES = 256 };

/* Whom a rank will exchange with in a scope: its neighbours among stages; of the replicas those in its group, and at
 * its place in the others (reduce_nccl.c); else everybody. */
static bool will_exchange(enum mu_nccl_scope scope, const struct mu_nccl_members *members, uint32_t other)
{
    uint32_t own = members->index;
    if (other == own)
        return false;
    if (scope == MU_NCCL_STAGES)
        return other + 1 == own || own + 1 == other;
    if (scope != MU_NCCL_REPLICAS)
        return true;
    struct mu_shard_group mine = mu_layout_shard_group(members->size, own);
    struct mu_shard_group theirs = mu_layout_shard_group(members->size, other);
    return mine.first == theirs.first || own - mine.first == other - theirs.first;
}

/* A word to each of them and one from each: 1 in its first byte where the sender records. NCCL connects two ranks when
 * both of them first exchange something, and the host waits for that: in a step, where one of them may come later, this
 * could be in a circle. */
static enum mu_status connect_scope(struct mu_engine *engine, enum mu_nccl_scope scope,
                                    const struct mu_nccl_members *members, uint8_t *words, struct mu_error *err)
{
    const struct mu_nccl_link *link = &engine->now.link;
    struct CUstream_st *stream = link->streams[MU_TRACK_MAIN];
    struct mu_nccl_move *moves = calloc(2u * members->size, sizeof *moves);
    uint8_t records = mu_device_records(engine->device), *own = words + (size_t)members->index * WORD_BYTES;
    size_t count = 0;
    if (!moves)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for words to %u ranks", members->size);
    enum mu_status status = mu_device_copy(engine->device, own, &records, sizeof records);
    if (status != MU_OK)
        mu_fail(err, status, "words of a group: %s", mu_device_trouble(engine->device));
    for (uint32_t i = 0; i < members->size; i++) {
        if (!will_exchange(scope, members, i))
            continue;
        moves[count++] = (struct mu_nccl_move){.peer = i, .send = true, .data = own, .size_bytes = WORD_BYTES};
        moves[count++] =
            (struct mu_nccl_move){.peer = i, .data = words + (size_t)i * WORD_BYTES, .size_bytes = WORD_BYTES};
    }
    if (status == MU_OK)
        status = link->ops->exchange(link->nccl, scope, moves, count, stream, err);
    if (status == MU_OK && scope == MU_NCCL_TENSOR)
        status = link->ops->all_gather(link->nccl, scope, words, WORD_BYTES, stream, err);
    free(moves);
    return status;
}

/* Do all members record, by their words? */
static bool all_record(struct mu_engine *engine, uint32_t size, const uint8_t *words)
{
    const void *view = NULL;
    bool all = size > 1 && mu_device_peek(engine->device, words, (size_t)size * WORD_BYTES, &view) == MU_OK;
    for (uint32_t i = 0; i < size && all; i++)
        all = ((const uint8_t *)view)[(size_t)i * WORD_BYTES] == 1;
    return all;
}

static enum mu_status connect(struct mu_engine *engine, const struct scopes *scopes, uint64_t deadline_us,
                              struct mu_error *err)
{
    const struct mu_nccl_link *link = &engine->now.link;
    uint32_t largest = 0;
    void *words = NULL;
    for (int scope = 0; scope < MU_NCCL_SCOPES; scope++)
        largest = scopes->of[scope].size > largest ? scopes->of[scope].size : largest;
    enum mu_status status =
        mu_device_allocate(engine->device, MU_MEMORY_DEVICE, (size_t)largest * WORD_BYTES, err, &words);
    for (int scope = MU_NCCL_SCOPES - 1; scope > MU_NCCL_WORLD && status == MU_OK; scope--)
        if (scopes->of[scope].size > 1)
            status = connect_scope(engine, (enum mu_nccl_scope)scope, &scopes->of[scope], words, err);
    if (status == MU_OK)
        status = link->ops->wait(link->nccl, link->streams[MU_TRACK_MAIN], deadline_us, err);
    if (status == MU_OK) /* the words of the tensor group came last */
        engine->now.records = all_record(engine, scopes->of[MU_NCCL_TENSOR].size, words);
    if (status != MU_OK) /* it may still be written to: give_up, before it is given back */
        engine_nccl_end(engine, &engine->now);
    mu_device_release(engine->device, MU_MEMORY_DEVICE, words, (size_t)largest * WORD_BYTES);
    return status;
}

/* ---- the whole ---- */

static void log_opened(const struct mu_engine *engine, const struct mu_nccl_config *config, uint32_t working,
                       uint64_t begin_us)
{
    static const struct {
        enum mu_nccl_scope scope;
        const char *text;
    } groups[] = {{MU_NCCL_TENSOR, "tensor group of %u"},
                  {MU_NCCL_REPLICAS, "%u replicas"},
                  {MU_NCCL_STAGES, "%u stages"},
                  {MU_NCCL_TIED, "tied embedding on %u stages"}};
    uint32_t version = engine->nccl->version();
    char text[160] = "";
    for (size_t i = 0, used = 0; i < sizeof groups / sizeof groups[0]; i++) {
        uint32_t size = config->scopes[groups[i].scope].size;
        if (size < 2)
            continue;
        used += (size_t)snprintf(text + used, sizeof text - used, "%s", used > 0 ? ", " : "");
        used += (size_t)snprintf(text + used, sizeof text - used, groups[i].text, size);
    }
    MU_LOGI("generation %llu: %u GPUs exchange with NCCL %u.%u.%u (here: %s), connected in %llu ms",
            (unsigned long long)engine->now.generation, working, version / 10000, version / 100 % 100, version % 100,
            text, (unsigned long long)(mu_clock_mono_us() - begin_us) / 1000);
}

enum mu_status engine_nccl_open(struct mu_engine *engine, const struct mu_assign *assign, struct mu_error *err)
{
    struct engine_generation *now = &engine->now;
    uint32_t working = now->world - now->layout.idle;
    struct scopes scopes = {0};
    struct mu_nccl_config config = {
        .group = now->group, .rank = now->rank, .world = working, .waiting = engine_set_waiting, .waiting_ctx = engine};
    if (!assign->nccl || now->idle || working < 2)
        return MU_OK;
    if (!engine->nccl || mu_device_is_host(engine->device))
        return mu_fail(err, MU_ERR_INVALID, "assigned to exchange with NCCL, but this worker has none");
    uint64_t begin_us = mu_clock_mono_us(), deadline_us = begin_us + (uint64_t)engine->connect_timeout_ms * 1000;
    enum mu_status status = find_scopes(engine, &scopes, err);
    memcpy(config.scopes, scopes.of, sizeof config.scopes);
    engine_set_waiting(engine, true);
    if (status == MU_OK)
        status = meet(engine, working, deadline_us, &now->meeting, err);
    if (status == MU_OK)
        config.ids = engine->nccl->meeting_ids(now->meeting, &config.id_count);
    if (status == MU_OK)
        status = open_link(engine, assign, &config, deadline_us, err);
    if (status == MU_OK)
        status = connect(engine, &scopes, deadline_us, err);
    engine_set_waiting(engine, false);
    free(scopes.ranks);
    if (status == MU_OK)
        log_opened(engine, &config, working, begin_us);
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
    mu_device_forget(engine->device); /* NCCL waits for the end of whatever has recorded it */
    if (engine->nccl->abort(nccl, mu_clock_mono_us() + ENGINE_NCCL_ABORT_US, &err) == MU_OK)
        return;
    MU_LOGE("%s", err.text);
    if (engine->callbacks.stuck)
        engine->callbacks.stuck(engine->callbacks.ctx, err.text);
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
