/* Shared by the files of the engine: engine.c (mailbox, threads, parking), engine_load.c (the job), engine_memory.c
 * (spaces, buffers, the net of a part), engine_prepare.c (a new generation: layout, connections), engine_state.c (its
 * state: what is held, made, moved), engine_step.c (one step), engine_tied.c (embedding on two stages), engine_run.c
 * (the loop, evaluation, boundaries), engine_feed.c and engine_take.c (state to and from others while stepping),
 * engine_finish.c (the last step), engine_probe.c (measurements while there is nothing else to do). */
#ifndef MU_WORKER_ENGINE_INTERNAL_H
#define MU_WORKER_ENGINE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

#include "common/queue.h"
#include "kernels/arena.h"
#include "kernels/pool.h"
#include "plan/layout.h"
#include "worker/buddy.h"
#include "worker/comm.h"
#include "worker/data.h"
#include "worker/engine.h"
#include "worker/feed.h"
#include "worker/model.h"
#include "worker/nccl_link.h"
#include "worker/pipeline.h"
#include "worker/reduce.h"
#include "worker/snapshot.h"
#include "worker/tensor_comm.h"
#include "worker/transfer.h"

enum {
    ENGINE_POLL_US = 200,       /* least time between looks at the sockets while computing */
    ENGINE_EXACT_LEAVES = 1024, /* up to so many leaves the deepest stack is computed, above it is bounded */
    ENGINE_KINDS = 3,           /* parameters, first and second moments */
    ENGINE_TAKE_LOOK_MS = 100,  /* while a feed is taken: deadlines are looked at so often */
    ENGINE_FEED_ORDERS_MAX = 2 * MU_FEED_PARTS_MAX, /* for a member, not yet looked at */
    ENGINE_NCCL_ABORT_US = 8000000, /* communicators that take longer to give up hang; a revoke is waited for 15 s */
    ENGINE_NCCL_EXIT = 1,           /* MU_AGENT_EXIT_FAILURE */
    ENGINE_UPDATE_PARTS = 16,       /* segments in one update at most, before they are sent to the replicas */
};

enum engine_phase {
    ENGINE_EMPTY,    /* no job */
    ENGINE_LOADED,   /* a job, no generation */
    ENGINE_PREPARED, /* waiting for RUN */
    ENGINE_PARKED,   /* a generation that does not step (any more) */
};

struct engine_feed_order {
    uint64_t generation;
    struct mu_id incarnation; /* own */
    struct mu_feed_order order;
};

/* A command, its assignment and what that points to, in one block of memory. */
enum engine_command_kind {
    ENGINE_LOAD,
    ENGINE_PREPARE,
    ENGINE_RUN,
    ENGINE_ABORT,
    ENGINE_SNAPSHOT,
    ENGINE_FEED,
    ENGINE_PROBE,
    ENGINE_FORGET,
    ENGINE_STOP
};

struct engine_command {
    enum engine_command_kind kind;
    uint64_t generation;
    struct mu_job_spec spec; /* LOAD */
    struct mu_id id;         /* LOAD: the job's uid; PREPARE, PROBE: own incarnation */
    struct mu_snapshot snapshot;
    struct engine_feed_order feed;   /* FEED: not of a giver's, see feed_orders */
    struct mu_probe_order probe;     /* PROBE */
    struct mu_assign assign;         /* PREPARE: its pointers lead to `tail` */
    struct mu_amendments amendments; /* PREPARE, FEED */
    max_align_t tail[];
};

/* One set of parameters and moments: whole flat spaces, of which only shares are backed by memory. */
struct engine_state {
    struct mu_space *spaces[ENGINE_KINDS];
    float *flats[ENGINE_KINDS];
};

/* Runs of chunks of a share (plan/layout.h). */
enum { ENGINE_RUNS_MAX = 3 * MU_RUNS_MAX }; /* of a column, a tied copy and a mirror together */
struct engine_runs {
    uint32_t count;
    struct mu_chunk_run runs[ENGINE_RUNS_MAX];
};

/* Phase times of the step under way, microseconds. */
struct engine_times {
    uint64_t total_us, data_us, forward_us, backward_us, communicate_us, wait_us, optimizer_us, snapshot_us;
    uint64_t tensor_us, pipeline_us, replicas_us, vote_us; /* of communicate and wait: for whom */
};

/* A connection that feeds state; NULL: none. */
struct engine_feed {
    struct mu_feed *feed;
    struct mu_move *moves; /* what is fed */
    uint32_t move_count;
};

