/* links: mu_coord_core mu_worker_core mu_records mu_storage mu_wire */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "core_testing.h"

static const uint8_t probe_secret[32] = {7};

/* A job for `min` workers at least, and these that wait for it. */
static void begin(struct box *box, uint32_t min, uint32_t workers)
{
    struct mu_job_spec spec;
    box_spec(&spec, 1, 1);
    spec.workers.min = min;
    box_init(box, &spec);
    for (uint32_t i = 0; i < workers; i++)
        box_add_worker(box, i);
    box_settle(box);
}

static void hold(struct box *box, bool held)
{
    for (uint32_t i = 0; i < BOX_WORKERS_MAX; i++)
        box->workers[i].hold_probes = held;
}

static void ask(struct box *box, const char *job, bool quick, uint64_t storage_bytes)
{
    struct mu_coord_event event = {
        .kind = MU_CE_PROBE,
        .probe = {.cookie = 3, .job = job, .quick = quick, .storage_bytes = storage_bytes, .secret = probe_secret}};
    box_step(box, &event);
}

static struct mu_probe_view view_of(struct box *box)
{
    struct mu_probe_view view;
    assert_true(mu_coord_probe_view(box->coord, 0, &view));
    return view;
}

static void test_all_pairs_of_waiting_workers_are_measured(void **state)
{
    (void)state;
    static struct box box;
    struct mu_probe_view view;
    begin(&box, 8, 4);
    assert_false(mu_coord_probe_view(box.coord, 0, &view));
    ask(&box, "job", false, 1 << 20);
    assert_int_equal(box.reply, MU_OK);
    assert_true(box.whole_reply.probe == 1 && box.whole_reply.probed_workers == 4);
    view = view_of(&box);
    assert_true(view.number == 1 && !view.is_over && view.step == 1 && view.steps == 6); /* 1 + 1 + 3 + 1 */
    box_settle(&box);
    view = view_of(&box);
    assert_true(view.is_over && view.finding_count == 0 && view.step == 6);
    assert_int_equal(view.result.member_count, 4);
    assert_int_equal(view.result.link_count, 6);
    for (uint32_t i = 0; i < 4; i++) {
        const struct mu_probe_member *member = &view.result.members[i];
        assert_true(member->has_alone && !member->out && member->write_rate > 0);
        assert_int_equal(member->name[1], '0' + (char)i); /* in order of hosts and names */
        assert_int_equal(box.workers[i].probes, 6);
        assert_int_equal(box.workers[i].probe.kind, MU_PROBE_TOGETHER);
        assert_int_equal(box.workers[i].probe.world, 4);
        assert_memory_equal(box.workers[i].probe.secret, probe_secret, sizeof probe_secret);
    }
    for (uint32_t i = 0; i < 6; i++)
        assert_int_equal(view.result.links[i].state, MU_PROBE_LINK_GOOD);
    assert_true(box_said(&box, "probe_finished: probe 1 of 4 workers on 4 hosts, 6 pairs: nothing stands out"));
    assert_false(mu_coord_probe_view(box.coord, 2, &view));
    ask(&box, "", true, 0); /* once more, of all jobs, without storage */
    box_settle(&box);
    view = view_of(&box);
    assert_true(view.is_over && view.number == 2 && view.steps == 5);
    box_fini(&box);
}

static double one_slow_link(uint32_t a, uint32_t b)
{
    return a == 1 && b == 3 ? 4e6 : 1e9;
}

static void test_a_slow_link_is_told(void **state)
{
    (void)state;
    static struct box box;
    begin(&box, 8, 5);
    box.pair_rate = one_slow_link;
    ask(&box, "", true, 0);
    box_settle(&box);
    struct mu_probe_view view = view_of(&box);
    assert_true(view.is_over && view.finding_count == 1);
    assert_int_equal(view.findings[0].kind, MU_PROBE_SLOW_LINK);
    assert_true(view.findings[0].a == 1 && view.findings[0].b == 3);
    assert_true(box_said(&box, "5 workers on 5 hosts, 10 pairs: 1 thing stands out"));
    assert_true(box_said(&box, "probe_found: link w1 - w3: 4 MB/s from w1"));
    box_fini(&box);
}

