/* How a worker that has no certificate yet gets one: it makes a key, brings a join token to the coordinator, whose own
 * certificate it verifies, and is given a certificate for that key. Both are written where its TLS files are to lie. */
#ifndef MU_WORKER_JOIN_H
#define MU_WORKER_JOIN_H

#include <stdint.h>

#include "common/status.h"
#include "rpc/tls.h"

struct mu_join_config {
    const char *coordinator;
    struct mu_rpc_tls_files tls; /* the CA is there; certificate and key are where they are to be written */
    const char *token_file;      /* a line with the token, for no other user to read; NULL: $MUSTER_JOIN_TOKEN */
    const char *name;            /* of the worker; NULL: the host's */
    uint32_t give_up_ms;         /* without a coordinator; 0: never */
};

/* Does nothing when there is a certificate with its key that is not over yet (worker/renew.h), and when there is no
 * token.
 * MU_ERR_UNAVAILABLE: no coordinator answered for give_up_ms. Blocks; before other threads are started. */
enum mu_status mu_join(const struct mu_join_config *config, struct mu_error *err) MU_WARN_UNUSED;

#endif
