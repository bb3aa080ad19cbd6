/* Element-wise operations on rows: embedding look-up, row bias, SwiGLU, rotary positions.
 *
 * Sixty-four features of a row go to sixteen threads, four to each, sixteen apart: one Philox counter serves the four,
 * and a warp reads whole 64-byte segments. */
#include "kernels/cuda/device.h"

enum { ROW_THREADS = 256 };

/* A thread's place: rows times groups of 64 features, sixteen lanes each. */
struct spot {
    size_t row;
    uint32_t group, lane;
};

MU_INLINE bool spot_of(size_t rows, uint32_t width, struct spot *ret_spot)
{
    size_t thread = (size_t)blockIdx.x * ROW_THREADS + threadIdx.x;
    uint32_t groups = (width + DROPOUT_FEATURES - 1) / DROPOUT_FEATURES;
    size_t number = thread / LANES;
    ret_spot->row = number / groups;
    ret_spot->group = (uint32_t)(number % groups);
    ret_spot->lane = (uint32_t)(thread % LANES);
    return ret_spot->row < rows;
}

/* The w-th of a thread's features. All of them are loaded before the first is stored: loads do not wait for stores. */
MU_INLINE uint32_t feature_of(const struct spot &at, uint32_t w)
{
    return at.group * DROPOUT_FEATURES + w * LANES + at.lane;
}

static uint32_t blocks_of(size_t rows, uint32_t width)
{
    return div_up(rows * div_up(width, DROPOUT_FEATURES) * LANES, ROW_THREADS);
}

/* ---- embedding ---- */

struct lookup {
    uint32_t first_row, rows, length, channels;
    uint32_t slice_rows, first_slice, slice_count;
    const int32_t *tokens;
    const float *wpe;
    struct site drop;
    float *x;
    const float *slices[MU_GEMM_SLICES_MAX];
};

__global__ void lookup_kernel(struct lookup a)
{
    struct spot at;
    if (!spot_of(a.rows, a.channels, &at))
        return;
    uint32_t token = (uint32_t)a.tokens[at.row], slice = token / a.slice_rows,
             position = a.first_row + (uint32_t)at.row;
    if (slice < a.first_slice || slice - a.first_slice >= a.slice_count)
        return;
    const float *from = a.slices[slice - a.first_slice] + (size_t)(token % a.slice_rows) * a.channels;
    const float *wpe = a.wpe ? a.wpe + (size_t)(position % a.length) * a.channels : NULL;
    struct random4 random;
    if (a.drop.threshold)
        random = site_random(a.drop, position / a.length, position % a.length, at.group, at.lane);
    float sum[4];
#pragma unroll
    for (uint32_t w = 0; w < 4; w++) {
        uint32_t i = feature_of(at, w);
        sum[w] = i < a.channels ? from[i] : 0.0f;
        if (wpe && i < a.channels)
            sum[w] += wpe[i];
    }
#pragma unroll
    for (uint32_t w = 0; w < 4; w++) {
        uint32_t i = feature_of(at, w);
        if (i < a.channels)
            a.x[at.row * a.channels + i] = a.drop.threshold ? sum[w] * site_factor(a.drop, random.word[w]) : sum[w];
    }
}

extern "C" enum mu_status mu_cuda_embedding_forward(struct mu_pool *pool, uint32_t first_row, uint32_t rows,
                                                    uint32_t length, uint32_t channels,
                                                    const struct mu_vocab_slices *table, const int32_t *tokens,
                                                    const float *wpe, const struct mu_dropout *drop, float *x)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    struct lookup a = {
        first_row, rows,          length, channels, table->slice_rows, table->first_slice, table->slice_count, tokens,
        wpe,       site_of(drop), x,      {}};
    MU_ASSERT(table->slice_count <= MU_GEMM_SLICES_MAX);
    for (uint32_t s = 0; s < table->slice_count; s++)
        a.slices[s] = table->slices[s];
    MU_LAUNCH(lookup_kernel, dim3(blocks_of(rows, channels)), dim3(ROW_THREADS), 0, cuda->stream, a);
    return launched(cuda, "embedding_forward");
}

