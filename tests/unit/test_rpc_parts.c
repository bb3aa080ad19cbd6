/* links: mu_rpc */
/* The parts of rpc/ that need no network: codes and texts, addresses, send queue, inbox. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include <pthread.h>

#include "common/clock.h"
#include "rpc/address.h"
#include "rpc/code.h"
#include "rpc/inbox.h"
#include "rpc/sendq.h"

static void test_code_of_every_status_comes_back_as_a_failure(void **state)
{
    (void)state;
    assert_int_equal(mu_rpc_code_of_status(MU_OK), MU_RPC_OK);
    for (int status = MU_OK + 1; status < MU_STATUS_COUNT; status++) {
        enum mu_rpc_code code = mu_rpc_code_of_status((enum mu_status)status);
        assert_int_not_equal(code, MU_RPC_OK);
        assert_int_not_equal(mu_rpc_status_of_code(code), MU_OK);
    }
    static const enum mu_status same[] = {MU_ERR_INVALID, MU_ERR_NOT_FOUND,   MU_ERR_EXISTS,  MU_ERR_LIMIT,
                                          MU_ERR_STALE,   MU_ERR_UNAVAILABLE, MU_ERR_TIMEOUT, MU_ERR_CANCELLED,
                                          MU_ERR_DENIED,  MU_ERR_CONFLICT,    MU_ERR_CORRUPT, MU_ERR_INTERNAL};
    for (size_t i = 0; i < sizeof same / sizeof same[0]; i++)
        assert_int_equal(mu_rpc_status_of_code(mu_rpc_code_of_status(same[i])), same[i]);
    assert_int_equal(mu_rpc_status_of_code((enum mu_rpc_code)99), MU_ERR_INTERNAL);
    assert_string_equal(mu_rpc_code_name(MU_RPC_DATA_LOSS), "DATA_LOSS");
    assert_string_equal(mu_rpc_code_name((enum mu_rpc_code) - 1), "UNKNOWN");
}

static void test_fail_names_the_peer_and_the_last_cause(void **state)
{
    (void)state;
    struct mu_error err;
    assert_int_equal(
        mu_rpc_fail(
            &err, MU_RPC_UNAVAILABLE,
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote "
            "host: Connection refused",
            "127.0.0.1:1", "/a/B"),
        MU_ERR_UNAVAILABLE);
    assert_string_equal(
        err.text, "cannot connect to 127.0.0.1:1: Connection refused; check the address and that musterd runs there");
    assert_int_equal(mu_rpc_fail(&err, MU_RPC_UNAVAILABLE,
                                 "failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:1: Peer name "
                                 "1.2.3.4 is not in peer certificate",
                                 "1.2.3.4:1", "/a/B"),
                     MU_ERR_UNAVAILABLE);
    assert_non_null(strstr(err.text, "issue one with --hosts"));
    assert_int_equal(mu_rpc_fail(&err, MU_RPC_UNAVAILABLE, "Socket closed", "h:1", "/a/B"), MU_ERR_UNAVAILABLE);
    assert_string_equal(err.text, "connection to h:1 lost: Socket closed");
    assert_int_equal(mu_rpc_fail(&err, MU_RPC_NOT_FOUND, "no job 'x'", "h:1", "/a/B"), MU_ERR_NOT_FOUND);
    assert_string_equal(err.text, "no job 'x'");
    assert_int_equal(mu_rpc_fail(&err, MU_RPC_UNIMPLEMENTED, "", "h:1", "/a/B"), MU_ERR_INVALID);
    assert_non_null(strstr(err.text, "h:1 does not know /a/B"));
    assert_int_equal(mu_rpc_fail(&err, MU_RPC_INTERNAL, "", "h:1", "/a/B"), MU_ERR_INTERNAL);
    assert_non_null(strstr(err.text, "INTERNAL"));
}

static void check_address(const char *text, const char *dialled)
{
    struct mu_rpc_address address;
    char out[MU_RPC_TARGET_SIZE];
    assert_int_equal(mu_rpc_address_parse(text, NULL, &address), MU_OK);
    mu_rpc_address_format(&address, out);
    assert_string_equal(out, text);
    mu_rpc_address_dial_target(&address, out);
    assert_string_equal(out, dialled);
}

static void test_address_good_is_parsed_and_formatted(void **state)
{
    (void)state;
    check_address("127.0.0.1:7070", "ipv4:127.0.0.1:7070");
    check_address("[::1]:0", "ipv6:[::1]:0");
    check_address("node-7.cluster:65535", "dns:///node-7.cluster:65535");
    check_address("unix:/run/m.sock", "unix:/run/m.sock");
}

static void test_address_bad_is_refused_with_its_text(void **state)
{
    (void)state;
    static const char *const bad[] = {"",         "host",     "host:",     "host:65536", "host:7x",
                                      ":7070",    "::1:7070", "[::1:7070", "[zz]:7070",  "a b:7070",
                                      "a/b:7070", "unix:",    "h:-1",      "h:+1",       "[127.0.0.1]:1"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct mu_rpc_address address;
        struct mu_error err = {0};
        assert_int_equal(mu_rpc_address_parse(bad[i], &err, &address), MU_ERR_INVALID);
        assert_non_null(strstr(err.text, bad[i]));
    }
    char too_long[400] = "unix:/";
    memset(too_long + 6, 'a', 300);
    struct mu_rpc_address address;
    assert_int_equal(mu_rpc_address_parse(too_long, NULL, &address), MU_ERR_INVALID);
    memcpy(too_long, "aaaaaa", 6);
    memcpy(too_long + 306, ":1", 3);
    assert_int_equal(mu_rpc_address_parse(too_long, NULL, &address), MU_ERR_INVALID);
}

static void test_peer_text_of_the_core_becomes_readable(void **state)
{
    (void)state;
    char out[64];
    mu_rpc_address_peer("ipv4:10.0.0.7:51324", out, sizeof out);
    assert_string_equal(out, "10.0.0.7:51324");
    mu_rpc_address_peer("ipv6:%5B::1%5D:9", out, sizeof out);
    assert_string_equal(out, "[::1]:9");
    mu_rpc_address_peer("unix:", out, sizeof out);
    assert_string_equal(out, "unix:");
    mu_rpc_address_peer("ipv4:10.0.0.7:51324", out, 5);
    assert_string_equal(out, "10.0");
}

static void test_sendq_over_its_count_refuses_then_tells_once_when_half_empty(void **state)
{
    (void)state;
    struct mu_rpc_sendq queue;
    mu_rpc_sendq_init(&queue, 4, 1000);
    struct mu_rpc_bytes *message = mu_rpc_bytes_copy("0123456789", 10);
    for (int i = 0; i < 4; i++)
        assert_int_equal(mu_rpc_sendq_push(&queue, message), MU_OK);
    assert_int_equal(mu_rpc_sendq_push(&queue, message), MU_ERR_LIMIT);
    assert_int_equal(queue.count, 4);
    assert_int_equal(queue.size_bytes, 40);
    bool told[4];
    for (int i = 0; i < 4; i++) {
        struct mu_rpc_bytes *taken = mu_rpc_sendq_take(&queue);
        assert_ptr_equal(taken, message);
        assert_null(mu_rpc_sendq_take(&queue)); /* never two on the wire */
        told[i] = mu_rpc_sendq_done(&queue);
        mu_rpc_bytes_unref(taken);
    }
    assert_false(told[0]);
    assert_true(told[1]);
    assert_false(told[2]);
    assert_false(told[3]);
    assert_int_equal(queue.size_bytes, 0);
    mu_rpc_bytes_unref(message);
}

