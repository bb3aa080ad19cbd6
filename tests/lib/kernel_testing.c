#include "tests/lib/kernel_testing.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "common/rng.h"
#include "tests/lib/sanitized.h"

const uint32_t kt_pool_threads[KT_POOLS] = {1, 2, 3, 8, 32};
static struct mu_pool *pools[KT_POOLS];

struct mu_pool *kt_pool(uint32_t index)
{
    return pools[index];
}

int kt_setup(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < KT_POOLS; i++)
        if (mu_pool_new(kt_pool_threads[i], NULL, &pools[i]) != MU_OK)
            return -1;
    return 0;
}

int kt_teardown(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < KT_POOLS; i++)
        mu_pool_free(pools[i]);
    return 0;
}

void *kt_alloc(size_t count, size_t size)
{
    void *memory = calloc(count ? count : 1, size);
    assert_non_null(memory);
    return memory;
}

float *kt_floats(size_t size, uint64_t seed, double scale)
{
    float *values = kt_alloc(size, sizeof *values);
    uint64_t state = seed;
    for (size_t i = 0; i < size; i++)
        values[i] = (float)(((double)(mu_splitmix64(&state) >> 11) * 0x1p-52 - 1.0) * scale);
    return values;
}

double *kt_doubles(const float *values, size_t size)
{
    double *copy = kt_alloc(size, sizeof *copy);
    for (size_t i = 0; i < size; i++)
        copy[i] = (double)values[i];
    return copy;
}

float *kt_copy(const float *values, size_t size)
{
    float *copy = kt_alloc(size, sizeof *copy);
    memcpy(copy, values, size * sizeof *copy);
    return copy;
}

void kt_expect_close(const char *what, const float *values, const double *reference, size_t size, double tolerance,
                     double floor)
{
    double largest = floor;
    for (size_t i = 0; i < size; i++)
        largest = fmax(largest, fabs(reference[i]));
    for (size_t i = 0; i < size; i++)
        if (!(fabs((double)values[i] - reference[i]) <= tolerance * largest))
            fail_msg("%s[%zu]: %.9g, reference %.9g, allowed %.2g of %.3g", what, i, (double)values[i], reference[i],
                     tolerance, largest);
}

void kt_expect_same_bits(const char *what, void (*run)(void *ctx, struct mu_pool *pool, float *out), void *ctx,
                         size_t size)
{
    float *first = kt_alloc(size, sizeof *first), *other = kt_alloc(size, sizeof *other);
    const uint32_t pool_count = SANITIZED ? 3 : KT_POOLS; /* more threads find no more, and wait for cores */
    enum mu_isa active = mu_isa_active();
    run(ctx, pools[0], first);
    for (int isa = MU_ISA_SCALAR; isa <= MU_ISA_AVX512; isa++) {
        if (mu_isa_select((enum mu_isa)isa, NULL) != MU_OK)
            continue;
        for (uint32_t i = 0; i < pool_count; i++) {
            memset(other, 0xee, size * sizeof *other);
            run(ctx, pools[i], other);
            for (size_t j = 0; j < size; j++)
                if (memcmp(&first[j], &other[j], sizeof *first) != 0)
                    fail_msg("%s[%zu] of %zu: %a with %s and %u threads, %a with %s and 1 thread", what, j, size,
                             (double)other[j], mu_isa_name((enum mu_isa)isa), kt_pool_threads[i], (double)first[j],
                             mu_isa_name(active));
        }
    }
    assert_int_equal(mu_isa_select(active, NULL), MU_OK);
    free(first);
    free(other);
}