/* Until the step is under way, everybody in it silent. */
static void stop_in_step(struct box *box, uint32_t step)
{
    hold(box, false);
    for (uint32_t i = 0; i < 1000 && view_of(box).step < step; i++)
        box_handle_one(box);
    hold(box, true);
    while (box_handle_one(box))
        continue;
    assert_int_equal(view_of(box).step, step);
    assert_false(view_of(box).is_over);
}

static void answer_again(struct box *box)
{
    hold(box, false);
    for (uint32_t i = 0; i < BOX_WORKERS_MAX; i++) {
        struct mu_probe_order order = box->workers[i].probe;
        if (box->workers[i].core && order.kind != 0)
            box_probe(box, i, &order);
    }
    box_settle(box);
}

static void test_a_worker_dies_in_every_step_and_the_others_go_on(void **state)
{
    (void)state;
    static struct box box;
    for (uint32_t step = 1; step <= 6; step++) {
        begin(&box, 8, 4);
        ask(&box, "", true, 1 << 20);
        stop_in_step(&box, step);
        box_kill_worker(&box, 2);
        answer_again(&box);
        struct mu_probe_view view = view_of(&box);
        assert_true(view.is_over);
        assert_int_equal(view.finding_count, 1);
        assert_true(view.findings[0].kind == MU_PROBE_OUT && view.findings[0].a == 2);
        char text[160];
        snprintf(text, sizeof text, "worker w2 on host2: left out: stream reset (step %u of 6)", step);
        assert_string_equal(view.findings[0].text, text);
        for (uint32_t i = 0; i < view.result.link_count; i++) {
            const struct mu_probe_link *link = &view.result.links[i];
            bool with_the_dead = link->a == 2 || link->b == 2;
            assert_true(with_the_dead ? link->state != MU_PROBE_LINK_FAILED : link->state == MU_PROBE_LINK_GOOD);
        }
        box_fini(&box);
    }
}

static void test_a_worker_that_hangs_is_left_out_at_the_limit(void **state)
{
    (void)state;
    static struct box box;
    begin(&box, 8, 3);
    ask(&box, "", true, 0);
    stop_in_step(&box, 2);
    hold(&box, false);
    uint32_t silent = view_of(&box).result.links[0].a; /* of the pair under way */
    box.workers[silent].hold_probes = true;
    for (uint32_t i = 0; i < 3; i++)
        if (i != silent && box.workers[i].probe.kind == MU_PROBE_PAIR)
            box_probe(&box, i,
                      &(struct mu_probe_order){.number = box.workers[i].probe.number,
                                               .kind = MU_PROBE_PAIR,
                                               .peers[0].address = "10.0.0.0:4000"});
    box_settle(&box);
    assert_false(view_of(&box).is_over); /* it is waited for */
    box_advance(&box, 26000);
    struct mu_probe_view view = view_of(&box);
    assert_true(view.is_over);
    assert_int_equal(box.workers[silent].probes_ended, 1); /* told to give up, and not asked again */
    assert_int_equal(box.workers[silent].probes, 2);
    assert_true(view.result.members[silent].out);
    assert_true(box_said(&box, "left out: it did not answer in time (step 2 of 5)"));
    box_fini(&box);
}

static void test_a_job_takes_its_workers_out_of_a_probe(void **state)
{
    (void)state;
    static struct box box;
    begin(&box, 4, 3);
    hold(&box, true);
    ask(&box, "", false, 0);
    box_settle(&box);
    box_add_worker(&box, 3); /* comes too late to be measured; now the job can begin */
    box_settle(&box);
    box_advance(&box, 200);
    assert_true(box_train(&box, 1000));
    struct mu_probe_view view = view_of(&box);
    assert_true(view.is_over);
    assert_int_equal(view.result.member_count, 3);
    assert_int_equal(box.workers[3].probes, 0);
    for (uint32_t i = 0; i < 3; i++) {
        assert_true(view.result.members[i].out);
        assert_string_equal(view.result.members[i].text, "job job gave it a rank (step 1 of 5)");
        box_probe(&box, i, &box.workers[i].probe); /* an answer that comes too late */
    }
    box_settle(&box);
    ask(&box, "", true, 0);
    assert_int_equal(box.reply, MU_ERR_CONFLICT);
    assert_non_null(strstr(box.reply_text, "none of 4 attached workers is free"));
    assert_true(box_train(&box, 1000));
    box_fini(&box);
}

