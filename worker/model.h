/* GPT-2 on one worker: forward and backward of one micro-batch, with everything it needs allocated once.
 *
 * A model owns its workspace (activations, gradients of activations), not the parameters and not the leaf gradients:
 * those are flat fp32 buffers of spec->flat_size elements laid out by plan/model_spec.h and owned by the engine. The
 * result of a call is a function of (spec, micro-batch, parameters) alone; threads of the pool do not matter. A model
 * is used by one thread at a time, the owner of its pool. Nothing is allocated after mu_model_new.
 *
 * Order of additions into a leaf's gradient buffer (the numeric law, section 2 of the architecture), fixed for good:
 *   - The micro-batches of a leaf come in order: index 0 .. count - 1, on the same buffer. Each adds its contribution
 *     to every tensor in one piece: reductions over its micro * length tokens, in chunks of 256 tokens (norm weights in
 *     blocks of 64; see kernels.h), each chunk sum added to the buffer in ascending order. Index 0 overwrites the
 *     buffer (as if it held +0): the engine need not clear it.
 *   - The tied embedding wte receives the head's contributions of all micro-batches of the leaf first, in order, and
 *     after those the look-up's contributions of all micro-batches, in order of (micro-batch, sequence, token). So a
 *     leaf's wte gradient is head chain, then look-up chain: a pipeline whose last stage holds the head keeps the head
 *     chain of a leaf, hands it to the owner of E at the end of the leaf, and that adds its rows: the same bits. For
 *     this the model keeps the gradient of the embedding's output of each micro-batch until the last one of the leaf:
 *     micro * length * channels floats each.
 *   - wpe is added per micro-batch with wte, at the end of the leaf, sequences in ascending order. */
#ifndef MU_WORKER_MODEL_H
#define MU_WORKER_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"
#include "kernels/kernels.h"
#include "kernels/pool.h"
#include "plan/model_spec.h"

enum {
    MU_MICRO_TOKENS_MAX = 1 << 20, /* micro * length */
    MU_MICRO_SEQUENCES_MAX = 4096, /* micro */
    MU_ACCUMULATE_MAX = 4096,      /* micro-batches in a leaf */
    MU_HEAD_TOKENS = 512,          /* tokens whose logits exist at one time; a multiple of MU_GEMM_CHUNK */
};

struct mu_model;

struct mu_model_options {
    uint32_t micro;      /* sequences in a micro-batch */
    uint32_t length;     /* tokens in a sequence, <= spec->config.context */
    uint32_t accumulate; /* most micro-batches in a leaf (index < accumulate) */
    bool forward_only;   /* evaluation and generation: no activations are kept, mu_model_forward_backward is refused */
};

/* One micro-batch of a leaf. Arrays belong to the caller and are only read. */
struct mu_micro_batch {
    const int32_t *tokens;   /* [micro, length], 0 <= token < vocab */
    const int32_t *targets;  /* [micro, length], or -1: not counted */
    const uint64_t *samples; /* [micro]: sample numbers, for dropout */
    uint64_t seed, step;     /* for dropout */
    uint64_t loss_divisor; /* tokens of the global batch: gradients are of (sum of token losses) / loss_divisor; >= 1 */
    uint32_t index, count; /* this is micro-batch `index` of the `count` of its leaf */
    /* Called on the calling thread when the gradient of a cell is complete for this leaf (so only while index == count
     * - 1), in backward order: F.shared, then for each layer from the last to the first its slice cell and its shared
     * cell, then E.shared and E.0. The rest of the call does not touch the cell's part of the buffer any more: it may
     * be read and written from then on (sums over leaves and ranks begin while the backward pass goes on). May be NULL.
     * Each layer's cells come within microseconds of each other. */
    void (*cell_done)(void *ctx, uint32_t cell);
    void *cell_done_ctx;
};

/* Bytes that mu_model_new will allocate (for the memory model). */
size_t mu_model_workspace_bytes(const struct mu_model_spec *spec, const struct mu_model_options *options);

/* `pool` must outlive the model. MU_ERR_INVALID names the option and what is allowed; MU_ERR_NO_MEMORY. */
enum mu_status mu_model_new(const struct mu_model_spec *spec, const struct mu_model_options *options,
                            struct mu_pool *pool, struct mu_error *err, struct mu_model **ret_model) MU_WARN_UNUSED;
void mu_model_free(struct mu_model *model);

/* Initial parameters: a function of (spec, seed) alone. Gaps between cells are zero. MU_OK or MU_ERR_CANCELLED. */
enum mu_status mu_model_init_parameters(const struct mu_model_spec *spec, struct mu_pool *pool, uint64_t seed,
                                        float *params) MU_WARN_UNUSED;

/* MU_ERR_INVALID (with the position) when a token or target is out of range: call it once for data that is not trusted;
 * the compute functions assert. */
enum mu_status mu_model_check_batch(const struct mu_model *model, const struct mu_micro_batch *batch,
                                    struct mu_error *err) MU_WARN_UNUSED;

/* Forward and backward. grads: see the order above. *ret_loss_sum = sum of the token losses (not divided). MU_OK, or
 * MU_ERR_CANCELLED within a few milliseconds of the pool's cancel flag: grads are then undefined and the leaf starts
 * again at index 0; parameters are never written. */
enum mu_status mu_model_forward_backward(struct mu_model *model, const struct mu_micro_batch *batch,
                                         const float *params, float *grads, double *ret_loss_sum) MU_WARN_UNUSED;

/* Sum of token losses without gradients and without dropout. index, count, seed, step, divisor are not looked at. */
enum mu_status mu_model_loss(struct mu_model *model, const struct mu_micro_batch *batch, const float *params,
                             double *ret_loss_sum) MU_WARN_UNUSED;

/* logits[vocab] of the token that follows tokens[0..count), 1 <= count <= options.length. No dropout.
 * MU_ERR_INVALID for a count or token out of range. */
enum mu_status mu_model_logits_last(struct mu_model *model, const int32_t *tokens, uint32_t count, const float *params,
                                    float *logits, struct mu_error *err) MU_WARN_UNUSED;

/* Nanoseconds spent in the forward and the backward part of the last mu_model_forward_backward (monotonic clock). */
void mu_model_times(const struct mu_model *model, uint64_t *ret_forward_ns, uint64_t *ret_backward_ns);

/* One AdamW update of elements [offset, offset + size) of the flat space, with decay for the tensors that have it
 * (adamw->weight_decay) and none for the others; gaps are left alone. All four are whole flat buffers. */
enum mu_status mu_model_update(const struct mu_model_spec *spec, struct mu_pool *pool, const struct mu_adamw *adamw,
                               uint64_t offset, uint64_t size, float *params, float *m, float *v,
                               const float *grads) MU_WARN_UNUSED;

#endif
