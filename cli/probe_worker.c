#include "cli/probe_worker.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "kernels/arena.h"
#include "worker/comm.h"
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
    FLAT_BYTES = 12 + 28,  /* of an element: an addition, an update */
    PIECE_BYTES = 4 << 20, /* between two workers */
    PIECES = 24,
    PINGS = 400,
    DEADLINE_US = 30 * 1000000,
};

static const struct {
    uint32_t channels, micro, length;
} shapes[SHAPES] = {{128, 1, 64},  {128, 4, 64}, {128, 4, 256}, {256, 1, 64}, {256, 4, 64},
                    {256, 2, 256}, {512, 1, 64}, {512, 4, 64},  {512, 1, 256}};

struct crew {
    uint32_t workers, threads;
    pthread_mutex_t gate;
    bool begins;
    pthread_barrier_t barrier;
    struct mu_job_spec specs[SHAPES * SLICINGS];
    double seconds[MU_PROBE_WORKERS_MAX][SHAPES * SLICINGS]; /* median of a micro-batch */
    double flat_rate[MU_PROBE_WORKERS_MAX], link_rate[MU_PROBE_WORKERS_MAX], latency_s[MU_PROBE_WORKERS_MAX];
    char addresses[MU_PROBE_WORKERS_MAX][MU_COMM_ADDRESS_SIZE];
    struct mu_error errors[MU_PROBE_WORKERS_MAX];
};

/* One of the crew; what it owns stays until the end. A failure is kept and the rest is left out, but for the barriers,
 * at which the others wait. */
struct hand {
    struct crew *crew;
    uint32_t number;
    pthread_t thread;
    enum mu_status status;
    struct mu_pool *pool;
    struct mu_comm *comm;
};

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static struct mu_error *error_of(const struct hand *hand)
{
    return &hand->crew->errors[hand->number];
}

/* ---- micro-batches ---- */

static void make_spec(struct mu_job_spec *spec, uint32_t shape, uint32_t slices)
{
    mu_job_spec_init(spec);
    uint32_t channels = shapes[shape].channels;
    spec->model = (struct mu_model_config){.family = MU_FAMILY_GPT2,
                                           .layers = LAYERS,
                                           .heads = channels / 64,
                                           .channels = channels,
                                           .context = shapes[shape].length,
                                           .vocab = VOCAB,
                                           .slices = slices};
    mu_model_config_resolve(&spec->model);
    spec->batch.micro = spec->batch.sequences = shapes[shape].micro;
    spec->batch.length = shapes[shape].length;
    spec->batch.accumulate = 1;
}

static double median_micro(struct mu_model *model, const struct mu_micro_batch *batch, const float *params,
                           float *grads, enum mu_status *ret_status)
{
    double all[REPEATS_MAX], loss;
    uint32_t count = 0;
    *ret_status = mu_model_forward_backward(model, batch, params, grads, &loss); /* caches are cold */
    uint64_t begun_us = mu_clock_mono_us(), last_us = begun_us;
    while (*ret_status == MU_OK && count < REPEATS_MAX && (count < REPEATS_MIN || last_us - begun_us < SHAPE_US)) {
        *ret_status = mu_model_forward_backward(model, batch, params, grads, &loss);
        uint64_t now_us = mu_clock_mono_us();
        all[count++] = (double)(now_us - last_us) * 1e-6;
        last_us = now_us;
    }
    qsort(all, count, sizeof all[0], compare_doubles);
    return count ? all[count / 2] : 0;
}

static void time_micro(struct hand *hand, uint32_t sample)
{
    struct crew *crew = hand->crew;
    const struct mu_job_spec *spec = &crew->specs[sample];
    struct mu_model_spec model_spec;
    mu_model_spec_init(&model_spec, &spec->model);
    struct mu_model_options options = {
        .micro = spec->batch.micro, .length = spec->batch.length, .accumulate = 1, .recompute = MU_RECOMPUTE_NONE};
    size_t bytes = (size_t)model_spec.flat_size * sizeof(float),
           tokens = (size_t)spec->batch.micro * options.length + 1;
    struct mu_arena *arena = NULL;
    struct mu_model *model = NULL;
    if (hand->status == MU_OK)
        hand->status = mu_model_new(&model_spec, &options, hand->pool, error_of(hand), &model);
    if (hand->status == MU_OK)
        hand->status = mu_arena_new(2 * bytes + tokens * (sizeof(int32_t) + sizeof(uint64_t)) + 5 * MU_ARENA_ALIGN,
                                    error_of(hand), &arena);
    float *params = arena ? mu_arena_take(arena, bytes) : NULL, *grads = arena ? mu_arena_take(arena, bytes) : NULL;
    int32_t *text = arena ? mu_arena_take(arena, tokens * sizeof *text) : NULL;
    uint64_t *numbers = arena ? mu_arena_take(arena, tokens * sizeof *numbers) : NULL;
    if (arena)
        hand->status = mu_model_init_parameters(&model_spec, hand->pool, 1, NULL, 0, params);
    for (size_t i = 0; text && i < tokens; i++)
        text[i] = (int32_t)(i * 7919 % VOCAB);
    pthread_barrier_wait(&crew->barrier);
    if (hand->status == MU_OK) {
        struct mu_micro_batch batch = {
            .tokens = text, .targets = text + 1, .samples = numbers, .loss_divisor = tokens, .count = 1};
        crew->seconds[hand->number][sample] = median_micro(model, &batch, params, grads, &hand->status);
    }
    mu_model_free(model);
    mu_arena_free(arena);
}

