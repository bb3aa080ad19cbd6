#include "worker/agent.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/fault.h"
#include "common/log.h"
#include "common/notify.h"
#include "proto/wire.h"
#include "rpc/client.h"
#include "worker/comm.h"
#include "worker/comm_nccl.h"
#include "worker/engine.h"
#include "worker/holder.h"
#include "worker/keeper.h"
#include "worker/leave.h"
#include "worker/ledger.h"
#include "worker/notes.h"
#include "worker/nvml.h"
#include "worker/recollect.h"
#include "worker/renew.h"
#include "worker/vitals.h"

#define ATTACH_METHOD "/muster.v1.WorkerService/Attach"

/* One stream to the coordinator, from CONNECT until the main thread frees it. */
struct link {
    struct agent *agent;
    struct mu_rpc_stream *stream;
    struct link *next; /* among the dead */
};

struct agent {
    pthread_mutex_t lock; /* everything below but the descriptors */
    struct mu_worker *worker;
    struct mu_engine *engine;
    char host[MU_WORKER_NAME_SIZE]; /* as in Hello */
    struct mu_job_spec spec;        /* of the job that is loaded */
    struct mu_keeper *keeper;       /* NULL: checkpoints are not of kind local */
    struct mu_rpc_pool *pool;
    struct mu_rpc_client *client;
    struct mu_recollector *recollector;
    struct mu_renewer *renewer; /* NULL: of the certificate, by the supervisor or nobody */
    struct link *link;          /* current stream; NULL: none */
    struct link *dead;          /* ended streams, to be freed outside of the lock */
    struct mu_wire_arena arena_in, arena_out;
    struct mu_device *device;
    struct mu_vitals_watch *vitals;     /* NULL: nobody wants them */
    struct mu_nvml *nvml;               /* NULL: it computes on no GPU */
    bool gpu_failed;                    /* for good, by what NVML says */
    char connect_trouble[MU_TEXT_SIZE]; /* CONNECT failed at once: to be told to the core after its step */
    bool connect_failed;
    char trouble_told[MU_ERROR_TEXT_SIZE]; /* why there is no coordinator: each reason is told once in a row */
    uint64_t armed_us;                     /* the main thread sleeps until then */
    bool interrupted;                      /* a first SIGINT came */
    bool exiting;
    int exit_code;
    int wake_fd, signal_fd, ledger_fd;
    int note_fd;        /* to its supervisor; -1: none */
    struct mu_id noted; /* the incarnation it knows */
};

static void wake_main(struct agent *agent)
{
    uint64_t one = 1;
    ssize_t ignored = write(agent->wake_fd, &one, sizeof one);
    (void)ignored; /* a full counter wakes as well */
}

/* The supervisor must know who it was that died. */
static void note_incarnation(struct agent *agent)
{
    struct mu_id incarnation = mu_worker_incarnation(agent->worker);
    if (!mu_id_equal(incarnation, agent->noted))
        mu_notes_send(agent->note_fd, MU_NOTE_INCARNATION, incarnation, "");
    agent->noted = incarnation;
}

static void note_trouble(struct agent *agent, const char *text)
{
    mu_notes_send(agent->note_fd, MU_NOTE_TROUBLE, agent->noted, text);
}

static void leave(struct agent *agent, int code)
{
    if (!agent->exiting)
        agent->exit_code = code;
    agent->exiting = true;
    wake_main(agent);
}

/* ---- actions, under the lock ---- */

static void on_stream(void *user, const struct mu_rpc_stream_event *event);

static void drop_link(struct agent *agent, bool cancel)
{
    struct link *link = agent->link;
    if (!link)
        return;
    agent->link = NULL;
    if (cancel)
        mu_rpc_stream_cancel(link->stream);
    link->next = agent->dead;
    agent->dead = link;
    wake_main(agent);
}

static void do_connect(struct agent *agent)
{
    struct mu_error err = {0};
    drop_link(agent, true);
    note_incarnation(agent);
    struct link *link = calloc(1, sizeof *link);
    MU_FAULT("worker.attach");
    enum mu_status status = link ? MU_OK : mu_fail(&err, MU_ERR_NO_MEMORY, "no memory for a stream");
    if (status == MU_OK) {
        link->agent = agent;
        status = mu_rpc_stream_new(agent->client, ATTACH_METHOD, on_stream, link, &err, &link->stream);
    }
    if (status == MU_OK) {
        agent->link = link; /* callbacks wait for the lock until here */
        return;
    }
    free(link);
    agent->connect_failed = true;
    snprintf(agent->connect_trouble, sizeof agent->connect_trouble, "%.*s", (int)sizeof agent->connect_trouble - 1,
             err.text);
}

