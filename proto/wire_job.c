#include "proto/wire_pb.h"

#include <string.h>

/* A spec and the messages in it, in one piece. */
struct spec_pb {
    Muster__V1__JobSpec spec;
    Muster__V1__ModelSpec model;
    Muster__V1__DataSpec data;
    Muster__V1__BatchSpec batch;
    Muster__V1__OptimizerSpec optimizer;
    Muster__V1__ParallelSpec parallel;
    Muster__V1__WorkerPolicy workers;
    Muster__V1__CheckpointPolicy checkpoint;
    Muster__V1__EvalPolicy eval;
    Muster__V1__InitSpec init;
};

static void fill_model_and_data(struct spec_pb *pb, const struct mu_job_spec *spec)
{
    muster__v1__model_spec__init(&pb->model);
    pb->model.family = (Muster__V1__ModelFamily)spec->model.family;
    pb->model.layers = spec->model.layers;
    pb->model.heads = spec->model.heads;
    pb->model.channels = spec->model.channels;
    pb->model.context = spec->model.context;
    pb->model.vocab = spec->model.vocab;
    pb->model.dropout = spec->model.dropout;
    pb->model.kv_heads = spec->model.kv_heads;
    pb->model.hidden = spec->model.hidden;
    pb->model.rope_base = spec->model.rope_base;
    pb->model.slices = spec->model.slices;
    muster__v1__data_spec__init(&pb->data);
    pb->data.tokens = (Muster__V1__TokenFormat)spec->data.tokens;
    pb->data.holdout = spec->data.holdout;
    muster__v1__batch_spec__init(&pb->batch);
    pb->batch.sequences = spec->batch.sequences;
    pb->batch.micro = spec->batch.micro;
    pb->batch.accumulate = spec->batch.accumulate;
    pb->batch.length = spec->batch.length;
}

static void fill_optimizer(struct spec_pb *pb, const struct mu_job_spec *spec)
{
    Muster__V1__OptimizerSpec *optimizer = &pb->optimizer;
    muster__v1__optimizer_spec__init(optimizer);
    optimizer->lr = spec->optimizer.lr;
    optimizer->optional_min_lr_case = MUSTER__V1__OPTIMIZER_SPEC__OPTIONAL_MIN_LR_MIN_LR;
    optimizer->min_lr = spec->optimizer.min_lr;
    optimizer->warmup = spec->optimizer.warmup;
    optimizer->optional_beta1_case = MUSTER__V1__OPTIMIZER_SPEC__OPTIONAL_BETA1_BETA1;
    optimizer->beta1 = spec->optimizer.beta1;
    optimizer->optional_beta2_case = MUSTER__V1__OPTIMIZER_SPEC__OPTIONAL_BETA2_BETA2;
    optimizer->beta2 = spec->optimizer.beta2;
    optimizer->eps = spec->optimizer.eps;
    optimizer->optional_weight_decay_case = MUSTER__V1__OPTIMIZER_SPEC__OPTIONAL_WEIGHT_DECAY_WEIGHT_DECAY;
    optimizer->weight_decay = spec->optimizer.weight_decay;
    optimizer->optional_clip_case = MUSTER__V1__OPTIMIZER_SPEC__OPTIONAL_CLIP_CLIP;
    optimizer->clip = spec->optimizer.clip;
}

