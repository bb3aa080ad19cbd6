/* Each kernel of a step alone, at the model's shapes, over its floor. */
#include "bench/bench_gpu.h"

#include <string.h>

#include "common/rng.h"
#include "kernels/cuda/cost.h"

enum { KERNELS_MAX = 32, MEMORY_GOAL_PERCENT = 85 };

/* Arrays that kernels read and write: rows of activations, a matrix, logits. */
struct arrays {
    float *x, *y, *z, *residual; /* [rows, 4 channels] */
    float *w, *dw;               /* [channels, 4 channels] */
    float *rows, *vector;        /* [2 rows], statistics; [4 channels] */
    float *lse, *logits;         /* [heads, rows]; [MU_HEAD_TOKENS, vocab] */
    float *workspace;
    double *losses;
    int32_t *tokens, *targets;
};

struct table {
    const struct bench_settings *s;
    struct bench_state *st;
    struct arrays a;
    struct {
        char name[32];
        double seconds, count;
        struct mu_cuda_cost cost;
    } kernels[KERNELS_MAX];
    uint32_t count;
};

typedef enum mu_status op_fn(struct table *t, const void *args);

/* `times` of it in a step. The first call chooses algorithms and fills caches. */
static void measure(struct table *t, const char *name, double times, struct mu_cuda_cost cost, op_fn *op,
                    const void *args)
{
    bench_stop_if(t->count == KERNELS_MAX, "too many kernels");
    bench_stop_if(op(t, args) != MU_OK, name);
    bench_wait(t->st);
    double start = bench_now_s();
    for (uint32_t i = 0; i < t->s->repeats; i++)
        bench_stop_if(op(t, args) != MU_OK, name);
    bench_wait(t->st);
    double seconds = (bench_now_s() - start) / t->s->repeats;
    snprintf(t->kernels[t->count].name, sizeof t->kernels[0].name, "%s", name);
    t->kernels[t->count].seconds = seconds;
    t->kernels[t->count].count = times;
    t->kernels[t->count++].cost = cost;
}

/* ---- operations ---- */

static enum mu_status op_gemm(struct table *t, const void *args)
{
    return mu_kernel_gemm(t->st->pool, args);
}

static enum mu_status op_norm_forward(struct table *t, const void *args)
{
    return mu_kernel_norm_forward(t->st->pool, args);
}

static enum mu_status op_norm_backward(struct table *t, const void *args)
{
    return mu_kernel_norm_backward(t->st->pool, args);
}

static enum mu_status op_attention_forward(struct table *t, const void *args)
{
    return mu_kernel_attention_forward(t->st->pool, args);
}

static enum mu_status op_attention_backward(struct table *t, const void *args)
{
    return mu_kernel_attention_backward(t->st->pool, args);
}

static enum mu_status op_column_sum(struct table *t, const void *args)
{
    const uint32_t *columns = args;
    return mu_kernel_column_sum(t->st->pool, t->s->micro * t->s->length, *columns, t->a.x, *columns, true, t->a.vector);
}

static enum mu_status op_cross_entropy(struct table *t, const void *args)
{
    const uint32_t *rows = args;
    return mu_kernel_cross_entropy(t->st->pool, *rows, t->s->vocab, t->s->vocab, t->a.logits, t->a.targets, 1e-3f, true,
                                   t->a.losses);
}

static enum mu_status op_look_up(struct table *t, const void *args)
{
    (void)args;
    const float *slices[] = {t->st->params};
    const struct mu_vocab_slices all = {slices, t->s->vocab, 0, 1, t->s->vocab};
    return mu_kernel_embedding_forward(t->st->pool, 0, t->s->micro * t->s->length, t->s->length, t->s->channels, &all,
                                       t->a.tokens, t->a.x, NULL, t->a.y);
}

static enum mu_status op_look_up_backward(struct table *t, const void *args)
{
    (void)args;
    return mu_kernel_embedding_backward(t->st->pool, t->s->micro * t->s->length, t->s->channels, t->a.tokens, t->a.x, 0,
                                        t->s->vocab, t->st->grads);
}

