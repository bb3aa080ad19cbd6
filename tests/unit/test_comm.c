/* links: mu_comm */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/hash.h"
#include "common/rng.h"
#include "worker/comm.h"
#include "worker/comm_internal.h" /* the wire format, for peers that misbehave */

enum { NODES_MAX = 8, PATIENCE_US = 20 * 1000000 };

/* ---- several ranks in one process: all calls are non-blocking, so one thread can drive them all ---- */

struct node {
    struct mu_comm *comm;
    struct mu_comm_group *group;
    struct mu_id incarnation;
    uint32_t rank;
};

enum transport { OVER_UNIX, OVER_TCP, OVER_TCP6 };

static const uint8_t secret[MU_COMM_SECRET_SIZE] = "the secret of this generation..";

static uint64_t soon(void)
{
    return mu_clock_mono_us() + PATIENCE_US;
}

static struct mu_comm *comm_new(const struct mu_comm_config *config)
{
    struct mu_comm *comm = NULL;
    struct mu_error err = {0};
    if (mu_comm_new(config, &comm, &err) != MU_OK)
        fail_msg("mu_comm_new: %s", err.text);
    return comm;
}

static void nodes_new(struct node *nodes, uint32_t world, enum transport transport, struct mu_comm_limits limits)
{
    for (uint32_t i = 0; i < world; i++) {
        char host_id[16];
        snprintf(host_id, sizeof host_id, "host-%u", transport == OVER_UNIX ? 0 : i);
        nodes[i] = (struct node){.rank = i, .incarnation = mu_id_random()};
        nodes[i].comm = comm_new(&(struct mu_comm_config){
            .host_id = host_id, .data_addr = transport == OVER_TCP6 ? "[::1]:0" : NULL, .limits = limits});
    }
}

static enum mu_status node_open(struct node *nodes, uint32_t world, uint32_t rank, uint64_t generation,
                                uint64_t deadline_us, struct mu_error *err)
{
    struct mu_comm_peer peers[NODES_MAX];
    size_t count = 0;
    for (uint32_t i = 0; i < world; i++) {
        if (i != rank)
            peers[count++] = (struct mu_comm_peer){
                .rank = i, .incarnation = nodes[i].incarnation, .address = mu_comm_address(nodes[i].comm)};
    }
    struct mu_comm_group_config config = {.generation = generation,
                                          .rank = rank,
                                          .world = world,
                                          .incarnation = nodes[rank].incarnation,
                                          .peers = peers,
                                          .peer_count = count};
    memcpy(config.secret, secret, sizeof secret);
    return mu_comm_open(nodes[rank].comm, &config, deadline_us, &nodes[rank].group, err);
}

static void nodes_open(struct node *nodes, uint32_t world, uint64_t generation)
{
    for (uint32_t i = 0; i < world; i++)
        assert_int_equal(node_open(nodes, world, i, generation, soon(), NULL), MU_OK);
}

static void nodes_free(struct node *nodes, uint32_t world)
{
    for (uint32_t i = 0; i < world; i++)
        mu_comm_free(nodes[i].comm);
}

/* Turns all of them until the condition holds. */
#define DRIVE_UNTIL(nodes, world, condition)                                                                           \
    do {                                                                                                               \
        uint64_t drive_deadline_us = soon();                                                                           \
        while (!(condition)) {                                                                                         \
            for (uint32_t drive_i = 0; drive_i < (world); drive_i++)                                                   \
                mu_comm_progress((nodes)[drive_i].comm);                                                               \
            if (mu_clock_mono_us() > drive_deadline_us)                                                                \
                fail_msg("did not happen in time: %s", #condition);                                                    \
        }                                                                                                              \
    } while (0)

static bool all_ready(const struct node *nodes, uint32_t world)
{
    for (uint32_t i = 0; i < world; i++) {
        if (!mu_comm_group_ready(nodes[i].group))
            return false;
    }
    return true;
}

static void nodes_connect(struct node *nodes, uint32_t world, enum transport transport)
{
    nodes_new(nodes, world, transport, (struct mu_comm_limits){0});
    nodes_open(nodes, world, 1);
    DRIVE_UNTIL(nodes, world, all_ready(nodes, world));
}

static struct mu_comm_failure first_failure(const struct node *node)
{
    struct mu_comm_failure failure = {0};
    mu_comm_group_failures(node->group, &failure, 1);
    return failure;
}

static bool failed(const struct node *node)
{
    return mu_comm_group_failures(node->group, NULL, 0) > 0;
}

static void expect_failure(struct node *node, uint32_t rank, enum mu_comm_failure_kind kind, const char *needle)
{
    struct mu_error err = {0};
    struct mu_comm_failure failure = first_failure(node);
    assert_int_equal(mu_comm_group_progress(node->group, &err), MU_ERR_UNAVAILABLE);
    assert_int_equal(failure.peer_rank, rank);
    if (failure.kind != kind || !strstr(err.text, needle))
        fail_msg("\"%s\" is no failure of kind %s that says \"%s\"", err.text, mu_comm_failure_name(kind), needle);
    char name[16];
    snprintf(name, sizeof name, "rank %u:", rank);
    assert_non_null(strstr(err.text, name));
}

static void fill(uint8_t *data, size_t size, uint64_t seed)
{
    size_t i = 0;
    for (; i + 8 <= size; i += 8) {
        uint64_t word = mu_splitmix64(&seed);
        memcpy(data + i, &word, 8);
    }
    for (uint64_t word = mu_splitmix64(&seed); i < size; i++, word >>= 8)
        data[i] = (uint8_t)word;
}

static bool filled(const uint8_t *data, size_t size, uint64_t seed)
{
    for (size_t i = 0; i < size; i += 8) {
        uint64_t word = mu_splitmix64(&seed);
        if (memcmp(data + i, &word, size - i < 8 ? size - i : 8) != 0)
            return false;
    }
    return true;
}

#define POST_SEND(node, peer, exchange, data, size, request)                                                           \
    assert_int_equal(mu_comm_send((node)->group, peer, exchange, data, size, request, NULL), MU_OK)
#define POST_RECV(node, peer, exchange, data, size, request)                                                           \
    assert_int_equal(mu_comm_recv((node)->group, peer, exchange, data, size, request, NULL), MU_OK)

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
        uint64_t begin_us = mu_clock_mono_us();
        assert_int_equal(node_open(nodes, 2, 1, 1, MU_COMM_FOREVER, NULL), MU_OK);
        mu_comm_free(nodes[0].comm);
        DRIVE_UNTIL(nodes + 1, 1, failed(&nodes[1]));
        assert_true(mu_clock_mono_us() - begin_us < 1000000);
        expect_failure(&nodes[1], 0, MU_COMM_FAIL_REFUSED, "nobody listens");
        mu_comm_free(nodes[1].comm);
    }
}

