/* What CUDA's device code is written in, for a C++ compiler. Every CUDA thread is a fiber; the threads of a block share
 * one thread of the operating system, so `static thread_local` is exactly one copy of a __shared__ variable for each
 * block in flight. Atomic operations do not exist on purpose: they would make results depend on the order of threads.
 */
#ifndef CUDASIM_DEVICE_H
#define CUDASIM_DEVICE_H

#include "../cuda_runtime_api.h"

extern "C++" {

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __constant__    static const
#define __shared__      static thread_local
#define __forceinline__ inline
#define __restrict__ __restrict
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __grid_constant__

/* ---- vectors ---- */

#define CUDASIM_VECTORS(type, name, align2, align4)                                                                    \
    struct name##1                                                                                                     \
    {                                                                                                                  \
        type x;                                                                                                        \
    };                                                                                                                 \
    struct alignas(align2) name##2                                                                                     \
    {                                                                                                                  \
        type x, y;                                                                                                     \
    };                                                                                                                 \
    struct name##3                                                                                                     \
    {                                                                                                                  \
        type x, y, z;                                                                                                  \
    };                                                                                                                 \
    struct alignas(align4) name##4                                                                                     \
    {                                                                                                                  \
        type x, y, z, w;                                                                                               \
    };                                                                                                                 \
    static inline name##2 make_##name##2(type x, type y)                                                               \
    {                                                                                                                  \
        return {x, y};                                                                                                 \
    }                                                                                                                  \
    static inline name##3 make_##name##3(type x, type y, type z)                                                       \
    {                                                                                                                  \
        return {x, y, z};                                                                                              \
    }                                                                                                                  \
    static inline name##4 make_##name##4(type x, type y, type z, type w)                                               \
    {                                                                                                                  \
        return {x, y, z, w};                                                                                           \
    }

CUDASIM_VECTORS(signed char, char, 2, 4)
CUDASIM_VECTORS(unsigned char, uchar, 2, 4)
CUDASIM_VECTORS(short, short, 4, 8)
CUDASIM_VECTORS(unsigned short, ushort, 4, 8)
CUDASIM_VECTORS(int, int, 8, 16)
CUDASIM_VECTORS(unsigned int, uint, 8, 16)
CUDASIM_VECTORS(long long, longlong, 16, 16)
CUDASIM_VECTORS(unsigned long long, ulonglong, 16, 16)
CUDASIM_VECTORS(float, float, 8, 16)
CUDASIM_VECTORS(double, double, 16, 16)

struct dim3 {
    unsigned int x, y, z;
    constexpr dim3(unsigned int x_ = 1, unsigned int y_ = 1, unsigned int z_ = 1) : x(x_), y(y_), z(z_) {}
};

/* ---- the thread that runs ---- */

/* What device code can see of its place; the emulator keeps one per fiber. */
struct cudasim_place {
    uint3 thread, block;
    dim3 block_size, grid_size;
    unsigned int lane;
};
extern __thread struct cudasim_place *cudasim_here;

#define threadIdx (cudasim_here->thread)
#define blockIdx  (cudasim_here->block)
#define blockDim  (cudasim_here->block_size)
#define gridDim   (cudasim_here->grid_size)
static constexpr int warpSize = 32;

/* ---- barriers and warps ---- */

enum cudasim_combine { CUDASIM_COUNT, CUDASIM_AND, CUDASIM_OR };
enum cudasim_exchange { CUDASIM_SYNC, CUDASIM_SHFL, CUDASIM_BALLOT };

extern "C" {
void *cudasim_dynamic_shared(void);
/* Waits for all threads of the block; the number of threads with a predicate. */
int cudasim_block_barrier(int predicate);
/* Waits for the lanes of `mask`, then takes `size` bytes (at most 16) that lane `source` brought. */
void cudasim_warp_exchange(enum cudasim_exchange kind, unsigned int mask, unsigned int source, const void *mine,
                           size_t size, void *ret);
/* A bit for each lane of the mask that brought a predicate. */
unsigned int cudasim_warp_ballot(unsigned int mask, int predicate);
[[noreturn]] void cudasim_trap(const char *why);
}

static inline void __syncthreads(void)
{
    cudasim_block_barrier(0);
}
static inline int __syncthreads_count(int predicate)
{
    return cudasim_block_barrier(predicate != 0);
}
static inline int __syncthreads_or(int predicate)
{
    return cudasim_block_barrier(predicate != 0) != 0;
}
static inline int __syncthreads_and(int predicate)
{
    return cudasim_block_barrier(predicate == 0) == 0;
}
static inline void __syncwarp(unsigned int mask = 0xffffffffu)
{
    cudasim_warp_exchange(CUDASIM_SYNC, mask, cudasim_here->lane, nullptr, 0, nullptr);
}
static inline unsigned int __ballot_sync(unsigned int mask, int predicate)
{
    return cudasim_warp_ballot(mask, predicate);
}
static inline int __any_sync(unsigned int mask, int predicate)
{
    return cudasim_warp_ballot(mask, predicate) != 0;
}
static inline int __all_sync(unsigned int mask, int predicate)
{
    return cudasim_warp_ballot(mask, !predicate) == 0;
}

namespace cudasim
{
template <typename T> T shuffle(unsigned int mask, T mine, unsigned int source)
{
    static_assert(sizeof(T) <= 16 && std::is_trivially_copyable<T>::value, "shuffles move up to 16 bytes");
    T theirs;
    cudasim_warp_exchange(CUDASIM_SHFL, mask, source, &mine, sizeof mine, &theirs);
    return theirs;
}
} // namespace cudasim

/* The source lane lies in the caller's group of `width` lanes; outside of it a thread gets its own value. */
template <typename T> static inline T __shfl_sync(unsigned int mask, T mine, int source, int width = 32)
{
    const unsigned int lane = cudasim_here->lane, w = (unsigned int)width;
    return cudasim::shuffle(mask, mine, lane / w * w + (unsigned int)source % w);
}
template <typename T> static inline T __shfl_xor_sync(unsigned int mask, T mine, int bits, int width = 32)
{
    const unsigned int lane = cudasim_here->lane, w = (unsigned int)width, source = lane ^ (unsigned int)bits;
    return cudasim::shuffle(mask, mine, source / w <= lane / w ? source : lane);
}
template <typename T> static inline T __shfl_down_sync(unsigned int mask, T mine, unsigned int by, int width = 32)
{
    const unsigned int lane = cudasim_here->lane, w = (unsigned int)width;
    return cudasim::shuffle(mask, mine, lane % w + by < w ? lane + by : lane);
}
template <typename T> static inline T __shfl_up_sync(unsigned int mask, T mine, unsigned int by, int width = 32)
{
    const unsigned int lane = cudasim_here->lane, w = (unsigned int)width;
    return cudasim::shuffle(mask, mine, lane % w >= by ? lane - by : lane);
}

static inline void __threadfence(void) {}
static inline void __threadfence_block(void) {}
static inline void __trap(void)
{
    cudasim_trap("__trap()");
}
static inline long long clock64(void)
{
    return 0;
}

template <typename T> struct cudasim_no_atomics : std::false_type {
};
#define CUDASIM_NO_ATOMIC(name)                                                                                        \
    template <typename T, typename... A> T name(T *, A...)                                                             \
    {                                                                                                                  \
        static_assert(cudasim_no_atomics<T>::value, #name ": results must not depend on the order of threads");        \
    }
CUDASIM_NO_ATOMIC(atomicAdd)
CUDASIM_NO_ATOMIC(atomicSub)
CUDASIM_NO_ATOMIC(atomicExch)
CUDASIM_NO_ATOMIC(atomicMin)
CUDASIM_NO_ATOMIC(atomicMax)
CUDASIM_NO_ATOMIC(atomicInc)
CUDASIM_NO_ATOMIC(atomicDec)
CUDASIM_NO_ATOMIC(atomicCAS)
CUDASIM_NO_ATOMIC(atomicAnd)
CUDASIM_NO_ATOMIC(atomicOr)
CUDASIM_NO_ATOMIC(atomicXor)

/* ---- loads and stores with hints ---- */

#define CUDASIM_LOAD(name)                                                                                             \
    template <typename T> static inline T name(const T *from)                                                          \
    {                                                                                                                  \
        return *from;                                                                                                  \
    }
#define CUDASIM_STORE(name)                                                                                            \
    template <typename T> static inline void name(T *to, T value)                                                      \
    {                                                                                                                  \
        *to = value;                                                                                                   \
    }
CUDASIM_LOAD(__ldg)
CUDASIM_LOAD(__ldcs)
CUDASIM_LOAD(__ldcg)
CUDASIM_LOAD(__ldca)
CUDASIM_LOAD(__ldlu)
CUDASIM_LOAD(__ldcv)
CUDASIM_STORE(__stcs)
CUDASIM_STORE(__stcg)
CUDASIM_STORE(__stwb)
CUDASIM_STORE(__stwt)

/* ---- arithmetic ---- */

namespace cudasim
{
template <typename To, typename From> To bits_of(From from)
{
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
} // namespace cudasim

static inline float __uint_as_float(unsigned int x)
{
    return cudasim::bits_of<float>(x);
}
static inline unsigned int __float_as_uint(float x)
{
    return cudasim::bits_of<unsigned int>(x);
}
static inline float __int_as_float(int x)
{
    return cudasim::bits_of<float>(x);
}
static inline int __float_as_int(float x)
{
    return cudasim::bits_of<int>(x);
}
static inline double __longlong_as_double(long long x)
{
    return cudasim::bits_of<double>(x);
}
static inline long long __double_as_longlong(double x)
{
    return cudasim::bits_of<long long>(x);
}
static inline float __fmaf_rn(float x, float y, float z)
{
    return fmaf(x, y, z);
}
static inline float __fadd_rn(float x, float y)
{
    return x + y;
}
static inline float __fsub_rn(float x, float y)
{
    return x - y;
}
static inline float __fmul_rn(float x, float y)
{
    return x * y;
}
static inline float __fdiv_rn(float x, float y)
{
    return x / y;
}
static inline float __fsqrt_rn(float x)
{
    return sqrtf(x);
}
static inline float __frcp_rn(float x)
{
    return 1.0f / x;
}
static inline double __fma_rn(double x, double y, double z)
{
    return fma(x, y, z);
}
static inline double __dadd_rn(double x, double y)
{
    return x + y;
}
static inline double __dmul_rn(double x, double y)
{
    return x * y;
}
static inline double __ddiv_rn(double x, double y)
{
    return x / y;
}
static inline double __dsqrt_rn(double x)
{
    return sqrt(x);
}
static inline int __float2int_rn(float x)
{
    return (int)lrintf(x);
}
static inline float __int2float_rn(int x)
{
    return (float)x;
}
static inline float __double2float_rn(double x)
{
    return (float)x;
}
static inline unsigned int __umulhi(unsigned int x, unsigned int y)
{
    return (unsigned int)((unsigned long long)x * y >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y)
{
    return (unsigned long long)((unsigned __int128)x * y >> 64);
}
static inline int __popc(unsigned int x)
{
    return __builtin_popcount(x);
}
static inline int __popcll(unsigned long long x)
{
    return __builtin_popcountll(x);
}
static inline int __clz(int x)
{
    return x ? __builtin_clz((unsigned int)x) : 32;
}
static inline int __clzll(long long x)
{
    return x ? __builtin_clzll((unsigned long long)x) : 64;
}
static inline int __ffs(int x)
{
    return __builtin_ffs(x);
}
static inline unsigned int __brev(unsigned int x)
{
    unsigned int reversed = 0;
    for (int bit = 0; bit < 32; bit++)
        reversed |= (x >> bit & 1u) << (31 - bit);
    return reversed;
}
static inline size_t __cvta_generic_to_shared(const void *pointer)
{
    return (size_t)pointer;
}
#define CUDASIM_MIN_MAX(type)                                                                                          \
    static inline type min(type x, type y)                                                                             \
    {                                                                                                                  \
        return x < y ? x : y;                                                                                          \
    }                                                                                                                  \
    static inline type max(type x, type y)                                                                             \
    {                                                                                                                  \
        return x > y ? x : y;                                                                                          \
    }
CUDASIM_MIN_MAX(int)
CUDASIM_MIN_MAX(unsigned int)
CUDASIM_MIN_MAX(long)
CUDASIM_MIN_MAX(unsigned long)
CUDASIM_MIN_MAX(long long)
CUDASIM_MIN_MAX(unsigned long long)
#undef CUDASIM_MIN_MAX
static inline float min(float x, float y)
{
    return fminf(x, y);
}
static inline float max(float x, float y)
{
    return fmaxf(x, y);
}

/* ---- launches ---- */

namespace cudasim
{
/* Where a kernel was launched, for messages. */
struct launch_site {
    const char *kernel, *file;
    int line;
};
cudaError_t launch_body(const launch_site &site, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                        const void *kernel, std::function<void()> body);

/* Arguments are converted and copied at the launch, and again for every thread, as CUDA does. */
template <typename... P, typename... A>
void launch(const launch_site &site, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
            void (*kernel)(P...), A &&...arguments)
{
    static_assert(sizeof...(P) == sizeof...(A), "a kernel gets all of its arguments");
    std::tuple<P...> copy(static_cast<P>(arguments)...);
    (void)launch_body(site, grid, block, shared_bytes, stream, reinterpret_cast<const void *>(kernel),
                      [kernel, copy] { std::apply(kernel, copy); });
}
} // namespace cudasim

/* ---- the C interface with C++'s conveniences, as in CUDA's own header ---- */

template <typename T> static inline cudaError_t cudaMalloc(T **pointer, size_t size)
{
    return ::cudaMalloc(reinterpret_cast<void **>(pointer), size);
}
template <typename T> static inline cudaError_t cudaMallocHost(T **pointer, size_t size, unsigned int flags = 0)
{
    return ::cudaHostAlloc(reinterpret_cast<void **>(pointer), size, flags);
}
template <typename T> static inline cudaError_t cudaHostAlloc(T **pointer, size_t size, unsigned int flags)
{
    return ::cudaHostAlloc(reinterpret_cast<void **>(pointer), size, flags);
}
template <typename R, typename... P>
static inline cudaError_t cudaFuncSetAttribute(R (*kernel)(P...), cudaFuncAttribute attribute, int value)
{
    return ::cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), attribute, value);
}
template <typename R, typename... P>
static inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, R (*kernel)(P...))
{
    return ::cudaFuncGetAttributes(attributes, reinterpret_cast<const void *>(kernel));
}
template <typename R, typename... P>
static inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, R (*kernel)(P...), int threads,
                                                                        size_t shared_bytes)
{
    return ::cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, reinterpret_cast<const void *>(kernel), threads,
                                                           shared_bytes);
}

} /* extern "C++" */

#endif
