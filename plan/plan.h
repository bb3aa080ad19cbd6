/* Planning of one generation: who takes part, at which rank, with how many leaves, from which step, with state from
 * where.
 *
 * A pure function of its input: coordinator, simulator and command line compute the same plan. Arrays belong to the
 * caller. */
#ifndef MU_PLAN_PLAN_H
#define MU_PLAN_PLAN_H

#include "plan/cost.h"
#include "plan/session.h"

struct mu_plan_member {
    struct mu_held held;
    double seconds_per_layer; /* measured compute time of a leaf in one layer (mu_cost_stage_layers); 0 = unknown */
    uint64_t memory_bytes;    /* of its host, which it shares with the other members there; 0 = unknown */
    bool own_memory;          /* it is a device's, and shared with nobody */
    uint32_t old_rank;        /* rank in the previous generation, or UINT32_MAX */
    uint32_t old_leaf_count;  /* leaves it had there */
    uint32_t host;            /* failure domain and memory: equal numbers share one */
    uint32_t domain;          /* a larger failure domain (switch); where none is known, as the host */
    bool leaving; /* draining: only to copy from, where nobody else has what it holds; becomes an idle rank */
    bool demoted; /* far slower than the others: gets a rank only where there are too few others */
};

struct mu_plan_link {
    uint32_t a, b; /* member indices between which exchanges failed although both live */
};

/* What embedding and head of a job cost, as its workers measured it. */
enum { MU_STAGE_COST_UNIT = 256 };
struct mu_stage_costs {
    uint32_t embedding, head; /* in 1 / MU_STAGE_COST_UNIT of a layer; 0: not known, as the model of costs says */
};

struct mu_plan_input {
    const struct mu_job_spec *spec;
    struct mu_stage_costs costs;
    const struct mu_cost_rates *rates;    /* measured; NULL: the default ones */
    const struct mu_plan_member *members; /* eligible workers, in order of preference (old rank first, then age) */
    uint32_t member_count;
    const struct mu_plan_link *bad_links;
    uint32_t bad_link_count;
    uint64_t checkpoint;      /* newest usable checkpoint's sequence number; 0 = none */
    uint64_t checkpoint_step; /* its step */
    bool may_initialise;      /* no checkpoint was ever committed: starting from the seed is legitimate */
    bool has_old_layout;
    struct mu_layout old_layout; /* of the previous generation: kept where it still fits and is as good */
    bool has_next_layout;
    struct mu_layout next_layout; /* that members were fed for: taken where it has as many ranks as the one chosen */
};

struct mu_plan_rank {
    uint32_t member;
    enum mu_state_source source;
};

struct mu_plan {
    /* MU_OK; MU_ERR_UNAVAILABLE: too few can take part, or no layout fits in memory; MU_ERR_NOT_FOUND: no state
     * anywhere. `text` says what is short and by how much. */
    enum mu_status status;
    char text[MU_TEXT_SIZE];
    struct mu_layout layout;
    uint64_t start_step;
    bool equal_leaves;                  /* counts are M / dp, first replicas one more: need not be sent */
    struct mu_step_result roll_forward; /* valid when some rank has MU_SOURCE_ROLL_FORWARD */
    uint32_t left_out;                  /* members not used because of bad links */
    double saved_s;                     /* of each step, by stages other than the old ones in the same degrees, or
                                           by leaf counts other than the old ones in the same layout */
    bool from_mirrors;                  /* without what members mirror of others, the start step would not be whole */
    struct mu_plan_rank *ranks;         /* in: room for member_count entries; out: [world of layout] */
    uint32_t *leaf_counts;              /* in: room for MU_COUNTED_REPLICAS_MAX; out: [dp] unless equal_leaves */
    struct mu_reshard reshard;          /* moves; empty when nothing moves. mu_plan_fini frees them */
};

/* How many workers are to work when `eligible` can: min(workers.max, eligible - spares), never below workers.min and
 * what the job's degrees need; 0 when there are too few. The layout (plan/cost.h) may need fewer. */
uint32_t mu_plan_wanted(const struct mu_job_spec *spec, uint32_t eligible);

/* Deterministic; allocates only scratch memory and the moves. The state comes from the newest step that the members
 * have together, at least as new as the checkpoint; else from the checkpoint; else from the seed where that is
 * legitimate. Members that alone hold a part of it always take part, as idle ranks where no other rank is left for
 * them or they are leaving. */
void mu_plan_make(const struct mu_plan_input *input, struct mu_plan *plan);
void mu_plan_fini(struct mu_plan *plan);

/* First leaf of a replica given the counts of all (NULL: equal counts over `leaves`). *ret_count receives its leaf
 * count. */
uint32_t mu_plan_leaf_range(uint32_t leaves, uint32_t replicas, const uint32_t *leaf_counts, uint32_t replica,
                            uint32_t *ret_count);

#endif
