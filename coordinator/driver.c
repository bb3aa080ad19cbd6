#include "coordinator/driver.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/statvfs.h>

#include "common/clock.h"
#include "common/fault.h"
#include "common/log.h"
#include "common/notify.h"
#include "coordinator/driver_internal.h"
#include "coordinator/introspection.h"
#include "coordinator/records.h"
#include "coordinator/reflection.h"
#include "coordinator/refusals.h"
#include "coordinator/vitals.h"

enum {
    TURN_EVENTS_MAX = 256,          /* then what was persisted goes to the disk */
    TICK_OVERDUE_US = 1000000,      /* leases are judged when nothing waits, but not later than this */
    REFUSAL_LOG_US = 1000000,       /* broken streams are logged at most this often */
    SEND_QUEUE_BYTES_MAX = 2 << 20, /* per stream: a Welcome, an Assign and a burst of orders */
    SEND_QUEUE_MESSAGES_MAX = 4096,
    ORDINARY_CALLS_MAX = 4096,
    TLS_LOOK_US = 1000000,       /* were certificates or the list of the denied replaced? */
    HEALTH_LOOK_US = 250000,     /* can changes be stored? */
    REFUSALS_LOOK_US = 10000000, /* what was refused is told so often */
    TURN_US = 5000,              /* likewise, when questions take long */
    CHECKPOINT_TASKS_PER_JOB = MU_CHECKPOINTS_MAX + 4,
};

void mu_driver_config_init(struct mu_driver_config *config)
{
    *config = (struct mu_driver_config){
        .listen = "127.0.0.1:7070",
        .reserve_bytes = MU_STORE_RESERVE_BYTES_DEFAULT,
        .ballast_bytes = MU_STORE_BALLAST_BYTES_DEFAULT,
        .events_kept = MU_EVENTS_KEPT_DEFAULT,
        .hello_ms = 10000,
        .stop_ms = 3000,
        .pollers = 1,
        .connections_per_host = 4096,
        .calls_per_client = 1024,
        .questions_per_second = 1000,
        .worker_series = 10000,
        .certificate_s = MU_TOKEN_CERTIFICATE_S_DEFAULT,
    };
    mu_coord_config_init(&config->core);
}

/* ---- stepping ---- */

static struct mu_id draw_random(struct mu_driver *driver)
{
    if (driver->random_left == 0) {
        size_t done = 0;
        while (done < sizeof driver->random) {
            ssize_t got = getrandom((uint8_t *)driver->random + done, sizeof driver->random - done, 0);
            MU_ASSERT(got > 0 || errno == EINTR);
            if (got > 0)
                done += (size_t)got;
        }
        driver->random_left = MU_RANDOM_POOL;
    }
    return driver->random[--driver->random_left];
}

void mu_driver_step(struct mu_driver *driver, struct mu_coord_event *event)
{
    event->now_us = mu_clock_mono_us();
    event->wall_us = mu_clock_wall_us();
    event->random = draw_random(driver);
    mu_coord_step(driver->coord, event, &driver->sink);
    mu_api_after_step(driver->api);
}

static void step_from_api(void *ctx, struct mu_coord_event *event)
{
    mu_driver_step(ctx, event);
}

/* ---- streams ---- */

/* Not all of them: they come as fast as a peer likes. */
static void log_refusal(struct mu_driver *driver, struct mu_rpc_call *call, const struct mu_error *err)
{
    uint64_t now_us = mu_clock_mono_us();
    if (now_us - driver->last_refusal_log_us < REFUSAL_LOG_US)
        return;
    driver->last_refusal_log_us = now_us;
    MU_LOGW("call from %s ended: %s", mu_rpc_call_peer(call), err->text);
}

/* False: the call is over. */
static bool is_permitted(struct mu_driver *driver, const struct mu_rpc_event *event)
{
    struct mu_error err;
    if (!driver->access || mu_access_check(driver->access, mu_rpc_call_identity(event->call),
                                           mu_rpc_call_has_certificate(event->call), event->method_id, &err) == MU_OK)
        return true;
    log_refusal(driver, event->call, &err);
    mu_rpc_call_fail_error(event->call, &err);
    return false;
}

