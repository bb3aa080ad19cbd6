/* links: mu_plan */
#include "plan/cost.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>

#include "common/rng.h"
#include "plan/forecast.h"
#include "plan/memory.h"
#include "tests/lib/sanitized.h"

/* Rates that make sums easy: only what a test looks at costs anything. */
static const struct mu_cost_rates free_rates = {
    .flops = 1e30, .memory_bytes_per_second = 1e30, .link_bytes_per_second = 1e30};

static struct mu_job_spec job(uint32_t layers, uint32_t slices, uint32_t leaves, uint32_t accumulate)
{
    struct mu_job_spec s;
    mu_job_spec_init(&s);
    strcpy(s.name, "a");
    strcpy(s.data.path, "/a");
    s.data.tokens = MU_TOKENS_LLMC;
    s.model = (struct mu_model_config){.family = MU_FAMILY_LLAMA,
                                       .layers = layers,
                                       .heads = 8,
                                       .channels = 512,
                                       .hidden = 1024,
                                       .context = 256,
                                       .vocab = 1024,
                                       .slices = slices};
    s.batch.micro = 4;
    s.batch.accumulate = accumulate;
    s.batch.length = 256;
    s.batch.sequences = leaves * 4 * accumulate;
    s.steps = 10;
    struct mu_error err = {0};
    if (mu_job_spec_check(&s, &err))
        fail_msg("%s", err.text);
    return s;
}

static void near(double got, double want)
{
    if (!(got > want * (1 - 1e-9) && got < want * (1 + 1e-9)))
        fail_msg("%.12g, expected %.12g", got, want);
}

/* 1024 tokens; matrices of a layer: 512 * (3 * 512 + 512 + 2 * 1024 + 1024) weights. */
static const double layer_flops = 1024.0 * (2 * 512.0 * (3 * 512 + 512 + 2 * 1024 + 1024) + 2.0 * 256 * 512);
static const double head_flops = 1024.0 * 2 * 512 * 1024;

static void test_cost_one_worker_is_the_sum_of_its_products(void **state)
{
    (void)state;
    struct mu_job_spec s = job(6, 1, 8, 2);
    struct mu_cost_rates r = free_rates;
    r.flops = 1e11;
    struct mu_layout layout;
    mu_layout_init(&layout, 1, 6);
    struct mu_cost cost = mu_cost_of_layout(&s, &layout, &r);
    near(cost.step_s, 16 * 3 * (6 * layer_flops + head_flops) / 1e11);
    assert_true(cost.bubble_s < 1e-9 && cost.tensor_s == 0 && cost.reduce_s == 0 && cost.vote_s == 0);
    s.parallel.recompute = MU_RECOMPUTE_FULL;
    near(mu_cost_of_layout(&s, &layout, &r).step_s, 16 * (4 * 6 * layer_flops + 3 * head_flops) / 1e11);
    /* The busiest of three replicas has 3 of the 8 leaves. */
    s.parallel.recompute = MU_RECOMPUTE_NONE;
    mu_layout_init(&layout, 3, 6);
    near(mu_cost_of_layout(&s, &layout, &r).step_s, 6 * 3 * (6 * layer_flops + head_flops) / 1e11);
}

static void test_cost_pipeline_has_the_bubble_of_the_paper(void **state)
{
    (void)state;
    struct mu_job_spec s = job(6, 1, 8, 2);
    s.model.vocab = 64; /* a head that costs next to nothing, so that stages are equal */
    struct mu_cost_rates r = free_rates;
    r.flops = 1e11;
    struct mu_layout layout = {.tp = 1, .pp = 3, .dp = 2, .stage_first = {0, 2, 4, 6}};
    struct mu_cost cost = mu_cost_of_layout(&s, &layout, &r);
    double stage = 2 * 3 * layer_flops / 1e11, head = 3 * 1024.0 * 2 * 512 * 64 / 1e11;
    /* 4 leaves of 2 micro-batches: m = 8, p - 1 = 2 more. */
    near(cost.step_s, (8 + 2) * stage + 8 * head);
    assert_true(cost.bubble_s > 1.99 * stage && cost.bubble_s < 2.01 * stage);
    r.latency_s = 0.5; /* 2 borders there and back; reduce: 2 (1 + 1); vote: 2 * 3 levels */
    near(mu_cost_of_layout(&s, &layout, &r).step_s, cost.step_s + 0.5 * (2 * 2 + 4 + 6));
}

