/* /metrics: what workers tell of themselves and their hosts. Numbers of jobs always; numbers of workers, whose lines
 * grow with their number, only up to a limit of workers and of the page's length. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/metrics.h"

enum fold { SUM, MOST, LEAST };

struct job_vital {
    const char *name, *label, *help; /* help NULL: the same metric, with another label */
    enum mu_vital vital;
    enum fold fold;
};
static const struct job_vital job_vitals[] = {
    {"muster_job_cpus", "", "Processors that the job's workers keep busy.", MU_VITAL_CPU_US, SUM},
    {"muster_job_memory_bytes", "", "Resident memory of the job's workers.", MU_VITAL_MEMORY_BYTES, SUM},
    {"muster_job_host_cpu_ratio", "", "Busy share of the processors, of the busiest host.", MU_VITAL_HOST_CPU_US, MOST},
    {"muster_job_host_memory_ratio", "", "Used share of the memory, of the fullest host.", MU_VITAL_HOST_MEMORY_PPM,
     MOST},
    {"muster_job_stall_ratio", ",resource=\"cpu\"",
     "Share of the time in which a task had to wait for this, of the host where that is most.", MU_VITAL_STALL_CPU_US,
     MOST},
    {"muster_job_stall_ratio", ",resource=\"memory\"", NULL, MU_VITAL_STALL_MEMORY_US, MOST},
    {"muster_job_stall_ratio", ",resource=\"io\"", NULL, MU_VITAL_STALL_IO_US, MOST},
    {"muster_job_plane_bytes_per_second", "", "Data plane: bytes that the workers send to each other.",
     MU_VITAL_PLANE_SENT_BYTES, SUM},
    {"muster_job_latency_seconds", "", "Data plane: longest round trip of a connection.", MU_VITAL_LATENCY_US, MOST},
    {"muster_job_written_bytes_per_second", "", "Written to disks by the workers.", MU_VITAL_WRITTEN_BYTES, SUM},
    {"muster_job_disk_free_bytes", "", "Free where checkpoints are written, of the host with the least.",
     MU_VITAL_DISK_FREE_BYTES, LEAST},
};
enum { JOB_VITALS = sizeof job_vitals / sizeof job_vitals[0] };

/* Of single workers, what is needed most first: the last ones are left out when the page would grow too long. */
struct worker_vital {
    const char *name, *type, *help;
    enum mu_vital vital, added; /* the number is their sum; MU_VITAL_COUNT: nothing is added */
    bool is_seconds;            /* counted in microseconds */
};
static const struct worker_vital worker_vitals[] = {
    {"muster_worker_memory_bytes", "gauge", "Resident memory of the worker.", MU_VITAL_MEMORY_BYTES, MU_VITAL_COUNT,
     false},
    {"muster_worker_network_errors_total", "counter", "Network and RDMA errors and drops of its host.",
     MU_VITAL_NETWORK_ERRORS, MU_VITAL_RDMA_ERRORS, false},
    {"muster_worker_cpu_seconds_total", "counter", "Processor time of the worker.", MU_VITAL_CPU_US, MU_VITAL_COUNT,
     true},
    {"muster_worker_latency_seconds", "gauge", "Data plane: longest round trip of its connections.",
     MU_VITAL_LATENCY_US, MU_VITAL_COUNT, true},
    {"muster_worker_plane_sent_bytes_total", "counter", "Data plane: bytes sent.", MU_VITAL_PLANE_SENT_BYTES,
     MU_VITAL_COUNT, false},
};
enum { WORKER_VITALS = sizeof worker_vitals / sizeof worker_vitals[0] };

/* ---- gathering ---- */

struct job_sum {
    char name[MU_JOB_NAME_SIZE];
    double folded[JOB_VITALS];  /* NAN: nobody knows */
    uint64_t certificate_end_s; /* the earliest; 0: nobody told one */
    uint32_t unsynchronised, hosts;
};

struct gathered {
    struct mu_told *told;
    struct job_sum *jobs;
    uint32_t told_count, job_count, told_capacity, job_capacity;
};

static void fold_in(struct job_sum *job, const struct mu_vitals_heard *heard)
{
    for (int i = 0; i < JOB_VITALS; i++) {
        double value = heard->signs[job_vitals[i].vital], *sum = &job->folded[i];
        if (isnan(value) || (job_vitals[i].fold == LEAST && !(value > 0)))
            continue;
        if (isnan(*sum))
            *sum = value;
        else if (job_vitals[i].fold == SUM)
            *sum += value;
        else
            *sum = (job_vitals[i].fold == MOST) == (value > *sum) ? value : *sum;
    }
    uint64_t end_s = heard->newest.certificate_end_s;
    if (end_s > 0 && (job->certificate_end_s == 0 || end_s < job->certificate_end_s))
        job->certificate_end_s = end_s;
    job->unsynchronised += heard->newest.values[MU_VITAL_CLOCK_SYNCHRONISED] == 0;
}

