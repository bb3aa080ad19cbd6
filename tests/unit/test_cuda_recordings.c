/* links: mu_model mu_cuda_kernels_sim mu_kernels mu_plan */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "common/rng.h"
#include "cudasim/control.h"
#include "kernels/cuda/cuda.h"
#include "kernels/kernels.h"
#include "kernels/pool.h"
#include "tests/lib/sanitized.h"
#include "worker/model.h"

/* What an emulated GPU is given again and again, it takes as a whole, with the same results. */
enum { FLOATS = 100 };

struct gpu {
    struct mu_cuda cuda;
    struct mu_pool *pool;
    float *sum, *one; /* device */
    float host[FLOATS];
    uint32_t given; /* how often the operations were, one by one */
};

static float *numbers(struct gpu *gpu, float value)
{
    void *memory = NULL;
    struct mu_error err;
    assert_int_equal(mu_device_allocate(&gpu->cuda.base, MU_MEMORY_DEVICE, sizeof gpu->host, &err, &memory), MU_OK);
    for (size_t i = 0; i < FLOATS; i++)
        gpu->host[i] = value;
    assert_int_equal(mu_device_copy(&gpu->cuda.base, memory, gpu->host, sizeof gpu->host), MU_OK);
    return memory;
}

static int begin(void **state)
{
    static struct gpu gpu;
    struct mu_error err;
    memset(&gpu, 0, sizeof gpu);
    assert_int_equal(mu_cuda_init(&gpu.cuda, 0, MU_DTYPE_FP32, 1 << 20, &err), MU_OK);
    assert_int_equal(mu_pool_new(1, &err, &gpu.pool), MU_OK);
    mu_pool_bind(gpu.pool, &gpu.cuda.base);
    gpu.sum = numbers(&gpu, 0);
    gpu.one = numbers(&gpu, 1);
    *state = &gpu;
    return 0;
}

static int end(void **state)
{
    struct gpu *gpu = *state;
    cudasim_fail_none();
    mu_device_release(&gpu->cuda.base, MU_MEMORY_DEVICE, gpu->sum, sizeof gpu->host);
    mu_device_release(&gpu->cuda.base, MU_MEMORY_DEVICE, gpu->one, sizeof gpu->host);
    mu_pool_free(gpu->pool);
    mu_cuda_fini(&gpu->cuda);
    return 0;
}

/* sum += `times`, one by one inside; stops in the middle with `status`. */
static enum mu_status add(struct gpu *gpu, uint64_t times, enum mu_status stop)
{
    struct mu_device *device = &gpu->cuda.base;
    const struct mu_device_key key = {.arrays = {gpu->sum, gpu->one}, .numbers = {times}};
    enum mu_status status = MU_OK;
    if (mu_device_replay(device, &key))
        return MU_OK;
    do {
        gpu->given++;
        for (uint64_t i = 0; i < times && status == MU_OK; i++)
            status = i == 1 && stop != MU_OK ? stop : mu_kernel_add(gpu->pool, FLOATS, gpu->sum, gpu->one);
    } while (mu_device_record_end(device, &status));
    return status;
}

static void expect(struct gpu *gpu, float value, uint32_t given, uint64_t replays)
{
    assert_int_equal(mu_pool_wait(gpu->pool), MU_OK);
    assert_int_equal(mu_device_move(&gpu->cuda.base, gpu->host, gpu->sum, sizeof gpu->host), MU_OK);
    for (size_t i = 0; i < FLOATS; i++)
        assert_true(gpu->host[i] == value);
    assert_int_equal(gpu->given, given);
    assert_int_equal(mu_cuda_replays(&gpu->cuda), replays);
}

static void test_the_third_time_comes_from_the_recording(void **state)
{
    struct gpu *gpu = *state;
    for (uint32_t i = 0; i < 5; i++) {
        assert_int_equal(add(gpu, 3, MU_OK), MU_OK);
        assert_int_equal(add(gpu, 2, MU_OK), MU_OK); /* another one */
    }
    expect(gpu, 25, 4, 8);
    mu_device_forget(&gpu->cuda.base);
    assert_int_equal(add(gpu, 3, MU_OK), MU_OK);
    expect(gpu, 28, 5, 8);
    mu_device_set_recording(&gpu->cuda.base, false);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(add(gpu, 3, MU_OK), MU_OK);
    expect(gpu, 37, 8, 8);
}

