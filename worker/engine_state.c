/* The state that a generation starts from: what this rank holds already, makes itself, or gets by moves.
 *
 * What was reported as held stays intact until Go: what comes of the same step goes to other chunks of the same spaces,
 * a state of another step into spaces of its own. */
#include "worker/engine_internal.h"

#include <stdlib.h>
#include <string.h>

#include "common/fault.h"
#include "kernels/kernels.h"
#include "plan/amend.h"
#include "worker/holder.h"
#include "worker/load.h"

static struct mu_held_share own_share(const struct engine_generation *now)
{
    return (struct mu_held_share){.layout = now->layout, .rank = now->rank};
}

/* Parameters of a share that are of the step that is held: after an update those that it updated. */
static enum mu_share current_params(const struct mu_held_share *share)
{
    return share->owned_only && share->layout.sharded ? MU_SHARE_OWNED : MU_SHARE_PARAMS;
}

/* After a replicated update all is there but the copy of the tied embedding, for a moment. `owned_only` would say less:
 * that is the same as having all that one replica alone would own. Where the job does not allow one replica it says
 * less. */
struct mu_held engine_reported(const struct mu_engine *engine)
{
    struct mu_held held = engine->held;
    struct mu_held_share *share = &held.shares[0];
    if (held.share_count > 0 && share->owned_only && !share->layout.sharded && engine->job.spec.parallel.dp == 0) {
        struct mu_coords at = mu_layout_coords(&share->layout, share->rank);
        at.d = 0;
        share->layout.dp = 1;
        share->layout.idle = 0;
        share->rank = mu_layout_rank(&share->layout, at);
    }
    return held;
}

void engine_take_amendments(struct mu_engine *engine, const struct mu_amendments *amendments)
{
    struct mu_amendments *own = &engine->job.spec.amendments;
    bool was_rolled_back = mu_amend_era(own) != mu_amend_era(amendments);
    *own = *amendments;
    if (!was_rolled_back)
        return;
    engine_forget_arrived(engine);
    memset(&engine->held, 0, sizeof engine->held);
}

/* ---- where incoming state goes ---- */

void engine_forget_arrived(struct mu_engine *engine)
{
    free(engine->job.arrived.kinds);
    engine->job.arrived = (struct engine_arrived){0};
}

static enum mu_status new_incoming(struct mu_engine *engine, struct mu_error *err)
{
    engine_forget_arrived(engine);
    engine_state_free(&engine->job.incoming);
    return engine_state_new(engine, &engine->job.incoming, err);
}

/* Not over a state that is held, until the new one is complete; memory for this rank's share. What has arrived there
 * already stays where the state is to be of the same step. */
static enum mu_status destination(struct mu_engine *engine, bool in_place, uint64_t step,
                                  struct engine_state **ret_state, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    struct engine_state *state = in_place || !engine->held.has_state ? &job->state : &job->incoming;
    enum mu_status status = MU_OK;
    if (job->arrived.where != state || job->arrived.step != step)
        engine_forget_arrived(engine);
    if (state == &job->incoming && !job->arrived.where)
        status = new_incoming(engine, err);
    if (status == MU_OK)
        status = engine_commit_state(engine, state, &engine->now.layout, engine->now.rank, err);
    *ret_state = state;
    return status;
}

/* The complete, verified share of a state of another step, or of the first one, is in `state`. */
static void accept_new(struct mu_engine *engine, struct engine_state *state, uint64_t step)
{
    struct engine_job *job = &engine->job;
    engine_forget_arrived(engine);
    if (state == &job->incoming) {
        struct engine_state old = job->state;
        job->state = job->incoming;
        job->incoming = old;
    }
    engine->held = (struct mu_held){.has_state = true, .step = step, .share_count = 1};
    engine->held.shares[0] = own_share(&engine->now);
}

