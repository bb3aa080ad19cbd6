/* links: mu_oom */
/* Deaths for want of memory, and its limits, as kernels of both kinds of cgroup tell them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "worker/oom.h"

enum { PATH_SIZE = 256 };

static char root[] = "/tmp/muster-oom-XXXXXX";

/* Also its folders. */
static void write_file(const char *name, const char *text)
{
    char path[PATH_SIZE], command[2 * PATH_SIZE];
    snprintf(path, sizeof path, "%s%s", root, name);
    snprintf(command, sizeof command, "mkdir -p $(dirname %s)", path);
    assert_int_equal(system(command), 0);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static int make_root(void **state)
{
    (void)state;
    memcpy(root + sizeof root - 7, "XXXXXX", 6);
    return mkdtemp(root) ? 0 : -1;
}

static int remove_root(void **state)
{
    (void)state;
    char command[PATH_SIZE];
    snprintf(command, sizeof command, "rm -r %s", root);
    return system(command);
}

/* Each death that is counted from now on explains one. */
static void expect_counting(struct mu_oom *oom, const char *name, const char *three, const char *five)
{
    write_file(name, three);
    mu_oom_init(oom, root);
    assert_false(mu_oom_explains(oom));
    write_file(name, five);
    assert_true(mu_oom_explains(oom));
    assert_true(mu_oom_explains(oom));
    assert_false(mu_oom_explains(oom));
}

static void test_second_version(void **state)
{
    (void)state;
    struct mu_oom oom;
    write_file("/proc/self/cgroup", "0::/system.slice/muster-worker@kjv.service\n");
    write_file("/proc/vmstat", "oom_kill 100\n");
    expect_counting(&oom, "/sys/fs/cgroup/system.slice/muster-worker@kjv.service/memory.events",
                    "low 0\nhigh 7\nmax 9\noom 3\noom_kill 3\noom_group_kill 0\n",
                    "low 0\nhigh 7\nmax 9\noom 5\noom_kill 5\noom_group_kill 1\n");
    assert_false(oom.whole_machine);
}

static void test_in_a_container_the_cgroup_is_the_root(void **state)
{
    (void)state;
    struct mu_oom oom;
    write_file("/proc/self/cgroup", "0::/\n");
    expect_counting(&oom, "/sys/fs/cgroup/memory.events", "oom_kill 3\n", "oom_kill 5\n");
    assert_false(oom.whole_machine);
}

static void test_first_version(void **state)
{
    (void)state;
    struct mu_oom oom;
    write_file("/proc/self/cgroup", "9:name=systemd:/\n3:memory:/job/7\n0::/\n");
    expect_counting(&oom, "/sys/fs/cgroup/memory/job/7/memory.oom_control",
                    "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n");
    assert_false(oom.whole_machine);
}

static void test_the_whole_machine(void **state)
{
    (void)state;
    struct mu_oom oom;
    expect_counting(&oom, "/proc/vmstat", "nr_free_pages 12\noom_kill 3\n", "nr_free_pages 1\noom_kill 5\n");
    assert_true(oom.whole_machine);
}

static void test_without_a_count_nothing_is_explained(void **state)
{
    (void)state;
    struct mu_oom oom;
    write_file("/proc/self/cgroup", "no colon\none:colon\n");
    write_file("/proc/vmstat", "nr_free_pages 12\noom_kill x\n");
    mu_oom_init(&oom, root);
    assert_false(mu_oom_explains(&oom));
}

static void test_the_least_limit_of_the_path_counts(void **state)
{
    (void)state;
    assert_true(mu_oom_limit_bytes(root) == UINT64_MAX);
    write_file("/proc/self/cgroup", "0::/pods/a\n");
    assert_true(mu_oom_limit_bytes(root) == UINT64_MAX);
    write_file("/sys/fs/cgroup/pods/a/memory.max", "max\n");
    assert_true(mu_oom_limit_bytes(root) == UINT64_MAX);
    write_file("/sys/fs/cgroup/pods/memory.max", "3000000000\n");
    assert_int_equal(mu_oom_limit_bytes(root), 3000000000);
    write_file("/sys/fs/cgroup/pods/a/memory.max", "2000000000\n");
    assert_int_equal(mu_oom_limit_bytes(root), 2000000000);
    write_file("/sys/fs/cgroup/memory.max", "1000000000\n"); /* a container's own, whatever the path says */
    assert_int_equal(mu_oom_limit_bytes(root), 1000000000);
    write_file("/proc/self/cgroup", "4:memory:/pods/a\n0::/\n");
    write_file("/sys/fs/cgroup/memory/pods/a/memory.limit_in_bytes", "500000000\n");
    assert_int_equal(mu_oom_limit_bytes(root), 500000000);
}

static void test_what_is_left_of_the_limits(void **state)
{
    (void)state;
    assert_true(mu_oom_left_bytes(root) == UINT64_MAX);
    write_file("/proc/self/cgroup", "0::/pods/a\n");
    write_file("/sys/fs/cgroup/pods/a/memory.max", "max\n");
    write_file("/sys/fs/cgroup/pods/a/memory.current", "5\n");
    assert_true(mu_oom_left_bytes(root) == UINT64_MAX);
    write_file("/sys/fs/cgroup/pods/memory.max", "3000\n"); /* shared with others, who use some of it */
    assert_int_equal(mu_oom_left_bytes(root), 3000);
    write_file("/sys/fs/cgroup/pods/memory.current", "2500\n");
    assert_int_equal(mu_oom_left_bytes(root), 500);
    write_file("/sys/fs/cgroup/pods/memory.stat", "anon 1900\ninactive_file 400\nactive_file 200\n");
    assert_int_equal(mu_oom_left_bytes(root), 900);
    assert_int_equal(mu_oom_limit_bytes(root), 3000);
    write_file("/sys/fs/cgroup/pods/memory.current", "3400\n"); /* at the limit, and about to be killed */
    assert_int_equal(mu_oom_left_bytes(root), 0);
    write_file("/proc/self/cgroup", "4:memory:/pods/a\n0::/\n");
    write_file("/sys/fs/cgroup/memory/pods/memory.limit_in_bytes", "2000\n");
    write_file("/sys/fs/cgroup/memory/pods/memory.usage_in_bytes", "1000\n");
    write_file("/sys/fs/cgroup/memory/pods/memory.stat", "inactive_file 1\ntotal_inactive_file 300\n");
    assert_int_equal(mu_oom_left_bytes(root), 1300);
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, make_root, remove_root)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_second_version),
        TEST(test_in_a_container_the_cgroup_is_the_root),
        TEST(test_first_version),
        TEST(test_the_whole_machine),
        TEST(test_without_a_count_nothing_is_explained),
        TEST(test_the_least_limit_of_the_path_counts),
        TEST(test_what_is_left_of_the_limits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
