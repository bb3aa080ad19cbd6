/* links: mu_coordinator mu_worker_core mu_wire mu_plan */
/* What supervisors tell of the ends of processes: who is lost by it, and what the answer grants. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

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

/* The process is gone; its stream stays as it is, for the coordinator. */
static struct mu_id die(struct box *box, uint32_t index)
{
    struct mu_id incarnation = box->workers[index].incarnation;
    mu_worker_free(box->workers[index].core);
    box->workers[index] = (struct box_worker){.exit_code = -1};
    return incarnation;
}

static struct mu_process_exit killed(const char *worker, struct mu_id incarnation)
{
    return (struct mu_process_exit){.job = "job",
                                    .worker = worker,
                                    .host = "host",
                                    .incarnation = incarnation,
                                    .pid = 77,
                                    .signal = 9,
                                    .text = "was killed by signal 9 (SIGKILL)"};
}

static enum mu_exit_verdict tell(struct box *box, struct mu_process_exit exit)
{
    box->reply = MU_ERR_INTERNAL;
    box_step(box, &(struct mu_coord_event){.kind = MU_CE_EXITED, .exited = {.cookie = 9, .exit = exit}});
    assert_int_equal(box->reply, MU_OK);
    box_settle(box);
    return box->whole_reply.verdict;
}

static bool is_lost(struct box *box, const char *name)
{
    struct mu_worker_view view;
    for (uint32_t slot = 0; slot < mu_coord_worker_slots(box->coord); slot++) {
        if (mu_coord_worker_view(box->coord, slot, &view) && strcmp(view.name, name) == 0)
            return view.state == MU_WS_LOST;
    }
    return true;
}

static void test_a_member_that_its_supervisor_buried_is_lost_at_once(void **state)
{
    (void)state;
    struct box box;
    begin(&box, 3);
    struct mu_id incarnation = die(&box, 2);
    uint64_t before_us = box.now_us, generation = box_view(&box).generation;
    assert_int_equal(tell(&box, killed("w2", incarnation)), MU_EXIT_START_AGAIN);
    assert_int_equal(box.now_us, before_us); /* its stream was open, no grace has passed */
    assert_true(box_said(&box, "worker_lost: worker w2 lost (was killed by signal 9 (SIGKILL), says its supervisor)"));
    assert_true(box_said(&box, "worker_exited: worker w2 on host (pid 77) was killed by signal 9 (SIGKILL); it is "
                               "started again"));
    assert_int_equal(box_view(&box).workers_lost, 1);
    box_advance(&box, 200);
    assert_true(box_view(&box).generation > generation);
    assert_true(box_train(&box, STEPS));
    assert_false(is_lost(&box, "w0") || is_lost(&box, "w1"));
    box_fini(&box);
}

static void test_a_reset_and_a_supervisors_word_count_one_death(void **state)
{
    (void)state;
    struct box box;
    begin(&box, 3);
    struct mu_id incarnation = box.workers[2].incarnation;
    box_kill_worker(&box, 2); /* its stream is reset first */
    assert_false(is_lost(&box, "w2"));
    assert_int_equal(tell(&box, killed("w2", incarnation)), MU_EXIT_START_AGAIN);
    assert_true(is_lost(&box, "w2"));
    assert_int_equal(box.whole_reply.after_ms, 0);
    assert_int_equal(tell(&box, killed("w2", incarnation)), MU_EXIT_START_AGAIN); /* the answer was lost */
    assert_int_equal(box.whole_reply.after_ms, 0);                                /* still the first death */
    assert_int_equal(box_view(&box).workers_lost, 1);
    box_fini(&box);
}

static void test_an_old_process_of_a_name_takes_nobody_away(void **state)
{
    (void)state;
    struct box box;
    begin(&box, 3);
    struct mu_id old = box.workers[2].incarnation;
    box_kill_worker(&box, 2);
    box_advance(&box, 2000);
    box_add_worker(&box, 2);
    box_settle(&box);
    box_advance(&box, 500);
    assert_false(is_lost(&box, "w2"));
    tell(&box, killed("w2", old));
    tell(&box, killed("w2", (struct mu_id){0})); /* one that died before it had an identity */
    tell(&box, killed("w2", (struct mu_id){.high = 3, .low = 4}));
    assert_false(is_lost(&box, "w2"));
    assert_true(box_train(&box, STEPS));
    box_fini(&box);
}

