/* links: mu_test_kernels */
#include "tests/lib/kernel_testing.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "tests/lib/reference.h"

static const double tolerance = 2e-6; /* of the largest result, reductions up to 1100 long */

struct product {
    struct mu_gemm gemm;
    float *a, *b, *bias, *aux, *start; /* start: C before, for accumulate */
    uint32_t padding;                  /* extra floats in each row of every matrix */
};

/* C (and what BIAS_GELU keeps) densely into out; the padding between rows of C must stay untouched. */
static void run_product(void *ctx, struct mu_pool *pool, float *out)
{
    const struct product *p = ctx;
    const struct mu_gemm *g = &p->gemm;
    size_t size = g->m * g->ldc;
    float *c = kt_copy(p->start, size), *before = kt_copy(p->start, size);
    struct mu_gemm gemm = *g;
    gemm.c = c;
    gemm.before = before;
    assert_int_equal(mu_kernel_gemm(pool, &gemm), MU_OK);
    for (uint32_t i = 0; i < g->m; i++)
        for (uint32_t j = 0; j < g->ldc; j++) {
            if (j >= g->n) {
                assert_true(memcmp(&c[i * g->ldc + j], &p->start[i * g->ldc + j], sizeof *c) == 0);
                continue;
            }
            out[(size_t)i * g->n + j] = c[i * g->ldc + j];
            if (g->epilogue == MU_EPILOGUE_BIAS_GELU)
                out[(size_t)(g->m + i) * g->n + j] = before[i * g->ldc + j];
        }
    free(c);
    free(before);
}

static struct product product_of(uint32_t m, uint32_t n, uint32_t k, bool ta, bool tb, uint32_t padding)
{
    struct product p = {.padding = padding};
    p.gemm = (struct mu_gemm){.m = m, .n = n, .k = k, .transpose_a = ta, .transpose_b = tb};
    p.gemm.lda = (ta ? m : k) + padding;
    p.gemm.ldb = (tb ? k : n) + padding;
    p.gemm.ldc = p.gemm.ldaux = n + padding;
    p.a = kt_floats((ta ? k : m) * p.gemm.lda, 1, 1.0);
    p.b = kt_floats((tb ? n : k) * p.gemm.ldb, 2, 1.0);
    p.bias = kt_floats(n, 3, 1.0);
    p.aux = kt_floats(m * p.gemm.ldaux, 4, 3.0);
    p.start = kt_floats(m * p.gemm.ldc, 5, 1.0);
    p.gemm.a = p.a;
    p.gemm.b = p.b;
    p.gemm.bias = p.bias;
    p.gemm.aux = p.aux;
    return p;
}

static void free_product(struct product *p)
{
    free(p->a);
    free(p->b);
    free(p->bias);
    free(p->aux);
    free(p->start);
}

static double *dense(const float *x, uint32_t rows, uint32_t columns, size_t stride)
{
    double *out = kt_alloc((size_t)rows * columns, sizeof *out);
    for (uint32_t i = 0; i < rows; i++)
        for (uint32_t j = 0; j < columns; j++)
            out[(size_t)i * columns + j] = (double)x[i * stride + j];
    return out;
}

static double *reference_product(const struct product *p)
{
    const struct mu_gemm *g = &p->gemm;
    double *a = dense(p->a, g->transpose_a ? g->k : g->m, g->transpose_a ? g->m : g->k, g->lda);
    double *b = dense(p->b, g->transpose_b ? g->n : g->k, g->transpose_b ? g->k : g->n, g->ldb);
    double *c = dense(p->start, g->m, g->n, g->ldc);
    double *out = kt_alloc(2 * (size_t)g->m * g->n, sizeof *out);
    ref_gemm(&(struct ref_gemm){g->m, g->n, g->k, g->transpose_a, g->transpose_b}, a, b, g->accumulate, c);
    for (size_t i = 0; i < (size_t)g->m * g->n; i++) {
        size_t row = i / g->n, column = i % g->n;
        bool bias = g->epilogue == MU_EPILOGUE_BIAS || g->epilogue == MU_EPILOGUE_BIAS_GELU;
        double x = c[i] + (bias ? (double)p->bias[column] : 0.0);
        out[(size_t)g->m * g->n + i] = x;
        if (g->epilogue == MU_EPILOGUE_BIAS_GELU)
            x = ref_gelu(x);
        if (g->epilogue == MU_EPILOGUE_GELU_GRAD)
            x *= ref_gelu_grad((double)p->aux[row * g->ldaux + column]);
        out[i] = x;
    }
    free(a);
    free(b);
    free(c);
    return out;
}

