/* links: mu_coordinator mu_worker_core mu_wire mu_plan m */
/* Both cores with workers of unequal speed: leaves follow it while the job steps, soon, once, and not for noise; a
 * spare takes the place of one that is too slow for that. Noise is seeded, and time is the box's. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "common/rng.h"
#include "core_testing.h"

enum { WORKERS = 4, LEAVES = 64, LEAF_US = 10000, SEEDS = 24 };

/* How fast everybody is, and how much it varies from step to step. */
struct pace {
    double slowness[BOX_WORKERS_MAX];
    double noise;
    uint64_t seed;
};

static double uniform(uint64_t *seed)
{
    return ((double)(mu_splitmix64(seed) >> 11) + 0.5) * 0x1p-53;
}

static double normal(uint64_t *seed)
{
    double radius = sqrt(-2 * log(uniform(seed)));
    return radius * cos(2 * 3.14159265358979323846 * uniform(seed));
}

static void start(struct box *box, uint32_t workers, uint32_t spares, uint32_t tp, bool sharded)
{
    struct mu_job_spec spec;
    box_spec(&spec, tp, 1);
    spec.batch.sequences = LEAVES;
    spec.steps = 100000;
    spec.parallel.optimizer_sharding = sharded;
    spec.workers.spares = spares;
    box_init(box, &spec);
    for (uint32_t i = 0; i < workers; i++)
        box_add_worker(box, i);
    box_settle(box);
    box_advance(box, 300);
    assert_true(box_all_run(box));
    box->events[0] = 0;
}

/* Seconds of a step without noise: those of the slowest. */
static double step_s(const struct box *box, const struct pace *pace)
{
    double slowest = 0;
    for (uint32_t i = 0; i < BOX_WORKERS_MAX; i++)
        if (box->workers[i].running)
            slowest = fmax(slowest, pace->slowness[i] * box->workers[i].leaves * LEAF_US * 1e-6);
    return slowest;
}

static void train(struct box *box, struct pace *pace, int steps)
{
    for (int step = 0; step < steps; step++) {
        for (uint32_t i = 0; i < BOX_WORKERS_MAX; i++)
            box->workers[i].leaf_us =
                (uint32_t)(LEAF_US * pace->slowness[i] * fmax(0.1, 1 + pace->noise * normal(&pace->seed)));
        double seconds = step_s(box, pace);
        box->step_us = (uint32_t)(seconds * 1e6);
        assert_true(box_train(box, 100000));
        box_advance(box, (uint32_t)(seconds * 1e3));
    }
}

static struct pace even_pace(double noise, uint64_t seed)
{
    struct pace pace = {.noise = noise, .seed = seed};
    for (uint32_t i = 0; i < BOX_WORKERS_MAX; i++)
        pace.slowness[i] = 1;
    return pace;
}

static uint32_t moves_told(const struct box *box)
{
    uint32_t count = 0;
    for (const char *at = box->events; (at = strstr(at, "leaves_moved")) != NULL; at++)
        count++;
    return count;
}

/* One of four becomes half as fast: within 20 steps 80 % of what can be had is had again, and then all stays, also
 * while times vary by 5 %. When it is well again, so are the counts. */
static void test_leaves_leave_a_slow_worker(void **state)
{
    (void)state;
    static struct box box;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        struct pace pace = even_pace(0.05, seed);
        start(&box, WORKERS, 0, 1, seed % 2);
        train(&box, &pace, 60);
        assert_int_equal(moves_told(&box), 0);
        double even_s = step_s(&box, &pace), generation = (double)box_view(&box).generation;
        uint32_t slow = (uint32_t)(seed % WORKERS);
        pace.slowness[slow] = 2;
        double slow_s = step_s(&box, &pace), best_s = LEAVES * LEAF_US * 1e-6 / (WORKERS - 0.5);
        train(&box, &pace, 20);
        double regained = (slow_s - step_s(&box, &pace)) / (slow_s - best_s);
        if (regained < 0.8)
            fail_msg("seed %llu: %.0f %% regained\n%s", (unsigned long long)seed, 100 * regained, box.events);
        assert_in_range(moves_told(&box), 1, 2);
        box.events[0] = 0;
        train(&box, &pace, 200);
        assert_in_range(moves_told(&box), 0, 2);
        assert_true((slow_s - step_s(&box, &pace)) / (slow_s - best_s) >= 0.8);
        pace.slowness[slow] = 1;
        train(&box, &pace, 400);
        assert_true(step_s(&box, &pace) <= even_s * 1.07);
        assert_true(box_view(&box).replayed_steps == 0 && (double)box_view(&box).generation > generation);
        box_fini(&box);
    }
}

