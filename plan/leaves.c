#include "common/mutant.h"
#include "plan/plan.h"

uint32_t mu_plan_leaf_range(uint32_t leaves, uint32_t replicas, const uint32_t *leaf_counts, uint32_t replica,
                            uint32_t *ret_count)
{
    if (!leaf_counts) {
        uint32_t base = leaves / replicas, extra = leaves % replicas;
        *ret_count = base + (replica < extra);
        return replica * base + (replica < extra ? replica : extra);
    }
    uint32_t first = 0;
    for (uint32_t r = 0; r < replica; r++)
        first += leaf_counts[r];
    *ret_count = leaf_counts[replica];
    return first - (MU_MUTANT(MU_MUT_OVERLAP_LEAVES) && replica == 1);
}
