/* The sum of gradients over the replicas of one column, in the fixed tree order of plan/tree.h: bits never depend on
 * the layout.
 *
 * Every replica arrives with the roots of its own leaf range, a stack of flat gradient buffers, bottom first; every
 * replica leaves with the complete sum in the bottom buffer, or (`sharded`) with that of the chunks that it owns: then
 * it alone updates them, and a gather brings the updated parameters to the others. With buddies a second replica gets
 * the sum too and makes the same update: the gather need not serve it. The column is cut into segments
 * (runs of chunks of one cell, one owner), taken in the order in which the backward pass completes cells. Two ways, one
 * machine, also when sharded over more replicas than a mesh takes: the sums then go to all along the tree, and the
 * gather stays within the shard group (plan/layout.h):
 *
 *   mesh   the owner of a segment's chunks (the replica's part of the column, as in plan/layout.h) receives everybody's
 *          roots, adds them, sends the sum to everybody (not when sharded)
 *   tree   replicas of a binomial tree merge contiguous leaf ranges upward, the sum comes down again from replica 0
 *
 * and a third one between GPUs, for any number of replicas, in reduce_nccl.c. Of the two, by segments:
 *
 *   segment:  own roots final (cell_ready) -> inputs received -> added -> sent up, or complete -> received from above
 *             -> passed on
 *
 * The sum of a rank's own root and others' is kept in the bottom buffer: there it may arrive because whoever sends the
 * complete segment has first received all of this rank's roots. Received inputs go to a window of staging memory whose
 * size is bounded.
 *
 * Thread: the engine's. Nothing is allocated after mu_reduce_new. */
#ifndef MU_WORKER_REDUCE_H
#define MU_WORKER_REDUCE_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/exact_sum.h"
#include "kernels/pool.h"
#include "plan/layout.h"
#include "plan/model_spec.h"
#include "plan/tree.h"
#include "worker/comm.h"
#include "worker/nccl_link.h"

#define MU_REDUCE_NO_BUDDY UINT32_MAX

enum {
    MU_REDUCE_REQUESTS_MAX = 4096, /* gradient messages to or from one peer in one step; segments grow to keep this */
    MU_REDUCE_WINDOW_MIN = 2,      /* segments whose inputs may be under way at one time, at least */
    MU_DIGEST_SIZE = 32,
};

struct mu_reduce;

struct mu_reduce_config {
    const struct mu_model_spec *model; /* must outlive the reduce */
    struct mu_pool *pool;
    uint32_t leaves;
    /* The replicas of this rank's column; an idle rank is one replica of an empty column. */
    uint32_t replicas, index;
    const uint32_t *ranks;           /* [replicas] of the group, ascending */
    const uint32_t *leaf_counts;     /* [replicas], or NULL: equal */
    const struct mu_chunk_run *runs; /* of the column: whole cells, ascending (MU_SHARE_PARAMS) */
    uint32_t run_count;
    bool sharded;
    uint32_t buddy, guarded; /* sharded: the replica that also gets the sum of what this one owns and updates it too;
                                the replica whose sums this one gets. MU_REDUCE_NO_BUDDY: none */
    uint32_t world, rank;    /* all ranks of the group: the small reductions */
    bool tree;               /* a tree also where a mesh would do; the same on all ranks */
    bool gpus;               /* a link will be open when the first step begins */
    uint64_t staging_bytes;  /* what the window should fit into; at least MU_REDUCE_WINDOW_MIN segments are taken */
    uint32_t segment_chunks; /* chunks in a segment at least, the same on all ranks; 0: one */
};

enum mu_status mu_reduce_new(const struct mu_reduce_config *config, struct mu_reduce **ret_reduce,
                             struct mu_error *err) MU_WARN_UNUSED;
void mu_reduce_free(struct mu_reduce *reduce); /* its group must be closed, or nothing outstanding. NULL is fine. */

/* Staging memory that begin wants, bytes (floats, 64-byte aligned); 0 when this rank receives nothing to add. */
uint64_t mu_reduce_staging_bytes(const struct mu_reduce *reduce);

/* Connections of the generation, and the memory for the window. NULL group: world is 1. `link` NULL, or none open:
 * everything goes over the group; else (config.gpus) the sums and the gather go between the GPUs (reduce_nccl.c). The
 * link may be opened later, but before the first step. */
