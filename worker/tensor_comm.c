#include "worker/tensor_comm.h"

#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/fault.h"
#include "worker/exchange.h"

struct mu_tensor_comm {
    struct mu_tensor_comm_config config;
    uint32_t ranks[MU_SLICES_MAX];
    struct mu_comm_request receives[MU_SLICES_MAX], sends[MU_SLICES_MAX];
    uint64_t count, spent_us;
    struct mu_error error;
};

enum mu_status mu_tensor_comm_new(const struct mu_tensor_comm_config *config, struct mu_tensor_comm **ret_comm,
                                  struct mu_error *err)
{
    MU_ASSERT(config->size >= 2 && config->size <= MU_SLICES_MAX && config->index < config->size);
    struct mu_tensor_comm *comm = calloc(1, sizeof *comm);
    if (!comm)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for a tensor group of %u ranks", config->size);
    comm->config = *config;
    memcpy(comm->ranks, config->ranks, config->size * sizeof *comm->ranks);
    comm->config.ranks = comm->ranks;
    *ret_comm = comm;
    return MU_OK;
}

void mu_tensor_comm_free(struct mu_tensor_comm *comm)
{
    free(comm);
}

const struct mu_error *mu_tensor_comm_error(const struct mu_tensor_comm *comm)
{
    return &comm->error;
}

uint64_t mu_tensor_comm_spent_us(const struct mu_tensor_comm *comm)
{
    return comm->spent_us;
}

/* Block i of `recv` comes from rank i; rank i gets block i of `send`, or always the same one (stride 0). Receives
 * first: then no round trip is added. */
static enum mu_status post(struct mu_tensor_comm *comm, const uint8_t *send, size_t stride_bytes, uint8_t *recv,
                           size_t block_bytes)
{
    uint32_t index = comm->config.index;
    uint64_t number = exchange_counted(EXCHANGE_TENSOR, comm->count++);
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; i < comm->config.size && status == MU_OK; i++)
        if (i != index)
            status = mu_comm_recv(comm->config.group, comm->ranks[i], number, recv + i * block_bytes, block_bytes,
                                  &comm->receives[i], &comm->error);
    for (uint32_t i = 0; i < comm->config.size && status == MU_OK; i++)
        if (i != index)
            status = mu_comm_send(comm->config.group, comm->ranks[i], number, send + i * stride_bytes, block_bytes,
                                  &comm->sends[i], &comm->error);
    return status;
}

static enum mu_status exchange(struct mu_tensor_comm *comm, const uint8_t *send, size_t stride_bytes, uint8_t *recv,
                               size_t block_bytes)
{
    const struct mu_tensor_comm_config *config = &comm->config;
    uint64_t begin_us = mu_clock_mono_us();
    enum mu_status status = post(comm, send, stride_bytes, recv, block_bytes);
    MU_FAULT("worker.tensor.exchange");
    if (config->waiting)
        config->waiting(config->waiting_ctx, true);
    for (uint32_t i = 0; i < config->size && status == MU_OK; i++) {
        if (i == config->index)
            continue;
        status = mu_comm_wait(config->group, &comm->receives[i], MU_COMM_FOREVER, &comm->error);
        if (status == MU_OK)
            status = mu_comm_wait(config->group, &comm->sends[i], MU_COMM_FOREVER, &comm->error);
    }
    if (config->waiting)
        config->waiting(config->waiting_ctx, false);
    comm->spent_us += mu_clock_mono_us() - begin_us;
    return status;
}

enum mu_status mu_tensor_comm_all_gather(struct mu_tensor_comm *comm, void *blocks, size_t block_bytes)
{
    const struct mu_nccl_link *link = mu_nccl_link_open(comm->config.link);
    if (link)
        return link->ops->all_gather(link->nccl, MU_NCCL_TENSOR, blocks, block_bytes, link->streams[MU_TRACK_MAIN],
                                     &comm->error);
    const uint8_t *own = (const uint8_t *)blocks + comm->config.index * block_bytes;
    return exchange(comm, own, 0, blocks, block_bytes);
}

enum mu_status mu_tensor_comm_all_to_all(struct mu_tensor_comm *comm, const void *send, void *recv, size_t block_bytes)
{
    const struct mu_nccl_link *link = mu_nccl_link_open(comm->config.link);
    if (link)
        return link->ops->all_to_all(link->nccl, MU_NCCL_TENSOR, send, recv, block_bytes, link->streams[MU_TRACK_MAIN],
                                     &comm->error);
    size_t own = comm->config.index * block_bytes;
    enum mu_status status =
        mu_device_copy(comm->config.device, (uint8_t *)recv + own, (const uint8_t *)send + own, block_bytes);
    if (status != MU_OK)
        return mu_fail(&comm->error, status, "%s", mu_device_trouble(comm->config.device));
    return exchange(comm, send, block_bytes, recv, block_bytes);
}
