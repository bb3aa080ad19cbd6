#include "worker/engine_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/fault.h"
#include "kernels/kernels.h"
#include "plan/plan.h"
#include "storage/manifest.h"

/* ---- layout and connections ---- */

static enum mu_status check_assign(const struct mu_engine *engine, const struct mu_assign *assign, struct mu_error *err)
{
    const struct engine_job *job = &engine->job;
    if (engine->phase == ENGINE_EMPTY)
        return mu_fail(err, MU_ERR_CONFLICT, "assigned before a job was loaded");
    if (assign->world == 0 || assign->world > MU_WORKERS_MAX || assign->rank >= assign->world)
        return mu_fail(err, MU_ERR_INVALID, "rank %u of %u is not allowed", assign->rank, assign->world);
    if (assign->mesh && assign->world > MU_MESH_WORLD_MAX)
        return mu_fail(err, MU_ERR_INVALID, "a mesh of %u ranks is not allowed: at most %d", assign->world,
                       MU_MESH_WORLD_MAX);
    uint64_t leaves = 0;
    for (uint32_t i = 0; assign->leaf_counts && i < assign->world; i++)
        leaves += assign->leaf_counts[i];
    if (assign->leaf_counts && leaves != job->leaves)
        return mu_fail(err, MU_ERR_INVALID, "leaf counts of %llu leaves are not allowed: the job has %u",
                       (unsigned long long)leaves, job->leaves);
    if (assign->start_step > job->spec.steps)
        return mu_fail(err, MU_ERR_INVALID, "start at step %llu is not allowed: the job ends at %llu",
                       (unsigned long long)assign->start_step, (unsigned long long)job->spec.steps);
    return MU_OK;
}

static void fill_generation(struct mu_engine *engine, const struct engine_command *command)
{
    const struct mu_assign *assign = &command->assign;
    struct engine_generation *now = &engine->now;
    now->generation = command->generation;
    now->start_step = assign->start_step;
    now->rank = assign->rank;
    now->world = assign->world;
    now->first_leaf =
        mu_plan_leaf_range(engine->job.leaves, assign->world, assign->leaf_counts, assign->rank, &now->leaf_count);
    now->first_eval_leaf =
        mu_plan_leaf_range(engine->job.eval_leaves, assign->world, NULL, assign->rank, &now->eval_leaf_count);
}

static enum mu_status open_group(struct mu_engine *engine, const struct engine_command *command, struct mu_error *err)
{
    const struct mu_assign *assign = &command->assign;
    if (assign->world == 1)
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
                                          .world = assign->world,
                                          .incarnation = command->id,
                                          .peers = peers,
                                          .peer_count = assign->peer_count};
    memcpy(config.secret, assign->secret, sizeof config.secret);
    uint64_t deadline_us = mu_clock_mono_us() + (uint64_t)engine->connect_timeout_ms * 1000;
    enum mu_status status = mu_comm_open(engine->comm, &config, deadline_us, &engine->now.group, err);
    free(peers);
    return status;
}

static enum mu_status make_reduce(struct mu_engine *engine, const struct mu_assign *assign, struct mu_error *err)
{
    struct engine_generation *now = &engine->now;
    struct mu_reduce_config config = {.model = &engine->job.model,
                                      .pool = engine->pool,
                                      .leaves = engine->job.leaves,
                                      .world = assign->world,
                                      .rank = assign->rank,
                                      .leaf_counts = assign->leaf_counts,
                                      .mesh = assign->mesh,
                                      .staging_bytes = MU_ENGINE_STAGING_BYTES};
    enum mu_status status = mu_reduce_new(&config, &now->reduce, err);
    if (status == MU_OK)
        status =
            engine_reserve_stack(engine, mu_tree_buffers(engine->job.leaves, now->first_leaf, now->leaf_count), err);
    if (status == MU_OK)
        status = engine_reserve_staging(engine, mu_reduce_staging_bytes(now->reduce), err);
    if (status == MU_OK)
        status = engine_reserve_snapshot(engine, assign->world, err);
    if (status == MU_OK)
        mu_reduce_attach(now->reduce, now->group, engine->job.staging);
    return status;
}

