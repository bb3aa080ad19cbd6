/* Sockets of the stand-in for NCCL: meeting, links, messages. */
#include "tests/cudasim/nccl.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <thread>
#include <unistd.h>

namespace cudasim
{

enum { LOOK_MS = 5, NAME_SIZE = 64 };

/* What a unique id holds. */
struct meeting_place {
    char magic[8];
    char name[NAME_SIZE];
};
static const char magic[8] = "cudasim";
static_assert(sizeof(meeting_place) <= sizeof(ncclUniqueId), "fits into an id");

/* A rank introduces itself. */
struct hello {
    int rank, size, id_count, expected, version;
    cudaUUID_t gpu;
    char name[NAME_SIZE];
};

/* ---- sockets with abstract names ---- */

static socklen_t address_of(const std::string &name, sockaddr_un *ret)
{
    memset(ret, 0, sizeof *ret);
    ret->sun_family = AF_UNIX;
    memcpy(ret->sun_path + 1, name.data(), name.size());
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

int nccl_listen(std::string *ret_name)
{
    static std::atomic<unsigned> count{0};
    *ret_name = "cudasim-nccl-" + std::to_string(getpid()) + "-" + std::to_string(count++);
    sockaddr_un address;
    const socklen_t size = address_of(*ret_name, &address);
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, reinterpret_cast<sockaddr *>(&address), size) != 0 || listen(fd, 512) != 0) {
        fprintf(stderr, "cudasim: no socket for NCCL: %s\n", strerror(errno));
        abort();
    }
    return fd;
}

static int dial(const std::string &name)
{
    sockaddr_un address;
    const socklen_t size = address_of(name, &address);
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, reinterpret_cast<sockaddr *>(&address), size) == 0)
        return fd;
    if (fd >= 0)
        close(fd);
    return -1;
}

/* Readable or, without a communicator, sooner or later; false when it was aborted. */
static bool wait_readable(int fd, const ncclComm *comm)
{
    for (;;) {
        pollfd p = {fd, POLLIN, 0};
        if (poll(&p, 1, LOOK_MS) > 0)
            return true;
        if (comm && comm->aborted)
            return false;
    }
}

static bool read_all(int fd, void *into, size_t size, const ncclComm *comm)
{
    char *at = static_cast<char *>(into);
    while (size > 0) {
        if (!wait_readable(fd, comm))
            return false;
        const ssize_t n = recv(fd, at, size, 0);
        if (n <= 0)
            return false;
        at += n;
        size -= static_cast<size_t>(n);
    }
    return true;
}

static bool write_all(int fd, const void *data, size_t size)
{
    return send(fd, data, size, MSG_NOSIGNAL) == static_cast<ssize_t>(size); /* small: the socket takes it whole */
}

/* ---- meeting ---- */

/* What is wrong with who has come, or nothing. */
static std::string objection(const std::vector<hello> &all, const hello &next)
{
    for (const hello &h : all) {
        if (h.size != next.size || h.id_count != next.id_count)
            return "ranks " + std::to_string(h.rank) + " and " + std::to_string(next.rank) + " count ranks differently";
        if (h.rank == next.rank)
            return "rank " + std::to_string(h.rank) + " has come twice";
        if (h.version != next.version)
            return "Mismatched NCCL version detected : rank " + std::to_string(h.rank) + " version " +
                   std::to_string(h.version) + " rank " + std::to_string(next.rank) + " version " +
                   std::to_string(next.version);
        if (memcmp(&h.gpu, &next.gpu, sizeof h.gpu) == 0)
            return "Duplicate GPU detected : rank " + std::to_string(h.rank) + " and rank " +
                   std::to_string(next.rank) + " both on one CUDA device";
    }
    return "";
}

/* Collects the expected ranks, then answers all of them: an objection (empty: none), the listeners by rank. */
static void run_root(int listener)
{
    std::vector<hello> all;
    std::vector<int> fds;
    std::string wrong;
    do {
        hello next;
        const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
        if (fd < 0 || !read_all(fd, &next, sizeof next, nullptr)) {
            if (fd >= 0)
                close(fd);
            continue;
        }
        if (wrong.empty())
            wrong = objection(all, next);
        all.push_back(next);
        fds.push_back(fd);
    } while (all.empty() || static_cast<int>(all.size()) < all[0].expected);
    std::vector<char> names(static_cast<size_t>(all[0].size) * NAME_SIZE, 0);
    for (const hello &h : all)
        if (h.rank >= 0 && h.rank < all[0].size)
            memcpy(&names[static_cast<size_t>(h.rank) * NAME_SIZE], h.name, NAME_SIZE);
    char text[256] = "";
    snprintf(text, sizeof text, "%s", wrong.c_str());
    for (const int fd : fds) {
        (void)(write_all(fd, text, sizeof text) && write_all(fd, names.data(), names.size()));
        close(fd);
    }
    close(listener);
}

