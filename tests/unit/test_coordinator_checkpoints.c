/* links: mu_coordinator mu_worker_core mu_wire mu_plan */
/* What the coordinator knows about committed checkpoints: re-reading, the last verified one, bad ones. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "core_testing.h"

enum { STEPS = 1000 };

static void add_workers(struct box *box, uint32_t first, uint32_t count)
{
    for (uint32_t i = first; i < first + count; i++)
        box_add_worker(box, i);
    box_settle(box);
    box_advance(box, 300);
}

/* "1c 2v 3b ": committed, verified, bad. */
static void expect_list(struct box *box, const char *wanted)
{
    char text[256] = "";
    struct mu_checkpoint_record record;
    for (uint32_t i = 0; mu_coord_checkpoint_view(box->coord, box->name, i, &record); i++) {
        size_t length = strlen(text);
        char letter = record.state == MU_CKPT_BAD         ? 'b'
                      : record.state != MU_CKPT_COMMITTED ? '?'
                      : record.verified                   ? 'v'
                                                          : 'c';
        assert_false(record.state == MU_CKPT_BAD && record.verified);
        snprintf(text + length, sizeof text - length, "%u%c ", (unsigned)record.number, letter);
    }
    assert_string_equal(text, wanted);
}

static void scrubbed(struct box *box, uint64_t number, enum mu_status status)
{
    struct mu_coord_event event = {.kind = MU_CE_SCRUBBED};
    strcpy(event.checkpoint_io.job, box->name);
    event.checkpoint_io.checkpoint = number;
    event.checkpoint_io.status = status;
    event.checkpoint_io.text = "piece 0 has another checksum";
    box_step(box, &event);
    box_settle(box);
}

static void test_each_checkpoint_is_re_read_after_its_commit(void **state)
{
    (void)state;
    static struct box box;
    box_begin(&box, 3);
    box_save(&box);
    expect_list(&box, "1v ");
    box_save(&box);
    expect_list(&box, "1v 2v ");
    assert_string_equal(box.scrub_order, "1 2 ");
    box_kill_coord(&box); /* what is verified stays so, and is not read again at once */
    box_start_coord(&box);
    box_advance(&box, 3000);
    expect_list(&box, "1v 2v ");
    assert_string_equal(box.scrub_order, "1 2 ");
    box_fini(&box);
}

static void test_oldest_unverified_comes_first_one_at_a_time(void **state)
{
    (void)state;
    static struct box box;
    box_begin(&box, 10);
    box.hold_scrubs = true;
    for (int i = 0; i < 3; i++)
        box_save(&box);
    assert_string_equal(box.scrub_order, "1 ");
    expect_list(&box, "1c 2c 3c ");
    scrubbed(&box, 3, MU_OK); /* not the one that is being read: it proves nothing */
    expect_list(&box, "1c 2c 3c ");
    box_kill_coord(&box); /* nothing is known of one that was being read */
    box_start_coord(&box);
    box_advance(&box, 3000);
    assert_int_equal(box.scrub_order[strlen(box.scrub_order) - 2], '1');
    box.scrub_order[0] = 0;
    scrubbed(&box, 1, MU_OK);
    assert_string_equal(box.scrub_order, "2 ");
    scrubbed(&box, 2, MU_OK);
    assert_string_equal(box.scrub_order, "2 3 ");
    expect_list(&box, "1v 2v 3c ");
    box_fini(&box);
}

static void test_last_verified_one_is_kept_until_another_is(void **state)
{
    (void)state;
    static struct box box;
    box_begin(&box, 1);
    box_save(&box);
    expect_list(&box, "1v ");
    box.hold_scrubs = true;
    box_save(&box);
    box_save(&box);
    expect_list(&box, "1v 3c "); /* 2 was never verified; it was being re-read when it went */
    scrubbed(&box, 2, MU_ERR_NOT_FOUND);
    expect_list(&box, "1v 3c ");
    assert_false(box_said(&box, "checkpoint_unreadable"));
    scrubbed(&box, 3, MU_OK);
    expect_list(&box, "3v ");
    box_fini(&box);
}

static void test_bad_newest_one_is_told_and_replaced(void **state)
{
    (void)state;
    static struct box box;
    box_begin(&box, 3);
    box_save(&box);
    box.scrub_result = MU_ERR_CORRUPT;
    box_save(&box);
    box.scrub_result = MU_OK;
    expect_list(&box, "1v 2b ");
    assert_true(box_said(&box, "checkpoint_bad: checkpoint 2 is bad (found by re-reading it: piece 0 has another "));
    assert_int_equal(box_view(&box).last_checkpoint, 1);
    box_advance(&box, 1100);
    for (int i = 0; i < 4; i++)
        assert_true(box_train(&box, STEPS));
    expect_list(&box, "1v 2b 3v "); /* nobody asked for it */
    box_fini(&box);
}

