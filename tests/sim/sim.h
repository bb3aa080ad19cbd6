/* The simulator: one real coordinator core, up to thousands of real worker cores, a hash engine in place of training, a
 * lossy record store, a fake file system and a network, all in one thread and in virtual time. Everything random comes
 * from the seed, so a seed replays a history exactly.
 *
 *   world.c             event heap, clocks, randomness, trace, violations
 *   message.c           deep copies of messages and records, each one block of memory
 *   net.c               streams to the coordinator, frames between workers, partitions
 *   store.c             records: synced, unsynced, lost in a crash
 *   files.c             checkpoint directories: pieces and manifests
 *   local.c             the same where each host has its own: copies, orders to keep
 *   coordinator_node.c  shell of the coordinator core (output commit, planning, publishing, crashes, pauses)
 *   client.c            the user: submits, triggers checkpoints, drains, cancels
 *   worker_node.c       shell of a worker core
 *   engine.c            hash engine: stepping;  engine_prepare.c: connecting and moving state;
 *   engine_state.c      what the engine is made of: links, frames, snapshots
 *   shares.c            sets of chunks: shares, moves, what somebody holds
 *   oracle.c            the undisturbed run and the invariants of steps and held state; oracle_plan.c: of plans;
 *                       oracle_records.c: of what becomes durable; oracle_pace.c: of how often checkpoints are taken;
 *                       oracle_slow.c: of slow workers whose places spares take
 *   choose.c            layouts that no cost model would choose
 *   profiles.c          what goes wrong in which history;  faults.c: makes it go wrong
 *   main.c              command line
 *
 * Time is in true microseconds; each node's monotonic clock has its own offset and rate. Threads: none. */
#ifndef MU_TESTS_SIM_H
#define MU_TESTS_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "common/mutant.h"
#include "coordinator/core/core.h"
#include "plan/model_spec.h"
#include "plan/tree.h"
#include "worker/core/core.h"

enum {
    MU_SIM_CHUNKS_MAX = 64, /* of a model: one bit each in a mask */
    MU_SIM_NODE_COORDINATOR = 0,
    MU_SIM_NODE_WORKER = 1, /* + slot */
    MU_SIM_NODE_NONE = -1,  /* the world itself: clients, faults, the network */
    MU_SIM_FAILURE_SIZE = 640,
};
#define MU_SIM_NEVER UINT64_MAX
#define MU_SIM_NAN   UINT64_MAX /* hash of what is not finite: whatever is mixed with it is not finite either */
#define MU_SIM_MS    UINT64_C(1000)
#define MU_SIM_S     UINT64_C(1000000)

struct mu_sim;
struct mu_sim_event;
typedef void (*mu_sim_fire)(struct mu_sim *sim, struct mu_sim_event *event);

struct mu_sim_event {
    uint64_t at_us, order;
    mu_sim_fire fire;
    void *payload; /* one block, freed after firing or when the event is dropped; a handler that keeps it sets it to
                      NULL */
    int32_t node;  /* dropped when the node's life has ended; waits while the node is stopped */
    uint64_t life, a, b;
};

/* ---- parameters of one history ---- */

enum mu_sim_fault {
    MU_SIM_FAULT_KILL_WORKER,
    MU_SIM_FAULT_KILL_TWO, /* at the same instant */
    MU_SIM_FAULT_KILL_ALL,
    MU_SIM_FAULT_STOP_WORKER, /* SIGSTOP, SIGCONT later: a zombie when it takes longer than the lost timeout */
    MU_SIM_FAULT_TERM_WORKER,
    MU_SIM_FAULT_ADD_WORKER,
    MU_SIM_FAULT_HANG_ENGINE,
    MU_SIM_FAULT_LOSE_STREAM,
    MU_SIM_FAULT_HALF_OPEN,  /* the worker sees the loss, the coordinator does not */
    MU_SIM_FAULT_CUT_STREAM, /* worker <-> coordinator partition, one way or both */
    MU_SIM_FAULT_CUT_LINK,   /* worker <-> worker partition, one way or both */
    MU_SIM_FAULT_RESET_LINK, /* one data-plane connection */
    MU_SIM_FAULT_KILL_COORD,
    MU_SIM_FAULT_PAUSE_COORD,
    MU_SIM_FAULT_JUMP_WALL,
    MU_SIM_FAULT_DRAIN,
    MU_SIM_FAULT_CHECKPOINT,
    MU_SIM_FAULT_FULL_DISK, /* for a while */
    MU_SIM_FAULT_CORRUPT,   /* flips a bit in a piece of a committed checkpoint, then kills everybody */
    MU_SIM_FAULT_CANCEL,
    MU_SIM_FAULT_KILL_STAGE,  /* every rank of one stage */
    MU_SIM_FAULT_DRAIN_STAGE, /* the same leave: often the only holders */
    MU_SIM_FAULT_LOSE_DISK,   /* of one host, with its workers; once in a history */
    MU_SIM_FAULT_POISON, /* the newest checkpoint has values that are not finite; kills everybody. This one and those
                            that follow are drawn only by profiles that are made for them */
    MU_SIM_FAULT_CHANGE_SPEED, /* a worker takes three times as long, or as long as others again */
    MU_SIM_FAULT_COUNT
};

