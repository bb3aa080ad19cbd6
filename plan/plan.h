/* Planning of one generation: who takes part, at which rank, with how many leaves, from which step, with state from
 * where.
 *
 * A pure function of its input: coordinator, simulator and command line compute the same plan. Arrays belong to the
 * caller. */
#ifndef MU_PLAN_PLAN_H
#define MU_PLAN_PLAN_H

#include "plan/session.h"

struct mu_plan_member {
    struct mu_held held;
    double seconds_per_leaf; /* measured compute time; 0 = unknown */
    uint32_t old_rank;       /* rank in the previous generation, or UINT32_MAX */
    uint32_t old_leaf_count; /* leaves it had there */
    uint32_t host;           /* failure domain: equal numbers share one */
};

struct mu_plan_link {
    uint32_t a, b; /* member indices between which exchanges failed although both live */
};

struct mu_plan_input {
    const struct mu_job_spec *spec;
    const struct mu_plan_member *members; /* eligible workers, in order of preference (old rank first, then age) */
    uint32_t member_count;
    const struct mu_plan_link *bad_links;
    uint32_t bad_link_count;
    uint64_t checkpoint;      /* newest usable checkpoint's sequence number; 0 = none */
    uint64_t checkpoint_step; /* its step */
    bool may_initialise;      /* no checkpoint was ever committed: starting from the seed is legitimate */
};

struct mu_plan_rank {
    uint32_t member;
    uint32_t leaf_count;
    enum mu_state_source source;
    uint32_t source_rank; /* MU_SOURCE_PEER */
};

struct mu_plan {
    enum mu_status status; /* MU_OK; MU_ERR_UNAVAILABLE: fewer than workers.min can take part; MU_ERR_NOT_FOUND: no
                              state anywhere */
    uint32_t world;
    uint64_t start_step;
    bool mesh;
    bool equal_leaves;                  /* counts are M / W, first ranks one more: need not be sent */
    struct mu_step_result roll_forward; /* valid when some rank has MU_SOURCE_ROLL_FORWARD */
    uint32_t left_out;                  /* members not used because of bad links */
    struct mu_plan_rank *ranks;         /* in: room for member_count entries; out: [world] */
};

void mu_plan_make(const struct mu_plan_input *input, struct mu_plan *plan);

/* World size that `eligible` workers give: min(max, leaves, eligible - spares), never below workers.min; 0 when there
 * are too few. */
uint32_t mu_plan_world(const struct mu_job_spec *spec, uint32_t eligible);

/* Neighbours of a rank, ascending: everybody (mesh), else its parent and children in the binomial tree. Returns the
 * count
 * (<= MU_NEIGHBOURS_MAX). */
uint32_t mu_plan_neighbours(uint32_t world, bool mesh, uint32_t rank, uint32_t out[MU_NEIGHBOURS_MAX]);

/* First leaf of a rank given the counts of all (NULL: equal counts over `leaves`). *ret_count receives its leaf count.
 */
uint32_t mu_plan_leaf_range(uint32_t leaves, uint32_t world, const uint32_t *leaf_counts, uint32_t rank,
                            uint32_t *ret_count);

#endif
