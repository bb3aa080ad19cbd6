/* Which checkpoints of a job may be deleted. Pure; depends on nothing. */
#ifndef MU_PLAN_RETENTION_H
#define MU_PLAN_RETENTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A committed checkpoint as retention sees it. */
struct mu_checkpoint_info {
    uint64_t seq, step; /* seq is unique in a list */
    bool verified;      /* re-read and found whole since it was written */
    bool pinned;        /* somebody uses it or asked to keep it */
    bool quarantined;   /* found bad: never restored from, never counted */
};

struct mu_retention_policy {
    uint32_t keep;          /* newest usable ones; 0 is taken as 1 */
    uint64_t keep_every;    /* usable ones whose step is a multiple (0: none) */
    uint32_t keep_verified; /* newest usable verified ones; 0 is taken as 1 */
};

/* Writes to ret_delete the indices (into list) of those to delete, lowest seq first; returns how many. The order is by
 * seq alone, never by time, name or place in the list. Kept: pinned ones; the newest `keep`; multiples of `keep_every`;
 * the newest `keep_verified` verified ones; and a quarantined one while it is newer than the oldest of the newest
 * `keep` (for its post-mortem). ret_delete holds `count` entries. */
size_t mu_retention_select(const struct mu_checkpoint_info *list, size_t count,
                           const struct mu_retention_policy *policy, size_t *ret_delete);

#endif
