#include "worker/snapshot.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/fault.h"
#include "common/id.h"
#include "kernels/arena.h"
#include "storage/catalog.h"
#include "storage/pieces.h"
#include "worker/holder.h"

enum {
    COPY_FLOATS = 256 * 1024, /* in one task of the pool */
    KINDS = 3,                /* parameters and both moments */
};
#define BYTES_PER_ELEMENT ((uint64_t)KINDS * sizeof(float))

/* The piece under way: filled by the engine while idle, owned by the writer while busy. */
struct piece_job {
    struct mu_checkpoint_identity identity;
    struct mu_piece_report report;
    char dir[MU_PATH_SIZE];
    struct mu_piece_entry *entries;
    size_t entry_count;
};

struct mu_snapshots {
    struct mu_device *device;
    mu_snapshot_done_fn *done;
    void *ctx;
    pthread_t writer;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool busy, abandoned, stop; /* under lock */
    atomic_bool abort;
    struct mu_arena *arena;
    float *copy; /* the entries of the piece in the order of the file, packed: written from here as they lie */
    uint64_t copy_bytes;
    struct piece_job job;
};

/* ---- writer thread ---- */

/* Whoever makes the directory marks it as ours, also a writer whose checkpoint has been given up and swept meanwhile:
 * what has no mark is never deleted. */
static enum mu_status make_directory(const struct piece_job *job, struct mu_error *err)
{
    char root[MU_PATH_SIZE], path[MU_PATH_SIZE];
    uint64_t seq, ordered_step;
    struct mu_id nonce;
    const char *slash = strrchr(job->dir, '/');
    if (!slash || slash == job->dir || !mu_catalog_parse_name(slash + 1, &seq, &ordered_step, &nonce))
        return mu_fail(err, MU_ERR_INVALID, "'%s' is not the directory of a checkpoint", job->dir);
    snprintf(root, sizeof root, "%.*s", (int)(slash - job->dir), job->dir);
    return mu_catalog_create(root, job->identity.job, seq, ordered_step, nonce, path, err);
}

static void write_piece(struct mu_snapshots *snapshots)
{
    struct piece_job *job = &snapshots->job;
    struct mu_piece_report *report = &job->report;
    struct mu_piece_write_options options = {.abort = &snapshots->abort};
    struct mu_piece_result result = {0};
    struct mu_error err = {0};
    uint64_t start_us = mu_clock_mono_us();
    report->status = make_directory(job, &err);
    if (report->status == MU_OK)
        report->status = mu_piece_write(job->dir, report->file, &job->identity, job->entries, job->entry_count,
                                        &options, &result, &err);
    report->write_us = mu_clock_mono_us() - start_us;
    if (report->status == MU_OK) {
        report->size_bytes = result.size_bytes;
        report->checksum = result.xxh3;
    } else {
        snprintf(report->text, sizeof report->text, "%.*s", (int)sizeof report->text - 1, err.text);
    }
}

static void *writer_main(void *arg)
{
    struct mu_snapshots *snapshots = arg;
    pthread_setname_np(pthread_self(), "snapshot");
    pthread_mutex_lock(&snapshots->lock);
    for (;;) {
        while (!snapshots->busy && !snapshots->stop)
            pthread_cond_wait(&snapshots->changed, &snapshots->lock);
        if (snapshots->stop)
            break;
        pthread_mutex_unlock(&snapshots->lock);
        write_piece(snapshots);
        struct mu_piece_report report = snapshots->job.report;
        uint64_t generation = snapshots->job.identity.generation;
        free(snapshots->job.entries);
        snapshots->job.entries = NULL;
        pthread_mutex_lock(&snapshots->lock);
        bool silent = snapshots->abandoned || snapshots->stop;
        snapshots->busy = snapshots->abandoned = false;
        if (silent)
            continue;
        pthread_mutex_unlock(&snapshots->lock);
        snapshots->done(snapshots->ctx, generation, &report);
        pthread_mutex_lock(&snapshots->lock);
    }
    pthread_mutex_unlock(&snapshots->lock);
    return NULL;
}

/* ---- engine thread ---- */

