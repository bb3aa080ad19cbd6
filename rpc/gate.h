/* Which connections a listener takes.
 *
 * The gRPC C core accepts connections by itself, as many as come, and (1.51) gives a listener up for good when accept4
 * finds no file descriptor left. It has no hook for either; but it calls accept4 through the dynamic linker, which
 * takes the program's own before the C library's, and this module has one. For listeners that have a gate it
 *
 *    - closes at once what is one connection too many of one peer (a host; of IPv6 a /64),
 *    - closes at once what would take one of the last descriptors, which are for files and answers,
 *    - never lets the core see that there was none: with a descriptor kept in reserve it takes the connection and
 * closes it, so that the client learns at once that it must try again, and the listener lives on.
 *
 * It also has the kernel watch over connections that are silent (TCP keepalive): the core's own pings cost a timer for
 * every message received. What those that talk cost is reckoned in guests.h.
 *
 * All other listeners of the process are as before. Any thread. Internal to rpc/. */
#ifndef MU_RPC_GATE_H
#define MU_RPC_GATE_H

#include "rpc/address.h"
#include "rpc/server.h"

enum { MU_RPC_GATE_FILES_KEPT = 64 }; /* of the process's limit; but at most a quarter of it */

struct mu_rpc_gate;

/* `address`: as bound. Of the configuration: max_connections_per_host, keepalive_time_s, keepalive_timeout_s,
 * max_owed_bytes, max_owed_bytes_in_all. */
enum mu_status mu_rpc_gate_open(const struct mu_rpc_address *address, const struct mu_rpc_server_config *config,
                                struct mu_rpc_gate **ret_gate, struct mu_error *err) MU_WARN_UNUSED;
/* When the listener is closed. NULL is fine. */
void mu_rpc_gate_close(struct mu_rpc_gate *gate);
/* As long as the gate. */
struct mu_rpc_guests *mu_rpc_gate_guests(struct mu_rpc_gate *gate);
/* Fills in what concerns connections. */
void mu_rpc_gate_refusals(struct mu_rpc_gate *gate, struct mu_rpc_refusals *refusals);

#endif