/* A message that cannot be queued ends the stream: the next Hello carries the whole status, and the core repeats what
 * matters. */
static void do_send(struct agent *agent, const struct mu_worker_message *message)
{
    const void *data;
    size_t size_bytes;
    struct mu_error err;
    struct mu_worker_message more;
    struct mu_vitals vitals;
    struct mu_gpu_sample gpu;
    if (!agent->link)
        return;
    bool has_vitals = message->kind != MU_WM_HELLO && mu_vitals_watch_take(agent->vitals, agent->gpu_failed, &vitals),
         has_inventory = message->kind == MU_WM_HELLO && agent->keeper;
    if (has_vitals || has_inventory) { /* the core has no eyes for either */
        more = *message;
        vitals.certificate_end_s = has_vitals ? mu_rpc_client_certificate_end_s(agent->client) : 0;
        more.vitals = has_vitals ? &vitals : NULL;
        if (has_vitals && agent->nvml) {
            mu_nvml_read(agent->nvml, &gpu);
            vitals.gpu = &gpu;
        }
        if (has_inventory)
            more.hello.inventory_count = mu_keeper_inventory(agent->keeper, more.hello.inventory);
        message = &more;
    }
    mu_wire_arena_reset(&agent->arena_out);
    if (mu_wire_encode_worker(&agent->arena_out, message, &data, &size_bytes, &err) != MU_OK) {
        MU_LOGE("cannot encode a message to the coordinator: %s", err.text);
        return;
    }
    struct mu_rpc_bytes *bytes = mu_rpc_bytes_copy(data, size_bytes);
    enum mu_status status = mu_rpc_stream_send(agent->link->stream, bytes);
    mu_rpc_bytes_unref(bytes);
    if (status == MU_ERR_LIMIT) {
        MU_LOGW("the coordinator does not take what it is sent; the stream is opened anew");
        mu_rpc_stream_cancel(agent->link->stream);
    }
}

static void log_assign(uint64_t generation, const struct mu_assign *assign)
{
    const struct mu_layout *layout = &assign->layout;
    char place[64] = "idle";
    if (!mu_layout_is_idle(layout, assign->rank)) {
        struct mu_coords at = mu_layout_coords(layout, assign->rank);
        snprintf(place, sizeof place, "tp %u, pp %u, dp %u", at.t, at.p, at.d);
    }
    MU_LOGI("generation %llu: rank %u of %u (%s) in tp %u x pp %u x dp %u%s, from step %llu, %u moves",
            (unsigned long long)generation, assign->rank, mu_layout_world(layout), place, layout->tp, layout->pp,
            layout->dp, layout->sharded ? ", optimizer sharded" : "", (unsigned long long)assign->start_step,
            assign->move_count);
}

/* What cannot even begin is answered at once. */
static void do_keep(struct agent *agent, const struct mu_keep_order *order)
{
    struct mu_error err;
    enum mu_status status = agent->keeper
                                ? mu_keeper_order(agent->keeper, order, &err)
                                : mu_fail(&err, MU_ERR_UNAVAILABLE, "this worker keeps no checkpoints of its host");
    if (status == MU_OK)
        return;
    struct mu_worker_message answer = {.kind = MU_WM_KEPT};
    answer.kept = (struct mu_kept_report){.kind = order->kind, .checkpoint = order->checkpoint, .status = status};
    snprintf(answer.kept.text, sizeof answer.kept.text, "%.*s", (int)sizeof answer.kept.text - 1, err.text);
    do_send(agent, &answer);
}

static void watch_disk(struct agent *agent)
{
    char path[MU_PATH_SIZE];
    struct mu_error ignored;
    if (agent->vitals && agent->spec.checkpoint.path[0] &&
        mu_holder_path(agent->spec.checkpoint.path, agent->host, path, &ignored) == MU_OK)
        mu_vitals_watch_disk(agent->vitals, path);
}

