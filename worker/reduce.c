#include "worker/reduce_internal.h"

#include <stdlib.h>
#include <string.h>

#include "common/fault.h"
#include "kernels/device.h"
#include "kernels/kernels.h"

enum mu_status mu_reduce_new(const struct mu_reduce_config *config, struct mu_reduce **ret_reduce, struct mu_error *err)
{
    MU_ASSERT(config->rank < config->world && config->index < config->replicas &&
              config->ranks[config->index] == config->rank);
    MU_ASSERT(!config->sharded || (config->replicas <= MU_MESH_WORLD_MAX && !config->tree) ||
              (config->buddy == MU_REDUCE_NO_BUDDY && config->guarded == MU_REDUCE_NO_BUDDY));
    struct mu_reduce *reduce = calloc(1, sizeof *reduce);
    if (!reduce)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the exchange of gradients");
    reduce->model = config->model;
    reduce->pool = config->pool;
    reduce->leaves = config->leaves;
    reduce->replicas = config->replicas;
    reduce->index = config->index;
    reduce->sharded = config->sharded && config->replicas > 1;
    reduce->shards = mu_layout_shard_group(config->replicas, config->index);
    reduce->buddy = reduce->sharded ? config->buddy : MU_REDUCE_NO_BUDDY;
    reduce->guarded = reduce->sharded ? config->guarded : MU_REDUCE_NO_BUDDY;
    reduce->world = config->world;
    reduce->rank = config->rank;
    enum mu_status status;
    reduce->ranks = calloc(config->replicas, sizeof *reduce->ranks);
    if (!reduce->ranks) {
        status = mu_fail(err, MU_ERR_NO_MEMORY, "no memory for %u replicas", config->replicas);
        goto failed;
    }
    memcpy(reduce->ranks, config->ranks, config->replicas * sizeof *reduce->ranks);
    status = mu_reduce_plan(reduce, config, err);
    if (status != MU_OK)
        goto failed;
    uint32_t around = reduce->world_kin.child_count + 1;
    reduce->requests = calloc(reduce->request_count + 1u, sizeof *reduce->requests);
    reduce->gathers = calloc(reduce->gather_count + 1u, sizeof *reduce->gathers);
    reduce->small_in = calloc(around, sizeof *reduce->small_in);
    reduce->small_requests = calloc(2u * around, sizeof *reduce->small_requests);
    if (!reduce->requests || !reduce->gathers || !reduce->small_in || !reduce->small_requests) {
        status = mu_fail(err, MU_ERR_NO_MEMORY, "no memory for %u requests of the exchange of gradients",
                         reduce->request_count);
        goto failed;
    }
    *ret_reduce = reduce;
    return MU_OK;
failed:
    mu_reduce_free(reduce);
    return status;
}

void mu_reduce_free(struct mu_reduce *reduce)
{
    if (!reduce)
        return;
    free(reduce->segments);
    free(reduce->ranks);
    free(reduce->cell_first);
    free(reduce->cell_segments);
    free(reduce->collected);
    free(reduce->parts);
    reduce_additions_free(&reduce->sum);
    reduce_nccl_plan_free(reduce->gpus);
    free(reduce->requests);
    free(reduce->gathers);
    free(reduce->small_in);
    free(reduce->small_requests);
    free(reduce);
}

uint64_t mu_reduce_staging_bytes(const struct mu_reduce *reduce)
{
    return (uint64_t)reduce->window * reduce->staging_count * reduce->segment_floats * sizeof(float);
}

void mu_reduce_attach(struct mu_reduce *reduce, struct mu_comm_group *group, const struct mu_nccl_link *link,
                      float *staging)
{
    MU_ASSERT((group != NULL) == (reduce->world > 1));
    reduce->group = group;
    reduce->link = link;
    reduce->staging = staging;
}

float *reduce_storage(const struct mu_reduce *reduce, const struct segment *segment, uint32_t storage, uint32_t turn)
{
    if (storage < reduce->stack_count)
        return reduce->stack[storage] + segment->offset;
    uint64_t slot = (uint64_t)(turn % reduce->window) * reduce->staging_count + (storage - reduce->stack_count);
    return reduce->staging + slot * reduce->segment_floats;
}

uint64_t reduce_up_number(const struct mu_reduce *reduce, const struct segment *segment, uint32_t root)
{
    uint64_t index = (uint64_t)(segment - reduce->segments) << REDUCE_ROOT_BITS | root;
    return exchange_number(reduce->sequence, EXCHANGE_UP, index);
}

uint64_t reduce_down_number(const struct mu_reduce *reduce, const struct segment *segment)
{
    return exchange_number(reduce->sequence, EXCHANGE_DOWN, (uint64_t)(segment - reduce->segments));
}

static bool all_done(const struct mu_comm_request *requests, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (!mu_comm_done(&requests[i]))
            return false;
    }
    return true;
}

