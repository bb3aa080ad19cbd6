/* Mutual TLS from three PEM files. They may be replaced while the program runs: new connections use what is there, a
 * pair that does not fit together is refused and the former one stays in use. */
#ifndef MU_RPC_TLS_H
#define MU_RPC_TLS_H

#include <stdbool.h>

#include "common/status.h"

/* Paths, borrowed. All set, or none: no TLS. */
struct mu_rpc_tls_files {
    const char *ca;   /* who the other side must have been signed by; several certificates are allowed */
    const char *cert; /* our own, with what is needed to reach the CA behind it */
    const char *key;  /* its private key, unencrypted: only our user may be able to read the file */
};

/* From MUSTER_TLS_CA, MUSTER_TLS_CERT, MUSTER_TLS_KEY; unset and empty are NULL. */
struct mu_rpc_tls_files mu_rpc_tls_files_from_environment(void);
bool mu_rpc_tls_wanted(const struct mu_rpc_tls_files *files);

#endif
