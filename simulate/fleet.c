#include "simulate/fleet.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/core/core.h"

#define NOBODY UINT32_MAX

enum {
    RESTLESS_US = 3 * 1000000, /* after somebody came or went the core may wait for time to pass */
    CHECKPOINTS_KEPT = 2,
};

/* What a worker has been told and what it holds. */
struct node {
    uint64_t session; /* 0: not attached */
    struct mu_id incarnation;
    bool knows_job;
    bool retries; /* told to come again: its name is still somebody's who was not declared lost yet */
    enum mu_worker_phase phase;
    enum mu_park_reason park_reason;
    enum mu_state_source source;
    uint64_t generation; /* of its newest Assign */
    uint32_t rank;
    uint64_t feed, giver_session; /* it takes a feed */
    enum mu_feed_state feed_state;
    uint64_t held_step;
    uint32_t share_count;
    struct mu_held_share shares[2];
};

/* What came from the core and is answered when it has returned. */
enum task_kind { TASK_MESSAGE, TASK_PLANNED, TASK_PUBLISHED, TASK_DELETED, TASK_SCRUBBED };

struct task {
    enum task_kind kind;
    enum mu_coord_message_kind message;
    uint64_t session, number, step; /* number: of a plan, a feed, a checkpoint */
    enum mu_command_kind command;
    uint32_t piece;
    bool writes; /* a piece */
    bool again;  /* rejected for now */
};

struct mu_fleet {
    struct mu_coord *core;
    const char *const *names;
    struct node *nodes;
    uint32_t *node_of; /* [session_room]: by session, which are numbered from 1 on */
    uint64_t session_count, session_room;
    uint32_t node_count, attached, preparing, feeding, retrying;
    uint64_t now_us, next_id, messages, generations, restless_until_us;
    char job[MU_JOB_NAME_SIZE];
    struct mu_id uid;
    struct task *tasks;
    uint32_t first_task, task_count, task_room;
    struct mu_plan plan; /* the newest */
    struct mu_fleet_generation generation;
    uint32_t leaves;
    struct mu_error reply;
    uint64_t snapshot_step;
    bool committed;
    struct mu_job_view view; /* of the job, after the last thing that happened */
    struct mu_worker_message message;
};

/* ---- from the core ---- */

static struct task *add_task(struct mu_fleet *f, enum task_kind kind)
{
    if (f->first_task == f->task_count)
        f->first_task = f->task_count = 0;
    if (f->task_count == f->task_room) {
        f->task_room = f->task_room ? 2 * f->task_room : 1024;
        f->tasks = realloc(f->tasks, f->task_room * sizeof *f->tasks);
        MU_ASSERT(f->tasks); /* some dozens of bytes for each worker */
    }
    f->tasks[f->task_count] = (struct task){.kind = kind};
    return &f->tasks[f->task_count++];
}

static struct node *node_by_session(const struct mu_fleet *f, uint64_t session)
{
    if (session == 0 || session > f->session_count)
        return NULL;
    struct node *n = &f->nodes[f->node_of[session]];
    return n->session == session ? n : NULL;
}

static void note_assign(struct mu_fleet *f, struct node *n, const struct mu_coord_message *message)
{
    const struct mu_assign *assign = &message->assign;
    n->generation = message->generation;
    n->rank = assign->rank;
    n->source = assign->source;
    if (assign->rank > 0)
        return;
    const struct mu_reshard *moved = &f->plan.reshard;
    struct mu_fleet_generation *g = &f->generation;
    *g = (struct mu_fleet_generation){.start_step = assign->start_step, .layout = assign->layout};
    g->source = assign->source == MU_SOURCE_INIT         ? MU_FLEET_SEED
                : assign->source == MU_SOURCE_CHECKPOINT ? MU_FLEET_CHECKPOINT
                : f->plan.from_mirrors                   ? MU_FLEET_MIRRORS
                                                         : MU_FLEET_HOLDERS;
    g->moved_bytes = (double)moved->bytes;
    for (uint32_t i = 0; i < moved->move_count; i++) /* ascending by receiver */
        g->receivers += i == 0 || moved->moves[i].to != moved->moves[i - 1].to;
    for (uint32_t d = 0; d < assign->layout.dp; d++) {
        uint32_t leaves = 0;
        if (f->plan.equal_leaves)
            mu_plan_leaf_range(f->leaves, assign->layout.dp, NULL, d, &leaves);
        else
            leaves = f->plan.leaf_counts[d];
        g->most_leaves = leaves > g->most_leaves ? leaves : g->most_leaves;
    }
    f->generations++;
}

