/* links: mu_supervisor */
/* When a worker asks for a new certificate, and how long it waits when it did not get one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "worker/renew.h"

#define DAY_US (86400 * UINT64_C(1000000))

static void test_it_is_due_in_the_third_quarter_of_its_life(void **state)
{
    (void)state;
    assert_int_equal(mu_renewer_due_us(0, 12, 0), 8);
    assert_int_equal(mu_renewer_due_us(100, 112, 1), 109);
    assert_int_equal(mu_renewer_due_us(7 * DAY_US, 97 * DAY_US, 0), 67 * DAY_US);
    assert_int_equal(mu_renewer_due_us(7 * DAY_US, 97 * DAY_US, 0.5), 67 * DAY_US + 90 * DAY_US / 24);
    assert_int_equal(mu_renewer_due_us(9, 3, 1), 9); /* nonsense is due at once */
}

static void test_pauses_grow_and_leave_six_tries_at_least(void **state)
{
    (void)state;
    static const uint64_t lives_us[] = {24 * 1000000, 1000 * 1000000ull, DAY_US, 90 * DAY_US};
    for (size_t i = 0; i < sizeof lives_us / sizeof lives_us[0]; i++) {
        uint64_t life_us = lives_us[i], before_us = 0, used_us = mu_renewer_due_us(0, life_us, 1), tries = 0;
        for (unsigned failures = 1; used_us < life_us; failures++, tries++) {
            uint64_t pause_us = mu_renewer_pause_us(failures, life_us, 1);
            assert_int_equal(mu_renewer_pause_us(failures, life_us, 0), pause_us / 2);
            assert_true(pause_us >= before_us && pause_us >= 1000000 && pause_us <= 300000000);
            before_us = pause_us;
            used_us += pause_us;
        }
        assert_true(tries >= 6);
    }
    assert_int_equal(mu_renewer_pause_us(1, 90 * DAY_US, 1), 1000000);
    assert_int_equal(mu_renewer_pause_us(4, 90 * DAY_US, 1), 8000000);
    assert_int_equal(mu_renewer_pause_us(100, 90 * DAY_US, 1), 300000000);
    assert_int_equal(mu_renewer_pause_us(100, 0, 1), 1000000); /* life not known */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_it_is_due_in_the_third_quarter_of_its_life),
        cmocka_unit_test(test_pauses_grow_and_leave_six_tries_at_least),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
