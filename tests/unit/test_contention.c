/* links: mu_plan */
#include "plan/contention.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "common/rng.h"

static const struct mu_forecast_model model = {.config = {.family = MU_FAMILY_GPT2,
                                                          .layers = 48,
                                                          .heads = 64,
                                                          .kv_heads = 64,
                                                          .channels = 8192,
                                                          .hidden = 32768,
                                                          .context = 2048,
                                                          .vocab = 51200,
                                                          .slices = 1},
                                               .sequences = 3840,
                                               .length = 2048};

static struct mu_forecast_plan grid(uint32_t tp, uint32_t pp, uint32_t dp)
{
    return (struct mu_forecast_plan){.tp = tp,
                                     .pp = pp,
                                     .dp = dp,
                                     .micro = 1,
                                     .virtual = 1,
                                     .recompute = MU_RECOMPUTE_SELECTIVE,
                                     .sequence_parallel = true,
                                     .sharded = true,
                                     .fused_attention = true,
                                     .bf16 = true};
}

/* ---- clusters whose trees are as people have them: not regular ---- */

enum { NODES_MAX = 128, SWITCHES_MAX = 40 };

/* Leaves of different sizes under spines of different sizes; some nodes absent, some under no switch. */
struct shape {
    uint32_t leaf_of[NODES_MAX], spine_of[SWITCHES_MAX], nodes, leaves;
    bool absent[NODES_MAX];
};

static struct shape random_shape(uint64_t seed)
{
    struct shape s = {.nodes = 64 + (uint32_t)(seed % 60)};
    uint64_t random = seed;
    for (uint32_t i = 0; i < s.nodes; s.leaves++) {
        uint32_t size = 1 + (uint32_t)(mu_splitmix64(&random) % 12);
        s.spine_of[s.leaves] = (uint32_t)(mu_splitmix64(&random) % 4);
        for (; size > 0 && i < s.nodes; size--, i++) {
            s.leaf_of[i] = mu_splitmix64(&random) % 20 == 0 ? UINT32_MAX : s.leaves;
            s.absent[i] = mu_splitmix64(&random) % 16 == 0;
        }
        if (s.leaves == SWITCHES_MAX - 1)
            break;
    }
    return s;
}

/* The same tree under names that `naming` shuffles, in an order that it shuffles too. */
static struct mu_topology *build(const struct shape *s, uint64_t naming)
{
    struct mu_topology *t = mu_topology_new();
    struct mu_error err = {0};
    char name[32];
    assert_non_null(t);
    for (uint32_t k = 0; k < s->nodes; k++) {
        uint32_t i = naming ? (uint32_t)mu_permute(naming, 1, k, s->nodes) : k, node, leaf, spine;
        snprintf(name, sizeof name, "n%u", naming ? (unsigned)mu_permute(naming, 2, i, s->nodes) : i);
        assert_int_equal(mu_topology_node_of(t, name, strlen(name), 1, &node, &err), MU_OK);
        t->nodes[node].absent = s->absent[i];
        if (s->leaf_of[i] == UINT32_MAX)
            continue;
        uint32_t number = s->leaf_of[i];
        snprintf(name, sizeof name, "leaf%u", naming ? (unsigned)mu_permute(naming, 3, number, SWITCHES_MAX) : number);
        assert_int_equal(mu_topology_switch_of(t, name, strlen(name), 1, &leaf, &err), MU_OK);
        snprintf(name, sizeof name, "spine%u",
                 naming ? (unsigned)mu_permute(naming, 4, s->spine_of[number], 4) : s->spine_of[number]);
        assert_int_equal(mu_topology_switch_of(t, name, strlen(name), 1, &spine, &err), MU_OK);
        assert_int_equal(mu_topology_put_node(t, node, leaf, 1, &err), MU_OK);
        assert_int_equal(mu_topology_put_switch(t, leaf, spine, 1, &err), MU_OK);
    }
    assert_int_equal(mu_topology_finish(t, &err), MU_OK);
    return t;
}

static struct mu_cluster cluster_on(struct mu_topology *t, double first, double second)
{
    struct mu_cluster c;
    struct mu_error err = {0};
    mu_cluster_init(&c);
    c.device = *mu_device_type_named("h100-sxm");
    c.nodes = t->present_count;
    c.level_count = t->level_count < 2 ? t->level_count : 2;
    c.levels[0].oversubscription = first;
    c.levels[1].oversubscription = second;
    if (mu_cluster_set_topology(&c, t, &err) != MU_OK || mu_cluster_check(&c, &err) != MU_OK)
        fail_msg("%s", err.text);
    return c;
}

struct placed {
    struct mu_candidate candidate;
    struct mu_contention_gain gain;
    uint32_t order[NODES_MAX];
};

static struct placed place(const struct mu_cluster *c, const struct mu_forecast_plan *plan)
{
    struct placed p = {.candidate = {.plan = *plan}};
    struct mu_forecast_rates rates;
    enum mu_node_way way;
    struct mu_node_map *map = mu_node_map_new(c->topology);
    assert_non_null(map);
    mu_forecast_rates_init(&rates);
    assert_int_equal(mu_contention_place(&model, c, &rates, map, &p.candidate, &way, p.order), MU_OK);
    assert_int_equal(mu_contention_compare(&model, c, &rates, map, &p.candidate, way, &p.gain), MU_OK);
    mu_node_map_free(map);
    return p;
}

