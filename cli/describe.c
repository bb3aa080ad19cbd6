/* muster describe: everything that is known of one job or worker, on one screen. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cli/event_stream.h"
#include "common/clock.h"

enum { EVENTS_SHOWN = 12, EVENTS_LOOKED_THROUGH = 2000, TIMINGS_SHOWN = 4 };

/* ---- events that concern it ---- */

struct tail {
    const char *worker; /* NULL: all of the job */
    uint32_t count;     /* ever; the newest are kept */
    char lines[EVENTS_SHOWN][512];
};

static void keep_event(void *ctx, const Muster__V1__Event *event)
{
    struct tail *tail = ctx;
    char ts[32];
    if (tail->worker && strcmp(event->worker, tail->worker) != 0)
        return;
    mu_clock_format(event->wall_us, ts);
    snprintf(tail->lines[tail->count++ % EVENTS_SHOWN], sizeof tail->lines[0], "%s  %s%s", ts,
             event->severity == MUSTER__V1__EVENT_SEVERITY__EVENT_SEVERITY_ERROR ? "ERROR: " : "", event->text);
}

static int print_events(struct mu_cli *cli, char *job, const char *worker)
{
    struct mu_event_stream stream;
    struct mu_error err;
    struct tail tail = {.worker = worker};
    mu_event_stream_init(&stream);
    stream.cli = cli;
    stream.request.job = job;
    stream.request.newest = EVENTS_LOOKED_THROUGH;
    stream.show = keep_event;
    stream.ctx = &tail;
    if (mu_event_stream_run(&stream, &err) != MU_OK)
        return mu_cli_fail(&err);
    uint32_t first = tail.count > EVENTS_SHOWN ? tail.count - EVENTS_SHOWN : 0;
    printf("\nnewest events%s\n", tail.count ? "" : ": none");
    for (uint32_t i = first; i < tail.count; i++)
        printf("  %s\n", tail.lines[i % EVENTS_SHOWN]);
    return MU_EXIT_OK;
}

/* ---- where its time went ---- */

static void print_account(const char *whose, const Muster__V1__TimeByClass *time, double total_s)
{
    const ProtobufCMessageDescriptor *classes = &muster__v1__time_by_class__descriptor;
    printf("%-14s", whose);
    const char *separator = "";
    for (unsigned i = 0; i < classes->n_fields; i++) {
        double seconds = (&time->useful)[i];
        if (seconds < 0.005 * total_s || !(seconds > 0))
            continue;
        printf("%s%s %.1f %%", separator, classes->fields[i].name, 100 * seconds / total_s);
        separator = ", ";
    }
    printf(" of %.1f s\n", total_s);
}

static int get_goodput(struct mu_cli *cli, char *job, const char *worker, const Muster__V1__Account **ret_account,
                       const Muster__V1__GetGoodputResponse **ret_first)
{
    Muster__V1__GetGoodputRequest request = MUSTER__V1__GET_GOODPUT_REQUEST__INIT;
    const Muster__V1__GetGoodputResponse *reply;
    request.job = job;
    request.page_size = 1000;
    *ret_first = NULL;
    do {
        int code =
            mu_cli_call_or_exit(cli, "GetGoodput", &request, &muster__v1__get_goodput_response__descriptor, &reply);
        if (code != MU_EXIT_OK)
            return code;
        if (!*ret_first)
            *ret_first = reply;
        for (size_t i = 0; i < reply->n_accounts && worker; i++) {
            if (strcmp(reply->accounts[i]->worker, worker) == 0)
                *ret_account = reply->accounts[i];
        }
        request.page_token = reply->next_page_token;
    } while (worker && request.page_token[0]);
    return MU_EXIT_OK;
}

/* ---- a job ---- */

