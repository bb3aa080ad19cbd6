/* The shell of the coordinator's core: one thread that turns what comes in (streams, requests, results of other
 * threads, time) into events of the core, and the core's actions into messages, records and files. See outbox.h for the
 * order in which things become visible.
 *
 *    poller threads --+                     +--> storage thread (outbox)      synced batches
 *    planner, I/O  ---+--> core thread -----+--> planner thread               plans
 *    signals ---------+                     +--> checkpoint thread            manifests, directories
 *
 * Threads: mu_driver_run is the core thread; mu_driver_stop may be called from any. */
#ifndef MU_COORDINATOR_DRIVER_H
#define MU_COORDINATOR_DRIVER_H

#include "coordinator/core/core.h"
#include "coordinator/events.h"
#include "rpc/tls.h"

struct mu_driver_config {
    const char *data_dir;        /* of the database; NULL: in memory, everything is lost at the end */
    const char *listen;          /* "127.0.0.1:7070"; port 0: any free one */
    struct mu_rpc_tls_files tls; /* none set: plaintext, and everybody may do everything */
    const char *tls_deny;        /* coordinator/access.h; NULL: nobody is denied */
    const char *ca_key;          /* of the CA in tls.ca: join tokens are exchanged for certificates; NULL: not */
    uint32_t certificate_s;      /* life of those certificates */
    const char *http;            /* the same for HTTP (coordinator/http.h); NULL: none */
    bool http_anywhere;          /* also in the clear where other hosts can reach it */
    bool http_auth;              /* readers need a token on the loopback, too */
    struct mu_coord_config core;
    uint64_t reserve_bytes, ballast_bytes; /* see storage/store.h */
    uint32_t events_kept;
    uint32_t hello_ms; /* a stream that does not say Hello within is ended */
    uint32_t stop_ms;  /* patience of a graceful stop */
    unsigned pollers;  /* threads of the RPC server */
    /* What one client may take; see rpc/server.h. 0: no limit. */
    uint32_t connections_per_host, calls_per_client, questions_per_second;
    uint32_t worker_series; /* numbers of single workers in /metrics, up to so many of them */
};

struct mu_driver;

/* Defaults for everything but the data directory. */
void mu_driver_config_init(struct mu_driver_config *config);

/* Opens the store, restores the core, binds the address. MU_ERR_BUSY: directory or port in use. One line says what to
 * do. */
enum mu_status mu_driver_new(const struct mu_driver_config *config, struct mu_driver **ret_driver,
                             struct mu_error *err) MU_WARN_UNUSED;
const char *mu_driver_address(const struct mu_driver *driver);  /* with the port bound */
const char *mu_driver_http_url(const struct mu_driver *driver); /* NULL: none */

/* Returns MU_OK after mu_driver_stop; an error when the store failed: then the process must end and be started again.
 */
enum mu_status mu_driver_run(struct mu_driver *driver, struct mu_error *err) MU_WARN_UNUSED;
void mu_driver_stop(struct mu_driver *driver);
void mu_driver_examine(struct mu_driver *driver); /* a report of every job (hang.h); from any thread */
void mu_driver_free(struct mu_driver *driver);    /* NULL is fine */

#endif