static void test_one_that_cannot_be_read_is_not_bad_and_tried_again(void **state)
{
    (void)state;
    static struct box box;
    box_begin(&box, 3);
    box.scrub_result = MU_ERR_IO;
    box_save(&box);
    expect_list(&box, "1c ");
    assert_true(box_said(&box, "checkpoint_unreadable: checkpoint 1 could not be re-read"));
    box_advance(&box, 590000);
    assert_int_equal(box.scrubs, 1);
    box.events[0] = 0;
    box_advance(&box, 20000);
    assert_int_equal(box.scrubs, 2);
    assert_false(box_said(&box, "checkpoint_unreadable")); /* said once */
    expect_list(&box, "1c ");
    box.scrub_result = MU_OK;
    box_advance(&box, 610000);
    expect_list(&box, "1v ");
    box_fini(&box);
}

static void test_verified_ones_are_read_again_long_after(void **state)
{
    (void)state;
    static struct box box;
    box_begin(&box, 3);
    box_save(&box);
    box_save(&box);
    assert_string_equal(box.scrub_order, "1 2 ");
    box.config.scrub_again_s = 100;
    box_kill_coord(&box);
    box_start_coord(&box);
    box_advance(&box, 99000);
    assert_int_equal(box.scrubs, 2);
    box.scrub_result = MU_ERR_CORRUPT;
    box.hold_scrubs = true;
    box_advance(&box, 2000);
    assert_string_equal(box.scrub_order, "1 2 1 ");
    scrubbed(&box, 1, MU_ERR_CORRUPT);
    expect_list(&box, "1b 2v ");
    box_fini(&box);
}

static void test_a_generation_that_loaded_every_byte_verifies_too(void **state)
{
    (void)state;
    static struct box box;
    box_begin(&box, 3);
    box.hold_scrubs = true;
    box_save(&box);
    expect_list(&box, "1c ");
    for (uint32_t i = 0; i < 2; i++)
        box_kill_worker(&box, i);
    box_advance(&box, 3000);
    add_workers(&box, 2, 2);
    box_advance(&box, 3000);
    assert_true(box_all_run(&box) && box_said(&box, "state from checkpoint 1"));
    expect_list(&box, "1v ");
    box_fini(&box);
}

/* All workers die and two new ones load the newest checkpoint. */
static void load_again(struct box *box)
{
    static uint32_t next;
    for (uint32_t i = 0; i < BOX_WORKERS_MAX; i++) {
        if (box->workers[i].core)
            box_kill_worker(box, i);
    }
    box_advance(box, 3000);
    next = next + 2 < BOX_WORKERS_MAX - 1 ? next + 2 : 2;
    add_workers(box, next, 2);
    box_advance(box, 3000);
}

static void train(struct box *box, int steps)
{
    for (int i = 0; i < steps; i++) {
        assert_true(box_train(box, STEPS));
        box_advance(box, 500); /* so that each step is reported by itself */
    }
}

/* Two checkpoints, the newer of which was just loaded. */
static void begin_from_second(struct box *box)
{
    box_begin(box, 5);
    train(box, 2);
    box_save(box);
    train(box, 3);
    box_save(box);
    train(box, 2);
    load_again(box);
    assert_true(box_all_run(box) && box_said(box, "state from checkpoint 2"));
    box->events[0] = 0;
}

static void test_state_that_is_not_finite_after_a_load_condemns_its_checkpoint(void **state)
{
    (void)state;
    static struct box box;
    begin_from_second(&box);
    uint64_t first_step = 0;
    struct mu_checkpoint_record record;
    assert_true(mu_coord_checkpoint_view(box.coord, box.name, 0, &record));
    first_step = record.step;
    train(&box, 2); /* a corrupt moment takes a few updates */
    box_save(&box); /* of the same state */
    box.unfinite = true;
    train(&box, MU_SUSPECT_REPORTS - 1);
    expect_list(&box, "1v 2v 3v ");
    assert_true(box_train(&box, STEPS));
    box.unfinite = false;
    box_advance(&box, 3000);
    expect_list(&box, "1v 2b 3b ");
    assert_true(
        box_said(&box, "checkpoint_bad: checkpoint 2 is bad (loss or gradient norm is not finite in 5 reports"));
    assert_true(box_said(&box, "state from checkpoint 1")); /* though everybody holds a newer state */
    assert_true(box_all_run(&box));
    assert_true(box_view(&box).steps_done == first_step);
    train(&box, 30);
    expect_list(&box, "1v 2b 3b ");
    box_fini(&box);
}

