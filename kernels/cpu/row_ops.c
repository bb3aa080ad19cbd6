/* Rows and flat ranges: norms, softmax, GELU, dropout, optimizer, initial values. Compiled once per instruction set. */
#include "kernels/cpu/isa.h"

#include "common/fmath.h"
#include "kernels/cpu/simd.h"

enum {
    PHILOX_WORDS = 4,
    DROPOUT_GROUP = PHILOX_WORDS * VL, /* features served by one vector of counters */
    INIT_GROUP = PHILOX_WORDS * VL,
};

MU_INLINE unsigned lanes_of(size_t left)
{
    return left < VL ? (unsigned)left : VL;
}

/* ---- sums ---- */

static void column_sum(uint32_t rows, uint32_t columns, const float *a, size_t lda, bool accumulate, float *out)
{
    for (uint32_t j = 0; j < columns; j += VL) {
        unsigned n = lanes_of(columns - j);
        vf total = accumulate ? v_load_n(out + j, n) : v_zero();
        for (uint32_t first = 0; first < rows; first += MU_GEMM_CHUNK) {
            uint32_t end = rows - first < MU_GEMM_CHUNK ? rows : first + MU_GEMM_CHUNK;
            vf sum = v_zero();
            for (uint32_t i = first; i < end; i++)
                sum = v_add(sum, v_load_n(a + (size_t)i * lda + j, n));
            total = v_add(total, sum);
        }
        v_store_n(out + j, total, n);
    }
}

static void add(size_t size, float *into, const float *from)
{
    size_t i = 0;
    for (; i + VL <= size; i += VL)
        v_store(into + i, v_add(v_load(into + i), v_load(from + i)));
    if (i < size) {
        unsigned n = lanes_of(size - i);
        v_store_n(into + i, v_add(v_load_n(into + i, n), v_load_n(from + i, n)), n);
    }
}

static void multiply(size_t size, const float *factor, float *x)
{
    for (size_t i = 0; i < size; i += VL) {
        unsigned n = lanes_of(size - i);
        v_store_n(x + i, v_mul(v_load_n(x + i, n), v_load_n(factor + i, n)), n);
    }
}

static double square_sum(size_t size, const float *g)
{
    vd sum = vd_zero();
    size_t i = 0;
    for (; i + VL <= size; i += VL)
        sum = vd_add_square(sum, v_load(g + i));
    if (i < size)
        sum = vd_add_square(sum, v_load_n(g + i, lanes_of(size - i)));
    return vd_fold_sum(sum);
}

/* ---- random numbers ---- */

static void dropout_factors(const struct mu_dropout *site, uint32_t sequence, uint32_t token, uint32_t first,
                            uint32_t count, float *keep)
{
    uint64_t sample = site->samples[sequence];
    const vi threshold = vi_set1(site->threshold);
    const vf scale = v_set1(site->scale);
    for (uint32_t f = 0; f < count; f += DROPOUT_GROUP) {
        vi random[PHILOX_WORDS];
        vi counter = vi_add(vi_set1((first + f) / DROPOUT_GROUP * VL), vi_lanes());
        v_philox(site->key, counter, token, (uint32_t)sample, (uint32_t)(sample >> 32), random);
        for (uint32_t word = 0; word < PHILOX_WORDS && f + word * VL < count; word++) {
            vf factor = v_select(vi_less(random[word], threshold), v_zero(), scale);
            v_store_n(keep + f + word * VL, factor, lanes_of(count - f - word * VL));
        }
    }
}

