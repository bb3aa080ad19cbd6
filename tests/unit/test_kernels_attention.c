/* links: mu_test_kernels */
#include "tests/lib/kernel_testing.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "tests/lib/reference.h"

static const double usual = 4e-6; /* of the largest value */
static const uint64_t samples[] = {3, 0x1234567890u, 7};

struct attention_case {
    struct mu_attention at;
    float *qkv, *dout;
};

/* out, lse, dqkv. */
static void run_attention(void *ctx, struct mu_pool *pool, float *out)
{
    const struct attention_case *t = ctx;
    struct mu_attention at = t->at;
    size_t size = (size_t)at.sequences * at.length * at.channels, rows = (size_t)at.sequences * at.length * at.heads;
    at.out = out;
    at.lse = out + size;
    at.dqkv = out + size + rows;
    assert_int_equal(mu_kernel_attention_forward(pool, &at), MU_OK);
    assert_int_equal(mu_kernel_attention_backward(pool, &at), MU_OK);
}

static double *dropout_factors(const struct mu_attention *at)
{
    if (!at->drop)
        return NULL;
    double *keep = kt_alloc((size_t)at->sequences * at->heads * at->length * at->length, sizeof *keep), *next = keep;
    for (uint32_t s = 0; s < at->sequences; s++)
        for (uint32_t h = 0; h < at->heads; h++)
            for (uint32_t i = 0; i < at->length; i++) {
                float row[512];
                mu_dropout_factors(at->drop, s, i, h << 20, at->length, row);
                for (uint32_t j = 0; j < at->length; j++)
                    *next++ = (double)row[j];
            }
    return keep;
}

static void check_attention(uint32_t sequences, uint32_t length, uint32_t heads, uint32_t channels, double scale,
                            const struct mu_dropout *drop, double tolerance)
{
    size_t size = (size_t)sequences * length * channels, rows = (size_t)sequences * heads * length;
    struct attention_case t = {.qkv = kt_floats(3 * size, 1, scale), .dout = kt_floats(size, 2, 1.0)};
    t.at = (struct mu_attention){.sequences = sequences, .length = length, .heads = heads, .channels = channels};
    t.at.qkv = t.qkv;
    t.at.dout = t.dout;
    t.at.drop = drop;
    double *qkv = kt_doubles(t.qkv, 3 * size), *dout = kt_doubles(t.dout, size), *keep = dropout_factors(&t.at);
    double *reference = kt_alloc(4 * size + rows, sizeof *reference), *p = kt_alloc(rows * length, sizeof *p);
    struct ref_attention at = {sequences, length, heads, channels, qkv, keep};
    ref_attention_forward(&at, reference, reference + size, p);
    ref_attention_backward(&at, p, dout, reference + size + rows);
    float *out = kt_alloc(4 * size + rows, sizeof *out);
    run_attention(&t, kt_pool(1), out);
    kt_expect_close("attention out", out, reference, size, tolerance, 0.1);
    kt_expect_close("attention lse", out + size, reference + size, rows, tolerance, 1.0);
    kt_expect_close("attention dqkv", out + size + rows, reference + size + rows, 3 * size, 4 * tolerance, 0.1);
    kt_expect_same_bits("attention", run_attention, &t, 4 * size + rows);
    free(out);
    free(p);
    free(reference);
    free(keep);
    free(qkv);
    free(dout);
    free(t.qkv);
    free(t.dout);
}

static void test_attention_matches_reference_with_the_same_bits(void **state)
{
    (void)state;
    check_attention(1, 1, 1, 1, 1.0, NULL, usual);
    check_attention(2, 5, 3, 21, 1.0, NULL, usual);
    check_attention(1, 64, 2, 128, 1.0, NULL, usual);
    check_attention(3, 65, 1, 16, 2.0, NULL, usual);
    check_attention(1, 130, 2, 48, 1.0, NULL, usual);
    check_attention(1, 200, 1, 64, 1.0, NULL, usual);
    check_attention(1, 70, 1, 100, 0.5, NULL, usual);
}

/* Scores far apart (to +-400): the running maximum moves, exponentials underflow, and one ulp of a score is 3e-5. */
static void test_attention_with_large_scores_stays_exact(void **state)
{
    (void)state;
    check_attention(1, 150, 1, 16, 12.0, NULL, 1e-4);
}

static void test_attention_with_dropout_matches_reference(void **state)
{
    (void)state;
    struct mu_dropout drop = mu_dropout_site(1, 2, 3, MU_DROPOUT_ATTENTION, 0.2f, samples);
    check_attention(2, 100, 2, 32, 1.0, &drop, usual);
    check_attention(3, 64, 1, 8, 1.0, &drop, usual);
}

static void test_future_tokens_do_not_show(void **state)
{
    (void)state;
    enum { T = 90, C = 32, SIZE = T * C, CHANGED = 70 };
    float *qkv = kt_floats(3 * SIZE, 1, 1.0), *out = kt_alloc(SIZE, sizeof *out),
          *again = kt_alloc(SIZE, sizeof *again);
    float lse[T * 2];
    struct mu_attention at = {
        .sequences = 1, .length = T, .heads = 2, .channels = C, .qkv = qkv, .out = out, .lse = lse};
    assert_int_equal(mu_kernel_attention_forward(kt_pool(0), &at), MU_OK);
    for (uint32_t i = CHANGED * 3 * C; i < 3 * SIZE; i++)
        qkv[i] += 1.0f;
    at.out = again;
    assert_int_equal(mu_kernel_attention_forward(kt_pool(0), &at), MU_OK);
    assert_memory_equal(out, again, CHANGED * C * sizeof(float));
    assert_true(memcmp(out + CHANGED * C, again + CHANGED * C, C * sizeof(float)) != 0);
    free(qkv);
    free(out);
    free(again);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_attention_matches_reference_with_the_same_bits),
        cmocka_unit_test(test_attention_with_large_scores_stays_exact),
        cmocka_unit_test(test_attention_with_dropout_matches_reference),
        cmocka_unit_test(test_future_tokens_do_not_show),
    };
    return cmocka_run_group_tests(tests, kt_setup, kt_teardown);
}
