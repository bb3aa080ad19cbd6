/* links: mu_plan */
#include "plan/plan.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>

#include "common/rng.h"
#include "plan/model_spec.h"

enum { MEMBERS = 100, NOBODY = -1 };

static struct mu_job_spec make_spec(uint32_t leaves, uint32_t min, uint32_t max, uint32_t spares)
{
    struct mu_job_spec spec;
    mu_job_spec_init(&spec);
    spec.model = (struct mu_model_config){
        .family = MU_FAMILY_GPT2, .layers = 4, .heads = 8, .channels = 256, .context = 64, .vocab = 2048, .slices = 4};
    mu_model_config_resolve(&spec.model);
    spec.batch.sequences = leaves;
    spec.batch.length = 64;
    spec.batch.micro = spec.batch.accumulate = 1;
    spec.parallel.tp = spec.parallel.pp = 1;
    spec.workers.min = min;
    spec.workers.max = max;
    spec.workers.spares = spares;
    return spec;
}

struct fixture {
    struct mu_job_spec spec;
    struct mu_model_spec model;
    struct mu_plan_member members[MEMBERS];
    struct mu_plan_rank ranks[MEMBERS];
    uint32_t leaf_counts[MU_COUNTED_REPLICAS_MAX];
    struct mu_plan_input input;
    struct mu_plan plan;
};

static void setup(struct fixture *f, uint32_t members, uint32_t leaves, uint32_t min, uint32_t max)
{
    memset(f, 0, sizeof *f);
    f->spec = make_spec(leaves, min, max, 0);
    mu_model_spec_init(&f->model, &f->spec.model);
    f->input = (struct mu_plan_input){
        .spec = &f->spec, .members = f->members, .member_count = members, .may_initialise = true};
    f->plan.ranks = f->ranks;
    f->plan.leaf_counts = f->leaf_counts;
    for (uint32_t i = 0; i < members; i++)
        f->members[i].old_rank = UINT32_MAX;
}

static void make(struct fixture *f)
{
    mu_plan_fini(&f->plan);
    mu_plan_make(&f->input, &f->plan);
}

static void teardown(struct fixture *f)
{
    mu_plan_fini(&f->plan);
}

/* Where a member went, or UINT32_MAX. */
static uint32_t rank_of_member(const struct fixture *f, uint32_t member)
{
    for (uint32_t rank = 0; rank < mu_layout_world(&f->plan.layout); rank++) {
        if (f->ranks[rank].member == member)
            return rank;
    }
    return UINT32_MAX;
}

static struct mu_step_result result_of(uint64_t step)
{
    return (struct mu_step_result){.step = step, .loss = 2.5, .grad_norm = 0.5 + (double)step, .finite = true};
}

/* At boundary `step`, with the result of the update that led there, everything held as one of one or more replicas. */
static struct mu_held at(uint64_t step)
{
    struct mu_held held = {.has_state = true, .step = step, .share_count = 1};
    mu_layout_init(&held.shares[0].layout, 1, 4);
    if (step > 0) {
        held.has_result = true;
        held.result = result_of(step - 1);
    }
    return held;
}

static struct mu_layout make_layout(uint32_t tp, uint32_t pp, uint32_t dp, bool sharded)
{
    struct mu_layout layout = {.tp = tp, .pp = pp, .dp = dp, .sharded = sharded};
    for (uint32_t p = 0; p <= pp; p++)
        layout.stage_first[p] = (uint16_t)(4 * p / pp);
    return layout;
}

static struct mu_held at_rank(uint64_t step, const struct mu_layout *layout, uint32_t rank)
{
    struct mu_held held = at(step);
    held.shares[0] = (struct mu_held_share){.layout = *layout, .rank = rank};
    return held;
}

/* A job of this layout whose ranks lists[r] (members in order, NOBODY = lost) hold `step`. */
static void setup_layout(struct fixture *f, const struct mu_layout *layout, uint64_t step, const int *ranks,
                         uint32_t members)
{
    setup(f, members, 64, 1, 64);
    f->spec.parallel.tp = layout->tp;
    f->spec.parallel.pp = layout->pp;
    f->spec.parallel.optimizer_sharding = layout->sharded;
    f->input.has_old_layout = true;
    f->input.old_layout = *layout;
    f->input.may_initialise = false;
    for (uint32_t i = 0; i < members; i++) {
        if (ranks[i] == NOBODY)
            continue;
        f->members[i].held = at_rank(step, layout, (uint32_t)ranks[i]);
        f->members[i].old_rank = (uint32_t)ranks[i];
    }
}

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
    f.members[0].seconds_per_leaf = 0.010;
    f.members[1].seconds_per_leaf = 0.011; /* noise */
    f.members[2].seconds_per_leaf = 0.030; /* a straggler */
    make(&f);
    assert_false(f.plan.equal_leaves);
    assert_int_equal(f.leaf_counts[0] + f.leaf_counts[1] + f.leaf_counts[2], 16);
    assert_true(f.leaf_counts[2] >= 1 && f.leaf_counts[2] <= 3);
    assert_true(f.leaf_counts[0] >= 6 && f.leaf_counts[1] >= 6);
    for (uint32_t i = 0; i < 3; i++)
        f.members[i].seconds_per_leaf = 0;
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
        f.members[i].seconds_per_leaf = 0.01;
    f.members[4].seconds_per_leaf = 0.02; /* rank 4: replica 1, second stage */
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

