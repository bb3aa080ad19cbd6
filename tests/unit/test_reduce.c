/* links: mu_engine mu_comm mu_kernels mu_plan */
#include "worker/reduce.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/rng.h"
#include "plan/plan.h"
#include "link_testing.h"
#include "tests/lib/sanitized.h"

enum { WORLD_MAX = 72, STEPS = 2, PATIENCE_US = 120 * 1000000, COLUMNS_MAX = 8 };

static const uint8_t secret[MU_COMM_SECRET_SIZE] = "the secret of this generation..";

/* One exchange: all ranks of a layout as threads of this process, each with its own sockets. */
struct exchange {
    struct mu_model_spec model;
    struct mu_layout layout;
    uint32_t world, leaves, threads, segment_chunks;
    bool tree, gpus, early;
    struct twin columns[COLUMNS_MAX]; /* gpus: by stage and slice */
    uint32_t leaf_counts[WORLD_MAX];
    uint64_t staging_bytes;
    const float *expected[STEPS];
    double expected_loss, expected_squares;
    pthread_barrier_t ready;
    struct rank {
        struct exchange *exchange;
        uint32_t rank;
        struct mu_id incarnation;
        struct mu_comm *comm;
        pthread_t thread;
        char trouble[256]; /* empty: all was as expected */
    } ranks[WORLD_MAX];
};

/* Gradient element of a leaf: a few bits of mantissa differ in size so much that any other order of addition shows. */
static float gradient_of(uint64_t step, uint32_t leaf, uint64_t element)
{
    uint64_t state = (step * 1000003 + leaf) * 0x9e3779b97f4a7c15ull + element;
    uint64_t bits = mu_splitmix64(&state);
    return ((float)(bits & 0xffffff) - 8388608.0f) * (bits >> 60 & 1 ? 1e-7f : 3e-3f);
}

static double loss_of(uint32_t leaf)
{
    return 3.0 + 1e-9 * leaf * leaf + (leaf % 3 == 0 ? 1e9 : 0.1);
}

static float sum_node(uint64_t step, struct mu_tree_node node, uint64_t element)
{
    if (node.count == 1)
        return gradient_of(step, node.first, element);
    struct mu_tree_node left, right;
    mu_tree_children(node, &left, &right);
    return sum_node(step, left, element) + sum_node(step, right, element);
}

static double sum_losses(struct mu_tree_node node)
{
    if (node.count == 1)
        return loss_of(node.first);
    struct mu_tree_node left, right;
    mu_tree_children(node, &left, &right);
    return sum_losses(left) + sum_losses(right);
}

static float *expected_sum(const struct exchange *x, uint64_t step)
{
    float *sum = calloc(x->model.flat_size, sizeof *sum);
    assert_non_null(sum);
    for (uint32_t i = 0; i < x->model.cell_count; i++) {
        struct mu_cell cell = mu_model_cell(&x->model, i);
        for (uint64_t e = cell.offset; e < cell.offset + cell.size; e++)
            sum[e] = sum_node(step, (struct mu_tree_node){0, x->leaves}, e);
    }
    return sum;
}

/* ---- one rank ---- */

struct rank_state {
    struct mu_pool *pool;
    struct mu_reduce *reduce;
    struct mu_comm_group *group;
    struct mu_nccl nccl;
    struct mu_nccl_link link;
    float *stack[MU_TREE_ROOTS_MAX], *staging, *params;
    uint32_t first_leaf, leaf_count, depth_max;
    bool idle, reports; /* reports: losses of its replica */
};

static uint32_t peers_of(const struct exchange *x, uint32_t rank, uint32_t out[MU_LAYOUT_NEIGHBOURS_MAX])
{
    return x->tree && !x->layout.sharded ? mu_layout_binomial(x->world, rank, out)
                                         : mu_layout_neighbours(&x->model, &x->layout, rank, out);
}

