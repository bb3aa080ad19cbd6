/* links: mu_plan */
#include "plan/plan.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum { MEMBERS = 100 };

static struct mu_job_spec make_spec(uint32_t leaves, uint32_t min, uint32_t max, uint32_t spares)
{
    struct mu_job_spec spec;
    mu_job_spec_init(&spec);
    spec.batch.sequences = leaves;
    spec.batch.micro = spec.batch.accumulate = 1;
    spec.workers.min = min;
    spec.workers.max = max;
    spec.workers.spares = spares;
    return spec;
}

struct fixture {
    struct mu_job_spec spec;
    struct mu_plan_member members[MEMBERS];
    struct mu_plan_rank ranks[MEMBERS];
    struct mu_plan_input input;
    struct mu_plan plan;
};

static void setup(struct fixture *f, uint32_t members, uint32_t leaves, uint32_t min, uint32_t max)
{
    memset(f, 0, sizeof *f);
    f->spec = make_spec(leaves, min, max, 0);
    f->input = (struct mu_plan_input){
        .spec = &f->spec, .members = f->members, .member_count = members, .may_initialise = true};
    f->plan.ranks = f->ranks;
    for (uint32_t i = 0; i < members; i++)
        f->members[i].old_rank = UINT32_MAX;
}

static struct mu_step_result result_of(uint64_t step)
{
    return (struct mu_step_result){.step = step, .loss = 2.5, .grad_norm = 0.5 + (double)step, .finite = true};
}

/* At boundary `step`, with the result of the update that led there. */
static struct mu_held at(uint64_t step)
{
    struct mu_held held = {.has_state = true, .step = step};
    if (step > 0) {
        held.has_result = true;
        held.result = result_of(step - 1);
    }
    return held;
}

static void test_world_size(void **state)
{
    (void)state;
    struct mu_job_spec spec = make_spec(8, 2, 6, 0);
    assert_int_equal(mu_plan_world(&spec, 1), 0);
    assert_int_equal(mu_plan_world(&spec, 2), 2);
    assert_int_equal(mu_plan_world(&spec, 6), 6);
    assert_int_equal(mu_plan_world(&spec, 50), 6);
    spec.workers.max = 50;
    assert_int_equal(mu_plan_world(&spec, 50), 8); /* never more than leaves */
    spec.workers.spares = 2;
    assert_int_equal(mu_plan_world(&spec, 5), 3);
    assert_int_equal(mu_plan_world(&spec, 3), 2); /* training comes before spares */
}

static void test_neighbours_of_a_tree_are_symmetric_and_bounded(void **state)
{
    (void)state;
    static const uint32_t worlds[] = {33, 64, 100, 1000, 65536};
    for (size_t k = 0; k < sizeof worlds / sizeof worlds[0]; k++) {
        uint32_t world = worlds[k], edges = 0;
        for (uint32_t rank = 0; rank < world; rank++) {
            uint32_t mine[MU_NEIGHBOURS_MAX], theirs[MU_NEIGHBOURS_MAX];
            uint32_t count = mu_plan_neighbours(world, false, rank, mine);
            assert_true(count >= 1 && count <= 18);
            for (uint32_t i = 0; i < count; i++) {
                assert_true(mine[i] < world && mine[i] != rank && (i == 0 || mine[i] > mine[i - 1]));
                uint32_t their_count = mu_plan_neighbours(world, false, mine[i], theirs), found = 0;
                for (uint32_t j = 0; j < their_count; j++)
                    found += theirs[j] == rank;
                assert_int_equal(found, 1);
                edges++;
            }
            /* Every rank but the root has exactly one neighbour below itself: the graph is a tree. */
            assert_true(rank == 0 ? mine[0] > 0 : mine[0] < rank);
            assert_true(rank == 0 || count < 2 || mine[1] > rank);
        }
        assert_int_equal(edges, 2 * (world - 1));
    }
}

static void test_leaf_ranges_tile(void **state)
{
    (void)state;
    for (uint32_t leaves = 1; leaves < 70; leaves++) {
        for (uint32_t world = 1; world <= leaves; world++) {
            uint32_t next = 0, count;
            for (uint32_t rank = 0; rank < world; rank++) {
                assert_int_equal(mu_plan_leaf_range(leaves, world, NULL, rank, &count), next);
                assert_true(count == leaves / world || count == leaves / world + 1);
                next += count;
            }
            assert_int_equal(next, leaves);
        }
    }
    static const uint32_t counts[] = {3, 1, 4};
    uint32_t count;
    assert_int_equal(mu_plan_leaf_range(8, 3, counts, 2, &count), 4);
    assert_int_equal(count, 4);
}

