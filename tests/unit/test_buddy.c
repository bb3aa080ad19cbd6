/* links: mu_engine mu_storage mu_plan */
#include "engine_testing.h"

/* Engines whose state has one holder, with buddies: whoever vanishes at whatever instant, the others go on from the
 * newest step that anybody has reached, with the same weights. */

static uint8_t reference_sha[32];

static struct fleet *new_fleet(bool sharded, bool buddies)
{
    struct fleet *fleet = fleet_of(&small_gpt2);
    fleet->spec.parallel.optimizer_sharding = sharded;
    fleet->spec.parallel.redundancy = buddies ? MU_REDUNDANCY_BUDDY : MU_REDUNDANCY_NONE;
    return fleet;
}

static int setup_reference(void **state)
{
    (void)state;
    struct fleet *fleet = new_fleet(false, false);
    worker_start(fleet);
    start(fleet, 1);
    if (wait_parked(fleet, reference_sha) != MU_PARK_FINISHED)
        return -1;
    fleet_free(fleet);
    return 0;
}

static void check_finished(struct fleet *fleet)
{
    uint8_t sha[32];
    assert_int_equal(wait_parked(fleet, sha), MU_PARK_FINISHED);
    assert_memory_equal(sha, reference_sha, 32);
}

static void start_workers(struct fleet *fleet, uint32_t count)
{
    while (fleet->count < count)
        worker_start(fleet);
}

struct grid {
    uint32_t tp, pp, dp, idle, shift;
    bool sharded;
};

static const struct grid grids[] = {
    {1, 1, 2, 0, 1, true},  {1, 1, 3, 0, 1, true},  {1, 1, 3, 1, 2, true},  {2, 1, 2, 0, 1, true},
    {1, 2, 2, 0, 1, true},  {1, 2, 1, 0, 1, false}, {1, 3, 1, 0, 2, false}, {2, 1, 1, 0, 1, false},
    {4, 1, 1, 1, 2, false}, {2, 2, 1, 0, 1, false}, {2, 2, 1, 0, 2, false}, {1, 4, 1, 0, 3, true},
};

enum { GRIDS = sizeof grids / sizeof grids[0] };

static void want(struct fleet *fleet, const struct grid *grid)
{
    want_layout(fleet, grid->tp, grid->pp, grid->dp, grid->idle);
    fleet->wanted.buddy_shift = grid->shift;
}

static uint32_t working(const struct grid *grid)
{
    return grid->tp * grid->pp * grid->dp;
}

static void test_buddy_layouts_end_with_the_same_weights(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < GRIDS; i += SANITIZED ? 5 : 1) {
        struct fleet *fleet = new_fleet(grids[i].sharded, true);
        uint32_t count = working(&grids[i]) + grids[i].idle;
        start_workers(fleet, count);
        want(fleet, &grids[i]);
        start(fleet, (1u << count) - 1);
        check_finished(fleet);
        fleet_free(fleet);
    }
}

/* The newest step that the survivors have reached, or know that they can. */
static uint64_t newest_step(struct fleet *fleet, uint32_t victim)
{
    uint64_t newest = 0;
    for (uint32_t i = 0; i < fleet->count; i++) {
        struct mu_held held = held_of(&fleet->workers[i]);
        if (i != victim && held.has_state && held.step > newest)
            newest = held.step;
        if (i != victim && held.has_result && held.result.step + 1 > newest)
            newest = held.result.step + 1;
    }
    return newest;
}

/* Everybody is stopped when `who` reaches the point; the victim is gone; the others and a newcomer go on. Returns how
 * many ranks rolled forward. */
static uint32_t lose_one(const struct grid *grid, const struct grid *next, enum trigger_point point, uint32_t who,
                         uint32_t hits, uint32_t victim)
{
    struct fleet *fleet = new_fleet(grid->sharded, true);
    uint32_t count = working(grid) + grid->idle;
    start_workers(fleet, count);
    want(fleet, grid);
    set_trigger(fleet, point, who, hits);
    start(fleet, (1u << count) - 1);
    wait_revoked(fleet);
    set_trigger(fleet, TRIGGER_NONE, 0, 0);
    uint64_t newest = newest_step(fleet, victim);
    worker_stop(fleet, victim);
    forget_held(&fleet->workers[victim]);
    uint32_t members = ((1u << count) - 1) & ~(1u << victim), lines = fleet->ledger_count;
    while ((uint32_t)__builtin_popcount(members) < working(next) + next->idle)
        members |= 1u << worker_start(fleet);
    want(fleet, next);
    fleet->wanted.idle = (uint32_t)__builtin_popcount(members) - working(next);
    start(fleet, members);
    check_finished(fleet);
    for (uint32_t i = lines; i < fleet->ledger_count; i++)
        assert_true(fleet->ledger[i].step >= newest); /* nothing is computed again */
    uint32_t rolled = fleet->rolled_forward;
    fleet_free(fleet);
    return rolled;
}

