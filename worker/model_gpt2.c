#include "worker/model.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/arena.h"

enum { LOSS_BLOCK = 256 /* token losses are added in blocks of this many, blocks in order */ };

/* Where the tensors of one layer start in the flat space: the same for parameters and gradients. */
struct layer_map {
    uint64_t ln1_w, ln1_b, qkv_w, qkv_b, proj_w, proj_b, ln2_w, ln2_b, fc_w, fc_b, fcproj_w, fcproj_b;
};

/* What the forward pass of one layer leaves for the backward pass. N tokens, C channels. */
struct layer_state {
    float *x1, *ln1, *mean1, *rstd1; /* residual stream before attention [N,C], its norm [N,C] */
    float *qkv, *lse, *attention;    /* [N,3C], [sequences, heads, length], [N,C] */
    float *x2, *ln2, *mean2, *rstd2; /* residual stream before the MLP */
    float *fc, *gelu;                /* [N,4C] before and after GELU */
};

struct mu_model {
    struct mu_model_spec spec;
    struct mu_model_options options;
    struct mu_pool *pool;
    struct mu_arena *arena;

    struct layer_state *layers; /* [layers]; with forward_only all point to one set */
    float *xf, *lnf, *meanf, *rstdf;
    float *branch;                       /* [N,C] output of attention or MLP before it is added */
    float *logits;                       /* [head_tokens, logits_stride] */
    double *losses;                      /* [N] */
    float *dnorm, *dbranch, *dfc, *dqkv; /* gradients: [N,C], [N,C], [N,4C], [N,3C]; dbranch only with dropout */
    float *norm_workspace;
    float **dembedding; /* [accumulate][N,C]: gradient of the residual stream, kept to the leaf's end */
    int32_t *tokens;    /* [accumulate][N], copies for the look-up's gradient */
    uint64_t *samples;  /* [accumulate][micro] */
    uint32_t head_tokens;
    size_t logits_stride;

    enum mu_status status; /* of the call in progress: after the first failure (cancelled) the rest is skipped */
    uint64_t forward_ns, backward_ns;
};

/* One call: the logical shape, and where the numbers are. */
struct pass {
    uint32_t sequences, length, rows; /* rows = sequences * length */
    const int32_t *tokens, *targets;
    const struct mu_micro_batch *batch; /* NULL: no gradient */
    const float *params;
    float *grads;
    bool accumulate; /* gradients are added into what earlier micro-batches of the leaf left */
    bool dropout;
};

/* ---- workspace ---- */

/* Runs over all buffers twice: to count bytes (arena NULL), then to take them. */
struct planner {
    struct mu_arena *arena;
    size_t total_bytes;
};

static void *place(struct planner *planner, size_t size_bytes)
{
    planner->total_bytes += mu_arena_piece_bytes(size_bytes);
    return planner->arena ? mu_arena_take(planner->arena, size_bytes) : NULL;
}

static float *place_floats(struct planner *planner, size_t count)
{
    return place(planner, count * sizeof(float));
}

static void place_layer(struct planner *planner, const struct mu_model_config *c, size_t n, struct layer_state *s)
{
    s->x1 = place_floats(planner, n * c->channels);
    s->ln1 = place_floats(planner, n * c->channels);
    s->mean1 = place_floats(planner, n);
    s->rstd1 = place_floats(planner, n);
    s->qkv = place_floats(planner, n * 3 * c->channels);
    s->lse = place_floats(planner, n * c->heads);
    s->attention = place_floats(planner, n * c->channels);
    s->x2 = place_floats(planner, n * c->channels);
    s->ln2 = place_floats(planner, n * c->channels);
    s->mean2 = place_floats(planner, n);
    s->rstd2 = place_floats(planner, n);
    s->fc = place_floats(planner, n * 4 * c->channels);
    s->gelu = place_floats(planner, n * 4 * c->channels);
}

