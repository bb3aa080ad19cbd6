/* Causal attention on tensor cores: operands rounded to bf16, sums in fp32. Deterministic: one owner per output, tiles
 * ascending, no atomics.
 *
 * Four warps share 64 x 64 tiles; each owns 16 rows. Forward and for the queries' gradients the rows are queries, for
 * the gradients of keys and values they are keys (the scores are computed transposed), so that what comes out of one
 * product is in place as the left operand of the next. Scores are kept in units of log2. Heads of more than 128
 * channels use the exact kernels. */
#include <math.h>

#include "kernels/cuda/attention.h"
#include "kernels/cuda/warp.h"

enum {
    MMA_THREADS = 128,
    MMA_ROWS = 16,           /* of a warp */
    SCORE_BLOCKS = TILE / 8, /* accumulators across a tile */
    MMA_CHANNELS_MAX = 128,
};

static const float log2_e = 0x1.715476p0f, ln_2 = 0x1.62e430p-1f;

template <int CHANNELS> struct bf16_tile {
    enum { STRIDE = CHANNELS + 8, SIZE = TILE * STRIDE }; /* rows 16 bytes further than a multiple of all banks */
};

/* tile[64][CHANNELS] = rows 64 number .. of x, zeros beyond the sequence and the head. */
template <int CHANNELS>
MU_INLINE void load_rows(const struct attention_args &a, const float *x, size_t stride, uint32_t number,
                         __nv_bfloat16 *tile)
{
    const uint32_t head = a.at.head_channels;
#pragma unroll 8
    for (uint32_t i = threadIdx.x; i < TILE * CHANNELS / 4; i += MMA_THREADS) {
        const uint32_t row = i / (CHANNELS / 4), column = i % (CHANNELS / 4) * 4, token = number * TILE + row;
        const uint32_t inside = token >= a.at.length || column >= head ? 0 : head - column;
        const float *from = x + token * stride + column;
        float4 v;
        if (a.vector && inside >= 4)
            v = *(const float4 *)from;
        else
            v = make_float4(inside > 0 ? from[0] : 0.0f, inside > 1 ? from[1] : 0.0f, inside > 2 ? from[2] : 0.0f,
                            inside > 3 ? from[3] : 0.0f);
        *(uint2 *)(tile + row * bf16_tile<CHANNELS>::STRIDE + column) =
            make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
    }
}

