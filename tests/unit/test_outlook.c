/* links: mu_simulate */
#include "simulate/outlook.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "common/rng.h"
#include "plan/node_order.h"
#include "simulate/failures.h"

/* ---- a small cluster and a job on it ---- */

struct world {
    struct mu_cluster cluster;
    struct mu_topology *topology;
    struct mu_node_map *map;
    struct mu_forecast_model model;
    struct mu_job_spec spec;
    struct mu_candidate candidate;
};

static struct world world_of(uint32_t nodes, uint32_t spares, double device_mtbf_hours)
{
    struct world w = {.model = {.config = {.family = MU_FAMILY_LLAMA,
                                           .layers = 32,
                                           .heads = 32,
                                           .kv_heads = 8,
                                           .channels = 4096,
                                           .hidden = 14336,
                                           .context = 2048,
                                           .vocab = 128256,
                                           .rope_base = 10000,
                                           .slices = 1},
                                .sequences = 1024,
                                .length = 2048}};
    const uint32_t per_switch[] = {4};
    mu_cluster_init(&w.cluster);
    w.cluster.device = *mu_device_type_named("h100-sxm");
    w.cluster.nodes = nodes;
    w.cluster.spare_nodes = spares;
    w.cluster.device_mtbf_hours = device_mtbf_hours;
    w.cluster.restart_s = 100;
    w.cluster.repair_hours = 1;
    w.topology = mu_topology_regular(nodes, per_switch, 1);
    w.map = mu_node_map_new(w.topology);
    assert_non_null(w.map);
    mu_job_spec_init(&w.spec);
    strcpy(w.spec.name, "job");
    w.spec.model = w.model.config;
    strcpy(w.spec.data.path, "/data/text");
    w.spec.batch.sequences = w.model.sequences;
    w.spec.batch.micro = 1;
    w.spec.batch.length = w.model.length;
    w.spec.steps = 1000;
    w.spec.parallel.optimizer_sharding = true;
    strcpy(w.spec.checkpoint.path, "/checkpoints");
    w.spec.checkpoint.every = MU_EVERY_AUTO;
    return w;
}

static void world_fini(struct world *w)
{
    mu_node_map_free(w->map);
    mu_topology_free(w->topology);
}

static void choose(struct world *w, uint32_t pp)
{
    struct mu_forecast_rates rates;
    uint32_t nodes, working = w->cluster.nodes - w->cluster.spare_nodes;
    struct mu_error err = {0};
    mu_forecast_rates_init(&rates);
    w->candidate.plan = (struct mu_forecast_plan){.tp = 4,
                                                  .pp = pp,
                                                  .dp = 2 * working / pp,
                                                  .micro = 1,
                                                  .virtual = 1,
                                                  .recompute = MU_RECOMPUTE_NONE,
                                                  .sequence_parallel = true,
                                                  .sharded = true,
                                                  .fused_attention = true,
                                                  .bf16 = true,
                                                  .data_overlap = 0.5};
    if (mu_forecast_check(&w->model, &w->cluster, &w->candidate.plan, &err) != MU_OK)
        fail_msg("%s", err.text);
    w->candidate.forecast = mu_forecast_of(&w->model, &w->cluster, &w->candidate.plan, &rates, NULL);
    mu_search_weigh(&w->model, &w->cluster, &w->candidate);
    assert_int_equal(mu_outlook_check(&w->cluster, &w->model, &w->candidate, &nodes, &err), MU_OK);
    assert_int_equal(nodes, working);
}

/* The parts are the whole. */
static struct mu_outlook run(const struct world *w, double days, uint64_t seed)
{
    struct mu_outlook o;
    struct mu_error err = {0};
    const struct mu_outlook_question q = {&w->cluster, w->map, &w->spec, &w->model, &w->candidate, days, seed};
    if (mu_outlook_run(&q, &o, &err) != MU_OK)
        fail_msg("%s", err.text);
    double sum = 0;
    for (int i = 0; i < MU_OUTLOOK_CLASSES; i++) {
        assert_true(o.seconds[i] > -1e-6);
        sum += o.seconds[i];
    }
    assert_true(sum > days * 86400 * (1 - 1e-9) && sum < days * 86400 * (1 + 1e-9));
    assert_true(o.goodput > 0 && o.goodput < 1);
    for (uint32_t i = 1; i < o.point_count; i++)
        assert_true(o.points[i].day >= o.points[i - 1].day && o.points[i].day <= days * (1 + 1e-9));
    return o;
}

static double share(const struct mu_outlook *o, enum mu_outlook_class class, double days)
{
    return o->seconds[class] / (days * 86400);
}

