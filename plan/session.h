/* What a coordinator and its workers say to each other, as plain values.
 *
 * These are the messages of the bidirectional stream `muster.v1.WorkerService/Attach`. The wire format
 * (proto/muster/v1/session.proto) is converted to and from them in proto/wire.c, so that neither state machine ever
 * sees a protobuf type and the simulator carries them without serialising. Pointers inside a message are borrowed:
 * valid while the message is being handled. Pure. */
#ifndef MU_PLAN_SESSION_H
#define MU_PLAN_SESSION_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "common/hash.h"
#include "common/id.h"
#include "plan/gpu.h"
#include "plan/job.h"
#include "plan/layout.h"
#include "plan/probe.h"
#include "plan/reshard.h"

enum {
    MU_PROTOCOL_VERSION = 7,
    MU_WORKER_NAME_SIZE = 64, /* with the terminating 0; same characters as a job name */
    MU_ADDRESS_SIZE = 256,    /* data-plane address as its owner reports it */
    MU_TEXT_SIZE = 256,       /* reasons and errors shown to people */
    MU_VERSION_SIZE = 32,
    MU_PEERS_MAX = 256,  /* most peers named in one Assign: neighbours (plan/layout.h) and partners of moves */
    MU_MOVES_MAX = 8192, /* most moves named in one Assign */
    MU_COUNTED_REPLICAS_MAX =
        1024, /* up to here leaf counts follow the speeds; above they are equal (first replicas one more) */
    MU_HOLDERS_MAX = 1024, /* most hosts that one checkpoint of kind local lies on */
    MU_PIECE_FILE_SIZE = 96,
    MU_INVENTORY_MAX = 128, /* most checkpoints of kind local that a Hello names */
    MU_LEAF_RUNS_MAX = 64,  /* most runs of replicas with equal counts (plan/balance.h): an Assign names runs */
};

/* Outcome of the step reduction of the update from `step` to `step` + 1: the same on every rank that has it. */
struct mu_step_result {
    uint64_t step;
    double loss;      /* mean loss per token of the global batch */
    double grad_norm; /* global norm before clipping */
    uint64_t command; /* smallest "newest command number" over ranks */
    bool finite;      /* false: loss or norm is not finite; the update is skipped, by everyone */
};

/* What a worker holds, complete and intact, while it is parked (or would hold if it parked now). */
enum { MU_HELD_SHARES_MAX = 8 };
struct mu_held {
    bool has_state;    /* parameters and moments of the shares below after `step` updates */
    bool has_gradient; /* also the complete reduced gradient of the update step -> step + 1, of all that shares[0]
                          updates and mirrors */
    bool has_result;   /* `result` is known: of the update step -> step + 1 (pending), or of step - 1 -> step (the last
                          one applied) */
    uint64_t step;
    struct mu_step_result result;
    uint32_t share_count; /* > 0 exactly when has_state */
    /* [0]: the one it steps or last stepped with; then those of generations that were prepared and did not run, oldest
     * first. More than one of them, because what came for one may be the last copy when the next one is prepared, and
     * who gave it may die before Go. */
    struct mu_held_share shares[MU_HELD_SHARES_MAX];
};

enum mu_worker_phase {
    MU_PHASE_SPARE,     /* attached, no generation */
    MU_PHASE_PREPARING, /* connecting, moving state for `generation` */
    MU_PHASE_PREPARED,  /* ready to start `generation`, waiting for Go */
    MU_PHASE_RUNNING,   /* stepping in `generation` */
    MU_PHASE_PARKING,   /* told to park; in-flight work is being aborted */
    MU_PHASE_PARKED,    /* holds still at a boundary of `generation` */
    MU_PHASE_COUNT
};

enum mu_park_reason {
    MU_PARK_NONE,
    MU_PARK_REVOKED,  /* by Revoke */
    MU_PARK_PEER,     /* an exchange with `peer_rank` failed */
    MU_PARK_COMMAND,  /* by a regroup, drain or stop command */
    MU_PARK_FINISHED, /* the last step of the job is done */
    MU_PARK_PREPARE,  /* preparing failed: `text` says why */
    MU_PARK_ENGINE,   /* the engine cannot go on (data, memory, ...): `text` says why */
};