/* 64 values of group j. */
static void normal_group(const uint32_t key[2], uint32_t tensor, uint64_t j, vf std, float out[INIT_GROUP])
{
    vi random[PHILOX_WORDS];
    vi counter = vi_add(vi_set1((uint32_t)(j * VL)), vi_lanes());
    v_philox(key, counter, (uint32_t)((j * VL) >> 32), tensor, MU_INIT_TAG, random);
    for (int w = 0; w < 2; w++) {
        const vf unit = v_set1(0x1p-24f);
        vf u1 = v_mul(vi_convert(vi_add(vi_shr(random[2 * w], 8), vi_set1(1))), unit);
        vf u2 = v_mul(vi_convert(vi_shr(random[2 * w + 1], 8)), unit);
        vf radius = v_sqrt(v_mul(v_set1(-2.0f), v_log(u1)));
        vf cosine, sine;
        v_cos_sin_turns(u2, &cosine, &sine);
        v_store(out + 2 * w * VL, v_mul(std, v_mul(radius, cosine)));
        v_store(out + (2 * w + 1) * VL, v_mul(std, v_mul(radius, sine)));
    }
}

static void init_normal(uint64_t seed, uint32_t tensor, uint64_t first, size_t size, float std, float *x)
{
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (size_t i = 0; i < size;) {
        float group[INIT_GROUP];
        size_t skip = (size_t)((first + i) % INIT_GROUP);
        size_t count = size - i < INIT_GROUP - skip ? size - i : INIT_GROUP - skip;
        normal_group(key, tensor, (first + i) / INIT_GROUP, v_set1(std), group);
        memcpy(x + i, group + skip, count * sizeof(float));
        i += count;
    }
}

/* ---- embedding and norm ---- */

static void embedding_row(uint32_t channels, const float *wte, const float *wpe, const float *keep, float *x)
{
    for (uint32_t i = 0; i < channels; i += VL) {
        unsigned n = lanes_of(channels - i);
        vf sum = v_load_n(wte + i, n);
        if (wpe)
            sum = v_add(sum, v_load_n(wpe + i, n));
        if (keep)
            sum = v_mul(sum, v_load_n(keep + i, n));
        v_store_n(x + i, sum, n);
    }
}

/* Writes residual_out and returns the lane sums of its values, or of their squares. */
MU_INLINE vf add_branch(const struct mu_norm_forward *norm, size_t offset, const float *keep, const bool squares)
{
    const float *residual = norm->residual + offset, *branch = norm->branch ? norm->branch + offset : NULL;
    float *out = norm->residual_out + offset;
    vf sum = v_zero();
    for (uint32_t i = 0; i < norm->channels; i += VL) {
        unsigned n = lanes_of(norm->channels - i);
        vf x = v_load_n(residual + i, n);
        if (branch) {
            vf b = v_load_n(branch + i, n);
            x = keep ? v_fma(b, v_load_n(keep + i, n), x) : v_add(x, b);
        }
        v_store_n(out + i, x, n);
        sum = squares ? v_fma(x, x, sum) : v_add(sum, x);
    }
    return sum;
}

static void norm_forward_row(const struct mu_norm_forward *norm, uint32_t row, const float *keep)
{
    const uint32_t channels = norm->channels;
    const size_t offset = (size_t)row * channels;
    const float *x = norm->residual_out + offset, *weight = norm->weight, *bias = norm->bias;
    float *y = norm->y + offset;
    vf squares = v_zero();
    float m = v_fold_sum(add_branch(norm, offset, keep, false)) / (float)channels;
    const vf center = v_set1(m);
    for (uint32_t i = 0; i < channels; i += VL) {
        unsigned n = lanes_of(channels - i);
        vf d = v_keep_n(v_sub(v_load_n(x + i, n), center), n);
        squares = v_fma(d, d, squares);
    }
    float variance = v_fold_sum(squares) / (float)channels;
    float r = 1.0f / sqrtf(variance + MU_NORM_EPS);
    for (uint32_t i = 0; i < channels; i += VL) {
        unsigned n = lanes_of(channels - i);
        vf normal = v_mul(v_sub(v_load_n(x + i, n), center), v_set1(r));
        v_store_n(y + i, v_fma(normal, v_load_n(weight + i, n), v_load_n(bias + i, n)), n);
    }
    norm->mean[row] = m;
    norm->rstd[row] = r;
}

