#include "bench/attach.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/id.h"
#include "proto/wire.h"
#include "rpc/client.h"
#include "worker/core/core.h"

#define ATTACH_METHOD "/muster.v1.WorkerService/Attach"

enum {
    SCAN_US = 5000,        /* timers of the workers are looked at so often */
    WORKERS_OF_A_HOST = 8, /* in what they say of themselves */
    LEAF_US = 20,          /* of computing in a step, as reported */
};

struct fake;

/* One stream, from CONNECT until the main thread frees it. */
struct link {
    struct fake *fake;
    struct mu_rpc_stream *stream;
    struct link *next;
};

/* What the engine owes the core: given after the step in which it was asked for. */
struct answers {
    bool loaded, prepared, parked, disconnected;
    uint64_t generation;
    enum mu_park_reason reason;
};

struct fake {
    struct client *client;
    pthread_mutex_t lock; /* all below but deadline_us */
    struct mu_worker *core;
    struct mu_rpc_client *rpc;
    struct link *link;
    struct answers answers;
    struct mu_step_result result; /* of the last step */
    uint64_t generation, step, progress, next_step_us;
    struct mu_held_share share; /* of that generation */
    bool has_told;              /* its vital signs */
    bool running, attached, exited;
    atomic_uint_fast64_t deadline_us; /* the main thread steps it then */
};

struct client {
    struct attach_shared *shared;
    struct mu_rpc_pool *pool;
    struct fake *fakes;
    uint32_t process, count;
    pthread_mutex_t dead_lock;
    struct link *dead;                                    /* ended streams */
    struct mu_wire_arena poller_in, poller_out, main_out; /* one thread each */
};

/* Ends this process only; the driver sees it. */
static void stop_if(bool failed, const char *what)
{
    if (!failed)
        return;
    fprintf(stderr, "bench_attach: client: %s\n", what);
    _exit(1);
}

static void raise_to(atomic_ullong *most, uint64_t value)
{
    unsigned long long seen = atomic_load(most);
    while (value > seen && !atomic_compare_exchange_weak(most, &seen, value))
        ;
}

/* ---- actions of the core: under the worker's lock ---- */

struct turn {
    struct fake *fake;
    struct mu_wire_arena *arena;
};

static void on_stream(void *user, const struct mu_rpc_stream_event *event);

static void drop_link(struct fake *fake, bool cancel)
{
    struct link *link = fake->link;
    if (!link)
        return;
    fake->link = NULL;
    if (cancel)
        mu_rpc_stream_cancel(link->stream);
    pthread_mutex_lock(&fake->client->dead_lock);
    link->next = fake->client->dead;
    fake->client->dead = link;
    pthread_mutex_unlock(&fake->client->dead_lock);
}

static void open_link(struct fake *fake)
{
    struct mu_error err;
    drop_link(fake, true);
    struct link *link = calloc(1, sizeof *link);
    stop_if(!link, "out of memory");
    link->fake = fake;
    if (mu_rpc_stream_new(fake->rpc, ATTACH_METHOD, on_stream, link, &err, &link->stream) == MU_OK) {
        fake->link = link; /* callbacks wait for the lock until here */
        return;
    }
    free(link);
    fake->answers.disconnected = true;
}

static void send_message(struct turn *turn, const struct mu_worker_message *message)
{
    struct attach_shared *shared = turn->fake->client->shared;
    const void *data;
    size_t size_bytes;
    struct mu_error err;
    if (!turn->fake->link)
        return;
    struct mu_worker_message more = *message;
    if (message->kind != MU_WM_HELLO && !turn->fake->has_told && atomic_load(&shared->tell_vitals)) {
        static const struct mu_vitals vitals = {.mono_us = 1,
                                                .values = {[MU_VITAL_CPU_US] = 86400123456,
                                                           [MU_VITAL_MEMORY_BYTES] = 81604378624,
                                                           [MU_VITAL_PLANE_SENT_BYTES] = 987654321098765,
                                                           [MU_VITAL_LATENCY_US] = 154}};
        more.vitals = &vitals;
        turn->fake->has_told = true;
        atomic_fetch_add(&shared->vitals_told, 1);
    }
    mu_wire_arena_reset(turn->arena);
    stop_if(mu_wire_encode_worker(turn->arena, &more, &data, &size_bytes, &err) != MU_OK, err.text);
    struct mu_rpc_bytes *bytes = mu_rpc_bytes_copy(data, size_bytes);
    if (mu_rpc_stream_send(turn->fake->link->stream, bytes) == MU_ERR_LIMIT)
        mu_rpc_stream_cancel(turn->fake->link->stream);
    mu_rpc_bytes_unref(bytes);
    atomic_fetch_add(&shared->messages, 1);
    if (message->kind == MU_WM_STEP)
        atomic_fetch_add(&shared->step_reports, 1);
}

