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

/* Sizes of the buffers. */
struct sizes {
    size_t out, qkv, rows; /* floats of out, of qkv, of lse */
};

static struct sizes sizes_of(const struct mu_attention *at)
{
    size_t tokens = (size_t)at->sequences * at->length;
    return (struct sizes){tokens * at->heads * at->head_channels,
                          tokens * (at->heads + 2 * at->kv_heads) * at->head_channels, tokens * at->heads};
}

/* out, lse, dqkv. */
static void run_attention(void *ctx, struct mu_pool *pool, float *out)
{
    const struct attention_case *t = ctx;
    struct mu_attention at = t->at;
    struct sizes size = sizes_of(&at);
    at.out = out;
    at.lse = out + size.out;
    at.dqkv = out + size.out + size.rows;
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
                mu_dropout_factors(at->drop, s, i, (at->first_head + h) << 20, at->length, row);
                for (uint32_t j = 0; j < at->length; j++)
                    *next++ = (double)row[j];
            }
    return keep;
}

static void check_case(const struct mu_attention *shape, double scale, double tolerance)
{
    struct sizes size = sizes_of(shape);
    size_t all = size.out + size.rows + size.qkv;
    struct attention_case t = {.qkv = kt_floats(size.qkv, 1, scale), .dout = kt_floats(size.out, 2, 1.0)};
    t.at = *shape;
    t.at.qkv = t.qkv;
    t.at.dout = t.dout;
    double *qkv = kt_doubles(t.qkv, size.qkv), *dout = kt_doubles(t.dout, size.out), *keep = dropout_factors(&t.at);
    double *reference = kt_alloc(all, sizeof *reference), *p = kt_alloc(size.rows * shape->length, sizeof *p);
    struct ref_attention at = {shape->sequences,     shape->length, shape->heads, shape->kv_heads,
                               shape->head_channels, qkv,           keep};
    ref_attention_forward(&at, reference, reference + size.out, p);
    ref_attention_backward(&at, p, dout, reference + size.out + size.rows);
    float *out = kt_alloc(all, sizeof *out);
    run_attention(&t, kt_pool(1), out);
    kt_expect_close("attention out", out, reference, size.out, tolerance, 0.1);
    kt_expect_close("attention lse", out + size.out, reference + size.out, size.rows, tolerance, 1.0);
    kt_expect_close("attention dqkv", out + size.out + size.rows, reference + size.out + size.rows, size.qkv,
                    4 * tolerance, 0.1);
    kt_expect_same_bits("attention", run_attention, &t, all);
    free(out);
    free(p);
    free(reference);
    free(keep);
    free(qkv);
    free(dout);
    free(t.qkv);
    free(t.dout);
}

