/* links: mu_coordinator */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>
#include <openssl/evp.h>

#include "coordinator/readers.h"

enum { HEADER_SIZE = 1024, NOW_US = 1000000, END_US = 2000000 };

struct fixture {
    struct mu_readers *readers;
    char id[MU_TOKEN_ID_SIZE], text[MU_TOKEN_TEXT_SIZE];
    uint8_t hash[MU_TOKEN_HASH_BYTES];
} fixture;

static int set_up(void **state)
{
    (void)state;
    fixture.readers = mu_readers_new();
    assert_non_null(fixture.readers);
    mu_token_text_make(fixture.id, fixture.text, fixture.hash);
    mu_readers_add(fixture.readers, fixture.id, fixture.hash, END_US);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    mu_readers_free(fixture.readers);
    return 0;
}

static bool bearer(const char *text)
{
    char header[HEADER_SIZE + 7];
    snprintf(header, sizeof header, "Bearer %s", text);
    return mu_readers_admit(fixture.readers, header, NOW_US);
}

static bool basic(const char *name_and_password)
{
    char header[HEADER_SIZE] = "Basic ";
    EVP_EncodeBlock((unsigned char *)header + 6, (const unsigned char *)name_and_password,
                    (int)strlen(name_and_password));
    return mu_readers_admit(fixture.readers, header, NOW_US);
}

static void test_a_token_reads_back_as_what_it_is(void **state)
{
    (void)state;
    char id[MU_TOKEN_ID_SIZE], other[MU_TOKEN_TEXT_SIZE];
    uint8_t hash[MU_TOKEN_HASH_BYTES];
    assert_int_equal(strlen(fixture.text), MU_TOKEN_TEXT_SIZE - 1);
    assert_true(mu_token_text_read(fixture.text, id, hash));
    assert_string_equal(id, fixture.id);
    assert_true(mu_token_hash_is(hash, fixture.hash));
    mu_token_text_make(id, other, hash);
    assert_string_not_equal(other, fixture.text);
    assert_false(mu_token_hash_is(hash, fixture.hash));
    for (int i = 0; i < MU_TOKEN_HASH_BYTES; i++) { /* each bit of it matters */
        memcpy(hash, fixture.hash, sizeof hash);
        hash[i] ^= (uint8_t)(1 << i % 8);
        assert_false(mu_token_hash_is(hash, fixture.hash));
    }
}

static void test_a_token_is_admitted_as_bearer_and_as_password(void **state)
{
    (void)state;
    char text[HEADER_SIZE];
    assert_true(bearer(fixture.text));
    snprintf(text, sizeof text, "  bEARER   %s", fixture.text);
    assert_true(mu_readers_admit(fixture.readers, text, NOW_US));
    for (int names = 0; names < 4; names++) { /* with each padding of base64 */
        snprintf(text, sizeof text, "%.*s:%s", names, "ann", fixture.text);
        assert_true(basic(text));
    }
    assert_int_equal(mu_readers_use(fixture.readers, fixture.id).count, 6);
    assert_int_equal(mu_readers_use(fixture.readers, fixture.id).wall_us, NOW_US);
}

static void test_what_is_no_good_token_is_not_admitted(void **state)
{
    (void)state;
    char wrong[HEADER_SIZE], stranger[MU_TOKEN_TEXT_SIZE], id[MU_TOKEN_ID_SIZE];
    uint8_t hash[MU_TOKEN_HASH_BYTES];
    static const char *const headers[] = {
        "",           " ",       "Bearer",     "Bearer ",        "Basic",    "Basic ",         "Basic =",
        "Basic ====", "Basic a", "Basic Og==", "Basic muster:x", "Digest x", "Bearer muster-", "Bearer Bearer",
        "Negotiate",
    };
    for (size_t i = 0; i < sizeof headers / sizeof headers[0]; i++)
        assert_false(mu_readers_admit(fixture.readers, headers[i], NOW_US));
    for (size_t i = 0; i < strlen(fixture.text); i++) { /* each character matters */
        snprintf(wrong, sizeof wrong, "%s", fixture.text);
        wrong[i] = wrong[i] == '0' ? '1' : '0';
        assert_false(bearer(wrong));
        wrong[i] = 0;
        assert_false(bearer(wrong));
    }
    snprintf(wrong, sizeof wrong, "%s0", fixture.text);
    assert_false(bearer(wrong));
    snprintf(wrong, sizeof wrong, "%s:", fixture.text);
    assert_false(basic(wrong)); /* as the name */
    assert_false(mu_readers_admit(fixture.readers, fixture.text, NOW_US));
    memset(wrong, 'Q', sizeof wrong - 1);
    wrong[sizeof wrong - 1] = 0;
    memcpy(wrong, "Basic ", 6);
    assert_false(mu_readers_admit(fixture.readers, wrong, NOW_US)); /* too long */
    wrong[6 + 512] = 0;
    assert_false(mu_readers_admit(fixture.readers, wrong, NOW_US)); /* as long as may be, and no token */
    mu_token_text_make(id, stranger, hash);
    assert_false(bearer(stranger));
    assert_int_equal(mu_readers_use(fixture.readers, fixture.id).count, 0);
    assert_true(bearer(fixture.text));
}

static void test_a_token_ends_with_its_time_or_when_it_is_taken_away(void **state)
{
    (void)state;
    char header[HEADER_SIZE], id[MU_TOKEN_ID_SIZE], second[MU_TOKEN_TEXT_SIZE];
    uint8_t hash[MU_TOKEN_HASH_BYTES];
    snprintf(header, sizeof header, "Bearer %s", fixture.text);
    assert_true(mu_readers_admit(fixture.readers, header, END_US - 1));
    assert_false(mu_readers_admit(fixture.readers, header, END_US));
    mu_token_text_make(id, second, hash);
    mu_readers_add(fixture.readers, id, hash, END_US);
    assert_true(bearer(fixture.text) && bearer(second));
    mu_readers_remove(fixture.readers, fixture.id);
    mu_readers_remove(fixture.readers, "0000000000000000"); /* there is none */
    assert_true(!bearer(fixture.text) && bearer(second));
    assert_int_equal(mu_readers_use(fixture.readers, fixture.id).count, 0);
}

static atomic_bool over;

static void *come_and_go(void *arg)
{
    (void)arg;
    while (!atomic_load(&over)) {
        char id[MU_TOKEN_ID_SIZE], text[MU_TOKEN_TEXT_SIZE];
        uint8_t hash[MU_TOKEN_HASH_BYTES];
        mu_token_text_make(id, text, hash);
        mu_readers_add(fixture.readers, id, hash, END_US);
        mu_readers_remove(fixture.readers, id);
    }
    return NULL;
}

static void test_others_come_and_go_meanwhile(void **state)
{
    (void)state;
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, come_and_go, NULL), 0);
    for (int i = 0; i < 2000; i++)
        assert_true(bearer(fixture.text));
    atomic_store(&over, true);
    pthread_join(thread, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_token_reads_back_as_what_it_is, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_a_token_is_admitted_as_bearer_and_as_password, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_what_is_no_good_token_is_not_admitted, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_a_token_ends_with_its_time_or_when_it_is_taken_away, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_others_come_and_go_meanwhile, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