static void test_open_to_a_silent_peer_fails_at_the_deadline_with_its_rank(void **state)
{
    (void)state;
    struct node nodes[3];
    nodes_new(nodes, 3, OVER_TCP, (struct mu_comm_limits){.handshake_timeout_ms = 20});
    /* Rank 0 is stopped: the kernel still accepts for it. Rank 2 has not been told. */
    assert_int_equal(node_open(nodes, 3, 1, 1, mu_clock_mono_us() + 100000, NULL), MU_OK);
    struct mu_error err = {0};
    assert_int_equal(mu_comm_wait_ready(nodes[1].group, mu_clock_mono_us() + 10000, &err), MU_ERR_TIMEOUT);
    assert_non_null(strstr(err.text, "rank 0"));
    assert_int_equal(mu_comm_wait_ready(nodes[1].group, MU_COMM_FOREVER, &err), MU_ERR_UNAVAILABLE);
    expect_failure(&nodes[1], 0, MU_COMM_FAIL_TIMEOUT, "no answer to the hand-shake");
    struct mu_comm_failure failures[2];
    assert_int_equal(mu_comm_group_failures(nodes[1].group, failures, 2), 2);
    assert_int_equal(failures[1].peer_rank, 2);
    struct mu_comm_stats stats;
    mu_comm_stats(nodes[1].comm, &stats);
    assert_true(stats.redials > 0);
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

static int raw_connect(const struct node *node)
{
    struct literal_address address;
    assert_int_equal(mu_comm_address_parse(mu_comm_address(node->comm), &address, NULL), MU_OK);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&address.local, address.local_size), 0);
    return fd;
}

static struct wire_prefix raw_prefix(enum wire_kind kind)
{
    return (struct wire_prefix){.magic = WIRE_MAGIC, .version = WIRE_VERSION, .kind = (uint8_t)kind};
}

static struct wire_hello raw_hello(const struct node *nodes, uint32_t from, uint32_t to, uint32_t world,
                                   uint64_t generation)
{
    return (struct wire_hello){.prefix = raw_prefix(WIRE_HELLO),
                               .generation = generation,
                               .from_rank = from,
                               .to_rank = to,
                               .world = world,
                               .from_incarnation = nodes[from].incarnation,
                               .to_incarnation = nodes[to].incarnation};
}

static void raw_write(int fd, const void *data, size_t size)
{
    assert_int_equal(send(fd, data, size, MSG_NOSIGNAL), size);
}

/* Reads `size` bytes while `node` is driven; returns fewer at end-of-file. */
static size_t raw_read(struct node *node, int fd, void *into, size_t size)
{
    size_t have = 0;
    uint64_t deadline_us = soon();
    while (have < size && mu_clock_mono_us() < deadline_us) {
        mu_comm_progress(node->comm);
        ssize_t n = recv(fd, (uint8_t *)into + have, size - have, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN))
            break;
        have += n > 0 ? (size_t)n : 0;
    }
    return have;
}

/* Dials as rank `from` with the right secret, as a peer that will misbehave. */
static int raw_dial(struct node *nodes, uint32_t from, uint32_t to, uint32_t world, uint64_t generation)
{
    int fd = raw_connect(&nodes[to]);
    struct wire_hello hello = raw_hello(nodes, from, to, world, generation);
    struct wire_challenge challenge;
    raw_write(fd, &hello, sizeof hello);
    assert_int_equal(raw_read(&nodes[to], fd, &challenge, sizeof challenge), sizeof challenge);
    uint8_t text[8 + sizeof hello + 32];
    memcpy(text, "dialler", 8);
    memcpy(text + 8, &hello, sizeof hello);
    memcpy(text + 8 + sizeof hello, challenge.nonce, 32);
    struct wire_response response = {.prefix = raw_prefix(WIRE_RESPONSE)};
    mu_hmac_sha256(secret, sizeof secret, text, sizeof text, response.mac);
    raw_write(fd, &response, sizeof response);
    struct wire_prefix welcome;
    assert_int_equal(raw_read(&nodes[to], fd, &welcome, sizeof welcome), sizeof welcome);
    assert_int_equal(welcome.kind, WIRE_WELCOME);
    return fd;
}

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
    nodes_new(nodes, 2, OVER_UNIX, (struct mu_comm_limits){.handshake_timeout_ms = 30});
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
    struct node nodes[2];
    int fds[FLOOD];
    nodes_new(nodes, 2, OVER_UNIX, (struct mu_comm_limits){.pending_max = 4, .handshake_timeout_ms = 600000});
    nodes_open(nodes, 2, 1);
    for (int i = 0; i < FLOOD; i++)
        fds[i] = raw_connect(&nodes[0]);
    DRIVE_UNTIL(nodes, 2, all_ready(nodes, 2));
    struct mu_comm_stats stats = {0};
    DRIVE_UNTIL(nodes, 2, (mu_comm_stats(nodes[0].comm, &stats), stats.accepted >= FLOOD + 1));
    assert_true(nodes[0].comm->pending_count <= 4);
    assert_true(stats.refused_full >= FLOOD - 4);
    for (int i = 0; i < FLOOD; i++)
        close(fds[i]);
    nodes_free(nodes, 2);
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

/* ---- transfers ---- */

