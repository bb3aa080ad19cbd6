#include "worker/pipeline.h"

#include <stdlib.h>

#include "common/fault.h"
#include "kernels/arena.h"
#include "worker/exchange.h"

enum { BLOCKS = 2 };

/* One flow in one direction. */
struct lane {
    int64_t rank;
    float *blocks[BLOCKS];
    struct mu_comm_request requests[BLOCKS];
    uint64_t begun;    /* blocks received for, or given to be sent */
    uint64_t done;     /* receiving: released; sending between GPUs: under way */
    uint64_t expected; /* receiving: announced */
};

struct mu_pipeline {
    struct mu_pipeline_config config;
    struct mu_arena *arena;
    struct lane in[2], out[2]; /* by flow */
};

static uint32_t neighbour_count(const struct mu_pipeline_config *config)
{
    return (uint32_t)(config->before != MU_PIPELINE_NO_RANK) + (uint32_t)(config->after != MU_PIPELINE_NO_RANK);
}

size_t mu_pipeline_bytes(const struct mu_pipeline_config *config)
{
    return 2 * BLOCKS * neighbour_count(config) * mu_arena_piece_bytes(config->block_floats * sizeof(float));
}

static void lane_init(struct mu_pipeline *pipeline, struct lane *lane, int64_t rank)
{
    lane->rank = rank;
    for (uint32_t i = 0; i < BLOCKS && rank != MU_PIPELINE_NO_RANK; i++)
        lane->blocks[i] = mu_arena_take(pipeline->arena, pipeline->config.block_floats * sizeof(float));
}

enum mu_status mu_pipeline_new(const struct mu_pipeline_config *config, struct mu_pipeline **ret_pipeline,
                               struct mu_error *err)
{
    MU_ASSERT(neighbour_count(config) > 0 && config->block_floats > 0);
    struct mu_pipeline *pipeline = calloc(1, sizeof *pipeline);
    if (!pipeline)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the stage of a pipeline");
    pipeline->config = *config;
    enum mu_status status =
        mu_arena_new_on(config->device, MU_MEMORY_DEVICE, mu_pipeline_bytes(config), err, &pipeline->arena);
    if (status != MU_OK) {
        free(pipeline);
        return mu_error_prefix(err, "blocks between stages");
    }
    lane_init(pipeline, &pipeline->in[MU_PIPELINE_ACTIVATIONS], config->before);
    lane_init(pipeline, &pipeline->out[MU_PIPELINE_ACTIVATIONS], config->after);
    lane_init(pipeline, &pipeline->in[MU_PIPELINE_GRADIENTS], config->after);
    lane_init(pipeline, &pipeline->out[MU_PIPELINE_GRADIENTS], config->before);
    *ret_pipeline = pipeline;
    return MU_OK;
}

void mu_pipeline_free(struct mu_pipeline *pipeline)
{
    if (!pipeline)
        return;
    mu_arena_free(pipeline->arena);
    free(pipeline);
}

static uint64_t number_of(enum mu_pipeline_flow flow, uint64_t count)
{
    return exchange_counted(flow == MU_PIPELINE_ACTIVATIONS ? EXCHANGE_ACTIVATION : EXCHANGE_GRADIENT, count);
}

static enum mu_status wait_for(struct mu_pipeline *pipeline, const struct mu_comm_request *request,
                               struct mu_error *err)
{
    const struct mu_pipeline_config *config = &pipeline->config;
    if (config->waiting)
        config->waiting(config->waiting_ctx, true);
    enum mu_status status = mu_comm_wait(config->group, request, MU_COMM_FOREVER, err);
    if (config->waiting)
        config->waiting(config->waiting_ctx, false);
    return status;
}

/* ---- between GPUs ---- */

static bool linked(const struct mu_pipeline *pipeline)
{
    return mu_nccl_link_open(pipeline->config.link) != NULL;
}

/* Reached when the block has come, or gone. */
static uint32_t point_of(const struct mu_pipeline *pipeline, const struct lane *lane, uint64_t block)
{
    _Static_assert((int)LINK_POINTS_STAGES == 4 * BLOCKS, "a point for each block");
    bool in = lane == &pipeline->in[0] || lane == &pipeline->in[1];
    uint32_t number = in ? (uint32_t)(lane - pipeline->in) : 2 + (uint32_t)(lane - pipeline->out);
    return LINK_POINT_STAGES + number * BLOCKS + (uint32_t)(block % BLOCKS);
}

static struct mu_nccl_move move_of(const struct mu_pipeline *pipeline, const struct lane *lane,
                                   enum mu_pipeline_flow flow, bool send, uint64_t block)
{
    const struct mu_pipeline_config *config = &pipeline->config;
    return (struct mu_nccl_move){.peer = lane->rank == config->before ? config->stage - 1 : config->stage + 1,
                                 .send = send,
                                 .exchange = number_of(flow, block),
                                 .data = lane->blocks[block % BLOCKS],
                                 .size_bytes = config->block_floats * sizeof(float)};
}

