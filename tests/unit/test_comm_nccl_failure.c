/* links: mu_comm_nccl_sim mu_cuda_kernels_sim mu_kernels mu_comm mu_plan */
#include "nccl_testing.h"

enum { BLOCK = 1000, ABORT_US = 120 * 1000000, MARK_READY = 1, MARK_DEAD, MARK_OVER };

static void *blocks_of(struct rank *r)
{
    uint8_t *host = calloc(r->world, BLOCK);
    fill(host, (size_t)r->world * BLOCK, r->rank);
    void *device = to_device(r, host, (size_t)r->world * BLOCK);
    free(host);
    return device;
}

static enum mu_status gather(struct rank *r, void *blocks, struct mu_error *err)
{
    return mu_nccl_all_gather(r->nccl, MU_NCCL_WORLD, blocks, BLOCK, r->cuda.stream, err);
}

/* The end of an operation that fails: in the call already, or later. */
static enum mu_status outcome(struct rank *r, enum mu_status begun, struct mu_error *err)
{
    return begun != MU_OK ? begun : mu_nccl_wait(r->nccl, r->cuda.stream, soon(), err);
}

/* Abort returns in time, the stream is dry, and everything afterwards fails with the first reason. */
static void expect_over(struct rank *r, void *blocks, enum mu_status reason)
{
    struct mu_error told = {0};
    OK(mu_nccl_abort(r->nccl, mu_clock_mono_us() + ABORT_US, err));
    CHECK(cudaStreamQuery(r->cuda.stream) == cudaSuccess);
    CHECK(gather(r, blocks, &told) == reason);
    CHECK(mu_nccl_progress(r->nccl, &told) == reason);
    CHECK(cudaFree(blocks) == cudaSuccess);
}

/* ---- the network and its peers ---- */

static void revoked(struct rank *r)
{
    struct mu_error told = {0};
    rank_open(r);
    void *blocks = blocks_of(r);
    if (r->rank == 0)
        cudasim_fail("nccl hang", 1, 1);
    OK(gather(r, blocks, err));
    come(r, MARK_READY);
    await(r, MARK_READY, r->world);
    CHECK(mu_nccl_wait(r->nccl, r->cuda.stream, mu_clock_mono_us() + 50000, &told) == MU_ERR_TIMEOUT);
    expect_text(r, &told, "all-gather 1 of the world");
    come(r, MARK_DEAD);
    await(r, MARK_DEAD, r->world); /* else the first one to abort would be what the others see */
    mu_comm_abort(r->comm, 1);
    CHECK(mu_nccl_wait(r->nccl, r->cuda.stream, soon(), &told) == MU_ERR_CANCELLED);
    expect_text(r, &told, "revoked");
    expect_over(r, blocks, MU_ERR_CANCELLED);
    rank_end(r);
}

static void test_a_revoke_ends_a_collective_that_hangs(void **state)
{
    (void)state;
    run_ranks(2, -1, revoked);
    run_ranks(4, -1, revoked);
}

/* Rank 1 dies before it makes the operation that the others are in. */
static void survive(struct rank *r, int deaf)
{
    struct mu_error told = {0};
    rank_open(r);
    void *blocks = blocks_of(r);
    cudasim_nccl_deaf(deaf);
    if (r->rank == 1) {
        await(r, MARK_READY, r->world - 1);
        raise(SIGKILL);
    }
    OK(gather(r, blocks, err));
    come(r, MARK_READY);
    CHECK(mu_nccl_wait(r->nccl, r->cuda.stream, soon(), &told) == MU_ERR_UNAVAILABLE);
    expect_text(r, &told, "rank 1");
    expect_text(r, &told, "host-b");
    expect_text(r, &told, "all-gather 1 of the world");
    come(r, MARK_DEAD);
    await(r, MARK_DEAD, r->world - 1); /* nobody leaves before all have seen who it was */
    expect_over(r, blocks, MU_ERR_UNAVAILABLE);
    rank_end(r);
}

static void survive_a_death_that_nccl_notices(struct rank *r)
{
    survive(r, 0);
}

static void survive_a_death_that_nccl_misses(struct rank *r)
{
    survive(r, 1);
}

static void test_a_killed_peer_is_named_with_its_host(void **state)
{
    (void)state;
    run_ranks(3, 1, survive_a_death_that_nccl_notices);
    run_ranks(3, 1, survive_a_death_that_nccl_misses);
}

static void meet_different_steps(struct rank *r)
{
    struct mu_error told = {0};
    rank_open(r);
    void *blocks = blocks_of(r);
    enum mu_status begun = r->rank == 0
                               ? mu_nccl_broadcast(r->nccl, MU_NCCL_WORLD, 0, blocks, BLOCK, r->cuda.stream, &told)
                               : gather(r, blocks, &told);
    CHECK(outcome(r, begun, &told) == MU_ERR_UNAVAILABLE);
    expect_text(r, &told, "broadcast");
    expect_text(r, &told, "all-gather");
    come(r, MARK_READY);
    await(r, MARK_READY, r->world);
    expect_over(r, blocks, MU_ERR_UNAVAILABLE);
    rank_end(r);
}

