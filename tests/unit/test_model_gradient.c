/* links: mu_test_model */
/* Losses and gradients of both families against a model of their own in double precision. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "common/rng.h"
#include "tests/lib/kernel_testing.h"
#include "tests/lib/model_grid.h"
#include "tests/lib/reference_llama.h"

enum {
    MICRO = 2,
    LENGTH = 12,
    ACCUMULATE = 2,
    PROBES = 12,                                        /* elements of each tensor */
    MANY = (2 * MU_HEAD_TOKENS + 100) / LENGTH / 4 * 4, /* sequences whose logits come in pieces */
};

static struct mu_model_config config_of(enum mu_model_family family, uint32_t slices)
{
    struct mu_model_config config = {.family = family,
                                     .layers = 2,
                                     .heads = 4,
                                     .kv_heads = family == MU_FAMILY_LLAMA ? 2 : 0,
                                     .channels = 24,
                                     .hidden = family == MU_FAMILY_LLAMA ? 44 : 0,
                                     .context = 13,
                                     .vocab = 37,
                                     .slices = slices};
    return config;
}

/* The leaf's mean loss in double. */
static double loss_of(const struct mg_leaf *leaf, const struct mu_model_spec *whole, const double *params)
{
    struct ref_sequences data = {leaf->accumulate * leaf->micro, leaf->length, leaf->tokens, leaf->targets};
    return ref_model_loss(whole, params, &data) / (leaf->accumulate * leaf->micro * leaf->length);
}

static double slope(const struct mg_leaf *leaf, const struct mu_model_spec *whole, double *params, uint64_t at)
{
    const double step = 1e-5;
    double saved = params[at], side[2];
    for (int s = 0; s < 2; s++) {
        params[at] = saved + (s ? -step : step);
        side[s] = loss_of(leaf, whole, params);
    }
    params[at] = saved;
    return (side[0] - side[1]) / (2 * step);
}

static void check_tensor(const struct mg_leaf *leaf, const struct mu_model_spec *whole, double *params,
                         const float *grads, const struct mu_tensor *t, uint32_t probes)
{
    double largest = 0;
    for (uint64_t i = 0; i < t->size; i++)
        largest = fmax(largest, fabs((double)grads[t->offset + i]));
    assert_true(largest > 0);
    uint64_t random = t->offset;
    for (uint32_t i = 0; i < probes; i++) {
        uint64_t at = t->offset + mu_splitmix64(&random) % t->size;
        double expected = slope(leaf, whole, params, at);
        if (fabs((double)grads[at] - expected) > 5e-5 * largest + 1e-8)
            fail_msg("%s, element %llu: gradient %.9g, central difference %.9g", t->name,
                     (unsigned long long)(at - t->offset), (double)grads[at], expected);
    }
}

static void check_model(enum mu_model_family family, uint32_t slices, uint32_t micro, uint32_t probes)
{
    struct mu_model_config config = config_of(family, slices), single = config_of(family, 1);
    struct mg_leaf leaf = mg_leaf_new(&config, micro, LENGTH, ACCUMULATE);
    struct mu_model_spec whole;
    mu_model_spec_init(&whole, &single);
    float *sliced = kt_alloc(leaf.spec.flat_size, sizeof *sliced), *grads = kt_alloc(whole.flat_size, sizeof *grads),
          *params = kt_alloc(whole.flat_size, sizeof *params);
    double loss;
    mg_run_alone(&leaf, kt_pool(1), sliced, &loss);
    mg_unslice(&leaf.spec, sliced, &whole, grads);
    mg_unslice(&leaf.spec, leaf.params, &whole, params);
    double *exact = kt_doubles(params, whole.flat_size);
    double expected = loss_of(&leaf, &whole, exact) * ACCUMULATE * micro * LENGTH;
    if (fabs(loss / expected - 1) > 2e-6)
        fail_msg("loss %.9g, in double %.9g", loss, expected);
    for (uint32_t i = 0; i < whole.tensor_count; i++) {
        struct mu_tensor t = mu_model_tensor(&whole, i);
        check_tensor(&leaf, &whole, exact, grads, &t, probes);
    }
    free(sliced);
    free(grads);
    free(params);
    free(exact);
    mg_leaf_free(&leaf);
}

static void test_gpt2_gradients_match_differences(void **state)
{
    (void)state;
    check_model(MU_FAMILY_GPT2, 1, MICRO, PROBES);
    check_model(MU_FAMILY_GPT2, 4, MICRO, PROBES);
}

static void test_llama_gradients_match_differences(void **state)
{
    (void)state;
    check_model(MU_FAMILY_LLAMA, 1, MICRO, PROBES);
    check_model(MU_FAMILY_LLAMA, 2, MICRO, PROBES);
}

static void test_head_in_pieces_has_the_right_gradient(void **state)
{
    (void)state;
    check_model(MU_FAMILY_GPT2, 1, MANY, 1);
    check_model(MU_FAMILY_LLAMA, 2, MANY, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gpt2_gradients_match_differences),
        cmocka_unit_test(test_llama_gradients_match_differences),
        cmocka_unit_test(test_head_in_pieces_has_the_right_gradient),
    };
    return cmocka_run_group_tests(tests, kt_setup, kt_teardown);
}
