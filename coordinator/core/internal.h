/* What the files of the coordinator's core share. Nothing here is visible outside coordinator/core. */
#ifndef MU_COORDINATOR_CORE_INTERNAL_H
#define MU_COORDINATOR_CORE_INTERNAL_H

#include "common/mutant.h"
#include "coordinator/core/core.h"
#include "plan/cost.h"

enum { NONE = UINT32_MAX, WORKER_RECORDS_MAX = 4096, NODES_MAX = 4096, FAULTS_KEPT = 16 };

/* Open-addressing map u64 -> u32 with a fixed capacity; key 0 is never used. */
struct map {
    uint64_t *keys;
    uint32_t *values;
    uint64_t mask;
};
bool map_init(struct map *map, uint32_t entries);
void map_fini(struct map *map);
uint32_t map_get(const struct map *map, uint64_t key); /* NONE: absent */
void map_put(struct map *map, uint64_t key, uint32_t value);
void map_remove(struct map *map, uint64_t key);

/* How long a worker computed on a leaf in some stage. */
struct stage_time {
    uint32_t tp, layers;
    bool embedding, head;
    double seconds; /* 0: it was not measured */
};

/* A step report as it is kept; the worker's name is known. */
struct timing {
    uint64_t generation;
    uint32_t rank;
    struct mu_step_report report;
};

struct worker {
    bool used;
    char name[MU_WORKER_NAME_SIZE], host[MU_WORKER_NAME_SIZE], address[MU_ADDRESS_SIZE], backend[16];
    char files_address[MU_ADDRESS_SIZE]; /* empty: it gives out no files */
    uint8_t files_secret[32];
    uint64_t host_id;
    uint64_t pid, memory_bytes;
    uint64_t gpu;          /* hash of its GPU's name; 0: it computes on none */
    uint32_t nccl_version; /* 0: none */
    uint32_t threads;
    struct mu_id incarnation;
    uint64_t session;        /* 0: its stream is down */
    uint32_t job;            /* slot of its job */
    uint32_t previous, next; /* workers of the same job, in order of attaching */

    bool ready;             /* has loaded the job, identity accepted */
    bool lost;              /* declared dead; the slot stays until the generation it belongs to is replaced */
    bool draining;          /* leaves as soon as a generation without it runs */
    bool leaving;           /* by its own wish (SIGTERM): no undrain keeps it */
    bool cordoned;          /* its node is: it gets no rank while it holds nothing */
    bool suspect;           /* observed late or its stream is gone */
    bool awaited;           /* recorded as a member, not seen since the coordinator's start */
    bool counted;           /* in the job's ready_count: ready, not lost, not draining */
    bool arrived;           /* has reached what the phase of the job waits for: prepared, parked */
    uint32_t rank;          /* in the job's current generation; NONE: not a member */
    uint32_t place, domain; /* of its host: struct mu_node_site; where it is not known NONE and host_number() */
    uint32_t leaf_count;
    uint32_t accuser;            /* slot of a member whose exchange with it failed in this generation; NONE */
    enum mu_state_source source; /* of its Assign */
    uint64_t feed;               /* number of the feed it was told to take last; 0: none */
    uint32_t probe;              /* its seat in the probe under way, and 1; 0: none */

    struct mu_worker_status status;                 /* as last reported */
    uint64_t assigned_generation, assigned_session; /* newest Assign sent, and over which stream */
    uint64_t seen_us, suspect_until_us,
        progress_us; /* lease clock: last sign of life; end of grace; last change of `progress` */
    uint64_t progress;
    bool waiting;
    double seconds_per_leaf;                /* in this generation; 0: not measured */
    double seconds_per_layer;               /* in all of them: see speeds.c */
    uint32_t speed_reports;                 /* of this generation */
    int8_t odd_reports;                     /* in a row, slower (or, below 0, faster) than all before by far */
    struct stage_time before;               /* of the last generation in which it was measured */
    struct timing timings[MU_TIMINGS_KEPT]; /* ring */
    uint64_t timing_count;
    char reason[MU_TEXT_SIZE]; /* why it is draining, suspect or lost */
};

/* Equal for workers on one host. */
static inline uint32_t host_number(const struct worker *worker)
{
    return (uint32_t)(worker->host_id >> 32);
}

struct checkpoint {
    bool unreadable;                    /* when it was last to be re-read; told */
    uint64_t scrub_due_us;              /* lease clock: to be re-read then; 0: at once */
    enum mu_keep_kind keeping;          /* kind local: the order that its holders have; 0: none */
    struct mu_checkpoint_record record; /* pieces point to the job's `pieces` while it is the open intent; holders are
                                           its own, see holders.c */
};

struct bad_link {
    struct mu_id a, b; /* incarnations */
    uint32_t failures;
    uint64_t until_us; /* lease clock: not used together before */
};

