/* links: mu_engine mu_storage mu_plan */
#include "engine_testing.h"

#include "common/hash.h"

/* The result of the undisturbed run of one worker with one thread: what every other run must reproduce. */
static uint8_t reference_sha[32];
static double reference_eval[2], reference_loss[6];

static uint32_t all_workers(const struct fleet *fleet)
{
    return (1u << fleet->count) - 1;
}

static int setup_reference(void **state)
{
    (void)state;
    struct fleet *fleet = fleet_new();
    worker_start_on_cpu(fleet);
    start(fleet, 1);
    if (wait_parked(fleet, reference_sha) != MU_PARK_FINISHED)
        return -1;
    reference_eval[0] = fleet->eval_loss[4];
    reference_eval[1] = fleet->eval_loss[6];
    memcpy(reference_loss, fleet->loss, sizeof reference_loss);
    fleet_free(fleet);
    return 0;
}

/* For every step, the last generation that computed it did every leaf exactly once, from the sequences that are its
 * own: nothing is lost, nothing is trained on twice. */
static void check_ledger(const struct fleet *fleet)
{
    uint32_t leaves = mu_job_leaves(&fleet->spec);
    for (uint64_t step = 0; step < fleet->spec.steps; step++) {
        uint64_t generation = 0;
        uint32_t seen[64] = {0};
        for (uint32_t i = 0; i < fleet->ledger_count; i++)
            if (fleet->ledger[i].step == step && fleet->ledger[i].generation > generation)
                generation = fleet->ledger[i].generation;
        for (uint32_t i = 0; i < fleet->ledger_count; i++) {
            const struct ledger_line *line = &fleet->ledger[i];
            if (line->step != step || line->generation != generation)
                continue;
            assert_in_range(line->leaf, 0, leaves - 1);
            assert_int_equal(line->count, 2);
            assert_int_equal(line->first, step * fleet->spec.batch.sequences + line->leaf * 2);
            seen[line->leaf]++;
        }
        for (uint32_t leaf = 0; leaf < leaves; leaf++)
            assert_int_equal(seen[leaf], 1);
    }
}

static void check_finished(struct fleet *fleet)
{
    uint8_t sha[32];
    assert_int_equal(wait_parked(fleet, sha), MU_PARK_FINISHED);
    assert_memory_equal(sha, reference_sha, 32);
    assert_true(fleet->eval_loss[6] == reference_eval[1]);
    for (uint32_t step = 0; step < 6; step++)
        assert_true(fleet->loss[step] == 0 || fleet->loss[step] == reference_loss[step]);
    check_ledger(fleet);
}

static void run_undisturbed(uint32_t world, uint32_t threads, const uint32_t *leaf_counts)
{
    struct fleet *fleet = fleet_new();
    fleet->threads = threads;
    fleet->leaf_counts = leaf_counts;
    for (uint32_t i = 0; i < world; i++)
        worker_start(fleet);
    start(fleet, all_workers(fleet));
    assert_int_equal(fleet->world, world);
    check_finished(fleet);
    assert_true(fleet->eval_loss[4] == reference_eval[0]);
    for (uint32_t step = 0; step < 6; step++)
        assert_int_equal(fleet->applied[step], world);
    fleet_free(fleet);
}

static void test_engine_reference_learns(void **state)
{
    (void)state;
    for (uint32_t step = 0; step < 6; step++)
        assert_true(reference_loss[step] > 1.0 && reference_loss[step] < 6.0);
    assert_true(reference_loss[5] < reference_loss[0]);
    assert_true(reference_eval[1] > 1.0 && reference_eval[1] < reference_eval[0]);
}

/* The bits of jobs without slices stay as they were before there were any. */
static void test_engine_reference_has_the_pinned_weights(void **state)
{
    (void)state;
    char text[65];
    mu_hex(reference_sha, 32, text);
    assert_string_equal(text, "c0a950970e533d5c1e4ad00536468980168ec5dead18107577a580288f5de0cc");
}

static void test_engine_any_world_same_bits(void **state)
{
    (void)state;
    static const uint32_t worlds[] = {2, 3, 4, 7};
    for (uint32_t i = 0; i < 4; i++)
        run_undisturbed(worlds[i], 1, NULL);
}

static void test_engine_any_thread_count_same_bits(void **state)
{
    (void)state;
    run_undisturbed(1, 2, NULL);
    run_undisturbed(1, 3, NULL);
    run_undisturbed(3, 2, NULL);
}

