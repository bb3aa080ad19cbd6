/* Hash engine, preparing a generation: connect to the peers (the higher rank dials, both prove the secret), bring the
 * own share of the start step to hand (held, rolled forward, loaded, initialised; the rest by moves), make the moves
 * from here, also of what came by other moves.
 *
 * Chunks of the held step join those that are held, those of another step wait apart until the share is complete. What
 * is held beyond the new share stays until Go. What came by moves before a preparation was given up is not moved again
 * if the next one starts from the same step. */
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

#define REDIAL_US     (40 * MU_SIM_MS)
#define OPEN_LIMIT_US (6 * MU_SIM_S) /* not connected by then */
#define LOAD_PAUSE_US (250 * MU_SIM_MS)
enum { LOAD_TRIES = 40 };

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

/* Chunks that are to come from this rank. */
static struct mu_sim_mask expected_from(const struct mu_sim_engine *engine, uint32_t rank)
{
    struct mu_sim_mask mask = {0, 0};
    for (uint32_t i = 0; i < engine->assign->move_count; i++) {
        const struct mu_move *move = &engine->assign->moves[i];
        if (move->from == rank && move->to == engine->rank)
            mask = mu_sim_mask_or(mask, mu_sim_move_mask(move));
    }
    return mask;
}

/* ---- connecting ---- */

/* Who moves chunks here learns which of them have come before. */
static void tell_kept(struct mu_sim *sim, uint32_t slot, struct mu_sim_link_end *end)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_sim_mask kept = expected_from(engine, end->rank);
    if (mu_sim_mask_empty(kept))
        return;
    kept.params &= engine->arrived.has.params;
    kept.moments &= engine->arrived.has.moments;
    struct mu_sim_frame *frame = mu_sim_frame_new(sim, slot, MU_SIM_FRAME_KEPT, 0, true);
    mu_sim_state_take(frame->state, &engine->arrived, kept);
    mu_sim_engine_send(sim, slot, end, frame);
}

static void dial(struct mu_sim *sim, uint32_t slot, struct mu_sim_link_end *end)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    if (end->id == 0)
        end->id = ++sim->next_link;
    struct mu_sim_frame *frame = mu_sim_frame_new(sim, slot, MU_SIM_FRAME_DIAL, 0, false);
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
    struct mu_sim_frame *answer = mu_sim_frame_new(sim, slot, MU_SIM_FRAME_ACCEPT, 0, false);
    answer->link = end->id;
    memcpy(answer->secret, engine->assign->secret, sizeof answer->secret);
    mu_sim_net_frame(sim, slot, end->slot, end->life, end, answer); /* before anything else on it */
    tell_kept(sim, slot, end);
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
    tell_kept(sim, slot, end);
    mu_sim_engine_pump_prepare(sim, slot);
}

/* ---- state ---- */

/* Where the state of the start step grows. */
static struct mu_sim_state *start_state(struct mu_sim_engine *engine)
{
    bool joins = engine->assign->source == MU_SOURCE_HELD || engine->assign->source == MU_SOURCE_ROLL_FORWARD;
    return joins ? &engine->state : &engine->incoming;
}

static bool same_share(const struct mu_held_share *share, const struct mu_assign *assign)
{
    return share->rank == assign->rank && mu_layout_equal(&share->layout, &assign->layout);
}

/* All that is there according to `held`, with the copies. */
static struct mu_sim_mask kept_mask(const struct mu_sim *sim, const struct mu_held *held)
{
    struct mu_sim_mask mask = mu_sim_held_mask(sim, held, held->step);
    mask.params |= mu_sim_held_copies(sim, held, held->step);
    return mask;
}

/* The new share is complete, beside what was held of the same step. */
static void join_share(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_held held = engine->held;
    uint32_t count = held.share_count;
    for (uint32_t i = 0; i < count; i++) {
        if (same_share(&held.shares[i], engine->assign)) {
            engine->held.shares[i].owned_only = false;
            return;
        }
    }
    if (MU_MUTANT(MU_MUT_DROP_BEFORE_GO))
        count = 0;
    if (count == MU_HELD_SHARES_MAX) { /* the oldest that never ran makes room */
        memmove(&held.shares[1], &held.shares[2], (MU_HELD_SHARES_MAX - 2) * sizeof held.shares[1]);
        count--;
    }
    held.shares[count++] = (struct mu_held_share){.layout = engine->assign->layout, .rank = engine->assign->rank};
    held.share_count = count;
    if (!mu_sim_mask_covers(kept_mask(sim, &held), kept_mask(sim, &engine->held)))
        mu_sim_oracle_drops(sim, slot, &held, "prepared");
    engine->held = held;
    engine->state.has = kept_mask(sim, &held);
}