/* Named places in the life of a step; at each of them somebody may be killed. */
enum mu_sim_point {
    MU_SIM_POINT_ASSIGN,
    MU_SIM_POINT_TRANSFER,
    MU_SIM_POINT_PREPARED,
    MU_SIM_POINT_RUN,
    MU_SIM_POINT_FORWARD,
    MU_SIM_POINT_EXCHANGE,
    MU_SIM_POINT_BEFORE_VOTE,
    MU_SIM_POINT_AFTER_VOTE,
    MU_SIM_POINT_OPTIMIZER,
    MU_SIM_POINT_BOUNDARY,
    MU_SIM_POINT_PARKED,
    MU_SIM_POINT_SNAPSHOT,
    MU_SIM_POINT_PIECE,
    MU_SIM_POINT_FEED,
    MU_SIM_POINT_PUBLISH,
    MU_SIM_POINT_DELETE,
    MU_SIM_POINT_COUNT
};

struct mu_sim_params {
    uint32_t workers, slots; /* at the start; most processes at one time */
    uint32_t min_workers, max_workers, spares, leaves;
    uint64_t steps, checkpoint_every, keep, keep_every, eval_every;
    bool every_auto; /* checkpoint.every: auto */
    bool amends;     /* the job is amended now and then */
    bool rolls_back; /* ... or rolled back to a checkpoint */
    bool repeats;    /* requests have ids, and come again after their answer */
    bool checkpoints;
    uint64_t leaf_us, optimizer_us, io_us, load_us;
    uint64_t stall_us;          /* of a snapshot, where it matters: every_auto */
    uint64_t net_us, stream_us; /* one way: between workers, to and from the coordinator */
    uint64_t sync_us;
    uint32_t slow_sync_ppm; /* a sync takes up to 2 s */
    uint32_t clock_ppm;     /* largest rate error of a clock */
    uint64_t fault_mean_us, faults_start_us, faults_end_us;
    uint32_t weight[MU_SIM_FAULT_COUNT];
    uint32_t point_kill_ppm;    /* at each named point: kill that worker, or another */
    uint32_t prepare_kill_ppm;  /* the same, at the points from Assign to Go */
    uint32_t point_coord_ppm;   /* at each named point: kill the coordinator */
    uint32_t prepare_coord_ppm; /* the same, at the points from Assign to Go */
    uint32_t sync_crash_ppm;    /* coordinator: at each sync, before or after it is durable */
    uint64_t sync_crash_at;     /* crash exactly at this sync (1, 2, ...); 0 = no */
    uint32_t io_error_ppm;      /* a piece, manifest or delete fails */
    uint32_t connect_fail_ppm;
    uint32_t crash_limit;                /* 0: the core's default */
    uint32_t rebalance_ms, slow_workers; /* the same; of eight workers so many take three times as long */
    uint64_t restart_us; /* mean time until a dead process is started again; 0 = never during the faults */
    uint64_t horizon_us; /* liveness: over by then, or it counts as hung */
    uint32_t layers, slices, channels, vocab; /* of the model */
    uint32_t tp, pp, dp;                      /* of the job; 0: the planner chooses */
    bool sharded, restless;                   /* restless: another layout after every change, see choose.c */
    bool local;                               /* checkpoints: each host has a disk of its own, see local.c */
    bool buddies, one_fault;                  /* one_fault: and no step may be replayed for it */
    uint64_t memory_bytes;                    /* of a worker's device */
    bool node_orders;                         /* hosts are cordoned, drained, resumed */
    bool probes, preflight;                   /* workers are measured, again and again; before the job begins */
    bool supervised;                          /* who is killed is told to the coordinator by its supervisor */
    bool same_names, no_names, mixed_hosts, hosts_vanish, strangers, may_fail, nobody_lost, undisturbed;
};

struct mu_sim_profile {
    const char *name, *about;
    uint32_t share; /* of the seeds of a smoke run */
    void (*fill)(struct mu_sim *sim, struct mu_sim_params *params);
};
const struct mu_sim_profile *mu_sim_profile_find(const char *name);
const struct mu_sim_profile *mu_sim_profile_for_seed(uint64_t seed);
extern const struct mu_sim_profile mu_sim_profiles[];
extern const uint32_t mu_sim_profile_count;

/* ---- state and files ---- */

/* One hash for each chunk and kind. */
struct mu_sim_values {
    uint64_t params[MU_SIM_CHUNKS_MAX], moments[MU_SIM_CHUNKS_MAX];
};

/* Sets of chunks. */
struct mu_sim_mask {
    uint64_t params, moments;
};

/* Part of the state of one step: only what is in `has` means anything. */
struct mu_sim_state {
    struct mu_sim_mask has;
    struct mu_sim_values values;
};

struct mu_sim_piece {
    char dir[MU_PATH_SIZE], file[96];
    uint64_t checkpoint, step, generation;
    uint32_t piece, piece_count;
    struct mu_sim_state state;
    bool corrupt; /* its bytes no longer match its checksum */
    bool listed;  /* in the manifest */
};
struct mu_hash128 mu_sim_piece_checksum(const struct mu_sim_piece *piece);

struct mu_sim_directory {
    char path[MU_PATH_SIZE];
    bool manifest;
    struct mu_sim_piece *pieces;
    uint32_t piece_count, piece_capacity;
};

struct mu_sim_files {
    struct mu_sim_directory *directories;
    uint32_t count, capacity;
    uint64_t full_until_us;
};
void mu_sim_files_free(struct mu_sim_files *files);
struct mu_sim_directory *mu_sim_files_find(struct mu_sim_files *files, const char *path);
/* MU_OK, MU_ERR_NO_SPACE or MU_ERR_IO; on error nothing is visible. */
enum mu_status mu_sim_files_write(struct mu_sim *sim, const struct mu_sim_piece *piece);
/* What the shell does for PUBLISH: every piece of the record is there, whole, of one step, and they tile all chunks;
 * then the manifest. */
enum mu_status mu_sim_files_publish(struct mu_sim *sim, const struct mu_checkpoint_record *record,
                                    const char **ret_text);
