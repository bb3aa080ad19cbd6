/* links: mu_plan */
#include "common/rng.h"
#include "plan/job.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

static struct mu_job_spec good_spec(void)
{
    struct mu_job_spec s;
    mu_job_spec_init(&s);
    strcpy(s.name, "kjv");
    s.model.layers = 6;
    s.model.heads = 6;
    s.model.channels = 384;
    s.model.context = 256;
    s.model.vocab = 256;
    strcpy(s.data.path, "/data/kjv.txt");
    s.data.holdout = 0.01;
    s.batch.sequences = 32;
    s.batch.micro = 2;
    s.batch.accumulate = 2;
    s.batch.length = 256;
    s.steps = 1000;
    s.optimizer.warmup = 50;
    s.workers.max = 64;
    strcpy(s.checkpoint.path, "/ckpt");
    s.checkpoint.every = 100;
    s.checkpoint.keep_every = 500;
    s.eval.every = 100;
    s.eval.sequences = 16;
    return s;
}

#define SHA256 "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
static struct mu_job_spec with_init(struct mu_job_spec s)
{
    strcpy(s.init.path, "/models/gpt2");
    strcpy(s.init.sha256, SHA256);
    return s;
}

static void test_job_good_spec_is_accepted(void **state)
{
    (void)state;
    struct mu_job_spec s = good_spec();
    struct mu_error err = {0};
    if (mu_job_spec_check(&s, &err))
        fail_msg("%s", err.text);
    assert_int_equal(mu_job_leaves(&s), 8);
    struct mu_job_spec started = with_init(s);
    assert_int_equal(mu_job_spec_check(&started, &err), MU_OK);
    s.checkpoint.path[0] = 0;
    s.checkpoint.every = 0;
    s.eval.every = 0;
    s.eval.sequences = 0;
    s.data.holdout = 0;
    assert_int_equal(mu_job_spec_check(&s, &err), MU_OK);
}

/* Does the spec with one field changed fail with one line that has all three parts: field, value, what is allowed? */
static void expect(const struct mu_job_spec *spec, const char *field, const char *value, const char *allowed)
{
    struct mu_error err = {0};
    enum mu_status status = mu_job_spec_check(spec, &err);
    char start[128];
    snprintf(start, sizeof start, "%s: value %s", field, value);
    if (status != MU_ERR_INVALID || err.status != MU_ERR_INVALID)
        fail_msg("%s = %s: status %s", field, value, mu_status_name(status));
    if (strncmp(err.text, start, strlen(start)) != 0 || !strstr(err.text, " is not allowed: ") ||
        !strstr(err.text, "; "))
        fail_msg("%s = %s: got '%s'", field, value, err.text);
    if (!strstr(err.text, allowed))
        fail_msg("'%s' lacks '%s'", err.text, allowed);
    assert_null(strchr(err.text, '\n'));
    assert_true(strlen(err.text) < MU_ERROR_TEXT_SIZE - 1); /* not cut */
    assert_int_equal(mu_job_spec_check(spec, NULL), MU_ERR_INVALID);
}

#define BAD(change, field, value, allowed)                                                                             \
    do {                                                                                                               \
        struct mu_job_spec s = good_spec();                                                                            \
        change;                                                                                                        \
        expect(&s, field, value, allowed);                                                                             \
    } while (0)

