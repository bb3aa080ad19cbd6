/* A server whose core thread behaves as its methods say, and a client beside it, in one process. Header-only: two test
 * executables use it.
 *
 *   /t/Echo   unary          replies the request               /t/Hold   unary   never answers by itself
 *   /t/Fail   unary          NOT_FOUND "no such job 'x'"        /t/Big    unary   replies as many bytes as the request
 * says (decimal) /t/Count  server stream  as many messages as the request says, then OK      /t/Flood  server stream 64
 * KiB messages until refused; all of them were sent when the reader has read `flooded`; then OK /t/Bidi   bidi,
 * priority echoes; after half-close finishes OK /t/Deaf   bidi           sends nothing back; "bye" makes the server
 * finish with ABORTED "stale generation 7"
 */
#ifndef TESTS_LIB_RPC_FIXTURE_H
#define TESTS_LIB_RPC_FIXTURE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/clock.h"
#include "rpc/client.h"
#include "rpc/server.h"

enum { M_ECHO = 1, M_FAIL, M_HOLD, M_BIG, M_COUNT, M_FLOOD, M_BIDI, M_DEAF };

static const struct mu_rpc_method fixture_methods[] = {
    {"/t/Echo", MU_RPC_UNARY, M_ECHO, MU_RPC_QUESTION},
    {"/t/Fail", MU_RPC_UNARY, M_FAIL, MU_RPC_CHANGE},
    {"/t/Hold", MU_RPC_UNARY, M_HOLD, MU_RPC_QUESTION},
    {"/t/Big", MU_RPC_UNARY, M_BIG, MU_RPC_QUESTION},
    {"/t/Count", MU_RPC_SERVER_STREAM, M_COUNT, MU_RPC_QUESTION},
    {"/t/Flood", MU_RPC_SERVER_STREAM, M_FLOOD, MU_RPC_QUESTION},
    {"/t/Bidi", MU_RPC_BIDI_STREAM, M_BIDI, MU_RPC_PRIORITY},
    {"/t/Deaf", MU_RPC_BIDI_STREAM, M_DEAF, MU_RPC_QUESTION},
};

enum { FLOOD_BYTES = 65536, FIXTURE_WAIT_MS = 120000 };

/* State of one open call of the core thread. */
struct session {
    struct session *prev, *next;
    struct mu_rpc_call *call;
    int method_id;
    long sent, total; /* Count; total < 0: Flood */
};

struct fixture {
    struct mu_rpc_server *server;
    pthread_t core;
    struct mu_rpc_pool *pool;
    struct mu_rpc_client *client;
    struct session *sessions;
    bool stop, release_holds; /* under lock; looked at on WAKE */

    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* What the core thread has seen, under lock. */
    int opened, messages, closed[4], held, writable, items, wakes, sessions_open;
    struct mu_rpc_refusals refusals;
    long flooded; /* messages that the flood got in before the first refusal */
    char peer[64], header[64];
    uint64_t deadline_us, least_deadline_us; /* of the last call with a session; of all of them */
    bool drained;
    int last_item[8];
    bool items_out_of_order;
};

struct fixture_item {
    struct mu_rpc_item item; /* first */
    int poster, number;
};

static inline void fixture_send_count(struct fixture *fixture, struct session *session)
{
    while (session->total < 0 || session->sent < session->total) {
        char text[32];
        void *data;
        struct mu_rpc_bytes *message;
        if (session->total < 0) {
            message = mu_rpc_bytes_new(FLOOD_BYTES, &data);
            memset(data, (int)(session->sent & 0x7f), FLOOD_BYTES);
        } else {
            message = mu_rpc_bytes_copy(text, (size_t)snprintf(text, sizeof text, "%ld", session->sent));
        }
        enum mu_status status = mu_rpc_call_send(session->call, message);
        mu_rpc_bytes_unref(message);
        if (status == MU_ERR_LIMIT && session->total < 0) {
            session->total = session->sent;
            pthread_mutex_lock(&fixture->lock);
            fixture->flooded = session->sent;
            pthread_cond_broadcast(&fixture->changed);
            pthread_mutex_unlock(&fixture->lock);
            break;
        }
        if (status != MU_OK)
            return; /* LIMIT: WRITABLE comes; CANCELLED: CLOSED comes */
        session->sent++;
    }
}

static inline void fixture_end(struct fixture *fixture, struct session *session, enum mu_rpc_code code,
                               const char *text)
{
    if (session->method_id == M_HOLD && code == MU_RPC_OK) {
        struct mu_rpc_bytes *reply = mu_rpc_bytes_copy("late", 4);
        mu_rpc_call_reply(session->call, reply);
        mu_rpc_bytes_unref(reply);
    } else if (code != MU_RPC_OK) {
        mu_rpc_call_fail(session->call, code, text);
    } else {
        mu_rpc_call_finish(session->call, code, text);
    }
    if (session->prev)
        session->prev->next = session->next;
    else
        fixture->sessions = session->next;
    if (session->next)
        session->next->prev = session->prev;
    free(session);
    pthread_mutex_lock(&fixture->lock);
    fixture->sessions_open--;
    pthread_cond_broadcast(&fixture->changed);
    pthread_mutex_unlock(&fixture->lock);
}

