/* The data plane between GPUs: NCCL, beside the sockets of comm.h.
 *
 * A struct mu_nccl holds one rank's communicators of one generation: all working ranks, and what is split from them,
 * the tensor group, the replicas of a column, the stages of a pipeline, the two of them that share a tied embedding.
 * Like comm.h it moves bytes, of device memory.
 * Sums are `exact`: partials are moved and added here in tree order by the kernels of the pool, so the bits are those
 * of any other layout and of the CPU; or fast: NCCL adds, in an order of its own.
 *
 *   meet ----> open ----> operations, wait ----> close (in good order), or abort ----> free
 *
 * Unique ids come over the sockets of the same generation (a meeting). Those are there before anything of NCCL is,
 * prove the generation's secret, are revoked with it and name whoever breaks; so the coordinator has no part in it, and
 * no id of an old generation can arrive late.
 *
 * Threads: the engine's makes every call. Communicators are non-blocking: what NCCL does on threads of its own is
 * waited for here, and every wait looks at NCCL's asynchronous error and at the sockets, where a revoke
 * (mu_comm_abort, any thread) and a dead peer are seen. NCCL alone might never notice a peer that was killed.
 *
 * Order: all members of a scope make the same operations of that scope in the same order. An operation is enqueued on
 * the given stream; it may wait inside until the other members have come (connections are made at first use).
 *
 * Failures: the first one, named with the rank and its host where that is known, fails everything afterwards with
 * MU_ERR_UNAVAILABLE; a revoke with MU_ERR_CANCELLED. Then mu_nccl_abort, and only when it returned MU_OK is no byte of
 * the buffers touched any more. */
#ifndef MU_WORKER_COMM_NCCL_H
#define MU_WORKER_COMM_NCCL_H

#include "kernels/pool.h"
#include "worker/comm.h"

struct CUstream_st; /* a pointer to it is CUDA's cudaStream_t: builds without CUDA can read this header */

enum mu_nccl_scope { MU_NCCL_WORLD, MU_NCCL_TENSOR, MU_NCCL_REPLICAS, MU_NCCL_STAGES, MU_NCCL_TIED, MU_NCCL_SCOPES };

enum {
    MU_NCCL_ID_SIZE = 128,
    MU_NCCL_RANKS_PER_ID = 128,  /* ranks that meet at one id: more of them wait for each other in a row */
    MU_NCCL_MOVES_MAX = 1 << 16, /* of one exchange */
    MU_NCCL_HOST_SIZE = 64,      /* with the terminating 0 */
};

struct mu_nccl;

/* What ncclGetUniqueId made: opaque here. */
struct mu_nccl_id {
    uint8_t bytes[MU_NCCL_ID_SIZE];
};

struct mu_nccl_meeting_config {
    struct mu_comm_group *group; /* connected, of the generation */
    uint32_t rank, world;        /* among working ranks */
    const char *host;            /* of this rank, for messages */
    uint32_t ranks_per_id;       /* the same on all ranks; 0: MU_NCCL_RANKS_PER_ID */
};

/* All working ranks of a generation, over its sockets: compare their versions of NCCL, make the ids and tell everybody.
 */
struct mu_nccl_meeting;
enum mu_status mu_nccl_meeting_new(const struct mu_nccl_meeting_config *config, struct mu_nccl_meeting **ret_meeting,
                                   struct mu_error *err) MU_WARN_UNUSED;
/* Once. MU_ERR_CONFLICT: versions differ, on which ranks and hosts; MU_ERR_TIMEOUT, MU_ERR_CANCELLED,
 * MU_ERR_UNAVAILABLE as from the group. */
enum mu_status mu_nccl_meeting_run(struct mu_nccl_meeting *meeting, uint64_t deadline_us,
                                   struct mu_error *err) MU_WARN_UNUSED;
/* After a run; as long as the meeting lives. */
const struct mu_nccl_id *mu_nccl_meeting_ids(const struct mu_nccl_meeting *meeting, uint32_t *ret_count);
/* After a run that failed: only once the group is closed, which may still know its requests. NULL is fine. */
void mu_nccl_meeting_free(struct mu_nccl_meeting *meeting);

