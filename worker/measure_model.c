#include <stdlib.h>

#include "common/clock.h"
#include "kernels/arena.h"
#include "kernels/kernels.h"
#include "worker/measure.h"
#include "worker/model.h"

enum {
    LAYERS = 2,
    VOCAB = 256,
    SHAPES = 9,
    SLICINGS = 2,      /* one slice and two */
    SHAPE_US = 150000, /* measured for so long, and at least REPEATS_MIN times */
    REPEATS_MIN = 3,
    REPEATS_MAX = 400,
    FLAT_ELEMENTS = 4 << 20, /* of the flat ranges that are added and updated */
    FLAT_ROUNDS = 8,
    FLAT_BUFFERS = 4,
    FLAT_BYTES = 12 + 28, /* of an element: an addition, an update */
};

_Static_assert(SHAPES *SLICINGS == MU_MEASURE_SAMPLES, "samples");

static const struct {
    uint32_t channels, micro, length;
} shapes[SHAPES] = {{128, 1, 64},  {128, 4, 64}, {128, 4, 256}, {256, 1, 64}, {256, 4, 64},
                    {256, 2, 256}, {512, 1, 64}, {512, 4, 64},  {512, 1, 256}};

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* ---- micro-batches ---- */

static void make_spec(struct mu_job_spec *spec, uint32_t sample)
{
    uint32_t shape = sample / SLICINGS, channels = shapes[shape].channels;
    mu_job_spec_init(spec);
    spec->model = (struct mu_model_config){.family = MU_FAMILY_GPT2,
                                           .layers = LAYERS,
                                           .heads = channels / 64,
                                           .channels = channels,
                                           .context = shapes[shape].length,
                                           .vocab = VOCAB,
                                           .slices = 1 + sample % SLICINGS};
    mu_model_config_resolve(&spec->model);
    spec->batch.micro = spec->batch.sequences = shapes[shape].micro;
    spec->batch.length = shapes[shape].length;
    spec->batch.accumulate = 1;
}

/* A model of one shape with all that a micro-batch of it needs. */
struct net {
    struct mu_job_spec spec;
    struct mu_model_spec layout;
    struct mu_model *model;
    struct mu_arena *state, *batch; /* on the device; on the host */
    float *params, *grads;
    struct mu_micro_batch micro;
};

static void net_fini(struct net *net)
{
    mu_model_free(net->model);
    mu_arena_free(net->state);
    mu_arena_free(net->batch);
}

static enum mu_status net_init(struct net *net, const struct mu_measure *m, uint32_t sample, struct mu_error *err)
{
    *net = (struct net){.model = NULL};
    make_spec(&net->spec, sample);
    mu_model_spec_init(&net->layout, &net->spec.model);
    struct mu_model_options options = {.micro = net->spec.batch.micro,
                                       .length = net->spec.batch.length,
                                       .accumulate = 1,
                                       .recompute = MU_RECOMPUTE_NONE};
    size_t bytes = (size_t)net->layout.flat_size * sizeof(float);
    size_t tokens = (size_t)options.micro * options.length + 1;
    enum mu_status status = mu_model_new(&net->layout, &options, m->pool, err, &net->model);
    if (status == MU_OK)
        status = mu_arena_new_on(mu_pool_device(m->pool), MU_MEMORY_DEVICE, 2 * mu_arena_piece_bytes(bytes), err,
                                 &net->state);
    if (status == MU_OK)
        status = mu_arena_new(tokens * (sizeof(int32_t) + sizeof(uint64_t)) + 2 * MU_ARENA_ALIGN, err, &net->batch);
    if (status != MU_OK)
        return status;
    net->params = mu_arena_take(net->state, bytes);
    net->grads = mu_arena_take(net->state, bytes);
    int32_t *text = mu_arena_take(net->batch, tokens * sizeof *text);
    uint64_t *numbers = mu_arena_take(net->batch, tokens * sizeof *numbers);
    for (size_t i = 0; i < tokens; i++)
        text[i] = (int32_t)(i * 7919 % VOCAB);
    net->micro = (struct mu_micro_batch){
        .tokens = text, .targets = text + 1, .samples = numbers, .loss_divisor = tokens, .count = 1};
    return mu_model_init_parameters(&net->layout, m->pool, 1, NULL, 0, net->params);
}

static enum mu_status run_once(const struct mu_measure *m, const struct net *net)
{
    double loss;
    enum mu_status status = mu_model_forward_backward(net->model, &net->micro, net->params, net->grads, &loss);
    return status == MU_OK ? mu_pool_wait(m->pool) : status;
}

