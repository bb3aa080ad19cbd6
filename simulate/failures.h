/* When nodes are lost and come back: each node by itself (exponential or Weibull), all under a leaf switch, all of a
 * power domain. Drawn ahead; deterministic by seed. Seconds. */
#ifndef MU_SIMULATE_FAILURES_H
#define MU_SIMULATE_FAILURES_H

#include <stdbool.h>

#include "plan/cluster.h"
#include "plan/topology.h"

struct mu_failures;

/* NULL: no memory. */
struct mu_failures *mu_failures_new(const struct mu_cluster *cluster, const struct mu_topology *topology,
                                    uint64_t seed);
void mu_failures_free(struct mu_failures *failures);

/* The next change is at this time. */
double mu_failures_next_s(const struct mu_failures *failures);
/* Makes the change, which is due: nodes[node_count of the topology] receives the nodes, *ret_down whether they go or
 * come. Returns their number, which may be 0 (a repair that is over, of a node that is still down for another
 * reason). */
uint32_t mu_failures_take(struct mu_failures *failures, uint32_t *nodes, bool *ret_down);

/* A time until a failure: Weibull with that mean and shape, for u uniform in (0, 1). */
double mu_failures_draw(double mean_s, double shape, double u);

#endif
