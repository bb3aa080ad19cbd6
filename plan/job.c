#include "plan/job.h"

#include <inttypes.h>
#include <string.h>

#include "common/fmath.h"
#include "common/hash.h"
#include "plan/text.h"

enum { SHOWN_SIZE = 100 }; /* most of a text value that an error line repeats */

void mu_job_spec_init(struct mu_job_spec *spec)
{
    *spec = (struct mu_job_spec){
        .model = {.family = MU_FAMILY_GPT2},
        .data = {.tokens = MU_TOKENS_BYTES},
        .batch = {.accumulate = 1},
        .optimizer =
            {.lr = 6e-4, .min_lr = 6e-5, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .clip = 1.0},
        .workers = {.min = 1, .max = MU_WORKERS_MAX},
        .checkpoint = {.kind = MU_CHECKPOINT_SHARED, .keep = 5},
        .numerics = MU_NUMERICS_EXACT,
        .seed = 1337,
    };
}

static enum mu_status check_uint(struct mu_error *err, const char *field, uint64_t value, uint64_t min, uint64_t max,
                                 const char *advice)
{
    if (value >= min && value <= max)
        return MU_OK;
    return mu_fail(err, MU_ERR_INVALID, "%s: value %" PRIu64 " is not allowed: %" PRIu64 " to %" PRIu64 "; %s", field,
                   value, min, max, advice);
}

/* `in_range` is the caller's comparison, written so that NaN fails it; `allowed` describes it. */
static enum mu_status check_real(struct mu_error *err, const char *field, double value, bool in_range,
                                 const char *allowed, const char *advice)
{
    if (in_range)
        return MU_OK;
    return mu_fail(err, MU_ERR_INVALID, "%s: value %.9g is not allowed: %s; %s", field, value, allowed, advice);
}

/* What of a text may be shown in one line: cut, control characters replaced. */
static const char *shown(const char *text, size_t capacity_bytes, char out[SHOWN_SIZE])
{
    size_t length = 0;
    for (; length < capacity_bytes && length < SHOWN_SIZE - 1 && text[length]; length++)
        out[length] = (unsigned char)text[length] < 0x20 || text[length] == 0x7f ? '?' : text[length];
    out[length] = 0;
    return out;
}

static enum mu_status check_name(const struct mu_job_spec *spec, struct mu_error *err)
{
    static const char first[] = "abcdefghijklmnopqrstuvwxyz0123456789";
    static const char others[] = "abcdefghijklmnopqrstuvwxyz0123456789._-";
    const char *name = spec->name;
    bool good = memchr(name, 0, MU_JOB_NAME_SIZE) && name[0] && strchr(first, name[0]);
    good = good && strspn(name, others) == strlen(name);
    if (good)
        return MU_OK;
    char text[SHOWN_SIZE];
    return mu_fail(
        err, MU_ERR_INVALID,
        "job: value '%s' is not allowed: 1 to %d of a-z 0-9 . _ - with a letter or digit first; choose another "
        "name",
        shown(name, MU_JOB_NAME_SIZE, text), MU_JOB_NAME_SIZE - 1);
}

static enum mu_status check_path(struct mu_error *err, const char *field, const char path[MU_PATH_SIZE])
{
    bool good = memchr(path, 0, MU_PATH_SIZE) && path[0] == '/';
    for (size_t i = 0; good && path[i]; i++)
        good = (unsigned char)path[i] >= 0x20 && path[i] != 0x7f;
    if (good)
        return MU_OK;
    char text[SHOWN_SIZE];
    return mu_fail(
        err, MU_ERR_INVALID,
        "%s: value '%s' is not allowed: an absolute path of at most %d bytes without control characters; give "
        "the full path",
        field, shown(path, MU_PATH_SIZE, text), MU_PATH_SIZE - 1);
}

