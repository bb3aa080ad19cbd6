#include "worker/engine_internal.h"

#include <string.h>

#include "common/fault.h"
#include "common/hash.h"
#include "kernels/kernels.h"
#include "plan/memory.h"

/* ---- memory ---- */

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

/* May one worker hold the whole model? Then that is what it will most likely be told to do. Of a sharded optimizer it
 * would hold a part, of unknown size. */
static bool may_be_whole(const struct mu_engine *engine)
{
    const struct mu_job_spec *spec = &engine->job.spec;
    if (spec->parallel.tp > 1 || spec->parallel.pp > 1)
        return false;
    bool always = engine->memory_bytes == 0 ||
                  (spec->parallel.tp == 1 && spec->parallel.pp == 1 && spec->parallel.optimizer_sharding);
    return always || mu_memory_of_worker(spec, 1, engine->threads).total_bytes <= engine->memory_bytes;
}

/* Everything that a worker with the whole model touches; for small models also what any later number of workers may ask
 * for. So no recovery waits for page faults. */
static enum mu_status reserve_whole(struct mu_engine *engine, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    struct mu_layout layout;
    mu_layout_init(&layout, 1, job->model.config.layers);
    layout.sharded = job->spec.parallel.optimizer_sharding;
    uint64_t flat_bytes = job->model.flat_size * sizeof(float);
    uint32_t depth = job->spec.numerics == MU_NUMERICS_FAST ? 1 : deepest_stack(job->leaves);
    bool small = (depth + 4) * flat_bytes <= MU_ENGINE_EAGER_BYTES;
    enum mu_status status = engine_build_net(engine, &layout, 0, 1, err);
    if (status == MU_OK && !layout.sharded) /* else what it owns depends on how many there are */
        status = engine_commit_state(engine, &job->state, &layout, 0, err);
    if (status == MU_OK)
        status = engine_commit_stack(engine, small ? depth : 1, &layout, 0, err);
    if (status == MU_OK && small)
        status = engine_reserve_staging(engine, flat_bytes, err);
    if (status == MU_OK && small && !layout.sharded)
        status = engine_reserve_snapshot(engine, &layout, 0, err);
    return status;
}

/* Only once the layout is known is it known what is needed; what is likely is prepared now. */
static enum mu_status reserve_early(struct mu_engine *engine, struct mu_error *err)
{
    const struct mu_job_spec *spec = &engine->job.spec;
    if (!may_be_whole(engine))
        return MU_OK;
    enum mu_status status = reserve_whole(engine, err);
    if (status != MU_ERR_NO_MEMORY || (spec->parallel.tp == 1 && spec->parallel.pp == 1))
        return status;
    struct mu_layout idle;
    mu_layout_init(&idle, 1, engine->job.model.config.layers);
    idle.idle = 1;
    engine_net_free(engine);
    engine_release_unshared(engine, &idle, 1); /* too large for one worker: it will get a part */
    return MU_OK;
}

/* ---- the job ---- */

static enum mu_status open_data(struct engine_job *job, struct mu_error *err)
{
    const struct mu_job_spec *spec = &job->spec;
    struct mu_data_config config = {.path = spec->data.path,
                                    .format = spec->data.tokens,
                                    .vocab = spec->model.vocab,
                                    .length = spec->batch.length,
                                    .holdout = spec->data.holdout,
                                    .keep_sums_from = MU_DATA_KEEP_SUMS};
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

static void tell_identity(const struct mu_kernel_identity *identity, struct mu_worker_event *event)
{
    _Static_assert((int)MU_IDENTITY_PARTS <= (int)MU_IDENTITY_PARTS_MAX, "every kernel can be told");
    struct mu_identity_parts *parts = &event->job_loaded.identity_parts;
    event->job_loaded.numeric_identity = identity->total;
    parts->count = identity->count;
    for (uint32_t i = 0; i < identity->count; i++) {
        size_t length = strnlen(identity->parts[i].name, MU_IDENTITY_NAME_SIZE - 1);
        memcpy(parts->parts[i].name, identity->parts[i].name, length);
        parts->parts[i].hash = identity->parts[i].hash;
    }
}

static enum mu_status load_job(struct mu_engine *engine, const struct engine_command *command,
                               struct mu_worker_event *event, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    if (mu_device_trouble(engine->device))
        return mu_fail(err, MU_ERR_IO, "%s; start the worker again", mu_device_trouble(engine->device));
    job->spec = command->spec;
    job->uid = command->id;
    mu_model_spec_init(&job->model, &job->spec.model);
    job->leaves = mu_job_leaves(&job->spec);
    job->tokens_per_step = (uint64_t)job->spec.batch.sequences * job->spec.batch.length;
    enum mu_dtype dtype = job->spec.compute == MU_COMPUTE_BF16 ? MU_DTYPE_BF16 : MU_DTYPE_FP32;
    enum mu_status status = mu_device_compute(engine->device, dtype, err);
    if (status == MU_OK)
        status = open_data(job, err);
    if (status == MU_OK)
        status = engine_state_new(engine, &job->state, err);
    if (status == MU_OK)
        status = reserve_early(engine, err);
    if (status != MU_OK)
        return status;
    const struct mu_model_config *config = &job->model.config;
    struct mu_kernel_shapes shapes = {.sequences = job->spec.batch.micro,
                                      .length = job->spec.batch.length,
                                      .channels = config->channels,
                                      .heads = config->heads,
                                      .vocab = config->vocab,
                                      .kv_heads = config->kv_heads,
                                      .hidden = config->hidden,
                                      .slices = config->slices,
                                      .llama = config->family == MU_FAMILY_LLAMA};
    struct mu_kernel_identity identity;
    status = mu_kernels_identity(engine->pool, &shapes, err, &identity);
    if (status == MU_OK)
        tell_identity(&identity, event);
    if (status == MU_OK && job->spec.numerics == MU_NUMERICS_FAST) { /* the same kernels, another law */
        struct {
            char law[16];
            struct mu_hash128 kernels;
        } fast = {"numerics: fast", identity.total};
        event->job_loaded.numeric_identity = mu_xxh3_128(&fast, sizeof fast);
    }
    return status;
}

void engine_load(struct mu_engine *engine, const struct engine_command *command)
{
    struct mu_error err = {0};
    struct mu_worker_event event = {.kind = MU_WE_JOB_LOADED};
    MU_FAULT("worker.load");
    engine_feeds_drop(engine);
    engine_take_drop(engine);
    engine_generation_close(engine, &engine->now);
    engine_generation_close(engine, &engine->old);
    engine_unload(engine);
    engine_set_cancellable(engine, false); /* the flag may still speak of an older generation */
    event.job_loaded.status = load_job(engine, command, &event, &err);
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
    engine_net_free(engine);
    mu_data_close(job->data);
    engine_state_free(&job->state);
    engine_state_free(&job->incoming);
    engine_forget_arrived(engine);
    for (uint32_t i = 0; i < job->stack_count; i++)
        mu_space_free(job->stack_spaces[i]);
    mu_arena_free(job->staging_arena);
    memset(job, 0, sizeof *job);
    memset(&engine->held, 0, sizeof engine->held);
    engine->phase = ENGINE_EMPTY;
}