static void check_attention(uint32_t sequences, uint32_t length, uint32_t heads, uint32_t channels, double scale,
                            const struct mu_dropout *drop, double tolerance)
{
    struct mu_attention at = {.sequences = sequences, .length = length, .heads = heads, .kv_heads = heads};
    at.head_channels = channels / heads;
    at.drop = drop;
    check_case(&at, scale, tolerance);
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

static void test_grouped_queries_match_reference_with_the_same_bits(void **state)
{
    (void)state;
    struct mu_dropout drop = mu_dropout_site(1, 2, 3, MU_DROPOUT_ATTENTION, 0.2f, samples);
    struct mu_attention at = {.sequences = 2, .length = 70, .heads = 6, .kv_heads = 2, .head_channels = 20};
    check_case(&at, 1.0, usual);
    at.drop = &drop;
    at.first_head = 5;
    check_case(&at, 1.0, usual);
    at = (struct mu_attention){.sequences = 1, .length = 131, .heads = 4, .kv_heads = 1, .head_channels = 64};
    check_case(&at, 1.0, usual);
    at = (struct mu_attention){.sequences = 3, .length = 5, .heads = 3, .kv_heads = 3, .head_channels = 7};
    check_case(&at, 1.0, usual);
}

/* Copies heads [first, first + count) from rows of x to rows of out. */
static void take_heads(size_t tokens, uint32_t first, uint32_t count, uint32_t channels, const float *x,
                       size_t x_stride, float *out, size_t out_stride)
{
    for (size_t i = 0; i < tokens; i++)
        memcpy(out + i * out_stride, x + i * x_stride + (size_t)first * channels,
               (size_t)count * channels * sizeof *out);
}

/* All slices in one call, behind each other in all buffers; `whole` is what run_attention made of t. */
static void check_slices_in_one_call(const struct attention_case *t, const float *whole)
{
    enum { SLICES = 2 };
    struct mu_attention at = t->at;
    const uint32_t heads = at.heads / SLICES, kv = at.kv_heads / SLICES, head = at.head_channels;
    const size_t tokens = (size_t)at.sequences * at.length, row = (at.heads + 2 * at.kv_heads) * head,
                 row_s = row / SLICES, out_s = (size_t)heads * head;
    struct sizes size = sizes_of(&at);
    float *qkv = kt_alloc(size.qkv, sizeof *qkv), *dqkv = kt_alloc(size.qkv, sizeof *dqkv),
          *expected = kt_alloc(size.qkv, sizeof *expected), *dout = kt_alloc(size.out, sizeof *dout),
          *out = kt_alloc(size.out, sizeof *out), *expected_out = kt_alloc(size.out, sizeof *out),
          *lse = kt_alloc(size.rows, sizeof *lse);
    for (uint32_t s = 0; s < SLICES; s++) {
        const uint32_t from[] = {s * heads, at.heads + s * kv, at.heads + at.kv_heads + s * kv},
                       count[] = {heads, kv, kv};
        for (uint32_t part = 0, to = 0; part < 3; to += count[part++]) {
            size_t place = s * tokens * row_s + to * head;
            take_heads(tokens, from[part], count[part], head, t->qkv, row, qkv + place, row_s);
            take_heads(tokens, from[part], count[part], head, whole + size.out + size.rows, row, expected + place,
                       row_s);
        }
        take_heads(tokens, s * heads, heads, head, t->dout, SLICES * out_s, dout + s * tokens * out_s, out_s);
        take_heads(tokens, s * heads, heads, head, whole, SLICES * out_s, expected_out + s * tokens * out_s, out_s);
    }
    at.slices = SLICES;
    at.heads = heads;
    at.kv_heads = kv;
    at.qkv = qkv;
    at.dqkv = dqkv;
    at.out = out;
    at.dout = dout;
    at.lse = lse;
    assert_int_equal(mu_kernel_attention_forward(kt_pool(1), &at), MU_OK);
    assert_int_equal(mu_kernel_attention_backward(kt_pool(4), &at), MU_OK);
    assert_memory_equal(out, expected_out, size.out * sizeof *out);
    assert_memory_equal(dqkv, expected, size.qkv * sizeof *dqkv);
    float *all[] = {qkv, dqkv, expected, dout, out, expected_out, lse};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

/* A slice of the heads on its own, in dense buffers or in place with row strides, gives the bits of the whole. */
static void test_slices_of_heads_have_the_bits_of_the_whole(void **state)
{
    (void)state;
    enum { S = 2, T = 75, H = 4, KV = 2, HEAD = 24, TOKENS = S * T, ROW = (H + 2 * KV) * HEAD, SLICES = 2 };
    enum { H_S = H / SLICES, KV_S = KV / SLICES, ROW_S = ROW / SLICES };
    struct mu_dropout drop = mu_dropout_site(1, 2, 3, MU_DROPOUT_ATTENTION, 0.2f, samples);
    struct attention_case t = {.qkv = kt_floats(TOKENS * ROW, 1, 1.0), .dout = kt_floats(TOKENS * H * HEAD, 2, 1.0)};
    t.at = (struct mu_attention){.sequences = S, .length = T, .heads = H, .kv_heads = KV, .head_channels = HEAD};
    t.at.drop = &drop;
    t.at.qkv = t.qkv;
    t.at.dout = t.dout;
    struct sizes size = sizes_of(&t.at);
    float *whole = kt_alloc(size.out + size.rows + size.qkv, sizeof *whole);
    run_attention(&t, kt_pool(1), whole);
    float *qkv = kt_alloc(TOKENS * ROW_S, sizeof *qkv), *dqkv = kt_alloc(TOKENS * ROW_S, sizeof *dqkv),
          *expected = kt_alloc(TOKENS * ROW_S, sizeof *expected);
    float *out = kt_alloc(size.out, sizeof *out), *lse = kt_alloc(size.rows, sizeof *lse);
    for (uint32_t s = 0; s < SLICES; s++) {
        const uint32_t from[] = {s * H_S, H + s * KV_S, H + KV + s * KV_S}, count[] = {H_S, KV_S, KV_S};
        for (uint32_t part = 0, at = 0; part < 3; at += count[part++]) {
            take_heads(TOKENS, from[part], count[part], HEAD, t.qkv, ROW, qkv + at * HEAD, ROW_S);
            take_heads(TOKENS, from[part], count[part], HEAD, whole + size.out + size.rows, ROW, expected + at * HEAD,
                       ROW_S);
        }
        struct mu_attention slice = t.at; /* out and dout lie in the rows of the whole */
        slice.heads = H_S;
        slice.kv_heads = KV_S;
        slice.first_head = s * H_S;
        slice.qkv = qkv;
        slice.dqkv = dqkv;
        slice.out_stride = H * HEAD;
        slice.out = out + s * H_S * HEAD;
        slice.dout = t.dout + s * H_S * HEAD;
        slice.lse = lse;
        assert_int_equal(mu_kernel_attention_forward(kt_pool(2), &slice), MU_OK);
        assert_int_equal(mu_kernel_attention_backward(kt_pool(3), &slice), MU_OK);
        assert_memory_equal(dqkv, expected, TOKENS * ROW_S * sizeof *dqkv);
    }
    assert_memory_equal(out, whole, size.out * sizeof *out);
    check_slices_in_one_call(&t, whole);
    float *all[] = {t.qkv, t.dout, whole, qkv, dqkv, expected, out, lse};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

static void test_future_tokens_do_not_show(void **state)
{
    (void)state;
    enum { T = 90, C = 32, SIZE = T * C, CHANGED = 70 };
    float *qkv = kt_floats(3 * SIZE, 1, 1.0), *out = kt_alloc(SIZE, sizeof *out),
          *again = kt_alloc(SIZE, sizeof *again);
    float lse[T * 2];
    struct mu_attention at = {
        .sequences = 1, .length = T, .heads = 2, .kv_heads = 2, .head_channels = C / 2, .qkv = qkv, .out = out};
    at.lse = lse;
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
        cmocka_unit_test(test_grouped_queries_match_reference_with_the_same_bits),
        cmocka_unit_test(test_slices_of_heads_have_the_bits_of_the_whole),
        cmocka_unit_test(test_future_tokens_do_not_show),
    };
    return cmocka_run_group_tests(tests, kt_setup, kt_teardown);
}
