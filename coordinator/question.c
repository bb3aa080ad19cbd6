#include "coordinator/question.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "coordinator/metrics.h"
#include "proto/wire_pb.h"

struct mu_question {
    struct mu_posted posted; /* first */
    pthread_mutex_t lock;
    pthread_cond_t answered;
    bool done, forgotten;
    enum mu_question_kind kind;
    int method;
    void *data;
    size_t size_bytes;
    struct mu_question_answer answer;
};

void mu_question_free(struct mu_question *q)
{
    pthread_cond_destroy(&q->answered);
    pthread_mutex_destroy(&q->lock);
    mu_rpc_bytes_unref(q->answer.reply);
    for (uint32_t i = 0; i < q->answer.event_count; i++)
        mu_rpc_bytes_unref(q->answer.events[i]);
    free(q->answer.page);
    free(q->data);
    free(q);
}

struct mu_question_answer *mu_question_answer_of(struct mu_question *q)
{
    return &q->answer;
}

static struct mu_question *question_new(enum mu_question_kind kind, int method, const void *data, size_t size_bytes)
{
    struct mu_question *q = calloc(1, sizeof *q);
    pthread_condattr_t monotonic;
    if (q && size_bytes && !(q->data = malloc(size_bytes))) {
        free(q);
        return NULL;
    }
    if (!q)
        return NULL;
    if (size_bytes)
        memcpy(q->data, data, size_bytes);
    q->size_bytes = size_bytes;
    q->kind = kind;
    q->method = method;
    q->posted.kind = MU_POSTED_QUESTION;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->answered, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return q;
}

struct mu_question *mu_question_ask(struct mu_rpc_server *server, enum mu_question_kind kind, int method,
                                    const void *data, size_t size_bytes, uint64_t until_us)
{
    struct mu_question *q = question_new(kind, method, data, size_bytes);
    if (!q)
        return NULL;
    struct timespec until = {.tv_sec = (time_t)(until_us / 1000000), .tv_nsec = (long)(until_us % 1000000 * 1000)};
    mu_rpc_server_post(server, &q->posted.item);
    pthread_mutex_lock(&q->lock);
    while (!q->done && pthread_cond_timedwait(&q->answered, &q->lock, &until) == 0) {
    }
    bool done = q->done;
    q->forgotten = !done;
    pthread_mutex_unlock(&q->lock);
    return done ? q : NULL;
}

/* ---- core thread ---- */

static void finish(struct mu_question *q)
{
    pthread_mutex_lock(&q->lock);
    bool forgotten = q->forgotten;
    q->done = true;
    pthread_cond_signal(&q->answered);
    pthread_mutex_unlock(&q->lock);
    if (forgotten)
        mu_question_free(q);
}

static void write_page(struct mu_question_answer *answer, const struct mu_question_sources *sources)
{
    FILE *out = open_memstream(&answer->page, &answer->page_size);
    if (out) {
        mu_metrics_write(out, sources);
        if (fclose(out) != 0) {
            free(answer->page);
            answer->page = NULL;
        }
    }
    if (!answer->page)
        mu_fail(&answer->err, MU_ERR_NO_MEMORY, "no memory for the page");
    answer->may_write = sources->may_write;
}

static void list_events(struct mu_question *q, const struct mu_events *events)
{
    struct mu_wire_arena arena;
    const ProtobufCMessage *base = NULL;
    struct mu_watch_request request = {0};
    mu_wire_arena_init(&arena);
    enum mu_status status = mu_wire_unpack(&arena, &muster__v1__watch_events_request__descriptor, q->data,
                                           q->size_bytes, MU_WIRE_REQUEST_BYTES_MAX, &base, &q->answer.err);
    const Muster__V1__WatchEventsRequest *asked = (const Muster__V1__WatchEventsRequest *)base;
    if (status == MU_OK)
        status =
            mu_wire_get_string(asked->job, MU_WIRE_NAME_EMPTY, "job", request.job, sizeof request.job, &q->answer.err);
    if (status == MU_OK) {
        uint32_t limit =
            asked->newest && asked->newest < MU_QUESTION_EVENTS_MAX ? asked->newest : MU_QUESTION_EVENTS_MAX;
        request.after_event = asked->after_event;
        q->answer.event_count = mu_events_list(events, &request, limit, q->answer.events);
    }
    mu_wire_arena_fini(&arena);
}

void mu_question_answer(struct mu_question *q, const struct mu_question_sources *sources)
{
    switch (q->kind) {
    case MU_ASK_METRICS:
        write_page(&q->answer, sources);
        break;
    case MU_ASK_METHOD:
        if (mu_api_ask(sources->api, q->method, q->data, q->size_bytes, &q->answer.reply, &q->answer.err) != MU_OK)
            q->answer.reply = NULL;
        break;
    case MU_ASK_EVENTS:
        list_events(q, sources->events);
        break;
    }
    finish(q);
}

void mu_question_drop(struct mu_question *q)
{
    mu_fail(&q->answer.err, MU_ERR_CANCELLED, "the coordinator is stopping");
    finish(q);
}
