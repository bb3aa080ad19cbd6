/* The operations of a device: one function for each mu_kernel_X of kernels.h, with its signature and meaning. */
#ifndef MU_KERNELS_KERNEL_OPS_H
#define MU_KERNELS_KERNEL_OPS_H

#include "kernels/kernels.h"

/* OP(X) for each mu_kernel_X that a device implements. */
#define MU_KERNEL_OPS(OP)                                                                                              \
    OP(gemm)                                                                                                           \
    OP(column_sum)                                                                                                     \
    OP(embedding_forward)                                                                                              \
    OP(embedding_drop)                                                                                                 \
    OP(embedding_backward)                                                                                             \
    OP(position_backward)                                                                                              \
    OP(norm_forward)                                                                                                   \
    OP(norm_backward)                                                                                                  \
    OP(bias_add)                                                                                                       \
    OP(gelu_forward)                                                                                                   \
    OP(gelu_backward)                                                                                                  \
    OP(swiglu_forward)                                                                                                 \
    OP(swiglu_backward)                                                                                                \
    OP(rotary)                                                                                                         \
    OP(attention_forward)                                                                                              \
    OP(attention_backward)                                                                                             \
    OP(cross_entropy)                                                                                                  \
    OP(cross_entropy_max)                                                                                              \
    OP(cross_entropy_sum)                                                                                              \
    OP(cross_entropy_gradient)                                                                                         \
    OP(join_max)                                                                                                       \
    OP(join_sums)                                                                                                      \
    OP(add)                                                                                                            \
    OP(square_sum)                                                                                                     \
    OP(adamw)                                                                                                          \
    OP(init_normal)                                                                                                    \
    OP(fill)

/* A table has each of them by its name, with the type of the function in kernels.h. */
#define MU_KERNEL_OP_FIELD(X) __typeof__(mu_kernel_##X) *X;

struct mu_kernel_ops {
    MU_KERNEL_OPS(MU_KERNEL_OP_FIELD)
};

extern const struct mu_kernel_ops mu_cpu_ops;

#endif
