/* A device: where the operations of a pool run (kernels/kernels.h), and the memory that they work on.
 *
 *   host   operations are done when they return; arrays are ordinary memory
 *   GPU    operations are enqueued, and done one after the other; the host cannot touch arrays, it can only have them
 *          copied (kernels/cuda/cuda.h)
 *
 * What is written for a GPU is right for the host too. Memory comes in two kinds, and as spaces and arenas of them
 * (kernels/arena.h). Order: an operation or a mu_device_copy sees what those before it have left; mu_pool_wait
 * (kernels/pool.h) waits for all of them. Beside that order stand mu_device_move and mu_device_peek, for what no
 * operation under way touches: marks tell when that is so. And so do tracks, which are orders of their own: what goes
 * between GPUs stands there, so that it moves while the operations of the main one run; points join them.
 *
 * One thread at a time uses a device, the owner of its pool. A device that failed stays so: every call returns the
 * failure, and mu_device_trouble says what it was. Where a device may be NULL, that is the host. */
#ifndef MU_KERNELS_DEVICE_H
#define MU_KERNELS_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

enum mu_memory {
    MU_MEMORY_DEVICE, /* arrays of operations */
    MU_MEMORY_PINNED, /* the host's, for copies without a detour */
};

/* What operands of matrix products and of attention are rounded to; all else is fp32. */
enum mu_dtype { MU_DTYPE_FP32, MU_DTYPE_BF16 };

/* Orders of operations: the one of all that compute, and those of exchanges beside it (worker/comm_nccl.h). */
enum mu_track { MU_TRACK_MAIN, MU_TRACK_REPLICAS, MU_TRACK_STAGES, MU_TRACK_TIED, MU_TRACKS };

/* What a GPU's time is measured of. */
enum mu_work { MU_WORK_FORWARD, MU_WORK_BACKWARD, MU_WORKS };

enum {
    MU_DEVICE_READ_MAX = 1 << 20,
    MU_DEVICE_NAME_SIZE = 16,
    MU_DEVICE_UUID_SIZE = 48,
    MU_DEVICE_POINTS = 32,
    MU_DEVICE_SPANS = 512, /* measured ones of one mu_device_spent_us */
};

struct mu_device;
struct mu_device_key;
struct mu_kernel_ops;
struct mu_pool;
struct mu_kernel_shapes;
struct mu_kernel_identity;

/* What a device can do beside computing: the functions below, which say what each means. */
struct mu_device_ops {
    enum mu_status (*enter)(struct mu_device *device, struct mu_error *err);
    void (*close)(struct mu_device *device);
    enum mu_status (*compute)(struct mu_device *device, enum mu_dtype dtype, struct mu_error *err);
    void (*memory)(struct mu_device *device, uint64_t *ret_free_bytes, uint64_t *ret_total_bytes);
    enum mu_status (*identity)(struct mu_pool *pool, const struct mu_kernel_shapes *shapes, struct mu_error *err,
                               struct mu_kernel_identity *ret_identity);
    enum mu_status (*allocate)(struct mu_device *device, enum mu_memory kind, size_t size_bytes, struct mu_error *err,
                               void **ret_memory);
    void (*release)(struct mu_device *device, enum mu_memory kind, void *memory, size_t size_bytes);
    enum mu_status (*reserve)(struct mu_device *device, size_t size_bytes, struct mu_error *err, void **ret_base);
    void (*unreserve)(struct mu_device *device, void *base, size_t size_bytes);
    enum mu_status (*back)(struct mu_device *device, void *at, size_t size_bytes, struct mu_error *err);
    bool (*unback)(struct mu_device *device, void *at, size_t size_bytes);
    enum mu_status (*copy)(struct mu_device *device, void *to, const void *from, size_t size_bytes);
    enum mu_status (*read)(struct mu_device *device, const void *from, size_t size_bytes, const void **ret_view);
    enum mu_status (*peek)(struct mu_device *device, const void *from, size_t size_bytes, const void **ret_view);
    enum mu_status (*move)(struct mu_device *device, void *to, const void *from, size_t size_bytes);
    bool (*holds)(const struct mu_device *device, const void *data);
    uint64_t (*mark)(struct mu_device *device);
    enum mu_status (*passed)(struct mu_device *device, uint64_t mark);
    enum mu_status (*await)(struct mu_device *device, uint64_t mark);
    void (*use)(struct mu_device *device, enum mu_track track);
    void (*signal)(struct mu_device *device, enum mu_track track, uint32_t point);
    void (*follow)(struct mu_device *device, enum mu_track track, uint32_t point);
    void (*span)(struct mu_device *device, enum mu_work work, bool begin);
    void (*spent_us)(struct mu_device *device, uint64_t ret_us[MU_WORKS]);
    bool (*replay)(struct mu_device *device, const struct mu_device_key *key);
    bool (*record_end)(struct mu_device *device, enum mu_status *status);
    void (*forget)(struct mu_device *device);
    bool (*records)(const struct mu_device *device);
    void (*set_recording)(struct mu_device *device, bool on);
};

