/* muster trace: what all ranks did, on one clock, in the trace format of Chrome and Perfetto. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/recall.h"
#include "common/flight.h"

enum { WAIT_MS = 10000, DEPTH_MAX = 16 };

struct range {
    uint64_t first, last; /* steps, both included */
};

struct trace {
    FILE *file;
    bool any; /* an event has been written */
    uint64_t origin_us;
};

/* ---- which records ---- */

struct window {
    size_t begin, end;       /* records of the answer */
    uint64_t oldest, newest; /* steps that it has from their beginning on */
    bool has_steps;
};

/* From the beginning of the first step wanted to the end of the last one (or of what there is). */
static struct window window_of(const Muster__V1__ReadRecallResponse *answer, const struct range *range)
{
    struct window window = {.begin = answer->n_records, .end = answer->n_records};
    for (size_t i = 0; i < answer->n_records; i++) {
        const Muster__V1__FlightRecord *record = answer->records[i];
        if (record->kind != MUSTER__V1__FLIGHT_KIND__FLIGHT_KIND_STEP)
            continue;
        if (!record->is_end) {
            window.oldest = window.has_steps ? window.oldest : record->number;
            window.newest = record->number;
            window.has_steps = true;
        }
        if (!record->is_end && record->number >= range->first && record->number <= range->last &&
            window.begin == answer->n_records)
            window.begin = i;
        if (record->is_end && record->number <= range->last)
            window.end = record->number == range->last ? i + 1 : answer->n_records;
    }
    if (window.begin == answer->n_records)
        window.end = window.begin;
    return window;
}

/* ---- writing ---- */

static void put(struct trace *trace, const Muster__V1__ReadRecallResponse *answer,
                const Muster__V1__FlightRecord *record, const char *phase)
{
    uint64_t at_us = mu_cli_recall_time(answer, record->at_us);
    fprintf(trace->file, "%s\n{\"ph\":\"%s\",\"pid\":%u,\"tid\":1,\"ts\":%" PRIu64 ",\"name\":\"%s\"",
            trace->any ? "," : "", phase, answer->rank, at_us - trace->origin_us,
            mu_flight_name((unsigned)record->kind));
    trace->any = true;
}

static void put_span(struct trace *trace, const Muster__V1__ReadRecallResponse *answer,
                     const Muster__V1__FlightRecord *record)
{
    put(trace, answer, record, record->is_end ? "E" : "B");
    fprintf(trace->file, ",\"args\":{\"number\":%" PRIu64 "}}", record->number);
}

/* Exchanges overlap each other and the spans: they have tracks of their own, one for each number and peer. */
static void put_exchange(struct trace *trace, const Muster__V1__ReadRecallResponse *answer,
                         const Muster__V1__FlightRecord *record)
{
    put(trace, answer, record, record->is_end ? "e" : "b");
    fprintf(trace->file,
            ",\"cat\":\"exchange\",\"id\":\"%u.%d.%u.%" PRIu64 "\",\"args\":{\"peer\":%u,\"bytes\":%" PRIu64 "}}",
            answer->rank, (int)record->kind, record->peer, record->number, record->peer, record->bytes);
}

static void put_moment(struct trace *trace, const Muster__V1__ReadRecallResponse *answer,
                       const Muster__V1__FlightRecord *record)
{
    put(trace, answer, record, "i");
    fprintf(trace->file, ",\"s\":\"t\",\"args\":{\"peer\":%u,\"number\":%" PRIu64 "}}", record->peer, record->number);
}

static void put_names(struct trace *trace, const Muster__V1__ReadRecallResponse *answer)
{
    fprintf(trace->file,
            "%s\n{\"ph\":\"M\",\"pid\":%u,\"name\":\"process_name\",\"args\":{\"name\":\"rank %u: %s on "
            "%s\",\"clock_error_us\":%" PRIu64 "}},\n"
            "{\"ph\":\"M\",\"pid\":%u,\"tid\":1,\"name\":\"thread_name\",\"args\":{\"name\":\"engine\"}}",
            trace->any ? "," : "", answer->rank, answer->rank, answer->worker, answer->host, answer->clock_error_us,
            answer->rank);
    trace->any = true;
}

