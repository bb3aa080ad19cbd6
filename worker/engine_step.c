#include "worker/engine_internal.h"

#include <math.h>

#include "common/clock.h"
#include "common/fault.h"
#include "kernels/kernels.h"

/* The leaf whose backward pass is under way: what happens when a cell of its gradient is complete. */
struct leaf_pass {
    struct mu_engine *engine;
    uint32_t depth;   /* of its buffer on the stack */
    uint32_t carries; /* additions downward, per cell */
    bool last;        /* of this rank: then the roots of the cell are final */
    bool begun;
    enum mu_status status;
    struct mu_error *err;
};

static uint64_t elapsed_us(uint64_t *mark_us)
{
    uint64_t now_us = mu_clock_mono_us(), elapsed = now_us - *mark_us;
    *mark_us = now_us;
    return elapsed;
}

enum mu_status engine_fill_batch(struct mu_engine *engine, uint64_t first_sequence, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    const struct mu_job_spec *spec = &job->spec;
    uint32_t length = spec->batch.length;
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; i < spec->batch.micro && status == MU_OK; i++) {
        uint64_t global = first_sequence + i;
        job->samples[i] = mu_data_order(job->data_info.train_samples, spec->seed, global);
        status = mu_data_sample(job->data, spec->seed, global, job->tokens + (size_t)i * length,
                                job->targets + (size_t)i * length, err);
    }
    return status;
}

/* A cell of the leaf's gradient is complete: add it to its siblings' sums, and let the exchange begin with it. Both
 * only write to parts of buffers that the rest of the backward pass does not touch. */
static void cell_done(void *ctx, uint32_t index)
{
    struct leaf_pass *pass = ctx;
    struct mu_engine *engine = pass->engine;
    struct mu_cell cell = mu_model_cell(&engine->job.model, index);
    if (!pass->begun)
        MU_FAULT("worker.backward");
    pass->begun = true;
    for (uint32_t i = 0; i < pass->carries && pass->status == MU_OK; i++) {
        float *from = engine->job.stack[pass->depth - i] + cell.offset,
              *into = engine->job.stack[pass->depth - i - 1] + cell.offset;
        pass->status = mu_kernel_add(engine->pool, cell.size, into, from);
    }
    if (pass->status == MU_OK && pass->last)
        pass->status = mu_reduce_cell_ready(engine->now.reduce, index, pass->err);
}

/* All micro-batches of one leaf into the buffer at `pass->depth`. */
static enum mu_status run_leaf(struct mu_engine *engine, uint32_t leaf, struct leaf_pass *pass, double *ret_loss)
{
    struct engine_job *job = &engine->job;
    const struct mu_job_spec *spec = &job->spec;
    uint32_t micros = spec->batch.accumulate;
    uint64_t step = engine->held.step,
             first = step * spec->batch.sequences + (uint64_t)leaf * micros * spec->batch.micro;
    double loss = 0;
    for (uint32_t i = 0; i < micros; i++) {
        uint64_t mark_us = mu_clock_mono_us();
        enum mu_status status = engine_fill_batch(engine, first + (uint64_t)i * spec->batch.micro, pass->err);
        engine->times.data_us += elapsed_us(&mark_us);
        if (status != MU_OK)
            return status;
        struct mu_micro_batch batch = {.tokens = job->tokens,
                                       .targets = job->targets,
                                       .samples = job->samples,
                                       .seed = spec->seed,
                                       .step = step,
                                       .loss_divisor = job->tokens_per_step,
                                       .index = i,
                                       .count = micros,
                                       .cell_done = cell_done,
                                       .cell_done_ctx = pass};
        MU_FAULT("worker.forward");
        double micro_loss;
        status = mu_model_forward_backward(job->net, &batch, job->state.params, job->stack[pass->depth], &micro_loss);
        if (pass->status != MU_OK)
            return pass->status;
        if (status != MU_OK)
            return mu_fail(pass->err, status, "step %llu cancelled", (unsigned long long)step);
        uint64_t forward_ns, backward_ns;
        mu_model_times(job->net, &forward_ns, &backward_ns);
        engine->times.forward_us += forward_ns / 1000;
        engine->times.backward_us += backward_ns / 1000;
        loss += micro_loss;
    }
    *ret_loss = loss;
    if (engine->callbacks.leaf)
        engine->callbacks.leaf(engine->callbacks.ctx, engine->now.generation, step, leaf, first,
                               (uint64_t)micros * spec->batch.micro);
    return MU_OK;
}

/* Own leaves in order on the binary counter; then the exchange's rest. Afterwards stack[0] holds the complete reduced
 * gradient. */
static enum mu_status compute_gradient(struct mu_engine *engine, struct mu_small *vote, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    const struct engine_generation *now = &engine->now;
    uint32_t end = now->first_leaf + now->leaf_count, depth = 0;
    enum mu_status status = mu_reduce_begin(now->reduce, engine->held.step - now->start_step, job->stack, err);
    engine->held.has_gradient = false;
    for (uint32_t leaf = now->first_leaf; leaf < end && status == MU_OK; leaf++) {
        struct leaf_pass pass = {.engine = engine,
                                 .depth = depth,
                                 .carries = mu_tree_carries(job->leaves, now->first_leaf, leaf),
                                 .last = leaf + 1 == end,
                                 .err = err};
        double loss = 0;
        status = run_leaf(engine, leaf, &pass, &loss);
        depth += 1 - pass.carries;
        mu_small_push(vote, job->leaves, now->first_leaf, leaf, loss);
    }
    for (uint32_t cell = job->model.cell_count; now->leaf_count == 0 && cell > 0 && status == MU_OK; cell--)
        status = mu_reduce_cell_ready(now->reduce, cell - 1, err);
    if (status != MU_OK)
        return status;
    engine_set_waiting(engine, true);
    status = mu_reduce_finish(now->reduce, err);
    engine_set_waiting(engine, false);
    if (status == MU_OK) {
        engine->held.has_gradient = true;
        MU_FAULT("worker.exchange.complete");
    }
    return status;
}

