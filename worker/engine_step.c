#include "worker/engine_internal.h"

#include <math.h>

#include "common/clock.h"
#include "common/fault.h"
#include "common/flight.h"
#include "kernels/kernels.h"
#include "plan/pipeline.h"

/* The leaf whose backward passes are under way, and the step's own part. */
struct step_pass {
    struct mu_engine *engine;
    struct mu_small *vote;
    uint32_t micros, slots; /* of this stage in this step */
    uint32_t leaf, depth;   /* depth: of its buffer on the stack */
    uint32_t carries;       /* additions downward, per cell */
    bool last;              /* leaf of this rank: then the roots of a cell are final */
    bool begun;
    double loss;
    uint64_t hook_us;      /* waited in hooks, inside the model's calls */
    enum mu_status status; /* of hooks */
    struct mu_error *err;
};

static uint64_t elapsed_us(uint64_t *mark_us)
{
    uint64_t now_us = mu_clock_mono_us(), elapsed = now_us - *mark_us;
    *mark_us = now_us;
    return elapsed;
}

bool engine_reports(const struct mu_engine *engine)
{
    const struct engine_generation *now = &engine->now;
    return !now->idle && now->at.t == 0 && now->at.p == now->layout.pp - 1;
}

enum mu_status engine_model_failed(struct mu_engine *engine, enum mu_status status, const char *what,
                                   struct mu_error *err)
{
    const struct mu_error *tensor = engine->now.tensor ? mu_tensor_comm_error(engine->now.tensor) : NULL;
    if (status != MU_ERR_CANCELLED && tensor && tensor->text[0]) {
        *err = *tensor;
        return status;
    }
    if (status != MU_ERR_CANCELLED && mu_device_trouble(engine->device))
        return mu_fail(err, status, "%s of step %llu: %s", what, (unsigned long long)engine->held.step,
                       mu_device_trouble(engine->device));
    if (status == MU_ERR_CONFLICT)
        return mu_fail(err, status,
                       "%s of step %llu: %s could not record kernels as a CUDA graph as the others of its tensor group "
                       "do: all go on without",
                       what, (unsigned long long)engine->held.step, engine->device->name);
    return mu_fail(err, status, "%s of step %llu cancelled", what, (unsigned long long)engine->held.step);
}

/* ---- after an update ---- */

/* The parameters of the own column are complete (sharded: now), and can be sent on: as tied copy, to who is fed. */
static enum mu_status gather_complete(struct mu_engine *engine, struct mu_error *err)
{
    if (engine->now.gathering) {
        engine_set_waiting(engine, true);
        mu_flight_begin(MU_FLIGHT_GATHER, engine->held.step);
        enum mu_status status = mu_reduce_gather_finish(engine->now.reduce, err);
        mu_flight_end(MU_FLIGHT_GATHER, engine->held.step);
        engine_set_waiting(engine, false);
        if (status != MU_OK)
            return status;
        engine->now.gathering = false;
        status = engine_tied_copy_begin(engine, err);
        if (status != MU_OK)
            return status;
    }
    engine_feeds_updated(engine);
    return MU_OK;
}

enum mu_status engine_settle(struct mu_engine *engine, bool sent, struct mu_error *err)
{
    enum mu_status status = gather_complete(engine, err);
    if (status == MU_OK)
        status = engine_tied_copy_finish(engine, false, err);
    if (status != MU_OK)
        return status;
    status = engine_tied_copy_finish(engine, sent, err);
    const struct mu_nccl_link *link = mu_nccl_link_open(&engine->now.link);
    if (status == MU_OK && link && sent)
        status = link->ops->wait(link->nccl, link->streams[MU_TRACK_MAIN], MU_COMM_FOREVER, err);
    if (status == MU_OK && (!link || sent)) /* between GPUs it may still be coming: then the vote knows */
        engine->held.shares[0].owned_only = false;
    return status;
}

/* ---- micro-batches ---- */

struct engine_batches engine_batch_at(struct mu_engine *engine, uint32_t slot)
{
    const struct mu_job_spec *spec = &engine->job.spec;
    const struct engine_batches *all = &engine->job.net.batches;
    size_t samples = (size_t)slot * spec->batch.micro, tokens = samples * spec->batch.length;
    return (struct engine_batches){all->tokens + tokens, all->targets + tokens, all->samples + samples};
}