static void test_job_bad_name_and_paths_are_named(void **state)
{
    (void)state;
    BAD(s.name[0] = 0, "job", "''", "a-z");
    BAD(strcpy(s.name, "KJV"), "job", "'KJV'", "a-z");
    BAD(strcpy(s.name, "-x"), "job", "'-x'", "first");
    BAD(strcpy(s.name, "a/b"), "job", "'a/b'", "a-z");
    BAD(strcpy(s.name, "a\nb"), "job", "'a?b'", "a-z");
    BAD(memset(s.name, 'a', sizeof s.name), "job", "'aaaa", "1 to 63");
    BAD(s.data.path[0] = 0, "data.path", "''", "absolute path");
    BAD((s = with_init(s), s.init.path[0] = 0), "init.path", "''", "absolute path");
    BAD((s = with_init(s), strcpy(s.init.path, "models")), "init.path", "'models'", "absolute path");
    BAD((s = with_init(s), memset(s.init.path, '/', sizeof s.init.path)), "init.path", "'////", "absolute path");
    BAD((s = with_init(s), s.init.sha256[0] = 0), "init.sha256", "''", "64 digits");
    BAD((s = with_init(s), s.init.sha256[63] = 0), "init.sha256", "'0123", "64 digits");
    BAD((s = with_init(s), s.init.sha256[64] = '0'), "init.sha256", "'0123", "64 digits");
    BAD((s = with_init(s), s.init.sha256[5] = 'A'), "init.sha256", "'01234A", "64 digits");
    BAD(strcpy(s.data.path, "kjv.txt"), "data.path", "'kjv.txt'", "absolute path");
    BAD(strcpy(s.data.path, "/a\tb"), "data.path", "'/a?b'", "control");
    BAD(memset(s.data.path, '/', sizeof s.data.path), "data.path", "'////", "at most 511 bytes");
    BAD(strcpy(s.checkpoint.path, "ckpt"), "checkpoint.path", "'ckpt'", "absolute path");
}

static void test_job_bad_model_is_named(void **state)
{
    (void)state;
    BAD(s.model.family = 9, "model.family", "9", "gpt2");
    BAD(s.model.layers = 0, "model.layers", "0", "1 to 512");
    BAD(s.model.layers = 513, "model.layers", "513", "1 to 512");
    BAD(s.model.heads = 0, "model.heads", "0", "1 to 1024");
    BAD(s.model.heads = 1025, "model.heads", "1025", "1 to 1024");
    BAD((s.model.heads = 1, s.model.channels = 257), "model.channels", "257",
        "at most 256 for each of model.heads (1); use 256");
    BAD(s.model.heads = 5, "model.channels", "384", "multiple of model.heads (5); use 380 or 385");
    BAD(s.model.channels = 0, "model.channels", "0", "1 to 65536");
    BAD(s.model.channels = 65537, "model.channels", "65537", "1 to 65536");
    BAD(s.model.context = 0, "model.context", "0", "1 to 1048576");
    BAD(s.model.context = 1048577, "model.context", "1048577", "1 to 1048576");
    BAD(s.model.vocab = 1, "model.vocab", "1", "2 to 16777216");
    BAD(s.model.vocab = 16777217, "model.vocab", "16777217", "2 to 16777216");
    BAD(s.model.vocab = 255, "model.vocab", "255", "at least 256");
    BAD(s.model.dropout = 1.0f, "model.dropout", "1", "0 to less than 1");
    BAD(s.model.dropout = -0.5f, "model.dropout", "-0.5", "0 to less than 1");
    BAD(s.model.dropout = NAN, "model.dropout", "", "0 to less than 1");
}

static void test_job_bad_data_and_batch_are_named(void **state)
{
    (void)state;
    BAD(s.data.tokens = 4, "data.tokens", "4", "bytes, llmc or megatron");
    BAD(s.data.holdout = 0.6, "data.holdout", "0.6", "0 to 0.5");
    BAD(s.data.holdout = -0.1, "data.holdout", "-0.1", "0 to 0.5");
    BAD(s.data.holdout = NAN, "data.holdout", "", "0 to 0.5");
    BAD(s.batch.sequences = 0, "batch.sequences", "0", "1 to 16777216");
    BAD(s.batch.micro = 0, "batch.micro", "0", "1 to 4096");
    BAD(s.batch.micro = 4097, "batch.micro", "4097", "1 to 4096");
    BAD(s.batch.accumulate = 0, "batch.accumulate", "0", "1 to 4096");
    BAD(s.batch.accumulate = 4097, "batch.accumulate", "4097", "1 to 4096");
    BAD((s.model.context = s.batch.length = 1024, s.batch.micro = 1025, s.batch.sequences = 2050), "batch.micro",
        "1025", "at most 1048576 tokens in a micro-batch of batch.length (1024); use 205");
    BAD((s.model.context = s.batch.length = 4097), "batch.length", "4097",
        "length * channels / heads at most 262144, with channels / heads (64); use 4096");
    BAD(s.batch.micro = 3, "batch.sequences", "32", "a multiple of batch.micro * batch.accumulate (6); use 30 or 36");
    BAD((s.batch.micro = 4096, s.batch.accumulate = 4096), "batch.sequences", "32", "16777216");
    BAD((s.batch.sequences = 131072, s.batch.micro = 1, s.batch.accumulate = 1), "batch.sequences", "131072",
        "at most 65536 leaves of batch.micro * batch.accumulate (1); use 65536");
    BAD(s.batch.length = 0, "batch.length", "0", "1 to 256");
    BAD(s.batch.length = 257, "batch.length", "257", "1 to 256");
    BAD(s.steps = 0, "steps", "0", "1 to ");
    BAD(s.steps = MU_STEPS_MAX + 1, "steps", "1099511627777", "1 to 1099511627776");
}