static enum mu_status check_model(const struct mu_job_spec *spec, struct mu_error *err)
{
    const struct mu_model_config *m = &spec->model;
    enum mu_status status = MU_OK;
    if (m->family != MU_FAMILY_GPT2)
        return mu_fail(err, MU_ERR_INVALID, "model.family: value %d is not allowed: gpt2; use gpt2", (int)m->family);
    if ((status = check_uint(err, "model.layers", m->layers, 1, MU_LAYERS_MAX, "set the number of layers")) ||
        (status = check_uint(err, "model.heads", m->heads, 1, MU_HEADS_MAX, "set the attention heads of a layer")) ||
        (status = check_uint(err, "model.channels", m->channels, 1, MU_CHANNELS_MAX, "set the embedding width")) ||
        (status = check_uint(err, "model.context", m->context, 1, MU_CONTEXT_MAX, "set the longest sequence")) ||
        (status = check_uint(err, "model.vocab", m->vocab, 2, MU_VOCAB_MAX, "set the number of different tokens")) ||
        (status = check_real(err, "model.dropout", (double)m->dropout, m->dropout >= 0.0f && m->dropout < 1.0f,
                             "0 to less than 1", "use 0 for no dropout")))
        return status;
    if (m->channels % m->heads != 0)
        return mu_fail(err, MU_ERR_INVALID,
                       "model.channels: value %" PRIu32 " is not allowed: a multiple of model.heads (%" PRIu32
                       "); use %" PRIu32 " channels or another number of heads",
                       m->channels, m->heads, (m->channels / m->heads + 1) * m->heads);
    if (m->channels / m->heads > MU_HEAD_CHANNELS_MAX)
        return mu_fail(err, MU_ERR_INVALID,
                       "model.heads: value %" PRIu32 " is not allowed: channels / heads = %" PRIu32
                       ", at most %d; use more heads",
                       m->heads, m->channels / m->heads, MU_HEAD_CHANNELS_MAX);
    return MU_OK;
}

static enum mu_status check_data(const struct mu_job_spec *spec, struct mu_error *err)
{
    enum mu_status status = check_path(err, "data.path", spec->data.path);
    if (status)
        return status;
    if (spec->data.tokens != MU_TOKENS_BYTES && spec->data.tokens != MU_TOKENS_LLMC)
        return mu_fail(err, MU_ERR_INVALID,
                       "data.tokens: value %d is not allowed: bytes or llmc; use bytes for plain text, llmc for token "
                       "shards",
                       (int)spec->data.tokens);
    double holdout = spec->data.holdout;
    status = check_real(err, "data.holdout", holdout, holdout >= 0.0 && holdout <= 0.5, "0 to 0.5",
                        "use 0 to train on all data");
    if (status)
        return status;
    if (spec->data.tokens == MU_TOKENS_BYTES && spec->model.vocab < 256)
        return mu_fail(err, MU_ERR_INVALID,
                       "model.vocab: value %" PRIu32 " is not allowed: at least 256 when data.tokens is bytes; use 256",
                       spec->model.vocab);
    return MU_OK;
}

/* Elements of one head's keys, in whole attention tiles (64 tokens) and vector lanes (16 channels). */
static uint64_t attention_area(const struct mu_model_config *model, uint32_t length)
{
    uint64_t tokens = (length + 63ull) / 64 * 64, channels = (model->channels / model->heads + 15ull) / 16 * 16;
    return tokens * channels;
}

