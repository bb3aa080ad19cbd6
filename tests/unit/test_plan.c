/* links: mu_plan */
#include "tests/unit/plan_testing.h"

static void test_world_size(void **state)
{
    (void)state;
    struct mu_job_spec spec = make_spec(8, 2, 6, 0);
    assert_int_equal(mu_plan_wanted(&spec, 1), 0);
    assert_int_equal(mu_plan_wanted(&spec, 2), 2);
    assert_int_equal(mu_plan_wanted(&spec, 6), 6);
    assert_int_equal(mu_plan_wanted(&spec, 50), 6);
    spec.workers.spares = 2;
    assert_int_equal(mu_plan_wanted(&spec, 5), 3);
    assert_int_equal(mu_plan_wanted(&spec, 3), 2); /* training comes before spares */
    spec.parallel.tp = spec.parallel.pp = 2;
    assert_int_equal(mu_plan_wanted(&spec, 3), 0); /* so do the degrees that the job gives */
    assert_int_equal(mu_plan_wanted(&spec, 4), 4);
    assert_int_equal(mu_plan_wanted(&spec, 5), 4);
    assert_int_equal(mu_plan_wanted(&spec, 8), 6);
    spec.parallel.tp = spec.parallel.pp = 0;
    struct fixture f;
    setup(&f, 50, 8, 2, 50);
    make(&f);
    assert_int_equal(f.plan.layout.dp, 8); /* never more replicas than leaves */
    f.spec.workers.spares = 45;
    make(&f);
    assert_int_equal(f.plan.layout.dp, 5);
    teardown(&f);
}

/* A replicated job takes in whoever comes, however little it gains; asked for or not. */
static void test_every_worker_becomes_a_replica(void **state)
{
    (void)state;
    struct fixture f;
    uint32_t replicated = 0;
    for (uint32_t given = 0; given < 2; given++) {
        setup(&f, 0, 64, 1, 64);
        f.spec.parallel.tp = f.spec.parallel.pp = given;
        for (uint32_t i = 0; i < 64; i++) {
            f.input.member_count = i + 1;
            f.input.has_old_layout = i > 0;
            mu_layout_init(&f.input.old_layout, i ? i : 1, 4);
            make(&f);
            assert_int_equal(f.plan.status, MU_OK);
            if (given == 0 && f.plan.layout.tp * f.plan.layout.pp > 1)
                continue; /* another grid was faster: left to the model of costs */
            assert_int_equal(f.plan.layout.dp, i + 1);
            for (uint32_t rank = 0; rank <= i; rank++)
                assert_int_equal(f.ranks[rank].member, rank);
            replicated++;
        }
        teardown(&f);
    }
    assert_true(replicated > 100);
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
    make(&f);
    assert_int_equal(f.plan.status, MU_OK);
    assert_int_equal(mu_layout_world(&f.plan.layout), 3);
    assert_int_equal(f.plan.start_step, 0);
    for (uint32_t r = 0; r < 3; r++) {
        assert_int_equal(f.ranks[r].member, r);
        assert_int_equal(f.ranks[r].source, MU_SOURCE_INIT);
    }
    teardown(&f);
}

static void test_too_few_members_is_unavailable(void **state)
{
    (void)state;
    struct fixture f;
    setup(&f, 2, 8, 3, 64);
    make(&f);
    assert_int_equal(f.plan.status, MU_ERR_UNAVAILABLE);
    assert_string_equal(f.plan.text, "2 workers can take part, workers.min is 3");
    teardown(&f);
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
    make(&f);
    assert_int_equal(f.plan.start_step, 11);
    assert_int_equal(f.ranks[0].source, MU_SOURCE_ROLL_FORWARD);
    assert_int_equal(f.ranks[1].source, MU_SOURCE_HELD);
    assert_int_equal(f.ranks[2].source, MU_SOURCE_PEER);
    uint64_t moved = 0; /* all to the joiner, half from each of the others */
    for (uint32_t i = 0; i < f.plan.reshard.move_count; i++) {
        const struct mu_move *move = &f.plan.reshard.moves[i];
        assert_true(move->to == 2 && move->from < 2 && move->kinds == (MU_MOVE_PARAMS | MU_MOVE_MOMENTS));
        moved += move->run.count;
    }
    assert_int_equal(moved, f.model.chunk_count);
    assert_int_equal(f.plan.reshard.move_count, 2);
    assert_int_equal(f.plan.roll_forward.step, 10);
    assert_true(f.plan.roll_forward.grad_norm == 10.5);
    teardown(&f);
}

