/* links: mu_test_cuda */
#include "tests/lib/cuda_testing.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

/* ---- matrix products ---- */

struct product_case {
    uint32_t m, n, k, slices, k_last;
    bool transpose_a, transpose_b, accumulate;
    enum mu_epilogue epilogue;
    uint32_t extra; /* columns between rows, and floats off alignment */
};

static void fill_strides(const struct product_case *t, struct mu_gemm *g)
{
    uint32_t slices = t->slices ? t->slices : 1;
    *g = (struct mu_gemm){.m = t->m, .n = t->n, .k = t->k, .slices = t->slices, .k_last = t->k_last};
    g->transpose_a = t->transpose_a;
    g->transpose_b = t->transpose_b;
    g->accumulate = t->accumulate;
    g->epilogue = t->epilogue;
    g->lda = (t->transpose_a ? t->m : t->k * slices) + t->extra;
    g->ldb = (t->transpose_b ? t->k * slices : t->n) + t->extra;
    g->ldc = g->ldaux = t->n + t->extra;
    g->a_slice = t->transpose_a ? t->k * g->lda : t->k;
    g->b_slice = t->transpose_b ? t->k : t->k * g->ldb;
}

static void check_product(const struct product_case *t)
{
    struct mu_gemm cpu, gpu;
    fill_strides(t, &cpu);
    uint32_t slices = t->slices ? t->slices : 1;
    size_t a_size = (t->transpose_a ? (size_t)t->k * slices : t->m) * cpu.lda,
           b_size = (t->transpose_b ? t->n : (size_t)t->k * slices) * cpu.ldb, c_size = t->m * cpu.ldc;
    float *a = ct_wild(a_size, 1), *b = ct_wild(b_size, 2), *c = ct_wild(c_size, 3), *aux = kt_floats(c_size, 4, 3.0),
          *bias = kt_floats(t->n, 5, 1.0), *before = kt_floats(c_size, 6, 1.0);
    gpu = cpu;
    gpu.a = ct_misaligned(a, a_size, t->extra);
    gpu.b = ct_misaligned(b, b_size, t->extra);
    gpu.c = ct_misaligned(c, c_size, t->extra);
    gpu.aux = ct_floats(aux, c_size);
    gpu.bias = ct_floats(bias, t->n);
    gpu.before = ct_floats(before, c_size);
    cpu.a = a;
    cpu.b = b;
    cpu.c = c;
    cpu.aux = aux;
    cpu.bias = bias;
    cpu.before = before;
    assert_int_equal(mu_kernel_gemm(ct_cpu(), &cpu), MU_OK);
    assert_int_equal(mu_cuda_gemm(ct_pool(), &gpu), MU_OK);
    ct_expect_bits("product", gpu.c, c, c_size);
    ct_expect_bits("before", gpu.before, before, c_size);
    float *all[] = {a, b, c, aux, bias, before};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
    ct_reset();
}

static void test_products_have_the_bits_of_the_cpu(void **state)
{
    (void)state;
    static const uint32_t shapes[][3] = {{1, 1, 1},    {3, 5, 7},      {33, 31, 257},
                                         {64, 48, 16}, {70, 130, 300}, {17, 4, 515}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int flags = 0; flags < 4; flags++) {
            struct product_case t = {.m = shapes[i][0], .n = shapes[i][1], .k = shapes[i][2]};
            t.transpose_a = flags & 1;
            t.transpose_b = flags & 2;
            t.extra = (uint32_t)(i + (size_t)flags) % 3;
            t.accumulate = i % 2 == 0;
            check_product(&t);
            t.accumulate = false;
            t.epilogue = (enum mu_epilogue)(i % 4);
            check_product(&t);
        }
}

static void test_large_tiles_have_the_bits_of_the_cpu(void **state)
{
    (void)state;
    check_product(&(struct product_case){.m = 260, .n = 257, .k = 40, .epilogue = MU_EPILOGUE_BIAS_GELU});
    check_product(&(struct product_case){.m = 257, .n = 260, .k = 33, .transpose_a = true, .accumulate = true});
    check_product(&(struct product_case){.m = 130, .n = 129, .k = 50, .transpose_b = true, .extra = 1});
}

static void test_slices_are_added_by_the_tree(void **state)
{
    (void)state;
    for (uint32_t slices = 2; slices <= 16; slices *= 2)
        for (int flags = 0; flags < 4; flags++) {
            struct product_case t = {.m = 35, .n = 37, .k = slices < 8 ? 260 : 19, .slices = slices};
            t.k_last = flags ? t.k - t.k / 2 : 0;
            t.transpose_a = flags == 3;
            t.transpose_b = flags & 1;
            t.epilogue = (enum mu_epilogue)flags;
            check_product(&t);
        }
    check_product(&(struct product_case){.m = 5, .n = 6, .k = 3, .slices = MU_GEMM_SLICES_MAX});
    check_product(&(struct product_case){.m = 140, .n = 132, .k = 9, .slices = 4, .epilogue = MU_EPILOGUE_BIAS});
    check_product(&(struct product_case){.m = 260, .n = 260, .k = 9, .slices = 2});
}

static void test_column_sums_have_the_bits_of_the_cpu(void **state)
{
    (void)state;
    static const uint32_t shapes[][2] = {{1, 1}, {5, 70}, {256, 3}, {257, 65}, {800, 130}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            uint32_t rows = shapes[i][0], n = shapes[i][1];
            size_t lda = n + 2 * (size_t)accumulate;
            float *a = ct_wild(rows * lda, 7), *out = ct_wild(n, 8);
            float *device_a = ct_floats(a, rows * lda), *device_out = ct_floats(out, n);
            assert_int_equal(mu_kernel_column_sum(ct_cpu(), rows, n, a, lda, accumulate, out), MU_OK);
            assert_int_equal(mu_cuda_column_sum(ct_pool(), rows, n, device_a, lda, accumulate, device_out), MU_OK);
            ct_expect_bits("column sum", device_out, out, n);
            free(a);
            free(out);
            ct_reset();
        }
}