struct mu_device {
    const struct mu_device_ops *ops;
    const struct mu_kernel_ops *kernels;
    /* Called again and again while the host waits for operations in their order; NULL: nothing. Those that would never
     * end it ends. */
    void (*watch)(void *ctx);
    void *watch_ctx;
    bool bf16;                        /* it can compute in it */
    size_t page_bytes;                /* of spaces; 0: the system's */
    char name[MU_DEVICE_NAME_SIZE];   /* "cpu", "cuda:0" */
    char uuid[MU_DEVICE_UUID_SIZE];   /* of a GPU, the same in all processes: "GPU-5fd4..."; else empty */
    char bus_id[MU_DEVICE_NAME_SIZE]; /* of a GPU: "0000:10:00.0"; else empty */
    const struct mu_error *error;     /* status MU_OK until it fails */
};

struct mu_device *mu_host_device(void);

/* GPU number `index` of this host, computing in exact fp32. workspace_bytes 0: the kernels' default. MU_ERR_UNAVAILABLE
 * and one line when it cannot be used: no driver, one that is too old, no such GPU, no code for it, taken;
 * MU_ERR_INVALID from a build without GPU support. */
enum mu_status mu_device_open_cuda(uint32_t index, size_t workspace_bytes, struct mu_error *err,
                                   struct mu_device **ret_device) MU_WARN_UNUSED;
/* How many GPUs this program could use, as far as the driver shows them; 0 without one, or without GPU support. Starts
 * the driver in this process, threads and all. */
uint32_t mu_device_count_cuda(void);
/* All of its memory must have been given back. The host, and NULL, are fine. */
void mu_device_close(struct mu_device *device);

static inline bool mu_device_is_host(const struct mu_device *device)
{
    return !device || device == mu_host_device();
}

/* Between jobs, on the thread that uses it: operations of its pools compute in `dtype` from now on. MU_ERR_INVALID and
 * one line when the device cannot. */
enum mu_status mu_device_compute(struct mu_device *device, enum mu_dtype dtype, struct mu_error *err) MU_WARN_UNUSED;
/* The calling thread is the one that uses the device from now on. */
enum mu_status mu_device_enter(struct mu_device *device, struct mu_error *err) MU_WARN_UNUSED;
void mu_device_memory(struct mu_device *device, uint64_t *ret_free_bytes, uint64_t *ret_total_bytes);
/* What the device failed of; NULL: it works. */
const char *mu_device_trouble(const struct mu_device *device);

/* Zeroed, and backed; size and kind are needed again to give it back. */
enum mu_status mu_device_allocate(struct mu_device *device, enum mu_memory kind, size_t size_bytes,
                                  struct mu_error *err, void **ret_memory) MU_WARN_UNUSED;
void mu_device_release(struct mu_device *device, enum mu_memory kind, void *memory, size_t size_bytes);

/* Between arrays, pinned and any other memory of the host, in the order of the operations. `from` in host memory may be
 * written again at once when it is not pinned. */