static const uint32_t grids[][3] = {{8, 1, 40}, {8, 4, 10},  {4, 2, 40}, {2, 5, 32},
                                    {1, 8, 40}, {16, 2, 10}, {3, 4, 20}};
enum { GRIDS = sizeof grids / sizeof grids[0] };

static void test_every_way_is_a_permutation_of_the_nodes_present(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        struct shape s = random_shape(seed);
        struct mu_topology *t = build(&s, seed % 2 ? seed : 0);
        struct mu_node_map *map = mu_node_map_new(t);
        assert_non_null(map);
        for (int way = MU_WAY_PACKED; way < MU_WAY_COUNT; way++) {
            uint32_t order[NODES_MAX];
            bool seen[NODES_MAX] = {false};
            uint32_t stages = 1 + (uint32_t)(seed % 7);
            assert_int_equal(mu_node_order(map, (enum mu_node_way)way, t->present_count - (uint32_t)seed % 5, stages,
                                           (t->present_count - 5) / stages, seed, order),
                             MU_OK);
            for (uint32_t i = 0; i < t->present_count; i++) {
                assert_true(order[i] < t->node_count && !seen[order[i]] && !t->nodes[order[i]].absent);
                seen[order[i]] = true;
            }
        }
        mu_node_map_free(map);
        mu_topology_free(t);
    }
}

static void test_names_and_the_order_of_a_file_change_nothing(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 40; seed++) {
        struct shape s = random_shape(seed);
        struct mu_cluster a = cluster_on(build(&s, 0), 4, 2), b = cluster_on(build(&s, seed + 7), 4, 2);
        for (uint32_t g = 0; g < GRIDS; g++) {
            struct mu_forecast_plan plan = grid(grids[g][0], grids[g][1], grids[g][2]);
            struct placed one = place(&a, &plan), other = place(&b, &plan);
            assert_int_equal(one.gain.way, other.gain.way);
            assert_true(one.candidate.forecast.step_s == other.candidate.forecast.step_s);
            assert_true(one.candidate.tokens_per_day == other.candidate.tokens_per_day);
        }
        mu_cluster_fini(&a);
        mu_cluster_fini(&b);
    }
}

/* Also for one and the same order, whatever it is. */
static void test_more_oversubscription_is_never_faster(void **state)
{
    (void)state;
    bool mattered = false;
    for (uint64_t seed = 1; seed <= 30; seed++) {
        struct shape s = random_shape(seed);
        struct mu_topology *t = build(&s, 0);
        for (uint32_t g = 0; g < GRIDS; g++) {
            struct mu_forecast_plan plan = grid(grids[g][0], grids[g][1], grids[g][2]);
            struct placed before = {.gain = {.step_s = 0}};
            for (double over = 1; over <= 64; over *= 4) {
                struct mu_cluster c = cluster_on(t, over, 1 + over / 2);
                struct placed now = place(&c, &plan);
                assert_true(now.gain.step_s >= before.gain.step_s);
                assert_true(now.gain.by_name_s >= before.gain.by_name_s);
                assert_true(now.gain.random_s >= before.gain.random_s);
                mattered |= before.gain.step_s > 0 && now.gain.step_s > before.gain.step_s;
                before = now;
            }
        }
        mu_topology_free(t);
    }
    assert_true(mattered);
}

static void test_placement_by_topology_beats_names_and_chance(void **state)
{
    (void)state;
    double names = 0, chance = 0;
    uint32_t count = 0;
    for (uint64_t seed = 1; seed <= 40; seed++) {
        struct shape s = random_shape(seed);
        struct mu_cluster c = cluster_on(build(&s, seed + 7), 8, 2);
        for (uint32_t g = 0; g < GRIDS; g++) {
            struct mu_forecast_plan plan = grid(grids[g][0], grids[g][1], grids[g][2]);
            struct mu_contention_gain gain = place(&c, &plan).gain;
            if (gain.step_s > gain.random_s * 1.02) /* chance may be lucky, hardly on average of its tries */
                fail_msg("seed %u, grid %u: %g, random %g", (unsigned)seed, g, gain.step_s, gain.random_s);
            names += gain.by_name_s / gain.step_s;
            chance += gain.random_s / gain.step_s;
            count++;
        }
        mu_cluster_fini(&c);
    }
    print_message("by name %.2f, random %.2f times as long\n", names / count, chance / count);
    assert_true(names / count > 1.05 && chance / count > 1.05);
}

