/* Snapshots: copies one piece of the state at a boundary and writes it in the background.
 *
 * A piece is what rank `piece` of a layout holds primarily; whoever has those chunks at that step can write it, in
 * whatever layout it steps itself.
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

#include "kernels/device.h"
#include "kernels/pool.h"
#include "plan/model_spec.h"
#include "plan/session.h"

struct mu_snapshots;

/* What is copied from: flat spaces of the model, after `step` updates. `shares` say which chunks of them are complete
 * (struct mu_held): a piece that they do not cover is refused with MU_ERR_NOT_FOUND. */
struct mu_snapshot_state {
    const struct mu_model_spec *model;
    const float *params, *m, *v;
    const struct mu_held_share *shares;
    uint32_t share_count;
    const char *job;
    const char *host; /* of a checkpoint of kind local: the own one; NULL: one directory for all */
    uint64_t step, generation;
};

/* Runs on the engine's thread when a snapshot is refused, else on the writer's. */
typedef void mu_snapshot_done_fn(void *ctx, uint64_t generation, const struct mu_piece_report *report);

/* `device`: where states lie; NULL: the host. */
enum mu_status mu_snapshots_new(struct mu_device *device, mu_snapshot_done_fn *done, void *ctx,
                                struct mu_snapshots **ret_snapshots, struct mu_error *err) MU_WARN_UNUSED;
/* Abandons the piece being written, joins the writer. NULL is fine. */
void mu_snapshots_free(struct mu_snapshots *snapshots);

/* Bytes of the copy of piece `piece` of a layout: parameters and both moments of its PRIMARY chunks. */
uint64_t mu_snapshots_piece_bytes(const struct mu_model_spec *model, const struct mu_layout *layout, uint32_t piece);
/* What the arena has room for, and what it would grow by to hold a piece of so many bytes. */
uint64_t mu_snapshots_room_bytes(const struct mu_snapshots *snapshots);
uint64_t mu_snapshots_growth_bytes(struct mu_snapshots *snapshots, uint64_t piece_bytes);
/* Memory for a piece of so many bytes, mapped and touched now. Does nothing while a piece is being written. */
enum mu_status mu_snapshots_reserve(struct mu_snapshots *snapshots, uint64_t piece_bytes,
                                    struct mu_error *err) MU_WARN_UNUSED;

/* snapshot->layout has passed mu_layout_check. Copies the PRIMARY chunks of (snapshot->layout, snapshot->piece) on
 * `pool` (which may be cancelled: then the piece fails with MU_ERR_CANCELLED) and returns; always answered by one
 * `done`. A piece without chunks is MU_OK at once, with no file and no bytes. Returns the microseconds for which the
 * caller was held up. */
uint64_t mu_snapshots_take(struct mu_snapshots *snapshots, struct mu_pool *pool, const struct mu_snapshot_state *state,
                           const struct mu_snapshot *snapshot);

/* The piece being written, if any, is stopped and never reported. Does not wait. */
void mu_snapshots_abandon(struct mu_snapshots *snapshots);
/* True while a piece is being written. */
bool mu_snapshots_busy(struct mu_snapshots *snapshots);

#endif
