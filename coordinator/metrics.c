#include "coordinator/metrics.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/timex.h>

#include "common/clock.h"

static const char *const worker_states[MU_WS_STATE_COUNT] = {"attaching", "spare",    "member",
                                                             "suspect",   "draining", "lost"};
static const char *const job_states[MU_JOB_STATE_COUNT] = {"pending", "running", "finished", "failed", "cancelled"};

static const char *const job_phases[MU_JP_COUNT] = {"waiting", "planning",   "preparing", "stepping",
                                                    "parking", "finalizing", "over"};

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
    return (double)mu_job_end(&v->record.spec);
}
static double state_tokens(const struct mu_job_view *v)
{
    return (double)v->steps_done * v->record.spec.batch.sequences * v->record.spec.batch.length;
}
static double state_samples(const struct mu_job_view *v)
{
    return (double)v->steps_done * v->record.spec.batch.sequences;
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
static double state_checkpoint_interval(const struct mu_job_view *v)
{
    return (double)v->checkpoint_steps;
}
static double state_evaluation(const struct mu_job_view *v)
{
    return v->eval_loss;
}
static double state_checkpoint_failures(const struct mu_job_view *v)
{
    return v->checkpoint_failures;
}
static double state_unfinite(const struct mu_job_view *v)
{
    return v->unfinite_reports;
}
static double state_bad_links(const struct mu_job_view *v)
{
    return v->bad_links;
}
static double state_step_seconds(const struct mu_job_view *v)
{
    return v->seconds_per_step;
}

static const struct job_metric job_metrics[] = {
    {"muster_job_generation", "gauge", "Generation under way; 0 while the job waits.", state_generation},
    {"muster_job_world_size", "gauge", "Ranks of the generation under way.", state_world},
    {"muster_job_workers_attached", "gauge", "Workers attached, members and spares.", state_attached},
    {"muster_job_spares", "gauge", "Workers attached without a rank.", state_spares},
    {"muster_job_workers_max", "gauge", "Workers that the job may use.", state_workers_max},
    {"muster_job_step", "gauge", "Steps done; goes back when steps are replayed.", state_steps},
    {"muster_job_steps_wanted", "gauge", "Steps after which the job ends.", state_steps_wanted},
    {"muster_job_samples", "gauge", "Sequences trained in the steps done.", state_samples},
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
    {"muster_job_checkpoint_interval_steps", "gauge", "Steps between two checkpoints; 0: none without an order.",
     state_checkpoint_interval},
    {"muster_job_checkpoint_failures", "gauge", "Checkpoints given up in a row.", state_checkpoint_failures},
    {"muster_job_unfinite_reports", "gauge", "Reports in a row whose loss or gradient is not finite.", state_unfinite},
    {"muster_job_bad_links", "gauge", "Pairs of workers kept apart, because exchanges between them failed.",
     state_bad_links},
    {"muster_job_step_seconds", "gauge", "Time of a step, by the newest report of rank 0.", state_step_seconds},
};

void mu_metrics_head(FILE *out, const char *name, const char *type, const char *help)
{
    fprintf(out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

/* `labels`: "", or those beside le. */
static void write_buckets(FILE *out, const char *name, const char *labels, const struct mu_histogram *histogram)
{
    const char *comma = labels[0] ? "," : "", *open = labels[0] ? "{" : "", *close = labels[0] ? "}" : "";
    uint64_t below = 0;
    for (int i = 0; i <= MU_HISTOGRAM_BOUNDS; i++) {
        char bound[16] = "+Inf";
        below += histogram->counts[i];
        if (i < MU_HISTOGRAM_BOUNDS)
            snprintf(bound, sizeof bound, "%.3f", 0.001 * (1 << i));
        fprintf(out, "%s_bucket{%s%sle=\"%s\"} %" PRIu64 "\n", name, labels, comma, bound, below);
    }
    fprintf(out, "%s_sum%s%s%s %.17g\n%s_count%s%s%s %" PRIu64 "\n", name, open, labels, close,
            (double)histogram->sum_us * 1e-6, name, open, labels, close, below);
}

static void write_phases(FILE *out, const struct mu_coord *coord, struct mu_job_view *view)
{
    mu_metrics_head(out, "muster_job_phase", "gauge", "1: the job is in this phase.");
    for (uint32_t i = 0; mu_coord_job_view(coord, i, view); i++)
        for (int phase = 0; phase < MU_JP_COUNT; phase++)
            fprintf(out, "muster_job_phase{job=\"%s\",phase=\"%s\"} %d\n", view->record.spec.name, job_phases[phase],
                    (int)view->phase == phase);
}

static void write_jobs(FILE *out, const struct mu_coord *coord)
{
    struct mu_job_view *view = malloc(sizeof *view);
    uint32_t counts[MU_JOB_STATE_COUNT] = {0};
    if (!view)
        return;
    for (size_t m = 0; m < sizeof job_metrics / sizeof job_metrics[0]; m++) {
        const struct job_metric *metric = &job_metrics[m];
        mu_metrics_head(out, metric->name, metric->type, metric->help);
        for (uint32_t i = 0; mu_coord_job_view(coord, i, view); i++) {
            fprintf(out, "%s{job=\"%s\"} %.17g\n", metric->name, view->record.spec.name, metric->value(view));
            counts[view->record.state] += m == 0;
        }
    }
    write_phases(out, coord, view);
    mu_metrics_head(out, "muster_jobs", "gauge", "Jobs by state.");
    for (int state = 0; state < MU_JOB_STATE_COUNT; state++)
        fprintf(out, "muster_jobs{state=\"%s\"} %u\n", job_states[state], counts[state]);
    free(view);
}

/* ---- predicted and measured ---- */

static void write_terms(FILE *out, const struct mu_coord *coord, struct mu_job_view *view, bool measured)
{
    struct mu_prediction p;
    for (uint32_t i = 0; mu_coord_job_view(coord, i, view); i++) {
        const char *job = view->record.spec.name;
        if (!mu_coord_prediction_view(coord, job, &p) || (measured && p.steps == 0))
            continue;
        for (int term = 0; term < MU_TERM_COUNT; term++)
            fprintf(out, "muster_job_step_%s_seconds{job=\"%s\",term=\"%s\"} %.9g\n",
                    measured ? "measured" : "predicted", job, mu_step_term_names[term],
                    (measured ? p.measured_s : p.predicted_s)[term]);
    }
}

static void write_predictions(FILE *out, const struct mu_coord *coord)
{
    struct mu_job_view *view = malloc(sizeof *view);
    struct mu_prediction p;
    if (!view)
        return;
    mu_metrics_head(out, "muster_job_step_predicted_seconds", "gauge",
                    "What a step of the newest generation was predicted to take.");
    write_terms(out, coord, view, false);
    mu_metrics_head(out, "muster_job_step_measured_seconds", "gauge",
                    "What a step takes at the rank of the prediction, mean over the last steps.");
    write_terms(out, coord, view, true);
    mu_metrics_head(out, "muster_job_prediction_off", "gauge",
                    "1: steps do not take what was predicted at the speed that was measured before.");
    for (uint32_t i = 0; mu_coord_job_view(coord, i, view); i++) {
        if (mu_coord_prediction_view(coord, view->record.spec.name, &p))
            fprintf(out, "muster_job_prediction_off{job=\"%s\"} %d\n", view->record.spec.name, p.off && p.calibrated);
    }
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
    uint64_t silent_us; /* of the member that has been silent for longest */
    uint32_t members;   /* that have reported */
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
        bool has_rank = worker.state == MU_WS_MEMBER || worker.state == MU_WS_SUSPECT;
        struct job_phases *job = has_rank ? phases_for(list, &count, capacity, worker.job) : NULL;
        if (job && job->silent_us < worker.age_us)
            job->silent_us = worker.age_us;
        if (!job || worker.state != MU_WS_MEMBER || !mu_coord_timing_view(coord, slot, 0, &timing))
            continue;
        phases_of(&timing.report, seconds);
        job->members++;
        for (int i = 0; i < PHASES; i++)
            job->seconds[i] += seconds[i];
    }
    mu_metrics_head(out, "muster_workers", "gauge", "Workers by state.");
    for (int state = 0; state < MU_WS_STATE_COUNT; state++)
        fprintf(out, "muster_workers{state=\"%s\"} %u\n", worker_states[state], counts[state]);
    mu_metrics_head(out, "muster_job_heartbeat_age_seconds", "gauge",
                    "Time since the last sign of life of the member that has been silent for longest.");
    for (uint32_t i = 0; i < count; i++)
        fprintf(out, "muster_job_heartbeat_age_seconds{job=\"%s\"} %.6f\n", list[i].name,
                (double)list[i].silent_us * 1e-6);
    mu_metrics_head(out, "muster_job_step_phase_seconds", "gauge",
                    "Where the newest steps' time went, mean over the members.");
    for (uint32_t i = 0; i < count; i++)
        for (int p = 0; p < PHASES && list[i].members > 0; p++)
            fprintf(out, "muster_job_step_phase_seconds{job=\"%s\",phase=\"%s\"} %.9g\n", list[i].name, phases[p],
                    list[i].seconds[p] / list[i].members);
    free(list);
}

static void write_step_histograms(FILE *out, const struct mu_coord *coord)
{
    static const char name[] = "muster_job_step_phase_duration_seconds";
    const struct mu_step_phases *steps;
    struct mu_job_view *view = malloc(sizeof *view);
    if (!view)
        return;
    mu_metrics_head(out, name, "histogram", "Where the time of the members' steps went.");
    for (uint32_t j = 0; mu_coord_job_view(coord, j, view) && (steps = mu_coord_step_phases(coord, j)) != NULL; j++)
        for (int p = 0; p < PHASES && steps->wall_us; p++) {
            char labels[MU_JOB_NAME_SIZE + 64];
            snprintf(labels, sizeof labels, "job=\"%s\",phase=\"%s\"", view->record.spec.name, phases[p]);
            write_buckets(out, name, labels, &steps->of[p]);
        }
    mu_metrics_head(out, "muster_job_step_timestamp_seconds", "gauge",
                    "When a member last told of a step; 0: not since the coordinator's start.");
    for (uint32_t j = 0; mu_coord_job_view(coord, j, view) && (steps = mu_coord_step_phases(coord, j)) != NULL; j++)
        fprintf(out, "muster_job_step_timestamp_seconds{job=\"%s\"} %.17g\n", view->record.spec.name,
                (double)steps->wall_us * 1e-6);
    free(view);
}

static void write_refusals(FILE *out, struct mu_rpc_server *server)
{
    struct mu_rpc_refusals refusals = mu_rpc_server_refusals(server);
    const struct {
        const char *reason;
        uint64_t count;
    } reasons[] = {
        {"connections_per_host", refusals.connections_of_peer},
        {"open_files", refusals.connections_without_file},
        {"owed_bytes", refusals.connections_owing},
        {"calls", refusals.calls},
        {"calls_per_client", refusals.calls_of_peer},
        {"questions_per_client", refusals.questions_of_peer},
        {"untaken_answers", refusals.answers_untaken},
        {"awaited_requests", refusals.requests_awaited},
    };
    mu_metrics_head(out, "muster_refused_total", "counter",
                    "Connections and calls refused, by the limit that was reached.");
    for (size_t i = 0; i < sizeof reasons / sizeof reasons[0]; i++)
        fprintf(out, "muster_refused_total{limit=\"%s\"} %" PRIu64 "\n", reasons[i].reason, reasons[i].count);
}

/* ---- where the workers' time went ---- */

/* Seconds of the job's workers by class: those of one job after the other, though accounts come in any order. */
static void write_goodput(FILE *out, const struct mu_coord *coord)
{
    uint32_t jobs = mu_coord_job_count(coord), found = 0;
    struct job_time {
        char job[MU_JOB_NAME_SIZE];
        uint64_t us[MU_TIME_CLASS_COUNT];
    } *times = calloc(jobs ? jobs : 1, sizeof *times);
    uint64_t now_us = mu_clock_mono_us();
    for (uint32_t slot = 0, at = 0; times && slot < mu_coord_account_slots(coord); slot++) {
        struct mu_account_record record;
        if (!mu_coord_account_view(coord, slot, now_us, &record))
            continue;
        if (at >= found || strcmp(times[at].job, record.job) != 0)
            for (at = 0; at < found && strcmp(times[at].job, record.job) != 0;)
                at++;
        if (at == found)
            memcpy(times[found++].job, record.job, sizeof record.job);
        for (int k = 0; k < MU_TIME_CLASS_COUNT; k++)
            times[at].us[k] += record.us[k];
    }
    const char *const names[] = {"muster_useful_seconds_total", "muster_lost_seconds_total"};
    const char *const helps[] = {"Time of the workers that went into training.",
                                 "Time of the workers that did not, by what it went into instead."};
    for (int lost = 0; lost < 2; lost++) {
        mu_metrics_head(out, names[lost], "counter", helps[lost]);
        for (uint32_t at = 0; at < found; at++)
            for (int k = 0; k < MU_TIME_CLASS_COUNT; k++) {
                if (k == MU_TIME_UNREPORTED || mu_time_class_is_lost((enum mu_time_class)k) != (lost != 0))
                    continue;
                fprintf(out, "%s{job=\"%s\"", names[lost], times[at].job);
                if (lost)
                    fprintf(out, ",class=\"%s\"", mu_time_class_names[k]);
                fprintf(out, "} %.17g\n", (double)times[at].us[k] * 1e-6);
            }
    }
    free(times);
}

/* ---- the coordinator itself ---- */

static void write_histogram(FILE *out, const char *name, const char *help, const struct mu_histogram *histogram)
{
    mu_metrics_head(out, name, "histogram", help);
    write_buckets(out, name, "", histogram);
}

/* ---- calls, under the names that gRPC servers commonly have them ---- */

enum { CALL_LABELS_SIZE = 256 };

static bool method_at(const struct mu_rpc_server *server, size_t index, char labels[CALL_LABELS_SIZE],
                      enum mu_rpc_kind *ret_kind, const struct mu_rpc_counts **ret_counts)
{
    static const char *const types[] = {"unary", "server_stream", "bidi_stream"};
    const char *path;
    if (!mu_rpc_server_method(server, index, &path, ret_kind, ret_counts))
        return false;
    const char *slash = strrchr(path, '/');
    snprintf(labels, CALL_LABELS_SIZE, "grpc_type=\"%s\",grpc_service=\"%.*s\",grpc_method=\"%s\"", types[*ret_kind],
             (int)(slash - path - 1), path + 1, slash + 1);
    return true;
}

static void write_calls(FILE *out, const struct mu_rpc_server *server)
{
    static const struct {
        const char *name, *help;
        size_t offset;
    } totals[] = {
        {"grpc_server_started_total", "Calls that have begun.", offsetof(struct mu_rpc_counts, started)},
        {"grpc_server_msg_received_total", "Messages that came.", offsetof(struct mu_rpc_counts, received)},
        {"grpc_server_msg_sent_total", "Messages that went.", offsetof(struct mu_rpc_counts, sent)},
    };
    static const char handled[] = "grpc_server_handled_total", took[] = "grpc_server_handling_seconds";
    char labels[CALL_LABELS_SIZE];
    enum mu_rpc_kind kind;
    const struct mu_rpc_counts *counts;
    for (size_t m = 0; m < sizeof totals / sizeof totals[0]; m++) {
        mu_metrics_head(out, totals[m].name, "counter", totals[m].help);
        for (size_t i = 0; method_at(server, i, labels, &kind, &counts); i++)
            fprintf(out, "%s{%s} %" PRIu64 "\n", totals[m].name, labels,
                    *(const uint64_t *)(const void *)((const char *)counts + totals[m].offset));
    }
    mu_metrics_head(out, handled, "counter", "Calls that have ended, by how.");
    for (size_t i = 0; method_at(server, i, labels, &kind, &counts); i++)
        for (int code = 0; code < MU_RPC_CODE_COUNT; code++)
            if (counts->ended[code] || code == MU_RPC_OK)
                fprintf(out, "%s{%s,grpc_code=\"%s\"} %" PRIu64 "\n", handled, labels,
                        mu_rpc_code_name((enum mu_rpc_code)code), counts->ended[code]);
    mu_metrics_head(out, took, "histogram", "How long unary calls took that have ended.");
    for (size_t i = 0; method_at(server, i, labels, &kind, &counts); i++)
        if (kind == MU_RPC_UNARY && counts->started)
            write_buckets(out, took, labels, &counts->took);
}

static void write_recoveries(FILE *out, const struct mu_coord_counters *counters)
{
    static const char *const sources[MU_START_COUNT] = {"holders", "mirrors", "checkpoint", "seed"};
    mu_metrics_head(out, "muster_recovery_seconds", "summary",
                    "From the first loss noticed until the next generation goes, by where its state came from.");
    for (int i = 0; i < MU_START_COUNT; i++)
        fprintf(out,
                "muster_recovery_seconds_sum{source=\"%s\"} %.17g\n"
                "muster_recovery_seconds_count{source=\"%s\"} %" PRIu64 "\n",
                sources[i], (double)counters->recovery_us[i] * 1e-6, sources[i], counters->recoveries[i]);
}

static void write_spaces(FILE *out, const struct mu_stats *stats)
{
    mu_metrics_head(out, "muster_job_checkpoint_free_bytes", "gauge",
                    "Free where the newest checkpoint was written, as the coordinator sees it.");
    for (uint32_t i = 0; i < stats->space_count; i++)
        fprintf(out, "muster_job_checkpoint_free_bytes{job=\"%s\"} %" PRIu64 "\n", stats->spaces[i].job,
                stats->spaces[i].free_bytes);
    mu_metrics_head(out, "muster_job_checkpoint_size_bytes", "gauge", "Size of the newest checkpoint.");
    for (uint32_t i = 0; i < stats->space_count; i++)
        fprintf(out, "muster_job_checkpoint_size_bytes{job=\"%s\"} %" PRIu64 "\n", stats->spaces[i].job,
                stats->spaces[i].size_bytes);
}

static bool clock_is_synchronised(void)
{
    struct timex now = {.modes = 0};
    return ntp_adjtime(&now) != TIME_ERROR;
}

static void write_own(FILE *out, const struct mu_question_sources *sources, const struct mu_coord_counters *counters)
{
    const struct {
        const char *name, *help;
        double value;
    } gauges[] = {
        {"muster_workers_quarantined", "Names of workers that are refused because they were lost too often.",
         counters->quarantined},
        {"muster_watchers", "Programs that watch events.", mu_events_watchers(sources->events)},
        {"muster_outbox_items", "Messages and answers that wait for the store.",
         (double)mu_outbox_held(sources->outbox)},
        {"muster_store_free_bytes", "Free on the file system of the data directory; 0: in memory.",
         (double)sources->stats->store_free_bytes},
        {"muster_store_reserve_bytes", "Changes are refused while less is free.",
         (double)sources->stats->store_reserve_bytes},
        {"muster_certificate_expiry_timestamp_seconds", "When the coordinator's certificate expires; 0: no TLS.",
         (double)mu_rpc_server_certificate_end_s(sources->server)},
        {"muster_clock_synchronised", "1: the kernel says that the wall clock is synchronised.",
         clock_is_synchronised()},
    };
    struct mu_histogram synced;
    for (size_t i = 0; i < sizeof gauges / sizeof gauges[0]; i++) {
        mu_metrics_head(out, gauges[i].name, "gauge", gauges[i].help);
        fprintf(out, "%s %.17g\n", gauges[i].name, gauges[i].value);
    }
    mu_outbox_synced(sources->outbox, &synced);
    write_histogram(out, "muster_store_sync_seconds", "Synced writes to the store.", &synced);
    write_histogram(out, "muster_loop_turn_seconds", "Turns of the core's loop, without its waits.",
                    &sources->stats->turns);
    write_recoveries(out, counters);
    write_spaces(out, sources->stats);
    write_calls(out, sources->server);
}

static void write_reasons(FILE *out, const char *name, const char *help, const char *const *reasons,
                          const uint64_t *counts, int count)
{
    mu_metrics_head(out, name, "counter", help);
    for (int i = 0; i < count; i++)
        fprintf(out, "%s{reason=\"%s\"} %" PRIu64 "\n", name, reasons[i], counts[i]);
}

static void write_refusals_of_workers(FILE *out, struct mu_coord_counters *counters, const struct mu_stats *stats)
{
    static const char *const fences[MU_FENCE_COUNT] = {"lost", "stream", "generation"};
    static const char *const rejects[MU_REJECT_REASONS] = {"version", "identity", "quarantined", "fenced",
                                                           "no_job",  "job_over", "busy",        "invalid"};
    static const char *const ends[MU_STREAM_END_COUNT] = {"reset", "malformed", "slow", "exit"};
    counters->refused_hellos[MU_REJECT_INVALID] += stats->malformed_hellos;
    write_reasons(out, "muster_fenced_messages_total", "Messages of stale workers, refused.", fences,
                  counters->fenced_messages, MU_FENCE_COUNT);
    write_reasons(out, "muster_refused_hellos_total", "Workers refused when they attached.", rejects,
                  counters->refused_hellos, MU_REJECT_REASONS);
    write_reasons(out, "muster_stream_losses_total", "Streams of workers that broke.", ends, counters->stream_losses,
                  MU_STREAM_END_COUNT);
}

void mu_metrics_write(FILE *out, const struct mu_question_sources *sources)
{
    const struct mu_coord *coord = sources->coord;
    struct mu_coord_counters counters = mu_coord_counters(coord);
    mu_metrics_head(out, "muster_build_info", "gauge", "Always 1; the label is the program's version.");
    fprintf(out, "muster_build_info{version=\"%s\"} 1\n", MU_VERSION);
    write_workers(out, coord);
    write_step_histograms(out, coord);
    write_jobs(out, coord);
    write_predictions(out, coord);
    write_refusals(out, sources->server);
    write_goodput(out, coord);
    write_refusals_of_workers(out, &counters, sources->stats);
    mu_metrics_head(out, "muster_forgiven_seconds_total", "counter", "Own lateness by which leases were extended.");
    fprintf(out, "muster_forgiven_seconds_total %.17g\n", (double)counters.forgiven_us * 1e-6);
    mu_metrics_head(out, "muster_events_total", "counter", "Events told.");
    fprintf(out, "muster_events_total %" PRIu64 "\n", mu_coord_last_event(coord));
    write_own(out, sources, &counters);
    mu_metrics_vitals(out, sources);
}
