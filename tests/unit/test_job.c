/* links: mu_plan */
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

static void test_job_good_spec_is_accepted(void **state)
{
    (void)state;
    struct mu_job_spec s = good_spec();
    struct mu_error err = {0};
    if (mu_job_spec_check(&s, &err))
        fail_msg("%s", err.text);
    assert_int_equal(mu_job_leaves(&s), 8);
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
    BAD((s.model.heads = 1, s.model.channels = 257), "model.heads", "1", "channels / heads = 257, at most 256");
    BAD(s.model.heads = 5, "model.channels", "384", "multiple of model.heads (5); use 385");
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
    BAD(s.data.tokens = 3, "data.tokens", "3", "bytes or llmc");
    BAD(s.data.holdout = 0.6, "data.holdout", "0.6", "0 to 0.5");
    BAD(s.data.holdout = -0.1, "data.holdout", "-0.1", "0 to 0.5");
    BAD(s.data.holdout = NAN, "data.holdout", "", "0 to 0.5");
    BAD(s.batch.sequences = 0, "batch.sequences", "0", "1 to 16777216");
    BAD(s.batch.micro = 0, "batch.micro", "0", "1 to 4096");
    BAD(s.batch.micro = 4097, "batch.micro", "4097", "1 to 4096");
    BAD(s.batch.accumulate = 0, "batch.accumulate", "0", "1 to 4096");
    BAD(s.batch.accumulate = 4097, "batch.accumulate", "4097", "1 to 4096");
    BAD((s.model.context = s.batch.length = 1024, s.batch.micro = 1025, s.batch.sequences = 2050), "batch.micro",
        "1025", "use at most 1024 sequences");
    BAD((s.model.context = s.batch.length = 4097), "batch.length", "4097",
        "length * channels / heads (64 a head) at most 262144");
    BAD(s.batch.micro = 3, "batch.sequences", "32", "multiple of micro * accumulate (3 * 2 = 6); use 36");
    BAD((s.batch.micro = 4096, s.batch.accumulate = 4096), "batch.sequences", "32", "16777216");
    BAD((s.batch.sequences = 131072, s.batch.micro = 1, s.batch.accumulate = 1), "batch.sequences", "131072",
        "131072 leaves");
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
    BAD(s.workers.min = 9, "workers.min", "9", "at most the 8 leaves");
    BAD(s.checkpoint.kind = MU_CHECKPOINT_LOCAL, "checkpoint.kind", "local", "shared");
    BAD(s.checkpoint.kind = 7, "checkpoint.kind", "7", "shared");
    BAD(s.checkpoint.keep = 0, "checkpoint.keep", "0", "1 to 100000");
    BAD(s.checkpoint.keep = 100001, "checkpoint.keep", "100001", "1 to 100000");
    BAD(s.checkpoint.every = MU_STEPS_MAX + 1, "checkpoint.every", "1099511627777", "0 to 1099511627776");
    BAD(s.checkpoint.keep_every = MU_STEPS_MAX + 1, "checkpoint.keep_every", "1099511627777", "0 to 1099511627776");
    BAD(s.checkpoint.path[0] = 0, "checkpoint.every", "100", "no checkpoint.path");
    BAD(s.checkpoint.keep_every = 250, "checkpoint.keep_every", "250", "multiple of checkpoint.every (100)");
    BAD(s.eval.every = MU_STEPS_MAX + 1, "eval.every", "1099511627777", "0 to 1099511627776");
    BAD(s.eval.sequences = 0, "eval.sequences", "0", "1 to 16777216");
    BAD(s.data.holdout = 0, "eval.every", "100", "data.holdout");
    BAD(s.numerics = 0, "numerics", "0", "exact or fast");
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
    DIFFERS(s.seed++);
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
        cmocka_unit_test(test_job_learning_rate_follows_warmup_and_cosine),
        cmocka_unit_test(test_job_hash_covers_the_numeric_part_and_only_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
