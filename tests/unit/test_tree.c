/* links: mu_plan */
#include "plan/tree.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <cmocka.h>

#include "common/rng.h"

enum { LEAVES_MAX = 70, NODES_MAX = 2 * LEAVES_MAX };

/* The tree by its definition, written down recursively: every node, and for each its parent. */
struct listing {
    struct mu_tree_node node[NODES_MAX], parent[NODES_MAX];
    uint32_t count;
};

static uint32_t split_by_definition(uint32_t n)
{
    uint32_t p = 1;
    while (p * 2 < n)
        p *= 2;
    return p;
}

static void list_nodes(struct listing *list, struct mu_tree_node node, struct mu_tree_node parent)
{
    list->node[list->count] = node;
    list->parent[list->count++] = parent;
    if (node.count == 1)
        return;
    uint32_t p = split_by_definition(node.count);
    list_nodes(list, (struct mu_tree_node){node.first, p}, node);
    list_nodes(list, (struct mu_tree_node){node.first + p, node.count - p}, node);
}

static struct listing listing_of(uint32_t leaves)
{
    struct listing list = {.count = 0};
    struct mu_tree_node root = {0, leaves};
    list_nodes(&list, root, root);
    return list;
}

static float sum_by_definition(const float *leaf, struct mu_tree_node node)
{
    if (node.count == 1)
        return leaf[node.first];
    uint32_t p = split_by_definition(node.count);
    float left = sum_by_definition(leaf, (struct mu_tree_node){node.first, p});
    float right = sum_by_definition(leaf, (struct mu_tree_node){node.first + p, node.count - p});
    return left + right;
}

static bool inside(struct mu_tree_node node, uint32_t first, uint32_t count)
{
    return node.first >= first && node.first + node.count <= first + count;
}

static void assert_same_node(struct mu_tree_node a, struct mu_tree_node b)
{
    assert_int_equal(a.first, b.first);
    assert_int_equal(a.count, b.count);
}

static void test_tree_is_node_matches_definition(void **state)
{
    (void)state;
    for (uint32_t leaves = 1; leaves <= LEAVES_MAX; leaves++) {
        struct listing list = listing_of(leaves);
        for (uint32_t first = 0; first <= leaves; first++) {
            for (uint32_t count = 0; count <= leaves + 1; count++) {
                bool expected = false;
                for (uint32_t i = 0; i < list.count; i++)
                    expected = expected || (list.node[i].first == first && list.node[i].count == count);
                assert_int_equal(mu_tree_is_node(leaves, (struct mu_tree_node){first, count}), expected);
            }
        }
    }
}

static void test_tree_parent_and_children_match_definition(void **state)
{
    (void)state;
    for (uint32_t leaves = 1; leaves <= LEAVES_MAX; leaves++) {
        struct listing list = listing_of(leaves);
        for (uint32_t i = 0; i < list.count; i++) {
            if (i > 0)
                assert_same_node(mu_tree_parent(leaves, list.node[i]), list.parent[i]);
            if (list.node[i].count == 1)
                continue;
            struct mu_tree_node left, right;
            mu_tree_children(list.node[i], &left, &right);
            assert_int_equal(left.count, split_by_definition(list.node[i].count));
            assert_int_equal(left.first, list.node[i].first);
            assert_int_equal(right.first, left.first + left.count);
            assert_int_equal(left.count + right.count, list.node[i].count);
        }
    }
}