static void on_send(struct mu_fleet *f, uint64_t session, const struct mu_coord_message *message)
{
    struct node *n = node_by_session(f, session);
    if (!n)
        return;
    struct task *task = add_task(f, TASK_MESSAGE);
    task->message = message->kind;
    task->session = session;
    if (message->kind == MU_CM_REJECT) {
        task->again = message->reject.reason == MU_REJECT_BUSY;
    } else if (message->kind == MU_CM_WELCOME) {
        f->uid = message->welcome.job_uid;
    } else if (message->kind == MU_CM_ASSIGN) {
        note_assign(f, n, message);
    } else if (message->kind == MU_CM_COMMAND || message->kind == MU_CM_SNAPSHOT) {
        bool snapshot = message->kind == MU_CM_SNAPSHOT;
        const struct mu_snapshot *s = snapshot ? &message->snapshot : &message->command.snapshot;
        task->command = snapshot ? MU_COMMAND_CHECKPOINT : message->command.kind;
        task->number = s->checkpoint;
        task->piece = s->piece;
        task->writes = task->command == MU_COMMAND_CHECKPOINT && s->piece < mu_layout_working(&s->layout);
    } else if (message->kind == MU_CM_FEED && message->feed.role == MU_FEED_TAKE) {
        n->feed = task->number = message->feed.number;
        n->giver_session = 0;
        for (uint32_t i = 0; i < f->node_count; i++)
            if (f->nodes[i].session && mu_id_equal(f->nodes[i].incarnation, message->feed.other))
                n->giver_session = f->nodes[i].session;
    }
}

static void on_action(void *ctx, const struct mu_coord_action *action)
{
    struct mu_fleet *f = ctx;
    struct task *task;
    switch (action->kind) {
    case MU_CA_SEND:
        on_send(f, action->send.session, action->send.message);
        break;
    case MU_CA_PLAN:
        mu_plan_fini(&f->plan);
        mu_plan_make(action->plan.input, &f->plan);
        add_task(f, TASK_PLANNED)->number = action->plan.ticket;
        break;
    case MU_CA_PUBLISH:
    case MU_CA_DELETE:
    case MU_CA_SCRUB:
        task = add_task(f, action->kind == MU_CA_PUBLISH  ? TASK_PUBLISHED
                           : action->kind == MU_CA_DELETE ? TASK_DELETED
                                                          : TASK_SCRUBBED);
        task->number = action->checkpoint_io.checkpoint->number;
        task->step = action->checkpoint_io.checkpoint->step;
        break;
    case MU_CA_EVENT:
        f->committed = f->committed || strcmp(action->event->kind, "checkpoint_committed") == 0;
        break;
    case MU_CA_EXAMINE:
        break;
    case MU_CA_REPLY:
        f->reply.status = action->reply.status;
        snprintf(f->reply.text, sizeof f->reply.text, "%s", action->reply.text ? action->reply.text : "");
        break;
    case MU_CA_CLOSE:
    case MU_CA_PERSIST:
    case MU_CA_FORGET:
        break;
    }
}

/* ---- to the core ---- */

static void step_core(struct mu_fleet *f, struct mu_coord_event *event)
{
    const struct mu_coord_sink sink = {.emit = on_action, .ctx = f};
    event->now_us = f->now_us;
    event->wall_us = f->now_us;
    event->random = (struct mu_id){.high = 1, .low = ++f->next_id};
    f->messages++;
    mu_coord_step(f->core, event, &sink);
}

