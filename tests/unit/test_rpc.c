/* links: mu_rpc */
/* Server and client of rpc/ against each other over real sockets. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/lib/rpc_fixture.h"

static enum mu_status unary(struct mu_rpc_client *client, const char *method, const void *data, size_t size_bytes,
                            unsigned timeout_ms, struct mu_error *err, struct mu_rpc_bytes **ret_reply)
{
    struct mu_rpc_bytes *request = mu_rpc_bytes_copy(data, size_bytes);
    enum mu_status status = mu_rpc_client_call(client, method, request, timeout_ms, err, ret_reply);
    mu_rpc_bytes_unref(request);
    return status;
}

static void assert_echo(struct mu_rpc_client *client, const void *data, size_t size_bytes)
{
    struct mu_rpc_bytes *reply = NULL;
    struct mu_error err = {0};
    enum mu_status status = unary(client, "/t/Echo", data, size_bytes, 10000, &err, &reply);
    if (status != MU_OK)
        fail_msg("echo: %s", err.text);
    assert_int_equal(mu_rpc_bytes_size(reply), size_bytes);
    assert_memory_equal(mu_rpc_bytes_data(reply), data, size_bytes);
    mu_rpc_bytes_unref(reply);
}

static int connect_raw(uint16_t port)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof to), 0);
    return fd;
}

/* --- unary --- */

static void test_unary_of_any_size_is_answered(void **state)
{
    (void)state;
    struct fixture fixture;
    fixture_start(&fixture, NULL);
    static char big[1000000];
    for (size_t i = 0; i < sizeof big; i++)
        big[i] = (char)(i * 2654435761u >> 24);
    assert_echo(fixture.client, "hello", 5);
    assert_echo(fixture.client, "", 0);
    assert_echo(fixture.client, big, sizeof big);
    for (int i = 0; i < 200; i++)
        assert_echo(fixture.client, &i, sizeof i);
    fixture_stop(&fixture);
}

static void test_unary_error_carries_status_and_text(void **state)
{
    (void)state;
    struct fixture fixture;
    struct mu_error err = {0};
    struct mu_rpc_bytes *reply = NULL;
    fixture_start(&fixture, NULL);
    assert_int_equal(unary(fixture.client, "/t/Fail", "x", 1, 10000, &err, &reply), MU_ERR_NOT_FOUND);
    assert_string_equal(err.text, "no such job 'x'");
    assert_null(reply);
    fixture_stop(&fixture);
}

static void test_unknown_method_is_unimplemented_at_once(void **state)
{
    (void)state;
    struct fixture fixture;
    struct mu_error err = {0};
    struct mu_rpc_bytes *reply = NULL;
    fixture_start(&fixture, NULL);
    uint64_t before_us = mu_clock_mono_us();
    for (int i = 0; i < 40; i++) { /* more than are armed at a time */
        assert_int_equal(unary(fixture.client, "/t/Nothing", "x", 1, 30000, &err, &reply), MU_ERR_INVALID);
        assert_non_null(strstr(err.text, "does not know /t/Nothing"));
    }
    assert_true(mu_clock_mono_us() - before_us < 10000000);
    fixture_stop(&fixture);
}

static void test_deadline_ends_the_call_on_both_sides(void **state)
{
    (void)state;
    struct fixture fixture;
    struct mu_error err = {0};
    struct mu_rpc_bytes *reply = NULL;
    fixture_start(&fixture, NULL);
    assert_echo(fixture.client, "connected", 9);
    assert_int_equal(unary(fixture.client, "/t/Hold", "x", 1, 150, &err, &reply), MU_ERR_TIMEOUT);
    assert_non_null(strstr(err.text, "no answer from 127.0.0.1:"));
    assert_true(FIXTURE_WAIT(&fixture, fixture.closed[MU_RPC_CLOSED_DEADLINE] == 1));
    assert_true(FIXTURE_GET(&fixture, deadline_us) != UINT64_MAX);
    assert_int_equal(FIXTURE_GET(&fixture, closed[MU_RPC_CLOSED_CANCELLED]), 0);
    fixture_stop(&fixture);
}

static void test_oversize_messages_are_refused_and_the_server_goes_on(void **state)
{
    (void)state;
    struct fixture fixture;
    struct mu_error err = {0};
    struct mu_rpc_bytes *reply = NULL;
    static char big[(1 << 20) + 1];
    fixture_start(&fixture, NULL);
    assert_int_equal(unary(fixture.client, "/t/Echo", big, sizeof big, 10000, &err, &reply), MU_ERR_LIMIT);
    struct mu_rpc_client_config config = mu_rpc_client_config_default();
    config.max_receive_bytes = 1000;
    struct mu_rpc_client *small = fixture_client(&fixture, &config);
    assert_int_equal(unary(small, "/t/Big", "1001", 4, 10000, &err, &reply), MU_ERR_LIMIT);
    assert_int_equal(unary(small, "/t/Big", "1000", 4, 10000, &err, &reply), MU_OK);
    mu_rpc_bytes_unref(reply);
    mu_rpc_client_free(small);

    struct recorder recorder;
    recorder_open(&recorder, fixture.client, "/t/Deaf");
    assert_int_equal(recorder_send(&recorder, big, sizeof big), MU_OK);
    assert_true(FIXTURE_WAIT(&fixture, fixture.closed[MU_RPC_CLOSED_BAD_MESSAGE] == 1));
    assert_true(FIXTURE_WAIT(&recorder, recorder.closed == 1));
    assert_int_equal(FIXTURE_GET(&recorder, code), MU_RPC_RESOURCE_EXHAUSTED);
    recorder_free(&recorder);
    assert_echo(fixture.client, "alive", 5);
    fixture_stop(&fixture);
}

