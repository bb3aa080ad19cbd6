#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/job_file_internal.h"

/* ---- Groups of fields. ---- */

static enum mu_status read_name(struct mu_yaml_reader *r, const char *text, char ret_name[MU_JOB_NAME_SIZE])
{
    if (!text)
        return mu_yaml_missing(r, "job", "give the job a name: job: my-job");
    if (strlen(text) >= MU_JOB_NAME_SIZE)
        return mu_yaml_refuse(r, "job", text, "at most 63 characters", "choose a shorter name");
    memcpy(ret_name, text, strlen(text) + 1);
    return MU_OK;
}

static enum mu_status check_model_fields(struct mu_yaml_reader *r, const struct model_text *t)
{
    if (!t)
        return mu_yaml_missing(
            r, "model", "give model: {family: gpt2, layers: .., heads: .., channels: .., context: .., vocab: ..}");
    if (!t->layers)
        return mu_yaml_missing(r, "model.layers", "set the number of layers");
    if (!t->heads)
        return mu_yaml_missing(r, "model.heads", "set the attention heads of a layer");
    if (!t->channels)
        return mu_yaml_missing(r, "model.channels", "set the embedding width, a multiple of heads");
    if (!t->context)
        return mu_yaml_missing(r, "model.context", "set the longest sequence in tokens");
    if (!t->vocab)
        return mu_yaml_missing(r, "model.vocab", "set the number of different tokens; 256 for bytes");
    return MU_OK;
}

static enum mu_status read_model(struct mu_yaml_reader *r, const struct model_text *t,
                                 struct mu_model_config *ret_model)
{
    static const struct mu_yaml_choice families[] = {{"gpt2", MU_FAMILY_GPT2}, {"llama", MU_FAMILY_LLAMA}, {NULL, 0}};
    int family = MU_FAMILY_GPT2;
    double dropout = 0.0;
    enum mu_status status = check_model_fields(r, t);
    if (status)
        return status;
    if ((status = mu_yaml_read_choice(r, "model.family", t->family, families, "gpt2 or llama", &family)) ||
        (status = mu_yaml_read_u32(r, "model.layers", t->layers, &ret_model->layers)) ||
        (status = mu_yaml_read_u32(r, "model.heads", t->heads, &ret_model->heads)) ||
        (status = mu_yaml_read_positive(r, "model.kv_heads", t->kv_heads, NULL, &ret_model->kv_heads)) ||
        (status = mu_yaml_read_u32(r, "model.channels", t->channels, &ret_model->channels)) ||
        (status = mu_yaml_read_positive(r, "model.hidden", t->hidden, NULL, &ret_model->hidden)) ||
        (status = mu_yaml_read_u32(r, "model.context", t->context, &ret_model->context)) ||
        (status = mu_yaml_read_u32(r, "model.vocab", t->vocab, &ret_model->vocab)) ||
        (status = mu_yaml_read_real(r, "model.dropout", t->dropout, &dropout)) ||
        (status = mu_yaml_read_real(r, "model.rope_base", t->rope_base, &ret_model->rope_base)))
        return status;
    if (family == MU_FAMILY_LLAMA && !t->hidden)
        return mu_yaml_missing(r, "model.hidden", "set the width of the MLP, e.g. 8/3 of channels");
    if (family == MU_FAMILY_LLAMA && t->rope_base && ret_model->rope_base == 0.0)
        return mu_yaml_refuse(r, "model.rope_base", t->rope_base, "more than 1, up to 1e12",
                              "leave the field out for 10000");
    ret_model->family = (enum mu_model_family)family;
    ret_model->dropout = (float)dropout;
    return MU_OK;
}

