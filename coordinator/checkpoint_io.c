#include "coordinator/checkpoint_io.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <sys/stat.h>

#include "common/clock.h"
#include "common/fault.h"
#include "common/log.h"
#include "common/queue.h"
#include "storage/catalog.h"
#include "storage/job_json.h"
#include "storage/manifest.h"
#include "storage/scrub.h"

enum task_kind { TASK_PUBLISH, TASK_PROBE, TASK_DELETE, TASK_SWEEP, TASK_SCRUB, TASK_END };

struct mu_checkpoint_task {
    enum task_kind kind;
    struct mu_job_spec spec; /* PUBLISH */
    struct mu_hash128 numeric_identity;
    struct mu_checkpoint_record checkpoint; /* PUBLISH, PROBE, DELETE, SCRUB */
    struct mu_piece_record *pieces;
    char root[MU_PATH_SIZE], job[MU_JOB_NAME_SIZE]; /* SWEEP */
    uint64_t before;
    uint64_t *known;
    size_t known_count;
    struct mu_checkpoint_done *done; /* NULL: SWEEP, END */
};

struct mu_checkpoint_io {
    struct mu_rpc_server *server;
    struct mu_queue *queue;
    pthread_t thread;
    atomic_bool ending;
    /* of the thread alone */
    struct mu_checkpoint_task *scrubbing; /* NULL: none */
    struct mu_scrub *scrub;
    int pause_ms; /* before its next block */
};

/* A checkpoint's directory in its parts. */
struct place {
    char root[MU_PATH_SIZE];
    const char *name; /* inside the record's dir */
    uint64_t ordered_step;
};

static enum mu_status find_place(const struct mu_checkpoint_record *checkpoint, struct place *out, struct mu_error *err)
{
    const char *slash = strrchr(checkpoint->dir, '/');
    uint64_t seq = 0;
    struct mu_id nonce = {0};
    if (slash && slash != checkpoint->dir && mu_catalog_parse_name(slash + 1, &seq, &out->ordered_step, &nonce) &&
        seq == checkpoint->number && mu_id_equal(nonce, checkpoint->nonce)) {
        size_t length = (size_t)(slash - checkpoint->dir);
        memcpy(out->root, checkpoint->dir, length);
        out->root[length] = 0;
        out->name = slash + 1;
        return MU_OK;
    }
    return mu_fail(err, MU_ERR_INVALID, "checkpoint %" PRIu64 " of job %s: '%s' is not the name of its directory",
                   checkpoint->number, checkpoint->job, checkpoint->dir);
}

static bool has_manifest(const char *dir)
{
    char path[MU_PATH_SIZE + MU_CATALOG_NAME_SIZE + 32];
    struct stat st;
    snprintf(path, sizeof path, "%s/" MU_MANIFEST_FILE, dir);
    return lstat(path, &st) == 0;
}

/* ---- publish ---- */

static enum mu_status check_size(const char *path, uint64_t size_bytes, struct mu_error *err)
{
    struct stat st;
    if (lstat(path, &st) != 0)
        return mu_fail_errno(err, errno, "checkpoint piece '%s' was reported written but is not there", path);
    if (!S_ISREG(st.st_mode) || (uint64_t)st.st_size != size_bytes)
        return mu_fail(err, MU_ERR_CORRUPT, "checkpoint piece '%s' has %lld bytes, its writer reported %" PRIu64, path,
                       (long long)st.st_size, size_bytes);
    return MU_OK;
}

static bool same_entry(const struct mu_piece_entry *a, const struct mu_piece_entry *b)
{
    return a->kind == b->kind && a->cell == b->cell && a->first_chunk == b->first_chunk &&
           a->chunk_count == b->chunk_count && a->offset == b->offset && a->size == b->size;
}

/* The chunks that a piece is to hold. */
struct part {
    struct mu_chunk_run runs[MU_RUNS_MAX];
    uint32_t count;
};

