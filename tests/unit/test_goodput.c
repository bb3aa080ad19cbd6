/* links: mu_coordinator mu_worker_core mu_wire mu_plan */
/* Where the time of workers goes: every microsecond in one class, whatever fails. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "core_testing.h"

enum { STEPS = 1000, WALL_OF_BOX_US = 1000 };

/* ---- dividing a report ---- */

static uint64_t sum_of(const uint64_t us[MU_TIME_CLASS_COUNT])
{
    uint64_t sum = 0;
    for (int k = 0; k < MU_TIME_CLASS_COUNT; k++)
        sum += us[k];
    return sum;
}

static void test_parts_of_a_report_add_up_to_the_time_divided(void **state)
{
    (void)state;
    for (uint64_t round = 0; round < 20000; round++) {
        uint64_t draw[8], parts[MU_TIME_CLASS_COUNT];
        for (uint64_t i = 0; i < 8; i++)
            draw[i] = mu_xxh3_64(&round, sizeof round, i) >> (mu_xxh3_64(&round, sizeof round, 100 + i) % 40 + 24);
        struct mu_step_report report = {.step_count = (uint32_t)(draw[0] % 5),
                                        .data_us = draw[1],
                                        .forward_us = draw[2],
                                        .backward_us = draw[3],
                                        .communicate_us = draw[4],
                                        .wait_us = draw[5],
                                        .snapshot_us = draw[6]};
        mu_goodput_split(&report, draw[7], (uint32_t)(draw[1] % 7), draw[2], draw[3], parts);
        assert_int_equal(sum_of(parts), draw[7]);
    }
}

static void test_waits_are_bubble_then_everybodys_then_somebodys(void **state)
{
    (void)state;
    uint64_t parts[MU_TIME_CLASS_COUNT];
    struct mu_step_report report = {.step_count = 2,
                                    .forward_us = 100,
                                    .backward_us = 200,
                                    .optimizer_us = 100,
                                    .data_us = 50,
                                    .wait_us = 500,
                                    .communicate_us = 30,
                                    .snapshot_us = 20};
    mu_goodput_split(&report, 2000, 0, 150, 250, parts);
    assert_int_equal(parts[MU_TIME_BUBBLE], 300);
    assert_int_equal(parts[MU_TIME_COMMUNICATION], 560);
    assert_int_equal(parts[MU_TIME_STRAGGLER], 200);
    assert_int_equal(parts[MU_TIME_DATA], 100);
    assert_int_equal(parts[MU_TIME_CHECKPOINT], 40);
    assert_int_equal(parts[MU_TIME_USEFUL], 800);
    mu_goodput_split(&report, 2000, 1, 150, 250, parts); /* one of two steps was done before */
    assert_int_equal(parts[MU_TIME_REPLAYED], 1000);
    assert_int_equal(parts[MU_TIME_USEFUL], 400);
    mu_goodput_split(&(struct mu_step_report){0}, 7, 0, 0, 0, parts);
    assert_int_equal(parts[MU_TIME_USEFUL], 7);
}

/* ---- a job with failures ---- */

static void begin(struct box *box, uint32_t workers, const char *checkpoints)
{
    struct mu_job_spec spec;
    box_spec(&spec, 1, 1);
    strcpy(spec.checkpoint.path, checkpoints);
    box_init(box, &spec);
    for (uint32_t i = 0; i < workers; i++)
        box_add_worker(box, i);
    box_settle(box);
    box_advance(box, 300);
}

static struct mu_account_record account_of(struct box *box, const char *worker)
{
    struct mu_account_record record;
    for (uint32_t slot = 0; slot < mu_coord_account_slots(box->coord); slot++) {
        if (mu_coord_account_view(box->coord, slot, box->now_us, &record) && strcmp(record.worker, worker) == 0)
            return record;
    }
    fail_msg("no account of '%s'", worker);
    return record;
}

/* Everybody who was never closed has all of the time since it came. */
static void expect_whole(struct box *box, const char *worker)
{
    struct mu_account_record record = account_of(box, worker);
    assert_true(record.open);
    assert_int_equal(sum_of(record.us), box->now_us + WALL_OF_BOX_US - record.began_wall_us);
}

static void train(struct box *box, uint32_t steps, uint32_t ms)
{
    for (uint32_t i = 0; i < steps; i++) {
        box_advance(box, ms);
        assert_true(box_train(box, STEPS));
    }
    box_advance(box, 2000); /* what was summed up is reported */
}

