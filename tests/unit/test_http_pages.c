/* links: mu_coordinator */
/* Answers that are shared and bounded: by key, by age, and however slowly they are read. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/http_pages.h"

enum { MIB = 1 << 20, READERS = 200 };

static struct mu_http_page *keep(struct mu_http_pages *pages, const char *key, size_t size, char fill, uint64_t now_us)
{
    struct mu_http_reply reply = {.status = 200, .type = "text/plain", .body = malloc(size), .size_bytes = size};
    assert_non_null(reply.body);
    memset(reply.body, fill, size);
    struct mu_http_page *page = mu_http_pages_keep(pages, key, &reply, now_us);
    assert_non_null(page);
    return page;
}

static void test_the_same_question_has_one_answer_until_it_is_old(void **state)
{
    const uint64_t age_us = MU_HTTP_PAGE_AGE_MS * 1000ull;
    char text[8];
    (void)state;
    struct mu_http_pages *pages = mu_http_pages_new();
    assert_null(mu_http_pages_find(pages, "a", 5));
    struct mu_http_page *a = keep(pages, "a", 3, 'x', 5), *again = mu_http_pages_find(pages, "a", 4 + age_us);
    assert_ptr_equal(a, again);
    mu_http_page_release(again);
    assert_null(mu_http_pages_find(pages, "b", 5));
    assert_null(mu_http_pages_find(pages, "a", 5 + age_us));
    struct mu_http_page *newer = keep(pages, "a", 2, 'y', 5 + age_us);
    assert_int_equal(mu_http_page_read(a, 1, text, sizeof text), 2); /* who reads the former one goes on */
    assert_memory_equal(text, "xx", 2);
    assert_int_equal(mu_http_page_read(a, 3, text, sizeof text), 0);
    assert_int_equal(mu_http_pages_bytes(pages), 5);
    mu_http_page_release(a);
    assert_int_equal(mu_http_pages_bytes(pages), 2);
    mu_http_page_release(newer);
    assert_int_equal(mu_http_pages_bytes(pages), 2); /* for the next one who asks */
    mu_http_pages_free(pages);
}

/* Each of many readers has begun to read an answer of its own and takes no more of it. */
static void test_slow_readers_hold_no_more_than_the_bound(void **state)
{
    struct mu_http_pages *pages = mu_http_pages_new();
    struct mu_http_page *held[READERS];
    char key[16], text[4];
    uint32_t cut_off = 0;
    (void)state;
    for (uint32_t i = 0; i < READERS; i++) {
        snprintf(key, sizeof key, i % 2 ? "same" : "%u", i);
        held[i] = keep(pages, key, MIB, 'z', 1000000ull * i);
        assert_true(mu_http_pages_bytes(pages) <= MU_HTTP_PAGES_BYTES_MAX);
    }
    for (uint32_t i = 0; i < READERS; i++) {
        ssize_t got = mu_http_page_read(held[i], MIB - 2, text, sizeof text);
        bool is_newest = i >= READERS - MU_HTTP_PAGES_BYTES_MAX / MIB;
        assert_int_equal(got, is_newest ? 2 : -1);
        cut_off += got < 0;
    }
    assert_int_equal(cut_off, READERS - 64);
    assert_null(mu_http_pages_find(pages, "0", 0)); /* withdrawn: is made anew */
    for (uint32_t i = 0; i < READERS; i++)
        mu_http_page_release(held[i]);
    mu_http_pages_free(pages);
}

static void test_one_answer_larger_than_the_bound_is_served(void **state)
{
    char text[4];
    (void)state;
    struct mu_http_pages *pages = mu_http_pages_new();
    struct mu_http_page *small = keep(pages, "small", 4, 's', 0);
    struct mu_http_page *large = keep(pages, "large", (size_t)MU_HTTP_PAGES_BYTES_MAX + MIB, 'l', 0);
    assert_int_equal(mu_http_page_read(small, 0, text, sizeof text), -1);
    assert_int_equal(mu_http_page_read(large, MU_HTTP_PAGES_BYTES_MAX, text, sizeof text), 4);
    mu_http_page_release(small);
    mu_http_page_release(large);
    mu_http_pages_free(pages);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_same_question_has_one_answer_until_it_is_old),
        cmocka_unit_test(test_slow_readers_hold_no_more_than_the_bound),
        cmocka_unit_test(test_one_answer_larger_than_the_bound_is_served),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
