/* How cublasLt runs the matrix products of a context: one plan for each shape, chosen once. Private to kernels/cuda. */
#ifndef MU_KERNELS_CUDA_PLAN_H
#define MU_KERNELS_CUDA_PLAN_H

#include "kernels/cuda/cuda.h"

enum mu_status mu_cuda_plans_init(struct mu_cuda *cuda, struct mu_error *err) MU_WARN_UNUSED;
/* Fine on a context without plans. */
void mu_cuda_plans_fini(struct mu_cuda *cuda);
/* The GPU class and library that bf16 bits belong to. */
void mu_cuda_plans_text(const struct mu_cuda *cuda, char *text, size_t size);

#endif
