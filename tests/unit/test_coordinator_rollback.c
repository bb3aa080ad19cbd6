/* links: mu_coordinator mu_worker_core mu_wire mu_plan */
/* Rolling back and branching, as the coordinator alone sees it: which checkpoints stay, what of workers counts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "core_testing.h"

enum { STEPS = 1000 };

static struct mu_coord_event request(struct box *box, enum mu_coord_event_kind kind)
{
    struct mu_coord_event event = {.kind = kind};
    event.request.cookie = 5;
    event.request.job = box->name;
    event.request.reason = "test";
    event.request.by = "somebody";
    event.request.path = "";
    return event;
}

static void expect(struct box *box, struct mu_coord_event event, enum mu_status status)
{
    box_step(box, &event);
    if (box->reply != status)
        fail_msg("status %d: %s", (int)box->reply, box->reply_text);
    box_settle(box);
}

/* "1c 2v 3d ": committed, void, being deleted. */
static void expect_list(struct box *box, const char *job, const char *wanted)
{
    static const char letters[] = {'i', 'c', 'd', 'b', 'v'};
    char text[256] = "";
    struct mu_checkpoint_record record;
    for (uint32_t i = 0; mu_coord_checkpoint_view(box->coord, job, i, &record); i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%u%c ", (unsigned)record.number,
                 letters[record.state]);
    assert_string_equal(text, wanted);
}

static void restart(struct box *box)
{
    box_kill_coord(box);
    box_start_coord(box);
    box_advance(box, 2500);
}

static void roll_back(struct box *box, uint64_t checkpoint, enum mu_status status)
{
    const struct mu_amendment amendment = {
        .fields = MU_AMEND_ROLL_BACK | MU_AMEND_LR, .terms.lr = 0.001, .back.checkpoint = checkpoint};
    struct mu_coord_event event = request(box, MU_CE_AMEND);
    event.request.amendment = &amendment;
    expect(box, event, status);
}

static struct mu_coord_event branch_of(struct box *box, uint64_t checkpoint, const char *name)
{
    struct mu_coord_event event = request(box, MU_CE_BRANCH);
    event.request.new_job = name;
    event.request.checkpoint = checkpoint;
    return event;
}

static void test_what_is_borrowed_is_kept_until_the_branch_ends(void **state)
{
    (void)state;
    static struct box box;
    box_begin(&box, 1);
    box_save(&box);
    expect(&box, branch_of(&box, 1, "twin"), MU_OK);
    expect_list(&box, "twin", "1c ");
    for (int i = 0; i < 3; i++)
        box_save(&box);
    expect_list(&box, box.name, "1c 4c ");
    restart(&box);
    assert_true(box_train(&box, STEPS));
    box_save(&box);
    expect_list(&box, box.name, "1c 5c ");
    expect_list(&box, "twin", "1c ");
    uint32_t deletes = box.deletes;
    struct mu_coord_event cancel = request(&box, MU_CE_CANCEL);
    cancel.request.job = "twin";
    expect(&box, cancel, MU_OK);
    expect_list(&box, "twin", "");
    expect_list(&box, box.name, "5c ");
    assert_int_equal(box.deletes, deletes + 1);
    box_fini(&box);
}

/* A worker that has prepared the job and computes otherwise than the box's own. True: it was let in. */
static bool offer(struct box *box, const char *name, uint64_t numeric, uint64_t data)
{
    static uint64_t session = 1000;
    struct mu_job_view view;
    struct mu_worker_message hello = {.kind = MU_WM_HELLO};
    assert_true(mu_coord_job_find(box->coord, name, &view));
    hello.hello.protocol_version = MU_PROTOCOL_VERSION;
    hello.hello.incarnation = (struct mu_id){.high = 5, .low = ++session};
    snprintf(hello.hello.job, sizeof hello.hello.job, "%s", name);
    snprintf(hello.hello.name, sizeof hello.hello.name, "w%u", (unsigned)session);
    strcpy(hello.hello.host, "there");
    strcpy(hello.hello.address, "10.0.0.9:4000");
    hello.hello.prepared_job = true;
    hello.hello.job_uid = view.record.uid;
    hello.hello.numeric_identity = (struct mu_hash128){.high = 1, .low = numeric};
    hello.hello.data_hash = (struct mu_hash128){.high = 3, .low = data};
    box->reject.seen = false;
    box_step(box, &(struct mu_coord_event){.kind = MU_CE_MESSAGE, .message = {.session = session, .message = &hello}});
    return !box->reject.seen;
}

