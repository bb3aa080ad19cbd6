#include "worker/engine_internal.h"

#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/fault.h"
#include "common/log.h"
#include "common/flight.h"
#include "plan/pipeline.h"
#include "plan/plan.h"

/* ---- what is allowed ---- */

static enum mu_status check_leaf_counts(const struct engine_job *job, const struct mu_assign *assign,
                                        struct mu_error *err)
{
    uint64_t leaves = 0;
    for (uint32_t i = 0; assign->leaf_counts && i < assign->layout.dp; i++)
        leaves += assign->leaf_counts[i];
    if (!assign->leaf_counts || leaves == job->leaves)
        return MU_OK;
    return mu_fail(err, MU_ERR_INVALID, "leaf counts of %llu leaves are not allowed: the job has %u",
                   (unsigned long long)leaves, job->leaves);
}

static enum mu_status check_assign(const struct mu_engine *engine, const struct mu_assign *assign, struct mu_error *err)
{
    const struct engine_job *job = &engine->job;
    if (engine->phase == ENGINE_EMPTY)
        return mu_fail(err, MU_ERR_CONFLICT, "assigned before a job was loaded");
    enum mu_status status = mu_layout_check(&assign->layout, &job->spec, err);
    if (status != MU_OK)
        return status;
    if (assign->rank >= mu_layout_world(&assign->layout))
        return mu_fail(err, MU_ERR_INVALID, "rank %u of %u is not allowed", assign->rank,
                       mu_layout_world(&assign->layout));
    status = check_leaf_counts(job, assign, err);
    if (status == MU_OK && assign->start_step > mu_job_end(&job->spec))
        status = mu_fail(err, MU_ERR_INVALID, "start at step %llu is not allowed: the job ends at %llu",
                         (unsigned long long)assign->start_step, (unsigned long long)mu_job_end(&job->spec));
    return status;
}

/* ---- layout and connections ---- */

static void fill_generation(struct mu_engine *engine, const struct engine_command *command)
{
    const struct mu_assign *assign = &command->assign;
    struct engine_generation *now = &engine->now;
    now->generation = command->generation;
    now->start_step = assign->start_step;
    now->layout = assign->layout;
    now->rank = assign->rank;
    now->world = mu_layout_world(&assign->layout);
    now->idle = mu_layout_is_idle(&assign->layout, assign->rank);
    now->link = (struct mu_nccl_link){.ops = engine->nccl, .device = engine->device};
    for (int track = 0; track < MU_TRACKS && engine->nccl; track++)
        now->link.streams[track] = engine->nccl->stream(engine->device, (enum mu_track)track);
    engine->nccl_over = false;
    now->merged = engine->job.spec.numerics == MU_NUMERICS_FAST;
    if (now->idle)
        return;
    now->at = mu_layout_coords(&now->layout, now->rank);
    now->first_leaf =
        mu_plan_leaf_range(engine->job.leaves, now->layout.dp, assign->leaf_counts, now->at.d, &now->leaf_count);
    now->first_eval_leaf =
        mu_plan_leaf_range(engine->job.eval_leaves, now->layout.dp, NULL, now->at.d, &now->eval_leaf_count);
}

static enum mu_status open_group(struct mu_engine *engine, const struct engine_command *command, struct mu_error *err)
{
    const struct mu_assign *assign = &command->assign;
    if (engine->now.world == 1)
        return MU_OK;
    struct mu_comm_peer *peers = calloc(assign->peer_count + 1u, sizeof *peers);
    if (!peers)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for %u peers", assign->peer_count);
    for (uint32_t i = 0; i < assign->peer_count; i++)
        peers[i] = (struct mu_comm_peer){.rank = assign->peers[i].rank,
                                         .incarnation = assign->peers[i].incarnation,
                                         .address = assign->peers[i].address};
    struct mu_comm_group_config config = {.generation = command->generation,
                                          .rank = assign->rank,
                                          .world = engine->now.world,
                                          .incarnation = command->id,
                                          .peers = peers,
                                          .peer_count = assign->peer_count,
                                          .encrypted = engine->job.spec.data_tls};
    memcpy(config.secret, assign->secret, sizeof config.secret);
    uint64_t deadline_us = mu_clock_mono_us() + (uint64_t)engine->connect_timeout_ms * 1000;
    enum mu_status status = mu_comm_open(engine->comm, &config, deadline_us, &engine->now.group, err);
    free(peers);
    return status;
}

static enum mu_status wait_connected(struct mu_engine *engine, struct mu_error *err)
{
    if (!engine->now.group)
        return MU_OK;
    engine_set_waiting(engine, true);
    enum mu_status status = mu_comm_wait_ready(engine->now.group, MU_COMM_FOREVER, err);
    engine_set_waiting(engine, false);
    const char *kernel;
    size_t encrypted = status == MU_OK ? mu_comm_group_encrypted(engine->now.group, &kernel) : 0;
    if (encrypted > 0)
        MU_LOGI("generation %llu: %zu connections to other hosts are encrypted (TLS 1.3); kernel TLS: %s",
                (unsigned long long)engine->now.generation, encrypted, kernel);
    MU_FAULT("worker.prepare.connect");
    return status;
}

