/* links: mu_rpc PkgConfig::GRPC */
/* What one client may take of a server: connections, descriptors, open calls, questions a second; and who is served
 * first. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>

#include "rpc/peers.h"
#include "rpc/server_internal.h"
#include "tests/lib/rpc_checks.h"

enum { WAIT_MS = 120000, FILES_MAX = 4096 };

/* ---- peers ---- */

static void test_peer_name_is_the_host_or_its_network(void **state)
{
    (void)state;
    char host[MU_RPC_PEER_NAME_SIZE];
    static const char *const pairs[][2] = {{"10.0.0.7:51324", "10.0.0.7"},
                                           {"[2001:db8:1:2:3:4:5:6]:9", "2001:db8:1:2::/64"},
                                           {"[::ffff:10.0.0.7]:80", "::ffff:10.0.0.7"},
                                           {"[::1]:51324", "::/64"},
                                           {"unix:", "unix:"},
                                           {"", ""}};
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        mu_rpc_peer_host(pairs[i][0], host);
        assert_string_equal(host, pairs[i][1]);
    }
}

static void test_peer_over_its_open_calls_is_refused_until_it_closes_one(void **state)
{
    (void)state;
    struct mu_rpc_peers *peers = mu_rpc_peers_new(2, 0);
    struct mu_rpc_peer *first = mu_rpc_peers_open(peers, "a"), *second = mu_rpc_peers_open(peers, "a");
    assert_true(first && first == second);
    assert_null(mu_rpc_peers_open(peers, "a"));
    struct mu_rpc_peer *other = mu_rpc_peers_open(peers, "b");
    assert_true(other && other != first);
    mu_rpc_peers_close(peers, first);
    assert_ptr_equal(mu_rpc_peers_open(peers, "a"), second);
    for (int i = 0; i < 100; i++)
        assert_true(mu_rpc_peers_ask(peers, second, 1)); /* no limit */
    mu_rpc_peers_free(peers);
}

static void test_peer_asks_as_often_as_it_may_and_no_more(void **state)
{
    (void)state;
    enum { RATE = 10, BURST = RATE * MU_RPC_PEERS_BURST_S };
    struct mu_rpc_peers *peers = mu_rpc_peers_new(0, RATE);
    struct mu_rpc_peer *peer = mu_rpc_peers_open(peers, "a");
    uint64_t now_us = 77;
    for (int round = 0; round < 3; round++) {
        int taken = 0;
        while (taken < 10 * BURST && mu_rpc_peers_ask(peers, peer, now_us))
            taken++;
        assert_int_equal(taken, BURST);
        now_us += 3600000000ull; /* an hour saves up no more than the burst */
    }
    for (int i = 0; i < BURST; i++)
        (void)mu_rpc_peers_ask(peers, peer, now_us);
    int taken = 0;
    for (int ms = 0; ms < 5000; ms++) {
        now_us += 1000;
        taken += mu_rpc_peers_ask(peers, peer, now_us);
    }
    assert_int_equal(taken, 5 * RATE);
    mu_rpc_peers_free(peers);
}

static void test_many_peers_are_forgotten_when_idle_and_no_sooner(void **state)
{
    (void)state;
    struct mu_rpc_peers *peers = mu_rpc_peers_new(1, 1);
    struct mu_rpc_peer *held = mu_rpc_peers_open(peers, "held");
    while (mu_rpc_peers_ask(peers, held, 5))
        ;
    for (int i = 0; i < 3 * MU_RPC_PEERS_IDLE_MAX; i++) {
        char name[32];
        snprintf(name, sizeof name, "peer-%d", i);
        struct mu_rpc_peer *peer = mu_rpc_peers_open(peers, name);
        assert_non_null(peer);
        assert_true(mu_rpc_peers_ask(peers, peer, 5));
        mu_rpc_peers_close(peers, peer);
    }
    assert_null(mu_rpc_peers_open(peers, "held"));
    assert_false(mu_rpc_peers_ask(peers, held, 5));
    mu_rpc_peers_close(peers, held);
    mu_rpc_peers_free(peers);
}

/* ---- connections ---- */