static void test_cost_tensor_exchanges_and_slices(void **state)
{
    (void)state;
    struct mu_job_spec s = job(6, 4, 8, 1);
    struct mu_cost_rates r = free_rates;
    struct mu_layout layout = {.tp = 4, .pp = 1, .dp = 1, .stage_first = {0, 6}};
    r.link_bytes_per_second = 1e9;
    double rows = 1024.0 * 512 * 4 * 3 / 4 / 1e9;
    struct mu_cost cost = mu_cost_of_layout(&s, &layout, &r);
    near(cost.step_s, 8 * (6 * 10 + 4) * rows);
    near(cost.tensor_s, cost.step_s);
    s.parallel.recompute = MU_RECOMPUTE_FULL;
    near(mu_cost_of_layout(&s, &layout, &r).step_s, 8 * (6 * 13 + 4) * rows);
    s.parallel.recompute = MU_RECOMPUTE_NONE;
    r = free_rates;
    r.flops = 1e11;
    near(mu_cost_of_layout(&s, &layout, &r).step_s, 8 * 3 * (6 * layer_flops + head_flops) / 4 / 1e11);
    r.slice_cost = 0.1; /* four slices: twice */
    near(mu_cost_of_layout(&s, &layout, &r).step_s, 8 * 3 * (6 * layer_flops * 1.2 + head_flops) / 4 / 1e11);
}

static void test_cost_sums_over_replicas(void **state)
{
    (void)state;
    struct mu_job_spec s = job(6, 1, 8, 1);
    struct mu_model_spec model;
    mu_model_spec_init(&model, &s.model);
    double bytes = 4.0 * (double)model.parameter_count;
    struct mu_cost_rates r = free_rates;
    r.link_bytes_per_second = 1e9;
    struct mu_layout layout;
    mu_layout_init(&layout, 4, 6);
    near(mu_cost_of_layout(&s, &layout, &r).reduce_s, bytes * 2 * 3 / 4 / 1e9); /* as a ring */
    mu_layout_init(&layout, 3, 6);                                              /* leaves 3, 3, 2: roots 2, 2, 1 */
    near(mu_cost_of_layout(&s, &layout, &r).reduce_s, bytes * 2 / 3 * (5.0 / 3 + 1) / 1e9);
    r = free_rates;
    r.memory_bytes_per_second = 1e9;
    mu_layout_init(&layout, 4, 6);
    struct mu_cost cost = mu_cost_of_layout(&s, &layout, &r);
    near(cost.leaf_sum_s, bytes * 3 / 1e9);
    near(cost.update_s, bytes * 7 / 1e9);
    layout.sharded = true;
    near(mu_cost_of_layout(&s, &layout, &r).update_s, bytes * 7 / 4 / 1e9);
}

static void test_cost_stages_balance_head_and_embedding(void **state)
{
    (void)state;
    struct mu_job_spec s = job(12, 1, 8, 1);
    struct mu_cost_rates r = free_rates;
    uint16_t first[MU_STAGES_MAX + 1];
    r.flops = 1e11;
    s.model.vocab = (uint32_t)(2 * layer_flops / (1024.0 * 2 * 512)); /* the head takes as long as two layers */
    mu_cost_balance_stages(&s, &r, 1, 2, NULL, first);
    assert_int_equal(first[1], 7);
    assert_int_equal(first[2], 12);
    mu_cost_balance_stages(&s, &r, 1, 4, NULL,
                           first); /* 14 units over 4: 3 or 4 each, the last with at most 2 layers */
    assert_int_equal(first[4], 12);
    for (uint32_t p = 0; p < 4; p++) {
        int layers = first[p + 1] - first[p];
        assert_true(layers >= (p == 3 ? 1 : 3) && layers <= (p == 3 ? 2 : 4));
    }
    mu_cost_balance_stages(&s, &r, 1, 12, NULL, first);
    for (uint32_t p = 0; p <= 12; p++)
        assert_int_equal(first[p], p);
    /* Against all splits of 7 layers into 3 stages. */
    s = job(7, 1, 8, 1);
    s.model.vocab = 1u << 15;
    mu_cost_balance_stages(&s, &r, 1, 3, NULL, first);
    struct mu_layout layout = {.tp = 1, .pp = 3, .dp = 8};
    memcpy(layout.stage_first, first, 4 * sizeof first[0]);
    double own = mu_cost_of_layout(&s, &layout, &r).compute_s;
    for (uint16_t a = 1; a < 6; a++)
        for (uint16_t b = (uint16_t)(a + 1); b < 7; b++) {
            layout.stage_first[1] = a;
            layout.stage_first[2] = b;
            assert_true(mu_cost_of_layout(&s, &layout, &r).compute_s >= own * (1 - 1e-9));
        }
}

