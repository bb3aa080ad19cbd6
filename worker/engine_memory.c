#include "worker/engine_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log.h"
#include "worker/oom.h"

enum { COMMIT_BYTES = 2 << 20 }; /* backed at one time */

/* ---- what there is ---- */

/* What the system, and this process's cgroup, can still give without swapping or killing; UINT64_MAX when they do not
 * say. */
static uint64_t available_bytes(void)
{
    uint64_t kib = UINT64_MAX >> 10, left = mu_oom_left_bytes("");
    char line[128];
    FILE *file = fopen("/proc/meminfo", "re");
    if (!file)
        return left;
    while (fgets(line, sizeof line, file)) {
        unsigned long long value;
        if (sscanf(line, "MemAvailable: %llu kB", &value) == 1) {
            kib = value;
            break;
        }
    }
    fclose(file);
    return kib << 10 < left ? kib << 10 : left;
}

/* In how many parts of the model each has room for its state and one gradient, with a tenth to spare. */
static uint64_t parts_that_fit(const struct mu_engine *engine, uint64_t total_bytes)
{
    uint64_t whole = (ENGINE_KINDS + 1) * engine->job.model.flat_size * sizeof(float), room = total_bytes / 10 * 9;
    return room > 0 ? (whole + room - 1) / room : whole;
}

enum mu_status engine_check_memory(struct mu_engine *engine, enum mu_memory kind, uint64_t size_bytes, const char *what,
                                   struct mu_error *err)
{
    bool host = kind == MU_MEMORY_PINNED || mu_device_is_host(engine->device);
    uint64_t available = UINT64_MAX, total;
    if (size_bytes > 0 && host)
        available = available_bytes();
    else if (size_bytes > 0)
        mu_device_memory(engine->device, &available, &total);
    if (size_bytes <= available)
        return MU_OK;
    if (!host)
        return mu_fail(
            err, MU_ERR_NO_MEMORY,
            "%s: %llu MiB are needed, %llu of %llu MiB are free on %s; parameters, moments and gradients fit "
            "when parallel.tp times parallel.pp is %llu or more",
            what, (unsigned long long)(size_bytes >> 20), (unsigned long long)(available >> 20),
            (unsigned long long)(total >> 20), engine->device->name, (unsigned long long)parts_that_fit(engine, total));
    return mu_fail(err, MU_ERR_NO_MEMORY,
                   "%s: %llu MiB are needed, %llu MiB are available; use a smaller model or micro-batch, fewer workers "
                   "on this host, or "
                   "more memory",
                   what, (unsigned long long)(size_bytes >> 20), (unsigned long long)(available >> 20));
}

/* ---- shares ---- */

void engine_runs_of(const struct mu_model_spec *model, const struct mu_layout *layout, uint32_t rank,
                    enum mu_share share, struct engine_runs *out)
{
    out->count = mu_layout_runs(model, layout, rank, share, out->runs);
}

void engine_run_range(const struct mu_model_spec *model, const struct mu_chunk_run *run, uint64_t *ret_offset,
                      uint64_t *ret_size)
{
    struct mu_chunk head = mu_model_chunk(model, run->first), tail = mu_model_chunk(model, run->first + run->count - 1);
    *ret_offset = head.offset;
    *ret_size = tail.offset + tail.size - head.offset;
}

static void add_run(struct engine_runs *out, struct mu_chunk_run run)
{
    struct mu_chunk_run *last = out->count ? &out->runs[out->count - 1] : NULL;
    uint32_t end = run.first + run.count;
    if (last && run.first < last->first + last->count) { /* they overlap */
        last->count = end > last->first + last->count ? end - last->first : last->count;
        return;
    }
    MU_ASSERT(out->count < ENGINE_RUNS_MAX);
    out->runs[out->count++] = run;
}

/* Runs of two shares together: ascending, disjoint. */
static void merge_runs(const struct engine_runs *a, const struct engine_runs *b, struct engine_runs *out)
{
    uint32_t i = 0, k = 0;
    out->count = 0;
    while (i < a->count || k < b->count) {
        bool first = k == b->count || (i < a->count && a->runs[i].first < b->runs[k].first);
        add_run(out, first ? a->runs[i++] : b->runs[k++]);
    }
}

/* The column, and the copy of a tied embedding. */
static void step_runs(const struct mu_model_spec *model, const struct mu_layout *layout, uint32_t rank,
                      struct engine_runs *out)
{
    struct engine_runs column, copy;
    engine_runs_of(model, layout, rank, MU_SHARE_PARAMS, &column);
    engine_runs_of(model, layout, rank, MU_SHARE_COPY, &copy);
    merge_runs(&column, &copy, out);
}