static void rms_forward_row(const struct mu_norm_forward *norm, uint32_t row, const float *keep)
{
    const uint32_t channels = norm->channels;
    const size_t offset = (size_t)row * channels;
    const float *x = norm->residual_out + offset;
    float *y = norm->y + offset;
    float square = v_fold_sum(add_branch(norm, offset, keep, true)) / (float)channels;
    float r = 1.0f / sqrtf(square + MU_NORM_EPS);
    for (uint32_t i = 0; i < channels; i += VL) {
        unsigned n = lanes_of(channels - i);
        v_store_n(y + i, v_mul(v_mul(v_load_n(x + i, n), v_set1(r)), v_load_n(norm->weight + i, n)), n);
    }
    norm->rstd[row] = r;
}

/* The gradient of the residual at one vector, and with it that of the branch. */
MU_INLINE void store_dresidual(const struct mu_norm_backward *norm, size_t at, unsigned n, vf dx, const float *keep)
{
    if (!norm->first)
        dx = v_add(v_load_n(norm->dresidual + at, n), dx);
    v_store_n(norm->dresidual + at, dx, n);
    if (norm->dbranch)
        v_store_n(norm->dbranch + at, keep ? v_mul(dx, v_load_n(keep, n)) : dx, n);
}

static void norm_backward_row(const struct mu_norm_backward *norm, uint32_t row, const float *keep, float *dweight,
                              float *dbias)
{
    uint32_t channels = norm->channels;
    size_t offset = (size_t)row * channels;
    const float *residual = norm->residual + offset, *dy = norm->dy + offset;
    const vf center = v_set1(norm->mean[row]), r = v_set1(norm->rstd[row]);
    vf sum = v_zero(), sum_normal = v_zero();
    for (uint32_t i = 0; i < channels; i += VL) {
        unsigned n = lanes_of(channels - i);
        vf g = v_load_n(dy + i, n);
        vf normal = v_mul(v_sub(v_load_n(residual + i, n), center), r);
        vf weighted = v_mul(g, v_load_n(norm->weight + i, n)); /* 0 beyond n: the sums need no mask */
        sum = v_add(sum, weighted);
        sum_normal = v_fma(weighted, normal, sum_normal);
        v_store_n(dweight + i, v_fma(g, normal, v_load_n(dweight + i, n)), n);
        v_store_n(dbias + i, v_add(g, v_load_n(dbias + i, n)), n);
    }
    const vf mean = v_set1(v_fold_sum(sum) / (float)channels);
    const vf mean_normal = v_set1(v_fold_sum(sum_normal) / (float)channels);
    for (uint32_t i = 0; i < channels; i += VL) {
        unsigned n = lanes_of(channels - i);
        vf normal = v_mul(v_sub(v_load_n(residual + i, n), center), r);
        vf weighted = v_mul(v_load_n(dy + i, n), v_load_n(norm->weight + i, n));
        vf dx = v_mul(v_fnma(normal, mean_normal, v_sub(weighted, mean)), r);
        store_dresidual(norm, offset + i, n, dx, keep ? keep + i : NULL);
    }
}

static void rms_backward_row(const struct mu_norm_backward *norm, uint32_t row, const float *keep, float *dweight)
{
    uint32_t channels = norm->channels;
    size_t offset = (size_t)row * channels;
    const float *residual = norm->residual + offset, *dy = norm->dy + offset;
    const vf r = v_set1(norm->rstd[row]);
    vf sum_normal = v_zero();
    for (uint32_t i = 0; i < channels; i += VL) {
        unsigned n = lanes_of(channels - i);
        vf g = v_load_n(dy + i, n);
        vf normal = v_mul(v_load_n(residual + i, n), r);
        sum_normal = v_fma(v_mul(g, v_load_n(norm->weight + i, n)), normal, sum_normal);
        v_store_n(dweight + i, v_fma(g, normal, v_load_n(dweight + i, n)), n);
    }
    const vf mean_normal = v_set1(v_fold_sum(sum_normal) / (float)channels);
    for (uint32_t i = 0; i < channels; i += VL) {
        unsigned n = lanes_of(channels - i);
        vf normal = v_mul(v_load_n(residual + i, n), r);
        vf weighted = v_mul(v_load_n(dy + i, n), v_load_n(norm->weight + i, n));
        vf dx = v_mul(v_fnma(normal, mean_normal, weighted), r);
        store_dresidual(norm, offset + i, n, dx, keep ? keep + i : NULL);
    }
}

