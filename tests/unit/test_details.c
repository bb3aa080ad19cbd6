/* links: mu_rpc mu_plan mu_proto */
/* Why a call failed, for programs: reasons, fields, and their way over the wire. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/rng.h"
#include "muster/v1/error.pb-c.h"
#include "plan/job.h"
#include "rpc/details.h"

enum { MUTATIONS = 20000 };

static void test_every_reason_has_a_name_of_its_own(void **state)
{
    (void)state;
    assert_null(mu_reason_name(MU_REASON_NONE));
    assert_int_equal(mu_reason_find("SOMETHING_NEWER"), MU_REASON_NONE);
    for (int reason = MU_REASON_NONE + 1; reason < MU_REASON_COUNT; reason++) {
        const char *name = mu_reason_name((enum mu_reason)reason);
        assert_non_null(name);
        assert_int_equal(mu_reason_find(name), reason);
        assert_int_equal(strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_"), strlen(name));
    }
}

static void test_every_reason_and_its_value_come_back(void **state)
{
    (void)state;
    uint8_t bytes[MU_RPC_DETAILS_BYTES_MAX];
    for (int reason = MU_REASON_NONE + 1; reason < MU_REASON_COUNT; reason++) {
        struct mu_error sent, got = {0};
        mu_fail_for(&sent, MU_ERR_CONFLICT, (enum mu_reason)reason, UINT64_MAX, "because");
        mu_rpc_details_decode(bytes, mu_rpc_details_encode(MU_RPC_FAILED_PRECONDITION, &sent, bytes), &got);
        assert_int_equal(got.reason, reason);
        assert_true(got.value == (mu_reason_value_name((enum mu_reason)reason) ? UINT64_MAX : 0));
    }
}

/* As a program in another language would read it. */
static void test_a_field_is_told_with_what_is_wrong_with_it(void **state)
{
    (void)state;
    uint8_t bytes[MU_RPC_DETAILS_BYTES_MAX];
    struct mu_error err;
    mu_fail(&err, MU_ERR_INVALID, "batch.micro: value 3 is not allowed: 1 to 2; use 2");
    size_t size_bytes = mu_rpc_details_encode(MU_RPC_INVALID_ARGUMENT, &err, bytes);
    Muster__V1__ErrorStatus *status = muster__v1__error_status__unpack(NULL, size_bytes, bytes);
    assert_int_equal(status->code, 3);
    assert_string_equal(status->message, err.text);
    assert_int_equal(status->n_details, 2);
    assert_string_equal(status->details[0]->type_url, "type.googleapis.com/google.rpc.ErrorInfo");
    assert_string_equal(status->details[1]->type_url, "type.googleapis.com/google.rpc.BadRequest");
    Muster__V1__ErrorInfo *info =
        muster__v1__error_info__unpack(NULL, status->details[0]->value.len, status->details[0]->value.data);
    assert_string_equal(info->reason, "FIELD_INVALID");
    assert_string_equal(info->domain, "muster.v1");
    Muster__V1__ErrorFields *fields =
        muster__v1__error_fields__unpack(NULL, status->details[1]->value.len, status->details[1]->value.data);
    assert_string_equal(fields->field_violations[0]->field, "batch.micro");
    assert_string_equal(fields->field_violations[0]->description, "value 3 is not allowed: 1 to 2; use 2");
    muster__v1__error_fields__free_unpacked(fields, NULL);
    muster__v1__error_info__free_unpacked(info, NULL);
    muster__v1__error_status__free_unpacked(status, NULL);
}

static void test_the_longest_text_fits_and_is_not_cut_within_a_character(void **state)
{
    (void)state;
    uint8_t bytes[MU_RPC_DETAILS_BYTES_MAX];
    for (size_t shift = 0; shift < 4; shift++) {
        char field[MU_ERROR_FIELD_SIZE], text[2 * MU_ERROR_TEXT_SIZE];
        struct mu_error err;
        memset(field, 'f', sizeof field);
        field[sizeof field - 1] = 0;
        memset(text, 'a', shift);
        for (size_t i = shift; i + 4 < sizeof text; i += 4)
            memcpy(text + i, "\xf0\x9f\x98\x80", 5);
        mu_fail(&err, MU_ERR_INVALID, "%s: %s", field, text);
        size_t length = strlen(err.text);
        assert_true(length > MU_ERROR_TEXT_SIZE - 5);
        assert_int_equal((length - sizeof field - 1 - shift) % 4, 0);
        mu_error_prefix(&err, "because");
        assert_int_equal((strlen(err.text) - sizeof field - 1 - shift - strlen("because: ")) % 4, 0);
        assert_true(mu_rpc_details_encode(MU_RPC_INVALID_ARGUMENT, &err, bytes) <= sizeof bytes);
    }
}

