#include "worker/reduce_internal.h"

#include <stdlib.h>

#include "plan/plan.h"

/* ---- who is next to whom ---- */

/* Members below `index` in the binomial tree, itself included: [index, returned). */
static uint32_t subtree_end(uint32_t size, uint32_t index)
{
    if (index == 0)
        return size;
    uint32_t lowest = index & (~index + 1u);
    return size - index < lowest ? size : index + lowest;
}

static struct relatives find_relatives(uint32_t size, uint32_t index, bool tree)
{
    struct relatives kin = {.mesh = !tree && size <= MU_MESH_WORLD_MAX, .parent = REDUCE_NOBODY};
    if (kin.mesh) {
        for (uint32_t i = 0; i < size; i++)
            if (i != index)
                kin.children[kin.child_count++] = i;
        return kin;
    }
    uint32_t around[33], count = mu_layout_binomial(size, index, around);
    for (uint32_t i = 0; i < count; i++) {
        if (around[i] < index)
            kin.parent = around[i];
        else
            kin.children[kin.child_count++] = around[i];
    }
    return kin;
}

struct leaf_range reduce_leaf_range(const struct mu_reduce_config *config, uint32_t index, uint32_t end)
{
    uint32_t count;
    struct leaf_range range;
    range.first = mu_plan_leaf_range(config->leaves, config->replicas, config->leaf_counts, index, &count);
    range.count = mu_plan_leaf_range(config->leaves, config->replicas, config->leaf_counts, end - 1, &count) + count -
                  range.first;
    return range;
}

/* Roots that replica `index` sends: of its own range (mesh), or of its whole subtree (tree). */
static uint32_t roots_sent(const struct mu_reduce *reduce, const struct mu_reduce_config *config, uint32_t index,
                           struct mu_tree_node out[MU_TREE_ROOTS_MAX])
{
    uint32_t end = reduce->mesh ? index + 1 : subtree_end(config->replicas, index);
    struct leaf_range range = reduce_leaf_range(config, index, end);
    return mu_tree_roots(config->leaves, range.first, range.count, out);
}

/* ---- additions ---- */

/* A node of the tree of leaves while the program of additions is made. */
struct slot {
    struct mu_tree_node node;
    uint32_t storage;
};

struct program {
    uint32_t leaves;
    struct additions *out;
    struct slot stack[MU_TREE_ROOTS_MAX];
    uint32_t depth;
};

/* Pushes a root, then adds siblings. An addition goes into the left node's storage, except that the bottom buffer
 * (storage 0) always takes the sum: a + b and b + a have the same bits. */
static void program_push(struct program *program, struct mu_tree_node node, uint32_t storage)
{
    MU_ASSERT(program->depth < MU_TREE_ROOTS_MAX);
    program->stack[program->depth++] = (struct slot){node, storage};
    while (program->depth > 1) {
        struct slot *low = &program->stack[program->depth - 2], *high = &program->stack[program->depth - 1];
        if (!reduce_siblings(program->leaves, low->node, high->node))
            break;
        uint32_t into = high->storage == 0 ? 0 : low->storage, from = high->storage == 0 ? low->storage : high->storage;
        program->out->adds[program->out->add_count++] = (struct mu_tree_add){.into = into, .from = from};
        low->node.count += high->node.count;
        low->storage = into;
        program->depth--;
    }
}

