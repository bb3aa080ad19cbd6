/* links: mu_kernels */
#include "kernels/arena.h"
#include "tests/lib/sanitized.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cmocka.h>

static size_t page(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

static struct mu_space *space_of(size_t size_bytes)
{
    struct mu_error err = {0};
    struct mu_space *space = NULL;
    if (mu_space_new(size_bytes, &err, &space) != MU_OK)
        fail_msg("%s", err.text);
    return space;
}

static void commit(struct mu_space *space, size_t offset, size_t size_bytes)
{
    struct mu_error err = {0};
    if (mu_space_commit(space, offset, size_bytes, &err) != MU_OK)
        fail_msg("%s", err.text);
}

/* Pages of [offset, offset + size) that the kernel holds in memory: what it says itself. */
static size_t resident_pages(const struct mu_space *space, size_t offset, size_t size_bytes)
{
    size_t count = size_bytes / page(), resident = 0;
    unsigned char *states = calloc(count, 1);
    assert_non_null(states);
    assert_int_equal(mincore((char *)mu_space_base(space) + offset, size_bytes, states), 0);
    for (size_t i = 0; i < count; i++)
        resident += states[i] & 1;
    free(states);
    return resident;
}

static void test_space_larger_than_memory_is_only_addresses(void **state)
{
    (void)state;
    const size_t size = (size_t)1 << (SANITIZED ? 36 : 40); /* 1 TiB; sanitizers leave less of the address space */
    struct mu_space *space = space_of(size);
    assert_int_equal(mu_space_committed_bytes(space), 0);
    assert_int_equal((uintptr_t)mu_space_base(space) % page(), 0);
    char *base = mu_space_base(space);
    commit(space, size - 100, 100);
    base[size - 1] = 7;
    commit(space, size / 2, 3 * page());
    memset(base + size / 2, 1, 3 * page());
    assert_int_equal(mu_space_committed_bytes(space), 4 * page());
    assert_int_equal(base[12345], 0); /* not committed: zeros */
    mu_space_free(space);
    mu_space_free(NULL);
}

static void test_commit_is_idempotent_and_keeps_what_is_there(void **state)
{
    (void)state;
    const size_t p = page();
    struct mu_space *space = space_of(100 * p + 5);
    char *base = mu_space_base(space);
    commit(space, 10 * p + 1, p); /* touches two pages */
    assert_int_equal(mu_space_committed_bytes(space), 2 * p);
    assert_int_equal(resident_pages(space, 0, 100 * p), 2);
    for (size_t i = 10 * p; i < 12 * p; i++)
        assert_int_equal(base[i], 0);
    memset(base + 10 * p, 3, 2 * p);
    commit(space, 10 * p, 2 * p);
    commit(space, 9 * p + 7, 3 * p - 7); /* one new page before them */
    commit(space, 50 * p, 0);
    assert_int_equal(mu_space_committed_bytes(space), 3 * p);
    for (size_t i = 9 * p; i < 12 * p; i++)
        assert_int_equal(base[i], i < 10 * p ? 0 : 3);
    commit(space, 0, 100 * p + 5); /* the rest, around them: 101 pages in all */
    assert_int_equal(mu_space_committed_bytes(space), 101 * p);
    assert_int_equal(base[11 * p], 3);
    assert_int_equal(resident_pages(space, 0, 101 * p), 101);
    mu_space_release(space, 90 * p, 10 * p + 5); /* nobody has the rest of the last page */
    assert_int_equal(mu_space_committed_bytes(space), 90 * p);
    mu_space_free(space);
}

static void test_release_gives_back_whole_pages_only(void **state)
{
    (void)state;
    const size_t p = page();
    struct mu_space *space = space_of(64 * p);
    char *base = mu_space_base(space);
    commit(space, 0, 64 * p);
    memset(base, 5, 64 * p);
    mu_space_release(space, 10 * p + 1, 4 * p - 2); /* pages 11 and 12 lie inside */
    assert_int_equal(mu_space_committed_bytes(space), 62 * p);
    assert_int_equal(resident_pages(space, 0, 64 * p), 62);
    mu_space_release(space, 20 * p + 1, p - 2); /* none */
    mu_space_release(space, 20 * p, 0);
    mu_space_release(space, 11 * p, 2 * p); /* again */
    assert_int_equal(mu_space_committed_bytes(space), 62 * p);
    for (size_t i = 0; i < 64 * p; i++)
        assert_int_equal(base[i], i / p == 11 || i / p == 12 ? 0 : 5);
    commit(space, 11 * p, p);
    assert_int_equal(mu_space_committed_bytes(space), 63 * p);
    assert_int_equal(base[11 * p], 0);
    mu_space_release(space, 0, 64 * p);
    assert_int_equal(mu_space_committed_bytes(space), 0);
    assert_int_equal(resident_pages(space, 0, 64 * p), 0);
    mu_space_free(space);
}

/* Large ranges get huge pages where the machine has them: neither commit nor release may reach beyond the range. */
static void test_large_ranges_are_backed_exactly(void **state)
{
    (void)state;
    const size_t p = page(), mib = 1 << 20, size = 64 * mib;
    struct mu_space *space = space_of(size);
    char *base = mu_space_base(space);
    commit(space, 3 * mib + 100, 20 * mib);
    size_t end = (23 * mib + 100 + p - 1) / p * p;
    assert_int_equal(mu_space_committed_bytes(space), end - 3 * mib);
    assert_int_equal(resident_pages(space, 0, size), (end - 3 * mib) / p);
    memset(base + 3 * mib, 9, end - 3 * mib);
    mu_space_release(space, 8 * mib + p, 7 * mib);
    assert_int_equal(mu_space_committed_bytes(space), end - 3 * mib - 7 * mib);
    assert_int_equal(resident_pages(space, 0, size), (end - 10 * mib) / p);
    for (size_t i = 3 * mib; i < end; i += 512)
        assert_int_equal(base[i], i >= 8 * mib + p && i < 15 * mib + p ? 0 : 9);
    assert_int_equal(base[2 * mib], 0);
    mu_space_free(space);
}

static void test_space_beyond_the_limit_is_an_error(void **state)
{
    (void)state;
    struct mu_error err = {0};
    struct mu_space *space = NULL;
    assert_int_equal(mu_space_new((size_t)1 << 60, &err, &space), MU_ERR_NO_MEMORY);
    assert_null(space);
    assert_non_null(strstr(err.text, "cannot reserve"));
    assert_int_equal(mu_space_new((size_t)1 << 60, NULL, &space), MU_ERR_NO_MEMORY);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_space_larger_than_memory_is_only_addresses),
        cmocka_unit_test(test_commit_is_idempotent_and_keeps_what_is_there),
        cmocka_unit_test(test_release_gives_back_whole_pages_only),
        cmocka_unit_test(test_large_ranges_are_backed_exactly),
        cmocka_unit_test(test_space_beyond_the_limit_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