/* What is taken, from several givers: into the spaces of the state, beside the share that is stepped with. */
struct engine_take {
    struct engine_feed_order given; /* of the first giver that was heard of; number 0: nothing is taken */
    struct engine_feed feeds[MU_FEED_PARTS_MAX];
    uint32_t here, live, ended;         /* bits: of parts whose order has come, ... */
    uint64_t until_us;                  /* all orders are here by then */
    bool busy;                          /* it is being looked at */
    struct mu_space *gradient, *spoilt; /* the gradients that arrive; parameters made where only moments are wanted */
    struct mu_step_result result;       /* of the newest update made */
    uint64_t step;                      /* where those that have ended have parked */
};

struct engine_tied;
struct engine_digest;

/* What belongs to one generation; freed when it is superseded. */
struct engine_generation {
    uint64_t generation, start_step;
    struct mu_layout layout;
    uint32_t rank, world;
    bool idle;
    struct mu_coords at;
    uint32_t first_leaf, leaf_count;
    bool merged; /* numerics: fast: all own leaves are one, in one gradient buffer */
    uint32_t first_eval_leaf, eval_leaf_count;
    struct mu_comm_group *group;     /* NULL when world is 1 */
    struct mu_nccl_link link;        /* not open where exchanges go over the group alone */
    struct mu_nccl_meeting *meeting; /* of the link; the group may know its requests */
    bool records;                    /* all GPUs of the tensor group do (kernels/device.h) */
    struct mu_reduce *reduce;
    bool gathering;                /* parameters that other replicas have updated are on their way */
    struct mu_tensor_comm *tensor; /* NULL when tp is 1 or the rank is idle */
    struct mu_pipeline *pipeline;  /* NULL when pp is 1 or the rank is idle */
    struct mu_buddy *buddy;        /* NULL unless dp is 1 and there are mirrors */
    struct engine_tied *tied;      /* NULL unless this rank and another stage have the embedding */
    struct engine_digest *digest;  /* NULL before the last step */
    struct mu_transfer *transfer;
    size_t failures_told; /* of the group's failures, how many the owner knows of */
};

/* What the data plane has moved (engine_traffic.c). */
struct engine_traffic {
    /* The engine thread's own: counters when it last looked. */
    uint64_t looked_us, generation;
    size_t peer_count;
    struct mu_comm_traffic peers[MU_PEERS_MAX];
    /* Any thread, under the lock. */
    pthread_mutex_t lock;
    uint64_t made_us;
    struct mu_comm_stats totals;
    uint32_t link_count;
    struct mu_vital_link links[MU_VITAL_LINKS_MAX];
};

/* Tokens of the micro-batches between their forward and their backward. */
struct engine_batches {
    int32_t *tokens, *targets; /* [slots][micro, length] */
    uint64_t *samples;         /* [slots][micro] */
};

/* The net of a part of the model; kept from generation to generation while the part stays. */
struct engine_net {
    struct mu_model *model; /* NULL: none */
    struct mu_model_part part;
    uint32_t slots;
    struct mu_tensor_group tensor;
    struct engine_batches batches;
};

/* What moves have brought to a state that is not complete yet: it is not moved again while the start stays the same. */
struct engine_arrived {
    uint64_t step;
    const struct engine_state *where; /* NULL: nothing */
    uint8_t *kinds;                   /* [chunks]: MU_MOVE_* */
};

/* The job and everything that is allocated for it. */
struct engine_job {
    struct mu_job_spec spec;
    struct mu_id uid;
    struct mu_model_spec model;
    struct mu_data *data;
    struct mu_data_info data_info;
    struct engine_net net;
    uint32_t leaves, eval_leaves;
    uint64_t eval_sequences; /* really used */
    uint64_t tokens_per_step;
    struct engine_state state, incoming; /* incoming: only while a state that is held must stay intact */
    struct engine_arrived arrived;
    struct mu_arena *staging_arena;
    struct mu_space *stack_spaces[MU_TREE_ROOTS_MAX]; /* [i] holds stack[i] */
    float *stack[MU_TREE_ROOTS_MAX]; /* gradient buffers of the binary counter; [0] is where the reduced gradient is
                                        kept */
    uint32_t stack_count;
    float *staging;
    uint64_t staging_bytes;
};

struct mu_engine {
    struct mu_engine_callbacks callbacks;
    uint32_t threads, connect_timeout_ms;
    struct mu_device *device;
    uint64_t memory_bytes;          /* 0: as much as there is */
    const struct mu_nccl_ops *nccl; /* NULL: none */
    uint64_t watched_us;
    bool nccl_over; /* the communicators of the generation were given up: what the GPU holds of its step is void */
    char host[MU_WORKER_NAME_SIZE];
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
    struct engine_feed_order feed_orders[ENGINE_FEED_ORDERS_MAX]; /* of a member, looked at when it passes a boundary */
    uint32_t feed_order_count;

