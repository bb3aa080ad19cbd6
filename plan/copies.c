#include "plan/copies.h"

#include <string.h>

static uint32_t choose_replica(const struct mu_layout *layout, const uint32_t *hosts, const uint32_t *copies,
                               uint32_t rank)
{
    struct mu_coords at = mu_layout_coords(layout, rank);
    uint32_t own = at.d, best = MU_LAYOUT_NOBODY;
    for (uint32_t step = 1; step < layout->dp; step++) {
        at.d = (own + step) % layout->dp;
        uint32_t other = mu_layout_rank(layout, at);
        if (hosts[other] != hosts[rank] && (best == MU_LAYOUT_NOBODY || copies[other] < copies[best]))
            best = other;
    }
    return best;
}

static uint32_t choose_buddy(const struct mu_layout *layout, const uint32_t *hosts, uint32_t rank)
{
    uint32_t buddy = mu_layout_buddy(layout, rank);
    return buddy != MU_LAYOUT_NOBODY && hosts[buddy] != hosts[rank] ? buddy : MU_LAYOUT_NOBODY;
}

uint32_t mu_copies_plan(const struct mu_layout *layout, const uint32_t *hosts, uint32_t *writers, uint32_t *copies)
{
    uint32_t working = mu_layout_working(layout), count = 0;
    bool replicas = layout->dp > 1 && !layout->sharded; /* who else holds a sharded moment is its mirror */
    memset(copies, 0, working * sizeof *copies);
    for (uint32_t rank = 0; rank < working; rank++) {
        uint32_t writer = replicas ? choose_replica(layout, hosts, copies, rank) : choose_buddy(layout, hosts, rank);
        writers[rank] = writer;
        if (writer != MU_LAYOUT_NOBODY) {
            copies[writer]++;
            count++;
        }
    }
    return count;
}