static void on_opened(struct mu_driver *driver, const struct mu_rpc_event *event)
{
    if (!is_permitted(driver, event) || event->method_id != MU_METHOD_ATTACH)
        return; /* reflection: a stream without a state */
    struct mu_session *session = mu_sessions_open(driver->sessions, event->call, mu_clock_mono_us());
    if (!session) {
        mu_rpc_call_finish(event->call, MU_RPC_RESOURCE_EXHAUSTED, "too many workers' streams: raise --max-workers");
        return;
    }
    mu_rpc_call_set_user(event->call, session);
}

/* A message that does not decode. Its sender is told: a worker that has not attached yet by a Reject, which is final
 * for it. */
static void hear_vitals(struct mu_driver *driver, struct mu_session *session)
{
    struct mu_vitals_news news = mu_vitals_hear(&session->vitals, driver->message.vitals, mu_clock_mono_us());
    driver->stats.network_errors += news.network_errors;
    driver->stats.gpu_xids += news.gpu_xids;
    driver->stats.gpu_failures += news.gpu_failures;
}

static void on_bad_message(struct mu_driver *driver, struct mu_session *session, const struct mu_error *err)
{
    log_refusal(driver, session->call, err);
    if (!session->known) {
        driver->stats.malformed_hellos++;
        struct mu_coord_message message = {.kind = MU_CM_REJECT};
        const void *data = NULL;
        size_t size_bytes = 0;
        message.reject.reason = MU_REJECT_INVALID;
        mu_wire_text_clean(err->text, message.reject.text, sizeof message.reject.text);
        mu_wire_arena_reset(&driver->out_arena);
        if (mu_wire_encode_coord(&driver->out_arena, &message, &data, &size_bytes, NULL) == MU_OK) {
            struct mu_rpc_bytes *bytes = mu_rpc_bytes_copy(data, size_bytes);
            if (mu_rpc_call_send(session->call, bytes) != MU_OK)
                MU_LOGD("a refusal was not delivered");
            mu_rpc_bytes_unref(bytes);
        }
    }
    mu_driver_break_session(driver, session, mu_rpc_code_of_status(err->status), err->text);
}

/* Under TLS a worker is who its certificate says, in every Hello of the stream. */
static enum mu_status bind_name(struct mu_driver *driver, struct mu_session *session, struct mu_error *err)
{
    char *name = driver->message.hello.name;
    if (!driver->access || driver->message.kind != MU_WM_HELLO)
        return MU_OK;
    if (name[0] == 0)
        memcpy(name, session->name, sizeof session->name);
    enum mu_status status =
        mu_access_bind_worker(mu_rpc_call_identity(session->call), draw_random(driver).low, name, err);
    if (status == MU_OK)
        memcpy(session->name, name, sizeof session->name);
    return status;
}

static void on_message(struct mu_driver *driver, const struct mu_rpc_event *event)
{
    if (event->method_id != MU_METHOD_ATTACH) {
        mu_reflection_message(&driver->out_arena, event->call, event->data, event->size_bytes);
        return;
    }
    struct mu_session *session = event->user;
    if (!session || session->closing)
        return;
    struct mu_error err = {0};
    mu_wire_arena_reset(&driver->in_arena);
    if (mu_wire_decode_worker(&driver->in_arena, event->data, event->size_bytes, &driver->message, &err) != MU_OK ||
        bind_name(driver, session, &err) != MU_OK) {
        on_bad_message(driver, session, &err);
        return;
    }
    if (!session->known) {
        if (driver->message.kind != MU_WM_HELLO) {
            mu_fail(&err, MU_ERR_INVALID, "WorkerMessage: the first message of a stream must be hello");
            on_bad_message(driver, session, &err);
            return;
        }
        MU_FAULT("coord.attach");
        mu_sessions_hello(driver->sessions, session);
    }
    if (driver->message.vitals)
        hear_vitals(driver, session);
    struct mu_coord_event step = {.kind = MU_CE_MESSAGE};
    step.message.session = session->number;
    step.message.message = &driver->message;
    mu_driver_step(driver, &step);
}

