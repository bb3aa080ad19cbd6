#include "worker/recollect.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/flight.h"
#include "common/log.h"
#include "muster/v1/recall.pb-c.h"
#include "proto/wire_pb.h"
#include "worker/stacks.h"

#define METHOD "/muster.v1.DiagnosticService/Recollect"

enum {
    CALL_TIMEOUT_MS = 3000,
    PART_RECORDS = 1400, /* of at most 38 bytes each */
    PART_LINES = 100,
    PART_THREADS = 64,
    LOGGED_RECORDS = 100, /* of those that are logged on request; the log keeps five times as many lines */
};
_Static_assert(PART_RECORDS * 38 < MU_WIRE_REQUEST_BYTES_MAX &&
                   PART_THREADS * (MU_STACKS_LINE_SIZE + 8) < MU_WIRE_REQUEST_BYTES_MAX &&
                   PART_LINES * (MU_LOG_LINE_SIZE + 16) < MU_WIRE_REQUEST_BYTES_MAX,
               "a part fits into a request");
_Static_assert((int)MU_RECALL_RECORDS_MAX == (int)MU_FLIGHT_RECORDS && (int)MU_RECALL_LINES_MAX == (int)MU_LOG_KEPT,
               "everything can be asked for");

struct question {
    struct mu_recall recall;
    struct mu_id incarnation;
    uint64_t asked_us;
};

/* What is told beside the records, as it was when the question was taken up. */
struct told {
    char threads[MU_STACKS_THREADS_MAX][MU_STACKS_LINE_SIZE];
    struct mu_log_line lines[MU_LOG_KEPT];
    size_t thread_count, line_count;
};

struct mu_recollector {
    struct mu_rpc_client *client;
    struct mu_wire_arena arena; /* the thread's */
    pthread_t thread;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t asked;
    struct question question; /* number 0: none */
    bool ending;
};

/* ---- into the log ---- */

void mu_recollect_log(void)
{
    struct mu_flight_record records[LOGGED_RECORDS];
    uint64_t end = mu_flight_next(), now_us = mu_clock_mono_us();
    size_t count = mu_flight_read(end > LOGGED_RECORDS ? end - LOGGED_RECORDS : 0, end, records, LOGGED_RECORDS);
    for (size_t i = 0; i < count; i++) {
        char fields[160], peer[24] = "";
        const struct mu_flight_record *record = &records[i];
        if (mu_flight_is_exchange(record->kind) || record->kind == MU_FLIGHT_PEER_FAILED)
            snprintf(peer, sizeof peer, " peer=%u", record->peer);
        snprintf(fields, sizeof fields, "age_us=%llu number=%llu bytes=%llu%s",
                 (unsigned long long)(record->at_us < now_us ? now_us - record->at_us : 0),
                 (unsigned long long)record->number, (unsigned long long)record->bytes, peer);
        mu_log(MU_LOG_INFO, fields, "flight: %s of %s", record->is_end ? "end" : "begin", mu_flight_name(record->kind));
    }
    char(*threads)[MU_STACKS_LINE_SIZE] = malloc(MU_STACKS_THREADS_MAX * sizeof *threads);
    size_t thread_count = threads ? mu_stacks_describe(threads, MU_STACKS_THREADS_MAX) : 0;
    for (size_t i = 0; i < thread_count; i++)
        MU_LOGI("thread: %s", threads[i]);
    free(threads);
}

/* ---- parts ---- */

static void add_threads(struct mu_wire_arena *arena, Muster__V1__Recollection *part,
                        const char (*threads)[MU_STACKS_LINE_SIZE], size_t count)
{
    part->threads = mu_wire_arena_alloc(arena, count * sizeof *part->threads);
    for (size_t i = 0; part->threads && i < count; i++) {
        char *line = mu_wire_put_text(arena, threads[i], sizeof threads[i]);
        if (line)
            part->threads[part->n_threads++] = line;
    }
}

static void add_records(struct mu_wire_arena *arena, Muster__V1__Recollection *part, uint64_t from, uint64_t to)
{
    struct mu_flight_record *records = mu_wire_arena_alloc(arena, PART_RECORDS * sizeof *records);
    Muster__V1__FlightRecord *pb = mu_wire_arena_alloc(arena, PART_RECORDS * sizeof *pb);
    part->records = mu_wire_arena_alloc(arena, PART_RECORDS * sizeof *part->records);
    if (!records || !pb || !part->records)
        return;
    part->n_records = mu_flight_read(from, to, records, PART_RECORDS);
    for (size_t i = 0; i < part->n_records; i++) {
        muster__v1__flight_record__init(&pb[i]);
        pb[i].at_us = records[i].at_us;
        pb[i].kind = (Muster__V1__FlightKind)records[i].kind; /* the numbers are the same */
        pb[i].is_end = records[i].is_end;
        pb[i].peer = records[i].peer;
        pb[i].number = records[i].number;
        pb[i].bytes = records[i].bytes;
        part->records[i] = &pb[i];
    }
}

static void add_lines(struct mu_wire_arena *arena, Muster__V1__Recollection *part, const struct mu_log_line *lines,
                      size_t count)
{
    Muster__V1__LogLine *pb = mu_wire_arena_alloc(arena, count * sizeof *pb);
    part->log = mu_wire_arena_alloc(arena, count * sizeof *part->log);
    if (!pb || !part->log)
        return;
    for (size_t i = 0; i < count; i++) {
        muster__v1__log_line__init(&pb[i]);
        pb[i].number = lines[i].number;
        pb[i].text = mu_wire_put_text(arena, lines[i].text, sizeof lines[i].text);
        part->log[i] = &pb[i];
    }
    part->n_log = count;
}

