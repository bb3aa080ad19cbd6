/* Shared by the files of the socket data plane (comm_socket.c, comm_shake.c, comm_stream.c, comm_address.c); nobody
 * else includes it.
 *
 * One edge-triggered epoll set serves everything. Events only set flags on their source; the work is done afterwards in
 * list order, so nothing is freed while events that point to it are still being looked at. */
#ifndef MU_WORKER_COMM_INTERNAL_H
#define MU_WORKER_COMM_INTERNAL_H

#include <netinet/in.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>

#include "worker/comm.h"
#include "worker/secure.h"

enum {
    COMM_BUCKETS = 64,      /* of the tables by exchange number; a power of two */
    COMM_INBOX_SIZE = 8192, /* bytes read ahead per connection, beyond a posted buffer */
    COMM_BURST_FRAMES = 16, /* frames handed to the kernel in one call */
    COMM_STAGING_SIZE = MU_COMM_PIECE_SIZE + (COMM_BURST_FRAMES - 1) * MU_COMM_EAGER_SIZE,
    COMM_TURN_SIZE = 1024 * 1024, /* bytes moved per peer and direction in one progress */
    COMM_ACCEPTS_PER_TURN = 32,
    COMM_SCRATCH_SIZE = 64 * 1024,
    COMM_RETRY_FIRST_US = 1000, /* redial: 1 ms, doubled up to 50 ms */
    COMM_RETRY_LAST_US = 50000,
    COMM_ACCEPT_RETRY_US = 10000, /* after accept found no descriptor free */
    COMM_LINGER_US = 2000000,     /* how long a goodbye may wait for room */
};

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "frames are little-endian structs");

/* ---- on the wire ---- */

enum {
    WIRE_MAGIC = 0x4d43554d, /* "MUCM" */
    WIRE_VERSION = 1,
};

enum wire_kind {
    WIRE_HELLO = 1,
    WIRE_CHALLENGE,
    WIRE_RESPONSE,
    WIRE_WELCOME,
    WIRE_REFUSE,
    WIRE_DATA,
    WIRE_GRANT,
    WIRE_BYE
};

enum wire_refusal {
    WIRE_REFUSE_STALE = 1,
    WIRE_REFUSE_STRANGER,
    WIRE_REFUSE_SECRET,
    WIRE_REFUSE_VERSION,
    WIRE_REFUSE_INCARNATION
};

struct wire_prefix {
    uint32_t magic;
    uint16_t version;
    uint8_t kind, reason;
};

struct wire_hello {
    struct wire_prefix prefix;
    uint64_t generation;
    uint32_t from_rank, to_rank, world, reserved;
    struct mu_id from_incarnation, to_incarnation;
    uint8_t nonce[32];
};

struct wire_challenge {
    struct wire_prefix prefix;
    uint8_t nonce[32], mac[32];
};

struct wire_response {
    struct wire_prefix prefix;
    uint8_t mac[32];
};

struct wire_frame {
    struct wire_prefix prefix;
    uint64_t generation, exchange;
    uint64_t offset, total; /* of the message, bytes */
    uint32_t length, reserved;
};

_Static_assert(sizeof(struct wire_prefix) == 8 && sizeof(struct wire_hello) == 96 &&
                   sizeof(struct wire_challenge) == 72 && sizeof(struct wire_response) == 40 &&
                   sizeof(struct wire_frame) == 48,
               "no padding on the wire");

/* ---- sources of events ---- */

enum source_kind { SOURCE_WAKE, SOURCE_LISTENER, SOURCE_PENDING, SOURCE_PEER, SOURCE_LEAVING };

struct source {
    enum source_kind kind;
    int fd;        /* -1 when closed */
    bool readable; /* not yet seen EAGAIN since the last event */
    bool writable;
    bool hung; /* the other end has closed, or an error is waiting */
};

struct literal_address {
    char host_id[MU_COMM_HOST_ID_SIZE];
    struct sockaddr_un local;
    socklen_t local_size;
    struct sockaddr_storage tcp;
    socklen_t tcp_size;
};

enum { MU_COMM_TCP_TEXT_SIZE = 96 };
/* "192.0.2.1:4711", "[2001:db8::1]:4711". */
void mu_comm_tcp_text(const struct sockaddr_storage *address, char out[MU_COMM_TCP_TEXT_SIZE]);

