/* links: PkgConfig::JANSSON */
/* Lines of the log: one each, in logfmt and JSON, whatever is written into them, and where they come from. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/log.h"

static int pipe_ends[2], real_stderr;

static int redirect(void **state)
{
    (void)state;
    real_stderr = dup(STDERR_FILENO);
    mu_log_init("worker", MU_LOG_INFO);
    return real_stderr < 0 || pipe(pipe_ends) != 0 || dup2(pipe_ends[1], STDERR_FILENO) < 0;
}

static int restore(void **state)
{
    (void)state;
    return dup2(real_stderr, STDERR_FILENO) < 0;
}

/* What was written, from level= or "level": on: without the time. */
static const char *written(void)
{
    static char line[8192];
    ssize_t length = read(pipe_ends[0], line, sizeof line - 1);
    assert_true(length > 0 && line[length - 1] == '\n');
    line[length - 1] = 0;
    assert_null(strchr(line, '\n'));
    return line;
}

static void expect(const char *end)
{
    const char *line = written(), *level = strstr(line, "level=");
    assert_non_null(level);
    assert_string_equal(level, end);
}

static void test_a_line_says_where_it_comes_from(void **state)
{
    (void)state;
    assert_true(mu_log_choose_format("logfmt"));
    MU_LOGI("attached as '%s'", "w0");
    expect("level=info component=worker msg=\"attached as 'w0'\"");
    mu_log_set_job("kjv");
    MU_LOGW("loading");
    expect("level=warn component=worker msg=\"loading\" job=kjv");
    mu_log_set_rank(7, 3);
    mu_log(MU_LOG_ERROR, "peer=2", "reset");
    expect("level=error component=worker msg=\"reset\" job=kjv generation=7 rank=3 peer=2");
    mu_log_set_rank(0, 0);
    mu_log_set_job("");
    mu_log(MU_LOG_INFO, "peer=2", "a \"quoted\"\nline \x01 of \xff bytes, \xc3\xa4");
    expect("level=info component=worker msg=\"a 'quoted' line   of ? bytes, \xc3\xa4\" peer=2");
    MU_LOGD("not shown");
    MU_LOGI("shown");
    expect("level=info component=worker msg=\"shown\"");
}

static json_t *object(void)
{
    json_error_t error;
    json_t *json = json_loads(written(), JSON_REJECT_DUPLICATES, &error);
    if (!json)
        fail_msg("%s", error.text);
    return json;
}

static const char *text_of(const json_t *json, const char *key)
{
    return json_string_value(json_object_get(json, key));
}

static void test_json_lines_are_objects(void **state)
{
    (void)state;
    char path[2000];
    assert_false(mu_log_choose_format("xml"));
    assert_true(mu_log_choose_format("json"));
    mu_log_set_job("kjv");
    mu_log_set_rank(7, 3);
    mu_log(MU_LOG_WARN, "peer=2 kind=x\\y code=007 empty= big=12345678901234567890", "C:\\dir \"q\" \xff\n");
    json_t *json = object();
    assert_string_equal(text_of(json, "level"), "warn");
    assert_string_equal(text_of(json, "component"), "worker");
    assert_string_equal(text_of(json, "msg"), "C:\\dir 'q' ? ");
    assert_string_equal(text_of(json, "job"), "kjv");
    assert_int_equal(json_integer_value(json_object_get(json, "generation")), 7);
    assert_int_equal(json_integer_value(json_object_get(json, "rank")), 3);
    assert_int_equal(json_integer_value(json_object_get(json, "peer")), 2);
    assert_string_equal(text_of(json, "kind"), "x\\y");
    assert_string_equal(text_of(json, "code"), "007");
    assert_string_equal(text_of(json, "empty"), "");
    assert_string_equal(text_of(json, "big"), "12345678901234567890");
    assert_int_equal(strlen(text_of(json, "ts")), 24);
    json_decref(json);
    memset(path, '\\', sizeof path);
    path[sizeof path - 1] = 0;
    mu_log(MU_LOG_WARN, path, "%s", path); /* as long as can be, all of it escaped */
    json = object();
    assert_int_equal(strlen(text_of(json, "msg")), 1023);
    json_decref(json);
    assert_true(mu_log_choose_format("logfmt"));
}

static void test_what_is_kept_is_logfmt(void **state)
{
    struct mu_log_line line;
    (void)state;
    assert_true(mu_log_choose_format("json"));
    mu_log_set_job("");
    mu_log_set_rank(0, 0);
    MU_LOGI("kept");
    json_decref(object());
    assert_int_equal(mu_log_recent(0, &line, 1), 1);
    assert_non_null(strstr(line.text, " level=info component=worker msg=\"kept\""));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_line_says_where_it_comes_from),
        cmocka_unit_test(test_json_lines_are_objects),
        cmocka_unit_test(test_what_is_kept_is_logfmt),
    };
    return cmocka_run_group_tests(tests, redirect, restore);
}
