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

static void begin(struct box *box, uint32_t keep)
{
    struct mu_job_spec spec;
    box_spec(&spec, 1, 1);
    strcpy(spec.checkpoint.path, "/ckpt");
    spec.checkpoint.keep = keep;
    box_init(box, &spec);
    add_workers(box, 0, 2);
    assert_true(box_train(box, STEPS));
}

/* Orders one and trains until it is committed. */
static void save(struct box *box)
{
    struct mu_coord_event event = {.kind = MU_CE_CHECKPOINT};
    uint64_t before = box->published;
    event.request.cookie = 5;
    event.request.job = box->name;
    box_step(box, &event);
    assert_int_equal(box->reply, MU_OK);
    box_settle(box);
    for (int i = 0; i < 5 && box->published == before; i++)
        assert_true(box_train(box, STEPS));
    assert_int_equal(box->published, before + 1);
    box_settle(box);
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
    begin(&box, 3);
    save(&box);
    expect_list(&box, "1v ");
    assert_true(box_said(&box, "checkpoint_verified: checkpoint 1 "));
    save(&box);
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
    begin(&box, 10);
    box.hold_scrubs = true;
    for (int i = 0; i < 3; i++)
        save(&box);
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
    begin(&box, 1);
    save(&box);
    expect_list(&box, "1v ");
    box.hold_scrubs = true;
    save(&box);
    save(&box);
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
    begin(&box, 3);
    save(&box);
    box.scrub_result = MU_ERR_CORRUPT;
    save(&box);
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
    begin(&box, 3);
    box.scrub_result = MU_ERR_IO;
    save(&box);
    expect_list(&box, "1c ");
    assert_true(box_said(&box, "checkpoint_unreadable: checkpoint 1 could not be re-read"));
    box.scrub_result = MU_OK;
    box_advance(&box, 590000);
    assert_int_equal(box.scrubs, 1);
    box_advance(&box, 20000);
    assert_int_equal(box.scrubs, 2);
    expect_list(&box, "1v ");
    box_fini(&box);
}

static void test_verified_ones_are_read_again_long_after(void **state)
{
    (void)state;
    static struct box box;
    begin(&box, 3);
    save(&box);
    save(&box);
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
    begin(&box, 3);
    box.hold_scrubs = true;
    save(&box);
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
    begin(box, 5);
    train(box, 2);
    save(box);
    train(box, 3);
    save(box);
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
    save(&box);     /* of the same state */
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
    begin(&box, 5);
    save(&box);
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
        cmocka_unit_test(test_without_an_older_checkpoint_the_job_fails_and_never_starts_anew),
        cmocka_unit_test(test_checkpoint_that_nobody_can_start_from_is_given_up),
        cmocka_unit_test(test_verified_ones_are_read_again_long_after),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
