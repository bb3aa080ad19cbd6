/* The layout of one generation: which rank holds which part of the state, and which part of each step it computes.
 *
 * A generation has `tp * pp * dp` working ranks, then idle ones (they take part in votes, hold and compute nothing; a
 * planned change keeps a leaving worker so until the others have copied from it). Rank = t + tp * (d + dp * p): tensor
 * neighbours are adjacent, then replicas, then stages (Megatron-LM's default order).
 *
 *   stage p    layers [stage_first[p], stage_first[p + 1]); the embedding E belongs to stage 0, the final norm and head
 * F to the last tensor t   slices [t * T / tp, (t + 1) * T / tp) of every sliced cell, and all shared cells of its
 * stage replica d  leaves of the step (mu_plan_leaf_range over dp)
 *
 * The cells of (p, t) are its **column**, the same for every d. The column's chunks, in flat order, are divided over
 * its dp replicas in contiguous runs (the first ones get one more): that is who adds up which chunk, and with
 * `sharded` also who holds its moments (ZeRO-1). Shared cells are held, summed and updated by every t alike; their
 * **primary** owner, which answers for them once per world (norm, checkpoint), is in the column of t = 0.
 *
 * With more than MU_MESH_WORLD_MAX replicas a sharded column is divided over **shard groups** of consecutive replicas,
 * as few and as even as possible: each group owns all of the column's chunks. The sum reaches all replicas along a
 * tree (between GPUs: the owners); updated parameters are gathered within the group. The primary owners are those of
 * the first group.
 *
 * With tied embeddings and pp > 1 the last stage also holds a read-only **copy** of its column's E slices: parameters
 * only, no source for anybody.
 *
 * **Mirrors** (`parallel.redundancy: buddy`): where the update of a chunk has one holder, another rank, its **buddy**,
 * gets the same reduced gradient, makes the same update, and so holds the same parameters and moments. Who has one
 * holder: the owned chunks of a sharded column with dp > 1, then the buddy is another replica of the column; everything
 * with dp = 1, then it is any other working rank. Member i of such a group of n is guarded by member (i + buddy_shift)
 * mod n: everybody guards one and is guarded by one. The shift is chosen by hosts (mu_layout_buddy_shift).
 *
 * A rank's share is described by runs of chunks, so nothing here grows with the number of ranks. Pure. */
#ifndef MU_PLAN_LAYOUT_H
#define MU_PLAN_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>

#include "plan/job.h"
#include "plan/model_spec.h"

enum {
    MU_MESH_WORLD_MAX = 32, /* up to here every rank is connected to every other; above, along a binomial tree */
    MU_STAGES_MAX = 128,
    MU_RUNS_MAX = 2 * MU_LAYERS_MAX + 8, /* of one share */
};

struct mu_layout {
    uint32_t tp, pp, dp, idle;
    bool sharded;                            /* moments over dp */
    uint32_t buddy_shift;                    /* 0: no mirrors */
    uint16_t stage_first[MU_STAGES_MAX + 1]; /* [pp + 1] in use: 0 ... layers */
};

struct mu_coords {
    uint32_t t, d, p;
};

struct mu_chunk_run {
    uint32_t first, count;
};

/* A rank's share that somebody holds, and in a layout with buddies what the rank mirrors: always of the same step. */
struct mu_held_share {
    struct mu_layout layout;
    uint32_t rank;
    bool owned_only; /* parameters of the OWNED and mirrored chunks only: a sharded update was rolled forward, or its
                        parameters were not gathered to the end */
};

enum mu_share {
    MU_SHARE_PARAMS,  /* all chunks of its column: parameters and gradients */
    MU_SHARE_OWNED,   /* those of the column that it adds up and, when sharded, alone updates */
    MU_SHARE_MOMENTS, /* PARAMS, or OWNED when sharded */
    MU_SHARE_PRIMARY, /* OWNED without shared cells unless t = 0: every chunk of the model once per world */
    MU_SHARE_COPY,    /* the tied embedding's slices on the last stage when pp > 1 */
    MU_SHARE_MIRROR,  /* what it updates for the rank that it guards, parameters and moments, beyond what it updates for
                         itself */
};

