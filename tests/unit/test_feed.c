/* links: mu_state */
#include "comm_testing.h"

#include "tests/lib/sanitized.h"
#include "worker/feed.h"

/* A giver that steps, and a taker; the update is a sum that any slip of order or count shows in. */

enum { GIVE = 0, TAKE = 1, SIDES = 2, RUNS = 3 };

struct pair {
    struct mu_model_spec model;
    struct node nodes[SIDES];
    struct mu_feed_order order;
    struct mu_move moves[RUNS];
    struct mu_feed *feeds[SIDES];
    float *flats[SIDES][3], *gradients[SIDES];
    uint64_t step, taken_step; /* updates made by the giver; the taker's, by the last update or end */
    uint32_t updates;
    atomic_uint live; /* written by the taker's thread, looked at by the giver's */
    atomic_bool ended;
};

/* Sanitizers are many times slower, and the giver's patience with the taker is not. */
enum { CHANNELS = SANITIZED ? 64 : 192, STEPS = SANITIZED ? 20 : 60 };

static const struct mu_model_config config = {
    .family = MU_FAMILY_GPT2, .layers = 2, .heads = 2, .channels = CHANNELS, .context = 32, .vocab = 2048};

static struct pair *pair_new(void)
{
    struct pair *pair = calloc(1, sizeof *pair);
    struct mu_model_config checked = config;
    checked.kv_heads = checked.heads;
    checked.hidden = 4 * checked.channels;
    checked.slices = 1;
    mu_model_spec_init(&pair->model, &checked);
    size_t bytes = pair->model.flat_size * sizeof(float);
    for (int side = 0; side < SIDES; side++) {
        pair->gradients[side] = calloc(1, bytes);
        for (int flat = 0; flat < 3; flat++)
            pair->flats[side][flat] = calloc(1, bytes);
    }
    for (uint64_t i = 0; i < pair->model.flat_size; i++)
        for (int flat = 0; flat < 3; flat++)
            pair->flats[GIVE][flat][i] = (float)((i * 7 + (uint64_t)flat) % 1000);
    nodes_new(pair->nodes, SIDES, OVER_UNIX, (struct mu_comm_limits){0});
    pair->order = (struct mu_feed_order){.number = MU_FEED_BIT | 16 * 77, .parts = 1};
    /* Not all chunks: a hole, so that ranges matter. */
    uint32_t chunks = pair->model.chunk_count, half = chunks / 2, last = chunks - chunks / 4;
    pair->moves[0] = (struct mu_move){.kinds = MU_MOVE_PARAMS | MU_MOVE_MOMENTS, .run = {0, half}};
    pair->moves[1] = (struct mu_move){.kinds = MU_MOVE_MOMENTS, .run = {half + 1, last - half - 1}};
    pair->moves[2] = (struct mu_move){.kinds = MU_MOVE_PARAMS, .run = {last, chunks - last}};
    pair->step = 5;
    return pair;
}

static void open_side(struct pair *pair, int side)
{
    struct mu_feed_order order = pair->order;
    struct mu_error err = {0};
    order.role = side == GIVE ? MU_FEED_GIVE : MU_FEED_TAKE;
    order.other = pair->nodes[1 - side].incarnation;
    snprintf(order.address, sizeof order.address, "%s", mu_comm_address(pair->nodes[1 - side].comm));
    struct mu_feed_config feed = {.model = &pair->model,
                                  .comm = pair->nodes[side].comm,
                                  .order = &order,
                                  .incarnation = pair->nodes[side].incarnation,
                                  .moves = pair->moves,
                                  .move_count = RUNS,
                                  .flats = {pair->flats[side][0], pair->flats[side][1], pair->flats[side][2]},
                                  .gradient = pair->gradients[side],
                                  .deadline_us = soon()};
    assert_int_equal(mu_feed_new(&feed, &pair->feeds[side], &err), MU_OK);
}

static void pair_free(struct pair *pair)
{
    for (int side = 0; side < SIDES; side++) {
        mu_feed_free(pair->feeds[side]);
        free(pair->gradients[side]);
        for (int flat = 0; flat < 3; flat++)
            free(pair->flats[side][flat]);
    }
    nodes_free(pair->nodes, SIDES);
    free(pair);
}