static enum mu_status op_square_sum(struct table *t, const void *args)
{
    (void)args;
    struct mu_exact_sum sum;
    mu_exact_sum_init(&sum);
    return mu_kernel_square_sum(t->st->pool, (size_t)t->st->spec.flat_size, t->st->grads, &sum);
}

static enum mu_status op_adamw(struct table *t, const void *args)
{
    return mu_kernel_adamw(t->st->pool, args, (size_t)t->st->spec.flat_size, t->st->params, t->st->m, t->st->v,
                           t->st->grads);
}

/* ---- a linear layer ---- */

/* y[rows, out] = x[rows, in] w[in, out], and the two products of its backward pass: as in worker/model_layer.c. */
static void measure_linear(struct table *t, const char *name, double times, uint32_t rows, uint32_t in, uint32_t out,
                           bool gelu)
{
    const enum mu_dtype dtype = t->s->bf16 ? MU_DTYPE_BF16 : MU_DTYPE_FP32;
    const struct arrays *a = &t->a;
    char text[32];
    struct mu_gemm g = {.m = rows, .n = out, .k = in, .a = a->x, .b = a->w, .c = a->y, .lda = in, .ldb = out};
    g.ldc = g.ldaux = out;
    g.epilogue = gelu ? MU_EPILOGUE_BIAS_GELU : MU_EPILOGUE_BIAS;
    g.bias = a->vector;
    g.before = a->z;
    snprintf(text, sizeof text, "%s forward", name);
    measure(t, text, times, mu_cuda_cost_gemm(&g, dtype), op_gemm, &g);
    struct mu_gemm dx = {.m = rows, .n = in, .k = out, .a = a->y, .b = a->w, .c = a->x, .lda = out, .ldb = out};
    dx.ldc = in;
    dx.transpose_b = true;
    snprintf(text, sizeof text, "%s input", name);
    measure(t, text, times, mu_cuda_cost_gemm(&dx, dtype), op_gemm, &dx);
    struct mu_gemm dw = {.m = in, .n = out, .k = rows, .a = a->x, .b = a->y, .c = a->dw, .lda = in, .ldb = out};
    dw.ldc = out;
    dw.transpose_a = dw.accumulate = true;
    snprintf(text, sizeof text, "%s weight", name);
    measure(t, text, times, mu_cuda_cost_gemm(&dw, dtype), op_gemm, &dw);
}

/* The tied table is [vocab, channels]; `rows` tokens at one time. */
static void measure_head(struct table *t, uint32_t rows, double times)
{
    const enum mu_dtype dtype = t->s->bf16 ? MU_DTYPE_BF16 : MU_DTYPE_FP32;
    const uint32_t c = t->s->channels, v = t->s->vocab;
    struct mu_gemm g = {.m = rows, .n = v, .k = c, .a = t->a.x, .b = t->st->params, .c = t->a.logits, .lda = c};
    g.ldb = c;
    g.ldc = v;
    g.transpose_b = true;
    measure(t, "head forward", times, mu_cuda_cost_gemm(&g, dtype), op_gemm, &g);
    measure(t, "cross-entropy", times, mu_cuda_cost_cross_entropy(rows, v, true), op_cross_entropy, &rows);
    struct mu_gemm dx = {.m = rows, .n = c, .k = v, .a = t->a.logits, .b = t->st->params, .c = t->a.y, .lda = v};
    dx.ldb = dx.ldc = c;
    measure(t, "head input", times, mu_cuda_cost_gemm(&dx, dtype), op_gemm, &dx);
    struct mu_gemm dw = {.m = v, .n = c, .k = rows, .a = t->a.logits, .b = t->a.x, .c = t->st->grads, .lda = v};
    dw.ldb = dw.ldc = c;
    dw.transpose_a = dw.accumulate = true;
    measure(t, "head weight", times, mu_cuda_cost_gemm(&dw, dtype), op_gemm, &dw);
}

/* ---- the whole ---- */

