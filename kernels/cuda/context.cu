/* A GPU and what a pool needs of it: stream, workspace, library handle. Errors of the runtime become words here. */
#include "kernels/cuda/device.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/cuda/memory.h"
#include "kernels/cuda/plan.h"
extern "C" {
#include "kernels/identity.h"
}

enum { WATCH_LOOKS = 64, WATCH_NAP_NS = 20000 }; /* a wait with a watch: looks before it sleeps, and how long */

static enum mu_status failed(struct mu_error *err, int device, const char *what, cudaError_t error)
{
    return mu_fail(err, error == cudaErrorMemoryAllocation ? MU_ERR_NO_MEMORY : MU_ERR_UNAVAILABLE, "GPU %d: %s: %s",
                   device, what, cudaGetErrorString(error));
}

static enum mu_status take_memory(struct mu_cuda *cuda, struct mu_error *err)
{
    cudaError_t error = cudaMalloc(&cuda->workspace, cuda->workspace_bytes);
    if (error != cudaSuccess) {
        size_t free_bytes = 0, total_bytes = 0;
        (void)cudaMemGetInfo(&free_bytes, &total_bytes);
        return mu_fail(err, MU_ERR_NO_MEMORY,
                       "GPU %d: %zu MiB for the kernels' workspace: %s; %zu of %zu MiB are free: does another program "
                       "use it?",
                       cuda->device, cuda->workspace_bytes >> 20, cudaGetErrorString(error), free_bytes >> 20,
                       total_bytes >> 20);
    }
    error = cudaHostAlloc(&cuda->pinned, MU_CUDA_PINNED_BYTES, cudaHostAllocMapped);
    if (error == cudaSuccess)
        error = cudaHostAlloc(&cuda->view, MU_DEVICE_READ_MAX, cudaHostAllocDefault);
    if (error != cudaSuccess)
        return mu_fail(
            err, error == cudaErrorMemoryAllocation ? MU_ERR_NO_MEMORY : MU_ERR_UNAVAILABLE,
            "GPU %d: %d MiB of pinned host memory: %s; free memory of the host, or raise its limit of locked "
            "memory (ulimit -l)",
            cuda->device, (MU_CUDA_PINNED_BYTES + MU_DEVICE_READ_MAX) >> 20, cudaGetErrorString(error));
    return MU_OK;
}

/* Exchanges have few blocks and others wait for them: theirs go first where the GPU has a choice. */
static cudaError_t make_tracks(struct mu_cuda *cuda)
{
    int least = 0, greatest = 0;
    cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    for (int i = 0; i < MU_TRACKS && error == cudaSuccess; i++)
        error = cudaStreamCreateWithPriority(&cuda->tracks[i], cudaStreamNonBlocking,
                                             i == MU_TRACK_MAIN ? least : greatest);
    cuda->stream = cuda->tracks[MU_TRACK_MAIN];
    return error;
}

enum mu_status mu_cuda_init(struct mu_cuda *cuda, int device, enum mu_dtype dtype, size_t workspace_bytes,
                            struct mu_error *err)
{
    struct mu_cuda empty = {};
    int multiprocessors = 0, shared_bytes = 0;
    enum mu_status status = MU_OK;
    *cuda = empty;
    cuda->device = device;
    cuda->workspace_bytes = workspace_bytes ? workspace_bytes : (size_t)MU_CUDA_WORKSPACE_BYTES;
    cudaError_t error = cudaSetDevice(device);
    if (error != cudaSuccess)
        return failed(err, device, "cannot be used", error);
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error == cudaSuccess)
        error = make_tracks(cuda);
    if (error != cudaSuccess) {
        status = failed(err, device, "stream", error);
        mu_cuda_fini(cuda);
        return status;
    }
    cuda->multiprocessors = (uint32_t)multiprocessors;
    cuda->base.bf16 = true; /* there is no code for older GPUs, which cannot */
    cuda->shared_bytes_max = (uint32_t)shared_bytes;
    error = mu_cuda_memory_init(cuda);
    status = error == cudaSuccess ? take_memory(cuda, err) : failed(err, device, "memory", error);
    if (status == MU_OK)
        status = mu_cuda_compute(&cuda->base, dtype, err);
    if (status != MU_OK)
        mu_cuda_fini(cuda);
    return status;
}