static void meet_different_sizes(struct rank *r)
{
    struct mu_error told = {0};
    rank_open(r);
    void *blocks = blocks_of(r);
    enum mu_status begun = mu_nccl_all_gather(r->nccl, MU_NCCL_WORLD, blocks, BLOCK - r->rank, r->cuda.stream, &told);
    CHECK(outcome(r, begun, &told) == MU_ERR_UNAVAILABLE);
    expect_text(r, &told, "1000 bytes");
    expect_text(r, &told, "999 bytes");
    come(r, MARK_READY);
    await(r, MARK_READY, r->world);
    expect_over(r, blocks, MU_ERR_UNAVAILABLE);
    rank_end(r);
}

static void test_ranks_that_do_different_things_are_told(void **state)
{
    (void)state;
    run_ranks(2, -1, meet_different_steps);
    run_ranks(2, -1, meet_different_sizes);
}

/* ---- NCCL itself ---- */

static void see_an_asynchronous_error(struct rank *r)
{
    struct mu_error told = {0};
    rank_open(r);
    void *blocks = blocks_of(r);
    if (r->rank == 0)
        cudasim_fail("nccl async", 1, 0);
    CHECK(outcome(r, gather(r, blocks, &told), &told) == MU_ERR_UNAVAILABLE);
    /* The others' NCCL sees the connection close, their sockets are as they were: no rank to blame. */
    expect_text(r, &told, r->rank == 0 ? "internal error" : "remote process exited");
    expect_text(r, &told, "all-gather 1 of the world");
    expect_over(r, blocks, MU_ERR_UNAVAILABLE);
    come(r, MARK_OVER);
    await(r, MARK_OVER, r->world);
    rank_end(r);
}

static void test_an_asynchronous_error_ends_the_operation(void **state)
{
    (void)state;
    run_ranks(2, -1, see_an_asynchronous_error);
}

/* A call that NCCL refuses at once; the next generation works. */
static void see_a_refusal(struct rank *r)
{
    struct mu_error told = {0};
    rank_open(r);
    void *blocks = blocks_of(r);
    cudasim_fail("ncclAllGather", 1, 0);
    CHECK(gather(r, blocks, &told) == MU_ERR_UNAVAILABLE);
    expect_text(r, &told, "internal error");
    expect_over(r, blocks, MU_ERR_UNAVAILABLE);
    come(r, MARK_OVER);
    await(r, MARK_OVER, r->world);
    mu_nccl_free(r->nccl);
    mu_comm_group_close(r->group);
    mu_nccl_meeting_free(r->meeting);
    mu_comm_free(r->comm);
    atomic_store(&r->point->marks[0], 0);
    come(r, MARK_OVER);
    await(r, MARK_OVER, 2 * r->world);
    rank_connect(r, 2);
    rank_meet(r);
    OK(mu_nccl_meeting_run(r->meeting, soon(), err));
    struct mu_nccl_config config = rank_config(r);
    OK(mu_nccl_open(&config, soon(), &r->nccl, err));
    blocks = blocks_of(r);
    OK(gather(r, blocks, err));
    OK(mu_nccl_wait(r->nccl, r->cuda.stream, soon(), err));
    CHECK(cudaFree(blocks) == cudaSuccess);
    OK(mu_nccl_close(r->nccl, soon(), err));
    rank_end(r);
}

static void test_after_a_failure_the_next_generation_works(void **state)
{
    (void)state;
    run_ranks(2, -1, see_a_refusal);
}

/* Rank 0's connecting fails, at once or later; rank 1 is let go by a revoke, as the coordinator would. */
static void fail_to_open(struct rank *r, const char *what, const char *said)
{
    struct mu_error told = {0};
    rank_begin(r);
    rank_connect(r, 1);
    rank_meet(r);
    OK(mu_nccl_meeting_run(r->meeting, soon(), err));
    struct mu_nccl_config config = rank_config(r);
    if (r->rank == 0) {
        cudasim_fail(what, 1, 0);
        CHECK(mu_nccl_open(&config, soon(), &r->nccl, &told) == MU_ERR_UNAVAILABLE);
        expect_text(r, &told, said);
        expect_text(r, &told, "NCCL_SOCKET_IFNAME");
        come(r, MARK_READY);
    } else {
        enum mu_status status = mu_nccl_open(&config, mu_clock_mono_us() + 200000, &r->nccl, &told);
        CHECK(status == MU_ERR_TIMEOUT || status == MU_ERR_UNAVAILABLE);
        expect_text(r, &told, status == MU_ERR_TIMEOUT ? "did not come in time" : "NCCL");
        await(r, MARK_READY, 1);
    }
    come(r, MARK_OVER);
    await(r, MARK_OVER, r->world);
    rank_end(r);
}

