/* The inside of the server, shared by server.c (life, accepting, the turn of the core thread) and call.c (one call).
 * Internal to rpc/. */
#ifndef MU_RPC_SERVER_INTERNAL_H
#define MU_RPC_SERVER_INTERNAL_H

#include <grpc/grpc.h>

#include "rpc/address.h"
#include "rpc/gate.h"
#include "rpc/guests.h"
#include "rpc/inbox.h"
#include "rpc/peers.h"
#include "rpc/runtime.h"
#include "rpc/sendq.h"
#include "rpc/server.h"

enum op_kind { OP_ACCEPT, OP_CLOSE, OP_HEADERS, OP_RECV, OP_SEND, OP_FINISH, OP_SHUTDOWN };

/* One operation that the core may have in progress. `tag` first: the core's void * is this struct. */
struct rpc_op {
    struct mu_rpc_tag tag;
    enum op_kind kind;
    bool ok; /* written by the poller */
    struct mu_rpc_item node;
    struct mu_rpc_call *call; /* NULL for OP_SHUTDOWN */
};

struct rpc_poller {
    struct mu_rpc_server *server;
    grpc_completion_queue *cq;
    pthread_t thread;
};

struct rpc_method {
    char *path;
    enum mu_rpc_kind kind;
    int id;
    enum mu_rpc_class class;
    void *registered;
    struct mu_rpc_counts counts;
};

/* The pending operations, not the states, keep a call in memory: it is freed when none is left and its handle has been
 * consumed. */
struct mu_rpc_call {
    struct mu_rpc_server *server;
    const struct rpc_method *method; /* NULL: unknown method */
    struct rpc_poller *poller;
    grpc_call *grpc; /* NULL until accepted */
    grpc_metadata_array headers;
    grpc_call_details details; /* unknown method only */
    gpr_timespec deadline;
    uint64_t accepted_us;
    grpc_byte_buffer *received; /* the request, or what OP_RECV brings */
    grpc_byte_buffer *sending;
    int cancelled; /* written by the core for OP_CLOSE */
    struct rpc_op accept, close, headers_sent, recv, send, finish;
    unsigned pending_count;

    bool accepted;       /* OP_ACCEPT has brought a call */
    bool awaits_request; /* no bidi stream; nobody was told of it yet */
    bool counted;        /* in the server's ordinary_count or priority_count */
    bool untaken;        /* in the server's untaken_count */
    bool ended;          /* the handle is consumed */
    bool headers_out;    /* initial metadata is sent or on its way */
    bool over;           /* OP_CLOSE is done: the core has nothing more to say */
    bool recv_done;      /* no message will come any more */
    bool recv_bad;       /* because one could not be read */
    bool cut_off;        /* waited too long for its peer, or among too many */
    bool closed_told;    /* CLOSED was returned */
    bool finish_queued;  /* ended with messages still in the queue */
    enum mu_rpc_code code;
    char *text;
    grpc_slice details_out; /* borrows text */
    grpc_metadata trailer;  /* of a failure: what programs need; owns its value */

    struct mu_rpc_sendq queue;
    void *user;
    char *peer, *identity;
    int guest;                                     /* mu_rpc_guests_find */
    struct mu_rpc_peer *client;                    /* counted there; NULL: PRIORITY, or not admitted */
    struct mu_rpc_call *prev, *next;               /* all calls of the server */
    struct mu_rpc_call *linger_prev, *linger_next; /* calls that wait for their peer, oldest first */
    uint64_t linger_until_us;                      /* 0: not in that list */
    size_t reply_bytes;                            /* of a unary answer that the peer has not taken */
};

struct mu_rpc_server {
    struct mu_rpc_server_config config;
    struct mu_rpc_address address;
    char address_text[MU_RPC_TARGET_SIZE];
    struct mu_rpc_tls *tls; /* NULL: plaintext */
    grpc_server *grpc;
    grpc_metadata open_mark;
    struct rpc_poller pollers[MU_RPC_POLLERS_MAX];
    unsigned poller_count; /* running */
    struct rpc_method *methods;
    size_t method_count;
    struct rpc_op shutdown;
    bool started, draining, shut_down, drained_told, freeing;

    struct mu_rpc_gate *gate;
    struct mu_rpc_guests *guests; /* the gate's */
    struct mu_rpc_peers *peers;
    struct mu_rpc_refusals refusals; /* calls and questions */

    struct mu_rpc_inbox inbox;
    struct mu_rpc_batch batch; /* taken from the inbox, not yet worked through */
    unsigned urgent_run;       /* urgent operations since something else was worked on */
    grpc_slice payload;        /* of the last event */

    struct mu_rpc_call *calls;
    size_t object_count;                   /* calls in memory, armed ones included */
    size_t ordinary_count, priority_count; /* open; priority ones also while they linger */
    size_t untaken_count;                  /* ordinary ones that have ended */
    struct mu_rpc_call *linger_first, *linger_last;
    size_t linger_count, linger_bytes; /* of that list */
};

/* server.c */
void mu_rpc_server_arm(struct mu_rpc_server *server, const struct rpc_method *method, struct rpc_poller *poller);
void mu_rpc_server_linger(struct mu_rpc_call *call);
void mu_rpc_server_unlinger(struct mu_rpc_call *call);
struct mu_rpc_counts *mu_rpc_server_counts(const struct mu_rpc_call *call); /* of its method, which is known */

/* call.c */
struct mu_rpc_call *mu_rpc_call_new(struct mu_rpc_server *server, const struct rpc_method *method,
                                    struct rpc_poller *poller);
/* Works one completed operation off. True when it makes an event. May free the call. */
bool mu_rpc_call_step(struct mu_rpc_call *call, struct rpc_op *op, struct mu_rpc_event *ret_event);
/* The server goes: consumes the handle and cancels. May free the call. */
void mu_rpc_call_abandon(struct mu_rpc_call *call);

#endif