static void test_sendq_over_its_bytes_refuses_but_lets_one_big_message_in(void **state)
{
    (void)state;
    struct mu_rpc_sendq queue;
    mu_rpc_sendq_init(&queue, 100, 100);
    void *data;
    struct mu_rpc_bytes *big = mu_rpc_bytes_new(500, &data), *small = mu_rpc_bytes_copy("x", 1);
    memset(data, 7, 500);
    assert_int_equal(mu_rpc_sendq_push(&queue, big), MU_OK);
    assert_int_equal(mu_rpc_sendq_push(&queue, small), MU_ERR_LIMIT);
    struct mu_rpc_bytes *taken = mu_rpc_sendq_take(&queue);
    assert_int_equal(mu_rpc_sendq_push(&queue, small), MU_ERR_LIMIT); /* what is on the wire counts */
    mu_rpc_sendq_clear(&queue);
    assert_int_equal(queue.size_bytes, 500);
    assert_false(mu_rpc_sendq_done(&queue)); /* cleared: nobody waits for room */
    mu_rpc_bytes_unref(taken);
    assert_int_equal(mu_rpc_sendq_push(&queue, small), MU_OK);
    mu_rpc_sendq_clear(&queue);
    assert_int_equal(queue.count, 0);
    mu_rpc_bytes_unref(big);
    mu_rpc_bytes_unref(small);
}