static void test_nobody_moves_when_nothing_changes(void **state)
{
    (void)state;
    for (int sharded = 0; sharded < 2; sharded++) {
        struct fixture f;
        struct mu_layout layout = make_layout(2, 2, 2, sharded);
        /* Out of order: what they hold decides, not who comes first. */
        setup_layout(&f, &layout, 9, (const int[]){3, 1, 2, 0, 7, 5, 6, 4}, 8);
        make(&f);
        assert_int_equal(f.plan.status, MU_OK);
        assert_true(mu_layout_equal(&f.plan.layout, &layout));
        assert_int_equal(f.plan.reshard.move_count, 0);
        for (uint32_t rank = 0; rank < 8; rank++) {
            assert_int_equal(f.members[f.ranks[rank].member].old_rank, rank);
            assert_int_equal(f.ranks[rank].source, MU_SOURCE_HELD);
        }
        teardown(&f);
    }
}

static void test_a_joiner_takes_the_place_of_the_lost_one(void **state)
{
    (void)state;
    struct fixture f;
    struct mu_layout layout = make_layout(2, 2, 2, false);
    for (uint32_t lost = 0; lost < 8; lost++) {
        int ranks[8];
        for (uint32_t rank = 0, i = 0; rank < 8; rank++) {
            if (rank != lost)
                ranks[i++] = (int)rank;
        }
        ranks[7] = NOBODY;
        setup_layout(&f, &layout, 9, ranks, 8);
        make(&f);
        assert_int_equal(f.plan.status, MU_OK);
        assert_int_equal(f.plan.start_step, 9);
        assert_int_equal(f.ranks[lost].member, 7);
        assert_int_equal(f.ranks[lost].source, MU_SOURCE_PEER);
        uint64_t bytes = 12 * mu_layout_elements(&f.model, &layout, lost, MU_SHARE_PARAMS) +
                         4 * mu_layout_elements(&f.model, &layout, lost, MU_SHARE_COPY);
        assert_int_equal(f.plan.reshard.bytes, bytes);
        teardown(&f);
    }
}

/* Without a joiner one replica goes, in all columns; those that stay move nothing. */
static void test_a_lost_member_takes_its_replica_along(void **state)
{
    (void)state;
    struct fixture f;
    struct mu_layout layout = make_layout(1, 2, 3, false);
    setup_layout(&f, &layout, 9, (const int[]){0, 1, 2, 3, 5}, 5); /* rank 4: second stage, replica 1 */
    make(&f);
    assert_int_equal(mu_layout_world(&f.plan.layout), 4);
    assert_int_equal(f.plan.layout.dp, 2);
    assert_int_equal(f.plan.reshard.move_count, 0);
    assert_int_equal(rank_of_member(&f, 2), UINT32_MAX); /* first stage, replica 2: one too many */
    teardown(&f);
}

static void test_a_lost_stage_comes_from_the_checkpoint(void **state)
{
    (void)state;
    struct fixture f;
    struct mu_layout layout = make_layout(1, 2, 2, false);
    setup_layout(&f, &layout, 120, (const int[]){0, 1, NOBODY, NOBODY}, 4);
    make(&f);
    assert_int_equal(f.plan.status, MU_ERR_NOT_FOUND);
    assert_non_null(strstr(f.plan.text, "checkpoint"));
    f.input.checkpoint = 4;
    f.input.checkpoint_step = 100;
    make(&f);
    assert_int_equal(f.plan.status, MU_OK);
    assert_int_equal(f.plan.start_step, 100);
    assert_int_equal(f.plan.reshard.move_count, 0);
    for (uint32_t rank = 0; rank < 4; rank++)
        assert_int_equal(f.ranks[rank].source, MU_SOURCE_CHECKPOINT);
    teardown(&f);
}

/* An older step that is held whole is newer than the checkpoint. */
static void test_the_newest_whole_step_is_taken(void **state)
{
    (void)state;
    struct fixture f;
    struct mu_layout layout = make_layout(1, 2, 2, false);
    setup_layout(&f, &layout, 120, (const int[]){0, 1, 2, 3}, 4);
    f.members[0].held.step = 121; /* only one half */
    f.members[0].held.result = result_of(120);
    f.input.checkpoint = 4;
    f.input.checkpoint_step = 100;
    make(&f);
    assert_int_equal(f.plan.start_step, 120);
    assert_int_equal(f.ranks[0].source, MU_SOURCE_PEER);
    assert_int_equal(f.plan.reshard.bytes, 12 * mu_layout_elements(&f.model, &layout, 0, MU_SHARE_PARAMS));
    f.members[3].held.has_gradient = true; /* with this one the other half can follow */
    make(&f);
    assert_int_equal(f.plan.start_step, 121);
    assert_int_equal(f.ranks[0].source, MU_SOURCE_HELD);
    assert_int_equal(f.ranks[3].source, MU_SOURCE_ROLL_FORWARD);
    assert_int_equal(f.plan.roll_forward.step, 120);
    /* replica 1 of both stages, and the copy of the embedding that 3 rolled past */
    assert_int_equal(f.plan.reshard.bytes, 12 * mu_layout_elements(&f.model, &layout, 1, MU_SHARE_PARAMS) +
                                               12 * mu_layout_elements(&f.model, &layout, 2, MU_SHARE_PARAMS) +
                                               8 * mu_layout_elements(&f.model, &layout, 2, MU_SHARE_COPY));
    teardown(&f);
}

