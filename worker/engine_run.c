#include "worker/engine_internal.h"

#include <string.h>

#include "common/clock.h"
#include "common/fault.h"
#include "common/flight.h"

/* ---- evaluation ---- */

static bool evaluation_due(const struct mu_engine *engine)
{
    const struct mu_job_spec *spec = &engine->job.spec;
    uint64_t step = engine->held.step;
    return spec->eval.every > 0 && step > 0 && (step % spec->eval.every == 0 || step == mu_job_end(spec));
}

/* Held-out sequences of one evaluation leaf, a micro-batch. Where the data ends, targets of -1 do not count. */
static enum mu_status fill_evaluation(struct mu_engine *engine, uint32_t leaf, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    struct engine_batches batch = engine_batch_at(engine, 0);
    uint32_t length = job->spec.batch.length, micro = job->spec.batch.micro;
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; i < micro && status == MU_OK; i++) {
        uint64_t sequence = (uint64_t)leaf * micro + i;
        int32_t *tokens = batch.tokens + (size_t)i * length, *targets = batch.targets + (size_t)i * length;
        batch.samples[i] = sequence;
        if (sequence < job->eval_sequences) {
            status = mu_data_eval_sample(job->data, sequence, tokens, targets, err);
            continue;
        }
        memset(tokens, 0, length * sizeof *tokens);
        memset(targets, 0xff, length * sizeof *targets);
    }
    return status;
}

/* One evaluation leaf through this stage. */
static enum mu_status evaluate_leaf(struct mu_engine *engine, uint32_t leaf, double *ret_loss, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    struct mu_pipeline *pipeline = engine->now.pipeline;
    struct engine_batches arrays = engine_batch_at(engine, 0);
    const float *in = NULL;
    float *out = NULL;
    enum mu_status status = fill_evaluation(engine, leaf, err);
    if (status == MU_OK && pipeline)
        status = mu_pipeline_receive(pipeline, MU_PIPELINE_ACTIVATIONS, &in, err);
    if (status == MU_OK && pipeline)
        status = mu_pipeline_block(pipeline, MU_PIPELINE_ACTIVATIONS, &out, err);
    if (status != MU_OK)
        return status;
    struct mu_micro_batch batch = {.tokens = arrays.tokens,
                                   .targets = arrays.targets,
                                   .samples = arrays.samples,
                                   .seed = job->spec.seed,
                                   .step = engine->held.step,
                                   .loss_divisor = 1,
                                   .count = 1};
    status = mu_model_loss(job->net.model, &batch, job->state.flats[0], in, out, ret_loss);
    if (status != MU_OK)
        return engine_model_failed(engine, status, "evaluation", err);
    if (pipeline)
        status = mu_pipeline_send(pipeline, MU_PIPELINE_ACTIVATIONS, err);
    if (status == MU_OK && pipeline)
        status = mu_pipeline_release(pipeline, MU_PIPELINE_ACTIVATIONS, err);
    return status;
}

static enum mu_status evaluate_own(struct mu_engine *engine, struct mu_small *own, struct mu_error *err)
{
    const struct engine_generation *now = &engine->now;
    enum mu_status status = MU_OK;
    if (now->pipeline)
        status = mu_pipeline_expect(now->pipeline, MU_PIPELINE_ACTIVATIONS, now->eval_leaf_count, err);
    for (uint32_t i = 0; i < now->eval_leaf_count && status == MU_OK; i++) {
        uint32_t leaf = now->first_eval_leaf + i;
        double loss = 0;
        status = evaluate_leaf(engine, leaf, &loss, err);
        if (status == MU_OK && engine_reports(engine))
            mu_small_push(own, engine->job.eval_leaves, now->first_eval_leaf, leaf, loss);
    }
    return status == MU_OK && now->pipeline ? mu_pipeline_flush(now->pipeline, err) : status;
}

/* Mean loss of the held-out sequences; leaves are spread over replicas and summed like those of a step. */
static enum mu_status evaluate(struct mu_engine *engine, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    const struct engine_generation *now = &engine->now;
    struct mu_small own, total;
    mu_small_init(&own);
    mu_flight_begin(MU_FLIGHT_EVALUATE, engine->held.step);
    enum mu_status status = engine_settle(engine, false, err);
    if (status == MU_OK)
        status = evaluate_own(engine, &own, err);
    if (status != MU_OK)
        return status;
    engine_set_waiting(engine, true);
    status = mu_reduce_small(now->reduce, engine->held.step - now->start_step, MU_SMALL_EVAL, job->eval_leaves, &own,
                             &total, err);
    engine_set_waiting(engine, false);
    mu_flight_end(MU_FLIGHT_EVALUATE, engine->held.step);
    if (status != MU_OK || now->rank != 0)
        return status;
    double tokens = (double)job->eval_sequences * job->spec.batch.length;
    engine_post(engine, &(struct mu_worker_event){
                            .kind = MU_WE_EVAL, .eval = {.step = engine->held.step, .loss = total.roots[0] / tokens}});
    return MU_OK;
}

/* ---- boundaries ---- */

