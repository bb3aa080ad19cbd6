#include "coordinator/metrics.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static const char *const worker_states[MU_WS_STATE_COUNT] = {"attaching", "spare",    "member",
                                                             "suspect",   "draining", "lost"};
static const char *const job_states[MU_JOB_STATE_COUNT] = {"pending", "running", "finished", "failed", "cancelled"};

/* ---- one number of each job ---- */

struct job_metric {
    const char *name, *type, *help;
    double (*value)(const struct mu_job_view *view);
};

static double state_generation(const struct mu_job_view *v)
{
    return (double)v->generation;
}
static double state_world(const struct mu_job_view *v)
{
    return v->world;
}
static double state_attached(const struct mu_job_view *v)
{
    return v->attached;
}
static double state_spares(const struct mu_job_view *v)
{
    return v->spares;
}
static double state_workers_max(const struct mu_job_view *v)
{
    return v->record.spec.workers.max;
}
static double state_steps(const struct mu_job_view *v)
{
    return (double)v->steps_done;
}
static double state_steps_wanted(const struct mu_job_view *v)
{
    return (double)v->record.spec.steps;
}
static double state_tokens(const struct mu_job_view *v)
{
    return (double)v->steps_done * v->record.spec.batch.sequences * v->record.spec.batch.length;
}
static double state_token_rate(const struct mu_job_view *v)
{
    return v->tokens_per_second;
}
static double state_loss(const struct mu_job_view *v)
{
    return v->has_result ? v->result.loss : 0;
}
static double state_lost(const struct mu_job_view *v)
{
    return (double)v->workers_lost;
}
static double state_generations(const struct mu_job_view *v)
{
    return (double)v->generations;
}
static double state_replayed(const struct mu_job_view *v)
{
    return (double)v->replayed_steps;
}
static double state_checkpoint_step(const struct mu_job_view *v)
{
    return (double)v->last_checkpoint_step;
}
static double state_checkpoint_time(const struct mu_job_view *v)
{
    return (double)v->last_checkpoint_wall_us * 1e-6;
}
static double state_evaluation(const struct mu_job_view *v)
{
    return v->eval_loss;
}

static const struct job_metric job_metrics[] = {
    {"muster_job_generation", "gauge", "Generation under way; 0 while the job waits.", state_generation},
    {"muster_job_world_size", "gauge", "Ranks of the generation under way.", state_world},
    {"muster_job_workers_attached", "gauge", "Workers attached, members and spares.", state_attached},
    {"muster_job_spares", "gauge", "Workers attached without a rank.", state_spares},
    {"muster_job_workers_max", "gauge", "Workers that the job may use.", state_workers_max},
    {"muster_job_step", "gauge", "Steps done; goes back when steps are replayed.", state_steps},
    {"muster_job_steps_wanted", "gauge", "Steps after which the job ends.", state_steps_wanted},
    {"muster_job_tokens", "gauge", "Tokens trained in the steps done.", state_tokens},
    {"muster_job_tokens_per_second", "gauge", "Tokens a second over the last reports.", state_token_rate},
    {"muster_job_loss", "gauge", "Loss of the newest reported step.", state_loss},
    {"muster_job_evaluation_loss", "gauge", "Loss of the newest evaluation.", state_evaluation},
    {"muster_job_workers_lost_total", "counter", "Workers lost.", state_lost},
    {"muster_job_generations_total", "counter", "Generations that have run.", state_generations},
    {"muster_job_replayed_steps_total", "counter", "Steps done again from a checkpoint.", state_replayed},
    {"muster_job_checkpoint_step", "gauge", "Step of the newest committed checkpoint.", state_checkpoint_step},
    {"muster_job_checkpoint_timestamp_seconds", "gauge", "When the newest checkpoint was committed; 0: none.",
     state_checkpoint_time},
};

