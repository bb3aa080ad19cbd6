/* links: mu_state */
#include "comm_testing.h"

#include "worker/transfer.h"

/* ---- a world of ranks that each hold some of the state ---- */

enum { KINDS = 2, CHUNKS_MAX = 64, MOVES_MAX = 4096 };

static const uint32_t kind_bits[KINDS] = {MU_MOVE_PARAMS, MU_MOVE_MOMENTS};

struct world {
    struct mu_model_spec model;
    uint32_t size;
    struct node nodes[NODES_MAX];
    float *truth[3];
    float *flats[NODES_MAX][3];
    bool holds[NODES_MAX][KINDS][CHUNKS_MAX]; /* at the end: also what came */
    struct mu_move moves[MOVES_MAX];
    uint32_t move_count;
    uint64_t steps[NODES_MAX];
    enum mu_status status[NODES_MAX];
    struct mu_error errors[NODES_MAX];
    atomic_uint_least64_t progress[NODES_MAX];
    uint8_t arrived[NODES_MAX][CHUNKS_MAX];
    uint64_t received_bytes[NODES_MAX]; /* from rank 0 */
};

static const struct mu_model_config config = {
    .family = MU_FAMILY_GPT2, .layers = 2, .heads = 2, .channels = 192, .context = 32, .vocab = 2048};

static void copy_chunk(const struct world *world, uint32_t rank, uint32_t kind, uint32_t chunk)
{
    struct mu_chunk at = mu_model_chunk(&world->model, chunk);
    for (uint32_t flat = kind == 0 ? 0 : 1; flat < (kind == 0 ? 1u : 3u); flat++)
        memcpy(world->flats[rank][flat] + at.offset, world->truth[flat] + at.offset, at.size * sizeof(float));
}

static struct world *world_new(uint32_t size)
{
    struct world *world = calloc(1, sizeof *world);
    struct mu_model_config checked = config;
    checked.kv_heads = checked.heads;
    checked.hidden = 4 * checked.channels;
    checked.slices = 1;
    mu_model_spec_init(&world->model, &checked);
    assert_true(world->model.chunk_count <= CHUNKS_MAX);
    world->size = size;
    size_t bytes = world->model.flat_size * sizeof(float);
    for (int flat = 0; flat < 3; flat++) {
        world->truth[flat] = malloc(bytes);
        fill((uint8_t *)world->truth[flat], bytes, 11 + (uint64_t)flat);
        for (uint32_t rank = 0; rank < size; rank++)
            world->flats[rank][flat] = calloc(1, bytes);
    }
    for (uint32_t rank = 0; rank < size; rank++)
        world->steps[rank] = 7;
    return world;
}

static void world_free(struct world *world)
{
    for (int flat = 0; flat < 3; flat++) {
        free(world->truth[flat]);
        for (uint32_t rank = 0; rank < world->size; rank++)
            free(world->flats[rank][flat]);
    }
    free(world);
}

static void hold(struct world *world, uint32_t rank, uint32_t kind, uint32_t chunk)
{
    copy_chunk(world, rank, kind, chunk);
    world->holds[rank][kind][chunk] = true;
}

static void add_move(struct world *world, uint32_t from, uint32_t to, uint32_t kinds, uint32_t first, uint32_t count)
{
    assert_true(world->move_count < MOVES_MAX);
    world->moves[world->move_count++] =
        (struct mu_move){.from = from, .to = to, .kinds = kinds, .run = {.first = first, .count = count}};
}

struct task {
    struct world *world;
    uint32_t rank;
};

static void *run_rank(void *arg)
{
    const struct task *task = arg;
    struct world *world = task->world;
    uint32_t rank = task->rank;
    struct mu_error *err = &world->errors[rank];
    struct mu_transfer *transfer = NULL;
    struct mu_transfer_config setup = {.model = &world->model,
                                       .group = world->nodes[rank].group,
                                       .flats = {world->flats[rank][0], world->flats[rank][1], world->flats[rank][2]},
                                       .step = world->steps[rank],
                                       .rank = rank,
                                       .moves = world->moves,
                                       .move_count = world->move_count,
                                       .progress = &world->progress[rank],
                                       .arrived = world->arrived[rank]};
    enum mu_status status = mu_comm_wait_ready(world->nodes[rank].group, soon(), err);
    if (status == MU_OK)
        status = mu_transfer_new(&setup, &transfer, err);
    if (status == MU_OK)
        status = mu_transfer_run(transfer, err);
    struct mu_comm_traffic traffic = {0};
    if (rank > 0 && mu_comm_peer_traffic(world->nodes[rank].group, 0, &traffic) == MU_OK)
        world->received_bytes[rank] = traffic.bytes_received;
    /* As the engine does: the group is closed when all are done, or before the requests go. */
    if (status != MU_OK) {
        mu_comm_group_close(world->nodes[rank].group);
        world->nodes[rank].group = NULL;
    }
    mu_transfer_free(transfer);
    world->status[rank] = status;
    return NULL;
}

