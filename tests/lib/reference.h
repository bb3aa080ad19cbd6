/* Every operation of kernels/kernels.h in double precision, written for clarity: what the fast ones are judged by.
 *
 * Shapes and layouts are those of kernels.h, row-major and dense. Gradients are overwritten. Dropout factors are given
 * as arrays (NULL: none). Pure; the caller owns all memory. */
#ifndef MU_TESTS_LIB_REFERENCE_H
#define MU_TESTS_LIB_REFERENCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ref_gemm {
    uint32_t m, n, k;
    bool transpose_a, transpose_b;
};
/* c (+)= op(a) op(b) */
void ref_gemm(const struct ref_gemm *shape, const double *a, const double *b, bool accumulate, double *c);

double ref_gelu(double x);
double ref_gelu_grad(double x);

/* gate_up[rows, 2 hidden]: gate | up. */
void ref_swiglu_forward(uint32_t rows, uint32_t hidden, const double *gate_up, double *y);
void ref_swiglu_backward(uint32_t rows, uint32_t hidden, const double *gate_up, const double *dy, double *d_gate_up);

/* x[rows, heads, head_channels] in place; the row's angle is that of token (first_row + row) % length. */
void ref_rotary(uint32_t first_row, uint32_t rows, uint32_t length, uint32_t heads, uint32_t head_channels, double base,
                bool inverse, double *x);

struct ref_norm {
    uint32_t rows, channels;
    const double *residual, *branch, *keep, *weight, *bias; /* branch, keep may be NULL; bias not with rms */
    bool rms;
};
void ref_norm_forward(const struct ref_norm *norm, double *residual_out, double *y);
/* Gradients of residual (equal to that of the stream), branch, weight, bias (not with rms) for dy and for `dstream`,
 * the gradient that reaches residual_out directly (NULL: zero). */
void ref_norm_backward(const struct ref_norm *norm, const double *dy, const double *dstream, double *dresidual,
                       double *dbranch, double *dweight, double *dbias);

struct ref_attention {
    uint32_t sequences, length, heads, kv_heads, head_channels;
    const double *qkv;  /* [sequences, length, heads + 2 kv_heads, head_channels] */
    const double *keep; /* [sequences, heads, length, length] or NULL */
};
/* probabilities [sequences, heads, length, length] receives the softmax before dropout. */
void ref_attention_forward(const struct ref_attention *at, double *out, double *lse, double *probabilities);
void ref_attention_backward(const struct ref_attention *at, const double *probabilities, const double *dout,
                            double *dqkv);

/* loss[rows]; dlogits = (softmax - onehot) * scale (NULL: not wanted). */
void ref_cross_entropy(uint32_t rows, uint32_t vocab, const double *logits, const int32_t *targets, double scale,
                       double *loss, double *dlogits);

struct ref_embedding {
    uint32_t sequences, length, channels, vocab;
    const int32_t *tokens;
    const double *keep; /* [sequences, length, channels] or NULL */
};
void ref_embedding_forward(const struct ref_embedding *e, const double *wte, const double *wpe, double *x);
void ref_embedding_backward(const struct ref_embedding *e, const double *dx, double *dwte, double *dwpe);

struct ref_adamw {
    double lr, beta1, beta2, eps, weight_decay, gradient_scale;
    uint64_t update;
};
void ref_adamw(const struct ref_adamw *a, size_t size, double *p, double *m, double *v, const double *g);

#endif