/* ---- against the closed form ---- */

/* Where every failure goes back to a checkpoint and a spare is always at hand, Daly's formula holds. From hardly any
 * loss to more than a third. */
static void test_outlook_agrees_with_the_closed_form_within_a_point(void **state)
{
    (void)state;
    static const double mtbf[] = {20000, 1000, 80, 20};
    for (size_t i = 0; i < sizeof mtbf / sizeof mtbf[0]; i++) {
        enum { RUNS = 6 };
        struct world w = world_of(32, 16, mtbf[i]);
        double goodput = 0;
        w.cluster.repair_hours = 0.05;
        choose(&w, 1);
        for (uint64_t seed = 1; seed <= RUNS; seed++) {
            struct mu_outlook o = run(&w, 20, seed);
            goodput += o.goodput / RUNS;
            assert_int_equal(o.recoveries[MU_FLEET_HOLDERS] + o.recoveries[MU_FLEET_MIRRORS], 0);
            mu_outlook_fini(&o);
        }
        double closed = w.candidate.goodput.share;
        print_message("mtbf %g h: goodput %.2f %%, closed form %.2f %%\n", mtbf[i], 100 * goodput, 100 * closed);
        assert_true(goodput > closed - 0.01 && goodput < closed + 0.01);
        world_fini(&w);
    }
}

static void test_outlook_without_failures_loses_the_stalls_alone(void **state)
{
    (void)state;
    struct world w = world_of(16, 0, 2e5);
    choose(&w, 2);
    struct mu_outlook o = run(&w, 2, 1);
    assert_int_equal(o.nodes_lost + o.interruptions + o.planned_changes, 0);
    double cycle = (double)o.interval_steps * o.step_s + o.stall_s;
    assert_true(share(&o, MU_OUTLOOK_CHECKPOINTS, 2) > 0.99 * o.stall_s / cycle &&
                share(&o, MU_OUTLOOK_CHECKPOINTS, 2) < 1.01 * o.stall_s / cycle);
    assert_true(o.goodput > 1 - 1.02 * o.stall_s / cycle - o.step_s / 86400);
    assert_true((double)o.steps * o.step_s > 0.999 * o.seconds[MU_OUTLOOK_PROGRESS]);
    mu_outlook_fini(&o);
    world_fini(&w);
}

/* ---- what the core decides ---- */

static void test_outlook_same_seed_same_history(void **state)
{
    (void)state;
    struct world w = world_of(18, 2, 400);
    choose(&w, 2);
    struct mu_outlook a = run(&w, 10, 7), b = run(&w, 10, 7), other = run(&w, 10, 8);
    assert_true(memcmp(a.seconds, b.seconds, sizeof a.seconds) == 0);
    assert_int_equal(a.messages, b.messages);
    assert_int_equal(a.point_count, b.point_count);
    assert_true(memcmp(a.seconds, other.seconds, sizeof a.seconds) != 0);
    mu_outlook_fini(&a);
    mu_outlook_fini(&b);
    mu_outlook_fini(&other);
    world_fini(&w);
}

/* Whose state has a second holder loses less than half a step each time, whoever has none what came after the newest
 * checkpoint. */
static void test_outlook_state_comes_from_where_the_job_keeps_it(void **state)
{
    (void)state;
    struct world w = world_of(20, 4, 200);
    w.cluster.storage_write_bytes_per_second = 2e8; /* so that checkpoints are rare */
    choose(&w, 2);
    struct mu_outlook saved = run(&w, 10, 3);
    w.spec.parallel.redundancy = MU_REDUNDANCY_BUDDY;
    struct mu_outlook mirrored = run(&w, 10, 3);
    w.spec.parallel.redundancy = MU_REDUNDANCY_NONE;
    w.spec.parallel.optimizer_sharding = false;
    struct mu_outlook held = run(&w, 10, 3);
    assert_true(saved.interruptions > 50);
    assert_int_equal(saved.recoveries[MU_FLEET_MIRRORS] + saved.recoveries[MU_FLEET_HOLDERS], 0);
    assert_true(mirrored.recoveries[MU_FLEET_MIRRORS] > 9 * mirrored.recoveries[MU_FLEET_CHECKPOINT]);
    assert_true(held.recoveries[MU_FLEET_HOLDERS] > 9 * held.recoveries[MU_FLEET_CHECKPOINT]);
    assert_true(saved.seconds[MU_OUTLOOK_LOST] > 3 * mirrored.seconds[MU_OUTLOOK_LOST]);
    assert_true(saved.seconds[MU_OUTLOOK_LOST] > 3 * held.seconds[MU_OUTLOOK_LOST]);
    assert_true(saved.goodput < mirrored.goodput && saved.goodput < held.goodput);
    mu_outlook_fini(&saved);
    mu_outlook_fini(&mirrored);
    mu_outlook_fini(&held);
    world_fini(&w);
}

