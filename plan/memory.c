#include "plan/memory.h"

#include "plan/balance.h"
#include "plan/model_spec.h"
#include "plan/pipeline.h"
#include "plan/plan.h"
#include "plan/tree.h"

enum {
    ELEMENT = sizeof(float), /* bytes */
    HEAD_TOKENS = 512,       /* tokens whose logits exist at one time */
    NORM_ROWS = 64,          /* rows whose weight gradients of a norm are summed together */
    EXACT_LEAVES = 1024,     /* up to so many leaves every possible range is looked at */
    EXACT_REPLICAS = 256,    /* up to so many every replica's range is looked at */
};

/* ---- activations ---- */

/* Elements of one layer, for one micro-batch: what must be kept for the backward pass in any case, what is cheap to
 * compute again, and the layer's input. */
struct layer_kept {
    uint64_t input, dear, cheap;
};

static struct layer_kept layer_kept(const struct mu_model_config *m, uint64_t tokens, uint32_t tp)
{
    bool llama = m->family == MU_FAMILY_LLAMA;
    uint64_t own = tokens / tp, c = m->channels, head = m->channels / m->heads;
    uint64_t qkv = (m->heads + 2ull * m->kv_heads) * head, hidden = m->hidden;
    return (struct layer_kept){
        .input = own * c,
        .dear = own * (c + (llama ? 2 : 4)) + tokens * (qkv + m->heads + c + (llama ? 2 : 1) * hidden) / tp,
        .cheap = own * 2 * c + tokens * hidden / tp,
    };
}

/* All layers of a stage with `slots` micro-batches at once. */
static uint64_t layers_kept(const struct mu_job_spec *spec, const struct layer_kept *k, uint64_t layers, uint64_t slots)
{
    uint64_t times = layers * slots;
    switch (spec->parallel.recompute) {
    case MU_RECOMPUTE_FULL:
        return times * k->input + k->dear + k->cheap;
    case MU_RECOMPUTE_SELECTIVE:
        return times * (k->input + k->dear) + k->cheap;
    case MU_RECOMPUTE_NONE:
        break;
    }
    return times * (k->input + k->dear + k->cheap);
}

/* Final norm, logits, losses. */
static uint64_t head_elements(const struct mu_job_spec *spec, const struct mu_model_config *m, uint64_t tp)
{
    uint64_t n = (uint64_t)spec->batch.micro * spec->batch.length, own = n / tp, slices = m->slices / tp;
    uint64_t block = n < HEAD_TOKENS ? n : HEAD_TOKENS, rows = mu_model_vocab_slice_rows(m);
    uint64_t norms = spec->parallel.recompute == MU_RECOMPUTE_NONE ? 2 : 1;
    uint64_t elements = own * (norms * m->channels + (m->family == MU_FAMILY_LLAMA ? 1 : 2)) + 2 * tp * n;
    elements += slices * block * ((rows + 15) / 16 * 16);
    return elements + (m->slices > 1 ? 3 * (tp + slices) * block : 0);
}

/* T > 1: gradients of shared cells, one for each own token slice, and all ranks' where they are added up. */
static uint64_t token_slice_elements(const struct mu_job_spec *spec, const struct mu_model_spec *model, uint64_t layers,
                                     bool first, bool last, uint64_t tp)
{
    uint64_t slices = model->config.slices / tp, levels = 1, layer = model->extents[MU_CELL_L_SHARED].size;
    uint64_t final = last ? model->extents[MU_CELL_F_SHARED].size : 0;
    if (model->config.slices == 1)
        return 0;
    uint64_t elements = slices * (layers * layer + final) + (tp > 1 ? tp * (layer > final ? layer : final) : 0);
    for (uint64_t s = slices; s > 1; s /= 2)
        levels++;
    if (tp > 1 && levels < 2)
        levels = 2;
    if (first && model->extents[MU_CELL_E_SHARED].count > 0)
        elements += levels * spec->batch.length * model->config.channels;
    return elements;
}

