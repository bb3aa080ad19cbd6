/* Who adds up what between GPUs, see struct link_plan. Everything here is the same on all replicas but what is this
 * one's own: who exchanges with whom, and in how many operations, must be. */
#include "worker/reduce_internal.h"

#include <stdlib.h>

enum {
    SEGMENTS_EACH = 8,        /* of the column, that fall to one position: as long as there are so many, longer ones */
    SEGMENT_CHUNKS_MOST = 32, /* 8 MiB */
    BUCKET_BYTES = 32 << 20,  /* exchanged at once: some of it early in the backward pass, all of it at a good rate */
};

static uint32_t group_count(uint32_t replicas)
{
    return (replicas + MU_MESH_WORLD_MAX - 1) / MU_MESH_WORLD_MAX;
}

/* Members that every group has. */
static uint32_t adders_of(uint32_t replicas)
{
    return mu_layout_shard_group(replicas, replicas - 1).count;
}

/* Roots that come together on whoever has most of them: those of its group's members, and of all groups. */
static uint32_t most_roots(const struct mu_reduce_config *config)
{
    struct mu_tree_node roots[MU_TREE_ROOTS_MAX];
    uint32_t most = 0, across = 0;
    for (uint32_t first = 0, count; first < config->replicas; first += count) {
        uint32_t sum = 0;
        count = mu_layout_shard_group(config->replicas, first).count;
        for (uint32_t i = first; i < first + count; i++) {
            struct leaf_range range = reduce_leaf_range(config, i, i + 1);
            sum += mu_tree_roots(config->leaves, range.first, range.count, roots);
        }
        struct leaf_range all = reduce_leaf_range(config, first, first + count);
        across += mu_tree_roots(config->leaves, all.first, all.count, roots);
        most = sum > most ? sum : most;
    }
    return group_count(config->replicas) > 1 ? most + across : most;
}

uint32_t reduce_nccl_segment_chunks(const struct mu_reduce_config *config, uint32_t chunks)
{
    uint32_t longer = chunks / (SEGMENTS_EACH * adders_of(config->replicas));
    uint64_t each = (uint64_t)most_roots(config) * MU_CHUNK_ELEMENTS * sizeof(float);
    longer = longer < SEGMENT_CHUNKS_MOST ? longer : SEGMENT_CHUNKS_MOST;
    while (longer > 1 && longer * each > config->staging_bytes)
        longer /= 2;
    return longer > 1 ? longer : 1;
}

/* ---- the sum ---- */

static enum mu_status plan_members(struct mu_reduce *reduce, const struct mu_reduce_config *config,
                                   struct link_plan *plan, struct mu_error *err)
{
    struct source sources[MU_MESH_WORLD_MAX];
    uint32_t identity[MU_TREE_ROOTS_MAX];
    for (uint32_t k = 0; k < MU_TREE_ROOTS_MAX; k++)
        identity[k] = k;
    for (uint32_t i = 0; i < reduce->shards.count; i++) {
        uint32_t member = reduce->shards.first + i;
        struct leaf_range range = reduce_leaf_range(config, member, member + 1);
        sources[i] = (struct source){member, range.first, range.count, member == reduce->index ? identity : NULL};
    }
    return reduce_plan_additions(reduce, sources, reduce->shards.count, reduce->own_root_count == 0, 0, &plan->members,
                                 err);
}

static enum mu_status plan_across(struct mu_reduce *reduce, const struct mu_reduce_config *config,
                                  struct link_plan *plan, struct mu_error *err)
{
    uint32_t position = reduce->index - reduce->shards.first;
    struct source *sources = calloc(plan->groups, sizeof *sources);
    if (!sources)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the sums of %u groups", plan->groups);
    for (uint32_t g = 0; g < plan->groups; g++) {
        struct leaf_range range = reduce_leaf_range(config, plan->group_first[g], plan->group_first[g + 1]);
        sources[g] = (struct source){plan->group_first[g] + position, range.first, range.count,
                                     g == plan->group ? plan->members.results : NULL};
    }
    enum mu_status status = reduce_plan_additions(reduce, sources, plan->groups, plan->members.result_count == 0,
                                                  plan->members.staging_end, &plan->across, err);
    free(sources);
    return status;
}

static enum mu_status find_groups(const struct mu_reduce *reduce, struct link_plan *plan, struct mu_error *err)
{
    plan->groups = group_count(reduce->replicas);
    plan->adders = adders_of(reduce->replicas);
    plan->group_first = calloc(plan->groups + 1u, sizeof *plan->group_first);
    if (!plan->group_first)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for %u groups of replicas", plan->groups);
    for (uint32_t g = 0; g < plan->groups; g++) {
        uint32_t first = plan->group_first[g];
        plan->group_first[g + 1] = first + mu_layout_shard_group(reduce->replicas, first).count;
        if (first == reduce->shards.first)
            plan->group = g;
    }
    return MU_OK;
}