static const struct {
    uint32_t m, n, k, padding;
} shapes[] = {{1, 1, 1, 0},     {8, 48, 256, 0}, {7, 47, 255, 1},  {9, 49, 257, 3}, {1, 130, 17, 0},
              {64, 96, 768, 0}, {130, 5, 33, 2}, {17, 400, 31, 5}, {3, 3, 1100, 1}, {531, 51, 20, 0}};

static void test_products_match_reference_with_the_same_bits(void **state)
{
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
        for (int flags = 0; flags < 8; flags++) {
            struct product p =
                product_of(shapes[s].m, shapes[s].n, shapes[s].k, flags & 1, flags & 2, shapes[s].padding);
            p.gemm.accumulate = flags & 4;
            size_t size = (size_t)p.gemm.m * p.gemm.n;
            float *out = kt_alloc(size, sizeof *out);
            double *reference = reference_product(&p);
            run_product(&p, kt_pool(1), out);
            kt_expect_close("gemm", out, reference, size, tolerance, 1.0);
            kt_expect_same_bits("gemm", run_product, &p, size);
            free(out);
            free(reference);
            free_product(&p);
        }
}

static void test_epilogues_match_reference_with_the_same_bits(void **state)
{
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
        for (int epilogue = MU_EPILOGUE_BIAS; epilogue <= MU_EPILOGUE_GELU_GRAD; epilogue++) {
            struct product p = product_of(shapes[s].m, shapes[s].n, shapes[s].k, false, true, shapes[s].padding);
            p.gemm.epilogue = (enum mu_epilogue)epilogue;
            size_t size = (size_t)p.gemm.m * p.gemm.n, written = epilogue == MU_EPILOGUE_BIAS_GELU ? 2 * size : size;
            float *out = kt_alloc(written, sizeof *out);
            double *reference = reference_product(&p);
            run_product(&p, kt_pool(0), out);
            kt_expect_close("epilogue", out, reference, written, 2 * tolerance, 1.0);
            kt_expect_same_bits("epilogue", run_product, &p, written);
            free(out);
            free(reference);
            free_product(&p);
        }
}

/* The definition in kernels.h, spelled out. */
static void test_product_is_chains_of_256_added_in_order(void **state)
{
    (void)state;
    struct product p = product_of(5, 50, 700, false, false, 0);
    p.gemm.accumulate = true;
    float *out = kt_alloc(5 * 50, sizeof *out);
    run_product(&p, kt_pool(2), out);
    for (uint32_t i = 0; i < 5; i++)
        for (uint32_t j = 0; j < 50; j++) {
            float expected = p.start[i * 50 + j];
            for (uint32_t first = 0; first < 700; first += 256) {
                float chunk = 0.0f;
                for (uint32_t k = first; k < 700 && k < first + 256; k++)
                    chunk = fmaf(p.a[i * 700 + k], p.b[k * 50 + j], chunk);
                expected += chunk;
            }
            assert_true(memcmp(&expected, &out[i * 50 + j], sizeof expected) == 0);
        }
    free(out);
    free_product(&p);
}