static enum mu_status check_batch(const struct mu_job_spec *spec, struct mu_error *err)
{
    uint32_t sequences = spec->batch.sequences, micro = spec->batch.micro, accumulate = spec->batch.accumulate;
    enum mu_status status = MU_OK;
    if ((status = check_uint(err, "batch.sequences", sequences, 1, MU_SEQUENCES_MAX, "set the sequences of a step")) ||
        (status = check_uint(err, "batch.micro", micro, 1, MU_MICRO_MAX, "set the sequences of a micro-batch")) ||
        (status = check_uint(err, "batch.accumulate", accumulate, 1, MU_ACCUMULATE_STEPS_MAX,
                             "set the micro-batches of a leaf")) ||
        (status = check_uint(err, "batch.length", spec->batch.length, 1, spec->model.context,
                             "a sequence cannot be longer than model.context")))
        return status;
    uint32_t length = spec->batch.length;
    if ((uint64_t)micro * length > MU_MICRO_BATCH_TOKENS_MAX)
        return mu_fail(err, MU_ERR_INVALID,
                       "batch.micro: value %" PRIu32
                       " is not allowed: at most %d tokens in a micro-batch of length %" PRIu32 "; use at most %" PRIu32
                       " sequences and raise accumulate",
                       micro, MU_MICRO_BATCH_TOKENS_MAX, length, MU_MICRO_BATCH_TOKENS_MAX / length);
    if (attention_area(&spec->model, length) > MU_ATTENTION_AREA_MAX)
        return mu_fail(err, MU_ERR_INVALID,
                       "batch.length: value %" PRIu32 " is not allowed: length * channels / heads (%" PRIu32
                       " a head) at most %d; use shorter sequences or more heads",
                       length, spec->model.channels / spec->model.heads, MU_ATTENTION_AREA_MAX);
    uint64_t leaf = (uint64_t)micro * accumulate;
    if (sequences % leaf != 0)
        return mu_fail(err, MU_ERR_INVALID,
                       "batch.sequences: value %" PRIu32 " is not allowed: a multiple of micro * accumulate (%" PRIu32
                       " * %" PRIu32 " = %" PRIu64 "); use %" PRIu64 " sequences or another micro or accumulate",
                       sequences, micro, accumulate, leaf, (sequences / leaf + 1) * leaf);
    if (sequences / leaf > MU_LEAVES_MAX)
        return mu_fail(err, MU_ERR_INVALID,
                       "batch.sequences: value %" PRIu32 " is not allowed: sequences / (micro * accumulate) = %" PRIu64
                       " leaves, 1 to %d; raise micro or accumulate",
                       sequences, sequences / leaf, MU_LEAVES_MAX);
    return MU_OK;
}

static enum mu_status check_optimizer(const struct mu_job_spec *spec, struct mu_error *err)
{
    double lr = spec->optimizer.lr, min_lr = spec->optimizer.min_lr, decay = spec->optimizer.weight_decay;
    double beta1 = spec->optimizer.beta1, beta2 = spec->optimizer.beta2;
    double eps = spec->optimizer.eps, clip = spec->optimizer.clip;
    enum mu_status status = MU_OK;
    if ((status = check_real(err, "optimizer.lr", lr, lr > 0.0 && lr <= 10.0, "more than 0, up to 10",
                             "typical are 1e-4 to 1e-3")) ||
        (status = check_real(err, "optimizer.min_lr", min_lr, min_lr >= 0.0 && min_lr <= lr, "0 to optimizer.lr",
                             "a tenth of lr is usual")) ||
        (status = check_uint(err, "optimizer.warmup", spec->optimizer.warmup, 0, spec->steps,
                             "the warm-up cannot be longer than steps")) ||
        (status = check_real(err, "optimizer.betas[0]", beta1, beta1 >= 0.0 && beta1 < 1.0, "0 to less than 1",
                             "0.9 is usual")) ||
        (status = check_real(err, "optimizer.betas[1]", beta2, beta2 >= 0.0 && beta2 < 1.0, "0 to less than 1",
                             "0.95 is usual")) ||
        (status = check_real(err, "optimizer.eps", eps, eps >= 1e-30 && eps <= 1.0, "1e-30 to 1", "1e-8 is usual")) ||
        (status = check_real(err, "optimizer.weight_decay", decay, decay >= 0.0 && decay <= 1000.0, "0 to 1000",
                             "0.1 is usual")) ||
        (status = check_real(err, "optimizer.clip", clip, clip >= 0.0 && clip <= 1e30, "0 to 1e30",
                             "use 0 for no clipping")))
        return status;
    return check_real(err, "optimizer.weight_decay", decay, lr * decay < 1.0, "lr * weight_decay below 1",
                      "else one step would turn the weights around");
}