static void test_what_begins_a_line_is_a_field_only_if_it_looks_like_one(void **state)
{
    (void)state;
    static const struct {
        const char *text, *field;
    } cases[] = {
        {"name: is missing", "name"},
        {"JobSpec.batch[3].micro: no", "JobSpec.batch[3].micro"},
        {"job 'x': is over", NULL},
        {"no colon", NULL},
        {"10.0.0.1:7070 is gone", NULL},
        {": empty", NULL},
        {"", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char field[MU_ERROR_FIELD_SIZE];
        struct mu_error err;
        mu_fail(&err, MU_ERR_INVALID, "%s", cases[i].text);
        bool has = mu_error_field(&err, field);
        assert_int_equal(has, cases[i].field != NULL);
        if (has)
            assert_string_equal(field, cases[i].field);
    }
}

/* Whatever is wrong with a job's specification, the line begins with a field. */
static void test_every_refusal_of_a_job_names_a_field(void **state)
{
    (void)state;
    uint64_t seed = 11;
    struct mu_job_spec good, spec;
    struct mu_error err;
    unsigned refused = 0;
    mu_job_spec_init(&good);
    strcpy(good.name, "job");
    good.model = (struct mu_model_config){
        .family = MU_FAMILY_GPT2, .layers = 4, .heads = 4, .channels = 64, .context = 16, .vocab = 256};
    mu_model_config_resolve(&good.model);
    strcpy(good.data.path, "/data/text");
    good.batch.sequences = 8, good.batch.micro = 1, good.batch.length = 16;
    good.steps = 1000;
    assert_int_equal(mu_job_spec_check(&good, &err), MU_OK);
    for (int i = 0; i < MUTATIONS; i++) {
        char field[MU_ERROR_FIELD_SIZE];
        memcpy(&spec, &good, sizeof spec);
        size_t at = mu_splitmix64(&seed) % (sizeof spec / 4) * 4;
        uint64_t word = mu_splitmix64(&seed) >> mu_splitmix64(&seed) % 64;
        memcpy((uint8_t *)&spec + at, &word, 4);
        if (mu_job_spec_check(&spec, &err) == MU_OK)
            continue;
        refused++;
        if (!mu_error_field(&err, field))
            fail_msg("no field: %s", err.text);
    }
    assert_true(refused > MUTATIONS / 80); /* most of a specification is paths, and room for amendments */
}

static void test_foreign_and_broken_details_are_ignored(void **state)
{
    (void)state;
    uint8_t bytes[MU_RPC_DETAILS_BYTES_MAX];
    uint64_t seed = 5;
    struct mu_error sent, got;
    mu_fail_for(&sent, MU_ERR_STALE, MU_REASON_REVISION_CHANGED, 41, "changed");
    size_t size_bytes = mu_rpc_details_encode(MU_RPC_ABORTED, &sent, bytes);
    for (int i = 0; i < MUTATIONS; i++) {
        uint8_t *copy = malloc(size_bytes);
        memcpy(copy, bytes, size_bytes);
        copy[mu_splitmix64(&seed) % size_bytes] = (uint8_t)mu_splitmix64(&seed);
        got = (struct mu_error){.status = MU_ERR_STALE};
        mu_rpc_details_decode(copy, (size_t)(mu_splitmix64(&seed) % size_bytes), &got);
        assert_true((unsigned)got.reason < MU_REASON_COUNT);
        free(copy);
    }
    for (size_t i = 0; i + 9 < size_bytes; i++)
        if (memcmp(bytes + i, "muster.v1", 9) == 0)
            memcpy(bytes + i, "some.else", 9);
    got = (struct mu_error){.reason = MU_REASON_STOPPING};
    mu_rpc_details_decode(bytes, size_bytes, &got);
    assert_int_equal(got.reason, MU_REASON_STOPPING);
    mu_rpc_details_decode(NULL, 0, &got);
    assert_int_equal(got.reason, MU_REASON_STOPPING);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_reason_has_a_name_of_its_own),
        cmocka_unit_test(test_every_reason_and_its_value_come_back),
        cmocka_unit_test(test_a_field_is_told_with_what_is_wrong_with_it),
        cmocka_unit_test(test_the_longest_text_fits_and_is_not_cut_within_a_character),
        cmocka_unit_test(test_what_begins_a_line_is_a_field_only_if_it_looks_like_one),
        cmocka_unit_test(test_every_refusal_of_a_job_names_a_field),
        cmocka_unit_test(test_foreign_and_broken_details_are_ignored),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