static void test_noise_moves_nothing(void **state)
{
    (void)state;
    static struct box box;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        struct pace pace = even_pace(0.1, 100 + seed);
        start(&box, WORKERS, 0, 1, false);
        uint64_t generation = box_view(&box).generation;
        train(&box, &pace, 400);
        if (moves_told(&box) > 0 || box_view(&box).generation != generation)
            fail_msg("seed %llu:\n%s", (unsigned long long)seed, box.events);
        box_fini(&box);
    }
}

/* Little is left to do: nothing is moved that does not pay for the change. */
static void test_leaves_stay_near_the_end(void **state)
{
    (void)state;
    static struct box box;
    struct mu_job_spec spec;
    struct pace pace = even_pace(0, 1);
    box_spec(&spec, 1, 1);
    spec.batch.sequences = LEAVES;
    spec.steps = 26;
    box_init(&box, &spec);
    for (uint32_t i = 0; i < WORKERS; i++)
        box_add_worker(&box, i);
    box_settle(&box);
    box_advance(&box, 300);
    for (int step = 0; step < 25; step++) { /* half a second is saved in all, a change takes one */
        pace.slowness[1] = step < 21 ? 1 : 2;
        train(&box, &pace, 1);
    }
    assert_int_equal(moves_told(&box), 0);
    box_fini(&box);
}

static uint32_t rank_of(struct box *box, uint32_t worker)
{
    struct box_worker *w = &box->workers[worker];
    return w->running ? w->rank : UINT32_MAX;
}

/* One of two, or of a tensor group, is four times as slow, and there is a spare: it gets the place, and the slow one is
 * the spare. It works again when there are too few others. */
static void test_a_spare_relieves_a_slow_worker(void **state)
{
    (void)state;
    static struct box box;
    for (int kind = 0; kind < 3; kind++) {
        uint32_t tp = kind == 2 ? 2 : 1;
        struct pace pace = even_pace(0.05, 7);
        start(&box, 3, 1, tp, kind == 1);
        train(&box, &pace, 20);
        uint32_t slow = rank_of(&box, 0) == 0 ? 0 : rank_of(&box, 1) == 0 ? 1 : 2;
        double even_s = step_s(&box, &pace);
        pace.slowness[slow] = 4;
        train(&box, &pace, 100);
        if (!box_said(&box, "worker_demoted: worker"))
            fail_msg("kind %d:\n%s", kind, box.events);
        assert_int_equal(rank_of(&box, slow), UINT32_MAX);
        assert_true(step_s(&box, &pace) <= even_s * 1.01 && box_view(&box).replayed_steps == 0);
        uint64_t generation = box_view(&box).generation;
        train(&box, &pace, 200);
        assert_int_equal(box_view(&box).generation, generation);
        box_kill_worker(&box, slow == 0 ? 1 : 0);
        box_settle(&box);
        box_advance(&box, 8000);
        assert_true(box_all_run(&box));
        assert_int_equal(rank_of(&box, slow) != UINT32_MAX, tp == 2); /* otherwise one works, and one is the spare */
        box_fini(&box);
    }
}

/* Without a spare there is no relief but leaves; where these are enough the spare waits. */
static void test_a_spare_waits_where_leaves_are_enough(void **state)
{
    (void)state;
    static struct box box;
    struct pace pace = even_pace(0, 3);
    start(&box, WORKERS + 1, 1, 1, false);
    train(&box, &pace, 20);
    uint32_t slow = rank_of(&box, 0) == UINT32_MAX ? 1 : 0;
    pace.slowness[slow] = 1.5;
    train(&box, &pace, 300);
    assert_true(box_said(&box, "leaves_moved") && !box_said(&box, "worker_demoted"));
    box_fini(&box);
    start(&box, 2, 0, 1, false);
    pace.slowness[0] = 5;
    train(&box, &pace, 300);
    assert_true(box_said(&box, "leaves_moved") && !box_said(&box, "worker_demoted"));
    box_fini(&box);
}

static bool works(struct box *box, uint32_t worker)
{
    return rank_of(box, worker) != UINT32_MAX;
}

static void heal(struct box *box)
{
    box_settle(box);
    box_advance(box, 8000);
    assert_true(box_all_run(box));
}

static void restart(struct box *box)
{
    box_kill_coord(box);
    box_start_coord(box);
    heal(box);
}

static enum mu_status ask(struct box *box, enum mu_coord_event_kind kind, const char *name)
{
    struct mu_coord_event event = {.kind = kind};
    event.request.cookie = 7;
    event.request.worker = event.request.node = name;
    event.request.order = MU_NODE_RESUME;
    event.request.by = "alice";
    box_step(box, &event);
    return box->reply;
}

