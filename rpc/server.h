/* RPC server over the gRPC C core: bytes in, bytes out.
 *
 *    poller thread(s) --completed operations--+
 *    other threads ------ post, wake ---------+--> inbox --> core thread: mu_rpc_server_next -> event
 *                                                                         -> reply, send, finish
 *
 * Threads. ONE thread (the core thread: any thread, but always the same one) calls everything here, except
 * mu_rpc_server_post and mu_rpc_server_wake, which any thread may call until mu_rpc_server_free begins. Pollers belong
 * to this module and are never seen.
 *
 * Calls. A `struct mu_rpc_call *` is a handle that the core thread owns from the event that brings it (CALL or OPENED)
 * until it passes it to exactly one of mu_rpc_call_reply, mu_rpc_call_fail, mu_rpc_call_finish, which end the call and
 * consume the handle. There is no other way to lose or free a handle (but mu_rpc_server_free, which ends them all), and
 * after the end no event names it any more.
 *
 *    UNARY          CALL -> reply | fail
 *    SERVER_STREAM  CALL -> send* -> finish
 *    BIDI_STREAM    OPENED -> (MESSAGE | send)* -> finish
 *
 * If the peer ends first, exactly one CLOSED event says why. The handle stays valid (so a result that is still being
 * computed or persisted needs no special care): the owner ends the call as usual, and nothing is sent to a peer that is
 * gone. After MU_RPC_CLOSED_HALF the peer still listens: sends work, and finish gives it its status (should it go away
 * then, sends return MU_ERR_CANCELLED and no second CLOSED comes).
 *
 * A call whose deadline is over before its turn comes is answered so and never told.
 *
 * A peer that opens a stream and sends nothing, or never the rest of a message, makes no event: the owner limits in
 * time how long it waits for a first message.
 *
 * Flow control. One message per stream is in flight towards the core thread; the next is asked for when MESSAGE is
 * returned, so a peer that talks too fast is slowed down by HTTP/2. Sends queue per stream up to max_send_queue_*; over
 * that, MU_ERR_LIMIT. */
#ifndef MU_RPC_SERVER_H
#define MU_RPC_SERVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/histogram.h"
#include "common/status.h"
#include "rpc/bytes.h"
#include "rpc/code.h"
#include "rpc/tls.h"

struct mu_rpc_server;
struct mu_rpc_call;

enum mu_rpc_kind { MU_RPC_UNARY, MU_RPC_SERVER_STREAM, MU_RPC_BIDI_STREAM };

/* Who must not keep out whom. What happens to PRIORITY calls is told before anything else that waits; they count
 * against max_priority_calls, all others against max_calls and max_calls_per_peer. */
enum mu_rpc_class {
    MU_RPC_QUESTION, /* one client may make so many a second: max_questions_per_second */
    MU_RPC_PRIORITY,
    MU_RPC_CHANGE, /* never refused because its client asks much */
};

struct mu_rpc_method {
    const char *path; /* "/muster.v1.Session/Attach" */
    enum mu_rpc_kind kind;
    int id; /* comes back in every event of its calls */
    enum mu_rpc_class class;
};