static void test_two_by_two_becomes_three_by_one(void **state)
{
    (void)state;
    struct fixture f;
    struct mu_layout layout = make_layout(2, 1, 2, false);
    setup_layout(&f, &layout, 9, (const int[]){0, 1, 3}, 3);
    f.spec.parallel.tp = 1;
    make(&f);
    assert_int_equal(f.plan.status, MU_OK);
    assert_int_equal(f.plan.layout.tp, 1);
    assert_int_equal(f.plan.layout.dp, 3);
    uint64_t whole = f.model.parameter_count, t0 = mu_layout_elements(&f.model, &layout, 0, MU_SHARE_PARAMS),
             t1 = mu_layout_elements(&f.model, &layout, 1, MU_SHARE_PARAMS);
    assert_int_equal(f.plan.reshard.bytes, 12 * ((whole - t0) + 2 * (whole - t1)));
    teardown(&f);
}

static void test_a_sharded_update_is_rolled_forward_by_its_owners(void **state)
{
    (void)state;
    struct fixture f;
    struct mu_layout layout = make_layout(1, 1, 4, true);
    setup_layout(&f, &layout, 10, (const int[]){0, 1, 2, 3}, 4);
    for (uint32_t i = 0; i < 4; i++)
        f.members[i].held.has_gradient = true;
    f.members[2].held = at_rank(11, &layout, 2);
    f.members[2].held.shares[0].owned_only = true; /* updated, not gathered */
    make(&f);
    assert_int_equal(f.plan.start_step, 11);
    uint64_t owned = 0;
    for (uint32_t rank = 0; rank < 4; rank++) {
        assert_int_equal(f.ranks[rank].member, rank);
        assert_int_equal(f.ranks[rank].source, rank == 2 ? MU_SOURCE_HELD : MU_SOURCE_ROLL_FORWARD);
        owned += mu_layout_elements(&f.model, &layout, rank, MU_SHARE_OWNED);
    }
    assert_int_equal(f.plan.reshard.bytes, 4 * (4 * f.model.parameter_count - owned));
    for (uint32_t i = 0; i < f.plan.reshard.move_count; i++)
        assert_int_equal(f.plan.reshard.moves[i].kinds, MU_MOVE_PARAMS);
    f.input.member_count = 3; /* one owner lost: nobody has its moments */
    f.input.checkpoint = 1;
    f.input.checkpoint_step = 7;
    make(&f);
    assert_int_equal(f.plan.start_step, 7);
    assert_int_equal(f.ranks[0].source, MU_SOURCE_CHECKPOINT);
    teardown(&f);
}

/* Twice as many owners: each of the old ones keeps half of what it owned. */
static void test_a_sharded_world_grows_around_its_owners(void **state)
{
    (void)state;
    struct fixture f;
    struct mu_layout layout = make_layout(1, 1, 2, true);
    setup_layout(&f, &layout, 10, (const int[]){0, 1, NOBODY, NOBODY}, 4);
    make(&f);
    assert_int_equal(f.plan.layout.dp, 4);
    uint32_t extra = 0; /* the shares of two and four do not end at quite the same chunks */
    for (uint32_t i = 0; i < f.plan.reshard.move_count; i++) {
        const struct mu_move *move = &f.plan.reshard.moves[i];
        if ((move->kinds & MU_MOVE_MOMENTS) && f.ranks[move->to].member < 2)
            extra += move->run.count;
    }
    assert_true(extra <= 1);
    teardown(&f);
}

/* More owners than the job may have workers: those beyond become idle ranks to copy from. */
static void test_a_sharded_world_shrinks_through_idle_ranks(void **state)
{
    (void)state;
    struct fixture f;
    struct mu_layout layout = make_layout(1, 1, 4, true);
    setup_layout(&f, &layout, 10, (const int[]){0, 1, 2, 3}, 4);
    f.spec.workers.max = 3;
    make(&f);
    assert_int_equal(f.plan.status, MU_OK);
    assert_int_equal(f.plan.layout.dp, 3);
    assert_int_equal(f.plan.layout.idle, 1);
    assert_int_equal(f.plan.reshard.bytes, f.plan.reshard.minimum_bytes);
    for (uint32_t i = 0; i < f.plan.reshard.move_count; i++)
        assert_true(f.plan.reshard.moves[i].to < 3 && f.plan.reshard.moves[i].kinds == MU_MOVE_MOMENTS);
    teardown(&f);
}

