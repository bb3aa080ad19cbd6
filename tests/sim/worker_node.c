/* Shell of a worker core: its stream, its timers, its engine, its death and rebirth. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

enum { HOP_US = 60 }; /* from one thread of a worker to the other */

static int32_t node_of(uint32_t slot)
{
    return MU_SIM_NODE_WORKER + (int32_t)slot;
}

static void schedule_tick(struct mu_sim *sim, uint32_t slot);

bool mu_sim_worker_alive(const struct mu_sim *sim, uint32_t slot)
{
    return sim->nodes[MU_SIM_NODE_WORKER + slot].alive;
}

bool mu_sim_worker_address(const struct mu_sim *sim, const char *address, uint32_t *ret_slot, uint64_t *ret_life)
{
    unsigned slot = 0;
    unsigned long long life = 0;
    if (sscanf(address, "sim:%u:%llu", &slot, &life) != 2 || slot >= sim->params.slots)
        return false;
    *ret_slot = slot;
    *ret_life = life;
    return true;
}

const char *mu_sim_worker_own_address(struct mu_sim *sim, uint32_t slot)
{
    char *text = sim->workers[slot].address;
    snprintf(text, sizeof sim->workers[slot].address, "sim:%u:%" PRIu64, slot,
             sim->nodes[MU_SIM_NODE_WORKER + slot].life);
    return text;
}

/* ---- orders to the engine, in order ---- */

struct order {
    enum mu_worker_action_kind kind;
    uint64_t generation;
    struct mu_assign *assign;
    struct mu_job_spec *spec;
    struct mu_snapshot snapshot;
    struct mu_feed_order feed;
    struct mu_amendments amendments; /* FEED */
    struct mu_probe_order probe;
};

/* Any numbers; once in a while it is something else that is to be done, or nothing is heard of it again. */
static void measure(struct mu_sim *sim, uint32_t slot, const struct mu_probe_order *probe)
{
    struct mu_worker_event event = {.kind = MU_WE_PROBED, .probed = {.number = probe->number, .kind = probe->kind}};
    struct mu_probe_report *report = &event.probed;
    if (probe->kind != 0 && mu_sim_engine_running(&sim->workers[slot].engine))
        mu_sim_violate(sim, "worker %u is to measure for a probe while it steps", slot);
    if (probe->kind == 0 || mu_sim_below(sim, 32) == 0)
        return;
    report->status = mu_sim_below(sim, 16) ? MU_OK : MU_ERR_CANCELLED;
    report->alone.flops[0] = 1e9 * (double)mu_sim_between(sim, 1, 100);
    report->pair = (struct mu_probe_pair){1e-5, 1e9 * (double)mu_sim_between(sim, 1, 100), 1e9};
    mu_sim_worker_post(sim, slot, &event);
}

static void obey(struct mu_sim *sim, struct mu_sim_event *event)
{
    const struct order *order = event->payload;
    uint32_t slot = (uint32_t)event->a;
    switch (order->kind) {
    case MU_WA_LOAD_JOB:
        mu_sim_engine_load(sim, slot, order->spec);
        break;
    case MU_WA_PREPARE:
        mu_sim_engine_prepare(sim, slot, order->generation, order->assign);
        break;
    case MU_WA_RUN:
        mu_sim_engine_run(sim, slot, order->generation);
        break;
    case MU_WA_ABORT:
        mu_sim_engine_abort(sim, slot, order->generation);
        break;
    case MU_WA_SNAPSHOT:
        mu_sim_engine_snapshot(sim, slot, order->generation, &order->snapshot);
        break;
    case MU_WA_FEED:
        mu_sim_engine_feed(sim, slot, order->generation, &order->feed, &order->amendments);
        break;
    case MU_WA_FORGET:
        mu_sim_engine_forget(sim, slot);
        break;
    case MU_WA_PROBE:
        measure(sim, slot, &order->probe);
        break;
    case MU_WA_KEEP:
    case MU_WA_CONNECT:
    case MU_WA_DISCONNECT:
    case MU_WA_SEND:
    case MU_WA_EXIT:
        break;
    }
}