static enum mu_status post_inputs(struct mu_reduce *reduce, uint32_t turn, struct mu_error *err)
{
    struct segment *segment = &reduce->segments[reduce->collected[turn]];
    struct mu_comm_request *requests = &reduce->requests[segment->first_request];
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; i < reduce->sum.input_count && status == MU_OK; i++) {
        const struct input *input = &reduce->sum.inputs[i];
        status =
            mu_comm_recv(reduce->group, reduce->ranks[input->peer], reduce_up_number(reduce, segment, input->number),
                         reduce_storage(reduce, segment, reduce->sum.input_storage[i], turn),
                         segment->size * sizeof(float), &requests[i], err);
    }
    return status;
}

static enum mu_status post_down(struct mu_reduce *reduce, struct segment *segment, struct mu_error *err)
{
    struct segment_counts counts = reduce_counts(reduce, segment);
    if (!counts.down)
        return MU_OK;
    return mu_comm_recv(reduce->group, reduce->ranks[reduce_parent(reduce, segment)],
                        reduce_down_number(reduce, segment), reduce->stack[0] + segment->offset,
                        segment->size * sizeof(float),
                        &reduce->requests[segment->first_request + counts.inputs + counts.ups], err);
}

/* The complete sum of a segment is in the bottom buffer: pass it on. */
static enum mu_status complete(struct mu_reduce *reduce, struct segment *segment, struct mu_error *err)
{
    struct segment_counts counts = reduce_counts(reduce, segment);
    struct mu_comm_request *requests =
        &reduce->requests[segment->first_request + counts.inputs + counts.ups + counts.down];
    MU_ASSERT(!segment->complete);
    segment->complete = true;
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; i < counts.forwards && status == MU_OK; i++) {
        uint32_t to = reduce->scatter ? reduce->buddy : reduce->kin.children[i];
        if (reduce->scatter)
            MU_FAULT("worker.buddy.send");
        status = mu_comm_send(reduce->group, reduce->ranks[to], reduce_down_number(reduce, segment),
                              reduce->stack[0] + segment->offset, segment->size * sizeof(float), &requests[i], err);
    }
    return status;
}

/* What this rank has to say about a segment is final. */
static enum mu_status deliver(struct mu_reduce *reduce, struct segment *segment, uint32_t turn, struct mu_error *err)
{
    struct segment_counts counts = reduce_counts(reduce, segment);
    int64_t parent = reduce_parent(reduce, segment);
    segment->added = true;
    if (parent == REDUCE_NOBODY)
        return complete(reduce, segment, err);
    struct mu_comm_request *requests = &reduce->requests[segment->first_request + counts.inputs];
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; i < counts.ups && status == MU_OK; i++) {
        uint32_t storage = counts.inputs > 0 ? reduce->sum.results[i] : i;
        MU_FAULT("worker.exchange.send");
        status = mu_comm_send(reduce->group, reduce->ranks[parent], reduce_up_number(reduce, segment, i),
                              reduce_storage(reduce, segment, storage, turn), segment->size * sizeof(float),
                              &requests[i], err);
    }
    return status;
}

enum mu_status reduce_add(struct mu_reduce *reduce, const struct additions *sum, const struct segment *segment,
                          uint32_t turn, struct mu_error *err)
{
    for (uint32_t i = 0; i < sum->add_count; i++) {
        const struct mu_tree_add *add = &sum->adds[i];
        enum mu_status status =
            mu_kernel_add(reduce->pool, segment->size, reduce_storage(reduce, segment, add->into, turn),
                          reduce_storage(reduce, segment, add->from, turn));
        if (status != MU_OK)
            return mu_fail(err, status, "addition of gradients: %s",
                           status == MU_ERR_CANCELLED ? "cancelled" : mu_device_trouble(mu_pool_device(reduce->pool)));
    }
    return MU_OK;
}

static enum mu_status add_inputs(struct mu_reduce *reduce, uint32_t turn, struct mu_error *err)
{
    struct segment *segment = &reduce->segments[reduce->collected[turn]];
    enum mu_status status = reduce_add(reduce, &reduce->sum, segment, turn, err);
    if (status != MU_OK)
        return status;
    MU_FAULT("worker.exchange.partial");
    return deliver(reduce, segment, turn, err);
}

/* The window slot of `turn` is free once the segment that used it before has been added and has left the staging
 * memory. */
static bool slot_free(const struct mu_reduce *reduce, uint32_t turn)
{
    if (turn < reduce->window)
        return true;
    const struct segment *before = &reduce->segments[reduce->collected[turn - reduce->window]];
    struct segment_counts counts = reduce_counts(reduce, before);
    return before->added && all_done(&reduce->requests[before->first_request + counts.inputs], counts.ups);
}