static void test_the_only_holder_of_a_stage_leaves_as_an_idle_rank(void **state)
{
    (void)state;
    struct fixture f;
    struct mu_layout layout = make_layout(1, 2, 1, false);
    setup_layout(&f, &layout, 10, (const int[]){0, 1, NOBODY}, 3);
    f.members[1].leaving = true;
    make(&f);
    assert_int_equal(f.plan.status, MU_OK);
    assert_int_equal(mu_layout_working(&f.plan.layout), 2);
    assert_int_equal(f.plan.layout.idle, 1);
    assert_int_equal(f.ranks[0].member, 0);
    assert_int_equal(f.ranks[1].member, 2);
    assert_int_equal(f.ranks[2].member, 1);
    assert_int_equal(f.ranks[2].source, MU_SOURCE_HELD);
    for (uint32_t i = 0; i < f.plan.reshard.move_count; i++) { /* the embedding's copy comes from its owner */
        const struct mu_move *move = &f.plan.reshard.moves[i];
        assert_int_equal(move->to, 1);
        assert_int_equal(move->from, move->kinds == MU_MOVE_PARAMS ? 0 : 2);
    }
    /* With another holder of the stage nobody needs it. */
    f.members[2].held = at_rank(10, &layout, 1);
    make(&f);
    assert_int_equal(mu_layout_world(&f.plan.layout), 2);
    assert_int_equal(rank_of_member(&f, 1), UINT32_MAX);
    assert_int_equal(f.plan.reshard.move_count, 0);
    /* Nor when the state comes from elsewhere. */
    f.members[2].held = f.members[0].held = (struct mu_held){0};
    f.input.checkpoint = 1;
    f.input.checkpoint_step = 5;
    make(&f);
    assert_int_equal(f.plan.layout.idle, 0);
    assert_int_equal(rank_of_member(&f, 1), UINT32_MAX);
    teardown(&f);
}

static void test_the_only_source_of_a_stage_is_never_left_out(void **state)
{
    (void)state;
    struct fixture f;
    struct mu_layout layout = make_layout(1, 2, 1, false);
    setup_layout(&f, &layout, 10, (const int[]){0, 1, NOBODY}, 3);
    const struct mu_plan_link links[] = {{1, 0}, {1, 2}};
    f.input.bad_links = links;
    f.input.bad_link_count = 2;
    make(&f); /* 1 is the worst, but alone has its stage; 0 too: only 2 can go */
    assert_int_equal(f.plan.left_out, 1);
    assert_int_equal(rank_of_member(&f, 2), UINT32_MAX);
    assert_int_equal(f.plan.reshard.move_count, 0);
    teardown(&f);
}

static void test_too_few_for_the_layout_is_unavailable(void **state)
{
    (void)state;
    struct fixture f;
    setup(&f, 3, 8, 1, 64);
    f.spec.parallel.tp = f.spec.parallel.pp = 2;
    make(&f);
    assert_int_equal(f.plan.status, MU_ERR_UNAVAILABLE);
    assert_true(strlen(f.plan.text) > 10);
    teardown(&f);
}

/* Most different ranks that one rank moves state from or to. */
static uint32_t most_partners(const struct mu_reshard *reshard, uint32_t world)
{
    bool *partner = calloc((size_t)world * world, sizeof *partner);
    uint32_t most = 0;
    assert_non_null(partner);
    for (uint32_t i = 0; i < reshard->move_count; i++) {
        const struct mu_move *move = &reshard->moves[i];
        partner[(size_t)move->from * world + move->to] = partner[(size_t)move->to * world + move->from] = true;
    }
    for (uint32_t rank = 0; rank < world; rank++) {
        uint32_t count = 0;
        for (uint32_t other = 0; other < world; other++)
            count += partner[(size_t)rank * world + other];
        most = count > most ? count : most;
    }
    free(partner);
    return most;
}

/* tp 64 x pp `stages` becomes replicas of the whole: every rank needs a part of every other. */
static void make_whole(struct fixture *f, uint32_t stages, uint32_t joiners)
{
    enum { MANY = 512, LAYERS = 8 };
    static struct mu_plan_member members[MANY];
    static struct mu_plan_rank ranks[MANY];
    struct mu_layout layout = {.tp = 64, .pp = stages, .dp = 1};
    for (uint32_t p = 0; p <= stages; p++)
        layout.stage_first[p] = (uint16_t)(LAYERS * p / stages);
    uint32_t holders = mu_layout_world(&layout), count = holders + joiners;
    assert_true(count <= MANY);
    setup(f, 0, MANY, 1, MANY);
    f->spec.model.heads = f->spec.model.kv_heads = 64;
    f->spec.model.slices = 64;
    f->spec.model.layers = LAYERS;
    mu_model_spec_init(&f->model, &f->spec.model);
    memset(members, 0, sizeof members);
    for (uint32_t i = 0; i < count; i++) {
        members[i].host = i;
        if (i < holders)
            members[i].held = at_rank(10, &layout, i);
    }
    f->input.members = members;
    f->input.member_count = count;
    f->input.may_initialise = false;
    f->plan.ranks = ranks;
    make(f);
}