/* ---- exchanges ---- */

/* Ranks with the same column, by replica; an idle rank is alone. */
static uint32_t *replica_ranks(const struct engine_generation *now, uint32_t *ret_count)
{
    uint32_t count = now->idle ? 1 : now->layout.dp;
    uint32_t *ranks = calloc(count, sizeof *ranks);
    *ret_count = count;
    for (uint32_t d = 0; ranks && d < count; d++)
        ranks[d] = now->idle ? now->rank : mu_layout_rank(&now->layout, (struct mu_coords){now->at.t, d, now->at.p});
    return ranks;
}

/* What the exchange knows as leaves. Merged: one for each replica that has any; *ret_counts is NULL when all have. */
static enum mu_status exchanged_leaves(const struct mu_engine *engine, const struct mu_assign *assign,
                                       uint32_t *ret_leaves, uint32_t **ret_counts, struct mu_error *err)
{
    uint32_t replicas = assign->layout.dp, *counts = NULL;
    *ret_leaves = engine->now.merged && !engine->now.idle ? replicas : engine->job.leaves;
    *ret_counts = NULL;
    if (engine->now.idle || !assign->leaf_counts)
        return MU_OK;
    if (!(counts = calloc(replicas, sizeof *counts)))
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for %u replicas", replicas);
    memcpy(counts, assign->leaf_counts, replicas * sizeof *counts);
    for (uint32_t d = 0; d < replicas && engine->now.merged; d++) {
        *ret_leaves -= counts[d] == 0;
        counts[d] = counts[d] > 0;
    }
    *ret_counts = counts;
    return MU_OK;
}

static uint32_t replica_of(const struct engine_generation *now, uint32_t rank)
{
    return rank == MU_LAYOUT_NOBODY ? MU_REDUCE_NO_BUDDY : mu_layout_coords(&now->layout, rank).d;
}

static enum mu_status new_reduce(struct mu_engine *engine, const struct mu_assign *assign, struct mu_error *err)
{
    struct engine_generation *now = &engine->now;
    struct engine_runs column;
    uint32_t replicas, leaves, *counts, *ranks = replica_ranks(now, &replicas);
    if (!ranks)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for %u replicas", replicas);
    enum mu_status status = exchanged_leaves(engine, assign, &leaves, &counts, err);
    if (status != MU_OK) {
        free(ranks);
        return status;
    }
    engine_runs_of(&engine->job.model, &now->layout, now->rank, MU_SHARE_PARAMS, &column);
    struct mu_reduce_config config = {.model = &engine->job.model,
                                      .pool = engine->pool,
                                      .leaves = leaves,
                                      .replicas = replicas,
                                      .index = now->idle ? 0 : now->at.d,
                                      .ranks = ranks,
                                      .leaf_counts = counts,
                                      .runs = column.runs,
                                      .run_count = column.count,
                                      .sharded = now->layout.sharded,
                                      .buddy = replica_of(now, mu_layout_buddy(&now->layout, now->rank)),
                                      .guarded = replica_of(now, mu_layout_guarded(&now->layout, now->rank)),
                                      .world = now->world,
                                      .rank = now->rank,
                                      .gpus = assign->nccl && !now->idle,
                                      .staging_bytes = MU_ENGINE_STAGING_BYTES};
    status = mu_reduce_new(&config, &now->reduce, err);
    free(counts);
    free(ranks);
    return status;
}

static enum mu_status new_tensor(struct mu_engine *engine, struct mu_error *err)
{
    struct engine_generation *now = &engine->now;
    uint32_t ranks[MU_SLICES_MAX], size = now->layout.tp;
    if (now->idle || size == 1)
        return MU_OK;
    for (uint32_t t = 0; t < size; t++)
        ranks[t] = mu_layout_rank(&now->layout, (struct mu_coords){t, now->at.d, now->at.p});
    struct mu_tensor_comm_config config = {.group = now->group,
                                           .ranks = ranks,
                                           .size = size,
                                           .index = now->at.t,
                                           .device = engine->device,
                                           .link = &now->link,
                                           .waiting = engine_set_waiting,
                                           .waiting_ctx = engine};
    return mu_tensor_comm_new(&config, &now->tensor, err);
}

static enum mu_status new_buddy(struct mu_engine *engine, struct mu_error *err)
{
    struct engine_generation *now = &engine->now;
    struct mu_buddy_config config = {
        .model = &engine->job.model, .layout = &now->layout, .rank = now->rank, .group = now->group};
    if (now->idle || now->layout.dp > 1 || now->layout.buddy_shift == 0)
        return MU_OK;
    return mu_buddy_new(&config, &now->buddy, err);
}

static int64_t stage_rank(const struct engine_generation *now, int64_t stage)
{
    if (stage < 0 || stage >= (int64_t)now->layout.pp)
        return MU_PIPELINE_NO_RANK;
    return mu_layout_rank(&now->layout, (struct mu_coords){now->at.t, now->at.d, (uint32_t)stage});
}

