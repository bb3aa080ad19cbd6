/* links: mu_worker_core mu_plan */
/* The worker's core alone: what it says it holds, which orders it takes, how it comes back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "worker/core/core.h"

enum { SENT_MAX = 64 };

struct fixture {
    struct mu_worker *worker;
    uint64_t now_us;
    struct mu_job_spec spec;
    struct mu_worker_message sent[SENT_MAX]; /* newest last */
    uint32_t sent_count;
    uint32_t connects, prepares, runs, aborts, snapshots;
    uint32_t exits;
    int exit_code;
    struct mu_snapshot snapshot;
    struct mu_layout prepared;
};

static void on_action(void *ctx, const struct mu_worker_action *action)
{
    struct fixture *f = ctx;
    switch (action->kind) {
    case MU_WA_CONNECT:
        f->connects++;
        break;
    case MU_WA_SEND:
        f->sent[f->sent_count++ % SENT_MAX] = *action->message;
        break;
    case MU_WA_PREPARE:
        f->prepares++;
        f->prepared = action->generation.assign->layout;
        break;
    case MU_WA_RUN:
        f->runs++;
        break;
    case MU_WA_ABORT:
        f->aborts++;
        break;
    case MU_WA_SNAPSHOT:
        f->snapshots++;
        f->snapshot = action->snapshot.snapshot;
        break;
    case MU_WA_EXIT:
        f->exits++;
        f->exit_code = action->exit.code;
        break;
    default:
        break;
    }
}

static void give(struct fixture *f, struct mu_worker_event *event)
{
    const struct mu_worker_sink sink = {.emit = on_action, .ctx = f};
    event->now_us = f->now_us;
    event->random = (struct mu_id){.high = 9, .low = f->now_us};
    mu_worker_step(f->worker, event, &sink);
}

static void hear(struct fixture *f, struct mu_coord_message *message)
{
    give(f, &(struct mu_worker_event){.kind = MU_WE_MESSAGE, .message = message});
}

static const struct mu_worker_message *last(const struct fixture *f)
{
    assert_true(f->sent_count > 0);
    return &f->sent[(f->sent_count - 1) % SENT_MAX];
}

static void welcome(struct fixture *f, uint32_t lost_ms)
{
    struct mu_coord_message message = {.kind = MU_CM_WELCOME};
    strcpy(message.welcome.name, "w0");
    message.welcome.job_uid = (struct mu_id){.high = 1, .low = 1};
    message.welcome.spec = &f->spec;
    message.welcome.heartbeat_ms = 100;
    message.welcome.lost_ms = lost_ms;
    hear(f, &message);
}

static void start(struct fixture *f)
{
    memset(f, 0, sizeof *f);
    f->now_us = 1000000;
    mu_job_spec_init(&f->spec);
    strcpy(f->spec.name, "job");
    f->spec.model = (struct mu_model_config){
        .family = MU_FAMILY_GPT2, .layers = 4, .heads = 4, .channels = 64, .context = 16, .vocab = 256, .slices = 2};
    mu_model_config_resolve(&f->spec.model);
    strcpy(f->spec.data.path, "/data/text");
    f->spec.batch.sequences = 8, f->spec.batch.micro = 1, f->spec.batch.length = 16;
    f->spec.steps = 100;
    struct mu_worker_config config;
    mu_worker_config_init(&config);
    strcpy(config.hello.job, "job");
    config.incarnation = (struct mu_id){.high = 2, .low = 2};
    f->worker = mu_worker_new(&config);
    assert_non_null(f->worker);
    give(f, &(struct mu_worker_event){.kind = MU_WE_START});
    give(f, &(struct mu_worker_event){.kind = MU_WE_CONNECTED});
    welcome(f, 6000);
    struct mu_worker_event loaded = {.kind = MU_WE_JOB_LOADED};
    loaded.job_loaded.identity_parts.count = 1;
    strcpy(loaded.job_loaded.identity_parts.parts[0].name, "gemm");
    loaded.job_loaded.identity_parts.parts[0].hash = 5;
    give(f, &loaded);
}

/* tp 2 x pp 2 x dp 1 and one idle rank. */
static struct mu_layout four_and_one(void)
{
    struct mu_layout layout;
    memset(&layout, 0, sizeof layout);
    layout.tp = layout.pp = 2;
    layout.dp = layout.idle = 1;
    layout.stage_first[1] = 2;
    layout.stage_first[2] = 4;
    return layout;
}

static void assign(struct fixture *f, uint64_t generation, uint32_t rank, const struct mu_layout *layout)
{
    struct mu_coord_message message = {.kind = MU_CM_ASSIGN, .generation = generation};
    message.assign.layout = *layout;
    message.assign.rank = rank;
    message.assign.start_step = 10;
    message.assign.source = MU_SOURCE_INIT;
    hear(f, &message);
}

