/* The host as a device, and the calls that any device answers. */
#include "kernels/device.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/kernel_ops.h"

enum { HUGE_PAGE_BYTES = 2 << 20, PAGE_BYTES_MIN = 4096 };

/* ---- the host's memory ---- */

static enum mu_status host_enter(struct mu_device *device, struct mu_error *err)
{
    (void)device;
    (void)err;
    return MU_OK;
}

static void host_close(struct mu_device *device)
{
    (void)device;
}

static enum mu_status host_compute(struct mu_device *device, enum mu_dtype dtype, struct mu_error *err)
{
    if (dtype == MU_DTYPE_FP32)
        return MU_OK;
    return mu_fail(err, MU_ERR_INVALID, "compute: bf16 is not possible on %s; use a GPU, or fp32", device->name);
}

static void host_memory(struct mu_device *device, uint64_t *ret_free_bytes, uint64_t *ret_total_bytes)
{
    (void)device;
    uint64_t page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
    *ret_free_bytes = (uint64_t)sysconf(_SC_AVPHYS_PAGES) * page_bytes;
    *ret_total_bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * page_bytes;
}

static size_t mapping_bytes(size_t size_bytes)
{
    size_t unit = size_bytes >= HUGE_PAGE_BYTES ? HUGE_PAGE_BYTES : PAGE_BYTES_MIN;
    return (size_bytes + unit) / unit * unit;
}

static enum mu_status host_allocate(struct mu_device *device, enum mu_memory kind, size_t size_bytes,
                                    struct mu_error *err, void **ret_memory)
{
    (void)device;
    (void)kind;
    size_t whole = mapping_bytes(size_bytes);
    void *base = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        return mu_fail_errno(err, errno,
                             "arena: cannot map %zu MiB; use a smaller model or micro-batch, or more memory",
                             size_bytes >> 20);
    (void)madvise(base, whole, MADV_HUGEPAGE); /* advice: a kernel without huge pages is slower, not wrong */
    memset(base, 0, whole);
    *ret_memory = base;
    return MU_OK;
}

static void host_release(struct mu_device *device, enum mu_memory kind, void *memory, size_t size_bytes)
{
    (void)device;
    (void)kind;
    munmap(memory, mapping_bytes(size_bytes));
}