static void run_world(struct world *world, enum transport transport)
{
    struct task tasks[NODES_MAX];
    pthread_t threads[NODES_MAX];
    nodes_new(world->nodes, world->size, transport, (struct mu_comm_limits){0});
    nodes_open(world->nodes, world->size, 1);
    for (uint32_t rank = 0; rank < world->size; rank++) {
        tasks[rank] = (struct task){world, rank};
        assert_int_equal(pthread_create(&threads[rank], NULL, run_rank, &tasks[rank]), 0);
    }
    for (uint32_t rank = 0; rank < world->size; rank++)
        assert_int_equal(pthread_join(threads[rank], NULL), 0);
    nodes_free(world->nodes, world->size);
}

/* Every rank has exactly what it held and what moved to it: bits of the truth, and zero everywhere else. */
static void check_world(struct world *world)
{
    for (uint32_t rank = 0; rank < world->size; rank++) {
        if (world->status[rank] != MU_OK)
            fail_msg("rank %u: %s", rank, world->errors[rank].text);
    }
    uint64_t moved[NODES_MAX] = {0};
    for (uint32_t i = 0; i < world->move_count; i++) {
        const struct mu_move *move = &world->moves[i];
        for (uint32_t kind = 0; kind < KINDS; kind++) {
            for (uint32_t k = 0; k < move->run.count && move->kinds & kind_bits[kind]; k++) {
                world->holds[move->to][kind][move->run.first + k] = true;
                moved[move->to]++;
                moved[move->from]++;
            }
        }
    }
    size_t bytes = world->model.flat_size * sizeof(float);
    float *expected = malloc(bytes);
    for (uint32_t rank = 0; rank < world->size; rank++) {
        assert_int_equal(atomic_load(&world->progress[rank]), moved[rank]);
        for (uint32_t flat = 0; flat < 3; flat++) {
            memset(expected, 0, bytes);
            for (uint32_t chunk = 0; chunk < world->model.chunk_count; chunk++) {
                struct mu_chunk at = mu_model_chunk(&world->model, chunk);
                if (world->holds[rank][flat > 0][chunk])
                    memcpy(expected + at.offset, world->truth[flat] + at.offset, at.size * sizeof(float));
            }
            assert_memory_equal(world->flats[rank][flat], expected, bytes);
        }
    }
    free(expected);
}

/* ---- moves ---- */

static void test_whole_state_goes_from_one_to_another(void **state)
{
    (void)state;
    for (int transport = OVER_UNIX; transport <= OVER_TCP; transport++) {
        struct world *world = world_new(2);
        for (uint32_t chunk = 0; chunk < world->model.chunk_count; chunk++) {
            hold(world, 1, 0, chunk);
            hold(world, 1, 1, chunk);
        }
        add_move(world, 1, 0, MU_MOVE_PARAMS | MU_MOVE_MOMENTS, 0, world->model.chunk_count);
        run_world(world, (enum transport)transport);
        check_world(world);
        world_free(world);
    }
}

static void test_nothing_to_move_is_done_at_once_even_alone(void **state)
{
    (void)state;
    struct world *world = world_new(3);
    add_move(world, 0, 1, MU_MOVE_PARAMS, 0, 1); /* not of rank 2 */
    struct mu_transfer_config setup = {.model = &world->model, .rank = 2, .moves = world->moves, .move_count = 1};
    struct mu_transfer *transfer;
    assert_int_equal(mu_transfer_new(&setup, &transfer, NULL), MU_OK);
    assert_int_equal(mu_transfer_run(transfer, NULL), MU_OK);
    mu_transfer_free(transfer);
    mu_transfer_free(NULL);
    world_free(world);
}

/* Each (chunk, kind) has a few random holders; every other rank gets it from one that has it by then: chains and trees
 * of passing on, several sources for every rank, kinds apart and together. */