/* Who moves what in the generation being prepared. One allocation; freed at Go. */
struct moves {
    struct mu_move *moves; /* ascending by `to` */
    uint32_t *by_from;     /* their indices, ascending by (from, index) */
    uint32_t *first_from;  /* [world + 1]: where those of a rank begin in by_from */
    uint32_t count;
};

/* Where a worker's time went: see goodput.c. It outlives the worker's slot. */
struct account {
    struct mu_account_record record;
    uint32_t job; /* slot */
    bool used, dirty;
    uint64_t since_us, entered_us; /* real clock: counted up to; in this class since */
    uint64_t detect_us;            /* put down to noticing a failure, which a late report may still explain */
};
struct wait_floor {
    uint64_t least_us, before_us; /* of the reports being gathered, and of those before */
    uint32_t reports;
    bool known;
};

/* See prediction.h. */
struct prediction {
    struct mu_prediction view;
    uint64_t told; /* the last generation of which it was said that it is off */
    double snapshot_s;
    /* of the window under way */
    double sums_s[MU_TERM_COUNT];
    uint64_t steps;
    uint32_t reports, snapshots;
    uint32_t in_a_row; /* windows that speak against `off` as it is */
    bool warm;         /* the first reports are over */
};

/* What is known of the cost of checkpoints: see interval.c. */
struct interval {
    uint64_t steps, told_steps; /* 0: nothing was measured yet */
    double cost_s, write_s, failure_s;
    double stall_s, slow_s;         /* of the newest checkpoint: longest copy; steps longer than usual, summed */
    double step_s;                  /* a step while nothing is written */
    uint64_t ordered_us, taken_us;  /* lease clock; 0: not */
    uint64_t worker_us, counted_us; /* workers * time, up to then (lease clock) */
    uint64_t base;                  /* step of the last one that was due */
    char reason[MU_TEXT_SIZE];
};

struct job {
    bool used;
    struct mu_job_record record;
    struct mu_model_spec model;
    enum mu_job_phase phase;
    uint64_t phase_since_us;
    uint32_t leaves;
    uint32_t first_worker, last_worker, worker_count;
    uint32_t ready_count; /* upper bound of those that can take part */

    /* the current generation (record.generation), when has_generation */
    bool has_generation, go, equal_leaves;
    struct mu_layout layout;
    uint32_t leaf_counts[MU_COUNTED_REPLICAS_MAX]; /* by replica, unless equal_leaves */
    struct moves moves;
    uint64_t examined; /* the last generation of which a member was lost */
    uint64_t start_step, command_base;
    enum mu_start_source start_source; /* holders after a restart */
    char start_text[112];              /* where the state of the start comes from, for people; empty after a restart */
    uint8_t secret[32];
    uint32_t world;                       /* of the layout, with idle ranks */
    uint32_t *members;                    /* slots by rank; NONE once a lost member's slot is gone */
    uint32_t arrived;                     /* members that have arrived or are lost */
    bool revoked;                         /* PARKING by Revoke, not by command */
    bool reformed;                        /* a generation ran before: the next Go is a continuation */
    uint64_t broken_us;                   /* when the first loss of this break was noticed; 0: planned change */
    char waiting_text[MU_TEXT_SIZE];      /* said last about why it waits */
    bool saving_first;                    /* WAITING for a checkpoint, because who leaves alone holds something */
    uint32_t told_short;                  /* WAITING: ready workers that were too few when this was last looked at */
    char broken_text[MU_EVENT_TEXT_SIZE]; /* what was lost, for the line that says who continues */

    uint64_t plan_ticket;
    uint32_t *plan_slots;               /* workers in the plan's input, by member index */
    uint32_t plan_count, plan_staying;  /* all, and those of them that do not leave */
    bool plan_without_state;            /* from the checkpoint, because what members hold cannot be moved */
    bool plan_without_faulty;           /* those whose failures broke the last preparations are left out of this one */
    uint64_t trial_ticket;              /* of a plan made only to see whether it would be larger; 0: none */
    uint32_t considered;                /* workers that the newest plan could choose from */
    uint64_t plan_checkpoint;           /* number of the checkpoint the plan may start from; 0: none */
    struct mu_step_result roll_forward; /* of the current generation's Assign */
    uint64_t settle_until_us;           /* plan or regroup then; 0: nothing pending */
    uint32_t unprepared;          /* generations in a row that somebody could not prepare, through no peer's fault */
    uint64_t retry_us;            /* not planned again before */
    bool feeding;                 /* some get their next state; see feed.c */
    bool feed_again;              /* one of them did not: another trial is due */
    bool preflight_over;          /* its workers were measured, as far as that was possible */
    bool has_next_layout;         /* some were fed since the last Assign ... */
    struct mu_layout next_layout; /* ... for this one */
    uint32_t feed_attempts;       /* feeds that failed since the last Assign */
    uint64_t feed_until_us;       /* PARKING: their ends are waited for until then; 0: not */
    bool regroup_for_leaving;     /* then, whatever the new plan would be */

