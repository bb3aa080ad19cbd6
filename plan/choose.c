#include "plan/cost.h"

#include "plan/cost_internal.h"
#include "plan/memory.h"
#include "plan/text.h"

enum {
    DENSE_COUNTS = 64, /* numbers of leaves a replica that are all tried; beyond, every tenth part */
    DENSE_STAGES = 16, /* numbers of stages that are all tried; beyond, those that change the largest stage */
    COUNTS_MAX = 256,
    MIB = 1 << 20,
};

/* How good a layout is: compared field by field, in this order. */
struct merit {
    bool enough;      /* at least workers.min ranks */
    bool two_holders; /* every chunk has two holders, or the optimizer is sharded */
    double seconds;   /* of a step, with the margins */
    uint32_t ranks, pp, tp;
};

struct search {
    const struct mu_job_spec *spec;
    const struct mu_cost_rates *rates;
    struct mu_model_spec model;
    uint32_t workers, leaves, threads, any_depth;
    uint64_t memory_bytes;
    double roots[MU_MESH_WORLD_MAX + 1]; /* of each mesh; 0: not known yet */
    bool found;
    struct mu_layout best;
    struct merit best_merit;
    double best_seconds;
    /* The layout that needs least, when none fits. */
    uint64_t least_bytes;
    struct mu_layout least;
};

static bool better(const struct merit *a, const struct merit *b)
{
    if (a->enough != b->enough)
        return a->enough;
    if (a->two_holders != b->two_holders)
        return a->two_holders;
    if (a->seconds < b->seconds || a->seconds > b->seconds)
        return a->seconds < b->seconds;
    if (a->ranks != b->ranks)
        return a->ranks < b->ranks;
    return a->pp != b->pp ? a->pp < b->pp : a->tp < b->tp;
}

static double roots_of(struct search *s, uint32_t dp)
{
    if (dp > MU_MESH_WORLD_MAX)
        return dp;
    if (s->roots[dp] == 0)
        s->roots[dp] = mu_cost_roots(s->spec, dp);
    return s->roots[dp];
}

/* Most replicas with this tp and pp. */
static uint32_t replicas_max(const struct search *s, uint32_t tp, uint32_t pp)
{
    uint32_t most = s->workers / tp / pp;
    return most < s->leaves ? most : s->leaves;
}

static struct merit merit_of(struct search *s, const struct mu_cost_grid *grid, const struct mu_layout *layout,
                             double *ret_seconds)
{
    uint32_t ranks = mu_layout_working(layout), least = s->spec->workers.min;
    double seconds =
        mu_cost_of_grid(s->spec, grid, layout, roots_of(s, layout->dp), mu_cost_busiest(s->spec, layout->dp), s->rates)
            .step_s;
    const double margin = 1 + MU_CHOICE_MARGIN_PERCENT / 100.0;
    *ret_seconds = seconds;
    seconds *= layout->tp > 1 ? margin : 1;
    seconds *= layout->pp > 1 ? margin : 1;
    seconds *= layout->dp < replicas_max(s, layout->tp, layout->pp) ? margin : 1;
    return (struct merit){.enough = ranks >= (least < s->workers ? least : s->workers),
                          .two_holders = layout->dp > 1 || layout->sharded ||
                                         (ranks > 1 && s->spec->parallel.redundancy == MU_REDUNDANCY_BUDDY),
                          .seconds = seconds,
                          .ranks = ranks,
                          .pp = layout->pp,
                          .tp = layout->tp};
}