static void on_closed(struct mu_driver *driver, const struct mu_rpc_event *event)
{
    if (event->method_id == MU_METHOD_WATCH_EVENTS) {
        mu_events_closed(driver->events, event->user);
    } else if (event->method_id == MU_METHOD_ATTACH && event->user) {
        const char *reason =
            event->reason == MU_RPC_CLOSED_CANCELLED ? "stream reset" : mu_rpc_closed_name(event->reason);
        mu_driver_break_session(driver, event->user, MU_RPC_OK, reason);
    } else if (event->method_id == MU_METHOD_HEALTH_WATCH) {
        mu_health_closed(driver->health, event->user);
    } else if (event->method_id == MU_METHOD_REFLECTION || event->method_id == MU_METHOD_REFLECTION_ALPHA) {
        mu_rpc_call_finish(event->call, MU_RPC_OK, NULL);
    } /* a request: its answer comes and is dropped */
}

/* ---- remains of checkpoints that were given up ---- */

static void sweep_one(struct mu_driver *driver, const struct mu_job_record *job)
{
    uint64_t known[MU_CHECKPOINTS_MAX];
    size_t count = 0;
    struct mu_checkpoint_record record;
    while (count < MU_CHECKPOINTS_MAX &&
           mu_coord_checkpoint_view(driver->coord, job->spec.name, (uint32_t)count, &record))
        known[count++] = record.number;
    struct mu_checkpoint_task *task =
        mu_checkpoint_task_sweep(job->spec.checkpoint.path, job->spec.name, job->next_checkpoint, known, count);
    if (task)
        mu_checkpoint_io_submit(driver->io, task);
}

/* A writer that had not heard that its checkpoint was given up may have gone on after the directory was deleted. */
static void sweep_after_commit(struct mu_driver *driver, const char *job)
{
    struct mu_job_view *view = malloc(sizeof *view);
    if (view && mu_coord_job_find(driver->coord, job, view))
        sweep_one(driver, &view->record);
    free(view);
}

/* ---- results of other threads ---- */

static void on_planned(struct mu_driver *driver, struct mu_planned *planned)
{
    struct mu_coord_event event = {.kind = MU_CE_PLANNED};
    event.planned.ticket = planned->ticket;
    event.planned.plan = &planned->plan;
    event.planned.secret = planned->secret;
    MU_FAULT("coord.planned");
    mu_driver_step(driver, &event);
    mu_planned_free(planned);
}

static void note_space(struct mu_stats *stats, const struct mu_checkpoint_done *done)
{
    struct mu_checkpoint_space *space = NULL;
    for (uint32_t i = 0; i < stats->space_count && !space; i++)
        space = strcmp(stats->spaces[i].job, done->job) == 0 ? &stats->spaces[i] : NULL;
    if (!space && stats->space_count < stats->space_capacity)
        space = &stats->spaces[stats->space_count++];
    if (!space) /* more names than jobs at a time: the oldest gives way */
        space = &stats->spaces[done->checkpoint % stats->space_capacity];
    *space = (struct mu_checkpoint_space){.free_bytes = done->free_bytes, .size_bytes = done->size_bytes};
    memcpy(space->job, done->job, sizeof space->job);
}

static void on_checkpoint_done(struct mu_driver *driver, struct mu_checkpoint_done *done)
{
    struct mu_coord_event event = {.kind = done->scrubbed  ? MU_CE_SCRUBBED
                                           : done->deleted ? MU_CE_DELETED
                                                           : MU_CE_PUBLISHED};
    memcpy(event.checkpoint_io.job, done->job, sizeof event.checkpoint_io.job);
    event.checkpoint_io.checkpoint = done->checkpoint;
    event.checkpoint_io.status = done->result.status;
    event.checkpoint_io.step = done->step;
    event.checkpoint_io.size_bytes = done->size_bytes;
    event.checkpoint_io.text = done->result.status == MU_OK ? NULL : done->result.text;
    mu_driver_step(driver, &event);
    if (done->free_bytes)
        note_space(&driver->stats, done);
    if (!done->deleted && !done->scrubbed && done->result.status == MU_OK)
        sweep_after_commit(driver, done->job);
    free(done);
}

static struct mu_question_sources sources_of(const struct mu_driver *driver)
{
    struct mu_error full;
    return (struct mu_question_sources){.coord = driver->coord,
                                        .api = driver->api,
                                        .events = driver->events,
                                        .outbox = driver->outbox,
                                        .server = driver->server,
                                        .sessions = driver->sessions,
                                        .stats = &driver->stats,
                                        .worker_series = driver->config.worker_series,
                                        .may_write = mu_store_check(driver->store, &full) == MU_OK};
}

