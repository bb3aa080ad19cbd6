/* links: mu_test_kernels */
/* What is cut into slices gives the bits of the slices computed one by one and added by the balanced tree. */
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

/* ---- products ---- */

struct sliced {
    struct mu_gemm gemm;
    float *a, *b, *bias, *aux;
    size_t a_size, b_size;
};

/* `apart`: the slices of A and B lie in buffers of their own behind each other, with gaps; else side by side in the
 * rows of one matrix, as far as the flags allow. */
static struct sliced sliced_of(uint32_t m, uint32_t n, uint32_t k, uint32_t slices, uint32_t k_last, int flags)
{
    bool ta = flags & 1, tb = flags & 2, apart = flags & 4;
    struct sliced t = {.gemm = {.m = m, .n = n, .k = k, .slices = slices, .k_last = k_last}};
    struct mu_gemm *g = &t.gemm;
    g->transpose_a = ta;
    g->transpose_b = tb;
    g->lda = ta ? m + 1 : apart ? k : (size_t)k * slices;
    g->ldb = tb ? (apart ? k : (size_t)k * slices) : n + 2;
    g->a_slice = ta ? k * g->lda : apart ? (size_t)m * k + 5 : k;
    g->b_slice = tb ? (apart ? (size_t)n * k + 3 : k) : k * g->ldb;
    g->ldc = n + 3;
    g->ldaux = n;
    t.a_size = (slices - 1) * g->a_slice + (ta ? k : m) * g->lda;
    t.b_size = (slices - 1) * g->b_slice + (tb ? n : k) * g->ldb;
    t.a = kt_floats(t.a_size, 1, 1.0);
    t.b = kt_floats(t.b_size, 2, 1.0);
    t.bias = kt_floats(n, 3, 1.0);
    t.aux = kt_floats((size_t)m * n, 4, 3.0);
    g->a = t.a;
    g->b = t.b;
    g->bias = t.bias;
    g->aux = t.aux;
    return t;
}

static void free_sliced(struct sliced *t)
{
    free(t->a);
    free(t->b);
    free(t->bias);
    free(t->aux);
}

/* C densely, then what BIAS_GELU keeps. */
static void run_sliced(void *ctx, struct mu_pool *pool, float *out)
{
    const struct sliced *t = ctx;
    struct mu_gemm g = t->gemm;
    float *c = kt_floats(g.m * g.ldc, 9, 1.0);
    g.c = c;
    g.before = out + (size_t)g.m * g.n;
    assert_int_equal(mu_kernel_gemm(pool, &g), MU_OK);
    for (uint32_t i = 0; i < g.m; i++)
        memcpy(out + (size_t)i * g.n, c + i * g.ldc, g.n * sizeof *out);
    free(c);
}

/* Slice s alone, densely. */
static void run_slice(const struct sliced *t, uint32_t s, float *out)
{
    struct mu_gemm g = t->gemm;
    g.k = s + 1 == g.slices && g.k_last ? g.k_last : g.k;
    g.slices = g.k_last = 0;
    g.epilogue = MU_EPILOGUE_NONE;
    g.a += s * g.a_slice;
    g.b += s * g.b_slice;
    g.c = out;
    g.ldc = g.n;
    assert_int_equal(mu_kernel_gemm(kt_pool(1), &g), MU_OK);
}

/* The slices one by one, added by the tree with the one addition there is. */
static float *sliced_by_hand(const struct sliced *t)
{
    const uint32_t slices = t->gemm.slices;
    const size_t size = (size_t)t->gemm.m * t->gemm.n;
    float *parts = kt_alloc(slices * size, sizeof *parts);
    for (uint32_t s = 0; s < slices; s++)
        run_slice(t, s, parts + s * size);
    for (uint32_t step = 1; step < slices; step *= 2)
        for (uint32_t s = 0; s < slices; s += 2 * step)
            assert_int_equal(mu_kernel_add(kt_pool(1), size, parts + s * size, parts + (s + step) * size), MU_OK);
    return parts;
}