/* s = 16 rows of x times all rows of y. */
template <int CHANNELS>
MU_INLINE void multiply_rows(const __nv_bfloat16 *x, const __nv_bfloat16 *y, struct fragment_c s[SCORE_BLOCKS])
{
    enum { STRIDE = bf16_tile<CHANNELS>::STRIDE };
#pragma unroll
    for (uint32_t n = 0; n < SCORE_BLOCKS; n++)
        s[n] = {{0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
    for (uint32_t k = 0; k < CHANNELS; k += 16) {
        const struct fragment_a a = load_a(x + k, STRIDE);
#pragma unroll
        for (uint32_t n = 0; n < SCORE_BLOCKS; n += 2) {
            const struct fragment_b_pair b = load_b_rows(y + n * 8 * STRIDE + k, STRIDE);
            multiply_add(s[n], a, b.left);
            multiply_add(s[n + 1], a, b.right);
        }
    }
}

/* sum += p y: p is 16 x 64, y a tile. */
template <int CHANNELS>
MU_INLINE void add_product(const struct fragment_c p[SCORE_BLOCKS], const __nv_bfloat16 *y,
                           struct fragment_c sum[CHANNELS / 8])
{
    enum { STRIDE = bf16_tile<CHANNELS>::STRIDE };
#pragma unroll
    for (uint32_t k = 0; k < TILE / 16; k++) {
        const struct fragment_a a = as_a(p[2 * k], p[2 * k + 1]);
#pragma unroll
        for (uint32_t n = 0; n < CHANNELS / 8; n += 2) {
            const struct fragment_b_pair b = load_b(y + k * 16 * STRIDE + n * 8, STRIDE);
            multiply_add(sum[n], a, b.left);
            multiply_add(sum[n + 1], a, b.right);
        }
    }
}

/* Row (of the tile) and column of value e of accumulator n. */
MU_INLINE uint32_t row_of(uint32_t e)
{
    return threadIdx.x / WARP * MMA_ROWS + threadIdx.x % WARP / 4 + e / 2 * 8;
}
MU_INLINE uint32_t column_of(uint32_t n, uint32_t e)
{
    return n * 8 + threadIdx.x % 4 * 2 + e % 2;
}

/* rows 64 number .. of x = factor of the row * sum. */
template <int CHANNELS>
MU_INLINE void write_rows(const struct attention_args &a, const struct fragment_c sum[CHANNELS / 8], uint32_t number,
                          float upper, float lower, float *x, size_t stride)
{
#pragma unroll
    for (uint32_t n = 0; n < CHANNELS / 8; n++)
#pragma unroll
        for (uint32_t e = 0; e < 4; e++) {
            const uint32_t token = number * TILE + row_of(e), column = column_of(n, e);
            if (token < a.at.length && column < a.at.head_channels)
                x[token * stride + column] = sum[n].v[e] * (e < 2 ? upper : lower);
        }
}

/* Dropout factor of one score, by logical element. */
MU_INLINE float score_factor(const struct attention_args &a, uint32_t sequence, uint32_t head, uint32_t query,
                             uint32_t key)
{
    const uint32_t number = a.at.first_head + sequence / a.at.sequences * a.at.heads + head;
    const uint32_t feature = number << 20 | key;
    const struct random4 random =
        site_random(a.drop, sequence % a.at.sequences, query, feature / DROPOUT_FEATURES, feature % LANES);
    const uint32_t w = feature / LANES % 4;
    return site_factor(a.drop, w < 2 ? random.word[w] : random.word[2 + w % 2]);
}

/* ---- forward ---- */

/* Over the four threads that share a row. */
MU_INLINE float quad_max(float x)
{
    x = v_max(x, __shfl_xor_sync(0xffffffffu, x, 1, 4));
    return v_max(x, __shfl_xor_sync(0xffffffffu, x, 2, 4));
}
MU_INLINE float quad_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1, 4);
    return x + __shfl_xor_sync(0xffffffffu, x, 2, 4);
}

/* Running values of a thread's two rows. */
struct running {
    float highest[2], sum[2], correction[2];
};

/* Scores become 2^(score - running maximum). */
MU_INLINE void softmax_tile(bool diagonal, float factor, struct fragment_c s[SCORE_BLOCKS], struct running &rows)
{
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        float highest = -INFINITY, sum = 0.0f;
#pragma unroll
        for (uint32_t n = 0; n < SCORE_BLOCKS; n++)
#pragma unroll
            for (uint32_t e = 2 * half; e < 2 * half + 2; e++) {
                float x = diagonal && column_of(n, e) > row_of(e) ? -INFINITY : s[n].v[e] * factor;
                s[n].v[e] = x;
                highest = v_max(highest, x);
            }
        const float now = v_max(rows.highest[half], quad_max(highest));
        rows.correction[half] = exp2f(rows.highest[half] - now);
        rows.highest[half] = now;
#pragma unroll
        for (uint32_t n = 0; n < SCORE_BLOCKS; n++)
#pragma unroll
            for (uint32_t e = 2 * half; e < 2 * half + 2; e++) {
                s[n].v[e] = exp2f(s[n].v[e] - now);
                sum += s[n].v[e];
            }
        rows.sum[half] = fmaf(rows.sum[half], rows.correction[half], quad_sum(sum));
    }
}