    atomic_uint_least64_t progress;
    atomic_bool waiting;

    /* The engine thread's own. */
    struct mu_pool *pool;
    struct mu_snapshots *snapshots;
    enum engine_phase phase;
    struct engine_job job;
    struct mu_held held;
    struct engine_feed feeds[MU_FEED_PARTS_MAX]; /* given */
    bool feeds_hold; /* an update is being made, or parameters of it are on their way: no chunk may be read */
    bool feeds_busy; /* they are being waited for */
    bool updating;   /* what compute makes now is made to its end */
    struct engine_take take;
    bool taken_whole; /* the last share that is held has come by it, and no generation has begun since */
    struct engine_generation now, old; /* old: kept open until RUN of the new one */
    uint64_t polled_us;
    struct engine_times times;
    struct engine_traffic traffic;
};

/* ---- engine.c ---- */

/* Has the generation under way been cancelled from outside (abort, forget, stop)? Then nobody is told: the command that
 * follows does it. */
bool engine_aborted(struct mu_engine *engine);
/* Compute is cancelled while this generation is aborted; called when one begins. */
void engine_set_current(struct mu_engine *engine, uint64_t generation);
/* The pool obeys the cancel flag, or (optimizer updates) runs to the end. */
void engine_set_cancellable(struct mu_engine *engine, bool cancellable);
/* `engine` is a struct mu_engine: also a callback of what waits by itself. */
void engine_set_waiting(void *engine, bool waiting);
/* Closes the connections first, then frees what they may have pointed to. */
void engine_generation_close(struct mu_engine *engine, struct engine_generation *generation);
/* Parks and posts PARKED. `text` may be NULL. */
void engine_park(struct mu_engine *engine, enum mu_park_reason reason, const char *text);
/* Parks because of `status` (nothing is posted if it was cancelled from outside): a peer's failure, or `otherwise`. */
void engine_park_failed(struct mu_engine *engine, enum mu_status status, const struct mu_error *err,
                        enum mu_park_reason otherwise, uint64_t bad_checkpoint);
void engine_post(struct mu_engine *engine, const struct mu_worker_event *event);

/* ---- engine_load.c ---- */
void engine_load(struct mu_engine *engine, const struct engine_command *command);
void engine_unload(struct mu_engine *engine);

/* ---- engine_memory.c ---- */

/* A clear refusal where the kernel would kill the process later. */
enum mu_status engine_check_memory(struct mu_engine *engine, enum mu_memory kind, uint64_t size_bytes, const char *what,
                                   struct mu_error *err) MU_WARN_UNUSED;
void engine_runs_of(const struct mu_model_spec *model, const struct mu_layout *layout, uint32_t rank,
                    enum mu_share share, struct engine_runs *out);
/* All that the rank has parameters of: its column, the copy of a tied embedding, what it mirrors. The same for moments.
 */
void engine_touched_runs(const struct mu_model_spec *model, const struct mu_layout *layout, uint32_t rank,
                         struct engine_runs *out);
void engine_moment_runs(const struct mu_model_spec *model, const struct mu_layout *layout, uint32_t rank,
                        struct engine_runs *out);
/* [*ret_offset, *ret_offset + *ret_size) of the flat space, elements; gaps between cells of the run come along. */
void engine_run_range(const struct mu_model_spec *model, const struct mu_chunk_run *run, uint64_t *ret_offset,
                      uint64_t *ret_size);
/* Reserves addresses only. engine_state_free: NULLs are fine. */
enum mu_status engine_state_new(struct mu_engine *engine, struct engine_state *ret_state,
                                struct mu_error *err) MU_WARN_UNUSED;
void engine_state_free(struct engine_state *state);
/* Memory for a rank's share of the state: nothing that is there already changes. */
enum mu_status engine_commit_state(struct mu_engine *engine, struct engine_state *state, const struct mu_layout *layout,
                                   uint32_t rank, struct mu_error *err) MU_WARN_UNUSED;
/* Gradient buffers of a rank's share for a stack of `depth`; staging memory of at least size_bytes. */
enum mu_status engine_commit_stack(struct mu_engine *engine, uint32_t depth, const struct mu_layout *layout,
                                   uint32_t rank, struct mu_error *err) MU_WARN_UNUSED;
/* One line: what is backed by memory of each kind, bytes, as spaces and arenas count it. Moments with those mirrored.
 */
