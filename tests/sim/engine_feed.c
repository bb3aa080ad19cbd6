/* Hash engine: feeds of state to those that lack it in the next generation, while this one steps (struct mu_feed_order;
 * the real one: worker/feed.h). One connection for each giver, one way: chunks between two updates, then with each
 * update its gradient and result, and the parameters that it has made where the taker has no moments, then the end. */
#include <stdlib.h>
#include <string.h>

#include "plan/feeding.h"
#include "tests/sim/sim.h"

#define TAKE_LIMIT_US (6 * MU_SIM_S) /* nothing has come by then */

static struct mu_sim_engine *engine_of(struct mu_sim *sim, uint32_t slot)
{
    return &sim->workers[slot].engine;
}

/* What the order's giver gives. */
static struct mu_sim_mask given_by(struct mu_sim *sim, const struct mu_feed_order *order)
{
    const struct mu_feeding feeding = {
        .from = &order->layout, .old_rank = order->taker, .to = &order->next, .rank = order->next_rank};
    struct mu_sim_mask mask = {0, 0};
    struct mu_move *moves;
    uint32_t count;
    if (mu_feeding_moves(&sim->model, &feeding, &moves, &count) != MU_OK)
        abort();
    for (uint32_t i = 0; i < count; i++) {
        if (moves[i].from == order->rank)
            mask = mu_sim_mask_or(mask, mu_sim_move_mask(&moves[i]));
    }
    free(moves);
    return mask;
}

/* Chunks with moments are updated by the taker, of the others it gets what they become. */
static struct mu_sim_mask replayed_of(struct mu_sim_mask chunks)
{
    return (struct mu_sim_mask){chunks.params & chunks.moments, chunks.moments};
}

static struct mu_sim_mask followed_of(struct mu_sim_mask chunks)
{
    return (struct mu_sim_mask){chunks.params & ~chunks.moments, 0};
}

/* ---- giver ---- */

static void send(struct mu_sim *sim, uint32_t slot, struct mu_sim_feed *feed, enum mu_sim_feed_item item,
                 struct mu_sim_mask chunks)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_sim_frame *frame = mu_sim_frame_new(sim, slot, MU_SIM_FRAME_FEED, 0, true);
    frame->feed = feed->number;
    frame->item = item;
    frame->hash = engine->gradient;
    frame->command = engine->held.result.command;
    mu_sim_state_take(frame->state, &engine->state, chunks);
    uint64_t late_us =
        sim->now_us + mu_sim_delay(sim, item == MU_SIM_FEED_CHUNKS ? sim->params.io_us / 2 : sim->params.optimizer_us);
    feed->end.last_us = late_us > feed->end.last_us ? late_us : feed->end.last_us;
    mu_sim_engine_send(sim, slot, &feed->end, frame);
}

/* Before anything is sent: the taker has dialled, which it does until somebody answers. */
static bool is_connected(struct mu_sim *sim, uint32_t slot, const struct mu_sim_feed *feed)
{
    int32_t from = MU_SIM_NODE_WORKER + (int32_t)slot, to = MU_SIM_NODE_WORKER + (int32_t)feed->end.slot;
    const struct mu_sim_take *take = &engine_of(sim, feed->end.slot)->take;
    uint64_t part = feed->number % MU_FEED_PARTS_MAX;
    return !mu_sim_mask_empty(feed->sent) ||
           (take->order.number == feed->number - part && take->parts[part].here &&
            mu_sim_net_open_at(sim, from, to) <= sim->now_us && mu_sim_net_open_at(sim, to, from) <= sim->now_us);
}

static void send_params(struct mu_sim *sim, uint32_t slot, struct mu_sim_feed *feed)
{
    struct mu_sim_mask followed = followed_of(feed->all);
    followed.params &= feed->sent.params;
    if (feed->owes && followed.params && !MU_MUTANT(MU_MUT_FEED_KEEP_PARAMS))
        send(sim, slot, feed, MU_SIM_FEED_PARAMS, followed);
    feed->owes = false;
}