static double *sliced_reference(const struct sliced *t)
{
    const struct mu_gemm *g = &t->gemm;
    double *c = kt_alloc((size_t)g->m * g->n, sizeof *c);
    for (uint32_t s = 0; s < g->slices; s++) {
        uint32_t k = s + 1 == g->slices && g->k_last ? g->k_last : g->k;
        double *a = kt_alloc((size_t)g->m * k, sizeof *a), *b = kt_alloc((size_t)g->n * k, sizeof *b);
        for (uint32_t l = 0; l < k; l++) {
            for (uint32_t i = 0; i < g->m; i++)
                a[(size_t)i * k + l] =
                    (double)g->a[s * g->a_slice + (g->transpose_a ? l * g->lda + i : i * g->lda + l)];
            for (uint32_t j = 0; j < g->n; j++)
                b[(size_t)l * g->n + j] =
                    (double)g->b[s * g->b_slice + (g->transpose_b ? j * g->ldb + l : l * g->ldb + j)];
        }
        ref_gemm(&(struct ref_gemm){g->m, g->n, k, false, false}, a, b, true, c);
        free(a);
        free(b);
    }
    return c;
}

static void check_sliced(uint32_t m, uint32_t n, uint32_t k, uint32_t slices, uint32_t k_last, int flags)
{
    struct sliced t = sliced_of(m, n, k, slices, k_last, flags);
    size_t size = (size_t)m * n;
    float *out = kt_alloc(size, sizeof *out), *parts = sliced_by_hand(&t);
    double *reference = sliced_reference(&t);
    run_sliced(&t, kt_pool(1), out);
    kt_expect_close("sliced product", out, reference, size, tolerance, 1.0);
    assert_memory_equal(out, parts, size * sizeof *out);
    kt_expect_same_bits("sliced product", run_sliced, &t, size);
    free(out);
    free(parts);
    free(reference);
    free_sliced(&t);
}

static void test_sliced_products_are_the_tree_of_their_slices(void **state)
{
    (void)state;
    static const struct {
        uint32_t m, n, k, slices, k_last;
    } shapes[] = {
        {1, 1, 1, 2, 0},      {9, 49, 1, 64, 0},    {65, 53, 12, 64, 7},  {8, 48, 96, 8, 0},  {66, 60, 192, 4, 0},
        {13, 100, 257, 2, 3}, {19, 50, 300, 4, 44}, {5, 51, 600, 8, 513}, {9, 50, 64, 4, 64}, {30, 20, 128, 2, 1},
        {20, 400, 33, 16, 1}, {40, 60, 256, 8, 0},  {10, 60, 129, 64, 9}, {3, 5, 85, 2, 84},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int flags = 0; flags < 8; flags++)
            check_sliced(shapes[i].m, shapes[i].n, shapes[i].k, shapes[i].slices, shapes[i].k_last, flags);
}

/* More rows than the partial sums of one tile have room for. */
static void test_tall_sliced_products_are_the_tree_of_their_slices(void **state)
{
    (void)state;
    check_sliced(1100, 400, 3, 2, 0, 0);
    check_sliced(700, 50, 140, 16, 0, 1);
    check_sliced(1030, 49, 257, 4, 17, 4);
}

