/* RPC client over the gRPC C core: bytes in, bytes out. For workers, the command line, tests and load generators.
 *
 * Threads. A pool owns the completion queues and their poller threads; many clients share one. Everything here may be
 * called from any thread, unless said otherwise. Callbacks of streams run on a poller thread: they must not block and
 * must not make blocking calls (unary, reader) on a client of the same pool.
 *
 * One client is one connection (made at the first call, never shared with another client). Nothing waits for a server
 * that is not there: a call to an address where nobody listens fails at once with MU_ERR_UNAVAILABLE, and *when to try
 * again is the caller's decision*; underneath, the connection is attempted anew at most every reconnect_ms while
 * somebody asks. */
#ifndef MU_RPC_CLIENT_H
#define MU_RPC_CLIENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"
#include "rpc/bytes.h"
#include "rpc/code.h"
#include "rpc/tls.h"

struct mu_rpc_pool;
struct mu_rpc_client;
struct mu_rpc_stream;
struct mu_rpc_reader;

/* One header that goes with every call. Key in lower case. */
struct mu_rpc_header {
    const char *key, *value;
};

/* Start from mu_rpc_client_config_default(). Strings are copied. */
struct mu_rpc_client_config {
    const char *address;            /* "host:port", "[::1]:7070", "unix:/path" */
    struct mu_rpc_tls_files tls;    /* set: both sides show certificates; replaced files count from the next call on */
    bool is_stranger;               /* has no certificate of its own yet: of `tls` the CA alone counts */
    size_t max_receive_bytes;       /* of one message; a larger one ends its call with MU_ERR_LIMIT */
    size_t max_send_queue_bytes;    /* per stream */
    size_t max_send_queue_messages; /* per stream */
    unsigned connect_timeout_ms;    /* for one attempt (an address that swallows packets) */
    unsigned reconnect_ms;          /* least time between attempts; the C core allows no less than 100 */
    unsigned keepalive_time_ms;     /* HTTP/2 ping on a silent connection; not below the server's min_client_ping_ms */
    unsigned keepalive_timeout_ms;  /* and dead if it is not answered within */
    const struct mu_rpc_header *headers;
    size_t header_count;
};

enum { MU_RPC_HEADERS_MAX = 16 };

struct mu_rpc_client_config mu_rpc_client_config_default(void);

/* pollers: 1..MU_RPC_CLIENT_POLLERS_MAX threads; clients are spread over them. */
enum { MU_RPC_CLIENT_POLLERS_MAX = 16 };
enum mu_status mu_rpc_pool_new(unsigned pollers, struct mu_error *err, struct mu_rpc_pool **ret_pool) MU_WARN_UNUSED;
/* All clients of the pool must be freed. Not from a callback. NULL is fine. */
void mu_rpc_pool_free(struct mu_rpc_pool *pool);

/* Does not connect yet. MU_ERR_INVALID: the address cannot be parsed. */
enum mu_status mu_rpc_client_new(struct mu_rpc_pool *pool, const struct mu_rpc_client_config *config,
                                 struct mu_error *err, struct mu_rpc_client **ret_client) MU_WARN_UNUSED;
/* All its streams and readers must be freed, no call in progress. NULL is fine. */
void mu_rpc_client_free(struct mu_rpc_client *client);
const char *mu_rpc_client_address(const struct mu_rpc_client *client);
/* When the certificate is over that the next call will show, in seconds since 1970; 0: no TLS, or none. */
uint64_t mu_rpc_client_certificate_end_s(struct mu_rpc_client *client);

/* Unary call; blocks at most about timeout_ms. The reply is the caller's reference. `err` holds the server's text or
 * ours. */
enum mu_status mu_rpc_client_call(struct mu_rpc_client *client, const char *method, struct mu_rpc_bytes *request,
                                  unsigned timeout_ms, struct mu_error *err,
                                  struct mu_rpc_bytes **ret_reply) MU_WARN_UNUSED;