static void set_running(struct fake *fake, bool running)
{
    struct attach_shared *shared = fake->client->shared;
    if (running == fake->running)
        return;
    fake->running = running;
    if (running) {
        uint64_t now_us = mu_clock_mono_us();
        fake->next_step_us = (now_us / shared->step_us + 1) * shared->step_us;
        atomic_fetch_add(&shared->runs, 1);
        atomic_fetch_add(&shared->running, 1);
        raise_to(&shared->last_run_us, now_us);
    } else {
        atomic_fetch_sub(&shared->running, 1);
    }
}

static void prepare(struct fake *fake, uint64_t generation, const struct mu_assign *assign)
{
    fake->generation = generation;
    fake->step = assign->start_step;
    fake->share = (struct mu_held_share){.layout = assign->layout, .rank = assign->rank};
    fake->result = (struct mu_step_result){.command = assign->command_base, .finite = true};
    fake->answers.prepared = true;
    fake->answers.generation = generation;
}

static void park(struct fake *fake, uint64_t generation, enum mu_park_reason reason)
{
    set_running(fake, false);
    fake->answers.prepared = false;
    fake->answers.parked = true;
    fake->answers.generation = generation;
    fake->answers.reason = reason;
}

static void on_action(void *ctx, const struct mu_worker_action *action)
{
    struct turn *turn = ctx;
    struct fake *fake = turn->fake;
    switch (action->kind) {
    case MU_WA_CONNECT:
        open_link(fake);
        break;
    case MU_WA_DISCONNECT:
        drop_link(fake, true);
        break;
    case MU_WA_SEND:
        send_message(turn, action->message);
        break;
    case MU_WA_LOAD_JOB:
        fake->answers.loaded = true;
        break;
    case MU_WA_PREPARE:
        prepare(fake, action->generation.generation, action->generation.assign);
        break;
    case MU_WA_RUN:
        set_running(fake, true);
        break;
    case MU_WA_ABORT:
        park(fake, action->generation.generation, MU_PARK_REVOKED);
        break;
    case MU_WA_FEED:
    case MU_WA_KEEP:
    case MU_WA_PROBE:
    case MU_WA_SNAPSHOT: /* the jobs of this benchmark have no checkpoints */
        break;
    case MU_WA_FORGET:
        atomic_fetch_add(&fake->client->shared->forgets, 1);
        set_running(fake, false);
        fake->answers = (struct answers){0};
        fake->step = 0;
        fake->share = (struct mu_held_share){0};
        break;
    case MU_WA_EXIT:
        fake->exited = true;
        set_running(fake, false);
        atomic_fetch_add(&fake->client->shared->exits, 1);
        drop_link(fake, true);
        break;
    }
}

/* ---- events: under the worker's lock ---- */

static struct mu_held held_now(const struct fake *fake)
{
    bool stepped = fake->step > 0 && fake->result.step == fake->step - 1;
    bool has_state = fake->share.layout.dp > 0 && !mu_layout_is_idle(&fake->share.layout, fake->share.rank);
    return (struct mu_held){.has_state = has_state,
                            .has_result = stepped,
                            .step = fake->step,
                            .result = fake->result,
                            .share_count = has_state,
                            .shares = {fake->share}};
}

static void give(struct turn *turn, struct mu_worker_event *event)
{
    const struct mu_worker_sink sink = {.emit = on_action, .ctx = turn};
    event->now_us = mu_clock_mono_us();
    event->random = mu_id_random();
    mu_worker_step(turn->fake->core, event, &sink);
}

static bool give_answer(struct turn *turn)
{
    struct answers *answers = &turn->fake->answers;
    struct mu_worker_event event = {0};
    if (answers->loaded) {
        answers->loaded = false;
        event.kind = MU_WE_JOB_LOADED;
        event.job_loaded.numeric_identity = (struct mu_hash128){.high = 1, .low = 2};
        event.job_loaded.data_hash = (struct mu_hash128){.high = 3, .low = 4};
    } else if (answers->disconnected) {
        answers->disconnected = false;
        event.kind = MU_WE_DISCONNECTED;
        event.text = "cannot open a stream";
    } else if (answers->prepared || answers->parked) {
        event.kind = answers->prepared ? MU_WE_PREPARED : MU_WE_PARKED;
        answers->prepared = answers->parked = false;
        event.parked.generation = answers->generation;
        event.parked.reason = event.kind == MU_WE_PARKED ? answers->reason : MU_PARK_NONE;
        event.parked.held = held_now(turn->fake);
    } else {
        return false;
    }
    give(turn, &event);
    return true;
}

