/* One block at a time: its threads are taken from the ready ones in a random order; one that finishes hands its stack
 * to the next, so a kernel without barriers needs a single stack; one that waits keeps it.
 *
 *     ready --picked--> runs --returns--> done
 *       ^                 |
 *       +--- released --- +-- barrier (released by the last thread of the block)
 *                         +-- warp exchange (released by the last lane of the mask) */
#include "tests/cudasim/engine.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <condition_variable>
#include <mutex>

__thread struct cudasim_place *cudasim_here;

namespace cudasim
{

static __thread engine *engine_now;

engine *engine_here()
{
    return engine_now;
}

void engine_fail(const engine *e, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    fprintf(stderr, "cudasim: kernel %s (%s:%d), block (%u,%u,%u) of (%u,%u,%u) threads: ", e->launch->site.kernel,
            e->launch->site.file, e->launch->site.line, cudasim_here->block.x, cudasim_here->block.y,
            cudasim_here->block.z, e->launch->block.x, e->launch->block.y, e->launch->block.z);
    vfprintf(stderr, format, list);
    fprintf(stderr, "\n");
    va_end(list);
    for (uint32_t i = 0, told = 0; i < e->thread_count && told < 8; i++) {
        const cuda_thread &t = e->threads[i];
        if (t.state != thread_state::in_barrier && t.state != thread_state::in_warp)
            continue;
        told++;
        fprintf(stderr, "cudasim:   thread (%u,%u,%u) waits in %s", t.place.thread.x, t.place.thread.y,
                t.place.thread.z, t.state == thread_state::in_barrier ? "__syncthreads\n" : "a warp exchange, ");
        if (t.state == thread_state::in_warp)
            fprintf(stderr, "lane %u, mask 0x%08x\n", t.place.lane, t.mask);
    }
    abort();
}

static void __attribute__((noinline)) set_running(engine *e, cuda_thread *t)
{
    e->running = t;
    cudasim_here = &t->place;
}

static void make_ready(engine *e, cuda_thread *t)
{
    t->state = thread_state::ready;
    e->ready[e->ready_count++] = t->number;
}

static cuda_thread *pick(engine *e)
{
    const uint32_t i = e->dice.below(e->ready_count);
    cuda_thread *t = &e->threads[e->ready[i]];
    e->ready[i] = e->ready[--e->ready_count];
    return t;
}

/* All lanes of `lanes` are here: they exchange what they brought. */
static void exchange(engine *e, cuda_thread *first, uint32_t lanes)
{
    cuda_thread *lane0 = &e->threads[first->number / WARP_LANES * WARP_LANES];
    uint32_t ballot = 0;
    for (uint32_t rest = lanes; rest; rest &= rest - 1) {
        const cuda_thread &t = lane0[__builtin_ctz(rest)];
        if (t.mask != first->mask || t.kind != first->kind)
            engine_fail(e, "lanes %u and %u of a warp meet with other masks (0x%08x, 0x%08x) or in other functions",
                        first->place.lane, t.place.lane, first->mask, t.mask);
        if (t.predicate)
            ballot |= 1u << t.place.lane;
    }
    for (uint32_t rest = lanes; rest; rest &= rest - 1) {
        cuda_thread *t = &lane0[__builtin_ctz(rest)];
        t->answer = ballot;
        if (t->kind == CUDASIM_SHFL) {
            if (lanes >> t->source & 1)
                memcpy(t->out, lane0[t->source].in, t->size);
            else
                memset(t->out, POISON, t->size); /* CUDA: undefined */
        }
        make_ready(e, t);
    }
    e->warps[first->number / WARP_LANES].waiting &= ~lanes;
}

/* Lanes that have returned are not waited for. */
static void exchange_if_complete(engine *e, cuda_thread *t)
{
    const warp &w = e->warps[t->number / WARP_LANES];
    const uint32_t lanes = t->mask & w.alive;
    if ((w.waiting & lanes) == lanes)
        exchange(e, t, lanes);
}

static void release_barrier(engine *e)
{
    for (uint32_t i = 0; i < e->thread_count; i++) {
        e->threads[i].answer = e->predicate_count;
        make_ready(e, &e->threads[i]);
    }
    e->barrier_count = e->predicate_count = 0;
}

/* The running thread has nothing to do until it is released. */
static void wait_released(engine *e, cuda_thread *self)
{
    if (e->ready_count == 0)
        engine_fail(e, "its threads wait for each other for ever (%u have returned)", e->done_count);
    cuda_thread *next = pick(e);
    if (next == self) {
        set_running(e, self);
        return;
    }
    if (!next->stack) {
        next->stack = e->idle.back();
        e->idle.pop_back();
    }
    set_running(e, next);
    fiber_switch(self->stack, next->stack);
}

static void returned(engine *e, cuda_thread *t)
{
    t->state = thread_state::done;
    e->done_count++;
    if (e->barrier_count > 0)
        engine_fail(e, "thread (%u,%u,%u) returned while others wait in __syncthreads", t->place.thread.x,
                    t->place.thread.y, t->place.thread.z);
    warp *w = &e->warps[t->number / WARP_LANES];
    w->alive &= ~(1u << t->place.lane);
    for (uint32_t rest = w->waiting; rest; rest &= rest - 1) {
        const uint32_t lane = static_cast<uint32_t>(__builtin_ctz(rest));
        if (w->waiting >> lane & 1)
            exchange_if_complete(e, &e->threads[t->number / WARP_LANES * WARP_LANES + lane]);
    }
}

/* What every stack does: threads of the engine, one after the other, for ever. */
static void run_threads(void *user)
{
    engine *e = static_cast<engine *>(user);
    for (;;) {
        cuda_thread *t = e->running;
        fiber *self = t->stack;
        e->launch->body();
        returned(e, t);
        if (e->done_count == e->thread_count) {
            e->idle.push_back(self);
            fiber_switch(self, &e->home);
            continue;
        }
        if (e->ready_count == 0)
            engine_fail(e, "its threads wait for each other for ever (%u have returned)", e->done_count);
        cuda_thread *next = pick(e);
        set_running(e, next);
        if (!next->stack) {
            next->stack = self;
            continue;
        }
        e->idle.push_back(self);
        fiber_switch(self, next->stack);
    }
}

static void set_block(engine *e, uint64_t block)
{
    const kernel_launch &l = *e->launch;
    const uint3 index = {static_cast<unsigned>(block % l.grid.x), static_cast<unsigned>(block / l.grid.x % l.grid.y),
                         static_cast<unsigned>(block / l.grid.x / l.grid.y)};
    e->done_count = e->barrier_count = e->predicate_count = e->ready_count = 0;
    for (uint32_t i = 0; i < e->thread_count; i++) {
        cuda_thread *t = &e->threads[i];
        t->place.thread = {i % l.block.x, i / l.block.x % l.block.y, i / l.block.x / l.block.y};
        t->place.block = index;
        t->place.block_size = l.block;
        t->place.grid_size = l.grid;
        t->place.lane = i % WARP_LANES;
        t->number = i;
        t->stack = nullptr;
        t->predicate = 0;
        make_ready(e, t);
    }
    for (uint32_t w = 0; w * WARP_LANES < e->thread_count; w++) {
        const uint32_t lanes = e->thread_count - w * WARP_LANES;
        e->warps[w] = {lanes >= WARP_LANES ? 0xffffffffu : (1u << lanes) - 1, 0};
    }
}

static void run_block(engine *e, uint64_t block)
{
    set_block(e, block);
    shared_memory_poison();
    if (e->shared)
        memset(e->shared, POISON, e->launch->shared_bytes);
    cuda_thread *first = pick(e);
    first->stack = e->idle.back();
    e->idle.pop_back();
    set_running(e, first);
    fiber_switch(&e->home, first->stack);
}

/* ---- engines: as many as kernels may run at once ---- */

static std::mutex engines_lock;
static std::condition_variable engines_free;
static auto &engines = *new std::vector<engine *>; /* outlives the exit of the process, like what it points to */
static int engines_made;

static engine *engine_take()
{
    static const char *limit_text = getenv("CUDASIM_THREADS");
    static const int limit = limit_text && atoi(limit_text) > 0 ? atoi(limit_text) : 2;
    std::unique_lock<std::mutex> hold(engines_lock);
    if (engines.empty() && engines_made < limit) {
        engines_made++;
        return new engine();
    }
    engines_free.wait(hold, [] { return !engines.empty(); });
    engine *e = engines.back();
    engines.pop_back();
    return e;
}

static void engine_give(engine *e)
{
    {
        std::lock_guard<std::mutex> hold(engines_lock);
        engines.push_back(e);
    }
    engines_free.notify_one();
}

/* A stride without a common divisor visits every block once, in an order that nobody expects. */
static uint64_t random_stride(random_numbers *dice, uint64_t count)
{
    for (;;) {
        uint64_t stride = 1 + dice->next() % count, a = stride, b = count;
        while (b) {
            const uint64_t rest = a % b;
            a = b;
            b = rest;
        }
        if (a == 1)
            return stride;
    }
}

void engine_run(const kernel_launch &launch, uint64_t seed)
{
    engine *e = engine_take();
    e->launch = &launch;
    e->thread_count = launch.block.x * launch.block.y * launch.block.z;
    e->dice.state = seed;
    e->shared = launch.shared_bytes ? aligned_alloc(128, (launch.shared_bytes + 127) / 128 * 128) : nullptr;
    while (e->idle.size() < e->thread_count)
        e->idle.push_back(fiber_new(run_threads, e));
    fiber_adopt(&e->home);
    engine_now = e;
    const uint64_t blocks = static_cast<uint64_t>(launch.grid.x) * launch.grid.y * launch.grid.z;
    const uint64_t stride = random_stride(&e->dice, blocks);
    uint64_t block = e->dice.next() % blocks;
    for (uint64_t i = 0; i < blocks; i++) {
        run_block(e, block);
        block = (block + stride) % blocks;
    }
    engine_now = nullptr;
    cudasim_here = nullptr;
    free(e->shared);
    e->shared = nullptr;
    engine_give(e);
}

} // namespace cudasim

