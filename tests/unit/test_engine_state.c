/* links: mu_engine mu_comm mu_storage mu_plan */
#include "engine_testing.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#include "common/rng.h"
#include "storage/catalog.h"
#include "worker/comm.h"

static uint8_t reference_sha[32];

static int setup_reference(void **state)
{
    (void)state;
    struct fleet *fleet = fleet_new();
    worker_start_on_cpu(fleet);
    start(fleet, 1);
    if (wait_parked(fleet, reference_sha) != MU_PARK_FINISHED)
        return -1;
    fleet_free(fleet);
    return 0;
}

static void check_sha(struct fleet *fleet)
{
    uint8_t sha[32];
    assert_int_equal(wait_parked(fleet, sha), MU_PARK_FINISHED);
    assert_memory_equal(sha, reference_sha, 32);
}

/* ---- snapshots ---- */

/* "<fleet's directory>/<root>/<name of a checkpoint's directory>". */
static void checkpoint_path(const struct fleet *fleet, const char *root, uint64_t seq, char out[MU_PATH_SIZE])
{
    char name[MU_CATALOG_NAME_SIZE];
    mu_catalog_name(seq, 2, (struct mu_id){7, 7}, name);
    assert_true(snprintf(out, MU_PATH_SIZE, "%s/%s/%s", fleet->dir, root, name) < MU_PATH_SIZE);
}

/* Starts workers, one for each rank, that take a snapshot below <dir>/<root> at step 2 and go on to the end. */
static struct fleet *snapshot_run(struct fleet *fleet, uint32_t world, const char *root)
{
    snprintf(fleet->spec.checkpoint.path, sizeof fleet->spec.checkpoint.path, "%s", fleet->dir);
    for (uint32_t i = 0; i < world; i++)
        worker_start(fleet);
    assign(fleet, (1u << world) - 1);
    for (uint32_t rank = 0; rank < world; rank++)
        assert_int_equal(next_event(&fleet->workers[rank], 1u << MU_WE_PREPARED | 1u << MU_WE_PARKED)->kind,
                         MU_WE_PREPARED);
    fleet->command =
        (struct command){.number = 1, .not_before_step = 2, .snapshot = true, .checkpoint = 5, .pieces = world};
    checkpoint_path(fleet, root, 5, fleet->command.dir);
    for (uint32_t rank = 0; rank < world; rank++)
        assert_int_equal(mu_engine_run(fleet->workers[rank].engine, fleet->generation), MU_OK);
    return fleet;
}

static struct fleet *run_with_snapshot(uint32_t world, const char *root)
{
    return snapshot_run(fleet_new(), world, root);
}

/* The piece report of a worker, found among all its events (it may come before or after others). */
static struct mu_piece_report piece_of(struct worker *worker)
{
    worker->seen = 0;
    return next_event(worker, 1u << MU_WE_PIECE)->piece;
}

static void write_manifest(struct fleet *fleet, uint32_t world)
{
    struct mu_manifest *manifest = mu_manifest_new();
    struct mu_model_spec model;
    mu_model_spec_init(&model, &fleet->spec.model);
    assert_non_null(manifest);
    snprintf(manifest->identity.job, sizeof manifest->identity.job, "%s", fleet->spec.name);
    manifest->identity.seq = 5;
    manifest->identity.step = 2;
    manifest->identity.generation = 1;
    manifest->nonce = (struct mu_id){7, 7};
    manifest->chunk_count = model.chunk_count;
    snprintf(manifest->numeric_identity, sizeof manifest->numeric_identity, "test");
    assert_int_equal(mu_manifest_set_job_record(manifest, "{}"), MU_OK);
    for (uint32_t rank = 0; rank < world; rank++) {
        struct mu_piece_report piece = piece_of(&fleet->workers[fleet->ranks[rank]]);
        if (piece.status != MU_OK)
            fail_msg("piece %u: %s", rank, piece.text);
        assert_int_equal(piece.piece, rank);
        assert_int_equal(piece.checkpoint, 5);
        assert_int_equal(piece.step, 2);
        struct mu_chunk_run runs[MU_RUNS_MAX];
        uint32_t count = mu_layout_runs(&model, &fleet->layout, rank, MU_SHARE_PRIMARY, runs);
        assert_int_equal(piece.file[0] == 0, count == 0); /* who has nothing to write writes no file */
        if (count == 0)
            continue;
        assert_int_equal(
            mu_manifest_add_runs(manifest, &model, piece.file, piece.size_bytes, piece.checksum, runs, count), MU_OK);
    }
    struct mu_error err;
    if (mu_manifest_write(fleet->command.dir, manifest, &err) != MU_OK)
        fail_msg("%s", err.text);
    mu_manifest_free(manifest);
}

