#include "plan/cost.h"

#include "plan/balance.h"
#include "plan/cost_internal.h"

enum {
    ELEMENT = sizeof(float),      /* bytes */
    SUM_BYTES = 3 * ELEMENT,      /* an addition of gradients: two read, one written */
    UPDATE_BYTES = 7 * ELEMENT,   /* AdamW: parameter, gradient, moments read; parameter and moments written */
    SNAPSHOT_BYTES = 6 * ELEMENT, /* parameter and moments, read and written */
    FORWARD_EXCHANGES = 4,        /* of a layer: gather and scatter around attention and MLP */
    BACKWARD_EXCHANGES = 6,       /* the same, and the inputs of two products are gathered again */
    AGAIN_EXCHANGES = 3,          /* full recomputation: forward, but for the last one */
    HEAD_TOKENS = 512,            /* tokens whose loss is computed at one time */
    EMBEDDING_PASSES = 2,         /* forward, backward: as long */
    HEAD_PASSES = 3,              /* forward, backward: twice as long */
};

void mu_cost_rates_init(struct mu_cost_rates *rates)
{
    *rates = (struct mu_cost_rates){.flops = 1.5e11,
                                    .memory_bytes_per_second = 1e10,
                                    .link_bytes_per_second = 1.7e9,
                                    .latency_s = 60e-6,
                                    .fixed_s = 50e-6,
                                    .slice_cost = 0.03};
}

static double log2_ceil(uint32_t n)
{
    uint32_t levels = 0;
    for (uint64_t reach = 1; reach < n; reach <<= 1)
        levels++;
    return levels;
}

struct mu_cost_unit mu_cost_unit_of(const struct mu_job_spec *spec, const struct mu_model_spec *model,
                                    const struct mu_cost_rates *r, uint32_t tp)
{
    const struct mu_model_config *m = &model->config;
    double tokens = (double)spec->batch.micro * spec->batch.length, c = m->channels;
    double matrices = (double)model->extents[MU_CELL_L].size * m->slices; /* biases are few */
    double flops = tokens * (2 * matrices + 2.0 * spec->batch.length * c) / tp;
    bool full = spec->parallel.recompute == MU_RECOMPUTE_FULL;
    double rows = tokens * ELEMENT * (10 * c + 8 * c / tp) / r->memory_bytes_per_second;
    double vocabulary = (double)mu_model_vocab_slice_rows(m) * (m->slices / tp);
    double wide = tokens * c * ELEMENT; /* all rows of the residual stream, bytes */
    double exchange = tp > 1 ? r->latency_s * (1 + log2_ceil(tp)) + wide * (tp - 1) / tp / r->link_bytes_per_second : 0;
    double layer = flops / r->flops * (1 + r->slice_cost * log2_ceil(m->slices)) + rows + r->fixed_s;
    double both_ways = layer * (full ? 4 : 3);
    return (struct mu_cost_unit){
        .layer = layer,
        .head = r->head_layers > 0 ? r->head_layers * both_ways / HEAD_PASSES
                                   : 2 * tokens * vocabulary * c / r->flops + r->fixed_s,
        .embedding = r->embedding_layers > 0 ? r->embedding_layers * both_ways / EMBEDDING_PASSES
                                             : 3 * wide / tp / r->memory_bytes_per_second + r->fixed_s,
        .exchange = exchange,
        .head_exchanges = tp > 1 ? 2 * ((tokens + HEAD_TOKENS - 1) / HEAD_TOKENS) * r->latency_s : 0,
        .transfer = r->latency_s + wide / tp / r->link_bytes_per_second,
        .backward = full ? 3 : 2,
        .exchange_count = FORWARD_EXCHANGES + BACKWARD_EXCHANGES + (full ? AGAIN_EXCHANGES : 0),
    };
}

/* Forward and backward of one micro-batch through a stage: what it computes, and its tensor exchanges. */
static double compute_seconds(const struct mu_cost_unit *u, double layers, bool first, bool last)
{
    return layers * u->layer * (1 + u->backward) + (first ? EMBEDDING_PASSES * u->embedding : 0) +
           (last ? HEAD_PASSES * u->head : 0);
}