/* ---- activations ---- */

static void gelu_forward(size_t size, const float *x, float *y)
{
    for (size_t i = 0; i < size; i += VL) {
        unsigned n = lanes_of(size - i);
        v_store_n(y + i, v_gelu(v_load_n(x + i, n)), n);
    }
}

static void gelu_backward(size_t size, const float *x, const float *dy, float *dx)
{
    for (size_t i = 0; i < size; i += VL) {
        unsigned n = lanes_of(size - i);
        v_store_n(dx + i, v_mul(v_load_n(dy + i, n), v_gelu_grad(v_load_n(x + i, n))), n);
    }
}

static void swiglu_forward(uint32_t hidden, const float *gate_up, float *y)
{
    for (uint32_t i = 0; i < hidden; i += VL) {
        unsigned n = lanes_of(hidden - i);
        v_store_n(y + i, v_mul(v_silu(v_load_n(gate_up + i, n)), v_load_n(gate_up + hidden + i, n)), n);
    }
}

static void swiglu_backward(uint32_t hidden, const float *gate_up, const float *dy, float *d_gate_up)
{
    for (uint32_t i = 0; i < hidden; i += VL) {
        unsigned n = lanes_of(hidden - i);
        vf gate = v_load_n(gate_up + i, n), up = v_load_n(gate_up + hidden + i, n), g = v_load_n(dy + i, n);
        v_store_n(d_gate_up + i, v_mul(v_mul(g, up), v_silu_grad(gate)), n);
        v_store_n(d_gate_up + hidden + i, v_mul(g, v_silu(gate)), n);
    }
}

static void rotary_row(uint32_t heads, uint32_t head_channels, const float *cosines, const float *sines, bool inverse,
                       float *x)
{
    const uint32_t half = head_channels / 2;
    const vf sign = v_set1(inverse ? -1.0f : 1.0f);
    for (uint32_t h = 0; h < heads; h++, x += head_channels)
        for (uint32_t i = 0; i < half; i += VL) {
            unsigned n = lanes_of(half - i);
            vf c = v_load_n(cosines + i, n), s = v_mul(sign, v_load_n(sines + i, n));
            vf a = v_load_n(x + i, n), b = v_load_n(x + half + i, n);
            v_store_n(x + i, v_fnma(b, s, v_mul(a, c)), n);
            v_store_n(x + half + i, v_fma(a, s, v_mul(b, c)), n);
        }
}

/* ---- loss ---- */

static float row_max(uint32_t size, const float *x)
{
    uint32_t i = 0;
    vf highest = v_set1(x[0]);
    for (; i + VL <= size; i += VL)
        highest = v_max(highest, v_load(x + i));
    float result = v_fold_max(highest);
    for (; i < size; i++)
        result = result > x[i] ? result : x[i];
    return result;
}

