/* Streams and events. */
#include "tests/cudasim/runtime.h"

#include <chrono>
#include <cstdlib>
#include <thread>
#include <unordered_set>

namespace cudasim
{

static std::mutex all_lock;
static std::unordered_set<CUstream_st *> &streams()
{
    static auto *all = new std::unordered_set<CUstream_st *>;
    return *all;
}
static std::unordered_set<CUevent_st *> &events()
{
    static auto *all = new std::unordered_set<CUevent_st *>;
    return *all;
}

static uint32_t delay_max_us()
{
    static const char *text = getenv("CUDASIM_DELAY_US");
    static const uint32_t us = text ? static_cast<uint32_t>(atoi(text)) : 500;
    return us;
}

/* ---- what a stream does ---- */

static void run_stream(CUstream_st *s)
{
    inside_stream = true;
    device_set_here(s->device);
    guard_stream_thread();
    std::unique_lock<std::mutex> hold(s->lock);
    for (bool fresh = true;; fresh = s->queue.empty()) {
        s->changed.wait(hold, [s] { return !s->queue.empty() || s->destroyed; });
        if (s->queue.empty()) { /* the object stays, so that its use is noticed */
            guard_stream_end();
            return;
        }
        if (delay_max_us() > 0 && (fresh || s->dice.below(16) == 0))
            s->changed.wait_for(hold, std::chrono::microseconds(s->dice.below(delay_max_us())),
                                [s] { return s->wanted > s->completed || s->destroyed; });
        work run = std::move(s->queue.front());
        s->queue.pop_front();
        hold.unlock();
        /* A device that failed does nothing any more. */
        guard_install();
        if (device_at(s->device).sticky == cudaSuccess)
            if (const cudaError_t error = run())
                device_at(s->device).sticky = error;
        run = nullptr;
        hold.lock();
        if (s->queue.empty())
            guard_close();
        s->completed++;
        s->progressed.notify_all();
    }
}

CUstream_st *stream_new(int device, bool blocking)
{
    CUstream_st *s = new CUstream_st;
    s->device = device;
    s->blocking = blocking;
    s->dice.state = draw_seed();
    {
        std::lock_guard<std::mutex> hold(all_lock);
        streams().insert(s);
    }
    std::thread(run_stream, s).detach();
    return s;
}

CUstream_st *stream_of(cudaStream_t stream)
{
    if (!stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread)
        return device_here().null_stream;
    std::lock_guard<std::mutex> hold(all_lock);
    return streams().count(stream) && !stream->destroyed ? stream : nullptr;
}

static bool event_alive(cudaEvent_t event)
{
    std::lock_guard<std::mutex> hold(all_lock);
    return events().count(event) && !event->destroyed;
}

static size_t add_node(CUstream_st *s, work run, bool ordered)
{
    CUgraph_st *graph = s->capture;
    graph->nodes.push_back({std::move(run), s->frontier, ordered, {}});
    s->frontier = {graph->nodes.size() - 1};
    return graph->nodes.size() - 1;
}

cudaError_t enqueue(cudaStream_t stream, work run, bool ordered)
{
    CUstream_st *s = stream_of(stream);
    if (!s)
        return cudaErrorInvalidResourceHandle;
    if (s->capture) {
        add_node(s, std::move(run), ordered);
        return cudaSuccess;
    }
    std::lock_guard<std::mutex> hold(s->lock);
    s->queue.push_back(std::move(run));
    s->enqueued++;
    s->changed.notify_all();
    return cudaSuccess;
}

cudaError_t capture(cudaStream_t stream, std::function<work()> prepare)
{
    CUstream_st *s = stream_of(stream);
    if (!s || !s->capture)
        return cudaErrorStreamCaptureUnmatched;
    s->capture->nodes[add_node(s, nullptr, true)].prepare = std::move(prepare);
    return cudaSuccess;
}

void hurry(CUstream_st *s)
{
    std::lock_guard<std::mutex> hold(s->lock);
    s->wanted = s->enqueued;
    s->changed.notify_all();
}

cudaError_t stream_wait(CUstream_st *s)
{
    std::unique_lock<std::mutex> hold(s->lock);
    const uint64_t target = s->enqueued;
    s->wanted = target;
    s->changed.notify_all();
    s->progressed.wait(hold, [s, target] { return s->completed >= target; });
    return static_cast<cudaError_t>(device_at(s->device).sticky.load());
}

void device_wait(int device)
{
    std::vector<CUstream_st *> list;
    {
        std::lock_guard<std::mutex> hold(all_lock);
        for (CUstream_st *s : streams())
            if (s->device == device)
                list.push_back(s);
    }
    for (CUstream_st *s : list)
        hurry(s);
    for (CUstream_st *s : list)
        (void)stream_wait(s);
}

} // namespace cudasim