static void part_of(const struct mu_model_spec *model, const struct mu_layout *layout, uint32_t piece, struct part *ret)
{
    ret->count = mu_layout_runs(model, layout, piece, MU_SHARE_PRIMARY, ret->runs);
}

static enum mu_status check_entries(const char *path, const struct mu_model_spec *model, const struct part *part,
                                    const struct mu_piece_entry *entries, size_t entry_count, struct mu_error *err)
{
    size_t wanted_count = mu_piece_entries_of_runs(model, part->runs, part->count, NULL, 0);
    struct mu_piece_entry *wanted = calloc(wanted_count ? wanted_count : 1, sizeof *wanted);
    if (!wanted)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory to check '%s'", path);
    mu_piece_entries_of_runs(model, part->runs, part->count, wanted, wanted_count);
    bool same = wanted_count == entry_count;
    for (size_t i = 0; same && i < entry_count; i++)
        same = same_entry(&wanted[i], &entries[i]);
    free(wanted);
    if (same)
        return MU_OK;
    return mu_fail(err, MU_ERR_CORRUPT,
                   "checkpoint piece '%s' does not hold the chunks that are its part (%u runs, from chunk %u on)", path,
                   part->count, part->count ? part->runs[0].first : 0);
}

static enum mu_status check_piece(const struct mu_checkpoint_task *task, uint32_t number,
                                  const struct mu_model_spec *model, const struct part *part, struct mu_error *err)
{
    const struct mu_checkpoint_record *checkpoint = &task->checkpoint;
    const struct mu_piece_record *piece = &task->pieces[number];
    char path[MU_PATH_SIZE + sizeof piece->file + 1];
    if (!piece->done || piece->file[0] == 0)
        return mu_fail(err, MU_ERR_CORRUPT, "piece %u of checkpoint %" PRIu64 " is not written", number,
                       checkpoint->number);
    snprintf(path, sizeof path, "%s/%s", checkpoint->dir, piece->file);
    enum mu_status status = check_size(path, piece->size_bytes, err);
    if (status)
        return status;
    struct mu_checkpoint_identity identity;
    struct mu_piece_entry *entries = NULL;
    size_t entry_count = 0;
    status = mu_piece_list(path, &identity, &entries, &entry_count, err);
    if (status)
        return status;
    /* Not the generation: a writer may be parked in an older one, with the same state of the step. */
    if (strcmp(identity.job, checkpoint->job) != 0 || identity.seq != checkpoint->number ||
        identity.step != checkpoint->step)
        status = mu_fail(err, MU_ERR_CORRUPT,
                         "checkpoint piece '%s' is of job %s, checkpoint %" PRIu64 ", step %" PRIu64
                         "; wanted %s, %" PRIu64 ", %" PRIu64,
                         path, identity.job, identity.seq, identity.step, checkpoint->job, checkpoint->number,
                         checkpoint->step);
    else
        status = check_entries(path, model, part, entries, entry_count, err);
    free(entries);
    return status;
}

