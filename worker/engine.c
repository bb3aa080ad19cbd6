#include "worker/engine_internal.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/fault.h"
#include "common/log.h"
#include "common/thread.h"

/* ---- stopping ---- */

bool engine_aborted(struct mu_engine *engine)
{
    pthread_mutex_lock(&engine->stop_lock);
    bool aborted = engine->stopping || engine->aborted >= engine->current;
    pthread_mutex_unlock(&engine->stop_lock);
    return aborted;
}

void engine_set_current(struct mu_engine *engine, uint64_t generation)
{
    pthread_mutex_lock(&engine->stop_lock);
    engine->current = generation;
    atomic_store(&engine->cancel, engine->stopping || engine->aborted >= generation);
    pthread_mutex_unlock(&engine->stop_lock);
}

/* Generations up to this one are over; whatever the engine does for one of them stops now. Any thread. */
static void cancel_generations(struct mu_engine *engine, uint64_t generation, bool stop)
{
    pthread_mutex_lock(&engine->stop_lock);
    engine->stopping = engine->stopping || stop;
    if (generation > engine->aborted)
        engine->aborted = generation;
    if (engine->stopping || engine->aborted >= engine->current)
        atomic_store(&engine->cancel, true);
    pthread_mutex_unlock(&engine->stop_lock);
    if (generation > 0)
        mu_comm_abort(engine->comm, generation);
}

/* ---- hooks into compute ---- */

static void poll_sockets(void *ctx)
{
    struct mu_engine *engine = ctx;
    atomic_fetch_add_explicit(&engine->progress, 1, memory_order_relaxed);
    uint64_t now_us = mu_clock_mono_us();
    if (now_us - engine->polled_us < ENGINE_POLL_US)
        return;
    engine->polled_us = now_us;
    engine_feeds_pump(engine);
    engine_take_pump(engine, false);
    engine_nccl_watch(engine);
    if (engine->now.group && mu_comm_group_progress(engine->now.group, NULL) != MU_OK)
        atomic_store(&engine->cancel, true); /* a peer is gone: the rest of this step is wasted work */
}

void engine_set_cancellable(struct mu_engine *engine, bool cancellable)
{
    engine->updating = !cancellable;
    mu_pool_set_cancel(engine->pool, cancellable ? &engine->cancel : NULL);
}

void engine_set_waiting(void *ctx, bool waiting)
{
    struct mu_engine *engine = ctx;
    atomic_fetch_add_explicit(&engine->progress, 1, memory_order_relaxed);
    atomic_store_explicit(&engine->waiting, waiting, memory_order_relaxed);
}

/* ---- events ---- */

void engine_post(struct mu_engine *engine, const struct mu_worker_event *event)
{
    engine->callbacks.post(engine->callbacks.ctx, event);
}

static void post_piece(void *ctx, uint64_t generation, const struct mu_piece_report *report)
{
    (void)generation;
    struct mu_engine *engine = ctx;
    engine_post(engine, &(struct mu_worker_event){.kind = MU_WE_PIECE, .piece = *report});
}

static void copy_text(char out[MU_TEXT_SIZE], const char *text)
{
    snprintf(out, MU_TEXT_SIZE, "%.*s", MU_TEXT_SIZE - 1, text);
}

static void post_parked(struct mu_engine *engine, const struct mu_parked *parked)
{
    struct mu_worker_event event = {.kind = MU_WE_PARKED, .parked = *parked};
    event.parked.held = engine_reported(engine);
    MU_FAULT("worker.parked");
    engine_post(engine, &event);
}

void engine_park(struct mu_engine *engine, enum mu_park_reason reason, const char *text)
{
    struct mu_parked parked = {.generation = engine->now.generation, .reason = reason};
    if (text)
        copy_text(parked.text, text);
    engine->phase = ENGINE_PARKED;
    post_parked(engine, &parked);
}

