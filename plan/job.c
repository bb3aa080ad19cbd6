#include "plan/job.h"

#include <string.h>

#include "common/fmath.h"
#include "common/hash.h"
#include "plan/text.h"

void mu_job_spec_init(struct mu_job_spec *spec)
{
    *spec = (struct mu_job_spec){
        .model = {.family = MU_FAMILY_GPT2, .slices = 1},
        .data = {.tokens = MU_TOKENS_BYTES},
        .batch = {.accumulate = 1},
        .optimizer =
            {.lr = 6e-4, .min_lr = 6e-5, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .clip = 1.0},
        .parallel = {.recompute = MU_RECOMPUTE_NONE, .redundancy = MU_REDUNDANCY_NONE},
        .workers = {.min = 1, .max = MU_WORKERS_MAX},
        .checkpoint = {.kind = MU_CHECKPOINT_SHARED, .keep = 5},
        .numerics = MU_NUMERICS_EXACT,
        .compute = MU_COMPUTE_FP32,
        .seed = 1337,
    };
}

void mu_model_config_resolve(struct mu_model_config *config)
{
    bool llama = config->family == MU_FAMILY_LLAMA;
    if (config->slices == 0)
        config->slices = 1;
    if (config->kv_heads == 0)
        config->kv_heads = config->heads;
    if (config->hidden == 0 && !llama && config->channels <= MU_CHANNELS_MAX)
        config->hidden = 4 * config->channels;
    if (config->rope_base == 0 && llama)
        config->rope_base = 10000;
}

const char *mu_compute_name(enum mu_compute compute)
{
    return compute == MU_COMPUTE_BF16 ? "bf16" : "fp32";
}

uint32_t mu_job_leaves(const struct mu_job_spec *spec)
{
    uint64_t leaf = (uint64_t)spec->batch.micro * spec->batch.accumulate;
    MU_ASSERT(leaf > 0);
    return (uint32_t)(spec->batch.sequences / leaf);
}

static void amend_terms(struct mu_job_terms *terms, const struct mu_amendment *amendment)
{
    const struct mu_job_terms *new = &amendment->terms;
    terms->lr = amendment->fields & MU_AMEND_LR ? new->lr : terms->lr;
    terms->min_lr = amendment->fields & MU_AMEND_MIN_LR ? new->min_lr : terms->min_lr;
    terms->warmup = amendment->fields & MU_AMEND_WARMUP ? new->warmup : terms->warmup;
    terms->steps = amendment->fields & MU_AMEND_STEPS ? new->steps : terms->steps;
    terms->every = amendment->fields & MU_AMEND_EVERY ? new->every : terms->every;
    terms->keep_every = amendment->fields & MU_AMEND_KEEP_EVERY ? new->keep_every : terms->keep_every;
    terms->keep = amendment->fields & MU_AMEND_KEEP ? new->keep : terms->keep;
}

struct mu_job_terms mu_job_terms(const struct mu_job_spec *spec, uint64_t step)
{
    struct mu_job_terms terms = {.lr = spec->optimizer.lr,
                                 .min_lr = spec->optimizer.min_lr,
                                 .warmup = spec->optimizer.warmup,
                                 .steps = spec->steps,
                                 .every = spec->checkpoint.every,
                                 .keep_every = spec->checkpoint.keep_every,
                                 .keep = spec->checkpoint.keep};
    for (uint32_t i = 0; i < spec->amendments.count; i++) {
        if (spec->amendments.list[i].at_step <= step)
            amend_terms(&terms, &spec->amendments.list[i]);
    }
    return terms;
}

uint64_t mu_job_end(const struct mu_job_spec *spec)
{
    uint64_t end = spec->steps;
    for (uint32_t i = 0; i < spec->amendments.count; i++) {
        const struct mu_amendment *amendment = &spec->amendments.list[i];
        if (amendment->at_step > end)
            break; /* the job is over before it */
        if (amendment->fields & MU_AMEND_STEPS)
            end = amendment->terms.steps > amendment->at_step ? amendment->terms.steps : amendment->at_step;
    }
    return end;
}

/* The first range that begins there or later; NULL: none. */
static const struct mu_amendment *next_skip(const struct mu_job_spec *spec, uint64_t from)
{
    const struct mu_amendment *next = NULL;
    for (uint32_t i = 0; i < spec->amendments.count; i++) {
        const struct mu_amendment *amendment = &spec->amendments.list[i];
        if (amendment->fields & MU_AMEND_SKIP && amendment->skip_first >= from &&
            (!next || amendment->skip_first < next->skip_first))
            next = amendment;
    }
    return next;
}

/* No range begins before the first sequence of its amendment's step, so what was trained on before is not moved. */
uint64_t mu_job_position(const struct mu_job_spec *spec, uint64_t n)
{
    const struct mu_amendment *skip = next_skip(spec, 0);
    for (; skip && skip->skip_first <= n; skip = next_skip(spec, skip->skip_first + skip->skip_count))
        n += skip->skip_count;
    return n;
}

double mu_job_learning_rate(const struct mu_job_spec *spec, uint64_t step)
{
    const struct mu_job_terms terms = mu_job_terms(spec, step);
    if (step < terms.warmup)
        return terms.lr * (double)(step + 1) / (double)terms.warmup;
    if (step >= terms.steps)
        return terms.min_lr;
    double t = (double)(step - terms.warmup) / (double)(terms.steps - terms.warmup);
    return terms.min_lr + (terms.lr - terms.min_lr) * (1.0 + mu_fmath_cos(MU_PI * t)) / 2.0;
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

/* Fields that came with Llama and slices; a GPT-2 in one slice has the text it always had. */
static void put_extensions(struct mu_text *text, const struct mu_model_config *given)
{
    struct mu_model_config model = *given;
    mu_model_config_resolve(&model);
    if (model.family == MU_FAMILY_GPT2 && model.slices == 1)
        return;
    put_field(text, "model.kv_heads", model.kv_heads);
    put_field(text, "model.hidden", model.hidden);
    put_real(text, "model.rope_base", model.rope_base);
    put_field(text, "model.slices", model.slices);
}

uint64_t mu_job_spec_hash(const struct mu_job_spec *spec)
{
    char buffer[4096];
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
    put_extensions(&text, &spec->model);
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
    if (spec->compute != MU_COMPUTE_FP32) /* likewise below: a job without it has the text it always had */
        put_field(&text, "compute", (uint64_t)spec->compute);
    if (spec->init.sha256[0]) {
        mu_text_put(&text, "init.sha256=");
        mu_text_put(&text, spec->init.sha256);
        mu_text_put(&text, "\n");
    }
    MU_ASSERT(text.length + 1 < text.capacity);
    return mu_xxh3_64(buffer, text.length, 0);
}
