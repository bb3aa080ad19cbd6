/* links: mu_plan */
#include "plan/estimate.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "plan/cost.h"
#include "plan/memory.h"

static struct mu_job_spec job(uint32_t slices, uint32_t vocab)
{
    struct mu_job_spec s;
    mu_job_spec_init(&s);
    strcpy(s.name, "a");
    strcpy(s.data.path, "/a");
    s.data.tokens = MU_TOKENS_LLMC;
    s.model = (struct mu_model_config){.family = MU_FAMILY_GPT2,
                                       .layers = 12,
                                       .heads = 8,
                                       .channels = 768,
                                       .context = 1024,
                                       .vocab = vocab,
                                       .slices = slices};
    s.batch.sequences = 8, s.batch.micro = 1, s.batch.length = 1024;
    s.steps = 10;
    struct mu_error err;
    if (mu_job_spec_check(&s, &err))
        fail_msg("%s", err.text);
    mu_model_config_resolve(&s.model);
    return s;
}

static void expect_lines(const struct mu_job_spec *spec, const char *slices, const char *layout)
{
    struct mu_estimate e;
    char line[MU_ESTIMATE_LINE_SIZE];
    mu_estimate_of(spec, &e);
    mu_estimate_slices_line(&e, line);
    if (!strstr(line, slices))
        fail_msg("'%s' lacks '%s'", line, slices);
    assert_null(strchr(line, '\n'));
    mu_estimate_layout_line(&e, line);
    if (!strstr(line, layout))
        fail_msg("'%s' lacks '%s'", line, layout);
    assert_null(strchr(line, '\n'));
}

static void test_estimate_tells_what_slices_cost(void **state)
{
    (void)state;
    struct mu_job_spec one = job(1, 50257), eight = job(8, 50257), even = job(8, 50304);
    struct mu_estimate e;
    struct mu_layout alone;
    struct mu_cost_rates rates;
    mu_layout_init(&alone, 1, 12);
    mu_cost_rates_init(&rates);
    double with = mu_cost_of_layout(&eight, &alone, &rates).step_s;
    double without = mu_cost_of_layout(&one, &alone, &rates).step_s;
    mu_estimate_of(&eight, &e);
    assert_true(e.slices_percent > 1 && e.slices_percent < 20);
    assert_true(e.slices_percent > 99.9 * (with / without - 1) && e.slices_percent < 100.1 * (with / without - 1));
    assert_int_equal(7 * e.vocab_rows + e.vocab_rows_last, 50257);
    char rows[96];
    snprintf(rows, sizeof rows, "vocabulary: %u rows a slice, %u in the last", e.vocab_rows, e.vocab_rows_last);
    expect_lines(&eight, rows, "layout with 1 worker: tp 1 x pp 1 x dp 1, ");
    expect_lines(&eight, "tp can be 1, 2, 4 or 8", " MiB a worker expected");
    expect_lines(&one, "slices 1: cost nothing; tp can only be 1", " ms a step and ");
    mu_estimate_of(&even, &e);
    assert_int_equal(e.vocab_rows, e.vocab_rows_last);
    even.parallel.tp = 4;
    expect_lines(&even, "tp is 4", "layout with 4 workers: tp 4 x pp 1 x dp 1");
}

static void test_estimate_tells_what_layout_choices_cost(void **state)
{
    (void)state;
    struct mu_job_spec s = job(1, 50257);
    struct mu_estimate e;
    s.workers.min = 4;
    s.parallel.pp = 1;
    s.parallel.recompute = MU_RECOMPUTE_FULL;
    s.parallel.optimizer_sharding = true;
    s.parallel.redundancy = MU_REDUNDANCY_BUDDY;
    expect_lines(&s, "slices 1", "recomputation adds ");
    expect_lines(&s, "slices 1", "; sharding saves ");
    mu_estimate_of(&s, &e);
    assert_true(e.recompute_percent > 10 && e.recompute_percent < 40);
    assert_true(e.layout.sharded && e.layout.dp == 4 && e.redundancy_percent > 0);
    struct mu_layout whole = e.layout;
    whole.sharded = false;
    assert_int_equal(e.sharding_saved_bytes, mu_memory_of_layout(&s, &whole, 1, NULL).total_bytes - e.memory_bytes);
    s.parallel.recompute = MU_RECOMPUTE_NONE;
    s.parallel.redundancy = MU_REDUNDANCY_NONE;
    mu_estimate_of(&s, &e);
    assert_true(e.recompute_percent == 0 && e.redundancy_percent == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_estimate_tells_what_slices_cost),
        cmocka_unit_test(test_estimate_tells_what_layout_choices_cost),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
