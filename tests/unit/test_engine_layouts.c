/* links: mu_engine mu_storage mu_plan */
#include "engine_testing.h"

#include <math.h>

/* Every layout of a job gives the same weights. With four slices each one up to eight ranks is run, by one of the two
 * families; with fewer slices a sample. MU_TEST_ALL_LAYOUTS=1: all of them for all. */

static const struct mu_model_config gpt2 = {.family = MU_FAMILY_GPT2,
                                            .layers = LAYERS,
                                            .heads = 4,
                                            .channels = 32,
                                            .context = 16,
                                            .vocab = 259,
                                            .dropout = 0.1f,
                                            .slices = 1};
static const struct mu_model_config llama = {.family = MU_FAMILY_LLAMA,
                                             .layers = LAYERS,
                                             .heads = 8,
                                             .kv_heads = 4,
                                             .hidden = 96,
                                             .channels = 64,
                                             .context = 16,
                                             .vocab = 257,
                                             .rope_base = 10000.0,
                                             .slices = 1};

/* What makes a job's bits, and what does not (recompute). */
struct variant {
    const struct mu_model_config *model;
    uint32_t slices;
    enum mu_recompute recompute;
};

/* Result of the undisturbed run of one worker. */
struct reference {
    uint8_t sha[32];
    double loss[6], eval[2];
};

static struct fleet *fleet_of_variant(const struct variant *variant)
{
    struct mu_model_config model = *variant->model;
    model.slices = variant->slices;
    struct fleet *fleet = fleet_of(&model);
    fleet->spec.parallel.recompute = variant->recompute;
    return fleet;
}

static bool all_layouts(void)
{
    const char *text = getenv("MU_TEST_ALL_LAYOUTS");
    return text && text[0] == '1';
}

static void check_finished(struct fleet *fleet, const struct reference *reference)
{
    uint8_t sha[32];
    assert_int_equal(wait_parked(fleet, sha), MU_PARK_FINISHED);
    for (uint32_t step = 0; step < 6; step++)
        if (fleet->loss[step] != 0 && fleet->loss[step] != reference->loss[step])
            fail_msg("loss of step %u: %.17g, alone %.17g", step, fleet->loss[step], reference->loss[step]);
    assert_memory_equal(sha, reference->sha, 32);
    assert_true(fleet->eval_loss[6] == reference->eval[1]);
    assert_true(fleet->eval_loss[4] == 0 || fleet->eval_loss[4] == reference->eval[0]);
}

static void make_reference(const struct variant *variant, struct reference *out)
{
    struct fleet *fleet = fleet_of_variant(variant);
    worker_start_on_cpu(fleet);
    start(fleet, 1);
    assert_int_equal(wait_parked(fleet, out->sha), MU_PARK_FINISHED);
    memcpy(out->loss, fleet->loss, sizeof out->loss);
    out->eval[0] = fleet->eval_loss[4];
    out->eval[1] = fleet->eval_loss[6];
    assert_true(out->loss[5] > 1.0 && out->loss[5] < out->loss[0] && out->eval[1] < out->eval[0]);
    fleet_free(fleet);
}

static void start_workers(struct fleet *fleet, uint32_t count)
{
    while (fleet->count < count)
        worker_start(fleet);
}

static uint32_t first_members(uint32_t count)
{
    return (1u << count) - 1;
}

static void run_layout(const struct variant *variant, const struct reference *reference, struct mu_layout layout,
                       const uint32_t *leaf_counts, uint32_t threads)
{
    struct fleet *fleet = fleet_of_variant(variant);
    fleet->leaf_counts = leaf_counts;
    fleet->threads = threads;
    fleet->spec.parallel.optimizer_sharding = layout.sharded;
    fleet->wanted = layout;
    start_workers(fleet, mu_layout_world(&layout));
    start(fleet, first_members(fleet->count));
    check_finished(fleet, reference);
    for (uint32_t step = 0; step < 6; step++)
        assert_int_equal(fleet->applied[step], fleet->count);
    fleet_free(fleet);
}

/* Layouts of up to eight ranks, one by one; false: no more. Each also with an idle rank, where there is room. */
static bool next_layout(uint32_t *cursor, uint32_t slices, struct mu_layout *out)
{
    static const uint32_t tps[] = {1, 2, 4};
    for (uint32_t i = *cursor; i < 3 * 4 * 4 * 2; i++) {
        uint32_t tp = tps[i / 32], pp = i / 8 % 4 + 1, dp = i / 2 % 4 + 1;
        bool sharded = i % 2;
        if (slices % tp != 0 || tp * pp * dp > WORKERS_MAX || (sharded && dp == 1))
            continue;
        *cursor = i + 1;
        *out = make_layout(tp, pp, dp, tp * pp * dp < WORKERS_MAX && i % 5 == 0, sharded, LAYERS);
        return true;
    }
    return false;
}

static void run_variant(const struct variant *variant, uint32_t every, uint32_t first)
{
    struct reference reference;
    make_reference(variant, &reference);
    uint32_t cursor = 0, count = 0;
    for (struct mu_layout layout; next_layout(&cursor, variant->slices, &layout); count++) {
        if (!all_layouts() && count % (every * (SANITIZED ? 9 : 1)) != first)
            continue;
        struct variant turned = *variant; /* recomputation changes in turn: the reference's does not matter */
        turned.recompute = MU_RECOMPUTE_NONE + (enum mu_recompute)(count % 3);
        run_layout(&turned, &reference, layout, NULL, 1 + count % 2);
    }
    assert_true(count > 0);
}

