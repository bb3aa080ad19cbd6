#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/fault.h"
#include "common/log.h"
#include "coordinator/driver_internal.h"
#include "coordinator/records.h"

enum { SERIES_DROPPED_MAX = MU_STORE_BATCH_OPS_MAX / 4 }; /* of one job that is forgotten */

static void fail_run(struct mu_driver *driver, const struct mu_error *err)
{
    if (driver->failure.status == MU_OK)
        driver->failure = *err;
}

static void fail_no_memory(struct mu_driver *driver, const char *what)
{
    struct mu_error err;
    mu_fail(&err, MU_ERR_NO_MEMORY, "no memory for %s", what);
    fail_run(driver, &err);
}

/* ---- messages to workers ---- */

static enum mu_stream_end end_of(enum mu_rpc_code code)
{
    return code == MU_RPC_OK                   ? MU_STREAM_RESET
           : code == MU_RPC_RESOURCE_EXHAUSTED ? MU_STREAM_SLOW
                                               : MU_STREAM_MALFORMED;
}

void mu_driver_break_session(struct mu_driver *driver, struct mu_session *session, enum mu_rpc_code code,
                             const char *reason)
{
    struct mu_coord_event event = {.kind = MU_CE_DISCONNECTED};
    event.disconnected.session = session->number;
    event.disconnected.reason = reason;
    event.disconnected.end = end_of(code);
    bool tell = session->known && !session->closing;
    mu_rpc_call_finish(session->call, code, code == MU_RPC_OK ? NULL : reason);
    mu_sessions_close(driver->sessions, session);
    if (tell)
        mu_driver_step(driver, &event);
}

struct held_send {
    struct mu_outbox_item item;
    uint64_t session;
    enum mu_coord_message_kind kind;
    struct mu_rpc_bytes *bytes;
};

static void faults_of_send(enum mu_coord_message_kind kind)
{
    switch (kind) {
    case MU_CM_WELCOME:
        MU_FAULT("coord.send.welcome");
        break;
    case MU_CM_ASSIGN:
        MU_FAULT("coord.send.assign");
        break;
    case MU_CM_GO:
        MU_FAULT("coord.send.go");
        break;
    case MU_CM_REVOKE:
        MU_FAULT("coord.send.revoke");
        break;
    case MU_CM_COMMAND:
        MU_FAULT("coord.send.command");
        break;
    case MU_CM_SNAPSHOT:
        MU_FAULT("coord.send.snapshot");
        break;
    case MU_CM_PIECE_ACK:
        MU_FAULT("coord.send.piece_ack");
        break;
    case MU_CM_FEED:
        MU_FAULT("coord.send.feed");
        break;
    case MU_CM_RELEASE:
        MU_FAULT("coord.send.release");
        break;
    case MU_CM_KEEP:
        MU_FAULT("coord.send.keep");
        break;
    case MU_CM_REJECT:
    case MU_CM_RECALL:
    case MU_CM_PROBE:
    case MU_CM_COUNT:
        break;
    }
}

static void run_send(void *ctx, struct mu_outbox_item *item, bool drop)
{
    struct mu_driver *driver = ctx;
    struct held_send *held = (struct held_send *)item;
    struct mu_session *session = drop ? NULL : mu_sessions_find(driver->sessions, held->session);
    if (session) {
        faults_of_send(held->kind);
        enum mu_status status = mu_rpc_call_send(session->call, held->bytes);
        if (status == MU_ERR_LIMIT) /* MU_ERR_CANCELLED: CLOSED will come */
            mu_driver_break_session(driver, session, MU_RPC_RESOURCE_EXHAUSTED, "does not read its messages");
    }
    mu_rpc_bytes_unref(held->bytes);
    free(held);
}