static bool open_group(struct rank *rank, struct rank_state *s)
{
    struct exchange *x = rank->exchange;
    uint32_t neighbours[MU_LAYOUT_NEIGHBOURS_MAX], count = peers_of(x, rank->rank, neighbours);
    struct mu_comm_peer peers[MU_LAYOUT_NEIGHBOURS_MAX];
    for (uint32_t i = 0; i < count; i++)
        peers[i] = (struct mu_comm_peer){neighbours[i], x->ranks[neighbours[i]].incarnation,
                                         mu_comm_address(x->ranks[neighbours[i]].comm)};
    struct mu_comm_group_config config = {.generation = 1,
                                          .rank = rank->rank,
                                          .world = x->world,
                                          .incarnation = rank->incarnation,
                                          .peers = peers,
                                          .peer_count = count};
    memcpy(config.secret, secret, sizeof secret);
    uint64_t deadline_us = mu_clock_mono_us() + PATIENCE_US;
    struct mu_error err;
    if (mu_comm_open(rank->comm, &config, deadline_us, &s->group, &err) != MU_OK ||
        mu_comm_wait_ready(s->group, deadline_us, &err) != MU_OK) {
        snprintf(rank->trouble, sizeof rank->trouble, "open: %.200s", err.text);
        return false;
    }
    return true;
}

static uint32_t replica_of(const struct exchange *x, uint32_t rank)
{
    return rank == MU_LAYOUT_NOBODY ? MU_REDUCE_NO_BUDDY : mu_layout_coords(&x->layout, rank).d;
}

static bool make_reduce(struct rank *rank, struct rank_state *s)
{
    struct exchange *x = rank->exchange;
    struct mu_error err;
    struct mu_chunk_run runs[MU_RUNS_MAX];
    uint32_t ranks[WORLD_MAX] = {rank->rank};
    s->idle = mu_layout_is_idle(&x->layout, rank->rank);
    struct mu_coords at = {0};
    if (!s->idle)
        at = mu_layout_coords(&x->layout, rank->rank);
    for (uint32_t d = 0; !s->idle && d < x->layout.dp; d++)
        ranks[d] = mu_layout_rank(&x->layout, (struct mu_coords){at.t, d, at.p});
    s->reports = !s->idle && at.t == 0 && at.p == x->layout.pp - 1;
    struct mu_reduce_config config = {.model = &x->model,
                                      .pool = s->pool,
                                      .leaves = x->leaves,
                                      .replicas = s->idle ? 1 : x->layout.dp,
                                      .index = at.d,
                                      .ranks = ranks,
                                      .leaf_counts = s->idle ? NULL : x->leaf_counts,
                                      .runs = runs,
                                      .run_count =
                                          mu_layout_runs(&x->model, &x->layout, rank->rank, MU_SHARE_PARAMS, runs),
                                      .sharded = x->layout.sharded,
                                      .buddy = replica_of(x, mu_layout_buddy(&x->layout, rank->rank)),
                                      .guarded = replica_of(x, mu_layout_guarded(&x->layout, rank->rank)),
                                      .world = x->world,
                                      .rank = rank->rank,
                                      .tree = x->tree,
                                      .gpus = x->gpus && !s->idle,
                                      .staging_bytes = x->staging_bytes,
                                      .segment_chunks = x->segment_chunks};
    if (mu_reduce_new(&config, &s->reduce, &err) != MU_OK) {
        snprintf(rank->trouble, sizeof rank->trouble, "reduce: %.200s", err.text);
        return false;
    }
    if (!s->idle)
        s->first_leaf = mu_plan_leaf_range(x->leaves, x->layout.dp, x->leaf_counts, at.d, &s->leaf_count);
    s->depth_max = mu_tree_buffers(x->leaves, s->first_leaf, s->leaf_count);
    s->depth_max = s->depth_max ? s->depth_max : 1;
    for (uint32_t i = 0; i < s->depth_max; i++)
        s->stack[i] = calloc(x->model.flat_size, sizeof(float));
    s->params = calloc(x->model.flat_size, sizeof(float));
    /* Exactly what was asked for, so that a sanitizer sees what is too much. */
    s->staging = malloc(mu_reduce_staging_bytes(s->reduce) + 1);
    if (x->gpus && !s->idle) {
        s->nccl = (struct mu_nccl){.twin = &x->columns[at.p * x->layout.tp + at.t], .index = at.d};
        s->link = (struct mu_nccl_link){.ops = &twin_ops, .nccl = &s->nccl};
    }
    mu_reduce_attach(s->reduce, s->group, &s->link, s->staging);
    return true;
}

