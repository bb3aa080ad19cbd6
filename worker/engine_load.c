#include "worker/engine_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/fault.h"
#include "kernels/kernels.h"

/* ---- memory ---- */

/* What the system can still give without swapping or killing; UINT64_MAX when it does not say. */
static uint64_t available_bytes(void)
{
    uint64_t kib = UINT64_MAX >> 10;
    char line[128];
    FILE *file = fopen("/proc/meminfo", "re");
    if (!file)
        return UINT64_MAX;
    while (fgets(line, sizeof line, file)) {
        unsigned long long value;
        if (sscanf(line, "MemAvailable: %llu kB", &value) == 1) {
            kib = value;
            break;
        }
    }
    fclose(file);
    return kib << 10;
}

enum mu_status engine_check_memory(uint64_t size_bytes, const char *what, struct mu_error *err)
{
    uint64_t available = available_bytes();
    if (size_bytes <= available)
        return MU_OK;
    return mu_fail(err, MU_ERR_NO_MEMORY,
                   "%s: %llu MiB are needed, %llu MiB are available; use a smaller model or micro-batch, fewer workers "
                   "on this host, or "
                   "more memory",
                   what, (unsigned long long)(size_bytes >> 20), (unsigned long long)(available >> 20));
}

static enum mu_status new_flats(const struct mu_model_spec *model, uint32_t count, const char *what,
                                struct mu_arena **ret_arena, struct mu_error *err)
{
    uint64_t size_bytes = count * mu_arena_piece_bytes(model->flat_size * sizeof(float));
    enum mu_status status = engine_check_memory(size_bytes, what, err);
    return status == MU_OK ? mu_arena_new(size_bytes, err, ret_arena) : status;
}

static float *take_flat(struct mu_arena *arena, const struct mu_model_spec *model)
{
    return mu_arena_take(arena, model->flat_size * sizeof(float));
}

enum mu_status engine_state_new(const struct mu_model_spec *model, struct engine_state *ret_state, struct mu_error *err)
{
    struct engine_state state;
    enum mu_status status = new_flats(model, 3, "parameters and moments", &state.arena, err);
    if (status != MU_OK)
        return status;
    state.params = take_flat(state.arena, model);
    state.m = take_flat(state.arena, model);
    state.v = take_flat(state.arena, model);
    *ret_state = state;
    return MU_OK;
}

void engine_state_free(struct engine_state *state)
{
    mu_arena_free(state->arena);
    memset(state, 0, sizeof *state);
}

enum mu_status engine_reserve_stack(struct mu_engine *engine, uint32_t depth, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    MU_ASSERT(depth <= MU_TREE_ROOTS_MAX);
    for (uint32_t i = job->stack_count; i < depth; i++) {
        enum mu_status status = new_flats(&job->model, 1, "gradient buffers", &job->stack_arenas[i], err);
        if (status != MU_OK)
            return status;
        job->stack[i] = take_flat(job->stack_arenas[i], &job->model);
        job->stack_count = i + 1;
        atomic_fetch_add_explicit(&engine->progress, 1, memory_order_relaxed);
    }
    return MU_OK;
}

enum mu_status engine_reserve_staging(struct mu_engine *engine, uint64_t size_bytes, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    if (size_bytes <= job->staging_bytes)
        return MU_OK;
    mu_arena_free(job->staging_arena);
    job->staging_arena = NULL;
    job->staging_bytes = 0;
    enum mu_status status = engine_check_memory(size_bytes, "staging of received gradients", err);
    if (status == MU_OK)
        status = mu_arena_new(size_bytes, err, &job->staging_arena);
    if (status != MU_OK)
        return status;
    job->staging = mu_arena_take(job->staging_arena, size_bytes);
    job->staging_bytes = size_bytes;
    return MU_OK;
}

enum mu_status engine_reserve_snapshot(struct mu_engine *engine, uint32_t piece_count, struct mu_error *err)
{
    const struct engine_job *job = &engine->job;
    if (!job->spec.checkpoint.path[0])
        return MU_OK;
    uint64_t growth_bytes = mu_snapshots_growth_bytes(engine->snapshots, &job->model, piece_count);
    enum mu_status status = engine_check_memory(growth_bytes, "copy of the state for checkpoints", err);
    return status == MU_OK ? mu_snapshots_reserve(engine->snapshots, &job->model, piece_count, err) : status;
}

/* The deepest stack of gradient buffers that any contiguous range of leaves can need. */
static uint32_t deepest_stack(uint32_t leaves)
{
    uint32_t deepest = 0, bound = 1;
    for (uint32_t n = leaves; n > 0; n >>= 1)
        bound += 2;
    if (leaves > ENGINE_EXACT_LEAVES)
        return bound;
    for (uint32_t first = 0; first < leaves; first++) {
        uint32_t depth = mu_tree_buffers(leaves, first, leaves - first);
        deepest = depth > deepest ? depth : deepest;
    }
    return deepest;
}

/* Small models get everything that any later layout may ask for, so that no recovery waits for page faults. */
static enum mu_status reserve_for_all_layouts(struct mu_engine *engine, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    uint64_t flat_bytes = job->model.flat_size * sizeof(float);
    uint32_t depth = deepest_stack(job->leaves);
    enum mu_status status = engine_reserve_stack(engine, 1, err);
    if (status != MU_OK || (depth + 4) * flat_bytes > MU_ENGINE_EAGER_BYTES)
        return status;
    status = engine_reserve_stack(engine, depth, err);
    if (status == MU_OK)
        status = engine_reserve_staging(engine, flat_bytes, err);
    if (status == MU_OK)
        status = engine_reserve_snapshot(engine, 1, err);
    return status;
}

