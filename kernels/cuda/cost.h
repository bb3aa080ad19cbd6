/* What the kernels of kernels/cuda must move and compute at least: the floor that a measured time is compared with.
 *
 * Bytes are those of device memory when every operand is read once and every result written once, plus what a kernel
 * reads again by its design where that is not expected to hit a cache (said below). A multiply-add counts as two
 * FLOPs; masked halves of attention are not counted. Pure. */
#ifndef MU_KERNELS_CUDA_COST_H
#define MU_KERNELS_CUDA_COST_H

#include "kernels/cuda/cuda.h"

struct mu_cuda_cost {
    const char *kernel;
    double bytes, flops;
};

/* 2 m n k FLOPs. fp32: operands and C once. bf16: also the rounding of the operands, 4 bytes in and 2 out, and 2 in. */
struct mu_cuda_cost mu_cuda_cost_gemm(const struct mu_gemm *gemm, enum mu_dtype dtype);
/* Forward 2, backward 7 products of [length, length, channels of a head], half of each masked. */
struct mu_cuda_cost mu_cuda_cost_attention(const struct mu_attention *attention, bool backward);
/* Forward: residual, branch, residual_out, y. Backward: residual and dy twice (sums of rows, then columns). */
struct mu_cuda_cost mu_cuda_cost_norm_forward(const struct mu_norm_forward *norm);
struct mu_cuda_cost mu_cuda_cost_norm_backward(const struct mu_norm_backward *norm);
/* The logits once, and their gradient: later passes over a row hit the second-level cache. */
struct mu_cuda_cost mu_cuda_cost_cross_entropy(uint32_t rows, uint32_t vocab, bool gradient);
/* Table rows, positions, result; dx, and each table row that occurs twice (read, written): `distinct` tokens. */
struct mu_cuda_cost mu_cuda_cost_embedding_forward(uint32_t rows, uint32_t channels, bool positions);
struct mu_cuda_cost mu_cuda_cost_embedding_backward(uint32_t rows, uint32_t channels, uint32_t distinct);

/* Operations whose bytes are a number per element of their result (or of what they sum). */
enum mu_cuda_stream_op {
    MU_CUDA_STREAM_FILL,
    MU_CUDA_STREAM_ADD,
    MU_CUDA_STREAM_GELU_FORWARD,
    MU_CUDA_STREAM_GELU_BACKWARD,
    MU_CUDA_STREAM_SWIGLU_FORWARD,
    MU_CUDA_STREAM_SWIGLU_BACKWARD,
    MU_CUDA_STREAM_BIAS_ADD,
    MU_CUDA_STREAM_ROTARY,
    MU_CUDA_STREAM_COLUMN_SUM,
    MU_CUDA_STREAM_SQUARE_SUM,
    MU_CUDA_STREAM_ADAMW,
    MU_CUDA_STREAM_COUNT
};
struct mu_cuda_cost mu_cuda_cost_stream(enum mu_cuda_stream_op op, size_t elements);

#endif
