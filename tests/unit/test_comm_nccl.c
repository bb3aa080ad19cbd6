/* links: mu_comm_nccl_sim mu_cuda_kernels_sim mu_kernels mu_comm mu_plan */
#include "nccl_testing.h"

#include <math.h>

#include "plan/tree.h"
#include "tests/lib/sanitized.h"

static const size_t sizes[] = {0, 3, 4099, 1, 17, 1000, 70001};
enum { SIZES = SANITIZED ? 3 : sizeof sizes / sizeof sizes[0] };
enum { FIRST_WORLD = 1 + SANITIZED, NEXT_WORLD = 1 + SANITIZED }; /* starting a rank takes long under sanitizers */

struct members {
    enum mu_nccl_scope scope;
    uint32_t ranks[RANKS_MAX], size, index;
};

/* The scopes that this rank has in rank_config. */
static uint32_t members_of(struct rank *r, struct members out[MU_NCCL_SCOPES])
{
    struct mu_nccl_config config = rank_config(r);
    uint32_t count = 0;
    for (int scope = 0; scope < MU_NCCL_SCOPES; scope++) {
        const struct mu_nccl_members *m = &config.scopes[scope];
        struct members *at = &out[count];
        *at = (struct members){.scope = (enum mu_nccl_scope)scope, .size = m->size, .index = m->index};
        if (scope == MU_NCCL_WORLD) {
            at->size = r->world;
            at->index = r->rank;
        }
        for (uint32_t i = 0; i < at->size; i++)
            at->ranks[i] = scope == MU_NCCL_WORLD ? i : m->ranks[i];
        count += at->size > 0;
    }
    return count;
}

static uint64_t seed_of(const struct rank *r, size_t size)
{
    return size * 977 + r->rank * 31 + 5;
}

/* ---- moving ---- */

static void check_gather(struct rank *r, const struct members *m, size_t bytes)
{
    uint8_t *own = calloc(1, bytes + 1), *all = calloc(m->size, bytes + 1), *blocks = calloc(m->size, bytes + 1);
    fill(own, bytes, seed_of(r, bytes));
    socket_gather(r, m->ranks, m->size, m->index, own, bytes, all);
    memcpy(blocks + m->index * bytes, own, bytes);
    void *device = to_device(r, blocks, m->size * bytes);
    OK(mu_nccl_all_gather(r->nccl, m->scope, device, bytes, r->cuda.stream, err));
    expect_device(r, device, all, m->size * bytes);
    free(own);
    free(all);
    free(blocks);
}

static void check_all_to_all(struct rank *r, const struct members *m, size_t bytes)
{
    size_t row = m->size * bytes;
    uint8_t *send = calloc(1, row + 1), *all = calloc(m->size, row + 1), *expected = calloc(1, row + 1);
    fill(send, row, seed_of(r, bytes) + 1);
    socket_gather(r, m->ranks, m->size, m->index, send, row, all);
    for (uint32_t i = 0; i < m->size; i++)
        memcpy(expected + i * bytes, all + i * row + m->index * bytes, bytes);
    void *from = to_device(r, send, row), *to = to_device(r, NULL, row);
    OK(mu_nccl_all_to_all(r->nccl, m->scope, from, to, bytes, r->cuda.stream, err));
    expect_device(r, to, expected, row);
    expect_device(r, from, send, row);
    free(send);
    free(all);
    free(expected);
}

static void check_broadcast(struct rank *r, const struct members *m, size_t bytes)
{
    uint8_t *own = calloc(1, bytes + 1), *all = calloc(m->size, bytes + 1);
    for (uint32_t root = 0; root < m->size; root++) {
        fill(own, bytes, seed_of(r, bytes) + root);
        socket_gather(r, m->ranks, m->size, m->index, own, bytes, all);
        void *device = to_device(r, own, bytes);
        OK(mu_nccl_broadcast(r->nccl, m->scope, root, device, bytes, r->cuda.stream, err));
        expect_device(r, device, all + root * bytes, bytes);
    }
    free(own);
    free(all);
}

