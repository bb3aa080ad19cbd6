/* links: mu_kernels */
#include "kernels/exact_sum.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "common/rng.h"

static double sum_of(const double *values, size_t count)
{
    struct mu_exact_sum sum;
    mu_exact_sum_init(&sum);
    for (size_t i = 0; i < count; i++)
        mu_exact_sum_add(&sum, values[i]);
    return mu_exact_sum_round(&sum);
}

static void test_sum_of_cancelling_values_is_exact(void **state)
{
    (void)state;
    const double cancelling[] = {1e300, 1.0, -1e300, 0x1p-1074, -1.0};
    assert_true(sum_of(cancelling, 5) == 0x1p-1074);
    const double negative[] = {1.0, -DBL_MAX, 0x1p-60, -1.0};
    assert_true(sum_of(negative, 4) == -DBL_MAX);
    const double zero[] = {3.5, -3.5};
    assert_true(sum_of(zero, 2) == 0.0 && !signbit(sum_of(zero, 2)));
    assert_true(sum_of(NULL, 0) == 0.0);
}

static void test_rounding_is_to_nearest_even(void **state)
{
    (void)state;
    const double tie_down[] = {1.0, 0x1p-53}, tie_up[] = {1.0 + 0x1p-52, 0x1p-53}, above[] = {1.0, 0x1p-53, 0x1p-1074};
    const double carry[] = {2.0 - 0x1p-52, 0x1p-53}, low[] = {-1.0, -0x1p-53, -0x1p-1000};
    assert_true(sum_of(tie_down, 2) == 1.0);
    assert_true(sum_of(tie_up, 2) == 1.0 + 0x1p-51);
    assert_true(sum_of(above, 3) == 1.0 + 0x1p-52);
    assert_true(sum_of(carry, 2) == 2.0);
    assert_true(sum_of(low, 3) == -(1.0 + 0x1p-52));
    const double denormal[] = {0x1p-1074, 0x1p-1073}, overflow[] = {DBL_MAX, DBL_MAX};
    assert_true(sum_of(denormal, 2) == 0x1.8p-1073);
    assert_true(isinf(sum_of(overflow, 2)));
}

static double random_double(uint64_t *seed)
{
    for (;;) {
        uint64_t bits = mu_splitmix64(seed);
        double value;
        memcpy(&value, &bits, sizeof value);
        if (isfinite(value))
            return value;
    }
}

static void test_order_and_grouping_do_not_matter(void **state)
{
    (void)state;
    enum { COUNT = 2000 };
    double values[COUNT];
    uint64_t seed = 5;
    struct mu_exact_sum forward, parts[7], joined;
    mu_exact_sum_init(&forward);
    for (int i = 0; i < 7; i++)
        mu_exact_sum_init(&parts[i]);
    for (int i = 0; i < COUNT; i++) {
        values[i] = random_double(&seed);
        mu_exact_sum_add(&forward, values[i]);
    }
    for (int i = COUNT - 1; i >= 0; i--)
        mu_exact_sum_add(&parts[mu_splitmix64(&seed) % 7], values[i]);
    mu_exact_sum_init(&joined);
    for (int i = 6; i >= 0; i--)
        mu_exact_sum_merge(&joined, &parts[i]);
    uint8_t a[MU_EXACT_SUM_BYTES], b[MU_EXACT_SUM_BYTES];
    mu_exact_sum_pack(&forward, a);
    mu_exact_sum_pack(&joined, b);
    assert_memory_equal(a, b, sizeof a);
    assert_true(mu_exact_sum_round(&forward) == mu_exact_sum_round(&joined));
    /* and subtracting everything leaves nothing */
    for (int i = 0; i < COUNT; i++)
        mu_exact_sum_add(&joined, -values[i]);
    assert_true(mu_exact_sum_round(&joined) == 0.0);
}

static void test_matches_long_double_where_that_is_exact(void **state)
{
    (void)state;
    uint64_t seed = 9;
    for (int round = 0; round < 1000; round++) {
        double values[3];
        long double expected = 0;
        for (int i = 0; i < 3; i++) {
            values[i] = (double)(int64_t)(mu_splitmix64(&seed) >> 12) - 0x1p51;
            expected += (long double)values[i];
        }
        assert_true(sum_of(values, 3) == (double)expected);
    }
}

static void test_pack_and_unpack_keep_the_value(void **state)
{
    (void)state;
    const double values[] = {-1e-310, 12345.678, -1e200, 0.1};
    struct mu_exact_sum sum, copy;
    uint8_t bytes[MU_EXACT_SUM_BYTES], again[MU_EXACT_SUM_BYTES];
    mu_exact_sum_init(&sum);
    for (int i = 0; i < 4; i++)
        mu_exact_sum_add(&sum, values[i]);
    mu_exact_sum_pack(&sum, bytes);
    assert_int_equal(mu_exact_sum_unpack(bytes, &copy), MU_OK);
    mu_exact_sum_pack(&copy, again);
    assert_memory_equal(bytes, again, sizeof bytes);
    assert_true(mu_exact_sum_round(&copy) == mu_exact_sum_round(&sum));
    bytes[MU_EXACT_SUM_BYTES - 1] = 1;
    assert_int_equal(mu_exact_sum_unpack(bytes, &copy), MU_ERR_CORRUPT);
}

static void test_not_finite_values_are_remembered(void **state)
{
    (void)state;
    struct mu_exact_sum sum, other;
    mu_exact_sum_init(&sum);
    mu_exact_sum_init(&other);
    mu_exact_sum_add(&sum, 1.0);
    assert_true(mu_exact_sum_finite(&sum));
    mu_exact_sum_add(&other, INFINITY);
    mu_exact_sum_merge(&sum, &other);
    assert_false(mu_exact_sum_finite(&sum));
    assert_true(mu_exact_sum_round(&sum) == (double)INFINITY);
    mu_exact_sum_add(&sum, -INFINITY);
    assert_true(isnan(mu_exact_sum_round(&sum)));
    mu_exact_sum_init(&sum);
    mu_exact_sum_add(&sum, NAN);
    assert_true(isnan(mu_exact_sum_round(&sum)));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sum_of_cancelling_values_is_exact),
        cmocka_unit_test(test_rounding_is_to_nearest_even),
        cmocka_unit_test(test_order_and_grouping_do_not_matter),
        cmocka_unit_test(test_matches_long_double_where_that_is_exact),
        cmocka_unit_test(test_pack_and_unpack_keep_the_value),
        cmocka_unit_test(test_not_finite_values_are_remembered),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
