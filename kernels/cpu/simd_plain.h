/* The lanes in plain C, for any machine. Included by simd.h only, which documents the operations. */
#ifndef MU_KERNELS_CPU_SIMD_PLAIN_H
#define MU_KERNELS_CPU_SIMD_PLAIN_H

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