/* A connection that was accepted and has not proved yet who it is (comm_shake.c). */
struct pending {
    struct source source;
    enum { PENDING_HELLO, PENDING_HELD, PENDING_RESPONSE } state;
    uint64_t deadline_us;
    bool tcp;
    struct wire_hello hello;
    struct wire_response response;
    size_t have; /* bytes of the message being read */
    uint8_t expected_mac[32];
};

/* ---- one connection of a group ---- */

struct table {
    struct mu_comm_link *buckets[COMM_BUCKETS];
    size_t count;
};

struct queue {
    struct mu_comm_request *first, *last;
};

/* A small message that came before its receive was posted. */
struct slot {
    struct mu_comm_link link;
    size_t size;
    uint8_t data[MU_COMM_EAGER_SIZE];
};

/* The peer's permission to send a large message, that came before the send was posted. */
struct grant {
    struct mu_comm_link link;
    uint64_t total;
};

struct outbox {
    struct wire_frame heads[COMM_BURST_FRAMES];
    struct iovec iov[2 * COMM_BURST_FRAMES];
    struct mu_comm_request *requests[COMM_BURST_FRAMES]; /* sends with bytes in the burst, or NULL */
    uint32_t lengths[COMM_BURST_FRAMES];
    size_t frame_count, iov_count, iov_next;
    uint8_t *staging; /* COMM_STAGING_SIZE: copies of what lies on the device; NULL without one */
    size_t staged;
};

struct inbox {
    uint8_t bytes[COMM_INBOX_SIZE];
    size_t begin, end;
    struct wire_frame head;
    bool in_payload;
    bool held_back;   /* a small message that no slot is free for: do not read on */
    bool resume;      /* no longer: look at `head` again, without an event */
    uint8_t *into;    /* NULL: throw away */
    uint8_t *staging; /* MU_COMM_PIECE_SIZE: for what goes on to the device; NULL without one */
    size_t missing;   /* bytes of the frame's payload still to come */
    struct mu_comm_request *request;
    struct slot *slot;
};

/*             dial                     writable              challenge                welcome
 *  RETRYING --------> CONNECTING ---------------> GREETING ------------> PROVING ----------------> UP
 *     ^------------------'<--- lost, timed out -------'<------------------'                        | bye
 *                                                                                                  v
 *  AWAITING -- a pending connection has proved itself --> UP        any of them -- failure --> DOWN    LEFT
 *
 *  Before UP comes SECURING (the hand-shake of TLS) where the connection is to be encrypted. */
enum peer_state {
    PEER_RETRYING,
    PEER_CONNECTING,
    PEER_GREETING,
    PEER_PROVING,
    PEER_AWAITING,
    PEER_SECURING,
    PEER_UP,
    PEER_LEFT,
    PEER_DOWN
};

struct peer {
    struct source source;
    struct mu_comm_group *group;
    uint32_t rank;
    enum peer_state state;
    struct mu_id incarnation;
    struct literal_address address;

    /* dialling */
    bool over_tcp;
    bool dialled_before;
    uint64_t retry_at_us, retry_delay_us, attempt_deadline_us;
    struct wire_hello hello;
    uint8_t reply[sizeof(struct wire_challenge)];
    size_t reply_have;
    char last_trouble[176]; /* why the latest attempt failed, for the message at the deadline */

    /* transfers */
    struct table sends, receives, slots, grants;
    struct queue to_grant, small, bulk; /* receives to announce; sends that may go */
    struct slot *free_slots;
    struct inbox *in;
    struct outbox *out;
    int write_errno;          /* a failed write; the reading side finds out why */
    struct mu_secure *secure; /* NULL: in the clear */
    struct mu_comm_traffic traffic;
};

struct mu_comm_group {
    struct mu_comm *comm;
    struct mu_comm_group *next;
    uint64_t generation, deadline_us, wait_us;
    uint32_t rank, world;
    struct mu_id incarnation;
    uint8_t secret[MU_COMM_SECRET_SIZE];
    bool encrypted;
    struct peer *peers; /* ascending rank */
    size_t peer_count, up_count, turn;
    size_t outstanding; /* requests that are not done */
    struct mu_comm_failure *failures;
    size_t failure_count;
    char failure_text[256]; /* of the first one */
};

