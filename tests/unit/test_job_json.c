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
    mu_model_config_resolve(&s.model);
    s.parallel.dp = 2;
    s.parallel.optimizer_sharding = true;
    s.data_tls = true;
    s.compute = MU_COMPUTE_BF16;
    s.parallel.recompute = MU_RECOMPUTE_SELECTIVE;
    s.parallel.redundancy = MU_REDUNDANCY_NONE;
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
    strcpy(s.init.path, "/models/gpt2");
    strcpy(s.init.sha256, "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef");
    return s;
}

static struct mu_job_spec amended_sample(void)
{
    struct mu_job_spec s = sample();
    s.amendments.count = 2;
    s.amendments.newest = 3;
    s.amendments.list[0].version = 1;
    s.amendments.list[0].settled = true;
    s.amendments.list[0].at_step = 9;
    s.amendments.list[0].fields = MU_AMEND_LR | MU_AMEND_MIN_LR | MU_AMEND_WARMUP | MU_AMEND_STEPS | MU_AMEND_KEEP;
    s.amendments.list[0].terms =
        (struct mu_job_terms){.lr = 0.1 + 0.2, .min_lr = 1e-9, .warmup = 5, .steps = 1ull << 39, .keep = 7};
    s.amendments.list[1].version = 3;
    s.amendments.list[1].at_step = 11;
    s.amendments.list[1].fields = MU_AMEND_EVERY | MU_AMEND_KEEP_EVERY | MU_AMEND_SKIP;
    s.amendments.list[1].terms.every = MU_EVERY_AUTO;
    s.amendments.list[1].terms.keep_every = 12;
    s.amendments.list[1].skip_first = 1000;
    s.amendments.list[1].skip_count = 77;
    return s;
}

static struct mu_job_spec llama_sample(void)
{
    struct mu_job_spec s = sample();
    s.model.family = MU_FAMILY_LLAMA;
    s.model.heads = 8;
    s.model.kv_heads = 4;
    s.model.channels = 64;
    s.model.hidden = 172;
    s.model.dropout = 0;
    s.model.rope_base = 500000.1;
    s.model.slices = 4;
    s.model.vocab = 300;
    s.data.tokens = MU_TOKENS_MEGATRON;
    s.parallel.tp = 2;
    s.parallel.pp = 1;
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
    s = amended_sample();
    text = mu_job_spec_to_text(&s);
    memset(&back, 0xff, sizeof back);
    if (mu_job_spec_from_text(text, strlen(text), "record", &back, &err))
        fail_msg("%s in %s", err.text, text);
    assert_memory_equal(&back, &s, sizeof s);
    free(text);
    s = llama_sample();
    text = mu_job_spec_to_text(&s);
    memset(&back, 0xff, sizeof back);
    if (mu_job_spec_from_text(text, strlen(text), "record", &back, &err))
        fail_msg("%s in %s", err.text, text);
    assert_memory_equal(&back, &s, sizeof s);
    free(text);
    s.checkpoint.every = MU_EVERY_AUTO;
    s.checkpoint.keep_every = 0;
    text = mu_job_spec_to_text(&s);
    assert_non_null(strstr(text, "\"every\":\"auto\",\"keep\""));
    if (mu_job_spec_from_text(text, strlen(text), "record", &back, &err))
        fail_msg("%s in %s", err.text, text);
    assert_memory_equal(&back, &s, sizeof s);
    memcpy(strstr(text, "auto"), "autx", 4);
    assert_int_equal(mu_job_spec_from_text(text, strlen(text), "record", &back, &err), MU_ERR_INVALID);
    free(text);
    /* Not given and given as the default are the same record. */
    struct mu_job_spec bare = sample();
    bare.model.kv_heads = bare.model.hidden = bare.model.slices = 0;
    s = sample();
    text = mu_job_spec_to_text(&s);
    again = mu_job_spec_to_text(&bare);
    assert_string_equal(text, again);
    free(text);
    free(again);
}