static void test_engine_snapshot_while_stepping_then_load_same_bits(void **state)
{
    (void)state;
    for (uint32_t world = 1; world <= 3; world += 2) {
        struct fleet *fleet = run_with_snapshot(world, "ckpt");
        check_sha(fleet);
        write_manifest(fleet, world);
        struct mu_checkpoint_report report;
        struct mu_error err;
        if (mu_checkpoint_verify(fleet->command.dir, &report, &err) != MU_OK)
            fail_msg("%s", err.text);
        /* Everybody is gone; two new workers go on from the files. */
        struct fleet *second = fleet_new();
        worker_start(second);
        worker_start(second);
        second->checkpoint = 5;
        second->checkpoint_step = 2;
        snprintf(second->checkpoint_dir, sizeof second->checkpoint_dir, "%s", fleet->command.dir);
        start(second, 3);
        check_sha(second);
        assert_int_equal(second->applied[1], 0);
        assert_int_equal(second->applied[2], 2);
        fleet_free(second);
        fleet_free(fleet);
    }
}

/* ---- other layouts ---- */

static const struct mu_model_config sliced_llama = {.family = MU_FAMILY_LLAMA,
                                                    .layers = 4,
                                                    .heads = 4,
                                                    .kv_heads = 4,
                                                    .hidden = 48,
                                                    .channels = 32,
                                                    .context = 16,
                                                    .vocab = 257,
                                                    .rope_base = 10000.0,
                                                    .slices = 4};

/* Of each family: 104 pairs in all. */
enum { WRITERS = SANITIZED ? 2 : 13, READERS = 4 };

/* Any degrees that make a world of at most eight, stages of any sizes. */
static struct mu_layout drawn_layout(uint64_t *seed)
{
    for (;;) {
        uint32_t tp = 1u << mu_splitmix64(seed) % 3, pp = 1 + mu_splitmix64(seed) % 4, dp = 1 + mu_splitmix64(seed) % 4;
        uint32_t idle = mu_splitmix64(seed) % 4 == 0;
        struct mu_layout layout = make_layout(tp, pp, dp, idle, mu_splitmix64(seed) % 2, 4);
        for (uint32_t p = 1; p < pp; p++) /* each begins anywhere between its neighbours */
            layout.stage_first[p] = (uint16_t)(layout.stage_first[p - 1] + 1 +
                                               mu_splitmix64(seed) % (4 - (pp - p) - layout.stage_first[p - 1]));
        if (tp * pp * dp + idle <= WORKERS_MAX)
            return layout;
    }
}

static struct fleet *fleet_in_layout(const struct mu_model_config *model, const struct mu_layout *layout)
{
    struct fleet *fleet = fleet_of(model);
    fleet->spec.parallel.optimizer_sharding = layout->sharded;
    fleet->wanted = *layout;
    return fleet;
}

