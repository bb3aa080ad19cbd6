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

enum {
    COPY_FLOATS = 256 * 1024, /* in one task of the pool */
    KINDS = 3,                /* parameters and both moments */
};

/* The piece under way: filled by the engine while idle, owned by the writer while busy. */
struct piece_job {
    struct mu_checkpoint_identity identity;
    struct mu_piece_report report;
    char dir[MU_PATH_SIZE];
    struct mu_piece_entry *entries;
    size_t entry_count;
};

struct mu_snapshots {
    mu_snapshot_done_fn *done;
    void *ctx;
    pthread_t writer;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool busy, abandoned, stop; /* under lock */
    atomic_bool abort;
    struct mu_arena *arena;
    float *copy; /* [KINDS][copy_floats] */
    uint64_t copy_floats;
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

enum mu_status mu_snapshots_new(mu_snapshot_done_fn *done, void *ctx, struct mu_snapshots **ret_snapshots,
                                struct mu_error *err)
{
    struct mu_snapshots *snapshots = calloc(1, sizeof *snapshots);
    if (!snapshots)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the snapshot writer");
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

/* Chunks [first, first + count) lie in [*ret_begin, *ret_end) of the flat space; gaps between cells come along. */
static void flat_range(const struct mu_model_spec *model, uint32_t first, uint32_t count, uint64_t *ret_begin,
                       uint64_t *ret_end)
{
    struct mu_chunk head = mu_model_chunk(model, first), tail = mu_model_chunk(model, first + count - 1);
    *ret_begin = head.offset;
    *ret_end = tail.offset + tail.size;
}

/* Not while busy. */
static enum mu_status ensure_room(struct mu_snapshots *snapshots, uint64_t floats, struct mu_error *err)
{
    if (floats <= snapshots->copy_floats)
        return MU_OK;
    mu_arena_free(snapshots->arena);
    snapshots->arena = NULL;
    snapshots->copy_floats = 0;
    enum mu_status status = mu_arena_new(KINDS * floats * sizeof(float), err, &snapshots->arena);
    if (status != MU_OK)
        return mu_error_prefix(err, "snapshot");
    snapshots->copy = mu_arena_take(snapshots->arena, KINDS * floats * sizeof(float));
    snapshots->copy_floats = floats;
    return MU_OK;
}

static uint64_t largest_piece(const struct mu_model_spec *model, uint32_t piece_count)
{
    uint64_t most = 0;
    for (uint32_t piece = 0; piece < piece_count; piece++) {
        uint32_t first, count;
        uint64_t begin = 0, end = 0;
        mu_model_owned_chunks(model, piece_count, piece, &first, &count);
        if (count > 0)
            flat_range(model, first, count, &begin, &end);
        most = end - begin > most ? end - begin : most;
    }
    return most;
}

uint64_t mu_snapshots_growth_bytes(struct mu_snapshots *snapshots, const struct mu_model_spec *model,
                                   uint32_t piece_count)
{
    uint64_t floats = largest_piece(model, piece_count);
    return floats > snapshots->copy_floats ? KINDS * (floats - snapshots->copy_floats) * sizeof(float) : 0;
}

enum mu_status mu_snapshots_reserve(struct mu_snapshots *snapshots, const struct mu_model_spec *model,
                                    uint32_t piece_count, struct mu_error *err)
{
    if (mu_snapshots_busy(snapshots))
        return MU_OK;
    return ensure_room(snapshots, largest_piece(model, piece_count), err);
}

struct copy_job {
    const float *from[KINDS];
    float *to[KINDS];
    uint64_t floats;
    uint32_t tasks_per_kind;
};

static void copy_task(void *arg, uint32_t task, const struct mu_lane *lane)
{
    (void)lane;
    const struct copy_job *job = arg;
    uint32_t kind = task / job->tasks_per_kind;
    uint64_t start = (uint64_t)(task % job->tasks_per_kind) * COPY_FLOATS;
    uint64_t floats = job->floats - start < COPY_FLOATS ? job->floats - start : COPY_FLOATS;
    memcpy(job->to[kind] + start, job->from[kind] + start, floats * sizeof(float));
}

static enum mu_status copy_state(struct mu_snapshots *snapshots, struct mu_pool *pool,
                                 const struct mu_snapshot_state *state, uint64_t begin, uint64_t floats,
                                 struct mu_error *err)
{
    struct copy_job job = {
        .from = {state->params + begin, state->m + begin, state->v + begin},
        .to = {snapshots->copy, snapshots->copy + floats, snapshots->copy + 2 * floats},
        .floats = floats,
        .tasks_per_kind = (uint32_t)((floats + COPY_FLOATS - 1) / COPY_FLOATS),
    };
    if (mu_pool_run(pool, KINDS * job.tasks_per_kind, copy_task, &job) != MU_OK)
        return mu_fail(err, MU_ERR_CANCELLED, "snapshot cancelled while the state of step %llu was being copied",
                       (unsigned long long)state->step);
    MU_FAULT("worker.snapshot.copy");
    return MU_OK;
}

/* The entries of the piece, pointing into the copy. */
static enum mu_status make_entries(struct mu_snapshots *snapshots, const struct mu_model_spec *model, uint32_t first,
                                   uint32_t count, struct mu_error *err)
{
    struct piece_job *job = &snapshots->job;
    uint64_t begin, end;
    flat_range(model, first, count, &begin, &end);
    job->entry_count = mu_piece_entries_of_chunks(model, first, count, NULL, NULL, NULL, NULL, 0);
    job->entries = calloc(job->entry_count, sizeof *job->entries);
    if (!job->entries)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the entries of a piece");
    mu_piece_entries_of_chunks(model, first, count, NULL, NULL, NULL, job->entries, job->entry_count);
    for (size_t i = 0; i < job->entry_count; i++) {
        struct mu_piece_entry *entry = &job->entries[i];
        uint64_t kind = entry->kind == MU_PIECE_PARAMETERS ? 0 : entry->kind == MU_PIECE_MOMENT1 ? 1 : 2;
        entry->data = snapshots->copy + kind * (end - begin) + (entry->offset - begin);
    }
    return MU_OK;
}

static enum mu_status copy_piece(struct mu_snapshots *snapshots, struct mu_pool *pool,
                                 const struct mu_snapshot_state *state, const struct mu_snapshot *snapshot,
                                 struct mu_error *err)
{
    if (mu_snapshots_busy(snapshots))
        return mu_fail(err, MU_ERR_BUSY,
                       "piece %u of checkpoint %llu is still being written; order the snapshot again later",
                       snapshots->job.report.piece, (unsigned long long)snapshots->job.report.checkpoint);
    if (snapshot->piece_count == 0 || snapshot->piece >= snapshot->piece_count ||
        snapshot->piece_count > state->model->chunk_count)
        return mu_fail(err, MU_ERR_INVALID,
                       "piece %u of %u is not allowed: at most one piece for each of the model's %u chunks",
                       snapshot->piece, snapshot->piece_count, state->model->chunk_count);
    uint32_t first, count;
    uint64_t begin, end;
    mu_model_owned_chunks(state->model, snapshot->piece_count, snapshot->piece, &first, &count);
    flat_range(state->model, first, count, &begin, &end);
    enum mu_status status = ensure_room(snapshots, end - begin, err);
    if (status == MU_OK)
        status = copy_state(snapshots, pool, state, begin, end - begin, err);
    if (status == MU_OK)
        status = make_entries(snapshots, state->model, first, count, err);
    return status;
}

uint64_t mu_snapshots_take(struct mu_snapshots *snapshots, struct mu_pool *pool, const struct mu_snapshot_state *state,
                           const struct mu_snapshot *snapshot)
{
    struct mu_error err = {0};
    uint64_t start_us = mu_clock_mono_us();
    struct mu_piece_report report = {.checkpoint = snapshot->checkpoint, .piece = snapshot->piece, .step = state->step};
    report.status = copy_piece(snapshots, pool, state, snapshot, &err);
    report.stall_us = mu_clock_mono_us() - start_us;
    if (report.status != MU_OK) {
        snprintf(report.text, sizeof report.text, "%.*s", (int)sizeof report.text - 1, err.text);
        snapshots->done(snapshots->ctx, state->generation, &report);
        return report.stall_us;
    }
    snprintf(report.file, sizeof report.file, "piece-%05u-of-%05u-g%llx-%08x.safetensors", snapshot->piece,
             snapshot->piece_count, (unsigned long long)state->generation, (unsigned)mu_id_random().low);
    struct piece_job *job = &snapshots->job;
    job->report = report;
    job->identity = (struct mu_checkpoint_identity){
        .seq = snapshot->checkpoint, .step = state->step, .generation = state->generation};
    snprintf(job->identity.job, sizeof job->identity.job, "%s", state->job);
    snprintf(job->dir, sizeof job->dir, "%s", snapshot->dir);
    pthread_mutex_lock(&snapshots->lock);
    atomic_store(&snapshots->abort, false);
    snapshots->busy = true;
    pthread_cond_signal(&snapshots->changed);
    pthread_mutex_unlock(&snapshots->lock);
    return report.stall_us;
}
