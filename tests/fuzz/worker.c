#include <stdio.h>

#include "tests/fuzz/coordinator.h"

enum { LAST_STEP = 12 };

static struct mu_worker_event *new_answer(struct fuzz_worker *worker, enum mu_worker_event_kind kind)
{
    static struct mu_worker_event lost;
    struct mu_worker_event *event =
        worker->answer_count < FUZZ_ANSWERS_MAX ? &worker->answers[worker->answer_count++] : &lost;
    memset(event, 0, sizeof *event);
    event->kind = kind;
    return event;
}

/* ---- the engine that only pretends ---- */

static void prepare(struct fuzz_worker *worker, uint64_t generation, const struct mu_assign *assign)
{
    struct mu_worker_event *event = new_answer(worker, MU_WE_PREPARED);
    bool is_idle = mu_layout_is_idle(&assign->layout, assign->rank);
    worker->layout = assign->layout;
    worker->rank = assign->rank;
    worker->steps_done = assign->start_step;
    worker->running = 0;
    memset(&worker->held, 0, sizeof worker->held);
    worker->held.has_state = !is_idle;
    worker->held.step = assign->start_step;
    worker->held.share_count = is_idle ? 0 : 1;
    if (!is_idle)
        worker->held.shares[0] = (struct mu_held_share){.layout = assign->layout, .rank = assign->rank};
    event->parked.generation = generation;
    event->parked.held = worker->held;
}

static void park(struct fuzz_worker *worker, uint64_t generation, enum mu_park_reason reason)
{
    struct mu_worker_event *event = new_answer(worker, MU_WE_PARKED);
    worker->running = 0;
    event->parked.generation = generation;
    event->parked.held = worker->held;
    event->parked.reason = reason;
    if (reason == MU_PARK_FINISHED)
        event->parked.weights_sha256[0] = 1;
}

static void write_piece(struct fuzz_worker *worker, const struct mu_snapshot *snapshot)
{
    struct mu_piece_report *piece = &new_answer(worker, MU_WE_PIECE)->piece;
    piece->checkpoint = snapshot->checkpoint;
    piece->piece = snapshot->piece;
    piece->step = worker->held.step;
    piece->size_bytes = 1000;
    piece->checksum = (struct mu_hash128){.low = 1, .high = 2};
    snprintf(piece->file, sizeof piece->file, "piece-%u.safetensors", snapshot->piece);
}

static void load(struct fuzz_worker *worker)
{
    struct mu_worker_event *event = new_answer(worker, MU_WE_JOB_LOADED);
    event->job_loaded.numeric_identity = (struct mu_hash128){.low = 5, .high = 6};
    event->job_loaded.data_hash = (struct mu_hash128){.low = 7, .high = 8};
    event->job_loaded.identity_parts.count = 1;
    strcpy(event->job_loaded.identity_parts.parts[0].name, "gemm");
    event->job_loaded.identity_parts.parts[0].hash = 5;
}

static void feed(struct fuzz_worker *worker, const struct mu_worker_action *action)
{
    if (action->feed.order->role != MU_FEED_TAKE)
        return;
    struct mu_worker_event *event = new_answer(worker, MU_WE_FED);
    event->fed.number = action->feed.order->number;
    event->fed.state = MU_FEED_LIVE;
}

static void judge_message(struct fuzz_worker *worker, const struct mu_worker_message *message)
{
    const void *data;
    size_t size_bytes;
    struct mu_error err = {0};
    struct mu_worker_message again;
    mu_wire_arena_reset(&worker->arena);
    enum mu_status status = mu_wire_encode_worker(&worker->arena, message, &data, &size_bytes, &err);
    MU_ASSERT(status == MU_OK);
    status = mu_wire_decode_worker(&worker->arena, data, size_bytes, &again, &err);
    if (status != MU_OK)
        fprintf(stderr, "the worker sends what nobody takes: %s\n", err.text);
    MU_ASSERT(status == MU_OK);
}