static double tensor_seconds(const struct mu_cost_unit *u, double layers, bool first, bool last)
{
    double exchanges = layers * u->exchange_count + (first ? 2 : 0) + (last ? 2 : 0);
    return exchanges * u->exchange + (last ? u->head_exchanges : 0);
}

static double stage_layers(const struct mu_layout *layout, uint32_t stage)
{
    return layout->stage_first[stage + 1] - layout->stage_first[stage];
}

static double seconds_of(const struct mu_cost_unit *u, const struct mu_layout *layout, uint32_t stage,
                         const double *slowness, double *ret_tensor)
{
    double layers = stage_layers(layout, stage);
    bool first = stage == 0, last = stage + 1 == layout->pp;
    *ret_tensor = tensor_seconds(u, layers, first, last);
    return compute_seconds(u, layers, first, last) * (slowness ? slowness[stage] : 1) + *ret_tensor;
}

double mu_cost_stage_layers(const struct mu_job_spec *spec, const struct mu_model_spec *model,
                            const struct mu_cost_rates *rates, const struct mu_layout *layout, uint32_t stage)
{
    struct mu_cost_unit u = mu_cost_unit_of(spec, model, rates, layout->tp);
    struct mu_cost_unit whole = mu_cost_unit_of(spec, model, rates, 1);
    return compute_seconds(&u, stage_layers(layout, stage), stage == 0, stage + 1 == layout->pp) /
           compute_seconds(&whole, 1, false, false);
}

void mu_cost_balance(const struct mu_cost_unit *u, uint32_t layers, uint32_t pp, const double *slowness,
                     uint16_t *ret_stage_first)
{
    uint16_t counts[MU_STAGES_MAX];
    MU_ASSERT(pp >= 1 && pp <= MU_STAGES_MAX && pp <= layers);
    for (uint32_t p = 0; p < pp; p++)
        counts[p] = 1;
    /* Layers are all alike: giving each to the stage that is then fastest is best. */
    for (uint32_t given = pp; given < layers; given++) {
        uint32_t best = 0;
        double best_seconds = 0;
        for (uint32_t p = 0; p < pp; p++) {
            bool first = p == 0, last = p + 1 == pp;
            double seconds = compute_seconds(u, counts[p] + 1, first, last) * (slowness ? slowness[p] : 1) +
                             tensor_seconds(u, counts[p] + 1, first, last);
            if (first || seconds <= best_seconds) {
                best = p;
                best_seconds = seconds;
            }
        }
        counts[best]++;
    }
    ret_stage_first[0] = 0;
    for (uint32_t p = 0; p < pp; p++)
        ret_stage_first[p + 1] = (uint16_t)(ret_stage_first[p] + counts[p]);
}

void mu_cost_balance_stages(const struct mu_job_spec *spec, const struct mu_cost_rates *rates, uint32_t tp, uint32_t pp,
                            const double *slowness, uint16_t ret_stage_first[MU_STAGES_MAX + 1])
{
    struct mu_model_spec model;
    mu_model_spec_init(&model, &spec->model);
    struct mu_cost_unit u = mu_cost_unit_of(spec, &model, rates, tp);
    mu_cost_balance(&u, model.config.layers, pp, slowness, ret_stage_first);
}

/* Largest column of any stage, elements (t = 0). */
static double column_elements(const struct mu_model_spec *model, const struct mu_layout *layout)
{
    double slices = (double)model->config.slices / layout->tp, most = 0;
    const struct mu_cell_extent *e = model->extents;
    double layer = slices * (double)e[MU_CELL_L].size + (double)e[MU_CELL_L_SHARED].size;
    for (uint32_t p = 0; p < layout->pp; p++) {
        double column = layer * (layout->stage_first[p + 1] - layout->stage_first[p]);
        if (p == 0)
            column += slices * (double)e[MU_CELL_E].size + (double)e[MU_CELL_E_SHARED].size;
        if (p + 1 == layout->pp)
            column += slices * (double)e[MU_CELL_F].size + (double)e[MU_CELL_F_SHARED].size;
        most = column > most ? column : most;
    }
    return most;
}

