/* links: mu_plan mu_job_file */
#include "plan/search.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "cli/cluster_file.h"

static struct mu_cluster cluster_from(const char *text)
{
    struct mu_cluster c;
    struct mu_error err = {0};
    if (mu_cluster_file_parse("c.yaml", "/", text, strlen(text), &c, &err) != MU_OK)
        fail_msg("%s", err.text);
    return c;
}

static struct mu_forecast_model model(uint32_t sequences)
{
    return (struct mu_forecast_model){.config = {.family = MU_FAMILY_LLAMA,
                                                 .layers = 32,
                                                 .heads = 32,
                                                 .kv_heads = 8,
                                                 .channels = 4096,
                                                 .hidden = 14336,
                                                 .context = 2048,
                                                 .vocab = 128256,
                                                 .slices = 1},
                                      .sequences = sequences,
                                      .length = 2048};
}

enum { TOP = 50 };
struct found {
    struct mu_candidate list[TOP];
    struct mu_search_result result;
};

static struct found search(const struct mu_cluster *c, uint32_t sequences)
{
    struct found f;
    struct mu_forecast_model m = model(sequences);
    struct mu_forecast_rates rates;
    struct mu_search_limits limits;
    struct mu_error err = {0};
    mu_forecast_rates_init(&rates);
    mu_search_limits_init(&limits);
    if (mu_search(&m, c, &rates, &limits, f.list, TOP, &f.result, &err) != MU_OK)
        fail_msg("%s", err.text);
    return f;
}

static const char small[] = "device: {type: h100-sxm}\nnodes: 16\n";

static void test_search_lists_what_fits_the_best_first(void **state)
{
    (void)state;
    struct mu_cluster c = cluster_from(small);
    struct found f = search(&c, 1024);
    assert_int_equal(f.result.count, TOP);
    assert_true(f.result.fitting <= f.result.tried);
    for (uint32_t i = 0; i < f.result.count; i++) {
        const struct mu_candidate *a = &f.list[i];
        assert_true(a->forecast.memory_bytes <= 0.9 * c.device.memory_bytes);
        assert_true(a->plan.tp * a->plan.pp * a->plan.dp <= 128);
        assert_true(a->goodput.share > 0 && a->goodput.share < 1);
        assert_true(i == 0 || a->tokens_per_day <= f.list[i - 1].tokens_per_day);
    }
}

/* Everything that fits is in a list that is long enough: the first of it is the best of a plain walk over all degrees.
 */
static void test_search_finds_the_best_of_all_degrees(void **state)
{
    (void)state;
    struct mu_cluster c = cluster_from("device: {type: h100-sxm}\nnodes: 2\n");
    struct found f = search(&c, 64);
    struct mu_forecast_model m = model(64);
    struct mu_forecast_rates rates;
    mu_forecast_rates_init(&rates);
    double best = 0;
    for (uint32_t tp = 1; tp <= 16; tp++)
        for (uint32_t pp = 1; pp <= 16; pp++)
            for (uint32_t dp = 1; dp <= 16; dp++)
                for (uint32_t micro = 1; micro <= 64; micro *= 2)
                    for (int way = 1; way <= 3; way++) {
                        struct mu_error err;
                        struct mu_forecast_plan p = f.list[0].plan;
                        p.tp = tp, p.pp = pp, p.dp = dp, p.micro = micro, p.recompute = (enum mu_recompute)way;
                        p.sequence_parallel = tp > 1, p.sharded = dp > 1;
                        if (mu_forecast_check(&m, &c, &p, &err) != MU_OK)
                            continue;
                        struct mu_forecast forecast = mu_forecast_of(&m, &c, &p, &rates, NULL);
                        struct mu_goodput g = mu_goodput_of(&m, &c, &p, &forecast);
                        double tokens = 64.0 * 2048 / forecast.cautious_s * 86400 * g.share;
                        if (forecast.memory_bytes <= 0.9 * c.device.memory_bytes && tokens > best)
                            best = tokens;
                    }
    assert_true(f.list[0].tokens_per_day == best);
}