static void test_what_cannot_be_probed_is_refused(void **state)
{
    (void)state;
    static struct box box;
    begin(&box, 4, 2);
    ask(&box, "nojob", true, 0);
    assert_int_equal(box.reply, MU_ERR_NOT_FOUND);
    hold(&box, true);
    ask(&box, "", true, 0);
    assert_int_equal(box.reply, MU_OK);
    ask(&box, "", true, 0);
    assert_int_equal(box.reply, MU_ERR_CONFLICT);
    assert_string_equal(box.reply_text, "probe 1 is under way: wait for it");
    box_fini(&box);
}

/* Two of four workers train on hosts 0 and 1; the two spares are on the same hosts, or on others. */
static void test_spares_are_measured_only_where_nobody_works(void **state)
{
    (void)state;
    static struct box box;
    for (uint32_t hosts = 2; hosts <= 3; hosts++) {
        struct mu_job_spec spec;
        box_spec(&spec, 1, 1);
        spec.workers.min = spec.workers.max = 2;
        box_init(&box, &spec);
        box.hosts = hosts;
        for (uint32_t i = 0; i < 2; i++)
            box_add_worker(&box, i);
        box_settle(&box);
        box_advance(&box, 200);
        assert_true(box_train(&box, 1000));
        box_add_worker(&box, 2);
        box_add_worker(&box, 3); /* with three hosts: on host 0, where w0 works */
        box_settle(&box);
        ask(&box, "", true, 0);
        assert_int_equal(box.reply, hosts == 2 ? MU_ERR_CONFLICT : MU_OK);
        box_settle(&box);
        assert_int_equal(box.workers[2].probes, hosts == 2 ? 0 : 1);
        assert_int_equal(box.workers[0].probes + box.workers[1].probes + box.workers[3].probes, 0);
        assert_true(box_train(&box, 1000));
        box_fini(&box);
    }
}

static void test_a_host_that_gets_work_is_left_alone(void **state)
{
    (void)state;
    static struct box box;
    struct mu_job_spec spec;
    box_spec(&spec, 1, 1);
    spec.workers.min = spec.workers.max = 2;
    box_init(&box, &spec);
    box.hosts = 1;
    box_add_worker(&box, 0);
    hold(&box, true);
    box_settle(&box);
    ask(&box, "", true, 0);
    struct mu_job_spec other = spec; /* nobody of it is measured, but it works on the same host */
    strcpy(other.name, "other");
    box_step(&box, &(struct mu_coord_event){.kind = MU_CE_SUBMIT, .submit = {.cookie = 1, .spec = &other}});
    strcpy(box.name, "other");
    box_add_worker(&box, 1);
    box_add_worker(&box, 2);
    box_settle(&box);
    box_advance(&box, 200);
    assert_true(box_train(&box, 1000));
    assert_true(box.workers[0].probes == 1 && box.workers[0].probes_ended == 1);
    assert_true(box_said(&box, "worker w0 on host0: left out: job other gave its host work (step 1 of 1)"));
    box_fini(&box);
}

static void test_a_spare_that_is_fed_leaves_the_probe(void **state)
{
    (void)state;
    static struct box box;
    struct mu_job_spec spec;
    box_spec(&spec, 1, 1);
    box_init(&box, &spec);
    box.feeds_work = true;
    box_add_worker(&box, 0);
    box_settle(&box);
    box_advance(&box, 200);
    assert_true(box_train(&box, 1000));
    box_add_worker(&box, 1);
    hold(&box, true);
    while (box_handle_one(&box))
        continue;
    ask(&box, "", true, 0);
    assert_int_equal(box.reply, MU_OK);
    box_settle(&box);
    box_advance(&box, 200); /* the larger world is worth it: it gets its state while the other one steps */
    assert_true(box.workers[1].feed.number != 0);
    assert_true(box_said(&box, "left out: it gets state for its next rank (step 1 of 1)"));
    assert_true(view_of(&box).is_over);
    box_fini(&box);
}

/* ---- before a job begins ---- */