/* The taker has parameters of its own where it gets moments alone. */
static void update(struct pair *pair, int side, uint64_t offset, uint64_t size, uint32_t kinds, double norm)
{
    for (uint64_t i = offset; i < offset + size; i++) {
        pair->flats[side][1][i] += pair->gradients[side][i];
        pair->flats[side][2][i] = pair->flats[side][2][i] / 2 + (float)norm;
        if (kinds & MU_MOVE_PARAMS)
            pair->flats[side][0][i] += pair->flats[side][1][i] - pair->flats[side][2][i];
    }
}

static enum mu_status take_all(struct pair *pair, struct mu_error *err)
{
    enum mu_feed_event event;
    struct mu_step_result result;
    for (int quiet = 0; quiet < 2 && !pair->ended;) {
        enum mu_status status = mu_feed_take(pair->feeds[TAKE], &event, &result, err);
        if (status != MU_OK)
            return status;
        quiet = event == MU_FEED_EV_NONE ? quiet + 1 : 0;
        pair->live += event == MU_FEED_EV_LIVE;
        pair->ended = event == MU_FEED_EV_END;
        if (pair->ended)
            pair->taken_step = result.step;
        if (event != MU_FEED_EV_UPDATE)
            continue;
        struct mu_feed_range range;
        for (uint32_t i = 0; result.finite && mu_feed_range(pair->feeds[TAKE], i, &range); i++)
            if (range.kinds & MU_MOVE_MOMENTS)
                update(pair, TAKE, range.offset, range.size, range.kinds, result.grad_norm);
        mu_feed_applied(pair->feeds[TAKE]);
        pair->updates++;
        pair->taken_step = result.step + 1;
    }
    return MU_OK;
}

/* The giver's waits are for the taker, who here runs on another thread. */
static void *taker_main(void *arg)
{
    struct pair *pair = arg;
    struct mu_error err = {0};
    for (uint64_t deadline_us = soon(); !pair->ended && mu_clock_mono_us() < deadline_us;) {
        if (take_all(pair, &err) != MU_OK)
            return NULL;
    }
    return NULL;
}

static void give_step(struct pair *pair, int pumps, bool finite)
{
    struct mu_error err = {0};
    for (int i = 0; i < pumps; i++)
        assert_int_equal(mu_feed_pump(pair->feeds[GIVE], pair->step, &err), MU_OK);
    assert_int_equal(mu_feed_drain(pair->feeds[GIVE], &err), MU_OK);
    for (uint64_t i = 0; i < pair->model.flat_size; i++)
        pair->gradients[GIVE][i] = (float)((i + 13 * pair->step) % 17);
    struct mu_step_result result = {.step = pair->step, .grad_norm = (double)(pair->step % 5), .finite = finite};
    assert_int_equal(mu_feed_update(pair->feeds[GIVE], &result, &err), MU_OK);
    if (finite)
        update(pair, GIVE, 0, pair->model.flat_size, MU_MOVE_PARAMS, result.grad_norm);
    pair->step++;
    assert_int_equal(mu_feed_params(pair->feeds[GIVE], &err), MU_OK);
}

static void expect_same_in_runs(const struct pair *pair)
{
    for (int run = 0; run < RUNS; run++) {
        const struct mu_move *move = &pair->moves[run];
        for (uint32_t c = move->run.first; c < move->run.first + move->run.count; c++) {
            struct mu_chunk chunk = mu_model_chunk(&pair->model, c);
            for (int flat = 0; flat < 3; flat++)
                if (move->kinds & (flat == 0 ? MU_MOVE_PARAMS : MU_MOVE_MOMENTS))
                    assert_memory_equal(pair->flats[TAKE][flat] + chunk.offset, pair->flats[GIVE][flat] + chunk.offset,
                                        chunk.size * sizeof(float));
        }
    }
    struct mu_chunk alone = mu_model_chunk(&pair->model, pair->moves[1].run.first);
    for (uint64_t i = alone.offset; i < alone.offset + alone.size; i++)
        assert_true(pair->flats[TAKE][0][i] == 0); /* only its moments were fed */
}