static void load_and_finish(const struct mu_model_config *model, const char *dir, const struct mu_layout *layout,
                            const uint8_t wanted[32])
{
    uint8_t sha[32];
    struct fleet *fleet = fleet_in_layout(model, layout);
    for (uint32_t k = 0; k < mu_layout_world(layout); k++)
        worker_start(fleet);
    fleet->checkpoint = 5;
    fleet->checkpoint_step = 2;
    snprintf(fleet->checkpoint_dir, sizeof fleet->checkpoint_dir, "%s", dir);
    start(fleet, (1u << fleet->count) - 1);
    assert_int_equal(wait_parked(fleet, sha), MU_PARK_FINISHED);
    assert_memory_equal(sha, wanted, 32);
    assert_int_equal(fleet->applied[1], 0);
    assert_int_equal(fleet->applied[2], fleet->count);
    fleet_free(fleet);
}

/* Whatever layout wrote it, any layout goes on from it: random pairs, others in each run. */
static void test_engine_checkpoint_of_any_layout_loads_into_any_other(void **state)
{
    (void)state;
    static const struct mu_model_config *const models[] = {&small_gpt2, &sliced_llama};
    const char *given = getenv("MU_TEST_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 10) : (uint64_t)time(NULL);
    print_message("%d pairs of layouts: MU_TEST_SEED=%llu\n", 2 * WRITERS * READERS, (unsigned long long)seed);
    for (int family = 0; family < 2; family++) {
        uint8_t sha[32], wanted[32];
        for (uint32_t i = 0; i < WRITERS; i++) {
            struct mu_layout from = drawn_layout(&seed);
            struct fleet *fleet = fleet_in_layout(models[family], &from);
            snapshot_run(fleet, mu_layout_world(&from), "ckpt");
            assert_int_equal(wait_parked(fleet, sha), MU_PARK_FINISHED);
            if (i == 0)
                memcpy(wanted, sha, 32);
            assert_memory_equal(sha, wanted, 32);
            write_manifest(fleet, mu_layout_working(&fleet->layout));
            for (uint32_t k = 0; k < READERS; k++) {
                struct mu_layout to = drawn_layout(&seed);
                load_and_finish(models[family], fleet->command.dir, &to, wanted);
            }
            fleet_free(fleet);
        }
    }
}

static void flip_a_bit(const char *path, off_t offset)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    uint8_t byte;
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, offset), 1);
    byte ^= 0x10;
    assert_int_equal(pwrite(fd, &byte, 1, offset), 1);
    assert_int_equal(close(fd), 0);
}

static void test_engine_damaged_checkpoint_is_named_and_nothing_is_held(void **state)
{
    (void)state;
    struct fleet *fleet = run_with_snapshot(2, "damaged");
    check_sha(fleet);
    write_manifest(fleet, 2);
    char path[1024];
    struct mu_piece_report piece = piece_of(&fleet->workers[fleet->ranks[1]]);
    snprintf(path, sizeof path, "%s/%s", fleet->command.dir, piece.file);
    flip_a_bit(path, (off_t)piece.size_bytes - 1000);
    struct fleet *second = fleet_new();
    worker_start(second);
    worker_start(second);
    second->checkpoint = 5;
    second->checkpoint_step = 2;
    snprintf(second->checkpoint_dir, sizeof second->checkpoint_dir, "%s", fleet->command.dir);
    assign(second, 3);
    for (uint32_t rank = 0; rank < 2; rank++) {
        const struct mu_worker_event *event =
            next_event(&second->workers[second->ranks[rank]], 1u << MU_WE_PREPARED | 1u << MU_WE_PARKED);
        assert_int_equal(event->kind, MU_WE_PARKED);
        assert_int_equal(event->parked.reason, MU_PARK_PREPARE);
        assert_int_equal(event->parked.bad_checkpoint, 5);
        assert_non_null(strstr(event->parked.text, piece.file));
        assert_false(event->parked.held.has_state);
    }
    /* The coordinator chooses another source; the damaged bytes left no trace. */
    second->checkpoint = 0;
    start(second, 3);
    check_sha(second);
    fleet_free(second);
    fleet_free(fleet);
}