/* One block: the order, then its assignment or job. */
static struct order *order_new(const struct mu_worker_action *action)
{
    struct order *order;
    if (action->kind == MU_WA_PREPARE) {
        struct mu_assign *assign;
        order = mu_sim_copy_assign(action->generation.assign, &(struct order){0}, sizeof *order, &assign);
        order->assign = assign;
    } else if (action->kind == MU_WA_LOAD_JOB) {
        order = mu_sim_alloc(sizeof *order + sizeof *order->spec);
        order->spec = (struct mu_job_spec *)(order + 1);
        *order->spec = *action->load.spec;
    } else {
        order = mu_sim_alloc(sizeof *order);
    }
    order->kind = action->kind;
    if (action->kind == MU_WA_PREPARE || action->kind == MU_WA_RUN || action->kind == MU_WA_ABORT)
        order->generation = action->generation.generation;
    if (action->kind == MU_WA_FEED) {
        order->generation = action->feed.generation;
        order->feed = *action->feed.order;
        if (order->feed.amendments)
            order->amendments = *order->feed.amendments;
        order->feed.amendments = NULL;
    }
    if (action->kind == MU_WA_SNAPSHOT) {
        order->generation = action->snapshot.generation;
        order->snapshot = action->snapshot.snapshot;
    }
    if (action->kind == MU_WA_PROBE)
        order->probe = *action->probe;
    return order;
}

struct sink {
    struct mu_sim *sim;
    uint32_t slot;
};

static void emit(void *ctx, const struct mu_worker_action *action)
{
    struct mu_sim *sim = ((struct sink *)ctx)->sim;
    uint32_t slot = ((struct sink *)ctx)->slot;
    struct mu_sim_worker *worker = &sim->workers[slot];
    switch (action->kind) {
    case MU_WA_CONNECT:
        mu_sim_net_connect(sim, slot);
        return;
    case MU_WA_DISCONNECT:
        mu_sim_net_disconnect(sim, slot);
        return;
    case MU_WA_SEND:
        mu_sim_net_up(sim, slot, action->message);
        return;
    case MU_WA_EXIT:
        mu_sim_trace(sim, "w%u   exits %d: %s", slot, action->exit.code, action->exit.text ? action->exit.text : "");
        mu_sim_oracle_drops(sim, slot, NULL, "exit");
        worker->exited = true;
        worker->exit_code = action->exit.code;
        return;
    case MU_WA_FORGET:
        mu_sim_trace(sim, "w%u   forgets", slot);
        mu_sim_oracle_drops(sim, slot, NULL, "forget");
        break;
    case MU_WA_KEEP:
        mu_sim_local_keep(sim, slot, action->keep);
        return;
    case MU_WA_LOAD_JOB:
    case MU_WA_PREPARE:
    case MU_WA_RUN:
    case MU_WA_ABORT:
    case MU_WA_SNAPSHOT:
    case MU_WA_FEED:
    case MU_WA_PROBE:
        break;
    }
    struct order *order = order_new(action);
    uint64_t at_us = sim->now_us + mu_sim_delay(sim, HOP_US);
    if (at_us <= worker->engine.last_order_us)
        at_us = worker->engine.last_order_us + 1;
    worker->engine.last_order_us = at_us;
    mu_sim_at(sim, at_us, node_of(slot), obey, order, slot, 0);
}

static void end_process(struct mu_sim *sim, uint32_t slot, bool vanished)
{
    struct mu_sim_worker *worker = &sim->workers[slot];
    struct mu_sim_engine *engine = &worker->engine;
    mu_sim_oracle_runs(sim, slot, false);
    mu_sim_oracle_died(sim, slot);
    mu_sim_engine_close_links(sim, slot, engine->links, engine->link_count, !vanished);
    mu_sim_engine_close_links(sim, slot, engine->old_links, engine->old_link_count, !vanished);
    for (uint32_t i = 0; i < MU_FEED_PARTS_MAX; i++)
        mu_sim_engine_close_links(sim, slot, &engine->feeds[i].end, 1, !vanished);
    mu_sim_net_worker_died(sim, slot, vanished);
    mu_sim_node_end(sim, node_of(slot));
    mu_sim_engine_reset(sim, slot);
    mu_worker_free(worker->core);
    worker->core = NULL;
}