static void test_job_bad_optimizer_is_named(void **state)
{
    (void)state;
    BAD(s.optimizer.lr = 0, "optimizer.lr", "0", "more than 0");
    BAD(s.optimizer.lr = 11, "optimizer.lr", "11", "up to 10");
    BAD(s.optimizer.lr = NAN, "optimizer.lr", "", "more than 0");
    BAD(s.optimizer.lr = INFINITY, "optimizer.lr", "inf", "up to 10");
    BAD(s.optimizer.min_lr = 1e-3, "optimizer.min_lr", "0.001", "0 to optimizer.lr");
    BAD(s.optimizer.min_lr = -1e-9, "optimizer.min_lr", "-1e-09", "0 to optimizer.lr");
    BAD(s.optimizer.warmup = 1001, "optimizer.warmup", "1001", "0 to 1000");
    BAD(s.optimizer.beta1 = 1, "optimizer.betas[0]", "1", "0 to less than 1");
    BAD(s.optimizer.beta2 = 1, "optimizer.betas[1]", "1", "0 to less than 1");
    BAD(s.optimizer.beta2 = -1, "optimizer.betas[1]", "-1", "0 to less than 1");
    BAD(s.optimizer.eps = 0, "optimizer.eps", "0", "1e-30 to 1");
    BAD(s.optimizer.eps = 2, "optimizer.eps", "2", "1e-30 to 1");
    BAD(s.optimizer.weight_decay = -1, "optimizer.weight_decay", "-1", "0 to 1000");
    BAD((s.optimizer.lr = 0.1, s.optimizer.weight_decay = 10), "optimizer.weight_decay", "10", "below 1");
    BAD(s.optimizer.clip = -1, "optimizer.clip", "-1", "0 to 1e30");
    BAD(s.optimizer.clip = INFINITY, "optimizer.clip", "inf", "0 to 1e30");
}

static void test_job_bad_policy_is_named(void **state)
{
    (void)state;
    BAD(s.workers.min = 0, "workers.min", "0", "1 to 65536");
    BAD(s.workers.max = 0, "workers.max", "0", "1 to 65536");
    BAD(s.workers.max = 65537, "workers.max", "65537", "1 to 65536");
    BAD(s.workers.spares = 65537, "workers.spares", "65537", "0 to 65536");
    BAD((s.workers.min = 5, s.workers.max = 4), "workers.min", "5", "at most workers.max (4)");
    BAD(s.workers.min = 49, "workers.min", "49", "at most the 48 workers");
    BAD(s.checkpoint.kind = 7, "checkpoint.kind", "7", "shared");
    BAD(s.checkpoint.keep = 0, "checkpoint.keep", "0", "1 to 100000");
    BAD(s.checkpoint.keep = 100001, "checkpoint.keep", "100001", "1 to 100000");
    BAD(s.checkpoint.every = MU_STEPS_MAX + 1, "checkpoint.every", "1099511627777", "0 to 1099511627776");
    BAD((s.checkpoint.every = MU_EVERY_AUTO, s.checkpoint.path[0] = 0), "checkpoint.every", "auto",
        "no checkpoint.path");
    BAD((s.checkpoint.every = MU_EVERY_AUTO, s.checkpoint.keep_every = 500), "checkpoint.keep_every", "500",
        "0 with checkpoint.every auto");
    BAD(s.checkpoint.every = MU_EVERY_AUTO - 1, "checkpoint.every", "18446744073709551614", "0 to 1099511627776");
    BAD(s.checkpoint.keep_every = MU_STEPS_MAX + 1, "checkpoint.keep_every", "1099511627777", "0 to 1099511627776");
    BAD(s.checkpoint.path[0] = 0, "checkpoint.every", "100", "no checkpoint.path");
    BAD(s.checkpoint.keep_every = 250, "checkpoint.keep_every", "250", "multiple of checkpoint.every (100)");
    BAD(s.eval.every = MU_STEPS_MAX + 1, "eval.every", "1099511627777", "0 to 1099511627776");
    BAD(s.eval.sequences = 0, "eval.sequences", "0", "1 to 16777216");
    BAD(s.data.holdout = 0, "eval.every", "100", "data.holdout");
    BAD(s.numerics = 0, "numerics", "0", "exact or fast");
    BAD(s.compute = 0, "compute", "0", "fp32 or bf16");
    BAD(s.compute = 3, "compute", "3", "fp32 or bf16");
}