static void test_fresh_job_initialises_everywhere(void **state)
{
    (void)state;
    struct fixture f;
    setup(&f, 3, 8, 1, 64);
    mu_plan_make(&f.input, &f.plan);
    assert_int_equal(f.plan.status, MU_OK);
    assert_int_equal(f.plan.world, 3);
    assert_int_equal(f.plan.start_step, 0);
    for (uint32_t r = 0; r < 3; r++) {
        assert_int_equal(f.ranks[r].member, r);
        assert_int_equal(f.ranks[r].source, MU_SOURCE_INIT);
    }
}

static void test_too_few_members_is_unavailable(void **state)
{
    (void)state;
    struct fixture f;
    setup(&f, 2, 8, 3, 64);
    mu_plan_make(&f.input, &f.plan);
    assert_int_equal(f.plan.status, MU_ERR_UNAVAILABLE);
}

static void test_one_ahead_rolls_the_others_forward(void **state)
{
    (void)state;
    struct fixture f;
    setup(&f, 3, 8, 1, 64);
    f.members[0].held = at(10);
    f.members[0].held.has_gradient = true;
    f.members[1].held = at(11);
    f.members[2].held = (struct mu_held){0}; /* a joiner */
    mu_plan_make(&f.input, &f.plan);
    assert_int_equal(f.plan.start_step, 11);
    assert_int_equal(f.ranks[0].source, MU_SOURCE_ROLL_FORWARD);
    assert_int_equal(f.ranks[1].source, MU_SOURCE_HELD);
    assert_int_equal(f.ranks[2].source, MU_SOURCE_PEER);
    assert_true(f.ranks[2].source_rank < 2);
    assert_int_equal(f.plan.roll_forward.step, 10);
    assert_true(f.plan.roll_forward.grad_norm == 10.5);
}

static void test_pending_result_rolls_everybody_forward(void **state)
{
    (void)state;
    struct fixture f;
    setup(&f, 2, 8, 1, 64);
    f.members[0].held = (struct mu_held){.has_state = true, .has_gradient = true, .step = 10};
    f.members[1].held = f.members[0].held;
    f.members[1].held.has_result = true;
    f.members[1].held.result = result_of(10);
    mu_plan_make(&f.input, &f.plan);
    assert_int_equal(f.plan.start_step, 11);
    assert_int_equal(f.ranks[0].source, MU_SOURCE_ROLL_FORWARD);
    assert_int_equal(f.ranks[1].source, MU_SOURCE_ROLL_FORWARD);
}

static void test_gradient_without_result_redoes_the_step(void **state)
{
    (void)state;
    struct fixture f;
    setup(&f, 2, 8, 1, 64);
    f.members[0].held = at(10);
    f.members[0].held.has_gradient = true;
    f.members[1].held = at(10);
    mu_plan_make(&f.input, &f.plan);
    assert_int_equal(f.plan.start_step, 10);
    assert_int_equal(f.ranks[0].source, MU_SOURCE_HELD);
}

static void test_state_from_checkpoint_only_when_nobody_is_newer(void **state)
{
    (void)state;
    struct fixture f;
    setup(&f, 2, 8, 1, 64);
    f.input.checkpoint = 4;
    f.input.checkpoint_step = 100;
    mu_plan_make(&f.input, &f.plan);
    assert_int_equal(f.plan.start_step, 100);
    assert_int_equal(f.ranks[0].source, MU_SOURCE_CHECKPOINT);
    f.members[1].held = at(120);
    mu_plan_make(&f.input, &f.plan);
    assert_int_equal(f.plan.start_step, 120);
    assert_int_equal(f.ranks[0].source, MU_SOURCE_PEER);
    assert_int_equal(f.ranks[1].source, MU_SOURCE_HELD);
    f.members[1].held = at(80); /* older than the checkpoint */
    mu_plan_make(&f.input, &f.plan);
    assert_int_equal(f.plan.start_step, 100);
    assert_int_equal(f.ranks[1].source, MU_SOURCE_CHECKPOINT);
}

static void test_lost_state_is_never_a_silent_fresh_start(void **state)
{
    (void)state;
    struct fixture f;
    setup(&f, 2, 8, 1, 64);
    f.input.may_initialise = false;
    mu_plan_make(&f.input, &f.plan);
    assert_int_equal(f.plan.status, MU_ERR_NOT_FOUND);
}

