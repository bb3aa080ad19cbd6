/* Makes things go wrong while the history lasts, then stops, repairs everything and waits for the end. */
#include <inttypes.h>

#include "tests/sim/sim.h"

static int32_t node_of(uint32_t slot)
{
    return MU_SIM_NODE_WORKER + (int32_t)slot;
}

const char *mu_sim_fault_name(enum mu_sim_fault fault)
{
    static const char *const names[] = {"kill-worker", "kill-two",    "kill-all",    "stop-worker", "term-worker",
                                        "add-worker",  "hang-engine", "lose-stream", "half-open",   "cut-stream",
                                        "cut-link",    "reset-link",  "kill-coord",  "pause-coord", "jump-wall",
                                        "drain",       "checkpoint",  "full-disk",   "corrupt",     "cancel",
                                        "kill-stage",  "drain-stage", "lose-disk",   "poison",      "change-speed"};
    return names[fault];
}

const char *mu_sim_point_name(enum mu_sim_point point)
{
    static const char *const names[] = {"assign",      "transfer",   "prepared",  "run",      "forward", "exchange",
                                        "before-vote", "after-vote", "optimizer", "boundary", "parked",  "snapshot",
                                        "piece",       "feed",       "publish",   "delete"};
    return names[point];
}

/* A living worker; UINT32_MAX when there is none. */
static uint32_t pick(struct mu_sim *sim)
{
    uint32_t first = (uint32_t)mu_sim_below(sim, sim->params.slots);
    for (uint32_t i = 0; i < sim->params.slots; i++) {
        uint32_t slot = (first + i) % sim->params.slots;
        if (mu_sim_worker_alive(sim, slot))
            return slot;
    }
    return UINT32_MAX;
}

static bool vanishes(struct mu_sim *sim)
{
    return sim->params.hosts_vanish && mu_sim_below(sim, 3) == 0;
}

/* ---- at named points ---- */

static void kill_worker(struct mu_sim *sim, struct mu_sim_event *event)
{
    if (sim->nodes[node_of((uint32_t)event->a)].life == event->b)
        mu_sim_worker_kill(sim, (uint32_t)event->a, vanishes(sim));
}

static void kill_coord(struct mu_sim *sim, struct mu_sim_event *event)
{
    (void)event;
    mu_sim_coord_kill(sim, vanishes(sim));
}

bool mu_sim_point(struct mu_sim *sim, int32_t slot, enum mu_sim_point point)
{
    if (sim->faults_over || sim->now_us < sim->params.faults_start_us)
        return false;
    uint32_t preparing = point <= MU_SIM_POINT_RUN;
    if (mu_sim_chance(sim, sim->params.point_coord_ppm + preparing * sim->params.prepare_coord_ppm)) {
        sim->stats.points[point]++;
        mu_sim_trace(sim, "fault coordinator dies at point %s of w%d", mu_sim_point_name(point), slot);
        mu_sim_after(sim, 0, MU_SIM_NODE_NONE, kill_coord, NULL, 0, 0);
        return slot < 0;
    }
    uint32_t ppm = sim->params.point_kill_ppm + preparing * sim->params.prepare_kill_ppm;
    if (slot < 0 || !mu_sim_chance(sim, ppm))
        return false;
    sim->stats.points[point]++;
    uint32_t victim = (uint32_t)slot;
    if (mu_sim_below(sim, 3) == 0)
        victim = pick(sim);
    mu_sim_trace(sim, "fault w%u dies at point %s of w%d", victim, mu_sim_point_name(point), slot);
    mu_sim_after(sim, 0, MU_SIM_NODE_NONE, kill_worker, NULL, victim, sim->nodes[node_of(victim)].life);
    return victim == (uint32_t)slot;
}

/* ---- one fault ---- */

static void resume(struct mu_sim *sim, struct mu_sim_event *event)
{
    int32_t node = (int32_t)event->a;
    if (sim->nodes[node].life == event->b) {
        mu_sim_trace(sim, "fault node %d goes on", (int)node);
        /* What waits in the sockets may come up to the shell only after its timer. */
        if (node == MU_SIM_NODE_COORDINATOR && mu_sim_below(sim, 2))
            mu_sim_coord_tick_first(sim);
        mu_sim_node_continue(sim, node);
    }
}