enum mu_peer_failure {
    MU_PEER_FAILURE_NONE,
    MU_PEER_FAILURE_RESET,
    MU_PEER_FAILURE_EOF,
    MU_PEER_FAILURE_TIMEOUT,
    MU_PEER_FAILURE_PROTOCOL
};

/* How far a taker has come with the state that it gets while a generation steps; see struct mu_feed_order. */
enum mu_feed_state {
    MU_FEED_NONE,
    MU_FEED_FILLING, /* state is on its way */
    MU_FEED_LIVE,    /* all of it is here, at most one step behind */
    MU_FEED_WHOLE,   /* over: `held` says what came of it, complete, at the boundary where the givers parked */
    MU_FEED_FAILED,  /* over: nothing of it is held; `text` says why */
};

/* The worker's own account of where it stands: part of every Hello and of every Status. */
struct mu_worker_status {
    enum mu_worker_phase phase;
    uint64_t generation; /* of the newest Assign it accepted; 0 = none */
    uint32_t rank;
    struct mu_held held;       /* exact when PARKED or SPARE; else the last boundary it passed */
    uint32_t era;              /* of `held`: mu_amend_era of what it stepped by */
    uint64_t command_received; /* newest command number it has */
    uint64_t command_executed; /* newest command it executed at a boundary */
    uint64_t checkpoint_taken; /* newest checkpoint for which it took its snapshot, at a boundary or by order */
    enum mu_park_reason park_reason;
    uint32_t peer_rank; /* MU_PARK_PEER */
    enum mu_peer_failure peer_failure;
    uint64_t bad_checkpoint; /* MU_PARK_PREPARE because this checkpoint could not be loaded; 0 = another reason */
    uint64_t feed;           /* number of the feed it takes, or took last since its Assign; 0 = none */
    enum mu_feed_state feed_state;
    uint64_t fed_by; /* generation whose members feed it, or fed it last, while it stepped in none; 0 = none. `held` is
                        of the newer one of this and `generation` */
    char text[MU_TEXT_SIZE];
    uint8_t weights_sha256[32]; /* MU_PARK_FINISHED: of the whole model's parameters, cell by cell; zero where this rank
                                   does not know it */
    bool weights_unfinite;      /* MU_PARK_FINISHED: some parameter, as far as this rank knows them, is not finite */
};

enum mu_worker_message_kind {
    MU_WM_HELLO,
    MU_WM_HEARTBEAT,
    MU_WM_STATUS,
    MU_WM_STEP,
    MU_WM_PIECE,
    MU_WM_EVAL,
    MU_WM_GOODBYE,
    MU_WM_KEPT,
    MU_WM_PROBED,
    MU_WM_COUNT
};

/* The numeric identity in its parts: what each kernel computes on a fixed input, so that a refusal can name the one
 * that differs. */
enum { MU_IDENTITY_PARTS_MAX = 24, MU_IDENTITY_NAME_SIZE = 24 };
struct mu_identity_parts {
    uint32_t count; /* 0: not known */
    struct {
        char name[MU_IDENTITY_NAME_SIZE]; /* of the kernel: a-z 0-9 _ - */
        uint64_t hash;
    } parts[MU_IDENTITY_PARTS_MAX];
};

