/* links: mu_coordinator mu_worker_core mu_wire mu_plan */
/* Both cores over jobs that are cut into stages and slices: joining, losing replicas and whole stages, leaving with the
 * only copy, restarts of the coordinator at every message. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "core_testing.h"

static void add_workers(struct box *box, uint32_t first, uint32_t count)
{
    for (uint32_t i = first; i < first + count; i++)
        box_add_worker(box, i);
    box_settle(box);
    box_advance(box, 300);
}

static uint32_t member_of_rank(struct box *box, uint32_t rank)
{
    for (uint32_t i = 0; i < BOX_WORKERS_MAX; i++) {
        if (box->workers[i].core && box->workers[i].running && box->workers[i].rank == rank)
            return i;
    }
    fail_msg("nobody has rank %u", rank);
    return 0;
}

static void request(struct box *box, enum mu_coord_event_kind kind, const char *worker)
{
    struct mu_coord_event event = {.kind = kind};
    event.request.cookie = 5;
    event.request.job = box->name;
    event.request.worker = worker;
    event.request.reason = "test";
    box_step(box, &event);
    assert_int_equal(box->reply, MU_OK);
    box_settle(box);
}

/* A fresh box with a job of these degrees, and its first workers. */
static void start_box(struct box *box, uint32_t tp, uint32_t pp, const char *checkpoints, uint32_t workers)
{
    struct mu_job_spec spec;
    box_spec(&spec, tp, pp);
    strcpy(spec.checkpoint.path, checkpoints);
    box_init(box, &spec);
    add_workers(box, 0, workers);
}

static void train(struct box *box, int steps)
{
    for (int i = 0; i < steps; i++)
        assert_true(box_train(box, 1000));
}

static void forget_events(struct box *box)
{
    box->events[0] = 0;
}

/* ---- joining ---- */

static void test_four_workers_join_as_stages_and_slices(void **state)
{
    (void)state;
    static struct box box;
    start_box(&box, 2, 2, "", 3);
    struct mu_job_view view = box_view(&box);
    assert_int_equal(view.phase, MU_JP_WAITING);
    assert_non_null(strstr(view.waiting_text, "3 workers can take part, 4 are needed"));
    assert_non_null(strstr(view.waiting_text, "tp 2 x pp 2"));
    add_workers(&box, 3, 1);
    assert_true(box_all_run(&box));
    view = box_view(&box);
    assert_int_equal(view.phase, MU_JP_STEPPING);
    assert_int_equal(view.world, 4);
    assert_true(view.layout.tp == 2 && view.layout.pp == 2 && view.layout.dp == 1 && view.layout.idle == 0);
    assert_true(box_said(&box, "4 workers start as tp 2 x pp 2 x dp 1 at step 0"));
    bool seen[2][2] = {{false}};
    for (uint32_t slot = 0; slot < mu_coord_worker_slots(box.coord); slot++) {
        struct mu_worker_view worker;
        if (!mu_coord_worker_view(box.coord, slot, &worker))
            continue;
        assert_true(worker.has_coords && !worker.idle && worker.coords.d == 0);
        assert_false(seen[worker.coords.p][worker.coords.t]);
        seen[worker.coords.p][worker.coords.t] = true;
        assert_int_equal(worker.leaf_count, 8);
    }
    for (uint32_t i = 0; i < 4; i++)
        assert_true(box.workers[i].source == MU_SOURCE_INIT && box.workers[i].moves_in == 0);
    train(&box, 1);
    assert_int_equal(box_view(&box).steps_done, 1);
    box_fini(&box);
}

static void test_workers_that_make_no_larger_world_disturb_nobody(void **state)
{
    (void)state;
    static struct box box;
    start_box(&box, 2, 1, "", 2);
    train(&box, 1);
    uint64_t generation = box_view(&box).generation;
    add_workers(&box, 2, 1); /* half a replica */
    for (int i = 0; i < 5; i++) {
        train(&box, 1);
        box_advance(&box, 200);
    }
    assert_int_equal(box_view(&box).generation, generation);
    assert_int_equal(box_view(&box).spares, 1);
    box_add_worker(&box, 3);
    box_advance(&box, 300);
    train(&box, 1); /* the boundary at which they park */
    box_advance(&box, 300);
    assert_true(box_all_run(&box));
    assert_int_equal(box_view(&box).generation, generation + 1);
    assert_int_equal(box_view(&box).layout.dp, 2);
    assert_int_equal(box_view(&box).replayed_steps, 0);
    uint32_t moves = 0;
    for (uint32_t i = 0; i < 4; i++)
        moves += box.workers[i].moves_in;
    assert_true(moves >= 2); /* the joiners got the state */
    box_fini(&box);
}

