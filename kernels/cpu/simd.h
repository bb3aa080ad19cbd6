/* Sixteen virtual lanes of fp32 and uint32, for the files that are compiled once per instruction set.
 *
 * The build defines MU_ISA_LEVEL (0 plain C, 1 AVX2 + FMA, 2 AVX-512 F/BW/DQ/VL). Every operation gives the same bits
 * at every level, special values included: v_max and v_min return the second operand when one is a NaN or both are
 * zeros, as x86 does. */
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

/* ---- AVX-512 ---- */
#if MU_ISA_LEVEL == 2

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

/* ---- AVX2 ---- */
#elif MU_ISA_LEVEL == 1

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

/* ---- plain C ---- */
#else

/* The compiler's generic vectors: it splits them into what the machine has. Lanes are named one by one, never by a
 * variable, so that values stay in registers (and sanitizer builds compile in reasonable time). */
typedef float vf __attribute__((vector_size(64)));
typedef uint32_t vi __attribute__((vector_size(64)));
typedef vi vm; /* all ones or all zeros in each lane */

#define MU_EACH_LANE(X)                                                                                                \
    X(0), X(1), X(2), X(3), X(4), X(5), X(6), X(7), X(8), X(9), X(10), X(11), X(12), X(13), X(14), X(15)

MU_INLINE vf v_set1(float x)
{
    return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}
