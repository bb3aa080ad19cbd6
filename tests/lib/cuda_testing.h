/* Helpers of the CUDA kernels' tests: one GPU (emulated) for the process, copies of host arrays on it, comparison by
 * bits with what the CPU backend computed. */
#ifndef MU_TESTS_LIB_CUDA_TESTING_H
#define MU_TESTS_LIB_CUDA_TESTING_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/ops.h"
#include "tests/lib/kernel_testing.h"

/* cmocka group fixtures: kt_setup with a GPU in fp32, and one in bf16. */
int ct_setup(void **state);
int ct_teardown(void **state);

/* The pool of the GPU in fp32; the one of the CPU is ct_cpu(). */
struct mu_pool *ct_pool(void);
struct mu_pool *ct_cpu(void);
struct mu_pool *ct_bf16_pool(void);

/* A copy on the GPU, exactly as large as asked for; freed by ct_reset. `misalign` floats are skipped before it. */
void *ct_copy(const void *host, size_t size_bytes);
float *ct_floats(const float *host, size_t size);
float *ct_misaligned(const float *host, size_t size, size_t misalign);
/* Ends a case: its copies are freed, and threads run in another order from now on. */
void ct_reset(void);

/* Waits, then the values of the GPU's array must be those of `expected`, bit for bit. */
void ct_expect_bits(const char *what, const float *device, const float *expected, size_t size);
void ct_expect_bytes(const char *what, const void *device, const void *expected, size_t size_bytes);
/* The GPU's array on the host; the caller frees it. */
float *ct_read(const float *device, size_t size);

/* Values around 1, and some very large, very small, denormal and signed zeros, as a function of seed. */
float *ct_wild(size_t size, uint64_t seed);

#endif
