/* The operations of kernels.h on a GPU, as functions; mu_cuda_ops is the table of them. Private to kernels/cuda. */
#ifndef MU_KERNELS_CUDA_OPS_H
#define MU_KERNELS_CUDA_OPS_H

#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

enum mu_status mu_cuda_gemm(struct mu_pool *pool, const struct mu_gemm *gemm) MU_WARN_UNUSED;
enum mu_status mu_cuda_column_sum(struct mu_pool *pool, uint32_t rows, uint32_t n, const float *a, size_t lda,
                                  bool accumulate, float *out) MU_WARN_UNUSED;
enum mu_status mu_cuda_embedding_forward(struct mu_pool *pool, uint32_t first_row, uint32_t rows, uint32_t length,
                                         uint32_t channels, const struct mu_vocab_slices *table, const int32_t *tokens,
                                         const float *wpe, const struct mu_dropout *drop, float *x) MU_WARN_UNUSED;
enum mu_status mu_cuda_embedding_drop(struct mu_pool *pool, uint32_t first_row, uint32_t rows, uint32_t length,
                                      uint32_t channels, const struct mu_dropout *drop, float *dx) MU_WARN_UNUSED;
enum mu_status mu_cuda_embedding_backward(struct mu_pool *pool, uint32_t rows, uint32_t channels, const int32_t *tokens,
                                          const float *dx, uint32_t first, uint32_t count,
                                          float *dtable) MU_WARN_UNUSED;
enum mu_status mu_cuda_position_backward(struct mu_pool *pool, uint32_t first_row, uint32_t rows, uint32_t length,
                                         uint32_t channels, const float *dx, float *dwpe) MU_WARN_UNUSED;
enum mu_status mu_cuda_norm_forward(struct mu_pool *pool, const struct mu_norm_forward *norm) MU_WARN_UNUSED;
enum mu_status mu_cuda_norm_backward(struct mu_pool *pool, const struct mu_norm_backward *norm) MU_WARN_UNUSED;
enum mu_status mu_cuda_bias_add(struct mu_pool *pool, uint32_t rows, uint32_t n, const float *bias,
                                float *x) MU_WARN_UNUSED;
enum mu_status mu_cuda_gelu_forward(struct mu_pool *pool, size_t size, const float *x, float *y) MU_WARN_UNUSED;
enum mu_status mu_cuda_gelu_backward(struct mu_pool *pool, size_t size, const float *x, const float *dy,
                                     float *dx) MU_WARN_UNUSED;
enum mu_status mu_cuda_swiglu_forward(struct mu_pool *pool, uint32_t rows, uint32_t hidden, const float *gate_up,
                                      float *y) MU_WARN_UNUSED;
enum mu_status mu_cuda_swiglu_backward(struct mu_pool *pool, uint32_t rows, uint32_t hidden, const float *gate_up,
                                       const float *dy, float *d_gate_up) MU_WARN_UNUSED;
enum mu_status mu_cuda_rotary(struct mu_pool *pool, uint32_t first_row, uint32_t rows, uint32_t length, uint32_t heads,
                              uint32_t head_channels, size_t stride, const float *cosines, const float *sines,
                              bool inverse, float *x) MU_WARN_UNUSED;
enum mu_status mu_cuda_attention_forward(struct mu_pool *pool, const struct mu_attention *attention) MU_WARN_UNUSED;
enum mu_status mu_cuda_attention_backward(struct mu_pool *pool, const struct mu_attention *attention) MU_WARN_UNUSED;
enum mu_status mu_cuda_cross_entropy(struct mu_pool *pool, uint32_t rows, uint32_t vocab, size_t ld, float *logits,
                                     const int32_t *targets, float scale, bool gradient, double *loss) MU_WARN_UNUSED;
enum mu_status mu_cuda_cross_entropy_max(struct mu_pool *pool, uint32_t rows, uint32_t vocab, size_t ld,
                                         const float *logits, float *highest) MU_WARN_UNUSED;
enum mu_status mu_cuda_cross_entropy_sum(struct mu_pool *pool, uint32_t rows, uint32_t first, uint32_t vocab, size_t ld,
                                         float *logits, const int32_t *targets, const float *highest, bool gradient,
                                         double *sum, double *loss) MU_WARN_UNUSED;
enum mu_status mu_cuda_cross_entropy_gradient(struct mu_pool *pool, uint32_t rows, uint32_t first, uint32_t vocab,
                                              size_t ld, float *logits, const int32_t *targets, const double *sum,
                                              float scale, bool gradient, double *loss) MU_WARN_UNUSED;
enum mu_status mu_cuda_add(struct mu_pool *pool, size_t size, float *into, const float *from) MU_WARN_UNUSED;
enum mu_status mu_cuda_square_sum(struct mu_pool *pool, size_t size, const float *g,
                                  struct mu_exact_sum *sum) MU_WARN_UNUSED;
enum mu_status mu_cuda_adamw(struct mu_pool *pool, const struct mu_adamw *adamw, size_t size, float *p, float *m,
                             float *v, const float *g) MU_WARN_UNUSED;
enum mu_status mu_cuda_init_normal(struct mu_pool *pool, uint64_t seed, uint32_t tensor, uint64_t first, size_t size,
                                   float std, float *x) MU_WARN_UNUSED;
enum mu_status mu_cuda_fill(struct mu_pool *pool, size_t size, float value, float *x) MU_WARN_UNUSED;
enum mu_status mu_cuda_join_max(struct mu_pool *pool, uint32_t slices, uint32_t rows, float *highest) MU_WARN_UNUSED;
enum mu_status mu_cuda_join_sums(struct mu_pool *pool, uint32_t slices, uint32_t rows, double *sums) MU_WARN_UNUSED;

/* What bf16 does differently. */
enum mu_status mu_cuda_bf16_gemm(struct mu_pool *pool, const struct mu_gemm *gemm) MU_WARN_UNUSED;
enum mu_status mu_cuda_bf16_attention_forward(struct mu_pool *pool,
                                              const struct mu_attention *attention) MU_WARN_UNUSED;
enum mu_status mu_cuda_bf16_attention_backward(struct mu_pool *pool,
                                               const struct mu_attention *attention) MU_WARN_UNUSED;

#ifdef __cplusplus
}
#endif

#endif
