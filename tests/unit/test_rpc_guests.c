/* links: mu_rpc PkgConfig::GRPC */
/* What a connection may cost that is not settled: bytes that become nothing, calls that end while it takes nothing,
 * requests that do not come. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include <errno.h>
#include <poll.h>

#include "rpc/server_internal.h"
#include "rpc/tcp_bytes.h"
#include "tests/lib/rpc_checks.h"

enum { WAIT_MS = 120000, KIB = 1024, LATER_US = 10000000 };

/* ---- the reckoning ---- */

struct pair {
    int near, far; /* accepted, connected */
    char peer[32]; /* "127.0.0.1:4711" */
};

struct table {
    pthread_mutex_t lock;
    struct mu_rpc_guests *guests;
    int listener;
    uint16_t port;
};

static void table_open(struct table *table, size_t max_owed, size_t max_in_all)
{
    struct mu_error err = {0};
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    pthread_mutex_init(&table->lock, NULL);
    assert_int_equal(mu_rpc_guests_new(&table->lock, max_owed, max_in_all, &table->guests, &err), MU_OK);
    table->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(table->listener, (struct sockaddr *)&at, sizeof at), 0);
    assert_int_equal(listen(table->listener, 16), 0);
    assert_int_equal(getsockname(table->listener, (struct sockaddr *)&at, &size), 0);
    table->port = ntohs(at.sin_port);
}

static void table_close(struct table *table)
{
    mu_rpc_guests_free(table->guests);
    close(table->listener);
    pthread_mutex_destroy(&table->lock);
}

static struct pair come(struct table *table)
{
    struct pair pair = {.far = connect_raw(table->port)};
    struct sockaddr_storage from = {0};
    socklen_t size = sizeof from;
    pair.near = accept(table->listener, (struct sockaddr *)&from, &size);
    assert_true(pair.near >= 0);
    snprintf(pair.peer, sizeof pair.peer, "127.0.0.1:%u", ntohs(((struct sockaddr_in *)&from)->sin_port));
    pthread_mutex_lock(&table->lock);
    mu_rpc_guests_add(table->guests, pair.near, &from);
    pthread_mutex_unlock(&table->lock);
    return pair;
}

static void leave(struct pair *pair)
{
    close(pair->near);
    close(pair->far);
}

/* From one end to the other, where it is read. */
static void carry(int from, int to, size_t bytes)
{
    static char chunk[4096];
    for (size_t done = 0; done < bytes;) {
        size_t part = bytes - done < sizeof chunk ? bytes - done : sizeof chunk;
        assert_int_equal(write(from, chunk, part), part);
        assert_int_equal(recv(to, chunk, part, MSG_WAITALL), part);
        done += part;
    }
}

/* The other end's kernel says that it has them a little later. */
static void await_acknowledged(const struct pair *pair, uint64_t bytes)
{
    uint64_t received, acknowledged = 0;
    for (uint64_t until_us = mu_clock_mono_us() + WAIT_MS * 1000ull; mu_clock_mono_us() < until_us;) {
        assert_true(mu_rpc_tcp_bytes(pair->near, &received, &acknowledged));
        if (acknowledged >= bytes)
            return;
        (void)poll(NULL, 0, 1);
    }
    fail_msg("%llu bytes acknowledged", (unsigned long long)acknowledged);
}

static void look(struct table *table)
{
    mu_rpc_guests_look(table->guests, mu_clock_mono_us());
}

static uint64_t shown_out(struct table *table)
{
    char host[MU_RPC_GUEST_HOST_SIZE];
    pthread_mutex_lock(&table->lock);
    uint64_t count = mu_rpc_guests_shown_out(table->guests, host);
    pthread_mutex_unlock(&table->lock);
    assert_string_equal(host, count ? "127.0.0.1" : "");
    return count;
}

static bool is_connected(const struct pair *pair)
{
    char byte;
    return recv(pair->far, &byte, 1, MSG_DONTWAIT) < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
}

static void test_who_sends_what_becomes_nothing_is_shown_out_and_nobody_else(void **state)
{
    (void)state;
    struct table table;
    table_open(&table, 256 * KIB, 0);
    struct pair bad = come(&table), good = come(&table);
    carry(bad.far, bad.near, 256 * KIB);
    carry(good.far, good.near, 200 * KIB);
    look(&table);
    assert_int_equal(shown_out(&table), 0); /* up to the limit */
    carry(bad.far, bad.near, 1);
    look(&table);
    assert_int_equal(shown_out(&table), 1);
    assert_false(is_connected(&bad));
    assert_true(is_connected(&good));
    leave(&bad);
    struct pair next = come(&table); /* with its descriptor: owes nothing */
    carry(next.far, next.near, 200 * KIB);
    look(&table);
    assert_int_equal(shown_out(&table), 1);
    leave(&next);
    leave(&good);
    table_close(&table);
}

