#include "plan/layout.h"

#include <inttypes.h>
#include <string.h>

#include "common/status.h"

void mu_layout_init(struct mu_layout *layout, uint32_t dp, uint32_t layers)
{
    *layout = (struct mu_layout){.tp = 1, .pp = 1, .dp = dp, .stage_first = {0, (uint16_t)layers}};
}

static enum mu_status check_degree(struct mu_error *err, const char *name, uint32_t value, uint32_t asked,
                                   uint32_t limit, const char *of)
{
    if (value < 1 || value > limit)
        return mu_fail(err, MU_ERR_INVALID, "layout.%s: value %" PRIu32 " is not allowed: 1 to %" PRIu32 ", the %s",
                       name, value, limit, of);
    if (asked != 0 && value != asked)
        return mu_fail(err, MU_ERR_INVALID,
                       "layout.%s: value %" PRIu32 " is not allowed: the job sets parallel.%s to %" PRIu32, name, value,
                       name, asked);
    return MU_OK;
}

static enum mu_status check_stages(const struct mu_layout *layout, uint32_t layers, struct mu_error *err)
{
    for (uint32_t p = 0; p < layout->pp; p++) {
        if (layout->stage_first[p] >= layout->stage_first[p + 1])
            return mu_fail(err, MU_ERR_INVALID,
                           "layout.stage_first: stage %" PRIu32
                           " is not allowed to be empty: it begins at layer %d and ends at %d",
                           p, (int)layout->stage_first[p], (int)layout->stage_first[p + 1]);
    }
    if (layout->stage_first[0] != 0 || layout->stage_first[layout->pp] != layers)
        return mu_fail(err, MU_ERR_INVALID,
                       "layout.stage_first: stages from layer %d to %d are not allowed: 0 to %" PRIu32
                       ", the layers of the job",
                       (int)layout->stage_first[0], (int)layout->stage_first[layout->pp], layers);
    return MU_OK;
}

static enum mu_status check_buddies(const struct mu_layout *layout, const struct mu_job_spec *spec,
                                    struct mu_error *err)
{
    uint32_t limit = spec->parallel.redundancy == MU_REDUNDANCY_BUDDY ? mu_layout_buddy_group(layout) : 1;
    if (layout->buddy_shift < limit)
        return MU_OK;
    return mu_fail(err, MU_ERR_INVALID,
                   "layout.buddy_shift: value %" PRIu32 " is not allowed: below %" PRIu32
                   ", the ranks that guard each other in this layout and job",
                   layout->buddy_shift, limit);
}

enum mu_status mu_layout_check(const struct mu_layout *layout, const struct mu_job_spec *spec, struct mu_error *err)
{
    uint32_t slices = spec->model.slices ? spec->model.slices : 1, layers = spec->model.layers;
    uint32_t leaves = mu_job_leaves(spec);
    enum mu_status status = MU_OK;
    if ((status = check_degree(err, "tp", layout->tp, spec->parallel.tp, slices, "slices of the job")) ||
        (status = check_degree(err, "pp", layout->pp, spec->parallel.pp,
                               layers < MU_STAGES_MAX ? layers : MU_STAGES_MAX, "layers that can be stages")) ||
        (status = check_degree(err, "dp", layout->dp, spec->parallel.dp, leaves, "leaves of a step")))
        return status;
    if (slices % layout->tp != 0)
        return mu_fail(err, MU_ERR_INVALID,
                       "layout.tp: value %" PRIu32 " is not allowed: a divisor of the job's %" PRIu32 " slices",
                       layout->tp, slices);
    if (layout->sharded != spec->parallel.optimizer_sharding)
        return mu_fail(err, MU_ERR_INVALID, "layout.sharded: value %d is not allowed: %d as the job says",
                       layout->sharded, spec->parallel.optimizer_sharding);
    uint64_t world = (uint64_t)layout->tp * layout->pp * layout->dp + layout->idle;
    if (world > MU_WORKERS_MAX)
        return mu_fail(err, MU_ERR_INVALID, "layout: %" PRIu64 " ranks are not allowed: tp * pp * dp + idle at most %d",
                       world, MU_WORKERS_MAX);
    return (status = check_stages(layout, layers, err)) ? status : check_buddies(layout, spec, err);
}

bool mu_layout_equal(const struct mu_layout *a, const struct mu_layout *b)
{
    return a->tp == b->tp && a->pp == b->pp && a->dp == b->dp && a->idle == b->idle && a->sharded == b->sharded &&
           a->buddy_shift == b->buddy_shift &&
           memcmp(a->stage_first, b->stage_first, (a->pp + 1) * sizeof a->stage_first[0]) == 0;
}

