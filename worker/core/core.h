/* The worker's state machine: attach, prepare, run, vote, park, checkpoint pieces.
 *
 * Pure like the coordinator's: events in, actions out through a sink, no I/O, no clock, no allocation after `_new`. The
 * shell (worker/agent.c) holds one lock around it, because two threads speak to it: the agent (stream, timers, signals)
 * and the engine, which calls `mu_worker_vote` and `mu_worker_boundary` once a step.
 *
 *   phase     SPARE --Assign--> PREPARING --engine prepared--> PREPARED --Go--> RUNNING
 *               ^                  |Revoke, failure                |Revoke        |Revoke, peer failure, Park command,
 * last step |fenced            v                               v              v
 *               +---------------- PARKING --engine parked--> PARKED --Assign--> PREPARING
 *
 *   stream    DOWN --Connect--> OPENING --Hello/Welcome--> UP; any loss: DOWN, and again after a backoff (50 ms
 * doubling to 2 s, with jitter, but never more than half the time after which the coordinator declares it lost). The
 * phase does not care: a running worker keeps stepping without its coordinator.
 */
#ifndef MU_WORKER_CORE_H
#define MU_WORKER_CORE_H

#include "plan/session.h"

struct mu_worker_config {
    struct mu_hello hello; /* template: job, name, host, address, backend, pid, threads, memory, version */
    struct mu_id incarnation;
    uint64_t jitter_seed;
    uint32_t backoff_min_ms, backoff_max_ms; /* 50, 2000 */
    uint32_t give_up_ms;                     /* without a coordinator for so long: exit 3; 0 = never */
    uint32_t step_report_ms;                 /* merge step reports that come faster than this */
};

void mu_worker_config_init(struct mu_worker_config *config);

enum mu_worker_event_kind {
    MU_WE_START, /* first event */
    MU_WE_TICK,
    MU_WE_CONNECTED,    /* the stream of the last CONNECT is open */
    MU_WE_DISCONNECTED, /* it failed or broke: `text` says how */
    MU_WE_MESSAGE,
    MU_WE_JOB_LOADED, /* answer to LOAD_JOB */
    MU_WE_PREPARED,   /* answer to PREPARE; `parked.held` says what it holds now (state at start_step) */
    MU_WE_PARKED,     /* answer to ABORT, or by itself: preparing or an exchange failed, park decision, last step */
    MU_WE_STEP,       /* a step's timings */
    MU_WE_EVAL,
    MU_WE_PIECE,     /* a piece is written, or failed */
    MU_WE_PROGRESS,  /* the engine's progress counter, sampled by the shell before each TICK */
    MU_WE_KEPT,      /* an order to keep is done, or could not be */
    MU_WE_PROBED,    /* a measurement is done, or could not be */
    MU_WE_FED,       /* a feed that is taken has come further, or is over */
    MU_WE_TERMINATE, /* SIGTERM: leave in good order */
    MU_WE_BROKEN,    /* its device can be trusted no more: what it holds is worth nothing, it leaves at once */
};

struct mu_parked {
    uint64_t generation;
    struct mu_held held;
    enum mu_park_reason reason;
    uint32_t peer_rank;
    enum mu_peer_failure peer_failure;
    uint64_t bad_checkpoint;
    char text[MU_TEXT_SIZE];
    uint8_t weights_sha256[32]; /* MU_PARK_FINISHED */
    bool weights_unfinite;      /* likewise */
};

struct mu_worker_event {
    enum mu_worker_event_kind kind;
    uint64_t now_us;
    struct mu_id random; /* a new incarnation, when one is needed */
    union {
        const char *text; /* DISCONNECTED, TERMINATE, BROKEN */
        const struct mu_coord_message *message;
        struct {
            enum mu_status status;
            const char *text;
            struct mu_hash128 numeric_identity, data_hash;
            struct mu_identity_parts identity_parts;
            const char *files_address; /* kind local: where its files are given out; NULL: nowhere */
            const uint8_t *files_secret;
        } job_loaded;
        struct mu_parked parked; /* PREPARED, PARKED */
        struct mu_step_report step;
        struct mu_eval_report eval;
        struct mu_piece_report piece;
        struct mu_kept_report kept;
        struct mu_probe_report probed;
        struct {
            uint64_t number;
            enum mu_feed_state state;
            struct mu_held held; /* MU_FEED_WHOLE */
            char text[MU_TEXT_SIZE];
        } fed;
        struct {
            uint64_t counter;
            bool waiting;
        } progress;
    };
};

