/* Shared by reduce.c (exchange of gradients), reduce_plan.c (who sends what to whom), reduce_gather.c (updated
 * parameters), reduce_nccl.c and reduce_nccl_plan.c (both between GPUs) and reduce_small.c (votes, evaluations). */
#ifndef MU_WORKER_REDUCE_INTERNAL_H
#define MU_WORKER_REDUCE_INTERNAL_H

#include "worker/exchange.h"
#include "worker/reduce.h"

enum {
    REDUCE_NOBODY = -1,
    REDUCE_ALIGN_FLOATS = 16,
    REDUCE_RELATIVES_MAX = MU_MESH_WORLD_MAX + 1,
    REDUCE_ROOT_BITS = 6,
    SMALL_BYTES = 1360,      /* a packed struct mu_small */
    REDUCE_GATHER_ROUND = 8, /* between GPUs: segments of each owner that are gathered at once */
};

_Static_assert(1 << REDUCE_ROOT_BITS >= MU_TREE_ROOTS_MAX, "a root's number fits");
_Static_assert(REDUCE_RELATIVES_MAX >= 33, "a parent and its children in the binomial tree");

/* Who is next to this one among the `size` members of a group: everybody (mesh), or parent and children in the binomial
 * tree. */
struct relatives {
    bool mesh;
    int64_t parent; /* REDUCE_NOBODY: the root; always in a mesh */
    uint32_t children[REDUCE_RELATIVES_MAX], child_count;
};

/* A run of chunks of one cell and one owner. Numbered alike on all ranks. */
struct segment {
    uint32_t cell, owner;   /* owner: index of a replica */
    uint64_t offset, size;  /* elements */
    uint32_t first_request; /* inputs, then ups, then the down, then the forwards */
    uint32_t first_gather;  /* sends to the other replicas, or the one receive */
    bool ready, added, complete;
};

/* A root that another replica sends to this one, for every segment that is collected here. */
struct input {
    uint32_t peer;   /* index of a replica */
    uint32_t number; /* among the roots that the peer sends */
};

/* How the roots of several replicas are added. Storages: 0 .. stack_count - 1 are the buffers of the stack, the others
 * staging slots of the segment's window. */
struct additions {
    struct input *inputs;
    uint32_t *input_storage; /* [input_count] */
    uint32_t input_count;
    struct mu_tree_add *adds; /* of storages, in tree order */
    uint32_t add_count;
    uint32_t results[MU_TREE_ROOTS_MAX], result_count; /* storages that remain after the additions */
    uint32_t staging_end;                              /* staging slots up to here are in use */
};

/* Where the roots of a leaf range come from. */
struct source {
    uint32_t peer, first_leaf, leaf_count;
    const uint32_t *storages; /* they lie here already; NULL: the peer sends them */
};

/* The sum between GPUs. Replicas are in shard groups (plan/layout.h), one up to a mesh of them. Segment i falls to
 * position i mod `adders` of every group: the member there adds up its group's roots, and the one of group
 * i / adders mod groups then the groups' sums. Groups of two sizes: positions that only some of them have add nothing.
 */
struct link_plan {
    uint32_t groups, group, adders;
    uint32_t *group_first;            /* [groups + 1]: replicas */
    struct additions members, across; /* of what falls to this position; `across` where this group is the one */
    uint32_t bucket;                  /* segments that are exchanged at once: adders times the window */
    uint32_t ready, next;             /* of the step: segments ready, and on their way, up to here */
    uint32_t *by_owner, *owner_begin; /* segments of each owner of the group, in order; [count + 1] */
    uint32_t rounds, gathered;        /* of the gather: all, on their way */
    struct mu_nccl_move *moves;       /* [move_room] */
    size_t move_count, move_room;
};

struct mu_reduce {
    const struct mu_model_spec *model;
    struct mu_pool *pool;
    struct mu_comm_group *group;
    const struct mu_nccl_link *link;
    struct link_plan *gpus; /* NULL: none is wanted */
    uint32_t leaves, replicas, index;
    uint32_t *ranks; /* [replicas] */
    bool mesh, sharded;
    bool scatter;                 /* sums stay with the owners: a sharded mesh */
    struct mu_shard_group shards; /* sharded: the replicas that own the column together with this one */
    uint32_t buddy, guarded;      /* replicas, or MU_REDUCE_NO_BUDDY; only when sharded */

    /* the layout */
    struct segment *segments;
    uint32_t segment_count, segment_chunks;
    uint32_t *cell_first, *cell_segments; /* [cell_count]: its segments; none outside the column */
    uint32_t *collected;                  /* segments whose inputs come to this rank, in order */
    uint32_t collected_count;
    uint32_t *parts; /* segments of which this rank is the owner, in order; sharded only */
    uint32_t part_count;
    struct relatives kin; /* indices of replicas */

    uint32_t own_root_count, stack_count, staging_count;
    struct additions sum;

    /* the step under way */
    uint64_t sequence;
    float *stack[MU_TREE_ROOTS_MAX];
    float *staging;
    uint64_t segment_floats; /* room of one segment in staging */
    uint32_t window, posted, next_add, next_pass;
    struct mu_comm_request *requests;
    uint32_t request_count;

    /* the gather under way */
    uint64_t gather_sequence;
    float *params; /* NULL: none is */
    struct mu_comm_request *gathers;
    uint32_t gather_count;

