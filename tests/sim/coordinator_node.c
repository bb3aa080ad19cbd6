/* Shell of the coordinator core: output commit over a store that loses what is not synced, planning and publishing
 * after a while, crashes before and after every sync, pauses.
 *
 * The unit of atomicity of the store is one turn (one core step): a crash in the middle of a sync keeps a prefix of the
 * turns. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

struct mu_sim_output {
    struct mu_sim_output *next;
    enum mu_coord_action_kind kind;
    uint64_t turn;
    uint64_t session;
    struct mu_coord_message *message;
    struct mu_record *record, *job; /* PERSIST, FORGET, EVENT, PUBLISH, DELETE: a copy; job: PUBLISH, DELETE */
    uint64_t cookie, checkpoint;
    enum mu_status status;
    bool existed, probe;
    char text[MU_TEXT_SIZE];
};

static void pump(struct mu_sim *sim);
static void schedule_tick(struct mu_sim *sim);

static void free_output(struct mu_sim_output *output)
{
    free(output->message);
    free(output->record);
    free(output->job);
    free(output);
}

bool mu_sim_coord_up(const struct mu_sim *sim)
{
    return sim->nodes[MU_SIM_NODE_COORDINATOR].alive;
}

static struct mu_sim_node *node(struct mu_sim *sim)
{
    return &sim->nodes[MU_SIM_NODE_COORDINATOR];
}

/* ---- planning ---- */

static void planned(struct mu_sim *sim, struct mu_sim_event *event)
{
    struct mu_plan_input *input = event->payload;
    struct mu_plan plan = {.ranks = mu_sim_alloc((input->member_count + 1) * sizeof *plan.ranks),
                           .leaf_counts = mu_sim_alloc(MU_COUNTED_REPLICAS_MAX * sizeof *plan.leaf_counts)};
    uint8_t secret[32];
    for (size_t i = 0; i < sizeof secret; i++)
        secret[i] = (uint8_t)mu_sim_random(sim);
    mu_plan_make(input, &plan);
    mu_sim_trace(sim, "coord plan: %s, tp %u pp %u dp %u idle %u of %u, step %" PRIu64 ", %u moves %s",
                 mu_status_name(plan.status), plan.layout.tp, plan.layout.pp, plan.layout.dp, plan.layout.idle,
                 input->member_count, plan.start_step, plan.reshard.move_count, plan.text);
    mu_sim_oracle_planned(sim, input, &plan);
    mu_sim_coord_event(sim, &(struct mu_coord_event){.kind = MU_CE_PLANNED, .planned = {event->a, &plan, secret}});
    mu_plan_fini(&plan);
    free(plan.ranks);
    free(plan.leaf_counts);
}

/* ---- checkpoint directories: the file system may have done it although the coordinator dies before it hears of it
 * ---- */

struct io_done {
    enum mu_coord_event_kind kind;
    enum mu_status status;
    uint64_t checkpoint, step;
    const char *text;
};

static void io_reported(struct mu_sim *sim, struct mu_sim_event *event)
{
    const struct io_done *done = event->payload;
    struct mu_coord_event out = {.kind = done->kind,
                                 .checkpoint_io = {.checkpoint = done->checkpoint,
                                                   .status = done->status,
                                                   .step = done->step,
                                                   .size_bytes = 4096,
                                                   .text = done->text}};
    strcpy(out.checkpoint_io.job, sim->spec.name);
    mu_sim_coord_event(sim, &out);
}

/* After a restart only a manifest that is there already counts. */
static enum mu_status probe(struct mu_sim *sim, const struct mu_checkpoint_record *record, uint64_t *ret_step)
{
    struct mu_sim_values values;
    return mu_sim_files_load(sim, record->dir, ret_step, &values) ? MU_OK : MU_ERR_NOT_FOUND;
}

static enum mu_status reread(struct mu_sim *sim, const struct mu_checkpoint_record *record)
{
    uint64_t step;
    struct mu_sim_values values;
    if (mu_sim_files_load(sim, record->dir, &step, &values))
        return MU_OK;
    return mu_sim_files_find(&sim->files, record->dir) ? MU_ERR_CORRUPT : MU_ERR_NOT_FOUND;
}

enum { IO_PUBLISH, IO_PROBE, IO_DELETE, IO_SCRUB };