enum { EXCHANGES = 6 };

struct all_to_all {
    struct node *nodes;
    uint32_t world, rank;
    uint64_t seed;
    bool ok;
    char why[128];
};

static size_t exchange_size(uint64_t seed, uint32_t from, uint32_t to, uint32_t exchange)
{
    static const size_t limits[] = {1, 65, MU_COMM_EAGER_SIZE + 2, 70000, 1 << 20, 8 << 20};
    uint64_t mix = seed ^ ((uint64_t)from << 40 | (uint64_t)to << 20 | exchange);
    size_t limit = limits[mu_splitmix64(&mix) % (sizeof limits / sizeof limits[0])];
    return (size_t)(mu_splitmix64(&mix) % limit);
}

static uint64_t exchange_seed(uint32_t from, uint32_t to, uint32_t exchange)
{
    return (uint64_t)from << 40 | (uint64_t)to << 20 | exchange;
}

struct post {
    uint32_t peer, exchange;
    bool send;
    uint8_t *data;
    size_t size;
    struct mu_comm_request request;
};

/* Runs in a thread of its own, with no cmocka assertions there. */
static void *all_to_all_rank(void *argument)
{
    struct all_to_all *task = argument;
    struct node *node = &task->nodes[task->rank];
    struct post posts[2 * NODES_MAX * EXCHANGES];
    size_t count = 0;
    struct mu_error err = {0};
    enum mu_status status = mu_comm_wait_ready(node->group, soon(), &err);
    for (uint32_t peer = 0; peer < task->world; peer++) {
        for (uint32_t k = 0; peer != task->rank && k < 2 * EXCHANGES; k++) {
            struct post *post = &posts[count++];
            *post = (struct post){.peer = peer, .exchange = k / 2, .send = k % 2};
            uint32_t from = post->send ? task->rank : peer, to = post->send ? peer : task->rank;
            post->size = exchange_size(task->seed, from, to, post->exchange);
            post->data = malloc(post->size + 1);
            if (post->send)
                fill(post->data, post->size, exchange_seed(from, to, post->exchange));
        }
    }
    uint64_t random = task->seed * 31 + task->rank;
    for (size_t i = count; i > 1; i--) {
        size_t k = (size_t)(mu_splitmix64(&random) % i);
        struct post swap = posts[i - 1];
        posts[i - 1] = posts[k];
        posts[k] = swap;
    }
    for (size_t i = 0; i < count && status == MU_OK; i++) {
        struct post *post = &posts[i];
        if (post->send)
            status =
                mu_comm_send(node->group, post->peer, post->exchange, post->data, post->size, &post->request, &err);
        else
            status =
                mu_comm_recv(node->group, post->peer, post->exchange, post->data, post->size, &post->request, &err);
        for (uint64_t n = mu_splitmix64(&random) % 3; n > 0 && status == MU_OK; n--)
            status = mu_comm_group_progress(node->group, &err);
    }
    for (size_t i = 0; i < count / 3 && status == MU_OK; i++) {
        status = mu_comm_wait(node->group, &posts[i].request, soon(), &err);
    }
    if (status == MU_OK)
        status = mu_comm_wait_all(node->group, soon(), &err);
    task->ok = status == MU_OK;
    snprintf(task->why, sizeof task->why, "%.127s", err.text);
    for (size_t i = 0; i < count; i++) {
        struct post *post = &posts[i];
        if (task->ok && !post->send &&
            !filled(post->data, post->size, exchange_seed(post->peer, task->rank, post->exchange))) {
            task->ok = false;
            snprintf(task->why, sizeof task->why, "wrong bytes from rank %u, exchange %u", post->peer, post->exchange);
        }
        free(post->data);
    }
    return NULL;
}

