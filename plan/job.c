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
    if (spec->init.sha256[0]) { /* a job with random initial values has the text it always had */
        mu_text_put(&text, "init.sha256=");
        mu_text_put(&text, spec->init.sha256);
        mu_text_put(&text, "\n");
    }
    MU_ASSERT(text.length + 1 < text.capacity);
    return mu_xxh3_64(buffer, text.length, 0);
}