static void say(struct mu_fleet *f, const struct node *n)
{
    step_core(
        f, &(struct mu_coord_event){.kind = MU_CE_MESSAGE, .message = {.session = n->session, .message = &f->message}});
}

static void fill_status(const struct node *n, struct mu_worker_status *status)
{
    memset(status, 0, sizeof *status);
    status->phase = n->phase;
    status->generation = n->generation;
    status->rank = n->rank;
    status->park_reason = n->park_reason;
    status->feed = n->feed;
    status->feed_state = n->feed_state;
    status->held.has_state = n->share_count > 0;
    status->held.step = n->held_step;
    status->held.share_count = n->share_count;
    memcpy(status->held.shares, n->shares, n->share_count * sizeof n->shares[0]);
}

static void say_status(struct mu_fleet *f, const struct node *n)
{
    f->message.kind = MU_WM_STATUS;
    f->message.generation = n->generation;
    fill_status(n, &f->message.status);
    say(f, n);
}

static void say_hello(struct mu_fleet *f, const struct node *n)
{
    struct mu_hello *hello = &f->message.hello;
    const char *name = f->names[n - f->nodes];
    f->message.kind = MU_WM_HELLO;
    f->message.generation = 0;
    memset(hello, 0, sizeof *hello);
    hello->protocol_version = MU_PROTOCOL_VERSION;
    hello->incarnation = n->incarnation;
    memcpy(hello->job, f->job, sizeof hello->job);
    snprintf(hello->name, sizeof hello->name, "n%u", (unsigned)(n - f->nodes));
    snprintf(hello->host, sizeof hello->host, "%.63s", name);
    snprintf(hello->address, sizeof hello->address, "%s:1", hello->name);
    snprintf(hello->backend, sizeof hello->backend, "simulated");
    hello->computes_bf16 = true; /* accelerators */
    hello->threads = 1;
    hello->prepared_job = n->knows_job;
    hello->job_uid = n->knows_job ? f->uid : (struct mu_id){0};
    fill_status(n, &hello->status);
    say(f, n);
}

static void say_piece(struct mu_fleet *f, const struct node *n, const struct task *task)
{
    struct mu_piece_report *piece = &f->message.piece;
    f->message.kind = MU_WM_PIECE;
    f->message.generation = n->generation;
    memset(piece, 0, sizeof *piece);
    piece->checkpoint = task->number;
    piece->piece = task->piece;
    piece->step = n->phase == MU_PHASE_PARKED ? n->held_step : f->snapshot_step;
    piece->size_bytes = 1;
    snprintf(piece->file, sizeof piece->file, "%u", task->piece);
    say(f, n);
}

/* ---- a worker's answers ---- */

static void park(struct mu_fleet *f, struct node *n, enum mu_park_reason reason)
{
    if (n->phase != MU_PHASE_PREPARING && n->phase != MU_PHASE_PREPARED && n->phase != MU_PHASE_RUNNING)
        return;
    f->preparing -= n->phase == MU_PHASE_PREPARING;
    n->phase = MU_PHASE_PARKED;
    n->park_reason = reason;
    say_status(f, n);
}

static void hold_own(const struct mu_fleet *f, struct node *n, bool beside)
{
    bool works = !mu_layout_is_idle(&f->generation.layout, n->rank);
    if (!beside || n->source == MU_SOURCE_CHECKPOINT || n->source == MU_SOURCE_INIT ||
        n->held_step != f->generation.start_step)
        n->share_count = 0;
    if (n->share_count == 2) /* of a generation that did not come about */
        n->share_count = 1;
    if (works)
        n->shares[n->share_count++] = (struct mu_held_share){.layout = f->generation.layout, .rank = n->rank};
    n->held_step = f->generation.start_step;
}