template <int CHANNELS> __global__ void __launch_bounds__(MMA_THREADS) bf16_forward_kernel(struct attention_args a)
{
    enum { STRIDE = bf16_tile<CHANNELS>::STRIDE, SIZE = bf16_tile<CHANNELS>::SIZE };
    MU_DYNAMIC_SHARED(__nv_bfloat16, queries);
    __nv_bfloat16 *const keys = queries + SIZE, *const values = keys + SIZE;
    const uint32_t heads = a.sequences * a.at.heads, number = a.tiles - 1 - blockIdx.x / heads; /* the longest first */
    const uint32_t sequence = blockIdx.x % heads / a.at.heads, head = blockIdx.x % heads % a.at.heads;
    const struct head_rows at = rows_of(a, sequence, head);
    struct running rows = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}, {0.0f, 0.0f}};
    struct fragment_c sums[CHANNELS / 8] = {}, s[SCORE_BLOCKS];
    load_rows<CHANNELS>(a, a.at.qkv + at.query, a.at.qkv_stride, number, queries);
    for (uint32_t j = 0; j <= number; j++) {
        load_rows<CHANNELS>(a, a.at.qkv + at.key, a.at.qkv_stride, j, keys);
        load_rows<CHANNELS>(a, a.at.qkv + at.value, a.at.qkv_stride, j, values);
        __syncthreads();
        multiply_rows<CHANNELS>(queries + threadIdx.x / WARP * MMA_ROWS * STRIDE, keys, s);
        softmax_tile(j == number, a.factor * log2_e, s, rows);
        if (a.drop.threshold)
#pragma unroll
            for (uint32_t n = 0; n < SCORE_BLOCKS; n++)
#pragma unroll
                for (uint32_t e = 0; e < 4; e++)
                    s[n].v[e] *= score_factor(a, sequence, head, number * TILE + row_of(e), j * TILE + column_of(n, e));
#pragma unroll
        for (uint32_t n = 0; n < CHANNELS / 8; n++)
#pragma unroll
            for (uint32_t e = 0; e < 4; e++)
                sums[n].v[e] *= rows.correction[e / 2];
        add_product<CHANNELS>(s, values, sums);
        __syncthreads();
    }
    for (uint32_t half = 0; half < 2; half++) {
        const uint32_t token = number * TILE + row_of(2 * half);
        if (threadIdx.x % 4 == 0 && token < a.at.length)
            a.at.lse[at.lse + token] = (rows.highest[half] + log2f(rows.sum[half])) * ln_2;
    }
    write_rows<CHANNELS>(a, sums, number, 1.0f / rows.sum[0], 1.0f / rows.sum[1], a.at.out + at.out, a.at.out_stride);
}

/* ---- backward ---- */

/* One score: s becomes the dropped probability, dp becomes dS. */
MU_INLINE void gradient_value(const struct attention_args &a, uint32_t sequence, uint32_t head, uint32_t query,
                              uint32_t key, float lse, float delta, float &s, float &dp)
{
    float p = key > query || query >= a.at.length ? 0.0f : exp2f(fmaf(s, a.factor * log2_e, -lse * log2_e));
    float factor = a.drop.threshold ? score_factor(a, sequence, head, query, key) : 1.0f;
    s = p * factor;
    dp = p * (dp * factor - delta);
}