static enum mu_status check_workers(const struct mu_job_spec *spec, struct mu_error *err)
{
    uint32_t min = spec->workers.min, max = spec->workers.max;
    enum mu_status status = MU_OK;
    if ((status = check_uint(err, "workers.min", min, 1, MU_WORKERS_MAX, "set the fewest workers to run with")) ||
        (status = check_uint(err, "workers.max", max, 1, MU_WORKERS_MAX, "set the most workers with a rank")) ||
        (status = check_uint(err, "workers.spares", spec->workers.spares, 0, MU_WORKERS_MAX, "use 0 for no spares")))
        return status;
    if (min > max)
        return mu_fail(err, MU_ERR_INVALID,
                       "workers.min: value %" PRIu32 " is not allowed: at most workers.max (%" PRIu32
                       "); lower min or raise max",
                       min, max);
    uint32_t leaves = mu_job_leaves(spec);
    if (min > leaves)
        return mu_fail(err, MU_ERR_INVALID,
                       "workers.min: value %" PRIu32 " is not allowed: at most the %" PRIu32
                       " leaves of a step, since each worker computes at least one; lower min or micro * accumulate",
                       min, leaves);
    return MU_OK;
}

static enum mu_status check_checkpoint(const struct mu_job_spec *spec, struct mu_error *err)
{
    uint64_t every = spec->checkpoint.every, keep_every = spec->checkpoint.keep_every;
    enum mu_status status = MU_OK;
    if (spec->checkpoint.kind == MU_CHECKPOINT_LOCAL)
        return mu_fail(err, MU_ERR_INVALID,
                       "checkpoint.kind: value local is not allowed: this version supports shared; use shared with a "
                       "directory that all workers see");
    if (spec->checkpoint.kind != MU_CHECKPOINT_SHARED)
        return mu_fail(err, MU_ERR_INVALID, "checkpoint.kind: value %d is not allowed: shared; use shared",
                       (int)spec->checkpoint.kind);
    if (spec->checkpoint.path[0] && (status = check_path(err, "checkpoint.path", spec->checkpoint.path)))
        return status;
    if ((status = check_uint(err, "checkpoint.every", every, 0, MU_STEPS_MAX, "use 0 for none between")) ||
        (status = check_uint(err, "checkpoint.keep", spec->checkpoint.keep, 1, MU_KEEP_MAX,
                             "the newest checkpoint is always kept")) ||
        (status = check_uint(err, "checkpoint.keep_every", keep_every, 0, MU_STEPS_MAX, "use 0 for none")))
        return status;
    if (!spec->checkpoint.path[0] && every > 0)
        return mu_fail(err, MU_ERR_INVALID,
                       "checkpoint.every: value %" PRIu64
                       " is not allowed: 0 when there is no checkpoint.path; give a path or leave every out",
                       every);
    if (every > 0 && keep_every % every != 0)
        return mu_fail(err, MU_ERR_INVALID,
                       "checkpoint.keep_every: value %" PRIu64
                       " is not allowed: a multiple of checkpoint.every (%" PRIu64
                       "), else no checkpoint falls on it; use %" PRIu64,
                       keep_every, every, (keep_every / every + 1) * every);
    return MU_OK;
}

static enum mu_status check_eval(const struct mu_job_spec *spec, struct mu_error *err)
{
    enum mu_status status = MU_OK;
    if ((status = check_uint(err, "eval.every", spec->eval.every, 0, MU_STEPS_MAX, "use 0 for no evaluation")) ||
        (status = check_uint(err, "eval.sequences", spec->eval.sequences, spec->eval.every > 0 ? 1 : 0,
                             MU_SEQUENCES_MAX, "set the held-out sequences of an evaluation")))
        return status;
    if (spec->eval.every > 0 && !(spec->data.holdout > 0.0))
        return mu_fail(
            err, MU_ERR_INVALID,
            "eval.every: value %" PRIu64
            " is not allowed: 0 when data.holdout is 0, since nothing is held out; set data.holdout, e.g. 0.01",
            spec->eval.every);
    return MU_OK;
}

enum mu_status mu_job_spec_check(const struct mu_job_spec *spec, struct mu_error *err)
{
    enum mu_status status = MU_OK;
    if ((status = check_name(spec, err)) || (status = check_model(spec, err)) || (status = check_data(spec, err)) ||
        (status = check_batch(spec, err)) ||
        (status = check_uint(err, "steps", spec->steps, 1, MU_STEPS_MAX, "set the steps of the whole job")) ||
        (status = check_optimizer(spec, err)) || (status = check_workers(spec, err)) ||
        (status = check_checkpoint(spec, err)) || (status = check_eval(spec, err)))
        return status;
    if (spec->numerics != MU_NUMERICS_EXACT && spec->numerics != MU_NUMERICS_FAST)
        return mu_fail(err, MU_ERR_INVALID,
                       "numerics: value %d is not allowed: exact or fast; use exact for the same bits on any workers",
                       (int)spec->numerics);
    return MU_OK;
}