static void on_item(struct mu_driver *driver, struct mu_rpc_item *item)
{
    struct mu_posted *posted = (struct mu_posted *)item;
    switch (posted->kind) {
    case MU_POSTED_PLANNED:
        on_planned(driver, (struct mu_planned *)posted);
        break;
    case MU_POSTED_CHECKPOINT:
        on_checkpoint_done(driver, (struct mu_checkpoint_done *)posted);
        break;
    case MU_POSTED_QUESTION: {
        const struct mu_question_sources sources = sources_of(driver);
        mu_question_answer((struct mu_question *)posted, &sources);
        break;
    }
    }
}

static void introspect(struct mu_driver *driver, const struct mu_rpc_event *event)
{
    const struct mu_question_sources sources = sources_of(driver);
    mu_wire_arena_reset(&driver->out_arena);
    mu_introspection_call(&driver->out_arena, &sources, event->call, event->data, event->size_bytes);
}

static void drop_item(struct mu_rpc_item *item)
{
    struct mu_posted *posted = (struct mu_posted *)item;
    if (posted->kind == MU_POSTED_PLANNED)
        mu_planned_free((struct mu_planned *)posted);
    else if (posted->kind == MU_POSTED_QUESTION)
        mu_question_drop((struct mu_question *)posted);
    else
        free(posted);
}

/* ---- the loop ---- */

static void on_call(struct mu_driver *driver, const struct mu_rpc_event *event)
{
    if (!is_permitted(driver, event))
        return;
    if (event->method_id == MU_METHOD_HEALTH_CHECK)
        mu_health_check(driver->health, event->call, event->data, event->size_bytes);
    else if (event->method_id == MU_METHOD_HEALTH_WATCH)
        mu_health_watch(driver->health, event->call, event->data, event->size_bytes);
    else if (event->method_id == MU_METHOD_READ_COORDINATOR)
        introspect(driver, event);
    else if (event->method_id >= MU_METHOD_LIST_HANG_REPORTS)
        mu_hangs_call(driver->hangs, event->call, event->data, event->size_bytes);
    else if (event->method_id >= MU_METHOD_RECALL)
        mu_recalls_call(driver->recalls, event->call, event->data, event->size_bytes);
    else if (event->method_id >= MU_METHOD_CREATE_TOKEN)
        mu_tokens_call(driver->tokens, event->call, event->data, event->size_bytes);
    else
        mu_api_call(driver->api, event->call, event->data, event->size_bytes);
}

static void on_event(struct mu_driver *driver, const struct mu_rpc_event *event, bool *drained)
{
    switch (event->type) {
    case MU_RPC_EVENT_CALL:
        on_call(driver, event);
        break;
    case MU_RPC_EVENT_OPENED:
        on_opened(driver, event);
        break;
    case MU_RPC_EVENT_MESSAGE:
        on_message(driver, event);
        break;
    case MU_RPC_EVENT_WRITABLE:
        if (event->method_id == MU_METHOD_WATCH_EVENTS)
            mu_events_writable(driver->events, event->user);
        else if (event->method_id == MU_METHOD_HEALTH_WATCH)
            mu_health_writable(driver->health, event->user);
        break;
    case MU_RPC_EVENT_CLOSED:
        on_closed(driver, event);
        break;
    case MU_RPC_EVENT_ITEM:
        on_item(driver, event->item);
        break;
    case MU_RPC_EVENT_WAKE:
        break;
    case MU_RPC_EVENT_DRAINED:
        *drained = true;
        break;
    }
}

/* Streams that never said who they are. */
static void end_silent_sessions(struct mu_driver *driver, uint64_t now_us)
{
    for (;;) {
        struct mu_session *session = mu_sessions_oldest_silent(driver->sessions);
        if (!session || now_us < session->opened_us + driver->config.hello_ms * 1000ull)
            return;
        mu_driver_break_session(driver, session, MU_RPC_DEADLINE_EXCEEDED, "no Hello came");
    }
}

static void look_at_health(struct mu_driver *driver, uint64_t now_us)
{
    struct mu_error ignored;
    mu_notify_alive(now_us); /* at each turn: four times a second at least */
    if (now_us < driver->health_next_us)
        return;
    driver->health_next_us = now_us + HEALTH_LOOK_US;
    if (mu_rpc_server_refusals(driver->server).is_stuck)
        driver->watchdog.suspicious = true; /* a call to itself makes the listener look */
    mu_health_set(driver->health, mu_store_check(driver->store, &ignored) == MU_OK);
    struct statvfs fs;
    if (driver->config.data_dir && statvfs(driver->config.data_dir, &fs) == 0)
        driver->stats.store_free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
}

