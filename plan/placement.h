/* Which member takes which rank of a layout, so that little state moves and tensor groups stay on one host.
 *
 * 1. Each member goes to the column (plan/layout.h) with which what it holds has most bytes in common, the largest
 *    matches first, while the column has room.
 * 2. Within its column it keeps its replica number; one that cannot joins a tensor group in which its host takes part.
 * 3. The others, in order of preference, fill the ranks that are left, whole tensor groups from one host where a host
 *    has enough of them.
 *
 * In a layout of one column without sharding every rank is as good as any other: where all members find room they take
 * them in order of preference. Pure and deterministic. */
#ifndef MU_PLAN_PLACEMENT_H
#define MU_PLAN_PLACEMENT_H

#include "plan/reshard.h"

/* members[count], in order of preference; only those with in[i] are used, at least as many as the layout has working
 * ranks. ret_members[working ranks] receives the member of each rank. MU_ERR_NO_MEMORY. */
enum mu_status mu_placement_make(const struct mu_model_spec *model, const struct mu_layout *layout,
                                 const struct mu_reshard_holder *members, const bool *in, uint32_t count,
                                 uint32_t *ret_members) MU_WARN_UNUSED;

#endif
