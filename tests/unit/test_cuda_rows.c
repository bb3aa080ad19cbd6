/* links: mu_test_cuda */
#include "tests/lib/cuda_testing.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#ifndef MU_REAL_GPU
#include "cudasim/control.h"
#endif
#include "kernels/kernel_ops.h"

static const uint64_t samples[] = {5, 0xabcdef0123u, 9, 1};

/* A dropout site and its like on the GPU. */
struct sites {
    struct mu_dropout cpu, gpu;
};

static struct sites make_sites(enum mu_dropout_op op, float rate)
{
    struct sites s = {.cpu = mu_dropout_site(1, 2, 3, op, rate, samples)};
    s.gpu = s.cpu;
    s.gpu.samples = ct_copy(samples, sizeof samples);
    return s;
}

static void free_all(float **all, size_t count)
{
    for (size_t i = 0; i < count; i++)
        free(all[i]);
    ct_reset();
}

/* ---- norms ---- */

struct norm_case {
    uint32_t first_row, rows, length, channels;
    bool rms, branch, first, accumulate;
    float rate;
};

static void check_norm_forward(const struct norm_case *t)
{
    const size_t size = (size_t)t->rows * t->channels;
    struct sites drop = make_sites(MU_DROPOUT_MLP, t->rate);
    float *x = ct_wild(size, 1), *b = kt_floats(size, 2, 1.0), *w = kt_floats(t->channels, 3, 1.0), *stats[2],
          *out = kt_floats(size, 4, 1.0), *y = kt_floats(size, 5, 1.0);
    for (int i = 0; i < 2; i++)
        stats[i] = kt_floats(t->rows, 6, 1.0);
    struct mu_norm_forward cpu = {.first_row = t->first_row, .rows = t->rows, .length = t->length}, gpu;
    cpu.channels = t->channels;
    cpu.rms = t->rms;
    gpu = cpu;
    gpu.residual = ct_floats(x, size);
    gpu.branch = t->branch ? ct_floats(b, size) : NULL;
    gpu.weight = ct_floats(w, t->channels);
    gpu.bias = gpu.weight;
    gpu.drop = &drop.gpu;
    gpu.residual_out = ct_floats(out, size);
    gpu.y = ct_floats(y, size);
    gpu.mean = ct_floats(stats[0], t->rows);
    gpu.rstd = ct_floats(stats[1], t->rows);
    cpu.residual = x;
    cpu.branch = t->branch ? b : NULL;
    cpu.weight = cpu.bias = w;
    cpu.drop = &drop.cpu;
    cpu.residual_out = out;
    cpu.y = y;
    cpu.mean = stats[0];
    cpu.rstd = stats[1];
    assert_int_equal(mu_kernel_norm_forward(ct_cpu(), &cpu), MU_OK);
    assert_int_equal(mu_cuda_norm_forward(ct_pool(), &gpu), MU_OK);
    ct_expect_bits("residual", gpu.residual_out, out, size);
    ct_expect_bits("norm", gpu.y, y, size);
    ct_expect_bits("mean", gpu.mean, stats[0], t->rows);
    ct_expect_bits("rstd", gpu.rstd, stats[1], t->rows);
    free_all((float *[]){x, b, w, stats[0], stats[1], out, y}, 7);
}