/* Posts, adds and passes on whatever can be now. Never waits. */
static enum mu_status advance(struct mu_reduce *reduce, struct mu_error *err)
{
    enum mu_status status = MU_OK;
    for (;;) {
        while (reduce->posted < reduce->collected_count && slot_free(reduce, reduce->posted)) {
            status = post_inputs(reduce, reduce->posted, err);
            if (status != MU_OK)
                return status;
            reduce->posted++;
        }
        if (reduce->next_add == reduce->posted)
            break;
        const struct segment *segment = &reduce->segments[reduce->collected[reduce->next_add]];
        if (!segment->ready || !all_done(&reduce->requests[segment->first_request], reduce->sum.input_count))
            break;
        status = add_inputs(reduce, reduce->next_add, err);
        if (status != MU_OK)
            return status;
        reduce->next_add++;
    }
    for (; reduce->next_pass < reduce->segment_count; reduce->next_pass++) {
        struct segment *segment = &reduce->segments[reduce->next_pass];
        struct segment_counts counts = reduce_counts(reduce, segment);
        if (!counts.down)
            continue;
        if (!mu_comm_done(&reduce->requests[segment->first_request + counts.inputs + counts.ups]))
            break;
        status = complete(reduce, segment, err);
        if (status != MU_OK)
            return status;
    }
    return MU_OK;
}

enum mu_status mu_reduce_begin(struct mu_reduce *reduce, uint64_t sequence, float *const *stack, struct mu_error *err)
{
    for (uint32_t i = 0; i < reduce->stack_count; i++)
        reduce->stack[i] = stack[i];
    reduce->sequence = sequence;
    reduce->posted = reduce->next_add = reduce->next_pass = 0;
    if (reduce->replicas == 1)
        return MU_OK;
    if (reduce_linked(reduce)) {
        reduce_nccl_begin(reduce);
        return MU_OK;
    }
    for (uint32_t i = 0; i < reduce->segment_count; i++) {
        struct segment *segment = &reduce->segments[i];
        segment->ready = segment->added = segment->complete = false;
        enum mu_status status = post_down(reduce, segment, err);
        if (status != MU_OK)
            return status;
    }
    return advance(reduce, err);
}

enum mu_status mu_reduce_cell_ready(struct mu_reduce *reduce, uint32_t cell, struct mu_error *err)
{
    if (reduce->replicas == 1)
        return MU_OK;
    uint32_t first = reduce->cell_first[cell];
    for (uint32_t i = first; i < first + reduce->cell_segments[cell]; i++) {
        struct segment *segment = &reduce->segments[i];
        MU_ASSERT(!segment->ready);
        segment->ready = true;
        if (reduce_collects(reduce, segment) || reduce_linked(reduce))
            continue;
        enum mu_status status = deliver(reduce, segment, 0, err);
        if (status != MU_OK)
            return status;
    }
    return reduce_linked(reduce) ? reduce_nccl_advance(reduce, err) : advance(reduce, err);
}

static enum mu_status wait_for(struct mu_reduce *reduce, const struct mu_comm_request *requests, uint32_t count,
                               struct mu_error *err)
{
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; i < count && status == MU_OK; i++)
        status = mu_comm_wait(reduce->group, &requests[i], MU_COMM_FOREVER, err);
    return status;
}

/* Own sends that are not waited for on the way: roots sent up, sums passed on. */
static enum mu_status wait_sent(struct mu_reduce *reduce, struct mu_error *err)
{
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; i < reduce->segment_count && status == MU_OK; i++) {
        const struct segment *segment = &reduce->segments[i];
        struct segment_counts counts = reduce_counts(reduce, segment);
        const struct mu_comm_request *requests = &reduce->requests[segment->first_request + counts.inputs];
        status = wait_for(reduce, requests, counts.ups, err);
        if (status == MU_OK)
            status = wait_for(reduce, requests + counts.ups + counts.down, counts.forwards, err);
    }
    return status;
}

enum mu_status mu_reduce_finish(struct mu_reduce *reduce, struct mu_error *err)
{
    if (reduce->replicas == 1)
        return MU_OK;
    if (reduce_linked(reduce))
        return reduce_nccl_finish(reduce, err);
    enum mu_status status = advance(reduce, err);
    while (status == MU_OK && reduce->next_add < reduce->collected_count) {
        uint32_t turn = reduce->next_add;
        if (turn == reduce->posted) { /* the window's slot is still being sent from */
            const struct segment *before = &reduce->segments[reduce->collected[turn - reduce->window]];
            struct segment_counts counts = reduce_counts(reduce, before);
            status = wait_for(reduce, &reduce->requests[before->first_request + counts.inputs], counts.ups, err);
        } else {
            const struct segment *segment = &reduce->segments[reduce->collected[turn]];
            MU_ASSERT(segment->ready);
            status = wait_for(reduce, &reduce->requests[segment->first_request], reduce->sum.input_count, err);
        }
        if (status == MU_OK)
            status = advance(reduce, err);
    }
    while (status == MU_OK && reduce->next_pass < reduce->segment_count) {
        const struct segment *segment = &reduce->segments[reduce->next_pass];
        struct segment_counts counts = reduce_counts(reduce, segment);
        status =
            wait_for(reduce, &reduce->requests[segment->first_request + counts.inputs + counts.ups], counts.down, err);
        if (status == MU_OK)
            status = advance(reduce, err);
    }
    if (status == MU_OK)
        status = wait_sent(reduce, err);
    return status;
}