static void test_losses_and_recovery_are_charged_by_phase(void **state)
{
    (void)state;
    struct box box;
    begin(&box, 3, "");
    train(&box, 20, 100);
    struct mu_account_record before = account_of(&box, "w0");
    assert_true(before.us[MU_TIME_USEFUL] > 2000000);
    assert_true(before.us[MU_TIME_WAITING] > 0); /* for further ones, before the first plan */
    assert_int_equal(before.us[MU_TIME_DETECT], 0);
    box.workers[0].hold_prepared = true;
    box_advance(&box, 1000); /* of a step that nobody reports */
    box_kill_worker(&box, 2);
    box_advance(&box, 3000);
    box.workers[0].hold_prepared = false;
    box_prepared(&box, 0);
    box_settle(&box);
    train(&box, 20, 100);
    struct mu_account_record after = account_of(&box, "w0"), lost = account_of(&box, "w2");
    uint64_t detect_us = after.us[MU_TIME_DETECT], prepare_us = after.us[MU_TIME_PREPARE];
    /* Since the last report 3 s, and the grace for a stream that may come back. */
    assert_true(detect_us >= 3900000 && detect_us <= 4300000);
    assert_true(prepare_us >= 1800000 && prepare_us <= 2200000);
    assert_true(after.us[MU_TIME_USEFUL] > before.us[MU_TIME_USEFUL]);
    assert_true(box_said(&box, "worker_lost: worker w2 lost"));
    assert_int_equal(lost.now, MU_TIME_DOWN);
    assert_true(lost.us[MU_TIME_DOWN] > 5000000 && lost.us[MU_TIME_DETECT] > 1900000);
    expect_whole(&box, "w0");
    expect_whole(&box, "w1");
    expect_whole(&box, "w2");
    box_add_worker(&box, 4); /* takes its place */
    box_advance(&box, 500);
    assert_false(account_of(&box, "w2").open);
    expect_whole(&box, "w4");
    box_fini(&box);
}

static void test_one_that_comes_back_is_no_longer_down(void **state)
{
    (void)state;
    struct box box;
    begin(&box, 2, "");
    train(&box, 5, 50);
    box_kill_worker(&box, 1);
    box_advance(&box, 4000);
    assert_int_equal(account_of(&box, "w1").now, MU_TIME_DOWN);
    uint64_t down_us = account_of(&box, "w1").us[MU_TIME_DOWN];
    box_add_worker(&box, 1);
    box_advance(&box, 3000);
    struct mu_account_record back = account_of(&box, "w1");
    assert_true(back.open && back.now != MU_TIME_DOWN);
    assert_true(back.us[MU_TIME_DOWN] < down_us + 100000);
    expect_whole(&box, "w1");
    box_fini(&box);
}

static void test_time_without_enough_workers_is_waiting(void **state)
{
    (void)state;
    struct mu_job_spec spec;
    struct box box;
    box_spec(&spec, 1, 1);
    spec.workers.min = 2;
    spec.parallel.dp = 2;
    box_init(&box, &spec);
    box_add_worker(&box, 0);
    box_advance(&box, 5000);
    struct mu_account_record record = account_of(&box, "w0");
    assert_int_equal(record.now, MU_TIME_WAITING);
    assert_true(record.us[MU_TIME_WAITING] > 4500000);
    box_add_worker(&box, 1);
    box_advance(&box, 300);
    box_add_worker(&box, 2);
    box_advance(&box, 1000);
    assert_int_equal(account_of(&box, "w2").now, MU_TIME_SPARE);
    assert_int_equal(account_of(&box, "w0").now, MU_TIME_UNREPORTED);
    expect_whole(&box, "w0");
    expect_whole(&box, "w2");
    box_fini(&box);
}

static void checkpoint(struct box *box)
{
    struct mu_coord_event event = {.kind = MU_CE_CHECKPOINT};
    event.request.cookie = 5;
    event.request.job = box->name;
    box_step(box, &event);
    assert_int_equal(box->reply, MU_OK);
    box_settle(box);
}

/* Copies are the checkpoint's; steps done again after everybody was lost are replayed, up to where the job had been. */
static void test_checkpoints_and_replayed_steps(void **state)
{
    (void)state;
    struct box box;
    begin(&box, 2, "/ckpt");
    box.copy_us = 300;
    train(&box, 3, 100);
    checkpoint(&box);
    train(&box, 3, 100);
    assert_int_equal(box.published, 1);
    assert_true(account_of(&box, "w0").us[MU_TIME_CHECKPOINT] > 0);
    uint64_t saved = box.published_step;
    train(&box, 4, 100);
    uint64_t reached = box_view(&box).steps_done;
    assert_true(reached > saved);
    box_kill_worker(&box, 0);
    box_kill_worker(&box, 1);
    box_advance(&box, 3000);
    box_add_worker(&box, 5);
    box_add_worker(&box, 6);
    box_advance(&box, 1000);
    assert_int_equal(box_view(&box).steps_done, saved);
    while (box_view(&box).steps_done < reached)
        train(&box, 1, 1000);
    struct mu_account_record record = account_of(&box, "w5");
    assert_int_equal(record.us[MU_TIME_USEFUL], 0);
    assert_true(record.us[MU_TIME_REPLAYED] > 1000000 * (reached - saved));
    train(&box, 1, 1000);
    assert_true(account_of(&box, "w5").us[MU_TIME_USEFUL] >= 1000000);
    expect_whole(&box, "w5");
    box_fini(&box);
}

