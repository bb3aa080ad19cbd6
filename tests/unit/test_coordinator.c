/* links: mu_coordinator mu_rpc mu_wire */
/* The coordinator as its peers see it: the real server, core and threads in this process, spoken to over real gRPC. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <ftw.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/log.h"
#include "coordinator/driver.h"
#include "proto/wire_pb.h"
#include "rpc/client.h"

#define SERVICE "/muster.v1.MusterService/"
enum { CALL_MS = 120000, INBOX_MAX = 64 };

/* ---- the coordinator in its thread ---- */

struct fixture {
    struct mu_driver_config config;
    struct mu_driver *driver;
    pthread_t thread;
    enum mu_status result;
    struct mu_rpc_pool *pool;
    struct mu_rpc_client *client;
    struct mu_wire_arena arena;
    char dir[64];
};

static void *core_thread(void *arg)
{
    struct fixture *f = arg;
    struct mu_error err;
    f->result = mu_driver_run(f->driver, &err);
    return NULL;
}

static struct mu_rpc_client *new_client(struct fixture *f)
{
    struct mu_rpc_client_config config = mu_rpc_client_config_default();
    struct mu_rpc_client *client = NULL;
    config.address = mu_driver_address(f->driver);
    assert_int_equal(mu_rpc_client_new(f->pool, &config, NULL, &client), MU_OK);
    return client;
}

static void start(struct fixture *f)
{
    struct mu_error err = {0};
    if (mu_driver_new(&f->config, &f->driver, &err) != MU_OK)
        fail_msg("%s", err.text);
    assert_int_equal(pthread_create(&f->thread, NULL, core_thread, f), 0);
    f->client = new_client(f);
}

static void stop(struct fixture *f)
{
    mu_rpc_client_free(f->client);
    mu_driver_stop(f->driver);
    pthread_join(f->thread, NULL);
    assert_int_equal(f->result, MU_OK);
    mu_driver_free(f->driver);
}

static void prepare(struct fixture *f)
{
    memset(f, 0, sizeof *f);
    mu_driver_config_init(&f->config);
    f->config.listen = "127.0.0.1:0";
    f->config.core.max_workers = f->config.core.max_members = 64;
    f->config.core.settle_ms = 20;
    mu_wire_arena_init(&f->arena);
    assert_int_equal(mu_rpc_pool_new(1, NULL, &f->pool), MU_OK);
}