static void test_engine_checkpoint_that_cannot_be_written_does_not_stop_training(void **state)
{
    (void)state;
    struct fleet *fleet = run_with_snapshot(2, "text/not-a-directory");
    check_sha(fleet);
    for (uint32_t i = 0; i < 2; i++) {
        struct mu_piece_report piece = piece_of(&fleet->workers[i]);
        assert_int_not_equal(piece.status, MU_OK);
        assert_non_null(strstr(piece.text, "text"));
    }
    fleet_free(fleet);
}

static void test_engine_snapshot_when_parked_is_answered_once_each(void **state)
{
    (void)state;
    struct fleet *fleet = fleet_new();
    worker_start(fleet);
    struct worker *worker = &fleet->workers[0];
    struct mu_snapshot snapshot = {.checkpoint = 9, .layout = make_layout(1, 1, 1, 0, false, 2)};
    checkpoint_path(fleet, "parked", 9, snapshot.dir);
    /* Without state it is refused, not ignored. */
    assert_int_equal(mu_engine_snapshot(worker->engine, 1, &snapshot), MU_OK);
    assert_int_equal(next_event(worker, 1u << MU_WE_PIECE)->piece.status, MU_ERR_CONFLICT);
    start(fleet, 1);
    check_sha(fleet);
    /* Also after its generation was revoked. */
    assert_int_equal(mu_engine_abort(worker->engine, fleet->generation), MU_OK);
    next_event(worker, 1u << MU_WE_PARKED);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(mu_engine_snapshot(worker->engine, 1, &snapshot), MU_OK);
    uint32_t written = 0;
    for (uint32_t i = 0; i < 3; i++) {
        struct mu_piece_report piece = next_event(worker, 1u << MU_WE_PIECE)->piece;
        assert_true(piece.status == MU_OK || piece.status == MU_ERR_BUSY);
        assert_int_equal(piece.step, 6);
        written += piece.status == MU_OK;
    }
    assert_true(written >= 1);
    snapshot.piece = 1;
    assert_int_equal(mu_engine_snapshot(worker->engine, 1, &snapshot), MU_OK);
    assert_int_equal(next_event(worker, 1u << MU_WE_PIECE)->piece.status, MU_ERR_INVALID);
    fleet_free(fleet);
}

static void test_engine_data_that_changes_parks_with_the_file_named(void **state)
{
    (void)state;
    struct fleet *fleet = fleet_new();
    worker_start(fleet);
    assign(fleet, 1);
    next_event(&fleet->workers[0], 1u << MU_WE_PREPARED);
    flip_a_bit(fleet->spec.data.path, 3000);
    assert_int_equal(mu_engine_run(fleet->workers[0].engine, fleet->generation), MU_OK);
    const struct mu_worker_event *event = next_event(&fleet->workers[0], 1u << MU_WE_PARKED);
    assert_int_equal(event->parked.reason, MU_PARK_ENGINE);
    assert_non_null(strstr(event->parked.text, fleet->spec.data.path));
    assert_true(event->parked.held.has_state);
    fleet_free(fleet);
}

/* ---- a peer that dies ---- */

/* What rank 1, another process, needs to know of this one. */
struct introduction {
    struct mu_id own, peer;
    char address[MU_COMM_ADDRESS_SIZE];
};

/* Rank 1 of generation 1: connects, then does nothing until it is killed. */
static _Noreturn void mute_peer(int in, int out)
{
    struct mu_comm *comm;
    struct mu_comm_group *group;
    struct mu_error err;
    struct introduction intro;
    char address[MU_COMM_ADDRESS_SIZE] = "";
    if (mu_comm_new(&(struct mu_comm_config){.host_id = "host"}, &comm, &err) != MU_OK)
        _exit(1);
    snprintf(address, sizeof address, "%s", mu_comm_address(comm));
    if (write(out, address, sizeof address) != sizeof address || read(in, &intro, sizeof intro) != sizeof intro)
        _exit(1);
    struct mu_comm_peer peer = {.rank = 0, .incarnation = intro.peer, .address = intro.address};
    struct mu_comm_group_config config = {
        .generation = 1, .rank = 1, .world = 2, .incarnation = intro.own, .peers = &peer, .peer_count = 1};
    memset(config.secret, 42, sizeof config.secret);
    uint64_t deadline_us = mu_clock_mono_us() + PATIENCE_S * 1000000ull;
    if (mu_comm_open(comm, &config, deadline_us, &group, &err) != MU_OK ||
        mu_comm_wait_ready(group, deadline_us, &err) != MU_OK)
        _exit(1);
    for (;;)
        pause();
}