static void test_deaths_before_attaching_count_and_slow_restarts_down(void **state)
{
    (void)state;
    struct box box;
    begin(&box, 1);
    for (uint32_t i = 0; i < box.config.crash_limit; i++) {
        assert_int_equal(tell(&box, killed("early", (struct mu_id){.high = 5, .low = i})), MU_EXIT_START_AGAIN);
        assert_int_equal(box.whole_reply.after_ms, 1000 * i);
    }
    assert_int_equal(tell(&box, killed("early", (struct mu_id){.high = 5, .low = 100})), MU_EXIT_ASK_AGAIN);
    assert_true(box_said(&box, "worker_quarantined: worker early quarantined (lost 6 times within 600 s"));
    assert_true(strstr(box.reply_text, "muster undrain early"));
    struct mu_process_exit again = killed("early", (struct mu_id){.high = 5, .low = 100});
    again.again = true;
    size_t said = strlen(box.events);
    assert_int_equal(tell(&box, again), MU_EXIT_ASK_AGAIN);
    assert_int_equal(strlen(box.events), said); /* asking again is no news */
    struct mu_coord_event undrain = {.kind = MU_CE_UNDRAIN};
    undrain.request.worker = "early";
    box_step(&box, &undrain);
    assert_int_equal(tell(&box, again), MU_EXIT_START_AGAIN);
    box_fini(&box);
}

/* A revoked generation ends only now. */
static void park(struct box *box, uint32_t index)
{
    struct mu_worker_event parked = box_parked(&box->workers[index], MU_PARK_REVOKED);
    if (box->workers[index].is_parking)
        box_engine_later(box, index, &parked);
    box->workers[index].is_parking = false;
    box_settle(box);
}

/* It holds the state, cannot prepare the next generation, and is back before the other one has parked, who needs
 * nothing of it. */
static void test_others_go_on_without_one_that_can_never_prepare(void **state)
{
    (void)state;
    struct box box;
    begin(&box, 3);
    box.workers[2].has_no_room = true;
    box.workers[0].slow_to_park = true;
    tell(&box, killed("w1", die(&box, 1)));
    uint64_t steps = box_view(&box).steps_done, stood_ms = 0;
    for (int i = 0; i < 1000 && box.workers[2].exit_code < 0; i++) {
        stood_ms = box_train(&box, STEPS) ? 0 : stood_ms + 50;
        box_advance(&box, 50);
        if (stood_ms % 500 == 0)
            park(&box, 0);
        assert_true(stood_ms <= 1000 + 2 * box.config.settle_ms);
    }
    assert_int_equal(box.workers[2].exit_code, 1);
    assert_true(box_said(&box, "worker_lost: worker w2 lost (the accelerator has no room)"));
    assert_true(box_said(&box, "worker_quarantined: worker w2 quarantined (lost 6 times within 600 s"));
    assert_false(box_said(&box, "worker_returned"));
    assert_int_equal(box_view(&box).workers_lost, box.config.crash_limit + 2);
    assert_true(box_view(&box).steps_done > steps);
    assert_true(box_train(&box, STEPS));
    box_fini(&box);
}

/* The only copy is taken back from whoever has it, quarantined or not. */
static void test_the_only_copy_is_taken_back_from_one_that_cannot_prepare(void **state)
{
    (void)state;
    struct box box;
    begin(&box, 2);
    box.workers[0].has_no_room = true;
    box_kill_worker(&box, 1); /* the next generation is the other one's alone */
    for (int i = 0; i < 1000 && !box_said(&box, "worker_quarantined: worker w0"); i++)
        box_advance(&box, 100);
    assert_true(box_said(&box, "worker_quarantined: worker w0"));
    box_advance(&box, 1000);
    assert_true(box_said(&box, "worker_returned: worker w0 came back with the only copy of step"));
    uint64_t held = box.workers[0].held.step;
    assert_true(held > 0);
    box.workers[0].has_no_room = false;
    box_advance(&box, 64 * box.config.settle_ms + 2000);
    assert_true(box_all_run(&box));
    assert_int_equal(box.workers[0].start_step, held);
    box_fini(&box);
}