static void fail_to_open_at_once(struct rank *r)
{
    fail_to_open(r, "ncclCommInitRank", "the meeting of 2 ranks");
}
static void fail_to_open_later(struct rank *r)
{
    fail_to_open(r, "nccl init", "connecting failed on demand");
}
static void fail_to_split(struct rank *r)
{
    fail_to_open(r, "ncclCommSplit", "the split into tensor group");
}

static void test_communicators_that_cannot_be_made_are_given_up(void **state)
{
    (void)state;
    run_ranks(2, -1, fail_to_open_at_once);
    run_ranks(2, -1, fail_to_open_later);
    run_ranks(2, -1, fail_to_split);
}

/* Rank 1 dies where the others wait for it in NCCL's own bootstrap, or in the meeting before that. */
static void open_without(struct rank *r, bool met)
{
    struct mu_error told = {0};
    rank_begin(r);
    rank_connect(r, 1);
    rank_meet(r);
    come(r, MARK_READY);
    await(r, MARK_READY, r->world); /* all are connected */
    if (r->rank == 1) {
        if (met)
            OK(mu_nccl_meeting_run(r->meeting, soon(), err));
        raise(SIGKILL);
    }
    enum mu_status status = mu_nccl_meeting_run(r->meeting, soon(), &told);
    if (met && status == MU_OK) { /* else it was dead before all had their ids */
        struct mu_nccl_config config = rank_config(r);
        status = mu_nccl_open(&config, soon(), &r->nccl, &told);
        expect_text(r, &told, "host-b");
        expect_text(r, &told, "the meeting of 3 ranks");
    }
    CHECK(status == MU_ERR_UNAVAILABLE);
    expect_text(r, &told, "rank 1");
    come(r, MARK_OVER);
    await(r, MARK_OVER, r->world - 1);
    rank_end(r);
}

static void open_without_a_peer(struct rank *r)
{
    open_without(r, true);
}
static void meet_without_a_peer(struct rank *r)
{
    open_without(r, false);
}

static void test_a_peer_that_dies_while_communicators_are_made_is_named(void **state)
{
    (void)state;
    run_ranks(3, 1, open_without_a_peer);
    run_ranks(3, 1, meet_without_a_peer);
}

static void differ_in_version(struct rank *r)
{
    struct mu_error told = {0};
    if (r->rank == 2)
        setenv("CUDASIM_NCCL_VERSION", "22703", 1);
    rank_begin(r);
    rank_connect(r, 1);
    rank_meet(r);
    CHECK(mu_nccl_meeting_run(r->meeting, soon(), &told) == MU_ERR_CONFLICT);
    expect_text(r, &told, "NCCL versions differ: 2.27.3 on rank 2 [host host-c]");
    come(r, MARK_OVER);
    await(r, MARK_OVER, r->world);
    rank_end(r);
}

static void test_versions_that_differ_are_said_in_one_line_everywhere(void **state)
{
    (void)state;
    run_ranks(3, -1, differ_in_version);
}

static void share_a_gpu(struct rank *r)
{
    struct mu_error told = {0};
    rank_begin(r);
    rank_connect(r, 1);
    rank_meet(r);
    OK(mu_nccl_meeting_run(r->meeting, soon(), err));
    CHECK(cudaSetDevice(0) == cudaSuccess);
    struct mu_nccl_config config = rank_config(r);
    CHECK(mu_nccl_open(&config, soon(), &r->nccl, &told) == MU_ERR_UNAVAILABLE);
    expect_text(r, &told, "Duplicate GPU");
    expect_text(r, &told, "a GPU of its own");
    come(r, MARK_OVER);
    await(r, MARK_OVER, r->world);
    CHECK(cudaSetDevice((int)r->rank) == cudaSuccess);
    rank_end(r);
}

static void test_two_ranks_on_one_gpu_are_refused(void **state)
{
    (void)state;
    run_ranks(2, -1, share_a_gpu);
}

/* Rank 1 comes after the first deadline. */
static void come_late(struct rank *r)
{
    struct mu_error told = {0};
    rank_open(r);
    void *blocks = blocks_of(r);
    if (r->rank == 0) {
        OK(gather(r, blocks, err));
        CHECK(mu_nccl_wait(r->nccl, r->cuda.stream, mu_clock_mono_us() + 50000, &told) == MU_ERR_TIMEOUT);
        expect_text(r, &told, "all-gather 1 of the world (2 ranks from rank 0, 1000 bytes): not done by the deadline");
        come(r, MARK_READY);
    } else {
        await(r, MARK_READY, 1);
        OK(gather(r, blocks, err)); /* late, not lost */
    }
    OK(mu_nccl_wait(r->nccl, r->cuda.stream, soon(), err));
    CHECK(r->waits > 0 && !r->waiting);
    CHECK(cudaFree(blocks) == cudaSuccess);
    OK(mu_nccl_close(r->nccl, soon(), err));
    rank_end(r);
}

