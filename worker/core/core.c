#include "worker/core/core.h"

#include <stdlib.h>
#include <string.h>

#include "common/mutant.h"
#include "common/rng.h"
#include "plan/amend.h"
#include "worker/core/judge.h"
#include "worker/core/probing.h"
#include "worker/core/report.h"
#include "worker/core/taking.h"

enum { OPEN_COMMANDS_MAX = 4, TAKEN_PIECES_MAX = 8 };

struct command {
    uint64_t number, not_before_step, first_open;
    enum mu_command_kind kind;
    struct mu_snapshot snapshot;
};

enum stream_state {
    STREAM_DOWN,    /* waiting for next_connect_us */
    STREAM_OPENING, /* CONNECT emitted */
    STREAM_GREETED, /* Hello sent, Welcome not yet received */
    STREAM_UP,
};

struct mu_worker {
    struct mu_worker_config config;
    struct mu_id incarnation;
    struct mu_worker_status status;
    uint64_t now_us;

    enum stream_state stream;
    uint64_t next_connect_us, backoff_ms, alone_since_us; /* alone: without a Welcome since then */
    uint64_t backoff_most_ms;                             /* the configured one, or what Welcome leaves room for */
    uint64_t heartbeat_us, next_heartbeat_us;

    struct mu_id job_uid;
    struct mu_job_spec spec; /* of job_uid; given to LOAD_JOB */
    uint32_t chunk_count;    /* of its model */
    bool loading, loaded;
    bool told_loaded; /* the last Hello said so */
    struct mu_hash128 numeric_identity, data_hash;
    struct mu_identity_parts identity_parts;

    struct mu_layout layout; /* of status.generation */
    uint64_t start_step;
    uint32_t taken_pieces[TAKEN_PIECES_MAX]; /* of checkpoint status.checkpoint_taken */
    uint32_t taken_count;

    struct command commands[OPEN_COMMANDS_MAX]; /* received, not executed, ascending numbers */
    uint32_t command_count;
    uint64_t revoked; /* newest generation revoked: an Assign up to it comes too late */

    struct mu_step_report report; /* merged, not yet sent; step_count = 0: none */
    uint64_t report_generation, report_due_us;

    struct pending_pieces pieces; /* reported, not yet acknowledged as durable */

    uint64_t progress;
    bool waiting;
    bool terminating, exited;
    bool status_due; /* a Status could not be sent */
    bool named_by_coordinator;
    char terminate_text[MU_TEXT_SIZE];
};

void mu_worker_config_init(struct mu_worker_config *config)
{
    memset(config, 0, sizeof *config);
    config->backoff_min_ms = 50;
    config->backoff_max_ms = 2000;
    config->step_report_ms = 100;
}

struct mu_worker *mu_worker_new(const struct mu_worker_config *config)
{
    struct mu_worker *worker = calloc(1, sizeof *worker);
    if (!worker)
        return NULL;
    worker->config = *config;
    worker->incarnation = config->incarnation;
    worker->backoff_ms = config->backoff_min_ms;
    worker->backoff_most_ms = config->backoff_max_ms;
    return worker;
}

void mu_worker_free(struct mu_worker *worker)
{
    free(worker);
}

static void copy_text(char *out, size_t size, const char *text)
{
    size_t length = text ? strnlen(text, size - 1) : 0;
    if (length)
        memcpy(out, text, length);
    out[length] = 0;
}

/* ---- what goes out ---- */

static void emit(const struct mu_worker_sink *sink, const struct mu_worker_action *action)
{
    sink->emit(sink->ctx, action);
}

static void emit_generation(const struct mu_worker_sink *sink, enum mu_worker_action_kind kind, uint64_t generation)
{
    emit(sink, &(struct mu_worker_action){.kind = kind, .generation = {.generation = generation}});
}

static void emit_exit(struct mu_worker *worker, const struct mu_worker_sink *sink, int code, const char *text)
{
    worker->exited = true;
    emit(sink, &(struct mu_worker_action){.kind = MU_WA_EXIT, .exit = {.code = code, .text = text}});
}

