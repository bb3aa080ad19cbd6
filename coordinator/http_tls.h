/* TLS of the HTTP listener (GnuTLS, below libmicrohttpd): the files, roles and list of the denied are those of the
 * service's own listener, and are looked at again once a second. A connection keeps the certificates it began with.
 * Listener's thread, but for new and free. */
#ifndef MU_COORDINATOR_HTTP_TLS_H
#define MU_COORDINATOR_HTTP_TLS_H

#include <gnutls/gnutls.h>

#include "rpc/tls.h"

struct mu_http_tls;
struct mu_http_tls_peer; /* of one connection */

/* `deny_path` as of coordinator/access.h. Strings are borrowed. */
enum mu_status mu_http_tls_new(const struct mu_rpc_tls_files *files, const char *deny_path,
                               struct mu_http_tls **ret_tls, struct mu_error *err) MU_WARN_UNUSED;
/* After the last connection ended. NULL is fine. */
void mu_http_tls_free(struct mu_http_tls *tls);

/* The certificate and key in use, in PEM, for `use` to copy. */
enum mu_status mu_http_tls_use(struct mu_http_tls *tls, mu_rpc_tls_use_fn *use, void *ctx,
                               struct mu_error *err) MU_WARN_UNUSED;

/* A connection before its handshake; NULL: no memory. `end` when it is over; NULL is fine. */
struct mu_http_tls_peer *mu_http_tls_begin(struct mu_http_tls *tls, gnutls_session_t session);
void mu_http_tls_end(struct mu_http_tls_peer *peer);

/* A valid one of the CA. */
bool mu_http_tls_has_certificate(struct mu_http_tls_peer *peer);
/* MU_OK: whoever is at the other end may call that method (coordinator/api.h). */
enum mu_status mu_http_tls_check(struct mu_http_tls_peer *peer, int method_id, struct mu_error *err) MU_WARN_UNUSED;

#endif