static uint64_t activations(const struct mu_job_spec *spec, const struct mu_model_spec *model,
                            const struct mu_layout *layout, uint32_t stage, uint32_t slots)
{
    const struct mu_model_config *m = &model->config;
    uint64_t n = (uint64_t)spec->batch.micro * spec->batch.length, c = m->channels, tp = layout->tp, own = n / tp;
    uint64_t layers = layout->stage_first[stage + 1] - layout->stage_first[stage], hidden = m->hidden;
    uint64_t qkv = (m->heads + 2ull * m->kv_heads) * (c / m->heads);
    bool first = stage == 0, last = stage + 1 == layout->pp;
    struct layer_kept kept = layer_kept(m, n, layout->tp);
    uint64_t elements = layers_kept(spec, &kept, layers, slots) + (tp > 1 ? 2 : 1) * n * c;
    elements += last ? head_elements(spec, m, tp) : 2 * own;
    elements += n * ((hidden > c ? hidden : c) + qkv) / tp + (m->dropout > 0.0f ? own * c : 0);
    elements += (n / m->slices + NORM_ROWS - 1) / NORM_ROWS * 2 * c;
    elements += m->family == MU_FAMILY_LLAMA ? spec->batch.length * (c / m->heads / 2 * 2) : 0;
    elements += first ? spec->batch.accumulate * (own * c + n) : 0;
    return elements + token_slice_elements(spec, model, layers, first, last, tp);
}

uint64_t mu_memory_stage_activation_bytes(const struct mu_job_spec *spec, const struct mu_layout *layout,
                                          uint32_t stage, uint32_t micros)
{
    struct mu_model_spec model;
    mu_model_spec_init(&model, &spec->model);
    return activations(spec, &model, layout, stage, mu_pipeline_slots(layout->pp, stage, micros)) * ELEMENT;
}

uint64_t mu_memory_activation_bytes(const struct mu_job_spec *spec)
{
    struct mu_layout layout;
    mu_layout_init(&layout, 1, spec->model.layers);
    return mu_memory_stage_activation_bytes(spec, &layout, 0, 1);
}

/* ---- sums over leaves ---- */

static uint32_t depth_of(uint32_t leaves, uint32_t dp, uint32_t replica)
{
    uint32_t count, first = mu_plan_leaf_range(leaves, dp, NULL, replica, &count);
    return mu_tree_buffers(leaves, first, count);
}

/* Most gradient buffers that a range of an even split holds at one time. With very many replicas a bound for any range
 * of that length: subtrees that grow, then shrink, and the two leaves being added. */
static uint32_t even_depth(uint32_t leaves, uint32_t dp)
{
    uint32_t deepest = 0;
    if (dp > EXACT_REPLICAS) {
        uint32_t count = (leaves + dp - 1) / dp, levels = 0;
        while (count >> (levels + 1))
            levels++;
        return count < 2 * levels + 1 ? count : 2 * levels + 1;
    }
    for (uint32_t replica = 0; replica < dp; replica++) {
        uint32_t depth = depth_of(leaves, dp, replica);
        deepest = depth > deepest ? depth : deepest;
    }
    return deepest;
}

/* Most that any range at all can hold; a bound for very many leaves. */
uint32_t mu_memory_any_depth(uint32_t leaves)
{
    uint32_t deepest = 1;
    if (leaves > EXACT_LEAVES) {
        for (uint32_t n = leaves; n > 0; n >>= 1)
            deepest += 2;
        return deepest;
    }
    for (uint32_t first = 0; first < leaves; first++) {
        uint32_t depth = mu_tree_buffers(leaves, first, leaves - first);
        deepest = depth > deepest ? depth : deepest;
    }
    return deepest;
}

/* Most that any replica of an even split receives to add up for the chunks it owns (mesh), or for its subtree of
 * replicas (tree). */
static uint32_t inputs_of(uint32_t leaves, uint32_t dp)
{
    uint32_t inputs = 0;
    if (dp > MU_MESH_WORLD_MAX) {
        for (uint32_t n = dp - 1; n > 0; n >>= 1) /* the root's children */
            inputs++;
        return inputs;
    }
    uint32_t total = mu_balance_root_count(leaves, dp, NULL), fewest = UINT32_MAX;
    for (uint32_t replica = 0; replica < dp; replica++) {
        struct mu_tree_node roots[MU_TREE_ROOTS_MAX];
        uint32_t count, first = mu_plan_leaf_range(leaves, dp, NULL, replica, &count);
        uint32_t own = mu_tree_roots(leaves, first, count, roots);
        fewest = own < fewest ? own : fewest;
    }
    return total - fewest;
}

struct mu_memory_sums mu_memory_sums_of(const struct mu_job_spec *spec, uint32_t dp, uint32_t any_depth)
{
    uint32_t leaves = mu_job_leaves(spec);
    MU_ASSERT(dp >= 1 && dp <= leaves);
    if (spec->numerics == MU_NUMERICS_FAST) /* the leaves of a replica are one, in one buffer */
        return (struct mu_memory_sums){
            .depth = 1, .any_depth = 1, .inputs = inputs_of(dp, dp), .leaves_most = (leaves + dp - 1) / dp};
    return (struct mu_memory_sums){.depth = even_depth(leaves, dp),
                                   .any_depth = any_depth,
                                   .inputs = inputs_of(leaves, dp),
                                   .leaves_most = (leaves + dp - 1) / dp};
}