__global__ void drop_kernel(uint32_t first_row, uint32_t rows, uint32_t length, uint32_t channels, struct site drop,
                            float *dx)
{
    struct spot at;
    if (!spot_of(rows, channels, &at))
        return;
    uint32_t position = first_row + (uint32_t)at.row;
    struct random4 random = site_random(drop, position / length, position % length, at.group, at.lane);
#pragma unroll
    for (uint32_t w = 0; w < 4; w++) {
        uint32_t i = feature_of(at, w);
        if (i < channels)
            dx[at.row * channels + i] *= site_factor(drop, random.word[w]);
    }
}

extern "C" enum mu_status mu_cuda_embedding_drop(struct mu_pool *pool, uint32_t first_row, uint32_t rows,
                                                 uint32_t length, uint32_t channels, const struct mu_dropout *drop,
                                                 float *dx)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    struct site site = site_of(drop);
    if (site.threshold == 0)
        return MU_OK;
    MU_LAUNCH(drop_kernel, dim3(blocks_of(rows, channels)), dim3(ROW_THREADS), 0, cuda->stream, first_row, rows, length,
              channels, site, dx);
    return launched(cuda, "embedding_drop");
}

/* Owns one element of the table and adds its rows in order. */
__global__ void position_kernel(uint32_t first_row, uint32_t rows, uint32_t length, uint32_t channels, const float *dx,
                                float *dwpe)
{
    size_t element = (size_t)blockIdx.x * ROW_THREADS + threadIdx.x;
    uint32_t token = (uint32_t)(element / channels), column = (uint32_t)(element % channels);
    if (token >= length)
        return;
    uint32_t first = (token + length - first_row % length) % length; /* the first row of the range at this position */
    float sum = dwpe[element];
    for (size_t row = first; row < rows; row += length)
        sum += dx[row * channels + column];
    if (first < rows)
        dwpe[element] = sum;
}

extern "C" enum mu_status mu_cuda_position_backward(struct mu_pool *pool, uint32_t first_row, uint32_t rows,
                                                    uint32_t length, uint32_t channels, const float *dx, float *dwpe)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    MU_LAUNCH(position_kernel, dim3(div_up((size_t)length * channels, ROW_THREADS)), dim3(ROW_THREADS), 0, cuda->stream,
              first_row, rows, length, channels, dx, dwpe);
    return launched(cuda, "position_backward");
}

/* ---- bias, SwiGLU ---- */

__global__ void bias_kernel(uint32_t rows, uint32_t n, const float *bias, float *x)
{
    struct spot at;
    if (!spot_of(rows, n, &at))
        return;
    float sum[4];
#pragma unroll
    for (uint32_t w = 0; w < 4; w++)
        sum[w] = feature_of(at, w) < n ? x[at.row * n + feature_of(at, w)] + bias[feature_of(at, w)] : 0.0f;
#pragma unroll
    for (uint32_t w = 0; w < 4; w++)
        if (feature_of(at, w) < n)
            x[at.row * n + feature_of(at, w)] = sum[w];
}

extern "C" enum mu_status mu_cuda_bias_add(struct mu_pool *pool, uint32_t rows, uint32_t n, const float *bias, float *x)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    if (rows == 0)
        return MU_OK;
    MU_LAUNCH(bias_kernel, dim3(blocks_of(rows, n)), dim3(ROW_THREADS), 0, cuda->stream, rows, n, bias, x);
    return launched(cuda, "bias_add");
}

/* A thread's gates and ups. */
struct gates {
    float gate[4], up[4];
};

MU_INLINE struct gates load_gates(const struct spot &at, uint32_t hidden, const float *gate_up)
{
    const float *row = gate_up + at.row * 2 * hidden;
    struct gates g;
#pragma unroll
    for (uint32_t w = 0; w < 4; w++) {
        uint32_t i = feature_of(at, w);
        g.gate[w] = i < hidden ? row[i] : 0.0f;
        g.up[w] = i < hidden ? row[hidden + i] : 0.0f;
    }
    return g;
}