static void test_single_steps_that_are_not_finite_condemn_nothing(void **state)
{
    (void)state;
    static struct box box;
    begin_from_second(&box);
    for (uint32_t i = 0; i < 3 * MU_SUSPECT_REPORTS; i++) { /* skipped by everybody, in every run alike */
        box.unfinite = i % MU_SUSPECT_REPORTS != 0;
        train(&box, 1);
    }
    box.unfinite = false;
    train(&box, 4);
    box.unfinite = true; /* too long after the load to be its fault */
    train(&box, 3 * MU_SUSPECT_REPORTS);
    expect_list(&box, "1v 2v ");
    assert_int_equal(box_view(&box).phase, MU_JP_STEPPING);
    box_fini(&box);
}

static void test_without_an_older_checkpoint_the_job_fails_and_never_starts_anew(void **state)
{
    (void)state;
    static struct box box;
    box_begin(&box, 5);
    box_save(&box);
    load_again(&box);
    assert_true(box_said(&box, "state from checkpoint 1"));
    box.unfinite = true;
    train(&box, MU_SUSPECT_REPORTS);
    box_advance(&box, 3000);
    struct mu_job_view view = box_view(&box);
    assert_int_equal(view.record.state, MU_JOB_FAILED);
    assert_non_null(strstr(view.record.text, "a silent fresh start is refused"));
    expect_list(&box, "1b ");
    box_fini(&box);
}

static void test_weights_that_are_not_finite_are_no_result(void **state)
{
    (void)state;
    static struct box box;
    box_begin(&box, 5);
    train(&box, 2);
    box_save(&box);
    while (box.workers[0].held.step < STEPS - 12)
        assert_true(box_train(&box, STEPS));
    box_save(&box);
    load_again(&box);
    assert_true(box_said(&box, "state from checkpoint 2"));
    box.weights_unfinite = true;
    while (box_all_run(&box))
        assert_true(box_train(&box, STEPS)); /* after 11 steps, and from the older one again to the end */
    assert_true(box_said(&box, "checkpoint 2 is bad (the final weights are not finite, "));
    assert_true(box_said(&box, "state from checkpoint 1"));
    struct mu_job_view view = box_view(&box);
    assert_int_equal(view.record.state, MU_JOB_FAILED);
    assert_string_equal(view.record.text, "the final weights are not finite, and no older checkpoint is left");
    box_fini(&box);
}

/* It was committed, it is durable, and then the coordinator dies before anybody has heard of it. */
static void test_condemned_state_counts_for_nothing_after_a_restart(void **state)
{
    (void)state;
    static struct box box;
    begin_from_second(&box);
    box.unfinite = true;
    train(&box, MU_SUSPECT_REPORTS - 1);
    assert_true(box_train(&box, STEPS));
    box.unfinite = false;
    box_kill_coord(&box);
    box_start_coord(&box);
    box_advance(&box, 6000);
    expect_list(&box, "1v 2b ");
    assert_true(box_said(&box, "state from checkpoint 1") && box_all_run(&box));
    box_fini(&box);
}

static void test_checkpoint_that_nobody_can_start_from_is_given_up(void **state)
{
    (void)state;
    static struct box box;
    begin_from_second(&box);
    box.config.crash_limit = 1000; /* not what this is about */
    box_kill_coord(&box);
    box_start_coord(&box);
    box_advance(&box, 3000);
    box.fail_prepare = true;
    expect_list(&box, "1v 2v ");
    for (uint32_t i = 0; i < MU_SUSPECT_UNPREPARED; i++)
        load_again(&box);
    expect_list(&box, "1v 2b ");
    assert_true(box_said(&box, "3 generations could not be prepared from it, the last time: the accelerator has no"));
    for (uint32_t i = 0; i < 2; i++)
        load_again(&box);
    expect_list(&box, "1v 2b "); /* there is no older one: the workers are to be mended, not the job given up */
    box.fail_prepare = false;
    load_again(&box);
    struct mu_checkpoint_record record;
    assert_true(mu_coord_checkpoint_view(box.coord, box.name, 0, &record));
    assert_true(box_all_run(&box) && box_view(&box).steps_done == record.step);
    box_fini(&box);
}

