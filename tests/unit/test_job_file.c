/* links: mu_job_file */
#include "cli/job_file.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "common/rng.h"

static const char good[] =
    "job: kjv\n"
    "model:      {family: gpt2, layers: 6, heads: 6, channels: 384, context: 256, vocab: 256, dropout: 0.1}\n"
    "data:       {path: kjv.txt, tokens: bytes, holdout: 0.01}   # a comment\n"
    "batch:      {sequences: 32, micro: 2, accumulate: 2, length: 128}\n"
    "steps:      1000\n"
    "optimizer:  {kind: adamw, lr: 6.0e-4, min_lr: 6.0e-5, warmup: 50, betas: [0.8, 0.99], eps: 1e-9,\n"
    "             weight_decay: 0.2, clip: 0.5}\n"
    "parallel:   {tp: auto, pp: auto, dp: 4, slices: 1, optimizer_sharding: true, recompute: full, redundancy: none}\n"
    "workers:    {min: 2, max: 64, spares: 1}\n"
    "checkpoint: {path: ckpt, kind: shared, every: 100, keep: 7, keep_every: 500}\n"
    "eval:       {every: 50, sequences: 16}\n"
    "numerics:   fast\n"
    "seed:       18446744073709551615\n"
    "data_tls:   true\n"
    "compute:    bf16\n";

static const char llama[] =
    "job: a\n"
    "model: {family: llama, layers: 4, heads: 8, kv_heads: 4, channels: 64, hidden: 172, context: 16, vocab: 256,\n"
    "        rope_base: 5.0e5}\n"
    "data: {path: /abs/text}\n"
    "batch: {sequences: 16, micro: 2}\n"
    "parallel: {tp: 2, pp: 2, slices: 4, recompute: selective}\n"
    "steps: 3\n";

static const char minimal[] = "job: a\n"
                              "model: {layers: 1, heads: 1, channels: 8, context: 16, vocab: 256}\n"
                              "data: {path: /abs/text}\n"
                              "batch: {sequences: 4, micro: 1}\n"
                              "steps: 3\n";

static enum mu_status parse(const char *text, struct mu_job_spec *ret_spec, struct mu_error *err)
{
    return mu_job_file_parse("f.yaml", "/jobs", text, strlen(text), ret_spec, err);
}

static void test_job_file_every_field_is_read(void **state)
{
    (void)state;
    struct mu_job_spec s;
    struct mu_error err = {0};
    if (parse(good, &s, &err))
        fail_msg("%s", err.text);
    assert_string_equal(s.name, "kjv");
    assert_int_equal(s.model.family, MU_FAMILY_GPT2);
    assert_int_equal(s.model.layers, 6);
    assert_int_equal(s.model.heads, 6);
    assert_int_equal(s.model.channels, 384);
    assert_int_equal(s.model.context, 256);
    assert_int_equal(s.model.vocab, 256);
    assert_true(s.model.dropout == 0.1f);
    assert_string_equal(s.data.path, "/jobs/kjv.txt");
    assert_int_equal(s.data.tokens, MU_TOKENS_BYTES);
    assert_true(s.data.holdout == 0.01);
    assert_int_equal(s.batch.sequences, 32);
    assert_int_equal(s.batch.micro, 2);
    assert_int_equal(s.batch.accumulate, 2);
    assert_int_equal(s.batch.length, 128);
    assert_int_equal(s.steps, 1000);
    assert_true(s.optimizer.lr == 6e-4 && s.optimizer.min_lr == 6e-5);
    assert_int_equal(s.optimizer.warmup, 50);
    assert_true(s.optimizer.beta1 == 0.8 && s.optimizer.beta2 == 0.99);
    assert_true(s.optimizer.eps == 1e-9 && s.optimizer.weight_decay == 0.2 && s.optimizer.clip == 0.5);
    assert_int_equal(s.model.kv_heads, 6);
    assert_int_equal(s.model.hidden, 1536);
    assert_int_equal(s.model.slices, 1);
    assert_true(s.model.rope_base == 0);
    assert_int_equal(s.parallel.tp, 0);
    assert_int_equal(s.parallel.pp, 0);
    assert_int_equal(s.parallel.dp, 4);
    assert_true(s.parallel.optimizer_sharding && s.data_tls);
    assert_int_equal(s.parallel.recompute, MU_RECOMPUTE_FULL);
    assert_int_equal(s.parallel.redundancy, MU_REDUNDANCY_NONE);
    assert_int_equal(s.workers.min, 2);
    assert_int_equal(s.workers.max, 64);
    assert_int_equal(s.workers.spares, 1);
    assert_string_equal(s.checkpoint.path, "/jobs/ckpt");
    assert_int_equal(s.checkpoint.kind, MU_CHECKPOINT_SHARED);
    assert_int_equal(s.checkpoint.every, 100);
    assert_int_equal(s.checkpoint.keep, 7);
    assert_int_equal(s.checkpoint.keep_every, 500);
    assert_int_equal(s.eval.every, 50);
    assert_int_equal(s.eval.sequences, 16);
    assert_int_equal(s.numerics, MU_NUMERICS_FAST);
    assert_int_equal(s.compute, MU_COMPUTE_BF16);
    assert_true(s.seed == UINT64_MAX);
}

