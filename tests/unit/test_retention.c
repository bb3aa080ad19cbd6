/* links: mu_storage mu_plan */
#include "storage_testing.h"

#include "common/rng.h"
#include "plan/retention.h"

enum { LIST_MAX = 32 };

/* A text a reader can check at a glance: "12v" = seq 12 verified, p = pinned, q = quarantined; step = 10 * seq. */
static void assert_deletes(const char *list_text, struct mu_retention_policy policy, const char *wanted)
{
    struct mu_checkpoint_info list[LIST_MAX];
    size_t count = 0, chosen[LIST_MAX];
    for (const char *at = list_text; *at; count++) {
        char *end;
        struct mu_checkpoint_info info = {.seq = strtoull(at, &end, 10)};
        info.step = info.seq * 10;
        for (; *end && *end != ' '; end++) {
            info.verified |= *end == 'v';
            info.pinned |= *end == 'p';
            info.quarantined |= *end == 'q';
        }
        list[count] = info;
        at = *end ? end + 1 : end;
    }
    char got[256] = "";
    size_t chosen_count = mu_retention_select(list, count, &policy, chosen);
    for (size_t i = 0; i < chosen_count; i++)
        snprintf(got + strlen(got), sizeof got - strlen(got), "%s%u", i ? " " : "", (unsigned)list[chosen[i]].seq);
    assert_string_equal(got, wanted);
}

static void test_keeps_the_newest_by_sequence_not_by_place(void **state)
{
    (void)state;
    struct mu_retention_policy keep2 = {.keep = 2, .keep_verified = 1};
    assert_deletes("", keep2, "");
    assert_deletes("1v 2v", keep2, "");
    assert_deletes("1v 2v 3v 4v", keep2, "1 2");
    assert_deletes("4v 1v 3v 2v", keep2, "1 2");
    assert_deletes("9v 10v 100v 11v", keep2, "9 10"); /* numbers, not texts */
}

static void test_never_deletes_the_last_verified(void **state)
{
    (void)state;
    struct mu_retention_policy keep2 = {.keep = 2, .keep_verified = 1};
    assert_deletes("1v 2v 3 4 5", keep2, "1 3");
    assert_deletes("1v 2 3 4", keep2, "2");
    assert_deletes("1 2 3 4", keep2, "1 2");
    assert_deletes("1v 2v 3v 4 5", (struct mu_retention_policy){.keep = 1, .keep_verified = 2}, "1 4");
    assert_deletes("1v 2", (struct mu_retention_policy){.keep = 0, .keep_verified = 0}, ""); /* 0 is taken as 1 */
}

static void test_pins_and_multiples_stay(void **state)
{
    (void)state;
    assert_deletes("1p 2v 3v 4v", (struct mu_retention_policy){.keep = 1}, "2 3");
    assert_deletes("1v 2v 3v 4v 5v 6v 7v", (struct mu_retention_policy){.keep = 2, .keep_every = 30}, "1 2 4 5");
    assert_deletes("3q 4v 5v", (struct mu_retention_policy){.keep = 1, .keep_every = 30},
                   "3 4"); /* a bad multiple does not */
}

static void test_quarantined_are_not_counted_and_stay_for_a_while(void **state)
{
    (void)state;
    struct mu_retention_policy keep2 = {.keep = 2, .keep_verified = 1};
    assert_deletes("1v 2v 3vq 4vq", keep2, "");
    assert_deletes("1q 2v 3q 4v 5v", keep2, "1 2 3");
    assert_deletes("1v 2vq 3 4", keep2, "2");
    assert_deletes("1qp 2v 3v 4v", keep2, "2");
}

static void test_random_lists_never_lose_what_must_stay(void **state)
{
    (void)state;
    uint64_t random = 3;
    for (int round = 0; round < 5000; round++) {
        struct mu_checkpoint_info list[LIST_MAX];
        size_t chosen[LIST_MAX], count = mu_splitmix64(&random) % LIST_MAX;
        bool deleted[LIST_MAX] = {false};
        for (size_t i = 0; i < count; i++) {
            uint64_t bits = mu_splitmix64(&random);
            list[i] = (struct mu_checkpoint_info){.seq = (i * 7 + 3) % 31 + 1, /* all different, out of order */
                                                  .step = bits % 50,
                                                  .verified = bits >> 8 & 1,
                                                  .pinned = (bits >> 16 & 7) == 0,
                                                  .quarantined = (bits >> 24 & 7) == 0};
        }
        count = count > 31 ? 31 : count;
        struct mu_retention_policy policy = {.keep = (uint32_t)(mu_splitmix64(&random) % 5),
                                             .keep_every = mu_splitmix64(&random) % 3 * 5,
                                             .keep_verified = (uint32_t)(mu_splitmix64(&random) % 3)};
        size_t chosen_count = mu_retention_select(list, count, &policy, chosen);
        for (size_t i = 0; i < chosen_count; i++) {
            assert_false(deleted[chosen[i]]);
            deleted[chosen[i]] = true;
            assert_true(i == 0 || list[chosen[i - 1]].seq < list[chosen[i]].seq);
        }
        /* Judged from the definition: for each usable one, how many usable (and verified) ones are newer. */
        for (size_t i = 0; i < count; i++) {
            size_t newer = 0, newer_verified = 0;
            for (size_t j = 0; j < count; j++)
                if (list[j].seq > list[i].seq && !list[j].quarantined) {
                    newer++;
                    newer_verified += list[j].verified;
                }
            size_t keep = policy.keep ? policy.keep : 1,
                   keep_verified = policy.keep_verified ? policy.keep_verified : 1;
            bool must_stay = list[i].pinned || newer < keep ||
                             (!list[i].quarantined && ((list[i].verified && newer_verified < keep_verified) ||
                                                       (policy.keep_every && list[i].step % policy.keep_every == 0)));
            assert_int_equal(deleted[i], !must_stay);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_keeps_the_newest_by_sequence_not_by_place),
        cmocka_unit_test(test_never_deletes_the_last_verified),
        cmocka_unit_test(test_pins_and_multiples_stay),
        cmocka_unit_test(test_quarantined_are_not_counted_and_stay_for_a_while),
        cmocka_unit_test(test_random_lists_never_lose_what_must_stay),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