static void io_happens(struct mu_sim *sim, struct mu_sim_event *event)
{
    const struct mu_record *record = event->payload;
    bool publish = event->a == IO_PUBLISH || event->a == IO_PROBE, scrub = event->a == IO_SCRUB;
    bool dead = !node(sim)->alive || node(sim)->life != event->b;
    if (dead && mu_sim_below(sim, 2))
        return;
    struct io_done done = {.kind = publish ? MU_CE_PUBLISHED
                                   : scrub ? MU_CE_SCRUBBED
                                           : MU_CE_DELETED,
                           .checkpoint = record->checkpoint->number,
                           .text = ""};
    if (event->a == IO_PROBE) {
        done.status = probe(sim, record->checkpoint, &done.step);
    } else if (scrub) {
        done.status = reread(sim, record->checkpoint);
    } else if (publish) {
        done.status = mu_sim_files_publish(sim, record->checkpoint, &done.text);
        done.step = record->checkpoint->step;
    } else {
        mu_sim_oracle_deleted(sim, record->checkpoint->dir);
        done.status = mu_sim_files_delete(sim, record->checkpoint->dir);
    }
    mu_sim_trace(sim, "coord %s of checkpoint %" PRIu64 ": %s %s",
                 publish ? "publish"
                 : scrub ? "scrub"
                         : "delete",
                 done.checkpoint, mu_status_name(done.status), done.text);
    if ((!scrub && mu_sim_point(sim, -1, publish ? MU_SIM_POINT_PUBLISH : MU_SIM_POINT_DELETE)) || dead)
        return;
    struct io_done *payload = mu_sim_alloc(sizeof *payload);
    *payload = done;
    mu_sim_after(sim, mu_sim_delay(sim, 100), MU_SIM_NODE_COORDINATOR, io_reported, payload, 0, 0);
}

/* ---- release of what is durable ---- */

static void release(struct mu_sim *sim, struct mu_sim_output *output)
{
    sim->coord.judged_turn = output->turn;
    switch (output->kind) {
    case MU_CA_SEND:
        if (output->message->kind == MU_CM_ASSIGN) {
            struct mu_sim_session *session = mu_sim_session(sim, output->session);
            mu_sim_oracle_assigned(sim, output->message->generation, &output->message->assign, session->slot,
                                   session->worker_life);
        }
        mu_sim_net_down(sim, output->session, output->message);
        break;
    case MU_CA_CLOSE:
        mu_sim_net_close(sim, output->session);
        break;
    case MU_CA_PUBLISH:
    case MU_CA_DELETE:
    case MU_CA_SCRUB:
        mu_sim_after(sim, mu_sim_delay(sim, sim->params.io_us), MU_SIM_NODE_NONE, io_happens, output->record,
                     output->kind == MU_CA_DELETE  ? IO_DELETE
                     : output->kind == MU_CA_SCRUB ? IO_SCRUB
                     : output->probe               ? IO_PROBE
                                                   : IO_PUBLISH,
                     node(sim)->life);
        output->record = NULL;
        break;
    case MU_CA_EVENT:
        mu_sim_oracle_event(sim, output->record->event);
        break;
    case MU_CA_EXAMINE:
        break;
    case MU_CA_REPLY:
        mu_sim_client_reply(sim, output->cookie, output->status, output->existed, output->checkpoint, output->text);
        break;
    case MU_CA_PERSIST:
    case MU_CA_FORGET:
    case MU_CA_PLAN:
        break;
    }
}

/* Makes durable what the turns after durable_turn up to `turn` wrote. */
static void apply(struct mu_sim *sim, uint64_t turn)
{
    struct mu_sim_coordinator *coord = &sim->coord;
    for (struct mu_sim_output *output = coord->head; output && output->turn <= turn; output = output->next) {
        if (!output->record || (output->kind != MU_CA_PERSIST && output->kind != MU_CA_FORGET))
            continue;
        const struct mu_record *before = mu_sim_store_find(sim->store, output->record);
        coord->judged_turn = output->turn;
        if (output->kind == MU_CA_PERSIST) {
            mu_sim_oracle_durable(sim, output->record, before);
            mu_sim_store_put(sim->store, output->record);
            output->record = NULL;
        } else {
            mu_sim_store_forget(sim->store, output->record);
            free(output->record);
            output->record = NULL;
        }
    }
    coord->durable_turn = turn;
}

static struct mu_sim_output *pop_released(struct mu_sim_coordinator *coord)
{
    struct mu_sim_output *output = coord->head;
    bool record = output && (output->kind == MU_CA_PERSIST || output->kind == MU_CA_FORGET);
    if (!output || (record && output->turn > coord->durable_turn))
        return NULL;
    coord->head = output->next;
    if (!coord->head)
        coord->tail = NULL;
    return output;
}