static enum mu_status host_reserve(struct mu_device *device, size_t size_bytes, struct mu_error *err, void **ret_base)
{
    (void)device;
    void *base = mmap(NULL, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        return mu_fail_errno(err, errno,
                             "space: cannot reserve %zu MiB of addresses; raise the limit of virtual memory (ulimit "
                             "-v) or use a smaller model",
                             size_bytes >> 20);
    (void)madvise(base, size_bytes, MADV_NOHUGEPAGE); /* a huge page would back neighbours nobody asked for */
    *ret_base = base;
    return MU_OK;
}

static void host_unreserve(struct mu_device *device, void *base, size_t size_bytes)
{
    (void)device;
    munmap(base, size_bytes);
}

/* Huge pages where whole ones fit. */
static void advise_huge(void *at, size_t size_bytes)
{
    uintptr_t unit = HUGE_PAGE_BYTES, first = (uintptr_t)at, end = first + size_bytes;
    first = (first + unit - 1) / unit * unit;
    end = end / unit * unit;
    if (first < end)
        (void)madvise((void *)first, end - first, MADV_HUGEPAGE);
}

static enum mu_status host_back(struct mu_device *device, void *at, size_t size_bytes, struct mu_error *err)
{
    (void)device;
    advise_huge(at, size_bytes);
    if (madvise(at, size_bytes, MADV_POPULATE_WRITE) == 0)
        return MU_OK;
    int saved = errno;
    if (saved != EINVAL) /* older kernels: touched one by one below */
        return mu_fail(err, MU_ERR_NO_MEMORY,
                       "space: no memory for %zu MiB (%s); use a smaller model or more workers, or more memory",
                       size_bytes >> 20, strerror(saved));
    for (size_t i = 0; i < size_bytes; i += PAGE_BYTES_MIN)
        *((volatile char *)at + i) = 0;
    return MU_OK;
}

static bool host_unback(struct mu_device *device, void *at, size_t size_bytes)
{
    (void)device;
    (void)madvise(at, size_bytes, MADV_NOHUGEPAGE); /* else the kernel may join them into a huge page again */
    if (madvise(at, size_bytes, MADV_DONTNEED) == 0)
        return true;
    memset(at, 0, size_bytes); /* locked pages cannot be given back: they still read as zeros */
    return false;
}

static enum mu_status host_copy(struct mu_device *device, void *to, const void *from, size_t size_bytes)
{
    (void)device;
    memcpy(to, from, size_bytes);
    return MU_OK;
}

static enum mu_status host_view(struct mu_device *device, const void *from, size_t size_bytes, const void **ret_view)
{
    (void)device;
    (void)size_bytes;
    *ret_view = from;
    return MU_OK;
}

static bool host_holds(const struct mu_device *device, const void *data)
{
    (void)device;
    (void)data;
    return false;
}

static uint64_t host_mark(struct mu_device *device)
{
    (void)device;
    return 0;
}

static enum mu_status host_passed(struct mu_device *device, uint64_t mark)
{
    (void)device;
    (void)mark;
    return MU_OK;
}

static void host_use(struct mu_device *device, enum mu_track track)
{
    (void)device;
    (void)track;
}

static void host_join(struct mu_device *device, enum mu_track track, uint32_t point)
{
    (void)device;
    (void)track;
    (void)point;
}

static void host_span(struct mu_device *device, enum mu_work work, bool begin)
{
    (void)device;
    (void)work;
    (void)begin;
}

static void host_spent_us(struct mu_device *device, uint64_t ret_us[MU_WORKS])
{
    (void)device;
    memset(ret_us, 0, MU_WORKS * sizeof *ret_us);
}

static bool host_records(const struct mu_device *device)
{
    (void)device;
    return false;
}

static void host_set_recording(struct mu_device *device, bool on)
{
    (void)device;
    (void)on;
}

static bool host_replay(struct mu_device *device, const struct mu_device_key *key)
{
    (void)device;
    (void)key;
    return false;
}

static bool host_record_end(struct mu_device *device, enum mu_status *status)
{
    (void)device;
    (void)status;
    return false;
}

static const struct mu_device_ops host_ops = {.enter = host_enter,
                                              .close = host_close,
                                              .compute = host_compute,
                                              .memory = host_memory,
                                              .identity = NULL, /* kernels/identity.c */
                                              .allocate = host_allocate,
                                              .release = host_release,
                                              .reserve = host_reserve,
                                              .unreserve = host_unreserve,
                                              .back = host_back,
                                              .unback = host_unback,
                                              .copy = host_copy,
                                              .read = host_view,
                                              .peek = host_view,
                                              .move = host_copy,
                                              .holds = host_holds,
                                              .mark = host_mark,
                                              .passed = host_passed,
                                              .await = host_passed,
                                              .use = host_use,
                                              .signal = host_join,
                                              .follow = host_join,
                                              .span = host_span,
                                              .spent_us = host_spent_us,
                                              .replay = host_replay,
                                              .record_end = host_record_end,
                                              .forget = host_close,
                                              .records = host_records,
                                              .set_recording = host_set_recording};

static const struct mu_error no_error;
static struct mu_device host = {.ops = &host_ops, .kernels = &mu_cpu_ops, .name = "cpu", .error = &no_error};

struct mu_device *mu_host_device(void)
{
    return &host;
}

/* ---- any device ---- */

static struct mu_device *or_host(struct mu_device *device)
{
    return device ? device : &host;
}

void mu_device_close(struct mu_device *device)
{
    or_host(device)->ops->close(device);
}

enum mu_status mu_device_compute(struct mu_device *device, enum mu_dtype dtype, struct mu_error *err)
{
    return or_host(device)->ops->compute(or_host(device), dtype, err);
}

enum mu_status mu_device_enter(struct mu_device *device, struct mu_error *err)
{
    return or_host(device)->ops->enter(device, err);
}

void mu_device_memory(struct mu_device *device, uint64_t *ret_free_bytes, uint64_t *ret_total_bytes)
{
    or_host(device)->ops->memory(device, ret_free_bytes, ret_total_bytes);
}

const char *mu_device_trouble(const struct mu_device *device)
{
    return device && device->error->status != MU_OK ? device->error->text : NULL;
}

enum mu_status mu_device_allocate(struct mu_device *device, enum mu_memory kind, size_t size_bytes,
                                  struct mu_error *err, void **ret_memory)
{
    return or_host(device)->ops->allocate(or_host(device), kind, size_bytes, err, ret_memory);
}

void mu_device_release(struct mu_device *device, enum mu_memory kind, void *memory, size_t size_bytes)
{
    if (memory)
        or_host(device)->ops->release(device, kind, memory, size_bytes);
}

enum mu_status mu_device_copy(struct mu_device *device, void *to, const void *from, size_t size_bytes)
{
    return or_host(device)->ops->copy(device, to, from, size_bytes);
}

enum mu_status mu_device_read(struct mu_device *device, const void *from, size_t size_bytes, const void **ret_view)
{
    MU_ASSERT(size_bytes <= MU_DEVICE_READ_MAX);
    return or_host(device)->ops->read(device, from, size_bytes, ret_view);
}

enum mu_status mu_device_peek(struct mu_device *device, const void *from, size_t size_bytes, const void **ret_view)
{
    MU_ASSERT(size_bytes <= MU_DEVICE_READ_MAX);
    return or_host(device)->ops->peek(device, from, size_bytes, ret_view);
}

enum mu_status mu_device_move(struct mu_device *device, void *to, const void *from, size_t size_bytes)
{
    return or_host(device)->ops->move(device, to, from, size_bytes);
}

bool mu_device_holds(const struct mu_device *device, const void *data)
{
    return device && device->ops->holds(device, data);
}

uint64_t mu_device_mark(struct mu_device *device)
{
    return or_host(device)->ops->mark(device);
}

enum mu_status mu_device_passed(struct mu_device *device, uint64_t mark)
{
    return or_host(device)->ops->passed(device, mark);
}

enum mu_status mu_device_await(struct mu_device *device, uint64_t mark)
{
    return or_host(device)->ops->await(device, mark);
}

void mu_device_use(struct mu_device *device, enum mu_track track)
{
    or_host(device)->ops->use(device, track);
}

void mu_device_signal(struct mu_device *device, enum mu_track track, uint32_t point)
{
    MU_ASSERT(point < MU_DEVICE_POINTS);
    or_host(device)->ops->signal(device, track, point);
}

void mu_device_follow(struct mu_device *device, enum mu_track track, uint32_t point)
{
    MU_ASSERT(point < MU_DEVICE_POINTS);
    or_host(device)->ops->follow(device, track, point);
}

void mu_device_span_begin(struct mu_device *device, enum mu_work work)
{
    or_host(device)->ops->span(device, work, true);
}

void mu_device_span_end(struct mu_device *device, enum mu_work work)
{
    or_host(device)->ops->span(device, work, false);
}

void mu_device_spent_us(struct mu_device *device, uint64_t ret_us[MU_WORKS])
{
    or_host(device)->ops->spent_us(device, ret_us);
}

bool mu_device_replay(struct mu_device *device, const struct mu_device_key *key)
{
    return or_host(device)->ops->replay(device, key);
}

bool mu_device_record_end(struct mu_device *device, enum mu_status *status)
{
    return or_host(device)->ops->record_end(device, status);
}

void mu_device_forget(struct mu_device *device)
{
    or_host(device)->ops->forget(device);
}

bool mu_device_records(const struct mu_device *device)
{
    return device && device->ops->records(device);
}

void mu_device_set_recording(struct mu_device *device, bool on)
{
    or_host(device)->ops->set_recording(device, on);
}