static void test_oversize_metadata_is_refused_and_the_server_goes_on(void **state)
{
    (void)state;
    struct fixture fixture;
    struct mu_error err = {0};
    struct mu_rpc_bytes *reply = NULL;
    fixture_start(&fixture, NULL);
    static char value[40000];
    memset(value, 'v', sizeof value - 1);
    struct mu_rpc_header header = {"x-test", value};
    struct mu_rpc_client_config config = mu_rpc_client_config_default();
    config.headers = &header;
    config.header_count = 1;
    struct mu_rpc_client *client = fixture_client(&fixture, &config);
    assert_int_equal(unary(client, "/t/Echo", "x", 1, 10000, &err, &reply), MU_ERR_LIMIT);
    mu_rpc_client_free(client);
    assert_echo(fixture.client, "alive", 5);
    fixture_stop(&fixture);
}

static void test_call_without_a_message_is_an_invalid_argument(void **state)
{
    (void)state;
    struct fixture fixture;
    struct recorder recorder;
    fixture_start(&fixture, NULL);
    recorder_open(&recorder, fixture.client, "/t/Echo");
    mu_rpc_stream_close_send(recorder.stream);
    assert_true(FIXTURE_WAIT(&recorder, recorder.closed == 1));
    assert_int_equal(FIXTURE_GET(&recorder, code), MU_RPC_INVALID_ARGUMENT);
    assert_int_equal(FIXTURE_GET(&recorder, opened), 0);
    recorder_free(&recorder);
    fixture_stop(&fixture);
}