/* `limit`: most sends before a crash. */
static void release_durable(struct mu_sim *sim, uint64_t limit)
{
    struct mu_sim_output *output;
    while (limit-- > 0 && (output = pop_released(&sim->coord)) != NULL) {
        release(sim, output);
        free_output(output);
    }
}

enum sync_crash { SYNC_FINE, SYNC_CRASH_BEFORE, SYNC_CRASH_AFTER, SYNC_CRASH_HALF_SENT, SYNC_CRASH_KINDS };

static void synced(struct mu_sim *sim, struct mu_sim_event *event)
{
    struct mu_sim_coordinator *coord = &sim->coord;
    coord->syncing = false;
    apply(sim, event->a);
    if (event->b == SYNC_CRASH_AFTER || event->b == SYNC_CRASH_HALF_SENT) {
        if (event->b == SYNC_CRASH_HALF_SENT)
            release_durable(sim, mu_sim_below(sim, 6));
        mu_sim_trace(sim, "coord crashes after sync %" PRIu64, coord->syncs);
        mu_sim_coord_kill(sim, false);
        return;
    }
    pump(sim);
}

static enum sync_crash choose_crash(struct mu_sim *sim)
{
    bool now = sim->params.sync_crash_at == sim->coord.syncs;
    if (!now && (sim->faults_over || !mu_sim_chance(sim, sim->params.sync_crash_ppm)))
        return SYNC_FINE;
    return (enum sync_crash)mu_sim_between(sim, SYNC_CRASH_BEFORE, SYNC_CRASH_KINDS - 1);
}

static void pump(struct mu_sim *sim)
{
    struct mu_sim_coordinator *coord = &sim->coord;
    release_durable(sim, UINT64_MAX);
    if (!coord->head || coord->syncing)
        return;
    coord->syncs++;
    enum sync_crash crash = choose_crash(sim);
    if (crash == SYNC_CRASH_BEFORE) {
        mu_sim_trace(sim, "coord crashes before sync %" PRIu64, coord->syncs);
        mu_sim_coord_kill(sim, false);
        return;
    }
    coord->syncing = true;
    coord->sync_turn = coord->turn;
    uint64_t delay_us = mu_sim_delay(sim, sim->params.sync_us);
    if (!sim->faults_over && mu_sim_chance(sim, sim->params.slow_sync_ppm))
        delay_us += mu_sim_below(sim, 2 * MU_SIM_S);
    mu_sim_after(sim, delay_us, MU_SIM_NODE_COORDINATOR, synced, NULL, coord->turn, crash);
}

/* ---- the sink ---- */

/* FORGET sets only the key. */
static struct mu_record *copy_key(const struct mu_record *record)
{
    struct mu_record key = *record;
    struct mu_generation_record generation;
    struct mu_checkpoint_record checkpoint;
    if (record->kind == MU_RECORD_GENERATION) {
        generation = *record->generation;
        generation.world = 0;
        generation.members = NULL;
        key.generation = &generation;
    }
    if (record->kind == MU_RECORD_CHECKPOINT) {
        checkpoint = *record->checkpoint;
        checkpoint.piece_count = 0;
        checkpoint.pieces = NULL;
        checkpoint.holder_count = 0;
        checkpoint.holders = NULL;
        key.checkpoint = &checkpoint;
    }
    return mu_sim_copy_record(&key);
}

static void fill_output(struct mu_sim_output *output, const struct mu_coord_action *action)
{
    switch (action->kind) {
    case MU_CA_SEND:
        output->session = action->send.session;
        output->message = mu_sim_copy_coord_message(action->send.message);
        break;
    case MU_CA_CLOSE:
        output->session = action->close.session;
        break;
    case MU_CA_PERSIST:
        output->record = mu_sim_copy_record(&action->record);
        break;
    case MU_CA_FORGET:
        output->record = copy_key(&action->record);
        break;
    case MU_CA_PUBLISH:
    case MU_CA_DELETE:
    case MU_CA_SCRUB:
        output->record = mu_sim_copy_record(
            &(struct mu_record){.kind = MU_RECORD_CHECKPOINT, .checkpoint = action->checkpoint_io.checkpoint});
        output->probe = action->checkpoint_io.probe;
        break;
    case MU_CA_EVENT:
        output->record = mu_sim_copy_record(&(struct mu_record){.kind = MU_RECORD_EVENT, .event = action->event});
        break;
    case MU_CA_EXAMINE:
        break;
    case MU_CA_REPLY:
        output->cookie = action->reply.cookie;
        output->status = action->reply.status;
        output->existed = action->reply.existed;
        output->checkpoint = action->reply.checkpoint;
        snprintf(output->text, sizeof output->text, "%s", action->reply.text ? action->reply.text : "");
        break;
    case MU_CA_PLAN:
        break;
    }
}