using namespace cudasim;

/* ---- streams ---- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int)
{
    if (const cudaError_t error = enter("cudaStreamCreate", cudaErrorMemoryAllocation))
        return error;
    *stream = stream_new(device_here().index, !(flags & cudaStreamNonBlocking));
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags)
{
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    CUstream_st *s = stream ? stream_of(stream) : nullptr;
    if (!s)
        return leave(cudaErrorInvalidResourceHandle);
    std::lock_guard<std::mutex> all(all_lock);
    std::lock_guard<std::mutex> hold(s->lock);
    s->destroyed = true;
    s->changed.notify_all();
    return cudaSuccess;
}

/* A stream that may be waited for; while it is captured none may, and the capture is lost. */
static cudaError_t waitable(cudaStream_t stream, CUstream_st **ret)
{
    CUstream_st *s = stream_of(stream);
    if (!s)
        return cudaErrorInvalidResourceHandle;
    if (s->capture) {
        s->capture->invalid = true;
        return cudaErrorStreamCaptureUnsupported;
    }
    *ret = s;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    CUstream_st *s;
    if (const cudaError_t error = enter("cudaStreamSynchronize"))
        return error;
    if (const cudaError_t error = waitable(stream, &s))
        return leave(error);
    return leave(stream_wait(s));
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    CUstream_st *s;
    if (const cudaError_t error = enter("cudaStreamQuery"))
        return error;
    if (const cudaError_t error = waitable(stream, &s))
        return leave(error);
    std::lock_guard<std::mutex> hold(s->lock);
    if (s->completed == s->enqueued) /* perhaps since the first line, and with an error */
        return leave(static_cast<cudaError_t>(device_at(s->device).sticky.load()));
    s->wanted = s->enqueued; /* who asks will not be kept waiting for long */
    s->changed.notify_all();
    return cudaErrorNotReady;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *user)
{
    if (const cudaError_t error = enter("cudaLaunchHostFunc"))
        return error;
    return leave(enqueue(stream, [function, user] {
        function(user);
        return cudaSuccess;
    }));
}

/* ---- events ---- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
    if (const cudaError_t error = enter("cudaEventCreate", cudaErrorMemoryAllocation))
        return error;
    CUevent_st *e = new CUevent_st;
    e->timing = !(flags & cudaEventDisableTiming);
    std::lock_guard<std::mutex> hold(all_lock);
    events().insert(e);
    *event = e;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    if (!event_alive(event))
        return leave(cudaErrorInvalidResourceHandle);
    std::lock_guard<std::mutex> hold(all_lock);
    event->destroyed = true;
    return cudaSuccess;
}

static double now_ms()
{
    using namespace std::chrono;
    return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

static cudaError_t reach(CUevent_st *event, uint64_t number)
{
    std::lock_guard<std::mutex> hold(event->lock);
    if (event->completed < number) {
        event->completed = number;
        event->time_ms = now_ms();
    }
    event->progressed.notify_all();
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags)
{
    if (const cudaError_t error = enter("cudaEventRecord"))
        return error;
    CUstream_st *s = stream_of(stream);
    if (!event_alive(event) || !s)
        return leave(cudaErrorInvalidResourceHandle);
    if (s->capture && flags != cudaEventRecordExternal) {
        event->capture = s->capture;
        event->frontier = s->frontier;
        return cudaSuccess;
    }
    std::unique_lock<std::mutex> hold(event->lock);
    event->capture = nullptr;
    event->stream = s;
    const uint64_t number = ++event->recorded;
    hold.unlock();
    if (s->capture) /* an event node: every launch of the graph records anew */
        return leave(enqueue(stream, [event] {
            uint64_t next;
            {
                std::lock_guard<std::mutex> again(event->lock);
                next = event->recorded;
            }
            return reach(event, next);
        }));
    return leave(enqueue(stream, [event, number] { return reach(event, number); }));
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

static cudaError_t event_wait(CUevent_st *event, uint64_t number)
{
    std::unique_lock<std::mutex> hold(event->lock);
    CUstream_st *stream = event->stream;
    if (event->completed >= number)
        return cudaSuccess;
    hold.unlock();
    hurry(stream);
    hold.lock();
    event->progressed.wait_for(hold, std::chrono::milliseconds(1), [=] { return event->completed >= number; });
    while (event->completed < number) { /* a device that failed reaches no event */
        if (const int sticky = device_at(stream->device).sticky)
            return static_cast<cudaError_t>(sticky);
        event->progressed.wait_for(hold, std::chrono::milliseconds(20), [=] { return event->completed >= number; });
    }
    return cudaSuccess;
}