/* The squares of the chunks that this rank answers for. */
static enum mu_status own_squares(struct mu_engine *engine, struct mu_exact_sum *sum)
{
    const struct engine_job *job = &engine->job;
    uint32_t first, count;
    mu_model_owned_chunks(&job->model, engine->now.world, engine->now.rank, &first, &count);
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; i < count && status == MU_OK; i++) {
        struct mu_chunk chunk = mu_model_chunk(&job->model, first + i);
        uint64_t size = chunk.size;
        /* Neighbours in the same cell lie side by side: one longer run. Whole chunks are whole norm blocks. */
        for (struct mu_chunk next;
             i + 1 < count && (next = mu_model_chunk(&job->model, first + i + 1)).cell == chunk.cell; i++)
            size += next.size;
        status = mu_kernel_square_sum(engine->pool, size, job->stack[0] + chunk.offset, sum);
    }
    return status;
}

/* The step reduction. This rank takes part only now that it holds the complete reduced gradient. */
static enum mu_status vote(struct mu_engine *engine, struct mu_small *own, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    struct mu_held *held = &engine->held;
    struct mu_small total;
    MU_ASSERT(held->has_gradient);
    if (own_squares(engine, &own->squares) != MU_OK)
        return mu_fail(err, MU_ERR_CANCELLED, "norm of step %llu cancelled", (unsigned long long)held->step);
    own->command = engine->callbacks.vote(engine->callbacks.ctx, engine->now.generation);
    MU_FAULT("worker.vote.before");
    engine_set_waiting(engine, true);
    enum mu_status status = mu_reduce_small(engine->now.reduce, held->step - engine->now.start_step, MU_SMALL_VOTE,
                                            job->leaves, own, &total, err);
    engine_set_waiting(engine, false);
    if (status != MU_OK)
        return status;
    struct mu_step_result result = {.step = held->step,
                                    .loss = total.roots[0] / (double)job->tokens_per_step,
                                    .grad_norm = sqrt(mu_exact_sum_round(&total.squares)),
                                    .command = total.command};
    result.finite = mu_exact_sum_finite(&total.squares) && isfinite(result.loss) && isfinite(result.grad_norm);
    held->has_result = true;
    held->result = result;
    MU_FAULT("worker.vote.after");
    return MU_OK;
}

void engine_apply(struct mu_engine *engine, const struct mu_step_result *result)
{
    struct engine_job *job = &engine->job;
    const struct mu_job_spec *spec = &job->spec;
    struct mu_held *held = &engine->held;
    MU_ASSERT(held->has_state && held->has_gradient && result->step == held->step);
    MU_FAULT("worker.optimizer");
    if (result->finite) {
        struct mu_adamw adamw = mu_adamw_at(mu_job_learning_rate(spec, held->step), spec->optimizer.beta1,
                                            spec->optimizer.beta2, spec->optimizer.eps, spec->optimizer.weight_decay,
                                            spec->optimizer.clip, result->grad_norm, held->step + 1);
        engine_set_cancellable(engine, false);
        enum mu_status status = mu_model_update(&job->model, engine->pool, &adamw, 0, job->model.flat_size,
                                                job->state.params, job->state.m, job->state.v, job->stack[0]);
        MU_ASSERT(status == MU_OK);
        engine_set_cancellable(engine, true);
    }
    held->step++;
    held->has_gradient = false;
    held->has_result = true;
    held->result = *result;
    if (engine->callbacks.applied)
        engine->callbacks.applied(engine->callbacks.ctx, engine->now.generation, result->step);
}

enum mu_status engine_step(struct mu_engine *engine, struct mu_error *err)
{
    struct mu_comm_group *group = engine->now.group;
    struct engine_times *times = &engine->times;
    uint64_t begin_us = mu_clock_mono_us(), mark_us = begin_us, waited_us = group ? mu_comm_group_wait_us(group) : 0;
    struct mu_small own = {.root_count = 0};
    mu_exact_sum_init(&own.squares);
    *times = (struct engine_times){0};
    enum mu_status status = compute_gradient(engine, &own, err);
    if (status == MU_OK)
        status = vote(engine, &own, err);
    if (status != MU_OK)
        return status;
    /* Everything that was neither data nor compute was the exchange: moving, adding, waiting. */
    uint64_t compute_us = times->data_us + times->forward_us + times->backward_us, spent_us = elapsed_us(&mark_us);
    times->wait_us = group ? mu_comm_group_wait_us(group) - waited_us : 0;
    times->communicate_us = spent_us > compute_us + times->wait_us ? spent_us - compute_us - times->wait_us : 0;
    if (atomic_load(&engine->cancel))
        return mu_fail(err, MU_ERR_CANCELLED, "step %llu stopped before its update",
                       (unsigned long long)engine->held.step);
    struct mu_step_result result = engine->held.result;
    engine_apply(engine, &result);
    times->optimizer_us = elapsed_us(&mark_us);
    times->total_us = mark_us - begin_us;
    return MU_OK;
}