void mu_sim_feed_chunks(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    for (uint32_t i = 0; i < MU_FEED_PARTS_MAX; i++) {
        struct mu_sim_feed *feed = &engine->feeds[i];
        if (!feed->number || !is_connected(sim, slot, feed))
            continue;
        send_params(sim, slot, feed);
        struct mu_sim_mask left = {feed->all.params & ~feed->sent.params, feed->all.moments & ~feed->sent.moments};
        uint64_t any = left.params | left.moments, now = 0;
        for (uint64_t room = mu_sim_between(sim, 1, 8); room > 0 && any; room--) {
            now |= any & -any;
            any &= any - 1;
        }
        if (!now)
            continue;
        struct mu_sim_mask chunks = {left.params & now, left.moments & now};
        feed->sent = mu_sim_mask_or(feed->sent, chunks);
        send(sim, slot, feed, MU_SIM_FEED_CHUNKS, chunks);
        if (mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_FEED))
            return;
    }
}

void mu_sim_feed_update(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    for (uint32_t i = 0; i < MU_FEED_PARTS_MAX; i++) {
        struct mu_sim_feed *feed = &engine->feeds[i];
        if (!mu_sim_mask_empty(feed->sent))
            send(sim, slot, feed, MU_SIM_FEED_UPDATE, (struct mu_sim_mask){0, 0});
        feed->owes = engine->held.result.finite;
    }
}

/* `whole`: parked by command; else the taker finds the connection closed. */
void mu_sim_feed_close(struct mu_sim *sim, uint32_t slot, bool whole)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    for (uint32_t i = 0; i < MU_FEED_PARTS_MAX; i++) {
        struct mu_sim_feed *feed = &engine->feeds[i];
        if (!feed->number)
            continue;
        if (whole) {
            send_params(sim, slot, feed);
            send(sim, slot, feed, MU_SIM_FEED_END, (struct mu_sim_mask){0, 0});
        }
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
    struct mu_sim_mask all = given_by(sim, order), replayed = replayed_of(all);
    if (!mu_sim_mask_covers(engine->updates, replayed))
        mu_sim_violate(sim, "worker %u is told to feed gradients of chunks that it does not update", slot);
    if (!mu_sim_mask_covers(engine->share, all))
        mu_sim_violate(sim, "worker %u is told to feed chunks that it does not have", slot);
    for (uint32_t i = 0; i < MU_FEED_PARTS_MAX; i++) {
        if (engine->feeds[i].number)
            continue;
        end.id = ++sim->next_link;
        engine->feeds[i] = (struct mu_sim_feed){.number = order->number + order->part, .all = all, .end = end};
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
    const struct mu_sim_take *taken = &engine_of(sim, slot)->take;
    if (taken->order.number != event->b)
        return;
    for (uint32_t i = 0; i < taken->order.parts; i++) {
        if (!taken->parts[i].link) {
            fail(sim, slot);
            return;
        }
    }
}

static void make_room(struct mu_sim *sim, uint32_t slot, uint64_t generation)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    mu_sim_oracle_makes_room(sim, slot, generation);
    memset(&engine->held, 0, sizeof engine->held);
    memset(&engine->state.has, 0, sizeof engine->state.has);
    sim->stats.fed_over++;
}

static void take(struct mu_sim *sim, uint32_t slot, uint64_t generation, const struct mu_feed_order *order,
                 const struct mu_amendments *amendments)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_sim_take *taken = &engine->take;
    bool beside = order->taker != MU_LAYOUT_NOBODY;
    if (beside && (engine->generation != generation || !mu_sim_engine_running(engine))) {
        post(sim, slot, order->number, MU_FEED_FAILED);
        return;
    }
    if (!beside && engine->held.has_state)
        make_room(sim, slot, generation);
    if (order->taker == MU_LAYOUT_NOBODY)
        mu_sim_engine_amend(sim, slot, amendments);
    if (taken->order.number != order->number) {
        memset(taken, 0, sizeof *taken);
        taken->order = *order;
        taken->generation = generation;
        mu_sim_after(sim, TAKE_LIMIT_US, MU_SIM_NODE_WORKER + (int32_t)slot, nothing_came, NULL, slot, order->number);
    }
    taken->parts[order->part] = (struct mu_sim_part){.here = true, .all = given_by(sim, order)};
}

void mu_sim_engine_feed(struct mu_sim *sim, uint32_t slot, uint64_t generation, const struct mu_feed_order *order,
                        const struct mu_amendments *amendments)
{
    if (order->role == MU_FEED_GIVE)
        give(sim, slot, generation, order);
    else
        take(sim, slot, generation, order, amendments);
}

static struct mu_sim_part *part_of(struct mu_sim_take *taken, uint64_t number)
{
    uint64_t part = number % MU_FEED_PARTS_MAX;
    return taken->order.number == number - part && taken->parts[part].here ? &taken->parts[part] : NULL;
}

