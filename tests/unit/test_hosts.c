/* links: mu_hosts */
/* Lists of hosts: what Slurm and pdsh understand, and what is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/hosts.h"

/* Names joined by spaces. */
static void join(const struct mu_hosts *hosts, char *out, size_t size)
{
    out[0] = 0;
    for (size_t i = 0; i < hosts->count; i++) {
        size_t length = strlen(out);
        snprintf(out + length, size - length, "%s%s", i ? " " : "", hosts->names[i]);
    }
}

static void test_lists_expand_as_in_slurm(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"node1", "node1"},
        {"a,b,c", "a b c"},
        {"node[1-3]", "node1 node2 node3"},
        {"node[08-11]", "node08 node09 node10 node11"},
        {"node[1-2,7,09-10]", "node1 node2 node7 node09 node10"},
        {"r[1-2]n[0-1]", "r1n0 r1n1 r2n0 r2n1"},
        {"gpu[1-2]-ib,x[3],y", "gpu1-ib gpu2-ib x3 y"},
        {"root@10.0.0.[1-2]", "root@10.0.0.1 root@10.0.0.2"},
        {"fd00::[1-2]a", "fd00::1a fd00::2a"},
        {"n[0-0]", "n0"},
        {"n[000-001]", "n000 n001"},
        {"n[9-10]", "n9 n10"},
        {"[1-2]", "1 2"},
        {"b,a,b,a[1],a1", "b a a1"}, /* each once */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct mu_hosts hosts;
        struct mu_error err = {0};
        char text[256];
        if (mu_hosts_read(cases[i][0], &hosts, &err) != MU_OK)
            fail_msg("%s: %s", cases[i][0], err.text);
        join(&hosts, text, sizeof text);
        assert_string_equal(text, cases[i][1]);
        mu_hosts_fini(&hosts);
    }
}

static void test_lists_that_mean_nothing_are_refused(void **state)
{
    (void)state;
    static const char *const cases[] = {
        "",
        ",",
        "a,",
        "a,,b",
        "n[1-",
        "n[1-2",
        "n[]",
        "n[1,]",
        "n[,1]",
        "n[a]",
        "n[1-b]",
        "n[3-1]",
        "n[1--2]",
        "n[1-2-3]",
        "n[1 2]",
        "n]",
        "a b",
        "-oProxyCommand=x",
        "@h",
        "a;b",
        "a$(x)",
        "n[1-2]]",
        "n[[1-2]]",
        "n[-1]",
        ".hidden",
        "'a'",
        "n[1-99999999]",
        "n[1-9999999999]",
        "a[1-300]b[1-300]",
        "n[1-0x2]",
        "n[+1]",
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct mu_hosts hosts;
        struct mu_error err = {0};
        if (mu_hosts_read(cases[i], &hosts, &err) == MU_OK)
            fail_msg("'%s' is taken for %zu hosts", cases[i], hosts.count);
        assert_true(err.text[0] && !strchr(err.text, '\n'));
    }
}

static void test_longest_names_and_lists(void **state)
{
    (void)state;
    struct mu_hosts hosts = {0};
    struct mu_error err;
    char name[2 * MU_HOST_SIZE];
    memset(name, 'a', sizeof name);
    name[MU_HOST_SIZE - 1] = 0;
    assert_int_equal(mu_hosts_parse(name, &hosts, &err), MU_OK);
    assert_int_equal(strlen(hosts.names[0]), MU_HOST_SIZE - 1);
    name[MU_HOST_SIZE - 1] = 'a';
    name[MU_HOST_SIZE] = 0;
    assert_int_equal(mu_hosts_parse(name, &hosts, &err), MU_ERR_INVALID);
    snprintf(name + MU_HOST_SIZE - 1, MU_HOST_SIZE, "[1-2]");
    assert_int_equal(mu_hosts_parse(name, &hosts, &err), MU_ERR_INVALID);
    assert_int_equal(hosts.count, 1); /* nothing is added by what is refused */
    mu_hosts_fini(&hosts);
    assert_int_equal(mu_hosts_parse("n[1-65536]", &hosts, &err), MU_OK);
    assert_int_equal(hosts.count, MU_HOSTS_MAX);
    assert_int_equal(mu_hosts_parse("one-more", &hosts, &err), MU_ERR_LIMIT);
    mu_hosts_fini(&hosts);
}

static void read_text(const char *text, const char *wanted, const char *refusal)
{
    char path[] = "/tmp/muster-hosts-XXXXXX", joined[256];
    struct mu_hosts hosts;
    struct mu_error err = {0};
    int fd = mkstemp(path);
    assert_true(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    close(fd);
    enum mu_status status = mu_hosts_read(path, &hosts, &err);
    unlink(path);
    if (wanted) {
        assert_int_equal(status, MU_OK);
        join(&hosts, joined, sizeof joined);
        assert_string_equal(joined, wanted);
        mu_hosts_fini(&hosts);
    } else {
        assert_int_not_equal(status, MU_OK);
        assert_non_null(strstr(err.text, refusal));
    }
}

static void test_files_hold_a_list_a_line(void **state)
{
    (void)state;
    read_text("# racks\n\n  node[1-2] # left\nx,y\r\nnode2", "node1 node2 x y", NULL);
    read_text("a\nb[1-\n", NULL, ":2: ");
    read_text("# nothing\n", NULL, "names no hosts");
    struct mu_hosts hosts;
    struct mu_error err = {0};
    assert_int_equal(mu_hosts_read("/nowhere/hosts", &hosts, &err), MU_ERR_NOT_FOUND);
    assert_non_null(strstr(err.text, "/nowhere/hosts"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lists_expand_as_in_slurm),
        cmocka_unit_test(test_lists_that_mean_nothing_are_refused),
        cmocka_unit_test(test_longest_names_and_lists),
        cmocka_unit_test(test_files_hold_a_list_a_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
