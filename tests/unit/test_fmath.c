/* links: mu_common */
#include "common/fmath.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "common/rng.h"

enum { SAMPLES = 200000 };

/* Distance of `got` from the exact value (held in long double: 11 more bits than double) in units of the last place of
 * double. */
static double ulp_error(double got, long double exact)
{
    double nearest = (double)exact;
    if (got == nearest)
        return (double)(fabsl((long double)got - exact) /
                        (long double)(nextafter(fabs(nearest), INFINITY) - fabs(nearest)));
    if (!isfinite(got) || !isfinite(nearest))
        return INFINITY;
    double unit = nextafter(fabs(nearest), INFINITY) - fabs(nearest);
    return (double)(fabsl((long double)got - exact) / (long double)unit);
}

static double uniform(uint64_t *seed, double low, double high)
{
    return low + (high - low) * ((double)(mu_splitmix64(seed) >> 11) * 0x1p-53);
}

static double worst_over(double (*own)(double), long double (*exact)(long double), double low, double high,
                         uint64_t seed)
{
    double worst = 0;
    for (int i = 0; i < SAMPLES; i++) {
        double x = uniform(&seed, low, high), error = ulp_error(own(x), exact((long double)x));
        worst = error > worst ? error : worst;
    }
    return worst;
}

static void expect_below(const char *what, double worst, double limit)
{
    print_message("%-28s worst %.4f ulp (limit %.2f)\n", what, worst, limit);
    assert_true(worst < limit);
}

static void test_fmath_exp_within_one_ulp(void **state)
{
    (void)state;
    expect_below("exp [-1, 1]", worst_over(mu_fmath_exp, expl, -1, 1, 1), 1.0);
    expect_below("exp [-745, 709.78]", worst_over(mu_fmath_exp, expl, -745, 709.78, 2), 1.0);
    expect_below("exp [-1e-9, 1e-9]", worst_over(mu_fmath_exp, expl, -1e-9, 1e-9, 3), 1.0);
}

static void test_fmath_log_within_one_ulp(void **state)
{
    (void)state;
    expect_below("log [0.5, 2]", worst_over(mu_fmath_log, logl, 0.5, 2, 4), 1.0);
    expect_below("log [1 - 1e-7, 1 + 1e-7]", worst_over(mu_fmath_log, logl, 1 - 1e-7, 1 + 1e-7, 5), 1.0);
    expect_below("log [1e-300, 1e300]", worst_over(mu_fmath_log, logl, 1e-300, 1e300, 6), 1.0);
    expect_below("log [0, 1e-310]", worst_over(mu_fmath_log, logl, 5e-324, 1e-310, 7), 1.0);
}

static void test_fmath_sin_cos_within_one_ulp(void **state)
{
    (void)state;
    expect_below("sin [-0.78, 0.78]", worst_over(mu_fmath_sin, sinl, -0.78, 0.78, 8), 1.0);
    expect_below("sin [-7, 7]", worst_over(mu_fmath_sin, sinl, -7, 7, 9), 1.0);
    expect_below("cos [-7, 7]", worst_over(mu_fmath_cos, cosl, -7, 7, 10), 1.0);
    expect_below("sin [0, 2^30]", worst_over(mu_fmath_sin, sinl, 0, MU_TRIG_MAX, 11), 1.0);
    expect_below("cos [0, 2^30]", worst_over(mu_fmath_cos, cosl, 0, MU_TRIG_MAX, 12), 1.0);
}

static void test_fmath_sin_cos_near_multiples_of_half_pi(void **state)
{
    (void)state;
    double worst = 0;
    for (int k = 1; k < 100000; k++) {
        double x = k * 1.57079632679489661923;
        for (int side = 0; side < 3; side++) {
            double at = side == 0 ? x : nextafter(x, side == 1 ? 0 : INFINITY);
            worst = fmax(worst, ulp_error(mu_fmath_sin(at), sinl((long double)at)));
            worst = fmax(worst, ulp_error(mu_fmath_cos(at), cosl((long double)at)));
        }
    }
    expect_below("sin, cos near k pi/2", worst, 1.0);
}

