/* links: mu_test_reference */
/* The double-precision reference itself, by central differences: d(sum of weight * out) / d(input). */
#include "tests/lib/reference.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "common/rng.h"

static const double step = 1e-5, tolerance = 1e-7;

static double *random_values(size_t size, uint64_t seed)
{
    double *x = calloc(size, sizeof *x);
    assert_non_null(x);
    for (size_t i = 0; i < size; i++)
        x[i] = (double)(mu_splitmix64(&seed) >> 11) * 0x1p-52 - 1.0;
    return x;
}

/* gradient[i] must be the derivative of objective(ctx) by input[i]. */
static void expect_gradient(double (*objective)(void *ctx), void *ctx, double *input, size_t size,
                            const double *gradient)
{
    for (size_t i = 0; i < size; i++) {
        double saved = input[i];
        input[i] = saved + step;
        double above = objective(ctx);
        input[i] = saved - step;
        double below = objective(ctx);
        input[i] = saved;
        double numeric = (above - below) / (2 * step);
        if (fabs(numeric - gradient[i]) > tolerance * fmax(1.0, fabs(numeric)))
            fail_msg("element %zu: gradient %.10g, central difference %.10g", i, gradient[i], numeric);
    }
}

static double weighted(const double *out, const double *weight, size_t size)
{
    double sum = 0;
    for (size_t i = 0; i < size; i++)
        sum += out[i] * weight[i];
    return sum;
}

struct gemm_case {
    struct ref_gemm shape;
    double *a, *b, *c, *weight;
};

static double gemm_objective(void *ctx)
{
    struct gemm_case *t = ctx;
    ref_gemm(&t->shape, t->a, t->b, false, t->c);
    return weighted(t->c, t->weight, (size_t)t->shape.m * t->shape.n);
}

