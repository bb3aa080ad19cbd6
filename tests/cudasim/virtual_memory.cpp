/* Virtual memory of the driver: address ranges, physical pieces and where they are mapped. */
#include "tests/cudasim/runtime.h"

#include <cuda.h>

#include <cstring>
#include <map>
#include <sys/mman.h>
#include <unistd.h>

namespace cudasim
{

static constexpr size_t granularity = 2 << 20;

struct piece {
    int fd, device;
    size_t size;
    unsigned users; /* mappings, and the handle while it is held */
};

static std::mutex lock;
static std::map<CUmemGenericAllocationHandle, piece> &pieces()
{
    static auto *all = new std::map<CUmemGenericAllocationHandle, piece>;
    return *all;
}
/* Mapped ranges: start -> (size, handle). */
static std::map<CUdeviceptr, std::pair<size_t, CUmemGenericAllocationHandle>> &mappings()
{
    static auto *all = new std::map<CUdeviceptr, std::pair<size_t, CUmemGenericAllocationHandle>>;
    return *all;
}
static CUmemGenericAllocationHandle last_handle;

static CUresult enter_driver(const char *function, CUresult usual)
{
    if (const int code = injected(function, usual))
        return static_cast<CUresult>(code);
    return device_count() == 0 ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}

static bool is_whole(size_t size)
{
    return size > 0 && size % granularity == 0;
}

static void *address(CUdeviceptr at)
{
    return reinterpret_cast<void *>(static_cast<uintptr_t>(at));
}

static bool close_range(CUdeviceptr at, size_t size)
{
    return mmap(address(at), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) !=
           MAP_FAILED;
}

/* The memory goes when neither the handle nor a mapping holds it. */
static void let_go(CUmemGenericAllocationHandle handle)
{
    piece &p = pieces()[handle];
    if (--p.users > 0)
        return;
    device_at(p.device).used -= p.size;
    close(p.fd);
    pieces().erase(handle);
}

} // namespace cudasim

using namespace cudasim;

CUresult cuInit(unsigned int)
{
    return enter_driver("cuInit", CUDA_ERROR_NO_DEVICE);
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
    *text = cudaGetErrorString(static_cast<cudaError_t>(error));
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text)
{
    *text = cudaGetErrorName(static_cast<cudaError_t>(error));
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version)
{
    return static_cast<CUresult>(cudaDriverGetVersion(version));
}

CUresult cuDeviceGetCount(int *count)
{
    *count = device_count();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    if (ordinal < 0 || ordinal >= device_count())
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t *ret, const CUmemAllocationProp *, CUmemAllocationGranularity_flags)
{
    *ret = granularity;
    return enter_driver("cuMemGetAllocationGranularity", CUDA_ERROR_NOT_SUPPORTED);
}

