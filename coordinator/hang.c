#include "coordinator/hang.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/log.h"
#include "coordinator/api_parts.h"
#include "proto/standing.h"
#include "proto/wire_pb.h"

#define KEY_PREFIX "h/"

enum {
    PENDING_MAX = 4,
    WAIT_US = 2000000,
    RECORDS = 2048, /* asked of each */
    KEY_BYTES = 2 + 16,
    VERDICT_SIZE = 512,
    CULPRITS_NAMED = 4,
};

/* A report that is being made. */
struct pending {
    uint64_t recall; /* 0: none */
    uint64_t begun_us, wall_us, generation, step;
    char job[MU_JOB_NAME_SIZE], worker[MU_WORKER_NAME_SIZE]; /* nobody: on demand */
};

struct report {
    uint64_t number;
    void *bytes; /* a HangReport, packed */
    size_t size_bytes;
};

struct mu_hangs {
    const struct mu_coord *coord;
    struct mu_outbox *outbox;
    struct mu_recalls *recalls;
    struct mu_wire_arena arena;
    struct pending pending[PENDING_MAX];
    struct report reports[MU_HANG_REPORTS_KEPT]; /* number n lies at n % MU_HANG_REPORTS_KEPT */
    uint64_t newest;
    uint32_t wanted_job; /* on demand: the next job to report on; UINT32_MAX: none */
};

/* ---- where everybody stood ---- */

struct member {
    Muster__V1__ReadRecallResponse *answer;
    struct mu_standing standing;
    uint64_t quiet_us;
    bool is_culprit;
};

/* What they did when they heard of the loss is no part of how it came about. */
static void stand(struct member *member, uint64_t begun_us)
{
    const Muster__V1__ReadRecallResponse *answer = member->answer;
    uint64_t offset_us = (uint64_t)answer->clock_offset_us;
    member->standing = mu_standing_before(answer, begun_us + answer->clock_error_us - offset_us);
    uint64_t last_us = member->standing.last_us + offset_us;
    member->quiet_us = member->standing.last_us && last_us < begun_us ? begun_us - last_us : 0;
}

/* Members only; their answers are in the arena. */
static struct member *gather(struct mu_hangs *hangs, const struct pending *pending, size_t *ret_count)
{
    bool complete;
    uint32_t asked = mu_recalls_count(hangs->recalls, pending->recall, &complete);
    struct member *members = mu_wire_arena_alloc(&hangs->arena, asked * sizeof *members);
    struct mu_error err;
    *ret_count = 0;
    for (uint32_t i = 0; members && i < asked; i++) {
        struct member *member = &members[*ret_count];
        *member = (struct member){0};
        if (mu_recalls_read(hangs->recalls, &hangs->arena, pending->recall, i, &member->answer, &err) != MU_OK ||
            !member->answer->is_member)
            continue;
        stand(member, pending->begun_us);
        ++*ret_count;
    }
    return members;
}

/* Culprits first, then by rank. */
static int by_guilt(const void *a, const void *b)
{
    const struct member *x = a, *y = b;
    if (x->is_culprit != y->is_culprit)
        return x->is_culprit ? -1 : 1;
    return x->standing.rank < y->standing.rank ? -1 : x->standing.rank > y->standing.rank;
}

/* Records do not tell one that computes between two phases from one that waits there, and whose peer has died does not
 * wait any more. Then it is the one that was given up. */
static size_t judge(struct member *members, size_t count, const char *given_up)
{
    struct mu_standing *standings = malloc((count + 1) * sizeof *standings);
    size_t *culprits = malloc((count + 1) * sizeof *culprits), found = 0;
    for (size_t i = 0; standings && i < count; i++)
        standings[i] = members[i].standing;
    if (standings && culprits)
        found = mu_verdict(standings, count, culprits, count);
    for (size_t i = 0; i < found; i++)
        members[culprits[i]].is_culprit = true;
    for (size_t i = 0; i < count && found == 0; i++) {
        members[i].is_culprit = strcmp(members[i].answer->worker, given_up) == 0;
        found += members[i].is_culprit;
    }
    qsort(members, count, sizeof *members, by_guilt);
    free(standings);
    free(culprits);
    return found;
}

static void verdict_text(const struct member *members, size_t culprits, char out[VERDICT_SIZE])
{
    size_t length =
        (size_t)snprintf(out, VERDICT_SIZE, culprits ? "held up by" : "nobody is known to have held the others up");
    for (size_t i = 0; i < culprits && i < CULPRITS_NAMED; i++) {
        const struct mu_standing *standing = &members[i].standing;
        length += (size_t)snprintf(out + length, VERDICT_SIZE - length, "%s rank %u (worker %s): ", i ? ";" : "",
                                   standing->rank, members[i].answer->worker);
        if (!standing->has_answered)
            length += (size_t)snprintf(out + length, VERDICT_SIZE - length, "does not answer");
        else
            length += (size_t)snprintf(out + length, VERDICT_SIZE - length, "%s %llu for %.1f s",
                                       mu_flight_name(standing->doing), (unsigned long long)standing->number,
                                       (double)members[i].quiet_us * 1e-6);
    }
    if (culprits > CULPRITS_NAMED)
        snprintf(out + length, VERDICT_SIZE - length, "; and %zu more", culprits - CULPRITS_NAMED);
}