enum mu_status reduce_plan_additions(const struct mu_reduce *reduce, const struct source *sources, uint32_t count,
                                     bool bottom_free, uint32_t staging_begin, struct additions *ret_additions,
                                     struct mu_error *err)
{
    struct mu_tree_node roots[MU_TREE_ROOTS_MAX];
    struct additions *out = ret_additions;
    size_t room = 1;
    for (uint32_t i = 0; i < count; i++)
        room += mu_tree_roots(reduce->leaves, sources[i].first_leaf, sources[i].leaf_count, roots);
    *out = (struct additions){.staging_end = staging_begin};
    out->inputs = calloc(room, sizeof *out->inputs);
    out->input_storage = calloc(room, sizeof *out->input_storage);
    out->adds = calloc(room, sizeof *out->adds);
    if (!out->inputs || !out->input_storage || !out->adds)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the additions of %zu subtree roots", room - 1);
    struct program program = {.leaves = reduce->leaves, .out = out};
    for (uint32_t i = 0; i < count; i++) {
        uint32_t root_count = mu_tree_roots(reduce->leaves, sources[i].first_leaf, sources[i].leaf_count, roots);
        for (uint32_t k = 0; k < root_count; k++) {
            if (sources[i].storages) {
                program_push(&program, roots[k], sources[i].storages[k]);
                continue;
            }
            uint32_t index = out->input_count++;
            out->inputs[index] = (struct input){.peer = sources[i].peer, .number = k};
            out->input_storage[index] = bottom_free && index == 0 ? 0 : reduce->stack_count + out->staging_end++;
            program_push(&program, roots[k], out->input_storage[index]);
        }
    }
    out->result_count = program.depth;
    for (uint32_t i = 0; i < program.depth; i++)
        out->results[i] = program.stack[i].storage;
    return MU_OK;
}

void reduce_additions_free(struct additions *additions)
{
    free(additions->inputs);
    free(additions->input_storage);
    free(additions->adds);
}

/* The replicas whose roots come to this one, ascending, itself among them: of their own range (mesh), or of their
 * subtree. A rank without leaves receives the first root in its bottom buffer, where the sum is wanted. */
static enum mu_status plan_sum(struct mu_reduce *reduce, const struct mu_reduce_config *config, struct mu_error *err)
{
    struct source sources[REDUCE_RELATIVES_MAX + 1];
    struct mu_tree_node roots[MU_TREE_ROOTS_MAX];
    uint32_t identity[MU_TREE_ROOTS_MAX], count = 0;
    struct leaf_range own = reduce_leaf_range(config, reduce->index, reduce->index + 1);
    reduce->own_root_count = mu_tree_roots(config->leaves, own.first, own.count, roots);
    reduce->stack_count = reduce->own_root_count > 0 ? reduce->own_root_count : 1;
    for (uint32_t k = 0; k < reduce->own_root_count; k++)
        identity[k] = k;
    const struct source self = {reduce->index, own.first, own.count, identity};
    bool self_done = false;
    for (uint32_t i = 0; i < reduce->kin.child_count; i++) {
        uint32_t child = reduce->kin.children[i];
        if (!self_done && child > reduce->index) {
            sources[count++] = self;
            self_done = true;
        }
        struct leaf_range range =
            reduce_leaf_range(config, child, reduce->mesh ? child + 1 : subtree_end(config->replicas, child));
        sources[count++] = (struct source){child, range.first, range.count, NULL};
    }
    if (!self_done)
        sources[count++] = self;
    enum mu_status status =
        reduce_plan_additions(reduce, sources, count, reduce->own_root_count == 0, 0, &reduce->sum, err);
    reduce->staging_count = reduce->sum.staging_end;
    return status;
}

/* ---- segments ---- */

/* The column's chunks in flat order, divided over the replicas; the first ones get one more. */
static uint32_t owner_of(uint32_t chunks, uint32_t replicas, uint32_t ordinal)
{
    uint32_t base = chunks / replicas, extra = chunks % replicas;
    uint32_t in_larger = extra * (base + 1); /* chunks of the replicas that own one more */
    return ordinal < in_larger ? ordinal / (base + 1) : extra + (ordinal - in_larger) / base;
}

static uint32_t column_chunks(const struct mu_reduce_config *config)
{
    uint32_t chunks = 0;
    for (uint32_t i = 0; i < config->run_count; i++)
        chunks += config->runs[i].count;
    return chunks;
}