static void stop(struct mu_sim *sim, int32_t node, uint64_t duration_us)
{
    if (!sim->nodes[node].alive || sim->nodes[node].stopped)
        return;
    mu_sim_node_stop(sim, node);
    mu_sim_after(sim, duration_us, MU_SIM_NODE_NONE, resume, NULL, (uint64_t)node, sim->nodes[node].life);
}

static void unhang(struct mu_sim *sim, struct mu_sim_event *event)
{
    uint32_t slot = (uint32_t)event->a;
    if (sim->nodes[node_of(slot)].life != event->b || !sim->workers[slot].engine.hung)
        return;
    sim->workers[slot].engine.hung = false;
    mu_sim_engine_pump_prepare(sim, slot);
    mu_sim_engine_pump(sim, slot);
}

/* Short ones often, long ones now and then. */
static uint64_t outage(struct mu_sim *sim)
{
    return mu_sim_below(sim, 3) ? mu_sim_between(sim, 50 * MU_SIM_MS, 3 * MU_SIM_S)
                                : mu_sim_between(sim, 3 * MU_SIM_S, 20 * MU_SIM_S);
}

static void cut(struct mu_sim *sim, int32_t a, int32_t b)
{
    uint64_t duration_us = outage(sim);
    uint64_t ways = mu_sim_below(sim, 4); /* 0, 1: both */
    mu_sim_trace(sim, "fault partition %d - %d, ways %d, %.1f s", (int)a, (int)b, (int)ways, (double)duration_us / 1e6);
    if (ways != 2)
        mu_sim_net_cut(sim, a, b, duration_us);
    if (ways != 3)
        mu_sim_net_cut(sim, b, a, duration_us);
}

static void kill_all(struct mu_sim *sim)
{
    for (uint32_t slot = 0; slot < sim->params.slots; slot++)
        mu_sim_worker_kill(sim, slot, false);
    if (mu_sim_below(sim, 2))
        mu_sim_coord_kill(sim, false);
}

/* Nothing else may be lost in this history. (What was on one host only, because no other was there, is gone.) */
static void one_copy_left(struct mu_sim *sim)
{
    sim->disk_lost = true;
    if (!mu_sim_oracle_all_whole(sim))
        mu_sim_oracle_damaged(sim);
}

static void corrupt(struct mu_sim *sim)
{
    if (!sim->files.count)
        return;
    struct mu_sim_directory *directory =
        &sim->files.directories[mu_sim_below(sim, 2) ? sim->files.count - 1 : mu_sim_below(sim, sim->files.count)];
    if (!directory->piece_count || !mu_sim_oracle_lists(sim, directory->path))
        return;
    mu_sim_trace(sim, "fault a bit flips in %s", directory->path);
    if (sim->disk_lost) /* the other copy may be gone */
        return;
    directory->pieces[mu_sim_below(sim, directory->piece_count)].corrupt = true;
    if (sim->params.local)
        one_copy_left(sim);
    else
        mu_sim_oracle_damaged(sim);
    kill_all(sim);
}

/* Its checksums were made of what is in it: moments, and in half of the cases the parameters, too. */
static void poison(struct mu_sim *sim)
{
    struct mu_sim_directory *directory = mu_sim_oracle_to_poison(sim);
    if (!directory)
        return;
    mu_sim_trace(sim, "fault what is in %s is not finite", directory->path);
    bool params = mu_sim_below(sim, 2);
    for (uint32_t i = 0; i < directory->piece_count; i++) {
        struct mu_sim_state *state = &directory->pieces[i].state;
        for (uint32_t c = 0; c < MU_SIM_CHUNKS_MAX; c++) {
            if (state->has.moments >> c & 1)
                state->values.moments[c] = MU_SIM_NAN;
            if (params && state->has.params >> c & 1)
                state->values.params[c] = MU_SIM_NAN;
        }
    }
    kill_all(sim);
}

