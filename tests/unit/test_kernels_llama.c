/* links: mu_test_kernels */
/* What Llama adds: RMSNorm, SwiGLU, rotary positions; and norms and biases on ranges of rows. */
#include "tests/lib/kernel_testing.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "tests/lib/reference.h"

static const double tolerance = 2e-6;
static const uint64_t samples[] = {5, 0xabcdef0123u, 9, 1};

/* ---- norms ---- */

struct norm_case {
    uint32_t first_row, rows, length, channels;
    bool rms, branch, first, accumulate;
    const struct mu_dropout *drop;
    float *x, *b, *weight, *bias, *dy, *dx, *dw; /* whole buffers: rows from 0 */
};

/* residual_out, y, dresidual, dbranch: size each; dweight (and dbias): channels each. */
static void run_norm(void *ctx, struct mu_pool *pool, float *out)
{
    const struct norm_case *t = ctx;
    const uint32_t channels = t->channels;
    const size_t size = (size_t)t->rows * channels, at = (size_t)t->first_row * channels;
    float *mean = kt_alloc(2 * (size_t)t->rows, sizeof *mean), *rstd = mean + t->rows;
    float *workspace = kt_alloc(mu_kernel_norm_workspace(t->rows, channels), sizeof *workspace);
    struct mu_norm_forward forward = {
        .first_row = t->first_row, .rows = t->rows, .length = t->length, .channels = channels, .rms = t->rms};
    forward.residual = t->x + at;
    forward.branch = t->branch ? t->b + at : NULL;
    forward.weight = t->weight;
    forward.bias = t->rms ? NULL : t->bias;
    forward.drop = t->drop;
    forward.residual_out = out;
    forward.y = out + size;
    forward.mean = t->rms ? NULL : mean;
    forward.rstd = rstd;
    assert_int_equal(mu_kernel_norm_forward(pool, &forward), MU_OK);
    struct mu_norm_backward backward = {
        .first_row = t->first_row, .rows = t->rows, .length = t->length, .channels = channels, .rms = t->rms};
    backward.residual = out;
    backward.weight = t->weight;
    backward.mean = forward.mean;
    backward.rstd = rstd;
    backward.dy = t->dy + at;
    backward.drop = t->drop;
    backward.accumulate = t->accumulate;
    backward.first = t->first;
    backward.dresidual = out + 2 * size;
    backward.dbranch = out + 3 * size;
    backward.dweight = out + 4 * size;
    backward.dbias = t->rms ? NULL : backward.dweight + channels;
    backward.workspace = workspace;
    memcpy(backward.dresidual, t->dx + at, size * sizeof *out);
    for (uint32_t i = 0; i < (t->rms ? 1 : 2); i++)
        memcpy(backward.dweight + i * channels, t->dw, channels * sizeof *out);
    assert_int_equal(mu_kernel_norm_backward(pool, &backward), MU_OK);
    free(mean);
    free(workspace);
}

static struct norm_case norm_of(uint32_t rows, uint32_t length, uint32_t channels, int flags,
                                const struct mu_dropout *drop)
{
    const size_t size = (size_t)rows * channels;
    struct norm_case t = {.rows = rows, .length = length, .channels = channels, .rms = true};
    t.branch = flags & 1;
    t.first = flags & 2;
    t.accumulate = flags & 4;
    t.drop = t.branch ? drop : NULL;
    float **buffers[] = {&t.x, &t.b, &t.dy, &t.dx, &t.weight, &t.bias, &t.dw};
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++)
        *buffers[i] = kt_floats(i < 4 ? size : channels, i + 1, 1.5);
    return t;
}