struct mu_hello {
    uint32_t protocol_version;
    struct mu_id incarnation; /* of this process: drawn anew at each start and after being fenced */
    char software_version[MU_VERSION_SIZE];
    char job[MU_JOB_NAME_SIZE];
    char name[MU_WORKER_NAME_SIZE]; /* empty: the coordinator chooses one */
    char host[MU_WORKER_NAME_SIZE];
    char address[MU_ADDRESS_SIZE];       /* where its data plane listens */
    char files_address[MU_ADDRESS_SIZE]; /* where it gives out files of local checkpoints; empty: not yet, or never */
    uint8_t files_secret[32];
    uint32_t inventory_count; /* checkpoints in that directory, by their nonces' lower halves; as of this Hello */
    uint64_t inventory[MU_INVENTORY_MAX];
    char backend[16]; /* "cpu" */
    uint64_t pid;
    uint32_t threads;
    uint64_t memory_bytes;
    char gpu[48];          /* name of its GPU that is unique in the world; empty: it computes on none */
    uint32_t nccl_version; /* 22707: 2.27.7; 0: it does not exchange with NCCL */
    bool computes_bf16;    /* its device can; fp32 every device can */
    bool prepared_job;     /* it knows the job record with this uid and has checked data and kernels against it */
    struct mu_id job_uid;  /* zero until it has seen the record */
    struct mu_hash128 numeric_identity;      /* of its kernels at the job's shapes; valid when prepared_job */
    struct mu_identity_parts identity_parts; /* of the same; valid when prepared_job */
    struct mu_hash128 data_hash;             /* content of the data set; valid when prepared_job */
    struct mu_worker_status status;
};

struct mu_step_report {
    uint64_t steps_done; /* boundary reached */
    struct mu_step_result result;
    uint32_t step_count; /* how many steps this report sums up (reports are merged when steps are short) */
    uint32_t leaf_count; /* leaves computed in them */
    uint64_t tokens;     /* global tokens trained in them */
    uint64_t total_us, data_us, forward_us, backward_us, communicate_us, wait_us, optimizer_us, snapshot_us;
    /* What of communicate and wait was for the tensor group, the stages before and after, replicas and buddies and tied
     * copies, and the vote. */
    uint32_t tensor_us, pipeline_us, replicas_us, vote_us;
};

struct mu_piece_report {
    uint64_t checkpoint; /* sequence number */
    uint32_t piece;
    uint64_t step; /* boundary of the snapshot */
    enum mu_status status;
    uint64_t size_bytes;
    struct mu_hash128 checksum;
    uint64_t stall_us, write_us; /* copy at the boundary; background write */
    char file[MU_PIECE_FILE_SIZE];
    char text[MU_TEXT_SIZE]; /* when status is not MU_OK */
};

/* ---- checkpoint.kind: local ----
 *
 * Every host has a directory of its own. The hosts whose workers wrote pieces of a checkpoint are its holders, in the
 * order of a ring: each has the pieces that its own workers wrote (their names end in mu_host_id of the host), and
 * keeps a copy of those of the holder before it. So any one host may be gone. What concerns a host's directory as a
 * whole is done by one of its workers, by order of the coordinator; it also gives its files to others. */
struct mu_holder {
    char host[MU_WORKER_NAME_SIZE];
    char address[MU_ADDRESS_SIZE]; /* "address:port" of a worker that gives its files out; empty: none is there */
    uint8_t secret[32];            /* which whoever asks for them must know */
};

/* Never 0. */
static inline uint64_t mu_host_id(const char *host)
{
    return mu_xxh3_64(host, strnlen(host, MU_WORKER_NAME_SIZE), 2) | 1;
}

enum mu_keep_kind {
    MU_KEEP_PUBLISH = 1, /* all pieces are written: copy those of the host before, write the manifest */
    MU_KEEP_CHECK,       /* re-read what is here; what is missing or wrong is copied again from the other holder */
    MU_KEEP_DISCARD,     /* remove the directory */
    MU_KEEP_KIND_END
};

struct mu_written_piece {
    uint64_t size_bytes; /* 0, and an empty name: it holds no chunk and has no file */
    struct mu_hash128 checksum;
    char file[MU_PIECE_FILE_SIZE];
};

/* May come again; done again it changes nothing. */
struct mu_keep_order {
    enum mu_keep_kind kind;
    uint64_t checkpoint; /* sequence number */
    char dir[MU_PATH_SIZE];
    struct mu_holder before, after; /* of this host in the ring; both the host itself: it is alone */
    /* PUBLISH: what the manifest says, the same on all holders */
    uint64_t step, generation, wall_us;
    struct mu_layout layout;
    uint32_t piece_count;
    const struct mu_written_piece *pieces;
};