/* Middle stages want the sample numbers only. */
static enum mu_status fill_batch(struct mu_engine *engine, uint64_t first_sequence, uint32_t slot, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    const struct mu_job_spec *spec = &job->spec;
    struct engine_batches batch = engine_batch_at(engine, slot);
    uint32_t length = spec->batch.length;
    bool tokens = job->net.part.embedding || job->net.part.head;
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; i < spec->batch.micro && status == MU_OK; i++) {
        uint64_t global = mu_job_position(spec, first_sequence + i);
        batch.samples[i] = mu_data_order(job->data_info.train_samples, spec->seed, global);
        if (tokens)
            status = mu_data_sample(job->data, spec->seed, global, batch.tokens + (size_t)i * length,
                                    batch.targets + (size_t)i * length, err);
    }
    return status;
}

/* First sequence of the leaf in the whole run. */
static uint64_t leaf_sequence(const struct mu_engine *engine, uint32_t leaf)
{
    const struct mu_job_spec *spec = &engine->job.spec;
    return engine->held.step * spec->batch.sequences + (uint64_t)leaf * spec->batch.accumulate * spec->batch.micro;
}

/* ---- hooks of the backward pass ---- */

/* A cell of the leaf's gradient is complete: add it to its siblings' sums, and let the exchange begin with it. Both
 * only write to parts of buffers that the rest of the backward pass does not touch. */
static void cell_done(void *ctx, uint32_t index)
{
    struct step_pass *pass = ctx;
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
    if (pass->status == MU_OK && pass->last && engine->now.buddy)
        pass->status = mu_buddy_send(engine->now.buddy, index, pass->err);
}

static void head_done(void *ctx)
{
    struct step_pass *pass = ctx;
    if (pass->status == MU_OK)
        pass->status = engine_tied_send(pass->engine, pass->engine->job.stack[pass->depth], pass->err);
}

static enum mu_status embedding_ready(void *ctx)
{
    struct step_pass *pass = ctx;
    uint64_t mark_us = mu_clock_mono_us();
    mu_device_span_end(pass->engine->device, MU_WORK_BACKWARD); /* it waits for the last stage */
    if (pass->status == MU_OK)
        pass->status = engine_tied_take(pass->engine, pass->engine->job.stack[pass->depth],
                                        pass->engine->now.merged && pass->engine->now.leaf_count > 1, pass->err);
    mu_device_span_begin(pass->engine->device, MU_WORK_BACKWARD);
    pass->hook_us += elapsed_us(&mark_us);
    return pass->status;
}

static struct mu_micro_batch batch_of(struct step_pass *pass, uint32_t micro)
{
    struct mu_engine *engine = pass->engine;
    const struct mu_job_spec *spec = &engine->job.spec;
    struct engine_batches arrays = engine_batch_at(engine, micro % pass->slots);
    const struct engine_generation *now = &engine->now;
    uint32_t count = now->merged ? pass->micros : spec->batch.accumulate;
    return (struct mu_micro_batch){.tokens = arrays.tokens,
                                   .targets = arrays.targets,
                                   .samples = arrays.samples,
                                   .seed = spec->seed,
                                   .step = engine->held.step,
                                   .loss_divisor = engine->job.tokens_per_step,
                                   .index = micro % count,
                                   .count = count,
                                   .hooks_ctx = pass,
                                   .cell_done = cell_done,
                                   .head_done = now->tied && now->at.p > 0 ? head_done : NULL,
                                   .embedding_ready = now->tied && now->at.p == 0 ? embedding_ready : NULL};
}

/* ---- the order of a stage ---- */

static enum mu_status receive(struct mu_engine *engine, enum mu_pipeline_flow flow, const float **ret_data,
                              struct mu_error *err)
{
    *ret_data = NULL;
    return engine->now.pipeline ? mu_pipeline_receive(engine->now.pipeline, flow, ret_data, err) : MU_OK;
}

static enum mu_status block(struct mu_engine *engine, enum mu_pipeline_flow flow, float **ret_data,
                            struct mu_error *err)
{
    *ret_data = NULL;
    return engine->now.pipeline ? mu_pipeline_block(engine->now.pipeline, flow, ret_data, err) : MU_OK;
}

