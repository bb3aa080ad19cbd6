/* Helpers of the kernel tests: inputs, comparison with the reference, and "the same bits whatever runs it". */
#ifndef MU_TESTS_LIB_KERNEL_TESTING_H
#define MU_TESTS_LIB_KERNEL_TESTING_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"

enum { KT_POOLS = 5 };
extern const uint32_t kt_pool_threads[KT_POOLS]; /* 1, 2, 3, 8, 32 */

/* Pools of each size, made once for the process by kt_setup and freed by kt_teardown (cmocka group fixtures). */
struct mu_pool *kt_pool(uint32_t index);
int kt_setup(void **state);
int kt_teardown(void **state);

/* calloc that aborts the test instead of returning NULL. */
void *kt_alloc(size_t count, size_t size);
/* `size` values in (-scale, scale), a function of seed; kt_doubles gives the same values. */
float *kt_floats(size_t size, uint64_t seed, double scale);
double *kt_doubles(const float *values, size_t size);
float *kt_copy(const float *values, size_t size);

/* Fails the test unless |value - reference| <= tolerance * (largest |reference|, at least floor) everywhere. */
void kt_expect_close(const char *what, const float *values, const double *reference, size_t size, double tolerance,
                     double floor);

/* Calls run(ctx, pool, out) for every instruction set of this CPU and every pool; all must write the same `size`
 * floats. */
void kt_expect_same_bits(const char *what, void (*run)(void *ctx, struct mu_pool *pool, float *out), void *ctx,
                         size_t size);

#endif