static void test_bytes_that_are_not_http2_end_their_connection_only(void **state)
{
    (void)state;
    struct fixture fixture;
    fixture_start(&fixture, NULL);
    static const char *const garbage[] = {"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                                          "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzz"};
    for (size_t i = 0; i < sizeof garbage / sizeof garbage[0]; i++) {
        int fd = connect_raw(mu_rpc_server_port(fixture.server));
        assert_int_equal(write(fd, garbage[i], strlen(garbage[i])), strlen(garbage[i]));
        char sink[4096];
        struct pollfd wait = {.fd = fd, .events = POLLIN};
        ssize_t got = 1;
        while (got > 0 && poll(&wait, 1, FIXTURE_WAIT_MS) == 1)
            got = read(fd, sink, sizeof sink);
        assert_true(got <= 0); /* closed by the server */
        close(fd);
    }
    assert_echo(fixture.client, "alive", 5);
    fixture_stop(&fixture);
}

static void test_call_facts_peer_header_and_deadline_are_known(void **state)
{
    (void)state;
    struct fixture fixture;
    struct recorder recorder;
    fixture_start(&fixture, NULL);
    struct mu_rpc_header header = {"x-test", "token 17"};
    struct mu_rpc_client_config config = mu_rpc_client_config_default();
    config.headers = &header;
    config.header_count = 1;
    struct mu_rpc_client *client = fixture_client(&fixture, &config);
    recorder_open(&recorder, client, "/t/Bidi");
    assert_true(FIXTURE_WAIT(&fixture, fixture.opened == 1));
    assert_string_equal(fixture.header, "token 17");
    assert_memory_equal(fixture.peer, "127.0.0.1:", 10);
    assert_true(FIXTURE_GET(&fixture, deadline_us) == UINT64_MAX);
    recorder_free(&recorder);
    mu_rpc_client_free(client);
    struct mu_rpc_header bad = {"Bad Key", "v"};
    config.headers = &bad;
    config.address = "127.0.0.1:1";
    struct mu_error err = {0};
    assert_int_equal(mu_rpc_client_new(fixture.pool, &config, &err, &client), MU_ERR_INVALID);
    assert_non_null(strstr(err.text, "Bad Key"));
    fixture_stop(&fixture);
}

/* --- streams --- */

static void test_bidi_ten_thousand_messages_come_back_in_order(void **state)
{
    (void)state;
    enum { COUNT = 10000 };
    struct fixture fixture;
    struct recorder recorder;
    struct mu_rpc_server_config config = fixture_server_config();
    config.max_send_queue_messages = COUNT;
    fixture_start(&fixture, &config);
    recorder_open(&recorder, fixture.client, "/t/Bidi");
    for (int i = 0; i < COUNT; i++) {
        char text[16];
        int length = snprintf(text, sizeof text, "%d", i);
        assert_int_equal(recorder_send(&recorder, text, (size_t)length), MU_OK);
    }
    mu_rpc_stream_close_send(recorder.stream);
    assert_true(FIXTURE_WAIT(&recorder, recorder.closed == 1));
    assert_int_equal(FIXTURE_GET(&recorder, code), MU_RPC_OK);
    assert_int_equal(FIXTURE_GET(&recorder, messages), COUNT);
    assert_int_equal(FIXTURE_GET(&recorder, opened), 1);
    assert_false(FIXTURE_GET(&recorder, out_of_order));
    assert_false(FIXTURE_GET(&recorder, message_before_opened));
    assert_int_equal(FIXTURE_GET(&fixture, closed[MU_RPC_CLOSED_HALF]), 1);
    struct mu_rpc_bytes *message = mu_rpc_bytes_copy("x", 1);
    assert_int_equal(mu_rpc_stream_send(recorder.stream, message), MU_ERR_CANCELLED);
    mu_rpc_bytes_unref(message);
    recorder_free(&recorder);
    fixture_stop(&fixture);
}

static void test_cancel_by_the_client_is_told_once_as_cancelled(void **state)
{
    (void)state;
    struct fixture fixture;
    struct recorder recorder;
    fixture_start(&fixture, NULL);
    recorder_open(&recorder, fixture.client, "/t/Deaf");
    assert_int_equal(recorder_send(&recorder, "0", 1), MU_OK);
    assert_true(FIXTURE_WAIT(&fixture, fixture.messages == 1));
    assert_true(FIXTURE_WAIT(&recorder, recorder.opened == 1));
    mu_rpc_stream_cancel(recorder.stream);
    assert_true(FIXTURE_WAIT(&fixture, fixture.closed[MU_RPC_CLOSED_CANCELLED] == 1));
    assert_true(FIXTURE_WAIT(&recorder, recorder.closed == 1));
    assert_int_equal(FIXTURE_GET(&recorder, code), MU_RPC_CANCELLED);
    recorder_free(&recorder);
    assert_echo(fixture.client, "later", 5);
    assert_int_equal(FIXTURE_GET(&fixture, closed[MU_RPC_CLOSED_CANCELLED]), 1);
    assert_int_equal(FIXTURE_GET(&fixture, closed[MU_RPC_CLOSED_HALF]), 0);
    assert_int_equal(FIXTURE_GET(&fixture, sessions_open), 0);
    fixture_stop(&fixture);
}

static void test_finish_by_the_server_carries_code_and_text(void **state)
{
    (void)state;
    struct fixture fixture;
    struct recorder recorder;
    fixture_start(&fixture, NULL);
    recorder_open(&recorder, fixture.client, "/t/Deaf");
    assert_int_equal(recorder_send(&recorder, "bye", 3), MU_OK);
    assert_true(FIXTURE_WAIT(&recorder, recorder.closed == 1));
    assert_int_equal(FIXTURE_GET(&recorder, code), MU_RPC_ABORTED);
    assert_int_equal(recorder.error.status, MU_ERR_STALE);
    assert_string_equal(recorder.error.text, "stale generation 7");
    assert_false(FIXTURE_GET(&recorder, event_after_closed));
    recorder_free(&recorder);
    assert_echo(fixture.client, "later", 5);
    for (int reason = 0; reason < 4; reason++) /* the owner ended it: it is not told */
        assert_int_equal(FIXTURE_GET(&fixture, closed[reason]), 0);
    fixture_stop(&fixture);
}

static struct mu_rpc_reader *open_reader(struct mu_rpc_client *client, const char *method, const char *request)
{
    struct mu_error err = {0};
    struct mu_rpc_reader *reader = NULL;
    struct mu_rpc_bytes *bytes = mu_rpc_bytes_copy(request, strlen(request));
    assert_int_equal(mu_rpc_reader_new(client, method, bytes, &err, &reader), MU_OK);
    mu_rpc_bytes_unref(bytes);
    return reader;
}

static void test_server_stream_longer_than_its_queue_arrives_whole(void **state)
{
    (void)state;
    enum { COUNT = 3000 };
    struct fixture fixture;
    struct mu_error err = {0};
    struct mu_rpc_bytes *message = NULL;
    struct mu_rpc_server_config config = fixture_server_config();
    config.max_send_queue_messages = 64;
    fixture_start(&fixture, &config);
    char text[16];
    snprintf(text, sizeof text, "%d", COUNT);
    struct mu_rpc_reader *reader = open_reader(fixture.client, "/t/Count", text);
    for (int i = 0; i < COUNT; i++) {
        assert_int_equal(mu_rpc_reader_next(reader, 10000, &err, &message), MU_OK);
        assert_non_null(message);
        int length = snprintf(text, sizeof text, "%d", i);
        assert_int_equal(mu_rpc_bytes_size(message), length);
        assert_memory_equal(mu_rpc_bytes_data(message), text, (size_t)length);
        mu_rpc_bytes_unref(message);
    }
    for (int again = 0; again < 2; again++) {
        message = (struct mu_rpc_bytes *)text;
        assert_int_equal(mu_rpc_reader_next(reader, 10000, &err, &message), MU_OK);
        assert_null(message);
    }
    assert_true(FIXTURE_GET(&fixture, writable) > 0);
    mu_rpc_reader_free(reader);
    fixture_stop(&fixture);
}

static void test_slow_reader_fills_the_queue_and_then_gets_everything(void **state)
{
    (void)state;
    struct fixture fixture;
    struct mu_error err = {0};
    struct mu_rpc_bytes *message = NULL;
    struct mu_rpc_server_config config = fixture_server_config();
    config.max_send_queue_bytes = (size_t)16 * FLOOD_BYTES;
    fixture_start(&fixture, &config);
    struct mu_rpc_reader *reader = open_reader(fixture.client, "/t/Flood", "");
    assert_true(FIXTURE_WAIT(&fixture, fixture.flooded > 0));
    assert_true(FIXTURE_GET(&fixture, flooded) >= 16); /* the queue, and nothing unbounded behind it */
    assert_true(FIXTURE_GET(&fixture, flooded) < 1000);
    for (long i = 0; i < FIXTURE_GET(&fixture, flooded); i++) {
        assert_int_equal(mu_rpc_reader_next(reader, 10000, &err, &message), MU_OK);
        assert_int_equal(mu_rpc_bytes_size(message), FLOOD_BYTES);
        assert_int_equal(((const char *)mu_rpc_bytes_data(message))[7], (char)(i & 0x7f));
        mu_rpc_bytes_unref(message);
    }
    assert_int_equal(mu_rpc_reader_next(reader, 10000, &err, &message), MU_OK);
    assert_null(message);
    mu_rpc_reader_free(reader);
    fixture_stop(&fixture);
}

static void *cancel_reader(void *arg)
{
    mu_rpc_reader_cancel(arg);
    return NULL;
}

static void test_reader_wait_ends_by_timeout_and_by_cancel_of_another_thread(void **state)
{
    (void)state;
    struct fixture fixture;
    struct mu_error err = {0};
    struct mu_rpc_bytes *message = NULL;
    pthread_t thread;
    fixture_start(&fixture, NULL);
    /* A unary method that never answers is, to the reader, a stream without messages. */
    struct mu_rpc_reader *reader = open_reader(fixture.client, "/t/Hold", "x");
    assert_true(FIXTURE_WAIT(&fixture, fixture.held == 1));
    assert_int_equal(mu_rpc_reader_next(reader, 0, &err, &message), MU_ERR_TIMEOUT);
    assert_int_equal(mu_rpc_reader_next(reader, 20, &err, &message), MU_ERR_TIMEOUT);
    assert_int_equal(pthread_create(&thread, NULL, cancel_reader, reader), 0);
    assert_int_equal(mu_rpc_reader_next(reader, -1, &err, &message), MU_ERR_CANCELLED);
    pthread_join(thread, NULL);
    assert_true(FIXTURE_WAIT(&fixture, fixture.closed[MU_RPC_CLOSED_CANCELLED] == 1));
    mu_rpc_reader_free(reader);
    assert_null(message);
    fixture_stop(&fixture);
}

static void test_client_queue_full_refuses_then_tells_writable(void **state)
{
    (void)state;
    struct fixture fixture;
    struct recorder recorder;
    fixture_start(&fixture, NULL);
    struct mu_rpc_client_config config = mu_rpc_client_config_default();
    config.max_send_queue_messages = 8;
    struct mu_rpc_client *client = fixture_client(&fixture, &config);
    recorder_open(&recorder, client, "/t/Deaf");
    struct mu_rpc_bytes *message = mu_rpc_bytes_copy("0", 1);
    int sent = 0;
    enum mu_status status = MU_OK;
    while (status == MU_OK && sent < 1000000) {
        status = mu_rpc_stream_send(recorder.stream, message);
        sent += status == MU_OK;
    }
    assert_int_equal(status, MU_ERR_LIMIT);
    assert_true(FIXTURE_WAIT(&recorder, recorder.writable >= 1));
    assert_int_equal(mu_rpc_stream_send(recorder.stream, message), MU_OK);
    assert_true(FIXTURE_WAIT(&fixture, fixture.messages == sent + 1));
    mu_rpc_bytes_unref(message);
    recorder_free(&recorder);
    mu_rpc_client_free(client);
    fixture_stop(&fixture);
}

struct freeing {
    struct mu_rpc_stream *stream;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool freed;
    int events_after;
};

static void free_inside(void *user, const struct mu_rpc_stream_event *event)
{
    struct freeing *freeing = user;
    pthread_mutex_lock(&freeing->lock);
    if (freeing->freed) {
        freeing->events_after++;
    } else if (event->type == MU_RPC_STREAM_MESSAGE) {
        freeing->freed = true;
        mu_rpc_stream_free(freeing->stream);
        pthread_cond_broadcast(&freeing->changed);
    }
    pthread_mutex_unlock(&freeing->lock);
}

static void test_stream_freed_inside_its_callback_is_silent_afterwards(void **state)
{
    (void)state;
    struct fixture fixture;
    struct mu_error err;
    struct freeing freeing = {.lock = PTHREAD_MUTEX_INITIALIZER};
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&freeing.changed, &attr);
    pthread_condattr_destroy(&attr);
    fixture_start(&fixture, NULL);
    pthread_mutex_lock(&freeing.lock);
    assert_int_equal(mu_rpc_stream_new(fixture.client, "/t/Bidi", free_inside, &freeing, &err, &freeing.stream), MU_OK);
    struct mu_rpc_bytes *message = mu_rpc_bytes_copy("0", 1);
    assert_int_equal(mu_rpc_stream_send(freeing.stream, message), MU_OK);
    assert_int_equal(mu_rpc_stream_send(freeing.stream, message), MU_OK);
    mu_rpc_bytes_unref(message);
    pthread_mutex_unlock(&freeing.lock);
    assert_true(FIXTURE_WAIT(&freeing, freeing.freed));
    assert_true(FIXTURE_WAIT(&fixture, fixture.closed[MU_RPC_CLOSED_CANCELLED] == 1));
    assert_int_equal(FIXTURE_GET(&freeing, events_after), 0);
    fixture_stop(&fixture);
    pthread_cond_destroy(&freeing.changed);
}

