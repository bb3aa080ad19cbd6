/* One function per command: parse words, call, print. */
#include "cli/cli.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/event_stream.h"
#include "cli/job_file.h"
#include "common/clock.h"
#include "common/hash.h"
#include "plan/balance.h"
#include "storage/manifest.h"

#define COUNT(array) ((int)(sizeof(array) / sizeof(array)[0]))

static void hex_of(ProtobufCBinaryData bytes, char out[65])
{
    out[0] = 0;
    if (bytes.len <= 32)
        mu_hex(bytes.data, bytes.len, out);
}

int mu_cmd_submit(struct mu_cli *cli, int argc, char **argv)
{
    struct mu_error err;
    struct mu_job_spec spec;
    const char *name = NULL, *revision = "0";
    bool preflight = false;
    uint64_t expected_revision;
    const struct mu_cli_option options[] = {
        {"--name", &name, NULL}, {"--preflight", NULL, &preflight}, {"--expected-revision", &revision, NULL}};
    if (mu_cli_parse("submit", argc, argv, options, COUNT(options), 1, 1) < 0 ||
        !mu_cli_number("submit", "--expected-revision", revision, 0, INT64_MAX, &expected_revision))
        return MU_EXIT_USAGE;
    if (mu_job_file_read(argv[0], &spec, &err) != MU_OK) {
        fprintf(stderr, "muster: %s\n", err.text);
        return err.status == MU_ERR_NOT_FOUND ? MU_EXIT_NOT_FOUND : MU_EXIT_FAILURE;
    }
    if (name) {
        if (!mu_wire_name_ok(name, sizeof spec.name))
            return mu_cli_usage("submit",
                                "--name '%s' is not allowed: 1 to %d of a-z 0-9 . _ -, a letter or digit first", name,
                                MU_JOB_NAME_SIZE - 1);
        memset(spec.name, 0, sizeof spec.name);
        memcpy(spec.name, name, strlen(name));
    }
    Muster__V1__SubmitJobRequest request = MUSTER__V1__SUBMIT_JOB_REQUEST__INIT;
    request.expected_revision = expected_revision;
    request.preflight = preflight;
    if (mu_wire_spec_to_pb(&cli->arena, &spec, &request.spec, &err) != MU_OK)
        return mu_cli_fail(&err);
    char warning[MU_BALANCE_WARNING_SIZE];
    uint32_t leaves = mu_job_leaves(&spec), most = spec.workers.max < leaves ? spec.workers.max : leaves;
    if (mu_plan_leaf_warning(leaves, most, warning, sizeof warning))
        fprintf(stderr, "muster: warning: %s\n", warning);
    const Muster__V1__SubmitJobResponse *reply;
    int code = mu_cli_change_or_exit(cli, "SubmitJob", &request.base, &request.request_id,
                                     &muster__v1__submit_job_response__descriptor, &reply);
    if (code != MU_EXIT_OK)
        return code;
    if (cli->json)
        mu_cli_print_json(&reply->base, false);
    else
        printf("job %s %s: %" PRIu64
               " steps, %u leaves a step; add workers with: muster-worker --coordinator %s --job %s\n",
               spec.name, reply->existed ? "is there already" : "submitted", spec.steps, mu_job_leaves(&spec),
               cli->address, spec.name);
    if (!cli->json && reply->estimate)
        printf("%s\n%s\n", reply->estimate->slices_line, reply->estimate->layout_line);
    return MU_EXIT_OK;
}