static enum mu_status put_series(void *ctx, const void *key, size_t key_bytes, const void *value, size_t value_bytes)
{
    struct mu_driver *driver = ctx;
    if (mu_outbox_is_behind(driver->outbox))
        return MU_ERR_BUSY; /* they are not worth waiting for */
    return mu_outbox_put(driver->outbox, key, key_bytes, value, value_bytes, NULL);
}

static void look_at_refusals(struct mu_driver *driver, uint64_t now_us)
{
    if (now_us < driver->refusals_next_us)
        return;
    driver->refusals_next_us = now_us + REFUSALS_LOOK_US;
    struct mu_rpc_refusals now = mu_rpc_server_refusals(driver->server);
    mu_refusals_tell(&driver->refusals_told, &now);
    driver->refusals_told = now;
}

static bool is_cut(void *access, const char *identity)
{
    return mu_access_is_denied(access, identity);
}

static void look_at_tls(struct mu_driver *driver, uint64_t now_us)
{
    struct mu_error err;
    bool has_changed;
    if (!driver->access || now_us < driver->tls_next_us)
        return;
    driver->tls_next_us = now_us + TLS_LOOK_US;
    if (mu_rpc_server_refresh_tls(driver->server, &has_changed, &err) != MU_OK)
        MU_LOGE("%s; the former certificate stays in use", err.text);
    else if (has_changed)
        MU_LOGI("TLS: new connections use the replaced certificate");
    if (mu_access_refresh(driver->access, &has_changed, &err) != MU_OK) {
        MU_LOGE("%s; the former list stays in force", err.text);
    } else if (has_changed) {
        size_t count = mu_rpc_server_cut(driver->server, is_cut, driver->access,
                                         "this identity is on the coordinator's list of denied identities");
        MU_LOGI("the list of denied identities was read again; calls cut: %zu", count);
    }
}

static uint64_t next_wake_us(struct mu_driver *driver)
{
    uint64_t until_us = mu_coord_next_deadline(driver->coord);
    const struct mu_session *silent = mu_sessions_oldest_silent(driver->sessions);
    if (silent && silent->opened_us + driver->config.hello_ms * 1000ull < until_us)
        until_us = silent->opened_us + driver->config.hello_ms * 1000ull;
    if (driver->watchdog.to_size && driver->watchdog.next_us < until_us)
        until_us = driver->watchdog.next_us;
    if (driver->health_next_us < until_us)
        until_us = driver->health_next_us;
    if (mu_series_next_us(driver->series) < until_us)
        until_us = mu_series_next_us(driver->series);
    if (driver->access && driver->tls_next_us < until_us)
        until_us = driver->tls_next_us;
    if (mu_hangs_next_us(driver->hangs) < until_us)
        until_us = mu_hangs_next_us(driver->hangs);
    return driver->refusals_next_us < until_us ? driver->refusals_next_us : until_us;
}

/* One turn: everything that waits (up to a limit) goes into the core, then to the disk in one batch, and what is
 * durable goes out. */