static void do_engine(struct agent *agent, const struct mu_worker_action *action)
{
    enum mu_status status = MU_OK;
    switch (action->kind) {
    case MU_WA_LOAD_JOB:
        agent->spec = *action->load.spec;
        watch_disk(agent);
        mu_log_set_job(action->load.spec->name);
        MU_LOGI("job '%s': loading data and model", action->load.spec->name);
        status = mu_engine_load(agent->engine, action->load.spec, action->load.uid);
        break;
    case MU_WA_PREPARE:
        mu_log_set_rank(action->generation.generation, action->generation.assign->rank);
        log_assign(action->generation.generation, action->generation.assign);
        status = mu_engine_prepare(agent->engine, action->generation.generation, mu_worker_incarnation(agent->worker),
                                   action->generation.assign);
        break;
    case MU_WA_RUN:
        MU_LOGI("generation %llu: go", (unsigned long long)action->generation.generation);
        status = mu_engine_run(agent->engine, action->generation.generation);
        break;
    case MU_WA_ABORT:
        MU_LOGI("generation %llu: revoked", (unsigned long long)action->generation.generation);
        status = mu_engine_abort(agent->engine, action->generation.generation);
        break;
    case MU_WA_SNAPSHOT:
        status = mu_engine_snapshot(agent->engine, action->snapshot.generation, &action->snapshot.snapshot);
        break;
    case MU_WA_FEED:
        MU_LOGI("feed %016llx: %s", (unsigned long long)action->feed.order->number,
                action->feed.order->role == MU_FEED_GIVE ? "giving" : "taking");
        status = mu_engine_feed(agent->engine, action->feed.generation, mu_worker_incarnation(agent->worker),
                                action->feed.order);
        break;
    case MU_WA_PROBE:
        status = mu_engine_probe(agent->engine, mu_worker_incarnation(agent->worker), action->probe);
        break;
    case MU_WA_FORGET:
        mu_log_set_rank(0, 0);
        MU_LOGW("the coordinator has given up this incarnation: everything held is dropped");
        status = mu_engine_forget(agent->engine);
        break;
    default:
        break;
    }
    if (status != MU_OK) {
        MU_LOGE("the engine takes no more commands (%s)", mu_status_name(status));
        leave(agent, MU_AGENT_EXIT_FAILURE);
    }
}

/* The log has told why there is no coordinator; the supervisor is told it with the end. */
static void do_exit(struct agent *agent, int code, const char *text)
{
    char line[MU_TEXT_SIZE + MU_ERROR_TEXT_SIZE];
    bool alone = code == MU_AGENT_EXIT_CANNOT_CONNECT && agent->trouble_told[0];
    text = text ? text : "";
    mu_log(code == 0 ? MU_LOG_INFO : MU_LOG_ERROR, NULL, "leaving%s%s", text[0] ? ": " : "", text);
    snprintf(line, sizeof line, "%s%s%s", text, alone ? ": " : "", alone ? agent->trouble_told : "");
    note_trouble(agent, line);
    leave(agent, code);
}

static void on_action(void *ctx, const struct mu_worker_action *action)
{
    struct agent *agent = ctx;
    switch (action->kind) {
    case MU_WA_CONNECT:
        do_connect(agent);
        break;
    case MU_WA_DISCONNECT:
        drop_link(agent, true);
        break;
    case MU_WA_SEND:
        do_send(agent, action->message);
        break;
    case MU_WA_LOAD_JOB:
    case MU_WA_PREPARE:
    case MU_WA_RUN:
    case MU_WA_ABORT:
    case MU_WA_SNAPSHOT:
    case MU_WA_FEED:
    case MU_WA_PROBE:
    case MU_WA_FORGET:
        do_engine(agent, action);
        break;
    case MU_WA_KEEP:
        do_keep(agent, action->keep);
        break;
    case MU_WA_EXIT:
        do_exit(agent, action->exit.code, action->exit.text);
        break;
    }
}

/* Under the lock: one event, and what its actions bring about at once. */
static void step_core(struct agent *agent, struct mu_worker_event *event)
{
    struct mu_worker_sink sink = {.emit = on_action, .ctx = agent};
    event->now_us = mu_clock_mono_us();
    event->random = mu_id_random();
    mu_worker_step(agent->worker, event, &sink);
    if (agent->connect_failed) {
        struct mu_worker_event failed = {
            .kind = MU_WE_DISCONNECTED, .now_us = mu_clock_mono_us(), .text = agent->connect_trouble};
        agent->connect_failed = false;
        mu_worker_step(agent->worker, &failed, &sink);
    }
    if (mu_worker_next_deadline(agent->worker) < agent->armed_us)
        wake_main(agent);
}

