/* State that is taken while a generation steps (worker/feed.h): a spare takes between two commands, a member between
 * two tiles and while it waits. It comes to parts of the spaces that nothing else touches: what a share has that is
 * stepped with is not fed. Only of chunks whose parameters are here already, moments alone come: the parameters that
 * their updates make as well are thrown away, since they come as ever. */
#include "worker/engine_internal.h"

#include <string.h>

#include "common/clock.h"
#include "common/fault.h"
#include "plan/memory.h"

static void copy_text(char out[MU_TEXT_SIZE], const char *text)
{
    size_t length = strnlen(text, MU_TEXT_SIZE - 1);
    memcpy(out, text, length);
    out[length] = 0;
}

static bool is_member(const struct engine_take *take)
{
    return take->given.order.taker != MU_LAYOUT_NOBODY;
}

static void post(struct mu_engine *engine, uint64_t number, enum mu_feed_state state, const char *text)
{
    struct mu_worker_event event = {.kind = MU_WE_FED, .fed = {.number = number, .state = state}};
    event.fed.held = engine_reported(engine);
    copy_text(event.fed.text, text);
    engine_post(engine, &event);
}

void engine_take_drop(struct mu_engine *engine)
{
    struct engine_take *take = &engine->take;
    for (uint32_t i = 0; i < MU_FEED_PARTS_MAX; i++)
        engine_feed_free(&take->feeds[i]);
    mu_space_free(take->gradient);
    mu_space_free(take->spoilt);
    *take = (struct engine_take){.busy = take->busy};
}

/* What has come is worth nothing: `held` never spoke of it. */
void engine_take_fail(struct mu_engine *engine, const char *text)
{
    uint64_t number = engine->take.given.order.number;
    if (number == 0)
        return;
    engine_take_drop(engine);
    post(engine, number, MU_FEED_FAILED, text);
}

/* ---- beginning ---- */

static enum mu_status commit(struct mu_space *space, const struct mu_chunk *chunk, struct mu_error *err)
{
    enum mu_status status = mu_space_commit(space, chunk->offset * sizeof(float), chunk->size * sizeof(float), err);
    return status == MU_ERR_NO_MEMORY ? mu_error_prefix(err, "state to be taken") : status;
}

/* Memory for one chunk, just before it comes: to back all of it at once would take long. */
static enum mu_status reserve(void *ctx, const struct mu_chunk *chunk, uint32_t kinds, struct mu_error *err)
{
    struct mu_engine *engine = ctx;
    struct mu_space **spaces = engine->job.state.spaces;
    enum mu_status status = MU_OK;
    if (kinds & MU_MOVE_PARAMS)
        status = commit(spaces[0], chunk, err);
    for (uint32_t i = 1; i < ENGINE_KINDS && status == MU_OK && kinds & MU_MOVE_MOMENTS; i++)
        status = commit(spaces[i], chunk, err);
    if (status == MU_OK && kinds & MU_MOVE_MOMENTS)
        status = commit(engine->take.gradient, chunk, err);
    if (status == MU_OK && kinds == MU_MOVE_MOMENTS)
        status = commit(engine->take.spoilt, chunk, err);
    return status;
}

/* A spare that was a member of an earlier generation: of what it holds only the memory is of use. */
static void drop_held(struct mu_engine *engine, const struct mu_feed_order *order)
{
    engine_state_free(&engine->job.incoming);
    memset(&engine->held, 0, sizeof engine->held);
    engine_release_unshared(engine, &order->next, order->next_rank);
}

static enum mu_status begin(struct mu_engine *engine, const struct engine_feed_order *given, struct mu_error *err)
{
    struct engine_take *take = &engine->take;
    size_t bytes = engine->job.model.flat_size * sizeof(float);
    engine_take_drop(engine);
    engine_forget_arrived(engine); /* this comes to the same places */
    take->given = *given;
    if (!is_member(take) && engine->held.has_state)
        drop_held(engine, &given->order);
    take->until_us = mu_clock_mono_us() + (uint64_t)engine->connect_timeout_ms * 1000;
    enum mu_status status = mu_space_new_on(engine->device, bytes, err, &take->gradient);
    return status == MU_OK ? mu_space_new_on(engine->device, bytes, err, &take->spoilt) : status;
}

static enum mu_status add_part(struct mu_engine *engine, const struct engine_feed_order *given, struct mu_error *err)
{
    struct engine_take *take = &engine->take;
    const struct mu_feed_order *order = &given->order;
    struct engine_feed *feed = &take->feeds[order->part];
    if (feed->feed || order->parts != take->given.order.parts)
        return mu_fail(err, MU_ERR_CONFLICT, "told twice of giver %u of a feed", order->part);
    enum mu_status status = engine_feed_open(engine, given, mu_space_base(take->gradient), reserve, feed, err);
    if (status != MU_OK)
        return status;
    take->here |= 1u << order->part;
    uint64_t need = mu_memory_feed_bytes(&engine->job.model, feed->moves, feed->move_count, true);
    return engine_check_memory(engine, MU_MEMORY_DEVICE, need, "state for the next generation", err);
}

