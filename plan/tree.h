/* The fixed summation tree over M leaves: a node (first, count) with count > 1 splits into (first, p) and (first + p, count - p),
 * p = the largest power of two below count. Every sum over leaves follows it, whoever computes which part. Pure. */
#ifndef MU_PLAN_TREE_H
#define MU_PLAN_TREE_H

#include <stdbool.h>
#include <stdint.h>

struct mu_tree_node {
    uint32_t first, count; /* leaves [first, first + count) */
};

enum { MU_TREE_ROOTS_MAX = 64 }; /* most maximal subtrees of one contiguous range: under 2 log2(M) */

/* The maximal nodes of the tree over `leaves` that lie inside [first, first + count), ascending. Returns how many. */
uint32_t mu_tree_roots(uint32_t leaves, uint32_t first, uint32_t count, struct mu_tree_node out[MU_TREE_ROOTS_MAX]);

bool mu_tree_is_node(uint32_t leaves, struct mu_tree_node node);
/* Parent of a node that is not the whole tree; children of a node with count > 1. */
struct mu_tree_node mu_tree_parent(uint32_t leaves, struct mu_tree_node node);
void mu_tree_children(struct mu_tree_node node, struct mu_tree_node *ret_left, struct mu_tree_node *ret_right);

/* Given the roots of all ranks in ascending order (they tile [0, leaves)), the order of additions: each step says "add slot b into
 * slot a" (a < b, indices into the root list), children before parents; after the last one slot 0 holds the sum. Returns the number
 * of additions, always root_count - 1. `out` holds at least root_count - 1 entries. */
struct mu_tree_add {
    uint32_t into, from;
};
uint32_t mu_tree_schedule(uint32_t leaves, const struct mu_tree_node *roots, uint32_t root_count, struct mu_tree_add *out);

#endif
