/* links: mu_test_model */
/* The law for one leaf: whatever grid of tensor ranks and stages computes it, with whatever recomputation, the loss and
 * every gradient have the same bits. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "common/hash.h"
#include "tests/lib/kernel_testing.h"
#include "tests/lib/model_grid.h"
#include "tests/lib/sanitized.h"

enum { MICRO = 3, LENGTH = 8 };

enum { GRIDS_STEP = SANITIZED ? 13 : 1 }; /* no factor of what is swept */

static struct mu_model_config gpt2(uint32_t slices, float dropout)
{
    return (struct mu_model_config){.family = MU_FAMILY_GPT2,
                                    .layers = 5,
                                    .heads = 4,
                                    .channels = 24,
                                    .context = 11,
                                    .vocab = 61,
                                    .dropout = dropout,
                                    .slices = slices};
}

static struct mu_model_config llama(uint32_t slices)
{
    return (struct mu_model_config){.family = MU_FAMILY_LLAMA,
                                    .layers = 4,
                                    .heads = 8,
                                    .kv_heads = 4,
                                    .channels = 48,
                                    .hidden = 60,
                                    .context = 9,
                                    .vocab = 58,
                                    .slices = slices};
}

static const char *text_of(const struct mg_leaf *leaf, const struct mg_grid *grid)
{
    static char text[160];
    snprintf(text, sizeof text, "family %d, T %u, dropout %g, accumulate %u on tp %u x pp %u, recompute %d, %s",
             (int)leaf->spec.config.family, leaf->spec.config.slices, (double)leaf->spec.config.dropout,
             leaf->accumulate, grid->tp, grid->pp, (int)grid->recompute,
             grid->all_forward_first ? "all forward first" : "one at a time");
    return text;
}

struct expected {
    const struct mg_leaf *leaf;
    float *grads, *got;
    double loss;
};

static void expect_same(struct expected *e, const struct mg_grid *grid)
{
    double loss = -1;
    mg_run(e->leaf, grid, e->got, &loss);
    if (loss != e->loss)
        fail_msg("%s: loss %.17g, alone %.17g", text_of(e->leaf, grid), loss, e->loss);
    bool same = memcmp(e->got, e->grads, e->leaf->spec.flat_size * sizeof *e->got) == 0;
    for (uint64_t i = 0; !same && i < e->leaf->spec.flat_size; i++)
        if (memcmp(e->got + i, e->grads + i, sizeof *e->got) != 0)
            fail_msg("%s: gradient %llu is %.9g, alone %.9g", text_of(e->leaf, grid), (unsigned long long)i,
                     (double)e->got[i], (double)e->grads[i]);
}

/* All grids, recomputations and orders for one leaf. */
static void all_grids(const struct mu_model_config *config, uint32_t accumulate, uint32_t *grids)
{
    struct mg_leaf leaf = mg_leaf_new(config, MICRO, LENGTH, accumulate);
    struct expected e = {.leaf = &leaf};
    e.grads = kt_alloc(leaf.spec.flat_size, sizeof *e.grads);
    e.got = kt_alloc(leaf.spec.flat_size, sizeof *e.got);
    mg_run_alone(&leaf, kt_pool(1), e.grads, &e.loss);
    assert_true(isfinite(e.loss) && e.loss > 0);
    for (uint32_t tp = 1; tp <= config->slices; tp *= 2)
        for (uint32_t pp = 1; pp <= MG_STAGES_MAX; pp++)
            for (enum mu_recompute r = MU_RECOMPUTE_NONE; r <= MU_RECOMPUTE_FULL; r++)
                for (uint32_t order = 0; order < (accumulate > 1 ? 2 : 1); order++)
                    if (++*grids % GRIDS_STEP == 0)
                        expect_same(&e, &(struct mg_grid){tp, pp, r, order == 1});
    free(e.grads);
    free(e.got);
    mg_leaf_free(&leaf);
}

static void test_gpt2_has_the_same_bits_on_every_grid(void **state)
{
    (void)state;
    uint32_t grids = 0;
    for (uint32_t slices = 1; slices <= 4; slices *= 2)
        for (uint32_t accumulate = 1; accumulate <= 3; accumulate += 2)
            for (uint32_t dropout = 0; dropout < 2; dropout++) {
                struct mu_model_config config = gpt2(slices, dropout ? 0.2f : 0.0f);
                all_grids(&config, accumulate, &grids);
            }
    assert_int_equal(grids, (1 + 2 + 3) * MG_STAGES_MAX * 3 * 2 * 3);
}

