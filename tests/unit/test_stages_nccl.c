/* links: mu_engine mu_comm_nccl_sim mu_cuda_kernels_sim mu_kernels mu_comm mu_plan */
#include "nccl_testing.h"

#include "plan/pipeline.h"
#include "tests/lib/sanitized.h"
#include "worker/pipeline.h"

/* Stages that add instead of computing, on a GPU each, in the order of plan/pipeline.h. Streams of the emulation begin
 * late and in no order: a wait that is missing brings wrong numbers. */
enum { FLOATS = 3000, MICROS_MAX = 6, STEPS = SANITIZED ? 1 : 3 };

struct stage {
    struct rank *rank;
    struct mu_nccl_link link;
    struct mu_pipeline *pipeline;
    float *ones, *kept[MICROS_MAX], *results[MICROS_MAX]; /* device */
    float host[FLOATS];
};

static float number_at(uint32_t step, uint32_t micro, size_t i)
{
    return (float)(step * 100000 + micro * 10000 + i);
}

static struct mu_nccl_config stages_config(struct rank *r)
{
    struct mu_nccl_config config = {.group = r->group, .rank = r->rank, .world = r->world};
    config.ids = mu_nccl_meeting_ids(r->meeting, &config.id_count);
    for (uint32_t i = 0; i < r->world; i++)
        r->tensor_ranks[i] = i;
    config.scopes[MU_NCCL_STAGES] = (struct mu_nccl_members){r->tensor_ranks, r->world, r->rank};
    return config;
}

static float *take_device(struct rank *r)
{
    void *memory = NULL;
    OK(mu_device_allocate(&r->cuda.base, MU_MEMORY_DEVICE, FLOATS * sizeof(float), err, &memory));
    return memory;
}

static void stage_begin(struct stage *s, struct rank *r)
{
    int64_t last = (int64_t)r->world - 1;
    rank_begin(r);
    rank_connect(r, 1);
    rank_meet(r);
    OK(mu_nccl_meeting_run(r->meeting, soon(), err));
    struct mu_nccl_config config = stages_config(r);
    OK(mu_nccl_open(&config, soon(), &r->nccl, err));
    s->rank = r;
    s->link = (struct mu_nccl_link){.ops = mu_nccl_ops(), .nccl = r->nccl, .device = &r->cuda.base};
    for (int track = 0; track < MU_TRACKS; track++)
        s->link.streams[track] = mu_nccl_ops()->stream(&r->cuda.base, (enum mu_track)track);
    struct mu_pipeline_config pipeline = {.group = r->group,
                                          .before = r->rank > 0 ? (int64_t)r->rank - 1 : MU_PIPELINE_NO_RANK,
                                          .after = r->rank < last ? (int64_t)r->rank + 1 : MU_PIPELINE_NO_RANK,
                                          .stage = r->rank,
                                          .link = &s->link,
                                          .block_floats = FLOATS,
                                          .device = &r->cuda.base};
    OK(mu_pipeline_new(&pipeline, &s->pipeline, err));
    s->ones = take_device(r);
    for (size_t i = 0; i < FLOATS; i++)
        s->host[i] = 1;
    CHECK(mu_device_copy(&r->cuda.base, s->ones, s->host, sizeof s->host) == MU_OK);
    for (uint32_t i = 0; i < MICROS_MAX; i++) {
        s->kept[i] = take_device(r);
        s->results[i] = take_device(r);
    }
}

static void stage_end(struct stage *s)
{
    struct rank *r = s->rank;
    OK(mu_nccl_close(r->nccl, soon(), err));
    mu_pipeline_free(s->pipeline);
    mu_device_release(&r->cuda.base, MU_MEMORY_DEVICE, s->ones, FLOATS * sizeof(float));
    for (uint32_t i = 0; i < MICROS_MAX; i++) {
        mu_device_release(&r->cuda.base, MU_MEMORY_DEVICE, s->kept[i], FLOATS * sizeof(float));
        mu_device_release(&r->cuda.base, MU_MEMORY_DEVICE, s->results[i], FLOATS * sizeof(float));
    }
    rank_end(r);
}

/* to = from + 1, on the main track. */
static void add_one(struct stage *s, float *to, const float *from)
{
    struct rank *r = s->rank;
    CHECK(mu_device_copy(&r->cuda.base, to, from, FLOATS * sizeof(float)) == MU_OK);
    CHECK(mu_kernel_add(r->gpu, FLOATS, to, s->ones) == MU_OK);
}

static void forward(struct stage *s, uint32_t step, uint32_t micro)
{
    struct rank *r = s->rank;
    const float *in;
    float *out;
    OK(mu_pipeline_receive(s->pipeline, MU_PIPELINE_ACTIVATIONS, &in, err));
    OK(mu_pipeline_block(s->pipeline, MU_PIPELINE_ACTIVATIONS, &out, err));
    CHECK(!in == (r->rank == 0) && !out == (r->rank + 1 == r->world));
    if (in) {
        add_one(s, s->kept[micro], in);
    } else {
        for (size_t i = 0; i < FLOATS; i++)
            s->host[i] = number_at(step, micro, i);
        CHECK(mu_device_copy(&r->cuda.base, s->kept[micro], s->host, sizeof s->host) == MU_OK);
    }
    if (out)
        CHECK(mu_device_copy(&r->cuda.base, out, s->kept[micro], FLOATS * sizeof(float)) == MU_OK);
    OK(mu_pipeline_send(s->pipeline, MU_PIPELINE_ACTIVATIONS, err));
    OK(mu_pipeline_release(s->pipeline, MU_PIPELINE_ACTIVATIONS, err));
}