enum mu_status mu_sim_files_delete(struct mu_sim *sim, const char *path);
/* Loads a published checkpoint: false when a piece is missing or corrupt. */
bool mu_sim_files_load(struct mu_sim *sim, const char *path, uint64_t *ret_step, struct mu_sim_values *ret_values);
/* Pieces of `record` complete, of the same step, tiling: the invariant of a commit. */
bool mu_sim_files_complete(struct mu_sim *sim, const struct mu_checkpoint_record *record, bool allow_corrupt,
                           const char **ret_why);
struct mu_sim_directory *mu_sim_files_make(struct mu_sim_files *files, const char *path);
struct mu_sim_piece *mu_sim_files_piece(struct mu_sim_directory *directory, const char *file); /* NULL: none */

/* local.c. Directories of all hosts lie in `files`; %h in a record's path stands for a host. */
void mu_sim_local_path(const char *dir, uint32_t host, char out[MU_PATH_SIZE]);
bool mu_sim_is_local(const char *dir);
/* From all disks together, whoever is there. */
bool mu_sim_local_load_any(struct mu_sim *sim, const char *dir, uint64_t *ret_step, struct mu_sim_values *ret_values);
/* Every piece of the record is on as many hosts as it should be, and these have the manifest. */
bool mu_sim_local_complete(struct mu_sim *sim, const struct mu_checkpoint_record *record, const char **ret_why);
/* What this worker can get at: MU_ERR_UNAVAILABLE: not now. */
enum mu_status mu_sim_local_load(struct mu_sim *sim, uint32_t slot, const struct mu_assign *assign, uint64_t *ret_step,
                                 struct mu_sim_values *ret_values);
void mu_sim_local_keep(struct mu_sim *sim, uint32_t slot, const struct mu_keep_order *order);
void mu_sim_local_inventory(struct mu_sim *sim, uint32_t host, struct mu_hello *hello);
void mu_sim_local_lose_disk(struct mu_sim *sim, uint32_t host);

/* ---- nodes ---- */

struct mu_sim_node {
    bool alive, stopped, draining_backlog;
    uint64_t life; /* of the process now or last on it; grows */
    uint64_t clock_offset_us;
    int64_t clock_ppm;
    uint64_t tick_at_us;   /* the scheduled tick (true time), MU_SIM_NEVER: none */
    uint64_t tick_version; /* of that event; others are stale */
    struct mu_sim_event **backlog;
    uint32_t backlog_count, backlog_capacity;
};

struct mu_sim_session {
    uint32_t slot;
    uint64_t worker_life, coord_life;
    uint64_t opened_us;
    bool cut;        /* what is in flight is lost */
    bool coord_open; /* the coordinator has not been told of its end */
    bool worker_open;
    uint64_t last_up_us, last_down_us;
};

struct mu_sim_output; /* coordinator_node.c */
struct mu_sim_store;  /* store.c */
struct mu_sim_oracle; /* oracle.c */
struct mu_sim_client; /* client.c */

struct mu_sim_coordinator {
    struct mu_coord *core;
    struct mu_sim_output *head, *tail; /* actions not yet released, in order */
    uint64_t turn;                     /* counts core steps: the unit of atomicity of the store */
    uint64_t syncs;                    /* over all lives */
    bool syncing;
    uint64_t durable_turn, sync_turn;
    uint64_t judged_turn; /* of what becomes durable or is released just now */
    int64_t wall_jump_us;
    uint64_t starts;
};

/* ---- the hash engine ---- */

enum mu_sim_frame_kind {
    MU_SIM_FRAME_DIAL, /* secret: joins the two ends of a link */
    MU_SIM_FRAME_ACCEPT,
    MU_SIM_FRAME_KEPT,     /* to who moves chunks here: those that came in an earlier preparation */
    MU_SIM_FRAME_MOVE,     /* chunks of state, while preparing */
    MU_SIM_FRAME_TENSOR,   /* to the tensor group: parameters of the own column */
    MU_SIM_FRAME_FORWARD,  /* to the next stage: hash of all that lies before it */
    MU_SIM_FRAME_BACKWARD, /* to the stage before: hash of the whole model */
    MU_SIM_FRAME_TIED,     /* from the last stage to the first: the gradient of the tied embedding's head */
    MU_SIM_FRAME_ROOTS,    /* replicas. Mesh: to everybody; tree: from child to parent */
    MU_SIM_FRAME_SUM,      /* tree: from parent to child */
    MU_SIM_FRAME_MIRROR,   /* to the buddy: the whole gradient of what it mirrors */
    MU_SIM_FRAME_VOTE,     /* all ranks. Mesh: to everybody; tree: up */
    MU_SIM_FRAME_RESULT,   /* tree: down */
    MU_SIM_FRAME_GATHER,   /* replicas: updated parameters of the own chunks */
    MU_SIM_FRAME_COPY,     /* from the first stage to the last: the tied embedding */
    MU_SIM_FRAME_FINAL,    /* to everybody, after the last step: parameters */
    MU_SIM_FRAME_FEED,     /* to a spare, while stepping */
    MU_SIM_FRAME_KINDS
};

enum mu_sim_feed_item { MU_SIM_FEED_CHUNKS, MU_SIM_FEED_UPDATE, MU_SIM_FEED_PARAMS, MU_SIM_FEED_END };

struct mu_sim_root {
    struct mu_tree_node node;
    uint64_t hash;
};

struct mu_sim_frame { /* one block with its roots and its state */
    enum mu_sim_frame_kind kind;
    uint64_t generation, link, step;
    uint32_t from_rank, from_slot;
    uint8_t secret[32];
    uint64_t hash, command;
    uint64_t feed; /* its number */
    enum mu_sim_feed_item item;
    struct mu_sim_mask kept;    /* MOVE: not sent, since the receiver has the same already */
    struct mu_sim_state *state; /* NULL: carries none */
    uint32_t root_count;
    struct mu_sim_root roots[];
};

