#include "plan/memory.h"

#include "plan/balance.h"
#include "plan/model_spec.h"
#include "plan/plan.h"
#include "plan/tree.h"

enum {
    ELEMENT = sizeof(float), /* bytes */
    HEAD_TOKENS = 512,       /* tokens whose logits exist at one time */
    NORM_ROWS = 64,          /* rows whose weight gradients of a norm are summed together */
    EXACT_LEAVES = 1024,     /* up to so many leaves every possible range is looked at */
};

uint64_t mu_memory_activation_bytes(const struct mu_job_spec *spec)
{
    const struct mu_model_config *m = &spec->model;
    uint64_t n = (uint64_t)spec->batch.micro * spec->batch.length, c = m->channels;
    uint64_t vocab = (m->vocab + 15ull) / 16 * 16;
    uint64_t layers = m->layers * n * (16 * c + m->heads + 4);
    uint64_t head = n * (3 * c + 2) + 2 * n + (n < HEAD_TOKENS ? n : HEAD_TOKENS) * vocab;
    uint64_t gradients = n * c * (m->dropout > 0.0f ? 9 : 8) + (n + NORM_ROWS - 1) / NORM_ROWS * 2 * c;
    uint64_t embedding = spec->batch.accumulate * n * (c + 1);
    return (layers + head + gradients + embedding) * ELEMENT;
}

/* Most gradient buffers that a range of an even split holds at one time. */
static uint32_t even_depth(uint32_t leaves, uint32_t world)
{
    uint32_t deepest = 0;
    for (uint32_t rank = 0; rank < world; rank++) {
        uint32_t count, first = mu_plan_leaf_range(leaves, world, NULL, rank, &count);
        uint32_t depth = mu_tree_buffers(leaves, first, count);
        deepest = depth > deepest ? depth : deepest;
    }
    return deepest;
}

/* Most that any range at all can hold; a bound for very many leaves. */
static uint32_t any_depth(uint32_t leaves)
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

/* Most that any rank of an even split receives to add up for the chunks it owns (mesh), or for its subtree of ranks
 * (tree). */
static uint64_t staging_bytes(uint32_t leaves, uint32_t world, uint64_t flat)
{
    uint64_t inputs = 0, share = flat;
    if (world <= MU_MESH_WORLD_MAX) {
        uint32_t total = mu_balance_root_count(leaves, world, NULL), fewest = UINT32_MAX;
        for (uint32_t rank = 0; rank < world; rank++) {
            struct mu_tree_node roots[MU_TREE_ROOTS_MAX];
            uint32_t count, first = mu_plan_leaf_range(leaves, world, NULL, rank, &count);
            uint32_t own = mu_tree_roots(leaves, first, count, roots);
            fewest = own < fewest ? own : fewest;
        }
        inputs = total - fewest;
        share = (flat + world - 1) / world;
    } else {
        for (uint32_t n = world - 1; n > 0; n >>= 1) /* the root's children */
            inputs++;
    }
    return inputs * share < MU_MEMORY_STAGING_BYTES ? inputs * share : MU_MEMORY_STAGING_BYTES;
}

struct mu_memory_need mu_memory_of_worker(const struct mu_job_spec *spec, uint32_t world, uint32_t threads)
{
    uint32_t leaves = mu_job_leaves(spec);
    MU_ASSERT(world >= 1 && world <= leaves && threads >= 1);
    struct mu_model_spec model;
    mu_model_spec_init(&model, &spec->model);
    uint64_t flat = model.flat_size * ELEMENT, any = any_depth(leaves);
    bool eager = (any + 4) * flat <= MU_MEMORY_EAGER_BYTES; /* with staging and a whole snapshot */
    uint64_t staging = staging_bytes(leaves, world, flat);
    if (eager && staging < flat)
        staging = flat;
    struct mu_memory_need need = {
        .state_bytes = 3 * flat,
        .gradient_bytes = (eager ? any : even_depth(leaves, world)) * flat,
        .staging_bytes = staging,
        .activation_bytes = mu_memory_activation_bytes(spec),
        .snapshot_bytes = spec->checkpoint.path[0] ? 3 * (eager ? flat : (flat + world - 1) / world) : 0,
        .scratch_bytes = threads * MU_MEMORY_SCRATCH_BYTES,
        .process_bytes = MU_MEMORY_PROCESS_BYTES,
    };
    need.total_bytes = need.state_bytes + need.gradient_bytes + need.staging_bytes + need.activation_bytes +
                       need.snapshot_bytes + need.scratch_bytes + need.process_bytes;
    need.peak_bytes = need.total_bytes + (world > 1 || spec->checkpoint.path[0] ? need.state_bytes : 0);
    return need;
}