enum mu_status mu_device_copy(struct mu_device *device, void *to, const void *from, size_t size_bytes) MU_WARN_UNUSED;
/* What lies in an array after all operations so far, for the host to look at until the device is used again: the array
 * itself, or a copy of it. At most MU_DEVICE_READ_MAX bytes. */
enum mu_status mu_device_read(struct mu_device *device, const void *from, size_t size_bytes,
                              const void **ret_view) MU_WARN_UNUSED;

/* ---- beside the order of the operations ---- */

/* As read and copy, but at once: of what no operation under way writes, to where none looks. Done on return. */
enum mu_status mu_device_peek(struct mu_device *device, const void *from, size_t size_bytes,
                              const void **ret_view) MU_WARN_UNUSED;
enum mu_status mu_device_move(struct mu_device *device, void *to, const void *from, size_t size_bytes) MU_WARN_UNUSED;
/* Does the address lie in memory that the host cannot touch? */
bool mu_device_holds(const struct mu_device *device, const void *data);
/* A place in the order: after everything that was given so far. Marks ascend. */
uint64_t mu_device_mark(struct mu_device *device);
/* Is everything before the mark done? MU_ERR_BUSY: not yet. */
enum mu_status mu_device_passed(struct mu_device *device, uint64_t mark) MU_WARN_UNUSED;
enum mu_status mu_device_await(struct mu_device *device, uint64_t mark) MU_WARN_UNUSED;

/* ---- tracks: the host waits for nothing here; a failure shows with the next operation ---- */

/* Operations and copies that are given from now on stand on this track. Of another one than the main only those that
 * need no workspace (mu_kernel_add, mu_device_copy), and nothing that waits or marks: that is of the main one. */
void mu_device_use(struct mu_device *device, enum mu_track track);
/* Point number `point` (below MU_DEVICE_POINTS; the caller shares them out) is reached when all is done that the track
 * was given so far: signalled again, it forgets where it was. What a track is given after `follow` begins when the
 * point, as it stands at that time, is reached; at once if it was never signalled. */
void mu_device_signal(struct mu_device *device, enum mu_track track, uint32_t point);
void mu_device_follow(struct mu_device *device, enum mu_track track, uint32_t point);

/* ---- how long a GPU works: calls return before it has begun ---- */

/* Between these two the main track works, or waits for nothing but its own operations and those of its tensor group.
 * Not one inside the other. Of the host nothing is measured. */
void mu_device_span_begin(struct mu_device *device, enum mu_work work);
void mu_device_span_end(struct mu_device *device, enum mu_work work);
/* Microseconds of each work since the last call; the device must have been waited for since. Where there were more than
 * MU_DEVICE_SPANS, those that were not measured are taken for as long as the others. */
void mu_device_spent_us(struct mu_device *device, uint64_t ret_us[MU_WORKS]);

/* ---- recordings: what a GPU is given again and again, it takes as a whole (CUDA graphs) ----
 *
 *   if (!mu_device_replay(device, &key))
 *       do {
 *           status = ... operations of the main track, copies between its arrays, exchanges of a tensor group on it
 *       } while (mu_device_record_end(device, &status));
 *
 * The first time they are given as ever, the second time they are recorded. The host never records. Whoever exchanges
 * in them must do so with all its peers: NCCL wants all of them to have recorded an operation, or none. */

/* All that they depend on but what lies in arrays. */
struct mu_device_key {
    const void *arrays[5];
    uint64_t numbers[4];
};
/* True: they have been given, from the recording. */
bool mu_device_replay(struct mu_device *device, const struct mu_device_key *key);
/* True: there can be no recording, and they have not been given yet. *status other than MU_OK: they count for nothing.
 */
bool mu_device_record_end(struct mu_device *device, enum mu_status *status);
/* Does it record? Not when it was told not to, nor once it could not, for want of memory for instance: then everything
 * is given one by one. */
bool mu_device_records(const struct mu_device *device);
void mu_device_set_recording(struct mu_device *device, bool on);
/* Before arrays are given back, or communicators that are used in recordings are given up. */
void mu_device_forget(struct mu_device *device);

#endif
