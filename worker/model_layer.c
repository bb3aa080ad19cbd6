/* One layer, of both families: forward and backward. */
#include "worker/model_internal.h"

/* Pointers of one layer in a flat buffer: cell of the first local slice, shared cell. */
struct layer_cells {
    uint64_t slices, shared;
};

static struct layer_cells cells_of(const struct mu_model *m, uint32_t layer)
{
    return (struct layer_cells){m->map.layer_slices[layer], m->map.layer_shared[layer]};
}

/* Position of a tensor of local slice s; of a shared tensor. */
static uint64_t sliced_at(const struct mu_model *m, uint32_t layer, uint32_t s, enum mu_role role)
{
    return cells_of(m, layer).slices + s * m->map.layer_stride + m->map.role_at[role];
}

static uint64_t shared_at(const struct mu_model *m, uint32_t layer, enum mu_role role)
{
    return cells_of(m, layer).shared + m->map.role_at[role];
}

struct mu_dropout model_site(const struct mu_model *m, const struct pass *p, uint32_t layer, enum mu_dropout_op op)
{
    if (!p->dropout)
        return (struct mu_dropout){0};
    return mu_dropout_site(p->batch->seed, p->batch->step, layer, op, m->spec.config.dropout, p->samples);
}

/* ---- norms ---- */

void model_norm(struct mu_model *m, const struct pass *p, struct stream in, const struct mu_dropout *drop,
                const struct norm_site *site)
{
    if (m->status == MU_OK)
        m->status = mu_kernel_norm_forward(m->pool, &(struct mu_norm_forward){.first_row = p->first_row,
                                                                              .rows = p->own,
                                                                              .length = p->length,
                                                                              .channels = m->dims.channels,
                                                                              .rms = m->dims.rms,
                                                                              .residual = in.x,
                                                                              .branch = in.branch,
                                                                              .weight = site->weight,
                                                                              .bias = site->bias,
                                                                              .drop = drop,
                                                                              .residual_out = site->x,
                                                                              .y = site->y,
                                                                              .mean = site->mean,
                                                                              .rstd = site->rstd});
}

/* The rows of one token slice: k of the own ones. */
static void norm_backward_slice(struct mu_model *m, const struct pass *p, const struct norm_gradient *g, uint32_t k,
                                float *dx, float *dbranch)
{
    uint32_t rows = p->own / m->dims.slices, first = k * rows;
    size_t at = (size_t)first * m->dims.channels;
    float *sums = g->sums + k * g->size;
    m->status =
        mu_kernel_norm_backward(m->pool, &(struct mu_norm_backward){.first_row = p->first_row + first,
                                                                    .rows = rows,
                                                                    .length = p->length,
                                                                    .channels = m->dims.channels,
                                                                    .rms = m->dims.rms,
                                                                    .residual = g->site->x + at,
                                                                    .weight = g->site->weight,
                                                                    .mean = m->dims.rms ? NULL : g->site->mean + first,
                                                                    .rstd = g->site->rstd + first,
                                                                    .dy = g->dy + at,
                                                                    .drop = g->drop,
                                                                    .accumulate = p->accumulate,
                                                                    .first = g->first,
                                                                    .dresidual = dx + at,
                                                                    .dbranch = dbranch ? dbranch + at : NULL,
                                                                    .dweight = sums + g->at_w,
                                                                    .dbias = m->dims.bias ? sums + g->at_b : NULL,
                                                                    .workspace = m->norm_workspace});
}

const float *model_norm_backward(struct mu_model *m, const struct pass *p, const struct norm_gradient *g, float *dx)
{
    float *dbranch = p->dropout && g->drop ? m->dbranch : NULL;
    for (uint32_t k = 0; k < m->dims.slices && m->status == MU_OK; k++)
        norm_backward_slice(m, p, g, k, dx, dbranch);
    return dbranch ? dbranch : dx;
}

static struct norm_site site_of(const struct mu_model *m, const struct pass *p, uint32_t layer, bool second)
{
    const struct layer_state *s = &p->slot->layers[layer];
    const float *w = p->params + shared_at(m, layer, second ? MU_ROLE_NORM2_W : MU_ROLE_NORM1_W);
    const float *b = m->dims.bias ? p->params + shared_at(m, layer, second ? MU_ROLE_NORM2_B : MU_ROLE_NORM1_B) : NULL;
    return second ? (struct norm_site){w, b, s->x2, s->norm2, s->mean2, s->rstd2}
                  : (struct norm_site){w, b, s->x1, s->norm1, s->mean1, s->rstd1};
}

/* ---- forward ---- */