void nccl_root_start(ncclUniqueId *id)
{
    meeting_place place = {};
    std::string name;
    const int listener = nccl_listen(&name);
    memcpy(place.magic, magic, sizeof magic);
    snprintf(place.name, sizeof place.name, "%s", name.c_str());
    memset(id, 0, sizeof *id);
    memcpy(id, &place, sizeof place);
    std::thread(run_root, listener).detach();
}

/* Comes to one root and takes the listeners of all from there. */
static ncclResult_t check_in(ncclComm *comm, const ncclUniqueId &id, const hello &self, std::vector<std::string> *names)
{
    meeting_place place;
    char text[256];
    std::vector<char> raw(static_cast<size_t>(comm->size) * NAME_SIZE);
    memcpy(&place, &id, sizeof place);
    if (memcmp(place.magic, magic, sizeof magic) != 0) {
        nccl_say("the unique id is none");
        return ncclInvalidArgument;
    }
    const int fd = dial(place.name);
    if (fd < 0 || !write_all(fd, &self, sizeof self) || !read_all(fd, text, sizeof text, comm) ||
        !read_all(fd, raw.data(), raw.size(), comm)) {
        if (fd >= 0)
            close(fd);
        nccl_say("the root of the bootstrap has gone (rank %d)", comm->rank);
        return ncclSystemError;
    }
    close(fd);
    if (text[0]) {
        nccl_say("%s", text);
        return ncclInvalidUsage;
    }
    names->clear();
    for (int i = 0; i < comm->size; i++)
        names->push_back(&raw[static_cast<size_t>(i) * NAME_SIZE]);
    return ncclSuccess;
}

static int nccl_version()
{
    int version = 0;
    (void)ncclGetVersion(&version);
    return version;
}

/* Ranks are spread over the ids; with several of them each is tried first, then all meet at the first one. */
ncclResult_t nccl_connect(ncclComm *comm, int id_count, const ncclUniqueId *ids)
{
    std::string own_name;
    const int listener = nccl_listen(&own_name);
    hello self = {comm->rank, comm->size, id_count, 0, nccl_version(), device_uuid(comm->device), ""};
    snprintf(self.name, sizeof self.name, "%s", own_name.c_str());
    std::vector<std::string> names;
    const int root = static_cast<int>(static_cast<int64_t>(comm->rank) * id_count / comm->size);
    for (int r = 0; r < comm->size && root > 0; r++)
        self.expected += static_cast<int64_t>(r) * id_count / comm->size == root;
    ncclResult_t result = root > 0 ? check_in(comm, ids[root], self, &names) : ncclSuccess;
    self.expected = comm->size;
    if (result == ncclSuccess)
        result = check_in(comm, ids[0], self, &names);
    if (result == ncclSuccess)
        return nccl_link_up(comm, listener, names);
    close(listener);
    return result;
}

/* ---- links ---- */

ncclResult_t nccl_link_up(ncclComm *comm, int listener, const std::vector<std::string> &names)
{
    bool good = true;
    comm->links.assign(static_cast<size_t>(comm->size), -1);
    for (int peer = 0; peer < comm->rank && good; peer++) {
        const int fd = dial(names[static_cast<size_t>(peer)]);
        good = fd >= 0 && write_all(fd, &comm->rank, sizeof comm->rank);
        comm->links[static_cast<size_t>(peer)] = fd;
    }
    for (int left = comm->size - 1 - comm->rank; left > 0 && good; left--) {
        int peer = -1;
        const int fd = wait_readable(listener, comm) ? accept4(listener, nullptr, nullptr, SOCK_CLOEXEC) : -1;
        good = fd >= 0 && read_all(fd, &peer, sizeof peer, comm) && peer > comm->rank && peer < comm->size;
        if (good)
            comm->links[static_cast<size_t>(peer)] = fd;
    }
    close(listener);
    for (const int fd : comm->links)
        if (fd >= 0)
            fcntl(fd, F_SETFL, O_NONBLOCK);
    if (!good)
        nccl_say("rank %d could not link up with the others", comm->rank);
    return good ? ncclSuccess : ncclSystemError;
}

/* ---- messages ---- */