static enum mu_status read_data(struct mu_yaml_reader *r, const struct data_text *t, struct mu_job_spec *ret_spec)
{
    static const struct mu_yaml_choice formats[] = {
        {"bytes", MU_TOKENS_BYTES}, {"llmc", MU_TOKENS_LLMC}, {"megatron", MU_TOKENS_MEGATRON}, {NULL, 0}};
    if (!t)
        return mu_yaml_missing(r, "data", "give data: {path: FILE, tokens: bytes}");
    if (!t->path)
        return mu_yaml_missing(r, "data.path", "give the file to train on, absolute or relative to the job file");
    int tokens = MU_TOKENS_BYTES;
    enum mu_status status = MU_OK;
    if ((status = mu_yaml_read_path(r, "data.path", t->path, ret_spec->data.path)) ||
        (status = mu_yaml_read_choice(r, "data.tokens", t->tokens, formats, "bytes, llmc or megatron", &tokens)) ||
        (status = mu_yaml_read_real(r, "data.holdout", t->holdout, &ret_spec->data.holdout)))
        return status;
    ret_spec->data.tokens = (enum mu_token_format)tokens;
    return MU_OK;
}

static enum mu_status read_batch(struct mu_yaml_reader *r, const struct batch_text *t, struct mu_job_spec *ret_spec)
{
    if (!t)
        return mu_yaml_missing(r, "batch", "give batch: {sequences: .., micro: ..}");
    if (!t->sequences)
        return mu_yaml_missing(r, "batch.sequences", "set the sequences of a step");
    if (!t->micro)
        return mu_yaml_missing(r, "batch.micro", "set the sequences of a micro-batch");
    ret_spec->batch.length = ret_spec->model.context;
    enum mu_status status = MU_OK;
    if ((status = mu_yaml_read_u32(r, "batch.sequences", t->sequences, &ret_spec->batch.sequences)) ||
        (status = mu_yaml_read_u32(r, "batch.micro", t->micro, &ret_spec->batch.micro)) ||
        (status = mu_yaml_read_u32(r, "batch.accumulate", t->accumulate, &ret_spec->batch.accumulate)) ||
        (status = mu_yaml_read_u32(r, "batch.length", t->length, &ret_spec->batch.length)))
        return status;
    return MU_OK;
}

static enum mu_status read_optimizer(struct mu_yaml_reader *r, const struct optimizer_text *t,
                                     struct mu_job_spec *ret_spec)
{
    static const struct mu_yaml_choice kinds[] = {{"adamw", 1}, {NULL, 0}};
    if (!t)
        return MU_OK;
    int kind = 1;
    enum mu_status status = MU_OK;
    if ((status = mu_yaml_read_choice(r, "optimizer.kind", t->kind, kinds, "adamw", &kind)) ||
        (status = mu_yaml_read_real(r, "optimizer.lr", t->lr, &ret_spec->optimizer.lr)))
        return status;
    if (t->lr)
        ret_spec->optimizer.min_lr = ret_spec->optimizer.lr / 10.0;
    if ((status = mu_yaml_read_real(r, "optimizer.min_lr", t->min_lr, &ret_spec->optimizer.min_lr)) ||
        (status = mu_yaml_read_u64(r, "optimizer.warmup", t->warmup, &ret_spec->optimizer.warmup)) ||
        (status = mu_yaml_read_real(r, "optimizer.eps", t->eps, &ret_spec->optimizer.eps)) ||
        (status = mu_yaml_read_real(r, "optimizer.weight_decay", t->weight_decay, &ret_spec->optimizer.weight_decay)) ||
        (status = mu_yaml_read_real(r, "optimizer.clip", t->clip, &ret_spec->optimizer.clip)))
        return status;
    if (!t->betas)
        return MU_OK;
    if ((status = mu_yaml_read_real(r, "optimizer.betas[0]", t->betas[0], &ret_spec->optimizer.beta1)) ||
        (status = mu_yaml_read_real(r, "optimizer.betas[1]", t->betas[1], &ret_spec->optimizer.beta2)))
        return status;
    return MU_OK;
}