/* ---- the interval ---- */

static void begin_auto(struct box *box, uint32_t step_us, uint32_t copy_us)
{
    struct mu_job_spec spec;
    box_spec(&spec, 1, 1);
    spec.steps = 100000;
    strcpy(spec.checkpoint.path, "/ckpt");
    spec.checkpoint.every = MU_EVERY_AUTO;
    spec.checkpoint.keep = 2;
    box_init(box, &spec);
    box->step_us = step_us;
    box->copy_us = copy_us;
    add_workers(box, 0, 2);
    assert_true(box_all_run(box));
}

/* One step, in the time that it takes. */
static void step(struct box *box)
{
    assert_true(box_train(box, 100000));
    box_advance(box, (box->step_us + 9999) / 1000);
}

static uint64_t steps_to_next(struct box *box, uint32_t most)
{
    uint64_t before = box->published, last = box->published_step;
    for (uint32_t i = 0; i < most && box->published == before; i++)
        step(box);
    assert_true(box->published == before + 1);
    return box->published_step - last;
}

static double root(double x)
{
    double y = x > 1 ? x : 1;
    for (int i = 0; i < 200; i++)
        y = 0.5 * (y + x / y);
    return y;
}

/* Daly's formula, written out once more. */
static double daly_s(double cost_s, double between_s)
{
    double r = cost_s / (2 * between_s);
    return root(2 * cost_s * between_s) * (1 + root(r) / 3 + r / 9) - cost_s;
}

static void expect_near(double value, double wanted, double tolerance)
{
    if (!(value > wanted - tolerance && value < wanted + tolerance))
        fail_msg("%f, wanted %f", value, wanted);
}

static void test_interval_follows_what_was_measured(void **state)
{
    (void)state;
    static struct box box;
    begin_auto(&box, 1000000, 200000);
    assert_true(box_view(&box).checkpoint_every == 0);
    uint64_t first = steps_to_next(&box, 100); /* nothing is known: a minute */
    assert_true(first >= 58 && first <= 66);
    for (int i = 0; i < 3; i++)
        step(&box);
    struct mu_job_view view = box_view(&box);
    expect_near(view.checkpoint_stall_s, 0.2, 0.001);
    expect_near(view.checkpoint_failure_s, 30 * 86400 / 2.0, 1); /* nothing was lost: 30 days of each of two workers */
    double wanted = daly_s(0.2, 30 * 86400 / 2.0);               /* 720 s */
    expect_near((double)view.checkpoint_every, wanted, 0.01 * wanted + 1);
    assert_true(box_said(&box, "checkpoint_interval: a checkpoint every 7"));
    assert_non_null(strstr(view.checkpoint_every_reason, "one delays by 0.200 s"));
    assert_non_null(
        strstr(view.checkpoint_every_reason, "2 workers fail every 360.0 h (none lost in 0.0 worker hours)"));
    expect_near((double)steps_to_next(&box, 1000), wanted, 0.02 * wanted);
    box_fini(&box);
}

static void test_losses_make_the_interval_shorter(void **state)
{
    (void)state;
    static struct box box;
    begin_auto(&box, 1000000, 200000);
    steps_to_next(&box, 100);
    uint64_t calm = box_view(&box).checkpoint_every;
    box.events[0] = 0;
    box_kill_worker(&box, 0);
    box_advance(&box, 8000);
    add_workers(&box, 5, 1);
    for (int i = 0; i < 5; i++) { /* to the boundary at which they join */
        box_train(&box, 100000);
        box_advance(&box, 1000);
    }
    box_save(&box);
    for (int i = 0; i < 3; i++)
        step(&box);
    struct mu_job_view view = box_view(&box);
    assert_true(view.workers_lost == 1 && view.checkpoint_every < calm / 10);
    assert_true(box_said(&box, "checkpoint_interval: "));
    assert_non_null(strstr(view.checkpoint_every_reason, "1 lost in 0.0 worker hours"));
    assert_true(view.checkpoint_failure_s > 50 && view.checkpoint_failure_s < 90); /* two workers for a minute or so */
    double wanted = daly_s(view.checkpoint_stall_s, view.checkpoint_failure_s);
    expect_near((double)view.checkpoint_every, wanted, 0.02 * wanted + 1);
    box_fini(&box);
}