static void place_gradients(struct planner *planner, struct mu_model *m, size_t n)
{
    const struct mu_model_config *c = &m->spec.config;
    m->dnorm = place_floats(planner, n * c->channels);
    m->dbranch = c->dropout > 0.0f ? place_floats(planner, n * c->channels) : NULL;
    m->dfc = place_floats(planner, n * 4 * c->channels);
    m->dqkv = place_floats(planner, n * 3 * c->channels);
    m->norm_workspace = place_floats(planner, mu_kernel_norm_workspace((uint32_t)n, c->channels));
    m->dembedding = place(planner, m->options.accumulate * sizeof(float *));
    m->tokens = place(planner, m->options.accumulate * n * sizeof(int32_t));
    m->samples = place(planner, (size_t)m->options.accumulate * m->options.micro * sizeof(uint64_t));
    for (uint32_t i = 0; i < m->options.accumulate; i++) {
        float *buffer = place_floats(planner, n * c->channels);
        if (m->dembedding)
            m->dembedding[i] = buffer;
    }
}

static void place_all(struct planner *planner, struct mu_model *m)
{
    const struct mu_model_config *c = &m->spec.config;
    size_t n = (size_t)m->options.micro * m->options.length;
    struct layer_state layer = {0};
    m->layers = place(planner, c->layers * sizeof *m->layers);
    for (uint32_t i = 0; i < c->layers; i++) {
        if (i == 0 || !m->options.forward_only)
            place_layer(planner, c, n, &layer);
        if (m->layers)
            m->layers[i] = layer;
    }
    m->head_tokens = n < MU_HEAD_TOKENS ? (uint32_t)n : MU_HEAD_TOKENS;
    m->logits_stride = ((size_t)c->vocab + 15) / 16 * 16;
    m->xf = place_floats(planner, n * c->channels);
    m->lnf = place_floats(planner, n * c->channels);
    m->meanf = place_floats(planner, n);
    m->rstdf = place_floats(planner, n);
    m->branch = place_floats(planner, n * c->channels);
    m->logits = place_floats(planner, m->head_tokens * m->logits_stride);
    m->losses = place(planner, n * sizeof(double));
    if (!m->options.forward_only)
        place_gradients(planner, m, n);
}

static enum mu_status check_options(const struct mu_model_spec *spec, const struct mu_model_options *o,
                                    struct mu_error *err)
{
    const struct mu_model_config *c = &spec->config;
    if (c->family != MU_FAMILY_GPT2 || c->channels == 0 || c->heads == 0 || c->channels % c->heads || c->layers == 0)
        return mu_fail(err, MU_ERR_INVALID, "model: %u layers, %u heads, %u channels is no GPT-2 shape", c->layers,
                       c->heads, c->channels);
    if (o->length == 0 || o->length > c->context)
        return mu_fail(err, MU_ERR_INVALID, "model: length %u is not allowed: 1 to the context, %u", o->length,
                       c->context);
    if (o->micro == 0 || o->micro > MU_MICRO_SEQUENCES_MAX || (uint64_t)o->micro * o->length > MU_MICRO_TOKENS_MAX)
        return mu_fail(err, MU_ERR_INVALID,
                       "model: micro %u is not allowed with length %u: 1 to %d sequences and at most %d tokens",
                       o->micro, o->length, MU_MICRO_SEQUENCES_MAX, MU_MICRO_TOKENS_MAX);
    if (!o->forward_only && (o->accumulate == 0 || o->accumulate > MU_ACCUMULATE_MAX))
        return mu_fail(err, MU_ERR_INVALID, "model: accumulate %u is not allowed: 1 to %d", o->accumulate,
                       MU_ACCUMULATE_MAX);
    uint32_t head = c->channels / c->heads;
    size_t padded = (size_t)(head + 15) / 16 * 16;
    size_t tokens = (size_t)(o->length + MU_ATTENTION_TILE - 1) / MU_ATTENTION_TILE * MU_ATTENTION_TILE;
    if (head > MU_ATTENTION_HEAD_MAX || tokens * padded > MU_ATTENTION_ELEMENTS_MAX)
        return mu_fail(err, MU_ERR_INVALID,
                       "model: %u channels per head with length %u is not supported: at most %d channels, and channels "
                       "times length "
                       "at most %d; use more heads or shorter sequences",
                       head, o->length, MU_ATTENTION_HEAD_MAX, MU_ATTENTION_ELEMENTS_MAX);
    return MU_OK;
}

size_t mu_model_workspace_bytes(const struct mu_model_spec *spec, const struct mu_model_options *options)
{
    struct mu_model model = {.spec = *spec, .options = *options};
    struct planner planner = {0};
    place_all(&planner, &model);
    return planner.total_bytes;
}

