/* The operations of a backend: one function for each mu_kernel_X of kernels.h, with its signature and meaning. */
#ifndef MU_KERNELS_KERNEL_OPS_H
#define MU_KERNELS_KERNEL_OPS_H

#include "kernels/kernels.h"

struct mu_kernel_ops {
    enum mu_status (*gemm)(struct mu_pool *pool, const struct mu_gemm *gemm);
    enum mu_status (*column_sum)(struct mu_pool *pool, uint32_t rows, uint32_t n, const float *a, size_t lda,
                                 bool accumulate, float *out);
    enum mu_status (*embedding_forward)(struct mu_pool *pool, uint32_t first_row, uint32_t rows, uint32_t length,
                                        uint32_t channels, const struct mu_vocab_slices *table, const int32_t *tokens,
                                        const float *wpe, const struct mu_dropout *drop, float *x);
    enum mu_status (*embedding_drop)(struct mu_pool *pool, uint32_t first_row, uint32_t rows, uint32_t length,
                                     uint32_t channels, const struct mu_dropout *drop, float *dx);
    enum mu_status (*embedding_backward)(struct mu_pool *pool, uint32_t rows, uint32_t channels, const int32_t *tokens,
                                         const float *dx, uint32_t first, uint32_t count, float *dtable);
    enum mu_status (*position_backward)(struct mu_pool *pool, uint32_t first_row, uint32_t rows, uint32_t length,
                                        uint32_t channels, const float *dx, float *dwpe);
    enum mu_status (*norm_forward)(struct mu_pool *pool, const struct mu_norm_forward *norm);
    enum mu_status (*norm_backward)(struct mu_pool *pool, const struct mu_norm_backward *norm);
    enum mu_status (*bias_add)(struct mu_pool *pool, uint32_t rows, uint32_t n, const float *bias, float *x);
    enum mu_status (*gelu_forward)(struct mu_pool *pool, size_t size, const float *x, float *y);
    enum mu_status (*gelu_backward)(struct mu_pool *pool, size_t size, const float *x, const float *dy, float *dx);
    enum mu_status (*swiglu_forward)(struct mu_pool *pool, uint32_t rows, uint32_t hidden, const float *gate_up,
                                     float *y);
    enum mu_status (*swiglu_backward)(struct mu_pool *pool, uint32_t rows, uint32_t hidden, const float *gate_up,
                                      const float *dy, float *d_gate_up);
    enum mu_status (*rotary)(struct mu_pool *pool, uint32_t first_row, uint32_t rows, uint32_t length, uint32_t heads,
                             uint32_t head_channels, size_t stride, const float *cosines, const float *sines,
                             bool inverse, float *x);
    enum mu_status (*attention_forward)(struct mu_pool *pool, const struct mu_attention *attention);
    enum mu_status (*attention_backward)(struct mu_pool *pool, const struct mu_attention *attention);
    enum mu_status (*cross_entropy)(struct mu_pool *pool, uint32_t rows, uint32_t vocab, size_t ld, float *logits,
                                    const int32_t *targets, float scale, bool gradient, double *loss);
    enum mu_status (*cross_entropy_max)(struct mu_pool *pool, uint32_t rows, uint32_t vocab, size_t ld,
                                        const float *logits, float *highest);
    enum mu_status (*cross_entropy_sum)(struct mu_pool *pool, uint32_t rows, uint32_t first, uint32_t vocab, size_t ld,
                                        float *logits, const int32_t *targets, const float *highest, bool gradient,
                                        double *sum, double *loss);
    enum mu_status (*cross_entropy_gradient)(struct mu_pool *pool, uint32_t rows, uint32_t first, uint32_t vocab,
                                             size_t ld, float *logits, const int32_t *targets, const double *sum,
                                             float scale, bool gradient, double *loss);
    enum mu_status (*add)(struct mu_pool *pool, size_t size, float *into, const float *from);
    enum mu_status (*square_sum)(struct mu_pool *pool, size_t size, const float *g, struct mu_exact_sum *sum);
    enum mu_status (*adamw)(struct mu_pool *pool, const struct mu_adamw *adamw, size_t size, float *p, float *m,
                            float *v, const float *g);
    enum mu_status (*init_normal)(struct mu_pool *pool, uint64_t seed, uint32_t tensor, uint64_t first, size_t size,
                                  float std, float *x);
    enum mu_status (*fill)(struct mu_pool *pool, size_t size, float value, float *x);
};

#endif