static void sum_own_leaves(struct rank_state *s, const struct exchange *x, uint64_t step, struct mu_small *small)
{
    uint32_t depth = 0;
    for (uint32_t leaf = s->first_leaf; leaf < s->first_leaf + s->leaf_count; leaf++) {
        for (uint64_t e = 0; e < x->model.flat_size; e++)
            s->stack[depth][e] = gradient_of(step, leaf, e);
        if (s->reports) {
            mu_small_push(small, x->leaves, s->first_leaf, leaf, loss_of(leaf));
            mu_exact_sum_add(&small->squares, loss_of(leaf));
        }
        for (uint32_t i = mu_tree_carries(x->leaves, s->first_leaf, leaf); i > 0; i--, depth--)
            for (uint64_t e = 0; e < x->model.flat_size; e++)
                s->stack[depth - 1][e] += s->stack[depth][e];
        depth++;
    }
}

/* The rank's own update of what it mirrors. */
static void update_mirror(const struct exchange *x, uint32_t rank, float *params, const float *updated)
{
    struct mu_chunk_run runs[MU_RUNS_MAX];
    uint32_t count = mu_layout_runs(&x->model, &x->layout, rank, MU_SHARE_MIRROR, runs);
    for (uint32_t i = 0; i < count; i++) {
        for (uint32_t c = runs[i].first; c < runs[i].first + runs[i].count; c++) {
            struct mu_chunk chunk = mu_model_chunk(&x->model, c);
            memcpy(params + chunk.offset, updated + chunk.offset, chunk.size * sizeof *params);
        }
    }
}

/* Elements of a share that differ: the first one's number, or UINT64_MAX. Gaps between cells do not count. */
static uint64_t first_difference(const struct exchange *x, uint32_t rank, enum mu_share share, const float *is,
                                 const float *wanted)
{
    struct mu_chunk_run runs[MU_RUNS_MAX];
    uint32_t count = mu_layout_runs(&x->model, &x->layout, rank, share, runs);
    for (uint32_t i = 0; i < count; i++) {
        for (uint32_t c = runs[i].first; c < runs[i].first + runs[i].count; c++) {
            struct mu_chunk chunk = mu_model_chunk(&x->model, c);
            for (uint64_t e = chunk.offset; e < chunk.offset + chunk.size; e++)
                if (memcmp(&is[e], &wanted[e], sizeof is[e]) != 0)
                    return e;
        }
    }
    return UINT64_MAX;
}

/* "Updated" parameters of owned parts go round; everything of the column must arrive, nothing else must change. */
static bool gather(struct rank *rank, struct rank_state *s, uint64_t step, struct mu_error *err)
{
    struct exchange *x = rank->exchange;
    if (!x->layout.sharded || x->layout.dp == 1 || s->idle)
        return true;
    for (uint64_t e = 0; e < x->model.flat_size; e++)
        s->params[e] = -7.0f;
    enum mu_status status = mu_reduce_gather_begin(s->reduce, step, s->params, err);
    for (uint32_t part = 0; part < mu_reduce_part_count(s->reduce) && status == MU_OK; part++) {
        uint64_t offset, size;
        mu_reduce_part(s->reduce, part, &offset, &size);
        memcpy(s->params + offset, x->expected[step] + offset, size * sizeof(float));
        status = mu_reduce_gather_send(s->reduce, part, err);
    }
    update_mirror(x, rank->rank, s->params, x->expected[step]); /* the gather leaves it alone */
    if (status == MU_OK)
        status = mu_reduce_gather_finish(s->reduce, err);
    if (status != MU_OK)
        return false;
    uint64_t wrong = first_difference(x, rank->rank, MU_SHARE_PARAMS, s->params, x->expected[step]), kept = 0;
    for (uint64_t e = 0; e < x->model.flat_size; e++)
        kept += s->params[e] == -7.0f;
    uint64_t column = mu_layout_elements(&x->model, &x->layout, rank->rank, MU_SHARE_PARAMS);
    if (wrong == UINT64_MAX && kept == x->model.flat_size - column)
        return true;
    snprintf(err->text, sizeof err->text, "gather: element %llu, or %llu of others", (unsigned long long)wrong,
             (unsigned long long)kept);
    return false;
}

