/* Communicators, groups and operations of the stand-in for NCCL. Its sums are made from the last rank to the first, so
 * that they differ from sums along a tree. */
#include "tests/cudasim/nccl.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <unistd.h>
#include <unordered_set>

#include <cudasim/control.h>

namespace cudasim
{

std::atomic<bool> nccl_deaf{false};

/* ---- last error ---- */

static std::mutex text_lock;
static std::string &last_text()
{
    static auto *text = new std::string;
    return *text;
}

void nccl_say(const char *format, ...)
{
    char line[512];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    std::lock_guard<std::mutex> hold(text_lock);
    last_text() = line;
    fprintf(stderr, "cudasim: NCCL: %s\n", line);
}

const char *nccl_kind_name(nccl_kind kind)
{
    static const char *const names[] = {"message",        "all-gather", "broadcast", "all-reduce",
                                        "reduce-scatter", "reduce",     "split"};
    return static_cast<size_t>(kind) < sizeof names / sizeof names[0] ? names[static_cast<size_t>(kind)] : "nothing";
}

/* ---- communicators ---- */

static std::mutex comms_lock;
static std::unordered_set<ncclComm *> &comms()
{
    static auto *all = new std::unordered_set<ncclComm *>;
    return *all;
}

static bool alive(ncclComm *comm)
{
    std::lock_guard<std::mutex> hold(comms_lock);
    return comm && comms().count(comm) && !comm->destroyed;
}

static ncclComm *comm_new(int rank, int size, int device, bool blocking)
{
    ncclComm *comm = new ncclComm;
    comm->rank = rank;
    comm->size = size;
    comm->device = device;
    comm->blocking = blocking;
    comm->sent.assign(static_cast<size_t>(size), 0);
    comm->received.assign(static_cast<size_t>(size), 0);
    std::lock_guard<std::mutex> hold(comms_lock);
    comms().insert(comm);
    return comm;
}

/* May it be given something? */
static ncclResult_t ready(ncclComm *comm)
{
    if (!alive(comm)) {
        nccl_say("no such communicator");
        return ncclInvalidArgument;
    }
    const int state = comm->state;
    if (state == ncclInProgress) {
        nccl_say("a communicator is used before the previous operation returned ncclSuccess");
        return ncclInvalidArgument;
    }
    return static_cast<ncclResult_t>(state);
}

static void late(ncclComm *comm)
{
    random_numbers dice = {draw_seed()};
    std::unique_lock<std::mutex> hold(comm->lock);
    comm->changed.wait_for(hold, std::chrono::microseconds(dice.below(500)), [comm] { return comm->aborted.load(); });
}

static void enter_comm(ncclComm *comm)
{
    std::lock_guard<std::mutex> hold(comm->lock);
    comm->inside++;
}

static void leave_comm(ncclComm *comm)
{
    std::lock_guard<std::mutex> hold(comm->lock);
    comm->inside--;
    comm->changed.notify_all();
}

static void wait_for_abort(ncclComm *comm)
{
    std::unique_lock<std::mutex> hold(comm->lock);
    comm->changed.wait(hold, [comm] { return comm->aborted.load(); });
}

static uint64_t take_number(ncclComm *comm)
{
    std::lock_guard<std::mutex> hold(comm->lock);
    return comm->given++;
}

/* Runs `act` when all operations before `number` are over; not after an abort. */
template <typename Act> static void in_turn(ncclComm *comm, uint64_t number, Act act)
{
    std::unique_lock<std::mutex> hold(comm->lock);
    comm->changed.wait(hold, [comm, number] { return comm->turn == number || comm->aborted; });
    if (!comm->aborted) {
        hold.unlock();
        act();
        hold.lock();
    }
    if (comm->turn == number)
        comm->turn++;
    comm->changed.notify_all();
}

/* Work that a communicator is waited for with ncclCommGetAsyncError, or at once. */
static ncclResult_t start_job(ncclComm *comm, std::function<ncclResult_t()> work)
{
    comm->state = ncclInProgress;
    enter_comm(comm);
    auto body = [comm, work] {
        device_set_here(comm->device);
        late(comm);
        const ncclResult_t result = comm->aborted ? ncclSystemError : work();
        int expected = ncclInProgress;
        comm->state.compare_exchange_strong(expected, result);
        leave_comm(comm);
    };
    if (comm->blocking) {
        body();
        return static_cast<ncclResult_t>(comm->state.load());
    }
    std::thread(body).detach();
    return ncclInProgress;
}

static bool is_blocking(const ncclConfig_t *config, bool otherwise)
{
    return config && config->blocking != NCCL_CONFIG_UNDEF_INT ? config->blocking != 0 : otherwise;
}

/* ---- operations ---- */

struct nccl_op {
    nccl_kind kind;
    bool receive; /* nccl_kind::send */
    const char *from;
    char *to;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t op;
    int root; /* or the peer */
};

struct nccl_batch {
    ncclComm *comm;
    cudaStream_t stream;
    std::vector<nccl_op> ops;
    uint64_t number;
    bool captured, hangs;
    int error;
};

/* Of a batch that runs. */
struct nccl_run {
    ncclComm *comm;
    bool captured;
    std::vector<nccl_lane> lanes;
    std::deque<std::vector<char>> partials; /* of reductions */
    std::vector<std::function<void()>> after;
    std::deque<nccl_piece> to_self;
};

static size_t bytes_of(ncclDataType_t type)
{
    switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
        return 1;
    case ncclFloat16:
    case ncclBfloat16:
        return 2;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
        return 8;
    default:
        return 4;
    }
}

