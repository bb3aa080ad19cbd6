/* links: mu_supervisor */
/* Datagrams: to the service manager, and from a worker to its supervisor. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/notify.h"
#include "worker/notes.h"

/* The manager's socket: `name` as in $NOTIFY_SOCKET. */
static int listen_as(const char *name)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    size_t length = strlen(name);
    assert_true(fd >= 0 && length < sizeof address.sun_path);
    memcpy(address.sun_path, name, length);
    if (name[0] == '@')
        address.sun_path[0] = 0;
    assert_int_equal(
        bind(fd, (struct sockaddr *)&address, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length)), 0);
    setenv("NOTIFY_SOCKET", name, 1);
    return fd;
}

static void expect(int fd, const char *wanted)
{
    char text[256];
    ssize_t length = recv(fd, text, sizeof text - 1, 0);
    if (length < 0) {
        assert_null(wanted);
        return;
    }
    text[length] = 0;
    assert_non_null(wanted);
    assert_string_equal(text, wanted);
}

static void speaks(const char *name)
{
    int fd = listen_as(name);
    unsetenv("WATCHDOG_USEC");
    mu_notify_init();
    assert_null(getenv("NOTIFY_SOCKET")); /* children are not the service */
    mu_notify("READY=1\nSTATUS=%d of %d", 3, 4);
    expect(fd, "READY=1\nSTATUS=3 of 4");
    assert_true(mu_notify_alive(1000) == UINT64_MAX); /* no watchdog */
    expect(fd, NULL);
    close(fd);
    mu_notify("nobody listens any more");
}

static void test_manager_hears_over_a_path_and_an_abstract_name(void **state)
{
    (void)state;
    char name[64];
    snprintf(name, sizeof name, "@muster-test-%d", (int)getpid());
    speaks(name);
    snprintf(name, sizeof name, "/tmp/muster-test-%d", (int)getpid());
    speaks(name);
    unlink(name);
}

static void test_watchdog_is_fed_twice_in_each_period(void **state)
{
    (void)state;
    char name[64], pid[16];
    snprintf(name, sizeof name, "@muster-test-%d-dog", (int)getpid());
    snprintf(pid, sizeof pid, "%d", (int)getpid());
    int fd = listen_as(name);
    setenv("WATCHDOG_USEC", "2000000", 1);
    setenv("WATCHDOG_PID", pid, 1);
    mu_notify_init();
    assert_int_equal(mu_notify_alive(5000000), 6000000);
    expect(fd, "WATCHDOG=1");
    assert_int_equal(mu_notify_alive(5999999), 6000000);
    expect(fd, NULL);
    assert_int_equal(mu_notify_alive(6000000), 7000000);
    expect(fd, "WATCHDOG=1");
    setenv("NOTIFY_SOCKET", name, 1);
    setenv("WATCHDOG_USEC", "2000000", 1);
    setenv("WATCHDOG_PID", "1", 1); /* another process's */
    mu_notify_init();
    assert_true(mu_notify_alive(9000000) == UINT64_MAX);
    close(fd);
}

static void test_without_a_manager_nothing_is_said(void **state)
{
    (void)state;
    static const char *const names[] = {"", "relative", "/", "@"};
    unsetenv("NOTIFY_SOCKET");
    setenv("WATCHDOG_USEC", "1000", 1);
    mu_notify_init();
    assert_true(mu_notify_alive(1) == UINT64_MAX);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        setenv("NOTIFY_SOCKET", names[i], 1);
        mu_notify_init();
        assert_true(mu_notify_alive(1) == UINT64_MAX);
        mu_notify("READY=1");
    }
}

static void test_notes_keep_their_borders_and_order(void **state)
{
    (void)state;
    int fds[2];
    char number[16], long_text[2 * MU_TEXT_SIZE];
    struct mu_note note;
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds), 0);
    snprintf(number, sizeof number, "%d", fds[1]);
    setenv(MU_NOTES_VARIABLE, number, 1);
    assert_int_equal(mu_notes_open(), fds[1]);
    assert_null(getenv(MU_NOTES_VARIABLE));
    assert_false(mu_notes_take(fds[0], &note));
    memset(long_text, 'x', sizeof long_text - 1);
    long_text[sizeof long_text - 1] = 0;
    mu_notes_send(fds[1], MU_NOTE_INCARNATION, (struct mu_id){.high = 1, .low = 2}, "");
    mu_notes_send(fds[1], MU_NOTE_TROUBLE, (struct mu_id){.high = 1, .low = 2}, long_text);
    mu_notes_send(fds[1], MU_NOTE_ATTACHED, (struct mu_id){0}, NULL);
    mu_notes_send(-1, MU_NOTE_ATTACHED, (struct mu_id){0}, NULL);
    assert_true(mu_notes_take(fds[0], &note));
    assert_true(note.kind == MU_NOTE_INCARNATION && mu_id_equal(note.incarnation, (struct mu_id){.high = 1, .low = 2}));
    assert_true(mu_notes_take(fds[0], &note));
    assert_true(note.kind == MU_NOTE_TROUBLE && strlen(note.text) == MU_TEXT_SIZE - 1);
    assert_true(mu_notes_take(fds[0], &note) && note.kind == MU_NOTE_ATTACHED && note.text[0] == 0);
    assert_false(mu_notes_take(fds[0], &note));
    for (int i = 0; i < 100000; i++) /* a supervisor that does not read holds nobody up */
        mu_notes_send(fds[1], MU_NOTE_TROUBLE, (struct mu_id){0}, "full");
    close(fds[0]);
    mu_notes_send(fds[1], MU_NOTE_TROUBLE, (struct mu_id){0}, "gone"); /* no SIGPIPE */
    close(fds[1]);
}

static void test_a_number_that_is_no_socket_is_no_supervisor(void **state)
{
    (void)state;
    static const char *const values[] = {"", "x", "12x", "99999", "-1", "99999999999999999999"};
    unsetenv(MU_NOTES_VARIABLE);
    assert_int_equal(mu_notes_open(), -1);
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        setenv(MU_NOTES_VARIABLE, values[i], 1);
        assert_int_equal(mu_notes_open(), -1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_manager_hears_over_a_path_and_an_abstract_name),
        cmocka_unit_test(test_watchdog_is_fed_twice_in_each_period),
        cmocka_unit_test(test_without_a_manager_nothing_is_said),
        cmocka_unit_test(test_notes_keep_their_borders_and_order),
        cmocka_unit_test(test_a_number_that_is_no_socket_is_no_supervisor),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
