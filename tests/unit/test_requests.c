/* links: mu_coordinator mu_worker_core mu_wire mu_plan */
/* Changes by operators: made once, refused on another revision, scaling. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "core_testing.h"

static void spec_of(struct mu_job_spec *spec)
{
    box_spec(spec, 1, 1);
    strcpy(spec->checkpoint.path, "/ckpt");
}

static void start_box(struct box *box, uint32_t workers)
{
    struct mu_job_spec spec;
    spec_of(&spec);
    box_init(box, &spec);
    for (uint32_t i = 0; i < workers; i++)
        box_add_worker(box, i);
    box_settle(box);
    box_advance(box, 300);
}

static struct mu_coord_event request(struct box *box, enum mu_coord_event_kind kind, uint64_t id)
{
    struct mu_coord_event event = {.kind = kind, .once = {.id = {.low = id}, .body = {.low = id}}};
    event.request.cookie = 6;
    event.request.job = box->name;
    event.request.reason = "test";
    return event;
}

static void expect_reply(struct box *box, struct mu_coord_event event, enum mu_status status, enum mu_reason reason)
{
    box_step(box, &event);
    if (box->reply != status || box->reply_reason != reason)
        fail_msg("status %d, reason %d: %s", (int)box->reply, (int)box->reply_reason, box->reply_text);
    box_settle(box);
}

static void restart(struct box *box)
{
    box_kill_coord(box);
    box_start_coord(box);
    box_advance(box, 2500);
}

static void test_a_checkpoint_is_ordered_once_by_its_id_also_over_a_restart(void **state)
{
    (void)state;
    static struct box box;
    start_box(&box, 2);
    assert_true(box_train(&box, 1000));
    box.workers[0].hold_pieces = true; /* it stays under way */
    expect_reply(&box, request(&box, MU_CE_CHECKPOINT, 7), MU_OK, MU_REASON_NONE);
    uint64_t number = box.reply_checkpoint;
    assert_true(number > 0);
    expect_reply(&box, request(&box, MU_CE_CHECKPOINT, 8), MU_ERR_CONFLICT, MU_REASON_CHECKPOINT_UNDER_WAY);
    for (int round = 0; round < 2; round++) {
        expect_reply(&box, request(&box, MU_CE_CHECKPOINT, 7), MU_OK, MU_REASON_NONE);
        assert_int_equal(box.reply_checkpoint, number);
        restart(&box);
    }
    struct mu_coord_event other = request(&box, MU_CE_CHECKPOINT, 7);
    other.once.body.high = 1;
    expect_reply(&box, other, MU_ERR_INVALID, MU_REASON_REQUEST_ID_REUSED);
    box_fini(&box);
}

static void test_a_repeated_cancel_spares_the_next_job_of_that_name(void **state)
{
    (void)state;
    static struct box box;
    struct mu_job_spec spec;
    start_box(&box, 0);
    spec_of(&spec);
    expect_reply(&box, request(&box, MU_CE_CANCEL, 1), MU_OK, MU_REASON_NONE);
    struct mu_coord_event submit = {
        .kind = MU_CE_SUBMIT, .once = {.id = {.low = 2}}, .submit = {.cookie = 9, .spec = &spec}};
    expect_reply(&box, submit, MU_OK, MU_REASON_NONE);
    struct mu_id uid = box_view(&box).record.uid;
    expect_reply(&box, request(&box, MU_CE_CANCEL, 1), MU_OK, MU_REASON_NONE);
    expect_reply(&box, submit, MU_OK, MU_REASON_NONE);
    assert_int_equal(box_view(&box).record.state, MU_JOB_PENDING);
    assert_true(mu_id_equal(box_view(&box).record.uid, uid));
    box_fini(&box);
}

/* What was refused may succeed later, and only then is it remembered. */
static void test_a_refused_request_is_judged_anew(void **state)
{
    (void)state;
    static struct box box;
    start_box(&box, 0);
    expect_reply(&box, request(&box, MU_CE_CHECKPOINT, 3), MU_ERR_CONFLICT, MU_REASON_JOB_NOT_STEPPING);
    box_add_worker(&box, 0);
    box_settle(&box);
    box_advance(&box, 300);
    assert_true(box_train(&box, 1000));
    expect_reply(&box, request(&box, MU_CE_CHECKPOINT, 3), MU_OK, MU_REASON_NONE);
    box_fini(&box);
}

static void test_the_newest_changes_are_remembered(void **state)
{
    (void)state;
    static struct box box;
    start_box(&box, 0);
    struct mu_coord_event scale = request(&box, MU_CE_SCALE, 0);
    scale.request.workers.spares = UINT32_MAX;
    for (uint64_t id = 1; id <= MU_REQUESTS_KEPT + 2; id++) {
        scale.once = (struct mu_coord_once){.id = {.low = id}, .body = {.low = id}};
        scale.request.workers.max = (uint32_t)id + 1;
        expect_reply(&box, scale, MU_OK, MU_REASON_NONE);
    }
    restart(&box);
    uint32_t now = box_view(&box).record.spec.workers.max;
    for (uint64_t id = 3; id <= MU_REQUESTS_KEPT + 2; id += MU_REQUESTS_KEPT - 1) {
        scale.once.id.low = scale.once.body.low = id;
        expect_reply(&box, scale, MU_OK, MU_REASON_NONE);
        assert_int_equal(box_view(&box).record.spec.workers.max, now);
    }
    scale.request.workers.max = 5;
    scale.once.id.low = scale.once.body.low = 2; /* forgotten: made again */
    expect_reply(&box, scale, MU_OK, MU_REASON_NONE);
    assert_int_equal(box_view(&box).record.spec.workers.max, 5);
    box_fini(&box);
}