static enum mu_status wait_connected(struct mu_engine *engine, struct mu_error *err)
{
    if (!engine->now.group)
        return MU_OK;
    engine_set_waiting(engine, true);
    enum mu_status status = mu_comm_wait_ready(engine->now.group, MU_COMM_FOREVER, err);
    engine_set_waiting(engine, false);
    MU_FAULT("worker.prepare.connect");
    return status;
}

/* ---- state: where it comes from ---- */

/* Where incoming state goes: not over a state that is held and was reported, until the new one is complete. */
static enum mu_status destination(struct mu_engine *engine, struct engine_state **ret_state, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    if (!engine->held.has_state) {
        *ret_state = &job->state;
        return MU_OK;
    }
    if (!job->incoming.arena) {
        enum mu_status status = engine_state_new(&job->model, &job->incoming, err);
        if (status != MU_OK)
            return status;
    }
    *ret_state = &job->incoming;
    return MU_OK;
}

/* The complete, verified state of `step` is in `state`. */
static void accept_state(struct mu_engine *engine, struct engine_state *state, uint64_t step)
{
    struct engine_job *job = &engine->job;
    if (state == &job->incoming) {
        struct engine_state old = job->state;
        job->state = job->incoming;
        job->incoming = old;
    }
    engine->held = (struct mu_held){.has_state = true, .step = step};
}

static enum mu_status use_held(struct mu_engine *engine, const struct mu_assign *assign, struct mu_error *err)
{
    if (engine->held.has_state && engine->held.step == assign->start_step)
        return MU_OK;
    return mu_fail(err, MU_ERR_CONFLICT, "told to go on from held step %llu, but this worker holds %s step %llu",
                   (unsigned long long)assign->start_step, engine->held.has_state ? "" : "nothing, not",
                   (unsigned long long)engine->held.step);
}

static enum mu_status roll_forward(struct mu_engine *engine, const struct mu_assign *assign, struct mu_error *err)
{
    const struct mu_held *held = &engine->held;
    if (!held->has_state || !held->has_gradient || held->step + 1 != assign->start_step ||
        assign->roll_forward.step != held->step)
        return mu_fail(err, MU_ERR_CONFLICT, "told to roll forward to step %llu, but this worker holds %s at step %llu",
                       (unsigned long long)assign->start_step,
                       !held->has_state     ? "nothing"
                       : held->has_gradient ? "state and gradient"
                                            : "no gradient",
                       (unsigned long long)held->step);
    engine_apply(engine, &assign->roll_forward);
    return MU_OK;
}

static enum mu_status initialise(struct mu_engine *engine, const struct mu_assign *assign, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    struct engine_state *state;
    if (assign->start_step != 0)
        return mu_fail(err, MU_ERR_INVALID, "initial values for step %llu are not allowed: only for step 0",
                       (unsigned long long)assign->start_step);
    enum mu_status status = destination(engine, &state, err);
    if (status != MU_OK)
        return status;
    status = mu_model_init_parameters(&job->model, engine->pool, job->spec.seed, state->params);
    if (status == MU_OK)
        status = mu_kernel_fill(engine->pool, job->model.flat_size, 0.0f, state->m);
    if (status == MU_OK)
        status = mu_kernel_fill(engine->pool, job->model.flat_size, 0.0f, state->v);
    if (status != MU_OK)
        return mu_fail(err, status, "initialisation cancelled");
    accept_state(engine, state, 0);
    return MU_OK;
}

