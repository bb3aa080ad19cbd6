/* Sixteen virtual lanes of fp32 and uint32, for the files that are compiled once per instruction set. What is computed
 * with them, whatever they are made of, is in kernels/elementary.h.
 *
 * The build defines MU_ISA_LEVEL (0 plain C, 1 AVX2 + FMA, 2 AVX-512 F/BW/DQ/VL). Every operation gives the same bits
 * at every level, special values included: v_max and v_min return the second operand when one is a NaN or both are
 * zeros, as x86 does.
 *
 * vf: 16 floats, vi: 16 uint32, vm: 16 truth values, vd: 16 doubles. v_* work on floats, vi_* on integers; a *_n
 * function touches only the first n lanes of memory and reads the others as +0; v_select(m, a, b) is m ? a : b. */
#ifndef MU_KERNELS_CPU_SIMD_H
#define MU_KERNELS_CPU_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if MU_ISA_LEVEL == 2
#define MU_ISA_FN(name) name##_avx512
#elif MU_ISA_LEVEL == 1
#define MU_ISA_FN(name) name##_avx2
#else
#define MU_ISA_FN(name) name##_scalar
#endif

#if MU_ISA_LEVEL > 0
#include <immintrin.h>
#endif

#define MU_INLINE static inline __attribute__((always_inline, unused))

enum { VL = 16 }; /* lanes */

#if MU_ISA_LEVEL == 2
#include "kernels/cpu/simd_avx512.h"
#elif MU_ISA_LEVEL == 1
#include "kernels/cpu/simd_avx2.h"
#else
#include "kernels/cpu/simd_plain.h"
#endif

MU_INLINE vf v_zero(void)
{
    return v_set1(0.0f);
}

/* The fixed fold of the lanes: i + (i + 8), then 4, 2, 1; for the maximum with v_max's rule. */
#if MU_ISA_LEVEL > 0
MU_INLINE float fold_sum8(__m256 x)
{
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_shuffle_ps(y, y, 1)));
}
MU_INLINE float fold_max8(__m256 x)
{
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_shuffle_ps(y, y, 1)));
}
#endif
#if MU_ISA_LEVEL == 2
MU_INLINE float v_fold_sum(vf x)
{
    return fold_sum8(_mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)));
}
MU_INLINE float v_fold_max(vf x)
{
    return fold_max8(_mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)));
}
#elif MU_ISA_LEVEL == 1
MU_INLINE float v_fold_sum(vf x)
{
    return fold_sum8(_mm256_add_ps(x.a, x.b));
}
MU_INLINE float v_fold_max(vf x)
{
    return fold_max8(_mm256_max_ps(x.a, x.b));
}
#else
MU_INLINE float v_fold_sum(vf x)
{
    float f[VL];
    v_store(f, x);
    for (int half = VL / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            f[i] += f[i + half];
    return f[0];
}
MU_INLINE float v_fold_max(vf x)
{
    float f[VL];
    v_store(f, x);
    for (int half = VL / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            f[i] = f[i] > f[i + half] ? f[i] : f[i + half];
    return f[0];
}
#endif

/* Lanes from n on become +0. */
MU_INLINE vf v_keep_n(vf x, unsigned n)
{
    float f[VL];
    if (n >= VL)
        return x;
    v_store(f, x);
    return v_load_n(f, n);
}

MU_INLINE double vd_fold_sum(vd x)
{
    double f[VL];
    vd_store(f, x);
    for (int half = VL / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            f[i] += f[i + half];
    return f[0];
}

#include "kernels/elementary.h"

#endif
