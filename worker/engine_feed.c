/* Feeds of state to spares, and from members (worker/feed.h): a giver's work is done between two tiles of its steps, a
 * taker's between two commands. */
#include "worker/engine_internal.h"

#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/fault.h"

static void copy_text(char out[MU_TEXT_SIZE], const struct mu_error *err)
{
    size_t length = strnlen(err->text, MU_TEXT_SIZE - 1);
    memcpy(out, err->text, length);
    out[length] = 0;
}

static enum mu_status open_feed(struct mu_engine *engine, const struct engine_feed_order *given,
                                const struct engine_runs *runs, struct mu_feed **ret_feed, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    struct mu_feed_config config = {.model = &job->model,
                                    .comm = engine->comm,
                                    .order = &given->order,
                                    .incarnation = given->incarnation,
                                    .runs = runs->runs,
                                    .run_count = runs->count,
                                    .flats = {job->state.flats[0], job->state.flats[1], job->state.flats[2]},
                                    .gradient = job->stack[0],
                                    .device = engine->device,
                                    .deadline_us = mu_clock_mono_us() + (uint64_t)engine->connect_timeout_ms * 1000};
    return mu_feed_new(&config, ret_feed, err);
}

/* ---- giver ---- */

void engine_feeds_drop(struct mu_engine *engine)
{
    for (uint32_t i = 0; i < ENGINE_FEEDS_MAX; i++) {
        mu_feed_free(engine->feeds[i].feed);
        engine->feeds[i].feed = NULL;
    }
}

/* The taker notices that its connection is gone, and says so; for the steps nothing has happened. */
static void check(struct engine_feed *given, enum mu_status status)
{
    if (status == MU_OK)
        return;
    mu_feed_free(given->feed);
    given->feed = NULL;
}

void engine_feeds_pump(struct mu_engine *engine)
{
    for (uint32_t i = 0; i < ENGINE_FEEDS_MAX && !engine->feeds_hold; i++) {
        if (engine->feeds[i].feed)
            check(&engine->feeds[i], mu_feed_pump(engine->feeds[i].feed, engine->held.step, NULL));
    }
}

void engine_feeds_update(struct mu_engine *engine, const struct mu_step_result *result)
{
    engine->feeds_hold = true;
    for (uint32_t i = 0; i < ENGINE_FEEDS_MAX; i++) {
        if (!engine->feeds[i].feed)
            continue;
        MU_FAULT("worker.feed.update");
        check(&engine->feeds[i], mu_feed_update(engine->feeds[i].feed, result, NULL));
    }
}

void engine_feeds_drain(struct mu_engine *engine)
{
    for (uint32_t i = 0; i < ENGINE_FEEDS_MAX; i++) {
        if (engine->feeds[i].feed)
            check(&engine->feeds[i], mu_feed_drain(engine->feeds[i].feed, NULL));
    }
}

void engine_feeds_end(struct mu_engine *engine)
{
    for (uint32_t i = 0; i < ENGINE_FEEDS_MAX; i++) {
        if (!engine->feeds[i].feed)
            continue;
        MU_FAULT("worker.feed.end");
        check(&engine->feeds[i], mu_feed_end(engine->feeds[i].feed, engine->held.step, NULL));
    }
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
    return given->generation == now->generation && given->order.rank == now->rank && !now->idle &&
           mu_layout_equal(&given->order.layout, &now->layout);
}

static void give(struct mu_engine *engine, const struct engine_feed_order *given)
{
    for (uint32_t i = 0; i < ENGINE_FEEDS_MAX; i++) {
        struct engine_feed *slot = &engine->feeds[i];
        if (slot->feed)
            continue;
        MU_FAULT("worker.feed.give");
        engine_runs_of(&engine->job.model, &engine->now.layout, engine->now.rank, MU_SHARE_PARAMS, &slot->runs);
        check(slot, open_feed(engine, given, &slot->runs, &slot->feed, NULL));
        return;
    } /* else: the taker waits in vain and says so */
}

void engine_feeds_boundary(struct mu_engine *engine)
{
    struct engine_feed_order given;
    engine->feeds_hold = false;
    while (next_order(engine, &given)) {
        bool whole = !engine->now.layout.sharded || engine->now.layout.dp == 1; /* all moments of the column are here */
        if (is_own_share(engine, &given) && whole)
            give(engine, &given);
    }
    bool any = false;
    for (uint32_t i = 0; i < ENGINE_FEEDS_MAX; i++)
        any = any || engine->feeds[i].feed;
    if (any && mu_device_await(engine->device, mu_device_mark(engine->device)) != MU_OK) /* the update is made */
        engine_feeds_drop(engine);
    engine_feeds_pump(engine);
}

/* ---- taker ---- */

