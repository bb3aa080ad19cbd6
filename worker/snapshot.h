/* Snapshots: copies one piece of the state at a boundary and writes it in the background.
 *
 *   engine thread: take --copy into the arena--> writer thread: make the directory, checksum, write, sync, rename -->
 * done
 *
 * One piece at a time: while it is being written, another snapshot is refused with MU_ERR_BUSY (the coordinator has one
 * checkpoint per job at a time; a piece that is reassigned to a busy writer goes to somebody else or is ordered again).
 * A failure is reported through `done` and touches nothing else. The arena keeps its size, it only grows: by `reserve`,
 * or in `take` if nobody reserved enough.
 *
 * File names carry generation and a random number, so that a zombie can never overwrite the file that a manifest names.
 */
#ifndef MU_WORKER_SNAPSHOT_H
#define MU_WORKER_SNAPSHOT_H

#include <stdbool.h>

#include "kernels/pool.h"
#include "plan/model_spec.h"
#include "plan/session.h"

struct mu_snapshots;

/* What is copied: flat buffers of the model, after `step` updates. */
struct mu_snapshot_state {
    const struct mu_model_spec *model;
    const float *params, *m, *v;
    const char *job;
    uint64_t step, generation;
};

/* Runs on the engine's thread when a snapshot is refused, else on the writer's. */
typedef void mu_snapshot_done_fn(void *ctx, uint64_t generation, const struct mu_piece_report *report);

enum mu_status mu_snapshots_new(mu_snapshot_done_fn *done, void *ctx, struct mu_snapshots **ret_snapshots,
                                struct mu_error *err) MU_WARN_UNUSED;
/* Abandons the piece being written, joins the writer. NULL is fine. */
void mu_snapshots_free(struct mu_snapshots *snapshots);

/* What the arena would grow by for pieces of 1 / piece_count of the model, bytes. */
uint64_t mu_snapshots_growth_bytes(struct mu_snapshots *snapshots, const struct mu_model_spec *model,
                                   uint32_t piece_count);
/* Memory for pieces of 1 / piece_count of the model, mapped and touched now. Does nothing while a piece is being
 * written. */
enum mu_status mu_snapshots_reserve(struct mu_snapshots *snapshots, const struct mu_model_spec *model,
                                    uint32_t piece_count, struct mu_error *err) MU_WARN_UNUSED;

/* Copies on `pool` (which may be cancelled: then the piece fails with MU_ERR_CANCELLED) and returns; always answered by
 * one `done`. Returns the microseconds for which the caller was held up. */
uint64_t mu_snapshots_take(struct mu_snapshots *snapshots, struct mu_pool *pool, const struct mu_snapshot_state *state,
                           const struct mu_snapshot *snapshot);

/* The piece being written, if any, is stopped and never reported. Does not wait. */
void mu_snapshots_abandon(struct mu_snapshots *snapshots);
/* True while a piece is being written. */
bool mu_snapshots_busy(struct mu_snapshots *snapshots);

#endif
