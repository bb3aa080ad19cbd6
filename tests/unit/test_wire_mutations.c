/* links: mu_wire mu_plan */
/* Mutated messages: the decoder must refuse them with one clean line, or give something consistent. Run with the
 * address sanitizer. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "wire_testing.h"

enum { MUTATIONS = 100000 };

static size_t mutate(uint8_t *bytes, size_t size_bytes, size_t capacity)
{
    for (uint32_t times = 1 + below(4); times > 0 && size_bytes > 0; times--) {
        uint32_t at = below((uint32_t)size_bytes);
        switch (below(6)) {
        case 0:
            bytes[at] ^= (uint8_t)(1u << below(8));
            break;
        case 1:
            bytes[at] = (uint8_t)any();
            break;
        case 2:
            size_bytes = at;
            break;
        case 3:
            if (size_bytes < capacity) {
                memmove(bytes + at + 1, bytes + at, size_bytes - at);
                bytes[at] = (uint8_t)any();
                size_bytes++;
            }
            break;
        case 4:
            memmove(bytes + at, bytes + at + 1, size_bytes - at - 1);
            size_bytes--;
            break;
        default: { /* a slice is repeated at the end */
            size_t length = 1 + below((uint32_t)(size_bytes - at));
            if (size_bytes + length <= capacity) {
                memmove(bytes + size_bytes, bytes + at, length);
                size_bytes += length;
            }
        }
        }
    }
    return size_bytes;
}

/* A mutated message is refused with one clean line, or decodes to something that can be encoded and decoded again. */
static void test_mutated_worker_messages_are_refused_or_consistent(void **state)
{
    (void)state;
    struct mu_wire_arena arena;
    uint8_t bytes[MU_WIRE_WORKER_BYTES_MAX];
    unsigned accepted = 0, refused = 0;
    mu_wire_arena_init(&arena);
    for (int i = 0; i < MUTATIONS; i++) {
        struct mu_worker_message message, decoded, again;
        struct mu_error err = {0};
        const void *data = NULL;
        size_t size_bytes = 0;
        some_worker_message(&message, (enum mu_worker_message_kind)below(MU_WM_COUNT));
        assert_int_equal(mu_wire_encode_worker(&arena, &message, &data, &size_bytes, &err), MU_OK);
        memcpy(bytes, data, size_bytes);
        size_bytes = mutate(bytes, size_bytes, sizeof bytes);
        uint8_t *exact = malloc(size_bytes ? size_bytes : 1); /* so that a read beyond the end is seen */
        memcpy(exact, bytes, size_bytes);
        memset(&decoded, 0, sizeof decoded);
        if (mu_wire_decode_worker(&arena, exact, size_bytes, &decoded, &err) == MU_OK) {
            accepted++;
            if (decoded.kind != MU_WM_HELLO || decoded.hello.protocol_version == MU_PROTOCOL_VERSION) {
                assert_int_equal(mu_wire_encode_worker(&arena, &decoded, &data, &size_bytes, &err), MU_OK);
                memset(&again, 0, sizeof again);
                assert_int_equal(mu_wire_decode_worker(&arena, data, size_bytes, &again, &err), MU_OK);
                assert_memory_equal(&decoded, &again, sizeof again);
            }
        } else {
            refused++;
            assert_true(err.text[0] && mu_wire_text_ok(err.text, sizeof err.text));
        }
        free(exact);
        mu_wire_arena_reset(&arena);
    }
    assert_true(accepted > MUTATIONS / 100 && refused > MUTATIONS / 10);
    mu_wire_arena_fini(&arena);
}

static void test_mutated_coordinator_messages_are_refused_or_consistent(void **state)
{
    (void)state;
    static struct pointed pointed;
    static uint8_t bytes[MU_WIRE_COORD_BYTES_MAX];
    struct mu_wire_arena arena;
    unsigned accepted = 0, refused = 0;
    mu_wire_arena_init(&arena);
    for (int i = 0; i < MUTATIONS / 3; i++) {
        struct mu_coord_message message, decoded, again;
        struct mu_error err = {0};
        const void *data = NULL;
        size_t size_bytes = 0;
        some_coord_message(&message, &pointed, (enum mu_coord_message_kind)below(MU_CM_COUNT));
        assert_int_equal(mu_wire_encode_coord(&arena, &message, &data, &size_bytes, &err), MU_OK);
        memcpy(bytes, data, size_bytes);
        size_bytes = mutate(bytes, size_bytes, sizeof bytes);
        uint8_t *exact = malloc(size_bytes ? size_bytes : 1);
        memcpy(exact, bytes, size_bytes);
        if (mu_wire_decode_coord(&arena, exact, size_bytes, &decoded, &err) == MU_OK) {
            accepted++;
            assert_int_equal(mu_wire_encode_coord(&arena, &decoded, &data, &size_bytes, &err), MU_OK);
            assert_int_equal(mu_wire_decode_coord(&arena, data, size_bytes, &again, &err), MU_OK);
        } else {
            refused++;
            assert_true(err.text[0] && mu_wire_text_ok(err.text, sizeof err.text));
        }
        free(exact);
        mu_wire_arena_reset(&arena);
    }
    assert_true(accepted > 100 && refused > 100);
    mu_wire_arena_fini(&arena);
}

int main(void)
{
    seed_state = 20261202;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mutated_worker_messages_are_refused_or_consistent),
        cmocka_unit_test(test_mutated_coordinator_messages_are_refused_or_consistent),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