static void emit(void *ctx, const struct mu_coord_action *action)
{
    struct mu_sim *sim = ctx;
    struct mu_sim_coordinator *coord = &sim->coord;
    mu_sim_slow_said(sim, action);
    if (action->kind == MU_CA_PLAN) {
        mu_sim_after(sim, mu_sim_delay(sim, 2 * MU_SIM_MS), MU_SIM_NODE_COORDINATOR, planned,
                     mu_sim_copy_plan_input(action->plan.input), action->plan.ticket, 0);
        return;
    }
    struct mu_sim_output *output = mu_sim_alloc(sizeof *output);
    output->kind = action->kind;
    output->turn = coord->turn;
    fill_output(output, action);
    if (MU_MUTANT(MU_MUT_SKIP_DURABILITY_WAIT) && output->kind != MU_CA_PERSIST && output->kind != MU_CA_FORGET) {
        release(sim, output);
        free_output(output);
        return;
    }
    if (coord->tail)
        coord->tail->next = output;
    else
        coord->head = output;
    coord->tail = output;
}

static void fill_times(struct mu_sim *sim, struct mu_coord_event *event)
{
    event->now_us = mu_sim_mono(sim, MU_SIM_NODE_COORDINATOR);
    event->wall_us = 1700000000 * MU_SIM_S + sim->now_us + (uint64_t)sim->coord.wall_jump_us;
    event->random = mu_sim_id(sim);
}

static void after_step(struct mu_sim *sim)
{
    if (sim->coord.turn % 8 == 0)
        mu_sim_oracle_views(sim);
    schedule_tick(sim);
    pump(sim);
}

static const char *coord_event_name(const struct mu_coord_event *event)
{
    static const char *const names[] = {"TICK",     "MESSAGE", "DISCONNECTED", "PLANNED", "PUBLISHED", "DELETED",
                                        "SCRUBBED", "SUBMIT",  "CANCEL",       "DRAIN",   "UNDRAIN",   "CHECKPOINT",
                                        "SCALE",    "AMEND",   "BRANCH",       "NODE",    "EXITED"};
    return names[event->kind];
}

static void trace_event(struct mu_sim *sim, const struct mu_coord_event *event)
{
    static const char *const kinds[] = {"HELLO", "HEARTBEAT", "STATUS", "STEP", "PIECE", "EVAL", "GOODBYE"};
    if (!sim->trace || event->kind == MU_CE_TICK)
        return;
    if (event->kind != MU_CE_MESSAGE) {
        mu_sim_trace(sim, "coord < %s", coord_event_name(event));
        return;
    }
    const struct mu_worker_message *m = event->message.message;
    struct mu_sim_session *session = mu_sim_session(sim, event->message.session);
    if (m->kind == MU_WM_HEARTBEAT || m->kind == MU_WM_STEP)
        return;
    const struct mu_worker_status *status = m->kind == MU_WM_HELLO ? &m->hello.status : &m->status;
    if (m->kind == MU_WM_HELLO || m->kind == MU_WM_STATUS)
        mu_sim_trace(sim,
                     "coord < w%u s%" PRIu64 " %s phase %d gen %" PRIu64 " rank %u shares %u%s step %" PRIu64
                     " grad %d result %d reason %d cmd %" PRIu64 " %s",
                     session->slot, event->message.session, kinds[m->kind], (int)status->phase, status->generation,
                     status->rank, status->held.share_count, status->held.shares[0].owned_only ? " own" : "",
                     status->held.step, status->held.has_gradient, status->held.has_result, (int)status->park_reason,
                     status->command_executed, status->text);
    else
        mu_sim_trace(sim, "coord < w%u %s gen %" PRIu64, session->slot, kinds[m->kind], m->generation);
}

void mu_sim_coord_event(struct mu_sim *sim, struct mu_coord_event *event)
{
    struct mu_sim_coordinator *coord = &sim->coord;
    if (!node(sim)->alive)
        return;
    fill_times(sim, event);
    trace_event(sim, event);
    coord->turn++;
    struct mu_sim_present *before = event->kind == MU_CE_EXITED ? mu_sim_oracle_before_exit(sim) : NULL;
    mu_coord_step(coord->core, event, &(struct mu_coord_sink){emit, sim});
    if (before)
        mu_sim_oracle_after_exit(sim, before, &event->exited.exit);
    after_step(sim);
}

/* ---- time ---- */

