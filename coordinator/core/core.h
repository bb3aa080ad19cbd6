/* The coordinator's state machine: membership, generations, commands, checkpoints, leases.
 *
 * Pure: `mu_coord_step(core, event, sink)` is the only way in and the sink the only way out. No I/O, no clock (every
 * event carries the time), no globals, no threads; no allocation after `mu_coord_new`, but for the moves of a
 * generation that is being prepared (how many there are follows from its plan; without memory the job waits), the
 * lists of hosts that hold a checkpoint of kind local (without memory it is not ordered), and what a probe finds
 * (without memory there is none). The shell
 * (coordinator/driver.c) and the simulator (tests/sim) run the same code.
 *
 * **Output commit.** The core changes its memory at once and emits PERSIST actions for what must survive. The shell
 * releases every SEND, CLOSE, REPLY, EVENT, PUBLISH and DELETE only after all PERSISTs emitted before it are durable,
 * in order. PLAN runs at once. So nobody ever hears of anything that a crash could undo, and a crash loses only what
 * nobody has heard of.
 *
 * Life of a job (phases; every arrow is one function in job.c):
 *
 *      WAITING --enough workers--> PLANNING --planned--> PREPARING --all prepared--> STEPPING
 *         ^                           ^                     | failure                  | failure: Revoke
 *         |too few                    |all parked or lost   v                          | change:  Park command
 *         +---------------------------+----------------- PARKING <---------------------+
 *                                                           |all finished
 *                                                           v
 *                                                      FINALIZING --last checkpoint committed--> OVER
 */
#ifndef MU_COORDINATOR_CORE_H
#define MU_COORDINATOR_CORE_H

#include <string.h>

#include "common/histogram.h"
#include "common/reason.h"
#include "coordinator/core/goodput.h"
#include "coordinator/core/prediction.h"
#include "plan/node_order.h"
#include "plan/plan.h"
#include "plan/session.h"

enum {
    MU_EVENT_TEXT_SIZE = 320,
    MU_CHECKPOINTS_MAX = 128, /* per job, known at one time */
    MU_BAD_LINKS_MAX = 64,    /* per job */
    MU_TIMINGS_KEPT = 64,     /* step reports kept per worker for GetTimings */
    MU_PIECES_MAX = 4096,     /* per checkpoint */
    MU_SUSPECT_STEPS = 16,    /* after a load: what begins to be not finite within so many is the checkpoint's fault, */
    MU_SUSPECT_REPORTS = 5,   /* when so many reports in a row say so (one such step is skipped by all and harmless) */
    MU_SUSPECT_UNPREPARED =
        3,                 /* so many generations that could not be prepared from a checkpoint, with all peers there */
    MU_HUNG_KEPT = 16,     /* per job: workers that were declared lost because they hang */
    MU_DEMOTED_KEPT = 64,  /* per job: workers whose places spares have taken, because they are slow */
    MU_REFUSALS_KEPT = 16, /* per job: what was told of workers that were refused */
    MU_DEATHS_KEPT = 4096, /* over all jobs, for the crash budgets */
    MU_REQUESTS_KEPT = 4096,        /* changes that were made, for those who ask again because the answer was lost */
    MU_CHECKPOINT_ATTEMPTS_MAX = 3, /* a checkpoint that is given up is ordered again at once until so many were */
};

struct mu_coord_config {
    uint32_t max_jobs, max_workers;
    uint32_t max_members; /* per job */
    uint32_t heartbeat_ms, suspect_ms, lost_ms;
    uint32_t reattach_grace_ms; /* a reset stream without a second witness may come back for so long */
    uint32_t settle_ms;    /* after a change in the set of workers, wait for so long for further ones before planning */
    uint32_t rebalance_ms; /* STEPPING: whether other stages would suit the workers' speeds is looked at so often (other
                              leaf counts: see speeds.c); 0: never */
    uint32_t prepare_limit_ms;             /* without progress while preparing */
    uint32_t hang_floor_ms;                /* a running worker that makes no progress for max(this, 20 steps) hangs */
    uint32_t link_retry_ms;                /* a bad link is tried again after so long */
    uint32_t scrub_again_s;                /* a verified checkpoint is read again after so long */
    uint32_t crash_limit, crash_window_ms; /* more deaths than this within the window: quarantine */
    const struct mu_node_map *nodes;   /* by the hosts' names: who is new gets ranks by it, and buddies another switch;
                                          NULL: not known; must stay */
    const struct mu_cost_rates *rates; /* of a worker, as muster probe measured them; NULL: default ones; must stay */
    const struct mu_cost_rates *rates_bf16; /* likewise, of one whose job is in bf16 */
};

