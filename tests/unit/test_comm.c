/* links: mu_comm */
#include "comm_testing.h"

/* ---- connecting ---- */

static bool have_ipv6(void)
{
    int fd = socket(AF_INET6, SOCK_STREAM, 0);
    struct sockaddr_in6 address = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    bool have = fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof address) == 0;
    if (fd >= 0)
        close(fd);
    return have;
}

static void test_open_with_2_4_8_ranks_connects(void **state)
{
    (void)state;
    for (uint32_t world = 1; world <= NODES_MAX; world *= 2) {
        for (int transport = OVER_UNIX; transport <= OVER_TCP6; transport++) {
            if (transport == OVER_TCP6 && !have_ipv6())
                continue;
            struct node nodes[NODES_MAX];
            nodes_connect(nodes, world, (enum transport)transport);
            for (uint32_t i = 0; i < world; i++) {
                struct mu_comm_stats stats;
                mu_comm_stats(nodes[i].comm, &stats);
                assert_int_equal(stats.admitted, world - 1 - i);
                assert_int_equal(stats.accepted, stats.admitted);
                for (uint32_t k = 0; k < world; k++) /* the intended way, not a fall-back */
                    assert_true(k == i || mu_comm_find_peer(nodes[i].group, k)->over_tcp == (transport != OVER_UNIX));
                const char *kernel;
                assert_int_equal(mu_comm_group_encrypted(nodes[i].group, &kernel),
                                 transport == OVER_TLS ? world - 1 : 0);
                assert_true((kernel[0] == 0) == (transport != OVER_TLS || world == 1));
            }
            nodes_free(nodes, world);
        }
    }
}

static void test_open_before_the_acceptor_knows_the_generation_waits_for_it(void **state)
{
    (void)state;
    struct node nodes[2];
    nodes_new(nodes, 2, OVER_UNIX, (struct mu_comm_limits){0});
    assert_int_equal(node_open(nodes, 2, 1, 7, soon(), NULL), MU_OK);
    DRIVE_UNTIL(nodes, 2, nodes[0].comm->pending_count == 1 && nodes[0].comm->pending[0]->state == PENDING_HELD);
    assert_false(mu_comm_group_ready(nodes[1].group));
    assert_int_equal(node_open(nodes, 2, 0, 7, soon(), NULL), MU_OK);
    DRIVE_UNTIL(nodes, 2, all_ready(nodes, 2));
    struct mu_comm_stats stats;
    mu_comm_stats(nodes[1].comm, &stats);
    assert_int_equal(stats.redials, 0);
    nodes_free(nodes, 2);
}

static void test_open_next_generation_keeps_the_old_one_working(void **state)
{
    (void)state;
    struct node nodes[3], old[3];
    nodes_connect(nodes, 3, OVER_TCP);
    memcpy(old, nodes, sizeof nodes);
    enum { SIZE = 3 * 1024 * 1024 };
    uint8_t *from = malloc(SIZE), *to = calloc(1, SIZE), word[2] = {7, 0};
    fill(from, SIZE, 1);
    struct mu_comm_request sent, received, sent_new, received_new;
    POST_SEND(&old[0], 2, 9, from, SIZE, &sent);
    POST_RECV(&old[2], 0, 9, to, SIZE, &received);
    nodes_open(nodes, 3, 2);
    POST_SEND(&nodes[2], 0, 9, &word[0], 1, &sent_new); /* posted before it is connected */
    POST_RECV(&nodes[0], 2, 9, &word[1], 1, &received_new);
    DRIVE_UNTIL(nodes, 3, all_ready(nodes, 3) && mu_comm_done(&received) && mu_comm_done(&received_new));
    assert_true(filled(to, SIZE, 1));
    assert_int_equal(word[1], 7);
    for (int i = 0; i < 3; i++)
        mu_comm_group_close(old[i].group);
    POST_SEND(&nodes[1], 2, 10, from, SIZE, &sent);
    POST_RECV(&nodes[2], 1, 10, to, SIZE, &received);
    DRIVE_UNTIL(nodes, 3, mu_comm_done(&received));
    for (int i = 0; i < 3; i++)
        assert_int_equal(mu_comm_group_progress(nodes[i].group, NULL), MU_OK);
    free(from);
    free(to);
    nodes_free(nodes, 3);
}

