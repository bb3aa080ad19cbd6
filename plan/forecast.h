/* How long a step takes on a cluster of accelerators, and how much memory it needs: a closed form for plans before
 * there is anything to measure. (plan/cost.h is for the layouts of a job that runs.)
 *
 * With b = sequences of a micro-batch, s tokens, h channels, F width of the MLP (U = F, or 2 F with a gate), L layers,
 * V vocabulary, t, p, d degrees, m = B / (b d) micro-batches:
 *
 *   products    each of the four matrix products of a layer by its own FLOPs f = 2 b s n k:  f / (peak e f / (f + f0)):
 *               small products are less efficient; backward twice as much
 *   attention   4 b s^2 h / t FLOPs; unfused, the scores (b a s^2 / t numbers) also pass `score_passes` times through
 *               memory; fused (flash) not, but backward recomputes (Dao et al., arXiv 2205.14135)
 *   rows        (10 + 8 / t) 2 b s h bytes forward, twice that backward; with sequence parallelism 10 / t
 *   tensor      two all-reduces of 2 b s h bytes a layer forward, two backward, two more with full recomputation
 *   pipeline    2 b s h bytes a boundary, 1 / t of them from each device, gathered in the node; the slowest stage m
 * times, the others (p - 1) times: bubble, divided by the number of virtual stages (Narayanan et al., arXiv 2104.04473)
 *   data        reduce-scatter and all-gather of the gradients, 2 (n - 1) / n of them: inside the node, then over
 * rails; less `data_overlap` zero3       instead: every tensor's parameters gathered twice and its gradient scattered,
 * by rings over all devices, each of which takes (n - 1) hops head, update, tied embedding
 *
 * Collectives: bytes (n - 1) / n / rate + (n - 1) hops (ring), or log2 n hops where a tree is faster (NCCL's
 * graph/tuning.cc). Memory: Korthikanti et al. (arXiv 2205.05198). Pure and deterministic.
 *
 * How good it is, untuned and calibrated, against published runs: tests/unit/test_forecast.c, docs/planning.md. */
#ifndef MU_PLAN_FORECAST_H
#define MU_PLAN_FORECAST_H

#include <stdbool.h>
#include <stdint.h>

#include "plan/cluster.h"
#include "plan/job.h"

/* What of the data sheet is reached. A calibration changes them (mu_forecast_calibrate). */
struct mu_forecast_rates {
    double flops_share;  /* e: of peak, by large products */
    double flops_half;   /* f0: FLOPs of a product at which half of that is reached, on 312 TFLOP/s; grows with peak */
    double memory_share; /* of the memory's rate */
    double link_share;   /* of NVLink's rate */
    double nic_share;    /* of the NIC's rate */
    double launch_s;     /* of each kernel: about 8 a layer forward, 16 backward */
    double hop_s;        /* one hop of a collective */
    double score_passes; /* unfused attention */
    double straggler_share; /* a step waits for the slowest of many devices: times this */
};
void mu_forecast_rates_init(struct mu_forecast_rates *rates);

/* The same as rates of one of a job's workers (plan/cost.h), where its GPU computes in bf16. */
void mu_cost_rates_of_device(struct mu_cost_rates *rates, const struct mu_device_type *device);
/* Before anything was measured: those of a CPU worker (mu_cost_rates_init); for a job in bf16, which GPUs alone
 * compute, those of an H100. */
void mu_cost_rates_of_job(struct mu_cost_rates *rates, const struct mu_job_spec *spec);

/* What is run where. */
struct mu_forecast_plan {
    uint32_t tp, pp, dp;
    uint32_t micro;   /* sequences in a micro-batch */
    uint32_t virtual; /* stages on each device, interleaved; 1 */
    enum mu_recompute recompute;
    bool sequence_parallel;
    bool sharded; /* optimizer (ZeRO-1) */
    bool zero3;   /* parameters too; tp = pp = 1 */
    bool fused_attention;
    bool bf16;           /* else fp32 */
    double data_overlap; /* part of the gradients' exchange that backward hides: 0 to 1 */
};

struct mu_forecast_model {
    struct mu_model_config config; /* resolved */
    uint32_t sequences, length;    /* of the global batch */
};

struct mu_forecast {
    double step_s;     /* sum of what follows, times straggler_share */
    double cautious_s; /* what to compare plans by: step_s and 3 % for each doubling of the stages, because real
                          pipelines lose more than the model knows of more often than less */
    double compute_s, attention_s, rows_s, recompute_s, head_s; /* of the slowest stage, all micro-batches */
    double tensor_s, pipeline_s, bubble_s, data_s, update_s, tied_s;
    const char *bottleneck; /* name of the largest term but the products */
    double model_flops;     /* of the step, all devices, without recomputation */
    double mfu;             /* model FLOPs over peak */
    double parameter_bytes, gradient_bytes, optimizer_bytes, activation_bytes, memory_bytes; /* of the fullest device */
};

/* What a device's network card gets in an exchange of all groups of a kind at once, bytes per second; 0: as the closed
 * form says (mu_cluster_nic_rate). plan/contention.h works it out for a placement. */
struct mu_forecast_network {
    double tensor, stage, data;
};

/* `plan` must fit: mu_forecast_check. `network` NULL: the closed form. */
struct mu_forecast mu_forecast_of(const struct mu_forecast_model *model, const struct mu_cluster *cluster,
                                  const struct mu_forecast_plan *plan, const struct mu_forecast_rates *rates,
                                  const struct mu_forecast_network *network);
/* MU_ERR_INVALID: degrees that do not divide heads, layers, batch or devices. */
enum mu_status mu_forecast_check(const struct mu_forecast_model *model, const struct mu_cluster *cluster,
                                 const struct mu_forecast_plan *plan, struct mu_error *err) MU_WARN_UNUSED;

/* How many of the `n` members of a group share a node (or what NVLink joins of it) when each of them stands for `inner`
 * neighbouring devices. */
uint32_t mu_forecast_in_node(const struct mu_device_type *device, uint32_t n, uint32_t inner);

/* Parameters of the model, embeddings included. */
double mu_forecast_parameters(const struct mu_model_config *config);

/* A measured step. */
struct mu_forecast_sample {
    struct mu_forecast_model model;
    const struct mu_cluster *cluster;
    struct mu_forecast_plan plan;
    double step_s;
};
/* Rates that fit the samples: mean of |ln(forecast / measured)|, each at most 0.4 so that outliers do not lead, plus a
 * penalty for leaving the rates given (a few samples change little). Coordinate descent, deterministic. */
void mu_forecast_calibrate(const struct mu_forecast_sample *samples, uint32_t count, struct mu_forecast_rates *rates);

#endif
