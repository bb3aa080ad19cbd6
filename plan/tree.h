/* The fixed summation tree over M leaves: a node (first, count) with count > 1 splits into (first, p) and (first + p,
 * count - p), p = the largest power of two below count. Every sum over leaves follows it, whoever computes which part.
 * Pure. */
#ifndef MU_PLAN_TREE_H
#define MU_PLAN_TREE_H

#include <stdbool.h>
#include <stdint.h>

struct mu_tree_node {
    uint32_t first, count; /* leaves [first, first + count) */
};

enum { MU_TREE_ROOTS_MAX = 64 }; /* most maximal subtrees of one contiguous range: under 2 log2(M) */

/* The maximal nodes of the tree over `leaves` that lie inside [first, first + count), ascending. Returns how many.
 * O(log^2 leaves). */
uint32_t mu_tree_roots(uint32_t leaves, uint32_t first, uint32_t count, struct mu_tree_node out[MU_TREE_ROOTS_MAX]);

bool mu_tree_is_node(uint32_t leaves, struct mu_tree_node node);
/* Parent of a node that is not the whole tree; children of a node with count > 1. */
struct mu_tree_node mu_tree_parent(uint32_t leaves, struct mu_tree_node node);
void mu_tree_children(struct mu_tree_node node, struct mu_tree_node *ret_left, struct mu_tree_node *ret_right);

/* A rank that owns leaves from `first` on sums them with a stack of buffers, like a binary counter: it pushes the
 * buffer of leaf `leaf`, then adds the top buffer into the one below it as many times as this returns. When the last
 * leaf of its range has been pushed, the stack holds exactly mu_tree_roots() of the range, bottom first. */
uint32_t mu_tree_carries(uint32_t leaves, uint32_t first, uint32_t leaf);
/* Most buffers on that stack at any moment while [first, first + count) is summed: what a rank must allocate (root
 * count included). */
uint32_t mu_tree_buffers(uint32_t leaves, uint32_t first, uint32_t count);

/* Given the roots of all ranks in ascending order (they tile [0, leaves) and each is a node), the order of additions:
 * each step says "add slot `from` into slot `into`" (into < from, indices into the root list), children before parents;
 * after the last one slot 0 holds the sum. Returns the number of additions, always root_count - 1. `out` holds at least
 * root_count - 1 entries. O(root_count log leaves). */
struct mu_tree_add {
    uint32_t into, from;
};
uint32_t mu_tree_schedule(uint32_t leaves, const struct mu_tree_node *roots, uint32_t root_count,
                          struct mu_tree_add *out);

#endif