struct mu_nccl_peer {
    uint32_t rank;
    const char *host;
};

struct mu_nccl_members {
    const uint32_t *ranks; /* [size] of the world, by index; disjoint from those of other groups of the scope */
    uint32_t size;         /* 0: nobody in this generation has the scope; 1: this rank is alone in it */
    uint32_t index;
};

/* Copied by mu_nccl_open. */
struct mu_nccl_config {
    struct mu_comm_group *group; /* of the same generation, connected; closed after this is freed. NULL: world is 1 */
    uint32_t rank, world;        /* among working ranks */
    const struct mu_nccl_id *ids;
    uint32_t id_count;
    struct mu_nccl_members scopes[MU_NCCL_SCOPES]; /* MU_NCCL_WORLD is filled in */
    const struct mu_nccl_peer *peers;              /* for messages; those that are known */
    size_t peer_count;
    uint64_t stall_us;                        /* an operation that NCCL cannot enqueue for so long fails; 0: never */
    void (*waiting)(void *ctx, bool waiting); /* around what waits for a peer; may be NULL */
    void *waiting_ctx;
};

/* Connects all communicators, on the calling thread's GPU. After a failure what there is is aborted, for up to ten
 * seconds; if that hangs the text says so, and the process must end. */
enum mu_status mu_nccl_open(const struct mu_nccl_config *config, uint64_t deadline_us, struct mu_nccl **ret_nccl,
                            struct mu_error *err) MU_WARN_UNUSED;

/* Flushes and destroys the communicators; all members must do so. Not done by the deadline, or failed before: then
 * they are aborted, for up to ten seconds. */
enum mu_status mu_nccl_close(struct mu_nccl *nccl, uint64_t deadline_us, struct mu_error *err) MU_WARN_UNUSED;
/* Stops what is under way and gives all communicators up, at once (one after the other they could wait for each other:
 * each has a thread of its own), and waits until the streams that were used have run dry. MU_ERR_TIMEOUT, MU_ERR_IO:
 * something hangs or fails inside NCCL or the driver. Then buffers may still be written to and nothing may be freed:
 * the process must end, and come back as a new incarnation. */
enum mu_status mu_nccl_abort(struct mu_nccl *nccl, uint64_t deadline_us, struct mu_error *err) MU_WARN_UNUSED;
/* Closed or aborted; otherwise it is kept for the threads that hang. NULL is fine. */
void mu_nccl_free(struct mu_nccl *nccl);

/* MU_OK while all works: between operations, and while nothing is waited for. */
enum mu_status mu_nccl_progress(struct mu_nccl *nccl, struct mu_error *err) MU_WARN_UNUSED;
/* Until everything enqueued on `stream` is done. MU_ERR_TIMEOUT says what was enqueued last; it may be waited for
 * again. */
enum mu_status mu_nccl_wait(struct mu_nccl *nccl, struct CUstream_st *stream, uint64_t deadline_us,
                            struct mu_error *err) MU_WARN_UNUSED;

/* ---- moving ---- */

/* `peer` is an index in the scope. Both sides name the same exchange number and size, which may be 0. */
struct mu_nccl_move {
    uint32_t peer;
    bool send;
    uint64_t exchange; /* used once per peer and direction in one call */
    void *data;        /* only read from when it is sent */
    size_t size_bytes;
};

/* All at once; in any order, but two members that exchange anything do so by the same calls. */
enum mu_status mu_nccl_exchange(struct mu_nccl *nccl, enum mu_nccl_scope scope, const struct mu_nccl_move *moves,
                                size_t count, struct CUstream_st *stream, struct mu_error *err) MU_WARN_UNUSED;
/* blocks[size][block_bytes]: the own one is there, the others come. */
enum mu_status mu_nccl_all_gather(struct mu_nccl *nccl, enum mu_nccl_scope scope, void *blocks, size_t block_bytes,
                                  struct CUstream_st *stream, struct mu_error *err) MU_WARN_UNUSED;
