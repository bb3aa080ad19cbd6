/* Shared by comm_nccl.c (life and waits), comm_nccl_ops.c (operations), comm_nccl_abort.c (the end) and
 * comm_nccl_meet.c; nobody else includes it. */
#ifndef MU_WORKER_COMM_NCCL_INTERNAL_H
#define MU_WORKER_COMM_NCCL_INTERNAL_H

#include <cuda_runtime_api.h>
#include <nccl.h>

#include "plan/tree.h"
#include "worker/comm_nccl.h"

enum {
    NCCL_STREAMS_MAX = 16,
    NCCL_ABORT_US = 10000000, /* how long giving up may take when an error leads to it */
    NCCL_BLAME_US = 500000,   /* how long the sockets get to say who it was, after NCCL says that something is wrong */
    NCCL_SPIN_US = 20,
    NCCL_SLEEP_MAX_US = 100,
};

_Static_assert(MU_NCCL_ID_SIZE == NCCL_UNIQUE_ID_BYTES, "an id is NCCL's");

/* One communicator. */
struct channel {
    ncclComm_t comm; /* NULL: none. While a split is under way a thread of NCCL's may write it */
    uint32_t *ranks; /* [size] */
    uint32_t size, index;
    uint64_t operations;
};

struct nccl_host {
    uint32_t rank;
    char name[MU_NCCL_HOST_SIZE];
};

struct mu_nccl {
    struct mu_comm_group *group;
    uint32_t rank, world;
    struct channel channels[MU_NCCL_SCOPES];
    struct nccl_host *hosts;
    size_t host_count;
    uint64_t stall_us;
    void (*waiting)(void *ctx, bool waiting);
    void *waiting_ctx;
    cudaStream_t streams[NCCL_STREAMS_MAX]; /* used so far */
    uint32_t stream_count;
    char doing[256];         /* the newest operation, for messages */
    struct mu_error failure; /* the first one; MU_OK: none */
    bool over;               /* closed or aborted */
    /* of the operation that is being begun; [of the largest scope] */
    struct mu_tree_node *nodes;
    struct mu_tree_add *adds;
    float **partials;
    struct mu_nccl_move *sorted; /* [sorted_room] */
    size_t sorted_room;
};

/* ---- comm_nccl.c ---- */

/* A wait: spins a little, then sleeps; nothing at first. */
struct nccl_pause {
    uint64_t since_us, sleep_us;
};
/* A turn of its loop. MU_OK: look again. MU_ERR_TIMEOUT without a text: the deadline has passed. */
enum mu_status nccl_turn(struct mu_nccl *nccl, struct nccl_pause *pause, uint64_t deadline_us,
                         struct mu_error *err) MU_WARN_UNUSED;
void nccl_turned(struct mu_nccl *nccl, const struct nccl_pause *pause); /* after the last turn */
/* The first failure stays; returns it. */
enum mu_status nccl_fail(struct mu_nccl *nccl, enum mu_status status, struct mu_error *err, const char *fmt, ...)
    MU_PRINTF(4, 5);
/* The first failure so far, or MU_OK. */
enum mu_status nccl_state(const struct mu_nccl *nccl, struct mu_error *err) MU_WARN_UNUSED;
/* What NCCL's result means, with the rank whose connection broke if there is one. */
enum mu_status nccl_blame(struct mu_nccl *nccl, ncclComm_t comm, ncclResult_t result, struct mu_error *err);
/* Waits until `comm` has taken what it was given: result of the call that gave it. */
enum mu_status nccl_settle(struct mu_nccl *nccl, ncclComm_t comm, ncclResult_t result, uint64_t deadline_us,
                           struct mu_error *err) MU_WARN_UNUSED;
const char *nccl_scope_name(enum mu_nccl_scope scope);

/* A split stores it from another thread. */
static inline ncclComm_t nccl_load(struct channel *channel)
{
    return __atomic_load_n(&channel->comm, __ATOMIC_ACQUIRE);
}

#endif
