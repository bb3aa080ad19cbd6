/* links: mu_plan */
#include "plan/balance.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "common/rng.h"

enum { WORLD_MAX = 64 };

static double uniform(uint64_t *seed)
{
    return (double)(mu_splitmix64(seed) >> 11) * 0x1p-53;
}

static void check_counts(uint32_t leaves, uint32_t world, const uint32_t *counts)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < world; i++) {
        assert_true(counts[i] >= 1);
        sum += counts[i];
    }
    assert_int_equal(sum, leaves);
}

static void test_balance_without_measurements_is_equal(void **state)
{
    (void)state;
    const struct mu_balance_rank unknown[WORLD_MAX] = {{0}};
    uint32_t counts[WORLD_MAX];
    for (uint32_t leaves = 1; leaves <= 130; leaves++) {
        for (uint32_t world = 1; world <= leaves && world <= WORLD_MAX; world++) {
            mu_balance_leaves(leaves, world, unknown, counts);
            for (uint32_t i = 0; i < world; i++)
                assert_int_equal(counts[i], leaves / world + (i < leaves % world));
        }
    }
}

static void test_balance_of_equal_ranks_reaches_the_equal_time(void **state)
{
    (void)state;
    struct mu_balance_rank ranks[WORLD_MAX];
    uint32_t counts[WORLD_MAX];
    for (uint32_t i = 0; i < WORLD_MAX; i++)
        ranks[i] = (struct mu_balance_rank){.fixed_seconds = 0.01, .seconds_per_leaf = 0.3};
    for (uint32_t leaves = 1; leaves <= 130; leaves++) {
        for (uint32_t world = 1; world <= leaves && world <= WORLD_MAX; world++) {
            mu_balance_leaves(leaves, world, ranks, counts);
            check_counts(leaves, world, counts);
            for (uint32_t i = 0; i < world; i++)
                assert_true(counts[i] <= (leaves + world - 1) / world);
        }
    }
}

static double seconds_of(uint32_t world, const struct mu_balance_rank *ranks, const uint32_t *counts)
{
    double slowest = 0;
    for (uint32_t i = 0; i < world; i++)
        slowest = fmax(slowest, ranks[i].fixed_seconds + ranks[i].seconds_per_leaf * counts[i]);
    return slowest;
}

/* The least slowest time over all splits, by dynamic programming. */
static double best_by_search(uint32_t leaves, uint32_t world, const struct mu_balance_rank *ranks)
{
    double best[64], next[64];
    for (uint32_t n = 0; n <= leaves; n++)
        best[n] = n == 0 ? 0.0 : INFINITY;
    for (uint32_t i = 0; i < world; i++) {
        for (uint32_t n = 0; n <= leaves; n++) {
            next[n] = INFINITY;
            for (uint32_t b = 1; b <= n; b++) {
                double own = ranks[i].fixed_seconds + ranks[i].seconds_per_leaf * b;
                if (ranks[i].leaves_max > 0 && b > ranks[i].leaves_max)
                    own = INFINITY;
                next[n] = fmin(next[n], fmax(best[n - b], own));
            }
        }
        memcpy(best, next, sizeof best);
    }
    return best[leaves];
}

static void test_balance_is_optimal(void **state)
{
    (void)state;
    uint64_t seed = 11;
    for (int round = 0; round < 3000; round++) {
        uint32_t world = 1 + (uint32_t)(mu_splitmix64(&seed) % 6),
                 leaves = world + (uint32_t)(mu_splitmix64(&seed) % 20);
        struct mu_balance_rank ranks[WORLD_MAX];
        uint64_t room = 0;
        for (uint32_t i = 0; i < world; i++) {
            ranks[i] = (struct mu_balance_rank){.fixed_seconds = uniform(&seed) * (round % 3),
                                                .seconds_per_leaf = 0.05 + uniform(&seed)};
            if (round % 4 == 0)
                ranks[i].leaves_max = 1 + (uint32_t)(mu_splitmix64(&seed) % leaves);
            room += ranks[i].leaves_max ? ranks[i].leaves_max : leaves;
        }
        if (room < leaves)
            continue;
        uint32_t counts[WORLD_MAX];
        mu_balance_leaves(leaves, world, ranks, counts);
        check_counts(leaves, world, counts);
        double got = seconds_of(world, ranks, counts), best = best_by_search(leaves, world, ranks);
        if (got > best * (1 + 1e-12))
            fail_msg("round %d: %g seconds, best %g", round, got, best);
        for (uint32_t i = 0; i < world; i++)
            assert_true(ranks[i].leaves_max == 0 || counts[i] <= ranks[i].leaves_max);
    }
}