/* As version 0.1 wrote it: without what came later. */
static void test_job_json_records_of_earlier_versions_have_the_old_defaults(void **state)
{
    (void)state;
    static const char old[] =
        "{\"batch\":{\"accumulate\":2,\"length\":256,\"micro\":2,\"sequences\":32},\"checkpoint\":{\"every\":100,"
        "\"keep\":5,\"keep_every\":500,\"kind\":\"shared\",\"path\":\"/ckpt\"},\"data\":{\"holdout\":0.01,\"path\":"
        "\"/data/kjv.txt\",\"tokens\":\"bytes\"},\"eval\":{\"every\":100,\"sequences\":16},\"job\":\"kjv\",\"model\":{"
        "\"channels\":384,\"context\":256,\"dropout\":0.0,\"family\":\"gpt2\",\"heads\":6,\"layers\":6,\"vocab\":256},"
        "\"numerics\":\"exact\",\"optimizer\":{\"beta1\":0.9,\"beta2\":0.95,\"clip\":1.0,\"eps\":1e-8,\"lr\":0.0006,"
        "\"min_lr\":6e-05,\"warmup\":50,\"weight_decay\":0.1},\"seed\":\"1337\",\"steps\":1000,\"workers\":{\"max\":64,"
        "\"min\":1,\"spares\":0}}";
    struct mu_job_spec s, d;
    struct mu_error err = {0};
    if (mu_job_spec_from_text(old, strlen(old), "record", &s, &err))
        fail_msg("%s", err.text);
    mu_job_spec_init(&d);
    assert_int_equal(s.model.kv_heads, 6);
    assert_int_equal(s.model.hidden, 4 * 384);
    assert_int_equal(s.model.slices, 1);
    assert_true(s.model.rope_base == 0);
    assert_int_equal(s.parallel.tp + s.parallel.pp + s.parallel.dp, 0);
    assert_false(s.parallel.optimizer_sharding || s.data_tls);
    assert_int_equal(s.parallel.recompute, MU_RECOMPUTE_NONE);
    assert_int_equal(s.parallel.redundancy, d.parallel.redundancy);
    assert_int_equal(s.compute, MU_COMPUTE_FP32);
    assert_int_equal(s.init.path[0] + s.init.sha256[0], 0);
    assert_true(mu_job_spec_hash(&s) == 0xb4e6b2ce90027c05); /* the identity that version gave it */
}

static bool is_bool(size_t offset)
{
    return offset == offsetof(struct mu_job_spec, parallel.optimizer_sharding) ||
           offset == offsetof(struct mu_job_spec, data_tls) ||
           offset == offsetof(struct mu_job_spec, amendments.list[0].settled) ||
           offset == offsetof(struct mu_job_spec, amendments.list[1].settled);
}

/* A field that were forgotten would read back as zero: so change every byte of a record in turn, and where the changed
 * record is still allowed, it must come back changed. */
static void test_job_json_no_byte_of_the_record_is_forgotten(void **state)
{
    (void)state;
    struct mu_job_spec base = amended_sample();
    size_t tried = 0;
    for (size_t i = 0; i < offsetof(struct mu_job_spec, amendments.list[2]); i++) { /* behind are unused ones */
        for (int bit = 0; bit < 8; bit++) {
            struct mu_job_spec s = base, back;
            if (is_bool(i) && bit > 0)
                continue; /* no value of a bool */
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
                             strcmp(back.checkpoint.path, s.checkpoint.path) == 0 &&
                             strcmp(back.init.path, s.init.path) == 0 && strcmp(back.init.sha256, s.init.sha256) == 0;
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

static bool is_newer(const char *name)
{
    static const char *const newer[] = {"model.kv_heads", "model.hidden", "model.rope_base", "model.slices"};
    for (size_t i = 0; i < sizeof newer / sizeof newer[0]; i++)
        if (strcmp(name, newer[i]) == 0)
            return true;
    return strncmp(name, "parallel.", 9) == 0 || strncmp(name, "init.", 5) == 0;
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
            bool in_pair = strncmp(name, "init.", 5) == 0; /* of which one alone is refused */
            if (is_newer(name) && !in_pair) {
                assert_int_equal(mu_job_spec_from_json(root, &back, &err), MU_OK);
            } else {
                assert_int_equal(mu_job_spec_from_json(root, &back, &err), MU_ERR_INVALID);
                assert_int_equal(strncmp(err.text, name, strlen(name)), 0);
                assert_non_null(strstr(err.text, in_pair ? "value ''" : "missing"));
            }
            json_object_set_new(object, key, kept);
            leaf_count++;
        }
    }
    assert_int_equal(leaf_count, 44);
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
    expect_refused("\"optimizer_sharding\":true", "\"optimizer_sharding\":1",
                   "parallel.optimizer_sharding: not true or");
    expect_refused("\"recompute\":\"selective\"", "\"recompute\":\"some\"", "parallel.recompute: not one of the known");
    expect_refused("\"redundancy\":\"none\"", "\"redundancy\":\"raid\"", "parallel.redundancy: not one of the known");
    expect_refused("\"compute\":\"bf16\"", "\"compute\":\"fp8\"", "compute: not one of the known");
    expect_refused("\"slices\":1", "\"slices\":2", "parallel.slices: value 2 is not allowed");
    expect_refused("{", "[1]{", "not valid JSON");
    expect_refused("{", "7", "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_job_json_round_trip_is_lossless_and_canonical),
        cmocka_unit_test(test_job_json_records_of_earlier_versions_have_the_old_defaults),
        cmocka_unit_test(test_job_json_no_byte_of_the_record_is_forgotten),
        cmocka_unit_test(test_job_json_every_field_is_required_and_typed),
        cmocka_unit_test(test_job_json_wrong_records_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