static void print_spec(const Muster__V1__Job *job)
{
    const Muster__V1__JobSpec *spec = job->spec;
    if (spec->model)
        printf("%-14s%s, %u layers, %u heads, %u channels, context %u, vocabulary %u\n", "model",
               mu_cli_enum(&muster__v1__model_family__descriptor, (int)spec->model->family), spec->model->layers,
               spec->model->heads, spec->model->channels, spec->model->context, spec->model->vocab);
    if (spec->data)
        printf("%-14s%s\n", "data", spec->data->path);
    if (spec->batch)
        printf("%-14s%u sequences of %u tokens in %u leaves\n", "step", spec->batch->sequences, spec->batch->length,
               job->leaves);
    if (spec->compute == MUSTER__V1__COMPUTE__COMPUTE_BF16)
        printf("%-14sbf16, by GPUs alone\n", "compute");
    if (spec->workers)
        printf("%-14s%u to %u allowed, %u spares wanted\n", "workers", spec->workers->min, spec->workers->max,
               spec->workers->spares);
    if (spec->checkpoint)
        printf("%-14s%s%s%s\n", "checkpoints", spec->checkpoint->path,
               job->checkpoint_every_reason[0] ? ", every " : "", job->checkpoint_every_reason);
}

static void print_identity(const ProtobufCBinaryData *identity)
{
    for (size_t i = 0; i < identity->len; i++)
        printf("%02x", identity->data[i]);
}

static void print_origin(const Muster__V1__Job *job)
{
    const Muster__V1__Origin *origin = job->origin;
    printf("origin       checkpoint %" PRIu64 " of job %s, step %" PRIu64 "\n", origin->checkpoint, origin->job,
           origin->step);
    if (!origin->rebased_from.len)
        return;
    printf("rebased      from step %" PRIu64 ", by %s: from numeric identity ", origin->step, origin->rebased_by);
    print_identity(&origin->rebased_from);
    printf(" to ");
    print_identity(&origin->rebased_to);
    printf("%s\n", origin->rebased_to.len ? "" : "that of its first worker, which has not come yet");
}

static int describe_job(struct mu_cli *cli, char *name)
{
    int code = mu_cmd_status(cli, 1, (char *[]){name});
    Muster__V1__GetJobRequest request = MUSTER__V1__GET_JOB_REQUEST__INIT;
    const Muster__V1__GetJobResponse *reply;
    const Muster__V1__Account *none = NULL;
    const Muster__V1__GetGoodputResponse *goodput;
    request.name = name;
    if (code != MU_EXIT_OK || cli->json ||
        (code = mu_cli_call_or_exit(cli, "GetJob", &request, &muster__v1__get_job_response__descriptor, &reply)) ||
        (code = get_goodput(cli, name, NULL, &none, &goodput)))
        return code;
    printf("\n");
    print_spec(reply->job);
    if (reply->job->origin)
        print_origin(reply->job);
    if (reply->job->spec)
        mu_cli_print_amendments(reply->job->spec);
    if (goodput->total_seconds > 0)
        print_account("time", goodput->total, goodput->total_seconds);
    return print_events(cli, name, NULL);
}

/* ---- a worker ---- */

static int find_worker(struct mu_cli *cli, const char *name, const Muster__V1__Worker **ret_worker)
{
    Muster__V1__ListWorkersRequest request = MUSTER__V1__LIST_WORKERS_REQUEST__INIT;
    request.page_size = 1000;
    request.worker = (char *)(uintptr_t)name;
    do {
        const Muster__V1__ListWorkersResponse *reply;
        int code =
            mu_cli_call_or_exit(cli, "ListWorkers", &request, &muster__v1__list_workers_response__descriptor, &reply);
        if (code != MU_EXIT_OK)
            return code;
        for (size_t i = 0; i < reply->n_workers; i++) {
            if (strcmp(reply->workers[i]->name, name) == 0) {
                *ret_worker = reply->workers[i];
                return MU_EXIT_OK;
            }
        }
        request.page_token = reply->next_page_token;
    } while (request.page_token[0]);
    struct mu_error err;
    mu_fail(&err, MU_ERR_NOT_FOUND, "no worker '%s' is attached or expected back (see: muster events)", name);
    return mu_cli_fail(&err);
}