static void run(struct fixture *f, uint64_t generation, uint32_t rank)
{
    struct mu_layout layout = four_and_one();
    assign(f, generation, rank, &layout);
    struct mu_worker_event prepared = {.kind = MU_WE_PREPARED, .parked = {.generation = generation}};
    prepared.parked.held = (struct mu_held){.has_state = true, .step = 10, .share_count = 1};
    prepared.parked.held.shares[0] = (struct mu_held_share){.layout = layout, .rank = rank};
    give(f, &prepared);
    hear(f, &(struct mu_coord_message){.kind = MU_CM_GO, .generation = generation});
}

static void park(struct fixture *f, uint64_t generation, uint64_t step)
{
    struct mu_worker_event parked = {.kind = MU_WE_PARKED, .parked = {.generation = generation}};
    parked.parked.reason = MU_PARK_COMMAND;
    parked.parked.held = mu_worker_status(f->worker)->held;
    parked.parked.held.step = step;
    give(f, &parked);
}

static void test_hello_carries_the_kernels(void **state)
{
    (void)state;
    static struct fixture f;
    start(&f);
    assert_int_equal(last(&f)->kind, MU_WM_HELLO);
    assert_true(last(&f)->hello.prepared_job);
    assert_int_equal(last(&f)->hello.identity_parts.count, 1);
    assert_string_equal(last(&f)->hello.identity_parts.parts[0].name, "gemm");
    mu_worker_free(f.worker);
}

static void test_a_running_rank_holds_the_share_of_its_layout(void **state)
{
    (void)state;
    static struct fixture f;
    start(&f);
    run(&f, 3, 2);
    assert_int_equal(f.runs, 1);
    const struct mu_held *held = &mu_worker_status(f.worker)->held;
    struct mu_layout layout = four_and_one();
    assert_true(held->has_state && held->share_count == 1 && held->step == 10);
    assert_true(mu_layout_equal(&held->shares[0].layout, &layout));
    assert_int_equal(held->shares[0].rank, 2);
    const struct mu_step_result result = {.step = 10, .loss = 2, .finite = true};
    mu_worker_boundary(f.worker, f.now_us, 3, 11, &result);
    assert_true(held->has_result && held->step == 11 && held->share_count == 1 && held->shares[0].rank == 2);
    mu_worker_free(f.worker);
}

static void test_an_idle_rank_holds_nothing_once_it_runs(void **state)
{
    (void)state;
    static struct fixture f;
    start(&f);
    run(&f, 3, 4);
    const struct mu_held *held = &mu_worker_status(f.worker)->held;
    assert_false(held->has_state);
    assert_int_equal(held->share_count, 0);
    const struct mu_step_result result = {.step = 10, .finite = true};
    mu_worker_boundary(f.worker, f.now_us, 3, 11, &result);
    assert_true(!held->has_state && held->share_count == 0 && held->has_result && held->step == 11);
    mu_worker_free(f.worker);
}

static void test_assign_that_does_not_fit_the_job_is_refused(void **state)
{
    (void)state;
    static struct fixture f;
    start(&f);
    struct mu_layout layout = four_and_one();
    layout.stage_first[2] = 5; /* the model has four layers */
    assign(&f, 3, 1, &layout);
    assert_int_equal(f.prepares, 0);
    assert_int_equal(last(&f)->kind, MU_WM_STATUS);
    assert_int_equal(last(&f)->status.phase, MU_PHASE_PARKED);
    assert_int_equal(last(&f)->status.park_reason, MU_PARK_PREPARE);
    assert_int_equal(last(&f)->status.generation, 3);
    assert_true(last(&f)->status.text[0] != 0);
    layout = four_and_one();
    struct mu_coord_message message = {.kind = MU_CM_ASSIGN, .generation = 4};
    const struct mu_move move = {.from = 0, .to = 1, .kinds = MU_MOVE_PARAMS, .run = {.first = 100000, .count = 1}};
    message.assign.layout = layout;
    message.assign.rank = 1;
    message.assign.moves = &move;
    message.assign.move_count = 1;
    hear(&f, &message); /* nor so many chunks */
    assert_int_equal(f.prepares, 0);
    assert_non_null(strstr(last(&f)->status.text, "chunks"));
    assign(&f, 5, 1, &layout);
    assert_int_equal(f.prepares, 1);
    mu_worker_free(f.worker);
}

static void order(struct fixture *f, uint64_t generation, uint64_t checkpoint, uint32_t piece)
{
    struct mu_coord_message message = {.kind = MU_CM_SNAPSHOT, .generation = generation};
    message.snapshot.checkpoint = checkpoint;
    message.snapshot.piece = piece;
    message.snapshot.layout = four_and_one();
    message.snapshot.layout.idle = 0;
    strcpy(message.snapshot.dir, "/ckpt/x");
    hear(f, &message);
}