void mu_coord_config_init(struct mu_coord_config *config);
/* Bad combinations (suspect <= heartbeat, lost <= suspect, ...) give one line naming the flag. */
enum mu_status mu_coord_config_check(const struct mu_coord_config *config, struct mu_error *err) MU_WARN_UNUSED;

/* ---- records: what survives ---- */

enum mu_job_state {
    MU_JOB_PENDING,
    MU_JOB_RUNNING,
    MU_JOB_FINISHED,
    MU_JOB_FAILED,
    MU_JOB_CANCELLED,
    MU_JOB_STATE_COUNT
};

struct mu_command_record {
    uint64_t number;
    enum mu_command_kind kind;
    uint64_t not_before_step;
    bool open; /* issued, not known to be executed by all; only for MU_COMMAND_PARK, a checkpoint's is in its own record
                */
};

struct mu_job_record {
    struct mu_id uid;
    uint64_t revision; /* number of the event that told its newest change by an operator, or its end */
    struct mu_job_spec spec;
    struct mu_worker_policy submitted_workers; /* spec.workers before anybody scaled it */
    enum mu_job_state state;
    uint64_t generation;      /* newest ever used */
    uint64_t next_checkpoint; /* sequence number of the next one */
    bool checkpoint_seen;     /* one was committed at some time: never start from the seed again */
    struct mu_command_record command;
    uint64_t steps_done; /* as of the last generation or checkpoint record */
    uint64_t created_wall_us, ended_wall_us;
    uint8_t weights_sha256[32]; /* MU_JOB_FINISHED */
    bool identity_set;          /* numeric identity and data hash are those of the first worker, then binding */
    struct mu_hash128 numeric_identity, data_hash;
    struct mu_identity_parts identity_parts; /* of numeric_identity, so that a refusal can name the kernel */
    char text[MU_TEXT_SIZE];                 /* why it failed or was cancelled */
    struct mu_stage_costs costs;             /* what its workers measured */
    bool preflight;                          /* its workers are measured before it begins */
    struct {
        char job[MU_JOB_NAME_SIZE]; /* empty: it began by itself */
        struct mu_id uid;
        uint64_t checkpoint, step;
        bool rebased; /* it left the origin's numeric identity there: its first worker's binds it */
        struct mu_hash128 rebased_from;
        char rebased_by[MU_TEXT_SIZE];
    } origin; /* where it was branched from */
};

struct mu_member_record {
    char name[MU_WORKER_NAME_SIZE];
    struct mu_id incarnation;
    char address[MU_ADDRESS_SIZE];
    uint32_t leaf_count;
    uint64_t layer_ns; /* measured time of a leaf in one layer before this generation; 0: not known */
};

/* Moves are not recorded: they matter only until Go, and a generation without Go is not resumed after a restart. Its
 * members park (they keep what they have received) and the next one is planned from what they hold. */
struct mu_generation_record {
    struct mu_id job_uid;
    char job[MU_JOB_NAME_SIZE];
    uint64_t generation;
    bool go; /* false: assigned, nobody may step yet */
    bool equal_leaves;
    uint64_t start_step, command_base;
    uint8_t secret[32];
    struct mu_layout layout; /* dp = 0: recorded before there were layouts: tp = pp = 1, dp = world, replicated */
    uint32_t world;
    const struct mu_member_record *members; /* [world], by rank */
};

enum mu_checkpoint_state {
    MU_CKPT_INTENT,
    MU_CKPT_COMMITTED,
    MU_CKPT_DELETING,
    MU_CKPT_BAD,
    MU_CKPT_VOID, /* of what was undone when the job was rolled back: deleted when it steps again */
    MU_CKPT_STATE_COUNT
};

