#include "kernels/pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#if defined(__x86_64__)
#include <xmmintrin.h>

#include "common/thread.h"
#endif

#include "kernels/device.h"
#include "kernels/kernel_ops.h"

enum {
    FP_ENVIRONMENT = 0x1f80, /* MXCSR: all exceptions masked, round to nearest, no flush to zero */
    FP_STATUS_MASK = 0x3f,   /* sticky flags, no part of the environment */
    SPIN_COUNT = 600,   /* pauses before sleeping: 10 to 20 us; longer would steal from other workers on the host */
    POLL_WAIT_US = 100, /* between calls of the poll hook while the caller sleeps */
    WAIT_LOOKS = 50,    /* at a device's progress before naps between them */
    NAP_NS = 20000,
};

/* A run in progress.
 *
 *   ticket = run number (high 32 bits) | tasks not yet taken (low 32 bits)
 *
 * A thread takes a task by lowering the ticket by one; the run number makes the exchange fail when the run it looked at
 * is over. Holding a task keeps the run alive (the caller waits for `completed`), so fn, arg and count may be read
 * after that. Threads that are late, or asleep, are not waited for. */
struct mu_pool {
    _Alignas(64) atomic_uint_fast64_t ticket;
    _Alignas(64) atomic_uint_fast32_t completed;
    mu_task_fn *fn;
    void *arg;
    uint32_t count;
    atomic_bool skipped; /* a task of this run was not executed */

    _Alignas(64) pthread_mutex_t mutex;
    pthread_cond_t work, done;
    atomic_uint_fast32_t sleepers;
    atomic_bool caller_waits, stop;

    struct mu_device *device;
    const atomic_bool *cancel;
    void (*poll)(void *ctx);
    void *poll_ctx;
    uint32_t threads, run;
    pthread_t *handles;
    struct mu_lane *lanes;
    struct worker_start {
        struct mu_pool *pool;
        uint32_t index;
    } * starts;
    char *scratch;
    size_t scratch_bytes;
};

void mu_fp_environment_set(void)
{
#if defined(__x86_64__)
    _mm_setcsr(FP_ENVIRONMENT);
#endif
}

bool mu_fp_environment_ok(void)
{
#if defined(__x86_64__)
    return (_mm_getcsr() & ~(unsigned)FP_STATUS_MASK) == FP_ENVIRONMENT;
#else
    return true;
#endif
}

static void pause_cpu(void)
{
#if defined(__x86_64__)
    _mm_pause();
#endif
}

uint32_t mu_pool_default_threads(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0)
        return 1; /* more than 1024 CPUs: the caller has to say how many */
    int count = CPU_COUNT(&set);
    return count < 1 ? 1 : count > MU_POOL_THREADS_MAX ? MU_POOL_THREADS_MAX : (uint32_t)count;
}

static bool cancelled(const struct mu_pool *pool)
{
    return pool->cancel && atomic_load_explicit(pool->cancel, memory_order_acquire);
}

static uint32_t tasks_left(uint64_t ticket)
{
    return (uint32_t)ticket;
}

/* Takes and executes one task. Returns false when none is left. */
static bool run_one(struct mu_pool *pool, const struct mu_lane *lane)
{
    uint64_t ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
    do {
        if (tasks_left(ticket) == 0)
            return false;
    } while (!atomic_compare_exchange_weak_explicit(&pool->ticket, &ticket, ticket - 1, memory_order_acq_rel,
                                                    memory_order_acquire));
    uint32_t count = pool->count;
    if (cancelled(pool))
        atomic_store_explicit(&pool->skipped, true, memory_order_relaxed);
    else
        pool->fn(pool->arg, count - tasks_left(ticket), lane);
    if (atomic_fetch_add_explicit(&pool->completed, 1, memory_order_seq_cst) + 1 == count &&
        atomic_load_explicit(&pool->caller_waits, memory_order_seq_cst)) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_signal(&pool->done);
        pthread_mutex_unlock(&pool->mutex);
    }
    return true;
}

static bool has_work(struct mu_pool *pool)
{
    return tasks_left(atomic_load_explicit(&pool->ticket, memory_order_seq_cst)) > 0;
}

static void sleep_until_work(struct mu_pool *pool)
{
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add_explicit(&pool->sleepers, 1, memory_order_seq_cst);
    while (!has_work(pool) && !atomic_load_explicit(&pool->stop, memory_order_relaxed))
        pthread_cond_wait(&pool->work, &pool->mutex);
    atomic_fetch_sub_explicit(&pool->sleepers, 1, memory_order_relaxed);
    pthread_mutex_unlock(&pool->mutex);
}

