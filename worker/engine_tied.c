/* A tied embedding on several stages: the first one owns it and looks up in it, the last one multiplies with a copy.
 *
 *   per leaf     last stage: gradient of the head, all micro-batches (head chain)  -->  first stage: adds its look-ups
 *   per update   first stage: updated parameters                                   -->  last stage: copy
 *
 * Head chains wait in buffers on the first stage, which is behind the last one in its backward passes, so that the last
 * one can go on with the next leaf. Between GPUs both move with NCCL, on a track of their own, in the order in which
 * both stages come to them: chains of a step, copy, chains of the next step. */
#include "worker/engine_internal.h"

#include <stdlib.h>

#include "common/clock.h"
#include "common/fault.h"
#include "kernels/kernels.h"
#include "worker/exchange.h"

enum {
    CHAINS_MAX = 2,
    COPY_FLOATS = 1 << 19, /* copied between two looks at the sockets */
};

struct engine_tied {
    bool first; /* stage */
    uint32_t peer;
    uint64_t offset, size; /* of the column's slices of the embedding, elements */

    /* head chains: on their way to the first stage */
    struct mu_arena *arena; /* first stage */
    float *chains[CHAINS_MAX];
    uint32_t chain_count;
    struct mu_comm_request requests[CHAINS_MAX]; /* last stage: only [0] */
    uint64_t expected, begun, done;

    /* the copy */
    struct mu_comm_request copy;
    uint64_t copies;
    bool copying;
};

static enum mu_status new_chains(struct mu_engine *engine, struct engine_tied *tied, uint32_t count,
                                 struct mu_error *err)
{
    size_t bytes = tied->size * sizeof(float);
    enum mu_status status = engine_check_memory(engine, MU_MEMORY_DEVICE, count * bytes,
                                                "gradients of the embedding from the last stage", err);
    if (status == MU_OK)
        status =
            mu_arena_new_on(engine->device, MU_MEMORY_DEVICE, count * mu_arena_piece_bytes(bytes), err, &tied->arena);
    for (uint32_t i = 0; i < count && status == MU_OK; i++)
        tied->chains[i] = mu_arena_take(tied->arena, bytes);
    tied->chain_count = count;
    return status;
}

enum mu_status engine_tied_new(struct mu_engine *engine, struct mu_error *err)
{
    struct engine_generation *now = &engine->now;
    const struct mu_model_spec *model = &engine->job.model;
    uint32_t last = now->layout.pp - 1;
    if (now->idle || last == 0 || (now->at.p != 0 && now->at.p != last) || !mu_model_is_tied(&model->config))
        return MU_OK;
    struct engine_tied *tied = calloc(1, sizeof *tied);
    if (!tied)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the embedding on two stages");
    now->tied = tied;
    const struct mu_model_part *part = &engine->job.net.part;
    uint32_t end = part->first_slice + part->slice_count;
    struct mu_cell head = mu_model_cell(model, mu_model_cell_index(model, MU_CELL_E, 0, part->first_slice)),
                   tail = mu_model_cell(model, mu_model_cell_index(model, MU_CELL_E, 0, end - 1));
    tied->first = now->at.p == 0;
    tied->peer = mu_layout_rank(&now->layout, (struct mu_coords){now->at.t, now->at.d, tied->first ? last : 0});
    tied->offset = head.offset;
    tied->size = tail.offset + tail.size - head.offset;
    if (!tied->first)
        return MU_OK;
    /* With long leaves the first stage is never a whole leaf behind. */
    return new_chains(engine, tied, engine->job.spec.batch.accumulate > last ? 1 : CHAINS_MAX, err);
}

void engine_tied_free(struct engine_tied *tied)
{
    if (!tied)
        return;
    mu_arena_free(tied->arena);
    free(tied);
}

/* ---- between GPUs ---- */

enum { POINT_COPY = LINK_POINT_TIED + CHAINS_MAX, POINT_SENT };
_Static_assert((int)POINT_SENT < (int)LINK_POINT_TIED + (int)LINK_POINTS_TIED, "points of this file");

static bool linked(const struct mu_engine *engine)
{
    return mu_nccl_link_open(&engine->now.link) != NULL;
}

static enum mu_status move(struct mu_engine *engine, bool send, uint64_t exchange, float *data, uint32_t point,
                           struct mu_error *err)
{
    const struct engine_tied *tied = engine->now.tied;
    const struct mu_nccl_move one = {.peer = tied->first ? 1 : 0,
                                     .send = send,
                                     .exchange = exchange,
                                     .data = data,
                                     .size_bytes = tied->size * sizeof *data};
    enum mu_status status = mu_nccl_link_exchange(&engine->now.link, MU_NCCL_TIED, MU_TRACK_TIED, &one, 1, err);
    mu_device_signal(engine->device, MU_TRACK_TIED, point);
    return status;
}

static enum mu_status wait_for(struct mu_engine *engine, const struct mu_comm_request *request, uint32_t point,
                               struct mu_error *err)
{
    if (linked(engine)) {
        mu_device_follow(engine->device, MU_TRACK_MAIN, point);
        return MU_OK;
    }
    engine_set_waiting(engine, true);
    enum mu_status status = mu_comm_wait(engine->now.group, request, MU_COMM_FOREVER, err);
    engine_set_waiting(engine, false);
    return status;
}

