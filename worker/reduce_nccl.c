/* Gradients and updated parameters between GPUs: what reduce.c and reduce_gather.c move over sockets, in exchanges of
 * NCCL, on a track beside the kernels that compute.
 *
 * NCCL wants the same operations in the same order from all, so segments go in buckets, in the order in which the
 * backward pass completes them, which is the same everywhere; each replica adds up its part of every bucket
 * (struct link_plan), and a bucket goes as soon as it is ready, while the backward pass goes on.
 *
 *   bucket:  roots to the adders of the group -> they add, in tree order [-> groups' sums to one adder -> it adds ->
 *            the sum to the other groups' adders] -> sum to all of the group (sharded: to the owner and its buddy)
 *
 * The track orders all of it: staging memory is used again as soon as it was added from. The host waits once, at the
 * end, where it sees whether all of it is really done. */
#include "worker/reduce_internal.h"

#include "common/fault.h"

static void move(struct mu_reduce *reduce, bool send, uint32_t peer, uint64_t exchange, float *data, uint64_t size)
{
    struct link_plan *plan = reduce->gpus;
    MU_ASSERT(plan->move_count < plan->move_room);
    plan->moves[plan->move_count++] = (struct mu_nccl_move){
        .peer = peer, .send = send, .exchange = exchange, .data = data, .size_bytes = size * sizeof *data};
}

/* After all that the main track was given so far. */
static enum mu_status exchange(struct mu_reduce *reduce, struct mu_error *err)
{
    struct link_plan *plan = reduce->gpus;
    size_t count = plan->move_count;
    plan->move_count = 0;
    return mu_nccl_link_exchange(reduce->link, MU_NCCL_REPLICAS, MU_TRACK_REPLICAS, plan->moves, count, err);
}

/* What the main track is given from now on sees what has come. */
static void join(struct mu_reduce *reduce)
{
    mu_device_signal(reduce->link->device, MU_TRACK_REPLICAS, LINK_POINT_REPLICAS);
    mu_device_follow(reduce->link->device, MU_TRACK_MAIN, LINK_POINT_REPLICAS);
}

/* ---- sums ---- */

struct bucket {
    uint32_t first, end; /* segments */
};

/* Of one segment, on this replica. */
struct role {
    const struct segment *segment;
    uint32_t index, adder; /* adder: replica of this group */
    uint32_t turn;         /* among those that this replica adds up */
    bool adds, last;       /* last: of several groups it is this replica that adds them up */
};

static struct role role_of(const struct mu_reduce *reduce, struct bucket bucket, uint32_t index)
{
    const struct link_plan *plan = reduce->gpus;
    struct role role = {.segment = &reduce->segments[index], .index = index};
    role.adder = reduce->shards.first + index % plan->adders;
    role.turn = (index - bucket.first) / plan->adders;
    role.adds = role.adder == reduce->index;
    role.last = role.adds && index / plan->adders % plan->groups == plan->group;
    return role;
}

static uint64_t number_of(const struct role *role, uint32_t root)
{
    return (uint64_t)role->index << REDUCE_ROOT_BITS | root;
}

static float *sum_of(const struct mu_reduce *reduce, const struct role *role)
{
    return reduce->stack[0] + role->segment->offset;
}

/* Roots of other replicas come here, to be added. */
static void take_inputs(struct mu_reduce *reduce, const struct role *role, const struct additions *sum)
{
    for (uint32_t i = 0; i < sum->input_count; i++)
        move(reduce, false, sum->inputs[i].peer, number_of(role, sum->inputs[i].number),
             reduce_storage(reduce, role->segment, sum->input_storage[i], role->turn), role->segment->size);
}

static void move_roots(struct mu_reduce *reduce, const struct role *role)
{
    if (role->adds) {
        take_inputs(reduce, role, &reduce->gpus->members);
        return;
    }
    for (uint32_t k = 0; k < reduce->own_root_count; k++)
        move(reduce, true, role->adder, number_of(role, k), reduce_storage(reduce, role->segment, k, 0),
             role->segment->size);
}

