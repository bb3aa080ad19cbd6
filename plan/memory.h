/* The memory model of a CPU worker in fp32 with a replicated optimizer: what it allocates, from the job record alone.
 *
 * With P = flat_size, n = micro * length tokens, C channels, H heads, L layers, V vocabulary rounded up to 16,
 * A accumulate, W workers, in elements of 4 bytes:
 *
 *   state        3 P                      parameters and two moments (Adam)
 *   gradients    depth P                  one buffer per pending subtree of leaf sums (mu_tree_buffers); the lowest
 *                                         receives the reduced gradient
 *   staging      inputs P / W             partial sums received for the chunks it adds up, one for each subtree root of
 *                                         the other ranks; at most MU_MEMORY_STAGING_BYTES
 *   activations  L n (16 C + H + 4)       per layer: inputs and outputs of norms, q|k|v, attention's output and
 *                                         log-sum-exp, residuals, the MLP's hidden layer before and after GELU
 *                + n (3 C + 2) + 2 n      final norm, branch, losses per token (double)
 *                + min(n, 512) V          logits exist for 512 tokens at a time
 *                + n 8 C [+ n C]          gradients of activations, shared by all layers [one more with dropout]
 *                + A n (C + 1) + n C / 32 gradient of the embedding's output of each micro-batch of a leaf; partial
 *                                         sums of the norms' gradients
 *   snapshot     3 P / W                  own share of a checkpoint, copied at the boundary, written in the background
 *
 * A small model reserves for every possible layout at once: when (depth of any range + 4) P fits into
 * MU_MEMORY_EAGER_BYTES, gradients are that depth, staging at least P, snapshot 3 P.
 *
 * In bytes: 4 MiB of scratch per thread, and MU_MEMORY_PROCESS_BYTES for the process. Buffers only grow: after a
 * time with fewer workers they stay as large as they were then. A second state (3 P) comes on top while a worker that
 * holds one receives another (`peak`).
 *
 * Largest resident set measured (one thread each), and this model, MiB: 6 layers of 384 channels, 1 or 2 workers:
 * 611.6, model 612.1; 8 layers of 512, 2 workers: 883.5, model 882.0; 6 layers of 640 with 4096 tokens and dropout, 3
 * workers: 769.7, model 767.5; 4 layers of 128, 2 or 4 workers: 86.7, model 92.1. `peak` has not been measured.
 *
 * Source: the counting of Korthikanti et al. (arXiv 2205.05198, section 4: s b h (34 + 5 a s / h) bytes a layer in
 * fp16), here in fp32, without the attention matrix (recomputed tile by tile from the log-sum-exp, Dao et al.,
 * arXiv 2205.14135) and without dropout masks (recomputed from their counters). tests/unit/test_memory.c holds the
 * activations against what the model allocates. Pure. */
#ifndef MU_PLAN_MEMORY_H
#define MU_PLAN_MEMORY_H

#include <stdint.h>

#include "plan/job.h"

/* EAGER: up to this much, buffers for any layout are reserved when the job is loaded. SCRATCH: of each thread. PROCESS:
 * fitted to measured resident sets: code and libraries (15 MiB), buffers of writer, data, connections. */
#define MU_MEMORY_EAGER_BYTES   (512ull << 20)
#define MU_MEMORY_STAGING_BYTES (256ull << 20)
#define MU_MEMORY_SCRATCH_BYTES (4ull << 20)
#define MU_MEMORY_PROCESS_BYTES (30ull << 20)

struct mu_memory_need {
    uint64_t state_bytes, gradient_bytes, staging_bytes, activation_bytes, snapshot_bytes, scratch_bytes, process_bytes;
    uint64_t total_bytes; /* of the above: while training goes on */
    uint64_t peak_bytes;  /* while another state is received beside the one held */
};

/* What one of `world` workers (1 to the leaves of the job) with `threads` threads needs, the one with the most gradient
 * buffers when leaves are spread evenly. The spec must have passed mu_job_spec_check. O(leaves). */
struct mu_memory_need mu_memory_of_worker(const struct mu_job_spec *spec, uint32_t world, uint32_t threads);

/* Activations and gradients of activations alone, bytes. */
uint64_t mu_memory_activation_bytes(const struct mu_job_spec *spec);

#endif
