/* links: mu_rpc */
/* The server of rpc/ as a whole: caps, queues between threads, addresses, drain, end, many connections. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "tests/lib/rpc_checks.h"

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

/* The core thread hangs at the lock while calls come and give up. */
static void test_a_call_whose_deadline_is_over_is_not_told(void **state)
{
    (void)state;
    struct fixture fixture;
    struct mu_error err;
    struct mu_rpc_bytes *reply = NULL;
    struct recorder deaf;
    fixture_start(&fixture, NULL);
    assert_echo(fixture.client, "connected", 9);
    pthread_mutex_lock(&fixture.lock);
    recorder_open(&deaf, fixture.client, "/t/Deaf");
    for (int i = 0; i < 4; i++)
        assert_int_equal(unary(fixture.client, "/t/Hold", "x", 1, 50, &err, &reply), MU_ERR_TIMEOUT);
    uint64_t free_us = mu_clock_mono_us();
    pthread_mutex_unlock(&fixture.lock);
    assert_echo(fixture.client, "alive", 5); /* after all of them */
    assert_int_equal(FIXTURE_GET(&fixture, opened), 1);
    assert_true(FIXTURE_GET(&fixture, least_deadline_us) >= free_us);
    recorder_free(&deaf);
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
    mu_rpc_server_free(fixture.server);
    fixture.server = NULL;
    for (int i = 0; i < STREAMS; i++) {
        assert_true(FIXTURE_WAIT(&recorders[i], recorders[i].closed == 1));
        assert_int_equal(FIXTURE_GET(&recorders[i], code), MU_RPC_UNAVAILABLE);
        recorder_free(&recorders[i]);
    }
    struct mu_error err;
    struct mu_rpc_bytes *message;
    assert_int_equal(mu_rpc_reader_next(held, FIXTURE_WAIT_MS, &err, &message), MU_ERR_UNAVAILABLE);
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
    assert_true(mu_rpc_server_next(fixture.server, mu_clock_mono_us() + FIXTURE_WAIT_MS * 1000ull,
                                   &event)); /* this thread is the core thread */
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
    assert_true(mu_rpc_server_next(fixture.server, mu_clock_mono_us() + FIXTURE_WAIT_MS * 1000ull, &event));
    assert_int_equal(event.type, MU_RPC_EVENT_DRAINED);
    assert_int_equal(mu_rpc_server_call_count(fixture.server), 0);
    assert_true(FIXTURE_WAIT(&recorder, recorder.closed == 1));
    assert_int_equal(FIXTURE_GET(&recorder, messages), 1);
    assert_int_equal(FIXTURE_GET(&recorder, code), MU_RPC_OK);
    struct mu_rpc_bytes *reply = NULL;
    assert_int_equal(unary(fixture.client, "/t/Echo", "x", 1, FIXTURE_WAIT_MS, &err, &reply), MU_ERR_UNAVAILABLE);
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
    assert_true(mu_rpc_server_next(fixture.server, mu_clock_mono_us() + FIXTURE_WAIT_MS * 1000ull, &event));
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
    uint64_t until_us = mu_clock_mono_us() + FIXTURE_WAIT_MS * 1000ull;
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
    assert_echo(fixture.client, "quick", 5);
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

    assert_int_equal(unary(fixture.client, "/t/Echo", "x", 1, FIXTURE_WAIT_MS, &err, &reply), MU_ERR_UNAVAILABLE);
    recorder_open(&recorder, fixture.client, "/t/Bidi");
    assert_true(FIXTURE_WAIT(&recorder, recorder.closed == 1));
    assert_int_equal(FIXTURE_GET(&recorder, opened), 0);
    assert_int_equal(FIXTURE_GET(&recorder, code), MU_RPC_UNAVAILABLE);
    recorder_free(&recorder);
    struct mu_rpc_client_config never = mu_rpc_client_config_default();
    struct mu_rpc_client *client;
    never.address = address;
    assert_int_equal(mu_rpc_client_new(fixture.pool, &never, &err, &client), MU_OK);
    assert_int_equal(unary(client, "/t/Echo", "x", 1, FIXTURE_WAIT_MS, &err, &reply), MU_ERR_UNAVAILABLE);
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
    uint64_t until_us = mu_clock_mono_us() + FIXTURE_WAIT_MS * 1000ull;
    while (status == MU_ERR_UNAVAILABLE && mu_clock_mono_us() < until_us)
        status = unary(fixture.client, "/t/Echo", "x", 1, FIXTURE_WAIT_MS, &err, &reply);
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
        cmocka_unit_test(test_call_cap_refuses_at_once_but_leaves_room_for_priority),
        cmocka_unit_test(test_post_and_wake_from_threads_beside_calls_lose_nothing),
        cmocka_unit_test(test_a_call_whose_deadline_is_over_is_not_told),
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