MU_INLINE vf v_load(const float *p)
{
    vf r;
    memcpy(&r, p, sizeof r);
    return r;
}
MU_INLINE void v_store(float *p, vf x)
{
    memcpy(p, &x, sizeof x);
}
MU_INLINE vf v_load_n(const float *p, unsigned n)
{
    vf r = {0};
    memcpy(&r, p, n * sizeof(float));
    return r;
}
MU_INLINE void v_store_n(float *p, vf x, unsigned n)
{
    memcpy(p, &x, n * sizeof(float));
}
MU_INLINE vf v_add(vf x, vf y)
{
    return x + y;
}
MU_INLINE vf v_sub(vf x, vf y)
{
    return x - y;
}
MU_INLINE vf v_mul(vf x, vf y)
{
    return x * y;
}
MU_INLINE vf v_div(vf x, vf y)
{
    return x / y;
}
#define MU_LANE(i) sqrtf(x[i])
MU_INLINE vf v_sqrt(vf x)
{
    return (vf){MU_EACH_LANE(MU_LANE)};
}
#undef MU_LANE
#define MU_LANE(i) fmaf(x[i], y[i], z[i])
MU_INLINE vf v_fma(vf x, vf y, vf z)
{
    return (vf){MU_EACH_LANE(MU_LANE)};
}
#undef MU_LANE
MU_INLINE vf v_fnma(vf x, vf y, vf z)
{
    return v_fma(-x, y, z);
}
MU_INLINE vi v_bits(vf x)
{
    return (vi)x;
}
MU_INLINE vf vi_float(vi x)
{
    return (vf)x;
}
MU_INLINE vm v_lt(vf x, vf y)
{
    return (vm)(x < y);
}
MU_INLINE vf v_select(vm m, vf x, vf y)
{
    return (vf)((m & (vi)x) | (~m & (vi)y));
}
MU_INLINE vf v_max(vf x, vf y)
{
    return v_select((vm)(x > y), x, y);
}
MU_INLINE vf v_min(vf x, vf y)
{
    return v_select((vm)(x < y), x, y);
}
#define MU_LANE(i) (float)(int32_t)x[i]
MU_INLINE vf vi_convert(vi x)
{
    return (vf){MU_EACH_LANE(MU_LANE)};
}
#undef MU_LANE
MU_INLINE vi vi_set1(uint32_t x)
{
    return (vi){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}
MU_INLINE vi vi_lanes(void)
{
    return (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}
MU_INLINE vi vi_add(vi x, vi y)
{
    return x + y;
}
MU_INLINE vi vi_sub(vi x, vi y)
{
    return x - y;
}
MU_INLINE vi vi_xor(vi x, vi y)
{
    return x ^ y;
}
MU_INLINE vi vi_and(vi x, vi y)
{
    return x & y;
}
MU_INLINE vi vi_or(vi x, vi y)
{
    return x | y;
}
MU_INLINE vi vi_shl(vi x, uint32_t n)
{
    return x << n;
}
MU_INLINE vi vi_shr(vi x, uint32_t n)
{
    return x >> n;
}
MU_INLINE vm vi_less(vi x, vi y)
{
    return (vm)(x < y);
}
MU_INLINE vm vi_equal(vi x, vi y)
{
    return (vm)(x == y);
}
#define MU_LANE(i) (uint32_t)((uint64_t)x[i] * y[i] >> 32)
MU_INLINE void vi_multiply(vi x, vi y, vi *high, vi *low)
{
    *high = (vi){MU_EACH_LANE(MU_LANE)};
    *low = x * y;
}
#undef MU_LANE
typedef struct {
    double d[VL];
} vd;
MU_INLINE vd vd_zero(void)
{
    return (vd){{0}};
}
MU_INLINE vd vd_add_square(vd sum, vf x)
{
    float f[VL];
    v_store(f, x);
    for (int i = 0; i < VL; i++)
        sum.d[i] = fma((double)f[i], (double)f[i], sum.d[i]);
    return sum;
}
MU_INLINE void vd_store(double *p, vd x)
{
    memcpy(p, x.d, sizeof x.d);
}
#endif

/* ----------------------------------------------------------------------------------------------------------- all
 * levels --- */

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

/* exp(x) within 2 ulp for -87.3 <= x <= 88; below it is 0, above it stays exp(88); NaN stays NaN.
 * x = n ln 2 + r; polynomial from Cephes expf. */
MU_INLINE vf v_exp(vf x)
{
    const vf magic = v_set1(0x1.8p23f); /* adding it rounds to an integer, kept in the low bits */
    vf clamped = v_max(v_set1(-87.3f), v_min(v_set1(88.0f), x));
    vf shifted = v_fma(clamped, v_set1(0x1.715476p0f), magic);
    vf n = v_sub(shifted, magic);
    vf r = v_fnma(n, v_set1(0x1.62e4p-1f), clamped);
    r = v_fnma(n, v_set1(0x1.7f7d1cp-20f), r);
    vf p = v_set1(1.9875691500e-4f);
    p = v_fma(p, r, v_set1(1.3981999507e-3f));
    p = v_fma(p, r, v_set1(8.3334519073e-3f));
    p = v_fma(p, r, v_set1(4.1665795894e-2f));
    p = v_fma(p, r, v_set1(1.6666665459e-1f));
    p = v_fma(p, r, v_set1(5.0000001201e-1f));
    vf e = v_fma(p, v_mul(r, r), v_add(r, v_set1(1.0f)));
    vi scale = vi_shl(vi_add(v_bits(shifted), vi_set1(127)), 23); /* magic's own bits are shifted out */
    vf result = v_mul(e, vi_float(scale));
    return v_select(v_lt(x, v_set1(-87.3f)), v_zero(), result);
}

/* ln(x) within 2 ulp for positive normal x. Polynomial from Cephes logf. */
MU_INLINE vf v_log(vf x)
{
    vi bits = v_bits(x);
    /* exponent such that the mantissa m lies in [sqrt(1/2), sqrt(2)) */
    vi exponent = vi_sub(vi_shr(vi_add(bits, vi_set1(0x3f800000u - 0x3f3504f3u)), 23), vi_set1(127));
    vf m = vi_float(vi_sub(bits, vi_shl(exponent, 23)));
    vf n = vi_convert(exponent);
    vf f = v_sub(m, v_set1(1.0f));
    vf z = v_mul(f, f);
    vf p = v_set1(7.0376836292e-2f);
    p = v_fma(p, f, v_set1(-1.1514610310e-1f));
    p = v_fma(p, f, v_set1(1.1676998740e-1f));
    p = v_fma(p, f, v_set1(-1.2420140846e-1f));
    p = v_fma(p, f, v_set1(1.4249322787e-1f));
    p = v_fma(p, f, v_set1(-1.6668057665e-1f));
    p = v_fma(p, f, v_set1(2.0000714765e-1f));
    p = v_fma(p, f, v_set1(-2.4999993993e-1f));
    p = v_fma(p, f, v_set1(3.3333331174e-1f));
    vf y = v_mul(v_mul(f, z), p);
    y = v_fma(n, v_set1(-2.12194440e-4f), y);
    y = v_fma(z, v_set1(-0.5f), y);
    return v_fma(n, v_set1(0.693359375f), v_add(f, y));
}

/* cos(2 pi t) and sin(2 pi t) for 0 <= t < 1, absolute error under 2e-7. Polynomials from Cephes sinf. */
MU_INLINE void v_cos_sin_turns(vf t, vf *ret_cos, vf *ret_sin)
{
    const vf magic = v_set1(0x1.8p23f);
    vf shifted = v_fma(t, v_set1(4.0f), magic);
    vf quarter = v_sub(shifted, magic);
    vf r = v_mul(v_fnma(quarter, v_set1(0.25f), t), v_set1(0x1.921fb6p2f)); /* |r| <= pi/4 */
    vf z = v_mul(r, r);
    vf s = v_fma(v_set1(-1.9515295891e-4f), z, v_set1(8.3321608736e-3f));
    s = v_fma(s, z, v_set1(-1.6666654611e-1f));
    s = v_fma(v_mul(s, z), r, r);
    vf c = v_fma(v_set1(2.443315711809948e-5f), z, v_set1(-1.388731625493765e-3f));
    c = v_fma(c, z, v_set1(4.166664568298827e-2f));
    c = v_fma(v_mul(c, z), z, v_fma(z, v_set1(-0.5f), v_set1(1.0f)));
    vi q = v_bits(shifted);
    vm swap = vi_equal(vi_and(q, vi_set1(1)), vi_set1(1));
    vi sign_sin = vi_shl(vi_and(q, vi_set1(2)), 30);
    vi sign_cos = vi_shl(vi_and(vi_add(q, vi_set1(1)), vi_set1(2)), 30);
    *ret_sin = vi_float(vi_xor(v_bits(v_select(swap, c, s)), sign_sin));
    *ret_cos = vi_float(vi_xor(v_bits(v_select(swap, s, c)), sign_cos));
}

/* Philox4x32-10 on 16 counters {counter[0] per lane, the rest equal in all lanes}; the numbers of common/rng.h. */
MU_INLINE void v_philox(const uint32_t key[2], vi counter0, uint32_t counter1, uint32_t counter2, uint32_t counter3,
                        vi out[4])
{
    uint32_t k0 = key[0], k1 = key[1];
    vi c0 = counter0, c1 = vi_set1(counter1), c2 = vi_set1(counter2), c3 = vi_set1(counter3);
    const vi m0 = vi_set1(0xD2511F53u), m1 = vi_set1(0xCD9E8D57u);
    for (int round = 0; round < 10; round++) {
        vi high0, low0, high1, low1;
        vi_multiply(c0, m0, &high0, &low0);
        vi_multiply(c2, m1, &high1, &low1);
        c0 = vi_xor(vi_xor(high1, c1), vi_set1(k0));
        c1 = low1;
        c2 = vi_xor(vi_xor(high0, c3), vi_set1(k1));
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* gelu(x) = x s and gelu'(x) = s + x s (1 - s) 2 u', s = 1 / (1 + exp(-2 u)), u = sqrt(2/pi) (x + 0.044715 x^3). */
MU_INLINE vf gelu_exp(vf x)
{
    const float c = 0x1.988454p-1f; /* sqrt(2/pi) */
    vf square = v_mul(x, x);
    vf inner = v_fma(v_set1(-2.0f * c * 0.044715f), square, v_set1(-2.0f * c));
    return v_exp(v_mul(x, inner));
}
MU_INLINE vf v_gelu(vf x)
{
    return v_div(x, v_add(v_set1(1.0f), gelu_exp(x)));
}
MU_INLINE vf v_gelu_grad(vf x)
{
    const float c = 0x1.988454p-1f;
    x = v_max(v_set1(-30.0f), v_min(v_set1(30.0f), x)); /* beyond, the value is 0 or 1; squares stay finite */
    vf e = gelu_exp(x);
    vf s = v_div(v_set1(1.0f), v_add(v_set1(1.0f), e));
    vf slope = v_fma(v_set1(6.0f * c * 0.044715f), v_mul(x, x), v_set1(2.0f * c)); /* 2 u' */
    vf product = v_mul(v_mul(s, v_mul(e, s)), v_mul(x, slope));
    return v_add(s, product);
}

#endif