static void check_peer_death(bool running)
{
    int to_child[2], from_child[2];
    assert_int_equal(pipe(to_child), 0);
    assert_int_equal(pipe(from_child), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0)
        mute_peer(to_child[0], from_child[1]);
    char address[MU_COMM_ADDRESS_SIZE];
    assert_int_equal(read(from_child[0], address, sizeof address), sizeof address);
    struct fleet *fleet = fleet_new();
    worker_start(fleet);
    struct worker *worker = &fleet->workers[0];
    struct introduction intro = {.own = mu_id_random(), .peer = worker->incarnation};
    snprintf(intro.address, sizeof intro.address, "%s", mu_engine_address(worker->engine));
    assert_int_equal(write(to_child[1], &intro, sizeof intro), sizeof intro);
    struct mu_peer peer = {1, intro.own, "mute", address};
    struct mu_assign a = {
        .layout = make_layout(1, 1, 2, 0, false, 2), .peers = &peer, .peer_count = 1, .source = MU_SOURCE_INIT};
    memset(a.secret, 42, sizeof a.secret);
    fleet->generation = 1;
    assert_int_equal(mu_engine_prepare(worker->engine, 1, worker->incarnation, &a), MU_OK);
    assert_int_equal(next_event(worker, 1u << MU_WE_PREPARED | 1u << MU_WE_PARKED)->kind, MU_WE_PREPARED);
    if (running)
        assert_int_equal(mu_engine_run(worker->engine, 1), MU_OK);
    assert_int_equal(kill(pid, SIGKILL), 0);
    const struct mu_worker_event *event = next_event(worker, 1u << MU_WE_PARKED);
    assert_int_equal(event->parked.reason, MU_PARK_PEER);
    assert_int_equal(event->parked.peer_rank, 1);
    assert_true(event->parked.peer_failure == MU_PEER_FAILURE_EOF ||
                event->parked.peer_failure == MU_PEER_FAILURE_RESET);
    assert_true(event->parked.held.has_state);
    assert_false(event->parked.held.has_gradient);
    assert_int_equal(event->parked.held.step, 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    /* It goes on alone, to the same bits. */
    start(fleet, 1);
    check_sha(fleet);
    fleet_free(fleet);
    for (int i = 0; i < 2; i++) {
        close(to_child[i]);
        close(from_child[i]);
    }
}

static void test_engine_peer_that_dies_before_go_is_reported(void **state)
{
    (void)state;
    check_peer_death(false);
}

static void test_engine_peer_that_dies_in_a_step_is_reported(void **state)
{
    (void)state;
    check_peer_death(true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_engine_snapshot_while_stepping_then_load_same_bits),
        cmocka_unit_test(test_engine_checkpoint_of_any_layout_loads_into_any_other),
        cmocka_unit_test(test_engine_damaged_checkpoint_is_named_and_nothing_is_held),
        cmocka_unit_test(test_engine_checkpoint_that_cannot_be_written_does_not_stop_training),
        cmocka_unit_test(test_engine_snapshot_when_parked_is_answered_once_each),
        cmocka_unit_test(test_engine_data_that_changes_parks_with_the_file_named),
        cmocka_unit_test(test_engine_peer_that_dies_before_go_is_reported),
        cmocka_unit_test(test_engine_peer_that_dies_in_a_step_is_reported),
    };
    return cmocka_run_group_tests(tests, setup_reference, NULL);
}