static void post(struct mu_engine *engine, uint64_t number, enum mu_feed_state state, const struct mu_error *err)
{
    struct mu_worker_event event = {.kind = MU_WE_FED, .fed = {.number = number, .state = state}};
    event.fed.held = engine_reported(engine);
    if (err)
        copy_text(event.fed.text, err);
    engine_post(engine, &event);
}

/* What has come is worth nothing: `held` never spoke of it. */
static void fail(struct mu_engine *engine, const struct mu_error *err)
{
    uint64_t number = engine->taken.order.number;
    engine_take_drop(engine);
    post(engine, number, MU_FEED_FAILED, err);
}

void engine_take_drop(struct mu_engine *engine)
{
    mu_feed_free(engine->take.feed);
    engine->take.feed = NULL;
}

/* The assignment was made before it was known that the feed had ended: it counts this worker as empty. */
static void forget_untold(struct mu_engine *engine, const struct mu_assign *assign)
{
    if (engine->taken_whole && assign->source == MU_SOURCE_PEER && engine->held.step == assign->start_step)
        memset(&engine->held, 0, sizeof engine->held);
    engine->taken_whole = false;
}

void engine_feeds_assigned(struct mu_engine *engine, const struct mu_assign *assign)
{
    engine_feeds_drop(engine);
    engine_take_drop(engine);
    forget_untold(engine, assign);
}

void engine_take(struct mu_engine *engine, const struct engine_feed_order *given)
{
    struct mu_error err = {0};
    const struct mu_feed_order *order = &given->order;
    engine_take_drop(engine);
    engine->taken = *given;
    MU_FAULT("worker.feed.take");
    enum mu_status status = engine->phase == ENGINE_EMPTY || engine->held.has_state
                                ? mu_fail(&err, MU_ERR_CONFLICT, "told to take a feed without a job, or over a state")
                                : mu_layout_check(&order->layout, &engine->job.spec, &err);
    if (status == MU_OK)
        status = engine_commit_state(engine, &engine->job.state, &order->layout, order->rank, &err);
    if (status == MU_OK)
        status = engine_commit_stack(engine, 1, &order->layout, order->rank, &err);
    engine_runs_of(&engine->job.model, &order->layout, order->rank, MU_SHARE_PARAMS, &engine->take.runs);
    if (status == MU_OK)
        status = open_feed(engine, given, &engine->take.runs, &engine->take.feed, &err);
    if (status != MU_OK)
        fail(engine, &err);
}

static void replay(struct mu_engine *engine, const struct mu_step_result *result)
{
    uint64_t offset, size;
    MU_FAULT("worker.feed.replay");
    struct mu_adamw adamw = engine_adamw(engine, result);
    engine_set_cancellable(engine, false);
    for (uint32_t i = 0; result->finite && mu_feed_range(engine->take.feed, i, &offset, &size); i++)
        engine_update_range(engine, &adamw, offset, size);
    engine_set_cancellable(engine, true);
    mu_feed_applied(engine->take.feed);
    engine->taken_result = *result;
}

/* From here on it is held like any other state. */
static void end(struct mu_engine *engine, uint64_t step)
{
    struct mu_held *held = &engine->held;
    uint64_t number = engine->taken.order.number;
    engine_take_drop(engine);
    *held = (struct mu_held){.has_state = true, .step = step, .share_count = 1};
    held->has_result = engine->taken_result.step + 1 == step;
    held->result = held->has_result ? engine->taken_result : held->result;
    held->shares[0].layout = engine->taken.order.layout;
    held->shares[0].layout.idle = 0;
    held->shares[0].layout.buddy_shift = 0; /* what the giver mirrors was not fed */
    held->shares[0].rank = engine->taken.order.rank;
    engine->taken_whole = true;
    MU_FAULT("worker.feed.whole");
    post(engine, number, MU_FEED_WHOLE, NULL);
}

void engine_take_pump(struct mu_engine *engine)
{
    struct mu_error err = {0};
    enum mu_feed_event event;
    struct mu_step_result result;
    for (uint32_t quiet = 0; engine->take.feed && quiet < 2;) { /* once more: what was asked for may be here by now */
        enum mu_status status = mu_feed_take(engine->take.feed, &event, &result, &err);
        if (status != MU_OK) {
            fail(engine, &err);
            return;
        }
        quiet = event == MU_FEED_EV_NONE ? quiet + 1 : 0;
        if (event != MU_FEED_EV_NONE)
            atomic_fetch_add_explicit(&engine->progress, 1, memory_order_relaxed);
        if (event == MU_FEED_EV_LIVE)
            post(engine, engine->taken.order.number, MU_FEED_LIVE, NULL);
        if (event == MU_FEED_EV_UPDATE)
            replay(engine, &result);
        if (event == MU_FEED_EV_END)
            end(engine, result.step);
    }
}