static enum mu_status new_pipeline(struct mu_engine *engine, struct mu_error *err)
{
    struct engine_generation *now = &engine->now;
    if (now->idle || now->layout.pp == 1)
        return MU_OK;
    struct mu_pipeline_config config = {.group = now->group,
                                        .before = stage_rank(now, (int64_t)now->at.p - 1),
                                        .after = stage_rank(now, (int64_t)now->at.p + 1),
                                        .stage = now->at.p,
                                        .link = &now->link,
                                        .block_floats = mu_model_stream_elements(engine->job.net.model),
                                        .device = engine->device,
                                        .waiting = engine_set_waiting,
                                        .waiting_ctx = engine};
    enum mu_status status =
        engine_check_memory(engine, MU_MEMORY_DEVICE, mu_pipeline_bytes(&config), "blocks between stages", err);
    return status == MU_OK ? mu_pipeline_new(&config, &now->pipeline, err) : status;
}

/* ---- memory ---- */

static uint32_t slots_needed(const struct mu_engine *engine)
{
    const struct engine_generation *now = &engine->now;
    uint32_t micros = now->leaf_count * engine->job.spec.batch.accumulate;
    return micros > 0 ? mu_pipeline_slots(now->layout.pp, now->at.p, micros) : 1;
}

/* Everything that a step of the new generation touches, but the state: that depends on where it comes from. */
static enum mu_status reserve(struct mu_engine *engine, const struct mu_assign *assign, struct mu_error *err)
{
    struct engine_generation *now = &engine->now;
    struct engine_job *job = &engine->job;
    const struct mu_layout *layout = &now->layout;
    uint32_t depth = now->idle || now->merged ? 1 : mu_tree_buffers(job->leaves, now->first_leaf, now->leaf_count);
    enum mu_status status = new_reduce(engine, assign, err);
    if (status == MU_OK)
        status = engine_commit_stack(engine, depth > 0 ? depth : 1, layout, now->rank, err);
    if (status == MU_OK)
        status = engine_reserve_staging(engine, mu_reduce_staging_bytes(now->reduce), err);
    if (status == MU_OK)
        status = engine_reserve_snapshot(engine, layout, now->rank, err);
    if (status == MU_OK)
        status = engine_build_net(engine, layout, now->rank, slots_needed(engine), err);
    if (status == MU_OK)
        status = new_tensor(engine, err);
    if (status == MU_OK)
        status = new_pipeline(engine, err);
    if (status == MU_OK)
        status = new_buddy(engine, err);
    if (status == MU_OK)
        status = engine_tied_new(engine, err);
    if (status == MU_OK)
        mu_reduce_attach(now->reduce, now->group, &now->link, job->staging);
    return status;
}

/* ---- the whole ---- */

static enum mu_status prepare(struct mu_engine *engine, const struct engine_command *command, uint64_t *ret_bad,
                              struct mu_error *err)
{
    const struct mu_assign *assign = &command->assign;
    enum mu_status status = check_assign(engine, assign, err);
    if (status != MU_OK)
        return status;
    fill_generation(engine, command);
    status = open_group(engine, command, err);
    if (status == MU_OK)
        status = reserve(engine, assign, err);
    if (status == MU_OK)
        status = wait_connected(engine, err);
    if (status == MU_OK)
        status = engine_nccl_open(engine, assign, err);
    if (status == MU_OK)
        status = engine_get_state(engine, assign, ret_bad, err);
    return status;
}

void engine_prepare(struct mu_engine *engine, const struct engine_command *command)
{
    struct mu_error err = {0};
    uint64_t bad_checkpoint = 0;
    MU_FAULT("worker.assign");
    engine_feeds_drop(engine);
    engine_take_amendments(engine, &command->amendments);
    engine_take_assigned(engine, &command->assign);
    /* The newest generation that stepped stays open until Go; one that never did is superseded now. */
    engine_nccl_end(engine, &engine->now); /* it does not step any more: two sets would take memory of the GPU */
    if (engine->old.generation == 0) {
        engine->old = engine->now;
        memset(&engine->now, 0, sizeof engine->now);
    }
    engine_generation_close(engine, &engine->now);
    engine->now.generation = command->generation;
    engine_set_current(engine, command->generation);
    mu_flight_begin(MU_FLIGHT_PREPARE, command->generation);
    enum mu_status status = prepare(engine, command, &bad_checkpoint, &err);
    mu_flight_end(MU_FLIGHT_PREPARE, command->generation);
    if (status != MU_OK) {
        engine_park_failed(engine, status, &err, MU_PARK_PREPARE, bad_checkpoint);
        return;
    }
    engine->phase = ENGINE_PREPARED;
    MU_FAULT("worker.prepared");
    struct mu_worker_event event = {.kind = MU_WE_PREPARED,
                                    .parked = {.generation = command->generation, .held = engine_reported(engine)}};
    engine_post(engine, &event);
}