CUresult cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr, unsigned long long)
{
    if (const CUresult error = enter_driver("cuMemAddressReserve", CUDA_ERROR_OUT_OF_MEMORY))
        return error;
    const size_t unit = alignment > granularity ? alignment : granularity;
    if (!is_whole(size) || (unit & (unit - 1)) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    void *memory = mmap(nullptr, size + unit, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    const uintptr_t start = reinterpret_cast<uintptr_t>(memory), first = (start + unit - 1) / unit * unit;
    if (first > start)
        munmap(memory, first - start);
    munmap(reinterpret_cast<void *>(first + size), start + unit - first);
    *ptr = first;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size)
{
    std::lock_guard<std::mutex> hold(lock);
    auto mapped = mappings().lower_bound(ptr);
    if (mapped != mappings().end() && mapped->first < ptr + size)
        return CUDA_ERROR_INVALID_VALUE; /* unmap first */
    return munmap(address(ptr), size) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                     unsigned long long)
{
    if (const CUresult error = enter_driver("cuMemCreate", CUDA_ERROR_OUT_OF_MEMORY))
        return error;
    if (!is_whole(size) || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE || prop->location.id < 0 ||
        prop->location.id >= device_count())
        return CUDA_ERROR_INVALID_VALUE;
    device &d = device_at(prop->location.id);
    if (d.used.fetch_add(size) + size > d.bytes) {
        d.used -= size;
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    const int fd = memfd_create("cudasim device memory", MFD_CLOEXEC);
    void *memory = MAP_FAILED;
    if (fd >= 0 && ftruncate(fd, static_cast<off_t>(size)) == 0)
        memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) {
        if (fd >= 0)
            close(fd);
        d.used -= size;
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memset(memory, POISON, size);
    munmap(memory, size);
    std::lock_guard<std::mutex> hold(lock);
    *handle = ++last_handle;
    pieces()[last_handle] = {fd, prop->location.id, size, 1};
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    std::lock_guard<std::mutex> hold(lock);
    if (!pieces().count(handle))
        return CUDA_ERROR_INVALID_VALUE;
    let_go(handle);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long)
{
    if (const CUresult error = enter_driver("cuMemMap", CUDA_ERROR_INVALID_VALUE))
        return error;
    std::lock_guard<std::mutex> hold(lock);
    auto found = pieces().find(handle);
    if (found == pieces().end() || offset != 0 || size != found->second.size || ptr % granularity != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (mmap(address(ptr), size, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second.fd, 0) == MAP_FAILED)
        return CUDA_ERROR_INVALID_VALUE;
    found->second.users++;
    mappings()[ptr] = {size, handle};
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
{
    if (const CUresult error = enter_driver("cuMemSetAccess", CUDA_ERROR_INVALID_VALUE))
        return error;
    if (count != 1 || mprotect(address(ptr), size,
                               desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE
                                                                                 : static_cast<int>(PROT_READ)) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard<std::mutex> hold(lock);
    for (auto m = mappings().lower_bound(ptr); m != mappings().end() && m->first < ptr + size; ++m)
        region_add({region_kind::device, static_cast<uintptr_t>(m->first), m->second.first, desc->location.id, true});
    return CUDA_SUCCESS;
}

/* One mapping, or several that lie behind each other. */
CUresult cuMemUnmap(CUdeviceptr ptr, size_t size)
{
    std::lock_guard<std::mutex> hold(lock);
    size_t covered = 0;
    for (auto m = mappings().find(ptr); m != mappings().end() && covered < size && m->first == ptr + covered; ++m)
        covered += m->second.first;
    if (covered != size || size == 0)
        return CUDA_ERROR_INVALID_VALUE;
    for (CUdeviceptr at = ptr; at < ptr + size;) {
        const auto m = mappings().find(at);
        const size_t step = m->second.first;
        region gone;
        (void)region_remove(address(at), &gone);
        if (!close_range(at, step))
            return CUDA_ERROR_UNKNOWN;
        let_go(m->second.second);
        mappings().erase(m);
        at += step;
    }
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned int, unsigned long long,
                                             enum cudaDriverEntryPointQueryResult *result)
{
#define ENTRY(name)                                                                                                    \
    {                                                                                                                  \
#name, reinterpret_cast < void *>(name)                                                                        \
    }
    static const struct {
        const char *name;
        void *function;
    } table[] = {ENTRY(cuInit),
                 ENTRY(cuGetErrorString),
                 ENTRY(cuGetErrorName),
                 ENTRY(cuDriverGetVersion),
                 ENTRY(cuDeviceGet),
                 ENTRY(cuDeviceGetCount),
                 ENTRY(cuMemGetAllocationGranularity),
                 ENTRY(cuMemAddressReserve),
                 ENTRY(cuMemAddressFree),
                 ENTRY(cuMemCreate),
                 ENTRY(cuMemRelease),
                 ENTRY(cuMemMap),
                 ENTRY(cuMemUnmap),
                 ENTRY(cuMemSetAccess)};
#undef ENTRY
    *function = nullptr;
    for (const auto &entry : table)
        if (strcmp(entry.name, symbol) == 0)
            *function = entry.function;
    if (result)
        *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