/* Block i of `send` goes to member i, block i of `recv` comes from there. They do not overlap. */
enum mu_status mu_nccl_all_to_all(struct mu_nccl *nccl, enum mu_nccl_scope scope, const void *send, void *recv,
                                  size_t block_bytes, struct CUstream_st *stream, struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_nccl_broadcast(struct mu_nccl *nccl, enum mu_nccl_scope scope, uint32_t root, void *data,
                                 size_t size_bytes, struct CUstream_st *stream, struct mu_error *err) MU_WARN_UNUSED;

/* ---- sums of one fp32 partial of each member ---- */

/* Block `index` of `count` elements cut for `size` members: as equal as can be, the first ones one more. */
static inline size_t mu_nccl_block_offset(size_t count, uint32_t size, uint32_t index)
{
    size_t longer = count % size;
    return count / size * index + (index < longer ? index : longer);
}

struct mu_nccl_sum {
    bool exact;
    struct mu_pool *pool; /* exact: bound to the GPU whose stream is given */
    float *staging;       /* exact: device, mu_nccl_staging_floats */
};
size_t mu_nccl_staging_floats(size_t count, uint32_t size);

/* data[count]: the own block becomes the sum, the others are undefined. Exact: the tree of plan/tree.h over the
 * members. */
enum mu_status mu_nccl_reduce_scatter(struct mu_nccl *nccl, enum mu_nccl_scope scope, const struct mu_nccl_sum *sum,
                                      float *data, size_t count, struct CUstream_st *stream,
                                      struct mu_error *err) MU_WARN_UNUSED;
/* data[count] becomes the sum, on all members. */
enum mu_status mu_nccl_all_reduce(struct mu_nccl *nccl, enum mu_nccl_scope scope, const struct mu_nccl_sum *sum,
                                  float *data, size_t count, struct CUstream_st *stream,
                                  struct mu_error *err) MU_WARN_UNUSED;

/* ---- for who may be linked without NCCL ---- */

/* The functions above. */
struct mu_nccl_ops {
    uint32_t (*version)(void); /* 22707: 2.27.7 */
    struct CUstream_st *(*stream)(struct mu_device *gpu, enum mu_track track);
    enum mu_status (*meeting_new)(const struct mu_nccl_meeting_config *config, struct mu_nccl_meeting **ret_meeting,
                                  struct mu_error *err);
    enum mu_status (*meeting_run)(struct mu_nccl_meeting *meeting, uint64_t deadline_us, struct mu_error *err);
    const struct mu_nccl_id *(*meeting_ids)(const struct mu_nccl_meeting *meeting, uint32_t *ret_count);
    void (*meeting_free)(struct mu_nccl_meeting *meeting);
    enum mu_status (*open)(const struct mu_nccl_config *config, uint64_t deadline_us, struct mu_nccl **ret_nccl,
                           struct mu_error *err);
    enum mu_status (*abort)(struct mu_nccl *nccl, uint64_t deadline_us, struct mu_error *err);
    void (*free)(struct mu_nccl *nccl);
    enum mu_status (*progress)(struct mu_nccl *nccl, struct mu_error *err);
    enum mu_status (*wait)(struct mu_nccl *nccl, struct CUstream_st *stream, uint64_t deadline_us,
                           struct mu_error *err);
    enum mu_status (*exchange)(struct mu_nccl *nccl, enum mu_nccl_scope scope, const struct mu_nccl_move *moves,
                               size_t count, struct CUstream_st *stream, struct mu_error *err);
    enum mu_status (*all_gather)(struct mu_nccl *nccl, enum mu_nccl_scope scope, void *blocks, size_t block_bytes,
                                 struct CUstream_st *stream, struct mu_error *err);
    enum mu_status (*all_to_all)(struct mu_nccl *nccl, enum mu_nccl_scope scope, const void *send, void *recv,
                                 size_t block_bytes, struct CUstream_st *stream, struct mu_error *err);
};
/* NULL in a program without NCCL. */
const struct mu_nccl_ops *mu_nccl_ops(void);

#endif