/* What was recorded is there again, and what passed meanwhile is explained by the next report. */
static void test_accounts_outlive_a_restart(void **state)
{
    (void)state;
    struct box box;
    begin(&box, 2, "");
    train(&box, 100, 200);
    uint64_t useful_us = account_of(&box, "w0").us[MU_TIME_USEFUL];
    box_kill_coord(&box);
    box_advance(&box, 2000);
    box_start_coord(&box);
    box_advance(&box, 2000);
    assert_true(box_train(&box, STEPS));
    box_advance(&box, 2000);
    struct mu_account_record record = account_of(&box, "w0");
    assert_true(record.us[MU_TIME_USEFUL] >= useful_us + 4000000);
    assert_int_equal(record.us[MU_TIME_DOWN], 0);
    expect_whole(&box, "w0");
    expect_whole(&box, "w1");
    box_fini(&box);
}

/* A job that is over is closed; one of the same name starts from nothing. */
static void test_end_of_a_job_closes_its_accounts(void **state)
{
    (void)state;
    struct box box;
    struct mu_job_spec spec;
    struct mu_coord_event event = {.kind = MU_CE_CANCEL};
    struct mu_account_record record;
    begin(&box, 2, "");
    train(&box, 3, 100);
    event.request.cookie = 6;
    event.request.job = box.name;
    event.request.reason = "enough";
    box_step(&box, &event);
    box_settle(&box);
    uint64_t sum_us = sum_of(account_of(&box, "w0").us);
    box_advance(&box, 5000);
    assert_false(account_of(&box, "w0").open);
    assert_int_equal(sum_of(account_of(&box, "w0").us), sum_us);
    box_kill_coord(&box);
    box_start_coord(&box);
    assert_int_equal(sum_of(account_of(&box, "w0").us), sum_us);
    box_spec(&spec, 1, 1);
    box_step(&box, &(struct mu_coord_event){.kind = MU_CE_SUBMIT, .submit = {.cookie = 7, .spec = &spec}});
    for (uint32_t slot = 0; slot < mu_coord_account_slots(box.coord); slot++)
        assert_false(mu_coord_account_view(box.coord, slot, box.now_us, &record));
    box_fini(&box);
}

/* A table of accounts that is full: who left longest ago is summed up, and no second is lost. */
static void test_full_table_sums_up_who_left(void **state)
{
    (void)state;
    struct box box;
    begin(&box, 1, "");
    uint64_t began_us = box.now_us;
    for (uint32_t i = 0; i < 2 * box.config.max_workers; i++) { /* attach and leave again */
        box_add_worker(&box, 1 + i % 2);
        struct mu_worker *core = box.workers[1 + i % 2].core;
        assert_non_null(core);
        box_settle(&box);
        box_advance(&box, 100);
        box_kill_worker(&box, 1 + i % 2);
        box_advance(&box, 3000);
        box.workers[1 + i % 2] = (struct box_worker){.exit_code = -1};
        assert_true(mu_coord_account_slots(box.coord) <= 2 * box.config.max_workers);
    }
    assert_true(sum_of(account_of(&box, "w0").us) >= box.now_us - began_us);
    expect_whole(&box, "w0");
    box_fini(&box);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parts_of_a_report_add_up_to_the_time_divided),
        cmocka_unit_test(test_waits_are_bubble_then_everybodys_then_somebodys),
        cmocka_unit_test(test_losses_and_recovery_are_charged_by_phase),
        cmocka_unit_test(test_one_that_comes_back_is_no_longer_down),
        cmocka_unit_test(test_time_without_enough_workers_is_waiting),
        cmocka_unit_test(test_checkpoints_and_replayed_steps),
        cmocka_unit_test(test_accounts_outlive_a_restart),
        cmocka_unit_test(test_end_of_a_job_closes_its_accounts),
        cmocka_unit_test(test_full_table_sums_up_who_left),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