/* Sends state to the ranks that copy from this one, receives it from the one that serves it, or both. */
static enum mu_status transfer(struct mu_engine *engine, const struct mu_assign *assign, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    bool receive = assign->source == MU_SOURCE_PEER;
    struct engine_state *state = &job->state;
    if (!receive && assign->serve_count == 0)
        return MU_OK;
    if (!engine->now.group)
        return mu_fail(err, MU_ERR_INVALID, "a rank alone cannot copy state from a peer");
    enum mu_status status = receive ? destination(engine, &state, err) : MU_OK;
    if (status != MU_OK)
        return status;
    struct mu_transfer_config config = {.model = &job->model,
                                        .group = engine->now.group,
                                        .flats = {state->params, state->m, state->v},
                                        .step = assign->start_step,
                                        .receive = receive,
                                        .source_rank = assign->source_rank,
                                        .serve_ranks = assign->serve_ranks,
                                        .serve_count = assign->serve_count,
                                        .progress = &engine->progress};
    status = mu_transfer_new(&config, &engine->now.transfer, err);
    MU_FAULT("worker.prepare.transfer");
    engine_set_waiting(engine, true);
    if (status == MU_OK)
        status = mu_transfer_run(engine->now.transfer, err);
    engine_set_waiting(engine, false);
    if (status == MU_OK && receive)
        accept_state(engine, state, assign->start_step);
    return status;
}

/* ---- state from a checkpoint ---- */

struct loader {
    const struct mu_model_spec *model;
    struct engine_state *state;
};

/* A piece's entries were checked against its manifest's, and those against the model, before this is called. */
static float *place_entry(void *arg, const struct mu_piece_entry *entry)
{
    const struct loader *loader = arg;
    if (entry->offset > loader->model->flat_size || entry->size > loader->model->flat_size - entry->offset)
        return NULL;
    switch (entry->kind) {
    case MU_PIECE_PARAMETERS:
        return loader->state->params + entry->offset;
    case MU_PIECE_MOMENT1:
        return loader->state->m + entry->offset;
    case MU_PIECE_MOMENT2:
        return loader->state->v + entry->offset;
    case MU_PIECE_META:
    case MU_PIECE_KIND_COUNT:
        break;
    }
    return NULL;
}

static enum mu_status check_manifest(const struct mu_engine *engine, const struct mu_assign *assign,
                                     const struct mu_manifest *manifest, struct mu_error *err)
{
    const struct mu_checkpoint_identity *identity = &manifest->identity;
    if (strcmp(identity->job, engine->job.spec.name) != 0 || identity->seq != assign->checkpoint ||
        identity->step != assign->start_step)
        return mu_fail(
            err, MU_ERR_CORRUPT,
            "'%s' holds checkpoint %llu of job '%s' at step %llu, not checkpoint %llu of job '%s' at step %llu",
            assign->checkpoint_dir, (unsigned long long)identity->seq, identity->job,
            (unsigned long long)identity->step, (unsigned long long)assign->checkpoint, engine->job.spec.name,
            (unsigned long long)assign->start_step);
    return mu_manifest_check_tiling(manifest, &engine->job.model, err);
}

static enum mu_status load_pieces(struct mu_engine *engine, const char *dir, const struct mu_manifest *manifest,
                                  struct engine_state *state, struct mu_error *err)
{
    struct loader loader = {.model = &engine->job.model, .state = state};
    for (size_t i = 0; i < manifest->piece_count; i++) {
        const struct mu_manifest_piece *piece = &manifest->pieces[i];
        char path[MU_PATH_SIZE + MU_PIECE_FILE_NAME_SIZE + 1];
        snprintf(path, sizeof path, "%s/%s", dir, piece->file);
        struct mu_piece_expected expected = {.size_bytes = piece->size_bytes, .xxh3 = piece->xxh3};
        struct mu_piece_read_options options = {
            .resolve = place_entry, .arg = &loader, .expected = &expected, .abort = &engine->cancel};
        struct mu_checkpoint_identity identity;
        enum mu_status status = mu_piece_read(path, &options, &identity, err);
        if (status != MU_OK)
            return status;
        if (strcmp(identity.job, manifest->identity.job) != 0 || identity.seq != manifest->identity.seq ||
            identity.step != manifest->identity.step)
            return mu_fail(err, MU_ERR_CORRUPT,
                           "'%s' is a piece of checkpoint %llu of job '%s' at step %llu, not of this one", path,
                           (unsigned long long)identity.seq, identity.job, (unsigned long long)identity.step);
        atomic_fetch_add_explicit(&engine->progress, 1, memory_order_relaxed);
    }
    return MU_OK;
}