/* What was computed goes on, what it was computed from is free. */
static enum mu_status pass_on(struct mu_engine *engine, enum mu_pipeline_flow flow, struct mu_error *err)
{
    struct mu_pipeline *pipeline = engine->now.pipeline;
    enum mu_status status = pipeline ? mu_pipeline_send(pipeline, flow, err) : MU_OK;
    return status == MU_OK && pipeline ? mu_pipeline_release(pipeline, flow, err) : status;
}

static uint64_t tensor_us(const struct mu_engine *engine)
{
    return engine->now.tensor ? mu_tensor_comm_spent_us(engine->now.tensor) : 0;
}

/* Adds the time of a call into the model to the step's, without what it waited for others. (Of a GPU this is the time
 * to tell it: see measured.) */
static void account(struct step_pass *pass, uint64_t spent_us, uint64_t exchange_us, bool backward)
{
    struct engine_times *times = &pass->engine->times;
    uint64_t forward_ns = 0, backward_ns = 0, compute_us = spent_us > exchange_us ? spent_us - exchange_us : 0;
    if (!backward) {
        times->forward_us += compute_us;
        return;
    }
    mu_model_times(pass->engine->job.net.model, &forward_ns, &backward_ns); /* the head's forward is in the call */
    uint64_t forward_us = forward_ns / 1000 < compute_us ? forward_ns / 1000 : compute_us;
    times->forward_us += forward_us;
    times->backward_us += compute_us - forward_us;
}

/* What the GPU itself spent in the model, once it has been waited for. */
static void measured(struct mu_engine *engine)
{
    uint64_t us[MU_WORKS];
    if (mu_device_is_host(engine->device))
        return;
    mu_device_spent_us(engine->device, us);
    engine->times.forward_us = us[MU_WORK_FORWARD];
    engine->times.backward_us = us[MU_WORK_BACKWARD];
}

static enum mu_status forward_micro(struct step_pass *pass, uint32_t micro)
{
    struct mu_engine *engine = pass->engine;
    const struct mu_job_spec *spec = &engine->job.spec;
    uint32_t slot = micro % pass->slots, accumulate = spec->batch.accumulate;
    uint64_t sequence = leaf_sequence(engine, engine->now.first_leaf + micro / accumulate);
    engine_take_pump(engine, true);
    uint64_t mark_us = mu_clock_mono_us();
    const float *in;
    float *out;
    mu_flight_begin(MU_FLIGHT_DATA, micro);
    enum mu_status status =
        fill_batch(engine, sequence + (uint64_t)(micro % accumulate) * spec->batch.micro, slot, pass->err);
    mu_flight_end(MU_FLIGHT_DATA, micro);
    engine->times.data_us += elapsed_us(&mark_us);
    if (status == MU_OK)
        status = receive(engine, MU_PIPELINE_ACTIVATIONS, &in, pass->err);
    if (status == MU_OK)
        status = block(engine, MU_PIPELINE_ACTIVATIONS, &out, pass->err);
    engine->times.pipeline_us += elapsed_us(&mark_us);
    if (status == MU_OK && micro == 0)
        status = gather_complete(engine, pass->err);
    engine->times.replicas_us += elapsed_us(&mark_us);
    if (status != MU_OK)
        return status;
    MU_FAULT("worker.forward");
    struct mu_micro_batch batch = batch_of(pass, micro);
    uint64_t exchange_us = tensor_us(engine);
    mu_flight_begin(MU_FLIGHT_FORWARD, micro);
    mu_device_span_begin(engine->device, MU_WORK_FORWARD);
    status = mu_model_forward(engine->job.net.model, &batch, slot, engine->job.state.flats[0], in, out);
    mu_device_span_end(engine->device, MU_WORK_FORWARD);
    mu_flight_end(MU_FLIGHT_FORWARD, micro);
    account(pass, elapsed_us(&mark_us), tensor_us(engine) - exchange_us, false);
    if (status != MU_OK)
        return engine_model_failed(engine, status, "forward pass", pass->err);
    status = pass_on(engine, MU_PIPELINE_ACTIVATIONS, pass->err);
    engine->times.pipeline_us += elapsed_us(&mark_us);
    return status;
}