template <typename T> static void fold(T *into, const T *next, size_t count, ncclRedOp_t op)
{
    for (size_t i = 0; i < count; i++)
        into[i] = op == ncclMin   ? std::min(into[i], next[i])
                  : op == ncclMax ? std::max(into[i], next[i])
                                  : static_cast<T>(into[i] + next[i]);
}

static void fold_any(char *into, const char *next, size_t count, ncclDataType_t type, ncclRedOp_t op)
{
    if (type == ncclFloat32)
        fold(reinterpret_cast<float *>(into), reinterpret_cast<const float *>(next), count, op);
    else if (type == ncclFloat64)
        fold(reinterpret_cast<double *>(into), reinterpret_cast<const double *>(next), count, op);
    else
        fold(reinterpret_cast<uint64_t *>(into), reinterpret_cast<const uint64_t *>(next), count, op);
}

static bool sums(nccl_kind kind)
{
    return kind == nccl_kind::all_reduce || kind == nccl_kind::reduce_scatter || kind == nccl_kind::reduce;
}

static nccl_head head_of(const nccl_op &op, uint64_t number, bool captured)
{
    const bool rooted = op.kind == nccl_kind::broadcast || op.kind == nccl_kind::reduce;
    nccl_head head = {op.kind, static_cast<uint32_t>(op.type), 0, 0, number, op.count * bytes_of(op.type), 0, captured};
    head.op = sums(op.kind) ? static_cast<uint32_t>(op.op) : 0;
    head.root = rooted ? static_cast<uint32_t>(op.root) : 0;
    return head;
}

static nccl_piece piece_of(nccl_head head, const char *data)
{
    head.payload = data ? head.bytes : 0;
    return {head, const_cast<char *>(data)};
}

static void post_message(nccl_run &run, const nccl_op &op)
{
    ncclComm *comm = run.comm;
    const size_t peer = static_cast<size_t>(op.root);
    const nccl_head head = head_of(op, op.receive ? comm->received[peer]++ : comm->sent[peer]++, run.captured);
    if (op.root != comm->rank) {
        nccl_lane &lane = run.lanes[peer];
        (op.receive ? lane.in : lane.out).push_back(piece_of(head, op.receive ? op.to : op.from));
    } else if (!op.receive) {
        run.to_self.push_back(piece_of(head, op.from));
    } else {
        run.after.push_back([&run, op, head] {
            memmove(op.to, run.to_self.front().data, head.bytes);
            run.to_self.pop_front();
        });
    }
}