static enum mu_peer_failure peer_failure_of(enum mu_comm_failure_kind kind)
{
    switch (kind) {
    case MU_COMM_FAIL_EOF:
        return MU_PEER_FAILURE_EOF;
    case MU_COMM_FAIL_RESET:
    case MU_COMM_FAIL_REFUSED:
        return MU_PEER_FAILURE_RESET;
    case MU_COMM_FAIL_TIMEOUT:
        return MU_PEER_FAILURE_TIMEOUT;
    case MU_COMM_FAIL_PROTOCOL:
        return MU_PEER_FAILURE_PROTOCOL;
    case MU_COMM_FAIL_NONE:
    case MU_COMM_FAIL_STALE: /* the peer is in a newer generation: nobody is at fault */
    case MU_COMM_FAIL_LEFT:
    case MU_COMM_FAIL_LOCAL:
        break;
    }
    return MU_PEER_FAILURE_NONE;
}

/* Tells of peers that have failed since the last time, one PARKED each: every one may be a second witness of a death.
 */
static bool post_peer_failures(struct mu_engine *engine)
{
    struct mu_comm_failure failures[MU_PEERS_MAX];
    size_t count = mu_comm_group_failures(engine->now.group, failures, MU_PEERS_MAX);
    bool posted = false;
    for (size_t i = engine->now.failures_told; i < count && i < MU_PEERS_MAX; i++) {
        engine->now.failures_told = i + 1;
        struct mu_parked parked = {.generation = engine->now.generation,
                                   .reason = MU_PARK_PEER,
                                   .peer_rank = failures[i].peer_rank,
                                   .peer_failure = peer_failure_of(failures[i].kind)};
        if (failures[i].kind == MU_COMM_FAIL_LOCAL || (i > 0 && parked.peer_failure == MU_PEER_FAILURE_NONE))
            continue; /* others leave because of the first failure */
        if (i == 0)
            snprintf(parked.text, sizeof parked.text, "%.*s", (int)sizeof parked.text - 1,
                     mu_comm_group_failure_text(engine->now.group));
        else
            snprintf(parked.text, sizeof parked.text, "rank %u: %s", failures[i].peer_rank,
                     mu_comm_failure_name(failures[i].kind));
        post_parked(engine, &parked);
        posted = true;
    }
    return posted;
}

void engine_park_failed(struct mu_engine *engine, enum mu_status status, const struct mu_error *err,
                        enum mu_park_reason otherwise, uint64_t bad_checkpoint)
{
    engine->phase = ENGINE_PARKED;
    const char *trouble = mu_device_trouble(engine->device);
    struct mu_error device_error, nccl_error = {0};
    enum mu_status nccl_status = engine_nccl_failure(engine, &nccl_error);
    if (status != MU_OK && nccl_status == MU_ERR_UNAVAILABLE) { /* whatever came of it later */
        status = nccl_status;
        err = &nccl_error;
        otherwise = MU_PARK_PEER; /* of nobody in particular */
    }
    if (status == MU_ERR_CONFLICT && engine->now.records && !mu_device_records(engine->device))
        otherwise = MU_PARK_PEER; /* from the next generation on the group does not */
    engine_nccl_end(engine, &engine->now);
    if (trouble) { /* with the device went everything that it held */
        memset(&engine->held, 0, sizeof engine->held);
        status = mu_fail(&device_error, MU_ERR_IO, "%s", trouble);
        err = &device_error;
        otherwise = MU_PARK_ENGINE;
    } else if (engine_aborted(engine)) {
        return;
    }
    if (engine->now.group && (status == MU_ERR_UNAVAILABLE || status == MU_ERR_CANCELLED) && post_peer_failures(engine))
        return;
    struct mu_parked parked = {
        .generation = engine->now.generation, .reason = otherwise, .bad_checkpoint = bad_checkpoint};
    copy_text(parked.text, err->text);
    if (engine->now.group)
        mu_comm_abort(engine->comm, engine->now.generation); /* what is outstanding must never arrive */
    post_parked(engine, &parked);
}

/* ---- generations ---- */

