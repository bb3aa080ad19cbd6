/* links: mu_rpc */
/* Death of a process on the other side. The peers are forked before anything of gRPC runs in this process (forking
 * later is unsafe) and wait for their orders on a pipe. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/lib/rpc_fixture.h"

enum { NEVER_S = 3600 }; /* no keepalive: a death is seen by what the kernel says of the connection */

/* A forked process: what the parent writes arrives on `orders`, what it writes the parent reads from `reports`. */
struct peer {
    pid_t pid;
    int orders, reports;
};

static struct peer idle_client, stalled_client, server_process;

static void read_all(int fd, void *data, size_t size)
{
    char *to = data;
    while (size > 0) {
        ssize_t got = read(fd, to, size);
        if (got <= 0)
            _exit(1); /* the parent is gone */
        to += got;
        size -= (size_t)got;
    }
}

static void fork_peer(struct peer *peer, void (*run)(int orders, int reports))
{
    int orders[2], reports[2];
    if (pipe(orders) != 0 || pipe(reports) != 0)
        abort();
    peer->pid = fork();
    if (peer->pid == 0) {
        close(orders[1]);
        close(reports[0]);
        run(orders[0], reports[1]);
        _exit(0);
    }
    close(orders[0]);
    close(reports[1]);
    peer->orders = orders[1];
    peer->reports = reports[0];
}

static void kill_peer(struct peer *peer)
{
    kill(peer->pid, SIGKILL);
    waitpid(peer->pid, NULL, 0);
    close(peer->orders);
    close(peer->reports);
}

static struct mu_rpc_client *connect_as_ordered(int orders)
{
    static char address[64];
    struct mu_error err;
    struct mu_rpc_pool *pool;
    struct mu_rpc_client *client;
    read_all(orders, address, sizeof address);
    struct mu_rpc_client_config config = mu_rpc_client_config_default();
    config.address = address;
    if (mu_rpc_pool_new(1, &err, &pool) != MU_OK || mu_rpc_client_new(pool, &config, &err, &client) != MU_OK)
        _exit(2);
    return client;
}

/* Opens a stream, sends one message, sits there. */
static void run_idle_client(int orders, int reports)
{
    struct recorder recorder;
    (void)reports;
    recorder_open(&recorder, connect_as_ordered(orders), "/t/Deaf");
    if (recorder_send(&recorder, "0", 1) != MU_OK)
        _exit(3);
    char never;
    read_all(orders, &never, 1);
}

/* Opens a stream and stops being heard in the middle of a message: its header promises more than will ever come, since
 * the server's core thread does not read on. */
static void run_stalled_client(int orders, int reports)
{
    static char half[900000];
    struct recorder recorder;
    (void)reports;
    recorder_open(&recorder, connect_as_ordered(orders), "/t/Deaf");
    for (int i = 0; i < 4; i++)
        if (recorder_send(&recorder, half, sizeof half) != MU_OK)
            _exit(3);
    char never;
    read_all(orders, &never, 1);
}

static void run_server(int orders, int reports)
{
    struct fixture fixture;
    char address[64] = {0};
    fixture_init(&fixture);
    fixture_start_server(&fixture, NULL);
    snprintf(address, sizeof address, "%s", mu_rpc_server_address(fixture.server));
    if (write(reports, address, sizeof address) != sizeof address)
        _exit(3);
    char never;
    read_all(orders, &never, 1);
}

static void order_address(struct peer *peer, const struct mu_rpc_server *server)
{
    char address[64] = {0};
    snprintf(address, sizeof address, "%s", mu_rpc_server_address(server));
    assert_int_equal(write(peer->orders, address, sizeof address), sizeof address);
}

