/* Drivers of the row and range operations: cut the work into tasks that own what they write, and run them on the pool.
 */
#include "kernels/kernels.h"

#include <string.h>

#include "common/fmath.h"
#include "common/rng.h"
#include "kernels/cpu/isa.h"
#include "plan/model_spec.h"

enum {
    ROWS_OF_TASK = 16,     /* rows of one task of a forward row operation */
    COLUMNS_OF_TASK = 64,  /* columns of one task of an embedding backward pass */
    LOSS_ROWS_OF_TASK = 4, /* rows of logits */
    NORM_BLOCKS_OF_TASK = 64,
    DROP_TAG = 0x64726f70, /* "drop" */
};

static uint32_t divide_up(size_t a, size_t b)
{
    size_t result = (a + b - 1) / b;
    MU_ASSERT(result <= UINT32_MAX);
    return (uint32_t)result;
}

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

static const struct mu_dropout *in_effect(const struct mu_dropout *drop)
{
    return drop && drop->threshold ? drop : NULL;
}

/* ---- dropout ---- */

struct mu_dropout mu_dropout_site(uint64_t seed, uint64_t step, uint32_t layer, enum mu_dropout_op op, float rate,
                                  const uint64_t *samples)
{
    MU_ASSERT(rate >= 0.0f && rate < 1.0f);
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    const uint32_t counter[4] = {(uint32_t)step, (uint32_t)(step >> 32), layer * 256 + (uint32_t)op, DROP_TAG};
    uint32_t words[4];
    mu_philox4x32(key, counter, words);
    struct mu_dropout site = {.key = {words[0], words[1]}, .samples = samples};
    site.threshold = (uint32_t)((double)rate * 0x1p32);
    site.scale = (float)(1.0 / (1.0 - (double)rate));
    return site;
}

void mu_dropout_factors(const struct mu_dropout *site, uint32_t sequence, uint32_t token, uint32_t first,
                        uint32_t count, float *keep)
{
    MU_ASSERT(first % 64 == 0);
    mu_isa_ops()->dropout_factors(site, sequence, token, first, count, keep);
}

/* Factors of one row, in the lane's scratch; NULL when nothing is dropped. */
static const float *row_factors(const struct mu_isa_ops *ops, const struct mu_dropout *drop, uint32_t length,
                                uint32_t row, uint32_t channels, float *scratch)
{
    if (!drop)
        return NULL;
    ops->dropout_factors(drop, row / length, row % length, 0, channels, scratch);
    return scratch;
}

/* ---- embedding ---- */

struct embedding_run {
    const struct mu_isa_ops *ops;
    uint32_t sequences, length, channels, vocab;
    const int32_t *tokens;
    const float *wte, *wpe;
    const struct mu_dropout *drop;
    float *x, *dwte, *dwpe;
};

static void embedding_forward_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    const struct embedding_run *r = arg;
    size_t end = min_size((size_t)r->sequences * r->length, (size_t)(task + 1) * ROWS_OF_TASK);
    for (uint32_t row = task * ROWS_OF_TASK; row < end; row++) {
        int32_t token = r->tokens[row];
        MU_ASSERT(token >= 0 && (uint32_t)token < r->vocab);
        const float *keep = row_factors(r->ops, r->drop, r->length, row, r->channels, lane->scratch);
        r->ops->embedding_row(r->channels, r->wte + (size_t)token * r->channels,
                              r->wpe + (size_t)(row % r->length) * r->channels, keep, r->x + (size_t)row * r->channels);
    }
}

enum mu_status mu_kernel_embedding_forward(struct mu_pool *pool, uint32_t sequences, uint32_t length, uint32_t channels,
                                           uint32_t vocab, const int32_t *tokens, const float *wte, const float *wpe,
                                           const struct mu_dropout *drop, float *x)
{
    struct embedding_run run = {mu_isa_ops(), sequences, length,          channels, vocab, tokens,
                                wte,          wpe,       in_effect(drop), x,        NULL,  NULL};
    return mu_pool_run(pool, divide_up((size_t)sequences * length, ROWS_OF_TASK), embedding_forward_task, &run);
}

static void embedding_drop_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    const struct embedding_run *r = arg;
    size_t end = min_size((size_t)r->sequences * r->length, (size_t)(task + 1) * ROWS_OF_TASK);
    for (uint32_t row = task * ROWS_OF_TASK; row < end; row++) {
        const float *keep = row_factors(r->ops, r->drop, r->length, row, r->channels, lane->scratch);
        r->ops->multiply(r->channels, keep, r->x + (size_t)row * r->channels);
    }
}

