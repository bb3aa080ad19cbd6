/* links: mu_engine mu_cuda_kernels_sim mu_storage mu_plan */
#define MU_TEST_CUDA 1
#include "engine_testing.h"

#include "worker/model.h"

/* The engine on an emulated GPU: whatever the layout, changes and aborts, the bits are those of one worker that
 * computes on the CPU. The files test_engine*.c run on the GPU as a whole in targets of their own (see CMakeLists.txt).
 */

enum { STEPS = 4, LEAVES = 4 };

static const struct mu_model_config gpt2 = {.family = MU_FAMILY_GPT2,
                                            .layers = 2,
                                            .heads = 2,
                                            .channels = 16,
                                            .context = 16,
                                            .vocab = 259,
                                            .dropout = 0.1f,
                                            .slices = 2};
static const struct mu_model_config llama = {.family = MU_FAMILY_LLAMA,
                                             .layers = 2,
                                             .heads = 4,
                                             .kv_heads = 2,
                                             .channels = 16,
                                             .hidden = 24,
                                             .context = 16,
                                             .vocab = 258,
                                             .slices = 2};

struct reference {
    uint8_t sha[32];
    double loss[STEPS], eval;
};

static struct reference of_gpt2, of_llama;

static struct fleet *fleet_for(const struct mu_model_config *model)
{
    struct fleet *fleet = fleet_of(model);
    struct mu_job_spec *spec = &fleet->spec;
    struct mu_error err;
    spec->batch.length = 8;
    spec->batch.sequences = LEAVES * 2;
    spec->steps = STEPS;
    spec->eval.every = STEPS;
    spec->eval.sequences = 3;
    if (mu_job_spec_check(spec, &err) != MU_OK)
        fail_msg("%s", err.text);
    return fleet;
}

static void make_reference(const struct mu_model_config *model, struct reference *out)
{
    struct fleet *fleet = fleet_for(model);
    worker_start_on_cpu(fleet);
    start(fleet, 1);
    assert_int_equal(wait_parked(fleet, out->sha), MU_PARK_FINISHED);
    memcpy(out->loss, fleet->loss, sizeof out->loss);
    out->eval = fleet->eval_loss[STEPS];
    assert_true(out->loss[0] > out->loss[STEPS - 1]);
    fleet_free(fleet);
}

static int setup_references(void **state)
{
    (void)state;
    make_reference(&gpt2, &of_gpt2);
    make_reference(&llama, &of_llama);
    return 0;
}

static void check_finished(struct fleet *fleet, const struct reference *reference)
{
    uint8_t sha[32];
    assert_int_equal(wait_parked(fleet, sha), MU_PARK_FINISHED);
    for (uint32_t step = 0; step < STEPS; step++)
        assert_true(fleet->loss[step] == 0 || fleet->loss[step] == reference->loss[step]);
    assert_true(fleet->eval_loss[STEPS] == reference->eval);
    assert_memory_equal(sha, reference->sha, 32);
}

static uint32_t start_workers(struct fleet *fleet, uint32_t count)
{
    while (fleet->count < count)
        worker_start(fleet);
    return (1u << count) - 1;
}

static void run_layout(const struct mu_model_config *model, uint32_t tp, uint32_t pp, uint32_t dp, bool sharded,
                       enum mu_recompute recompute)
{
    struct fleet *fleet = fleet_for(model);
    fleet->spec.parallel.optimizer_sharding = sharded;
    fleet->spec.parallel.recompute = recompute;
    want_layout(fleet, tp, pp, dp, 0);
    start(fleet, start_workers(fleet, tp * pp * dp));
    check_finished(fleet, model == &gpt2 ? &of_gpt2 : &of_llama);
    fleet_free(fleet);
}

static void test_engine_cuda_layouts_have_the_bits_of_the_cpu(void **state)
{
    (void)state;
    run_layout(&gpt2, 1, 1, 3, true, MU_RECOMPUTE_NONE);
    run_layout(&llama, 2, 1, 1, false, MU_RECOMPUTE_FULL);
    if (SANITIZED)
        return;
    run_layout(&gpt2, 1, 1, 1, false, MU_RECOMPUTE_NONE);
    run_layout(&gpt2, 2, 2, 1, false, MU_RECOMPUTE_SELECTIVE);
    run_layout(&llama, 1, 1, 2, false, MU_RECOMPUTE_NONE);
    run_layout(&llama, 1, 2, 2, true, MU_RECOMPUTE_NONE);
}

/* Steps until `stop` in the wanted layout. */
static void run_until(struct fleet *fleet, uint32_t members, uint64_t stop)
{
    assign(fleet, members);
    for (uint32_t rank = 0; rank < fleet->world; rank++)
        assert_int_equal(
            next_event(&fleet->workers[fleet->ranks[rank]], 1u << MU_WE_PREPARED | 1u << MU_WE_PARKED)->kind,
            MU_WE_PREPARED);
    pthread_mutex_lock(&fleet->lock);
    fleet->command = (struct command){.number = fleet->command.number + 1, .not_before_step = stop, .park = true};
    pthread_mutex_unlock(&fleet->lock);
    for (uint32_t rank = 0; rank < fleet->world; rank++)
        assert_int_equal(mu_engine_run(fleet->workers[fleet->ranks[rank]].engine, fleet->generation), MU_OK);
    assert_int_equal(wait_parked(fleet, NULL), MU_PARK_COMMAND);
}