/* Without spares the job goes on with fewer nodes and grows again when they are repaired; with spares it need not. */
static void test_outlook_shrinks_and_grows_unless_there_are_spares(void **state)
{
    (void)state;
    struct world none = world_of(16, 0, 1000), some = world_of(20, 4, 1000);
    none.cluster.repair_hours = some.cluster.repair_hours = 5;
    choose(&none, 2);
    choose(&some, 2);
    struct mu_outlook a = run(&none, 20, 1), b = run(&some, 20, 1);
    assert_true(a.planned_changes > 10 && a.interruptions > 20);
    assert_true(share(&a, MU_OUTLOOK_FEWER, 20) > 0.02);
    assert_true(share(&b, MU_OUTLOOK_FEWER, 20) < 0.2 * share(&a, MU_OUTLOOK_FEWER, 20));
    bool shrunk = false;
    for (uint32_t i = 0; i < a.point_count; i++)
        shrunk |= a.points[i].nodes == 14; /* whole replicas of two stages */
    assert_true(shrunk);
    mu_outlook_fini(&a);
    mu_outlook_fini(&b);
    world_fini(&none);
    world_fini(&some);
}

static void test_outlook_waits_when_too_few_are_left(void **state)
{
    (void)state;
    struct world w = world_of(4, 0, 1e9);
    w.cluster.switch_mtbf_hours = 48; /* takes all four, for five hours */
    w.cluster.repair_hours = 5;
    choose(&w, 2);
    struct mu_outlook o = run(&w, 30, 1);
    assert_true(o.interruptions > 4);
    assert_int_equal(o.nodes_lost, 4 * o.interruptions);
    double waited = share(&o, MU_OUTLOOK_WAITING, 30) * 30 * 24 / o.interruptions;
    assert_true(waited > 4.5 && waited < 5.1);
    assert_true(o.recoveries[MU_FLEET_CHECKPOINT] > 3);
    mu_outlook_fini(&o);
    world_fini(&w);
}

/* Nothing saved, nobody left: the core starts from the seed again, or says that it cannot. */
static void test_outlook_without_checkpoints_starts_again(void **state)
{
    (void)state;
    struct world w = world_of(4, 0, 1e9);
    w.cluster.switch_mtbf_hours = 48;
    w.spec.checkpoint.path[0] = 0;
    w.spec.checkpoint.every = 0;
    choose(&w, 2);
    struct mu_outlook o = run(&w, 10, 1);
    assert_true(o.failed || o.recoveries[MU_FLEET_SEED] > 0);
    assert_true(share(&o, MU_OUTLOOK_LOST, 10) + share(&o, MU_OUTLOOK_WAITING, 10) > 0.3);
    mu_outlook_fini(&o);
    world_fini(&w);
}

static void test_outlook_what_the_core_cannot_be_given_is_refused(void **state)
{
    (void)state;
    struct world w = world_of(16, 0, 1e9);
    struct mu_error err = {0};
    uint32_t nodes;
    choose(&w, 2);
    w.candidate.plan.tp = 16;
    assert_int_equal(mu_outlook_check(&w.cluster, &w.model, &w.candidate, &nodes, &err), MU_ERR_INVALID);
    w.candidate.plan.tp = 4;
    w.candidate.plan.dp = 15;
    assert_int_equal(mu_outlook_check(&w.cluster, &w.model, &w.candidate, &nodes, &err), MU_ERR_INVALID);
    w.candidate.plan.dp = 16;
    w.cluster.nodes = MU_FLEET_NODES_MAX + 1;
    assert_int_equal(mu_outlook_check(&w.cluster, &w.model, &w.candidate, &nodes, &err), MU_ERR_LIMIT);
    world_fini(&w);
}

