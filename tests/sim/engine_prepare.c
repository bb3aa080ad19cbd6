/* Hash engine, preparing a generation: connect to the neighbours (the higher rank dials, both prove the secret), bring
 * the state of the start step to hand (held, rolled forward, copied from a neighbour, loaded, initialised), serve those
 * that copy from here.
 *
 * What is held stays as it is until the new state is complete. */
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

#define REDIAL_US     (40 * MU_SIM_MS)
#define OPEN_LIMIT_US (6 * MU_SIM_S) /* not connected by then */

static struct mu_sim_engine *engine_of(struct mu_sim *sim, uint32_t slot)
{
    return &sim->workers[slot].engine;
}

static int32_t node_of(uint32_t slot)
{
    return MU_SIM_NODE_WORKER + (int32_t)slot;
}

static void later(struct mu_sim *sim, uint32_t slot, uint64_t delay_us, mu_sim_fire fire)
{
    mu_sim_after(sim, delay_us, node_of(slot), fire, NULL, slot, engine_of(sim, slot)->epoch);
}

static bool stale(struct mu_sim *sim, struct mu_sim_event *event)
{
    struct mu_sim_engine *engine = engine_of(sim, (uint32_t)event->a);
    return event->b != engine->epoch || engine->phase != MU_SIM_PREPARING;
}

/* ---- connecting ---- */

static void dial(struct mu_sim *sim, uint32_t slot, struct mu_sim_link_end *end)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    if (end->id == 0)
        end->id = ++sim->next_link;
    struct mu_sim_frame *frame = mu_sim_frame_new(sim, slot, MU_SIM_FRAME_DIAL, 0);
    frame->link = end->id;
    memcpy(frame->secret, engine->assign->secret, sizeof frame->secret);
    mu_sim_net_frame(sim, slot, end->slot, end->life, NULL, frame);
}

static bool process_is_gone(const struct mu_sim *sim, const struct mu_sim_link_end *end)
{
    const struct mu_sim_node *node = end->slot < sim->params.slots ? &sim->nodes[node_of(end->slot)] : NULL;
    return !node || !node->alive || node->life != end->life;
}

static void connect_all(struct mu_sim *sim, struct mu_sim_event *event)
{
    uint32_t slot = (uint32_t)event->a;
    struct mu_sim_engine *engine = engine_of(sim, slot);
    if (stale(sim, event))
        return;
    uint64_t age_us = sim->now_us - engine->step_started_us;
    bool all = true;
    for (uint32_t i = 0; i < engine->link_count; i++) {
        struct mu_sim_link_end *end = &engine->links[i];
        if (end->connected)
            continue;
        all = false;
        bool refused = end->rank < engine->rank && process_is_gone(sim, end) && !sim->params.hosts_vanish;
        if (refused || age_us > OPEN_LIMIT_US) {
            mu_sim_engine_park(sim, slot, MU_PARK_PEER, end->rank,
                               refused ? MU_PEER_FAILURE_RESET : MU_PEER_FAILURE_TIMEOUT, 0,
                               refused ? "connection refused" : "no connection");
            return;
        }
        if (end->rank < engine->rank)
            dial(sim, slot, end);
    }
    if (!all)
        later(sim, slot, mu_sim_delay(sim, REDIAL_US), connect_all);
}

static bool secrets_match(const struct mu_sim_engine *engine, const struct mu_sim_frame *frame)
{
    return memcmp(engine->assign->secret, frame->secret, sizeof frame->secret) == 0;
}

static void on_dial(struct mu_sim *sim, uint32_t slot, const struct mu_sim_frame *frame)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    bool open =
        engine->phase == MU_SIM_PREPARING && engine->generation == frame->generation && secrets_match(engine, frame);
    struct mu_sim_link_end *end = open ? mu_sim_engine_link(engine, frame->from_rank) : NULL;
    if (!end || end->dead || end->slot != frame->from_slot || process_is_gone(sim, end))
        return; /* too early, too late or a stranger: the dialler tries again or gives up */
    end->connected = true;
    end->id = frame->link;
    struct mu_sim_frame *answer = mu_sim_frame_new(sim, slot, MU_SIM_FRAME_ACCEPT, 0);
    answer->link = end->id;
    memcpy(answer->secret, engine->assign->secret, sizeof answer->secret);
    mu_sim_net_frame(sim, slot, end->slot, end->life, end, answer); /* before anything else on it */
    mu_sim_engine_pump_prepare(sim, slot);
}

