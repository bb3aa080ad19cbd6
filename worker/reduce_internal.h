/* Shared by reduce.c (exchange of gradients), reduce_plan.c (who sends what to whom) and reduce_small.c (votes,
 * evaluations). */
#ifndef MU_WORKER_REDUCE_INTERNAL_H
#define MU_WORKER_REDUCE_INTERNAL_H

#include "worker/reduce.h"

enum {
    REDUCE_NO_RANK = -1,
    REDUCE_ALIGN_FLOATS = 16,
    SMALL_BYTES = 1328, /* a packed struct mu_small */
};

/* Exchange numbers: sequence | what | index. */
enum reduce_exchange {
    EXCHANGE_UP = 1,
    EXCHANGE_DOWN,
    EXCHANGE_VOTE_UP,
    EXCHANGE_VOTE_DOWN,
    EXCHANGE_EVAL_UP,
    EXCHANGE_EVAL_DOWN
};
enum { EXCHANGE_INDEX_BITS = 27, EXCHANGE_KIND_BITS = 3, EXCHANGE_ROOT_BITS = 6 };

_Static_assert(1 << EXCHANGE_ROOT_BITS >= MU_TREE_ROOTS_MAX, "a root's number fits");

/* A run of chunks of one cell and one owner. Numbered alike on all ranks. */
struct segment {
    uint32_t cell, owner;
    uint64_t offset, size;  /* elements */
    uint32_t first_request; /* inputs, then ups, then the down, then the forwards */
    bool ready, added, complete;
};

/* A root that another rank sends to this one, for every segment that is collected here. */
struct input {
    uint32_t peer;
    uint32_t number; /* among the roots that the peer sends */
};

struct mu_reduce {
    const struct mu_model_spec *model;
    struct mu_pool *pool;
    struct mu_comm_group *group;
    uint32_t leaves, world, rank;
    bool mesh;

    /* the layout */
    struct segment *segments;
    uint32_t segment_count, segment_chunks;
    uint32_t *cell_first; /* [cell_count + 1]: segments of the cell at position i of the backward order */
    uint32_t *collected;  /* segments whose inputs come to this rank, in order */
    uint32_t collected_count;
    int64_t parent;                                    /* tree */
    uint32_t children[MU_NEIGHBOURS_MAX], child_count; /* tree; mesh: everybody else */

    /* Storages: 0 .. stack_count - 1 are the buffers of the stack, the others staging slots of the segment's window. */
    uint32_t own_root_count, stack_count, staging_count;
    struct input *inputs;
    uint32_t *input_storage; /* [input_count] */
    uint32_t input_count;
    struct mu_tree_add *adds; /* of storages, in tree order */
    uint32_t add_count;
    uint32_t results[MU_TREE_ROOTS_MAX], result_count; /* storages that remain after the additions */

    /* the step under way */
    uint64_t sequence;
    float *stack[MU_TREE_ROOTS_MAX];
    float *staging;
    uint64_t segment_floats; /* room of one segment in staging */
    uint32_t window, posted, next_add, next_pass;
    struct mu_comm_request *requests;
    uint32_t request_count;

    /* small reductions */
    uint8_t (*small_in)[SMALL_BYTES]; /* [neighbours] */
    uint8_t small_up[SMALL_BYTES], small_down[SMALL_BYTES];
    struct mu_comm_request *small_requests; /* [2 * neighbours]: receives, then sends */
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

static inline uint64_t reduce_exchange_number(uint64_t sequence, enum reduce_exchange kind, uint64_t index)
{
    MU_ASSERT(sequence < 1ull << (64 - EXCHANGE_INDEX_BITS - EXCHANGE_KIND_BITS) && index < 1ull
                                                                                                << EXCHANGE_INDEX_BITS);
    return sequence << (EXCHANGE_INDEX_BITS + EXCHANGE_KIND_BITS) | (uint64_t)kind << EXCHANGE_INDEX_BITS | index;
}

/* Does this rank add up the segment's inputs? To whom do the results go (REDUCE_NO_RANK: they are the sum)? */
static inline bool reduce_collects(const struct mu_reduce *reduce, const struct segment *segment)
{
    return reduce->input_count > 0 && (!reduce->mesh || segment->owner == reduce->rank);
}

static inline int64_t reduce_parent(const struct mu_reduce *reduce, const struct segment *segment)
{
    if (!reduce->mesh)
        return reduce->parent;
    return segment->owner == reduce->rank ? REDUCE_NO_RANK : (int64_t)segment->owner;
}

/* How many requests of each kind a segment has on this rank. */
struct segment_counts {
    uint32_t inputs, ups, down, forwards;
};

static inline struct segment_counts reduce_counts(const struct mu_reduce *reduce, const struct segment *segment)
{
    bool collects = reduce_collects(reduce, segment), to_parent = reduce_parent(reduce, segment) != REDUCE_NO_RANK;
    return (struct segment_counts){
        .inputs = collects ? reduce->input_count : 0,
        .ups = !to_parent ? 0
               : collects ? reduce->result_count
                          : reduce->own_root_count,
        .down = to_parent,
        .forwards = reduce->mesh && to_parent ? 0 : reduce->child_count,
    };
}

/* reduce_plan.c: fills everything above "the step under way", and the window. */
enum mu_status mu_reduce_plan(struct mu_reduce *reduce, const struct mu_reduce_config *config,
                              struct mu_error *err) MU_WARN_UNUSED;

#endif