/* Which replica updates a chunk, for this one: any where all add up everything and update it. */
static uint32_t updater_of(const struct mu_reduce *reduce, uint32_t chunks, uint32_t ordinal)
{
    if (reduce->sharded)
        return reduce->shards.first + owner_of(chunks, reduce->shards.count, ordinal);
    return reduce->mesh ? owner_of(chunks, reduce->replicas, ordinal) : 0;
}

/* Do two chunks have the same owner, in every shard group? Then all ranks cut the same segments; groups have at most
 * two sizes, the first one's and the last one's. */
static bool same_owners(const struct mu_reduce *reduce, uint32_t chunks, uint32_t a, uint32_t b)
{
    if (!reduce->sharded)
        return updater_of(reduce, chunks, a) == updater_of(reduce, chunks, b);
    uint32_t large = mu_layout_shard_group(reduce->replicas, 0).count;
    uint32_t small = mu_layout_shard_group(reduce->replicas, reduce->replicas - 1).count;
    return owner_of(chunks, large, a) == owner_of(chunks, large, b) &&
           owner_of(chunks, small, a) == owner_of(chunks, small, b);
}

struct cutter {
    struct mu_reduce *reduce;
    struct segment *segments; /* NULL: only counted */
    uint32_t chunks;          /* of the column */
    uint32_t count;
};

/* `ordinal`: of the cell's first chunk in the column. */
static void cut_cell(struct cutter *cutter, uint32_t index, uint32_t ordinal)
{
    struct mu_reduce *reduce = cutter->reduce;
    struct mu_cell cell = mu_model_cell(reduce->model, index);
    uint32_t first = cutter->count;
    for (uint32_t i = 0, run; i < cell.chunk_count; i += run) {
        uint32_t owner = updater_of(reduce, cutter->chunks, ordinal + i);
        run = 1;
        while (run < reduce->segment_chunks && i + run < cell.chunk_count &&
               same_owners(reduce, cutter->chunks, ordinal + i, ordinal + i + run))
            run++;
        uint64_t start = (uint64_t)i * MU_CHUNK_ELEMENTS, end = (uint64_t)(i + run) * MU_CHUNK_ELEMENTS;
        if (end > cell.size)
            end = cell.size;
        if (cutter->segments)
            cutter->segments[cutter->count] =
                (struct segment){.cell = index, .owner = owner, .offset = cell.offset + start, .size = end - start};
        cutter->count++;
    }
    if (cutter->segments) {
        reduce->cell_first[index] = first;
        reduce->cell_segments[index] = cutter->count - first;
    }
}

/* Makes every segment, or only counts them (segments NULL). Cells from the last to the first: the order of the backward
 * pass. */
static uint32_t make_segments(struct mu_reduce *reduce, const struct mu_reduce_config *config, struct segment *segments)
{
    const struct mu_model_spec *model = reduce->model;
    struct cutter cutter = {.reduce = reduce, .segments = segments, .chunks = column_chunks(config)};
    uint32_t before = cutter.chunks; /* chunks of the column before the run */
    for (uint32_t i = config->run_count; i-- > 0;) {
        const struct mu_chunk_run *run = &config->runs[i];
        before -= run->count;
        uint32_t cell = mu_model_chunk(model, run->first + run->count - 1).cell;
        for (;; cell--) {
            uint32_t first_chunk = mu_model_cell(model, cell).first_chunk;
            MU_ASSERT(first_chunk >= run->first);
            cut_cell(&cutter, cell, before + first_chunk - run->first);
            if (first_chunk == run->first)
                break;
        }
    }
    return cutter.count;
}

/* Longer segments where one peer would otherwise have too many messages in one step. */
static uint32_t choose_segment_chunks(const struct mu_reduce *reduce, const struct mu_reduce_config *config)
{
    struct mu_tree_node roots[MU_TREE_ROOTS_MAX];
    uint32_t most = 1;
    for (uint32_t i = 0; i < config->replicas; i++) {
        uint32_t count = roots_sent(reduce, config, i, roots);
        most = count > most ? count : most;
    }
    uint32_t segments = MU_REDUCE_REQUESTS_MAX / most;
    uint32_t chunks = (column_chunks(config) + segments - 1) / segments;
    uint32_t least = config->segment_chunks ? config->segment_chunks : 1;
    if (config->gpus) {
        uint32_t longer = reduce_nccl_segment_chunks(config, column_chunks(config));
        least = longer > least ? longer : least;
    }
    return chunks > least ? chunks : least;
}