static void test_epilogues_follow_the_sum_of_the_slices(void **state)
{
    (void)state;
    const uint32_t m = 37, n = 61;
    const size_t size = (size_t)m * n;
    for (uint32_t k = 20; k < 400; k += 130)
        for (int epilogue = MU_EPILOGUE_BIAS; epilogue <= MU_EPILOGUE_GELU_GRAD; epilogue++) {
            struct sliced t = sliced_of(m, n, k, 4, k - 1, 2);
            t.gemm.epilogue = (enum mu_epilogue)epilogue;
            float *out = kt_alloc(2 * size, sizeof *out), *sum = sliced_by_hand(&t), *other = kt_copy(sum, size);
            run_sliced(&t, kt_pool(1), out);
            if (epilogue == MU_EPILOGUE_GELU_GRAD) {
                assert_int_equal(mu_kernel_gelu_backward(kt_pool(0), size, t.aux, sum, other), MU_OK);
                assert_memory_equal(out, other, size * sizeof *out);
            } else {
                assert_int_equal(mu_kernel_bias_add(kt_pool(2), m, n, t.bias, sum), MU_OK);
                if (epilogue == MU_EPILOGUE_BIAS_GELU) {
                    assert_memory_equal(out + size, sum, size * sizeof *out);
                    assert_int_equal(mu_kernel_gelu_forward(kt_pool(0), size, sum, other), MU_OK);
                    memcpy(sum, other, size * sizeof *sum);
                }
                assert_memory_equal(out, sum, size * sizeof *out);
            }
            kt_expect_same_bits("sliced epilogue", run_sliced, &t, epilogue == MU_EPILOGUE_BIAS_GELU ? 2 * size : size);
            free(out);
            free(sum);
            free(other);
            free_sliced(&t);
        }
}

/* Two halves of the slices, as two ranks hold them, added once: the same tree. */
static void test_ranks_hold_aligned_subtrees_of_the_slices(void **state)
{
    (void)state;
    struct sliced t = sliced_of(33, 70, 50, 8, 41, 0);
    const size_t size = 33 * 70;
    float *whole = kt_alloc(size, sizeof *whole), *left = kt_alloc(size, sizeof *left),
          *right = kt_alloc(size, sizeof *right);
    run_sliced(&t, kt_pool(1), whole);
    struct sliced half = t;
    half.gemm.slices = 4;
    half.gemm.k_last = 0;
    run_sliced(&half, kt_pool(1), left);
    half.gemm.k_last = t.gemm.k_last;
    half.gemm.a += 4 * t.gemm.a_slice;
    half.gemm.b += 4 * t.gemm.b_slice;
    run_sliced(&half, kt_pool(2), right);
    assert_int_equal(mu_kernel_add(kt_pool(1), size, left, right), MU_OK);
    assert_memory_equal(left, whole, size * sizeof *left);
    free(whole);
    free(left);
    free(right);
    free_sliced(&t);
}

/* ---- loss ---- */

struct sliced_loss {
    uint32_t rows, vocab, slices, width; /* width: vocabulary rows of a slice */
    float *logits;                       /* [rows, vocab] */
    int32_t *targets;
    bool gradient;
};

/* Gradients densely, then the losses as pairs of floats (their bits). */
static void run_sliced_loss(void *ctx, struct mu_pool *pool, float *out)
{
    const struct sliced_loss *t = ctx;
    const size_t ld = t->width + 3, each = t->rows * ld;
    float *logits = kt_floats(t->slices * each, 7, 1.0), *highest = kt_alloc(t->slices * t->rows, sizeof *highest);
    double *sums = kt_alloc(t->slices * t->rows, sizeof *sums), *loss = kt_alloc(t->rows, sizeof *loss);
    for (uint32_t i = 0; i < t->rows * t->vocab; i++)
        logits[i % t->vocab / t->width * each + i / t->vocab * ld + i % t->vocab % t->width] = t->logits[i];
    for (int phase = 0; phase < 3; phase++) {
        for (uint32_t s = 0; s < t->slices; s++) {
            uint32_t first = s * t->width, size = t->vocab - first < t->width ? t->vocab - first : t->width;
            float *x = logits + s * each;
            enum mu_status status =
                phase == 0   ? mu_kernel_cross_entropy_max(pool, t->rows, size, ld, x, highest + s * t->rows)
                : phase == 1 ? mu_kernel_cross_entropy_sum(pool, t->rows, first, size, ld, x, t->targets, highest,
                                                           t->gradient, sums + s * t->rows, loss)
                             : mu_kernel_cross_entropy_gradient(pool, t->rows, first, size, ld, x, t->targets, sums,
                                                                0.125f, t->gradient, loss);
            assert_int_equal(status, MU_OK);
        }
        if (phase == 0)
            assert_int_equal(mu_kernel_join_max(pool, t->slices, t->rows, highest), MU_OK);
        if (phase == 1)
            assert_int_equal(mu_kernel_join_sums(pool, t->slices, t->rows, sums), MU_OK);
    }
    for (uint32_t i = 0; i < t->rows * t->vocab; i++)
        out[i] = logits[i % t->vocab / t->width * each + i / t->vocab * ld + i % t->vocab % t->width];
    memcpy(out + (size_t)t->rows * t->vocab, loss, t->rows * sizeof *loss);
    free(logits);
    free(highest);
    free(sums);
    free(loss);
}