static enum mu_status begin_leaf(struct step_pass *pass, uint32_t micro)
{
    struct mu_engine *engine = pass->engine;
    const struct engine_generation *now = &engine->now;
    pass->leaf = now->first_leaf + micro / engine->job.spec.batch.accumulate;
    pass->carries = now->merged ? 0 : mu_tree_carries(engine->job.leaves, now->first_leaf, pass->leaf);
    pass->last = pass->leaf + 1 == now->first_leaf + now->leaf_count;
    pass->loss = 0;
    if (!pass->begun)
        engine_feeds_drain(engine);
    enum mu_status status = engine_settle(engine, false, pass->err);       /* the head reads the tied copy */
    return status == MU_OK ? engine_tied_sent(engine, pass->err) : status; /* the head chain will be overwritten */
}

static void end_leaf(struct step_pass *pass)
{
    struct mu_engine *engine = pass->engine;
    const struct engine_job *job = &engine->job;
    if (!engine->now.merged)
        pass->depth += 1 - pass->carries;
    if (!engine_reports(engine))
        return;
    mu_small_push(pass->vote, job->leaves, engine->now.first_leaf, pass->leaf, pass->loss);
    if (engine->callbacks.leaf)
        engine->callbacks.leaf(engine->callbacks.ctx, engine->now.generation, engine->held.step, pass->leaf,
                               leaf_sequence(engine, pass->leaf),
                               (uint64_t)job->spec.batch.accumulate * job->spec.batch.micro);
}

static enum mu_status backward_micro(struct step_pass *pass, uint32_t micro)
{
    struct mu_engine *engine = pass->engine;
    struct mu_micro_batch batch = batch_of(pass, micro);
    const float *dout;
    float *din;
    uint32_t accumulate = engine->job.spec.batch.accumulate;
    engine_take_pump(engine, true);
    uint64_t mark_us = mu_clock_mono_us(), exchange_us = tensor_us(engine) + pass->hook_us;
    enum mu_status status = micro % accumulate == 0 ? begin_leaf(pass, micro) : MU_OK;
    engine->times.replicas_us += elapsed_us(&mark_us);
    if (status == MU_OK)
        status = receive(engine, MU_PIPELINE_GRADIENTS, &dout, pass->err);
    if (status == MU_OK)
        status = block(engine, MU_PIPELINE_GRADIENTS, &din, pass->err);
    engine->times.pipeline_us += elapsed_us(&mark_us);
    if (status != MU_OK)
        return status;
    double loss;
    mu_flight_begin(MU_FLIGHT_BACKWARD, micro);
    mu_device_span_begin(engine->device, MU_WORK_BACKWARD);
    status = mu_model_backward(engine->job.net.model, &batch, micro % pass->slots, engine->job.state.flats[0],
                               engine->job.stack[pass->depth], dout, din, &loss);
    mu_device_span_end(engine->device, MU_WORK_BACKWARD);
    mu_flight_end(MU_FLIGHT_BACKWARD, micro);
    account(pass, elapsed_us(&mark_us), tensor_us(engine) + pass->hook_us - exchange_us, true);
    if (pass->status != MU_OK)
        return pass->err->text[0] ? pass->status
                                  : engine_model_failed(engine, pass->status, "backward pass", pass->err);
    if (status != MU_OK)
        return engine_model_failed(engine, status, "backward pass", pass->err);
    pass->loss += loss;
    status = pass_on(engine, MU_PIPELINE_GRADIENTS, pass->err);
    engine->times.pipeline_us += elapsed_us(&mark_us);
    if (status == MU_OK && (micro + 1) % accumulate == 0)
        end_leaf(pass);
    return status;
}