static void test_bytes_that_became_calls_or_were_answered_are_settled(void **state)
{
    (void)state;
    struct table table;
    table_open(&table, 256 * KIB, 0);
    struct pair caller = come(&table), taker = come(&table);
    int guest = mu_rpc_guests_find(table.guests, caller.peer);
    assert_int_equal(guest, caller.near);
    for (uint64_t round = 1; round <= 5; round++) {
        carry(caller.far, caller.near, 200 * KIB);
        mu_rpc_guests_told(table.guests, guest, 200 * KIB);
        carry(taker.far, taker.near, 200 * KIB);
        carry(taker.near, taker.far, 200 * KIB);
        await_acknowledged(&taker, round * 200 * KIB);
        look(&table);
    }
    assert_int_equal(shown_out(&table), 0);
    assert_true(is_connected(&caller) && is_connected(&taker));
    carry(caller.far, caller.near, 257 * KIB); /* what was settled before is no credit */
    look(&table);
    assert_int_equal(shown_out(&table), 1);
    assert_false(is_connected(&caller));
    leave(&caller);
    leave(&taker);
    table_close(&table);
}

static void test_when_all_owe_too_much_those_go_who_owe_most(void **state)
{
    (void)state;
    struct table table;
    table_open(&table, 0, 300 * KIB);
    struct pair little = come(&table), much = come(&table);
    carry(little.far, little.near, 100 * KIB);
    carry(much.far, much.near, 200 * KIB);
    look(&table);
    assert_int_equal(shown_out(&table), 0);
    carry(little.far, little.near, 1);
    look(&table);
    assert_int_equal(shown_out(&table), 1);
    assert_true(is_connected(&little));
    assert_false(is_connected(&much));
    leave(&little);
    leave(&much);
    table_close(&table);
}

static void test_calls_that_end_unheard_are_owed_until_something_is_taken(void **state)
{
    (void)state;
    enum { CALLS = 256 * KIB / MU_RPC_GUEST_CALL_BYTES + 1 };
    struct table table;
    table_open(&table, 256 * KIB, 0);
    struct pair deaf = come(&table), hears = come(&table);
    for (int i = 0; i < CALLS; i++) {
        mu_rpc_guests_ended(table.guests, mu_rpc_guests_find(table.guests, deaf.peer));
        mu_rpc_guests_ended(table.guests, mu_rpc_guests_find(table.guests, hears.peer));
    }
    look(&table);
    assert_int_equal(shown_out(&table), 0); /* not at once: what tells them so is under way */
    carry(hears.near, hears.far, CALLS * 100);
    await_acknowledged(&hears, CALLS * 100);
    mu_rpc_guests_look(table.guests, mu_clock_mono_us() + LATER_US);
    assert_int_equal(shown_out(&table), 1);
    assert_false(is_connected(&deaf));
    assert_true(is_connected(&hears));
    leave(&deaf);
    leave(&hears);
    table_close(&table);
}

