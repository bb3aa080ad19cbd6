/* The logarithm of common/fmath.h to about 64 bits, for the processor and for GPU code.
 *
 * Whoever includes it has defined MU_FMATH_INLINE: what stands before a function. Pure. */
#ifndef MU_COMMON_FMATH_LOG_H
#define MU_COMMON_FMATH_LOG_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LN2_HIGH 0x1.62e42feep-1 /* 32 bits: an exponent times it is exact */
#define LN2_LOW  0x1.a39ef35793c76p-33

struct pair {
    double high, low; /* unevaluated sum, |low| <= ulp(high) / 2 */
};

MU_FMATH_INLINE struct pair two_sum(double a, double b)
{
    double sum = a + b, part = sum - a;
    struct pair result = {sum, (a - (sum - part)) + (b - part)};
    return result;
}

/* log(x) for finite x > 0 to about 64 bits: x = 2^k m with m in [sqrt(1/2), sqrt(2)), log m = 2 atanh(s), s = (m - 1) /
 * (m + 1); the first two terms of the series are carried as pairs, the rest ends at s^25 (next term < 2^-69 of the
 * sum). */
MU_FMATH_INLINE struct pair log_pair(double x)
{
    int k = 0;
    if (x < 0x1p-1022) {
        x *= 0x1p54;
        k = -54;
    }
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    k += (int)(bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffffull) | 0x3ff0000000000000ull;
    double m;
    memcpy(&m, &bits, sizeof m);
    if (m > 0x1.6a09e667f3bcdp+0) {
        m *= 0.5;
        k++;
    }
    double f = m - 1.0, d = 2.0 + f, d_low = f - (d - 2.0);
    double s = f / d;
    double s_low = (fma(-s, d, f) - s * d_low) / d;

    double z = s * s, z_low = fma(s, s, -z) + 2.0 * s * s_low;
    double q = 1.0 / 25.0;
    q = fma(q, z, 1.0 / 23.0);
    q = fma(q, z, 1.0 / 21.0);
    q = fma(q, z, 1.0 / 19.0);
    q = fma(q, z, 1.0 / 17.0);
    q = fma(q, z, 1.0 / 15.0);
    q = fma(q, z, 1.0 / 13.0);
    q = fma(q, z, 1.0 / 11.0);
    q = fma(q, z, 1.0 / 9.0);
    q = fma(q, z, 1.0 / 7.0);
    q = fma(q, z, 1.0 / 5.0);
    q *= z;
    const double third = 1.0 / 3.0, third_low = 0x1.5555555555555p-56;
    double w = third + q, w_low = ((third - w) + q) + third_low;
    double u = z * w, u_low = fma(z, w, -u) + (z * w_low + z_low * w);
    double v = s * u, v_low = fma(s, u, -v) + (s * u_low + s_low * u);

    struct pair head = two_sum(k * LN2_HIGH, 2.0 * s);
    struct pair sum = two_sum(head.high, 2.0 * v);
    double low = sum.low + (head.low + (2.0 * (s_low + v_low) + k * LN2_LOW));
    return two_sum(sum.high, low);
}

#endif
