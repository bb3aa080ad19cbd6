/* links: mu_stacks */
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/clock.h"
#include "common/thread.h"
#include "worker/stacks.h"

enum { MANY = 200 };

static char lines[MU_STACKS_THREADS_MAX][MU_STACKS_LINE_SIZE];
static sem_t begun;
static atomic_bool over;
static int held[2]; /* a pipe that nobody writes into: who waits for it waits until it is closed */

static void begin(const char *name)
{
    prctl(PR_SET_NAME, name);
    sem_post(&begun);
}

/* A signal ends this wait, as it does gRPC's; the thread sanitizer would hold back one that comes during a read. */
static void *wait_on(void *name)
{
    struct epoll_event event = {.events = EPOLLIN};
    int set = epoll_create1(EPOLL_CLOEXEC);
    begin(name);
    (void)epoll_ctl(set, EPOLL_CTL_ADD, held[0], &event);
    while (epoll_wait(set, &event, 1, -1) < 0 && errno == EINTR) {
    }
    close(set);
    return NULL;
}

static void *compute_on(void *name)
{
    begin(name);
    while (!atomic_load(&over)) {
    }
    return NULL;
}

static void *wait_deafly(void *name)
{
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, NULL);
    return wait_on(name);
}

static pthread_t start(void *(*main)(void *), const char *name)
{
    pthread_t thread;
    assert_int_equal(mu_thread_start(&thread, main, (void *)(uintptr_t)name), 0);
    sem_wait(&begun);
    return thread;
}

static void end(pthread_t *threads, size_t count)
{
    atomic_store(&over, true);
    close(held[1]);
    for (size_t i = 0; i < count; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    close(held[0]);
}

static int set_up(void **state)
{
    (void)state;
    atomic_store(&over, false);
    assert_int_equal(sem_init(&begun, 0, 0), 0);
    return pipe(held);
}

static const char *find(size_t count, const char *name)
{
    char what[32];
    snprintf(what, sizeof what, " %.15s: ", name);
    for (size_t i = 0; i < count; i++)
        if (strstr(lines[i], what))
            return lines[i];
    return NULL;
}

/* One may be between its name and its read: until it waits there. */
static const char *find_doing(const char *name, const char *what, size_t *ret_count)
{
    for (int i = 0; i < 1000; i++) {
        const char *line = find(*ret_count = mu_stacks_describe(lines, MU_STACKS_THREADS_MAX), name);
        assert_non_null(line);
        if (strstr(line, what))
            return line;
    }
    print_message("%s\n", find(*ret_count, name));
    fail();
    return NULL;
}

static void test_threads_that_wait_and_compute_say_where_they_are(void **state)
{
    (void)state;
    pthread_t threads[2] = {start(wait_on, "waiter"), start(compute_on, "computer")};
    size_t count;
    const char *line = find_doing("waiter", "epoll_wait", &count);
    assert_non_null(strstr(line, " < ")); /* epoll_wait < wait_on < start_thread */
    assert_null(strstr(line, "no stack"));
    line = find(count, "computer");
    assert_non_null(line);
    assert_non_null(strstr(line, " < "));
    line = find(count, "test_stacks"); /* who asks is among them */
    assert_non_null(line);
    assert_non_null(strstr(line, " < "));
    assert_true(count >= 3); /* a sanitizer may have threads of its own */
    end(threads, 2);
}

static void test_a_thread_that_blocks_the_signal_is_told_as_such_and_not_waited_for(void **state)
{
    (void)state;
    pthread_t threads[2] = {start(wait_deafly, "deaf"), start(wait_on, "waiter")};
    size_t count;
    char wanted[32];
    snprintf(wanted, sizeof wanted, "system call %d, ", SYS_epoll_wait);
    const char *line = find_doing("deaf", ": S", &count);
    assert_non_null(strstr(line, "; no stack: it blocks the signal"));
    assert_non_null(strstr(line, wanted));
    assert_non_null(strstr(line, " ms of processor time"));
    (void)find_doing("waiter", " < ", &count);
    end(threads, 2);
}

static void test_many_threads_are_all_there_and_their_slots_are_used_again(void **state)
{
    (void)state;
    static pthread_t threads[MANY];
    static char names[MANY][16];
    for (int i = 0; i < MANY; i++) {
        snprintf(names[i], sizeof names[i], "many%d", i);
        threads[i] = start(wait_on, names[i]);
    }
    for (int round = 0; round < 4; round++) { /* more asked in all than there are slots */
        size_t count = mu_stacks_describe(lines, MU_STACKS_THREADS_MAX);
        for (int i = 0; i < MANY; i++) {
            const char *line = find(count, names[i]);
            assert_non_null(line);
            assert_null(strstr(line, "no stack"));
        }
    }
    assert_int_equal(mu_stacks_describe(lines, 7), 7);
    end(threads, MANY);
}

static void *ask_often(void *arg)
{
    (void)arg;
    char(*own)[MU_STACKS_LINE_SIZE] = malloc(MU_STACKS_THREADS_MAX * sizeof *own);
    begin("asker");
    for (int i = 0; i < 50; i++) {
        size_t count = mu_stacks_describe(own, MU_STACKS_THREADS_MAX);
        assert_true(count >= 4); /* main, two that wait, itself */
        for (size_t k = 0; k < count; k++)
            assert_null(strstr(own[k], "too many"));
    }
    free(own);
    return NULL;
}

static void test_several_ask_at_a_time(void **state)
{
    (void)state;
    pthread_t threads[5];
    for (int i = 0; i < 2; i++)
        threads[i] = start(wait_on, "waiter");
    for (int i = 2; i < 5; i++)
        threads[i] = start(ask_often, NULL);
    for (int i = 2; i < 5; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    size_t count;
    (void)find_doing("waiter", " < ", &count);
    end(threads, 2);
}

int main(void)
{
    mu_stacks_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_threads_that_wait_and_compute_say_where_they_are, set_up),
        cmocka_unit_test_setup(test_a_thread_that_blocks_the_signal_is_told_as_such_and_not_waited_for, set_up),
        cmocka_unit_test_setup(test_many_threads_are_all_there_and_their_slots_are_used_again, set_up),
        cmocka_unit_test_setup(test_several_ask_at_a_time, set_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