static void test_feed_while_stepping_same_state_at_the_end(void **state)
{
    (void)state;
    for (int pumps = 1; pumps <= 40; pumps += 13) {
        struct pair *pair = pair_new();
        struct mu_error err = {0};
        pthread_t taker;
        open_side(pair, TAKE);
        open_side(pair, GIVE);
        assert_int_equal(pthread_create(&taker, NULL, taker_main, pair), 0);
        for (int i = 0; i < STEPS; i++)
            give_step(pair, pumps, i % 7 != 3);
        for (uint64_t deadline_us = soon(); pair->live == 0 && mu_clock_mono_us() < deadline_us;)
            give_step(pair, pumps, true);
        assert_int_equal(mu_feed_drain(pair->feeds[GIVE], &err), MU_OK);
        assert_int_equal(mu_feed_end(pair->feeds[GIVE], pair->step, &err), MU_OK);
        for (uint64_t deadline_us = soon(); !pair->ended && mu_clock_mono_us() < deadline_us;)
            mu_comm_progress(pair->nodes[GIVE].comm);
        pthread_join(taker, NULL);
        assert_true(pair->ended);
        assert_int_equal(pair->live, 1);
        assert_int_equal(pair->taken_step, pair->step);
        assert_true(pair->updates > 0);
        expect_same_in_runs(pair);
        pair_free(pair);
    }
}

static void test_feed_ended_before_it_was_whole_is_refused(void **state)
{
    (void)state;
    struct pair *pair = pair_new();
    struct mu_error err = {0};
    open_side(pair, TAKE);
    open_side(pair, GIVE);
    enum mu_status status = MU_OK;
    assert_int_equal(mu_feed_end(pair->feeds[GIVE], pair->step, &err), MU_OK);
    for (uint64_t deadline_us = soon(); status == MU_OK && mu_clock_mono_us() < deadline_us;) {
        mu_comm_progress(pair->nodes[GIVE].comm);
        status = take_all(pair, &err);
    }
    assert_int_equal(status, MU_ERR_CORRUPT);
    assert_non_null(strstr(err.text, "does not follow"));
    pair_free(pair);
}

static void test_feed_giver_does_not_wait_for_ever(void **state)
{
    (void)state;
    struct pair *pair = pair_new();
    struct mu_error err = {0};
    open_side(pair, TAKE);
    open_side(pair, GIVE);
    for (uint64_t deadline_us = soon(); mu_clock_mono_us() < deadline_us;) { /* connected, then nothing is taken */
        mu_comm_progress(pair->nodes[TAKE].comm);
        assert_int_equal(mu_feed_pump(pair->feeds[GIVE], pair->step, &err), MU_OK);
        if (mu_feed_range(pair->feeds[GIVE], 0, &(struct mu_feed_range){0}))
            break;
    }
    uint64_t begun_us = mu_clock_mono_us();
    struct mu_step_result result = {.step = pair->step, .finite = true};
    assert_int_equal(mu_feed_update(pair->feeds[GIVE], &result, &err), MU_ERR_TIMEOUT);
    assert_true(mu_clock_mono_us() - begun_us >= MU_FEED_PATIENCE_MS * 900ull);
    pair_free(pair);
}

static void test_feed_stands_beside_the_generations(void **state)
{
    (void)state;
    struct pair *pair = pair_new();
    open_side(pair, TAKE);
    open_side(pair, GIVE);
    nodes_open(pair->nodes, SIDES, 3); /* a feed's number makes no generation stale, nor does its end cancel it */
    mu_comm_abort(pair->nodes[GIVE].comm, 3);
    DRIVE_UNTIL(pair->nodes, SIDES,
                mu_feed_pump(pair->feeds[GIVE], 0, NULL) == MU_OK &&
                    mu_feed_range(pair->feeds[GIVE], 0, &(struct mu_feed_range){0}));
    pair_free(pair);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_feed_while_stepping_same_state_at_the_end),
        cmocka_unit_test(test_feed_ended_before_it_was_whole_is_refused),
        cmocka_unit_test(test_feed_giver_does_not_wait_for_ever),
        cmocka_unit_test(test_feed_stands_beside_the_generations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