/* ---- losses ---- */

static void test_loss_of_a_replica_goes_on_from_the_same_step(void **state)
{
    (void)state;
    static struct box box;
    start_box(&box, 2, 2, "", 8);
    assert_true(box_all_run(&box));
    assert_int_equal(box_view(&box).layout.dp, 2);
    train(&box, 7);
    forget_events(&box);
    box_kill_worker(&box, member_of_rank(&box, 3));
    box_advance(&box, 2000);
    assert_true(box_all_run(&box));
    struct mu_job_view view = box_view(&box);
    assert_true(view.layout.tp == 2 && view.layout.pp == 2 && view.layout.dp == 1);
    assert_int_equal(view.steps_done, 7);
    assert_int_equal(view.replayed_steps, 0);
    assert_true(box_said(&box, "4 workers continue as tp 2 x pp 2 x dp 1"));
    assert_true(box_said(&box, "at step 7"));
    train(&box, 1);
    box_fini(&box);
}

/* However much broke, the line says how it goes on. */
static void test_many_losses_do_not_cut_the_outcome_off(void **state)
{
    (void)state;
    static struct box box;
    start_box(&box, 1, 1, "", 8);
    assert_true(box_all_run(&box));
    train(&box, 3);
    forget_events(&box);
    for (uint32_t rank = 1; rank < 8; rank++)
        box_kill_worker(&box, member_of_rank(&box, rank));
    box_advance(&box, 2000);
    assert_true(box_all_run(&box));
    assert_true(box_said(&box, "...; 1 worker continues as tp 1 x pp 1 x dp 1 at step 3"));
    assert_true(box_said(&box, "state from its holders, 0 steps replayed, 0 bytes moved"));
    box_fini(&box);
}

static void test_loss_of_a_whole_stage_goes_back_to_the_checkpoint(void **state)
{
    (void)state;
    static struct box box;
    start_box(&box, 1, 2, "/ckpt", 2);
    train(&box, 4);
    request(&box, MU_CE_CHECKPOINT, NULL);
    train(&box, 1);
    assert_true(box_said(&box, "checkpoint 1 committed at step 5"));
    train(&box, 3);
    forget_events(&box);
    uint32_t lost = member_of_rank(&box, 1);
    box_kill_worker(&box, lost);
    box_advance(&box, 3000);
    struct mu_job_view view = box_view(&box);
    assert_int_equal(view.phase, MU_JP_WAITING);
    assert_non_null(strstr(view.waiting_text, "1 worker can take part, 2 are needed"));
    add_workers(&box, lost, 1);
    box_advance(&box, 2000);
    assert_true(box_all_run(&box));
    view = box_view(&box);
    assert_int_equal(view.steps_done, 5);
    assert_int_equal(view.replayed_steps, 3);
    assert_true(box_said(&box, "steps_replayed"));
    for (uint32_t i = 0; i < 2; i++)
        assert_true(box.workers[i].source == MU_SOURCE_CHECKPOINT && box.workers[i].moves_in == 0);
    box_fini(&box);
}

