/* How cublasLt runs the matrix products of a context. Private to kernels/cuda.
 *
 * A plan is chosen once for each shape, by cublasLt's heuristic without split-K (no sum in an order of its own), and
 * kept: every later product of that shape runs the same algorithm. The heuristic is a function of the shape, the GPU
 * and the library, so all workers of a job that agree in these agree in their bits. */
#ifndef MU_KERNELS_CUDA_PLAN_H
#define MU_KERNELS_CUDA_PLAN_H

#include <cublasLt.h>

#include "kernels/cuda/cuda.h"

/* C[m,n] (+)= op(A) op(B), all row-major; A, B bf16, C and what the epilogue touches fp32. */
struct plan_key {
    uint32_t m, n, k, lda, ldb;
    uint32_t transpose_a, transpose_b, accumulate, epilogue;
    uint32_t aligned; /* C, bias, before and aux are 16-byte aligned */
    uint64_t ldc, ldaux;
};

struct mu_cuda_plan {
    struct plan_key key;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algo;
    bool fused; /* the epilogue is part of the algorithm */
};

/* Bytes of the workspace that cublasLt may use; they come first. */
size_t mu_cuda_plan_scratch(const struct mu_cuda *cuda);

enum mu_status mu_cuda_plans_init(struct mu_cuda *cuda, struct mu_error *err) MU_WARN_UNUSED;
/* Fine on a context without plans. */
void mu_cuda_plans_fini(struct mu_cuda *cuda);
/* The plan for a shape. The pointer is good until the next call. */
enum mu_status mu_cuda_plan_for(struct mu_cuda *cuda, const struct plan_key *key,
                                struct mu_cuda_plan **ret_plan) MU_WARN_UNUSED;
/* Translates a failure into cuda->error. */
enum mu_status mu_cuda_blas_status(struct mu_cuda *cuda, const char *what, cublasStatus_t status) MU_WARN_UNUSED;
/* Chooses the algorithms of a job's linear layers and hashes their settings. */
enum mu_status mu_cuda_plans_hash(struct mu_cuda *cuda, const struct mu_kernel_shapes *shapes,
                                  uint64_t *ret_hash) MU_WARN_UNUSED;
/* The GPU class, library and algorithms that bf16 bits belong to. */
void mu_cuda_plans_text(const struct mu_cuda *cuda, uint64_t hash, char *text, size_t size);

#endif
