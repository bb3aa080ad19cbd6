/* links: mu_rpc */
/* Server and client of rpc/ against each other over real sockets. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include <poll.h>

#include "tests/lib/rpc_checks.h"

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
    assert_int_equal(unary(fixture.client, "/t/Fail", "x", 1, FIXTURE_WAIT_MS, &err, &reply), MU_ERR_NOT_FOUND);
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
    for (int i = 0; i < 40; i++) { /* more than are armed at a time */
        assert_int_equal(unary(fixture.client, "/t/Nothing", "x", 1, FIXTURE_WAIT_MS, &err, &reply), MU_ERR_INVALID);
        assert_non_null(strstr(err.text, "does not know /t/Nothing"));
    }
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
    assert_int_equal(unary(fixture.client, "/t/Hold", "x", 1, 500, &err, &reply), MU_ERR_TIMEOUT);
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
    assert_int_equal(unary(fixture.client, "/t/Echo", big, sizeof big, FIXTURE_WAIT_MS, &err, &reply), MU_ERR_LIMIT);
    struct mu_rpc_client_config config = mu_rpc_client_config_default();
    config.max_receive_bytes = 1000;
    struct mu_rpc_client *small = fixture_client(&fixture, &config);
    assert_int_equal(unary(small, "/t/Big", "1001", 4, FIXTURE_WAIT_MS, &err, &reply), MU_ERR_LIMIT);
    assert_int_equal(unary(small, "/t/Big", "1000", 4, FIXTURE_WAIT_MS, &err, &reply), MU_OK);
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
    assert_int_equal(unary(client, "/t/Echo", "x", 1, FIXTURE_WAIT_MS, &err, &reply), MU_ERR_LIMIT);
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

/* Whatever it is that comes, the stream ends in one CLOSED: by the server's own judgement, or at the latest with the
 * connection. */
static void check_raw_message(struct fixture *fixture, const char *encoding, const void *data, size_t size,
                              bool truncated)
{
    int opened = FIXTURE_GET(fixture, opened), cancelled = FIXTURE_GET(fixture, closed[MU_RPC_CLOSED_CANCELLED]);
    int bad = FIXTURE_GET(fixture, closed[MU_RPC_CLOSED_BAD_MESSAGE]);
    int fd = open_raw_stream(mu_rpc_server_port(fixture->server), "/t/Deaf", encoding);
    assert_true(FIXTURE_WAIT(fixture, fixture->opened == opened + 1));
    put_frame(fd, 0, 0, 1, data, size); /* DATA */
    close(fd);
    assert_true(
        FIXTURE_WAIT(fixture, fixture->closed[MU_RPC_CLOSED_CANCELLED] + fixture->closed[MU_RPC_CLOSED_BAD_MESSAGE] ==
                                  cancelled + bad + 1));
    if (truncated) /* the peer died in the middle: that is no judgement on what it sent */
        assert_int_equal(FIXTURE_GET(fixture, closed[MU_RPC_CLOSED_CANCELLED]), cancelled + 1);
}

static void test_malformed_messages_end_their_stream_only(void **state)
{
    (void)state;
    static const char truncated[] = "\0\0\0\4\0half of it", bad_flag[] = "\7\0\0\0\4abcd",
                      too_long[] = "\0\x7f\xff\xff\xff...";
    struct fixture fixture;
    fixture_start(&fixture, NULL);
    check_raw_message(&fixture, "identity", truncated, sizeof truncated - 1, true);
    check_raw_message(&fixture, "identity", "\0\0", 2, true);
    check_raw_message(&fixture, "identity", bad_flag, sizeof bad_flag - 1, false);
    check_raw_message(&fixture, "identity", too_long, sizeof too_long - 1, true);
    assert_int_equal(FIXTURE_GET(&fixture, messages), 0);
    assert_echo(fixture.client, "alive", 5);
    fixture_stop(&fixture);
}