/* Three messages to every other member, of different sizes and named in another order on each side. */
static void check_exchange(struct rank *r, const struct members *m, size_t bytes)
{
    enum { EACH = 3 };
    size_t room = EACH * bytes + EACH;
    uint8_t *own = calloc(1, room), *all = calloc(m->size, room), *none = calloc(1, room);
    struct mu_nccl_move moves[2 * EACH * RANKS_MAX];
    uint8_t *in[RANKS_MAX] = {0};
    size_t count = 0;
    fill(own, room, seed_of(r, bytes) + 9);
    socket_gather(r, m->ranks, m->size, m->index, own, room, all);
    uint8_t *out = to_device(r, own, room);
    for (uint32_t i = 0; i < m->size; i++) {
        if (i == m->index)
            continue;
        in[i] = to_device(r, none, room);
        for (size_t k = 0; k < EACH; k++) {
            size_t s = m->index % 2 ? k : EACH - 1 - k, offset = s * bytes, size = bytes + (s == 2 ? 3 : 0);
            struct mu_nccl_move move = {.peer = i, .exchange = 1000 - s, .size_bytes = size};
            moves[count] = moves[count + 1] = move;
            moves[count].data = in[i] + offset;
            moves[count + 1].data = out + offset;
            moves[count + 1].send = true;
            count += 2;
        }
    }
    OK(mu_nccl_exchange(r->nccl, m->scope, moves, count, r->cuda.stream, err));
    for (uint32_t i = 0; i < m->size; i++)
        if (in[i])
            expect_device(r, in[i], all + i * room, room);
    expect_device(r, out, own, room);
    free(own);
    free(all);
    free(none);
}

static void check_moves(struct rank *r)
{
    struct members scopes[MU_NCCL_SCOPES];
    rank_open(r);
    uint32_t count = members_of(r, scopes);
    for (uint32_t s = 0; s < count; s++) {
        for (size_t i = 0; i < SIZES; i++) {
            check_gather(r, &scopes[s], sizes[i]);
            check_all_to_all(r, &scopes[s], sizes[i]);
            check_broadcast(r, &scopes[s], sizes[i]);
            check_exchange(r, &scopes[s], sizes[i]);
        }
    }
    OK(mu_nccl_close(r->nccl, soon(), err));
    rank_end(r);
}

static void test_moves_bring_what_the_sockets_bring(void **state)
{
    (void)state;
    for (uint32_t world = FIRST_WORLD; world <= RANKS_MAX; world += NEXT_WORLD)
        run_ranks(world, -1, check_moves);
}

/* ---- sums ---- */

/* The definition, on the CPU: tree over the members' partials. */
static void tree_sum(struct rank *r, float *all, uint32_t size, size_t count)
{
    struct mu_tree_node nodes[RANKS_MAX];
    struct mu_tree_add adds[RANKS_MAX];
    for (uint32_t i = 0; i < size; i++)
        nodes[i] = (struct mu_tree_node){i, 1};
    uint32_t add_count = mu_tree_schedule(size, nodes, size, adds);
    for (uint32_t i = 0; i < add_count; i++)
        CHECK(mu_kernel_add(r->cpu, count, all + adds[i].into * count, all + adds[i].from * count) == MU_OK);
}

struct sum_case {
    const struct members *members;
    size_t count;
    struct mu_nccl_sum sum;
    float *own, *all; /* all[0 ..) becomes the sum */
};

static void check_all_reduce(struct rank *r, const struct sum_case *t)
{
    size_t bytes = t->count * sizeof(float);
    float *data = to_device(r, t->own, bytes);
    OK(mu_nccl_all_reduce(r->nccl, t->members->scope, &t->sum, data, t->count, r->cuda.stream, err));
    expect_device(r, data, t->all, bytes);
}

static void check_reduce_scatter(struct rank *r, const struct sum_case *t)
{
    const struct members *m = t->members;
    float *data = to_device(r, t->own, t->count * sizeof(float));
    OK(mu_nccl_reduce_scatter(r->nccl, m->scope, &t->sum, data, t->count, r->cuda.stream, err));
    size_t from = mu_nccl_block_offset(t->count, m->size, m->index),
           to = mu_nccl_block_offset(t->count, m->size, m->index + 1), bytes = (to - from) * sizeof(float);
    float *block = malloc(bytes + 1);
    OK(mu_nccl_wait(r->nccl, r->cuda.stream, soon(), err));
    CHECK(bytes == 0 || cudaMemcpy(block, data + from, bytes, cudaMemcpyDeviceToHost) == cudaSuccess);
    CHECK(memcmp(block, t->all + from, bytes) == 0);
    CHECK(cudaFree(data) == cudaSuccess);
    free(block);
}

/* Fast sums are of NCCL's own order: close to the exact ones, and the same on all members. */
static void check_fast(struct rank *r, const struct sum_case *t)
{
    const struct members *m = t->members;
    size_t bytes = t->count * sizeof(float);
    float *data = to_device(r, t->own, bytes), *mine = malloc(bytes + 1), *theirs = malloc(m->size * bytes + 1);
    const struct mu_nccl_sum fast = {.exact = false};
    OK(mu_nccl_all_reduce(r->nccl, m->scope, &fast, data, t->count, r->cuda.stream, err));
    OK(mu_nccl_wait(r->nccl, r->cuda.stream, soon(), err));
    CHECK(bytes == 0 || cudaMemcpy(mine, data, bytes, cudaMemcpyDeviceToHost) == cudaSuccess);
    socket_gather(r, m->ranks, m->size, m->index, mine, bytes, theirs);
    for (uint32_t i = 0; i < m->size; i++)
        CHECK(memcmp(mine, theirs + i * t->count, bytes) == 0);
    for (size_t i = 0; i < t->count; i++)
        CHECK(fabsf(mine[i] - t->all[i]) <= 1e-5f);
    /* Scattered by the same order of NCCL's: the same bits. */
    struct sum_case scattered = {.members = m, .count = t->count, .sum = fast, .own = t->own, .all = mine};
    check_reduce_scatter(r, &scattered);
    CHECK(cudaFree(data) == cudaSuccess);
    free(mine);
    free(theirs);
}

