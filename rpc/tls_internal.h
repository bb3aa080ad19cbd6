/* Credentials out of files. Internal to rpc/. */
#ifndef MU_RPC_TLS_INTERNAL_H
#define MU_RPC_TLS_INTERNAL_H

#include <grpc/grpc_security.h>

#include <stdint.h>

#include "rpc/tls.h"

uint64_t mu_rpc_tls_end_s(struct mu_rpc_tls *tls); /* of the certificate: seconds since 1970 */
/* takes_strangers: clients may show no certificate; one that they show is verified in any case. */
grpc_server_credentials *mu_rpc_tls_server_credentials(struct mu_rpc_tls *tls, bool takes_strangers);
grpc_channel_credentials *mu_rpc_tls_channel_credentials(struct mu_rpc_tls *tls);

#endif
