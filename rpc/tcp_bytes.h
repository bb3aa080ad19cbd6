/* What the kernel counts of a TCP connection. Internal to rpc/; apart, because <linux/tcp.h>, which has these counters,
 * and <netinet/tcp.h> cannot be included together. Any thread. */
#ifndef MU_RPC_TCP_BYTES_H
#define MU_RPC_TCP_BYTES_H

#include <stdbool.h>
#include <stdint.h>

/* Bytes that came, and bytes sent that the peer's host has acknowledged, since the connection began. False: not a TCP
 * connection (any more). */
bool mu_rpc_tcp_bytes(int fd, uint64_t *ret_received, uint64_t *ret_acknowledged);

#endif
