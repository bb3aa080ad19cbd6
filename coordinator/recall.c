#include "coordinator/recall.h"

#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "coordinator/api_parts.h"
#include "muster/v1/recall.pb-c.h"
#include "proto/wire_pb.h"

enum { REPORT_RECORDS_MAX = 4 << 20 }; /* of all members together */

/* One worker, and what it has answered. */
struct asked {
    char worker[MU_WORKER_NAME_SIZE], host[MU_WORKER_NAME_SIZE];
    struct mu_id incarnation;
    bool is_member, is_complete, is_gone; /* gone: it was not asked */
    uint32_t rank;
    uint64_t asked_us;         /* own clock */
    int64_t least_us, most_us; /* between these is what its clock is behind */
    struct mu_rpc_bytes *parts[MU_RECALL_PARTS_MAX];
    uint32_t part_count;
};

struct recall {
    uint64_t number; /* 0: free */
    uint32_t count;
    struct asked *asked;
    size_t bytes;
};

struct mu_recalls {
    const struct mu_coord *coord;
    struct mu_sessions *sessions;
    struct mu_wire_arena arena;
    struct recall kept[MU_RECALLS_KEPT]; /* number n lies at n % MU_RECALLS_KEPT */
    uint64_t newest;
    size_t bytes;
};

/* ---- what is kept ---- */

static void drop(struct mu_recalls *recalls, struct recall *recall)
{
    for (uint32_t i = 0; i < recall->count; i++)
        for (uint32_t k = 0; k < recall->asked[i].part_count; k++)
            mu_rpc_bytes_unref(recall->asked[i].parts[k]);
    free(recall->asked);
    recalls->bytes -= recall->bytes;
    *recall = (struct recall){0};
}

static struct recall *find(struct mu_recalls *recalls, uint64_t number)
{
    struct recall *recall = &recalls->kept[number % MU_RECALLS_KEPT];
    return number != 0 && recall->number == number ? recall : NULL;
}

/* Older ones go first; the newest one keeps what it has. */
static bool make_room(struct mu_recalls *recalls, size_t bytes)
{
    for (uint64_t back = MU_RECALLS_KEPT - 1; back > 0 && recalls->bytes + bytes > MU_RECALLS_BYTES_MAX; back--) {
        struct recall *old = back < recalls->newest ? find(recalls, recalls->newest - back) : NULL;
        if (old)
            drop(recalls, old);
    }
    return recalls->bytes + bytes <= MU_RECALLS_BYTES_MAX;
}

/* ---- asking ---- */

static bool can_answer(const struct mu_worker_view *view)
{
    return view->session != 0 && view->state != MU_WS_LOST;
}

static bool is_wanted(const Muster__V1__RecallRequest *request, const struct mu_worker_view *view, bool also_gone)
{
    if (!can_answer(view) && !(also_gone && view->rank != UINT32_MAX))
        return false;
    return request->worker[0] ? strcmp(view->name, request->worker) == 0 : strcmp(view->job, request->job) == 0;
}

static void note(struct asked *asked, const struct mu_worker_view *view)
{
    memcpy(asked->worker, view->name, sizeof asked->worker);
    memcpy(asked->host, view->host, sizeof asked->host);
    asked->incarnation = view->incarnation;
    asked->is_gone = !can_answer(view);
    asked->is_member = view->rank != UINT32_MAX;
    asked->rank = asked->is_member ? view->rank : 0;
    asked->asked_us = mu_clock_mono_us();
}

/* A stream that takes nothing more has its own way of ending: the question is lost with it. */
static void ask(struct mu_recalls *recalls, uint64_t session_number, struct mu_rpc_bytes *bytes)
{
    struct mu_session *session = mu_sessions_find(recalls->sessions, session_number);
    if (session && !session->closing && mu_rpc_call_send(session->call, bytes) != MU_OK)
        return;
}

static enum mu_status encode(struct mu_recalls *recalls, const Muster__V1__RecallRequest *request, uint64_t number,
                             struct mu_rpc_bytes **ret_bytes, struct mu_error *err)
{
    struct mu_coord_message message = {.kind = MU_CM_RECALL};
    message.recall = (struct mu_recall){.number = number,
                                        .flight_records = request->flight_records,
                                        .threads = request->threads,
                                        .log_lines = request->log_lines,
                                        .log_after = request->log_after};
    const void *data;
    size_t size_bytes;
    enum mu_status status = mu_wire_encode_coord(&recalls->arena, &message, &data, &size_bytes, err);
    if (status == MU_OK)
        *ret_bytes = mu_rpc_bytes_copy(data, size_bytes);
    return status;
}