/* ---- sums and updates ---- */

static void time_flat(struct hand *hand)
{
    enum { BUFFERS = 4 };
    size_t bytes = (size_t)FLAT_ELEMENTS * sizeof(float);
    struct mu_arena *arena = NULL;
    float *flat[BUFFERS] = {NULL};
    if (hand->status == MU_OK)
        hand->status = mu_arena_new(BUFFERS * (bytes + MU_ARENA_ALIGN), error_of(hand), &arena);
    for (int i = 0; arena && i < BUFFERS; i++)
        flat[i] = mu_arena_take(arena, bytes);
    const struct mu_adamw adamw = mu_adamw_at(1e-4, 0.9, 0.95, 1e-8, 0.1, 1.0, 1, 1);
    pthread_barrier_wait(&hand->crew->barrier);
    double best = 0;
    for (int i = 0; hand->status == MU_OK && i < FLAT_ROUNDS; i++) {
        uint64_t begun_us = mu_clock_mono_us();
        hand->status = mu_kernel_add(hand->pool, FLAT_ELEMENTS, flat[0], flat[1]);
        if (hand->status == MU_OK)
            hand->status = mu_kernel_adamw(hand->pool, &adamw, FLAT_ELEMENTS, flat[0], flat[2], flat[3], flat[1]);
        double rate = (double)FLAT_ELEMENTS * FLAT_BYTES / ((double)(mu_clock_mono_us() - begun_us) * 1e-6);
        best = rate > best ? rate : best;
    }
    hand->crew->flat_rate[hand->number] = best;
    mu_arena_free(arena);
}

/* ---- messages ---- */

/* With all others at once. */
static enum mu_status exchange(const struct hand *hand, struct mu_comm_group *group, uint64_t number,
                               const uint8_t *from, uint8_t *to, size_t bytes)
{
    struct mu_comm_request requests[2 * MU_PROBE_WORKERS_MAX];
    uint32_t workers = hand->crew->workers, count = 0;
    enum mu_status status = MU_OK;
    for (uint32_t i = 1; i < workers && status == MU_OK; i++)
        status = mu_comm_recv(group, (hand->number + i) % workers, number, to + (i - 1) * bytes, bytes,
                              &requests[count++], error_of(hand));
    for (uint32_t i = 1; i < workers && status == MU_OK; i++)
        status =
            mu_comm_send(group, (hand->number + i) % workers, number, from, bytes, &requests[count++], error_of(hand));
    return status == MU_OK ? mu_comm_wait_all(group, mu_clock_mono_us() + DEADLINE_US, error_of(hand)) : status;
}

static void time_messages(struct hand *hand, struct mu_comm_group *group)
{
    uint32_t others = hand->crew->workers - 1;
    uint8_t *from = malloc(PIECE_BYTES), *to = malloc((size_t)others * PIECE_BYTES);
    uint64_t number = 0, begun_us = mu_clock_mono_us();
    if (!from || !to)
        hand->status = mu_fail(error_of(hand), MU_ERR_NO_MEMORY, "no memory");
    else
        memset(from, 1, PIECE_BYTES);
    for (int i = 0; hand->status == MU_OK && i < PINGS; i++)
        hand->status = exchange(hand, group, ++number, from, to, 64);
    hand->crew->latency_s[hand->number] = (double)(mu_clock_mono_us() - begun_us) * 1e-6 / PINGS;
    for (int i = 0; hand->status == MU_OK && i < PIECES + 2; i++) {
        if (i == 2) /* the first ones also get the pages */
            begun_us = mu_clock_mono_us();
        hand->status = exchange(hand, group, ++number, from, to, PIECE_BYTES);
    }
    double seconds = (double)(mu_clock_mono_us() - begun_us) * 1e-6;
    hand->crew->link_rate[hand->number] = (double)PIECES * others * PIECE_BYTES / seconds;
    free(from);
    free(to);
}

