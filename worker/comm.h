/* The data plane between workers: it moves bytes, it never adds them.
 *
 *   comm    one per process: a Unix and a TCP listener that stay for the whole life of the process, and everything
 * opened over them group   the connections of one generation to the neighbours that its plan names; several groups may
 * be open at once (the old generation's stays until Go of the new one) request one non-blocking send or receive of a
 * group, matched by (peer rank, exchange number)
 *
 * Threads: one thread (the engine's) makes every call, except `mu_comm_abort`, which any thread may make at any time.
 * Nothing moves on a thread of its own: bytes move inside `mu_comm_progress`, `mu_comm_group_progress` and the waits,
 * all groups together, and only there are buffers read or written. So once a call has returned MU_ERR_CANCELLED (or the
 * group is closed) no byte of the group's buffers is touched again, however late the peer's data arrives.
 *
 * Matching: an exchange number is used once per peer and direction within a generation. Sends and receives may be
 * posted in any order on either side. Up to MU_COMM_EAGER_SIZE bytes travel at once and are held by the receiver until
 * it posts (at most MU_COMM_EAGER_HELD of them per peer, then the socket is not read: back-pressure). Larger ones
 * travel only when the receiver has posted its buffer, straight into it, in pieces of MU_COMM_PIECE_SIZE that
 * interleave with other exchanges; small ones overtake large ones between pieces. Post receives early: then no round
 * trip is added.
 *
 * Buffers may lie in the memory of a device that the host cannot touch: then bytes pass through pinned memory, a piece
 * at a time. Such a buffer is read or written only after the operations of the device that were given before its
 * request was posted; a request that is done leaves nothing under way. So posting does not wait for the device, but for
 * messages of up to MU_COMM_EAGER_SIZE.
 *
 * Failures: the first failure of a connection fails its group; every later call on the group returns MU_ERR_UNAVAILABLE
 * and names the peer. After a failure keep the group open (parked) until the generation is superseded or revoked, so
 * that other survivors see only the dead peer go away; `mu_comm_group_close` says goodbye, which is not counted as a
 * failure by peers that wait for nothing. */
#ifndef MU_WORKER_COMM_H
#define MU_WORKER_COMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/hash.h"
#include "common/id.h"
#include "common/status.h"
#include "kernels/device.h"

enum {
    MU_COMM_ADDRESS_SIZE = 256,      /* text of an address with the terminating 0 */
    MU_COMM_HOST_ID_SIZE = 64,       /* with the terminating 0; [A-Za-z0-9._-] */
    MU_COMM_SECRET_SIZE = 32,        /* bytes */
    MU_COMM_EAGER_SIZE = 4096,       /* largest message that is sent before the receiver has posted */
    MU_COMM_EAGER_HELD = 256,        /* such messages held per peer until their receive is posted */
    MU_COMM_PIECE_SIZE = 256 * 1024, /* bytes of a large message in one frame */
    MU_COMM_REQUESTS_MAX = 8192,     /* outstanding sends, and receives, to one peer */
    MU_COMM_WORLD_MAX = 65536,
    MU_COMM_PENDING_MAX = 4096, /* upper bound of limits.pending_max */
};

/* Groups whose number has this bit stand beside the generations: in no order, and cancelled only with everything. */
#define MU_COMM_ASIDE   (1ull << 63)
#define MU_COMM_FOREVER UINT64_MAX /* a deadline that never comes */

struct mu_comm;
struct mu_comm_group;

/* 0 in any field means the default in brackets. */
struct mu_comm_limits {
    uint32_t handshake_timeout_ms; /* [2000] a connection that has not proved who it is by then is closed */
    uint32_t pending_max;          /* [256] connections that have not proved it yet; the oldest makes room */
    uint32_t user_timeout_ms;      /* [6000] TCP_USER_TIMEOUT, and about the time after which keep-alive gives up */
    uint32_t spin_us;              /* [20] how long a wait spins before it sleeps; 1 is the least */
};

struct mu_comm_config {
    const char *data_addr; /* literal address to listen on, "192.0.2.1", "192.0.2.1:4711", "[2001:db8::1]:0"; NULL: see
                              route_to */
    const char *route_to;  /* literal "address:port" of the coordinator: listen on the local address that reaches it;
                              NULL or "": loopback */
    const char *
        host_id; /* processes with equal ids talk over Unix sockets; NULL: derived from boot id and network namespace */
    const char
        *unix_dir; /* directory for the Unix socket's file; NULL: an abstract name, which leaves nothing behind */
    struct mu_comm_limits limits;
    struct mu_device *device; /* in whose memory buffers may lie, too; NULL: only in the host's */
};

struct mu_comm_stats {                            /* since mu_comm_new */
    uint64_t accepted;                            /* connections accepted by the listeners */
    uint64_t admitted;                            /* of those, proved and handed to a group */
    uint64_t refused_stale;                       /* an older generation or another incarnation */
    uint64_t refused_stranger;                    /* not named by the plan, or without the generation's secret */
    uint64_t refused_garbage;                     /* not our protocol, or another version of it */
    uint64_t refused_timeout;                     /* silent until the hand-shake's deadline */
    uint64_t refused_full;                        /* pushed out by newer ones: pending_max */
    uint64_t redials;                             /* own connection attempts beyond the first */
    uint64_t bytes_sent, bytes_received, wait_us; /* as in mu_comm_traffic, of all peers and groups */
};

