/* links: mu_coordinator mu_worker_core mu_wire mu_plan m */
/* What steps were predicted to take beside what they take: how a report is divided, what is told, how often, and what
 * the model of costs learns from one generation to the next. Time is the box's. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "common/rng.h"
#include "core_testing.h"

enum { LEAVES = 16, LEAF_US = 30000 };

/* cmocka compares floats only. */
static void assert_near(double a, double b, double apart)
{
    if (!(fabs(a - b) <= apart))
        fail_msg("%.9g is not %.9g", a, b);
}

static double sum_of(const double terms[MU_TERM_COUNT])
{
    double sum = 0;
    for (int i = 0; i < MU_TERM_COUNT; i++)
        sum += terms[i];
    return sum;
}

/* The terms are the report's own, the bubble is what the schedule explains of the waits for other stages, and all of
 * them add up to the steps. */
static void test_terms_add_up_to_the_report(void **state)
{
    (void)state;
    uint64_t seed = 5;
    for (int i = 0; i < 2000; i++) {
        struct mu_step_report report = {.step_count = 3, .tensor_us = (uint32_t)(mu_splitmix64(&seed) % 5000)};
        uint64_t *own[] = {&report.forward_us, &report.backward_us, &report.optimizer_us, &report.snapshot_us,
                           &report.data_us};
        uint64_t told_us = report.tensor_us;
        for (size_t k = 0; k < sizeof own / sizeof own[0]; k++)
            told_us += *own[k] = mu_splitmix64(&seed) % 10000;
        told_us += report.pipeline_us = (uint32_t)(mu_splitmix64(&seed) % 10000);
        told_us += report.replicas_us = (uint32_t)(mu_splitmix64(&seed) % 10000);
        told_us += report.vote_us = (uint32_t)(mu_splitmix64(&seed) % 10000);
        report.total_us = told_us + mu_splitmix64(&seed) % 3000;
        uint32_t pp = 1 + (uint32_t)(mu_splitmix64(&seed) % 4), micros = 1 + (uint32_t)(mu_splitmix64(&seed) % 8);
        double terms[MU_TERM_COUNT], compute_s = (double)(report.forward_us + report.backward_us) * 1e-6;
        mu_prediction_split(&report, pp, micros, terms);
        assert_near(sum_of(terms), (double)report.total_us * 1e-6, 1e-9);
        assert_near(terms[MU_TERM_COMPUTE], compute_s, 1e-9);
        assert_near(terms[MU_TERM_TENSOR], report.tensor_us * 1e-6, 1e-9);
        assert_near(terms[MU_TERM_BUBBLE] + terms[MU_TERM_PIPELINE], report.pipeline_us * 1e-6, 1e-9);
        assert_near(terms[MU_TERM_BUBBLE], fmin(report.pipeline_us * 1e-6, compute_s * (pp - 1) / micros), 1e-9);
        assert_near(terms[MU_TERM_OTHER], (double)(report.total_us - told_us) * 1e-6, 1e-9);
    }
}

static void train(struct box *box, uint32_t leaf_us, int steps)
{
    for (int step = 0; step < steps; step++) {
        uint32_t most = 0;
        for (uint32_t i = 0; i < BOX_WORKERS_MAX; i++) {
            box->workers[i].leaf_us = leaf_us;
            if (box->workers[i].running && box->workers[i].leaves > most)
                most = box->workers[i].leaves;
        }
        box->step_us = leaf_us * most;
        assert_true(box_train(box, 1000000));
        box_advance(box, box->step_us / 1000);
    }
}

/* A third one, fed with its state while the others step. */
static void join(struct box *box)
{
    box_add_worker(box, 2);
    box_settle(box);
    box_advance(box, 300);
    for (int i = 0; i < 40 && box_view(box).world < 3; i++)
        train(box, LEAF_US, 1);
    box_advance(box, 1000);
    assert_true(box_all_run(box) && box_view(box).world == 3);
}