static void test_open_to_a_dead_process_fails_at_once_as_refused(void **state)
{
    (void)state;
    for (int transport = OVER_UNIX; transport <= OVER_TCP; transport++) {
        struct node nodes[2];
        nodes_new(nodes, 2, (enum transport)transport, (struct mu_comm_limits){0});
        assert_int_equal(node_open(nodes, 2, 1, 1, MU_COMM_FOREVER, NULL), MU_OK);
        mu_comm_free(nodes[0].comm);
        DRIVE_UNTIL(nodes + 1, 1, failed(&nodes[1])); /* without any deadline */
        expect_failure(&nodes[1], 0, MU_COMM_FAIL_REFUSED, "nobody listens");
        mu_comm_free(nodes[1].comm);
    }
}

/* Between hosts nothing is sent in the clear by mistake: who wants TLS gets it, or no connection. */
static void test_open_encrypted_to_a_peer_that_is_not_fails(void **state)
{
    (void)state;
    for (int encrypted = 0; encrypted < 2; encrypted++) {
        struct node nodes[2];
        uint8_t byte = 7, got = 0;
        struct mu_comm_request send, receive;
        nodes_new(nodes, 2, OVER_TCP, (struct mu_comm_limits){0});
        nodes[encrypted].encrypted = true;
        nodes_open(nodes, 2, 1);
        POST_SEND(&nodes[!encrypted], (uint32_t)encrypted, 1, &byte, 1, &send);
        POST_RECV(&nodes[encrypted], (uint32_t)!encrypted, 1, &got, 1, &receive);
        DRIVE_UNTIL(nodes, 2, failed(&nodes[encrypted]));
        expect_failure(&nodes[encrypted], (uint32_t)!encrypted, MU_COMM_FAIL_PROTOCOL, "TLS hand-shake failed");
        assert_int_equal(got, 0);
        nodes_free(nodes, 2);
    }
}

static void test_open_with_another_secret_fails_in_spite_of_tls(void **state)
{
    (void)state;
    struct node nodes[2];
    nodes_new(nodes, 2, OVER_TLS, (struct mu_comm_limits){0});
    nodes_open(nodes, 2, 1);
    nodes[1].group->secret[3] ^= 1;
    for (int i = 0; i < 2000; i++)
        mu_comm_progress(nodes[i % 2].comm);
    assert_false(mu_comm_group_ready(nodes[0].group) || mu_comm_group_ready(nodes[1].group));
    nodes_free(nodes, 2);
}

static void test_open_to_a_silent_peer_fails_at_the_deadline_with_its_rank(void **state)
{
    (void)state;
    struct node nodes[3];
    nodes_new(nodes, 3, OVER_TCP, (struct mu_comm_limits){.handshake_timeout_ms = 20});
    /* Rank 0 is stopped: the kernel still accepts for it. Rank 2 has not been told. */
    assert_int_equal(node_open(nodes, 3, 1, 1, MU_COMM_FOREVER, NULL), MU_OK);
    struct mu_error err = {0};
    assert_int_equal(mu_comm_wait_ready(nodes[1].group, mu_clock_mono_us() + 10000, &err), MU_ERR_TIMEOUT);
    assert_non_null(strstr(err.text, "rank 0"));
    struct mu_comm_stats stats = {0};
    DRIVE_UNTIL(nodes + 1, 1, (mu_comm_stats(nodes[1].comm, &stats), stats.redials > 0));
    nodes[1].group->deadline_us = mu_clock_mono_us();
    assert_int_equal(mu_comm_wait_ready(nodes[1].group, MU_COMM_FOREVER, &err), MU_ERR_UNAVAILABLE);
    expect_failure(&nodes[1], 0, MU_COMM_FAIL_TIMEOUT, "no answer to the hand-shake");
    struct mu_comm_failure failures[2];
    assert_int_equal(mu_comm_group_failures(nodes[1].group, failures, 2), 2);
    assert_int_equal(failures[1].peer_rank, 2);
    nodes_free(nodes, 3);
}