/* State goes from GPU to GPU, and from one worker's CPU to the others' GPUs. */
static void test_engine_cuda_changes_of_layout_have_the_bits_of_the_cpu(void **state)
{
    (void)state;
    struct fleet *fleet = fleet_for(&gpt2);
    fleet->spec.parallel.optimizer_sharding = true;
    worker_start_on_cpu(fleet);
    uint32_t all = start_workers(fleet, 4);
    want_layout(fleet, 1, 1, 4, 0);
    run_until(fleet, all, 1);
    want_layout(fleet, 2, 1, 1, 0);
    run_until(fleet, all & ~1u, 2);
    want_layout(fleet, 1, 2, 2, 0);
    run_until(fleet, all, 3);
    want_layout(fleet, 2, 2, 1, 0);
    start(fleet, all);
    check_finished(fleet, &of_gpt2);
    fleet_free(fleet);
}

/* Everything is revoked at some instant, and begun again in another layout. */
static void test_engine_cuda_aborts_have_the_bits_of_the_cpu(void **state)
{
    (void)state;
    static const enum trigger_point points[] = {TRIGGER_LEAF, TRIGGER_VOTE, TRIGGER_APPLIED};
    for (uint32_t i = SANITIZED; i < sizeof points / sizeof points[0]; i++) {
        struct fleet *fleet = fleet_for(&gpt2);
        fleet->spec.parallel.optimizer_sharding = i % 2;
        uint32_t all = start_workers(fleet, 2);
        want_layout(fleet, 1, 1, 2, 0);
        set_trigger(fleet, points[i], 1, 2);
        start(fleet, all);
        wait_revoked(fleet);
        set_trigger(fleet, TRIGGER_NONE, 0, 0);
        want_layout(fleet, i == 0 ? 2 : 1, i == 0 ? 1 : 2, 1, 0);
        start(fleet, all);
        check_finished(fleet, &of_gpt2);
        fleet_free(fleet);
    }
}

/* A GPU that is too small for the micro-batches says which would fit, in one line. */
static void test_engine_cuda_out_of_memory_says_what_would_fit(void **state)
{
    (void)state;
    struct mu_model_config wide = gpt2;
    struct mu_error err;
    wide.channels = 64;
    struct fleet *fleet = fleet_for(&wide);
    struct worker *worker = &fleet->workers[fleet->count++];
    *worker = (struct worker){.fleet = fleet, .incarnation = mu_id_random()};
    worker->events = calloc(EVENTS_MAX, sizeof *worker->events);
    assert_non_null(worker->events);
    assert_int_equal(mu_device_open_cuda(0, 1 << 20, &err, &worker->device), MU_OK);
    struct mu_engine_config config = {
        .threads = 1,
        .host_id = "host",
        .device = worker->device,
        .callbacks = {.ctx = worker, .post = on_post, .vote = on_vote, .boundary = on_boundary}};
    assert_int_equal(mu_engine_new(&config, &worker->engine, &err), MU_OK);
    fleet->spec.batch.micro = MU_MICRO_SEQUENCES_MAX;
    fleet->spec.batch.length = 16;
    fleet->spec.batch.sequences = 2 * MU_MICRO_SEQUENCES_MAX;
    fleet->spec.eval.every = 0;
    fleet->spec.parallel.tp = fleet->spec.parallel.pp = 1; /* else it could get a part */
    assert_int_equal(mu_engine_load(worker->engine, &fleet->spec, (struct mu_id){1, 1}), MU_OK);
    const struct mu_worker_event *event = next_event(worker, 1u << MU_WE_JOB_LOADED);
    assert_int_equal(event->job_loaded.status, MU_ERR_NO_MEMORY);
    const char *fragments[] = {"activations: ", "MiB are free on cuda:0", "batch.micro: ", "parallel.recompute: "};
    for (uint32_t i = 0; i < sizeof fragments / sizeof fragments[0]; i++)
        if (!strstr(worker->text, fragments[i]))
            fail_msg("'%s' is missing: %s", fragments[i], worker->text);
    print_message("%s\n", worker->text);
    fleet_free(fleet);
}

int main(void)
{
    setenv("CUDASIM_DELAY_US", "100", 0);
    setenv("CUDASIM_DEVICES", "1:Emulated GPU:9.0:512:4", 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_engine_cuda_layouts_have_the_bits_of_the_cpu),
        cmocka_unit_test(test_engine_cuda_changes_of_layout_have_the_bits_of_the_cpu),
        cmocka_unit_test(test_engine_cuda_aborts_have_the_bits_of_the_cpu),
        cmocka_unit_test(test_engine_cuda_out_of_memory_says_what_would_fit),
    };
    return cmocka_run_group_tests(tests, setup_references, NULL);
}