/* Sums over replicas and what of them the last backward pass does not hide. `roots`: of all replicas together. */
static double reduce_seconds(const struct mu_cost_rates *r, uint32_t dp, double roots, double column, double hidden_s)
{
    if (dp == 1)
        return 0;
    double bytes = column * ELEMENT, levels = log2_ceil(dp), up, down;
    if (dp <= MU_MESH_WORLD_MAX) {
        down = bytes * (dp - 1) / dp / r->link_bytes_per_second;
        up = down * roots / dp;
    } else {
        up = down = bytes * levels / r->link_bytes_per_second;
    }
    double exposed = up > hidden_s ? up - hidden_s : 0;
    return exposed + down + 2 * r->latency_s * (1 + levels);
}

/* Sum and slowest of the stages. */
static void add_stages(struct mu_cost_grid *g, const struct mu_layout *layout, const double *slowness)
{
    for (uint32_t p = 0; p < layout->pp; p++) {
        double tensor, seconds = seconds_of(&g->unit, layout, p, slowness, &tensor);
        g->sum_s += seconds;
        if (seconds <= g->slowest_s)
            continue;
        g->slowest_s = seconds;
        g->slowest_stage = p;
        g->tensor_s = tensor;
    }
}

struct mu_cost_grid mu_cost_grid_of(const struct mu_job_spec *spec, const struct mu_model_spec *model,
                                    const struct mu_layout *layout, const struct mu_cost_rates *r)
{
    struct mu_cost_grid g = {.unit = mu_cost_unit_of(spec, model, r, layout->tp),
                             .column = column_elements(model, layout)};
    add_stages(&g, layout, NULL);
    if (layout->pp > 1 && mu_model_is_tied(&model->config))
        g.tied = (double)model->extents[MU_CELL_E].size * model->config.slices / layout->tp;
    return g;
}

uint32_t mu_cost_busiest(const struct mu_job_spec *spec, uint32_t dp)
{
    return (mu_job_leaves(spec) + dp - 1) / dp;
}

/* The first micro-batch through all stages, then the others of the busiest replica through the slowest. */
static double pipeline_seconds(const struct mu_job_spec *spec, const struct mu_cost_grid *g,
                               const struct mu_layout *layout, uint32_t busiest)
{
    double micros = (double)spec->batch.accumulate * busiest;
    return g->sum_s + (micros - 1) * g->slowest_s + 2.0 * (layout->pp - 1) * g->unit.transfer;
}

double mu_cost_of_stages(const struct mu_job_spec *spec, const struct mu_layout *layout, const struct mu_cost_rates *r,
                         const double *slowness)
{
    struct mu_model_spec model;
    mu_model_spec_init(&model, &spec->model);
    struct mu_cost_grid g = {.unit = mu_cost_unit_of(spec, &model, r, layout->tp)};
    add_stages(&g, layout, slowness);
    return pipeline_seconds(spec, &g, layout, mu_cost_busiest(spec, layout->dp));
}

/* Updated parameters within a shard group, where the sums have gone to everybody. */
static double gather_seconds(const struct mu_cost_rates *r, double shards, double column)
{
    return column * ELEMENT * (shards - 1) / shards / r->link_bytes_per_second;
}

