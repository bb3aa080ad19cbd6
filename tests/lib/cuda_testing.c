#include "tests/lib/cuda_testing.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "common/rng.h"
#ifndef MU_REAL_GPU
#include "cudasim/control.h"
#endif

enum { COPIES_MAX = 64, TEST_WORKSPACE_BYTES = 4 << 20 };

static struct mu_pool *pools[2]; /* fp32, bf16 */
static void *copies[COPIES_MAX];
static uint32_t copy_count;
#ifndef MU_REAL_GPU
static uint64_t order; /* of the order of threads: another one for each case */
#endif

static enum mu_status new_pool(enum mu_dtype dtype, struct mu_error *err, struct mu_pool **ret_pool)
{
    struct mu_cuda *cuda = kt_alloc(1, sizeof *cuda);
    enum mu_status status = mu_cuda_init(cuda, 0, dtype, TEST_WORKSPACE_BYTES, err);
    if (status == MU_OK)
        status = mu_pool_new(1, err, ret_pool);
    if (status == MU_OK)
        mu_pool_bind(*ret_pool, &cuda->base);
    return status;
}

int ct_setup(void **state)
{
    struct mu_error err;
    if (kt_setup(state) != 0)
        return -1;
    for (int dtype = MU_DTYPE_FP32; dtype <= MU_DTYPE_BF16; dtype++)
        if (new_pool((enum mu_dtype)dtype, &err, &pools[dtype]) != MU_OK) {
            print_error("%s\n", err.text);
            return -1;
        }
    return 0;
}

int ct_teardown(void **state)
{
    ct_reset();
    for (int dtype = MU_DTYPE_FP32; dtype <= MU_DTYPE_BF16; dtype++) {
        if (!pools[dtype])
            continue; /* the setup failed */
        struct mu_cuda *cuda = mu_pool_cuda(pools[dtype]);
        mu_pool_free(pools[dtype]);
        mu_cuda_fini(cuda);
        free(cuda);
    }
    return kt_teardown(state);
}

struct mu_pool *ct_pool(void)
{
    return pools[MU_DTYPE_FP32];
}

struct mu_pool *ct_bf16_pool(void)
{
    return pools[MU_DTYPE_BF16];
}

struct mu_pool *ct_cpu(void)
{
    return kt_pool(1);
}

static void *keep(void *copy)
{
    assert_true(copy_count < COPIES_MAX);
    copies[copy_count++] = copy;
    return copy;
}

void *ct_copy(const void *host, size_t size_bytes)
{
    void *copy = NULL;
    assert_int_equal(cudaMalloc(&copy, size_bytes ? size_bytes : 1), cudaSuccess);
    if (host)
        assert_int_equal(cudaMemcpy(copy, host, size_bytes, cudaMemcpyHostToDevice), cudaSuccess);
    return keep(copy);
}

float *ct_floats(const float *host, size_t size)
{
    return ct_copy(host, size * sizeof *host);
}

float *ct_misaligned(const float *host, size_t size, size_t misalign)
{
    float *copy = ct_copy(NULL, (size + misalign) * sizeof *copy);
    assert_int_equal(cudaMemcpy(copy + misalign, host, size * sizeof *host, cudaMemcpyHostToDevice), cudaSuccess);
    return copy + misalign;
}

void ct_reset(void)
{
    for (uint32_t i = 0; i < copy_count; i++)
        assert_int_equal(cudaFree(copies[i]), cudaSuccess);
    copy_count = 0;
#ifndef MU_REAL_GPU
    cudasim_seed(++order);
#endif
}

static void *read_back(const void *device, size_t size_bytes)
{
    void *host = kt_alloc(size_bytes, 1);
    for (int dtype = MU_DTYPE_FP32; dtype <= MU_DTYPE_BF16; dtype++)
        assert_int_equal(mu_cuda_wait(mu_pool_cuda(pools[dtype])), MU_OK);
    assert_int_equal(cudaMemcpy(host, device, size_bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    return host;
}

float *ct_read(const float *device, size_t size)
{
    return read_back(device, size * sizeof *device);
}

void ct_expect_bits(const char *what, const float *device, const float *expected, size_t size)
{
    float *values = ct_read(device, size);
    for (size_t i = 0; i < size; i++)
        if (memcmp(&values[i], &expected[i], sizeof *values) != 0)
            fail_msg("%s[%zu] of %zu: %a on the GPU, %a on the CPU", what, i, size, (double)values[i],
                     (double)expected[i]);
    free(values);
}

void ct_expect_bytes(const char *what, const void *device, const void *expected, size_t size_bytes)
{
    unsigned char *values = read_back(device, size_bytes);
    for (size_t i = 0; i < size_bytes; i++)
        if (values[i] != ((const unsigned char *)expected)[i])
            fail_msg("%s: byte %zu of %zu differs from the CPU's", what, i, size_bytes);
    free(values);
}

float *ct_wild(size_t size, uint64_t seed)
{
    float *values = kt_floats(size, seed, 1.0);
    uint64_t state = seed + 1000;
    for (size_t i = 0; i < size; i++) {
        uint64_t random = mu_splitmix64(&state);
        uint32_t kind = (uint32_t)random & 63, bits = (uint32_t)(87 + (random >> 8) % 80) << 23;
        float power;
        memcpy(&power, &bits, sizeof power);
        if (kind < 4)
            values[i] *= power;
        else if (kind == 4)
            values[i] *= 0x1p-130f;
        else if (kind == 5)
            values[i] = random & 64 ? 0.0f : -0.0f;
    }
    return values;
}
