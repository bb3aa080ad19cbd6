/* links: mu_coordinator mu_worker_core mu_wire mu_plan */
/* Both cores in changes that are prepared while the job steps: who is fed what, when all are parked for it, and what
 * happens when it does not work. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "core_testing.h"
#include "plan/memory.h"

static void add_workers(struct box *box, uint32_t first, uint32_t count)
{
    for (uint32_t i = first; i < first + count; i++)
        box_add_worker(box, i);
    box_settle(box);
    box_advance(box, 300);
}

static void train(struct box *box, int steps)
{
    for (int i = 0; i < steps; i++)
        assert_true(box_train(box, 1000));
}

/* A job with a sharded optimizer, and its first two workers. */
static struct mu_job_spec start_sharded(struct box *box, uint64_t memory_bytes)
{
    struct mu_job_spec spec;
    box_spec(&spec, 1, 1);
    spec.parallel.optimizer_sharding = true;
    box_init(box, &spec);
    box->memory_bytes = memory_bytes;
    add_workers(box, 0, 2);
    assert_true(box_all_run(box));
    train(box, 1);
    return spec;
}

static void request_drain(struct box *box, const char *worker)
{
    struct mu_coord_event event = {.kind = MU_CE_DRAIN};
    event.request.cookie = 5;
    event.request.job = box->name;
    event.request.worker = worker;
    event.request.reason = "test";
    box_step(box, &event);
    assert_int_equal(box->reply, MU_OK);
    box_settle(box);
}

/* What a member says when all its givers have ended. */
static void whole(struct box *box, uint32_t index)
{
    struct box_worker *worker = &box->workers[index];
    const struct mu_feed_order *order = &worker->feed;
    struct mu_held *held = &worker->held;
    held->shares[held->share_count++] = (struct mu_held_share){.layout = order->next, .rank = order->next_rank};
    box_fed(box, index, MU_FEED_WHOLE);
    box_settle(box);
}

/* One of three leaves: what it owns of the optimizer goes to the others. */
static void test_members_are_fed_what_they_are_to_have(void **state)
{
    (void)state;
    static struct box box;
    start_sharded(&box, 0);
    add_workers(&box, 2, 1); /* whose feeds fail at once */
    for (int i = 0; box_view(&box).layout.dp < 3 && i < 10; i++) {
        train(&box, 1);
        box_advance(&box, 300);
    }
    uint64_t generation = box_view(&box).generation;
    box.feeds_work = true;
    box.events[0] = 0;
    memset(&box.workers[2].feed, 0, sizeof box.workers[2].feed);
    request_drain(&box, "w2");
    box_advance(&box, 300);
    uint32_t takers[BOX_WORKERS_MAX], count = 0;
    for (uint32_t i = 0; i < 3; i++) {
        const struct mu_feed_order *order = &box.workers[i].feed;
        if (!order->number)
            continue;
        assert_true(order->layout.dp == 3 && order->next.dp == 2 && order->taker == box.workers[i].rank);
        takers[count++] = i;
    }
    assert_true(count > 0 && takers[count - 1] != 2);
    for (uint32_t i = 0; i < count; i++) {
        train(&box, 1); /* meanwhile it steps */
        assert_int_equal(box_view(&box).phase, MU_JP_STEPPING);
        box_fed(&box, takers[i], MU_FEED_LIVE);
        box_settle(&box);
    }
    assert_int_equal(box_view(&box).phase, MU_JP_PARKING);
    train(&box, 1);
    for (uint32_t i = 0; i < count; i++) {
        assert_int_equal(box_view(&box).phase, MU_JP_PARKING); /* parked, but not all are whole */
        whole(&box, takers[i]);
    }
    struct mu_job_view view = box_view(&box);
    assert_true(box_all_run(&box) && view.generation == generation + 1 && view.layout.dp == 2);
    assert_true(box_said(&box, "0 steps replayed, 0 bytes moved"));
    for (uint32_t i = 0; i < 2; i++)
        assert_true(box.workers[i].source == MU_SOURCE_HELD && box.workers[i].moves_in == 0);
    box_fini(&box);
}