static void send(struct mu_worker *worker, const struct mu_worker_sink *sink, const struct mu_worker_message *message)
{
    if (worker->stream != STREAM_UP && message->kind != MU_WM_HELLO) {
        worker->status_due = worker->status_due || message->kind == MU_WM_STATUS;
        return; /* the next Hello carries the whole status; reports and pieces are kept and sent again */
    }
    if (message->kind == MU_WM_HELLO || message->kind == MU_WM_STATUS)
        worker->status_due = false;
    worker->next_heartbeat_us = worker->now_us + worker->heartbeat_us; /* any message is a sign of life */
    emit(sink, &(struct mu_worker_action){.kind = MU_WA_SEND, .message = message});
}

static void send_hello(struct mu_worker *worker, const struct mu_worker_sink *sink)
{
    struct mu_worker_message message = {.kind = MU_WM_HELLO, .hello = worker->config.hello};
    struct mu_hello *hello = &message.hello;
    hello->protocol_version = MU_PROTOCOL_VERSION;
    hello->incarnation = worker->incarnation;
    hello->job_uid = worker->job_uid;
    hello->prepared_job = worker->loaded;
    worker->told_loaded = worker->loaded;
    hello->numeric_identity = worker->numeric_identity;
    hello->identity_parts = worker->identity_parts;
    hello->data_hash = worker->data_hash;
    hello->status = worker->status;
    send(worker, sink, &message);
}

static void send_status(struct mu_worker *worker, const struct mu_worker_sink *sink)
{
    send(worker, sink,
         &(struct mu_worker_message){
             .kind = MU_WM_STATUS, .generation = worker->status.generation, .status = worker->status});
}

static void send_goodbye(struct mu_worker *worker, const struct mu_worker_sink *sink)
{
    struct mu_worker_message message = {.kind = MU_WM_GOODBYE};
    memcpy(message.goodbye.reason, worker->terminate_text, sizeof message.goodbye.reason);
    send(worker, sink, &message);
}

static void send_piece(struct mu_worker *worker, const struct mu_worker_sink *sink, const struct mu_piece_report *piece)
{
    send(worker, sink,
         &(struct mu_worker_message){.kind = MU_WM_PIECE, .generation = worker->status.generation, .piece = *piece});
}

static void send_step_report(struct mu_worker *worker, const struct mu_worker_sink *sink)
{
    if (worker->report.step_count == 0 || worker->stream != STREAM_UP)
        return;
    send(worker, sink,
         &(struct mu_worker_message){
             .kind = MU_WM_STEP, .generation = worker->report_generation, .step = worker->report});
    worker->report.step_count = 0;
    worker->report_due_us = worker->now_us + (uint64_t)worker->config.step_report_ms * 1000;
}

/* ---- the stream ---- */

/* Waits for the current backoff, spread over [1/2, 1] of it, and doubles it for the next time. */
static void schedule_connect(struct mu_worker *worker)
{
    uint64_t backoff_us = worker->backoff_ms * 1000;
    uint64_t jitter_us = mu_splitmix64(&worker->config.jitter_seed) % (backoff_us / 2 + 1);
    worker->next_connect_us = worker->now_us + backoff_us - jitter_us;
    worker->backoff_ms *= 2;
    if (worker->backoff_ms > worker->backoff_most_ms)
        worker->backoff_ms = worker->backoff_most_ms;
}

/* A coordinator that comes back waits lost_ms for its workers: none may sleep through that. */
static void bound_backoff(struct mu_worker *worker, uint32_t lost_ms)
{
    uint64_t most_ms = lost_ms / 2 > worker->config.backoff_min_ms ? lost_ms / 2 : worker->config.backoff_min_ms;
    worker->backoff_most_ms = most_ms < worker->config.backoff_max_ms ? most_ms : worker->config.backoff_max_ms;
}

static void stream_lost(struct mu_worker *worker)
{
    if (worker->stream == STREAM_UP)
        worker->alone_since_us = worker->now_us;
    worker->stream = STREAM_DOWN;
    schedule_connect(worker);
}