static void give_event(struct agent *agent, struct mu_worker_event *event)
{
    pthread_mutex_lock(&agent->lock);
    step_core(agent, event);
    pthread_mutex_unlock(&agent->lock);
}

/* ---- the stream: RPC poller thread ---- */

static void on_message(struct agent *agent, const void *data, size_t size_bytes)
{
    struct mu_coord_message message;
    struct mu_error err;
    mu_wire_arena_reset(&agent->arena_in);
    if (mu_wire_decode_coord(&agent->arena_in, data, size_bytes, &message, &err) != MU_OK) {
        MU_LOGE("message of the coordinator refused: %s", err.text);
        mu_rpc_stream_cancel(agent->link->stream);
        return;
    }
    if (message.kind == MU_CM_WELCOME) {
        MU_LOGI("attached as '%s'", message.welcome.name);
        mu_notes_send(agent->note_fd, MU_NOTE_ATTACHED, agent->noted, "");
    }
    if (message.kind == MU_CM_RECALL) { /* nothing for the core */
        mu_recollector_ask(agent->recollector, &message.recall, mu_worker_incarnation(agent->worker));
        return;
    }
    if (message.kind == MU_CM_REJECT) {
        MU_LOGW("the coordinator refuses: %s", message.reject.text);
        note_trouble(agent, message.reject.text);
    }
    step_core(agent, &(struct mu_worker_event){.kind = MU_WE_MESSAGE, .message = &message});
}

static void on_stream(void *user, const struct mu_rpc_stream_event *event)
{
    struct link *link = user;
    struct agent *agent = link->agent;
    pthread_mutex_lock(&agent->lock);
    if (agent->link != link)
        goto unlock; /* given up meanwhile */
    switch (event->type) {
    case MU_RPC_STREAM_OPENED:
        step_core(agent, &(struct mu_worker_event){.kind = MU_WE_CONNECTED});
        break;
    case MU_RPC_STREAM_MESSAGE:
        on_message(agent, event->data, event->size_bytes);
        break;
    case MU_RPC_STREAM_WRITABLE:
        break;
    case MU_RPC_STREAM_CLOSED: {
        const char *text = event->code == MU_RPC_OK ? "ended by the coordinator" : event->error->text;
        bool was_up = mu_worker_connected(agent->worker);
        drop_link(agent, false);
        bool is_news = was_up || strcmp(text, agent->trouble_told) != 0;
        mu_log(is_news && !agent->exiting ? MU_LOG_WARN : MU_LOG_DEBUG, NULL, "no coordinator: %s", text);
        if (is_news && !agent->exiting && event->code != MU_RPC_OK) /* else the reason was given before */
            note_trouble(agent, text);
        snprintf(agent->trouble_told, sizeof agent->trouble_told, "%s", text);
        step_core(agent, &(struct mu_worker_event){.kind = MU_WE_DISCONNECTED, .text = text});
        break;
    }
    }
unlock:
    pthread_mutex_unlock(&agent->lock);
}

/* ---- the host's checkpoints ---- */

static void on_kept(void *ctx, const struct mu_kept_report *report)
{
    if (report->status != MU_OK)
        MU_LOGE("checkpoint %llu: %s", (unsigned long long)report->checkpoint, report->text);
    give_event(ctx, &(struct mu_worker_event){.kind = MU_WE_KEPT, .kept = *report});
}

/* The literal address that the data plane listens on: "...;tcp=<address>:<port>". */
static bool data_ip(const struct agent *agent, char *out, size_t size)
{
    const char *tcp = strstr(mu_engine_address(agent->engine), "tcp=");
    const char *colon = tcp ? strrchr(tcp, ':') : NULL;
    if (!colon)
        return false;
    bool v6 = tcp[4] == '[';
    snprintf(out, size, "%.*s", (int)(colon - tcp) - 4 - 2 * v6, tcp + 4 + v6);
    return true;
}