static void test_state_that_cannot_be_moved_comes_from_the_checkpoint(void **state)
{
    (void)state;
    static struct box box;
    struct mu_job_spec spec;
    for (int saved = 0; saved < 2; saved++) {
        box_spec(&spec, 1, 1);
        strcpy(spec.checkpoint.path, "/ckpt");
        box_init(&box, &spec);
        add_workers(&box, 0, 1);
        train(&box, 1);
        if (saved) {
            request(&box, MU_CE_CHECKPOINT, NULL);
            train(&box, 1);
            assert_true(box_said(&box, "committed at step 2"));
        }
        train(&box, 1);
        box.too_many_moves = true;
        add_workers(&box, 1, 1);
        train(&box, 1); /* the boundary at which it parks */
        box_advance(&box, 100);
        if (saved) {
            assert_true(box_said(&box, "8193 moves of state, at most 8192 are possible; starting from the newest"));
            assert_true(box_said(&box, "2 workers continue as tp 1 x pp 1 x dp 2 at step 2"));
        } else {
            assert_int_equal(box_view(&box).phase, MU_JP_WAITING);
            assert_non_null(strstr(box_view(&box).waiting_text, "moves of state"));
            box.too_many_moves = false; /* another plan may be possible: it is tried again */
            box_advance(&box, 2500);
            assert_true(box_said(&box, "2 workers continue as tp 1 x pp 1 x dp 2 at step 3"));
        }
        train(&box, 1);
        box_fini(&box);
    }
}

static void test_sharded_moments_lost_with_their_owner_come_from_the_checkpoint(void **state)
{
    (void)state;
    static struct box box;
    struct mu_job_spec spec;
    box_spec(&spec, 1, 1);
    spec.parallel.optimizer_sharding = true;
    strcpy(spec.checkpoint.path, "/ckpt");
    box_init(&box, &spec);
    add_workers(&box, 0, 3);
    struct mu_job_view view = box_view(&box);
    assert_true(view.layout.sharded && view.layout.dp == 3);
    assert_true(box_said(&box, "3 workers start as tp 1 x pp 1 x dp 3, optimizer sharded at step 0"));
    train(&box, 1);
    request(&box, MU_CE_CHECKPOINT, NULL);
    train(&box, 4);
    assert_true(box_said(&box, "committed at step 2"));
    request(&box, MU_CE_DRAIN, "w2"); /* who leaves in good order gives its part away */
    for (int i = 0; i < 4; i++) {     /* nobody can be fed here: that is tried again */
        train(&box, 1);
        box_advance(&box, 200);
        box_train(&box, 1000);
        box_advance(&box, 200);
    }
    assert_int_equal(box.workers[2].exit_code, 0);
    box.workers[2].running = false;
    assert_int_equal(box_view(&box).replayed_steps, 0);
    train(&box, 1);
    uint64_t before = box_view(&box).steps_done;
    box_kill_worker(&box, member_of_rank(&box, 1)); /* who dies takes it away */
    box_advance(&box, 2000);
    assert_true(box_all_run(&box));
    assert_int_equal(box_view(&box).replayed_steps, before - 2);
    box_fini(&box);
}

/* ---- leaving ---- */

static void test_only_source_leaves_by_way_of_an_idle_rank(void **state)
{
    (void)state;
    static struct box box;
    start_box(&box, 1, 2, "", 3);
    train(&box, 3);
    struct mu_job_view view = box_view(&box);
    assert_int_equal(view.layout.dp, 1);
    uint32_t leaver = member_of_rank(&box, 1);
    char name[8];
    snprintf(name, sizeof name, "w%u", leaver);
    forget_events(&box);
    request(&box, MU_CE_DRAIN, name);
    train(&box, 1); /* the boundary */
    box_advance(&box, 100);
    assert_true(box_said(&box, "2 workers continue as tp 1 x pp 2 x dp 1, 1 idle at step 4"));
    assert_true(box.workers[leaver].moves_out > 0 || !box.workers[leaver].core);
    box_train(&box, 1000); /* the next boundary: it is dropped */
    box_advance(&box, 500);
    assert_int_equal(box.workers[leaver].exit_code, 0);
    assert_true(box_said(&box, "2 workers continue as tp 1 x pp 2 x dp 1 at step 5"));
    view = box_view(&box);
    assert_int_equal(view.layout.idle, 0);
    assert_int_equal(view.replayed_steps, 0);
    box.workers[leaver].running = false;
    train(&box, 1);
    box_fini(&box);
}

static void test_only_holders_without_replacement_save_first(void **state)
{
    (void)state;
    static struct box box;
    start_box(&box, 1, 2, "/ckpt", 2);
    train(&box, 3);
    request(&box, MU_CE_DRAIN, "w1");
    train(&box, 1);
    box_advance(&box, 3000);
    assert_true(box_said(&box, "saving it first"));
    assert_true(box_said(&box, "committed at step 4"));
    assert_int_equal(box.workers[1].exit_code, 0);
    assert_int_equal(box.workers[0].exit_code, -1);
    assert_int_equal(box_view(&box).phase, MU_JP_WAITING);
    box_fini(&box);
}