static void on_message(struct mu_fleet *f, struct node *n, const struct task *task)
{
    switch (task->message) {
    case MU_CM_WELCOME:
        if (!n->knows_job) {
            n->knows_job = true;
            say_hello(f, n);
        }
        break;
    case MU_CM_ASSIGN:
        f->preparing += n->phase != MU_PHASE_PREPARING;
        f->feeding -= n->feed_state != MU_FEED_NONE;
        n->phase = MU_PHASE_PREPARING;
        n->park_reason = MU_PARK_NONE;
        n->feed = 0;
        n->feed_state = MU_FEED_NONE;
        break;
    case MU_CM_GO:
        if (n->phase == MU_PHASE_PREPARED) {
            n->phase = MU_PHASE_RUNNING;
            hold_own(f, n, false);
        }
        break;
    case MU_CM_REVOKE:
        park(f, n, MU_PARK_REVOKED);
        break;
    case MU_CM_COMMAND:
        if (task->command == MU_COMMAND_PARK)
            park(f, n, MU_PARK_COMMAND);
        else if (task->writes && n->phase == MU_PHASE_RUNNING)
            say_piece(f, n, task);
        break;
    case MU_CM_SNAPSHOT:
        if (task->writes)
            say_piece(f, n, task);
        break;
    case MU_CM_FEED:
        if (task->number && n->feed == task->number) {
            f->feeding += n->feed_state == MU_FEED_NONE;
            n->feed_state = MU_FEED_LIVE;
            say_status(f, n);
        }
        break;
    case MU_CM_REJECT:
    case MU_CM_RELEASE:
        f->attached--;
        f->retrying += task->again;
        *n = (struct node){.retries = task->again};
        break;
    case MU_CM_PIECE_ACK:
    case MU_CM_KEEP:
    case MU_CM_RECALL:
    case MU_CM_PROBE:
    case MU_CM_COUNT:
        break;
    }
}

static void on_io(struct mu_fleet *f, const struct task *task)
{
    struct mu_coord_event event = {
        .kind = task->kind == TASK_PUBLISHED ? MU_CE_PUBLISHED
                : task->kind == TASK_DELETED ? MU_CE_DELETED
                                             : MU_CE_SCRUBBED,
        .checkpoint_io = {
            .checkpoint = task->number, .status = MU_OK, .step = task->step, .size_bytes = 1, .text = ""}};
    memcpy(event.checkpoint_io.job, f->job, sizeof f->job);
    step_core(f, &event);
}

/* A giver that has parked by command ends its feed with everything, any other end of it leaves nothing. */
static bool end_feeds(struct mu_fleet *f)
{
    bool any = false;
    for (uint32_t i = 0; f->feeding > 0 && i < f->node_count; i++) {
        struct node *n = &f->nodes[i];
        const struct node *giver = node_by_session(f, n->giver_session);
        if (n->session == 0 || n->feed_state != MU_FEED_LIVE || (giver && giver->phase == MU_PHASE_RUNNING))
            continue;
        bool whole = giver && giver->phase == MU_PHASE_PARKED && giver->park_reason == MU_PARK_COMMAND;
        n->feed_state = whole ? MU_FEED_WHOLE : MU_FEED_FAILED;
        if (whole) {
            n->share_count = giver->share_count;
            n->held_step = giver->held_step;
            memcpy(n->shares, giver->shares, sizeof n->shares);
        }
        say_status(f, n);
        any = true;
    }
    return any;
}

static void settle(struct mu_fleet *f)
{
    static const uint8_t secret[32] = {1};
    do {
        while (f->first_task < f->task_count) {
            const struct task task = f->tasks[f->first_task++];
            struct node *n = task.kind == TASK_MESSAGE ? node_by_session(f, task.session) : NULL;
            if (n)
                on_message(f, n, &task);
            else if (task.kind == TASK_PLANNED)
                step_core(f, &(struct mu_coord_event){
                                 .kind = MU_CE_PLANNED,
                                 .planned = {.ticket = task.number, .plan = &f->plan, .secret = secret}});
            else if (task.kind != TASK_MESSAGE)
                on_io(f, &task);
        }
    } while (end_feeds(f));
    if (f->job[0])
        (void)mu_coord_job_find(f->core, f->job, &f->view);
}

/* ---- life ---- */

