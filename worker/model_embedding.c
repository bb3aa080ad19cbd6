/* The first stage: the look-up, and at the end of a leaf the gradients of both tables. */
#include "worker/model_internal.h"

/* Rows of own tokens from the ranks that hold their vocabulary rows: a look-up in what was received. */
static void pick_rows(struct mu_model *m, const struct pass *p, float *x)
{
    const uint32_t of_rank = m->dims.vocab_slice * m->dims.slices, rows = m->dims.ranks * p->own;
    const float *const received[] = {m->received};
    const struct mu_vocab_slices table = {.slices = received, .slice_rows = rows, .slice_count = 1, .vocab = rows};
    for (uint32_t i = 0; i < p->own; i++)
        m->places_table[i] = (int32_t)((uint32_t)p->batch->tokens[p->first_row + i] / of_rank * p->own + i);
    model_copy(m, m->places, m->places_table, p->own * sizeof *m->places);
    if (m->status == MU_OK)
        m->status =
            mu_kernel_embedding_forward(m->pool, 0, p->own, p->own, m->dims.channels, &table, m->places, NULL, NULL, x);
}

void model_embedding_forward(struct mu_model *m, const struct pass *p, float *x)
{
    const struct model_dims *d = &m->dims;
    const struct mu_tensor_group *group = m->options.tensor;
    struct mu_dropout drop = model_site(m, p, 0, MU_DROPOUT_EMBEDDING);
    for (uint32_t s = 0; s < d->slices; s++)
        m->vocab[s] = p->params + m->map.wte + s * m->map.wte_stride;
    const struct mu_vocab_slices table = {.slices = m->vocab,
                                          .slice_rows = d->vocab_slice,
                                          .first_slice = model_first_slice(m),
                                          .slice_count = d->slices,
                                          .vocab = d->vocab};
    float *all = d->ranks == 1 ? x : m->full; /* all rows, own vocabulary */
    if (m->status == MU_OK)
        m->status = mu_kernel_embedding_forward(m->pool, 0, p->rows, p->length, d->channels, &table, p->tokens,
                                                d->wpe ? p->params + m->map.wpe : NULL, &drop, all);
    if (d->ranks == 1 || m->status != MU_OK)
        return;
    m->status = group->all_to_all(group->ctx, all, m->received, (size_t)p->own * d->channels * sizeof *x);
    pick_rows(m, p, x);
}

uint32_t model_kept(const struct mu_model *m, const struct pass *p)
{
    return p->batch->index % m->options.accumulate;
}

/* Nothing has been added to the tables yet. */
static bool begins_tables(const struct mu_model *m, const struct pass *p)
{
    return p->batch->index < m->options.accumulate;
}

void model_embedding_keep(struct mu_model *m, const struct pass *p)
{
    const struct mu_micro_batch *b = p->batch;
    size_t at = model_kept(m, p);
    model_copy(m, m->tokens + at * p->rows, b->tokens, p->rows * sizeof *b->tokens);
    if (p->dropout)
        model_copy(m, m->samples + at * p->sequences, b->samples, p->sequences * sizeof *b->samples);
}

/* ---- the leaf's end ---- */

static void drop_gradients(struct mu_model *m, const struct pass *p)
{
    for (uint32_t i = 0; i <= model_kept(m, p) && p->dropout && m->status == MU_OK; i++) {
        struct mu_dropout drop = model_site(m, p, 0, MU_DROPOUT_EMBEDDING);
        drop.samples = m->samples + (size_t)i * m->options.micro;
        m->status = mu_kernel_embedding_drop(m->pool, p->first_row, p->own, p->length, m->dims.channels, &drop,
                                             m->dembedding[i]);
    }
}

/* sums += the gradients of own rows [first, first + rows) of all micro-batches. */
static void add_positions(struct mu_model *m, const struct pass *p, uint32_t first, uint32_t rows, float *sums)
{
    for (uint32_t i = 0; i <= model_kept(m, p) && m->status == MU_OK; i++)
        m->status = mu_kernel_position_backward(m->pool, p->first_row + first, rows, p->length, m->dims.channels,
                                                m->dembedding[i] + (size_t)first * m->dims.channels, sums);
}

/* Own token slices as the tree adds them: a binary counter of partial sums, so that few are held at a time. The result
 * is in position_sums[0]. */
