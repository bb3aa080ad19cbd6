/* Drivers of the row and range operations: cut the work into tasks that own what they write, and run them on the pool.
 */
#include "kernels/kernels.h"

#include <string.h>

#include "common/fmath.h"
#include "common/rng.h"
#include "kernels/cpu/cpu_ops.h"
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

/* Factors of one row of the micro-batch, in the lane's scratch; NULL when nothing is dropped. */
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
    uint32_t first_row, rows, length, channels;
    const struct mu_vocab_slices *table;
    const int32_t *tokens;
    const float *wpe;
    const struct mu_dropout *drop;
    float *x;
};

/* The token's row of the table, or NULL when no slice here holds it. */
static const float *table_row(const struct mu_vocab_slices *table, uint32_t channels, int32_t token)
{
    MU_ASSERT(token >= 0 && (uint32_t)token < table->vocab);
    uint32_t slice = (uint32_t)token / table->slice_rows, row = (uint32_t)token % table->slice_rows;
    if (slice < table->first_slice || slice - table->first_slice >= table->slice_count)
        return NULL;
    return table->slices[slice - table->first_slice] + (size_t)row * channels;
}

static void embedding_forward_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    const struct embedding_run *r = arg;
    uint32_t end = (uint32_t)min_size(r->rows, (size_t)(task + 1) * ROWS_OF_TASK);
    for (uint32_t i = task * ROWS_OF_TASK; i < end; i++) {
        const float *from = table_row(r->table, r->channels, r->tokens[i]);
        if (!from)
            continue;
        uint32_t row = r->first_row + i;
        const float *keep = row_factors(r->ops, r->drop, r->length, row, r->channels, lane->scratch);
        const float *wpe = r->wpe ? r->wpe + (size_t)(row % r->length) * r->channels : NULL;
        r->ops->embedding_row(r->channels, from, wpe, keep, r->x + (size_t)i * r->channels);
    }
}

enum mu_status mu_cpu_embedding_forward(struct mu_pool *pool, uint32_t first_row, uint32_t rows, uint32_t length,
                                        uint32_t channels, const struct mu_vocab_slices *table, const int32_t *tokens,
                                        const float *wpe, const struct mu_dropout *drop, float *x)
{
    struct embedding_run run = {mu_isa_ops(), first_row, rows, length,          channels,
                                table,        tokens,    wpe,  in_effect(drop), x};
    return mu_pool_run(pool, divide_up(rows, ROWS_OF_TASK), embedding_forward_task, &run);
}

static void embedding_drop_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    const struct embedding_run *r = arg;
    uint32_t end = (uint32_t)min_size(r->rows, (size_t)(task + 1) * ROWS_OF_TASK);
    for (uint32_t i = task * ROWS_OF_TASK; i < end; i++) {
        const float *keep = row_factors(r->ops, r->drop, r->length, r->first_row + i, r->channels, lane->scratch);
        r->ops->multiply(r->channels, keep, r->x + (size_t)i * r->channels);
    }
}

enum mu_status mu_cpu_embedding_drop(struct mu_pool *pool, uint32_t first_row, uint32_t rows, uint32_t length,
                                     uint32_t channels, const struct mu_dropout *drop, float *dx)
{
    struct embedding_run run = {.ops = mu_isa_ops(), .first_row = first_row, .rows = rows, .length = length};
    run.channels = channels;
    run.drop = in_effect(drop);
    run.x = dx;
    return run.drop ? mu_pool_run(pool, divide_up(rows, ROWS_OF_TASK), embedding_drop_task, &run) : MU_OK;
}

struct scatter_run {
    const struct mu_isa_ops *ops;
    uint32_t first_row, rows, length, channels;
    const int32_t *tokens; /* NULL: positions */
    const float *dx;
    uint32_t first, count; /* rows of the table that are wanted */
    float *table;
};

/* Owns a few columns of the table and walks all rows in order: the order of a scatter sorted by token, without the
 * sort. */
static void scatter_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    (void)lane;
    const struct scatter_run *r = arg;
    uint32_t column = task * COLUMNS_OF_TASK;
    size_t columns = min_size(COLUMNS_OF_TASK, r->channels - column);
    for (uint32_t i = 0; i < r->rows; i++) {
        uint32_t into = r->tokens ? (uint32_t)r->tokens[i] : (r->first_row + i) % r->length;
        if (into < r->first || into - r->first >= r->count)
            continue;
        r->ops->add(columns, r->table + (size_t)(into - r->first) * r->channels + column,
                    r->dx + (size_t)i * r->channels + column);
    }
}