enum mu_status mu_cuda_compute(struct mu_device *device, enum mu_dtype dtype, struct mu_error *err)
{
    struct mu_cuda *cuda = (struct mu_cuda *)device;
    enum mu_status status = dtype == MU_DTYPE_BF16 && !cuda->blas ? mu_cuda_plans_init(cuda, err) : MU_OK;
    if (status != MU_OK)
        return status;
    mu_cuda_forget(device);
    cuda->dtype = dtype;
    cuda->base.kernels = dtype == MU_DTYPE_BF16 ? &mu_cuda_bf16_ops : &mu_cuda_ops;
    return MU_OK;
}

void mu_cuda_fini(struct mu_cuda *cuda)
{
    struct mu_cuda empty = {};
    mu_cuda_recordings_fini(cuda);
    mu_cuda_plans_fini(cuda);
    mu_cuda_memory_fini(cuda);
    if (cuda->pinned)
        (void)cudaFreeHost(cuda->pinned);
    if (cuda->workspace)
        (void)cudaFree(cuda->workspace);
    for (int i = 0; i < MU_TRACKS; i++)
        if (cuda->tracks[i])
            (void)cudaStreamDestroy(cuda->tracks[i]);
    *cuda = empty;
}

/* cudaErrorNotReady would be reported by the next launch. */
static cudaError_t not_ready(const struct mu_cuda *cuda, uint32_t *looks, cudaError_t state)
{
    const struct timespec nap = {0, WATCH_NAP_NS};
    if (state != cudaErrorNotReady)
        return state;
    (void)cudaGetLastError();
    cuda->base.watch(cuda->base.watch_ctx);
    if (++*looks > WATCH_LOOKS)
        nanosleep(&nap, NULL);
    return state;
}

cudaError_t mu_cuda_await_stream(const struct mu_cuda *cuda, cudaStream_t stream)
{
    uint32_t looks = 0;
    cudaError_t state;
    if (!cuda->base.watch)
        return cudaStreamSynchronize(stream);
    while ((state = not_ready(cuda, &looks, cudaStreamQuery(stream))) == cudaErrorNotReady)
        ;
    return state;
}

cudaError_t mu_cuda_await_event(const struct mu_cuda *cuda, cudaEvent_t event)
{
    uint32_t looks = 0;
    cudaError_t state;
    if (!cuda->base.watch)
        return cudaEventSynchronize(event);
    while ((state = not_ready(cuda, &looks, cudaEventQuery(event))) == cudaErrorNotReady)
        ;
    return state;
}

enum mu_status mu_cuda_wait(struct mu_cuda *cuda)
{
    cudaError_t error = mu_cuda_await_stream(cuda, cuda->stream);
    if (error == cudaSuccess)
        return MU_OK;
    return mu_fail(cuda->error.status == MU_OK ? &cuda->error : NULL, MU_ERR_IO, "GPU %d failed: %s", cuda->device,
                   cudaGetErrorString(error));
}

/* ---- is it fit? ---- */

static enum mu_status unfit(struct mu_error *err, uint32_t index, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static enum mu_status unfit(struct mu_error *err, uint32_t index, const char *fmt, ...)
{
    char text[256];
    va_list list;
    va_start(list, fmt);
    (void)vsnprintf(text, sizeof text, fmt, list);
    va_end(list);
    return mu_fail(err, MU_ERR_UNAVAILABLE, "device cuda:%u: %s", index, text);
}

/* The driver, and whether there is such a GPU. */
static enum mu_status check_driver(uint32_t index, struct mu_error *err)
{
    int version = 0, count = 0;
    cudaError_t error = cudaDriverGetVersion(&version);
    if (error != cudaSuccess || version == 0)
        return unfit(err, index, "no NVIDIA driver is loaded on this host; install one, or use cpu");
    if (version / 1000 < CUDART_VERSION / 1000)
        return unfit(err, index,
                     "the driver of this host knows CUDA up to %d.%d, this program needs %d.%d; update the driver",
                     version / 1000, version % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    error = cudaGetDeviceCount(&count);
    if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0))
        return unfit(err, index, "the driver shows no GPU (CUDA_VISIBLE_DEVICES hides all when it is empty)");
    if (error != cudaSuccess)
        return unfit(err, index, "the driver does not work: %s", cudaGetErrorString(error));
    if (index >= (uint32_t)count)
        return unfit(err, index, "not there; the GPUs of this host are cuda:0 to cuda:%d", count - 1);
    return MU_OK;
}

__global__ void probe_kernel() {}