static void test_tree_roots_of_every_range_are_its_maximal_nodes(void **state)
{
    (void)state;
    for (uint32_t leaves = 1; leaves <= LEAVES_MAX; leaves++) {
        struct listing list = listing_of(leaves);
        for (uint32_t first = 0; first <= leaves; first++) {
            for (uint32_t count = 0; count <= leaves - first; count++) {
                struct mu_tree_node roots[MU_TREE_ROOTS_MAX];
                uint32_t got = mu_tree_roots(leaves, first, count, roots), expected = 0;
                /* The listing is in pre-order: maximal nodes come in ascending order. */
                for (uint32_t i = 0; i < list.count; i++) {
                    bool maximal =
                        inside(list.node[i], first, count) && (i == 0 || !inside(list.parent[i], first, count));
                    if (!maximal)
                        continue;
                    assert_true(expected < got);
                    assert_same_node(roots[expected++], list.node[i]);
                }
                assert_int_equal(got, expected);
            }
        }
    }
}

static void test_tree_roots_of_huge_trees_stay_within_limit(void **state)
{
    (void)state;
    uint64_t seed = 7;
    for (int round = 0; round < 20000; round++) {
        uint32_t leaves = (uint32_t)(mu_splitmix64(&seed) >> (32 + mu_splitmix64(&seed) % 31)) | 1;
        uint32_t first = (uint32_t)(mu_splitmix64(&seed) % leaves);
        uint32_t count = (uint32_t)(mu_splitmix64(&seed) % (leaves - first)) + 1;
        struct mu_tree_node roots[MU_TREE_ROOTS_MAX];
        uint32_t got = mu_tree_roots(leaves, first, count, roots), next = first;
        for (uint32_t i = 0; i < got; i++) {
            assert_true(mu_tree_is_node(leaves, roots[i]));
            assert_int_equal(roots[i].first, next);
            next += roots[i].count;
            if (roots[i].count < leaves)
                assert_false(inside(mu_tree_parent(leaves, roots[i]), first, count));
        }
        assert_int_equal(next, first + count);
    }
}

/* Sums one range as a rank does: a stack of buffers driven by mu_tree_carries. Leaves the stack in `out`, returns its
 * depth. */
static uint32_t sum_range(uint32_t leaves, uint32_t first, uint32_t count, const float *leaf, float *out)
{
    float stack[LEAVES_MAX];
    uint32_t depth = 0, most = 0;
    for (uint32_t i = first; i < first + count; i++) {
        stack[depth++] = leaf[i];
        most = depth > most ? depth : most;
        for (uint32_t carry = mu_tree_carries(leaves, first, i); carry > 0; carry--) {
            assert_true(depth >= 2);
            stack[depth - 2] += stack[depth - 1];
            depth--;
        }
    }
    assert_int_equal(mu_tree_buffers(leaves, first, count), most);
    memcpy(out, stack, depth * sizeof *out);
    return depth;
}

static void check_partition(uint32_t leaves, const uint32_t *cuts, uint32_t ranks, const float *leaf)
{
    struct mu_tree_node roots[LEAVES_MAX];
    float slots[LEAVES_MAX];
    uint32_t root_count = 0;
    for (uint32_t rank = 0; rank < ranks; rank++) {
        uint32_t first = cuts[rank], count = cuts[rank + 1] - cuts[rank];
        struct mu_tree_node own[MU_TREE_ROOTS_MAX];
        uint32_t own_count = mu_tree_roots(leaves, first, count, own);
        assert_int_equal(sum_range(leaves, first, count, leaf, slots + root_count), own_count);
        for (uint32_t i = 0; i < own_count; i++) {
            float expected = sum_by_definition(leaf, own[i]);
            assert_memory_equal(&slots[root_count], &expected, sizeof expected);
            roots[root_count++] = own[i];
        }
    }
    struct mu_tree_add adds[LEAVES_MAX];
    uint32_t add_count = mu_tree_schedule(leaves, roots, root_count, adds);
    assert_int_equal(add_count, root_count - 1);
    bool consumed[LEAVES_MAX] = {false};
    for (uint32_t i = 0; i < add_count; i++) {
        assert_true(adds[i].into < adds[i].from && adds[i].from < root_count);
        assert_false(consumed[adds[i].into] || consumed[adds[i].from]);
        consumed[adds[i].from] = true;
        slots[adds[i].into] += slots[adds[i].from];
    }
    float expected = sum_by_definition(leaf, (struct mu_tree_node){0, leaves});
    assert_memory_equal(&slots[0], &expected, sizeof expected);
}