/* Through a buffer: device memory may be closed to system calls. */
static thread_local char passing[64 << 10];

static ssize_t send_some(int fd, const char *at, size_t size)
{
    size = std::min(size, sizeof passing);
    memcpy(passing, at, size);
    return send(fd, passing, size, MSG_NOSIGNAL);
}

static ssize_t receive_some(int fd, char *at, size_t size)
{
    const ssize_t n = recv(fd, passing, std::min(size, sizeof passing), 0);
    if (n > 0)
        memcpy(at, passing, static_cast<size_t>(n));
    return n;
}

enum class step { moved, blocked, broken };

/* One send or receive of what `at`, head and data in a row, has left. */
template <typename Call> static step advance(nccl_piece &piece, char *head, Call call)
{
    const size_t head_size = sizeof piece.head;
    const bool in_head = piece.moved < head_size;
    char *at = in_head ? head + piece.moved : piece.data + (piece.moved - head_size);
    const size_t left = in_head ? head_size - piece.moved : head_size + piece.head.payload - piece.moved;
    const ssize_t n = call(at, left);
    if (n > 0)
        piece.moved += static_cast<size_t>(n);
    return n > 0 ? step::moved : n < 0 && (errno == EAGAIN || errno == EINTR) ? step::blocked : step::broken;
}

static bool whole(const nccl_piece &piece)
{
    return piece.moved == sizeof piece.head + piece.head.payload;
}

static std::string describe(const nccl_head &h)
{
    char text[160];
    snprintf(text, sizeof text, "%s number %llu of %llu bytes (type %u, op %u, root %u)%s", nccl_kind_name(h.kind),
             static_cast<unsigned long long>(h.number), static_cast<unsigned long long>(h.bytes), h.type, h.op, h.root,
             h.captured ? " of a graph" : "");
    return text;
}

/* A head has arrived: is it what this rank waits for? */
static bool fits(ncclComm *comm, int peer, const nccl_piece &piece)
{
    if (memcmp(&piece.seen, &piece.head, sizeof piece.head) == 0)
        return true;
    nccl_say("rank %d does %s, while rank %d does %s", peer, describe(piece.seen).c_str(), comm->rank,
             describe(piece.head).c_str());
    comm->state = ncclInvalidUsage;
    return false;
}

/* Moves what can move. False: an error was set. */
static bool turn(ncclComm *comm, int peer, nccl_lane &lane)
{
    const int fd = comm->links[static_cast<size_t>(peer)];
    step last = step::moved;
    while (!lane.out.empty() && last == step::moved) {
        nccl_piece &piece = lane.out.front();
        last = advance(piece, reinterpret_cast<char *>(&piece.head),
                       [fd](char *at, size_t size) { return send_some(fd, at, size); });
        if (whole(piece))
            lane.out.pop_front();
    }
    bool broken = last == step::broken;
    last = step::moved;
    while (!lane.in.empty() && last == step::moved) {
        nccl_piece &piece = lane.in.front();
        const bool in_head = piece.moved < sizeof piece.head;
        last = advance(piece, reinterpret_cast<char *>(&piece.seen),
                       [fd](char *at, size_t size) { return receive_some(fd, at, size); });
        if (in_head && piece.moved == sizeof piece.head && !fits(comm, peer, piece))
            return false;
        if (whole(piece))
            lane.in.pop_front();
    }
    broken |= last == step::broken;
    if (!broken || nccl_deaf)
        return true;
    nccl_say("rank %d: connection closed by rank %d", comm->rank, peer);
    comm->state = ncclRemoteError;
    return false;
}

bool nccl_move(ncclComm *comm, std::vector<nccl_lane> &lanes)
{
    for (;;) {
        std::vector<pollfd> fds;
        for (size_t peer = 0; peer < lanes.size(); peer++) {
            if (!lanes[peer].in.empty() || !lanes[peer].out.empty()) {
                if (!turn(comm, static_cast<int>(peer), lanes[peer]))
                    return false;
            }
            const short events =
                static_cast<short>((lanes[peer].in.empty() ? 0 : POLLIN) | (lanes[peer].out.empty() ? 0 : POLLOUT));
            if (events)
                fds.push_back({comm->links[peer], events, 0});
        }
        if (fds.empty())
            return true;
        if (comm->aborted)
            return false;
        if (nccl_deaf)
            std::this_thread::sleep_for(std::chrono::milliseconds(1)); /* a dead link is always ready */
        (void)poll(fds.data(), fds.size(), LOOK_MS);
    }
}

} // namespace cudasim