/* tp = pp = 1, dp = world, replicated. */
void mu_layout_init(struct mu_layout *layout, uint32_t dp, uint32_t layers);
/* Every rule above and those of the job (tp divides T, pp <= layers and MU_STAGES_MAX, stages not empty, dp <= leaves,
 * sum of ranks <= MU_WORKERS_MAX). For layouts that come from outside. */
enum mu_status mu_layout_check(const struct mu_layout *layout, const struct mu_job_spec *spec,
                               struct mu_error *err) MU_WARN_UNUSED;
bool mu_layout_equal(const struct mu_layout *a, const struct mu_layout *b);

uint32_t mu_layout_world(const struct mu_layout *layout); /* with idle ranks */
uint32_t mu_layout_working(const struct mu_layout *layout);
bool mu_layout_is_idle(const struct mu_layout *layout, uint32_t rank);
struct mu_coords mu_layout_coords(const struct mu_layout *layout, uint32_t rank); /* of a working rank */
uint32_t mu_layout_rank(const struct mu_layout *layout, struct mu_coords coords);

/* The replicas [first, first + count) that own a sharded column together, among them `replica` of `replicas`. */
struct mu_shard_group {
    uint32_t first, count;
};
struct mu_shard_group mu_layout_shard_group(uint32_t replicas, uint32_t replica);

/* The rank that mirrors what `rank` alone updates; the rank whose chunks `rank` mirrors. MU_LAYOUT_NOBODY: none. */
#define MU_LAYOUT_NOBODY UINT32_MAX
uint32_t mu_layout_buddy(const struct mu_layout *layout, uint32_t rank);
uint32_t mu_layout_guarded(const struct mu_layout *layout, uint32_t rank);
/* How many ranks are guarded together: shifts go up to one less. 1: in this layout nobody can be guarded, or nobody
 * need be. */
uint32_t mu_layout_buddy_group(const struct mu_layout *layout);
/* The shift with most buddies on another host than whom they guard, of several the one with most in another domain, of
 * these the smallest one; 0 when the group is 1. hosts[working], domains[working] (may be `hosts`): equal numbers, same
 * one. *ret_apart: the number of ranks whose buddy is on another host. */
uint32_t mu_layout_buddy_shift(const struct mu_layout *layout, const uint32_t *hosts, const uint32_t *domains,
                               uint32_t *ret_apart);

/* Runs of chunks of a rank's share, ascending, maximal, disjoint; none for an idle rank. `out` (MU_RUNS_MAX) may be
 * NULL: only counted. O(layers of the stage). */
uint32_t mu_layout_runs(const struct mu_model_spec *model, const struct mu_layout *layout, uint32_t rank,
                        enum mu_share share, struct mu_chunk_run *out);
uint64_t mu_layout_elements(const struct mu_model_spec *model, const struct mu_layout *layout, uint32_t rank,
                            enum mu_share share);

/* Ranks that `rank` exchanges messages with, ascending, without itself: its tensor group; its replicas (all when dp <=
 * MU_MESH_WORLD_MAX, else the binomial tree over d, and its shard group when sharded); the stages before and after it,
 * and first and last stage with tied embeddings; its buddy and the rank it guards; and over all ranks, idle ones too, a
 * mesh (world <= MU_MESH_WORLD_MAX) or the binomial tree. Returns the count, at most MU_LAYOUT_NEIGHBOURS_MAX. */
enum { MU_LAYOUT_NEIGHBOURS_MAX = 160 };
uint32_t mu_layout_neighbours(const struct mu_model_spec *model, const struct mu_layout *layout, uint32_t rank,
                              uint32_t out[MU_LAYOUT_NEIGHBOURS_MAX]);

/* The binomial tree that votes and large groups use: parent first (none for 0), then children, ascending. Returns the
 * count, at most 33. */
uint32_t mu_layout_binomial(uint32_t size, uint32_t index, uint32_t out[33]);

#endif