bool mu_sim_feed_link_failed(struct mu_sim *sim, uint32_t slot, uint64_t link)
{
    struct mu_sim_take *taken = &engine_of(sim, slot)->take;
    for (uint32_t i = 0; i < taken->order.parts; i++) {
        if (!taken->parts[i].here || taken->parts[i].link != link)
            continue;
        if (!taken->parts[i].ended) /* else it has said all */
            fail(sim, slot);
        return true;
    }
    return false;
}

static void take_chunks(struct mu_sim *sim, uint32_t slot, struct mu_sim_part *part, const struct mu_sim_frame *frame)
{
    struct mu_sim_take *taken = &engine_of(sim, slot)->take;
    if (mu_sim_mask_empty(part->has))
        part->step = frame->step;
    if (frame->step != part->step || part->owed)
        mu_sim_violate(sim, "worker %u is fed chunks of step %llu at step %llu", slot, (unsigned long long)frame->step,
                       (unsigned long long)part->step);
    mu_sim_state_take(&taken->state, frame->state, frame->state->has);
    part->has = mu_sim_mask_or(part->has, frame->state->has);
    bool all = true;
    for (uint32_t i = 0; i < taken->order.parts; i++)
        all = all && taken->parts[i].here && mu_sim_mask_covers(taken->parts[i].has, taken->parts[i].all);
    if (!taken->live && all) {
        taken->live = true;
        post(sim, slot, taken->order.number, MU_FEED_LIVE);
    }
}

static void replay(struct mu_sim *sim, uint32_t slot, struct mu_sim_part *part, const struct mu_sim_frame *frame)
{
    struct mu_sim_take *taken = &engine_of(sim, slot)->take;
    struct mu_step_result result = mu_sim_step_result(frame->step, frame->hash, frame->command);
    if (frame->step != part->step || part->owed)
        mu_sim_violate(sim, "worker %u is fed the update of step %llu at step %llu", slot,
                       (unsigned long long)frame->step, (unsigned long long)part->step);
    if (MU_MUTANT(MU_MUT_FEED_FORGET_NORM))
        result.grad_norm = 0;
    mu_sim_hash_apply(&taken->state.values, replayed_of(part->has), frame->hash, &result, &engine_of(sim, slot)->spec);
    if (MU_MUTANT(MU_MUT_FEED_REPLAY_TWICE))
        mu_sim_hash_apply(&taken->state.values, replayed_of(part->has), frame->hash, &result,
                          &engine_of(sim, slot)->spec);
    part->owed = result.finite && followed_of(part->has).params != 0 && !MU_MUTANT(MU_MUT_FEED_KEEP_PARAMS);
    part->step++;
    if (part->step > taken->result.step)
        taken->result = result;
}

static void take_params(struct mu_sim *sim, uint32_t slot, struct mu_sim_part *part, const struct mu_sim_frame *frame)
{
    struct mu_sim_take *taken = &engine_of(sim, slot)->take;
    if (!part->owed || frame->step != part->step || frame->state->has.params != followed_of(part->has).params)
        mu_sim_violate(sim, "worker %u is fed parameters of step %llu at step %llu", slot,
                       (unsigned long long)frame->step, (unsigned long long)part->step);
    mu_sim_state_take(&taken->state, frame->state, frame->state->has);
    part->owed = false;
}

/* ---- the end ---- */

static bool all_ended(const struct mu_sim_take *taken)
{
    for (uint32_t i = 0; i < taken->order.parts; i++) {
        if (!taken->parts[i].ended)
            return MU_MUTANT(MU_MUT_FEED_PART_MISSING) && taken->live && taken->parts[0].ended;
    }
    return taken->order.number != 0;
}

static void hold(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    const struct mu_sim_take *taken = &engine->take;
    struct mu_held *held = &engine->held;
    if (!held->has_state) {
        uint64_t step = taken->parts[0].step;
        *held = (struct mu_held){
            .has_state = true, .has_result = taken->result.step + 1 == step, .step = step, .result = taken->result};
    }
    held->shares[held->share_count++] =
        (struct mu_held_share){.layout = taken->order.next, .rank = taken->order.next_rank};
    struct mu_sim_mask news = {0, 0};
    for (uint32_t i = 0; i < taken->order.parts; i++)
        news = mu_sim_mask_or(news, taken->parts[i].all);
    mu_sim_state_take(&engine->state, &taken->state, news);
    engine->taken_whole = news;
}

