/* Steps of the passes that see slices and the tensor group. */
#include "worker/model_internal.h"

void model_product(struct mu_model *m, const struct mu_gemm *gemm)
{
    if (m->status == MU_OK)
        m->status = mu_kernel_gemm(m->pool, gemm);
}

void model_copy(struct mu_model *m, void *to, const void *from, size_t size_bytes)
{
    if (m->status == MU_OK)
        m->status = mu_device_copy(m->device, to, from, size_bytes);
}

static void all_gather(struct mu_model *m, void *blocks, size_t block_bytes)
{
    const struct mu_tensor_group *group = m->options.tensor;
    if (m->status == MU_OK)
        m->status = group->all_gather(group->ctx, blocks, block_bytes);
}

void model_tree(struct mu_model *m, uint32_t count, size_t size, float *buffers)
{
    for (uint32_t step = 1; step < count; step *= 2)
        for (uint32_t i = 0; i < count && m->status == MU_OK; i += 2 * step)
            m->status = mu_kernel_add(m->pool, size, buffers + i * size, buffers + (i + step) * size);
}

const float *model_gather(struct mu_model *m, const struct pass *p, const float *own)
{
    if (m->dims.ranks == 1)
        return own;
    size_t block = (size_t)p->own * m->dims.channels;
    model_copy(m, m->full + m->dims.rank * block, own, block * sizeof *own);
    all_gather(m, m->full, block * sizeof *own);
    return m->full;
}

float *model_scatter(struct mu_model *m, const struct pass *p)
{
    const struct mu_tensor_group *group = m->options.tensor;
    if (m->dims.ranks == 1)
        return m->full;
    size_t block = (size_t)p->own * m->dims.channels;
    if (m->status == MU_OK)
        m->status = group->all_to_all(group->ctx, m->full, m->received, block * sizeof *m->full);
    model_tree(m, m->dims.ranks, block, m->received);
    return m->received;
}

const float *model_slice_sum(struct mu_model *m, const struct pass *p, const struct slice_sum *sum)
{
    const struct model_dims *d = &m->dims;
    bool alone = d->ranks == 1;
    model_product(m, &(struct mu_gemm){.m = p->rows,
                                       .n = d->channels,
                                       .k = sum->k,
                                       .slices = d->slices,
                                       .a = sum->a,
                                       .lda = sum->k,
                                       .a_slice = (size_t)p->rows * sum->k,
                                       .transpose_b = sum->transpose_b,
                                       .b = sum->b,
                                       .ldb = sum->ldb,
                                       .b_slice = sum->b_slice,
                                       .c = m->full,
                                       .ldc = d->channels,
                                       .epilogue = sum->bias && alone ? MU_EPILOGUE_BIAS : MU_EPILOGUE_NONE,
                                       .bias = sum->bias});
    float *own = model_scatter(m, p);
    if (sum->bias && !alone && m->status == MU_OK)
        m->status = mu_kernel_bias_add(m->pool, p->own, d->channels, sum->bias, own);
    return own;
}

/* ---- shared cells ---- */

float *model_layer_sums(struct mu_model *m, const struct pass *p, uint32_t layer)
{
    if (m->dims.total_slices == 1)
        return p->grads + m->map.layer_shared[layer];
    return m->layer_sums + (size_t)layer * m->dims.slices * m->map.layer_shared_size;
}

float *model_final_sums(struct mu_model *m, const struct pass *p)
{
    return m->dims.total_slices == 1 ? p->grads + m->map.final : m->final_sums;
}

void model_bias_sums(struct mu_model *m, const struct pass *p, const float *dy, float *sums, uint64_t size, uint64_t at)
{
    uint32_t channels = m->dims.channels, rows = p->own / m->dims.slices;
    for (uint32_t k = 0; k < m->dims.slices && m->status == MU_OK; k++)
        m->status = mu_kernel_column_sum(m->pool, rows, channels, dy + (size_t)k * rows * channels, channels,
                                         p->accumulate, sums + k * size + at);
}

bool model_leaf_ends(const struct pass *p)
{
    return p->batch->index == p->batch->count - 1;
}

void model_finish_sums(struct mu_model *m, const struct pass *p, float *sums, uint64_t cell, uint64_t size)
{
    if (m->dims.total_slices == 1 || !model_leaf_ends(p))
        return;
    const float *total = sums;
    model_tree(m, m->dims.slices, size, sums);
    if (m->dims.ranks > 1) {
        model_copy(m, m->shared_gather + m->dims.rank * size, sums, size * sizeof *sums);
        all_gather(m, m->shared_gather, size * sizeof *sums);
        model_tree(m, m->dims.ranks, size, m->shared_gather);
        total = m->shared_gather;
    }
    model_copy(m, p->grads + cell, total, size * sizeof *sums);
}

/* ---- reports ---- */

void model_report(const struct mu_model *m, const struct pass *p, enum mu_cell_kind kind, uint32_t layer,
                  uint32_t slice)
{
    const struct mu_micro_batch *b = p->batch;
    if (m->status == MU_OK && b->cell_done && model_leaf_ends(p))
        b->cell_done(b->hooks_ctx, mu_model_cell_index(&m->spec, kind, layer, slice));
}

void model_report_slices(const struct mu_model *m, const struct pass *p, enum mu_cell_kind kind, uint32_t layer)
{
    for (uint32_t s = 0; s < m->dims.slices; s++)
        model_report(m, p, kind, layer, model_first_slice(m) + s);
}

/* ---- sequences ---- */

/* The others of the group have recorded it, or will. */
static bool falls_behind(struct mu_model *m)
{
    if (m->dims.ranks == 1 || mu_device_records(m->device))
        return false;
    if (m->status == MU_OK)
        m->status = MU_ERR_CONFLICT;
    return true;
}

bool model_replayed(struct mu_model *m, const struct pass *p, const struct model_sequence *sequence)
{
    const struct mu_tensor_group *group = m->options.tensor;
    bool agreed = m->dims.ranks == 1 || (group->recorded && group->recorded(group->ctx));
    m->recordable = m->status == MU_OK && !mu_device_is_host(m->device) && !p->dropout && agreed;
    if (!m->recordable)
        return false;
    const struct mu_device_key key = {.arrays = {p->slot, p->params, p->grads, sequence->a, sequence->b},
                                      .numbers = {(uint64_t)sequence->what << 32 | sequence->layer,
                                                  (uint64_t)p->rows << 32 | p->length,
                                                  (uint64_t)p->accumulate << 1 | (p->grads && model_leaf_ends(p)),
                                                  p->batch ? p->batch->loss_divisor : 0}};
    bool replayed = mu_device_replay(m->device, &key);
    if (!replayed)
        m->recordable = !falls_behind(m);
    return replayed;
}

bool model_again(struct mu_model *m)
{
    return m->recordable && mu_device_record_end(m->device, &m->status) && !falls_behind(m);
}