enum mu_status mu_snapshots_new(struct mu_device *device, mu_snapshot_done_fn *done, void *ctx,
                                struct mu_snapshots **ret_snapshots, struct mu_error *err)
{
    struct mu_snapshots *snapshots = calloc(1, sizeof *snapshots);
    if (!snapshots)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the snapshot writer");
    snapshots->device = device;
    snapshots->done = done;
    snapshots->ctx = ctx;
    pthread_mutex_init(&snapshots->lock, NULL);
    pthread_cond_init(&snapshots->changed, NULL);
    int failure = pthread_create(&snapshots->writer, NULL, writer_main, snapshots);
    if (failure != 0) {
        pthread_mutex_destroy(&snapshots->lock);
        pthread_cond_destroy(&snapshots->changed);
        free(snapshots);
        return mu_fail_errno(err, failure, "cannot start the snapshot writer's thread");
    }
    *ret_snapshots = snapshots;
    return MU_OK;
}

void mu_snapshots_free(struct mu_snapshots *snapshots)
{
    if (!snapshots)
        return;
    pthread_mutex_lock(&snapshots->lock);
    snapshots->stop = true;
    atomic_store(&snapshots->abort, true);
    pthread_cond_signal(&snapshots->changed);
    pthread_mutex_unlock(&snapshots->lock);
    pthread_join(snapshots->writer, NULL);
    pthread_mutex_destroy(&snapshots->lock);
    pthread_cond_destroy(&snapshots->changed);
    free(snapshots->job.entries);
    mu_arena_free(snapshots->arena);
    free(snapshots);
}

bool mu_snapshots_busy(struct mu_snapshots *snapshots)
{
    pthread_mutex_lock(&snapshots->lock);
    bool busy = snapshots->busy;
    pthread_mutex_unlock(&snapshots->lock);
    return busy;
}

void mu_snapshots_abandon(struct mu_snapshots *snapshots)
{
    pthread_mutex_lock(&snapshots->lock);
    if (snapshots->busy) {
        snapshots->abandoned = true;
        atomic_store(&snapshots->abort, true);
    }
    pthread_mutex_unlock(&snapshots->lock);
}

/* ---- room ---- */

uint64_t mu_snapshots_piece_bytes(const struct mu_model_spec *model, const struct mu_layout *layout, uint32_t piece)
{
    return BYTES_PER_ELEMENT * mu_layout_elements(model, layout, piece, MU_SHARE_PRIMARY);
}

uint64_t mu_snapshots_room_bytes(const struct mu_snapshots *snapshots)
{
    return snapshots->copy_bytes;
}

uint64_t mu_snapshots_growth_bytes(struct mu_snapshots *snapshots, uint64_t piece_bytes)
{
    return piece_bytes > snapshots->copy_bytes ? piece_bytes - snapshots->copy_bytes : 0;
}

/* Not while busy. */
static enum mu_status ensure_room(struct mu_snapshots *snapshots, uint64_t size_bytes, struct mu_error *err)
{
    if (size_bytes <= snapshots->copy_bytes)
        return MU_OK;
    mu_arena_free(snapshots->arena);
    snapshots->arena = NULL;
    snapshots->copy_bytes = 0;
    enum mu_status status = mu_arena_new_on(snapshots->device, MU_MEMORY_PINNED, size_bytes, err, &snapshots->arena);
    if (status != MU_OK)
        return mu_error_prefix(err, "snapshot");
    snapshots->copy = mu_arena_take(snapshots->arena, size_bytes);
    snapshots->copy_bytes = size_bytes;
    return MU_OK;
}

enum mu_status mu_snapshots_reserve(struct mu_snapshots *snapshots, uint64_t piece_bytes, struct mu_error *err)
{
    return mu_snapshots_busy(snapshots) ? MU_OK : ensure_room(snapshots, piece_bytes, err);
}

/* ---- which chunks ---- */

/* What the shares hold of one kind: a list of runs for each. */
struct holding {
    struct mu_chunk_run runs[MU_HELD_SHARES_MAX][MU_RUNS_MAX];
    uint32_t counts[MU_HELD_SHARES_MAX], share_count;
};

static void list_holding(const struct mu_snapshot_state *state, bool moments, struct holding *holding)
{
    holding->share_count = state->share_count;
    for (uint32_t i = 0; i < state->share_count; i++) {
        const struct mu_held_share *share = &state->shares[i];
        enum mu_share which = moments ? MU_SHARE_MOMENTS : share->owned_only ? MU_SHARE_OWNED : MU_SHARE_PARAMS;
        holding->counts[i] = mu_layout_runs(state->model, &share->layout, share->rank, which, holding->runs[i]);
    }
}

/* The first chunk of the runs that is not held; UINT32_MAX: all are. */
static uint32_t first_missing(const struct holding *holding, const struct mu_chunk_run *runs, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t chunk = runs[i].first, end = runs[i].first + runs[i].count;
        while (chunk < end) {
            bool is_held = false;
            uint32_t next = chunk;
            for (uint32_t k = 0; k < holding->share_count && !is_held; k++)
                is_held = mu_runs_have(holding->runs[k], holding->counts[k], chunk, &next);
            if (!is_held)
                return chunk;
            chunk = next;
        }
    }
    return UINT32_MAX;
}