/* Owns a few columns of both tables and walks all tokens in order: the order of a scatter sorted by token, without the
 * sort. */
static void embedding_backward_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    (void)lane;
    const struct embedding_run *r = arg;
    uint32_t first = task * COLUMNS_OF_TASK;
    size_t columns = min_size(COLUMNS_OF_TASK, r->channels - first), rows = (size_t)r->sequences * r->length;
    for (size_t row = 0; row < rows; row++) {
        const float *dx = r->x + row * r->channels + first;
        r->ops->add(columns, r->dwte + (size_t)r->tokens[row] * r->channels + first, dx);
        r->ops->add(columns, r->dwpe + row % r->length * r->channels + first, dx);
    }
}

enum mu_status mu_kernel_embedding_backward(struct mu_pool *pool, uint32_t sequences, uint32_t length,
                                            uint32_t channels, const int32_t *tokens, const struct mu_dropout *drop,
                                            float *dx, float *dwte, float *dwpe)
{
    struct embedding_run run = {mu_isa_ops(), sequences, length,          channels, 0,    tokens,
                                NULL,         NULL,      in_effect(drop), dx,       dwte, dwpe};
    if (run.drop) {
        enum mu_status status =
            mu_pool_run(pool, divide_up((size_t)sequences * length, ROWS_OF_TASK), embedding_drop_task, &run);
        if (status != MU_OK)
            return status;
    }
    return mu_pool_run(pool, divide_up(channels, COLUMNS_OF_TASK), embedding_backward_task, &run);
}

/* ---- layer norm ---- */

static void norm_forward_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    const struct mu_norm_forward *n = arg;
    const struct mu_isa_ops *ops = mu_isa_ops();
    const struct mu_dropout *drop = in_effect(n->drop);
    size_t end = min_size((size_t)n->sequences * n->length, (size_t)(task + 1) * ROWS_OF_TASK);
    for (uint32_t row = task * ROWS_OF_TASK; row < end; row++) {
        size_t at = (size_t)row * n->channels;
        const float *keep = n->branch ? row_factors(ops, drop, n->length, row, n->channels, lane->scratch) : NULL;
        ops->norm_forward_row(n->channels, n->residual + at, n->branch ? n->branch + at : NULL, keep, n->weight,
                              n->bias, n->residual_out + at, n->y + at, n->mean + row, n->rstd + row);
    }
}

enum mu_status mu_kernel_norm_forward(struct mu_pool *pool, const struct mu_norm_forward *norm)
{
    struct mu_norm_forward run = *norm;
    return mu_pool_run(pool, divide_up((size_t)run.sequences * run.length, ROWS_OF_TASK), norm_forward_task, &run);
}

size_t mu_kernel_norm_workspace(uint32_t rows, uint32_t channels)
{
    return (size_t)divide_up(rows, MU_NORM_ROWS) * 2 * channels;
}

/* One block of rows, with its own partial sums of dweight and dbias: [2][channels] in the workspace. */
static void norm_backward_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    const struct mu_norm_backward *n = arg;
    const struct mu_isa_ops *ops = mu_isa_ops();
    const struct mu_dropout *drop = in_effect(n->drop);
    float *partial = n->workspace + (size_t)task * 2 * n->channels;
    size_t end = min_size((size_t)n->sequences * n->length, (size_t)(task + 1) * MU_NORM_ROWS);
    memset(partial, 0, 2 * (size_t)n->channels * sizeof(float));
    for (uint32_t row = task * MU_NORM_ROWS; row < end; row++) {
        const float *keep = n->dbranch ? row_factors(ops, drop, n->length, row, n->channels, lane->scratch) : NULL;
        ops->norm_backward_row(n, row, keep, partial, partial + n->channels);
    }
}

enum mu_status mu_kernel_norm_backward(struct mu_pool *pool, const struct mu_norm_backward *norm)
{
    struct mu_norm_backward run = *norm;
    uint32_t blocks = divide_up((size_t)run.sequences * run.length, MU_NORM_ROWS), channels = run.channels;
    enum mu_status status = mu_pool_run(pool, blocks, norm_backward_task, &run);
    if (status != MU_OK)
        return status;
    size_t stride = 2 * (size_t)channels;
    status = mu_kernel_column_sum(pool, blocks, channels, run.workspace, stride, run.accumulate, run.dweight);
    if (status != MU_OK)
        return status;
    return mu_kernel_column_sum(pool, blocks, channels, run.workspace + channels, stride, run.accumulate, run.dbias);
}