/* Forgotten while they wait to run. */
static void test_recordings_that_are_under_way_run_to_their_end(void **state)
{
    struct gpu *gpu = *state;
    for (uint32_t i = 0; i < 40; i++)
        assert_int_equal(add(gpu, 5, MU_OK), MU_OK);
    mu_device_forget(&gpu->cuda.base);
    expect(gpu, 200, 2, 39);
}

static void test_what_stops_in_the_middle_of_a_recording_counts_for_nothing(void **state)
{
    struct gpu *gpu = *state;
    assert_int_equal(add(gpu, 4, MU_OK), MU_OK);
    assert_int_equal(add(gpu, 4, MU_ERR_CANCELLED), MU_ERR_CANCELLED); /* while it is recorded */
    expect(gpu, 4, 2, 0);
    assert_int_equal(add(gpu, 4, MU_OK), MU_OK); /* recorded now */
    assert_int_equal(add(gpu, 4, MU_OK), MU_OK);
    expect(gpu, 12, 3, 2);
}

static void test_a_gpu_that_cannot_record_goes_on_without(void **state)
{
    struct gpu *gpu = *state;
    static const char *const calls[] = {"cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate"};
    float sum = 0;
    for (size_t k = 0; k < sizeof calls / sizeof calls[0]; k++) {
        uint32_t again = k > 0; /* then it was given once for the recording, and is given once more */
        gpu->given = 0;
        mu_device_forget(&gpu->cuda.base);
        mu_device_set_recording(&gpu->cuda.base, true);
        cudasim_fail(calls[k], 1, 0);
        for (uint32_t i = 0; i < 4; i++)
            assert_int_equal(add(gpu, 3, MU_OK), MU_OK);
        expect(gpu, sum += 12, 4 + again, 0);
    }
    assert_null(mu_device_trouble(&gpu->cuda.base));
}

static void test_a_recording_that_fails_fails_the_gpu(void **state)
{
    struct gpu *gpu = *state;
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(add(gpu, 3, MU_OK), MU_OK);
    cudasim_fail("cudaGraphLaunch", 1, 0);
    assert_int_equal(add(gpu, 3, MU_OK), MU_OK);
    assert_non_null(mu_device_trouble(&gpu->cuda.base));
    assert_non_null(strstr(mu_device_trouble(&gpu->cuda.base), "recorded kernels"));
}

/* ---- a whole model ---- */

enum { MICRO = 2, LENGTH = 8, MICROS = 3, STEPS = 3 };

struct net {
    struct mu_pool *pool;
    struct mu_model *model;
    float *params, *grads; /* of the device */
    double losses[STEPS * MICROS];
    uint32_t loss_count;
};

static void net_new(struct net *net, const struct mu_model_spec *spec, struct mu_pool *pool)
{
    struct mu_error err;
    void *memory[2];
    const struct mu_model_options options = {.micro = MICRO, .length = LENGTH, .accumulate = MICROS};
    *net = (struct net){.pool = pool};
    assert_int_equal(mu_model_new(spec, &options, pool, &err, &net->model), MU_OK);
    for (size_t i = 0; i < 2; i++)
        assert_int_equal(mu_device_allocate(mu_pool_device(pool), MU_MEMORY_DEVICE, spec->flat_size * sizeof(float),
                                            &err, &memory[i]),
                         MU_OK);
    net->params = memory[0];
    net->grads = memory[1];
    assert_int_equal(mu_model_init_parameters(spec, pool, 7, NULL, 0, net->params), MU_OK);
}

static void net_free(struct net *net, const struct mu_model_spec *spec)
{
    mu_model_free(net->model);
    mu_device_release(mu_pool_device(net->pool), MU_MEMORY_DEVICE, net->params, spec->flat_size * sizeof(float));
    mu_device_release(mu_pool_device(net->pool), MU_MEMORY_DEVICE, net->grads, spec->flat_size * sizeof(float));
}

