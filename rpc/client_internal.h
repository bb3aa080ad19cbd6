/* The inside of the client, shared by client.c (pool, client, unary calls) and stream.c (streams, readers). Internal to
 * rpc/. */
#ifndef MU_RPC_CLIENT_INTERNAL_H
#define MU_RPC_CLIENT_INTERNAL_H

#include <grpc/grpc.h>
#include <stdatomic.h>

#include "rpc/address.h"
#include "rpc/client.h"
#include "rpc/runtime.h"

struct client_op;
typedef void client_op_fn(struct client_op *op, bool ok);

/* One operation that the core may have in progress; `done` runs on the poller thread. `tag` first: the core's void * is
 * this struct. */
struct client_op {
    struct mu_rpc_tag tag;
    client_op_fn *done;
};

struct client_poller {
    grpc_completion_queue *cq;
    pthread_t thread;
};

struct mu_rpc_pool {
    struct client_poller pollers[MU_RPC_CLIENT_POLLERS_MAX];
    unsigned poller_count;
    atomic_uint next_poller; /* round robin */
};

struct mu_rpc_client {
    struct mu_rpc_client_config config;
    struct client_poller *poller;
    struct mu_rpc_address address;
    struct mu_rpc_tls *tls; /* NULL: plaintext */
    pthread_mutex_t lock;   /* channel, which is made anew when the TLS files were replaced */
    grpc_channel *channel;
    char address_text[MU_RPC_TARGET_SIZE];
    grpc_metadata headers[MU_RPC_HEADERS_MAX]; /* own their slices */
    size_t header_count;
};

/* What the peer says at the end of a call, and before it. Owned by the call's own struct. */
struct client_outcome {
    grpc_metadata_array initial, trailing;
    grpc_status_code code;
    grpc_slice details;
};

void mu_rpc_outcome_init(struct client_outcome *outcome);
void mu_rpc_outcome_fini(struct client_outcome *outcome);
enum mu_status mu_rpc_outcome_fail(const struct client_outcome *outcome, const char *address, const char *method,
                                   struct mu_error *err);

/* timeout_ms 0: none. The caller unrefs the call. */
grpc_call *mu_rpc_client_open(struct mu_rpc_client *client, const char *method, unsigned timeout_ms);

grpc_op mu_rpc_client_op_headers(struct mu_rpc_client *client);
grpc_op mu_rpc_client_op_initial(struct client_outcome *outcome);
grpc_op mu_rpc_client_op_status(struct client_outcome *outcome);

#endif