struct mu_piece_record {
    struct mu_id writer; /* incarnation */
    char writer_name[MU_WORKER_NAME_SIZE];
    bool done;
    bool reassigned; /* its writer was lost: ordered of another one by Snapshot, whatever the record's `command` says */
    uint64_t size_bytes;
    struct mu_hash128 checksum;
    char file[MU_PIECE_FILE_SIZE];
};

static inline struct mu_written_piece mu_written_piece(const struct mu_piece_record *piece)
{
    struct mu_written_piece written = {.size_bytes = piece->size_bytes, .checksum = piece->checksum};
    memcpy(written.file, piece->file, sizeof written.file);
    return written;
}

/* A host that has a part of a checkpoint of kind local. Only its name is recorded. */
struct mu_holder_record {
    char host[MU_WORKER_NAME_SIZE];
    uint64_t host_id;
    bool missing;    /* its disk does not have it: a worker said so when it attached */
    uint32_t keeper; /* slot of the worker there that was found last; UINT32_MAX: none was */
    /* of the order that is out */
    uint32_t asked; /* slot of the worker that has it; UINT32_MAX: the host has none */
    bool done;
    uint64_t size_bytes;
};

struct mu_checkpoint_record {
    struct mu_id job_uid;
    char job[MU_JOB_NAME_SIZE];
    uint64_t number; /* sequence number */
    struct mu_id nonce;
    uint64_t step;       /* boundary; 0 until the first piece tells it */
    uint64_t generation; /* in which it was ordered */
    uint64_t command;    /* number of the command that orders it; 0: by Snapshot, to parked workers */
    uint64_t not_before_step;
    enum mu_checkpoint_state state;
    uint64_t ordered_wall_us; /* 0: not known */
    uint64_t wall_us;         /* committed at */
    bool verified;            /* COMMITTED: every byte was read and found right since it was written */
    uint64_t size_bytes;
    char dir[MU_PATH_SIZE]; /* <path>/<seq>-<step as ordered>-<nonce>, final, chosen at the intent; the manifest has the
                               exact step */
    char text[MU_TEXT_SIZE]; /* why it is BAD */
    char
        owner[MU_JOB_NAME_SIZE]; /* borrowed: the job whose checkpoint it is, and who alone may delete it; empty: own */
    uint32_t attempt;            /* INTENT: how many were given up and ordered again before it */
    uint32_t unprepared;         /* generations that could not be prepared from it, through no peer's fault */
    uint64_t failed_generation;  /* the last of them */
    struct mu_layout layout;     /* INTENT: of its pieces; else zero: what is committed fits any layout. dp = 0 in an
                                    intent: recorded before there were layouts: tp = pp = 1, dp = piece_count */
    uint32_t piece_count;        /* INTENT: mu_layout_working(&layout) */
    const struct mu_piece_record *pieces;
    uint32_t holder_count; /* kind local: hosts in the order of their ring */
    struct mu_holder_record *holders;
};

struct mu_worker_record {
    char name[MU_WORKER_NAME_SIZE];
    bool quarantined, draining;
    char reason[MU_TEXT_SIZE];
    char host[MU_WORKER_NAME_SIZE]; /* where it was last; may be empty */
    uint64_t revision;              /* number of the event that told it */
};

/* What an operator has ordered of a host, for all workers that are or will be on it. */
enum mu_node_order { MU_NODE_CORDON, MU_NODE_DRAIN, MU_NODE_RESUME, MU_NODE_ORDER_COUNT };

struct mu_node_record {
    char name[MU_WORKER_NAME_SIZE]; /* as its workers tell it: Hello.host */
    enum mu_node_order order;       /* CORDON or DRAIN */
    char reason[MU_TEXT_SIZE], by[MU_TEXT_SIZE];
    uint64_t since_wall_us, deadline_wall_us; /* DRAIN: 0: none */
    uint64_t revision;                        /* number of the event that told it */
};

/* What was counted and measured of a job, where a decision rests on it or people are shown it. Written with the records
 * that a change comes with; a restarted coordinator goes on from it. */