/* Spans nest; where a generation broke off, those that were open end with it. */
static void put_worker(struct trace *trace, const Muster__V1__ReadRecallResponse *answer, const struct window *window)
{
    const Muster__V1__FlightRecord *open[DEPTH_MAX];
    int depth = 0;
    put_names(trace, answer);
    for (size_t i = window->begin; i < window->end; i++) {
        const Muster__V1__FlightRecord *record = answer->records[i];
        if (mu_flight_is_exchange((unsigned)record->kind)) {
            put_exchange(trace, answer, record);
        } else if (record->kind == MUSTER__V1__FLIGHT_KIND__FLIGHT_KIND_PARKED ||
                   record->kind == MUSTER__V1__FLIGHT_KIND__FLIGHT_KIND_PEER_FAILED) {
            put_moment(trace, answer, record);
            for (; record->kind == MUSTER__V1__FLIGHT_KIND__FLIGHT_KIND_PARKED && depth > 0; depth--) {
                Muster__V1__FlightRecord end = *open[depth - 1];
                end.is_end = true;
                end.at_us = record->at_us;
                put_span(trace, answer, &end);
            }
        } else if (!record->is_end && depth < DEPTH_MAX) {
            open[depth++] = record;
            put_span(trace, answer, record);
        } else if (record->is_end && depth > 0 && open[depth - 1]->kind == record->kind) {
            depth--;
            put_span(trace, answer, record);
        }
    }
}

/* ---- the command ---- */

static bool read_range(const char *text, struct range *range)
{
    char *end;
    if (!text)
        return true;
    errno = 0;
    range->first = strtoull(text, &end, 10);
    if (end == text || *end != ':' || text[0] == '-')
        return false;
    const char *second = end + 1;
    range->last = strtoull(second, &end, 10);
    return end != second && *end == 0 && second[0] != '-' && errno == 0 && range->first <= range->last;
}

static int write_trace(struct trace *trace, const Muster__V1__ReadRecallResponse **answers, size_t count,
                       const struct range *range)
{
    size_t written = 0;
    trace->origin_us = UINT64_MAX;
    for (size_t i = 0; i < count; i++) {
        struct window window = window_of(answers[i], range);
        uint64_t at_us = window.begin < window.end
                             ? mu_cli_recall_time(answers[i], answers[i]->records[window.begin]->at_us)
                             : UINT64_MAX;
        trace->origin_us = at_us < trace->origin_us ? at_us : trace->origin_us;
    }
    fprintf(trace->file, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[");
    for (size_t i = 0; i < count; i++) {
        const Muster__V1__ReadRecallResponse *answer = answers[i];
        struct window window = window_of(answer, range);
        if (!answer->is_complete)
            fprintf(stderr, "worker %s has not answered\n", answer->worker);
        else if (answer->is_member && window.begin == window.end)
            fprintf(stderr, "worker %s has none of these steps%s\n", answer->worker,
                    window.has_steps ? "" : ", nor any");
        if (window.has_steps && window.begin == window.end)
            fprintf(stderr, "  it has steps %" PRIu64 " to %" PRIu64 "\n", window.oldest, window.newest);
        if (window.begin == window.end)
            continue;
        put_worker(trace, answer, &window);
        written++;
    }
    fprintf(trace->file, "\n]}\n");
    return written ? MU_EXIT_OK : MU_EXIT_NOT_FOUND;
}

int mu_cmd_trace(struct mu_cli *cli, int argc, char **argv)
{
    const char *steps = NULL, *out = NULL;
    struct range range = {.last = UINT64_MAX};
    const struct mu_cli_option options[] = {{.name = "--steps", .value = &steps}, {.name = "--out", .value = &out}};
    if (mu_cli_parse("trace", argc, argv, options, 2, 1, 1) < 0)
        return MU_EXIT_USAGE;
    if (!read_range(steps, &range))
        return mu_cli_usage("trace", "--steps '%s' is not allowed: FIRST:LAST", steps);
    if (!out)
        return mu_cli_usage("trace", "--out FILE is required");
    Muster__V1__RecallRequest request = MUSTER__V1__RECALL_REQUEST__INIT;
    const Muster__V1__ReadRecallResponse **answers;
    size_t count;
    request.job = argv[0];
    request.flight_records = MU_FLIGHT_RECORDS;
    int code = mu_cli_recall(cli, &request, WAIT_MS, &answers, &count);
    if (code != MU_EXIT_OK)
        return code;
    struct trace trace = {.file = fopen(out, "we")};
    if (!trace.file) {
        fprintf(stderr, "muster: cannot write '%s': %s\n", out, strerror(errno));
        return MU_EXIT_FAILURE;
    }
    code = write_trace(&trace, answers, count, &range);
    bool failed = ferror(trace.file) != 0;
    if (fclose(trace.file) != 0 || failed) {
        fprintf(stderr, "muster: '%s' could not be written: %s\n", out, strerror(errno));
        return MU_EXIT_FAILURE;
    }
    if (code == MU_EXIT_OK)
        printf("%s: open it at https://ui.perfetto.dev or in chrome://tracing\n", out);
    return code;
}
