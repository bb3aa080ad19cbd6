/* links: mu_coordinator */
/* Who may call what, and which worker's name a certificate stands for. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "coordinator/access.h"
#include "coordinator/api.h"

static struct mu_access *open_to_all(void)
{
    struct mu_access *access = NULL;
    assert_int_equal(mu_access_new(NULL, &access, NULL), MU_OK);
    return access;
}

static void test_without_a_certificate_only_joining_is_permitted(void **state)
{
    (void)state;
    struct mu_access *access = open_to_all();
    struct mu_error err;
    for (int method = 0; method < MU_METHOD_COUNT; method++) {
        enum mu_status expected = method == MU_METHOD_JOIN ? MU_OK : MU_ERR_DENIED;
        assert_int_equal(mu_access_check(access, "", false, method, &err), expected);
        assert_int_equal(mu_access_check(access, "muster://admin/x", false, method, &err), expected);
    }
    mu_access_free(access);
}

static void test_each_role_may_what_the_one_below_may_and_workers_attach(void **state)
{
    (void)state;
    static const char *const roles[] = {"muster://worker/x", "muster://viewer/x", "muster://operator/x",
                                        "muster://admin/x"};
    struct mu_access *access = open_to_all();
    for (int method = 0; method < MU_METHOD_COUNT; method++) {
        bool may[4];
        for (int i = 0; i < 4; i++)
            may[i] = mu_access_check(access, roles[i], true, method, NULL) == MU_OK;
        bool is_for_all = mu_access_check(access, "", true, method, NULL) == MU_OK;
        bool of_workers = method == MU_METHOD_ATTACH || method == MU_METHOD_REPORT_EXIT ||
                          method == MU_METHOD_RECOLLECT || method == MU_METHOD_RENEW;
        assert_int_equal(may[0], is_for_all || of_workers);
        assert_true(of_workers || may[3]);
        assert_true((!may[1] || may[2]) && (!may[2] || may[3]));
        assert_true(!is_for_all || (may[0] && may[1]));
    }
    static const int of_admins[] = {MU_METHOD_SAVE_SNAPSHOT, MU_METHOD_CREATE_TOKEN, MU_METHOD_LIST_TOKENS,
                                    MU_METHOD_REVOKE_TOKEN};
    for (size_t i = 0; i < sizeof of_admins / sizeof of_admins[0]; i++)
        assert_int_equal(mu_access_check(access, roles[2], true, of_admins[i], NULL), MU_ERR_DENIED);
    static const char *const others[] = {"muster://root/x", "muster://worker", "muster://admin/", "dns:admin",
                                         "admin/x"};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        for (int method = 0; method < MU_METHOD_COUNT; method++)
            assert_int_equal(mu_access_check(access, others[i], true, method, NULL),
                             mu_access_check(access, "", true, method, NULL));
    mu_access_free(access);
}

static void check_bound(const char *identity, const char *name, const char *expected)
{
    char own[MU_WORKER_NAME_SIZE];
    struct mu_error err = {0};
    snprintf(own, sizeof own, "%s", name);
    enum mu_status status = mu_access_bind_worker(identity, 0xabcdef0123456789, own, &err);
    assert_int_equal(status, expected ? MU_OK : MU_ERR_DENIED);
    assert_string_equal(own, expected ? expected : name);
    assert_true(expected || strstr(err.text, identity));
}

static void test_worker_has_the_name_of_its_certificate_or_begins_with_it(void **state)
{
    (void)state;
    check_bound("muster://worker/h7", "h7", "h7");
    check_bound("muster://worker/h7", "h7-0", "h7-0");
    check_bound("muster://worker/h7", "h7.lan", "h7.lan");
    check_bound("muster://worker/h7", "", "h7-456789");
    check_bound("muster://worker/Host_A", "host_a-3", "host_a-3");
    check_bound("muster://worker/h7", "h77", NULL);
    check_bound("muster://worker/h7", "h", NULL);
    check_bound("muster://worker/h7", "h8", NULL);
    check_bound("muster://worker/h7", "x-h7", NULL);
    check_bound("muster://worker/h7/h8", "h8", NULL);
    check_bound("muster://worker/h7/h8", "", NULL);
    check_bound("muster://worker/_h7", "_h7", NULL);
    check_bound("muster://worker/h 7", "", NULL);
    char longest[MU_WORKER_NAME_SIZE], identity[128], chosen[MU_WORKER_NAME_SIZE + 8];
    memset(longest, 'a', sizeof longest);
    longest[MU_WORKER_NAME_SIZE - 1] = 0;
    snprintf(identity, sizeof identity, "muster://worker/%s", longest);
    check_bound(identity, longest, longest);
    check_bound(identity, "", NULL); /* no room for what makes it different */
    longest[MU_WORKER_NAME_SIZE - 8] = 0;
    snprintf(identity, sizeof identity, "muster://worker/%s", longest);
    snprintf(chosen, sizeof chosen, "%s-456789", longest);
    check_bound(identity, "", chosen);
    check_bound(identity, chosen, chosen);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_without_a_certificate_only_joining_is_permitted),
        cmocka_unit_test(test_each_role_may_what_the_one_below_may_and_workers_attach),
        cmocka_unit_test(test_worker_has_the_name_of_its_certificate_or_begins_with_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