static void test_bad_links_leave_out_the_smallest_set(void **state)
{
    (void)state;
    struct fixture f;
    setup(&f, 5, 8, 1, 64);
    for (uint32_t i = 0; i < 5; i++)
        f.members[i].held = at(7);
    const struct mu_plan_link star[] = {{0, 2}, {2, 3}, {2, 4}};
    f.input.bad_links = star;
    f.input.bad_link_count = 3;
    mu_plan_make(&f.input, &f.plan);
    assert_int_equal(f.plan.left_out, 1);
    assert_int_equal(f.plan.world, 4);
    static const uint32_t expected[] = {0, 1, 3, 4};
    for (uint32_t r = 0; r < 4; r++)
        assert_int_equal(f.ranks[r].member, expected[r]);
    /* Of one bad pair the holder stays. */
    const struct mu_plan_link pair[] = {{0, 1}};
    f.input.member_count = 2;
    f.input.bad_links = pair;
    f.input.bad_link_count = 1;
    f.members[0].held = (struct mu_held){0};
    mu_plan_make(&f.input, &f.plan);
    assert_int_equal(f.plan.world, 1);
    assert_int_equal(f.ranks[0].member, 1);
}

static void test_the_only_holder_always_takes_part(void **state)
{
    (void)state;
    struct fixture f;
    setup(&f, 4, 8, 1, 2);
    f.members[3].held = at(50);
    mu_plan_make(&f.input, &f.plan);
    assert_int_equal(f.plan.world, 2);
    assert_int_equal(f.ranks[0].member, 0);
    assert_int_equal(f.ranks[1].member, 3);
    assert_int_equal(f.ranks[0].source, MU_SOURCE_PEER);
    assert_int_equal(f.ranks[0].source_rank, 1);
}

static void test_along_a_tree_the_root_holds_and_sources_are_neighbours(void **state)
{
    (void)state;
    struct fixture f;
    setup(&f, 80, 128, 1, 100);
    f.members[41].held = at(9);
    mu_plan_make(&f.input, &f.plan);
    assert_int_equal(f.plan.world, 80);
    assert_false(f.plan.mesh);
    assert_int_equal(f.ranks[0].member, 41);
    for (uint32_t r = 1; r < 80; r++) {
        uint32_t neighbours[MU_NEIGHBOURS_MAX], count = mu_plan_neighbours(80, false, r, neighbours), found = 0;
        assert_int_equal(f.ranks[r].source, MU_SOURCE_PEER);
        for (uint32_t i = 0; i < count; i++)
            found += neighbours[i] == f.ranks[r].source_rank;
        assert_int_equal(found, 1);
        /* Following sources leads to the root: no cycle. */
        uint32_t at_rank = r;
        for (uint32_t hops = 0; at_rank != 0; hops++) {
            assert_true(hops < 80);
            at_rank = f.ranks[at_rank].source_rank;
        }
    }
}

static void test_leaves_follow_measured_speed(void **state)
{
    (void)state;
    struct fixture f;
    setup(&f, 3, 16, 1, 64);
    f.members[0].seconds_per_leaf = 0.010;
    f.members[1].seconds_per_leaf = 0.011; /* noise */
    f.members[2].seconds_per_leaf = 0.030; /* a straggler */
    mu_plan_make(&f.input, &f.plan);
    assert_false(f.plan.equal_leaves);
    assert_int_equal(f.ranks[0].leaf_count + f.ranks[1].leaf_count + f.ranks[2].leaf_count, 16);
    assert_true(f.ranks[2].leaf_count >= 1 && f.ranks[2].leaf_count <= 3);
    assert_true(f.ranks[0].leaf_count >= 6 && f.ranks[1].leaf_count >= 6);
    for (uint32_t i = 0; i < 3; i++)
        f.members[i].seconds_per_leaf = 0;
    mu_plan_make(&f.input, &f.plan); /* unmeasured: no rank more than the slowest of an equal split */
    for (uint32_t r = 0; r < 3; r++)
        assert_true(f.ranks[r].leaf_count >= 1 && f.ranks[r].leaf_count <= 6);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_world_size),
        cmocka_unit_test(test_neighbours_of_a_tree_are_symmetric_and_bounded),
        cmocka_unit_test(test_leaf_ranges_tile),
        cmocka_unit_test(test_fresh_job_initialises_everywhere),
        cmocka_unit_test(test_too_few_members_is_unavailable),
        cmocka_unit_test(test_one_ahead_rolls_the_others_forward),
        cmocka_unit_test(test_pending_result_rolls_everybody_forward),
        cmocka_unit_test(test_gradient_without_result_redoes_the_step),
        cmocka_unit_test(test_state_from_checkpoint_only_when_nobody_is_newer),
        cmocka_unit_test(test_lost_state_is_never_a_silent_fresh_start),
        cmocka_unit_test(test_bad_links_leave_out_the_smallest_set),
        cmocka_unit_test(test_the_only_holder_always_takes_part),
        cmocka_unit_test(test_leaves_follow_measured_speed),
        cmocka_unit_test(test_along_a_tree_the_root_holds_and_sources_are_neighbours),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