static void add_job_row(struct mu_cli_table *table, const Muster__V1__Job *job)
{
    char tokens[16] = "-", age[16], loss[16] = "-", ckpt[40] = "-", layout[MU_CLI_LAYOUT_SIZE];
    mu_cli_age(job->last_checkpoint_wall_us, age);
    if (job->tokens_per_second > 0)
        mu_cli_count(job->tokens_per_second, tokens);
    if (job->has_result)
        snprintf(loss, sizeof loss, "%.4f", job->result->loss);
    if (job->last_checkpoint)
        snprintf(ckpt, sizeof ckpt, "%" PRIu64 " (%s ago)", job->last_checkpoint_step, age);
    mu_cli_table_add(table, "%s", job->name);
    mu_cli_table_add(table, "%s", mu_cli_enum(&muster__v1__job_state__descriptor, (int)job->state));
    mu_cli_table_add(table, "%s", mu_cli_enum(&muster__v1__job_phase__descriptor, (int)job->phase));
    mu_cli_table_add(table, "%" PRIu64 "/%" PRIu64, job->steps_done, job->steps);
    mu_cli_table_add(table, "%s", loss);
    mu_cli_table_add(table, "%s", tokens);
    mu_cli_layout(job->layout, layout);
    mu_cli_table_add(table, "%u+%u", job->world, job->spares);
    mu_cli_table_add(table, "%s", layout);
    mu_cli_table_add(table, "%" PRIu64, job->generation);
    mu_cli_table_add(table, "%s", ckpt);
}

static struct mu_cli_table *new_table(const char *const *heading, int columns)
{
    struct mu_cli_table *table = mu_cli_table_new(columns);
    for (int i = 0; i < columns; i++)
        mu_cli_table_add(table, "%s", heading[i]);
    return table;
}

static const char *const job_heading[] = {"JOB",      "STATE",   "PHASE",  "STEP",       "LOSS",
                                          "TOKENS/S", "WORKERS", "LAYOUT", "GENERATION", "CHECKPOINT"};

/* "layout tp 2 x pp 2 x dp 1: stages of layers 0-2, 3-5; optimizer sharded; 1 idle worker gives its state away" */
static void print_layout(const Muster__V1__Layout *layout)
{
    if (layout->tp * layout->pp == 1 && !layout->sharded && layout->idle == 0)
        return; /* the table says it all */
    printf("layout tp %u x pp %u x dp %u", layout->tp, layout->pp, layout->dp);
    for (size_t i = 0; i + 1 < layout->n_stage_first && layout->pp > 1; i++)
        printf("%s%u-%u", i == 0 ? ": stages of layers " : ", ", layout->stage_first[i],
               layout->stage_first[i + 1] - 1);
    if (layout->sharded)
        printf("; optimizer sharded");
    if (layout->buddy_shift)
        printf("; every worker mirrors another one");
    if (layout->idle)
        printf("; %u idle worker%s state away", layout->idle, layout->idle == 1 ? " gives its" : "s give their");
    printf("\n");
}

static int status_of_one(struct mu_cli *cli, const char *name)
{
    Muster__V1__GetJobRequest request = MUSTER__V1__GET_JOB_REQUEST__INIT;
    request.name = (char *)(uintptr_t)name;
    const Muster__V1__GetJobResponse *reply;
    int code = mu_cli_call_or_exit(cli, "GetJob", &request, &muster__v1__get_job_response__descriptor, &reply);
    if (code != MU_EXIT_OK)
        return code;
    if (cli->json) {
        mu_cli_print_json(&reply->job->base, false);
        return MU_EXIT_OK;
    }
    const Muster__V1__Job *job = reply->job;
    struct mu_cli_table *table = new_table(job_heading, COUNT(job_heading));
    add_job_row(table, job);
    mu_cli_table_print_free(table);
    if (job->text && job->text[0])
        printf("%s\n", job->text);
    if (job->layout)
        print_layout(job->layout);
    if (job->eval_step)
        printf("evaluation at step %" PRIu64 ": loss %.4f\n", job->eval_step, job->eval_loss);
    if (job->workers_lost || job->replayed_steps)
        printf("so far: %" PRIu64 " workers lost, %" PRIu64 " generations, %" PRIu64 " steps replayed\n",
               job->workers_lost, job->generations, job->replayed_steps);
    printf("revision %" PRIu64 "\n", job->revision);
    if (job->weights_sha256.len) {
        char hex[65];
        hex_of(job->weights_sha256, hex);
        printf("weights sha256 %s\n", hex);
    }
    return MU_EXIT_OK;
}

