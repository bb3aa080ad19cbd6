/* muster debug: all that the coordinator tells about itself and its jobs, in one archive, for who is asked for help. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli/cli.h"
#include "cli/event_stream.h"
#include "cli/recall.h"
#include "common/clock.h"
#include "proto/json.h"
#include "storage/file.h"

enum { RECORDS = 2048, LINES = 512, WAIT_MS = 3000 }; /* of each worker */
enum { PAGE = 1000, TIMINGS_EACH = 64, TAR_BLOCK = 512, TOKEN_ID_DIGITS = 16, TOKEN_SECRET_DIGITS = 64 };

struct bundle {
    struct mu_cli *cli;
    char *archive; /* grows by `out` */
    size_t archive_bytes;
    FILE *out;
    char *entry; /* the one that is being written, by `text` */
    size_t entry_bytes;
    FILE *text;
    unsigned files;
};

/* ---- the archive: POSIX ustar ---- */

struct tar_header {
    char name[100], mode[8], uid[8], gid[8], size[12], mtime[12], checksum[8], type, link[100], magic[6], version[2],
        user[32], group[32], major[8], minor[8], prefix[155], padding[12];
};
_Static_assert(sizeof(struct tar_header) == TAR_BLOCK, "one block");

static void write_header(struct bundle *bundle, const char *name)
{
    struct tar_header header = {.mode = "0000600",
                                .uid = "0000000",
                                .gid = "0000000",
                                .checksum = "        ",
                                .type = '0',
                                .magic = "ustar",
                                .version = {'0', '0'}};
    snprintf(header.name, sizeof header.name, "muster-debug/%s", name);
    snprintf(header.size, sizeof header.size, "%011zo", bundle->entry_bytes);
    snprintf(header.mtime, sizeof header.mtime, "%011llo", (unsigned long long)time(NULL));
    unsigned sum = 0; /* with the checksum's own bytes as blanks */
    for (size_t i = 0; i < sizeof header; i++)
        sum += ((const unsigned char *)&header)[i];
    snprintf(header.checksum, sizeof header.checksum, "%06o", sum);
    fwrite(&header, sizeof header, 1, bundle->out);
}

static size_t digits_at(const char *text, size_t limit)
{
    size_t count = 0;
    while (count < limit && ((text[count] >= '0' && text[count] <= '9') || (text[count] >= 'a' && text[count] <= 'f')))
        count++;
    return count;
}

/* The service gives no secrets away, but people write texts: a join token in one of them is made unreadable. */
static void remove_tokens(char *text)
{
    static const char word[] = "muster-";
    while ((text = strstr(text, word))) {
        text += sizeof word - 1;
        char *secret = text + digits_at(text, TOKEN_ID_DIGITS);
        size_t length = *secret == '.' ? digits_at(secret + 1, TOKEN_SECRET_DIGITS) : 0;
        if (length == TOKEN_SECRET_DIGITS)
            memset(secret + 1, 'x', length);
    }
}

static int begin(struct bundle *bundle)
{
    bundle->text = open_memstream(&bundle->entry, &bundle->entry_bytes);
    if (bundle->text)
        return MU_EXIT_OK;
    fprintf(stderr, "muster: no memory for the bundle\n");
    return MU_EXIT_FAILURE;
}

/* Ends the entry; with a `code` other than MU_EXIT_OK it is dropped. Returns the code. */
static int end(struct bundle *bundle, const char *name, int code)
{
    static const char zeros[TAR_BLOCK];
    bool bad = ferror(bundle->text) != 0;
    bad = fclose(bundle->text) != 0 || bad;
    if (code == MU_EXIT_OK && bad) {
        fprintf(stderr, "muster: no memory for %s\n", name);
        code = MU_EXIT_FAILURE;
    }
    if (code == MU_EXIT_OK) {
        remove_tokens(bundle->entry);
        write_header(bundle, name);
        fwrite(bundle->entry, 1, bundle->entry_bytes, bundle->out);
        fwrite(zeros, 1, (TAR_BLOCK - bundle->entry_bytes % TAR_BLOCK) % TAR_BLOCK, bundle->out);
        bundle->files++;
    }
    free(bundle->entry);
    bundle->entry = NULL;
    return code;
}