/* More chunks than the workspace has room for. */
static void test_column_sums_in_turns_have_the_same_bits(void **state)
{
    (void)state;
    enum { ROWS = 256 * 5 + 3, COLUMNS = 40 };
    struct mu_cuda *cuda = mu_pool_cuda(ct_pool());
    size_t bytes = cuda->workspace_bytes;
    float *a = ct_wild((size_t)ROWS * COLUMNS, 9), out[COLUMNS];
    float *device_a = ct_floats(a, (size_t)ROWS * COLUMNS), *device_out = ct_floats(NULL, COLUMNS);
    assert_int_equal(mu_kernel_column_sum(ct_cpu(), ROWS, COLUMNS, a, COLUMNS, false, out), MU_OK);
    cuda->workspace_bytes = 2 * COLUMNS * sizeof(float);
    assert_int_equal(mu_cuda_column_sum(ct_pool(), ROWS, COLUMNS, device_a, COLUMNS, false, device_out), MU_OK);
    cuda->workspace_bytes = bytes;
    ct_expect_bits("column sum", device_out, out, COLUMNS);
    free(a);
    ct_reset();
}

/* ---- attention ---- */

struct attention_case {
    uint32_t sequences, length, heads, kv_heads, head_channels, slices, first_head;
    float rate;
    uint32_t extra; /* floats between rows beyond what is needed */
};

static void check_attention(const struct attention_case *t)
{
    static const uint64_t samples[] = {5, 0xabcdef0123u, 9};
    struct mu_dropout drop = mu_dropout_site(1, 2, 3, MU_DROPOUT_ATTENTION, t->rate, samples), device_drop = drop;
    struct mu_attention cpu = {.sequences = t->sequences, .length = t->length, .heads = t->heads};
    cpu.kv_heads = t->kv_heads;
    cpu.head_channels = t->head_channels;
    cpu.slices = t->slices;
    cpu.first_head = t->first_head;
    size_t qkv = (t->heads + 2 * (size_t)t->kv_heads) * t->head_channels + t->extra,
           out = (size_t)t->heads * t->head_channels + t->extra;
    size_t rows = (size_t)(t->slices ? t->slices : 1) * t->sequences * t->length;
    cpu.qkv_stride = t->extra ? qkv : 0;
    cpu.out_stride = t->extra ? out : 0;
    struct mu_attention gpu = cpu;
    device_drop.samples = ct_copy(samples, sizeof samples);
    float *x = kt_floats(rows * qkv, 1, 2.0), *y = kt_floats(rows * out, 2, 1.0),
          *lse = kt_floats(rows * t->heads, 3, 1.0);
    float *dy = kt_floats(rows * out, 4, 1.0), *dx = kt_floats(rows * qkv, 5, 1.0);
    gpu.qkv = ct_floats(x, rows * qkv);
    gpu.out = ct_floats(y, rows * out);
    gpu.lse = ct_floats(lse, rows * t->heads);
    gpu.dout = ct_floats(dy, rows * out);
    gpu.dqkv = ct_floats(dx, rows * qkv);
    gpu.drop = &device_drop;
    cpu.qkv = x;
    cpu.out = y;
    cpu.lse = lse;
    cpu.dout = dy;
    cpu.dqkv = dx;
    cpu.drop = &drop;
    assert_int_equal(mu_kernel_attention_forward(ct_cpu(), &cpu), MU_OK);
    assert_int_equal(mu_kernel_attention_backward(ct_cpu(), &cpu), MU_OK);
    assert_int_equal(mu_cuda_attention_forward(ct_pool(), &gpu), MU_OK);
    ct_expect_bits("attention", gpu.out, y, rows * out);
    ct_expect_bits("log-sum-exp", gpu.lse, lse, rows * t->heads);
    assert_int_equal(mu_cuda_attention_backward(ct_pool(), &gpu), MU_OK);
    ct_expect_bits("attention gradient", gpu.dqkv, dx, rows * qkv);
    float *all[] = {x, y, lse, dy, dx};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
    ct_reset();
}

static void test_attention_has_the_bits_of_the_cpu(void **state)
{
    (void)state;
    static const struct attention_case cases[] = {
        {1, 1, 1, 1, 1, 0, 0, 0.0f, 0},    {2, 65, 2, 2, 8, 0, 0, 0.0f, 0},   {1, 130, 1, 1, 64, 0, 0, 0.0f, 0},
        {1, 70, 4, 2, 20, 0, 0, 0.0f, 3},  {2, 40, 2, 1, 33, 2, 4, 0.3f, 0},  {1, 129, 2, 2, 16, 1, 1, 0.2f, 1},
        {1, 20, 1, 1, 100, 0, 0, 0.0f, 0}, {1, 66, 1, 1, 200, 0, 0, 0.1f, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_attention(&cases[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products_have_the_bits_of_the_cpu),
        cmocka_unit_test(test_large_tiles_have_the_bits_of_the_cpu),
        cmocka_unit_test(test_slices_are_added_by_the_tree),
        cmocka_unit_test(test_column_sums_have_the_bits_of_the_cpu),
        cmocka_unit_test(test_column_sums_in_turns_have_the_same_bits),
        cmocka_unit_test(test_attention_has_the_bits_of_the_cpu),
    };
    return cmocka_run_group_tests(tests, ct_setup, ct_teardown);
}
