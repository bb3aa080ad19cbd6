/* What each client has open and how often it asks, so that no single one can take all there is. A client is who its
 * certificate names, or without one the host that it calls from (of IPv6 the /64). Core thread only. Internal to rpc/.
 */
#ifndef MU_RPC_PEERS_H
#define MU_RPC_PEERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    MU_RPC_PEERS_IDLE_MAX = 4096, /* that are remembered without anything open */
    MU_RPC_PEERS_BURST_S = 2,     /* one that was silent for so long may ask as often at once as in that time */
    MU_RPC_PEER_NAME_SIZE = 512,
};

struct mu_rpc_peers;
struct mu_rpc_peer; /* lives at least until what it has open is closed */

/* 0: no limit. NULL: no memory. */
struct mu_rpc_peers *mu_rpc_peers_new(size_t max_open, unsigned asks_per_second);
void mu_rpc_peers_free(struct mu_rpc_peers *peers); /* NULL is fine */

/* Counts something that the peer opens. NULL: it has as much open as it may. */
struct mu_rpc_peer *mu_rpc_peers_open(struct mu_rpc_peers *peers, const char *name);
void mu_rpc_peers_close(struct mu_rpc_peers *peers, struct mu_rpc_peer *peer);
/* A question of the peer. False: it asked too often. */
bool mu_rpc_peers_ask(struct mu_rpc_peers *peers, struct mu_rpc_peer *peer, uint64_t now_us);

/* "10.0.0.7:51324" -> "10.0.0.7", "[2001:db8::1]:9" -> "2001:db8::/64", "unix:" as it is. */
void mu_rpc_peer_host(const char *address, char out[MU_RPC_PEER_NAME_SIZE]);

#endif
