/* The memory of a GPU as kernels/device.h wants it.
 *
 * Spaces are address ranges of the driver's virtual memory, backed in pieces of its granularity. Operations and copies
 * share one stream; moves have another one, beside it; marks are events on the first. */
#include "kernels/cuda/memory.h"

#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/device.h"

static struct mu_cuda *cuda_of(struct mu_device *device)
{
    return (struct mu_cuda *)device;
}

static enum mu_status gpu_failed(struct mu_cuda *cuda, const char *what, cudaError_t error)
{
    (void)cudaGetLastError(); /* told here: not once more by the next launch */
    return mu_fail(cuda->error.status == MU_OK ? &cuda->error : NULL, MU_ERR_IO, "GPU %d, %s: %s", cuda->device, what,
                   cudaGetErrorString(error));
}

/* ---- the driver's virtual memory, found at run time: nothing links with it ---- */

static struct {
    decltype(&cuMemAddressReserve) reserve;
    decltype(&cuMemAddressFree) unreserve;
    decltype(&cuMemCreate) create;
    decltype(&cuMemRelease) release;
    decltype(&cuMemMap) map;
    decltype(&cuMemUnmap) unmap;
    decltype(&cuMemSetAccess) set_access;
    decltype(&cuMemGetAllocationGranularity) granularity;
    decltype(&cuGetErrorString) text;
} driver;

static cudaError_t find_driver(void)
{
    const struct {
        const char *name;
        void **function;
    } wanted[] = {{"cuMemAddressReserve", (void **)&driver.reserve},
                  {"cuMemAddressFree", (void **)&driver.unreserve},
                  {"cuMemCreate", (void **)&driver.create},
                  {"cuMemRelease", (void **)&driver.release},
                  {"cuMemMap", (void **)&driver.map},
                  {"cuMemUnmap", (void **)&driver.unmap},
                  {"cuMemSetAccess", (void **)&driver.set_access},
                  {"cuMemGetAllocationGranularity", (void **)&driver.granularity},
                  {"cuGetErrorString", (void **)&driver.text}};
    cudaError_t error = cudaSuccess;
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0] && error == cudaSuccess; i++) {
        enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
        error = cudaGetDriverEntryPointByVersion(wanted[i].name, wanted[i].function, 12000, cudaEnableDefault, &found);
        if (error == cudaSuccess && found != cudaDriverEntryPointSuccess)
            error = cudaErrorNotSupported;
    }
    return error;
}

static CUmemAllocationProp on_gpu(const struct mu_cuda *cuda)
{
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = cuda->device;
    return prop;
}

static const char *driver_text(CUresult result)
{
    const char *text = NULL;
    return driver.text(result, &text) == CUDA_SUCCESS && text ? text : "unknown error";
}

static enum mu_status gpu_reserve(struct mu_device *device, size_t size, struct mu_error *err, void **ret_base)
{
    CUdeviceptr base = 0;
    CUresult result = driver.reserve(&base, size, 0, 0, 0);
    if (result != CUDA_SUCCESS)
        return mu_fail(err, MU_ERR_NO_MEMORY, "GPU %d: cannot reserve %zu MiB of addresses: %s",
                       cuda_of(device)->device, size >> 20, driver_text(result));
    *ret_base = (void *)(uintptr_t)base;
    return MU_OK;
}

static void gpu_unreserve(struct mu_device *, void *base, size_t size)
{
    (void)driver.unreserve((CUdeviceptr)(uintptr_t)base, size);
}

/* One piece of memory at an address; it lives as long as its mapping. */
static CUresult map_piece(struct mu_cuda *cuda, CUdeviceptr at)
{
    const CUmemAllocationProp prop = on_gpu(cuda);
    CUmemGenericAllocationHandle handle;
    CUresult result = driver.create(&handle, cuda->base.page_bytes, &prop, 0);
    if (result != CUDA_SUCCESS)
        return result;
    result = driver.map(at, cuda->base.page_bytes, 0, handle, 0);
    (void)driver.release(handle);
    return result;
}

static void unmap_pieces(struct mu_cuda *cuda, CUdeviceptr at, size_t size)
{
    for (size_t done = 0; done < size; done += cuda->base.page_bytes)
        (void)driver.unmap(at + done, cuda->base.page_bytes);
}