static enum mu_status turn(struct mu_driver *driver, uint64_t until_us, bool *drained, struct mu_error *err)
{
    bool is_quiet = false;
    uint64_t now_us = 0, began_us = 0;
    for (unsigned count = 0; count < TURN_EVENTS_MAX && !is_quiet && now_us - began_us < TURN_US; count++) {
        struct mu_rpc_event event;
        is_quiet = !mu_rpc_server_next(driver->server, count == 0 ? until_us : 0, &event);
        if (count == 0)
            began_us = mu_clock_mono_us();
        if (!is_quiet)
            on_event(driver, &event, drained);
        now_us = mu_clock_mono_us();
    }
    uint64_t deadline_us = mu_coord_next_deadline(driver->coord);
    if (now_us >= deadline_us && (is_quiet || now_us - deadline_us >= TICK_OVERDUE_US)) {
        struct mu_coord_event tick = {.kind = MU_CE_TICK};
        mu_driver_step(driver, &tick);
    }
    end_silent_sessions(driver, now_us);
    look_at_refusals(driver, now_us);
    look_at_tls(driver, now_us);
    if (atomic_exchange(&driver->examining, false))
        mu_hangs_examine_all(driver->hangs);
    mu_hangs_tick(driver->hangs, now_us);
    mu_series_sample(driver->series, driver->coord, driver->sessions, now_us, mu_clock_wall_us(), put_series, driver);
    if (!atomic_load(&driver->stopping))
        look_at_health(driver, now_us);
    if (mu_watchdog_look(&driver->watchdog, now_us))
        return mu_fail(
            err, MU_ERR_LIMIT,
            "there was no file descriptor left for a new connection, and since then the gRPC library accepts "
            "none; raise the limit of open files (ulimit -Hn, LimitNOFILE=)");
    enum mu_status status = mu_outbox_end_turn(driver->outbox, err);
    if (status == MU_OK)
        status = mu_outbox_failure(driver->outbox, err);
    if (status == MU_OK && mu_outbox_release(driver->outbox) > 0)
        status =
            mu_outbox_end_turn(driver->outbox, err); /* breaking a stream on release may have persisted something */
    if (status == MU_OK && driver->failure.status != MU_OK) {
        *err = driver->failure;
        status = err->status;
    }
    mu_histogram_add(&driver->stats.turns, mu_clock_mono_us() - began_us);
    return status;
}

/* Nothing new is accepted; what was begun becomes durable and is told; then everybody is sent home. Workers go on
 * stepping. */
static enum mu_status finish_run(struct mu_driver *driver, struct mu_error *err)
{
    bool drained = false;
    enum mu_status status = MU_OK;
    uint64_t until_us = mu_clock_mono_us() + driver->config.stop_ms * 1000ull;
    mu_notify("STOPPING=1");
    mu_health_set(driver->health, false);
    mu_rpc_server_drain(driver->server);
    do {
        uint64_t soon_us = mu_clock_mono_us() + 10000;
        status = turn(driver, soon_us < until_us ? soon_us : until_us, &drained, err);
    } while (status == MU_OK && !mu_outbox_idle(driver->outbox) && mu_clock_mono_us() < until_us);
    mu_events_end(driver->events);
    mu_health_end(driver->health);
    for (struct mu_session *session; (session = mu_sessions_any(driver->sessions));) {
        mu_rpc_call_finish(session->call, MU_RPC_UNAVAILABLE,
                           "the coordinator is stopping: attach again when it is back");
        mu_sessions_close(driver->sessions, session);
    }
    while (!drained && mu_clock_mono_us() < until_us) {
        struct mu_rpc_event event;
        if (!mu_rpc_server_next(driver->server, until_us, &event))
            break;
        if (event.type == MU_RPC_EVENT_ITEM)
            drop_item(event.item);
        drained = event.type == MU_RPC_EVENT_DRAINED;
    }
    return status;
}

enum mu_status mu_driver_run(struct mu_driver *driver, struct mu_error *err)
{
    bool drained = false;
    enum mu_status status = MU_OK;
    while (status == MU_OK && !atomic_load(&driver->stopping))
        status = turn(driver, next_wake_us(driver), &drained, err);
    return status ? status : finish_run(driver, err);
}

void mu_driver_stop(struct mu_driver *driver)
{
    atomic_store(&driver->stopping, true);
    mu_rpc_server_wake(driver->server);
}

void mu_driver_examine(struct mu_driver *driver)
{
    atomic_store(&driver->examining, true);
    mu_rpc_server_wake(driver->server);
}

const char *mu_driver_address(const struct mu_driver *driver)
{
    return mu_rpc_server_address(driver->server);
}

const char *mu_driver_http_url(const struct mu_driver *driver)
{
    return driver->http ? mu_http_url(driver->http) : NULL;
}

/* ---- start ---- */

static enum mu_status restore_one(void *arg, const struct mu_record *record, struct mu_error *err)
{
    struct mu_driver *driver = arg;
    driver->restored_count++;
    if (record->kind != MU_RECORD_EVENT)
        return mu_coord_restore(driver->coord, record, err);
    if (!driver->any_event)
        driver->oldest_stored_event = record->event->number;
    driver->any_event = true;
    driver->last_event = *record->event;
    mu_wire_arena_reset(&driver->out_arena);
    struct mu_rpc_bytes *bytes = mu_event_encode(&driver->out_arena, record->event, err);
    if (!bytes)
        return err->status;
    mu_events_add(driver->events, record->event->number, record->event->job, bytes);
    return MU_OK;
}