/* What a peer is to a rank; see plan/layout.h. */
enum {
    MU_SIM_ROLE_WORLD_UP = 1,
    MU_SIM_ROLE_WORLD_DOWN = 2,
    MU_SIM_ROLE_WORLD_MESH = 4,
    MU_SIM_ROLE_REPLICA_UP = 8,
    MU_SIM_ROLE_REPLICA_DOWN = 16,
    MU_SIM_ROLE_REPLICA_MESH = 32,
    MU_SIM_ROLE_TENSOR = 64,
    MU_SIM_ROLE_NEXT = 128,
    MU_SIM_ROLE_PREVIOUS = 256,
    MU_SIM_ROLE_FIRST = 512, /* first stage, for the last one: tied embedding */
    MU_SIM_ROLE_LAST = 1024,
    MU_SIM_ROLE_BUDDY = 2048,   /* mirrors what this rank updates */
    MU_SIM_ROLE_GATHER = 8192,  /* of the same shard group */
    MU_SIM_ROLE_GUARDED = 4096, /* this rank mirrors what it updates */
};

struct mu_sim_link_end {
    uint32_t rank, slot; /* slot UINT32_MAX: the address names nobody */
    uint32_t roles;
    uint64_t life;
    bool connected, dead;
    enum mu_peer_failure failure;                     /* why it is dead */
    uint64_t id;                                      /* of the connection; the same at both ends */
    uint64_t last_us;                                 /* FIFO of what this end sends */
    struct mu_sim_frame *kept[MU_SIM_FRAME_KINDS][2]; /* by parity of the step */
    struct mu_sim_mask moved;                         /* chunks sent over it while preparing */
    bool asked;                                       /* the other end has said what it has of them: */
    struct mu_sim_state before;
};

struct mu_sim_feed { /* given */
    uint64_t number; /* of the connection; 0: none */
    struct mu_sim_mask all, sent;
    bool owes; /* parameters that have changed since */
    struct mu_sim_link_end end;
};
struct mu_sim_part {     /* taken from one giver */
    bool here;           /* its order has come */
    uint64_t link, step; /* link: 0 before anything has come */
    struct mu_sim_mask all, has;
    bool owed, ended;
};
struct mu_sim_take {
    struct mu_feed_order order; /* of the first giver; number 0: none */
    uint64_t generation;
    struct mu_sim_part parts[MU_FEED_PARTS_MAX];
    bool live;
    struct mu_sim_state state;
    struct mu_step_result result; /* of the newest update made */
};

enum mu_sim_engine_phase {
    MU_SIM_IDLE,
    MU_SIM_PREPARING,
    MU_SIM_PREPARED,
    MU_SIM_COMPUTING,
    MU_SIM_FORWARDING,  /* waits for what lies before this stage, and for its tensor group */
    MU_SIM_BACKWARDING, /* waits for what lies behind it */
    MU_SIM_REDUCING,
    MU_SIM_VOTING,
    MU_SIM_OPTIMIZING,
    MU_SIM_GATHERING, /* waits for the parameters that others have updated */
    MU_SIM_STALLED,   /* copies a snapshot, or waits at a boundary */
    MU_SIM_PARKED
};

struct mu_sim_engine {
    struct mu_job_spec spec; /* as the newest order says */
    uint32_t load_tries;
    enum mu_sim_engine_phase phase;
    bool loaded, hung, was_hung; /* was_hung: by a fault, at some time */
    uint64_t epoch;              /* cancels what was scheduled for earlier work */
    uint64_t progress;
    uint64_t last_post_us, last_order_us; /* FIFO from engine to agent, and from agent to engine */
    /* what it holds */
    struct mu_held held;
    struct mu_sim_state state;    /* of held.step: what held.shares say, and copies of the tied embedding */
    struct mu_sim_state incoming; /* of the start step, when that is another one */
    struct mu_sim_state arrived;  /* by moves, in this preparation and those before it that had the same start: */
    uint64_t arrived_step;
    struct mu_sim_feed feeds[MU_FEED_PARTS_MAX];
    struct mu_sim_take take;
    struct mu_sim_mask taken_whole;     /* of what is held: came by it, and no generation has begun since */
    uint64_t gradient, mirror_gradient; /* the second one as the guarded rank sent it */
    /* the generation */
    uint64_t generation;
    struct mu_assign *assign; /* own copy, one block */
    struct mu_parked parked;  /* the answer while PARKED */
    bool ran;                 /* Go of this generation has come */
    uint32_t rank, first_leaf, leaf_count;
    uint32_t leaves_left; /* COMPUTING: and how long each takes */
    uint64_t leaf_us;
    bool working;
    struct mu_coords at;        /* working only */
    struct mu_sim_mask share;   /* what it is to hold */
    struct mu_sim_mask wants;   /* the same, and on the last stage the copy of the tied embedding */
    struct mu_sim_mask updates; /* what it updates: its share, or its own chunks when sharded; and what it mirrors */
    uint64_t mirror;            /* of that, what it updates for the rank that it guards */
    uint64_t stage_chunks;      /* of its stage, all slices */
    bool has_base;              /* own part of the start state is at hand */
    bool gathered;              /* parameters of the whole share, and the copy, are at hand */
    bool copy_sent, final_sent, park_wanted;
    struct mu_sim_link_end *links;
    uint32_t link_count;
    struct mu_sim_link_end *old_links; /* of the generation that ran before; gone at Go */
    uint32_t old_link_count;
    uint64_t old_generation;
    /* the step */
    uint64_t model_hash;
    struct mu_sim_root *roots; /* own, then merged with those of children */
    uint32_t root_count, root_capacity;
    uint64_t vote; /* own or minimum of the subtree */
    uint64_t step_started_us;
    bool sum_sent, reduced, vote_sent;
};