static enum mu_status gpu_back(struct mu_device *device, void *memory, size_t size, struct mu_error *err)
{
    struct mu_cuda *cuda = cuda_of(device);
    const CUdeviceptr at = (CUdeviceptr)(uintptr_t)memory;
    CUresult result = CUDA_SUCCESS;
    size_t done = 0, free_bytes = 0, total_bytes = 0;
    while (done < size && (result = map_piece(cuda, at + done)) == CUDA_SUCCESS)
        done += cuda->base.page_bytes;
    if (result == CUDA_SUCCESS) {
        CUmemAccessDesc access = {};
        access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        access.location.id = cuda->device;
        access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        result = driver.set_access(at, size, &access, 1);
    }
    if (result == CUDA_SUCCESS) {
        cudaError_t error = cudaMemsetAsync(memory, 0, size, cuda->stream);
        if (error == cudaSuccess)
            error = mu_cuda_await_stream(cuda, cuda->stream);
        return error == cudaSuccess ? MU_OK : mu_fail(err, gpu_failed(cuda, "memory", error), "%s", cuda->error.text);
    }
    unmap_pieces(cuda, at, done);
    (void)cudaMemGetInfo(&free_bytes, &total_bytes);
    return mu_fail(err, MU_ERR_NO_MEMORY, "GPU %d: no memory for %zu MiB more (%s); %zu of %zu MiB are free",
                   cuda->device, size >> 20, driver_text(result), free_bytes >> 20, total_bytes >> 20);
}

static bool gpu_unback(struct mu_device *device, void *memory, size_t size)
{
    struct mu_cuda *cuda = cuda_of(device);
    (void)mu_cuda_await_stream(cuda, cuda->stream);
    unmap_pieces(cuda, (CUdeviceptr)(uintptr_t)memory, size);
    return true;
}

/* ---- blocks ---- */

static enum mu_status gpu_allocate(struct mu_device *device, enum mu_memory kind, size_t size, struct mu_error *err,
                                   void **ret_memory)
{
    struct mu_cuda *cuda = cuda_of(device);
    void *memory = NULL;
    size_t free_bytes = 0, total_bytes = 0;
    cudaError_t error =
        kind == MU_MEMORY_PINNED ? cudaHostAlloc(&memory, size, cudaHostAllocMapped) : cudaMalloc(&memory, size);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        (void)cudaMemGetInfo(&free_bytes, &total_bytes);
        if (kind == MU_MEMORY_PINNED)
            return mu_fail(
                err, MU_ERR_NO_MEMORY,
                "GPU %d: no %zu MiB of pinned host memory: %s; free memory of the host, or raise its limit of locked "
                "memory (ulimit -l)",
                cuda->device, size >> 20, cudaGetErrorString(error));
        return mu_fail(err, MU_ERR_NO_MEMORY, "GPU %d: no memory for %zu MiB (%s); %zu of %zu MiB are free",
                       cuda->device, size >> 20, cudaGetErrorString(error), free_bytes >> 20, total_bytes >> 20);
    }
    if (kind == MU_MEMORY_PINNED)
        memset(memory, 0, size);
    else if (!MU_GPU_MUTANT(MU_GPU_MUT_KEEP_FRESH) &&
             (error = cudaMemsetAsync(memory, 0, size, cuda->stream)) != cudaSuccess)
        return mu_fail(err, gpu_failed(cuda, "memory", error), "%s", cuda->error.text);
    *ret_memory = memory;
    return MU_OK;
}

static void gpu_release(struct mu_device *, enum mu_memory kind, void *memory, size_t)
{
    (void)(kind == MU_MEMORY_PINNED ? cudaFreeHost(memory) : cudaFree(memory)); /* both wait for the GPU */
}

/* ---- copies ---- */

static enum mu_status gpu_copy(struct mu_device *device, void *to, const void *from, size_t size)
{
    cudaError_t error = cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, cuda_of(device)->stream);
    return error == cudaSuccess ? MU_OK : gpu_failed(cuda_of(device), "copy", error);
}

/* On a stream, and waited for. Beside the order there is nothing to watch: such copies wait for nobody, and the sockets
 * that a watch would look at make them themselves. */
static enum mu_status copy_now(struct mu_cuda *cuda, void *to, const void *from, size_t size, cudaStream_t stream)
{
    cudaError_t error = cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream);
    if (error == cudaSuccess)
        error = stream == cuda->side ? cudaStreamSynchronize(stream) : mu_cuda_await_stream(cuda, stream);
    return error == cudaSuccess ? MU_OK : gpu_failed(cuda, "copy", error);
}

static enum mu_status gpu_read(struct mu_device *device, const void *from, size_t size, const void **ret_view)
{
    struct mu_cuda *cuda = cuda_of(device);
    *ret_view = cuda->view;
    return copy_now(cuda, cuda->view, from, size, MU_GPU_MUTANT(MU_GPU_MUT_READ_EARLY) ? cuda->side : cuda->stream);
}