static void test_stream_freed_at_any_moment_leaves_nothing_behind(void **state)
{
    (void)state;
    struct fixture fixture;
    fixture_start(&fixture, NULL);
    for (int i = 0; i < 300; i++) {
        struct recorder recorder;
        recorder_open(&recorder, fixture.client, "/t/Bidi");
        if (i % 3 > 0)
            assert_int_equal(recorder_send(&recorder, "0", 1), MU_OK);
        if (i % 3 > 1)
            assert_true(FIXTURE_WAIT(&recorder, recorder.messages == 1));
        recorder_free(&recorder);
    }
    assert_echo(fixture.client, "still here", 10);
    assert_true(FIXTURE_WAIT(&fixture, fixture.sessions_open == 0));
    fixture_stop(&fixture);
}

static void test_broadcast_shares_one_payload(void **state)
{
    (void)state;
    enum { STREAMS = 20, ROUNDS = 50 };
    struct fixture fixture;
    struct recorder recorders[STREAMS];
    fixture_start(&fixture, NULL);
    for (int i = 0; i < STREAMS; i++)
        recorder_open(&recorders[i], fixture.client, "/t/Bidi");
    for (int round = 0; round < ROUNDS; round++) {
        char text[16];
        struct mu_rpc_bytes *message = mu_rpc_bytes_copy(text, (size_t)snprintf(text, sizeof text, "%d", round));
        for (int i = 0; i < STREAMS; i++)
            assert_int_equal(mu_rpc_stream_send(recorders[i].stream, message), MU_OK);
        mu_rpc_bytes_unref(message);
    }
    for (int i = 0; i < STREAMS; i++) {
        assert_true(FIXTURE_WAIT(&recorders[i], recorders[i].messages == ROUNDS));
        assert_false(FIXTURE_GET(&recorders[i], out_of_order));
        recorder_free(&recorders[i]);
    }
    fixture_stop(&fixture);
}

