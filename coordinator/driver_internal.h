/* Shared by driver.c (what comes in) and driver_out.c (what goes out). */
#ifndef MU_COORDINATOR_DRIVER_INTERNAL_H
#define MU_COORDINATOR_DRIVER_INTERNAL_H

#include <stdatomic.h>

#include "coordinator/access.h"
#include "coordinator/api.h"
#include "coordinator/checkpoint_io.h"
#include "coordinator/driver.h"
#include "coordinator/hang.h"
#include "coordinator/health.h"
#include "coordinator/http.h"
#include "coordinator/outbox.h"
#include "coordinator/planner.h"
#include "coordinator/question.h"
#include "coordinator/recall.h"
#include "coordinator/series.h"
#include "coordinator/sessions.h"
#include "coordinator/stats.h"
#include "coordinator/tokens.h"
#include "coordinator/watchdog.h"

enum { MU_RANDOM_POOL = 256 };

struct mu_driver {
    struct mu_driver_config config;
    struct mu_store *store;
    struct mu_coord *coord;
    struct mu_coord_sink sink;
    struct mu_rpc_server *server;
    struct mu_outbox *outbox;
    struct mu_sessions *sessions;
    struct mu_events *events;
    struct mu_health *health;
    uint64_t health_next_us;
    struct mu_access *access; /* NULL: no TLS */
    struct mu_tokens *tokens;
    struct mu_recalls *recalls;
    struct mu_hangs *hangs;
    uint64_t tls_next_us;
    struct mu_planner *planner;
    struct mu_checkpoint_io *io;
    struct mu_series *series;
    struct mu_stats stats;
    struct mu_http *http; /* NULL: not wanted */
    struct mu_api *api;
    struct mu_wire_arena in_arena, out_arena;
    struct mu_worker_message message; /* being handled */

    struct mu_id random[MU_RANDOM_POOL]; /* drawn many at once: a system call for each message would be felt */
    unsigned random_left;

    uint64_t oldest_stored_event, last_refusal_log_us, refusals_next_us;
    struct mu_rpc_refusals refusals_told;
    struct mu_event_record last_event; /* while restoring */
    uint64_t restored_count;
    bool any_event;
    struct mu_watchdog watchdog;
    atomic_bool stopping, examining;
    struct mu_error failure; /* of the core thread itself: ends the run */
};

/* The core's sink. */
void mu_driver_emit(void *ctx, const struct mu_coord_action *action);
/* Steps the core. Fills in time and randomness. */
void mu_driver_step(struct mu_driver *driver, struct mu_coord_event *event);
/* The stream is over: ends the call and tells the core. MU_RPC_OK: the peer ended it; else with that code, because of
 * what it sent, or (RESOURCE_EXHAUSTED) because it reads nothing. */
void mu_driver_break_session(struct mu_driver *driver, struct mu_session *session, enum mu_rpc_code code,
                             const char *reason);

#endif