void engine_log_memory(const struct mu_engine *engine);
/* Gives back what is outside the rank's share, of the state and of the gradients. */
void engine_release_unshared(struct mu_engine *engine, const struct mu_layout *layout, uint32_t rank);
enum mu_status engine_reserve_staging(struct mu_engine *engine, uint64_t size_bytes,
                                      struct mu_error *err) MU_WARN_UNUSED;
/* Room to copy the rank's piece of a checkpoint; nothing when the job makes no checkpoints. */
enum mu_status engine_reserve_snapshot(struct mu_engine *engine, const struct mu_layout *layout, uint32_t rank,
                                       struct mu_error *err) MU_WARN_UNUSED;
/* The net of a rank's part, with room for `slots` micro-batches; the one that is there if it fits. None when idle. */
enum mu_status engine_build_net(struct mu_engine *engine, const struct mu_layout *layout, uint32_t rank, uint32_t slots,
                                struct mu_error *err) MU_WARN_UNUSED;
void engine_net_free(struct mu_engine *engine);

/* ---- engine_nccl.c ---- */

/* Once connected: where the assignment says that all members have NCCL. */
enum mu_status engine_nccl_open(struct mu_engine *engine, const struct mu_assign *assign,
                                struct mu_error *err) MU_WARN_UNUSED;
/* MU_OK while the link works, or there is none. */
enum mu_status engine_nccl_failure(struct mu_engine *engine, struct mu_error *err) MU_WARN_UNUSED;
/* Gives the communicators up; afterwards nothing under way touches any memory. If they hang the process ends. */
void engine_nccl_end(struct mu_engine *engine, struct engine_generation *generation);
/* The watch of the device (kernels/device.h): on a failure or a revoke nothing may keep the GPU waiting. */
void engine_nccl_watch(void *engine);

/* ---- engine_prepare.c ---- */
void engine_prepare(struct mu_engine *engine, const struct engine_command *command);

/* ---- engine_state.c ---- */
/* Once connected: the state of start_step, complete for the rank's share. *ret_bad: the checkpoint that could not be
 * loaded. */
enum mu_status engine_get_state(struct mu_engine *engine, const struct mu_assign *assign, uint64_t *ret_bad,
                                struct mu_error *err) MU_WARN_UNUSED;
/* What moves have brought is no longer there. */
void engine_forget_arrived(struct mu_engine *engine);
/* Go: from now on the share of the new generation is the one that is held; memory for anything else is given back. */
void engine_enter_share(struct mu_engine *engine);
/* A move to this rank is of something that it holds: the assignment does not know of that. */
bool engine_is_told_to_copy_held(const struct mu_engine *engine, const struct mu_assign *assign);
/* What the owner is told of engine->held. */
struct mu_held engine_reported(const struct mu_engine *engine);
/* The record from here on. What was computed before the job was rolled back is dropped. */
void engine_take_amendments(struct mu_engine *engine, const struct mu_amendments *amendments);

/* ---- engine_step.c ---- */
/* One whole step: gradients, exchange, vote, update. held.step has grown by one when the update was made: also when an
 * error came after it. */
enum mu_status engine_step(struct mu_engine *engine, struct mu_error *err) MU_WARN_UNUSED;
/* The update held.step -> held.step + 1 with the reduced gradient, always to its end; `send`: then or meanwhile what
 * others need of it is sent. */
enum mu_status engine_apply(struct mu_engine *engine, const struct mu_step_result *result, bool send,
                            struct mu_error *err) MU_WARN_UNUSED;
/* The update of `result`'s step as a function of one range of the flat spaces: the whole update is made of these. */
struct mu_adamw engine_adamw(const struct mu_engine *engine, const struct mu_step_result *result);
void engine_update_range(struct mu_engine *engine, const struct mu_adamw *adamw, uint64_t offset, uint64_t size);
/* The same with this gradient, and these parameters. */
void engine_update_with(struct mu_engine *engine, const struct mu_adamw *adamw, uint64_t offset, uint64_t size,
                        float *params, const float *gradient);
/* Waits until the parameters of the last update are complete here: before evaluations, before parking. (A step waits
 * for each part of them just before its first use.) `sent`: and until all that others get of them has left. */
enum mu_status engine_settle(struct mu_engine *engine, bool sent, struct mu_error *err) MU_WARN_UNUSED;
/* This rank speaks for its replica: losses, ledger. */
bool engine_reports(const struct mu_engine *engine);
/* The batch arrays of a slot. */
struct engine_batches engine_batch_at(struct mu_engine *engine, uint32_t slot);
/* Why a call into the model failed: text for a status that came through it. */
enum mu_status engine_model_failed(struct mu_engine *engine, enum mu_status status, const char *what,
                                   struct mu_error *err) MU_WARN_UNUSED;

