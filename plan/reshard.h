/* Which bytes of state move between two layouts, or any mixture of layouts that members hold.
 *
 * Whole chunks only, parameters and moments apart: a chunk that a rank already holds does not move; every other chunk
 * it needs comes from exactly one source, spread evenly over those that have it (a source on the same host first).
 * Where few have what many need, receivers pass on what they got: no rank sends a chunk more than MU_FAN_OUT times
 * (parameters and moments counted apart), and following `from` never runs in a circle. Several receivers on a host that
 * has nothing get a chunk from outside once and pass it on among themselves.
 *
 * A read-only tied copy (plan/layout.h) is needed by the last stage like its other parameters, and counts as held by
 * whoever held it, unless that share is `owned_only` or the holder's copies are stale; it is a source for nobody.
 *
 * Pure and deterministic. Time and memory follow the runs of the distinct shares (plan/share_index.h), the ranks and
 * the moves, not ranks times chunks. */
#ifndef MU_PLAN_RESHARD_H
#define MU_PLAN_RESHARD_H

#include "plan/layout.h"

/* What one rank of the new layout holds of the step the generation starts from. */
struct mu_reshard_holder {
    const struct mu_held_share *shares;
    uint32_t share_count; /* 0: nothing */
    uint32_t host;        /* equal numbers: same host */
    bool stale_copies;    /* its tied copies are of another step: it rolled forward on its own */
};

enum { MU_FAN_OUT = 4 };

enum { MU_MOVE_PARAMS = 1, MU_MOVE_MOMENTS = 2 };

struct mu_move {
    uint32_t from, to; /* ranks of the new layout */
    uint32_t kinds;    /* MU_MOVE_* */
    struct mu_chunk_run run;
};

struct mu_reshard {
    struct mu_move *moves; /* ascending by (to, run.first); as few runs as possible */
    uint32_t move_count;
    uint64_t bytes;         /* moved */
    uint64_t minimum_bytes; /* what no plan could avoid */
    uint32_t missing_chunk; /* MU_ERR_NOT_FOUND: nobody has it */
};

/* holders[world of layout]. MU_ERR_NOT_FOUND: some chunk has no source (ret_reshard->missing_chunk, the first one;
 * there are no moves). MU_ERR_NO_MEMORY. mu_reshard_fini frees the moves. */
enum mu_status mu_reshard_plan(const struct mu_model_spec *model, const struct mu_layout *layout,
                               const struct mu_reshard_holder *holders, struct mu_reshard *ret_reshard) MU_WARN_UNUSED;
void mu_reshard_fini(struct mu_reshard *reshard);

/* Do these holders together have every chunk, parameters and moments? (Any number of them, no new layout. False when
 * memory runs out.) */
bool mu_reshard_complete(const struct mu_model_spec *model, const struct mu_reshard_holder *holders, uint32_t count);

#endif