static void test_no_rank_has_more_peers_than_it_may(void **state)
{
    (void)state;
    struct fixture f;
    make_whole(&f, 1, 0);
    assert_int_equal(f.plan.status, MU_OK);
    assert_int_equal(f.plan.layout.dp, 64);
    assert_int_equal(most_partners(&f.plan.reshard, 64), 63); /* everybody needs everybody's */
    teardown(&f);
    make_whole(&f, 4, 200);
    assert_int_equal(f.plan.status, MU_OK);
    assert_int_equal(f.plan.layout.dp, 456);
    assert_true(most_partners(&f.plan.reshard, 456) <= MU_PEERS_MAX);
    teardown(&f);
    make_whole(&f, 8, 0); /* 512 parts of the state: more sources than a rank may have */
    assert_int_equal(f.plan.status, MU_ERR_UNAVAILABLE);
    assert_non_null(strstr(f.plan.text, "more than 256 others"));
    f.input.checkpoint = 1;
    f.input.checkpoint_step = 3;
    make(&f);
    assert_int_equal(f.plan.status, MU_OK);
    assert_int_equal(f.plan.start_step, 3);
    assert_int_equal(f.plan.reshard.move_count, 0);
    for (uint32_t rank = 0; rank < 512; rank++)
        assert_int_equal(f.plan.ranks[rank].source, MU_SOURCE_CHECKPOINT);
    teardown(&f);
}

/* Fresh workers of shuffled hosts: every tensor group lies on one host. */
static void test_tensor_groups_stay_on_one_host(void **state)
{
    (void)state;
    struct fixture f;
    setup(&f, 32, 64, 1, 64);
    f.spec.parallel.tp = 4;
    f.spec.parallel.pp = 2;
    uint64_t seed = 3;
    for (uint32_t i = 0; i < 32; i++)
        f.members[i].host = 100 + i % 8;
    for (uint32_t i = 31; i > 0; i--) {
        uint32_t other = (uint32_t)(mu_splitmix64(&seed) % (i + 1)), host = f.members[i].host;
        f.members[i].host = f.members[other].host;
        f.members[other].host = host;
    }
    make(&f);
    assert_int_equal(f.plan.layout.dp, 4);
    for (uint32_t rank = 0; rank < 32; rank++)
        assert_int_equal(f.members[f.ranks[rank].member].host, f.members[f.ranks[rank / 4 * 4].member].host);
    /* A host that is too small for a group is passed over, though it comes first. */
    f.input.member_count = 11;
    f.spec.parallel.pp = 1;
    for (uint32_t i = 0; i < 11; i++)
        f.members[i].host = i < 3 ? 1 : i < 7 ? 2 : 3;
    make(&f);
    assert_int_equal(f.plan.layout.dp, 2);
    for (uint32_t rank = 0; rank < 8; rank++)
        assert_int_equal(f.members[f.ranks[rank].member].host, rank / 4 + 2);
    /* A lost member is replaced from the host of its group. */
    struct mu_layout four = make_layout(4, 1, 2, false);
    setup_layout(&f, &four, 10, (const int[]){0, 1, 2, 3, 4, 6, 7, NOBODY, NOBODY}, 9);
    f.spec.workers.max = 8;
    for (uint32_t i = 0; i < 9; i++)
        f.members[i].host = i < 4 ? 1 : i == 7 ? 3 : 2;
    make(&f);
    assert_int_equal(f.ranks[5].member, 8);
    assert_int_equal(rank_of_member(&f, 7), UINT32_MAX);
    teardown(&f);
    /* Now they hold tp 2: groups of two pairs of a host become groups of four. */
    struct mu_layout layout = make_layout(2, 2, 8, false);
    setup_layout(&f, &layout, 10, (const int[32]){0}, 32);
    f.spec.parallel.tp = 4;
    for (uint32_t i = 0; i < 32; i++) {
        f.members[i].held = at_rank(10, &layout, i);
        f.members[i].host = i / 4;
    }
    make(&f);
    for (uint32_t rank = 0; rank < 32; rank++)
        assert_int_equal(f.members[f.ranks[rank].member].host, f.members[f.ranks[rank / 4 * 4].member].host);
    assert_int_equal(f.plan.reshard.bytes, 0); /* each has its half of what it had */
    teardown(&f);
}

/* What a member has of a step, chunk by chunk: the plain reference. */
enum { CHUNKS_MAX = 256 };
struct marks {
    bool params[CHUNKS_MAX], moments[CHUNKS_MAX], copy[CHUNKS_MAX];
};

static void mark(const struct fixture *f, const struct mu_layout *layout, uint32_t rank, enum mu_share share, bool *out)
{
    struct mu_chunk_run runs[MU_RUNS_MAX];
    uint32_t count = mu_layout_runs(&f->model, layout, rank, share, runs);
    for (uint32_t i = 0; i < count; i++) {
        for (uint32_t k = 0; k < runs[i].count; k++)
            out[runs[i].first + k] = true;
    }
}

