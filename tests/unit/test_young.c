/* links: mu_plan */
#include "plan/young.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

static void assert_near(double got, double expected, double relative)
{
    if (!(fabs(got - expected) <= relative * fabs(expected)))
        fail_msg("got %.12g, expected %.12g", got, expected);
}

static void test_young_interval_is_the_square_root_formula(void **state)
{
    (void)state;
    assert_near(mu_young_interval_s(2, 100), 20, 1e-15);
    assert_near(mu_young_interval_s(5, 3.09 * 3600), sqrt(10 * 3.09 * 3600), 1e-15);
}

/* Published example (Llama 3: 419 interruptions in 54 days on 16,384 GPUs) and larger machines. */
static void test_young_goodput_of_known_machines(void **state)
{
    (void)state;
    static const struct {
        double mtbf, cost, restart, expected;
    } rows[] = {{3.09 * 3600, 5, 600, 0.919},
                {1824, 60, 900, 0.467},
                {1824, 5, 600, 0.668},
                {1824, 5, 120, 0.869},
                {1824, 1, 30, 0.951}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        double interval = mu_young_interval_s(rows[i].cost, rows[i].mtbf);
        double got = mu_young_goodput(interval, rows[i].cost, rows[i].mtbf, rows[i].restart);
        if (fabs(got - rows[i].expected) > 0.0006)
            fail_msg("row %zu: goodput %.4f, expected %.3f", i, got, rows[i].expected);
    }
}

/* Daly's interval is where the goodput is best: nothing within 1 % of it, or far from it, is better by more than 1e-5.
 */
static void test_young_daly_interval_maximises_goodput(void **state)
{
    (void)state;
    for (double mtbf = 100; mtbf < 1e7; mtbf *= 3) {
        for (double ratio = 1e-5; ratio < 0.05; ratio *= 3) {
            double cost = mtbf * ratio, best = mu_young_daly_interval_s(cost, mtbf);
            double at_best = mu_young_goodput(best, cost, mtbf, 10);
            for (double factor = 0.25; factor < 4.0; factor *= 1.01)
                assert_true(mu_young_goodput(best * factor, cost, mtbf, 10) <= at_best * (1 + 1e-5));
            assert_true(mu_young_goodput(best * 2, cost, mtbf, 10) < at_best);
            assert_true(mu_young_goodput(best / 2, cost, mtbf, 10) < at_best);
        }
    }
    assert_near(mu_young_daly_interval_s(1000, 100), 100, 0); /* checkpoints dearer than failures */
}

static void test_young_goodput_limits(void **state)
{
    (void)state;
    double nothing_fails = mu_young_goodput(1000, 1, 1e12, 0);
    assert_near(nothing_fails, 1000.0 / 1001.0, 1e-8);
    assert_true(mu_young_goodput(1e6, 1, 10, 0) == 0.0);
    assert_near(mu_young_goodput(1, 1e-9, 1e3, 0), 1 / (1e3 * expm1(1e-3 + 1e-12)), 1e-12);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_young_interval_is_the_square_root_formula),
        cmocka_unit_test(test_young_goodput_of_known_machines),
        cmocka_unit_test(test_young_daly_interval_maximises_goodput),
        cmocka_unit_test(test_young_goodput_limits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
