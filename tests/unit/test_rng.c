/* links: mu_common */
#include "common/rng.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

/* Known-answer vectors of philox4x32 with 10 rounds from the Random123 distribution (kat_vectors). */
static void test_rng_philox_known_answers(void **state)
{
    (void)state;
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } vectors[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++) {
        uint32_t out[4];
        mu_philox4x32(vectors[i].key, vectors[i].counter, out);
        assert_memory_equal(out, vectors[i].out, sizeof out);
    }
}

static void check_bijection(uint64_t seed, uint64_t epoch, uint64_t count)
{
    unsigned char *seen = calloc(count, 1);
    assert_non_null(seen);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t image = mu_permute(seed, epoch, i, count);
        assert_true(image < count);
        assert_false(seen[image]);
        seen[image] = 1;
    }
    free(seen);
}

static void test_rng_permutation_is_a_bijection(void **state)
{
    (void)state;
    for (uint64_t count = 1; count <= 70; count++)
        for (uint64_t epoch = 0; epoch < 4; epoch++)
            check_bijection(1337 + count, epoch, count);
    static const uint64_t counts[] = {255, 256, 257, 1023, 1024, 1025, 4095, 4097, 65535, 65536, 65537, 100003};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
        check_bijection(i, 1ull << 40 | i, counts[i]);
}

static void test_rng_permutation_of_huge_count_stays_in_range(void **state)
{
    (void)state;
    uint64_t seed = 5, count = (1ull << 63) + 12345, previous = 0;
    for (int i = 0; i < 1000; i++) {
        uint64_t image = mu_permute(9, 1, mu_splitmix64(&seed) % count, count);
        assert_true(image < count);
        assert_true(image != previous);
        previous = image;
    }
}

/* Every bit of seed and epoch matters: images of one index under keys that differ in one bit are different orders. */
static void test_rng_permutation_changes_with_every_key_bit(void **state)
{
    (void)state;
    enum { COUNT = 1000 };
    for (int bit = 0; bit < 128; bit++) {
        uint64_t seed = bit < 64 ? 1ull << bit : 0, epoch = bit >= 64 ? 1ull << (bit - 64) : 0;
        int same = 0;
        for (uint64_t i = 0; i < COUNT; i++)
            same += mu_permute(seed, epoch, i, COUNT) == mu_permute(0, 0, i, COUNT);
        assert_true(same < 20); /* 1 expected */
    }
}

/* Fixed points and order: a permutation that were the identity, or a rotation, would fail. */
static void test_rng_permutation_looks_random(void **state)
{
    (void)state;
    enum { COUNT = 10000 };
    int fixed = 0, ascents = 0;
    for (uint64_t i = 0; i < COUNT; i++) {
        fixed += mu_permute(3, 0, i, COUNT) == i;
        if (i + 1 < COUNT)
            ascents += mu_permute(3, 0, i, COUNT) < mu_permute(3, 0, i + 1, COUNT);
    }
    assert_true(fixed < 10);
    assert_true(ascents > 4800 && ascents < 5200);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rng_philox_known_answers),
        cmocka_unit_test(test_rng_permutation_is_a_bijection),
        cmocka_unit_test(test_rng_permutation_of_huge_count_stays_in_range),
        cmocka_unit_test(test_rng_permutation_changes_with_every_key_bit),
        cmocka_unit_test(test_rng_permutation_looks_random),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
