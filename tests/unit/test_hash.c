/* links: mu_common PkgConfig::XXHASH */
#include "common/hash.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <xxhash.h> /* as the library is compiled, whatever the processor has */

#include "common/rng.h"

enum { SIZE = 300000, OFFSETS = 3 };

/* Lengths around every border of the algorithm: 16, 128 and 240 bytes, stripes of 64, blocks of 1024. */
static const size_t sizes[] = {0,   1,   3,   4,    8,    9,    16,   17,    128,   129,   239,    240,
                               241, 256, 512, 1023, 1024, 1025, 4096, 65535, 65536, 65537, 262144, SIZE - OFFSETS};

static void test_the_widest_vectors_give_the_same_values(void **state)
{
    (void)state;
    uint8_t *data = malloc(SIZE);
    uint64_t random = 3;
    assert_non_null(data);
    for (size_t i = 0; i < SIZE; i++)
        data[i] = (uint8_t)mu_splitmix64(&random);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (size_t offset = 0; offset < OFFSETS; offset++) {
            struct mu_hash128 got = mu_xxh3_128(data + offset, sizes[i]);
            XXH128_hash_t wanted = XXH3_128bits(data + offset, sizes[i]);
            assert_int_equal(got.low, wanted.low64);
            assert_int_equal(got.high, wanted.high64);
            for (uint64_t seed = 0; seed < 2; seed++)
                assert_int_equal(mu_xxh3_64(data + offset, sizes[i], seed),
                                 XXH3_64bits_withSeed(data + offset, sizes[i], seed));
        }
    }
    free(data);
}

/* XXH3 of nothing, as published. */
static void test_known_values(void **state)
{
    (void)state;
    assert_int_equal(mu_xxh3_64("", 0, 0), 0x2d06800538d394c2u);
    struct mu_hash128 hash = mu_xxh3_128("", 0);
    assert_int_equal(hash.high, 0x99aa06d3014798d8u);
    assert_int_equal(hash.low, 0x6001c324468d497fu);
}

static void test_hexadecimal(void **state)
{
    (void)state;
    const uint8_t bytes[] = {0x00, 0xff, 0x1a};
    uint8_t back[3];
    char text[7];
    mu_hex(bytes, sizeof bytes, text);
    assert_string_equal(text, "00ff1a");
    assert_int_equal(mu_unhex(text, back, 3), 1);
    assert_memory_equal(back, bytes, 3);
    assert_int_equal(mu_unhex("00ff1", back, 3), 0);
    assert_int_equal(mu_unhex("00ff1g", back, 3), 0);
    assert_int_equal(mu_unhex("00ff1a0", back, 3), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_the_widest_vectors_give_the_same_values),
                                       cmocka_unit_test(test_known_values), cmocka_unit_test(test_hexadecimal)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