struct mu_kept_report {
    enum mu_keep_kind kind;
    uint64_t checkpoint;
    enum mu_status status; /* CHECK: MU_ERR_CORRUPT when no good copy of a piece is left */
    uint64_t size_bytes;   /* of the pieces that this host's own workers wrote */
    char text[MU_TEXT_SIZE];
};

struct mu_eval_report {
    uint64_t step;
    double loss;
};

/* How a worker and its host are (session.proto says what each is): told to people, decides nothing. */
enum mu_vital {
    MU_VITAL_CPU_US,
    MU_VITAL_MEMORY_BYTES,
    MU_VITAL_HOST_CPU_US,
    MU_VITAL_HOST_MEMORY_PPM,
    MU_VITAL_RECEIVED_BYTES,
    MU_VITAL_SENT_BYTES,
    MU_VITAL_NETWORK_ERRORS,
    MU_VITAL_READ_BYTES,
    MU_VITAL_WRITTEN_BYTES,
    MU_VITAL_DISK_FREE_BYTES,
    MU_VITAL_STALL_CPU_US,
    MU_VITAL_STALL_MEMORY_US,
    MU_VITAL_STALL_IO_US,
    MU_VITAL_RDMA_RECEIVED_BYTES,
    MU_VITAL_RDMA_SENT_BYTES,
    MU_VITAL_RDMA_ERRORS,
    MU_VITAL_CLOCK_SYNCHRONISED,
    MU_VITAL_CLOCK_ERROR_US,
    MU_VITAL_PLANE_RECEIVED_BYTES,
    MU_VITAL_PLANE_SENT_BYTES,
    MU_VITAL_PLANE_WAIT_US,
    MU_VITAL_LATENCY_US,
    MU_VITAL_COUNT
};
enum { MU_VITAL_LINKS_MAX = 16 };

struct mu_vital_link {
    uint32_t rank;
    uint64_t received_bytes_per_second, sent_bytes_per_second, wait_ppm, latency_us, retransmits;
};

struct mu_vitals {
    uint64_t mono_us; /* when they were read, by the worker's clock */
    uint64_t values[MU_VITAL_COUNT];
    uint64_t certificate_end_s; /* of the worker's own, since 1970; 0: no TLS */
    uint32_t link_count;
    struct mu_vital_link links[MU_VITAL_LINKS_MAX];
    const struct mu_gpu_sample *gpu; /* NULL: it computes on none, or nobody watches it */
};

/* A measurement of a probe (plan/probe.h), which the coordinator orders of workers that have nothing else to do. It
 * changes nothing and nobody waits for it but the probe: whatever else comes ends it. */
struct mu_probe_peer {
    uint32_t rank;
    struct mu_id incarnation;
    char address[MU_ADDRESS_SIZE];
};
struct mu_probe_order {
    uint64_t number;         /* with MU_FEED_BIT: also of the connections */
    enum mu_probe_kind kind; /* 0: give up what is under way; no answer */
    uint32_t limit_ms;
    bool quick;           /* ALONE: without the rates of the model of costs */
    uint64_t bytes;       /* STORAGE: in all; TOGETHER: to the next rank each time */
    uint32_t rank, world; /* PAIR (0 leads), TOGETHER */
    bool encrypted;
    uint8_t secret[32];
    uint32_t peer_count;
    struct mu_probe_peer peers[MU_PROBE_NEIGHBOURS_MAX]; /* ascending */
};
struct mu_probe_report {
    uint64_t number;
    enum mu_probe_kind kind;
    enum mu_status status;         /* MU_ERR_CANCELLED, MU_ERR_CONFLICT: it had something else to do */
    char text[MU_PROBE_TEXT_SIZE]; /* when status is not MU_OK */
    struct mu_probe_alone alone;
    double write_rate, read_rate;
    struct mu_probe_pair pair; /* of rank 0 */
    double barrier_s, ring_rate;
};

