/* Exact causal attention, forward: one thread block owns 64 queries of one head and walks the key tiles, ascending,
 * with a running maximum and sum (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135). */
#include "kernels/cuda/attention.h"

#include <math.h>

struct attention_args attention_args_of(const struct mu_attention *attention)
{
    struct attention_args a = {};
    struct mu_attention *at = &a.at;
    *at = *attention;
    MU_ASSERT(at->kv_heads > 0 && at->heads % at->kv_heads == 0);
    MU_ASSERT(at->head_channels > 0 && at->head_channels <= MU_ATTENTION_HEAD_MAX);
    at->slices = at->slices ? at->slices : 1;
    if (at->qkv_stride == 0)
        at->qkv_stride = ((size_t)at->heads + 2 * (size_t)at->kv_heads) * at->head_channels;
    if (at->out_stride == 0)
        at->out_stride = (size_t)at->heads * at->head_channels;
    a.drop = site_of(at->drop);
    a.tiles = div_up(at->length, TILE);
    a.sequences = at->slices * at->sequences;
    a.factor = 1.0f / sqrtf((float)at->head_channels);
    a.vector = at->head_channels % 4 == 0 && aligned16(at->qkv, at->qkv_stride) && aligned16(at->dout, at->out_stride);
    return a;
}

/* Running values of the own rows, the same in all sixteen threads of a row. */
struct softmax_rows {
    float highest[OWN_ROWS], sum[OWN_ROWS], correction[OWN_ROWS];
};

/* Scores become exp(score - running maximum); the running values, and the correction of what was summed before. */
MU_INLINE void softmax_tile(bool diagonal, float s[OWN_ROWS][OWN_COLUMNS], struct softmax_rows &rows)
{
    const uint32_t lane = threadIdx.x % LANES, row = threadIdx.x / LANES * OWN_ROWS;
#pragma unroll
    for (uint32_t i = 0; i < OWN_ROWS; i++) {
#pragma unroll
        for (uint32_t g = 0; g < OWN_COLUMNS; g++)
            if (diagonal && g * LANES + lane > row + i)
                s[i][g] = -INFINITY;
        float highest = fold_max(v_max(v_max(s[i][0], s[i][1]), v_max(s[i][2], s[i][3])));
        float now = v_max(rows.highest[i], highest), total = 0.0f;
        rows.correction[i] = v_exp(rows.highest[i] - now);
        rows.highest[i] = now;
#pragma unroll
        for (uint32_t g = 0; g < OWN_COLUMNS; g++) {
            s[i][g] = v_exp(s[i][g] - now);
            total += s[i][g];
        }
        rows.sum[i] = fmaf(rows.sum[i], rows.correction[i], fold_sum(total));
    }
}

template <int WIDE>
__global__ void __launch_bounds__(ATTENTION_THREADS) attention_forward_kernel(struct attention_args a)
{
    MU_DYNAMIC_SHARED(float, shared);
    float *const queries = shared, *const keys = queries + tile_shape<WIDE>::FLOATS,
                 *const scores = keys + tile_shape<WIDE>::FLOATS;
    const uint32_t heads = a.sequences * a.at.heads, number = a.tiles - 1 - blockIdx.x / heads; /* the longest first */
    const uint32_t sequence = blockIdx.x % heads / a.at.heads, head = blockIdx.x % heads % a.at.heads;
    const uint32_t row = threadIdx.x / LANES * OWN_ROWS;
    const struct head_rows at = rows_of(a, sequence, head);
    struct softmax_rows rows;
    float sums[OWN_ROWS][WIDE] = {}, s[OWN_ROWS][OWN_COLUMNS], product[OWN_ROWS][WIDE];
    for (uint32_t i = 0; i < OWN_ROWS; i++) {
        rows.highest[i] = -INFINITY;
        rows.sum[i] = 0.0f;
    }
    load_tile<WIDE>(a, a.at.qkv + at.query, a.at.qkv_stride, number, a.factor, queries);
    for (uint32_t j = 0; j <= number; j++) {
        load_tile<WIDE>(a, a.at.qkv + at.key, a.at.qkv_stride, j, 1.0f, keys);
        __syncthreads();
        multiply_rows<WIDE>(queries, keys, a.at.head_channels, s);
        softmax_tile(j == number, s, rows);
        for (uint32_t i = 0; a.drop.threshold && i < OWN_ROWS; i++) {
            struct random4 random = score_random(a, sequence, head, number * TILE + row + i, j);
#pragma unroll
            for (uint32_t g = 0; g < OWN_COLUMNS; g++)
                s[i][g] *= site_factor(a.drop, random.word[g]);
        }
        store_scores(scores, s);
        __syncthreads(); /* the keys have been read: the values take their place */
        load_tile<WIDE>(a, a.at.qkv + at.value, a.at.qkv_stride, j, 1.0f, keys);
        __syncthreads();
        multiply_tile<WIDE, false>(scores, keys, product);
        for (uint32_t i = 0; i < OWN_ROWS; i++)
#pragma unroll
            for (uint32_t c = 0; c < WIDE; c++)
                sums[i][c] = fmaf(sums[i][c], rows.correction[i], product[i][c]);
        __syncthreads();
    }
    float inverse[OWN_ROWS];
#pragma unroll
    for (uint32_t i = 0; i < OWN_ROWS; i++) {
        const uint32_t token = number * TILE + row + i;
        inverse[i] = 1.0f / rows.sum[i];
        if (threadIdx.x % LANES == 0 && token < a.at.length)
            a.at.lse[at.lse + token] = rows.highest[i] + v_log(rows.sum[i]);
    }
    write_rows<WIDE>(a, sums, number, inverse, a.at.out + at.out, a.at.out_stride);
}

extern "C" enum mu_status mu_cuda_attention_forward(struct mu_pool *pool, const struct mu_attention *attention)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    struct attention_args a = attention_args_of(attention);
    void (*kernel)(struct attention_args) = MU_ATTENTION_KERNEL(attention_forward_kernel, a.at.head_channels);
    const size_t bytes = (2 * tile_floats(a.at.head_channels) + SCORE_FLOATS) * sizeof(float);
    allow_shared(kernel, bytes);
    MU_LAUNCH(kernel, dim3(a.tiles * a.sequences * a.at.heads), dim3(ATTENTION_THREADS), bytes, cuda->stream, a);
    return launched(cuda, "attention_forward");
}