struct mu_sim_worker {
    struct mu_worker *core;
    struct mu_sim_engine engine;
    uint64_t session; /* 0 = none */
    uint64_t connect_attempt;
    char name[MU_WORKER_NAME_SIZE];
    bool exited; /* by its own EXIT action */
    int exit_code;
    bool restart_planned, stranger, leaving; /* leaving: SIGTERM was sent ... */
    uint64_t leaving_us;                     /* ... then */
    uint32_t speed_percent;                  /* of the time that a worker takes for a leaf */
    bool was_slow;                           /* at some time */
    uint64_t speed_changed_us;
    uint32_t host;
    char address[48];
};

struct mu_sim_partition {
    uint64_t until_us;
    int32_t from, to; /* nodes; one way */
};

struct mu_sim_stats {
    uint64_t events, histories, generations, steps_applied, faults[MU_SIM_FAULT_COUNT], points[MU_SIM_POINT_COUNT];
    uint64_t coordinator_starts, worker_starts, commits, forgotten, fed, fed_beside, fed_over, kept, replayed,
        virtual_us;
};

struct mu_sim {
    uint64_t seed, rng;
    uint64_t now_us, next_order;
    struct mu_sim_event **heap;
    uint32_t heap_count, heap_capacity;
    const struct mu_sim_profile *profile;
    struct mu_sim_params params;
    struct mu_job_spec spec; /* as it is submitted */
    struct mu_job_spec law;  /* with the amendments that are settled: durable */
    struct mu_model_spec model;
    uint64_t all_chunks, tied_chunks; /* masks; tied: slices of the embedding that the head reads again */
    struct mu_coord_config coord_config;

    struct mu_sim_node *nodes; /* [1 + slots] */
    struct mu_sim_coordinator coord;
    struct mu_sim_worker *workers;   /* [slots] */
    struct mu_sim_session *sessions; /* number - 1 */
    uint64_t session_count, session_capacity;
    struct mu_sim_partition *partitions;
    uint32_t partition_count, partition_capacity;
    uint64_t next_link;
    uint32_t next_name;
    struct mu_sim_store *store;
    struct mu_sim_files files;
    struct mu_sim_oracle *oracle;
    struct mu_sim_client *client;
    struct mu_sim_stats stats;

    bool faults_over, finished;
    bool trace, failed;
    bool disk_lost; /* kind local: or a piece damaged; one copy of some pieces is left */
    char failure[MU_SIM_FAILURE_SIZE];
};

/* ---- world.c ---- */

uint64_t mu_sim_random(struct mu_sim *sim);
uint64_t mu_sim_below(struct mu_sim *sim, uint64_t count);
uint64_t mu_sim_between(struct mu_sim *sim, uint64_t low, uint64_t high); /* inclusive */
bool mu_sim_chance(struct mu_sim *sim, uint32_t ppm);
/* Around `typical_us`, now and then ten times as long; at least 1. */
uint64_t mu_sim_delay(struct mu_sim *sim, uint64_t typical_us);
struct mu_id mu_sim_id(struct mu_sim *sim);

void mu_sim_at(struct mu_sim *sim, uint64_t at_us, int32_t node, mu_sim_fire fire, void *payload, uint64_t a,
               uint64_t b);
void mu_sim_after(struct mu_sim *sim, uint64_t delay_us, int32_t node, mu_sim_fire fire, void *payload, uint64_t a,
                  uint64_t b);

void mu_sim_trace(struct mu_sim *sim, const char *fmt, ...) MU_PRINTF(2, 3);
/* The first one ends the history. */
void mu_sim_violate(struct mu_sim *sim, const char *fmt, ...) MU_PRINTF(2, 3);

uint64_t mu_sim_mono(const struct mu_sim *sim, int32_t node);
uint64_t mu_sim_true_time(const struct mu_sim *sim, int32_t node, uint64_t mono_us);
void mu_sim_node_start(struct mu_sim *sim, int32_t node);
void mu_sim_node_end(struct mu_sim *sim, int32_t node);
void mu_sim_node_stop(struct mu_sim *sim, int32_t node);
void mu_sim_node_continue(struct mu_sim *sim, int32_t node);

void *mu_sim_alloc(size_t size_bytes); /* zeroed; exits when memory is out */
void *mu_sim_grow(void *array, uint32_t count, uint32_t *capacity, size_t item_bytes);

/* Not 0: instead of what the profile draws. */
extern uint32_t mu_sim_override_workers;
extern uint64_t mu_sim_override_steps;
void mu_sim_init(struct mu_sim *sim, uint64_t seed, const struct mu_sim_profile *profile, bool trace);
void mu_sim_run(struct mu_sim *sim);
void mu_sim_fini(struct mu_sim *sim);

/* ---- message.c: each copy is one block for free() ---- */

struct mu_worker_message *mu_sim_copy_worker_message(const struct mu_worker_message *message);
struct mu_coord_message *mu_sim_copy_coord_message(const struct mu_coord_message *message);
/* The block begins with a copy of `head` (which may be empty). */
void *mu_sim_copy_assign(const struct mu_assign *assign, const void *head, size_t head_bytes,
                         struct mu_assign **ret_assign);
struct mu_record *mu_sim_copy_record(const struct mu_record *record);
struct mu_plan_input *mu_sim_copy_plan_input(const struct mu_plan_input *input);