static void test_engine_uneven_leaves_same_bits(void **state)
{
    (void)state;
    run_undisturbed(3, 1, (const uint32_t[]){1, 5, 1});
    run_undisturbed(2, 1, (const uint32_t[]){6, 1});
    run_undisturbed(4, 1, (const uint32_t[]){2, 3, 1, 1});
}

/* ---- aborts ---- */

/* Everybody is revoked at the point; then `survivors` go on, later `late` workers join. */
static void run_disturbed(uint32_t world, enum trigger_point point, uint32_t hits, uint32_t lose, bool join)
{
    struct fleet *fleet = fleet_new();
    for (uint32_t i = 0; i < world; i++)
        worker_start(fleet);
    set_trigger(fleet, point, world - 1, hits);
    start(fleet, all_workers(fleet));
    wait_revoked(fleet);
    assert_true(fleet->triggered);
    uint64_t newest = 0, oldest = UINT64_MAX;
    for (uint32_t i = 0; i < world; i++) {
        struct mu_held held = held_of(&fleet->workers[i]);
        assert_true(held.has_state);
        newest = held.step > newest ? held.step : newest;
        oldest = held.step < oldest ? held.step : oldest;
    }
    assert_true(newest - oldest <= 1);
    uint32_t members = all_workers(fleet);
    for (uint32_t i = 0; i < lose; i++) {
        worker_stop(fleet, i);
        members &= ~(1u << i);
    }
    if (join)
        members |= 1u << worker_start(fleet);
    set_trigger(fleet, TRIGGER_NONE, 0, 0);
    fleet->spec.workers.max = 7;
    start(fleet, members);
    check_finished(fleet);
    fleet_free(fleet);
}

static void test_engine_abort_anywhere_then_same_bits(void **state)
{
    (void)state;
    static const enum trigger_point points[] = {TRIGGER_LEAF, TRIGGER_VOTE, TRIGGER_APPLIED, TRIGGER_BOUNDARY};
    for (uint32_t i = 0; i < 4; i++) {
        run_disturbed(3, points[i], 1 + i, 0, false);
        run_disturbed(3, points[i], 2 + i, 1, false);
        run_disturbed(2, points[i], 3, 1, true);
    }
}

static void test_engine_abort_is_answered_fast_when_parked_and_when_waiting(void **state)
{
    (void)state;
    struct fleet *fleet = fleet_new();
    worker_start(fleet);
    worker_start(fleet);
    start(fleet, 3);
    /* Only rank 0 is revoked while both step: it must park although its peer knows of nothing. */
    next_event(&fleet->workers[0], 1u << MU_WE_STEP);
    uint64_t begin_us = mu_clock_mono_us();
    assert_int_equal(mu_engine_abort(fleet->workers[0].engine, fleet->generation), MU_OK);
    const struct mu_worker_event *event = next_event(&fleet->workers[0], 1u << MU_WE_PARKED);
    assert_true(mu_clock_mono_us() - begin_us < 2000000); /* 10 ms on a quiet machine; this one may be busy */
    if (event->parked.reason == MU_PARK_REVOKED) {
        event = next_event(&fleet->workers[1], 1u << MU_WE_PARKED);
        assert_int_equal(event->parked.reason, MU_PARK_PEER);
        assert_int_equal(event->parked.peer_rank, 0);
        assert_int_equal(event->parked.peer_failure, MU_PEER_FAILURE_NONE); /* it left in order */
    }
    /* Parked already: every abort is answered. */
    assert_int_equal(mu_engine_abort(fleet->workers[0].engine, fleet->generation), MU_OK);
    event = next_event(&fleet->workers[0], 1u << MU_WE_PARKED);
    assert_int_equal(event->parked.reason, MU_PARK_REVOKED);
    assert_true(event->parked.held.has_state);
    fleet_free(fleet);
}

/* ---- joining, leaving, forgetting ---- */

static void give_command(struct fleet *fleet, struct command command)
{
    pthread_mutex_lock(&fleet->lock);
    fleet->command = command;
    pthread_mutex_unlock(&fleet->lock);
}