/* The new share is complete beside the ones that are held. */
static void accept_beside(struct mu_engine *engine)
{
    struct mu_held *held = &engine->held;
    for (uint32_t i = 0; i < held->share_count; i++) {
        struct mu_held_share *share = &held->shares[i];
        if (share->rank == engine->now.rank && mu_layout_equal(&share->layout, &engine->now.layout)) {
            share->owned_only = false;
            return;
        }
    }
    if (held->share_count == MU_HELD_SHARES_MAX) { /* the oldest that never ran makes room */
        memmove(&held->shares[1], &held->shares[2], (MU_HELD_SHARES_MAX - 2) * sizeof held->shares[1]);
        held->share_count--;
    }
    held->shares[held->share_count++] = own_share(&engine->now);
}

/* ---- made here ---- */

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
    if (held->has_state && held->has_gradient && held->step + 1 == assign->start_step &&
        assign->roll_forward.step == held->step)
        return engine_apply(engine, &assign->roll_forward, false, err);
    return mu_fail(err, MU_ERR_CONFLICT, "told to roll forward to step %llu, but this worker holds %s at step %llu",
                   (unsigned long long)assign->start_step,
                   !held->has_state     ? "nothing"
                   : held->has_gradient ? "state and gradient"
                                        : "no gradient",
                   (unsigned long long)held->step);
}

static enum mu_status zero_moments(struct mu_engine *engine, struct engine_state *state)
{
    struct engine_runs runs;
    enum mu_status status = MU_OK;
    engine_moment_runs(&engine->job.model, &engine->now.layout, engine->now.rank, &runs);
    for (uint32_t i = 0; i < runs.count && status == MU_OK; i++) {
        uint64_t offset, size;
        engine_run_range(&engine->job.model, &runs.runs[i], &offset, &size);
        status = mu_kernel_fill(engine->pool, size, 0.0f, state->flats[1] + offset);
        if (status == MU_OK)
            status = mu_kernel_fill(engine->pool, size, 0.0f, state->flats[2] + offset);
    }
    return status;
}

/* Parameters that another checkpoint begins with, instead of random ones. */
static enum mu_status load_initial(struct mu_engine *engine, const struct engine_runs *params,
                                   struct engine_state *state, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    struct mu_load_config config = {.dir = job->spec.init.path,
                                    .sha256 = job->spec.init.sha256,
                                    .model = &job->model,
                                    .params = params->runs,
                                    .params_count = params->count,
                                    .flats = {state->flats[0], state->flats[1], state->flats[2]},
                                    .device = engine->device,
                                    .cancel = &engine->cancel,
                                    .progress = &engine->progress};
    enum mu_status status = mu_load_checkpoint(&config, err);
    return status == MU_OK || status == MU_ERR_CANCELLED ? status : mu_error_prefix(err, "init.path");
}

static enum mu_status initialise(struct mu_engine *engine, const struct mu_assign *assign, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    struct engine_state *state;
    struct engine_runs runs;
    if (assign->start_step != 0)
        return mu_fail(err, MU_ERR_INVALID, "initial values for step %llu are not allowed: only for step 0",
                       (unsigned long long)assign->start_step);
    enum mu_status status = destination(engine, false, assign->start_step, &state, err);
    if (status != MU_OK)
        return status;
    engine_forget_arrived(engine); /* all is made anew */
    engine_touched_runs(&job->model, &engine->now.layout, engine->now.rank, &runs);
    if (job->spec.init.path[0]) {
        status = load_initial(engine, &runs, state, err);
        if (status != MU_OK)
            return status;
    } else {
        status =
            mu_model_init_parameters(&job->model, engine->pool, job->spec.seed, runs.runs, runs.count, state->flats[0]);
    }
    if (status == MU_OK)
        status = zero_moments(engine, state);
    if (status != MU_OK)
        return engine_model_failed(engine, status, "initialisation", err);
    accept_new(engine, state, 0);
    return MU_OK;
}