struct mu_fleet *mu_fleet_new(const char *const *names, uint32_t node_count, const struct mu_node_map *map)
{
    struct mu_fleet *f = calloc(1, sizeof *f);
    struct mu_coord_config config;
    MU_ASSERT(node_count > 0 && node_count <= MU_FLEET_NODES_MAX);
    if (!f)
        return NULL;
    mu_coord_config_init(&config);
    config.max_jobs = 1;
    config.max_workers = config.max_members = 2 * node_count; /* the lost keep their place until the next generation */
    config.suspect_ms = config.lost_ms = config.hang_floor_ms = config.prepare_limit_ms = UINT32_MAX / 2;
    config.rebalance_ms = 0;
    config.nodes = map;
    config.crash_limit = UINT32_MAX; /* nodes are repaired before they come back */
    f->names = names;
    f->node_count = node_count;
    f->now_us = 1000000;
    f->core = mu_coord_new(&config);
    f->nodes = calloc(node_count, sizeof *f->nodes);
    f->plan.ranks = calloc(2 * (size_t)node_count + 1, sizeof *f->plan.ranks);
    f->plan.leaf_counts = calloc(MU_COUNTED_REPLICAS_MAX, sizeof *f->plan.leaf_counts);
    if (f->core && f->nodes && f->plan.ranks && f->plan.leaf_counts) {
        const struct mu_coord_sink sink = {.emit = on_action, .ctx = f};
        mu_coord_start(f->core, f->now_us, f->now_us, &sink);
        return f;
    }
    mu_fleet_free(f);
    return NULL;
}

void mu_fleet_free(struct mu_fleet *f)
{
    if (!f)
        return;
    mu_plan_fini(&f->plan);
    free(f->plan.ranks);
    free(f->plan.leaf_counts);
    mu_coord_free(f->core);
    free(f->nodes);
    free(f->node_of);
    free(f->tasks);
    free(f);
}

enum mu_status mu_fleet_submit(struct mu_fleet *f, const struct mu_job_spec *given, struct mu_error *err)
{
    struct mu_job_spec spec = *given;
    spec.checkpoint.every = 0; /* ordered when time has been skipped up to one */
    spec.checkpoint.keep = CHECKPOINTS_KEPT;
    spec.checkpoint.kind = MU_CHECKPOINT_SHARED; /* the directories of hosts are not simulated */
    enum mu_status status = mu_job_spec_check(&spec, err);
    if (status != MU_OK)
        return status;
    memcpy(f->job, spec.name, sizeof f->job);
    f->leaves = mu_job_leaves(&spec);
    step_core(f, &(struct mu_coord_event){.kind = MU_CE_SUBMIT, .submit = {.cookie = 1, .spec = &spec}});
    settle(f);
    return f->reply.status == MU_OK ? MU_OK : mu_fail(err, f->reply.status, "%s", f->reply.text);
}

void mu_fleet_advance(struct mu_fleet *f, uint64_t now_us)
{
    bool waits = mu_fleet_deadline(f) <= now_us;
    f->now_us = now_us;
    if (!waits)
        return;
    step_core(f, &(struct mu_coord_event){.kind = MU_CE_TICK});
    settle(f);
    for (uint32_t i = 0; f->retrying > 0 && i < f->node_count; i++)
        if (f->nodes[i].retries)
            mu_fleet_attach(f, i);
}

uint64_t mu_fleet_deadline(const struct mu_fleet *f)
{
    enum mu_fleet_state state = mu_fleet_state(f);
    bool changing = state == MU_FLEET_CHANGING || f->now_us < f->restless_until_us;
    return changing && state != MU_FLEET_PREPARING ? mu_coord_next_deadline(f->core) : UINT64_MAX;
}

void mu_fleet_attach(struct mu_fleet *f, uint32_t node)
{
    struct node *n = &f->nodes[node];
    MU_ASSERT(n->session == 0);
    f->retrying -= n->retries;
    if (++f->session_count >= f->session_room) {
        f->session_room = 2 * f->session_count + f->node_count;
        f->node_of = realloc(f->node_of, f->session_room * sizeof *f->node_of);
        MU_ASSERT(f->node_of);
    }
    *n = (struct node){.session = f->session_count, .incarnation = {.high = 2, .low = ++f->next_id}};
    f->node_of[n->session] = node;
    f->attached++;
    f->restless_until_us = f->now_us + RESTLESS_US;
    say_hello(f, n);
    settle(f);
}

