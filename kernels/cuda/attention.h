/* What the exact attention kernels share: tiles of 64 rows in shared memory and their products.
 *
 * A block of 256 threads works on a 64 x 64 tile: threads 16 r + lane own rows 4 r .. 4 r + 3 and columns lane, lane +
 * 16, ..: what a virtual lane of the definition sums lies in one thread. All products are fma chains from +0 in
 * ascending order, tiles are padded with zeros as on the CPU. WIDE: sixteenths of the channels of a head, rounded up to
 * a power of two. Rows of tiles are an odd number of floats apart: no bank conflicts. Private to kernels/cuda. */
#ifndef MU_KERNELS_CUDA_ATTENTION_H
#define MU_KERNELS_CUDA_ATTENTION_H

#include "kernels/cuda/device.h"

enum {
    TILE = MU_ATTENTION_TILE,
    ATTENTION_THREADS = 256,
    OWN_ROWS = 4,
    OWN_COLUMNS = TILE / LANES,
    SCORE_STRIDE = TILE + 1,
    SCORE_FLOATS = TILE * SCORE_STRIDE,
};

template <int WIDE> struct tile_shape {
    enum { CHANNELS = WIDE * LANES, STRIDE = CHANNELS + 1, FLOATS = TILE * STRIDE };
};

struct attention_args {
    struct mu_attention at; /* slices and strides filled in */
    struct site drop;
    uint32_t tiles, sequences; /* sequences: of all slices */
    float factor;              /* 1 / sqrt(channels of a head) */
    bool vector;               /* rows of qkv, out and dout begin 16-byte aligned */
    float *delta;              /* backward: [sequences, heads, length] */
};

/* The pieces of one sequence and head. */
struct head_rows {
    size_t query, key, value, out, lse; /* where they begin, in floats */
};

MU_INLINE struct head_rows rows_of(const struct attention_args &a, uint32_t sequence, uint32_t head)
{
    const struct mu_attention &at = a.at;
    const size_t token = (size_t)sequence * at.length, channels = at.head_channels;
    const uint32_t kv_head = head / (at.heads / at.kv_heads);
    struct head_rows r;
    r.query = token * at.qkv_stride + head * channels;
    r.key = token * at.qkv_stride + (at.heads + kv_head) * channels;
    r.value = r.key + at.kv_heads * channels;
    r.out = token * at.out_stride + head * channels;
    r.lse = ((size_t)sequence * at.heads + head) * at.length;
    return r;
}

/* tile[64][CHANNELS] = factor * rows 64 number .. of x, zeros beyond the sequence and the head. */
template <int WIDE>
MU_INLINE void load_tile(const struct attention_args &a, const float *x, size_t stride, uint32_t number, float factor,
                         float *tile)
{
    enum { QUADS = tile_shape<WIDE>::CHANNELS / 4 };
    const uint32_t head = a.at.head_channels;
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < TILE * QUADS; i += ATTENTION_THREADS) {
        const uint32_t row = i / QUADS, column = i % QUADS * 4, token = number * TILE + row;
        const float *from = x + token * stride + column;
        float *to = tile + row * tile_shape<WIDE>::STRIDE + column;
        const uint32_t inside = token >= a.at.length || column >= head ? 0 : head - column;
        float4 v;
        if (a.vector && inside >= 4)
            v = *(const float4 *)from;
        else
            v = make_float4(inside > 0 ? from[0] : 0.0f, inside > 1 ? from[1] : 0.0f, inside > 2 ? from[2] : 0.0f,
                            inside > 3 ? from[3] : 0.0f);
        to[0] = v.x * factor;
        to[1] = v.y * factor;
        to[2] = v.z * factor;
        to[3] = v.w * factor;
    }
}

/* s = own rows of x times own rows of y, over the channels of a head. */
template <int WIDE>
MU_INLINE void multiply_rows(const float *x, const float *y, uint32_t depth, float s[OWN_ROWS][OWN_COLUMNS])
{
    enum { STRIDE = tile_shape<WIDE>::STRIDE };
    x += threadIdx.x / LANES * OWN_ROWS * STRIDE;
    y += threadIdx.x % LANES * STRIDE;
#pragma unroll
    for (uint32_t i = 0; i < OWN_ROWS; i++)
#pragma unroll
        for (uint32_t g = 0; g < OWN_COLUMNS; g++)
            s[i][g] = 0.0f;
#pragma unroll 4
    for (uint32_t d = 0; d < depth; d++) {
        float b[OWN_COLUMNS];
#pragma unroll
        for (uint32_t g = 0; g < OWN_COLUMNS; g++)
            b[g] = y[g * LANES * STRIDE + d];
#pragma unroll
        for (uint32_t i = 0; i < OWN_ROWS; i++) {
            float q = x[i * STRIDE + d];
#pragma unroll
            for (uint32_t g = 0; g < OWN_COLUMNS; g++)
                s[i][g] = fmaf(q, b[g], s[i][g]);
        }
    }
}