/* Sum of exp(x - highest) in blocks; the exponentials replace x when `store`. */
static double exp_sum(uint32_t size, float *x, float highest, bool store)
{
    double total = 0;
    const vf shift = v_set1(highest);
    for (uint32_t first = 0; first < size; first += MU_SOFTMAX_BLOCK) {
        uint32_t end = size - first < MU_SOFTMAX_BLOCK ? size : first + MU_SOFTMAX_BLOCK, i = first;
        vf sum = v_zero();
        for (; i + VL <= end; i += VL) {
            vf e = v_exp(v_sub(v_load(x + i), shift));
            sum = v_add(sum, e);
            if (store)
                v_store(x + i, e);
        }
        if (i < end) {
            unsigned n = end - i;
            vf e = v_keep_n(v_exp(v_sub(v_load_n(x + i, n), shift)), n);
            sum = v_add(sum, e);
            if (store)
                v_store_n(x + i, e, n);
        }
        total += (double)v_fold_sum(sum);
    }
    return total;
}

static void scale(size_t size, float by, float *x)
{
    const vf factor = v_set1(by);
    size_t i = 0;
    for (; i + VL <= size; i += VL)
        v_store(x + i, v_mul(v_load(x + i), factor));
    if (i < size) {
        unsigned n = lanes_of(size - i);
        v_store_n(x + i, v_mul(v_load_n(x + i, n), factor), n);
    }
}

static double cross_entropy_row(uint32_t vocab, float *logits, int32_t target, float factor, bool gradient)
{
    if (target < 0) {
        if (gradient)
            memset(logits, 0, vocab * sizeof(float));
        return 0.0;
    }
    float highest = row_max(vocab, logits), aim = logits[target];
    double sum = exp_sum(vocab, logits, highest, gradient);
    if (gradient) {
        scale(vocab, (float)((double)factor / sum), logits);
        logits[target] -= factor;
    }
    return ((double)highest - (double)aim) + mu_fmath_log(sum);
}

/* ---- optimizer ---- */

static void adamw(const struct mu_adamw *a, size_t size, float *p, float *m, float *v, const float *g)
{
    const vf scale = v_set1(a->gradient_scale), beta1 = v_set1(a->beta1), beta2 = v_set1(a->beta2),
             rest1 = v_set1(a->rest1), rest2 = v_set1(a->rest2), c1 = v_set1(a->correction1),
             c2 = v_set1(a->correction2), eps = v_set1(a->eps), decay = v_set1(a->weight_decay), lr = v_set1(a->lr);
    for (size_t i = 0; i < size; i += VL) {
        unsigned n = lanes_of(size - i);
        vf x = v_load_n(p + i, n), gradient = v_mul(v_load_n(g + i, n), scale);
        vf m1 = v_fma(beta1, v_load_n(m + i, n), v_mul(rest1, gradient));
        vf v1 = v_fma(beta2, v_load_n(v + i, n), v_mul(v_mul(rest2, gradient), gradient));
        vf direction = v_div(v_mul(m1, c1), v_add(v_sqrt(v_mul(v1, c2)), eps));
        v_store_n(m + i, m1, n);
        v_store_n(v + i, v1, n);
        v_store_n(p + i, v_fnma(lr, v_fma(decay, x, direction), x), n);
    }
}

const struct mu_isa_ops MU_ISA_FN(mu_isa_ops) = {
    .gemm_tile = MU_ISA_FN(mu_gemm_tile),
    .column_sum = column_sum,
    .dropout_factors = dropout_factors,
    .embedding_row = embedding_row,
    .multiply = multiply,
    .norm_forward_row = norm_forward_row,
    .norm_backward_row = norm_backward_row,
    .rms_forward_row = rms_forward_row,
    .rms_backward_row = rms_backward_row,
    .gelu_forward = gelu_forward,
    .gelu_backward = gelu_backward,
    .swiglu_forward = swiglu_forward,
    .swiglu_backward = swiglu_backward,
    .rotary_row = rotary_row,
    .attention_forward = MU_ISA_FN(mu_attention_forward),
    .attention_backward = MU_ISA_FN(mu_attention_backward),
    .cross_entropy_row = cross_entropy_row,
    .row_max = row_max,
    .exp_sum = exp_sum,
    .scale = scale,
    .add = add,
    .square_sum = square_sum,
    .adamw = adamw,
    .init_normal = init_normal,
};