uint32_t mu_layout_working(const struct mu_layout *layout)
{
    return layout->tp * layout->pp * layout->dp;
}

uint32_t mu_layout_world(const struct mu_layout *layout)
{
    return mu_layout_working(layout) + layout->idle;
}

bool mu_layout_is_idle(const struct mu_layout *layout, uint32_t rank)
{
    return rank >= mu_layout_working(layout);
}

struct mu_coords mu_layout_coords(const struct mu_layout *layout, uint32_t rank)
{
    MU_ASSERT(!mu_layout_is_idle(layout, rank));
    return (struct mu_coords){
        .t = rank % layout->tp, .d = rank / layout->tp % layout->dp, .p = rank / layout->tp / layout->dp};
}

uint32_t mu_layout_rank(const struct mu_layout *layout, struct mu_coords coords)
{
    MU_ASSERT(coords.t < layout->tp && coords.d < layout->dp && coords.p < layout->pp);
    return coords.t + layout->tp * (coords.d + layout->dp * coords.p);
}

struct mu_shard_group mu_layout_shard_group(uint32_t replicas, uint32_t replica)
{
    uint32_t groups = (replicas + MU_MESH_WORLD_MAX - 1) / MU_MESH_WORLD_MAX;
    uint32_t base = replicas / groups, extra = replicas % groups; /* the first ones have one more */
    uint32_t in_larger = extra * (base + 1);
    uint32_t group = replica < in_larger ? replica / (base + 1) : extra + (replica - in_larger) / base;
    return (struct mu_shard_group){.first = group * base + (group < extra ? group : extra),
                                   .count = base + (group < extra)};
}

/* ---- buddies ---- */

uint32_t mu_layout_buddy_group(const struct mu_layout *layout)
{
    if (layout->dp == 1)
        return mu_layout_working(layout);
    return layout->sharded && layout->dp <= MU_MESH_WORLD_MAX ? layout->dp : 1; /* another group owns the same */
}

/* The member `steps` places further in the rank's group. */
static uint32_t group_member(const struct mu_layout *layout, uint32_t rank, uint32_t steps)
{
    if (layout->dp == 1)
        return (rank + steps) % mu_layout_working(layout);
    struct mu_coords at = mu_layout_coords(layout, rank);
    at.d = (at.d + steps) % layout->dp;
    return mu_layout_rank(layout, at);
}

uint32_t mu_layout_buddy(const struct mu_layout *layout, uint32_t rank)
{
    if (layout->buddy_shift == 0 || mu_layout_is_idle(layout, rank))
        return MU_LAYOUT_NOBODY;
    return group_member(layout, rank, layout->buddy_shift);
}

uint32_t mu_layout_guarded(const struct mu_layout *layout, uint32_t rank)
{
    if (layout->buddy_shift == 0 || mu_layout_is_idle(layout, rank))
        return MU_LAYOUT_NOBODY;
    return group_member(layout, rank, mu_layout_buddy_group(layout) - layout->buddy_shift);
}

/* Ranks whose buddy by that shift has another number. */
static uint32_t count_apart(const struct mu_layout *layout, const uint32_t *numbers, uint32_t shift)
{
    uint32_t working = mu_layout_working(layout), apart = 0;
    for (uint32_t rank = 0; rank < working; rank++)
        apart += numbers[rank] != numbers[group_member(layout, rank, shift)];
    return apart;
}

uint32_t mu_layout_buddy_shift(const struct mu_layout *layout, const uint32_t *hosts, const uint32_t *domains,
                               uint32_t *ret_apart)
{
    uint32_t group = mu_layout_buddy_group(layout), working = mu_layout_working(layout), best = 0, farthest = 0;
    *ret_apart = 0;
    for (uint32_t shift = 1; shift < group && (*ret_apart < working || farthest < working); shift++) {
        uint32_t apart = count_apart(layout, hosts, shift);
        if (best > 0 && apart < *ret_apart)
            continue;
        uint32_t far = count_apart(layout, domains, shift);
        if (best == 0 || apart > *ret_apart || far > farthest) {
            best = shift;
            *ret_apart = apart;
            farthest = far;
        }
    }
    return best;
}

/* ---- shares ---- */

/* Chunks of a column, put one behind the other, are numbered from 0. Those in [begin, end) are wanted. */
struct walk {
    const struct mu_model_spec *model;
    uint32_t first_slice, slice_end;
    uint32_t position, begin, end;
    bool skip_shared;
    struct mu_chunk_run *out; /* NULL: only counted */
    uint32_t count, last_end;
};