static void test_engine_grow_and_shrink_at_commands_same_bits(void **state)
{
    (void)state;
    struct fleet *fleet = fleet_new();
    worker_start(fleet);
    worker_start(fleet);
    give_command(fleet, (struct command){.number = 1, .not_before_step = 2, .park = true});
    for (uint32_t i = 0; i < 2; i++)
        fleet->workers[i].executed = 0;
    fleet->command.number = 0;
    assign(fleet, 3);
    fleet->command.number = 1;
    for (uint32_t rank = 0; rank < 2; rank++)
        assert_int_equal(next_event(&fleet->workers[rank], 1u << MU_WE_PREPARED)->kind, MU_WE_PREPARED);
    for (uint32_t rank = 0; rank < 2; rank++)
        assert_int_equal(mu_engine_run(fleet->workers[rank].engine, fleet->generation), MU_OK);
    assert_int_equal(wait_parked(fleet, NULL), MU_PARK_COMMAND);
    assert_int_equal(held_of(&fleet->workers[0]).step, 2);
    assert_int_equal(held_of(&fleet->workers[1]).step, 2);
    uint32_t late = worker_start(fleet);
    give_command(fleet, (struct command){.number = 1});
    assign(fleet, all_workers(fleet));
    fleet->command = (struct command){.number = 2, .not_before_step = 4, .park = true};
    for (uint32_t rank = 0; rank < 3; rank++)
        assert_int_equal(next_event(&fleet->workers[fleet->ranks[rank]], 1u << MU_WE_PREPARED)->parked.held.step, 2);
    for (uint32_t rank = 0; rank < 3; rank++)
        assert_int_equal(mu_engine_run(fleet->workers[fleet->ranks[rank]].engine, fleet->generation), MU_OK);
    assert_int_equal(wait_parked(fleet, NULL), MU_PARK_COMMAND);
    worker_stop(fleet, 0);
    worker_stop(fleet, 1);
    start(fleet, 1u << late);
    check_finished(fleet);
    fleet_free(fleet);
}

static void test_engine_forget_holds_nothing_and_joins_again(void **state)
{
    (void)state;
    struct fleet *fleet = fleet_new();
    worker_start(fleet);
    worker_start(fleet);
    set_trigger(fleet, TRIGGER_VOTE, 1, 3);
    start(fleet, 3);
    wait_revoked(fleet);
    assert_int_equal(mu_engine_forget(fleet->workers[1].engine), MU_OK);
    forget_held(&fleet->workers[1]);
    fleet->workers[1].incarnation = mu_id_random();
    set_trigger(fleet, TRIGGER_NONE, 0, 0);
    start(fleet, 3);
    check_finished(fleet);
    fleet_free(fleet);
}

static void test_engine_stale_state_stays_until_the_new_one_is_complete(void **state)
{
    (void)state;
    struct fleet *fleet = fleet_new();
    worker_start(fleet);
    worker_start(fleet);
    set_trigger(fleet, TRIGGER_APPLIED, 1, 1);
    start(fleet, 3);
    wait_revoked(fleet);
    set_trigger(fleet, TRIGGER_NONE, 0, 0);
    /* Worker 1 is left behind at an old step while worker 0 goes on alone, then comes back. */
    fleet->command = (struct command){.number = 0};
    assign(fleet, 1);
    fleet->command = (struct command){.number = 1, .not_before_step = 4, .park = true};
    next_event(&fleet->workers[0], 1u << MU_WE_PREPARED);
    assert_int_equal(mu_engine_run(fleet->workers[0].engine, fleet->generation), MU_OK);
    assert_int_equal(wait_parked(fleet, NULL), MU_PARK_COMMAND);
    assert_true(held_of(&fleet->workers[1]).has_state && held_of(&fleet->workers[1]).step < 4);
    start(fleet, 3);
    check_finished(fleet);
    fleet_free(fleet);
}