/* The member of another group at this one's position. */
static uint32_t counterpart(const struct mu_reduce *reduce, uint32_t group)
{
    return reduce->gpus->group_first[group] + reduce->index - reduce->shards.first;
}

static void move_group_sums(struct mu_reduce *reduce, const struct role *role)
{
    const struct link_plan *plan = reduce->gpus;
    if (role->last)
        take_inputs(reduce, role, &plan->across);
    for (uint32_t k = 0; role->adds && !role->last && k < plan->members.result_count; k++)
        move(reduce, true, counterpart(reduce, role->index / plan->adders % plan->groups), number_of(role, k),
             reduce_storage(reduce, role->segment, plan->members.results[k], role->turn), role->segment->size);
}

static void move_across(struct mu_reduce *reduce, const struct role *role)
{
    const struct link_plan *plan = reduce->gpus;
    for (uint32_t g = 0; role->last && g < plan->groups; g++)
        if (g != plan->group)
            move(reduce, true, counterpart(reduce, g), role->index, sum_of(reduce, role), role->segment->size);
    if (role->adds && !role->last)
        move(reduce, false, counterpart(reduce, role->index / plan->adders % plan->groups), role->index,
             sum_of(reduce, role), role->segment->size);
}

/* Does a member of this group need the sum? Sharded: to update what it owns, or guards. */
static bool wants_sum(const struct mu_reduce *reduce, const struct role *role, uint32_t replica)
{
    uint32_t owner = role->segment->owner;
    if (!reduce->sharded || replica == owner)
        return true;
    if (reduce->buddy == MU_REDUCE_NO_BUDDY) /* all have one, or nobody */
        return false;
    uint32_t shift = (reduce->buddy + reduce->replicas - reduce->index) % reduce->replicas;
    return replica == (owner + shift) % reduce->replicas;
}

static void move_sums(struct mu_reduce *reduce, const struct role *role)
{
    uint32_t end = reduce->shards.first + reduce->shards.count;
    if (!role->adds && wants_sum(reduce, role, reduce->index))
        move(reduce, false, role->adder, role->index, sum_of(reduce, role), role->segment->size);
    for (uint32_t i = reduce->shards.first; role->adds && i < end; i++)
        if (i != reduce->index && wants_sum(reduce, role, i))
            move(reduce, true, i, role->index, sum_of(reduce, role), role->segment->size);
}

static enum mu_status exchange_all(struct mu_reduce *reduce, struct bucket bucket,
                                   void (*add_moves)(struct mu_reduce *reduce, const struct role *role),
                                   struct mu_error *err)
{
    for (uint32_t i = bucket.first; i < bucket.end; i++) {
        struct role role = role_of(reduce, bucket, i);
        add_moves(reduce, &role);
    }
    return exchange(reduce, err);
}

/* On the track, between two exchanges. `across`: of the groups, else of the group's members. */
static enum mu_status add_all(struct mu_reduce *reduce, struct bucket bucket, bool across, struct mu_error *err)
{
    const struct additions *sum = across ? &reduce->gpus->across : &reduce->gpus->members;
    enum mu_status status = MU_OK;
    mu_device_use(reduce->link->device, MU_TRACK_REPLICAS);
    for (uint32_t i = bucket.first; i < bucket.end && status == MU_OK; i++) {
        struct role role = role_of(reduce, bucket, i);
        if (across ? role.last : role.adds)
            status = reduce_add(reduce, sum, role.segment, role.turn, err);
    }
    mu_device_use(reduce->link->device, MU_TRACK_MAIN);
    return status;
}

