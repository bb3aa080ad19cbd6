#include "coordinator/checkpoint_io.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/clock.h"
#include "common/fault.h"
#include "common/log.h"
#include "common/queue.h"
#include "storage/commit.h"
#include "storage/manifest.h"
#include "storage/scrub.h"

enum task_kind { TASK_PUBLISH, TASK_PROBE, TASK_DELETE, TASK_SWEEP, TASK_SCRUB, TASK_END };

struct mu_checkpoint_task {
    enum task_kind kind;
    struct mu_job_spec spec; /* PUBLISH */
    struct mu_hash128 numeric_identity;
    struct mu_checkpoint_record checkpoint; /* PUBLISH, PROBE, DELETE, SCRUB */
    struct mu_written_piece *pieces;
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

/* ---- publish ---- */

static enum mu_status publish(const struct mu_checkpoint_task *task, struct mu_checkpoint_done *done,
                              struct mu_error *err)
{
    const struct mu_checkpoint_record *checkpoint = &task->checkpoint;
    MU_FAULT("coord.publish.before");
    done->step = checkpoint->step;
    return mu_publish(&(struct mu_publication){.dir = checkpoint->dir,
                                               .spec = &task->spec,
                                               .numeric_identity = task->numeric_identity,
                                               .number = checkpoint->number,
                                               .step = checkpoint->step,
                                               .generation = checkpoint->generation,
                                               .wall_us = mu_clock_wall_us(),
                                               .layout = &checkpoint->layout,
                                               .pieces = task->pieces,
                                               .piece_count = checkpoint->piece_count},
                      &done->size_bytes, err);
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
        if (mu_piece_file_check(path, piece->size_bytes, err) != MU_OK)
            status = MU_ERR_NOT_FOUND;
        done->size_bytes += piece->size_bytes;
    }
    done->step = manifest->identity.step;
    mu_manifest_free(manifest);
    return status;
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
    for (uint32_t i = 0; i < piece_count; i++) {
        const struct mu_piece_record *piece = &checkpoint->pieces[i];
        if (piece->done)
            task->pieces[i] = mu_written_piece(piece);
    }
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
        MU_FAULT("coord.delete.before");
        status =
            mu_checkpoint_remove(task->checkpoint.dir, task->checkpoint.job, task->checkpoint.number, &done->result);
        MU_FAULT("coord.delete.after");
        break;
    case TASK_SWEEP:
        mu_checkpoint_sweep(task->root, task->job, task->before, task->known, task->known_count);
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