enum mu_status mu_cpu_embedding_backward(struct mu_pool *pool, uint32_t rows, uint32_t channels, const int32_t *tokens,
                                         const float *dx, uint32_t first, uint32_t count, float *dtable)
{
    struct scatter_run run = {mu_isa_ops(), 0, rows, 1, channels, tokens, dx, first, count, dtable};
    return mu_pool_run(pool, divide_up(channels, COLUMNS_OF_TASK), scatter_task, &run);
}

enum mu_status mu_cpu_position_backward(struct mu_pool *pool, uint32_t first_row, uint32_t rows, uint32_t length,
                                        uint32_t channels, const float *dx, float *dwpe)
{
    struct scatter_run run = {mu_isa_ops(), first_row, rows, length, channels, NULL, dx, 0, length, dwpe};
    return mu_pool_run(pool, divide_up(channels, COLUMNS_OF_TASK), scatter_task, &run);
}

/* ---- norm ---- */

static void norm_forward_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    const struct mu_norm_forward *n = arg;
    const struct mu_isa_ops *ops = mu_isa_ops();
    const struct mu_dropout *drop = in_effect(n->drop);
    uint32_t end = (uint32_t)min_size(n->rows, (size_t)(task + 1) * ROWS_OF_TASK);
    for (uint32_t i = task * ROWS_OF_TASK; i < end; i++) {
        const float *keep =
            n->branch ? row_factors(ops, drop, n->length, n->first_row + i, n->channels, lane->scratch) : NULL;
        if (n->rms)
            ops->rms_forward_row(n, i, keep);
        else
            ops->norm_forward_row(n, i, keep);
    }
}

enum mu_status mu_cpu_norm_forward(struct mu_pool *pool, const struct mu_norm_forward *norm)
{
    struct mu_norm_forward run = *norm;
    return mu_pool_run(pool, divide_up(run.rows, ROWS_OF_TASK), norm_forward_task, &run);
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
    uint32_t end = (uint32_t)min_size(n->rows, (size_t)(task + 1) * MU_NORM_ROWS);
    memset(partial, 0, 2 * (size_t)n->channels * sizeof(float));
    for (uint32_t i = task * MU_NORM_ROWS; i < end; i++) {
        const float *keep =
            n->dbranch ? row_factors(ops, drop, n->length, n->first_row + i, n->channels, lane->scratch) : NULL;
        if (n->rms)
            ops->rms_backward_row(n, i, keep, partial);
        else
            ops->norm_backward_row(n, i, keep, partial, partial + n->channels);
    }
}

enum mu_status mu_cpu_norm_backward(struct mu_pool *pool, const struct mu_norm_backward *norm)
{
    struct mu_norm_backward run = *norm;
    uint32_t blocks = divide_up(run.rows, MU_NORM_ROWS), channels = run.channels;
    enum mu_status status = mu_pool_run(pool, blocks, norm_backward_task, &run);
    if (status != MU_OK)
        return status;
    size_t stride = 2 * (size_t)channels;
    status = mu_cpu_column_sum(pool, blocks, channels, run.workspace, stride, run.accumulate, run.dweight);
    if (status != MU_OK || run.rms)
        return status;
    return mu_cpu_column_sum(pool, blocks, channels, run.workspace + channels, stride, run.accumulate, run.dbias);
}

/* ---- attention ---- */

static struct mu_attention checked_attention(const struct mu_attention *attention)
{
    struct mu_attention run = *attention;
    MU_ASSERT(run.kv_heads > 0 && run.heads % run.kv_heads == 0 && run.head_channels > 0);
    size_t padded = (run.head_channels + 15u) / 16 * 16;
    size_t tokens = (size_t)divide_up(run.length, MU_ATTENTION_TILE) * MU_ATTENTION_TILE;
    MU_ASSERT(run.head_channels <= MU_ATTENTION_HEAD_MAX && tokens * padded <= MU_ATTENTION_ELEMENTS_MAX);
    run.drop = in_effect(run.drop);
    run.slices = run.slices ? run.slices : 1;
    if (run.qkv_stride == 0)
        run.qkv_stride = ((size_t)run.heads + 2 * (size_t)run.kv_heads) * run.head_channels;
    if (run.out_stride == 0)
        run.out_stride = (size_t)run.heads * run.head_channels;
    return run;
}

