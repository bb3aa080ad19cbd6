/* Inside of the stand-in for NCCL: processes are ranks, Unix sockets their links (nccl_links.cpp); communicators,
 * groups and operations are in nccl.cpp. Private to the emulation.
 *
 * As there: operations of a communicator run in the order in which they were given, on the stream's thread; a
 * non-blocking communicator takes them later, from a thread of its own, and says ncclInProgress until then; after an
 * error, or where a peer never comes, an operation stays on its stream until the communicator is aborted. Unlike there:
 * every message says what its sender does, so that ranks that do different things are told (with both), instead of
 * hanging; and links are made when the communicator is. */
#ifndef CUDASIM_NCCL_H
#define CUDASIM_NCCL_H

#include "tests/cudasim/runtime.h"

#include <nccl.h>

#include <deque>

namespace cudasim
{

enum class nccl_kind : uint32_t { send, all_gather, broadcast, all_reduce, reduce_scatter, reduce, split };
const char *nccl_kind_name(nccl_kind kind);

/* Before the bytes of every message. */
struct nccl_head {
    nccl_kind kind;
    uint32_t type, op, root;
    uint64_t number;         /* of the operation on this communicator; of the message between two ranks for send */
    uint64_t bytes, payload; /* what the operation is about; what follows this head */
    uint64_t captured;       /* 1: of a graph: all must have it there, or none */
};

/* One message, to or from a peer. */
struct nccl_piece {
    nccl_head head; /* what goes, or what must come */
    char *data;
    size_t moved = 0; /* bytes of head and data */
    nccl_head seen = {};
};

struct nccl_lane {
    std::deque<nccl_piece> out, in;
};

} // namespace cudasim

struct ncclComm {
    int rank, size, device;
    bool blocking;
    std::vector<int> links;               /* descriptors by rank; -1: own */
    std::vector<uint64_t> sent, received; /* point to point messages so far, by rank */
    uint64_t collectives = 0;
    std::atomic<int> state{ncclInProgress};
    std::atomic<bool> aborted{false};
    std::mutex lock;
    std::condition_variable changed;
    uint64_t given = 0, turn = 0; /* operations: taken a number, may run now */
    int inside = 0;               /* threads that work for it */
    bool destroyed = false;
};

namespace cudasim
{

/* The text of ncclGetLastError, and on standard error. */
void nccl_say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Peers that die are not noticed: what waits for them waits until it is aborted. */
extern std::atomic<bool> nccl_deaf;

/* ---- nccl_links.cpp ---- */

/* A place where ranks meet, in a thread of this process. */
void nccl_root_start(ncclUniqueId *id);
/* Makes the links; waits for all others. */
ncclResult_t nccl_connect(ncclComm *comm, int id_count, const ncclUniqueId *ids);
/* Links among some ranks of a communicator: `names` by new rank, of their listeners. */
ncclResult_t nccl_link_up(ncclComm *comm, int listener, const std::vector<std::string> &names);
int nccl_listen(std::string *ret_name);
/* Until everything of all lanes (by rank) has moved. False: an error was set, or it was aborted. */
bool nccl_move(ncclComm *comm, std::vector<nccl_lane> &lanes);

} // namespace cudasim

#endif
