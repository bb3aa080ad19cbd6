/* links: mu_coordinator */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <unistd.h>

#include "coordinator/watchdog.h"

enum { LOOK_US = MU_WATCHDOG_LOOK_MS * 1000, ANSWER_US = MU_WATCHDOG_ANSWER_MS * 1000 };

struct listener {
    int fd;
    char address[32];
    uint64_t now_us;
    struct mu_watchdog watchdog;
};

static void open_listener(struct listener *listener)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof at;
    listener->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    assert_true(listener->fd >= 0);
    assert_int_equal(bind(listener->fd, (struct sockaddr *)&at, sizeof at), 0);
    assert_int_equal(listen(listener->fd, 8), 0);
    assert_int_equal(getsockname(listener->fd, (struct sockaddr *)&at, &size), 0);
    snprintf(listener->address, sizeof listener->address, "127.0.0.1:%u", ntohs(at.sin_port));
    listener->now_us = 1000000;
    mu_watchdog_init(&listener->watchdog, listener->address);
    assert_true(listener->watchdog.to_size > 0);
}

static void close_listener(struct listener *listener)
{
    mu_watchdog_fini(&listener->watchdog);
    close(listener->fd);
}

static bool look(struct listener *listener)
{
    listener->now_us += LOOK_US;
    return mu_watchdog_look(&listener->watchdog, listener->now_us);
}

/* One look while the process may not open any file. */
static void look_without_descriptors(struct listener *listener)
{
    struct rlimit before, none;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    none = before;
    none.rlim_cur = 0;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    bool barked = look(listener);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_false(barked);
}

static void test_watchdog_descriptors_left_never_dials(void **state)
{
    struct listener listener;
    (void)state;
    open_listener(&listener);
    for (int i = 0; i < 1000; i++)
        assert_false(look(&listener));
    assert_int_equal(accept(listener.fd, NULL, NULL), -1);
    close_listener(&listener);
}

static void test_watchdog_listener_deaf_is_found(void **state)
{
    struct listener listener;
    (void)state;
    open_listener(&listener);
    look_without_descriptors(&listener);
    uint64_t dialled_us = listener.now_us + LOOK_US;
    while (!look(&listener))
        assert_true(listener.now_us < dialled_us + ANSWER_US);
    assert_int_equal(listener.now_us, dialled_us + ANSWER_US);
    close_listener(&listener);
}

static void test_watchdog_listener_answering_calms_down(void **state)
{
    struct listener listener;
    (void)state;
    open_listener(&listener);
    look_without_descriptors(&listener);
    assert_false(look(&listener)); /* dials */
    int fd = accept(listener.fd, NULL, NULL);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, "x", 1), 1);
    for (int i = 0; i < 1000; i++)
        assert_false(look(&listener));
    close(fd);
    assert_int_equal(accept(listener.fd, NULL, NULL), -1); /* once was enough */
    close_listener(&listener);
}

static void test_watchdog_unix_address_never_barks(void **state)
{
    struct listener listener = {.fd = -1, .now_us = 1};
    (void)state;
    mu_watchdog_init(&listener.watchdog, "unix:/tmp/none");
    look_without_descriptors(&listener);
    for (int i = 0; i < 1000; i++)
        assert_false(look(&listener));
    mu_watchdog_fini(&listener.watchdog);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_watchdog_descriptors_left_never_dials),
        cmocka_unit_test(test_watchdog_listener_deaf_is_found),
        cmocka_unit_test(test_watchdog_listener_answering_calms_down),
        cmocka_unit_test(test_watchdog_unix_address_never_barks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
