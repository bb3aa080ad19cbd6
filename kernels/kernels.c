/* Each operation, on the device of its pool. */
#include "kernels/kernel_ops.h"

enum mu_status mu_kernel_gemm(struct mu_pool *pool, const struct mu_gemm *gemm)
{
    return mu_pool_ops(pool)->gemm(pool, gemm);
}

enum mu_status mu_kernel_column_sum(struct mu_pool *pool, uint32_t rows, uint32_t n, const float *a, size_t lda,
                                    bool accumulate, float *out)
{
    return mu_pool_ops(pool)->column_sum(pool, rows, n, a, lda, accumulate, out);
}

enum mu_status mu_kernel_embedding_forward(struct mu_pool *pool, uint32_t first_row, uint32_t rows, uint32_t length,
                                           uint32_t channels, const struct mu_vocab_slices *table,
                                           const int32_t *tokens, const float *wpe, const struct mu_dropout *drop,
                                           float *x)
{
    return mu_pool_ops(pool)->embedding_forward(pool, first_row, rows, length, channels, table, tokens, wpe, drop, x);
}

enum mu_status mu_kernel_embedding_drop(struct mu_pool *pool, uint32_t first_row, uint32_t rows, uint32_t length,
                                        uint32_t channels, const struct mu_dropout *drop, float *dx)
{
    return mu_pool_ops(pool)->embedding_drop(pool, first_row, rows, length, channels, drop, dx);
}

enum mu_status mu_kernel_embedding_backward(struct mu_pool *pool, uint32_t rows, uint32_t channels,
                                            const int32_t *tokens, const float *dx, uint32_t first, uint32_t count,
                                            float *dtable)
{
    return mu_pool_ops(pool)->embedding_backward(pool, rows, channels, tokens, dx, first, count, dtable);
}

enum mu_status mu_kernel_position_backward(struct mu_pool *pool, uint32_t first_row, uint32_t rows, uint32_t length,
                                           uint32_t channels, const float *dx, float *dwpe)
{
    return mu_pool_ops(pool)->position_backward(pool, first_row, rows, length, channels, dx, dwpe);
}

enum mu_status mu_kernel_norm_forward(struct mu_pool *pool, const struct mu_norm_forward *norm)
{
    return mu_pool_ops(pool)->norm_forward(pool, norm);
}

enum mu_status mu_kernel_norm_backward(struct mu_pool *pool, const struct mu_norm_backward *norm)
{
    return mu_pool_ops(pool)->norm_backward(pool, norm);
}

enum mu_status mu_kernel_bias_add(struct mu_pool *pool, uint32_t rows, uint32_t n, const float *bias, float *x)
{
    return mu_pool_ops(pool)->bias_add(pool, rows, n, bias, x);
}

enum mu_status mu_kernel_gelu_forward(struct mu_pool *pool, size_t size, const float *x, float *y)
{
    return mu_pool_ops(pool)->gelu_forward(pool, size, x, y);
}

enum mu_status mu_kernel_gelu_backward(struct mu_pool *pool, size_t size, const float *x, const float *dy, float *dx)
{
    return mu_pool_ops(pool)->gelu_backward(pool, size, x, dy, dx);
}

enum mu_status mu_kernel_swiglu_forward(struct mu_pool *pool, uint32_t rows, uint32_t hidden, const float *gate_up,
                                        float *y)
{
    return mu_pool_ops(pool)->swiglu_forward(pool, rows, hidden, gate_up, y);
}

enum mu_status mu_kernel_swiglu_backward(struct mu_pool *pool, uint32_t rows, uint32_t hidden, const float *gate_up,
                                         const float *dy, float *d_gate_up)
{
    return mu_pool_ops(pool)->swiglu_backward(pool, rows, hidden, gate_up, dy, d_gate_up);
}