static struct mu_job_spec llama_spec(void)
{
    struct mu_job_spec s = good_spec();
    s.model = (struct mu_model_config){.family = MU_FAMILY_LLAMA,
                                       .layers = 4,
                                       .heads = 8,
                                       .kv_heads = 4,
                                       .channels = 256,
                                       .hidden = 688,
                                       .context = 256,
                                       .vocab = 256,
                                       .slices = 4};
    return s;
}

#define BAD_LLAMA(change, field, value, allowed)                                                                       \
    do {                                                                                                               \
        struct mu_job_spec s = llama_spec();                                                                           \
        change;                                                                                                        \
        expect(&s, field, value, allowed);                                                                             \
    } while (0)

static void test_job_families_have_their_own_rules(void **state)
{
    (void)state;
    struct mu_job_spec good = llama_spec();
    struct mu_error err = {0};
    if (mu_job_spec_check(&good, &err))
        fail_msg("%s", err.text);
    BAD(s.model.kv_heads = 3, "model.kv_heads", "3", "model.heads (6) for gpt2");
    BAD(s.model.hidden = 1024, "model.hidden", "1024", "4 * model.channels (1536) for gpt2");
    BAD(s.model.rope_base = 10000, "model.rope_base", "10000", "0 for gpt2");
    BAD_LLAMA(s.model.hidden = 0, "model.hidden", "0", "1 to 1048576");
    BAD_LLAMA(s.model.hidden = MU_HIDDEN_MAX + 1, "model.hidden", "1048577", "1 to 1048576");
    BAD_LLAMA(s.model.kv_heads = 9, "model.kv_heads", "9", "1 to 8");
    BAD_LLAMA((s.model.slices = 1, s.model.kv_heads = 3), "model.kv_heads", "3",
              "a divisor of model.heads (8); use 2 or 4");
    BAD_LLAMA(s.model.rope_base = 1, "model.rope_base", "1", "more than 1, up to 1e12");
    BAD_LLAMA(s.model.rope_base = NAN, "model.rope_base", "", "more than 1, up to 1e12");
    BAD_LLAMA(s.model.dropout = 0.1f, "model.dropout", "0.1", "0 for llama");
    BAD_LLAMA(s.model.channels = 264, "model.channels", "264", "use 256 or 272");
}

