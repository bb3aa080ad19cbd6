/* What people and Prometheus read over HTTP, on a listener of its own: the dashboard at /, /api/v1/..., /metrics,
 * /livez, /readyz. Read-only.
 *
 * One thread (libmicrohttpd's). A page that needs the coordinator's state is a question to the core thread
 * (question.h), whose answer is kept for a while (http_pages.h), so that neither many readers nor slow ones reach the
 * core. When the core does not answer in time, readers get 503. Series are read from the store by this thread itself.
 * Connections are limited in number and idle time.
 *
 * /livez and /readyz answer everybody. The rest is for the role viewer, shown by a certificate or a token (readers.h);
 * on the loopback for everybody, unless that is not wanted. */
#ifndef MU_COORDINATOR_HTTP_H
#define MU_COORDINATOR_HTTP_H

#include "coordinator/readers.h"
#include "rpc/server.h"
#include "rpc/tls.h"
#include "storage/store.h"

enum {
    MU_HTTP_ANSWER_MS = 2000,       /* the core's time to answer */
    MU_HTTP_CONNECTIONS_MAX = 2048, /* at a time, of one address half as many; never more than that part of the */
    MU_HTTP_PART_OF_FILES = 16,     /* files that may be open, which the workers need */
    MU_HTTP_IDLE_S = 15,
};

/* Strings are borrowed. */
struct mu_http_config {
    const char *listen;          /* "127.0.0.1:7071", "[::1]:0"; port 0: any free one */
    struct mu_rpc_tls_files tls; /* elsewhere than on the loopback: as for the service (http_tls.h) */
    const char *tls_deny;
    bool anywhere;              /* also there in the clear, if there are no TLS files */
    bool needs_reader;          /* also on the loopback only for those who may read; elsewhere that is always so */
    struct mu_readers *readers; /* with a token */
    struct mu_rpc_server *server;
    struct mu_store *store;
};

struct mu_http;

/* MU_ERR_INVALID: also what may be reached from elsewhere and should not; MU_ERR_BUSY: in use. */
enum mu_status mu_http_new(const struct mu_http_config *config, struct mu_http **ret_http,
                           struct mu_error *err) MU_WARN_UNUSED;
/* Before the server to which it posts. Questions under way must be answered or dropped afterwards. NULL is fine. */
void mu_http_free(struct mu_http *http);
const char *mu_http_url(const struct mu_http *http); /* "https://10.0.0.1:7071/", with the port bound */

#endif