/* Start from mu_rpc_server_config_default(). Strings and the table are copied. */
struct mu_rpc_server_config {
    const char *listen;          /* "host:port" (port 0: any free one), "[::1]:7070", "unix:/path" */
    struct mu_rpc_tls_files tls; /* set: only clients with a certificate of that CA */
    bool takes_strangers;        /* and such without: what they may call is up to the owner */
    const struct mu_rpc_method *methods;
    size_t method_count;
    unsigned pollers;          /* completion queues, each with its thread; 1..MU_RPC_POLLERS_MAX */
    size_t max_receive_bytes;  /* of one message; a larger one ends its call with RESOURCE_EXHAUSTED */
    size_t max_memory_bytes;   /* of the core, for all connections; beyond, it resets streams until there is room */
    size_t max_metadata_bytes; /* of the headers of one call */
    unsigned max_streams_per_connection; /* more wait in the client */
    size_t max_calls; /* open calls but those of PRIORITY, and such whose request or turn has not come yet; beyond:
                         RESOURCE_EXHAUSTED at once */
    size_t max_priority_calls; /* open calls of PRIORITY methods, likewise */
    /* Of one client: the identity of its certificate; without one, the host that it calls from. 0: no limit. */
    size_t max_calls_per_peer;          /* open calls but those of PRIORITY, likewise */
    unsigned max_questions_per_second;  /* QUESTION calls, and messages on their streams; more are RESOURCE_EXHAUSTED */
    unsigned max_connections_per_host;  /* more are closed at once (of IPv6 a /64 is one host; not for Unix sockets) */
    size_t max_send_queue_bytes;        /* per stream of PRIORITY */
    size_t max_send_queue_messages;     /* likewise */
    size_t max_ordinary_queue_bytes;    /* per other stream */
    size_t max_ordinary_queue_messages; /* likewise */
    size_t max_untaken_bytes; /* answers that peers do not take, of ended calls; beyond, the oldest are cut off */
    /* What a connection may send that is part of no call and no message yet, or have ended for it while it takes
     * nothing, and what all of them together may: see rpc/guests.h. 0: no limit. */
    size_t max_owed_bytes, max_owed_bytes_in_all;
    unsigned keepalive_time_s;       /* the kernel asks a host that is silent for so long whether it is still there */
    unsigned keepalive_timeout_s;    /* and closes its connections if it does not answer within */
    unsigned min_client_ping_ms;     /* clients may ping this often; one that does so faster is disconnected */
    unsigned max_connection_idle_ms; /* a connection without calls is closed after this; 0: never */
    unsigned linger_ms; /* a call whose request does not come, or whose rest is not taken, is cut off after this; the
                         * oldest before, when there are more of them than max_calls */
};

enum { MU_RPC_POLLERS_MAX = 16, MU_RPC_METHODS_MAX = 128 };

struct mu_rpc_server_config mu_rpc_server_config_default(void);

enum mu_rpc_event_type {
    MU_RPC_EVENT_CALL,     /* unary or server stream: the request is in data/size_bytes */
    MU_RPC_EVENT_OPENED,   /* bidi: a peer opened a stream (and has been told that it is open) */
    MU_RPC_EVENT_MESSAGE,  /* bidi: one message in data/size_bytes */
    MU_RPC_EVENT_WRITABLE, /* a send was refused with MU_ERR_LIMIT, and the queue of this stream is half empty now */
    MU_RPC_EVENT_CLOSED,   /* the peer ended the call, why is in `reason`; end it with reply, fail or finish */
    MU_RPC_EVENT_ITEM,     /* what mu_rpc_server_post brought */
    MU_RPC_EVENT_WAKE,     /* mu_rpc_server_wake was called at least once since the last WAKE */
    MU_RPC_EVENT_DRAINED,  /* after mu_rpc_server_drain: the last call is over */
};

enum mu_rpc_closed {
    MU_RPC_CLOSED_HALF,      /* bidi: the peer said that it has no more to send; it still listens */
    MU_RPC_CLOSED_CANCELLED, /* cancelled, or its process or connection is gone (the C core does not tell which) */
    MU_RPC_CLOSED_DEADLINE,  /* the deadline that the peer set is over, or was when it gave up (within a few percent) */
    MU_RPC_CLOSED_BAD_MESSAGE, /* bidi: a message over max_receive_bytes, or one that is not gRPC; the peer was told */
};

const char *mu_rpc_closed_name(enum mu_rpc_closed reason); /* "half-closed", "cancelled", ... */

/* Embed in what is posted (first member, then cast, or container_of): posting allocates nothing and cannot fail. */
struct mu_rpc_item {
    struct mu_rpc_item *next;
};