struct mu_worker_message {
    enum mu_worker_message_kind kind;
    uint64_t generation;            /* fencing: that the message speaks of; 0 in Hello, Heartbeat, Goodbye */
    const struct mu_vitals *vitals; /* NULL: none came along; decoded ones lie in the arena */
    union {
        struct mu_hello hello;
        struct {
            uint64_t progress; /* grows whenever the engine finishes any tile or exchange: hang detection */
            enum mu_worker_phase phase;
            uint64_t step;
            bool
                waiting; /* for a peer in an exchange, not computing: the one who is not waiting is the one who hangs */
        } heartbeat;
        struct mu_worker_status status; /* after every change of phase */
        struct mu_step_report step;
        struct mu_piece_report piece;
        struct mu_eval_report eval;
        struct mu_kept_report kept;
        struct mu_probe_report probed;
        struct {
            char reason[MU_TEXT_SIZE]; /* the worker leaves on purpose (SIGTERM): it asks to be drained first */
        } goodbye;
    };
};

enum mu_coord_message_kind {
    MU_CM_WELCOME,
    MU_CM_REJECT,
    MU_CM_ASSIGN,
    MU_CM_GO,
    MU_CM_REVOKE,
    MU_CM_COMMAND,
    MU_CM_SNAPSHOT,
    MU_CM_PIECE_ACK,
    MU_CM_RELEASE,
    MU_CM_FEED,
    MU_CM_KEEP,
    MU_CM_RECALL,
    MU_CM_PROBE,
    MU_CM_COUNT
};

enum mu_reject_reason {
    MU_REJECT_VERSION,     /* final: protocol versions differ */
    MU_REJECT_IDENTITY,    /* final: numeric identity or data differ from the job's */
    MU_REJECT_QUARANTINED, /* final: crashed too often */
    MU_REJECT_FENCED,      /* come back as a new incarnation, hold nothing */
    MU_REJECT_NO_JOB,      /* retry: no such job yet */
    MU_REJECT_JOB_OVER,    /* final, exit 0: finished or cancelled */
    MU_REJECT_BUSY,        /* retry later: the worker table is full, or the name is in use by a live worker */
    MU_REJECT_INVALID,     /* final: a field of Hello is not allowed */
};

/* What a rank does with what it has; whatever it then lacks of its share comes by moves. */
enum mu_state_source {
    MU_SOURCE_HELD,         /* holds `start_step` */
    MU_SOURCE_ROLL_FORWARD, /* holds step - 1 and its gradient: apply `roll_forward` */
    MU_SOURCE_PEER,         /* holds nothing of use */
    MU_SOURCE_CHECKPOINT,   /* load its share from checkpoint_dir, verify every byte; no moves */
    MU_SOURCE_INIT,         /* step 0: initialise its share from the seed; no moves */
};

struct mu_peer {
    uint32_t rank;
    struct mu_id incarnation;
    const char *name;
    const char *address;
};

struct mu_assign {
    struct mu_layout layout;
    uint32_t rank;
    uint64_t start_step;
    uint8_t secret[32];          /* for the data plane's hand-shake, this generation only */
    const uint32_t *leaf_counts; /* [dp] in at most MU_LEAF_RUNS_MAX runs, or NULL: equal */
    const struct mu_peer *peers; /* mu_layout_neighbours and partners of moves, ascending rank */
    uint32_t peer_count;
    enum mu_state_source source;
    const struct mu_move *moves; /* those from or to this rank, in the plan's order */
    uint32_t move_count;
    struct mu_step_result roll_forward; /* MU_SOURCE_ROLL_FORWARD */
    uint64_t checkpoint;                /* MU_SOURCE_CHECKPOINT: sequence number */
    char checkpoint_dir[MU_PATH_SIZE];
    char checkpoint_job[MU_JOB_NAME_SIZE]; /* whose it is; empty: the job's own */
    const struct mu_holder *holders;       /* of a checkpoint of kind local: the ring; NULL: one directory for all */
    uint32_t holder_count;
    uint64_t command_base;                  /* commands up to this number are over */
    bool nccl;                              /* all working ranks have it, of one version */
    const struct mu_amendments *amendments; /* what the generation steps by; NULL: none */
};

