#include "kernels/kernel_ops.h"

#include "kernels/cuda/ops.h"

/* What both types share; products and attention are given. */
#define MU_CUDA_OPS(type)                                                                                              \
    {                                                                                                                  \
        .gemm = mu_cuda_##type##gemm, .column_sum = mu_cuda_column_sum,                                                \
        .embedding_forward = mu_cuda_embedding_forward, .embedding_drop = mu_cuda_embedding_drop,                      \
        .embedding_backward = mu_cuda_embedding_backward, .position_backward = mu_cuda_position_backward,              \
        .norm_forward = mu_cuda_norm_forward, .norm_backward = mu_cuda_norm_backward, .bias_add = mu_cuda_bias_add,    \
        .gelu_forward = mu_cuda_gelu_forward, .gelu_backward = mu_cuda_gelu_backward,                                  \
        .swiglu_forward = mu_cuda_swiglu_forward, .swiglu_backward = mu_cuda_swiglu_backward,                          \
        .rotary = mu_cuda_rotary, .attention_forward = mu_cuda_##type##attention_forward,                              \
        .attention_backward = mu_cuda_##type##attention_backward, .cross_entropy = mu_cuda_cross_entropy,              \
        .cross_entropy_max = mu_cuda_cross_entropy_max, .cross_entropy_sum = mu_cuda_cross_entropy_sum,                \
        .cross_entropy_gradient = mu_cuda_cross_entropy_gradient, .join_max = mu_cuda_join_max,                        \
        .join_sums = mu_cuda_join_sums, .add = mu_cuda_add, .square_sum = mu_cuda_square_sum, .adamw = mu_cuda_adamw,  \
        .init_normal = mu_cuda_init_normal, .fill = mu_cuda_fill,                                                      \
    }

struct mu_cuda *mu_pool_cuda(struct mu_pool *pool)
{
    return (struct mu_cuda *)mu_pool_device(pool); /* its first member */
}

const struct mu_kernel_ops mu_cuda_ops = MU_CUDA_OPS();
const struct mu_kernel_ops mu_cuda_bf16_ops = MU_CUDA_OPS(bf16_);