static void fill_policies(struct spec_pb *pb, const struct mu_job_spec *spec)
{
    muster__v1__parallel_spec__init(&pb->parallel);
    pb->parallel.tp = spec->parallel.tp;
    pb->parallel.pp = spec->parallel.pp;
    pb->parallel.dp = spec->parallel.dp;
    pb->parallel.optimizer_sharding = spec->parallel.optimizer_sharding;
    pb->parallel.recompute = (Muster__V1__Recompute)spec->parallel.recompute;
    pb->parallel.redundancy = (Muster__V1__Redundancy)spec->parallel.redundancy;
    muster__v1__worker_policy__init(&pb->workers);
    pb->workers.min = spec->workers.min;
    pb->workers.max = spec->workers.max;
    pb->workers.spares = spec->workers.spares;
    muster__v1__checkpoint_policy__init(&pb->checkpoint);
    pb->checkpoint.kind = (Muster__V1__CheckpointKind)spec->checkpoint.kind;
    pb->checkpoint.every_auto = spec->checkpoint.every == MU_EVERY_AUTO;
    pb->checkpoint.every = pb->checkpoint.every_auto ? 0 : spec->checkpoint.every;
    pb->checkpoint.keep = spec->checkpoint.keep;
    pb->checkpoint.keep_every = spec->checkpoint.keep_every;
    muster__v1__eval_policy__init(&pb->eval);
    pb->eval.every = spec->eval.every;
    pb->eval.sequences = spec->eval.sequences;
}

enum mu_status mu_wire_spec_to_pb(struct mu_wire_arena *arena, const struct mu_job_spec *spec,
                                  Muster__V1__JobSpec **ret_pb, struct mu_error *err)
{
    struct spec_pb *pb = mu_wire_arena_alloc(arena, sizeof *pb);
    if (!pb)
        return mu_fail(err, MU_ERR_NO_MEMORY, "JobSpec: no memory");
    fill_model_and_data(pb, spec);
    fill_optimizer(pb, spec);
    fill_policies(pb, spec);
    muster__v1__init_spec__init(&pb->init);
    muster__v1__job_spec__init(&pb->spec);
    enum mu_status status;
    if ((status =
             mu_wire_put_string(spec->name, MU_WIRE_NAME, "JobSpec.name", sizeof spec->name, &pb->spec.name, err)) ||
        (status = mu_wire_put_string(spec->data.path, MU_WIRE_TEXT, "DataSpec.path", sizeof spec->data.path,
                                     &pb->data.path, err)) ||
        (status = mu_wire_put_string(spec->checkpoint.path, MU_WIRE_TEXT, "CheckpointPolicy.path",
                                     sizeof spec->checkpoint.path, &pb->checkpoint.path, err)) ||
        (status = mu_wire_put_string(spec->init.path, MU_WIRE_TEXT, "InitSpec.path", sizeof spec->init.path,
                                     &pb->init.path, err)) ||
        (status = mu_wire_put_string(spec->init.sha256, MU_WIRE_TEXT, "InitSpec.sha256", sizeof spec->init.sha256,
                                     &pb->init.sha256, err)))
        return status;
    pb->spec.model = &pb->model;
    pb->spec.data = &pb->data;
    pb->spec.batch = &pb->batch;
    pb->spec.steps = spec->steps;
    pb->spec.optimizer = &pb->optimizer;
    pb->spec.parallel = &pb->parallel;
    pb->spec.workers = &pb->workers;
    pb->spec.checkpoint = &pb->checkpoint;
    pb->spec.eval = &pb->eval;
    pb->spec.numerics = (Muster__V1__Numerics)spec->numerics;
    pb->spec.compute = (Muster__V1__Compute)spec->compute;
    pb->spec.data_tls = spec->data_tls;
    pb->spec.optional_seed_case = MUSTER__V1__JOB_SPEC__OPTIONAL_SEED_SEED;
    pb->spec.seed = spec->seed;
    if (spec->init.path[0])
        pb->spec.init = &pb->init;
    pb->spec.newest_amendment = spec->amendments.newest;
    *ret_pb = &pb->spec;
    return mu_wire_amendments_to_pb(arena, &spec->amendments, &pb->spec.n_amendments, &pb->spec.amendments, err);
}

/* Enums of a spec have the same numbers on the wire; zero leaves the default. mu_job_spec_check judges the value. */
static int given_or(int value, int fallback)
{
    return value != 0 ? value : fallback;
}