static bool one_step(struct rank *rank, struct rank_state *s, uint64_t step)
{
    struct exchange *x = rank->exchange;
    struct mu_error err = {0};
    struct mu_small own, total;
    mu_small_init(&own);
    own.command = 100 + (rank->rank + 3) % x->world;
    own.digest[rank->rank % MU_DIGEST_SIZE] = (uint8_t)(1u << rank->rank / MU_DIGEST_SIZE);
    enum mu_status status = mu_reduce_begin(s->reduce, step, s->stack, &err);
    if (status == MU_OK)
        sum_own_leaves(s, x, step, &own);
    uint64_t before = s->nccl.exchanges;
    bool early = !x->early || s->idle;
    for (uint32_t cell = x->model.cell_count; cell-- > 0 && status == MU_OK;) {
        early = early || s->nccl.exchanges > before; /* while cells are still missing */
        status = mu_reduce_cell_ready(s->reduce, cell, &err);
    }
    if (status == MU_OK && !early)
        status = mu_fail(&err, MU_ERR_INTERNAL, "nothing was exchanged before the last cell was ready");
    if (status == MU_OK)
        status = mu_reduce_finish(s->reduce, &err);
    if (status == MU_OK)
        status = mu_reduce_small(s->reduce, step, MU_SMALL_VOTE, x->leaves, &own, &total, &err);
    if (status != MU_OK || !gather(rank, s, step, &err)) {
        snprintf(rank->trouble, sizeof rank->trouble, "step: %.200s", err.text);
        return false;
    }
    uint64_t wrong = first_difference(x, rank->rank, x->layout.sharded ? MU_SHARE_OWNED : MU_SHARE_PARAMS, s->stack[0],
                                      x->expected[step]);
    if (wrong == UINT64_MAX)
        wrong = first_difference(x, rank->rank, MU_SHARE_MIRROR, s->stack[0], x->expected[step]);
    if (wrong != UINT64_MAX) {
        snprintf(rank->trouble, sizeof rank->trouble, "step %d: sum of element %llu differs", (int)step,
                 (unsigned long long)wrong);
        return false;
    }
    bool all_digests = true;
    for (uint32_t i = 0; i < x->world; i++)
        all_digests = all_digests && (total.digest[i % MU_DIGEST_SIZE] >> i / MU_DIGEST_SIZE & 1);
    if (total.roots[0] != x->expected_loss || mu_exact_sum_round(&total.squares) != x->expected_squares ||
        total.command != 100 || !all_digests) {
        snprintf(rank->trouble, sizeof rank->trouble, "vote differs: loss %.17g, command %d", total.roots[0],
                 (int)total.command);
        return false;
    }
    mu_small_init(&own);
    if (mu_reduce_small(s->reduce, step, MU_SMALL_END, 0, &own, &total, &err) != MU_OK || total.command != UINT64_MAX) {
        snprintf(rank->trouble, sizeof rank->trouble, "end: %.200s", err.text);
        return false;
    }
    return true;
}

static void *rank_main(void *arg)
{
    struct rank *rank = arg;
    struct rank_state s = {0};
    struct mu_error err;
    bool ok = mu_pool_new(rank->exchange->threads, &err, &s.pool) == MU_OK;
    if (!ok)
        snprintf(rank->trouble, sizeof rank->trouble, "pool: %.200s", err.text);
    ok = ok && (rank->exchange->world == 1 || open_group(rank, &s)) && make_reduce(rank, &s);
    for (uint64_t step = 0; step < STEPS && ok; step++)
        ok = one_step(rank, &s, step);
    if (!ok) { /* or the others would wait for this one forever */
        for (uint32_t i = 0; rank->exchange->gpus && i < COLUMNS_MAX; i++)
            twin_break(&rank->exchange->columns[i]);
        mu_comm_group_close(s.group);
        s.group = NULL;
    }
    pthread_barrier_wait(&rank->exchange->ready); /* nobody leaves while others still exchange */
    mu_comm_group_close(s.group);
    mu_reduce_free(s.reduce);
    for (uint32_t i = 0; i < s.depth_max; i++)
        free(s.stack[i]);
    free(s.staging);
    free(s.params);
    mu_pool_free(s.pool);
    return NULL;
}