static void test_interval_is_never_shorter_than_writing_takes(void **state)
{
    (void)state;
    static struct box box;
    begin_auto(&box, 1000000, 1);
    steps_to_next(&box, 100);
    uint64_t quick = box_view(&box).checkpoint_every;
    assert_true(quick > 40 && quick < 60); /* a cost of 1 ms, the least that counts */
    for (uint32_t i = 0; i < 2; i++)
        box.workers[i].hold_pieces = true;
    uint64_t before = box.published;
    for (uint32_t i = 0; i < 160; i++)
        step(&box);
    assert_true(box.published == before);
    for (uint32_t i = 0; i < 2; i++) {
        box.workers[i].hold_pieces = false;
        box_piece(&box, i);
    }
    box_settle(&box);
    assert_true(box.published == before + 1);
    struct mu_job_view view = box_view(&box);
    assert_true(view.checkpoint_write_s > 80 && view.checkpoint_every >= (uint64_t)view.checkpoint_write_s);
    assert_non_null(strstr(view.checkpoint_every_reason, "s to write, the least"));
    box_fini(&box);
}

static void restart(struct box *box)
{
    box_kill_coord(box);
    box_start_coord(box);
    box_advance(box, 3000);
}

static void test_interval_outlives_a_restart(void **state)
{
    (void)state;
    static struct box box;
    begin_auto(&box, 1000000, 200000);
    steps_to_next(&box, 100);
    for (int i = 0; i < 3; i++)
        step(&box);
    struct mu_job_view before = box_view(&box), after;
    assert_true(before.checkpoint_every > 500);
    restart(&box);
    after = box_view(&box);
    assert_true(after.checkpoint_every == before.checkpoint_every);
    assert_true(after.checkpoint_stall_s == before.checkpoint_stall_s);
    assert_true(after.checkpoint_write_s == before.checkpoint_write_s);
    assert_true(after.checkpoint_failure_s == before.checkpoint_failure_s);
    assert_string_equal(after.checkpoint_every_reason, before.checkpoint_every_reason);
    assert_true(after.generations == 1 && after.generations == before.generations);
    expect_near((double)steps_to_next(&box, 1000), (double)before.checkpoint_every, 5);
    box_fini(&box);
}

static void test_losses_are_counted_over_restarts(void **state)
{
    (void)state;
    static struct box box;
    begin_from_second(&box);
    uint64_t lost = box_view(&box).workers_lost, generations = box_view(&box).generations;
    assert_true(lost >= 2 && generations >= 2);
    restart(&box);
    assert_true(box_view(&box).workers_lost == lost && box_view(&box).generations == generations);
    load_again(&box);
    assert_true(box_view(&box).workers_lost == lost + 2 && box_view(&box).generations == generations + 1);
    box_fini(&box);
}

static void test_suspicion_of_a_checkpoint_outlives_restarts(void **state)
{
    (void)state;
    static struct box box;
    begin_from_second(&box);
    train(&box, 2);
    box.unfinite = true;
    for (uint32_t i = 0; i < MU_SUSPECT_REPORTS - 1; i++) {
        restart(&box);
        train(&box, 1);
    }
    expect_list(&box, "1v 2v ");
    restart(&box);
    assert_true(box_train(&box, STEPS));
    box.unfinite = false;
    box_advance(&box, 3000);
    expect_list(&box, "1v 2b ");
    restart(&box);
    train(&box, 30);
    expect_list(&box, "1v 2b ");
    box_fini(&box);
}

/* Two hosts that need each other's pieces, each alone at its turn: the next plan comes later and later, until both are
 * there for it. */
static void test_plans_after_failed_preparations_come_later_and_later(void **state)
{
    (void)state;
    static struct box box;
    begin_from_second(&box);
    box.config.crash_limit = 1000; /* not what this is about */
    box_kill_coord(&box);
    box_start_coord(&box);
    for (uint32_t k = 0; k < BOX_WORKERS_MAX; k++) {
        if (box.workers[k].core)
            box_kill_worker(&box, k);
    }
    box_advance(&box, 9000);
    box.fail_prepare = true;
    box.events[0] = 0;
    uint64_t generations = box_view(&box).record.generation, waited_ms = 0, most_ms = 0;
    for (uint32_t i = 0; i < 400 && box_view(&box).record.generation < generations + 7; i++) {
        uint64_t before = box_view(&box).record.generation;
        if (i % 2 == 0)
            box_add_worker(&box, i / 2 % 2); /* started anew, like a supervisor does */
        box_settle(&box);
        box_advance(&box, 100);
        waited_ms = box_view(&box).record.generation == before ? waited_ms + 100 : 0;
        most_ms = waited_ms > most_ms ? waited_ms : most_ms;
    }
    assert_int_equal(box_view(&box).record.generation, generations + 7);
    assert_true(most_ms >= 16 * box.config.settle_ms);
    assert_true(box_said(&box, "3 generations in a row could not be prepared; the next is planned in"));
    box.fail_prepare = false;
    box_advance(&box, 64 * box.config.settle_ms + 1000);
    assert_true(box_all_run(&box));
    box_fini(&box);
}