/* All micro-batches of the own leaves, in the order of the stage. */
static enum mu_status compute_leaves(struct mu_engine *engine, struct mu_small *vote, struct mu_error *err)
{
    const struct engine_generation *now = &engine->now;
    uint32_t stages = now->layout.pp, stage = now->at.p;
    uint32_t micros = now->leaf_count * engine->job.spec.batch.accumulate;
    struct step_pass pass = {.engine = engine,
                             .vote = vote,
                             .micros = micros,
                             .slots = mu_pipeline_slots(stages, stage, micros),
                             .err = err};
    enum mu_status status = engine_tied_expect(engine, now->merged ? 1 : now->leaf_count, err);
    if (status == MU_OK && now->pipeline)
        status = mu_pipeline_expect(now->pipeline, MU_PIPELINE_ACTIVATIONS, micros, err);
    if (status == MU_OK && now->pipeline)
        status = mu_pipeline_expect(now->pipeline, MU_PIPELINE_GRADIENTS, micros, err);
    for (uint32_t i = 0; i < 2 * micros && status == MU_OK; i++) {
        struct mu_pipeline_op op = mu_pipeline_op_at(stages, stage, micros, i);
        status = op.backward ? backward_micro(&pass, op.micro) : forward_micro(&pass, op.micro);
    }
    engine->times.replicas_us += pass.hook_us;
    if (status == MU_OK && now->pipeline)
        status = mu_pipeline_flush(now->pipeline, err);
    return status == MU_OK ? engine_tied_sent(engine, err) : status;
}

/* Own leaves in order on the binary counter, or all in one buffer; then the exchange's rest. Afterwards stack[0] holds
 * the complete reduced gradient of all that this rank updates, for itself and for whom it guards. */
static enum mu_status compute_gradient(struct mu_engine *engine, struct mu_small *vote, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    const struct engine_generation *now = &engine->now;
    engine->held.has_gradient = false;
    if (now->leaf_count == 0) /* else at the first backward pass */
        engine_feeds_drain(engine);
    enum mu_status status = mu_reduce_begin(now->reduce, engine->held.step - now->start_step, job->stack, err);
    if (status == MU_OK && now->buddy)
        status = mu_buddy_begin(now->buddy, engine->held.step - now->start_step, job->stack[0], err);
    if (status == MU_OK && now->leaf_count > 0)
        status = compute_leaves(engine, vote, err);
    else if (status == MU_OK)
        status = engine_settle(engine, false, err);
    for (uint32_t cell = job->model.cell_count; now->leaf_count == 0 && cell > 0 && status == MU_OK; cell--)
        status = mu_reduce_cell_ready(now->reduce, cell - 1, err);
    if (status != MU_OK)
        return status;
    uint64_t mark_us = mu_clock_mono_us();
    engine_set_waiting(engine, true);
    mu_flight_begin(MU_FLIGHT_REDUCE, engine->held.step);
    status = mu_reduce_finish(now->reduce, err);
    if (status == MU_OK && now->buddy)
        status = mu_buddy_received(now->buddy, err);
    mu_flight_end(MU_FLIGHT_REDUCE, engine->held.step);
    engine_set_waiting(engine, false);
    engine->times.replicas_us += elapsed_us(&mark_us);
    if (status == MU_OK) {
        engine->held.has_gradient = true;
        MU_FAULT("worker.exchange.complete");
    }
    return status;
}

/* ---- the vote ---- */

/* The squares of the chunks that this rank answers for. Whole chunks are whole norm blocks; neighbours in one cell lie
 * side by side and make one longer range. */