/* A planned change prepares while the old generation steps: members (givers) feed a spare that holds nothing, or
 * another member (the taker), with what it lacks of its share of the next layout (plan/feeding.h): every chunk once, as
 * it is between two updates, and from then on what the chunks sent so far become by each update: its result and the
 * reduced gradient, with which the taker makes the same update, or the new parameters where it needs no moments. When
 * the givers park by command they end the feeds, and the taker holds that share at that boundary like anybody else, a
 * member beside its own. Nothing of it is recorded: until all have ended a feed is worth nothing, and afterwards it is
 * state that is held. */
#define MU_FEED_BIT (1ull << 63) /* numbers of feeds have it, generations do not */
enum { MU_FEED_PARTS_MAX = 16 }; /* givers of one taker, and takers of one giver; numbers are multiples of it */
enum mu_feed_role { MU_FEED_GIVE = 1, MU_FEED_TAKE };
struct mu_feed_order {
    uint64_t number; /* of the taker's feed; that of the connection has `part` added */
    enum mu_feed_role role;
    uint32_t part, parts;    /* which of the taker's givers this is, of how many */
    struct mu_layout layout; /* of the generation that steps */
    uint32_t rank;           /* the giver's */
    uint32_t taker;          /* the taker's; MU_LAYOUT_NOBODY: it holds nothing */
    struct mu_layout next;   /* of the generation that is to come */
    uint32_t next_rank;      /* the taker's */
    struct mu_id other;      /* incarnation of the other side */
    char address[MU_ADDRESS_SIZE];
    uint8_t secret[32];                     /* of their connection */
    const struct mu_amendments *amendments; /* what the giver steps by; NULL: none */
};

/* "Tell what you remember": for people who look for a fault. It is answered beside the stream. */
enum { MU_RECALL_RECORDS_MAX = 16384, MU_RECALL_LINES_MAX = 512 };
struct mu_recall {
    uint64_t number;
    uint32_t flight_records; /* the newest ones */
    bool threads;
    uint32_t log_lines; /* the newest ones, with numbers beyond log_after */
    uint64_t log_after;
};

enum mu_command_kind { MU_COMMAND_CHECKPOINT = 1, MU_COMMAND_PARK = 2 };

/* The pieces of a checkpoint: piece i is the PRIMARY share of working rank i of `layout`, which need not be the layout
 * that anybody steps in: only its columns must be held. Whoever holds those chunks at the step can write it. */
struct mu_snapshot {
    uint64_t checkpoint;
    uint32_t piece; /* mu_layout_working(&layout): none, but the vote must know the command */
    struct mu_layout layout;
    char dir[MU_PATH_SIZE];
};

struct mu_coord_message {
    enum mu_coord_message_kind kind;
    uint64_t generation; /* Assign, Go, Revoke, Command, Snapshot; Feed: the giver's */
    union {
        struct {
            char name[MU_WORKER_NAME_SIZE]; /* the worker's name from now on */
            struct mu_id job_uid;
            const struct mu_job_spec *spec; /* NULL when the worker said that it has this uid */
            uint32_t heartbeat_ms;          /* send one at least this often */
            uint32_t lost_ms;               /* without a sign of life for so long it is declared lost */
        } welcome;
        struct {
            enum mu_reject_reason reason;
            char text[MU_TEXT_SIZE];
        } reject;
        struct mu_assign assign;
        struct {
            uint64_t number;
            enum mu_command_kind kind;
            uint64_t not_before_step;    /* executed at the first boundary >= this where every rank has it */
            uint64_t first_open;         /* commands with smaller numbers that were not executed are void */
            struct mu_snapshot snapshot; /* MU_COMMAND_CHECKPOINT */
        } command;
        struct mu_snapshot snapshot; /* Snapshot: take it now, at the boundary where you are parked */
        struct {
            uint64_t checkpoint;
            uint32_t piece;
        } piece_ack; /* the report is durable: forget it */
        struct {
            uint32_t exit_code; /* 0: finished, drained, cancelled; 1: the job failed */
            char text[MU_TEXT_SIZE];
        } release; /* free everything and exit */
        struct mu_feed_order feed;
        struct mu_keep_order keep;
        struct mu_recall recall;
        struct mu_probe_order probe;
    };
};

#endif