static void disconnect(struct mu_worker *worker, const struct mu_worker_sink *sink)
{
    emit(sink, &(struct mu_worker_action){.kind = MU_WA_DISCONNECT});
    stream_lost(worker);
}

static void connect_now(struct mu_worker *worker, const struct mu_worker_sink *sink)
{
    worker->stream = STREAM_OPENING;
    emit(sink, &(struct mu_worker_action){.kind = MU_WA_CONNECT});
}

static bool in_a_generation(const struct mu_worker *worker)
{
    return worker->status.phase != MU_PHASE_SPARE;
}

/* The coordinator counts this incarnation as dead: nothing it holds may be used again under its old name. */
static void become_new(struct mu_worker *worker, struct mu_id random, const struct mu_worker_sink *sink)
{
    if (!MU_MUTANT(MU_MUT_KEEP_ZOMBIE))
        emit(sink, &(struct mu_worker_action){.kind = MU_WA_FORGET});
    worker->incarnation = random;
    worker->status = (struct mu_worker_status){.phase = MU_PHASE_SPARE};
    worker->command_count = 0;
    worker->revoked = 0;
    worker->report.step_count = 0;
    worker->pieces.count = worker->taken_count = 0;
    worker->backoff_ms = worker->config.backoff_min_ms;
    emit(sink, &(struct mu_worker_action){.kind = MU_WA_DISCONNECT});
    connect_now(worker, sink);
}

static void on_welcome(struct mu_worker *worker, const struct mu_coord_message *message,
                       const struct mu_worker_sink *sink)
{
    worker->stream = STREAM_UP;
    worker->backoff_ms = worker->config.backoff_min_ms;
    bound_backoff(worker, message->welcome.lost_ms);
    worker->heartbeat_us = (uint64_t)message->welcome.heartbeat_ms * 1000;
    worker->next_heartbeat_us = worker->now_us + worker->heartbeat_us;
    worker->named_by_coordinator = worker->named_by_coordinator || worker->config.hello.name[0] == 0;
    memcpy(worker->config.hello.name, message->welcome.name, sizeof worker->config.hello.name);
    if (!worker->loading && !worker->loaded && message->welcome.spec) {
        worker->loading = true;
        worker->job_uid = message->welcome.job_uid;
        worker->spec = *message->welcome.spec;
        struct mu_model_spec model;
        mu_model_spec_init(&model, &worker->spec.model);
        worker->chunk_count = model.chunk_count;
        emit(sink, &(struct mu_worker_action){.kind = MU_WA_LOAD_JOB,
                                              .load = {.spec = &worker->spec, .uid = worker->job_uid}});
    }
    if (worker->loaded && !worker->told_loaded) /* the job was loaded between Hello and Welcome */
        send_hello(worker, sink);
    if (worker->status_due && !MU_MUTANT(MU_MUT_LOSE_STATUS)) /* it changed after the Hello was sent */
        send_status(worker, sink);
    for (uint32_t i = 0; i < worker->pieces.count; i++)
        send_piece(worker, sink, &worker->pieces.reports[i]);
    send_step_report(worker, sink);
    if (worker->terminating)
        send_goodbye(worker, sink);
}

static void on_reject(struct mu_worker *worker, const struct mu_worker_event *event, const struct mu_worker_sink *sink)
{
    const char *text = event->message->reject.text;
    switch (event->message->reject.reason) {
    case MU_REJECT_FENCED:
        become_new(worker, event->random, sink);
        break;
    case MU_REJECT_NO_JOB:
        disconnect(worker, sink);
        break;
    case MU_REJECT_BUSY:
        if (worker->named_by_coordinator && !in_a_generation(worker))
            worker->config.hello.name[0] = 0; /* a restarted coordinator gave it to another one: ask for a new name */
        disconnect(worker, sink);
        break;
    case MU_REJECT_JOB_OVER:
        emit_exit(worker, sink, 0, text);
        break;
    case MU_REJECT_VERSION:
    case MU_REJECT_IDENTITY:
    case MU_REJECT_QUARANTINED:
    case MU_REJECT_INVALID:
        emit_exit(worker, sink, 1, text);
        break;
    }
}