static enum mu_status sum_bucket(struct mu_reduce *reduce, struct bucket bucket, struct mu_error *err)
{
    MU_FAULT("worker.exchange.send");
    enum mu_status status = exchange_all(reduce, bucket, move_roots, err);
    if (status == MU_OK)
        status = add_all(reduce, bucket, false, err);
    MU_FAULT("worker.exchange.partial");
    if (status == MU_OK && reduce->gpus->groups > 1) {
        status = exchange_all(reduce, bucket, move_group_sums, err);
        if (status == MU_OK)
            status = add_all(reduce, bucket, true, err);
        if (status == MU_OK)
            status = exchange_all(reduce, bucket, move_across, err);
    }
    return status == MU_OK ? exchange_all(reduce, bucket, move_sums, err) : status;
}

void reduce_nccl_begin(struct mu_reduce *reduce)
{
    reduce->gpus->ready = reduce->gpus->next = 0;
    for (uint32_t i = 0; i < reduce->segment_count; i++)
        reduce->segments[i].ready = false;
}

enum mu_status reduce_nccl_advance(struct mu_reduce *reduce, struct mu_error *err)
{
    struct link_plan *plan = reduce->gpus;
    enum mu_status status = MU_OK;
    while (plan->ready < reduce->segment_count && reduce->segments[plan->ready].ready)
        plan->ready++;
    while (status == MU_OK && plan->next < reduce->segment_count) {
        struct bucket bucket = {plan->next, plan->next + plan->bucket};
        bucket.end = bucket.end < reduce->segment_count ? bucket.end : reduce->segment_count;
        if (plan->ready < bucket.end)
            break;
        plan->next = bucket.end;
        status = sum_bucket(reduce, bucket, err);
    }
    return status;
}

enum mu_status reduce_nccl_finish(struct mu_reduce *reduce, struct mu_error *err)
{
    const struct mu_nccl_link *link = reduce->link;
    MU_ASSERT(reduce->gpus->next == reduce->segment_count);
    join(reduce);
    return link->ops->wait(link->nccl, link->streams[MU_TRACK_MAIN], MU_COMM_FOREVER, err);
}

/* ---- the gather ---- */

static void move_part(struct mu_reduce *reduce, uint32_t index)
{
    const struct segment *segment = &reduce->segments[index];
    float *params = reduce->params + segment->offset;
    if (segment->owner != reduce->index) {
        if (segment->owner != reduce->guarded)
            move(reduce, false, segment->owner, index, params, segment->size);
        return;
    }
    for (uint32_t i = reduce->shards.first; i < reduce->shards.first + reduce->shards.count; i++)
        if (i != reduce->index && i != reduce->buddy)
            move(reduce, true, i, index, params, segment->size);
}

/* The next parts of every owner. */
static enum mu_status gather_round(struct mu_reduce *reduce, struct mu_error *err)
{
    struct link_plan *plan = reduce->gpus;
    uint32_t first = plan->gathered++ * REDUCE_GATHER_ROUND;
    for (uint32_t i = 0; i < reduce->shards.count; i++) {
        uint32_t begin = plan->owner_begin[i] + first, end = plan->owner_begin[i + 1];
        for (uint32_t k = begin; k < end && k < begin + REDUCE_GATHER_ROUND; k++)
            move_part(reduce, plan->by_owner[k]);
    }
    MU_FAULT("worker.gather.send");
    return exchange(reduce, err);
}

void reduce_nccl_gather_begin(struct mu_reduce *reduce)
{
    reduce->gpus->gathered = 0;
}

enum mu_status reduce_nccl_gather(struct mu_reduce *reduce, uint32_t parts, struct mu_error *err)
{
    const struct link_plan *plan = reduce->gpus;
    enum mu_status status = MU_OK;
    while (status == MU_OK && plan->gathered < plan->rounds &&
           (parts == reduce->part_count || parts >= (plan->gathered + 1) * REDUCE_GATHER_ROUND))
        status = gather_round(reduce, err);
    return status;
}

enum mu_status reduce_nccl_gather_finish(struct mu_reduce *reduce, struct mu_error *err)
{
    enum mu_status status = reduce_nccl_gather(reduce, reduce->part_count, err);
    if (status == MU_OK)
        join(reduce);
    return status;
}
