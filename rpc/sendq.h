/* Bounded queue of outgoing messages of one stream. Not thread-safe. Internal to rpc/. */
#ifndef MU_RPC_SENDQ_H
#define MU_RPC_SENDQ_H

#include <stdbool.h>
#include <stddef.h>

#include "common/status.h"
#include "rpc/bytes.h"

struct mu_rpc_sendq_node;

struct mu_rpc_sendq {
    struct mu_rpc_sendq_node *first, **last;
    size_t count, size_bytes; /* including the message on the wire */
    size_t max_count, max_bytes;
    size_t wire_bytes; /* of the message taken and not yet done */
    bool on_wire, refused;
};

void mu_rpc_sendq_init(struct mu_rpc_sendq *queue, size_t max_count, size_t max_bytes);
/* Forgets what waits. The message on the wire stays counted until mu_rpc_sendq_done. */
void mu_rpc_sendq_clear(struct mu_rpc_sendq *queue);
/* Takes a reference of its own. MU_ERR_LIMIT: full, and mu_rpc_sendq_done will say when it is half empty. */
enum mu_status mu_rpc_sendq_push(struct mu_rpc_sendq *queue, struct mu_rpc_bytes *message) MU_WARN_UNUSED;
/* The next message to put on the wire (the caller's reference), or NULL while one is on it or none waits. */
struct mu_rpc_bytes *mu_rpc_sendq_take(struct mu_rpc_sendq *queue);
/* The message on the wire is done. True once after a refusal, when the queue is half empty. */
bool mu_rpc_sendq_done(struct mu_rpc_sendq *queue);

#endif