static void tick(struct mu_sim *sim, struct mu_sim_event *event)
{
    struct mu_sim_node *n = node(sim);
    if (event->b != n->tick_version)
        return; /* an earlier one has been scheduled since */
    n->tick_at_us = MU_SIM_NEVER;
    if (n->draining_backlog) { /* leases are judged when the queue is empty */
        n->tick_at_us = sim->now_us;
        mu_sim_at(sim, sim->now_us, MU_SIM_NODE_COORDINATOR, tick, NULL, 0, ++n->tick_version);
        return;
    }
    if (mu_coord_next_deadline(sim->coord.core) > mu_sim_mono(sim, MU_SIM_NODE_COORDINATOR)) {
        schedule_tick(sim);
        return;
    }
    mu_sim_coord_event(sim, &(struct mu_coord_event){.kind = MU_CE_TICK});
}

static void schedule_tick(struct mu_sim *sim)
{
    struct mu_sim_node *n = node(sim);
    uint64_t at_us = mu_sim_true_time(sim, MU_SIM_NODE_COORDINATOR, mu_coord_next_deadline(sim->coord.core));
    if (at_us >= n->tick_at_us)
        return;
    n->tick_at_us = at_us;
    mu_sim_at(sim, at_us, MU_SIM_NODE_COORDINATOR, tick, NULL, 0, ++n->tick_version);
}

void mu_sim_coord_tick_first(struct mu_sim *sim)
{
    if (node(sim)->alive && mu_coord_next_deadline(sim->coord.core) <= mu_sim_mono(sim, MU_SIM_NODE_COORDINATOR))
        mu_sim_coord_event(sim, &(struct mu_coord_event){.kind = MU_CE_TICK});
}

/* ---- life and death ---- */

void mu_sim_coord_start(struct mu_sim *sim)
{
    struct mu_sim_coordinator *coord = &sim->coord;
    struct mu_error err = {0};
    mu_sim_node_start(sim, MU_SIM_NODE_COORDINATOR);
    coord->core = mu_coord_new(&sim->coord_config);
    coord->syncing = false;
    coord->durable_turn = coord->turn;
    coord->starts++;
    sim->stats.coordinator_starts++;
    uint32_t count = mu_sim_store_count(sim->store);
    uint32_t first = (uint32_t)mu_sim_below(sim, count);
    mu_sim_trace(sim, "coord starts, %u records", count);
    for (uint32_t i = 0; i < 2 * count; i++) { /* jobs first, then the rest in any order */
        const struct mu_record *record = mu_sim_store_at(sim->store, (first + i) % count);
        if ((record->kind == MU_RECORD_JOB) == (i < count) && mu_coord_restore(coord->core, record, &err) != MU_OK)
            mu_sim_violate(sim, "the coordinator cannot restore its own records: %s", err.text);
    }
    struct mu_coord_event now = {0};
    fill_times(sim, &now);
    mu_sim_slow_restart(sim);
    coord->turn++;
    mu_coord_start(coord->core, now.now_us, now.wall_us, &(struct mu_coord_sink){emit, sim});
    after_step(sim);
}

static void clear_outputs(struct mu_sim_coordinator *coord)
{
    while (coord->head) {
        struct mu_sim_output *output = coord->head;
        coord->head = output->next;
        free_output(output);
    }
    coord->tail = NULL;
}

static void restart(struct mu_sim *sim, struct mu_sim_event *event)
{
    (void)event;
    if (!node(sim)->alive)
        mu_sim_coord_start(sim);
}

void mu_sim_coord_restart_later(struct mu_sim *sim)
{
    if (!node(sim)->alive)
        mu_sim_after(sim, mu_sim_delay(sim, mu_sim_between(sim, 100 * MU_SIM_MS, 3 * MU_SIM_S)), MU_SIM_NODE_NONE,
                     restart, NULL, 0, 0);
}

void mu_sim_coord_kill(struct mu_sim *sim, bool vanished)
{
    struct mu_sim_coordinator *coord = &sim->coord;
    if (!node(sim)->alive)
        return;
    mu_sim_trace(sim, "coord killed%s", vanished ? " with its host" : "");
    if (coord->syncing) /* part of what was being written may have reached the disk */
        apply(sim, mu_sim_between(sim, coord->durable_turn, coord->sync_turn));
    clear_outputs(coord);
    mu_sim_net_coordinator_died(sim, vanished);
    mu_sim_node_end(sim, MU_SIM_NODE_COORDINATOR);
    mu_coord_free(coord->core);
    coord->core = NULL;
    mu_sim_coord_restart_later(sim);
}

void mu_sim_coord_fini(struct mu_sim *sim)
{
    clear_outputs(&sim->coord);
    mu_coord_free(sim->coord.core);
}