enum { POSTERS = 4, ITEMS = 20000 };

struct numbered {
    struct mu_rpc_item item; /* first */
    int poster, number;
};

struct poster {
    struct mu_rpc_inbox *inbox;
    struct numbered *items;
};

static void *post_all(void *arg)
{
    struct poster *poster = arg;
    for (int i = 0; i < ITEMS; i++) {
        mu_rpc_inbox_post(poster->inbox, &poster->items[i].item);
        if (i % 16 == 0)
            mu_rpc_inbox_wake(poster->inbox);
    }
    return NULL;
}

/* The consumer sleeps for ever each time: one lost wake-up hangs the test. */
static void test_inbox_from_many_threads_loses_nothing_and_keeps_order(void **state)
{
    (void)state;
    static struct numbered items[POSTERS][ITEMS];
    struct mu_rpc_inbox inbox;
    struct mu_rpc_batch batch = {0};
    struct poster posters[POSTERS];
    pthread_t threads[POSTERS];
    int next[POSTERS] = {0}, total = 0;
    mu_rpc_inbox_init(&inbox);
    mu_rpc_list_init(&batch.done);
    mu_rpc_list_init(&batch.posted);
    for (int p = 0; p < POSTERS; p++) {
        for (int i = 0; i < ITEMS; i++)
            items[p][i] = (struct numbered){.poster = p, .number = i};
        posters[p] = (struct poster){&inbox, items[p]};
        assert_int_equal(pthread_create(&threads[p], NULL, post_all, &posters[p]), 0);
    }
    bool woken = false;
    while (total < POSTERS * ITEMS) {
        assert_true(mu_rpc_inbox_take(&inbox, UINT64_MAX, &batch));
        woken = woken || batch.wake;
        batch.wake = false;
        for (struct mu_rpc_item *item; (item = mu_rpc_list_pop(&batch.posted)) != NULL; total++) {
            struct numbered *numbered = (struct numbered *)item;
            assert_int_equal(numbered->number, next[numbered->poster]++);
        }
    }
    assert_true(woken);
    for (int p = 0; p < POSTERS; p++)
        pthread_join(threads[p], NULL);
    (void)mu_rpc_inbox_take(&inbox, 0, &batch); /* a last wake may be left */
    assert_false(mu_rpc_inbox_take(&inbox, 0, &batch));
    uint64_t before_us = mu_clock_mono_us();
    assert_false(mu_rpc_inbox_take(&inbox, before_us + 20000, &batch));
    assert_true(mu_clock_mono_us() >= before_us + 20000);
    mu_rpc_inbox_fini(&inbox);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_code_of_every_status_comes_back_as_a_failure),
        cmocka_unit_test(test_fail_names_the_peer_and_the_last_cause),
        cmocka_unit_test(test_address_good_is_parsed_and_formatted),
        cmocka_unit_test(test_address_bad_is_refused_with_its_text),
        cmocka_unit_test(test_peer_text_of_the_core_becomes_readable),
        cmocka_unit_test(test_sendq_over_its_count_refuses_then_tells_once_when_half_empty),
        cmocka_unit_test(test_sendq_over_its_bytes_refuses_but_lets_one_big_message_in),
        cmocka_unit_test(test_inbox_from_many_threads_loses_nothing_and_keeps_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
