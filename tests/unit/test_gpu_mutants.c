/* links: mu_comm_nccl_sim mu_cuda_kernels_sim mu_kernels mu_comm mu_plan */
/* Deliberate faults of the code for GPUs (common/gpu_mutant.h): the emulation notices each of them. */
#define MU_GPU_MUTANTS 1
#include "common/gpu_mutant.h"
#include "nccl_testing.h"

enum { FLOATS = 40000, ROUNDS = 12, ORDERS = 8, MARK_OVER = 1, IMPATIENCE_US = 1000000, VOCAB = 300, ROWS = 6 };

/* ---- what goes wrong, if it does ---- */

/* Long enough that whoever does not wait comes too early. */
static void compute(struct rank *r, float *data, float value)
{
    for (int i = 0; i < ROUNDS; i++)
        CHECK(mu_kernel_fill(r->gpu, FLOATS, i + 1 == ROUNDS ? value : -1.0f, data) == MU_OK);
}

static void *on_device(struct rank *r, enum mu_memory kind, size_t bytes)
{
    void *memory;
    OK(mu_device_allocate(&r->cuda.base, kind, bytes, err, &memory));
    return memory;
}

static void expect_floats(const struct rank *r, const float *data, size_t count, float value)
{
    for (size_t i = 0; i < count; i++)
        CHECK(data[i] == value);
}

/* As worker/nccl_link.c: a block goes to the other rank on a stream of its own, after it was computed. */
static void exchange_what_was_computed(struct rank *r)
{
    rank_open(r);
    struct mu_device *device = &r->cuda.base;
    float *blocks = on_device(r, MU_MEMORY_DEVICE, 2 * FLOATS * sizeof(float)), *host = malloc(FLOATS * sizeof(float));
    compute(r, blocks + r->rank * FLOATS, (float)(r->rank + 1));
    mu_device_signal(device, MU_TRACK_MAIN, 0);
    mu_device_follow(device, MU_TRACK_REPLICAS, 0);
    OK(mu_nccl_all_gather(r->nccl, MU_NCCL_WORLD, blocks, FLOATS * sizeof(float), r->cuda.tracks[MU_TRACK_REPLICAS],
                          err));
    OK(mu_nccl_wait(r->nccl, r->cuda.tracks[MU_TRACK_REPLICAS], soon(), err));
    uint32_t other = 1 - r->rank;
    CHECK(cudaMemcpy(host, blocks + other * FLOATS, FLOATS * sizeof(float), cudaMemcpyDeviceToHost) == cudaSuccess);
    expect_floats(r, host, FLOATS, (float)(other + 1));
    free(host);
    come(r, MARK_OVER);
    await(r, MARK_OVER, r->world);
}

/* As worker/snapshot.c: a copy in pinned memory, read when the mark behind it has passed. */
static void read_a_snapshot(struct rank *r)
{
    rank_begin(r);
    float *data = on_device(r, MU_MEMORY_DEVICE, FLOATS * sizeof(float)),
          *copy = on_device(r, MU_MEMORY_PINNED, FLOATS * sizeof(float));
    compute(r, data, 7.0f);
    CHECK(mu_device_copy(&r->cuda.base, copy, data, FLOATS * sizeof(float)) == MU_OK);
    CHECK(mu_pool_wait(r->gpu) == MU_OK);
    expect_floats(r, copy, FLOATS, 7.0f);
}

/* As the losses of a micro-batch are read. */
static void read_a_result(struct rank *r)
{
    const void *view;
    rank_begin(r);
    float *data = on_device(r, MU_MEMORY_DEVICE, FLOATS * sizeof(float));
    compute(r, data, 7.0f);
    CHECK(mu_device_read(&r->cuda.base, data, FLOATS * sizeof(float), &view) == MU_OK);
    expect_floats(r, view, FLOATS, 7.0f);
}

static void use_fresh_memory(struct rank *r)
{
    const void *view;
    rank_begin(r);
    float *data = on_device(r, MU_MEMORY_DEVICE, FLOATS * sizeof(float));
    CHECK(mu_device_read(&r->cuda.base, data, FLOATS * sizeof(float), &view) == MU_OK);
    expect_floats(r, view, FLOATS, 0.0f);
}

/* The loss of a slice of the vocabulary, beside the CPU's. */
static void sum_a_slice(struct rank *r)
{
    float logits[ROWS * VOCAB], highest[ROWS];
    int32_t targets[ROWS];
    double sum[ROWS], loss[ROWS] = {0}, cpu_sum[ROWS], cpu_loss[ROWS] = {0};
    rank_begin(r);
    fill_floats(logits, ROWS * VOCAB, 5);
    for (uint32_t i = 0; i < ROWS; i++) {
        targets[i] = (int32_t)(i * 47 + 3);
        highest[i] = 1.0f;
    }
    float *dev_logits = to_device(r, logits, sizeof logits), *dev_highest = to_device(r, highest, sizeof highest);
    int32_t *dev_targets = to_device(r, targets, sizeof targets);
    double *dev_sum = to_device(r, NULL, sizeof sum), *dev_loss = to_device(r, loss, sizeof loss);
    CHECK(mu_kernel_cross_entropy_sum(r->gpu, ROWS, 0, VOCAB, VOCAB, dev_logits, dev_targets, dev_highest, true,
                                      dev_sum, dev_loss) == MU_OK);
    CHECK(mu_kernel_cross_entropy_sum(r->cpu, ROWS, 0, VOCAB, VOCAB, logits, targets, highest, true, cpu_sum,
                                      cpu_loss) == MU_OK);
    CHECK(mu_cuda_wait(&r->cuda) == MU_OK);
    CHECK(cudaMemcpy(sum, dev_sum, sizeof sum, cudaMemcpyDeviceToHost) == cudaSuccess);
    CHECK(cudaMemcpy(loss, dev_loss, sizeof loss, cudaMemcpyDeviceToHost) == cudaSuccess);
    CHECK(memcmp(sum, cpu_sum, sizeof sum) == 0 && memcmp(loss, cpu_loss, sizeof loss) == 0);
}

