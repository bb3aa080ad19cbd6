/* Tells people of what was refused for a limit: one line now and then for each, however great the flood. */
#ifndef MU_COORDINATOR_REFUSALS_H
#define MU_COORDINATOR_REFUSALS_H

#include "rpc/server.h"

/* Logs what has been refused since `before`. */
void mu_refusals_tell(const struct mu_rpc_refusals *before, const struct mu_rpc_refusals *now);

#endif
