#include "kernels/cpu/cpu_ops.h"

#define MU_CPU_ENTRY(X) .X = mu_cpu_##X,
const struct mu_kernel_ops mu_cpu_ops = {MU_KERNEL_OPS(MU_CPU_ENTRY)};