static enum mu_status median_micro(const struct mu_measure *m, const struct net *net, double *ret_seconds,
                                   struct mu_error *err)
{
    double all[REPEATS_MAX];
    uint32_t count = 0;
    enum mu_status status = run_once(m, net); /* caches are cold */
    uint64_t begun_us = mu_clock_mono_us(), last_us = begun_us;
    while (status == MU_OK && count < REPEATS_MAX && (count < REPEATS_MIN || last_us - begun_us < SHAPE_US)) {
        status = run_once(m, net);
        uint64_t now_us = mu_clock_mono_us();
        all[count++] = (double)(now_us - last_us) * 1e-6;
        last_us = now_us;
    }
    if (status != MU_OK)
        return mu_fail(err, status, "micro-batches: %s", mu_status_name(status));
    qsort(all, count, sizeof all[0], compare_doubles);
    *ret_seconds = all[count / 2];
    return MU_OK;
}

/* ---- sums and updates ---- */

static enum mu_status time_flat(const struct mu_measure *m, float *const flat[FLAT_BUFFERS], double *ret_rate,
                                struct mu_error *err)
{
    const struct mu_adamw adamw = mu_adamw_at(1e-4, 0.9, 0.95, 1e-8, 0.1, 1.0, 1, 1);
    enum mu_status status = MU_OK;
    double best = 0;
    for (int i = 0; status == MU_OK && i < FLAT_ROUNDS; i++) {
        uint64_t begun_us = mu_clock_mono_us();
        status = mu_kernel_add(m->pool, FLAT_ELEMENTS, flat[0], flat[1]);
        if (status == MU_OK)
            status = mu_kernel_adamw(m->pool, &adamw, FLAT_ELEMENTS, flat[0], flat[2], flat[3], flat[1]);
        if (status == MU_OK)
            status = mu_pool_wait(m->pool);
        double rate = (double)FLAT_ELEMENTS * FLAT_BYTES / ((double)(mu_clock_mono_us() - begun_us + 1) * 1e-6);
        best = rate > best ? rate : best;
    }
    *ret_rate = best;
    return status == MU_OK ? MU_OK : mu_fail(err, status, "sums and updates: %s", mu_status_name(status));
}

/* ---- all ---- */

static void meet_others(void (*meet)(void *ctx), void *ctx)
{
    if (meet)
        meet(ctx);
}

enum mu_status mu_measure_model(const struct mu_measure *m, void (*meet)(void *ctx), void *meet_ctx,
                                struct mu_measured_model *out, struct mu_error *err)
{
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; i < MU_MEASURE_SAMPLES; i++) {
        struct net net = {.model = NULL};
        if (status == MU_OK)
            status = mu_measure_goes_on(m, err);
        if (status == MU_OK)
            status = net_init(&net, m, i, err);
        meet_others(meet, meet_ctx);
        if (status == MU_OK)
            status = median_micro(m, &net, &out->seconds[i], err);
        net_fini(&net);
    }
    size_t bytes = (size_t)FLAT_ELEMENTS * sizeof(float);
    struct mu_arena *arena = NULL;
    float *flat[FLAT_BUFFERS];
    if (status == MU_OK)
        status = mu_arena_new_on(mu_pool_device(m->pool), MU_MEMORY_DEVICE, FLAT_BUFFERS * mu_arena_piece_bytes(bytes),
                                 err, &arena);
    for (int i = 0; arena && i < FLAT_BUFFERS; i++)
        flat[i] = mu_arena_take(arena, bytes);
    meet_others(meet, meet_ctx);
    if (status == MU_OK)
        status = time_flat(m, flat, &out->flat_rate, err);
    mu_arena_free(arena);
    return status;
}

double mu_measured_rates(const struct mu_measured_model *measured, struct mu_cost_rates *ret_rates)
{
    struct mu_job_spec *specs = calloc(MU_MEASURE_SAMPLES, sizeof *specs);
    struct mu_cost_sample samples[MU_MEASURE_SAMPLES];
    MU_ASSERT(specs);
    mu_cost_rates_init(ret_rates);
    ret_rates->memory_bytes_per_second = measured->flat_rate;
    for (uint32_t i = 0; i < MU_MEASURE_SAMPLES; i++) {
        make_spec(&specs[i], i);
        samples[i] = (struct mu_cost_sample){.spec = &specs[i], .seconds = measured->seconds[i]};
    }
    double apart = mu_cost_fit(ret_rates, samples, MU_MEASURE_SAMPLES);
    free(specs);
    return apart;
}