static void clean(struct fixture *f)
{
    mu_rpc_pool_free(f->pool);
    mu_wire_arena_fini(&f->arena);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

/* ---- requests ---- */

/* The answer (in the arena), or NULL with the error. */
static const ProtobufCMessage *call(struct fixture *f, const char *method, const ProtobufCMessage *request,
                                    const ProtobufCMessageDescriptor *answer, struct mu_error *err)
{
    const void *data = NULL;
    size_t size_bytes = 0;
    const ProtobufCMessage *message = NULL;
    struct mu_rpc_bytes *reply = NULL;
    *err = (struct mu_error){0};
    assert_int_equal(mu_wire_pack(&f->arena, request, 1 << 20, &data, &size_bytes, err), MU_OK);
    struct mu_rpc_bytes *bytes = mu_rpc_bytes_copy(data, size_bytes);
    if (mu_rpc_client_call(f->client, method, bytes, CALL_MS, err, &reply) == MU_OK) {
        assert_int_equal(mu_wire_unpack(&f->arena, answer, mu_rpc_bytes_data(reply), mu_rpc_bytes_size(reply),
                                        MU_WIRE_REPLY_BYTES_MAX, &message, err),
                         MU_OK);
        mu_rpc_bytes_unref(reply);
    }
    mu_rpc_bytes_unref(bytes);
    return message;
}

static void small_spec(struct mu_job_spec *spec, const char *name)
{
    mu_job_spec_init(spec);
    snprintf(spec->name, sizeof spec->name, "%s", name);
    spec->model = (struct mu_model_config){
        .family = MU_FAMILY_GPT2, .layers = 2, .heads = 2, .channels = 32, .context = 16, .vocab = 256};
    strcpy(spec->data.path, "/data/text");
    spec->batch.sequences = 8, spec->batch.micro = 1, spec->batch.length = 16;
    spec->steps = 100;
}

static const Muster__V1__SubmitJobResponse *submit(struct fixture *f, const char *name, struct mu_error *err)
{
    struct mu_job_spec spec;
    Muster__V1__SubmitJobRequest request = MUSTER__V1__SUBMIT_JOB_REQUEST__INIT;
    small_spec(&spec, name);
    assert_int_equal(mu_wire_spec_to_pb(&f->arena, &spec, &request.spec, err), MU_OK);
    return (const Muster__V1__SubmitJobResponse *)call(f, SERVICE "SubmitJob", &request.base,
                                                       &muster__v1__submit_job_response__descriptor, err);
}

static const Muster__V1__Job *get_job(struct fixture *f, const char *name, struct mu_error *err)
{
    Muster__V1__GetJobRequest request = MUSTER__V1__GET_JOB_REQUEST__INIT;
    request.name = (char *)name;
    const Muster__V1__GetJobResponse *response = (const Muster__V1__GetJobResponse *)call(
        f, SERVICE "GetJob", &request.base, &muster__v1__get_job_response__descriptor, err);
    return response ? response->job : NULL;
}

/* Reads the events after `after`, until one of kind `until` (NULL: to the end). Returns the number of the last one
 * read. */
static uint64_t read_events(struct fixture *f, uint64_t after, const char *job, bool follow, uint32_t newest,
                            const char *until, unsigned *ret_count, enum mu_status *ret_status, struct mu_error *err)
{
    Muster__V1__WatchEventsRequest request = MUSTER__V1__WATCH_EVENTS_REQUEST__INIT;
    request.after_event = after;
    request.job = (char *)job;
    request.follow = follow;
    request.newest = newest;
    const void *data = NULL;
    size_t size_bytes = 0;
    assert_int_equal(mu_wire_pack(&f->arena, &request.base, 1 << 16, &data, &size_bytes, err), MU_OK);
    struct mu_rpc_bytes *bytes = mu_rpc_bytes_copy(data, size_bytes), *message = NULL;
    struct mu_rpc_reader *reader = NULL;
    assert_int_equal(mu_rpc_reader_new(f->client, SERVICE "WatchEvents", bytes, err, &reader), MU_OK);
    uint64_t last = 0;
    *ret_count = 0;
    for (bool more = true; more;) {
        *ret_status = mu_rpc_reader_next(reader, CALL_MS, err, &message);
        more = *ret_status == MU_OK && message;
        if (!more)
            break;
        const ProtobufCMessage *unpacked = NULL;
        assert_int_equal(mu_wire_unpack(&f->arena, &muster__v1__watch_events_response__descriptor,
                                        mu_rpc_bytes_data(message), mu_rpc_bytes_size(message), 1 << 20, &unpacked,
                                        err),
                         MU_OK);
        const Muster__V1__Event *event = ((const Muster__V1__WatchEventsResponse *)unpacked)->event;
        assert_true(event->number > last);
        last = event->number;
        ++*ret_count;
        more = !until || strcmp(event->kind, until) != 0;
        mu_rpc_bytes_unref(message);
    }
    mu_rpc_reader_free(reader);
    mu_rpc_bytes_unref(bytes);
    return last;
}

/* ---- a worker that only talks ---- */

struct fake {
    struct mu_rpc_client *client;
    struct mu_rpc_stream *stream;
    struct mu_wire_arena arena;
    struct mu_hello hello;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct mu_rpc_bytes *inbox[INBOX_MAX];
    unsigned received, taken;
    bool closed;
    enum mu_rpc_code code;
    char text[MU_ERROR_TEXT_SIZE];
    struct mu_held_share share; /* of its generation */
};

static void on_stream(void *user, const struct mu_rpc_stream_event *event)
{
    struct fake *fake = user;
    pthread_mutex_lock(&fake->lock);
    if (event->type == MU_RPC_STREAM_MESSAGE && fake->received < INBOX_MAX)
        fake->inbox[fake->received++] = mu_rpc_bytes_copy(event->data, event->size_bytes);
    if (event->type == MU_RPC_STREAM_CLOSED) {
        fake->closed = true;
        fake->code = event->code;
        snprintf(fake->text, sizeof fake->text, "%s", event->error ? event->error->text : "");
    }
    pthread_cond_broadcast(&fake->changed);
    pthread_mutex_unlock(&fake->lock);
}

static void attach(struct fixture *f, struct fake *fake, const char *job, const char *name)
{
    memset(fake, 0, sizeof *fake);
    pthread_mutex_init(&fake->lock, NULL);
    pthread_cond_init(&fake->changed, NULL);
    mu_wire_arena_init(&fake->arena);
    fake->hello = (struct mu_hello){.protocol_version = MU_PROTOCOL_VERSION,
                                    .incarnation = mu_id_random(),
                                    .software_version = "test",
                                    .host = "here",
                                    .address = "127.0.0.1:1",
                                    .backend = "cpu",
                                    .numeric_identity = {1, 2},
                                    .data_hash = {3, 4}};
    snprintf(fake->hello.job, sizeof fake->hello.job, "%s", job);
    snprintf(fake->hello.name, sizeof fake->hello.name, "%s", name);
    fake->client = new_client(f);
    assert_int_equal(
        mu_rpc_stream_new(fake->client, "/muster.v1.WorkerService/Attach", on_stream, fake, NULL, &fake->stream),
        MU_OK);
}

static void detach(struct fake *fake)
{
    mu_rpc_stream_free(fake->stream);
    mu_rpc_client_free(fake->client);
    for (unsigned i = 0; i < fake->received; i++)
        mu_rpc_bytes_unref(fake->inbox[i]);
    mu_wire_arena_fini(&fake->arena);
    pthread_mutex_destroy(&fake->lock);
    pthread_cond_destroy(&fake->changed);
}

static void say_bytes(struct fake *fake, const void *data, size_t size_bytes)
{
    struct mu_rpc_bytes *bytes = mu_rpc_bytes_copy(data, size_bytes);
    assert_int_equal(mu_rpc_stream_send(fake->stream, bytes), MU_OK);
    mu_rpc_bytes_unref(bytes);
}

static void say(struct fake *fake, const struct mu_worker_message *message)
{
    const void *data = NULL;
    size_t size_bytes = 0;
    assert_int_equal(mu_wire_encode_worker(&fake->arena, message, &data, &size_bytes, NULL), MU_OK);
    say_bytes(fake, data, size_bytes);
}

static void say_hello(struct fake *fake)
{
    struct mu_worker_message message = {.kind = MU_WM_HELLO, .hello = fake->hello};
    say(fake, &message);
}

static void say_status(struct fake *fake, enum mu_worker_phase phase, uint64_t generation, uint64_t step)
{
    struct mu_worker_message message = {.kind = MU_WM_STATUS, .generation = generation};
    message.status.phase = phase;
    message.status.generation = generation;
    message.status.held = (struct mu_held){.has_state = true, .step = step, .share_count = 1, .shares = {fake->share}};
    fake->hello.status = message.status;
    say(fake, &message);
}

static void until_changed(struct fake *fake)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += CALL_MS / 1000;
    assert_int_equal(pthread_cond_timedwait(&fake->changed, &fake->lock, &until), 0);
}