/* ---- generations ---- */

/* It parks without being told to, and says why. */
static void park_by_itself(struct mu_worker *worker, enum mu_park_reason reason, const char *text,
                           const struct mu_worker_sink *sink)
{
    worker->status.phase = MU_PHASE_PARKED;
    worker->status.park_reason = reason;
    worker->status.peer_failure = MU_PEER_FAILURE_NONE;
    worker->status.bad_checkpoint = 0;
    copy_text(worker->status.text, sizeof worker->status.text, text);
    send_status(worker, sink);
}

/* It can do no more: whoever counts on it is told so, in words. */
static void leave_broken(struct mu_worker *worker, const char *text, const struct mu_worker_sink *sink)
{
    copy_text(worker->terminate_text, sizeof worker->terminate_text, text);
    worker->status.held = (struct mu_held){.step = 0};
    if (in_a_generation(worker))
        park_by_itself(worker, MU_PARK_ENGINE, text, sink);
    else
        send_goodbye(worker, sink);
    emit_exit(worker, sink, 1, worker->terminate_text);
}

static bool is_still(const struct mu_worker_status *status)
{
    return status->phase == MU_PHASE_SPARE || status->phase == MU_PHASE_PARKED;
}

static void on_feed(struct mu_worker *worker, const struct mu_coord_message *message, const struct mu_worker_sink *sink)
{
    const struct mu_feed_order *order = &message->feed;
    struct mu_error err;
    bool gives = order->role == MU_FEED_GIVE;
    if (!worker->loaded || mu_layout_check(&order->layout, &worker->spec, &err) != MU_OK ||
        mu_layout_check(&order->next, &worker->spec, &err) != MU_OK ||
        take_amendments(&worker->spec, order->amendments, &err) != MU_OK)
        return;
    if (gives ? message->generation == worker->status.generation
              : taking_begins(&worker->status, &worker->layout, message->generation, order)) {
        holding_enters_era(&worker->status, mu_amend_era(&worker->spec.amendments));
        emit(sink, &(struct mu_worker_action){.kind = MU_WA_FEED,
                                              .feed = {.generation = message->generation, .order = order}});
    }
}

static void on_fed(struct mu_worker *worker, const struct mu_worker_event *event, const struct mu_worker_sink *sink)
{
    if (taking_goes_on(&worker->status, event->fed.number, event->fed.state, &event->fed.held, event->fed.text))
        send_status(worker, sink);
}

static void on_assign(struct mu_worker *worker, const struct mu_coord_message *message,
                      const struct mu_worker_sink *sink)
{
    struct mu_worker_status *status = &worker->status;
    bool still = is_still(status);                   /* an Assign ends a feed */
    if (message->generation == status->generation) { /* sent again after a lost stream */
        if (status->phase == MU_PHASE_PREPARED || status->phase == MU_PHASE_PARKED)
            send_status(worker, sink);
        return;
    }
    if (message->generation < status->generation || message->generation <= worker->revoked || !still || !worker->loaded)
        return;
    status->generation = message->generation;
    status->rank = message->assign.rank;
    status->phase = MU_PHASE_PREPARING;
    status->command_received = status->command_executed = message->assign.command_base;
    status->park_reason = MU_PARK_NONE;
    taking_is_over(status);
    worker->command_count = 0; /* a new generation cancels what was not done */
    worker->layout = message->assign.layout;
    worker->start_step = message->assign.start_step;
    struct mu_error err;
    if (judge_assign(&worker->spec, worker->chunk_count, &message->assign, &err) != MU_OK) {
        park_by_itself(worker, MU_PARK_PREPARE, err.text, sink);
        return;
    }
    holding_enters_era(status, mu_amend_era(&worker->spec.amendments));
    emit(sink,
         &(struct mu_worker_action){.kind = MU_WA_PREPARE,
                                    .generation = {.generation = message->generation, .assign = &message->assign}});
}