static enum mu_status load(struct mu_engine *engine, const struct mu_assign *assign, uint64_t *ret_bad,
                           struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    struct engine_state *state;
    struct engine_runs params, moments;
    enum mu_status status = destination(engine, false, assign->start_step, &state, err);
    if (status != MU_OK)
        return status;
    engine_forget_arrived(engine); /* all is made anew */
    engine_forget_arrived(engine);
    engine_touched_runs(&job->model, &engine->now.layout, engine->now.rank, &params);
    engine_moment_runs(&job->model, &engine->now.layout, engine->now.rank, &moments);
    char dir[MU_PATH_SIZE];
    memcpy(dir, assign->checkpoint_dir, sizeof dir);
    if (assign->holders && (status = mu_holder_path(assign->checkpoint_dir, engine->host, dir, err)) != MU_OK)
        return status;
    struct mu_load_config config = {.dir = dir,
                                    .host = engine->host,
                                    .holders = assign->holders,
                                    .holder_count = assign->holder_count,
                                    .job = assign->checkpoint_job[0] ? assign->checkpoint_job : job->spec.name,
                                    .checkpoint = assign->checkpoint,
                                    .step = assign->start_step,
                                    .model = &job->model,
                                    .params = params.runs,
                                    .moments = moments.runs,
                                    .params_count = params.count,
                                    .moments_count = moments.count,
                                    .flats = {state->flats[0], state->flats[1], state->flats[2]},
                                    .device = engine->device,
                                    .cancel = &engine->cancel,
                                    .progress = &engine->progress};
    status = mu_load_checkpoint(&config, err);
    if (status == MU_OK)
        accept_new(engine, state, assign->start_step);
    else if (status != MU_ERR_CANCELLED && status != MU_ERR_NO_MEMORY && status != MU_ERR_UNAVAILABLE)
        *ret_bad = assign->checkpoint;
    return status;
}

/* ---- moved ---- */

/* What is known of a chunk: MU_MOVE_PARAMS, MU_MOVE_MOMENTS: they are here, and may be sent on; the same shifted by
 * TOLD: the owner was told so, and they must stay as they are; HAVE_COPY: parameters are here to read only. */
enum { TOLD = 2, HAVE_COPY = 1 << 4 };

static void mark(uint8_t *have, const struct mu_chunk_run *runs, uint32_t count, uint32_t bits)
{
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t chunk = runs[i].first; chunk < runs[i].first + runs[i].count; chunk++)
            have[chunk] = (uint8_t)(have[chunk] | bits);
}

static void mark_share(const struct mu_engine *engine, const struct mu_held_share *held, enum mu_share share,
                       uint32_t bits, uint8_t *have)
{
    struct engine_runs runs;
    engine_runs_of(&engine->job.model, &held->layout, held->rank, share, &runs);
    mark(have, runs.runs, runs.count, bits);
}

static void mark_held(const struct mu_engine *engine, uint8_t *have)
{
    struct mu_held told = engine_reported(engine);
    for (uint32_t i = 0; i < engine->held.share_count; i++) {
        const struct mu_held_share *share = &engine->held.shares[i];
        mark_share(engine, share, current_params(share), MU_MOVE_PARAMS, have);
        mark_share(engine, share, MU_SHARE_MOMENTS, MU_MOVE_MOMENTS, have);
        if (!share->owned_only)
            mark_share(engine, share, MU_SHARE_COPY, HAVE_COPY, have);
        mark_share(engine, share, MU_SHARE_MIRROR, MU_MOVE_PARAMS | MU_MOVE_MOMENTS, have);
    }
    for (uint32_t i = 0; i < told.share_count; i++) {
        const struct mu_held_share *share = &told.shares[i];
        mark_share(engine, share, share->owned_only ? MU_SHARE_OWNED : MU_SHARE_PARAMS, MU_MOVE_PARAMS << TOLD, have);
        mark_share(engine, share, MU_SHARE_MOMENTS, MU_MOVE_MOMENTS << TOLD, have);
        mark_share(engine, share, MU_SHARE_MIRROR, (MU_MOVE_PARAMS | MU_MOVE_MOMENTS) << TOLD, have);
    }
}

/* The first chunk of the run with any (`any`) or not all of the bits. */
static bool find(const uint8_t *have, const struct mu_chunk_run *run, uint32_t bits, bool any, uint32_t *ret_chunk)
{
    for (uint32_t chunk = run->first; chunk < run->first + run->count; chunk++) {
        *ret_chunk = chunk;
        if (any ? (have[chunk] & bits) != 0 : (have[chunk] & bits) != bits)
            return true;
    }
    return false;
}

