/* The memory model of a CPU worker: what a rank of a layout allocates, from the job record alone.
 *
 * Of its column (plan/layout.h) a rank holds P elements, of which it owns at most O = ceil(chunks / dp) chunks. With
 * t = tp, n = micro * length tokens and o = n / t own rows, C channels, H heads, Q = (heads + 2 kv_heads) channels a
 * head, F the MLP's width (U = F for gpt2, 2 F for llama: gate and up), L layers of the stage, A accumulate, T slices,
 * S micro-batches held at once (mu_pipeline_slots), V rows of a slice of the vocabulary rounded up to 16, B = min(n,
 * 512), in elements of 4 bytes:
 *
 *   state        P + 2 P (2 O sharded)    parameters and two moments (Adam); the tied copy's parameters apart
 *   mirror       2 O, or 4 max P          with buddies: moments of another replica's chunks; with dp = 1 the
 *                                         parameters, moments and reduced gradient of the largest column
 *   gradients    depth P                  one buffer per pending subtree of leaf sums (mu_tree_buffers); the lowest
 *                                         receives the reduced gradient; with the tied copy's cells
 *   staging      inputs O                 partial sums received for the chunks it adds up, one for each subtree root of
 *                                         the other replicas; at most MU_MEMORY_STAGING_BYTES
 *   activations  S L (o (2 C + 4)         per layer: residuals and statistics of norms (4: gpt2; 2: llama), ...
 *                + o 2 C + n F / t        ... outputs of norms and of GELU or SwiGLU (the cheap ones), ...
 *                + n (Q + H + C + U) / t) ... q|k|v, attention's output and log-sum-exp, the MLP before GELU
 *                + n C [2 n C: t > 1]     rows of all ranks; what comes from them
 *                + o (2 C + 2) + 2 t n    last stage: final norm (2: gpt2; 1: llama), losses per token (double)
 *                + T / t B V              last stage: logits exist for 512 tokens at a time
 *                                         [+ 3 (t + T / t) B: maxima and sums of slices]; others: 2 o
 *                + n (max(F, C) + Q) / t [+ o C]   gradients of activations, shared by all layers [dropout]
 *                + n C / 32 T             partial sums of the norms' gradients
 *                + A (o C + n)            first stage: gradient of the embedding's output of each micro-batch of a leaf
 *                + T / t shared + ...     T > 1: gradients of shared cells, one for each own slice of the tokens
 *   exchange     4 o C                    for each stage beside this one: messages, two each way
 *                + 1 or 2 E slices        first stage of several, tied: the head's gradient of a leaf (2: A < pp)
 *   snapshot     3 O                      own share of a checkpoint, copied at the boundary, written in the background
 *
 * With selective recomputation the cheap outputs exist once, not S L times; with full recomputation each of the S L
 * keeps o C (the layer's input), and all else exists once.
 *
 * compute: bf16 changes nothing of it: state, activations and gradients stay fp32, operands are rounded in the kernels'
 * workspace, which is the same for both.
 *
 * A small model that one worker holds whole reserves for every possible split of the leaves at once: when (depth of any
 * range + 4) P fits into MU_MEMORY_EAGER_BYTES, gradients are that depth, staging at least P, snapshot 3 P.
 *
 * In bytes: 4 MiB of scratch per thread, and MU_MEMORY_PROCESS_BYTES for the process. Buffers only grow: after a
 * time with fewer workers they stay as large as they were then. A second state comes on top while a worker that
 * holds one receives another (`peak`).
 *
 * Largest resident set measured (one thread each, tp = pp = 1), and this model, MiB: 6 layers of 384 channels, 1 or 2
 * workers: 611.6, model 612.1; 8 layers of 512, 2 workers: 883.5, model 882.0; 6 layers of 640 with 4096 tokens and
 * dropout, 3 workers: 769.7, model 767.5; 4 layers of 128, 2 or 4 workers: 86.7, model 92.1. `peak` has not been
 * measured, nor have other layouts.
 *
 * Source: the counting of Korthikanti et al. (arXiv 2205.05198, section 4: s b h (34 + 5 a s / h) bytes a layer in
 * fp16), here in fp32, without the attention matrix (recomputed tile by tile from the log-sum-exp, Dao et al.,
 * arXiv 2205.14135) and without dropout masks (recomputed from their counters). tests/unit/test_memory.c holds the
 * activations against what the model allocates. Pure. */