/* ---- attention ---- */

static struct mu_attention checked_attention(const struct mu_attention *attention)
{
    struct mu_attention run = *attention;
    MU_ASSERT(run.heads > 0 && run.channels % run.heads == 0);
    size_t head = run.channels / run.heads, padded = (head + 15) / 16 * 16;
    size_t tokens = (size_t)divide_up(run.length, MU_ATTENTION_TILE) * MU_ATTENTION_TILE;
    MU_ASSERT(head <= MU_ATTENTION_HEAD_MAX && tokens * padded <= MU_ATTENTION_ELEMENTS_MAX);
    run.drop = in_effect(run.drop);
    return run;
}

static void attention_forward_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    const struct mu_attention *a = arg;
    mu_isa_ops()->attention_forward(a, task / a->heads, task % a->heads, lane);
}

enum mu_status mu_kernel_attention_forward(struct mu_pool *pool, const struct mu_attention *attention)
{
    struct mu_attention run = checked_attention(attention);
    return mu_pool_run(pool, run.sequences * run.heads, attention_forward_task, &run);
}

static void attention_backward_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    const struct mu_attention *a = arg;
    mu_isa_ops()->attention_backward(a, task / a->heads, task % a->heads, lane);
}

enum mu_status mu_kernel_attention_backward(struct mu_pool *pool, const struct mu_attention *attention)
{
    struct mu_attention run = checked_attention(attention);
    return mu_pool_run(pool, run.sequences * run.heads, attention_backward_task, &run);
}

/* ---- loss ---- */

struct loss_run {
    const struct mu_isa_ops *ops;
    uint32_t rows, vocab;
    size_t ld;
    float *logits;
    const int32_t *targets;
    float scale;
    bool gradient;
    double *loss;
};

static void loss_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    (void)lane;
    const struct loss_run *r = arg;
    size_t end = min_size(r->rows, (size_t)(task + 1) * LOSS_ROWS_OF_TASK);
    for (size_t row = (size_t)task * LOSS_ROWS_OF_TASK; row < end; row++) {
        MU_ASSERT(r->targets[row] < 0 || (uint32_t)r->targets[row] < r->vocab);
        r->loss[row] =
            r->ops->cross_entropy_row(r->vocab, r->logits + row * r->ld, r->targets[row], r->scale, r->gradient);
    }
}

enum mu_status mu_kernel_cross_entropy(struct mu_pool *pool, uint32_t rows, uint32_t vocab, size_t ld, float *logits,
                                       const int32_t *targets, float scale, bool gradient, double *loss)
{
    struct loss_run run = {mu_isa_ops(), rows, vocab, ld, logits, targets, scale, gradient, loss};
    return mu_pool_run(pool, divide_up(rows, LOSS_ROWS_OF_TASK), loss_task, &run);
}

/* ---- flat ranges ---- */

enum range_op { RANGE_GELU_FORWARD, RANGE_GELU_BACKWARD, RANGE_ADD, RANGE_ADAMW, RANGE_INIT, RANGE_FILL };

struct range_run {
    const struct mu_isa_ops *ops;
    enum range_op op;
    size_t size;
    const float *in, *in2;
    float *out;
    const struct mu_adamw *adamw;
    float *m, *v;
    uint64_t seed, first;
    uint32_t tensor;
    float value;
};

static void range_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    (void)lane;
    const struct range_run *r = arg;
    size_t i = (size_t)task * MU_SERIAL_ELEMENTS, size = min_size(MU_SERIAL_ELEMENTS, r->size - i);
    switch (r->op) {
    case RANGE_GELU_FORWARD:
        r->ops->gelu_forward(size, r->in + i, r->out + i);
        break;
    case RANGE_GELU_BACKWARD:
        r->ops->gelu_backward(size, r->in + i, r->in2 + i, r->out + i);
        break;
    case RANGE_ADD:
        r->ops->add(size, r->out + i, r->in + i);
        break;
    case RANGE_ADAMW:
        r->ops->adamw(r->adamw, size, r->out + i, r->m + i, r->v + i, r->in + i);
        break;
    case RANGE_INIT:
        r->ops->init_normal(r->seed, r->tensor, r->first + i, size, r->value, r->out + i);
        break;
    case RANGE_FILL:
        for (size_t j = 0; j < size; j++)
            r->out[i + j] = r->value;
        break;
    }
}