struct mu_tally_record {
    struct mu_id job_uid;
    char job[MU_JOB_NAME_SIZE];
    uint64_t workers_lost, generations, replayed_steps;
    uint64_t replay_until;          /* steps up to this were done before */
    uint64_t suspect, suspect_step; /* the checkpoint that the state was loaded from not long ago; 0: none */
    uint32_t unfinite_reports;
    uint64_t judged_step; /* they are of steps up to this one */
    uint64_t condemned;   /* generations up to this one are of a checkpoint that was found bad; see suspect.c */
    struct {
        uint64_t steps, told_steps, base, worker_us;
        double cost_s, write_s, failure_s, stall_s, slow_s, step_s;
        char reason[MU_TEXT_SIZE];
    } interval;                      /* see interval.c */
    uint64_t prediction_told;        /* see struct prediction */
    uint32_t hung_count;             /* ever */
    struct mu_id hung[MU_HUNG_KEPT]; /* the newest of them, by number modulo */
    uint32_t demoted_count;
    struct mu_id demoted[MU_DEMOTED_KEPT]; /* see speeds.c; the oldest first */
};

/* One loss of a worker, for the crash budget of its name. Times are of the wall clock: no other one outlives the
 * process. It decides about nothing but quarantine, and a clock that was set back makes deaths older than it count as
 * of now. */
struct mu_death_record {
    uint64_t number; /* 0, 1, ... over all jobs; the key is this modulo MU_DEATHS_KEPT */
    uint64_t name_hash, wall_us;
    struct mu_id incarnation; /* who is found missing again after a restart dies only once */
};

/* A change that was made, and its answer: whoever sends the request again gets that answer and makes no second change.
 */
struct mu_request_record {
    uint64_t number;        /* 0, 1, ...; the key is this modulo MU_REQUESTS_KEPT */
    struct mu_id id;        /* as the client drew it */
    struct mu_hash128 body; /* of everything that was asked */
    struct mu_id job_uid;   /* SUBMIT, SCALE, AMEND, BRANCH */
    uint64_t checkpoint;    /* CHECKPOINT */
    bool existed;           /* SUBMIT */
};

/* Where the time of one worker of a job went: see goodput.h. Written every few seconds, so that a restart loses nothing
 * of it. The account without a worker's name sums up those that left when the table was full. */
struct mu_account_record {
    struct mu_id job_uid;
    char job[MU_JOB_NAME_SIZE];
    char worker[MU_WORKER_NAME_SIZE];
    bool open; /* it goes on, in class `now` */
    enum mu_time_class now;
    uint64_t began_wall_us;    /* first attached */
    uint64_t wall_us, mono_us; /* up to when `us` says it, by both clocks: the wall clock may jump */
    uint64_t us[MU_TIME_CLASS_COUNT];
};

enum mu_event_severity { MU_EVENT_INFO, MU_EVENT_WARNING, MU_EVENT_ERROR };

struct mu_event_record {
    uint64_t number; /* 1, 2, 3, ... over all jobs, never reused */
    uint64_t wall_us;
    enum mu_event_severity severity;
    char kind[32]; /* stable word: "worker_lost", "generation_go", "checkpoint_committed", ... */
    char job[MU_JOB_NAME_SIZE];
    char worker[MU_WORKER_NAME_SIZE];
    uint64_t generation, step;
    char text[MU_EVENT_TEXT_SIZE]; /* one plain line for people: what was observed and what was concluded */
};

enum mu_record_kind {
    MU_RECORD_JOB,
    MU_RECORD_GENERATION,
    MU_RECORD_CHECKPOINT,
    MU_RECORD_WORKER,
    MU_RECORD_TALLY,
    MU_RECORD_DEATH,
    MU_RECORD_NODE,
    MU_RECORD_REQUEST,
    MU_RECORD_ACCOUNT,
    MU_RECORD_EVENT,
    MU_RECORD_KIND_COUNT
};

/* Keys: JOB, GENERATION, TALLY by job name; DEATH, REQUEST by number modulo MU_DEATHS_KEPT, MU_REQUESTS_KEPT;
 * CHECKPOINT by (job name, number); WORKER, NODE by name; ACCOUNT by (job name, worker name); EVENT by number. A put
 * replaces. */
