/* Shared by the files of the engine: engine.c (mailbox, threads, parking), engine_load.c (job and memory),
 * engine_prepare.c (a new generation and its state), engine_step.c (one step), engine_run.c (the loop, evaluation,
 * boundaries). */
#ifndef MU_WORKER_ENGINE_INTERNAL_H
#define MU_WORKER_ENGINE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

#include "common/queue.h"
#include "kernels/arena.h"
#include "kernels/pool.h"
#include "worker/comm.h"
#include "worker/data.h"
#include "worker/engine.h"
#include "worker/model.h"
#include "worker/reduce.h"
#include "worker/snapshot.h"
#include "worker/transfer.h"

enum {
    ENGINE_POLL_US = 200,       /* least time between looks at the sockets while computing */
    ENGINE_EXACT_LEAVES = 1024, /* up to so many leaves the deepest stack is computed, above it is bounded */
};

enum engine_phase {
    ENGINE_EMPTY,    /* no job */
    ENGINE_LOADED,   /* a job, no generation */
    ENGINE_PREPARED, /* waiting for RUN */
    ENGINE_PARKED,   /* a generation that does not step (any more) */
};

/* A command, its assignment and what that points to, in one block of memory. */
enum engine_command_kind {
    ENGINE_LOAD,
    ENGINE_PREPARE,
    ENGINE_RUN,
    ENGINE_ABORT,
    ENGINE_SNAPSHOT,
    ENGINE_FORGET,
    ENGINE_STOP
};

struct engine_command {
    enum engine_command_kind kind;
    uint64_t generation;
    struct mu_job_spec spec; /* LOAD */
    struct mu_id id;         /* LOAD: the job's uid; PREPARE: own incarnation */
    struct mu_snapshot snapshot;
    struct mu_assign assign; /* PREPARE: its pointers lead to `tail` */
    max_align_t tail[];
};

/* One set of parameters and moments. */
struct engine_state {
    struct mu_arena *arena;
    float *params, *m, *v;
};

/* Phase times of the step under way, microseconds. */
struct engine_times {
    uint64_t total_us, data_us, forward_us, backward_us, communicate_us, wait_us, optimizer_us, snapshot_us;
};

/* What belongs to one generation; freed when it is superseded. */
struct engine_generation {
    uint64_t generation, start_step;
    uint32_t rank, world;
    uint32_t first_leaf, leaf_count;
    uint32_t first_eval_leaf, eval_leaf_count;
    struct mu_comm_group *group; /* NULL when world is 1 */
    struct mu_reduce *reduce;
    struct mu_transfer *transfer;
    size_t failures_told; /* of the group's failures, how many the owner knows of */
};

/* The job and everything that is allocated for it. */
struct engine_job {
    struct mu_job_spec spec;
    struct mu_id uid;
    struct mu_model_spec model;
    struct mu_data *data;
    struct mu_data_info data_info;
    struct mu_model *net;
    uint32_t leaves, eval_leaves;
    uint64_t eval_sequences; /* really used */
    uint64_t tokens_per_step;
    int32_t *tokens, *targets;           /* [micro, length] */
    uint64_t *samples;                   /* [micro] */
    struct engine_state state, incoming; /* incoming: only while a state that is held must stay intact */
    struct mu_arena *staging_arena;
    struct mu_arena *stack_arenas[MU_TREE_ROOTS_MAX]; /* [i] holds stack[i] */
    float *stack[MU_TREE_ROOTS_MAX]; /* gradient buffers of the binary counter; [0] is where the reduced gradient is
                                        kept */
    uint32_t stack_count;
    float *staging;
    uint64_t staging_bytes;
};

struct mu_engine {
    struct mu_engine_callbacks callbacks;
    uint32_t threads, connect_timeout_ms;
    struct mu_comm *comm;
    struct mu_queue *mailbox;
    pthread_t thread;
    bool thread_started;
    struct mu_error start_error;