/* --- server stream, read by blocking --- */

/* Starts the call; never blocks. Failure to connect comes from the first mu_rpc_reader_next. */
enum mu_status mu_rpc_reader_new(struct mu_rpc_client *client, const char *method, struct mu_rpc_bytes *request,
                                 struct mu_error *err, struct mu_rpc_reader **ret_reader) MU_WARN_UNUSED;
/* One thread at a time. MU_OK with a message (the caller's reference), or with NULL at the good end of the stream.
 * MU_ERR_TIMEOUT with is only this wait being over (call again; it never means anything else); timeout_ms -1 waits for
 * ever. Any other status is the end of the stream and is returned again by further calls. The next message is asked for
 * when this one is taken. */
enum mu_status mu_rpc_reader_next(struct mu_rpc_reader *reader, int timeout_ms, struct mu_error *err,
                                  struct mu_rpc_bytes **ret_message) MU_WARN_UNUSED;
/* From any thread: the wait in progress and all further ones return MU_ERR_CANCELLED. */
void mu_rpc_reader_cancel(struct mu_rpc_reader *reader);
/* Cancels if it is still open. No mu_rpc_reader_next in progress. NULL is fine. */
void mu_rpc_reader_free(struct mu_rpc_reader *reader);

/* --- bidirectional stream, events by callback --- */

enum mu_rpc_stream_event_type {
    MU_RPC_STREAM_OPENED,   /* the server accepted the stream; never after a MESSAGE, absent when it was refused */
    MU_RPC_STREAM_MESSAGE,  /* one message in data/size_bytes, valid during the callback */
    MU_RPC_STREAM_WRITABLE, /* a send was refused with MU_ERR_LIMIT, and the queue is half empty now */
    MU_RPC_STREAM_CLOSED,   /* the end, for whatever reason: exactly one, always the last event */
};

struct mu_rpc_stream_event {
    enum mu_rpc_stream_event_type type;
    const void *data; /* MESSAGE */
    size_t size_bytes;
    enum mu_rpc_code code;        /* CLOSED: as on the wire; MU_RPC_OK when the server finished the stream well */
    const struct mu_error *error; /* CLOSED, code not OK: status and one line for a person; valid during the callback */
};

/* Runs on a poller thread, one event of a stream at a time. */
typedef void mu_rpc_stream_fn(void *user, const struct mu_rpc_stream_event *event);

/* Starts the stream; never blocks; always ends in one CLOSED event (also when the server cannot be reached), unless it
 * is freed before. The first callback may run before this returns; *ret_stream is set by then. Messages may be sent at
 * once; they go out when the connection is there. */
enum mu_status mu_rpc_stream_new(struct mu_rpc_client *client, const char *method, mu_rpc_stream_fn *fn, void *user,
                                 struct mu_error *err, struct mu_rpc_stream **ret_stream) MU_WARN_UNUSED;
/* From any thread (callbacks too). Takes a reference of its own. MU_ERR_LIMIT: the queue is full, WRITABLE will come;
 * MU_ERR_CANCELLED: the stream is closed, half-closed or cancelled. A message larger than max_send_queue_bytes is let
 * into an empty queue. */
enum mu_status mu_rpc_stream_send(struct mu_rpc_stream *stream, struct mu_rpc_bytes *message) MU_WARN_UNUSED;
/* After what is queued, says that no more is coming (half-close); the server then finishes the stream. */
void mu_rpc_stream_close_send(struct mu_rpc_stream *stream);
/* Resets the stream now: CLOSED with MU_RPC_CANCELLED follows. What is queued may be lost. */
void mu_rpc_stream_cancel(struct mu_rpc_stream *stream);
/* Cancels if it is still open. When it returns no callback is running or will run; from inside a callback (of this
 * stream only) it does not wait, and that callback is the last. NULL is fine. */
void mu_rpc_stream_free(struct mu_rpc_stream *stream);

#endif
