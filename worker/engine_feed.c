/* Feeds of state to who lacks it in the next generation, from this member (worker/feed.h): done between two tiles of
 * its steps, and while it waits. */
#include "worker/engine_internal.h"

#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/fault.h"
#include "plan/feeding.h"

/* What the order's giver gives. */
static enum mu_status moves_of(const struct mu_engine *engine, const struct mu_feed_order *order,
                               struct engine_feed *out, struct mu_error *err)
{
    const struct mu_feeding feeding = {
        .from = &order->layout, .old_rank = order->taker, .to = &order->next, .rank = order->next_rank};
    uint32_t count, kept = 0;
    if (mu_feeding_moves(&engine->job.model, &feeding, &out->moves, &count) != MU_OK)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for a feed");
    for (uint32_t i = 0; i < count; i++) {
        if (out->moves[i].from == order->rank)
            out->moves[kept++] = out->moves[i];
    }
    out->move_count = kept;
    return kept > 0 ? MU_OK : mu_fail(err, MU_ERR_CONFLICT, "rank %u has nothing to feed", order->rank);
}

enum mu_status engine_feed_open(struct mu_engine *engine, const struct engine_feed_order *given, float *gradient,
                                enum mu_status (*reserve)(void *, const struct mu_chunk *, uint32_t, struct mu_error *),
                                struct engine_feed *ret_feed, struct mu_error *err)
{
    const struct engine_job *job = &engine->job;
    struct engine_feed feed = {0};
    enum mu_status status = moves_of(engine, &given->order, &feed, err);
    struct mu_feed_config config = {.model = &job->model,
                                    .comm = engine->comm,
                                    .encrypted = job->spec.data_tls,
                                    .order = &given->order,
                                    .incarnation = given->incarnation,
                                    .moves = feed.moves,
                                    .move_count = feed.move_count,
                                    .flats = {job->state.flats[0], job->state.flats[1], job->state.flats[2]},
                                    .gradient = gradient,
                                    .device = engine->device,
                                    .deadline_us = mu_clock_mono_us() + (uint64_t)engine->connect_timeout_ms * 1000,
                                    .reserve = reserve,
                                    .reserve_ctx = engine};
    if (status == MU_OK)
        status = mu_feed_new(&config, &feed.feed, err);
    if (status == MU_OK)
        *ret_feed = feed;
    else
        engine_feed_free(&feed);
    return status;
}

void engine_feed_free(struct engine_feed *feed)
{
    mu_feed_free(feed->feed);
    free(feed->moves);
    *feed = (struct engine_feed){0};
}

void engine_feeds_drop(struct mu_engine *engine)
{
    for (uint32_t i = 0; i < MU_FEED_PARTS_MAX; i++)
        engine_feed_free(&engine->feeds[i]);
    engine->feeds_hold = false;
}

/* The taker notices that its connection is gone, and says so; for the steps nothing has happened. */
static void check(struct engine_feed *given, enum mu_status status)
{
    if (status != MU_OK)
        engine_feed_free(given);
}

void engine_feeds_pump(struct mu_engine *engine)
{
    for (uint32_t i = 0; i < MU_FEED_PARTS_MAX && !engine->feeds_hold && !engine->feeds_busy; i++) {
        if (engine->feeds[i].feed)
            check(&engine->feeds[i], mu_feed_pump(engine->feeds[i].feed, engine->held.step, NULL));
    }
}

void engine_feeds_update(struct mu_engine *engine, const struct mu_step_result *result)
{
    engine->feeds_hold = engine->feeds_busy = true;
    for (uint32_t i = 0; i < MU_FEED_PARTS_MAX; i++) {
        if (!engine->feeds[i].feed)
            continue;
        MU_FAULT("worker.feed.update");
        check(&engine->feeds[i], mu_feed_update(engine->feeds[i].feed, result, NULL));
    }
    engine->feeds_busy = false;
}