void engine_touched_runs(const struct mu_model_spec *model, const struct mu_layout *layout, uint32_t rank,
                         struct engine_runs *out)
{
    struct engine_runs own, mirror;
    step_runs(model, layout, rank, &own);
    engine_runs_of(model, layout, rank, MU_SHARE_MIRROR, &mirror);
    merge_runs(&own, &mirror, out);
}

void engine_moment_runs(const struct mu_model_spec *model, const struct mu_layout *layout, uint32_t rank,
                        struct engine_runs *out)
{
    struct engine_runs own, mirror;
    engine_runs_of(model, layout, rank, MU_SHARE_MOMENTS, &own);
    engine_runs_of(model, layout, rank, MU_SHARE_MIRROR, &mirror);
    merge_runs(&own, &mirror, out);
}

static uint64_t runs_bytes(const struct mu_model_spec *model, const struct engine_runs *runs)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < runs->count; i++) {
        uint64_t offset, size;
        engine_run_range(model, &runs->runs[i], &offset, &size);
        bytes += size * sizeof(float);
    }
    return bytes;
}

/* Bytes of `runs` that lie in `held` too: both ascending, disjoint. */
static uint64_t common_bytes(const struct mu_model_spec *model, const struct engine_runs *runs,
                             const struct engine_runs *held)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0, k = 0; i < runs->count && k < held->count;) {
        struct mu_chunk_run a = runs->runs[i], b = held->runs[k];
        uint32_t first = a.first > b.first ? a.first : b.first;
        uint32_t a_end = a.first + a.count, b_end = b.first + b.count, end = a_end < b_end ? a_end : b_end;
        if (first < end) {
            uint64_t offset, size;
            engine_run_range(model, &(struct mu_chunk_run){first, end - first}, &offset, &size);
            bytes += size * sizeof(float);
        }
        if (a_end <= b_end)
            i++;
        else
            k++;
    }
    return bytes;
}

/* ---- spaces ---- */

/* There was room when it was looked at, and it is gone. */
static enum mu_status room_is_gone(const struct mu_engine *engine, struct mu_error *err)
{
    uint64_t free_bytes, total_bytes;
    if (mu_device_is_host(engine->device) || !err)
        return MU_ERR_NO_MEMORY;
    mu_device_memory(engine->device, &free_bytes, &total_bytes);
    const struct mu_error first = *err;
    return mu_fail(err, MU_ERR_NO_MEMORY,
                   "%.200s; does another program use it? Parameters, moments and gradients fit when parallel.tp times "
                   "parallel.pp is %llu or more",
                   first.text, (unsigned long long)parts_that_fit(engine, total_bytes));
}

/* Page by page, so in short stretches: an abort is obeyed meanwhile. */
static enum mu_status commit_range(struct mu_engine *engine, struct mu_space *space, uint64_t begin, uint64_t end,
                                   struct mu_error *err)
{
    enum mu_status status = MU_OK;
    while (begin < end && status == MU_OK) {
        uint64_t stretch = end - begin < COMMIT_BYTES ? end - begin : COMMIT_BYTES;
        if (mu_pool_cancelled(engine->pool))
            return mu_fail(err, MU_ERR_CANCELLED, "preparing cancelled");
        status = mu_space_commit(space, begin, stretch, err);
        begin += stretch;
        atomic_fetch_add_explicit(&engine->progress, 1, memory_order_relaxed);
    }
    return status == MU_ERR_NO_MEMORY ? room_is_gone(engine, err) : status;
}

static enum mu_status commit_runs(struct mu_engine *engine, struct mu_space *space, const struct engine_runs *runs,
                                  struct mu_error *err)
{
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; i < runs->count && status == MU_OK; i++) {
        uint64_t offset, size;
        engine_run_range(&engine->job.model, &runs->runs[i], &offset, &size);
        status = commit_range(engine, space, offset * sizeof(float), (offset + size) * sizeof(float), err);
    }
    return status;
}

/* Everything between the runs. */
static void release_between(const struct mu_model_spec *model, struct mu_space *space, const struct engine_runs *runs)
{
    uint64_t end = 0;
    for (uint32_t i = 0; i < runs->count; i++) {
        uint64_t offset, size;
        engine_run_range(model, &runs->runs[i], &offset, &size);
        mu_space_release(space, end * sizeof(float), (offset - end) * sizeof(float));
        end = offset + size;
    }
    mu_space_release(space, end * sizeof(float), (model->flat_size - end) * sizeof(float));
}

