/* Hash engine: feeds of state to spares while others step (struct mu_feed_order; the real one: worker/feed.h). One
 * connection, one way: chunks between two updates, then with each update its gradient and result, then the end. */
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

#define TAKE_LIMIT_US (6 * MU_SIM_S) /* nothing has come by then */

static struct mu_sim_engine *engine_of(struct mu_sim *sim, uint32_t slot)
{
    return &sim->workers[slot].engine;
}

/* ---- giver ---- */

static void send(struct mu_sim *sim, uint32_t slot, struct mu_sim_feed *feed, enum mu_sim_feed_item item,
                 uint64_t chunks)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_sim_frame *frame = mu_sim_frame_new(sim, slot, MU_SIM_FRAME_FEED, 0, true);
    frame->feed = feed->number;
    frame->item = item;
    frame->hash = engine->gradient;
    frame->command = engine->held.result.command;
    mu_sim_state_take(frame->state, &engine->state, (struct mu_sim_mask){chunks, chunks});
    uint64_t late_us =
        sim->now_us + mu_sim_delay(sim, item == MU_SIM_FEED_CHUNKS ? sim->params.io_us / 2 : sim->params.optimizer_us);
    feed->end.last_us = late_us > feed->end.last_us ? late_us : feed->end.last_us;
    mu_sim_engine_send(sim, slot, &feed->end, frame);
}

/* Before anything is sent: the taker has dialled, which it does until somebody answers. */
static bool is_connected(struct mu_sim *sim, uint32_t slot, const struct mu_sim_feed *feed)
{
    int32_t from = MU_SIM_NODE_WORKER + (int32_t)slot, to = MU_SIM_NODE_WORKER + (int32_t)feed->end.slot;
    const struct mu_sim_engine *taker = engine_of(sim, feed->end.slot);
    return feed->sent ||
           (taker->take.order.number == feed->number && mu_sim_net_open_at(sim, from, to) <= sim->now_us &&
            mu_sim_net_open_at(sim, to, from) <= sim->now_us);
}

void mu_sim_feed_chunks(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    uint64_t share = engine->share.params;
    for (uint32_t i = 0; i < MU_SIM_FEEDS_MAX; i++) {
        struct mu_sim_feed *feed = &engine->feeds[i];
        uint64_t left = feed->number && is_connected(sim, slot, feed) ? share & ~feed->sent : 0, now = 0;
        for (uint64_t room = mu_sim_between(sim, 1, 8); room > 0 && left; room--) {
            now |= left & -left;
            left &= left - 1;
        }
        if (!now)
            continue;
        feed->sent |= now;
        send(sim, slot, feed, MU_SIM_FEED_CHUNKS, now);
        if (mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_FEED))
            return;
    }
}

void mu_sim_feed_update(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    for (uint32_t i = 0; i < MU_SIM_FEEDS_MAX; i++) {
        if (engine->feeds[i].sent)
            send(sim, slot, &engine->feeds[i], MU_SIM_FEED_UPDATE, 0);
    }
}

/* `whole`: parked by command; else the taker finds the connection closed. */
void mu_sim_feed_close(struct mu_sim *sim, uint32_t slot, bool whole)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    for (uint32_t i = 0; i < MU_SIM_FEEDS_MAX; i++) {
        struct mu_sim_feed *feed = &engine->feeds[i];
        if (!feed->number)
            continue;
        if (whole)
            send(sim, slot, feed, MU_SIM_FEED_END, 0);
        mu_sim_engine_close_links(sim, slot, &feed->end, 1, true);
        *feed = (struct mu_sim_feed){0};
    }
}

static void give(struct mu_sim *sim, uint32_t slot, uint64_t generation, const struct mu_feed_order *order)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_sim_link_end end = {.connected = true};
    if (engine->generation != generation || !mu_sim_engine_running(engine) ||
        !mu_sim_worker_address(sim, order->address, &end.slot, &end.life))
        return;
    if (order->rank != engine->rank || !mu_layout_equal(&order->layout, &engine->assign->layout))
        mu_sim_violate(sim, "worker %u is told to feed a share that is not its own", slot);
    for (uint32_t i = 0; i < MU_SIM_FEEDS_MAX; i++) {
        if (engine->feeds[i].number)
            continue;
        end.id = ++sim->next_link;
        engine->feeds[i] = (struct mu_sim_feed){.number = order->number, .end = end};
        return;
    }
}

/* ---- taker ---- */

static void post(struct mu_sim *sim, uint32_t slot, uint64_t number, enum mu_feed_state state)
{
    struct mu_worker_event event = {.kind = MU_WE_FED, .fed = {.number = number, .state = state}};
    event.fed.held = engine_of(sim, slot)->held;
    mu_sim_worker_post(sim, slot, &event);
}

static void fail(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    uint64_t number = engine->take.order.number;
    memset(&engine->take, 0, sizeof engine->take);
    post(sim, slot, number, MU_FEED_FAILED);
}

static void nothing_came(struct mu_sim *sim, struct mu_sim_event *event)
{
    uint32_t slot = (uint32_t)event->a;
    const struct mu_sim_engine *engine = engine_of(sim, slot);
    if (engine->take.order.number == event->b && !engine->take.link)
        fail(sim, slot);
}

