/* Elementary functions and random numbers of the kernels, written once for every backend.
 *
 * Not a header of its own: whoever includes it has defined MU_INLINE, the types vf (floats), vi (uint32), vm (truth
 * values) and the operations v_*, vi_* on them, as documented in kernels/cpu/simd.h: sixteen lanes on the CPU, a single
 * one on a GPU (kernels/cuda/device.h). Every operation is IEEE 754, so every backend gives the same bits. */
#ifndef MU_KERNELS_ELEMENTARY_H
#define MU_KERNELS_ELEMENTARY_H

/* Part of the definitions in kernels.h. */
#define MU_NORM_EPS 1e-5f
#define MU_INIT_TAG 0x696e6974u /* "init": the last counter word of initial values */

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

/* silu(x) = x s and silu'(x) = s (1 + x (1 - s)), s = 1 / (1 + exp(-x)). Below -87 the values are those at -87: under
 * 2^-113, and no infinity meets a zero. */
MU_INLINE vf v_silu(vf x)
{
    vf c = v_max(v_set1(-87.0f), x);
    return v_div(c, v_add(v_set1(1.0f), v_exp(v_sub(v_zero(), c))));
}
MU_INLINE vf v_silu_grad(vf x)
{
    vf c = v_max(v_set1(-87.0f), v_min(v_set1(87.0f), x));
    vf e = v_exp(v_sub(v_zero(), c));
    vf s = v_div(v_set1(1.0f), v_add(v_set1(1.0f), e));
    return v_mul(s, v_fma(c, v_mul(e, s), v_set1(1.0f)));
}

#endif
