/* How fast the coordinator's core alone joins, plans and assigns: N workers of one job, no network, no store.
 *
 *   bench_core [workers = 16384]
 *
 * Prints milliseconds per phase, bytes of core memory touched per worker, and the largest number of peers named in one
 * Assign; then what it costs each second to be observed: a report of each worker (with its account of time), and a
 * sample of the series, as percent of the core's thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "common/clock.h"
#include "coordinator/core/core.h"
#include "coordinator/series.h"

struct bench {
    struct mu_coord *coord;
    uint64_t assigns, gos, most_peers, persists, generation;
    uint64_t ticket;
    struct mu_plan plan;
    bool planned;
};

static void on_action(void *ctx, const struct mu_coord_action *action)
{
    struct bench *bench = ctx;
    switch (action->kind) {
    case MU_CA_SEND:
        if (action->send.message->kind == MU_CM_ASSIGN) {
            const struct mu_assign *assign = &action->send.message->assign;
            bench->assigns++;
            bench->generation = action->send.message->generation;
            if (assign->peer_count > bench->most_peers)
                bench->most_peers = assign->peer_count;
        }
        bench->gos += action->send.message->kind == MU_CM_GO;
        break;
    case MU_CA_PLAN:
        bench->ticket = action->plan.ticket;
        mu_plan_make(action->plan.input, &bench->plan);
        bench->planned = true;
        break;
    case MU_CA_PERSIST:
        bench->persists++;
        break;
    default:
        break;
    }
}

static void step(struct bench *bench, struct mu_coord_event *event)
{
    const struct mu_coord_sink sink = {.emit = on_action, .ctx = bench};
    event->now_us = mu_clock_mono_us();
    event->wall_us = mu_clock_wall_us();
    event->random = mu_id_random();
    mu_coord_step(bench->coord, event, &sink);
}

static void submit(struct bench *bench, uint32_t workers)
{
    struct mu_job_spec spec;
    mu_job_spec_init(&spec);
    strcpy(spec.name, "big");
    spec.model = (struct mu_model_config){
        .family = MU_FAMILY_GPT2, .layers = 2, .heads = 2, .channels = 64, .context = 64, .vocab = 256};
    strcpy(spec.data.path, "/data/text");
    spec.data.tokens = MU_TOKENS_BYTES;
    spec.batch.sequences = workers;
    spec.batch.micro = spec.batch.accumulate = 1;
    spec.batch.length = 64;
    spec.steps = 1000;
    spec.workers.min = spec.workers.max = workers;
    step(bench, &(struct mu_coord_event){.kind = MU_CE_SUBMIT, .submit = {.cookie = 1, .spec = &spec}});
    if (mu_coord_job_count(bench->coord) != 1) {
        fprintf(stderr, "bench_core: the job was refused\n");
        exit(1);
    }
}

static void send_status(struct bench *bench, uint32_t worker, enum mu_worker_phase phase)
{
    struct mu_worker_message message = {.kind = MU_WM_STATUS, .generation = bench->generation};
    message.status.phase = phase;
    message.status.generation = bench->generation;
    message.status.held.has_state = true;
    message.status.held.share_count = 1;
    message.status.held.shares[0] = (struct mu_held_share){.layout = bench->plan.layout, .rank = worker};
    step(bench,
         &(struct mu_coord_event){.kind = MU_CE_MESSAGE, .message = {.session = worker + 1, .message = &message}});
}

static void join(struct bench *bench, uint32_t worker, bool prepared)
{
    struct mu_worker_message message = {.kind = MU_WM_HELLO};
    struct mu_hello *hello = &message.hello;
    hello->protocol_version = MU_PROTOCOL_VERSION;
    hello->incarnation = (struct mu_id){.high = 7, .low = worker + 1};
    strcpy(hello->job, "big");
    snprintf(hello->host, sizeof hello->host, "host%u", worker / 8);
    snprintf(hello->address, sizeof hello->address, "host%u;tcp:10.0.%u.%u:4000", worker / 8, worker / 256,
             worker % 256);
    snprintf(hello->name, sizeof hello->name, "w%u", worker);
    hello->prepared_job = prepared;
    step(bench,
         &(struct mu_coord_event){.kind = MU_CE_MESSAGE, .message = {.session = worker + 1, .message = &message}});
}

static void report(struct bench *bench, uint32_t worker, uint64_t step_number)
{
    struct mu_worker_message message = {.kind = MU_WM_STEP, .generation = bench->generation};
    message.step = (struct mu_step_report){.steps_done = step_number,
                                           .result = {.step = step_number - 1, .loss = 1, .finite = true},
                                           .step_count = 1,
                                           .leaf_count = 1,
                                           .total_us = 1000000,
                                           .forward_us = 300000,
                                           .backward_us = 600000,
                                           .wait_us = 100000};
    step(bench,
         &(struct mu_coord_event){.kind = MU_CE_MESSAGE, .message = {.session = worker + 1, .message = &message}});
}

static enum mu_status take_row(void *ctx, const void *key, size_t key_bytes, const void *value, size_t value_bytes)
{
    (void)key, (void)value;
    *(size_t *)ctx += key_bytes + value_bytes;
    return MU_OK;
}

static double phase_ms(uint64_t *mark)
{
    uint64_t now = mu_clock_mono_us(), before = *mark;
    *mark = now;
    return (double)(now - before) * 1e-3;
}

int main(int argc, char **argv)
{
    uint32_t workers = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 16384;
    struct mu_coord_config config;
    mu_coord_config_init(&config);
    config.max_workers = config.max_members = workers;
    struct bench bench = {.plan = {.ranks = calloc(workers, sizeof(struct mu_plan_rank)),
                                   .leaf_counts = calloc(MU_COUNTED_REPLICAS_MAX, sizeof(uint32_t))}};
    struct rusage before;
    getrusage(RUSAGE_SELF, &before);
    uint64_t mark = mu_clock_mono_us();
    bench.coord = mu_coord_new(&config);
    const struct mu_coord_sink sink = {.emit = on_action, .ctx = &bench};
    mu_coord_start(bench.coord, mark, 0, &sink);
    submit(&bench, workers);
    phase_ms(&mark);
    for (uint32_t w = 0; w < workers; w++)
        join(&bench, w, false);
    for (uint32_t w = 0; w < workers; w++)
        join(&bench, w, true);
    double join_ms = phase_ms(&mark);
    step(&bench, &(struct mu_coord_event){.kind = MU_CE_TICK});
    double plan_ms = phase_ms(&mark);
    uint8_t secret[32] = {0};
    step(&bench, &(struct mu_coord_event){.kind = MU_CE_PLANNED,
                                          .planned = {.ticket = bench.ticket, .plan = &bench.plan, .secret = secret}});
    double assign_ms = phase_ms(&mark);
    for (uint32_t w = 0; w < workers; w++)
        send_status(&bench, w, MU_PHASE_PREPARED);
    double go_ms = phase_ms(&mark);
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    if (!bench.planned || bench.assigns != workers || bench.gos != workers) {
        fprintf(stderr, "bench_core: %llu of %u workers assigned, %llu told to go\n", (unsigned long long)bench.assigns,
                workers, (unsigned long long)bench.gos);
        return 1;
    }
    printf("workers  join ms  plan ms  assign ms  go ms  total ms  peers per Assign  KiB per worker\n");
    printf("%7u  %7.1f  %7.1f  %9.1f  %5.1f  %8.1f  %16llu  %14.1f\n", workers, join_ms, plan_ms, assign_ms, go_ms,
           join_ms + plan_ms + assign_ms, (unsigned long long)bench.most_peers,
           (double)(usage.ru_maxrss - before.ru_maxrss) / workers);
    struct mu_series *series = mu_series_new(config.max_jobs, workers);
    size_t written = 0;
    double report_ms = 0, sample_ms = 0;
    enum { SECONDS = 20 };
    for (uint64_t second = 1; series && second <= SECONDS; second++) {
        phase_ms(&mark);
        for (uint32_t w = 0; w < workers; w++)
            report(&bench, w, second);
        report_ms += phase_ms(&mark);
        mu_series_sample(series, bench.coord, NULL, mark + second * 1000000, mu_clock_wall_us() + second * 1000000,
                         take_row, &written);
        sample_ms += phase_ms(&mark);
    }
    printf("observed: reports %.2f ms a second, samples %.2f ms a second: %.2f %% of a thread, %zu bytes written in %d "
           "s\n",
           report_ms / SECONDS, sample_ms / SECONDS, (report_ms + sample_ms) / SECONDS / 10, written, SECONDS);
    mu_series_free(series);
    mu_coord_free(bench.coord);
    mu_plan_fini(&bench.plan);
    free(bench.plan.ranks);
    free(bench.plan.leaf_counts);
    return 0;
}
