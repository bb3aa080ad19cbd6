/* The lanes in AVX-512 (F, BW, DQ, VL). Included by simd.h only, which documents the operations. */
#ifndef MU_KERNELS_CPU_SIMD_AVX512_H
#define MU_KERNELS_CPU_SIMD_AVX512_H

typedef __m512 vf;
typedef __m512i vi;
typedef __mmask16 vm;

MU_INLINE vm lanes_below(unsigned count)
{
    return (vm)((1u << count) - 1);
}
MU_INLINE vf v_set1(float x)
{
    return _mm512_set1_ps(x);
}
MU_INLINE vf v_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
MU_INLINE void v_store(float *p, vf x)
{
    _mm512_storeu_ps(p, x);
}
MU_INLINE vf v_load_n(const float *p, unsigned n)
{
    return _mm512_maskz_loadu_ps(lanes_below(n), p);
}
MU_INLINE void v_store_n(float *p, vf x, unsigned n)
{
    _mm512_mask_storeu_ps(p, lanes_below(n), x);
}
MU_INLINE vf v_add(vf a, vf b)
{
    return _mm512_add_ps(a, b);
}
MU_INLINE vf v_sub(vf a, vf b)
{
    return _mm512_sub_ps(a, b);
}
MU_INLINE vf v_mul(vf a, vf b)
{
    return _mm512_mul_ps(a, b);
}
MU_INLINE vf v_div(vf a, vf b)
{
    return _mm512_div_ps(a, b);
}
MU_INLINE vf v_sqrt(vf a)
{
    return _mm512_sqrt_ps(a);
}
MU_INLINE vf v_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}
MU_INLINE vf v_fnma(vf a, vf b, vf c)
{
    return _mm512_fnmadd_ps(a, b, c);
}
MU_INLINE vf v_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}
MU_INLINE vf v_min(vf a, vf b)
{
    return _mm512_min_ps(a, b);
}
MU_INLINE vm v_lt(vf a, vf b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
}
MU_INLINE vf v_select(vm m, vf a, vf b)
{
    return _mm512_mask_blend_ps(m, b, a);
}
MU_INLINE vi v_bits(vf a)
{
    return _mm512_castps_si512(a);
}
MU_INLINE vf vi_float(vi a)
{
    return _mm512_castsi512_ps(a);
}
MU_INLINE vf vi_convert(vi a)
{
    return _mm512_cvtepi32_ps(a);
}
MU_INLINE vi vi_set1(uint32_t x)
{
    return _mm512_set1_epi32((int)x);
}
MU_INLINE vi vi_lanes(void)
{
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
MU_INLINE vi vi_add(vi a, vi b)
{
    return _mm512_add_epi32(a, b);
}
MU_INLINE vi vi_sub(vi a, vi b)
{
    return _mm512_sub_epi32(a, b);
}
MU_INLINE vi vi_xor(vi a, vi b)
{
    return _mm512_xor_si512(a, b);
}
MU_INLINE vi vi_and(vi a, vi b)
{
    return _mm512_and_si512(a, b);
}
MU_INLINE vi vi_or(vi a, vi b)
{
    return _mm512_or_si512(a, b);
}
#define vi_shl(a, n) _mm512_slli_epi32(a, n)
#define vi_shr(a, n) _mm512_srli_epi32(a, n)
MU_INLINE vm vi_less(vi a, vi b)
{
    return _mm512_cmplt_epu32_mask(a, b);
}
MU_INLINE vm vi_equal(vi a, vi b)
{
    return _mm512_cmpeq_epi32_mask(a, b);
}
/* 32 x 32 -> 64 bits, high and low halves. */
MU_INLINE void vi_multiply(vi a, vi b, vi *high, vi *low)
{
    __m512i even = _mm512_mul_epu32(a, b);
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), _mm512_srli_epi64(b, 32));
    *low = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
    *high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
}
/* Lanes 0..7 and 8..15 in double. */
typedef struct {
    __m512d low, high;
} vd;
MU_INLINE vd vd_zero(void)
{
    return (vd){_mm512_setzero_pd(), _mm512_setzero_pd()};
}
MU_INLINE vd vd_add_square(vd sum, vf x)
{
    __m512d a = _mm512_cvtps_pd(_mm512_castps512_ps256(x)), b = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
    return (vd){_mm512_fmadd_pd(a, a, sum.low), _mm512_fmadd_pd(b, b, sum.high)};
}
MU_INLINE void vd_store(double *p, vd x)
{
    _mm512_storeu_pd(p, x.low);
    _mm512_storeu_pd(p + 8, x.high);
}

#endif