/* ---- a rank ---- */

/* Elements and chunks of `slices` whole cells of a kind; the last slice may be smaller. */
struct part {
    uint64_t elements, chunks;
};

static void add_cells(struct part *part, const struct mu_cell_extent *e, uint64_t cells)
{
    if (e->count == 0 || cells == 0)
        return;
    cells = cells < e->count ? cells : e->count;
    uint64_t missing = cells == e->count ? e->size - e->last_size : 0;
    part->elements += cells * e->size - missing;
    part->chunks += cells * ((e->size + MU_CHUNK_ELEMENTS - 1) / MU_CHUNK_ELEMENTS);
}

/* The largest column of a stage: that of t = 0. */
static struct part column_of(const struct mu_model_spec *model, const struct mu_layout *layout, uint32_t stage)
{
    uint64_t slices = model->config.slices / layout->tp;
    uint64_t layers = layout->stage_first[stage + 1] - layout->stage_first[stage];
    struct part layer = {0}, column = {0};
    add_cells(&layer, &model->extents[MU_CELL_L], slices);
    add_cells(&layer, &model->extents[MU_CELL_L_SHARED], 1);
    if (stage == 0) {
        add_cells(&column, &model->extents[MU_CELL_E], slices);
        add_cells(&column, &model->extents[MU_CELL_E_SHARED], 1);
    }
    if (stage + 1 == layout->pp) {
        add_cells(&column, &model->extents[MU_CELL_F], slices);
        add_cells(&column, &model->extents[MU_CELL_F_SHARED], 1);
    }
    column.elements += layers * layer.elements;
    column.chunks += layers * layer.chunks;
    return column;
}

/* What a rank mirrors of another one. Of a replica: the moments, its own column has the rest. With dp = 1: at most a
 * whole column, with gradients. */
static uint64_t mirror_bytes(const struct mu_job_spec *spec, const struct mu_model_spec *model,
                             const struct mu_layout *layout, uint64_t owned)
{
    uint64_t most = 0;
    if (spec->parallel.redundancy != MU_REDUNDANCY_BUDDY || mu_layout_buddy_group(layout) == 1)
        return 0;
    if (layout->dp > 1)
        return 2 * owned;
    for (uint32_t stage = 0; stage < layout->pp; stage++) {
        uint64_t elements = column_of(model, layout, stage).elements;
        most = elements > most ? elements : most;
    }
    return 4 * most * ELEMENT;
}

/* Two blocks each way for each stage beside this one; the first stage receives the tied head's gradient of a leaf while
 * it may still add up the one before. */
static uint64_t exchange_bytes(const struct mu_job_spec *spec, const struct mu_model_spec *model,
                               const struct mu_layout *layout, uint32_t stage)
{
    if (layout->pp == 1)
        return 0;
    uint64_t rows = (uint64_t)spec->batch.micro * spec->batch.length / layout->tp;
    uint64_t beside = (uint64_t)(stage > 0) + (stage + 1 < layout->pp);
    uint64_t elements = 4 * rows * model->config.channels * beside;
    if (stage == 0 && mu_model_is_tied(&model->config)) {
        struct part head = {0};
        add_cells(&head, &model->extents[MU_CELL_E], model->config.slices / layout->tp);
        elements += (spec->batch.accumulate > layout->pp - 1 ? 1 : 2) * head.elements;
    }
    return elements * ELEMENT;
}