/* ---- net.c ---- */

struct mu_sim_session *mu_sim_session(struct mu_sim *sim, uint64_t number);
void mu_sim_net_connect(struct mu_sim *sim, uint32_t slot);
void mu_sim_net_disconnect(struct mu_sim *sim, uint32_t slot); /* by the worker, in good order */
void mu_sim_net_up(struct mu_sim *sim, uint32_t slot, const struct mu_worker_message *message);
void mu_sim_net_down(struct mu_sim *sim, uint64_t session, const struct mu_coord_message *message);
void mu_sim_net_close(struct mu_sim *sim, uint64_t session); /* by the coordinator, after what was sent */
enum mu_sim_loss { MU_SIM_LOSS_PROMPT, MU_SIM_LOSS_COORD_BLIND, MU_SIM_LOSS_WORKER_LATE };
void mu_sim_net_lose(struct mu_sim *sim, uint64_t session, enum mu_sim_loss loss);
void mu_sim_net_worker_died(struct mu_sim *sim, uint32_t slot, bool vanished);
void mu_sim_net_coordinator_died(struct mu_sim *sim, bool vanished);
void mu_sim_net_cut(struct mu_sim *sim, int32_t from, int32_t to, uint64_t duration_us);
/* When what is sent now from one node to another can start to travel: now, the end of a partition, or MU_SIM_NEVER. */
uint64_t mu_sim_net_open_at(const struct mu_sim *sim, int32_t from, int32_t to);
void mu_sim_net_heal(struct mu_sim *sim);
/* Data plane. Takes ownership of frame; `end` is the sender's (NULL: a dial or its answer). */
void mu_sim_net_frame(struct mu_sim *sim, uint32_t from, uint32_t to, uint64_t to_life, struct mu_sim_link_end *end,
                      struct mu_sim_frame *frame);

/* ---- store.c ---- */

struct mu_sim_store *mu_sim_store_new(void);
void mu_sim_store_free(struct mu_sim_store *store);
/* Takes the record. */
void mu_sim_store_put(struct mu_sim_store *store, struct mu_record *record);
void mu_sim_store_forget(struct mu_sim_store *store, const struct mu_record *key);
uint32_t mu_sim_store_count(const struct mu_sim_store *store);
const struct mu_record *mu_sim_store_at(const struct mu_sim_store *store, uint32_t index);
const struct mu_record *mu_sim_store_find(const struct mu_sim_store *store, const struct mu_record *key);

/* ---- coordinator_node.c ---- */

void mu_sim_coord_start(struct mu_sim *sim);
void mu_sim_coord_kill(struct mu_sim *sim, bool vanished);
/* Starts again after a while; does nothing while it lives. */
void mu_sim_coord_restart_later(struct mu_sim *sim);
void mu_sim_coord_event(struct mu_sim *sim, struct mu_coord_event *event); /* fills the times and randomness */
bool mu_sim_coord_up(const struct mu_sim *sim);
void mu_sim_coord_tick_first(struct mu_sim *sim); /* before its backlog, if a tick is due */
void mu_sim_coord_fini(struct mu_sim *sim);

/* ---- client.c ---- */

void mu_sim_client_init(struct mu_sim *sim);
void mu_sim_client_fini(struct mu_sim *sim);
void mu_sim_client_reply(struct mu_sim *sim, uint64_t cookie, enum mu_status status, bool existed, uint64_t checkpoint,
                         const char *text);
void mu_sim_client_checkpoint(struct mu_sim *sim);
void mu_sim_client_demoted(struct mu_sim *sim, const char *worker); /* may say later that it is well: */
bool mu_sim_client_called_well(const struct mu_sim *sim, const char *worker);
void mu_sim_client_drain(struct mu_sim *sim, const char *worker);
void mu_sim_client_cancel(struct mu_sim *sim);
/* What a supervisor saw; told until it is answered. */
void mu_sim_client_exited(struct mu_sim *sim, const char *worker, struct mu_id incarnation);
void mu_sim_client_undrain_all(struct mu_sim *sim);
bool mu_sim_client_cancelled(const struct mu_sim *sim);

/* ---- worker_node.c ---- */

void mu_sim_worker_start(struct mu_sim *sim, uint32_t slot);
void mu_sim_worker_kill(struct mu_sim *sim, uint32_t slot, bool vanished);
void mu_sim_worker_restart_later(struct mu_sim *sim, uint32_t slot);
void mu_sim_worker_terminate(struct mu_sim *sim, uint32_t slot);
void mu_sim_worker_event(struct mu_sim *sim, uint32_t slot, struct mu_worker_event *event);
const char *mu_sim_worker_own_address(struct mu_sim *sim, uint32_t slot);
bool mu_sim_worker_alive(const struct mu_sim *sim, uint32_t slot);
/* From the engine to its agent, in order, after a moment. */
void mu_sim_worker_post(struct mu_sim *sim, uint32_t slot, const struct mu_worker_event *event);
void mu_sim_worker_fini(struct mu_sim *sim);
/* Slot and life behind a data-plane address; false when it is not one of ours. */
bool mu_sim_worker_address(const struct mu_sim *sim, const char *address, uint32_t *ret_slot, uint64_t *ret_life);

/* ---- engine.c, engine_prepare.c, engine_state.c ---- */

/* engine_feed.c. Giver: between two updates; when the vote is decided; at the end. Taker: what comes; it has parked. */
void mu_sim_engine_feed(struct mu_sim *sim, uint32_t slot, uint64_t generation, const struct mu_feed_order *order,
                        const struct mu_amendments *amendments);