static void take(struct mu_sim *sim, uint32_t slot, const struct mu_feed_order *order)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    memset(&engine->take, 0, sizeof engine->take);
    engine->take.order = *order;
    if (engine->held.has_state) {
        mu_sim_violate(sim, "worker %u is told to take a feed over a state that it holds", slot);
        return;
    }
    mu_sim_after(sim, TAKE_LIMIT_US, MU_SIM_NODE_WORKER + (int32_t)slot, nothing_came, NULL, slot, order->number);
}

void mu_sim_engine_feed(struct mu_sim *sim, uint32_t slot, uint64_t generation, const struct mu_feed_order *order)
{
    if (order->role == MU_FEED_GIVE)
        give(sim, slot, generation, order);
    else
        take(sim, slot, order);
}

bool mu_sim_feed_link_failed(struct mu_sim *sim, uint32_t slot, uint64_t link)
{
    const struct mu_sim_engine *engine = engine_of(sim, slot);
    if (!engine->take.order.number || engine->take.link != link)
        return false;
    fail(sim, slot);
    return true;
}

static struct mu_sim_mask share_of(const struct mu_sim *sim, const struct mu_feed_order *order)
{
    return mu_sim_share_mask(sim, &order->layout, order->rank);
}

static void take_chunks(struct mu_sim *sim, uint32_t slot, const struct mu_sim_frame *frame)
{
    struct mu_sim_take *taken = &engine_of(sim, slot)->take;
    if (mu_sim_mask_empty(taken->state.has))
        taken->step = frame->step;
    if (frame->step != taken->step)
        mu_sim_violate(sim, "worker %u is fed chunks of step %llu at step %llu", slot, (unsigned long long)frame->step,
                       (unsigned long long)taken->step);
    mu_sim_state_take(&taken->state, frame->state, frame->state->has);
    struct mu_sim_mask params = taken->state.has, share = share_of(sim, &taken->order);
    if (!taken->live && (params.params & share.params) == share.params) {
        taken->live = true;
        post(sim, slot, taken->order.number, MU_FEED_LIVE);
    }
}

static void replay(struct mu_sim *sim, uint32_t slot, const struct mu_sim_frame *frame)
{
    struct mu_sim_take *taken = &engine_of(sim, slot)->take;
    struct mu_step_result result = mu_sim_step_result(frame->step, frame->hash, frame->command);
    if (frame->step != taken->step)
        mu_sim_violate(sim, "worker %u is fed the update of step %llu at step %llu", slot,
                       (unsigned long long)frame->step, (unsigned long long)taken->step);
    if (MU_MUTANT(MU_MUT_FEED_FORGET_NORM))
        result.grad_norm = 0;
    mu_sim_hash_apply(&taken->state.values, taken->state.has, frame->hash, &result);
    if (MU_MUTANT(MU_MUT_FEED_REPLAY_TWICE))
        mu_sim_hash_apply(&taken->state.values, taken->state.has, frame->hash, &result);
    taken->step++;
    taken->result = result;
}

/* The giver is at a boundary, so the taker must have come to the same one. */
static void end(struct mu_sim *sim, uint32_t slot, const struct mu_sim_frame *frame)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_sim_take *taken = &engine->take;
    uint64_t number = taken->order.number;
    if (!taken->live || (frame->step != taken->step && !MU_MUTANT(MU_MUT_FEED_STEP_BEHIND))) {
        fail(sim, slot);
        return;
    }
    engine->held = (struct mu_held){.has_state = true,
                                    .has_result = taken->result.step + 1 == frame->step,
                                    .step = frame->step,
                                    .result = taken->result,
                                    .share_count = 1};
    engine->held.shares[0].layout = taken->order.layout;
    engine->held.shares[0].layout.buddy_shift = 0;
    engine->held.shares[0].rank = taken->order.rank;
    engine->state = taken->state;
    engine->state.has = mu_sim_held_mask(sim, &engine->held, engine->held.step);
    engine->taken_whole = true;
    sim->stats.fed++;
    memset(taken, 0, sizeof *taken);
    mu_sim_oracle_holds(sim, slot);
    post(sim, slot, number, MU_FEED_WHOLE);
    (void)mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_FEED);
}

void mu_sim_feed_frame(struct mu_sim *sim, uint32_t slot, const struct mu_sim_frame *frame)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_sim_take *taken = &engine->take;
    if (taken->order.number != frame->feed)
        return;
    if (engine->hung) { /* it will never read this: nor anything after it */
        taken->order.number = 0;
        return;
    }
    if (taken->link == 0)
        taken->link = frame->link;
    engine->progress++;
    if (frame->item == MU_SIM_FEED_CHUNKS)
        take_chunks(sim, slot, frame);
    else if (frame->item == MU_SIM_FEED_END)
        end(sim, slot, frame);
    else if (!MU_MUTANT(MU_MUT_FEED_STEP_BEHIND) || !taken->live)
        replay(sim, slot, frame);
}

/* The assignment ends every feed; one that was made before it was known that a feed had ended counts on nothing. */
void mu_sim_feed_assigned(struct mu_sim *sim, uint32_t slot, const struct mu_assign *assign)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    mu_sim_feed_close(sim, slot, false);
    memset(&engine->take, 0, sizeof engine->take);
    if (engine->taken_whole && assign->source == MU_SOURCE_PEER && engine->held.step == assign->start_step) {
        memset(&engine->held, 0, sizeof engine->held);
        engine->state.has = (struct mu_sim_mask){0, 0};
    }
    engine->taken_whole = false;
}
