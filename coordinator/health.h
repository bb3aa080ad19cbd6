/* grpc.health.v1: is this coordinator able to serve? Probes and load balancers ask it without our files.
 *
 * NOT_SERVING while changes are refused (the store is full or broken; questions are still answered) and while it stops.
 * Core thread only. */
#ifndef MU_COORDINATOR_HEALTH_H
#define MU_COORDINATOR_HEALTH_H

#include <stdbool.h>

#include "common/status.h"
#include "rpc/server.h"

struct mu_health;

enum mu_status mu_health_new(struct mu_health **ret_health, struct mu_error *err) MU_WARN_UNUSED;
/* Watchers' calls must have been ended. NULL is fine. */
void mu_health_free(struct mu_health *health);

/* CALL events of Check and Watch. */
void mu_health_check(struct mu_health *health, struct mu_rpc_call *call, const void *data, size_t size_bytes);
void mu_health_watch(struct mu_health *health, struct mu_rpc_call *call, const void *data, size_t size_bytes);
/* From the server's WRITABLE and CLOSED events of Watch; `user` is what the call carries. */
void mu_health_writable(struct mu_health *health, void *user);
void mu_health_closed(struct mu_health *health, void *user);

/* Tells the watchers if it is news. */
void mu_health_set(struct mu_health *health, bool is_serving);
/* The coordinator stops: NOT_SERVING is the last thing that watchers hear. */
void mu_health_end(struct mu_health *health);

#endif