static void test_llama_has_the_same_bits_on_every_grid(void **state)
{
    (void)state;
    uint32_t grids = 0;
    for (uint32_t slices = 1; slices <= 4; slices *= 2)
        for (uint32_t accumulate = 1; accumulate <= 3; accumulate += 2) {
            struct mu_model_config config = llama(slices);
            all_grids(&config, accumulate, &grids);
        }
    assert_int_equal(grids, (1 + 2 + 3) * MG_STAGES_MAX * 3 * 3);
}

/* Gradients of the leaf, then the bits of the loss. */
static void run_alone(void *ctx, struct mu_pool *pool, float *out)
{
    const struct mg_leaf *leaf = ctx;
    double loss;
    mg_run_alone(leaf, pool, out, &loss);
    memcpy(out + leaf->spec.flat_size, &loss, sizeof loss);
}

/* Whatever instruction set and number of threads; and these numbers must never change: they are what jobs compute. */
static void test_leaf_keeps_its_bits_for_good(void **state)
{
    (void)state;
    const struct {
        bool llama;
        uint32_t slices;
        uint64_t hash;
    } known[] = {
        {false, 1, 0xc11f7d93247da235}, {false, 2, 0x68cd1d4041930568}, {false, 4, 0x888ed28d9e53c662},
        {true, 1, 0x309f78e97f387fe4},  {true, 2, 0x45d4f5f18f04623e},  {true, 4, 0x33fba660796b1712},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i += SANITIZED ? 4 : 1) {
        struct mu_model_config config = known[i].llama ? llama(known[i].slices) : gpt2(known[i].slices, 0.2f);
        struct mg_leaf leaf = mg_leaf_new(&config, MICRO, LENGTH, 2);
        size_t size = leaf.spec.flat_size + 2;
        float *out = kt_alloc(size, sizeof *out);
        kt_expect_same_bits("leaf", run_alone, &leaf, size);
        run_alone(&leaf, kt_pool(1), out);
        uint64_t hash = mu_xxh3_64(out, size * sizeof *out, 0);
        if (hash != known[i].hash)
            fail_msg("%s, %u slices: bits 0x%llx", known[i].llama ? "Llama" : "GPT-2", known[i].slices,
                     (unsigned long long)hash);
        free(out);
        mg_leaf_free(&leaf);
    }
}

/* More tokens than have logits at one time: the head goes in pieces, the last one smaller. */
static void test_head_in_pieces_has_the_same_bits_on_every_grid(void **state)
{
    (void)state;
    for (int family = 0; family < 2; family++)
        for (uint32_t slices = 1; slices <= 4; slices *= 4) {
            struct mu_model_config config = family ? llama(slices) : gpt2(slices, 0.0f);
            if (SANITIZED && (family == 1) == (slices == 4))
                continue;
            config.layers = 2;
            struct mg_leaf leaf = mg_leaf_new(&config, 2 * MU_HEAD_TOKENS / LENGTH + 5, LENGTH, 2);
            struct expected e = {.leaf = &leaf};
            e.grads = kt_alloc(leaf.spec.flat_size, sizeof *e.grads);
            e.got = kt_alloc(leaf.spec.flat_size, sizeof *e.got);
            mg_run_alone(&leaf, kt_pool(1), e.grads, &e.loss);
            for (uint32_t tp = 1; tp <= slices; tp *= 2)
                expect_same(&e, &(struct mg_grid){tp, 2, MU_RECOMPUTE_SELECTIVE, true});
            free(e.grads);
            free(e.got);
            mg_leaf_free(&leaf);
        }
}