/* The new share of another step is complete: it takes the place of what was held. */
static void replace_state(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_held held = {.has_state = true, .step = engine->assign->start_step, .share_count = 1};
    held.shares[0] = (struct mu_held_share){.layout = engine->assign->layout, .rank = engine->assign->rank};
    engine->held = held; /* that nothing newer could be brought back was judged with the plan */
    engine->state = engine->incoming;
    engine->state.has = engine->wants;
}

/* True: what this rank is to hold is complete. */
static bool accept_share(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_sim_state *state = start_state(engine);
    if (!engine->has_base || !mu_sim_mask_covers(state->has, engine->wants))
        return false;
    if (!engine->working)
        return true; /* it only serves; what it holds it holds until Go */
    if (state == &engine->incoming)
        replace_state(sim, slot);
    else
        join_share(sim, slot);
    mu_sim_oracle_holds(sim, slot);
    return true;
}

/* Which values of two states are the same. */
static struct mu_sim_mask same_values(const struct mu_sim_state *a, const struct mu_sim_state *b)
{
    struct mu_sim_mask same = {0, 0};
    for (uint32_t c = 0; c < MU_SIM_CHUNKS_MAX; c++) {
        same.params |= (uint64_t)(a->values.params[c] == b->values.params[c]) << c;
        same.moments |= (uint64_t)(a->values.moments[c] == b->values.moments[c]) << c;
    }
    same.params &= a->has.params & b->has.params;
    same.moments &= a->has.moments & b->has.moments;
    return same;
}

static void on_kept(struct mu_sim *sim, uint32_t slot, const struct mu_sim_frame *frame)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_sim_link_end *end = mu_sim_engine_link(engine, frame->from_rank);
    if (engine->phase != MU_SIM_PREPARING || !end)
        return;
    end->before = *frame->state;
    end->asked = true;
    mu_sim_engine_pump_prepare(sim, slot);
}

static void on_move(struct mu_sim *sim, uint32_t slot, const struct mu_sim_frame *frame)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    if (engine->phase != MU_SIM_PREPARING)
        return;
    if (frame->step != engine->assign->start_step) {
        mu_sim_violate(sim, "worker %u copies state of step %llu for a start at %llu", slot,
                       (unsigned long long)frame->step, (unsigned long long)engine->assign->start_step);
        return;
    }
    struct mu_sim_mask comes = mu_sim_mask_or(frame->state->has, frame->kept);
    if (!mu_sim_mask_covers(engine->wants, comes))
        mu_sim_violate(sim, "worker %u is sent chunks that it is not to hold", slot);
    if (!mu_sim_mask_empty(same_values(frame->state, &engine->arrived)))
        mu_sim_violate(sim, "worker %u is sent chunks again that it has", slot);
    mu_sim_state_take(&engine->arrived, frame->state, frame->state->has);
    mu_sim_state_take(&engine->incoming, &engine->arrived, comes);
    sim->stats.kept += (uint64_t)__builtin_popcountll(frame->kept.params | frame->kept.moments);
    engine->progress++;
    mu_sim_engine_pump_prepare(sim, slot);
}

static void rolled_forward(struct mu_sim *sim, struct mu_sim_event *event)
{
    uint32_t slot = (uint32_t)event->a;
    struct mu_sim_engine *engine = engine_of(sim, slot);
    if (stale(sim, event))
        return;
    mu_sim_engine_apply(sim, slot, &engine->assign->roll_forward);
    engine->has_base = true;
    engine->progress++;
    mu_sim_engine_pump_prepare(sim, slot);
}

