/* A transformer (GPT-2, Llama) on one worker: forward and backward of micro-batches through the part of the model that
 * this worker holds, with everything it needs allocated once.
 *
 * The **part** is a column of the layout (plan/layout.h): a range of layers (with the embedding on the first stage,
 * final norm and head on the last) and a range of slices. Whoever holds all layers and all slices computes alone;
 * stages pass the residual stream on through the caller's buffers, and the tensor group of a stage moves blocks through
 * struct mu_tensor_group. A model owns its workspace (activations, gradients of activations), not the parameters and
 * not the leaf gradients: those are flat fp32 buffers of spec->flat_size elements laid out by plan/model_spec.h and
 * owned by the engine; only the cells of the part are touched (and on the last of several stages with tied embeddings
 * the copy of wte's slices). All of these, the residual streams of stages and the blocks of a tensor group, lie on the
 * device of the pool (kernels/device.h); with a GPU calls return while work is under way, except where a loss is
 * returned. A model is used by one thread at a time, the owner of its pool. Nothing is allocated after
 * mu_model_new.
 *
 * The result of a call is a function of (spec, micro-batch, parameters) alone: threads of the pool, the part, the size
 * of the tensor group, recomputation and the number of slots do not show in the bits. The numeric definition, fixed for
 * good; T = spec->config.slices, n = micro * length tokens:
 *   - tree_T is the balanced binary tree over slices 0 .. T - 1. Sums over slices follow it: attention's projection,
 *     the MLP's second product (then + bias), the gradients of the inputs of qkv, MLP and head. A rank's slices are an
 *     aligned subtree: it adds them itself; the ranks' sums are exchanged and added by the upper part of the tree.
 *   - With a tensor group, rank t owns token rows [t n / tp, (t + 1) n / tp) of the residual stream: norms, residual
 *     additions and dropout happen there only (sequence parallelism, Korthikanti et al., arXiv 2205.05198). Dropout
 * goes by logical element: global head, token and feature numbers.
 *   - The micro-batches of a leaf come in order: index 0 .. count - 1, on the same gradient buffer. Each adds its
 *     contribution to every sliced tensor in one piece: reductions over its n tokens, in chunks of 256 tokens (see
 *     kernels.h), each chunk sum added to the buffer in ascending order. Index 0 overwrites the buffer (as if it held
 *     +0): the engine need not clear it.
 *   - Shared tensors (norm weights, row biases): the n rows are cut into T equal token slices; each token slice
 *     accumulates over the micro-batches of the leaf in its own buffer (norm weights in blocks of 64 rows, biases in
 *     chunks of 256); at the end of the leaf the T buffers are added by tree_T. T = 1: directly in the leaf's buffer.
 *   - The tied embedding wte receives the head's contributions of all micro-batches of the leaf first, in order, and
 *     after those the look-up's contributions of all micro-batches, in order of (micro-batch, sequence, token). So a
 *     leaf's wte gradient is head chain, then look-up chain, and a pipeline whose last stage holds the head hands the
 *     head chain of a leaf to the first stage, which adds its rows: the same bits. For this the first stage keeps the
 *     gradient of the embedding's output of each micro-batch until the last one of the leaf: n / tp * channels floats
 *     each. An untied embedding starts from +0 instead of the head chain.
 *   - A leaf of more than `accumulate` micro-batches (numerics: fast, which merges leaves) adds its look-ups whenever
 * so many have gathered, between the head's contributions; over several stages the head chain comes before the last of
 * them.
 *   - wpe is added with wte, at the end of the leaf: each token slice from +0 in order of (micro-batch, sequence,
 *     token), then tree_T over the token slices.
 *   - Loss of a row, T > 1: exact maximum over the vocabulary; per slice the sum of exp(x - maximum); tree_T of those;
 *     log(total) + maximum - logit of the target. T = 1: mu_kernel_cross_entropy. Token losses are added in blocks of
 *     256, blocks in order. */
#ifndef MU_WORKER_MODEL_H
#define MU_WORKER_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"
#include "kernels/kernels.h"
#include "kernels/pool.h"
#include "plan/job.h"
#include "plan/layout.h"
#include "plan/model_spec.h"

enum {
    MU_MICRO_TOKENS_MAX = 1 << 20, /* micro * length */
    MU_MICRO_SEQUENCES_MAX = 4096, /* micro */
    MU_ACCUMULATE_MAX = 4096,      /* micro-batches in a leaf */
    MU_HEAD_TOKENS = 512,          /* tokens whose logits exist at one time; a multiple of MU_GEMM_CHUNK */
};