static void test_cost_calibration_meets_the_measurement(void **state)
{
    (void)state;
    struct mu_job_spec s = job(6, 2, 8, 2);
    struct mu_cost_rates r;
    mu_cost_rates_init(&r);
    struct mu_layout layout = {.tp = 2, .pp = 2, .dp = 2, .stage_first = {0, 3, 6}};
    mu_cost_calibrate(&r, &s, &layout, 3.0);
    struct mu_cost_rates alone = r;
    alone.link_bytes_per_second = 1e30;
    alone.latency_s = 0;
    /* 8 micro-batches, less the bubble: 4 leaves of 3 s. */
    struct mu_cost cost = mu_cost_of_layout(&s, &layout, &alone);
    double busy = cost.compute_s - cost.bubble_s;
    assert_true(busy > 11.99 && busy < 12.01);
    struct mu_cost_rates same = r;
    mu_cost_calibrate(&same, &s, &layout, 0);
    mu_cost_calibrate(&same, &s, &layout, -1);
    assert_true(same.flops == r.flops);
    mu_cost_calibrate(&same, &s, &layout, 1e-9); /* less than what is not products: still a finite speed */
    assert_true(same.flops > r.flops && same.flops < 1e30);
}

/* Only GPUs compute in bf16: the same layout is faster, by its products more than by what passes through memory. */
static void test_cost_of_bf16_is_that_of_a_gpu(void **state)
{
    (void)state;
    struct mu_job_spec s = job(6, 2, 8, 2);
    struct mu_layout layout = {.tp = 2, .pp = 2, .dp = 2, .stage_first = {0, 3, 6}};
    struct mu_cost_rates cpu, plain, gpu;
    mu_cost_rates_init(&plain);
    mu_cost_rates_of_job(&cpu, &s);
    assert_memory_equal(&cpu, &plain, sizeof cpu);
    s.compute = MU_COMPUTE_BF16;
    mu_cost_rates_of_job(&gpu, &s);
    const struct mu_device_type *h100 = mu_device_type_named("h100-sxm");
    assert_true(gpu.flops > h100->flops_bf16 / 2 && gpu.flops < h100->flops_bf16);
    assert_true(gpu.memory_bytes_per_second < h100->memory_bytes_per_second);
    assert_true(gpu.flops / cpu.flops > gpu.memory_bytes_per_second / cpu.memory_bytes_per_second);
    assert_true(mu_cost_of_layout(&s, &layout, &gpu).step_s < mu_cost_of_layout(&s, &layout, &cpu).step_s / 10);
}

/* ---- choosing ---- */

static double link = 1.7e9; /* bytes per second */

static struct mu_layout chosen(const struct mu_job_spec *s, uint32_t workers, uint64_t memory,
                               const struct mu_layout *old)
{
    struct mu_cost_rates r;
    mu_cost_rates_init(&r);
    r.link_bytes_per_second = link;
    struct mu_layout layout;
    struct mu_error err = {0};
    char text[256];
    if (mu_layout_choose(s, &r, workers, memory, 1, old, &layout, text, sizeof text))
        fail_msg("%s", text);
    if (mu_layout_check(&layout, s, &err))
        fail_msg("%s", err.text);
    assert_int_equal(layout.idle, 0);
    assert_true(mu_layout_working(&layout) <= workers && strstr(text, "a step expected"));
    if (memory)
        assert_true(mu_memory_of_layout(s, &layout, 1, NULL).total_bytes <= memory);
    return layout;
}

static void expect_grid(struct mu_layout layout, uint32_t tp, uint32_t pp, uint32_t dp)
{
    if (layout.tp != tp || layout.pp != pp || layout.dp != dp)
        fail_msg("tp %u x pp %u x dp %u, expected %u x %u x %u", layout.tp, layout.pp, layout.dp, tp, pp, dp);
}