static void random_moves(struct world *world, uint64_t *random)
{
    for (uint32_t chunk = 0; chunk < world->model.chunk_count; chunk++) {
        for (uint32_t kind = 0; kind < KINDS; kind++) {
            uint32_t order[NODES_MAX];
            for (uint32_t i = 0; i < world->size; i++)
                order[i] = i;
            for (uint32_t i = world->size; i > 1; i--) {
                uint32_t k = (uint32_t)(mu_splitmix64(random) % i), swap = order[i - 1];
                order[i - 1] = order[k];
                order[k] = swap;
            }
            uint32_t holders = 1 + (uint32_t)(mu_splitmix64(random) % 2);
            for (uint32_t i = 0; i < holders; i++)
                hold(world, order[i], kind, chunk);
            for (uint32_t i = holders; i < world->size; i++) {
                if (mu_splitmix64(random) % 4 == 0) { /* this one does not need it */
                    order[i] = order[0];
                    continue;
                }
                add_move(world, order[mu_splitmix64(random) % i], order[i], kind_bits[kind], chunk, 1);
            }
        }
    }
    /* In any order: the two sides of a stream agree all the same. */
    for (uint32_t i = world->move_count; i > 1; i--) {
        uint32_t k = (uint32_t)(mu_splitmix64(random) % i);
        struct mu_move swap = world->moves[i - 1];
        world->moves[i - 1] = world->moves[k];
        world->moves[k] = swap;
    }
}

static void test_random_moves_among_many_never_stall_and_move_every_byte(void **state)
{
    (void)state;
    uint64_t random = 4;
    for (int round = 0; round < 12; round++) {
        struct world *world = world_new(2 + (uint32_t)round % (NODES_MAX - 1));
        random_moves(world, &random);
        run_world(world, round % 2 ? OVER_TCP : OVER_UNIX);
        check_world(world);
        world_free(world);
    }
}

/* Rank 0 -> 1 -> 2 -> 3, and back the other way with the other half: two streams between each pair. */
static void test_chunks_are_passed_on_along_a_chain_in_both_directions(void **state)
{
    (void)state;
    struct world *world = world_new(4);
    uint32_t chunks = world->model.chunk_count, half = chunks / 2, all = MU_MOVE_PARAMS | MU_MOVE_MOMENTS;
    for (uint32_t chunk = 0; chunk < chunks; chunk++) {
        for (uint32_t kind = 0; kind < KINDS; kind++)
            hold(world, chunk < half ? 0 : 3, kind, chunk);
    }
    for (uint32_t i = 0; i < 3; i++) {
        add_move(world, i, i + 1, all, 0, half);
        add_move(world, 3 - i, 2 - i, all, half, chunks - half);
    }
    run_world(world, OVER_UNIX);
    check_world(world);
    world_free(world);
}

/* ---- what is refused ---- */

static void refused(struct world *world, uint32_t rank, const char *needle)
{
    struct mu_error err = {0};
    struct mu_transfer *transfer = NULL;
    struct mu_transfer_config setup = {.model = &world->model,
                                       .group = (struct mu_comm_group *)(uintptr_t)8, /* never looked at */
                                       .rank = rank,
                                       .moves = world->moves,
                                       .move_count = world->move_count};
    assert_int_equal(mu_transfer_new(&setup, &transfer, &err), MU_ERR_INVALID);
    if (!strstr(err.text, needle) || strchr(err.text, '\n'))
        fail_msg("\"%s\" does not say \"%s\"", err.text, needle);
    setup.group = NULL;
    assert_int_equal(mu_transfer_new(&setup, &transfer, &err), MU_ERR_INVALID);
    world->move_count = 0;
}

static void test_moves_that_cannot_be_are_refused(void **state)
{
    (void)state;
    struct world *world = world_new(2);
    uint32_t chunks = world->model.chunk_count;
    add_move(world, 0, 1, 0, 0, 1);
    refused(world, 1, "kinds 0");
    add_move(world, 0, 1, 8 | MU_MOVE_PARAMS, 0, 1);
    refused(world, 0, "kinds 9");
    add_move(world, 1, 1, MU_MOVE_PARAMS, 0, 1);
    refused(world, 1, "from rank 1 to rank 1");
    add_move(world, 0, 1, MU_MOVE_PARAMS, 0, 0);
    refused(world, 1, "of 0 chunks");
    add_move(world, 0, 1, MU_MOVE_PARAMS, 1, chunks);
    refused(world, 1, "the model has");
    add_move(world, 0, 1, MU_MOVE_PARAMS, UINT32_MAX, 2);
    refused(world, 0, "the model has");
    add_move(world, 0, 1, MU_MOVE_PARAMS, 2, 3);
    add_move(world, 2, 1, MU_MOVE_PARAMS | MU_MOVE_MOMENTS, 4, 3);
    refused(world, 1, "chunk 4 (parameters) would come twice");
    add_move(world, 0, 1, MU_MOVE_MOMENTS, 2, 3);
    add_move(world, 0, 1, MU_MOVE_MOMENTS, 3, 1);
    refused(world, 0, "chunk 3 (moments) would move twice");
    world_free(world);
}