static enum mu_status own_squares(struct mu_engine *engine, struct mu_exact_sum *sum)
{
    const struct engine_job *job = &engine->job;
    struct engine_runs runs;
    enum mu_status status = MU_OK;
    engine_runs_of(&job->model, &engine->now.layout, engine->now.rank, MU_SHARE_PRIMARY, &runs);
    for (uint32_t i = 0; i < runs.count; i++) {
        uint32_t next = runs.runs[i].first, end = next + runs.runs[i].count;
        while (next < end && status == MU_OK) {
            struct mu_chunk chunk = mu_model_chunk(&job->model, next);
            struct mu_cell cell = mu_model_cell(&job->model, chunk.cell);
            uint32_t stop = cell.first_chunk + cell.chunk_count < end ? cell.first_chunk + cell.chunk_count : end;
            struct mu_chunk tail = mu_model_chunk(&job->model, stop - 1);
            status = mu_kernel_square_sum(engine->pool, tail.offset + tail.size - chunk.offset,
                                          job->stack[0] + chunk.offset, sum);
            next = stop;
        }
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
    enum mu_status status = mu_pool_wait(engine->pool); /* the sockets are served meanwhile */
    measured(engine);
    if (status == MU_OK)
        status = own_squares(engine, &own->squares);
    if (status != MU_OK)
        return engine_model_failed(engine, status, "norm", err);
    own->command = engine->callbacks.vote(engine->callbacks.ctx, engine->now.generation);
    MU_FAULT("worker.vote.before");
    uint64_t mark_us = mu_clock_mono_us();
    engine_set_waiting(engine, true);
    mu_flight_begin(MU_FLIGHT_VOTE, held->step);
    status = mu_reduce_small(engine->now.reduce, held->step - engine->now.start_step, MU_SMALL_VOTE, job->leaves, own,
                             &total, err);
    mu_flight_end(MU_FLIGHT_VOTE, held->step);
    engine_set_waiting(engine, false);
    engine->times.vote_us += elapsed_us(&mark_us);
    if (status != MU_OK)
        return status;
    struct mu_step_result result = {.step = held->step,
                                    .loss = total.roots[0] / (double)job->tokens_per_step,
                                    .grad_norm = sqrt(mu_exact_sum_round(&total.squares)),
                                    .command = total.command};
    result.finite = mu_exact_sum_finite(&total.squares) && isfinite(result.loss) && isfinite(result.grad_norm);
    held->shares[0].owned_only = false; /* the pool has waited: all that was computed with is here */
    held->has_result = true;
    held->result = result;
    MU_FAULT("worker.vote.after");
    return MU_OK;
}

/* ---- the update ---- */

struct mu_adamw engine_adamw(const struct mu_engine *engine, const struct mu_step_result *result)
{
    const struct mu_job_spec *spec = &engine->job.spec;
    return mu_adamw_at(mu_job_learning_rate(spec, result->step), spec->optimizer.beta1, spec->optimizer.beta2,
                       spec->optimizer.eps, spec->optimizer.weight_decay, spec->optimizer.clip, result->grad_norm,
                       result->step + 1);
}

void engine_update_with(struct mu_engine *engine, const struct mu_adamw *adamw, uint64_t offset, uint64_t size,
                        float *params, const float *gradient)
{
    const struct engine_job *job = &engine->job;
    enum mu_status status = mu_model_update(&job->model, engine->pool, adamw, offset, size, params, job->state.flats[1],
                                            job->state.flats[2], gradient);
    MU_ASSERT(status == MU_OK || mu_device_trouble(engine->device)); /* then nothing is held any more */
}

void engine_update_range(struct mu_engine *engine, const struct mu_adamw *adamw, uint64_t offset, uint64_t size)
{
    engine_update_with(engine, adamw, offset, size, engine->job.state.flats[0], engine->job.stack[0]);
}

static void update_runs(struct mu_engine *engine, const struct mu_adamw *adamw, const struct mu_held_share *share,
                        enum mu_share what)
{
    struct engine_runs runs;
    engine_runs_of(&engine->job.model, &share->layout, share->rank, what, &runs);
    for (uint32_t i = 0; i < runs.count; i++) {
        uint64_t offset, size;
        engine_run_range(&engine->job.model, &runs.runs[i], &offset, &size);
        engine_update_range(engine, adamw, offset, size);
    }
}

/* Own parts, a few at a time: those that are updated are on their way to the replicas while the next ones are
 * computed. An exchange that fails does not stop the update. */
static enum mu_status update_and_send(struct mu_engine *engine, const struct mu_adamw *adamw, struct mu_error *err)
{
    struct mu_reduce *reduce = engine->now.reduce;
    uint32_t parts = mu_reduce_part_count(reduce);
    engine->now.gathering = true;
    enum mu_status status =
        mu_reduce_gather_begin(reduce, engine->held.step - engine->now.start_step, engine->job.state.flats[0], err);
    for (uint32_t next = 0, end; next < parts; next = end) {
        uint64_t offset, size, other, more;
        mu_reduce_part(reduce, next, &offset, &size);
        for (end = next + 1; end < parts && end < next + ENGINE_UPDATE_PARTS; end++, size += more) {
            mu_reduce_part(reduce, end, &other, &more);
            if (other != offset + size)
                break;
        }
        engine_update_range(engine, adamw, offset, size);
        for (uint32_t i = next; i < end && status == MU_OK; i++)
            status = mu_reduce_gather_send(reduce, i, err);
    }
    return status;
}

static bool has_copy(const struct mu_engine *engine, const struct mu_held_share *share)
{
    return mu_layout_runs(&engine->job.model, &share->layout, share->rank, MU_SHARE_COPY, NULL) > 0;
}

enum mu_status engine_apply(struct mu_engine *engine, const struct mu_step_result *result, bool send,
                            struct mu_error *err)
{
    struct mu_held *held = &engine->held;
    struct mu_held_share *share = &held->shares[0];
    bool sharded = held->has_state && share->layout.sharded && share->layout.dp > 1;
    enum mu_status status = MU_OK;
    MU_ASSERT(held->has_gradient && result->step == held->step);
    MU_FAULT("worker.optimizer");
    if (result->finite && held->has_state) { /* idle ranks only keep count */
        struct mu_adamw adamw = engine_adamw(engine, result);
        engine_set_cancellable(engine, false);
        if (sharded && send)
            status = update_and_send(engine, &adamw, err);
        else
            update_runs(engine, &adamw, share, sharded ? MU_SHARE_OWNED : MU_SHARE_PARAMS);
        if (share->layout.buddy_shift > 0) {
            MU_FAULT("worker.buddy.apply");
            update_runs(engine, &adamw, share, MU_SHARE_MIRROR);
        }
        engine_set_cancellable(engine, true);
        share->owned_only = sharded || has_copy(engine, share);
        held->share_count = 1; /* any other share is a step behind now */
    }
    if (mu_device_trouble(engine->device))
        return engine_model_failed(engine, MU_ERR_IO, "update", err);
    held->step++;
    held->has_gradient = false;
    held->has_result = true;
    held->result = *result;
    if (engine->callbacks.applied)
        engine->callbacks.applied(engine->callbacks.ctx, engine->now.generation, result->step);
    if (status == MU_OK && send && result->finite && !sharded)
        status = engine_tied_copy_begin(engine, err);
    return status;
}

/* ---- the whole ---- */

enum mu_status engine_step(struct mu_engine *engine, struct mu_error *err)
{
    struct mu_comm_group *group = engine->now.group;
    struct engine_times *times = &engine->times;
    uint64_t begin_us = mu_clock_mono_us(), mark_us = begin_us, waited_us = group ? mu_comm_group_wait_us(group) : 0;
    uint64_t tensor_before_us = tensor_us(engine);
    struct mu_small own;
    mu_small_init(&own);
    uint64_t stale_us[MU_WORKS];
    mu_device_spent_us(engine->device, stale_us); /* of a step that was given up */
    *times = (struct engine_times){0};
    mu_flight_begin(MU_FLIGHT_STEP, engine->held.step);
    enum mu_status status = compute_gradient(engine, &own, err);
    if (status == MU_OK)
        status = vote(engine, &own, err);
    if (status == MU_OK)
        status = engine_tied_copy_finish(engine, true, err); /* long since there: the other side computed with it */
    if (status == MU_OK && engine->now.buddy)
        status = mu_buddy_sent(engine->now.buddy, err); /* it voted, so it has all */
    if (status != MU_OK)
        return status;
    /* Everything that was neither data nor compute was the exchange: moving, adding, waiting. */
    uint64_t compute_us = times->data_us + times->forward_us + times->backward_us, spent_us = elapsed_us(&mark_us);
    times->tensor_us = tensor_us(engine) - tensor_before_us;
    times->wait_us = group ? mu_comm_group_wait_us(group) - waited_us : 0;
    times->communicate_us = spent_us > compute_us + times->wait_us ? spent_us - compute_us - times->wait_us : 0;
    if (atomic_load(&engine->cancel))
        return mu_fail(err, MU_ERR_CANCELLED, "step %llu stopped before its update",
                       (unsigned long long)engine->held.step);
    struct mu_step_result result = engine->held.result;
    engine_feeds_update(engine, &result);
    mu_flight_begin(MU_FLIGHT_UPDATE, result.step);
    status = engine_apply(engine, &result, true, err);
    mu_flight_end(MU_FLIGHT_UPDATE, result.step);
    mu_flight_end(MU_FLIGHT_STEP, result.step);
    times->optimizer_us = elapsed_us(&mark_us);
    times->total_us = mark_us - begin_us;
    return status;
}