static void trace_message(struct mu_sim *sim, uint32_t slot, const struct mu_coord_message *message)
{
    static const char *const names[] = {"WELCOME",  "REJECT",    "ASSIGN",  "GO",   "REVOKE", "COMMAND",
                                        "SNAPSHOT", "PIECE_ACK", "RELEASE", "FEED", "KEEP"};
    if (!sim->trace)
        return;
    if (message->kind == MU_CM_ASSIGN)
        mu_sim_trace(sim,
                     "w%u   < ASSIGN gen %" PRIu64 " rank %u of tp %u pp %u dp %u idle %u step %" PRIu64
                     " source %d, %u moves",
                     slot, message->generation, message->assign.rank, message->assign.layout.tp,
                     message->assign.layout.pp, message->assign.layout.dp, message->assign.layout.idle,
                     message->assign.start_step, (int)message->assign.source, message->assign.move_count);
    else if (message->kind == MU_CM_COMMAND)
        mu_sim_trace(sim, "w%u   < COMMAND %" PRIu64 " gen %" PRIu64 " kind %d not before %" PRIu64, slot,
                     message->command.number, message->generation, (int)message->command.kind,
                     message->command.not_before_step);
    else if (message->kind == MU_CM_REJECT)
        mu_sim_trace(sim, "w%u   < REJECT %d %s", slot, (int)message->reject.reason, message->reject.text);
    else
        mu_sim_trace(sim, "w%u   < %s gen %" PRIu64, slot, names[message->kind], message->generation);
}

void mu_sim_worker_event(struct mu_sim *sim, uint32_t slot, struct mu_worker_event *event)
{
    struct mu_sim_worker *worker = &sim->workers[slot];
    if (!mu_sim_worker_alive(sim, slot))
        return;
    event->now_us = mu_sim_mono(sim, node_of(slot));
    event->random = mu_sim_id(sim);
    if (event->kind == MU_WE_MESSAGE)
        trace_message(sim, slot, event->message);
    struct sink sink = {sim, slot};
    mu_worker_step(worker->core, event, &(struct mu_worker_sink){emit, &sink});
    if (worker->exited) {
        end_process(sim, slot, false);
        if (worker->exit_code != 0 && !worker->stranger && !sim->params.crash_limit)
            mu_sim_violate(sim, "worker %u exits with code %d although nothing is wrong with it", slot,
                           worker->exit_code);
        return;
    }
    schedule_tick(sim, slot);
}

/* ---- from the engine ---- */

static void posted(struct mu_sim *sim, struct mu_sim_event *event)
{
    mu_sim_worker_event(sim, (uint32_t)event->a, event->payload);
}

void mu_sim_worker_post(struct mu_sim *sim, uint32_t slot, const struct mu_worker_event *event)
{
    struct mu_sim_engine *engine = &sim->workers[slot].engine;
    struct mu_worker_event *copy = mu_sim_alloc(sizeof *copy);
    *copy = *event;
    uint64_t at_us = sim->now_us + mu_sim_delay(sim, HOP_US);
    if (at_us <= engine->last_post_us)
        at_us = engine->last_post_us + 1;
    engine->last_post_us = at_us;
    mu_sim_at(sim, at_us, node_of(slot), posted, copy, slot, 0);
}

/* ---- time ---- */

static void tick(struct mu_sim *sim, struct mu_sim_event *event)
{
    uint32_t slot = (uint32_t)event->a;
    struct mu_sim_node *node = &sim->nodes[node_of(slot)];
    struct mu_sim_worker *worker = &sim->workers[slot];
    if (event->b != node->tick_version)
        return;
    node->tick_at_us = MU_SIM_NEVER;
    if (mu_worker_next_deadline(worker->core) > mu_sim_mono(sim, node_of(slot))) {
        schedule_tick(sim, slot);
        return;
    }
    mu_sim_worker_event(
        sim, slot,
        &(struct mu_worker_event){.kind = MU_WE_PROGRESS,
                                  .progress = {worker->engine.progress, mu_sim_engine_waiting(&worker->engine)}});
    if (mu_sim_worker_alive(sim, slot))
        mu_sim_worker_event(sim, slot, &(struct mu_worker_event){.kind = MU_WE_TICK});
}

static void schedule_tick(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_node *node = &sim->nodes[node_of(slot)];
    uint64_t at_us = mu_sim_true_time(sim, node_of(slot), mu_worker_next_deadline(sim->workers[slot].core));
    if (at_us >= node->tick_at_us)
        return;
    node->tick_at_us = at_us;
    mu_sim_at(sim, at_us, node_of(slot), tick, NULL, slot, ++node->tick_version);
}

