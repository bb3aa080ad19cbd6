/* Tells the coordinator, when somebody asks, what this process remembers: flight records (common/flight.h), what its
 * threads are doing, its newest log lines. A thread of its own answers, so it does so while the engine hangs. */
#ifndef MU_WORKER_RECOLLECT_H
#define MU_WORKER_RECOLLECT_H

#include "common/id.h"
#include "common/status.h"
#include "plan/session.h"
#include "rpc/client.h"

struct mu_recollector;

/* Answers by calls of `client`, which is borrowed. */
enum mu_status mu_recollector_new(struct mu_rpc_client *client, struct mu_recollector **ret_recollector,
                                  struct mu_error *err) MU_WARN_UNUSED;
/* Waits for the call under way, a few seconds at most. NULL is fine. */
void mu_recollector_free(struct mu_recollector *recollector);

/* Any thread. Only the newest question is answered to its end. */
void mu_recollector_ask(struct mu_recollector *recollector, const struct mu_recall *recall, struct mu_id incarnation);

/* The newest records and what the threads are doing, into the log: for who can reach only this process. */
void mu_recollect_log(void);

#endif
