/* links: mu_test_kernels */
#include "tests/lib/kernel_testing.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "common/rng.h"
#include "tests/lib/reference.h"

static const double tolerance = 2e-6;
static const uint64_t samples[] = {5, 0xabcdef0123u, 9, 1};

static double *row_factors(const struct mu_dropout *drop, uint32_t sequences, uint32_t length, uint32_t channels)
{
    double *keep = kt_alloc((size_t)sequences * length * channels, sizeof *keep);
    float *row = kt_alloc(channels, sizeof *row);
    for (uint32_t i = 0; i < sequences * length; i++) {
        mu_dropout_factors(drop, i / length, i % length, 0, channels, row);
        for (uint32_t j = 0; j < channels; j++)
            keep[(size_t)i * channels + j] = (double)row[j];
    }
    free(row);
    return keep;
}

/* ---- layer norm ---- */

struct norm_case {
    uint32_t sequences, length, channels;
    bool branch, first, accumulate;
    const struct mu_dropout *drop;
    float *x, *b, *weight, *bias, *dy, *dx, *dw;
};

/* residual_out, y, dresidual, dbranch: size each; dweight, dbias: channels each. */
static void run_norm(void *ctx, struct mu_pool *pool, float *out)
{
    const struct norm_case *t = ctx;
    uint32_t rows = t->sequences * t->length, channels = t->channels;
    size_t size = (size_t)rows * channels;
    float *mean = kt_alloc(2 * (size_t)rows, sizeof *mean), *rstd = mean + rows;
    float *workspace = kt_alloc(mu_kernel_norm_workspace(rows, channels), sizeof *workspace);
    struct mu_norm_forward forward = {.rows = rows, .length = t->length, .channels = channels, .residual = t->x};
    forward.branch = t->branch ? t->b : NULL;
    forward.weight = t->weight;
    forward.bias = t->bias;
    forward.drop = t->drop;
    forward.residual_out = out;
    forward.y = out + size;
    forward.mean = mean;
    forward.rstd = rstd;
    assert_int_equal(mu_kernel_norm_forward(pool, &forward), MU_OK);
    struct mu_norm_backward backward = {.rows = rows, .length = t->length, .channels = channels, .residual = out};
    backward.weight = t->weight;
    backward.mean = mean;
    backward.rstd = rstd;
    backward.dy = t->dy;
    backward.drop = t->drop;
    backward.accumulate = t->accumulate;
    backward.first = t->first;
    backward.dresidual = out + 2 * size;
    backward.dbranch = out + 3 * size;
    backward.dweight = out + 4 * size;
    backward.dbias = backward.dweight + channels;
    backward.workspace = workspace;
    memcpy(backward.dresidual, t->dx, size * sizeof *out);
    memcpy(backward.dweight, t->dw, channels * sizeof *out);
    memcpy(backward.dbias, t->dw, channels * sizeof *out);
    assert_int_equal(mu_kernel_norm_backward(pool, &backward), MU_OK);
    free(mean);
    free(workspace);
}