static void add_chunks(struct walk *w, uint32_t first, uint32_t count)
{
    uint32_t from = w->begin > w->position ? w->begin - w->position : 0;
    uint32_t to = w->end > w->position ? w->end - w->position : 0;
    to = to < count ? to : count;
    w->position += count;
    if (from >= to)
        return;
    if (w->count == 0 || w->last_end != first + from) {
        w->count++;
        MU_ASSERT(w->count <= MU_RUNS_MAX);
        if (w->out)
            w->out[w->count - 1] = (struct mu_chunk_run){.first = first + from};
    }
    if (w->out)
        w->out[w->count - 1].count += to - from;
    w->last_end = first + to;
}

/* The column's slices of a kind of cell. */
static uint32_t add_slices(struct walk *w, enum mu_cell_kind kind, uint32_t layer)
{
    uint32_t first = mu_model_first_chunk(w->model, kind, layer, w->first_slice);
    uint32_t end = mu_model_first_chunk(w->model, kind, layer, w->slice_end);
    add_chunks(w, first, end - first);
    return end - first;
}

static uint32_t add_shared(struct walk *w, enum mu_cell_kind kind, uint32_t layer)
{
    uint32_t first = mu_model_first_chunk(w->model, kind, layer, 0);
    uint32_t count = mu_model_first_chunk(w->model, kind, layer, 1) - first;
    if (w->skip_shared)
        w->position += count;
    else
        add_chunks(w, first, count);
    return count;
}

static void walk_column(struct walk *w, const struct mu_layout *layout, uint32_t stage)
{
    if (stage == 0) {
        add_slices(w, MU_CELL_E, 0);
        add_shared(w, MU_CELL_E_SHARED, 0);
    }
    for (uint32_t layer = layout->stage_first[stage]; layer < layout->stage_first[stage + 1]; layer++) {
        add_slices(w, MU_CELL_L, layer);
        add_shared(w, MU_CELL_L_SHARED, layer);
    }
    if (stage + 1 == layout->pp) {
        add_slices(w, MU_CELL_F, 0);
        add_shared(w, MU_CELL_F_SHARED, 0);
    }
}

/* All layers have equally many chunks: two of them tell what the whole column has. */
static uint32_t column_chunks(struct walk w, const struct mu_layout *layout, uint32_t stage)
{
    uint32_t layer = layout->stage_first[stage], layers = layout->stage_first[stage + 1] - layer, count = 0;
    w.begin = w.end = 0; /* nothing is collected */
    count += layers * (add_slices(&w, MU_CELL_L, layer) + add_shared(&w, MU_CELL_L_SHARED, layer));
    if (stage == 0)
        count += add_slices(&w, MU_CELL_E, 0) + add_shared(&w, MU_CELL_E_SHARED, 0);
    if (stage + 1 == layout->pp)
        count += add_slices(&w, MU_CELL_F, 0) + add_shared(&w, MU_CELL_F_SHARED, 0);
    return count;
}

uint32_t mu_layout_runs(const struct mu_model_spec *model, const struct mu_layout *layout, uint32_t rank,
                        enum mu_share share, struct mu_chunk_run *out)
{
    if (mu_layout_is_idle(layout, rank))
        return 0;
    struct mu_coords at = mu_layout_coords(layout, rank);
    bool skip_shared = share == MU_SHARE_PRIMARY && at.t != 0;
    if (share == MU_SHARE_MIRROR) {
        uint32_t guarded = mu_layout_guarded(layout, rank), stage = at.p;
        if (guarded == MU_LAYOUT_NOBODY)
            return 0;
        at = mu_layout_coords(layout, guarded);
        skip_shared = layout->dp == 1 && at.p == stage; /* both update what their stage shares */
        share = MU_SHARE_OWNED;
    }
    uint32_t slices = model->config.slices / layout->tp;
    struct walk w = {.model = model, .first_slice = at.t * slices, .slice_end = (at.t + 1) * slices, .out = out};
    w.end = column_chunks(w, layout, at.p);
    if (share == MU_SHARE_COPY) {
        if (layout->pp > 1 && at.p + 1 == layout->pp && mu_model_is_tied(&model->config)) {
            w.end = UINT32_MAX;
            add_slices(&w, MU_CELL_E, 0);
        }
        return w.count;
    }
    if (share == MU_SHARE_OWNED || share == MU_SHARE_PRIMARY || (share == MU_SHARE_MOMENTS && layout->sharded)) {
        struct mu_shard_group group = {0, layout->dp};
        if (layout->sharded)
            group = mu_layout_shard_group(layout->dp, at.d);
        if (share == MU_SHARE_PRIMARY && group.first > 0)
            return 0;
        uint32_t part = at.d - group.first, base = w.end / group.count, extra = w.end % group.count;
        w.begin = part * base + (part < extra ? part : extra);
        w.end = w.begin + base + (part < extra);
    }
    w.skip_shared = skip_shared;
    walk_column(&w, layout, at.p);
    return w.count;
}

