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

struct mu_rpc_tls;

/* Reads and judges the files, and makes this process one that leaves no core dump. is_stranger: a client that shows no
 * certificate, and needs the CA alone. */
enum mu_status mu_rpc_tls_new(const struct mu_rpc_tls_files *files, bool is_stranger, struct mu_error *err,
                              struct mu_rpc_tls **ret_tls) MU_WARN_UNUSED;
/* After the credentials are released and their users gone. NULL is fine. */
void mu_rpc_tls_free(struct mu_rpc_tls *tls);

/* Reads the files again when they have changed. An error keeps what was there, and is told once per change. Any thread.
 */
enum mu_status mu_rpc_tls_refresh(struct mu_rpc_tls *tls, bool *ret_changed, struct mu_error *err) MU_WARN_UNUSED;

/* Calls `use` with the contents of the files, which are borrowed. Any thread. */
typedef enum mu_status mu_rpc_tls_use_fn(void *ctx, const char *ca, const char *cert, const char *key,
                                         struct mu_error *err);
enum mu_status mu_rpc_tls_use(struct mu_rpc_tls *tls, mu_rpc_tls_use_fn *use, void *ctx,
                              struct mu_error *err) MU_WARN_UNUSED;

#endif