/* ---- all ranks ---- */

struct layout {
    uint32_t world; /* replicas; the whole model is one column unless tp, pp say otherwise */
    uint32_t leaves;
    bool mesh;
    uint32_t threads;
    uint32_t tp, pp, idle; /* 0: 1, 1, none */
    bool sharded;
    uint32_t buddy_shift;
    const uint32_t *leaf_counts; /* NULL: equal */
    uint64_t staging_bytes;
    uint32_t segment_chunks;
    bool gpus;  /* sums and gathers as between GPUs */
    bool early; /* they begin before all cells are ready */
};

static void check_layout(const struct mu_model_config *config, const struct layout *layout)
{
    struct exchange *x = calloc(1, sizeof *x);
    assert_non_null(x);
    mu_model_spec_init(&x->model, config);
    mu_layout_init(&x->layout, layout->world, config->layers);
    x->layout.tp = layout->tp ? layout->tp : 1;
    x->layout.pp = layout->pp ? layout->pp : 1;
    x->layout.idle = layout->idle;
    x->layout.sharded = layout->sharded;
    x->layout.buddy_shift = layout->buddy_shift;
    for (uint32_t p = 0; p <= x->layout.pp; p++)
        x->layout.stage_first[p] = (uint16_t)(p * config->layers / x->layout.pp);
    x->world = mu_layout_world(&x->layout);
    assert_true(x->world <= WORLD_MAX);
    x->leaves = layout->leaves;
    x->tree = !layout->mesh && !layout->gpus;
    x->gpus = layout->gpus;
    x->early = layout->early;
    assert_true(!x->gpus || x->layout.tp * x->layout.pp <= COLUMNS_MAX);
    for (uint32_t i = 0; i < COLUMNS_MAX; i++)
        twin_init(&x->columns[i]);
    x->threads = layout->threads;
    x->staging_bytes = layout->staging_bytes;
    x->segment_chunks = layout->segment_chunks;
    for (uint32_t i = 0; i < layout->world; i++)
        mu_plan_leaf_range(x->leaves, layout->world, layout->leaf_counts, i, &x->leaf_counts[i]);
    for (uint64_t step = 0; step < STEPS; step++)
        x->expected[step] = expected_sum(x, step);
    x->expected_loss = sum_losses((struct mu_tree_node){0, x->leaves});
    struct mu_exact_sum squares;
    mu_exact_sum_init(&squares);
    for (uint32_t leaf = 0; leaf < x->leaves; leaf++)
        mu_exact_sum_add(&squares, loss_of(leaf));
    x->expected_squares = mu_exact_sum_round(&squares);

    pthread_barrier_init(&x->ready, NULL, x->world);
    for (uint32_t i = 0; i < x->world; i++) {
        struct mu_error err;
        x->ranks[i] = (struct rank){.exchange = x, .rank = i, .incarnation = mu_id_random()};
        assert_int_equal(mu_comm_new(&(struct mu_comm_config){.host_id = "host"}, &x->ranks[i].comm, &err), MU_OK);
    }
    for (uint32_t i = 0; i < x->world; i++)
        assert_int_equal(pthread_create(&x->ranks[i].thread, NULL, rank_main, &x->ranks[i]), 0);
    for (uint32_t i = 0; i < x->world; i++)
        pthread_join(x->ranks[i].thread, NULL);
    for (uint32_t i = 0; i < x->world; i++)
        mu_comm_free(x->ranks[i].comm);
    pthread_barrier_destroy(&x->ready);
    for (uint32_t i = 0; i < COLUMNS_MAX; i++)
        twin_fini(&x->columns[i]);
    for (uint64_t step = 0; step < STEPS; step++)
        free((void *)x->expected[step]);
    for (uint32_t i = 0; i < x->world; i++) {
        if (x->ranks[i].trouble[0])
            fail_msg("tp %u pp %u dp %u, %s, rank %u: %s", x->layout.tp, x->layout.pp, x->layout.dp,
                     x->tree ? "tree" : "mesh", i, x->ranks[i].trouble);
    }
    free(x);
}

/* 3 chunks in the largest cells, others smaller than one: runs that end at cells and at owners. */
static const struct mu_model_config medium = {
    .family = MU_FAMILY_GPT2, .layers = 1, .heads = 2, .channels = 104, .context = 16, .vocab = 1300};