int mu_cmd_status(struct mu_cli *cli, int argc, char **argv)
{
    int words = mu_cli_parse("status", argc, argv, NULL, 0, 0, 1);
    if (words < 0)
        return MU_EXIT_USAGE;
    if (words == 1)
        return status_of_one(cli, argv[0]);
    Muster__V1__ListJobsRequest request = MUSTER__V1__LIST_JOBS_REQUEST__INIT;
    struct mu_cli_table *table = cli->json ? NULL : new_table(job_heading, COUNT(job_heading));
    int code;
    do {
        const Muster__V1__ListJobsResponse *reply;
        code = mu_cli_call_or_exit(cli, "ListJobs", &request, &muster__v1__list_jobs_response__descriptor, &reply);
        if (code != MU_EXIT_OK)
            break;
        for (size_t i = 0; i < reply->n_jobs; i++) {
            if (cli->json)
                mu_cli_print_json(&reply->jobs[i]->base, true);
            else
                add_job_row(table, reply->jobs[i]);
        }
        request.page_token = reply->next_page_token;
    } while (request.page_token[0]);
    mu_cli_table_end(table, code);
    return code;
}

static void add_worker_row(struct mu_cli_table *table, const Muster__V1__Worker *worker)
{
    bool member = worker->coordinates || worker->idle;
    mu_cli_table_add(table, "%s", worker->name);
    mu_cli_table_add(table, "%s", worker->job);
    mu_cli_table_add(table, "%s", worker->host);
    mu_cli_table_add(table, "%" PRIu64, worker->pid);
    mu_cli_table_add(table, "%s", mu_cli_enum(&muster__v1__worker_state__descriptor, (int)worker->state));
    mu_cli_table_add(table, "%s", mu_cli_enum(&muster__v1__worker_phase__descriptor, (int)worker->phase));
    if (member)
        mu_cli_table_add(table, "%u", worker->rank);
    else
        mu_cli_table_add(table, "-");
    if (worker->coordinates)
        mu_cli_table_add(table, "%u,%u,%u", worker->coordinates->dp, worker->coordinates->tp, worker->coordinates->pp);
    else
        mu_cli_table_add(table, "%s", worker->idle ? "idle" : "-");
    mu_cli_table_add(table, "%u", worker->leaves);
    mu_cli_table_add(table, "%" PRIu64, worker->step);
    if (worker->seconds_per_leaf > 0)
        mu_cli_table_add(table, "%.1f", worker->seconds_per_leaf * 1e3);
    else
        mu_cli_table_add(table, "-");
    mu_cli_table_add(table, "%.1fs", (double)worker->age_us * 1e-6);
    mu_cli_table_add(table, "%s", worker->reason);
}

int mu_cli_print_workers(struct mu_cli *cli, const char *job, const char *host)
{
    static const char *const heading[] = {"WORKER",   "JOB",    "HOST", "PID",     "STATE", "PHASE", "RANK",
                                          "DP,TP,PP", "LEAVES", "STEP", "MS/LEAF", "SEEN",  "REASON"};
    Muster__V1__ListWorkersRequest request = MUSTER__V1__LIST_WORKERS_REQUEST__INIT;
    request.job = (char *)(uintptr_t)job;
    request.page_size = 1000;
    struct mu_cli_table *table = cli->json ? NULL : new_table(heading, COUNT(heading));
    int code;
    do {
        const Muster__V1__ListWorkersResponse *reply;
        code =
            mu_cli_call_or_exit(cli, "ListWorkers", &request, &muster__v1__list_workers_response__descriptor, &reply);
        if (code != MU_EXIT_OK)
            break;
        for (size_t i = 0; i < reply->n_workers; i++) {
            if (host && strcmp(reply->workers[i]->host, host) != 0)
                continue;
            if (cli->json)
                mu_cli_print_json(&reply->workers[i]->base, true);
            else
                add_worker_row(table, reply->workers[i]);
        }
        request.page_token = reply->next_page_token;
    } while (request.page_token[0]);
    mu_cli_table_end(table, code);
    return code;
}