static void test_a_rebased_job_is_bound_by_its_first_worker(void **state)
{
    (void)state;
    static struct box box;
    struct mu_job_view view;
    box_begin(&box, 1);
    box_save(&box);
    expect(&box, branch_of(&box, 1, "twin"), MU_OK);
    struct mu_coord_event rebase = branch_of(&box, 1, "moved");
    rebase.request.rebase = true;
    expect(&box, rebase, MU_OK);
    restart(&box);
    assert_false(offer(&box, "twin", 9, 4)); /* a branch keeps its origin's identity */
    assert_int_equal(box.reject.reason, MU_REJECT_IDENTITY);
    rebase.request.job = "moved"; /* none yet to leave */
    rebase.request.new_job = "again";
    expect(&box, rebase, MU_ERR_INVALID);
    assert_false(offer(&box, "moved", 9, 5));
    assert_non_null(strstr(box.reject.text, "content hash"));
    assert_true(offer(&box, "moved", 9, 4));
    assert_true(box_said(&box, "under numeric identity 00000000000000010000000000000009"));
    restart(&box);
    assert_false(offer(&box, "moved", 2, 4)); /* its origin's, which no longer counts */
    assert_true(offer(&box, "moved", 9, 4));
    assert_true(mu_coord_job_find(box.coord, "moved", &view));
    assert_true(view.record.origin.rebased && view.record.origin.rebased_from.low == 2);
    assert_string_equal(view.record.origin.rebased_by, "somebody");
    box_fini(&box);
}

static enum mu_compute compute_of(struct box *box, const char *name)
{
    struct mu_job_view view;
    assert_true(mu_coord_job_find(box->coord, name, &view));
    return view.record.spec.compute;
}

static void test_only_a_rebase_may_compute_in_another_type(void **state)
{
    (void)state;
    static struct box box;
    box_begin(&box, 1);
    box_save(&box);
    struct mu_coord_event change = branch_of(&box, 1, "twin");
    change.request.compute = MU_COMPUTE_BF16;
    expect(&box, change, MU_ERR_INVALID);
    assert_non_null(strstr(box.reply_text, "compute: is not allowed in a branch"));
    change.request.rebase = true;
    change.request.compute = 7;
    expect(&box, change, MU_ERR_INVALID);
    assert_non_null(strstr(box.reply_text, "compute: value 7 is not allowed: fp32 or bf16"));
    change.request.compute = MU_COMPUTE_BF16;
    expect(&box, change, MU_OK);
    assert_true(box_said(&box, "first worker, in bf16"));
    restart(&box);
    assert_int_equal(compute_of(&box, "twin"), MU_COMPUTE_BF16);
    assert_int_equal(compute_of(&box, box.name), MU_COMPUTE_FP32);
    change = branch_of(&box, 1, "same");
    change.request.rebase = true;
    expect(&box, change, MU_OK);
    assert_int_equal(compute_of(&box, "same"), MU_COMPUTE_FP32);
    box_fini(&box);
}

static void test_a_branch_outlives_its_origin(void **state)
{
    (void)state;
    static struct box box;
    struct mu_job_spec spec;
    box_begin(&box, 3);
    box_save(&box);
    expect(&box, request(&box, MU_CE_CANCEL), MU_OK);
    expect(&box, branch_of(&box, 1, "twin"), MU_OK);
    uint32_t deletes = box.deletes;
    box_spec(&spec, 1, 1);
    strcpy(spec.checkpoint.path, "/elsewhere");
    struct mu_coord_event submit = {.kind = MU_CE_SUBMIT, .submit = {.cookie = 9, .spec = &spec}};
    expect(&box, submit, MU_OK); /* another job of the origin's name */
    expect_list(&box, box.name, "");
    expect_list(&box, "twin", "1c ");
    struct mu_coord_event cancel = request(&box, MU_CE_CANCEL);
    cancel.request.job = "twin";
    expect(&box, cancel, MU_OK);
    assert_int_equal(box.deletes, deletes); /* its files belong to nobody here */
    box_fini(&box);
}

