#include "worker/engine_internal.h"

#include <math.h>
#include <string.h>

#include "common/clock.h"
#include "common/fault.h"
#include "common/hash.h"

/* ---- evaluation ---- */

static bool evaluation_due(const struct mu_engine *engine)
{
    const struct mu_job_spec *spec = &engine->job.spec;
    uint64_t step = engine->held.step;
    return spec->eval.every > 0 && step > 0 && (step % spec->eval.every == 0 || step == spec->steps);
}

/* Held-out sequences of one evaluation leaf, a micro-batch. Where the data ends, targets of -1 do not count. */
static enum mu_status fill_evaluation(struct mu_engine *engine, uint32_t leaf, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    uint32_t length = job->spec.batch.length, micro = job->spec.batch.micro;
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; i < micro && status == MU_OK; i++) {
        uint64_t sequence = (uint64_t)leaf * micro + i;
        int32_t *tokens = job->tokens + (size_t)i * length, *targets = job->targets + (size_t)i * length;
        job->samples[i] = sequence;
        if (sequence < job->eval_sequences) {
            status = mu_data_eval_sample(job->data, sequence, tokens, targets, err);
            continue;
        }
        memset(tokens, 0, length * sizeof *tokens);
        memset(targets, 0xff, length * sizeof *targets);
    }
    return status;
}

/* Mean loss of the held-out sequences; leaves are spread over ranks and summed like those of a step. */
static enum mu_status evaluate(struct mu_engine *engine, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    const struct engine_generation *now = &engine->now;
    struct mu_small own = {.root_count = 0}, total;
    mu_exact_sum_init(&own.squares);
    for (uint32_t i = 0; i < now->eval_leaf_count; i++) {
        uint32_t leaf = now->first_eval_leaf + i;
        enum mu_status status = fill_evaluation(engine, leaf, err);
        if (status != MU_OK)
            return status;
        struct mu_micro_batch batch = {.tokens = job->tokens,
                                       .targets = job->targets,
                                       .samples = job->samples,
                                       .seed = job->spec.seed,
                                       .step = engine->held.step,
                                       .loss_divisor = 1,
                                       .count = 1};
        double loss;
        if (mu_model_loss(job->net, &batch, job->state.params, &loss) != MU_OK)
            return mu_fail(err, MU_ERR_CANCELLED, "evaluation cancelled");
        mu_small_push(&own, job->eval_leaves, now->first_eval_leaf, leaf, loss);
    }
    engine_set_waiting(engine, true);
    enum mu_status status = mu_reduce_small(now->reduce, engine->held.step - now->start_step, MU_SMALL_EVAL,
                                            job->eval_leaves, &own, &total, err);
    engine_set_waiting(engine, false);
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
    struct mu_snapshot_state state = {.model = &job->model,
                                      .params = job->state.params,
                                      .m = job->state.m,
                                      .v = job->state.v,
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
                                                           .snapshot_us = times->snapshot_us}});
}

static void park_finished(struct mu_engine *engine)
{
    const struct engine_job *job = &engine->job;
    struct mu_worker_event event = {
        .kind = MU_WE_PARKED,
        .parked = {.generation = engine->now.generation, .reason = MU_PARK_FINISHED, .held = engine->held}};
    struct mu_sha256 *sha = mu_sha256_new();
    for (uint32_t i = 0; i < job->model.cell_count; i++) {
        struct mu_cell cell = mu_model_cell(&job->model, i);
        mu_sha256_update(sha, job->state.params + cell.offset, cell.size * sizeof(float));
        atomic_fetch_add_explicit(&engine->progress, 1, memory_order_relaxed);
    }
    mu_sha256_final_free(sha, event.parked.weights_sha256);
    engine->phase = ENGINE_PARKED;
    MU_FAULT("worker.finished");
    engine_post(engine, &event);
}

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the SHA-256 of the weights is over little-endian floats");

enum after_step { STEP_ON, PARK_HERE, FINISHED };

/* Between two steps: the one decision that all ranks take alike. */
static enum after_step boundary(struct mu_engine *engine)
{
    struct mu_boundary decision = engine->callbacks.boundary(engine->callbacks.ctx, engine->now.generation,
                                                             engine->held.step, &engine->held.result);
    MU_FAULT("worker.boundary");
    if (decision.take_snapshot) {
        engine->times.snapshot_us = engine_take_snapshot(engine, engine->now.generation, &decision.snapshot);
        engine->times.total_us += engine->times.snapshot_us;
    }
    post_step(engine);
    if (engine->held.step == engine->job.spec.steps)
        return FINISHED;
    return decision.park ? PARK_HERE : STEP_ON;
}

/* ---- the loop ---- */

void engine_run(struct mu_engine *engine, uint64_t generation)
{
    struct mu_error err = {0};
    if (engine->phase != ENGINE_PREPARED || engine->now.generation != generation)
        return; /* said twice, or overtaken by a newer assignment */
    MU_FAULT("worker.go");
    engine_generation_close(&engine->old);
    engine_state_free(&engine->job.incoming);
    enum after_step after = engine->held.step == engine->job.spec.steps ? FINISHED : STEP_ON;
    /* The evaluation of this boundary may have been lost with the generation before; a result counts once per step. */
    enum mu_status status = evaluation_due(engine) ? evaluate(engine, &err) : MU_OK;
    while (status == MU_OK && after == STEP_ON) {
        status = engine_step(engine, &err);
        if (status == MU_OK && evaluation_due(engine))
            status = evaluate(engine, &err);
        if (status == MU_OK)
            after = boundary(engine);
    }
    if (status != MU_OK)
        engine_park_failed(engine, status, &err, MU_PARK_ENGINE, 0);
    else if (after == FINISHED)
        park_finished(engine);
    else
        engine_park(engine, MU_PARK_COMMAND, NULL);
}
