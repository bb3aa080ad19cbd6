/* Judging a job record: mu_job_spec_check. */
#include <inttypes.h>
#include <string.h>

#include "plan/amend.h"
#include "plan/layout.h"
#include "plan/text.h"

enum { SHOWN_SIZE = 100 }; /* most of a text value that an error line repeats */

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

/* What of a text may be shown in one line: cut between two characters, control characters replaced. */
static const char *shown(const char *text, size_t capacity_bytes, char out[SHOWN_SIZE])
{
    size_t length = 0;
    for (; length < capacity_bytes && length < SHOWN_SIZE - 1 && text[length]; length++)
        out[length] = (unsigned char)text[length] < 0x20 || text[length] == 0x7f ? '?' : text[length];
    if (length == SHOWN_SIZE - 1 && length < capacity_bytes)
        while (length > 0 && ((unsigned char)text[length] & 0xc0) == 0x80)
            length--;
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

/* ---- advice: the nearest values with which the job is allowed ---- */

typedef bool (*allows)(const struct mu_job_spec *spec, uint64_t value);

enum { ADVICE_SIZE = 64, TRIES_MAX = 10000 /* values of one side with which the whole job is judged */ };

/* A number of the job: where it is (a uint32_t), what its own rule allows. */
struct number {
    const char *name;
    size_t offset;
    uint64_t max;
    allows allowed;
};
#define NUMBER(path, field, max_value, rule)                                                                           \
    {                                                                                                                  \
        path, offsetof(struct mu_job_spec, field), max_value, rule                                                     \
    }

static bool works_with(const struct mu_job_spec *spec, const struct number *number, uint64_t value)
{
    struct mu_job_spec other = *spec;
    uint32_t narrow = (uint32_t)value;
    memcpy((char *)&other + number->offset, &narrow, sizeof narrow);
    if (other.model.family == MU_FAMILY_GPT2) /* follow from the others */
        other.model.kv_heads = other.model.hidden = 0;
    return mu_job_spec_check(&other, NULL) == MU_OK;
}

/* The next value from `value` on, downward or upward, that the number's rule allows, and with `whole` all others; 0:
 * there is none. */
static uint64_t next_allowed(const struct mu_job_spec *spec, const struct number *number, uint64_t value, bool up,
                             bool whole)
{
    uint32_t tries = 0;
    for (; value > 0 && value <= number->max; value += up ? 1 : UINT64_MAX) {
        if (!number->allowed(spec, value))
            continue;
        if (!whole || works_with(spec, number, value))
            return value;
        if (++tries == TRIES_MAX)
            break;
    }
    return 0;
}

/* "4 or 8": values that make the job allowed; where something else is wrong too, values that this rule allows. */
static const char *nearest(const struct mu_job_spec *spec, const struct number *number, uint64_t value,
                           char out[ADVICE_SIZE])
{
    uint64_t below = 0, above = 0, from = value < number->max ? value : number->max;
    for (int whole = 1; whole >= 0 && !below && !above; whole--) {
        below = next_allowed(spec, number, from, false, whole);
        above = next_allowed(spec, number, value + 1, true, whole);
    }
    struct mu_text text;
    mu_text_init(&text, out, ADVICE_SIZE);
    if (below > 0)
        mu_text_put_uint(&text, below);
    if (below > 0 && above > 0)
        mu_text_put(&text, " or ");
    if (above > 0)
        mu_text_put_uint(&text, above);
    return text.length ? out : NULL;
}

/* Every slice holds at least one row of the vocabulary, when each but the last holds ceil(vocab / slices). */
static bool vocab_is_cut(const struct mu_model_config *m, uint64_t slices)
{
    return (slices - 1) * ((m->vocab + slices - 1) / slices) < m->vocab;
}

static bool slices_allowed(const struct mu_job_spec *spec, uint64_t value)
{
    const struct mu_model_config *m = &spec->model;
    return (value & (value - 1)) == 0 && m->heads % value == 0 && m->kv_heads % value == 0 && m->hidden % value == 0 &&
           vocab_is_cut(m, value);
}

static bool kv_heads_allowed(const struct mu_job_spec *spec, uint64_t value)
{
    return spec->model.heads % value == 0;
}

static bool channels_allowed(const struct mu_job_spec *spec, uint64_t value)
{
    const struct mu_model_config *m = &spec->model;
    return value % m->heads == 0 && value / m->heads <= MU_HEAD_CHANNELS_MAX &&
           (m->family != MU_FAMILY_LLAMA || value / m->heads % 2 == 0);
}

static bool sequences_allowed(const struct mu_job_spec *spec, uint64_t value)
{
    uint64_t leaf = (uint64_t)spec->batch.micro * spec->batch.accumulate;
    return value % leaf == 0 && value / leaf <= MU_LEAVES_MAX;
}

static bool micro_allowed(const struct mu_job_spec *spec, uint64_t value)
{
    return value * spec->batch.length % spec->model.slices == 0 &&
           value * spec->batch.length <= MU_MICRO_BATCH_TOKENS_MAX;
}

/* Elements of one head's keys, in whole attention tiles (64 tokens) and vector lanes (16 channels). */
static uint64_t attention_area(const struct mu_model_config *model, uint64_t length)
{
    uint64_t tokens = (length + 63) / 64 * 64, channels = (model->channels / model->heads + 15ull) / 16 * 16;
    return tokens * channels;
}

static bool length_allowed(const struct mu_job_spec *spec, uint64_t value)
{
    return attention_area(&spec->model, value) <= MU_ATTENTION_AREA_MAX;
}

static bool tp_allowed(const struct mu_job_spec *spec, uint64_t value)
{
    return spec->model.slices % value == 0;
}

static bool pp_allowed(const struct mu_job_spec *spec, uint64_t value)
{
    return value <= spec->model.layers && value <= MU_STAGES_MAX;
}

static bool dp_allowed(const struct mu_job_spec *spec, uint64_t value)
{
    return value <= mu_job_leaves(spec);
}

static const struct number slices_number = NUMBER("parallel.slices", model.slices, MU_SLICES_MAX, slices_allowed),
                           kv_heads_number = NUMBER("model.kv_heads", model.kv_heads, MU_HEADS_MAX, kv_heads_allowed),
                           channels_number =
                               NUMBER("model.channels", model.channels, MU_CHANNELS_MAX, channels_allowed),
                           sequences_number =
                               NUMBER("batch.sequences", batch.sequences, MU_SEQUENCES_MAX, sequences_allowed),
                           micro_number = NUMBER("batch.micro", batch.micro, MU_MICRO_MAX, micro_allowed),
                           length_number = NUMBER("batch.length", batch.length, MU_CONTEXT_MAX, length_allowed),
                           tp_number = NUMBER("parallel.tp", parallel.tp, MU_SLICES_MAX, tp_allowed),
                           pp_number = NUMBER("parallel.pp", parallel.pp, MU_STAGES_MAX, pp_allowed),
                           dp_number = NUMBER("parallel.dp", parallel.dp, MU_LEAVES_MAX, dp_allowed);

/* One line for a value that does not go with another field. Advice costs time, and asks this file again: only for
 * somebody who reads it. */
static enum mu_status refuse(struct mu_error *err, const struct mu_job_spec *spec, const struct number *number,
                             const char *rule, uint64_t rule_value)
{
    char near[ADVICE_SIZE];
    uint32_t value;
    if (!err)
        return MU_ERR_INVALID;
    memcpy(&value, (const char *)spec + number->offset, sizeof value);
    const char *advice = nearest(spec, number, value, near);
    return mu_fail(err, MU_ERR_INVALID, "%s: value %" PRIu32 " is not allowed: %s (%" PRIu64 "); %s%s", number->name,
                   value, rule, rule_value, advice ? "use " : "change that", advice ? advice : "");
}

static enum mu_status check_family(const struct mu_model_config *m, struct mu_error *err)
{
    enum mu_status status = MU_OK;
    if (m->family == MU_FAMILY_LLAMA) {
        if ((status = check_uint(err, "model.kv_heads", m->kv_heads, 1, m->heads,
                                 "set the heads of keys and values, or leave it out for as many as heads")) ||
            (status = check_uint(err, "model.hidden", m->hidden, 1, MU_HIDDEN_MAX, "set the width of the MLP")) ||
            (status = check_real(err, "model.rope_base", m->rope_base, m->rope_base > 1.0 && m->rope_base <= 1e12,
                                 "more than 1, up to 1e12", "10000 and 500000 are usual")))
            return status;
        return check_real(err, "model.dropout", (double)m->dropout, m->dropout == 0.0f, "0 for llama", "leave it out");
    }
    if (m->kv_heads != m->heads)
        return mu_fail(err, MU_ERR_INVALID,
                       "model.kv_heads: value %" PRIu32 " is not allowed: model.heads (%" PRIu32
                       ") for gpt2; leave it out, or use family llama",
                       m->kv_heads, m->heads);
    if (m->hidden != 4 * m->channels)
        return mu_fail(err, MU_ERR_INVALID,
                       "model.hidden: value %" PRIu32 " is not allowed: 4 * model.channels (%" PRIu32
                       ") for gpt2; leave it out, or use family llama",
                       m->hidden, 4 * m->channels);
    return check_real(err, "model.rope_base", m->rope_base, m->rope_base == 0.0, "0 for gpt2",
                      "leave it out, or use family llama");
}

static enum mu_status check_heads(const struct mu_job_spec *spec, struct mu_error *err)
{
    const struct mu_model_config *m = &spec->model;
    if (m->channels % m->heads != 0)
        return refuse(err, spec, &channels_number, "a multiple of model.heads", m->heads);
    if (m->channels / m->heads > MU_HEAD_CHANNELS_MAX)
        return refuse(err, spec, &channels_number, "at most 256 for each of model.heads", m->heads);
    if (m->family == MU_FAMILY_LLAMA && m->channels / m->heads % 2 != 0)
        return refuse(err, spec, &channels_number,
                      "an even number for each of model.heads, since rotary positions turn pairs", m->heads);
    if (m->heads % m->kv_heads != 0)
        return refuse(err, spec, &kv_heads_number, "a divisor of model.heads", m->heads);
    return MU_OK;
}

/* What the slices cut must come out even. The model is what it is: it is their number that is wrong. */
static enum mu_status check_slices(const struct mu_job_spec *spec, struct mu_error *err)
{
    const struct mu_model_config *m = &spec->model;
    uint32_t slices = m->slices;
    if (m->heads % slices != 0)
        return refuse(err, spec, &slices_number, "a divisor of model.heads", m->heads);
    if (m->kv_heads % slices != 0)
        return refuse(err, spec, &slices_number, "a divisor of model.kv_heads", m->kv_heads);
    if (m->hidden % slices != 0)
        return refuse(err, spec, &slices_number, "a divisor of model.hidden", m->hidden);
    if (!vocab_is_cut(m, slices))
        return refuse(
            err, spec, &slices_number,
            "so few that each has tokens, when each but the last has ceil(model.vocab / slices) of model.vocab",
            m->vocab);
    return MU_OK;
}

static enum mu_status check_model(const struct mu_job_spec *spec, struct mu_error *err)
{
    const struct mu_model_config *m = &spec->model;
    enum mu_status status = MU_OK;
    if (m->family != MU_FAMILY_GPT2 && m->family != MU_FAMILY_LLAMA)
        return mu_fail(err, MU_ERR_INVALID, "model.family: value %d is not allowed: gpt2 or llama; use gpt2",
                       (int)m->family);
    if ((status = check_uint(err, "model.layers", m->layers, 1, MU_LAYERS_MAX, "set the number of layers")) ||
        (status = check_uint(err, "model.heads", m->heads, 1, MU_HEADS_MAX, "set the attention heads of a layer")) ||
        (status = check_uint(err, "model.channels", m->channels, 1, MU_CHANNELS_MAX, "set the embedding width")) ||
        (status = check_uint(err, "model.context", m->context, 1, MU_CONTEXT_MAX, "set the longest sequence")) ||
        (status = check_uint(err, "model.vocab", m->vocab, 2, MU_VOCAB_MAX, "set the number of different tokens")) ||
        (status = check_real(err, "model.dropout", (double)m->dropout, m->dropout >= 0.0f && m->dropout < 1.0f,
                             "0 to less than 1", "use 0 for no dropout")) ||
        (status = check_family(m, err)))
        return status;
    if (m->slices < 1 || m->slices > MU_SLICES_MAX || (m->slices & (m->slices - 1)) != 0)
        return refuse(err, spec, &slices_number, "a power of two up to the limit", MU_SLICES_MAX);
    return check_heads(spec, err);
}

static enum mu_status check_data(const struct mu_job_spec *spec, struct mu_error *err)
{
    enum mu_status status = check_path(err, "data.path", spec->data.path);
    if (status)
        return status;
    if (spec->data.tokens != MU_TOKENS_BYTES && spec->data.tokens != MU_TOKENS_LLMC &&
        spec->data.tokens != MU_TOKENS_MEGATRON)
        return mu_fail(err, MU_ERR_INVALID,
                       "data.tokens: value %d is not allowed: bytes, llmc or megatron; use bytes for plain text, llmc "
                       "or megatron for files of tokens",
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
    uint64_t leaf = (uint64_t)micro * accumulate;
    if ((uint64_t)micro * spec->batch.length > MU_MICRO_BATCH_TOKENS_MAX)
        return refuse(err, spec, &micro_number, "at most 1048576 tokens in a micro-batch of batch.length",
                      spec->batch.length);
    if (!length_allowed(spec, spec->batch.length))
        return refuse(err, spec, &length_number, "length * channels / heads at most 262144, with channels / heads",
                      spec->model.channels / spec->model.heads);
    if ((uint64_t)micro * spec->batch.length % spec->model.slices != 0)
        return refuse(err, spec, &micro_number, "micro * batch.length a multiple of parallel.slices",
                      spec->model.slices);
    if (sequences % leaf != 0)
        return refuse(err, spec, &sequences_number, "a multiple of batch.micro * batch.accumulate", leaf);
    if (sequences / leaf > MU_LEAVES_MAX)
        return refuse(err, spec, &sequences_number, "at most 65536 leaves of batch.micro * batch.accumulate", leaf);
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
                       "); lower min to %" PRIu32 " or raise max",
                       min, max, max);
    return MU_OK;
}

/* A degree that is given (not 0, which is auto). */
static enum mu_status check_degree(const struct mu_job_spec *spec, const struct number *number, uint32_t degree,
                                   uint32_t max, const char *reason, uint32_t reason_value, struct mu_error *err)
{
    char rule[128];
    struct mu_text text;
    if (degree == 0 || number->allowed(spec, degree))
        return MU_OK;
    mu_text_init(&text, rule, sizeof rule);
    mu_text_put(&text, "auto, or 1 to ");
    mu_text_put_uint(&text, max);
    mu_text_put(&text, ", since ");
    mu_text_put(&text, reason);
    return refuse(err, spec, number, rule, reason_value);
}

static enum mu_status check_degrees(const struct mu_job_spec *spec, uint32_t stages_max, struct mu_error *err)
{
    uint32_t leaves = mu_job_leaves(spec);
    enum mu_status status = MU_OK;
    if (spec->parallel.tp > 0 && !tp_allowed(spec, spec->parallel.tp))
        return refuse(err, spec, &tp_number, "a divisor of parallel.slices", spec->model.slices);
    if ((status = check_degree(spec, &pp_number, spec->parallel.pp, stages_max, "a stage has at least one layer",
                               spec->model.layers, err)))
        return status;
    return check_degree(spec, &dp_number, spec->parallel.dp, leaves, "each replica computes at least one leaf", leaves,
                        err);
}

/* Degrees against the number of workers: the fewest ranks that can work, and the most. */
static enum mu_status check_world(const struct mu_job_spec *spec, uint32_t stages_max, struct mu_error *err)
{
    uint32_t tp = spec->parallel.tp, pp = spec->parallel.pp, dp = spec->parallel.dp;
    uint32_t replicas_max = mu_job_leaves(spec);
    uint64_t fewest = (uint64_t)(tp ? tp : 1) * (pp ? pp : 1) * (dp ? dp : 1);
    uint64_t most = (uint64_t)(tp ? tp : spec->model.slices) * (pp ? pp : stages_max) * (dp ? dp : replicas_max);
    if (fewest > spec->workers.max)
        return mu_fail(err, MU_ERR_INVALID,
                       "workers.max: value %" PRIu32 " is not allowed: at least tp * pp * dp = %" PRIu64
                       " (as given); raise it to %" PRIu64 " or lower a degree",
                       spec->workers.max, fewest, fewest);
    if (spec->workers.min > most)
        return mu_fail(err, MU_ERR_INVALID,
                       "workers.min: value %" PRIu32 " is not allowed: at most the %" PRIu64
                       " workers that can have a part of a step (%" PRIu32 " leaves, %" PRIu32 " slices, %" PRIu32
                       " layers, parallel as given); lower min to %" PRIu64,
                       spec->workers.min, most, mu_job_leaves(spec), spec->model.slices, spec->model.layers, most);
    return MU_OK;
}

static enum mu_status check_parallel(const struct mu_job_spec *spec, struct mu_error *err)
{
    uint32_t stages_max = spec->model.layers < MU_STAGES_MAX ? spec->model.layers : MU_STAGES_MAX;
    enum mu_status status = MU_OK;
    if ((status = check_degrees(spec, stages_max, err)) || (status = check_world(spec, stages_max, err)))
        return status;
    if (spec->parallel.recompute < MU_RECOMPUTE_NONE || spec->parallel.recompute > MU_RECOMPUTE_FULL)
        return mu_fail(err, MU_ERR_INVALID,
                       "parallel.recompute: value %d is not allowed: none, selective or full; use none",
                       (int)spec->parallel.recompute);
    if (spec->parallel.redundancy != MU_REDUNDANCY_NONE && spec->parallel.redundancy != MU_REDUNDANCY_BUDDY)
        return mu_fail(err, MU_ERR_INVALID, "parallel.redundancy: value %d is not allowed: none or buddy; use none",
                       (int)spec->parallel.redundancy);
    return MU_OK;
}

static enum mu_status check_checkpoint(const struct mu_job_spec *spec, struct mu_error *err)
{
    uint64_t every = spec->checkpoint.every, keep_every = spec->checkpoint.keep_every;
    enum mu_status status = MU_OK;
    if (spec->checkpoint.kind != MU_CHECKPOINT_SHARED && spec->checkpoint.kind != MU_CHECKPOINT_LOCAL)
        return mu_fail(err, MU_ERR_INVALID, "checkpoint.kind: value %d is not allowed: shared or local; use shared",
                       (int)spec->checkpoint.kind);
    if (spec->checkpoint.path[0] && (status = check_path(err, "checkpoint.path", spec->checkpoint.path)))
        return status;
    if ((every != MU_EVERY_AUTO &&
         (status = check_uint(err, "checkpoint.every", every, 0, MU_STEPS_MAX, "use 0 for none between"))) ||
        (status = check_uint(err, "checkpoint.keep", spec->checkpoint.keep, 1, MU_KEEP_MAX,
                             "the newest checkpoint is always kept")) ||
        (status = check_uint(err, "checkpoint.keep_every", keep_every, 0, MU_STEPS_MAX, "use 0 for none")))
        return status;
    if (!spec->checkpoint.path[0] && every == MU_EVERY_AUTO)
        return mu_fail(
            err, MU_ERR_INVALID,
            "checkpoint.every: value auto is not allowed: 0 when there is no checkpoint.path; give a path or "
            "leave every out");
    if (every == MU_EVERY_AUTO && keep_every > 0)
        return mu_fail(
            err, MU_ERR_INVALID,
            "checkpoint.keep_every: value %" PRIu64
            " is not allowed: 0 with checkpoint.every auto, whose checkpoints fall on no multiples; leave it "
            "out, or give every a number",
            keep_every);
    if (!spec->checkpoint.path[0] && every > 0)
        return mu_fail(err, MU_ERR_INVALID,
                       "checkpoint.every: value %" PRIu64
                       " is not allowed: 0 when there is no checkpoint.path; give a path or leave every out",
                       every);
    if (every > 0 && every != MU_EVERY_AUTO && keep_every % every != 0)
        return mu_fail(err, MU_ERR_INVALID,
                       "checkpoint.keep_every: value %" PRIu64
                       " is not allowed: a multiple of checkpoint.every (%" PRIu64
                       "), else no checkpoint falls on it; use %" PRIu64,
                       keep_every, every, (keep_every / every + (keep_every < MU_STEPS_MAX - every)) * every);
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

static enum mu_status check_init(const struct mu_job_spec *spec, struct mu_error *err)
{
    const char *sha256 = spec->init.sha256;
    if (!spec->init.path[0] && !sha256[0])
        return MU_OK;
    enum mu_status status = check_path(err, "init.path", spec->init.path);
    if (status)
        return status;
    bool whole = memchr(sha256, 0, MU_SHA256_TEXT_SIZE) && strlen(sha256) == MU_SHA256_TEXT_SIZE - 1;
    if (whole && strspn(sha256, "0123456789abcdef") == MU_SHA256_TEXT_SIZE - 1)
        return MU_OK;
    char text[SHOWN_SIZE];
    return mu_fail(
        err, MU_ERR_INVALID,
        "init.sha256: value '%s' is not allowed: the SHA-256 of manifest.json in init.path as 64 digits 0-9 a-f; "
        "muster submit fills it in",
        shown(sha256, MU_SHA256_TEXT_SIZE, text));
}

enum mu_status mu_job_spec_check(const struct mu_job_spec *given, struct mu_error *err)
{
    struct mu_job_spec resolved = *given;
    const struct mu_job_spec *spec = &resolved;
    enum mu_status status = MU_OK;
    mu_model_config_resolve(&resolved.model);
    if ((status = check_name(spec, err)) || (status = check_model(spec, err)) || (status = check_data(spec, err)) ||
        (status = check_slices(spec, err)) || (status = check_batch(spec, err)) ||
        (status = check_uint(err, "steps", spec->steps, 1, MU_STEPS_MAX, "set the steps of the whole job")) ||
        (status = check_optimizer(spec, err)) || (status = check_workers(spec, err)) ||
        (status = check_parallel(spec, err)) || (status = check_checkpoint(spec, err)) ||
        (status = check_eval(spec, err)) || (status = check_init(spec, err)))
        return status;
    if (spec->numerics != MU_NUMERICS_EXACT && spec->numerics != MU_NUMERICS_FAST)
        return mu_fail(err, MU_ERR_INVALID,
                       "numerics: value %d is not allowed: exact or fast; use exact for the same bits on any workers",
                       (int)spec->numerics);
    if (spec->compute != MU_COMPUTE_FP32 && spec->compute != MU_COMPUTE_BF16)
        return mu_fail(err, MU_ERR_INVALID,
                       "compute: value %d is not allowed: fp32 or bf16; use fp32, which every device can compute",
                       (int)spec->compute);
    return spec->amendments.count || spec->amendments.newest ? mu_amend_check(spec, err) : MU_OK;
}