static struct job_sum *job_of(struct gathered *all, const char *name)
{
    for (uint32_t i = 0; i < all->job_count; i++) {
        if (strcmp(all->jobs[i].name, name) == 0)
            return &all->jobs[i];
    }
    if (all->job_count == all->job_capacity)
        return NULL;
    struct job_sum *job = &all->jobs[all->job_count++];
    *job = (struct job_sum){.hosts = 0};
    snprintf(job->name, sizeof job->name, "%s", name);
    for (int i = 0; i < JOB_VITALS; i++)
        job->folded[i] = NAN;
    return job;
}

static int by_job_and_host(const void *a, const void *b)
{
    const struct mu_told *left = a, *right = b;
    if (left->job != right->job)
        return left->job < right->job ? -1 : 1; /* both lie in the same array */
    return (left->host > right->host) - (left->host < right->host);
}

static void gather(struct gathered *all, const struct mu_question_sources *sources)
{
    for (uint32_t slot = 0; slot < mu_coord_worker_slots(sources->coord); slot++) {
        struct mu_worker_view view;
        const struct mu_vitals_heard *heard =
            mu_coord_worker_view(sources->coord, slot, &view) ? mu_vitals_of(sources->sessions, view.session) : NULL;
        struct job_sum *job = heard && all->told_count < all->told_capacity ? job_of(all, view.job) : NULL;
        if (!job)
            continue;
        struct mu_told *told = &all->told[all->told_count++];
        *told = (struct mu_told){.job = job->name, .host = mu_host_id(view.host), .heard = heard};
        memcpy(told->worker, view.name, sizeof told->worker);
        fold_in(job, heard);
    }
    qsort(all->told, all->told_count, sizeof *all->told, by_job_and_host);
    for (uint32_t i = 0; i < all->told_count; i++)
        job_of(all, all->told[i].job)->hosts += i == 0 || by_job_and_host(&all->told[i - 1], &all->told[i]) != 0;
}

/* ---- writing ---- */

static void write_jobs(FILE *out, const struct gathered *all)
{
    for (int m = 0; m < JOB_VITALS; m++) {
        const struct job_vital *vital = &job_vitals[m];
        if (vital->help)
            mu_metrics_head(out, vital->name, "gauge", vital->help);
        for (uint32_t i = 0; i < all->job_count; i++) {
            if (!isnan(all->jobs[i].folded[m]))
                fprintf(out, "%s{job=\"%s\"%s} %.9g\n", vital->name, all->jobs[i].name, vital->label,
                        all->jobs[i].folded[m]);
        }
    }
    mu_metrics_head(out, "muster_job_clocks_unsynchronised", "gauge",
                    "Workers on hosts whose wall clock is not synchronised.");
    for (uint32_t i = 0; i < all->job_count; i++)
        fprintf(out, "muster_job_clocks_unsynchronised{job=\"%s\"} %u\n", all->jobs[i].name,
                all->jobs[i].unsynchronised);
    mu_metrics_head(out, "muster_job_certificate_expiry_timestamp_seconds", "gauge",
                    "When the first of the job's workers' certificates expires.");
    for (uint32_t i = 0; i < all->job_count; i++) {
        if (all->jobs[i].certificate_end_s > 0)
            fprintf(out, "muster_job_certificate_expiry_timestamp_seconds{job=\"%s\"} %" PRIu64 "\n", all->jobs[i].name,
                    all->jobs[i].certificate_end_s);
    }
}

/* A checkpoint of kind local is spread over the hosts, and each keeps a copy of its neighbour's part. */
static void write_needs(FILE *out, const struct gathered *all, const struct mu_question_sources *sources)
{
    struct mu_job_view *view = malloc(sizeof *view);
    mu_metrics_head(out, "muster_job_disk_need_bytes", "gauge", "What one more checkpoint takes on a host, at most.");
    for (uint32_t i = 0; view && i < all->job_count; i++) {
        const struct job_sum *job = &all->jobs[i];
        uint64_t size_bytes = 0;
        for (uint32_t k = 0; k < sources->stats->space_count; k++) {
            if (strcmp(sources->stats->spaces[k].job, job->name) == 0)
                size_bytes = sources->stats->spaces[k].size_bytes;
        }
        if (size_bytes == 0 || !mu_coord_job_find(sources->coord, job->name, view))
            continue;
        bool is_local = view->record.spec.checkpoint.kind == MU_CHECKPOINT_LOCAL;
        uint64_t need_bytes = is_local && job->hosts > 1 ? 2 * size_bytes / job->hosts : size_bytes;
        fprintf(out, "muster_job_disk_need_bytes{job=\"%s\"} %" PRIu64 "\n", job->name, need_bytes);
    }
    free(view);
}