static inline struct session *fixture_begin(struct fixture *fixture, const struct mu_rpc_event *event)
{
    struct session *session = calloc(1, sizeof *session);
    session->call = event->call;
    session->method_id = event->method_id;
    session->next = fixture->sessions;
    if (session->next)
        session->next->prev = session;
    fixture->sessions = session;
    mu_rpc_call_set_user(event->call, session);
    const char *value = "";
    size_t size = 0;
    (void)mu_rpc_call_metadata(event->call, "x-test", &value, &size);
    pthread_mutex_lock(&fixture->lock);
    snprintf(fixture->peer, sizeof fixture->peer, "%s", mu_rpc_call_peer(event->call));
    snprintf(fixture->header, sizeof fixture->header, "%.*s", (int)size, value);
    fixture->deadline_us = mu_rpc_call_deadline_us(event->call);
    if (fixture->deadline_us < fixture->least_deadline_us)
        fixture->least_deadline_us = fixture->deadline_us;
    fixture->held += event->method_id == M_HOLD;
    fixture->opened += event->type == MU_RPC_EVENT_OPENED;
    fixture->sessions_open++;
    pthread_cond_broadcast(&fixture->changed);
    pthread_mutex_unlock(&fixture->lock);
    return session;
}

static inline void fixture_call(struct fixture *fixture, const struct mu_rpc_event *event)
{
    char text[32];
    struct mu_rpc_bytes *reply;
    void *data;
    snprintf(text, sizeof text, "%.*s", (int)(event->size_bytes < 31 ? event->size_bytes : 31),
             (const char *)event->data);
    switch (event->method_id) {
    case M_ECHO:
        reply = mu_rpc_bytes_copy(event->data, event->size_bytes);
        mu_rpc_call_reply(event->call, reply);
        mu_rpc_bytes_unref(reply);
        break;
    case M_FAIL:
        mu_rpc_call_fail(event->call, MU_RPC_NOT_FOUND, "no such job 'x'");
        break;
    case M_BIG:
        reply = mu_rpc_bytes_new((size_t)atol(text), &data);
        memset(data, 1, (size_t)atol(text));
        mu_rpc_call_reply(event->call, reply);
        mu_rpc_bytes_unref(reply);
        break;
    case M_COUNT:
    case M_FLOOD: {
        struct session *session = fixture_begin(fixture, event);
        session->total = event->method_id == M_FLOOD ? -1 : atol(text);
        fixture_send_count(fixture, session);
        if (session->sent == session->total)
            fixture_end(fixture, session, MU_RPC_OK, NULL);
        break;
    }
    default:
        fixture_begin(fixture, event);
    }
}

static inline void fixture_message(struct fixture *fixture, const struct mu_rpc_event *event)
{
    pthread_mutex_lock(&fixture->lock);
    fixture->messages++;
    pthread_cond_broadcast(&fixture->changed);
    pthread_mutex_unlock(&fixture->lock);
    if (event->method_id == M_BIDI) {
        struct mu_rpc_bytes *message = mu_rpc_bytes_copy(event->data, event->size_bytes);
        enum mu_status status = mu_rpc_call_send(event->call, message);
        mu_rpc_bytes_unref(message);
        if (status == MU_ERR_LIMIT)
            fixture_end(fixture, event->user, MU_RPC_RESOURCE_EXHAUSTED, "echo queue is full");
    } else if (event->size_bytes == 3 && memcmp(event->data, "bye", 3) == 0) {
        fixture_end(fixture, event->user, MU_RPC_ABORTED, "stale generation 7");
    }
}

static inline void fixture_item_came(struct fixture *fixture, struct mu_rpc_item *came)
{
    struct fixture_item *item = (struct fixture_item *)came;
    pthread_mutex_lock(&fixture->lock);
    if (item->number != fixture->last_item[item->poster]++)
        fixture->items_out_of_order = true;
    fixture->items++;
    pthread_cond_broadcast(&fixture->changed);
    pthread_mutex_unlock(&fixture->lock);
}

static inline void fixture_closed(struct fixture *fixture, const struct mu_rpc_event *event)
{
    fixture_end(fixture, event->user, event->reason == MU_RPC_CLOSED_HALF ? MU_RPC_OK : MU_RPC_CANCELLED, "closed");
    pthread_mutex_lock(&fixture->lock);
    fixture->closed[event->reason]++;
    pthread_cond_broadcast(&fixture->changed);
    pthread_mutex_unlock(&fixture->lock);
}

