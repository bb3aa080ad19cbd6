/* links: mu_plan */
#include "plan/amend.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

static struct mu_job_spec sample(void)
{
    struct mu_job_spec spec;
    memset(&spec, 0, sizeof spec);
    mu_job_spec_init(&spec);
    strcpy(spec.name, "a");
    spec.model = (struct mu_model_config){
        .family = MU_FAMILY_GPT2, .layers = 1, .heads = 1, .channels = 8, .context = 8, .vocab = 256, .slices = 1};
    strcpy(spec.data.path, "/data");
    spec.batch.sequences = 4;
    spec.batch.micro = 1;
    spec.batch.length = 8;
    spec.steps = 100;
    spec.optimizer.warmup = 10;
    return spec;
}

static void add(struct mu_job_spec *spec, struct mu_amendment amendment, uint64_t now)
{
    struct mu_error err = {0};
    if (mu_amend_add(spec, &amendment, now, &err))
        fail_msg("%s", err.text);
}

/* The rate at each step is that of a job that had always had the terms of that step. */
static void test_rate_and_end_are_functions_of_record_and_step(void **state)
{
    (void)state;
    struct mu_job_spec spec = sample(), longer = sample(), hotter = sample();
    add(&spec, (struct mu_amendment){.fields = MU_AMEND_STEPS, .at_step = 40, .terms.steps = 150}, 7);
    add(&spec, (struct mu_amendment){.fields = MU_AMEND_LR, .at_step = 60, .terms.lr = 0.002}, 7);
    longer.steps = hotter.steps = 150;
    hotter.optimizer.lr = 0.002;
    const struct mu_job_spec before = sample();
    for (uint64_t step = 0; step < 150; step++) {
        const struct mu_job_spec *same = step < 40 ? &before : step < 60 ? &longer : &hotter;
        assert_true(mu_job_learning_rate(&spec, step) == mu_job_learning_rate(same, step));
    }
    assert_int_equal(mu_job_end(&spec), 150);
    assert_true(mu_job_spec_hash(&spec) == mu_job_spec_hash(&before));
    /* shorter, but all stand later than that: it ends where they stand */
    add(&spec, (struct mu_amendment){.fields = MU_AMEND_STEPS, .at_step = 0, .terms.steps = 80}, 80);
    mu_amend_place(&spec, 83);
    mu_amend_settle(&spec);
    assert_int_equal(mu_job_end(&spec), 83);
    assert_int_equal(mu_job_end(&longer), 150);
}

static void test_places_are_ascending_and_final_when_settled(void **state)
{
    (void)state;
    struct mu_job_spec spec = sample();
    add(&spec, (struct mu_amendment){.fields = MU_AMEND_LR, .at_step = 50, .terms.lr = 0.01}, 5);
    add(&spec, (struct mu_amendment){.fields = MU_AMEND_LR, .terms.lr = 0.02}, 5);
    assert_true(mu_amend_pending(&spec));
    mu_amend_place(&spec, 9);
    assert_int_equal(spec.amendments.list[0].version, 2);
    assert_int_equal(spec.amendments.list[0].at_step, 9);
    mu_amend_place(&spec, 60); /* the generation did not go: from where the next one starts */
    assert_int_equal(spec.amendments.list[0].version, 1);
    assert_int_equal(spec.amendments.list[0].at_step, 60);
    mu_amend_settle(&spec);
    mu_amend_place(&spec, 70);
    assert_int_equal(spec.amendments.list[1].at_step, 60);
    assert_false(mu_amend_pending(&spec));
    add(&spec, (struct mu_amendment){.fields = MU_AMEND_KEEP, .terms.keep = 2}, 61);
    assert_false(mu_amend_pending(&spec)); /* policy: nobody need be told */
    assert_int_equal(mu_job_terms(&spec, 61).keep, 2);
    assert_int_equal(mu_job_spec_check(&spec, NULL), MU_OK);
    mu_amend_cut(&spec, 60);
    assert_int_equal(spec.amendments.count, 2);
    assert_int_equal(spec.amendments.newest, 3);
}