/* Gradients of one tile of keys and values: over query heads, then query tiles, both ascending. */
template <int CHANNELS> __global__ void __launch_bounds__(MMA_THREADS) bf16_keys_kernel(struct attention_args a)
{
    enum { STRIDE = bf16_tile<CHANNELS>::STRIDE, SIZE = bf16_tile<CHANNELS>::SIZE };
    MU_DYNAMIC_SHARED(__nv_bfloat16, keys);
    __shared__ float lse[TILE], delta[TILE];
    __nv_bfloat16 *const values = keys + SIZE, *const queries = values + SIZE, *const douts = queries + SIZE;
    const uint32_t heads = a.sequences * a.at.kv_heads, key_tile = blockIdx.x / heads; /* the longest first */
    const uint32_t sequence = blockIdx.x % heads / a.at.kv_heads, kv_head = blockIdx.x % heads % a.at.kv_heads;
    const uint32_t group = a.at.heads / a.at.kv_heads, own = threadIdx.x / WARP * MMA_ROWS * STRIDE;
    const struct head_rows first = rows_of(a, sequence, kv_head * group);
    struct fragment_c dk[CHANNELS / 8] = {}, dv[CHANNELS / 8] = {}, s[SCORE_BLOCKS], dp[SCORE_BLOCKS];
    load_rows<CHANNELS>(a, a.at.qkv + first.key, a.at.qkv_stride, key_tile, keys);
    load_rows<CHANNELS>(a, a.at.qkv + first.value, a.at.qkv_stride, key_tile, values);
    for (uint32_t head = kv_head * group; head < (kv_head + 1) * group; head++)
        for (uint32_t i = key_tile; i < a.tiles; i++) {
            const struct head_rows at = rows_of(a, sequence, head);
            __syncthreads();
            load_rows<CHANNELS>(a, a.at.qkv + at.query, a.at.qkv_stride, i, queries);
            load_rows<CHANNELS>(a, a.at.dout + at.out, a.at.out_stride, i, douts);
            if (threadIdx.x < TILE) {
                const uint32_t token = i * TILE + threadIdx.x;
                lse[threadIdx.x] = token < a.at.length ? a.at.lse[at.lse + token] : 0.0f;
                delta[threadIdx.x] = token < a.at.length ? a.delta[at.lse + token] : 0.0f;
            }
            __syncthreads();
            multiply_rows<CHANNELS>(keys + own, queries, s);
            multiply_rows<CHANNELS>(values + own, douts, dp);
#pragma unroll
            for (uint32_t n = 0; n < SCORE_BLOCKS; n++)
#pragma unroll
                for (uint32_t e = 0; e < 4; e++) {
                    const uint32_t column = column_of(n, e);
                    gradient_value(a, sequence, head, i * TILE + column, key_tile * TILE + row_of(e), lse[column],
                                   delta[column], s[n].v[e], dp[n].v[e]);
                }
            add_product<CHANNELS>(s, douts, dv);
            add_product<CHANNELS>(dp, queries, dk);
        }
    write_rows<CHANNELS>(a, dk, key_tile, a.factor, a.factor, a.at.dqkv + first.key, a.at.qkv_stride);
    write_rows<CHANNELS>(a, dv, key_tile, 1.0f, 1.0f, a.at.dqkv + first.value, a.at.qkv_stride);
}