struct mu_model;

/* The column of the layout that this worker computes. */
struct mu_model_part {
    uint32_t first_layer, layer_count;
    bool embedding;                    /* first stage: layer 0 is in it */
    bool head;                         /* last stage: the last layer is in it */
    uint32_t first_slice, slice_count; /* of T; slice_count = T / size of the tensor group */
};

/* Moves blocks between the ranks of the tensor group of a stage. Called on the thread of the model; blocking. A failure
 * ends the model's call with the same status. */
struct mu_tensor_group {
    void *ctx;
    uint32_t size, rank; /* size * slice_count = T, rank * slice_count = first_slice */
    /* blocks[size]: own one is filled in -> all are. */
    enum mu_status (*all_gather)(void *ctx, void *blocks, size_t block_bytes);
    /* send[size] blocks, one for each rank -> recv[size] blocks, one from each rank; the own block is copied. */
    enum mu_status (*all_to_all)(void *ctx, const void *send, void *recv, size_t block_bytes);
    /* Are both operations of the device, in the order of its others, and do all members record them (kernels/device.h)?
     * NULL: no. A call of the model of one that then cannot is MU_ERR_CONFLICT. */
    bool (*recorded)(void *ctx);
};

struct mu_model_options {
    uint32_t micro;      /* sequences in a micro-batch */
    uint32_t length;     /* tokens in a sequence, <= spec->config.context; T divides micro * length */
    uint32_t accumulate; /* micro-batches whose look-ups are kept; longer leaves have another sum, see above */
    bool
        forward_only; /* evaluation and generation: no activations are kept, only mu_model_loss and _logits_last work */
    struct mu_model_part part;            /* layer_count 0: the whole model */
    enum mu_recompute recompute;          /* what backward computes again instead of keeping it; 0: none */
    uint32_t slots;                       /* micro-batches between their forward and their backward; 0: 1 */
    const struct mu_tensor_group *tensor; /* must outlive the model; NULL when the part has all slices */
};

/* One micro-batch of a leaf. Arrays belong to the caller, lie in the host's memory and are only read, during the call.
 */
struct mu_micro_batch {
    const int32_t *tokens;   /* [micro, length], 0 <= token < vocab; the first stage only */
    const int32_t *targets;  /* [micro, length], or -1: not counted; the last stage only */
    const uint64_t *samples; /* [micro]: sample numbers, for dropout */
    uint64_t seed, step;     /* for dropout */
    uint64_t loss_divisor; /* tokens of the global batch: gradients are of (sum of token losses) / loss_divisor; >= 1 */
    uint32_t index,
        count; /* this is micro-batch `index` of the `count` of its leaf; see below for more than accumulate */
    /* Hooks of backward, on the calling thread, all only while index == count - 1. Each may be NULL. */
    void *hooks_ctx;
    /* The gradient of a cell of the part is complete for this leaf, in backward order: F.<slices> (untied head),
     * F.shared, then for each layer from the last to the first its slice cells, ascending, and its shared cell, then
     * E.shared and E.<slices>. The rest of the call does not touch the cell's part of the buffer any more: it may be
     * read and written from then on (sums over leaves and ranks begin while the backward pass goes on). Each layer's
     * cells come within microseconds of each other. */
    void (*cell_done)(void *ctx, uint32_t cell);
    /* Tied embeddings over several stages, last stage: the head chain of the leaf is complete in the E slices of
     * `grads`, and not touched again before the next leaf's index 0. */
    void (*head_done)(void *ctx);
    /* Tied embeddings over several stages, first stage: called just before the look-up chain is added; when it returns,
     * the E slices of `grads` must hold the leaf's head chain. (The model does not touch them earlier, so they may be
     * filled at any time since the last leaf's cells were reported.) In a leaf of more than `accumulate` micro-batches
     * they hold earlier look-ups when it is called, to which the head chain must be added. A failure ends the call with
     * the same status. */
    enum mu_status (*embedding_ready)(void *ctx);
};

/* Bytes that mu_model_new will allocate (for the memory model). `options` must be what mu_model_new accepts. */
size_t mu_model_workspace_bytes(const struct mu_model_spec *spec, const struct mu_model_options *options);

/* `pool` must outlive the model. MU_ERR_INVALID names the option and what is allowed; MU_ERR_NO_MEMORY. */
enum mu_status mu_model_new(const struct mu_model_spec *spec, const struct mu_model_options *options,
                            struct mu_pool *pool, struct mu_error *err, struct mu_model **ret_model) MU_WARN_UNUSED;