void engine_generation_close(struct mu_engine *engine, struct engine_generation *generation)
{
    engine_nccl_end(engine, generation);
    mu_comm_group_close(generation->group);
    if (generation->meeting)
        engine->nccl->meeting_free(generation->meeting);
    mu_reduce_free(generation->reduce);
    mu_tensor_comm_free(generation->tensor);
    mu_pipeline_free(generation->pipeline);
    mu_buddy_free(generation->buddy);
    engine_tied_free(generation->tied);
    free(generation->digest);
    mu_transfer_free(generation->transfer);
    memset(generation, 0, sizeof *generation);
}

static void do_abort(struct mu_engine *engine, uint64_t generation)
{
    engine_feeds_drop(engine);
    if (engine->take.given.order.taker != MU_LAYOUT_NOBODY && engine->take.given.generation <= generation)
        engine_take_fail(engine, "the generation that was to be left is over");
    if (engine->now.generation <= generation)
        engine_generation_close(engine, &engine->now);
    if (engine->old.generation <= generation)
        engine_generation_close(engine, &engine->old);
    if (engine->phase == ENGINE_PREPARED && engine->now.generation == 0)
        engine->phase = ENGINE_PARKED;
    post_parked(engine, &(struct mu_parked){.generation = generation, .reason = MU_PARK_REVOKED});
}

static void do_forget(struct mu_engine *engine)
{
    engine_feeds_drop(engine);
    engine_take_drop(engine);
    engine_generation_close(engine, &engine->now);
    engine_generation_close(engine, &engine->old);
    mu_snapshots_abandon(engine->snapshots);
    engine_forget_arrived(engine);
    engine_state_free(&engine->job.incoming);
    memset(&engine->held, 0, sizeof engine->held);
    if (engine->phase != ENGINE_EMPTY)
        engine->phase = ENGINE_LOADED;
}

static void do_snapshot(struct mu_engine *engine, const struct engine_command *command)
{
    if (engine->held.has_state) {
        engine_set_cancellable(engine, false); /* the generation may be over; the state is not */
        engine_take_snapshot(engine, command->generation, &command->snapshot);
        engine_set_cancellable(engine, true);
        return;
    }
    struct mu_piece_report report = {
        .checkpoint = command->snapshot.checkpoint, .piece = command->snapshot.piece, .status = MU_ERR_CONFLICT};
    copy_text(report.text, "this worker holds no state to take a snapshot of");
    post_piece(engine, command->generation, &report);
}

/* ---- the thread ---- */

static void execute(struct mu_engine *engine, const struct engine_command *command)
{
    switch (command->kind) {
    case ENGINE_LOAD:
        engine_load(engine, command);
        break;
    case ENGINE_PREPARE:
        engine_prepare(engine, command);
        break;
    case ENGINE_RUN:
        engine_run(engine, command->generation);
        break;
    case ENGINE_ABORT:
        do_abort(engine, command->generation);
        break;
    case ENGINE_SNAPSHOT:
        do_snapshot(engine, command);
        break;
    case ENGINE_FEED:
        engine_take_amendments(engine, &command->amendments);
        engine_take(engine, &command->feed);
        break;
    case ENGINE_PROBE:
        engine_probe(engine, command->id, &command->probe);
        break;
    case ENGINE_FORGET:
        do_forget(engine);
        break;
    case ENGINE_STOP:
        break;
    }
}

/* Between commands: hand-shakes are answered; a peer that dies before Go is noticed, and so are further ones after the
 * first. */
static void idle(struct mu_engine *engine)
{
    struct pollfd fds[2] = {{.fd = mu_queue_fd(engine->mailbox), .events = POLLIN},
                            {.fd = mu_comm_fd(engine->comm), .events = POLLIN}};
    engine_take_pump(engine, true); /* what has come while something else was done wakes nobody */
    if (poll(fds, 2, engine->take.given.order.number ? ENGINE_TAKE_LOOK_MS : -1) < 0 && errno != EINTR)
        return;
    mu_comm_progress(engine->comm);
    if (engine->phase == ENGINE_PARKED && engine->now.failures_told > 0 && !engine_aborted(engine))
        post_peer_failures(engine);
    if (engine->phase != ENGINE_PREPARED || !engine->now.group)
        return;
    struct mu_error err = {0};
    enum mu_status status = mu_comm_group_progress(engine->now.group, &err);
    if (status != MU_OK)
        engine_park_failed(engine, status, &err, MU_PARK_PREPARE, 0);
}

