/* The calls: a micro-batch forward and backward through the part, evaluation, generation. */
#include <time.h>

#include "worker/model_internal.h"

uint64_t model_clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static struct pass pass_of(const struct mu_model *m, const struct mu_micro_batch *batch, uint32_t slot,
                           const float *params)
{
    MU_ASSERT(slot < m->options.slots);
    return (struct pass){
        .sequences = m->options.micro,
        .length = m->options.length,
        .rows = m->dims.rows,
        .first_row = m->dims.rank * m->dims.own,
        .own = m->dims.own,
        .tokens = m->in_tokens,
        .targets = m->in_targets,
        .samples = m->in_samples,
        .batch = batch,
        .slot = &m->slots[slot],
        .params = params,
    };
}

/* What the pass reads of the batch, to where its operations see it. */
static void take_inputs(struct mu_model *m, const struct pass *p, bool tokens, bool targets)
{
    const struct mu_micro_batch *b = p->batch;
    m->status = MU_OK;
    if (tokens && m->options.part.embedding)
        model_copy(m, m->in_tokens, b->tokens, p->rows * sizeof *b->tokens);
    if (targets && m->options.part.head)
        model_copy(m, m->in_targets, b->targets, p->rows * sizeof *b->targets);
    if (p->dropout)
        model_copy(m, m->in_samples, b->samples, p->sequences * sizeof *b->samples);
}

/* The stream as the next stage needs it: x + drop(branch). */
static void pass_on(struct mu_model *m, const struct pass *p, struct stream stream, float *out)
{
    size_t size = (size_t)p->own * m->dims.channels;
    if (!p->dropout) {
        model_copy(m, out, stream.x, size * sizeof *out);
        if (m->status == MU_OK)
            m->status = mu_kernel_add(m->pool, size, out, stream.branch);
        return;
    }
    /* The addition of a norm; what else the norm gives is not used. */
    uint32_t last = m->options.part.layer_count - 1;
    struct mu_dropout drop = model_site(m, p, m->options.part.first_layer + last, MU_DROPOUT_MLP);
    const float *shared = p->params + m->map.layer_shared[last];
    struct norm_site site = {.weight = shared + m->map.role_at[MU_ROLE_NORM2_W],
                             .bias = m->dims.bias ? shared + m->map.role_at[MU_ROLE_NORM2_B] : NULL,
                             .x = out,
                             .y = m->dbranch,
                             .mean = m->row_scratch,
                             .rstd = m->row_scratch + p->own};
    model_norm(m, p, stream, &drop, &site);
}

static void forward_layers(struct mu_model *m, const struct pass *p, struct stream stream, float *out)
{
    for (uint32_t i = 0; i < m->options.part.layer_count && m->status == MU_OK; i++)
        stream = model_layer_forward(m, p, i, stream, false);
    if (m->status != MU_OK)
        return;
    if (m->options.part.head)
        model_final_norm(m, p, stream);
    else
        pass_on(m, p, stream, out);
}

/* Through all layers of the part: leaves the final norm's output, or fills `out`. */
static void forward(struct mu_model *m, const struct pass *p, const float *in, float *out)
{
    struct stream stream = {in, NULL};
    MU_ASSERT(m->options.part.embedding || in);
    MU_ASSERT(m->options.part.head || out);
    if (m->options.part.embedding) {
        model_embedding_forward(m, p, p->slot->layers[0].x1);
        stream.x = p->slot->layers[0].x1;
    }
    const struct model_sequence sequence = {MODEL_FORWARD, 0, stream.x, out};
    if (!model_replayed(m, p, &sequence)) {
        do
            forward_layers(m, p, stream, out);
        while (model_again(m));
    }
}

/* The gradient of the last layer's branch, and dx of the stream after it. */
static const float *begin_backward(struct mu_model *m, const struct pass *p, const float *dout, float *dx)
{
    if (m->options.part.head) {
        if (m->options.recompute != MU_RECOMPUTE_NONE)
            model_final_norm(m, p, (struct stream){p->slot->xf, NULL});
        const float *dnorm = model_head(m, p);
        uint64_t start_ns = model_clock_ns();
        const float *dbranch = model_final_backward(m, p, dnorm, dx);
        m->backward_ns += model_clock_ns() - start_ns;
        return dbranch;
    }
    size_t size = (size_t)p->own * m->dims.channels;
    if (dx != dout)
        model_copy(m, dx, dout, size * sizeof *dx);
    if (!p->dropout)
        return dx;
    struct mu_dropout drop =
        model_site(m, p, m->options.part.first_layer + m->options.part.layer_count - 1, MU_DROPOUT_MLP);
    model_copy(m, m->dbranch, dx, size * sizeof *dx);
    if (m->status == MU_OK)
        m->status =
            mu_kernel_embedding_drop(m->pool, p->first_row, p->own, p->length, m->dims.channels, &drop, m->dbranch);
    return m->dbranch;
}

static void backward(struct mu_model *m, const struct pass *p, const float *dout, float *din)
{
    const struct mu_model_part *part = &m->options.part;
    MU_ASSERT(part->head || dout);
    MU_ASSERT(part->embedding || din);
    float *dx = part->embedding ? m->dembedding[model_kept(m, p)] : din;
    const float *dbranch = begin_backward(m, p, dout, dx);
    uint64_t start_ns = model_clock_ns();
    for (uint32_t i = part->layer_count; i-- > 0 && m->status == MU_OK;)
        dbranch = model_layer_backward(m, p, i, dbranch, dx);
    if (part->embedding && m->status == MU_OK) {
        model_embedding_keep(m, p);
        model_embedding_backward(m, p);
    }
    m->backward_ns += model_clock_ns() - start_ns;
}