struct mu_record {
    enum mu_record_kind kind;
    union {
        const struct mu_job_record *job;
        const struct mu_generation_record *generation;
        const struct mu_checkpoint_record *checkpoint;
        const struct mu_worker_record *worker;
        const struct mu_tally_record *tally;
        const struct mu_death_record *death;
        const struct mu_node_record *node;
        const struct mu_request_record *request;
        const struct mu_account_record *account;
        const struct mu_event_record *event;
    };
};

/* ---- events: what comes in ---- */

enum mu_stream_end {
    MU_STREAM_RESET,     /* by the peer, or its connection is gone */
    MU_STREAM_MALFORMED, /* it brought what is not allowed */
    MU_STREAM_SLOW,      /* it took nothing */
    MU_STREAM_EXIT,      /* its supervisor says that the process has ended */
    MU_STREAM_END_COUNT
};

enum mu_coord_event_kind {
    MU_CE_TICK,    /* next_deadline has come. Leases are judged only here: give it after the queue of waiting events is
                      empty */
    MU_CE_MESSAGE, /* from a worker's stream; the first one of a session must be Hello */
    MU_CE_DISCONNECTED, /* a stream is gone; its session number is never used again */
    MU_CE_PLANNED,
    MU_CE_PUBLISHED, /* the manifest of a checkpoint is on disk and verified, or not */
    MU_CE_DELETED,   /* the directory of a DELETING, BAD or aborted checkpoint is gone, or not */
    MU_CE_SCRUBBED,  /* a committed checkpoint was re-read: MU_OK, MU_ERR_CORRUPT, or not possible to say */
    MU_CE_SUBMIT,
    MU_CE_CANCEL,
    MU_CE_DRAIN,
    MU_CE_UNDRAIN, /* lifts drain and quarantine of a worker name */
    MU_CE_CHECKPOINT,
    MU_CE_SCALE,
    MU_CE_AMEND,
    MU_CE_BRANCH, /* a new job from a checkpoint of another one */
    MU_CE_NODE,   /* an operator's order about a host */
    MU_CE_PROBE,  /* workers that have nothing to do are to be measured */
    MU_CE_EXITED, /* a supervisor tells how a process of a worker ended */
};

/* Strings are valid during the step. */
struct mu_process_exit {
    const char *job, *worker, *host;
    struct mu_id incarnation; /* its newest one; zero: it ended before it had any */
    uint64_t pid;
    uint32_t signal, code; /* ended by that signal, or (0) exited with that code */
    bool again;            /* told before: only whether the name may be started now is asked */
    const char *text;      /* for people: "was killed by signal 9 (SIGKILL)", "exited with code 1" */
};

enum mu_exit_verdict {
    MU_EXIT_START_AGAIN, /* after after_ms */
    MU_EXIT_ASK_AGAIN,   /* drained or quarantined: not now */
    MU_EXIT_STAY_AWAY,   /* there is nothing more to do for it */
    MU_EXIT_VERDICT_COUNT
};

/* A request that is to be carried out once, however often it comes. */
struct mu_coord_once {
    struct mu_id id;        /* zero: it has none, and each time counts */
    struct mu_hash128 body; /* of what is asked for */
};