static void *engine_main(void *arg)
{
    struct mu_engine *engine = arg;
    pthread_setname_np(pthread_self(), "engine");
    struct mu_error err = {0};
    if (mu_device_enter(engine->device, &err) != MU_OK) /* whatever it is told to do will say so */
        MU_LOGE("%s", err.text);
    for (bool stop = false; !stop;) {
        struct engine_command *command = mu_queue_pop(engine->mailbox, 0);
        if (!command) {
            idle(engine);
            continue;
        }
        stop = command->kind == ENGINE_STOP;
        execute(engine, command);
        free(command);
        atomic_fetch_add_explicit(&engine->progress, 1, memory_order_relaxed);
    }
    engine_feeds_drop(engine);
    engine_take_drop(engine);
    engine_generation_close(engine, &engine->now);
    engine_generation_close(engine, &engine->old);
    return NULL;
}

static int start_thread(struct mu_engine *engine)
{
    int failure = mu_thread_start(&engine->thread, engine_main, engine);
    engine->thread_started = failure == 0;
    return failure;
}

enum mu_status mu_engine_new(const struct mu_engine_config *config, struct mu_engine **ret_engine, struct mu_error *err)
{
    MU_ASSERT(config->callbacks.post && config->callbacks.vote && config->callbacks.boundary);
    struct mu_comm_config comm = {.device = config->device,
                                  .data_addr = config->data_addr,
                                  .route_to = config->route_to,
                                  .host_id = config->host_id,
                                  .unix_dir = config->unix_dir};
    enum mu_status status;
    struct mu_engine *engine = calloc(1, sizeof *engine);
    if (!engine)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the engine");
    pthread_mutex_init(&engine->stop_lock, NULL);
    pthread_mutex_init(&engine->traffic.lock, NULL);
    engine->callbacks = config->callbacks;
    engine->device = config->device ? config->device : mu_host_device();
    engine->memory_bytes = config->memory_bytes;
    engine->nccl = mu_device_is_host(engine->device) ? NULL : config->nccl;
    if (engine->nccl) {
        engine->device->watch = engine_nccl_watch;
        engine->device->watch_ctx = engine;
    }
    snprintf(engine->host, sizeof engine->host, "%s", config->host ? config->host : "localhost");
    engine->connect_timeout_ms = config->connect_timeout_ms ? config->connect_timeout_ms : MU_ENGINE_CONNECT_TIMEOUT_MS;
    engine->mailbox = mu_queue_new(MU_ENGINE_MAILBOX_MAX);
    if (!engine->mailbox) {
        status = mu_fail(err, MU_ERR_NO_MEMORY, "no memory or file descriptors for the engine's mailbox");
        goto failed;
    }
    status = mu_comm_new(&comm, &engine->comm, err);
    if (status != MU_OK)
        goto failed;
    mu_comm_set_idle(engine->comm, engine_feeds_idle, engine);
    status = mu_pool_new(config->threads, err, &engine->pool);
    if (status != MU_OK)
        goto failed;
    engine->threads = mu_pool_threads(engine->pool);
    mu_pool_bind(engine->pool, engine->device);
    mu_pool_set_poll(engine->pool, poll_sockets, engine);
    engine_set_cancellable(engine, true);
    status = mu_snapshots_new(engine->device, post_piece, engine, &engine->snapshots, err);
    if (status != MU_OK)
        goto failed;
    int failure = start_thread(engine);
    if (failure != 0) {
        status = mu_fail_errno(err, failure, "cannot start the engine's thread");
        goto failed;
    }
    *ret_engine = engine;
    return MU_OK;
failed:
    mu_engine_free(engine);
    return status;
}

