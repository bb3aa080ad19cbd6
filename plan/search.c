#include "plan/search.h"

#include "plan/young.h"

#define SECONDS_PER_DAY 86400.0

void mu_search_limits_init(struct mu_search_limits *limits)
{
    *limits = (struct mu_search_limits){.bf16 = true, .fused_attention = true, .data_overlap = 0.5, .headroom = 0.1};
}

struct mu_forecast_plan mu_search_plan(const struct mu_search_limits *limits, uint32_t tp, uint32_t pp, uint32_t dp,
                                       uint32_t micro, enum mu_recompute recompute)
{
    return (struct mu_forecast_plan){.tp = tp,
                                     .pp = pp,
                                     .dp = dp,
                                     .micro = micro,
                                     .virtual = 1,
                                     .recompute = recompute,
                                     .sequence_parallel = tp > 1,
                                     .sharded = dp > 1,
                                     .fused_attention = limits->fused_attention,
                                     .bf16 = limits->bf16,
                                     .data_overlap = limits->data_overlap};
}

/* ---- failures ---- */

struct mu_goodput mu_goodput_of(const struct mu_forecast_model *model, const struct mu_cluster *cluster,
                                const struct mu_forecast_plan *plan, const struct mu_forecast *forecast)
{
    double devices = (double)plan->tp * plan->pp * plan->dp, parameters = mu_forecast_parameters(&model->config);
    struct mu_goodput g = {.mtbf_s = cluster->device_mtbf_hours * 3600 / devices, .state_bytes = 12 * parameters};
    double replicas = plan->sharded || plan->zero3 ? 1 : plan->dp; /* who copies: all, or each its share */
    g.stall_s = g.state_bytes * replicas / devices / cluster->device.host_bytes_per_second;
    g.write_s = g.state_bytes / cluster->storage_write_bytes_per_second;
    g.restart_s = cluster->restart_s + g.state_bytes / cluster->storage_read_bytes_per_second;
    g.interval_s = mu_young_daly_interval_s(g.stall_s, g.mtbf_s);
    if (g.interval_s < g.write_s)
        g.interval_s = g.write_s;
    if (g.interval_s < forecast->step_s) /* a boundary is needed */
        g.interval_s = forecast->step_s;
    g.share = mu_young_goodput(g.interval_s, g.stall_s, g.mtbf_s, g.restart_s);
    return g;
}

/* ---- the list ---- */

/* Faster first; among equals what is simpler: fewer stages, a smaller tensor group, less recomputation, larger
 * micro-batches. */
bool mu_search_better(const struct mu_candidate *a, const struct mu_candidate *b)
{
    if (a->tokens_per_day != b->tokens_per_day)
        return a->tokens_per_day > b->tokens_per_day;
    if (a->plan.pp != b->plan.pp)
        return a->plan.pp < b->plan.pp;
    if (a->plan.tp != b->plan.tp)
        return a->plan.tp < b->plan.tp;
    if (a->plan.recompute != b->plan.recompute)
        return a->plan.recompute < b->plan.recompute;
    return a->plan.micro > b->plan.micro;
}

struct search {
    const struct mu_forecast_model *model;
    const struct mu_cluster *cluster;
    const struct mu_forecast_rates *rates;
    const struct mu_search_limits *limits;
    struct mu_candidate *best;
    uint32_t capacity;
    struct mu_search_result result;
};

static void insert(struct search *s, const struct mu_candidate *candidate)
{
    uint32_t at = s->result.count;
    while (at > 0 && mu_search_better(candidate, &s->best[at - 1]))
        at--;
    if (at == s->capacity)
        return;
    if (s->result.count < s->capacity)
        s->result.count++;
    for (uint32_t i = s->result.count - 1; i > at; i--)
        s->best[i] = s->best[i - 1];
    s->best[at] = *candidate;
}

void mu_search_weigh(const struct mu_forecast_model *model, const struct mu_cluster *cluster, struct mu_candidate *c)
{
    c->goodput = mu_goodput_of(model, cluster, &c->plan, &c->forecast);
    double tokens = (double)model->sequences * model->length;
    c->tokens_per_day = tokens / c->forecast.cautious_s * SECONDS_PER_DAY * c->goodput.share;
}