static void test_choose_uses_replicas_while_leaves_last(void **state)
{
    (void)state;
    struct mu_job_spec s = job(6, 1, 8, 1);
    for (uint32_t workers = 1; workers <= 8; workers++) {
        struct mu_layout layout = chosen(&s, workers, 0, NULL);
        assert_int_equal(layout.tp * layout.pp, 1);
        assert_int_equal((8 + layout.dp - 1) / layout.dp, (8 + workers - 1) / workers);
    }
    s.workers.max = 3;
    expect_grid(chosen(&s, 8, 0, NULL), 1, 1, 3);
    /* Twice as many workers as leaves: slices have work for the others. */
    s.workers.max = 16;
    s.model.slices = 2;
    expect_grid(chosen(&s, 16, 0, NULL), 2, 1, 8);
    /* 6 replicas of 8 leaves take the time of 2; 3 pairs that of 3 halves. */
    expect_grid(chosen(&s, 6, 0, NULL), 2, 1, 3);
}

static void test_choose_obeys_given_degrees(void **state)
{
    (void)state;
    struct mu_job_spec s = job(6, 4, 8, 2);
    for (uint32_t tp = 1; tp <= 4; tp *= 2)
        for (uint32_t pp = 1; pp <= 6; pp++) {
            s.parallel.tp = tp;
            s.parallel.pp = pp;
            struct mu_layout layout = chosen(&s, 24, 0, NULL);
            assert_int_equal(layout.tp, tp);
            assert_int_equal(layout.pp, pp);
            s.parallel.dp = 1;
            expect_grid(chosen(&s, 24, 0, NULL), tp, pp, 1);
            s.parallel.dp = 0;
        }
    s.parallel.tp = s.parallel.pp = 2;
    s.parallel.dp = 3;
    struct mu_cost_rates r;
    mu_cost_rates_init(&r);
    struct mu_layout layout;
    char text[256];
    assert_int_equal(mu_layout_choose(&s, &r, 11, 0, 1, NULL, &layout, text, sizeof text), MU_ERR_UNAVAILABLE);
    assert_string_equal(text, "11 workers can take part, but parallel (tp * pp * dp as given) needs 12: 1 short");
    expect_grid(chosen(&s, 12, 0, NULL), 2, 2, 3);
    s.parallel.dp = 0;
    s.parallel.optimizer_sharding = true;
    assert_true(chosen(&s, 12, 0, NULL).sharded);
    s = job(6, 1, 40, 1);
    s.parallel.optimizer_sharding = true;
    s.parallel.pp = 1;
    struct mu_layout wide = chosen(&s, 40, 0, NULL); /* beyond a mesh too */
    assert_true(wide.sharded && wide.dp >= MU_MESH_WORLD_MAX);
    s.parallel.dp = 40;
    assert_int_equal(chosen(&s, 40, 0, NULL).dp, 40);
}

static double uniform(uint64_t *seed)
{
    return (double)(mu_splitmix64(seed) >> 11) * 0x1p-53;
}

/* Costs of any kind: random speeds, embedding and head, against every split. */
static double best_of_all_splits(const struct mu_job_spec *s, const struct mu_cost_rates *r, const double *slowness,
                                 struct mu_layout *layout, uint32_t stage)
{
    uint32_t layers = s->model.layers, pp = layout->pp;
    if (stage == pp) {
        double slowest = 0;
        struct mu_model_spec model;
        mu_model_spec_init(&model, &s->model);
        for (uint32_t p = 0; p < pp; p++) {
            double seconds = mu_cost_stage_layers(s, &model, r, layout, p) * slowness[p];
            slowest = seconds > slowest ? seconds : slowest;
        }
        return slowest;
    }
    double best = INFINITY;
    uint32_t low = stage + 1 == pp ? layers : layout->stage_first[stage] + 1u;
    for (uint32_t end = low; end + (pp - 1 - stage) <= layers; end++) {
        layout->stage_first[stage + 1] = (uint16_t)end;
        double slowest = best_of_all_splits(s, r, slowness, layout, stage + 1);
        best = slowest < best ? slowest : best;
    }
    return best;
}