static void mark_member(const struct fixture *f, uint32_t member, uint64_t step, bool known_result, struct marks *out)
{
    const struct mu_held *held = &f->members[member].held;
    memset(out, 0, sizeof *out);
    bool rolls = held->has_state && held->has_gradient && held->step + 1 == step && known_result;
    if (!held->has_state || (held->step != step && !rolls))
        return;
    for (uint32_t k = 0; k < (rolls ? 1 : held->share_count); k++) {
        const struct mu_held_share *share = &held->shares[k];
        bool owned = share->owned_only || (rolls && share->layout.sharded);
        mark(f, &share->layout, share->rank, owned ? MU_SHARE_OWNED : MU_SHARE_PARAMS, out->params);
        mark(f, &share->layout, share->rank, MU_SHARE_MOMENTS, out->moments);
        if (!owned && !rolls)
            mark(f, &share->layout, share->rank, MU_SHARE_COPY, out->copy);
    }
}

static bool whole_without(const struct fixture *f, const struct marks *marks, uint32_t without)
{
    for (uint32_t chunk = 0; chunk < f->model.chunk_count; chunk++) {
        bool params = false, moments = false;
        for (uint32_t i = 0; i < f->input.member_count; i++) {
            params = params || (i != without && marks[i].params[chunk]);
            moments = moments || (i != without && marks[i].moments[chunk]);
        }
        if (!params || !moments)
            return false;
    }
    return true;
}

static uint64_t bytes_to_receive(const struct fixture *f, const struct marks *has, uint32_t rank)
{
    struct marks needs = {0};
    uint64_t bytes = 0;
    mark(f, &f->plan.layout, rank, MU_SHARE_PARAMS, needs.params);
    mark(f, &f->plan.layout, rank, MU_SHARE_COPY, needs.params);
    mark(f, &f->plan.layout, rank, MU_SHARE_MOMENTS, needs.moments);
    for (uint32_t chunk = 0; chunk < f->model.chunk_count; chunk++) {
        uint64_t size = 4 * mu_model_chunk(&f->model, chunk).size;
        bytes += (needs.params[chunk] && !has->params[chunk] && !has->copy[chunk] ? size : 0) +
                 (needs.moments[chunk] && !has->moments[chunk] ? 2 * size : 0);
    }
    return bytes;
}

/* Fewest bytes over all ways to give the working ranks to members that do not leave. */
static uint64_t best_assignment(const struct fixture *f, const struct marks *marks)
{
    uint32_t count = f->input.member_count, working = mu_layout_working(&f->plan.layout);
    uint64_t *best = malloc(sizeof *best << count), least = UINT64_MAX;
    assert_non_null(best);
    for (uint32_t set = 0; set < 1u << count; set++)
        best[set] = set == 0 ? 0 : UINT64_MAX;
    for (uint32_t set = 0; set < 1u << count; set++) {
        uint32_t rank = (uint32_t)__builtin_popcount(set);
        if (best[set] == UINT64_MAX)
            continue;
        if (rank == working) {
            least = best[set] < least ? best[set] : least;
            continue;
        }
        for (uint32_t i = 0; i < count; i++) {
            if ((set >> i & 1) || f->members[i].leaving)
                continue;
            uint64_t bytes = best[set] + bytes_to_receive(f, &marks[i], rank);
            if (bytes < best[set | 1u << i])
                best[set | 1u << i] = bytes;
        }
    }
    free(best);
    return least;
}

/* The newest step that the members have together, by trying all. Returns false when there is none at or above the
 * checkpoint. */
static bool reference_start(const struct fixture *f, struct marks *marks, uint64_t *ret_step)
{
    for (uint64_t step = 20; step > 0; step--) {
        bool known = false;
        if (f->input.checkpoint && step < f->input.checkpoint_step)
            return false;
        for (uint32_t i = 0; i < f->input.member_count; i++)
            known = known || (f->members[i].held.has_result && f->members[i].held.result.step == step - 1);
        for (uint32_t i = 0; i < f->input.member_count; i++)
            mark_member(f, i, step, known, &marks[i]);
        if (whole_without(f, marks, UINT32_MAX)) {
            *ret_step = step;
            return true;
        }
    }
    return false;
}

static struct mu_held random_held(uint64_t *seed, const struct mu_layout *old, uint32_t rank)
{
    struct mu_held held = at_rank(10 + mu_splitmix64(seed) % 2, old, rank);
    if (held.step == 10) {
        held.has_gradient = mu_splitmix64(seed) % 4 > 0;
        held.has_result = mu_splitmix64(seed) % 2;
        held.result = result_of(mu_splitmix64(seed) % 2 ? 10 : 9);
    } else {
        held.shares[0].owned_only = old->sharded && mu_splitmix64(seed) % 2;
    }
    if (mu_splitmix64(seed) % 4 == 0) { /* prepared for a generation that never ran */
        struct mu_layout next = make_layout(1u << mu_splitmix64(seed) % 2, 1, 2, old->sharded);
        held.shares[held.share_count++] =
            (struct mu_held_share){.layout = next, .rank = (uint32_t)(mu_splitmix64(seed) % mu_layout_working(&next))};
    }
    return held;
}