static void on_action(void *ctx, const struct mu_worker_action *action)
{
    struct fuzz_worker *worker = ctx;
    switch (action->kind) {
    case MU_WA_CONNECT:
        new_answer(worker, MU_WE_CONNECTED);
        break;
    case MU_WA_SEND:
        judge_message(worker, action->message);
        break;
    case MU_WA_LOAD_JOB:
        load(worker);
        break;
    case MU_WA_PREPARE:
        prepare(worker, action->generation.generation, action->generation.assign);
        break;
    case MU_WA_RUN:
        worker->running = action->generation.generation;
        break;
    case MU_WA_ABORT:
        park(worker, action->generation.generation, MU_PARK_REVOKED);
        break;
    case MU_WA_SNAPSHOT:
        write_piece(worker, &action->snapshot.snapshot);
        break;
    case MU_WA_KEEP:
        new_answer(worker, MU_WE_KEPT)->kept =
            (struct mu_kept_report){.kind = action->keep->kind, .checkpoint = action->keep->checkpoint};
        break;
    case MU_WA_PROBE:
        if (action->probe->kind != 0) /* 0 stops a probe: no answer */
            new_answer(worker, MU_WE_PROBED)->probed =
                (struct mu_probe_report){.number = action->probe->number, .kind = action->probe->kind};
        break;
    case MU_WA_FEED:
        feed(worker, action);
        break;
    case MU_WA_FORGET:
        memset(&worker->held, 0, sizeof worker->held);
        worker->running = 0;
        break;
    case MU_WA_EXIT:
        worker->is_over = true;
        break;
    case MU_WA_DISCONNECT:
        break;
    }
    if (worker->also)
        worker->also(worker->also_ctx, action);
}

/* ---- stepping ---- */

static void step_once(struct fuzz_worker *worker, struct mu_worker_event *event)
{
    worker->now_us += 100;
    event->now_us = worker->now_us;
    event->random = (struct mu_id){.high = 9, .low = ++worker->random};
    mu_worker_step(worker->core, event, &worker->sink);
}

static void give_answers(struct fuzz_worker *worker)
{
    static struct mu_worker_event answers[FUZZ_ANSWERS_MAX];
    for (unsigned round = 0; round < 4; round++) {
        unsigned count = worker->answer_count;
        memcpy(answers, worker->answers, count * sizeof *answers);
        worker->answer_count = 0;
        for (unsigned i = 0; i < count; i++)
            step_once(worker, &answers[i]);
    }
}

void fuzz_worker_step(struct fuzz_worker *worker, struct mu_worker_event *event)
{
    step_once(worker, event);
    give_answers(worker);
}

void fuzz_worker_train(struct fuzz_worker *worker, uint64_t command)
{
    uint64_t generation = worker->running;
    if (generation == 0)
        return;
    struct mu_step_result result = {
        .step = worker->steps_done, .loss = 2.5, .grad_norm = 1, .command = command, .finite = true};
    worker->steps_done++;
    struct mu_boundary boundary =
        mu_worker_boundary(worker->core, worker->now_us, generation, worker->steps_done, &result);
    worker->held.step = worker->steps_done;
    worker->held.has_result = true;
    worker->held.result = result;
    struct mu_step_report *report = &new_answer(worker, MU_WE_STEP)->step;
    report->steps_done = worker->steps_done;
    report->result = result;
    report->step_count = 1;
    report->leaf_count = 1;
    report->total_us = 1000;
    if (worker->steps_done % 4 == 0)
        new_answer(worker, MU_WE_EVAL)->eval = (struct mu_eval_report){.step = worker->steps_done, .loss = 2.25};
    if (boundary.take_snapshot)
        write_piece(worker, &boundary.snapshot);
    if (boundary.park)
        park(worker, generation, MU_PARK_COMMAND);
    else if (worker->steps_done >= LAST_STEP)
        park(worker, generation, MU_PARK_FINISHED);
    give_answers(worker);
}

void fuzz_worker_init(struct fuzz_worker *worker, const char *name, const char *job)
{
    struct mu_worker_config config;
    mu_worker_config_init(&config);
    struct mu_hello *hello = &config.hello;
    snprintf(hello->software_version, sizeof hello->software_version, "0.1.0");
    snprintf(hello->job, sizeof hello->job, "%s", job);
    snprintf(hello->name, sizeof hello->name, "%s", name);
    snprintf(hello->host, sizeof hello->host, "host-%s", name);
    snprintf(hello->address, sizeof hello->address, "10.0.0.1:4711");
    snprintf(hello->backend, sizeof hello->backend, "cpu");
    hello->threads = 1;
    hello->memory_bytes = 1ull << 32;
    config.incarnation = (struct mu_id){.high = 9, .low = (uint8_t)name[0]};
    config.step_report_ms = 0;
    *worker = (struct fuzz_worker){.core = mu_worker_new(&config), .now_us = 1000000};
    worker->random = 1000u * (uint8_t)name[0];
    worker->sink = (struct mu_worker_sink){.emit = on_action, .ctx = worker};
    mu_wire_arena_init(&worker->arena);
    MU_ASSERT(worker->core);
}

void fuzz_worker_fini(struct fuzz_worker *worker)
{
    mu_worker_free(worker->core);
    mu_wire_arena_fini(&worker->arena);
}