static void lose_disk(struct mu_sim *sim)
{
    uint32_t slot = pick(sim);
    if (slot == UINT32_MAX || sim->disk_lost)
        return;
    mu_sim_local_lose_disk(sim, sim->workers[slot].host);
    one_copy_left(sim);
    if (mu_sim_below(sim, 2))
        kill_all(sim);
}

static void add_worker(struct mu_sim *sim)
{
    for (uint32_t slot = 0; slot < sim->params.slots; slot++) {
        if (!mu_sim_worker_alive(sim, slot) && !sim->workers[slot].restart_planned) {
            /* The first worker's identity binds the job: it must be one of us. */
            sim->workers[slot].stranger =
                sim->params.strangers && sim->stats.generations > 0 && mu_sim_below(sim, 4) == 0;
            mu_sim_worker_start(sim, slot);
            return;
        }
    }
}

/* Everybody who holds what a living worker holds: in its generation, of its stage. */
static void on_stage(struct mu_sim *sim, enum mu_sim_fault fault)
{
    uint32_t first = pick(sim);
    const struct mu_sim_engine *chosen = first == UINT32_MAX ? NULL : &sim->workers[first].engine;
    if (!chosen || !chosen->working)
        return;
    uint64_t generation = chosen->generation;
    uint32_t stage = chosen->at.p;
    for (uint32_t slot = 0; slot < sim->params.slots; slot++) {
        const struct mu_sim_engine *engine = &sim->workers[slot].engine;
        if (!mu_sim_worker_alive(sim, slot) || !engine->working || engine->generation != generation ||
            engine->at.p != stage)
            continue;
        if (fault == MU_SIM_FAULT_KILL_STAGE)
            mu_sim_worker_kill(sim, slot, vanishes(sim));
        else if (mu_sim_below(sim, 2))
            mu_sim_worker_terminate(sim, slot);
        else
            mu_sim_client_drain(sim, mu_worker_name(sim->workers[slot].core));
    }
}

static void change_speed(struct mu_sim *sim, struct mu_sim_worker *worker)
{
    bool was_slow = worker->speed_percent > 160;
    worker->speed_percent = was_slow ? worker->speed_percent / 3 : worker->speed_percent * 3;
    worker->was_slow = true;
    worker->speed_changed_us = sim->now_us;
}

static void on_worker(struct mu_sim *sim, enum mu_sim_fault fault)
{
    uint32_t slot = pick(sim);
    if (slot == UINT32_MAX)
        return;
    int32_t node = node_of(slot);
    uint64_t session = sim->workers[slot].session;
    switch (fault) {
    case MU_SIM_FAULT_KILL_TWO:
    case MU_SIM_FAULT_KILL_WORKER:
        mu_sim_worker_kill(sim, slot, vanishes(sim));
        if (fault == MU_SIM_FAULT_KILL_TWO && (slot = pick(sim)) != UINT32_MAX)
            mu_sim_worker_kill(sim, slot, vanishes(sim));
        break;
    case MU_SIM_FAULT_STOP_WORKER:
        stop(sim, node, outage(sim));
        break;
    case MU_SIM_FAULT_TERM_WORKER:
        mu_sim_worker_terminate(sim, slot);
        break;
    case MU_SIM_FAULT_HANG_ENGINE:
        sim->workers[slot].engine.hung = sim->workers[slot].engine.was_hung = true;
        mu_sim_after(sim, mu_sim_between(sim, 5 * MU_SIM_S, 60 * MU_SIM_S), MU_SIM_NODE_NONE, unhang, NULL, slot,
                     sim->nodes[node].life);
        break;
    case MU_SIM_FAULT_LOSE_STREAM:
        mu_sim_net_lose(sim, session, MU_SIM_LOSS_PROMPT);
        break;
    case MU_SIM_FAULT_HALF_OPEN:
        mu_sim_net_lose(sim, session, mu_sim_below(sim, 2) ? MU_SIM_LOSS_COORD_BLIND : MU_SIM_LOSS_WORKER_LATE);
        break;
    case MU_SIM_FAULT_CUT_STREAM:
        cut(sim, node, MU_SIM_NODE_COORDINATOR);
        break;
    case MU_SIM_FAULT_CUT_LINK: {
        uint32_t other = pick(sim);
        if (other != slot)
            cut(sim, node, node_of(other));
        break;
    }
    case MU_SIM_FAULT_RESET_LINK:
        (void)mu_sim_engine_reset_link(sim, slot);
        break;
    case MU_SIM_FAULT_DRAIN:
        mu_sim_client_drain(sim, mu_worker_name(sim->workers[slot].core));
        break;
    case MU_SIM_FAULT_CHANGE_SPEED:
        change_speed(sim, &sim->workers[slot]);
        break;
    case MU_SIM_FAULT_KILL_ALL:
    case MU_SIM_FAULT_ADD_WORKER:
    case MU_SIM_FAULT_KILL_COORD:
    case MU_SIM_FAULT_PAUSE_COORD:
    case MU_SIM_FAULT_JUMP_WALL:
    case MU_SIM_FAULT_CHECKPOINT:
    case MU_SIM_FAULT_FULL_DISK:
    case MU_SIM_FAULT_CORRUPT:
    case MU_SIM_FAULT_CANCEL:
    case MU_SIM_FAULT_KILL_STAGE:
    case MU_SIM_FAULT_DRAIN_STAGE:
    case MU_SIM_FAULT_LOSE_DISK:
    case MU_SIM_FAULT_POISON:
    case MU_SIM_FAULT_COUNT:
        break;
    }
}

