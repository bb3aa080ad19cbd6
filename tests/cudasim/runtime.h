/* Inside of the emulated runtime: what its files, and the stand-ins of cublasLt, NCCL and NVML, share.
 *
 * A stream is a thread with a queue. It begins late on purpose: work starts after a random delay, or as soon as
 * somebody waits for it. So what reads results without waiting finds poison, nearly always. Objects that were destroyed
 * stay allocated and are recognised: using one is an error, as it should be in CUDA. */
#ifndef CUDASIM_RUNTIME_H
#define CUDASIM_RUNTIME_H

#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "tests/cudasim/engine.h"

namespace cudasim
{

/* ---- devices and errors: device.cpp ---- */

struct device {
    int index;
    std::string name;
    int major, minor, multiprocessors;
    size_t bytes;
    std::atomic<size_t> used{0};
    std::atomic<int> sticky{cudaSuccess}; /* once a kernel failed, everything fails */
    CUstream_st *null_stream;
};

int device_count();
device &device_at(int index);
device &device_here();
void device_set_here(int index);
cudaUUID_t device_uuid(int index);

/* An injected failure of this call, or 0. `usual` is what is reported when no code was given. */
int injected(const char *function, int usual);
/* First line of every call: injected failures, no device, sticky errors. */
cudaError_t enter(const char *function, cudaError_t usual = cudaErrorUnknown);
/* Last line: keeps the error for cudaGetLastError. */
cudaError_t leave(cudaError_t error);

/* A new seed for something random, a function of CUDASIM_SEED and how many were drawn before. */
uint64_t draw_seed();

/* The thread runs the work of a stream: calls of the runtime are forbidden there. */
extern __thread bool inside_stream;

/* ---- memory: memory.cpp ---- */

enum class region_kind { none, device, host, managed_host };
struct region {
    region_kind kind;
    uintptr_t start;
    size_t size;
    int device;
    bool mapped; /* by mmap, with a guard page behind it */
};
/* What `pointer` lies in; kind none when it is ordinary memory. */
region region_of(const void *pointer);
void region_add(const region &r);
bool region_remove(const void *start, region *ret);
/* Whether [pointer, size) lies in device memory or in pinned memory as a whole. */
bool is_device_range(const void *pointer, size_t size);
/* Ordinary memory, or a range that does not leave the allocation in which it starts. */
bool is_sound_range(const void *pointer, size_t size);
/* Device memory is open to the threads of streams alone: guard.cpp. A thread of the host, a thread that runs a stream;
 * before work; a new region; nothing is left to do for the calling thread's stream. */
void guard_install();
void guard_host_thread();
void guard_stream_thread();
void guard_stream_end();
void guard_region(const region &r);
void guard_close();
/* size bytes full of poison. */
void poison_mapping(void *at, size_t size);

/* ---- streams: stream.cpp ---- */

using work = std::function<cudaError_t()>;

struct graph_node {
    work run;
    std::vector<size_t> after;     /* nodes of the same graph */
    bool ordered;                  /* waits for other processes: keeps its place among its like */
    std::function<work()> prepare; /* of each launch, on its thread: what runs; empty: `run` */
};

} // namespace cudasim

struct CUgraph_st {
    std::vector<cudasim::graph_node> nodes;
    CUstream_st *origin;
    bool invalid = false;
};

struct CUgraphExec_st {
    std::vector<cudasim::graph_node> nodes;
};

struct CUstream_st {
    int device;
    bool blocking; /* with the null stream */
    std::mutex lock;
    std::condition_variable changed, progressed;
    std::deque<cudasim::work> queue;
    uint64_t enqueued = 0, completed = 0;
    uint64_t wanted = 0; /* somebody waits for this much to be completed */
    bool destroyed = false;
    cudasim::random_numbers dice;
    /* capture; touched by the capturing threads only */
    CUgraph_st *capture = nullptr;
    std::vector<size_t> frontier; /* nodes that the next one comes after */
};

struct CUevent_st {
    std::mutex lock;
    std::condition_variable progressed;
    uint64_t recorded = 0, completed = 0;
    double time_ms = 0;
    bool destroyed = false, timing;
    CUstream_st *stream = nullptr;
    CUgraph_st *capture = nullptr;
    std::vector<size_t> frontier;
};

namespace cudasim
{

/* nullptr and the legacy handle stand for the null stream of the current device; nullptr when it is not alive. */
CUstream_st *stream_of(cudaStream_t stream);
/* Puts work on a stream, or into the graph that is captured on it. */
cudaError_t enqueue(cudaStream_t stream, work run, bool ordered = false);
/* A node of the graph that the stream is captured for, `ordered`: at each launch it becomes what `prepare` returns. */
cudaError_t capture(cudaStream_t stream, std::function<work()> prepare);
/* Makes a stream do at once what it has. */
void hurry(CUstream_st *stream);
/* Waits until the stream has done what it had. */
cudaError_t stream_wait(CUstream_st *stream);
void device_wait(int device);
CUstream_st *stream_new(int device, bool blocking);

} // namespace cudasim

#endif