/* Nothing is changed silently: what does not divide is refused, with the values next to it that would do. */
static void test_job_what_slices_cannot_cut_is_refused_with_nearest_values(void **state)
{
    (void)state;
    BAD(s.model.slices = 3, "parallel.slices", "3", "a power of two up to the limit (64); use 2");
    BAD(s.model.slices = 65, "parallel.slices", "65", "use 2");
    BAD(s.model.slices = 128, "parallel.slices", "128", "use 2");
    BAD(s.model.slices = 4, "parallel.slices", "4", "a divisor of model.heads (6); use 2");
    BAD_LLAMA(s.model.slices = 8, "parallel.slices", "8", "a divisor of model.kv_heads (4); use 4");
    BAD_LLAMA(s.model.hidden = 690, "parallel.slices", "4", "a divisor of model.hidden (690); use 2");
    BAD((s.model.slices = 2, s.batch.micro = 1, s.batch.accumulate = 1, s.batch.length = 255), "batch.micro", "1",
        "micro * batch.length a multiple of parallel.slices (2); use 2");
    BAD((s.model.slices = 2, s.batch.micro = 3, s.batch.length = 255), "batch.micro", "3", "use 2 or 4");
    /* 16 slices of ceil(17 / 16) = 2 rows: the last ones would be empty. */
    BAD((s.data.tokens = MU_TOKENS_LLMC, s.model.heads = 16, s.model.slices = 16, s.model.vocab = 17),
        "parallel.slices", "16", "of model.vocab (17); use 4");
    BAD((s.data.tokens = MU_TOKENS_LLMC, s.model.heads = 16, s.model.slices = 16, s.model.vocab = 5), "parallel.slices",
        "16", "of model.vocab (5); use 2");
    BAD((s.model.channels = 384, s.model.heads = 64, s.model.slices = 64, s.model.vocab = 257), "parallel.slices", "64",
        "use 16");
    struct mu_job_spec s = good_spec();
    s.data.tokens = MU_TOKENS_LLMC;
    s.model.heads = 16;
    s.model.slices = 16;
    for (s.model.vocab = 2; s.model.vocab < 600; s.model.vocab++) {
        uint32_t rows = (s.model.vocab + 15) / 16, last_first = 15 * rows;
        assert_int_equal(mu_job_spec_check(&s, NULL) == MU_OK, last_first < s.model.vocab);
    }
}

static void test_job_bad_parallel_is_named(void **state)
{
    (void)state;
    BAD((s.model.slices = 2, s.parallel.tp = 4), "parallel.tp", "4", "a divisor of parallel.slices (2); use 2");
    BAD_LLAMA(s.parallel.tp = 3, "parallel.tp", "3", "use 2 or 4");
    BAD(s.parallel.pp = 7, "parallel.pp", "7", "auto, or 1 to 6");
    BAD((s.model.layers = 200, s.parallel.pp = 129), "parallel.pp", "129", "auto, or 1 to 128");
    BAD(s.parallel.dp = 9, "parallel.dp", "9", "auto, or 1 to 8");
    BAD((s.workers.max = 47, s.parallel.pp = 6, s.parallel.dp = 8), "workers.max", "47", "at least tp * pp * dp = 48");
    BAD((s.workers.max = 5, s.parallel.pp = 6), "workers.max", "5", "raise it to 6");
    BAD((s.parallel.pp = 2, s.workers.min = 17), "workers.min", "17", "at most the 16 workers");
    BAD((s.parallel.pp = 1, s.parallel.dp = 3, s.workers.min = 4), "workers.min", "4", "at most the 3 workers");
    BAD(s.parallel.recompute = 0, "parallel.recompute", "0", "none, selective or full");
    BAD(s.parallel.recompute = 4, "parallel.recompute", "4", "none, selective or full");
    BAD(s.parallel.redundancy = (enum mu_redundancy)3, "parallel.redundancy", "3", "none or buddy");
    BAD(s.parallel.redundancy = 9, "parallel.redundancy", "9", "none");
    struct mu_job_spec s = llama_spec();
    s.parallel.redundancy = MU_REDUNDANCY_BUDDY;
    s.parallel.tp = 4;
    s.parallel.pp = 4;
    s.parallel.dp = 4;
    s.parallel.optimizer_sharding = true;
    s.parallel.recompute = MU_RECOMPUTE_FULL;
    s.workers.min = s.workers.max = 64;
    assert_int_equal(mu_job_spec_check(&s, NULL), MU_OK);
}

static void test_job_model_fields_left_out_are_filled_in(void **state)
{
    (void)state;
    struct mu_model_config gpt2 = {.family = MU_FAMILY_GPT2, .heads = 6, .channels = 48}, again;
    mu_model_config_resolve(&gpt2);
    assert_int_equal(gpt2.kv_heads, 6);
    assert_int_equal(gpt2.hidden, 192);
    assert_int_equal(gpt2.slices, 1);
    assert_true(gpt2.rope_base == 0);
    again = gpt2;
    mu_model_config_resolve(&again);
    assert_memory_equal(&again, &gpt2, sizeof gpt2);
    struct mu_model_config llama = {.family = MU_FAMILY_LLAMA, .heads = 6, .channels = 48};
    mu_model_config_resolve(&llama);
    assert_int_equal(llama.kv_heads, 6);
    assert_int_equal(llama.hidden, 0);
    assert_true(llama.rope_base == 10000);
}

