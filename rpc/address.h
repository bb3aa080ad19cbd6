/* Addresses as people write them: "host:port", "[::1]:port", "unix:/path"; and as the gRPC C core wants them. Internal
 * to rpc/. */
#ifndef MU_RPC_ADDRESS_H
#define MU_RPC_ADDRESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

enum { MU_RPC_HOST_SIZE = 256, MU_RPC_TARGET_SIZE = 288 };

enum mu_rpc_address_kind { MU_RPC_ADDRESS_IPV4, MU_RPC_ADDRESS_IPV6, MU_RPC_ADDRESS_NAME, MU_RPC_ADDRESS_UNIX };

struct mu_rpc_address {
    enum mu_rpc_address_kind kind;
    char host[MU_RPC_HOST_SIZE]; /* without brackets; of a Unix socket, the path */
    uint16_t port;
};

enum mu_status mu_rpc_address_parse(const char *text, struct mu_error *err,
                                    struct mu_rpc_address *ret_address) MU_WARN_UNUSED;

/* "127.0.0.1:7070", "[::1]:7070", "unix:/path": for people, and what the core listens on. */
void mu_rpc_address_format(const struct mu_rpc_address *address, char out[MU_RPC_TARGET_SIZE]);

/* With the resolver named, so that literal addresses never wait for DNS: "ipv4:127.0.0.1:7070", "dns:///host:7070". */
void mu_rpc_address_dial_target(const struct mu_rpc_address *address, char out[MU_RPC_TARGET_SIZE]);

/* A Unix socket on which somebody listens is MU_ERR_BUSY (the core would unlink it and take its place); else MU_OK. */
enum mu_status mu_rpc_address_check_free(const struct mu_rpc_address *address, struct mu_error *err) MU_WARN_UNUSED;

/* Says why the core could not listen there, by trying it. Always fills err, never returns MU_OK. */
enum mu_status mu_rpc_address_explain(const struct mu_rpc_address *address, struct mu_error *err);

/* "ipv4:10.0.0.7:51324" -> "10.0.0.7:51324", "ipv6:%5B::1%5D:9" -> "[::1]:9"; anything else is copied. */
void mu_rpc_address_peer(const char *core_text, char *out, size_t size);

#endif