static uint32_t given_or_u32(uint32_t value, uint32_t fallback)
{
    return value != 0 ? value : fallback;
}

static void read_model_and_batch(const Muster__V1__JobSpec *pb, struct mu_job_spec *spec)
{
    if (pb->model) {
        spec->model.family = (enum mu_model_family)given_or((int)pb->model->family, (int)spec->model.family);
        spec->model.layers = pb->model->layers;
        spec->model.heads = pb->model->heads;
        spec->model.channels = pb->model->channels;
        spec->model.context = pb->model->context;
        spec->model.vocab = pb->model->vocab;
        spec->model.dropout = pb->model->dropout;
        spec->model.kv_heads = pb->model->kv_heads;
        spec->model.hidden = pb->model->hidden;
        spec->model.rope_base = pb->model->rope_base;
        spec->model.slices = pb->model->slices;
    }
    mu_model_config_resolve(&spec->model); /* what is 0 was not given */
    spec->batch.length = spec->model.context;
    if (pb->batch) {
        spec->batch.sequences = pb->batch->sequences;
        spec->batch.micro = pb->batch->micro;
        spec->batch.accumulate = given_or_u32(pb->batch->accumulate, spec->batch.accumulate);
        spec->batch.length = given_or_u32(pb->batch->length, spec->batch.length);
    }
}

static void read_optimizer(const Muster__V1__OptimizerSpec *pb, struct mu_job_spec *spec)
{
    if (!pb)
        return;
    if (pb->lr != 0.0)
        spec->optimizer.lr = pb->lr;
    if (pb->optional_min_lr_case == MUSTER__V1__OPTIMIZER_SPEC__OPTIONAL_MIN_LR_MIN_LR)
        spec->optimizer.min_lr = pb->min_lr;
    spec->optimizer.warmup = pb->warmup;
    if (pb->optional_beta1_case == MUSTER__V1__OPTIMIZER_SPEC__OPTIONAL_BETA1_BETA1)
        spec->optimizer.beta1 = pb->beta1;
    if (pb->optional_beta2_case == MUSTER__V1__OPTIMIZER_SPEC__OPTIONAL_BETA2_BETA2)
        spec->optimizer.beta2 = pb->beta2;
    if (pb->eps != 0.0)
        spec->optimizer.eps = pb->eps;
    if (pb->optional_weight_decay_case == MUSTER__V1__OPTIMIZER_SPEC__OPTIONAL_WEIGHT_DECAY_WEIGHT_DECAY)
        spec->optimizer.weight_decay = pb->weight_decay;
    if (pb->optional_clip_case == MUSTER__V1__OPTIMIZER_SPEC__OPTIONAL_CLIP_CLIP)
        spec->optimizer.clip = pb->clip;
}

static void read_parallel(const Muster__V1__ParallelSpec *pb, struct mu_job_spec *spec)
{
    if (!pb)
        return;
    spec->parallel.tp = pb->tp;
    spec->parallel.pp = pb->pp;
    spec->parallel.dp = pb->dp;
    spec->parallel.optimizer_sharding = pb->optimizer_sharding != 0;
    spec->parallel.recompute = (enum mu_recompute)given_or((int)pb->recompute, (int)spec->parallel.recompute);
    spec->parallel.redundancy = (enum mu_redundancy)given_or((int)pb->redundancy, (int)spec->parallel.redundancy);
}

