#include "common/fmath.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#define MU_FMATH_INLINE static
#include "common/fmath_log.h"

/* Taylor coefficients serve instead of minimax ones: after range reduction one or two more terms give the same
 * accuracy, and every constant can be checked by eye. Factorials up to 18! are exact in double, so 1 / n! is correctly
 * rounded by the compiler. */

#define LOG2_E 0x1.71547652b82fep+0

/* pi/2 in three parts of 53 bits. */
#define HALF_PI_1   0x1.921fb54442d18p+0
#define HALF_PI_2   0x1.1a62633145c07p-54
#define HALF_PI_3   -0x1.f1976b7ed8fbcp-110
#define TWO_OVER_PI 0x1.45f306dc9c883p-1

/* Adding and subtracting 1.5 * 2^52 rounds to the nearest integer. */
#define ROUNDER 0x1.8p52

#define EXP_OVERFLOW  0x1.62e42fefa39efp+9  /* largest x with a finite exp */
#define EXP_UNDERFLOW -0x1.74910d52d3051p+9 /* below it exp rounds to 0 */

static double power_of_two(int exponent)
{
    uint64_t bits = (uint64_t)(exponent + 1023) << 52;
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* y * 2^exponent with one rounding; y is in [0.5, 2]. */
static double scale(double y, int exponent)
{
    if (exponent > 1023)
        return y * 2.0 * power_of_two(exponent - 1);
    if (exponent < -1021)
        return y * power_of_two(exponent + 64) * 0x1p-64;
    return y * power_of_two(exponent);
}

/* exp(x + extra) for a tiny extra. x = k ln 2 + r with |r| <= ln(2)/2; the series of exp(r) ends at r^13 (next term <
 * 2^-57). */
static double exp_pair(double x, double extra)
{
    if (x != x)
        return x;
    if (x > EXP_OVERFLOW)
        return HUGE_VAL;
    if (x < EXP_UNDERFLOW)
        return 0.0;
    double k = (x * LOG2_E + ROUNDER) - ROUNDER;
    double r_high = fma(-k, LN2_HIGH, x);
    double shift = k * LN2_LOW;
    double r = r_high - shift;
    double r_low = ((r_high - r) - shift) + extra;
    double q = 1.0 / 6227020800.0;
    q = fma(q, r, 1.0 / 479001600.0);
    q = fma(q, r, 1.0 / 39916800.0);
    q = fma(q, r, 1.0 / 3628800.0);
    q = fma(q, r, 1.0 / 362880.0);
    q = fma(q, r, 1.0 / 40320.0);
    q = fma(q, r, 1.0 / 5040.0);
    q = fma(q, r, 1.0 / 720.0);
    q = fma(q, r, 1.0 / 120.0);
    q = fma(q, r, 1.0 / 24.0);
    q = fma(q, r, 1.0 / 6.0);
    q = fma(q, r, 1.0 / 2.0);
    double head = 1.0 + r, head_low = r - (head - 1.0);
    double tail = r * r * q;
    tail = fma(r_low, head + tail, tail); /* exp(r + r_low) = exp(r) (1 + r_low) */
    return scale(head + (head_low + tail), (int)k);
}

double mu_fmath_exp(double x)
{
    return exp_pair(x, 0.0);
}

double mu_fmath_log(double x)
{
    if (x != x || x == HUGE_VAL)
        return x;
    if (x == 0.0)
        return -HUGE_VAL;
    if (x < 0.0)
        return NAN;
    return log_pair(x).high;
}

static int is_integer(double y)
{
    return y == floor(y);
}

double mu_fmath_pow(double x, double y)
{
    if (x == 1.0 || y == 0.0)
        return 1.0;
    if (x != x || y != y)
        return x + y;
    double size = fabs(x), size_y = fabs(y);
    int odd = size_y < 0x1p53 && is_integer(y) && !is_integer(y / 2.0);
    double sign = signbit(x) && odd ? -1.0 : 1.0;
    if (size == 0.0)
        return y < 0.0 ? sign * HUGE_VAL : sign * 0.0;
    if (size == HUGE_VAL)
        return y < 0.0 ? sign * 0.0 : sign * HUGE_VAL;
    if (size_y == HUGE_VAL)
        return size == 1.0 ? 1.0 : (size > 1.0) == (y > 0.0) ? HUGE_VAL : 0.0;
    if (x < 0.0 && !is_integer(y))
        return NAN;
    struct pair logarithm = log_pair(size);
    double product = y * logarithm.high;
    if (product > 1024.0 || product < -1024.0)
        return product > 0.0 ? sign * HUGE_VAL : sign * 0.0;
    return sign * exp_pair(product, fma(y, logarithm.high, -product) + y * logarithm.low);
}

/* x = k pi/2 + (high + low), |high| <= pi/4 and a little; returns k mod 4. The first fma is exact: its value is a
 * multiple of 2^-53 below 1 in size (Cody and Waite's reduction with fma in place of short constants). */
static unsigned reduce_quadrant(double x, struct pair *ret_rest)
{
    if (fabs(x) <= 0.78) {
        *ret_rest = (struct pair){x, 0.0};
        return 0;
    }
    double k = (x * TWO_OVER_PI + ROUNDER) - ROUNDER;
    double rest = fma(-k, HALF_PI_1, x);
    double second = k * HALF_PI_2, second_low = fma(k, HALF_PI_2, -second);
    struct pair sum = two_sum(rest, -second);
    *ret_rest = two_sum(sum.high, sum.low - (second_low + k * HALF_PI_3));
    return (unsigned)(int64_t)k & 3u;
}

/* sin(x.high + x.low), |x| <= pi/4: series to x^17 (next term < 2^-63 of x). */
static double sin_series(struct pair x)
{
    double z = x.high * x.high;
    double q = 1.0 / 355687428096000.0;
    q = fma(q, z, -1.0 / 1307674368000.0);
    q = fma(q, z, 1.0 / 6227020800.0);
    q = fma(q, z, -1.0 / 39916800.0);
    q = fma(q, z, 1.0 / 362880.0);
    q = fma(q, z, -1.0 / 5040.0);
    q = fma(q, z, 1.0 / 120.0);
    q = fma(q, z, -1.0 / 6.0);
    return x.high + fma(x.high * z, q, fma(-0.5 * z, x.low, x.low));
}

/* cos(x.high + x.low), |x| <= pi/4: series to x^16 (next term < 2^-58). */
static double cos_series(struct pair x)
{
    double z = x.high * x.high;
    double q = 1.0 / 20922789888000.0;
    q = fma(q, z, -1.0 / 87178291200.0);
    q = fma(q, z, 1.0 / 479001600.0);
    q = fma(q, z, -1.0 / 3628800.0);
    q = fma(q, z, 1.0 / 40320.0);
    q = fma(q, z, -1.0 / 720.0);
    q = fma(q, z, 1.0 / 24.0);
    double half = 0.5 * z, one = 1.0 - half;
    return one + (((1.0 - one) - half) + fma(z * z, q, -x.high * x.low));
}

static double sin_quadrant(double x, unsigned shift)
{
    if (!(fabs(x) <= MU_TRIG_MAX))
        return NAN;
    struct pair rest;
    unsigned quadrant = (reduce_quadrant(x, &rest) + shift) & 3u;
    double value = quadrant & 1u ? cos_series(rest) : sin_series(rest);
    return quadrant & 2u ? -value : value;
}

double mu_fmath_sin(double x)
{
    return x == 0.0 ? x : sin_quadrant(x, 0);
}

double mu_fmath_cos(double x)
{
    return sin_quadrant(x, 1);
}

double mu_fmath_sqrt(double x)
{
    return sqrt(x);
}