static void attention_forward_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    const struct mu_attention *a = arg;
    mu_isa_ops()->attention_forward(a, task / a->heads, task % a->heads, lane);
}

enum mu_status mu_cpu_attention_forward(struct mu_pool *pool, const struct mu_attention *attention)
{
    struct mu_attention run = checked_attention(attention);
    return mu_pool_run(pool, run.slices * run.sequences * run.heads, attention_forward_task, &run);
}

static void attention_backward_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    const struct mu_attention *a = arg;
    mu_isa_ops()->attention_backward(a, task / a->kv_heads, task % a->kv_heads, lane);
}

enum mu_status mu_cpu_attention_backward(struct mu_pool *pool, const struct mu_attention *attention)
{
    struct mu_attention run = checked_attention(attention);
    return mu_pool_run(pool, run.slices * run.sequences * run.kv_heads, attention_backward_task, &run);
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

enum mu_status mu_cpu_cross_entropy(struct mu_pool *pool, uint32_t rows, uint32_t vocab, size_t ld, float *logits,
                                    const int32_t *targets, float scale, bool gradient, double *loss)
{
    struct loss_run run = {mu_isa_ops(), rows, vocab, ld, logits, targets, scale, gradient, loss};
    return mu_pool_run(pool, divide_up(rows, LOSS_ROWS_OF_TASK), loss_task, &run);
}

enum loss_phase { LOSS_MAX, LOSS_SUM, LOSS_GRADIENT };

struct slice_loss_run {
    const struct mu_isa_ops *ops;
    enum loss_phase phase;
    uint32_t rows, first, vocab;
    size_t ld;
    float *logits;
    const float *max_of; /* the logits, phase 1 */
    const int32_t *targets;
    float *highest;      /* written in phase 1 */
    const float *shift;  /* the joined maximum, phase 2 */
    double *sum;         /* written in phase 2 */
    const double *total; /* the joined sum, phase 3 */
    float scale;
    bool gradient;
    double *loss;
};

/* The row's target in this slice, or -1. */
static int32_t target_here(const struct slice_loss_run *r, size_t row)
{
    int32_t target = r->targets[row];
    return target < 0 || (uint32_t)target < r->first || (uint32_t)target - r->first >= r->vocab
               ? -1
               : target - (int32_t)r->first;
}

static void slice_sum_row(const struct slice_loss_run *r, size_t row)
{
    float *logits = r->logits + row * r->ld;
    int32_t target = target_here(r, row);
    if (r->targets[row] < 0) {
        r->sum[row] = 0.0;
        return;
    }
    if (target >= 0)
        r->loss[row] = (double)r->shift[row] - (double)logits[target];
    r->sum[row] = r->ops->exp_sum(r->vocab, logits, r->shift[row], r->gradient);
}

static void slice_gradient_row(const struct slice_loss_run *r, size_t row)
{
    float *logits = r->logits + row * r->ld;
    int32_t target = target_here(r, row);
    if (r->gradient && r->targets[row] < 0)
        memset(logits, 0, r->vocab * sizeof(float));
    else if (r->gradient)
        r->ops->scale(r->vocab, (float)((double)r->scale / r->total[row]), logits);
    if (target < 0)
        return;
    if (r->gradient)
        logits[target] -= r->scale;
    r->loss[row] += mu_fmath_log(r->total[row]);
}

static void slice_loss_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    (void)lane;
    const struct slice_loss_run *r = arg;
    size_t end = min_size(r->rows, (size_t)(task + 1) * LOSS_ROWS_OF_TASK);
    for (size_t row = (size_t)task * LOSS_ROWS_OF_TASK; row < end; row++)
        switch (r->phase) {
        case LOSS_MAX:
            r->highest[row] = r->ops->row_max(r->vocab, r->max_of + row * r->ld);
            break;
        case LOSS_SUM:
            slice_sum_row(r, row);
            break;
        case LOSS_GRADIENT:
            slice_gradient_row(r, row);
            break;
        }
}

static enum mu_status run_slice_loss(struct mu_pool *pool, struct slice_loss_run *run)
{
    MU_ASSERT(run->vocab > 0);
    run->ops = mu_isa_ops();
    return mu_pool_run(pool, divide_up(run->rows, LOSS_ROWS_OF_TASK), slice_loss_task, run);
}