static void sum_own_positions(struct mu_model *m, const struct pass *p)
{
    const size_t size = (size_t)p->length * m->dims.channels;
    const uint32_t rows = p->own / m->dims.slices;
    uint32_t depth = 0;
    for (uint32_t k = 0; k < m->dims.slices && m->status == MU_OK; k++) {
        m->status = mu_kernel_fill(m->pool, size, 0.0f, m->position_sums + depth * size);
        add_positions(m, p, k * rows, rows, m->position_sums + depth * size);
        for (uint32_t bits = k; bits & 1 && m->status == MU_OK; bits >>= 1, depth--)
            m->status =
                mu_kernel_add(m->pool, size, m->position_sums + (depth - 1) * size, m->position_sums + depth * size);
        depth++;
    }
}

/* Sums of all ranks: each rank adds up a part of the table, then all get all parts. */
static void join_positions(struct mu_model *m, const struct pass *p, float *total)
{
    const struct mu_tensor_group *group = m->options.tensor;
    const size_t size = (size_t)p->length * m->dims.channels, block = size / m->dims.ranks;
    float *received = m->position_sums + size;
    if (m->status == MU_OK)
        m->status = group->all_to_all(group->ctx, m->position_sums, received, block * sizeof *total);
    model_tree(m, m->dims.ranks, block, received);
    model_copy(m, total + m->dims.rank * block, received, block * sizeof *total);
    if (m->status == MU_OK)
        m->status = group->all_gather(group->ctx, total, block * sizeof *total);
}

static void backward_positions(struct mu_model *m, const struct pass *p)
{
    float *dwpe = p->grads + m->map.wpe;
    const size_t size = (size_t)p->length * m->dims.channels, all = (size_t)m->spec.config.context * m->dims.channels;
    bool begins = begins_tables(m, p);
    if (m->status == MU_OK && begins)
        m->status = mu_kernel_fill(m->pool, all, 0.0f, dwpe);
    if (m->dims.total_slices == 1) {
        add_positions(m, p, 0, p->own, dwpe);
    } else {
        sum_own_positions(m, p);
        if (m->dims.ranks > 1)
            join_positions(m, p, begins ? dwpe : m->position_sums);
        else if (begins)
            model_copy(m, dwpe, m->position_sums, size * sizeof *dwpe);
        if (m->status == MU_OK && !begins)
            m->status = mu_kernel_add(m->pool, size, dwpe, m->position_sums);
    }
    model_report(m, p, MU_CELL_E_SHARED, 0, 0);
}

/* What the look-up chain is added to: the head chain, in this buffer already or coming from the last stage; or +0. */
static void begin_table(struct mu_model *m, const struct pass *p)
{
    const struct mu_micro_batch *b = p->batch;
    bool tied = m->dims.tied, awaited = tied && !m->options.part.head;
    if (awaited && model_leaf_ends(p)) {
        if (b->embedding_ready && m->status == MU_OK)
            m->status = b->embedding_ready(b->hooks_ctx);
        return;
    }
    if ((tied && !awaited) || !begins_tables(m, p))
        return;
    for (uint32_t s = 0; s < m->dims.slices && m->status == MU_OK; s++)
        m->status =
            mu_kernel_fill(m->pool, (size_t)model_vocab_rows(&m->dims, model_first_slice(m) + s) * m->dims.channels,
                           0.0f, p->grads + m->map.wte + s * m->map.wte_stride);
}

void model_embedding_backward(struct mu_model *m, const struct pass *p)
{
    const struct model_dims *d = &m->dims;
    bool full = model_kept(m, p) + 1 == m->options.accumulate;
    if (m->status != MU_OK || (!model_leaf_ends(p) && !full))
        return;
    drop_gradients(m, p);
    if (d->wpe)
        backward_positions(m, p);
    begin_table(m, p);
    for (uint32_t i = 0; i <= model_kept(m, p) && m->status == MU_OK; i++) {
        const float *dx = model_gather(m, p, m->dembedding[i]);
        for (uint32_t s = 0; s < d->slices && m->status == MU_OK; s++) {
            uint32_t slice = model_first_slice(m) + s;
            m->status = mu_kernel_embedding_backward(m->pool, p->rows, d->channels, m->tokens + (size_t)i * p->rows, dx,
                                                     slice * d->vocab_slice, model_vocab_rows(d, slice),
                                                     p->grads + m->map.wte + s * m->map.wte_stride);
        }
    }
    model_report_slices(m, p, MU_CELL_E, 0);
}