enum mu_comm_failure_kind {
    MU_COMM_FAIL_NONE,
    MU_COMM_FAIL_EOF,      /* the peer's end was closed without goodbye: a witness of its death */
    MU_COMM_FAIL_RESET,    /* reset, or the network gave the connection up: a witness too */
    MU_COMM_FAIL_REFUSED,  /* nobody listens at the peer's address any more: a witness too */
    MU_COMM_FAIL_TIMEOUT,  /* not connected by the deadline of mu_comm_open: says nothing about who is at fault */
    MU_COMM_FAIL_PROTOCOL, /* frames that do not fit (sizes of the two sides differ, garbage) */
    MU_COMM_FAIL_STALE,    /* the peer knows a newer generation, or is another incarnation */
    MU_COMM_FAIL_LEFT,     /* the peer closed its group in order while something was still wanted of it */
    MU_COMM_FAIL_LOCAL,    /* this process: memory or descriptors are out */
};

struct mu_comm_failure {
    uint32_t peer_rank;
    enum mu_comm_failure_kind kind;
    int errno_value; /* 0 when the operating system was not involved */
};

struct mu_comm_peer {
    uint32_t rank;
    struct mu_id incarnation;
    const char *address; /* as mu_comm_address of that process */
};

/* Copied by mu_comm_open. A peer that is named here must name this rank too. */
struct mu_comm_group_config {
    uint64_t generation; /* >= 1 */
    uint32_t rank, world;
    struct mu_id incarnation; /* own */
    const struct mu_comm_peer *peers;
    size_t peer_count;
    uint8_t secret[MU_COMM_SECRET_SIZE];
    bool encrypted; /* on all sides: connections over TCP are (worker/secure.h); those inside a host need not be */
};

/* Memory of the caller; it and the buffer must stay until mu_comm_done, or until the group is closed. All fields are
 * private. */
struct mu_comm_link {
    struct mu_comm_link *next;
    uint64_t exchange;
};
struct mu_comm_request {
    struct mu_comm_link link;     /* in the peer's table of sends or receives */
    struct mu_comm_request *next; /* in one of the peer's queues */
    uint8_t *data;
    size_t size, moved;
    struct mu_comm_group *group;
    uint32_t peer_rank;
    uint8_t kind, state;
    bool far;                    /* the buffer is the device's */
    uint64_t mark;               /* of the device: what must be done before the buffer is touched */
    struct mu_hash128 *ret_hash; /* NULL, or where the XXH3-128 of what came goes */
};

struct mu_comm_traffic {
    uint64_t bytes_sent, bytes_received; /* payload; sent = handed to the kernel */
    uint64_t frames_sent, frames_received;
    uint64_t wait_us; /* time that waits were idle while something was still to be received from this peer */
    uint32_t rank;    /* the peer's */
    uint64_t latency_us, retransmits; /* round trip now, segments sent again: of the kernel's TCP; Unix sockets: 0 */
};

/* Binds both listeners. */
enum mu_status mu_comm_new(const struct mu_comm_config *config, struct mu_comm **ret_comm,
                           struct mu_error *err) MU_WARN_UNUSED;
/* Closes all groups first, and waits up to two seconds for goodbyes that find their sockets full. No other thread may
 * be inside mu_comm_abort. NULL is fine. */
void mu_comm_free(struct mu_comm *comm);

/* "host=<id>;unix=@<name>;tcp=<literal address>:<port>", for the coordinator and the peers. Lives as long as comm. */
const char *mu_comm_address(const struct mu_comm *comm);

/* The coordinator's address as literal "address:port", for the choice of the data plane's own; "" for a Unix socket and
 * for what is no "host:port". Asks the name service and blocks. MU_ERR_UNAVAILABLE: it cannot be resolved now. */
enum mu_status mu_comm_route_to(const char *coordinator, char *out, size_t size, struct mu_error *err) MU_WARN_UNUSED;
void mu_comm_stats(const struct mu_comm *comm, struct mu_comm_stats *ret_stats);

/* A descriptor that becomes readable when mu_comm_progress has something to do, for a thread that sleeps elsewhere.
 * Never read it. */
int mu_comm_fd(const struct mu_comm *comm);

/* Whoever waits can do other things meanwhile: `idle` is called in every wait after each look at the sockets, never
 * from inside itself. It may post, progress and compute, and close groups other than the one that is waited for. True:
 * it did something, look again before sleeping. NULL: nothing else is to be done. */
void mu_comm_set_idle(struct mu_comm *comm, bool (*idle)(void *ctx), void *ctx);

/* Any thread, any number of times: every group whose generation is <= `generation` is cancelled for good, present or
 * future; waits wake up at once and all calls on such groups return MU_ERR_CANCELLED. UINT64_MAX cancels everything. */