static void print_worker(const Muster__V1__Worker *worker)
{
    char memory[16];
    mu_cli_bytes(worker->memory_bytes, memory);
    printf("%-14s%s\n", "worker", worker->name);
    printf("%-14s%s, %s%s%s\n", "state", mu_cli_enum(&muster__v1__worker_state__descriptor, (int)worker->state),
           mu_cli_enum(&muster__v1__worker_phase__descriptor, (int)worker->phase), worker->reason[0] ? ": " : "",
           worker->reason);
    printf("%-14s%s, pid %" PRIu64 ", %s with %u threads, %s of memory\n", "host", worker->host, worker->pid,
           worker->backend, worker->threads, memory);
    printf("%-14s%s\n", "data plane", worker->address);
    printf("%-14s%s, generation %" PRIu64 "\n", "job", worker->job, worker->generation);
    if (worker->coordinates)
        printf("%-14s%u (dp %u, tp %u, pp %u), %u leaves of a step, %.2f ms each\n", "rank", worker->rank,
               worker->coordinates->dp, worker->coordinates->tp, worker->coordinates->pp, worker->leaves,
               worker->seconds_per_leaf * 1e3);
    printf("%-14s%" PRIu64 ", last sign of life %.1f s ago\n", "step", worker->step, (double)worker->age_us * 1e-6);
}

/* ---- how it and its host are ---- */

static const char *bytes_of(double value, char out[16])
{
    if (!(value >= 0))
        return "?";
    mu_cli_bytes((uint64_t)value, out);
    return out;
}

/* "12.3 %", or "?" before there are two reports. */
static const char *share_of(double ratio, char out[16])
{
    if (ratio >= 0)
        snprintf(out, 16, "%.1f %%", 100 * ratio);
    else
        snprintf(out, 16, "?");
    return out;
}

static void print_links(const Muster__V1__VitalSigns *signs)
{
    for (size_t i = 0; i < signs->n_links; i++) {
        const Muster__V1__LinkSigns *link = signs->links[i];
        char received[16], sent[16], waited[16], latency[24] = "";
        if (link->latency_seconds > 0)
            snprintf(latency, sizeof latency, ", round trip %.2f ms", 1e3 * link->latency_seconds);
        printf("%-14srank %u%s%s: in %s/s, out %s/s, waited for %s%s, %" PRIu64 " segments sent again\n",
               i == 0 ? "links" : "", link->rank, link->worker[0] ? " " : "", link->worker,
               bytes_of(link->received_bytes_per_second, received), bytes_of(link->sent_bytes_per_second, sent),
               share_of(link->wait_ratio, waited), latency, link->retransmits);
    }
}

/* "3 of this, " for a count that is not 0. */
static void print_count(const char *what, uint64_t count)
{
    if (count)
        printf(", %" PRIu64 " %s", count, what);
}

static void print_gpu(const Muster__V1__GpuSigns *gpu)
{
    char a[16], b[16], why[128];
    if (gpu->watch != MUSTER__V1__GPU_WATCH__GPU_WATCH_WATCHED) {
        printf("%-14s%s\n", "GPU", gpu->text[0] ? gpu->text : "its driver has not told anything yet");
        return;
    }
    mu_gpu_throttle_text(gpu->throttle_reasons, why, sizeof why);
    printf("%-14sbusy %" PRIu64 " %%, memory %s of %s, %.0f of %.0f W, %" PRIu64 " C, memory %" PRIu64 " C, %" PRIu64
           " MHz, slowed down by: %s; driver %s\n",
           "GPU", gpu->utilisation_percent, bytes_of((double)gpu->memory_used_bytes, a),
           bytes_of((double)gpu->memory_total_bytes, b), (double)gpu->power_milliwatts * 1e-3,
           (double)gpu->power_limit_milliwatts * 1e-3, gpu->temperature_celsius, gpu->memory_temperature_celsius,
           gpu->sm_clock_megahertz, why, gpu->driver);
    printf("%-14sPCIe in %s/s, out %s/s", "", bytes_of((double)gpu->pcie_received_kibibytes_per_second * 1024, a),
           bytes_of((double)gpu->pcie_sent_kibibytes_per_second * 1024, b));
    print_count("PCIe replays", gpu->pcie_replays);
    print_count("NVLink errors", gpu->nvlink_crc_errors + gpu->nvlink_replays + gpu->nvlink_recoveries);
    print_count("memory errors corrected", gpu->ecc_corrected);
    print_count("memory errors not corrected", gpu->ecc_uncorrected);
    print_count("memory rows remapped", gpu->rows_remapped_correctable + gpu->rows_remapped_uncorrectable);
    print_count("memory rows to be remapped at the next reset", gpu->row_remap_pending);
    print_count("errors reported by the driver (Xid)", gpu->xid_count);
    if (gpu->last_xid)
        printf(", the last one %u", gpu->last_xid);
    printf("%s%s\n", gpu->text[0] ? "; " : "", gpu->text);
}