#define MU_REVISION_NONE UINT64_MAX
struct mu_coord_event {
    enum mu_coord_event_kind kind;
    uint64_t now_us;           /* monotonic */
    uint64_t wall_us;          /* display only */
    struct mu_id random;       /* fresh randomness, for identities and nonces */
    struct mu_coord_once once; /* SUBMIT to CHECKPOINT */
    /* Refused if the job, worker or node has another one; 0: any. DRAIN, UNDRAIN, NODE: MU_REVISION_NONE: nothing is
     * ordered of it. */
    uint64_t expected_revision;
    union {
        struct {
            uint64_t session; /* > 0 */
            const struct mu_worker_message *message;
        } message;
        struct {
            uint64_t session;
            const char *reason; /* "stream reset", "closed by peer", ... */
            enum mu_stream_end end;
        } disconnected;
        struct {
            uint64_t ticket;
            const struct mu_plan *plan; /* what the core keeps of it, it copies */
            const uint8_t *secret;      /* 32 random bytes */
        } planned;
        struct {
            char job[MU_JOB_NAME_SIZE];
            uint64_t checkpoint;
            enum mu_status status; /* PUBLISHED of a probe: MU_ERR_NOT_FOUND when there is no valid manifest */
            uint64_t step;         /* PUBLISHED: as in the manifest */
            uint64_t size_bytes;
            const char *text;
        } checkpoint_io; /* PUBLISHED, DELETED, SCRUBBED */
        struct {
            uint64_t cookie; /* comes back in REPLY */
            const struct mu_job_spec *spec;
            bool preflight; /* its workers are measured before it begins */
        } submit;
        struct {
            uint64_t cookie;
            const char *job;    /* CANCEL, CHECKPOINT, SCALE, AMEND; BRANCH: the origin */
            const char *worker; /* DRAIN, UNDRAIN */
            const char *reason;
            struct mu_worker_policy workers;      /* SCALE: min, max: 0: as it is; spares: UINT32_MAX: as it is */
            const struct mu_amendment *amendment; /* AMEND; BRANCH: NULL: none */
            const char *new_job, *path;           /* BRANCH: its name, and where its checkpoints go; empty: as before */
            uint64_t checkpoint;                  /* BRANCH: from which */
            bool rebase;                          /* BRANCH: under the numeric identity of its first worker */
            enum mu_compute compute;              /* BRANCH, with rebase: in what it computes; 0: as the origin */
            const char *node;                     /* NODE */
            const char *by;                       /* NODE, AMEND, BRANCH: who orders it */
            enum mu_node_order order;
            uint64_t deadline_us; /* NODE, DRAIN: from now; 0: none */
        } request;
        struct {
            uint64_t cookie;
            const char *job; /* empty: of all jobs */
            bool quick;
            uint64_t storage_bytes; /* of each worker; 0: not measured */
            const uint8_t *secret;  /* 32 random bytes */
        } probe;
        struct {
            uint64_t cookie;
            struct mu_process_exit exit;
        } exited;
    };
};

/* ---- actions: what goes out ---- */

struct mu_coord_reply {
    uint64_t cookie;
    enum mu_status status;
    enum mu_reason reason;
    uint64_t reason_value;        /* what mu_reason_value_name says */
    const char *text;             /* error line, or NULL */
    uint64_t checkpoint;          /* CHECKPOINT: the sequence number ordered; else 0 */
    bool existed;                 /* SUBMIT: the same job was there already */
    enum mu_exit_verdict verdict; /* EXITED; `text` says why the name is not started again */
    uint32_t after_ms;
    uint64_t probe; /* PROBE: its number, and of how many workers */
    uint32_t probed_workers;
    struct mu_id job_uid; /* SUBMIT, SCALE, AMEND, BRANCH */
};

enum mu_coord_action_kind {
    MU_CA_SEND,
    MU_CA_CLOSE, /* end the stream after what was sent before */
    MU_CA_PERSIST,
    MU_CA_FORGET, /* delete the record with that key (other fields are not set) */
    MU_CA_PLAN,
    MU_CA_PUBLISH,
    MU_CA_DELETE,
    MU_CA_SCRUB, /* one at a time over all jobs, until its SCRUBBED */
    MU_CA_EVENT, /* give to watchers; its PERSIST was emitted just before */
    MU_CA_REPLY,
    MU_CA_EXAMINE, /* for people: a member is given up; what do all members remember? Nothing waits for it */
};

/* Every pointer is valid only until the sink returns. */
struct mu_coord_action {
    enum mu_coord_action_kind kind;
    union {
        struct {
            uint64_t session;
            const struct mu_coord_message *message;
        } send;
        struct {
            uint64_t session;
        } close;
        struct mu_record record; /* PERSIST, FORGET */
        struct {
            uint64_t ticket;
            const struct mu_plan_input *input;
        } plan;
        struct {
            const struct mu_job_record *job;
            const struct mu_checkpoint_record *checkpoint;
            bool probe;  /* PUBLISH after a restart: pieces are unknown; answer OK only if a valid manifest is there
                            already */
        } checkpoint_io; /* PUBLISH: prove tiling, verify files, write the manifest (idempotent); DELETE: remove the
                            directory; SCRUB: re-read every byte, slowly, behind everything else */
        const struct mu_event_record *event;
        struct mu_coord_reply reply;
        struct {
            const struct mu_job_record *job;
            const char *worker;
            uint64_t step;
        } examine;
    };
};

