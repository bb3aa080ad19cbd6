#include "cli/probe_worker.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "worker/comm.h"
#include "worker/measure.h"

enum {
    PIECE_BYTES = 4 << 20, /* between two workers */
    PIECES = 24,
    PINGS = 400,
    DEADLINE_US = 30 * 1000000,
};

struct crew {
    uint32_t workers, threads;
    pthread_mutex_t gate;
    bool begins;
    pthread_barrier_t barrier;
    struct mu_measured_model measured[MU_PROBE_WORKERS_MAX];
    double link_rate[MU_PROBE_WORKERS_MAX], latency_s[MU_PROBE_WORKERS_MAX];
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
    struct mu_comm *comm;
};

static struct mu_error *error_of(const struct hand *hand)
{
    return &hand->crew->errors[hand->number];
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

static void meet(void *barrier)
{
    pthread_barrier_wait(barrier);
}

static void *work(void *arg)
{
    struct hand *hand = arg;
    pthread_mutex_lock(&hand->crew->gate);
    bool begins = hand->crew->begins;
    pthread_mutex_unlock(&hand->crew->gate);
    if (!begins)
        return NULL;
    struct mu_measure measure = {.deadline_us = UINT64_MAX};
    hand->status = mu_pool_new(hand->crew->threads, error_of(hand), &measure.pool);
    if (hand->status == MU_OK)
        hand->status =
            mu_measure_model(&measure, meet, &hand->crew->barrier, &hand->crew->measured[hand->number], error_of(hand));
    else
        for (int i = 0; i <= MU_MEASURE_SAMPLES; i++)
            meet(&hand->crew->barrier);
    if (hand->crew->workers > 1)
        connect_and_time(hand);
    pthread_barrier_wait(&hand->crew->barrier); /* nobody leaves while another still wants something */
    mu_comm_free(hand->comm);
    mu_pool_free(measure.pool);
    return NULL;
}

static double mean_of(const double *values, uint32_t count)
{
    double sum = 0;
    for (uint32_t i = 0; i < count; i++)
        sum += values[i];
    return sum / count;
}

/* Of all of the crew. */
static void conclude(const struct crew *crew, struct mu_probed_worker *ret)
{
    struct mu_measured_model mean = {.flat_rate = 0};
    for (uint32_t i = 0; i < crew->workers; i++) {
        mean.flat_rate += crew->measured[i].flat_rate / crew->workers;
        for (int k = 0; k < MU_MEASURE_SAMPLES; k++)
            mean.seconds[k] += crew->measured[i].seconds[k] / crew->workers;
    }
    ret->workers = crew->workers;
    ret->samples = MU_MEASURE_SAMPLES;
    ret->apart = mu_measured_rates(&mean, &ret->rates);
    if (crew->workers == 1)
        return;
    ret->rates.link_bytes_per_second = mean_of(crew->link_rate, crew->workers);
    ret->rates.latency_s = mean_of(crew->latency_s, crew->workers);
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