/* What goes to and comes from a peer in a collective; nullptr: nothing. */
struct nccl_flow {
    const char *from;
    char *to;
};

static nccl_flow flow_of(nccl_run &run, const nccl_op &op, int peer, size_t bytes)
{
    const size_t theirs = static_cast<size_t>(peer) * bytes;
    const bool root = run.comm->rank == op.root, to_root = peer == op.root;
    char *partial = nullptr;
    if (sums(op.kind) && (op.kind != nccl_kind::reduce || root)) {
        run.partials.emplace_back(bytes + 1);
        partial = run.partials.back().data();
    }
    switch (op.kind) {
    case nccl_kind::all_gather:
        return {op.from, op.to + theirs};
    case nccl_kind::broadcast:
        return {root ? op.from : nullptr, to_root ? op.to : nullptr};
    case nccl_kind::reduce_scatter:
        return {op.from + theirs, partial};
    case nccl_kind::reduce:
        return {to_root ? op.from : nullptr, partial};
    default:
        return {op.from, partial};
    }
}

/* Adds what all brought, the last rank first. */
static void sum_up(const nccl_op &op, const std::vector<const char *> &all, size_t bytes)
{
    std::vector<char> sum(all.back(), all.back() + bytes);
    for (size_t i = all.size() - 1; i-- > 0;)
        fold_any(sum.data(), all[i], op.count, op.type, op.op);
    memcpy(op.to, sum.data(), bytes);
}

/* Every pair exchanges messages in both directions, if only to see that both do the same. */
static void post_collective(nccl_run &run, const nccl_op &op)
{
    ncclComm *comm = run.comm;
    const nccl_head head = head_of(op, comm->collectives++, run.captured);
    const size_t bytes = head.bytes, own = static_cast<size_t>(comm->rank) * bytes;
    std::vector<const char *> all(static_cast<size_t>(comm->size),
                                  op.from + (op.kind == nccl_kind::reduce_scatter ? own : 0));
    for (int peer = 0; peer < comm->size; peer++) {
        if (peer == comm->rank)
            continue;
        const nccl_flow flow = flow_of(run, op, peer, bytes);
        nccl_lane &lane = run.lanes[static_cast<size_t>(peer)];
        lane.out.push_back(piece_of(head, flow.from));
        lane.in.push_back(piece_of(head, flow.to));
        all[static_cast<size_t>(peer)] = flow.to;
    }
    if (op.kind == nccl_kind::all_gather)
        run.after.push_back([op, own, bytes] { memmove(op.to + own, op.from, bytes); });
    else if (op.kind == nccl_kind::broadcast && comm->rank == op.root)
        run.after.push_back([op, bytes] { memmove(op.to, op.from, bytes); });
    else if (sums(op.kind) && (op.kind != nccl_kind::reduce || comm->rank == op.root))
        run.after.push_back([op, all, bytes] { sum_up(op, all, bytes); });
}

/* On the stream's thread. */
static void run_batch(const nccl_batch &batch)
{
    ncclComm *comm = batch.comm;
    enter_comm(comm);
    in_turn(comm, batch.number, [&] {
        nccl_run run = {comm, batch.captured, std::vector<nccl_lane>(static_cast<size_t>(comm->size)), {}, {}, {}};
        for (const nccl_op &op : batch.ops) {
            if (op.kind == nccl_kind::send)
                post_message(run, op);
            else
                post_collective(run, op);
        }
        if (batch.error)
            comm->state = batch.error;
        if (batch.error || batch.hangs || !nccl_move(comm, run.lanes))
            return wait_for_abort(comm);
        for (const auto &act : run.after)
            act();
    });
    leave_comm(comm);
}

