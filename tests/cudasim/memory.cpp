/* Device and pinned memory: separate blocks of the heap, so that AddressSanitizer sees what leaves them; large ones are
 * mappings that end at a guard page. Fresh memory is full of poison. */
#include "tests/cudasim/runtime.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(start, size)   ((void)(start), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(start, size) ((void)(start), (void)(size))
#endif

namespace cudasim
{

#if defined(__SANITIZE_ADDRESS__)
static constexpr size_t page = 4096, poison_bytes = 2 << 20,
                        mapped_from = 1 << 20; /* smaller: red zones on both sides */
#else
static constexpr size_t page = 4096, poison_bytes = 2 << 20, mapped_from = page;
#endif

static std::mutex lock;
static std::map<uintptr_t, region> &regions()
{
    static auto *all = new std::map<uintptr_t, region>;
    return *all;
}

region region_of(const void *pointer)
{
    const uintptr_t at = reinterpret_cast<uintptr_t>(pointer);
    std::lock_guard<std::mutex> hold(lock);
    auto next = regions().upper_bound(at);
    if (next == regions().begin())
        return {};
    const region &r = std::prev(next)->second;
    return at - r.start < std::max<size_t>(r.size, 1) ? r : region{};
}

void region_add(const region &r)
{
    std::lock_guard<std::mutex> hold(lock);
    regions()[r.start] = r;
    guard_region(r);
}

bool region_remove(const void *start, region *ret)
{
    std::lock_guard<std::mutex> hold(lock);
    auto found = regions().find(reinterpret_cast<uintptr_t>(start));
    if (found == regions().end())
        return false;
    *ret = found->second;
    regions().erase(found);
    return true;
}

/* Ranges may go on from one mapping of virtual memory to the next. */
static bool is_inside(region r, const void *pointer, size_t size)
{
    const char *at = static_cast<const char *>(pointer);
    for (;;) {
        const size_t left = r.size - (reinterpret_cast<uintptr_t>(at) - r.start);
        if (size <= left)
            return true;
        at += left;
        size -= left;
        r = region_of(at);
        if (r.kind != region_kind::device || r.start != reinterpret_cast<uintptr_t>(at))
            return false;
    }
}

bool is_device_range(const void *pointer, size_t size)
{
    const region r = region_of(pointer);
    return r.kind != region_kind::none && is_inside(r, pointer, size);
}

bool is_sound_range(const void *pointer, size_t size)
{
    const region r = region_of(pointer);
    return r.kind == region_kind::none || is_inside(r, pointer, size);
}

/* One piece of poison in memory stands behind all fresh mappings until they are written. */
void poison_mapping(void *at, size_t size)
{
    static const int piece = [] {
        const int fd = memfd_create("cudasim poison", MFD_CLOEXEC);
        const std::vector<char> bytes(poison_bytes, static_cast<char>(POISON));
        if (fd < 0 || write(fd, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) {
            perror("cudasim: poison");
            abort();
        }
        return fd;
    }();
    for (size_t done = 0; done < size; done += poison_bytes)
        if (mmap(static_cast<char *>(at) + done, std::min(poison_bytes, size - done), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, piece, 0) == MAP_FAILED) {
            perror("cudasim: device memory");
            abort();
        }
}

static void *mapped_new(size_t size)
{
    const size_t whole = (size + page - 1) / page * page;
    void *memory = mmap(nullptr, whole + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return nullptr;
    poison_mapping(memory, whole);
    ASAN_POISON_MEMORY_REGION(static_cast<char *>(memory) + size, whole - size);
    return memory;
}

static void *memory_new(region_kind kind, size_t size)
{
    const bool mapped = size >= mapped_from;
    void *memory = mapped ? mapped_new(size) : aligned_alloc(256, (size + 255) / 256 * 256 + (size == 0) * 256);
    if (!memory)
        return nullptr;
    if (!mapped) {
        memset(memory, POISON, size);
        /* up to the next multiple of 256 nothing was asked for */
        ASAN_POISON_MEMORY_REGION(static_cast<char *>(memory) + size, (size + 255) / 256 * 256 - size);
    }
    region_add({kind, reinterpret_cast<uintptr_t>(memory), size, device_here().index, mapped});
    return memory;
}

static void memory_free(const region &r)
{
    char *memory = reinterpret_cast<char *>(r.start);
    const size_t unit = r.mapped ? page : 256, whole = (r.size + unit - 1) / unit * unit;
    ASAN_UNPOISON_MEMORY_REGION(memory + r.size, whole - r.size);
    if (r.mapped)
        munmap(memory, whole + page);
    else
        free(memory);
}

static cudaError_t device_new(void **ret, size_t size)
{
    device &d = device_here();
    if (size == 0) {
        *ret = nullptr;
        return cudaSuccess;
    }
    if (d.used.fetch_add(size) + size > d.bytes) {
        d.used -= size;
        return leave(cudaErrorMemoryAllocation);
    }
    void *memory = memory_new(region_kind::device, size);
    if (!memory)
        return leave(cudaErrorMemoryAllocation);
    *ret = memory;
    return cudaSuccess;
}

static cudaError_t device_free(void *pointer)
{
    region r;
    if (region_of(pointer).kind != region_kind::device || !region_remove(pointer, &r))
        return leave(cudaErrorInvalidValue);
    device_at(r.device).used -= r.size;
    memory_free(r);
    return cudaSuccess;
}

} // namespace cudasim

using namespace cudasim;

cudaError_t cudaMalloc(void **pointer, size_t size)
{
    if (const cudaError_t error = enter("cudaMalloc", cudaErrorMemoryAllocation))
        return error;
    return device_new(pointer, size);
}

cudaError_t cudaFree(void *pointer)
{
    if (const cudaError_t error = enter("cudaFree"))
        return error;
    if (!pointer)
        return cudaSuccess;
    const region r = region_of(pointer);
    if (r.kind == region_kind::device)
        device_wait(r.device); /* as CUDA does */
    return device_free(pointer);
}

cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t)
{
    if (const cudaError_t error = enter("cudaMallocAsync", cudaErrorMemoryAllocation))
        return error;
    return device_new(pointer, size);
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream)
{
    if (const cudaError_t error = enter("cudaFreeAsync"))
        return error;
    return leave(enqueue(stream, [pointer] { return device_free(pointer); }));
}

cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned int)
{
    if (const cudaError_t error = enter("cudaHostAlloc", cudaErrorMemoryAllocation))
        return error;
    void *memory = memory_new(region_kind::host, size);
    if (!memory)
        return leave(cudaErrorMemoryAllocation);
    *pointer = memory;
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **pointer, size_t size)
{
    return cudaHostAlloc(pointer, size, 0);
}