/* ---- life and death ---- */

void mu_sim_worker_start(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_worker *worker = &sim->workers[slot];
    struct mu_worker_config config;
    if (mu_sim_worker_alive(sim, slot))
        return;
    mu_sim_node_start(sim, node_of(slot));
    mu_sim_engine_reset(sim, slot);
    worker->exited = worker->leaving = false;
    worker->session = 0;
    mu_worker_config_init(&config);
    config.incarnation = mu_sim_id(sim);
    config.jitter_seed = mu_sim_random(sim);
    config.step_report_ms = mu_sim_below(sim, 2) ? 100 : 500;
    strcpy(config.hello.job, sim->spec.name);
    strcpy(config.hello.backend, "cpu");
    strcpy(config.hello.software_version, "sim");
    worker->host = sim->params.mixed_hosts ? slot / 2 : slot;
    snprintf(config.hello.host, sizeof config.hello.host, "h%u", worker->host);
    strcpy(config.hello.address, mu_sim_worker_own_address(sim, slot));
    if (sim->params.same_names)
        snprintf(config.hello.name, sizeof config.hello.name, "w%u", slot);
    else if (!sim->params.no_names && mu_sim_below(sim, 2))
        snprintf(config.hello.name, sizeof config.hello.name, "x%u", sim->next_name++);
    config.hello.pid = 1000 + slot;
    config.hello.threads = 1;
    config.hello.memory_bytes = sim->params.memory_bytes;
    worker->speed_percent = (uint32_t)mu_sim_between(sim, 70, 160);
    if (sim->params.slow_workers && mu_sim_below(sim, 8) < sim->params.slow_workers)
        worker->speed_percent *= 3;
    worker->was_slow = worker->speed_percent > 160;
    worker->speed_changed_us = sim->now_us;
    worker->core = mu_worker_new(&config);
    sim->stats.worker_starts++;
    mu_sim_trace(sim, "w%u   starts, name '%s'", slot, config.hello.name);
    mu_sim_worker_event(sim, slot, &(struct mu_worker_event){.kind = MU_WE_START});
}

static void restart(struct mu_sim *sim, struct mu_sim_event *event)
{
    uint32_t slot = (uint32_t)event->a;
    sim->workers[slot].restart_planned = false;
    mu_sim_worker_start(sim, slot);
}

void mu_sim_worker_restart_later(struct mu_sim *sim, uint32_t slot)
{
    if (sim->workers[slot].restart_planned || mu_sim_worker_alive(sim, slot))
        return;
    sim->workers[slot].restart_planned = true;
    uint64_t mean_us = sim->nodes[node_of(slot)].life == 0 ? 200 * MU_SIM_MS : sim->params.restart_us;
    mu_sim_after(sim, mu_sim_delay(sim, mean_us ? mean_us : MU_SIM_S), MU_SIM_NODE_NONE, restart, NULL, slot, 0);
}

void mu_sim_worker_kill(struct mu_sim *sim, uint32_t slot, bool vanished)
{
    if (!mu_sim_worker_alive(sim, slot))
        return;
    mu_sim_trace(sim, "w%u   killed%s", slot, vanished ? " with its host" : "");
    if (sim->params.supervised && !vanished)
        mu_sim_client_exited(sim, mu_worker_name(sim->workers[slot].core),
                             mu_worker_incarnation(sim->workers[slot].core));
    end_process(sim, slot, vanished);
    if (sim->params.restart_us)
        mu_sim_worker_restart_later(sim, slot);
}

void mu_sim_worker_terminate(struct mu_sim *sim, uint32_t slot)
{
    if (!mu_sim_worker_alive(sim, slot) || sim->nodes[node_of(slot)].stopped)
        return;
    mu_sim_trace(sim, "w%u   SIGTERM", slot);
    if (!sim->workers[slot].leaving)
        sim->workers[slot].leaving_us = sim->now_us;
    sim->workers[slot].leaving = true;
    mu_sim_worker_event(sim, slot, &(struct mu_worker_event){.kind = MU_WE_TERMINATE, .text = "SIGTERM"});
}

void mu_sim_worker_fini(struct mu_sim *sim)
{
    for (uint32_t slot = 0; slot < sim->params.slots; slot++) {
        mu_sim_engine_reset(sim, slot);
        mu_worker_free(sim->workers[slot].core);
    }
}