/* ---- groups ---- */

static __thread int group_depth;
static __thread ncclResult_t group_error;
static thread_local std::vector<nccl_batch> group_batches;

static ncclResult_t launch(nccl_batch batch)
{
    ncclComm *comm = batch.comm;
    CUstream_st *stream = stream_of(batch.stream);
    if (!stream) {
        nccl_say("no such stream");
        return ncclInvalidArgument;
    }
    batch.captured = stream->capture != nullptr;
    batch.hangs = injected("nccl hang", 1) != 0;
    batch.error = injected("nccl async", ncclInternalError);
    if (batch.error)
        nccl_say("an error on demand");
    auto place = [](nccl_batch one) -> work { /* among the communicator's operations, as of now */
                                              one.number = take_number(one.comm);
                                              return [one] {
                                                  run_batch(one);
                                                  return cudaSuccess;
                                              };
    };
    if (batch.captured) /* at each launch of the graph */
        return capture(batch.stream, [batch, place] { return place(batch); }) ? ncclUnhandledCudaError : ncclSuccess;
    auto put = [stream = batch.stream, run = place(batch)]() -> ncclResult_t {
        return enqueue(stream, run, true) ? ncclUnhandledCudaError : ncclSuccess;
    };
    if (injected("nccl stall", 1))
        return start_job(comm, [comm] {
            wait_for_abort(comm);
            return ncclSystemError;
        });
    return start_job(comm, put);
}

static ncclResult_t flush()
{
    std::vector<nccl_batch> batches;
    batches.swap(group_batches);
    ncclResult_t all = group_error;
    group_error = ncclSuccess;
    for (nccl_batch &batch : batches) {
        const ncclResult_t result = all == ncclSuccess || all == ncclInProgress ? launch(batch) : all;
        all = result == ncclSuccess ? all : result;
    }
    return all;
}

static ncclResult_t check_buffers(const nccl_op &op, const ncclComm *comm)
{
    const size_t bytes = op.count * bytes_of(op.type), all = bytes * static_cast<size_t>(comm->size);
    const bool reads =
        op.kind == nccl_kind::send ? !op.receive : op.kind != nccl_kind::broadcast || comm->rank == op.root;
    const bool writes = op.kind == nccl_kind::send ? op.receive : op.kind != nccl_kind::reduce || comm->rank == op.root;
    if (bytes == 0)
        return ncclSuccess;
    if ((reads && !is_device_range(op.from, op.kind == nccl_kind::reduce_scatter ? all : bytes)) ||
        (writes && !is_device_range(op.to, op.kind == nccl_kind::all_gather ? all : bytes))) {
        nccl_say("a buffer of the %s is no device memory, or too short for %zu bytes", nccl_kind_name(op.kind), bytes);
        return ncclInvalidArgument;
    }
    return ncclSuccess;
}

static ncclResult_t give(ncclComm *comm, cudaStream_t stream, const nccl_op &op, const char *function)
{
    const int code = injected(function, ncclInternalError);
    ncclResult_t result = code ? static_cast<ncclResult_t>(code) : ready(comm);
    if (result == ncclSuccess && (op.root < 0 || op.root >= comm->size)) {
        nccl_say("%s: rank %d of %d", function, op.root, comm->size);
        result = ncclInvalidArgument;
    }
    if (result == ncclSuccess)
        result = check_buffers(op, comm);
    if (result != ncclSuccess) {
        group_error = group_depth > 0 ? result : ncclSuccess;
        return result;
    }
    nccl_batch *at = nullptr;
    for (nccl_batch &batch : group_batches)
        if (batch.comm == comm && batch.stream == stream)
            at = &batch;
    if (!at) {
        group_batches.push_back({comm, stream, {}, 0, false, false, 0});
        at = &group_batches.back();
    }
    at->ops.push_back(op);
    return group_depth > 0 ? ncclSuccess : flush();
}

} // namespace cudasim