enum mu_status mu_model_new(const struct mu_model_spec *spec, const struct mu_model_options *options,
                            struct mu_pool *pool, struct mu_error *err, struct mu_model **ret_model)
{
    enum mu_status status = check_options(spec, options, err);
    if (status != MU_OK)
        return status;
    struct mu_model *model = calloc(1, sizeof *model);
    if (!model)
        return mu_fail(err, MU_ERR_NO_MEMORY, "model: out of memory");
    model->spec = *spec;
    model->options = *options;
    model->pool = pool;
    struct planner planner = {0};
    status = mu_arena_new(mu_model_workspace_bytes(spec, options), err, &planner.arena);
    if (status != MU_OK) {
        mu_error_prefix(err, "model workspace");
        free(model);
        return status;
    }
    model->arena = planner.arena;
    place_all(&planner, model);
    *ret_model = model;
    return MU_OK;
}

void mu_model_free(struct mu_model *model)
{
    if (!model)
        return;
    mu_arena_free(model->arena);
    free(model);
}

/* ---- parameters ---- */

static uint64_t offset_of(const struct mu_model *m, uint32_t layer, enum mu_gpt2_role role)
{
    return mu_gpt2_tensor(&m->spec, layer, role).offset;
}

static struct layer_map map_layer(const struct mu_model *m, uint32_t layer)
{
    return (struct layer_map){
        .ln1_w = offset_of(m, layer, MU_GPT2_LN1_W),
        .ln1_b = offset_of(m, layer, MU_GPT2_LN1_B),
        .qkv_w = offset_of(m, layer, MU_GPT2_QKV_W),
        .qkv_b = offset_of(m, layer, MU_GPT2_QKV_B),
        .proj_w = offset_of(m, layer, MU_GPT2_PROJ_W),
        .proj_b = offset_of(m, layer, MU_GPT2_PROJ_B),
        .ln2_w = offset_of(m, layer, MU_GPT2_LN2_W),
        .ln2_b = offset_of(m, layer, MU_GPT2_LN2_B),
        .fc_w = offset_of(m, layer, MU_GPT2_FC_W),
        .fc_b = offset_of(m, layer, MU_GPT2_FC_B),
        .fcproj_w = offset_of(m, layer, MU_GPT2_FCPROJ_W),
        .fcproj_b = offset_of(m, layer, MU_GPT2_FCPROJ_B),
    };
}

enum mu_status mu_model_init_parameters(const struct mu_model_spec *spec, struct mu_pool *pool, uint64_t seed,
                                        float *params)
{
    for (uint32_t i = 0; i < spec->cell_count; i++) {
        struct mu_cell cell = mu_model_cell(spec, i);
        uint64_t end = i + 1 < spec->cell_count ? mu_model_cell(spec, i + 1).offset : spec->flat_size;
        memset(params + cell.offset + cell.size, 0, (size_t)(end - cell.offset - cell.size) * sizeof(float));
    }
    for (uint32_t i = 0; i < spec->tensor_count; i++) {
        struct mu_tensor tensor = mu_model_tensor(spec, i);
        float *x = params + tensor.offset;
        enum mu_status status =
            tensor.init == MU_INIT_NORMAL
                ? mu_kernel_init_normal(pool, seed, i, 0, (size_t)tensor.size, (float)tensor.init_std, x)
                : mu_kernel_fill(pool, (size_t)tensor.size, tensor.init == MU_INIT_ONE ? 1.0f : 0.0f, x);
        if (status != MU_OK)
            return status;
    }
    return MU_OK;
}

struct update_run {
    struct mu_pool *pool;
    struct mu_adamw decayed, plain;
    uint64_t offset, end;
    float *params, *m, *v;
    const float *grads;
};

static enum mu_status update_tensor(const struct update_run *run, const struct mu_tensor *tensor)
{
    uint64_t first = tensor->offset > run->offset ? tensor->offset : run->offset;
    uint64_t last = tensor->offset + tensor->size < run->end ? tensor->offset + tensor->size : run->end;
    if (first >= last)
        return MU_OK;
    return mu_kernel_adamw(run->pool, tensor->decay ? &run->decayed : &run->plain, (size_t)(last - first),
                           run->params + first, run->m + first, run->v + first, run->grads + first);
}

