/* The residual stream and its gradient between the stages of a pipeline.
 *
 *   stage before  -- activations -->  this stage  -- activations -->  stage after
 *                 <-- gradients  ---              <-- gradients  ---
 *
 * Each of the four has two blocks: one is filled or computed with while the other one is on its way. Blocks go in the
 * order of plan/pipeline.h, which is the same on both sides; they are counted, and the count is the exchange number.
 * Received blocks must be announced (mu_pipeline_expect), so that nothing is outstanding when the stage is idle.
 * Engine's thread; sends move on while the stage computes (mu_comm_group_progress).
 *
 * Between GPUs (`link`) blocks go with NCCL, on a track of their own: a block that is given to be sent leaves together
 * with the next one that is waited for, as one operation. So a stage is never stuck in a send that its neighbour, in a
 * send too, does not receive (Megatron-LM, p2p_communication.py, does the same); the host waits for neither. */
#ifndef MU_WORKER_PIPELINE_H
#define MU_WORKER_PIPELINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "worker/comm.h"
#include "worker/nccl_link.h"

enum { MU_PIPELINE_NO_RANK = -1 };

enum mu_pipeline_flow { MU_PIPELINE_ACTIVATIONS, MU_PIPELINE_GRADIENTS };

struct mu_pipeline;

struct mu_pipeline_config {
    struct mu_comm_group *group;     /* must be closed before mu_pipeline_free */
    int64_t before, after;           /* ranks of the neighbour stages, or MU_PIPELINE_NO_RANK */
    uint32_t stage;                  /* own, index in MU_NCCL_STAGES */
    const struct mu_nccl_link *link; /* NULL, or none open: over the sockets */
    size_t block_floats;
    struct mu_device *device;                 /* where the blocks lie; NULL: the host */
    void (*waiting)(void *ctx, bool waiting); /* around what may wait for a peer; may be NULL */
    void *waiting_ctx;
};

enum mu_status mu_pipeline_new(const struct mu_pipeline_config *config, struct mu_pipeline **ret_pipeline,
                               struct mu_error *err) MU_WARN_UNUSED;
void mu_pipeline_free(struct mu_pipeline *pipeline); /* NULL is fine */
/* Bytes of the blocks of a stage. */
size_t mu_pipeline_bytes(const struct mu_pipeline_config *config);

/* Errors of all calls below: as from the group. Without the neighbour in question they do nothing, and data is NULL. */

/* `count` more blocks will come. */
enum mu_status mu_pipeline_expect(struct mu_pipeline *pipeline, enum mu_pipeline_flow flow, uint64_t count,
                                  struct mu_error *err) MU_WARN_UNUSED;
/* Waits for the next block (between GPUs: the main track does); it stays until it is released. */
enum mu_status mu_pipeline_receive(struct mu_pipeline *pipeline, enum mu_pipeline_flow flow, const float **ret_data,
                                   struct mu_error *err) MU_WARN_UNUSED;
enum mu_status mu_pipeline_release(struct mu_pipeline *pipeline, enum mu_pipeline_flow flow,
                                   struct mu_error *err) MU_WARN_UNUSED;
/* A block to fill: waits until what was sent from it before has left. */
enum mu_status mu_pipeline_block(struct mu_pipeline *pipeline, enum mu_pipeline_flow flow, float **ret_data,
                                 struct mu_error *err) MU_WARN_UNUSED;
/* Sends the block that was filled. */
enum mu_status mu_pipeline_send(struct mu_pipeline *pipeline, enum mu_pipeline_flow flow,
                                struct mu_error *err) MU_WARN_UNUSED;
/* Nothing is received for now: what was given to be sent leaves. */
enum mu_status mu_pipeline_flush(struct mu_pipeline *pipeline, struct mu_error *err) MU_WARN_UNUSED;

#endif