/* A member that is not fed after all, three times: then state moves while all stand still. */
static void test_a_feed_that_fails_is_tried_again_and_then_left(void **state)
{
    (void)state;
    static struct box box;
    start_sharded(&box, 0);
    add_workers(&box, 2, 1); /* feeds fail at once */
    for (int i = 0; i < 5; i++) {
        train(&box, 1);
        box_advance(&box, 300);
    }
    struct mu_job_view view = box_view(&box);
    assert_true(box_said(&box, "feed_failed"));
    assert_true(view.layout.dp == 3 && view.replayed_steps == 0);
    assert_true(box_said(&box, "0 steps replayed") && !box_said(&box, " 0 bytes moved"));
    box_fini(&box);
}

static void test_a_newcomer_that_dies_while_it_is_fed_stops_nobody(void **state)
{
    (void)state;
    static struct box box;
    start_sharded(&box, 0);
    uint64_t generation = box_view(&box).generation;
    box.feeds_work = true;
    add_workers(&box, 2, 1);
    assert_true(box.workers[2].feed.number != 0);
    train(&box, 1);
    box_kill_worker(&box, 2);
    box_settle(&box);
    train(&box, 2);
    struct mu_job_view view = box_view(&box);
    assert_true(view.generation == generation && view.phase == MU_JP_STEPPING && view.replayed_steps == 0);
    box_fini(&box);
}

static void test_without_room_to_be_fed_all_stand_still(void **state)
{
    (void)state;
    static struct box box;
    struct mu_job_spec spec;
    uint64_t most = 0;
    box_spec(&spec, 1, 1);
    for (uint32_t dp = 2; dp <= 3; dp++) {
        struct mu_layout layout = {.tp = 1, .pp = 1, .dp = dp, .sharded = true, .stage_first = {0, 4}};
        uint64_t need = mu_memory_of_layout(&spec, &layout, 1, NULL).total_bytes;
        most = need > most ? need : most;
    }
    start_sharded(&box, most);
    box.feeds_work = true;
    add_workers(&box, 2, 1);
    assert_true(box_said(&box, "state_not_fed: worker"));
    assert_int_equal(box.feeds_given, 0);
    train(&box, 1);
    assert_true(box_all_run(&box) && box_view(&box).layout.dp == 3);
    box_fini(&box);
}

/* ---- stages ---- */

/* Steps of two seconds. */
static void train_for(struct box *box, int steps)
{
    for (int i = 0; i < steps; i++) {
        train(box, 1);
        box_advance(box, 2000);
    }
}

/* Two stages, the first worker three times as slow: most layers go to the second one, once, and stay there; also after
 * the coordinator was killed, which remembers the speeds. When the first one is as fast again, they come back. */
static void test_layers_move_from_a_slow_stage(void **state)
{
    (void)state;
    static struct box box;
    struct mu_job_spec spec;
    box_spec(&spec, 1, 2);
    box_init(&box, &spec);
    add_workers(&box, 0, 2);
    assert_true(box_all_run(&box));
    uint64_t generation = box_view(&box).generation;
    box.workers[0].layer_us = box.workers[1].layer_us = 1000000;
    uint32_t slow = box.workers[0].rank == 0 ? 0 : 1;
    train_for(&box, 40); /* equally fast: nothing to do, or one change for what the head really costs */
    assert_true(box_view(&box).generation <= generation + 1);
    uint16_t before = box_view(&box).layout.stage_first[1];
    box.workers[slow].layer_us = 3000000;
    train_for(&box, 40);
    struct mu_job_view view = box_view(&box);
    assert_true(box_said(&box, "layers_moved: workers of some stages are slower"));
    assert_int_equal(view.layout.stage_first[1], 1);
    assert_true(before > 1 && view.replayed_steps == 0);
    generation = view.generation;
    box_kill_coord(&box);
    box_start_coord(&box);
    box_settle(&box);
    box.events[0] = 0;
    train_for(&box, 40);
    assert_true(!box_said(&box, "layers_moved") && box_view(&box).layout.stage_first[1] == 1);
    box.workers[slow].layer_us = 1000000;
    train_for(&box, 120);
    assert_true(box_said(&box, "layers_moved"));
    assert_true(box_view(&box).layout.stage_first[1] > 1);
    box_fini(&box);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_members_are_fed_what_they_are_to_have),
        cmocka_unit_test(test_a_feed_that_fails_is_tried_again_and_then_left),
        cmocka_unit_test(test_a_newcomer_that_dies_while_it_is_fed_stops_nobody),
        cmocka_unit_test(test_without_room_to_be_fed_all_stand_still),
        cmocka_unit_test(test_layers_move_from_a_slow_stage),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
