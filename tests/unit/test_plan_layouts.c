/* links: mu_plan */
#include "tests/unit/plan_testing.h"

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

static void test_workers_of_one_host_share_its_memory(void **state)
{
    (void)state;
    struct fixture f;
    setup(&f, 2, 8, 1, 2);
    f.spec.model.layers = 12;
    f.spec.model.channels = 768;
    f.spec.model.hidden = 4 * 768;
    f.spec.model.vocab = 50257;
    f.spec.parallel.tp = f.spec.parallel.pp = 0;
    uint64_t whole = mu_memory_of_worker(&f.spec, 2, 1).total_bytes;
    for (uint32_t i = 0; i < 2; i++) {
        f.members[i].memory_bytes = whole * 3 / 2;
        f.members[i].host = i;
    }
    make(&f);
    assert_int_equal(f.plan.status, MU_OK);
    assert_int_equal(f.plan.layout.dp, 2);
    f.members[1].host = 0; /* the whole model twice is more than the host has: each gets a part */
    make(&f);
    assert_int_equal(f.plan.status, MU_OK);
    assert_int_equal(f.plan.layout.dp, 1);
    assert_int_equal(f.plan.layout.tp * f.plan.layout.pp, 2);
    f.spec.workers.max = 1; /* the other is a spare: it needs nothing */
    make(&f);
    assert_int_equal(f.plan.status, MU_OK);
    assert_int_equal(mu_layout_world(&f.plan.layout), 1);
    f.spec.workers.max = 2;
    f.spec.parallel.dp = 2;
    make(&f);
    assert_int_equal(f.plan.status, MU_ERR_UNAVAILABLE);
    assert_non_null(strstr(f.plan.text, "memory"));
    f.members[0].memory_bytes = f.members[1].memory_bytes = 2 * whole + 2;
    make(&f);
    assert_int_equal(f.plan.status, MU_OK);
    teardown(&f);
}

/* Fresh workers of hosts in an order for which no rotation parts all. */
static void test_buddies_of_mixed_hosts_are_apart(void **state)
{
    (void)state;
    static const uint32_t hosts[6] = {1, 1, 2, 1, 2, 2};
    struct fixture f;
    setup(&f, 6, 12, 1, 6);
    f.spec.parallel.optimizer_sharding = true;
    f.spec.parallel.redundancy = MU_REDUNDANCY_BUDDY;
    uint32_t together = 0;
    struct mu_layout given = {.tp = 1, .pp = 1, .dp = 6, .sharded = true};
    (void)mu_layout_buddy_shift(&given, hosts, hosts, &together);
    assert_int_not_equal(together, 6);
    for (uint32_t i = 0; i < 6; i++)
        f.members[i].host = f.members[i].domain = hosts[i];
    make(&f);
    assert_int_equal(f.plan.status, MU_OK);
    assert_int_equal(f.plan.layout.dp, 6);
    for (uint32_t rank = 0; rank < 6; rank++) {
        uint32_t buddy = mu_layout_buddy(&f.plan.layout, rank);
        assert_int_not_equal(f.members[f.ranks[rank].member].host, f.members[f.ranks[buddy].member].host);
    }
    teardown(&f);
}

/* One leaf of a small model on four workers: at the default speed its products count and are divided by tensor
 * parallelism; when they turn out to be fast, stages with their fewer exchanges are better. */
static void test_the_measured_speed_decides_between_layouts(void **state)
{
    (void)state;
    struct fixture f;
    setup(&f, 4, 1, 1, 4);
    f.spec.parallel.tp = f.spec.parallel.pp = 0;
    f.input.has_old_layout = true;
    mu_layout_init(&f.input.old_layout, 1, f.spec.model.layers);
    f.members[0].old_rank = 0;
    f.members[0].old_leaf_count = 1;
    make(&f);
    assert_int_equal(f.plan.status, MU_OK);
    assert_int_equal(f.plan.layout.tp, 4);
    f.members[0].seconds_per_layer = 1e-3;
    make(&f);
    assert_int_equal(f.plan.status, MU_OK);
    assert_int_equal(f.plan.layout.pp, 4);
    f.members[0].old_rank = UINT32_MAX; /* measured elsewhere: says nothing of this layout */
    make(&f);
    assert_int_equal(f.plan.layout.tp, 4);
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

/* Layers go from the stage whose workers are slow to the other one; from one slow replica of several leaves go; small
 * differences change nothing, nor do speeds that were measured in other degrees. */
static void test_layers_follow_the_speeds_of_stages(void **state)
{
    (void)state;
    struct fixture f;
    static const int ranks[] = {0, 1, 2, 3, 4, 5};
    struct mu_layout layout = make_layout(1, 2, 3, false);
    setup_layout(&f, &layout, 7, ranks, 6);
    for (uint32_t i = 0; i < 6; i++)
        f.members[i].seconds_per_layer = i < 3 ? 0.010 : 0.0102;
    f.input.costs = (struct mu_stage_costs){.embedding = 1, .head = MU_STAGE_COST_UNIT / 16};
    make(&f);
    assert_int_equal(f.plan.layout.stage_first[1], 2);
    assert_true(f.plan.saved_s <= 0);
    for (uint32_t i = 0; i < 3; i++)
        f.members[i].seconds_per_layer = 0.035; /* the whole first stage */
    make(&f);
    assert_int_equal(f.plan.status, MU_OK);
    assert_int_equal(f.plan.layout.stage_first[1], 1);
    assert_true(f.plan.saved_s > 0);
    for (uint32_t i = 0; i < 6; i++)
        assert_int_equal(rank_of_member(&f, i), i); /* nobody changes its stage */
    struct mu_layout first = f.plan.layout;
    f.input.old_layout = first; /* as it went: it stays */
    for (uint32_t i = 0; i < 6; i++)
        f.members[i].held = at_rank(7, &first, i);
    make(&f);
    assert_true(mu_layout_equal(&f.plan.layout, &first));
    assert_true(f.plan.saved_s <= 0);
    f.input.old_layout = layout;
    for (uint32_t i = 0; i < 6; i++)
        f.members[i].held = at_rank(7, &layout, i);
    for (uint32_t i = 1; i < 3; i++)
        f.members[i].seconds_per_layer = 0.010; /* one replica of it */
    make(&f);
    assert_int_equal(f.plan.layout.stage_first[1], 2);
    assert_true(f.leaf_counts[0] < f.leaf_counts[1]);
    teardown(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
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
        cmocka_unit_test(test_workers_of_one_host_share_its_memory),
        cmocka_unit_test(test_the_measured_speed_decides_between_layouts),
        cmocka_unit_test(test_tensor_groups_stay_on_one_host),
        cmocka_unit_test(test_buddies_of_mixed_hosts_are_apart),
        cmocka_unit_test(test_layers_follow_the_speeds_of_stages),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