static void note_attached(struct fake *fake)
{
    struct attach_shared *shared = fake->client->shared;
    bool attached = mu_worker_connected(fake->core) && !fake->exited;
    if (attached && !fake->attached) {
        raise_to(&shared->last_welcome_us, mu_clock_mono_us());
        atomic_fetch_add(&shared->attached, 1);
        atomic_fetch_add(&shared->welcomes, 1);
    } else if (!attached && fake->attached) {
        atomic_fetch_sub(&shared->attached, 1);
    }
    fake->attached = attached;
}

static void step_fake(struct fake *fake, struct mu_wire_arena *arena, struct mu_worker_event *event)
{
    struct turn turn = {.fake = fake, .arena = arena};
    give(&turn, event);
    while (give_answer(&turn))
        ;
    note_attached(fake);
    uint64_t deadline_us = mu_worker_next_deadline(fake->core);
    if (fake->running && fake->next_step_us < deadline_us)
        deadline_us = fake->next_step_us;
    atomic_store_explicit(&fake->deadline_us, deadline_us, memory_order_relaxed);
}

/* ---- the stream: poller thread ---- */

static void note_message(struct attach_shared *shared, const struct mu_coord_message *message, size_t size_bytes)
{
    if (message->kind == MU_CM_REJECT)
        atomic_fetch_add(&shared->rejects[message->reject.reason], 1);
    if (message->kind != MU_CM_ASSIGN)
        return;
    atomic_fetch_add(&shared->assigns, 1);
    atomic_fetch_add(&shared->assign_bytes, size_bytes);
    raise_to(&shared->assign_bytes_max, size_bytes);
}

static void on_message(struct fake *fake, const struct mu_rpc_stream_event *event)
{
    struct client *client = fake->client;
    struct mu_coord_message message;
    struct mu_error err;
    mu_wire_arena_reset(&client->poller_in);
    stop_if(mu_wire_decode_coord(&client->poller_in, event->data, event->size_bytes, &message, &err) != MU_OK,
            err.text);
    note_message(client->shared, &message, event->size_bytes);
    step_fake(fake, &client->poller_out, &(struct mu_worker_event){.kind = MU_WE_MESSAGE, .message = &message});
}

static void on_closed(struct fake *fake, const struct mu_rpc_stream_event *event)
{
    struct attach_shared *shared = fake->client->shared;
    const char *text = event->code == MU_RPC_OK ? "ended by the coordinator" : event->error->text;
    atomic_fetch_add(fake->attached ? &shared->breaks : &shared->failed_connects, 1);
    snprintf(shared->trouble[fake->client->process], sizeof shared->trouble[0], "%.159s", text);
    drop_link(fake, false);
    step_fake(fake, &fake->client->poller_out, &(struct mu_worker_event){.kind = MU_WE_DISCONNECTED, .text = text});
}

static void on_stream(void *user, const struct mu_rpc_stream_event *event)
{
    struct link *link = user;
    struct fake *fake = link->fake;
    pthread_mutex_lock(&fake->lock);
    if (fake->link == link) { /* else it was given up meanwhile */
        if (event->type == MU_RPC_STREAM_OPENED)
            step_fake(fake, &fake->client->poller_out, &(struct mu_worker_event){.kind = MU_WE_CONNECTED});
        else if (event->type == MU_RPC_STREAM_MESSAGE)
            on_message(fake, event);
        else if (event->type == MU_RPC_STREAM_CLOSED)
            on_closed(fake, event);
    }
    pthread_mutex_unlock(&fake->lock);
}

/* ---- timers: main thread ---- */

/* One step of the pretended job. The vote is the worker's own: nobody reduces it, so a command is executed by each
 * worker at its next boundary, which is all that the coordinator can see of it. */
static void make_step(struct fake *fake, struct mu_wire_arena *arena)
{
    uint32_t step_us = fake->client->shared->step_us;
    fake->result = (struct mu_step_result){.step = fake->step,
                                           .loss = 2.0,
                                           .grad_norm = 1.0,
                                           .command = mu_worker_vote(fake->core, fake->generation),
                                           .finite = true};
    fake->step++;
    fake->next_step_us += step_us;
    struct mu_boundary decision =
        mu_worker_boundary(fake->core, mu_clock_mono_us(), fake->generation, fake->step, &fake->result);
    struct mu_worker_event event = {.kind = MU_WE_STEP};
    event.step = (struct mu_step_report){.steps_done = fake->step,
                                         .result = fake->result,
                                         .step_count = 1,
                                         .leaf_count = 1,
                                         .tokens = 1,
                                         .total_us = step_us,
                                         .forward_us = LEAF_US,
                                         .backward_us = 2 * LEAF_US,
                                         .wait_us = step_us - 3 * LEAF_US};
    if (decision.park)
        park(fake, fake->generation, MU_PARK_COMMAND);
    step_fake(fake, arena, &event);
}

