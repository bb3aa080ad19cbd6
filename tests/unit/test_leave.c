/* links: mu_supervisor */
#include "worker/leave.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

/* A process that begins in this way, is sent this signal when it is ready (0: none), and never ends by itself: how it
 * ended. */
static int end_of(void (*begin)(void), int signal_number)
{
    int ready[2], status = -1;
    char byte = 0;
    assert_int_equal(pipe(ready), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        begin();
        if (write(ready[1], &byte, 1) != 1)
            _exit(99);
        for (;;)
            pause();
    }
    assert_int_equal(read(ready[0], &byte, 1), 1);
    if (signal_number)
        assert_int_equal(kill(pid, signal_number), 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    close(ready[0]);
    close(ready[1]);
    return WEXITSTATUS(status);
}

static void hang_in_the_end(void)
{
    mu_leave_early();
    mu_leave_within(1, 7);
}

static void test_leave_early_ends_with_code_0(void **state)
{
    (void)state;
    assert_int_equal(end_of(mu_leave_early, SIGTERM), 0);
    assert_int_equal(end_of(mu_leave_early, SIGINT), 0);
}

static void test_leave_within_ends_what_hangs_with_its_code(void **state)
{
    (void)state;
    assert_int_equal(end_of(hang_in_the_end, 0), 7);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_leave_early_ends_with_code_0),
        cmocka_unit_test(test_leave_within_ends_what_hangs_with_its_code),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