static const struct mu_model_config tiny = {
    .family = MU_FAMILY_GPT2, .layers = 1, .heads = 2, .channels = 8, .context = 8, .vocab = 16};

static void test_reduce_mesh_any_world_gives_the_tree_sum(void **state)
{
    (void)state;
    for (uint32_t world = 1; world <= 7; world++)
        check_layout(
            &medium,
            &(struct layout){
                .world = world, .leaves = 11, .mesh = true, .threads = 1 + world % 3, .staging_bytes = 1 << 28});
}

static void test_reduce_tree_any_world_gives_the_tree_sum(void **state)
{
    (void)state;
    for (uint32_t world = 2; world <= 7; world++)
        check_layout(
            &medium,
            &(struct layout){
                .world = world, .leaves = 11, .mesh = false, .threads = 1 + world % 2, .staging_bytes = 1 << 28});
}

static void test_reduce_smallest_window_gives_the_tree_sum(void **state)
{
    (void)state;
    for (uint32_t world = 2; world <= 5; world += 3)
        for (uint32_t mesh = 0; mesh < 2; mesh++)
            check_layout(&medium,
                         &(struct layout){.world = world, .leaves = 9, .mesh = mesh, .threads = 1, .staging_bytes = 1});
}

static void test_reduce_uneven_leaves_and_ranks_without_leaves_give_the_tree_sum(void **state)
{
    (void)state;
    static const uint32_t counts[][5] = {
        {7, 1, 2, 3, 0}, {0, 6, 0, 1, 6}, {0, 0, 13, 0, 0}, {1, 1, 1, 1, 9}, {3, 5, 3, 1, 1}};
    for (uint32_t i = 0; i < 5; i++)
        for (uint32_t mesh = 0; mesh < 2; mesh++)
            check_layout(&tiny, &(struct layout){.world = 5,
                                                 .leaves = 13,
                                                 .mesh = mesh,
                                                 .threads = 1,
                                                 .leaf_counts = counts[i],
                                                 .staging_bytes = 1 << 28});
}

static void test_reduce_long_segments_give_the_tree_sum(void **state)
{
    (void)state;
    for (uint32_t mesh = 0; mesh < 2; mesh++)
        check_layout(
            &medium,
            &(struct layout){
                .world = 3, .leaves = 8, .mesh = mesh, .threads = 1, .staging_bytes = 1 << 28, .segment_chunks = 2});
}

static void test_reduce_large_world_along_the_tree_gives_the_tree_sum(void **state)
{
    (void)state;
    check_layout(&tiny,
                 &(struct layout){.world = 33, .leaves = 48, .mesh = false, .threads = 1, .staging_bytes = 1 << 20});
    check_layout(&tiny,
                 &(struct layout){.world = 40, .leaves = 40, .mesh = false, .threads = 1, .staging_bytes = 1 << 20});
}

static void test_reduce_more_ranks_than_chunks_gives_the_tree_sum(void **state)
{
    (void)state;
    check_layout(&tiny,
                 &(struct layout){.world = 12, .leaves = 12, .mesh = true, .threads = 1, .staging_bytes = 1 << 20});
}

static const struct mu_model_config sliced = {
    .family = MU_FAMILY_GPT2, .layers = 3, .heads = 4, .channels = 104, .context = 16, .vocab = 1300, .slices = 4};

static void test_reduce_sharded_sums_at_owners_and_gathers_to_all(void **state)
{
    (void)state;
    for (uint32_t world = 2; world <= 5; world++)
        check_layout(&medium, &(struct layout){.world = world,
                                               .leaves = 11,
                                               .mesh = true,
                                               .threads = 1 + world % 2,
                                               .sharded = true,
                                               .staging_bytes = 1 << 28});
    check_layout(&tiny, &(struct layout){.world = 12, .leaves = 12, .mesh = true, .threads = 1, .sharded = true});
    check_layout(
        &medium,
        &(struct layout){.world = 4, .leaves = 9, .mesh = true, .threads = 1, .sharded = true, .segment_chunks = 3});
}