static void test_compressed_message_is_refused_unread(void **state)
{
    (void)state;
    static const char compressed[] = "\1\0\0\0\4abcd";
    struct fixture fixture;
    fixture_start(&fixture, NULL);
    int fd = open_raw_stream(mu_rpc_server_port(fixture.server), "/t/Deaf", "gzip");
    put_frame(fd, 0, 0, 1, compressed, sizeof compressed - 1);
    assert_true(FIXTURE_WAIT(&fixture,
                             fixture.closed[MU_RPC_CLOSED_CANCELLED] + fixture.closed[MU_RPC_CLOSED_BAD_MESSAGE] == 1));
    assert_int_equal(FIXTURE_GET(&fixture, messages), 0);
    close(fd);
    assert_echo(fixture.client, "alive", 5);
    fixture_stop(&fixture);
}

static void test_message_far_over_the_limit_is_cut_off_before_it_is_whole(void **state)
{
    (void)state;
    enum { SIZE = 64 << 20 };
    struct fixture fixture;
    struct mu_error err = {0};
    struct mu_rpc_bytes *reply = NULL;
    struct mu_rpc_server_config config = fixture_server_config();
    config.max_memory_bytes = 8 << 20;
    config.max_owed_bytes = config.max_owed_bytes_in_all = 0; /* or its connection may be closed for it */
    fixture_start(&fixture, &config);
    void *data;
    struct mu_rpc_bytes *request = mu_rpc_bytes_new(SIZE, &data);
    memset(data, 1, SIZE);
    assert_int_equal(mu_rpc_client_call(fixture.client, "/t/Echo", request, 20000, &err, &reply), MU_ERR_LIMIT);
    assert_null(strstr(err.text, "larger than max")); /* which the core says when it has all of it in memory */
    mu_rpc_bytes_unref(request);
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

static void test_server_stream_longer_than_its_queue_arrives_whole(void **state)
{
    (void)state;
    enum { COUNT = 3000 };
    struct fixture fixture;
    struct mu_error err = {0};
    struct mu_rpc_bytes *message = NULL;
    struct mu_rpc_server_config config = fixture_server_config();
    config.max_ordinary_queue_messages = 64;
    fixture_start(&fixture, &config);
    char text[16];
    snprintf(text, sizeof text, "%d", COUNT);
    struct mu_rpc_reader *reader = open_reader(fixture.client, "/t/Count", text);
    for (int i = 0; i < COUNT; i++) {
        assert_int_equal(mu_rpc_reader_next(reader, FIXTURE_WAIT_MS, &err, &message), MU_OK);
        assert_non_null(message);
        int length = snprintf(text, sizeof text, "%d", i);
        assert_int_equal(mu_rpc_bytes_size(message), length);
        assert_memory_equal(mu_rpc_bytes_data(message), text, (size_t)length);
        mu_rpc_bytes_unref(message);
    }
    for (int again = 0; again < 2; again++) {
        message = (struct mu_rpc_bytes *)text;
        assert_int_equal(mu_rpc_reader_next(reader, FIXTURE_WAIT_MS, &err, &message), MU_OK);
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
    config.max_ordinary_queue_bytes = (size_t)16 * FLOOD_BYTES;
    fixture_start(&fixture, &config);
    struct mu_rpc_reader *reader = open_reader(fixture.client, "/t/Flood", "");
    assert_true(FIXTURE_WAIT(&fixture, fixture.flooded > 0));
    assert_true(FIXTURE_GET(&fixture, flooded) >= 16); /* the queue, and nothing unbounded behind it */
    assert_true(FIXTURE_GET(&fixture, flooded) < 1000);
    for (long i = 0; i < FIXTURE_GET(&fixture, flooded); i++) {
        assert_int_equal(mu_rpc_reader_next(reader, FIXTURE_WAIT_MS, &err, &message), MU_OK);
        assert_int_equal(mu_rpc_bytes_size(message), FLOOD_BYTES);
        assert_int_equal(((const char *)mu_rpc_bytes_data(message))[7], (char)(i & 0x7f));
        mu_rpc_bytes_unref(message);
    }
    assert_int_equal(mu_rpc_reader_next(reader, FIXTURE_WAIT_MS, &err, &message), MU_OK);
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
        cmocka_unit_test(test_malformed_messages_end_their_stream_only),
        cmocka_unit_test(test_compressed_message_is_refused_unread),
        cmocka_unit_test(test_message_far_over_the_limit_is_cut_off_before_it_is_whole),
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
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
