/* links: mu_plan */
#include "plan/memory.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <cmocka.h>

#include "plan/tree.h"

enum { CHUNK_BYTES = MU_CHUNK_ELEMENTS * 4 };

static struct mu_job_spec gpt2(uint32_t layers, uint32_t heads, uint32_t channels, uint32_t length, uint32_t micro)
{
    struct mu_job_spec s;
    mu_job_spec_init(&s);
    strcpy(s.name, "a");
    strcpy(s.data.path, "/a");
    s.model.layers = layers;
    s.model.heads = heads;
    s.model.channels = channels;
    s.model.context = length;
    s.model.vocab = channels < 768 ? 256 : 50257;
    s.batch.micro = micro;
    s.batch.length = length;
    s.batch.sequences = 8 * micro;
    s.steps = 1;
    struct mu_error err = {0};
    if (mu_job_spec_check(&s, &err))
        fail_msg("%s", err.text);
    return s;
}

static uint64_t sum_of(const struct mu_memory_need *n)
{
    return n->state_bytes + n->copy_bytes + n->mirror_bytes + n->gradient_bytes + n->staging_bytes +
           n->activation_bytes + n->exchange_bytes + n->snapshot_bytes + n->scratch_bytes + n->process_bytes;
}

/* 124,439,808 parameters in 1922 chunks; no gaps. */
static void test_memory_parts_add_up_and_follow_the_replicas(void **state)
{
    (void)state;
    struct mu_job_spec s = gpt2(12, 12, 768, 1024, 1);
    const uint64_t whole = 124439808ull * 4;
    struct mu_memory_need one = mu_memory_of_worker(&s, 1, 2), four = mu_memory_of_worker(&s, 4, 1);
    assert_int_equal(one.state_bytes, 3 * whole);
    assert_int_equal(one.gradient_bytes, 4 * whole); /* 8 leaves: a binary counter of 4 buffers */
    assert_int_equal(one.staging_bytes, 0);
    assert_int_equal(one.copy_bytes + one.exchange_bytes, 0);
    assert_int_equal(four.gradient_bytes, 2 * whole); /* 2 leaves each */
    assert_int_equal(four.staging_bytes,
                     MU_MEMORY_STAGING_BYTES); /* 3 roots of others for a quarter: 356 MiB, bounded */
    assert_int_equal(mu_memory_of_worker(&s, 2, 1).staging_bytes, 961ull * CHUNK_BYTES);
    assert_int_equal(one.snapshot_bytes, 0);
    assert_int_equal(one.peak_bytes, one.total_bytes);
    assert_int_equal(four.peak_bytes, four.total_bytes + four.state_bytes);
    assert_int_equal(one.scratch_bytes, 2 * MU_MEMORY_SCRATCH_BYTES);
    strcpy(s.checkpoint.path, "/c");
    struct mu_memory_need saving = mu_memory_of_worker(&s, 4, 1);
    assert_int_equal(saving.snapshot_bytes, 3 * 481ull * CHUNK_BYTES);
    assert_int_equal(saving.total_bytes, four.total_bytes + saving.snapshot_bytes);
    assert_int_equal(saving.total_bytes, sum_of(&saving));
}

/* numerics: fast: one gradient buffer, one root from each replica. */
static void test_memory_fast_holds_one_gradient(void **state)
{
    (void)state;
    struct mu_job_spec s = gpt2(12, 12, 768, 1024, 1);
    const uint64_t whole = 124439808ull * 4;
    s.batch.sequences = 12; /* of 2 replicas with 6 leaves each, exact sends two roots */
    struct mu_memory_need exact = mu_memory_of_worker(&s, 2, 1);
    assert_int_equal(exact.staging_bytes, MU_MEMORY_STAGING_BYTES); /* less than two roots for a half: bounded */
    s.numerics = MU_NUMERICS_FAST;
    assert_int_equal(mu_memory_of_worker(&s, 1, 1).gradient_bytes, whole);
    struct mu_memory_need two = mu_memory_of_worker(&s, 2, 1);
    assert_int_equal(two.gradient_bytes, whole);
    assert_int_equal(two.staging_bytes, 961ull * CHUNK_BYTES);
    assert_true(two.total_bytes < exact.total_bytes);
}

static void test_memory_small_models_reserve_for_any_split(void **state)
{
    (void)state;
    struct mu_job_spec s = gpt2(4, 4, 128, 128, 4);
    struct mu_model_spec model;
    mu_model_spec_init(&model, &s.model);
    uint64_t whole = model.parameter_count * 4;
    strcpy(s.checkpoint.path, "/c");
    struct mu_memory_need one = mu_memory_of_worker(&s, 1, 1), eight = mu_memory_of_worker(&s, 8, 1);
    assert_int_equal(eight.snapshot_bytes, 3 * whole);
    assert_int_equal(one.gradient_bytes, eight.gradient_bytes);
    assert_true(one.gradient_bytes >= 4 * whole);
    assert_int_equal(one.staging_bytes, whole);
}