/* y_s = x w_s (+ b_s) for each local slice; with `before` y_s = gelu of that, which itself is kept there. */
static void columns_forward(struct mu_model *m, const struct pass *p, uint32_t layer, enum mu_role w, enum mu_role b,
                            uint32_t width, const float *x, float *y, float *before)
{
    const uint32_t channels = m->dims.channels;
    const bool bias = m->dims.bias;
    for (uint32_t s = 0; s < m->dims.slices; s++) {
        size_t at = (size_t)s * p->rows * width;
        model_product(m, &(struct mu_gemm){.m = p->rows,
                                           .n = width,
                                           .k = channels,
                                           .a = x,
                                           .lda = channels,
                                           .b = p->params + sliced_at(m, layer, s, w),
                                           .ldb = width,
                                           .c = y + at,
                                           .ldc = width,
                                           .epilogue = before ? MU_EPILOGUE_BIAS_GELU
                                                       : bias ? MU_EPILOGUE_BIAS
                                                              : MU_EPILOGUE_NONE,
                                           .bias = bias ? p->params + sliced_at(m, layer, s, b) : NULL,
                                           .before = before ? before + at : NULL,
                                           .ldaux = width});
    }
}

/* Turns queries and keys, which lie side by side, by their positions. */
static void rotate(struct mu_model *m, const struct pass *p, bool inverse, float *qkv)
{
    const struct model_dims *d = &m->dims;
    if (d->llama && m->status == MU_OK)
        m->status = mu_kernel_rotary(m->pool, 0, d->slices * p->rows, p->length, d->heads + d->kv_heads,
                                     d->head_channels, d->qkv, m->cosines, m->sines, inverse, qkv);
}

static void attention(struct mu_model *m, const struct pass *p, uint32_t layer, const float *dout)
{
    const struct model_dims *d = &m->dims;
    const struct layer_state *s = &p->slot->layers[layer];
    struct mu_dropout drop = model_site(m, p, m->options.part.first_layer + layer, MU_DROPOUT_ATTENTION);
    struct mu_attention a = {.sequences = p->sequences,
                             .length = p->length,
                             .heads = d->heads,
                             .kv_heads = d->kv_heads,
                             .head_channels = d->head_channels,
                             .first_head = model_first_slice(m) * d->heads,
                             .slices = d->slices,
                             .qkv = s->qkv,
                             .drop = &drop,
                             .out = s->attention,
                             .lse = s->lse,
                             .dout = dout,
                             .dqkv = m->dqkv};
    if (m->status == MU_OK)
        m->status = dout ? mu_kernel_attention_backward(m->pool, &a) : mu_kernel_attention_forward(m->pool, &a);
}

static void activate(struct mu_model *m, const struct pass *p, const struct layer_state *s)
{
    const struct model_dims *d = &m->dims;
    if (m->status != MU_OK)
        return;
    m->status = d->llama ? mu_kernel_swiglu_forward(m->pool, d->slices * p->rows, d->hidden, s->up, s->act)
                         : mu_kernel_gelu_forward(m->pool, (size_t)d->slices * p->rows * d->hidden, s->up, s->act);
}

struct stream model_layer_forward(struct mu_model *m, const struct pass *p, uint32_t layer, struct stream in,
                                  bool again)
{
    const struct model_dims *d = &m->dims;
    const struct layer_state *s = &p->slot->layers[layer];
    const uint32_t number = m->options.part.first_layer + layer;
    const float *w = p->params;
    struct mu_dropout drop = model_site(m, p, number ? number - 1 : 0, MU_DROPOUT_MLP);
    struct norm_site site = site_of(m, p, layer, false);
    model_norm(m, p, in, &drop, &site);
    columns_forward(m, p, layer, MU_ROLE_QKV_W, MU_ROLE_QKV_B, d->qkv, model_gather(m, p, s->norm1), s->qkv, NULL);
    rotate(m, p, false, s->qkv);
    attention(m, p, layer, NULL);
    struct slice_sum sum = {.k = d->attention,
                            .a = s->attention,
                            .b = w + sliced_at(m, layer, 0, MU_ROLE_PROJ_W),
                            .ldb = d->channels,
                            .b_slice = m->map.layer_stride,
                            .bias = d->bias ? w + shared_at(m, layer, MU_ROLE_PROJ_B) : NULL};
    struct stream out = {s->x1, model_slice_sum(m, p, &sum)};
    drop = model_site(m, p, number, MU_DROPOUT_PROJECTION);
    site = site_of(m, p, layer, true);
    model_norm(m, p, out, &drop, &site);
    const float *x = model_gather(m, p, s->norm2);
    if (d->llama) {
        columns_forward(m, p, layer, MU_ROLE_UP_W, MU_ROLE_UP_B, d->up, x, s->up, NULL);
        activate(m, p, s);
    } else {
        columns_forward(m, p, layer, MU_ROLE_UP_W, MU_ROLE_UP_B, d->up, x, s->act, s->up);
    }
    if (again)
        return (struct stream){0};
    sum = (struct slice_sum){.k = d->hidden,
                             .a = s->act,
                             .b = w + sliced_at(m, layer, 0, MU_ROLE_DOWN_W),
                             .ldb = d->channels,
                             .b_slice = m->map.layer_stride,
                             .bias = d->bias ? w + shared_at(m, layer, MU_ROLE_DOWN_B) : NULL};
    return (struct stream){s->x2, model_slice_sum(m, p, &sum)};
}

