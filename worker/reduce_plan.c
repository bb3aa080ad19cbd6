#include "worker/reduce_internal.h"

#include <stdlib.h>

#include "plan/plan.h"

/* ---- the tree over ranks ---- */

/* Ranks below `rank` in the binomial tree, itself included: [rank, returned). */
static uint32_t subtree_end(uint32_t world, uint32_t rank)
{
    if (rank == 0)
        return world;
    uint32_t lowest = rank & (~rank + 1u);
    return world - rank < lowest ? world : rank + lowest;
}

struct leaf_range {
    uint32_t first, count;
};

static struct leaf_range range_of_ranks(const struct mu_reduce_config *config, uint32_t rank, uint32_t end)
{
    uint32_t count;
    struct leaf_range range;
    range.first = mu_plan_leaf_range(config->leaves, config->world, config->leaf_counts, rank, &count);
    range.count =
        mu_plan_leaf_range(config->leaves, config->world, config->leaf_counts, end - 1, &count) + count - range.first;
    return range;
}

/* Roots that `rank` sends: of its own range (mesh), or of its whole subtree of ranks (tree). */
static uint32_t roots_sent(const struct mu_reduce_config *config, uint32_t rank,
                           struct mu_tree_node out[MU_TREE_ROOTS_MAX])
{
    uint32_t end = config->mesh ? rank + 1 : subtree_end(config->world, rank);
    struct leaf_range range = range_of_ranks(config, rank, end);
    return mu_tree_roots(config->leaves, range.first, range.count, out);
}

static void find_relatives(struct mu_reduce *reduce)
{
    uint32_t neighbours[MU_NEIGHBOURS_MAX];
    uint32_t count = mu_plan_neighbours(reduce->world, reduce->mesh, reduce->rank, neighbours);
    reduce->parent = REDUCE_NO_RANK;
    for (uint32_t i = 0; i < count; i++) {
        if (!reduce->mesh && neighbours[i] < reduce->rank)
            reduce->parent = neighbours[i];
        else
            reduce->children[reduce->child_count++] = neighbours[i];
    }
}

/* ---- additions ---- */

/* A node of the tree of leaves while the program of additions is made. */
struct slot {
    struct mu_tree_node node;
    uint32_t storage;
};

struct program {
    struct mu_reduce *reduce;
    struct slot stack[MU_TREE_ROOTS_MAX];
    uint32_t depth;
};

/* Pushes a root, then adds siblings. An addition goes into the left node's storage, except that the bottom buffer
 * (storage 0) always takes the sum: a + b and b + a have the same bits. */
static void program_push(struct program *program, struct mu_tree_node node, uint32_t storage)
{
    struct mu_reduce *reduce = program->reduce;
    MU_ASSERT(program->depth < MU_TREE_ROOTS_MAX);
    program->stack[program->depth++] = (struct slot){node, storage};
    while (program->depth > 1) {
        struct slot *low = &program->stack[program->depth - 2], *high = &program->stack[program->depth - 1];
        if (!reduce_siblings(reduce->leaves, low->node, high->node))
            break;
        uint32_t into = high->storage == 0 ? 0 : low->storage, from = high->storage == 0 ? low->storage : high->storage;
        reduce->adds[reduce->add_count++] = (struct mu_tree_add){.into = into, .from = from};
        low->node.count += high->node.count;
        low->storage = into;
        program->depth--;
    }
}

static void take_input(struct program *program, uint32_t peer, uint32_t number, struct mu_tree_node node)
{
    struct mu_reduce *reduce = program->reduce;
    uint32_t index = reduce->input_count++;
    /* A rank without leaves receives the first root in its bottom buffer, where the sum is wanted. */
    uint32_t storage = reduce->own_root_count == 0 && index == 0 ? 0 : reduce->stack_count + reduce->staging_count++;
    reduce->inputs[index] = (struct input){.peer = peer, .number = number};
    reduce->input_storage[index] = storage;
    program_push(program, node, storage);
}

/* The ranks whose roots come to this one, ascending, itself among them. */
static uint32_t sources(const struct mu_reduce *reduce, uint32_t out[MU_NEIGHBOURS_MAX + 1])
{
    uint32_t count = 0;
    bool self_done = false;
    for (uint32_t i = 0; i < reduce->child_count; i++) {
        if (!self_done && reduce->children[i] > reduce->rank) {
            out[count++] = reduce->rank;
            self_done = true;
        }
        out[count++] = reduce->children[i];
    }
    if (!self_done)
        out[count++] = reduce->rank;
    return count;
}

static enum mu_status plan_additions(struct mu_reduce *reduce, const struct mu_reduce_config *config,
                                     struct mu_error *err)
{
    struct mu_tree_node roots[MU_TREE_ROOTS_MAX];
    struct leaf_range own = range_of_ranks(config, reduce->rank, reduce->rank + 1);
    reduce->own_root_count = mu_tree_roots(config->leaves, own.first, own.count, roots);
    reduce->stack_count = reduce->own_root_count > 0 ? reduce->own_root_count : 1;