/* A connection of a closed group whose socket was too full for the goodbye. */
struct leaving {
    struct source source;
    struct leaving *next;
    uint64_t deadline_us;
    struct mu_secure *secure; /* NULL: in the clear */
    struct wire_frame bye;
    size_t sent;
};

struct mu_comm {
    int epoll_fd;
    struct source wake, unix_listener, tcp_listener;
    atomic_uint_least64_t aborted; /* newest aborted generation; 0: none (generations start at 1) */
    uint64_t newest_generation;    /* opened so far */
    uint64_t accept_again_us;      /* 0, or when to try again after running out of descriptors */
    struct mu_comm_limits limits;
    struct mu_device *device; /* NULL: none but the host */
    bool device_busy;         /* in the last turn something could not move because the device has not come so far */
    char host_id[MU_COMM_HOST_ID_SIZE];
    char unix_path[sizeof(((struct sockaddr_un *)0)->sun_path)]; /* to unlink, or empty */
    char address[MU_COMM_ADDRESS_SIZE];
    struct mu_comm_group *groups;
    struct leaving *leaving;
    struct pending **pending; /* oldest first */
    size_t pending_count;
    struct mu_comm_stats stats;
    uint8_t *scratch;
    bool (*idle)(void *ctx); /* NULL: none, or it is running */
    void *idle_ctx;
};

/* ---- comm_address.c ---- */
enum mu_status mu_comm_listen(struct mu_comm *comm, const struct mu_comm_config *config,
                              struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_comm_address_parse(const char *text, struct literal_address *ret_address,
                                     struct mu_error *err) MU_WARN_UNUSED;

/* ---- comm_socket.c ---- */
bool mu_comm_cancelled(const struct mu_comm *comm, uint64_t generation);
/* 0, or the errno of epoll_ctl. */
int mu_comm_watch(struct mu_comm *comm, struct source *source);
void mu_comm_source_close(struct source *source);
void mu_comm_peer_fail(struct peer *peer, enum mu_comm_failure_kind kind, int errno_value, const char *fmt, ...)
    MU_PRINTF(4, 5);
struct mu_comm_group *mu_comm_find_group(const struct mu_comm *comm, uint64_t generation);
struct peer *mu_comm_find_peer(const struct mu_comm_group *group, uint32_t rank);
void mu_comm_tune(const struct mu_comm *comm, int fd, bool tcp);

/* ---- comm_shake.c: all return whether anything happened ---- */
bool mu_comm_accept(struct mu_comm *comm, uint64_t now_us);
bool mu_comm_pending_step(struct mu_comm *comm, uint64_t now_us);
void mu_comm_pending_drop(struct mu_comm *comm, size_t index);
/* Dials, or goes on with the hand-shake. */
bool mu_comm_dial_step(struct peer *peer, uint64_t now_us);
/* Goes on with the hand-shake of TLS. */
bool mu_comm_secure_step(struct peer *peer);
/* Earliest time at which accept, pending or dialling wants to be called without an event; UINT64_MAX: none. */
uint64_t mu_comm_shake_deadline(const struct mu_comm *comm);

/* ---- comm_stream.c ---- */
/* Makes a connected peer of `peer`, whose source holds the proved socket. */
void mu_comm_stream_start(struct peer *peer);
bool mu_comm_stream_step(struct peer *peer);
/* Says goodbye and closes the socket; what the socket cannot take now is sent by mu_comm_leaving_step. No goodbye when
 * a frame is half sent. A reason other than NONE fails the group there. */
void mu_comm_stream_leave(struct peer *peer, enum mu_comm_failure_kind reason);
void mu_comm_leaving_step(struct mu_comm *comm, uint64_t now_us);
void mu_comm_stream_fini(struct peer *peer);
/* Called by the posts: match with what came before. */
void mu_comm_stream_posted(struct peer *peer, struct mu_comm_request *request);
struct mu_comm_link *mu_comm_table_find(const struct table *table, uint64_t exchange);
void mu_comm_table_insert(struct table *table, struct mu_comm_link *link);
void mu_comm_table_remove(struct table *table, struct mu_comm_link *link);

enum { REQUEST_SEND = 1, REQUEST_RECEIVE };
enum { REQUEST_OUTSTANDING = 1, REQUEST_GRANTED, REQUEST_DONE };

#endif