static void test_gemm_gradients_match_differences(void **state)
{
    (void)state;
    enum { M = 3, N = 4, K = 5 };
    struct gemm_case t = {{M, N, K, false, false},
                          random_values(M * K, 1),
                          random_values(K * N, 2),
                          random_values(M * N, 3),
                          random_values(M * N, 4)};
    double *da = random_values(M * K, 5), *db = random_values(K * N, 6);
    ref_gemm(&(struct ref_gemm){M, K, N, false, true}, t.weight, t.b, false, da); /* dA = dC B^T */
    ref_gemm(&(struct ref_gemm){K, N, M, true, false}, t.a, t.weight, false, db); /* dB = A^T dC */
    expect_gradient(gemm_objective, &t, t.a, M * K, da);
    expect_gradient(gemm_objective, &t, t.b, K * N, db);
    ref_gemm(&(struct ref_gemm){K, N, M, true, false}, t.a, t.weight, true, db); /* accumulated: twice */
    for (int i = 0; i < K * N; i++)
        db[i] /= 2;
    expect_gradient(gemm_objective, &t, t.b, K * N, db);
    double *all[] = {t.a, t.b, t.c, t.weight, da, db};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

static void test_gelu_gradient_matches_differences(void **state)
{
    (void)state;
    for (double x = -6; x <= 6; x += 0.37)
        assert_true(fabs((ref_gelu(x + step) - ref_gelu(x - step)) / (2 * step) - ref_gelu_grad(x)) < tolerance);
    assert_true(fabs(ref_gelu(1.0) - 0.8411919906) < 1e-9);
}

struct norm_case {
    struct ref_norm norm;
    double *out, *y, *weight_out, *weight_y;
};

static double norm_objective(void *ctx)
{
    struct norm_case *t = ctx;
    size_t size = (size_t)t->norm.rows * t->norm.channels;
    ref_norm_forward(&t->norm, t->out, t->y);
    return weighted(t->out, t->weight_out, size) + weighted(t->y, t->weight_y, size);
}

static void check_norm_gradients(bool rms)
{
    enum { ROWS = 3, CHANNELS = 7, SIZE = ROWS * CHANNELS };
    double *residual = random_values(SIZE, 1), *branch = random_values(SIZE, 2), *keep = random_values(SIZE, 3);
    double *weight = random_values(CHANNELS, 4), *bias = random_values(CHANNELS, 5);
    for (int i = 0; i < SIZE; i++)
        keep[i] = keep[i] < -0.3 ? 0.0 : 1.5;
    struct norm_case t = {{ROWS, CHANNELS, residual, branch, keep, weight, rms ? NULL : bias, rms},
                          random_values(SIZE, 6),
                          random_values(SIZE, 7),
                          random_values(SIZE, 8),
                          random_values(SIZE, 9)};
    double *dresidual = random_values(SIZE, 10), *dbranch = random_values(SIZE, 11),
           *dweight = random_values(CHANNELS, 12), *dbias = random_values(CHANNELS, 13);
    ref_norm_backward(&t.norm, t.weight_y, t.weight_out, dresidual, dbranch, dweight, rms ? NULL : dbias);
    expect_gradient(norm_objective, &t, residual, SIZE, dresidual);
    expect_gradient(norm_objective, &t, branch, SIZE, dbranch);
    expect_gradient(norm_objective, &t, weight, CHANNELS, dweight);
    if (!rms)
        expect_gradient(norm_objective, &t, bias, CHANNELS, dbias);
    double *all[] = {residual,     branch,     keep,      weight,  bias,    t.out, t.y,
                     t.weight_out, t.weight_y, dresidual, dbranch, dweight, dbias};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

static void test_norm_gradients_match_differences(void **state)
{
    (void)state;
    check_norm_gradients(false);
    check_norm_gradients(true);
}

struct attention_case {
    struct ref_attention at;
    double *out, *lse, *p, *weight;
};

static double attention_objective(void *ctx)
{
    struct attention_case *t = ctx;
    ref_attention_forward(&t->at, t->out, t->lse, t->p);
    return weighted(t->out, t->weight, (size_t)t->at.sequences * t->at.length * t->at.heads * t->at.head_channels);
}

static void check_attention_gradient(uint32_t kv_heads)
{
    enum { S = 2, T = 5, H = 4, HEAD = 3, P = S * H * T * T };
    const size_t out = S * T * H * HEAD, size = (size_t)S * T * (H + 2 * kv_heads) * HEAD;
    double *qkv = random_values(size, 1), *keep = random_values(P, 2), *dqkv = random_values(size, 3);
    for (int i = 0; i < P; i++)
        keep[i] = keep[i] < -0.5 ? 0.0 : 1.25;
    struct attention_case t = {{S, T, H, kv_heads, HEAD, qkv, keep},
                               random_values(out, 4),
                               random_values(S * H * T, 5),
                               random_values(P, 6),
                               random_values(out, 7)};
    attention_objective(&t);
    for (uint32_t row = 0; row < S * H * T; row++) {
        double sum = 0;
        for (uint32_t j = 0; j < T; j++)
            sum += t.p[row * T + j];
        assert_true(fabs(sum - 1.0) < 1e-12);
    }
    ref_attention_backward(&t.at, t.p, t.weight, dqkv);
    expect_gradient(attention_objective, &t, qkv, size, dqkv);
    double *all[] = {qkv, keep, dqkv, t.out, t.lse, t.p, t.weight};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

static void test_attention_gradient_matches_differences(void **state)
{
    (void)state;
    check_attention_gradient(4);
    check_attention_gradient(2); /* grouped queries */
    check_attention_gradient(1);
}

struct swiglu_case {
    uint32_t rows, hidden;
    double *gate_up, *y, *weight;
};

static double swiglu_objective(void *ctx)
{
    struct swiglu_case *t = ctx;
    ref_swiglu_forward(t->rows, t->hidden, t->gate_up, t->y);
    return weighted(t->y, t->weight, (size_t)t->rows * t->hidden);
}

static void test_swiglu_gradient_matches_differences(void **state)
{
    (void)state;
    enum { ROWS = 3, HIDDEN = 5, SIZE = ROWS * HIDDEN };
    struct swiglu_case t = {ROWS, HIDDEN, random_values(2 * SIZE, 1), random_values(SIZE, 2), random_values(SIZE, 3)};
    double *d = random_values(2 * SIZE, 4);
    for (int i = 0; i < 2 * SIZE; i++)
        t.gate_up[i] *= 4;
    ref_swiglu_backward(ROWS, HIDDEN, t.gate_up, t.weight, d);
    expect_gradient(swiglu_objective, &t, t.gate_up, 2 * SIZE, d);
    t.gate_up[0] = 1.0; /* silu(1) = 0.731058578630 */
    t.gate_up[HIDDEN] = 2.0;
    ref_swiglu_forward(1, HIDDEN, t.gate_up, t.y);
    assert_true(fabs(t.y[0] - 2 * 0.731058578630) < 1e-11);
    double *all[] = {t.gate_up, t.y, t.weight, d};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

/* A rotation: its gradient is the inverse; scores depend on the distance of tokens alone. */
static void test_rotary_is_a_rotation_by_the_token(void **state)
{
    (void)state;
    enum { LENGTH = 7, HEADS = 2, HEAD = 6, SIZE = LENGTH * HEADS * HEAD };
    double *x = random_values(SIZE, 1), *back = random_values(SIZE, 1);
    for (int i = HEADS * HEAD; i < SIZE; i++) /* the same vector at every token */
        x[i] = back[i] = x[i % (HEADS * HEAD)];
    ref_rotary(0, LENGTH, LENGTH, HEADS, HEAD, 100.0, false, x);
    assert_memory_equal(x, back, HEADS * HEAD * sizeof *x); /* token 0 stays */
    double first = weighted(x, x + 2 * HEADS * HEAD, HEAD);
    double later = weighted(x + 3 * HEADS * HEAD, x + 5 * HEADS * HEAD, HEAD);
    assert_true(fabs(first - later) < 1e-12);
    const double *y = x + HEADS * HEAD, *z = back + HEADS * HEAD; /* token 1, pair (1, 4) */
    double angle = pow(100.0, -2.0 / 6.0);
    assert_true(fabs(y[1] - (z[1] * cos(angle) - z[4] * sin(angle))) < 1e-14);
    assert_true(fabs(y[4] - (z[4] * cos(angle) + z[1] * sin(angle))) < 1e-14);
    ref_rotary(0, LENGTH, LENGTH, HEADS, HEAD, 100.0, true, x);
    for (int i = 0; i < SIZE; i++)
        assert_true(fabs(x[i] - back[i]) < 1e-14);
    free(x);
    free(back);
}

struct loss_case {
    uint32_t rows, vocab;
    double *logits, *loss;
    const int32_t *targets;
};

static double loss_objective(void *ctx)
{
    struct loss_case *t = ctx;
    double sum = 0;
    ref_cross_entropy(t->rows, t->vocab, t->logits, t->targets, 0.0, t->loss, NULL);
    for (uint32_t i = 0; i < t->rows; i++)
        sum += 0.25 * t->loss[i];
    return sum;
}

static void test_cross_entropy_gradient_matches_differences(void **state)
{
    (void)state;
    enum { ROWS = 4, VOCAB = 6 };
    const int32_t targets[ROWS] = {0, 5, -1, 3};
    struct loss_case t = {ROWS, VOCAB, random_values(ROWS * VOCAB, 1), random_values(ROWS, 2), targets};
    double *dlogits = random_values(ROWS * VOCAB, 3);
    ref_cross_entropy(ROWS, VOCAB, t.logits, targets, 0.25, t.loss, dlogits);
    assert_true(t.loss[2] == 0.0);
    expect_gradient(loss_objective, &t, t.logits, ROWS * VOCAB, dlogits);
    free(t.logits);
    free(t.loss);
    free(dlogits);
}

struct embedding_case {
    struct ref_embedding e;
    double *wte, *wpe, *x, *weight;
};

static double embedding_objective(void *ctx)
{
    struct embedding_case *t = ctx;
    ref_embedding_forward(&t->e, t->wte, t->wpe, t->x);
    return weighted(t->x, t->weight, (size_t)t->e.sequences * t->e.length * t->e.channels);
}

static void test_embedding_gradients_match_differences(void **state)
{
    (void)state;
    enum { S = 2, T = 3, C = 4, V = 5, SIZE = S * T * C };
    const int32_t tokens[S * T] = {0, 4, 0, 2, 2, 2};
    double *keep = random_values(SIZE, 1), *dwte = random_values(V * C, 2), *dwpe = random_values(T * C, 3);
    struct embedding_case t = {{S, T, C, V, tokens, keep},
                               random_values(V * C, 4),
                               random_values(T * C, 5),
                               random_values(SIZE, 6),
                               random_values(SIZE, 7)};
    ref_embedding_backward(&t.e, t.weight, dwte, dwpe);
    expect_gradient(embedding_objective, &t, t.wte, V * C, dwte);
    expect_gradient(embedding_objective, &t, t.wpe, T * C, dwpe);
    double *all[] = {keep, dwte, dwpe, t.wte, t.wpe, t.x, t.weight};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

/* First update from zero moments: both corrected moments are the gradient and its square, whatever the betas. */
static void test_adamw_first_update_is_sign_of_gradient(void **state)
{
    (void)state;
    double p = 2.0, m = 0.0, v = 0.0, g = -0.3;
    struct ref_adamw a = {
        .lr = 0.1, .beta1 = 0.9, .beta2 = 0.95, .eps = 0.0, .weight_decay = 0.5, .gradient_scale = 7, .update = 1};
    ref_adamw(&a, 1, &p, &m, &v, &g);
    assert_true(fabs(p - (2.0 - 0.1 * (-1.0 + 0.5 * 2.0))) < 1e-12);
    assert_true(fabs(m + 0.1 * 2.1) < 1e-12 && fabs(v - 0.05 * 2.1 * 2.1) < 1e-12);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gemm_gradients_match_differences),
        cmocka_unit_test(test_gelu_gradient_matches_differences),
        cmocka_unit_test(test_norm_gradients_match_differences),
        cmocka_unit_test(test_attention_gradient_matches_differences),
        cmocka_unit_test(test_swiglu_gradient_matches_differences),
        cmocka_unit_test(test_rotary_is_a_rotation_by_the_token),
        cmocka_unit_test(test_cross_entropy_gradient_matches_differences),
        cmocka_unit_test(test_embedding_gradients_match_differences),
        cmocka_unit_test(test_adamw_first_update_is_sign_of_gradient),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
