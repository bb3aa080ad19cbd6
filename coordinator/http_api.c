#include "coordinator/http_api.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "coordinator/question.h"
#include "coordinator/series.h"
#include "proto/json.h"
#include "proto/wire_pb.h"

enum { REQUEST_SIZE_MAX = 256 };

struct route {
    const char *path;
    enum mu_question_kind kind;
    int method;
    const ProtobufCMessageDescriptor *request, *reply;
};
static const struct route routes[] = {
    {"jobs", MU_ASK_METHOD, MU_METHOD_LIST_JOBS, &muster__v1__list_jobs_request__descriptor,
     &muster__v1__list_jobs_response__descriptor},
    {"job", MU_ASK_METHOD, MU_METHOD_GET_JOB, &muster__v1__get_job_request__descriptor,
     &muster__v1__get_job_response__descriptor},
    {"workers", MU_ASK_METHOD, MU_METHOD_LIST_WORKERS, &muster__v1__list_workers_request__descriptor,
     &muster__v1__list_workers_response__descriptor},
    {"checkpoints", MU_ASK_METHOD, MU_METHOD_LIST_CHECKPOINTS, &muster__v1__list_checkpoints_request__descriptor,
     &muster__v1__list_checkpoints_response__descriptor},
    {"timings", MU_ASK_METHOD, MU_METHOD_GET_TIMINGS, &muster__v1__get_timings_request__descriptor,
     &muster__v1__get_timings_response__descriptor},
    {"goodput", MU_ASK_METHOD, MU_METHOD_GET_GOODPUT, &muster__v1__get_goodput_request__descriptor,
     &muster__v1__get_goodput_response__descriptor},
    {"events", MU_ASK_EVENTS, 0, &muster__v1__watch_events_request__descriptor,
     &muster__v1__watch_events_response__descriptor},
};

static void reply_error(struct mu_http_reply *reply, const struct mu_error *err)
{
    switch (err->status) {
    case MU_ERR_INVALID:
        reply->status = 400;
        break;
    case MU_ERR_NOT_FOUND:
        reply->status = 404;
        break;
    default:
        reply->status = 503;
        break;
    }
    json_t *json = json_pack("{s:s}", "error", err->text);
    reply->body = json_dumps(json, JSON_COMPACT);
    json_decref(json);
}

/* ---- the query ---- */

struct filling {
    ProtobufCMessage *message;
    struct mu_wire_arena *arena;
    struct mu_error err;
};

static bool parse_number(const char *text, uint64_t most, uint64_t *ret_value)
{
    char *end = NULL;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end || errno || value > most)
        return false;
    *ret_value = value;
    return true;
}

/* A field of the request, by its name. */
static bool fill_field(void *ctx, const char *name, const char *value)
{
    struct filling *filling = ctx;
    const ProtobufCFieldDescriptor *field =
        protobuf_c_message_descriptor_get_field_by_name(filling->message->descriptor, name);
    uint64_t number = 0;
    if (!field) {
        mu_fail(&filling->err, MU_ERR_INVALID, "there is no parameter '%.40s'", name);
        return false;
    }
    char *at = (char *)filling->message + field->offset;
    switch (field->type) {
    case PROTOBUF_C_TYPE_STRING: {
        size_t size = strlen(value) + 1;
        char *copy = mu_wire_arena_alloc(filling->arena, size);
        if (copy)
            memcpy(copy, value, size);
        if (copy && mu_wire_text_ok(copy, size))
            *(char **)at = copy;
        else
            mu_fail(&filling->err, MU_ERR_INVALID, "%s: the value is not allowed", name);
        break;
    }
    case PROTOBUF_C_TYPE_UINT32:
        if (parse_number(value, UINT32_MAX, &number))
            *(uint32_t *)at = (uint32_t)number;
        else
            mu_fail(&filling->err, MU_ERR_INVALID, "%s: a whole number up to %u is allowed", name, UINT32_MAX);
        break;
    case PROTOBUF_C_TYPE_UINT64:
        if (parse_number(value, INT64_MAX, &number))
            *(uint64_t *)at = number;
        else
            mu_fail(&filling->err, MU_ERR_INVALID, "%s: a whole number is allowed", name);
        break;
    default:
        mu_fail(&filling->err, MU_ERR_INVALID, "there is no parameter '%.40s' here", name);
        break;
    }
    return filling->err.status == MU_OK;
}

/* ---- answers ---- */

static char *json_of_events(struct mu_wire_arena *arena, const struct mu_question_answer *answer)
{
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    if (!out)
        return NULL;
    fputs("{\"events\":[", out);
    for (uint32_t i = 0; i < answer->event_count; i++) {
        const ProtobufCMessage *message = NULL;
        struct mu_error ignored;
        if (mu_wire_unpack(arena, &muster__v1__watch_events_response__descriptor, mu_rpc_bytes_data(answer->events[i]),
                           mu_rpc_bytes_size(answer->events[i]), MU_WIRE_REPLY_BYTES_MAX, &message, &ignored) != MU_OK)
            continue;
        char *event = mu_json_of(&((const Muster__V1__WatchEventsResponse *)message)->event->base, true);
        fprintf(out, "%s%s", i ? "," : "", event ? event : "null");
        free(event);
    }
    fputs("]}", out);
    return fclose(out) == 0 ? text : NULL;
}

