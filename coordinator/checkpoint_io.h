/* The thread that works on checkpoint directories: proves and publishes, deletes, sweeps. Never the core thread,
 * because a file system may take its time. Results come back to the core thread as posted items, in order of
 * submission.
 *
 * Publishing trusts no report: every piece must be on disk with the reported size, carry the checkpoint's identity, and
 * declare (under its own checksum) exactly the chunks that its number says; together they must tile the model. The
 * bytes themselves were hashed by their writer before they were written and are verified by every reader, the first of
 * which is this thread: whenever nothing else is to be done it re-reads a committed checkpoint, slowly. */
#ifndef MU_COORDINATOR_CHECKPOINT_IO_H
#define MU_COORDINATOR_CHECKPOINT_IO_H

#include "coordinator/core/core.h"
#include "coordinator/posted.h"

/* Re-reading ("scrubbing") gives way to every other task, between two blocks, and reads no faster than this. */
enum { MU_SCRUB_BYTES_PER_SECOND = 64 << 20 };

/* The posted result; plain memory, free() it. */
struct mu_checkpoint_done {
    struct mu_posted posted;
    bool deleted;  /* of a DELETE; */
    bool scrubbed; /* of a SCRUB: MU_ERR_CORRUPT is evidence against the checkpoint; else of a PUBLISH or a probe */
    char job[MU_JOB_NAME_SIZE];
    uint64_t checkpoint, step, size_bytes;
    uint64_t free_bytes;    /* of a PUBLISH: on its file system; 0: not known */
    struct mu_error result; /* status and, when it is not MU_OK, text */
};

struct mu_checkpoint_io;
struct mu_checkpoint_task;

/* `capacity`: most tasks that can be waiting. */
enum mu_status mu_checkpoint_io_new(struct mu_rpc_server *server, size_t capacity, struct mu_checkpoint_io **ret_io,
                                    struct mu_error *err) MU_WARN_UNUSED;
/* Waits for the task in progress, drops the rest. NULL is fine. */
void mu_checkpoint_io_free(struct mu_checkpoint_io *io);

/* Deep copies of what an action carries. NULL: no memory. */
struct mu_checkpoint_task *mu_checkpoint_task_publish(const struct mu_job_record *job,
                                                      const struct mu_checkpoint_record *checkpoint, bool probe);
struct mu_checkpoint_task *mu_checkpoint_task_delete(const struct mu_checkpoint_record *checkpoint);
/* One at a time: a second one is answered with MU_ERR_BUSY. */
struct mu_checkpoint_task *mu_checkpoint_task_scrub(const struct mu_checkpoint_record *checkpoint);

/* Removes from the job's directory what earlier, aborted checkpoints left: numbers below `before` that are not in
 * `known` and have no manifest. Also finishes interrupted deletes. Nothing is posted. */
struct mu_checkpoint_task *mu_checkpoint_task_sweep(const char *root, const char *job, uint64_t before,
                                                    const uint64_t *known, size_t known_count);
void mu_checkpoint_task_free(struct mu_checkpoint_task *task); /* NULL is fine */

/* Takes the task. When too many wait it is answered with MU_ERR_BUSY. */
void mu_checkpoint_io_submit(struct mu_checkpoint_io *io, struct mu_checkpoint_task *task);

#endif