/* Whether the server answers an HTTP/2 greeting there; false: it closed the connection. */
static bool is_served(int fd)
{
    static const char greeting[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0";
    char byte;
    (void)send(fd, greeting, sizeof greeting - 1, MSG_NOSIGNAL);
    struct pollfd one = {.fd = fd, .events = POLLIN};
    assert_int_equal(poll(&one, 1, WAIT_MS), 1);
    return recv(fd, &byte, 1, 0) == 1;
}

static void test_host_with_too_many_connections_is_turned_away(void **state)
{
    (void)state;
    enum { MOST = 3 };
    struct fixture fixture;
    struct mu_rpc_server_config config = fixture_server_config();
    config.max_connections_per_host = MOST;
    fixture_init(&fixture);
    fixture_start_server(&fixture, &config);
    int fds[MOST];
    for (int i = 0; i < MOST; i++) {
        fds[i] = connect_raw(mu_rpc_server_port(fixture.server));
        assert_true(is_served(fds[i]));
    }
    int more = connect_raw(mu_rpc_server_port(fixture.server));
    assert_false(is_served(more));
    close(more);
    struct mu_rpc_refusals refusals = mu_rpc_server_refusals(fixture.server);
    assert_true(refusals.connections_of_peer >= 1 && refusals.connections_without_file == 0);
    assert_string_equal(refusals.last_host, "127.0.0.1");
    close(fds[0]);
    bool is_in = false;
    for (uint64_t until_us = mu_clock_mono_us() + WAIT_MS * 1000ull; !is_in && mu_clock_mono_us() < until_us;) {
        fds[0] = connect_raw(mu_rpc_server_port(fixture.server));
        is_in = is_served(fds[0]);
        if (!is_in)
            close(fds[0]);
    }
    assert_true(is_in); /* whoever leaves makes room */
    for (int i = 0; i < MOST; i++)
        close(fds[i]);
    fixture_stop(&fixture);
}

/* Takes every descriptor that is left, but leaves `spare` of them free. */
static int take_descriptors(int *fds, int spare)
{
    int count = 0;
    while (count < FILES_MAX && (fds[count] = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0)
        count++;
    assert_true(count > spare && count < FILES_MAX);
    for (; spare > 0; spare--)
        close(fds[--count]);
    return count;
}

static void test_listener_outlives_the_last_descriptor(void **state)
{
    (void)state;
    static int taken[FILES_MAX];
    struct fixture fixture;
    struct rlimit before, low;
    fixture_init(&fixture);
    fixture_start_server(&fixture, NULL);
    int early = connect_raw(mu_rpc_server_port(fixture.server));
    assert_true(is_served(early));

    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    low = before;
    low.rlim_cur = (rlim_t)early + 40;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
    int count = take_descriptors(taken, 1); /* for our own side of the connection */
    for (int i = 0; i < 5; i++) {
        int fd = connect_raw(mu_rpc_server_port(fixture.server));
        assert_false(is_served(fd));
        close(fd);
    }
    assert_true(mu_rpc_server_refusals(fixture.server).connections_without_file >= 5);
    assert_false(mu_rpc_server_refusals(fixture.server).is_stuck);
    while (count > 0)
        close(taken[--count]);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);

    int late = connect_raw(mu_rpc_server_port(fixture.server));
    assert_true(is_served(late));
    close(late);
    close(early);
    fixture_stop(&fixture);
}

static void test_unix_socket_has_a_gate_too(void **state)
{
    (void)state;
    struct fixture fixture;
    struct mu_rpc_server_config config = fixture_server_config();
    char listen[64];
    snprintf(listen, sizeof listen, "unix:/tmp/mu-limits-%d.sock", (int)getpid());
    config.listen = listen;
    config.max_connections_per_host = 1; /* says nothing of Unix sockets */
    fixture_start(&fixture, &config);
    struct mu_rpc_client *second = fixture_client(&fixture, NULL);
    assert_echo(fixture.client, "a", 1);
    assert_echo(second, "b", 1);
    mu_rpc_client_free(second);
    fixture_stop(&fixture);
    unlink(listen + 5);
}

/* ---- calls ---- */

static void test_client_over_its_open_calls_is_refused_but_for_priority(void **state)
{
    (void)state;
    struct fixture fixture;
    struct mu_error err = {0};
    struct mu_rpc_bytes *reply = NULL;
    struct recorder held[2], attach;
    struct mu_rpc_server_config config = fixture_server_config();
    config.max_calls_per_peer = 2;
    fixture_start(&fixture, &config);
    for (int i = 0; i < 2; i++) {
        recorder_open(&held[i], fixture.client, "/t/Deaf");
        assert_true(FIXTURE_WAIT(&held[i], held[i].opened == 1));
    }
    assert_int_equal(unary(fixture.client, "/t/Echo", "x", 1, WAIT_MS, &err, &reply), MU_ERR_LIMIT);
    assert_non_null(strstr(err.text, "127.0.0.1 has 2 calls open"));
    recorder_open(&attach, fixture.client, "/t/Bidi");
    assert_true(FIXTURE_WAIT(&attach, attach.opened == 1));
    recorder_free(&held[0]);
    assert_true(FIXTURE_WAIT(&fixture, fixture.closed[MU_RPC_CLOSED_CANCELLED] == 1));
    assert_echo(fixture.client, "room again", 10);
    recorder_free(&held[1]);
    recorder_free(&attach);
    fixture_stop(&fixture);
}

static void test_client_that_asks_too_often_is_refused_but_not_its_changes(void **state)
{
    (void)state;
    struct fixture fixture;
    struct mu_error err = {0};
    struct mu_rpc_server_config config = fixture_server_config();
    config.max_questions_per_second = 1;
    fixture_start(&fixture, &config);
    int answered = 0;
    enum mu_status status = MU_OK;
    while (answered < 1000 && status == MU_OK) {
        struct mu_rpc_bytes *reply = NULL;
        status = unary(fixture.client, "/t/Echo", "x", 1, WAIT_MS, &err, &reply);
        answered += status == MU_OK;
        mu_rpc_bytes_unref(reply);
    }
    assert_int_equal(status, MU_ERR_LIMIT);
    assert_true(answered >= MU_RPC_PEERS_BURST_S);
    assert_non_null(strstr(err.text, "127.0.0.1 asks more than 1 times a second"));
    for (int i = 0; i < 20; i++) {
        struct mu_rpc_bytes *reply = NULL;
        assert_int_equal(unary(fixture.client, "/t/Fail", "x", 1, WAIT_MS, &err, &reply), MU_ERR_NOT_FOUND);
    }
    assert_true(mu_rpc_server_refusals(fixture.server).questions_of_peer >= 1);
    fixture_stop(&fixture);
}

static size_t count_of(const struct mu_rpc_list *list)
{
    size_t count = 0;
    for (const struct mu_rpc_item *item = list->first; item; item = item->next)
        count++;
    return count;
}

/* Nobody takes events yet: waits until so many completed operations lie there. */
static bool await_operations(struct mu_rpc_server *server, size_t urgent, size_t done)
{
    for (uint64_t until_us = mu_clock_mono_us() + WAIT_MS * 1000ull; mu_clock_mono_us() < until_us;) {
        pthread_mutex_lock(&server->inbox.lock);
        bool is_there = count_of(&server->inbox.batch.urgent) >= urgent && count_of(&server->inbox.batch.done) >= done;
        pthread_mutex_unlock(&server->inbox.lock);
        if (is_there)
            return true;
        (void)poll(NULL, 0, 1);
    }
    return false;
}

static void test_priority_calls_are_told_before_others_that_came_earlier(void **state)
{
    (void)state;
    enum { QUESTIONS = 8 };
    struct fixture fixture;
    struct mu_error err = {0};
    struct recorder questions[QUESTIONS], attach;
    struct mu_rpc_server_config config = fixture_server_config();
    struct mu_rpc_event event;
    fixture_init(&fixture);
    assert_int_equal(mu_rpc_server_new(&config, &err, &fixture.server), MU_OK);
    assert_int_equal(mu_rpc_pool_new(1, &err, &fixture.pool), MU_OK);
    fixture.client = fixture_client(&fixture, NULL);
    for (int i = 0; i < QUESTIONS; i++)
        recorder_open(&questions[i], fixture.client, "/t/Deaf");
    assert_true(await_operations(fixture.server, 0, QUESTIONS));
    assert_true(mu_rpc_server_next(fixture.server, 0, &event)); /* a batch is begun */
    assert_int_equal(event.method_id, M_DEAF);
    recorder_open(&attach, fixture.client, "/t/Bidi");
    assert_true(await_operations(fixture.server, 1, 0));
    assert_true(mu_rpc_server_next(fixture.server, 0, &event));
    assert_int_equal(event.method_id, M_BIDI);
    for (int i = 1; i < QUESTIONS; i++) {
        assert_true(mu_rpc_server_next(fixture.server, mu_clock_mono_us() + WAIT_MS * 1000ull, &event));
        assert_int_equal(event.method_id, M_DEAF);
    }
    for (int i = 0; i < QUESTIONS; i++)
        mu_rpc_stream_free(questions[i].stream);
    mu_rpc_stream_free(attach.stream);
    mu_rpc_client_free(fixture.client);
    mu_rpc_server_free(fixture.server);
    mu_rpc_pool_free(fixture.pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_peer_name_is_the_host_or_its_network),
        cmocka_unit_test(test_peer_over_its_open_calls_is_refused_until_it_closes_one),
        cmocka_unit_test(test_peer_asks_as_often_as_it_may_and_no_more),
        cmocka_unit_test(test_many_peers_are_forgotten_when_idle_and_no_sooner),
        cmocka_unit_test(test_host_with_too_many_connections_is_turned_away),
        cmocka_unit_test(test_listener_outlives_the_last_descriptor),
        cmocka_unit_test(test_unix_socket_has_a_gate_too),
        cmocka_unit_test(test_client_over_its_open_calls_is_refused_but_for_priority),
        cmocka_unit_test(test_client_that_asks_too_often_is_refused_but_not_its_changes),
        cmocka_unit_test(test_priority_calls_are_told_before_others_that_came_earlier),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
