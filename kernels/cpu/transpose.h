/* Transposition of small blocks, for packing. Private to the files compiled once per instruction set. */
#ifndef MU_KERNELS_CPU_TRANSPOSE_H
#define MU_KERNELS_CPU_TRANSPOSE_H

#include <stddef.h>

#include "kernels/cpu/simd.h"

#if MU_ISA_LEVEL > 0
/* Rows r[0..7] of 8 floats become columns. */
MU_INLINE void transpose8(__m256 r[8])
{
    __m256 t[8], u[8];
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        u[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        u[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        u[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        u[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
}
#endif

/* out[k * stride + row] = a[row * lda + k] for 8 rows (fewer: zeros) and count <= 8 values of k. */
MU_INLINE void transpose_8x8(const float *a, size_t lda, uint32_t rows, uint32_t count, float *out, size_t stride)
{
#if MU_ISA_LEVEL > 0
    if (rows == 8 && count == 8) {
        __m256 r[8];
        for (int i = 0; i < 8; i++)
            r[i] = _mm256_loadu_ps(a + (size_t)i * lda);
        transpose8(r);
        for (int i = 0; i < 8; i++)
            _mm256_storeu_ps(out + (size_t)i * stride, r[i]);
        return;
    }
#endif
    for (uint32_t k = 0; k < count; k++)
        for (uint32_t i = 0; i < 8; i++)
            out[k * stride + i] = i < rows ? a[i * lda + k] : 0.0f;
}

#endif