static void do_fault(struct mu_sim *sim, enum mu_sim_fault fault)
{
    mu_sim_trace(sim, "fault %s", mu_sim_fault_name(fault));
    sim->stats.faults[fault]++;
    switch (fault) {
    case MU_SIM_FAULT_KILL_ALL:
        kill_all(sim);
        break;
    case MU_SIM_FAULT_ADD_WORKER:
        add_worker(sim);
        break;
    case MU_SIM_FAULT_KILL_COORD:
        mu_sim_coord_kill(sim, vanishes(sim));
        break;
    case MU_SIM_FAULT_PAUSE_COORD:
        stop(sim, MU_SIM_NODE_COORDINATOR, outage(sim));
        break;
    case MU_SIM_FAULT_JUMP_WALL:
        sim->coord.wall_jump_us += (int64_t)mu_sim_below(sim, 7200 * MU_SIM_S) - (int64_t)(3600 * MU_SIM_S);
        break;
    case MU_SIM_FAULT_CHECKPOINT:
        mu_sim_client_checkpoint(sim);
        break;
    case MU_SIM_FAULT_FULL_DISK:
        sim->files.full_until_us = sim->now_us + outage(sim);
        break;
    case MU_SIM_FAULT_CORRUPT:
        corrupt(sim);
        break;
    case MU_SIM_FAULT_CANCEL:
        mu_sim_client_cancel(sim);
        break;
    case MU_SIM_FAULT_KILL_STAGE:
    case MU_SIM_FAULT_DRAIN_STAGE:
        on_stage(sim, fault);
        break;
    case MU_SIM_FAULT_LOSE_DISK:
        lose_disk(sim);
        break;
    case MU_SIM_FAULT_POISON:
        poison(sim);
        break;
    case MU_SIM_FAULT_KILL_WORKER:
    case MU_SIM_FAULT_KILL_TWO:
    case MU_SIM_FAULT_STOP_WORKER:
    case MU_SIM_FAULT_TERM_WORKER:
    case MU_SIM_FAULT_HANG_ENGINE:
    case MU_SIM_FAULT_LOSE_STREAM:
    case MU_SIM_FAULT_HALF_OPEN:
    case MU_SIM_FAULT_CUT_STREAM:
    case MU_SIM_FAULT_CUT_LINK:
    case MU_SIM_FAULT_RESET_LINK:
    case MU_SIM_FAULT_DRAIN:
    case MU_SIM_FAULT_CHANGE_SPEED:
        on_worker(sim, fault);
        break;
    case MU_SIM_FAULT_COUNT:
        break;
    }
}

/* ---- the schedule ---- */