static enum mu_status build_manifest(const struct mu_checkpoint_task *task, struct mu_manifest *manifest,
                                     uint64_t *ret_size_bytes, struct mu_error *err)
{
    const struct mu_checkpoint_record *checkpoint = &task->checkpoint;
    struct mu_model_spec model;
    mu_model_spec_init(&model, &task->spec.model);
    enum mu_status status = mu_layout_check(&checkpoint->layout, &task->spec, err);
    if (status)
        return status;
    if (mu_layout_working(&checkpoint->layout) != checkpoint->piece_count)
        return mu_fail(err, MU_ERR_INVALID, "checkpoint %" PRIu64 " has %u pieces, its layout %u", checkpoint->number,
                       checkpoint->piece_count, mu_layout_working(&checkpoint->layout));
    memcpy(manifest->identity.job, checkpoint->job, sizeof manifest->identity.job);
    manifest->identity.seq = checkpoint->number;
    manifest->identity.step = checkpoint->step;
    manifest->identity.generation = checkpoint->generation;
    manifest->nonce = checkpoint->nonce;
    manifest->created_wall_us = mu_clock_wall_us();
    manifest->chunk_count = model.chunk_count;
    snprintf(manifest->numeric_identity, sizeof manifest->numeric_identity, "%016" PRIx64 "%016" PRIx64,
             task->numeric_identity.high, task->numeric_identity.low);
    char *text = mu_job_spec_to_text(&task->spec);
    status = text ? mu_manifest_set_job_record(manifest, text) : MU_ERR_NO_MEMORY;
    free(text);
    if (status)
        return mu_fail(err, status, "no memory for the manifest of checkpoint %" PRIu64, checkpoint->number);
    *ret_size_bytes = 0;
    for (uint32_t i = 0; i < checkpoint->piece_count && status == MU_OK; i++) {
        const struct mu_piece_record *piece = &task->pieces[i];
        struct part part;
        part_of(&model, &checkpoint->layout, i, &part);
        if (part.count == 0 && piece->done)
            continue; /* more ranks than chunks: it has no file */
        status = check_piece(task, i, &model, &part, err);
        if (status)
            break;
        status = mu_manifest_add_runs(manifest, &model, piece->file, piece->size_bytes, piece->checksum, part.runs,
                                      part.count);
        if (status)
            mu_fail(err, status, "piece '%s' does not fit into the manifest", piece->file);
        *ret_size_bytes += piece->size_bytes;
    }
    return status ? status : mu_manifest_check_tiling(manifest, &model, err);
}

static enum mu_status publish(const struct mu_checkpoint_task *task, struct mu_checkpoint_done *done,
                              struct mu_error *err)
{
    const struct mu_checkpoint_record *checkpoint = &task->checkpoint;
    struct place place;
    char path[MU_PATH_SIZE];
    MU_FAULT("coord.publish.before");
    enum mu_status status = find_place(checkpoint, &place, err);
    if (status == MU_OK && !has_manifest(checkpoint->dir)) /* its owner file makes it deletable one day */
        status = mu_catalog_create(place.root, checkpoint->job, checkpoint->number, place.ordered_step,
                                   checkpoint->nonce, path, err);
    if (status)
        return status;
    struct mu_manifest *manifest = mu_manifest_new();
    if (!manifest)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the manifest of checkpoint %" PRIu64, checkpoint->number);
    status = build_manifest(task, manifest, &done->size_bytes, err);
    MU_FAULT("coord.publish.manifest.before");
    if (status == MU_OK)
        status = mu_manifest_write(checkpoint->dir, manifest, err);
    MU_FAULT("coord.publish.manifest.after");
    done->step = checkpoint->step;
    struct statvfs fs;
    if (statvfs(checkpoint->dir, &fs) == 0)
        done->free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
    mu_manifest_free(manifest);
    return status;
}

/* ---- probe ---- */

static enum mu_status probe(const struct mu_checkpoint_task *task, struct mu_checkpoint_done *done,
                            struct mu_error *err)
{
    const struct mu_checkpoint_record *checkpoint = &task->checkpoint;
    struct mu_manifest *manifest = NULL;
    enum mu_status status = mu_manifest_read(checkpoint->dir, &manifest, err);
    if (status == MU_ERR_CORRUPT || status == MU_ERR_INVALID)
        status = MU_ERR_NOT_FOUND; /* its text stays: a manifest that does not read is none */
    if (status)
        return status;
    if (strcmp(manifest->identity.job, checkpoint->job) != 0 || manifest->identity.seq != checkpoint->number ||
        !mu_id_equal(manifest->nonce, checkpoint->nonce))
        status = mu_fail(err, MU_ERR_NOT_FOUND, "the manifest in '%s' belongs to another checkpoint", checkpoint->dir);
    for (size_t i = 0; i < manifest->piece_count && status == MU_OK; i++) {
        const struct mu_manifest_piece *piece = &manifest->pieces[i];
        char path[MU_PATH_SIZE + sizeof piece->file + 1];
        snprintf(path, sizeof path, "%s/%s", checkpoint->dir, piece->file);
        if (check_size(path, piece->size_bytes, err) != MU_OK)
            status = MU_ERR_NOT_FOUND;
        done->size_bytes += piece->size_bytes;
    }
    done->step = manifest->identity.step;
    mu_manifest_free(manifest);
    return status;
}