uint64_t engine_take_snapshot(struct mu_engine *engine, uint64_t generation, const struct mu_snapshot *snapshot)
{
    const struct engine_job *job = &engine->job;
    const struct mu_held told = engine_reported(engine);
    bool local = job->spec.checkpoint.kind == MU_CHECKPOINT_LOCAL;
    struct mu_snapshot_state state = {.model = &job->model,
                                      .host = local ? engine->host : NULL,
                                      .params = job->state.flats[0],
                                      .m = job->state.flats[1],
                                      .v = job->state.flats[2],
                                      .shares = told.shares,
                                      .share_count = told.share_count,
                                      .job = job->spec.name,
                                      .step = engine->held.step,
                                      .generation = generation};
    return mu_snapshots_take(engine->snapshots, engine->pool, &state, snapshot);
}

static void post_step(struct mu_engine *engine)
{
    const struct engine_job *job = &engine->job;
    const struct engine_times *times = &engine->times;
    engine_post(engine, &(struct mu_worker_event){.kind = MU_WE_STEP,
                                                  .step = {.steps_done = engine->held.step,
                                                           .result = engine->held.result,
                                                           .step_count = 1,
                                                           .leaf_count = engine->now.leaf_count,
                                                           .tokens = job->tokens_per_step,
                                                           .total_us = times->total_us,
                                                           .data_us = times->data_us,
                                                           .forward_us = times->forward_us,
                                                           .backward_us = times->backward_us,
                                                           .communicate_us = times->communicate_us,
                                                           .wait_us = times->wait_us,
                                                           .optimizer_us = times->optimizer_us,
                                                           .snapshot_us = times->snapshot_us,
                                                           .tensor_us = (uint32_t)times->tensor_us,
                                                           .pipeline_us = (uint32_t)times->pipeline_us,
                                                           .replicas_us = (uint32_t)times->replicas_us,
                                                           .vote_us = (uint32_t)times->vote_us}});
}

static enum mu_status park_finished(struct mu_engine *engine, struct mu_error *err)
{
    struct mu_worker_event event = {
        .kind = MU_WE_PARKED,
        .parked = {.generation = engine->now.generation, .reason = MU_PARK_FINISHED, .held = engine_reported(engine)}};
    bool finite = true;
    enum mu_status status = engine_weights_sha256(engine, event.parked.weights_sha256, &finite, err);
    if (status != MU_OK)
        return status;
    event.parked.weights_unfinite = !finite;
    engine->phase = ENGINE_PARKED;
    MU_FAULT("worker.finished");
    engine_post(engine, &event);
    return MU_OK;
}

enum after_step { STEP_ON, PARK_HERE, FINISHED };

/* Between two steps: the one decision that all ranks take alike. */
static enum after_step boundary(struct mu_engine *engine)
{
    struct mu_boundary decision = engine->callbacks.boundary(engine->callbacks.ctx, engine->now.generation,
                                                             engine->held.step, &engine->held.result);
    MU_FAULT("worker.boundary");
    engine_feeds_boundary(engine);
    if (decision.take_snapshot) {
        mu_flight_begin(MU_FLIGHT_SNAPSHOT, engine->held.step);
        engine->times.snapshot_us = engine_take_snapshot(engine, engine->now.generation, &decision.snapshot);
        mu_flight_end(MU_FLIGHT_SNAPSHOT, engine->held.step);
        engine->times.total_us += engine->times.snapshot_us;
    }
    post_step(engine);
    engine_traffic_look(engine);
    if (engine->held.step == mu_job_end(&engine->job.spec))
        return FINISHED;
    return decision.park ? PARK_HERE : STEP_ON;
}

/* ---- the loop ---- */

/* Steps until a boundary where the engine is to stop. */
static enum mu_status run_steps(struct mu_engine *engine, enum after_step *ret_after, struct mu_error *err)
{
    enum after_step after = engine->held.step == mu_job_end(&engine->job.spec) ? FINISHED : STEP_ON;
    /* The evaluation of this boundary may have been lost with the generation before; a result counts once per step. */
    enum mu_status status = evaluation_due(engine) ? evaluate(engine, err) : MU_OK;
    while (status == MU_OK && after == STEP_ON) {
        status = engine_step(engine, err);
        if (status == MU_OK && evaluation_due(engine))
            status = evaluate(engine, err);
        if (status == MU_OK)
            after = boundary(engine);
    }
    *ret_after = after;
    return status == MU_OK ? engine_settle(engine, true, err) : status;
}

void engine_run(struct mu_engine *engine, uint64_t generation)
{
    struct mu_error err = {0};
    enum after_step after;
    if (engine->phase != ENGINE_PREPARED || engine->now.generation != generation)
        return; /* said twice, or overtaken by a newer assignment */
    MU_FAULT("worker.go");
    engine_generation_close(engine, &engine->old);
    engine_enter_share(engine);
    enum mu_status status = run_steps(engine, &after, &err);
    mu_flight_note(MU_FLIGHT_PARKED, false, 0, engine->held.step, 0);
    if (status == MU_OK && after == FINISHED)
        status = park_finished(engine, &err);
    else if (status == MU_OK) {
        engine_feeds_end(engine);
        engine_park(engine, MU_PARK_COMMAND, NULL);
        engine_take_parked(engine);
        return;
    }
    engine_feeds_drop(engine);
    engine_take_fail(engine, "the generation that was to be left is over");
    if (status != MU_OK)
        engine_park_failed(engine, status, &err, MU_PARK_ENGINE, 0);
}
