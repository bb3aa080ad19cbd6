/* Exact causal attention, backward, without atomics: one thread block owns 64 keys and values (over all query heads and
 * tiles that meet them), another kernel's blocks own 64 queries. Both recompute the probabilities from the saved
 * log-sum-exp; the price is two of seven tile products. Two tiles of rows lie in shared memory at a time, so that heads
 * of 256 channels fit every architecture. */
#include "kernels/cuda/attention.h"

/* delta[row] = sum over the channels of a head of dout * out: sixteen threads to a row. */
__global__ void delta_kernel(struct attention_args a, size_t rows)
{
    const struct mu_attention &at = a.at;
    const uint32_t lane = threadIdx.x % LANES;
    const size_t number = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    const bool inside = number < rows;
    const size_t token = inside ? number % at.length : 0, head = inside ? number / at.length % at.heads : 0,
                 sequence = inside ? number / at.length / at.heads : 0;
    const size_t start = (sequence * at.length + token) * at.out_stride + head * at.head_channels;
    float sum = 0.0f;
    for (uint32_t c = 0; c < at.head_channels; c += LANES) {
        const bool here = inside && c + lane < at.head_channels;
        sum = fmaf(here ? at.out[start + c + lane] : 0.0f, here ? at.dout[start + c + lane] : 0.0f, sum);
    }
    sum = fold_sum(sum);
    if (inside && lane == 0)
        a.delta[number] = sum;
}

/* One pair of tiles: s becomes P (dropped), dp becomes dS. x, y: room for two tiles of rows; afterwards x holds dout.
 */
template <int WIDE>
MU_INLINE void gradient_tile(const struct attention_args &a, uint32_t sequence, uint32_t head, uint32_t query_tile,
                             uint32_t key_tile, float *x, float *y, float s[OWN_ROWS][OWN_COLUMNS],
                             float dp[OWN_ROWS][OWN_COLUMNS])
{
    const struct head_rows at = rows_of(a, sequence, head);
    const size_t stride = a.at.qkv_stride;
    __syncthreads(); /* whatever was in x and y has been read */
    load_tile<WIDE>(a, a.at.qkv + at.query, stride, query_tile, a.factor, x);
    load_tile<WIDE>(a, a.at.qkv + at.key, stride, key_tile, 1.0f, y);
    __syncthreads();
    multiply_rows<WIDE>(x, y, a.at.head_channels, s);
    __syncthreads();
    load_tile<WIDE>(a, a.at.dout + at.out, a.at.out_stride, query_tile, 1.0f, x);
    load_tile<WIDE>(a, a.at.qkv + at.value, stride, key_tile, 1.0f, y);
    __syncthreads();
    multiply_rows<WIDE>(x, y, a.at.head_channels, dp);
    const uint32_t lane = threadIdx.x % LANES, row = threadIdx.x / LANES * OWN_ROWS;
#pragma unroll
    for (uint32_t i = 0; i < OWN_ROWS; i++) {
        const uint32_t token = query_tile * TILE + row + i;
        const float shift = token < a.at.length ? a.at.lse[at.lse + token] : 0.0f;
        const float delta = token < a.at.length ? a.delta[at.lse + token] : 0.0f;
        struct random4 random;
        if (a.drop.threshold)
            random = score_random(a, sequence, head, token, key_tile);
#pragma unroll
        for (uint32_t g = 0; g < OWN_COLUMNS; g++) {
            float p = v_exp(s[i][g] - shift), grad = dp[i][g];
            if (query_tile == key_tile && g * LANES + lane > row + i)
                p = 0.0f;
            s[i][g] = p;
            if (a.drop.threshold) {
                float factor = site_factor(a.drop, random.word[g]);
                s[i][g] = p * factor;
                grad *= factor;
            }
            dp[i][g] = p * (grad - delta);
        }
    }
}

template <int WIDE> MU_INLINE void add_tile(float sum[OWN_ROWS][WIDE], const float product[OWN_ROWS][WIDE])
{
#pragma unroll
    for (uint32_t i = 0; i < OWN_ROWS; i++)
#pragma unroll
        for (uint32_t c = 0; c < WIDE; c++)
            sum[i][c] = sum[i][c] + product[i][c];
}