static uint32_t times_told(const struct box *box)
{
    uint32_t count = 0;
    for (const char *at = box->events; (at = strstr(at, "prediction_off")) != NULL; at++)
        count++;
    return count;
}

static struct mu_prediction prediction_of(struct box *box)
{
    struct mu_prediction p;
    assert_true(mu_coord_prediction_view(box->coord, box->name, &p));
    assert_int_equal(p.generation, box_view(box).generation);
    return p;
}

static void start(struct box *box, uint32_t workers)
{
    struct mu_job_spec spec;
    box_spec(&spec, 1, 1);
    spec.batch.sequences = LEAVES;
    spec.steps = 1000000;
    box_init(box, &spec);
    struct mu_prediction p;
    assert_false(mu_coord_prediction_view(box->coord, box->name, &p));
    for (uint32_t i = 0; i < workers; i++)
        box_add_worker(box, i);
    box_settle(box);
    box_advance(box, 300);
    assert_true(box_all_run(box));
}

/* Default rates are far off for workers as slow as these: said once, for information. The next generation knows their
 * speed and is right. When they become slower still, that is a warning; once, however long it lasts, also by a
 * coordinator that was restarted. When they are as fast as predicted again, it is over. */
static void test_what_is_off_is_told_once_a_generation(void **state)
{
    (void)state;
    static struct box box;
    start(&box, 2);
    train(&box, LEAF_US, 10);
    struct mu_prediction p = prediction_of(&box);
    assert_true(!p.calibrated && !p.off && p.steps == 0 && sum_of(p.predicted_s) > 0);
    train(&box, LEAF_US, 60);
    p = prediction_of(&box);
    assert_true(p.off && p.steps >= 20);
    assert_near(sum_of(p.measured_s), LEAVES / 2 * LEAF_US * 1e-6, 1e-3);
    assert_int_equal(times_told(&box), 1);
    assert_true(box_said(&box, "by default rates") && box_said(&box, "the difference is compute"));
    train(&box, LEAF_US, 100);
    assert_int_equal(times_told(&box), 1);

    box.events[0] = 0;
    join(&box);
    train(&box, LEAF_US, 100);
    p = prediction_of(&box);
    assert_true(p.calibrated && !p.off && p.steps > 0 && times_told(&box) == 0);
    assert_near(p.predicted_s[MU_TERM_COMPUTE] / p.measured_s[MU_TERM_COMPUTE], 1, 0.02);

    train(&box, LEAF_US * 13 / 10, 100);
    assert_true(prediction_of(&box).off && times_told(&box) == 1);
    assert_true(box_said(&box, "at the speed that was measured before"));
    box_kill_coord(&box);
    box_start_coord(&box);
    box_settle(&box);
    box_advance(&box, 3000);
    train(&box, LEAF_US * 13 / 10, 100);
    assert_true(prediction_of(&box).off && prediction_of(&box).calibrated);
    assert_int_equal(times_told(&box), 1);
    train(&box, LEAF_US, 80);
    assert_true(!prediction_of(&box).off && times_told(&box) == 1);
    box_fini(&box);
}

/* A little off, or now and then, is not off. */
static void test_noise_is_not_told(void **state)
{
    (void)state;
    static struct box box;
    start(&box, 2);
    train(&box, LEAF_US, 80);
    join(&box);
    box.events[0] = 0;
    for (int i = 0; i < 60; i++)
        train(&box, i % 8 == 0 ? 2 * LEAF_US : LEAF_US * 11 / 10, i % 8 == 0 ? 1 : 5);
    assert_true(times_told(&box) == 0 && prediction_of(&box).calibrated && !prediction_of(&box).off);
    box_fini(&box);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_terms_add_up_to_the_report),
        cmocka_unit_test(test_what_is_off_is_told_once_a_generation),
        cmocka_unit_test(test_noise_is_not_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