static enum mu_status push(struct mu_engine *engine, struct engine_command *command)
{
    if (!command)
        return MU_ERR_NO_MEMORY;
    enum mu_status status = mu_queue_push(engine->mailbox, command);
    if (status != MU_OK)
        free(command);
    return status;
}

static struct engine_command *command_new(enum engine_command_kind kind, uint64_t generation, size_t tail_bytes)
{
    struct engine_command *command = calloc(1, sizeof *command + tail_bytes);
    if (command) {
        command->kind = kind;
        command->generation = generation;
    }
    return command;
}

void mu_engine_free(struct mu_engine *engine)
{
    if (!engine)
        return;
    if (engine->thread_started) {
        cancel_generations(engine, UINT64_MAX, true);
        mu_snapshots_abandon(engine->snapshots);
        struct engine_command *stop = command_new(ENGINE_STOP, 0, 0);
        MU_ASSERT(stop);
        mu_queue_push_wait(engine->mailbox, stop);
        pthread_join(engine->thread, NULL);
    }
    mu_snapshots_free(engine->snapshots);
    for (struct engine_command *left; engine->mailbox && (left = mu_queue_pop(engine->mailbox, 0)) != NULL;)
        free(left);
    engine_unload(engine);
    mu_pool_free(engine->pool);
    if (engine->nccl)
        engine->device->watch = NULL;
    mu_comm_free(engine->comm);
    mu_queue_free(engine->mailbox);
    pthread_mutex_destroy(&engine->stop_lock);
    pthread_mutex_destroy(&engine->traffic.lock);
    free(engine);
}

const char *mu_engine_address(const struct mu_engine *engine)
{
    return mu_comm_address(engine->comm);
}

uint32_t mu_engine_threads(const struct mu_engine *engine)
{
    return engine->threads;
}

void mu_engine_progress(const struct mu_engine *engine, uint64_t *ret_counter, bool *ret_waiting)
{
    *ret_counter = atomic_load_explicit(&engine->progress, memory_order_relaxed);
    *ret_waiting = atomic_load_explicit(&engine->waiting, memory_order_relaxed);
}

/* ---- commands ---- */

enum mu_status mu_engine_load(struct mu_engine *engine, const struct mu_job_spec *spec, struct mu_id uid)
{
    struct engine_command *command = command_new(ENGINE_LOAD, 0, 0);
    if (command) {
        command->spec = *spec;
        command->id = uid;
    }
    return push(engine, command);
}

/* Takes `size_bytes` from the command's tail. */
static void *tail_take(char **tail, size_t size_bytes)
{
    void *start = *tail;
    size_t unit = _Alignof(max_align_t);
    *tail += (size_bytes + unit - 1) / unit * unit;
    return start;
}

static char *tail_text(char **tail, const char *text)
{
    size_t size_bytes = strlen(text) + 1;
    return memcpy(tail_take(tail, size_bytes), text, size_bytes);
}

static void copy_assign(struct engine_command *command, const struct mu_assign *assign)
{
    char *tail = (char *)command->tail;
    command->assign = *assign;
    if (assign->amendments)
        command->amendments = *assign->amendments;
    command->assign.amendments = NULL;
    if (assign->leaf_counts) {
        size_t bytes = assign->layout.dp * sizeof *assign->leaf_counts;
        command->assign.leaf_counts = memcpy(tail_take(&tail, bytes), assign->leaf_counts, bytes);
    }
    if (assign->move_count > 0) {
        size_t bytes = assign->move_count * sizeof *assign->moves;
        command->assign.moves = memcpy(tail_take(&tail, bytes), assign->moves, bytes);
    }
    struct mu_peer *peers = tail_take(&tail, assign->peer_count * sizeof *peers);
    for (uint32_t i = 0; i < assign->peer_count; i++) {
        peers[i] = assign->peers[i];
        peers[i].name = tail_text(&tail, assign->peers[i].name ? assign->peers[i].name : "");
        peers[i].address = tail_text(&tail, assign->peers[i].address);
    }
    command->assign.peers = peers;
    if (assign->holder_count > 0) {
        size_t bytes = assign->holder_count * sizeof *assign->holders;
        command->assign.holders = memcpy(tail_take(&tail, bytes), assign->holders, bytes);
    }
}