/* All blocks that wait to be sent, and the next one of flow `wanted` (-1: none), as one operation. */
static enum mu_status exchange(struct mu_pipeline *pipeline, int wanted, struct mu_error *err)
{
    struct mu_nccl_move moves[2 * BLOCKS + 1];
    uint32_t points[2 * BLOCKS + 1];
    size_t count = 0;
    for (int flow = 0; flow < 2; flow++) {
        struct lane *lane = &pipeline->out[flow];
        for (; lane->done < lane->begun; lane->done++, count++) {
            moves[count] = move_of(pipeline, lane, (enum mu_pipeline_flow)flow, true, lane->done);
            points[count] = point_of(pipeline, lane, lane->done);
        }
    }
    if (wanted >= 0) {
        struct lane *lane = &pipeline->in[wanted];
        moves[count] = move_of(pipeline, lane, (enum mu_pipeline_flow)wanted, false, lane->begun);
        points[count++] = point_of(pipeline, lane, lane->begun++);
    }
    if (count == 0)
        return MU_OK;
    enum mu_status status =
        mu_nccl_link_exchange(pipeline->config.link, MU_NCCL_STAGES, MU_TRACK_STAGES, moves, count, err);
    for (size_t i = 0; i < count && status == MU_OK; i++)
        mu_device_signal(pipeline->config.device, MU_TRACK_STAGES, points[i]);
    return status;
}

static void follow(struct mu_pipeline *pipeline, const struct lane *lane, uint64_t block)
{
    mu_device_follow(pipeline->config.device, MU_TRACK_MAIN, point_of(pipeline, lane, block));
}

/* ---- receiving ---- */

static enum mu_status post_receives(struct mu_pipeline *pipeline, enum mu_pipeline_flow flow, struct mu_error *err)
{
    struct lane *lane = &pipeline->in[flow];
    enum mu_status status = MU_OK;
    while (status == MU_OK && lane->begun < lane->expected && lane->begun < lane->done + BLOCKS) {
        uint64_t slot = lane->begun % BLOCKS;
        status =
            mu_comm_recv(pipeline->config.group, (uint32_t)lane->rank, number_of(flow, lane->begun), lane->blocks[slot],
                         pipeline->config.block_floats * sizeof(float), &lane->requests[slot], err);
        lane->begun++;
    }
    return status;
}

enum mu_status mu_pipeline_expect(struct mu_pipeline *pipeline, enum mu_pipeline_flow flow, uint64_t count,
                                  struct mu_error *err)
{
    struct lane *lane = &pipeline->in[flow];
    if (lane->rank == MU_PIPELINE_NO_RANK)
        return MU_OK;
    lane->expected += count;
    return linked(pipeline) ? MU_OK : post_receives(pipeline, flow, err);
}

enum mu_status mu_pipeline_receive(struct mu_pipeline *pipeline, enum mu_pipeline_flow flow, const float **ret_data,
                                   struct mu_error *err)
{
    struct lane *lane = &pipeline->in[flow];
    enum mu_status status = MU_OK;
    *ret_data = NULL;
    if (lane->rank == MU_PIPELINE_NO_RANK)
        return linked(pipeline) ? exchange(pipeline, -1, err) : MU_OK;
    MU_ASSERT(lane->done < lane->expected);
    MU_FAULT("worker.pipeline.receive");
    if (linked(pipeline)) {
        MU_ASSERT(lane->done == lane->begun);
        status = exchange(pipeline, (int)flow, err);
        follow(pipeline, lane, lane->done);
    } else {
        status = wait_for(pipeline, &lane->requests[lane->done % BLOCKS], err);
    }
    if (status == MU_OK)
        *ret_data = lane->blocks[lane->done % BLOCKS];
    return status;
}

enum mu_status mu_pipeline_release(struct mu_pipeline *pipeline, enum mu_pipeline_flow flow, struct mu_error *err)
{
    struct lane *lane = &pipeline->in[flow];
    if (lane->rank == MU_PIPELINE_NO_RANK)
        return MU_OK;
    lane->done++;
    return linked(pipeline) ? MU_OK : post_receives(pipeline, flow, err);
}

/* ---- sending ---- */

enum mu_status mu_pipeline_block(struct mu_pipeline *pipeline, enum mu_pipeline_flow flow, float **ret_data,
                                 struct mu_error *err)
{
    struct lane *lane = &pipeline->out[flow];
    enum mu_status status = MU_OK;
    *ret_data = NULL;
    if (lane->rank == MU_PIPELINE_NO_RANK)
        return MU_OK;
    uint64_t slot = lane->begun % BLOCKS;
    if (linked(pipeline)) {
        if (lane->begun == lane->done + BLOCKS)
            status = exchange(pipeline, -1, err);
        if (lane->begun >= BLOCKS)
            follow(pipeline, lane, lane->begun - BLOCKS);
    } else if (lane->begun >= BLOCKS && !mu_comm_done(&lane->requests[slot])) {
        status = wait_for(pipeline, &lane->requests[slot], err);
    }
    if (status == MU_OK)
        *ret_data = lane->blocks[slot];
    return status;
}

enum mu_status mu_pipeline_send(struct mu_pipeline *pipeline, enum mu_pipeline_flow flow, struct mu_error *err)
{
    struct lane *lane = &pipeline->out[flow];
    if (lane->rank == MU_PIPELINE_NO_RANK)
        return MU_OK;
    uint64_t slot = lane->begun % BLOCKS, number = number_of(flow, lane->begun);
    lane->begun++;
    MU_FAULT("worker.pipeline.send");
    if (linked(pipeline))
        return MU_OK;
    return mu_comm_send(pipeline->config.group, (uint32_t)lane->rank, number, lane->blocks[slot],
                        pipeline->config.block_floats * sizeof(float), &lane->requests[slot], err);
}

enum mu_status mu_pipeline_flush(struct mu_pipeline *pipeline, struct mu_error *err)
{
    return linked(pipeline) ? exchange(pipeline, -1, err) : MU_OK;
}