int mu_cmd_workers(struct mu_cli *cli, int argc, char **argv)
{
    const char *job = "";
    const struct mu_cli_option options[] = {{"--job", &job, NULL}};
    if (mu_cli_parse("workers", argc, argv, options, COUNT(options), 0, 0) < 0)
        return MU_EXIT_USAGE;
    return mu_cli_print_workers(cli, job, NULL);
}

int mu_cmd_checkpoints(struct mu_cli *cli, int argc, char **argv)
{
    static const char *const heading[] = {"NUMBER", "STEP", "STATE",      "VERIFIED",
                                          "SIZE",   "AGE",  "GENERATION", "DIRECTORY"};
    Muster__V1__ListCheckpointsRequest request = MUSTER__V1__LIST_CHECKPOINTS_REQUEST__INIT;
    if (mu_cli_parse("checkpoints", argc, argv, NULL, 0, 1, 1) < 0)
        return MU_EXIT_USAGE;
    request.job = argv[0];
    struct mu_cli_table *table = cli->json ? NULL : new_table(heading, COUNT(heading));
    int code;
    do {
        const Muster__V1__ListCheckpointsResponse *reply;
        code = mu_cli_call_or_exit(cli, "ListCheckpoints", &request, &muster__v1__list_checkpoints_response__descriptor,
                                   &reply);
        if (code != MU_EXIT_OK)
            break;
        for (size_t i = 0; i < reply->n_checkpoints; i++) {
            const Muster__V1__Checkpoint *ckpt = reply->checkpoints[i];
            char size[16], age[16];
            if (cli->json) {
                mu_cli_print_json(&ckpt->base, true);
                continue;
            }
            mu_cli_bytes(ckpt->size_bytes, size);
            mu_cli_age(ckpt->committed_wall_us, age);
            mu_cli_table_add(table, "%" PRIu64, ckpt->number);
            mu_cli_table_add(table, "%" PRIu64, ckpt->step);
            mu_cli_table_add(table, "%s%s%s", mu_cli_enum(&muster__v1__checkpoint_state__descriptor, (int)ckpt->state),
                             ckpt->borrowed_from[0] ? ", of job "
                             : ckpt->borrowers      ? ", borrowed"
                                                    : "",
                             ckpt->borrowed_from);
            mu_cli_table_add(table, "%s", ckpt->verified ? "yes" : "-");
            mu_cli_table_add(table, "%s", size);
            mu_cli_table_add(table, "%s", age);
            mu_cli_table_add(table, "%" PRIu64, ckpt->generation);
            mu_cli_table_add(table, "%s", ckpt->dir);
        }
        request.page_token = reply->next_page_token;
    } while (request.page_token[0]);
    mu_cli_table_end(table, code);
    return code;
}

static void print_report(char **dirs, size_t dir_count, bool ok, const struct mu_checkpoint_report *report)
{
    json_t *places = json_array();
    for (size_t i = 0; i < dir_count; i++)
        json_array_append_new(
            places, json_pack("{s:s*, s:I}", "dir", dirs[i], "pieces_here", (json_int_t)report->here_counts[i]));
    json_t *json = json_pack(
        "{s:s*, s:b, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:o}", "dir", dirs[0], "ok", ok, "job", report->identity.job,
        "number", (json_int_t)report->identity.seq, "step", (json_int_t)report->identity.step, "pieces",
        (json_int_t)report->piece_count, "bad_pieces", (json_int_t)report->bad_piece_count, "one_copy_pieces",
        (json_int_t)report->single_piece_count, "size_bytes", (json_int_t)report->size_bytes, "dirs", places);
    json_dumpf(json, stdout, JSON_COMPACT);
    putchar('\n');
    json_decref(json);
}