static void test_memory_sharded_moments_are_divided(void **state)
{
    (void)state;
    struct mu_job_spec s = gpt2(12, 12, 768, 1024, 1);
    struct mu_layout layout;
    mu_layout_init(&layout, 4, 12);
    layout.sharded = true;
    struct mu_memory_need need = mu_memory_of_rank(&s, &layout, 3, 1);
    assert_int_equal(need.state_bytes, 124439808ull * 4 + 2 * 481ull * CHUNK_BYTES);
    assert_int_equal(need.total_bytes, sum_of(&need));
    assert_int_equal(need.peak_bytes, need.total_bytes + need.state_bytes);
}

/* A mirror is counted at least as large as it is, whoever guards whom, and not at all without buddies. */
static void test_memory_counts_mirrors(void **state)
{
    (void)state;
    struct mu_job_spec s = gpt2(12, 12, 768, 1024, 1);
    s.model.slices = 4;
    struct mu_model_spec model;
    mu_model_spec_init(&model, &s.model);
    struct mu_layout layouts[] = {
        {.tp = 1, .pp = 3, .dp = 1, .buddy_shift = 1, .stage_first = {0, 3, 8, 12}},
        {.tp = 2, .pp = 2, .dp = 1, .buddy_shift = 3, .stage_first = {0, 2, 12}},
        {.tp = 2, .pp = 1, .dp = 3, .buddy_shift = 2, .sharded = true, .stage_first = {0, 12}},
    };
    for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++) {
        for (uint32_t rank = 0; rank < mu_layout_working(&layouts[i]); rank++) {
            uint64_t elements = mu_layout_elements(&model, &layouts[i], rank, MU_SHARE_MIRROR);
            s.parallel.redundancy = MU_REDUNDANCY_NONE;
            assert_int_equal(mu_memory_of_rank(&s, &layouts[i], rank, 1).mirror_bytes, 0);
            s.parallel.redundancy = MU_REDUNDANCY_BUDDY;
            struct mu_memory_need need = mu_memory_of_rank(&s, &layouts[i], rank, 1);
            assert_true(elements > 0);
            assert_true(need.mirror_bytes >= elements * (layouts[i].sharded ? 8 : 16));
            assert_int_equal(need.total_bytes, sum_of(&need));
        }
    }
    struct mu_layout replicas = {.tp = 2, .pp = 1, .dp = 3, .stage_first = {0, 12}};
    assert_int_equal(mu_memory_of_rank(&s, &replicas, 0, 1).mirror_bytes, 0);
}

/* What the model says of a rank's state is what the layout says it holds. */
static void test_memory_columns_are_those_of_the_layout(void **state)
{
    (void)state;
    struct mu_job_spec s = gpt2(12, 12, 768, 1024, 1);
    s.model.slices = 4;
    struct mu_model_spec model;
    mu_model_spec_init(&model, &s.model);
    struct mu_layout layout = {.tp = 2, .pp = 3, .dp = 2, .stage_first = {0, 3, 8, 12}};
    uint64_t most = 0;
    for (uint32_t rank = 0; rank < mu_layout_working(&layout); rank++) {
        struct mu_memory_need need = mu_memory_of_rank(&s, &layout, rank, 1);
        struct mu_coords at = mu_layout_coords(&layout, rank);
        uint64_t held = mu_layout_elements(&model, &layout, rank, MU_SHARE_PARAMS) * 4;
        uint64_t copy = mu_layout_elements(&model, &layout, rank, MU_SHARE_COPY) * 4;
        if (at.t == 0) {
            assert_int_equal(need.state_bytes, 3 * held);
            assert_int_equal(need.copy_bytes, copy);
        } else { /* told as t = 0, the largest */
            assert_true(need.state_bytes >= 3 * held && need.copy_bytes >= copy);
        }
        assert_int_equal(need.copy_bytes > 0, at.p == 2);
        uint64_t messages = (at.p == 1 ? 4ull : 2ull) * 1024 * 768 * 4, head = 2 * 12565ull * 768 * 4;
        assert_int_equal(need.exchange_bytes, messages + (at.p == 0 ? 2 * head : 0));
        assert_int_equal(need.total_bytes, sum_of(&need));
        most = need.total_bytes > most ? need.total_bytes : most;
    }
    uint32_t stage = 9;
    assert_int_equal(mu_memory_of_layout(&s, &layout, 1, &stage).total_bytes, most);
    assert_true(stage < 3);
}