static void test_who_hangs_on_the_way_to_a_boundary_is_given_up(void **state)
{
    (void)state;
    static struct box box;
    start_box(&box, 1, 2, "", 4);
    train(&box, 1);
    uint32_t hanging = member_of_rank(&box, 3);
    char text[64];
    request(&box, MU_CE_DRAIN, hanging == 0 ? "w1" : "w0");
    assert_int_equal(box_view(&box).phase, MU_JP_PARKING); /* and no boundary comes: the others wait for one */
    box.workers[hanging].hangs = true;
    box_advance(&box, 32000);
    snprintf(text, sizeof text, "worker w%u lost (alive but no progress", hanging);
    assert_true(box_said(&box, text));
    assert_int_equal(box_view(&box).workers_lost, 1);
    box_fini(&box);
}

static void test_boundary_that_never_comes_is_given_up(void **state)
{
    (void)state;
    static struct box box;
    start_box(&box, 1, 2, "", 4);
    train(&box, 1);
    request(&box, MU_CE_DRAIN, "w3");
    assert_int_equal(box_view(&box).phase, MU_JP_PARKING);
    box_advance(&box, 92000); /* all say that they wait for another one */
    assert_true(box_said(&box, "everybody waits for everybody"));
    assert_int_equal(box_view(&box).workers_lost, 0);
    assert_true(box_all_run(&box));
    assert_int_equal(box_view(&box).replayed_steps, 0);
    box_fini(&box);
}

/* ---- the coordinator's memory ---- */

static void test_assign_is_repeated_as_it_was(void **state)
{
    (void)state;
    static struct box box;
    struct mu_job_spec spec;
    box_spec(&spec, 2, 2);
    box_init(&box, &spec);
    box.workers[0].hold_prepared = true;
    for (uint32_t i = 0; i < 8; i++)
        box_add_worker(&box, i);
    box.workers[5].hold_prepared = true; /* keeps the generation from going */
    box_settle(&box);
    box_advance(&box, 100);
    assert_int_equal(box_view(&box).phase, MU_JP_PREPARING);
    uint64_t generation = box_view(&box).generation;
    uint32_t before = box.assign_repeats;
    /* Its Assign was lost with its stream: it attaches again as the spare that it is. */
    struct box_worker *worker = &box.workers[5];
    struct mu_worker_message hello = {.kind = MU_WM_HELLO};
    hello.hello.protocol_version = MU_PROTOCOL_VERSION;
    hello.hello.incarnation = worker->incarnation;
    strcpy(hello.hello.job, "job");
    strcpy(hello.hello.name, "w5");
    strcpy(hello.hello.address, "10.0.0.5:4000");
    hello.hello.prepared_job = true;
    hello.hello.numeric_identity = (struct mu_hash128){.high = 1, .low = 2};
    hello.hello.data_hash = (struct mu_hash128){.high = 3, .low = 4};
    box_step(&box, &(struct mu_coord_event){.kind = MU_CE_MESSAGE, .message = {.session = 999, .message = &hello}});
    assert_int_equal(box.assign_repeats, before + 1); /* and the same, byte by byte: see box_note_assign */
    assert_int_equal(box_view(&box).generation, generation);
    box_fini(&box);
}

/* The coordinator is killed after every single message in turn: nothing is done twice or differently, no step is lost,
 * and a generation that went on keeps its layout. */
