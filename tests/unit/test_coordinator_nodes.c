/* links: mu_coordinator mu_worker_core mu_wire mu_plan */
/* Orders about hosts: who may work there, who leaves, by when; and how hosts are shown. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "coordinator/nodes.h"
#include "core_testing.h"

enum { STEPS = 1000 };

static void begin(struct box *box, uint32_t workers)
{
    struct mu_job_spec spec;
    box_spec(&spec, 1, 1);
    box_init(box, &spec);
    for (uint32_t i = 0; i < workers; i++)
        box_add_worker(box, i);
    box_settle(box);
    box_advance(box, 300);
    assert_true(box_train(box, STEPS));
}

static void give(struct box *box, enum mu_node_order order, const char *name, uint64_t deadline_us)
{
    struct mu_coord_event event = {.kind = MU_CE_NODE,
                                   .request = {.cookie = 3,
                                               .order = order,
                                               .node = name,
                                               .reason = "new fan",
                                               .by = "alice@login1",
                                               .deadline_us = deadline_us}};
    box->reply = MU_ERR_INTERNAL;
    box_step(box, &event);
    assert_int_equal(box->reply, MU_OK);
    box_settle(box);
}

/* Trains for so long; a change that needs a boundary finds one. */
static void work(struct box *box, uint32_t rounds)
{
    for (uint32_t i = 0; i < rounds; i++) {
        box_train(box, STEPS);
        box_advance(box, 100);
    }
}

/* "busy 1/1", "drained 0/0": state, workers with a rank and all; "": there is no such node. */
static void expect_node(struct box *box, const char *name, const char *wanted)
{
    static const char *const states[] = {"?",        "joining", "ready", "busy",       "suspect",
                                         "draining", "drained", "down",  "quarantined"};
    Muster__V1__Node **nodes;
    size_t count;
    struct mu_error err;
    char text[64] = "";
    struct mu_wire_arena arena;
    mu_wire_arena_init(&arena);
    assert_int_equal(mu_nodes_list(&arena, box->coord, &nodes, &count, &err), MU_OK);
    for (size_t i = 0; i < count; i++) {
        assert_true(i == 0 || strcmp(nodes[i - 1]->name, nodes[i]->name) < 0);
        if (strcmp(nodes[i]->name, name) == 0)
            snprintf(text, sizeof text, "%s%s %u/%u", states[nodes[i]->state], nodes[i]->cordoned ? "+" : "",
                     nodes[i]->busy, nodes[i]->workers);
    }
    mu_wire_arena_fini(&arena);
    assert_string_equal(text, wanted);
}

static void test_a_cordoned_node_gets_no_rank_and_keeps_those_it_has(void **state)
{
    (void)state;
    struct box box;
    begin(&box, 2);
    give(&box, MU_NODE_CORDON, "host1", 0);
    give(&box, MU_NODE_CORDON, "host2", 0);
    expect_node(&box, "host1", "busy+ 1/1");
    expect_node(&box, "host2", "down+ 0/0");
    box_add_worker(&box, 2);
    box_settle(&box);
    work(&box, 20);
    expect_node(&box, "host2", "ready+ 0/1");
    assert_int_equal(box_view(&box).world, 2);
    give(&box, MU_NODE_RESUME, "host2", 0);
    work(&box, 20);
    expect_node(&box, "host2", "busy 1/1");
    assert_int_equal(box_view(&box).world, 3);
    assert_true(box_said(&box, "node_cordoned: node host2 is cordoned by alice@login1 (new fan)"));
    assert_true(box_said(&box, "node_resumed: node host2 may work again, by alice@login1 (it was cordoned: new fan)"));
    box_fini(&box);
}

static void test_a_drained_node_is_left_by_all_and_entered_by_none(void **state)
{
    (void)state;
    struct box box;
    begin(&box, 3);
    give(&box, MU_NODE_DRAIN, "host2", 0);
    expect_node(&box, "host2", "draining 1/1");
    work(&box, 20);
    assert_int_equal(box.workers[2].exit_code, 0);
    box_kill_worker(&box, 2); /* its stream ends with it */
    expect_node(&box, "host2", "drained 0/0");
    assert_true(box_said(&box, "node_drained: node host2 is drained (new fan, by alice@login1): no worker is left"));
    assert_int_equal(box_view(&box).workers_lost, 0);
    box_add_worker(&box, 2); /* a new process there */
    box_settle(&box);
    assert_true(box.reject.seen && box.reject.reason == MU_REJECT_QUARANTINED);
    assert_true(strstr(box.reject.text, "muster node resume host2"));
    box_kill_worker(&box, 2);
    give(&box, MU_NODE_RESUME, "host2", 0);
    expect_node(&box, "host2", "");
    box_add_worker(&box, 2);
    box_settle(&box);
    work(&box, 20);
    expect_node(&box, "host2", "busy 1/1");
    box_fini(&box);
}