/* All kinds of failures at once, often enough to meet each other and every phase of a change. */
static void test_outlook_parts_are_the_whole_whatever_happens(void **state)
{
    (void)state;
    uint32_t interruptions = 0, planned = 0;
    double waited = 0;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        uint64_t random = seed;
        uint32_t spares = (uint32_t)(mu_splitmix64(&random) % 3) * 2;
        struct world w = world_of(8 + spares, spares, 40 + (double)(mu_splitmix64(&random) % 400));
        w.cluster.restart_s = (double)(mu_splitmix64(&random) % 300);
        w.cluster.repair_hours = (double)(mu_splitmix64(&random) % 30) / 10;
        w.cluster.transient_share = (double)(mu_splitmix64(&random) % 3) / 2;
        w.cluster.weibull_shape = seed % 2 ? 0.6 : 1.4;
        w.cluster.switch_mtbf_hours = seed % 3 ? 20 : 0;
        w.cluster.power_mtbf_hours = seed % 4 ? 15 : 0;
        w.cluster.power_nodes = 3;
        w.spec.parallel.optimizer_sharding = seed % 5 != 0;
        w.spec.parallel.redundancy = seed % 5 == 1 ? MU_REDUNDANCY_BUDDY : MU_REDUNDANCY_NONE;
        choose(&w, seed % 2 ? 2 : 4);
        struct mu_outlook o = run(&w, 6, seed);
        interruptions += o.interruptions;
        planned += o.planned_changes;
        waited += o.seconds[MU_OUTLOOK_WAITING];
        mu_outlook_fini(&o);
        world_fini(&w);
    }
    assert_true(interruptions > 300 && planned > 30 && waited > 20000);
}

/* A node that is back before its loss was declared is told to come again, and does. */
static void test_outlook_nodes_that_are_back_at_once_come_again(void **state)
{
    (void)state;
    struct world w = world_of(8, 0, 300);
    w.cluster.transient_share = 1;
    w.cluster.restart_s = 0.3;
    choose(&w, 2);
    struct mu_outlook o = run(&w, 10, 1);
    assert_true(o.interruptions > 30 && o.goodput > 0.98);
    assert_true(o.seconds[MU_OUTLOOK_FEWER] < 0.001 * 10 * 86400);
    mu_outlook_fini(&o);
    w.cluster.restart_s = 0;
    w.cluster.repair_hours = w.cluster.transient_share = 0;
    o = run(&w, 10, 2);
    assert_true(o.interruptions > 30 && o.goodput > 0.98);
    mu_outlook_fini(&o);
    world_fini(&w);
}

/* ---- ranks by topology ---- */

static void wait_for_steps(struct mu_fleet *fleet)
{
    while (mu_fleet_state(fleet) != MU_FLEET_STEPPING) {
        if (mu_fleet_state(fleet) == MU_FLEET_PREPARING)
            mu_fleet_prepared(fleet);
        else
            mu_fleet_advance(fleet, mu_fleet_deadline(fleet));
    }
}

/* The core gives ranks by place, not by the order of attaching; buddies are under another switch; of two spares the one
 * closer to the lost node takes over, and nobody else gets another rank. */
static void test_core_places_by_topology(void **state)
{
    (void)state;
    enum { NODES = 18, WORKING = 16, PER_SWITCH = 6 };
    struct world w = world_of(NODES, 2, 1e9);
    world_fini(&w);
    const uint32_t per_switch[] = {PER_SWITCH};
    const char *names[NODES];
    struct mu_error err = {0};
    w.topology = mu_topology_regular(NODES, per_switch, 1);
    w.map = mu_node_map_new(w.topology);
    for (uint32_t i = 0; i < NODES; i++)
        names[i] = w.topology->node_names.names[mu_permute(3, 0, i, NODES)];
    struct mu_fleet *fleet = mu_fleet_new(names, NODES, w.map);
    assert_non_null(fleet);
    w.spec.parallel.redundancy = MU_REDUNDANCY_BUDDY;
    w.spec.parallel.pp = 1;
    w.spec.workers.max = WORKING;
    if (mu_fleet_submit(fleet, &w.spec, &err) != MU_OK)
        fail_msg("%s", err.text);
    for (uint32_t i = 0; i < NODES; i++)
        mu_fleet_attach(fleet, i);
    wait_for_steps(fleet);
    const struct mu_layout layout = mu_fleet_generation(fleet)->layout;
    assert_int_equal(mu_layout_working(&layout), WORKING);
    uint32_t place_of[WORKING], rank_of[NODES], spare_place = UINT32_MAX, lost = UINT32_MAX;
    struct mu_node_site site;
    for (uint32_t i = 0; i < NODES; i++) {
        assert_true(mu_node_site_of(w.map, names[i], &site));
        rank_of[i] = mu_fleet_is_member(fleet, i) ? mu_fleet_rank(fleet, i) : UINT32_MAX;
        if (rank_of[i] != UINT32_MAX)
            place_of[rank_of[i]] = site.place;
        else
            spare_place = site.place < spare_place ? site.place : spare_place;
    }
    for (uint32_t rank = 0; rank < WORKING; rank++) {
        assert_true(rank == 0 || place_of[rank] > place_of[rank - 1]);
        assert_int_not_equal(place_of[rank] / PER_SWITCH, place_of[mu_layout_buddy(&layout, rank)] / PER_SWITCH);
    }
    for (uint32_t i = 0; i < NODES; i++)
        lost = rank_of[i] == 5 ? i : lost;
    mu_fleet_kill(fleet, lost);
    uint64_t generation = mu_fleet_generations(fleet);
    while (mu_fleet_generations(fleet) == generation)
        mu_fleet_advance(fleet, mu_fleet_deadline(fleet));
    wait_for_steps(fleet);
    for (uint32_t i = 0; i < NODES; i++) {
        if (!mu_fleet_is_member(fleet, i))
            continue;
        assert_true(mu_node_site_of(w.map, names[i], &site));
        uint32_t rank = mu_fleet_rank(fleet, i);
        assert_true(rank == 5 ? site.place == spare_place : rank == rank_of[i]);
    }
    mu_fleet_free(fleet);
    world_fini(&w);
}