/* --- the server as a whole --- */

static void test_call_cap_refuses_at_once_but_leaves_room_for_priority(void **state)
{
    (void)state;
    struct fixture fixture;
    struct mu_error err = {0};
    struct mu_rpc_bytes *reply = NULL;
    struct recorder held[2], refused, attach[2], third;
    struct mu_rpc_server_config config = fixture_server_config();
    config.max_calls = 2;
    config.max_priority_calls = 2;
    fixture_start(&fixture, &config);
    for (int i = 0; i < 2; i++)
        recorder_open(&held[i], fixture.client, "/t/Deaf");
    assert_true(FIXTURE_WAIT(&fixture, fixture.opened == 2));
    assert_int_equal(unary(fixture.client, "/t/Echo", "x", 1, 20000, &err, &reply), MU_ERR_LIMIT);
    assert_non_null(strstr(err.text, "too many open calls"));
    recorder_open(&refused, fixture.client, "/t/Deaf");
    assert_true(FIXTURE_WAIT(&refused, refused.closed == 1));
    assert_int_equal(FIXTURE_GET(&refused, code), MU_RPC_RESOURCE_EXHAUSTED);
    assert_int_equal(FIXTURE_GET(&refused, opened), 0);
    for (int i = 0; i < 2; i++) {
        recorder_open(&attach[i], fixture.client, "/t/Bidi");
        assert_true(FIXTURE_WAIT(&attach[i], attach[i].opened == 1));
    }
    recorder_open(&third, fixture.client, "/t/Bidi");
    assert_true(FIXTURE_WAIT(&third, third.closed == 1));
    assert_int_equal(FIXTURE_GET(&third, code), MU_RPC_RESOURCE_EXHAUSTED);
    recorder_free(&held[0]);
    assert_true(FIXTURE_WAIT(&fixture, fixture.closed[MU_RPC_CLOSED_CANCELLED] == 1));
    assert_echo(fixture.client, "room again", 10);
    recorder_free(&held[1]);
    recorder_free(&refused);
    recorder_free(&attach[0]);
    recorder_free(&attach[1]);
    recorder_free(&third);
    fixture_stop(&fixture);
}

enum { POSTERS = 4, ITEMS = 5000 };

struct poster {
    struct fixture *fixture;
    struct fixture_item *items;
};

static void *post_items(void *arg)
{
    struct poster *poster = arg;
    for (int i = 0; i < ITEMS; i++) {
        mu_rpc_server_post(poster->fixture->server, &poster->items[i].item);
        mu_rpc_server_wake(poster->fixture->server);
    }
    return NULL;
}

static void test_post_and_wake_from_threads_beside_calls_lose_nothing(void **state)
{
    (void)state;
    static struct fixture_item items[POSTERS][ITEMS];
    struct fixture fixture;
    struct poster posters[POSTERS];
    pthread_t threads[POSTERS];
    fixture_start(&fixture, NULL);
    for (int p = 0; p < POSTERS; p++) {
        for (int i = 0; i < ITEMS; i++)
            items[p][i] = (struct fixture_item){.poster = p, .number = i};
        posters[p] = (struct poster){&fixture, items[p]};
        assert_int_equal(pthread_create(&threads[p], NULL, post_items, &posters[p]), 0);
    }
    for (int i = 0; i < 50; i++)
        assert_echo(fixture.client, &i, sizeof i);
    assert_true(FIXTURE_WAIT(&fixture, fixture.items == POSTERS * ITEMS));
    for (int p = 0; p < POSTERS; p++)
        pthread_join(threads[p], NULL);
    assert_false(FIXTURE_GET(&fixture, items_out_of_order));
    assert_true(FIXTURE_WAIT(&fixture, fixture.wakes >= 1));
    assert_true(FIXTURE_GET(&fixture, wakes) <= POSTERS * ITEMS);
    fixture_stop(&fixture);
}

static void check_listen_fails(const char *listen, enum mu_status expected, const char *part)
{
    struct mu_rpc_server_config config = fixture_server_config();
    struct mu_rpc_server *server = NULL;
    struct mu_error err = {0};
    config.listen = listen;
    assert_int_equal(mu_rpc_server_new(&config, &err, &server), expected);
    assert_null(server);
    if (!strstr(err.text, part) || !strstr(err.text, listen) || strchr(err.text, '\n'))
        fail_msg("listen %s: '%s' lacks '%s'", listen, err.text, part);
}

static void test_listen_address_that_cannot_be_had_is_explained(void **state)
{
    (void)state;
    struct fixture fixture;
    char text[64];
    fixture_start(&fixture, NULL);
    unsigned port = mu_rpc_server_port(fixture.server);
    assert_true(port > 0);
    snprintf(text, sizeof text, "127.0.0.1:%u", port);
    assert_string_equal(mu_rpc_server_address(fixture.server), text);
    check_listen_fails(text, MU_ERR_BUSY, "in use");
    snprintf(text, sizeof text, "0.0.0.0:%u", port);
    check_listen_fails(text, MU_ERR_BUSY, "in use");
    check_listen_fails("192.0.2.1:7070", MU_ERR_INVALID, "does not have that address");
    check_listen_fails("nonsense", MU_ERR_INVALID, "no port");
    check_listen_fails("no-such-host.invalid:1", MU_ERR_INVALID, "literal address");
    check_listen_fails("unix:/no/such/dir/m.sock", MU_ERR_NOT_FOUND, "No such file");
    assert_echo(fixture.client, "untouched", 9);
    fixture_stop(&fixture);
}