static void test_restart_after_any_message_goes_on(void **state)
{
    (void)state;
    static struct box box;
    struct mu_job_spec spec;
    uint32_t total = UINT32_MAX;
    for (uint32_t cut = 1; cut < total; cut++) {
        box_spec(&spec, 2, 2);
        strcpy(spec.checkpoint.path, "/ckpt");
        box_init(&box, &spec);
        for (uint32_t i = 0; i < 5; i++)
            box_add_worker(&box, i);
        bool killed = false;
        uint64_t trained = 0;
        for (uint32_t turn = 0; turn < 300 && trained < 4; turn++) {
            if (!killed && box.handled >= cut) {
                killed = true;
                box_kill_coord(&box);
                for (int i = 0; i < 40; i++)
                    box_handle_one(&box);
                box_start_coord(&box);
            }
            if (!killed) {
                box_handle_one(&box);
                if (!box.first) {
                    box_advance(&box, 20);
                    trained += box_train(&box, 1000);
                }
            } else {
                box_advance(&box, 50);
                trained += box_train(&box, 1000);
            }
        }
        total = killed ? total : cut; /* it ran through before the cut came */
        assert_int_equal(trained, 4);
        box_advance(&box, 200);
        struct mu_job_view view = box_view(&box);
        assert_int_equal(view.phase, MU_JP_STEPPING);
        assert_true(view.layout.tp == 2 && view.layout.pp == 2 && view.layout.dp == 1);
        assert_int_equal(view.steps_done, 4);
        assert_int_equal(view.replayed_steps, 0);
        assert_int_equal(view.workers_lost, 0);
        box_fini(&box);
    }
    assert_true(total > 40); /* it was cut at many places */
}

static void test_generation_recorded_without_a_layout_is_data_parallel(void **state)
{
    (void)state;
    static struct box box;
    struct mu_job_spec spec;
    box_spec(&spec, 1, 1);
    spec.model.slices = 1;
    box_init(&box, &spec);
    add_workers(&box, 0, 3);
    train(&box, 1);
    box_kill_coord(&box);
    /* As an older version left it. */
    struct mu_wire_arena arena;
    struct mu_error err;
    struct mu_record record;
    uint8_t *value = NULL;
    size_t size_bytes = 0;
    mu_wire_arena_init(&arena);
    assert_int_equal(mu_store_get(box.store, "g/job", 5, &value, &size_bytes, &err), MU_OK);
    assert_int_equal(mu_record_decode(&arena, "g/job", 5, value, size_bytes, &record, &err), MU_OK);
    free(value);
    struct mu_generation_record old = *record.generation;
    memset(&old.layout, 0, sizeof old.layout);
    box_persist(&box, &(struct mu_record){.kind = MU_RECORD_GENERATION, .generation = &old}, false);
    mu_wire_arena_fini(&arena);
    box_start_coord(&box);
    box_advance(&box, 2500);
    struct mu_job_view view = box_view(&box);
    assert_int_equal(view.phase, MU_JP_STEPPING);
    assert_true(view.layout.tp == 1 && view.layout.pp == 1 && view.layout.dp == 3 && !view.layout.sharded);
    assert_int_equal(view.workers_lost, 0);
    train(&box, 1);
    box_fini(&box);
}

static void test_intent_recorded_without_a_layout_is_completed(void **state)
{
    (void)state;
    static struct box box;
    start_box(&box, 1, 1, "/ckpt", 3);
    for (uint32_t i = 0; i < 3; i++)
        box.workers[i].hold_pieces = true;
    request(&box, MU_CE_CHECKPOINT, NULL);
    train(&box, 1);
    struct mu_checkpoint_record record;
    assert_true(mu_coord_checkpoint_view(box.coord, "job", 0, &record));
    assert_int_equal(record.state, MU_CKPT_INTENT);
    assert_int_equal(record.layout.dp, 3);
    box_kill_coord(&box);
    struct mu_wire_arena arena;
    struct mu_error err;
    struct mu_record stored;
    static const char key[] = "c/job/\0\0\0\0\0\0\0\1";
    uint8_t *value = NULL;
    size_t size_bytes = 0;
    mu_wire_arena_init(&arena);
    assert_int_equal(mu_store_get(box.store, key, sizeof key - 1, &value, &size_bytes, &err), MU_OK);
    assert_int_equal(mu_record_decode(&arena, key, sizeof key - 1, value, size_bytes, &stored, &err), MU_OK);
    free(value);
    struct mu_checkpoint_record old = *stored.checkpoint;
    memset(&old.layout, 0, sizeof old.layout);
    box_persist(&box, &(struct mu_record){.kind = MU_RECORD_CHECKPOINT, .checkpoint = &old}, false);
    mu_wire_arena_fini(&arena);
    box_start_coord(&box);
    box_advance(&box, 2500);
    for (uint32_t i = 0; i < 3; i++)
        box_piece(&box, i);
    box_settle(&box);
    assert_true(box_said(&box, "checkpoint 1 committed at step 1"));
    box_fini(&box);
}