static size_t assign_tail_bytes(const struct mu_assign *assign)
{
    size_t unit = _Alignof(max_align_t), bytes = 4 * unit;
    bytes += assign->leaf_counts ? assign->layout.dp * sizeof *assign->leaf_counts : 0;
    bytes += assign->move_count * sizeof *assign->moves;
    bytes += assign->peer_count * sizeof *assign->peers;
    bytes += assign->holder_count * sizeof *assign->holders;
    for (uint32_t i = 0; i < assign->peer_count; i++)
        bytes += strlen(assign->peers[i].address) + (assign->peers[i].name ? strlen(assign->peers[i].name) : 0) + 2 +
                 2 * unit;
    return bytes;
}

enum mu_status mu_engine_prepare(struct mu_engine *engine, uint64_t generation, struct mu_id incarnation,
                                 const struct mu_assign *assign)
{
    struct engine_command *command = command_new(ENGINE_PREPARE, generation, assign_tail_bytes(assign));
    if (command) {
        command->id = incarnation;
        copy_assign(command, assign);
    }
    pthread_mutex_lock(&engine->stop_lock);
    if (generation > engine->commanded)
        engine->commanded = generation;
    pthread_mutex_unlock(&engine->stop_lock);
    return push(engine, command);
}

enum mu_status mu_engine_run(struct mu_engine *engine, uint64_t generation)
{
    return push(engine, command_new(ENGINE_RUN, generation, 0));
}

enum mu_status mu_engine_abort(struct mu_engine *engine, uint64_t generation)
{
    cancel_generations(engine, generation, false);
    return push(engine, command_new(ENGINE_ABORT, generation, 0));
}

enum mu_status mu_engine_snapshot(struct mu_engine *engine, uint64_t generation, const struct mu_snapshot *snapshot)
{
    struct engine_command *command = command_new(ENGINE_SNAPSHOT, generation, 0);
    if (command)
        command->snapshot = *snapshot;
    return push(engine, command);
}

enum mu_status mu_engine_feed(struct mu_engine *engine, uint64_t generation, struct mu_id incarnation,
                              const struct mu_feed_order *order)
{
    struct engine_feed_order given = {.generation = generation, .incarnation = incarnation, .order = *order};
    given.order.amendments = NULL; /* borrowed; a member steps by them already */
    if (order->role == MU_FEED_GIVE || order->taker != MU_LAYOUT_NOBODY) {
        pthread_mutex_lock(&engine->stop_lock);
        if (engine->feed_order_count < ENGINE_FEED_ORDERS_MAX)
            engine->feed_orders[engine->feed_order_count++] = given;
        pthread_mutex_unlock(&engine->stop_lock);
        return MU_OK;
    }
    struct engine_command *command = command_new(ENGINE_FEED, generation, 0);
    if (command)
        command->feed = given;
    if (command && order->amendments)
        command->amendments = *order->amendments;
    return push(engine, command);
}

enum mu_status mu_engine_forget(struct mu_engine *engine)
{
    pthread_mutex_lock(&engine->stop_lock);
    uint64_t newest = engine->commanded;
    pthread_mutex_unlock(&engine->stop_lock);
    cancel_generations(engine, newest, false);
    return push(engine, command_new(ENGINE_FORGET, 0, 0));
}

enum mu_status mu_engine_probe(struct mu_engine *engine, struct mu_id incarnation, const struct mu_probe_order *order)
{
    struct engine_command *command = command_new(ENGINE_PROBE, 0, 0);
    if (command) {
        command->id = incarnation;
        command->probe = *order;
    }
    return push(engine, command);
}
