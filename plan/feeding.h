/* What who is to have another share is fed while a generation steps: which chunks, of which kinds, and by which of its
 * ranks. Both sides of a feed work it out for themselves.
 *
 * A taker lacks what its share of the next layout has, and what it does not hold as a rank of the present one (a copy
 * of the tied embedding counts as parameters). Of a chunk it lacks
 *
 *   moments, and perhaps the parameters   and gets both kinds, or moments alone, once, then its reduced gradient after
 *                                         each vote: from a rank that updates it (in a sharded column its owner)
 *   the parameters alone                  and gets them once, then again after each update: from any rank that has them
 *
 * Where several ranks have a chunk, replica d of the next layout gets it from replica d modulo dp of the present one.
 * Pure. Time follows the runs of the shares that overlap. */
#ifndef MU_PLAN_FEEDING_H
#define MU_PLAN_FEEDING_H

#include "plan/reshard.h"

struct mu_feeding {
    const struct mu_layout *from; /* of the generation that steps */
    uint32_t old_rank;            /* the taker's in it; MU_LAYOUT_NOBODY: it holds nothing */
    const struct mu_layout *to;
    uint32_t rank; /* the taker's in it, a working one */
};

/* The moves are ascending by (from, run.first): `from` is a rank of the present layout, `to` is feeding->rank. The
 * caller frees them. MU_ERR_NO_MEMORY. */
enum mu_status mu_feeding_moves(const struct mu_model_spec *model, const struct mu_feeding *feeding,
                                struct mu_move **ret_moves, uint32_t *ret_count) MU_WARN_UNUSED;

#endif