static void test_cost_stages_suit_the_speeds_of_their_workers(void **state)
{
    (void)state;
    uint64_t seed = 20;
    uint32_t uneven = 0;
    for (int round = 0; round < 300; round++) {
        uint32_t pp = 2 + (uint32_t)(uniform(&seed) * 4), layers = pp + (uint32_t)(uniform(&seed) * 8);
        struct mu_job_spec s = job(layers, 1, 8, 1);
        struct mu_cost_rates r;
        mu_cost_rates_init(&r);
        r.embedding_layers = 3 * uniform(&seed);
        r.head_layers = 6 * uniform(&seed);
        double slowness[8];
        for (uint32_t p = 0; p < pp; p++)
            slowness[p] = 1 + 3 * uniform(&seed) * (uniform(&seed) < 0.5);
        struct mu_layout layout = {.tp = 1, .pp = pp, .dp = 1}, other = layout;
        struct mu_model_spec model;
        mu_model_spec_init(&model, &s.model);
        mu_cost_balance_stages(&s, &r, 1, pp, slowness, layout.stage_first);
        assert_int_equal(mu_layout_check(&layout, &s, NULL), MU_OK);
        double slowest = 0;
        for (uint32_t p = 0; p < pp; p++) {
            double seconds = mu_cost_stage_layers(&s, &model, &r, &layout, p) * slowness[p];
            slowest = seconds > slowest ? seconds : slowest;
        }
        other.stage_first[0] = 0;
        double best = best_of_all_splits(&s, &r, slowness, &other, 0);
        assert_true(slowest <= best * (1 + 1e-12) && slowest >= best * (1 - 1e-12));
        mu_cost_balance_stages(&s, &r, 1, pp, NULL, other.stage_first);
        uneven += memcmp(other.stage_first, layout.stage_first, sizeof layout.stage_first) != 0;
        assert_true(mu_cost_of_stages(&s, &layout, &r, slowness) > 0);
    }
    assert_true(uneven > 50);
}

static void test_choose_fits_into_memory_or_says_what_is_short(void **state)
{
    (void)state;
    struct mu_job_spec s = job(24, 4, 8, 1);
    s.model.channels = 2048;
    s.model.hidden = 5632;
    struct mu_layout one;
    mu_layout_init(&one, 1, 24);
    uint64_t whole = mu_memory_of_layout(&s, &one, 1, NULL).total_bytes;
    /* Too little for a whole replica: columns get smaller, and two replicas stay. */
    struct mu_layout layout = chosen(&s, 16, whole / 2, NULL);
    assert_true(layout.tp * layout.pp >= 2 && layout.dp >= 2);
    struct mu_cost_rates r;
    mu_cost_rates_init(&r);
    char text[256];
    assert_int_equal(mu_layout_choose(&s, &r, 2, whole / 8, 1, NULL, &layout, text, sizeof text), MU_ERR_UNAVAILABLE);
    struct mu_layout small = {.tp = 2, .pp = 1, .dp = 1, .stage_first = {0, 24}};
    struct mu_layout other = {.tp = 1, .pp = 2, .dp = 1};
    mu_cost_balance_stages(&s, &r, 1, 2, NULL, other.stage_first);
    uint64_t need = mu_memory_of_layout(&s, &small, 1, NULL).total_bytes;
    uint64_t other_need = mu_memory_of_layout(&s, &other, 1, NULL).total_bytes;
    need = other_need < need ? other_need : need;
    char expected[256];
    snprintf(expected, sizeof expected, "needs %llu MiB a worker, %llu MiB are there: %llu MiB short",
             (unsigned long long)((need + (1 << 20) - 1) >> 20), (unsigned long long)(whole / 8 >> 20),
             (unsigned long long)(((need + (1 << 20) - 1) >> 20) - (whole / 8 >> 20)));
    if (!strstr(text, expected) || !strstr(text, "no layout of 2 workers fits in memory: the smallest ("))
        fail_msg("'%s' lacks '%s'", text, expected);
    /* Sharded moments fit where replicated ones do not. */
    s = job(24, 1, 8, 1);
    s.model.channels = 2048;
    s.model.hidden = 5632;
    s.parallel.pp = 1;
    struct mu_layout four;
    mu_layout_init(&four, 4, 24);
    whole = mu_memory_of_layout(&s, &four, 1, NULL).total_bytes;
    assert_int_equal(mu_layout_choose(&s, &r, 4, whole * 9 / 10, 1, NULL, &layout, text, sizeof text),
                     MU_ERR_UNAVAILABLE);
    s.parallel.optimizer_sharding = true;
    assert_int_equal(chosen(&s, 4, whole * 9 / 10, NULL).dp, 4);
}