static void test_open_of_bad_configurations_is_refused(void **state)
{
    (void)state;
    struct node nodes[2];
    nodes_new(nodes, 2, OVER_UNIX, (struct mu_comm_limits){0});
    struct mu_comm_group *group = NULL;
    struct mu_error err = {0};
    struct mu_comm_peer peer = {.rank = 1, .address = mu_comm_address(nodes[1].comm)};
    struct mu_comm_group_config good = {.generation = 5, .rank = 0, .world = 2, .peers = &peer, .peer_count = 1},
                                bad = good;
    bad.generation = 0;
    assert_int_equal(mu_comm_open(nodes[0].comm, &bad, soon(), &group, &err), MU_ERR_INVALID);
    bad = good;
    bad.rank = 2;
    assert_int_equal(mu_comm_open(nodes[0].comm, &bad, soon(), &group, &err), MU_ERR_INVALID);
    bad = good;
    bad.rank = 1; /* a peer of itself */
    assert_int_equal(mu_comm_open(nodes[0].comm, &bad, soon(), &group, &err), MU_ERR_INVALID);
    assert_non_null(strstr(err.text, "peer rank 1"));
    peer.address = "host=a;unix=@b";
    assert_int_equal(mu_comm_open(nodes[0].comm, &good, soon(), &group, &err), MU_ERR_INVALID);
    assert_non_null(strstr(err.text, "peer rank 1"));
    assert_non_null(strstr(err.text, "host=a;unix=@b"));
    assert_null(group);
    peer.address = mu_comm_address(nodes[1].comm);
    assert_int_equal(mu_comm_open(nodes[0].comm, &good, soon(), &group, &err), MU_OK);
    assert_int_equal(mu_comm_open(nodes[0].comm, &good, soon(), &group, &err), MU_ERR_EXISTS);
    good.generation = 4;
    assert_int_equal(mu_comm_open(nodes[0].comm, &good, soon(), &group, &err), MU_ERR_STALE);
    nodes_free(nodes, 2);
}