enum mu_status mu_model_update(const struct mu_model_spec *spec, struct mu_pool *pool, const struct mu_adamw *adamw,
                               uint64_t offset, uint64_t size, float *params, float *m, float *v, const float *grads)
{
    MU_ASSERT(offset <= spec->flat_size && size <= spec->flat_size - offset);
    struct update_run run = {pool, *adamw, *adamw, offset, offset + size, params, m, v, grads};
    run.plain.weight_decay = 0.0f;
    enum mu_status status = MU_OK;
    static const enum mu_gpt2_role outer[] = {MU_GPT2_WTE, MU_GPT2_WPE, MU_GPT2_LNF_W, MU_GPT2_LNF_B};
    for (size_t i = 0; i < sizeof outer / sizeof outer[0] && status == MU_OK; i++) {
        struct mu_tensor tensor = mu_gpt2_tensor(spec, 0, outer[i]);
        status = update_tensor(&run, &tensor);
    }
    for (uint32_t layer = 0; layer < spec->config.layers && status == MU_OK; layer++) {
        struct mu_cell slice = mu_model_cell(spec, mu_gpt2_tensor(spec, layer, MU_GPT2_QKV_W).cell);
        struct mu_cell shared = mu_model_cell(spec, mu_gpt2_tensor(spec, layer, MU_GPT2_LN1_W).cell);
        if (slice.offset >= run.end || shared.offset + shared.size <= run.offset)
            continue; /* a layer's cells follow each other: slice, shared */
        for (enum mu_gpt2_role role = MU_GPT2_LN1_W; role <= MU_GPT2_FCPROJ_B && status == MU_OK; role++) {
            struct mu_tensor tensor = mu_gpt2_tensor(spec, layer, role);
            status = update_tensor(&run, &tensor);
        }
    }
    return status;
}

/* ---- steps of the passes: nothing happens once model->status is not MU_OK ---- */

static void product(struct mu_model *m, const struct mu_gemm *gemm)
{
    if (m->status == MU_OK)
        m->status = mu_kernel_gemm(m->pool, gemm);
}

/* y[rows,out] = x[rows,in] w[in,out] + b; with `gelu` y = gelu of that, which itself is kept in aux. */
static void linear(struct mu_model *m, uint32_t rows, uint32_t in, uint32_t out, const float *x, const float *w,
                   const float *b, float *y, float *aux)
{
    product(m, &(struct mu_gemm){.m = rows,
                                 .n = out,
                                 .k = in,
                                 .a = x,
                                 .lda = in,
                                 .b = w,
                                 .ldb = out,
                                 .c = y,
                                 .ldc = out,
                                 .epilogue = aux ? MU_EPILOGUE_BIAS_GELU : MU_EPILOGUE_BIAS,
                                 .bias = b,
                                 .before = aux,
                                 .ldaux = out});
}