    uint64_t look_us;         /* lease clock: not before, whether other stages would pay */
    uint32_t quiet_looks;     /* looks in this generation that found nothing */
    uint64_t leaves_us;       /* lease clock: not before, whether other leaf counts would pay */
    uint64_t beyond_us;       /* lease clock: since when leaves cannot make up for a slow worker; 0: they can */
    bool leaves_pay;          /* they did when this was last looked at */
    uint32_t leaf_moves;      /* not long ago: each doubles the time until the next one */
    uint64_t change_begun_us; /* lease clock: when the change of generation under way began; 0: none is */
    double change_s;          /* how long the last one took; 0: not known */

    uint64_t steps_done, replayed_steps, replay_until;
    uint32_t down_count; /* accounts of workers that are down */
    struct wait_floor wait_floor;
    struct prediction prediction;
    uint64_t progress_us; /* lease clock: when steps_done last grew, or Go */
    struct mu_step_result result;
    bool has_result;
    double tokens_per_second, seconds_per_step;
    struct mu_step_phases step_phases;
    uint64_t eval_step;
    double eval_loss;
    uint64_t workers_lost, generations;

    struct checkpoint checkpoints[MU_CHECKPOINTS_MAX]; /* ascending by number */
    uint32_t checkpoint_count;
    struct mu_id borrowed;        /* nonce of the one that is another job's; zero: none is */
    uint64_t unreachable_us;      /* kind local: since when too few hosts of the newest are there; 0: it is (lease) */
    uint64_t suspect;             /* number of the one that the state was loaded from not long ago; 0: none */
    uint64_t suspect_step;        /* its step */
    uint32_t unfinite_reports;    /* in a row, the newest included */
    uint64_t judged_step;         /* up to which reports have been looked at for that */
    uint64_t condemned;           /* what generations up to this one hold counts for nothing; 0: none */
    uint64_t intent;              /* number of the open one; 0: none */
    bool untaken;                 /* it cannot become complete, unless its manifest is there already */
    bool publishing;              /* PUBLISH is out for it (or a probe, after a restart) */
    bool checkpoint_wanted;       /* on request, or one was given up and is to be ordered again */
    uint32_t checkpoint_failures; /* in a row */
    uint32_t checkpoint_attempt;  /* of the next one ordered: how many were given up before it */
    uint64_t checkpoint_retry_us; /* after a failed one at the end: not before (lease clock) */
    uint64_t next_due_step;       /* by policy */
    struct interval interval;
    struct mu_piece_record *pieces; /* [MU_PIECES_MAX], of the open intent */
    uint32_t *piece_slots;          /* writers */
    uint32_t pieces_done;

    struct bad_link bad_links[MU_BAD_LINKS_MAX];
    uint32_t bad_link_count;

    struct mu_id hung[MU_HUNG_KEPT]; /* ring: declared lost because they hang; never taken in again */
    uint32_t hung_count;
    struct fault {
        struct mu_id incarnation;
        char name[MU_WORKER_NAME_SIZE];
    } faults[FAULTS_KEPT]; /* ring: who parked by a failure of its own, and in no generation has gone on since */
    uint32_t fault_count;

    struct mu_id demoted[MU_DEMOTED_KEPT]; /* too slow for leaves to make up for it: others come first; see speeds.c */
    uint32_t demoted_count;
    uint64_t refusals[MU_REFUSALS_KEPT]; /* ring: hashes of the lines that were told when workers were refused */
    uint32_t refusal_count;
};

struct node {
    struct mu_node_record record;
    uint64_t deadline_us; /* lease clock; 0: none, or over */
};

/* The newest probe: see probe.c. */
struct probe {
    uint64_t number; /* since the start; 0: none was made */
    bool is_running;
    uint32_t job; /* slot of the job that waits for it; NONE */
    struct mu_id job_uid;
    bool quick, encrypted;
    uint64_t storage_bytes; /* of each worker; 0: not measured */
    uint8_t secret[32];
    uint64_t base;     /* of the numbers of its orders */
    uint32_t step;     /* under way */
    uint32_t waiting;  /* asked, neither answered nor out */
    uint64_t until_us; /* lease clock */
    struct probe_seat *seats;
    struct mu_probe_result result;
    struct mu_probe_finding *findings;
    uint32_t finding_count;
};

/* A worker without a rank, when it is put in line for one. */
struct newcomer {
    uint32_t distance, age, slot;
};

struct mu_coord {
    struct mu_coord_config config;
    uint64_t now_us, wall_us; /* of the event being handled */
    struct mu_id random;
    const struct mu_coord_sink *sink;