static void test_a_wait_names_what_it_waits_for_and_may_be_repeated(void **state)
{
    (void)state;
    run_ranks(2, -1, come_late);
}

/* NCCL never takes the operation. */
static void stall(struct rank *r)
{
    struct mu_error told = {0};
    r->stall_us = 100000;
    rank_open(r);
    void *blocks = blocks_of(r);
    cudasim_fail("nccl stall", 1, 0);
    CHECK(gather(r, blocks, &told) == MU_ERR_TIMEOUT);
    expect_text(r, &told,
                "all-gather 1 of the world (2 ranks from rank 0, 1000 bytes): the other members did not come");
    expect_over(r, blocks, MU_ERR_TIMEOUT);
    come(r, MARK_OVER);
    await(r, MARK_OVER, r->world);
    rank_end(r);
}

static void test_an_operation_that_is_never_enqueued_times_out(void **state)
{
    (void)state;
    run_ranks(2, -1, stall);
}

/* ---- the GPU ---- */

static void lose_the_gpu(struct rank *r)
{
    struct mu_error told = {0};
    rank_open(r);
    float *numbers = to_device(r, NULL, 2 * 64 * sizeof *numbers);
    if (r->rank == 0) {
        cudasim_fail("kernel", 1, cudaErrorECCUncorrectable);
        CHECK(mu_kernel_add(r->gpu, 64, numbers, numbers + 64) == MU_OK); /* enqueued */
        CHECK(mu_nccl_wait(r->nccl, r->cuda.stream, soon(), &told) == MU_ERR_IO);
        expect_text(r, &told, "the GPU failed: uncorrectable ECC error");
    }
    come(r, MARK_OVER);
    await(r, MARK_OVER, r->world);
    OK(mu_nccl_abort(r->nccl, mu_clock_mono_us() + ABORT_US, err));
}

static void test_a_gpu_that_fails_is_told(void **state)
{
    (void)state;
    run_ranks(2, -1, lose_the_gpu);
}

/* ---- an abort that hangs ---- */

static void fail_to_abort(struct rank *r)
{
    struct mu_error told = {0};
    rank_open(r);
    cudasim_fail("ncclCommAbort", 1, 0);
    CHECK(mu_nccl_abort(r->nccl, mu_clock_mono_us() + ABORT_US, &told) == MU_ERR_IO);
    expect_text(r, &told, "NCCL cannot abort");
    expect_text(r, &told, "must end");
    come(r, MARK_OVER);
    await(r, MARK_OVER, r->world);
}

static void hang_in_abort(struct rank *r)
{
    struct mu_error told = {0};
    rank_open(r);
    cudasim_fail("nccl abort hang", 1, 1);
    uint64_t begun_us = mu_clock_mono_us();
    CHECK(mu_nccl_abort(r->nccl, begun_us + 100000, &told) == MU_ERR_TIMEOUT);
    expect_text(r, &told, "of the communicators did not abort in time");
    expect_text(r, &told, "must end");
    mu_nccl_free(r->nccl); /* kept: the thread that hangs has it */
    come(r, MARK_OVER);
    await(r, MARK_OVER, r->world);
}

static void test_an_abort_that_hangs_or_fails_says_that_the_process_must_end(void **state)
{
    (void)state;
    run_ranks(2, -1, fail_to_abort);
    run_ranks(2, -1, hang_in_abort);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_revoke_ends_a_collective_that_hangs),
        cmocka_unit_test(test_a_killed_peer_is_named_with_its_host),
        cmocka_unit_test(test_ranks_that_do_different_things_are_told),
        cmocka_unit_test(test_an_asynchronous_error_ends_the_operation),
        cmocka_unit_test(test_after_a_failure_the_next_generation_works),
        cmocka_unit_test(test_communicators_that_cannot_be_made_are_given_up),
        cmocka_unit_test(test_a_peer_that_dies_while_communicators_are_made_is_named),
        cmocka_unit_test(test_an_operation_that_is_never_enqueued_times_out),
        cmocka_unit_test(test_a_gpu_that_fails_is_told),
        cmocka_unit_test(test_versions_that_differ_are_said_in_one_line_everywhere),
        cmocka_unit_test(test_two_ranks_on_one_gpu_are_refused),
        cmocka_unit_test(test_a_wait_names_what_it_waits_for_and_may_be_repeated),
        cmocka_unit_test(test_an_abort_that_hangs_or_fails_says_that_the_process_must_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
