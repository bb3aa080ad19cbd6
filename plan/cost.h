/* How long a step takes in a layout, and which layout to take: a closed-form model.
 *
 * With b = tokens of a micro-batch, L layers of a stage, T slices, t = tp, p = pp, d = dp, M leaves, A accumulate,
 * k = ceil(M / d) leaves of the busiest replica, m = A k micro-batches, n C numbers of a micro-batch's residual stream,
 * in seconds:
 *
 * - products: F(stage) = b (2 weights of its matrices / t + 2 length C / t a layer) / flops, backward 2 F. The head is
 *   on the last stage, its rows of the vocabulary divided by t. Full recomputation: another F of the layers.
 * - rows: memory traffic of norms, residuals, dropout, about 10 C + 8 C / t numbers a token and layer each way.
 * - fixed: per layer and direction, whatever the shape.
 * - tensor: per layer 4 exchanges forward and 6 backward, gather or all-to-all of n C numbers, of which (t - 1) / t
 *   leave each rank; head 2 for each of its 512 tokens. Full recomputation: 3 more a layer.
 * - pipeline: the first micro-batch through all stages, then m - 1 of the slowest:
 *   sum of F + B, 2 (p - 1) transfers, (m - 1) max(F + B).
 * - leaf sums: k - 1 additions of the column, 12 bytes an element; none with numerics: fast.
 * - reduce: mesh (d <= 32): (roots of a replica + 1) (d - 1) / d of the column, 4 bytes an element; tree:
 *   2 ceil(log2 d) columns, and when sharded the gather within a group. What the last micro-batch's backward pass hides
 * is not counted.
 * - update: 28 bytes an element of what the rank updates.
 * - tied: p > 1: gradient and copy of the embedding's slices.
 * - vote: 2 messages a level.
 *
 * Sources: Narayanan et al. (arXiv 2104.04473: bubble, 2 b s h a boundary), Korthikanti et al. (arXiv 2205.05198:
 * exchanges with sequence parallelism), Isaev et al., Calculon (SC'23: closed form of the whole). The rates rank
 * layouts; as a forecast they are rough. Pure and deterministic: IEEE additions, multiplications, divisions. */
#ifndef MU_PLAN_COST_H
#define MU_PLAN_COST_H

#include <stddef.h>
#include <stdint.h>

#include "plan/layout.h"

/* Of one worker; all above 0 (fixed and latency: 0 or more). */
struct mu_cost_rates {
    double flops;                         /* of matrix products, per second */
    double memory_bytes_per_second;       /* of sums and updates */
    double link_bytes_per_second;         /* between two workers */
    double latency_s;                     /* of one message */
    double fixed_s;                       /* per layer, direction and micro-batch */
    double slice_cost;                    /* share of a layer's products that each doubling of the slices adds */
    double embedding_layers, head_layers; /* what they cost, measured, in layers; 0: as the model says */
};

/* Those of one CPU thread and of sockets on one machine. Measured (docs/benchmarks.md): flops, 1.5e11 per second, from
 * the step of GPT-2 124M; link_bytes_per_second, 1.7 GB/s, from the data plane's all-to-all between processes.
 * Estimates: memory_bytes_per_second 1e10, latency_s 60 us, fixed_s 50 us, slice_cost 0.03. Where a job has run, flops
 * is what its workers reported (mu_cost_calibrate); the others stay. */
void mu_cost_rates_init(struct mu_cost_rates *rates);
/* Sets `flops` so that the busiest stage of `layout` takes `seconds` for its share of a leaf (forward and backward,
 * without exchanges). Leaves the rates alone when `seconds` is not a positive number. */
void mu_cost_calibrate(struct mu_cost_rates *rates, const struct mu_job_spec *spec, const struct mu_layout *layout,
                       double seconds);

struct mu_cost {
    double step_s;
    double compute_s;  /* of it: pipeline with its bubble, products, rows, tensor exchanges, transfers */
    double bubble_s;   /* of compute: the slowest stage waits */
    double transfer_s; /* of bubble: for what is on its way between stages */
    double tensor_s;   /* of compute: tensor exchanges of the slowest stage */
    double leaf_sum_s, reduce_s, update_s, tied_s, vote_s;
    double snapshot_s;      /* one copy for a checkpoint, at a boundary; not of the step */
    uint32_t slowest_stage; /* the first of them */
};
/* O(pp + dp log leaves). */
struct mu_cost mu_cost_of_layout(const struct mu_job_spec *spec, const struct mu_layout *layout,
                                 const struct mu_cost_rates *rates);

/* The same, where the busiest replica computes so many leaves. */
struct mu_cost mu_cost_of_leaves(const struct mu_job_spec *spec, const struct mu_layout *layout,
                                 const struct mu_cost_rates *rates, uint32_t busiest);

/* Layers over `pp` stages so that the slowest is as fast as possible, embedding and head counted; among equals the
 * later stages get more (earlier ones hold more micro-batches). slowness[pp]: how many times as long as usual a stage's
 * workers take to compute anything, above 0; NULL: all 1. */
void mu_cost_balance_stages(const struct mu_job_spec *spec, const struct mu_cost_rates *rates, uint32_t tp, uint32_t pp,
                            const double *slowness, uint16_t ret_stage_first[MU_STAGES_MAX + 1]);

/* `compute_s` of a step when the stages' workers are so slow. */
double mu_cost_of_stages(const struct mu_job_spec *spec, const struct mu_layout *layout,
                         const struct mu_cost_rates *rates, const double *slowness);

/* What a rank of the stage computes, in whole layers: its layers, embedding and head, divided by tp as products and
 * rows are; exchanges left out. Seconds over this are a worker's speed, whichever stage it was in. */
double mu_cost_stage_layers(const struct mu_job_spec *spec, const struct mu_model_spec *model,
                            const struct mu_cost_rates *rates, const struct mu_layout *layout, uint32_t stage);

enum {
    MU_CHOICE_GAIN_MIN_PERCENT = 3, /* a layout other than the old one must save so much of the step */
    MU_CHOICE_MARGIN_PERCENT = 3,   /* and each of tensor and pipeline parallelism so much to be used at all: what the
                                       model does not know costs something */
};

/* The fastest layout of at most `workers` working ranks (all of them up to workers.max; spares already taken away) that
 * has the degrees the job gives and fits into `memory_bytes` of each worker (0: unknown) with `threads` threads. In
 * this order: at least workers.min ranks, where layouts allow; two replicas of everything (dp > 1) where the optimizer
 * is not sharded; the shorter step by mu_cost_of_layout; fewer ranks, stages, slices. `old` (NULL: none) is kept, with
 * no idle ranks, when it is still possible and no other is MU_CHOICE_GAIN_MIN_PERCENT faster. Degrees that are given
 * are met exactly.
 *
 * MU_ERR_UNAVAILABLE: too few workers for the given degrees, or too little memory in any layout. `text` then says what
 * is short and by how much, else what was chosen. */
enum mu_status mu_layout_choose(const struct mu_job_spec *spec, const struct mu_cost_rates *rates, uint32_t workers,
                                uint64_t memory_bytes, uint32_t threads, const struct mu_layout *old,
                                struct mu_layout *ret_layout, char *text, size_t text_size) MU_WARN_UNUSED;

#endif