/* Rows, columns and their number do not show in an element: what tiles, edges and threads rely on. */
static void test_element_does_not_depend_on_its_neighbours(void **state)
{
    (void)state;
    struct product p = product_of(40, 100, 300, false, false, 0);
    float *whole = kt_alloc(40 * 100, sizeof *whole), *part = kt_alloc(3 * 7, sizeof *part);
    run_product(&p, kt_pool(0), whole);
    struct product q = p;
    q.gemm.m = 3;
    q.gemm.n = 7;
    q.gemm.a = p.a + 11 * p.gemm.lda;
    q.gemm.b = p.b + 53;
    run_product(&q, kt_pool(3), part);
    for (uint32_t i = 0; i < 3; i++)
        assert_memory_equal(part + i * 7, whole + (11 + i) * 100 + 53, 7 * sizeof(float));
    free(whole);
    free(part);
    free_product(&p);
}

static void test_denormals_are_kept(void **state)
{
    (void)state;
    for (uint32_t pool = 0; pool < KT_POOLS; pool++) {
        float a = 0x1p-70f, b = 0x1p-75f, c = 1.0f;
        struct mu_gemm g = {.m = 1, .n = 1, .k = 1, .a = &a, .b = &b, .c = &c, .lda = 1, .ldb = 1, .ldc = 1};
        assert_int_equal(mu_kernel_gemm(kt_pool(pool), &g), MU_OK);
        assert_true(c == 0x1p-145f);
    }
}

struct column {
    uint32_t rows, n, lda;
    bool accumulate;
    float *a, *start;
};

static void run_column_sum(void *ctx, struct mu_pool *pool, float *out)
{
    const struct column *t = ctx;
    memcpy(out, t->start, t->n * sizeof *out);
    assert_int_equal(mu_kernel_column_sum(pool, t->rows, t->n, t->a, t->lda, t->accumulate, out), MU_OK);
}

static void test_column_sum_matches_reference_with_the_same_bits(void **state)
{
    (void)state;
    const uint32_t rows[] = {1, 255, 256, 257, 700}, columns[] = {1, 64, 77, 200};
    for (size_t i = 0; i < 5; i++)
        for (size_t j = 0; j < 4; j++) {
            struct column t = {.rows = rows[i], .n = columns[j], .lda = columns[j] + 3, .accumulate = (i + j) % 2};
            t.a = kt_floats((size_t)t.rows * t.lda, 1, 1.0);
            t.start = kt_floats(t.n, 2, 1.0);
            double *reference = kt_doubles(t.start, t.n);
            for (uint32_t c = 0; c < t.n; c++) {
                reference[c] = t.accumulate ? reference[c] : 0.0;
                for (uint32_t r = 0; r < t.rows; r++)
                    reference[c] += (double)t.a[(size_t)r * t.lda + c];
            }
            float *out = kt_alloc(t.n, sizeof *out);
            run_column_sum(&t, kt_pool(0), out);
            kt_expect_close("column sum", out, reference, t.n, tolerance, 1.0);
            kt_expect_same_bits("column sum", run_column_sum, &t, t.n);
            free(out);
            free(reference);
            free(t.a);
            free(t.start);
        }
}

static void test_cancelled_product_returns_cancelled(void **state)
{
    (void)state;
    struct product p = product_of(100, 100, 600, false, false, 0);
    float *out = kt_alloc(100 * 100, sizeof *out);
    atomic_bool cancel = true;
    mu_pool_set_cancel(kt_pool(1), &cancel);
    p.gemm.c = out;
    assert_int_equal(mu_kernel_gemm(kt_pool(1), &p.gemm), MU_ERR_CANCELLED);
    mu_pool_set_cancel(kt_pool(1), NULL);
    assert_int_equal(mu_kernel_gemm(kt_pool(1), &p.gemm), MU_OK);
    free(out);
    free_product(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products_match_reference_with_the_same_bits),
        cmocka_unit_test(test_epilogues_match_reference_with_the_same_bits),
        cmocka_unit_test(test_product_is_chains_of_256_added_in_order),
        cmocka_unit_test(test_element_does_not_depend_on_its_neighbours),
        cmocka_unit_test(test_denormals_are_kept),
        cmocka_unit_test(test_column_sum_matches_reference_with_the_same_bits),
        cmocka_unit_test(test_cancelled_product_returns_cancelled),
    };
    return cmocka_run_group_tests(tests, kt_setup, kt_teardown);
}