static void test_a_second_piece_of_a_checkpoint_is_taken_once(void **state)
{
    (void)state;
    static struct fixture f;
    start(&f);
    run(&f, 3, 2);
    park(&f, 3, 10);
    order(&f, 3, 7, 2);
    assert_int_equal(f.snapshots, 1);
    order(&f, 3, 7, 2); /* again, after a lost stream */
    assert_int_equal(f.snapshots, 1);
    order(&f, 3, 7, 3); /* that of a writer who was lost */
    assert_int_equal(f.snapshots, 2);
    assert_int_equal(f.snapshot.piece, 3);
    order(&f, 3, 7, 3);
    order(&f, 3, 7, 2);
    order(&f, 3, 6, 1); /* of an older one */
    assert_int_equal(f.snapshots, 2);
    order(&f, 3, 8, 2);
    assert_int_equal(f.snapshots, 3);
    assert_int_equal(mu_worker_status(f.worker)->checkpoint_taken, 8);
    mu_worker_free(f.worker);
}

static void test_a_rank_without_a_piece_executes_the_command_all_the_same(void **state)
{
    (void)state;
    static struct fixture f;
    for (uint32_t piece = 0; piece <= 4; piece += 4) {
        start(&f);
        run(&f, 3, 4);
        struct mu_coord_message message = {.kind = MU_CM_COMMAND, .generation = 3};
        message.command.number = 1;
        message.command.kind = MU_COMMAND_CHECKPOINT;
        message.command.first_open = 1;
        message.command.snapshot.checkpoint = 7;
        message.command.snapshot.piece = piece;
        message.command.snapshot.layout = four_and_one();
        hear(&f, &message);
        assert_int_equal(mu_worker_vote(f.worker, 3), 1);
        const struct mu_step_result result = {.step = 10, .finite = true, .command = 1};
        struct mu_boundary decision = mu_worker_boundary(f.worker, f.now_us, 3, 11, &result);
        assert_int_equal(decision.take_snapshot, piece < 4); /* four working ranks, four pieces */
        assert_int_equal(mu_worker_status(f.worker)->command_executed, 1);
        mu_worker_free(f.worker);
    }
}

/* Longest wait between two tries to connect, out of many. */
static uint64_t longest_backoff_us(struct fixture *f)
{
    uint64_t longest_us = 0;
    for (int i = 0; i < 200; i++) {
        give(f, &(struct mu_worker_event){.kind = MU_WE_DISCONNECTED, .text = "reset"});
        uint64_t wait_us = mu_worker_next_deadline(f->worker) - f->now_us;
        longest_us = wait_us > longest_us ? wait_us : longest_us;
        f->now_us += wait_us;
        give(f, &(struct mu_worker_event){.kind = MU_WE_TICK});
    }
    return longest_us;
}

static void test_backoff_leaves_room_in_what_the_coordinator_waits(void **state)
{
    (void)state;
    static struct fixture f;
    start(&f); /* lost_ms 6000: the worker's own bound is the smaller one */
    uint64_t longest_us = longest_backoff_us(&f);
    assert_true(longest_us > 1500000 && longest_us <= 2000000);
    give(&f, &(struct mu_worker_event){.kind = MU_WE_CONNECTED});
    welcome(&f, 500);
    longest_us = longest_backoff_us(&f);
    assert_true(longest_us > 150000 && longest_us <= 250000);
    give(&f, &(struct mu_worker_event){.kind = MU_WE_CONNECTED});
    welcome(&f, 6000); /* restarted with other options */
    assert_true(longest_backoff_us(&f) > 1500000);
    mu_worker_free(f.worker);
}

static void test_a_broken_device_is_told_and_the_worker_leaves(void **state)
{
    (void)state;
    static struct fixture f;
    struct mu_worker_event broken = {.kind = MU_WE_BROKEN, .text = "GPU 0: Xid 79"};
    start(&f);
    run(&f, 3, 2);
    give(&f, &broken);
    const struct mu_worker_message *said = last(&f);
    assert_true(said->kind == MU_WM_STATUS && said->generation == 3);
    assert_true(said->status.phase == MU_PHASE_PARKED && said->status.park_reason == MU_PARK_ENGINE);
    assert_false(said->status.held.has_state || said->status.held.has_gradient); /* who could trust it? */
    assert_string_equal(said->status.text, "GPU 0: Xid 79");
    assert_true(f.exits == 1 && f.exit_code == 1);
    give(&f, &broken);
    assert_int_equal(f.exits, 1);
    mu_worker_free(f.worker);

    start(&f); /* a spare */
    give(&f, &broken);
    assert_int_equal(last(&f)->kind, MU_WM_GOODBYE);
    assert_string_equal(last(&f)->goodbye.reason, "GPU 0: Xid 79");
    assert_true(f.exits == 1 && f.exit_code == 1);
    mu_worker_free(f.worker);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hello_carries_the_kernels),
        cmocka_unit_test(test_a_running_rank_holds_the_share_of_its_layout),
        cmocka_unit_test(test_an_idle_rank_holds_nothing_once_it_runs),
        cmocka_unit_test(test_assign_that_does_not_fit_the_job_is_refused),
        cmocka_unit_test(test_a_second_piece_of_a_checkpoint_is_taken_once),
        cmocka_unit_test(test_a_rank_without_a_piece_executes_the_command_all_the_same),
        cmocka_unit_test(test_a_broken_device_is_told_and_the_worker_leaves),
        cmocka_unit_test(test_backoff_leaves_room_in_what_the_coordinator_waits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