static void backward(struct stage *s, uint32_t micro)
{
    struct rank *r = s->rank;
    const float *dout;
    float *din;
    OK(mu_pipeline_receive(s->pipeline, MU_PIPELINE_GRADIENTS, &dout, err));
    OK(mu_pipeline_block(s->pipeline, MU_PIPELINE_GRADIENTS, &din, err));
    add_one(s, s->results[micro], dout ? dout : s->kept[micro]);
    if (din)
        CHECK(mu_device_copy(&r->cuda.base, din, s->results[micro], FLOATS * sizeof(float)) == MU_OK);
    OK(mu_pipeline_send(s->pipeline, MU_PIPELINE_GRADIENTS, err));
    OK(mu_pipeline_release(s->pipeline, MU_PIPELINE_GRADIENTS, err));
}

static void expect(struct stage *s, float *const *device, uint32_t step, uint32_t micros, uint32_t additions)
{
    struct rank *r = s->rank;
    OK(mu_nccl_wait(r->nccl, r->cuda.tracks[MU_TRACK_MAIN], soon(), err));
    for (uint32_t micro = 0; micro < micros; micro++) {
        CHECK(mu_device_move(&r->cuda.base, s->host, device[micro], sizeof s->host) == MU_OK);
        for (size_t i = 0; i < FLOATS; i++)
            CHECK(s->host[i] == number_at(step, micro, i) + (float)additions);
    }
}

static void run_step(struct stage *s, uint32_t step, uint32_t micros)
{
    struct rank *r = s->rank;
    uint32_t last = r->world - 1;
    OK(mu_pipeline_expect(s->pipeline, MU_PIPELINE_ACTIVATIONS, micros, err));
    OK(mu_pipeline_expect(s->pipeline, MU_PIPELINE_GRADIENTS, micros, err));
    for (uint32_t i = 0; i < 2 * micros; i++) {
        struct mu_pipeline_op op = mu_pipeline_op_at(r->world, r->rank, micros, i);
        if (op.backward)
            backward(s, op.micro);
        else
            forward(s, step, op.micro);
    }
    OK(mu_pipeline_flush(s->pipeline, err));
    expect(s, s->kept, step, micros, r->rank);
    expect(s, s->results, step, micros, last + 1 + last - r->rank);
}

/* Evaluation: blocks go one way, all of them ahead of what the last stage has done. */
static void run_forwards(struct stage *s, uint32_t step, uint32_t micros)
{
    const struct rank *r = s->rank;
    OK(mu_pipeline_expect(s->pipeline, MU_PIPELINE_ACTIVATIONS, micros, err));
    for (uint32_t micro = 0; micro < micros; micro++)
        forward(s, step, micro);
    OK(mu_pipeline_flush(s->pipeline, err));
    expect(s, s->kept, step, micros, r->rank);
}

static void run_stages(struct rank *r)
{
    struct stage *s = calloc(1, sizeof *s);
    stage_begin(s, r);
    for (uint32_t step = 0; step < STEPS; step++) {
        for (uint32_t micros = 1; micros <= MICROS_MAX; micros += SANITIZED ? 2 : 1)
            run_step(s, step, micros);
        run_forwards(s, step, MICROS_MAX);
    }
    stage_end(s);
    free(s);
}

static void test_blocks_between_stages_arrive_in_every_order_of_work(void **state)
{
    (void)state;
    for (uint32_t world = 2; world <= RANKS_MAX; world += 1 + SANITIZED)
        run_ranks(world, -1, run_stages);
}

/* The stage in the middle dies; what the others wait for on their GPUs ends, and no byte of theirs is touched any more.
 */
static void lose_a_stage(struct rank *r)
{
    enum { MARK_READY = 1, MARK_SEEN };
    struct stage *s = calloc(1, sizeof *s);
    struct mu_error told = {0};
    stage_begin(s, r);
    run_step(s, 0, 2);
    come(r, MARK_READY);
    await(r, MARK_READY, r->world);
    if (r->rank == 1)
        raise(SIGKILL);
    OK(mu_pipeline_expect(s->pipeline, MU_PIPELINE_ACTIVATIONS, 1, err));
    OK(mu_pipeline_expect(s->pipeline, MU_PIPELINE_GRADIENTS, 1, err));
    const float *in = NULL;
    enum mu_pipeline_flow flow = r->rank == 0 ? MU_PIPELINE_GRADIENTS : MU_PIPELINE_ACTIVATIONS;
    enum mu_status status = mu_pipeline_receive(s->pipeline, flow, &in, &told);
    if (status == MU_OK) {
        add_one(s, s->kept[0], in);
        status = mu_nccl_wait(r->nccl, r->cuda.tracks[MU_TRACK_MAIN], soon(), &told);
    }
    CHECK(status == MU_ERR_UNAVAILABLE);
    expect_text(r, &told, "rank 1");
    come(r, MARK_SEEN);
    await(r, MARK_SEEN, r->world - 1);
    OK(mu_nccl_abort(r->nccl, soon(), err));
    CHECK(mu_cuda_wait(&r->cuda) == MU_OK);
    mu_pipeline_free(s->pipeline);
    rank_end(r);
    free(s);
}

static void test_a_stage_that_dies_ends_what_waits_for_it(void **state)
{
    (void)state;
    run_ranks(3, 1, lose_a_stage);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_blocks_between_stages_arrive_in_every_order_of_work),
        cmocka_unit_test(test_a_stage_that_dies_ends_what_waits_for_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