static void test_pending_result_rolls_everybody_forward(void **state)
{
    (void)state;
    struct fixture f;
    setup(&f, 2, 8, 1, 64);
    f.members[0].held = at(10);
    f.members[0].held.has_gradient = true;
    f.members[0].held.has_result = false;
    f.members[1].held = f.members[0].held;
    f.members[1].held.has_result = true;
    f.members[1].held.result = result_of(10);
    make(&f);
    assert_int_equal(f.plan.start_step, 11);
    assert_int_equal(f.ranks[0].source, MU_SOURCE_ROLL_FORWARD);
    assert_int_equal(f.ranks[1].source, MU_SOURCE_ROLL_FORWARD);
    teardown(&f);
}

static void test_gradient_without_result_redoes_the_step(void **state)
{
    (void)state;
    struct fixture f;
    setup(&f, 2, 8, 1, 64);
    f.members[0].held = at(10);
    f.members[0].held.has_gradient = true;
    f.members[1].held = at(10);
    make(&f);
    assert_int_equal(f.plan.start_step, 10);
    assert_int_equal(f.ranks[0].source, MU_SOURCE_HELD);
    teardown(&f);
}

static void test_state_from_checkpoint_only_when_nobody_is_newer(void **state)
{
    (void)state;
    struct fixture f;
    setup(&f, 2, 8, 1, 64);
    f.input.checkpoint = 4;
    f.input.checkpoint_step = 100;
    make(&f);
    assert_int_equal(f.plan.start_step, 100);
    assert_int_equal(f.ranks[0].source, MU_SOURCE_CHECKPOINT);
    f.members[1].held = at(120);
    make(&f);
    assert_int_equal(f.plan.start_step, 120);
    assert_int_equal(f.ranks[0].source, MU_SOURCE_PEER);
    assert_int_equal(f.ranks[1].source, MU_SOURCE_HELD);
    f.members[1].held = at(80); /* older than the checkpoint */
    make(&f);
    assert_int_equal(f.plan.start_step, 100);
    assert_int_equal(f.ranks[1].source, MU_SOURCE_CHECKPOINT);
    teardown(&f);
}

static void test_lost_state_is_never_a_silent_fresh_start(void **state)
{
    (void)state;
    struct fixture f;
    setup(&f, 2, 8, 1, 64);
    f.input.may_initialise = false;
    make(&f);
    assert_int_equal(f.plan.status, MU_ERR_NOT_FOUND);
    teardown(&f);
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
    make(&f);
    assert_int_equal(f.plan.left_out, 1);
    assert_int_equal(mu_layout_world(&f.plan.layout), 4);
    static const uint32_t expected[] = {0, 1, 3, 4};
    for (uint32_t r = 0; r < 4; r++)
        assert_int_equal(f.ranks[r].member, expected[r]);
    /* Of one bad pair the holder stays, whoever is preferred. */
    const struct mu_plan_link late[] = {{1, 2}};
    f.input.bad_links = late;
    f.input.bad_link_count = 1;
    f.members[1].held = (struct mu_held){0};
    make(&f);
    assert_int_equal(f.plan.left_out, 1);
    assert_int_equal(rank_of_member(&f, 1), UINT32_MAX);
    f.members[1].held = f.members[2].held;
    /* The last holder stays in any case. */
    const struct mu_plan_link pair[] = {{0, 1}};
    f.input.member_count = 2;
    f.input.bad_links = pair;
    f.input.bad_link_count = 1;
    f.members[0].held = (struct mu_held){0};
    make(&f);
    assert_int_equal(mu_layout_world(&f.plan.layout), 1);
    assert_int_equal(f.ranks[0].member, 1);
    teardown(&f);
}