static void test_a_branch_of_a_branch_borrows_from_the_first(void **state)
{
    (void)state;
    static struct box box;
    box_begin(&box, 1);
    box_save(&box);
    expect(&box, branch_of(&box, 1, "twin"), MU_OK);
    struct mu_coord_event again = branch_of(&box, 1, "third");
    again.request.job = "twin";
    expect(&box, again, MU_OK);
    struct mu_coord_event cancel = request(&box, MU_CE_CANCEL);
    cancel.request.job = "twin";
    expect(&box, cancel, MU_OK);
    box_save(&box);
    expect_list(&box, box.name, "1c 2c ");
    cancel.request.job = "third";
    expect(&box, cancel, MU_OK);
    expect_list(&box, box.name, "2c ");
    box_fini(&box);
}

static void test_later_checkpoints_are_void_and_go_with_the_next_generation(void **state)
{
    (void)state;
    static struct box box;
    box_begin(&box, 10);
    for (int i = 0; i < 3; i++)
        box_save(&box);
    struct mu_checkpoint_record first;
    assert_true(mu_coord_checkpoint_view(box.coord, box.name, 0, &first));
    expect(&box, branch_of(&box, 3, "twin"), MU_OK);
    box.workers[0].hold_prepared = true;
    uint32_t deletes = box.deletes;
    roll_back(&box, 1, MU_OK);
    expect_list(&box, box.name, "1c 2v 3v ");
    assert_int_equal(box_view(&box).steps_done, first.step);
    roll_back(&box, 2, MU_ERR_NOT_FOUND);
    box_kill_coord(&box); /* in the middle: nobody steps, nothing is deleted */
    box.workers[0].hold_prepared = false;
    box_start_coord(&box);
    expect_list(&box, box.name, "1c 2v 3v ");
    assert_int_equal(box.deletes, deletes);
    box_advance(&box, 3000);
    expect_list(&box, box.name, "1c 3v "); /* that one is borrowed */
    assert_true(box_said(&box, "rolled back to checkpoint 1"));
    assert_int_equal(box_view(&box).phase, MU_JP_STEPPING);
    assert_true(box_train(&box, STEPS));
    struct mu_coord_event cancel = request(&box, MU_CE_CANCEL);
    cancel.request.job = "twin";
    expect(&box, cancel, MU_OK);
    expect_list(&box, box.name, "1c ");
    box_save(&box);
    expect_list(&box, box.name, "1c 4c ");
    box_fini(&box);
}

static void test_an_open_checkpoint_is_given_up(void **state)
{
    (void)state;
    static struct box box;
    box_begin(&box, 10);
    box_save(&box);
    box.workers[0].hold_pieces = true;
    expect(&box, request(&box, MU_CE_CHECKPOINT), MU_OK);
    assert_true(box_train(&box, 100));
    roll_back(&box, 1, MU_OK);
    box_advance(&box, 1000);
    expect_list(&box, box.name, "1c ");
    box.workers[0].hold_pieces = false;
    box_save(&box);
    box_fini(&box);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_borrowed_is_kept_until_the_branch_ends),
        cmocka_unit_test(test_a_rebased_job_is_bound_by_its_first_worker),
        cmocka_unit_test(test_only_a_rebase_may_compute_in_another_type),
        cmocka_unit_test(test_a_branch_outlives_its_origin),
        cmocka_unit_test(test_a_branch_of_a_branch_borrows_from_the_first),
        cmocka_unit_test(test_later_checkpoints_are_void_and_go_with_the_next_generation),
        cmocka_unit_test(test_an_open_checkpoint_is_given_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