struct mu_rpc_event {
    enum mu_rpc_event_type type;
    enum mu_rpc_closed reason; /* CLOSED */
    int method_id;             /* all events of a call */
    struct mu_rpc_call *call;
    void *user;       /* as set by mu_rpc_call_set_user; NULL before */
    const void *data; /* CALL, MESSAGE: never NULL; valid until the next mu_rpc_server_next or mu_rpc_server_free */
    size_t size_bytes;
    struct mu_rpc_item *item; /* ITEM */
};

/* Binds, listens, starts the pollers; calls are accepted from now on. MU_ERR_BUSY: the address is in use;
 * MU_ERR_INVALID: bad config. */
enum mu_status mu_rpc_server_new(const struct mu_rpc_server_config *config, struct mu_error *err,
                                 struct mu_rpc_server **ret_server) MU_WARN_UNUSED;

/* The port bound (0 for a Unix socket), and "host:port" or "unix:path" with that port put in, for clients. */
uint16_t mu_rpc_server_port(const struct mu_rpc_server *server);
const char *mu_rpc_server_address(const struct mu_rpc_server *server);

/* Waits until mu_clock_mono_us() reaches `until_us` (0: does not wait; UINT64_MAX: for ever) for the next event. False:
 * none came. Events of one call come in order, as do items of one poster. While it is not called nothing is accepted,
 * read or sent further, so call it often; with until_us 0 it returns false exactly when nothing was waiting. */
bool mu_rpc_server_next(struct mu_rpc_server *server, uint64_t until_us, struct mu_rpc_event *ret_event);

/* From any thread. The item comes back as one ITEM event; until then it must stay in memory. */
void mu_rpc_server_post(struct mu_rpc_server *server, struct mu_rpc_item *item);
/* From any thread; cheap; calls between two WAKE events are merged. */
void mu_rpc_server_wake(struct mu_rpc_server *server);

/* Of one method, so far. */
struct mu_rpc_counts {
    uint64_t started, ended[MU_RPC_CODE_COUNT]; /* calls, by how */
    uint64_t received, sent;                    /* messages that were handed on, and that were given to the C core */
    struct mu_histogram took;                   /* unary calls that have ended: since their turn came */
};
/* Of the method registered as number `index`. False: there are no more. Core thread. */
bool mu_rpc_server_method(const struct mu_rpc_server *server, size_t index, const char **ret_path,
                          enum mu_rpc_kind *ret_kind, const struct mu_rpc_counts **ret_counts);
/* When the certificate in use expires (seconds since 1970); 0: no TLS. */
uint64_t mu_rpc_server_certificate_end_s(const struct mu_rpc_server *server);

/* Looks whether the TLS files were replaced; new connections then use the new ones. An error (told once per change)
 * leaves the former ones in use. */
enum mu_status mu_rpc_server_refresh_tls(struct mu_rpc_server *server, bool *ret_changed,
                                         struct mu_error *err) MU_WARN_UNUSED;

/* Ends all calls whose peer's identity is_cut() names, with PERMISSION_DENIED; each gets its CLOSED event as if the
 * peer had gone. Returns how many. */
size_t mu_rpc_server_cut(struct mu_rpc_server *server, bool (*is_cut)(void *ctx, const char *identity), void *ctx,
                         const char *text);

/* What was not taken so far because a limit was reached, apart from single messages. */
struct mu_rpc_refusals {
    uint64_t connections_of_peer;      /* over max_connections_per_host */
    uint64_t connections_without_file; /* the process may open no further files */
    uint64_t connections_owing;        /* closed: over max_owed_bytes, or together over max_owed_bytes_in_all */
    uint64_t calls, calls_of_peer, questions_of_peer;
    uint64_t answers_untaken;  /* withdrawn: over max_untaken_bytes, or more of them than max_calls */
    uint64_t requests_awaited; /* calls cut off since their request did not come, or too many waited: see linger_ms */
    char last_host[48];        /* with too many connections; "": none yet */
    char last_owing[48];       /* of one of connections_owing; likewise */
    bool is_stuck;             /* clients may wait for a descriptor and are not looked at before another one comes */
};
struct mu_rpc_refusals mu_rpc_server_refusals(struct mu_rpc_server *server);

