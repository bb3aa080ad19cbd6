#include "worker/measure.h"

#include <string.h>

#include "common/clock.h"
#include "kernels/arena.h"
#include "kernels/kernels.h"

enum {
    PRODUCT_US = 100000,
    PRODUCT_MOST_US = 1000000, /* larger ones than would take so long are not made */
    GPU_SIZES_UP = 4,          /* products on a GPU are so many times larger: 64 says nothing of it */
    MEMORY_BYTES = 64 << 20,
    ROUNDS = 6,
};

enum mu_status mu_measure_goes_on(const struct mu_measure *m, struct mu_error *err)
{
    if (m->stop && m->stop(m->ctx))
        return mu_fail(err, MU_ERR_CANCELLED, "given up: there is other work");
    if (mu_clock_mono_us() >= m->deadline_us)
        return mu_fail(err, MU_ERR_TIMEOUT, "not done in time");
    return MU_OK;
}

static double seconds_since(uint64_t begun_us)
{
    uint64_t took_us = mu_clock_mono_us() - begun_us;
    return (double)(took_us ? took_us : 1) * 1e-6;
}

static enum mu_status device_failed(const struct mu_measure *m, enum mu_status status, const char *what,
                                    struct mu_error *err)
{
    const char *trouble = mu_device_trouble(mu_pool_device(m->pool));
    if (status == MU_OK)
        return MU_OK;
    return mu_fail(err, status, "%s: %s", what, trouble ? trouble : mu_status_name(status));
}

/* ---- products ---- */

/* The best of as many as fit into PRODUCT_US, two at least. */
static enum mu_status time_product(const struct mu_measure *m, uint32_t n, float *const arrays[3], double *ret_flops)
{
    const struct mu_gemm gemm = {
        .m = n, .n = n, .k = n, .a = arrays[0], .b = arrays[1], .c = arrays[2], .lda = n, .ldb = n, .ldc = n};
    double best = 1e30;
    uint64_t begun_us = mu_clock_mono_us();
    for (uint32_t i = 0; i < 2 || mu_clock_mono_us() - begun_us < PRODUCT_US; i++) {
        uint32_t repeats = n < 256 ? 256 / n * 16 : 1; /* longer than the clock's grain */
        uint64_t from_us = mu_clock_mono_us();
        enum mu_status status = MU_OK;
        for (uint32_t k = 0; k < repeats && status == MU_OK; k++)
            status = mu_kernel_gemm(m->pool, &gemm);
        if (status == MU_OK)
            status = mu_pool_wait(m->pool);
        if (status != MU_OK)
            return status;
        double took_s = seconds_since(from_us) / repeats;
        best = took_s < best ? took_s : best;
    }
    *ret_flops = 2.0 * n * n * n / best;
    return MU_OK;
}

static uint32_t size_of(const struct mu_measure *m, int i)
{
    uint32_t first =
        mu_device_is_host(mu_pool_device(m->pool)) ? MU_PROBE_SIZE_FIRST : MU_PROBE_SIZE_FIRST * GPU_SIZES_UP;
    return first << i;
}

/* As fast as the one before. */
static bool is_short(const struct mu_measure *m, int i, const struct mu_probe_alone *out)
{
    double n = size_of(m, i);
    return i == 0 || 2 * n * n * n / out->flops[i - 1] * 1e6 < PRODUCT_MOST_US;
}

static enum mu_status measure_products(const struct mu_measure *m, struct mu_probe_alone *out, struct mu_error *err)
{
    struct mu_device *device = mu_pool_device(m->pool);
    size_t most = size_of(m, MU_PROBE_SIZES - 1), bytes = most * most * sizeof(float);
    struct mu_arena *arena = NULL;
    float *arrays[3];
    enum mu_status status =
        mu_arena_new_on(device, MU_MEMORY_DEVICE, 3 * mu_arena_piece_bytes(bytes), err, &arena); /* zeros */
    for (int i = 0; arena && i < 3; i++)
        arrays[i] = mu_arena_take(arena, bytes);
    float row[1 << 10]; /* zeros would be no work for some devices */
    for (size_t i = 0; i < sizeof row / sizeof row[0]; i++)
        row[i] = (float)(i % 17) - 8;
    for (size_t at = 0; status == MU_OK && at < 2 * bytes; at += sizeof row)
        status = device_failed(m, mu_device_copy(device, (char *)arrays[at >= bytes] + at % bytes, row, sizeof row),
                               "products", err);
    for (int i = 0; i < MU_PROBE_SIZES && status == MU_OK && is_short(m, i, out); i++) {
        status = mu_measure_goes_on(m, err);
        if (status == MU_OK)
            status = device_failed(m, time_product(m, size_of(m, i), arrays, &out->flops[i]), "products", err);
    }
    mu_arena_free(arena);
    return status;
}

/* ---- memory ---- */

/* The best of several copies; the first one also gets the pages. */
static enum mu_status time_copies(const struct mu_measure *m, void *to, void *from, double *ret_rate,
                                  struct mu_error *err)
{
    struct mu_device *device = mu_pool_device(m->pool);
    enum mu_status status = MU_OK;
    for (int i = 0; i < ROUNDS && status == MU_OK; i++) {
        if (mu_device_is_host(device))
            memset(from, i, MEMORY_BYTES);
        uint64_t begun_us = mu_clock_mono_us();
        status = mu_device_copy(device, to, from, MEMORY_BYTES);
        if (status == MU_OK)
            status = mu_pool_wait(m->pool);
        double rate = MEMORY_BYTES / seconds_since(begun_us);
        *ret_rate = i > 0 && rate > *ret_rate ? rate : *ret_rate;
    }
    return device_failed(m, status, "memory", err);
}

static enum mu_status measure_memory(const struct mu_measure *m, struct mu_probe_alone *out, struct mu_error *err)
{
    struct mu_device *device = mu_pool_device(m->pool);
    uint64_t free_bytes, total_bytes;
    struct mu_arena *own = NULL, *pinned = NULL;
    mu_device_memory(device, &free_bytes, &total_bytes);
    out->memory_bytes = (double)total_bytes;
    enum mu_status status = mu_arena_new_on(device, MU_MEMORY_DEVICE, 2 * (size_t)MEMORY_BYTES, err, &own);
    char *from = own ? mu_arena_take(own, MEMORY_BYTES) : NULL, *to = own ? mu_arena_take(own, MEMORY_BYTES) : NULL;
    if (status == MU_OK)
        status = time_copies(m, to, from, &out->memory_rate, err);
    out->memory_rate *= 2; /* each byte is read and written */
    if (status == MU_OK && !mu_device_is_host(device))
        status = mu_arena_new_on(device, MU_MEMORY_PINNED, MEMORY_BYTES, err, &pinned);
    char *host = pinned ? mu_arena_take(pinned, MEMORY_BYTES) : NULL;
    if (host && status == MU_OK)
        status = time_copies(m, host, from, &out->to_host_rate, err);
    if (host && status == MU_OK)
        status = time_copies(m, to, host, &out->to_device_rate, err);
    mu_arena_free(pinned);
    mu_arena_free(own);
    return status;
}

enum mu_status mu_measure_device(const struct mu_measure *m, struct mu_probe_alone *out, struct mu_error *err)
{
    enum mu_status status = measure_products(m, out, err);
    if (status == MU_OK)
        status = mu_measure_goes_on(m, err);
    return status == MU_OK ? measure_memory(m, out, err) : status;
}