/* Moves from outside: inside the model, nothing over what the owner believes to be here, nothing sent that is not. */
static enum mu_status check_moves(const struct mu_engine *engine, const struct mu_assign *assign, uint8_t *have,
                                  struct mu_error *err)
{
    uint32_t chunks = engine->job.model.chunk_count, rank = assign->rank, chunk = 0;
    for (uint32_t i = 0; i < assign->move_count; i++) {
        const struct mu_move *move = &assign->moves[i];
        if (move->run.first >= chunks || move->run.count > chunks - move->run.first)
            return mu_fail(err, MU_ERR_INVALID, "a move of chunks %u+%u is not allowed: the model has %u",
                           move->run.first, move->run.count, chunks);
        if (move->to == rank && find(have, &move->run, move->kinds << TOLD, true, &chunk))
            return mu_fail(err, MU_ERR_CONFLICT, "told to copy chunk %u from rank %u, but this worker holds it", chunk,
                           move->from);
    }
    for (uint32_t i = 0; i < assign->move_count; i++)
        if (assign->moves[i].to == rank)
            mark(have, &assign->moves[i].run, 1, assign->moves[i].kinds);
    for (uint32_t i = 0; i < assign->move_count; i++) {
        const struct mu_move *move = &assign->moves[i];
        if (move->from == rank && find(have, &move->run, move->kinds, false, &chunk))
            return mu_fail(err, MU_ERR_CONFLICT, "told to send chunk %u to rank %u, but this worker does not have it",
                           chunk, move->to);
    }
    return MU_OK;
}

static enum mu_status check_share(const struct mu_engine *engine, uint8_t *have, struct mu_error *err)
{
    const struct mu_model_spec *model = &engine->job.model;
    struct engine_runs params, moments;
    uint32_t chunk = 0;
    for (uint32_t i = 0; i < model->chunk_count; i++) /* to read, a copy is as good */
        have[i] = (uint8_t)(have[i] | (have[i] & HAVE_COPY ? MU_MOVE_PARAMS : 0));
    engine_touched_runs(model, &engine->now.layout, engine->now.rank, &params);
    engine_moment_runs(model, &engine->now.layout, engine->now.rank, &moments);
    for (uint32_t i = 0; i < params.count; i++)
        if (find(have, &params.runs[i], MU_MOVE_PARAMS, false, &chunk))
            return mu_fail(err, MU_ERR_CONFLICT,
                           "parameters of chunk %u of this worker's share are neither held nor copied from a peer",
                           chunk);
    for (uint32_t i = 0; i < moments.count; i++)
        if (find(have, &moments.runs[i], MU_MOVE_MOMENTS, false, &chunk))
            return mu_fail(err, MU_ERR_CONFLICT,
                           "moments of chunk %u of this worker's share are neither held nor copied from a peer", chunk);
    return MU_OK;
}

static enum mu_status check_sources(const struct mu_engine *engine, const struct mu_assign *assign, bool in_place,
                                    struct mu_error *err)
{
    uint8_t *have = calloc(engine->job.model.chunk_count, sizeof *have);
    if (!have)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory to check the moves of %u chunks",
                       engine->job.model.chunk_count);
    if (in_place)
        mark_held(engine, have);
    enum mu_status status = check_moves(engine, assign, have, err);
    if (status == MU_OK)
        status = check_share(engine, have, err);
    free(have);
    return status;
}

bool engine_is_told_to_copy_held(const struct mu_engine *engine, const struct mu_assign *assign)
{
    uint8_t *have = calloc(engine->job.model.chunk_count, sizeof *have);
    uint32_t chunks = engine->job.model.chunk_count, chunk = 0;
    bool told = !have; /* then what it holds beside is no loss */
    if (have)
        mark_held(engine, have);
    for (uint32_t i = 0; i < assign->move_count && !told; i++) {
        const struct mu_move *move = &assign->moves[i];
        told = move->to == assign->rank && move->run.first < chunks && move->run.count <= chunks - move->run.first &&
               find(have, &move->run, move->kinds << TOLD, true, &chunk);
    }
    free(have);
    return told;
}