/* Engine thread, once: before the coordinator hears that the job is loaded. */
static void start_keeper(struct agent *agent, struct mu_worker_event *loaded)
{
    struct mu_keeper *keeper = NULL;
    struct mu_error err;
    char ip[128];
    struct mu_keeper_config config = {.spec = &agent->spec,
                                      .numeric_identity = loaded->job_loaded.numeric_identity,
                                      .host = agent->host,
                                      .ip = ip,
                                      .done = on_kept,
                                      .ctx = agent};
    enum mu_status status = data_ip(agent, ip, sizeof ip)
                                ? mu_keeper_new(&config, &keeper, &err)
                                : mu_fail(&err, MU_ERR_UNAVAILABLE, "the data plane has no network address");
    if (status != MU_OK) {
        MU_LOGE("checkpoints of this host are not kept by this worker: %s", err.text);
        return;
    }
    pthread_mutex_lock(&agent->lock);
    agent->keeper = keeper;
    pthread_mutex_unlock(&agent->lock);
    loaded->job_loaded.files_address = mu_keeper_address(keeper);
    loaded->job_loaded.files_secret = mu_keeper_secret(keeper);
}

/* ---- the engine's calls: engine and writer threads ---- */

static void log_parked(const struct mu_worker_event *event)
{
    char peer[24];
    snprintf(peer, sizeof peer, "peer=%u", event->parked.peer_rank);
    mu_log(MU_LOG_INFO, event->parked.reason == MU_PARK_PEER ? peer : NULL, "generation %llu: parked at step %llu%s%s",
           (unsigned long long)event->parked.generation, (unsigned long long)event->parked.held.step,
           event->parked.text[0] ? ": " : "", event->parked.text);
}

static void on_post(void *ctx, const struct mu_worker_event *event)
{
    struct agent *agent = ctx;
    struct mu_worker_event copy = *event;
    if (event->kind == MU_WE_PARKED)
        log_parked(event);
    if (event->kind == MU_WE_FED)
        MU_LOGI("feed %016llx: %s%s", (unsigned long long)event->fed.number,
                event->fed.state == MU_FEED_LIVE    ? "whole, and at most one step behind"
                : event->fed.state == MU_FEED_WHOLE ? "ended, its state is held"
                                                    : "failed: ",
                event->fed.text);
    if (event->kind == MU_WE_JOB_LOADED && event->job_loaded.status != MU_OK)
        MU_LOGE("job cannot be loaded: %s", event->job_loaded.text);
    else if (event->kind == MU_WE_JOB_LOADED && agent->spec.checkpoint.kind == MU_CHECKPOINT_LOCAL)
        start_keeper(agent, &copy);
    if (event->kind == MU_WE_PIECE && event->piece.status != MU_OK) {
        bool gone = event->piece.status == MU_ERR_NOT_FOUND; /* its directory: the checkpoint was given up meanwhile */
        mu_log(gone ? MU_LOG_WARN : MU_LOG_ERROR, NULL, "checkpoint %llu, piece %u%s: %s",
               (unsigned long long)event->piece.checkpoint, event->piece.piece,
               gone ? " came too late, the checkpoint was given up" : "", event->piece.text);
    }
    give_event(agent, &copy);
    const char *trouble = event->kind == MU_WE_PARKED ? mu_device_trouble(agent->device) : NULL;
    if (!trouble)
        return;
    pthread_mutex_lock(&agent->lock); /* the coordinator has been told: this process is of no more use */
    MU_LOGE("leaving: %s", trouble);
    leave(agent, MU_AGENT_EXIT_FAILURE);
    pthread_mutex_unlock(&agent->lock);
}

static uint64_t on_vote(void *ctx, uint64_t generation)
{
    struct agent *agent = ctx;
    pthread_mutex_lock(&agent->lock);
    uint64_t command = mu_worker_vote(agent->worker, generation);
    pthread_mutex_unlock(&agent->lock);
    return command;
}

static struct mu_boundary on_boundary(void *ctx, uint64_t generation, uint64_t steps_done,
                                      const struct mu_step_result *result)
{
    struct agent *agent = ctx;
    pthread_mutex_lock(&agent->lock);
    struct mu_boundary decision = mu_worker_boundary(agent->worker, mu_clock_mono_us(), generation, steps_done, result);
    pthread_mutex_unlock(&agent->lock);
    return decision;
}

static void on_stuck(void *ctx, const char *text)
{
    mu_notes_stuck(((const struct agent *)ctx)->note_fd, MU_AGENT_EXIT_FAILURE, text);
}