using namespace cudasim;

void cudasim_nccl_deaf(int deaf)
{
    nccl_deaf = deaf != 0;
}

/* ---- the interface ---- */

ncclResult_t ncclGetVersion(int *version)
{
    const char *text = getenv("CUDASIM_NCCL_VERSION");
    *version = text ? atoi(text) : NCCL_VERSION_CODE;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result)
{
    static const char *const texts[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return static_cast<size_t>(result) < sizeof texts / sizeof texts[0] ? texts[result] : "unknown result code";
}

const char *ncclGetLastError(ncclComm_t)
{
    static thread_local std::string copy;
    std::lock_guard<std::mutex> hold(text_lock);
    copy = last_text();
    return copy.c_str();
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    if (const int code = injected("ncclGetUniqueId", ncclSystemError))
        return static_cast<ncclResult_t>(code);
    nccl_root_start(id);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *ret, int size, int rank, int id_count, ncclUniqueId *ids,
                                      ncclConfig_t *config)
{
    *ret = nullptr;
    if (const int code = injected("ncclCommInitRank", ncclSystemError))
        return static_cast<ncclResult_t>(code);
    if (size < 1 || rank < 0 || rank >= size || id_count < 1 || id_count > size)
        return ncclInvalidArgument;
    int device = 0;
    (void)cudaGetDevice(&device);
    ncclComm *comm = comm_new(rank, size, device, is_blocking(config, true));
    *ret = comm;
    const std::vector<ncclUniqueId> copy(ids, ids + id_count);
    const int later = injected("nccl init", ncclSystemError);
    return start_job(comm, [comm, copy, later] {
        if (later)
            nccl_say("connecting failed on demand");
        return later ? static_cast<ncclResult_t>(later)
                     : nccl_connect(comm, static_cast<int>(copy.size()), copy.data());
    });
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *ret, int size, ncclUniqueId id, int rank, ncclConfig_t *config)
{
    return ncclCommInitRankScalable(ret, size, rank, 1, &id, config);
}

/* What a rank says when a communicator is split. */
struct split_card {
    int color, key;
    char listener[64];
};

static ncclResult_t run_split(ncclComm *comm, const split_card &own, int listener, bool blocking, ncclComm_t *ret)
{
    std::vector<split_card> cards(static_cast<size_t>(comm->size), own);
    std::vector<nccl_lane> lanes(static_cast<size_t>(comm->size));
    const nccl_head head = {nccl_kind::split, 0, 0, 0, comm->collectives++, sizeof own, sizeof own, 0};
    for (int peer = 0; peer < comm->size; peer++) {
        if (peer == comm->rank)
            continue;
        lanes[static_cast<size_t>(peer)].out.push_back(
            {head, reinterpret_cast<char *>(&cards[static_cast<size_t>(comm->rank)])});
        lanes[static_cast<size_t>(peer)].in.push_back(
            {head, reinterpret_cast<char *>(&cards[static_cast<size_t>(peer)])});
    }
    ncclResult_t result = nccl_move(comm, lanes) ? ncclSuccess : ncclRemoteError;
    if (result != ncclSuccess || own.color == NCCL_SPLIT_NOCOLOR) {
        close(listener);
        return result;
    }
    std::vector<int> members;
    for (int i = 0; i < comm->size; i++)
        if (cards[static_cast<size_t>(i)].color == own.color)
            members.push_back(i);
    std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
        return cards[static_cast<size_t>(a)].key < cards[static_cast<size_t>(b)].key;
    });
    std::vector<std::string> names;
    for (const int member : members)
        names.push_back(cards[static_cast<size_t>(member)].listener);
    const int rank = static_cast<int>(std::find(members.begin(), members.end(), comm->rank) - members.begin());
    ncclComm *child = comm_new(rank, static_cast<int>(members.size()), comm->device, blocking);
    __atomic_store_n(ret, child, __ATOMIC_RELEASE);
    result = nccl_link_up(child, listener, names);
    child->state = result;
    return result;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *ret, ncclConfig_t *config)
{
    *ret = nullptr;
    if (const int code = injected("ncclCommSplit", ncclSystemError))
        return static_cast<ncclResult_t>(code);
    if (const ncclResult_t result = ready(comm))
        return result;
    split_card own = {color, key, ""};
    std::string name;
    const int listener = nccl_listen(&name);
    snprintf(own.listener, sizeof own.listener, "%s", name.c_str());
    const bool blocking = is_blocking(config, comm->blocking);
    const uint64_t number = take_number(comm);
    return start_job(comm, [=] {
        ncclResult_t result = ncclSystemError;
        in_turn(comm, number, [&] { result = run_split(comm, own, listener, blocking, ret); });
        return result;
    });
}

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    if (const int code = injected("ncclCommFinalize", ncclSystemError))
        return static_cast<ncclResult_t>(code);
    if (const ncclResult_t result = ready(comm))
        return result;
    const uint64_t number = take_number(comm);
    return start_job(comm, [=] {
        in_turn(comm, number, [] {});
        return ncclSuccess;
    });
}