static void *worker_main(void *arg)
{
    const struct worker_start *start = arg;
    pthread_setname_np(pthread_self(), "compute");
    struct mu_pool *pool = start->pool;
    mu_fp_environment_set();
    while (!atomic_load_explicit(&pool->stop, memory_order_relaxed)) {
        while (run_one(pool, &pool->lanes[start->index]))
            ;
        for (int spin = 0; spin < SPIN_COUNT && !has_work(pool); spin++)
            pause_cpu();
        if (!has_work(pool))
            sleep_until_work(pool);
    }
    return NULL;
}

static enum mu_status pool_allocate(struct mu_pool *pool, uint32_t threads)
{
    pool->handles = calloc(threads, sizeof *pool->handles);
    pool->lanes = calloc(threads, sizeof *pool->lanes);
    pool->starts = calloc(threads, sizeof *pool->starts);
    size_t scratch_bytes = (size_t)threads * MU_LANE_SCRATCH_BYTES;
    void *scratch =
        mmap(NULL, scratch_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (scratch == MAP_FAILED)
        return MU_ERR_NO_MEMORY;
    pool->scratch = scratch;
    pool->scratch_bytes = scratch_bytes;
    (void)madvise(scratch, scratch_bytes, MADV_HUGEPAGE);
    return pool->handles && pool->lanes && pool->starts ? MU_OK : MU_ERR_NO_MEMORY;
}

static int start_worker(struct mu_pool *pool, uint32_t index)
{
    pool->starts[index] = (struct worker_start){pool, index};
    return mu_thread_start(&pool->handles[index], worker_main, &pool->starts[index]);
}

static struct mu_pool *pool_create(void)
{
    struct mu_pool *pool = aligned_alloc(64, (sizeof *pool + 63) / 64 * 64);
    if (!pool)
        return NULL;
    memset(pool, 0, sizeof *pool);
    pool->device = mu_host_device();
    atomic_init(&pool->ticket, 0);
    atomic_init(&pool->completed, 0);
    atomic_init(&pool->skipped, false);
    atomic_init(&pool->sleepers, 0);
    atomic_init(&pool->caller_waits, false);
    atomic_init(&pool->stop, false);
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&pool->work, &attributes);
    pthread_cond_init(&pool->done, &attributes);
    pthread_condattr_destroy(&attributes);
    return pool;
}

enum mu_status mu_pool_new(uint32_t threads, struct mu_error *err, struct mu_pool **ret_pool)
{
    if (threads == 0)
        threads = mu_pool_default_threads();
    if (threads > MU_POOL_THREADS_MAX)
        return mu_fail(err, MU_ERR_INVALID, "threads: %u is not allowed: at most %d in one pool", threads,
                       MU_POOL_THREADS_MAX);
    struct mu_pool *pool = pool_create();
    if (!pool)
        return mu_fail(err, MU_ERR_NO_MEMORY, "thread pool: out of memory");
    enum mu_status status = pool_allocate(pool, threads);
    if (status != MU_OK) {
        mu_fail(err, status, "thread pool: out of memory for %u threads", threads);
        goto fail;
    }
    pool->threads = 1; /* those that run, and that mu_pool_free joins */
    for (uint32_t i = 0; i < threads; i++)
        pool->lanes[i] = (struct mu_lane){i, pool->scratch + (size_t)i * MU_LANE_SCRATCH_BYTES, NULL, NULL, NULL};
    for (uint32_t i = 1; i < threads; i++) {
        int error = start_worker(pool, i);
        if (error) {
            status = mu_fail_errno(err, error, "thread pool: cannot start thread %u of %u", i + 1, threads);
            goto fail;
        }
        pool->threads++;
    }
    mu_fp_environment_set();
    *ret_pool = pool;
    return MU_OK;
fail:
    mu_pool_free(pool);
    return status;
}

void mu_pool_free(struct mu_pool *pool)
{
    if (!pool)
        return;
    pthread_mutex_lock(&pool->mutex);
    atomic_store_explicit(&pool->stop, true, memory_order_relaxed);
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
    for (uint32_t i = 1; i < pool->threads; i++)
        pthread_join(pool->handles[i], NULL);
    if (pool->scratch)
        munmap(pool->scratch, pool->scratch_bytes);
    pthread_cond_destroy(&pool->work);
    pthread_cond_destroy(&pool->done);
    pthread_mutex_destroy(&pool->mutex);
    free(pool->handles);
    free(pool->lanes);
    free(pool->starts);
    free(pool);
}

uint32_t mu_pool_threads(const struct mu_pool *pool)
{
    return pool->threads;
}