    uint32_t ranks[MU_NEIGHBOURS_MAX + 1], rank_count = sources(reduce, ranks), total = 0;
    for (uint32_t i = 0; i < rank_count; i++)
        total += ranks[i] == reduce->rank ? reduce->own_root_count : roots_sent(config, ranks[i], roots);
    size_t room = total > 0 ? total : 1;
    reduce->inputs = calloc(room, sizeof *reduce->inputs);
    reduce->input_storage = calloc(room, sizeof *reduce->input_storage);
    reduce->adds = calloc(room, sizeof *reduce->adds);
    if (!reduce->inputs || !reduce->input_storage || !reduce->adds)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the additions of %u subtree roots", total);

    struct program program = {.reduce = reduce};
    for (uint32_t i = 0; i < rank_count; i++) {
        bool self = ranks[i] == reduce->rank;
        uint32_t count =
            self ? mu_tree_roots(config->leaves, own.first, own.count, roots) : roots_sent(config, ranks[i], roots);
        for (uint32_t k = 0; k < count; k++) {
            if (self)
                program_push(&program, roots[k], k);
            else
                take_input(&program, ranks[i], k, roots[k]);
        }
    }
    reduce->result_count = program.depth;
    for (uint32_t i = 0; i < program.depth; i++)
        reduce->results[i] = program.stack[i].storage;
    return MU_OK;
}

/* ---- segments ---- */

static uint32_t owner_of_chunk(const struct mu_model_spec *model, uint32_t world, uint32_t chunk)
{
    uint32_t base = model->chunk_count / world, extra = model->chunk_count % world;
    uint32_t in_larger = extra * (base + 1); /* chunks of the ranks that own one more */
    return chunk < in_larger ? chunk / (base + 1) : extra + (chunk - in_larger) / base;
}

/* Calls for every segment, or only counts (segments NULL). Cells from the last to the first: the order of the backward
 * pass. */
static uint32_t make_segments(struct mu_reduce *reduce, struct segment *segments)
{
    const struct mu_model_spec *model = reduce->model;
    uint32_t count = 0;
    for (uint32_t position = 0; position < model->cell_count; position++) {
        uint32_t index = model->cell_count - 1 - position;
        struct mu_cell cell = mu_model_cell(model, index);
        if (segments)
            reduce->cell_first[position] = count;
        for (uint32_t i = 0, run; i < cell.chunk_count; i += run) {
            uint32_t chunk = cell.first_chunk + i,
                     owner = reduce->mesh ? owner_of_chunk(model, reduce->world, chunk) : 0;
            run = 1;
            while (run < reduce->segment_chunks && i + run < cell.chunk_count &&
                   (!reduce->mesh || owner_of_chunk(model, reduce->world, chunk + run) == owner))
                run++;
            uint64_t start = (uint64_t)i * MU_CHUNK_ELEMENTS, end = (uint64_t)(i + run) * MU_CHUNK_ELEMENTS;
            if (end > cell.size)
                end = cell.size;
            if (segments)
                segments[count] =
                    (struct segment){.cell = index, .owner = owner, .offset = cell.offset + start, .size = end - start};
            count++;
        }
    }
    if (segments)
        reduce->cell_first[model->cell_count] = count;
    return count;
}

/* Longer segments where one peer would otherwise have too many messages in one step. */
static uint32_t choose_segment_chunks(const struct mu_reduce *reduce, const struct mu_reduce_config *config)
{
    struct mu_tree_node roots[MU_TREE_ROOTS_MAX];
    uint32_t most = 1;
    for (uint32_t rank = 0; rank < config->world; rank++) {
        uint32_t count = roots_sent(config, rank, roots);
        most = count > most ? count : most;
    }
    uint32_t segments = MU_REDUCE_REQUESTS_MAX / most;
    uint32_t chunks = (reduce->model->chunk_count + segments - 1) / segments;
    return chunks > config->segment_chunks ? chunks : config->segment_chunks ? config->segment_chunks : 1;
}

static enum mu_status plan_segments(struct mu_reduce *reduce, const struct mu_reduce_config *config,
                                    struct mu_error *err)
{
    reduce->segment_chunks = choose_segment_chunks(reduce, config);
    reduce->segment_count = make_segments(reduce, NULL);
    MU_ASSERT(reduce->segment_count < 1u << (EXCHANGE_INDEX_BITS - EXCHANGE_ROOT_BITS));
    reduce->segments = calloc(reduce->segment_count, sizeof *reduce->segments);
    reduce->cell_first = calloc(reduce->model->cell_count + 1, sizeof *reduce->cell_first);
    reduce->collected = calloc(reduce->segment_count, sizeof *reduce->collected);
    if (!reduce->segments || !reduce->cell_first || !reduce->collected)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for %u segments of the gradient", reduce->segment_count);
    make_segments(reduce, reduce->segments);
    for (uint32_t i = 0; i < reduce->segment_count; i++) {
        struct segment *segment = &reduce->segments[i];
        struct segment_counts counts = reduce_counts(reduce, segment);
        segment->first_request = reduce->request_count;
        reduce->request_count += counts.inputs + counts.ups + counts.down + counts.forwards;
        if (!reduce_collects(reduce, segment))
            continue;
        reduce->collected[reduce->collected_count++] = i;
        if (segment->size > reduce->segment_floats)
            reduce->segment_floats = segment->size;
    }
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
    find_relatives(reduce);
    enum mu_status status = plan_additions(reduce, config, err);
    if (status == MU_OK)
        status = plan_segments(reduce, config, err);
    if (status == MU_OK)
        choose_window(reduce, config->staging_bytes);
    return status;
}