static void test_killed_client_is_known_at_once(void **state)
{
    (void)state;
    struct fixture fixture;
    struct mu_rpc_server_config config = fixture_server_config();
    config.keepalive_time_s = NEVER_S;
    fixture_start(&fixture, &config);
    order_address(&idle_client, fixture.server);
    assert_true(FIXTURE_WAIT(&fixture, fixture.messages == 1));
    kill_peer(&idle_client);
    assert_true(FIXTURE_WAIT(&fixture, fixture.closed[MU_RPC_CLOSED_CANCELLED] == 1));
    fixture_stop(&fixture);
}

static void test_client_killed_while_it_sends_is_cancelled_not_a_bad_message(void **state)
{
    (void)state;
    struct fixture fixture;
    struct mu_error err = {0};
    struct mu_rpc_event event;
    struct mu_rpc_server_config config = fixture_server_config();
    fixture_init(&fixture);
    assert_int_equal(mu_rpc_server_new(&config, &err, &fixture.server), MU_OK); /* this thread is the core thread */
    order_address(&stalled_client, fixture.server);
    assert_true(mu_rpc_server_next(fixture.server, mu_clock_mono_us() + FIXTURE_WAIT_MS * 1000ull, &event));
    assert_int_equal(event.type, MU_RPC_EVENT_OPENED);
    assert_true(mu_rpc_server_next(fixture.server, mu_clock_mono_us() + FIXTURE_WAIT_MS * 1000ull, &event));
    assert_int_equal(event.type, MU_RPC_EVENT_MESSAGE);
    assert_int_equal(event.size_bytes, 900000);
    kill_peer(&stalled_client);
    do {
        assert_true(mu_rpc_server_next(fixture.server, mu_clock_mono_us() + FIXTURE_WAIT_MS * 1000ull, &event));
    } while (event.type == MU_RPC_EVENT_MESSAGE);
    assert_int_equal(event.type, MU_RPC_EVENT_CLOSED);
    assert_int_equal(event.reason, MU_RPC_CLOSED_CANCELLED);
    struct mu_rpc_bytes *message = mu_rpc_bytes_copy("0", 1);
    assert_int_equal(mu_rpc_call_send(event.call, message), MU_ERR_CANCELLED);
    mu_rpc_bytes_unref(message);
    mu_rpc_call_finish(event.call, MU_RPC_OK, NULL);
    assert_false(mu_rpc_server_next(fixture.server, 0, &event));
    assert_int_equal(mu_rpc_server_call_count(fixture.server), 0);
    mu_rpc_server_free(fixture.server);
}

static void test_killed_server_ends_the_streams_of_its_clients_at_once(void **state)
{
    (void)state;
    char address[64];
    struct mu_error err;
    struct mu_rpc_pool *pool;
    struct mu_rpc_client *client;
    struct recorder recorder;
    read_all(server_process.reports, address, sizeof address);
    struct mu_rpc_client_config config = mu_rpc_client_config_default();
    config.address = address;
    config.keepalive_time_ms = NEVER_S * 1000;
    assert_int_equal(mu_rpc_pool_new(1, &err, &pool), MU_OK);
    assert_int_equal(mu_rpc_client_new(pool, &config, &err, &client), MU_OK);
    recorder_open(&recorder, client, "/t/Bidi");
    assert_true(FIXTURE_WAIT(&recorder, recorder.opened == 1));
    kill_peer(&server_process);
    assert_true(FIXTURE_WAIT(&recorder, recorder.closed == 1));
    assert_int_equal(FIXTURE_GET(&recorder, code), MU_RPC_UNAVAILABLE);
    assert_non_null(strstr(recorder.error.text, "lost"));
    assert_non_null(strstr(recorder.error.text, address));
    recorder_free(&recorder);
    mu_rpc_client_free(client);
    mu_rpc_pool_free(pool);
}

int main(void)
{
    fork_peer(&idle_client, run_idle_client);
    fork_peer(&stalled_client, run_stalled_client);
    fork_peer(&server_process, run_server);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_killed_client_is_known_at_once),
        cmocka_unit_test(test_client_killed_while_it_sends_is_cancelled_not_a_bad_message),
        cmocka_unit_test(test_killed_server_ends_the_streams_of_its_clients_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