static void test_layouts_gpt2_without_slices_same_bits(void **state)
{
    (void)state;
    run_variant(&(struct variant){&gpt2, 1, MU_RECOMPUTE_NONE}, 3, 2);
}

static void test_layouts_gpt2_with_slices_same_bits(void **state)
{
    (void)state;
    run_variant(&(struct variant){&gpt2, 2, MU_RECOMPUTE_SELECTIVE}, 6, 5);
    run_variant(&(struct variant){&gpt2, 4, MU_RECOMPUTE_FULL}, 2, 0);
}

static void test_layouts_llama_same_bits(void **state)
{
    (void)state;
    run_variant(&(struct variant){&llama, 1, MU_RECOMPUTE_SELECTIVE}, 4, 3);
    run_variant(&(struct variant){&llama, 4, MU_RECOMPUTE_NONE}, 2, 1);
}

static void test_layouts_recompute_does_not_change_bits(void **state)
{
    (void)state;
    static const struct mu_model_config *const models[] = {&gpt2, &llama};
    for (uint32_t i = 0; i < 2; i++) {
        struct reference first, other;
        make_reference(&(struct variant){models[i], 2, MU_RECOMPUTE_NONE}, &first);
        make_reference(&(struct variant){models[i], 2, MU_RECOMPUTE_SELECTIVE}, &other);
        assert_memory_equal(first.sha, other.sha, 32);
        make_reference(&(struct variant){models[i], 2, MU_RECOMPUTE_FULL}, &other);
        assert_memory_equal(first.sha, other.sha, 32);
    }
}

/* Also a replica without leaves: its stages have nothing to do but to add up. */
static void test_layouts_uneven_leaves_same_bits(void **state)
{
    (void)state;
    static const struct variant variant = {&gpt2, 2, MU_RECOMPUTE_NONE};
    static const uint32_t counts[][3] = {{5, 2, 0}, {1, 5, 1}, {7, 0, 0}};
    struct reference reference;
    make_reference(&variant, &reference);
    for (uint32_t i = 0; i < 3; i++) {
        run_layout(&variant, &reference, make_layout(1, 2, 2 + i % 2, 0, false, LAYERS), counts[i], 1);
        run_layout(&variant, &reference, make_layout(2, 1, 2 + i % 2, 0, true, LAYERS), counts[i], 1);
    }
}

/* Steps whose loss or gradient is not finite change nothing, anywhere. */
static void test_layouts_updates_that_are_skipped_same_bits(void **state)
{
    (void)state;
    uint8_t sha[2][32];
    static const uint32_t layouts[][3] = {{1, 1, 1}, {1, 2, 2}, {2, 2, 2}};
    for (uint32_t sharded = 0; sharded < 2; sharded++) {
        for (uint32_t i = 0; i < 3; i += SANITIZED && !sharded ? 2 : 1) {
            struct fleet *fleet = fleet_of_variant(&(struct variant){&gpt2, 2, MU_RECOMPUTE_NONE});
            fleet->spec.parallel.optimizer_sharding = sharded;
            fleet->spec.eval.every = 0;
            fleet->spec.optimizer.lr = 1e18;
            fleet->spec.optimizer.warmup = 0;
            want_layout(fleet, layouts[i][0], layouts[i][1], layouts[i][2], 0);
            start_workers(fleet, mu_layout_world(&fleet->wanted));
            start(fleet, first_members(fleet->count));
            assert_int_equal(wait_parked(fleet, sha[i > 0]), MU_PARK_FINISHED);
            assert_memory_equal(sha[0], sha[i > 0], 32);
            assert_true(isfinite(fleet->loss[5]) == 0);
            assert_int_equal(fleet->unfinite_count, 0);
            fleet_free(fleet);
        }
    }
}

/* An update that is infinite is not skipped, for its gradient is finite. Every rank knows at the end. */
static void test_layouts_weights_that_are_not_finite_are_told(void **state)
{
    (void)state;
    for (uint32_t degree = 1; degree <= 2; degree++) {
        struct fleet *fleet = fleet_of_variant(&(struct variant){&gpt2, 2, MU_RECOMPUTE_NONE});
        fleet->spec.eval.every = 0;
        fleet->spec.optimizer.lr = 1e300;
        fleet->spec.optimizer.warmup = 0;
        want_layout(fleet, degree, degree, 1, 0);
        start_workers(fleet, degree * degree);
        start(fleet, first_members(fleet->count));
        assert_int_equal(wait_parked(fleet, NULL), MU_PARK_FINISHED);
        assert_int_equal(fleet->unfinite_count, fleet->count);
        fleet_free(fleet);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layouts_gpt2_without_slices_same_bits),
        cmocka_unit_test(test_layouts_gpt2_with_slices_same_bits),
        cmocka_unit_test(test_layouts_llama_same_bits),
        cmocka_unit_test(test_layouts_uneven_leaves_same_bits),
        cmocka_unit_test(test_layouts_updates_that_are_skipped_same_bits),
        cmocka_unit_test(test_layouts_weights_that_are_not_finite_are_told),
        cmocka_unit_test(test_layouts_recompute_does_not_change_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