void mu_pool_bind(struct mu_pool *pool, struct mu_device *device)
{
    pool->device = device ? device : mu_host_device();
}

struct mu_device *mu_pool_device(const struct mu_pool *pool)
{
    return pool->device;
}

const struct mu_kernel_ops *mu_pool_ops(const struct mu_pool *pool)
{
    return pool->device->kernels;
}

/* A cancelled run is not left before the device is done with it: it would write to buffers that have other uses. */
enum mu_status mu_pool_wait(struct mu_pool *pool)
{
    if (mu_device_is_host(pool->device))
        return MU_OK;
    const struct timespec nap = {.tv_nsec = NAP_NS};
    uint64_t mark = mu_device_mark(pool->device);
    enum mu_status status;
    for (uint32_t looks = 0; (status = mu_device_passed(pool->device, mark)) == MU_ERR_BUSY; looks++) {
        mu_pool_poll(pool);
        if (looks >= WAIT_LOOKS)
            nanosleep(&nap, NULL);
    }
    return status == MU_OK && cancelled(pool) ? MU_ERR_CANCELLED : status;
}

void mu_pool_set_cancel(struct mu_pool *pool, const atomic_bool *cancel)
{
    pool->cancel = cancel;
    for (uint32_t i = 0; i < pool->threads; i++)
        pool->lanes[i].cancel = cancel;
}

bool mu_pool_cancelled(const struct mu_pool *pool)
{
    return cancelled(pool);
}

void mu_pool_set_poll(struct mu_pool *pool, void (*poll)(void *ctx), void *ctx)
{
    pool->poll = poll;
    pool->poll_ctx = ctx;
    pool->lanes[0].poll = poll;
    pool->lanes[0].poll_ctx = ctx;
}

void mu_pool_poll(struct mu_pool *pool)
{
    if (pool->poll)
        pool->poll(pool->poll_ctx);
}

static bool all_completed(struct mu_pool *pool)
{
    return atomic_load_explicit(&pool->completed, memory_order_seq_cst) == pool->count;
}

/* Other threads still execute tasks: spin a little, then sleep; keep the poll hook going either way. */
static void wait_completed(struct mu_pool *pool)
{
    for (int spin = 0; spin < SPIN_COUNT && !all_completed(pool); spin++)
        pause_cpu();
    while (!all_completed(pool)) {
        mu_pool_poll(pool);
        pthread_mutex_lock(&pool->mutex);
        atomic_store_explicit(&pool->caller_waits, true, memory_order_seq_cst);
        if (!all_completed(pool)) {
            if (pool->poll) {
                struct timespec until;
                clock_gettime(CLOCK_MONOTONIC, &until);
                until.tv_nsec += POLL_WAIT_US * 1000;
                until.tv_sec += until.tv_nsec / 1000000000;
                until.tv_nsec %= 1000000000;
                pthread_cond_timedwait(&pool->done, &pool->mutex, &until);
            } else {
                pthread_cond_wait(&pool->done, &pool->mutex);
            }
        }
        atomic_store_explicit(&pool->caller_waits, false, memory_order_relaxed);
        pthread_mutex_unlock(&pool->mutex);
    }
}

static void wake_workers(struct mu_pool *pool)
{
    if (atomic_load_explicit(&pool->sleepers, memory_order_seq_cst) == 0)
        return;
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
}

enum mu_status mu_pool_run(struct mu_pool *pool, uint32_t task_count, mu_task_fn *fn, void *arg)
{
    mu_fp_environment_set();
    if (task_count == 0)
        return cancelled(pool) ? MU_ERR_CANCELLED : MU_OK;
    pool->fn = fn;
    pool->arg = arg;
    pool->count = task_count;
    atomic_store_explicit(&pool->completed, 0, memory_order_relaxed);
    atomic_store_explicit(&pool->skipped, false, memory_order_relaxed);
    pool->run++;
    atomic_store_explicit(&pool->ticket, (uint64_t)pool->run << 32 | task_count, memory_order_seq_cst);
    if (pool->threads > 1 && task_count > 1)
        wake_workers(pool);
    while (run_one(pool, &pool->lanes[0]))
        mu_pool_poll(pool);
    wait_completed(pool);
    bool skipped = atomic_load_explicit(&pool->skipped, memory_order_relaxed);
    return skipped || cancelled(pool) ? MU_ERR_CANCELLED : MU_OK;
}

void *mu_pool_lane_scratch(struct mu_pool *pool, uint32_t index)
{
    MU_ASSERT(index < pool->threads);
    return pool->lanes[index].scratch;
}