void engine_take(struct mu_engine *engine, const struct engine_feed_order *given)
{
    struct mu_error err = {0};
    enum mu_status status = MU_OK;
    MU_FAULT("worker.feed.take");
    if (engine->phase == ENGINE_EMPTY) {
        engine_take_drop(engine);
        post(engine, given->order.number, MU_FEED_FAILED, "told to take a feed without a job");
        return;
    }
    if (engine->take.given.order.number != given->order.number)
        status = begin(engine, given, &err);
    if (status == MU_OK)
        status = add_part(engine, given, &err);
    if (status != MU_OK)
        engine_take_fail(engine, err.text);
}

/* ---- going on ---- */

static void replay(struct mu_engine *engine, struct mu_feed *feed, const struct mu_step_result *result)
{
    struct engine_take *take = &engine->take;
    struct mu_feed_range range;
    MU_FAULT("worker.feed.replay");
    struct mu_adamw adamw = engine_adamw(engine, result);
    engine_set_cancellable(engine, false);
    for (uint32_t i = 0; result->finite && mu_feed_range(feed, i, &range); i++) {
        float *params = range.kinds & MU_MOVE_PARAMS ? engine->job.state.flats[0] : mu_space_base(take->spoilt);
        if (range.kinds & MU_MOVE_MOMENTS)
            engine_update_with(engine, &adamw, range.offset, range.size, params, mu_space_base(take->gradient));
    }
    engine_set_cancellable(engine, true);
    mu_feed_applied(feed);
    if (take->result.step <= result->step)
        take->result = *result;
}

static uint32_t all_parts(const struct engine_take *take)
{
    return (1u << take->given.order.parts) - 1;
}

/* Once all givers have ended, and a member has parked where they have: held like any other state from here on. */
static void try_whole(struct mu_engine *engine)
{
    struct engine_take *take = &engine->take;
    struct mu_held *held = &engine->held;
    const struct mu_feed_order order = take->given.order;
    if (order.number == 0 || take->ended != all_parts(take) || (is_member(take) && engine->phase != ENGINE_PARKED))
        return;
    const struct mu_step_result result = take->result;
    uint64_t step = take->step;
    if (is_member(take) && (!held->has_state || held->step != step || held->shares[0].owned_only)) {
        engine_take_fail(engine, "the givers have parked at another step");
        return;
    }
    if (!is_member(take)) {
        *held = (struct mu_held){.has_state = true, .step = step};
        held->has_result = result.step + 1 == step;
        held->result = held->has_result ? result : held->result;
    }
    engine_take_drop(engine);
    held->shares[held->share_count++] = (struct mu_held_share){.layout = order.next, .rank = order.next_rank};
    engine->taken_whole = true;
    MU_FAULT("worker.feed.whole");
    post(engine, order.number, MU_FEED_WHOLE, "");
}

static bool end_part(struct mu_engine *engine, uint32_t part, uint64_t step)
{
    struct engine_take *take = &engine->take;
    if (take->ended && take->step != step) {
        engine_take_fail(engine, "the givers have parked at different steps");
        return false;
    }
    take->ended |= 1u << part;
    take->step = step;
    try_whole(engine);
    return take->given.order.number != 0;
}

/* Whatever one giver has sent. False: there is nothing more to look at. */
static bool pump_part(struct mu_engine *engine, uint32_t part, bool update)
{
    struct engine_take *take = &engine->take;
    struct mu_feed *feed = take->feeds[part].feed;
    struct mu_error err = {0};
    enum mu_feed_event event;
    struct mu_step_result result;
    for (uint32_t quiet = 0; quiet < 2;) { /* once more: what was asked for may be here by now */
        enum mu_status status = mu_feed_take(feed, &event, &result, &err);
        if (status != MU_OK) {
            engine_take_fail(engine, err.text);
            return false;
        }
        if (event == MU_FEED_EV_UPDATE && !update)
            return true;
        quiet = event == MU_FEED_EV_NONE ? quiet + 1 : 0;
        if (event != MU_FEED_EV_NONE)
            atomic_fetch_add_explicit(&engine->progress, 1, memory_order_relaxed);
        if (event == MU_FEED_EV_LIVE && (take->live |= 1u << part) == all_parts(take))
            post(engine, take->given.order.number, MU_FEED_LIVE, "");
        if (event == MU_FEED_EV_UPDATE)
            replay(engine, feed, &result);
        if (event == MU_FEED_EV_END)
            return end_part(engine, part, result.step);
    }
    return true;
}

void engine_take_pump(struct mu_engine *engine, bool update)
{
    struct engine_take *take = &engine->take;
    if (take->given.order.number == 0 || take->busy)
        return;
    if (take->here != all_parts(take) && mu_clock_mono_us() >= take->until_us) {
        engine_take_fail(engine, "not all givers were told");
        return;
    }
    take->busy = true;
    uint32_t due = take->here & ~take->ended;
    for (uint32_t part = 0; part < MU_FEED_PARTS_MAX; part++) {
        if (due >> part & 1 && !pump_part(engine, part, update))
            break;
    }
    take->busy = false;
}

/* ---- the end ---- */

void engine_take_parked(struct mu_engine *engine)
{
    try_whole(engine);
}

void engine_take_assigned(struct mu_engine *engine, const struct mu_assign *assign)
{
    struct mu_held *held = &engine->held;
    engine_take_drop(engine);
    if (engine->taken_whole && held->step == assign->start_step && engine_is_told_to_copy_held(engine, assign) &&
        --held->share_count == 0)
        memset(held, 0, sizeof *held);
    engine->taken_whole = false;
}