static enum mu_status restore(struct mu_driver *driver, struct mu_error *err)
{
    driver->oldest_stored_event = 1;
    enum mu_status status = mu_records_load(driver->store, restore_one, driver, err);
    if (status == MU_OK && driver->any_event)
        status = mu_coord_restore(driver->coord,
                                  &(struct mu_record){.kind = MU_RECORD_EVENT, .event = &driver->last_event}, err);
    return status;
}

static enum mu_status open_store(struct mu_driver *driver, struct mu_error *err)
{
    if (!driver->config.data_dir) {
        driver->store = mu_store_memory_new();
        return driver->store ? MU_OK : mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the store");
    }
    struct mu_store_rocksdb_config config = {.path = driver->config.data_dir,
                                             .reserve_bytes = driver->config.reserve_bytes,
                                             .ballast_bytes = driver->config.ballast_bytes};
    struct mu_error notice = {0};
    enum mu_status status = mu_store_rocksdb_open(&config, &driver->store, &notice, err);
    if (status == MU_OK && notice.text[0])
        MU_LOGW("%s", notice.text);
    return status;
}

static enum mu_status open_server(struct mu_driver *driver, struct mu_error *err)
{
    struct mu_rpc_server_config config = mu_rpc_server_config_default();
    uint32_t max_workers = driver->config.core.max_workers;
    config.listen = driver->config.listen;
    config.tls = driver->config.tls;
    config.takes_strangers = driver->config.ca_key != NULL;
    config.methods = mu_api_methods;
    config.method_count = MU_METHOD_COUNT;
    config.pollers = driver->config.pollers;
    config.max_receive_bytes = MU_WIRE_REQUEST_BYTES_MAX;
    config.max_calls = ORDINARY_CALLS_MAX;
    config.max_priority_calls = max_workers + max_workers / 8 + 64; /* some to be told that there are too many */
    config.max_connections_per_host = driver->config.connections_per_host;
    config.max_calls_per_peer = driver->config.calls_per_client;
    config.max_questions_per_second = driver->config.questions_per_second;
    config.max_send_queue_bytes = SEND_QUEUE_BYTES_MAX;
    config.max_send_queue_messages = SEND_QUEUE_MESSAGES_MAX;
    enum mu_status status = MU_OK;
    if (mu_rpc_tls_wanted(&config.tls))
        status = mu_access_new(driver->config.tls_deny, &driver->access, err);
    return status ? status : mu_rpc_server_new(&config, err, &driver->server);
}

static void wake_from_storage(void *arg)
{
    mu_rpc_server_wake(arg);
}

static enum mu_status start_threads(struct mu_driver *driver, struct mu_error *err)
{
    const struct mu_coord_config *core = &driver->config.core;
    enum mu_status status = MU_OK;
    if ((status = mu_outbox_new(driver->store, wake_from_storage, driver->server, driver, &driver->outbox, err)) ||
        (status = mu_planner_new(driver->server, &driver->planner, err)) ||
        (status =
             mu_checkpoint_io_new(driver->server, (size_t)core->max_jobs * CHECKPOINT_TASKS_PER_JOB, &driver->io, err)))
        return status;
    struct mu_api_config api = {.coord = driver->coord,
                                .store = driver->store,
                                .is_volatile = driver->config.data_dir == NULL,
                                .outbox = driver->outbox,
                                .events = driver->events,
                                .sessions = driver->sessions,
                                .step = step_from_api,
                                .ctx = driver};
    struct mu_tokens_config tokens = {.store = driver->store,
                                      .outbox = driver->outbox,
                                      .access = driver->access,
                                      .ca_cert = driver->config.tls.ca,
                                      .ca_key = driver->config.ca_key,
                                      .certificate_s = driver->config.certificate_s};
    if ((status = mu_tokens_new(&tokens, &driver->tokens, err)) ||
        (status = mu_recalls_new(driver->coord, driver->sessions, &driver->recalls, err)) ||
        (status = mu_hangs_new(driver->coord, driver->store, driver->outbox, driver->recalls, &driver->hangs, err)))
        return status;
    status = mu_api_new(&api, &driver->api, err);
    const struct mu_http_config http = {.listen = driver->config.http,
                                        .tls = driver->config.tls,
                                        .tls_deny = driver->config.tls_deny,
                                        .anywhere = driver->config.http_anywhere,
                                        .needs_reader = driver->config.http_auth,
                                        .readers = mu_tokens_readers(driver->tokens),
                                        .server = driver->server,
                                        .store = driver->store};
    if (status == MU_OK && http.listen)
        status = mu_http_new(&http, &driver->http, err);
    return status;
}

