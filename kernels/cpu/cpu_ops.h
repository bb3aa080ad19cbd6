/* mu_cpu_X for each operation mu_kernel_X: the functions behind mu_cpu_ops, private to kernels/cpu. */
#ifndef MU_KERNELS_CPU_CPU_OPS_H
#define MU_KERNELS_CPU_CPU_OPS_H

#include "kernels/kernel_ops.h"

#define MU_CPU_OP(X) __typeof__(mu_kernel_##X) mu_cpu_##X;
MU_KERNEL_OPS(MU_CPU_OP)
#undef MU_CPU_OP

#endif