void mu_comm_abort(struct mu_comm *comm, uint64_t generation);

/* Moves whatever can move in all groups, answers hand-shakes, looks for dead peers. Never blocks; bounded work per
 * call. */
void mu_comm_progress(struct mu_comm *comm);

/* Begins to connect: the higher rank dials, the lower one accepts, and each proves to the other that it has the
 * generation's secret. Returns at once; the group is ready when mu_comm_group_ready says so. Not connected by
 * `deadline_us` (mu_clock_mono_us): the group fails with MU_COMM_FAIL_TIMEOUT. Sends and receives may be posted before;
 * they start to move as each peer is connected. */
enum mu_status mu_comm_open(struct mu_comm *comm, const struct mu_comm_group_config *config, uint64_t deadline_us,
                            struct mu_comm_group **ret_group, struct mu_error *err) MU_WARN_UNUSED;
/* Forgets all requests without completing them, says goodbye to the peers and closes the connections. Never blocks: a
 * goodbye that finds the socket full is sent by later calls of progress. NULL is fine. */
void mu_comm_group_close(struct mu_comm_group *group);

bool mu_comm_group_ready(const struct mu_comm_group *group); /* every peer is connected */
uint64_t mu_comm_group_generation(const struct mu_comm_group *group);
/* How many of its connections are encrypted, and by whom (worker/secure.h; "" when none is). */
size_t mu_comm_group_encrypted(const struct mu_comm_group *group, const char **ret_kernel);

/* mu_comm_progress, then the state of this group: MU_OK while it works (connecting counts), MU_ERR_CANCELLED, or
 * MU_ERR_UNAVAILABLE with a line that names the peer and what happened. Call it between tiles of computation. */
enum mu_status mu_comm_group_progress(struct mu_comm_group *group, struct mu_error *err) MU_WARN_UNUSED;

/* Progress until ready; MU_ERR_TIMEOUT at `deadline_us` (the group itself stays as it is). */
enum mu_status mu_comm_wait_ready(struct mu_comm_group *group, uint64_t deadline_us,
                                  struct mu_error *err) MU_WARN_UNUSED;

/* Queue one message to or from `peer_rank`; `size` may be 0 and must be equal on both sides. Nothing moves before the
 * next progress or wait. A send is done when the kernel has taken all bytes: the buffer is free, the peer need not have
 * them. MU_ERR_EXISTS: the exchange number is outstanding already; MU_ERR_LIMIT: MU_COMM_REQUESTS_MAX; MU_ERR_INVALID:
 * no such peer. */
enum mu_status mu_comm_send(struct mu_comm_group *group, uint32_t peer_rank, uint64_t exchange, const void *data,
                            size_t size, struct mu_comm_request *request, struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_comm_recv(struct mu_comm_group *group, uint32_t peer_rank, uint64_t exchange, void *into, size_t size,
                            struct mu_comm_request *request, struct mu_error *err) MU_WARN_UNUSED;

/* Right after mu_comm_send or mu_comm_recv in host memory: *ret_hash gets the XXH3-128 of the message when its last
 * byte has moved, while it is still in the cache, and before it counts as done. It must stay until then. */
void mu_comm_hash(struct mu_comm_request *request, struct mu_hash128 *ret_hash);

bool mu_comm_done(const struct mu_comm_request *request);

/* Progress until `request` is done, or all requests of the group are. MU_ERR_TIMEOUT names what is missing; the
 * requests stay outstanding and may be waited for again. */
enum mu_status mu_comm_wait(struct mu_comm_group *group, const struct mu_comm_request *request, uint64_t deadline_us,
                            struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_comm_wait_all(struct mu_comm_group *group, uint64_t deadline_us, struct mu_error *err) MU_WARN_UNUSED;

/* Peers that have failed so far, the first one first: what the coordinator is told. Returns how many; writes at most
 * `capacity`. After the first failure progress still looks for further ones, but moves no data. */
size_t mu_comm_group_failures(const struct mu_comm_group *group, struct mu_comm_failure *out, size_t capacity);
/* The first of them in words, with the rank: "rank 3: not connected by the deadline, last: ..."; empty: none yet. */
const char *mu_comm_group_failure_text(const struct mu_comm_group *group);
const char *mu_comm_failure_name(enum mu_comm_failure_kind kind);

/* Counters of all peers, in ascending rank; returns how many there are, writes at most `capacity`. A system call each.
 */
size_t mu_comm_group_traffic(const struct mu_comm_group *group, struct mu_comm_traffic *out, size_t capacity);

/* Counters of one peer; and the time for which this group's waits found nothing to move (spun or slept).
 * MU_ERR_NOT_FOUND: no such peer. */
enum mu_status mu_comm_peer_traffic(const struct mu_comm_group *group, uint32_t peer_rank,
                                    struct mu_comm_traffic *ret_traffic) MU_WARN_UNUSED;
uint64_t mu_comm_group_wait_us(const struct mu_comm_group *group);

#endif