static enum mu_status check_request(const Muster__V1__RecallRequest *request, struct mu_error *err)
{
    char name[MU_WORKER_NAME_SIZE];
    bool by_worker = request->worker[0] != 0;
    if (by_worker == (request->job[0] != 0))
        return mu_fail(err, MU_ERR_INVALID, "RecallRequest: either job or worker is needed, and not both");
    if (request->flight_records > MU_RECALL_RECORDS_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "RecallRequest.flight_records: value %u is not allowed: at most %d",
                       request->flight_records, MU_RECALL_RECORDS_MAX);
    if (request->log_lines > MU_RECALL_LINES_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "RecallRequest.log_lines: value %u is not allowed: at most %d",
                       request->log_lines, MU_RECALL_LINES_MAX);
    if (!request->flight_records && !request->threads && !request->log_lines)
        return mu_fail(err, MU_ERR_INVALID, "RecallRequest: nothing is asked for");
    return mu_wire_get_string(by_worker ? request->worker : request->job, MU_WIRE_NAME,
                              by_worker ? "RecallRequest.worker" : "RecallRequest.job", name,
                              by_worker ? MU_WORKER_NAME_SIZE : MU_JOB_NAME_SIZE, err);
}

static enum mu_status count_wanted(const struct mu_recalls *recalls, const Muster__V1__RecallRequest *request,
                                   bool also_gone, uint32_t *ret_count, struct mu_error *err)
{
    struct mu_worker_view view;
    struct mu_job_view job;
    if (request->job[0] && !mu_coord_job_find(recalls->coord, request->job, &job))
        return mu_fail_for(err, MU_ERR_NOT_FOUND, MU_REASON_JOB_UNKNOWN, 0, "there is no job '%s'", request->job);
    for (uint32_t slot = 0; slot < mu_coord_worker_slots(recalls->coord); slot++)
        *ret_count += mu_coord_worker_view(recalls->coord, slot, &view) && is_wanted(request, &view, also_gone);
    if (!also_gone && *ret_count > MU_RECALL_WORKERS_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "job '%s' has %u workers, and at most %d can be asked at once: name a worker",
                       request->job, *ret_count, MU_RECALL_WORKERS_MAX);
    if (*ret_count == 0 && request->worker[0])
        return mu_fail(err, MU_ERR_NOT_FOUND, "there is no attached worker '%s'", request->worker);
    return *ret_count ? MU_OK : mu_fail(err, MU_ERR_NOT_FOUND, "job '%s' has no attached workers", request->job);
}

/* For a report those that are gone are listed, too, and however many there are, all have room. */
static enum mu_status begin(struct mu_recalls *recalls, Muster__V1__RecallRequest *request, bool for_report,
                            struct recall **ret_recall, struct mu_error *err)
{
    struct mu_rpc_bytes *bytes = NULL;
    uint32_t count = 0;
    enum mu_status status;
    if ((status = check_request(request, err)) || (status = count_wanted(recalls, request, for_report, &count, err)))
        return status;
    if (for_report && request->flight_records > REPORT_RECORDS_MAX / count)
        request->flight_records = REPORT_RECORDS_MAX / count;
    if ((status = encode(recalls, request, recalls->newest + 1, &bytes, err)))
        return status;
    struct asked *asked = calloc(count, sizeof *asked);
    if (!asked) {
        mu_rpc_bytes_unref(bytes);
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory to ask %u workers", count);
    }
    struct recall *recall = &recalls->kept[++recalls->newest % MU_RECALLS_KEPT];
    drop(recalls, recall);
    *recall = (struct recall){.number = recalls->newest, .asked = asked};
    struct mu_worker_view view;
    for (uint32_t slot = 0; slot < mu_coord_worker_slots(recalls->coord) && recall->count < count; slot++) {
        if (!mu_coord_worker_view(recalls->coord, slot, &view) || !is_wanted(request, &view, for_report))
            continue;
        note(&asked[recall->count++], &view);
        if (can_answer(&view))
            ask(recalls, view.session, bytes);
    }
    mu_rpc_bytes_unref(bytes);
    *ret_recall = recall;
    return MU_OK;
}

static enum mu_status on_recall(struct mu_recalls *recalls, const void *base, const ProtobufCMessage **ret_reply,
                                struct mu_error *err)
{
    Muster__V1__RecallRequest request = *(const Muster__V1__RecallRequest *)base;
    struct recall *recall;
    enum mu_status status = begin(recalls, &request, false, &recall, err);
    if (status)
        return status;
    Muster__V1__RecallResponse *reply = mu_wire_arena_alloc(&recalls->arena, sizeof *reply);
    char **names = mu_wire_arena_alloc(&recalls->arena, recall->count * sizeof *names);
    if (!reply || !names)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the names of %u workers", recall->count);
    for (uint32_t i = 0; i < recall->count; i++)
        names[i] = recall->asked[i].worker;
    muster__v1__recall_response__init(reply);
    reply->number = recall->number;
    reply->n_workers = recall->count;
    reply->workers = names;
    *ret_reply = &reply->base;
    return MU_OK;
}