static void test_guests_are_found_by_their_address(void **state)
{
    (void)state;
    struct table table;
    table_open(&table, 0, 0); /* nobody looks but us */
    static const struct {
        const char *from, *peer;
        bool is_he;
    } cases[] = {{"2001:db8:1:2:3::4", "[2001:db8:1:2:3::4]:7", true},
                 {"fe80::7", "[fe80::7%eth0]:7", true},
                 {"::ffff:10.1.2.3", "10.1.2.3:7", true},
                 {"2001:db8:1:2:3::4", "[2001:db8:1:3::4]:7", false},
                 {"::ffff:10.1.2.3", "10.1.2.3:8", false},
                 {"::ffff:10.1.2.3", "unix:", false},
                 {"::ffff:10.1.2.3", "", false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct sockaddr_storage from = {0};
        struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&from;
        *v6 = (struct sockaddr_in6){.sin6_family = AF_INET6, .sin6_port = htons(7)};
        assert_int_equal(inet_pton(AF_INET6, cases[i].from, &v6->sin6_addr), 1);
        pthread_mutex_lock(&table.lock);
        mu_rpc_guests_add(table.guests, 1000, &from);
        pthread_mutex_unlock(&table.lock);
        int guest = mu_rpc_guests_find(table.guests, cases[i].peer);
        if (guest != (cases[i].is_he ? 1000 : MU_RPC_GUEST_NONE))
            fail_msg("'%s' is %d", cases[i].peer, guest);
        look(&table); /* no descriptor of ours: forgotten */
        assert_int_equal(mu_rpc_guests_find(table.guests, cases[i].peer), MU_RPC_GUEST_NONE);
    }
    mu_rpc_guests_told(table.guests, MU_RPC_GUEST_NONE, 1);
    mu_rpc_guests_ended(table.guests, MU_RPC_GUEST_NONE);
    table_close(&table);
}

/* ---- servers ---- */

/* Until the server closes it. */
static void read_to_the_end(int fd)
{
    char sink[4096];
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    ssize_t got = 1;
    while (got > 0 && poll(&wait, 1, WAIT_MS) == 1)
        got = read(fd, sink, sizeof sink);
    assert_true(got <= 0);
}

static void test_headers_without_end_cost_the_connection_and_long_streams_do_not(void **state)
{
    (void)state;
    enum { LIMIT = 64 * KIB, MESSAGE = 1000 };
    struct fixture fixture;
    struct recorder recorder;
    struct mu_rpc_server_config config = fixture_server_config();
    config.max_owed_bytes = LIMIT;
    fixture_start(&fixture, &config);
    recorder_open(&recorder, fixture.client, "/t/Deaf"); /* which answers nothing */
    char data[MESSAGE] = "x";
    for (int i = 1; i <= 4 * LIMIT / MESSAGE; i++) {
        assert_int_equal(recorder_send(&recorder, data, sizeof data), MU_OK);
        assert_true(FIXTURE_WAIT(&fixture, fixture.messages == i));
        if (i % 16 == 0)
            mu_rpc_guests_look(fixture.server->guests, mu_clock_mono_us());
    }
    assert_int_equal(mu_rpc_server_refusals(fixture.server).connections_owing, 0);

    int fd = open_raw_head(mu_rpc_server_port(fixture.server), "/t/Echo", "identity", 0);
    uint8_t header[200] = {0x00}, last[20 * sizeof header];
    size_t used = 1 + put_string(header + 1, "name");
    char value[120];
    memset(value, 'v', sizeof value - 1);
    value[sizeof value - 1] = 0;
    used += put_string(header + used, value);
    for (size_t sent = 0; sent < LIMIT - KIB; sent += used + 9)
        put_frame(fd, 9, 0, 1, header, used); /* CONTINUATION */
    for (size_t i = 0; i < 20; i++)
        memcpy(last + i * used, header, used);
    put_frame(fd, 9, 0, 1, last, 20 * used); /* that is too much, and not before */
    read_to_the_end(fd);
    close(fd);
    struct mu_rpc_refusals refusals = mu_rpc_server_refusals(fixture.server);
    assert_int_equal(refusals.connections_owing, 1);
    assert_string_equal(refusals.last_owing, "127.0.0.1");
    assert_int_equal(FIXTURE_GET(&recorder, closed), 0);
    assert_echo(fixture.client, "alive", 5);
    recorder_free(&recorder);
    fixture_stop(&fixture);
}

static bool await_cut_off(struct mu_rpc_server *server, uint64_t count)
{
    for (uint64_t until_us = mu_clock_mono_us() + WAIT_MS * 1000ull; mu_clock_mono_us() < until_us;) {
        mu_rpc_server_wake(server);
        if (mu_rpc_server_refusals(server).requests_awaited == count)
            return true;
        (void)poll(NULL, 0, 1);
    }
    return false;
}

static void test_calls_whose_request_does_not_come_keep_nobody_out(void **state)
{
    (void)state;
    enum { MOST = 2, OPENED = 5 };
    struct fixture fixture;
    struct mu_rpc_server_config config = fixture_server_config();
    config.max_calls = MOST;
    config.linger_ms = 3600000;
    fixture_start(&fixture, &config);
    int fds[OPENED];
    for (int i = 0; i < OPENED; i++)
        fds[i] = open_raw_stream(mu_rpc_server_port(fixture.server), i % 2 ? "/t/Count" : "/t/Echo", "identity");
    assert_true(await_cut_off(fixture.server, OPENED - MOST)); /* the oldest */
    for (int i = 0; i < 20; i++)
        assert_echo(fixture.client, "room", 4);
    for (int i = 0; i < OPENED; i++)
        close(fds[i]);
    fixture_stop(&fixture);
}

static void test_call_whose_request_does_not_come_ends_after_a_while(void **state)
{
    (void)state;
    struct fixture fixture;
    struct mu_rpc_server_config config = fixture_server_config();
    config.linger_ms = 30;
    fixture_start(&fixture, &config);
    int fd = open_raw_stream(mu_rpc_server_port(fixture.server), "/t/Hold", "identity");
    put_frame(fd, 0, 0, 1, "\0\0\0\0\7abc", 8); /* DATA: not all of it */
    assert_true(await_cut_off(fixture.server, 1));
    close(fd);
    assert_echo(fixture.client, "alive", 5);
    assert_int_equal(FIXTURE_GET(&fixture, held), 0);
    fixture_stop(&fixture);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_who_sends_what_becomes_nothing_is_shown_out_and_nobody_else),
        cmocka_unit_test(test_bytes_that_became_calls_or_were_answered_are_settled),
        cmocka_unit_test(test_when_all_owe_too_much_those_go_who_owe_most),
        cmocka_unit_test(test_calls_that_end_unheard_are_owed_until_something_is_taken),
        cmocka_unit_test(test_guests_are_found_by_their_address),
        cmocka_unit_test(test_headers_without_end_cost_the_connection_and_long_streams_do_not),
        cmocka_unit_test(test_calls_whose_request_does_not_come_keep_nobody_out),
        cmocka_unit_test(test_call_whose_request_does_not_come_ends_after_a_while),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