/* More than a mesh takes: sums to all along the tree, gathers within shard groups (33: of 17 and 16; 70: of 24, 23,
 * 23).
 */
static void test_reduce_sharded_beyond_a_mesh_gathers_in_groups(void **state)
{
    (void)state;
    for (uint32_t world = 2; world <= 5; world++)
        check_layout(&medium, &(struct layout){.world = world,
                                               .leaves = 11,
                                               .mesh = false,
                                               .threads = 1,
                                               .sharded = true,
                                               .staging_bytes = 1 << 28,
                                               .segment_chunks = world % 3});
    static const uint32_t worlds[] = {33, 40, 70};
    for (size_t i = 0; i < sizeof worlds / sizeof worlds[0]; i++)
        check_layout(i == 1 ? &medium : &tiny, &(struct layout){.world = worlds[i],
                                                                .leaves = 75,
                                                                .mesh = false,
                                                                .threads = 1,
                                                                .sharded = true,
                                                                .staging_bytes = 1 << 20,
                                                                .segment_chunks = 2});
}

static void test_reduce_sharded_sums_go_to_buddies_too(void **state)
{
    (void)state;
    static const uint32_t uneven[] = {0, 7, 1, 3};
    for (uint32_t world = 2; world <= 5; world++) {
        for (uint32_t shift = 1; shift < world; shift++)
            check_layout(&medium, &(struct layout){.world = world,
                                                   .leaves = 11,
                                                   .mesh = true,
                                                   .threads = 1 + world % 2,
                                                   .sharded = true,
                                                   .buddy_shift = shift,
                                                   .leaf_counts = world == 4 ? uneven : NULL,
                                                   .staging_bytes = shift == 1 ? 1 : 1 << 28});
    }
    check_layout(&tiny, &(struct layout){.world = 12,
                                         .leaves = 12,
                                         .mesh = true,
                                         .threads = 1,
                                         .sharded = true,
                                         .buddy_shift = 5,
                                         .staging_bytes = 1 << 20});
    check_layout(&sliced, &(struct layout){.world = 3,
                                           .leaves = 7,
                                           .mesh = true,
                                           .threads = 1,
                                           .tp = 2,
                                           .pp = 2,
                                           .idle = 1,
                                           .sharded = true,
                                           .buddy_shift = 2,
                                           .staging_bytes = 1 << 28,
                                           .segment_chunks = 2});
}

static void test_reduce_columns_of_a_layout_give_the_tree_sum(void **state)
{
    (void)state;
    for (uint32_t sharded = 0; sharded < 2; sharded++) {
        check_layout(&sliced, &(struct layout){.world = 3,
                                               .leaves = 7,
                                               .mesh = true,
                                               .threads = 1,
                                               .tp = 2,
                                               .pp = 3,
                                               .sharded = sharded,
                                               .staging_bytes = 1 << 28});
        check_layout(&sliced, &(struct layout){.world = 2,
                                               .leaves = 5,
                                               .mesh = true,
                                               .threads = 1,
                                               .tp = 4,
                                               .pp = 2,
                                               .idle = 3,
                                               .sharded = sharded,
                                               .staging_bytes = 1 << 20});
        check_layout(
            &sliced,
            &(struct layout){
                .world = 1, .leaves = 5, .mesh = true, .threads = 1, .tp = 4, .pp = 3, .idle = 1, .sharded = sharded});
    }
}

/* ---- between GPUs ---- */

static void test_reduce_between_gpus_gives_the_tree_sum(void **state)
{
    (void)state;
    static const uint32_t worlds[] = {2, 3, 3, 4, 7};
    for (uint32_t i = 0; i < 5; i++)
        check_layout(&medium, &(struct layout){.world = worlds[i],
                                               .leaves = 11,
                                               .gpus = true,
                                               .threads = 1 + i % 2,
                                               .sharded = i % 2,
                                               .early = worlds[i] == 3,
                                               .staging_bytes = worlds[i] % 2 ? 1 : 1 << 28,
                                               .segment_chunks = worlds[i] % 3});
    static const uint32_t counts[][5] = {
        {7, 1, 2, 3, 0}, {0, 6, 0, 1, 6}, {0, 0, 13, 0, 0}, {1, 1, 1, 1, 9}, {3, 5, 3, 1, 1}};
    for (uint32_t i = 0; i < 5; i++)
        check_layout(&tiny, &(struct layout){.world = 5,
                                             .leaves = 13,
                                             .gpus = true,
                                             .threads = 1,
                                             .sharded = i % 2,
                                             .leaf_counts = counts[i],
                                             .staging_bytes = 1 << 20});
}

