/* Runs the threads of one block: their order, barriers and exchanges within warps. Private to the emulation. */
#ifndef CUDASIM_ENGINE_H
#define CUDASIM_ENGINE_H

#include <cuda_runtime.h>

#include <functional>
#include <vector>

#include "tests/cudasim/fiber.h"

namespace cudasim
{

enum { BLOCK_THREADS_MAX = 1024, WARP_LANES = 32, WARPS_MAX = BLOCK_THREADS_MAX / WARP_LANES };

/* Seeded random numbers (splitmix64). */
struct random_numbers {
    uint64_t state;
    uint64_t next()
    {
        uint64_t z = state += 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        return z ^ z >> 31;
    }
    uint32_t below(uint32_t limit)
    {
        return static_cast<uint32_t>((next() >> 32) * limit >> 32);
    }
};

struct kernel_launch {
    launch_site site;
    dim3 grid, block;
    size_t shared_bytes;
    std::function<void()> body;
};

enum class thread_state { ready, in_barrier, in_warp, done };

struct cuda_thread {
    cudasim_place place;
    thread_state state;
    fiber *stack; /* nullptr until it starts */
    uint32_t number;
    /* what it brought to its warp or block, and what it gets */
    cudasim_exchange kind;
    uint32_t mask, source;
    int predicate;
    uint32_t answer;
    size_t size;
    unsigned char in[16], out[16];
};

struct warp {
    uint32_t alive, waiting; /* bits of lanes */
};

/* Everything that runs one block at a time. The threads' stacks are kept from block to block. */
struct engine {
    fiber home; /* the thread of the operating system that runs the kernel */
    std::vector<fiber *> idle;
    cuda_thread threads[BLOCK_THREADS_MAX];
    uint32_t ready[BLOCK_THREADS_MAX], ready_count;
    warp warps[WARPS_MAX];
    uint32_t thread_count, done_count, barrier_count, predicate_count;
    cuda_thread *running;
    const kernel_launch *launch;
    void *shared; /* dynamic */
    random_numbers dice;
};

/* The engine that the calling thread runs, or nullptr. */
engine *engine_here();

/* Runs all blocks of a kernel on the calling thread. */
void engine_run(const kernel_launch &launch, uint64_t seed);

[[noreturn]] void engine_fail(const engine *e, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* shared_memory.cpp: what a new block finds in its static shared memory. */
void shared_memory_poison();
enum { POISON = 0xff }; /* NaN in every format, -1 in integers */

} // namespace cudasim

#endif