/* ---- what must be refused ---- */

static struct mu_worker_message hello_of(const char *name, uint64_t id)
{
    struct mu_worker_message hello = {.kind = MU_WM_HELLO};
    hello.hello.protocol_version = MU_PROTOCOL_VERSION;
    hello.hello.incarnation = (struct mu_id){.high = 5, .low = id};
    strcpy(hello.hello.job, "job");
    strcpy(hello.hello.name, name);
    strcpy(hello.hello.host, "there");
    strcpy(hello.hello.address, "10.0.0.9:4000");
    return hello;
}

static void say(struct box *box, uint64_t session, const struct mu_worker_message *message)
{
    box_step(box, &(struct mu_coord_event){.kind = MU_CE_MESSAGE, .message = {.session = session, .message = message}});
}

static void test_shares_of_layouts_that_the_job_cannot_have_are_refused(void **state)
{
    (void)state;
    static struct box box;
    start_box(&box, 2, 2, "", 4);
    train(&box, 1);
    struct mu_worker_message hello = hello_of("odd", 1);
    struct mu_held *held = &hello.hello.status.held;
    held->has_state = true;
    held->share_count = 1;
    held->shares[0].layout = (struct mu_layout){.tp = 1, .pp = 5, .dp = 1, .stage_first = {0, 1, 2, 3, 4, 5}};
    say(&box, 900, &hello); /* the model has four layers */
    assert_true(box.reject.seen);
    assert_int_equal(box.reject.reason, MU_REJECT_INVALID);
    held->shares[0].layout = (struct mu_layout){.tp = 4, .pp = 1, .dp = 1, .stage_first = {0, 4}};
    box.reject.seen = false;
    say(&box, 901, &hello); /* and two slices */
    assert_true(box.reject.seen);
    assert_int_equal(box.reject.reason, MU_REJECT_INVALID);
    /* A member that says such a thing is not believed any more. */
    uint32_t member = member_of_rank(&box, 2);
    struct mu_worker_message status = {.kind = MU_WM_STATUS, .generation = 1};
    status.status = *mu_worker_status(box.workers[member].core);
    status.status.held.shares[0].layout.stage_first[1] = 4;
    say(&box, box.workers[member].session, &status);
    assert_true(box_said(&box, "a layout that the job cannot have"));
    assert_int_equal(box_view(&box).workers_lost, 1);
    box_fini(&box);
}

static void test_another_numeric_identity_is_refused_by_kernel(void **state)
{
    (void)state;
    static struct box box;
    struct mu_job_spec spec;
    box_spec(&spec, 1, 1);
    box_init(&box, &spec);
    struct mu_worker_message first = hello_of("first", 1), other = hello_of("other", 2);
    struct mu_hello *hello = &first.hello;
    hello->prepared_job = true;
    hello->job_uid = box_view(&box).record.uid;
    hello->numeric_identity = (struct mu_hash128){.high = 1, .low = 1};
    hello->identity_parts.count = 3;
    strcpy(hello->identity_parts.parts[0].name, "gemm");
    strcpy(hello->identity_parts.parts[1].name, "attention");
    strcpy(hello->identity_parts.parts[2].name, "adamw");
    say(&box, 1001, &first);
    other.hello.prepared_job = true;
    other.hello.job_uid = hello->job_uid;
    other.hello.identity_parts = hello->identity_parts;
    other.hello.numeric_identity = (struct mu_hash128){.high = 1, .low = 2};
    other.hello.identity_parts.parts[1].hash = 8;
    say(&box, 1002, &other);
    assert_true(box.reject.seen);
    assert_int_equal(box.reject.reason, MU_REJECT_IDENTITY);
    assert_non_null(strstr(box.reject.text, "in kernel attention:"));
    assert_null(strstr(box.reject.text, "gemm"));
    /* The job remembers the parts over a restart. */
    box_kill_coord(&box);
    box_start_coord(&box);
    box.reject.seen = false;
    other.hello.identity_parts.parts[2].hash = 9;
    say(&box, 1003, &other);
    assert_true(box.reject.seen);
    assert_non_null(strstr(box.reject.text, "in kernel attention, adamw:"));
    box_fini(&box);
}