static void test_job_file_interval_may_be_automatic(void **state)
{
    (void)state;
    static const char *const values[] = {"auto", "18446744073709551615", "\"auto\""};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        char text[512];
        struct mu_job_spec s;
        struct mu_error err = {0};
        snprintf(text, sizeof text, "%scheckpoint: {path: /ckpt, every: %s}\n", minimal, values[i]);
        enum mu_status status = parse(text, &s, &err);
        assert_int_equal(status, i == 1 ? MU_ERR_INVALID : MU_OK);
        if (status == MU_OK)
            assert_true(s.checkpoint.every == MU_EVERY_AUTO && s.checkpoint.keep == 5);
        else
            assert_non_null(strstr(err.text, "checkpoint.every: value 18446744073709551615 is not allowed: "));
    }
}

static void test_job_file_llama_and_degrees_are_read(void **state)
{
    (void)state;
    struct mu_job_spec s;
    struct mu_error err = {0};
    if (parse(llama, &s, &err))
        fail_msg("%s", err.text);
    assert_int_equal(s.model.family, MU_FAMILY_LLAMA);
    assert_int_equal(s.model.kv_heads, 4);
    assert_int_equal(s.model.hidden, 172);
    assert_int_equal(s.model.slices, 4);
    assert_true(s.model.rope_base == 5e5);
    assert_int_equal(s.parallel.tp, 2);
    assert_int_equal(s.parallel.pp, 2);
    assert_int_equal(s.parallel.dp, 0);
    assert_false(s.parallel.optimizer_sharding || s.data_tls);
    assert_int_equal(s.parallel.recompute, MU_RECOMPUTE_SELECTIVE);
}

static void test_job_file_absent_fields_take_their_defaults(void **state)
{
    (void)state;
    struct mu_job_spec s, d;
    struct mu_error err = {0};
    if (parse(minimal, &s, &err))
        fail_msg("%s", err.text);
    mu_job_spec_init(&d);
    assert_string_equal(s.data.path, "/abs/text");
    assert_int_equal(s.batch.length, 16);
    assert_int_equal(s.batch.accumulate, 1);
    assert_memory_equal(&s.optimizer, &d.optimizer, sizeof s.optimizer);
    assert_memory_equal(&s.workers, &d.workers, sizeof s.workers);
    assert_string_equal(s.checkpoint.path, "");
    assert_int_equal(s.eval.every, 0);
    assert_int_equal(s.numerics, MU_NUMERICS_EXACT);
    assert_int_equal(s.compute, MU_COMPUTE_FP32);
    assert_memory_equal(&s.parallel, &d.parallel, sizeof s.parallel);
    assert_int_equal(s.model.kv_heads, 1);
    assert_int_equal(s.model.hidden, 32);
    assert_int_equal(s.model.slices, 1);
    assert_int_equal(s.seed, 1337);
    char text[600];
    snprintf(text, sizeof text, "%soptimizer: {lr: 1e-5}\ndata: {path: x, holdout: 0.1}\neval: {every: 2}\n", minimal);
    char *second = strstr(text, "data: {path: /abs/text}\n");
    memset(second, '#', strlen("data: {path: /abs/text}"));
    if (parse(text, &s, &err))
        fail_msg("%s", err.text);
    assert_true(s.optimizer.min_lr == 1e-5 / 10);
    assert_int_equal(s.eval.sequences, 4);
}

/* The rest of init is tested with real checkpoints, end to end. */
static void test_job_file_start_that_is_no_checkpoint_is_refused(void **state)
{
    (void)state;
    struct mu_job_spec s;
    struct mu_error err = {0};
    char text[600];
    snprintf(text, sizeof text, "%sinit: {path: none}\n", minimal);
    assert_int_equal(parse(text, &s, &err), MU_ERR_NOT_FOUND);
    assert_non_null(strstr(err.text, "f.yaml:6: init.path: "));
    assert_non_null(strstr(err.text, "/jobs/none/manifest.json"));
}

struct bad {
    const char *find, *put; /* in `good`, the first `find` becomes `put`; NULL: `put` is the whole file */
    const char *begins;     /* of the error line */
    const char *contains;
};