static void test_unix_socket_and_ipv6_serve_too(void **state)
{
    (void)state;
    char dir[] = "/tmp/mu_rpc_XXXXXX", listen[64];
    assert_non_null(mkdtemp(dir));
    snprintf(listen, sizeof listen, "unix:%s/s", dir);
    struct fixture fixture;
    struct mu_rpc_server_config config = fixture_server_config();
    config.listen = listen;
    fixture_start(&fixture, &config);
    assert_int_equal(mu_rpc_server_port(fixture.server), 0);
    assert_echo(fixture.client, "by unix", 7);
    check_listen_fails(listen, MU_ERR_BUSY, "another process listens");
    assert_echo(fixture.client, "still mine", 10);
    fixture_stop(&fixture);
    unlink(listen + 5);
    assert_int_equal(rmdir(dir), 0);

    int probe = socket(AF_INET6, SOCK_STREAM, 0);
    struct sockaddr_in6 loopback = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    bool has_ipv6 = probe >= 0 && bind(probe, (struct sockaddr *)&loopback, sizeof loopback) == 0;
    if (probe >= 0)
        close(probe);
    if (!has_ipv6)
        return; /* a container without IPv6 */
    config.listen = "[::1]:0";
    fixture_start(&fixture, &config);
    assert_memory_equal(mu_rpc_server_address(fixture.server), "[::1]:", 6);
    assert_echo(fixture.client, "by ipv6", 7);
    struct recorder recorder;
    recorder_open(&recorder, fixture.client, "/t/Bidi");
    assert_true(FIXTURE_WAIT(&fixture, fixture.opened == 1));
    assert_memory_equal(fixture.peer, "[::1]:", 6);
    recorder_free(&recorder);
    fixture_stop(&fixture);
}

static void test_server_freed_with_open_calls_ends_them_all(void **state)
{
    (void)state;
    enum { STREAMS = 50 };
    struct fixture fixture;
    struct recorder recorders[STREAMS];
    fixture_start(&fixture, NULL);
    for (int i = 0; i < STREAMS; i++)
        recorder_open(&recorders[i], fixture.client, i % 2 ? "/t/Bidi" : "/t/Deaf");
    struct mu_rpc_reader *held = open_reader(fixture.client, "/t/Hold", "x");
    struct mu_rpc_reader *flooded = open_reader(fixture.client, "/t/Flood", "x");
    assert_true(FIXTURE_WAIT(&fixture, fixture.opened == STREAMS && fixture.held == 1 && fixture.flooded > 0));
    fixture_stop_core(&fixture);
    uint64_t before_us = mu_clock_mono_us();
    mu_rpc_server_free(fixture.server);
    fixture.server = NULL;
    assert_true(mu_clock_mono_us() - before_us < 5000000);
    for (int i = 0; i < STREAMS; i++) {
        assert_true(FIXTURE_WAIT(&recorders[i], recorders[i].closed == 1));
        assert_int_equal(FIXTURE_GET(&recorders[i], code), MU_RPC_UNAVAILABLE);
        recorder_free(&recorders[i]);
    }
    struct mu_error err;
    struct mu_rpc_bytes *message;
    assert_int_equal(mu_rpc_reader_next(held, 10000, &err, &message), MU_ERR_UNAVAILABLE);
    mu_rpc_reader_free(held);
    mu_rpc_reader_free(flooded);
    fixture_stop(&fixture);
}

static void test_drain_refuses_new_calls_and_tells_when_the_last_is_over(void **state)
{
    (void)state;
    struct fixture fixture;
    struct mu_rpc_server_config config = fixture_server_config();
    struct mu_error err = {0};
    struct mu_rpc_event event;
    struct recorder recorder;
    fixture_init(&fixture);
    assert_int_equal(mu_rpc_server_new(&config, &err, &fixture.server), MU_OK);
    assert_int_equal(mu_rpc_pool_new(1, &err, &fixture.pool), MU_OK);
    fixture.client = fixture_client(&fixture, NULL);
    recorder_open(&recorder, fixture.client, "/t/Bidi");
    assert_true(
        mu_rpc_server_next(fixture.server, mu_clock_mono_us() + 10000000, &event)); /* this thread is the core thread */
    assert_int_equal(event.type, MU_RPC_EVENT_OPENED);
    assert_int_equal(mu_rpc_server_call_count(fixture.server), 1);
    struct mu_rpc_call *call = event.call;
    mu_rpc_server_drain(fixture.server);
    assert_false(
        mu_rpc_server_next(fixture.server, mu_clock_mono_us() + 20000, &event)); /* one stream is open: not drained */

    struct mu_rpc_bytes *message = mu_rpc_bytes_copy("0", 1);
    assert_int_equal(mu_rpc_call_send(call, message), MU_OK);
    mu_rpc_bytes_unref(message);
    mu_rpc_call_finish(call, MU_RPC_OK, NULL);
    assert_true(mu_rpc_server_next(fixture.server, mu_clock_mono_us() + 10000000, &event));
    assert_int_equal(event.type, MU_RPC_EVENT_DRAINED);
    assert_int_equal(mu_rpc_server_call_count(fixture.server), 0);
    assert_true(FIXTURE_WAIT(&recorder, recorder.closed == 1));
    assert_int_equal(FIXTURE_GET(&recorder, messages), 1);
    assert_int_equal(FIXTURE_GET(&recorder, code), MU_RPC_OK);
    struct mu_rpc_bytes *reply = NULL;
    assert_int_equal(unary(fixture.client, "/t/Echo", "x", 1, 5000, &err, &reply), MU_ERR_UNAVAILABLE);
    recorder_free(&recorder);
    mu_rpc_client_free(fixture.client);
    mu_rpc_pool_free(fixture.pool);
    mu_rpc_server_free(fixture.server);
}