/* Bytes that the neediest rank needs. */
static uint64_t need_of(const struct search *s, const struct mu_layout *layout, const struct mu_memory_sums *sums)
{
    uint64_t most = 0;
    for (uint32_t p = 0; p < layout->pp; p++) {
        uint64_t bytes = mu_memory_of_stage(s->spec, &s->model, layout, p, sums, s->threads).total_bytes;
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* Does it fit? Remembers the one that needs least. */
static bool fits(struct search *s, const struct mu_layout *layout)
{
    if (s->memory_bytes == 0)
        return true;
    struct mu_memory_sums sums = mu_memory_sums_of(s->spec, layout->dp, s->any_depth);
    uint64_t bytes = need_of(s, layout, &sums);
    if (bytes < s->least_bytes) {
        s->least_bytes = bytes;
        s->least = *layout;
    }
    return bytes <= s->memory_bytes;
}

/* Can no number of replicas make these stages fit? One leaf a replica, with the most replicas, is the least. */
static bool hopeless(struct search *s, struct mu_layout *layout)
{
    if (s->memory_bytes == 0)
        return false;
    const struct mu_memory_sums sums = {.depth = 1, .any_depth = UINT32_MAX, .leaves_most = 1};
    uint64_t bytes = need_of(s, layout, &sums);
    if (bytes <= s->memory_bytes)
        return false;
    if (!s->found && bytes < s->least_bytes)
        fits(s, layout); /* what it really needs */
    return true;
}

static void consider(struct search *s, const struct mu_cost_grid *grid, const struct mu_layout *layout)
{
    double seconds;
    struct merit merit = merit_of(s, grid, layout, &seconds);
    if ((s->found && !better(&merit, &s->best_merit)) || !fits(s, layout))
        return;
    s->found = true;
    s->best = *layout;
    s->best_merit = merit;
    s->best_seconds = seconds;
}

/* Numbers of replicas worth a look, for `most` at most: all of them, powers of two, the largest mesh, and for each
 * number of leaves that the busiest may have the fewest that it takes. */
static uint32_t replica_counts(const struct search *s, uint32_t most, uint32_t out[COUNTS_MAX])
{
    uint32_t count = 0;
    if (s->spec->parallel.dp) {
        out[0] = s->spec->parallel.dp;
        return out[0] <= most;
    }
    out[count++] = most;
    if (most > MU_MESH_WORLD_MAX)
        out[count++] = MU_MESH_WORLD_MAX;
    for (uint32_t power = 1; power < most && power != 0; power <<= 1)
        out[count++] = power;
    uint32_t fewest = (s->leaves + most - 1) / most;
    for (uint32_t k = fewest; k <= s->leaves && count < COUNTS_MAX;) {
        out[count++] = (s->leaves + k - 1) / k;
        k += k < fewest + DENSE_COUNTS ? 1 : k / 10 + 1;
    }
    return count;
}

static void try_stages(struct search *s, uint32_t tp, uint32_t pp)
{
    uint32_t most = replicas_max(s, tp, pp), counts[COUNTS_MAX];
    uint32_t count = most ? replica_counts(s, most, counts) : 0;
    if (count == 0)
        return;
    struct mu_layout layout = {.tp = tp, .pp = pp, .dp = counts[0], .sharded = s->spec->parallel.optimizer_sharding};
    struct mu_cost_unit unit = mu_cost_unit_of(s->spec, &s->model, s->rates, tp);
    mu_cost_balance(&unit, s->model.config.layers, pp, NULL, layout.stage_first);
    if (hopeless(s, &layout))
        return;
    struct mu_cost_grid grid = mu_cost_grid_of(s->spec, &s->model, &layout, s->rates);
    for (uint32_t i = 0; i < count; i++) {
        layout.dp = counts[i];
        consider(s, &grid, &layout);
    }
}

/* Between two numbers of stages with the same largest stage the smaller is at least as good, but for embedding and
 * head: hence also the next one. */
static bool worth_trying(uint32_t layers, uint32_t pp)
{
    if (pp <= DENSE_STAGES)
        return true;
    uint32_t size = (layers + pp - 1) / pp, smallest = (layers + size - 1) / size;
    return pp <= smallest + 1;
}

static void try_all(struct search *s)
{
    uint32_t layers = s->model.config.layers, given = s->spec->parallel.pp;
    uint32_t stages = layers < MU_STAGES_MAX ? layers : MU_STAGES_MAX;
    for (uint32_t tp = 1; tp <= s->model.config.slices; tp <<= 1) {
        if (s->spec->parallel.tp && tp != s->spec->parallel.tp)
            continue;
        if (given)
            try_stages(s, tp, given);
        for (uint32_t pp = 1; !given && pp <= stages && pp <= s->workers / tp; pp++)
            if (worth_trying(layers, pp))
                try_stages(s, tp, pp);
    }
}

/* The old layout stays unless the best one is clearly faster. Its degrees are judged: its stages may suit the speeds of
 * its workers, which the planner looks at next. */
static void prefer_old(struct search *s, const struct mu_layout *old)
{
    struct mu_layout layout = *old, even;
    layout.idle = 0;
    if (mu_layout_check(&layout, s->spec, NULL) || mu_layout_working(&layout) > s->workers || !fits(s, &layout))
        return;
    even = layout;
    struct mu_cost_unit unit = mu_cost_unit_of(s->spec, &s->model, s->rates, layout.tp);
    mu_cost_balance(&unit, s->model.config.layers, layout.pp, NULL, even.stage_first);
    struct mu_cost_grid grid = mu_cost_grid_of(s->spec, &s->model, &even, s->rates);
    double seconds;
    struct merit merit = merit_of(s, &grid, &even, &seconds);
    bool worse = s->best_merit.enough > merit.enough || s->best_merit.two_holders > merit.two_holders;
    if (worse || s->best_seconds < seconds * (1 - MU_CHOICE_GAIN_MIN_PERCENT / 100.0))
        return;
    s->best = layout;
    s->best_merit = merit;
    s->best_seconds = seconds;
}

static void put_grid(struct mu_text *text, const struct mu_layout *layout)
{
    mu_text_put(text, "tp ");
    mu_text_put_uint(text, layout->tp);
    mu_text_put(text, " x pp ");
    mu_text_put_uint(text, layout->pp);
    mu_text_put(text, " x dp ");
    mu_text_put_uint(text, layout->dp);
}

static void put_counted(struct mu_text *text, uint64_t count, const char *what)
{
    mu_text_put_uint(text, count);
    mu_text_put(text, what);
}

/* Too few workers for the degrees that are given. */
static enum mu_status too_few(const struct search *s, uint64_t least, struct mu_text *text)
{
    put_counted(text, s->workers, s->workers == 1 ? " worker can" : " workers can");
    mu_text_put(text, " take part, but parallel (tp * pp * dp as given) needs ");
    put_counted(text, least, ": ");
    put_counted(text, least - s->workers, " short");
    return MU_ERR_UNAVAILABLE;
}

static enum mu_status too_little_memory(const struct search *s, struct mu_text *text)
{
    uint64_t need = (s->least_bytes + MIB - 1) / MIB, have = s->memory_bytes / MIB;
    mu_text_put(text, "no layout of ");
    put_counted(text, s->workers, s->workers == 1 ? " worker" : " workers");
    mu_text_put(text, " fits in memory: the smallest (");
    put_grid(text, &s->least);
    mu_text_put(text, ") needs ");
    put_counted(text, need, " MiB a worker, ");
    put_counted(text, have, " MiB are there: ");
    put_counted(text, need - have, " MiB short");
    return MU_ERR_UNAVAILABLE;
}

static void describe(const struct search *s, struct mu_text *text)
{
    put_grid(text, &s->best);
    mu_text_put(text, s->best.sharded ? ", optimizer sharded, " : ", ");
    put_counted(text, (uint64_t)(s->best_seconds * 1e3 + 0.5), " ms a step expected");
}

enum mu_status mu_layout_choose(const struct mu_job_spec *spec, const struct mu_cost_rates *rates, uint32_t workers,
                                uint64_t memory_bytes, uint32_t threads, const struct mu_layout *old,
                                struct mu_layout *ret_layout, char *text_buffer, size_t text_size)
{
    struct search s = {.spec = spec,
                       .rates = rates,
                       .workers = workers < spec->workers.max ? workers : spec->workers.max,
                       .leaves = mu_job_leaves(spec),
                       .threads = threads,
                       .memory_bytes = memory_bytes,
                       .least_bytes = UINT64_MAX};
    mu_model_spec_init(&s.model, &spec->model);
    s.any_depth = memory_bytes ? mu_memory_any_depth(s.leaves) : 0;
    struct mu_text text;
    mu_text_init(&text, text_buffer, text_size);
    uint64_t least = 1;
    least *= spec->parallel.tp ? spec->parallel.tp : 1;
    least *= spec->parallel.pp ? spec->parallel.pp : 1;
    least *= spec->parallel.dp ? spec->parallel.dp : 1;
    if (s.workers < least)
        return too_few(&s, least, &text);
    try_all(&s);
    if (!s.found)
        return too_little_memory(&s, &text);
    if (old)
        prefer_old(&s, old);
    describe(&s, &text);
    *ret_layout = s.best;
    return MU_OK;
}
