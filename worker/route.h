/* How this host reaches the coordinator: the local address on that way is the one that peers are told. */
#ifndef MU_WORKER_ROUTE_H
#define MU_WORKER_ROUTE_H

#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

/* The coordinator's address as a literal "address:port"; "" for a Unix socket, and for what is no "host:port" (the RPC
 * client says what is wrong with that). A name that cannot be resolved is tried again until it can be, or for
 * give_up_ms (0: for ever), and each reason is told once, in the log and to the supervisor (note_fd; -1: none): a
 * worker that chose an address without knowing the way would be one that no other host reaches. Blocks; before any
 * thread. MU_ERR_UNAVAILABLE: give_up_ms are over. */
enum mu_status mu_route_find(const char *coordinator, uint32_t give_up_ms, int note_fd, char *out, size_t size,
                             struct mu_error *err) MU_WARN_UNUSED;

#endif