static void test_finished_call_whose_peer_does_not_read_is_cut_off(void **state)
{
    (void)state;
    struct fixture fixture;
    struct mu_rpc_server_config config = fixture_server_config();
    struct mu_error err = {0};
    struct mu_rpc_event event;
    config.linger_ms = 30;
    fixture_init(&fixture);
    assert_int_equal(mu_rpc_server_new(&config, &err, &fixture.server), MU_OK);
    assert_int_equal(mu_rpc_pool_new(1, &err, &fixture.pool), MU_OK);
    fixture.client = fixture_client(&fixture, NULL);
    struct mu_rpc_reader *reader = open_reader(fixture.client, "/t/Flood", "");
    assert_true(mu_rpc_server_next(fixture.server, mu_clock_mono_us() + 10000000, &event));
    assert_int_equal(event.type, MU_RPC_EVENT_CALL);
    void *data;
    struct mu_rpc_bytes *message = mu_rpc_bytes_new(FLOOD_BYTES, &data);
    memset(data, 0, FLOOD_BYTES);
    while (mu_rpc_call_send(event.call, message) == MU_OK)
        ;
    assert_true(mu_rpc_call_queued_bytes(event.call) > 0);
    mu_rpc_bytes_unref(message);
    mu_rpc_call_finish(event.call, MU_RPC_OK, NULL);
    assert_int_equal(mu_rpc_server_call_count(fixture.server), 1);
    uint64_t until_us = mu_clock_mono_us() + 10000000;
    while (mu_rpc_server_call_count(fixture.server) > 0 && mu_clock_mono_us() < until_us)
        assert_false(mu_rpc_server_next(fixture.server, mu_clock_mono_us() + 10000, &event));
    assert_int_equal(mu_rpc_server_call_count(fixture.server), 0);
    mu_rpc_reader_free(reader);
    mu_rpc_client_free(fixture.client);
    mu_rpc_server_free(fixture.server);
    mu_rpc_pool_free(fixture.pool);
}

static void test_two_hundred_idle_connections_do_not_disturb(void **state)
{
    (void)state;
    enum { COUNT = 200 };
    struct fixture fixture;
    struct mu_rpc_client *clients[COUNT];
    int raw[COUNT];
    fixture_start(&fixture, NULL);
    for (int i = 0; i < COUNT; i++) {
        clients[i] = fixture_client(&fixture, NULL);
        assert_echo(clients[i], &i, sizeof i); /* a connection each, then idle */
        raw[i] = connect_raw(mu_rpc_server_port(fixture.server));
    }
    uint64_t before_us = mu_clock_mono_us();
    assert_echo(fixture.client, "quick", 5);
    assert_true(mu_clock_mono_us() - before_us < 2000000);
    assert_echo(clients[COUNT - 1], "last", 4);
    for (int i = 0; i < COUNT; i++) {
        mu_rpc_client_free(clients[i]);
        close(raw[i]);
    }
    fixture_stop(&fixture);
}

static void test_several_pollers_serve_streams_in_order(void **state)
{
    (void)state;
    enum { STREAMS = 12, COUNT = 300 };
    struct fixture fixture;
    struct mu_error err;
    struct recorder recorders[STREAMS];
    struct mu_rpc_client *clients[STREAMS];
    struct mu_rpc_server_config config = fixture_server_config();
    config.pollers = 3;
    fixture_init(&fixture);
    fixture_start_server(&fixture, &config);
    assert_int_equal(mu_rpc_pool_new(2, &err, &fixture.pool), MU_OK);
    for (int i = 0; i < STREAMS; i++) {
        clients[i] = fixture_client(&fixture, NULL);
        recorder_open(&recorders[i], clients[i], "/t/Bidi");
    }
    for (int n = 0; n < COUNT; n++) {
        char text[16];
        int length = snprintf(text, sizeof text, "%d", n);
        for (int i = 0; i < STREAMS; i++)
            assert_int_equal(recorder_send(&recorders[i], text, (size_t)length), MU_OK);
    }
    for (int i = 0; i < STREAMS; i++) {
        mu_rpc_stream_close_send(recorders[i].stream);
        assert_true(FIXTURE_WAIT(&recorders[i], recorders[i].closed == 1));
        assert_int_equal(FIXTURE_GET(&recorders[i], code), MU_RPC_OK);
        assert_int_equal(FIXTURE_GET(&recorders[i], messages), COUNT);
        assert_false(FIXTURE_GET(&recorders[i], out_of_order));
        recorder_free(&recorders[i]);
        mu_rpc_client_free(clients[i]);
    }
    fixture_stop(&fixture);
}

