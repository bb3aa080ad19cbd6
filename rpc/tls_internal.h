/* Credentials out of files. Internal to rpc/. */
#ifndef MU_RPC_TLS_INTERNAL_H
#define MU_RPC_TLS_INTERNAL_H

#include <grpc/grpc_security.h>

#include "rpc/tls.h"

struct mu_rpc_tls;

/* Reads and judges the files, and makes this process one that leaves no core dump. is_stranger: a client that shows no
 * certificate, and needs the CA alone. */
enum mu_status mu_rpc_tls_new(const struct mu_rpc_tls_files *files, bool is_stranger, struct mu_error *err,
                              struct mu_rpc_tls **ret_tls) MU_WARN_UNUSED;
void mu_rpc_tls_free(
    struct mu_rpc_tls *tls); /* after the credentials are released and their users gone; NULL is fine */

/* Reads the files again when they have changed. An error keeps what was there, and is told once per change. Any thread.
 */
enum mu_status mu_rpc_tls_refresh(struct mu_rpc_tls *tls, bool *ret_changed, struct mu_error *err) MU_WARN_UNUSED;

/* takes_strangers: clients may show no certificate; one that they show is verified in any case. */
grpc_server_credentials *mu_rpc_tls_server_credentials(struct mu_rpc_tls *tls, bool takes_strangers);
grpc_channel_credentials *mu_rpc_tls_channel_credentials(struct mu_rpc_tls *tls);

#endif