/* ---- delete and sweep ---- */

static enum mu_status delete_directory(const struct mu_checkpoint_task *task, struct mu_error *err)
{
    const struct mu_checkpoint_record *checkpoint = &task->checkpoint;
    struct place place;
    struct stat st;
    char path[MU_PATH_SIZE];
    enum mu_status status = find_place(checkpoint, &place, err);
    if (status)
        return status;
    MU_FAULT("coord.delete.before");
    if (lstat(checkpoint->dir, &st) == 0) {
        if (!has_manifest(checkpoint->dir)) /* aborted before it was marked as ours */
            status = mu_catalog_create(place.root, checkpoint->job, checkpoint->number, place.ordered_step,
                                       checkpoint->nonce, path, err);
        if (status == MU_OK)
            status = mu_catalog_delete(place.root, place.name, err);
    } else if (errno == ENOENT) {
        status = mu_catalog_empty_trash(place.root, NULL, err); /* an earlier try may have come as far as the trash */
    } else if (errno != ENOTDIR) { /* ENOTDIR: its parent is a file, so it was never made */
        status = mu_fail_errno(err, errno, "cannot look at checkpoint directory '%s'", checkpoint->dir);
    }
    MU_FAULT("coord.delete.after");
    return status == MU_ERR_NOT_FOUND ? MU_OK : status;
}

static bool keep_in_sweep(void *arg, uint64_t seq, uint64_t step, struct mu_id nonce)
{
    const struct mu_checkpoint_task *task = arg;
    char name[MU_CATALOG_NAME_SIZE], dir[MU_PATH_SIZE + MU_CATALOG_NAME_SIZE];
    if (seq >= task->before)
        return true;
    for (size_t i = 0; i < task->known_count; i++) {
        if (task->known[i] == seq)
            return true;
    }
    /* Committed ones are never swept: they may be all that is left of a job whose records were lost or replaced. */
    mu_catalog_name(seq, step, nonce, name);
    snprintf(dir, sizeof dir, "%s/%s", task->root, name);
    return has_manifest(dir);
}

static void sweep(struct mu_checkpoint_task *task)
{
    struct mu_error err = {0};
    size_t removed = 0;
    if (mu_catalog_empty_trash(task->root, NULL, &err) != MU_OK)
        MU_LOGW("job %s: an interrupted delete of a checkpoint could not be finished: %s", task->job, err.text);
    if (mu_catalog_sweep(task->root, task->job, keep_in_sweep, task, &removed, &err) != MU_OK)
        MU_LOGW("job %s: what an aborted checkpoint left could not be removed: %s", task->job, err.text);
    if (removed)
        MU_LOGI("job %s: removed the remains of %zu aborted checkpoints below %s", task->job, removed, task->root);
}

/* ---- tasks ---- */

static struct mu_checkpoint_task *new_task(enum task_kind kind, const struct mu_checkpoint_record *checkpoint)
{
    struct mu_checkpoint_task *task = calloc(1, sizeof *task);
    struct mu_checkpoint_done *done = checkpoint ? calloc(1, sizeof *done) : NULL;
    if (!task || (checkpoint && !done)) {
        free(task);
        free(done);
        return NULL;
    }
    task->kind = kind;
    if (checkpoint) {
        task->checkpoint = *checkpoint;
        task->checkpoint.pieces = NULL;
        done->posted.kind = MU_POSTED_CHECKPOINT;
        done->deleted = kind == TASK_DELETE;
        done->scrubbed = kind == TASK_SCRUB;
        memcpy(done->job, checkpoint->job, sizeof done->job);
        done->checkpoint = checkpoint->number;
        task->done = done;
    }
    return task;
}