/* Only of exact steps: elsewhere the state of a step may be another one when the step is made again. Without memory for
 * it, everything moves again. */
static uint8_t *arrived_at(struct mu_engine *engine, const struct engine_state *state, uint64_t step)
{
    struct engine_arrived *arrived = &engine->job.arrived;
    if (engine->job.spec.numerics != MU_NUMERICS_EXACT)
        return NULL;
    if (!arrived->where)
        *arrived = (struct engine_arrived){step, state, calloc(engine->job.model.chunk_count, 1)};
    return arrived->kinds;
}

static enum mu_status run_moves(struct mu_engine *engine, const struct mu_assign *assign, struct engine_state *state,
                                struct mu_error *err)
{
    struct mu_transfer_config config = {.model = &engine->job.model,
                                        .group = engine->now.group,
                                        .flats = {state->flats[0], state->flats[1], state->flats[2]},
                                        .device = engine->device,
                                        .step = assign->start_step,
                                        .rank = assign->rank,
                                        .moves = assign->moves,
                                        .move_count = assign->move_count,
                                        .progress = &engine->progress,
                                        .arrived = arrived_at(engine, state, assign->start_step)};
    if (assign->move_count == 0)
        return MU_OK;
    if (!engine->now.group)
        return mu_fail(err, MU_ERR_INVALID, "a rank alone cannot copy state from a peer");
    enum mu_status status = mu_transfer_new(&config, &engine->now.transfer, err);
    MU_FAULT("worker.prepare.transfer");
    engine_set_waiting(engine, true);
    if (status == MU_OK)
        status = mu_transfer_run(engine->now.transfer, err);
    engine_set_waiting(engine, false);
    return status;
}

static enum mu_status move_state(struct mu_engine *engine, const struct mu_assign *assign, struct mu_error *err)
{
    bool in_place = engine->held.has_state && engine->held.step == assign->start_step;
    struct engine_state *state;
    enum mu_status status = check_sources(engine, assign, in_place, err);
    if (status == MU_OK && engine->now.idle && !in_place)
        return MU_OK; /* nothing to hold, nothing to give */
    if (status == MU_OK)
        status = destination(engine, in_place, assign->start_step, &state, err);
    if (status == MU_OK)
        status = run_moves(engine, assign, state, err);
    if (status != MU_OK || engine->now.idle)
        return status;
    if (in_place)
        accept_beside(engine);
    else
        accept_new(engine, state, assign->start_step);
    return MU_OK;
}

/* ---- the whole ---- */

enum mu_status engine_get_state(struct mu_engine *engine, const struct mu_assign *assign, uint64_t *ret_bad,
                                struct mu_error *err)
{
    enum mu_status status = MU_OK;
    switch (assign->source) {
    case MU_SOURCE_CHECKPOINT:
        return engine->now.idle ? MU_OK : load(engine, assign, ret_bad, err);
    case MU_SOURCE_INIT:
        return engine->now.idle ? MU_OK : initialise(engine, assign, err);
    case MU_SOURCE_HELD:
        status = use_held(engine, assign, err);
        break;
    case MU_SOURCE_ROLL_FORWARD:
        status = roll_forward(engine, assign, err);
        break;
    case MU_SOURCE_PEER:
        break;
    }
    return status == MU_OK ? move_state(engine, assign, err) : status;
}

void engine_enter_share(struct mu_engine *engine)
{
    const struct engine_generation *now = &engine->now;
    struct mu_held *held = &engine->held;
    held->has_state = !now->idle;
    held->has_gradient = false; /* of another share, perhaps; nobody has applied it */
    held->step = now->start_step;
    held->share_count = now->idle ? 0 : 1;
    memset(held->shares, 0, sizeof held->shares);
    if (!now->idle)
        held->shares[0] = own_share(now);
    engine_forget_arrived(engine);
    engine_state_free(&engine->job.incoming);
    engine_release_unshared(engine, &now->layout, now->rank);
    engine_log_memory(engine);
}