static void test_job_learning_rate_follows_warmup_and_cosine(void **state)
{
    (void)state;
    struct mu_job_spec s = good_spec();
    assert_true(fabs(mu_job_learning_rate(&s, 0) - 6e-4 / 50) < 1e-18);
    assert_true(mu_job_learning_rate(&s, 49) == 6e-4);
    assert_true(mu_job_learning_rate(&s, 50) == 6e-4);
    assert_true(fabs(mu_job_learning_rate(&s, 525) - (6e-4 + 6e-5) / 2) < 1e-18);
    assert_true(mu_job_learning_rate(&s, 1000) == 6e-5);
    assert_true(mu_job_learning_rate(&s, 5000) == 6e-5);
    for (uint64_t step = 0; step < 1000; step++) {
        double got = mu_job_learning_rate(&s, step);
        double t = ((double)step - 50) / 950;
        double expected = step < 50 ? 6e-4 * (double)(step + 1) / 50
                                    : 6e-5 + (6e-4 - 6e-5) * (1 + cos(3.14159265358979323846 * t)) / 2;
        assert_true(fabs(got - expected) <= 1e-15 * expected);
        if (step >= 51)
            assert_true(got < mu_job_learning_rate(&s, step - 1));
    }
    s.optimizer.warmup = 0;
    assert_true(mu_job_learning_rate(&s, 0) == 6e-4);
    s.optimizer.warmup = s.steps;
    assert_true(mu_job_learning_rate(&s, 999) == 6e-4);
}

#define DIFFERS(change)                                                                                                \
    do {                                                                                                               \
        struct mu_job_spec s = good_spec();                                                                            \
        change;                                                                                                        \
        assert_true(mu_job_spec_hash(&s) != base);                                                                     \
    } while (0)
#define SAME(change)                                                                                                   \
    do {                                                                                                               \
        struct mu_job_spec s = good_spec();                                                                            \
        change;                                                                                                        \
        assert_true(mu_job_spec_hash(&s) == base);                                                                     \
    } while (0)

static void test_job_hash_covers_the_numeric_part_and_only_it(void **state)
{
    (void)state;
    struct mu_job_spec g = good_spec();
    uint64_t base = mu_job_spec_hash(&g);
    DIFFERS(s.model.layers++);
    DIFFERS(s.model.heads++);
    DIFFERS(s.model.channels++);
    DIFFERS(s.model.context++);
    DIFFERS(s.model.vocab++);
    DIFFERS(s.model.dropout = 0.1f);
    DIFFERS(s.data.tokens = MU_TOKENS_LLMC);
    DIFFERS(s.data.tokens = MU_TOKENS_MEGATRON);
    DIFFERS(s.data.holdout = nextafter(s.data.holdout, 1));
    DIFFERS(s.batch.sequences++);
    DIFFERS(s.batch.micro++);
    DIFFERS(s.batch.accumulate++);
    DIFFERS(s.batch.length--);
    DIFFERS(s.steps++);
    DIFFERS(s.optimizer.lr = nextafter(s.optimizer.lr, 1));
    DIFFERS(s.optimizer.min_lr = 0);
    DIFFERS(s.optimizer.warmup++);
    DIFFERS(s.optimizer.beta1 = 0.8);
    DIFFERS(s.optimizer.beta2 = 0.999);
    DIFFERS(s.optimizer.eps = 1e-7);
    DIFFERS(s.optimizer.weight_decay = 0);
    DIFFERS(s.optimizer.clip = 0);
    DIFFERS(s.eval.every++);
    DIFFERS(s.eval.sequences++);
    DIFFERS(s.numerics = MU_NUMERICS_FAST);
    DIFFERS(s.compute = MU_COMPUTE_BF16);
    DIFFERS(s.seed++);
    DIFFERS(s = with_init(s));
    SAME(strcpy(s.name, "other"));
    SAME(strcpy(s.data.path, "/elsewhere"));
    SAME(strcpy(s.checkpoint.path, "/elsewhere"));
    SAME(s.checkpoint.every = 1);
    SAME(s.checkpoint.keep = 1);
    SAME(s.checkpoint.keep_every = 0);
    SAME(s.workers.min = 2);
    SAME(s.workers.max = 2);
    SAME(s.workers.spares = 2);
    SAME(s.model.dropout = -0.0f);
    SAME(s.parallel.tp = 2);
    SAME(s.parallel.pp = 2);
    SAME(s.parallel.dp = 2);
    SAME(s.parallel.optimizer_sharding = true);
    SAME(s.data_tls = true);
    SAME(s.parallel.recompute = MU_RECOMPUTE_FULL);
    SAME(s.model.slices = 0); /* not given: 1 */
    SAME(mu_model_config_resolve(&s.model));
    DIFFERS(s.model.slices = 2);
    /* Jobs of earlier versions keep their identity. */
    assert_true(base == 0xb4e6b2ce90027c05);
}

