#include "plan/tree.h"

#include <stddef.h>

#include "common/status.h"

/* Two facts carry this file. (1) Every aligned power-of-two block inside [0, leaves) is a node. (2) The other nodes are
 * the suffixes [f, leaves) on the tree's right spine: f = 0, then after each left child in turn. */

/* Largest power of two below n, n >= 2. */
static uint32_t split(uint32_t n)
{
    return 1u << (31 - __builtin_clz(n - 1));
}

static bool is_power_of_two(uint32_t n)
{
    return n != 0 && (n & (n - 1)) == 0;
}

/* Does the suffix [first, leaves) hang on the right spine? */
static bool on_spine(uint32_t leaves, uint32_t first)
{
    uint32_t start = 0, count = leaves;
    while (start < first && count > 1) {
        uint32_t left = split(count);
        start += left;
        count -= left;
    }
    return start == first;
}

bool mu_tree_is_node(uint32_t leaves, struct mu_tree_node node)
{
    if (node.count == 0 || node.first >= leaves || node.count > leaves - node.first)
        return false;
    if (is_power_of_two(node.count) && (node.first & (node.count - 1)) == 0)
        return true;
    return node.first + node.count == leaves && on_spine(leaves, node.first);
}

uint32_t mu_tree_roots(uint32_t leaves, uint32_t first, uint32_t count, struct mu_tree_node out[MU_TREE_ROOTS_MAX])
{
    MU_ASSERT(first <= leaves && count <= leaves - first);
    uint32_t root_count = 0, end = first + count;
    while (first < end) {
        uint32_t size = end - first;
        if (end < leaves || !on_spine(leaves, first)) {
            size = 1u << (31 - __builtin_clz(size)); /* largest block that fits ... */
            uint32_t alignment = first & (~first + 1u);
            if (first != 0 && alignment < size)
                size = alignment; /* ... and is aligned */
        }
        MU_ASSERT(root_count < MU_TREE_ROOTS_MAX);
        out[root_count++] = (struct mu_tree_node){first, size};
        first += size;
    }
    return root_count;
}

void mu_tree_children(struct mu_tree_node node, struct mu_tree_node *ret_left, struct mu_tree_node *ret_right)
{
    MU_ASSERT(node.count > 1);
    uint32_t left = split(node.count);
    *ret_left = (struct mu_tree_node){node.first, left};
    *ret_right = (struct mu_tree_node){node.first + left, node.count - left};
}

static bool same(struct mu_tree_node a, struct mu_tree_node b)
{
    return a.first == b.first && a.count == b.count;
}

struct mu_tree_node mu_tree_parent(uint32_t leaves, struct mu_tree_node node)
{
    MU_ASSERT(mu_tree_is_node(leaves, node) && node.count < leaves);
    struct mu_tree_node parent = {0, leaves};
    for (;;) {
        struct mu_tree_node left, right;
        mu_tree_children(parent, &left, &right);
        if (same(left, node) || same(right, node))
            return parent;
        parent = node.first < right.first ? left : right;
    }
}

uint32_t mu_tree_carries(uint32_t leaves, uint32_t first, uint32_t leaf)
{
    MU_ASSERT(first <= leaf && leaf < leaves);
    uint32_t end = leaf + 1, carries = 0;
    for (uint32_t size = 2; size != 0 && (end & (size - 1)) == 0 && end - first >= size; size <<= 1)
        carries++;
    if (end < leaves)
        return carries;
    /* The spine's suffixes that are no aligned blocks end here too. */
    uint32_t start = 0, count = leaves;
    while (count > 1) {
        if (start >= first && !is_power_of_two(count))
            carries++;
        uint32_t left = split(count);
        start += left;
        count -= left;
    }
    return carries;
}

uint32_t mu_tree_buffers(uint32_t leaves, uint32_t first, uint32_t count)
{
    MU_ASSERT(first <= leaves && count <= leaves - first);
    uint32_t depth = 0, most = 0;
    for (uint32_t leaf = first; leaf < first + count; leaf++) {
        if (++depth > most)
            most = depth;
        depth -= mu_tree_carries(leaves, first, leaf);
    }
    return most;
}

/* Are `low` and `high` (adjacent) the children of one node? */
static bool siblings(uint32_t leaves, struct mu_tree_node low, struct mu_tree_node high)
{
    uint32_t count = low.count + high.count;
    return split(count) == low.count && mu_tree_is_node(leaves, (struct mu_tree_node){low.first, count});
}

uint32_t mu_tree_schedule(uint32_t leaves, const struct mu_tree_node *roots, uint32_t root_count,
                          struct mu_tree_add *out)
{
    /* Nodes waiting for their right sibling are left children of nested ancestors: never more than 33 at once. */
    struct {
        struct mu_tree_node node;
        uint32_t slot;
    } stack[MU_TREE_ROOTS_MAX];
    uint32_t depth = 0, add_count = 0, next_leaf = 0;
    for (uint32_t slot = 0; slot < root_count; slot++) {
        MU_ASSERT(roots[slot].first == next_leaf && mu_tree_is_node(leaves, roots[slot]) && depth < MU_TREE_ROOTS_MAX);
        next_leaf += roots[slot].count;
        stack[depth].node = roots[slot];
        stack[depth].slot = slot;
        depth++;
        while (depth > 1 && siblings(leaves, stack[depth - 2].node, stack[depth - 1].node)) {
            out[add_count++] = (struct mu_tree_add){.into = stack[depth - 2].slot, .from = stack[depth - 1].slot};
            stack[depth - 2].node.count += stack[depth - 1].node.count;
            depth--;
        }
    }
    MU_ASSERT(next_leaf == leaves && depth == (root_count > 0 ? 1u : 0u));
    return add_count;
}