    uint64_t forgiven_us;                /* own lateness: the lease clock is now_us - forgiven_us */
    uint64_t deadline_us;                /* promised at the end of the last step, real clock */
    uint64_t next_scan_us;               /* lease clock */
    uint64_t started_us, last_attach_us; /* lease clock */

    struct job *jobs;
    uint32_t *job_order; /* slots, ascending by name */
    uint32_t job_count;
    struct worker *workers;
    uint32_t worker_high; /* slots below were used at some time */
    uint32_t free_worker; /* list through `next` */
    struct map by_session, by_name, by_gpu;
    uint32_t next_auto_name;

    struct mu_worker_record worker_records[WORKER_RECORDS_MAX];
    uint32_t worker_record_count;
    struct node nodes[NODES_MAX];
    uint32_t node_count;
    struct {
        struct mu_id incarnation;
        uint64_t name_hash;   /* 0: none, or lifted */
        uint64_t lease_us;    /* until the start: wall clock */
    } deaths[MU_DEATHS_KEPT]; /* ring */
    uint64_t death_count;
    struct mu_request_record requests[MU_REQUESTS_KEPT]; /* ring by number */
    uint64_t request_count;

    struct mu_id scrub_job; /* uid of the job whose checkpoint is being re-read */
    uint64_t scrub_number;  /* which one; 0: none */
    uint64_t scrub_next_us; /* lease clock: when the next one is due; UINT64_MAX: none */

    struct account *accounts; /* [account_capacity] */
    uint32_t account_capacity, account_high;
    uint32_t free_account; /* all slots below are used */
    struct map by_account;
    uint64_t flush_us; /* real clock: the next round of records begins then */
    uint32_t flush_next;

    struct probe probe;

    uint64_t last_event;
    struct mu_coord_counters counters;

    /* scratch for what is emitted; valid only during one emission */
    struct mu_member_record *member_records;
    struct mu_plan_member *plan_members;
    uint64_t plan_count;
    struct newcomer *newcomers;        /* [max_workers] */
    struct mu_move *assign_moves;      /* [MU_MOVES_MAX] */
    struct mu_held_share *shares;      /* [max_workers * MU_HELD_SHARES_MAX] */
    struct mu_reshard_holder *holders; /* [max_workers] */
    uint32_t *column_holders;          /* [MU_SLICES_MAX * MU_STAGES_MAX] */
    struct mu_plan_link plan_links[MU_BAD_LINKS_MAX];
    struct mu_written_piece *written; /* [MU_PIECES_MAX] */
    struct mu_holder *assign_holders; /* [MU_HOLDERS_MAX] */
};

/* emit.c */
uint64_t lease_now(const struct mu_coord *coord);
void emit(struct mu_coord *coord, const struct mu_coord_action *action);
void send_to(struct mu_coord *coord, const struct worker *worker, const struct mu_coord_message *message);
void send_simple(struct mu_coord *coord, const struct worker *worker, enum mu_coord_message_kind kind,
                 uint64_t generation);
void send_release(struct mu_coord *coord, struct worker *worker, uint32_t exit_code, const char *text);
void close_session(struct mu_coord *coord, uint64_t session);
void reject(struct mu_coord *coord, uint64_t session, enum mu_reject_reason reason, const char *fmt, ...)
    MU_PRINTF(4, 5);
void persist_job(struct mu_coord *coord, const struct job *job);
uint64_t first_revision(const struct mu_coord *coord); /* of what was recorded before there were any */
void revise(struct mu_coord *coord, struct job *job);  /* the next event tells a change of it */
void persist_generation(struct mu_coord *coord, const struct job *job);
void forget_generation(struct mu_coord *coord, const struct job *job);
void persist_checkpoint(struct mu_coord *coord, const struct mu_checkpoint_record *record);
void persist_tally(struct mu_coord *coord, const struct job *job);
void persist_death(struct mu_coord *coord, const struct mu_death_record *record);
void persist_request(struct mu_coord *coord, const struct mu_request_record *record);
void persist_worker(struct mu_coord *coord, const struct mu_worker_record *record);
void event(struct mu_coord *coord, enum mu_event_severity severity, const char *kind, const struct job *job,
           const struct worker *worker, const char *fmt, ...) MU_PRINTF(6, 7);
void event_of_name(struct mu_coord *coord, enum mu_event_severity severity, const char *kind, const struct job *job,
                   const char *worker, const char *fmt, ...) MU_PRINTF(6, 7);
/* The one reply to a request, while it is being made: OK until it is refused. */
struct answer {
    struct mu_coord_reply reply;
    char text[MU_ERROR_TEXT_SIZE];
};
void refuse(struct answer *answer, enum mu_status status, enum mu_reason reason, const char *fmt, ...) MU_PRINTF(4, 5);
void format_into(char *out, size_t size, const char *fmt, ...) MU_PRINTF(3, 4);
void copy_text(char *out, size_t size, const char *text);

