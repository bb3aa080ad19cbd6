/* In which order the nodes of a topology get ranks. Rank order is the placement: tensor groups, then replicas, then
 * stages take devices one after another (plan/layout.h), so what is adjacent in the order exchanges most.
 *
 *   PACKED   as the tree stands, the largest subtrees first: replicas of a stage share leaves, stages follow
 *   DENSE    the same, without nodes under the smallest switches where some are not used
 *   FITTED   each stage into the lowest switch that has room for all of it, the fullest of these
 *   ACROSS   stage by stage in turn: replicas spread over leaves, the stages of a pipeline share one
 *   BY_NAME  as people sort names; what happens without a topology
 *   RANDOM   what a scheduler without one does
 *
 * The first four depend on the shape of the tree alone, not on names or the order of the file. Pure, deterministic. */
#ifndef MU_PLAN_NODE_ORDER_H
#define MU_PLAN_NODE_ORDER_H

#include "plan/topology.h"

enum mu_node_way {
    MU_WAY_PACKED,
    MU_WAY_DENSE,
    MU_WAY_FITTED,
    MU_WAY_ACROSS,
    MU_WAY_BY_NAME,
    MU_WAY_RANDOM,
    MU_WAY_COUNT,
    MU_WAYS_BY_TOPOLOGY = MU_WAY_BY_NAME, /* so many stand before it */
};

/* What orders need to know of a topology, which must stay. NULL: no memory. */
struct mu_node_map;
struct mu_node_map *mu_node_map_new(const struct mu_topology *topology);
void mu_node_map_free(struct mu_node_map *map);
const struct mu_topology *mu_node_map_topology(const struct mu_node_map *map);

/* Where a node is: its number in the packed order, and the switch that it hangs under (a number for each; nodes under
 * none have one of their own). */
struct mu_node_site {
    uint32_t place, domain;
};
/* False: no node that is present has this name. */
bool mu_node_site_of(const struct mu_node_map *map, const char *name, struct mu_node_site *ret_site);

/* order[present nodes] receives indices of nodes. `stages` of `stage_nodes` nodes each, which are no more than there
 * are (FITTED, ACROSS); `seed` (RANDOM). MU_ERR_NO_MEMORY. */
enum mu_status mu_node_order(const struct mu_node_map *map, enum mu_node_way way, uint32_t used, uint32_t stages,
                             uint32_t stage_nodes, uint64_t seed, uint32_t *order) MU_WARN_UNUSED;

#endif