static void loaded(struct mu_sim *sim, struct mu_sim_event *event)
{
    uint32_t slot = (uint32_t)event->a;
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_sim_state all = {.has = {0, 0}};
    uint64_t step = 0;
    if (stale(sim, event))
        return;
    engine->progress++;
    enum mu_status status = mu_sim_local_load(sim, slot, engine->assign, &step, &all.values);
    if (status == MU_ERR_UNAVAILABLE && engine->load_tries++ < LOAD_TRIES) { /* a holder may just have died */
        later(sim, slot, LOAD_PAUSE_US, loaded);
        return;
    }
    if (status != MU_OK || step != engine->assign->start_step) {
        bool bad = status != MU_ERR_UNAVAILABLE;
        mu_sim_engine_park(sim, slot, MU_PARK_PREPARE, 0, MU_PEER_FAILURE_NONE, bad ? engine->assign->checkpoint : 0,
                           bad ? "piece does not match its checksum" : "a holder cannot be reached");
        return;
    }
    mu_sim_state_take(&engine->incoming, &all, engine->wants);
    engine->has_base = true;
    mu_sim_engine_pump_prepare(sim, slot);
}

static void initialised(struct mu_sim *sim, struct mu_sim_event *event)
{
    uint32_t slot = (uint32_t)event->a;
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_sim_state all = {.has = {0, 0}};
    if (stale(sim, event))
        return;
    engine->progress++;
    mu_sim_hash_initial(sim, &all.values);
    mu_sim_state_take(&engine->incoming, &all, engine->wants);
    engine->has_base = true;
    mu_sim_engine_pump_prepare(sim, slot);
}

static void get_state(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    switch (engine->assign->source) {
    case MU_SOURCE_HELD:
        engine->has_base = true;
        break;
    case MU_SOURCE_ROLL_FORWARD:
        later(sim, slot, 1 + mu_sim_below(sim, sim->params.optimizer_us), rolled_forward);
        break;
    case MU_SOURCE_PEER:
        engine->has_base = true; /* everything comes by moves */
        break;
    case MU_SOURCE_CHECKPOINT:
        engine->load_tries = 0;
        later(sim, slot, mu_sim_delay(sim, sim->params.io_us), loaded);
        break;
    case MU_SOURCE_INIT:
        later(sim, slot, mu_sim_delay(sim, sim->params.optimizer_us), initialised);
        break;
    }
}

/* Chunks that are still to go to this rank. */
static struct mu_sim_mask unsent(const struct mu_sim_engine *engine, const struct mu_sim_link_end *end)
{
    struct mu_sim_mask mask = {0, 0};
    for (uint32_t i = 0; i < engine->assign->move_count; i++) {
        const struct mu_move *move = &engine->assign->moves[i];
        if (move->from == engine->rank && move->to == end->rank)
            mask = mu_sim_mask_or(mask, mu_sim_move_mask(move));
    }
    mask.params &= ~end->moved.params;
    mask.moments &= ~end->moved.moments;
    return mask;
}

/* Sends what is at hand; true when everything is sent. */
static bool serve(struct mu_sim *sim, uint32_t slot, struct mu_sim_link_end *end)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    const struct mu_sim_state *state = start_state(engine);
    struct mu_sim_mask due = unsent(engine, end), now = due;
    if (mu_sim_mask_empty(due))
        return true;
    now.params &= state->has.params;
    now.moments &= state->has.moments;
    if (!end->connected || !end->asked || !engine->has_base || mu_sim_mask_empty(now))
        return false;
    struct mu_sim_frame *frame = mu_sim_frame_new(sim, slot, MU_SIM_FRAME_MOVE, 0, true);
    frame->step = engine->assign->start_step;
    end->moved = mu_sim_mask_or(end->moved, now);
    struct mu_sim_mask same = MU_MUTANT(MU_MUT_KEEP_OTHER_STEP) ? end->before.has : same_values(state, &end->before);
    frame->kept = (struct mu_sim_mask){now.params & same.params, now.moments & same.moments};
    mu_sim_state_take(frame->state, state,
                      (struct mu_sim_mask){now.params & ~same.params, now.moments & ~same.moments});
    uint64_t copied_us = sim->now_us + mu_sim_delay(sim, sim->params.io_us / 2); /* about as long as a load */
    end->last_us = copied_us > end->last_us ? copied_us : end->last_us;
    mu_sim_engine_send(sim, slot, end, frame);
    return !mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_TRANSFER) && mu_sim_mask_empty(unsent(engine, end));
}

static bool serve_all(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    bool all = true;
    for (uint32_t i = 0; i < engine->link_count; i++)
        all = serve(sim, slot, &engine->links[i]) && all;
    return all;
}

static void prepared(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    engine->epoch++;
    engine->phase = MU_SIM_PREPARED;
    mu_sim_oracle_prepared(sim, slot);
    struct mu_worker_event event = {.kind = MU_WE_PREPARED,
                                    .parked = {.generation = engine->generation, .held = engine->held}};
    mu_sim_worker_post(sim, slot, &event);
    (void)mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_PREPARED);
}