uint32_t mu_job_leaves(const struct mu_job_spec *spec)
{
    uint64_t leaf = (uint64_t)spec->batch.micro * spec->batch.accumulate;
    MU_ASSERT(leaf > 0);
    return (uint32_t)(spec->batch.sequences / leaf);
}

double mu_job_learning_rate(const struct mu_job_spec *spec, uint64_t step)
{
    double lr = spec->optimizer.lr, min_lr = spec->optimizer.min_lr;
    uint64_t warmup = spec->optimizer.warmup;
    if (step < warmup)
        return lr * (double)(step + 1) / (double)warmup;
    if (step >= spec->steps)
        return min_lr;
    double t = (double)(step - warmup) / (double)(spec->steps - warmup);
    return min_lr + (lr - min_lr) * (1.0 + mu_fmath_cos(MU_PI * t)) / 2.0;
}

static void put_field(struct mu_text *text, const char *name, uint64_t value)
{
    mu_text_put(text, name);
    mu_text_put(text, "=");
    mu_text_put_uint(text, value);
    mu_text_put(text, "\n");
}

/* Reals go in as the 16 hexadecimal digits of their bits: lossless, and no decimal conversion has to agree anywhere. -0
 * counts as 0. */
static void put_real(struct mu_text *text, const char *name, double value)
{
    uint64_t bits;
    value = value == 0.0 ? 0.0 : value;
    memcpy(&bits, &value, sizeof bits);
    mu_text_put(text, name);
    mu_text_put(text, "=");
    mu_text_put_hex(text, bits);
    mu_text_put(text, "\n");
}

uint64_t mu_job_spec_hash(const struct mu_job_spec *spec)
{
    char buffer[2048];
    struct mu_text text;
    mu_text_init(&text, buffer, sizeof buffer);
    mu_text_put(&text, "muster job 1\n");
    put_field(&text, "model.family", (uint64_t)spec->model.family);
    put_field(&text, "model.layers", spec->model.layers);
    put_field(&text, "model.heads", spec->model.heads);
    put_field(&text, "model.channels", spec->model.channels);
    put_field(&text, "model.context", spec->model.context);
    put_field(&text, "model.vocab", spec->model.vocab);
    put_real(&text, "model.dropout", (double)spec->model.dropout);
    put_field(&text, "data.tokens", (uint64_t)spec->data.tokens);
    put_real(&text, "data.holdout", spec->data.holdout);
    put_field(&text, "batch.sequences", spec->batch.sequences);
    put_field(&text, "batch.micro", spec->batch.micro);
    put_field(&text, "batch.accumulate", spec->batch.accumulate);
    put_field(&text, "batch.length", spec->batch.length);
    put_field(&text, "steps", spec->steps);
    put_real(&text, "optimizer.lr", spec->optimizer.lr);
    put_real(&text, "optimizer.min_lr", spec->optimizer.min_lr);
    put_field(&text, "optimizer.warmup", spec->optimizer.warmup);
    put_real(&text, "optimizer.beta1", spec->optimizer.beta1);
    put_real(&text, "optimizer.beta2", spec->optimizer.beta2);
    put_real(&text, "optimizer.eps", spec->optimizer.eps);
    put_real(&text, "optimizer.weight_decay", spec->optimizer.weight_decay);
    put_real(&text, "optimizer.clip", spec->optimizer.clip);
    put_field(&text, "eval.every", spec->eval.every);
    put_field(&text, "eval.sequences", spec->eval.sequences);
    put_field(&text, "numerics", (uint64_t)spec->numerics);
    put_field(&text, "seed", spec->seed);
    MU_ASSERT(text.length + 1 < text.capacity);
    return mu_xxh3_64(buffer, text.length, 0);
}