static void connect_and_time(struct hand *hand)
{
    struct crew *crew = hand->crew;
    struct mu_comm_peer peers[MU_PROBE_WORKERS_MAX];
    struct mu_comm_group *group = NULL;
    size_t count = 0;
    if (hand->status == MU_OK)
        hand->status = mu_comm_new(&(struct mu_comm_config){.host_id = "probe"}, &hand->comm, error_of(hand));
    if (hand->status == MU_OK)
        snprintf(crew->addresses[hand->number], MU_COMM_ADDRESS_SIZE, "%s", mu_comm_address(hand->comm));
    pthread_barrier_wait(&crew->barrier);
    for (uint32_t i = 0; i < crew->workers; i++) {
        if (i != hand->number)
            peers[count++] =
                (struct mu_comm_peer){.rank = i, .incarnation = {.low = i + 1}, .address = crew->addresses[i]};
    }
    struct mu_comm_group_config config = {.generation = 1,
                                          .rank = hand->number,
                                          .world = crew->workers,
                                          .incarnation = {.low = hand->number + 1},
                                          .peers = peers,
                                          .peer_count = count,
                                          .secret = "probe"};
    uint64_t deadline_us = mu_clock_mono_us() + DEADLINE_US;
    if (hand->status == MU_OK)
        hand->status = mu_comm_open(hand->comm, &config, deadline_us, &group, error_of(hand));
    if (hand->status == MU_OK)
        hand->status = mu_comm_wait_ready(group, deadline_us, error_of(hand));
    if (hand->status == MU_OK)
        time_messages(hand, group);
}

/* ---- together ---- */

static void *work(void *arg)
{
    struct hand *hand = arg;
    pthread_mutex_lock(&hand->crew->gate);
    bool begins = hand->crew->begins;
    pthread_mutex_unlock(&hand->crew->gate);
    if (!begins)
        return NULL;
    hand->status = mu_pool_new(hand->crew->threads, error_of(hand), &hand->pool);
    for (uint32_t sample = 0; sample < SHAPES * SLICINGS; sample++)
        time_micro(hand, sample);
    time_flat(hand);
    if (hand->crew->workers > 1)
        connect_and_time(hand);
    pthread_barrier_wait(&hand->crew->barrier); /* nobody leaves while another still wants something */
    mu_comm_free(hand->comm);
    mu_pool_free(hand->pool);
    return NULL;
}

static double mean_of(const double *values, uint32_t count, size_t stride)
{
    double sum = 0;
    for (uint32_t i = 0; i < count; i++)
        sum += values[i * stride];
    return sum / count;
}

static void conclude(const struct crew *crew, struct mu_probed_worker *ret)
{
    struct mu_cost_sample samples[SHAPES * SLICINGS];
    struct mu_cost_rates *rates = &ret->rates;
    ret->workers = crew->workers;
    ret->samples = SHAPES * SLICINGS;
    mu_cost_rates_init(rates);
    rates->memory_bytes_per_second = mean_of(crew->flat_rate, crew->workers, 1);
    for (uint32_t i = 0; i < ret->samples; i++)
        samples[i] = (struct mu_cost_sample){
            .spec = &crew->specs[i],
            .seconds = mean_of(&crew->seconds[0][i], crew->workers, sizeof crew->seconds[0] / sizeof(double))};
    ret->apart = mu_cost_fit(rates, samples, ret->samples);
    if (crew->workers == 1)
        return;
    rates->link_bytes_per_second = mean_of(crew->link_rate, crew->workers, 1);
    rates->latency_s = mean_of(crew->latency_s, crew->workers, 1);
}

/* They begin when all are there; or none does. */
static enum mu_status start(struct crew *crew, struct hand *hands, struct mu_error *err)
{
    int reason = 0;
    uint32_t started = 0;
    pthread_mutex_lock(&crew->gate);
    for (; started < crew->workers && !reason; started += !reason) {
        hands[started] = (struct hand){.crew = crew, .number = started};
        reason = pthread_create(&hands[started].thread, NULL, work, &hands[started]);
    }
    crew->begins = !reason && (reason = pthread_barrier_init(&crew->barrier, NULL, crew->workers)) == 0;
    pthread_mutex_unlock(&crew->gate);
    for (uint32_t i = 0; i < started; i++)
        pthread_join(hands[i].thread, NULL);
    if (!crew->begins)
        return mu_fail_errno(err, reason, "no %u threads", crew->workers);
    pthread_barrier_destroy(&crew->barrier);
    return MU_OK;
}

enum mu_status mu_probe_worker(uint32_t workers, uint32_t threads, struct mu_probed_worker *ret, struct mu_error *err)
{
    struct hand hands[MU_PROBE_WORKERS_MAX];
    struct crew *crew = calloc(1, sizeof *crew);
    MU_ASSERT(workers >= 1 && workers <= MU_PROBE_WORKERS_MAX);
    if (!crew)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory");
    crew->workers = workers;
    crew->threads = threads;
    pthread_mutex_init(&crew->gate, NULL);
    for (uint32_t i = 0; i < SHAPES * SLICINGS; i++)
        make_spec(&crew->specs[i], i / SLICINGS, 1 + i % SLICINGS);
    enum mu_status status = start(crew, hands, err);
    for (uint32_t i = 0; i < workers && status == MU_OK; i++) {
        status = hands[i].status;
        if (status != MU_OK)
            *err = crew->errors[i];
    }
    if (status == MU_OK)
        conclude(crew, ret);
    pthread_mutex_destroy(&crew->gate);
    free(crew);
    return status;
}