void mu_sim_engine_pump_prepare(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    if (engine->phase != MU_SIM_PREPARING || !engine->has_base || engine->hung)
        return;
    engine->progress++;
    if (start_state(engine) == &engine->state) { /* what came before the own part was rolled forward had to wait */
        mu_sim_state_take(&engine->state, &engine->incoming, engine->incoming.has);
        engine->incoming.has = (struct mu_sim_mask){0, 0};
    }
    if (!serve_all(sim, slot))
        return;
    for (uint32_t i = 0; i < engine->link_count; i++) {
        if (!engine->links[i].connected)
            return;
    }
    if (accept_share(sim, slot) && !sim->failed)
        prepared(sim, slot);
}

/* Go is durable: what lies outside the new share is given up. */
void mu_sim_engine_keep_share(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_held held = engine->held;
    held.has_state = engine->working;
    held.share_count = engine->working;
    held.shares[0] = (struct mu_held_share){.layout = engine->assign->layout, .rank = engine->assign->rank};
    held.has_gradient = false; /* the next backward overwrites it */
    engine->held = held;
    engine->held.step = engine->assign->start_step; /* an idle rank held another one, perhaps */
    engine->state.has = engine->wants;
    memset(&engine->incoming, 0, sizeof engine->incoming);
    if (!MU_MUTANT(MU_MUT_KEEP_OTHER_STEP))
        engine->arrived.has = (struct mu_sim_mask){0, 0}; /* their memory is given back */
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

static uint32_t roles_of(const struct mu_sim *sim, const struct mu_assign *assign, uint32_t peer)
{
    const struct mu_layout *layout = &assign->layout;
    uint32_t world = mu_layout_world(layout), roles = 0, tree[33], rank = assign->rank;
    if (world <= MU_MESH_WORLD_MAX)
        roles |= MU_SIM_ROLE_WORLD_MESH;
    uint32_t count = world <= MU_MESH_WORLD_MAX ? 0 : mu_layout_binomial(world, rank, tree);
    for (uint32_t i = 0; i < count; i++) {
        if (tree[i] == peer)
            roles |= peer < rank ? MU_SIM_ROLE_WORLD_UP : MU_SIM_ROLE_WORLD_DOWN;
    }
    if (mu_layout_is_idle(layout, rank) || mu_layout_is_idle(layout, peer))
        return roles;
    struct mu_coords a = mu_layout_coords(layout, rank), b = mu_layout_coords(layout, peer);
    roles |= mu_layout_buddy(layout, rank) == peer ? MU_SIM_ROLE_BUDDY : 0;
    roles |= mu_layout_guarded(layout, rank) == peer ? MU_SIM_ROLE_GUARDED : 0;
    if (a.d == b.d && a.p == b.p)
        return roles | MU_SIM_ROLE_TENSOR;
    if (a.d == b.d && a.t == b.t) {
        roles |= b.p == a.p + 1 ? MU_SIM_ROLE_NEXT : b.p + 1 == a.p ? MU_SIM_ROLE_PREVIOUS : 0;
        if (sim->tied_chunks && (a.p == 0 || b.p == 0) && (a.p + 1 == layout->pp || b.p + 1 == layout->pp))
            roles |= b.p == 0 ? MU_SIM_ROLE_FIRST : MU_SIM_ROLE_LAST;
    }
    if (a.t != b.t || a.p != b.p)
        return roles;
    struct mu_shard_group group = mu_layout_shard_group(layout->dp, a.d);
    if (layout->sharded && b.d >= group.first && b.d < group.first + group.count)
        roles |= MU_SIM_ROLE_GATHER;
    if (layout->dp <= MU_MESH_WORLD_MAX)
        return roles | MU_SIM_ROLE_REPLICA_MESH;
    count = mu_layout_binomial(layout->dp, a.d, tree);
    for (uint32_t i = 0; i < count; i++) {
        if (tree[i] == b.d)
            roles |= b.d < a.d ? MU_SIM_ROLE_REPLICA_UP : MU_SIM_ROLE_REPLICA_DOWN;
    }
    return roles;
}

/* Everybody that this rank exchanges something with is among its peers. */
static void check_peers(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    const struct mu_assign *assign = engine->assign;
    uint32_t world = mu_layout_world(&assign->layout);
    for (uint32_t peer = 0; peer < world && world < 200; peer++) {
        if (peer != engine->rank && roles_of(sim, assign, peer) && !mu_sim_engine_link(engine, peer))
            mu_sim_violate(sim, "rank %u of generation %llu is not told how to reach rank %u", engine->rank,
                           (unsigned long long)engine->generation, peer);
    }
    for (uint32_t i = 0; i < assign->move_count; i++) {
        const struct mu_move *move = &assign->moves[i];
        uint32_t peer = move->from == engine->rank ? move->to : move->from;
        if ((move->from != engine->rank && move->to != engine->rank) || !mu_sim_engine_link(engine, peer))
            mu_sim_violate(sim, "rank %u of generation %llu is told of a move from %u to %u", engine->rank,
                           (unsigned long long)engine->generation, move->from, move->to);
    }
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
        end->roles = roles_of(sim, assign, end->rank);
        if (!mu_sim_worker_address(sim, assign->peers[i].address, &end->slot, &end->life))
            mu_sim_violate(sim, "rank %u is given the address '%s', which nobody reported", assign->rank,
                           assign->peers[i].address);
        if (i > 0 && end->rank <= engine->links[i - 1].rank)
            mu_sim_violate(sim, "the neighbours of rank %u are not in ascending order", assign->rank);
    }
    check_peers(sim, slot);
}