/* T is part of the job's identity: other bits, but the same function. */
static void test_slices_change_rounding_only(void **state)
{
    (void)state;
    for (int family = 0; family < 2; family++) {
        struct mu_model_config config = family ? llama(1) : gpt2(1, 0.2f);
        struct mg_leaf whole = mg_leaf_new(&config, MICRO, LENGTH, 2);
        size_t flat = whole.spec.flat_size;
        float *expected = kt_alloc(flat, sizeof *expected), *params = kt_alloc(flat, sizeof *params);
        double expected_loss;
        mg_run_alone(&whole, kt_pool(1), expected, &expected_loss);
        for (config.slices = 2; config.slices <= 4; config.slices *= 2) {
            struct mg_leaf leaf = mg_leaf_new(&config, MICRO, LENGTH, 2);
            float *grads = kt_alloc(leaf.spec.flat_size, sizeof *grads), *got = kt_alloc(flat, sizeof *got);
            double loss;
            mg_unslice(&leaf.spec, leaf.params, &whole.spec, params); /* initial values do not depend on T */
            assert_memory_equal(params, whole.params, flat * sizeof *params);
            mg_run_alone(&leaf, kt_pool(1), grads, &loss);
            mg_unslice(&leaf.spec, grads, &whole.spec, got);
            assert_true(fabs(loss / expected_loss - 1) < 1e-6);
            for (uint32_t i = 0; i < whole.spec.tensor_count; i++) {
                struct mu_tensor t = mu_model_tensor(&whole.spec, i);
                double *reference = kt_doubles(expected + t.offset, t.size);
                kt_expect_close(t.name, got + t.offset, reference, t.size, 2e-5, 1e-12);
                free(reference);
            }
            free(grads);
            free(got);
            mg_leaf_free(&leaf);
        }
        free(expected);
        free(params);
        mg_leaf_free(&whole);
    }
}

static void test_evaluation_is_the_same_on_every_grid(void **state)
{
    (void)state;
    for (int family = 0; family < 2; family++)
        for (uint32_t slices = 1; slices <= 4; slices *= 4) {
            struct mu_model_config config = family ? llama(slices) : gpt2(slices, 0.0f);
            struct mg_leaf leaf = mg_leaf_new(&config, MICRO, LENGTH, 3);
            float *grads = kt_alloc(leaf.spec.flat_size, sizeof *grads);
            double loss;
            mg_run_alone(&leaf, kt_pool(1), grads, &loss); /* no dropout: training has the same loss */
            for (uint32_t tp = 1; tp <= slices; tp *= 2)
                for (uint32_t pp = 1; pp <= MG_STAGES_MAX; pp++)
                    assert_true(mg_evaluate(&leaf, &(struct mg_grid){tp, pp, MU_RECOMPUTE_NONE, false}) == loss);
            free(grads);
            mg_leaf_free(&leaf);
        }
}

/* log-softmax of the last logits must be the loss of a sequence in which only the last target counts. */
static void test_last_logits_agree_with_the_loss(void **state)
{
    (void)state;
    for (int family = 0; family < 2; family++)
        for (uint32_t slices = 1; slices <= 4; slices *= 2) {
            struct mu_model_config config = family ? llama(slices) : gpt2(slices, 0.0f);
            struct mg_leaf leaf = mg_leaf_new(&config, 1, LENGTH, 1);
            struct mu_model_options options = {.micro = 1, .length = LENGTH, .forward_only = true};
            struct mu_model *model = NULL;
            float logits[64];
            assert_int_equal(mu_model_new(&leaf.spec, &options, kt_pool(1), NULL, &model), MU_OK);
            for (uint32_t count = 1; count <= LENGTH; count++) {
                int32_t targets[LENGTH];
                double loss = 0, sum = 0;
                for (uint32_t i = 0; i < LENGTH; i++)
                    targets[i] = i == count - 1 ? 57 : -1; /* in the last slice */
                struct mu_micro_batch batch = {.tokens = leaf.tokens, .targets = targets};
                assert_int_equal(mu_model_loss(model, &batch, leaf.params, NULL, NULL, &loss), MU_OK);
                assert_int_equal(mu_model_logits_last(model, leaf.tokens, count, leaf.params, logits, NULL), MU_OK);
                for (uint32_t i = 0; i < config.vocab; i++)
                    sum += exp((double)logits[i]);
                assert_true(fabs(loss - (log(sum) - (double)logits[57])) < 1e-5);
            }
            mu_model_free(model);
            mg_leaf_free(&leaf);
        }
}