static enum mu_status run_range(struct mu_pool *pool, struct range_run *run)
{
    run->ops = mu_isa_ops();
    return mu_pool_run(pool, divide_up(run->size, MU_SERIAL_ELEMENTS), range_task, run);
}

enum mu_status mu_kernel_gelu_forward(struct mu_pool *pool, size_t size, const float *x, float *y)
{
    return run_range(pool, &(struct range_run){.op = RANGE_GELU_FORWARD, .size = size, .in = x, .out = y});
}

enum mu_status mu_kernel_gelu_backward(struct mu_pool *pool, size_t size, const float *x, const float *dy, float *dx)
{
    return run_range(pool, &(struct range_run){.op = RANGE_GELU_BACKWARD, .size = size, .in = x, .in2 = dy, .out = dx});
}

enum mu_status mu_kernel_add(struct mu_pool *pool, size_t size, float *into, const float *from)
{
    return run_range(pool, &(struct range_run){.op = RANGE_ADD, .size = size, .in = from, .out = into});
}

enum mu_status mu_kernel_adamw(struct mu_pool *pool, const struct mu_adamw *adamw, size_t size, float *p, float *m,
                               float *v, const float *g)
{
    return run_range(
        pool, &(struct range_run){.op = RANGE_ADAMW, .size = size, .in = g, .out = p, .m = m, .v = v, .adamw = adamw});
}

enum mu_status mu_kernel_init_normal(struct mu_pool *pool, uint64_t seed, uint32_t tensor, uint64_t first, size_t size,
                                     float std, float *x)
{
    return run_range(
        pool,
        &(struct range_run){
            .op = RANGE_INIT, .size = size, .out = x, .seed = seed, .tensor = tensor, .first = first, .value = std});
}

enum mu_status mu_kernel_fill(struct mu_pool *pool, size_t size, float value, float *x)
{
    return run_range(pool, &(struct range_run){.op = RANGE_FILL, .size = size, .out = x, .value = value});
}

struct mu_adamw mu_adamw_at(double lr, double beta1, double beta2, double eps, double weight_decay, double clip,
                            double norm, uint64_t update)
{
    MU_ASSERT(update >= 1);
    struct mu_adamw a = {
        .lr = (float)lr,
        .beta1 = (float)beta1,
        .beta2 = (float)beta2,
        .eps = (float)eps,
        .weight_decay = (float)weight_decay,
        .rest1 = (float)(1.0 - beta1),
        .rest2 = (float)(1.0 - beta2),
        .correction1 = (float)(1.0 / (1.0 - mu_fmath_pow(beta1, (double)update))),
        .correction2 = (float)(1.0 / (1.0 - mu_fmath_pow(beta2, (double)update))),
        .gradient_scale = clip > 0.0 && norm > clip ? (float)(clip / norm) : 1.0f,
    };
    return a;
}

/* ---- norm of the gradient ---- */

struct square_run {
    const struct mu_isa_ops *ops;
    size_t size;
    const float *g;
};

/* Each lane gathers in its scratch: the sum is exact, so it does not matter which lane took which block. */
static void square_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    const struct square_run *r = arg;
    struct mu_exact_sum *sum = lane->scratch;
    size_t first = (size_t)task * NORM_BLOCKS_OF_TASK * MU_NORM_BLOCK;
    size_t end = min_size(r->size, first + (size_t)NORM_BLOCKS_OF_TASK * MU_NORM_BLOCK);
    for (size_t i = first; i < end; i += MU_NORM_BLOCK)
        mu_exact_sum_add(sum, r->ops->square_sum(min_size(MU_NORM_BLOCK, end - i), r->g + i));
}

enum mu_status mu_kernel_square_sum(struct mu_pool *pool, size_t size, const float *g, struct mu_exact_sum *sum)
{
    struct square_run run = {mu_isa_ops(), size, g};
    for (uint32_t i = 0; i < mu_pool_threads(pool); i++)
        mu_exact_sum_init(mu_pool_lane_scratch(pool, i));
    enum mu_status status =
        mu_pool_run(pool, divide_up(size, (size_t)NORM_BLOCKS_OF_TASK * MU_NORM_BLOCK), square_task, &run);
    for (uint32_t i = 0; status == MU_OK && i < mu_pool_threads(pool); i++)
        mu_exact_sum_merge(sum, mu_pool_lane_scratch(pool, i));
    return status;
}