/* Open calls: accepted and not ended, or ended and not yet delivered to the peer (who do not keep others out). */
size_t mu_rpc_server_call_count(const struct mu_rpc_server *server);

/* Stops listening and refuses new calls (a client sees UNAVAILABLE); open ones go on. Goes on with mu_rpc_server_next
 * until DRAINED or until the patience of the caller is over. May be called once. */
void mu_rpc_server_drain(struct mu_rpc_server *server);

/* Ends everything: cancels what is still open, waits for the core to let go of it (milliseconds), joins the pollers,
 * frees. Handles are dead afterwards, and items not yet taken are forgotten: other threads must have stopped posting.
 * NULL is fine. */
void mu_rpc_server_free(struct mu_rpc_server *server);

/* --- calls: core thread only --- */

/* Unary: answers OK with `reply` (a reference of its own is taken) and ends the call. */
void mu_rpc_call_reply(struct mu_rpc_call *call, struct mu_rpc_bytes *reply);
/* Unary and streams before or after sends: ends the call with an error. For streams what is queued is sent first. */
void mu_rpc_call_fail(struct mu_rpc_call *call, enum mu_rpc_code code, const char *text);
/* The same with what programs need to know beside the text (a trailer; see muster/v1/error.proto). */
void mu_rpc_call_fail_as(struct mu_rpc_call *call, enum mu_rpc_code code, const struct mu_error *err);
/* The same with the code for err->status. */
void mu_rpc_call_fail_error(struct mu_rpc_call *call, const struct mu_error *err);
/* Streams: sends what is queued, then the status, and ends the call. code may be MU_RPC_OK; text NULL is "". */
void mu_rpc_call_finish(struct mu_rpc_call *call, enum mu_rpc_code code, const char *text);

/* Streams: queues one message (a reference of its own is taken). MU_ERR_LIMIT: the queue is full, nothing was queued,
 * WRITABLE will come. MU_ERR_CANCELLED: the peer is gone (CLOSED has come or will). A message larger than
 * max_send_queue_bytes is let into an empty queue. */
enum mu_status mu_rpc_call_send(struct mu_rpc_call *call, struct mu_rpc_bytes *message) MU_WARN_UNUSED;

void mu_rpc_call_set_user(struct mu_rpc_call *call, void *user);
void *mu_rpc_call_user(const struct mu_rpc_call *call);
int mu_rpc_call_method_id(const struct mu_rpc_call *call);
/* "10.0.0.7:51324", "[::1]:51324", "unix:"; lives as long as the handle. */
const char *mu_rpc_call_peer(struct mu_rpc_call *call);
/* Who the certificate of the peer names: the first SAN that is a URI "muster://...", else the first DNS name as
 * "dns:host". "" without TLS, or when it has neither. Lives as long as the handle. */
const char *mu_rpc_call_identity(struct mu_rpc_call *call);
/* Whether the peer has shown a certificate of the CA; false without TLS. */
bool mu_rpc_call_has_certificate(const struct mu_rpc_call *call);
/* The certificate that the peer has shown, as PEM, from malloc; NULL: none, or no TLS. */
char *mu_rpc_call_certificate(const struct mu_rpc_call *call);
/* The monotonic microsecond at which the peer gives up; UINT64_MAX: never. */
uint64_t mu_rpc_call_deadline_us(const struct mu_rpc_call *call);
/* The first header named `key` (lower case) of the call; false when it has none. Not terminated; lives as long as the
 * handle. */
bool mu_rpc_call_metadata(const struct mu_rpc_call *call, const char *key, const char **ret_value,
                          size_t *ret_size_bytes);
/* Messages waiting to be sent, and their bytes (the one on the wire included). */
size_t mu_rpc_call_queued_messages(const struct mu_rpc_call *call);
size_t mu_rpc_call_queued_bytes(const struct mu_rpc_call *call);

#endif