/* ---- failures ---- */

/* The mean is as asked for, and the share of a Weibull distribution below its scale is 1 - 1/e for every shape. */
static void test_failures_are_drawn_from_their_distribution(void **state)
{
    (void)state;
    static const struct {
        double shape, scale; /* of a mean of 1: 1 / gamma(1 + 1 / shape) */
    } cases[] = {{1, 1}, {0.5, 0.5}, {2, 1.1283791670955126}, {0.7, 0.78998765}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        enum { DRAWS = 200000 };
        double sum = 0;
        uint32_t below = 0;
        uint64_t random = 42;
        for (int k = 0; k < DRAWS; k++) {
            double u = ((double)(mu_splitmix64(&random) >> 11) + 0.5) * 0x1p-53;
            double t = mu_failures_draw(1, cases[i].shape, u);
            assert_true(t > 0);
            sum += t / DRAWS;
            below += t < cases[i].scale;
        }
        assert_true(sum > 0.98 && sum < 1.02);
        assert_true((double)below / DRAWS > 0.627 && (double)below / DRAWS < 0.637);
    }
}

/* Exponential or not, a node fails as often as its devices say; what fails together comes back together. */
static void test_failures_come_at_their_rates(void **state)
{
    (void)state;
    const uint32_t per_switch[] = {8};
    struct mu_topology *t = mu_topology_regular(64, per_switch, 1);
    for (int way = 0; way < 4; way++) {
        struct mu_cluster c;
        uint32_t nodes[64], lost = 0, events = 0, wanted = way == 2 ? 8 : way == 3 ? 4 : 1;
        mu_cluster_init(&c);
        c.device = *mu_device_type_named("h100-sxm");
        c.nodes = 64;
        c.device_mtbf_hours = way < 2 ? 800 : 1e9;
        c.weibull_shape = way == 1 ? 0.7 : 1;
        c.switch_mtbf_hours = way == 2 ? 100 : 0;
        c.power_mtbf_hours = way == 3 ? 100 : 0;
        c.power_nodes = 4;
        c.repair_hours = 0.01;
        struct mu_failures *f = mu_failures_new(&c, t, 5);
        bool down;
        double hours = 0;
        while ((hours = mu_failures_next_s(f) / 3600) < 20000) {
            uint32_t count = mu_failures_take(f, nodes, &down);
            assert_true(count <= 64);
            lost += down ? count : 0;
            events += down && count > 0;
        }
        double mean = 20000.0 / events * (way < 2 ? 64 : way == 2 ? 8 : 16);
        assert_true(mean > 95 && mean < 105); /* hours: 100 of each */
        assert_int_equal(lost, events * wanted);
        mu_failures_free(f);
    }
    mu_topology_free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_outlook_agrees_with_the_closed_form_within_a_point),
        cmocka_unit_test(test_outlook_without_failures_loses_the_stalls_alone),
        cmocka_unit_test(test_outlook_same_seed_same_history),
        cmocka_unit_test(test_outlook_state_comes_from_where_the_job_keeps_it),
        cmocka_unit_test(test_outlook_shrinks_and_grows_unless_there_are_spares),
        cmocka_unit_test(test_outlook_waits_when_too_few_are_left),
        cmocka_unit_test(test_outlook_without_checkpoints_starts_again),
        cmocka_unit_test(test_outlook_what_the_core_cannot_be_given_is_refused),
        cmocka_unit_test(test_outlook_parts_are_the_whole_whatever_happens),
        cmocka_unit_test(test_outlook_nodes_that_are_back_at_once_come_again),
        cmocka_unit_test(test_core_places_by_topology),
        cmocka_unit_test(test_failures_are_drawn_from_their_distribution),
        cmocka_unit_test(test_failures_come_at_their_rates),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