/* At a boundary of the generation it runs in. */
static void holds_own_share(struct mu_worker *worker, uint64_t step)
{
    struct mu_held *held = &worker->status.held;
    bool idle = mu_layout_is_idle(&worker->layout, worker->status.rank);
    held->has_state = !idle;
    held->has_gradient = false;
    held->step = step;
    held->share_count = idle ? 0 : 1;
    memset(held->shares, 0, sizeof held->shares);
    if (!idle) {
        held->shares[0].layout = worker->layout;
        held->shares[0].rank = worker->status.rank;
    }
}

static void on_go(struct mu_worker *worker, uint64_t generation, const struct mu_worker_sink *sink)
{
    if (generation != worker->status.generation || worker->status.phase != MU_PHASE_PREPARED)
        return;
    worker->status.phase = MU_PHASE_RUNNING;
    holds_own_share(worker, worker->start_step);
    emit_generation(sink, MU_WA_RUN, generation);
}

static void on_revoke(struct mu_worker *worker, uint64_t generation, const struct mu_worker_sink *sink)
{
    struct mu_worker_status *status = &worker->status;
    if (generation > worker->revoked)
        worker->revoked = generation;
    if (generation < status->generation)
        return;
    switch (status->phase) {
    case MU_PHASE_PREPARING:
    case MU_PHASE_PREPARED:
    case MU_PHASE_RUNNING:
        status->phase = MU_PHASE_PARKING;
        emit_generation(sink, MU_WA_ABORT, status->generation);
        break;
    case MU_PHASE_SPARE: /* its Assign never arrived */
    case MU_PHASE_PARKED:
        send_status(worker, sink);
        break;
    default:
        break; /* PARKING: the answer is on its way */
    }
}

static void on_command(struct mu_worker *worker, const struct mu_coord_message *message)
{
    struct mu_worker_status *status = &worker->status;
    if (message->generation != status->generation || message->command.number <= status->command_received)
        return;
    if (worker->command_count == OPEN_COMMANDS_MAX)
        return; /* not received: the vote stays below it, so nobody executes it */
    status->command_received = message->command.number;
    worker->commands[worker->command_count++] = (struct command){.number = message->command.number,
                                                                 .not_before_step = message->command.not_before_step,
                                                                 .first_open = message->command.first_open,
                                                                 .kind = message->command.kind,
                                                                 .snapshot = message->command.snapshot};
}

/* False: it has that piece already, or a newer checkpoint. It may get a second piece, that of a writer who was lost. */
static bool note_taken(struct mu_worker *worker, const struct mu_snapshot *snapshot)
{
    if (snapshot->checkpoint < worker->status.checkpoint_taken)
        return false;
    if (snapshot->checkpoint > worker->status.checkpoint_taken)
        worker->taken_count = 0;
    for (uint32_t i = 0; i < worker->taken_count; i++) {
        if (worker->taken_pieces[i] == snapshot->piece)
            return false;
    }
    if (worker->taken_count == TAKEN_PIECES_MAX)
        return false;
    worker->status.checkpoint_taken = snapshot->checkpoint;
    worker->taken_pieces[worker->taken_count++] = snapshot->piece;
    return true;
}

static void on_snapshot(struct mu_worker *worker, const struct mu_coord_message *message,
                        const struct mu_worker_sink *sink)
{
    if (worker->status.phase != MU_PHASE_PARKED || message->generation != worker->status.generation)
        return;
    if (!note_taken(worker, &message->snapshot))
        return; /* asked again after a lost stream; its report is on the way, or was sent again, too */
    emit(sink,
         &(struct mu_worker_action){.kind = MU_WA_SNAPSHOT,
                                    .snapshot = {.generation = message->generation, .snapshot = message->snapshot}});
}