static void close_links(ncclComm *comm)
{
    for (int &fd : comm->links) {
        if (fd >= 0)
            close(fd);
        fd = -1;
    }
    std::lock_guard<std::mutex> hold(comms_lock);
    comm->destroyed = true;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    if (const ncclResult_t result = ready(comm))
        return result;
    close_links(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    if (!alive(comm))
        return ncclInvalidArgument;
    if (const int code = injected("ncclCommAbort", ncclUnhandledCudaError))
        return static_cast<ncclResult_t>(code);
    if (injected("nccl abort hang", 1))
        for (;;)
            pause();
    std::unique_lock<std::mutex> hold(comm->lock);
    comm->aborted = true;
    comm->changed.notify_all();
    comm->changed.wait(hold, [comm] { return comm->inside == 0; });
    hold.unlock();
    close_links(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state)
{
    if (!alive(comm))
        return ncclInvalidArgument;
    *state = static_cast<ncclResult_t>(comm->state.load());
    return ncclSuccess;
}

ncclResult_t ncclGroupStart()
{
    group_depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd()
{
    if (group_depth == 0)
        return ncclInvalidUsage;
    return --group_depth == 0 ? flush() : ncclSuccess;
}

static const char *chars(const void *data)
{
    return static_cast<const char *>(data);
}

ncclResult_t ncclSend(const void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    return give(comm, stream, {nccl_kind::send, false, chars(data), nullptr, count, type, ncclSum, peer}, "ncclSend");
}

ncclResult_t ncclRecv(void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream)
{
    return give(comm, stream, {nccl_kind::send, true, nullptr, static_cast<char *>(data), count, type, ncclSum, peer},
                "ncclRecv");
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream)
{
    return give(comm, stream,
                {nccl_kind::all_gather, false, chars(from), static_cast<char *>(to), count, type, ncclSum, 0},
                "ncclAllGather");
}

ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream)
{
    return give(comm, stream,
                {nccl_kind::broadcast, false, chars(from), static_cast<char *>(to), count, type, ncclSum, root},
                "ncclBroadcast");
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream)
{
    return give(comm, stream, {nccl_kind::all_reduce, false, chars(from), static_cast<char *>(to), count, type, op, 0},
                "ncclAllReduce");
}

ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream)
{
    return give(comm, stream,
                {nccl_kind::reduce_scatter, false, chars(from), static_cast<char *>(to), count, type, op, 0},
                "ncclReduceScatter");
}

ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream)
{
    return give(comm, stream, {nccl_kind::reduce, false, chars(from), static_cast<char *>(to), count, type, op, root},
                "ncclReduce");
}