/* Staging memory and buckets: the window is the same on all replicas. */
static void choose_window(struct mu_reduce *reduce, const struct mu_reduce_config *config, struct link_plan *plan)
{
    reduce->segment_floats = 0;
    for (uint32_t i = 0; i < reduce->segment_count; i++)
        if (reduce->segments[i].size > reduce->segment_floats)
            reduce->segment_floats = reduce->segments[i].size;
    uint64_t align = REDUCE_ALIGN_FLOATS;
    reduce->segment_floats = (reduce->segment_floats + align - 1) / align * align;
    uint64_t bytes = reduce->segment_floats * sizeof(float) + 1;
    uint64_t staged = config->staging_bytes / (bytes * most_roots(config)),
             sent = BUCKET_BYTES / (bytes * plan->adders);
    uint64_t window = staged < sent ? staged : sent;
    uint32_t needed = (reduce->segment_count + plan->adders - 1) / plan->adders;
    window = window < needed ? window : needed;
    reduce->window = window > 0 ? (uint32_t)window : 1;
    reduce->staging_count =
        plan->members.staging_end > plan->across.staging_end ? plan->members.staging_end : plan->across.staging_end;
    plan->bucket = reduce->window * plan->adders;
}

/* ---- the gather ---- */

static enum mu_status plan_gather(const struct mu_reduce *reduce, struct link_plan *plan, struct mu_error *err)
{
    uint32_t owners = reduce->shards.count, next = 0;
    plan->by_owner = calloc(reduce->segment_count + 1u, sizeof *plan->by_owner);
    plan->owner_begin = calloc(owners + 1u, sizeof *plan->owner_begin);
    if (!plan->by_owner || !plan->owner_begin)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for %u segments of the gather", reduce->segment_count);
    for (uint32_t i = 0; i < owners; i++) {
        for (uint32_t s = 0; s < reduce->segment_count; s++)
            if (reduce->segments[s].owner == reduce->shards.first + i)
                plan->by_owner[next++] = s;
        plan->owner_begin[i + 1] = next;
        uint32_t rounds = (next - plan->owner_begin[i] + REDUCE_GATHER_ROUND - 1) / REDUCE_GATHER_ROUND;
        plan->rounds = rounds > plan->rounds ? rounds : plan->rounds;
    }
    return MU_OK;
}

/* ---- the whole ---- */

/* The most of: roots to adders, sums of groups, sums to all, parameters of a round. */
static enum mu_status reserve_moves(const struct mu_reduce *reduce, struct link_plan *plan, struct mu_error *err)
{
    size_t window = reduce->window, members = reduce->shards.count;
    size_t rooms[] = {window * plan->members.input_count + (size_t)plan->bucket * reduce->own_root_count,
                      window * (plan->across.input_count + plan->members.result_count), window * plan->groups,
                      window * members + plan->bucket, 2 * REDUCE_GATHER_ROUND * members};
    for (size_t i = 0; i < sizeof rooms / sizeof rooms[0]; i++)
        plan->move_room = rooms[i] > plan->move_room ? rooms[i] : plan->move_room;
    if (plan->move_room > MU_NCCL_MOVES_MAX)
        return mu_fail(err, MU_ERR_LIMIT,
                       "%zu messages of %u replicas in one exchange, at most %d are allowed; use leaf counts that are "
                       "multiples of a larger power of two",
                       plan->move_room, reduce->replicas, (int)MU_NCCL_MOVES_MAX);
    plan->moves = calloc(plan->move_room + 1, sizeof *plan->moves);
    return plan->moves ? MU_OK : mu_fail(err, MU_ERR_NO_MEMORY, "no memory for %zu messages", plan->move_room);
}

enum mu_status reduce_nccl_plan(struct mu_reduce *reduce, const struct mu_reduce_config *config, struct mu_error *err)
{
    struct link_plan *plan = reduce->gpus = calloc(1, sizeof *plan);
    if (!plan)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the exchange of %u GPUs", reduce->replicas);
    enum mu_status status = find_groups(reduce, plan, err);
    bool adds = status == MU_OK && reduce->index - reduce->shards.first < plan->adders;
    if (adds)
        status = plan_members(reduce, config, plan, err);
    if (adds && status == MU_OK && plan->groups > 1)
        status = plan_across(reduce, config, plan, err);
    if (status == MU_OK)
        choose_window(reduce, config, plan);
    if (status == MU_OK && reduce->sharded)
        status = plan_gather(reduce, plan, err);
    return status == MU_OK ? reserve_moves(reduce, plan, err) : status;
}

void reduce_nccl_plan_free(struct link_plan *plan)
{
    if (!plan)
        return;
    free(plan->group_first);
    reduce_additions_free(&plan->members);
    reduce_additions_free(&plan->across);
    free(plan->by_owner);
    free(plan->owner_begin);
    free(plan->moves);
    free(plan);
}
