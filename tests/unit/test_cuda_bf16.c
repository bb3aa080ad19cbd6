/* links: mu_test_cuda */
#include "tests/lib/cuda_testing.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "tests/lib/reference.h"

static const double sum_tolerance = 1e-5; /* fp32 sums of exact products */
static const double bf16_tolerance = 2e-2;

/* Rounded to bf16, to nearest even, as the kernels do with their operands. */
static double *rounded(const float *values, size_t size)
{
    double *copy = kt_alloc(size, sizeof *copy);
    for (size_t i = 0; i < size; i++) {
        uint32_t bits;
        float value;
        memcpy(&bits, &values[i], sizeof bits);
        bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
        memcpy(&value, &bits, sizeof value);
        copy[i] = (double)value;
    }
    return copy;
}

/* ---- matrix products ---- */

struct product_case {
    uint32_t m, n, k, slices, k_last;
    bool transpose_a, transpose_b, accumulate;
    enum mu_epilogue epilogue;
};

/* The product in double, with the epilogue. */
static void reference_product(const struct product_case *t, const float *a, const float *b, const float *bias,
                              const float *aux, double *c, double *before)
{
    const uint32_t slices = t->slices ? t->slices : 1, k = t->k * (slices - 1) + (t->k_last ? t->k_last : t->k);
    const size_t lda = t->transpose_a ? t->m : (size_t)t->k * slices,
                 ldb = t->transpose_b ? (size_t)t->k * slices : t->n;
    double *x = rounded(a, (size_t)t->m * t->k * slices), *y = rounded(b, (size_t)t->n * t->k * slices);
    for (size_t i = 0; i < t->m; i++)
        for (size_t j = 0; j < t->n; j++) {
            double sum = t->accumulate ? c[i * t->n + j] : 0.0;
            for (size_t l = 0; l < k; l++)
                sum += (t->transpose_a ? x[l * lda + i] : x[i * lda + l]) *
                       (t->transpose_b ? y[j * ldb + l] : y[l * ldb + j]);
            if (t->epilogue == MU_EPILOGUE_GELU_GRAD)
                sum *= ref_gelu_grad((double)aux[i * t->n + j]);
            else if (t->epilogue != MU_EPILOGUE_NONE)
                sum += (double)bias[j];
            before[i * t->n + j] = sum;
            c[i * t->n + j] = t->epilogue == MU_EPILOGUE_BIAS_GELU ? ref_gelu(sum) : sum;
        }
    free(x);
    free(y);
}

static void check_product(const struct product_case *t)
{
    const uint32_t slices = t->slices ? t->slices : 1;
    const size_t a_size = (size_t)t->m * t->k * slices, b_size = (size_t)t->n * t->k * slices,
                 c_size = (size_t)t->m * t->n;
    float *a = kt_floats(a_size, 1, 1.0), *b = kt_floats(b_size, 2, 1.0), *c = kt_floats(c_size, 3, 1.0),
          *bias = kt_floats(t->n, 4, 1.0), *aux = kt_floats(c_size, 5, 2.0);
    double *expected = kt_doubles(c, c_size), *before = kt_alloc(c_size, sizeof *before);
    struct mu_gemm g = {.m = t->m, .n = t->n, .k = t->k, .slices = t->slices, .k_last = t->k_last};
    g.transpose_a = t->transpose_a;
    g.transpose_b = t->transpose_b;
    g.accumulate = t->accumulate;
    g.epilogue = t->epilogue;
    g.lda = t->transpose_a ? t->m : (size_t)t->k * slices;
    g.ldb = t->transpose_b ? (size_t)t->k * slices : t->n;
    g.a_slice = t->transpose_a ? t->k * g.lda : t->k;
    g.b_slice = t->transpose_b ? t->k : t->k * g.ldb;
    g.ldc = g.ldaux = t->n;
    g.a = ct_floats(a, a_size);
    g.b = ct_floats(b, b_size);
    g.c = ct_floats(c, c_size);
    g.bias = ct_floats(bias, t->n);
    g.aux = ct_floats(aux, c_size);
    g.before = ct_floats(aux, c_size);
    reference_product(t, a, b, bias, aux, expected, before);
    assert_int_equal(mu_cuda_bf16_gemm(ct_bf16_pool(), &g), MU_OK);
    float *values = ct_read(g.c, c_size), *kept = ct_read(g.before, c_size);
    kt_expect_close("product", values, expected, c_size, sum_tolerance, 1.0);
    if (t->epilogue == MU_EPILOGUE_BIAS_GELU)
        kt_expect_close("before", kept, before, c_size, sum_tolerance, 1.0);
    void *all[] = {a, b, c, bias, aux, expected, before, values, kept};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
    ct_reset();
}