static enum mu_status gpu_peek(struct mu_device *device, const void *from, size_t size, const void **ret_view)
{
    struct mu_cuda *cuda = cuda_of(device);
    *ret_view = cuda->view;
    return copy_now(cuda, cuda->view, from, size, cuda->side);
}

static enum mu_status gpu_move(struct mu_device *device, void *to, const void *from, size_t size)
{
    return copy_now(cuda_of(device), to, from, size, cuda_of(device)->side);
}

static bool gpu_holds(const struct mu_device *, const void *data)
{
    struct cudaPointerAttributes attributes;
    return cudaPointerGetAttributes(&attributes, data) == cudaSuccess && attributes.type == cudaMemoryTypeDevice;
}

/* ---- marks ---- */

static enum mu_status gpu_await(struct mu_device *device, uint64_t mark)
{
    struct mu_cuda *cuda = cuda_of(device);
    if (mark <= cuda->marks_passed || MU_GPU_MUTANT(MU_GPU_MUT_PASS_EARLY))
        return MU_OK;
    cudaError_t error = mu_cuda_await_event(cuda, cuda->events[mark % MU_CUDA_MARKS]);
    if (error != cudaSuccess)
        return gpu_failed(cuda, "waiting", error);
    cuda->marks_passed = mark;
    return MU_OK;
}

/* An event is used again only when its mark before has passed. */
static uint64_t gpu_mark(struct mu_device *device)
{
    struct mu_cuda *cuda = cuda_of(device);
    const uint64_t mark = ++cuda->marks;
    if (mark > MU_CUDA_MARKS)
        (void)gpu_await(device, mark - MU_CUDA_MARKS);
    cudaError_t error = cudaEventRecord(cuda->events[mark % MU_CUDA_MARKS], cuda->stream);
    if (error != cudaSuccess)
        (void)gpu_failed(cuda, "event", error);
    return mark;
}

static enum mu_status gpu_passed(struct mu_device *device, uint64_t mark)
{
    struct mu_cuda *cuda = cuda_of(device);
    if (cuda->error.status != MU_OK)
        return cuda->error.status;
    if (mark <= cuda->marks_passed || MU_GPU_MUTANT(MU_GPU_MUT_PASS_EARLY))
        return MU_OK;
    cudaError_t error = cudaEventQuery(cuda->events[mark % MU_CUDA_MARKS]);
    if (error == cudaErrorNotReady) {
        (void)cudaGetLastError(); /* else the next launch would report it */
        return MU_ERR_BUSY;
    }
    if (error != cudaSuccess)
        return gpu_failed(cuda, "running", error);
    cuda->marks_passed = mark;
    return MU_OK;
}

/* ---- tracks ---- */

static void gpu_use(struct mu_device *device, enum mu_track track)
{
    cuda_of(device)->stream = cuda_of(device)->tracks[track];
}

static void gpu_signal(struct mu_device *device, enum mu_track track, uint32_t point)
{
    struct mu_cuda *cuda = cuda_of(device);
    cudaError_t error = cudaEventRecord(cuda->points[point], cuda->tracks[track]);
    if (error != cudaSuccess)
        (void)gpu_failed(cuda, "event", error);
}

static void gpu_follow(struct mu_device *device, enum mu_track track, uint32_t point)
{
    struct mu_cuda *cuda = cuda_of(device);
    if (MU_GPU_MUTANT(MU_GPU_MUT_FOLLOW_NOBODY))
        return;
    cudaError_t error = cudaStreamWaitEvent(cuda->tracks[track], cuda->points[point], 0);
    if (error != cudaSuccess)
        (void)gpu_failed(cuda, "event", error);
}

/* ---- spans ---- */

static void gpu_span(struct mu_device *device, enum mu_work work, bool begin)
{
    struct mu_cuda *cuda = cuda_of(device);
    if (begin) {
        cuda->in_span = cuda->spans < MU_DEVICE_SPANS;
        cuda->span_count[work]++;
    }
    if (!cuda->in_span)
        return;
    cudaError_t error = cudaEventRecord(cuda->span_ends[2 * cuda->spans + !begin], cuda->tracks[MU_TRACK_MAIN]);
    if (error != cudaSuccess)
        (void)gpu_failed(cuda, "event", error);
    cuda->span_works[cuda->spans] = (uint8_t)work;
    cuda->spans += !begin;
    cuda->in_span = begin;
}

