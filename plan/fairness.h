/* What flows get that share links: max-min fairness by progressive filling (Bertsekas and Gallager, Data Networks,
 * section 6.5.2), with weights.
 *
 * All flows grow together, each in proportion to its weight, until a link is full or a flow has what it can use at
 * most; those flows stop, the others go on. So nobody can get more without somebody getting less who has less for its
 * weight. Pure and deterministic; scratch memory only. */
#ifndef MU_PLAN_FAIRNESS_H
#define MU_PLAN_FAIRNESS_H

#include <stdint.h>

#include "common/status.h"

struct mu_fair_flow {
    uint32_t first_link, link_count; /* in `links`; a link at most once */
    double weight, most;             /* both above 0 */
};

/* capacities[link_count], all above 0. ret_rates[flow_count]. MU_ERR_NO_MEMORY.
 * O(sum of link counts + links log links + flows log flows). */
enum mu_status mu_fair_rates(const double *capacities, uint32_t link_count, const struct mu_fair_flow *flows,
                             uint32_t flow_count, const uint32_t *links, double *ret_rates) MU_WARN_UNUSED;

#endif