enum mu_status mu_cpu_cross_entropy_max(struct mu_pool *pool, uint32_t rows, uint32_t vocab, size_t ld,
                                        const float *logits, float *highest)
{
    return run_slice_loss(
        pool, &(struct slice_loss_run){
                  .phase = LOSS_MAX, .rows = rows, .vocab = vocab, .ld = ld, .max_of = logits, .highest = highest});
}

enum mu_status mu_cpu_cross_entropy_sum(struct mu_pool *pool, uint32_t rows, uint32_t first, uint32_t vocab, size_t ld,
                                        float *logits, const int32_t *targets, const float *highest, bool gradient,
                                        double *sum, double *loss)
{
    return run_slice_loss(pool, &(struct slice_loss_run){.phase = LOSS_SUM,
                                                         .rows = rows,
                                                         .first = first,
                                                         .vocab = vocab,
                                                         .ld = ld,
                                                         .logits = logits,
                                                         .targets = targets,
                                                         .shift = highest,
                                                         .gradient = gradient,
                                                         .sum = sum,
                                                         .loss = loss});
}

enum mu_status mu_cpu_cross_entropy_gradient(struct mu_pool *pool, uint32_t rows, uint32_t first, uint32_t vocab,
                                             size_t ld, float *logits, const int32_t *targets, const double *sum,
                                             float scale, bool gradient, double *loss)
{
    return run_slice_loss(pool, &(struct slice_loss_run){.phase = LOSS_GRADIENT,
                                                         .rows = rows,
                                                         .first = first,
                                                         .vocab = vocab,
                                                         .ld = ld,
                                                         .logits = logits,
                                                         .targets = targets,
                                                         .total = sum,
                                                         .scale = scale,
                                                         .gradient = gradient,
                                                         .loss = loss});
}

enum mu_status mu_cpu_join_max(struct mu_pool *pool, uint32_t slices, uint32_t rows, float *highest)
{
    (void)pool; /* too little to spread */
    for (uint32_t s = 1; s < slices; s++)
        for (size_t row = 0; row < rows; row++) {
            float other = highest[(size_t)s * rows + row];
            highest[row] = highest[row] > other ? highest[row] : other;
        }
    return MU_OK;
}

enum mu_status mu_cpu_join_sums(struct mu_pool *pool, uint32_t slices, uint32_t rows, double *sums)
{
    (void)pool;
    MU_ASSERT(slices > 0 && (slices & (slices - 1)) == 0);
    for (uint32_t step = 1; step < slices; step *= 2)
        for (uint32_t s = 0; s < slices; s += 2 * step)
            for (size_t row = 0; row < rows; row++)
                sums[(size_t)s * rows + row] += sums[(size_t)(s + step) * rows + row];
    return MU_OK;
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

enum mu_status mu_cpu_gelu_forward(struct mu_pool *pool, size_t size, const float *x, float *y)
{
    return run_range(pool, &(struct range_run){.op = RANGE_GELU_FORWARD, .size = size, .in = x, .out = y});
}

enum mu_status mu_cpu_gelu_backward(struct mu_pool *pool, size_t size, const float *x, const float *dy, float *dx)
{
    return run_range(pool, &(struct range_run){.op = RANGE_GELU_BACKWARD, .size = size, .in = x, .in2 = dy, .out = dx});
}

enum mu_status mu_cpu_add(struct mu_pool *pool, size_t size, float *into, const float *from)
{
    return run_range(pool, &(struct range_run){.op = RANGE_ADD, .size = size, .in = from, .out = into});
}

enum mu_status mu_cpu_adamw(struct mu_pool *pool, const struct mu_adamw *adamw, size_t size, float *p, float *m,
                            float *v, const float *g)
{
    return run_range(
        pool, &(struct range_run){.op = RANGE_ADAMW, .size = size, .in = g, .out = p, .m = m, .v = v, .adamw = adamw});
}

enum mu_status mu_cpu_init_normal(struct mu_pool *pool, uint64_t seed, uint32_t tensor, uint64_t first, size_t size,
                                  float std, float *x)
{
    return run_range(
        pool,
        &(struct range_run){
            .op = RANGE_INIT, .size = size, .out = x, .seed = seed, .tensor = tensor, .first = first, .value = std});
}

enum mu_status mu_cpu_fill(struct mu_pool *pool, size_t size, float value, float *x)
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

enum mu_status mu_cpu_square_sum(struct mu_pool *pool, size_t size, const float *g, struct mu_exact_sum *sum)
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