/* Nothing of it is kept here: whoever asked knows when to give up. */
static void on_probe(struct mu_worker *worker, const struct mu_probe_order *order, const struct mu_worker_sink *sink)
{
    struct mu_worker_message refusal = {.kind = MU_WM_PROBED};
    if (probing_begins(&worker->status, worker->loaded, order, &refusal.probed))
        emit(sink, &(struct mu_worker_action){.kind = MU_WA_PROBE, .probe = order});
    else
        send(worker, sink, &refusal);
}

static void on_message(struct mu_worker *worker, const struct mu_worker_event *event, const struct mu_worker_sink *sink)
{
    const struct mu_coord_message *message = event->message;
    if (worker->stream != STREAM_GREETED && worker->stream != STREAM_UP)
        return; /* from a stream that was given up meanwhile */
    switch (message->kind) {
    case MU_CM_WELCOME:
        on_welcome(worker, message, sink);
        break;
    case MU_CM_REJECT:
        on_reject(worker, event, sink);
        break;
    case MU_CM_ASSIGN:
        on_assign(worker, message, sink);
        break;
    case MU_CM_GO:
        on_go(worker, message->generation, sink);
        break;
    case MU_CM_REVOKE:
        on_revoke(worker, message->generation, sink);
        break;
    case MU_CM_COMMAND:
        on_command(worker, message);
        break;
    case MU_CM_SNAPSHOT:
        on_snapshot(worker, message, sink);
        break;
    case MU_CM_PIECE_ACK:
        pieces_acknowledged(&worker->pieces, message->piece_ack.checkpoint, message->piece_ack.piece);
        break;
    case MU_CM_RELEASE:
        emit_exit(worker, sink, (int)message->release.exit_code, message->release.text);
        break;
    case MU_CM_FEED:
        on_feed(worker, message, sink);
        break;
    case MU_CM_KEEP: /* nothing of it is kept here: an answer that is lost is asked for again */
        emit(sink, &(struct mu_worker_action){.kind = MU_WA_KEEP, .keep = &message->keep});
        break;
    case MU_CM_PROBE:
        on_probe(worker, &message->probe, sink);
        break;
    case MU_CM_RECALL: /* the shell's: nothing of the protocol depends on it */
    case MU_CM_COUNT:
        break;
    }
}

/* ---- the engine ---- */

static void on_job_loaded(struct mu_worker *worker, const struct mu_worker_event *event,
                          const struct mu_worker_sink *sink)
{
    worker->loading = false;
    if (event->job_loaded.status != MU_OK) {
        leave_broken(worker, event->job_loaded.text, sink);
        return;
    }
    worker->loaded = true;
    worker->numeric_identity = event->job_loaded.numeric_identity;
    worker->identity_parts = event->job_loaded.identity_parts;
    worker->data_hash = event->job_loaded.data_hash;
    if (event->job_loaded.files_address) {
        struct mu_hello *hello = &worker->config.hello;
        copy_text(hello->files_address, sizeof hello->files_address, event->job_loaded.files_address);
        memcpy(hello->files_secret, event->job_loaded.files_secret, sizeof hello->files_secret);
    }
    if (worker->stream == STREAM_UP)
        send_hello(worker, sink);
}

static void on_prepared(struct mu_worker *worker, const struct mu_parked *parked, const struct mu_worker_sink *sink)
{
    if (parked->generation != worker->status.generation || worker->status.phase != MU_PHASE_PREPARING)
        return; /* revoked meanwhile: the answer to the abort follows */
    worker->status.phase = MU_PHASE_PREPARED;
    worker->status.held = parked->held;
    send_status(worker, sink);
}