static const struct mu_yaml_choice switches[] = {{"true", 1}, {"false", 0}, {NULL, 0}};

static enum mu_status read_parallel(struct mu_yaml_reader *r, const struct parallel_text *t,
                                    struct mu_job_spec *ret_spec)
{
    static const struct mu_yaml_choice recomputes[] = {
        {"none", MU_RECOMPUTE_NONE}, {"selective", MU_RECOMPUTE_SELECTIVE}, {"full", MU_RECOMPUTE_FULL}, {NULL, 0}};
    static const struct mu_yaml_choice redundancies[] = {
        {"none", MU_REDUNDANCY_NONE}, {"buddy", MU_REDUNDANCY_BUDDY}, {NULL, 0}};
    if (!t)
        return MU_OK;
    int sharding = ret_spec->parallel.optimizer_sharding, recompute = (int)ret_spec->parallel.recompute;
    int redundancy = (int)ret_spec->parallel.redundancy;
    enum mu_status status = MU_OK;
    if ((status = mu_yaml_read_positive(r, "parallel.tp", t->tp, "auto", &ret_spec->parallel.tp)) ||
        (status = mu_yaml_read_positive(r, "parallel.pp", t->pp, "auto", &ret_spec->parallel.pp)) ||
        (status = mu_yaml_read_positive(r, "parallel.dp", t->dp, "auto", &ret_spec->parallel.dp)) ||
        (status = mu_yaml_read_positive(r, "parallel.slices", t->slices, "auto", &ret_spec->model.slices)) ||
        (status = mu_yaml_read_choice(r, "parallel.optimizer_sharding", t->optimizer_sharding, switches,
                                      "true or false", &sharding)) ||
        (status = mu_yaml_read_choice(r, "parallel.recompute", t->recompute, recomputes, "none, selective or full",
                                      &recompute)) ||
        (status =
             mu_yaml_read_choice(r, "parallel.redundancy", t->redundancy, redundancies, "none or buddy", &redundancy)))
        return status;
    ret_spec->parallel.optimizer_sharding = sharding != 0;
    ret_spec->parallel.recompute = (enum mu_recompute)recompute;
    ret_spec->parallel.redundancy = (enum mu_redundancy)redundancy;
    return MU_OK;
}

static enum mu_status read_policy(struct mu_yaml_reader *r, const struct job_text *t, struct mu_job_spec *ret_spec)
{
    static const struct mu_yaml_choice kinds[] = {
        {"shared", MU_CHECKPOINT_SHARED}, {"local", MU_CHECKPOINT_LOCAL}, {NULL, 0}};
    enum mu_status status = MU_OK;
    const struct workers_text *w = t->workers;
    if (w && ((status = mu_yaml_read_u32(r, "workers.min", w->min, &ret_spec->workers.min)) ||
              (status = mu_yaml_read_u32(r, "workers.max", w->max, &ret_spec->workers.max)) ||
              (status = mu_yaml_read_u32(r, "workers.spares", w->spares, &ret_spec->workers.spares))))
        return status;
    const struct checkpoint_text *c = t->checkpoint;
    if (!c)
        return MU_OK;
    if (!c->path)
        return mu_yaml_missing(r, "checkpoint.path",
                               "give a directory, or leave the whole group out for a job without checkpoints");
    bool every_auto = c->every && strcmp(c->every, "auto") == 0;
    if (every_auto)
        ret_spec->checkpoint.every = MU_EVERY_AUTO;
    int kind = MU_CHECKPOINT_SHARED;
    if ((status = mu_yaml_read_path(r, "checkpoint.path", c->path, ret_spec->checkpoint.path)) ||
        (status = mu_yaml_read_choice(r, "checkpoint.kind", c->kind, kinds, "shared or local", &kind)) ||
        (!every_auto && (status = mu_yaml_read_u64(r, "checkpoint.every", c->every, &ret_spec->checkpoint.every))) ||
        (status = mu_yaml_read_u32(r, "checkpoint.keep", c->keep, &ret_spec->checkpoint.keep)) ||
        (status = mu_yaml_read_u64(r, "checkpoint.keep_every", c->keep_every, &ret_spec->checkpoint.keep_every)))
        return status;
    if (!every_auto && ret_spec->checkpoint.every == MU_EVERY_AUTO)
        return mu_yaml_refuse(r, "checkpoint.every", c->every, "auto, or 0 to 1099511627776", "use auto");
    ret_spec->checkpoint.kind = (enum mu_checkpoint_kind)kind;
    return MU_OK;
}

