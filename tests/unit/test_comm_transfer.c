/* links: mu_comm */
#include "comm_testing.h"

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
        all_to_all(OVER_TLS, 4, seed);
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
    POST_RECV(&nodes[1], 0, 0, to, 0, &receives[0]);
    assert_true(mu_comm_done(&receives[0])); /* it was held; its place is taken by the next one */
    uint64_t next = peer->in->head.exchange;
    DRIVE_UNTIL(nodes, 2, peer->in->held_back && peer->in->head.exchange > next);
    for (uint32_t i = COUNT; i-- > 1;)
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

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_to_all_in_random_orders_moves_every_byte),
        cmocka_unit_test(test_large_receives_in_the_other_order_do_not_deadlock),
        cmocka_unit_test(test_small_messages_before_their_receives_are_held_in_bounds),
        cmocka_unit_test(test_a_small_message_overtakes_a_large_one),
        cmocka_unit_test(test_two_large_messages_share_the_connection),
        cmocka_unit_test(test_posts_that_cannot_be_are_refused),
        cmocka_unit_test(test_wait_until_the_deadline_names_what_is_missing),
        cmocka_unit_test(test_fd_becomes_readable_when_a_peer_dials),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