static void test_job_hash_covers_what_the_job_starts_from_but_not_where_it_is(void **state)
{
    (void)state;
    struct mu_job_spec g = with_init(good_spec());
    uint64_t base = mu_job_spec_hash(&g);
    strcpy(g.init.path, "/elsewhere");
    assert_true(mu_job_spec_hash(&g) == base);
    g.init.sha256[63] = 'a';
    assert_true(mu_job_spec_hash(&g) != base);
}

static void test_job_hash_covers_llama(void **state)
{
    (void)state;
    struct mu_job_spec g = llama_spec();
    uint64_t base = mu_job_spec_hash(&g), with[5];
    mu_model_config_resolve(&g.model);
    assert_true(mu_job_spec_hash(&g) == base);
    g = llama_spec();
    g.model.kv_heads = 8;
    with[0] = mu_job_spec_hash(&g);
    g = llama_spec();
    g.model.hidden++;
    with[1] = mu_job_spec_hash(&g);
    g = llama_spec();
    g.model.rope_base = 500000;
    with[2] = mu_job_spec_hash(&g);
    g = llama_spec();
    g.model.slices = 2;
    with[3] = mu_job_spec_hash(&g);
    g = llama_spec();
    g.model.slices = 1;
    with[4] = mu_job_spec_hash(&g);
    for (int i = 0; i < 5; i++) {
        assert_true(with[i] != base);
        for (int k = 0; k < i; k++)
            assert_true(with[i] != with[k]);
    }
}

/* ---- advice ---- */

static uint32_t drawn(uint64_t *seed, uint32_t count)
{
    return (uint32_t)(mu_splitmix64(seed) % count);
}

/* One of the numbers becomes something else, sometimes far off. */
static void spoil(struct mu_job_spec *s, uint64_t *seed)
{
    uint32_t *numbers[] = {&s->model.layers,    &s->model.heads, &s->model.kv_heads,   &s->model.channels,
                           &s->model.context,   &s->model.vocab, &s->model.hidden,     &s->model.slices,
                           &s->batch.sequences, &s->batch.micro, &s->batch.accumulate, &s->batch.length,
                           &s->parallel.tp,     &s->parallel.pp, &s->parallel.dp,      &s->workers.min,
                           &s->workers.max};
    uint32_t which = drawn(seed, sizeof numbers / sizeof numbers[0]);
    if (s->model.family == MU_FAMILY_GPT2 &&
        (numbers[which] == &s->model.kv_heads || numbers[which] == &s->model.hidden))
        return; /* follow from the others there */
    uint32_t limit = 1u << (1 + drawn(seed, 18));
    *numbers[which] = drawn(seed, limit);
}