/* Which directory has how many of the pieces. */
static void print_places(FILE *to, const char *prefix, char **dirs, size_t dir_count,
                         const struct mu_checkpoint_report *report)
{
    for (size_t i = 0; i < dir_count; i++)
        fprintf(to, "%s%s: %" PRIu32 " of %zu pieces here\n", prefix, dirs[i], report->here_counts[i],
                report->piece_count);
}

/* A line for each problem; of one directory, the last one says how much of the checkpoint is good there. */
static void print_problems(char **dirs, size_t dir_count, const struct mu_checkpoint_report *report)
{
    size_t count = report->problem_count < MU_VERIFY_PROBLEMS_MAX ? report->problem_count : MU_VERIFY_PROBLEMS_MAX;
    for (size_t i = 0; i < count; i++) {
        fprintf(stderr, "muster: %s", report->problems[i].text);
        if (i + 1 == count && dir_count == 1 && report->piece_count > 0)
            fprintf(stderr, " (%" PRIu32 " of %zu pieces here)", report->here_counts[0], report->piece_count);
        fputc('\n', stderr);
    }
    if (dir_count > 1 && report->piece_count > 0)
        print_places(stderr, "muster: ", dirs, dir_count, report);
}

/* Files alone: no coordinator is asked. */
static int verify(struct mu_cli *cli, char **dirs, size_t dir_count)
{
    struct mu_error err;
    struct mu_checkpoint_report report;
    enum mu_status status = mu_checkpoint_verify_copies((const char *const *)dirs, dir_count, &report, &err);
    if (cli->json)
        print_report(dirs, dir_count, status == MU_OK, &report);
    if (status != MU_OK) {
        print_problems(dirs, dir_count, &report);
        return status == MU_ERR_NOT_FOUND ? MU_EXIT_NOT_FOUND : MU_EXIT_FAILURE;
    }
    if (cli->json)
        return MU_EXIT_OK;
    if (dir_count == 1)
        printf("%s: ", dirs[0]);
    else
        print_places(stdout, "", dirs, dir_count, &report);
    printf("checkpoint %" PRIu64 " of job %s at step %" PRIu64 " is whole: %zu pieces, %" PRIu64 " bytes verified",
           report.identity.seq, report.identity.job, report.identity.step, report.piece_count, report.size_bytes);
    if (dir_count > 1 && report.single_piece_count > 0)
        printf("; %zu in one copy only", report.single_piece_count);
    putchar('\n');
    return MU_EXIT_OK;
}

int mu_cmd_checkpoint(struct mu_cli *cli, int argc, char **argv)
{
    Muster__V1__TriggerCheckpointRequest request = MUSTER__V1__TRIGGER_CHECKPOINT_REQUEST__INIT;
    const char *revision = "0";
    const struct mu_cli_option options[] = {{"--expected-revision", &revision, NULL}};
    int words = mu_cli_parse("checkpoint", argc, argv, options, COUNT(options), 1, 1 + MU_VERIFY_DIRS_MAX);
    if (words < 0 ||
        !mu_cli_number("checkpoint", "--expected-revision", revision, 0, INT64_MAX, &request.expected_revision))
        return MU_EXIT_USAGE;
    if (words > 1) {
        if (strcmp(argv[0], "verify") != 0)
            return mu_cli_usage("checkpoint", "'%s' is not known: give a job, or 'verify DIR [DIR...]'", argv[0]);
        return verify(cli, argv + 1, (size_t)words - 1);
    }
    request.job = argv[0];
    const Muster__V1__TriggerCheckpointResponse *reply;
    int code = mu_cli_change_or_exit(cli, "TriggerCheckpoint", &request.base, &request.request_id,
                                     &muster__v1__trigger_checkpoint_response__descriptor, &reply);
    if (code != MU_EXIT_OK)
        return code;
    if (cli->json)
        mu_cli_print_json(&reply->base, false);
    else
        printf("checkpoint %" PRIu64 " of job %s ordered; its end is told by: muster events --job %s\n", reply->number,
               argv[0], argv[0]);
    return MU_EXIT_OK;
}

