/* Wire format <-> plain values. The trust boundary: nothing that came over a socket or from a disk goes further than
 * this module before it has been judged; unpacked protobuf messages stay behind it.
 *
 * Decoding: bytes are capped first, then the raw bytes are walked (known shapes, depth, number of unknown fields,
 * strings without NUL and control characters and in valid UTF-8), then unpacked by an allocator with a budget, then
 * every enum, count, length and character set is checked while the plain value is made. An error is one line
 * "Hello.name: ..." (message and field, what is there, what is allowed).
 *
 * Encoding: free texts (reasons, error lines) are cleaned and cut to what the decoder takes; other strings that the
 * decoder would refuse are an error here already.
 *
 * Ownership: whatever a decoded value or an encoded message points to lies in the caller's arena, until it is reset or
 * ended. Threads: an arena belongs to one thread at a time; nothing else is shared. No I/O. */
#ifndef MU_PROTO_WIRE_H
#define MU_PROTO_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"
#include "plan/session.h"

enum {
    MU_WIRE_WORKER_BYTES_MAX = 16 << 10,  /* one message of a worker */
    MU_WIRE_COORD_BYTES_MAX = 512 << 10,  /* one message of the coordinator to a worker: the largest Assign */
    MU_WIRE_REQUEST_BYTES_MAX = 64 << 10, /* one request of the service */
    MU_WIRE_REPLY_BYTES_MAX = 4 << 20,    /* one answer of the service, one watched event */
    MU_WIRE_DEPTH_MAX = 8,                /* messages within messages */
    MU_WIRE_UNKNOWN_MAX = 64,             /* fields of later versions in one top-level message */
};

/* Memory that is handed out piecewise and given back at once. A steady stream of messages allocates nothing after the
 * first ones. */
struct mu_wire_arena {
    struct mu_wire_block *blocks; /* newest first */
    size_t keep_bytes;
    bool
        failed; /* an allocation failed since the last reset: what was built is not complete, mu_wire_pack refuses it */
};

void mu_wire_arena_init(struct mu_wire_arena *arena);
void mu_wire_arena_reset(
    struct mu_wire_arena *arena); /* ends the life of everything in it; keeps one block of moderate size */
void mu_wire_arena_fini(struct mu_wire_arena *arena);
/* Aligned to 16, zeroed; NULL when memory is out. */
void *mu_wire_arena_alloc(struct mu_wire_arena *arena, size_t size_bytes);

/* Worker -> coordinator. A worker message has no pointers, so it needs the arena only during the call. */
enum mu_status mu_wire_encode_worker(struct mu_wire_arena *arena, const struct mu_worker_message *message,
                                     const void **ret_data, size_t *ret_size_bytes,
                                     struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_wire_decode_worker(struct mu_wire_arena *arena, const void *data, size_t size_bytes,
                                     struct mu_worker_message *ret_message, struct mu_error *err) MU_WARN_UNUSED;

/* Coordinator -> worker. A spec in Welcome has passed mu_job_spec_check after decoding. */
enum mu_status mu_wire_encode_coord(struct mu_wire_arena *arena, const struct mu_coord_message *message,
                                    const void **ret_data, size_t *ret_size_bytes, struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_wire_decode_coord(struct mu_wire_arena *arena, const void *data, size_t size_bytes,
                                    struct mu_coord_message *ret_message, struct mu_error *err) MU_WARN_UNUSED;

/* An address, path, file name, ... as it may appear in a message: valid UTF-8 without control characters, shorter than
 * capacity. */
bool mu_wire_text_ok(const char *text, size_t capacity);
/* Makes any bytes such a text: control characters and invalid sequences become '?', cut at a character boundary. out
 * holds capacity. */
void mu_wire_text_clean(const char *text, char *out, size_t capacity);
/* A job or worker name: a-z 0-9 . _ - with a letter or digit first, 1 to capacity - 1 characters. */
bool mu_wire_name_ok(const char *name, size_t capacity);
/* Makes a host's name such a name: lower case, anything else becomes '_', cut. out holds capacity, at least 2. */
void mu_wire_name_clean(const char *text, char *out, size_t capacity);

#endif