static void gpu_spent_us(struct mu_device *device, uint64_t ret_us[MU_WORKS])
{
    struct mu_cuda *cuda = cuda_of(device);
    double us[MU_WORKS] = {};
    uint32_t measured[MU_WORKS] = {};
    for (uint32_t i = 0; i < cuda->spans; i++) {
        float ms = 0;
        if (cudaEventElapsedTime(&ms, cuda->span_ends[2 * i], cuda->span_ends[2 * i + 1]) != cudaSuccess) {
            (void)cudaGetLastError(); /* the step was given up in the middle */
            continue;
        }
        us[cuda->span_works[i]] += ms * 1e3;
        measured[cuda->span_works[i]]++;
    }
    for (int work = 0; work < MU_WORKS; work++) {
        ret_us[work] = measured[work] ? (uint64_t)(us[work] * cuda->span_count[work] / measured[work]) : 0;
        cuda->span_count[work] = 0;
    }
    cuda->spans = 0;
    cuda->in_span = false;
}

/* ---- the device ---- */

static enum mu_status gpu_enter(struct mu_device *device, struct mu_error *err)
{
    cudaError_t error = cudaSetDevice(cuda_of(device)->device);
    if (error == cudaSuccess)
        return MU_OK;
    return mu_fail(err, MU_ERR_UNAVAILABLE, "GPU %d: %s", cuda_of(device)->device, cudaGetErrorString(error));
}

static void gpu_close(struct mu_device *device)
{
    mu_cuda_fini(cuda_of(device));
    free(device);
}

static void gpu_memory(struct mu_device *, uint64_t *ret_free_bytes, uint64_t *ret_total_bytes)
{
    size_t free_bytes = 0, total_bytes = 0;
    (void)cudaMemGetInfo(&free_bytes, &total_bytes);
    *ret_free_bytes = free_bytes;
    *ret_total_bytes = total_bytes;
}

static const struct mu_device_ops gpu_ops = {gpu_enter,
                                             gpu_close,
                                             mu_cuda_compute,
                                             gpu_memory,
                                             mu_cuda_identity,
                                             gpu_allocate,
                                             gpu_release,
                                             gpu_reserve,
                                             gpu_unreserve,
                                             gpu_back,
                                             gpu_unback,
                                             gpu_copy,
                                             gpu_read,
                                             gpu_peek,
                                             gpu_move,
                                             gpu_holds,
                                             gpu_mark,
                                             gpu_passed,
                                             gpu_await,
                                             gpu_use,
                                             gpu_signal,
                                             gpu_follow,
                                             gpu_span,
                                             gpu_spent_us,
                                             mu_cuda_replay,
                                             mu_cuda_record_end,
                                             mu_cuda_forget,
                                             mu_cuda_records,
                                             mu_cuda_set_recording};

cudaError_t mu_cuda_memory_init(struct mu_cuda *cuda)
{
    size_t granularity = 0;
    const CUmemAllocationProp prop = on_gpu(cuda);
    cudaError_t error = find_driver();
    if (error == cudaSuccess &&
        driver.granularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) != CUDA_SUCCESS)
        error = cudaErrorNotSupported;
    if (error == cudaSuccess)
        error = cudaStreamCreateWithFlags(&cuda->side, cudaStreamNonBlocking);
    for (int i = 0; i < MU_CUDA_MARKS && error == cudaSuccess; i++)
        error = cudaEventCreateWithFlags(&cuda->events[i], cudaEventDisableTiming);
    for (int i = 0; i < MU_DEVICE_POINTS && error == cudaSuccess; i++)
        error = cudaEventCreateWithFlags(&cuda->points[i], cudaEventDisableTiming);
    for (int i = 0; i < 2 * MU_DEVICE_SPANS && error == cudaSuccess; i++)
        error = cudaEventCreateWithFlags(&cuda->span_ends[i], cudaEventDefault);
    cuda->base.ops = &gpu_ops;
    cuda->base.kernels = &mu_cuda_ops;
    cuda->base.page_bytes = granularity;
    cuda->base.error = &cuda->error;
    (void)snprintf(cuda->base.name, sizeof cuda->base.name, "cuda:%d", cuda->device);
    return error;
}

void mu_cuda_memory_fini(struct mu_cuda *cuda)
{
    if (cuda->view)
        (void)cudaFreeHost(cuda->view);
    for (int i = 0; i < MU_CUDA_MARKS; i++)
        if (cuda->events[i])
            (void)cudaEventDestroy(cuda->events[i]);
    for (int i = 0; i < MU_DEVICE_POINTS; i++)
        if (cuda->points[i])
            (void)cudaEventDestroy(cuda->points[i]);
    for (int i = 0; i < 2 * MU_DEVICE_SPANS; i++)
        if (cuda->span_ends[i])
            (void)cudaEventDestroy(cuda->span_ends[i]);
    if (cuda->side)
        (void)cudaStreamDestroy(cuda->side);
}