/* The givers are at a boundary, so the taker must have come to the same one; a member stands there too. */
static void try_whole(struct mu_sim *sim, uint32_t slot)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_sim_take *taken = &engine->take;
    uint64_t number = taken->order.number;
    bool beside = taken->order.taker != MU_LAYOUT_NOBODY;
    if (!all_ended(taken) || (beside && engine->phase != MU_SIM_PARKED))
        return;
    for (uint32_t i = 1; i < taken->order.parts; i++) {
        if (taken->parts[i].step != taken->parts[0].step && !MU_MUTANT(MU_MUT_FEED_PART_MISSING)) {
            fail(sim, slot);
            return;
        }
    }
    if (beside && (engine->held.step != taken->parts[0].step || !engine->held.has_state) &&
        !MU_MUTANT(MU_MUT_FEED_STEP_BEHIND)) {
        fail(sim, slot);
        return;
    }
    hold(sim, slot);
    if (beside)
        engine->parked.held = engine->held;
    sim->stats.fed++;
    sim->stats.fed_beside += beside;
    memset(taken, 0, sizeof *taken);
    mu_sim_oracle_holds(sim, slot);
    post(sim, slot, number, MU_FEED_WHOLE);
    (void)mu_sim_point(sim, (int32_t)slot, MU_SIM_POINT_FEED);
}

static void end(struct mu_sim *sim, uint32_t slot, struct mu_sim_part *part, const struct mu_sim_frame *frame)
{
    const struct mu_sim_take *taken = &engine_of(sim, slot)->take;
    if (!taken->live || part->owed || (frame->step != part->step && !MU_MUTANT(MU_MUT_FEED_STEP_BEHIND))) {
        fail(sim, slot);
        return;
    }
    part->step = frame->step;
    part->ended = true;
    try_whole(sim, slot);
}

/* A member has parked: by command (`whole`), or its generation is over, and what it was fed is worth nothing. */
void mu_sim_feed_parked(struct mu_sim *sim, uint32_t slot, bool whole)
{
    const struct mu_sim_take *taken = &engine_of(sim, slot)->take;
    if (!taken->order.number || taken->order.taker == MU_LAYOUT_NOBODY)
        return;
    if (whole)
        try_whole(sim, slot);
    else
        fail(sim, slot);
}

void mu_sim_feed_frame(struct mu_sim *sim, uint32_t slot, const struct mu_sim_frame *frame)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_sim_take *taken = &engine->take;
    struct mu_sim_part *part = part_of(taken, frame->feed);
    if (!part)
        return;
    if (engine->hung) { /* it will never read this: nor anything after it */
        taken->order.number = 0;
        return;
    }
    if (part->link == 0)
        part->link = frame->link;
    engine->progress++;
    if (frame->item == MU_SIM_FEED_CHUNKS)
        take_chunks(sim, slot, part, frame);
    else if (frame->item == MU_SIM_FEED_PARAMS)
        take_params(sim, slot, part, frame);
    else if (frame->item == MU_SIM_FEED_END)
        end(sim, slot, part, frame);
    else if (!MU_MUTANT(MU_MUT_FEED_STEP_BEHIND) || !taken->live)
        replay(sim, slot, part, frame);
}

/* Told to copy what it was fed: the assignment was made before it was known that the feed had ended. */
static bool is_told_to_copy(const struct mu_assign *assign, struct mu_sim_mask chunks)
{
    for (uint32_t i = 0; i < assign->move_count; i++) {
        struct mu_sim_mask moved = mu_sim_move_mask(&assign->moves[i]);
        if (assign->moves[i].to == assign->rank && (moved.params & chunks.params || moved.moments & chunks.moments))
            return true;
    }
    return false;
}

/* The assignment ends every feed; one that was made before it was known that a feed had ended counts on nothing. */
void mu_sim_feed_assigned(struct mu_sim *sim, uint32_t slot, const struct mu_assign *assign)
{
    struct mu_sim_engine *engine = engine_of(sim, slot);
    struct mu_held *held = &engine->held;
    mu_sim_feed_close(sim, slot, false);
    memset(&engine->take, 0, sizeof engine->take);
    bool forget = !mu_sim_mask_empty(engine->taken_whole) && held->step == assign->start_step &&
                  is_told_to_copy(assign, engine->taken_whole);
    engine->taken_whole = (struct mu_sim_mask){0, 0};
    if (!forget)
        return;
    held->share_count--;
    if (held->share_count == 0)
        memset(held, 0, sizeof *held);
    engine->state.has = mu_sim_held_mask(sim, held, held->step);
}