static const struct bad bads[] = {
    /* single fields: kinds of values */
    {"layers: 6", "layers: six", "f.yaml:2: model.layers: value six is not allowed: a whole number", "digits"},
    {"layers: 6", "layers: -6", "f.yaml:2: model.layers: value -6 is not allowed: a whole number from 0 to 4294967295",
     ""},
    {"layers: 6", "layers: 6.5", "f.yaml:2: model.layers: value 6.5 is not allowed", "whole number"},
    {"layers: 6", "layers: 0x10", "f.yaml:2: model.layers: value 0x10 is not allowed", "digits"},
    {"layers: 6", "layers: 4294967296", "f.yaml:2: model.layers: value 4294967296 is not allowed", "4294967295"},
    {"layers: 6", "layers: 99999999999999999999999", "f.yaml:2: model.layers: value 99999999999999999999999 is",
     "smaller"},
    {"layers: 6", "layers: ", "f.yaml:2: model.layers: value (empty) is not allowed", "whole number"},
    {"layers: 6", "layers: [6]", "f.yaml:2: model.layers: a list is not allowed: a single value", ""},
    {"layers: 6", "layers: {a: 6}", "f.yaml:2: model.layers: a group is not allowed: a single value", ""},
    {"layers: 6", "layers: 0", "f.yaml:2: model.layers: value 0 is not allowed: 1 to 512", "set the number"},
    {"layers: 6, ", "", "f.yaml:2: model.layers: is missing", "set the number"},
    {"numerics:   fast", "init: {path: }", "f.yaml:12: init.path: value (empty) is not allowed: a path", ""},
    {"numerics:   fast", "init: {}", "f.yaml:12: init.path: is missing", "checkpoint"},
    {"numerics:   fast", "init: /models", "f.yaml:12: init: a single value is not allowed: a group of fields", ""},
    {"numerics:   fast", "init: {paht: /models}", "f.yaml:12: init.paht: unknown key; did you mean path?", ""},
    {"seed:       18446744073709551615", "seed: 18446744073709551616", "f.yaml:13: seed: value 18446744073709551616 is",
     "smaller"},
    {"dropout: 0.1", "dropout: nan", "f.yaml:2: model.dropout: value nan is not allowed: a finite", ""},
    {"dropout: 0.1", "dropout: .nan", "f.yaml:2: model.dropout: value .nan is not allowed: a finite", ""},
    {"dropout: 0.1", "dropout: -inf", "f.yaml:2: model.dropout: value -inf is not allowed: a finite", ""},
    {"dropout: 0.1", "dropout: 1e999", "f.yaml:2: model.dropout: value 1e999 is not allowed", "1e300"},
    {"dropout: 0.1", "dropout: 1e-999", "f.yaml:2: model.dropout: value 1e-999 is not allowed", "1e300"},
    {"dropout: 0.1", "dropout: 0x1p-3", "f.yaml:2: model.dropout: value 0x1p-3 is not allowed: a finite", ""},
    {"dropout: 0.1", "dropout: 1.5", "f.yaml:2: model.dropout: value 1.5 is not allowed: 0 to less than 1", ""},
    {"dropout: 0.1", "dropout: 0.1.2", "f.yaml:2: model.dropout: value 0.1.2 is not allowed: a finite", ""},
    {"clip: 0.5", "clip: e5", "f.yaml:7: optimizer.clip: value e5 is not allowed: a finite", ""},
    {"clip: 0.5", "clip: 1e", "f.yaml:7: optimizer.clip: value 1e is not allowed: a finite", ""},
    {"weight_decay: 0.2", "weight_decay: -1", "f.yaml:7: optimizer.weight_decay: value -1 is not allowed: 0 to 1000",
     ""},
    {"eps: 1e-9", "eps: 0", "f.yaml:6: optimizer.eps: value 0 is not allowed: 1e-30 to 1", ""},
    /* words */
    {"family: gpt2", "family: bert", "f.yaml:2: model.family: value bert is not allowed: gpt2 or llama", ""},
    {"tokens: bytes", "tokens: words", "f.yaml:3: data.tokens: value words is not allowed: bytes, llmc or megatron",
     ""},
    {"kind: adamw", "kind: sgd", "f.yaml:6: optimizer.kind: value sgd is not allowed: adamw", ""},
    {"numerics:   fast", "numerics: Exact", "f.yaml:12: numerics: value Exact is not allowed: exact or fast", ""},
    {"compute:    bf16", "compute: fp16", "f.yaml:15: compute: value fp16 is not allowed: fp32 or bf16", ""},
    {"compute:    bf16", "compute: BF16", "f.yaml:15: compute: value BF16 is not allowed: fp32 or bf16", ""},
    {"compute:    bf16", "compute: [fp32]", "f.yaml:15: compute: a list is not allowed: a single value", ""},
    {"data_tls:   true", "data_tls: on", "f.yaml:14: data_tls: value on is not allowed: true or false", ""},
    {"kind: shared", "kind: s3", "f.yaml:10: checkpoint.kind: value s3 is not allowed: shared or local", ""},
    {"every: 100", "every: automatic", "f.yaml:10: checkpoint.every: value automatic is not allowed: a whole number",
     ""},
    {"every: 100", "every: auto", "f.yaml:10: checkpoint.keep_every: value 500 is not allowed: 0 with", "auto"},
    {"optimizer_sharding: true", "optimizer_sharding: yes",
     "f.yaml:8: parallel.optimizer_sharding: value yes is not allowed: true or false", ""},
    {"recompute: full", "recompute: all",
     "f.yaml:8: parallel.recompute: value all is not allowed: none, selective or full", ""},
    {"redundancy: none", "redundancy: raid", "f.yaml:8: parallel.redundancy: value raid is not allowed: none or buddy",
     ""},
    /* degrees */
    {"tp: auto", "tp: 2", "f.yaml:8: parallel.tp: value 2 is not allowed: a divisor of parallel.slices (1); use 1", ""},
    {"tp: auto", "tp: 0", "f.yaml:8: parallel.tp: value 0 is not allowed: auto, or a whole number of at least 1",
     "leave"},
    {"tp: auto", "tp: all", "f.yaml:8: parallel.tp: value all is not allowed: auto, or a whole number of at least 1",
     ""},
    {"tp: auto", "tp: -1", "f.yaml:8: parallel.tp: value -1 is not allowed: auto, or a whole number of at least 1", ""},
    {"pp: auto", "pp: 7", "f.yaml:8: parallel.pp: value 7 is not allowed: auto, or 1 to 6", ""},
    {"dp: 4", "dp: 9", "f.yaml:8: parallel.dp: value 9 is not allowed: auto, or 1 to 8", ""},
    {"dp: 4", "dp: 4294967296", "f.yaml:8: parallel.dp: value 4294967296 is not allowed", "4294967295"},
    {"slices: 1", "slices: 0", "f.yaml:8: parallel.slices: value 0 is not allowed", "at least 1"},
    {"slices: 1", "slices: 8", "f.yaml:8: parallel.slices: value 8 is not allowed: a divisor of model.heads (6)",
     "; use 2"},
    {"slices: 1", "slices: 3", "f.yaml:8: parallel.slices: value 3 is not allowed: a power of two", "use 2"},
    {"max: 64", "max: 3", "f.yaml:9: workers.max: value 3 is not allowed: at least tp * pp * dp = 4", "raise it to 4"},
    /* families */
    {"dropout: 0.1", "kv_heads: 3", "f.yaml:2: model.kv_heads: value 3 is not allowed: model.heads (6) for gpt2", ""},
    {"dropout: 0.1", "kv_heads: 0", "f.yaml:2: model.kv_heads: value 0 is not allowed: a whole number of at least 1",
     ""},
    {"dropout: 0.1", "hidden: 100", "f.yaml:2: model.hidden: value 100 is not allowed: 4 * model.channels", ""},
    {"dropout: 0.1", "rope_base: 1e4", "f.yaml:2: model.rope_base: value 10000 is not allowed: 0 for gpt2", ""},
    {"family: gpt2", "family: llama", "f.yaml:2: model.hidden: is missing", "8/3"},
    {"family: gpt2", "family: llama, hidden: 64", "f.yaml:2: model.dropout: value 0.1", "0 for llama"},
    {"family: gpt2", "family: llama, hidden: 64, rope_base: 0", "f.yaml:2: model.rope_base: value 0 is not allowed",
     ""},
    /* names and paths */
    {"job: kjv", "job: King", "f.yaml:1: job: value 'King' is not allowed", "a-z"},
    {"job: kjv", "job: \"a\\nb\"", "f.yaml:1: job: value 'a?b' is not allowed", ""},
    {"job: kjv", "job: aaaaaaaaaabbbbbbbbbbccccccccccddddddddddeeeeeeeeeeffffffffffgggg", "f.yaml:1: job: value aaaa",
     "63"},
    {"job: kjv\n", "", "f.yaml: job: is missing", "job: my-job"},
    {"path: kjv.txt", "path: ''", "f.yaml:3: data.path: value (empty) is not allowed: a path", ""},
    {"path: kjv.txt", "path: ~/kjv.txt", "f.yaml:3: data.path: value ~/kjv.txt is not allowed: a path without ~", ""},
    {"path: kjv.txt", "path: \"a\\tb\"", "f.yaml:3: data.path: value '/jobs/a?b' is not allowed", "control"},
    {"path: kjv.txt, ", "", "f.yaml:3: data.path: is missing", ""},
    {"path: ckpt, ", "", "f.yaml:10: checkpoint.path: is missing", "leave the whole group out"},
    /* shape of the document */
    {"layers: 6", "layres: 6", "f.yaml:2: model.layres: unknown key; did you mean layers?", ""},
    {"steps: ", "step: ", "f.yaml:5: step: unknown key; did you mean steps?", ""},
    {"sequences: 32", "lr: 32", "f.yaml:4: batch.lr: unknown key; did you mean lr inside optimizer?", ""},
    {"sequences: 32", "seed: 32", "f.yaml:4: batch.seed: unknown key; did you mean seed at the top level?", ""},
    {"seed: ", "layers: ", "f.yaml:13: layers: unknown key; did you mean layers inside model?", ""},
    {"spares: 1", "colour_of_the_moon: 1",
     "f.yaml:9: workers.colour_of_the_moon: unknown key; allowed here: min, max, spares", ""},
    {"seed: ", "<<: ", "f.yaml:13: <<: unknown key; allowed here: job, model", ""},
    {"seed: ", "? [a, b]\n: ", "f.yaml:13: a key must be a plain name", ""},
    {"micro: 2", "micro: 2, micro: 4", "f.yaml:4: batch.micro: given twice, first at line 4", "keep one"},
    {"seed: ", "steps: ", "f.yaml:13: steps: given twice, first at line 5", "keep one"},
    {"numerics:   fast", "model: {layers: 1}", "f.yaml:12: model: given twice, first at line 2", ""},
    {"workers:    {min: 2, max: 64, spares: 1}", "workers: 4",
     "f.yaml:9: workers: a single value is not allowed: a group", ""},
    {"workers:    {min: 2, max: 64, spares: 1}",
     "workers: ", "f.yaml:9: workers: a single value is not allowed: a group", ""},
    {"workers:    {min: 2, max: 64, spares: 1}", "workers: [4]", "f.yaml:9: workers: a list is not allowed: a group",
     ""},
    {"betas: [0.8, 0.99]", "betas: 0.9", "f.yaml:6: optimizer.betas: a single value is not allowed: a list of two", ""},
    {"betas: [0.8, 0.99]", "betas: [0.9]", "f.yaml:6: optimizer.betas: a list of another length", "two numbers"},
    {"betas: [0.8, 0.99]", "betas: [0.9, 0.9, 0.9]", "f.yaml:6: optimizer.betas: a list of another length", ""},
    {"betas: [0.8, 0.99]", "betas: [0.9, x]", "f.yaml:6: optimizer.betas[1]: value x is not allowed: a finite", ""},
    {"betas: [0.8, 0.99]", "betas: [0.9,\n 1.5]",
     "f.yaml:7: optimizer.betas[1]: value 1.5 is not allowed: 0 to less than 1", ""},
    {"betas: [0.8, 0.99]", "betas: [[0.9], 1]", "f.yaml:6: optimizer.betas", "a single value"},
    {"job: kjv", "job: &x kjv", "f.yaml:1: anchors and aliases", "write the value out"},
    {"job: kjv", "job: *x", "f.yaml:1: anchors and aliases", ""},
    {"workers:    {min", "workers: &w {min", "f.yaml:9: anchors and aliases", ""},
    {"model:      {family", "model: &m {self: *m, family", "f.yaml:2: anchors and aliases", ""},
    {"job: kjv", "job: !secret kjv", "f.yaml:1: tags (!) are not allowed", ""},
    {"seed: ", "---\nseed: ", "f.yaml:13: a second document", "---"},
    {"job: kjv", "job: {a: {b: {c: {d: {e: 1}}}}}", "f.yaml:1: nested more than 4 deep", ""},
    {"job: kjv", "job: 'kjv", "f.yaml:", "not valid YAML"},
    {"job: kjv", "job: [kjv", "f.yaml:", "not valid YAML"},
    {"batch:      {", "  batch: {", "f.yaml:4: not valid YAML", "indentation"},
    {"steps:      1000", "steps:\t1000\n\tx: 1", "f.yaml:6: not valid YAML", "column"},
    {NULL, "", "f.yaml: empty", "docs/job-file.md"},
    {NULL, " \n\n\t ", "f.yaml: empty", ""},
    {NULL, "# nothing\n", "f.yaml: holds no fields", ""},
    {NULL, "just words\n", "f.yaml: holds no fields", ""},
    {NULL, "- a\n- b\n", "f.yaml: the file: a list is not allowed: a group of fields", "job: NAME"},
    {NULL, "\xff\xfe\x01\x02\x03", "f.yaml:1: not text", "UTF-8"},
    {NULL, "job: \xc3\x28\n", "f.yaml:1: not text", "UTF-8"},
    {NULL, "job: a\n", "f.yaml: model: is missing", "layers"},
    /* contradictions */
    {"heads: 6", "heads: 5", "f.yaml:2: model.channels: value 384 is not allowed: a multiple of model.heads (5)", ""},
    {"vocab: 256", "vocab: 255", "f.yaml:2: model.vocab: value 255 is not allowed: at least 256", ""},
    {"micro: 2", "micro: 3", "f.yaml:4: batch.sequences: value 32 is not allowed: a multiple of batch.micro",
     "use 30 or 36"},
    {"length: 128", "length: 512", "f.yaml:4: batch.length: value 512 is not allowed: 1 to 256", ""},
    {"warmup: 50", "warmup: 5000", "f.yaml:6: optimizer.warmup: value 5000 is not allowed: 0 to 1000", ""},
    {"min_lr: 6.0e-5", "min_lr: 6.0e-3", "f.yaml:6: optimizer.min_lr: value 0.006 is not allowed: 0 to optimizer.lr",
     ""},
    {"min: 2", "min: 65", "f.yaml:9: workers.min: value 65 is not allowed: at most workers.max (64)", ""},
    {"min: 2", "min: 25", "f.yaml:9: workers.min: value 25 is not allowed: at most the 24 workers", ""},
    {"keep: 7", "keep: 0", "f.yaml:10: checkpoint.keep: value 0 is not allowed: 1 to 100000", ""},
    {"keep_every: 500", "keep_every: 250", "f.yaml:10: checkpoint.keep_every: value 250 is not allowed: a multiple",
     ""},
    {"holdout: 0.01", "holdout: 0", "f.yaml:11: eval.every: value 50 is not allowed: 0 when data.holdout is 0", ""},
    {"every: 50, ", "", "f.yaml:11: eval.every: is missing", ""},
};