static uint64_t whole_pages(const struct mu_engine *engine, uint64_t size_bytes)
{
    uint64_t page_bytes = engine->device->page_bytes ? engine->device->page_bytes : 1;
    return (size_bytes + page_bytes - 1) / page_bytes * page_bytes;
}

/* Bytes that committing `runs` in `space` would add, at most: what is held there is there already, and no space grows
 * beyond its size. */
static uint64_t growth_bytes(const struct mu_engine *engine, const struct mu_space *space,
                             const struct engine_runs *runs, enum mu_share held_share)
{
    const struct mu_model_spec *model = &engine->job.model;
    uint64_t need = runs_bytes(model, runs), committed = mu_space_committed_bytes(space), there = 0;
    if (committed == 0)
        return whole_pages(engine, need);
    for (uint32_t i = 0; i < engine->held.share_count; i++) {
        const struct mu_held_share *share = &engine->held.shares[i];
        struct engine_runs held;
        engine_runs_of(model, &share->layout, share->rank, held_share, &held);
        uint64_t common = common_bytes(model, runs, &held);
        there = common > there ? common : there;
    }
    uint64_t room = model->flat_size * sizeof(float);
    room = room > committed ? room - committed : 0;
    return whole_pages(engine, need - there < room ? need - there : room);
}

enum mu_status engine_state_new(struct mu_engine *engine, struct engine_state *ret_state, struct mu_error *err)
{
    struct engine_state state = {0};
    for (uint32_t i = 0; i < ENGINE_KINDS; i++) {
        enum mu_status status =
            mu_space_new_on(engine->device, engine->job.model.flat_size * sizeof(float), err, &state.spaces[i]);
        if (status != MU_OK) {
            engine_state_free(&state);
            return mu_error_prefix(err, "parameters and moments");
        }
        state.flats[i] = mu_space_base(state.spaces[i]);
    }
    *ret_state = state;
    return MU_OK;
}

void engine_state_free(struct engine_state *state)
{
    for (uint32_t i = 0; i < ENGINE_KINDS; i++)
        mu_space_free(state->spaces[i]);
    memset(state, 0, sizeof *state);
}

enum mu_status engine_commit_state(struct mu_engine *engine, struct engine_state *state, const struct mu_layout *layout,
                                   uint32_t rank, struct mu_error *err)
{
    struct engine_runs params, moments;
    engine_touched_runs(&engine->job.model, layout, rank, &params);
    engine_moment_runs(&engine->job.model, layout, rank, &moments);
    uint64_t growth = growth_bytes(engine, state->spaces[0], &params, MU_SHARE_PARAMS) +
                      2 * growth_bytes(engine, state->spaces[1], &moments, MU_SHARE_MOMENTS);
    enum mu_status status = engine_check_memory(engine, MU_MEMORY_DEVICE, growth, "parameters and moments", err);
    for (uint32_t i = 0; i < ENGINE_KINDS && status == MU_OK; i++) {
        status = commit_runs(engine, state->spaces[i], i == 0 ? &params : &moments, err);
        if (status == MU_ERR_NO_MEMORY)
            return mu_error_prefix(err, "parameters and moments");
    }
    return status;
}

enum mu_status engine_commit_stack(struct mu_engine *engine, uint32_t depth, const struct mu_layout *layout,
                                   uint32_t rank, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    struct engine_runs runs;
    MU_ASSERT(depth <= MU_TREE_ROOTS_MAX);
    engine_touched_runs(&job->model, layout, rank, &runs); /* the lowest: gradients of what is mirrored arrive there */
    for (uint32_t i = 0; i < depth; i++) {
        enum mu_status status = MU_OK;
        if (i == 1)
            step_runs(&job->model, layout, rank, &runs);
        if (i == job->stack_count) {
            status = mu_space_new_on(engine->device, job->model.flat_size * sizeof(float), err, &job->stack_spaces[i]);
            if (status != MU_OK)
                return mu_error_prefix(err, "gradient buffers");
            job->stack[i] = mu_space_base(job->stack_spaces[i]);
            job->stack_count = i + 1;
        }
        uint64_t growth = growth_bytes(engine, job->stack_spaces[i], &runs, MU_SHARE_PARAMS);
        status = engine_check_memory(engine, MU_MEMORY_DEVICE, growth, "gradient buffers", err);
        if (status != MU_OK)
            return status;
        status = commit_runs(engine, job->stack_spaces[i], &runs, err);
        if (status != MU_OK)
            return status == MU_ERR_NO_MEMORY ? mu_error_prefix(err, "gradient buffers") : status;
    }
    return MU_OK;
}