static enum mu_status read_eval(struct mu_yaml_reader *r, const struct eval_text *t, struct mu_job_spec *ret_spec)
{
    if (!t)
        return MU_OK;
    if (!t->every)
        return mu_yaml_missing(r, "eval.every", "set the steps between evaluations, or leave the whole group out");
    ret_spec->eval.sequences = ret_spec->batch.sequences;
    enum mu_status status = mu_yaml_read_u64(r, "eval.every", t->every, &ret_spec->eval.every);
    return status ? status : mu_yaml_read_u32(r, "eval.sequences", t->sequences, &ret_spec->eval.sequences);
}

static enum mu_status read_init(struct mu_yaml_reader *r, const struct init_text *t, struct mu_job_spec *ret_spec)
{
    if (!t)
        return MU_OK;
    if (!t->path)
        return mu_yaml_missing(
            r, "init.path",
            "give the directory of a checkpoint, or leave the whole group out for random initial values");
    return mu_yaml_read_path(r, "init.path", t->path, ret_spec->init.path);
}

enum mu_status job_file_read_fields(struct mu_yaml_reader *r, const struct job_text *t, struct mu_job_spec *ret_spec)
{
    static const struct mu_yaml_choice numerics_choices[] = {
        {"exact", MU_NUMERICS_EXACT}, {"fast", MU_NUMERICS_FAST}, {NULL, 0}};
    static const struct mu_yaml_choice computes[] = {{"fp32", MU_COMPUTE_FP32}, {"bf16", MU_COMPUTE_BF16}, {NULL, 0}};
    int numerics = MU_NUMERICS_EXACT, compute = MU_COMPUTE_FP32, data_tls = 0;
    enum mu_status status = MU_OK;
    mu_job_spec_init(ret_spec);
    if ((status = read_name(r, t->job, ret_spec->name)) || (status = read_model(r, t->model, &ret_spec->model)) ||
        (status = read_data(r, t->data, ret_spec)) || (status = read_batch(r, t->batch, ret_spec)))
        return status;
    if (!t->steps)
        return mu_yaml_missing(r, "steps", "set the steps of the whole job");
    if ((status = mu_yaml_read_u64(r, "steps", t->steps, &ret_spec->steps)) ||
        (status = read_optimizer(r, t->optimizer, ret_spec)) || (status = read_parallel(r, t->parallel, ret_spec)) ||
        (status = read_policy(r, t, ret_spec)) || (status = read_eval(r, t->eval, ret_spec)) ||
        (status = read_init(r, t->init, ret_spec)) ||
        (status = mu_yaml_read_choice(r, "numerics", t->numerics, numerics_choices, "exact or fast", &numerics)) ||
        (status = mu_yaml_read_choice(r, "compute", t->compute, computes, "fp32 or bf16", &compute)) ||
        (status = mu_yaml_read_choice(r, "data_tls", t->data_tls, switches, "true or false", &data_tls)) ||
        (status = mu_yaml_read_u64(r, "seed", t->seed, &ret_spec->seed)))
        return status;
    ret_spec->data_tls = data_tls != 0;
    ret_spec->numerics = (enum mu_numerics)numerics;
    ret_spec->compute = (enum mu_compute)compute;
    mu_model_config_resolve(&ret_spec->model);
    return MU_OK;
}
