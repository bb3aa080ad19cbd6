/* The last stage: final norm, logits a few tokens at a time, loss. */
#include "worker/model_internal.h"

enum {
    LOSS_BLOCK = 256, /* token losses are added in blocks of this many, blocks in order */
    LOSSES_READ = MU_DEVICE_READ_MAX / sizeof(double),
};
_Static_assert(LOSSES_READ % LOSS_BLOCK == 0, "whole blocks at a time");

/* Some rows whose logits exist now. */
struct head_rows {
    uint32_t first, count;
    const float *x;         /* [count, C] normalised input */
    const int32_t *targets; /* [count] */
    double *losses;         /* [count] */
    float scale;            /* of the gradient */
    bool gradient;
};

static struct norm_site final_site(const struct mu_model *m, const struct pass *p)
{
    const float *cell = p->params + m->map.final;
    return (struct norm_site){.weight = cell + m->map.role_at[MU_ROLE_NORMF_W],
                              .bias = m->dims.bias ? cell + m->map.role_at[MU_ROLE_NORMF_B] : NULL,
                              .x = p->slot->xf,
                              .y = p->slot->normf,
                              .mean = p->slot->meanf,
                              .rstd = p->slot->rstdf};
}

void model_final_norm(struct mu_model *m, const struct pass *p, struct stream in)
{
    struct mu_dropout drop = model_site(m, p, m->spec.config.layers - 1, MU_DROPOUT_MLP);
    struct norm_site site = final_site(m, p);
    model_norm(m, p, in, &drop, &site);
}

const float *model_final_backward(struct mu_model *m, const struct pass *p, const float *dnorm, float *dx)
{
    struct mu_dropout drop = model_site(m, p, m->spec.config.layers - 1, MU_DROPOUT_MLP);
    struct norm_site site = final_site(m, p);
    struct norm_gradient g = {.site = &site,
                              .dy = dnorm,
                              .drop = &drop,
                              .first = true,
                              .sums = model_final_sums(m, p),
                              .size = m->map.final_size,
                              .at_w = m->map.role_at[MU_ROLE_NORMF_W],
                              .at_b = m->map.role_at[MU_ROLE_NORMF_B]};
    const float *dbranch = model_norm_backward(m, p, &g, dx);
    model_finish_sums(m, p, g.sums, m->map.final, m->map.final_size);
    model_report(m, p, MU_CELL_F_SHARED, 0, 0);
    return dbranch;
}

/* ---- logits ---- */

static const float *table_of(const struct mu_model *m, const float *flat, uint32_t s)
{
    return flat + m->map.head + s * m->map.head_stride;
}

static float *logits_of(const struct mu_model *m, uint32_t s)
{
    return m->logits + (size_t)s * m->head_tokens * m->logits_stride;
}

static uint32_t vocab_of(const struct mu_model *m, uint32_t s)
{
    return model_vocab_rows(&m->dims, model_first_slice(m) + s);
}

/* c[rows, vocabulary of local slice s] = x table_s^T */
static void slice_logits(struct mu_model *m, const float *params, uint32_t s, uint32_t rows, const float *x, float *c,
                         size_t ldc)
{
    model_product(m, &(struct mu_gemm){.m = rows,
                                       .n = vocab_of(m, s),
                                       .k = m->dims.channels,
                                       .a = x,
                                       .lda = m->dims.channels,
                                       .transpose_b = true,
                                       .b = table_of(m, params, s),
                                       .ldb = m->dims.channels,
                                       .c = c,
                                       .ldc = ldc});
}

void model_last_logits(struct mu_model *m, const struct pass *p, float *logits)
{
    const float *x = p->slot->normf + (size_t)(p->rows - 1) * m->dims.channels;
    for (uint32_t s = 0; s < m->dims.slices; s++)
        slice_logits(m, p->params, s, 1, x, logits + (size_t)s * m->dims.vocab_slice, m->dims.vocab);
}

/* ---- loss over vocabulary slices ---- */

/* Joins [local slices][rows] over the slices, then over the ranks: all of them get the result, in the first `rows` of
 * what is returned. `buffer` has room for ranks more blocks before the local ones. */