static void write_json(struct bundle *bundle, const ProtobufCMessage *message)
{
    char *text = mu_json_of(message, true);
    MU_ASSERT(text);
    fprintf(bundle->text, "%s\n", text);
    free(text);
}

/* ---- what is in it ---- */

/* All pages of a list, an answer in each line. `page_token` is the request's. */
static int write_pages(struct bundle *bundle, const char *method, const void *request, char **page_token,
                       const ProtobufCMessageDescriptor *reply_type)
{
    const ProtobufCFieldDescriptor *next =
        protobuf_c_message_descriptor_get_field_by_name(reply_type, "next_page_token");
    int code = MU_EXIT_OK;
    do {
        const ProtobufCMessage *reply;
        code = mu_cli_call_or_exit(bundle->cli, method, request, reply_type, &reply);
        if (code != MU_EXIT_OK)
            return code;
        write_json(bundle, reply);
        *page_token = *(char *const *)(const void *)((const char *)reply + next->offset);
    } while ((*page_token)[0]);
    return code;
}

static int add_pages(struct bundle *bundle, const char *name, const char *method, const void *request,
                     char **page_token, const ProtobufCMessageDescriptor *reply_type)
{
    int code = begin(bundle);
    return code == MU_EXIT_OK ? end(bundle, name, write_pages(bundle, method, request, page_token, reply_type)) : code;
}

static int add_version(struct bundle *bundle)
{
    char ts[32];
    int code = begin(bundle);
    if (code != MU_EXIT_OK)
        return code;
    mu_clock_format(mu_clock_wall_us(), ts);
    fprintf(bundle->text, "{\"muster\":\"%s\",\"made\":\"%s\"}\n", MU_VERSION, ts);
    return end(bundle, "version.json", MU_EXIT_OK);
}

static int add_cluster(struct bundle *bundle)
{
    Muster__V1__ListJobsRequest jobs = MUSTER__V1__LIST_JOBS_REQUEST__INIT;
    Muster__V1__ListWorkersRequest workers = MUSTER__V1__LIST_WORKERS_REQUEST__INIT;
    Muster__V1__ListNodesRequest nodes = MUSTER__V1__LIST_NODES_REQUEST__INIT;
    jobs.page_size = workers.page_size = nodes.page_size = PAGE;
    int code = add_pages(bundle, "jobs.jsonl", "ListJobs", &jobs, &jobs.page_token,
                         &muster__v1__list_jobs_response__descriptor);
    if (code == MU_EXIT_OK)
        code = add_pages(bundle, "workers.jsonl", "ListWorkers", &workers, &workers.page_token,
                         &muster__v1__list_workers_response__descriptor);
    if (code == MU_EXIT_OK)
        code = add_pages(bundle, "nodes.jsonl", "ListNodes", &nodes, &nodes.page_token,
                         &muster__v1__list_nodes_response__descriptor);
    return code;
}

static int add_job(struct bundle *bundle, char *job)
{
    char name[2 * MU_JOB_NAME_SIZE];
    Muster__V1__ListCheckpointsRequest checkpoints = MUSTER__V1__LIST_CHECKPOINTS_REQUEST__INIT;
    Muster__V1__GetTimingsRequest timings = MUSTER__V1__GET_TIMINGS_REQUEST__INIT;
    Muster__V1__GetGoodputRequest goodput = MUSTER__V1__GET_GOODPUT_REQUEST__INIT;
    checkpoints.job = timings.job = goodput.job = job;
    checkpoints.page_size = timings.page_size = goodput.page_size = PAGE;
    timings.per_worker = TIMINGS_EACH;
    snprintf(name, sizeof name, "%s/checkpoints.jsonl", job);
    int code = add_pages(bundle, name, "ListCheckpoints", &checkpoints, &checkpoints.page_token,
                         &muster__v1__list_checkpoints_response__descriptor);
    snprintf(name, sizeof name, "%s/timings.jsonl", job);
    if (code == MU_EXIT_OK)
        code = add_pages(bundle, name, "GetTimings", &timings, &timings.page_token,
                         &muster__v1__get_timings_response__descriptor);
    snprintf(name, sizeof name, "%s/goodput.jsonl", job);
    if (code == MU_EXIT_OK)
        code = add_pages(bundle, name, "GetGoodput", &goodput, &goodput.page_token,
                         &muster__v1__get_goodput_response__descriptor);
    return code;
}