/* Whatever stands where: also where the devices of a node are islands that no NVLink joins. */
static void test_nobody_gets_more_than_its_card_can(void **state)
{
    (void)state;
    bool full = false;
    for (uint64_t seed = 1; seed <= 40; seed++) {
        struct shape s = random_shape(seed);
        struct mu_cluster c = cluster_on(build(&s, 0), 1 + (double)(seed % 5), 2);
        uint32_t order[NODES_MAX], count = 0;
        for (uint32_t i = 0; i < c.topology->node_count; i++)
            if (!c.topology->nodes[i].absent)
                order[count++] = i;
        for (uint32_t g = 0; g < GRIDS * 2; g++) {
            struct mu_forecast_plan plan = grid(grids[g / 2][0], grids[g / 2][1], grids[g / 2][2]);
            struct mu_forecast_network network;
            double most = c.device.nic_bytes_per_second * (1 + 1e-9);
            c.device.islands = 1 + g % 2;
            assert_int_equal(mu_contention_of(&c, c.topology, &plan, order, &network), MU_OK);
            if (network.data > most || network.stage > most || network.tensor > most)
                fail_msg("seed %u, tp %u pp %u dp %u, %u islands: data %g, stage %g, tensor %g of a card's %g",
                         (unsigned)seed, plan.tp, plan.pp, plan.dp, c.device.islands, network.data, network.stage,
                         network.tensor, c.device.nic_bytes_per_second);
            full |= network.data >= c.device.nic_bytes_per_second;
        }
        mu_cluster_fini(&c);
    }
    assert_true(full);
}

/* Two leaves of four nodes behind uplinks of a quarter: the ring of eight nodes crosses once each way, so it keeps the
 * cards' rate if a leaf's four nodes may share one node's worth of uplink; shuffled, all cross. */
static void test_rings_get_what_is_worked_out_by_hand(void **state)
{
    (void)state;
    const uint32_t per_switch[] = {4};
    struct mu_topology *t = mu_topology_regular(8, per_switch, 1);
    assert_non_null(t);
    struct mu_cluster c = cluster_on(t, 4, 1);
    struct mu_forecast_plan plan = grid(8, 1, 8);
    const uint32_t in_turn[] = {0, 1, 2, 3, 4, 5, 6, 7}, crossing[] = {0, 4, 1, 5, 2, 6, 3, 7};
    struct mu_forecast_network network;
    assert_int_equal(mu_contention_of(&c, t, &plan, in_turn, &network), MU_OK);
    assert_true(network.data == c.device.nic_bytes_per_second);
    assert_true(network.stage == 0 && network.tensor == 0);
    assert_int_equal(mu_contention_of(&c, t, &plan, crossing, &network), MU_OK);
    assert_true(network.data == c.device.nic_bytes_per_second / 4); /* four flows on one node's worth */
    plan = grid(8, 2, 4);
    assert_int_equal(mu_contention_of(&c, t, &plan, in_turn, &network), MU_OK);
    assert_true(network.data == c.device.nic_bytes_per_second);
    assert_true(network.stage == c.device.nic_bytes_per_second / 4);
    mu_cluster_fini(&c);
}

/* Tensor groups stay on one node where they fit: nothing of them is on the fabric; stages of the fitted way each stay
 * under one leaf where leaves have room. */
static void test_groups_stay_where_they_belong(void **state)
{
    (void)state;
    const uint32_t per_switch[] = {5, 20};
    struct mu_topology *t = mu_topology_regular(40, per_switch, 2);
    struct mu_node_map *map = mu_node_map_new(t);
    uint32_t order[40];
    assert_non_null(map);
    assert_int_equal(mu_node_order(map, MU_WAY_FITTED, 32, 8, 4, 0, order), MU_OK);
    for (uint32_t stage = 0; stage < 8; stage++)
        for (uint32_t i = 1; i < 4; i++)
            assert_int_equal(t->nodes[order[4 * stage + i]].parent, t->nodes[order[4 * stage]].parent);
    assert_int_equal(mu_node_order(map, MU_WAY_ACROSS, 40, 5, 8, 0, order), MU_OK);
    for (uint32_t d = 0; d < 8; d++)
        for (uint32_t stage = 1; stage < 5; stage++)
            assert_int_equal(t->nodes[order[8 * stage + d]].parent, t->nodes[order[d]].parent);
    mu_node_map_free(map);
    struct mu_cluster c = cluster_on(t, 8, 8);
    for (uint32_t g = 0; g < GRIDS; g++) {
        struct mu_forecast_plan plan = grid(grids[g][0], grids[g][1], grids[g][2]);
        struct mu_forecast_network network;
        for (uint32_t i = 0; i < 40; i++)
            order[i] = i;
        assert_int_equal(mu_contention_of(&c, t, &plan, order, &network), MU_OK);
        assert_int_equal(network.tensor > 0, plan.tp > c.device.per_node);
    }
    mu_cluster_fini(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_way_is_a_permutation_of_the_nodes_present),
        cmocka_unit_test(test_names_and_the_order_of_a_file_change_nothing),
        cmocka_unit_test(test_more_oversubscription_is_never_faster),
        cmocka_unit_test(test_placement_by_topology_beats_names_and_chance),
        cmocka_unit_test(test_nobody_gets_more_than_its_card_can),
        cmocka_unit_test(test_rings_get_what_is_worked_out_by_hand),
        cmocka_unit_test(test_groups_stay_where_they_belong),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
