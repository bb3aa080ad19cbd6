/* links: mu_comm */
#include "comm_testing.h"

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

/* The last bytes are still in the kernel and the socket is full: the peer gets them, then the goodbye, and no false
 * alarm. */
static void test_goodbye_waits_for_room_in_a_full_socket(void **state)
{
    (void)state;
    enum { COUNT = 6000, SIZE = 4000 };
    struct node nodes[2];
    nodes_connect(nodes, 2, OVER_UNIX);
    uint8_t *data = calloc(1, SIZE), *to = malloc(SIZE);
    struct mu_comm_request *sends = calloc(COUNT, sizeof *sends), receive;
    const struct outbox *out = mu_comm_find_peer(nodes[0].group, 1)->out;
    uint32_t posted = 0, taken = 0;
    for (;;) { /* small ones need nothing of the receiver, so they fill the socket; stop where a frame would begin */
        assert_true(posted < COUNT);
        POST_SEND(&nodes[0], 1, posted, data, SIZE, &sends[posted]);
        mu_comm_progress(nodes[0].comm);
        posted++;
        bool begun = out->iov_next > 0 || out->iov[0].iov_len < sizeof(struct wire_frame);
        if (!mu_comm_done(&sends[posted - 1]) && !begun)
            break;
        while (!mu_comm_done(&sends[posted - 1])) { /* inside one: let it through and try again */
            POST_RECV(&nodes[1], 0, taken, to, SIZE, &receive);
            DRIVE_UNTIL(&nodes[1], 1, mu_comm_done(&receive));
            taken++;
            mu_comm_progress(nodes[0].comm);
        }
    }
    mu_comm_group_close(nodes[0].group);
    assert_non_null(nodes[0].comm->leaving);
    for (; taken < posted - 1; taken++) { /* all but the last one, which was given up */
        POST_RECV(&nodes[1], 0, taken, to, SIZE, &receive);
        DRIVE_UNTIL(nodes, 2, mu_comm_done(&receive));
    }
    DRIVE_UNTIL(nodes, 2, mu_comm_find_peer(nodes[1].group, 0)->state != PEER_UP);
    assert_int_equal(mu_comm_find_peer(nodes[1].group, 0)->state, PEER_LEFT);
    assert_int_equal(mu_comm_group_progress(nodes[1].group, NULL), MU_OK);
    assert_null(nodes[0].comm->leaving);
    nodes_free(nodes, 2);
    free(sends);
    free(data);
    free(to);
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
    struct wire_frame frames[9];
    uint8_t buffer[10000];
    struct mu_comm_request receive;
    for (size_t i = 0; i < 9; i++)
        frames[i] = good;
    frames[0].prefix.magic ^= 1;
    frames[1].generation = 2;
    frames[2].length = 7;
    frames[3].total = MU_COMM_PIECE_SIZE * 2, frames[3].length = MU_COMM_PIECE_SIZE + 1;
    frames[4].total = 10000, frames[4].offset = UINT64_MAX, frames[4].length = 2;
    frames[5].prefix.kind = WIRE_HELLO;
    frames[6].total = frames[6].length = 10000; /* nobody asked for it */
    frames[7].prefix.kind = WIRE_GRANT, frames[7].length = 0;
    frames[8].total = sizeof buffer, frames[8].offset = 100, frames[8].length = 200; /* asked for, but not this piece */
    for (size_t i = 0; i < 9; i++) {
        struct node nodes[2];
        nodes_new(nodes, 2, OVER_UNIX, (struct mu_comm_limits){0});
        assert_int_equal(node_open(nodes, 2, 0, 1, MU_COMM_FOREVER, NULL), MU_OK);
        int fd = raw_dial(nodes, 1, 0, 2, 1);
        if (i == 8)
            POST_RECV(&nodes[0], 1, 1, buffer, sizeof buffer, &receive);
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
    group.encrypted = transport == OVER_TLS;
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
    config.encrypted = transport == OVER_TLS;
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
    print_message("           SIGKILL seen after %llu us\n", (unsigned long long)(mu_clock_mono_us() - begin_us));
    struct mu_comm_failure failure = first_failure(&node);
    assert_int_equal(failure.peer_rank, 1);
    assert_true(failure.kind == MU_COMM_FAIL_EOF || failure.kind == MU_COMM_FAIL_RESET);
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
    killed_peer(OVER_TLS, true);
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
}

static void test_abort_in_the_middle_leaves_buffers_untouched(void **state)
{
    (void)state;
    enum { SIZE = 32 * 1024 * 1024 };
    for (int transport = OVER_UNIX; transport <= OVER_TLS; transport++) {
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

/* ---- one generation after the other, each aborted somewhere ---- */

enum { GENERATIONS = 40, CHURN_WORLD = 4, CHURN_SIZE = 600000 };

struct churn {
    struct node nodes[CHURN_WORLD]; /* each thread has its own copy; the comms are shared with the aborting thread */
    uint32_t rank;
    uint32_t finished; /* generations that it got through */
    bool ok;
    char why[160];
};

static enum mu_status churn_generation(struct churn *churn, uint64_t generation, uint8_t *from, uint8_t *to,
                                       struct mu_error *err)
{
    struct node *self = &churn->nodes[churn->rank];
    struct mu_comm_request requests[2 * CHURN_WORLD];
    size_t count = 0;
    self->group = NULL;
    enum mu_status status = node_open(churn->nodes, CHURN_WORLD, churn->rank, generation, soon(), err);
    fill(from, CHURN_SIZE, generation * CHURN_WORLD + churn->rank);
    for (uint32_t peer = 0; peer < CHURN_WORLD && status == MU_OK; peer++) {
        if (peer == churn->rank)
            continue;
        status = mu_comm_recv(self->group, peer, 1, to + peer * CHURN_SIZE, CHURN_SIZE, &requests[count++], err);
        if (status == MU_OK)
            status = mu_comm_send(self->group, peer, 1, from, CHURN_SIZE, &requests[count++], err);
    }
    if (status == MU_OK)
        status = mu_comm_wait_all(self->group, soon(), err);
    for (uint32_t peer = 0; peer < CHURN_WORLD && status == MU_OK; peer++) {
        if (peer != churn->rank && !filled(to + peer * CHURN_SIZE, CHURN_SIZE, generation * CHURN_WORLD + peer))
            status = mu_fail(err, MU_ERR_CORRUPT, "wrong bytes from rank %u in generation %llu", peer,
                             (unsigned long long)generation);
    }
    mu_comm_group_close(self->group);
    return status;
}

static void *churn_rank(void *argument)
{
    struct churn *churn = argument;
    uint8_t *from = malloc(CHURN_SIZE), *to = malloc((size_t)CHURN_SIZE * CHURN_WORLD);
    struct mu_error err = {0};
    enum mu_status status = MU_OK;
    for (uint64_t generation = 1; generation <= GENERATIONS; generation++) {
        status = churn_generation(churn, generation, from, to, &err);
        churn->finished += status == MU_OK;
        if (status != MU_OK && status != MU_ERR_CANCELLED && status != MU_ERR_UNAVAILABLE)
            break;
    }
    churn->ok = status == MU_OK; /* nobody aborts the last one */
    snprintf(churn->why, sizeof churn->why, "%.159s", err.text);
    /* Stay and answer until goodbyes are out. */
    for (uint64_t end_us = soon(); churn->nodes[churn->rank].comm->leaving && mu_clock_mono_us() < end_us;)
        mu_comm_progress(churn->nodes[churn->rank].comm);
    free(from);
    free(to);
    return NULL;
}

static void test_generations_aborted_anywhere_do_not_disturb_the_next(void **state)
{
    (void)state;
    struct churn churns[CHURN_WORLD];
    pthread_t threads[CHURN_WORLD];
    uint64_t random = 2024;
    struct node nodes[CHURN_WORLD];
    nodes_new(nodes, CHURN_WORLD, OVER_UNIX, (struct mu_comm_limits){0});
    for (uint32_t i = 0; i < CHURN_WORLD; i++) {
        churns[i] = (struct churn){.rank = i};
        memcpy(churns[i].nodes, nodes, sizeof nodes);
    }
    for (uint32_t i = 0; i < CHURN_WORLD; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, churn_rank, &churns[i]), 0);
    for (uint64_t generation = 1; generation < GENERATIONS; generation++) {
        uint64_t until_us = mu_clock_mono_us() + mu_splitmix64(&random) % 4000; /* anywhere in it, or before or after */
        while (mu_clock_mono_us() < until_us)
            ;
        for (uint32_t i = 0; i < CHURN_WORLD; i++)
            mu_comm_abort(nodes[i].comm, generation);
    }
    uint32_t finished = 0;
    for (uint32_t i = 0; i < CHURN_WORLD; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    for (uint32_t i = 0; i < CHURN_WORLD; i++) {
        if (!churns[i].ok)
            fail_msg("rank %u: %s", i, churns[i].why);
        finished += churns[i].finished;
    }
    print_message("           %u of %d passages were not aborted\n", finished, (int)CHURN_WORLD * GENERATIONS);
    nodes_free(nodes, CHURN_WORLD);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {
        /* First: it forks, and no thread has been started yet. */
        cmocka_unit_test(test_a_killed_peer_is_seen_at_once_with_its_rank),
        cmocka_unit_test(test_sizes_that_differ_fail_with_both_numbers),
        cmocka_unit_test(test_goodbye_fails_a_peer_only_if_something_is_wanted),
        cmocka_unit_test(test_goodbye_waits_for_room_in_a_full_socket),
        cmocka_unit_test(test_a_failed_group_still_tells_deaths_from_goodbyes),
        cmocka_unit_test(test_frames_that_do_not_fit_fail_as_protocol),
        cmocka_unit_test(test_end_of_file_inside_a_frame_or_half_closed_is_eof),
        cmocka_unit_test(test_abort_from_another_thread_ends_a_wait_at_once),
        cmocka_unit_test(test_generations_aborted_anywhere_do_not_disturb_the_next),
        cmocka_unit_test(test_abort_in_the_middle_leaves_buffers_untouched),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