/* Against a list from which the ranges are struck out. */
static void test_skipped_ranges_are_left_out_exactly(void **state)
{
    (void)state;
    struct mu_job_spec spec = sample();
    add(&spec, (struct mu_amendment){.fields = MU_AMEND_SKIP, .skip_first = 100, .skip_count = 7, .at_step = 20}, 2);
    add(&spec, (struct mu_amendment){.fields = MU_AMEND_SKIP, .skip_first = 107, .skip_count = 3, .at_step = 3}, 2);
    add(&spec, (struct mu_amendment){.fields = MU_AMEND_SKIP, .skip_first = 30, .skip_count = 20, .at_step = 10}, 2);
    mu_amend_place(&spec, 2); /* of the last one, 30 to 39 are trained on before step 10 */
    for (uint64_t n = 0, at = 0; n < 400; n++, at++) {
        while ((at >= 100 && at < 110) || (at >= 40 && at < 50))
            at++;
        assert_int_equal(mu_job_position(&spec, n), at);
    }
    struct mu_error err = {0};
    struct mu_amendment twice = {.fields = MU_AMEND_SKIP, .skip_first = 109, .skip_count = 9};
    assert_int_equal(mu_amend_add(&spec, &twice, 2, &err), MU_ERR_INVALID);
    struct mu_amendment past = {.fields = MU_AMEND_SKIP, .skip_first = 0, .skip_count = 8};
    assert_int_equal(mu_amend_add(&spec, &past, 2, &err), MU_ERR_INVALID);
}

/* What takes effect up to the step stays, what is not settled goes; the newest roll back names the era. */
static void test_a_roll_back_cuts_the_record_and_begins_an_era(void **state)
{
    (void)state;
    struct mu_job_spec spec = sample();
    add(&spec, (struct mu_amendment){.fields = MU_AMEND_LR, .at_step = 20, .terms.lr = 0.002}, 7);
    add(&spec, (struct mu_amendment){.fields = MU_AMEND_LR, .at_step = 40, .terms.lr = 0.003}, 7);
    mu_amend_settle(&spec);
    add(&spec, (struct mu_amendment){.fields = MU_AMEND_LR, .at_step = 60, .terms.lr = 0.004}, 50);
    assert_int_equal(mu_amend_era(&spec.amendments), 0);
    for (uint32_t round = 0; round < 2; round++) { /* the second before the first is settled: both hold */
        mu_amend_cut(&spec, 30);
        add(&spec,
            (struct mu_amendment){
                .fields = MU_AMEND_ROLL_BACK | MU_AMEND_STEPS, .terms.steps = 90 + round, .back = {3, 8, 55}},
            30);
        assert_int_equal(spec.amendments.count, 2 + round);
        assert_int_equal(mu_amend_era(&spec.amendments), 4 + round);
        assert_true(mu_amend_rolls_back(&spec));
        assert_int_equal(mu_job_end(&spec), 90 + round);
    }
    mu_amend_place(&spec, 30);
    mu_amend_settle(&spec);
    assert_false(mu_amend_rolls_back(&spec));
    assert_int_equal(spec.amendments.list[1].at_step, 30);
    assert_true(mu_job_terms(&spec, 99).lr == 0.002);
    char text[MU_AMENDMENT_TEXT_SIZE];
    mu_amend_describe(&spec.amendments.list[1], text);
    assert_string_equal(text, "rolled back to checkpoint 3 from step 55, steps 90");
    mu_amend_cut(&spec, 10);
    assert_int_equal(spec.amendments.count, 0);
}

static void test_refusals_change_nothing(void **state)
{
    (void)state;
    const struct mu_amendment wrong[] = {{0},
                                         {.fields = MU_AMEND_LR, .terms.lr = 1e-9},
                                         {.fields = MU_AMEND_LR, .terms.lr = 11},
                                         {.fields = MU_AMEND_STEPS, .terms.steps = 19},
                                         {.fields = MU_AMEND_STEPS, .terms.steps = 20, .at_step = 21},
                                         {.fields = MU_AMEND_LR, .terms.lr = 0.1, .at_step = 20},
                                         {.fields = MU_AMEND_LR, .terms.lr = 0.1, .at_step = 101},
                                         {.fields = MU_AMEND_WARMUP, .terms.warmup = 101},
                                         {.fields = 1u << 20}};
    struct mu_job_spec spec = sample(), before = sample();
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        struct mu_error err = {0};
        assert_int_equal(mu_amend_add(&spec, &wrong[i], 20, &err), MU_ERR_INVALID);
        assert_memory_equal(&spec, &before, sizeof spec);
    }
    struct mu_error err = {0};
    for (int i = 0; i < MU_AMENDMENTS_MAX; i++)
        add(&spec, (struct mu_amendment){.fields = MU_AMEND_LR, .terms.lr = 0.1}, 20);
    struct mu_amendment one_more = {.fields = MU_AMEND_LR, .terms.lr = 0.1};
    assert_int_equal(mu_amend_add(&spec, &one_more, 20, &err), MU_ERR_LIMIT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rate_and_end_are_functions_of_record_and_step),
        cmocka_unit_test(test_places_are_ascending_and_final_when_settled),
        cmocka_unit_test(test_skipped_ranges_are_left_out_exactly),
        cmocka_unit_test(test_a_roll_back_cuts_the_record_and_begins_an_era),
        cmocka_unit_test(test_refusals_change_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