static char *replaced(const struct bad *bad)
{
    if (!bad->find)
        return strdup(bad->put);
    const char *at = strstr(good, bad->find);
    if (!at)
        fail_msg("'%s' is not in the good file", bad->find);
    char *text = malloc(sizeof good + strlen(bad->put) + 1);
    assert_non_null(text);
    sprintf(text, "%.*s%s%s", (int)(at - good), good, bad->put, at + strlen(bad->find));
    return text;
}

static void check_one_line(const struct mu_error *err)
{
    assert_true(err->text[0] != 0 && strlen(err->text) < MU_ERROR_TEXT_SIZE - 1);
    for (const char *c = err->text; *c; c++)
        if ((unsigned char)*c < 0x20)
            fail_msg("control character in '%s'", err->text);
}

static void test_job_file_bad_files_give_one_clear_line(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bads / sizeof bads[0]; i++) {
        char *text = replaced(&bads[i]);
        struct mu_job_spec s;
        memset(&s, 0x5a, sizeof s);
        struct mu_job_spec untouched = s;
        struct mu_error err = {0};
        enum mu_status status = parse(text, &s, &err);
        if (status != MU_ERR_INVALID || err.status != MU_ERR_INVALID)
            fail_msg("'%s' -> status %s: %s", bads[i].put, mu_status_name(status), err.text);
        if (strncmp(err.text, bads[i].begins, strlen(bads[i].begins)) != 0 || !strstr(err.text, bads[i].contains))
            fail_msg("'%s' gave\n  '%s', expected\n  '%s' ... '%s'", bads[i].put, err.text, bads[i].begins,
                     bads[i].contains);
        check_one_line(&err);
        assert_memory_equal(&s, &untouched, sizeof s);
        assert_int_equal(parse(text, &s, NULL), MU_ERR_INVALID);
        free(text);
    }
}

