/* The engine of one worker: loads a job, prepares generations, trains steps, evaluates, takes snapshots.
 *
 *   IDLE --load--> LOADED --prepare--> PREPARED --run--> (steps) --> PARKED --prepare--> PREPARED ...
 *                     ^                                                 |
 *                     +------------------- forget ----------------------+
 *
 * Threads: the engine runs on a thread of its own (which is also thread 0 of its compute pool) and takes commands from
 * a mailbox; every mu_engine_* function below may be called from any thread, returns at once and copies what it is
 * given. A second thread writes snapshots. Answers come as `mu_worker_event`s through `post` (without now_us and
 * random), on one of those two threads.
 *
 * Memory: parameters, moments and gradients are flat spaces of addresses with the same positions in every layout
 * (kernels/arena.h); only the share of a rank is backed by memory. All that a step touches is mapped and touched at
 * load (where one worker may hold the whole model) or at prepare; a step allocates nothing. What lies outside the share
 * is given back at RUN, because until then it may be all there is. All of this lies on the device that computes
 * (kernels/device.h); the engine's thread gives it work and waits for it where a result is needed: the losses of a
 * micro-batch, the norm of the gradient, a snapshot.
 *
 * What is held (struct mu_held): a share stays as it was reported until RUN of a generation that does without it. The
 * state of a step is taken into the share's own spaces next to it; one of another step into spaces of its own. A rank
 * votes for an update only with the complete reduced gradient of all that it updates, and keeps that until its next
 * backward pass, so whoever is alive can make the update that anybody made.
 *
 * Stopping: `mu_engine_abort` cancels at once, from any thread, what is in flight for a generation: exchanges fail,
 * compute stops at the next tile. An optimizer update that has begun runs to its end. Buffers of an aborted generation
 * are never written again by late data, because the data plane copies only inside the engine's own calls. */
#ifndef MU_WORKER_ENGINE_H
#define MU_WORKER_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "common/id.h"
#include "common/status.h"
#include "kernels/device.h"
#include "worker/comm_nccl.h"
#include "worker/core/core.h"

enum {
    MU_ENGINE_MAILBOX_MAX = 256,          /* commands waiting */
    MU_ENGINE_CONNECT_TIMEOUT_MS = 30000, /* default: ranks of a new generation find each other */
    MU_ENGINE_EAGER_BYTES =
        512 * 1024 * 1024, /* gradient buffers for any layout are reserved at load up to this much */
    MU_ENGINE_STAGING_BYTES = 256 * 1024 * 1024 /* received gradients waiting to be added; more means smaller windows */
};

/* How the engine speaks to its owner. Everything but `leaf` and `applied` must be set. */
struct mu_engine_callbacks {
    void *ctx;
    /* Engine or writer thread. The event and what it points to are valid during the call. */
    void (*post)(void *ctx, const struct mu_worker_event *event);
    /* Engine thread: mu_worker_vote and mu_worker_boundary under the owner's lock. */
    uint64_t (*vote)(void *ctx, uint64_t generation);
    struct mu_boundary (*boundary)(void *ctx, uint64_t generation, uint64_t steps_done,
                                   const struct mu_step_result *result);
    /* Engine thread, may be NULL: the ledger of samples. Leaf `leaf` of update `step` was computed from the global
     * sequences [first_sequence, first_sequence + count) of mu_data_order; then, once a step, the update was applied
     * (or rolled forward). */
    void (*leaf)(void *ctx, uint64_t generation, uint64_t step, uint32_t leaf, uint64_t first_sequence, uint64_t count);
    void (*applied)(void *ctx, uint64_t generation, uint64_t step);
    /* Engine thread, may be NULL: something hangs in a driver or library and may still write to memory. The process
     * must end: this does not return. */
    void (*stuck)(void *ctx, const char *text);
};

struct mu_engine_config {
    uint32_t threads;               /* of the compute pool, 0: the affinity mask */
    struct mu_device *device;       /* that computes and holds the state; must outlive the engine. NULL: the host */
    uint64_t memory_bytes;          /* that its workers' host, or the device, has for them; 0: as much as there is */
    const struct mu_nccl_ops *nccl; /* between GPUs, where all members of a generation have it; NULL: sockets alone */
    /* Data plane, see struct mu_comm_config. NULL: its defaults. */
    const char *data_addr, *route_to, *host_id, *unix_dir;
    const char *host;            /* its name, in checkpoints of kind local; NULL: "localhost" */
    uint32_t connect_timeout_ms; /* 0: MU_ENGINE_CONNECT_TIMEOUT_MS */
    struct mu_engine_callbacks callbacks;
};

struct mu_engine;

/* Binds the data plane's sockets and starts the engine thread. Strings are copied. */
enum mu_status mu_engine_new(const struct mu_engine_config *config, struct mu_engine **ret_engine,
                             struct mu_error *err) MU_WARN_UNUSED;
/* Cancels everything, also a piece being written, and waits for both threads. Nothing is posted after it has begun.
 * NULL is fine. */
void mu_engine_free(struct mu_engine *engine);

const char *mu_engine_address(const struct mu_engine *engine); /* data plane; lives as long as the engine */
uint32_t mu_engine_threads(const struct mu_engine *engine);

/* Grows whenever anything moves; `waiting`: for peers in an exchange, not computing. */
void mu_engine_progress(const struct mu_engine *engine, uint64_t *ret_counter, bool *ret_waiting);

/* Fills in what of `vitals` the data plane knows, as of about a second ago. `engine` is a struct mu_engine. */
void mu_engine_traffic(void *engine, struct mu_vitals *vitals);

/* The commands, see enum mu_worker_action_kind for what answers them. MU_ERR_BUSY: the mailbox is full, so the engine
 * does not answer any more; MU_ERR_NO_MEMORY. */
enum mu_status mu_engine_load(struct mu_engine *engine, const struct mu_job_spec *spec,
                              struct mu_id uid) MU_WARN_UNUSED;
/* `incarnation`: the worker's own, as its peers were told. */
enum mu_status mu_engine_prepare(struct mu_engine *engine, uint64_t generation, struct mu_id incarnation,
                                 const struct mu_assign *assign) MU_WARN_UNUSED;
enum mu_status mu_engine_run(struct mu_engine *engine, uint64_t generation) MU_WARN_UNUSED;
/* Cancels every generation up to this one for good; answered by one PARKED. */
enum mu_status mu_engine_abort(struct mu_engine *engine, uint64_t generation) MU_WARN_UNUSED;
/* While a piece is still being written another snapshot is refused: its PIECE event says MU_ERR_BUSY. */
enum mu_status mu_engine_snapshot(struct mu_engine *engine, uint64_t generation,
                                  const struct mu_snapshot *snapshot) MU_WARN_UNUSED;
/* GIVE, and a member's TAKE: from the next boundary of `generation` on. TAKE is answered by FED events, GIVE by none.
 */
enum mu_status mu_engine_feed(struct mu_engine *engine, uint64_t generation, struct mu_id incarnation,
                              const struct mu_feed_order *order) MU_WARN_UNUSED;
/* Between two commands, while nothing is prepared; answered by PROBED. Any further command ends it. */
enum mu_status mu_engine_probe(struct mu_engine *engine, struct mu_id incarnation,
                               const struct mu_probe_order *order) MU_WARN_UNUSED;
/* Cancels everything, drops all state; a piece being written is abandoned without an event. */
enum mu_status mu_engine_forget(struct mu_engine *engine) MU_WARN_UNUSED;

#endif