struct mu_coord_sink {
    void (*emit)(void *ctx, const struct mu_coord_action *action);
    void *ctx;
};

struct mu_coord;

struct mu_coord *mu_coord_new(const struct mu_coord_config *config);
void mu_coord_free(struct mu_coord *coord);

/* Before the first event: give the records back, jobs first, then the rest in any order (of events the last one is
 * enough), then start. MU_ERR_CORRUPT when they contradict each other, MU_ERR_LIMIT when they do not fit the
 * configuration. */
enum mu_status mu_coord_restore(struct mu_coord *coord, const struct mu_record *record,
                                struct mu_error *err) MU_WARN_UNUSED;
void mu_coord_start(struct mu_coord *coord, uint64_t now_us, uint64_t wall_us, const struct mu_coord_sink *sink);

void mu_coord_step(struct mu_coord *coord, const struct mu_coord_event *event, const struct mu_coord_sink *sink);

/* When a TICK is wanted (monotonic us); UINT64_MAX: never. */
uint64_t mu_coord_next_deadline(const struct mu_coord *coord);

/* ---- views for reading (copies; between steps) ---- */

enum mu_job_phase {
    MU_JP_WAITING,
    MU_JP_PLANNING,
    MU_JP_PREPARING,
    MU_JP_STEPPING,
    MU_JP_PARKING,
    MU_JP_FINALIZING,
    MU_JP_OVER,
    MU_JP_COUNT
};

struct mu_job_view {
    struct mu_job_record record;
    enum mu_job_phase phase;
    uint64_t generation; /* current; 0 while waiting */
    uint32_t world, attached, spares;
    struct mu_layout layout;         /* valid when world > 0 */
    char waiting_text[MU_TEXT_SIZE]; /* MU_JP_WAITING: for what; may be empty */
    uint64_t steps_done;
    struct mu_step_result result; /* of the newest reported step */
    bool has_result;
    double tokens_per_second; /* over the last reports */
    uint64_t last_checkpoint, last_checkpoint_step, last_checkpoint_wall_us;
    uint64_t checkpoint_every; /* chosen where the job leaves it to the coordinator; 0: not (yet) */
    uint64_t checkpoint_steps; /* between two, chosen or as the job says; 0: none by policy, or not known yet */
    double checkpoint_stall_s, checkpoint_write_s, checkpoint_failure_s;
    char checkpoint_every_reason[MU_TEXT_SIZE];
    uint64_t eval_step;
    double eval_loss; /* valid when eval_step > 0 */
    uint64_t workers_lost, generations, replayed_steps;
    uint32_t checkpoint_failures, unfinite_reports; /* in a row */
    uint32_t bad_links;                             /* pairs of workers that are kept apart */
    double seconds_per_step;
};

enum mu_worker_state {
    MU_WS_ATTACHING,
    MU_WS_SPARE,
    MU_WS_MEMBER,
    MU_WS_SUSPECT,
    MU_WS_DRAINING,
    MU_WS_LOST,
    MU_WS_STATE_COUNT
};

struct mu_worker_view {
    char name[MU_WORKER_NAME_SIZE], host[MU_WORKER_NAME_SIZE], job[MU_JOB_NAME_SIZE], address[MU_ADDRESS_SIZE],
        backend[16];
    struct mu_id incarnation;
    enum mu_worker_state state;
    enum mu_worker_phase phase;
    uint64_t generation, pid, memory_bytes, session;
    uint32_t rank, leaf_count, threads;
    bool idle;               /* a rank that only gives its state away */
    bool has_coords;         /* a working rank */
    struct mu_coords coords; /* when has_coords */
    uint64_t step, age_us;   /* since its last sign of life */
    double seconds_per_leaf;
    char reason[MU_TEXT_SIZE];
    uint64_t revision; /* of what is remembered of its name; 0: nothing */
};

struct mu_timing_view {
    char worker[MU_WORKER_NAME_SIZE];
    uint64_t generation;
    uint32_t rank;
    struct mu_step_report report;
};