static void test_job_file_long_values_and_keys_are_cut(void **state)
{
    (void)state;
    char *text = malloc(40000);
    assert_non_null(text);
    char junk[3001];
    memset(junk, 'x', 3000);
    junk[3000] = 0;
    static const char *const shapes[] = {"layers: %s", "%s: 6", "layers: \"\\u00e9%s\""};
    for (size_t i = 0; i < 3; i++) {
        const char *at = strstr(good, "layers: 6");
        char middle[4000];
        snprintf(middle, sizeof middle, shapes[i], junk);
        sprintf(text, "%.*s%s%s", (int)(at - good), good, middle, at + strlen("layers: 6"));
        struct mu_job_spec s;
        struct mu_error err = {0};
        assert_int_equal(parse(text, &s, &err), MU_ERR_INVALID);
        check_one_line(&err);
    }
    /* Many keys, deep nesting and a huge flow sequence end quickly and in one line. */
    text[0] = 0;
    for (size_t length = 0, i = 0; i < 2000; i++)
        length += (size_t)sprintf(text + length, "key%zu: 1\n", i);
    struct mu_job_spec s;
    struct mu_error err = {0};
    assert_int_equal(parse(text, &s, &err), MU_ERR_INVALID);
    assert_non_null(strstr(err.text, "more than 256 keys"));
    memset(text, '[', 30000);
    text[30000] = 0;
    assert_int_equal(parse(text, &s, &err), MU_ERR_INVALID);
    assert_non_null(strstr(err.text, "nested"));
    memset(text, '{', 30000);
    assert_int_equal(parse(text, &s, &err), MU_ERR_INVALID);
    check_one_line(&err);
    free(text);
}