static void on_accept(struct mu_sim *sim, uint32_t slot, const struct mu_sim_frame *frame)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_sim_link_end *end = engine->phase == MU_SIM_PREPARING && engine->generation == frame->generation
                                      ? mu_sim_engine_link(engine, frame->from_rank)
                                      : NULL;
    if (!end || end->id != frame->link || !secrets_match(engine, frame))
        return;
    end->connected = true;
    mu_sim_engine_pump_prepare(sim, slot);
}

/* ---- state ---- */

static void take_state(struct mu_sim *sim, uint32_t slot, uint64_t step, const uint64_t values[MU_SIM_CHUNKS],
                       const struct mu_step_result *result)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    memcpy(engine->values, values, sizeof engine->values);
    engine->held = (struct mu_held){.has_state = true, .step = step, .has_result = result != NULL};
    if (result)
        engine->held.result = *result;
    engine->has_start = true;
    mu_sim_oracle_holds(sim, slot);
    mu_sim_engine_pump_prepare(sim, slot);
}

static void on_state(struct mu_sim *sim, uint32_t slot, const struct mu_sim_frame *frame)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    if (engine->phase != MU_SIM_PREPARING || engine->has_start || engine->assign->source != MU_SOURCE_PEER ||
        engine->assign->source_rank != frame->from_rank)
        return;
    if (frame->held.step != engine->assign->start_step) {
        mu_sim_violate(sim, "worker %u copies state of step %llu for a start at %llu", slot,
                       (unsigned long long)frame->held.step, (unsigned long long)engine->assign->start_step);
        return;
    }
    take_state(sim, slot, frame->held.step, frame->values, frame->held.has_result ? &frame->held.result : NULL);
}

static void rolled_forward(struct mu_sim *sim, struct mu_sim_event *event)
{
    uint32_t slot = (uint32_t)event->a;
    struct mu_sim_engine *engine = engine_of(sim, slot);
    if (stale(sim, event))
        return;
    mu_sim_engine_apply(sim, slot, &engine->assign->roll_forward);
    engine->has_start = true;
    engine->progress++;
    mu_sim_engine_pump_prepare(sim, slot);
}

static void loaded(struct mu_sim *sim, struct mu_sim_event *event)
{
    uint32_t slot = (uint32_t)event->a;
    struct mu_sim_engine *engine = engine_of(sim, slot);
    uint64_t values[MU_SIM_CHUNKS], step = 0;
    if (stale(sim, event))
        return;
    engine->progress++;
    if (!mu_sim_files_load(sim, engine->assign->checkpoint_dir, &step, values) || step != engine->assign->start_step) {
        mu_sim_engine_park(sim, slot, MU_PARK_PREPARE, 0, MU_PEER_FAILURE_NONE, engine->assign->checkpoint,
                           "piece does not match its checksum");
        return;
    }
    take_state(sim, slot, step, values, NULL);
}

static void initialised(struct mu_sim *sim, struct mu_sim_event *event)
{
    uint64_t values[MU_SIM_CHUNKS];
    if (stale(sim, event))
        return;
    engine_of(sim, (uint32_t)event->a)->progress++;
    mu_sim_hash_initial(sim, values);
    take_state(sim, (uint32_t)event->a, 0, values, NULL);
}

static void get_state(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    switch (engine->assign->source) {
    case MU_SOURCE_HELD:
        engine->has_start = true;
        break;
    case MU_SOURCE_ROLL_FORWARD:
        later(sim, slot, 1 + mu_sim_below(sim, sim->params.optimizer_us), rolled_forward);
        break;
    case MU_SOURCE_PEER:
        break; /* it comes by itself */
    case MU_SOURCE_CHECKPOINT:
        later(sim, slot, mu_sim_delay(sim, sim->params.io_us), loaded);
        break;
    case MU_SOURCE_INIT:
        later(sim, slot, mu_sim_delay(sim, sim->params.optimizer_us), initialised);
        break;
    }
}

/* Only a state of the start step may be copied, and only to those that the plan names. */
static bool serve(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    for (uint32_t i = 0; i < engine->assign->serve_count; i++) {
        struct mu_sim_link_end *end = mu_sim_engine_link(engine, engine->assign->serve_ranks[i]);
        if (!end) {
            mu_sim_violate(sim, "rank %u is told to serve rank %u, which is not its neighbour", engine->rank,
                           engine->assign->serve_ranks[i]);
            return false;
        }
        if (end->state_sent)
            continue;
        if (!end->connected)
            return false;
        struct mu_sim_frame *frame = mu_sim_frame_new(sim, slot, MU_SIM_FRAME_STATE, 0);
        frame->held = engine->held;
        memcpy(frame->values, engine->values, sizeof frame->values);
        end->state_sent = true;
        uint64_t copied_us = sim->now_us + mu_sim_delay(sim, sim->params.io_us / 2); /* about as long as a load */
        end->last_us = copied_us > end->last_us ? copied_us : end->last_us;
        mu_sim_engine_send(sim, slot, end, frame);
        if (mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_TRANSFER))
            return false;
    }
    return true;
}