static void check_sliced_loss(uint32_t rows, uint32_t vocab, uint32_t slices, double scale)
{
    const size_t size = (size_t)rows * vocab, written = size + 2 * (size_t)rows;
    struct sliced_loss t = {
        rows, vocab, slices, (vocab + slices - 1) / slices, kt_floats(size, 1, scale), kt_alloc(rows, sizeof(int32_t)),
        true};
    double *x = kt_doubles(t.logits, size), *loss = kt_alloc(rows, sizeof *loss), *grad = kt_alloc(size, sizeof *grad);
    for (uint32_t i = 0; i < rows; i++)
        t.targets[i] = i % 4 == 3 ? -1 : (int32_t)(i * 7919 % vocab);
    ref_cross_entropy(rows, vocab, x, t.targets, 0.125, loss, grad);
    float *out = kt_alloc(written, sizeof *out), *other = kt_alloc(written, sizeof *other);
    run_sliced_loss(&t, kt_pool(1), out);
    kt_expect_close("sliced dlogits", out, grad, size, tolerance, 0.0625);
    for (uint32_t i = 0; i < rows; i++) {
        double value;
        memcpy(&value, out + size + 2 * (size_t)i, sizeof value);
        assert_true(fabs(value - loss[i]) <= 1e-6 * fmax(1.0, fabs(loss[i])));
    }
    kt_expect_same_bits("sliced cross entropy", run_sliced_loss, &t, written);
    t.gradient = false; /* evaluation: the same losses, the logits stay */
    run_sliced_loss(&t, kt_pool(2), other);
    assert_memory_equal(other, t.logits, size * sizeof *other);
    assert_memory_equal(other + size, out + size, rows * sizeof(double));
    if (slices == 1) {
        double *own = kt_alloc(rows, sizeof *own);
        assert_int_equal(
            mu_kernel_cross_entropy(kt_pool(0), rows, vocab, vocab, t.logits, t.targets, 0.125f, true, own), MU_OK);
        assert_memory_equal(t.logits, out, size * sizeof *out);
        assert_memory_equal(own, out + size, rows * sizeof *own);
        free(own);
    }
    void *all[] = {t.logits, t.targets, x, loss, grad, out, other};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

static void test_cross_entropy_over_slices_matches_reference_with_the_same_bits(void **state)
{
    (void)state;
    check_sliced_loss(1, 1, 1, 1.0);
    check_sliced_loss(9, 300, 1, 5.0);
    check_sliced_loss(8, 2, 2, 3.0);
    check_sliced_loss(13, 301, 4, 20.0);
    check_sliced_loss(5, 5003, 2, 100.0);
    check_sliced_loss(6, 319, 64, 10.0);
}

static void test_sums_of_slices_are_added_by_the_tree(void **state)
{
    (void)state;
    double sums[4][2] = {{1.0, 2.0}, {0x1p-53, 3.0}, {0x1p-53, 4.0}, {0x1p-53, 5.0}};
    assert_int_equal(mu_kernel_join_sums(kt_pool(1), 4, 2, sums[0]), MU_OK);
    assert_true(sums[0][0] == 1.0 + 0x1p-52); /* in order they would vanish one by one */
    assert_true(sums[0][1] == 14.0);
    float highest[2][3] = {{1.0f, -3.0f, 0.5f}, {0.0f, -2.0f, 0.5f}};
    assert_int_equal(mu_kernel_join_max(kt_pool(1), 2, 3, highest[0]), MU_OK);
    assert_true(highest[0][0] == 1.0f && highest[0][1] == -2.0f && highest[0][2] == 0.5f);
}

/* ---- embedding ---- */

enum { LENGTH = 11, SEQUENCES = 4, ROWS = LENGTH * SEQUENCES, CHANNELS = 70, VOCAB = 29, SLICES = 4, SLICE_ROWS = 8 };

struct lookup {
    int32_t tokens[ROWS];
    float *table, *wpe, *dx, *dtable, *dwpe;
    struct mu_dropout drop;
};

static struct lookup lookup_of(void)
{
    struct lookup t = {.table = kt_floats(VOCAB * CHANNELS, 1, 1.0), .wpe = kt_floats(LENGTH * CHANNELS, 2, 1.0)};
    t.dx = kt_floats(ROWS * CHANNELS, 3, 1.0);
    t.dtable = kt_floats(VOCAB * CHANNELS, 4, 1.0);
    t.dwpe = kt_floats(LENGTH * CHANNELS, 5, 1.0);
    t.drop = mu_dropout_site(4, 5, 0, MU_DROPOUT_EMBEDDING, 0.3f, samples);
    uint64_t random = 3;
    for (uint32_t i = 0; i < ROWS; i++)
        t.tokens[i] = (int32_t)(mu_splitmix64(&random) % VOCAB);
    t.tokens[0] = 0;
    t.tokens[ROWS - 1] = VOCAB - 1;
    return t;
}

static void free_lookup(struct lookup *t)
{
    float *all[] = {t->table, t->wpe, t->dx, t->dtable, t->dwpe};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

static void look_up(const struct lookup *t, uint32_t first_row, uint32_t rows, uint32_t first_slice, uint32_t count,
                    float *x)
{
    const float *slices[SLICES];
    for (uint32_t i = 0; i < count; i++)
        slices[i] = t->table + (size_t)(first_slice + i) * SLICE_ROWS * CHANNELS;
    const struct mu_vocab_slices table = {slices, SLICE_ROWS, first_slice, count, VOCAB};
    assert_int_equal(mu_kernel_embedding_forward(kt_pool(2), first_row, rows, LENGTH, CHANNELS, &table,
                                                 t->tokens + first_row, t->wpe, &t->drop, x),
                     MU_OK);
}

static void test_lookup_by_slices_and_row_ranges_is_the_whole(void **state)
{
    (void)state;
    struct lookup t = lookup_of();
    float *whole = kt_alloc(ROWS * CHANNELS, sizeof *whole), *parts = kt_floats(ROWS * CHANNELS, 6, 1.0),
          *before = kt_copy(parts, ROWS * CHANNELS);
    look_up(&t, 0, ROWS, 0, SLICES, whole);
    look_up(&t, 0, ROWS, 1, 2, parts);
    for (uint32_t i = 0; i < ROWS; i++) {
        bool here = t.tokens[i] / SLICE_ROWS == 1 || t.tokens[i] / SLICE_ROWS == 2;
        assert_memory_equal(parts + i * CHANNELS, (here ? whole : before) + i * CHANNELS, CHANNELS * sizeof *parts);
    }
    for (uint32_t first = 0; first < ROWS; first += 13)
        look_up(&t, first, ROWS - first < 13 ? ROWS - first : 13, 0, SLICES, parts + first * CHANNELS);
    assert_memory_equal(parts, whole, ROWS * CHANNELS * sizeof *whole);
    /* without positions and dropout: the table's rows themselves */
    const float *slices[] = {t.table};
    const struct mu_vocab_slices table = {slices, VOCAB, 0, 1, VOCAB};
    assert_int_equal(
        mu_kernel_embedding_forward(kt_pool(1), 5, 20, LENGTH, CHANNELS, &table, t.tokens + 5, NULL, NULL, parts),
        MU_OK);
    for (uint32_t i = 0; i < 20; i++)
        assert_memory_equal(parts + i * CHANNELS, t.table + t.tokens[5 + i] * CHANNELS, CHANNELS * sizeof *parts);
    free(whole);
    free(parts);
    free(before);
    free_lookup(&t);
}

static void test_lookup_gradient_by_slices_is_the_whole(void **state)
{
    (void)state;
    struct lookup t = lookup_of();
    float *expected = kt_copy(t.dtable, VOCAB * CHANNELS), *dx = kt_copy(t.dx, ROWS * CHANNELS);
    for (uint32_t first = 0; first < ROWS; first += 7) /* dropout of row ranges */
        assert_int_equal(mu_kernel_embedding_drop(kt_pool(2), first, ROWS - first < 7 ? ROWS - first : 7, LENGTH,
                                                  CHANNELS, &t.drop, dx + first * CHANNELS),
                         MU_OK);
    for (uint32_t i = 0; i < ROWS; i++) {
        float keep[CHANNELS];
        mu_dropout_factors(&t.drop, i / LENGTH, i % LENGTH, 0, CHANNELS, keep);
        for (uint32_t c = 0; c < CHANNELS; c++) {
            float d = t.dx[i * CHANNELS + c] * keep[c];
            expected[(size_t)t.tokens[i] * CHANNELS + c] += d; /* ascending rows */
            assert_true(d == dx[i * CHANNELS + c]);
        }
    }
    for (uint32_t s = 0; s < SLICES; s++) {
        uint32_t first = s * SLICE_ROWS, count = VOCAB - first < SLICE_ROWS ? VOCAB - first : SLICE_ROWS;
        assert_int_equal(mu_kernel_embedding_backward(kt_pool(3), ROWS, CHANNELS, t.tokens, dx, first, count,
                                                      t.dtable + first * CHANNELS),
                         MU_OK);
    }
    assert_memory_equal(t.dtable, expected, VOCAB * CHANNELS * sizeof *expected);
    free(expected);
    free(dx);
    free_lookup(&t);
}

static void test_position_gradient_of_a_token_slice_is_its_rows(void **state)
{
    (void)state;
    struct lookup t = lookup_of();
    float *expected = kt_copy(t.dwpe, LENGTH * CHANNELS);
    const uint32_t first = 17, rows = 20; /* from the middle of one sequence to the middle of another */
    for (uint32_t i = first; i < first + rows; i++)
        for (uint32_t c = 0; c < CHANNELS; c++)
            expected[i % LENGTH * CHANNELS + c] += t.dx[i * CHANNELS + c];
    assert_int_equal(
        mu_kernel_position_backward(kt_pool(2), first, rows, LENGTH, CHANNELS, t.dx + first * CHANNELS, t.dwpe), MU_OK);
    assert_memory_equal(t.dwpe, expected, LENGTH * CHANNELS * sizeof *expected);
    free(expected);
    free_lookup(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sliced_products_are_the_tree_of_their_slices),
        cmocka_unit_test(test_tall_sliced_products_are_the_tree_of_their_slices),
        cmocka_unit_test(test_epilogues_follow_the_sum_of_the_slices),
        cmocka_unit_test(test_ranks_hold_aligned_subtrees_of_the_slices),
        cmocka_unit_test(test_cross_entropy_over_slices_matches_reference_with_the_same_bits),
        cmocka_unit_test(test_sums_of_slices_are_added_by_the_tree),
        cmocka_unit_test(test_lookup_by_slices_and_row_ranges_is_the_whole),
        cmocka_unit_test(test_lookup_gradient_by_slices_is_the_whole),
        cmocka_unit_test(test_position_gradient_of_a_token_slice_is_its_rows),
    };
    return cmocka_run_group_tests(tests, kt_setup, kt_teardown);
}