static void test_choose_keeps_the_old_layout_unless_it_gains(void **state)
{
    (void)state;
    struct mu_job_spec s = job(6, 2, 8, 4);
    link = 1e11; /* computing decides */
    expect_grid(chosen(&s, 4, 0, NULL), 1, 1, 4);
    struct mu_layout five;
    mu_layout_init(&five, 5, 6); /* as fast as four or seven: 2 leaves for the busiest */
    s.model.slices = 1;
    s.parallel.pp = 1;
    five.idle = 3;
    expect_grid(chosen(&s, 7, 0, &five), 1, 1, 5);
    expect_grid(chosen(&s, 7, 0, NULL), 1, 1, 7);
    expect_grid(chosen(&s, 8, 0, &five), 1, 1, 8);
    expect_grid(chosen(&s, 4, 0, &five), 1, 1, 4); /* too large now */
    /* Replicas of stages: two slots in 34 are bubble, and embedding and head make a stage longer. */
    s = job(6, 1, 8, 8);
    struct mu_layout stages = {.tp = 1, .pp = 2, .dp = 2, .stage_first = {0, 3, 6}};
    struct mu_cost_rates r;
    mu_cost_rates_init(&r);
    r.link_bytes_per_second = link;
    struct mu_layout best = chosen(&s, 4, 0, NULL);
    expect_grid(best, 1, 1, 4);
    double gain = 1 - mu_cost_of_layout(&s, &best, &r).step_s / mu_cost_of_layout(&s, &stages, &r).step_s;
    assert_true(gain > 0.03);
    expect_grid(chosen(&s, 4, 0, &stages), 1, 1, 4);
    s.model.vocab = 16; /* next to no head: now they are close */
    s.batch.accumulate = 64;
    s.batch.sequences = 8 * 4 * 64;
    gain = 1 - mu_cost_of_layout(&s, &best, &r).step_s / mu_cost_of_layout(&s, &stages, &r).step_s;
    assert_true(gain > 0 && gain < 0.03);
    expect_grid(chosen(&s, 4, 0, &stages), 1, 2, 2);
    link = 1.7e9;
    struct mu_layout alone = {.tp = 1, .pp = 4, .dp = 1, .stage_first = {0, 1, 2, 4, 6}};
    assert_true(chosen(&s, 4, 0, &alone).dp > 1); /* nobody else holds what a stage holds */
    struct mu_layout invalid = stages;
    invalid.stage_first[2] = 5;
    assert_int_equal(mu_layout_check(&invalid, &s, NULL), MU_ERR_INVALID);
    expect_grid(chosen(&s, 4, 0, &invalid), 1, 1, 4);
}

/* From micro-batches that follow the model the rates come back, as far as predictions of other jobs go. */
static void test_rates_fit_measured_micro_batches(void **state)
{
    (void)state;
    enum { SAMPLES = 12 };
    struct mu_job_spec specs[SAMPLES];
    struct mu_cost_sample samples[SAMPLES];
    struct mu_cost_rates truth, fitted;
    mu_cost_rates_init(&truth);
    fitted = truth;
    truth.flops = 4e10;
    truth.rows_bytes_per_second = 3e9;
    truth.fixed_s = 2e-4;
    truth.slice_cost = 0.1;
    struct mu_layout one = {.tp = 1, .pp = 1, .dp = 1, .stage_first = {0, 2}};
    for (uint32_t i = 0; i < SAMPLES; i++) {
        specs[i] = job(2, 1 + i % 2, 1, 1);
        specs[i].model.channels = 64u << (i / 2 % 3);
        specs[i].model.hidden = 4 * specs[i].model.channels;
        specs[i].batch.length = i < SAMPLES / 2 ? 8 : 64;
        samples[i] = (struct mu_cost_sample){&specs[i], mu_cost_of_layout(&specs[i], &one, &truth).compute_s};
    }
    assert_true(mu_cost_fit(&fitted, samples, SAMPLES) < 0.01);
    struct mu_job_spec other = job(2, 2, 1, 1);
    other.model.channels = 192;
    other.model.hidden = 768;
    other.batch.length = 32;
    double ratio =
        mu_cost_of_layout(&other, &one, &fitted).compute_s / mu_cost_of_layout(&other, &one, &truth).compute_s;
    assert_true(ratio > 0.97 && ratio < 1.03);
}