    /* small reductions */
    uint32_t world, rank;
    struct relatives world_kin;       /* ranks */
    uint8_t (*small_in)[SMALL_BYTES]; /* [relatives] */
    uint8_t small_up[SMALL_BYTES], small_down[SMALL_BYTES];
    struct mu_comm_request *small_requests; /* [2 * relatives]: receives, then sends */
};

/* Are two adjacent nodes the children of one node of the tree? */
static inline bool reduce_siblings(uint32_t leaves, struct mu_tree_node low, struct mu_tree_node high)
{
    struct mu_tree_node both = {low.first, low.count + high.count}, left, right;
    if (!mu_tree_is_node(leaves, both))
        return false;
    mu_tree_children(both, &left, &right);
    return left.count == low.count;
}

/* Does this rank add up the segment's inputs? To which replica do the results go (REDUCE_NOBODY: they are the sum)? */
static inline bool reduce_collects(const struct mu_reduce *reduce, const struct segment *segment)
{
    return reduce->sum.input_count > 0 && (!reduce->mesh || segment->owner == reduce->index);
}

static inline int64_t reduce_parent(const struct mu_reduce *reduce, const struct segment *segment)
{
    if (!reduce->mesh)
        return reduce->kin.parent;
    return segment->owner == reduce->index ? REDUCE_NOBODY : (int64_t)segment->owner;
}

/* Between GPUs? Then all of a step's exchange is made by reduce_nccl.c. */
static inline bool reduce_linked(const struct mu_reduce *reduce)
{
    return reduce->gpus && mu_nccl_link_open(reduce->link);
}

/* How many requests of each kind a segment has on this rank. */
struct segment_counts {
    uint32_t inputs, ups, down, forwards;
};

static inline struct segment_counts reduce_counts(const struct mu_reduce *reduce, const struct segment *segment)
{
    bool collects = reduce_collects(reduce, segment), to_parent = reduce_parent(reduce, segment) != REDUCE_NOBODY;
    bool guards = segment->owner == reduce->guarded, guarded = reduce->buddy != MU_REDUCE_NO_BUDDY;
    return (struct segment_counts){
        .inputs = collects ? reduce->sum.input_count : 0,
        .ups = !to_parent ? 0
               : collects ? reduce->sum.result_count
                          : reduce->own_root_count,
        .down = to_parent && (!reduce->scatter || guards),
        .forwards = reduce->mesh && to_parent ? 0
                    : reduce->scatter         ? guarded
                                              : reduce->kin.child_count,
    };
}

/* ---- reduce.c ---- */
/* Where a storage of the segment lies; `turn` is its place in the order of collected segments. */
float *reduce_storage(const struct mu_reduce *reduce, const struct segment *segment, uint32_t storage, uint32_t turn);
uint64_t reduce_up_number(const struct mu_reduce *reduce, const struct segment *segment, uint32_t root);
uint64_t reduce_down_number(const struct mu_reduce *reduce, const struct segment *segment);
/* All that has come and the own roots, in tree order. */
enum mu_status reduce_add(struct mu_reduce *reduce, const struct additions *sum, const struct segment *segment,
                          uint32_t turn, struct mu_error *err) MU_WARN_UNUSED;

/* ---- reduce_nccl.c ---- */
void reduce_nccl_begin(struct mu_reduce *reduce);
/* A segment more is ready: whatever can go goes. */
enum mu_status reduce_nccl_advance(struct mu_reduce *reduce, struct mu_error *err) MU_WARN_UNUSED;
enum mu_status reduce_nccl_finish(struct mu_reduce *reduce, struct mu_error *err) MU_WARN_UNUSED;
void reduce_nccl_gather_begin(struct mu_reduce *reduce);
/* The first `parts` own parts are updated. */
enum mu_status reduce_nccl_gather(struct mu_reduce *reduce, uint32_t parts, struct mu_error *err) MU_WARN_UNUSED;
enum mu_status reduce_nccl_gather_finish(struct mu_reduce *reduce, struct mu_error *err) MU_WARN_UNUSED;

/* ---- reduce_nccl_plan.c ---- */
/* Once the segments are there. */
enum mu_status reduce_nccl_plan(struct mu_reduce *reduce, const struct mu_reduce_config *config,
                                struct mu_error *err) MU_WARN_UNUSED;
void reduce_nccl_plan_free(struct link_plan *plan);
/* Segments that are longer, so that additions are: at least so many chunks of `chunks` in the column. */
uint32_t reduce_nccl_segment_chunks(const struct mu_reduce_config *config, uint32_t chunks);

/* ---- reduce_plan.c ---- */
/* Leaves of replicas [index, end). */
struct leaf_range {
    uint32_t first, count;
};
struct leaf_range reduce_leaf_range(const struct mu_reduce_config *config, uint32_t index, uint32_t end);
/* The program that adds the roots of adjacent leaf ranges, ascending. Inputs lie in staging from slot `staging_begin`
 * on, but the first one in the bottom buffer when that is free. */
enum mu_status reduce_plan_additions(const struct mu_reduce *reduce, const struct source *sources, uint32_t count,
                                     bool bottom_free, uint32_t staging_begin, struct additions *ret_additions,
                                     struct mu_error *err) MU_WARN_UNUSED;
void reduce_additions_free(struct additions *additions);

/* reduce_plan.c: fills everything above "the step under way", and the window. */
enum mu_status mu_reduce_plan(struct mu_reduce *reduce, const struct mu_reduce_config *config,
                              struct mu_error *err) MU_WARN_UNUSED;

#endif