void mu_sim_engine_pump_prepare(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    if (engine->phase != MU_SIM_PREPARING || !engine->has_start || engine->hung)
        return;
    engine->progress++;
    if (!serve(sim, slot))
        return;
    for (uint32_t i = 0; i < engine->link_count; i++) {
        if (!engine->links[i].connected)
            return;
    }
    engine->epoch++;
    engine->phase = MU_SIM_PREPARED;
    mu_sim_oracle_prepared(sim, slot);
    struct mu_worker_event event = {.kind = MU_WE_PREPARED,
                                    .parked = {.generation = engine->generation, .held = engine->held}};
    mu_sim_worker_post(sim, slot, &event);
    (void)mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_PREPARED);
}

/* ---- the order ---- */

/* The connections of the generation that ran stay until Go of the next; those of one that never ran go at once. */
static void retire_links(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    if (engine->ran && !engine->old_links) {
        engine->old_links = engine->links;
        engine->old_link_count = engine->link_count;
    } else {
        mu_sim_engine_close_links(sim, slot, engine->links, engine->link_count, true);
        mu_sim_engine_free_links(engine->links, engine->link_count);
    }
    engine->links = NULL;
    engine->link_count = 0;
}

static void make_links(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    const struct mu_assign *assign = engine->assign;
    engine->links = mu_sim_alloc((assign->peer_count + 1) * sizeof *engine->links);
    engine->link_count = assign->peer_count;
    for (uint32_t i = 0; i < assign->peer_count; i++) {
        struct mu_sim_link_end *end = &engine->links[i];
        end->rank = assign->peers[i].rank;
        if (!mu_sim_worker_address(sim, assign->peers[i].address, &end->slot, &end->life))
            mu_sim_violate(sim, "rank %u is given the address '%s', which nobody reported", assign->rank,
                           assign->peers[i].address);
        if (i > 0 && end->rank <= engine->links[i - 1].rank)
            mu_sim_violate(sim, "the neighbours of rank %u are not in ascending order", assign->rank);
    }
}

void mu_sim_engine_prepare(struct mu_sim *sim, uint32_t slot, uint64_t generation, const struct mu_assign *assign)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    if (engine->phase != MU_SIM_IDLE && engine->phase != MU_SIM_PARKED)
        mu_sim_violate(sim, "worker %u is told to prepare while its engine does something else (phase %d)", slot,
                       (int)engine->phase);
    retire_links(sim, slot);
    free(engine->assign);
    engine->assign = mu_sim_copy_assign(assign, NULL, 0, &engine->assign);
    engine->generation = generation;
    engine->rank = assign->rank;
    engine->world = assign->world;
    engine->mesh = assign->mesh;
    engine->first_leaf =
        mu_plan_leaf_range(sim->params.leaves, assign->world, assign->leaf_counts, assign->rank, &engine->leaf_count);
    engine->epoch++;
    engine->phase = MU_SIM_PREPARING;
    engine->has_start = false;
    engine->ran = false;
    engine->step_started_us = sim->now_us;
    engine->progress++;
    make_links(sim, slot);
    mu_sim_oracle_prepare(sim, slot, engine->assign);
    if (sim->failed || mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_ASSIGN))
        return;
    later(sim, slot, 0, connect_all);
    get_state(sim, slot);
    mu_sim_engine_pump_prepare(sim, slot);
}

/* ---- frames of this phase ---- */

bool mu_sim_engine_prepare_frame(struct mu_sim *sim, uint32_t slot, const struct mu_sim_frame *frame)
{
    switch (frame->kind) {
    case MU_SIM_FRAME_DIAL:
        on_dial(sim, slot, frame);
        return true;
    case MU_SIM_FRAME_ACCEPT:
        on_accept(sim, slot, frame);
        return true;
    case MU_SIM_FRAME_STATE:
        on_state(sim, slot, frame);
        return true;
    case MU_SIM_FRAME_ROOTS:
    case MU_SIM_FRAME_SUM:
    case MU_SIM_FRAME_VOTE:
    case MU_SIM_FRAME_RESULT:
        break;
    }
    return false;
}