/* What its workers remember. One who may not ask them gets all the rest, and is told. */
static int add_recall(struct bundle *bundle, char *job)
{
    char name[2 * MU_JOB_NAME_SIZE];
    Muster__V1__RecallRequest request = MUSTER__V1__RECALL_REQUEST__INIT;
    const Muster__V1__ReadRecallResponse **answers;
    size_t count = 0;
    request.job = job;
    request.flight_records = RECORDS;
    request.threads = true;
    request.log_lines = LINES;
    snprintf(name, sizeof name, "%s/recall.jsonl", job);
    int code = begin(bundle);
    if (code != MU_EXIT_OK)
        return code;
    code = mu_cli_recall(bundle->cli, &request, WAIT_MS, &answers, &count);
    for (size_t i = 0; i < count; i++)
        write_json(bundle, &answers[i]->base);
    if (end(bundle, name, code) != MU_EXIT_OK)
        fprintf(stderr, "muster: the bundle has no %s\n", name);
    return MU_EXIT_OK;
}

/* Of one that is forgotten meanwhile nothing more is told; the list of jobs has what was there. */
static int add_jobs(struct bundle *bundle)
{
    Muster__V1__ListJobsRequest request = MUSTER__V1__LIST_JOBS_REQUEST__INIT;
    request.page_size = PAGE;
    int code = MU_EXIT_OK;
    do {
        const Muster__V1__ListJobsResponse *reply;
        code =
            mu_cli_call_or_exit(bundle->cli, "ListJobs", &request, &muster__v1__list_jobs_response__descriptor, &reply);
        if (code != MU_EXIT_OK)
            return code;
        for (size_t i = 0; i < reply->n_jobs && (code == MU_EXIT_OK || code == MU_EXIT_NOT_FOUND); i++) {
            if ((code = add_job(bundle, reply->jobs[i]->name)) == MU_EXIT_OK && reply->jobs[i]->attached > 0)
                code = add_recall(bundle, reply->jobs[i]->name);
        }
        request.page_token = reply->next_page_token;
    } while ((code == MU_EXIT_OK || code == MU_EXIT_NOT_FOUND) && request.page_token[0]);
    return code == MU_EXIT_NOT_FOUND ? MU_EXIT_OK : code;
}

/* Metrics and log of the coordinator, under the same conditions. */
static int add_coordinator(struct bundle *bundle)
{
    Muster__V1__ReadCoordinatorRequest request = MUSTER__V1__READ_COORDINATOR_REQUEST__INIT;
    const Muster__V1__ReadCoordinatorResponse *reply;
    request.log_lines = LINES;
    int code = mu_cli_call_or_exit(bundle->cli, "DiagnosticService/ReadCoordinator", &request,
                                   &muster__v1__read_coordinator_response__descriptor, &reply);
    if (code != MU_EXIT_OK) {
        fprintf(stderr, "muster: the bundle has no metrics.txt and no musterd.log\n");
        return MU_EXIT_OK;
    }
    if ((code = begin(bundle)) != MU_EXIT_OK)
        return code;
    fwrite(reply->metrics.data, 1, reply->metrics.len, bundle->text);
    if ((code = end(bundle, "metrics.txt", MU_EXIT_OK)) != MU_EXIT_OK || (code = begin(bundle)) != MU_EXIT_OK)
        return code;
    for (size_t i = 0; i < reply->n_log; i++)
        fprintf(bundle->text, "%s\n", reply->log[i]->text);
    return end(bundle, "musterd.log", MU_EXIT_OK);
}