static void test_buddy_any_loss_replays_nothing(void **state)
{
    (void)state;
    static const enum trigger_point points[] = {TRIGGER_LEAF, TRIGGER_VOTE, TRIGGER_APPLIED, TRIGGER_BOUNDARY};
    const char *text = getenv("MU_TEST_ALL_LAYOUTS");
    bool all = text && text[0] == '1';
    uint64_t seed = 5;
    uint32_t rolled = 0;
    for (uint32_t i = 0; i < GRIDS; i++) {
        for (uint32_t k = 0; k < 4; k++) {
            for (uint32_t victim = 0; victim < working(&grids[i]); victim++) {
                if (!all && (i + k + victim) % (SANITIZED ? 11 : 3))
                    continue;
                uint32_t who = (uint32_t)(mu_splitmix64(&seed) % working(&grids[i]));
                if (points[k] == TRIGGER_LEAF) /* the last stage reports leaves */
                    who = grids[i].tp * grids[i].dp * (grids[i].pp - 1);
                const struct grid *next = &grids[i];
                struct grid same = *next;
                if (mu_splitmix64(&seed) % 2) { /* another layout */
                    same = grids[mu_splitmix64(&seed) % GRIDS];
                    same.sharded = grids[i].sharded;
                    if (same.dp > 1 && !same.sharded)
                        same.shift = 0;
                }
                rolled += lose_one(&grids[i], &same, points[k], who, 2 + (uint32_t)(mu_splitmix64(&seed) % 3), victim);
            }
        }
    }
    /* Who knows a result and has not applied it when it is stopped rolls forward: a matter of microseconds, until it is
     * met. */
    for (uint32_t i = 0; !rolled && i < 500; i++) {
        const struct grid *grid = &grids[i % GRIDS];
        rolled += lose_one(grid, grid, TRIGGER_APPLIED, i % working(grid), 2 + i % 3, (i + 1) % working(grid));
    }
    assert_true(rolled > 0);
}

/* With a planner in charge and buddies chosen by hosts: one at a time dies, at any time, and nobody goes back. */
static void test_buddy_planned_losses_replay_nothing(void **state)
{
    (void)state;
    static const uint32_t degrees[][3] = {{1, 2, 1}, {2, 2, 1}, {1, 1, 0}, {1, 3, 1}, {2, 1, 2}};
    uint64_t seed = 31;
    for (uint32_t i = 0; i < (SANITIZED ? 3 : 10); i++) {
        bool sharded = degrees[i % 5][2] != 1 || i % 2;
        struct fleet *fleet = new_fleet(sharded, true);
        fleet->planned = true;
        fleet->spec.parallel.tp = degrees[i % 5][0];
        fleet->spec.parallel.pp = degrees[i % 5][1];
        fleet->spec.parallel.dp = degrees[i % 5][2];
        start_workers(fleet, 5);
        uint32_t members = 0x1f;
        for (uint32_t round = 0; round < 3; round++) {
            uint32_t lines = fleet->ledger_count;
            uint64_t newest = round ? newest_step(fleet, UINT32_MAX) : 0;
            assign(fleet, members);
            for (uint32_t rank = 0; rank < fleet->world; rank++)
                (void)next_event(&fleet->workers[fleet->ranks[rank]], 1u << MU_WE_PREPARED);
            assert_true(fleet->layout.buddy_shift > 0 || mu_layout_buddy_group(&fleet->layout) == 1);
            for (uint32_t rank = 0; rank < fleet->world; rank++)
                assert_int_equal(mu_engine_run(fleet->workers[fleet->ranks[rank]].engine, fleet->generation), MU_OK);
            usleep((useconds_t)(mu_splitmix64(&seed) % 15000));
            for (uint32_t rank = 0; rank < fleet->world; rank++)
                assert_int_equal(mu_engine_abort(fleet->workers[fleet->ranks[rank]].engine, fleet->generation), MU_OK);
            wait_revoked(fleet);
            for (uint32_t line = lines; line < fleet->ledger_count; line++)
                assert_true(fleet->ledger[line].step >= newest);
            uint32_t victim = fleet->ranks[mu_splitmix64(&seed) % mu_layout_working(&fleet->layout)];
            worker_stop(fleet, victim);
            forget_held(&fleet->workers[victim]);
            members &= ~(1u << victim);
            if (fleet->count < WORKERS_MAX)
                members |= 1u << worker_start(fleet);
        }
        start(fleet, members);
        check_finished(fleet);
        fleet_free(fleet);
    }
}

/* Both holders gone: without a checkpoint it begins again, and ends with the same weights. */
static void test_buddy_and_whom_it_guards_lost_goes_back(void **state)
{
    (void)state;
    struct fleet *fleet = new_fleet(true, true);
    start_workers(fleet, 4);
    want(fleet, &(struct grid){1, 1, 4, 0, 1, true});
    set_trigger(fleet, TRIGGER_BOUNDARY, 0, 3);
    start(fleet, 0xf);
    wait_revoked(fleet);
    set_trigger(fleet, TRIGGER_NONE, 0, 0);
    for (uint32_t i = 1; i < 3; i++) {
        worker_stop(fleet, i);
        forget_held(&fleet->workers[i]);
    }
    uint32_t lines = fleet->ledger_count;
    want(fleet, &(struct grid){1, 1, 2, 0, 1, true});
    start(fleet, 0x9);
    check_finished(fleet);
    assert_int_equal(fleet->ledger[lines].step, 0);
    fleet_free(fleet);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_buddy_layouts_end_with_the_same_weights),
        cmocka_unit_test(test_buddy_any_loss_replays_nothing),
        cmocka_unit_test(test_buddy_planned_losses_replay_nothing),
        cmocka_unit_test(test_buddy_and_whom_it_guards_lost_goes_back),
    };
    return cmocka_run_group_tests(tests, setup_reference, NULL);
}