/* The next message of that kind; others before it are skipped. */
static struct mu_coord_message hear(struct fake *fake, enum mu_coord_message_kind kind)
{
    struct mu_coord_message message;
    do {
        pthread_mutex_lock(&fake->lock);
        while (fake->taken == fake->received) {
            if (fake->closed)
                fail_msg("the stream was closed: %s", fake->text);
            until_changed(fake);
        }
        struct mu_rpc_bytes *bytes = fake->inbox[fake->taken++];
        pthread_mutex_unlock(&fake->lock);
        assert_int_equal(
            mu_wire_decode_coord(&fake->arena, mu_rpc_bytes_data(bytes), mu_rpc_bytes_size(bytes), &message, NULL),
            MU_OK);
    } while (message.kind != kind);
    return message;
}

static void hear_closed(struct fake *fake)
{
    pthread_mutex_lock(&fake->lock);
    while (!fake->closed)
        until_changed(fake);
    pthread_mutex_unlock(&fake->lock);
}

/* From Hello to Go. Returns the generation. */
static uint64_t join(struct fake *fake)
{
    say_hello(fake);
    struct mu_coord_message welcome = hear(fake, MU_CM_WELCOME);
    assert_non_null(welcome.welcome.spec);
    memcpy(fake->hello.name, welcome.welcome.name, sizeof fake->hello.name);
    fake->hello.job_uid = welcome.welcome.job_uid;
    fake->hello.prepared_job = true;
    say_hello(fake);
    struct mu_coord_message assign = hear(fake, MU_CM_ASSIGN);
    fake->share = (struct mu_held_share){.layout = assign.assign.layout, .rank = assign.assign.rank};
    say_status(fake, MU_PHASE_PREPARED, assign.generation, assign.assign.start_step);
    struct mu_coord_message go = hear(fake, MU_CM_GO);
    assert_true(go.generation == assign.generation);
    say_status(fake, MU_PHASE_RUNNING, go.generation, assign.assign.start_step);
    return go.generation;
}