static void test_failed_preparations_are_counted_over_restarts(void **state)
{
    (void)state;
    static struct box box;
    begin_from_second(&box);
    for (uint32_t i = 0; i < MU_SUSPECT_UNPREPARED; i++) {
        if (i < 2) /* one life of the coordinator is not enough */
            expect_list(&box, "1v 2v ");
        for (uint32_t k = 0; k < BOX_WORKERS_MAX; k++) {
            if (box.workers[k].core)
                box_kill_worker(&box, k);
        }
        box_advance(&box, 3000);
        restart(&box);
        box_advance(&box, 6000); /* until nobody is waited for */
        box.fail_prepare = true; /* one generation of one worker */
        add_workers(&box, i, 1);
        box.fail_prepare = false;
    }
    expect_list(&box, "1v 2b ");
    box_fini(&box);
}

/* Worker 0, again and again. */
static bool dies_too_often(struct box *box, uint32_t deaths, uint32_t apart_ms)
{
    for (uint32_t i = 0; i < deaths; i++) {
        box_kill_worker(box, 0);
        box_advance(box, apart_ms);
        restart(box);
        add_workers(box, 0, 1);
        for (int k = 0; k < 5; k++) { /* to the boundary at which it joins */
            box_train(box, 100000);
            box_advance(box, 500);
        }
    }
    return box_said(box, "worker_quarantined");
}

static void test_crash_budget_outlives_restarts(void **state)
{
    (void)state;
    static struct box box;
    box_begin(&box, 5);
    box.config.crash_limit = 3;
    box.config.crash_window_ms = 60000;
    restart(&box);
    assert_false(dies_too_often(&box, 3, 1500));
    assert_true(dies_too_often(&box, 1, 1500));
    assert_true(box_said(&box, "lost 4 times within 60 s"));
    box_fini(&box);
    box_begin(&box, 5);
    box.config.crash_limit = 3;
    box.config.crash_window_ms = 60000;
    restart(&box);
    assert_false(dies_too_often(&box, 5, 25000)); /* the old ones are forgotten in time, restarts or not */
    box_fini(&box);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_checkpoint_is_re_read_after_its_commit),
        cmocka_unit_test(test_oldest_unverified_comes_first_one_at_a_time),
        cmocka_unit_test(test_last_verified_one_is_kept_until_another_is),
        cmocka_unit_test(test_bad_newest_one_is_told_and_replaced),
        cmocka_unit_test(test_one_that_cannot_be_read_is_not_bad_and_tried_again),
        cmocka_unit_test(test_a_generation_that_loaded_every_byte_verifies_too),
        cmocka_unit_test(test_state_that_is_not_finite_after_a_load_condemns_its_checkpoint),
        cmocka_unit_test(test_single_steps_that_are_not_finite_condemn_nothing),
        cmocka_unit_test(test_weights_that_are_not_finite_are_no_result),
        cmocka_unit_test(test_condemned_state_counts_for_nothing_after_a_restart),
        cmocka_unit_test(test_without_an_older_checkpoint_the_job_fails_and_never_starts_anew),
        cmocka_unit_test(test_checkpoint_that_nobody_can_start_from_is_given_up),
        cmocka_unit_test(test_interval_follows_what_was_measured),
        cmocka_unit_test(test_losses_make_the_interval_shorter),
        cmocka_unit_test(test_interval_is_never_shorter_than_writing_takes),
        cmocka_unit_test(test_interval_outlives_a_restart),
        cmocka_unit_test(test_losses_are_counted_over_restarts),
        cmocka_unit_test(test_suspicion_of_a_checkpoint_outlives_restarts),
        cmocka_unit_test(test_plans_after_failed_preparations_come_later_and_later),
        cmocka_unit_test(test_failed_preparations_are_counted_over_restarts),
        cmocka_unit_test(test_crash_budget_outlives_restarts),
        cmocka_unit_test(test_verified_ones_are_read_again_long_after),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