static void on_leaf(void *ctx, uint64_t generation, uint64_t step, uint32_t leaf, uint64_t first_sequence,
                    uint64_t count)
{
    mu_ledger_leaf(((struct agent *)ctx)->ledger_fd, generation, step, leaf, first_sequence, count);
}

static void on_applied(void *ctx, uint64_t generation, uint64_t step)
{
    mu_ledger_applied(((struct agent *)ctx)->ledger_fd, generation, step);
}

/* ---- main thread ---- */

static void free_dead(struct agent *agent)
{
    pthread_mutex_lock(&agent->lock);
    struct link *dead = agent->dead;
    agent->dead = NULL;
    pthread_mutex_unlock(&agent->lock);
    for (struct link *next; dead; dead = next) {
        next = dead->next;
        mu_rpc_stream_free(dead->stream);
        free(dead);
    }
}

static void on_signals(struct agent *agent)
{
    struct signalfd_siginfo info;
    while (read(agent->signal_fd, &info, sizeof info) == (ssize_t)sizeof info) {
        bool interrupt = info.ssi_signo == SIGINT;
        if (info.ssi_signo == SIGUSR2) {
            mu_recollect_log();
            continue;
        }
        if (interrupt && agent->interrupted) {
            MU_LOGW("interrupted twice: leaving at once");
            _exit(MU_AGENT_EXIT_INTERRUPTED);
        }
        agent->interrupted = agent->interrupted || interrupt;
        MU_LOGI("%s: leaving in good order%s", interrupt ? "SIGINT" : "SIGTERM",
                interrupt ? " (again to leave at once)" : "");
        give_event(agent, &(struct mu_worker_event){.kind = MU_WE_TERMINATE, .text = interrupt ? "SIGINT" : "SIGTERM"});
    }
}

/* Before the next collective hangs, or something is computed that cannot be trusted. */
static void look_at_gpu(struct agent *agent)
{
    struct mu_gpu_sample gpu;
    if (!agent->nvml || agent->gpu_failed)
        return;
    mu_nvml_read(agent->nvml, &gpu);
    if (!gpu.unhealthy)
        return;
    pthread_mutex_lock(&agent->lock);
    agent->gpu_failed = true;
    step_core(agent, &(struct mu_worker_event){.kind = MU_WE_BROKEN, .text = gpu.text});
    pthread_mutex_unlock(&agent->lock);
}

static void on_deadline(struct agent *agent)
{
    struct mu_worker_event progress = {.kind = MU_WE_PROGRESS};
    mu_engine_progress(agent->engine, &progress.progress.counter, &progress.progress.waiting);
    give_event(agent, &progress);
    give_event(agent, &(struct mu_worker_event){.kind = MU_WE_TICK});
}

static void sleep_until(struct agent *agent, uint64_t until_us)
{
    struct pollfd fds[2] = {{.fd = agent->wake_fd, .events = POLLIN}, {.fd = agent->signal_fd, .events = POLLIN}};
    uint64_t now_us = mu_clock_mono_us(), left_us = until_us > now_us ? until_us - now_us : 0;
    struct timespec timeout = {.tv_sec = (time_t)(left_us / 1000000), .tv_nsec = (long)(left_us % 1000000) * 1000};
    if (ppoll(fds, 2, until_us == UINT64_MAX ? NULL : &timeout, NULL) < 0 && errno != EINTR)
        MU_LOGE("poll: %s", strerror(errno));
    uint64_t drained;
    ssize_t ignored = read(agent->wake_fd, &drained, sizeof drained);
    (void)ignored;
}

static void main_loop(struct agent *agent)
{
    give_event(agent, &(struct mu_worker_event){.kind = MU_WE_START});
    mu_notify("READY=1");
    for (;;) {
        pthread_mutex_lock(&agent->lock);
        bool exiting = agent->exiting;
        uint64_t deadline_us = mu_worker_next_deadline(agent->worker);
        agent->armed_us = deadline_us;
        pthread_mutex_unlock(&agent->lock);
        if (exiting)
            return;
        uint64_t alive_us = mu_notify_alive(mu_clock_mono_us());
        sleep_until(agent, alive_us < deadline_us ? alive_us : deadline_us);
        free_dead(agent);
        on_signals(agent);
        look_at_gpu(agent);
        if (mu_clock_mono_us() >= deadline_us)
            on_deadline(agent);
    }
}