static void read_policies(const Muster__V1__JobSpec *pb, struct mu_job_spec *spec)
{
    if (pb->workers) {
        spec->workers.min = given_or_u32(pb->workers->min, spec->workers.min);
        spec->workers.max = given_or_u32(pb->workers->max, spec->workers.max);
        spec->workers.spares = pb->workers->spares;
    }
    if (pb->checkpoint) {
        spec->checkpoint.kind =
            (enum mu_checkpoint_kind)given_or((int)pb->checkpoint->kind, (int)spec->checkpoint.kind);
        spec->checkpoint.every = pb->checkpoint->every_auto ? MU_EVERY_AUTO : pb->checkpoint->every;
        if (!pb->checkpoint->every_auto && spec->checkpoint.every == MU_EVERY_AUTO)
            spec->checkpoint.every--; /* a number that is far too large, and is refused as one */
        spec->checkpoint.keep = given_or_u32(pb->checkpoint->keep, spec->checkpoint.keep);
        spec->checkpoint.keep_every = pb->checkpoint->keep_every;
    }
    if (pb->eval) {
        spec->eval.every = pb->eval->every;
        spec->eval.sequences = pb->eval->sequences;
    }
}

enum mu_status mu_wire_spec_from_pb(const Muster__V1__JobSpec *pb, struct mu_job_spec *ret_spec, struct mu_error *err)
{
    if (!pb)
        return mu_fail(err, MU_ERR_INVALID, "spec: is missing; give the job's spec");
    struct mu_job_spec spec;
    mu_job_spec_init(&spec);
    enum mu_status status = MU_OK;
    if ((status = mu_wire_get_string(pb->name, MU_WIRE_NAME, "JobSpec.name", spec.name, sizeof spec.name, err)) ||
        (status = mu_wire_get_string(pb->data ? pb->data->path : "", MU_WIRE_TEXT, "DataSpec.path", spec.data.path,
                                     sizeof spec.data.path, err)) ||
        (status = mu_wire_get_string(pb->checkpoint ? pb->checkpoint->path : "", MU_WIRE_TEXT, "CheckpointPolicy.path",
                                     spec.checkpoint.path, sizeof spec.checkpoint.path, err)) ||
        (status = mu_wire_get_string(pb->init ? pb->init->path : "", MU_WIRE_TEXT, "InitSpec.path", spec.init.path,
                                     sizeof spec.init.path, err)) ||
        (status = mu_wire_get_string(pb->init ? pb->init->sha256 : "", MU_WIRE_TEXT, "InitSpec.sha256",
                                     spec.init.sha256, sizeof spec.init.sha256, err)) ||
        (status =
             mu_wire_amendments_from_pb(pb->n_amendments, pb->amendments, pb->newest_amendment, &spec.amendments, err)))
        return status;
    read_model_and_batch(pb, &spec);
    if (pb->data) {
        spec.data.tokens = (enum mu_token_format)given_or((int)pb->data->tokens, (int)spec.data.tokens);
        spec.data.holdout = pb->data->holdout;
    }
    spec.steps = pb->steps;
    read_optimizer(pb->optimizer, &spec);
    read_parallel(pb->parallel, &spec);
    read_policies(pb, &spec);
    spec.numerics = (enum mu_numerics)given_or((int)pb->numerics, (int)spec.numerics);
    spec.compute = (enum mu_compute)given_or((int)pb->compute, (int)spec.compute);
    spec.data_tls = pb->data_tls != 0;
    if (pb->optional_seed_case == MUSTER__V1__JOB_SPEC__OPTIONAL_SEED_SEED)
        spec.seed = pb->seed;
    status = mu_job_spec_check(&spec, err);
    if (status == MU_OK)
        *ret_spec = spec;
    return status;
}

void mu_wire_result_to_pb(const struct mu_step_result *result, Muster__V1__StepResult *pb)
{
    muster__v1__step_result__init(pb);
    pb->step = result->step;
    pb->loss = result->loss;
    pb->grad_norm = result->grad_norm;
    pb->command = result->command;
    pb->finite = result->finite;
}

void mu_wire_result_from_pb(const Muster__V1__StepResult *pb, struct mu_step_result *ret_result)
{
    *ret_result = (struct mu_step_result){0};
    if (!pb)
        return;
    ret_result->step = pb->step;
    ret_result->loss = pb->loss;
    ret_result->grad_norm = pb->grad_norm;
    ret_result->command = pb->command;
    ret_result->finite = pb->finite;
}