enum {
    LINE_BESIDE_NAMES = 48, /* bytes of a line that are not names: labels, braces, the number */
    LINE_SIZE = 320,
    BYTES_BEHIND = 8192, /* of the page, at most, when the workers are written */
};

static char *put_text(char *at, const char *text)
{
    size_t length = strlen(text);
    memcpy(at, text, length);
    return at + length;
}

static char *put_number(char *at, uint64_t value, bool is_seconds)
{
    char digits[24], *first = digits + sizeof digits;
    int written = 0;
    do {
        if (is_seconds && written == 6)
            *--first = '.';
        *--first = (char)('0' + value % 10);
        value /= 10;
        written++;
    } while (value || (is_seconds && written <= 6));
    memcpy(at, first, (size_t)(digits + sizeof digits - first));
    return at + (digits + sizeof digits - first);
}

/* By hand: tens of thousands of lines are written while the core waits, and printf takes five times as long. */
static void write_vital(FILE *out, const struct gathered *all, const struct worker_vital *vital)
{
    for (uint32_t i = 0; i < all->told_count; i++) {
        const struct mu_told *told = &all->told[i];
        const uint64_t *values = told->heard->newest.values;
        char line[LINE_SIZE], *at = put_text(line, vital->name);
        at = put_text(put_text(at, "{job=\""), told->job);
        at = put_text(put_text(put_text(at, "\",worker=\""), told->worker), "\"} ");
        at = put_number(at, values[vital->vital] + (vital->added < MU_VITAL_COUNT ? values[vital->added] : 0),
                        vital->is_seconds);
        *at++ = '\n';
        fwrite(line, 1, (size_t)(at - line), out);
    }
}

static void write_workers(FILE *out, const struct gathered *all, uint32_t most)
{
    size_t names_bytes = 0;
    int left_out = 0;
    for (uint32_t i = 0; i < all->told_count; i++)
        names_bytes += strlen(all->told[i].job) + strlen(all->told[i].worker) + LINE_BESIDE_NAMES;
    for (int m = 0; m < WORKER_VITALS; m++) {
        const struct worker_vital *vital = &worker_vitals[m];
        size_t bytes = names_bytes + all->told_count * strlen(vital->name);
        mu_metrics_head(out, vital->name, vital->type, vital->help);
        if (all->told_count <= most && (size_t)ftello(out) + bytes <= MU_METRICS_BYTES_MAX - BYTES_BEHIND)
            write_vital(out, all, vital);
        else
            left_out++;
    }
    left_out += mu_metrics_worker_gpus(out, all->told, all->told_count, most, MU_METRICS_BYTES_MAX - BYTES_BEHIND);
    mu_metrics_head(out, "muster_worker_series_left_out", "gauge",
                    "Metrics of single workers that are left out, because there are too many workers.");
    fprintf(out, "muster_worker_series_left_out %d\n", left_out);
}

void mu_metrics_vitals(FILE *out, const struct mu_question_sources *sources)
{
    struct gathered all = {.told_capacity = mu_coord_worker_slots(sources->coord),
                           .job_capacity = mu_coord_job_count(sources->coord)};
    all.told = calloc(all.told_capacity ? all.told_capacity : 1, sizeof *all.told);
    all.jobs = calloc(all.job_capacity ? all.job_capacity : 1, sizeof *all.jobs);
    if (all.told && all.jobs) {
        gather(&all, sources);
        write_jobs(out, &all);
        write_needs(out, &all, sources);
        mu_metrics_gpus(out, all.told, all.told_count);
        write_workers(out, &all, sources->worker_series);
    }
    mu_metrics_head(out, "muster_network_errors_total", "counter",
                    "Network and RDMA errors and drops, counted by each worker of a host.");
    fprintf(out, "muster_network_errors_total %" PRIu64 "\n", sources->stats->network_errors);
    mu_metrics_head(out, "muster_gpu_xids_total", "counter", "Errors that drivers reported of workers' GPUs (Xid).");
    fprintf(out, "muster_gpu_xids_total %" PRIu64 "\n", sources->stats->gpu_xids);
    mu_metrics_head(out, "muster_gpu_failures_total", "counter", "GPUs that were of no more use to their workers.");
    fprintf(out, "muster_gpu_failures_total %" PRIu64 "\n", sources->stats->gpu_failures);
    free(all.told);
    free(all.jobs);
}