/* ---- reports ---- */

static void fill_standing(const struct member *member, Muster__V1__Standing *pb)
{
    *pb = mu_standing_shown(&member->standing);
    pb->worker = member->answer->worker;
    pb->host = member->answer->host;
    pb->is_culprit = member->is_culprit;
    pb->quiet_us = member->quiet_us;
}

/* Culprits', which come first, then the others', as far as there is room. Returns how many ranks' are left out. */
static uint32_t fill_threads(const struct member *members, Muster__V1__Standing *standings, size_t count)
{
    size_t left = MU_HANG_THREADS_BYTES_MAX;
    uint32_t left_out = 0;
    for (size_t i = 0; i < count; i++) {
        const Muster__V1__ReadRecallResponse *answer = members[i].answer;
        size_t bytes = 0;
        for (size_t k = 0; k < answer->n_threads; k++)
            bytes += strlen(answer->threads[k]) + 4; /* its tag and length */
        if (bytes > left) {
            left_out++;
            continue;
        }
        left -= bytes;
        standings[i].n_threads = answer->n_threads;
        standings[i].threads = answer->threads;
    }
    return left_out;
}

static enum mu_status pack(struct mu_hangs *hangs, const struct pending *pending, const void **ret_bytes,
                           size_t *ret_size, char verdict[VERDICT_SIZE], struct mu_error *err)
{
    Muster__V1__HangReport report = MUSTER__V1__HANG_REPORT__INIT;
    size_t count;
    struct member *members = gather(hangs, pending, &count);
    size_t kept = count < MU_HANG_STANDINGS_MAX ? count : MU_HANG_STANDINGS_MAX;
    Muster__V1__Standing *pb = mu_wire_arena_alloc(&hangs->arena, kept * sizeof *pb);
    report.standings = mu_wire_arena_alloc(&hangs->arena, kept * sizeof *report.standings);
    if (!members || !pb || !report.standings)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for a report of %zu members", count);
    size_t culprits = judge(members, count, pending->worker);
    verdict_text(members, culprits, verdict);
    for (size_t i = 0; i < count; i++)
        report.answered += members[i].standing.has_answered;
    for (size_t i = 0; i < kept; i++) {
        fill_standing(&members[i], &pb[i]);
        report.standings[report.n_standings++] = &pb[i];
    }
    report.threads_left_out = fill_threads(members, pb, kept) + (uint32_t)(count - kept);
    report.number = hangs->newest + 1;
    report.wall_us = pending->wall_us;
    report.job = (char *)(uintptr_t)pending->job;
    report.worker = (char *)(uintptr_t)pending->worker;
    report.generation = pending->generation;
    report.step = pending->step;
    report.asked = (uint32_t)count;
    report.verdict = verdict;
    return mu_wire_pack(&hangs->arena, &report.base, MU_WIRE_REPLY_BYTES_MAX / 2, ret_bytes, ret_size, err);
}

static void key_of(uint64_t number, char out[KEY_BYTES + 1])
{
    snprintf(out, KEY_BYTES + 1, KEY_PREFIX "%016llx", (unsigned long long)number);
}

static bool keep(struct mu_hangs *hangs, uint64_t number, const void *bytes, size_t size_bytes)
{
    struct report *slot = &hangs->reports[number % MU_HANG_REPORTS_KEPT];
    void *copy = malloc(size_bytes);
    if (!copy)
        return false;
    memcpy(copy, bytes, size_bytes);
    free(slot->bytes);
    *slot = (struct report){number, copy, size_bytes};
    hangs->newest = number > hangs->newest ? number : hangs->newest;
    return true;
}