static void emit_send(struct mu_driver *driver, const struct mu_coord_action *action)
{
    const void *data = NULL;
    size_t size_bytes = 0;
    struct mu_error err = {0};
    if (mu_wire_encode_coord(&driver->out_arena, action->send.message, &data, &size_bytes, &err) != MU_OK) {
        fail_run(driver, &err);
        return;
    }
    struct held_send *held = malloc(sizeof *held);
    if (!held) {
        fail_no_memory(driver, "a message");
        return;
    }
    held->session = action->send.session;
    held->kind = action->send.message->kind;
    held->bytes = mu_rpc_bytes_copy(data, size_bytes);
    mu_outbox_hold(driver->outbox, &held->item, run_send);
}

struct held_close {
    struct mu_outbox_item item;
    uint64_t session;
};

static void run_close(void *ctx, struct mu_outbox_item *item, bool drop)
{
    struct mu_driver *driver = ctx;
    struct held_close *held = (struct held_close *)item;
    struct mu_session *session = drop ? NULL : mu_sessions_find(driver->sessions, held->session);
    if (session) {
        mu_rpc_call_finish(session->call, MU_RPC_OK, NULL);
        mu_sessions_close(driver->sessions, session);
    }
    free(held);
}

static void emit_close(struct mu_driver *driver, const struct mu_coord_action *action)
{
    struct mu_session *session = mu_sessions_find(driver->sessions, action->close.session);
    if (!session || session->closing)
        return;
    session->closing = true; /* what it says from now on is not heard */
    struct held_close *held = malloc(sizeof *held);
    if (!held) {
        fail_no_memory(driver, "the end of a stream");
        return;
    }
    held->session = action->close.session;
    mu_outbox_hold(driver->outbox, &held->item, run_close);
}

/* ---- records and events ---- */

static void emit_persist(struct mu_driver *driver, const struct mu_record *record)
{
    struct mu_error err = {0};
    if (record->kind == MU_RECORD_ACCOUNT && mu_outbox_is_behind(driver->outbox))
        return; /* the next one says the same and more; without end they would be too many for one batch */
    enum mu_status status = mu_outbox_persist(driver->outbox, &driver->out_arena, record, &err);
    if (status == MU_OK && record->kind == MU_RECORD_EVENT) {
        /* Two for one while there are too many: an event list that was made shorter shrinks. */
        for (int i = 0; i < 2 && record->event->number - driver->oldest_stored_event >= driver->config.events_kept &&
                        status == MU_OK;
             i++) {
            struct mu_event_record old = {.number = driver->oldest_stored_event++};
            status =
                mu_outbox_forget(driver->outbox, &(struct mu_record){.kind = MU_RECORD_EVENT, .event = &old}, &err);
        }
    }
    if (status)
        fail_run(driver, &err);
}

static void drop_series(void *ctx, const void *key, size_t key_bytes)
{
    struct mu_driver *driver = ctx;
    struct mu_error err;
    if (mu_outbox_delete(driver->outbox, key, key_bytes, &err) != MU_OK)
        fail_run(driver, &err);
}

static void emit_forget(struct mu_driver *driver, const struct mu_record *record)
{
    struct mu_error err = {0};
    enum mu_status status = mu_outbox_forget(driver->outbox, record, &err);
    if (status == MU_OK && record->kind == MU_RECORD_JOB)
        status = mu_series_forget(driver->store, record->job->spec.name, SERIES_DROPPED_MAX, drop_series, driver, &err);
    if (status != MU_OK)
        fail_run(driver, &err);
}

struct held_event {
    struct mu_outbox_item item;
    struct mu_rpc_bytes *bytes;
    struct mu_event_record record;
};

static void log_event(const struct mu_event_record *event)
{
    static const enum mu_log_level levels[] = {
        [MU_EVENT_INFO] = MU_LOG_INFO, [MU_EVENT_WARNING] = MU_LOG_WARN, [MU_EVENT_ERROR] = MU_LOG_ERROR};
    char fields[256];
    snprintf(fields, sizeof fields, "event=%llu kind=%s job=%s worker=%s generation=%llu step=%llu",
             (unsigned long long)event->number, event->kind, event->job[0] ? event->job : "-",
             event->worker[0] ? event->worker : "-", (unsigned long long)event->generation,
             (unsigned long long)event->step);
    mu_log(levels[event->severity], fields, "%s", event->text);
}