/* False: stop. */
static inline bool fixture_woken(struct fixture *fixture)
{
    pthread_mutex_lock(&fixture->lock);
    bool stop = fixture->stop, release = fixture->release_holds;
    fixture->wakes++;
    pthread_cond_broadcast(&fixture->changed);
    pthread_mutex_unlock(&fixture->lock);
    for (struct session *session = fixture->sessions, *next; session && release; session = next) {
        next = session->next;
        if (session->method_id == M_HOLD)
            fixture_end(fixture, session, MU_RPC_OK, NULL);
    }
    return !stop;
}

static inline bool fixture_event(struct fixture *fixture, const struct mu_rpc_event *event)
{
    struct session *session = event->user;
    switch (event->type) {
    case MU_RPC_EVENT_CALL:
        fixture_call(fixture, event);
        return true;
    case MU_RPC_EVENT_OPENED:
        fixture_begin(fixture, event);
        return true;
    case MU_RPC_EVENT_MESSAGE:
        fixture_message(fixture, event);
        return true;
    case MU_RPC_EVENT_WRITABLE:
        pthread_mutex_lock(&fixture->lock);
        fixture->writable++;
        pthread_mutex_unlock(&fixture->lock);
        fixture_send_count(fixture, session);
        if (session->sent == session->total)
            fixture_end(fixture, session, MU_RPC_OK, NULL);
        return true;
    case MU_RPC_EVENT_CLOSED:
        fixture_closed(fixture, event);
        return true;
    case MU_RPC_EVENT_ITEM:
        fixture_item_came(fixture, event->item);
        return true;
    case MU_RPC_EVENT_WAKE:
        return fixture_woken(fixture);
    case MU_RPC_EVENT_DRAINED:
        return true;
    }
    return true;
}

static inline void *fixture_core(void *arg)
{
    struct fixture *fixture = arg;
    struct mu_rpc_event event;
    do {
        if (!mu_rpc_server_next(fixture->server, UINT64_MAX, &event))
            abort();
        pthread_mutex_lock(&fixture->lock);
        fixture->refusals = mu_rpc_server_refusals(fixture->server);
        pthread_mutex_unlock(&fixture->lock);
    } while (fixture_event(fixture, &event));
    return NULL;
}

static inline struct mu_rpc_server_config fixture_server_config(void)
{
    struct mu_rpc_server_config config = mu_rpc_server_config_default();
    config.listen = "127.0.0.1:0";
    config.methods = fixture_methods;
    config.method_count = sizeof fixture_methods / sizeof fixture_methods[0];
    config.max_receive_bytes = 1 << 20;
    return config;
}

static inline void fixture_die(const char *what, const struct mu_error *err)
{
    fprintf(stderr, "fixture: %s: %s\n", what, err->text);
    abort();
}

static inline void fixture_init(struct fixture *fixture)
{
    memset(fixture, 0, sizeof *fixture);
    fixture->least_deadline_us = UINT64_MAX;
    pthread_mutex_init(&fixture->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&fixture->changed, &attr);
    pthread_condattr_destroy(&attr);
}

/* Server alone, its core thread running. */
static inline void fixture_start_server(struct fixture *fixture, const struct mu_rpc_server_config *config)
{
    struct mu_error err;
    struct mu_rpc_server_config chosen = config ? *config : fixture_server_config();
    if (mu_rpc_server_new(&chosen, &err, &fixture->server) != MU_OK)
        fixture_die("server", &err);
    if (pthread_create(&fixture->core, NULL, fixture_core, fixture) != 0)
        abort();
}

static inline struct mu_rpc_client *fixture_client(struct fixture *fixture, const struct mu_rpc_client_config *config)
{
    struct mu_error err;
    struct mu_rpc_client_config chosen = config ? *config : mu_rpc_client_config_default();
    struct mu_rpc_client *client = NULL;
    chosen.address = mu_rpc_server_address(fixture->server);
    if (mu_rpc_client_new(fixture->pool, &chosen, &err, &client) != MU_OK)
        fixture_die("client", &err);
    return client;
}

static inline void fixture_start(struct fixture *fixture, const struct mu_rpc_server_config *config)
{
    struct mu_error err;
    fixture_init(fixture);
    fixture_start_server(fixture, config);
    if (mu_rpc_pool_new(1, &err, &fixture->pool) != MU_OK)
        fixture_die("pool", &err);
    fixture->client = fixture_client(fixture, NULL);
}

