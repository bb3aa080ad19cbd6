/* What the .cu files of this folder share: one lane for kernels/elementary.h, folds of the sixteen virtual lanes,
 * dropout factors, and the launch of kernels with their errors. Private to kernels/cuda.
 *
 * The exact kernels are compiled with -fmad=false (nothing is contracted; denormals, division and square root are IEEE
 * by default), so a + b * c is what it says; fused operations are written fmaf. Row kernels give sixteen neighbouring
 * threads to a row, one to each virtual lane of the definition: a warp reads two whole 64-byte segments at a time,
 * whatever the alignment of a row. */
#ifndef MU_KERNELS_CUDA_DEVICE_H
#define MU_KERNELS_CUDA_DEVICE_H

#include <cuda_runtime.h>

#include "common/gpu_mutant.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ops.h"

#define MU_INLINE static __device__ __forceinline__

typedef float vf;
typedef uint32_t vi;
typedef bool vm;

MU_INLINE vf v_zero()
{
    return 0.0f;
}
MU_INLINE vf v_set1(float x)
{
    return x;
}
MU_INLINE vf v_add(vf x, vf y)
{
    return x + y;
}
MU_INLINE vf v_sub(vf x, vf y)
{
    return x - y;
}
MU_INLINE vf v_mul(vf x, vf y)
{
    return x * y;
}
MU_INLINE vf v_div(vf x, vf y)
{
    return x / y;
}
MU_INLINE vf v_sqrt(vf x)
{
    return sqrtf(x);
}
MU_INLINE vf v_fma(vf x, vf y, vf z)
{
    return fmaf(x, y, z);
}
MU_INLINE vf v_fnma(vf x, vf y, vf z)
{
    return fmaf(-x, y, z);
}
MU_INLINE vm v_lt(vf x, vf y)
{
    return x < y;
}
MU_INLINE vf v_select(vm m, vf x, vf y)
{
    return m ? x : y;
}
MU_INLINE vf v_max(vf x, vf y)
{
    return x > y ? x : y;
}
MU_INLINE vf v_min(vf x, vf y)
{
    return x < y ? x : y;
}
MU_INLINE vi v_bits(vf x)
{
    return __float_as_uint(x);
}
MU_INLINE vf vi_float(vi x)
{
    return __uint_as_float(x);
}
MU_INLINE vf vi_convert(vi x)
{
    return (float)(int32_t)x;
}
MU_INLINE vi vi_set1(uint32_t x)
{
    return x;
}
MU_INLINE vi vi_add(vi x, vi y)
{
    return x + y;
}
MU_INLINE vi vi_sub(vi x, vi y)
{
    return x - y;
}
MU_INLINE vi vi_xor(vi x, vi y)
{
    return x ^ y;
}
MU_INLINE vi vi_and(vi x, vi y)
{
    return x & y;
}
MU_INLINE vi vi_shl(vi x, uint32_t n)
{
    return x << n;
}
MU_INLINE vi vi_shr(vi x, uint32_t n)
{
    return x >> n;
}
MU_INLINE vm vi_equal(vi x, vi y)
{
    return x == y;
}
MU_INLINE void vi_multiply(vi x, vi y, vi *high, vi *low)
{
    *high = __umulhi(x, y);
    *low = x * y;
}

#include "kernels/elementary.h"

MU_INLINE uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

enum {
    LANES = 16, /* virtual lanes of a row reduction */
    WARP = 32,
    DROPOUT_FEATURES = 4 * LANES, /* features that the four words of one lane's counter serve */
};

/* ---- the fixed fold: i + (i + 8), then 4, 2, 1; all sixteen threads get the result ---- */

MU_INLINE float fold_sum(float x)
{
    for (int half = LANES / 2; half > 0; half /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, half, LANES);
    return x;
}
MU_INLINE double fold_sum(double x)
{
    for (int half = LANES / 2; half > 0; half /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, half, LANES);
    return x;
}
/* Which of two zeros comes out may differ from the CPU's; no result depends on it. */
MU_INLINE float fold_max(float x)
{
    for (int half = LANES / 2; half > 0; half /= 2)
        x = v_max(x, __shfl_xor_sync(0xffffffffu, x, half, LANES));
    return x;
}

/* ---- dropout ---- */

/* A dropout site as a kernel argument; threshold 0: nothing is dropped. */
struct site {
    uint32_t key[2], threshold;
    float scale;
    const uint64_t *samples;
};

static inline struct site site_of(const struct mu_dropout *drop)
{
    struct site site = {{0, 0}, 0, 1.0f, NULL};
    if (drop && drop->threshold)
        site = {{drop->key[0], drop->key[1]}, drop->threshold, drop->scale, drop->samples};
    return site;
}

/* Random numbers of the features 64 g + 16 w + lane, w = 0 .. 3, of a token: group g of one lane. */
struct random4 {
    uint32_t word[4];
};

MU_INLINE struct random4 site_random(const struct site &site, uint32_t sequence, uint32_t token, uint32_t group,
                                     uint32_t lane)
{
    struct random4 random;
    uint64_t sample = site.samples[sequence];
    v_philox(site.key, group * LANES + lane, token, (uint32_t)sample, (uint32_t)(sample >> 32), random.word);
    return random;
}

MU_INLINE float site_factor(const struct site &site, uint32_t random)
{
    return random < site.threshold ? 0.0f : site.scale;
}

/* ---- launches ---- */

static inline uint32_t div_up(size_t a, size_t b)
{
    size_t result = (a + b - 1) / b;
    MU_ASSERT(result <= UINT32_MAX / 2);
    return (uint32_t)result;
}

/* What became of the launches of `what` since the last call. */
static inline enum mu_status launched(struct mu_cuda *cuda, const char *what)
{
    cudaError_t error = cudaGetLastError();
    if (error == cudaSuccess)
        return MU_OK;
    return mu_fail(cuda->error.status == MU_OK ? &cuda->error : NULL, MU_ERR_IO, "GPU %d, %s: %s", cuda->device, what,
                   cudaGetErrorString(error));
}

/* Whether the workspace has room for what `what` needs of it at once. */
static inline enum mu_status need_workspace(struct mu_cuda *cuda, const char *what, size_t bytes)
{
    if (bytes <= cuda->workspace_bytes)
        return MU_OK;
    return mu_fail(cuda->error.status == MU_OK ? &cuda->error : NULL, MU_ERR_LIMIT,
                   "GPU %d, %s: %zu MiB of workspace are needed, %zu MiB are there: use smaller micro-batches",
                   cuda->device, what, (bytes >> 20) + 1, cuda->workspace_bytes >> 20);
}

/* More than 48 KiB of dynamic shared memory must be asked for. */
template <typename kernel_fn> static inline void allow_shared(kernel_fn *kernel, size_t bytes)
{
    if (bytes > 48 << 10)
        (void)cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
}

/* Whether 16-byte accesses are possible at this address and with rows this far apart. */
static inline bool aligned16(const void *p, size_t stride_floats)
{
    return (uintptr_t)p % 16 == 0 && stride_floats % 4 == 0;
}

#endif