static void test_balance_slow_rank_gets_fewer(void **state)
{
    (void)state;
    const struct mu_balance_rank ranks[] = {{0, 0.1, 0}, {0, 0.2, 0}, {0, 0.1, 0}, {0, 0.1, 0}};
    uint32_t counts[4];
    mu_balance_leaves(56, 4, ranks, counts);
    assert_int_equal(counts[0], 16);
    assert_int_equal(counts[1], 8);
    assert_int_equal(counts[2], 16);
    assert_int_equal(counts[3], 16);
    assert_int_equal(mu_balance_root_count(56, 4, counts), 6); /* [24, 40) and [40, 56) are two blocks each */
}

static void test_balance_unmeasured_and_absurd_ranks_count_as_average(void **state)
{
    (void)state;
    const double values[] = {0.0, -1.0, NAN, INFINITY, 1e300, 1e-300};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        const struct mu_balance_rank ranks[] = {{0, 0.1, 0}, {NAN, values[i], 0}, {-3, 0.3, 0}};
        const struct mu_balance_rank average[] = {{0, 0.1, 0}, {0, 0.2, 0}, {0, 0.3, 0}};
        uint32_t counts[3], expected[3];
        mu_balance_leaves(110, 3, ranks, counts);
        mu_balance_leaves(110, 3, average, expected);
        assert_memory_equal(counts, expected, sizeof counts);
    }
}

static void test_balance_impossible_bounds_are_ignored(void **state)
{
    (void)state;
    const struct mu_balance_rank ranks[] = {{0, 0.1, 1}, {0, 0.1, 1}};
    uint32_t counts[2];
    mu_balance_leaves(8, 2, ranks, counts);
    assert_int_equal(counts[0], 4);
    assert_int_equal(counts[1], 4);
}

/* The aligned split never has more roots than the plain one of the same time, and on the whole has clearly fewer. */
static void test_balance_prefers_few_roots(void **state)
{
    (void)state;
    struct mu_balance_rank ranks[WORLD_MAX];
    uint32_t counts[WORLD_MAX];
    uint64_t chosen = 0, equal = 0;
    for (uint32_t world = 2; world <= WORLD_MAX; world++) {
        for (uint32_t i = 0; i < world; i++)
            ranks[i] = (struct mu_balance_rank){.seconds_per_leaf = 0.2};
        for (uint32_t leaves = 2 * world; leaves <= 512; leaves += 31) {
            mu_balance_leaves(leaves, world, ranks, counts);
            uint32_t own = mu_balance_root_count(leaves, world, counts),
                     plain = mu_balance_root_count(leaves, world, NULL);
            assert_true(own <= plain);
            chosen += own;
            equal += plain;
        }
    }
    print_message("roots: %llu, with equal counts %llu\n", (unsigned long long)chosen, (unsigned long long)equal);
    assert_true(chosen * 100 < equal * 95);
}

static void test_balance_large_worlds_and_extreme_speeds(void **state)
{
    (void)state;
    enum { LARGE = 65536 };
    struct mu_balance_rank *ranks = calloc(LARGE, sizeof *ranks);
    uint32_t *counts = calloc(LARGE, sizeof *counts);
    assert_non_null(ranks);
    assert_non_null(counts);
    uint64_t seed = 12;
    for (uint32_t i = 0; i < LARGE; i++)
        ranks[i] = (struct mu_balance_rank){.fixed_seconds = uniform(&seed),
                                            .seconds_per_leaf = exp(40 * uniform(&seed) - 20)};
    mu_balance_leaves(LARGE, LARGE, ranks, counts);
    check_counts(LARGE, LARGE, counts);
    mu_balance_leaves(LARGE, 1000, ranks, counts);
    check_counts(LARGE, 1000, counts);
    mu_balance_leaves(LARGE, 1, ranks, counts);
    assert_int_equal(counts[0], LARGE);
    free(ranks);
    free(counts);
}

/* A slow replica gets fewer leaves; noise changes nothing, nor a gain of less than 3 %. */
static void test_balance_by_measured_speeds(void **state)
{
    (void)state;
    const double slow[] = {0.1, 0.2, 0.1, 0}, noisy[] = {0.1, 0.111, 0.094, 0.1};
    const uint32_t equal[] = {16, 16, 16, 16}, slight[] = {17, 15, 17, 15};
    uint32_t counts[4];
    mu_balance_by_seconds(64, 4, slow, counts); /* who is not measured counts as ordinary */
    check_counts(64, 4, counts);
    assert_in_range(counts[1], 8, 10);
    double saved = mu_balance_saved(4, slow, equal, counts), best = 3.2 - 64 * 0.2 / 7;
    assert_true(saved > 0.8 * best && saved <= best + 1e-9);
    assert_true(mu_balance_saved(4, slow, counts, equal) == 0);
    assert_true(mu_balance_saved(4, slow, equal, equal) == 0);
    mu_balance_by_seconds(64, 4, noisy, counts);
    assert_memory_equal(counts, equal, sizeof counts);
    const double slightly[] = {0.1, 0.102, 0.1, 0.1};
    assert_true(mu_balance_saved(4, slightly, equal, slight) == 0);
    double values[] = {0.3, 0, 0.1, 0.2, 0.4};
    assert_true(mu_balance_median(5, values) == 0.2 && mu_balance_median(1, (double[]){0}) == 0);
}