void mu_sim_engine_amend(struct mu_sim *sim, uint32_t slot, const struct mu_amendments *amendments);
void mu_sim_feed_chunks(struct mu_sim *sim, uint32_t slot);
void mu_sim_feed_update(struct mu_sim *sim, uint32_t slot);
void mu_sim_feed_close(struct mu_sim *sim, uint32_t slot, bool whole);
void mu_sim_feed_frame(struct mu_sim *sim, uint32_t slot, const struct mu_sim_frame *frame);
void mu_sim_feed_parked(struct mu_sim *sim, uint32_t slot, bool whole);
bool mu_sim_feed_link_failed(struct mu_sim *sim, uint32_t slot, uint64_t link); /* true: it was a feed's */
void mu_sim_feed_assigned(struct mu_sim *sim, uint32_t slot, const struct mu_assign *assign);
void mu_sim_engine_reset(struct mu_sim *sim, uint32_t slot); /* frees everything it has: a process began or ended */
void mu_sim_engine_load(struct mu_sim *sim, uint32_t slot, const struct mu_job_spec *spec);
void mu_sim_engine_prepare(struct mu_sim *sim, uint32_t slot, uint64_t generation, const struct mu_assign *assign);
void mu_sim_engine_run(struct mu_sim *sim, uint32_t slot, uint64_t generation);
void mu_sim_engine_abort(struct mu_sim *sim, uint32_t slot, uint64_t generation);
void mu_sim_engine_snapshot(struct mu_sim *sim, uint32_t slot, uint64_t generation, const struct mu_snapshot *snapshot);
void mu_sim_engine_forget(struct mu_sim *sim, uint32_t slot);
void mu_sim_engine_frame(struct mu_sim *sim, uint32_t slot, struct mu_sim_event *event); /* payload: frame */
void mu_sim_engine_link_failed(struct mu_sim *sim, uint32_t slot, uint64_t link, enum mu_peer_failure failure);
/* Resets a connection of this engine, as seen at both ends. False when it has none. */
bool mu_sim_engine_reset_link(struct mu_sim *sim, uint32_t slot);
void mu_sim_engine_close_links(struct mu_sim *sim, uint32_t slot, struct mu_sim_link_end *links, uint32_t count,
                               bool prompt);
void mu_sim_engine_free_links(struct mu_sim_link_end *links, uint32_t count);
bool mu_sim_engine_waiting(const struct mu_sim_engine *engine);
bool mu_sim_engine_running(const struct mu_sim_engine *engine);
/* The engine goes on with its generation: called when something it may have waited for has come. */
void mu_sim_engine_pump(struct mu_sim *sim, uint32_t slot);
void mu_sim_engine_pump_prepare(struct mu_sim *sim, uint32_t slot);
void mu_sim_engine_keep_share(struct mu_sim *sim, uint32_t slot); /* at Go */
/* True when the frame belongs to preparing. */
bool mu_sim_engine_prepare_frame(struct mu_sim *sim, uint32_t slot, const struct mu_sim_frame *frame);
void mu_sim_engine_park(struct mu_sim *sim, uint32_t slot, enum mu_park_reason reason, uint32_t peer_rank,
                        enum mu_peer_failure failure, uint64_t bad_checkpoint, const char *text);
void mu_sim_engine_apply(struct mu_sim *sim, uint32_t slot, const struct mu_step_result *result);
void mu_sim_engine_write_piece(struct mu_sim *sim, uint32_t slot, const struct mu_snapshot *snapshot);
struct mu_sim_link_end *mu_sim_engine_link(struct mu_sim_engine *engine, uint32_t rank);
struct mu_sim_frame *mu_sim_frame_new(const struct mu_sim *sim, uint32_t slot, enum mu_sim_frame_kind kind,
                                      uint32_t root_count, bool with_state);
void mu_sim_engine_send(struct mu_sim *sim, uint32_t slot, struct mu_sim_link_end *end, struct mu_sim_frame *frame);

/* ---- shares.c ---- */

uint64_t mu_sim_share_chunks(const struct mu_sim *sim, const struct mu_layout *layout, uint32_t rank,
                             enum mu_share share);
/* What a rank of this layout holds, and what it updates. */
struct mu_sim_mask mu_sim_share_mask(const struct mu_sim *sim, const struct mu_layout *layout, uint32_t rank);
struct mu_sim_mask mu_sim_update_mask(const struct mu_sim *sim, const struct mu_layout *layout, uint32_t rank);
/* What `held` is of `step`: as it is, or after the pending update is rolled forward (when its result is known). */
struct mu_sim_mask mu_sim_held_mask(const struct mu_sim *sim, const struct mu_held *held, uint64_t step);
/* Copies of the tied embedding that belong to it: for nobody else. */
uint64_t mu_sim_held_copies(const struct mu_sim *sim, const struct mu_held *held, uint64_t step);
struct mu_sim_mask mu_sim_mask_or(struct mu_sim_mask a, struct mu_sim_mask b);
bool mu_sim_mask_covers(struct mu_sim_mask a, struct mu_sim_mask b); /* a has all of b */
bool mu_sim_mask_empty(struct mu_sim_mask a);
struct mu_sim_mask mu_sim_move_mask(const struct mu_move *move);
void mu_sim_state_take(struct mu_sim_state *to, const struct mu_sim_state *from, struct mu_sim_mask what);
bool mu_sim_has_nan(const struct mu_sim_values *values, struct mu_sim_mask in);
/* Newest step for which the added holders have everything, alone or together. */
struct mu_sim_union {
    const struct mu_held **held;
    uint32_t count, capacity;
};
void mu_sim_union_add(struct mu_sim_union *u, const struct mu_held *held);
bool mu_sim_union_newest(const struct mu_sim *sim, const struct mu_sim_union *u, uint64_t *ret_step);