static void check_norm_backward(const struct norm_case *t)
{
    const size_t size = (size_t)t->rows * t->channels, scratch = mu_kernel_norm_workspace(t->rows, t->channels);
    struct sites drop = make_sites(MU_DROPOUT_MLP, t->rate);
    float *x = ct_wild(size, 1), *dy = ct_wild(size, 2), *w = kt_floats(t->channels, 3, 1.0),
          *mean = kt_floats(t->rows, 4, 0.1), *rstd = kt_floats(t->rows, 5, 1.0), *dx = kt_floats(size, 6, 1.0),
          *db = kt_floats(size, 7, 1.0), *dw = kt_floats(t->channels, 8, 1.0), *dbias = kt_floats(t->channels, 9, 1.0),
          *workspace = kt_alloc(scratch, sizeof *workspace);
    struct mu_norm_backward cpu = {.first_row = t->first_row, .rows = t->rows, .length = t->length}, gpu;
    cpu.channels = t->channels;
    cpu.rms = t->rms;
    cpu.first = t->first;
    cpu.accumulate = t->accumulate;
    gpu = cpu;
    gpu.residual = ct_floats(x, size);
    gpu.dy = ct_floats(dy, size);
    gpu.weight = ct_floats(w, t->channels);
    gpu.mean = t->rms ? NULL : ct_floats(mean, t->rows);
    gpu.rstd = ct_floats(rstd, t->rows);
    gpu.dresidual = ct_floats(dx, size);
    gpu.dbranch = t->branch ? ct_floats(db, size) : NULL;
    gpu.dweight = ct_floats(dw, t->channels);
    gpu.dbias = ct_floats(dbias, t->channels);
    gpu.workspace = ct_floats(NULL, scratch);
    gpu.drop = &drop.gpu;
    cpu.residual = x;
    cpu.dy = dy;
    cpu.weight = w;
    cpu.mean = mean;
    cpu.rstd = rstd;
    cpu.dresidual = dx;
    cpu.dbranch = t->branch ? db : NULL;
    cpu.dweight = dw;
    cpu.dbias = dbias;
    cpu.workspace = workspace;
    cpu.drop = &drop.cpu;
    assert_int_equal(mu_kernel_norm_backward(ct_cpu(), &cpu), MU_OK);
    assert_int_equal(mu_cuda_norm_backward(ct_pool(), &gpu), MU_OK);
    ct_expect_bits("dresidual", gpu.dresidual, dx, size);
    if (t->branch)
        ct_expect_bits("dbranch", gpu.dbranch, db, size);
    ct_expect_bits("dweight", gpu.dweight, dw, t->channels);
    ct_expect_bits("dbias", gpu.dbias, dbias, t->channels);
    free_all((float *[]){x, dy, w, mean, rstd, dx, db, dw, dbias, workspace}, 10);
}

