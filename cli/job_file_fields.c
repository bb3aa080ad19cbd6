#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/job_file_internal.h"

/* ---- Values. A NULL text leaves the default in place. ---- */

static enum mu_status read_u64_up_to(struct job_file_reader *r, const char *field, const char *text, uint64_t max,
                                     uint64_t *ret_value)
{
    if (!text)
        return MU_OK;
    char allowed[64];
    snprintf(allowed, sizeof allowed, "a whole number from 0 to %" PRIu64, max);
    size_t length = strlen(text);
    if (length == 0 || strspn(text, "0123456789") != length)
        return job_file_refuse(r, field, text, allowed, "write digits only");
    errno = 0;
    unsigned long long value = strtoull(text, NULL, 10);
    if (errno == ERANGE || value > max)
        return job_file_refuse(r, field, text, allowed, "write a smaller number");
    *ret_value = value;
    return MU_OK;
}

static enum mu_status read_u64(struct job_file_reader *r, const char *field, const char *text, uint64_t *ret_value)
{
    return read_u64_up_to(r, field, text, UINT64_MAX, ret_value);
}

static enum mu_status read_u32(struct job_file_reader *r, const char *field, const char *text, uint32_t *ret_value)
{
    uint64_t value = *ret_value;
    enum mu_status status = read_u64_up_to(r, field, text, UINT32_MAX, &value);
    if (status == MU_OK)
        *ret_value = (uint32_t)value;
    return status;
}

/* [+-] digits [. digits] [e [+-] digits], nothing that strtod accepts beside (nan, inf, hexadecimal, blanks). */
static bool is_decimal(const char *text)
{
    text += *text == '+' || *text == '-';
    size_t whole = strspn(text, "0123456789"), fraction = 0;
    text += whole;
    if (*text == '.') {
        fraction = strspn(text + 1, "0123456789");
        text += 1 + fraction;
    }
    if (whole + fraction == 0)
        return false;
    if (*text == 'e' || *text == 'E') {
        text++;
        text += *text == '+' || *text == '-';
        size_t exponent = strspn(text, "0123456789");
        if (exponent == 0)
            return false;
        text += exponent;
    }
    return *text == 0;
}

static enum mu_status read_real(struct job_file_reader *r, const char *field, const char *text, double *ret_value)
{
    if (!text)
        return MU_OK;
    if (!is_decimal(text))
        return job_file_refuse(r, field, text, "a finite decimal number", "write it as 0.1 or 6.0e-4");
    errno = 0;
    double value = strtod(text, NULL);
    if (errno == ERANGE)
        return job_file_refuse(r, field, text, "a number that a double can hold", "write one between 1e-300 and 1e300");
    *ret_value = value;
    return MU_OK;
}

struct choice {
    const char *name;
    int value;
};

static enum mu_status read_choice(struct job_file_reader *r, const char *field, const char *text,
                                  const struct choice *choices, const char *allowed, int *ret_value)
{
    if (!text)
        return MU_OK;
    for (; choices->name; choices++) {
        if (strcmp(text, choices->name) == 0) {
            *ret_value = choices->value;
            return MU_OK;
        }
    }
    return job_file_refuse(r, field, text, allowed, "write one of these words");
}

/* Makes `text` absolute by the directory of the job file. */
static enum mu_status read_path(struct job_file_reader *r, const char *field, const char *text,
                                char ret_path[MU_PATH_SIZE])
{
    if (!text)
        return MU_OK;
    if (text[0] == 0)
        return job_file_refuse(r, field, text, "a path", "write a path, absolute or relative to the job file");
    if (text[0] == '~')
        return job_file_refuse(r, field, text, "a path without ~, which is not expanded",
                               "write the path out, or ./~name for such a name");
    bool absolute = text[0] == '/', slash = strcmp(r->directory, "/") == 0;
    if (strncmp(text, "./", 2) == 0)
        text += 2;
    char path[MU_PATH_SIZE];
    int length = snprintf(path, sizeof path, "%s%s%s", absolute ? "" : r->directory,
                          absolute || slash ? (absolute ? "" : "/") : "/", text);
    if (length < 0 || (size_t)length >= sizeof path) {
        char allowed[64];
        snprintf(allowed, sizeof allowed, "at most %d bytes as an absolute path", MU_PATH_SIZE - 1);
        return job_file_refuse(r, field, text, allowed, "choose a shorter one");
    }
    memcpy(ret_path, path, (size_t)length + 1);
    return MU_OK;
}

/* ---- Groups of fields. ---- */

static enum mu_status read_name(struct job_file_reader *r, const char *text, char ret_name[MU_JOB_NAME_SIZE])
{
    if (!text)
        return job_file_missing(r, "job", "give the job a name: job: my-job");
    if (strlen(text) >= MU_JOB_NAME_SIZE)
        return job_file_refuse(r, "job", text, "at most 63 characters", "choose a shorter name");
    memcpy(ret_name, text, strlen(text) + 1);
    return MU_OK;
}