static void test_a_change_of_another_revision_is_refused(void **state)
{
    (void)state;
    static struct box box;
    struct mu_job_spec spec;
    start_box(&box, 0);
    uint64_t revision = box_view(&box).record.revision;
    struct mu_coord_event scale = request(&box, MU_CE_SCALE, 0), cancel = request(&box, MU_CE_CANCEL, 0);
    scale.request.workers = (struct mu_worker_policy){.max = 3, .spares = 0};
    scale.expected_revision = cancel.expected_revision = revision;
    expect_reply(&box, scale, MU_OK, MU_REASON_NONE);
    assert_true(box_view(&box).record.revision > revision);
    expect_reply(&box, cancel, MU_ERR_STALE, MU_REASON_REVISION_CHANGED);
    assert_int_equal(box.reply_value, box_view(&box).record.revision);
    restart(&box);
    cancel.expected_revision = box.reply_value;
    expect_reply(&box, cancel, MU_OK, MU_REASON_NONE);
    spec_of(&spec);
    struct mu_coord_event submit = {
        .kind = MU_CE_SUBMIT, .expected_revision = box.reply_value, .submit = {.cookie = 9, .spec = &spec}};
    submit.expected_revision = revision;
    expect_reply(&box, submit, MU_ERR_STALE, MU_REASON_REVISION_CHANGED);
    submit.expected_revision = box_view(&box).record.revision;
    expect_reply(&box, submit, MU_OK, MU_REASON_NONE);
    strcpy(spec.name, "none");
    expect_reply(&box, submit, MU_ERR_STALE, MU_REASON_REVISION_CHANGED);
    assert_non_null(strstr(box.reply_text, "there is no job 'none' any more"));
    box_fini(&box);
}

static void scale(struct box *box, uint32_t max, enum mu_status status, enum mu_reason reason)
{
    struct mu_coord_event event = request(box, MU_CE_SCALE, 0);
    event.request.workers = (struct mu_worker_policy){.max = max, .spares = UINT32_MAX};
    expect_reply(box, event, status, reason);
}

/* Trains until so many work; whoever else is there is a spare. */
static void expect_working(struct box *box, uint32_t workers)
{
    struct mu_job_view view = box_view(box);
    for (int i = 0; i < 20 && (!box_all_run(box) || mu_layout_working(&view.layout) != workers); i++) {
        box_train(box, 1000);
        box_advance(box, 300);
        view = box_view(box);
    }
    assert_int_equal(view.phase, MU_JP_STEPPING);
    assert_int_equal(mu_layout_working(&view.layout), workers);
}

static void test_a_job_is_scaled_down_and_up_and_keeps_it_over_a_restart(void **state)
{
    (void)state;
    static struct box box;
    struct mu_job_spec spec;
    start_box(&box, 4);
    assert_true(box_train(&box, 1000));
    scale(&box, 2, MU_OK, MU_REASON_NONE);
    assert_true(box_said(&box, "scaled to 1 to 2 workers"));
    expect_working(&box, 2);
    assert_int_equal(box_view(&box).spares, 2);
    box_kill_worker(&box, 0);
    box_advance(&box, 8000);
    expect_working(&box, 2); /* one of the spares, not both */
    assert_int_equal(box_view(&box).spares, 1);
    scale(&box, 3, MU_OK, MU_REASON_NONE);
    expect_working(&box, 3);
    scale(&box, 1, MU_OK, MU_REASON_NONE); /* and dies before it has acted on it */
    restart(&box);
    expect_working(&box, 1);
    uint64_t revision = box_view(&box).record.revision;
    scale(&box, 1, MU_OK, MU_REASON_NONE); /* as it is */
    scale(&box, MU_WORKERS_MAX + 1, MU_ERR_INVALID, MU_REASON_NONE);
    assert_non_null(strstr(box.reply_text, "workers.max: value 65537 is not allowed"));
    assert_int_equal(box_view(&box).record.revision, revision);
    spec_of(&spec); /* the job file is unchanged, so it is the same job */
    struct mu_coord_event submit = {.kind = MU_CE_SUBMIT, .submit = {.cookie = 1, .spec = &spec}};
    expect_reply(&box, submit, MU_OK, MU_REASON_NONE);
    assert_int_equal(box_view(&box).record.spec.workers.max, 1);
    box_fini(&box);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_checkpoint_is_ordered_once_by_its_id_also_over_a_restart),
        cmocka_unit_test(test_a_repeated_cancel_spares_the_next_job_of_that_name),
        cmocka_unit_test(test_a_refused_request_is_judged_anew),
        cmocka_unit_test(test_the_newest_changes_are_remembered),
        cmocka_unit_test(test_a_change_of_another_revision_is_refused),
        cmocka_unit_test(test_a_job_is_scaled_down_and_up_and_keeps_it_over_a_restart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