enum mu_status mu_recalls_begin(struct mu_recalls *recalls, const char *job, uint32_t flight_records,
                                uint64_t *ret_number, struct mu_error *err)
{
    Muster__V1__RecallRequest request = MUSTER__V1__RECALL_REQUEST__INIT;
    struct recall *recall;
    request.job = (char *)(uintptr_t)job;
    request.flight_records = flight_records;
    request.threads = true;
    mu_wire_arena_reset(&recalls->arena);
    enum mu_status status = begin(recalls, &request, true, &recall, err);
    if (status == MU_OK)
        *ret_number = recall->number;
    return status;
}

/* ---- answers ---- */

static struct asked *find_asked(const struct recall *recall, struct mu_id incarnation)
{
    for (uint32_t i = 0; recall && i < recall->count; i++)
        if (mu_id_equal(recall->asked[i].incarnation, incarnation))
            return &recall->asked[i];
    return NULL;
}

static enum mu_status on_recollect(struct mu_recalls *recalls, const void *base, const void *data, size_t size_bytes,
                                   const ProtobufCMessage **ret_reply, struct mu_error *err)
{
    static const Muster__V1__RecollectResponse reply = MUSTER__V1__RECOLLECT_RESPONSE__INIT;
    const Muster__V1__Recollection *part = base;
    struct mu_id incarnation;
    enum mu_status status = mu_wire_get_id(part->incarnation, "Recollection.incarnation", &incarnation, err);
    if (status)
        return status;
    struct recall *recall = find(recalls, part->number);
    struct asked *asked = find_asked(recall, incarnation);
    if (!asked)
        return mu_fail(err, MU_ERR_NOT_FOUND, "recall %llu does not wait for this worker (any more)",
                       (unsigned long long)part->number);
    if (asked->is_complete || part->part != asked->part_count || part->part >= MU_RECALL_PARTS_MAX)
        return mu_fail(err, MU_ERR_INVALID, "Recollection.part: %u is not the one that follows", part->part);
    if (!make_room(recalls, size_bytes))
        return mu_fail(err, MU_ERR_LIMIT, "recall %llu has no room for more: %d MiB are kept",
                       (unsigned long long)part->number, MU_RECALLS_BYTES_MAX >> 20);
    int64_t least_us = (int64_t)(asked->asked_us - part->asked_us);
    int64_t most_us = (int64_t)(mu_clock_mono_us() - part->sent_us);
    asked->least_us = least_us;
    asked->most_us = part->part == 0 || most_us < asked->most_us ? most_us : asked->most_us;
    asked->parts[asked->part_count++] = mu_rpc_bytes_copy(data, size_bytes);
    asked->is_complete = part->is_last;
    recall->bytes += size_bytes;
    recalls->bytes += size_bytes;
    *ret_reply = &reply.base;
    return MU_OK;
}

/* The three lists of all parts, one behind the other. */
static enum mu_status merge(struct mu_wire_arena *arena, const struct asked *asked,
                            Muster__V1__ReadRecallResponse *reply, struct mu_error *err)
{
    const Muster__V1__Recollection *parts[MU_RECALL_PARTS_MAX];
    size_t records = 0, threads = 0, lines = 0;
    for (uint32_t i = 0; i < asked->part_count; i++) {
        const ProtobufCMessage *base = NULL;
        enum mu_status status =
            mu_wire_unpack(arena, &muster__v1__recollection__descriptor, mu_rpc_bytes_data(asked->parts[i]),
                           mu_rpc_bytes_size(asked->parts[i]), MU_WIRE_REQUEST_BYTES_MAX, &base, err);
        if (status)
            return status;
        parts[i] = (const Muster__V1__Recollection *)base;
        records += parts[i]->n_records;
        threads += parts[i]->n_threads;
        lines += parts[i]->n_log;
    }
    reply->records = mu_wire_arena_alloc(arena, records * sizeof *reply->records);
    reply->threads = mu_wire_arena_alloc(arena, threads * sizeof *reply->threads);
    reply->log = mu_wire_arena_alloc(arena, lines * sizeof *reply->log);
    if (!reply->records || !reply->threads || !reply->log)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for what %s has answered", asked->worker);
    for (uint32_t i = 0; i < asked->part_count; i++) {
        for (size_t k = 0; k < parts[i]->n_records; k++)
            reply->records[reply->n_records++] = parts[i]->records[k];
        for (size_t k = 0; k < parts[i]->n_threads; k++)
            reply->threads[reply->n_threads++] = parts[i]->threads[k];
        for (size_t k = 0; k < parts[i]->n_log; k++)
            reply->log[reply->n_log++] = parts[i]->log[k];
    }
    return MU_OK;
}