static void measure_layers(struct table *t, double micros)
{
    const struct bench_settings *s = t->s;
    const struct arrays *a = &t->a;
    const uint32_t rows = s->micro * s->length, c = s->channels;
    const double layers = micros * s->layers;
    measure_linear(t, "qkv", layers, rows, c, 3 * c, false);
    measure_linear(t, "projection", layers, rows, c, c, false);
    measure_linear(t, "mlp up", layers, rows, c, 4 * c, true);
    measure_linear(t, "mlp down", layers, rows, 4 * c, c, false);
    const uint32_t columns = 4 * c;
    measure(t, "biases", layers * 9 / 4, mu_cuda_cost_stream(MU_CUDA_STREAM_COLUMN_SUM, (size_t)rows * columns),
            op_column_sum, &columns); /* of 3 c, c, 4 c, c columns */
    struct mu_attention at = {.sequences = s->micro,
                              .length = s->length,
                              .heads = s->heads,
                              .kv_heads = s->heads,
                              .head_channels = c / s->heads,
                              .qkv = a->x,
                              .out = a->y,
                              .lse = a->lse,
                              .dout = a->y,
                              .dqkv = a->z};
    measure(t, "attention forward", layers, mu_cuda_cost_attention(&at, false), op_attention_forward, &at);
    measure(t, "attention backward", layers, mu_cuda_cost_attention(&at, true), op_attention_backward, &at);
    struct mu_norm_forward forward = {.rows = rows, .length = s->length, .channels = c, .residual = a->residual};
    forward.branch = a->x;
    forward.weight = forward.bias = a->vector;
    forward.residual_out = a->z;
    forward.y = a->y;
    forward.mean = a->rows;
    forward.rstd = a->rows + rows;
    measure(t, "norm forward", 2 * layers + micros, mu_cuda_cost_norm_forward(&forward), op_norm_forward, &forward);
    struct mu_norm_backward backward = {.rows = rows, .length = s->length, .channels = c, .residual = a->residual};
    backward.weight = a->vector;
    backward.mean = a->rows;
    backward.rstd = a->rows + rows;
    backward.dy = a->y;
    backward.accumulate = true;
    backward.dresidual = a->x;
    backward.dweight = a->dw;
    backward.dbias = a->dw + c;
    backward.workspace = a->workspace;
    measure(t, "norm backward", 2 * layers + micros, mu_cuda_cost_norm_backward(&backward), op_norm_backward,
            &backward);
}

static void measure_all(struct table *t)
{
    const struct bench_settings *s = t->s;
    const uint32_t rows = s->micro * s->length, piece = rows < MU_HEAD_TOKENS ? rows : MU_HEAD_TOKENS;
    const double micros = s->accumulate, pieces = micros * ((rows + piece - 1) / piece);
    measure_layers(t, micros);
    measure_head(t, piece, pieces);
    measure(t, "look-up", micros, mu_cuda_cost_embedding_forward(rows, s->channels, true), op_look_up, NULL);
    uint32_t distinct = rows < s->vocab ? rows : s->vocab; /* at most */
    measure(t, "look-up backward", micros, mu_cuda_cost_embedding_backward(rows, s->channels, distinct),
            op_look_up_backward, NULL);
    size_t size = (size_t)t->st->spec.flat_size;
    measure(t, "gradient norm", 1, mu_cuda_cost_stream(MU_CUDA_STREAM_SQUARE_SUM, size), op_square_sum, NULL);
    struct mu_adamw adamw = mu_adamw_at(1e-4, 0.9, 0.95, 1e-8, 0.1, 1.0, 1.0, 3);
    measure(t, "adamw", 1, mu_cuda_cost_stream(MU_CUDA_STREAM_ADAMW, size), op_adamw, &adamw);
}