static float *join_highest(struct mu_model *m, uint32_t rows)
{
    const struct mu_tensor_group *group = m->options.tensor;
    float *local = m->highest + (size_t)m->dims.ranks * m->head_tokens;
    if (m->status == MU_OK)
        m->status = mu_kernel_join_max(m->pool, m->dims.slices, rows, local);
    if (m->dims.ranks == 1 || m->status != MU_OK)
        return local;
    model_copy(m, m->highest + (size_t)m->dims.rank * rows, local, rows * sizeof *local);
    if (m->status == MU_OK)
        m->status = group->all_gather(group->ctx, m->highest, rows * sizeof *local);
    if (m->status == MU_OK)
        m->status = mu_kernel_join_max(m->pool, m->dims.ranks, rows, m->highest);
    return m->highest;
}

static double *join_sums(struct mu_model *m, uint32_t rows)
{
    const struct mu_tensor_group *group = m->options.tensor;
    double *local = m->sums + (size_t)m->dims.ranks * m->head_tokens;
    if (m->status == MU_OK)
        m->status = mu_kernel_join_sums(m->pool, m->dims.slices, rows, local);
    if (m->dims.ranks == 1 || m->status != MU_OK)
        return local;
    model_copy(m, m->sums + (size_t)m->dims.rank * rows, local, rows * sizeof *local);
    if (m->status == MU_OK)
        m->status = group->all_gather(group->ctx, m->sums, rows * sizeof *local);
    if (m->status == MU_OK)
        m->status = mu_kernel_join_sums(m->pool, m->dims.ranks, rows, m->sums);
    return m->sums;
}

static void sliced_loss(struct mu_model *m, const struct head_rows *r)
{
    const uint32_t slices = m->dims.slices, first = model_first_slice(m);
    const size_t room = (size_t)m->dims.ranks * m->head_tokens;
    for (uint32_t s = 0; s < slices && m->status == MU_OK; s++)
        m->status = mu_kernel_cross_entropy_max(m->pool, r->count, vocab_of(m, s), m->logits_stride, logits_of(m, s),
                                                m->highest + room + (size_t)s * r->count);
    const float *highest = join_highest(m, r->count);
    for (uint32_t s = 0; s < slices && m->status == MU_OK; s++)
        m->status = mu_kernel_cross_entropy_sum(m->pool, r->count, (first + s) * m->dims.vocab_slice, vocab_of(m, s),
                                                m->logits_stride, logits_of(m, s), r->targets, highest, r->gradient,
                                                m->sums + room + (size_t)s * r->count, r->losses);
    const double *sums = join_sums(m, r->count);
    for (uint32_t s = 0; s < slices && m->status == MU_OK; s++)
        m->status = mu_kernel_cross_entropy_gradient(m->pool, r->count, (first + s) * m->dims.vocab_slice,
                                                     vocab_of(m, s), m->logits_stride, logits_of(m, s), r->targets,
                                                     sums, r->scale, r->gradient, r->losses);
}

static void forward_rows(struct mu_model *m, const struct pass *p, const struct head_rows *r)
{
    for (uint32_t s = 0; s < m->dims.slices; s++)
        slice_logits(m, p->params, s, r->count, r->x, logits_of(m, s), m->logits_stride);
    if (m->dims.total_slices > 1)
        sliced_loss(m, r);
    else if (m->status == MU_OK)
        m->status = mu_kernel_cross_entropy(m->pool, r->count, m->dims.vocab, m->logits_stride, m->logits, r->targets,
                                            r->scale, r->gradient, r->losses);
}

/* The weight gradients first: with a tensor group the input's gradient takes the place of the input in m->full. */
static void backward_rows(struct mu_model *m, const struct pass *p, const struct head_rows *r)
{
    const uint32_t channels = m->dims.channels, slices = m->dims.slices;
    for (uint32_t s = 0; s < slices; s++)
        model_product(m, &(struct mu_gemm){.m = vocab_of(m, s),
                                           .n = channels,
                                           .k = r->count,
                                           .transpose_a = true,
                                           .a = logits_of(m, s),
                                           .lda = m->logits_stride,
                                           .b = r->x,
                                           .ldb = channels,
                                           .c = p->grads + m->map.head + s * m->map.head_stride,
                                           .ldc = channels,
                                           .accumulate = p->accumulate || r->first > 0});
    model_product(m, &(struct mu_gemm){.m = r->count,
                                       .n = channels,
                                       .k = vocab_of(m, 0),
                                       .slices = slices,
                                       .k_last = vocab_of(m, slices - 1),
                                       .a = m->logits,
                                       .lda = m->logits_stride,
                                       .a_slice = (size_t)m->head_tokens * m->logits_stride,
                                       .b = table_of(m, p->params, 0),
                                       .ldb = channels,
                                       .b_slice = m->map.head_stride,
                                       .c = m->full + (size_t)r->first * channels,
                                       .ldc = channels});
}

