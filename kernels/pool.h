/* Thread pool of one worker: runs numbered tasks on a fixed set of threads.
 *
 * Tasks are taken with one atomic counter, so which thread runs which task is not defined; a task must therefore write
 * only what its number owns, and the result of a run never depends on the number of threads. The calling thread is
 * thread 0 and takes part; a pool of one thread creates none. Every pool thread runs with MXCSR 0x1F80 (round to
 * nearest, denormals kept) and with all signals blocked; the caller's MXCSR is set at each run.
 *
 * A pool belongs to one thread at a time: mu_pool_run must not be called concurrently or from inside a task. */
#ifndef MU_KERNELS_POOL_H
#define MU_KERNELS_POOL_H

#ifdef __cplusplus /* CUDA sources: C++ has C's atomic types under its own names */
#include <atomic>
using std::atomic_bool;
using std::atomic_load_explicit;
using std::memory_order_relaxed;
#else
#include <stdatomic.h>
#endif
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

enum {
    MU_POOL_THREADS_MAX = 256,
    MU_LANE_SCRATCH_BYTES =
        4 << 20, /* private scratch of each thread, 64-byte aligned, content undefined between tasks */
};

struct mu_pool;
struct mu_device;
struct mu_kernel_ops;

/* What a task may know of the thread it runs on: scratch memory, and whether to go on. */
struct mu_lane {
    uint32_t index; /* 0 = the caller; for statistics only, never for results */
    void *scratch;  /* MU_LANE_SCRATCH_BYTES */
    const atomic_bool *cancel;
    void (*poll)(void *ctx); /* the caller's lane only */
    void *poll_ctx;
};

/* Long tasks call it every millisecond or so: lets the poll hook run, and says whether the task should give up. */
static inline bool mu_lane_pause(const struct mu_lane *lane)
{
    if (lane->poll)
        lane->poll(lane->poll_ctx);
    return lane->cancel && atomic_load_explicit(lane->cancel, memory_order_relaxed);
}

typedef void mu_task_fn(void *arg, uint32_t task, const struct mu_lane *lane);

/* Number of CPUs in this process's affinity mask (at least 1, at most MU_POOL_THREADS_MAX). */
uint32_t mu_pool_default_threads(void);

/* `threads` counts the caller; 0 means mu_pool_default_threads(). */
enum mu_status mu_pool_new(uint32_t threads, struct mu_error *err, struct mu_pool **ret_pool) MU_WARN_UNUSED;
void mu_pool_free(struct mu_pool *pool);
uint32_t mu_pool_threads(const struct mu_pool *pool);

/* The device that the operations of kernels.h run on for this pool, and whose memory they work on (kernels/device.h). A
 * new pool computes on its threads: the host (NULL). It must outlive the pool. Set between runs only. */
void mu_pool_bind(struct mu_pool *pool, struct mu_device *device);
struct mu_device *mu_pool_device(const struct mu_pool *pool);
const struct mu_kernel_ops *mu_pool_ops(const struct mu_pool *pool);
/* Until the device has done all that it was told; the poll hook runs meanwhile. MU_ERR_CANCELLED: it has, but the
 * cancel flag is set. Nothing to do for the host. */
enum mu_status mu_pool_wait(struct mu_pool *pool) MU_WARN_UNUSED;

/* While *cancel is true, remaining tasks are skipped and mu_pool_run returns MU_ERR_CANCELLED; running tasks end by
 * themselves (a few milliseconds at most: long ones look at the flag, mu_lane_pause). NULL = never. Set between runs
 * only. */
void mu_pool_set_cancel(struct mu_pool *pool, const atomic_bool *cancel);
bool mu_pool_cancelled(const struct mu_pool *pool);

/* `poll(ctx)` is called by the calling thread between its tasks, in long ones, and while it waits for the others:
 * progress of communication. It must be short and must not use the pool. NULL = none. Set between runs only. */
void mu_pool_set_poll(struct mu_pool *pool, void (*poll)(void *ctx), void *ctx);
/* Runs the hook once, if there is one (for long serial stretches of the caller). */
void mu_pool_poll(struct mu_pool *pool);

/* Runs fn(arg, 0..task_count-1, lane) and returns when all have ended. MU_OK or MU_ERR_CANCELLED; after a cancelled run
 * the outputs are undefined. */
enum mu_status mu_pool_run(struct mu_pool *pool, uint32_t task_count, mu_task_fn *fn, void *arg) MU_WARN_UNUSED;

/* Scratch of thread `index`, between runs: for order-free results kept per thread. */
void *mu_pool_lane_scratch(struct mu_pool *pool, uint32_t index);

/* MXCSR 0x1F80 on the calling thread; whether it has that value. Libraries change it: assert at boundaries. */
void mu_fp_environment_set(void);
bool mu_fp_environment_ok(void);

#endif