/* admit.c: false after a rejection */
/* For good: its device, kernels or data are not what the job needs. Told in an event, each line once in a row. */
void refuse_worker(struct mu_coord *coord, struct job *job, const struct mu_hello *hello, uint64_t session,
                   const char *fmt, ...) MU_PRINTF(5, 6);
bool accept_identity(struct mu_coord *coord, struct job *job, const struct mu_hello *hello, uint64_t session);
bool accept_compute(struct mu_coord *coord, struct job *job, const struct mu_hello *hello, uint64_t session);
bool accept_nccl(struct mu_coord *coord, struct job *job, const struct mu_hello *hello, uint64_t session);
bool accept_gpu(struct mu_coord *coord, struct worker *worker, const struct mu_hello *hello, uint64_t session);
void give_back_gpu(struct mu_coord *coord, const struct worker *worker);

/* members.c: attaching, signs of life, losses */
struct job *job_of(struct mu_coord *coord, const struct worker *worker);
struct worker *member_at(struct mu_coord *coord, const struct job *job, uint32_t rank); /* NULL: gone */
struct worker *next_worker(struct mu_coord *coord, const struct job *job, const struct worker *after);
struct worker *add_worker(struct mu_coord *coord, struct job *job, const char *name, struct mu_id incarnation);
void free_worker(struct mu_coord *coord, struct worker *worker);
void count_ready(struct mu_coord *coord, struct worker *worker); /* after ready, lost or draining changed */
void on_worker_message(struct mu_coord *coord, uint64_t session, const struct mu_worker_message *message);
void on_disconnected(struct mu_coord *coord, uint64_t session, enum mu_stream_end end, const char *reason);
void declare_lost(struct mu_coord *coord, struct worker *worker, const char *fmt, ...) MU_PRINTF(3, 4);
void scan_leases(struct mu_coord *coord);
void drain(struct mu_coord *coord, struct worker *worker, const char *reason);
struct mu_worker_record *find_worker_record(struct mu_coord *coord, const char *name);
struct worker *find_worker(struct mu_coord *coord, const char *name);
struct mu_worker_record *note_worker(struct mu_coord *coord, const char *name); /* find or add; NULL: table is full */

/* exits.c: crash budgets, and what supervisors tell */
bool death_is_counted(const struct mu_coord *coord, struct mu_id incarnation);
void count_death(struct mu_coord *coord, const struct job *job, const char *name, const char *host,
                 struct mu_id incarnation, const char *why);
void on_exited(struct mu_coord *coord, uint64_t cookie, const struct mu_process_exit *exit);

/* nodes.c: orders about hosts */
const struct mu_node_record *find_node(const struct mu_coord *coord, const char *host); /* NULL: none */
bool restore_node(struct mu_coord *coord, const struct mu_node_record *record);         /* false: too many */
void date_nodes(struct mu_coord *coord);                                                /* at the start */
void bind_to_node(struct mu_coord *coord, struct worker *worker);                       /* it has said Hello */
void node_left(struct mu_coord *coord, const struct worker *worker); /* before its slot is given back */
void scan_nodes(struct mu_coord *coord);                             /* deadlines */
void order_node(struct mu_coord *coord, const struct mu_coord_event *request, struct answer *answer);

/* job.c: phases */
struct job *find_job(struct mu_coord *coord, const char *name);
struct job *add_job(struct mu_coord *coord, const char *name);
void clear_job(struct job *job);                                            /* as new, but for the memory it owns */
void rename_job(struct mu_coord *coord, struct job *job, const char *name); /* and its place in the order */
bool is_over(const struct job *job);
bool is_still(const struct worker *worker);    /* parked or spare: holds still */
bool is_kept_off(const struct worker *worker); /* by a cordon: it holds nothing, and gets no rank */
bool may_take_part(const struct worker *worker);
void note_break(struct mu_coord *coord, struct job *job, const char *text); /* told at the next Go */
void settle(struct mu_coord *coord, struct job *job); /* something changed that may be worth a new generation */
void reconcile(struct mu_coord *coord,
               struct worker *worker);                  /* after Hello and Status: what it needs, what it means */
void park_all(struct mu_coord *coord, struct job *job); /* Revoke; then plan */
void member_lost(struct mu_coord *coord, struct job *job, struct worker *worker);
void member_silent(struct mu_coord *coord, struct job *job, struct worker *worker); /* its stream is gone */
void on_planned(struct mu_coord *coord, uint64_t ticket, const struct mu_plan *plan, const uint8_t *secret);
void job_tick(struct mu_coord *coord, struct job *job);
void send_go(struct mu_coord *coord, const struct job *job, const struct worker *worker);
void wait_for_workers(struct mu_coord *coord, struct job *job, const char *why);