enum mu_status mu_recalls_read(struct mu_recalls *recalls, struct mu_wire_arena *arena, uint64_t number, uint32_t index,
                               Muster__V1__ReadRecallResponse **ret_answer, struct mu_error *err)
{
    const struct recall *recall = find(recalls, number);
    if (!recall)
        return mu_fail(err, MU_ERR_NOT_FOUND, "there is no recall %llu: the newest %d are kept, in memory",
                       (unsigned long long)number, MU_RECALLS_KEPT);
    if (index >= recall->count)
        return mu_fail(err, MU_ERR_INVALID, "ReadRecallRequest.index: value %u is not allowed: %u workers were asked",
                       index, recall->count);
    const struct asked *asked = &recall->asked[index];
    Muster__V1__ReadRecallResponse *reply = mu_wire_arena_alloc(arena, sizeof *reply);
    if (!reply)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for what %s has answered", asked->worker);
    muster__v1__read_recall_response__init(reply);
    reply->worker = (char *)(uintptr_t)asked->worker;
    reply->host = (char *)(uintptr_t)asked->host;
    reply->is_member = asked->is_member;
    reply->rank = asked->rank;
    reply->is_complete = asked->is_complete;
    reply->asked_us = asked->asked_us;
    reply->incarnation = mu_wire_put_id(arena, asked->incarnation);
    if (asked->part_count > 0 && asked->most_us >= asked->least_us) { /* else its clock makes no sense */
        reply->clock_error_us = (uint64_t)(asked->most_us - asked->least_us) / 2;
        reply->clock_offset_us = asked->least_us + (int64_t)reply->clock_error_us;
    }
    *ret_answer = reply;
    return merge(arena, asked, reply, err);
}

uint32_t mu_recalls_count(struct mu_recalls *recalls, uint64_t number, bool *ret_complete)
{
    const struct recall *recall = find(recalls, number);
    *ret_complete = true;
    for (uint32_t i = 0; recall && i < recall->count; i++)
        *ret_complete = *ret_complete && (recall->asked[i].is_complete || recall->asked[i].is_gone);
    return recall ? recall->count : 0;
}

static enum mu_status on_read(struct mu_recalls *recalls, const void *base, const ProtobufCMessage **ret_reply,
                              struct mu_error *err)
{
    const Muster__V1__ReadRecallRequest *request = base;
    Muster__V1__ReadRecallResponse *answer;
    enum mu_status status = mu_recalls_read(recalls, &recalls->arena, request->number, request->index, &answer, err);
    if (status == MU_OK)
        *ret_reply = &answer->base;
    return status;
}

/* ---- calls ---- */

static enum mu_status handle(struct mu_recalls *recalls, int method, const void *data, size_t size_bytes,
                             const ProtobufCMessage **ret_reply, struct mu_error *err)
{
    const ProtobufCMessageDescriptor *types[] = {&muster__v1__recall_request__descriptor,
                                                 &muster__v1__read_recall_request__descriptor,
                                                 &muster__v1__recollection__descriptor};
    const ProtobufCMessage *request = NULL;
    mu_wire_arena_reset(&recalls->arena);
    enum mu_status status = mu_wire_unpack(&recalls->arena, types[method - MU_METHOD_RECALL], data, size_bytes,
                                           MU_WIRE_REQUEST_BYTES_MAX, &request, err);
    if (status)
        return status;
    if (method == MU_METHOD_RECOLLECT)
        return on_recollect(recalls, request, data, size_bytes, ret_reply, err);
    return method == MU_METHOD_RECALL ? on_recall(recalls, request, ret_reply, err)
                                      : on_read(recalls, request, ret_reply, err);
}

void mu_recalls_call(struct mu_recalls *recalls, struct mu_rpc_call *call, const void *data, size_t size_bytes)
{
    struct mu_error err = {0};
    const ProtobufCMessage *reply = NULL;
    enum mu_status status = handle(recalls, mu_rpc_call_method_id(call), data, size_bytes, &reply, &err);
    api_answer_now(&recalls->arena, call, status, reply, &err);
}

/* ---- life ---- */

enum mu_status mu_recalls_new(const struct mu_coord *coord, struct mu_sessions *sessions,
                              struct mu_recalls **ret_recalls, struct mu_error *err)
{
    struct mu_recalls *recalls = calloc(1, sizeof *recalls);
    if (!recalls)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for recalls");
    recalls->coord = coord;
    recalls->sessions = sessions;
    mu_wire_arena_init(&recalls->arena);
    *ret_recalls = recalls;
    return MU_OK;
}

void mu_recalls_free(struct mu_recalls *recalls)
{
    if (!recalls)
        return;
    for (int i = 0; i < MU_RECALLS_KEPT; i++)
        drop(recalls, &recalls->kept[i]);
    mu_wire_arena_fini(&recalls->arena);
    free(recalls);
}