static void test_balance_root_count_of_known_splits(void **state)
{
    (void)state;
    assert_int_equal(mu_balance_root_count(64, 4, NULL), 4);
    assert_int_equal(mu_balance_root_count(64, 3, NULL), 11); /* 3.7 times a ring */
    assert_int_equal(mu_balance_root_count(48, 3, NULL), 3);
    assert_int_equal(mu_balance_root_count(7, 1, NULL), 1);
    const uint32_t counts[] = {1, 6, 1};
    assert_int_equal(mu_balance_root_count(8, 3, counts), 1 + 4 + 1);
}

static void test_balance_poor_leaf_numbers_are_warned_of(void **state)
{
    (void)state;
    char text[MU_BALANCE_WARNING_SIZE];
    assert_true(mu_plan_leaf_warning(64, 3, text, sizeof text));
    assert_string_equal(
        text,
        "64 leaves fit 3 workers poorly: gradients travel as 3.7 partial sums per worker instead of 1; 48 leaves would "
        "fit (batch.sequences / (micro * accumulate))");
    assert_true(mu_plan_leaf_warning(8, 7, text, sizeof text));
    assert_non_null(strstr(text, "43 % of the compute time is waiting"));
    assert_non_null(strstr(text, "7 leaves would fit"));
    assert_true(mu_plan_leaf_warning(10, 4, text, sizeof text));
    assert_non_null(strstr(text, "17 %"));
    assert_non_null(strstr(text, "8 leaves would fit"));
    static const uint32_t good[][2] = {{8, 1}, {8, 2}, {8, 4},         {8, 8}, {48, 3},
                                       {7, 1}, {7, 7}, {65536, 65536}, {96, 6}};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        assert_false(mu_plan_leaf_warning(good[i][0], good[i][1], text, sizeof text));
        assert_string_equal(text, "");
    }
    /* What is recommended is never warned of. */
    for (uint32_t world = 1; world <= 40; world++) {
        for (uint32_t leaves = world; leaves <= 300; leaves++) {
            if (!mu_plan_leaf_warning(leaves, world, text, sizeof text))
                continue;
            uint32_t better = (uint32_t)strtoul(strrchr(text, ';') + 2, NULL, 10);
            assert_true(better >= world);
            if (mu_plan_leaf_warning(better, world, text, sizeof text))
                fail_msg("%u leaves for %u workers: %s", better, world, text);
        }
    }
}

static void test_balance_in_runs_keeps_their_limit(void **state)
{
    (void)state;
    enum { MANY = 1024, RUNS = 64 };
    static struct mu_balance_rank ranks[MANY], blocks[MANY];
    static uint32_t counts[MANY], free_counts[MANY];
    uint64_t seed = 99;
    for (int round = 0; round < 60; round++) {
        uint32_t world = 1 + (uint32_t)(mu_splitmix64(&seed) % MANY);
        uint32_t leaves = world * (1 + (uint32_t)(mu_splitmix64(&seed) % 20)) + (uint32_t)(mu_splitmix64(&seed) % 7);
        for (uint32_t i = 0; i < world; i++) /* all different; or few slow ones; or none measured */
            ranks[i].seconds_per_leaf = round % 3 == 0   ? 1 + uniform(&seed)
                                        : round % 3 == 1 ? (i % 200 == 7 ? 3 : 1)
                                                         : 0;
        mu_balance_leaves(leaves, world, ranks, free_counts);
        mu_balance_leaves_in_runs(leaves, world, ranks, RUNS, blocks, counts);
        check_counts(leaves, world, counts);
        assert_in_range(mu_balance_run_count(world, counts), 1, RUNS);
        if (mu_balance_run_count(world, free_counts) <= RUNS) /* nothing is given up without need */
            assert_memory_equal(counts, free_counts, world * sizeof *counts);
        mu_balance_leaves_in_runs(leaves, world, ranks, 2, blocks, counts);
        check_counts(leaves, world, counts);
        assert_in_range(mu_balance_run_count(world, counts), 1, 2);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_balance_without_measurements_is_equal),
        cmocka_unit_test(test_balance_of_equal_ranks_reaches_the_equal_time),
        cmocka_unit_test(test_balance_is_optimal),
        cmocka_unit_test(test_balance_slow_rank_gets_fewer),
        cmocka_unit_test(test_balance_unmeasured_and_absurd_ranks_count_as_average),
        cmocka_unit_test(test_balance_impossible_bounds_are_ignored),
        cmocka_unit_test(test_balance_prefers_few_roots),
        cmocka_unit_test(test_balance_large_worlds_and_extreme_speeds),
        cmocka_unit_test(test_balance_in_runs_keeps_their_limit),
        cmocka_unit_test(test_balance_by_measured_speeds),
        cmocka_unit_test(test_balance_root_count_of_known_splits),
        cmocka_unit_test(test_balance_poor_leaf_numbers_are_warned_of),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