/* ---- checkpoints ---- */

static void train_to_the_end(struct box *box, uint64_t steps)
{
    for (uint64_t i = 0; i < steps && box_train(box, steps); i++)
        ;
    box_advance(box, 20);
}

static void test_last_checkpoint_is_written_in_pieces_of_the_layout(void **state)
{
    (void)state;
    static struct box box;
    struct mu_job_spec spec;
    box_spec(&spec, 2, 2);
    spec.steps = 3;
    strcpy(spec.checkpoint.path, "/ckpt");
    box_init(&box, &spec);
    add_workers(&box, 0, 8);
    train_to_the_end(&box, 3);
    box_advance(&box, 100);
    assert_true(box_said(&box, "committed at step 3"));
    struct mu_job_view view = box_view(&box);
    assert_int_equal(view.record.state, MU_JOB_FINISHED);
    assert_int_equal(view.record.weights_sha256[5], 0xab); /* one rank knew it, others were silent */
    struct mu_checkpoint_record record;
    assert_true(mu_coord_checkpoint_view(box.coord, "job", 0, &record));
    assert_int_equal(record.layout.dp, 0); /* what is committed fits any layout */
    box_fini(&box);
}

static void test_piece_of_a_lost_writer_goes_to_who_holds_the_same(void **state)
{
    (void)state;
    static struct box box;
    struct mu_job_spec spec;
    box_spec(&spec, 1, 1);
    spec.steps = 3;
    strcpy(spec.checkpoint.path, "/ckpt");
    box_init(&box, &spec);
    add_workers(&box, 0, 3);
    uint32_t slow = member_of_rank(&box, 1);
    box.workers[slow].hold_pieces = true;
    train_to_the_end(&box, 3);
    assert_int_equal(box_view(&box).phase, MU_JP_FINALIZING);
    assert_false(box_said(&box, "committed"));
    box_kill_worker(&box, slow);
    box_advance(&box, 1500);
    assert_true(box_said(&box, "piece_reassigned"));
    assert_true(box_said(&box, "checkpoint 1 committed at step 3"));
    assert_false(box_said(&box, "checkpoint_failed"));
    assert_int_equal(box_view(&box).record.state, MU_JOB_FINISHED);
    box_fini(&box);
}

/* A sharded state whose part died with its owner after the last step cannot be saved: steps are done again. */
static void test_final_state_that_is_not_whole_is_not_the_end(void **state)
{
    (void)state;
    static struct box box;
    struct mu_job_spec spec;
    box_spec(&spec, 1, 2);
    spec.steps = 6;
    strcpy(spec.checkpoint.path, "/ckpt");
    spec.checkpoint.every = 0;
    box_init(&box, &spec);
    add_workers(&box, 0, 2);
    assert_true(box_train(&box, 6));
    request(&box, MU_CE_CHECKPOINT, NULL);
    assert_true(box_train(&box, 6));
    assert_true(box_said(&box, "committed at step 2"));
    box.workers[0].hold_pieces = box.workers[1].hold_pieces = true;
    while (box_train(&box, 6))
        ;
    assert_int_equal(box_view(&box).phase, MU_JP_FINALIZING);
    uint32_t lost = box.workers[0].rank == 1 ? 0 : 1;
    box_kill_worker(&box, lost);
    box_advance(&box, 3000);
    assert_int_equal(box_view(&box).phase, MU_JP_WAITING);
    box.workers[1 - lost].hold_pieces = false;
    add_workers(&box, lost, 1);
    box_advance(&box, 2000);
    assert_true(box_all_run(&box));
    assert_int_equal(box_view(&box).steps_done, 2);
    while (box_train(&box, 6))
        ;
    box_advance(&box, 500);
    assert_int_equal(box_view(&box).record.state, MU_JOB_FINISHED);
    box_fini(&box);
}