void engine_release_unshared(struct mu_engine *engine, const struct mu_layout *layout, uint32_t rank)
{
    struct engine_job *job = &engine->job;
    struct engine_runs params, moments;
    engine_touched_runs(&job->model, layout, rank, &params);
    engine_moment_runs(&job->model, layout, rank, &moments);
    for (uint32_t i = 0; i < ENGINE_KINDS; i++)
        release_between(&job->model, job->state.spaces[i], i == 0 ? &params : &moments);
    for (uint32_t i = 0; i < job->stack_count; i++)
        release_between(&job->model, job->stack_spaces[i], &params);
}

/* ---- other buffers ---- */

enum mu_status engine_reserve_staging(struct mu_engine *engine, uint64_t size_bytes, struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    if (size_bytes <= job->staging_bytes)
        return MU_OK;
    mu_arena_free(job->staging_arena);
    job->staging_arena = NULL;
    job->staging_bytes = 0;
    enum mu_status status =
        engine_check_memory(engine, MU_MEMORY_DEVICE, size_bytes, "staging of received gradients", err);
    if (status == MU_OK)
        status = mu_arena_new_on(engine->device, MU_MEMORY_DEVICE, size_bytes, err, &job->staging_arena);
    if (status != MU_OK)
        return status;
    job->staging = mu_arena_take(job->staging_arena, size_bytes);
    job->staging_bytes = size_bytes;
    return MU_OK;
}

enum mu_status engine_reserve_snapshot(struct mu_engine *engine, const struct mu_layout *layout, uint32_t rank,
                                       struct mu_error *err)
{
    const struct engine_job *job = &engine->job;
    if (!job->spec.checkpoint.path[0] || mu_layout_is_idle(layout, rank))
        return MU_OK;
    uint64_t piece_bytes = mu_snapshots_piece_bytes(&job->model, layout, rank);
    uint64_t growth = mu_snapshots_growth_bytes(engine->snapshots, piece_bytes);
    enum mu_status status =
        engine_check_memory(engine, MU_MEMORY_PINNED, growth, "copy of the state for checkpoints", err);
    return status == MU_OK ? mu_snapshots_reserve(engine->snapshots, piece_bytes, err) : status;
}

/* ---- the account ---- */

void engine_log_memory(const struct mu_engine *engine)
{
    const struct engine_job *job = &engine->job;
    uint64_t gradients = 0, moments = 0;
    for (uint32_t i = 1; i < ENGINE_KINDS; i++)
        moments += mu_space_committed_bytes(job->state.spaces[i]);
    for (uint32_t i = 0; i < job->stack_count; i++)
        gradients += mu_space_committed_bytes(job->stack_spaces[i]);
    char fields[192];
    snprintf(fields, sizeof fields,
             "parameters_bytes=%llu moments_bytes=%llu gradients_bytes=%llu staging_bytes=%llu snapshot_bytes=%llu",
             (unsigned long long)mu_space_committed_bytes(job->state.spaces[0]), (unsigned long long)moments,
             (unsigned long long)gradients, (unsigned long long)job->staging_bytes,
             (unsigned long long)mu_snapshots_room_bytes(engine->snapshots));
    mu_log(MU_LOG_INFO, fields, "generation %llu: memory held", (unsigned long long)engine->now.generation);
}

/* ---- the net ---- */

/* The tensor group of whatever generation is under way: the net outlives generations. */
static enum mu_status all_gather(void *ctx, void *blocks, size_t block_bytes)
{
    struct mu_engine *engine = ctx;
    return mu_tensor_comm_all_gather(engine->now.tensor, blocks, block_bytes);
}

static bool recorded(void *ctx)
{
    struct mu_engine *engine = ctx;
    return engine->now.records && mu_nccl_link_open(&engine->now.link);
}

static enum mu_status all_to_all(void *ctx, const void *send, void *recv, size_t block_bytes)
{
    struct mu_engine *engine = ctx;
    return mu_tensor_comm_all_to_all(engine->now.tensor, send, recv, block_bytes);
}

static struct mu_model_part part_of(const struct mu_model_spec *model, const struct mu_layout *layout,
                                    struct mu_coords at)
{
    uint32_t first = layout->stage_first[at.p], slices = model->config.slices / layout->tp;
    return (struct mu_model_part){.first_layer = first,
                                  .layer_count = layout->stage_first[at.p + 1] - first,
                                  .embedding = at.p == 0,
                                  .head = at.p == layout->pp - 1,
                                  .first_slice = at.t * slices,
                                  .slice_count = slices};
}