void mu_fleet_kill(struct mu_fleet *f, uint32_t node)
{
    struct node *n = &f->nodes[node];
    uint64_t session = n->session;
    if (session == 0) { /* it was about to come again */
        f->retrying -= n->retries;
        n->retries = false;
        return;
    }
    f->preparing -= n->phase == MU_PHASE_PREPARING;
    f->feeding -= n->feed_state != MU_FEED_NONE;
    *n = (struct node){.session = 0};
    f->attached--;
    f->restless_until_us = f->now_us + RESTLESS_US;
    step_core(f, &(struct mu_coord_event){.kind = MU_CE_DISCONNECTED,
                                          .disconnected = {.session = session, .reason = "stream reset"}});
    settle(f);
}

bool mu_fleet_is_member(const struct mu_fleet *f, uint32_t node)
{
    enum mu_worker_phase phase = f->nodes[node].phase;
    return f->nodes[node].session != 0 && phase != MU_PHASE_SPARE && phase != MU_PHASE_PARKED;
}

uint32_t mu_fleet_rank(const struct mu_fleet *f, uint32_t node)
{
    return f->nodes[node].rank;
}

uint32_t mu_fleet_attached(const struct mu_fleet *f)
{
    return f->attached;
}

void mu_fleet_prepared(struct mu_fleet *f)
{
    uint64_t generation = f->generations;
    for (uint32_t i = 0; i < f->node_count && f->generations == generation; i++) {
        struct node *n = &f->nodes[i];
        if (n->session == 0 || n->phase != MU_PHASE_PREPARING)
            continue;
        f->preparing--;
        n->phase = MU_PHASE_PREPARED;
        hold_own(f, n, true);
        say_status(f, n);
    }
    settle(f);
}

void mu_fleet_stepped(struct mu_fleet *f, uint64_t step)
{
    const struct node *first = NULL;
    for (uint32_t i = 0; i < f->node_count; i++) {
        struct node *n = &f->nodes[i];
        if (n->session == 0 || n->phase != MU_PHASE_RUNNING)
            continue;
        n->held_step = step;
        first = n->rank == 0 ? n : first;
    }
    if (!first || step == f->generation.start_step)
        return;
    f->message.kind = MU_WM_STEP;
    f->message.generation = first->generation;
    f->message.step = (struct mu_step_report){
        .steps_done = step, .result = {.step = step - 1, .loss = 1, .grad_norm = 1, .finite = true}, .step_count = 1};
    say(f, first);
    settle(f);
}

bool mu_fleet_checkpoint(struct mu_fleet *f, uint64_t step)
{
    f->committed = false;
    f->snapshot_step = step;
    struct mu_coord_event event = {.kind = MU_CE_CHECKPOINT, .request = {.cookie = 2, .job = f->job}};
    step_core(f, &event);
    settle(f);
    return f->committed;
}

enum mu_fleet_state mu_fleet_state(const struct mu_fleet *f)
{
    switch (f->view.phase) {
    case MU_JP_WAITING:
        return MU_FLEET_WAITING;
    case MU_JP_PREPARING:
        return f->preparing > 0 ? MU_FLEET_PREPARING : MU_FLEET_CHANGING;
    case MU_JP_STEPPING:
        return MU_FLEET_STEPPING;
    case MU_JP_OVER:
        return MU_FLEET_FAILED;
    default:
        return MU_FLEET_CHANGING;
    }
}

const char *mu_fleet_text(const struct mu_fleet *f)
{
    return f->view.phase == MU_JP_OVER ? f->view.record.text : f->view.waiting_text;
}

const struct mu_fleet_generation *mu_fleet_generation(const struct mu_fleet *f)
{
    return &f->generation;
}

uint64_t mu_fleet_generations(const struct mu_fleet *f)
{
    return f->generations;
}

uint64_t mu_fleet_messages(const struct mu_fleet *f)
{
    return f->messages;
}