static void next_fault(struct mu_sim *sim, struct mu_sim_event *event)
{
    (void)event;
    uint64_t total = 0;
    if (sim->faults_over)
        return;
    for (int fault = 0; fault < MU_SIM_FAULT_COUNT; fault++)
        total += sim->params.weight[fault];
    uint64_t draw = mu_sim_below(sim, total);
    for (int fault = 0; total && fault < MU_SIM_FAULT_COUNT; fault++) {
        if (draw < sim->params.weight[fault]) {
            do_fault(sim, (enum mu_sim_fault)fault);
            break;
        }
        draw -= sim->params.weight[fault];
    }
    if (sim->params.one_fault)
        return;
    /* Bursts: half of the faults follow closely upon another one, into its recovery. */
    uint64_t mean_us = sim->params.fault_mean_us;
    uint64_t pause_us = mu_sim_below(sim, 2) ? mu_sim_below(sim, mean_us / 10 + 1) : mu_sim_below(sim, 3 * mean_us);
    mu_sim_after(sim, pause_us, MU_SIM_NODE_NONE, next_fault, NULL, 0, 0);
}

/* As an operator and a supervisor would: everything that is down and wanted is started; who was told to leave and
 * cannot (there are too few others to take over what it holds) is killed in the end. */
static void repair(struct mu_sim *sim)
{
    enum { STOP_LIMIT_US = 90000000 };
    uint32_t alive = 0;
    mu_sim_coord_restart_later(sim);
    for (uint32_t slot = 0; slot < sim->params.slots; slot++) {
        if (sim->workers[slot].leaving && sim->now_us > sim->workers[slot].leaving_us + STOP_LIMIT_US)
            mu_sim_worker_kill(sim, slot, false);
    }
    for (uint32_t slot = 0; slot < sim->params.slots; slot++)
        alive += (mu_sim_worker_alive(sim, slot) && !sim->workers[slot].leaving) || sim->workers[slot].restart_planned;
    uint32_t wanted =
        sim->params.local ? sim->params.slots : sim->params.workers; /* disks come back with their hosts */
    for (uint32_t slot = 0; slot < sim->params.slots && alive < wanted; slot++) {
        if (!mu_sim_worker_alive(sim, slot) && !sim->workers[slot].restart_planned) {
            sim->workers[slot].stranger = false;
            mu_sim_worker_restart_later(sim, slot);
            alive++;
        }
    }
}

static void end_faults(struct mu_sim *sim, struct mu_sim_event *event)
{
    (void)event;
    if (sim->faults_over)
        return;
    mu_sim_trace(sim, "faults end");
    sim->faults_over = true;
    sim->files.full_until_us = 0;
    mu_sim_net_heal(sim);
    for (uint32_t i = 0; i < 1 + sim->params.slots; i++)
        mu_sim_node_continue(sim, (int32_t)i);
    mu_sim_client_undrain_all(sim);
}

/* Ends the history when there is nothing left to happen. */
static void watch(struct mu_sim *sim, struct mu_sim_event *event)
{
    bool over = mu_sim_oracle_job_over(sim), busy = !mu_sim_coord_up(sim);
    if (over && !sim->faults_over)
        end_faults(sim, event);
    for (uint32_t slot = 0; slot < sim->params.slots; slot++)
        busy = busy || mu_sim_worker_alive(sim, slot) || sim->workers[slot].restart_planned;
    if (over && !busy)
        sim->finished = true;
    if (sim->faults_over && !over)
        repair(sim);
    if (sim->faults_over && !over && sim->now_us / MU_SIM_S % 5 == 0) /* losses of the last faults are judged late */
        mu_sim_client_undrain_all(sim);
    if (sim->faults_over)
        mu_sim_coord_restart_later(sim);
    mu_sim_after(sim, MU_SIM_S, MU_SIM_NODE_NONE, watch, NULL, 0, 0);
}

void mu_sim_faults_init(struct mu_sim *sim)
{
    if (sim->params.fault_mean_us)
        mu_sim_at(sim, sim->params.faults_start_us + mu_sim_below(sim, sim->params.fault_mean_us), MU_SIM_NODE_NONE,
                  next_fault, NULL, 0, 0);
    mu_sim_at(sim, sim->params.faults_end_us, MU_SIM_NODE_NONE, end_faults, NULL, 0, 0);
    mu_sim_at(sim, MU_SIM_S, MU_SIM_NODE_NONE, watch, NULL, 0, 0);
}