int mu_cmd_timings(struct mu_cli *cli, int argc, char **argv)
{
    static const char *const heading[] = {"WORKER",  "RANK",     "STEP",        "STEPS", "LEAVES",    "TOTAL",   "DATA",
                                          "FORWARD", "BACKWARD", "COMMUNICATE", "WAIT",  "OPTIMIZER", "SNAPSHOT"};
    const char *worker = "", *last = "1";
    const struct mu_cli_option options[] = {{"--worker", &worker, NULL}, {"--last", &last, NULL}};
    uint64_t per_worker;
    if (mu_cli_parse("timings", argc, argv, options, COUNT(options), 1, 1) < 0 ||
        !mu_cli_number("timings", "--last", last, 1, 64, &per_worker))
        return MU_EXIT_USAGE;
    Muster__V1__GetTimingsRequest request = MUSTER__V1__GET_TIMINGS_REQUEST__INIT;
    request.job = argv[0];
    request.worker = (char *)(uintptr_t)worker;
    request.per_worker = (uint32_t)per_worker;
    struct mu_cli_table *table = cli->json ? NULL : new_table(heading, COUNT(heading));
    int code;
    do {
        const Muster__V1__GetTimingsResponse *reply;
        code = mu_cli_call_or_exit(cli, "GetTimings", &request, &muster__v1__get_timings_response__descriptor, &reply);
        if (code != MU_EXIT_OK)
            break;
        for (size_t i = 0; i < reply->n_timings; i++) {
            const Muster__V1__Timing *t = reply->timings[i];
            if (cli->json) {
                mu_cli_print_json(&t->base, true);
                continue;
            }
            const uint64_t phases_us[] = {t->total_us,       t->data_us, t->forward_us,   t->backward_us,
                                          t->communicate_us, t->wait_us, t->optimizer_us, t->snapshot_us};
            mu_cli_table_add(table, "%s", t->worker);
            mu_cli_table_add(table, "%u", t->rank);
            mu_cli_table_add(table, "%" PRIu64, t->steps_done);
            mu_cli_table_add(table, "%u", t->step_count);
            mu_cli_table_add(table, "%u", t->leaf_count);
            for (int k = 0; k < COUNT(phases_us); k++)
                mu_cli_table_add(table, "%.2fms", (double)phases_us[k] * 1e-3 / (t->step_count ? t->step_count : 1));
        }
        request.page_token = reply->next_page_token;
    } while (request.page_token[0]);
    mu_cli_table_end(table, code);
    return code;
}

int mu_cmd_drain(struct mu_cli *cli, int argc, char **argv)
{
    const char *reason = NULL, *revision = NULL;
    const struct mu_cli_option options[] = {{"--reason", &reason, NULL}, {"--expected-revision", &revision, NULL}};
    Muster__V1__DrainWorkerRequest request = MUSTER__V1__DRAIN_WORKER_REQUEST__INIT;
    if (mu_cli_parse("drain", argc, argv, options, COUNT(options), 1, 1) < 0 ||
        (revision &&
         !mu_cli_number("drain", "--expected-revision", revision, 0, INT64_MAX, &request.expected_revision)))
        return MU_EXIT_USAGE;
    if (!reason || !reason[0])
        return mu_cli_usage("drain", "--reason TEXT is required: whoever finds the worker drained wants to know why");
    if (revision)
        request.optional_expected_revision_case =
            MUSTER__V1__DRAIN_WORKER_REQUEST__OPTIONAL_EXPECTED_REVISION_EXPECTED_REVISION;
    request.worker = argv[0];
    request.reason = (char *)(uintptr_t)reason;
    const Muster__V1__DrainWorkerResponse *reply;
    int code = mu_cli_change_or_exit(cli, "DrainWorker", &request.base, &request.request_id,
                                     &muster__v1__drain_worker_response__descriptor, &reply);
    if (code == MU_EXIT_OK && cli->json)
        mu_cli_print_json(&reply->base, false);
    else if (code == MU_EXIT_OK)
        printf("worker %s leaves at the next boundary; it may attach again after: muster undrain %s\n", argv[0],
               argv[0]);
    return code;
}