/* A number of at least 1; `word` (may be NULL) leaves the default in place, as an absent field does. */
static enum mu_status read_positive(struct job_file_reader *r, const char *field, const char *text, const char *word,
                                    uint32_t *ret_value)
{
    if (!text || (word && strcmp(text, word) == 0))
        return MU_OK;
    char allowed[80];
    snprintf(allowed, sizeof allowed, "%s%sa whole number of at least 1", word ? word : "", word ? ", or " : "");
    size_t length = strlen(text), digits = strspn(text, "0123456789");
    errno = 0;
    unsigned long long value = strtoull(text, NULL, 10);
    if (length > 0 && digits == length && value >= 1) {
        if (errno == 0 && value <= UINT32_MAX) {
            *ret_value = (uint32_t)value;
            return MU_OK;
        }
        snprintf(allowed, sizeof allowed, "at most %" PRIu32, UINT32_MAX);
    }
    return job_file_refuse(r, field, text, allowed,
                           word ? "write one of these, or leave the field out" : "leave the field out for its default");
}

static enum mu_status check_model_fields(struct job_file_reader *r, const struct model_text *t)
{
    if (!t)
        return job_file_missing(
            r, "model", "give model: {family: gpt2, layers: .., heads: .., channels: .., context: .., vocab: ..}");
    if (!t->layers)
        return job_file_missing(r, "model.layers", "set the number of layers");
    if (!t->heads)
        return job_file_missing(r, "model.heads", "set the attention heads of a layer");
    if (!t->channels)
        return job_file_missing(r, "model.channels", "set the embedding width, a multiple of heads");
    if (!t->context)
        return job_file_missing(r, "model.context", "set the longest sequence in tokens");
    if (!t->vocab)
        return job_file_missing(r, "model.vocab", "set the number of different tokens; 256 for bytes");
    return MU_OK;
}

static enum mu_status read_model(struct job_file_reader *r, const struct model_text *t,
                                 struct mu_model_config *ret_model)
{
    static const struct choice families[] = {{"gpt2", MU_FAMILY_GPT2}, {"llama", MU_FAMILY_LLAMA}, {NULL, 0}};
    int family = MU_FAMILY_GPT2;
    double dropout = 0.0;
    enum mu_status status = check_model_fields(r, t);
    if (status)
        return status;
    if ((status = read_choice(r, "model.family", t->family, families, "gpt2 or llama", &family)) ||
        (status = read_u32(r, "model.layers", t->layers, &ret_model->layers)) ||
        (status = read_u32(r, "model.heads", t->heads, &ret_model->heads)) ||
        (status = read_positive(r, "model.kv_heads", t->kv_heads, NULL, &ret_model->kv_heads)) ||
        (status = read_u32(r, "model.channels", t->channels, &ret_model->channels)) ||
        (status = read_positive(r, "model.hidden", t->hidden, NULL, &ret_model->hidden)) ||
        (status = read_u32(r, "model.context", t->context, &ret_model->context)) ||
        (status = read_u32(r, "model.vocab", t->vocab, &ret_model->vocab)) ||
        (status = read_real(r, "model.dropout", t->dropout, &dropout)) ||
        (status = read_real(r, "model.rope_base", t->rope_base, &ret_model->rope_base)))
        return status;
    if (family == MU_FAMILY_LLAMA && !t->hidden)
        return job_file_missing(r, "model.hidden", "set the width of the MLP, e.g. 8/3 of channels");
    if (family == MU_FAMILY_LLAMA && t->rope_base && ret_model->rope_base == 0.0)
        return job_file_refuse(r, "model.rope_base", t->rope_base, "more than 1, up to 1e12",
                               "leave the field out for 10000");
    ret_model->family = (enum mu_model_family)family;
    ret_model->dropout = (float)dropout;
    return MU_OK;
}

static enum mu_status read_data(struct job_file_reader *r, const struct data_text *t, struct mu_job_spec *ret_spec)
{
    static const struct choice formats[] = {
        {"bytes", MU_TOKENS_BYTES}, {"llmc", MU_TOKENS_LLMC}, {"megatron", MU_TOKENS_MEGATRON}, {NULL, 0}};
    if (!t)
        return job_file_missing(r, "data", "give data: {path: FILE, tokens: bytes}");
    if (!t->path)
        return job_file_missing(r, "data.path", "give the file to train on, absolute or relative to the job file");
    int tokens = MU_TOKENS_BYTES;
    enum mu_status status = MU_OK;
    if ((status = read_path(r, "data.path", t->path, ret_spec->data.path)) ||
        (status = read_choice(r, "data.tokens", t->tokens, formats, "bytes, llmc or megatron", &tokens)) ||
        (status = read_real(r, "data.holdout", t->holdout, &ret_spec->data.holdout)))
        return status;
    ret_spec->data.tokens = (enum mu_token_format)tokens;
    return MU_OK;
}

