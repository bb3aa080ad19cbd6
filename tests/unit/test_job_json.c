/* links: mu_storage mu_plan */
#include "storage/job_json.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static struct mu_job_spec sample(void)
{
    struct mu_job_spec s;
    memset(&s, 0, sizeof s); /* padding too: records are compared as bytes */
    strcpy(s.name, "kjv");
    s.model.family = MU_FAMILY_GPT2;
    s.model.layers = 2;
    s.model.heads = 3;
    s.model.channels = 48;
    s.model.context = 64;
    s.model.vocab = 257;
    s.model.dropout = 0.1f;
    strcpy(s.data.path, "/data/\xc3\xa9t\xc3\xa9 \"quoted\" \\ kjv.txt");
    s.data.tokens = MU_TOKENS_BYTES;
    s.data.holdout = 0.012345678901234567;
    s.batch.sequences = 12;
    s.batch.micro = 2;
    s.batch.accumulate = 3;
    s.batch.length = 60;
    s.steps = 1ull << 40;
    s.optimizer.lr = 0.1 + 0.2;
    s.optimizer.min_lr = 5e-324;
    s.optimizer.warmup = 77;
    s.optimizer.beta1 = 1.0 / 3;
    s.optimizer.beta2 = 0x1.fffffffffffffp-1;
    s.optimizer.eps = 1e-30;
    s.optimizer.weight_decay = 1;
    s.optimizer.clip = 1e30;
    s.workers.min = 2;
    s.workers.max = 65536;
    s.workers.spares = 5;
    strcpy(s.checkpoint.path, "/ckpt");
    s.checkpoint.kind = MU_CHECKPOINT_SHARED;
    s.checkpoint.every = 10;
    s.checkpoint.keep = 4;
    s.checkpoint.keep_every = 1ull << 40;
    s.checkpoint.keep_every -= s.checkpoint.keep_every % 10;
    s.eval.every = 9;
    s.eval.sequences = 8;
    s.numerics = MU_NUMERICS_FAST;
    s.seed = UINT64_MAX;
    return s;
}

static void test_job_json_round_trip_is_lossless_and_canonical(void **state)
{
    (void)state;
    struct mu_job_spec s = sample(), back;
    struct mu_error err = {0};
    if (mu_job_spec_check(&s, &err))
        fail_msg("%s", err.text);
    char *text = mu_job_spec_to_text(&s);
    assert_non_null(text);
    memset(&back, 0xff, sizeof back);
    if (mu_job_spec_from_text(text, strlen(text), "record", &back, &err))
        fail_msg("%s in %s", err.text, text);
    assert_memory_equal(&back, &s, sizeof s);
    char *again = mu_job_spec_to_text(&back);
    assert_string_equal(text, again);
    assert_non_null(strstr(text, "\"seed\":\"18446744073709551615\""));
    assert_non_null(strstr(text, "\"lr\":0.30000000000000004"));
    free(text);
    free(again);
}

/* A field that were forgotten would read back as zero: so change every byte of a record in turn, and where the changed
 * record is still allowed, it must come back changed. */
static void test_job_json_no_byte_of_the_record_is_forgotten(void **state)
{
    (void)state;
    struct mu_job_spec base = sample();
    size_t tried = 0;
    for (size_t i = 0; i < sizeof base; i++) {
        for (int bit = 0; bit < 8; bit++) {
            struct mu_job_spec s = base, back;
            ((unsigned char *)&s)[i] ^= (unsigned char)(1 << bit);
            if (mu_job_spec_check(&s, NULL) != MU_OK)
                continue;
            char *text = mu_job_spec_to_text(&s);
            if (!text)
                continue; /* a string that became invalid UTF-8 cannot be JSON */
            struct mu_error err = {0};
            if (mu_job_spec_from_text(text, strlen(text), "record", &back, &err))
                fail_msg("%s in %s", err.text, text);
            bool text_byte = strcmp(back.name, s.name) == 0 && strcmp(back.data.path, s.data.path) == 0 &&
                             strcmp(back.checkpoint.path, s.checkpoint.path) == 0;
            assert_true(text_byte);
            char *second = mu_job_spec_to_text(&back), *original = mu_job_spec_to_text(&base);
            assert_string_equal(second, text);
            bool in_text_or_padding = strcmp(text, original) == 0;
            tried += !in_text_or_padding;
            free(text);
            free(second);
            free(original);
        }
    }
    assert_true(tried > 500);
}