static void head(FILE *out, const char *name, const char *type, const char *help)
{
    fprintf(out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void write_jobs(FILE *out, const struct mu_coord *coord)
{
    struct mu_job_view *view = malloc(sizeof *view);
    uint32_t counts[MU_JOB_STATE_COUNT] = {0};
    if (!view)
        return;
    for (size_t m = 0; m < sizeof job_metrics / sizeof job_metrics[0]; m++) {
        const struct job_metric *metric = &job_metrics[m];
        head(out, metric->name, metric->type, metric->help);
        for (uint32_t i = 0; mu_coord_job_view(coord, i, view); i++) {
            fprintf(out, "%s{job=\"%s\"} %.17g\n", metric->name, view->record.spec.name, metric->value(view));
            counts[view->record.state] += m == 0;
        }
    }
    head(out, "muster_jobs", "gauge", "Jobs by state.");
    for (int state = 0; state < MU_JOB_STATE_COUNT; state++)
        fprintf(out, "muster_jobs{state=\"%s\"} %u\n", job_states[state], counts[state]);
    free(view);
}

/* ---- phases of the steps: the mean over the members' newest reports ---- */

enum { PHASES = 7 };
static const char *const phases[PHASES] = {"data", "forward",   "backward", "communicate",
                                           "wait", "optimizer", "snapshot"};

static void phases_of(const struct mu_step_report *r, double ret_seconds[PHASES])
{
    const uint64_t us[PHASES] = {r->data_us, r->forward_us,   r->backward_us, r->communicate_us,
                                 r->wait_us, r->optimizer_us, r->snapshot_us};
    for (int i = 0; i < PHASES; i++)
        ret_seconds[i] = (double)us[i] * 1e-6 / (r->step_count ? r->step_count : 1);
}

struct job_phases {
    char name[MU_JOB_NAME_SIZE];
    uint32_t members;
    double seconds[PHASES];
};

static struct job_phases *phases_for(struct job_phases *list, uint32_t *count, uint32_t capacity, const char *job)
{
    for (uint32_t i = 0; i < *count; i++)
        if (strcmp(list[i].name, job) == 0)
            return &list[i];
    if (*count == capacity)
        return NULL;
    struct job_phases *added = &list[(*count)++];
    *added = (struct job_phases){.members = 0};
    memcpy(added->name, job, sizeof added->name);
    return added;
}

static void write_workers(FILE *out, const struct mu_coord *coord)
{
    uint32_t counts[MU_WS_STATE_COUNT] = {0}, count = 0, capacity = mu_coord_job_count(coord);
    struct job_phases *list = calloc(capacity ? capacity : 1, sizeof *list);
    if (!list)
        return;
    for (uint32_t slot = 0; slot < mu_coord_worker_slots(coord); slot++) {
        struct mu_worker_view worker;
        struct mu_timing_view timing;
        double seconds[PHASES];
        if (!mu_coord_worker_view(coord, slot, &worker))
            continue;
        counts[worker.state]++;
        struct job_phases *job = worker.state == MU_WS_MEMBER ? phases_for(list, &count, capacity, worker.job) : NULL;
        if (!job || !mu_coord_timing_view(coord, slot, 0, &timing))
            continue;
        phases_of(&timing.report, seconds);
        job->members++;
        for (int i = 0; i < PHASES; i++)
            job->seconds[i] += seconds[i];
    }
    head(out, "muster_workers", "gauge", "Workers by state.");
    for (int state = 0; state < MU_WS_STATE_COUNT; state++)
        fprintf(out, "muster_workers{state=\"%s\"} %u\n", worker_states[state], counts[state]);
    head(out, "muster_job_step_phase_seconds", "gauge", "Where the newest steps' time went, mean over the members.");
    for (uint32_t i = 0; i < count; i++)
        for (int p = 0; p < PHASES && list[i].members > 0; p++)
            fprintf(out, "muster_job_step_phase_seconds{job=\"%s\",phase=\"%s\"} %.9g\n", list[i].name, phases[p],
                    list[i].seconds[p] / list[i].members);
    free(list);
}

static void write_refusals(FILE *out, const struct mu_rpc_refusals *refusals)
{
    const struct {
        const char *reason;
        uint64_t count;
    } reasons[] = {
        {"connections_per_host", refusals->connections_of_peer},
        {"open_files", refusals->connections_without_file},
        {"calls", refusals->calls},
        {"calls_per_client", refusals->calls_of_peer},
        {"questions_per_client", refusals->questions_of_peer},
    };
    head(out, "muster_refused_total", "counter", "Connections and calls refused, by the limit that was reached.");
    for (size_t i = 0; i < sizeof reasons / sizeof reasons[0]; i++)
        fprintf(out, "muster_refused_total{limit=\"%s\"} %" PRIu64 "\n", reasons[i].reason, reasons[i].count);
}

void mu_metrics_write(FILE *out, const struct mu_coord *coord, const struct mu_rpc_refusals *refusals)
{
    struct mu_coord_counters counters = mu_coord_counters(coord);
    head(out, "muster_build_info", "gauge", "Always 1; the label is the program's version.");
    fprintf(out, "muster_build_info{version=\"%s\"} 1\n", MU_VERSION);
    write_workers(out, coord);
    write_jobs(out, coord);
    write_refusals(out, refusals);
    const struct {
        const char *name, *help;
        double value;
    } totals[] = {
        {"muster_fenced_messages_total", "Messages of stale workers, refused.", (double)counters.fenced_messages},
        {"muster_refused_hellos_total", "Workers refused when they attached.", (double)counters.refused_hellos},
        {"muster_stream_losses_total", "Streams of workers that broke.", (double)counters.stream_losses},
        {"muster_forgiven_seconds_total", "Own lateness by which leases were extended.",
         (double)counters.forgiven_us * 1e-6},
        {"muster_events_total", "Events told.", (double)mu_coord_last_event(coord)},
    };
    for (size_t i = 0; i < sizeof totals / sizeof totals[0]; i++) {
        head(out, totals[i].name, "counter", totals[i].help);
        fprintf(out, "%s %.17g\n", totals[i].name, totals[i].value);
    }
}
