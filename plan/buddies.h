/* Who stands where, so that buddies are apart: the one rotation of a layout (mu_layout_buddy_shift) finds another host
 * for everybody only where the ranks' order allows it, and the order of those who hold nothing yet is free. Pure. */
#ifndef MU_PLAN_BUDDIES_H
#define MU_PLAN_BUDDIES_H

#include "plan/layout.h"

/* Sets layout->buddy_shift, and ret_order[working] to a permutation: rank r gets who stood at ret_order[r]. The tensor
 * group of a replica (of a stage, where dp = 1) moves as a whole, among the replicas of its stage, and only if all of
 * it is free. Of the orders looked at the one with most buddies on other hosts, of these the one with most in other
 * domains, of these the given one: the given order; that by domain and host, in which tensor groups on one host each,
 * all free, are all apart if any order puts them apart; and, while hosts are shared, single exchanges that help. hosts,
 * domains, is_free: [working]; numbers as for mu_layout_buddy_shift. MU_ERR_NO_MEMORY. */
enum mu_status mu_buddies_place(struct mu_layout *layout, const uint32_t *hosts, const uint32_t *domains,
                                const bool *is_free, uint32_t *ret_order) MU_WARN_UNUSED;

#endif