/* Gaps between cells are nobody's and in no piece: zero, as after initialisation. */
static void zero_gaps(const struct mu_model_spec *model, struct engine_state *state)
{
    for (uint32_t i = 0; i < model->cell_count; i++) {
        struct mu_cell cell = mu_model_cell(model, i);
        uint64_t begin = cell.offset + cell.size;
        uint64_t end = i + 1 < model->cell_count ? mu_model_cell(model, i + 1).offset : model->flat_size;
        size_t gap_bytes = (end - begin) * sizeof(float);
        memset(state->params + begin, 0, gap_bytes);
        memset(state->m + begin, 0, gap_bytes);
        memset(state->v + begin, 0, gap_bytes);
    }
}

static enum mu_status load_checkpoint(struct mu_engine *engine, const struct mu_assign *assign, uint64_t *ret_bad,
                                      struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    struct engine_state *state;
    struct mu_manifest *manifest = NULL;
    enum mu_status status = destination(engine, &state, err);
    if (status != MU_OK)
        return status;
    zero_gaps(&job->model, state);
    status = mu_manifest_read(assign->checkpoint_dir, &manifest, err);
    if (status == MU_OK)
        status = check_manifest(engine, assign, manifest, err);
    if (status == MU_OK)
        status = load_pieces(engine, assign->checkpoint_dir, manifest, state, err);
    if (status == MU_OK)
        accept_state(engine, state, assign->start_step);
    else if (status != MU_ERR_CANCELLED && status != MU_ERR_NO_MEMORY)
        *ret_bad = assign->checkpoint;
    mu_manifest_free(manifest);
    return status;
}

/* ---- the whole ---- */

/* Once connected. State that this rank makes or has itself first, then what moves between ranks. */
static enum mu_status get_state(struct mu_engine *engine, const struct mu_assign *assign, uint64_t *ret_bad,
                                struct mu_error *err)
{
    enum mu_status status = MU_OK;
    switch (assign->source) {
    case MU_SOURCE_HELD:
        status = use_held(engine, assign, err);
        break;
    case MU_SOURCE_ROLL_FORWARD:
        status = roll_forward(engine, assign, err);
        break;
    case MU_SOURCE_CHECKPOINT:
        status = load_checkpoint(engine, assign, ret_bad, err);
        break;
    case MU_SOURCE_INIT:
        status = initialise(engine, assign, err);
        break;
    case MU_SOURCE_PEER:
        break;
    }
    return status == MU_OK ? transfer(engine, assign, err) : status;
}

void engine_prepare(struct mu_engine *engine, const struct engine_command *command)
{
    const struct mu_assign *assign = &command->assign;
    struct mu_error err = {0};
    uint64_t bad_checkpoint = 0;
    MU_FAULT("worker.assign");
    /* The newest generation that stepped stays open until Go; one that never did is superseded now. */
    if (engine->old.generation == 0) {
        engine->old = engine->now;
        memset(&engine->now, 0, sizeof engine->now);
    }
    engine_generation_close(&engine->now);
    engine->now.generation = command->generation;
    engine_set_current(engine, command->generation);
    enum mu_status status = check_assign(engine, assign, &err);
    if (status == MU_OK) {
        fill_generation(engine, command);
        status = open_group(engine, command, &err);
    }
    if (status == MU_OK)
        status = make_reduce(engine, assign, &err);
    if (status == MU_OK)
        status = wait_connected(engine, &err);
    if (status == MU_OK)
        status = get_state(engine, assign, &bad_checkpoint, &err);
    if (status != MU_OK) {
        engine_park_failed(engine, status, &err, MU_PARK_PREPARE, bad_checkpoint);
        return;
    }
    engine->phase = ENGINE_PREPARED;
    MU_FAULT("worker.prepared");
    struct mu_worker_event event = {.kind = MU_WE_PREPARED,
                                    .parked = {.generation = command->generation, .held = engine->held}};
    engine_post(engine, &event);
}