struct mu_cost mu_cost_of_grid(const struct mu_job_spec *spec, const struct mu_cost_grid *g,
                               const struct mu_layout *layout, double roots, uint32_t busiest,
                               const struct mu_cost_rates *r)
{
    double micros = (double)spec->batch.accumulate * busiest, world = mu_layout_working(layout);
    double last_backward = g->slowest_s * g->unit.backward / (1 + g->unit.backward);
    double shards = layout->sharded ? mu_layout_shard_group(layout->dp, layout->dp - 1).count : 1;
    bool mirrored = spec->parallel.redundancy == MU_REDUNDANCY_BUDDY && mu_layout_buddy_group(layout) > 1;
    struct mu_cost cost = {
        .compute_s = pipeline_seconds(spec, g, layout, busiest),
        .transfer_s = 2.0 * (layout->pp - 1) * g->unit.transfer,
        .tensor_s = micros * g->tensor_s,
        .leaf_sum_s = spec->numerics == MU_NUMERICS_FAST
                          ? 0 /* one buffer */
                          : (busiest - 1) * g->column * SUM_BYTES / r->memory_bytes_per_second,
        .reduce_s = reduce_seconds(r, layout->dp, roots, g->column, last_backward) +
                    (layout->dp > MU_MESH_WORLD_MAX ? gather_seconds(r, shards, g->column) : 0),
        .update_s = g->column * UPDATE_BYTES * (mirrored ? 2 : 1) / shards / r->memory_bytes_per_second,
        .tied_s = g->tied > 0 ? 2 * (r->latency_s + g->tied * ELEMENT / r->link_bytes_per_second) : 0,
        .vote_s = world > 1 ? 2 * r->latency_s * log2_ceil((uint32_t)world) : 0,
        .snapshot_s = g->column * SNAPSHOT_BYTES / layout->dp / r->memory_bytes_per_second,
        .slowest_stage = g->slowest_stage,
    };
    cost.bubble_s = cost.compute_s - micros * g->slowest_s;
    cost.step_s = cost.compute_s + cost.leaf_sum_s + cost.reduce_s + cost.update_s + cost.tied_s + cost.vote_s;
    return cost;
}

double mu_cost_roots(const struct mu_job_spec *spec, uint32_t dp)
{
    if (spec->numerics == MU_NUMERICS_FAST)
        return dp;
    return dp > 1 && dp <= MU_MESH_WORLD_MAX ? mu_balance_root_count(mu_job_leaves(spec), dp, NULL) : dp;
}

struct mu_cost mu_cost_of_leaves(const struct mu_job_spec *spec, const struct mu_layout *layout,
                                 const struct mu_cost_rates *rates, uint32_t busiest)
{
    struct mu_model_spec model;
    mu_model_spec_init(&model, &spec->model);
    struct mu_cost_grid g = mu_cost_grid_of(spec, &model, layout, rates);
    return mu_cost_of_grid(spec, &g, layout, mu_cost_roots(spec, layout->dp), busiest, rates);
}

struct mu_cost mu_cost_of_layout(const struct mu_job_spec *spec, const struct mu_layout *layout,
                                 const struct mu_cost_rates *rates)
{
    return mu_cost_of_leaves(spec, layout, rates, mu_cost_busiest(spec, layout->dp));
}

void mu_cost_calibrate(struct mu_cost_rates *rates, const struct mu_job_spec *spec, const struct mu_layout *layout,
                       double seconds)
{
    if (!(seconds > 0) || seconds > 1e9)
        return;
    struct mu_model_spec model;
    mu_model_spec_init(&model, &spec->model);
    /* Two evaluations give the part that depends on the speed of products, and the rest. */
    struct mu_cost_rates fast = *rates;
    fast.flops = rates->flops * 1e6;
    struct mu_cost_unit slow_unit = mu_cost_unit_of(spec, &model, rates, layout->tp);
    struct mu_cost_unit fast_unit = mu_cost_unit_of(spec, &model, &fast, layout->tp);
    double with = 0, without = 0;
    for (uint32_t p = 0; p < layout->pp; p++) {
        bool first = p == 0, last = p + 1 == layout->pp;
        double now = compute_seconds(&slow_unit, stage_layers(layout, p), first, last);
        if (now <= with)
            continue;
        with = now;
        without = compute_seconds(&fast_unit, stage_layers(layout, p), first, last);
    }
    double wanted = seconds / spec->batch.accumulate, products = with - without;
    /* What is not products cannot take more than the whole: then the machine is fast and the fixed part is not. */
    double left = wanted - without > wanted / 10 ? wanted - without : wanted / 10;
    rates->flops *= products / left;
}