static void number_requests(struct mu_reduce *reduce, uint32_t index)
{
    struct segment *segment = &reduce->segments[index];
    struct segment_counts counts = reduce_counts(reduce, segment);
    segment->first_request = reduce->request_count;
    reduce->request_count += counts.inputs + counts.ups + counts.down + counts.forwards;
    if (reduce->sharded) {
        bool own = segment->owner == reduce->index;
        segment->first_gather = reduce->gather_count;
        bool guards = segment->owner == reduce->guarded, guarded = reduce->buddy != MU_REDUCE_NO_BUDDY;
        reduce->gather_count += own ? reduce->shards.count - 1 - guarded : !guards;
        if (own)
            reduce->parts[reduce->part_count++] = index;
    }
    if (!reduce_collects(reduce, segment))
        return;
    reduce->collected[reduce->collected_count++] = index;
    if (segment->size > reduce->segment_floats)
        reduce->segment_floats = segment->size;
}

static enum mu_status plan_segments(struct mu_reduce *reduce, const struct mu_reduce_config *config,
                                    struct mu_error *err)
{
    size_t cells = reduce->model->cell_count;
    reduce->segment_chunks = choose_segment_chunks(reduce, config);
    reduce->segment_count = make_segments(reduce, config, NULL);
    MU_ASSERT(reduce->segment_count < 1u << (EXCHANGE_INDEX_BITS - REDUCE_ROOT_BITS));
    reduce->segments = calloc(reduce->segment_count + 1u, sizeof *reduce->segments);
    reduce->cell_first = calloc(cells, sizeof *reduce->cell_first);
    reduce->cell_segments = calloc(cells, sizeof *reduce->cell_segments);
    reduce->collected = calloc(reduce->segment_count + 1u, sizeof *reduce->collected);
    reduce->parts = calloc(reduce->segment_count + 1u, sizeof *reduce->parts);
    if (!reduce->segments || !reduce->cell_first || !reduce->cell_segments || !reduce->collected || !reduce->parts)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for %u segments of the gradient", reduce->segment_count);
    make_segments(reduce, config, reduce->segments);
    for (uint32_t i = 0; i < reduce->segment_count; i++)
        number_requests(reduce, i);
    uint64_t align = REDUCE_ALIGN_FLOATS;
    reduce->segment_floats = (reduce->segment_floats + align - 1) / align * align;
    return MU_OK;
}

static void choose_window(struct mu_reduce *reduce, uint64_t staging_bytes)
{
    uint64_t bytes = reduce->segment_floats * sizeof(float) * reduce->staging_count;
    uint64_t window = bytes > 0 ? staging_bytes / bytes : reduce->collected_count;
    if (window < MU_REDUCE_WINDOW_MIN)
        window = MU_REDUCE_WINDOW_MIN;
    reduce->window = window < reduce->collected_count ? (uint32_t)window : reduce->collected_count;
}

enum mu_status mu_reduce_plan(struct mu_reduce *reduce, const struct mu_reduce_config *config, struct mu_error *err)
{
    reduce->world_kin = find_relatives(config->world, config->rank, config->tree);
    reduce->kin = find_relatives(config->replicas, config->index, config->tree);
    reduce->mesh = reduce->kin.mesh;
    reduce->scatter = reduce->sharded && reduce->mesh;
    enum mu_status status = plan_sum(reduce, config, err);
    if (status == MU_OK)
        status = plan_segments(reduce, config, err);
    if (status != MU_OK)
        return status;
    choose_window(reduce, config->staging_bytes);
    return config->gpus && config->replicas > 1 ? reduce_nccl_plan(reduce, config, err) : MU_OK;
}