enum mu_worker_action_kind {
    MU_WA_CONNECT,    /* open a stream now (any old one is gone) */
    MU_WA_DISCONNECT, /* end the stream */
    MU_WA_SEND,
    MU_WA_LOAD_JOB, /* open the data, build the model, reserve memory, run the kernel battery; answer JOB_LOADED */
    MU_WA_PREPARE,  /* deep-copy the assignment; connect, move state; answer PREPARED or PARKED */
    MU_WA_RUN,      /* step from the boundary; the old generation's connections may go */
    MU_WA_ABORT,    /* stop what is in flight for this generation and answer PARKED (also when it is parked already) */
    MU_WA_SNAPSHOT, /* parked: take this snapshot now; answer PIECE */
    MU_WA_KEEP,     /* deep-copy the order; answer KEPT */
    MU_WA_FEED,     /* give or take a feed; a taker answers FED */
    MU_WA_PROBE,    /* deep-copy the order; measure and answer PROBED; any later action for the engine ends it */
    MU_WA_FORGET,   /* drop all state and connections (fenced); nothing is held afterwards; no answer */
    MU_WA_EXIT,     /* leave: exit code and one line */
};

struct mu_worker_action {
    enum mu_worker_action_kind kind;
    union {
        const struct mu_worker_message *message;
        struct {
            const struct mu_job_spec *spec;
            struct mu_id uid;
        } load;
        struct {
            uint64_t generation;
            const struct mu_assign *assign; /* PREPARE only */
        } generation;                       /* PREPARE, RUN, ABORT */
        struct {
            uint64_t generation;
            struct mu_snapshot snapshot;
        } snapshot;
        const struct mu_keep_order *keep;
        const struct mu_probe_order *probe;
        struct {
            uint64_t generation;
            const struct mu_feed_order *order;
        } feed;
        struct {
            int code; /* 0 ok, 1 failure, 3 cannot connect */
            const char *text;
        } exit;
    };
};

struct mu_worker_sink {
    void (*emit)(void *ctx, const struct mu_worker_action *action);
    void *ctx;
};

struct mu_worker;

struct mu_worker *mu_worker_new(const struct mu_worker_config *config);
void mu_worker_free(struct mu_worker *worker);
void mu_worker_step(struct mu_worker *worker, const struct mu_worker_event *event, const struct mu_worker_sink *sink);
uint64_t mu_worker_next_deadline(const struct mu_worker *worker);

/* Engine, when it contributes to the step reduction of `generation`: the newest command number received. */
uint64_t mu_worker_vote(const struct mu_worker *worker, uint64_t generation);

/* Engine, at the boundary after `steps_done` updates of `generation`, with the reduction's result: what to do before
 * the next step. The decision is a function of (result.command, commands received up to that number, steps_done): the
 * same on every rank. A park decision is not yet PARKED: the engine parks, then posts MU_WE_PARKED with reason
 * MU_PARK_COMMAND. */
struct mu_boundary {
    bool take_snapshot, park;
    struct mu_snapshot snapshot;
};
struct mu_boundary mu_worker_boundary(struct mu_worker *worker, uint64_t now_us, uint64_t generation,
                                      uint64_t steps_done, const struct mu_step_result *result);

/* What it is and holds, for the shell's display and the simulator's invariants. */
const struct mu_worker_status *mu_worker_status(const struct mu_worker *worker);
struct mu_id mu_worker_incarnation(const struct mu_worker *worker);
bool mu_worker_connected(const struct mu_worker *worker);
const char *mu_worker_name(const struct mu_worker *worker);

#endif
