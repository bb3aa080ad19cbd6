/* Measurements for a probe (struct mu_probe_order): taken on while there is nothing else to do. Internal to
 * worker/core. */
#ifndef MU_WORKER_CORE_PROBING_H
#define MU_WORKER_CORE_PROBING_H

#include "plan/session.h"

/* False: it has something else to do, as *ret_refusal says. (Whatever comes later ends the measurement: the shell's.)
 */
bool probing_begins(const struct mu_worker_status *status, bool loaded, const struct mu_probe_order *order,
                    struct mu_probe_report *ret_refusal);

#endif