/* ---- what device code calls ---- */

using namespace cudasim;

void *cudasim_dynamic_shared(void)
{
    engine *e = engine_here();
    if (!e->shared)
        engine_fail(e, "dynamic shared memory was not asked for at the launch");
    return e->shared;
}

int cudasim_block_barrier(int predicate)
{
    engine *e = engine_here();
    cuda_thread *self = e->running;
    if (e->done_count > 0)
        engine_fail(e, "thread (%u,%u,%u) calls __syncthreads after %u threads have returned", self->place.thread.x,
                    self->place.thread.y, self->place.thread.z, e->done_count);
    self->state = thread_state::in_barrier;
    e->predicate_count += predicate ? 1 : 0;
    if (++e->barrier_count == e->thread_count)
        release_barrier(e);
    wait_released(e, self);
    return static_cast<int>(self->answer);
}

static cuda_thread *warp_wait(enum cudasim_exchange kind, unsigned int mask)
{
    engine *e = engine_here();
    cuda_thread *self = e->running;
    self->kind = kind;
    self->mask = mask;
    if (!(mask >> self->place.lane & 1))
        engine_fail(e, "lane %u is not in the mask 0x%08x that it gives", self->place.lane, mask);
    self->state = thread_state::in_warp;
    e->warps[self->number / WARP_LANES].waiting |= 1u << self->place.lane;
    exchange_if_complete(e, self);
    wait_released(e, self);
    return self;
}

void cudasim_warp_exchange(enum cudasim_exchange kind, unsigned int mask, unsigned int source, const void *mine,
                           size_t size, void *ret)
{
    cuda_thread *self = engine_here()->running;
    self->source = source % WARP_LANES;
    self->size = size;
    self->predicate = 0;
    if (size)
        memcpy(self->in, mine, size);
    warp_wait(kind, mask);
    if (size)
        memcpy(ret, self->out, size);
}

unsigned int cudasim_warp_ballot(unsigned int mask, int predicate)
{
    engine_here()->running->predicate = predicate != 0;
    return warp_wait(CUDASIM_BALLOT, mask)->answer;
}

void cudasim_trap(const char *why)
{
    engine_fail(engine_here(), "%s", why);
}