cudaError_t cudaFreeHost(void *pointer)
{
    if (const cudaError_t error = enter("cudaFreeHost"))
        return error;
    if (!pointer)
        return cudaSuccess;
    region r;
    if (region_of(pointer).kind != region_kind::host || !region_remove(pointer, &r))
        return leave(cudaErrorInvalidValue);
    for (int i = 0; i < device_count(); i++)
        device_wait(i);
    memory_free(r);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned int)
{
    if (const cudaError_t error = enter("cudaHostRegister", cudaErrorMemoryAllocation))
        return error;
    if (!pointer || size == 0)
        return leave(cudaErrorInvalidValue);
    if (region_of(pointer).kind != region_kind::none ||
        region_of(static_cast<char *>(pointer) + size - 1).kind != region_kind::none)
        return leave(cudaErrorHostMemoryAlreadyRegistered);
    region_add({region_kind::managed_host, reinterpret_cast<uintptr_t>(pointer), size, device_here().index, false});
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *pointer)
{
    if (const cudaError_t error = enter("cudaHostUnregister"))
        return error;
    region r;
    if (region_of(pointer).kind != region_kind::managed_host || !region_remove(pointer, &r))
        return leave(cudaErrorHostMemoryNotRegistered);
    return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void **device_pointer, void *host, unsigned int)
{
    const region_kind kind = region_of(host).kind;
    if (kind != region_kind::host && kind != region_kind::managed_host)
        return leave(cudaErrorInvalidValue);
    *device_pointer = host;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
    const region r = region_of(pointer);
    void *same = const_cast<void *>(pointer);
    switch (r.kind) {
    case region_kind::none:
        *attributes = {cudaMemoryTypeUnregistered, -2, nullptr, nullptr};
        break;
    case region_kind::device:
        *attributes = {cudaMemoryTypeDevice, r.device, same, nullptr};
        break;
    default:
        *attributes = {cudaMemoryTypeHost, r.device, same, same};
        break;
    }
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    if (const cudaError_t error = enter("cudaMemGetInfo"))
        return error;
    const device &d = device_here();
    *total_bytes = d.bytes;
    *free_bytes = d.bytes - std::min<size_t>(d.bytes, d.used);
    return cudaSuccess;
}
