/* What people and Prometheus read over HTTP, on a listener of its own: /livez, /readyz, /metrics. Read-only.
 *
 * One thread (libmicrohttpd's). A page that needs the coordinator's state is a question that it posts to the core
 * thread, which answers between two steps; the answer serves everybody for MU_HTTP_PAGE_AGE_MS, so that neither many
 * readers nor slow ones reach the core. When the core does not answer in time, readers get 503 and the core forgets the
 * question. Connections are limited in number and idle time. */
#ifndef MU_COORDINATOR_HTTP_H
#define MU_COORDINATOR_HTTP_H

#include "coordinator/core/core.h"
#include "coordinator/posted.h"

enum {
    MU_HTTP_PAGE_AGE_MS = 500,
    MU_HTTP_ANSWER_MS = 2000,      /* the core's time to answer */
    MU_HTTP_CONNECTIONS_MAX = 512, /* at a time; of one address half as many */
    MU_HTTP_IDLE_S = 15,
};

struct mu_http;
struct mu_http_question; /* posted as MU_POSTED_QUESTION */

/* `listen`: "127.0.0.1:7071", "[::1]:0"; port 0: any free one. MU_ERR_INVALID: also what is not on the loopback, unless
 * `anywhere`; MU_ERR_BUSY: in use. */
enum mu_status mu_http_new(const char *listen, bool anywhere, struct mu_rpc_server *server, struct mu_http **ret_http,
                           struct mu_error *err) MU_WARN_UNUSED;
/* Before the server to which it posts. Questions under way must be answered or dropped afterwards. NULL is fine. */
void mu_http_free(struct mu_http *http);
const char *mu_http_address(const struct mu_http *http); /* with the port bound */

/* Core thread: `may_write` is what /readyz says of the store. */
void mu_http_answer(struct mu_http_question *question, const struct mu_coord *coord,
                    const struct mu_rpc_refusals *refusals, bool may_write);
void mu_http_drop(struct mu_http_question *question);

#endif