static void free_norm(struct norm_case *t)
{
    float *all[] = {t->x, t->b, t->dy, t->dx, t->weight, t->bias, t->dw};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

static void check_rms(uint32_t rows, uint32_t length, uint32_t channels, int flags, const struct mu_dropout *drop)
{
    struct norm_case t = norm_of(rows, length, channels, flags, drop);
    const size_t size = (size_t)rows * channels, written = 4 * size + channels;
    double *x = kt_doubles(t.x, size), *b = kt_doubles(t.b, size), *w = kt_doubles(t.weight, channels);
    double *dy = kt_doubles(t.dy, size), *dx = kt_doubles(t.dx, size), *keep = kt_alloc(size, sizeof *keep);
    double *r = kt_alloc(written, sizeof *r);
    float *out = kt_alloc(written, sizeof *out), *factors = kt_alloc(channels, sizeof *factors);
    for (uint32_t i = 0; t.drop && i < rows; i++) {
        mu_dropout_factors(t.drop, i / length, i % length, 0, channels, factors);
        for (uint32_t c = 0; c < channels; c++)
            keep[(size_t)i * channels + c] = (double)factors[c];
    }
    struct ref_norm norm = {rows, channels, x, t.branch ? b : NULL, t.drop ? keep : NULL, w, NULL, true};
    ref_norm_forward(&norm, r, r + size);
    ref_norm_backward(&norm, dy, t.first ? NULL : dx, r + 2 * size, r + 3 * size, r + 4 * size, NULL);
    for (uint32_t i = 0; t.accumulate && i < channels; i++)
        r[4 * size + i] += (double)t.dw[i];
    run_norm(&t, kt_pool(1), out);
    kt_expect_close("rms residual", out, r, size, tolerance, 1.0);
    kt_expect_close("rms y", out + size, r + size, size, 4 * tolerance, 1.0);
    kt_expect_close("rms dresidual", out + 2 * size, r + 2 * size, size, 8 * tolerance, 1.0);
    kt_expect_close("rms dbranch", out + 3 * size, r + 3 * size, size, 8 * tolerance, 1.0);
    kt_expect_close("rms dweight", out + 4 * size, r + 4 * size, channels, 8 * tolerance, 1.0);
    kt_expect_same_bits("rms norm", run_norm, &t, written);
    void *all[] = {x, b, w, dy, dx, keep, r, out, factors};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
    free_norm(&t);
}

static void test_rms_norm_matches_reference_with_the_same_bits(void **state)
{
    (void)state;
    struct mu_dropout drop = mu_dropout_site(1, 2, 3, MU_DROPOUT_MLP, 0.3f, samples);
    for (int flags = 0; flags < 8; flags++) {
        check_rms(6, 3, 7, flags, NULL);
        check_rms(130, 130, 33, flags, NULL);
        check_rms(90, 30, 64, flags, &drop);
        check_rms(1, 1, 769, flags, &drop);
    }
}

/* Rows [11, 11 + 20) give what they give among all 40; the weight gradients are those of these rows. */
static void check_row_range(bool rms)
{
    enum { ROWS = 40, LENGTH = 13, CHANNELS = 50, FIRST = 11, COUNT = 20, SIZE = ROWS * CHANNELS };
    struct mu_dropout drop = mu_dropout_site(1, 2, 3, MU_DROPOUT_MLP, 0.3f, samples);
    struct norm_case t = norm_of(ROWS, LENGTH, CHANNELS, 1, &drop);
    t.rms = rms;
    struct norm_case range = t;
    range.first_row = FIRST;
    range.rows = COUNT;
    const size_t part = COUNT * CHANNELS;
    float *whole = kt_alloc(4 * SIZE + 2 * CHANNELS, sizeof *whole),
          *out = kt_alloc(4 * part + 2 * CHANNELS, sizeof *out);
    run_norm(&t, kt_pool(1), whole);
    run_norm(&range, kt_pool(2), out);
    for (uint32_t i = 0; i < 4; i++)
        assert_memory_equal(out + i * part, whole + i * SIZE + FIRST * CHANNELS, part * sizeof *out);
    for (uint32_t i = 0; i < ROWS * CHANNELS; i++) /* rows outside contribute nothing to the weights */
        if (i / CHANNELS < FIRST || i / CHANNELS >= FIRST + COUNT)
            t.dy[i] = 0.0f;
    run_norm(&t, kt_pool(1), whole);
    for (uint32_t i = 0; i < (rms ? 1 : 2) * CHANNELS; i++)
        assert_true(out[4 * part + i] == whole[4 * SIZE + i]);
    free(whole);
    free(out);
    free_norm(&t);
}

static void test_norm_of_a_row_range_is_that_of_the_whole(void **state)
{
    (void)state;
    check_row_range(false);
    check_row_range(true);
}

/* Dropped norm outputs are made again from what is kept, in place. */
static void test_norm_recomputed_in_place_has_the_same_bits(void **state)
{
    (void)state;
    for (int rms = 0; rms < 2; rms++) {
        struct norm_case t = norm_of(20, 20, 70, 1, NULL);
        t.rms = rms;
        const size_t size = 20 * 70;
        float *out = kt_alloc(4 * size + 140, sizeof *out), *y = kt_alloc(size, sizeof *y),
              *stream = kt_alloc(size, sizeof *stream), moments[40];
        run_norm(&t, kt_pool(1), out);
        memcpy(stream, out, size * sizeof *out);
        struct mu_norm_forward again = {.rows = 20, .length = 20, .channels = 70, .rms = rms, .residual = stream};
        again.residual_out = stream;
        again.weight = t.weight;
        again.bias = t.bias;
        again.y = y;
        again.mean = moments;
        again.rstd = moments + 20;
        assert_int_equal(mu_kernel_norm_forward(kt_pool(3), &again), MU_OK);
        assert_memory_equal(y, out + size, size * sizeof *y);
        assert_memory_equal(stream, out, size * sizeof *y);
        free(out);
        free(y);
        free(stream);
        free_norm(&t);
    }
}

/* ---- SwiGLU ---- */

struct swiglu_case {
    uint32_t rows, hidden;
    float *gate_up, *dy;
};

/* y, d_gate_up. */
static void run_swiglu(void *ctx, struct mu_pool *pool, float *out)
{
    const struct swiglu_case *t = ctx;
    const size_t size = (size_t)t->rows * t->hidden;
    assert_int_equal(mu_kernel_swiglu_forward(pool, t->rows, t->hidden, t->gate_up, out), MU_OK);
    memcpy(out + size, t->gate_up, 2 * size * sizeof *out); /* in place */
    assert_int_equal(mu_kernel_swiglu_backward(pool, t->rows, t->hidden, out + size, t->dy, out + size), MU_OK);
}

static void check_swiglu(uint32_t rows, uint32_t hidden, double scale)
{
    const size_t size = (size_t)rows * hidden;
    struct swiglu_case t = {rows, hidden, kt_floats(2 * size, 1, scale), kt_floats(size, 2, 1.0)};
    double *gate_up = kt_doubles(t.gate_up, 2 * size), *dy = kt_doubles(t.dy, size), *r = kt_alloc(3 * size, sizeof *r);
    ref_swiglu_forward(rows, hidden, gate_up, r);
    ref_swiglu_backward(rows, hidden, gate_up, dy, r + size);
    float *out = kt_alloc(3 * size, sizeof *out);
    run_swiglu(&t, kt_pool(1), out);
    kt_expect_close("swiglu", out, r, size, tolerance, 1.0);
    kt_expect_close("swiglu gradient", out + size, r + size, 2 * size, tolerance, 1.0);
    kt_expect_same_bits("swiglu", run_swiglu, &t, 3 * size);
    void *all[] = {gate_up, dy, r, out, t.gate_up, t.dy};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

static void test_swiglu_matches_reference_with_the_same_bits(void **state)
{
    (void)state;
    check_swiglu(1, 1, 1.0);
    check_swiglu(7, 37, 10.0);
    check_swiglu(130, 512, 4.0);
    check_swiglu(2, 17000, 100.0);
}

static void test_swiglu_of_extreme_gates_is_finite_and_right(void **state)
{
    (void)state;
    enum { COUNT = 10 };
    const float gates[COUNT] = {0.0f, -0.0f, 1e-40f, -87.0f, -87.5f, -1e30f, -3e38f, 88.5f, 1e30f, -INFINITY};
    float x[2 * COUNT], y[COUNT], d[2 * COUNT], dy[COUNT];
    for (uint32_t i = 0; i < COUNT; i++) {
        x[i] = gates[i];
        x[COUNT + i] = dy[i] = 1.0f;
    }
    struct swiglu_case t = {1, COUNT, x, dy};
    assert_int_equal(mu_kernel_swiglu_forward(kt_pool(0), 1, COUNT, x, y), MU_OK);
    assert_int_equal(mu_kernel_swiglu_backward(kt_pool(0), 1, COUNT, x, dy, d), MU_OK);
    for (uint32_t i = 0; i < COUNT; i++) {
        double g = (double)gates[i],
               silu = g < -100 ? 0.0
                      : g > 80 ? g
                               : g / (1.0 + exp(-g)),
               slope = g < -80  ? 0.0
                       : g > 80 ? 1.0
                                : 0.5;
        assert_true(fabs((double)y[i] - silu) <= 1e-6 * fabs(silu) + 1e-30);
        assert_true(fabs((double)d[COUNT + i] - silu) <= 1e-6 * fabs(silu) + 1e-30);
        assert_true(fabs((double)d[i] - slope) <= 1e-6);
    }
    kt_expect_same_bits("swiglu of extremes", run_swiglu, &t, 3 * COUNT);
    x[0] = NAN; /* never hidden */
    assert_int_equal(mu_kernel_swiglu_forward(kt_pool(0), 1, COUNT, x, y), MU_OK);
    assert_int_equal(mu_kernel_swiglu_backward(kt_pool(0), 1, COUNT, x, dy, d), MU_OK);
    assert_true(isnan(y[0]) && isnan(d[0]) && isnan(d[COUNT]));
}

/* ---- rotary positions ---- */

enum { EXTRA = 5 }; /* floats of a row that are not rotated */

struct rotary_case {
    uint32_t first_row, rows, length, heads, head_channels;
    float *x, *cosines, *sines;
    bool inverse;
};

static size_t rotary_stride(const struct rotary_case *t)
{
    return (size_t)t->heads * t->head_channels + EXTRA;
}

static void run_rotary(void *ctx, struct mu_pool *pool, float *out)
{
    const struct rotary_case *t = ctx;
    memcpy(out, t->x, t->rows * rotary_stride(t) * sizeof *out);
    assert_int_equal(mu_kernel_rotary(pool, t->first_row, t->rows, t->length, t->heads, t->head_channels,
                                      rotary_stride(t), t->cosines, t->sines, t->inverse, out),
                     MU_OK);
}

static void check_rotary(uint32_t first_row, uint32_t rows, uint32_t length, uint32_t heads, uint32_t head_channels)
{
    struct rotary_case t = {first_row, rows, length, heads, head_channels, NULL, NULL, NULL, false};
    const size_t stride = rotary_stride(&t), width = stride - EXTRA, table = (size_t)length * head_channels / 2;
    t.x = kt_floats(rows * stride, 1, 1.0);
    t.cosines = kt_alloc(table, sizeof *t.cosines);
    t.sines = kt_alloc(table, sizeof *t.sines);
    mu_kernel_rotary_table(length, head_channels, 10000.0, t.cosines, t.sines);
    for (int inverse = 0; inverse < 2; inverse++) {
        t.inverse = inverse;
        double *r = kt_alloc(rows * width, sizeof *r);
        float *out = kt_alloc(rows * stride, sizeof *out), *dense = kt_alloc(rows * width, sizeof *dense);
        run_rotary(&t, kt_pool(1), out);
        for (size_t i = 0; i < rows * stride; i++)
            if (i % stride < width) {
                r[i / stride * width + i % stride] = (double)t.x[i];
                dense[i / stride * width + i % stride] = out[i];
            } else {
                assert_true(out[i] == t.x[i]);
            }
        ref_rotary(first_row, rows, length, heads, head_channels, 10000.0, inverse, r);
        kt_expect_close("rotary", dense, r, rows * width, tolerance, 1.0);
        kt_expect_same_bits("rotary", run_rotary, &t, rows * stride);
        free(r);
        free(out);
        free(dense);
    }
    free(t.x);
    free(t.cosines);
    free(t.sines);
}

static void test_rotary_matches_reference_with_the_same_bits(void **state)
{
    (void)state;
    check_rotary(0, 1, 1, 1, 2);
    check_rotary(0, 100, 50, 3, 64);
    check_rotary(37, 30, 21, 2, 18);
    check_rotary(5, 70, 1000, 5, 128);
}

/* The table far from the start is as exact as near it: its angles are doubles. */
static void test_rotary_table_is_correctly_rounded_far_out(void **state)
{
    (void)state;
    enum { LENGTH = 20000, HEAD = 8 };
    float *cosines = kt_alloc(LENGTH * HEAD / 2, sizeof *cosines), *sines = kt_alloc(LENGTH * HEAD / 2, sizeof *sines);
    mu_kernel_rotary_table(LENGTH, HEAD, 500000.0, cosines, sines);
    for (uint32_t token = 0; token < LENGTH; token += 1999)
        for (uint32_t i = 0; i < HEAD / 2; i++) {
            long double angle = token * powl(500000.0L, -2.0L * i / HEAD);
            assert_true(fabs((double)cosines[token * HEAD / 2 + i] - (double)cosl(angle)) <= 0x1.01p-25);
            assert_true(fabs((double)sines[token * HEAD / 2 + i] - (double)sinl(angle)) <= 0x1.01p-25);
        }
    assert_true(cosines[0] == 1.0f && sines[0] == 0.0f);
    free(cosines);
    free(sines);
}

/* ---- biases ---- */

enum { BIAS_ROWS = 130, BIAS_COLUMNS = 301 };

static void run_bias(void *ctx, struct mu_pool *pool, float *out)
{
    const float *x = ctx;
    memcpy(out, x, BIAS_ROWS * BIAS_COLUMNS * sizeof *out);
    assert_int_equal(mu_kernel_bias_add(pool, BIAS_ROWS, BIAS_COLUMNS, x + BIAS_ROWS * BIAS_COLUMNS, out), MU_OK);
}

static void test_bias_add_is_one_rounding_everywhere(void **state)
{
    (void)state;
    const size_t size = BIAS_ROWS * BIAS_COLUMNS;
    float *x = kt_floats(size + BIAS_COLUMNS, 1, 1.0), *out = kt_alloc(size, sizeof *out);
    run_bias(x, kt_pool(2), out);
    for (size_t i = 0; i < size; i++)
        assert_true(out[i] == x[i] + x[size + i % BIAS_COLUMNS]);
    kt_expect_same_bits("bias", run_bias, x, size);
    free(x);
    free(out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rms_norm_matches_reference_with_the_same_bits),
        cmocka_unit_test(test_norm_of_a_row_range_is_that_of_the_whole),
        cmocka_unit_test(test_norm_recomputed_in_place_has_the_same_bits),
        cmocka_unit_test(test_swiglu_matches_reference_with_the_same_bits),
        cmocka_unit_test(test_swiglu_of_extreme_gates_is_finite_and_right),
        cmocka_unit_test(test_rotary_matches_reference_with_the_same_bits),
        cmocka_unit_test(test_rotary_table_is_correctly_rounded_far_out),
        cmocka_unit_test(test_bias_add_is_one_rounding_everywhere),
    };
    return cmocka_run_group_tests(tests, kt_setup, kt_teardown);
}