static void all_to_all(enum transport transport, uint32_t world, uint64_t seed)
{
    struct node nodes[NODES_MAX];
    struct all_to_all tasks[NODES_MAX];
    pthread_t threads[NODES_MAX];
    nodes_new(nodes, world, transport, (struct mu_comm_limits){0});
    nodes_open(nodes, world, 1);
    for (uint32_t i = 0; i < world; i++) {
        tasks[i] = (struct all_to_all){.nodes = nodes, .world = world, .rank = i, .seed = seed};
        assert_int_equal(pthread_create(&threads[i], NULL, all_to_all_rank, &tasks[i]), 0);
    }
    for (uint32_t i = 0; i < world; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    for (uint32_t i = 0; i < world; i++) {
        if (!tasks[i].ok)
            fail_msg("seed %llu, rank %u: %s", (unsigned long long)seed, i, tasks[i].why);
        for (uint32_t k = 0; k < world; k++) {
            struct mu_comm_traffic traffic;
            uint64_t sent = 0, received = 0;
            if (k == i)
                continue;
            for (uint32_t e = 0; e < EXCHANGES; e++) {
                sent += exchange_size(seed, i, k, e);
                received += exchange_size(seed, k, i, e);
            }
            assert_int_equal(mu_comm_peer_traffic(nodes[i].group, k, &traffic), MU_OK);
            assert_int_equal(traffic.bytes_sent, sent);
            assert_int_equal(traffic.bytes_received, received);
        }
    }
    nodes_free(nodes, world);
}

static void test_all_to_all_in_random_orders_moves_every_byte(void **state)
{
    (void)state;
    all_to_all(OVER_UNIX, 2, 1);
    for (uint64_t seed = 10; seed < 13; seed++) {
        all_to_all(OVER_UNIX, 4, seed);
        all_to_all(OVER_TCP, 4, seed);
    }
}

static void test_large_receives_in_the_other_order_do_not_deadlock(void **state)
{
    (void)state;
    enum { SIZE = 5000001, COUNT = 4 };
    struct node nodes[2];
    nodes_connect(nodes, 2, OVER_UNIX);
    uint8_t *from[COUNT], *to[COUNT];
    struct mu_comm_request sends[COUNT], receives[COUNT];
    for (uint32_t i = 0; i < COUNT; i++) {
        from[i] = malloc(SIZE);
        to[i] = malloc(SIZE);
        fill(from[i], SIZE, i);
        POST_SEND(&nodes[0], 1, i, from[i], SIZE, &sends[i]);
    }
    for (uint32_t i = COUNT; i-- > 0;) { /* each is posted only when the one after it is done */
        POST_RECV(&nodes[1], 0, i, to[i], SIZE, &receives[i]);
        DRIVE_UNTIL(nodes, 2, mu_comm_done(&receives[i]) && mu_comm_done(&sends[i]));
        assert_true(filled(to[i], SIZE, i));
        assert_true(i == 0 || !mu_comm_done(&sends[i - 1]));
    }
    for (uint32_t i = 0; i < COUNT; i++) {
        free(from[i]);
        free(to[i]);
    }
    nodes_free(nodes, 2);
}

static void test_small_messages_before_their_receives_are_held_in_bounds(void **state)
{
    (void)state;
    enum { COUNT = 4 * MU_COMM_EAGER_HELD };
    struct node nodes[2];
    nodes_connect(nodes, 2, OVER_TCP);
    uint8_t *from = malloc((size_t)COUNT * MU_COMM_EAGER_SIZE), *to = calloc(COUNT, MU_COMM_EAGER_SIZE);
    struct mu_comm_request *sends = calloc(COUNT, sizeof *sends), *receives = calloc(COUNT, sizeof *receives);
    for (uint32_t i = 0; i < COUNT; i++) {
        fill(from + (size_t)i * MU_COMM_EAGER_SIZE, i * 4, i);
        POST_SEND(&nodes[0], 1, i, from + (size_t)i * MU_COMM_EAGER_SIZE, i * 4, &sends[i]);
    }
    struct peer *peer = mu_comm_find_peer(nodes[1].group, 0);
    DRIVE_UNTIL(nodes, 2, peer->in->held_back);
    assert_int_equal(peer->slots.count, MU_COMM_EAGER_HELD);
    for (uint32_t i = COUNT; i-- > 0;)
        POST_RECV(&nodes[1], 0, i, to + (size_t)i * MU_COMM_EAGER_SIZE, i * 4, &receives[i]);
    struct mu_error err = {0};
    DRIVE_UNTIL(nodes, 2, mu_comm_done(&receives[COUNT - 1]) && mu_comm_wait_all(nodes[1].group, 0, &err) == MU_OK);
    for (uint32_t i = 0; i < COUNT; i++)
        assert_true(filled(to + (size_t)i * MU_COMM_EAGER_SIZE, i * 4, i));
    free(from);
    free(to);
    free(sends);
    free(receives);
    nodes_free(nodes, 2);
}

static void test_a_small_message_overtakes_a_large_one(void **state)
{
    (void)state;
    enum { SIZE = 64 * 1024 * 1024 };
    struct node nodes[2];
    nodes_connect(nodes, 2, OVER_UNIX);
    uint8_t *from = calloc(1, SIZE), *to = malloc(SIZE), vote = 42, seen = 0;
    struct mu_comm_request large_send, large_receive, small_send, small_receive;
    POST_RECV(&nodes[1], 0, 1, to, SIZE, &large_receive);
    POST_RECV(&nodes[1], 0, 2, &seen, 1, &small_receive);
    POST_SEND(&nodes[0], 1, 1, from, SIZE, &large_send);
    DRIVE_UNTIL(nodes, 2, large_receive.moved > 0);
    size_t before = large_receive.moved;
    POST_SEND(&nodes[0], 1, 2, &vote, 1, &small_send);
    DRIVE_UNTIL(nodes, 2, mu_comm_done(&small_receive));
    assert_int_equal(seen, 42);
    assert_false(mu_comm_done(&large_receive));
    assert_true(large_receive.moved - before <= 8 * 1024 * 1024);
    DRIVE_UNTIL(nodes, 2, mu_comm_done(&large_receive));
    free(from);
    free(to);
    nodes_free(nodes, 2);
}

static void test_two_large_messages_share_the_connection(void **state)
{
    (void)state;
    enum { SIZE = 16 * 1024 * 1024 };
    struct node nodes[2];
    nodes_connect(nodes, 2, OVER_UNIX);
    uint8_t *from = calloc(1, SIZE), *to[2] = {malloc(SIZE), malloc(SIZE)};
    struct mu_comm_request sends[2], receives[2];
    for (uint32_t i = 0; i < 2; i++) {
        POST_RECV(&nodes[1], 0, i, to[i], SIZE, &receives[i]);
        POST_SEND(&nodes[0], 1, i, from, SIZE, &sends[i]);
    }
    DRIVE_UNTIL(nodes, 2, receives[0].moved > SIZE / 2 || receives[1].moved > SIZE / 2);
    assert_true(receives[0].moved > SIZE / 4 && receives[1].moved > SIZE / 4);
    DRIVE_UNTIL(nodes, 2, mu_comm_done(&receives[0]) && mu_comm_done(&receives[1]));
    free(from);
    free(to[0]);
    free(to[1]);
    nodes_free(nodes, 2);
}

static void test_posts_that_cannot_be_are_refused(void **state)
{
    (void)state;
    struct node nodes[2];
    nodes_connect(nodes, 2, OVER_UNIX);
    struct mu_comm_request first, second;
    struct mu_error err = {0};
    uint8_t byte = 0;
    POST_RECV(&nodes[0], 1, 3, &byte, 1, &first);
    assert_int_equal(mu_comm_recv(nodes[0].group, 1, 3, &byte, 1, &second, &err), MU_ERR_EXISTS);
    assert_non_null(strstr(err.text, "exchange 3"));
    assert_int_equal(mu_comm_send(nodes[0].group, 0, 4, &byte, 1, &second, &err), MU_ERR_INVALID);
    assert_int_equal(mu_comm_send(nodes[0].group, 2, 4, &byte, 1, &second, &err), MU_ERR_INVALID);
    assert_non_null(strstr(err.text, "rank 2"));
    POST_SEND(&nodes[0], 1, 3, &byte, 1, &second); /* the other direction is another exchange */
    struct mu_comm_request *many = calloc(MU_COMM_REQUESTS_MAX, sizeof *many);
    for (uint32_t i = 0; i < MU_COMM_REQUESTS_MAX - 1; i++)
        POST_RECV(&nodes[0], 1, 100 + i, &byte, 1, &many[i]);
    assert_int_equal(mu_comm_recv(nodes[0].group, 1, 99, &byte, 1, &many[MU_COMM_REQUESTS_MAX - 1], &err),
                     MU_ERR_LIMIT);
    nodes_free(nodes, 2);
    free(many);
}

static void test_wait_until_the_deadline_names_what_is_missing(void **state)
{
    (void)state;
    struct node nodes[2];
    nodes_connect(nodes, 2, OVER_UNIX);
    uint8_t *buffer = calloc(1, 100000);
    struct mu_comm_request receive, send;
    struct mu_error err = {0};
    POST_RECV(&nodes[0], 1, 3, buffer, 10, &receive);
    uint64_t begin_us = mu_clock_mono_us();
    assert_int_equal(mu_comm_wait(nodes[0].group, &receive, begin_us + 5000, &err), MU_ERR_TIMEOUT);
    assert_true(mu_clock_mono_us() - begin_us >= 5000);
    assert_non_null(strstr(err.text, "exchange 3 from rank 1: 0 of 10"));
    struct mu_comm_traffic traffic;
    assert_int_equal(mu_comm_peer_traffic(nodes[0].group, 1, &traffic), MU_OK);
    assert_true(traffic.wait_us >= 4000 && mu_comm_group_wait_us(nodes[0].group) >= traffic.wait_us);
    POST_SEND(&nodes[0], 1, 3, buffer, 100000, &send);
    assert_int_equal(mu_comm_wait(nodes[0].group, &send, 0, &err), MU_ERR_TIMEOUT);
    assert_non_null(strstr(err.text, "has not posted the receive"));
    assert_int_equal(mu_comm_wait_all(nodes[0].group, 0, &err), MU_ERR_TIMEOUT);
    assert_non_null(strstr(err.text, "1 receives from and 1 sends to rank 1"));
    nodes_free(nodes, 2);
    free(buffer);
}

static void test_fd_becomes_readable_when_a_peer_dials(void **state)
{
    (void)state;
    struct node nodes[2];
    nodes_new(nodes, 2, OVER_TCP, (struct mu_comm_limits){0});
    nodes_open(nodes, 2, 1);
    for (int i = 0; i < 4; i++)
        mu_comm_progress(nodes[0].comm);
    struct pollfd poll_fd = {.fd = mu_comm_fd(nodes[0].comm), .events = POLLIN};
    assert_int_equal(poll(&poll_fd, 1, 0), 0);
    mu_comm_progress(nodes[1].comm); /* dials */
    assert_int_equal(poll(&poll_fd, 1, PATIENCE_US / 1000), 1);
    nodes_free(nodes, 2);
}

/* ---- failures ---- */

static void test_sizes_that_differ_fail_with_both_numbers(void **state)
{
    (void)state;
    static const size_t sizes[][2] = {{10, 11}, {100000, 100001}, {5, 100000}};
    for (size_t c = 0; c < 3; c++) {
        for (int receive_first = 0; receive_first < 2; receive_first++) {
            struct node nodes[2];
            nodes_connect(nodes, 2, OVER_UNIX);
            uint8_t *buffer = calloc(2, 200000);
            struct mu_comm_request send, receive;
            if (receive_first)
                POST_RECV(&nodes[1], 0, 8, buffer, sizes[c][1], &receive);
            for (int i = 0; i < 10; i++)
                mu_comm_progress(nodes[i % 2].comm);
            (void)!mu_comm_send(nodes[0].group, 1, 8, buffer + 200000, sizes[c][0], &send,
                                NULL); /* a post itself may notice */
            for (int i = 0; i < 10; i++)
                mu_comm_progress(nodes[i % 2].comm);
            if (!receive_first)
                (void)!mu_comm_recv(nodes[1].group, 0, 8, buffer, sizes[c][1], &receive, NULL);
            DRIVE_UNTIL(nodes, 2, failed(&nodes[0]) && failed(&nodes[1]));
            struct mu_error err[2] = {0};
            char there[64];
            int witness = -1;
            for (int i = 0; i < 2; i++) {
                assert_int_equal(mu_comm_group_progress(nodes[i].group, &err[i]), MU_ERR_UNAVAILABLE);
                assert_int_equal(first_failure(&nodes[i]).kind,
                                 MU_COMM_FAIL_PROTOCOL); /* on both sides: nobody has died */
                snprintf(there, sizeof there, "%zu bytes there and %zu here", sizes[c][1 - i], sizes[c][i]);
                if (strstr(err[i].text, there))
                    witness = i;
            }
            assert_true(witness >= 0);
            assert_non_null(strstr(err[1 - witness].text, "gave this connection up"));
            nodes_free(nodes, 2);
            free(buffer);
        }
    }
}

static void test_goodbye_fails_a_peer_only_if_something_is_wanted(void **state)
{
    (void)state;
    struct node nodes[3];
    nodes_connect(nodes, 3, OVER_TCP);
    uint8_t last = 5, seen = 0, never;
    struct mu_comm_request send, receive, lost;
    POST_SEND(&nodes[2], 0, 1, &last, 1, &send);
    DRIVE_UNTIL(nodes, 3, mu_comm_done(&send));
    mu_comm_group_close(nodes[2].group);
    nodes[2].group = NULL;
    DRIVE_UNTIL(nodes, 3,
                mu_comm_find_peer(nodes[0].group, 2)->state == PEER_LEFT &&
                    mu_comm_find_peer(nodes[1].group, 2)->state == PEER_LEFT);
    assert_int_equal(mu_comm_group_progress(nodes[0].group, NULL), MU_OK);
    POST_RECV(&nodes[0], 2, 1, &seen, 1, &receive); /* sent before it left */
    assert_true(mu_comm_done(&receive));
    assert_int_equal(seen, 5);
    POST_SEND(&nodes[1], 0, 1, &last, 1, &send); /* the others go on */
    POST_RECV(&nodes[0], 1, 1, &seen, 1, &receive);
    DRIVE_UNTIL(nodes, 2, mu_comm_done(&receive));
    assert_int_equal(mu_comm_recv(nodes[1].group, 2, 2, &never, 1, &lost, NULL), MU_ERR_UNAVAILABLE);
    expect_failure(&nodes[1], 2, MU_COMM_FAIL_LEFT, "left this generation");

    POST_RECV(&nodes[0], 1, 3, &never, 1, &lost);
    mu_comm_group_close(nodes[1].group);
    DRIVE_UNTIL(nodes, 1, failed(&nodes[0]));
    expect_failure(&nodes[0], 1, MU_COMM_FAIL_LEFT, "1 receives");
    nodes_free(nodes, 3);
}

/* After the first failure further deaths are still seen, and goodbyes are told from deaths. */
static void test_a_failed_group_still_tells_deaths_from_goodbyes(void **state)
{
    (void)state;
    struct node nodes[4];
    nodes_new(nodes, 1, OVER_UNIX, (struct mu_comm_limits){0});
    nodes_new(nodes + 1, 1, OVER_UNIX, (struct mu_comm_limits){0});
    for (uint32_t i = 0; i < 4; i++)
        nodes[i].incarnation = (struct mu_id){.high = 1, .low = i};
    nodes[1].rank = 1;
    nodes[2].comm = nodes[3].comm = nodes[0].comm; /* only for their addresses: ranks 2 and 3 are raw sockets */
    assert_int_equal(node_open(nodes, 4, 0, 1, MU_COMM_FOREVER, NULL), MU_OK);
    int second = raw_dial(nodes, 2, 0, 4, 1), third = raw_dial(nodes, 3, 0, 4, 1), first = raw_dial(nodes, 1, 0, 4, 1);
    assert_true(mu_comm_group_ready(nodes[0].group));
    close(second);
    DRIVE_UNTIL(nodes, 1, failed(&nodes[0]));
    struct wire_frame bye = {.prefix = raw_prefix(WIRE_BYE), .generation = 1};
    raw_write(first, &bye, sizeof bye);
    close(first);
    close(third);
    struct mu_comm_failure failures[4];
    DRIVE_UNTIL(nodes, 1, mu_comm_group_failures(nodes[0].group, failures, 4) == 2);
    DRIVE_UNTIL(nodes, 1, mu_comm_find_peer(nodes[0].group, 1)->state == PEER_LEFT);
    assert_int_equal(failures[0].peer_rank, 2);
    assert_int_equal(failures[0].kind, MU_COMM_FAIL_EOF);
    assert_int_equal(failures[1].peer_rank, 3);
    assert_int_equal(failures[1].kind, MU_COMM_FAIL_EOF);
    mu_comm_free(nodes[0].comm);
    mu_comm_free(nodes[1].comm);
}

static void test_frames_that_do_not_fit_fail_as_protocol(void **state)
{
    (void)state;
    const struct wire_frame good = {
        .prefix = raw_prefix(WIRE_DATA), .generation = 1, .exchange = 1, .total = 8, .length = 8};
    struct wire_frame frames[8];
    for (size_t i = 0; i < 8; i++)
        frames[i] = good;
    frames[0].prefix.magic ^= 1;
    frames[1].generation = 2;
    frames[2].length = 7;
    frames[3].total = MU_COMM_PIECE_SIZE * 2, frames[3].length = MU_COMM_PIECE_SIZE + 1;
    frames[4].total = 10000, frames[4].offset = UINT64_MAX, frames[4].length = 2;
    frames[5].prefix.kind = WIRE_HELLO;
    frames[6].total = frames[6].length = 10000; /* nobody asked for it */
    frames[7].prefix.kind = WIRE_GRANT, frames[7].length = 0;
    for (size_t i = 0; i < 8; i++) {
        struct node nodes[2];
        nodes_new(nodes, 2, OVER_UNIX, (struct mu_comm_limits){0});
        assert_int_equal(node_open(nodes, 2, 0, 1, MU_COMM_FOREVER, NULL), MU_OK);
        int fd = raw_dial(nodes, 1, 0, 2, 1);
        raw_write(fd, &frames[i], sizeof frames[i]);
        DRIVE_UNTIL(nodes, 1, failed(&nodes[0]));
        expect_failure(&nodes[0], 1, MU_COMM_FAIL_PROTOCOL, "it sent");
        close(fd);
        nodes_free(nodes, 2);
    }
}

static void test_end_of_file_inside_a_frame_or_half_closed_is_eof(void **state)
{
    (void)state;
    for (int half_closed = 0; half_closed < 2; half_closed++) {
        struct node nodes[2];
        nodes_new(nodes, 2, OVER_UNIX, (struct mu_comm_limits){0});
        assert_int_equal(node_open(nodes, 2, 0, 1, MU_COMM_FOREVER, NULL), MU_OK);
        int fd = raw_dial(nodes, 1, 0, 2, 1);
        struct mu_comm_request request;
        uint64_t word = 0;
        POST_RECV(&nodes[0], 1, 1, &word, sizeof word, &request);
        struct wire_frame frame = {
            .prefix = raw_prefix(WIRE_DATA), .generation = 1, .exchange = 1, .total = 8, .length = 8};
        raw_write(fd, &frame, sizeof frame);
        raw_write(fd, "abc", 3);
        DRIVE_UNTIL(nodes, 1, (word & 0xffffff) != 0);
        assert_false(mu_comm_done(&request));
        if (half_closed)
            shutdown(fd, SHUT_WR);
        else
            close(fd);
        DRIVE_UNTIL(nodes, 1, failed(&nodes[0]));
        expect_failure(&nodes[0], 1, MU_COMM_FAIL_EOF, "without goodbye");
        assert_false(mu_comm_done(&request));
        if (half_closed)
            close(fd);
        nodes_free(nodes, 2);
    }
}

/* ---- a real process that is killed ---- */

static void child_main(int to_parent, int from_parent, enum transport transport, bool send_forever)
{
    struct node nodes[2] = {{.rank = 0}, {.rank = 1, .incarnation = {.low = 11}}};
    struct mu_comm_config config = {.host_id = transport == OVER_UNIX ? "host-0" : "host-child"};
    char address[MU_COMM_ADDRESS_SIZE] = "", own[MU_COMM_ADDRESS_SIZE] = "";
    if (mu_comm_new(&config, &nodes[1].comm, NULL) != MU_OK)
        _exit(2);
    snprintf(own, sizeof own, "%s", mu_comm_address(nodes[1].comm));
    if (write(to_parent, own, sizeof own) != sizeof own || read(from_parent, address, sizeof address) != sizeof address)
        _exit(3);
    struct mu_comm_peer peer = {.rank = 0, .incarnation = {.low = 10}, .address = address};
    struct mu_comm_group_config group = {
        .generation = 1, .rank = 1, .world = 2, .incarnation = nodes[1].incarnation, .peers = &peer, .peer_count = 1};
    memcpy(group.secret, secret, sizeof secret);
    if (mu_comm_open(nodes[1].comm, &group, MU_COMM_FOREVER, &nodes[1].group, NULL) != MU_OK ||
        mu_comm_wait_ready(nodes[1].group, MU_COMM_FOREVER, NULL) != MU_OK)
        _exit(4);
    struct mu_comm_request send, never;
    enum { SIZE = 256 * 1024 * 1024 };
    uint8_t *data = calloc(1, SIZE), byte;
    if (send_forever && mu_comm_send(nodes[1].group, 0, 1, data, SIZE, &send, NULL) != MU_OK)
        _exit(5);
    if (mu_comm_recv(nodes[1].group, 0, 2, &byte, 1, &never, NULL) != MU_OK)
        _exit(6);
    (void)!mu_comm_wait(nodes[1].group, &never, MU_COMM_FOREVER, NULL); /* until it is killed */
    _exit(7);
}

static void killed_peer(enum transport transport, bool in_the_middle)
{
    int to_child[2], from_child[2];
    assert_int_equal(pipe(to_child), 0);
    assert_int_equal(pipe(from_child), 0);
    pid_t child = fork();
    if (child == 0)
        child_main(from_child[1], to_child[0], transport, in_the_middle);
    assert_true(child > 0);
    struct node node = {.rank = 0};
    char address[MU_COMM_ADDRESS_SIZE] = "", own[MU_COMM_ADDRESS_SIZE] = "";
    node.comm = comm_new(&(struct mu_comm_config){.host_id = "host-0"});
    snprintf(own, sizeof own, "%s", mu_comm_address(node.comm));
    assert_int_equal(write(to_child[1], own, sizeof own), sizeof own);
    assert_int_equal(read(from_child[0], address, sizeof address), sizeof address);
    struct mu_comm_peer peer = {.rank = 1, .incarnation = {.low = 11}, .address = address};
    struct mu_comm_group_config config = {
        .generation = 1, .rank = 0, .world = 2, .incarnation = {.low = 10}, .peers = &peer, .peer_count = 1};
    memcpy(config.secret, secret, sizeof secret);
    assert_int_equal(mu_comm_open(node.comm, &config, MU_COMM_FOREVER, &node.group, NULL), MU_OK);
    assert_int_equal(mu_comm_wait_ready(node.group, soon(), NULL), MU_OK);
    struct mu_comm_request request;
    enum { SIZE = 256 * 1024 * 1024 };
    uint8_t *into = malloc(SIZE);
    POST_RECV(&node, 1, 1, into, SIZE, &request);
    if (in_the_middle)
        DRIVE_UNTIL(&node, 1, request.moved > 0);
    uint64_t begin_us = mu_clock_mono_us();
    assert_int_equal(kill(child, SIGKILL), 0);
    struct mu_error err = {0};
    assert_int_equal(mu_comm_wait(node.group, &request, soon(), &err), MU_ERR_UNAVAILABLE);
    uint64_t took_us = mu_clock_mono_us() - begin_us;
    struct mu_comm_failure failure = first_failure(&node);
    assert_int_equal(failure.peer_rank, 1);
    assert_true(failure.kind == MU_COMM_FAIL_EOF || failure.kind == MU_COMM_FAIL_RESET);
    assert_true(took_us < 2000000);
    print_message("           SIGKILL seen as %s after %llu us\n", mu_comm_failure_name(failure.kind),
                  (unsigned long long)took_us);
    assert_int_equal(waitpid(child, NULL, 0), child);
    mu_comm_free(node.comm);
    free(into);
    close(to_child[0]);
    close(to_child[1]);
    close(from_child[0]);
    close(from_child[1]);
}

static void test_a_killed_peer_is_seen_at_once_with_its_rank(void **state)
{
    (void)state;
    killed_peer(OVER_UNIX, false);
    killed_peer(OVER_UNIX, true);
    killed_peer(OVER_TCP, false);
    killed_peer(OVER_TCP, true);
}

/* ---- abort ---- */

struct aborter {
    struct mu_comm *comm;
    pthread_barrier_t *barrier;
    uint64_t at_us;
};

static void *abort_thread(void *argument)
{
    struct aborter *aborter = argument;
    pthread_barrier_wait(aborter->barrier);
    aborter->at_us = mu_clock_mono_us();
    mu_comm_abort(aborter->comm, 1);
    return NULL;
}

static void test_abort_from_another_thread_ends_a_wait_at_once(void **state)
{
    (void)state;
    enum { ROUNDS = 20 };
    uint64_t worst_us = 0;
    for (int round = 0; round < ROUNDS; round++) {
        struct node nodes[2];
        nodes_connect(nodes, 2, OVER_UNIX);
        uint8_t byte;
        struct mu_comm_request request;
        POST_RECV(&nodes[0], 1, 1, &byte, 1, &request);
        pthread_barrier_t barrier;
        pthread_barrier_init(&barrier, NULL, 2);
        struct aborter aborter = {.comm = nodes[0].comm, .barrier = &barrier};
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, abort_thread, &aborter), 0);
        pthread_barrier_wait(&barrier);
        assert_int_equal(mu_comm_wait(nodes[0].group, &request, MU_COMM_FOREVER, NULL), MU_ERR_CANCELLED);
        uint64_t end_us = mu_clock_mono_us();
        assert_int_equal(pthread_join(thread, NULL), 0);
        pthread_barrier_destroy(&barrier);
        if (end_us > aborter.at_us && end_us - aborter.at_us > worst_us)
            worst_us = end_us - aborter.at_us;
        assert_int_equal(mu_comm_wait_all(nodes[0].group, MU_COMM_FOREVER, NULL), MU_ERR_CANCELLED);
        assert_int_equal(mu_comm_group_progress(nodes[0].group, NULL), MU_ERR_CANCELLED);
        struct mu_comm_request other;
        assert_int_equal(mu_comm_send(nodes[0].group, 1, 1, &byte, 1, &other, NULL), MU_ERR_CANCELLED);
        struct mu_error err = {0};
        mu_comm_group_close(nodes[0].group);
        assert_int_equal(node_open(nodes, 2, 0, 1, soon(), &err), MU_ERR_CANCELLED);
        assert_int_equal(node_open(nodes, 2, 0, 2, soon(), &err), MU_OK); /* a later generation is not concerned */
        assert_int_equal(mu_comm_group_progress(nodes[0].group, &err), MU_OK);
        nodes_free(nodes, 2);
    }
    print_message("           worst of %d: %llu us\n", (int)ROUNDS, (unsigned long long)worst_us);
    assert_true(worst_us < 1000000);
}

