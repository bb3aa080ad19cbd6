/* Kernels as objects, and their launches. */
#include "tests/cudasim/runtime.h"

#include <algorithm>
#include <memory>
#include <unordered_map>

namespace cudasim
{

static std::mutex attributes_lock;
static std::unordered_map<const void *, size_t> &dynamic_shared_limits()
{
    static auto *limits = new std::unordered_map<const void *, size_t>;
    return *limits;
}

static size_t dynamic_shared_limit(const void *kernel)
{
    std::lock_guard<std::mutex> hold(attributes_lock);
    auto found = dynamic_shared_limits().find(kernel);
    return found == dynamic_shared_limits().end() ? 48 << 10 : found->second;
}

static cudaError_t check(const kernel_launch &l, const void *kernel)
{
    const uint64_t threads = static_cast<uint64_t>(l.block.x) * l.block.y * l.block.z;
    if (!kernel)
        return cudaErrorInvalidDeviceFunction;
    if (threads == 0 || threads > BLOCK_THREADS_MAX || l.block.z > 64 || l.grid.x == 0 || l.grid.y == 0 ||
        l.grid.z == 0 || l.grid.x > 0x7fffffff || l.grid.y > 65535 || l.grid.z > 65535)
        return cudaErrorInvalidConfiguration;
    return l.shared_bytes > dynamic_shared_limit(kernel) ? cudaErrorInvalidValue : cudaSuccess;
}

cudaError_t launch_body(const launch_site &site, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                        const void *kernel, std::function<void()> body)
{
    if (const cudaError_t error = enter("cudaLaunchKernel", cudaErrorLaunchOutOfResources))
        return error;
    auto launch = std::make_shared<kernel_launch>(kernel_launch{site, grid, block, shared_bytes, std::move(body)});
    if (const cudaError_t error = check(*launch, kernel))
        return leave(error);
    const uint64_t seed = draw_seed();
    return leave(enqueue(stream, [launch, seed] {
        if (const int code = injected("kernel", cudaErrorIllegalAddress))
            return static_cast<cudaError_t>(code);
        engine_run(*launch, seed);
        return cudaSuccess;
    }));
}

} // namespace cudasim

using namespace cudasim;

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value)
{
    struct cudaDeviceProp p;
    if (const cudaError_t error = enter("cudaFuncSetAttribute"))
        return error;
    if (const cudaError_t error = cudaGetDeviceProperties(&p, device_here().index))
        return error;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize)
        return cudaSuccess;
    if (value < 0 || static_cast<size_t>(value) > p.sharedMemPerBlockOptin)
        return leave(cudaErrorInvalidValue);
    std::lock_guard<std::mutex> hold(attributes_lock);
    dynamic_shared_limits()[kernel] = static_cast<size_t>(value);
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel)
{
    const int version = device_here().major * 10 + device_here().minor;
    if (const int code = injected("cudaFuncGetAttributes", cudaErrorInvalidDeviceFunction))
        return leave(static_cast<cudaError_t>(code));
    if (device_here().major < 8) /* older than what the product is built for */
        return leave(cudaErrorNoKernelImageForDevice);
    *attributes = {0, 0, 0, BLOCK_THREADS_MAX, 64, version, version, 0, static_cast<int>(dynamic_shared_limit(kernel))};
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *, int threads, size_t shared_bytes)
{
    struct cudaDeviceProp p;
    if (const cudaError_t error = cudaGetDeviceProperties(&p, device_here().index))
        return error;
    const size_t by_shared = p.sharedMemPerMultiprocessor / (shared_bytes + 1024);
    const size_t by_threads = static_cast<size_t>(p.maxThreadsPerMultiProcessor / std::max(threads, 1));
    *blocks = static_cast<int>(std::min(by_shared, by_threads));
    return cudaSuccess;
}