/* Gradients of one tile of keys and values: over query heads, then query tiles, both ascending. */
template <int WIDE> __global__ void __launch_bounds__(ATTENTION_THREADS) attention_keys_kernel(struct attention_args a)
{
    MU_DYNAMIC_SHARED(float, shared);
    float *const x = shared, *const y = x + tile_shape<WIDE>::FLOATS, *const p = y + tile_shape<WIDE>::FLOATS,
                 *const ds = p + SCORE_FLOATS;
    const uint32_t heads = a.sequences * a.at.kv_heads, key_tile = blockIdx.x / heads; /* the longest first */
    const uint32_t sequence = blockIdx.x % heads / a.at.kv_heads, kv_head = blockIdx.x % heads % a.at.kv_heads;
    const uint32_t group = a.at.heads / a.at.kv_heads;
    float dk[OWN_ROWS][WIDE] = {}, dv[OWN_ROWS][WIDE] = {}, product[OWN_ROWS][WIDE];
    for (uint32_t head = kv_head * group; head < (kv_head + 1) * group; head++)
        for (uint32_t i = key_tile; i < a.tiles; i++) {
            float s[OWN_ROWS][OWN_COLUMNS], dp[OWN_ROWS][OWN_COLUMNS];
            gradient_tile<WIDE>(a, sequence, head, i, key_tile, x, y, s, dp);
            store_scores(p, s);
            store_scores(ds, dp);
            __syncthreads();
            multiply_tile<WIDE, true>(p, x, product);
            add_tile<WIDE>(dv, product);
            load_tile<WIDE>(a, a.at.qkv + rows_of(a, sequence, head).query, a.at.qkv_stride, i, a.factor, y);
            __syncthreads();
            multiply_tile<WIDE, true>(ds, y, product);
            add_tile<WIDE>(dk, product);
        }
    const float one[OWN_ROWS] = {1.0f, 1.0f, 1.0f, 1.0f};
    const struct head_rows at = rows_of(a, sequence, kv_head * group);
    write_rows<WIDE>(a, dk, key_tile, one, a.at.dqkv + at.key, a.at.qkv_stride);
    write_rows<WIDE>(a, dv, key_tile, one, a.at.dqkv + at.value, a.at.qkv_stride);
}

/* Gradients of one tile of queries: key tiles ascending. */
template <int WIDE>
__global__ void __launch_bounds__(ATTENTION_THREADS) attention_queries_kernel(struct attention_args a)
{
    MU_DYNAMIC_SHARED(float, shared);
    float *const x = shared, *const y = x + tile_shape<WIDE>::FLOATS, *const ds = y + tile_shape<WIDE>::FLOATS;
    const uint32_t heads = a.sequences * a.at.heads, number = a.tiles - 1 - blockIdx.x / heads;
    const uint32_t sequence = blockIdx.x % heads / a.at.heads, head = blockIdx.x % heads % a.at.heads;
    const struct head_rows at = rows_of(a, sequence, head);
    float dq[OWN_ROWS][WIDE] = {}, product[OWN_ROWS][WIDE];
    for (uint32_t j = 0; j <= number; j++) {
        float s[OWN_ROWS][OWN_COLUMNS], dp[OWN_ROWS][OWN_COLUMNS];
        gradient_tile<WIDE>(a, sequence, head, number, j, x, y, s, dp);
        store_scores(ds, dp);
        __syncthreads();
        load_tile<WIDE>(a, a.at.qkv + at.key, a.at.qkv_stride, j, 1.0f, x);
        __syncthreads();
        multiply_tile<WIDE, false>(ds, x, product);
        add_tile<WIDE>(dq, product);
    }
    const float factor[OWN_ROWS] = {a.factor, a.factor, a.factor, a.factor};
    write_rows<WIDE>(a, dq, number, factor, a.at.dqkv + at.query, a.at.qkv_stride);
}

enum mu_status launch_delta(struct mu_cuda *cuda, struct attention_args *a)
{
    const size_t rows = (size_t)a->sequences * a->at.heads * a->at.length;
    enum mu_status status = need_workspace(cuda, "attention_backward", rows * sizeof(float));
    if (status != MU_OK)
        return status;
    a->delta = (float *)cuda->workspace;
    MU_LAUNCH(delta_kernel, dim3(div_up(rows * LANES, ATTENTION_THREADS)), dim3(ATTENTION_THREADS), 0, cuda->stream, *a,
              rows);
    return MU_OK;
}

extern "C" enum mu_status mu_cuda_attention_backward(struct mu_pool *pool, const struct mu_attention *attention)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    struct attention_args a = attention_args_of(attention);
    const size_t tiles = 2 * tile_floats(a.at.head_channels);
    void (*keys)(struct attention_args) = MU_ATTENTION_KERNEL(attention_keys_kernel, a.at.head_channels);
    void (*queries)(struct attention_args) = MU_ATTENTION_KERNEL(attention_queries_kernel, a.at.head_channels);
    const size_t keys_bytes = (tiles + 2 * SCORE_FLOATS) * sizeof(float),
                 queries_bytes = (tiles + SCORE_FLOATS) * sizeof(float);
    enum mu_status status = launch_delta(cuda, &a);
    if (status != MU_OK)
        return status;
    allow_shared(keys, keys_bytes);
    allow_shared(queries, queries_bytes);
    MU_LAUNCH(keys, dim3(a.tiles * a.sequences * a.at.kv_heads), dim3(ATTENTION_THREADS), keys_bytes, cuda->stream, a);
    MU_LAUNCH(queries, dim3(a.tiles * a.sequences * a.at.heads), dim3(ATTENTION_THREADS), queries_bytes, cuda->stream,
              a);
    return launched(cuda, "attention_backward");
}