static void tell(struct table *t, double step_s)
{
    const struct bench_state *st = t->st;
    double peak = st->peak, sum = 0;
    for (uint32_t i = 0; i < t->count && st->peak == 0; i++) { /* then over the best one of these */
        double rate = t->kernels[i].cost.flops / t->kernels[i].seconds;
        peak = rate > peak ? rate : peak;
    }
    for (uint32_t i = 0; i < t->count; i++) {
        const struct mu_cuda_cost *cost = &t->kernels[i].cost;
        double moved = cost->bytes / st->copy_rate, computed = cost->flops / peak;
        bool is_memory = moved > computed;
        double floor = is_memory ? moved : computed, seconds = t->kernels[i].seconds;
        bool misses = is_memory && 100 * floor / seconds < MEMORY_GOAL_PERCENT;
        fprintf(st->rows, "%s %s\t%.1f us\t%.2f of its floor (%s), %.1f %% of the step%s\n", t->s->name,
                t->kernels[i].name, 1e6 * seconds, seconds / floor, is_memory ? "memory" : "products",
                100 * seconds * t->kernels[i].count / step_s, misses ? "; goal: at most 1.18" : "");
        fprintf(st->json,
                ",{\"measure\":\"kernel\",\"model\":\"%s\",\"kernel\":\"%s\",\"seconds\":%.6g,\"count\":%.6g,"
                "\"bytes\":%.6g,\"flops\":%.6g,\"floor_s\":%.6g,\"bound\":\"%s\"}",
                t->s->name, t->kernels[i].name, seconds, t->kernels[i].count, cost->bytes, cost->flops, floor,
                is_memory ? "memory" : "products");
        sum += seconds * t->kernels[i].count;
    }
    fprintf(st->rows, "%s all kernels\t%.2f ms\t%.0f %% of the step\n", t->s->name, 1e3 * sum, 100 * sum / step_s);
}

void bench_kernels(const struct bench_settings *s, struct bench_state *st, double step_s)
{
    struct table t = {.s = s, .st = st};
    const size_t rows = (size_t)s->micro * s->length, c = s->channels, wide = rows * 4 * c, f = sizeof(float);
    const size_t piece = rows < MU_HEAD_TOKENS ? rows : MU_HEAD_TOKENS;
    const struct {
        void *array; /* where its address goes */
        size_t size_bytes;
        bool random;
    } all[] = {{&t.a.x, wide * f, true},
               {&t.a.y, wide * f, true},
               {&t.a.z, wide * f, true},
               {&t.a.residual, rows * c * f, true},
               {&t.a.w, 4 * c * c * f, true},
               {&t.a.dw, 4 * c * c * f, true},
               {&t.a.rows, 2 * rows * f, true},
               {&t.a.vector, 4 * c * f, true},
               {&t.a.lse, rows * s->heads * f, true},
               {&t.a.logits, piece * s->vocab * f, true},
               {&t.a.workspace, mu_kernel_norm_workspace((uint32_t)rows, s->channels) * f, false},
               {&t.a.losses, piece * sizeof(double), false},
               {&t.a.tokens, rows * sizeof(int32_t), false},
               {&t.a.targets, piece * sizeof(int32_t), false}};
    enum { COUNT = sizeof all / sizeof all[0] };
    void *memory[COUNT];
    for (size_t i = 0; i < COUNT; i++) {
        memory[i] = bench_memory(st, all[i].size_bytes);
        memcpy(all[i].array, &memory[i], sizeof memory[i]);
        if (all[i].random)
            bench_stop_if(mu_kernel_init_normal(st->pool, 1, (uint32_t)i, 0, all[i].size_bytes / f, 0.02f, memory[i]) !=
                              MU_OK,
                          "random values");
    }
    bench_stop_if(mu_device_copy(st->device, t.a.tokens, st->tokens, rows * sizeof(int32_t)) != MU_OK ||
                      mu_device_copy(st->device, t.a.targets, st->tokens, piece * sizeof(int32_t)) != MU_OK,
                  "the tokens");
    measure_all(&t);
    tell(&t, step_s);
    for (size_t i = 0; i < COUNT; i++)
        mu_device_release(st->device, MU_MEMORY_DEVICE, memory[i], all[i].size_bytes);
}