static void test_new_with_bad_addresses_says_what_is_allowed(void **state)
{
    (void)state;
    static const struct {
        struct mu_comm_config config;
        const char *needle;
    } cases[] = {
        {{.data_addr = "localhost"}, "not a literal address"},
        {{.data_addr = "127.0.0.1:65536"}, "not a literal address"},
        {{.data_addr = "0.0.0.0"}, "cannot be dialled"},
        {{.data_addr = "::"}, "cannot be dialled"},
        {{.data_addr = "192.0.2.1"}, "192.0.2.1"},
        {{.host_id = "a;b"}, "host id"},
        {{.unix_dir = "/a/b;c"}, "directory"},
        {{.unix_dir = "/nonexistent"}, "/nonexistent"},
        {{.unix_dir =
              "/tmp/"
              "a-directory-that-is-far-too-long-for-the-path-of-a-unix-socket-which-has-one-hundred-and-eight-bytes"},
         "at most"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct mu_comm *comm = NULL;
        struct mu_error err = {0};
        assert_int_not_equal(mu_comm_new(&cases[i].config, &comm, &err), MU_OK);
        assert_null(comm);
        if (!strstr(err.text, cases[i].needle))
            fail_msg("\"%s\" does not say \"%s\"", err.text, cases[i].needle);
    }
}

static void test_new_with_a_directory_leaves_no_socket_behind(void **state)
{
    (void)state;
    char directory[] = "/tmp/muster-test-comm-XXXXXX", path[256];
    assert_non_null(mkdtemp(directory));
    struct mu_comm *comm = comm_new(&(struct mu_comm_config){.unix_dir = directory, .route_to = "127.0.0.1:7070"});
    const char *begin = strstr(mu_comm_address(comm), "unix=") + 5;
    snprintf(path, sizeof path, "%.*s", (int)strcspn(begin, ";"), begin);
    struct stat facts;
    assert_int_equal(stat(path, &facts), 0);
    assert_true(S_ISSOCK(facts.st_mode));
    assert_non_null(strstr(mu_comm_address(comm), ";tcp=127.0.0.1:"));
    mu_comm_free(comm);
    assert_int_equal(stat(path, &facts), -1);
    assert_int_equal(rmdir(directory), 0);
}

/* ---- strangers ---- */

static void expect_refused(struct node *node, const struct wire_hello *hello, uint8_t reason)
{
    int fd = raw_connect(node);
    struct wire_prefix answer = {0};
    raw_write(fd, hello, sizeof *hello);
    assert_int_equal(raw_read(node, fd, &answer, sizeof answer), sizeof answer);
    assert_int_equal(answer.kind, WIRE_REFUSE);
    assert_int_equal(answer.reason, reason);
    assert_int_equal(raw_read(node, fd, &answer, 1), 0); /* and closed */
    close(fd);
}

static void test_strangers_are_refused_and_counted_while_peers_connect(void **state)
{
    (void)state;
    struct node nodes[2];
    nodes_new(nodes, 2, OVER_UNIX, (struct mu_comm_limits){.handshake_timeout_ms = 600000});
    assert_int_equal(node_open(nodes, 2, 0, 5, MU_COMM_FOREVER, NULL), MU_OK);
    struct wire_hello hello = raw_hello(nodes, 1, 0, 2, 4);
    expect_refused(&nodes[0], &hello, WIRE_REFUSE_STALE);
    hello = raw_hello(nodes, 1, 0, 3, 5);
    expect_refused(&nodes[0], &hello, WIRE_REFUSE_STRANGER); /* another world */
    hello = raw_hello(nodes, 1, 0, 2, 5);
    hello.from_incarnation.low ^= 1;
    expect_refused(&nodes[0], &hello, WIRE_REFUSE_STRANGER);
    hello = raw_hello(nodes, 1, 0, 2, 5);
    hello.to_incarnation.low ^= 1;
    expect_refused(&nodes[0], &hello, WIRE_REFUSE_INCARNATION);
    hello = raw_hello(nodes, 1, 0, 2, 5);
    hello.prefix.version++;
    expect_refused(&nodes[0], &hello, WIRE_REFUSE_VERSION);

    int garbage = raw_connect(&nodes[0]), silent = raw_connect(&nodes[0]), half = raw_connect(&nodes[0]);
    raw_write(garbage, "GET / HTTP/1.1\r\n", 16);
    hello = raw_hello(nodes, 1, 0, 2, 5);
    raw_write(half, &hello, 50);

    int impostor = raw_connect(&nodes[0]); /* knows everything but the secret */
    struct wire_challenge challenge;
    raw_write(impostor, &hello, sizeof hello);
    assert_int_equal(raw_read(&nodes[0], impostor, &challenge, sizeof challenge), sizeof challenge);
    struct wire_response echo = {.prefix = raw_prefix(WIRE_RESPONSE)};
    memcpy(echo.mac, challenge.mac, sizeof echo.mac); /* what it was shown does not help */
    raw_write(impostor, &echo, sizeof echo);
    struct wire_prefix answer;
    assert_int_equal(raw_read(&nodes[0], impostor, &answer, sizeof answer), sizeof answer);
    assert_int_equal(answer.reason, WIRE_REFUSE_SECRET);

    assert_int_equal(node_open(nodes, 2, 1, 5, MU_COMM_FOREVER, NULL), MU_OK);
    DRIVE_UNTIL(nodes, 2, all_ready(nodes, 2));
    struct mu_comm_stats stats = {0};
    DRIVE_UNTIL(nodes, 2, nodes[0].comm->pending_count == 2); /* the silent ones */
    for (size_t i = 0; i < 2; i++)
        nodes[0].comm->pending[i]->deadline_us = mu_clock_mono_us();
    DRIVE_UNTIL(nodes, 2, (mu_comm_stats(nodes[0].comm, &stats), stats.refused_timeout == 2));
    assert_int_equal(stats.refused_stale, 2);
    assert_int_equal(stats.refused_stranger, 3);
    assert_int_equal(stats.refused_garbage, 2);
    assert_int_equal(stats.admitted, 1);
    assert_int_equal(nodes[0].comm->pending_count, 0);
    close(garbage);
    close(silent);
    close(half);
    close(impostor);
    nodes_free(nodes, 2);
}

static void test_a_flood_of_silent_connections_does_not_keep_a_peer_out(void **state)
{
    (void)state;
    enum { FLOOD = 40 };
    struct node nodes[3];
    int fds[FLOOD];
    nodes_new(nodes, 3, OVER_UNIX, (struct mu_comm_limits){.pending_max = 4, .handshake_timeout_ms = 600000});
    /* Rank 2 comes before the flood, and early; rank 1 comes behind it. */
    assert_int_equal(node_open(nodes, 3, 2, 1, MU_COMM_FOREVER, NULL), MU_OK);
    DRIVE_UNTIL(nodes, 3, nodes[0].comm->pending_count == 1 && nodes[0].comm->pending[0]->state == PENDING_HELD);
    for (int i = 0; i < FLOOD; i++)
        fds[i] = raw_connect(&nodes[0]);
    struct mu_comm_stats stats = {0};
    DRIVE_UNTIL(nodes, 3, (mu_comm_stats(nodes[0].comm, &stats), stats.accepted >= FLOOD + 1));
    assert_int_equal(nodes[0].comm->pending_count, 4);
    assert_int_equal(stats.refused_full, FLOOD + 1 - 4);
    assert_int_equal(node_open(nodes, 3, 0, 1, MU_COMM_FOREVER, NULL), MU_OK);
    assert_int_equal(node_open(nodes, 3, 1, 1, MU_COMM_FOREVER, NULL), MU_OK);
    DRIVE_UNTIL(nodes, 3, all_ready(nodes, 3));
    mu_comm_stats(nodes[2].comm, &stats);
    assert_int_equal(stats.redials, 0);
    for (int i = 0; i < FLOOD; i++)
        close(fds[i]);
    nodes_free(nodes, 3);
}

static void test_open_with_another_secret_never_connects_and_says_why(void **state)
{
    (void)state;
    struct node nodes[2];
    nodes_new(nodes, 2, OVER_UNIX, (struct mu_comm_limits){0});
    assert_int_equal(node_open(nodes, 2, 0, 1, MU_COMM_FOREVER, NULL), MU_OK);
    struct mu_comm_peer peer = {
        .rank = 0, .incarnation = nodes[0].incarnation, .address = mu_comm_address(nodes[0].comm)};
    struct mu_comm_group_config config = {.generation = 1,
                                          .rank = 1,
                                          .world = 2,
                                          .incarnation = nodes[1].incarnation,
                                          .peers = &peer,
                                          .peer_count = 1,
                                          .secret = "wrong"};
    assert_int_equal(mu_comm_open(nodes[1].comm, &config, mu_clock_mono_us() + 50000, &nodes[1].group, NULL), MU_OK);
    DRIVE_UNTIL(nodes, 2, failed(&nodes[1]));
    expect_failure(&nodes[1], 0, MU_COMM_FAIL_TIMEOUT, "secret");
    assert_false(mu_comm_group_ready(nodes[0].group));
    nodes_free(nodes, 2);
}

static void test_open_of_a_stale_generation_is_told_so(void **state)
{
    (void)state;
    struct node nodes[2];
    nodes_new(nodes, 2, OVER_UNIX, (struct mu_comm_limits){0});
    assert_int_equal(node_open(nodes, 2, 0, 9, MU_COMM_FOREVER, NULL), MU_OK);
    assert_int_equal(node_open(nodes, 2, 1, 8, MU_COMM_FOREVER, NULL), MU_OK);
    DRIVE_UNTIL(nodes, 2, failed(&nodes[1]));
    expect_failure(&nodes[1], 0, MU_COMM_FAIL_STALE, "generation 8");
    assert_int_equal(mu_comm_group_progress(nodes[0].group, NULL), MU_OK);
    nodes_free(nodes, 2);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_open_with_2_4_8_ranks_connects),
        cmocka_unit_test(test_open_before_the_acceptor_knows_the_generation_waits_for_it),
        cmocka_unit_test(test_open_next_generation_keeps_the_old_one_working),
        cmocka_unit_test(test_open_to_a_dead_process_fails_at_once_as_refused),
        cmocka_unit_test(test_open_encrypted_to_a_peer_that_is_not_fails),
        cmocka_unit_test(test_open_with_another_secret_fails_in_spite_of_tls),
        cmocka_unit_test(test_open_to_a_silent_peer_fails_at_the_deadline_with_its_rank),
        cmocka_unit_test(test_open_of_bad_configurations_is_refused),
        cmocka_unit_test(test_new_with_bad_addresses_says_what_is_allowed),
        cmocka_unit_test(test_new_with_a_directory_leaves_no_socket_behind),
        cmocka_unit_test(test_strangers_are_refused_and_counted_while_peers_connect),
        cmocka_unit_test(test_a_flood_of_silent_connections_does_not_keep_a_peer_out),
        cmocka_unit_test(test_open_with_another_secret_never_connects_and_says_why),
        cmocka_unit_test(test_open_of_a_stale_generation_is_told_so),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