static void test_a_drain_that_is_lifted_in_time_changes_nothing(void **state)
{
    (void)state;
    struct box box;
    begin(&box, 3);
    give(&box, MU_NODE_DRAIN, "host2", 0);
    give(&box, MU_NODE_RESUME, "host2", 0);
    give(&box, MU_NODE_RESUME, "host2", 0); /* again, and of one that nobody knows */
    give(&box, MU_NODE_RESUME, "nobody", 0);
    work(&box, 20);
    expect_node(&box, "host2", "busy 1/1");
    assert_int_equal(box.workers[2].exit_code, -1);
    struct mu_coord_event drain = {.kind = MU_CE_DRAIN}; /* what was ordered of the worker itself stays */
    drain.request.worker = "w2";
    drain.request.reason = "itself";
    give(&box, MU_NODE_DRAIN, "host2", 0);
    box_step(&box, &drain);
    give(&box, MU_NODE_RESUME, "host2", 0);
    work(&box, 20);
    assert_int_equal(box.workers[2].exit_code, 0);
    box_fini(&box);
}

static void test_who_has_not_left_by_the_deadline_is_given_up(void **state)
{
    (void)state;
    struct box box;
    begin(&box, 3);
    give(&box, MU_NODE_DRAIN, "host2", 3000000);
    box_advance(&box, 2800); /* no boundary comes: nobody trains */
    expect_node(&box, "host2", "draining 1/1");
    box_advance(&box, 500);
    assert_true(box_said(&box, "worker_lost: worker w2 lost (its node is drained, and the deadline for that is over)"));
    work(&box, 20);
    box_kill_worker(&box, 2);
    expect_node(&box, "host2", "drained 0/0");
    struct mu_worker_record record;
    assert_false(mu_coord_worker_record_view(box.coord, 0, &record)); /* it was no crash */
    box_fini(&box);
}

static void test_orders_and_deadlines_outlive_a_restart(void **state)
{
    (void)state;
    struct box box;
    begin(&box, 3);
    give(&box, MU_NODE_DRAIN, "host2", 4000000);
    give(&box, MU_NODE_CORDON, "host5", 0);
    box_kill_coord(&box);
    box_start_coord(&box);
    box_settle(&box);
    box_advance(&box, 3000);
    assert_false(box_said(&box, "deadline"));
    struct mu_node_record record;
    assert_true(mu_coord_node_view(box.coord, 0, &record) && mu_coord_node_view(box.coord, 1, &record));
    assert_false(mu_coord_node_view(box.coord, 2, &record));
    expect_node(&box, "host5", "down+ 0/0");
    box_advance(&box, 1500);
    assert_true(box_said(&box, "deadline"));
    box_fini(&box);
}

static void test_a_node_whose_worker_crashed_too_often_says_so(void **state)
{
    (void)state;
    struct box box;
    begin(&box, 1);
    for (uint32_t i = 0; i <= box.config.crash_limit; i++)
        box_step(&box, &(struct mu_coord_event){.kind = MU_CE_EXITED,
                                                .exited.exit = {.job = "job",
                                                                .worker = "bad-cpu0",
                                                                .host = "bad",
                                                                .incarnation = {.high = 9, .low = i + 1},
                                                                .signal = 11,
                                                                .text = "was killed by signal 11 (SIGSEGV)"}});
    expect_node(&box, "bad", "quarantined 0/0");
    expect_node(&box, "host0", "busy 1/1");
    box_fini(&box);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_cordoned_node_gets_no_rank_and_keeps_those_it_has),
        cmocka_unit_test(test_a_drained_node_is_left_by_all_and_entered_by_none),
        cmocka_unit_test(test_a_drain_that_is_lifted_in_time_changes_nothing),
        cmocka_unit_test(test_who_has_not_left_by_the_deadline_is_given_up),
        cmocka_unit_test(test_orders_and_deadlines_outlive_a_restart),
        cmocka_unit_test(test_a_node_whose_worker_crashed_too_often_says_so),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
