/* links: mu_wire */
/* Errors are one line of clean text, whatever they quote. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "common/status.h"
#include "proto/wire.h"

static void test_error_quoting_control_characters_stays_one_clean_line(void **state)
{
    (void)state;
    struct mu_error err;
    assert_int_equal(mu_fail(&err, MU_ERR_CORRUPT, "'%s'", "a\nb\033[31m\x7f\x80\xc2\x85"), MU_ERR_CORRUPT);
    assert_string_equal(err.text, "'a?b?[31m?\?\?\?'");
    mu_fail(&err, MU_ERR_INVALID, "%s", "\xe2\x82\xac k\xc3\xb6nig");
    assert_string_equal(err.text, "\xe2\x82\xac k\xc3\xb6nig");
    mu_error_prefix(&err, "line\r%d", 3);
    assert_string_equal(err.text, "line?3: \xe2\x82\xac k\xc3\xb6nig");
    mu_fail_errno(&err, 2, "cannot read '\n'");
    assert_string_equal(err.text, "cannot read '?': No such file or directory");
}

static void test_error_longer_than_its_text_is_cut_between_characters(void **state)
{
    (void)state;
    char longest[3 * MU_ERROR_TEXT_SIZE];
    struct mu_error err;
    for (size_t offset = 0; offset < 4; offset++) {
        memset(longest, 'x', sizeof longest);
        for (size_t at = offset; at + 4 < sizeof longest; at += 4)
            memcpy(longest + at, "\xf0\x9f\x9a\x80", 4);
        longest[sizeof longest - 1] = 0;
        mu_fail(&err, MU_ERR_INVALID, "%s", longest);
        assert_true(mu_wire_text_ok(err.text, sizeof err.text));
        assert_null(strchr(err.text, '?'));
        assert_true(strlen(err.text) > MU_ERROR_TEXT_SIZE - 6);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_error_quoting_control_characters_stays_one_clean_line),
        cmocka_unit_test(test_error_longer_than_its_text_is_cut_between_characters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
