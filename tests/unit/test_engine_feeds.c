/* links: mu_engine mu_storage mu_plan */
#include "engine_testing.h"

#include "plan/feeding.h"

/* A spare that was a member of an earlier generation gets the state of the present one while that steps: what it holds
 * makes room, in whatever layout it held it, and nobody hears of it again. */

enum { SPARE = 3 };

static void reference(uint8_t ret_sha[32])
{
    struct fleet *fleet = fleet_of(&small_gpt2);
    worker_start_on_cpu(fleet);
    start(fleet, 1);
    assert_int_equal(wait_parked(fleet, ret_sha), MU_PARK_FINISHED);
    fleet_free(fleet);
}

/* The members are as many as the layout has ranks. */
static void prepare(struct fleet *fleet, uint32_t members)
{
    assign(fleet, members);
    for (uint32_t rank = 0; rank < fleet->world; rank++)
        assert_int_equal(next_event(&fleet->workers[rank], 1u << MU_WE_PREPARED | 1u << MU_WE_PARKED)->kind,
                         MU_WE_PREPARED);
}

static void run_to(struct fleet *fleet, uint64_t step)
{
    pthread_mutex_lock(&fleet->lock);
    fleet->command = (struct command){.number = fleet->command.number + 1, .not_before_step = step, .park = true};
    pthread_mutex_unlock(&fleet->lock);
    for (uint32_t rank = 0; rank < fleet->world; rank++)
        assert_int_equal(mu_engine_run(fleet->workers[rank].engine, fleet->generation), MU_OK);
}

static void order(struct fleet *fleet, uint32_t worker, uint32_t other, enum mu_feed_role role,
                  const struct mu_feed_order *given)
{
    struct mu_feed_order one = *given;
    one.role = role;
    one.other = fleet->workers[other].incarnation;
    snprintf(one.address, sizeof one.address, "%s", mu_engine_address(fleet->workers[other].engine));
    assert_int_equal(
        mu_engine_feed(fleet->workers[worker].engine, fleet->generation, fleet->workers[worker].incarnation, &one),
        MU_OK);
}

/* Every rank of the present layout that has a part of what the spare is to hold gives it. */
static void feed_spare(struct fleet *fleet, const struct mu_layout *next, uint32_t next_rank)
{
    struct mu_model_spec model;
    mu_model_spec_init(&model, &fleet->spec.model);
    struct mu_feed_order given = {.number = MU_FEED_BIT | 16 * fleet->generation,
                                  .layout = fleet->layout,
                                  .taker = MU_LAYOUT_NOBODY,
                                  .next = *next,
                                  .next_rank = next_rank,
                                  .secret = "spare"};
    const struct mu_feeding feeding = {
        .from = &fleet->layout, .old_rank = MU_LAYOUT_NOBODY, .to = next, .rank = next_rank};
    struct mu_move *moves;
    uint32_t count, givers[MU_FEED_PARTS_MAX];
    assert_int_equal(mu_feeding_moves(&model, &feeding, &moves, &count), MU_OK);
    for (uint32_t i = 0; i < count; i++) {
        if (i == 0 || moves[i].from != moves[i - 1].from)
            givers[given.parts++] = moves[i].from;
    }
    free(moves);
    assert_true(given.parts > 0);
    for (given.part = 0; given.part < given.parts; given.part++) {
        given.rank = givers[given.part];
        order(fleet, SPARE, fleet->ranks[given.rank], MU_FEED_TAKE, &given);
        order(fleet, fleet->ranks[given.rank], SPARE, MU_FEED_GIVE, &given);
    }
}

static const struct mu_worker_event *wait_fed(struct fleet *fleet, enum mu_feed_state state)
{
    for (;;) {
        const struct mu_worker_event *event = next_event(&fleet->workers[SPARE], 1u << MU_WE_FED);
        if (event->fed.state == MU_FEED_FAILED && state != MU_FEED_FAILED)
            fail_msg("feed: %s", event->fed.text);
        if (event->fed.state == state)
            return event;
    }
}

/* Layouts by degrees: (tp, pp, dp) in which the spare held step 1, those who step on, and what it is to hold. */
struct history {
    uint32_t held[3], steps[3], next[3];
};

static void feed_over_older(const struct history *history, const uint8_t sha256[32])
{
    struct fleet *fleet = fleet_of(&small_gpt2);
    for (uint32_t i = 0; i <= SPARE; i++)
        worker_start(fleet);
    want_layout(fleet, history->held[0], history->held[1], history->held[2], 0);
    assert_int_equal(mu_layout_world(&fleet->wanted), SPARE + 1);
    prepare(fleet, 0xf);
    run_to(fleet, 1);
    assert_int_equal(wait_parked(fleet, NULL), MU_PARK_COMMAND);
    assert_true(held_of(&fleet->workers[SPARE]).has_state);
    /* The others have all that it has, and go on without it. */
    want_layout(fleet, history->steps[0], history->steps[1], history->steps[2], 0);
    prepare(fleet, (1u << mu_layout_world(&fleet->wanted)) - 1);
    struct mu_layout next = make_layout(history->next[0], history->next[1], history->next[2], 0, false, LAYERS);
    feed_spare(fleet, &next, SPARE);
    run_to(fleet, 5);
    assert_false(wait_fed(fleet, MU_FEED_LIVE)->fed.held.has_state); /* neither the old state nor, yet, the new one */
    const struct mu_worker_event *whole = wait_fed(fleet, MU_FEED_WHOLE);
    const struct mu_held held = whole->fed.held;
    assert_true(held.has_state && held.step == 5 && held.share_count == 1);
    assert_true(mu_layout_equal(&held.shares[0].layout, &next) && held.shares[0].rank == SPARE);
    assert_int_equal(wait_parked(fleet, NULL), MU_PARK_COMMAND);
    /* From here on it is a member like the others. */
    fleet->wanted = next;
    uint8_t sha[32];
    start(fleet, 0xf);
    assert_int_equal(wait_parked(fleet, sha), MU_PARK_FINISHED);
    assert_memory_equal(sha, sha256, 32);
    fleet_free(fleet);
}

static void test_feeds_spare_that_holds_an_older_state_same_bits(void **state)
{
    (void)state;
    static const struct history histories[] = {{{1, 1, 4}, {1, 1, 3}, {1, 1, 4}},
                                               {{1, 2, 2}, {1, 1, 3}, {2, 1, 2}},
                                               {{2, 1, 2}, {1, 2, 1}, {2, 2, 1}},
                                               {{1, 1, 4}, {2, 1, 1}, {1, 2, 2}}};
    uint8_t sha[32];
    reference(sha);
    for (size_t i = 0; i < sizeof histories / sizeof histories[0]; i++)
        feed_over_older(&histories[i], sha);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_feeds_spare_that_holds_an_older_state_same_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