static int add_hangs(struct bundle *bundle)
{
    const Muster__V1__ListHangReportsRequest request = MUSTER__V1__LIST_HANG_REPORTS_REQUEST__INIT;
    const Muster__V1__ListHangReportsResponse *list = NULL;
    int code = mu_cli_call_or_exit(bundle->cli, "DiagnosticService/ListHangReports", &request,
                                   &muster__v1__list_hang_reports_response__descriptor, &list);
    if (code != MU_EXIT_OK || (code = begin(bundle)) != MU_EXIT_OK)
        return code;
    for (size_t i = 0; i < list->n_reports && code == MU_EXIT_OK; i++) {
        Muster__V1__GetHangReportRequest which = MUSTER__V1__GET_HANG_REPORT_REQUEST__INIT;
        const Muster__V1__GetHangReportResponse *reply = NULL;
        which.number = list->reports[i]->number;
        code = mu_cli_call_or_exit(bundle->cli, "DiagnosticService/GetHangReport", &which,
                                   &muster__v1__get_hang_report_response__descriptor, &reply);
        if (code == MU_EXIT_OK)
            write_json(bundle, &reply->report->base);
    }
    return end(bundle, "hangs.jsonl", code);
}

static void write_event(void *ctx, const Muster__V1__Event *event)
{
    write_json(ctx, &event->base);
}

static int add_events(struct bundle *bundle)
{
    struct mu_event_stream stream;
    struct mu_error err;
    int code = begin(bundle);
    if (code != MU_EXIT_OK)
        return code;
    mu_event_stream_init(&stream);
    stream.cli = bundle->cli;
    stream.show = write_event;
    stream.ctx = bundle;
    if (mu_event_stream_run(&stream, &err) != MU_OK)
        code = mu_cli_refused(bundle->cli, &err);
    return end(bundle, "events.jsonl", code);
}

static int publish(struct bundle *bundle, const char *path)
{
    static const char zeros[2 * TAR_BLOCK];
    char parent[4096];
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    struct mu_error err;
    fwrite(zeros, sizeof zeros, 1, bundle->out);
    if (fflush(bundle->out) != 0 || ferror(bundle->out)) {
        fprintf(stderr, "muster: no memory for the bundle\n");
        return MU_EXIT_FAILURE;
    }
    mu_file_parent(path, parent, sizeof parent);
    if (mu_file_publish(parent, name, bundle->archive, bundle->archive_bytes, &err) != MU_OK)
        return mu_cli_fail(&err);
    printf("%s: %u files, %zu bytes\n", path, bundle->files, bundle->archive_bytes);
    return MU_EXIT_OK;
}

int mu_cmd_debug(struct mu_cli *cli, int argc, char **argv)
{
    const char *path = NULL;
    struct bundle bundle = {.cli = cli};
    const struct mu_cli_option options[] = {{"-O", &path, NULL}};
    if (mu_cli_parse("debug", argc, argv, options, 1, 1, 1) < 0)
        return MU_EXIT_USAGE;
    if (strcmp(argv[0], "bundle") != 0)
        return mu_cli_usage("debug", "'%s' is not allowed: bundle", argv[0]);
    if (!path || !path[0] || path[strlen(path) - 1] == '/')
        return mu_cli_usage("debug", "give -O FILE.tar");
    bundle.out = open_memstream(&bundle.archive, &bundle.archive_bytes);
    MU_ASSERT(bundle.out);
    int code = add_cluster(&bundle);
    if (code == MU_EXIT_OK)
        code = add_jobs(&bundle);
    if (code == MU_EXIT_OK)
        code = add_events(&bundle);
    if (code == MU_EXIT_OK)
        code = add_hangs(&bundle);
    if (code == MU_EXIT_OK)
        code = add_coordinator(&bundle);
    if (code == MU_EXIT_OK)
        code = add_version(&bundle);
    if (code == MU_EXIT_OK)
        code = publish(&bundle, path);
    fclose(bundle.out);
    free(bundle.archive);
    return code;
}