/* ---- head chains ---- */

static enum mu_status post_chain(struct mu_engine *engine, struct mu_error *err)
{
    struct engine_tied *tied = engine->now.tied;
    uint32_t slot = (uint32_t)(tied->begun % tied->chain_count);
    uint64_t number = exchange_counted(EXCHANGE_TIED_GRADIENT, tied->begun++);
    if (linked(engine))
        return move(engine, false, number, tied->chains[slot], LINK_POINT_TIED + slot, err);
    return mu_comm_recv(engine->now.group, tied->peer, number, tied->chains[slot], tied->size * sizeof(float),
                        &tied->requests[slot], err);
}

static enum mu_status post_chains(struct mu_engine *engine, struct mu_error *err)
{
    struct engine_tied *tied = engine->now.tied;
    enum mu_status status = MU_OK;
    if (linked(engine) && engine->now.gathering) /* the copy comes first: engine_tied_copy_begin */
        return MU_OK;
    while (status == MU_OK && tied->begun < tied->expected && tied->begun < tied->done + tied->chain_count)
        status = post_chain(engine, err);
    return status;
}

enum mu_status engine_tied_expect(struct mu_engine *engine, uint32_t leaves, struct mu_error *err)
{
    struct engine_tied *tied = engine->now.tied;
    if (!tied || !tied->first)
        return MU_OK;
    tied->expected += leaves;
    return post_chains(engine, err);
}

static enum mu_status put_chain(struct mu_engine *engine, float *into, const float *chain, uint64_t size, bool add)
{
    if (add)
        return mu_kernel_add(engine->pool, size, into, chain);
    for (uint64_t at = 0, floats; at < size; at += floats) {
        floats = size - at < COPY_FLOATS ? size - at : COPY_FLOATS;
        enum mu_status status = mu_device_copy(engine->device, into + at, chain + at, floats * sizeof(float));
        if (status != MU_OK)
            return status;
        mu_pool_poll(engine->pool);
        if (mu_pool_cancelled(engine->pool))
            return MU_ERR_CANCELLED;
    }
    return MU_OK;
}

enum mu_status engine_tied_take(struct mu_engine *engine, float *grads, bool add, struct mu_error *err)
{
    struct engine_tied *tied = engine->now.tied;
    MU_ASSERT(tied && tied->first && tied->done < tied->begun);
    uint32_t slot = (uint32_t)(tied->done % tied->chain_count);
    enum mu_status status = wait_for(engine, &tied->requests[slot], LINK_POINT_TIED + slot, err);
    if (status != MU_OK)
        return status;
    MU_FAULT("worker.tied.gradient");
    status = put_chain(engine, grads + tied->offset, tied->chains[slot], tied->size, add);
    if (status != MU_OK)
        return engine_model_failed(engine, status, "backward pass", err);
    tied->done++;
    return post_chains(engine, err);
}

enum mu_status engine_tied_send(struct mu_engine *engine, float *grads, struct mu_error *err)
{
    struct engine_tied *tied = engine->now.tied;
    MU_ASSERT(tied && !tied->first && tied->done == tied->begun);
    uint64_t number = exchange_counted(EXCHANGE_TIED_GRADIENT, tied->begun++);
    if (linked(engine))
        return move(engine, true, number, grads + tied->offset, POINT_SENT, err);
    return mu_comm_send(engine->now.group, tied->peer, number, grads + tied->offset, tied->size * sizeof(float),
                        &tied->requests[0], err);
}

enum mu_status engine_tied_sent(struct mu_engine *engine, struct mu_error *err)
{
    struct engine_tied *tied = engine->now.tied;
    if (!tied || tied->first || tied->done == tied->begun)
        return MU_OK;
    enum mu_status status = wait_for(engine, &tied->requests[0], POINT_SENT, err);
    if (status == MU_OK)
        tied->done = tied->begun;
    return status;
}

/* ---- the copy ---- */

enum mu_status engine_tied_copy_begin(struct mu_engine *engine, struct mu_error *err)
{
    struct engine_tied *tied = engine->now.tied;
    if (!tied)
        return MU_OK;
    MU_ASSERT(!tied->copying);
    float *params = engine->job.state.flats[0] + tied->offset;
    size_t bytes = tied->size * sizeof(float);
    uint64_t number = exchange_counted(EXCHANGE_TIED_COPY, tied->copies++);
    tied->copying = true;
    MU_FAULT("worker.tied.copy");
    if (linked(engine)) {
        enum mu_status status = move(engine, tied->first, number, params, POINT_COPY, err);
        return status == MU_OK && tied->first ? post_chains(engine, err) : status;
    }
    if (tied->first)
        return mu_comm_send(engine->now.group, tied->peer, number, params, bytes, &tied->copy, err);
    return mu_comm_recv(engine->now.group, tied->peer, number, params, bytes, &tied->copy, err);
}

enum mu_status engine_tied_copy_finish(struct mu_engine *engine, bool sent, struct mu_error *err)
{
    struct engine_tied *tied = engine->now.tied;
    if (!tied || !tied->copying || (tied->first && !sent))
        return MU_OK;
    enum mu_status status = wait_for(engine, &tied->copy, POINT_COPY, err);
    if (status == MU_OK)
        tied->copying = false;
    return status;
}
