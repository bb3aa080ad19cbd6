/* The memory model of a CPU worker in fp32 with a replicated optimizer: what it allocates, from the job record alone.
 *
 * With P = flat_size, n = micro * length tokens, C channels, H heads, L layers, V vocabulary rounded up to 16,
 * A accumulate, W workers, in elements of 4 bytes:
 *
 *   state        3 P                      parameters and two moments (Adam)
 *   gradients    depth P                  one buffer per pending subtree of leaf sums (mu_tree_buffers); the lowest
 *                                         receives the reduced gradient. When the depth of any possible range fits
 *                                         into MU_MEMORY_EAGER_BYTES it is reserved at once
 *   staging      min(P, window)           received partial sums waiting to be added, when W > 1
 *   activations  L n (16 C + H + 4)       per layer: inputs and outputs of norms, q|k|v, attention's output and
 *                                         log-sum-exp, residuals, the MLP's hidden layer before and after GELU
 *                + n (3 C + 2) + 2 n      final norm, branch, losses per token (double)
 *                + min(n, 512) V          logits exist for 512 tokens at a time
 *                + n 8 C [+ n C]          gradients of activations, shared by all layers [one more with dropout]
 *                + A n (C + 1) + n C / 32 gradient of the embedding's output of each micro-batch of a leaf; partial
 *                                         sums of the norms' gradients
 *   snapshot     3 P / W                  own share of a checkpoint, copied at the boundary, written in the background
 *
 * and in bytes: 4 MiB of scratch per thread, and MU_MEMORY_PROCESS_BYTES for the process. A second state (3 P) comes on
 * top while a worker that holds one receives another (`peak`). Measured on the quickstart's job, 4 workers of one
 * thread: 82.5 MiB resident without and 91.1 MiB with a second state, model 82.9 and 92.6.
 *
 * Source: the counting of Korthikanti et al. (arXiv 2205.05198, section 4: s b h (34 + 5 a s / h) bytes a layer in
 * fp16), here in fp32, without the attention matrix (recomputed tile by tile from the log-sum-exp, Dao et al.,
 * arXiv 2205.14135) and without dropout masks (recomputed from their counters). tests/unit/test_memory.c holds the
 * activations against what the model allocates. Pure. */
#ifndef MU_PLAN_MEMORY_H
#define MU_PLAN_MEMORY_H

#include <stdint.h>

#include "plan/job.h"

/* EAGER: gradient buffers for any leaf range are reserved at load up to this much. SCRATCH: of each thread. PROCESS:
 * code and libraries (15 MiB measured), buffers of the checkpoint writer, the data and the connections. */
#define MU_MEMORY_EAGER_BYTES   (512ull << 20)
#define MU_MEMORY_STAGING_BYTES (256ull << 20)
#define MU_MEMORY_SCRATCH_BYTES (4ull << 20)
#define MU_MEMORY_PROCESS_BYTES (28ull << 20)

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