/* A share is initialised from its own chunks alone, and nothing else is touched. */
static void test_initial_values_of_some_chunks_are_those_of_all(void **state)
{
    (void)state;
    struct mu_model_config config = llama(4);
    config.channels = 512;
    config.hidden = 1028;
    struct mu_model_spec spec;
    mu_model_spec_init(&spec, &config);
    float *all = kt_alloc(spec.flat_size, sizeof *all), *some = kt_alloc(spec.flat_size, sizeof *some);
    assert_int_equal(mu_model_init_parameters(&spec, kt_pool(1), 3, NULL, 0, all), MU_OK);
    const struct mu_chunk_run runs[] = {{0, 1}, {4, 2}, {9, 7}, {spec.chunk_count - 2, 1}};
    for (uint64_t i = 0; i < spec.flat_size; i++)
        some[i] = -3.0f;
    assert_true(spec.chunk_count > 20);
    assert_int_equal(mu_model_init_parameters(&spec, kt_pool(2), 3, runs, 4, some), MU_OK);
    for (uint32_t c = 0; c < spec.chunk_count; c++) {
        struct mu_chunk chunk = mu_model_chunk(&spec, c);
        bool wanted = false;
        for (int i = 0; i < 4; i++)
            wanted = wanted || (c >= runs[i].first && c < runs[i].first + runs[i].count);
        for (uint64_t i = chunk.offset; i < chunk.offset + chunk.size; i++)
            if (some[i] != (wanted ? all[i] : -3.0f))
                fail_msg("chunk %u, element %llu", c, (unsigned long long)i);
    }
    free(all);
    free(some);
}

static void test_update_in_pieces_equals_update_in_one(void **state)
{
    (void)state;
    for (int family = 0; family < 2; family++) {
        struct mu_model_config config = family ? llama(4) : gpt2(2, 0.0f);
        struct mu_model_spec spec;
        mu_model_spec_init(&spec, &config);
        size_t flat = spec.flat_size;
        float *grads = kt_floats(flat, 3, 1.0), *start = kt_floats(flat, 4, 1.0), *p[2], *m[2], *v[2];
        for (int i = 0; i < 2; i++) {
            p[i] = kt_copy(start, flat);
            m[i] = kt_alloc(flat, sizeof(float));
            v[i] = kt_alloc(flat, sizeof(float));
        }
        struct mu_adamw adamw = mu_adamw_at(0.1, 0.9, 0.95, 1e-8, 0.5, 0.0, 1.0, 1);
        assert_int_equal(mu_model_update(&spec, kt_pool(1), &adamw, 0, flat, p[0], m[0], v[0], grads), MU_OK);
        for (uint64_t at = 0; at < flat; at += 777)
            assert_int_equal(mu_model_update(&spec, kt_pool(2), &adamw, at, flat - at < 777 ? flat - at : 777, p[1],
                                             m[1], v[1], grads),
                             MU_OK);
        assert_memory_equal(p[0], p[1], flat * sizeof(float));
        assert_memory_equal(m[0], m[1], flat * sizeof(float));
        assert_memory_equal(v[0], v[1], flat * sizeof(float));
        /* the first update from zero moments: lr * (sign of the gradient + decay * p); gaps stay */
        uint8_t *covered = kt_alloc(flat, 1);
        for (uint32_t i = 0; i < spec.tensor_count; i++) {
            struct mu_tensor t = mu_model_tensor(&spec, i);
            for (uint64_t j = t.offset; j < t.offset + t.size; j++) {
                float step = 0.1f * ((grads[j] > 0 ? 1.0f : -1.0f) + (t.decay ? 0.5f * start[j] : 0.0f));
                if (fabsf(grads[j]) > 1e-4f)
                    assert_true(fabsf(p[0][j] - (start[j] - step)) < 1e-4f);
                covered[j] = 1;
            }
        }
        for (size_t i = 0; i < flat; i++)
            assert_true(covered[i] || p[0][i] == start[i]);
        for (int i = 0; i < 2; i++) {
            free(p[i]);
            free(m[i]);
            free(v[i]);
        }
        free(grads);
        free(start);
        free(covered);
    }
}

static size_t workspace(const struct mu_model_spec *spec, uint32_t tp, enum mu_recompute recompute, uint32_t slots)
{
    const struct mu_tensor_group group = {.size = tp};
    const struct mu_model_options options = {.micro = 4,
                                             .length = 128,
                                             .accumulate = 1,
                                             .part = {.layer_count = spec->config.layers,
                                                      .embedding = true,
                                                      .head = true,
                                                      .slice_count = spec->config.slices / tp},
                                             .recompute = recompute,
                                             .slots = slots,
                                             .tensor = tp > 1 ? &group : NULL};
    return mu_model_workspace_bytes(spec, &options);
}