static bool same_part(const struct mu_model_part *a, const struct mu_model_part *b)
{
    return a->first_layer == b->first_layer && a->layer_count == b->layer_count && a->embedding == b->embedding &&
           a->head == b->head && a->first_slice == b->first_slice && a->slice_count == b->slice_count;
}

void engine_net_free(struct mu_engine *engine)
{
    struct engine_net *net = &engine->job.net;
    mu_model_free(net->model);
    free(net->batches.tokens);
    free(net->batches.targets);
    free(net->batches.samples);
    memset(net, 0, sizeof *net);
}

static enum mu_status new_batches(const struct engine_job *job, uint32_t slots, struct engine_batches *ret,
                                  struct mu_error *err)
{
    size_t micro = (size_t)job->spec.batch.micro * slots, tokens = micro * job->spec.batch.length;
    ret->tokens = calloc(tokens, sizeof *ret->tokens);
    ret->targets = calloc(tokens, sizeof *ret->targets);
    ret->samples = calloc(micro, sizeof *ret->samples);
    if (!ret->tokens || !ret->targets || !ret->samples)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for micro-batches of %zu tokens", tokens);
    return MU_OK;
}

/* The gentlest settings with which the activations would fit: of what is computed again, then of the micro-batch. */
static enum mu_status too_many_activations(struct mu_engine *engine, const struct mu_model_options *wanted,
                                           struct mu_error *err)
{
    static const char *const names[] = {
        [MU_RECOMPUTE_NONE] = "none", [MU_RECOMPUTE_SELECTIVE] = "selective", [MU_RECOMPUTE_FULL] = "full"};
    const struct mu_model_spec *model = &engine->job.model;
    const struct mu_error first = *err;
    uint64_t room, total;
    mu_device_memory(engine->device, &room, &total);
    unsigned long long needed = mu_model_workspace_bytes(model, wanted) >> 20, free_mib = room >> 20;
    struct mu_model_options o = *wanted;
    for (; o.micro > 0; o.micro /= 2) {
        if (o.micro * o.length % model->config.slices)
            continue;
        for (int r = MU_RECOMPUTE_NONE; r <= MU_RECOMPUTE_FULL; r++) {
            o.recompute = (enum mu_recompute)r;
            uint64_t bytes = mu_model_workspace_bytes(model, &o);
            if (bytes <= room)
                return mu_fail(err, MU_ERR_NO_MEMORY,
                               "activations: %llu MiB are needed, %llu MiB are free on %s; batch.micro: %u with "
                               "parallel.recompute: %s would need %llu MiB",
                               needed, free_mib, engine->device->name, o.micro, names[r],
                               (unsigned long long)(bytes >> 20));
        }
    }
    *err = first;
    return MU_ERR_NO_MEMORY;
}

enum mu_status engine_build_net(struct mu_engine *engine, const struct mu_layout *layout, uint32_t rank, uint32_t slots,
                                struct mu_error *err)
{
    struct engine_job *job = &engine->job;
    struct engine_net *net = &job->net;
    if (mu_layout_is_idle(layout, rank))
        return MU_OK;
    struct mu_coords at = mu_layout_coords(layout, rank);
    struct mu_model_part part = part_of(&job->model, layout, at);
    if (net->model && same_part(&part, &net->part) && slots <= net->slots)
        return MU_OK;
    engine_net_free(engine);
    net->part = part;
    net->slots = slots;
    net->tensor = (struct mu_tensor_group){.ctx = engine,
                                           .size = layout->tp,
                                           .rank = at.t,
                                           .all_gather = all_gather,
                                           .all_to_all = all_to_all,
                                           .recorded = recorded};
    struct mu_model_options options = {.micro = job->spec.batch.micro,
                                       .length = job->spec.batch.length,
                                       .accumulate = job->spec.batch.accumulate,
                                       .part = part,
                                       .recompute = job->spec.parallel.recompute,
                                       .slots = slots,
                                       .tensor = layout->tp > 1 ? &net->tensor : NULL};
    enum mu_status status = engine_check_memory(engine, MU_MEMORY_DEVICE,
                                                mu_model_workspace_bytes(&job->model, &options), "activations", err);
    if (status == MU_ERR_NO_MEMORY && !mu_device_is_host(engine->device))
        status = too_many_activations(engine, &options, err);
    if (status == MU_OK)
        status = mu_model_new(&job->model, &options, engine->pool, err, &net->model);
    if (status == MU_OK)
        status = new_batches(job, slots, &net->batches, err);
    if (status != MU_OK)
        engine_net_free(engine);
    return status;
}