/* ---- Files ---- */

struct scratch {
    char dir[64];
};

static int make_scratch(void **state)
{
    struct scratch *s = calloc(1, sizeof *s);
    if (!s)
        return -1;
    strcpy(s->dir, "/tmp/mu-job-file-XXXXXX");
    *state = s;
    return mkdtemp(s->dir) ? 0 : -1;
}

static int remove_scratch(void **state)
{
    struct scratch *s = *state;
    static const char *const names[] = {"/job.yaml", "/big.yaml", "/zero.yaml", "/link.yaml"};
    char path[128];
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        snprintf(path, sizeof path, "%s%s", s->dir, names[i]);
        unlink(path);
    }
    int failed = rmdir(s->dir);
    free(s);
    return failed;
}

static void write_file(const char *path, const void *data, size_t size_bytes)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, size_bytes, file), size_bytes);
    assert_int_equal(fclose(file), 0);
}

static void test_job_file_relative_paths_start_at_the_job_file(void **state)
{
    struct scratch *scratch = *state;
    char path[128], expected[128];
    snprintf(path, sizeof path, "%s/job.yaml", scratch->dir);
    write_file(path, good, strlen(good));
    struct mu_job_spec s;
    struct mu_error err = {0};
    if (mu_job_file_read(path, &s, &err))
        fail_msg("%s", err.text);
    snprintf(expected, sizeof expected, "%s/kjv.txt", scratch->dir);
    assert_string_equal(s.data.path, expected);
    snprintf(expected, sizeof expected, "%s/ckpt", scratch->dir);
    assert_string_equal(s.checkpoint.path, expected);
}