/* ---- tests: the service ---- */

static void test_job_is_submitted_found_and_listed_in_pages(void **state)
{
    (void)state;
    static const char *const names[] = {"delta", "alpha", "echo", "charlie", "bravo"};
    struct fixture f;
    struct mu_error err;
    prepare(&f);
    start(&f);
    for (int i = 0; i < 5; i++) {
        const Muster__V1__SubmitJobResponse *response = submit(&f, names[i], &err);
        assert_non_null(response);
        assert_false(response->existed);
        assert_string_equal(response->job->name, names[i]);
        assert_int_equal(response->job->uid.len, 16);
    }
    assert_true(submit(&f, "alpha", &err)->existed);
    const Muster__V1__Job *job = get_job(&f, "echo", &err);
    assert_non_null(job);
    assert_int_equal(job->spec->steps, 100);
    assert_int_equal(job->leaves, 8);
    assert_null(get_job(&f, "foxtrot", &err));
    assert_int_equal(err.status, MU_ERR_NOT_FOUND);
    assert_non_null(strstr(err.text, "foxtrot"));
    Muster__V1__ListJobsRequest request = MUSTER__V1__LIST_JOBS_REQUEST__INIT;
    char all[64] = "";
    int pages = 0;
    request.page_size = 2;
    do {
        const Muster__V1__ListJobsResponse *page = (const Muster__V1__ListJobsResponse *)call(
            &f, SERVICE "ListJobs", &request.base, &muster__v1__list_jobs_response__descriptor, &err);
        assert_non_null(page);
        for (size_t i = 0; i < page->n_jobs; i++)
            strcat(strcat(all, page->jobs[i]->name), " ");
        request.page_token = page->next_page_token;
        pages++;
    } while (request.page_token[0]);
    assert_string_equal(all, "alpha bravo charlie delta echo ");
    assert_int_equal(pages, 3);
    stop(&f);
    clean(&f);
}

static void test_bad_requests_are_refused_with_the_field(void **state)
{
    (void)state;
    struct fixture f;
    struct mu_error err;
    prepare(&f);
    start(&f);
    Muster__V1__GetJobRequest get = MUSTER__V1__GET_JOB_REQUEST__INIT;
    get.name = "No Such";
    assert_null(call(&f, SERVICE "GetJob", &get.base, &muster__v1__get_job_response__descriptor, &err));
    assert_int_equal(err.status, MU_ERR_INVALID);
    assert_non_null(strstr(err.text, "name"));
    Muster__V1__SubmitJobRequest empty = MUSTER__V1__SUBMIT_JOB_REQUEST__INIT;
    assert_null(call(&f, SERVICE "SubmitJob", &empty.base, &muster__v1__submit_job_response__descriptor, &err));
    assert_int_equal(err.status, MU_ERR_INVALID);
    Muster__V1__ListWorkersRequest list = MUSTER__V1__LIST_WORKERS_REQUEST__INIT;
    list.page_token = "12x";
    assert_null(call(&f, SERVICE "ListWorkers", &list.base, &muster__v1__list_workers_response__descriptor, &err));
    assert_int_equal(err.status, MU_ERR_INVALID);
    assert_non_null(strstr(err.text, "page_token"));
    Muster__V1__CancelJobRequest cancel = MUSTER__V1__CANCEL_JOB_REQUEST__INIT;
    cancel.name = "nobody";
    assert_null(call(&f, SERVICE "CancelJob", &cancel.base, &muster__v1__cancel_job_response__descriptor, &err));
    assert_int_equal(err.status, MU_ERR_NOT_FOUND);
    assert_null(call(&f, SERVICE "NoSuchCall", &get.base, &muster__v1__get_job_response__descriptor, &err));
    char *large = malloc(100001);
    memset(large, 'a', 100000);
    large[100000] = 0;
    get.name = large;
    assert_null(call(&f, SERVICE "GetJob", &get.base, &muster__v1__get_job_response__descriptor, &err));
    assert_int_equal(err.status, MU_ERR_LIMIT);
    free(large);
    stop(&f);
    clean(&f);
}