/* The sockets are as they were: NCCL alone can tell, and it tells the first rank alone. */
static void meet_an_error_of_nccl(struct rank *r)
{
    struct mu_error told = {0};
    rank_open(r);
    float *blocks = to_device(r, NULL, 2 * FLOATS * sizeof(float));
    if (r->rank == 0)
        cudasim_fail("nccl async", 1, 0);
    enum mu_status status =
        mu_nccl_all_gather(r->nccl, MU_NCCL_WORLD, blocks, FLOATS * sizeof(float), r->cuda.stream, &told);
    uint64_t deadline_us = mu_gpu_mutant_active ? mu_clock_mono_us() + IMPATIENCE_US : soon();
    if (r->rank == 0 && status == MU_OK)
        status = mu_nccl_wait(r->nccl, r->cuda.stream, deadline_us, &told);
    CHECK(r->rank > 0 || status == MU_ERR_UNAVAILABLE);
    come(r, MARK_OVER);
    await(r, MARK_OVER, r->world);
}

/* The buffer has another use as soon as the abort has returned. */
static void use_a_buffer_after_an_abort(struct rank *r)
{
    rank_open(r);
    float *data = to_device(r, NULL, FLOATS * sizeof(float)), *host = malloc(FLOATS * sizeof(float));
    struct mu_error told = {0};
    enum mu_status status =
        mu_nccl_broadcast(r->nccl, MU_NCCL_WORLD, 0, data, FLOATS * sizeof(float), r->cuda.stream, &told);
    CHECK(status == MU_OK || status == MU_ERR_UNAVAILABLE); /* the other rank may have aborted already */
    compute(r, data, 7.0f);                                 /* behind it, on the same stream */
    OK(mu_nccl_abort(r->nccl, soon(), err));
    CHECK(cudaMemcpy(host, data, FLOATS * sizeof(float), cudaMemcpyDeviceToHost) == cudaSuccess);
    expect_floats(r, host, FLOATS, 7.0f);
    free(host);
    come(r, MARK_OVER);
    await(r, MARK_OVER, r->world);
}

/* ---- runs ---- */

struct run {
    enum mu_gpu_mutant mutant;
    uint32_t order;
    rank_fn *fn;
};
static struct run run; /* of the ranks that are forked */

static void in_this_run(struct rank *r)
{
    char order[16], delay[16];
    snprintf(order, sizeof order, "%u", run.order + 1);
    snprintf(delay, sizeof delay, "%u", 2000u);
    setenv("CUDASIM_SEED", order, 1);
    setenv("CUDASIM_DELAY_US", delay, 1);
    mu_gpu_mutant_active = (int)run.mutant;
    run.fn(r);
}

static void test_every_fault_is_noticed(void **state)
{
    (void)state;
    static const struct {
        enum mu_gpu_mutant mutant;
        const char *name;
        uint32_t world;
        rank_fn *fn;
    } cases[] = {
        {MU_GPU_MUT_FOLLOW_NOBODY, "FOLLOW_NOBODY", 2, exchange_what_was_computed},
        {MU_GPU_MUT_PASS_EARLY, "PASS_EARLY", 1, read_a_snapshot},
        {MU_GPU_MUT_READ_EARLY, "READ_EARLY", 1, read_a_result},
        {MU_GPU_MUT_KEEP_FRESH, "KEEP_FRESH", 1, use_fresh_memory},
        {MU_GPU_MUT_NO_BARRIER, "NO_BARRIER", 1, sum_a_slice},
        {MU_GPU_MUT_NO_POLL, "NO_POLL", 2, meet_an_error_of_nccl},
        {MU_GPU_MUT_ABORT_RUNNING, "ABORT_RUNNING", 2, use_a_buffer_after_an_abort},
    };
    enum { CASES = sizeof cases / sizeof cases[0] };
    _Static_assert((int)CASES == (int)MU_GPU_MUT_COUNT - 1, "every one has a case");
    for (size_t i = 0; i < CASES; i++) {
        uint32_t noticed = ORDERS;
        for (uint32_t order = 0; order < ORDERS; order++) {
            run = (struct run){MU_GPU_MUT_NONE, order, cases[i].fn};
            if (count_bad_ranks(cases[i].world, -1, in_this_run) > 0)
                fail_msg("%s: the case fails without the fault, in order %u", cases[i].name, order);
        }
        for (uint32_t order = 0; order < ORDERS && noticed == ORDERS; order++) {
            run = (struct run){cases[i].mutant, order, cases[i].fn};
            if (count_bad_ranks(cases[i].world, -1, in_this_run) > 0)
                noticed = order;
        }
        if (noticed == ORDERS)
            fail_msg("%s: not noticed in %d orders", cases[i].name, ORDERS);
        print_message("%s: noticed in order %u\n", cases[i].name, noticed);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_every_fault_is_noticed)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