static void run_event(void *ctx, struct mu_outbox_item *item, bool drop)
{
    struct mu_driver *driver = ctx;
    struct held_event *held = (struct held_event *)item;
    if (drop) {
        mu_rpc_bytes_unref(held->bytes);
    } else {
        log_event(&held->record);
        mu_events_add(driver->events, held->record.number, held->record.job, held->bytes);
    }
    free(held);
}

static void emit_event(struct mu_driver *driver, const struct mu_event_record *event)
{
    struct mu_error err = {0};
    struct held_event *held = malloc(sizeof *held);
    if (!held) {
        fail_no_memory(driver, "an event");
        return;
    }
    held->record = *event;
    held->bytes = mu_event_encode(&driver->out_arena, event, &err);
    if (!held->bytes) {
        free(held);
        fail_run(driver, &err);
        return;
    }
    mu_outbox_hold(driver->outbox, &held->item, run_event);
}

/* ---- plans and files ---- */

static void emit_plan(struct mu_driver *driver, const struct mu_coord_action *action)
{
    struct mu_error err = {0};
    if (mu_planner_submit(driver->planner, action->plan.ticket, action->plan.input, &err) != MU_OK)
        fail_run(driver, &err);
}

struct held_task {
    struct mu_outbox_item item;
    struct mu_checkpoint_task *task;
};

static void run_task(void *ctx, struct mu_outbox_item *item, bool drop)
{
    struct mu_driver *driver = ctx;
    struct held_task *held = (struct held_task *)item;
    if (drop)
        mu_checkpoint_task_free(held->task);
    else
        mu_checkpoint_io_submit(driver->io, held->task);
    free(held);
}

static void emit_task(struct mu_driver *driver, const struct mu_coord_action *action)
{
    const struct mu_job_record *job = action->checkpoint_io.job;
    const struct mu_checkpoint_record *checkpoint = action->checkpoint_io.checkpoint;
    struct held_task *held = malloc(sizeof *held);
    struct mu_checkpoint_task *task = action->kind == MU_CA_DELETE ? mu_checkpoint_task_delete(checkpoint)
                                      : action->kind == MU_CA_SCRUB
                                          ? mu_checkpoint_task_scrub(checkpoint)
                                          : mu_checkpoint_task_publish(job, checkpoint, action->checkpoint_io.probe);
    if (!held || !task) {
        free(held);
        mu_checkpoint_task_free(task);
        fail_no_memory(driver, "a checkpoint operation");
        return;
    }
    held->task = task;
    mu_outbox_hold(driver->outbox, &held->item, run_task);
}

/* ---- the sink ---- */

void mu_driver_emit(void *ctx, const struct mu_coord_action *action)
{
    struct mu_driver *driver = ctx;
    mu_wire_arena_reset(&driver->out_arena);
    switch (action->kind) {
    case MU_CA_SEND:
        emit_send(driver, action);
        break;
    case MU_CA_CLOSE:
        emit_close(driver, action);
        break;
    case MU_CA_PERSIST:
        emit_persist(driver, &action->record);
        break;
    case MU_CA_FORGET:
        emit_forget(driver, &action->record);
        break;
    case MU_CA_PLAN:
        emit_plan(driver, action);
        break;
    case MU_CA_PUBLISH:
    case MU_CA_DELETE:
    case MU_CA_SCRUB:
        emit_task(driver, action);
        break;
    case MU_CA_EVENT:
        emit_event(driver, action->event);
        break;
    case MU_CA_REPLY:
        mu_api_reply(driver->api, action);
        break;
    case MU_CA_EXAMINE:
        mu_hangs_examine(driver->hangs, action);
        break;
    }
}