static void test_search_more_failures_and_less_storage_leave_less(void **state)
{
    (void)state;
    struct mu_cluster c = cluster_from(small), frail = c, slow;
    frail.device_mtbf_hours = 500;
    slow = frail;
    slow.storage_read_bytes_per_second = 1e8;
    double a = search(&c, 1024).list[0].goodput.share, b = search(&frail, 1024).list[0].goodput.share,
           d = search(&slow, 1024).list[0].goodput.share;
    assert_true(a > b && b > d);
}

static void test_search_failures_that_leave_nothing_are_told(void **state)
{
    (void)state;
    struct mu_cluster c = cluster_from("device: {type: h100-sxm}\nnodes: 16\nfailures: {device_mtbf_hours: 0.001}\n");
    struct mu_forecast_model m = model(1024);
    struct mu_forecast_rates rates;
    struct mu_search_limits limits;
    struct mu_candidate one;
    struct mu_search_result result;
    struct mu_error err = {0};
    mu_forecast_rates_init(&rates);
    mu_search_limits_init(&limits);
    assert_int_equal(mu_search(&m, &c, &rates, &limits, &one, 1, &result, &err), MU_ERR_UNAVAILABLE);
    assert_non_null(strstr(err.text, "no layout makes progress: a failure every"));
}

static void test_search_what_does_not_fit_says_by_how_much(void **state)
{
    (void)state;
    struct mu_cluster c = cluster_from("device: {type: a100-80g, memory: 8e9}\nnodes: 1\n");
    struct mu_forecast_model m = model(64);
    struct mu_forecast_rates rates;
    struct mu_search_limits limits;
    struct mu_candidate one;
    struct mu_search_result result;
    struct mu_error err = {0};
    mu_forecast_rates_init(&rates);
    mu_search_limits_init(&limits);
    assert_int_equal(mu_search(&m, &c, &rates, &limits, &one, 1, &result, &err), MU_ERR_UNAVAILABLE);
    assert_non_null(strstr(err.text, "no layout fits"));
    assert_true(result.nearest.forecast.memory_bytes > 7.2e9);
    limits.tp = 3;
    assert_int_equal(mu_search(&m, &c, &rates, &limits, &one, 1, &result, &err), MU_ERR_UNAVAILABLE);
    assert_non_null(strstr(err.text, "no layout divides"));
}

/* A slow device costs less than its slowness where others take over, all of it where there are none. */
static void test_search_slow_device_is_relieved_by_the_other_replicas(void **state)
{
    (void)state;
    struct mu_cluster c = cluster_from(small);
    struct mu_forecast_model m = model(1024);
    struct mu_forecast_rates rates;
    mu_forecast_rates_init(&rates);
    for (uint32_t dp = 1; dp <= 32; dp *= 2) {
        struct mu_forecast_plan p = {.tp = 4,
                                     .pp = 1,
                                     .dp = dp,
                                     .micro = 1,
                                     .virtual = 1,
                                     .recompute = MU_RECOMPUTE_NONE,
                                     .fused_attention = true,
                                     .bf16 = true};
        double before = 0;
        for (double slow = 1; slow < 5; slow += 0.5) {
            c.slow_device = slow;
            double compute = mu_forecast_of(&m, &c, &p, &rates, NULL).compute_s;
            c.slow_device = 1;
            double usual = mu_forecast_of(&m, &c, &p, &rates, NULL).compute_s;
            double best = dp / (dp - 1 + 1 / slow);
            assert_true(compute >= before);
            assert_true(compute > usual * best * (1 - 1e-9) && compute < usual * (best + 2.0 * dp / 1024) * (1 + 1e-9));
            before = compute;
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_search_lists_what_fits_the_best_first),
        cmocka_unit_test(test_search_finds_the_best_of_all_degrees),
        cmocka_unit_test(test_search_more_failures_and_less_storage_leave_less),
        cmocka_unit_test(test_search_failures_that_leave_nothing_are_told),
        cmocka_unit_test(test_search_what_does_not_fit_says_by_how_much),
        cmocka_unit_test(test_search_slow_device_is_relieved_by_the_other_replicas),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
