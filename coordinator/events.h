/* Events that are still told, and who watches them.
 *
 * The newest `capacity` events are kept encoded, one payload shared by all watchers; the store holds the same ones. A
 * watcher is a position in this list: it costs no queue of its own, and gets as much as its stream takes. One that has
 * once been up to date and then falls MU_WATCH_LAG_MAX behind, or one whose next event is no longer kept, is cut off
 * with the number to resume from.
 *
 * Core thread only. */
#ifndef MU_COORDINATOR_EVENTS_H
#define MU_COORDINATOR_EVENTS_H

#include "coordinator/core/core.h"
#include "proto/wire.h"
#include "rpc/server.h"

enum {
    MU_EVENTS_KEPT_DEFAULT = 65536,
    MU_EVENTS_KEPT_MIN = 64,
    MU_EVENTS_KEPT_MAX = 1 << 22,
    MU_WATCH_LAG_MAX = 8192,
};

struct mu_events;

enum mu_status mu_events_new(uint32_t capacity, struct mu_events **ret_events, struct mu_error *err) MU_WARN_UNUSED;
/* Watchers' calls must have been ended. NULL is fine. */
void mu_events_free(struct mu_events *events);

/* An event as watchers get it. NULL without memory, or when it cannot be encoded (err says why). */
struct mu_rpc_bytes *mu_event_encode(struct mu_wire_arena *arena, const struct mu_event_record *event,
                                     struct mu_error *err);

/* Adds the next one (numbers ascend) and gives it to the watchers. Takes the reference. `job` is copied. */
void mu_events_add(struct mu_events *events, uint64_t number, const char *job, struct mu_rpc_bytes *bytes);

/* The newest `limit` events wanted, oldest first, each with a reference of the caller's own; returns how many.
 * `request->follow` and `newest` do not matter. */
struct mu_watch_request;
uint32_t mu_events_list(const struct mu_events *events, const struct mu_watch_request *request, uint32_t limit,
                        struct mu_rpc_bytes **ret_events);

/* Starts a watch; ends the call by itself when it is over (also at once, if the request cannot be served). */
struct mu_watch_request {
    uint64_t after_event;
    char job[MU_JOB_NAME_SIZE]; /* empty: all */
    bool follow;
    uint32_t newest;
};
void mu_events_watch(struct mu_events *events, struct mu_rpc_call *call, const struct mu_watch_request *request);
/* From the server's WRITABLE and CLOSED events; `user` is what the call carries. */
void mu_events_writable(struct mu_events *events, void *user);
void mu_events_closed(struct mu_events *events, void *user);
/* Ends all watches: the coordinator stops. */
void mu_events_end(struct mu_events *events);

uint64_t mu_events_oldest(const struct mu_events *events); /* number; newest + 1 when there is none */
uint32_t mu_events_watchers(const struct mu_events *events);

#endif