static void print_vitals(const Muster__V1__VitalSigns *signs)
{
    char a[16], b[16], c[16];
    printf("%-14s%.2f, of the host's %s are busy; tasks had to wait %s of the time\n", "processors",
           signs->cpus >= 0 ? signs->cpus : 0, share_of(signs->host_cpu_ratio, a), share_of(signs->stall_cpu_ratio, b));
    printf("%-14s%s, of the host's %s are used; tasks had to wait %s of the time\n", "memory",
           bytes_of(signs->memory_bytes, a), share_of(signs->host_memory_ratio, b),
           share_of(signs->stall_memory_ratio, c));
    printf("%-14sin %s/s, ", "network", bytes_of(signs->received_bytes_per_second, a));
    printf("out %s/s, %.1f errors and drops a second\n", bytes_of(signs->sent_bytes_per_second, b),
           signs->network_errors_per_second > 0 ? signs->network_errors_per_second : 0);
    if (signs->rdma_received_bytes_per_second + signs->rdma_sent_bytes_per_second + signs->rdma_errors_per_second > 0)
        printf("%-14sin %s/s, out %s/s, %.1f errors a second\n", "RDMA",
               bytes_of(signs->rdma_received_bytes_per_second, a), bytes_of(signs->rdma_sent_bytes_per_second, b),
               signs->rdma_errors_per_second);
    printf("%-14sread %s/s, written %s/s, ", "disk", bytes_of(signs->read_bytes_per_second, a),
           bytes_of(signs->written_bytes_per_second, b));
    printf("%s free for checkpoints; tasks had to wait %s of the time\n", bytes_of(signs->disk_free_bytes, a),
           share_of(signs->stall_io_ratio, b));
    printf("%-14s%ssynchronised, error about %.3f ms\n", "wall clock", signs->clock_synchronised > 0 ? "" : "not ",
           1e3 * signs->clock_error_seconds);
    printf("%-14sin %s/s, out %s/s, idle in waits %s of the time\n", "exchanges",
           bytes_of(signs->plane_received_bytes_per_second, a), bytes_of(signs->plane_sent_bytes_per_second, b),
           share_of(signs->plane_wait_ratio, c));
    if (signs->gpu)
        print_gpu(signs->gpu);
    print_links(signs);
}

static int print_timings(struct mu_cli *cli, const Muster__V1__Worker *worker)
{
    char last[8];
    snprintf(last, sizeof last, "%d", TIMINGS_SHOWN);
    char *words[] = {worker->job, (char *)(uintptr_t) "--worker", worker->name, (char *)(uintptr_t) "--last", last};
    printf("\nnewest steps\n");
    return mu_cmd_timings(cli, 5, words);
}

static int describe_worker(struct mu_cli *cli, char *name)
{
    const Muster__V1__Worker *worker = NULL;
    const Muster__V1__Account *account = NULL;
    const Muster__V1__GetGoodputResponse *goodput;
    int code = find_worker(cli, name, &worker);
    if (code != MU_EXIT_OK)
        return code;
    if (cli->json) {
        mu_cli_print_json(&worker->base, false);
        return MU_EXIT_OK;
    }
    print_worker(worker);
    if (worker->vitals)
        print_vitals(worker->vitals);
    if ((code = get_goodput(cli, worker->job, name, &account, &goodput)))
        return code;
    if (account && account->total_seconds > 0)
        print_account("time", account->seconds, account->total_seconds);
    if ((code = print_timings(cli, worker)))
        return code;
    return print_events(cli, worker->job, name);
}

int mu_cmd_describe(struct mu_cli *cli, int argc, char **argv)
{
    if (mu_cli_parse("describe", argc, argv, NULL, 0, 2, 2) < 0)
        return MU_EXIT_USAGE;
    if (strcmp(argv[0], "job") == 0)
        return describe_job(cli, argv[1]);
    if (strcmp(argv[0], "worker") == 0)
        return describe_worker(cli, argv[1]);
    return mu_cli_usage("describe", "'%s' is not allowed: job or worker", argv[0]);
}
