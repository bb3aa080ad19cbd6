/* The lanes in pairs of AVX2 registers, with FMA. Included by simd.h only, which documents the operations. */
#ifndef MU_KERNELS_CPU_SIMD_AVX2_H
#define MU_KERNELS_CPU_SIMD_AVX2_H

typedef struct {
    __m256 a, b;
} vf;
typedef struct {
    __m256i a, b;
} vi;
typedef vf vm; /* all ones or all zeros in each lane */

MU_INLINE vi vi_set1(uint32_t x)
{
    __m256i v = _mm256_set1_epi32((int)x);
    return (vi){v, v};
}
MU_INLINE vi vi_lanes(void)
{
    return (vi){_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
#define MU_VI_OP(name, op)                                                                                             \
    MU_INLINE vi name(vi x, vi y)                                                                                      \
    {                                                                                                                  \
        return (vi){op(x.a, y.a), op(x.b, y.b)};                                                                       \
    }
#define MU_VF_OP(name, op)                                                                                             \
    MU_INLINE vf name(vf x, vf y)                                                                                      \
    {                                                                                                                  \
        return (vf){op(x.a, y.a), op(x.b, y.b)};                                                                       \
    }
MU_VI_OP(vi_add, _mm256_add_epi32)
MU_VI_OP(vi_sub, _mm256_sub_epi32)
MU_VI_OP(vi_xor, _mm256_xor_si256)
MU_VI_OP(vi_and, _mm256_and_si256)
MU_VI_OP(vi_or, _mm256_or_si256)
MU_VF_OP(v_add, _mm256_add_ps)
MU_VF_OP(v_sub, _mm256_sub_ps)
MU_VF_OP(v_mul, _mm256_mul_ps)
MU_VF_OP(v_div, _mm256_div_ps)
MU_VF_OP(v_max, _mm256_max_ps)
MU_VF_OP(v_min, _mm256_min_ps)
MU_INLINE vf v_set1(float x)
{
    __m256 v = _mm256_set1_ps(x);
    return (vf){v, v};
}
MU_INLINE vf v_load(const float *p)
{
    return (vf){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
MU_INLINE void v_store(float *p, vf x)
{
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
MU_INLINE vi lanes_below(unsigned count)
{
    __m256i n = _mm256_set1_epi32((int)count);
    vi lanes = vi_lanes();
    return (vi){_mm256_cmpgt_epi32(n, lanes.a), _mm256_cmpgt_epi32(n, lanes.b)};
}
MU_INLINE vf v_load_n(const float *p, unsigned n)
{
    vi m = lanes_below(n);
    return (vf){_mm256_maskload_ps(p, m.a), n > 8 ? _mm256_maskload_ps(p + 8, m.b) : _mm256_setzero_ps()};
}
MU_INLINE void v_store_n(float *p, vf x, unsigned n)
{
    vi m = lanes_below(n);
    _mm256_maskstore_ps(p, m.a, x.a);
    if (n > 8)
        _mm256_maskstore_ps(p + 8, m.b, x.b);
}
MU_INLINE vf v_sqrt(vf x)
{
    return (vf){_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)};
}
MU_INLINE vf v_fma(vf x, vf y, vf z)
{
    return (vf){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
MU_INLINE vf v_fnma(vf x, vf y, vf z)
{
    return (vf){_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
}
MU_INLINE vm v_lt(vf x, vf y)
{
    return (vm){_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)};
}
MU_INLINE vf v_select(vm m, vf x, vf y)
{
    return (vf){_mm256_blendv_ps(y.a, x.a, m.a), _mm256_blendv_ps(y.b, x.b, m.b)};
}
MU_INLINE vi v_bits(vf x)
{
    return (vi){_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)};
}
MU_INLINE vf vi_float(vi x)
{
    return (vf){_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)};
}
MU_INLINE vf vi_convert(vi x)
{
    return (vf){_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)};
}
#define vi_shl(x, n) ((vi){_mm256_slli_epi32((x).a, n), _mm256_slli_epi32((x).b, n)})
#define vi_shr(x, n) ((vi){_mm256_srli_epi32((x).a, n), _mm256_srli_epi32((x).b, n)})
MU_INLINE vm vi_less(vi x, vi y)
{
    __m256i flip = _mm256_set1_epi32(INT32_MIN);
    return (vm){_mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_xor_si256(y.a, flip), _mm256_xor_si256(x.a, flip))),
                _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_xor_si256(y.b, flip), _mm256_xor_si256(x.b, flip)))};
}
MU_INLINE vm vi_equal(vi x, vi y)
{
    return (vm){_mm256_castsi256_ps(_mm256_cmpeq_epi32(x.a, y.a)), _mm256_castsi256_ps(_mm256_cmpeq_epi32(x.b, y.b))};
}
MU_INLINE void multiply_half(__m256i a, __m256i b, __m256i *high, __m256i *low)
{
    __m256i even = _mm256_mul_epu32(a, b);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
    *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
    *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}
MU_INLINE void vi_multiply(vi x, vi y, vi *high, vi *low)
{
    multiply_half(x.a, y.a, &high->a, &low->a);
    multiply_half(x.b, y.b, &high->b, &low->b);
}
typedef struct {
    __m256d q[4];
} vd;
MU_INLINE vd vd_zero(void)
{
    __m256d z = _mm256_setzero_pd();
    return (vd){{z, z, z, z}};
}
MU_INLINE __m256d add_square4(__m256d sum, __m128 x)
{
    __m256d d = _mm256_cvtps_pd(x);
    return _mm256_fmadd_pd(d, d, sum);
}
MU_INLINE vd vd_add_square(vd sum, vf x)
{
    return (vd){
        {add_square4(sum.q[0], _mm256_castps256_ps128(x.a)), add_square4(sum.q[1], _mm256_extractf128_ps(x.a, 1)),
         add_square4(sum.q[2], _mm256_castps256_ps128(x.b)), add_square4(sum.q[3], _mm256_extractf128_ps(x.b, 1))}};
}
MU_INLINE void vd_store(double *p, vd x)
{
    for (int i = 0; i < 4; i++)
        _mm256_storeu_pd(p + 4 * i, x.q[i]);
}

#endif