static void test_nobody_listening_fails_fast_and_works_once_somebody_does(void **state)
{
    (void)state;
    struct fixture fixture;
    struct mu_error err = {0};
    struct mu_rpc_bytes *reply = NULL;
    struct recorder recorder;
    char address[64];
    fixture_start(&fixture, NULL);
    snprintf(address, sizeof address, "%s", mu_rpc_server_address(fixture.server));
    assert_echo(fixture.client, "before", 6);
    fixture_stop_core(&fixture);
    mu_rpc_server_free(fixture.server);
    fixture.server = NULL;

    uint64_t before_us = mu_clock_mono_us();
    assert_int_equal(unary(fixture.client, "/t/Echo", "x", 1, 30000, &err, &reply), MU_ERR_UNAVAILABLE);
    assert_true(mu_clock_mono_us() - before_us < 5000000);
    recorder_open(&recorder, fixture.client, "/t/Bidi");
    assert_true(FIXTURE_WAIT(&recorder, recorder.closed == 1));
    assert_int_equal(FIXTURE_GET(&recorder, opened), 0);
    assert_int_equal(FIXTURE_GET(&recorder, code), MU_RPC_UNAVAILABLE);
    recorder_free(&recorder);
    struct mu_rpc_client_config never = mu_rpc_client_config_default();
    struct mu_rpc_client *client;
    never.address = address;
    assert_int_equal(mu_rpc_client_new(fixture.pool, &never, &err, &client), MU_OK);
    assert_int_equal(unary(client, "/t/Echo", "x", 1, 30000, &err, &reply), MU_ERR_UNAVAILABLE);
    char expected[128];
    snprintf(expected, sizeof expected, "cannot connect to %s: Connection refused", address);
    if (strncmp(err.text, expected, strlen(expected)) != 0)
        fail_msg("'%s'", err.text);
    mu_rpc_client_free(client);

    struct mu_rpc_server_config config = fixture_server_config();
    config.listen = address;
    fixture.stop = false;
    fixture_start_server(&fixture, &config);
    enum mu_status status = MU_ERR_UNAVAILABLE;
    uint64_t until_us = mu_clock_mono_us() + 10000000;
    while (status == MU_ERR_UNAVAILABLE && mu_clock_mono_us() < until_us)
        status = unary(fixture.client, "/t/Echo", "x", 1, 5000, &err, &reply);
    assert_int_equal(status, MU_OK);
    mu_rpc_bytes_unref(reply);
    fixture_stop(&fixture);
}

static void test_config_out_of_range_is_refused(void **state)
{
    (void)state;
    struct mu_error err = {0};
    struct mu_rpc_server *server = NULL;
    struct mu_rpc_pool *pool = NULL;
    struct mu_rpc_server_config config = fixture_server_config();
    config.pollers = 0;
    assert_int_equal(mu_rpc_server_new(&config, &err, &server), MU_ERR_INVALID);
    assert_non_null(strstr(err.text, "pollers is 0"));
    config = fixture_server_config();
    struct mu_rpc_method twice[] = {fixture_methods[0], fixture_methods[0]};
    config.methods = twice;
    config.method_count = 2;
    assert_int_equal(mu_rpc_server_new(&config, &err, &server), MU_ERR_INVALID);
    assert_non_null(strstr(err.text, "/t/Echo is listed twice"));
    assert_int_equal(mu_rpc_pool_new(0, &err, &pool), MU_ERR_INVALID);
    assert_int_equal(mu_rpc_pool_new(1, &err, &pool), MU_OK);
    struct mu_rpc_client_config client_config = mu_rpc_client_config_default();
    struct mu_rpc_client *client = NULL;
    client_config.address = "127.0.0.1:0";
    assert_int_equal(mu_rpc_client_new(pool, &client_config, &err, &client), MU_ERR_INVALID);
    assert_non_null(strstr(err.text, "port 0"));
    mu_rpc_pool_free(pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unary_of_any_size_is_answered),
        cmocka_unit_test(test_unary_error_carries_status_and_text),
        cmocka_unit_test(test_unknown_method_is_unimplemented_at_once),
        cmocka_unit_test(test_deadline_ends_the_call_on_both_sides),
        cmocka_unit_test(test_oversize_messages_are_refused_and_the_server_goes_on),
        cmocka_unit_test(test_oversize_metadata_is_refused_and_the_server_goes_on),
        cmocka_unit_test(test_call_without_a_message_is_an_invalid_argument),
        cmocka_unit_test(test_bytes_that_are_not_http2_end_their_connection_only),
        cmocka_unit_test(test_call_facts_peer_header_and_deadline_are_known),
        cmocka_unit_test(test_bidi_ten_thousand_messages_come_back_in_order),
        cmocka_unit_test(test_cancel_by_the_client_is_told_once_as_cancelled),
        cmocka_unit_test(test_finish_by_the_server_carries_code_and_text),
        cmocka_unit_test(test_server_stream_longer_than_its_queue_arrives_whole),
        cmocka_unit_test(test_slow_reader_fills_the_queue_and_then_gets_everything),
        cmocka_unit_test(test_reader_wait_ends_by_timeout_and_by_cancel_of_another_thread),
        cmocka_unit_test(test_client_queue_full_refuses_then_tells_writable),
        cmocka_unit_test(test_stream_freed_inside_its_callback_is_silent_afterwards),
        cmocka_unit_test(test_stream_freed_at_any_moment_leaves_nothing_behind),
        cmocka_unit_test(test_broadcast_shares_one_payload),
        cmocka_unit_test(test_call_cap_refuses_at_once_but_leaves_room_for_priority),
        cmocka_unit_test(test_post_and_wake_from_threads_beside_calls_lose_nothing),
        cmocka_unit_test(test_listen_address_that_cannot_be_had_is_explained),
        cmocka_unit_test(test_unix_socket_and_ipv6_serve_too),
        cmocka_unit_test(test_server_freed_with_open_calls_ends_them_all),
        cmocka_unit_test(test_drain_refuses_new_calls_and_tells_when_the_last_is_over),
        cmocka_unit_test(test_finished_call_whose_peer_does_not_read_is_cut_off),
        cmocka_unit_test(test_two_hundred_idle_connections_do_not_disturb),
        cmocka_unit_test(test_several_pollers_serve_streams_in_order),
        cmocka_unit_test(test_nobody_listening_fails_fast_and_works_once_somebody_does),
        cmocka_unit_test(test_config_out_of_range_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