void mu_checkpoint_task_free(struct mu_checkpoint_task *task)
{
    if (!task)
        return;
    free(task->pieces);
    free(task->known);
    free(task->done);
    free(task);
}

struct mu_checkpoint_task *mu_checkpoint_task_publish(const struct mu_job_record *job,
                                                      const struct mu_checkpoint_record *checkpoint, bool probe_only)
{
    struct mu_checkpoint_task *task = new_task(probe_only ? TASK_PROBE : TASK_PUBLISH, checkpoint);
    if (!task)
        return NULL;
    task->spec = job->spec;
    task->numeric_identity = job->numeric_identity;
    uint32_t piece_count = checkpoint->pieces ? checkpoint->piece_count : 0;
    task->checkpoint.piece_count = piece_count;
    task->pieces = calloc(piece_count ? piece_count : 1, sizeof *task->pieces);
    if (!task->pieces) {
        mu_checkpoint_task_free(task);
        return NULL;
    }
    if (piece_count)
        memcpy(task->pieces, checkpoint->pieces, piece_count * sizeof *task->pieces);
    return task;
}

struct mu_checkpoint_task *mu_checkpoint_task_delete(const struct mu_checkpoint_record *checkpoint)
{
    return new_task(TASK_DELETE, checkpoint);
}

struct mu_checkpoint_task *mu_checkpoint_task_scrub(const struct mu_checkpoint_record *checkpoint)
{
    return new_task(TASK_SCRUB, checkpoint);
}

struct mu_checkpoint_task *mu_checkpoint_task_sweep(const char *root, const char *job, uint64_t before,
                                                    const uint64_t *known, size_t known_count)
{
    struct mu_checkpoint_task *task = new_task(TASK_SWEEP, NULL);
    if (!task)
        return NULL;
    snprintf(task->root, sizeof task->root, "%s", root);
    snprintf(task->job, sizeof task->job, "%s", job);
    task->before = before;
    task->known = calloc(known_count ? known_count : 1, sizeof *task->known);
    if (!task->known) {
        mu_checkpoint_task_free(task);
        return NULL;
    }
    if (known_count)
        memcpy(task->known, known, known_count * sizeof *known);
    task->known_count = known_count;
    return task;
}

/* ---- thread ---- */

static void answer(struct mu_checkpoint_io *io, struct mu_checkpoint_task *task, enum mu_status status)
{
    struct mu_checkpoint_done *done = task->done;
    if (!done)
        return;
    done->result.status = status;
    task->done = NULL;
    mu_rpc_server_post(io->server, &done->posted.item);
}

static void end_scrub(struct mu_checkpoint_io *io, enum mu_status status)
{
    answer(io, io->scrubbing, status);
    mu_checkpoint_task_free(io->scrubbing);
    mu_scrub_free(io->scrub);
    io->scrubbing = NULL;
    io->scrub = NULL;
}

/* Takes the task. */
static void begin_scrub(struct mu_checkpoint_io *io, struct mu_checkpoint_task *task)
{
    if (io->scrubbing) {
        answer(io, task,
               mu_fail(&task->done->result, MU_ERR_BUSY, "another checkpoint is being re-read at this moment"));
        mu_checkpoint_task_free(task);
        return;
    }
    const struct mu_checkpoint_record *checkpoint = &task->checkpoint;
    io->scrubbing = task;
    io->pause_ms = 0;
    enum mu_status status = mu_scrub_new(checkpoint->dir, checkpoint->job, checkpoint->number, checkpoint->nonce,
                                         &io->scrub, &task->done->result);
    if (status)
        end_scrub(io, status);
}

