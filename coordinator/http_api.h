/* /api/v1/...: what the service's questions answer, as JSON. Parameters of the query are the fields of the request:
 *
 *     /api/v1/jobs                ListJobs          /api/v1/timings?job=J       GetTimings
 *     /api/v1/job?name=J          GetJob            /api/v1/goodput?job=J       GetGoodput
 *     /api/v1/workers?job=J       ListWorkers       /api/v1/checkpoints?job=J   ListCheckpoints
 *     /api/v1/events?job=J&after_event=N&newest=N   the newest events, oldest first
 *     /api/v1/series?job=J[&worker=W]&seconds=N     series.h
 *
 * An error is {"error": "one line"}. Listener's thread. */
#ifndef MU_COORDINATOR_HTTP_API_H
#define MU_COORDINATOR_HTTP_API_H

#include "coordinator/http_pages.h"
#include "rpc/server.h"
#include "storage/store.h"

/* One parameter of the query: `name`, `value`; false ends them. */
typedef bool mu_http_parameter_fn(void *ctx, const char *name, const char *value);
/* Calls `fn` for each of them. */
typedef void mu_http_parameters_fn(void *parameters, mu_http_parameter_fn *fn, void *ctx);

struct mu_http_request {
    const char *path; /* after "/api/v1/" */
    mu_http_parameters_fn *each;
    void *parameters;
    uint64_t until_us; /* the core's answer is waited for until then */
};

void mu_http_api(struct mu_rpc_server *server, struct mu_store *store, const struct mu_http_request *request,
                 struct mu_http_reply *ret_reply);

#endif