static enum mu_status read_batch(struct job_file_reader *r, const struct batch_text *t, struct mu_job_spec *ret_spec)
{
    if (!t)
        return job_file_missing(r, "batch", "give batch: {sequences: .., micro: ..}");
    if (!t->sequences)
        return job_file_missing(r, "batch.sequences", "set the sequences of a step");
    if (!t->micro)
        return job_file_missing(r, "batch.micro", "set the sequences of a micro-batch");
    ret_spec->batch.length = ret_spec->model.context;
    enum mu_status status = MU_OK;
    if ((status = read_u32(r, "batch.sequences", t->sequences, &ret_spec->batch.sequences)) ||
        (status = read_u32(r, "batch.micro", t->micro, &ret_spec->batch.micro)) ||
        (status = read_u32(r, "batch.accumulate", t->accumulate, &ret_spec->batch.accumulate)) ||
        (status = read_u32(r, "batch.length", t->length, &ret_spec->batch.length)))
        return status;
    return MU_OK;
}

static enum mu_status read_optimizer(struct job_file_reader *r, const struct optimizer_text *t,
                                     struct mu_job_spec *ret_spec)
{
    static const struct choice kinds[] = {{"adamw", 1}, {NULL, 0}};
    if (!t)
        return MU_OK;
    int kind = 1;
    enum mu_status status = MU_OK;
    if ((status = read_choice(r, "optimizer.kind", t->kind, kinds, "adamw", &kind)) ||
        (status = read_real(r, "optimizer.lr", t->lr, &ret_spec->optimizer.lr)))
        return status;
    if (t->lr)
        ret_spec->optimizer.min_lr = ret_spec->optimizer.lr / 10.0;
    if ((status = read_real(r, "optimizer.min_lr", t->min_lr, &ret_spec->optimizer.min_lr)) ||
        (status = read_u64(r, "optimizer.warmup", t->warmup, &ret_spec->optimizer.warmup)) ||
        (status = read_real(r, "optimizer.eps", t->eps, &ret_spec->optimizer.eps)) ||
        (status = read_real(r, "optimizer.weight_decay", t->weight_decay, &ret_spec->optimizer.weight_decay)) ||
        (status = read_real(r, "optimizer.clip", t->clip, &ret_spec->optimizer.clip)))
        return status;
    if (!t->betas)
        return MU_OK;
    if ((status = read_real(r, "optimizer.betas[0]", t->betas[0], &ret_spec->optimizer.beta1)) ||
        (status = read_real(r, "optimizer.betas[1]", t->betas[1], &ret_spec->optimizer.beta2)))
        return status;
    return MU_OK;
}

static enum mu_status read_parallel(struct job_file_reader *r, const struct parallel_text *t,
                                    struct mu_job_spec *ret_spec)
{
    static const struct choice switches[] = {{"true", 1}, {"false", 0}, {NULL, 0}};
    static const struct choice recomputes[] = {
        {"none", MU_RECOMPUTE_NONE}, {"selective", MU_RECOMPUTE_SELECTIVE}, {"full", MU_RECOMPUTE_FULL}, {NULL, 0}};
    static const struct choice redundancies[] = {
        {"none", MU_REDUNDANCY_NONE}, {"buddy", MU_REDUNDANCY_BUDDY}, {NULL, 0}};
    if (!t)
        return MU_OK;
    int sharding = ret_spec->parallel.optimizer_sharding, recompute = (int)ret_spec->parallel.recompute;
    int redundancy = (int)ret_spec->parallel.redundancy;
    enum mu_status status = MU_OK;
    if ((status = read_positive(r, "parallel.tp", t->tp, "auto", &ret_spec->parallel.tp)) ||
        (status = read_positive(r, "parallel.pp", t->pp, "auto", &ret_spec->parallel.pp)) ||
        (status = read_positive(r, "parallel.dp", t->dp, "auto", &ret_spec->parallel.dp)) ||
        (status = read_positive(r, "parallel.slices", t->slices, "auto", &ret_spec->model.slices)) ||
        (status = read_choice(r, "parallel.optimizer_sharding", t->optimizer_sharding, switches, "true or false",
                              &sharding)) ||
        (status =
             read_choice(r, "parallel.recompute", t->recompute, recomputes, "none, selective or full", &recompute)) ||
        (status = read_choice(r, "parallel.redundancy", t->redundancy, redundancies, "none or buddy", &redundancy)))
        return status;
    ret_spec->parallel.optimizer_sharding = sharding != 0;
    ret_spec->parallel.recompute = (enum mu_recompute)recompute;
    ret_spec->parallel.redundancy = (enum mu_redundancy)redundancy;
    return MU_OK;
}