/* Whether this build has code for the GPU. */
static enum mu_status check_architecture(uint32_t index, struct mu_error *err)
{
    struct cudaDeviceProp properties;
    struct cudaFuncAttributes attributes;
    cudaError_t error = cudaGetDeviceProperties(&properties, (int)index);
    if (error == cudaSuccess)
        error = cudaSetDevice((int)index);
    if (error != cudaSuccess)
        return unfit(err, index, "cannot be used: %s", cudaGetErrorString(error));
    error = cudaFuncGetAttributes(&attributes, (const void *)probe_kernel);
    if (error == cudaSuccess)
        return MU_OK;
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction)
        return unfit(err, index,
                     "%s has compute capability %d.%d, and this program no code for that; build it with "
                     "-DCMAKE_CUDA_ARCHITECTURES=%d%d, or use another GPU",
                     properties.name, properties.major, properties.minor, properties.major, properties.minor);
    return unfit(err, index, "%s: %s", properties.name, cudaGetErrorString(error));
}

uint32_t mu_device_count_cuda(void)
{
    struct mu_error ignored;
    int count = 0;
    return check_driver(0, &ignored) == MU_OK && cudaGetDeviceCount(&count) == cudaSuccess ? (uint32_t)count : 0;
}

/* What tools and other processes call this GPU. */
static enum mu_status name_it(struct mu_device *device, uint32_t index, struct mu_error *err)
{
    struct cudaDeviceProp properties;
    cudaError_t error = cudaGetDeviceProperties(&properties, (int)index);
    if (error == cudaSuccess)
        error = cudaDeviceGetPCIBusId(device->bus_id, sizeof device->bus_id, (int)index);
    if (error != cudaSuccess)
        return unfit(err, index, "cannot be used: %s", cudaGetErrorString(error));
    size_t used = (size_t)snprintf(device->uuid, sizeof device->uuid, "GPU");
    for (int i = 0; i < 16; i++)
        used += (size_t)snprintf(device->uuid + used, sizeof device->uuid - used, "%s%02x",
                                 i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "",
                                 (unsigned)(unsigned char)properties.uuid.bytes[i]);
    return MU_OK;
}

enum mu_status mu_device_open_cuda(uint32_t index, size_t workspace_bytes, struct mu_error *err,
                                   struct mu_device **ret_device)
{
    enum mu_status status = check_driver(index, err);
    if (status == MU_OK)
        status = check_architecture(index, err);
    if (status != MU_OK)
        return status;
    struct mu_cuda *cuda = (struct mu_cuda *)calloc(1, sizeof *cuda);
    if (!cuda)
        return mu_fail(err, MU_ERR_NO_MEMORY, "device cuda:%u: no host memory", index);
    status = mu_cuda_init(cuda, (int)index, MU_DTYPE_FP32, workspace_bytes, err);
    if (status == MU_OK && (status = name_it(&cuda->base, index, err)) != MU_OK)
        mu_cuda_fini(cuda);
    if (status != MU_OK) {
        free(cuda);
        return status;
    }
    *ret_device = &cuda->base;
    return MU_OK;
}

/* ---- numeric identity ---- */

static void *shared_alloc(void *ctx, size_t size_bytes)
{
    void *memory = NULL;
    (void)ctx;
    if (cudaHostAlloc(&memory, size_bytes, cudaHostAllocMapped) != cudaSuccess)
        return NULL;
    return memset(memory, 0, size_bytes);
}

static void shared_free(void *ctx, void *memory)
{
    (void)ctx;
    (void)cudaFreeHost(memory);
}

static enum mu_status shared_wait(void *ctx)
{
    return mu_cuda_wait((struct mu_cuda *)ctx);
}

enum mu_status mu_cuda_identity(struct mu_pool *pool, const struct mu_kernel_shapes *shapes, struct mu_error *err,
                                struct mu_kernel_identity *ret_identity)
{
    char text[128];
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    const struct mu_identity_place place = {cuda, shared_alloc, shared_free, shared_wait, text};
    if (cuda->dtype == MU_DTYPE_BF16) {
        uint64_t hash;
        enum mu_status status = mu_cuda_plans_hash(cuda, shapes, &hash);
        if (status != MU_OK)
            return mu_fail(err, status, "numeric identity: %s", cuda->error.text);
        mu_cuda_plans_text(cuda, hash, text, sizeof text);
    } else { /* the definitions of kernels.h, whoever computes them: the name they got first */
        (void)snprintf(text, sizeof text, "cpu fp32 exact 1");
    }
    return mu_identity_run(pool, shapes, &place, err, ret_identity);
}