/* Ends the core thread; what is open stays open. */
static inline void fixture_stop_core(struct fixture *fixture)
{
    pthread_mutex_lock(&fixture->lock);
    fixture->stop = true;
    pthread_mutex_unlock(&fixture->lock);
    mu_rpc_server_wake(fixture->server);
    pthread_join(fixture->core, NULL);
    for (struct session *session = fixture->sessions, *next; session; session = next) {
        next = session->next;
        free(session);
    }
    fixture->sessions = NULL;
}

static inline void fixture_stop(struct fixture *fixture)
{
    mu_rpc_client_free(fixture->client);
    if (fixture->server) {
        fixture_stop_core(fixture);
        mu_rpc_server_free(fixture->server);
    }
    mu_rpc_pool_free(fixture->pool);
    pthread_cond_destroy(&fixture->changed);
    pthread_mutex_destroy(&fixture->lock);
}

/* Waits until `expr` (over what the core thread has seen) holds; evaluates to whether it did. */
#define FIXTURE_WAIT(fixture, expr)                                                                                    \
    ({                                                                                                                 \
        struct timespec until_;                                                                                        \
        clock_gettime(CLOCK_MONOTONIC, &until_);                                                                       \
        until_.tv_sec += FIXTURE_WAIT_MS / 1000;                                                                       \
        pthread_mutex_lock(&(fixture)->lock);                                                                          \
        while (!(expr) && pthread_cond_timedwait(&(fixture)->changed, &(fixture)->lock, &until_) == 0)                 \
            ;                                                                                                          \
        bool held_ = (expr);                                                                                           \
        pthread_mutex_unlock(&(fixture)->lock);                                                                        \
        held_;                                                                                                         \
    })

/* Reads what another thread writes. */
#define FIXTURE_GET(fixture, field)                                                                                    \
    ({                                                                                                                 \
        pthread_mutex_lock(&(fixture)->lock);                                                                          \
        __auto_type got_ = (fixture)->field;                                                                           \
        pthread_mutex_unlock(&(fixture)->lock);                                                                        \
        got_;                                                                                                          \
    })

/* --- a bidi stream that records what happens to it --- */

struct recorder {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct mu_rpc_stream *stream;
    int opened, messages, closed, writable;
    bool out_of_order; /* messages are decimal numbers from 0 on */
    bool message_before_opened, event_after_closed;
    enum mu_rpc_code code;
    struct mu_error error;
};

static inline void recorder_event(void *user, const struct mu_rpc_stream_event *event)
{
    struct recorder *recorder = user;
    pthread_mutex_lock(&recorder->lock);
    if (recorder->closed > 0)
        recorder->event_after_closed = true;
    switch (event->type) {
    case MU_RPC_STREAM_OPENED:
        recorder->opened++;
        break;
    case MU_RPC_STREAM_MESSAGE: {
        char text[32];
        snprintf(text, sizeof text, "%.*s", (int)(event->size_bytes < 31 ? event->size_bytes : 31),
                 (const char *)event->data);
        if (atol(text) != recorder->messages)
            recorder->out_of_order = true;
        if (recorder->opened == 0)
            recorder->message_before_opened = true;
        recorder->messages++;
        break;
    }
    case MU_RPC_STREAM_WRITABLE:
        recorder->writable++;
        break;
    case MU_RPC_STREAM_CLOSED:
        recorder->closed++;
        recorder->code = event->code;
        if (event->error)
            recorder->error = *event->error;
        break;
    }
    pthread_cond_broadcast(&recorder->changed);
    pthread_mutex_unlock(&recorder->lock);
}

static inline void recorder_open(struct recorder *recorder, struct mu_rpc_client *client, const char *method)
{
    struct mu_error err;
    memset(recorder, 0, sizeof *recorder);
    pthread_mutex_init(&recorder->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&recorder->changed, &attr);
    pthread_condattr_destroy(&attr);
    if (mu_rpc_stream_new(client, method, recorder_event, recorder, &err, &recorder->stream) != MU_OK)
        fixture_die("stream", &err);
}

static inline void recorder_free(struct recorder *recorder)
{
    mu_rpc_stream_free(recorder->stream);
    pthread_cond_destroy(&recorder->changed);
    pthread_mutex_destroy(&recorder->lock);
}

/* MU_ERR_LIMIT is waited out. */
static inline enum mu_status recorder_send(struct recorder *recorder, const void *data, size_t size_bytes)
{
    struct mu_rpc_bytes *message = mu_rpc_bytes_copy(data, size_bytes);
    enum mu_status status;
    for (;;) {
        pthread_mutex_lock(&recorder->lock);
        int writable = recorder->writable;
        pthread_mutex_unlock(&recorder->lock);
        status = mu_rpc_stream_send(recorder->stream, message);
        if (status != MU_ERR_LIMIT || !FIXTURE_WAIT(recorder, recorder->writable > writable || recorder->closed > 0))
            break;
    }
    mu_rpc_bytes_unref(message);
    return status;
}

#endif