static void test_choose_meets_the_fewest_workers(void **state)
{
    (void)state;
    /* So little to compute that exchanging costs more: one worker is fastest, but eight were asked for. */
    struct mu_job_spec s = job(1, 1, 8, 1);
    s.model.channels = 8;
    s.model.hidden = 8;
    s.model.vocab = 8;
    s.batch.length = 1;
    struct mu_cost_rates r;
    mu_cost_rates_init(&r);
    r.fixed_s = 0;
    struct mu_layout layout;
    char text[256];
    assert_int_equal(mu_layout_choose(&s, &r, 8, 0, 1, NULL, &layout, text, sizeof text), MU_OK);
    expect_grid(layout, 1, 1, 2); /* two, so that each is replaceable */
    s.workers.min = 8;
    assert_int_equal(mu_layout_choose(&s, &r, 8, 0, 1, NULL, &layout, text, sizeof text), MU_OK);
    expect_grid(layout, 1, 1, 8);
    s.workers.min = 1;
    assert_int_equal(mu_layout_choose(&s, &r, 1, 0, 1, NULL, &layout, text, sizeof text), MU_OK);
    expect_grid(layout, 1, 1, 1);
}

static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void test_choose_is_fast_and_deterministic_at_scale(void **state)
{
    (void)state;
    struct mu_job_spec s = job(128, 8, 16384, 4);
    s.model.channels = 16384;
    s.model.hidden = 53248;
    s.model.heads = 128;
    s.model.vocab = 128256;
    s.model.context = s.batch.length = 2048;
    s.batch.micro = 1;
    s.batch.sequences = 16384 * 4;
    s.parallel.recompute = MU_RECOMPUTE_FULL;
    const uint64_t memories[] = {0, 1ull << 30, 80ull << 30, 400ull << 30};
    struct mu_cost_rates r;
    mu_cost_rates_init(&r);
    for (size_t i = 0; i < 4; i++) {
        struct mu_layout first, second;
        char text[256], again[256];
        double start = seconds_now();
        enum mu_status status = mu_layout_choose(&s, &r, 16384, memories[i], 8, NULL, &first, text, sizeof text);
        double took = seconds_now() - start;
        print_message("%s: %.0f ms\n", text, took * 1e3);
        assert_int_equal(status, i == 1 ? MU_ERR_UNAVAILABLE : MU_OK);
        assert_int_equal(mu_layout_choose(&s, &r, 16384, memories[i], 8, NULL, &second, again, sizeof again), status);
        assert_string_equal(text, again);
        assert_true(status || mu_layout_equal(&first, &second));
        assert_true(status || mu_layout_check(&first, &s, NULL) == MU_OK);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cost_one_worker_is_the_sum_of_its_products),
        cmocka_unit_test(test_cost_pipeline_has_the_bubble_of_the_paper),
        cmocka_unit_test(test_cost_tensor_exchanges_and_slices),
        cmocka_unit_test(test_cost_sums_over_replicas),
        cmocka_unit_test(test_cost_stages_balance_head_and_embedding),
        cmocka_unit_test(test_cost_stages_suit_the_speeds_of_their_workers),
        cmocka_unit_test(test_cost_calibration_meets_the_measurement),
        cmocka_unit_test(test_cost_of_bf16_is_that_of_a_gpu),
        cmocka_unit_test(test_choose_uses_replicas_while_leaves_last),
        cmocka_unit_test(test_choose_obeys_given_degrees),
        cmocka_unit_test(test_choose_fits_into_memory_or_says_what_is_short),
        cmocka_unit_test(test_choose_keeps_the_old_layout_unless_it_gains),
        cmocka_unit_test(test_rates_fit_measured_micro_batches),
        cmocka_unit_test(test_choose_meets_the_fewest_workers),
        cmocka_unit_test(test_choose_is_fast_and_deterministic_at_scale),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