static void test_norms_have_the_bits_of_the_cpu(void **state)
{
    (void)state;
    static const uint32_t shapes[][2] = {{1, 1},   {9, 7},    {130, 33}, {65, 64},
                                         {3, 769}, {2, 1000}, {2, 1601}, {2, 1700}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        for (uint32_t flags = 0; flags < 8; flags++) {
            struct norm_case t = {.rows = shapes[i][0], .channels = shapes[i][1], .length = shapes[i][0] / 2 + 1};
            t.first_row = flags % 3;
            t.rms = flags & 1;
            t.branch = flags & 2;
            t.first = flags & 4;
            t.accumulate = (flags + i) % 2;
            t.rate = flags & 2 && i % 2 ? 0.3f : 0.0f;
            check_norm_forward(&t);
            check_norm_backward(&t);
        }
}

/* ---- embedding ---- */

struct lookup_case {
    uint32_t first_row, rows, length, channels, vocab, slice_rows, first_slice, slice_count;
    float rate;
    bool positions;
};

static void check_lookup(const struct lookup_case *t)
{
    const size_t table_size = (size_t)t->slice_rows * t->channels, size = (size_t)t->rows * t->channels,
                 all_positions = (size_t)t->length * t->channels;
    struct sites drop = make_sites(MU_DROPOUT_EMBEDDING, t->rate);
    float *wpe = ct_wild(all_positions, 1), *x = ct_wild(size, 2), *tables[4], *dtable = ct_wild(table_size, 3);
    const float *cpu_slices[4], *gpu_slices[4];
    int32_t *tokens = kt_alloc(t->rows, sizeof *tokens);
    for (uint32_t i = 0; i < t->rows; i++)
        tokens[i] = (int32_t)((i * i * 7 + i) % t->vocab);
    for (uint32_t s = 0; s < t->slice_count; s++) {
        cpu_slices[s] = tables[s] = ct_wild(table_size, 10 + s);
        gpu_slices[s] = ct_floats(tables[s], table_size);
    }
    struct mu_vocab_slices cpu = {cpu_slices, t->slice_rows, t->first_slice, t->slice_count, t->vocab}, gpu = cpu;
    gpu.slices = gpu_slices;
    int32_t *gpu_tokens = ct_copy(tokens, t->rows * sizeof *tokens);
    float *gpu_x = ct_floats(x, size), *gpu_table = ct_floats(dtable, table_size),
          *gpu_wpe = ct_floats(wpe, all_positions);
    assert_int_equal(mu_kernel_embedding_forward(ct_cpu(), t->first_row, t->rows, t->length, t->channels, &cpu, tokens,
                                                 t->positions ? wpe : NULL, &drop.cpu, x),
                     MU_OK);
    assert_int_equal(mu_cuda_embedding_forward(ct_pool(), t->first_row, t->rows, t->length, t->channels, &gpu,
                                               gpu_tokens, t->positions ? gpu_wpe : NULL, &drop.gpu, gpu_x),
                     MU_OK);
    ct_expect_bits("look-up", gpu_x, x, size);
    assert_int_equal(mu_kernel_embedding_drop(ct_cpu(), t->first_row, t->rows, t->length, t->channels, &drop.cpu, x),
                     MU_OK);
    assert_int_equal(mu_cuda_embedding_drop(ct_pool(), t->first_row, t->rows, t->length, t->channels, &drop.gpu, gpu_x),
                     MU_OK);
    ct_expect_bits("drop", gpu_x, x, size);
    uint32_t first = t->first_slice * t->slice_rows;
    assert_int_equal(
        mu_kernel_embedding_backward(ct_cpu(), t->rows, t->channels, tokens, x, first, t->slice_rows, dtable), MU_OK);
    assert_int_equal(
        mu_cuda_embedding_backward(ct_pool(), t->rows, t->channels, gpu_tokens, gpu_x, first, t->slice_rows, gpu_table),
        MU_OK);
    ct_expect_bits("dtable", gpu_table, dtable, table_size);
    assert_int_equal(mu_kernel_position_backward(ct_cpu(), t->first_row, t->rows, t->length, t->channels, x, wpe),
                     MU_OK);
    assert_int_equal(
        mu_cuda_position_backward(ct_pool(), t->first_row, t->rows, t->length, t->channels, gpu_x, gpu_wpe), MU_OK);
    ct_expect_bits("dwpe", gpu_wpe, wpe, all_positions);
    for (uint32_t s = 0; s < t->slice_count; s++)
        free(tables[s]);
    free(tokens);
    free_all((float *[]){wpe, x, dtable}, 3);
}

static void test_embedding_has_the_bits_of_the_cpu(void **state)
{
    (void)state;
    static const struct lookup_case cases[] = {
        {0, 1, 1, 1, 1, 1, 0, 1, 0.0f, true},         {0, 12, 6, 7, 5, 5, 0, 1, 0.0f, true},
        {4, 20, 8, 70, 40, 10, 1, 2, 0.4f, true},     {0, 1300, 650, 3, 700, 700, 0, 1, 0.0f, false},
        {3, 37, 13, 130, 300, 300, 0, 1, 0.2f, true}, {0, 1030, 515, 2, 70000, 70000, 0, 1, 0.0f, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_lookup(&cases[i]);
}

/* ---- element-wise on rows ---- */

static void check_rows(uint32_t rows, uint32_t width)
{
    const size_t size = (size_t)rows * width;
    float *x = ct_wild(2 * size, 1), *y = ct_wild(size, 2), *bias = ct_wild(width, 3), *d = ct_wild(2 * size, 4);
    for (size_t i = 0; i < 2 * size; i += 9)
        x[i] *= 30.0f;
    float *gpu_x = ct_floats(x, 2 * size), *gpu_y = ct_floats(y, size), *gpu_d = ct_floats(d, 2 * size);
    assert_int_equal(mu_kernel_bias_add(ct_cpu(), rows, width, bias, y), MU_OK);
    assert_int_equal(mu_cuda_bias_add(ct_pool(), rows, width, ct_floats(bias, width), gpu_y), MU_OK);
    ct_expect_bits("bias", gpu_y, y, size);
    assert_int_equal(mu_kernel_swiglu_backward(ct_cpu(), rows, width, x, y, d), MU_OK);
    assert_int_equal(mu_cuda_swiglu_backward(ct_pool(), rows, width, gpu_x, gpu_y, gpu_d), MU_OK);
    ct_expect_bits("swiglu gradient", gpu_d, d, 2 * size);
    assert_int_equal(mu_kernel_swiglu_forward(ct_cpu(), rows, width, x, y), MU_OK);
    assert_int_equal(mu_cuda_swiglu_forward(ct_pool(), rows, width, gpu_x, gpu_y), MU_OK);
    ct_expect_bits("swiglu", gpu_y, y, size);
    assert_int_equal(mu_kernel_swiglu_backward(ct_cpu(), rows, width, x, y, x), MU_OK);
    assert_int_equal(mu_cuda_swiglu_backward(ct_pool(), rows, width, gpu_x, gpu_y, gpu_x), MU_OK);
    ct_expect_bits("swiglu gradient in place", gpu_x, x, 2 * size);
    free_all((float *[]){x, y, bias, d}, 4);
}

static void check_rotary(uint32_t first_row, uint32_t rows, uint32_t length, uint32_t heads, uint32_t channels)
{
    const size_t stride = (size_t)heads * channels + 5, table = (size_t)length * channels / 2;
    float *x = ct_wild(rows * stride, 1), *cosines = kt_alloc(table, sizeof *x), *sines = kt_alloc(table, sizeof *x);
    mu_kernel_rotary_table(length, channels, 10000.0, cosines, sines);
    float *gpu_x = ct_floats(x, rows * stride), *gpu_cosines = ct_floats(cosines, table),
          *gpu_sines = ct_floats(sines, table);
    for (int inverse = 0; inverse < 2; inverse++) {
        assert_int_equal(
            mu_kernel_rotary(ct_cpu(), first_row, rows, length, heads, channels, stride, cosines, sines, inverse, x),
            MU_OK);
        assert_int_equal(mu_cuda_rotary(ct_pool(), first_row, rows, length, heads, channels, stride, gpu_cosines,
                                        gpu_sines, inverse, gpu_x),
                         MU_OK);
        ct_expect_bits("rotary", gpu_x, x, rows * stride);
    }
    free_all((float *[]){x, cosines, sines}, 3);
}

static void test_rows_have_the_bits_of_the_cpu(void **state)
{
    (void)state;
    check_rows(1, 1);
    check_rows(7, 63);
    check_rows(5, 130);
    check_rotary(0, 5, 5, 1, 2);
    check_rotary(3, 14, 7, 3, 34);
}

/* ---- loss ---- */

static void check_loss(uint32_t rows, uint32_t vocab, bool gradient)
{
    const size_t ld = vocab + 3, size = rows * ld;
    float *logits = kt_floats(size, 1, 9.0);
    double *loss = kt_alloc(rows, sizeof *loss), *gpu_loss = ct_copy(NULL, rows * sizeof *loss);
    int32_t *targets = kt_alloc(rows, sizeof *targets);
    for (uint32_t i = 0; i < rows; i++)
        targets[i] = i % 3 == 2 ? -1 : (int32_t)((i * 37 + 5) % vocab);
    float *gpu_logits = ct_floats(logits, size);
    const int32_t *gpu_targets = ct_copy(targets, rows * sizeof *targets);
    assert_int_equal(mu_kernel_cross_entropy(ct_cpu(), rows, vocab, ld, logits, targets, 0.01f, gradient, loss), MU_OK);
    assert_int_equal(
        mu_cuda_cross_entropy(ct_pool(), rows, vocab, ld, gpu_logits, gpu_targets, 0.01f, gradient, gpu_loss), MU_OK);
    ct_expect_bytes("loss", gpu_loss, loss, rows * sizeof *loss);
    ct_expect_bits("dlogits", gpu_logits, logits, size);
    free(loss);
    free(targets);
    free_all(&logits, 1);
}

/* `slices` parts of the vocabulary, the last shorter. */
static void check_sliced_loss(uint32_t rows, uint32_t width, uint32_t slices, bool gradient)
{
    const size_t each = (size_t)rows * width;
    float *logits = kt_floats(each * slices, 1, 9.0), *highest = kt_alloc((size_t)rows * slices, sizeof *highest);
    double *sums = kt_alloc((size_t)rows * slices, sizeof *sums), *loss = kt_alloc(rows, sizeof *loss);
    int32_t *targets = kt_alloc(rows, sizeof *targets);
    for (uint32_t i = 0; i < rows; i++)
        targets[i] = i % 4 == 3 ? -1 : (int32_t)((i * 37 + 5) % (width * slices - 1));
    float *gpu_logits = ct_floats(logits, each * slices), *gpu_highest = ct_floats(NULL, (size_t)rows * slices);
    double *gpu_sums = ct_copy(NULL, rows * slices * sizeof *sums), *gpu_loss = ct_copy(loss, rows * sizeof *loss);
    const int32_t *gpu_targets = ct_copy(targets, rows * sizeof *targets);
    for (uint32_t s = 0; s < slices; s++) {
        uint32_t vocab = s + 1 == slices ? width - 1 : width;
        assert_int_equal(
            mu_kernel_cross_entropy_max(ct_cpu(), rows, vocab, width, logits + s * each, highest + s * rows), MU_OK);
        assert_int_equal(
            mu_cuda_cross_entropy_max(ct_pool(), rows, vocab, width, gpu_logits + s * each, gpu_highest + s * rows),
            MU_OK);
    }
    assert_int_equal(mu_kernel_join_max(ct_cpu(), slices, rows, highest), MU_OK);
    assert_int_equal(mu_cuda_join_max(ct_pool(), slices, rows, gpu_highest), MU_OK);
    ct_expect_bits("highest", gpu_highest, highest, rows);
    for (uint32_t s = 0; s < slices; s++) {
        uint32_t vocab = s + 1 == slices ? width - 1 : width;
        assert_int_equal(mu_kernel_cross_entropy_sum(ct_cpu(), rows, s * width, vocab, width, logits + s * each,
                                                     targets, highest, gradient, sums + s * rows, loss),
                         MU_OK);
        assert_int_equal(mu_cuda_cross_entropy_sum(ct_pool(), rows, s * width, vocab, width, gpu_logits + s * each,
                                                   gpu_targets, gpu_highest, gradient, gpu_sums + s * rows, gpu_loss),
                         MU_OK);
    }
    ct_expect_bytes("sums of slices", gpu_sums, sums, rows * slices * sizeof *sums);
    assert_int_equal(mu_kernel_join_sums(ct_cpu(), slices, rows, sums), MU_OK);
    assert_int_equal(mu_cuda_join_sums(ct_pool(), slices, rows, gpu_sums), MU_OK);
    for (uint32_t s = 0; s < slices; s++) {
        uint32_t vocab = s + 1 == slices ? width - 1 : width;
        assert_int_equal(mu_kernel_cross_entropy_gradient(ct_cpu(), rows, s * width, vocab, width, logits + s * each,
                                                          targets, sums, 0.125f, gradient, loss),
                         MU_OK);
        assert_int_equal(mu_cuda_cross_entropy_gradient(ct_pool(), rows, s * width, vocab, width, gpu_logits + s * each,
                                                        gpu_targets, gpu_sums, 0.125f, gradient, gpu_loss),
                         MU_OK);
    }
    ct_expect_bytes("loss", gpu_loss, loss, rows * sizeof *loss);
    ct_expect_bits("dlogits", gpu_logits, logits, each * slices);
    free(sums);
    free(loss);
    free(targets);
    free_all((float *[]){logits, highest}, 2);
}

static void test_loss_has_the_bits_of_the_cpu(void **state)
{
    (void)state;
    for (int gradient = 0; gradient < 2; gradient++) {
        check_loss(1, 1, gradient);
        check_loss(4, 50, gradient);
        check_loss(3, 2500, gradient);
        check_loss(2, 33000, gradient);
        check_sliced_loss(5, 30, 4, gradient);
        check_sliced_loss(3, 1100, 2, gradient);
    }
}

/* ---- flat ranges ---- */

static void check_ranges(size_t size, size_t misalign)
{
    float *x = ct_wild(size, 1), *y = ct_wild(size, 2), *m = kt_floats(size, 3, 1.0), *v = kt_floats(size, 4, 1.0);
    struct mu_adamw adamw = mu_adamw_at(1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0, 3.0, 3);
    for (size_t i = 0; i < size; i++)
        v[i] *= v[i];
    float *gpu_x = ct_misaligned(x, size, misalign), *gpu_y = ct_misaligned(y, size, misalign),
          *gpu_m = ct_floats(m, size), *gpu_v = ct_floats(v, size);
    assert_int_equal(mu_kernel_adamw(ct_cpu(), &adamw, size, y, m, v, x), MU_OK);
    assert_int_equal(mu_cuda_adamw(ct_pool(), &adamw, size, gpu_y, gpu_m, gpu_v, gpu_x), MU_OK);
    ct_expect_bits("p", gpu_y, y, size);
    ct_expect_bits("m", gpu_m, m, size);
    ct_expect_bits("v", gpu_v, v, size);
    assert_int_equal(mu_kernel_add(ct_cpu(), size, x, m), MU_OK);
    assert_int_equal(mu_cuda_add(ct_pool(), size, gpu_x, gpu_m), MU_OK);
    ct_expect_bits("add", gpu_x, x, size);
    assert_int_equal(mu_kernel_gelu_backward(ct_cpu(), size, x, m, y), MU_OK);
    assert_int_equal(mu_cuda_gelu_backward(ct_pool(), size, gpu_x, gpu_m, gpu_y), MU_OK);
    ct_expect_bits("gelu gradient", gpu_y, y, size);
    assert_int_equal(mu_kernel_gelu_forward(ct_cpu(), size, x, y), MU_OK);
    assert_int_equal(mu_cuda_gelu_forward(ct_pool(), size, gpu_x, gpu_y), MU_OK);
    ct_expect_bits("gelu", gpu_y, y, size);
    assert_int_equal(mu_kernel_init_normal(ct_cpu(), 11, 12, misalign + 0xfffffff00u, size, 0.02f, y), MU_OK);
    assert_int_equal(mu_cuda_init_normal(ct_pool(), 11, 12, misalign + 0xfffffff00u, size, 0.02f, gpu_y), MU_OK);
    ct_expect_bits("initial values", gpu_y, y, size);
    assert_int_equal(mu_kernel_fill(ct_cpu(), size, -0.0f, y), MU_OK);
    assert_int_equal(mu_cuda_fill(ct_pool(), size, -0.0f, gpu_y), MU_OK);
    ct_expect_bits("fill", gpu_y, y, size);
    free_all((float *[]){x, y, m, v}, 4);
}

static void test_ranges_have_the_bits_of_the_cpu(void **state)
{
    (void)state;
    static const size_t sizes[] = {1, 3, 4, 63, 1024, 4099, 9001};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        check_ranges(sizes[i], i % 4);
}

static void check_squares(size_t size, float special)
{
    uint8_t expected[MU_EXACT_SUM_BYTES], packed[MU_EXACT_SUM_BYTES];
    float *g = ct_wild(size, 1);
    struct mu_exact_sum cpu, gpu;
    g[size / 2] = special;
    mu_exact_sum_init(&cpu);
    mu_exact_sum_add(&cpu, 0.3);
    gpu = cpu;
    assert_int_equal(mu_kernel_square_sum(ct_cpu(), size, g, &cpu), MU_OK);
    assert_int_equal(mu_cuda_square_sum(ct_pool(), size, ct_floats(g, size), &gpu), MU_OK);
    mu_exact_sum_pack(&cpu, expected);
    mu_exact_sum_pack(&gpu, packed);
    assert_memory_equal(packed, expected, sizeof packed);
    free_all(&g, 1);
}

static void test_sum_of_squares_is_the_exact_sum_of_the_cpu(void **state)
{
    (void)state;
    static const size_t sizes[] = {1, 17, 4096, 4097, 4096 * 20 + 5, 4096 * 16 * 17 + 1};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        check_squares(sizes[i], 1.0f);
    check_squares(5000, (float)INFINITY);
    check_squares(5000, 3e38f);
}

/* ---- backend ---- */

static void test_tables_have_every_operation(void **state)
{
    (void)state;
    typedef enum mu_status operation(void);
    operation *ops[sizeof(struct mu_kernel_ops) / sizeof(operation *)];
    const struct mu_kernel_ops *tables[] = {&mu_cuda_ops, &mu_cuda_bf16_ops};
    for (size_t i = 0; i < 2; i++) {
        memcpy(ops, tables[i], sizeof ops);
        for (size_t j = 0; j < sizeof ops / sizeof ops[0]; j++)
            assert_non_null((void *)(uintptr_t)ops[j]);
    }
    assert_true(mu_cuda_ops.gemm != mu_cuda_bf16_ops.gemm && mu_cuda_ops.adamw == mu_cuda_bf16_ops.adamw);
}

#ifndef MU_REAL_GPU /* only the emulation fails when told to */
static void test_failures_leave_nothing_and_say_why(void **state)
{
    (void)state;
    static const char *const calls[] = {"cudaMalloc", "cudaHostAlloc", "cudaSetDevice"};
    const size_t before = cudasim_device_bytes(0);
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        struct mu_cuda cuda;
        struct mu_error err = {0};
        cudasim_fail(calls[i], 1, 0);
        assert_int_not_equal(mu_cuda_init(&cuda, 0, MU_DTYPE_FP32, 1 << 20, &err), MU_OK);
        assert_non_null(strstr(err.text, "GPU 0: "));
        assert_int_equal(cudasim_device_bytes(0), before);
        cudasim_fail_none();
    }
}
#endif

static void test_workspace_too_small_is_said_with_what_it_takes(void **state)
{
    (void)state;
    struct mu_cuda *cuda = mu_pool_cuda(ct_pool());
    const size_t bytes = cuda->workspace_bytes;
    float *x = ct_floats(NULL, 5000);
    cuda->workspace_bytes = 1000;
    assert_int_equal(mu_cuda_embedding_backward(ct_pool(), 1000, 5, (const int32_t *)x, x, 0, 10, x), MU_ERR_LIMIT);
    assert_non_null(strstr(cuda->error.text, "embedding_backward: 1 MiB of workspace are needed"));
    cuda->workspace_bytes = bytes;
    cuda->error = (struct mu_error){0};
    ct_reset();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_norms_have_the_bits_of_the_cpu),
        cmocka_unit_test(test_embedding_has_the_bits_of_the_cpu),
        cmocka_unit_test(test_rows_have_the_bits_of_the_cpu),
        cmocka_unit_test(test_loss_has_the_bits_of_the_cpu),
        cmocka_unit_test(test_ranges_have_the_bits_of_the_cpu),
        cmocka_unit_test(test_sum_of_squares_is_the_exact_sum_of_the_cpu),
        cmocka_unit_test(test_tables_have_every_operation),
#ifndef MU_REAL_GPU
        cmocka_unit_test(test_failures_leave_nothing_and_say_why),
#endif
        cmocka_unit_test(test_workspace_too_small_is_said_with_what_it_takes),
    };
    return cmocka_run_group_tests(tests, ct_setup, ct_teardown);
}
