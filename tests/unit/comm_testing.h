/* Several ranks in one process, and peers that misbehave: shared by the tests of the data plane. Included by one file
 * per executable. */
#ifndef MU_TESTS_COMM_TESTING_H
#define MU_TESTS_COMM_TESTING_H

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

enum { NODES_MAX = 8, PATIENCE_US = 120 * 1000000 };

/* ---- several ranks in one process: all calls are non-blocking, so one thread can drive them all ---- */

struct node {
    struct mu_comm *comm;
    struct mu_comm_group *group;
    struct mu_id incarnation;
    uint32_t rank;
    bool encrypted;
};

enum transport { OVER_UNIX, OVER_TCP, OVER_TLS, OVER_TCP6 };

static const uint8_t secret[MU_COMM_SECRET_SIZE] = "the secret of this generation..";

static inline uint64_t soon(void)
{
    return mu_clock_mono_us() + PATIENCE_US;
}

static inline struct mu_comm *comm_new(const struct mu_comm_config *config)
{
    struct mu_comm *comm = NULL;
    struct mu_error err = {0};
    if (mu_comm_new(config, &comm, &err) != MU_OK)
        fail_msg("mu_comm_new: %s", err.text);
    return comm;
}

static inline void nodes_new(struct node *nodes, uint32_t world, enum transport transport, struct mu_comm_limits limits)
{
    for (uint32_t i = 0; i < world; i++) {
        char host_id[16];
        snprintf(host_id, sizeof host_id, "host-%u", transport == OVER_UNIX ? 0 : i);
        nodes[i] = (struct node){.rank = i, .incarnation = mu_id_random(), .encrypted = transport == OVER_TLS};
        nodes[i].comm = comm_new(&(struct mu_comm_config){
            .host_id = host_id, .data_addr = transport == OVER_TCP6 ? "[::1]:0" : NULL, .limits = limits});
    }
}

static inline enum mu_status node_open(struct node *nodes, uint32_t world, uint32_t rank, uint64_t generation,
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
                                          .peer_count = count,
                                          .encrypted = nodes[rank].encrypted};
    memcpy(config.secret, secret, sizeof secret);
    return mu_comm_open(nodes[rank].comm, &config, deadline_us, &nodes[rank].group, err);
}

static inline void nodes_open(struct node *nodes, uint32_t world, uint64_t generation)
{
    for (uint32_t i = 0; i < world; i++)
        assert_int_equal(node_open(nodes, world, i, generation, soon(), NULL), MU_OK);
}

static inline void nodes_free(struct node *nodes, uint32_t world)
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

static inline bool all_ready(const struct node *nodes, uint32_t world)
{
    for (uint32_t i = 0; i < world; i++) {
        if (!mu_comm_group_ready(nodes[i].group))
            return false;
    }
    return true;
}

static inline void nodes_connect(struct node *nodes, uint32_t world, enum transport transport)
{
    nodes_new(nodes, world, transport, (struct mu_comm_limits){0});
    nodes_open(nodes, world, 1);
    DRIVE_UNTIL(nodes, world, all_ready(nodes, world));
}

static inline struct mu_comm_failure first_failure(const struct node *node)
{
    struct mu_comm_failure failure = {0};
    mu_comm_group_failures(node->group, &failure, 1);
    return failure;
}

static inline bool failed(const struct node *node)
{
    return mu_comm_group_failures(node->group, NULL, 0) > 0;
}

static inline void expect_failure(struct node *node, uint32_t rank, enum mu_comm_failure_kind kind, const char *needle)
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

static inline void fill(uint8_t *data, size_t size, uint64_t seed)
{
    size_t i = 0;
    for (; i + 8 <= size; i += 8) {
        uint64_t word = mu_splitmix64(&seed);
        memcpy(data + i, &word, 8);
    }
    for (uint64_t word = mu_splitmix64(&seed); i < size; i++, word >>= 8)
        data[i] = (uint8_t)word;
}

static inline bool filled(const uint8_t *data, size_t size, uint64_t seed)
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

/* ---- raw sockets that speak the wire format ---- */

static inline int raw_connect(const struct node *node)
{
    struct literal_address address;
    assert_int_equal(mu_comm_address_parse(mu_comm_address(node->comm), &address, NULL), MU_OK);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&address.local, address.local_size), 0);
    return fd;
}

static inline struct wire_prefix raw_prefix(enum wire_kind kind)
{
    return (struct wire_prefix){.magic = WIRE_MAGIC, .version = WIRE_VERSION, .kind = (uint8_t)kind};
}

static inline struct wire_hello raw_hello(const struct node *nodes, uint32_t from, uint32_t to, uint32_t world,
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

static inline void raw_write(int fd, const void *data, size_t size)
{
    assert_int_equal(send(fd, data, size, MSG_NOSIGNAL), size);
}

/* Reads `size` bytes while `node` is driven; returns fewer at end-of-file. */
static inline size_t raw_read(struct node *node, int fd, void *into, size_t size)
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
static inline int raw_dial(struct node *nodes, uint32_t from, uint32_t to, uint32_t world, uint64_t generation)
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

#endif