/* Leaves of several micro-batches: gradients of the last one are in net->grads. */
static void run_leaves(struct net *net, const struct mu_model_spec *spec)
{
    int32_t tokens[MICRO * LENGTH], targets[MICRO * LENGTH];
    uint64_t samples[MICRO] = {0}, seed = 5;
    for (uint32_t i = 0; i < STEPS * MICROS; i++) {
        for (uint32_t k = 0; k < MICRO * LENGTH; k++) {
            tokens[k] = (int32_t)(mu_splitmix64(&seed) % spec->config.vocab);
            targets[k] = (int32_t)(mu_splitmix64(&seed) % spec->config.vocab);
        }
        struct mu_micro_batch batch = {.tokens = tokens,
                                       .targets = targets,
                                       .samples = samples,
                                       .step = i / MICROS,
                                       .loss_divisor = 100,
                                       .index = i % MICROS,
                                       .count = MICROS};
        assert_int_equal(
            mu_model_forward_backward(net->model, &batch, net->params, net->grads, &net->losses[net->loss_count++]),
            MU_OK);
    }
}

static void check_model(struct gpu *gpu, const struct mu_model_config *config, bool replayed)
{
    struct mu_model_spec spec;
    struct mu_pool *cpu;
    struct mu_error err;
    struct net on_cpu, on_gpu;
    mu_model_spec_init(&spec, config);
    assert_int_equal(mu_pool_new(1, &err, &cpu), MU_OK);
    net_new(&on_cpu, &spec, cpu);
    net_new(&on_gpu, &spec, gpu->pool);
    run_leaves(&on_cpu, &spec);
    uint64_t before = mu_cuda_replays(&gpu->cuda);
    run_leaves(&on_gpu, &spec);
    /* Forward and head have one recording, each layer one for each place in a leaf (first, middle, last): all but the
     * first time comes from them. */
    uint64_t times = STEPS * MICROS;
    uint64_t expected = 2 * times - 1 - (uint64_t)3 + config->layers * (times - 3);
    assert_int_equal(mu_cuda_replays(&gpu->cuda) - before, replayed ? expected : 0);
    assert_memory_equal(on_cpu.losses, on_gpu.losses, sizeof on_cpu.losses);
    float *host = malloc(spec.flat_size * sizeof *host);
    assert_non_null(host);
    assert_int_equal(mu_pool_wait(gpu->pool), MU_OK);
    assert_int_equal(mu_device_move(&gpu->cuda.base, host, on_gpu.grads, spec.flat_size * sizeof *host), MU_OK);
    for (uint32_t i = 0; i < spec.cell_count; i++) {
        struct mu_cell cell = mu_model_cell(&spec, i);
        assert_memory_equal(host + cell.offset, on_cpu.grads + cell.offset, cell.size * sizeof *host);
    }
    free(host);
    net_free(&on_gpu, &spec);
    net_free(&on_cpu, &spec);
    mu_pool_free(cpu);
}

static void test_a_model_is_replayed_with_the_bits_of_the_cpu(void **state)
{
    struct gpu *gpu = *state;
    struct mu_model_config gpt2 = {
        .family = MU_FAMILY_GPT2, .layers = 2, .heads = 2, .channels = 16, .context = 8, .vocab = 65, .slices = 2};
    const struct mu_model_config llama = {.family = MU_FAMILY_LLAMA,
                                          .layers = 3,
                                          .heads = 2,
                                          .kv_heads = 1,
                                          .channels = 16,
                                          .hidden = 24,
                                          .context = 8,
                                          .vocab = 65};
    check_model(gpu, &gpt2, true);
    check_model(gpu, &llama, true);
    gpt2.dropout = 0.1f;
    check_model(gpu, &gpt2, false); /* each time it is another one */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_the_third_time_comes_from_the_recording, begin, end),
        cmocka_unit_test_setup_teardown(test_recordings_that_are_under_way_run_to_their_end, begin, end),
        cmocka_unit_test_setup_teardown(test_what_stops_in_the_middle_of_a_recording_counts_for_nothing, begin, end),
        cmocka_unit_test_setup_teardown(test_a_gpu_that_cannot_record_goes_on_without, begin, end),
        cmocka_unit_test_setup_teardown(test_a_recording_that_fails_fails_the_gpu, begin, end),
        cmocka_unit_test_setup_teardown(test_a_model_is_replayed_with_the_bits_of_the_cpu, begin, end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