/* What is fed is looked at beside the order of a device: the update must be made. */
static void await_update(struct mu_engine *engine)
{
    bool any = false;
    for (uint32_t i = 0; i < MU_FEED_PARTS_MAX; i++)
        any = any || engine->feeds[i].feed;
    if (any && mu_device_await(engine->device, mu_device_mark(engine->device)) != MU_OK)
        engine_feeds_drop(engine);
}

void engine_feeds_updated(struct mu_engine *engine)
{
    if (!engine->feeds_hold)
        return;
    engine->feeds_hold = false;
    await_update(engine);
    for (uint32_t i = 0; i < MU_FEED_PARTS_MAX; i++) {
        if (engine->feeds[i].feed)
            check(&engine->feeds[i], mu_feed_params(engine->feeds[i].feed, NULL));
    }
}

void engine_feeds_drain(struct mu_engine *engine)
{
    engine->feeds_busy = true;
    for (uint32_t i = 0; i < MU_FEED_PARTS_MAX; i++) {
        if (engine->feeds[i].feed)
            check(&engine->feeds[i], mu_feed_drain(engine->feeds[i].feed, NULL));
    }
    engine->feeds_busy = false;
}

void engine_feeds_end(struct mu_engine *engine)
{
    engine->feeds_busy = true;
    for (uint32_t i = 0; i < MU_FEED_PARTS_MAX; i++) {
        if (!engine->feeds[i].feed)
            continue;
        MU_FAULT("worker.feed.end");
        check(&engine->feeds[i], mu_feed_end(engine->feeds[i].feed, engine->held.step, NULL));
    }
    engine->feeds_busy = false;
}

/* Orders lie beside the mailbox: who steps does not look into that. */
static bool next_order(struct mu_engine *engine, struct engine_feed_order *out)
{
    pthread_mutex_lock(&engine->stop_lock);
    bool any = engine->feed_order_count > 0;
    if (any)
        *out = engine->feed_orders[--engine->feed_order_count];
    pthread_mutex_unlock(&engine->stop_lock);
    return any;
}

static bool is_own_share(const struct mu_engine *engine, const struct engine_feed_order *given)
{
    const struct engine_generation *now = &engine->now;
    uint32_t rank = given->order.role == MU_FEED_GIVE ? given->order.rank : given->order.taker;
    return given->generation == now->generation && rank == now->rank && !now->idle &&
           mu_layout_equal(&given->order.layout, &now->layout);
}

static void give(struct mu_engine *engine, const struct engine_feed_order *given)
{
    for (uint32_t i = 0; i < MU_FEED_PARTS_MAX; i++) {
        struct engine_feed *slot = &engine->feeds[i];
        if (slot->feed)
            continue;
        MU_FAULT("worker.feed.give");
        check(slot, engine_feed_open(engine, given, engine->job.stack[0], NULL, slot, NULL));
        return;
    } /* else: the taker waits in vain and says so */
}

void engine_feeds_boundary(struct mu_engine *engine)
{
    struct engine_feed_order given;
    while (next_order(engine, &given)) {
        if (is_own_share(engine, &given) && given.order.role == MU_FEED_GIVE)
            give(engine, &given);
        else if (is_own_share(engine, &given))
            engine_take(engine, &given);
    }
    await_update(engine);
}

static uint64_t turns(const struct mu_engine *engine)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < MU_FEED_PARTS_MAX; i++) {
        sum += engine->feeds[i].feed ? mu_feed_turns(engine->feeds[i].feed) : 0;
        sum += engine->take.feeds[i].feed ? mu_feed_turns(engine->take.feeds[i].feed) : 0;
    }
    return sum;
}

bool engine_feeds_idle(void *ctx)
{
    struct mu_engine *engine = ctx;
    uint64_t before = turns(engine);
    engine_feeds_pump(engine);
    engine_take_pump(engine, !engine->updating);
    return turns(engine) != before;
}