static void test_state_of_another_step_is_refused(void **state)
{
    (void)state;
    struct world *world = world_new(2);
    add_move(world, 0, 1, MU_MOVE_PARAMS, 0, 2);
    world->steps[0] = 8;
    run_world(world, OVER_UNIX);
    assert_int_equal(world->status[1], MU_ERR_CORRUPT);
    assert_non_null(strstr(world->errors[1].text, "rank 0 serves chunk 0 (kind 0) of step 8"));
    assert_non_null(strstr(world->errors[1].text, "of step 7 is wanted"));
    world_free(world);
}

/* ---- damage on the way: a peer that speaks the protocol but sends other bytes than it announced ---- */

#define HEADER_MAGIC 0x324556454d554dull

struct damaged_header {
    uint64_t magic, step;
    uint32_t chunk, kind;
    struct mu_hash128 hashes[2];
};

static void test_chunk_that_does_not_match_its_checksum_is_refused_and_not_passed_on(void **state)
{
    (void)state;
    struct world *world = world_new(3);
    add_move(world, 0, 1, MU_MOVE_PARAMS, 1, 1);
    add_move(world, 1, 2, MU_MOVE_PARAMS, 1, 1);
    nodes_new(world->nodes, 3, OVER_UNIX, (struct mu_comm_limits){0});
    nodes_open(world->nodes, 3, 1);
    struct task task = {world, 1};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, run_rank, &task), 0);
    struct mu_chunk chunk = mu_model_chunk(&world->model, 1);
    struct damaged_header header = {
        .magic = HEADER_MAGIC, .step = 7, .chunk = 1, .hashes = {mu_xxh3_128(world->truth[0], 8)}};
    struct mu_comm_request requests[2], passed;
    POST_SEND(&world->nodes[0], 1, MU_TRANSFER_EXCHANGES, &header, sizeof header, &requests[0]);
    POST_SEND(&world->nodes[0], 1, MU_TRANSFER_EXCHANGES | 1, world->truth[0] + chunk.offset,
              chunk.size * sizeof(float), &requests[1]);
    POST_RECV(&world->nodes[2], 1, MU_TRANSFER_EXCHANGES, &header, sizeof header, &passed);
    uint64_t deadline_us = soon();
    struct mu_error err;
    enum mu_status status = MU_OK;
    while (status == MU_OK && mu_clock_mono_us() < deadline_us) { /* until rank 1 has left */
        mu_comm_progress(world->nodes[0].comm);
        status = mu_comm_group_progress(world->nodes[2].group, &err);
    }
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(status, MU_ERR_UNAVAILABLE);
    assert_false(mu_comm_done(&passed));
    assert_int_equal(world->status[1], MU_ERR_CORRUPT);
    assert_non_null(
        strstr(world->errors[1].text, "state from rank 0: chunk 1 (parameters) does not match its checksum"));
    nodes_free(world->nodes, 3);
    world_free(world);
}

/* Rank 1 in the middle of its transfer: it has taken the first of two chunks (one of this size is only sent to who has
 * posted its buffer) and waits for the second. */
static struct world *world_that_waits(struct task *task, pthread_t *ret_thread)
{
    struct world *world = world_new(2);
    add_move(world, 0, 1, MU_MOVE_PARAMS, 0, 2);
    nodes_new(world->nodes, 2, OVER_UNIX, (struct mu_comm_limits){0});
    nodes_open(world->nodes, 2, 1);
    DRIVE_UNTIL(world->nodes, 2, all_ready(world->nodes, 2));
    *task = (struct task){world, 1};
    assert_int_equal(pthread_create(ret_thread, NULL, run_rank, task), 0);
    struct mu_chunk chunk = mu_model_chunk(&world->model, 0);
    const float *data = world->truth[0] + chunk.offset;
    struct damaged_header header = {
        .magic = HEADER_MAGIC, .step = 7, .chunk = 0, .hashes = {mu_xxh3_128(data, chunk.size * sizeof(float))}};
    struct mu_comm_request requests[2];
    POST_SEND(&world->nodes[0], 1, MU_TRANSFER_EXCHANGES, &header, sizeof header, &requests[0]);
    POST_SEND(&world->nodes[0], 1, MU_TRANSFER_EXCHANGES | 1, data, chunk.size * sizeof(float), &requests[1]);
    uint64_t deadline_us = soon();
    while (!mu_comm_done(&requests[1]) && mu_clock_mono_us() < deadline_us)
        mu_comm_progress(world->nodes[0].comm);
    assert_true(mu_comm_done(&requests[1]));
    return world;
}