static void test_fmath_pow_stays_accurate_for_large_exponents(void **state)
{
    (void)state;
    uint64_t seed = 13;
    double worst_small = 0, worst_large = 0;
    for (int i = 0; i < SAMPLES; i++) {
        double x = exp(uniform(&seed, -5, 5)), y = uniform(&seed, -3, 3);
        worst_small = fmax(worst_small, ulp_error(mu_fmath_pow(x, y), powl((long double)x, (long double)y)));
        y = uniform(&seed, -700, 700) / log(x);
        worst_large = fmax(worst_large, ulp_error(mu_fmath_pow(x, y), powl((long double)x, (long double)y)));
    }
    expect_below("pow, |y log x| <= 15", worst_small, 1.0);
    expect_below("pow, |y log x| <= 700", worst_large, 1.0);
    double worst_bias = 0;
    for (int t = 1; t <= 100000; t++)
        worst_bias = fmax(worst_bias, ulp_error(mu_fmath_pow(0.95, t), powl((long double)0.95, t)));
    expect_below("pow, 0.95^t", worst_bias, 1.0);
}

static void test_fmath_special_values_as_in_annex_f(void **state)
{
    (void)state;
    assert_true(isnan(mu_fmath_exp(NAN)) && isnan(mu_fmath_log(NAN)) && isnan(mu_fmath_sin(NAN)) &&
                isnan(mu_fmath_cos(NAN)));
    assert_true(mu_fmath_exp(0.0) == 1.0 && mu_fmath_exp(-INFINITY) == 0.0 && mu_fmath_exp(INFINITY) == INFINITY);
    assert_true(mu_fmath_exp(710.0) == INFINITY && mu_fmath_exp(-746.0) == 0.0 && mu_fmath_exp(-744.0) > 0.0);
    assert_true(mu_fmath_log(1.0) == 0.0 && !signbit(mu_fmath_log(1.0)));
    assert_true(mu_fmath_log(0.0) == -INFINITY && mu_fmath_log(INFINITY) == INFINITY && isnan(mu_fmath_log(-1.0)));
    assert_true(isnan(mu_fmath_sin(INFINITY)) && isnan(mu_fmath_cos(2.0 * MU_TRIG_MAX)));
    assert_true(mu_fmath_cos(0.0) == 1.0 && mu_fmath_sin(0.0) == 0.0 && signbit(mu_fmath_sin(-0.0)));
    assert_true(mu_fmath_sqrt(2.0) == 0x1.6a09e667f3bcdp+0);
    static const double values[] = {0.0, -0.0, 1.0,   -1.0,   2.0,    -2.0,     3.0,       -3.0,
                                    0.5, -0.5, 1e300, -1e300, 1e-320, INFINITY, -INFINITY, NAN};
    enum { COUNT = sizeof values / sizeof values[0] };
    for (int i = 0; i < COUNT; i++) {
        for (int j = 0; j < COUNT; j++) {
            double got = mu_fmath_pow(values[i], values[j]), expected = pow(values[i], values[j]);
            bool same =
                isnan(expected) ? isnan(got) : fabs(got - expected) <= 0x1p-52 * fabs(expected) || got == expected;
            if (!same || (!isnan(expected) && signbit(got) != signbit(expected)))
                fail_msg("pow(%g, %g) = %g, expected %g", values[i], values[j], got, expected);
        }
    }
}

/* Bits recorded on x86-64 with fma3, with fma emulated by the library, and with -O0 (all equal): a compiler or machine
 * that contracts or reorders an operation changes at least one of these hashes. */
static uint64_t fold(uint64_t hash, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    hash ^= bits;
    return mu_splitmix64(&hash);
}

static void test_fmath_bits_are_the_recorded_ones(void **state)
{
    (void)state;
    uint64_t seed = 99, hash = 0;
    for (int i = 0; i < 20000; i++) {
        double x = uniform(&seed, -30, 30), y = uniform(&seed, 0, 1000);
        hash = fold(hash, mu_fmath_exp(x));
        hash = fold(hash, mu_fmath_log(y));
        hash = fold(hash, mu_fmath_sin(x));
        hash = fold(hash, mu_fmath_cos(y));
        hash = fold(hash, mu_fmath_pow(y, x));
    }
    print_message("fmath hash 0x%016llx\n", (unsigned long long)hash);
    assert_true(hash == 0x5877ca55f70ccd2dull);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fmath_exp_within_one_ulp),
        cmocka_unit_test(test_fmath_log_within_one_ulp),
        cmocka_unit_test(test_fmath_sin_cos_within_one_ulp),
        cmocka_unit_test(test_fmath_sin_cos_near_multiples_of_half_pi),
        cmocka_unit_test(test_fmath_pow_stays_accurate_for_large_exponents),
        cmocka_unit_test(test_fmath_special_values_as_in_annex_f),
        cmocka_unit_test(test_fmath_bits_are_the_recorded_ones),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