static enum mu_status check_covered(const struct mu_snapshot_state *state, const struct mu_snapshot *snapshot,
                                    const struct mu_chunk_run *runs, uint32_t count, struct mu_error *err)
{
    if (state->share_count > MU_HELD_SHARES_MAX)
        return mu_fail(err, MU_ERR_INVALID, "%u shares are not allowed: at most %d", state->share_count,
                       MU_HELD_SHARES_MAX);
    struct holding *holding = malloc(sizeof *holding);
    if (!holding)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory to look at the shares of this worker");
    enum mu_status status = MU_OK;
    for (int moments = 0; moments < 2 && status == MU_OK; moments++) {
        list_holding(state, moments, holding);
        uint32_t missing = first_missing(holding, runs, count);
        if (missing != UINT32_MAX)
            status = mu_fail(err, MU_ERR_NOT_FOUND,
                             "piece %u of checkpoint %llu needs the %s of chunk %u, which this worker does not hold at "
                             "step %llu; another worker must write it",
                             snapshot->piece, (unsigned long long)snapshot->checkpoint,
                             moments ? "moments" : "parameters", missing, (unsigned long long)state->step);
    }
    free(holding);
    return status;
}

/* ---- the copy ---- */

struct copy_part {
    const float *from;
    float *to;
    size_t floats;
};

static void copy_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    (void)lane;
    const struct copy_part *part = (const struct copy_part *)arg + task;
    memcpy(part->to, part->from, part->floats * sizeof(float));
}

/* Points the entries into the copy, one after the other, and lists what is to be copied; returns the number of parts.
 * `parts` may be NULL: only counted. */
static uint32_t place_entries(struct mu_snapshots *snapshots, const struct mu_snapshot_state *state,
                              struct copy_part *parts)
{
    const float *const flats[KINDS] = {state->params, state->m, state->v};
    const struct piece_job *job = &snapshots->job;
    float *to = snapshots->copy;
    uint32_t count = 0;
    for (size_t i = 0; i < job->entry_count; i++) {
        struct mu_piece_entry *entry = &job->entries[i];
        entry->data = to;
        for (uint64_t start = 0; start < entry->size; start += COPY_FLOATS, count++) {
            uint64_t floats = entry->size - start < COPY_FLOATS ? entry->size - start : COPY_FLOATS;
            if (parts)
                parts[count] = (struct copy_part){
                    .from = flats[entry->kind] + entry->offset + start, .to = to + start, .floats = (size_t)floats};
        }
        to += entry->size;
    }
    return count;
}

/* From a device all parts are copied in its order; then they are waited for. */
static enum mu_status copy_parts(struct mu_snapshots *snapshots, struct mu_pool *pool, struct copy_part *parts,
                                 uint32_t count)
{
    if (mu_device_is_host(snapshots->device))
        return mu_pool_run(pool, count, copy_task, parts);
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; i < count && status == MU_OK; i++)
        status = mu_device_copy(snapshots->device, parts[i].to, parts[i].from, parts[i].floats * sizeof(float));
    return status == MU_OK ? mu_pool_wait(pool) : status;
}

static enum mu_status copy_state(struct mu_snapshots *snapshots, struct mu_pool *pool,
                                 const struct mu_snapshot_state *state, struct mu_error *err)
{
    uint32_t count = place_entries(snapshots, state, NULL);
    struct copy_part *parts = calloc(count, sizeof *parts);
    if (!parts)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the list of what a piece copies");
    place_entries(snapshots, state, parts);
    enum mu_status status = copy_parts(snapshots, pool, parts, count);
    free(parts);
    if (status != MU_OK && status != MU_ERR_CANCELLED)
        return mu_fail(err, status, "%s", mu_device_trouble(snapshots->device));
    if (status != MU_OK)
        return mu_fail(err, MU_ERR_CANCELLED, "snapshot cancelled while the state of step %llu was being copied",
                       (unsigned long long)state->step);
    MU_FAULT("worker.snapshot.copy");
    return MU_OK;
}