static void test_job_file_unreadable_files_are_named(void **state)
{
    struct scratch *scratch = *state;
    char path[128];
    struct mu_job_spec s;
    struct mu_error err = {0};

    snprintf(path, sizeof path, "%s/none.yaml", scratch->dir);
    assert_int_equal(mu_job_file_read(path, &s, &err), MU_ERR_NOT_FOUND);
    assert_non_null(strstr(err.text, path));

    assert_int_equal(mu_job_file_read(scratch->dir, &s, &err), MU_ERR_INVALID);
    assert_non_null(strstr(err.text, "is a directory"));

    char *big = malloc(MU_JOB_FILE_SIZE_MAX + 100);
    assert_non_null(big);
    memset(big, '#', MU_JOB_FILE_SIZE_MAX + 100);
    snprintf(path, sizeof path, "%s/big.yaml", scratch->dir);
    write_file(path, big, MU_JOB_FILE_SIZE_MAX + 100);
    assert_int_equal(mu_job_file_read(path, &s, &err), MU_ERR_LIMIT);
    assert_non_null(strstr(err.text, "larger than 65536 bytes"));
    free(big);

    snprintf(path, sizeof path, "%s/zero.yaml", scratch->dir);
    write_file(path, "job: \0\0\0", 8);
    assert_int_equal(mu_job_file_read(path, &s, &err), MU_ERR_INVALID);
    assert_non_null(strstr(err.text, "zero bytes"));

    snprintf(path, sizeof path, "%s/link.yaml", scratch->dir);
    assert_int_equal(symlink("link.yaml", path), 0);
    assert_int_equal(mu_job_file_read(path, &s, &err), MU_ERR_IO);
    check_one_line(&err);
}

/* The file of the project at `name`. */
static void project_path(const char *name, char *out, size_t out_size)
{
    snprintf(out, out_size, "%s/../../%s", MU_TEST_DATA, name);
}

static void test_job_file_examples_are_valid(void **state)
{
    (void)state;
    static const char *const names[] = {"examples/kjv.yaml", "examples/tiny.yaml", "examples/llama.yaml",
                                        "examples/gpt2-bf16.yaml"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char path[512];
        project_path(names[i], path, sizeof path);
        struct mu_job_spec s;
        struct mu_error err = {0};
        if (mu_job_file_read(path, &s, &err))
            fail_msg("%s", err.text);
        assert_int_equal(mu_job_leaves(&s), 8);
    }
}