static void test_job_json_every_field_is_required_and_typed(void **state)
{
    (void)state;
    struct mu_job_spec s = sample(), back;
    json_t *root = mu_job_spec_to_json(&s), *names = mu_job_spec_to_json(&s);
    assert_non_null(root);
    assert_non_null(names);
    size_t leaf_count = 0;
    const char *group, *key;
    json_t *members, *unused;
    json_object_foreach(names, group, members)
    {
        json_object_foreach(members, key, unused)
        {
            struct mu_error err = {0};
            char name[64];
            strcat(strcat(strcpy(name, group), "."), key);
            json_t *object = json_object_get(root, group), *kept = json_incref(json_object_get(object, key));
            json_object_set_new(object, key, json_null());
            assert_int_equal(mu_job_spec_from_json(root, &back, &err), MU_ERR_INVALID);
            assert_int_equal(strncmp(err.text, name, strlen(name)), 0);
            json_object_del(object, key);
            assert_int_equal(mu_job_spec_from_json(root, &back, &err), MU_ERR_INVALID);
            assert_int_equal(strncmp(err.text, name, strlen(name)), 0);
            assert_non_null(strstr(err.text, "missing"));
            json_object_set_new(object, key, kept);
            leaf_count++;
        }
    }
    assert_int_equal(leaf_count, 32);
    assert_int_equal(mu_job_spec_from_json(root, &back, NULL), MU_OK);
    json_decref(names);
    json_decref(root);
}

static void expect_refused(const char *find, const char *put, const char *contains)
{
    struct mu_job_spec s = sample(), back;
    char *text = mu_job_spec_to_text(&s), changed[4096];
    assert_non_null(text);
    char *at = strstr(text, find);
    assert_non_null(at);
    size_t head = (size_t)(at - text);
    memcpy(changed, text, head);
    strcpy(changed + head, put);
    strcat(changed, at + strlen(find));
    struct mu_error err = {0};
    enum mu_status status = mu_job_spec_from_text(changed, strlen(changed), "record", &back, &err);
    if (status != MU_ERR_INVALID && status != MU_ERR_CORRUPT)
        fail_msg("'%s' gave %s", put, mu_status_name(status));
    if (strncmp(err.text, "'record': ", 10) != 0 || !strstr(err.text, contains))
        fail_msg("'%s' gave '%s', expected '%s'", put, err.text, contains);
    free(text);
}

static void test_job_json_wrong_records_are_refused(void **state)
{
    (void)state;
    expect_refused("\"steps\":", "\"stops\":1,\"steps\":", "stops: unknown key");
    expect_refused("\"layers\":", "\"depth\":1,\"layers\":", "model.depth: unknown key");
    expect_refused("\"layers\":2", "\"layers\":\"2\"", "model.layers: not a whole number");
    expect_refused("\"layers\":2", "\"layers\":2.0", "model.layers: not a whole number");
    expect_refused("\"layers\":2", "\"layers\":4294967296", "model.layers: not a whole number");
    expect_refused("\"layers\":2", "\"layers\":-2", "model.layers: not a whole number");
    expect_refused("\"layers\":2", "\"layers\":0", "model.layers: value 0 is not allowed");
    expect_refused("\"layers\":2", "\"layers\":2,\"layers\":2", "duplicate");
    expect_refused("\"seed\":\"1844", "\"seed\":\"91844", "seed: not a string of digits");
    expect_refused("\"seed\":\"1844", "\"seed\":\"-1844", "seed: not a string of digits");
    expect_refused("\"seed\":\"1844", "\"seed\":\"01844", "seed: not a string of digits");
    expect_refused("\"numerics\":\"fast\"", "\"numerics\":\"quick\"", "numerics: not one of the known words");
    expect_refused("\"job\":\"kjv\"", "\"job\":\"k\\u0000v\"", "");
    expect_refused("\"job\":\"kjv\"", "\"job\":7", "job: not a string");
    expect_refused("\"lr\":0.30000000000000004", "\"lr\":1e999", "");
    expect_refused("\"lr\":0.30000000000000004", "\"lr\":true", "optimizer.lr: not a number");
    expect_refused("\"dropout\":", "\"dropout\":0.123456789012345,\"x\":", "model.dropout: not a number of 32 bits");
    expect_refused("\"eval\":{", "\"eval\":[],\"evil\":{", "eval.every: is missing");
    expect_refused("{", "[1]{", "not valid JSON");
    expect_refused("{", "7", "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_job_json_round_trip_is_lossless_and_canonical),
        cmocka_unit_test(test_job_json_no_byte_of_the_record_is_forgotten),
        cmocka_unit_test(test_job_json_every_field_is_required_and_typed),
        cmocka_unit_test(test_job_json_wrong_records_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