struct mu_memory_need mu_memory_of_stage(const struct mu_job_spec *spec, const struct mu_model_spec *model,
                                         const struct mu_layout *layout, uint32_t stage,
                                         const struct mu_memory_sums *sums, uint32_t threads)
{
    MU_ASSERT(stage < layout->pp && threads >= 1);
    struct part column = column_of(model, layout, stage), copy = {0};
    if (layout->pp > 1 && stage + 1 == layout->pp && mu_model_is_tied(&model->config))
        add_cells(&copy, &model->extents[MU_CELL_E], model->config.slices / layout->tp);
    uint64_t held = column.elements * ELEMENT;
    /* Shard groups: the last one is a smallest one. */
    uint64_t owners = layout->sharded ? mu_layout_shard_group(layout->dp, layout->dp - 1).count : layout->dp;
    uint64_t owned = (column.chunks + owners - 1) / owners * MU_CHUNK_ELEMENTS * ELEMENT;
    owned = owned < held ? owned : held;
    bool eager =
        ((uint64_t)sums->any_depth + 4) * held <= MU_MEMORY_EAGER_BYTES; /* with staging and a whole snapshot */
    uint64_t staging = sums->inputs * owned;
    if (eager && staging < held)
        staging = held;
    uint64_t micros = (uint64_t)spec->batch.accumulate * sums->leaves_most;
    uint32_t slots = mu_pipeline_slots(layout->pp, stage, micros < MU_STAGES_MAX ? (uint32_t)micros : MU_STAGES_MAX);
    struct mu_memory_need need = {
        .state_bytes = held + 2 * (layout->sharded ? owned : held),
        .copy_bytes = copy.elements * ELEMENT,
        .mirror_bytes = mirror_bytes(spec, model, layout, owned),
        .gradient_bytes = (eager ? sums->any_depth : sums->depth) * (held + copy.elements * ELEMENT),
        .staging_bytes = staging < MU_MEMORY_STAGING_BYTES ? staging : MU_MEMORY_STAGING_BYTES,
        .activation_bytes = activations(spec, model, layout, stage, slots) * ELEMENT,
        .exchange_bytes = exchange_bytes(spec, model, layout, stage),
        .snapshot_bytes = spec->checkpoint.path[0] ? 3 * (eager ? held : owned) : 0,
        .scratch_bytes = threads * MU_MEMORY_SCRATCH_BYTES,
        .process_bytes = MU_MEMORY_PROCESS_BYTES,
    };
    need.total_bytes = need.state_bytes + need.copy_bytes + need.mirror_bytes + need.gradient_bytes +
                       need.staging_bytes + need.activation_bytes + need.exchange_bytes + need.snapshot_bytes +
                       need.scratch_bytes + need.process_bytes;
    bool receives = mu_layout_working(layout) > 1 || spec->checkpoint.path[0];
    need.peak_bytes = need.total_bytes + (receives ? need.state_bytes + need.mirror_bytes : 0);
    return need;
}

struct mu_memory_need mu_memory_of_rank(const struct mu_job_spec *spec, const struct mu_layout *layout, uint32_t rank,
                                        uint32_t threads)
{
    struct mu_model_spec model;
    mu_model_spec_init(&model, &spec->model);
    struct mu_coords at = mu_layout_coords(layout, rank);
    struct mu_memory_sums sums = mu_memory_sums_of(spec, layout->dp, mu_memory_any_depth(mu_job_leaves(spec)));
    uint32_t leaves = mu_job_leaves(spec);
    if (spec->numerics != MU_NUMERICS_FAST)
        sums.depth = depth_of(leaves, layout->dp, at.d);
    mu_plan_leaf_range(leaves, layout->dp, NULL, at.d, &sums.leaves_most);
    return mu_memory_of_stage(spec, &model, layout, at.p, &sums, threads);
}

struct mu_memory_need mu_memory_of_layout(const struct mu_job_spec *spec, const struct mu_layout *layout,
                                          uint32_t threads, uint32_t *ret_stage)
{
    struct mu_model_spec model;
    mu_model_spec_init(&model, &spec->model);
    struct mu_memory_sums sums = mu_memory_sums_of(spec, layout->dp, mu_memory_any_depth(mu_job_leaves(spec)));
    struct mu_memory_need most = {0};
    for (uint32_t stage = 0; stage < layout->pp; stage++) {
        struct mu_memory_need need = mu_memory_of_stage(spec, &model, layout, stage, &sums, threads);
        if (need.total_bytes <= most.total_bytes)
            continue;
        most = need;
        if (ret_stage)
            *ret_stage = stage;
    }
    return most;
}

struct mu_memory_need mu_memory_of_worker(const struct mu_job_spec *spec, uint32_t world, uint32_t threads)
{
    struct mu_layout layout;
    mu_layout_init(&layout, world, spec->model.layers);
    return mu_memory_of_layout(spec, &layout, threads, NULL);
}

uint64_t mu_memory_feed_bytes(const struct mu_model_spec *model, const struct mu_move *moves, uint32_t count,
                              bool beside)
{
    uint64_t floats = 0;
    for (uint32_t i = 0; i < count; i++) {
        const struct mu_chunk_run *run = &moves[i].run;
        uint64_t elements =
            mu_model_elements_before(model, run->first + run->count) - mu_model_elements_before(model, run->first);
        bool params = moves[i].kinds & MU_MOVE_PARAMS, moments = moves[i].kinds & MU_MOVE_MOMENTS;
        uint64_t chunks = (params ? 1u : 0u) + (moments ? 2u : 0u), gradient = moments, spoilt = moments && !params;
        floats += elements * (gradient + spoilt + (beside ? chunks : 0));
    }
    return floats * ELEMENT;
}