uint64_t mu_layout_elements(const struct mu_model_spec *model, const struct mu_layout *layout, uint32_t rank,
                            enum mu_share share)
{
    struct mu_chunk_run runs[MU_RUNS_MAX];
    uint32_t count = mu_layout_runs(model, layout, rank, share, runs);
    uint64_t elements = 0;
    for (uint32_t i = 0; i < count; i++)
        elements += mu_model_elements_before(model, runs[i].first + runs[i].count) -
                    mu_model_elements_before(model, runs[i].first);
    return elements;
}

uint32_t mu_layout_binomial(uint32_t size, uint32_t index, uint32_t out[33])
{
    /* The parent clears the lowest set bit; children set one bit below it. */
    MU_ASSERT(index < size);
    uint32_t count = 0, lowest = index & (~index + 1u);
    if (index != 0)
        out[count++] = index - lowest;
    for (uint32_t bit = 1; bit != 0 && (index == 0 || bit < lowest) && bit < size - index; bit <<= 1)
        out[count++] = index + bit;
    return count;
}

/* A set of ranks, ascending. */
struct ranks {
    uint32_t self, count, *out;
};

static void add_rank(struct ranks *set, uint32_t rank)
{
    uint32_t at = set->count;
    while (at > 0 && set->out[at - 1] > rank)
        at--;
    if (rank == set->self || (at > 0 && set->out[at - 1] == rank))
        return;
    MU_ASSERT(set->count < MU_LAYOUT_NEIGHBOURS_MAX);
    memmove(set->out + at + 1, set->out + at, (set->count - at) * sizeof *set->out);
    set->out[at] = rank;
    set->count++;
}

/* Members of a group that member `index` exchanges messages with; member i is rank first + i * stride. */
static void add_group(struct ranks *set, uint32_t size, uint32_t index, uint32_t first, uint32_t stride)
{
    uint32_t members[33], count = 0;
    if (size <= MU_MESH_WORLD_MAX) {
        for (; count < size; count++)
            members[count] = count;
    } else {
        count = mu_layout_binomial(size, index, members);
    }
    for (uint32_t i = 0; i < count; i++)
        add_rank(set, first + members[i] * stride);
}

uint32_t mu_layout_neighbours(const struct mu_model_spec *model, const struct mu_layout *layout, uint32_t rank,
                              uint32_t out[MU_LAYOUT_NEIGHBOURS_MAX])
{
    struct ranks set = {.self = rank, .out = out};
    uint32_t world = mu_layout_world(layout);
    MU_ASSERT(rank < world);
    add_group(&set, world, rank, 0, 1);
    if (mu_layout_is_idle(layout, rank))
        return set.count;
    struct mu_coords at = mu_layout_coords(layout, rank);
    for (uint32_t t = 0; t < layout->tp; t++)
        add_rank(&set, rank - at.t + t);
    add_group(&set, layout->dp, at.d, rank - at.d * layout->tp, layout->tp);
    struct mu_shard_group shards = mu_layout_shard_group(layout->dp, at.d);
    for (uint32_t d = shards.first; layout->sharded && d < shards.first + shards.count; d++)
        add_rank(&set, mu_layout_rank(layout, (struct mu_coords){at.t, d, at.p}));
    if (layout->buddy_shift > 0) {
        add_rank(&set, mu_layout_buddy(layout, rank));
        add_rank(&set, mu_layout_guarded(layout, rank));
    }
    uint32_t stage = layout->tp * layout->dp; /* ranks from one stage to the next */
    if (at.p > 0)
        add_rank(&set, rank - stage);
    if (at.p + 1 < layout->pp)
        add_rank(&set, rank + stage);
    if (mu_model_is_tied(&model->config) && at.p == 0)
        add_rank(&set, rank + (layout->pp - 1) * stage);
    if (mu_model_is_tied(&model->config) && at.p + 1 == layout->pp)
        add_rank(&set, rank - at.p * stage);
    return set.count;
}
