/* What the fabric leaves to the groups of a layout that exchange at the same time, and where to put the layout so that
 * it leaves most.
 *
 * Flows go from node to node up and down the tree: every switch has one link up and one down, as wide as all cards
 * below it over the oversubscription up to its level (and the imbalance of static routing); every device has its own
 * card. Three exchanges, each by itself: gradients (a ring over the nodes of each stage's replicas, for every tensor
 * rank), activations (from each stage to the next), tensor groups on several nodes. Max-min fairness (plan/fairness.h)
 * with the bytes as weights; the slowest flow says what the group gets, since a step waits for it. So a link that is
 * made narrower never makes a step shorter. Different exchanges at one time are not looked at. Pure, deterministic. */
#ifndef MU_PLAN_CONTENTION_H
#define MU_PLAN_CONTENTION_H

#include "plan/node_order.h"
#include "plan/search.h"

/* order[present nodes]: which node has which devices. MU_ERR_NO_MEMORY. */
enum mu_status mu_contention_of(const struct mu_cluster *cluster, const struct mu_topology *topology,
                                const struct mu_forecast_plan *plan, const uint32_t *order,
                                struct mu_forecast_network *ret_network) MU_WARN_UNUSED;

enum { MU_CONTENTION_SHUFFLES = 4 }; /* random orders: mean of so many */

struct mu_contention_gain {
    enum mu_node_way way; /* of the best order by topology */
    double step_s, by_name_s, random_s;
};

/* The best order for a candidate, whose forecast, goodput and tokens a day become those of it. order[present nodes].
 * MU_ERR_NO_MEMORY. */
enum mu_status mu_contention_place(const struct mu_forecast_model *model, const struct mu_cluster *cluster,
                                   const struct mu_forecast_rates *rates, const struct mu_node_map *map,
                                   struct mu_candidate *candidate, enum mu_node_way *ret_way,
                                   uint32_t *order) MU_WARN_UNUSED;
/* What a placed candidate gains over the names' order and over random ones. */
enum mu_status mu_contention_compare(const struct mu_forecast_model *model, const struct mu_cluster *cluster,
                                     const struct mu_forecast_rates *rates, const struct mu_node_map *map,
                                     const struct mu_candidate *candidate, enum mu_node_way way,
                                     struct mu_contention_gain *ret_gain) MU_WARN_UNUSED;
/* Places all candidates and sorts them, the best first. MU_ERR_NO_MEMORY. */
enum mu_status mu_contention_rank(const struct mu_forecast_model *model, const struct mu_cluster *cluster,
                                  const struct mu_forecast_rates *rates, const struct mu_node_map *map,
                                  struct mu_candidate *candidates, uint32_t count) MU_WARN_UNUSED;

#endif