static void test_events_resume_filter_and_end(void **state)
{
    (void)state;
    struct fixture f;
    struct mu_error err;
    enum mu_status status;
    unsigned count;
    prepare(&f);
    start(&f);
    for (int i = 0; i < 6; i++)
        assert_non_null(submit(&f, i % 2 ? "odd" : i == 0 ? "zero" : i == 2 ? "two" : "four", &err));
    uint64_t last = read_events(&f, 0, "", false, 0, NULL, &count, &status, &err);
    assert_int_equal(status, MU_OK);
    assert_int_equal(count, last); /* from 1 on, without a gap */
    assert_true(last >= 4);
    assert_true(read_events(&f, last - 2, "", false, 0, NULL, &count, &status, &err) == last);
    assert_int_equal(count, 2);
    read_events(&f, 0, "two", false, 0, NULL, &count, &status, &err);
    assert_int_equal(count, 1);
    assert_true(read_events(&f, 0, "", false, 3, NULL, &count, &status, &err) == last);
    assert_int_equal(count, 3);
    read_events(&f, last + 100, "", true, 0, NULL, &count, &status, &err);
    assert_int_equal(status, MU_ERR_INVALID);
    assert_non_null(strstr(err.text, "after_event"));
    stop(&f);
    clean(&f);
}

static void test_events_no_longer_kept_are_answered_with_where_to_start(void **state)
{
    (void)state;
    struct fixture f;
    struct mu_error err;
    enum mu_status status;
    unsigned count;
    char name[32];
    prepare(&f);
    f.config.events_kept = MU_EVENTS_KEPT_MIN;
    start(&f);
    for (int i = 0; i < MU_EVENTS_KEPT_MIN + 20; i++) {
        snprintf(name, sizeof name, "job-%d", i);
        assert_non_null(submit(&f, name, &err));
        mu_wire_arena_reset(&f.arena);
    }
    uint64_t last = read_events(&f, 0, "", false, 0, NULL, &count, &status, &err);
    assert_int_equal(count, MU_EVENTS_KEPT_MIN);
    read_events(&f, 1, "", false, 0, NULL, &count, &status, &err);
    assert_int_equal(status, MU_ERR_INVALID);
    snprintf(name, sizeof name, "after_event = %d", (int)last - MU_EVENTS_KEPT_MIN);
    assert_non_null(strstr(err.text, name));
    stop(&f);
    clean(&f);
}

/* ---- tests: workers ---- */

static void test_worker_attaches_is_assigned_and_shown(void **state)
{
    (void)state;
    struct fixture f;
    struct fake fake;
    struct mu_error err;
    enum mu_status status;
    unsigned count;
    prepare(&f);
    start(&f);
    assert_non_null(submit(&f, "job", &err));
    attach(&f, &fake, "job", "w0");
    uint64_t generation = join(&fake);
    struct mu_worker_message step = {.kind = MU_WM_STEP, .generation = generation};
    step.step = (struct mu_step_report){.steps_done = 7,
                                        .result = {.step = 6, .loss = 2.5, .grad_norm = 1, .finite = true},
                                        .step_count = 1,
                                        .leaf_count = 8,
                                        .tokens = 128,
                                        .total_us = 1000,
                                        .wait_us = 10};
    say(&fake, &step);
    const Muster__V1__Job *job;
    do {
        mu_wire_arena_reset(&f.arena);
        job = get_job(&f, "job", &err);
        assert_non_null(job);
    } while (job->steps_done < 7);
    assert_int_equal(job->phase, MUSTER__V1__JOB_PHASE__JOB_PHASE_STEPPING);
    assert_true(job->world == 1 && job->attached == 1 && job->result->loss == 2.5 && job->generation == generation);
    Muster__V1__ListWorkersRequest list = MUSTER__V1__LIST_WORKERS_REQUEST__INIT;
    const Muster__V1__ListWorkersResponse *workers = (const Muster__V1__ListWorkersResponse *)call(
        &f, SERVICE "ListWorkers", &list.base, &muster__v1__list_workers_response__descriptor, &err);
    assert_non_null(workers);
    assert_int_equal(workers->n_workers, 1);
    assert_string_equal(workers->workers[0]->name, "w0");
    assert_int_equal(workers->workers[0]->state, MUSTER__V1__WORKER_STATE__WORKER_STATE_MEMBER);
    assert_non_null(workers->workers[0]->coordinates);
    assert_int_equal(workers->workers[0]->coordinates->pp, 0);
    assert_non_null(job->layout);
    assert_true(job->layout->tp == 1 && job->layout->pp == 1 && job->layout->dp == 1 && job->layout->idle == 0);
    assert_int_equal(job->layout->n_stage_first, 2);
    assert_int_equal(job->layout->stage_first[1], 2);
    Muster__V1__GetTimingsRequest timings = MUSTER__V1__GET_TIMINGS_REQUEST__INIT;
    timings.job = "job";
    const Muster__V1__GetTimingsResponse *got = (const Muster__V1__GetTimingsResponse *)call(
        &f, SERVICE "GetTimings", &timings.base, &muster__v1__get_timings_response__descriptor, &err);
    assert_non_null(got);
    assert_int_equal(got->n_timings, 1);
    assert_int_equal(got->timings[0]->wait_us, 10);
    read_events(&f, 0, "job", true, 0, "generation_go", &count, &status, &err);
    assert_int_equal(status, MU_OK);
    detach(&fake);
    stop(&f);
    clean(&f);
}