static void on_deadline(struct fake *fake, struct mu_wire_arena *arena)
{
    pthread_mutex_lock(&fake->lock);
    uint64_t now_us = mu_clock_mono_us();
    if (fake->running && now_us >= fake->next_step_us)
        make_step(fake, arena);
    if (now_us >= mu_worker_next_deadline(fake->core)) {
        struct mu_worker_event progress = {.kind = MU_WE_PROGRESS};
        progress.progress.counter = ++fake->progress;
        step_fake(fake, arena, &progress);
        step_fake(fake, arena, &(struct mu_worker_event){.kind = MU_WE_TICK});
    }
    pthread_mutex_unlock(&fake->lock);
}

static void free_dead(struct client *client)
{
    pthread_mutex_lock(&client->dead_lock);
    struct link *dead = client->dead;
    client->dead = NULL;
    pthread_mutex_unlock(&client->dead_lock);
    while (dead) {
        struct link *next = dead->next;
        mu_rpc_stream_free(dead->stream);
        free(dead);
        dead = next;
    }
}

/* ---- the process ---- */

static void make_fake(struct client *client, struct fake *fake, uint32_t number)
{
    struct mu_worker_config config;
    struct mu_error err;
    mu_worker_config_init(&config);
    struct mu_hello *hello = &config.hello;
    snprintf(hello->software_version, sizeof hello->software_version, "%s", MU_VERSION);
    snprintf(hello->job, sizeof hello->job, "%s", client->shared->job);
    snprintf(hello->name, sizeof hello->name, "w%05u", number);
    snprintf(hello->host, sizeof hello->host, "host%u", number / WORKERS_OF_A_HOST);
    snprintf(hello->address, sizeof hello->address, "host%u;tcp:10.%u.%u.%u:4000", number / WORKERS_OF_A_HOST,
             number >> 16, number >> 8 & 255, number & 255);
    snprintf(hello->backend, sizeof hello->backend, "cpu");
    hello->pid = (uint64_t)getpid();
    hello->threads = 1;
    config.incarnation = mu_id_random();
    config.jitter_seed = config.incarnation.low;
    fake->client = client;
    fake->core = mu_worker_new(&config);
    pthread_mutex_init(&fake->lock, NULL);
    atomic_store(&fake->deadline_us, UINT64_MAX);
    struct mu_rpc_client_config rpc = mu_rpc_client_config_default();
    rpc.address = client->shared->address;
    rpc.max_receive_bytes = MU_WIRE_COORD_BYTES_MAX;
    stop_if(!fake->core || mu_rpc_client_new(client->pool, &rpc, &err, &fake->rpc) != MU_OK, "cannot make a worker");
}

static void start_all(struct client *client)
{
    atomic_fetch_add(&client->shared->ready, 1);
    while (!atomic_load(&client->shared->start) && !atomic_load(&client->shared->stop))
        nanosleep(&(struct timespec){.tv_nsec = SCAN_US * 1000}, NULL);
    for (uint32_t i = 0; i < client->count && !atomic_load(&client->shared->stop); i++) {
        struct fake *fake = &client->fakes[i];
        pthread_mutex_lock(&fake->lock);
        step_fake(fake, &client->main_out, &(struct mu_worker_event){.kind = MU_WE_START});
        pthread_mutex_unlock(&fake->lock);
    }
}

static void run_until_stop(struct client *client)
{
    while (!atomic_load(&client->shared->stop)) {
        uint64_t now_us = mu_clock_mono_us();
        for (uint32_t i = 0; i < client->count; i++) {
            struct fake *fake = &client->fakes[i];
            if (atomic_load_explicit(&fake->deadline_us, memory_order_relaxed) <= now_us)
                on_deadline(fake, &client->main_out);
        }
        free_dead(client);
        uint64_t spent_us = mu_clock_mono_us() - now_us;
        if (spent_us < SCAN_US)
            nanosleep(&(struct timespec){.tv_nsec = (long)(SCAN_US - spent_us) * 1000}, NULL);
    }
}

int attach_workers_main(struct attach_shared *shared, uint32_t process)
{
    struct client client = {.shared = shared, .process = process};
    struct mu_error err;
    client.count = (shared->workers + shared->processes - 1 - process) / shared->processes;
    client.fakes = calloc(client.count, sizeof *client.fakes);
    pthread_mutex_init(&client.dead_lock, NULL);
    mu_wire_arena_init(&client.poller_in);
    mu_wire_arena_init(&client.poller_out);
    mu_wire_arena_init(&client.main_out);
    stop_if(!client.fakes || mu_rpc_pool_new(1, &err, &client.pool) != MU_OK, "cannot start");
    for (uint32_t i = 0; i < client.count; i++)
        make_fake(&client, &client.fakes[i], process + i * shared->processes);
    start_all(&client);
    run_until_stop(&client);
    return 0; /* the kernel closes thousands of connections faster than the library would */
}
