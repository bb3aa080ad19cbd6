/* Sharded: after the update the owner of a segment sends its parameters to the other replicas. A replica receives
 * straight into its parameters: nobody computes with them from the vote on, which every rank reaches only after its
 * last backward pass. */
#include "worker/reduce_internal.h"

#include "common/fault.h"

static uint64_t number_of(const struct mu_reduce *reduce, uint32_t segment)
{
    return exchange_number(reduce->gather_sequence, EXCHANGE_GATHER, segment);
}

enum mu_status mu_reduce_gather_begin(struct mu_reduce *reduce, uint64_t sequence, float *params, struct mu_error *err)
{
    if (!reduce->sharded)
        return MU_OK;
    reduce->gather_sequence = sequence;
    reduce->params = params;
    enum mu_status status = MU_OK;
    if (reduce_linked(reduce)) {
        reduce_nccl_gather_begin(reduce);
        return reduce_nccl_gather(reduce, 0, err);
    }
    for (uint32_t i = 0; i < reduce->segment_count && status == MU_OK; i++) {
        const struct segment *segment = &reduce->segments[i];
        if (segment->owner != reduce->index && segment->owner != reduce->guarded)
            status = mu_comm_recv(reduce->group, reduce->ranks[segment->owner], number_of(reduce, i),
                                  params + segment->offset, segment->size * sizeof(float),
                                  &reduce->gathers[segment->first_gather], err);
    }
    return status;
}

uint32_t mu_reduce_part_count(const struct mu_reduce *reduce)
{
    return reduce->part_count;
}

void mu_reduce_part(const struct mu_reduce *reduce, uint32_t part, uint64_t *ret_offset, uint64_t *ret_size)
{
    const struct segment *segment = &reduce->segments[reduce->parts[part]];
    *ret_offset = segment->offset;
    *ret_size = segment->size;
}

enum mu_status mu_reduce_gather_send(struct mu_reduce *reduce, uint32_t part, struct mu_error *err)
{
    MU_ASSERT(reduce->params);
    if (reduce_linked(reduce))
        return reduce_nccl_gather(reduce, part + 1, err);
    uint32_t index = reduce->parts[part], next = 0;
    const struct segment *segment = &reduce->segments[index];
    enum mu_status status = MU_OK;
    uint32_t end = reduce->shards.first + reduce->shards.count;
    for (uint32_t i = reduce->shards.first; i < end && status == MU_OK; i++) {
        if (i == reduce->index || i == reduce->buddy) /* the buddy makes the same update */
            continue;
        MU_FAULT("worker.gather.send");
        status =
            mu_comm_send(reduce->group, reduce->ranks[i], number_of(reduce, index), reduce->params + segment->offset,
                         segment->size * sizeof(float), &reduce->gathers[segment->first_gather + next++], err);
    }
    return status;
}

enum mu_status mu_reduce_gather_finish(struct mu_reduce *reduce, struct mu_error *err)
{
    enum mu_status status = MU_OK;
    if (!reduce->params)
        return MU_OK;
    if (reduce_linked(reduce))
        status = reduce_nccl_gather_finish(reduce, err);
    for (uint32_t i = 0; i < reduce->gather_count && status == MU_OK && !reduce_linked(reduce); i++)
        status = mu_comm_wait(reduce->group, &reduce->gathers[i], MU_COMM_FOREVER, err);
    if (status == MU_OK) {
        reduce->params = NULL;
        MU_FAULT("worker.gather.complete");
    }
    return status;
}