/* The last messages (goodbye, the final status) should arrive. */
static void flush_stream(struct agent *agent)
{
    uint64_t patience_us = mu_clock_mono_us() + MU_AGENT_FLUSH_MS * 1000;
    pthread_mutex_lock(&agent->lock);
    if (agent->link)
        mu_rpc_stream_close_send(agent->link->stream);
    while (agent->link && mu_clock_mono_us() < patience_us) {
        pthread_mutex_unlock(&agent->lock);
        sleep_until(agent, patience_us);
        pthread_mutex_lock(&agent->lock);
    }
    drop_link(agent, true);
    pthread_mutex_unlock(&agent->lock);
}

/* ---- start ---- */

static enum mu_status start_engine(struct agent *agent, const struct mu_agent_config *config, struct mu_error *err)
{
    char host[MU_WORKER_NAME_SIZE] = "localhost";
    if (gethostname(host, sizeof host - 1) != 0)
        MU_LOGW("the host has no name: %s", strerror(errno));
    mu_wire_text_clean(config->host_id ? config->host_id : host, agent->host, sizeof agent->host);
    struct mu_engine_config engine = {
        .threads = config->threads == 0 && !mu_device_is_host(config->device) ? 1 : config->threads,
        .device = config->device,
        .memory_bytes = config->memory_bytes,
        .nccl = mu_nccl_ops(),
        .data_addr = config->data_addr,
        .route_to = config->route_to,
        .host_id = config->host_id,
        .unix_dir = config->unix_dir,
        .host = agent->host,
        .connect_timeout_ms = config->connect_timeout_ms,
        .callbacks = {.ctx = agent, .post = on_post, .vote = on_vote, .boundary = on_boundary, .stuck = on_stuck}};
    if (config->ledger) {
        enum mu_status status = mu_ledger_open(config->ledger, &agent->ledger_fd, err);
        if (status != MU_OK)
            return status;
        engine.callbacks.leaf = on_leaf;
        engine.callbacks.applied = on_applied;
    }
    return mu_engine_new(&engine, &agent->engine, err);
}

static enum mu_status start_core(struct agent *agent, const struct mu_agent_config *config, struct mu_error *err)
{
    struct mu_worker_config worker;
    mu_worker_config_init(&worker);
    struct mu_hello *hello = &worker.hello;
    snprintf(hello->software_version, sizeof hello->software_version, "%s", MU_VERSION);
    snprintf(hello->job, sizeof hello->job, "%s", config->job);
    snprintf(hello->name, sizeof hello->name, "%s", config->name ? config->name : "");
    memcpy(hello->host, agent->host, sizeof hello->host);
    snprintf(hello->address, sizeof hello->address, "%s", mu_engine_address(agent->engine));
    uint64_t free_bytes;
    const struct mu_device *device = config->device ? config->device : mu_host_device();
    snprintf(hello->backend, sizeof hello->backend, "%.*s", (int)strcspn(device->name, ":"), device->name);
    memcpy(hello->gpu, device->uuid, sizeof hello->gpu);
    hello->pid = (uint64_t)getpid();
    hello->threads = mu_engine_threads(agent->engine);
    mu_device_memory(config->device, &free_bytes, &hello->memory_bytes);
    if (config->memory_bytes && config->memory_bytes < hello->memory_bytes)
        hello->memory_bytes = config->memory_bytes;
    hello->computes_bf16 = device->bf16;
    hello->nccl_version = mu_device_is_host(config->device) || !mu_nccl_ops() ? 0 : mu_nccl_ops()->version();
    worker.incarnation = mu_id_random();
    worker.jitter_seed = mu_id_random().low;
    worker.give_up_ms = config->give_up_ms;
    worker.backoff_min_ms = config->backoff_min_ms ? config->backoff_min_ms : worker.backoff_min_ms;
    worker.backoff_max_ms = config->backoff_max_ms ? config->backoff_max_ms : worker.backoff_max_ms;
    worker.step_report_ms = config->step_report_ms ? config->step_report_ms : worker.step_report_ms;
    agent->worker = mu_worker_new(&worker);
    if (!agent->worker)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the worker");
    note_incarnation(agent);
    return MU_OK;
}