void mu_reduce_attach(struct mu_reduce *reduce, struct mu_comm_group *group, const struct mu_nccl_link *link,
                      float *staging);

/* A step begins: posts what may be received. `sequence` counts steps (and evaluations) of the generation from 0. stack:
 * as many flat buffers as this rank has roots, at least one; stack[0] is the bottom, where the sum arrives. They must
 * stay until finish has returned MU_OK, or the group is closed. */
enum mu_status mu_reduce_begin(struct mu_reduce *reduce, uint64_t sequence, float *const *stack,
                               struct mu_error *err) MU_WARN_UNUSED;

/* The cell's part of all own roots is final. Once per cell of the column and step; other cells are ignored. Adds what
 * can be added and sends what can be sent. */
enum mu_status mu_reduce_cell_ready(struct mu_reduce *reduce, uint32_t cell, struct mu_error *err) MU_WARN_UNUSED;

/* After all cells are ready: waits until the complete sum (when sharded: of the owned and the guarded chunks) is in
 * stack[0] and all own sends are done. MU_ERR_CANCELLED; MU_ERR_UNAVAILABLE: a peer failed (mu_comm_group_failures). */
enum mu_status mu_reduce_finish(struct mu_reduce *reduce, struct mu_error *err) MU_WARN_UNUSED;

/* ---- sharded: updated parameters back to all replicas ---- */

/* Posts what comes from the others, but for the guarded one. `params`: flat space; it must stay until finish has
 * returned MU_OK, or the group is closed. The parts of others are undefined until then. Nothing to do for one replica,
 * or when not sharded. */
enum mu_status mu_reduce_gather_begin(struct mu_reduce *reduce, uint64_t sequence, float *params,
                                      struct mu_error *err) MU_WARN_UNUSED;
/* Own segments, in the order in which they had better be updated and sent: how many; where `part` of them lies. */
uint32_t mu_reduce_part_count(const struct mu_reduce *reduce);
void mu_reduce_part(const struct mu_reduce *reduce, uint32_t part, uint64_t *ret_offset, uint64_t *ret_size);
/* The part is updated: it goes to the others. Once per part and gather. */
enum mu_status mu_reduce_gather_send(struct mu_reduce *reduce, uint32_t part, struct mu_error *err) MU_WARN_UNUSED;
/* Waits until all is received and sent. */
enum mu_status mu_reduce_gather_finish(struct mu_reduce *reduce, struct mu_error *err) MU_WARN_UNUSED;

/* ---- small reductions over all ranks: the vote, evaluations, the end ---- */

/* One rank's contribution; the total has one root. Roots are the maximal subtrees of the rank's range, ascending. Ranks
 * that have nothing to say about leaves have none. */
struct mu_small {
    double roots[MU_TREE_ROOTS_MAX];
    struct mu_tree_node nodes[MU_TREE_ROOTS_MAX];
    uint32_t root_count;
    struct mu_exact_sum squares;
    uint64_t command;               /* MIN over ranks */
    uint8_t digest[MU_DIGEST_SIZE]; /* OR over ranks: of the one that knows it */
    bool unfinite;                  /* OR over ranks */
};

enum mu_small_kind { MU_SMALL_VOTE, MU_SMALL_EVAL, MU_SMALL_END };

/* Nothing contributed: no roots, no squares, the largest command. */
void mu_small_init(struct mu_small *small);
/* Pushes one more leaf's value on the roots of a range that began at `first`; leaves in ascending order. */
void mu_small_push(struct mu_small *small, uint32_t leaves, uint32_t first, uint32_t leaf, double value);

/* The ranges of `leaves` leaves over the ranks that have roots are contiguous and ascending; every rank of the
 * generation takes part and gets the total. leaves 0: nobody has any. Once per sequence and kind. MU_ERR_CORRUPT: a
 * peer's message is not what this rank expects. */
enum mu_status mu_reduce_small(struct mu_reduce *reduce, uint64_t sequence, enum mu_small_kind kind, uint32_t leaves,
                               const struct mu_small *own, struct mu_small *ret_total,
                               struct mu_error *err) MU_WARN_UNUSED;

#endif