/* Values whose float sum depends on the order of additions. */
static void fill_leaves(float *leaf, uint32_t leaves, uint64_t *seed)
{
    for (uint32_t i = 0; i < leaves; i++) {
        uint64_t random = mu_splitmix64(seed);
        leaf[i] = ((float)(random & 0xffffff) - 8388608.0f) / (float)(1u << (random >> 59));
    }
}

static void test_tree_sum_of_any_partition_is_the_recursive_sum(void **state)
{
    (void)state;
    uint64_t seed = 42;
    for (uint32_t leaves = 1; leaves <= LEAVES_MAX; leaves++) {
        for (int sample = 0; sample < 200; sample++) {
            float leaf[LEAVES_MAX];
            fill_leaves(leaf, leaves, &seed);
            uint32_t cuts[LEAVES_MAX + 1] = {0}, ranks = 0;
            uint64_t density = 1 + mu_splitmix64(&seed) % 16;
            for (uint32_t i = 1; i < leaves; i++)
                if (mu_splitmix64(&seed) % density == 0)
                    cuts[++ranks] = i;
            cuts[++ranks] = leaves;
            check_partition(leaves, cuts, ranks, leaf);
        }
    }
}

static void test_tree_sum_of_all_partitions_of_small_trees(void **state)
{
    (void)state;
    uint64_t seed = 43;
    for (uint32_t leaves = 1; leaves <= 11; leaves++) {
        float leaf[LEAVES_MAX];
        fill_leaves(leaf, leaves, &seed);
        for (uint32_t mask = 0; mask < 1u << (leaves - 1); mask++) {
            uint32_t cuts[LEAVES_MAX + 1] = {0}, ranks = 0;
            for (uint32_t i = 1; i < leaves; i++)
                if (mask >> (i - 1) & 1)
                    cuts[++ranks] = i;
            cuts[++ranks] = leaves;
            check_partition(leaves, cuts, ranks, leaf);
        }
    }
}

static void test_tree_sum_depends_on_order_so_that_this_test_can_fail(void **state)
{
    (void)state;
    uint64_t seed = 44;
    int differing = 0;
    for (int sample = 0; sample < 100; sample++) {
        float leaf[LEAVES_MAX], in_order = 0;
        fill_leaves(leaf, LEAVES_MAX, &seed);
        for (uint32_t i = 0; i < LEAVES_MAX; i++)
            in_order += leaf[i];
        differing += in_order != sum_by_definition(leaf, (struct mu_tree_node){0, LEAVES_MAX});
    }
    assert_true(differing > 50);
}

static void test_tree_buffers_of_whole_trees_grow_with_the_logarithm(void **state)
{
    (void)state;
    assert_int_equal(mu_tree_buffers(1, 0, 1), 1);
    assert_int_equal(mu_tree_buffers(8, 0, 8), 4);
    assert_int_equal(mu_tree_buffers(65536, 0, 65536), 17);
    assert_int_equal(mu_tree_buffers(64, 0, 0), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tree_is_node_matches_definition),
        cmocka_unit_test(test_tree_parent_and_children_match_definition),
        cmocka_unit_test(test_tree_roots_of_every_range_are_its_maximal_nodes),
        cmocka_unit_test(test_tree_roots_of_huge_trees_stay_within_limit),
        cmocka_unit_test(test_tree_sum_of_any_partition_is_the_recursive_sum),
        cmocka_unit_test(test_tree_sum_of_all_partitions_of_small_trees),
        cmocka_unit_test(test_tree_sum_depends_on_order_so_that_this_test_can_fail),
        cmocka_unit_test(test_tree_buffers_of_whole_trees_grow_with_the_logarithm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
