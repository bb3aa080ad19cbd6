/* links: mu_kernels */
#include "kernels/pool.h"

#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static const uint32_t sizes[] = {1, 2, 3, 8, 32};
enum { SIZES = sizeof sizes / sizeof sizes[0], TASKS = 1000 };

static struct mu_pool *pool_of(uint32_t threads)
{
    struct mu_pool *pool = NULL;
    assert_int_equal(mu_pool_new(threads, NULL, &pool), MU_OK);
    assert_int_equal(mu_pool_threads(pool), threads);
    return pool;
}

static void count_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    uint8_t *hits = arg;
    hits[task]++; /* one owner: no atomics */
    memset(lane->scratch, (int)task, 64);
}

static void test_every_task_runs_once(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < SIZES; i++) {
        struct mu_pool *pool = pool_of(sizes[i]);
        for (uint32_t round = 0; round < 200; round++) {
            uint32_t count = round * 7 % 61; /* also 0 and 1 */
            uint8_t hits[TASKS] = {0};
            assert_int_equal(mu_pool_run(pool, count, count_task, hits), MU_OK);
            for (uint32_t j = 0; j < TASKS; j++)
                assert_int_equal(hits[j], j < count);
        }
        mu_pool_free(pool);
    }
}

struct meeting {
    atomic_uint arrived;
    uint32_t wanted;
    atomic_uint lanes_seen;
};

/* Ends only when `wanted` threads are inside a task at the same time. */
static void meet_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    (void)task;
    struct meeting *m = arg;
    atomic_fetch_or(&m->lanes_seen, 1u << lane->index);
    atomic_fetch_add(&m->arrived, 1);
    while (atomic_load(&m->arrived) < m->wanted)
        sched_yield();
}

static void test_all_threads_take_part(void **state)
{
    (void)state;
    struct mu_pool *pool = pool_of(8);
    struct meeting m = {.wanted = 8};
    assert_int_equal(mu_pool_run(pool, 8, meet_task, &m), MU_OK);
    assert_int_equal(atomic_load(&m.lanes_seen), 0xff);
    mu_pool_free(pool);
}

struct cancelling {
    atomic_bool cancel;
    atomic_uint executed;
};

static void cancel_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    struct cancelling *c = arg;
    assert_ptr_equal(lane->cancel, &c->cancel);
    atomic_fetch_add(&c->executed, 1);
    if (task == 10)
        atomic_store(&c->cancel, true);
    while (task > 10 && !atomic_load(&c->cancel)) /* no thread runs ahead of task 10 */
        sched_yield();
}

static void test_cancelled_run_skips_the_rest(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < SIZES; i++) {
        struct mu_pool *pool = pool_of(sizes[i]);
        struct cancelling c = {0};
        mu_pool_set_cancel(pool, &c.cancel);
        assert_int_equal(mu_pool_run(pool, TASKS, cancel_task, &c), MU_ERR_CANCELLED);
        assert_true(atomic_load(&c.executed) >= 11);
        assert_true(atomic_load(&c.executed) <= 11 + sizes[i]);
        assert_true(mu_pool_cancelled(pool));
        uint32_t before = atomic_load(&c.executed);
        assert_int_equal(mu_pool_run(pool, 5, cancel_task, &c), MU_ERR_CANCELLED);
        assert_int_equal(mu_pool_run(pool, 0, cancel_task, &c), MU_ERR_CANCELLED);
        assert_int_equal(atomic_load(&c.executed), before);
        atomic_store(&c.cancel, false);
        assert_int_equal(mu_pool_run(pool, 5, cancel_task, &c), MU_OK);
        assert_int_equal(atomic_load(&c.executed), before + 5);
        mu_pool_free(pool);
    }
}

static void count_poll(void *ctx)
{
    (*(uint32_t *)ctx)++;
}

static void test_poll_hook_runs_on_the_caller_between_tasks(void **state)
{
    (void)state;
    struct mu_pool *pool = pool_of(1);
    uint32_t polls = 0;
    uint8_t hits[TASKS] = {0};
    mu_pool_set_poll(pool, count_poll, &polls);
    assert_int_equal(mu_pool_run(pool, 20, count_task, hits), MU_OK);
    assert_int_equal(polls, 20);
    mu_pool_poll(pool);
    assert_int_equal(polls, 21);
    mu_pool_free(pool);
}

static void environment_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    (void)lane;
    ((bool *)arg)[task] = mu_fp_environment_ok();
}

static void test_all_threads_have_the_floating_point_environment(void **state)
{
    (void)state;
    struct mu_pool *pool = pool_of(3);
    bool ok[TASKS] = {false};
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr(0x9fc0); /* flush to zero, as a library might leave it */
    assert_false(mu_fp_environment_ok());
#endif
    assert_int_equal(mu_pool_run(pool, TASKS, environment_task, ok), MU_OK);
    for (uint32_t i = 0; i < TASKS; i++)
        assert_true(ok[i]);
    assert_true(mu_fp_environment_ok());
    mu_pool_free(pool);
}

static void test_thread_count_follows_affinity_and_limit(void **state)
{
    (void)state;
    cpu_set_t all, one;
    assert_int_equal(sched_getaffinity(0, sizeof all, &all), 0);
    assert_int_equal(mu_pool_default_threads(), CPU_COUNT(&all));
    CPU_ZERO(&one);
    for (size_t cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; cpu++)
        if (CPU_ISSET(cpu, &all))
            CPU_SET(cpu, &one);
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    assert_int_equal(mu_pool_default_threads(), 1);
    assert_int_equal(sched_setaffinity(0, sizeof all, &all), 0);
    struct mu_error err = {0};
    struct mu_pool *pool = NULL;
    assert_int_equal(mu_pool_new(MU_POOL_THREADS_MAX + 1, &err, &pool), MU_ERR_INVALID);
    assert_non_null(strstr(err.text, "257"));
    assert_null(pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_task_runs_once),
        cmocka_unit_test(test_all_threads_take_part),
        cmocka_unit_test(test_cancelled_run_skips_the_rest),
        cmocka_unit_test(test_poll_hook_runs_on_the_caller_between_tasks),
        cmocka_unit_test(test_all_threads_have_the_floating_point_environment),
        cmocka_unit_test(test_thread_count_follows_affinity_and_limit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