static enum mu_status start_vitals(struct agent *agent, const struct mu_agent_config *config, struct mu_error *err)
{
    if (config->vitals_every_ms == 0)
        return MU_OK;
    return mu_vitals_watch_new(config->vitals_every_ms, mu_engine_traffic, agent->engine, &agent->vitals, err);
}

static enum mu_status start_nvml(struct agent *agent, const struct mu_agent_config *config, struct mu_error *err)
{
    if (mu_device_is_host(config->device))
        return MU_OK;
    const struct mu_nvml_config nvml = {.pci_bus_id = config->device->bus_id, .alarm_fd = agent->wake_fd};
    return mu_nvml_start(&nvml, &agent->nvml, err);
}

static enum mu_status start_rpc(struct agent *agent, const struct mu_agent_config *config, struct mu_error *err)
{
    struct mu_rpc_client_config client = mu_rpc_client_config_default();
    client.address = config->coordinator;
    client.tls = config->tls;
    client.max_receive_bytes = MU_WIRE_COORD_BYTES_MAX;
    enum mu_status status = mu_rpc_pool_new(1, err, &agent->pool);
    if (status == MU_OK)
        status = mu_rpc_client_new(agent->pool, &client, err, &agent->client);
    if (status == MU_OK)
        status = mu_recollector_new(agent->client, &agent->recollector, err);
    if (status == MU_OK && agent->note_fd < 0)
        status = mu_renewer_new(&(struct mu_renewer_config){config->coordinator, config->tls}, &agent->renewer, err);
    return status;
}

static enum mu_status start_signals(struct agent *agent, struct mu_error *err)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGUSR2);
    pthread_sigmask(SIG_BLOCK, &set, NULL); /* inherited by all threads that follow */
    signal(SIGPIPE, SIG_IGN);
    agent->signal_fd = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
    agent->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (agent->signal_fd < 0 || agent->wake_fd < 0)
        return mu_fail_errno(err, errno, "cannot wait for signals");
    return MU_OK;
}

static void stop(struct agent *agent)
{
    mu_nvml_stop(agent->nvml);
    mu_vitals_watch_free(agent->vitals); /* asks the engine */
    mu_keeper_free(agent->keeper);       /* first these: they call into the core */
    mu_engine_free(agent->engine);
    free_dead(agent);
    mu_renewer_free(agent->renewer);
    mu_recollector_free(agent->recollector);
    mu_rpc_client_free(agent->client);
    mu_rpc_pool_free(agent->pool);
    mu_worker_free(agent->worker);
    mu_wire_arena_fini(&agent->arena_in);
    mu_wire_arena_fini(&agent->arena_out);
    pthread_mutex_destroy(&agent->lock);
    int fds[] = {agent->signal_fd, agent->wake_fd, agent->ledger_fd, agent->note_fd};
    for (unsigned i = 0; i < sizeof fds / sizeof fds[0]; i++)
        if (fds[i] >= 0)
            close(fds[i]);
}

int mu_agent_run(const struct mu_agent_config *config)
{
    struct agent agent = {.device = config->device,
                          .wake_fd = -1,
                          .signal_fd = -1,
                          .ledger_fd = -1,
                          .note_fd = config->note_fd,
                          .armed_us = UINT64_MAX};
    struct mu_error err = {0};
    pthread_mutex_init(&agent.lock, NULL);
    mu_wire_arena_init(&agent.arena_in);
    mu_wire_arena_init(&agent.arena_out);
    enum mu_status status = start_signals(&agent, &err);
    if (status == MU_OK)
        status = start_engine(&agent, config, &err);
    if (status == MU_OK)
        status = start_core(&agent, config, &err);
    if (status == MU_OK)
        status = start_vitals(&agent, config, &err);
    if (status == MU_OK)
        status = start_nvml(&agent, config, &err);
    if (status == MU_OK)
        status = start_rpc(&agent, config, &err);
    if (status == MU_OK) {
        main_loop(&agent);
        flush_stream(&agent);
        if (agent.gpu_failed) /* threads may wait for it that would never come back */
            _exit(agent.exit_code);
    } else {
        MU_LOGE("%s", err.text);
        note_trouble(&agent, err.text);
        agent.exit_code = status == MU_ERR_INVALID ? MU_AGENT_EXIT_USAGE : MU_AGENT_EXIT_FAILURE;
    }
    mu_leave_within(MU_AGENT_STOP_S, agent.exit_code);
    stop(&agent);
    return agent.exit_code;
}