/* Every rank has the losses of the targets in its vocabulary, zeros elsewhere (so the order of additions does not
 * matter): afterwards all have all. */
static void join_losses(struct mu_model *m, const struct pass *p)
{
    const struct mu_tensor_group *group = m->options.tensor;
    if (m->dims.ranks == 1 || m->status != MU_OK)
        return;
    m->status = group->all_gather(group->ctx, m->losses, p->rows * sizeof *m->losses);
    if (m->status == MU_OK)
        m->status = mu_kernel_join_sums(m->pool, m->dims.ranks, p->rows, m->losses);
}

static void report_head(struct mu_model *m, const struct pass *p)
{
    const struct mu_micro_batch *b = p->batch;
    if (!m->dims.tied)
        model_report_slices(m, p, MU_CELL_F, 0);
    else if (!m->options.part.embedding && b->head_done && model_leaf_ends(p) && m->status == MU_OK)
        b->head_done(b->hooks_ctx);
}

/* All rows: losses, gradient of the weights, and of the input in m->full. */
static void head(struct mu_model *m, const struct pass *p)
{
    const uint32_t channels = m->dims.channels;
    const float *x = model_gather(m, p, p->slot->normf);
    double *losses = m->losses + (size_t)m->dims.rank * p->rows;
    if (m->dims.total_slices > 1 && m->status == MU_OK) /* zeros of doubles are twice as many of floats */
        m->status = mu_kernel_fill(m->pool, 2 * (size_t)p->rows, 0.0f, (float *)losses);
    struct head_rows r = {.gradient = p->grads != NULL};
    if (r.gradient)
        r.scale = (float)(1.0 / (double)p->batch->loss_divisor);
    for (; r.first < p->rows && m->status == MU_OK; r.first += r.count) {
        uint64_t start_ns = model_clock_ns();
        r.count = p->rows - r.first < m->head_tokens ? p->rows - r.first : m->head_tokens;
        r.x = x + (size_t)r.first * channels;
        r.targets = p->targets + r.first;
        r.losses = losses + r.first;
        forward_rows(m, p, &r);
        uint64_t middle_ns = model_clock_ns();
        m->forward_ns += middle_ns - start_ns;
        if (!r.gradient)
            continue;
        backward_rows(m, p, &r);
        m->backward_ns += model_clock_ns() - middle_ns;
    }
    join_losses(m, p);
}

const float *model_head(struct mu_model *m, const struct pass *p)
{
    const struct model_sequence sequence = {.what = MODEL_HEAD};
    if (!model_replayed(m, p, &sequence)) {
        do
            head(m, p);
        while (model_again(m));
    }
    if (!p->grads)
        return NULL;
    report_head(m, p);
    return model_scatter(m, p);
}

double model_sum_losses(struct mu_model *m, const struct pass *p)
{
    double total = 0;
    if (m->status == MU_OK)
        m->status = mu_pool_wait(m->pool);
    for (uint32_t first = 0, end; first < p->rows && m->status == MU_OK; first = end) {
        const void *view = NULL;
        end = p->rows - first < LOSSES_READ ? p->rows : first + LOSSES_READ;
        m->status = mu_device_read(m->device, m->losses + first, (end - first) * sizeof *m->losses, &view);
        const double *losses = view;
        for (uint32_t block = first; block < end && m->status == MU_OK; block += LOSS_BLOCK) {
            double sum = 0;
            for (uint32_t i = block; i < end && i < block + LOSS_BLOCK; i++)
                sum += losses[i - first];
            total += sum;
        }
    }
    return total;
}