/* Where the time of steps went, by what members told since the coordinator's start: every step of every member counts
 * once, with the mean of the report that it came in. */
enum { MU_STEP_PHASES = 7 };
struct mu_step_phases {
    struct mu_histogram of[MU_STEP_PHASES]; /* data, forward, backward, communicate, wait, optimizer, snapshot */
    uint64_t wall_us;                       /* when the newest step was told; 0: none since the start */
};
/* Of job `index`, as mu_coord_job_view counts them; NULL: there is none. Valid until the next event. */
const struct mu_step_phases *mu_coord_step_phases(const struct mu_coord *coord, uint32_t index);

uint32_t mu_coord_job_count(const struct mu_coord *coord);
bool mu_coord_job_view(const struct mu_coord *coord, uint32_t index, struct mu_job_view *ret); /* ascending by name */
bool mu_coord_job_find(const struct mu_coord *coord, const char *name, struct mu_job_view *ret);
uint32_t mu_coord_worker_slots(const struct mu_coord *coord);
bool mu_coord_worker_view(const struct mu_coord *coord, uint32_t slot,
                          struct mu_worker_view *ret); /* false: slot is empty */
/* Checkpoints of a job, ascending by number; index 0..; pieces are not filled. */
bool mu_coord_checkpoint_view(const struct mu_coord *coord, const char *job, uint32_t index,
                              struct mu_checkpoint_record *ret);
/* Jobs that have borrowed this one of another's. */
uint32_t mu_coord_borrowers(const struct mu_coord *coord, const struct mu_checkpoint_record *checkpoint);
/* Newest first for one worker slot. */
bool mu_coord_timing_view(const struct mu_coord *coord, uint32_t slot, uint32_t back, struct mu_timing_view *ret);
/* Orders about nodes, and what is remembered of workers' names, in no order; false: there is none of that index. */
bool mu_coord_node_view(const struct mu_coord *coord, uint32_t index, struct mu_node_record *ret);
bool mu_coord_worker_record_view(const struct mu_coord *coord, uint32_t index, struct mu_worker_record *ret);
/* False: there is no such job, or it has made no prediction in its newest generation yet. */
bool mu_coord_prediction_view(const struct mu_coord *coord, const char *job, struct mu_prediction *ret);
/* Accounts of all jobs, as of now; false: the slot is empty. */
uint32_t mu_coord_account_slots(const struct mu_coord *coord);
bool mu_coord_account_view(const struct mu_coord *coord, uint32_t slot, uint64_t now_us, struct mu_account_record *ret);
/* The newest probe, if that is its number (0: whichever); what it points to is valid until the next event. */
struct mu_probe_view {
    uint64_t number;
    bool is_over;
    uint32_t step, steps; /* the first one is 1 */
    struct mu_probe_result result;
    const struct mu_probe_finding *findings; /* when it is over */
    uint32_t finding_count;
};
bool mu_coord_probe_view(const struct mu_coord *coord, uint64_t number, struct mu_probe_view *ret);
uint64_t mu_coord_last_event(const struct mu_coord *coord);
/* Where the state of a generation's start came from. */
enum mu_start_source { MU_START_HOLDERS, MU_START_MIRRORS, MU_START_CHECKPOINT, MU_START_SEED, MU_START_COUNT };
/* What was refused of stale workers. */
enum mu_fence {
    MU_FENCE_LOST,       /* Hello of one that was declared lost, with what it held */
    MU_FENCE_STREAM,     /* on a stream that was refused or never said Hello */
    MU_FENCE_GENERATION, /* of a generation that is over */
    MU_FENCE_COUNT
};
enum { MU_REJECT_REASONS = MU_REJECT_INVALID + 1 };
struct mu_coord_counters { /* since the start */
    uint64_t fenced_messages[MU_FENCE_COUNT], refused_hellos[MU_REJECT_REASONS], stream_losses[MU_STREAM_END_COUNT];
    uint64_t forgiven_us;
    uint64_t recoveries[MU_START_COUNT], recovery_us[MU_START_COUNT]; /* from the first loss noticed until Go */
    uint32_t quarantined;                                             /* worker names now */
};
struct mu_coord_counters mu_coord_counters(const struct mu_coord *coord);

#endif