/* ---- answering ---- */

static bool is_superseded(struct mu_recollector *recollector)
{
    pthread_mutex_lock(&recollector->lock);
    bool superseded = recollector->ending || recollector->question.recall.number != 0;
    pthread_mutex_unlock(&recollector->lock);
    return superseded;
}

static enum mu_status send_part(struct mu_recollector *recollector, const Muster__V1__Recollection *part,
                                struct mu_error *err)
{
    struct mu_rpc_bytes *reply = NULL;
    const void *data;
    size_t size_bytes;
    enum mu_status status =
        mu_wire_pack(&recollector->arena, &part->base, MU_WIRE_REQUEST_BYTES_MAX, &data, &size_bytes, err);
    if (status)
        return status;
    struct mu_rpc_bytes *bytes = mu_rpc_bytes_copy(data, size_bytes);
    status = mu_rpc_client_call(recollector->client, METHOD, bytes, CALL_TIMEOUT_MS, err, &reply);
    mu_rpc_bytes_unref(bytes);
    mu_rpc_bytes_unref(reply);
    return status;
}

static void remember(const struct mu_recall *recall, struct told *told)
{
    told->thread_count = recall->threads ? mu_stacks_describe(told->threads, MU_STACKS_THREADS_MAX) : 0;
    told->line_count = mu_log_recent(recall->log_after, told->lines, recall->log_lines);
}

static size_t at_most(size_t left, size_t most)
{
    return left < most ? left : most;
}

/* First what threads do, then records, then lines. */
static enum mu_status answer(struct mu_recollector *recollector, const struct question *question, struct told *told,
                             struct mu_error *err)
{
    const struct mu_recall *recall = &question->recall;
    uint64_t to = mu_flight_next(), from = to > recall->flight_records ? to - recall->flight_records : 0;
    size_t threads = 0, lines = 0;
    enum mu_status status = MU_OK;
    bool is_last = false;
    remember(recall, told);
    for (uint32_t number = 0; !is_last && status == MU_OK && !is_superseded(recollector); number++) {
        Muster__V1__Recollection part = MUSTER__V1__RECOLLECTION__INIT;
        mu_wire_arena_reset(&recollector->arena);
        part.number = recall->number;
        part.incarnation = mu_wire_put_id(&recollector->arena, question->incarnation);
        part.part = number;
        part.asked_us = question->asked_us;
        if (threads < told->thread_count) {
            size_t count = at_most(told->thread_count - threads, PART_THREADS);
            add_threads(&recollector->arena, &part, told->threads + threads, count);
            threads += count;
        } else if (from < to) {
            uint64_t until = from + at_most(to - from, PART_RECORDS);
            add_records(&recollector->arena, &part, from, until);
            from = until;
        } else {
            size_t count = at_most(told->line_count - lines, PART_LINES);
            add_lines(&recollector->arena, &part, told->lines + lines, count);
            lines += count;
        }
        part.is_last = is_last = threads == told->thread_count && from == to && lines == told->line_count;
        part.sent_us = mu_clock_mono_us();
        status = send_part(recollector, &part, err);
    }
    return status;
}

static void *run(void *arg)
{
    struct mu_recollector *recollector = arg;
    pthread_setname_np(pthread_self(), "recollector");
    struct told *told = malloc(sizeof *told);
    MU_ASSERT(told);
    pthread_mutex_lock(&recollector->lock);
    for (;;) {
        while (recollector->question.recall.number == 0 && !recollector->ending)
            pthread_cond_wait(&recollector->asked, &recollector->lock);
        if (recollector->ending)
            break;
        struct question question = recollector->question;
        struct mu_error err;
        recollector->question.recall.number = 0;
        pthread_mutex_unlock(&recollector->lock);
        if (answer(recollector, &question, told, &err) != MU_OK)
            MU_LOGW("recall %llu is not answered: %s", (unsigned long long)question.recall.number, err.text);
        pthread_mutex_lock(&recollector->lock);
    }
    pthread_mutex_unlock(&recollector->lock);
    free(told);
    return NULL;
}

enum mu_status mu_recollector_new(struct mu_rpc_client *client, struct mu_recollector **ret_recollector,
                                  struct mu_error *err)
{
    struct mu_recollector *recollector = calloc(1, sizeof *recollector);
    if (!recollector)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the recollector");
    recollector->client = client;
    mu_wire_arena_init(&recollector->arena);
    pthread_mutex_init(&recollector->lock, NULL);
    pthread_cond_init(&recollector->asked, NULL);
    int reason = pthread_create(&recollector->thread, NULL, run, recollector);
    if (reason) {
        free(recollector);
        return mu_fail_errno(err, reason, "cannot start a thread");
    }
    *ret_recollector = recollector;
    return MU_OK;
}

void mu_recollector_free(struct mu_recollector *recollector)
{
    if (!recollector)
        return;
    pthread_mutex_lock(&recollector->lock);
    recollector->ending = true;
    pthread_cond_signal(&recollector->asked);
    pthread_mutex_unlock(&recollector->lock);
    pthread_join(recollector->thread, NULL);
    mu_wire_arena_fini(&recollector->arena);
    pthread_cond_destroy(&recollector->asked);
    pthread_mutex_destroy(&recollector->lock);
    free(recollector);
}

void mu_recollector_ask(struct mu_recollector *recollector, const struct mu_recall *recall, struct mu_id incarnation)
{
    pthread_mutex_lock(&recollector->lock);
    recollector->question =
        (struct question){.recall = *recall, .incarnation = incarnation, .asked_us = mu_clock_mono_us()};
    pthread_cond_signal(&recollector->asked);
    pthread_mutex_unlock(&recollector->lock);
}