static void make_report(struct mu_hangs *hangs, struct pending *pending)
{
    struct mu_error err;
    char key[KEY_BYTES + 1], old[KEY_BYTES + 1], verdict[VERDICT_SIZE];
    const void *bytes;
    size_t size_bytes;
    mu_wire_arena_reset(&hangs->arena);
    enum mu_status status = pack(hangs, pending, &bytes, &size_bytes, verdict, &err);
    pending->recall = 0;
    uint64_t number = hangs->newest + 1;
    key_of(number, key);
    if (status == MU_OK)
        status = mu_outbox_put(hangs->outbox, key, KEY_BYTES, bytes, size_bytes, &err);
    if (status == MU_OK && number > MU_HANG_REPORTS_KEPT) {
        key_of(number - MU_HANG_REPORTS_KEPT, old);
        status = mu_outbox_delete(hangs->outbox, old, KEY_BYTES, &err);
    }
    if (status == MU_OK && !keep(hangs, number, bytes, size_bytes))
        status = mu_fail(&err, MU_ERR_NO_MEMORY, "no memory for a report");
    if (status != MU_OK)
        MU_LOGW("no report of where the members of job %s stood: %s", pending->job, err.text);
    else if (pending->worker[0])
        MU_LOGW("job %s at step %llu, before worker %s was given up: %s (muster report hang %llu)", pending->job,
                (unsigned long long)pending->step, pending->worker, verdict, (unsigned long long)number);
    else
        MU_LOGI("job %s at step %llu, on demand: %s (muster report hang %llu)", pending->job,
                (unsigned long long)pending->step, verdict, (unsigned long long)number);
}

/* ---- when ---- */

static struct pending *find_pending(struct mu_hangs *hangs, const char *job)
{
    for (int i = 0; i < PENDING_MAX; i++)
        if (job ? hangs->pending[i].recall && strcmp(hangs->pending[i].job, job) == 0 : !hangs->pending[i].recall)
            return &hangs->pending[i];
    return NULL;
}

/* One report of a job at a time tells of all that is lost with it. */
static void begin(struct mu_hangs *hangs, const struct mu_job_record *job, const char *worker, uint64_t step)
{
    struct pending *pending = find_pending(hangs, NULL);
    struct mu_error err;
    if (!pending || find_pending(hangs, job->spec.name))
        return;
    *pending = (struct pending){
        .begun_us = mu_clock_mono_us(), .wall_us = mu_clock_wall_us(), .generation = job->generation, .step = step};
    snprintf(pending->job, sizeof pending->job, "%s", job->spec.name);
    snprintf(pending->worker, sizeof pending->worker, "%s", worker);
    if (mu_recalls_begin(hangs->recalls, job->spec.name, RECORDS, &pending->recall, &err) != MU_OK)
        MU_LOGW("the workers of job %s could not be asked what they remember: %s", job->spec.name, err.text);
}

void mu_hangs_examine(struct mu_hangs *hangs, const struct mu_coord_action *action)
{
    begin(hangs, action->examine.job, action->examine.worker, action->examine.step);
}

void mu_hangs_examine_all(struct mu_hangs *hangs)
{
    hangs->wanted_job = 0;
}

/* As many as are made at a time; the others follow. */
static void begin_wanted(struct mu_hangs *hangs)
{
    struct mu_job_view *view = hangs->wanted_job == UINT32_MAX ? NULL : malloc(sizeof *view);
    for (; view && find_pending(hangs, NULL); hangs->wanted_job++) {
        if (!mu_coord_job_view(hangs->coord, hangs->wanted_job, view)) {
            hangs->wanted_job = UINT32_MAX;
            break;
        }
        if (view->world > 0)
            begin(hangs, &view->record, "", view->steps_done);
    }
    free(view);
}

void mu_hangs_tick(struct mu_hangs *hangs, uint64_t now_us)
{
    begin_wanted(hangs);
    for (int i = 0; i < PENDING_MAX; i++) {
        struct pending *pending = &hangs->pending[i];
        bool complete;
        if (!pending->recall)
            continue;
        uint32_t asked = mu_recalls_count(hangs->recalls, pending->recall, &complete);
        if (asked == 0)
            pending->recall = 0; /* newer ones took its place */
        else if (complete || now_us >= pending->begun_us + WAIT_US)
            make_report(hangs, pending);
    }
}

uint64_t mu_hangs_next_us(const struct mu_hangs *hangs)
{
    uint64_t next_us = UINT64_MAX;
    for (int i = 0; i < PENDING_MAX; i++) {
        uint64_t due_us = hangs->pending[i].begun_us + WAIT_US;
        if (hangs->pending[i].recall && due_us < next_us)
            next_us = due_us;
    }
    return next_us;
}

/* ---- calls ---- */

static enum mu_status unpack(struct mu_hangs *hangs, const struct report *report, Muster__V1__HangReport **ret_report,
                             struct mu_error *err)
{
    const ProtobufCMessage *base = NULL;
    enum mu_status status = mu_wire_unpack(&hangs->arena, &muster__v1__hang_report__descriptor, report->bytes,
                                           report->size_bytes, MU_WIRE_REPLY_BYTES_MAX / 2, &base, err);
    *ret_report = (Muster__V1__HangReport *)(uintptr_t)base;
    return status;
}