/* What a slot costs, by formula: activations of all layers are divided by the tensor ranks. */
static void test_activations_shrink_with_ranks_and_recomputation(void **state)
{
    (void)state;
    struct mu_model_config config = gpt2(4, 0.0f);
    config.channels = 256;
    config.context = 128;
    struct mu_model_spec spec;
    mu_model_spec_init(&spec, &config);
    double n = 4 * 128, c = 256, layers = 5;
    const double per_layer[] = {n * (16 * c + 4 + 4), n * (10 * c + 4 + 4), n * c};
    const double per_slot[] = {n * (2 * c + 2), n * (c + 2), n * (c + 2)};
    for (uint32_t tp = 1; tp <= 4; tp *= 2)
        for (int r = 0; r < 3; r++) {
            double one = (double)workspace(&spec, tp, MU_RECOMPUTE_NONE + (enum mu_recompute)r, 1),
                   two = (double)workspace(&spec, tp, MU_RECOMPUTE_NONE + (enum mu_recompute)r, 2);
            double expected = (layers * per_layer[r] + per_slot[r]) * sizeof(float) / tp;
            if (fabs((two - one) / expected - 1) > 0.01)
                fail_msg("tp %u, recompute %d: a slot has %.0f bytes, expected %.0f", tp, r + 1, two - one, expected);
        }
    assert_true(workspace(&spec, 1, MU_RECOMPUTE_SELECTIVE, 1) < workspace(&spec, 1, MU_RECOMPUTE_NONE, 1));
    assert_true(workspace(&spec, 1, MU_RECOMPUTE_FULL, 1) < workspace(&spec, 1, MU_RECOMPUTE_SELECTIVE, 1));
}

/* ---- what is refused, and what fails on the way ---- */

static void expect_refused(const struct mu_model_spec *spec, struct mu_model_options options, const char *says)
{
    struct mu_error err = {0};
    struct mu_model *model = NULL;
    options.micro = options.micro ? options.micro : MICRO;
    options.length = options.length ? options.length : LENGTH;
    options.accumulate = 1;
    assert_int_equal(mu_model_new(spec, &options, kt_pool(0), &err, &model), MU_ERR_INVALID);
    if (!strstr(err.text, says))
        fail_msg("'%s' does not say '%s'", err.text, says);
}

static void test_parts_that_do_not_fit_are_refused(void **state)
{
    (void)state;
    struct mu_model_config config = gpt2(4, 0.0f);
    struct mu_model_spec spec;
    mu_model_spec_init(&spec, &config);
    const struct mu_tensor_group second = {.size = 2, .rank = 1}, outside = {.size = 2, .rank = 2};
    const struct mu_model_part whole = {0, 5, true, true, 0, 4}, half = {0, 5, true, true, 2, 2};
    expect_refused(&spec, (struct mu_model_options){.part = {1, 5, false, true, 0, 4}}, "5 layers from 1");
    expect_refused(&spec, (struct mu_model_options){.part = {0, 4, true, true, 0, 4}}, "no stage of 5 layers");
    expect_refused(&spec, (struct mu_model_options){.part = {1, 4, true, true, 0, 4}}, "no stage of 5 layers");
    expect_refused(&spec, (struct mu_model_options){.part = half}, "2 slices from 2");
    expect_refused(&spec, (struct mu_model_options){.part = whole, .tensor = &second}, "rank 1 of 2");
    expect_refused(&spec, (struct mu_model_options){.part = half, .tensor = &outside}, "rank 2 of 2");
    expect_refused(&spec, (struct mu_model_options){.slots = MU_STAGES_MAX + 1}, "129 slots");
    expect_refused(&spec, (struct mu_model_options){.micro = 3, .length = 7}, "4 slices must divide");
    spec.config.heads = spec.config.kv_heads = 2;
    expect_refused(&spec, (struct mu_model_options){0}, "4 slices are not allowed");
}

static enum mu_status broken(void *ctx, void *blocks, size_t block_bytes)
{
    uint32_t *left = ctx;
    memset(blocks, 0, 2 * block_bytes);
    if (*left == 0)
        return MU_ERR_UNAVAILABLE;
    --*left;
    return MU_OK;
}

static enum mu_status broken_all(void *ctx, const void *send, void *recv, size_t block_bytes)
{
    (void)send;
    return broken(ctx, recv, block_bytes);
}