static void test_checkpoint_given_up_again_and_again_is_told_as_an_error(void **state)
{
    (void)state;
    static struct box box;
    start_box(&box, 1, 1, "/ckpt", 3);
    train(&box, 1);
    for (uint32_t i = 0; i < 3; i++)
        box.workers[i].hold_pieces = true;
    request(&box, MU_CE_CHECKPOINT, NULL);
    for (uint32_t round = 0; round < MU_CHECKPOINT_ATTEMPTS_MAX;
         round++) { /* each time a writer dies before it wrote */
        train(&box, 1);
        train(&box, 1);
        box_kill_worker(&box, member_of_rank(&box, 0));
        box_advance(&box, 1500);
        char text[64];
        snprintf(text, sizeof text, "checkpoint %u given up", round + 1);
        assert_true(box_said(&box, text));
        add_workers(&box, 3 + round, 1);
        box.workers[3 + round].hold_pieces = true;
        box_train(&box, 1000);
        box_advance(&box, 300);
        if (round == 0) { /* the count outlives a restart */
            box_kill_coord(&box);
            box_start_coord(&box);
            box_advance(&box, 3000);
        }
        if (round + 1 < MU_CHECKPOINT_ATTEMPTS_MAX)
            assert_true(box_view(&box).record.next_checkpoint == round + 2);
    }
    assert_true(box_said(&box, "3 in a row, the next one by the policy"));
    box_advance(&box, 1000);
    for (int i = 0; i < 3; i++)
        box_train(&box, 1000);
    assert_true(box_view(&box).record.next_checkpoint == MU_CHECKPOINT_ATTEMPTS_MAX); /* no further one was ordered */
    box_fini(&box);
}

static void test_last_checkpoint_is_tried_again_within_ten_seconds(void **state)
{
    (void)state;
    static struct box box;
    struct mu_job_spec spec;
    box_spec(&spec, 1, 1);
    spec.steps = 2;
    strcpy(spec.checkpoint.path, "/ckpt");
    box_init(&box, &spec);
    box.publish_result = MU_ERR_NO_SPACE;
    add_workers(&box, 0, 2);
    train_to_the_end(&box, 2);
    box_advance(&box, 60000); /* long enough for any pause to have grown */
    uint64_t before = box_view(&box).record.next_checkpoint;
    assert_true(before >= 6 && before <= 12);
    box_advance(&box, 10200);
    assert_true(box_view(&box).record.next_checkpoint == before + 1);
    box.publish_result = MU_OK;
    box_advance(&box, 10200);
    assert_int_equal(box_view(&box).record.state, MU_JOB_FINISHED);
    box_fini(&box);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_four_workers_join_as_stages_and_slices),
        cmocka_unit_test(test_workers_that_make_no_larger_world_disturb_nobody),
        cmocka_unit_test(test_loss_of_a_replica_goes_on_from_the_same_step),
        cmocka_unit_test(test_many_losses_do_not_cut_the_outcome_off),
        cmocka_unit_test(test_loss_of_a_whole_stage_goes_back_to_the_checkpoint),
        cmocka_unit_test(test_state_that_cannot_be_moved_comes_from_the_checkpoint),
        cmocka_unit_test(test_sharded_moments_lost_with_their_owner_come_from_the_checkpoint),
        cmocka_unit_test(test_only_source_leaves_by_way_of_an_idle_rank),
        cmocka_unit_test(test_only_holders_without_replacement_save_first),
        cmocka_unit_test(test_who_hangs_on_the_way_to_a_boundary_is_given_up),
        cmocka_unit_test(test_boundary_that_never_comes_is_given_up),
        cmocka_unit_test(test_assign_is_repeated_as_it_was),
        cmocka_unit_test(test_restart_after_any_message_goes_on),
        cmocka_unit_test(test_generation_recorded_without_a_layout_is_data_parallel),
        cmocka_unit_test(test_intent_recorded_without_a_layout_is_completed),
        cmocka_unit_test(test_shares_of_layouts_that_the_job_cannot_have_are_refused),
        cmocka_unit_test(test_another_numeric_identity_is_refused_by_kernel),
        cmocka_unit_test(test_last_checkpoint_is_written_in_pieces_of_the_layout),
        cmocka_unit_test(test_piece_of_a_lost_writer_goes_to_who_holds_the_same),
        cmocka_unit_test(test_final_state_that_is_not_whole_is_not_the_end),
        cmocka_unit_test(test_checkpoint_given_up_again_and_again_is_told_as_an_error),
        cmocka_unit_test(test_last_checkpoint_is_tried_again_within_ten_seconds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