static void on_parked(struct mu_worker *worker, const struct mu_parked *parked, const struct mu_worker_sink *sink)
{
    struct mu_worker_status *status = &worker->status;
    bool again = status->phase == MU_PHASE_PARKED && status->feed != 0; /* what it held then has made room */
    if (parked->generation != status->generation || status->phase == MU_PHASE_SPARE || again)
        return;
    /* The engine's own reason stands: an abort may cross a park that happened by itself. */
    status->phase = MU_PHASE_PARKED;
    status->held = parked->held;
    status->park_reason = parked->reason;
    status->peer_rank = parked->peer_rank;
    status->peer_failure = parked->peer_failure;
    status->bad_checkpoint = parked->bad_checkpoint;
    memcpy(status->text, parked->text, sizeof status->text);
    memcpy(status->weights_sha256, parked->weights_sha256, sizeof status->weights_sha256);
    status->weights_unfinite = parked->weights_unfinite;
    send_step_report(worker, sink);
    send_status(worker, sink);
}

static void on_step(struct mu_worker *worker, const struct mu_step_report *step, const struct mu_worker_sink *sink)
{
    struct mu_step_report *sum = &worker->report;
    if (sum->step_count > 0 && worker->report_generation == worker->status.generation) {
        step_report_add(sum, step);
    } else {
        *sum = *step;
        worker->report_generation = worker->status.generation;
    }
    if (worker->now_us >= worker->report_due_us)
        send_step_report(worker, sink);
}

/* ---- time and signals ---- */

static void on_tick(struct mu_worker *worker, const struct mu_worker_sink *sink)
{
    uint64_t give_up_us = (uint64_t)worker->config.give_up_ms * 1000;
    if (worker->stream != STREAM_UP && give_up_us && worker->now_us - worker->alone_since_us >= give_up_us) {
        emit_exit(worker, sink, 3, "no coordinator answered for --give-up-after seconds");
        return;
    }
    if (worker->stream == STREAM_DOWN && worker->now_us >= worker->next_connect_us)
        connect_now(worker, sink);
    if (worker->stream != STREAM_UP)
        return;
    if (worker->now_us >= worker->report_due_us)
        send_step_report(worker, sink);
    if (worker->now_us >= worker->next_heartbeat_us) {
        struct mu_worker_message message = {.kind = MU_WM_HEARTBEAT};
        message.heartbeat.progress = worker->progress;
        message.heartbeat.phase = worker->status.phase;
        message.heartbeat.step = worker->status.held.step;
        message.heartbeat.waiting = worker->waiting;
        send(worker, sink, &message);
    }
}

static void on_terminate(struct mu_worker *worker, const char *text, const struct mu_worker_sink *sink)
{
    worker->terminating = true;
    copy_text(worker->terminate_text, sizeof worker->terminate_text, text);
    send_goodbye(worker, sink);
    if (!in_a_generation(worker)) /* a spare holds nothing that anybody could miss */
        emit_exit(worker, sink, 0, worker->terminate_text);
}

void mu_worker_step(struct mu_worker *worker, const struct mu_worker_event *event, const struct mu_worker_sink *sink)
{
    if (worker->exited)
        return;
    worker->now_us = event->now_us;
    switch (event->kind) {
    case MU_WE_START:
        worker->alone_since_us = event->now_us;
        connect_now(worker, sink);
        break;
    case MU_WE_TICK:
        on_tick(worker, sink);
        break;
    case MU_WE_CONNECTED:
        if (worker->stream == STREAM_OPENING) {
            worker->stream = STREAM_GREETED;
            send_hello(worker, sink);
        }
        break;
    case MU_WE_DISCONNECTED:
        if (worker->stream != STREAM_DOWN)
            stream_lost(worker);
        break;
    case MU_WE_MESSAGE:
        on_message(worker, event, sink);
        break;
    case MU_WE_JOB_LOADED:
        on_job_loaded(worker, event, sink);
        break;
    case MU_WE_PREPARED:
        on_prepared(worker, &event->parked, sink);
        break;
    case MU_WE_PARKED:
        on_parked(worker, &event->parked, sink);
        break;
    case MU_WE_STEP:
        on_step(worker, &event->step, sink);
        break;
    case MU_WE_EVAL:
        send(worker, sink,
             &(struct mu_worker_message){
                 .kind = MU_WM_EVAL, .generation = worker->status.generation, .eval = event->eval});
        break;
    case MU_WE_PIECE:
        pieces_add(&worker->pieces, &event->piece);
        send_piece(worker, sink, &event->piece);
        break;
    case MU_WE_KEPT:
        send(worker, sink, &(struct mu_worker_message){.kind = MU_WM_KEPT, .kept = event->kept});
        break;
    case MU_WE_PROBED:
        send(worker, sink, &(struct mu_worker_message){.kind = MU_WM_PROBED, .probed = event->probed});
        break;
    case MU_WE_PROGRESS:
        worker->progress = event->progress.counter;
        worker->waiting = event->progress.waiting;
        break;
    case MU_WE_FED:
        on_fed(worker, event, sink);
        break;
    case MU_WE_TERMINATE:
        on_terminate(worker, event->text, sink);
        break;
    case MU_WE_BROKEN:
        leave_broken(worker, event->text, sink);
        break;
    }
}