static void check_sums(struct rank *r)
{
    struct members scopes[MU_NCCL_SCOPES];
    rank_open(r);
    uint32_t count = members_of(r, scopes);
    for (uint32_t s = 0; s < count; s++) {
        for (size_t i = 0; i < SIZES; i++) {
            struct sum_case t = {.members = &scopes[s], .count = sizes[i] / 2};
            size_t bytes = t.count * sizeof(float);
            t.own = malloc(bytes + 1);
            t.all = malloc(scopes[s].size * bytes + 1);
            t.sum = (struct mu_nccl_sum){.exact = true, .pool = r->gpu};
            t.sum.staging = to_device(r, NULL, mu_nccl_staging_floats(t.count, scopes[s].size) * sizeof(float));
            fill_floats(t.own, t.count, seed_of(r, bytes));
            socket_gather(r, scopes[s].ranks, scopes[s].size, scopes[s].index, t.own, bytes, t.all);
            tree_sum(r, t.all, scopes[s].size, t.count);
            check_all_reduce(r, &t);
            check_reduce_scatter(r, &t);
            check_fast(r, &t);
            CHECK(cudaFree(t.sum.staging) == cudaSuccess);
            free(t.own);
            free(t.all);
        }
    }
    OK(mu_nccl_close(r->nccl, soon(), err));
    rank_end(r);
}

static void test_exact_sums_are_the_trees_and_fast_ones_are_close(void **state)
{
    (void)state;
    for (uint32_t world = FIRST_WORLD; world <= RANKS_MAX; world += NEXT_WORLD)
        run_ranks(world, -1, check_sums);
}

static void test_blocks_cover_everything_once(void **state)
{
    (void)state;
    for (uint32_t size = 1; size <= 9; size++) {
        for (size_t count = 0; count < 40; count++) {
            assert_int_equal(mu_nccl_block_offset(count, size, 0), 0);
            assert_int_equal(mu_nccl_block_offset(count, size, size), count);
            for (uint32_t i = 0; i < size; i++) {
                size_t block = mu_nccl_block_offset(count, size, i + 1) - mu_nccl_block_offset(count, size, i);
                assert_true(block == count / size || block == count / size + 1);
            }
        }
    }
}

/* ---- streams and graphs ---- */

/* Tensor groups on one stream and replicas on another, many operations under way, nobody waits in between. */
static void use_two_streams(struct rank *r)
{
    enum { ROUNDS = 20, BYTES = 3000 };
    struct members scopes[MU_NCCL_SCOPES];
    cudaStream_t streams[2];
    void *device[2][ROUNDS];
    uint8_t *own = malloc(BYTES), *all = malloc(2 * BYTES);
    rank_open(r);
    CHECK(members_of(r, scopes) == 5);
    streams[0] = r->cuda.stream;
    CHECK(cudaStreamCreateWithFlags(&streams[1], cudaStreamNonBlocking) == cudaSuccess);
    for (size_t i = 0; i < ROUNDS; i++) {
        for (size_t k = 0; k < 2; k++) {
            const struct members *m = &scopes[1 + k];
            fill(own, BYTES, seed_of(r, i * 2 + k));
            device[k][i] = to_device(r, NULL, 2 * BYTES);
            CHECK(cudaMemcpyAsync((char *)device[k][i] + m->index * BYTES, own, BYTES, cudaMemcpyHostToDevice,
                                  streams[k]) == cudaSuccess);
            OK(mu_nccl_all_gather(r->nccl, m->scope, device[k][i], BYTES, streams[k], err));
        }
    }
    OK(mu_nccl_wait(r->nccl, streams[1], soon(), err));
    for (size_t i = 0; i < ROUNDS; i++) {
        for (size_t k = 0; k < 2; k++) {
            const struct members *m = &scopes[1 + k];
            fill(own, BYTES, seed_of(r, i * 2 + k));
            socket_gather(r, m->ranks, m->size, m->index, own, BYTES, all);
            expect_device(r, device[k][i], all, 2 * BYTES);
        }
    }
    OK(mu_nccl_close(r->nccl, soon(), err));
    CHECK(cudaStreamDestroy(streams[1]) == cudaSuccess);
    rank_end(r);
    free(own);
    free(all);
}