/* ---- engine_tied.c: the embedding of a tied model on the first and the last of several stages ---- */
enum mu_status engine_tied_new(struct mu_engine *engine, struct mu_error *err) MU_WARN_UNUSED;
void engine_tied_free(struct engine_tied *tied);
/* First stage, a step begins: the head chains of so many leaves will come. */
enum mu_status engine_tied_expect(struct mu_engine *engine, uint32_t leaves, struct mu_error *err) MU_WARN_UNUSED;
/* First stage: waits for the leaf's head chain and puts it into its gradient, or (`add`) adds it to what is there. */
enum mu_status engine_tied_take(struct mu_engine *engine, float *grads, bool add, struct mu_error *err) MU_WARN_UNUSED;
/* Last stage: the leaf's head chain is complete; before the next one may be begun: it has left. */
enum mu_status engine_tied_send(struct mu_engine *engine, float *grads, struct mu_error *err) MU_WARN_UNUSED;
enum mu_status engine_tied_sent(struct mu_engine *engine, struct mu_error *err) MU_WARN_UNUSED;
/* Both: parameters of the embedding from the first to the last stage. */
enum mu_status engine_tied_copy_begin(struct mu_engine *engine, struct mu_error *err) MU_WARN_UNUSED;
/* Waits only where the copy arrives, or (`sent`) on both sides. */
enum mu_status engine_tied_copy_finish(struct mu_engine *engine, bool sent, struct mu_error *err) MU_WARN_UNUSED;

/* ---- engine_run.c ---- */
void engine_run(struct mu_engine *engine, uint64_t generation);
uint64_t engine_take_snapshot(struct mu_engine *engine, uint64_t generation, const struct mu_snapshot *snapshot);

/* ---- engine_traffic.c ---- */
/* Between two steps: copies the counters out, once a second. */
void engine_traffic_look(struct mu_engine *engine);

/* ---- engine_feed.c ---- */
/* Giver, in the order of a step: before the first backward pass overwrites the gradient; while there is time; when the
 * result of the vote is known; when all parameters of the update are here; at the boundary; where it parks by command;
 * when the generation is over. */
void engine_feeds_drain(struct mu_engine *engine);
void engine_feeds_pump(struct mu_engine *engine);
void engine_feeds_update(struct mu_engine *engine, const struct mu_step_result *result);
void engine_feeds_updated(struct mu_engine *engine);
void engine_feeds_boundary(struct mu_engine *engine);
void engine_feeds_end(struct mu_engine *engine);
void engine_feeds_drop(struct mu_engine *engine);
/* What comes from or goes to one giver. Free: the connection too. */
enum mu_status engine_feed_open(struct mu_engine *engine, const struct engine_feed_order *given, float *gradient,
                                enum mu_status (*reserve)(void *, const struct mu_chunk *, uint32_t, struct mu_error *),
                                struct engine_feed *ret_feed, struct mu_error *err) MU_WARN_UNUSED;
void engine_feed_free(struct engine_feed *feed);
/* While the engine waits for peers. `engine` is a struct mu_engine. True: something was done. */
bool engine_feeds_idle(void *engine);

/* ---- engine_take.c ---- */
void engine_take(struct mu_engine *engine, const struct engine_feed_order *given);
/* Whatever has come; `update`: nothing is being computed, so updates may be made too. */
void engine_take_pump(struct mu_engine *engine, bool update);
/* Its own generation has parked: what has ended counts. Fail: the generation is over, what has not ended is worth
 * nothing. Drop: without a word. */
void engine_take_parked(struct mu_engine *engine);
void engine_take_fail(struct mu_engine *engine, const char *text);
void engine_take_drop(struct mu_engine *engine);
/* A new generation: what an assignment does not know of, does not count. */
void engine_take_assigned(struct mu_engine *engine, const struct mu_assign *assign);

/* ---- engine_probe.c ---- */
void engine_probe(struct mu_engine *engine, struct mu_id incarnation, const struct mu_probe_order *order);

/* ---- engine_finish.c ---- */
/* After the last step: SHA-256 of all parameters, cell by cell, whoever holds them, and whether all of them are finite.
 */
enum mu_status engine_weights_sha256(struct mu_engine *engine, uint8_t ret_sha256[32], bool *ret_finite,
                                     struct mu_error *err) MU_WARN_UNUSED;

#endif
