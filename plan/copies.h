/* Who writes the second copy of each piece of a checkpoint whose pieces lie on the hosts' own disks.
 *
 * Piece r is written by rank r (its PRIMARY share). The same bytes can be written by whoever holds the same chunks:
 * with a replicated optimizer every replica of the column, with buddies the rank that mirrors r. A copy is of use only
 * on another host. A pure function; arrays belong to the caller. */
#ifndef MU_PLAN_COPIES_H
#define MU_PLAN_COPIES_H

#include "plan/layout.h"

/* hosts[working]: equal numbers, same host. writers[working]: the rank on another host that writes piece r too;
 * MU_LAYOUT_NOBODY: nobody there holds it. copies[working]: how many second copies each rank writes; of several
 * replicas the one with fewest so far is taken, of those the next one after r. Returns how many pieces have a second
 * writer. O(working * dp). */
uint32_t mu_copies_plan(const struct mu_layout *layout, const uint32_t *hosts, uint32_t *writers, uint32_t *copies);

#endif