static void test_bad_first_message_is_rejected_for_good(void **state)
{
    (void)state;
    struct fixture f;
    struct fake fake;
    prepare(&f);
    start(&f);
    attach(&f, &fake, "job", "w0");
    say_bytes(&fake, "\x12\x04\x22\x02\xff\xfe", 6); /* hello.job is not UTF-8 */
    struct mu_coord_message reject = hear(&fake, MU_CM_REJECT);
    assert_int_equal(reject.reject.reason, MU_REJECT_INVALID);
    assert_non_null(strstr(reject.reject.text, "Hello.job"));
    hear_closed(&fake);
    assert_int_equal(fake.code, MU_RPC_INVALID_ARGUMENT);
    detach(&fake);
    attach(&f, &fake, "job", "w0");
    struct mu_worker_message beat = {.kind = MU_WM_HEARTBEAT};
    say(&fake, &beat);
    assert_int_equal(hear(&fake, MU_CM_REJECT).reject.reason, MU_REJECT_INVALID);
    detach(&fake);
    attach(&f, &fake, "job", "w0"); /* no such job: come again */
    say_hello(&fake);
    assert_int_equal(hear(&fake, MU_CM_REJECT).reject.reason, MU_REJECT_NO_JOB);
    hear_closed(&fake);
    assert_int_equal(fake.code, MU_RPC_OK);
    detach(&fake);
    stop(&f);
    clean(&f);
}

static void test_stream_that_says_nothing_is_ended(void **state)
{
    (void)state;
    struct fixture f;
    struct fake fake;
    prepare(&f);
    f.config.hello_ms = 50;
    start(&f);
    attach(&f, &fake, "job", "w0");
    hear_closed(&fake);
    assert_int_equal(fake.code, MU_RPC_DEADLINE_EXCEEDED);
    detach(&fake);
    stop(&f);
    clean(&f);
}

static void test_lost_stream_is_an_event_after_the_grace(void **state)
{
    (void)state;
    struct fixture f;
    struct fake fake;
    struct mu_error err;
    enum mu_status status;
    unsigned count;
    prepare(&f);
    f.config.core.reattach_grace_ms = 100;
    start(&f);
    assert_non_null(submit(&f, "job", &err));
    attach(&f, &fake, "job", "w0");
    join(&fake);
    mu_rpc_stream_cancel(fake.stream);
    read_events(&f, 0, "job", true, 0, "worker_lost", &count, &status, &err);
    assert_int_equal(status, MU_OK);
    detach(&fake);
    stop(&f);
    clean(&f);
}

/* ---- tests: restart ---- */