static void test_reduce_between_gpus_goes_to_buddies_too(void **state)
{
    (void)state;
    for (uint32_t world = 2; world <= 4; world += 2)
        for (uint32_t shift = 1; shift < world; shift++)
            check_layout(&medium, &(struct layout){.world = world,
                                                   .leaves = 5,
                                                   .gpus = true,
                                                   .threads = 1,
                                                   .sharded = true,
                                                   .buddy_shift = shift,
                                                   .staging_bytes = 1 << 28});
    check_layout(&sliced, &(struct layout){.world = 3,
                                           .leaves = 7,
                                           .gpus = true,
                                           .threads = 1,
                                           .tp = 2,
                                           .pp = 2,
                                           .idle = 1,
                                           .sharded = true,
                                           .buddy_shift = 2,
                                           .staging_bytes = 1 << 28,
                                           .segment_chunks = 2});
}

/* Groups of 17 and 16, of 20, of 24 and 23, each with more segments than members; 70 replicas of which many have no
 * leaf. */
static const struct mu_model_config deep = {
    .family = MU_FAMILY_GPT2, .layers = 20, .heads = 2, .channels = 8, .context = 8, .vocab = 16};

static void test_reduce_between_many_gpus_gives_the_tree_sum(void **state)
{
    (void)state;
    static const struct {
        uint32_t world, leaves;
    } cases[] = {{33, 48}, {40, 40}, {70, 75}, {64, 128}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i += 1 + 2 * SANITIZED)
        for (uint32_t sharded = 0; sharded < 2; sharded++)
            check_layout(&deep, &(struct layout){.world = cases[i].world,
                                                 .leaves = cases[i].leaves,
                                                 .gpus = true,
                                                 .early = i == 0 || i == 2,
                                                 .threads = 1,
                                                 .sharded = sharded,
                                                 .staging_bytes = i % 2 ? 1 << 20 : 1});
    uint32_t uneven[70] = {0};
    for (uint32_t i = 0; i < 25; i++) /* the first group has none, the second one in the middle */
        uneven[27 + i] = 1 + i % 3;
    uneven[27] += 1;
    uint32_t leaves = 0;
    for (uint32_t i = 0; i < 70; i++)
        leaves += uneven[i];
    for (uint32_t sharded = 0; sharded < 2; sharded++)
        check_layout(&deep, &(struct layout){.world = 70,
                                             .leaves = leaves,
                                             .gpus = true,
                                             .threads = 1,
                                             .sharded = sharded,
                                             .leaf_counts = uneven,
                                             .staging_bytes = 1 << 20});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reduce_mesh_any_world_gives_the_tree_sum),
        cmocka_unit_test(test_reduce_tree_any_world_gives_the_tree_sum),
        cmocka_unit_test(test_reduce_smallest_window_gives_the_tree_sum),
        cmocka_unit_test(test_reduce_uneven_leaves_and_ranks_without_leaves_give_the_tree_sum),
        cmocka_unit_test(test_reduce_long_segments_give_the_tree_sum),
        cmocka_unit_test(test_reduce_large_world_along_the_tree_gives_the_tree_sum),
        cmocka_unit_test(test_reduce_sharded_sums_at_owners_and_gathers_to_all),
        cmocka_unit_test(test_reduce_sharded_beyond_a_mesh_gathers_in_groups),
        cmocka_unit_test(test_reduce_sharded_sums_go_to_buddies_too),
        cmocka_unit_test(test_reduce_columns_of_a_layout_give_the_tree_sum),
        cmocka_unit_test(test_reduce_more_ranks_than_chunks_gives_the_tree_sum),
        cmocka_unit_test(test_reduce_between_gpus_gives_the_tree_sum),
        cmocka_unit_test(test_reduce_between_gpus_goes_to_buddies_too),
        cmocka_unit_test(test_reduce_between_many_gpus_gives_the_tree_sum),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