static void random_input(struct fixture *f, uint64_t *seed, int round)
{
    uint32_t count = 1 + (uint32_t)(mu_splitmix64(seed) % 10);
    bool sharded = round % 3 == 0;
    setup(f, count, 64, 1, 64);
    f->spec.parallel.tp = 1u << mu_splitmix64(seed) % 2;
    f->spec.parallel.pp = 1 + (uint32_t)(mu_splitmix64(seed) % 2);
    f->spec.parallel.optimizer_sharding = sharded;
    f->spec.workers.max = 4 + (uint32_t)(mu_splitmix64(seed) % 7);
    f->spec.workers.spares = (uint32_t)(mu_splitmix64(seed) % 2);
    struct mu_layout old = make_layout(f->spec.parallel.tp, f->spec.parallel.pp, 1, sharded);
    if (round % 2)
        old = make_layout(1u << mu_splitmix64(seed) % 3, 1 + (uint32_t)(mu_splitmix64(seed) % 2), 1, sharded);
    old.dp = 1 + (uint32_t)(mu_splitmix64(seed) % 3);
    f->input.has_old_layout = true;
    f->input.old_layout = old;
    uint32_t next = 0;
    for (uint32_t i = 0; i < count; i++) {
        next += mu_splitmix64(seed) % 8 == 0; /* lost */
        f->members[i].host = (uint32_t)(mu_splitmix64(seed) % 4);
        f->members[i].leaving = mu_splitmix64(seed) % 8 == 0;
        if (next < mu_layout_working(&old) && mu_splitmix64(seed) % 8)
            f->members[i].held = random_held(seed, &old, next++);
    }
    if (mu_splitmix64(seed) % 2) {
        f->input.checkpoint = 3;
        f->input.checkpoint_step = 9 + mu_splitmix64(seed) % 3;
    }
}

static void check_ranks(const struct fixture *f, const struct marks *marks, bool from_members)
{
    bool used[MEMBERS] = {0};
    uint32_t working = mu_layout_working(&f->plan.layout), wanted, eligible = 0;
    for (uint32_t i = 0; i < f->input.member_count; i++)
        eligible += !f->members[i].leaving;
    wanted = mu_plan_wanted(&f->spec, eligible - f->plan.left_out);
    assert_true(working <= wanted && working % (f->spec.parallel.tp * f->spec.parallel.pp) == 0);
    for (uint32_t rank = 0; rank < mu_layout_world(&f->plan.layout); rank++) {
        uint32_t member = f->ranks[rank].member;
        assert_false(used[member]);
        used[member] = true;
        if (rank < working)
            assert_false(f->members[member].leaving);
        else
            assert_true(from_members); /* only to copy from */
    }
    for (uint32_t i = 0; from_members && i < f->input.member_count; i++) {
        if (!whole_without(f, marks, i))
            assert_true(used[i]);
    }
}

static void test_random_histories(void **state)
{
    (void)state;
    uint64_t seed = 99, moved = 0, least = 0;
    uint32_t held = 0, elsewhere = 0, nothing = 0, idle = 0, worse = 0;
    static struct marks marks[MEMBERS];
    for (int round = 0; round < 3000; round++) {
        struct fixture f;
        random_input(&f, &seed, round);
        f.input.may_initialise = false;
        make(&f);
        uint64_t step = 0;
        bool from_members = reference_start(&f, marks, &step);
        if (f.plan.status == MU_ERR_UNAVAILABLE) {
            uint32_t eligible = 0;
            for (uint32_t i = 0; i < f.input.member_count; i++)
                eligible += !f.members[i].leaving;
            assert_true(mu_plan_wanted(&f.spec, eligible) < f.spec.parallel.tp * f.spec.parallel.pp);
            assert_true(f.plan.text[0]);
            continue;
        }
        assert_int_equal(f.plan.status, from_members || f.input.checkpoint ? MU_OK : MU_ERR_NOT_FOUND);
        if (f.plan.status) {
            nothing++;
            continue;
        }
        assert_int_equal(f.plan.start_step, from_members ? step : f.input.checkpoint_step);
        check_ranks(&f, marks, from_members);
        held += from_members;
        elsewhere += !from_members;
        idle += f.plan.layout.idle > 0;
        if (from_members) {
            uint64_t bytes = 0;
            for (uint32_t rank = 0; rank < mu_layout_working(&f.plan.layout); rank++)
                bytes += bytes_to_receive(&f, &marks[f.ranks[rank].member], rank);
            assert_int_equal(f.plan.reshard.bytes, bytes);
            assert_int_equal(f.plan.reshard.minimum_bytes, bytes);
            uint64_t best = best_assignment(&f, marks);
            assert_true(best <= bytes);
            worse += best < bytes;
            moved += bytes;
            least += best;
        }
        teardown(&f);
    }
    print_message("%u from members (%u with idle ranks, %u not the best placement, %.3f of the least bytes), %u from "
                  "checkpoints, %u from nowhere\n",
                  held, idle, worse, (double)moved / (double)least, elsewhere, nothing);
    assert_true(held > 500 && elsewhere > 100 && nothing > 100 && idle > 50);
    assert_true((double)moved < 1.05 * (double)least);
}