static void test_products_are_those_of_rounded_operands(void **state)
{
    (void)state;
    static const uint32_t shapes[][3] = {{1, 1, 1}, {3, 5, 7}, {33, 24, 257}, {64, 48, 16}, {16, 8, 40}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (int flags = 0; flags < 8; flags++) {
            struct product_case t = {.m = shapes[i][0], .n = shapes[i][1], .k = shapes[i][2]};
            t.transpose_a = flags & 1;
            t.transpose_b = flags & 2;
            t.accumulate = flags & 4;
            t.epilogue = flags & 4 ? MU_EPILOGUE_NONE : (enum mu_epilogue)flags;
            check_product(&t);
        }
}

static void one_product(float *c)
{
    enum { SIZE = 16 };
    float *a = kt_floats(SIZE * SIZE, 1, 1.0), *b = kt_floats(SIZE * SIZE, 2, 1.0);
    struct mu_gemm g = {.m = SIZE, .n = SIZE, .k = SIZE, .lda = SIZE, .ldb = SIZE, .ldc = SIZE, .ldaux = SIZE};
    g.a = ct_floats(a, SIZE * SIZE);
    g.b = ct_floats(b, SIZE * SIZE);
    g.c = ct_floats(NULL, SIZE * SIZE);
    assert_int_equal(mu_kernel_gemm(ct_bf16_pool(), &g), MU_OK);
    float *values = ct_read(g.c, SIZE * SIZE);
    memcpy(c, values, SIZE * SIZE * sizeof *c);
    free(a);
    free(b);
    free(values);
    ct_reset();
}

/* As for one job after another. */
static void test_a_device_computes_in_the_type_it_was_told_last(void **state)
{
    (void)state;
    struct mu_device *device = &mu_pool_cuda(ct_bf16_pool())->base;
    float bf16[256], fp32[256], again[256];
    one_product(bf16);
    assert_int_equal(mu_device_compute(device, MU_DTYPE_FP32, NULL), MU_OK);
    one_product(fp32);
    assert_int_equal(mu_device_compute(device, MU_DTYPE_BF16, NULL), MU_OK);
    one_product(again);
    assert_memory_equal(bf16, again, sizeof bf16);
    assert_memory_not_equal(bf16, fp32, sizeof bf16);
    struct mu_error err;
    assert_true(device->bf16 && !mu_host_device()->bf16);
    assert_int_equal(mu_device_compute(NULL, MU_DTYPE_FP32, &err), MU_OK);
    assert_int_equal(mu_device_compute(NULL, MU_DTYPE_BF16, &err), MU_ERR_INVALID);
    assert_string_equal(err.text, "compute: bf16 is not possible on cpu; use a GPU, or fp32");
}

static void test_slices_are_added_by_the_tree(void **state)
{
    (void)state;
    for (uint32_t slices = 2; slices <= 16; slices *= 2)
        for (int flags = 0; flags < 4; flags++)
            check_product(&(struct product_case){.m = 20,
                                                 .n = 16,
                                                 .k = 33,
                                                 .slices = slices,
                                                 .k_last = flags ? 20 : 0,
                                                 .transpose_a = flags == 3,
                                                 .transpose_b = flags & 1,
                                                 .epilogue = (enum mu_epilogue)flags});
}

/* The workspace holds neither the operands nor the partial sums as a whole. */
static void test_products_in_blocks_are_whole(void **state)
{
    (void)state;
    struct mu_cuda *cuda = mu_pool_cuda(ct_bf16_pool());
    size_t bytes = cuda->workspace_bytes;
    cuda->workspace_bytes = 16 << 10;
    for (int flags = 0; flags < 4; flags++) {
        struct product_case t = {.m = 90, .n = 70, .k = 37, .transpose_a = flags & 1, .transpose_b = flags & 2};
        t.epilogue = (enum mu_epilogue)flags;
        check_product(&t);
        t.slices = 4;
        check_product(&t);
    }
    cuda->workspace_bytes = bytes;
}

static void test_workspace_without_room_for_a_block_is_refused(void **state)
{
    (void)state;
    struct mu_cuda *cuda = mu_pool_cuda(ct_bf16_pool());
    const size_t bytes = cuda->workspace_bytes;
    float *x = ct_floats(NULL, 10000);
    struct mu_gemm g = {.m = 9, .n = 9, .k = 1000, .a = x, .b = x, .c = x, .lda = 1000, .ldb = 9, .ldc = 9};
    for (uint32_t slices = 1; slices <= 2; slices++)
        for (cuda->workspace_bytes = 500; cuda->workspace_bytes < 200000; cuda->workspace_bytes *= 2) {
            g.slices = slices;
            assert_int_equal(mu_cuda_bf16_gemm(ct_bf16_pool(), &g), MU_ERR_LIMIT);
        }
    assert_non_null(strstr(cuda->error.text, "MiB of workspace are needed"));
    cuda->workspace_bytes = bytes;
    cuda->error = (struct mu_error){0};
    ct_reset();
}

/* Products take their weights from the copy, which the optimizer keeps: the bits are those of products that round. */
static void test_copy_of_the_parameters_shows_in_no_bit(void **state)
{
    (void)state;
    enum { ROWS = 24, IN = 40, OUT = 16, BEFORE = 8, SIZE = BEFORE + IN * OUT };
    struct mu_adamw adamw = mu_adamw_at(1e-2, 0.9, 0.95, 1e-8, 0.1, 0.0, 1.0, 1);
    float *w = kt_floats(SIZE, 1, 1.0), *g = kt_floats(SIZE, 2, 1.0), *x = kt_floats((size_t)ROWS * IN, 3, 1.0),
          *zero = kt_alloc(SIZE, sizeof *zero), *expected = NULL;
    const float *dev_g = ct_floats(g, SIZE), *dev_x = ct_floats(x, (size_t)ROWS * IN);
    for (int copied = 0; copied < 2; copied++) {
        float *params = ct_floats(w, SIZE), *m = ct_floats(zero, SIZE), *v = ct_floats(zero, SIZE);
        uint16_t *copy = ct_copy(NULL, SIZE * sizeof *copy);
        mu_cuda_shadow_set(mu_pool_cuda(ct_bf16_pool()), copied ? params : NULL, SIZE, copy);
        assert_int_equal(mu_cuda_shadow_refresh(ct_bf16_pool(), params, SIZE), MU_OK);
        for (int round = 0; round < 2; round++) { /* as loaded, and as updated, in two uneven parts */
            struct mu_gemm y = {.m = ROWS, .n = OUT, .k = IN, .a = dev_x, .b = params + BEFORE, .lda = IN, .ldb = OUT};
            y.c = ct_floats(NULL, ROWS * OUT);
            y.ldc = OUT;
            assert_int_equal(mu_cuda_bf16_gemm(ct_bf16_pool(), &y), MU_OK);
            float *values = ct_read(y.c, ROWS * OUT);
            if (copied)
                assert_memory_equal(values, expected + round * ROWS * OUT, ROWS * OUT * sizeof *values);
            expected = expected ? expected : kt_alloc(2 * ROWS * OUT, sizeof *expected);
            memcpy(expected + round * ROWS * OUT, values, ROWS * OUT * sizeof *values);
            free(values);
            for (size_t first = 0, size = 101; first < SIZE; first += size, size = SIZE - 101)
                assert_int_equal(
                    mu_cuda_adamw(ct_bf16_pool(), &adamw, size, params + first, m + first, v + first, dev_g + first),
                    MU_OK);
        }
    }
    mu_cuda_shadow_set(mu_pool_cuda(ct_bf16_pool()), NULL, 0, NULL);
    float *all[] = {w, g, x, zero, expected};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
    ct_reset();
}

/* ---- attention ---- */

struct attention_case {
    uint32_t sequences, length, heads, kv_heads, head_channels;
    float rate;
};

/* Dropout factors of all probabilities, in double. */
static double *attention_factors(const struct attention_case *t, const struct mu_dropout *drop)
{
    const uint32_t padded = (t->length + 63) / 64 * 64;
    const size_t rows = (size_t)t->sequences * t->heads * t->length;
    double *keep = kt_alloc(rows * t->length, sizeof *keep);
    float *row = kt_alloc(padded, sizeof *row);
    for (size_t i = 0; i < rows; i++) {
        uint32_t query = (uint32_t)(i % t->length), head = (uint32_t)(i / t->length % t->heads),
                 sequence = (uint32_t)(i / t->length / t->heads);
        mu_dropout_factors(drop, sequence, query, head << 20, padded, row);
        for (uint32_t key = 0; key < t->length; key++)
            keep[i * t->length + key] = (double)row[key];
    }
    free(row);
    return keep;
}

static void check_attention(const struct attention_case *t)
{
    static const uint64_t samples[] = {5, 0xabcdef0123u, 9};
    struct mu_dropout drop = mu_dropout_site(1, 2, 3, MU_DROPOUT_ATTENTION, t->rate, samples), device_drop = drop;
    const size_t rows = (size_t)t->sequences * t->length,
                 qkv = rows * (t->heads + 2 * (size_t)t->kv_heads) * t->head_channels,
                 out = rows * t->heads * t->head_channels, all = (size_t)t->heads * rows * t->length;
    float *x = kt_floats(qkv, 1, 1.0), *dy = kt_floats(out, 2, 1.0);
    double *rx = kt_doubles(x, qkv), *rdy = kt_doubles(dy, out), *ry = kt_alloc(out, sizeof *ry),
           *rlse = kt_alloc(rows * t->heads, sizeof *rlse), *probabilities = kt_alloc(all, sizeof *probabilities),
           *rdx = kt_alloc(qkv, sizeof *rdx), *keep = t->rate > 0.0f ? attention_factors(t, &drop) : NULL;
    struct ref_attention reference = {t->sequences, t->length, t->heads, t->kv_heads, t->head_channels, rx, keep};
    struct mu_attention gpu = {.sequences = t->sequences, .length = t->length, .heads = t->heads};
    device_drop.samples = ct_copy(samples, sizeof samples);
    gpu.kv_heads = t->kv_heads;
    gpu.head_channels = t->head_channels;
    gpu.drop = &device_drop;
    gpu.qkv = ct_floats(x, qkv);
    gpu.dout = ct_floats(dy, out);
    gpu.out = ct_floats(NULL, out);
    gpu.lse = ct_floats(NULL, rows * t->heads);
    gpu.dqkv = ct_floats(NULL, qkv);
    ref_attention_forward(&reference, ry, rlse, probabilities);
    ref_attention_backward(&reference, probabilities, rdy, rdx);
    assert_int_equal(mu_cuda_bf16_attention_forward(ct_bf16_pool(), &gpu), MU_OK);
    assert_int_equal(mu_cuda_bf16_attention_backward(ct_bf16_pool(), &gpu), MU_OK);
    float *y = ct_read(gpu.out, out), *lse = ct_read(gpu.lse, rows * t->heads), *dx = ct_read(gpu.dqkv, qkv);
    kt_expect_close("attention", y, ry, out, bf16_tolerance, 0.1);
    kt_expect_close("log-sum-exp", lse, rlse, rows * t->heads, bf16_tolerance, 0.1);
    kt_expect_close("attention gradient", dx, rdx, qkv, bf16_tolerance, 0.1);
    void *arrays[] = {x, dy, rx, rdy, ry, rlse, probabilities, rdx, keep, y, lse, dx};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++)
        free(arrays[i]);
    ct_reset();
}

static void test_attention_matches_the_reference(void **state)
{
    (void)state;
    static const struct attention_case cases[] = {
        {1, 1, 1, 1, 1, 0.0f},   {1, 70, 1, 1, 16, 0.0f},  {2, 65, 2, 2, 33, 0.0f},
        {1, 66, 4, 2, 20, 0.3f}, {1, 130, 2, 1, 64, 0.0f}, {1, 67, 1, 1, 100, 0.2f},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_attention(&cases[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_attention_matches_the_reference),
        cmocka_unit_test(test_products_are_those_of_rounded_operands),
        cmocka_unit_test(test_a_device_computes_in_the_type_it_was_told_last),
        cmocka_unit_test(test_slices_are_added_by_the_tree),
        cmocka_unit_test(test_products_in_blocks_are_whole),
        cmocka_unit_test(test_copy_of_the_parameters_shows_in_no_bit),
        cmocka_unit_test(test_workspace_without_room_for_a_block_is_refused),
    };
    return cmocka_run_group_tests(tests, ct_setup, ct_teardown);
}