static void end_world_that_waited(struct world *world, pthread_t thread, enum mu_status status, const char *text)
{
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(world->status[1], status);
    assert_non_null(strstr(world->errors[1].text, text));
    nodes_free(world->nodes, 2);
    world_free(world);
}

static void test_peer_that_goes_away_ends_the_transfer_with_its_name(void **state)
{
    (void)state;
    struct task task;
    pthread_t thread;
    struct world *world = world_that_waits(&task, &thread);
    mu_comm_group_close(world->nodes[0].group);
    mu_comm_progress(world->nodes[0].comm);
    end_world_that_waited(world, thread, MU_ERR_UNAVAILABLE, "rank 0");
}

static void test_abort_ends_the_transfer(void **state)
{
    (void)state;
    struct task task;
    pthread_t thread;
    struct world *world = world_that_waits(&task, &thread);
    mu_comm_abort(world->nodes[1].comm, 1);
    end_world_that_waited(world, thread, MU_ERR_CANCELLED, "");
}

/* Rank 0 has everything, rank 1 needs it and has some of it from a transfer that broke off. */
static struct world *broken_off(uint32_t kept_from)
{
    struct world *world = world_new(2);
    uint32_t chunks = world->model.chunk_count;
    for (uint32_t chunk = 0; chunk < chunks; chunk++)
        for (uint32_t kind = 0; kind < KINDS; kind++) {
            hold(world, 0, kind, chunk);
            if (chunk < kept_from)
                continue;
            copy_chunk(world, 1, kind, chunk);
            world->arrived[1][chunk] |= (uint8_t)kind_bits[kind];
        }
    add_move(world, 0, 1, MU_MOVE_PARAMS | MU_MOVE_MOMENTS, 0, chunks);
    return world;
}

static void test_what_has_arrived_is_not_sent_again(void **state)
{
    (void)state;
    struct world *world = broken_off(UINT32_MAX);
    uint32_t chunks = world->model.chunk_count;
    run_world(world, OVER_UNIX);
    check_world(world);
    uint64_t all_bytes = world->received_bytes[1];
    for (uint32_t chunk = 0; chunk < chunks; chunk++)
        assert_int_equal(world->arrived[1][chunk], MU_MOVE_PARAMS | MU_MOVE_MOMENTS);
    world_free(world);
    for (uint32_t kept_from = 0; kept_from < chunks; kept_from += chunks / 3) {
        world = broken_off(kept_from);
        run_world(world, OVER_UNIX);
        check_world(world);
        uint64_t kept_bytes = 0;
        for (uint32_t chunk = kept_from; chunk < chunks; chunk++)
            kept_bytes += 3 * mu_model_chunk(&world->model, chunk).size * sizeof(float);
        assert_int_equal(world->received_bytes[1], all_bytes - kept_bytes);
        world_free(world);
    }
}

static void test_what_has_arrived_and_does_not_match_is_refused_once(void **state)
{
    (void)state;
    struct world *world = broken_off(0);
    uint32_t chunk = world->model.chunk_count / 2;
    world->flats[1][2][mu_model_chunk(&world->model, chunk).offset + 3] += 1.0f;
    run_world(world, OVER_UNIX);
    assert_int_equal(world->status[1], MU_ERR_CORRUPT);
    assert_non_null(strstr(world->errors[1].text, "does not match its checksum"));
    assert_int_equal(world->arrived[1][chunk], MU_MOVE_PARAMS);
    memset(world->status, 0, sizeof world->status);
    memset(world->progress, 0, sizeof world->progress);
    run_world(world, OVER_UNIX);
    check_world(world);
    world_free(world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_has_arrived_is_not_sent_again),
        cmocka_unit_test(test_what_has_arrived_and_does_not_match_is_refused_once),
        cmocka_unit_test(test_whole_state_goes_from_one_to_another),
        cmocka_unit_test(test_nothing_to_move_is_done_at_once_even_alone),
        cmocka_unit_test(test_random_moves_among_many_never_stall_and_move_every_byte),
        cmocka_unit_test(test_chunks_are_passed_on_along_a_chain_in_both_directions),
        cmocka_unit_test(test_moves_that_cannot_be_are_refused),
        cmocka_unit_test(test_state_of_another_step_is_refused),
        cmocka_unit_test(test_chunk_that_does_not_match_its_checksum_is_refused_and_not_passed_on),
        cmocka_unit_test(test_peer_that_goes_away_ends_the_transfer_with_its_name),
        cmocka_unit_test(test_abort_ends_the_transfer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