/* Activations of the whole model as counted by hand, and the same cut into stages, slices and kept micro-batches. */
static void test_memory_activations_follow_stages_and_recomputation(void **state)
{
    (void)state;
    struct mu_job_spec s = gpt2(6, 6, 384, 256, 2);
    const uint64_t n = 512, c = 384, layer = n * (16 * c + 6 + 4), shared = n * c + n * 7 * c + n / 32 * c;
    const uint64_t head = n * (2 * c + 2) + 2 * n + 512 * 256, embedding = n * (c + 1), rows = 2 * n;
    assert_int_equal(mu_memory_activation_bytes(&s), 4 * (6 * layer + shared + head + embedding));
    struct mu_layout layout = {.tp = 1, .pp = 3, .dp = 1, .stage_first = {0, 2, 4, 6}};
    assert_int_equal(mu_memory_stage_activation_bytes(&s, &layout, 0, 8),
                     4 * (3 * 2 * layer + shared + rows + embedding));
    assert_int_equal(mu_memory_stage_activation_bytes(&s, &layout, 1, 8), 4 * (2 * 2 * layer + shared + rows));
    assert_int_equal(mu_memory_stage_activation_bytes(&s, &layout, 2, 8), 4 * (2 * layer + shared + head));
    assert_int_equal(mu_memory_stage_activation_bytes(&s, &layout, 0, 1), 4 * (2 * layer + shared + rows + embedding));
    const uint64_t input = n * c, cheap = n * (2 * c + 4 * c);
    s.parallel.recompute = MU_RECOMPUTE_FULL;
    assert_int_equal(mu_memory_stage_activation_bytes(&s, &layout, 0, 8),
                     4 * (6 * input + layer - input + shared + rows + embedding));
    s.parallel.recompute = MU_RECOMPUTE_SELECTIVE;
    assert_int_equal(mu_memory_stage_activation_bytes(&s, &layout, 0, 8),
                     4 * (6 * (layer - cheap) + cheap + shared + rows + embedding));
    /* Two slices on two ranks: own rows of residuals and norms, half of the heads and of the MLP. */
    s.parallel.recompute = MU_RECOMPUTE_NONE;
    s.model.slices = 2;
    layout = (struct mu_layout){.tp = 2, .pp = 1, .dp = 1, .stage_first = {0, 6}};
    uint64_t logits = 512 * 128 + 3 * (2 + 1) * 512, own = n / 2;
    uint64_t slices = 6 * 6 * c + 2 * c + 2 * 6 * c + 2 * 256 * c; /* shared cells, those of both ranks, positions */
    assert_int_equal(mu_memory_stage_activation_bytes(&s, &layout, 0, 8),
                     4 * (6 * layer / 2 + 2 * n * c + 7 * c * own + n / 64 * c + own * (2 * c + 2) + 4 * n + logits +
                          own * c + n + slices));
}

static void test_memory_llama_counts_gate_and_grouped_heads(void **state)
{
    (void)state;
    struct mu_job_spec s = gpt2(4, 8, 256, 128, 2);
    s.model = (struct mu_model_config){.family = MU_FAMILY_LLAMA,
                                       .layers = 4,
                                       .heads = 8,
                                       .kv_heads = 2,
                                       .channels = 256,
                                       .hidden = 700,
                                       .context = 128,
                                       .vocab = 256};
    const uint64_t n = 256, c = 256, f = 700, qkv = 12 * 32;
    const uint64_t layer = n * (4 * c + 2 + qkv + 8 + c + 3 * f);
    assert_int_equal(mu_memory_activation_bytes(&s), 4 * (4 * layer + n * c + n * (2 * c + 1) + 2 * n + n * 256 +
                                                          n * (f + qkv) + n / 32 * c + 128 * 32 + n * (c + 1)));
}

static void test_memory_depth_bound_of_many_replicas_holds(void **state)
{
    (void)state;
    struct mu_job_spec s = gpt2(1, 1, 8, 1, 1);
    for (uint32_t dp = 257; dp < 6000; dp += 379) {
        s.batch.sequences = 6000;
        struct mu_memory_sums sums = mu_memory_sums_of(&s, dp, 1);
        for (uint32_t d = 0; d < dp; d++) {
            uint32_t base = 6000 / dp, extra = 6000 % dp, count = base + (d < extra);
            uint32_t first = d * base + (d < extra ? d : extra);
            assert_true(sums.leaves_most >= count);
            assert_true(sums.depth >= mu_tree_buffers(6000, first, count));
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory_parts_add_up_and_follow_the_replicas),
        cmocka_unit_test(test_memory_fast_holds_one_gradient),
        cmocka_unit_test(test_memory_small_models_reserve_for_any_split),
        cmocka_unit_test(test_memory_sharded_moments_are_divided),
        cmocka_unit_test(test_memory_columns_are_those_of_the_layout),
        cmocka_unit_test(test_memory_counts_mirrors),
        cmocka_unit_test(test_memory_activations_follow_stages_and_recomputation),
        cmocka_unit_test(test_memory_llama_counts_gate_and_grouped_heads),
        cmocka_unit_test(test_memory_depth_bound_of_many_replicas_holds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