void set_phase(struct mu_coord *coord, struct job *job, enum mu_job_phase phase);
uint32_t count_candidates(struct mu_coord *coord, const struct job *job, bool *ret_leaving);

void regroup(struct mu_coord *coord, struct job *job); /* a planned change: everybody parks at the same boundary */
void parked_waits_no_more(struct mu_coord *coord, struct job *job); /* a feed may have ended: plan, if all have */

/* feed.c: state to those who lack it in the next generation, while this one steps */
bool feed_possible(struct mu_coord *coord, const struct job *job); /* a trial plan may let somebody be fed (too) */
/* STEPPING: who lacks something in this plan gets it. False: nobody does, the change can be made at once. */
bool feed_begin(struct mu_coord *coord, struct job *job, const struct mu_plan *plan, const uint8_t *secret);
bool feed_pending(struct mu_coord *coord, struct job *job); /* PARKING: wait for a feed to end */
void feed_over(struct job *job);
void feed_note_status(struct worker *worker, bool fresh_stream); /* before what it says is looked at */
void feed_nothing_new(struct mu_coord *coord, struct job *job);  /* a trial plan was not worth a change */
/* A worker has said something, or (NULL) a spare is gone. */
void feed_advance(struct mu_coord *coord, struct job *job, struct worker *worker);
void feed_tick(struct mu_coord *coord, struct job *job);

/* ending.c */
void finish_job(struct mu_coord *coord, struct job *job, enum mu_job_state state, uint32_t exit_code, const char *text);
bool has_finished(const struct job *job, const struct worker *worker);
bool all_finished(struct mu_coord *coord, const struct job *job);
bool final_state_is_safe(struct mu_coord *coord, const struct job *job);
void finalize(struct mu_coord *coord, struct job *job); /* everybody has finished */
void finalizing_tick(struct mu_coord *coord, struct job *job);
void waiting_tick(struct mu_coord *coord, struct job *job);
void release_drained(struct mu_coord *coord, struct job *job, bool all); /* all: also those that hold state */

/* links.c: the blame graph */
void note_fault(struct job *job, const struct worker *worker);
void forget_fault(struct job *job, const struct worker *worker);
bool is_faulty(const struct job *job, struct mu_id incarnation, const char *name); /* it, or one of its name */
uint32_t count_isolated_spares(struct mu_coord *coord, const struct job *job);
void judge_peer(struct mu_coord *coord, struct job *job, struct worker *worker);
void judge_links(struct mu_coord *coord, struct job *job);

/* plan_io.c: from members to a plan's input, from a plan to Assign */
void request_plan(struct mu_coord *coord, struct job *job);
void request_trial(struct mu_coord *coord, struct job *job); /* STEPPING: would a new plan be larger? */
void send_assign(struct mu_coord *coord, struct job *job, struct worker *worker);
/* Copies the plan's moves. False: no memory, or an Assign would be larger than allowed; `why` says it. */
bool take_moves(struct mu_coord *coord, struct job *job, const struct mu_plan *plan, char why[MU_TEXT_SIZE]);
void drop_moves(struct job *job);
/* The most ranks that so many workers could make; 0: too few. An upper bound where the planner chooses tp or pp. */
uint32_t most_ranks(const struct job *job, uint32_t eligible);
uint32_t fewest_ranks(const struct job *job);

/* shares.c: who holds what */
bool shares_fit(const struct job *job, const struct mu_held *held, struct mu_error *err);
void holds_own_share(const struct job *job, struct worker *worker, uint64_t step); /* as a rank at a boundary does */
bool others_are_whole(struct mu_coord *coord, const struct job *job, const struct worker *but, uint64_t step);
bool staying_are_whole(struct mu_coord *coord, const struct job *job); /* STEPPING: without those that leave */
bool draining_are_needed(struct mu_coord *coord, const struct job *job);
/* The newest step of which those who hold still have everything, after rolling forward. */
uint64_t newest_whole_step(struct mu_coord *coord, const struct job *job, bool *ret_any);
bool same_columns(const struct mu_layout *a, const struct mu_layout *b); /* the same stages and slices */
/* Can this worker write that piece from what it holds at `step`? */
bool holds_piece(const struct worker *worker, const struct mu_layout *layout, uint32_t piece, uint64_t step);