/* sum = own rows of p (of its transpose) times y, over 64. */
template <int WIDE, bool TRANSPOSED>
MU_INLINE void multiply_tile(const float *p, const float *y, float sum[OWN_ROWS][WIDE])
{
    enum { STRIDE = tile_shape<WIDE>::STRIDE };
    p += threadIdx.x / LANES * OWN_ROWS * (TRANSPOSED ? 1 : SCORE_STRIDE);
    y += threadIdx.x % LANES;
#pragma unroll
    for (uint32_t i = 0; i < OWN_ROWS; i++)
#pragma unroll
        for (uint32_t j = 0; j < WIDE; j++)
            sum[i][j] = 0.0f;
#pragma unroll 2
    for (uint32_t k = 0; k < TILE; k++, y += STRIDE) {
        float b[WIDE];
#pragma unroll
        for (uint32_t j = 0; j < WIDE; j++)
            b[j] = y[j * LANES];
#pragma unroll
        for (uint32_t i = 0; i < OWN_ROWS; i++) {
            float x = TRANSPOSED ? p[k * SCORE_STRIDE + i] : p[i * SCORE_STRIDE + k];
#pragma unroll
            for (uint32_t j = 0; j < WIDE; j++)
                sum[i][j] = fmaf(x, b[j], sum[i][j]);
        }
    }
}

/* Own values of a tile of scores to shared memory. */
MU_INLINE void store_scores(float *tile, const float s[OWN_ROWS][OWN_COLUMNS])
{
    tile += threadIdx.x / LANES * OWN_ROWS * SCORE_STRIDE + threadIdx.x % LANES;
#pragma unroll
    for (uint32_t i = 0; i < OWN_ROWS; i++)
#pragma unroll
        for (uint32_t g = 0; g < OWN_COLUMNS; g++)
            tile[i * SCORE_STRIDE + g * LANES] = s[i][g];
}

/* rows 64 number .. of x = factor * own sums. */
template <int WIDE>
MU_INLINE void write_rows(const struct attention_args &a, const float sum[OWN_ROWS][WIDE], uint32_t number,
                          const float factor[OWN_ROWS], float *x, size_t stride)
{
#pragma unroll
    for (uint32_t i = 0; i < OWN_ROWS; i++) {
        const uint32_t token = number * TILE + threadIdx.x / LANES * OWN_ROWS + i;
#pragma unroll
        for (uint32_t j = 0; j < WIDE; j++) {
            const uint32_t column = j * LANES + threadIdx.x % LANES;
            if (token < a.at.length && column < a.at.head_channels)
                x[token * stride + column] = sum[i][j] * factor[i];
        }
    }
}

/* Random numbers of own columns of key tile `key_tile` for a query: sequences of further slices follow the first. */
MU_INLINE struct random4 score_random(const struct attention_args &a, uint32_t sequence, uint32_t head, uint32_t query,
                                      uint32_t key_tile)
{
    const uint32_t number = a.at.first_head + sequence / a.at.sequences * a.at.heads + head;
    return site_random(a.drop, sequence % a.at.sequences, query, (number << 20) / DROPOUT_FEATURES + key_tile,
                       threadIdx.x % LANES);
}

/* Checks and fills in what the arguments leave open. */
struct attention_args attention_args_of(const struct mu_attention *attention);

/* Fills delta, in the workspace: the sums over channels of dout * out. */
enum mu_status launch_delta(struct mu_cuda *cuda, struct attention_args *a);

/* The kernel for the channels of a head. */
#define MU_ATTENTION_KERNEL(kernel, head_channels)                                                                     \
    ((head_channels) <= 32    ? kernel<2>                                                                              \
     : (head_channels) <= 64  ? kernel<4>                                                                              \
     : (head_channels) <= 128 ? kernel<8>                                                                              \
                              : kernel<16>)

/* Floats of a tile of rows for the channels of a head. */
static inline size_t tile_floats(uint32_t head_channels)
{
    return head_channels <= 32    ? (size_t)tile_shape<2>::FLOATS
           : head_channels <= 64  ? (size_t)tile_shape<4>::FLOATS
           : head_channels <= 128 ? (size_t)tile_shape<8>::FLOATS
                                  : (size_t)tile_shape<16>::FLOATS;
}

#endif