static enum mu_status nothing_comes(void *ctx)
{
    (void)ctx;
    return MU_ERR_TIMEOUT;
}

/* Wherever the group fails, the call ends with its status. */
static void test_failure_of_the_group_ends_the_call(void **state)
{
    (void)state;
    struct mu_model_config config = gpt2(2, 0.1f);
    struct mg_leaf leaf = mg_leaf_new(&config, MICRO, LENGTH, 1);
    uint32_t left = 0, fails = 0;
    const struct mu_tensor_group group = {.ctx = &left, .size = 2, .all_gather = broken, .all_to_all = broken_all};
    struct mu_model_options options = {.micro = MICRO,
                                       .length = LENGTH,
                                       .accumulate = 1,
                                       .part = {0, 5, true, true, 0, 1},
                                       .recompute = MU_RECOMPUTE_FULL,
                                       .tensor = &group};
    struct mu_model *model = NULL;
    float *grads = kt_alloc(leaf.spec.flat_size, sizeof *grads);
    assert_int_equal(mu_model_new(&leaf.spec, &options, kt_pool(0), NULL, &model), MU_OK);
    struct mu_micro_batch batch = mg_batch(&leaf, 0);
    for (;; fails++) {
        double loss = -1;
        left = fails;
        enum mu_status status = mu_model_forward_backward(model, &batch, leaf.params, grads, &loss);
        if (status == MU_OK)
            break;
        assert_int_equal(status, MU_ERR_UNAVAILABLE);
        assert_true(loss == -1);
    }
    assert_true(fails > 5 * 14); /* 4 exchanges forward, 4 forward again, 6 backward in each layer, and the ends */
    mu_model_free(model);
    free(grads);
    mg_leaf_free(&leaf);
}

static void test_missing_head_chain_ends_the_call(void **state)
{
    (void)state;
    struct mu_model_config config = gpt2(1, 0.0f);
    struct mg_leaf leaf = mg_leaf_new(&config, MICRO, LENGTH, 1);
    struct mu_model_options options = {
        .micro = MICRO, .length = LENGTH, .accumulate = 1, .part = {0, 2, true, false, 0, 1}};
    struct mu_model *model = NULL;
    float *grads = kt_alloc(leaf.spec.flat_size, sizeof *grads);
    assert_int_equal(mu_model_new(&leaf.spec, &options, kt_pool(0), NULL, &model), MU_OK);
    float *stream = kt_alloc(mu_model_stream_elements(model), sizeof *stream);
    struct mu_micro_batch batch = mg_batch(&leaf, 0);
    double loss = -1;
    batch.embedding_ready = nothing_comes;
    assert_int_equal(mu_model_forward(model, &batch, 0, leaf.params, NULL, stream), MU_OK);
    assert_int_equal(mu_model_backward(model, &batch, 0, leaf.params, grads, stream, NULL, &loss), MU_ERR_TIMEOUT);
    assert_true(loss == -1);
    batch.embedding_ready = NULL;
    assert_int_equal(mu_model_backward(model, &batch, 0, leaf.params, grads, stream, NULL, &loss), MU_OK);
    assert_true(loss == 0);
    mu_model_free(model);
    free(grads);
    free(stream);
    mg_leaf_free(&leaf);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gpt2_has_the_same_bits_on_every_grid),
        cmocka_unit_test(test_llama_has_the_same_bits_on_every_grid),
        cmocka_unit_test(test_leaf_keeps_its_bits_for_good),
        cmocka_unit_test(test_head_in_pieces_has_the_same_bits_on_every_grid),
        cmocka_unit_test(test_slices_change_rounding_only),
        cmocka_unit_test(test_evaluation_is_the_same_on_every_grid),
        cmocka_unit_test(test_last_logits_agree_with_the_loss),
        cmocka_unit_test(test_initial_values_of_some_chunks_are_those_of_all),
        cmocka_unit_test(test_update_in_pieces_equals_update_in_one),
        cmocka_unit_test(test_activations_shrink_with_ranks_and_recomputation),
        cmocka_unit_test(test_parts_that_do_not_fit_are_refused),
        cmocka_unit_test(test_failure_of_the_group_ends_the_call),
        cmocka_unit_test(test_missing_head_chain_ends_the_call),
    };
    return cmocka_run_group_tests(tests, kt_setup, kt_teardown);
}