static void test_abort_in_the_middle_leaves_buffers_untouched(void **state)
{
    (void)state;
    enum { SIZE = 32 * 1024 * 1024 };
    for (int transport = OVER_UNIX; transport <= OVER_TCP; transport++) {
        struct node nodes[2];
        nodes_connect(nodes, 2, (enum transport)transport);
        uint8_t *from = malloc(SIZE), *to = calloc(1, SIZE);
        fill(from, SIZE, 1);
        struct mu_comm_request send, receive;
        POST_RECV(&nodes[1], 0, 1, to, SIZE, &receive);
        POST_SEND(&nodes[0], 1, 1, from, SIZE, &send);
        DRIVE_UNTIL(nodes, 2, receive.moved > 0);
        mu_comm_abort(nodes[1].comm, 1);
        assert_int_equal(mu_comm_group_progress(nodes[1].group, NULL), MU_ERR_CANCELLED);
        assert_false(mu_comm_done(&receive));
        memset(to, 0xAB, SIZE); /* the buffer is in use for something else */
        for (int i = 0; i < 1000; i++)
            mu_comm_progress(nodes[i % 2].comm);
        for (size_t i = 0; i < SIZE; i++)
            assert_int_equal(to[i], 0xAB);
        mu_comm_group_close(nodes[1].group);
        memset(&receive, 0xCD, sizeof receive); /* and the request is the caller's again */
        for (int i = 0; i < 100; i++)
            mu_comm_progress(nodes[i % 2].comm);
        assert_int_equal(to[SIZE / 2], 0xAB);
        DRIVE_UNTIL(nodes, 2, failed(&nodes[0])); /* the sender learns of it */
        assert_int_equal(first_failure(&nodes[0]).peer_rank, 1);
        nodes_free(nodes, 2);
        free(from);
        free(to);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            test_a_killed_peer_is_seen_at_once_with_its_rank), /* first: it forks, and no thread has been started yet */
        cmocka_unit_test(test_open_with_2_4_8_ranks_connects),
        cmocka_unit_test(test_open_before_the_acceptor_knows_the_generation_waits_for_it),
        cmocka_unit_test(test_open_next_generation_keeps_the_old_one_working),
        cmocka_unit_test(test_open_to_a_dead_process_fails_at_once_as_refused),
        cmocka_unit_test(test_open_to_a_silent_peer_fails_at_the_deadline_with_its_rank),
        cmocka_unit_test(test_open_of_bad_configurations_is_refused),
        cmocka_unit_test(test_new_with_bad_addresses_says_what_is_allowed),
        cmocka_unit_test(test_new_with_a_directory_leaves_no_socket_behind),
        cmocka_unit_test(test_strangers_are_refused_and_counted_while_peers_connect),
        cmocka_unit_test(test_a_flood_of_silent_connections_does_not_keep_a_peer_out),
        cmocka_unit_test(test_open_with_another_secret_never_connects_and_says_why),
        cmocka_unit_test(test_open_of_a_stale_generation_is_told_so),
        cmocka_unit_test(test_all_to_all_in_random_orders_moves_every_byte),
        cmocka_unit_test(test_large_receives_in_the_other_order_do_not_deadlock),
        cmocka_unit_test(test_small_messages_before_their_receives_are_held_in_bounds),
        cmocka_unit_test(test_a_small_message_overtakes_a_large_one),
        cmocka_unit_test(test_two_large_messages_share_the_connection),
        cmocka_unit_test(test_posts_that_cannot_be_are_refused),
        cmocka_unit_test(test_wait_until_the_deadline_names_what_is_missing),
        cmocka_unit_test(test_fd_becomes_readable_when_a_peer_dials),
        cmocka_unit_test(test_sizes_that_differ_fail_with_both_numbers),
        cmocka_unit_test(test_goodbye_fails_a_peer_only_if_something_is_wanted),
        cmocka_unit_test(test_a_failed_group_still_tells_deaths_from_goodbyes),
        cmocka_unit_test(test_frames_that_do_not_fit_fail_as_protocol),
        cmocka_unit_test(test_end_of_file_inside_a_frame_or_half_closed_is_eof),
        cmocka_unit_test(test_abort_from_another_thread_ends_a_wait_at_once),
        cmocka_unit_test(test_abort_in_the_middle_leaves_buffers_untouched),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