/* checkpoint.c */
struct checkpoint *find_checkpoint(struct job *job, uint64_t number);
const struct checkpoint *newest_committed(const struct job *job);
void checkpoint_policy(struct mu_coord *coord, struct job *job); /* STEPPING: order one when it is due */
/* 0: not possible. `parked`: of whoever is parked with the state of exactly that step. */
uint64_t order_checkpoint(struct mu_coord *coord, struct job *job, uint64_t not_before_step, bool parked);
bool can_order_parked(struct mu_coord *coord, struct job *job, uint64_t step);
void resend_checkpoint(struct mu_coord *coord, struct job *job, struct worker *worker);
void checkpoint_writer_lost(struct mu_coord *coord, struct job *job, const struct worker *worker);
uint64_t first_open_command(const struct job *job);
void checkpoint_writer_back(struct mu_coord *coord, struct job *job, struct worker *worker);
void checkpoint_after_park(struct mu_coord *coord, struct job *job); /* give up what can no longer become complete */
void abandon_checkpoint(struct mu_coord *coord, struct job *job, const char *text, bool again);
void on_piece(struct mu_coord *coord, struct worker *worker, const struct mu_piece_report *piece);
void on_published(struct mu_coord *coord, struct job *job, uint64_t number, enum mu_status status, uint64_t step,
                  uint64_t size_bytes, const char *text);
void on_deleted(struct mu_coord *coord, struct job *job, uint64_t number, enum mu_status status, const char *text);
void mark_checkpoint_bad(struct mu_coord *coord, struct job *job, uint64_t number, const char *text);
void probe_intents(struct mu_coord *coord, struct job *job); /* after a restart */
void retain_checkpoints(struct mu_coord *coord, struct job *job);
void start_deleting(struct mu_coord *coord, struct job *job, struct checkpoint *checkpoint);
void forget_checkpoint(struct mu_coord *coord, struct job *job, struct checkpoint *checkpoint); /* its record alone */

/* holders.c: checkpoints of kind local */
bool is_local(const struct job *job);
/* The hosts of its writers, in order of their pieces; of one that takes a piece over. False: no memory, too many. */
bool holders_of_writers(struct mu_coord *coord, const struct job *job, struct checkpoint *checkpoint, uint32_t writers);
bool add_holder(struct mu_checkpoint_record *record, const char *host);
void free_holders(struct mu_checkpoint_record *record);
/* Tells all its holders; the last answer leads to on_published, on_scrubbed or on_deleted. */
void keep(struct mu_coord *coord, struct job *job, struct checkpoint *checkpoint, enum mu_keep_kind kind);
void on_kept(struct mu_coord *coord, struct worker *worker, const struct mu_kept_report *report);
void note_inventory(struct job *job, const struct worker *worker, const struct mu_hello *hello);
void holder_back(struct mu_coord *coord, struct job *job, const struct worker *worker);
void holder_lost(struct mu_coord *coord, struct job *job, const struct worker *worker);
bool discards_pending(const struct job *job); /* by workers that are there */
bool all_holders_here(struct mu_coord *coord, const struct job *job, const struct mu_checkpoint_record *record);
/* Its pieces can all be read from workers that are there. */
bool is_reachable(struct mu_coord *coord, const struct job *job, const struct mu_checkpoint_record *record);
/* What a generation may start from: the newest one, or, when that has not been reachable for long, an older one; NULL:
 * none. */
const struct checkpoint *usable_checkpoint(struct mu_coord *coord, struct job *job);
void describe_missing(struct mu_coord *coord, const struct job *job, const struct mu_checkpoint_record *record,
                      char *out, size_t size);
void list_holders(struct mu_coord *coord, const struct job *job, const struct mu_checkpoint_record *record,
                  struct mu_assign *assign);

/* scrub.c */
void scrub_start(struct mu_coord *coord);
void scrub_next(struct mu_coord *coord); /* something may be due */
void note_verified(struct mu_coord *coord, struct checkpoint *checkpoint);
void on_scrubbed(struct mu_coord *coord, struct job *job, uint64_t number, enum mu_status status, const char *text);

/* suspect.c */
void suspect_go(struct job *job);                             /* a generation goes */
void suspect_result(struct mu_coord *coord, struct job *job); /* a step was done */
bool suspect_end(struct mu_coord *coord,
                 struct job *job); /* all have finished. True: that is not the end, or it failed */
void suspect_tick(struct mu_coord *coord, struct job *job);
void suspect_assign(struct mu_coord *coord, struct job *job);      /* a generation has got its number and its members */
void suspect_status(const struct job *job, struct worker *worker); /* it has said what it holds */
void suspect_unprepared(struct mu_coord *coord, struct job *job, const struct worker *worker); /* its own failure */

/* interval.c */
bool interval_is_auto(const struct job *job);
uint64_t interval_steps(const struct job *job); /* between checkpoints; 0: none, or not known yet */
uint64_t interval_due(const struct job *job);   /* where it is automatic and interval_steps is not 0 */
void interval_count_workers(struct mu_coord *coord, struct job *job); /* before phase or world change */
void interval_report(struct mu_coord *coord, struct job *job, const struct worker *worker,
                     const struct mu_step_report *report);