    /* Stopping: any thread, under the lock; `cancel` is what compute looks at. */
    pthread_mutex_t stop_lock;
    uint64_t commanded; /* newest generation given to prepare */
    uint64_t current;   /* the one the engine works on */
    uint64_t aborted;   /* newest generation cancelled */
    bool stopping;
    atomic_bool cancel;

    atomic_uint_least64_t progress;
    atomic_bool waiting;

    /* The engine thread's own. */
    struct mu_pool *pool;
    struct mu_snapshots *snapshots;
    enum engine_phase phase;
    struct engine_job job;
    struct mu_held held;
    struct engine_generation now, old; /* old: kept open until RUN of the new one */
    uint64_t polled_us;
    struct engine_times times;
};

/* ---- engine.c ---- */

/* Has the generation under way been cancelled from outside (abort, forget, stop)? Then nobody is told: the command that
 * follows does it. */
bool engine_aborted(struct mu_engine *engine);
/* Compute is cancelled while this generation is aborted; called when one begins. */
void engine_set_current(struct mu_engine *engine, uint64_t generation);
/* The pool obeys the cancel flag, or (optimizer updates) runs to the end. */
void engine_set_cancellable(struct mu_engine *engine, bool cancellable);
void engine_set_waiting(struct mu_engine *engine, bool waiting);
/* Closes the connections first, then frees what they may have pointed to. */
void engine_generation_close(struct engine_generation *generation);
/* Parks and posts PARKED. `text` may be NULL. */
void engine_park(struct mu_engine *engine, enum mu_park_reason reason, const char *text);
/* Parks because of `status` (nothing is posted if it was cancelled from outside): a peer's failure, or `otherwise`. */
void engine_park_failed(struct mu_engine *engine, enum mu_status status, const struct mu_error *err,
                        enum mu_park_reason otherwise, uint64_t bad_checkpoint);
void engine_post(struct mu_engine *engine, const struct mu_worker_event *event);

/* ---- engine_load.c ---- */
void engine_load(struct mu_engine *engine, const struct engine_command *command);
void engine_unload(struct mu_engine *engine);
enum mu_status engine_state_new(const struct mu_model_spec *model, struct engine_state *ret_state,
                                struct mu_error *err) MU_WARN_UNUSED;
void engine_state_free(struct engine_state *state);
/* Gradient buffers for a stack of `depth`; staging memory of at least size_bytes. They only grow. */
enum mu_status engine_reserve_stack(struct mu_engine *engine, uint32_t depth, struct mu_error *err) MU_WARN_UNUSED;
enum mu_status engine_reserve_staging(struct mu_engine *engine, uint64_t size_bytes,
                                      struct mu_error *err) MU_WARN_UNUSED;
/* Room to copy a piece of 1 / piece_count of the state; nothing when the job makes no checkpoints. */
enum mu_status engine_reserve_snapshot(struct mu_engine *engine, uint32_t piece_count,
                                       struct mu_error *err) MU_WARN_UNUSED;
/* A clear refusal where the kernel would kill the process later. */
enum mu_status engine_check_memory(uint64_t size_bytes, const char *what, struct mu_error *err) MU_WARN_UNUSED;

/* ---- engine_prepare.c ---- */
void engine_prepare(struct mu_engine *engine, const struct engine_command *command);

/* ---- engine_step.c ---- */
/* One whole step: gradients, exchange, vote, update. MU_OK: held.step has grown by one. */
enum mu_status engine_step(struct mu_engine *engine, struct mu_error *err) MU_WARN_UNUSED;
/* The update held.step -> held.step + 1 with the reduced gradient. Always to its end. */
void engine_apply(struct mu_engine *engine, const struct mu_step_result *result);
/* Tokens and targets of sequences; fills job.tokens, targets, samples. */
enum mu_status engine_fill_batch(struct mu_engine *engine, uint64_t first_sequence,
                                 struct mu_error *err) MU_WARN_UNUSED;

/* ---- engine_run.c ---- */
void engine_run(struct mu_engine *engine, uint64_t generation);
uint64_t engine_take_snapshot(struct mu_engine *engine, uint64_t generation, const struct mu_snapshot *snapshot);

#endif