static enum mu_status make_entries(struct mu_snapshots *snapshots, const struct mu_model_spec *model,
                                   const struct mu_chunk_run *runs, uint32_t count, struct mu_error *err)
{
    struct piece_job *job = &snapshots->job;
    job->entry_count = mu_piece_entries_of_runs(model, runs, count, NULL, 0);
    job->entries = calloc(job->entry_count, sizeof *job->entries);
    if (!job->entries)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the entries of a piece");
    mu_piece_entries_of_runs(model, runs, count, job->entries, job->entry_count);
    return MU_OK;
}

static enum mu_status copy_runs(struct mu_snapshots *snapshots, struct mu_pool *pool,
                                const struct mu_snapshot_state *state, const struct mu_snapshot *snapshot,
                                const struct mu_chunk_run *runs, uint32_t count, struct mu_error *err)
{
    enum mu_status status = check_covered(state, snapshot, runs, count, err);
    if (status == MU_OK)
        status =
            ensure_room(snapshots, mu_snapshots_piece_bytes(state->model, &snapshot->layout, snapshot->piece), err);
    if (status == MU_OK)
        status = make_entries(snapshots, state->model, runs, count, err);
    if (status == MU_OK)
        status = copy_state(snapshots, pool, state, err);
    if (status != MU_OK) {
        free(snapshots->job.entries);
        snapshots->job.entries = NULL;
    }
    return status;
}

/* *ret_empty: the piece has no chunks. */
static enum mu_status copy_piece(struct mu_snapshots *snapshots, struct mu_pool *pool,
                                 const struct mu_snapshot_state *state, const struct mu_snapshot *snapshot,
                                 bool *ret_empty, struct mu_error *err)
{
    if (mu_snapshots_busy(snapshots))
        return mu_fail(err, MU_ERR_BUSY,
                       "piece %u of checkpoint %llu is still being written; order the snapshot again later",
                       snapshots->job.report.piece, (unsigned long long)snapshots->job.report.checkpoint);
    uint32_t pieces = mu_layout_working(&snapshot->layout);
    if (snapshot->piece >= pieces)
        return mu_fail(err, MU_ERR_INVALID, "piece %u of %u is not allowed", snapshot->piece, pieces);
    struct mu_chunk_run *runs = calloc(MU_RUNS_MAX, sizeof *runs);
    if (!runs)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the chunks of a piece");
    uint32_t count = mu_layout_runs(state->model, &snapshot->layout, snapshot->piece, MU_SHARE_PRIMARY, runs);
    *ret_empty = count == 0;
    enum mu_status status = count == 0 ? MU_OK : copy_runs(snapshots, pool, state, snapshot, runs, count, err);
    free(runs);
    return status;
}

uint64_t mu_snapshots_take(struct mu_snapshots *snapshots, struct mu_pool *pool, const struct mu_snapshot_state *state,
                           const struct mu_snapshot *snapshot)
{
    struct mu_error err = {0};
    uint64_t start_us = mu_clock_mono_us();
    struct mu_piece_report report = {.checkpoint = snapshot->checkpoint, .piece = snapshot->piece, .step = state->step};
    bool empty = false;
    char dir[MU_PATH_SIZE];
    memcpy(dir, snapshot->dir, sizeof dir);
    if (state->host)
        report.status = mu_holder_path(snapshot->dir, state->host, dir, &err);
    if (report.status == MU_OK)
        report.status = copy_piece(snapshots, pool, state, snapshot, &empty, &err);
    report.stall_us = mu_clock_mono_us() - start_us;
    if (report.status != MU_OK || empty) {
        snprintf(report.text, sizeof report.text, "%.*s", (int)sizeof report.text - 1, err.text);
        snapshots->done(snapshots->ctx, state->generation, &report);
        return report.stall_us;
    }
    char suffix[MU_HOLDER_SUFFIX_SIZE] = "";
    if (state->host)
        mu_holder_suffix(state->host, suffix);
    snprintf(report.file, sizeof report.file, "piece-%05u-of-%05u-g%llx-%08x%s.safetensors", snapshot->piece,
             mu_layout_working(&snapshot->layout), (unsigned long long)state->generation, (unsigned)mu_id_random().low,
             suffix);
    struct piece_job *job = &snapshots->job;
    job->report = report;
    job->identity = (struct mu_checkpoint_identity){
        .seq = snapshot->checkpoint, .step = state->step, .generation = state->generation};
    snprintf(job->identity.job, sizeof job->identity.job, "%s", state->job);
    memcpy(job->dir, dir, sizeof job->dir);
    pthread_mutex_lock(&snapshots->lock);
    atomic_store(&snapshots->abort, false);
    snapshots->busy = true;
    pthread_cond_signal(&snapshots->changed);
    pthread_mutex_unlock(&snapshots->lock);
    return report.stall_us;
}
