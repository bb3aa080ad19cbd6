/* The service for other programs: requests in, answers out through the outbox (an answer, also to a question, is given
 * only when everything it may rest on is durable). Core thread only. */
#ifndef MU_COORDINATOR_API_H
#define MU_COORDINATOR_API_H

#include "coordinator/core/core.h"
#include "coordinator/events.h"
#include "coordinator/outbox.h"
#include "rpc/server.h"
#include "storage/store.h"

enum { MU_API_PAGE_DEFAULT = 100, MU_API_PAGE_MAX = 1000 };

enum mu_method {
    MU_METHOD_ATTACH, /* the workers' stream: the driver's, not ours */
    MU_METHOD_SUBMIT_JOB,
    MU_METHOD_GET_JOB,
    MU_METHOD_LIST_JOBS,
    MU_METHOD_CANCEL_JOB,
    MU_METHOD_LIST_WORKERS,
    MU_METHOD_DRAIN_WORKER,
    MU_METHOD_UNDRAIN_WORKER,
    MU_METHOD_TRIGGER_CHECKPOINT,
    MU_METHOD_LIST_CHECKPOINTS,
    MU_METHOD_GET_TIMINGS,
    MU_METHOD_GET_GOODPUT,
    MU_METHOD_WATCH_EVENTS,
    MU_METHOD_SAVE_SNAPSHOT,
    MU_METHOD_REPORT_EXIT,
    MU_METHOD_LIST_NODES,
    MU_METHOD_ORDER_NODE,
    MU_METHOD_SCALE_JOB,
    MU_METHOD_AMEND_JOB,
    MU_METHOD_BRANCH_JOB,
    MU_METHOD_PROBE,
    MU_METHOD_READ_PROBE,
    MU_METHOD_API_COUNT,
    /* What gRPC tools expect of every server: not ours either. */
    MU_METHOD_HEALTH_CHECK = MU_METHOD_API_COUNT,
    MU_METHOD_HEALTH_WATCH,
    MU_METHOD_REFLECTION,
    MU_METHOD_REFLECTION_ALPHA,
    /* Join tokens: coordinator/tokens.h. */
    MU_METHOD_CREATE_TOKEN,
    MU_METHOD_LIST_TOKENS,
    MU_METHOD_REVOKE_TOKEN,
    MU_METHOD_JOIN,
    MU_METHOD_RENEW,
    /* What workers remember: coordinator/recall.h. */
    MU_METHOD_RECALL,
    MU_METHOD_READ_RECALL,
    MU_METHOD_RECOLLECT,
    /* Reports of hangs: coordinator/hang.h. */
    MU_METHOD_LIST_HANG_REPORTS,
    MU_METHOD_GET_HANG_REPORT,
    MU_METHOD_READ_COORDINATOR, /* coordinator/introspection.h */
    MU_METHOD_COUNT
};
extern const struct mu_rpc_method mu_api_methods[MU_METHOD_COUNT];

struct mu_api_config {
    const struct mu_coord *coord;
    struct mu_store *store; /* only asked whether it would take a write, and scanned for a snapshot */
    bool is_volatile;       /* the store is memory: no snapshots */
    struct mu_outbox *outbox;
    struct mu_events *events;
    struct mu_sessions *sessions;
    void (*step)(void *ctx, struct mu_coord_event *event); /* steps the core; fills in time and randomness */
    void *ctx;
};

struct mu_api;
enum mu_status mu_api_new(const struct mu_api_config *config, struct mu_api **ret_api,
                          struct mu_error *err) MU_WARN_UNUSED;
void mu_api_free(struct mu_api *api); /* NULL is fine */

/* A CALL event of a method between ATTACH and API_COUNT. */
void mu_api_call(struct mu_api *api, struct mu_rpc_call *call, const void *data, size_t size_bytes);
/* The answer to a question, at once: GET_JOB, LIST_JOBS, LIST_WORKERS, LIST_CHECKPOINTS, GET_TIMINGS, GET_GOODPUT. */
enum mu_status mu_api_ask(struct mu_api *api, int method, const void *data, size_t size_bytes,
                          struct mu_rpc_bytes **ret_reply, struct mu_error *err) MU_WARN_UNUSED;
/* A REPLY action, from inside the core's step; after the step, what was replied is made into answers. */
void mu_api_reply(struct mu_api *api, const struct mu_coord_action *action);
void mu_api_after_step(struct mu_api *api);

#endif