int mu_cmd_undrain(struct mu_cli *cli, int argc, char **argv)
{
    const char *revision = NULL;
    const struct mu_cli_option options[] = {{"--expected-revision", &revision, NULL}};
    Muster__V1__UndrainWorkerRequest request = MUSTER__V1__UNDRAIN_WORKER_REQUEST__INIT;
    if (mu_cli_parse("undrain", argc, argv, options, COUNT(options), 1, 1) < 0 ||
        (revision &&
         !mu_cli_number("undrain", "--expected-revision", revision, 0, INT64_MAX, &request.expected_revision)))
        return MU_EXIT_USAGE;
    if (revision)
        request.optional_expected_revision_case =
            MUSTER__V1__UNDRAIN_WORKER_REQUEST__OPTIONAL_EXPECTED_REVISION_EXPECTED_REVISION;
    request.worker = argv[0];
    const Muster__V1__UndrainWorkerResponse *reply;
    int code = mu_cli_change_or_exit(cli, "UndrainWorker", &request.base, &request.request_id,
                                     &muster__v1__undrain_worker_response__descriptor, &reply);
    if (code == MU_EXIT_OK && cli->json)
        mu_cli_print_json(&reply->base, false);
    else if (code == MU_EXIT_OK)
        printf("worker %s may attach again\n", argv[0]);
    return code;
}

int mu_cmd_scale(struct mu_cli *cli, int argc, char **argv)
{
    Muster__V1__ScaleJobRequest request = MUSTER__V1__SCALE_JOB_REQUEST__INIT;
    const char *min = NULL, *max = NULL, *spares = NULL, *revision = "0";
    uint64_t numbers[3] = {0};
    const struct mu_cli_option options[] = {{"--min", &min, NULL},
                                            {"--max", &max, NULL},
                                            {"--spares", &spares, NULL},
                                            {"--expected-revision", &revision, NULL}};
    if (mu_cli_parse("scale", argc, argv, options, COUNT(options), 1, 1) < 0 ||
        (min && !mu_cli_number("scale", "--min", min, 1, MU_WORKERS_MAX, &numbers[0])) ||
        (max && !mu_cli_number("scale", "--max", max, 1, MU_WORKERS_MAX, &numbers[1])) ||
        (spares && !mu_cli_number("scale", "--spares", spares, 0, MU_WORKERS_MAX, &numbers[2])) ||
        !mu_cli_number("scale", "--expected-revision", revision, 0, INT64_MAX, &request.expected_revision))
        return MU_EXIT_USAGE;
    if (!min && !max && !spares)
        return mu_cli_usage("scale", "give --min, --max or --spares");
    request.job = argv[0];
    request.min = (uint32_t)numbers[0];
    request.max = (uint32_t)numbers[1];
    if (spares) {
        request.optional_spares_case = MUSTER__V1__SCALE_JOB_REQUEST__OPTIONAL_SPARES_SPARES;
        request.spares = (uint32_t)numbers[2];
    }
    const Muster__V1__ScaleJobResponse *reply;
    int code = mu_cli_change_or_exit(cli, "ScaleJob", &request.base, &request.request_id,
                                     &muster__v1__scale_job_response__descriptor, &reply);
    if (code != MU_EXIT_OK)
        return code;
    const Muster__V1__WorkerPolicy *workers = reply->job->spec ? reply->job->spec->workers : NULL;
    if (cli->json)
        mu_cli_print_json(&reply->job->base, false);
    else if (workers)
        printf("job %s takes %u to %u workers and keeps %u spares (revision %" PRIu64 ")\n", argv[0], workers->min,
               workers->max, workers->spares, reply->job->revision);
    return MU_EXIT_OK;
}