static void test_who_was_refused_or_left_stays_away(void **state)
{
    (void)state;
    struct box box;
    begin(&box, 2);
    struct mu_process_exit exit = killed("other", (struct mu_id){.high = 5, .low = 5});
    exit.signal = 0;
    exit.code = 1;
    exit.text = "exited with code 1: data differ";
    assert_int_equal(tell(&box, exit), MU_EXIT_STAY_AWAY);
    assert_true(box_said(&box, "worker_exited: worker other on host (pid 77) exited with code 1: data differ; it "
                               "stays away"));
    size_t said = strlen(box.events);
    exit.code = 0;
    exit.text = "exited with code 0";
    assert_int_equal(tell(&box, exit), MU_EXIT_STAY_AWAY);
    assert_int_equal(strlen(box.events), said); /* in good order: nothing to tell */
    box_fini(&box);
}

static void test_a_drained_one_comes_back_when_it_is_undrained(void **state)
{
    (void)state;
    struct box box;
    begin(&box, 3);
    struct mu_id incarnation = box.workers[2].incarnation;
    struct mu_coord_event drain = {.kind = MU_CE_DRAIN};
    drain.request.worker = "w2";
    drain.request.reason = "new fan";
    box_step(&box, &drain);
    for (int i = 0; i < 20 && box.workers[2].exit_code < 0; i++) {
        box_train(&box, STEPS);
        box_advance(&box, 100);
    }
    assert_int_equal(box.workers[2].exit_code, 0);
    struct mu_process_exit exit = killed("w2", incarnation);
    exit.signal = 0;
    exit.text = "exited with code 0";
    assert_int_equal(tell(&box, exit), MU_EXIT_ASK_AGAIN);
    assert_true(strstr(box.reply_text, "drained (new fan)"));
    drain.kind = MU_CE_UNDRAIN;
    box_step(&box, &drain);
    exit.again = true;
    assert_int_equal(tell(&box, exit), MU_EXIT_START_AGAIN);
    assert_int_equal(box_view(&box).workers_lost, 0);
    box_fini(&box);
}

static void test_a_member_that_died_while_the_coordinator_was_away_is_not_waited_for(void **state)
{
    (void)state;
    struct box box;
    begin(&box, 3);
    struct mu_id incarnation = die(&box, 2);
    box_kill_coord(&box);
    box_start_coord(&box);
    box_settle(&box);
    uint64_t before_us = box.now_us;
    assert_int_equal(tell(&box, killed("w2", incarnation)), MU_EXIT_START_AGAIN);
    assert_true(is_lost(&box, "w2"));
    assert_int_equal(box.now_us, before_us);
    box_fini(&box);
}

static void test_after_the_end_of_the_job_nobody_is_started(void **state)
{
    (void)state;
    struct box box;
    begin(&box, 2);
    struct mu_id incarnation = box.workers[1].incarnation;
    struct mu_coord_event cancel = {.kind = MU_CE_CANCEL};
    cancel.request.job = "job";
    cancel.request.reason = "enough";
    box_step(&box, &cancel);
    assert_int_equal(tell(&box, killed("w1", incarnation)), MU_EXIT_STAY_AWAY);
    assert_string_equal(box.reply_text, "job 'job' is over");
    assert_int_equal(box_view(&box).workers_lost, 0);
    box_fini(&box);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_member_that_its_supervisor_buried_is_lost_at_once),
        cmocka_unit_test(test_a_reset_and_a_supervisors_word_count_one_death),
        cmocka_unit_test(test_an_old_process_of_a_name_takes_nobody_away),
        cmocka_unit_test(test_deaths_before_attaching_count_and_slow_restarts_down),
        cmocka_unit_test(test_others_go_on_without_one_that_can_never_prepare),
        cmocka_unit_test(test_the_only_copy_is_taken_back_from_one_that_cannot_prepare),
        cmocka_unit_test(test_who_was_refused_or_left_stays_away),
        cmocka_unit_test(test_a_drained_one_comes_back_when_it_is_undrained),
        cmocka_unit_test(test_a_member_that_died_while_the_coordinator_was_away_is_not_waited_for),
        cmocka_unit_test(test_after_the_end_of_the_job_nobody_is_started),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