static void expect_norm(const struct norm_case *t, const float *out)
{
    uint32_t rows = t->sequences * t->length, channels = t->channels;
    size_t size = (size_t)rows * channels;
    double *x = kt_doubles(t->x, size), *b = kt_doubles(t->b, size), *w = kt_doubles(t->weight, channels);
    double *bias = kt_doubles(t->bias, channels), *dy = kt_doubles(t->dy, size), *dx = kt_doubles(t->dx, size);
    double *keep = t->drop ? row_factors(t->drop, t->sequences, t->length, channels) : NULL;
    double *r = kt_alloc(4 * size + 2 * (size_t)channels, sizeof *r);
    struct ref_norm norm = {rows, channels, x, t->branch ? b : NULL, keep, w, bias, false};
    ref_norm_forward(&norm, r, r + size);
    ref_norm_backward(&norm, dy, t->first ? NULL : dx, r + 2 * size, r + 3 * size, r + 4 * size,
                      r + 4 * size + channels);
    for (uint32_t i = 0; t->accumulate && i < 2 * channels; i++)
        r[4 * size + i] += (double)t->dw[i % channels];
    kt_expect_close("norm residual", out, r, size, tolerance, 1.0);
    kt_expect_close("norm y", out + size, r + size, size, 4 * tolerance, 1.0);
    kt_expect_close("norm dresidual", out + 2 * size, r + 2 * size, size, 8 * tolerance, 1.0);
    kt_expect_close("norm dbranch", out + 3 * size, r + 3 * size, size, 8 * tolerance, 1.0);
    kt_expect_close("norm dweight, dbias", out + 4 * size, r + 4 * size, 2 * channels, 8 * tolerance, 1.0);
    double *all[] = {x, b, w, bias, dy, dx, keep, r};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

static void check_norm(uint32_t sequences, uint32_t length, uint32_t channels, int flags, const struct mu_dropout *drop)
{
    size_t size = (size_t)sequences * length * channels;
    struct norm_case t = {sequences,
                          length,
                          channels,
                          flags & 1,
                          flags & 2,
                          flags & 4,
                          flags & 1 ? drop : NULL,
                          kt_floats(size, 1, 2.0),
                          kt_floats(size, 2, 1.0),
                          kt_floats(channels, 3, 1.0),
                          kt_floats(channels, 4, 1.0),
                          kt_floats(size, 5, 1.0),
                          kt_floats(size, 6, 1.0),
                          kt_floats(channels, 7, 1.0)};
    size_t written = 4 * size + 2 * (size_t)channels;
    float *out = kt_alloc(written, sizeof *out);
    run_norm(&t, kt_pool(1), out);
    expect_norm(&t, out);
    kt_expect_same_bits("norm", run_norm, &t, written);
    float *all[] = {t.x, t.b, t.weight, t.bias, t.dy, t.dx, t.dw, out};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

static void test_norm_matches_reference_with_the_same_bits(void **state)
{
    (void)state;
    struct mu_dropout drop = mu_dropout_site(1, 2, 3, MU_DROPOUT_MLP, 0.3f, samples);
    for (int flags = 0; flags < 8; flags++) {
        check_norm(2, 3, 7, flags, NULL);
        check_norm(1, 130, 33, flags, NULL);
        check_norm(3, 30, 64, flags, &drop);
        check_norm(1, 1, 769, flags, &drop);
    }
}

/* ---- embedding ---- */

struct embedding_case {
    uint32_t sequences, length, channels, vocab;
    const struct mu_dropout *drop;
    int32_t *tokens;
    float *wte, *wpe, *dx, *dwte, *dwpe;
};

/* x, dwte, dwpe. */
static void run_embedding(void *ctx, struct mu_pool *pool, float *out)
{
    const struct embedding_case *t = ctx;
    size_t size = (size_t)t->sequences * t->length * t->channels, table = (size_t)t->vocab * t->channels;
    float *dx = kt_copy(t->dx, size), *dwte = out + size, *dwpe = dwte + table;
    memcpy(dwte, t->dwte, table * sizeof *out);
    memcpy(dwpe, t->dwpe, (size_t)t->length * t->channels * sizeof *out);
    const uint32_t rows = t->sequences * t->length;
    const float *const slices[] = {t->wte};
    const struct mu_vocab_slices whole = {slices, t->vocab, 0, 1, t->vocab};
    assert_int_equal(
        mu_kernel_embedding_forward(pool, 0, rows, t->length, t->channels, &whole, t->tokens, t->wpe, t->drop, out),
        MU_OK);
    assert_int_equal(mu_kernel_embedding_drop(pool, 0, rows, t->length, t->channels, t->drop, dx), MU_OK);
    assert_int_equal(mu_kernel_embedding_backward(pool, rows, t->channels, t->tokens, dx, 0, t->vocab, dwte), MU_OK);
    assert_int_equal(mu_kernel_position_backward(pool, 0, rows, t->length, t->channels, dx, dwpe), MU_OK);
    free(dx);
}

static void check_embedding(uint32_t sequences, uint32_t length, uint32_t channels, uint32_t vocab,
                            const struct mu_dropout *drop)
{
    size_t size = (size_t)sequences * length * channels, table = (size_t)vocab * channels,
           places = (size_t)length * channels;
    struct embedding_case t = {sequences,
                               length,
                               channels,
                               vocab,
                               drop,
                               kt_alloc(sequences * length, sizeof(int32_t)),
                               kt_floats(table, 1, 1.0),
                               kt_floats(places, 2, 1.0),
                               kt_floats(size, 3, 1.0),
                               kt_floats(table, 4, 1.0),
                               kt_floats(places, 5, 1.0)};
    uint64_t random = 3;
    for (uint32_t i = 0; i < sequences * length; i++)
        t.tokens[i] = (int32_t)(mu_splitmix64(&random) % (vocab > 2 && i % 3 ? 2 : vocab)); /* many repeats */
    double *wte = kt_doubles(t.wte, table), *wpe = kt_doubles(t.wpe, places), *dx = kt_doubles(t.dx, size);
    double *keep = drop ? row_factors(drop, sequences, length, channels) : NULL;
    double *r = kt_alloc(size + table + places, sizeof *r);
    struct ref_embedding e = {sequences, length, channels, vocab, t.tokens, keep};
    ref_embedding_forward(&e, wte, wpe, r);
    ref_embedding_backward(&e, dx, r + size, r + size + table);
    for (size_t i = 0; i < table + places; i++)
        r[size + i] += (double)(i < table ? t.dwte[i] : t.dwpe[i - table]);
    float *out = kt_alloc(size + table + places, sizeof *out);
    run_embedding(&t, kt_pool(2), out);
    kt_expect_close("embedding", out, r, size + table + places, tolerance, 1.0);
    kt_expect_same_bits("embedding", run_embedding, &t, size + table + places);
    double *doubles[] = {wte, wpe, dx, keep, r};
    for (size_t i = 0; i < sizeof doubles / sizeof doubles[0]; i++)
        free(doubles[i]);
    float *floats[] = {t.wte, t.wpe, t.dx, t.dwte, t.dwpe, out};
    for (size_t i = 0; i < sizeof floats / sizeof floats[0]; i++)
        free(floats[i]);
    free(t.tokens);
}

static void test_embedding_matches_reference_with_the_same_bits(void **state)
{
    (void)state;
    struct mu_dropout drop = mu_dropout_site(4, 5, 0, MU_DROPOUT_EMBEDDING, 0.1f, samples);
    check_embedding(1, 1, 1, 1, NULL);
    check_embedding(2, 37, 70, 11, NULL);
    check_embedding(4, 9, 130, 300, &drop);
}

/* ---- GELU ---- */

enum { GELU_COUNT = 16384 + 1000 };

static void run_gelu(void *ctx, struct mu_pool *pool, float *out)
{
    const float *x = ctx;
    assert_int_equal(mu_kernel_gelu_forward(pool, GELU_COUNT, x, out), MU_OK);
    assert_int_equal(mu_kernel_gelu_backward(pool, GELU_COUNT, x, x, out + GELU_COUNT), MU_OK);
}

static void test_gelu_matches_reference_with_the_same_bits(void **state)
{
    (void)state;
    float *x = kt_floats(GELU_COUNT, 1, 12.0), *out = kt_alloc(2 * GELU_COUNT, sizeof *out);
    const float special[] = {0.0f, -0.0f, 1e-40f, -1e-40f, 1e30f, -1e30f, 88.0f, -88.0f, 1e-20f, INFINITY};
    memcpy(x, special, sizeof special);
    run_gelu(x, kt_pool(0), out);
    for (uint32_t i = 0; i < GELU_COUNT; i++) {
        double v = (double)x[i];
        if (isinf(v)) {
            assert_true(isinf(out[i]) && out[i] > 0);
            continue;
        }
        double y = fabs(v) > 50 ? (v > 0 ? v : 0) : ref_gelu(v),
               grad = fabs(v) > 50 ? (v > 0 ? 1 : 0) : ref_gelu_grad(v);
        assert_true(fabs((double)out[i] - y) <= 2e-6 * fabs(y) + 1e-7);
        assert_true(fabs((double)out[GELU_COUNT + i] - v * grad) <= 1e-6 * fabs(v) * (fabs(grad) + 1) + 1e-38);
    }
    kt_expect_same_bits("gelu", run_gelu, x, 2 * GELU_COUNT);
    free(x);
    free(out);
}

/* ---- loss ---- */

struct loss_case {
    uint32_t rows, vocab, stride;
    float *logits;
    int32_t *targets;
};

/* Gradients densely, then the losses as pairs of floats (their bits). */
static void run_loss(void *ctx, struct mu_pool *pool, float *out)
{
    const struct loss_case *t = ctx;
    size_t size = (size_t)t->rows * t->stride;
    float *logits = kt_copy(t->logits, size);
    double *loss = kt_alloc(t->rows, sizeof *loss), *only = kt_alloc(t->rows, sizeof *only);
    assert_int_equal(mu_kernel_cross_entropy(pool, t->rows, t->vocab, t->stride, logits, t->targets, 0.0f, false, only),
                     MU_OK);
    assert_memory_equal(logits, t->logits, size * sizeof *logits);
    assert_int_equal(
        mu_kernel_cross_entropy(pool, t->rows, t->vocab, t->stride, logits, t->targets, 0.125f, true, loss), MU_OK);
    assert_memory_equal(loss, only, t->rows * sizeof *loss);
    for (uint32_t i = 0; i < t->rows; i++)
        memcpy(out + (size_t)i * t->vocab, logits + (size_t)i * t->stride, t->vocab * sizeof *out);
    memcpy(out + (size_t)t->rows * t->vocab, loss, t->rows * sizeof *loss);
    free(logits);
    free(loss);
    free(only);
}

static void check_loss(uint32_t rows, uint32_t vocab, double scale)
{
    size_t size = (size_t)rows * vocab;
    struct loss_case t = {rows, vocab, vocab + 5, kt_floats((size_t)rows * (vocab + 5), 1, scale),
                          kt_alloc(rows, sizeof(int32_t))};
    double *dense = kt_alloc(size, sizeof *dense), *loss = kt_alloc(rows, sizeof *loss),
           *grad = kt_alloc(size, sizeof *grad);
    for (uint32_t i = 0; i < rows; i++) {
        t.targets[i] = i % 3 == 2 ? -1 : (int32_t)(i * 7919 % vocab);
        for (uint32_t j = 0; j < vocab; j++)
            dense[(size_t)i * vocab + j] = (double)t.logits[(size_t)i * t.stride + j];
    }
    ref_cross_entropy(rows, vocab, dense, t.targets, 0.125, loss, grad);
    float *out = kt_alloc(size + 2 * (size_t)rows, sizeof *out);
    run_loss(&t, kt_pool(1), out);
    kt_expect_close("dlogits", out, grad, size, tolerance, 0.0625);
    for (uint32_t i = 0; i < rows; i++) {
        double value;
        memcpy(&value, out + size + 2 * (size_t)i, sizeof value);
        assert_true(fabs(value - loss[i]) <= 1e-6 * fmax(1.0, fabs(loss[i])));
    }
    kt_expect_same_bits("cross entropy", run_loss, &t, size + 2 * (size_t)rows);
    free(t.logits);
    free(t.targets);
    free(dense);
    free(loss);
    free(grad);
    free(out);
}

static void test_cross_entropy_matches_reference_with_the_same_bits(void **state)
{
    (void)state;
    check_loss(1, 1, 1.0);
    check_loss(7, 19, 3.0);
    check_loss(10, 257, 30.0);
    check_loss(3, 5003, 100.0);
}

/* ---- flat ranges ---- */

enum { RANGE = 3 * 16384 + 77 };

static void run_add(void *ctx, struct mu_pool *pool, float *out)
{
    const float *x = ctx;
    memcpy(out, x, RANGE * sizeof *out);
    assert_int_equal(mu_kernel_add(pool, RANGE, out, x + RANGE), MU_OK);
}

static void test_add_is_one_rounding_everywhere(void **state)
{
    (void)state;
    float *x = kt_floats(2 * RANGE, 1, 1.0), *out = kt_alloc(RANGE, sizeof *out);
    run_add(x, kt_pool(3), out);
    for (uint32_t i = 0; i < RANGE; i++)
        assert_true(out[i] == x[i] + x[RANGE + i]);
    kt_expect_same_bits("add", run_add, x, RANGE);
    free(x);
    free(out);
}

struct adamw_case {
    struct mu_adamw adamw;
    float *p, *m, *v, *g;
};

static void run_adamw(void *ctx, struct mu_pool *pool, float *out)
{
    const struct adamw_case *t = ctx;
    memcpy(out, t->p, RANGE * sizeof *out);
    memcpy(out + RANGE, t->m, RANGE * sizeof *out);
    memcpy(out + 2 * RANGE, t->v, RANGE * sizeof *out);
    assert_int_equal(mu_kernel_adamw(pool, &t->adamw, RANGE, out, out + RANGE, out + 2 * RANGE, t->g), MU_OK);
}

static void test_adamw_matches_reference_with_the_same_bits(void **state)
{
    (void)state;
    struct adamw_case t = {mu_adamw_at(0.01, 0.9, 0.999, 1e-8, 0.1, 2.0, 5.0, 7), kt_floats(RANGE, 1, 1.0),
                           kt_floats(RANGE, 2, 0.1), kt_floats(RANGE, 3, 0.1), kt_floats(RANGE, 4, 1.0)};
    for (uint32_t i = 0; i < RANGE; i++)
        t.v[i] = t.v[i] * t.v[i];
    assert_true(fabs((double)t.adamw.gradient_scale - 0.4) < 1e-7);
    assert_true(mu_adamw_at(0.01, 0.9, 0.999, 1e-8, 0.1, 0.0, 5.0, 7).gradient_scale == 1.0f);
    assert_true(mu_adamw_at(0.01, 0.9, 0.999, 1e-8, 0.1, 5.5, 5.0, 7).gradient_scale == 1.0f);
    double *p = kt_doubles(t.p, RANGE), *m = kt_doubles(t.m, RANGE), *v = kt_doubles(t.v, RANGE),
           *g = kt_doubles(t.g, RANGE);
    ref_adamw(&(struct ref_adamw){0.01, 0.9, 0.999, 1e-8, 0.1, 0.4, 7}, RANGE, p, m, v, g);
    float *out = kt_alloc(3 * RANGE, sizeof *out);
    run_adamw(&t, kt_pool(1), out);
    kt_expect_close("adamw p", out, p, RANGE, tolerance, 1.0);
    kt_expect_close("adamw m", out + RANGE, m, RANGE, tolerance, 0.1);
    kt_expect_close("adamw v", out + 2 * RANGE, v, RANGE, tolerance, 0.01);
    kt_expect_same_bits("adamw", run_adamw, &t, 3 * RANGE);
    double *doubles[] = {p, m, v, g};
    float *floats[] = {t.p, t.m, t.v, t.g, out};
    for (size_t i = 0; i < 4; i++)
        free(doubles[i]);
    for (size_t i = 0; i < 5; i++)
        free(floats[i]);
}

static void run_square_sum(void *ctx, struct mu_pool *pool, float *out)
{
    struct mu_exact_sum sum;
    mu_exact_sum_init(&sum);
    const float *g = ctx;
    assert_int_equal(mu_kernel_square_sum(pool, RANGE, g, &sum), MU_OK);
    double value = mu_exact_sum_round(&sum);
    memcpy(out, &value, sizeof value);
}

static void test_square_sum_is_right_and_splits_at_blocks(void **state)
{
    (void)state;
    enum { BLOCK = 4096 };
    float *g = kt_floats(RANGE, 1, 1e-3);
    double expected = 0, value;
    for (uint32_t i = 0; i < RANGE; i++)
        expected += (double)g[i] * (double)g[i];
    struct mu_exact_sum whole, parts;
    mu_exact_sum_init(&whole);
    mu_exact_sum_init(&parts);
    assert_int_equal(mu_kernel_square_sum(kt_pool(0), RANGE, g, &whole), MU_OK);
    assert_int_equal(mu_kernel_square_sum(kt_pool(1), RANGE - 5 * BLOCK, g + 5 * BLOCK, &parts), MU_OK);
    assert_int_equal(mu_kernel_square_sum(kt_pool(2), 5 * BLOCK, g, &parts), MU_OK);
    value = mu_exact_sum_round(&whole);
    assert_true(fabs(value - expected) <= 1e-12 * expected);
    assert_true(mu_exact_sum_round(&parts) == value);
    kt_expect_same_bits("square sum", run_square_sum, g, 2);
    g[100] = NAN;
    assert_int_equal(mu_kernel_square_sum(kt_pool(1), RANGE, g, &parts), MU_OK);
    assert_false(mu_exact_sum_finite(&parts));
    free(g);
}

/* ---- random numbers ---- */

static void run_init(void *ctx, struct mu_pool *pool, float *out)
{
    (void)ctx;
    assert_int_equal(mu_kernel_init_normal(pool, 77, 5, 0, RANGE, 0.02f, out), MU_OK);
}

static void test_initial_values_are_normal_and_named_by_element(void **state)
{
    (void)state;
    float *x = kt_alloc(RANGE, sizeof *x), *part = kt_alloc(1000, sizeof *part);
    run_init(NULL, kt_pool(1), x);
    double mean = 0, square = 0, fourth = 0;
    for (uint32_t i = 0; i < RANGE; i++) {
        double z = (double)x[i] / 0.02;
        mean += z / RANGE;
        square += z * z / RANGE;
        fourth += z * z * z * z / RANGE;
    }
    assert_true(fabs(mean) < 0.02 && fabs(square - 1) < 0.03 && fabs(fourth - 3) < 0.2);
    assert_int_equal(mu_kernel_init_normal(kt_pool(3), 77, 5, 12345, 1000, 0.02f, part), MU_OK);
    assert_memory_equal(part, x + 12345, 1000 * sizeof *x);
    assert_int_equal(mu_kernel_init_normal(kt_pool(3), 77, 6, 12345, 1000, 0.02f, part), MU_OK);
    assert_true(memcmp(part, x + 12345, 1000 * sizeof *x) != 0);
    /* the formula in kernels.h, element 64 j + 32 w + 16 h + l */
    uint32_t key[2] = {77, 0}, random[4];
    const uint32_t j = 9, w = 1, l = 3, counter[4] = {16 * j + l, 0, 5, 0x696e6974};
    mu_philox4x32(key, counter, random);
    double u1 = ((random[2 * w] >> 8) + 1) * 0x1p-24, u2 = (random[2 * w + 1] >> 8) * 0x1p-24,
           radius = sqrt(-2 * log(u1));
    assert_true(fabs((double)x[64 * j + 32 * w + l] - 0.02 * radius * cos(2 * 3.14159265358979 * u2)) < 1e-8);
    assert_true(fabs((double)x[64 * j + 32 * w + 16 + l] - 0.02 * radius * sin(2 * 3.14159265358979 * u2)) < 1e-8);
    kt_expect_same_bits("init", run_init, NULL, RANGE);
    free(x);
    free(part);
}

static void run_dropout(void *ctx, struct mu_pool *pool, float *out)
{
    (void)pool;
    mu_dropout_factors(ctx, 1, 17, 64, 1000, out);
}

static void test_dropout_numbers_are_philox_of_the_logical_element(void **state)
{
    (void)state;
    struct mu_dropout drop = mu_dropout_site(11, 0x500000001u, 3, MU_DROPOUT_PROJECTION, 0.25f, samples);
    float keep[1000];
    uint32_t kept = 0;
    mu_dropout_factors(&drop, 1, 17, 64, 1000, keep);
    for (uint32_t i = 0; i < 1000; i++) {
        uint32_t feature = 64 + i, random[4];
        const uint32_t counter[4] = {feature / 64 * 16 + feature % 16, 17, (uint32_t)samples[1],
                                     (uint32_t)(samples[1] >> 32)};
        mu_philox4x32(drop.key, counter, random);
        bool keeps = random[feature / 16 % 4] >= 0x40000000u;
        assert_true(keep[i] == (keeps ? (float)(1 / 0.75) : 0.0f));
        kept += keeps;
    }
    assert_in_range(kept, 700, 800);
    kt_expect_same_bits("dropout", run_dropout, &drop, 1000);
    struct mu_dropout other = mu_dropout_site(11, 0x500000002u, 3, MU_DROPOUT_PROJECTION, 0.25f, samples);
    assert_true(memcmp(other.key, drop.key, sizeof drop.key) != 0);
    assert_int_equal(mu_dropout_site(1, 1, 1, MU_DROPOUT_MLP, 0.0f, samples).threshold, 0);
}

/* ---- identity ---- */

static const uint64_t known_low = 0x03fc8c23d0bc84e6u, known_high = 0xdcd766aebdcc11f6u;
static const struct mu_kernel_shapes shapes = {.sequences = 2, .length = 100, .channels = 96, .heads = 3, .vocab = 301};

struct identity_case {
    struct mu_kernel_shapes shapes;
    uint32_t parts;
};

static void run_identity(void *ctx, struct mu_pool *pool, float *out)
{
    const struct identity_case *t = ctx;
    struct mu_kernel_identity identity;
    assert_int_equal(mu_kernels_identity(pool, &t->shapes, NULL, &identity), MU_OK);
    assert_int_equal(identity.count, t->parts);
    for (uint32_t i = 0; i < identity.count; i++) {
        assert_non_null(identity.parts[i].name);
        memcpy(out + 2 * i, &identity.parts[i].hash, sizeof identity.parts[i].hash);
    }
    memcpy(out + 2 * t->parts, &identity.total, sizeof identity.total);
}

/* Every machine computes these: a change of any kernel's bits is a change of the numeric identity, and must be meant.
 */
static void test_identity_is_the_known_one_everywhere(void **state)
{
    (void)state;
    struct identity_case t = {shapes, 12};
    struct mu_kernel_identity identity;
    assert_int_equal(mu_kernels_identity(kt_pool(1), &shapes, NULL, &identity), MU_OK);
    if (identity.total.low != known_low || identity.total.high != known_high)
        fail_msg("identity is 0x%016llx, 0x%016llx", (unsigned long long)identity.total.low,
                 (unsigned long long)identity.total.high);
    kt_expect_same_bits("identity", run_identity, &t, 2 * t.parts + 4);
    struct mu_kernel_shapes other = shapes;
    other.channels = 99;
    uint64_t before = identity.total.low;
    assert_int_equal(mu_kernels_identity(kt_pool(1), &other, NULL, &identity), MU_OK);
    assert_true(identity.total.low != before);
}

/* A job that uses more kernels is judged by more parts; the first ones stay. */
static void test_identity_covers_what_the_job_uses(void **state)
{
    (void)state;
    struct mu_kernel_identity base, more;
    struct identity_case all = {shapes, 18}, sliced = {shapes, 14};
    assert_int_equal(mu_kernels_identity(kt_pool(1), &shapes, NULL, &base), MU_OK);
    all.shapes.heads = 4;
    all.shapes.kv_heads = 2;
    all.shapes.hidden = 270;
    all.shapes.slices = 2;
    all.shapes.llama = true;
    kt_expect_same_bits("identity of llama", run_identity, &all, 2 * all.parts + 4);
    sliced.shapes.slices = 4;
    kt_expect_same_bits("identity with slices", run_identity, &sliced, 2 * sliced.parts + 4);
    assert_int_equal(mu_kernels_identity(kt_pool(1), &sliced.shapes, NULL, &more), MU_OK);
    for (uint32_t i = 0; i < base.count; i++)
        assert_true(base.parts[i].hash == more.parts[i].hash && strcmp(base.parts[i].name, more.parts[i].name) == 0);
    assert_true(more.total.low != base.total.low);
    struct mu_kernel_shapes gpt2 = shapes; /* spelled out, the same job */
    gpt2.kv_heads = gpt2.heads;
    gpt2.hidden = 4 * gpt2.channels;
    gpt2.slices = 1;
    assert_int_equal(mu_kernels_identity(kt_pool(1), &gpt2, NULL, &more), MU_OK);
    assert_memory_equal(&more.total, &base.total, sizeof base.total);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_norm_matches_reference_with_the_same_bits),
        cmocka_unit_test(test_embedding_matches_reference_with_the_same_bits),
        cmocka_unit_test(test_gelu_matches_reference_with_the_same_bits),
        cmocka_unit_test(test_cross_entropy_matches_reference_with_the_same_bits),
        cmocka_unit_test(test_add_is_one_rounding_everywhere),
        cmocka_unit_test(test_adamw_matches_reference_with_the_same_bits),
        cmocka_unit_test(test_square_sum_is_right_and_splits_at_blocks),
        cmocka_unit_test(test_initial_values_are_normal_and_named_by_element),
        cmocka_unit_test(test_dropout_numbers_are_philox_of_the_logical_element),
        cmocka_unit_test(test_identity_is_the_known_one_everywhere),
        cmocka_unit_test(test_identity_covers_what_the_job_uses),
    };
    return cmocka_run_group_tests(tests, kt_setup, kt_teardown);
}