/* ---- backward ---- */

/* dw[in, out] (+)= x^T dy over all rows. */
static void weight_gradient(struct mu_model *m, const struct pass *p, uint32_t in, uint32_t out, const float *x,
                            const float *dy, float *dw)
{
    model_product(m, &(struct mu_gemm){.m = in,
                                       .n = out,
                                       .k = p->rows,
                                       .transpose_a = true,
                                       .a = x,
                                       .lda = in,
                                       .b = dy,
                                       .ldb = out,
                                       .c = dw,
                                       .ldc = out,
                                       .accumulate = p->accumulate});
}

/* Back through y = tree over s of (x_s w_s) + b, dy given in own rows: dw_s, db; dx_s = dy w_s^T, with `before`
 * multiplied by gelu'(before). x_s, dx_s, before [slices][n, width]. */
static void rows_backward(struct mu_model *m, const struct pass *p, uint32_t layer, enum mu_role w, enum mu_role b,
                          uint32_t width, const float *x, const float *before, const float *dy_own, float *dx)
{
    const uint32_t channels = m->dims.channels;
    if (m->dims.bias)
        model_bias_sums(m, p, dy_own, model_layer_sums(m, p, layer), m->map.layer_shared_size, m->map.role_at[b]);
    const float *dy = model_gather(m, p, dy_own);
    for (uint32_t s = 0; s < m->dims.slices; s++) {
        size_t at = (size_t)s * p->rows * width;
        uint64_t weight = sliced_at(m, layer, s, w);
        weight_gradient(m, p, width, channels, x + at, dy, p->grads + weight);
        model_product(m, &(struct mu_gemm){.m = p->rows,
                                           .n = width,
                                           .k = channels,
                                           .a = dy,
                                           .lda = channels,
                                           .transpose_b = true,
                                           .b = p->params + weight,
                                           .ldb = channels,
                                           .c = dx + at,
                                           .ldc = width,
                                           .epilogue = before ? MU_EPILOGUE_GELU_GRAD : MU_EPILOGUE_NONE,
                                           .aux = before ? before + at : NULL,
                                           .ldaux = width});
    }
}

/* Back through y_s = x w_s + b_s, x given in own rows: dw_s, db_s; returns dx = tree over s of dy_s w_s^T, own rows. */
static const float *columns_backward(struct mu_model *m, const struct pass *p, uint32_t layer, enum mu_role w,
                                     enum mu_role b, uint32_t width, const float *x_own, const float *dy)
{
    const float *x = model_gather(m, p, x_own);
    for (uint32_t s = 0; s < m->dims.slices; s++) {
        const float *dy_s = dy + (size_t)s * p->rows * width;
        weight_gradient(m, p, m->dims.channels, width, x, dy_s, p->grads + sliced_at(m, layer, s, w));
        if (m->dims.bias && m->status == MU_OK)
            m->status = mu_kernel_column_sum(m->pool, p->rows, width, dy_s, width, p->accumulate,
                                             p->grads + sliced_at(m, layer, s, b));
    }
    return model_slice_sum(m, p,
                           &(struct slice_sum){.k = width,
                                               .a = dy,
                                               .transpose_b = true,
                                               .b = p->params + sliced_at(m, layer, 0, w),
                                               .ldb = width,
                                               .b_slice = m->map.layer_stride});
}

/* Selective recomputation: the same norm of the residual stream that was kept, into the buffer that layers share. */
static void norm_again(struct mu_model *m, const struct pass *p, uint32_t layer, bool second)
{
    if (m->options.recompute != MU_RECOMPUTE_SELECTIVE)
        return;
    struct norm_site site = site_of(m, p, layer, second);
    model_norm(m, p, (struct stream){site.x, NULL}, NULL, &site);
}