/* Two of five work, of whom w0 is slow, until w0's place is a spare's. */
static void begin_demoted(struct box *box, struct pace *pace)
{
    struct mu_job_spec spec;
    box_spec(&spec, 1, 1);
    spec.batch.sequences = LEAVES;
    spec.steps = 100000;
    spec.workers.max = 2;
    box_init(box, &spec);
    for (uint32_t i = 0; i < 5; i++)
        box_add_worker(box, i);
    heal(box);
    assert_true(works(box, 0) && works(box, 1));
    pace->slowness[0] = 4;
    train(box, pace, 200);
    if (works(box, 0) || !box_said(box, "worker_demoted: worker w0"))
        fail_msg("%s", box->events);
    box->events[0] = 0;
}

/* Whoever is lost, spares that are not known to be slow come first: also after a restart of the coordinator, and for
 * one whose stream broke. */
static void test_a_demoted_worker_stays_behind_over_restarts(void **state)
{
    (void)state;
    static struct box box;
    struct pace pace = even_pace(0.05, 9);
    begin_demoted(&box, &pace);
    restart(&box);
    for (uint32_t i = 1; i < 4; i++) {
        train(&box, &pace, 10);
        if (i == 2) {
            box_put(&box, BOX_DISCONNECT, 0)->session = box.workers[0].session;
            heal(&box);
        }
        uint32_t lost = works(&box, i) ? i : 4;
        box_kill_worker(&box, lost);
        heal(&box);
        assert_int_equal(works(&box, 0), i == 3); /* there are too few others */
    }
    train(&box, &pace, 40);
    restart(&box);
    train(&box, &pace, 40);
    assert_false(box_said(&box, "worker_restored"));
    box.events[0] = 0;
    box_add_worker(&box, 8); /* now there are enough */
    heal(&box);
    train(&box, &pace, 200);
    assert_true(!works(&box, 0) && works(&box, 8) && box_said(&box, "spare w8 takes its place"));
    box_fini(&box);
}

/* One that is measured to be as fast as the others, or of which an operator says so, is like any other. */
static void test_a_demoted_worker_comes_back(void **state)
{
    (void)state;
    static struct box box;
    for (int way = 0; way < 3; way++) {
        struct pace pace = even_pace(0.05, 10);
        begin_demoted(&box, &pace);
        pace.slowness[0] = 1;
        train(&box, &pace, 50);
        assert_false(works(&box, 0) || box_said(&box, "worker_restored")); /* nobody has looked */
        if (way == 1) {
            assert_int_equal(ask(&box, MU_CE_UNDRAIN, "w0"), MU_OK);
            assert_int_equal(ask(&box, MU_CE_UNDRAIN, "w0"), MU_ERR_NOT_FOUND);
        } else if (way == 2) {
            assert_int_equal(ask(&box, MU_CE_NODE, "host0"), MU_OK);
        }
        assert_int_equal(box_said(&box, "worker_restored: worker w0"), way > 0);
        for (uint32_t i = 1; i < 5; i++) { /* until w0 works again */
            if (!works(&box, i) || works(&box, 0))
                continue;
            box_kill_worker(&box, i);
            heal(&box);
            i = 0;
        }
        train(&box, &pace, 20);
        assert_true(works(&box, 0) && box_said(&box, "worker_restored: worker w0"));
        box.events[0] = 0;
        box_add_worker(&box, 8);
        heal(&box);
        train(&box, &pace, 200);
        assert_true(works(&box, 0) && !box_said(&box, "worker_demoted"));
        box_fini(&box);
    }
}

/* Of two slow ones with a spare between them each is demoted once: they do not take turns. */
static void test_slow_workers_do_not_take_turns(void **state)
{
    (void)state;
    static struct box box;
    struct pace pace = even_pace(0.05, 11);
    begin_demoted(&box, &pace);
    uint32_t second = works(&box, 2) ? 2 : works(&box, 3) ? 3 : 4;
    for (uint32_t i = 2; i < 5; i++)
        pace.slowness[i] = 4;
    train(&box, &pace, 2000);
    uint32_t demoted = 0;
    for (const char *at = box.events; (at = strstr(at, "worker_demoted")) != NULL; at++)
        demoted++;
    assert_int_equal(demoted,
                     2); /* w0 before; now two of the three others, and none is left to take the third's place */
    assert_true(!works(&box, 0) && !works(&box, second) && works(&box, 1));
    box_fini(&box);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_leaves_leave_a_slow_worker),
        cmocka_unit_test(test_noise_moves_nothing),
        cmocka_unit_test(test_leaves_stay_near_the_end),
        cmocka_unit_test(test_a_spare_relieves_a_slow_worker),
        cmocka_unit_test(test_a_spare_waits_where_leaves_are_enough),
        cmocka_unit_test(test_a_demoted_worker_stays_behind_over_restarts),
        cmocka_unit_test(test_a_demoted_worker_comes_back),
        cmocka_unit_test(test_slow_workers_do_not_take_turns),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