static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void plan_large(const char *what, struct mu_layout old, uint32_t tp, uint32_t pp, uint32_t lost)
{
    enum { LARGE = 16384 };
    struct fixture f;
    setup(&f, 0, LARGE, 1, LARGE);
    f.spec.model = (struct mu_model_config){.family = MU_FAMILY_LLAMA,
                                            .layers = 128,
                                            .heads = 128,
                                            .kv_heads = 8,
                                            .channels = 16384,
                                            .context = 8192,
                                            .vocab = 128256,
                                            .hidden = 53248,
                                            .slices = 8};
    mu_model_config_resolve(&f.spec.model);
    f.spec.parallel.tp = tp;
    f.spec.parallel.pp = pp;
    f.spec.parallel.optimizer_sharding = old.sharded;
    f.input.may_initialise = false;
    f.input.has_old_layout = true;
    f.input.old_layout = old;
    struct mu_plan_member *members = calloc(LARGE, sizeof *members);
    f.plan.ranks = calloc(LARGE, sizeof *f.plan.ranks);
    assert_true(members && f.plan.ranks);
    for (uint32_t i = 0; i < LARGE; i++) {
        members[i].host = i / 8;
        if (i != lost)
            members[i].held = at_rank(10, &old, i);
    }
    f.input.members = members;
    f.input.member_count = LARGE;
    double start = seconds_now();
    mu_plan_make(&f.input, &f.plan);
    double seconds = seconds_now() - start;
    print_message("%s: %.3f s, tp %u x pp %u x dp %u, %u moves, %.3f TB\n", what, seconds, f.plan.layout.tp,
                  f.plan.layout.pp, f.plan.layout.dp, f.plan.reshard.move_count, (double)f.plan.reshard.bytes * 1e-12);
    assert_int_equal(f.plan.status, MU_OK);
    assert_int_equal(f.plan.start_step, 10);
    assert_true(seconds < 20);
    teardown(&f);
    free(members);
    free(f.plan.ranks);
}

static struct mu_layout large_layout(uint32_t tp, uint32_t pp, uint32_t dp, bool sharded)
{
    struct mu_layout layout = {.tp = tp, .pp = pp, .dp = dp, .sharded = sharded};
    for (uint32_t p = 0; p <= pp; p++)
        layout.stage_first[p] = (uint16_t)(128 * p / pp);
    return layout;
}

static void test_large_worlds_are_planned_quickly(void **state)
{
    (void)state;
    plan_large("16384 as they are", large_layout(8, 16, 128, false), 8, 16, UINT32_MAX);
    plan_large("one replaced", large_layout(8, 16, 128, false), 8, 16, 4711);
    plan_large("pp 16 to 8", large_layout(8, 16, 128, false), 8, 8, 4711);
    plan_large("tp 8 to 4, pp 16 to 32", large_layout(8, 16, 128, false), 4, 32, 4711);
    plan_large("pp 1, as they are", large_layout(8, 1, 2048, false), 8, 1, 4711);
    plan_large("sharded, as they are", large_layout(8, 64, 32, true), 8, 64, UINT32_MAX);
    plan_large("sharded, pp 64 to 128", large_layout(8, 64, 32, true), 8, 128, UINT32_MAX);
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
        cmocka_unit_test(test_nobody_moves_when_nothing_changes),
        cmocka_unit_test(test_a_joiner_takes_the_place_of_the_lost_one),
        cmocka_unit_test(test_a_lost_member_takes_its_replica_along),
        cmocka_unit_test(test_a_lost_stage_comes_from_the_checkpoint),
        cmocka_unit_test(test_the_newest_whole_step_is_taken),
        cmocka_unit_test(test_two_by_two_becomes_three_by_one),
        cmocka_unit_test(test_a_sharded_update_is_rolled_forward_by_its_owners),
        cmocka_unit_test(test_a_sharded_world_grows_around_its_owners),
        cmocka_unit_test(test_a_sharded_world_shrinks_through_idle_ranks),
        cmocka_unit_test(test_the_only_holder_of_a_stage_leaves_as_an_idle_rank),
        cmocka_unit_test(test_the_only_source_of_a_stage_is_never_left_out),
        cmocka_unit_test(test_too_few_for_the_layout_is_unavailable),
        cmocka_unit_test(test_no_rank_has_more_peers_than_it_may),
        cmocka_unit_test(test_tensor_groups_stay_on_one_host),
        cmocka_unit_test(test_random_histories),
        cmocka_unit_test(test_large_worlds_are_planned_quickly),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
