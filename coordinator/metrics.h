/* The coordinator's state as a page for Prometheus (text exposition format 0.0.4). Names and labels:
 * docs/operations.md. Label values are bounded: jobs, states, phases; never a generation, a step or a worker. */
#ifndef MU_COORDINATOR_METRICS_H
#define MU_COORDINATOR_METRICS_H

#include <stdio.h>

#include "coordinator/core/core.h"
#include "rpc/server.h"

/* O(workers + jobs). */
void mu_metrics_write(FILE *out, const struct mu_coord *coord, const struct mu_rpc_refusals *refusals);

#endif