static void submit_measured(struct box *box, uint32_t min)
{
    struct mu_job_spec first, spec;
    box_spec(&first, 1, 1);
    box_init(box, &first); /* another job, which nobody works for */
    box_spec(&spec, 1, 1);
    strcpy(spec.name, "measured");
    strcpy(box->name, "measured");
    spec.workers.min = min;
    box_step(box,
             &(struct mu_coord_event){.kind = MU_CE_SUBMIT, .submit = {.cookie = 1, .spec = &spec, .preflight = true}});
    assert_int_equal(box->reply, MU_OK);
}

static void test_a_job_is_measured_before_it_begins(void **state)
{
    (void)state;
    static struct box box;
    submit_measured(&box, 3);
    box.pair_rate = one_slow_link;
    for (uint32_t i = 0; i < 4; i++)
        box_add_worker(&box, i);
    box_settle(&box);
    box_advance(&box, 100);
    assert_true(view_of(&box).is_over);
    assert_int_equal(view_of(&box).result.member_count, 4);
    assert_true(box_said(&box, "probe_found: link w1 - w3: 4 MB/s from w1"));
    box_advance(&box, 100);
    assert_true(box_train(&box, 1000));
    assert_int_equal(box.workers[0].generation & 0xff, 1);
    box_kill_worker(&box, 3); /* what follows is not measured again */
    box_advance(&box, 1500);
    assert_true(box_train(&box, 1000));
    assert_int_equal(view_of(&box).number, 1);
    box_fini(&box);
}

static void test_a_job_that_is_measured_waits_and_begins_when_a_worker_dies_or_hangs(void **state)
{
    (void)state;
    static struct box box;
    submit_measured(&box, 2);
    for (uint32_t i = 0; i < 3; i++)
        box_add_worker(&box, i);
    hold(&box, true);
    box_settle(&box);
    box_advance(&box, 1000);
    assert_false(view_of(&box).is_over);
    assert_int_equal(box_view(&box).phase, MU_JP_WAITING);
    assert_string_equal(box_view(&box).waiting_text, "probe 1 is under way");
    box_kill_worker(&box, 1);
    for (uint32_t i = 0; i < 3; i++)
        box.workers[i].hold_probes = i == 0; /* that one hangs */
    box_probe(&box, 2, &box.workers[2].probe);
    box_settle(&box);
    box_advance(&box, 66000);
    assert_true(view_of(&box).is_over);
    box_advance(&box, 200);
    assert_true(box_train(&box, 1000));
    box_fini(&box);
}

static void test_a_restarted_coordinator_measures_again_before_a_job_begins(void **state)
{
    (void)state;
    static struct box box;
    submit_measured(&box, 2);
    box_add_worker(&box, 0);
    box_add_worker(&box, 1);
    hold(&box, true);
    box_settle(&box);
    box_advance(&box, 200);
    assert_false(view_of(&box).is_over);
    uint64_t before = box.workers[0].probe.number;
    box_kill_coord(&box);
    box_settle(&box);
    box_start_coord(&box);
    hold(&box, false);
    box_advance(&box, 3000);
    assert_true(box.workers[0].probe.number != before);
    assert_true(view_of(&box).is_over);
    assert_true(box_train(&box, 1000));
    box_fini(&box);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_pairs_of_waiting_workers_are_measured),
        cmocka_unit_test(test_a_slow_link_is_told),
        cmocka_unit_test(test_a_worker_dies_in_every_step_and_the_others_go_on),
        cmocka_unit_test(test_a_worker_that_hangs_is_left_out_at_the_limit),
        cmocka_unit_test(test_a_job_takes_its_workers_out_of_a_probe),
        cmocka_unit_test(test_what_cannot_be_probed_is_refused),
        cmocka_unit_test(test_spares_are_measured_only_where_nobody_works),
        cmocka_unit_test(test_a_host_that_gets_work_is_left_alone),
        cmocka_unit_test(test_a_spare_that_is_fed_leaves_the_probe),
        cmocka_unit_test(test_a_job_is_measured_before_it_begins),
        cmocka_unit_test(test_a_job_that_is_measured_waits_and_begins_when_a_worker_dies_or_hangs),
        cmocka_unit_test(test_a_restarted_coordinator_measures_again_before_a_job_begins),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