/* Gradients of one tile of queries: key tiles ascending. */
template <int CHANNELS> __global__ void __launch_bounds__(MMA_THREADS) bf16_queries_kernel(struct attention_args a)
{
    enum { STRIDE = bf16_tile<CHANNELS>::STRIDE, SIZE = bf16_tile<CHANNELS>::SIZE };
    MU_DYNAMIC_SHARED(__nv_bfloat16, queries);
    __nv_bfloat16 *const douts = queries + SIZE, *const keys = douts + SIZE, *const values = keys + SIZE;
    const uint32_t heads = a.sequences * a.at.heads, number = a.tiles - 1 - blockIdx.x / heads;
    const uint32_t sequence = blockIdx.x % heads / a.at.heads, head = blockIdx.x % heads % a.at.heads;
    const uint32_t own = threadIdx.x / WARP * MMA_ROWS * STRIDE;
    const struct head_rows at = rows_of(a, sequence, head);
    struct fragment_c dq[CHANNELS / 8] = {}, s[SCORE_BLOCKS], dp[SCORE_BLOCKS];
    float lse[2], delta[2];
    for (uint32_t half = 0; half < 2; half++) {
        const uint32_t token = number * TILE + row_of(2 * half);
        lse[half] = token < a.at.length ? a.at.lse[at.lse + token] : 0.0f;
        delta[half] = token < a.at.length ? a.delta[at.lse + token] : 0.0f;
    }
    load_rows<CHANNELS>(a, a.at.qkv + at.query, a.at.qkv_stride, number, queries);
    load_rows<CHANNELS>(a, a.at.dout + at.out, a.at.out_stride, number, douts);
    for (uint32_t j = 0; j <= number; j++) {
        __syncthreads();
        load_rows<CHANNELS>(a, a.at.qkv + at.key, a.at.qkv_stride, j, keys);
        load_rows<CHANNELS>(a, a.at.qkv + at.value, a.at.qkv_stride, j, values);
        __syncthreads();
        multiply_rows<CHANNELS>(queries + own, keys, s);
        multiply_rows<CHANNELS>(douts + own, values, dp);
#pragma unroll
        for (uint32_t n = 0; n < SCORE_BLOCKS; n++)
#pragma unroll
            for (uint32_t e = 0; e < 4; e++)
                gradient_value(a, sequence, head, number * TILE + row_of(e), j * TILE + column_of(n, e), lse[e / 2],
                               delta[e / 2], s[n].v[e], dp[n].v[e]);
        add_product<CHANNELS>(dp, keys, dq);
    }
    write_rows<CHANNELS>(a, dq, number, a.factor, a.factor, a.at.dqkv + at.query, a.at.qkv_stride);
}

/* ---- launches ---- */

typedef void attention_kernel_fn(struct attention_args);

#define MMA_KERNEL(kernel, head_channels)                                                                              \
    ((head_channels) <= 32 ? kernel<32> : (head_channels) <= 64 ? kernel<64> : kernel<128>)

/* Shared memory of some tiles. */
static size_t tiles_bytes(uint32_t count, uint32_t head_channels)
{
    const size_t size = head_channels <= 32   ? (size_t)bf16_tile<32>::SIZE
                        : head_channels <= 64 ? (size_t)bf16_tile<64>::SIZE
                                              : (size_t)bf16_tile<128>::SIZE;
    return count * size * sizeof(__nv_bfloat16);
}

static void launch_attention(struct mu_cuda *cuda, attention_kernel_fn *kernel, const struct attention_args *a,
                             uint32_t heads, uint32_t tiles)
{
    const size_t bytes = tiles_bytes(tiles, a->at.head_channels);
    allow_shared(kernel, bytes);
    MU_LAUNCH(kernel, dim3(a->tiles * a->sequences * heads), dim3(MMA_THREADS), bytes, cuda->stream, *a);
}

extern "C" enum mu_status mu_cuda_bf16_attention_forward(struct mu_pool *pool, const struct mu_attention *attention)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    if (attention->head_channels > MMA_CHANNELS_MAX)
        return mu_cuda_attention_forward(pool, attention);
    struct attention_args a = attention_args_of(attention);
    launch_attention(cuda, MMA_KERNEL(bf16_forward_kernel, a.at.head_channels), &a, a.at.heads, 3);
    return launched(cuda, "attention_forward");
}

extern "C" enum mu_status mu_cuda_bf16_attention_backward(struct mu_pool *pool, const struct mu_attention *attention)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    if (attention->head_channels > MMA_CHANNELS_MAX)
        return mu_cuda_attention_backward(pool, attention);
    struct attention_args a = attention_args_of(attention);
    enum mu_status status = launch_delta(cuda, &a);
    if (status != MU_OK)
        return status;
    launch_attention(cuda, MMA_KERNEL(bf16_keys_kernel, a.at.head_channels), &a, a.at.kv_heads, 4);
    launch_attention(cuda, MMA_KERNEL(bf16_queries_kernel, a.at.head_channels), &a, a.at.heads, 4);
    return launched(cuda, "attention_backward");
}