static void sweep_all(struct mu_driver *driver)
{
    struct mu_job_view *view = malloc(sizeof *view);
    for (uint32_t i = 0; view && mu_coord_job_view(driver->coord, i, view); i++) {
        if (view->record.spec.checkpoint.path[0])
            sweep_one(driver, &view->record);
    }
    free(view);
}

enum mu_status mu_driver_new(const struct mu_driver_config *config, struct mu_driver **ret_driver, struct mu_error *err)
{
    enum mu_status status = mu_coord_config_check(&config->core, err);
    if (status)
        return status;
    struct mu_driver *driver = calloc(1, sizeof *driver);
    if (!driver)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the coordinator");
    driver->config = *config;
    driver->sink = (struct mu_coord_sink){.emit = mu_driver_emit, .ctx = driver};
    driver->watchdog.fd = -1;
    mu_wire_arena_init(&driver->in_arena);
    mu_wire_arena_init(&driver->out_arena);
    uint32_t sessions = config->core.max_workers + config->core.max_workers / 8 + 64;
    driver->coord = mu_coord_new(&config->core);
    driver->series = mu_series_new(config->core.max_jobs, config->core.max_workers);
    driver->stats.space_capacity = config->core.max_jobs;
    driver->stats.spaces = calloc(config->core.max_jobs, sizeof *driver->stats.spaces);
    driver->stats.store_reserve_bytes = config->data_dir ? config->reserve_bytes : 0;
    if (!driver->coord || !driver->series || !driver->stats.spaces)
        status =
            mu_fail(err, MU_ERR_NO_MEMORY, "no memory for %u workers: lower --max-workers", config->core.max_workers);
    uint64_t began_us = mu_clock_mono_us();
    if (status || (status = mu_sessions_new(sessions, &driver->sessions, err)) ||
        (status = mu_events_new(config->events_kept, &driver->events, err)) ||
        (status = mu_health_new(&driver->health, err)) || (status = open_store(driver, err)) ||
        (status = restore(driver, err)) || (status = open_server(driver, err)) ||
        (status = start_threads(driver, err))) {
        mu_driver_free(driver);
        return status;
    }
    if (driver->restored_count)
        MU_LOGI("restored %llu records (%u jobs) in %.1f ms", (unsigned long long)driver->restored_count,
                mu_coord_job_count(driver->coord), (double)(mu_clock_mono_us() - began_us) * 1e-3);
    mu_watchdog_init(&driver->watchdog, mu_rpc_server_address(driver->server));
    mu_coord_start(driver->coord, mu_clock_mono_us(), mu_clock_wall_us(), &driver->sink);
    sweep_all(driver);
    *ret_driver = driver;
    return MU_OK;
}

void mu_driver_free(struct mu_driver *driver)
{
    if (!driver)
        return;
    /* Those who post to the server first, then the server. */
    mu_http_free(driver->http);
    mu_planner_free(driver->planner);
    mu_checkpoint_io_free(driver->io);
    mu_outbox_free(driver->outbox);
    struct mu_rpc_event event;
    while (driver->server && mu_rpc_server_next(driver->server, 0, &event)) {
        if (event.type == MU_RPC_EVENT_ITEM)
            drop_item(event.item);
    }
    mu_watchdog_fini(&driver->watchdog);
    mu_api_free(driver->api);
    mu_tokens_free(driver->tokens);
    mu_hangs_free(driver->hangs);
    mu_recalls_free(driver->recalls);
    mu_rpc_server_free(driver->server);
    mu_access_free(driver->access);
    mu_events_free(driver->events);
    mu_health_free(driver->health);
    mu_sessions_free(driver->sessions);
    mu_store_free(driver->store);
    mu_coord_free(driver->coord);
    mu_series_free(driver->series);
    free(driver->stats.spaces);
    mu_wire_arena_fini(&driver->in_arena);
    mu_wire_arena_fini(&driver->out_arena);
    free(driver);
}