/* Every field that `good` uses (it uses all) has a row in the documentation. */
static void test_job_file_every_field_is_documented(void **state)
{
    (void)state;
    static const char *const fields[] = {"job",
                                         "model.family",
                                         "model.layers",
                                         "model.heads",
                                         "model.kv_heads",
                                         "model.hidden",
                                         "model.rope_base",
                                         "model.channels",
                                         "model.context",
                                         "model.vocab",
                                         "model.dropout",
                                         "data.path",
                                         "data.tokens",
                                         "data.holdout",
                                         "batch.sequences",
                                         "batch.micro",
                                         "batch.accumulate",
                                         "batch.length",
                                         "steps",
                                         "optimizer.kind",
                                         "optimizer.lr",
                                         "optimizer.min_lr",
                                         "optimizer.warmup",
                                         "optimizer.betas",
                                         "optimizer.eps",
                                         "optimizer.weight_decay",
                                         "optimizer.clip",
                                         "parallel.tp",
                                         "parallel.pp",
                                         "parallel.dp",
                                         "parallel.slices",
                                         "parallel.optimizer_sharding",
                                         "parallel.recompute",
                                         "parallel.redundancy",
                                         "workers.min",
                                         "workers.max",
                                         "workers.spares",
                                         "checkpoint.path",
                                         "checkpoint.kind",
                                         "checkpoint.every",
                                         "checkpoint.keep",
                                         "checkpoint.keep_every",
                                         "eval.every",
                                         "eval.sequences",
                                         "numerics",
                                         "compute",
                                         "data_tls",
                                         "seed"};
    char path[512], row[64];
    project_path("docs/job-file.md", path, sizeof path);
    char *text = calloc(1, 65536);
    FILE *file = fopen(path, "rb");
    assert_non_null(text);
    assert_non_null(file);
    assert_true(fread(text, 1, 65535, file) > 1000);
    fclose(file);
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        snprintf(row, sizeof row, "\n| `%s` |", fields[i]);
        if (!strstr(text, row))
            fail_msg("docs/job-file.md has no row for %s", fields[i]);
    }
    free(text);
}

/* ---- Mutations ---- */

static size_t mutate(char *text, size_t length, size_t capacity, uint64_t *seed)
{
    static const char alphabet[] = "{}[]:,&*!|>'\"%@`#-? \n\tae0129._~\x80\xff";
    for (uint64_t edits = 1 + mu_splitmix64(seed) % 4; edits > 0 && length > 1; edits--) {
        size_t at = mu_splitmix64(seed) % length, other = mu_splitmix64(seed) % length;
        size_t span = 1 + mu_splitmix64(seed) % 12;
        switch (mu_splitmix64(seed) % 5) {
        case 0:
            text[at] = alphabet[mu_splitmix64(seed) % (sizeof alphabet - 1)];
            break;
        case 1: /* delete */
            span = span < length - at ? span : length - at;
            memmove(text + at, text + at + span, length - at - span);
            length -= span;
            break;
        case 2: /* copy a piece elsewhere */
            if (length + span < capacity && other + span <= length && at + span <= length) {
                char piece[16];
                memcpy(piece, text + other, span);
                memmove(text + at + span, text + at, length - at);
                memcpy(text + at, piece, span);
                length += span;
            }
            break;
        case 3: /* cut the end */
            length = at + 1;
            break;
        default:
            text[at] = (char)mu_splitmix64(seed);
        }
    }
    return length;
}

static void test_job_file_mutations_never_crash_and_explain_themselves(void **state)
{
    (void)state;
    uint64_t seed = 20261201;
    unsigned accepted = 0, refused = 0;
    for (int round = 0; round < 20000; round++) {
        char text[2 * sizeof good];
        size_t length = strlen(good);
        memcpy(text, good, length);
        length = mutate(text, length, sizeof text, &seed);
        char *exact = malloc(length); /* so that the sanitizer sees any read past the end */
        assert_non_null(exact);
        memcpy(exact, text, length);
        struct mu_job_spec s;
        struct mu_error err = {0};
        if (mu_job_file_parse("f.yaml", "/jobs", exact, length, &s, &err) == MU_OK) {
            assert_int_equal(mu_job_spec_check(&s, NULL), MU_OK);
            accepted++;
        } else {
            check_one_line(&err);
            assert_int_equal(strncmp(err.text, "f.yaml:", 7), 0);
            refused++;
        }
        free(exact);
    }
    assert_true(accepted > 100 && refused > 10000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_job_file_every_field_is_read),
        cmocka_unit_test(test_job_file_interval_may_be_automatic),
        cmocka_unit_test(test_job_file_llama_and_degrees_are_read),
        cmocka_unit_test(test_job_file_absent_fields_take_their_defaults),
        cmocka_unit_test(test_job_file_start_that_is_no_checkpoint_is_refused),
        cmocka_unit_test(test_job_file_bad_files_give_one_clear_line),
        cmocka_unit_test(test_job_file_long_values_and_keys_are_cut),
        cmocka_unit_test_setup_teardown(test_job_file_relative_paths_start_at_the_job_file, make_scratch,
                                        remove_scratch),
        cmocka_unit_test_setup_teardown(test_job_file_unreadable_files_are_named, make_scratch, remove_scratch),
        cmocka_unit_test(test_job_file_examples_are_valid),
        cmocka_unit_test(test_job_file_every_field_is_documented),
        cmocka_unit_test(test_job_file_mutations_never_crash_and_explain_themselves),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