void mu_model_free(struct mu_model *model);

/* Floats of the residual stream that a stage passes on for one micro-batch: own rows, micro * length / tp * channels.
 */
size_t mu_model_stream_elements(const struct mu_model *model);

/* Initial parameters of the chunks in `runs` (NULL: all chunks): a function of (spec, seed) alone, and each element of
 * (logical tensor, seed) alone, so not of T. The gap behind a cell is zeroed with its last chunk; nothing else of
 * params is touched. MU_OK or MU_ERR_CANCELLED. */
enum mu_status mu_model_init_parameters(const struct mu_model_spec *spec, struct mu_pool *pool, uint64_t seed,
                                        const struct mu_chunk_run *runs, uint32_t run_count,
                                        float *params) MU_WARN_UNUSED;

/* MU_ERR_INVALID (with the position) when a token or target is out of range: call it once for data that is not trusted;
 * the compute functions assert. Tokens are looked at where the part has the embedding, targets where it has the head.
 */
enum mu_status mu_model_check_batch(const struct mu_model *model, const struct mu_micro_batch *batch,
                                    struct mu_error *err) MU_WARN_UNUSED;

/* The compute functions below return MU_OK; MU_ERR_CANCELLED within a few milliseconds of the pool's cancel flag; or
 * what the tensor group or a hook returned. After a failure grads and outputs are undefined, the micro-batches in all
 * slots are lost and the leaf starts again at index 0; parameters are never written. */

/* Forward of one micro-batch through the part, kept in `slot` until its backward. in: own token rows of the residual
 * stream from the stage before, [n / tp, channels], NULL on the first stage; out: the same for the next stage, NULL on
 * the last one, where the head's forward is part of backward. */
enum mu_status mu_model_forward(struct mu_model *model, const struct mu_micro_batch *batch, uint32_t slot,
                                const float *params, const float *in, float *out) MU_WARN_UNUSED;

/* Backward of the micro-batch whose forward is in `slot`; the same batch again. Micro-batches of a leaf come in order
 * of index, leaves one after the other. grads: whole flat buffer, only cells of the part are touched; see the order
 * above. dout: gradient of `out`, NULL on the last stage; din: receives the gradient of `in`, NULL on the first stage;
 * the two may be the same buffer. *ret_loss_sum = sum of the token losses (not divided) on every rank of the last
 * stage, 0 elsewhere. */
enum mu_status mu_model_backward(struct mu_model *model, const struct mu_micro_batch *batch, uint32_t slot,
                                 const float *params, float *grads, const float *dout, float *din,
                                 double *ret_loss_sum) MU_WARN_UNUSED;

/* Both, for a part that has all layers (slot 0). */
enum mu_status mu_model_forward_backward(struct mu_model *model, const struct mu_micro_batch *batch,
                                         const float *params, float *grads, double *ret_loss_sum) MU_WARN_UNUSED;

/* Evaluation: through the part without gradients and without dropout; in and out as for mu_model_forward. index, count,
 * seed, step, divisor and samples are not looked at. *ret_loss_sum as for mu_model_backward. Overwrites slot 0. */
enum mu_status mu_model_loss(struct mu_model *model, const struct mu_micro_batch *batch, const float *params,
                             const float *in, float *out, double *ret_loss_sum) MU_WARN_UNUSED;

/* logits[vocab], on the device, of the token that follows tokens[0..count), 1 <= count <= options.length. No dropout.
 * The part must be the whole model. Overwrites slot 0. MU_ERR_INVALID for a count or token out of range. */
enum mu_status mu_model_logits_last(struct mu_model *model, const int32_t *tokens, uint32_t count, const float *params,
                                    float *logits, struct mu_error *err) MU_WARN_UNUSED;

/* Nanoseconds (monotonic clock) that the last forward, backward or both together spent in each direction; exchanges of
 * the tensor group and hooks are in it. Logits and losses count as forward, also in mu_model_backward; what backward
 * computes again counts as backward. */
void mu_model_times(const struct mu_model *model, uint64_t *ret_forward_ns, uint64_t *ret_backward_ns);

/* One AdamW update of elements [offset, offset + size) of the flat space, with decay for the tensors that have it
 * (adamw->weight_decay) and none for the others; gaps are left alone. All four are whole flat buffers. */
enum mu_status mu_model_update(const struct mu_model_spec *spec, struct mu_pool *pool, const struct mu_adamw *adamw,
                               uint64_t offset, uint64_t size, float *params, float *m, float *v,
                               const float *grads) MU_WARN_UNUSED;

#endif
