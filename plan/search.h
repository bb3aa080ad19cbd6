/* Which layout to run on a cluster: all that fit, ranked by tokens a day at the goodput that failures leave.
 *
 * Degrees: tp divides heads and the MLP, up to two nodes; pp up to the layers; dp uses all other devices of the cluster
 * that the batch allows; micro-batches are powers of two; all three ways of recomputation; optimizer sharded. Pure,
 * deterministic, no allocation. */
#ifndef MU_PLAN_SEARCH_H
#define MU_PLAN_SEARCH_H

#include "plan/forecast.h"

/* 0: any. */
struct mu_search_limits {
    uint32_t tp, pp, dp, micro;
    bool bf16, fused_attention;
    double data_overlap;
    double headroom; /* part of a device's memory that stays free: 0.1 */
};
void mu_search_limits_init(struct mu_search_limits *limits);

/* What is run in these degrees. */
struct mu_forecast_plan mu_search_plan(const struct mu_search_limits *limits, uint32_t tp, uint32_t pp, uint32_t dp,
                                       uint32_t micro, enum mu_recompute recompute);

/* What failures leave. Checkpoints are copied at a boundary (stall), written in the background, and loaded again. */
struct mu_goodput {
    double mtbf_s, state_bytes;
    double stall_s, write_s, restart_s;
    double interval_s; /* Daly's, but never shorter than a write */
    double share;      /* of the time that is progress (plan/young.h) */
};
struct mu_goodput mu_goodput_of(const struct mu_forecast_model *model, const struct mu_cluster *cluster,
                                const struct mu_forecast_plan *plan, const struct mu_forecast *forecast);

struct mu_candidate {
    struct mu_forecast_plan plan;
    struct mu_forecast forecast;
    struct mu_goodput goodput;
    double tokens_per_day; /* by the cautious step time */
};

/* Fills goodput and tokens_per_day by plan and forecast. */
void mu_search_weigh(const struct mu_forecast_model *model, const struct mu_cluster *cluster, struct mu_candidate *c);
bool mu_search_better(const struct mu_candidate *a, const struct mu_candidate *b);

struct mu_search_result {
    uint32_t tried, fitting, count; /* candidates written: the best first */
    struct mu_candidate nearest;    /* of those that do not fit, the one that needs least memory; if fitting is 0 */
};

/* Writes at most `capacity` (at least 1) candidates. MU_ERR_UNAVAILABLE: no degrees divide as they must, none fits
 * (then `nearest` says what is short), or failures leave no progress; the text says which. */
enum mu_status mu_search(const struct mu_forecast_model *model, const struct mu_cluster *cluster,
                         const struct mu_forecast_rates *rates, const struct mu_search_limits *limits,
                         struct mu_candidate *candidates, uint32_t capacity, struct mu_search_result *ret_result,
                         struct mu_error *err) MU_WARN_UNUSED;

#endif