static const float *back_to_norm(struct mu_model *m, const struct pass *p, uint32_t layer, bool second, const float *dy,
                                 const struct mu_dropout *drop, float *dx)
{
    struct norm_site site = site_of(m, p, layer, second);
    struct norm_gradient g = {.site = &site,
                              .dy = dy,
                              .drop = drop,
                              .sums = model_layer_sums(m, p, layer),
                              .size = m->map.layer_shared_size,
                              .at_w = m->map.role_at[second ? MU_ROLE_NORM2_W : MU_ROLE_NORM1_W],
                              .at_b = m->map.role_at[second ? MU_ROLE_NORM2_B : MU_ROLE_NORM1_B]};
    return model_norm_backward(m, p, &g, dx);
}

/* From the gradient of the layer's output branch to that of x2's branch. */
static const float *mlp_backward(struct mu_model *m, const struct pass *p, uint32_t layer, const float *dbranch,
                                 float *dx)
{
    const struct model_dims *d = &m->dims;
    const struct layer_state *s = &p->slot->layers[layer];
    float *dup = m->dhidden;
    if (m->options.recompute == MU_RECOMPUTE_SELECTIVE)
        activate(m, p, s);
    rows_backward(m, p, layer, MU_ROLE_DOWN_W, MU_ROLE_DOWN_B, d->hidden, s->act, d->llama ? NULL : s->up, dbranch,
                  m->dhidden);
    if (d->llama) { /* gate and up are not needed again: their gradients take their place */
        dup = s->up;
        if (m->status == MU_OK)
            m->status = mu_kernel_swiglu_backward(m->pool, d->slices * p->rows, d->hidden, s->up, m->dhidden, dup);
    }
    norm_again(m, p, layer, true);
    const float *dnorm = columns_backward(m, p, layer, MU_ROLE_UP_W, MU_ROLE_UP_B, d->up, s->norm2, dup);
    struct mu_dropout drop = model_site(m, p, m->options.part.first_layer + layer, MU_DROPOUT_PROJECTION);
    return back_to_norm(m, p, layer, true, dnorm, &drop, dx);
}

static const float *attention_backward(struct mu_model *m, const struct pass *p, uint32_t layer, const float *dbranch,
                                       float *dx)
{
    const struct model_dims *d = &m->dims;
    const struct layer_state *s = &p->slot->layers[layer];
    float *dattention = m->dhidden; /* free again */
    rows_backward(m, p, layer, MU_ROLE_PROJ_W, MU_ROLE_PROJ_B, d->attention, s->attention, NULL, dbranch, dattention);
    attention(m, p, layer, dattention);
    rotate(m, p, true, m->dqkv);
    norm_again(m, p, layer, false);
    const float *dnorm = columns_backward(m, p, layer, MU_ROLE_QKV_W, MU_ROLE_QKV_B, d->qkv, s->norm1, m->dqkv);
    struct mu_dropout drop = {0};
    if (layer > 0)
        drop = model_site(m, p, m->options.part.first_layer + layer - 1, MU_DROPOUT_MLP);
    return back_to_norm(m, p, layer, false, dnorm, layer > 0 ? &drop : NULL, dx);
}

static const float *layer_backward(struct mu_model *m, const struct pass *p, uint32_t layer, const float *dbranch,
                                   float *dx)
{
    if (m->options.recompute == MU_RECOMPUTE_FULL)
        model_layer_forward(m, p, layer, (struct stream){p->slot->layers[layer].x1, NULL}, true);
    dbranch = mlp_backward(m, p, layer, dbranch, dx);
    dbranch = attention_backward(m, p, layer, dbranch, dx);
    model_finish_sums(m, p, model_layer_sums(m, p, layer), m->map.layer_shared[layer], m->map.layer_shared_size);
    return dbranch;
}

const float *model_layer_backward(struct mu_model *m, const struct pass *p, uint32_t layer, const float *dbranch,
                                  float *dx)
{
    const struct model_sequence sequence = {MODEL_LAYER_BACKWARD, layer, dbranch, dx};
    if (model_replayed(m, p, &sequence)) {
        dbranch = dx; /* as without dropout */
    } else {
        const float *from = dbranch;
        do
            dbranch = layer_backward(m, p, layer, from, dx);
        while (model_again(m));
        MU_ASSERT(p->dropout || dbranch == dx || m->status != MU_OK);
    }
    uint32_t number = m->options.part.first_layer + layer;
    model_report_slices(m, p, MU_CELL_L, number);
    model_report(m, p, MU_CELL_L_SHARED, number, 0);
    return dbranch;
}