static char *json_of_answer(struct mu_wire_arena *arena, const struct route *route, struct mu_question_answer *answer)
{
    const ProtobufCMessage *message = NULL;
    if (route->kind == MU_ASK_EVENTS)
        return json_of_events(arena, answer);
    if (mu_wire_unpack(arena, route->reply, mu_rpc_bytes_data(answer->reply), mu_rpc_bytes_size(answer->reply),
                       MU_WIRE_REPLY_BYTES_MAX, &message, &answer->err) != MU_OK)
        return NULL;
    return mu_json_of(message, true);
}

static void ask(struct mu_rpc_server *server, const struct route *route, const struct mu_http_request *request,
                struct mu_http_reply *reply)
{
    struct mu_wire_arena arena;
    mu_wire_arena_init(&arena);
    struct filling filling = {.arena = &arena};
    const void *data = NULL;
    size_t size_bytes = 0;
    struct mu_question *question = NULL;
    struct mu_error *err = &filling.err;
    MU_ASSERT(route->request->sizeof_message <= REQUEST_SIZE_MAX);
    filling.message = mu_wire_arena_alloc(&arena, REQUEST_SIZE_MAX);
    if (!filling.message) {
        mu_fail(err, MU_ERR_NO_MEMORY, "no memory");
    } else {
        route->request->message_init(filling.message);
        request->each(request->parameters, fill_field, &filling);
    }
    if (err->status == MU_OK &&
        mu_wire_pack(&arena, filling.message, MU_WIRE_REQUEST_BYTES_MAX, &data, &size_bytes, err) == MU_OK) {
        question = mu_question_ask(server, route->kind, route->method, data, size_bytes, request->until_us);
        if (!question)
            mu_fail(err, MU_ERR_TIMEOUT, "the core does not answer");
        else
            *err = mu_question_answer_of(question)->err;
    }
    if (err->status == MU_OK)
        reply->body = json_of_answer(&arena, route, mu_question_answer_of(question));
    else
        reply_error(reply, err);
    if (question)
        mu_question_free(question);
    mu_wire_arena_fini(&arena);
}

/* ---- series ---- */

struct series_request {
    struct mu_series_query query;
    struct mu_error err;
};

static bool fill_series(void *ctx, const char *name, const char *value)
{
    struct series_request *series = ctx;
    uint64_t seconds = 0;
    bool good = false;
    if (strcmp(name, "job") == 0 && (good = mu_wire_name_ok(value, sizeof series->query.job)))
        strcpy(series->query.job, value);
    else if (strcmp(name, "worker") == 0 && (good = mu_wire_name_ok(value, sizeof series->query.worker)))
        strcpy(series->query.worker, value);
    else if (strcmp(name, "seconds") == 0 && (good = parse_number(value, UINT32_MAX, &seconds)))
        series->query.seconds = (uint32_t)seconds;
    if (!good)
        mu_fail(&series->err, MU_ERR_INVALID, "%.40s: this parameter or its value is not allowed: job, worker, seconds",
                name);
    return good;
}

static void answer_series(struct mu_store *store, const struct mu_http_request *request, struct mu_http_reply *reply)
{
    struct series_request series = {.query = {.seconds = 3600, .now_wall_us = mu_clock_wall_us()}};
    request->each(request->parameters, fill_series, &series);
    if (series.err.status == MU_OK && !series.query.job[0])
        mu_fail(&series.err, MU_ERR_INVALID, "job: a name is needed");
    if (series.err.status != MU_OK ||
        mu_series_read(store, &series.query, &reply->body, &reply->size_bytes, &series.err) != MU_OK)
        reply_error(reply, &series.err);
}

void mu_http_api(struct mu_rpc_server *server, struct mu_store *store, const struct mu_http_request *request,
                 struct mu_http_reply *ret_reply)
{
    *ret_reply = (struct mu_http_reply){.status = 200, .type = "application/json"};
    const struct route *found = NULL;
    for (size_t i = 0; i < sizeof routes / sizeof routes[0]; i++)
        found = strcmp(routes[i].path, request->path) == 0 ? &routes[i] : found;
    if (found) {
        ask(server, found, request, ret_reply);
    } else if (strcmp(request->path, "series") == 0) {
        answer_series(store, request, ret_reply);
    } else {
        struct mu_error err;
        mu_fail(&err, MU_ERR_NOT_FOUND,
                "there are jobs, job, workers, checkpoints, timings, goodput, events and series below /api/v1/");
        reply_error(ret_reply, &err);
    }
    if (ret_reply->body)
        ret_reply->size_bytes = strlen(ret_reply->body);
}