/* ---- calls ---- */

enum mu_status mu_model_check_batch(const struct mu_model *model, const struct mu_micro_batch *batch,
                                    struct mu_error *err)
{
    uint32_t length = model->options.length, vocab = model->spec.config.vocab;
    bool tokens = model->options.part.embedding, targets = model->options.part.head;
    for (uint32_t i = 0; i < model->options.micro * length; i++) {
        if (tokens && (batch->tokens[i] < 0 || (uint32_t)batch->tokens[i] >= vocab))
            return mu_fail(err, MU_ERR_INVALID, "sequence %u, token %u: %d is not allowed: 0 to %u (vocab - 1)",
                           i / length, i % length, batch->tokens[i], vocab - 1);
        if (targets && (batch->targets[i] < -1 || (batch->targets[i] >= 0 && (uint32_t)batch->targets[i] >= vocab)))
            return mu_fail(err, MU_ERR_INVALID,
                           "sequence %u, target %u: %d is not allowed: 0 to %u (vocab - 1), or -1 (not counted)",
                           i / length, i % length, batch->targets[i], vocab - 1);
    }
    return MU_OK;
}

enum mu_status mu_model_forward(struct mu_model *model, const struct mu_micro_batch *batch, uint32_t slot,
                                const float *params, const float *in, float *out)
{
    MU_ASSERT(!model->options.forward_only);
    struct pass p = pass_of(model, batch, slot, params);
    p.dropout = model->spec.config.dropout > 0.0f;
    model->forward_ns = model->backward_ns = 0;
    uint64_t start_ns = model_clock_ns();
    take_inputs(model, &p, true, false);
    forward(model, &p, in, out);
    model->forward_ns += model_clock_ns() - start_ns;
    return model->status;
}

enum mu_status mu_model_backward(struct mu_model *model, const struct mu_micro_batch *batch, uint32_t slot,
                                 const float *params, float *grads, const float *dout, float *din, double *ret_loss_sum)
{
    MU_ASSERT(!model->options.forward_only && batch->loss_divisor >= 1);
    MU_ASSERT(batch->index < batch->count);
    struct pass p = pass_of(model, batch, slot, params);
    p.grads = grads;
    p.accumulate = batch->index > 0;
    p.dropout = model->spec.config.dropout > 0.0f;
    model->forward_ns = model->backward_ns = 0;
    take_inputs(model, &p, false, true);
    backward(model, &p, dout, din);
    double loss_sum = model->options.part.head ? model_sum_losses(model, &p) : 0.0;
    if (model->status == MU_OK)
        *ret_loss_sum = loss_sum;
    return model->status;
}

enum mu_status mu_model_forward_backward(struct mu_model *model, const struct mu_micro_batch *batch,
                                         const float *params, float *grads, double *ret_loss_sum)
{
    MU_ASSERT(model->options.part.embedding && model->options.part.head);
    enum mu_status status = mu_model_forward(model, batch, 0, params, NULL, NULL);
    if (status != MU_OK)
        return status;
    uint64_t forward_ns = model->forward_ns;
    status = mu_model_backward(model, batch, 0, params, grads, NULL, NULL, ret_loss_sum);
    model->forward_ns += forward_ns;
    return status;
}

enum mu_status mu_model_loss(struct mu_model *model, const struct mu_micro_batch *batch, const float *params,
                             const float *in, float *out, double *ret_loss_sum)
{
    struct pass p = pass_of(model, batch, 0, params);
    take_inputs(model, &p, true, true);
    forward(model, &p, in, out);
    if (model->options.part.head && model->status == MU_OK)
        (void)model_head(model, &p);
    double loss_sum = model->options.part.head ? model_sum_losses(model, &p) : 0.0;
    if (model->status == MU_OK)
        *ret_loss_sum = loss_sum;
    return model->status;
}

enum mu_status mu_model_logits_last(struct mu_model *model, const int32_t *tokens, uint32_t count, const float *params,
                                    float *logits, struct mu_error *err)
{
    const struct mu_model_part *part = &model->options.part;
    uint32_t room = model->options.length,
             vocab = model->spec.config.vocab; /* one sequence: what the options admitted */
    MU_ASSERT(part->embedding && part->head && model->dims.ranks == 1);
    if (count == 0 || count > room)
        return mu_fail(err, MU_ERR_INVALID, "prompt: %u tokens are not allowed: 1 to %u", count, room);
    for (uint32_t i = 0; i < count; i++)
        if (tokens[i] < 0 || (uint32_t)tokens[i] >= vocab)
            return mu_fail(err, MU_ERR_INVALID, "prompt: token %u is %d: 0 to %u are allowed", i, tokens[i], vocab - 1);
    struct pass p = {.sequences = 1,
                     .length = count,
                     .rows = count,
                     .own = count,
                     .tokens = model->in_tokens,
                     .slot = &model->slots[0],
                     .params = params};
    model->status = MU_OK;
    model_copy(model, model->in_tokens, tokens, count * sizeof *tokens);
    forward(model, &p, NULL, NULL);
    model_last_logits(model, &p, logits);
    if (model->status == MU_OK)
        model->status = mu_pool_wait(model->pool);
    return model->status == MU_OK ? MU_OK : mu_fail(err, model->status, "generation was cancelled");
}

void mu_model_times(const struct mu_model *model, uint64_t *ret_forward_ns, uint64_t *ret_backward_ns)
{
    *ret_forward_ns = model->forward_ns;
    *ret_backward_ns = model->backward_ns;
}