static enum mu_status read_policy(struct job_file_reader *r, const struct job_text *t, struct mu_job_spec *ret_spec)
{
    static const struct choice kinds[] = {{"shared", MU_CHECKPOINT_SHARED}, {"local", MU_CHECKPOINT_LOCAL}, {NULL, 0}};
    enum mu_status status = MU_OK;
    const struct workers_text *w = t->workers;
    if (w && ((status = read_u32(r, "workers.min", w->min, &ret_spec->workers.min)) ||
              (status = read_u32(r, "workers.max", w->max, &ret_spec->workers.max)) ||
              (status = read_u32(r, "workers.spares", w->spares, &ret_spec->workers.spares))))
        return status;
    const struct checkpoint_text *c = t->checkpoint;
    if (!c)
        return MU_OK;
    if (!c->path)
        return job_file_missing(r, "checkpoint.path",
                                "give a directory, or leave the whole group out for a job without checkpoints");
    bool every_auto = c->every && strcmp(c->every, "auto") == 0;
    if (every_auto)
        ret_spec->checkpoint.every = MU_EVERY_AUTO;
    int kind = MU_CHECKPOINT_SHARED;
    if ((status = read_path(r, "checkpoint.path", c->path, ret_spec->checkpoint.path)) ||
        (status = read_choice(r, "checkpoint.kind", c->kind, kinds, "shared", &kind)) ||
        (!every_auto && (status = read_u64(r, "checkpoint.every", c->every, &ret_spec->checkpoint.every))) ||
        (status = read_u32(r, "checkpoint.keep", c->keep, &ret_spec->checkpoint.keep)) ||
        (status = read_u64(r, "checkpoint.keep_every", c->keep_every, &ret_spec->checkpoint.keep_every)))
        return status;
    if (!every_auto && ret_spec->checkpoint.every == MU_EVERY_AUTO)
        return job_file_refuse(r, "checkpoint.every", c->every, "auto, or 0 to 1099511627776", "use auto");
    ret_spec->checkpoint.kind = (enum mu_checkpoint_kind)kind;
    return MU_OK;
}

static enum mu_status read_eval(struct job_file_reader *r, const struct eval_text *t, struct mu_job_spec *ret_spec)
{
    if (!t)
        return MU_OK;
    if (!t->every)
        return job_file_missing(r, "eval.every", "set the steps between evaluations, or leave the whole group out");
    ret_spec->eval.sequences = ret_spec->batch.sequences;
    enum mu_status status = read_u64(r, "eval.every", t->every, &ret_spec->eval.every);
    return status ? status : read_u32(r, "eval.sequences", t->sequences, &ret_spec->eval.sequences);
}

static enum mu_status read_init(struct job_file_reader *r, const struct init_text *t, struct mu_job_spec *ret_spec)
{
    if (!t)
        return MU_OK;
    if (!t->path)
        return job_file_missing(
            r, "init.path",
            "give the directory of a checkpoint, or leave the whole group out for random initial values");
    return read_path(r, "init.path", t->path, ret_spec->init.path);
}

enum mu_status job_file_read_fields(struct job_file_reader *r, const struct job_text *t, struct mu_job_spec *ret_spec)
{
    static const struct choice numerics_choices[] = {
        {"exact", MU_NUMERICS_EXACT}, {"fast", MU_NUMERICS_FAST}, {NULL, 0}};
    int numerics = MU_NUMERICS_EXACT;
    enum mu_status status = MU_OK;
    mu_job_spec_init(ret_spec);
    if ((status = read_name(r, t->job, ret_spec->name)) || (status = read_model(r, t->model, &ret_spec->model)) ||
        (status = read_data(r, t->data, ret_spec)) || (status = read_batch(r, t->batch, ret_spec)))
        return status;
    if (!t->steps)
        return job_file_missing(r, "steps", "set the steps of the whole job");
    if ((status = read_u64(r, "steps", t->steps, &ret_spec->steps)) ||
        (status = read_optimizer(r, t->optimizer, ret_spec)) || (status = read_parallel(r, t->parallel, ret_spec)) ||
        (status = read_policy(r, t, ret_spec)) || (status = read_eval(r, t->eval, ret_spec)) ||
        (status = read_init(r, t->init, ret_spec)) ||
        (status = read_choice(r, "numerics", t->numerics, numerics_choices, "exact or fast", &numerics)) ||
        (status = read_u64(r, "seed", t->seed, &ret_spec->seed)))
        return status;
    ret_spec->numerics = (enum mu_numerics)numerics;
    mu_model_config_resolve(&ret_spec->model);
    return MU_OK;
}