#ifndef MU_PLAN_MEMORY_H
#define MU_PLAN_MEMORY_H

#include <stdint.h>

#include "plan/job.h"
#include "plan/layout.h"
#include "plan/reshard.h"

/* EAGER: up to this much, buffers for any layout are reserved when the job is loaded. SCRATCH: of each thread. PROCESS:
 * fitted to measured resident sets: code and libraries (15 MiB), buffers of writer, data, connections. */
#define MU_MEMORY_EAGER_BYTES   (512ull << 20)
#define MU_MEMORY_STAGING_BYTES (256ull << 20)
#define MU_MEMORY_SCRATCH_BYTES (4ull << 20)
#define MU_MEMORY_PROCESS_BYTES (30ull << 20)

struct mu_memory_need {
    uint64_t state_bytes, copy_bytes, mirror_bytes, gradient_bytes, staging_bytes, activation_bytes, exchange_bytes,
        snapshot_bytes, scratch_bytes, process_bytes;
    uint64_t total_bytes; /* of the above: while training goes on */
    uint64_t peak_bytes;  /* while another state is received beside the one held */
};

/* What a working rank with `threads` threads needs, when leaves are spread evenly. The spec must have passed
 * mu_job_spec_check, the layout mu_layout_check. */
struct mu_memory_need mu_memory_of_rank(const struct mu_job_spec *spec, const struct mu_layout *layout, uint32_t rank,
                                        uint32_t threads);

/* Most that any rank of a layout needs. O(leaves log leaves + pp). *ret_stage (may
 * be NULL) receives its stage. */
struct mu_memory_need mu_memory_of_layout(const struct mu_job_spec *spec, const struct mu_layout *layout,
                                          uint32_t threads, uint32_t *ret_stage);

/* The same for `world` replicas of the whole model (1 to the leaves of the job). */
struct mu_memory_need mu_memory_of_worker(const struct mu_job_spec *spec, uint32_t world, uint32_t threads);

/* Activations and gradients of activations alone, bytes: of the whole model with one micro-batch at a time, and of a
 * stage with as many at once as its order of work holds when `micros` of them make a step. */
uint64_t mu_memory_activation_bytes(const struct mu_job_spec *spec);
uint64_t mu_memory_stage_activation_bytes(const struct mu_job_spec *spec, const struct mu_layout *layout,
                                          uint32_t stage, uint32_t micros);

/* What depends on the leaves of a replica only, for many calls with one job: the deepest stack of gradient buffers and
 * the number of inputs that an owner of chunks adds up. */
struct mu_memory_sums {
    uint32_t depth, any_depth, inputs, leaves_most;
};
/* The deepest stack of any range of leaves: one number for a job. O(leaves^2) up to 1024 leaves, then a bound. */
uint32_t mu_memory_any_depth(uint32_t leaves);
struct mu_memory_sums mu_memory_sums_of(const struct mu_job_spec *spec, uint32_t dp, uint32_t any_depth);
struct mu_memory_need mu_memory_of_stage(const struct mu_job_spec *spec, const struct mu_model_spec *model,
                                         const struct mu_layout *layout, uint32_t stage,
                                         const struct mu_memory_sums *sums, uint32_t threads);

/* What a taker needs for these moves of a feed (plan/feeding.h): room for gradients that arrive, and for parameters
 * that come out of updates where only moments are wanted; `beside`: the chunks themselves too, beside the share that it
 * steps with. */
uint64_t mu_memory_feed_bytes(const struct mu_model_spec *model, const struct mu_move *moves, uint32_t count,
                              bool beside);

#endif