static void test_engine_assignment_that_contradicts_what_is_held_is_refused(void **state)
{
    (void)state;
    struct fleet *fleet = fleet_new();
    worker_start(fleet);
    struct worker *worker = &fleet->workers[0];
    struct mu_layout alone = make_layout(1, 1, 1, 0, false, fleet->spec.model.layers);
    struct mu_assign a = {.layout = alone, .start_step = 3, .source = MU_SOURCE_HELD};
    assert_int_equal(mu_engine_prepare(worker->engine, 1, worker->incarnation, &a), MU_OK);
    const struct mu_worker_event *event = next_event(worker, 1u << MU_WE_PREPARED | 1u << MU_WE_PARKED);
    assert_int_equal(event->kind, MU_WE_PARKED);
    assert_int_equal(event->parked.reason, MU_PARK_PREPARE);
    assert_non_null(strstr(event->parked.text, "holds"));
    a = (struct mu_assign){.layout = alone, .start_step = 3, .source = MU_SOURCE_ROLL_FORWARD};
    assert_int_equal(mu_engine_prepare(worker->engine, 2, worker->incarnation, &a), MU_OK);
    event = next_event(worker, 1u << MU_WE_PREPARED | 1u << MU_WE_PARKED);
    assert_int_equal(event->kind, MU_WE_PARKED);
    a = (struct mu_assign){.layout = alone, .start_step = 7, .source = MU_SOURCE_INIT};
    assert_int_equal(mu_engine_prepare(worker->engine, 3, worker->incarnation, &a), MU_OK);
    event = next_event(worker, 1u << MU_WE_PREPARED | 1u << MU_WE_PARKED);
    assert_int_equal(event->kind, MU_WE_PARKED);
    assert_non_null(strstr(event->parked.text, "the job ends at 6"));
    /* Said twice, run starts once; said for another generation, never. */
    fleet->generation = 3;
    assign(fleet, 1);
    next_event(worker, 1u << MU_WE_PREPARED);
    assert_int_equal(mu_engine_run(worker->engine, fleet->generation + 1), MU_OK);
    assert_int_equal(mu_engine_run(worker->engine, fleet->generation), MU_OK);
    assert_int_equal(mu_engine_run(worker->engine, fleet->generation), MU_OK);
    check_finished(fleet);
    assert_int_equal(fleet->applied[0], 1);
    fleet_free(fleet);
}

static void test_engine_load_failures_are_one_clear_line(void **state)
{
    (void)state;
    struct fleet *fleet = fleet_new();
    worker_start(fleet);
    struct worker *worker = &fleet->workers[0];
    struct mu_job_spec bad = fleet->spec;
    snprintf(bad.data.path, sizeof bad.data.path, "%s/missing", fleet->dir);
    assert_int_equal(mu_engine_load(worker->engine, &bad, (struct mu_id){2, 2}), MU_OK);
    assert_int_not_equal(next_event(worker, 1u << MU_WE_JOB_LOADED)->job_loaded.status, MU_OK);
    assert_non_null(strstr(worker->text, "missing"));
    bad = fleet->spec;
    bad.data.holdout = 0.001;
    assert_int_equal(mu_engine_load(worker->engine, &bad, (struct mu_id){3, 3}), MU_OK);
    assert_int_not_equal(next_event(worker, 1u << MU_WE_JOB_LOADED)->job_loaded.status, MU_OK);
    assert_non_null(strstr(worker->text, "eval.every"));
    /* An assignment without a job is refused, and a good load works afterwards. */
    struct mu_assign a = {.layout = make_layout(1, 1, 1, 0, false, 2), .source = MU_SOURCE_INIT};
    assert_int_equal(mu_engine_prepare(worker->engine, 1, worker->incarnation, &a), MU_OK);
    assert_int_equal(next_event(worker, 1u << MU_WE_PARKED)->parked.reason, MU_PARK_PREPARE);
    assert_int_equal(mu_engine_load(worker->engine, &fleet->spec, (struct mu_id){1, 1}), MU_OK);
    assert_int_equal(next_event(worker, 1u << MU_WE_JOB_LOADED)->job_loaded.status, MU_OK);
    fleet->generation = 1;
    start(fleet, 1);
    check_finished(fleet);
    fleet_free(fleet);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_engine_reference_learns),
        cmocka_unit_test(test_engine_reference_has_the_pinned_weights),
        cmocka_unit_test(test_engine_any_world_same_bits),
        cmocka_unit_test(test_engine_any_thread_count_same_bits),
        cmocka_unit_test(test_engine_uneven_leaves_same_bits),
        cmocka_unit_test(test_engine_abort_anywhere_then_same_bits),
        cmocka_unit_test(test_engine_abort_is_answered_fast_when_parked_and_when_waiting),
        cmocka_unit_test(test_engine_grow_and_shrink_at_commands_same_bits),
        cmocka_unit_test(test_engine_forget_holds_nothing_and_joins_again),
        cmocka_unit_test(test_engine_stale_state_stays_until_the_new_one_is_complete),
        cmocka_unit_test(test_engine_assignment_that_contradicts_what_is_held_is_refused),
        cmocka_unit_test(test_engine_load_failures_are_one_clear_line),
    };
    return cmocka_run_group_tests(tests, setup_reference, NULL);
}