int mu_cmd_cancel(struct mu_cli *cli, int argc, char **argv)
{
    Muster__V1__CancelJobRequest request = MUSTER__V1__CANCEL_JOB_REQUEST__INIT;
    const char *reason = "", *revision = "0";
    const struct mu_cli_option options[] = {{"--reason", &reason, NULL}, {"--expected-revision", &revision, NULL}};
    if (mu_cli_parse("cancel", argc, argv, options, COUNT(options), 1, 1) < 0 ||
        !mu_cli_number("cancel", "--expected-revision", revision, 0, INT64_MAX, &request.expected_revision))
        return MU_EXIT_USAGE;
    request.name = argv[0];
    request.reason = (char *)(uintptr_t)reason;
    const Muster__V1__CancelJobResponse *reply;
    int code = mu_cli_change_or_exit(cli, "CancelJob", &request.base, &request.request_id,
                                     &muster__v1__cancel_job_response__descriptor, &reply);
    if (code == MU_EXIT_OK && cli->json)
        mu_cli_print_json(&reply->base, false);
    else if (code == MU_EXIT_OK)
        printf("job %s cancelled\n", argv[0]);
    return code;
}

static void print_event(void *ctx, const Muster__V1__Event *event)
{
    const struct mu_cli *cli = ctx;
    char ts[32];
    if (cli->json) {
        mu_cli_print_json(&event->base, true);
        return;
    }
    mu_clock_format(event->wall_us, ts);
    printf("%" PRIu64 "  %s  %s%s%s%s\n", event->number, ts,
           event->severity == MUSTER__V1__EVENT_SEVERITY__EVENT_SEVERITY_ERROR ? "ERROR: " : "", event->job,
           event->job[0] ? ": " : "", event->text);
    fflush(stdout);
}

/* Fails at once, with its own exit code, when there is no such job or no coordinator: only later is waiting right. */
static int first_contact(struct mu_cli *cli, const char *job)
{
    if (job[0]) {
        Muster__V1__GetJobRequest request = MUSTER__V1__GET_JOB_REQUEST__INIT;
        request.name = (char *)(uintptr_t)job;
        const Muster__V1__GetJobResponse *reply;
        return mu_cli_call_or_exit(cli, "GetJob", &request, &muster__v1__get_job_response__descriptor, &reply);
    }
    Muster__V1__ListJobsRequest request = MUSTER__V1__LIST_JOBS_REQUEST__INIT;
    request.page_size = 1;
    const Muster__V1__ListJobsResponse *reply;
    return mu_cli_call_or_exit(cli, "ListJobs", &request, &muster__v1__list_jobs_response__descriptor, &reply);
}

int mu_cmd_events(struct mu_cli *cli, int argc, char **argv)
{
    struct mu_event_stream stream;
    struct mu_error err;
    const char *job = "", *after = "0", *newest = "0";
    bool follow = false, follow_long = false;
    uint64_t newest_count = 0;
    const struct mu_cli_option options[] = {{"--job", &job, NULL},
                                            {"--after", &after, NULL},
                                            {"--newest", &newest, NULL},
                                            {"-f", NULL, &follow},
                                            {"--follow", NULL, &follow_long}};
    mu_event_stream_init(&stream);
    if (mu_cli_parse("events", argc, argv, options, COUNT(options), 0, 0) < 0 ||
        !mu_cli_number("events", "--after", after, 0, INT64_MAX, &stream.request.after_event) ||
        !mu_cli_number("events", "--newest", newest, 0, UINT32_MAX, &newest_count))
        return MU_EXIT_USAGE;
    stream.cli = cli;
    stream.request.job = (char *)(uintptr_t)job;
    stream.request.follow = follow || follow_long;
    stream.request.newest = (uint32_t)newest_count;
    stream.show = print_event;
    stream.ctx = cli;
    int code = first_contact(cli, job);
    if (code == MU_EXIT_OK && mu_event_stream_run(&stream, &err) != MU_OK)
        code = mu_cli_fail(&err);
    return code;
}