/* dw (+)= x^T dy, db (+)= column sums of dy, dx = dy w^T; with `before` dx is multiplied by gelu'(before). */
static void linear_backward(struct mu_model *m, const struct pass *p, uint32_t in, uint32_t out, const float *x,
                            const float *w, const float *dy, float *dw, float *db, float *dx, const float *before)
{
    product(m, &(struct mu_gemm){.m = in,
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
    if (m->status == MU_OK)
        m->status = mu_kernel_column_sum(m->pool, p->rows, out, dy, out, p->accumulate, db);
    product(m, &(struct mu_gemm){.m = p->rows,
                                 .n = in,
                                 .k = out,
                                 .a = dy,
                                 .lda = out,
                                 .transpose_b = true,
                                 .b = w,
                                 .ldb = out,
                                 .c = dx,
                                 .ldc = in,
                                 .epilogue = before ? MU_EPILOGUE_GELU_GRAD : MU_EPILOGUE_NONE,
                                 .aux = before,
                                 .ldaux = in});
}

static struct mu_dropout site(const struct mu_model *m, const struct pass *p, uint32_t layer, enum mu_dropout_op op)
{
    if (!p->dropout)
        return (struct mu_dropout){0};
    return mu_dropout_site(p->batch->seed, p->batch->step, layer, op, m->spec.config.dropout, p->batch->samples);
}

static void norm(struct mu_model *m, const struct pass *p, const float *residual, const float *branch,
                 const struct mu_dropout *drop, const float *w, const float *b, float *out, float *y, float *mean,
                 float *rstd)
{
    if (m->status == MU_OK)
        m->status = mu_kernel_norm_forward(m->pool,
                                           &(struct mu_norm_forward){p->sequences, p->length, m->spec.config.channels,
                                                                     residual, branch, w, b, drop, out, y, mean, rstd});
}

static struct mu_attention attention_of(const struct mu_model *m, const struct pass *p, const struct layer_state *s,
                                        const struct mu_dropout *drop)
{
    const struct mu_model_config *c = &m->spec.config;
    return (struct mu_attention){.sequences = p->sequences,
                                 .length = p->length,
                                 .heads = c->heads,
                                 .channels = c->channels,
                                 .qkv = s->qkv,
                                 .drop = drop,
                                 .out = s->attention,
                                 .lse = s->lse};
}

/* ---- forward ---- */

/* Embedding, all layers, final norm: leaves m->lnf. */
static void forward(struct mu_model *m, const struct pass *p)
{
    const struct mu_model_config *c = &m->spec.config;
    const uint32_t n = p->rows, channels = c->channels;
    const float *w = p->params;
    struct mu_dropout drop = site(m, p, 0, MU_DROPOUT_EMBEDDING);
    m->status = mu_kernel_embedding_forward(m->pool, p->sequences, p->length, channels, c->vocab, p->tokens,
                                            w + offset_of(m, 0, MU_GPT2_WTE), w + offset_of(m, 0, MU_GPT2_WPE), &drop,
                                            m->layers[0].x1);
    const float *x = m->layers[0].x1, *branch = NULL; /* the stream so far is x + branch */
    for (uint32_t i = 0; i < c->layers && m->status == MU_OK; i++) {
        const struct layer_state *s = &m->layers[i];
        const struct layer_map t = map_layer(m, i);
        drop = site(m, p, i ? i - 1 : 0, MU_DROPOUT_MLP);
        norm(m, p, x, branch, &drop, w + t.ln1_w, w + t.ln1_b, s->x1, s->ln1, s->mean1, s->rstd1);
        linear(m, n, channels, 3 * channels, s->ln1, w + t.qkv_w, w + t.qkv_b, s->qkv, NULL);
        drop = site(m, p, i, MU_DROPOUT_ATTENTION);
        struct mu_attention attention = attention_of(m, p, s, &drop);
        if (m->status == MU_OK)
            m->status = mu_kernel_attention_forward(m->pool, &attention);
        linear(m, n, channels, channels, s->attention, w + t.proj_w, w + t.proj_b, m->branch, NULL);
        drop = site(m, p, i, MU_DROPOUT_PROJECTION);
        norm(m, p, s->x1, m->branch, &drop, w + t.ln2_w, w + t.ln2_b, s->x2, s->ln2, s->mean2, s->rstd2);
        linear(m, n, channels, 4 * channels, s->ln2, w + t.fc_w, w + t.fc_b, s->gelu, s->fc);
        linear(m, n, 4 * channels, channels, s->gelu, w + t.fcproj_w, w + t.fcproj_b, m->branch, NULL);
        x = s->x2;
        branch = m->branch;
    }
    drop = site(m, p, c->layers - 1, MU_DROPOUT_MLP);
    norm(m, p, x, branch, &drop, w + offset_of(m, 0, MU_GPT2_LNF_W), w + offset_of(m, 0, MU_GPT2_LNF_B), m->xf, m->lnf,
         m->meanf, m->rstdf);
}

static uint64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Logits, losses and, with p->grads, the gradients of lnf (into m->dnorm) and wte, a few tokens at a time. */
static void head(struct mu_model *m, const struct pass *p)
{
    const struct mu_model_config *c = &m->spec.config;
    const float *wte = p->params + offset_of(m, 0, MU_GPT2_WTE);
    const float scale = p->grads ? (float)(1.0 / (double)p->batch->loss_divisor) : 0.0f;
    const size_t stride = m->logits_stride;
    for (uint32_t row = 0; row < p->rows && m->status == MU_OK; row += m->head_tokens) {
        uint64_t start_ns = clock_ns();
        uint32_t rows = p->rows - row < m->head_tokens ? p->rows - row : m->head_tokens;
        const float *x = m->lnf + (size_t)row * c->channels;
        product(m, &(struct mu_gemm){.m = rows,
                                     .n = c->vocab,
                                     .k = c->channels,
                                     .a = x,
                                     .lda = c->channels,
                                     .transpose_b = true,
                                     .b = wte,
                                     .ldb = c->channels,
                                     .c = m->logits,
                                     .ldc = stride});
        if (m->status == MU_OK)
            m->status = mu_kernel_cross_entropy(m->pool, rows, c->vocab, stride, m->logits, p->targets + row, scale,
                                                p->grads != NULL, m->losses + row);
        uint64_t middle_ns = clock_ns();
        m->forward_ns += middle_ns - start_ns;
        if (!p->grads)
            continue;
        product(m, &(struct mu_gemm){.m = rows,
                                     .n = c->channels,
                                     .k = c->vocab,
                                     .a = m->logits,
                                     .lda = stride,
                                     .b = wte,
                                     .ldb = c->channels,
                                     .c = m->dnorm + (size_t)row * c->channels,
                                     .ldc = c->channels});
        product(m, &(struct mu_gemm){.m = c->vocab,
                                     .n = c->channels,
                                     .k = rows,
                                     .transpose_a = true,
                                     .a = m->logits,
                                     .lda = stride,
                                     .b = x,
                                     .ldb = c->channels,
                                     .c = p->grads + offset_of(m, 0, MU_GPT2_WTE),
                                     .ldc = c->channels,
                                     .accumulate = p->accumulate || row > 0});
        m->backward_ns += clock_ns() - middle_ns;
    }
}

static double sum_losses(const double *losses, uint32_t count)
{
    double total = 0;
    for (uint32_t first = 0; first < count; first += LOSS_BLOCK) {
        double block = 0;
        for (uint32_t i = first; i < count && i < first + LOSS_BLOCK; i++)
            block += losses[i];
        total += block;
    }
    return total;
}

/* ---- backward ---- */

static void report_cell(const struct mu_model *m, const struct pass *p, uint32_t layer, enum mu_gpt2_role role)
{
    const struct mu_micro_batch *b = p->batch;
    if (m->status == MU_OK && b->cell_done && b->index == b->count - 1)
        b->cell_done(b->cell_done_ctx, mu_gpt2_tensor(&m->spec, layer, role).cell);
}

/* dx += norm'(dy), and the gradient of the branch that was added before this norm; returns the latter. */
static const float *norm_back(struct mu_model *m, const struct pass *p, const float *x, const float *mean,
                              const float *rstd, const float *w, float *dw, float *db, bool first,
                              const struct mu_dropout *drop, float *dx)
{
    float *dbranch = p->dropout && drop ? m->dbranch : NULL;
    if (m->status == MU_OK)
        m->status = mu_kernel_norm_backward(m->pool, &(struct mu_norm_backward){.sequences = p->sequences,
                                                                                .length = p->length,
                                                                                .channels = m->spec.config.channels,
                                                                                .residual = x,
                                                                                .weight = w,
                                                                                .mean = mean,
                                                                                .rstd = rstd,
                                                                                .dy = m->dnorm,
                                                                                .drop = drop,
                                                                                .accumulate = p->accumulate,
                                                                                .first = first,
                                                                                .dresidual = dx,
                                                                                .dbranch = dbranch,
                                                                                .dweight = dw,
                                                                                .dbias = db,
                                                                                .workspace = m->norm_workspace});
    return dbranch ? dbranch : dx;
}

static const float *backward_layer(struct mu_model *m, const struct pass *p, uint32_t i, const float *dbranch,
                                   float *dx)
{
    const uint32_t channels = m->spec.config.channels;
    const struct layer_state *s = &m->layers[i];
    const struct layer_map t = map_layer(m, i);
    const float *w = p->params;
    float *g = p->grads;
    linear_backward(m, p, 4 * channels, channels, s->gelu, w + t.fcproj_w, dbranch, g + t.fcproj_w, g + t.fcproj_b,
                    m->dfc, s->fc);
    linear_backward(m, p, channels, 4 * channels, s->ln2, w + t.fc_w, m->dfc, g + t.fc_w, g + t.fc_b, m->dnorm, NULL);
    struct mu_dropout drop = site(m, p, i, MU_DROPOUT_PROJECTION);
    dbranch = norm_back(m, p, s->x2, s->mean2, s->rstd2, w + t.ln2_w, g + t.ln2_w, g + t.ln2_b, false, &drop, dx);
    float *dattention = m->dfc; /* free again */
    linear_backward(m, p, channels, channels, s->attention, w + t.proj_w, dbranch, g + t.proj_w, g + t.proj_b,
                    dattention, NULL);
    drop = site(m, p, i, MU_DROPOUT_ATTENTION);
    struct mu_attention attention = attention_of(m, p, s, &drop);
    attention.dout = dattention;
    attention.dqkv = m->dqkv;
    if (m->status == MU_OK)
        m->status = mu_kernel_attention_backward(m->pool, &attention);
    linear_backward(m, p, channels, 3 * channels, s->ln1, w + t.qkv_w, m->dqkv, g + t.qkv_w, g + t.qkv_b, m->dnorm,
                    NULL);
    drop = site(m, p, i ? i - 1 : 0, MU_DROPOUT_MLP);
    dbranch =
        norm_back(m, p, s->x1, s->mean1, s->rstd1, w + t.ln1_w, g + t.ln1_w, g + t.ln1_b, false, i ? &drop : NULL, dx);
    report_cell(m, p, i, MU_GPT2_QKV_W);
    report_cell(m, p, i, MU_GPT2_LN1_W);
    return dbranch;
}

/* The look-up's gradients of the whole leaf, after the head's (see the header). */
static void backward_embedding(struct mu_model *m, const struct pass *p)
{
    const struct mu_model_config *c = &m->spec.config;
    float *dwte = p->grads + offset_of(m, 0, MU_GPT2_WTE), *dwpe = p->grads + offset_of(m, 0, MU_GPT2_WPE);
    if (m->status == MU_OK)
        m->status = mu_kernel_fill(m->pool, (size_t)c->context * c->channels, 0.0f, dwpe);
    for (uint32_t i = 0; i < p->batch->count && m->status == MU_OK; i++) {
        struct mu_dropout drop = site(m, p, 0, MU_DROPOUT_EMBEDDING);
        drop.samples = m->samples + (size_t)i * m->options.micro;
        m->status = mu_kernel_embedding_backward(m->pool, p->sequences, p->length, c->channels,
                                                 m->tokens + (size_t)i * p->rows, &drop, m->dembedding[i], dwte, dwpe);
    }
    report_cell(m, p, 0, MU_GPT2_WPE);
    report_cell(m, p, 0, MU_GPT2_WTE);
}

static void backward(struct mu_model *m, const struct pass *p)
{
    const struct mu_micro_batch *b = p->batch;
    uint32_t layers = m->spec.config.layers;
    float *dx = m->dembedding[b->index];
    struct mu_dropout drop = site(m, p, layers - 1, MU_DROPOUT_MLP);
    const float *dbranch = norm_back(m, p, m->xf, m->meanf, m->rstdf, p->params + offset_of(m, 0, MU_GPT2_LNF_W),
                                     p->grads + offset_of(m, 0, MU_GPT2_LNF_W),
                                     p->grads + offset_of(m, 0, MU_GPT2_LNF_B), true, &drop, dx);
    report_cell(m, p, 0, MU_GPT2_LNF_W);
    for (uint32_t i = layers; i-- > 0 && m->status == MU_OK;)
        dbranch = backward_layer(m, p, i, dbranch, dx);
    memcpy(m->tokens + (size_t)b->index * p->rows, b->tokens, p->rows * sizeof *b->tokens);
    if (p->dropout)
        memcpy(m->samples + (size_t)b->index * p->sequences, b->samples, p->sequences * sizeof *b->samples);
    if (b->index == b->count - 1)
        backward_embedding(m, p);
}

/* ---- calls ---- */

static struct pass pass_of(const struct mu_model *m, const struct mu_micro_batch *batch, const float *params)
{
    return (struct pass){
        .sequences = m->options.micro,
        .length = m->options.length,
        .rows = m->options.micro * m->options.length,
        .tokens = batch->tokens,
        .targets = batch->targets,
        .batch = batch,
        .params = params,
    };
}

enum mu_status mu_model_check_batch(const struct mu_model *model, const struct mu_micro_batch *batch,
                                    struct mu_error *err)
{
    uint32_t length = model->options.length, vocab = model->spec.config.vocab;
    for (uint32_t i = 0; i < model->options.micro * length; i++) {
        if (batch->tokens[i] < 0 || (uint32_t)batch->tokens[i] >= vocab)
            return mu_fail(err, MU_ERR_INVALID, "sequence %u, token %u: %d is not allowed: 0 to %u (vocab - 1)",
                           i / length, i % length, batch->tokens[i], vocab - 1);
        if (batch->targets[i] < -1 || (batch->targets[i] >= 0 && (uint32_t)batch->targets[i] >= vocab))
            return mu_fail(err, MU_ERR_INVALID,
                           "sequence %u, target %u: %d is not allowed: 0 to %u (vocab - 1), or -1 (not counted)",
                           i / length, i % length, batch->targets[i], vocab - 1);
    }
    return MU_OK;
}

enum mu_status mu_model_forward_backward(struct mu_model *model, const struct mu_micro_batch *batch,
                                         const float *params, float *grads, double *ret_loss_sum)
{
    MU_ASSERT(!model->options.forward_only && batch->loss_divisor >= 1);
    MU_ASSERT(batch->index < batch->count && batch->count <= model->options.accumulate);
    struct pass p = pass_of(model, batch, params);
    p.grads = grads;
    p.accumulate = batch->index > 0;
    p.dropout = model->spec.config.dropout > 0.0f;
    model->forward_ns = model->backward_ns = 0;
    uint64_t start_ns = clock_ns();
    forward(model, &p);
    model->forward_ns += clock_ns() - start_ns;
    head(model, &p);
    start_ns = clock_ns();
    if (model->status == MU_OK)
        backward(model, &p);
    model->backward_ns += clock_ns() - start_ns;
    if (model->status == MU_OK)
        *ret_loss_sum = sum_losses(model->losses, p.rows);
    return model->status;
}

enum mu_status mu_model_loss(struct mu_model *model, const struct mu_micro_batch *batch, const float *params,
                             double *ret_loss_sum)
{
    struct pass p = pass_of(model, batch, params);
    forward(model, &p);
    head(model, &p);
    if (model->status == MU_OK)
        *ret_loss_sum = sum_losses(model->losses, p.rows);
    return model->status;
}

enum mu_status mu_model_logits_last(struct mu_model *model, const int32_t *tokens, uint32_t count, const float *params,
                                    float *logits, struct mu_error *err)
{
    const struct mu_model_config *c = &model->spec.config;
    uint32_t room = model->options.length; /* one sequence: what check_options admitted */
    if (count == 0 || count > room)
        return mu_fail(err, MU_ERR_INVALID, "prompt: %u tokens are not allowed: 1 to %u", count, room);
    for (uint32_t i = 0; i < count; i++)
        if (tokens[i] < 0 || (uint32_t)tokens[i] >= c->vocab)
            return mu_fail(err, MU_ERR_INVALID, "prompt: token %u is %d: 0 to %u are allowed", i, tokens[i],
                           c->vocab - 1);
    struct pass p = {.sequences = 1, .length = count, .rows = count, .tokens = tokens, .params = params};
    forward(model, &p);
    product(model, &(struct mu_gemm){.m = 1,
                                     .n = c->vocab,
                                     .k = c->channels,
                                     .a = model->lnf + (size_t)(count - 1) * c->channels,
                                     .lda = c->channels,
                                     .transpose_b = true,
                                     .b = params + offset_of(model, 0, MU_GPT2_WTE),
                                     .ldb = c->channels,
                                     .c = logits,
                                     .ldc = c->vocab});
    return model->status == MU_OK ? MU_OK : mu_fail(err, model->status, "generation was cancelled");
}

void mu_model_times(const struct mu_model *model, uint64_t *ret_forward_ns, uint64_t *ret_backward_ns)
{
    *ret_forward_ns = model->forward_ns;
    *ret_backward_ns = model->backward_ns;
}