/* ---- the job ---- */

static enum mu_status open_data(struct engine_job *job, struct mu_error *err)
{
    const struct mu_job_spec *spec = &job->spec;
    struct mu_data_config config = {.path = spec->data.path,
                                    .format = spec->data.tokens,
                                    .vocab = spec->model.vocab,
                                    .length = spec->batch.length,
                                    .holdout = spec->data.holdout};
    enum mu_status status = mu_data_open(&config, &job->data, err);
    if (status != MU_OK)
        return status;
    mu_data_info(job->data, &job->data_info);
    if (spec->eval.every == 0)
        return MU_OK;
    if (job->data_info.eval_samples == 0)
        return mu_fail(err, MU_ERR_INVALID,
                       "eval.every: %llu is not allowed: '%s' has no whole held-out sequence of %u tokens; raise "
                       "data.holdout (now %g) or "
                       "switch evaluation off",
                       (unsigned long long)spec->eval.every, spec->data.path, spec->batch.length, spec->data.holdout);
    uint64_t micro = spec->batch.micro, wanted = (spec->eval.sequences + micro - 1) / micro * micro;
    job->eval_sequences = wanted < job->data_info.eval_samples ? wanted : job->data_info.eval_samples;
    job->eval_leaves = (uint32_t)((job->eval_sequences + micro - 1) / micro);
    return MU_OK;
}

static enum mu_status build_model(struct mu_engine *engine, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    const struct mu_job_spec *spec = &job->spec;
    struct mu_model_options options = {
        .micro = spec->batch.micro, .length = spec->batch.length, .accumulate = spec->batch.accumulate};
    size_t tokens = (size_t)spec->batch.micro * spec->batch.length;
    enum mu_status status = engine_check_memory(mu_model_workspace_bytes(&job->model, &options), "activations", err);
    if (status == MU_OK)
        status = mu_model_new(&job->model, &options, engine->pool, err, &job->net);
    if (status != MU_OK)
        return status;
    job->tokens = calloc(tokens, sizeof *job->tokens);
    job->targets = calloc(tokens, sizeof *job->targets);
    job->samples = calloc(spec->batch.micro, sizeof *job->samples);
    if (!job->tokens || !job->targets || !job->samples)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for a micro-batch of %zu tokens", tokens);
    return MU_OK;
}

static enum mu_status load_job(struct mu_engine *engine, const struct engine_command *command,
                               struct mu_hash128 *ret_identity, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    job->spec = command->spec;
    job->uid = command->id;
    mu_model_spec_init(&job->model, &job->spec.model);
    job->leaves = mu_job_leaves(&job->spec);
    job->tokens_per_step = (uint64_t)job->spec.batch.sequences * job->spec.batch.length;
    enum mu_status status = open_data(job, err);
    if (status == MU_OK)
        status = build_model(engine, err);
    if (status == MU_OK)
        status = engine_state_new(&job->model, &job->state, err);
    if (status == MU_OK)
        status = reserve_for_all_layouts(engine, err);
    if (status != MU_OK)
        return status;
    struct mu_kernel_shapes shapes = {.sequences = job->spec.batch.micro,
                                      .length = job->spec.batch.length,
                                      .channels = job->spec.model.channels,
                                      .heads = job->spec.model.heads,
                                      .vocab = job->spec.model.vocab};
    struct mu_kernel_identity identity;
    status = mu_kernels_identity(engine->pool, &shapes, err, &identity);
    if (status == MU_OK)
        *ret_identity = identity.total;
    return status;
}

void engine_load(struct mu_engine *engine, const struct engine_command *command)
{
    struct mu_error err = {0};
    struct mu_worker_event event = {.kind = MU_WE_JOB_LOADED};
    MU_FAULT("worker.load");
    engine_generation_close(&engine->now);
    engine_generation_close(&engine->old);
    engine_unload(engine);
    engine_set_cancellable(engine, false); /* the flag may still speak of an older generation */
    event.job_loaded.status = load_job(engine, command, &event.job_loaded.numeric_identity, &err);
    engine_set_cancellable(engine, true);
    if (event.job_loaded.status == MU_OK) {
        event.job_loaded.data_hash = engine->job.data_info.content;
        engine->phase = ENGINE_LOADED;
    } else {
        engine_unload(engine);
    }
    event.job_loaded.text = err.text;
    engine_post(engine, &event);
}

void engine_unload(struct mu_engine *engine)
{
    struct engine_job *job = &engine->job;
    mu_model_free(job->net);
    mu_data_close(job->data);
    free(job->tokens);
    free(job->targets);
    free(job->samples);
    engine_state_free(&job->state);
    engine_state_free(&job->incoming);
    for (uint32_t i = 0; i < job->stack_count; i++)
        mu_arena_free(job->stack_arenas[i]);
    mu_arena_free(job->staging_arena);
    memset(job, 0, sizeof *job);
    memset(&engine->held, 0, sizeof engine->held);
    engine->phase = ENGINE_EMPTY;
}