/* The stream joins the capture in which the event was recorded. */
static cudaError_t join_capture(CUstream_st *s, const CUevent_st *event)
{
    if (s->capture && s->capture != event->capture)
        return cudaErrorStreamCaptureIsolation;
    s->capture = event->capture;
    s->frontier.insert(s->frontier.end(), event->frontier.begin(), event->frontier.end());
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int)
{
    if (const cudaError_t error = enter("cudaStreamWaitEvent"))
        return error;
    CUstream_st *s = stream_of(stream);
    if (!event_alive(event) || !s)
        return leave(cudaErrorInvalidResourceHandle);
    if (event->capture)
        return leave(join_capture(s, event));
    uint64_t number;
    {
        std::lock_guard<std::mutex> hold(event->lock);
        number = event->recorded;
    }
    if (s->capture)
        return leave(number > 0 ? cudaErrorStreamCaptureIsolation : cudaSuccess);
    return leave(number == 0 ? cudaSuccess : enqueue(stream, [event, number] { return event_wait(event, number); }));
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    if (const cudaError_t error = enter("cudaEventQuery"))
        return error;
    if (!event_alive(event))
        return leave(cudaErrorInvalidResourceHandle);
    if (event->capture)
        return leave(cudaErrorCapturedEvent);
    std::unique_lock<std::mutex> hold(event->lock);
    if (event->completed >= event->recorded)
        return leave(static_cast<cudaError_t>(device_here().sticky.load()));
    CUstream_st *stream = event->stream;
    hold.unlock();
    hurry(stream);
    return cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    if (const cudaError_t error = enter("cudaEventSynchronize"))
        return error;
    if (!event_alive(event))
        return leave(cudaErrorInvalidResourceHandle);
    if (event->capture)
        return leave(cudaErrorCapturedEvent);
    uint64_t number;
    {
        std::lock_guard<std::mutex> hold(event->lock);
        number = event->recorded;
    }
    return leave(event_wait(event, number));
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
    if (const cudaError_t error = enter("cudaEventElapsedTime"))
        return error;
    if (!event_alive(start) || !event_alive(end) || !start->timing || !end->timing)
        return leave(cudaErrorInvalidResourceHandle);
    if (start->recorded == 0 || end->recorded == 0)
        return leave(cudaErrorInvalidResourceHandle);
    double at[2];
    CUevent_st *const both[2] = {start, end};
    for (int i = 0; i < 2; i++) {
        std::lock_guard<std::mutex> hold(both[i]->lock);
        if (both[i]->completed < both[i]->recorded)
            return cudaErrorNotReady;
        at[i] = both[i]->time_ms;
    }
    *ms = static_cast<float>(at[1] - at[0]);
    return cudaSuccess;
}

/* ---- capture ---- */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode)
{
    if (const cudaError_t error = enter("cudaStreamBeginCapture"))
        return error;
    CUstream_st *s = stream ? stream_of(stream) : nullptr; /* the null stream cannot be captured */
    if (!s || s->capture)
        return leave(s ? cudaErrorStreamCaptureUnsupported : cudaErrorInvalidResourceHandle);
    s->capture = new CUgraph_st;
    s->capture->origin = s;
    s->frontier.clear();
    return cudaSuccess;
}

/* Marks what `node` comes after, itself included. */
static void mark_before(const CUgraph_st *graph, size_t node, std::vector<bool> *marked)
{
    if ((*marked)[node])
        return;
    (*marked)[node] = true;
    for (size_t before : graph->nodes[node].after)
        mark_before(graph, before, marked);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *ret)
{
    const cudaError_t told = enter("cudaStreamEndCapture"); /* whatever it is, the capture is over */
    CUstream_st *s = stream_of(stream);
    if (!s || !s->capture || s->capture->origin != s)
        return leave(cudaErrorStreamCaptureUnmatched);
    CUgraph_st *graph = s->capture;
    graph->invalid = graph->invalid || told != cudaSuccess;
    std::vector<bool> joined(graph->nodes.size());
    for (size_t node : s->frontier)
        mark_before(graph, node, &joined);
    bool all_joined = true;
    for (bool here : joined)
        all_joined = all_joined && here;
    {
        std::lock_guard<std::mutex> hold(all_lock);
        for (CUstream_st *other : streams())
            if (other->capture == graph) {
                other->capture = nullptr;
                other->frontier.clear();
            }
    }
    if (graph->invalid || !all_joined) {
        const cudaError_t error = graph->invalid ? cudaErrorStreamCaptureInvalidated : cudaErrorStreamCaptureUnjoined;
        *ret = nullptr;
        delete graph;
        return leave(error);
    }
    *ret = graph;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    CUstream_st *s = stream_of(stream);
    if (!s)
        return leave(cudaErrorInvalidResourceHandle);
    *status = !s->capture           ? cudaStreamCaptureStatusNone
              : s->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                    : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *)
{
    return cudaSuccess;
}