enum mu_status mu_kernel_rotary(struct mu_pool *pool, uint32_t first_row, uint32_t rows, uint32_t length,
                                uint32_t heads, uint32_t head_channels, size_t stride, const float *cosines,
                                const float *sines, bool inverse, float *x)
{
    return mu_pool_ops(pool)->rotary(pool, first_row, rows, length, heads, head_channels, stride, cosines, sines,
                                     inverse, x);
}

enum mu_status mu_kernel_attention_forward(struct mu_pool *pool, const struct mu_attention *attention)
{
    return mu_pool_ops(pool)->attention_forward(pool, attention);
}

enum mu_status mu_kernel_attention_backward(struct mu_pool *pool, const struct mu_attention *attention)
{
    return mu_pool_ops(pool)->attention_backward(pool, attention);
}

enum mu_status mu_kernel_cross_entropy(struct mu_pool *pool, uint32_t rows, uint32_t vocab, size_t ld, float *logits,
                                       const int32_t *targets, float scale, bool gradient, double *loss)
{
    return mu_pool_ops(pool)->cross_entropy(pool, rows, vocab, ld, logits, targets, scale, gradient, loss);
}

enum mu_status mu_kernel_cross_entropy_max(struct mu_pool *pool, uint32_t rows, uint32_t vocab, size_t ld,
                                           const float *logits, float *highest)
{
    return mu_pool_ops(pool)->cross_entropy_max(pool, rows, vocab, ld, logits, highest);
}

enum mu_status mu_kernel_cross_entropy_sum(struct mu_pool *pool, uint32_t rows, uint32_t first, uint32_t vocab,
                                           size_t ld, float *logits, const int32_t *targets, const float *highest,
                                           bool gradient, double *sum, double *loss)
{
    return mu_pool_ops(pool)->cross_entropy_sum(pool, rows, first, vocab, ld, logits, targets, highest, gradient, sum,
                                                loss);
}

enum mu_status mu_kernel_cross_entropy_gradient(struct mu_pool *pool, uint32_t rows, uint32_t first, uint32_t vocab,
                                                size_t ld, float *logits, const int32_t *targets, const double *sum,
                                                float scale, bool gradient, double *loss)
{
    return mu_pool_ops(pool)->cross_entropy_gradient(pool, rows, first, vocab, ld, logits, targets, sum, scale,
                                                     gradient, loss);
}

enum mu_status mu_kernel_join_max(struct mu_pool *pool, uint32_t slices, uint32_t rows, float *highest)
{
    return mu_pool_ops(pool)->join_max(pool, slices, rows, highest);
}

enum mu_status mu_kernel_join_sums(struct mu_pool *pool, uint32_t slices, uint32_t rows, double *sums)
{
    return mu_pool_ops(pool)->join_sums(pool, slices, rows, sums);
}

enum mu_status mu_kernel_add(struct mu_pool *pool, size_t size, float *into, const float *from)
{
    return mu_pool_ops(pool)->add(pool, size, into, from);
}

enum mu_status mu_kernel_square_sum(struct mu_pool *pool, size_t size, const float *g, struct mu_exact_sum *sum)
{
    return mu_pool_ops(pool)->square_sum(pool, size, g, sum);
}

enum mu_status mu_kernel_adamw(struct mu_pool *pool, const struct mu_adamw *adamw, size_t size, float *p, float *m,
                               float *v, const float *g)
{
    return mu_pool_ops(pool)->adamw(pool, adamw, size, p, m, v, g);
}

enum mu_status mu_kernel_init_normal(struct mu_pool *pool, uint64_t seed, uint32_t tensor, uint64_t first, size_t size,
                                     float std, float *x)
{
    return mu_pool_ops(pool)->init_normal(pool, seed, tensor, first, size, std, x);
}

enum mu_status mu_kernel_fill(struct mu_pool *pool, size_t size, float value, float *x)
{
    return mu_pool_ops(pool)->fill(pool, size, value, x);
}