static void test_scopes_move_on_streams_of_their_own(void **state)
{
    (void)state;
    run_ranks(4, -1, use_two_streams);
}

/* A graph with a gather and an exact sum, replayed with other values. */
static void replay(struct rank *r)
{
    enum { COUNT = 501, TIMES = 3 };
    struct members scopes[MU_NCCL_SCOPES];
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    size_t bytes = COUNT * sizeof(float);
    float *own = malloc(bytes), *all = malloc(r->world * bytes), *sum = malloc(r->world * bytes);
    rank_open(r);
    members_of(r, scopes);
    float *blocks = to_device(r, NULL, r->world * bytes), *data = to_device(r, NULL, bytes);
    struct mu_nccl_sum exact = {.exact = true, .pool = r->gpu};
    exact.staging = to_device(r, NULL, mu_nccl_staging_floats(COUNT, r->world) * sizeof(float));
    CHECK(cudaStreamBeginCapture(r->cuda.stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    OK(mu_nccl_all_gather(r->nccl, MU_NCCL_WORLD, blocks, bytes, r->cuda.stream, err));
    OK(mu_nccl_all_reduce(r->nccl, MU_NCCL_WORLD, &exact, data, COUNT, r->cuda.stream, err));
    CHECK(cudaStreamEndCapture(r->cuda.stream, &graph) == cudaSuccess);
    CHECK(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
    for (uint64_t i = 0; i < TIMES; i++) {
        fill_floats(own, COUNT, seed_of(r, i));
        CHECK(cudaMemcpy(blocks + r->rank * COUNT, own, bytes, cudaMemcpyHostToDevice) == cudaSuccess);
        CHECK(cudaMemcpy(data, own, bytes, cudaMemcpyHostToDevice) == cudaSuccess);
        CHECK(cudaGraphLaunch(exec, r->cuda.stream) == cudaSuccess);
        OK(mu_nccl_wait(r->nccl, r->cuda.stream, soon(), err));
        socket_gather(r, scopes[0].ranks, r->world, r->rank, own, bytes, all);
        CHECK(cudaMemcpy(sum, blocks, r->world * bytes, cudaMemcpyDeviceToHost) == cudaSuccess);
        CHECK(memcmp(sum, all, r->world * bytes) == 0);
        tree_sum(r, all, r->world, COUNT);
        CHECK(cudaMemcpy(sum, data, bytes, cudaMemcpyDeviceToHost) == cudaSuccess);
        CHECK(memcmp(sum, all, bytes) == 0);
    }
    CHECK(cudaGraphExecDestroy(exec) == cudaSuccess && cudaGraphDestroy(graph) == cudaSuccess);
    CHECK(cudaFree(blocks) == cudaSuccess && cudaFree(data) == cudaSuccess && cudaFree(exact.staging) == cudaSuccess);
    OK(mu_nccl_close(r->nccl, soon(), err));
    rank_end(r);
    free(own);
    free(all);
    free(sum);
}

static void test_operations_can_be_captured_and_replayed(void **state)
{
    (void)state;
    run_ranks(3, -1, replay);
}

/* ---- many ids ---- */

static void meet_at_several_ids(struct rank *r)
{
    uint32_t id_count = 0;
    r->ranks_per_id = 1 + r->world / 4;
    rank_open(r);
    const struct mu_nccl_id *ids = mu_nccl_meeting_ids(r->meeting, &id_count);
    CHECK(id_count == (r->world == 4 ? 2 : r->world));
    for (uint32_t i = 1; i < id_count; i++)
        CHECK(memcmp(&ids[0], &ids[i], sizeof ids[0]) != 0);
    struct members scopes[MU_NCCL_SCOPES];
    members_of(r, scopes);
    check_gather(r, &scopes[0], 4099);
    OK(mu_nccl_close(r->nccl, soon(), err));
    rank_end(r);
}

static void test_ranks_meet_at_several_ids(void **state)
{
    (void)state;
    for (uint32_t world = FIRST_WORLD; world <= RANKS_MAX; world += NEXT_WORLD)
        run_ranks(world, -1, meet_at_several_ids);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_moves_bring_what_the_sockets_bring),
        cmocka_unit_test(test_exact_sums_are_the_trees_and_fast_ones_are_close),
        cmocka_unit_test(test_blocks_cover_everything_once),
        cmocka_unit_test(test_scopes_move_on_streams_of_their_own),
        cmocka_unit_test(test_operations_can_be_captured_and_replayed),
        cmocka_unit_test(test_ranks_meet_at_several_ids),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
