/* Tensor cores: products of bf16 fragments that a warp holds together, accumulated in fp32. The only place with inline
 * PTX; under emulation (tests) the same operations are shuffles and fma in ascending k.
 *
 * Fragments are those of mma.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"): a thread `lane` of the warp
 * holds, with r = lane / 4 and q = 2 (lane % 4), a: rows r and r + 8, columns q, q + 1, q + 8, q + 9 of a 16 x 16
 * matrix; b: rows q, q + 1, q + 8, q + 9, column r of a 16 x 8 matrix; c: rows r (v[0], v[1]) and r + 8 (v[2], v[3]),
 * columns q and q + 1 of a 16 x 8 matrix. All 32 threads call every function together. Tiles in shared memory: rows
 * begin 16-byte aligned. */
#ifndef MU_KERNELS_CUDA_WARP_H
#define MU_KERNELS_CUDA_WARP_H

#include "kernels/cuda/rounding.h"

struct fragment_a {
    uint32_t r[4];
};
struct fragment_b {
    uint32_t r[2];
};
struct fragment_c {
    float v[4];
};
/* Two neighbours of eight columns. */
struct fragment_b_pair {
    struct fragment_b left, right;
};

#ifdef MU_CUDA_EMULATED

MU_INLINE float bf16_half(uint32_t bits, bool high)
{
    return __uint_as_float(high ? bits & 0xffff0000u : bits << 16);
}

/* Four 8 x 8 matrices: lane 8 j + i names row i of matrix j. */
MU_INLINE void load_matrices(const __nv_bfloat16 *row, bool transpose, uint32_t out[4])
{
    const uint32_t lane = threadIdx.x % WARP, r = lane / 4, q = 2 * (lane % 4);
    for (uint32_t j = 0; j < 4; j++)
        if (transpose) {
            const __nv_bfloat16 *low = __shfl_sync(0xffffffffu, row, (int)(8 * j + q)),
                                *high = __shfl_sync(0xffffffffu, row, (int)(8 * j + q + 1));
            out[j] = (uint32_t)__bfloat16_as_ushort(low[r]) | (uint32_t)__bfloat16_as_ushort(high[r]) << 16;
        } else {
            memcpy(&out[j], __shfl_sync(0xffffffffu, row, (int)(8 * j + r)) + q, sizeof out[j]);
        }
}

/* c += a b */
MU_INLINE void multiply_add(struct fragment_c &c, const struct fragment_a &a, const struct fragment_b &b)
{
    const uint32_t lane = threadIdx.x % WARP;
    struct fragment_a row[4];
    struct fragment_b left[4], right[4];
    for (uint32_t p = 0; p < 4; p++) {
        row[p] = __shfl_sync(0xffffffffu, a, (int)(lane / 4 * 4 + p));
        left[p] = __shfl_sync(0xffffffffu, b, (int)(2 * (lane % 4) * 4 + p));
        right[p] = __shfl_sync(0xffffffffu, b, (int)((2 * (lane % 4) + 1) * 4 + p));
    }
    for (uint32_t k = 0; k < 16; k++) {
        const uint32_t p = k % 8 / 2, half = k / 8;
        const float upper = bf16_half(row[p].r[2 * half], k & 1), lower = bf16_half(row[p].r[2 * half + 1], k & 1);
        const float x = bf16_half(left[p].r[half], k & 1), y = bf16_half(right[p].r[half], k & 1);
        c.v[0] = fmaf(upper, x, c.v[0]);
        c.v[1] = fmaf(upper, y, c.v[1]);
        c.v[2] = fmaf(lower, x, c.v[2]);
        c.v[3] = fmaf(lower, y, c.v[3]);
    }
}

#else

MU_INLINE void load_matrices(const __nv_bfloat16 *row, bool transpose, uint32_t out[4])
{
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(row);
    if (transpose)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                     : "r"(at)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                     : "r"(at)
                     : "memory");
}

/* c += a b */
MU_INLINE void multiply_add(struct fragment_c &c, const struct fragment_a &a, const struct fragment_b &b)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c.v[0]), "+f"(c.v[1]), "+f"(c.v[2]), "+f"(c.v[3])
                 : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[0]), "r"(b.r[1]));
}

#endif

/* The 16 x 16 matrix at `tile`. */
MU_INLINE struct fragment_a load_a(const __nv_bfloat16 *tile, uint32_t stride)
{
    const uint32_t lane = threadIdx.x % WARP;
    struct fragment_a a;
    load_matrices(tile + lane % 16 * stride + lane / 16 * 8, false, a.r);
    return a;
}

/* b[k][n] = tile[n][k]: sixteen rows of the tile are sixteen columns of b. */
MU_INLINE struct fragment_b_pair load_b_rows(const __nv_bfloat16 *tile, uint32_t stride)
{
    const uint32_t lane = threadIdx.x % WARP;
    uint32_t r[4];
    load_matrices(tile + (lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 8, false, r);
    struct fragment_b_pair pair = {{{r[0], r[1]}}, {{r[2], r[3]}}};
    return pair;
}

/* b[k][n] = tile[k][n]: a 16 x 16 matrix as it lies. */
MU_INLINE struct fragment_b_pair load_b(const __nv_bfloat16 *tile, uint32_t stride)
{
    const uint32_t lane = threadIdx.x % WARP;
    uint32_t r[4];
    load_matrices(tile + (lane / 8 % 2 * 8 + lane % 8) * stride + lane / 16 * 8, true, r);
    struct fragment_b_pair pair = {{{r[0], r[1]}}, {{r[2], r[3]}}};
    return pair;
}

/* Two accumulators side by side as the 16 x 16 left operand of the next product. */
MU_INLINE struct fragment_a as_a(const struct fragment_c &left, const struct fragment_c &right)
{
    struct fragment_a a = {{pack_bf16(left.v[0], left.v[1]), pack_bf16(left.v[2], left.v[3]),
                            pack_bf16(right.v[0], right.v[1]), pack_bf16(right.v[2], right.v[3])}};
    return a;
}

#endif