/* ---- oracle.c ---- */

void mu_sim_oracle_init(struct mu_sim *sim);
void mu_sim_oracle_fini(struct mu_sim *sim);
/* Hash of the parameters of `chunks`, ascending, on top of `before`: of one stage on top of those before it. */
uint64_t mu_sim_hash_chunks(uint64_t before, const uint64_t *params, uint64_t chunks);
uint64_t mu_sim_hash_leaf(const struct mu_job_spec *spec, uint64_t model_hash, uint64_t step, uint32_t leaf);
uint64_t mu_sim_hash_pair(uint64_t left, uint64_t right);
struct mu_step_result mu_sim_step_result(uint64_t step, uint64_t gradient, uint64_t command);
void mu_sim_hash_initial(const struct mu_sim *sim, struct mu_sim_values *values);
void mu_sim_hash_apply(struct mu_sim_values *values, struct mu_sim_mask what, uint64_t gradient,
                       const struct mu_step_result *result, const struct mu_job_spec *spec);
void mu_sim_hash_weights(const uint64_t *params, uint8_t out[32]);
const struct mu_sim_values *mu_sim_oracle_values(struct mu_sim *sim, uint64_t step);
uint64_t mu_sim_oracle_gradient(struct mu_sim *sim, uint64_t step);

/* Invariants. Each is called where the fact arises. */
void mu_sim_oracle_holds(struct mu_sim *sim, uint32_t slot); /* after its held state has changed */
void mu_sim_oracle_reduced(struct mu_sim *sim, uint32_t slot, uint64_t step, uint64_t gradient);
/* What the generation of a worker decided of a step. NULL: not known (any more). */
const struct mu_step_result *mu_sim_oracle_decision(struct mu_sim *sim, uint32_t slot, uint64_t step);
void mu_sim_oracle_decided(struct mu_sim *sim, uint32_t slot, const struct mu_step_result *result);
void mu_sim_oracle_boundary(struct mu_sim *sim, uint32_t slot, uint64_t steps_done, const struct mu_boundary *boundary);
void mu_sim_oracle_tiles(struct mu_sim *sim, uint32_t slot, const struct mu_sim_root *roots, uint32_t count);
void mu_sim_oracle_planned(struct mu_sim *sim, const struct mu_plan_input *input, const struct mu_plan *plan);
void mu_sim_oracle_assigned(struct mu_sim *sim, uint64_t generation, const struct mu_assign *assign, uint32_t slot,
                            uint64_t life);
void mu_sim_oracle_prepare(struct mu_sim *sim, uint32_t slot, const struct mu_assign *assign);
void mu_sim_oracle_prepared(struct mu_sim *sim, uint32_t slot);
void mu_sim_oracle_runs(struct mu_sim *sim, uint32_t slot, bool runs);
void mu_sim_oracle_died(struct mu_sim *sim, uint32_t slot); /* before its session is forgotten */
/* Gives up what it holds, all but `kept` (NULL: everything), by its own will. Before it does. */
void mu_sim_oracle_drops(struct mu_sim *sim, uint32_t slot, const struct mu_held *kept, const char *why);
void mu_sim_oracle_makes_room(struct mu_sim *sim, uint32_t slot, uint64_t generation);
void mu_sim_oracle_durable(struct mu_sim *sim, const struct mu_record *record, const struct mu_record *before);
bool mu_sim_oracle_all_whole(struct mu_sim *sim); /* every checkpoint that is durably committed can be loaded */
void mu_sim_oracle_damaged(struct mu_sim *sim);   /* a fault has damaged a checkpoint */
/* The newest durably committed checkpoint, where an older one is sound; NULL: nothing to spoil. */
struct mu_sim_directory *mu_sim_oracle_to_poison(struct mu_sim *sim);
bool mu_sim_oracle_poisoned(const struct mu_sim *sim, uint32_t slot); /* what this worker holds is not finite */
void mu_sim_oracle_deleted(struct mu_sim *sim, const char *path);
void mu_sim_oracle_event(struct mu_sim *sim, const struct mu_event_record *event);
/* Around the step in which the coordinator hears of an exit: it takes away that process and no other one. */
struct mu_sim_present *mu_sim_oracle_before_exit(struct mu_sim *sim);
void mu_sim_oracle_after_exit(struct mu_sim *sim, struct mu_sim_present *before, const struct mu_process_exit *exit);
/* oracle_slow.c: what the coordinator says of slow workers, when it says it; a new one has read its records */
void mu_sim_slow_said(struct mu_sim *sim, const struct mu_coord_action *action);
void mu_sim_slow_restart(struct mu_sim *sim);
void mu_sim_oracle_views(struct mu_sim *sim);                         /* what the coordinator shows */
bool mu_sim_oracle_job_over(const struct mu_sim *sim);                /* durably */
bool mu_sim_oracle_lists(const struct mu_sim *sim, const char *path); /* as a committed checkpoint, durably */
uint64_t mu_sim_oracle_committed_step(const struct mu_sim *sim);      /* newest durable usable one; 0 = none */
void mu_sim_oracle_end(struct mu_sim *sim);                           /* liveness and the final hash */

/* ---- choose.c ---- */

void mu_sim_choose_init(const struct mu_sim *sim);

/* ---- faults.c ---- */

void mu_sim_faults_init(struct mu_sim *sim);
/* Somebody has come to a named place (slot -1: the coordinator). True: it is killed there, do nothing more. */
bool mu_sim_point(struct mu_sim *sim, int32_t slot, enum mu_sim_point point);
const char *mu_sim_fault_name(enum mu_sim_fault fault);
const char *mu_sim_point_name(enum mu_sim_point point);

#endif