__global__ void swiglu_kernel(uint32_t rows, uint32_t hidden, const float *gate_up, float *y)
{
    struct spot at;
    if (!spot_of(rows, hidden, &at))
        return;
    const struct gates g = load_gates(at, hidden, gate_up);
#pragma unroll
    for (uint32_t w = 0; w < 4; w++)
        if (feature_of(at, w) < hidden)
            y[at.row * hidden + feature_of(at, w)] = v_silu(g.gate[w]) * g.up[w];
}

/* gate_up and d_gate_up may be the same buffer. */
__global__ void swiglu_gradient_kernel(uint32_t rows, uint32_t hidden, const float *gate_up, const float *dy,
                                       float *d_gate_up)
{
    struct spot at;
    if (!spot_of(rows, hidden, &at))
        return;
    const struct gates g = load_gates(at, hidden, gate_up);
    float *row = d_gate_up + at.row * 2 * hidden, d[4];
#pragma unroll
    for (uint32_t w = 0; w < 4; w++)
        d[w] = feature_of(at, w) < hidden ? dy[at.row * hidden + feature_of(at, w)] : 0.0f;
#pragma unroll
    for (uint32_t w = 0; w < 4; w++) {
        uint32_t i = feature_of(at, w);
        if (i >= hidden)
            break;
        row[i] = d[w] * g.up[w] * v_silu_grad(g.gate[w]);
        row[hidden + i] = d[w] * v_silu(g.gate[w]);
    }
}

extern "C" enum mu_status mu_cuda_swiglu_forward(struct mu_pool *pool, uint32_t rows, uint32_t hidden,
                                                 const float *gate_up, float *y)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    MU_LAUNCH(swiglu_kernel, dim3(blocks_of(rows, hidden)), dim3(ROW_THREADS), 0, cuda->stream, rows, hidden, gate_up,
              y);
    return launched(cuda, "swiglu_forward");
}

extern "C" enum mu_status mu_cuda_swiglu_backward(struct mu_pool *pool, uint32_t rows, uint32_t hidden,
                                                  const float *gate_up, const float *dy, float *d_gate_up)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    MU_LAUNCH(swiglu_gradient_kernel, dim3(blocks_of(rows, hidden)), dim3(ROW_THREADS), 0, cuda->stream, rows, hidden,
              gate_up, dy, d_gate_up);
    return launched(cuda, "swiglu_backward");
}

/* ---- rotary positions ---- */

struct rotary {
    uint32_t first_row, rows, length, heads, half;
    size_t stride;
    const float *cosines, *sines;
    float sign, *x;
};

__global__ void rotary_kernel(struct rotary a)
{
    size_t pair = (size_t)blockIdx.x * ROW_THREADS + threadIdx.x, pairs = (size_t)a.heads * a.half;
    size_t row = pair / pairs, head = pair % pairs / a.half, i = pair % a.half;
    if (row >= a.rows)
        return;
    size_t angle = (a.first_row + row) % a.length * a.half + i;
    float *x = a.x + row * a.stride + head * 2 * a.half + i;
    float c = a.cosines[angle], s = a.sign * a.sines[angle], first = x[0], second = x[a.half];
    x[0] = fmaf(-second, s, first * c);
    x[a.half] = fmaf(first, s, second * c);
}

extern "C" enum mu_status mu_cuda_rotary(struct mu_pool *pool, uint32_t first_row, uint32_t rows, uint32_t length,
                                         uint32_t heads, uint32_t head_channels, size_t stride, const float *cosines,
                                         const float *sines, bool inverse, float *x)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    MU_ASSERT(head_channels % 2 == 0 && stride >= (size_t)heads * head_channels);
    struct rotary a = {
        first_row, rows, length, heads, head_channels / 2, stride, cosines, sines, inverse ? -1.0f : 1.0f, x};
    MU_LAUNCH(rotary_kernel, dim3(div_up((size_t)rows * heads * a.half, ROW_THREADS)), dim3(ROW_THREADS), 0,
              cuda->stream, a);
    return launched(cuda, "rotary");
}