static void test_restart_keeps_jobs_events_and_the_running_generation(void **state)
{
    (void)state;
    struct fixture f;
    struct fake fake;
    struct mu_error err;
    enum mu_status status;
    unsigned count;
    prepare(&f);
    strcpy(f.dir, "/tmp/muster-test-XXXXXX");
    assert_non_null(mkdtemp(f.dir));
    f.config.data_dir = f.dir;
    f.config.reserve_bytes = f.config.ballast_bytes = 0;
    start(&f);
    assert_non_null(submit(&f, "job", &err));
    attach(&f, &fake, "job", "w0");
    uint64_t generation = join(&fake);
    uint64_t last = read_events(&f, 0, "", true, 0, "generation_go", &count, &status, &err);
    struct mu_hello hello = fake.hello;
    stop(&f); /* the worker's stream is cut: it goes on stepping */
    hear_closed(&fake);
    detach(&fake);

    start(&f);
    const Muster__V1__Job *job = get_job(&f, "job", &err);
    assert_non_null(job);
    assert_int_equal(job->state, MUSTER__V1__JOB_STATE__JOB_STATE_RUNNING);
    attach(&f, &fake, "job", "w0");
    fake.hello = hello;
    say_hello(&fake); /* same incarnation, same generation: nothing is renegotiated */
    assert_null(hear(&fake, MU_CM_WELCOME).welcome.spec);
    do {
        mu_wire_arena_reset(&f.arena);
        job = get_job(&f, "job", &err);
        assert_non_null(job);
    } while (job->phase != MUSTER__V1__JOB_PHASE__JOB_PHASE_STEPPING || job->attached == 0);
    assert_true(job->generation == generation);
    assert_true(read_events(&f, last - 1, "", false, 0, NULL, &count, &status, &err) >= last);
    assert_int_equal(status, MU_OK);
    struct mu_driver *second = NULL;
    assert_int_equal(mu_driver_new(&f.config, &second, &err), MU_ERR_BUSY); /* the directory is taken */
    assert_non_null(strstr(err.text, f.dir));
    detach(&fake);
    stop(&f);
    nftw(f.dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    clean(&f);
}

static void test_below_the_reserve_changes_are_refused_and_questions_answered(void **state)
{
    (void)state;
    struct fixture f;
    struct mu_error err;
    prepare(&f);
    strcpy(f.dir, "/tmp/muster-test-XXXXXX");
    assert_non_null(mkdtemp(f.dir));
    f.config.data_dir = f.dir;
    f.config.reserve_bytes = f.config.ballast_bytes = 0;
    start(&f);
    assert_non_null(submit(&f, "job", &err));
    stop(&f);
    f.config.reserve_bytes = 1ull << 62; /* no disk has so much */
    start(&f);
    assert_null(submit(&f, "other", &err));
    assert_int_equal(err.status, MU_ERR_LIMIT);
    assert_non_null(strstr(err.text, "below the reserve"));
    struct fake fake;
    attach(&f, &fake, "job", "w0"); /* makes the core want to write */
    say_hello(&fake);
    assert_non_null(get_job(&f, "job", &err));
    assert_null(get_job(&f, "other", &err));
    assert_int_equal(err.status, MU_ERR_NOT_FOUND);
    detach(&fake);
    f.config.stop_ms = 100;
    stop(&f);
    nftw(f.dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    clean(&f);
}

static void test_port_in_use_is_told(void **state)
{
    (void)state;
    struct fixture f;
    struct mu_error err = {0};
    prepare(&f);
    start(&f);
    struct mu_driver_config config = f.config;
    struct mu_driver *second = NULL;
    config.listen = mu_driver_address(f.driver);
    assert_int_equal(mu_driver_new(&config, &second, &err), MU_ERR_BUSY);
    assert_non_null(strstr(err.text, config.listen));
    stop(&f);
    clean(&f);
}

int main(void)
{
    mu_log_init("test", MU_LOG_ERROR);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_job_is_submitted_found_and_listed_in_pages),
        cmocka_unit_test(test_bad_requests_are_refused_with_the_field),
        cmocka_unit_test(test_events_resume_filter_and_end),
        cmocka_unit_test(test_events_no_longer_kept_are_answered_with_where_to_start),
        cmocka_unit_test(test_worker_attaches_is_assigned_and_shown),
        cmocka_unit_test(test_bad_first_message_is_rejected_for_good),
        cmocka_unit_test(test_stream_that_says_nothing_is_ended),
        cmocka_unit_test(test_lost_stream_is_an_event_after_the_grace),
        cmocka_unit_test(test_restart_keeps_jobs_events_and_the_running_generation),
        cmocka_unit_test(test_below_the_reserve_changes_are_refused_and_questions_answered),
        cmocka_unit_test(test_port_in_use_is_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