static enum mu_status list(struct mu_hangs *hangs, const ProtobufCMessage **ret_reply, struct mu_error *err)
{
    Muster__V1__ListHangReportsResponse *reply = mu_wire_arena_alloc(&hangs->arena, sizeof *reply);
    Muster__V1__HangReport **reports = mu_wire_arena_alloc(&hangs->arena, MU_HANG_REPORTS_KEPT * sizeof *reports);
    if (!reply || !reports)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the list");
    muster__v1__list_hang_reports_response__init(reply);
    reply->reports = reports;
    for (uint64_t back = 0; back < MU_HANG_REPORTS_KEPT && back < hangs->newest; back++) {
        const struct report *report = &hangs->reports[(hangs->newest - back) % MU_HANG_REPORTS_KEPT];
        if (report->number != hangs->newest - back)
            continue;
        enum mu_status status = unpack(hangs, report, &reports[reply->n_reports], err);
        if (status)
            return status;
        reports[reply->n_reports++]->n_standings = 0;
    }
    *ret_reply = &reply->base;
    return MU_OK;
}

static enum mu_status get(struct mu_hangs *hangs, const void *base, const ProtobufCMessage **ret_reply,
                          struct mu_error *err)
{
    uint64_t number = ((const Muster__V1__GetHangReportRequest *)base)->number;
    const struct report *report = &hangs->reports[number % MU_HANG_REPORTS_KEPT];
    if (number == 0 || report->number != number)
        return mu_fail(err, MU_ERR_NOT_FOUND, "there is no hang report %llu: the newest %d are kept",
                       (unsigned long long)number, MU_HANG_REPORTS_KEPT);
    Muster__V1__GetHangReportResponse *reply = mu_wire_arena_alloc(&hangs->arena, sizeof *reply);
    if (!reply)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the report");
    muster__v1__get_hang_report_response__init(reply);
    *ret_reply = &reply->base;
    return unpack(hangs, report, &reply->report, err);
}

void mu_hangs_call(struct mu_hangs *hangs, struct mu_rpc_call *call, const void *data, size_t size_bytes)
{
    bool is_list = mu_rpc_call_method_id(call) == MU_METHOD_LIST_HANG_REPORTS;
    const ProtobufCMessageDescriptor *type =
        is_list ? &muster__v1__list_hang_reports_request__descriptor : &muster__v1__get_hang_report_request__descriptor;
    const ProtobufCMessage *request = NULL, *reply = NULL;
    struct mu_error err = {0};
    mu_wire_arena_reset(&hangs->arena);
    enum mu_status status =
        mu_wire_unpack(&hangs->arena, type, data, size_bytes, MU_WIRE_REQUEST_BYTES_MAX, &request, &err);
    if (status == MU_OK)
        status = is_list ? list(hangs, &reply, &err) : get(hangs, request, &reply, &err);
    api_answer_now(&hangs->arena, call, status, reply, &err);
}

/* ---- life ---- */

/* One that cannot be read is no reason not to start. */
static bool load_one(void *arg, const uint8_t *key, size_t key_bytes, const uint8_t *value, size_t value_bytes)
{
    struct mu_hangs *hangs = arg;
    struct mu_error err;
    const ProtobufCMessage *base = NULL;
    mu_wire_arena_reset(&hangs->arena);
    if (mu_wire_unpack(&hangs->arena, &muster__v1__hang_report__descriptor, value, value_bytes,
                       MU_WIRE_REPLY_BYTES_MAX / 2, &base, &err) != MU_OK)
        MU_LOGW("data directory: the hang report '%.*s' cannot be read: %s", (int)key_bytes, key, err.text);
    else
        (void)keep(hangs, ((const Muster__V1__HangReport *)base)->number, value, value_bytes);
    return true;
}

enum mu_status mu_hangs_new(const struct mu_coord *coord, struct mu_store *store, struct mu_outbox *outbox,
                            struct mu_recalls *recalls, struct mu_hangs **ret_hangs, struct mu_error *err)
{
    struct mu_hangs *hangs = calloc(1, sizeof *hangs);
    if (!hangs)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for hang reports");
    hangs->coord = coord;
    hangs->wanted_job = UINT32_MAX;
    hangs->outbox = outbox;
    hangs->recalls = recalls;
    mu_wire_arena_init(&hangs->arena);
    enum mu_status status = mu_store_scan(store, KEY_PREFIX, strlen(KEY_PREFIX), NULL, 0, 0, load_one, hangs, err);
    if (status != MU_OK) {
        mu_hangs_free(hangs);
        return status;
    }
    *ret_hangs = hangs;
    return MU_OK;
}

void mu_hangs_free(struct mu_hangs *hangs)
{
    if (!hangs)
        return;
    for (int i = 0; i < MU_HANG_REPORTS_KEPT; i++)
        free(hangs->reports[i].bytes);
    mu_wire_arena_fini(&hangs->arena);
    free(hangs);
}