static uint32_t *number_named(struct mu_job_spec *s, const char *text)
{
    const struct {
        const char *name;
        uint32_t *number;
    } all[] = {{"model.layers:", &s->model.layers},       {"model.heads:", &s->model.heads},
               {"model.kv_heads:", &s->model.kv_heads},   {"model.channels:", &s->model.channels},
               {"model.context:", &s->model.context},     {"model.vocab:", &s->model.vocab},
               {"model.hidden:", &s->model.hidden},       {"parallel.slices:", &s->model.slices},
               {"batch.sequences:", &s->batch.sequences}, {"batch.micro:", &s->batch.micro},
               {"batch.length:", &s->batch.length},       {"batch.accumulate:", &s->batch.accumulate},
               {"parallel.tp:", &s->parallel.tp},         {"parallel.pp:", &s->parallel.pp},
               {"parallel.dp:", &s->parallel.dp},         {"workers.min:", &s->workers.min},
               {"workers.max:", &s->workers.max}};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        if (strncmp(text, all[i].name, strlen(all[i].name)) == 0)
            return all[i].number;
    }
    fail_msg("no number: %s", text);
    return NULL;
}

/* "...; use 4 or 8", "raise it to 6", "lower min to 3", or a range that the value lies outside of. */
static uint32_t advised(const char *text, uint32_t value, uint64_t *seed)
{
    unsigned long low, high;
    const char *use = strstr(text, "; use "), *to = strstr(text, " it to "), *min = strstr(text, "lower min to ");
    const char *range = strstr(text, " is not allowed: ");
    if (use && sscanf(use, "; use %lu or %lu", &low, &high) == 2)
        return (uint32_t)(drawn(seed, 2) ? low : high);
    if (use && sscanf(use, "; use %lu", &low) == 1)
        return (uint32_t)low;
    if ((to && sscanf(to, " it to %lu", &low) == 1) || (min && sscanf(min, "lower min to %lu", &low) == 1))
        return (uint32_t)low;
    if (range && sscanf(range, " is not allowed: %lu to %lu", &low, &high) == 2)
        return (uint32_t)(value < low ? low : high);
    fail_msg("no advice: %s", text);
    return 0;
}

/* Who follows the advice gets there: a value that was advised is never refused again itself, one wrong number takes a
 * few rounds at most, several take a few each. */
static void test_job_advice_is_allowed(void **state)
{
    (void)state;
    uint64_t seed = 7;
    uint32_t refused = 0, at_once = 0;
    for (int round = 0; round < 4000; round++) {
        struct mu_job_spec s = round % 2 ? llama_spec() : good_spec();
        s.model.slices = s.model.family == MU_FAMILY_LLAMA ? s.model.slices : 1u << drawn(&seed, 2);
        int spoiled = 1 + (round % 3 == 0) + (round % 7 == 0), rounds = 0;
        for (int i = 0; i < spoiled; i++)
            spoil(&s, &seed);
        struct mu_error err = {0};
        while (mu_job_spec_check(&s, &err) != MU_OK) {
            if (s.model.family == MU_FAMILY_GPT2 && strncmp(err.text, "model.hidden", 12) == 0)
                break; /* channels beyond what any width allows */
            uint32_t *number = number_named(&s, err.text), value = advised(err.text, *number, &seed);
            if (value == *number)
                fail_msg("advised what is refused: %s", err.text);
            *number = value;
            if (++rounds > 4 * spoiled)
                fail_msg("round %d: %d rounds of advice end with: %s", round, rounds, err.text);
        }
        refused += rounds > 0;
        at_once += rounds == 1;
    }
    assert_true(refused > 1500 && at_once > refused / 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_job_good_spec_is_accepted),
        cmocka_unit_test(test_job_bad_name_and_paths_are_named),
        cmocka_unit_test(test_job_bad_model_is_named),
        cmocka_unit_test(test_job_bad_data_and_batch_are_named),
        cmocka_unit_test(test_job_bad_optimizer_is_named),
        cmocka_unit_test(test_job_bad_policy_is_named),
        cmocka_unit_test(test_job_families_have_their_own_rules),
        cmocka_unit_test(test_job_what_slices_cannot_cut_is_refused_with_nearest_values),
        cmocka_unit_test(test_job_advice_is_allowed),
        cmocka_unit_test(test_job_bad_parallel_is_named),
        cmocka_unit_test(test_job_model_fields_left_out_are_filled_in),
        cmocka_unit_test(test_job_learning_rate_follows_warmup_and_cosine),
        cmocka_unit_test(test_job_hash_covers_the_numeric_part_and_only_it),
        cmocka_unit_test(test_job_hash_covers_what_the_job_starts_from_but_not_where_it_is),
        cmocka_unit_test(test_job_hash_covers_llama),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