uint64_t mu_worker_next_deadline(const struct mu_worker *worker)
{
    uint64_t deadline = UINT64_MAX;
    if (worker->exited)
        return deadline;
    if (worker->stream == STREAM_UP) {
        deadline = worker->next_heartbeat_us;
        if (worker->report.step_count > 0 && worker->report_due_us < deadline)
            deadline = worker->report_due_us;
        return deadline;
    }
    if (worker->stream == STREAM_DOWN)
        deadline = worker->next_connect_us;
    if (worker->config.give_up_ms) {
        uint64_t give_up_us = worker->alone_since_us + (uint64_t)worker->config.give_up_ms * 1000;
        if (give_up_us < deadline)
            deadline = give_up_us;
    }
    return deadline;
}

/* ---- called by the engine, once a step ---- */

uint64_t mu_worker_vote(const struct mu_worker *worker, uint64_t generation)
{
    /* In a newer generation the numbers would mean other commands; the old generation's votes lead nowhere then. */
    return generation == worker->status.generation ? worker->status.command_received : 0;
}

struct mu_boundary mu_worker_boundary(struct mu_worker *worker, uint64_t now_us, uint64_t generation,
                                      uint64_t steps_done, const struct mu_step_result *result)
{
    struct mu_boundary decision = {0};
    if (generation != worker->status.generation)
        return decision;
    worker->now_us = now_us;
    holds_own_share(worker, steps_done);
    worker->status.held.has_result = true;
    worker->status.held.result = *result;
    uint32_t kept = 0;
    uint64_t first_open =
        0; /* what was given up may not have reached everybody; that it was, did, as far as the vote says */
    for (uint32_t i = 0; i < worker->command_count; i++) {
        const struct command *command = &worker->commands[i];
        if (command->number <= result->command && command->first_open > first_open)
            first_open = command->first_open;
    }
    for (uint32_t i = 0; i < worker->command_count; i++) {
        const struct command *command = &worker->commands[i];
        if (command->number < first_open)
            continue;
        bool agreed = command->number <= result->command || MU_MUTANT(MU_MUT_EXECUTE_WITHOUT_VOTE);
        if (!agreed || steps_done < command->not_before_step) {
            worker->commands[kept++] = *command;
            continue;
        }
        worker->status.command_executed = command->number;
        if (command->kind == MU_COMMAND_PARK) {
            decision.park = true;
        } else if (!decision.take_snapshot && command->snapshot.piece < mu_layout_working(&command->snapshot.layout) &&
                   note_taken(worker, &command->snapshot)) {
            decision.take_snapshot = true; /* a rank without a piece executes the command all the same */
            decision.snapshot = command->snapshot;
        }
    }
    worker->command_count = kept;
    return decision;
}

const struct mu_worker_status *mu_worker_status(const struct mu_worker *worker)
{
    return &worker->status;
}

struct mu_id mu_worker_incarnation(const struct mu_worker *worker)
{
    return worker->incarnation;
}

bool mu_worker_connected(const struct mu_worker *worker)
{
    return worker->stream == STREAM_UP;
}

const char *mu_worker_name(const struct mu_worker *worker)
{
    return worker->config.hello.name;
}