static void try_plan(struct search *s, const struct mu_forecast_plan *plan)
{
    struct mu_candidate c = {.plan = *plan};
    c.forecast = mu_forecast_of(s->model, s->cluster, plan, s->rates, NULL);
    s->result.tried++;
    if (c.forecast.memory_bytes > s->cluster->device.memory_bytes * (1 - s->limits->headroom)) {
        if (s->result.nearest.plan.tp == 0 || c.forecast.memory_bytes < s->result.nearest.forecast.memory_bytes)
            s->result.nearest = c;
        return;
    }
    s->result.fitting++;
    mu_search_weigh(s->model, s->cluster, &c);
    insert(s, &c);
}

/* ---- degrees ---- */

/* The most replicas that `most` allows and that divide the batch. */
static uint32_t replicas_for(const struct search *s, uint32_t most)
{
    uint32_t dp = most < s->model->sequences ? most : s->model->sequences;
    while (dp > 0 && s->model->sequences % dp != 0)
        dp--;
    return dp;
}

static bool allowed(uint32_t limit, uint32_t value)
{
    return limit == 0 || limit == value;
}

static void try_micro_batches(struct search *s, struct mu_forecast_plan plan)
{
    uint32_t own = s->model->sequences / plan.dp;
    for (plan.micro = 1; plan.micro <= own; plan.micro *= 2)
        for (int way = MU_RECOMPUTE_NONE; way <= MU_RECOMPUTE_FULL; way++) {
            struct mu_error err;
            plan.recompute = (enum mu_recompute)way;
            if (allowed(s->limits->micro, plan.micro) && mu_forecast_check(s->model, s->cluster, &plan, &err) == MU_OK)
                try_plan(s, &plan);
        }
}

static void try_grids(struct search *s)
{
    uint32_t devices = mu_cluster_devices(s->cluster), group_max = 2 * s->cluster->device.per_node;
    for (uint32_t tp = 1; tp <= group_max && tp <= devices; tp++)
        for (uint32_t pp = 1; pp <= s->model->config.layers && (uint64_t)tp * pp <= devices; pp++) {
            if (s->model->config.kv_heads % tp != 0 || !allowed(s->limits->tp, tp) || !allowed(s->limits->pp, pp))
                continue;
            uint32_t dp = s->limits->dp ? s->limits->dp : replicas_for(s, mu_cluster_groups(s->cluster, tp) / pp);
            if (dp == 0 || (uint64_t)tp * pp * dp > devices)
                continue;
            try_micro_batches(s, mu_search_plan(s->limits, tp, pp, dp, 1, MU_RECOMPUTE_NONE));
        }
}

enum mu_status mu_search(const struct mu_forecast_model *model, const struct mu_cluster *cluster,
                         const struct mu_forecast_rates *rates, const struct mu_search_limits *limits,
                         struct mu_candidate *candidates, uint32_t capacity, struct mu_search_result *ret_result,
                         struct mu_error *err)
{
    struct search s = {
        .model = model, .cluster = cluster, .rates = rates, .limits = limits, .best = candidates, .capacity = capacity};
    try_grids(&s);
    *ret_result = s.result;
    if (s.result.fitting > 0 && candidates[0].tokens_per_day > 0)
        return MU_OK;
    if (s.result.fitting > 0)
        return mu_fail(err, MU_ERR_UNAVAILABLE,
                       "no layout makes progress: a failure every %.3g s, and a restart takes %.3g s",
                       candidates[0].goodput.mtbf_s, candidates[0].goodput.restart_s);
    if (s.result.tried == 0)
        return mu_fail(err, MU_ERR_UNAVAILABLE,
                       "no layout divides %u heads, %u layers and a batch of %u over %u devices as asked",
                       model->config.heads, model->config.layers, model->sequences, mu_cluster_devices(cluster));
    const struct mu_candidate *n = &s.result.nearest;
    return mu_fail(err, MU_ERR_UNAVAILABLE,
                   "no layout fits: the one that needs least (tp %u pp %u dp %u, micro %u) needs %.1f GB of each %s, "
                   "which has %.1f of which %.0f %% stay free",
                   n->plan.tp, n->plan.pp, n->plan.dp, n->plan.micro, n->forecast.memory_bytes * 1e-9,
                   cluster->device.name, cluster->device.memory_bytes * 1e-9, limits->headroom * 100);
}