static void scrub_block(struct mu_checkpoint_io *io)
{
    struct mu_checkpoint_done *done = io->scrubbing->done;
    size_t read_bytes = 0;
    bool complete = false;
    enum mu_status status = mu_scrub_step(io->scrub, &read_bytes, &complete, &done->result);
    io->pause_ms = (int)((uint64_t)read_bytes * 1000 / MU_SCRUB_BYTES_PER_SECOND);
    done->step = io->scrubbing->checkpoint.step;
    done->size_bytes = mu_scrub_bytes(io->scrub);
    if (status || complete)
        end_scrub(io, status);
}

static void run_task(struct mu_checkpoint_io *io, struct mu_checkpoint_task *task)
{
    struct mu_checkpoint_done *done = task->done;
    enum mu_status status = MU_OK;
    switch (task->kind) {
    case TASK_PUBLISH:
        status = publish(task, done, &done->result);
        break;
    case TASK_PROBE:
        status = probe(task, done, &done->result);
        break;
    case TASK_DELETE:
        status = delete_directory(task, &done->result);
        break;
    case TASK_SWEEP:
        sweep(task);
        break;
    case TASK_SCRUB:
    case TASK_END:
        break;
    }
    answer(io, task, status);
}

static void *io_thread(void *arg)
{
    struct mu_checkpoint_io *io = arg;
    for (bool running = true; running;) {
        struct mu_checkpoint_task *task = mu_queue_pop(io->queue, io->scrubbing ? io->pause_ms : -1);
        if (!task) {
            scrub_block(io);
            continue;
        }
        running = task->kind != TASK_END;
        if (task->kind == TASK_SCRUB && !atomic_load(&io->ending)) {
            begin_scrub(io, task);
            continue;
        }
        if (!atomic_load(&io->ending))
            run_task(io, task);
        mu_checkpoint_task_free(task);
    }
    mu_checkpoint_task_free(io->scrubbing); /* unanswered, as what is dropped from the queue */
    mu_scrub_free(io->scrub);
    return NULL;
}

enum mu_status mu_checkpoint_io_new(struct mu_rpc_server *server, size_t capacity, struct mu_checkpoint_io **ret_io,
                                    struct mu_error *err)
{
    struct mu_checkpoint_io *io = calloc(1, sizeof *io);
    if (!io)
        return mu_fail(err, MU_ERR_NO_MEMORY, "checkpoint thread: no memory");
    io->server = server;
    io->queue = mu_queue_new(capacity);
    enum mu_status status = MU_OK;
    if (!io->queue)
        status = mu_fail(err, MU_ERR_NO_MEMORY, "checkpoint thread: no memory or file descriptor for its queue");
    else {
        int reason = pthread_create(&io->thread, NULL, io_thread, io);
        if (reason)
            status = mu_fail_errno(err, reason, "checkpoint thread: cannot start");
    }
    if (status) {
        mu_queue_free(io->queue);
        free(io);
        return status;
    }
    *ret_io = io;
    return MU_OK;
}

void mu_checkpoint_io_submit(struct mu_checkpoint_io *io, struct mu_checkpoint_task *task)
{
    if (mu_queue_push(io->queue, task) == MU_OK)
        return;
    struct mu_checkpoint_done *done = task->done;
    if (done) {
        mu_fail(&done->result, MU_ERR_BUSY, "too many checkpoint operations are waiting for the file system");
        task->done = NULL;
        mu_rpc_server_post(io->server, &done->posted.item);
    }
    mu_checkpoint_task_free(task);
}

void mu_checkpoint_io_free(struct mu_checkpoint_io *io)
{
    if (!io)
        return;
    atomic_store(&io->ending, true);
    struct mu_checkpoint_task *end = new_task(TASK_END, NULL);
    MU_ASSERT(end);
    mu_queue_push_wait(io->queue, end);
    pthread_join(io->thread, NULL);
    mu_queue_free(io->queue);
    free(io);
}