static void take_place(struct mu_sim *sim, struct mu_sim_engine *engine)
{
    const struct mu_layout *layout = &engine->assign->layout;
    engine->rank = engine->assign->rank;
    engine->working = !mu_layout_is_idle(layout, engine->rank);
    engine->share = mu_sim_share_mask(sim, layout, engine->rank);
    engine->updates = mu_sim_update_mask(sim, layout, engine->rank);
    engine->mirror = mu_sim_share_chunks(sim, layout, engine->rank, MU_SHARE_MIRROR);
    engine->wants = engine->share;
    engine->wants.params |= mu_sim_share_chunks(sim, layout, engine->rank, MU_SHARE_COPY);
    engine->first_leaf = engine->leaf_count = 0;
    engine->stage_chunks = 0;
    if (!engine->working)
        return;
    engine->at = mu_layout_coords(layout, engine->rank);
    engine->first_leaf = mu_plan_leaf_range(sim->params.leaves, layout->dp, engine->assign->leaf_counts, engine->at.d,
                                            &engine->leaf_count);
    for (uint32_t t = 0; t < layout->tp; t++) {
        struct mu_coords at = {.t = t, .d = engine->at.d, .p = engine->at.p};
        engine->stage_chunks |= mu_sim_share_chunks(sim, layout, mu_layout_rank(layout, at), MU_SHARE_PARAMS);
    }
}

void mu_sim_engine_prepare(struct mu_sim *sim, uint32_t slot, uint64_t generation, const struct mu_assign *assign)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    if (engine->phase != MU_SIM_IDLE && engine->phase != MU_SIM_PARKED)
        mu_sim_violate(sim, "worker %u is told to prepare while its engine does something else (phase %d)", slot,
                       (int)engine->phase);
    mu_sim_feed_assigned(sim, slot, assign);
    retire_links(sim, slot);
    free(engine->assign);
    engine->assign = mu_sim_copy_assign(assign, NULL, 0, &engine->assign);
    engine->generation = generation;
    mu_sim_engine_amend(sim, slot, engine->assign->amendments);
    take_place(sim, engine);
    engine->epoch++;
    engine->phase = MU_SIM_PREPARING;
    engine->has_base = false;
    engine->state.has = kept_mask(sim, &engine->held); /* what an earlier preparation left unfinished does not count */
    memset(&engine->incoming, 0, sizeof engine->incoming);
    if (engine->arrived_step != assign->start_step && !MU_MUTANT(MU_MUT_KEEP_OTHER_STEP))
        engine->arrived.has = (struct mu_sim_mask){0, 0};
    engine->arrived_step = assign->start_step;
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
    if (frame->kind == MU_SIM_FRAME_DIAL)
        on_dial(sim, slot, frame);
    else if (frame->kind == MU_SIM_FRAME_ACCEPT)
        on_accept(sim, slot, frame);
    else if (frame->kind == MU_SIM_FRAME_KEPT)
        on_kept(sim, slot, frame);
    else if (frame->kind == MU_SIM_FRAME_MOVE)
        on_move(sim, slot, frame);
    else
        return false;
    return true;
}