void interval_ordered(struct mu_coord *coord, struct job *job);
void interval_committed(struct mu_coord *coord, struct job *job);
void interval_go(struct mu_coord *coord, struct job *job);

/* goodput.c */
void goodput_note(struct mu_coord *coord, const struct worker *worker); /* its class may be another one */
void goodput_heard(struct mu_coord *coord, uint64_t session, const struct mu_worker_message *message);
void goodput_note_job(struct mu_coord *coord, struct job *job);         /* after a change of phase */
void goodput_left(struct mu_coord *coord, const struct worker *worker); /* its slot becomes free */
void goodput_forget_job(struct mu_coord *coord, struct job *job);
void goodput_report(struct mu_coord *coord, struct job *job, const struct worker *worker,
                    const struct mu_step_report *report);
void goodput_restore(struct mu_coord *coord, const struct mu_account_record *record);
void goodput_start(struct mu_coord *coord);
void goodput_tick(struct mu_coord *coord);

/* prediction.c */
void prediction_report(struct mu_coord *coord, struct job *job, const struct worker *worker,
                       const struct mu_step_report *report); /* before speeds_report learns from it */

/* speeds.c */
/* Of no worker in particular, with what is known of embedding and head. */
/* Those that the coordinator was started with; NULL: none. */
const struct mu_cost_rates *speeds_given(const struct mu_coord *coord, const struct job *job);
struct mu_cost_rates speeds_rates(const struct mu_coord *coord, const struct job *job);
void speeds_report(struct mu_coord *coord, struct job *job, struct worker *worker, const struct mu_step_report *report);
void speeds_end(struct mu_coord *coord, struct job *job);   /* before members and layout of a generation go */
void speeds_begin(struct mu_coord *coord, struct job *job); /* a generation goes */
bool is_demoted(const struct job *job, const struct worker *worker);
/* An operator says that it is well. False: it was not demoted. */
bool restore_demoted(struct mu_coord *coord, struct worker *worker, const char *by);
/* A trial plan saves enough of each step to be worth a generation; says so. */
bool speeds_change_pays(struct mu_coord *coord, struct job *job, const struct mu_plan *plan);

/* amend.c */
struct mu_job_terms terms_now(const struct job *job);
void amend_job(struct mu_coord *coord, struct job *job, const struct mu_amendment *amendment, const char *by,
               struct answer *answer);
void place_amendments(struct mu_coord *coord, struct job *job);  /* a generation is assigned */
void settle_amendments(struct mu_coord *coord, struct job *job); /* it goes */
void amendments_tick(struct mu_coord *coord, struct job *job);   /* STEPPING: a change that is not made yet */

/* rollback.c */
void roll_back(struct mu_coord *coord, struct job *job, const struct mu_amendment *amendment, const char *by,
               struct answer *answer);
bool is_rolled_back(const struct job *job); /* and no generation has gone since: nobody steps before one does */
void void_state(const struct job *job, struct worker *worker); /* its status was taken: is what it holds of this era? */
void delete_void(struct mu_coord *coord, struct job *job);     /* once a generation has gone: void checkpoints */

/* branch.c */
void branch_job(struct mu_coord *coord, struct job *origin, const struct mu_coord_event *request,
                struct answer *answer);
bool is_borrowed(const struct mu_coord *coord, const struct checkpoint *checkpoint); /* by another job */
void return_borrowed(struct mu_coord *coord, struct job *job); /* when it is not needed any more */

/* probe.c */
void on_probe(struct mu_coord *coord, const struct mu_coord_event *request);
void on_probed(struct mu_coord *coord, struct worker *worker, const struct mu_probe_report *report);
/* It is not there any more, or has got something else to do: whatever it says now is too late. */
void probe_left(struct mu_coord *coord, struct worker *worker, const char *why);
void probe_gives_way(struct mu_coord *coord, const struct job *job); /* its members have got their ranks */
/* The job's first generation is planned: true: its workers are measured before, and it waits. */
bool probe_first(struct mu_coord *coord, struct job *job, const struct mu_plan *plan, const uint8_t *secret);
void probe_tick(struct mu_coord *coord);
void probe_go_on(struct mu_coord *coord); /* after each event */
void probe_fini(struct mu_coord *coord);

/* requests.c */
/* In its place, or (NULL) in a new one: the job, which waits for workers. NULL: refused. */
struct job *new_job(struct mu_coord *coord, struct job *place, const struct mu_job_spec *spec, struct answer *answer);
/* Of a worker or node: refused when its revision is another one. */
bool is_expected_of(const char *what, const char *name, uint64_t revision, uint64_t expected, struct answer *answer);
void on_request(struct mu_coord *coord, const struct mu_coord_event *request); /* SUBMIT to NODE */

#endif