static void test_the_only_holder_always_takes_part(void **state)
{
    (void)state;
    struct fixture f;
    setup(&f, 4, 8, 1, 2);
    f.members[3].held = at(50);
    make(&f);
    assert_int_equal(mu_layout_world(&f.plan.layout), 2);
    assert_int_equal(f.ranks[0].member, 0);
    assert_int_equal(f.ranks[1].member, 3);
    assert_int_equal(f.ranks[0].source, MU_SOURCE_PEER);
    assert_int_equal(f.plan.reshard.move_count, 1);
    assert_int_equal(f.plan.reshard.moves[0].from, 1);
    assert_int_equal(f.plan.reshard.moves[0].to, 0);
    teardown(&f);
}

static void test_leaves_follow_measured_speed(void **state)
{
    (void)state;
    struct fixture f;
    setup(&f, 3, 16, 1, 64);
    f.members[0].seconds_per_layer = 0.010;
    f.members[1].seconds_per_layer = 0.011; /* noise */
    f.members[2].seconds_per_layer = 0.030; /* a straggler */
    make(&f);
    assert_false(f.plan.equal_leaves);
    assert_int_equal(f.leaf_counts[0] + f.leaf_counts[1] + f.leaf_counts[2], 16);
    assert_true(f.leaf_counts[2] >= 1 && f.leaf_counts[2] <= 3);
    assert_true(f.leaf_counts[0] >= 6 && f.leaf_counts[1] >= 6);
    for (uint32_t i = 0; i < 3; i++)
        f.members[i].seconds_per_layer = 0;
    make(&f); /* unmeasured: no rank more than the slowest of an equal split */
    for (uint32_t r = 0; r < 3; r++)
        assert_true(f.leaf_counts[r] >= 1 && f.leaf_counts[r] <= 6);
    teardown(&f);
}

static void test_a_replica_is_as_fast_as_its_slowest_member(void **state)
{
    (void)state;
    struct fixture f;
    struct mu_layout layout = make_layout(1, 2, 3, false);
    setup_layout(&f, &layout, 5, (const int[]){0, 1, 2, 3, 4, 5}, 6);
    f.spec.batch.sequences = 15;
    for (uint32_t i = 0; i < 6; i++)
        f.members[i].seconds_per_layer = 0.01;
    f.members[4].seconds_per_layer = 0.02; /* rank 4: replica 1, second stage */
    make(&f);
    assert_int_equal(f.plan.layout.dp, 3);
    assert_int_equal(f.leaf_counts[0], 6);
    assert_int_equal(f.leaf_counts[1], 3);
    assert_int_equal(f.leaf_counts[2], 6);
    teardown(&f);
}

static void test_many_replicas_have_equal_leaves(void **state)
{
    (void)state;
    enum { MANY = 1025 };
    struct fixture f;
    setup(&f, 0, 2 * MANY, 1, MANY);
    f.input.members = calloc(MANY, sizeof *f.input.members);
    f.plan.ranks = calloc(MANY, sizeof *f.plan.ranks);
    assert_true(f.input.members && f.plan.ranks);
    f.input.member_count = MANY;
    make(&f);
    assert_int_equal(f.plan.layout.dp, MANY);
    assert_true(f.plan.equal_leaves);
    f.input.member_count = MANY - 1;
    make(&f);
    assert_false(f.plan.equal_leaves);
    for (uint32_t d = 0; d < MANY - 1; d++)
        assert_true(f.leaf_counts[d] >= 1 && f.leaf_counts[d] <= 3);
    free((void *)f.input.members);
    free(f.plan.ranks);
    teardown(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_world_size),
        cmocka_unit_test(test_every_worker_becomes_a_replica),
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
        cmocka_unit_test(test_a_replica_is_as_fast_as_its_slowest_member),
        cmocka_unit_test(test_many_replicas_have_equal_leaves),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
