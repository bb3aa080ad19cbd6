/* Operations of a scope. A communicator is given one at a time, and has taken it when the call returns. */
#include "worker/comm_nccl_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "kernels/cuda/cuda.h"
#include "kernels/kernels.h"
#include "plan/tree.h"

/* ---- beginning and end ---- */

static void note_stream(struct mu_nccl *nccl, cudaStream_t stream)
{
    for (uint32_t i = 0; i < nccl->stream_count; i++)
        if (nccl->streams[i] == stream)
            return;
    MU_ASSERT(nccl->stream_count < NCCL_STREAMS_MAX);
    nccl->streams[nccl->stream_count++] = stream;
}

/* Nothing to say, because nobody else is there or nothing is to be moved: *ret_idle. */
static enum mu_status begin(struct mu_nccl *nccl, enum mu_nccl_scope scope, const char *what, size_t size_bytes,
                            cudaStream_t stream, bool *ret_idle, struct mu_error *err)
{
    struct channel *channel = &nccl->channels[scope];
    MU_ASSERT(channel->size > 0);
    *ret_idle = channel->size == 1 || size_bytes == 0;
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    (void)cudaStreamIsCapturing(stream, &capture);
    /* While the stream is recorded nothing else may be enqueued, as the sockets do. */
    enum mu_status status =
        capture == cudaStreamCaptureStatusNone ? mu_nccl_progress(nccl, err) : nccl_state(nccl, err);
    if (status != MU_OK)
        return status;
    if (*ret_idle)
        return MU_OK;
    note_stream(nccl, stream);
    snprintf(nccl->doing, sizeof nccl->doing, "%s %llu of the %s (%u ranks from rank %u, %zu bytes)", what,
             (unsigned long long)++channel->operations, nccl_scope_name(scope), channel->size, channel->ranks[0],
             size_bytes);
    return MU_OK;
}

static enum mu_status taken(struct mu_nccl *nccl, enum mu_nccl_scope scope, ncclResult_t result, struct mu_error *err)
{
    uint64_t deadline_us = nccl->stall_us ? mu_clock_mono_us() + nccl->stall_us : MU_COMM_FOREVER;
    return nccl_settle(nccl, nccl->channels[scope].comm, result, deadline_us, err);
}

/* A non-blocking communicator may say either. */
static bool going(ncclResult_t result)
{
    return result == ncclSuccess || result == ncclInProgress;
}

/* Of several calls between the start and the end of an NCCL group: the first that failed counts. */
static ncclResult_t end_group(ncclResult_t calls)
{
    ncclResult_t end = ncclGroupEnd();
    return going(calls) ? end : calls;
}

static enum mu_status copy(struct mu_nccl *nccl, void *to, const void *from, size_t size_bytes, cudaStream_t stream,
                           struct mu_error *err)
{
    cudaError_t error = size_bytes == 0 || to == from
                            ? cudaSuccess
                            : cudaMemcpyAsync(to, from, size_bytes, cudaMemcpyDeviceToDevice, stream);
    if (error == cudaSuccess)
        return MU_OK;
    return nccl_fail(nccl, MU_ERR_IO, err, "copying %zu bytes on the GPU: %s", size_bytes, cudaGetErrorString(error));
}

/* ---- moving ---- */

/* NCCL matches what goes from one rank to another by order: so order it by what both sides know. */
static int by_number(const void *a, const void *b)
{
    const struct mu_nccl_move *left = a, *right = b;
    if (left->peer != right->peer)
        return left->peer < right->peer ? -1 : 1;
    return left->exchange < right->exchange ? -1 : left->exchange > right->exchange;
}

static ncclResult_t post_moves(struct mu_nccl *nccl, const struct channel *channel, size_t count, cudaStream_t stream)
{
    ncclResult_t result = ncclGroupStart();
    for (size_t i = 0; i < count && going(result); i++) {
        const struct mu_nccl_move *move = &nccl->sorted[i];
        result = move->send ? ncclSend(move->data, move->size_bytes, ncclUint8, (int)move->peer, channel->comm, stream)
                            : ncclRecv(move->data, move->size_bytes, ncclUint8, (int)move->peer, channel->comm, stream);
    }
    return end_group(result);
}

static enum mu_status sort_room(struct mu_nccl *nccl, size_t count, struct mu_error *err)
{
    if (count <= nccl->sorted_room)
        return MU_OK;
    free(nccl->sorted);
    nccl->sorted = calloc(count, sizeof *nccl->sorted);
    nccl->sorted_room = nccl->sorted ? count : 0;
    return nccl->sorted ? MU_OK : mu_fail(err, MU_ERR_NO_MEMORY, "no memory for %zu moves", count);
}

enum mu_status mu_nccl_exchange(struct mu_nccl *nccl, enum mu_nccl_scope scope, const struct mu_nccl_move *moves,
                                size_t count, cudaStream_t stream, struct mu_error *err)
{
    struct channel *channel = &nccl->channels[scope];
    size_t used = 0, size_bytes = 0;
    bool idle;
    if (count > MU_NCCL_MOVES_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "%zu moves in one exchange, at most %d are allowed", count,
                       (int)MU_NCCL_MOVES_MAX);
    enum mu_status status = sort_room(nccl, count, err);
    if (status != MU_OK)
        return status;
    for (size_t i = 0; i < count; i++) {
        MU_ASSERT(moves[i].peer < channel->size && moves[i].peer != channel->index);
        size_bytes += moves[i].size_bytes;
        if (moves[i].size_bytes > 0) /* else there is nothing to move on the other side either */
            nccl->sorted[used++] = moves[i];
    }
    status = begin(nccl, scope, "exchange", size_bytes, stream, &idle, err);
    if (status != MU_OK || idle)
        return status;
    qsort(nccl->sorted, used, sizeof nccl->sorted[0], by_number);
    return taken(nccl, scope, post_moves(nccl, channel, used, stream), err);
}

enum mu_status mu_nccl_all_gather(struct mu_nccl *nccl, enum mu_nccl_scope scope, void *blocks, size_t block_bytes,
                                  cudaStream_t stream, struct mu_error *err)
{
    const struct channel *channel = &nccl->channels[scope];
    bool idle;
    enum mu_status status = begin(nccl, scope, "all-gather", block_bytes, stream, &idle, err);
    if (status != MU_OK || idle)
        return status;
    const char *own = (const char *)blocks + channel->index * block_bytes;
    return taken(nccl, scope, ncclAllGather(own, blocks, block_bytes, ncclUint8, channel->comm, stream), err);
}

enum mu_status mu_nccl_all_to_all(struct mu_nccl *nccl, enum mu_nccl_scope scope, const void *send, void *recv,
                                  size_t block_bytes, cudaStream_t stream, struct mu_error *err)
{
    const struct channel *channel = &nccl->channels[scope];
    const char *from = send;
    char *to = recv;
    bool idle;
    enum mu_status status = begin(nccl, scope, "all-to-all", block_bytes, stream, &idle, err);
    if (status == MU_OK)
        status = copy(nccl, to + channel->index * block_bytes, from + channel->index * block_bytes, block_bytes, stream,
                      err);
    if (status != MU_OK || idle)
        return status;
    ncclResult_t result = ncclGroupStart();
    for (uint32_t i = 0; i < channel->size && going(result); i++) {
        if (i == channel->index)
            continue;
        result = ncclSend(from + i * block_bytes, block_bytes, ncclUint8, (int)i, channel->comm, stream);
        if (going(result))
            result = ncclRecv(to + i * block_bytes, block_bytes, ncclUint8, (int)i, channel->comm, stream);
    }
    return taken(nccl, scope, end_group(result), err);
}

enum mu_status mu_nccl_broadcast(struct mu_nccl *nccl, enum mu_nccl_scope scope, uint32_t root, void *data,
                                 size_t size_bytes, cudaStream_t stream, struct mu_error *err)
{
    const struct channel *channel = &nccl->channels[scope];
    bool idle;
    MU_ASSERT(root < channel->size);
    enum mu_status status = begin(nccl, scope, "broadcast", size_bytes, stream, &idle, err);
    if (status != MU_OK || idle)
        return status;
    return taken(nccl, scope, ncclBroadcast(data, data, size_bytes, ncclUint8, (int)root, channel->comm, stream), err);
}

/* ---- sums ---- */

size_t mu_nccl_staging_floats(size_t count, uint32_t size)
{
    return size < 2 ? 0 : (size - 1) * mu_nccl_block_offset(count, size, 1);
}

static size_t block_size(size_t count, uint32_t size, uint32_t index)
{
    return mu_nccl_block_offset(count, size, index + 1) - mu_nccl_block_offset(count, size, index);
}

/* Everybody's partial of the own block comes, the others' blocks of the own partial go. */
static ncclResult_t spread_partials(struct mu_nccl *nccl, const struct channel *channel, float *data, size_t count,
                                    float *staging, cudaStream_t stream)
{
    size_t own = block_size(count, channel->size, channel->index);
    ncclResult_t result = ncclGroupStart();
    for (uint32_t i = 0; i < channel->size; i++) {
        size_t theirs = block_size(count, channel->size, i);
        float *block = data + mu_nccl_block_offset(count, channel->size, i);
        nccl->partials[i] = i == channel->index ? block : staging;
        if (i == channel->index)
            continue;
        if (going(result) && theirs > 0)
            result = ncclSend(block, theirs, ncclFloat32, (int)i, channel->comm, stream);
        if (going(result) && own > 0)
            result = ncclRecv(staging, own, ncclFloat32, (int)i, channel->comm, stream);
        staging += own;
    }
    return end_group(result);
}

/* In tree order, into the own block: a + b and b + a are the same bits, so it may be either side of its additions. */
static enum mu_status add_partials(struct mu_nccl *nccl, const struct channel *channel, struct mu_pool *pool,
                                   size_t size, struct mu_error *err)
{
    float **partials = nccl->partials, *own = partials[channel->index];
    for (uint32_t i = 0; i < channel->size; i++)
        nccl->nodes[i] = (struct mu_tree_node){i, 1};
    uint32_t add_count = mu_tree_schedule(channel->size, nccl->nodes, channel->size, nccl->adds);
    for (uint32_t i = 0; i < add_count; i++) {
        float *into = partials[nccl->adds[i].into], *from = partials[nccl->adds[i].from];
        if (from == own) {
            from = into;
            into = partials[nccl->adds[i].into] = own;
        }
        enum mu_status status = mu_kernel_add(pool, size, into, from);
        if (status != MU_OK)
            return nccl_fail(nccl, status, err, "adding the partials of %u ranks failed", channel->size);
    }
    return MU_OK;
}

static enum mu_status scatter_exact(struct mu_nccl *nccl, enum mu_nccl_scope scope, const struct mu_nccl_sum *sum,
                                    float *data, size_t count, cudaStream_t stream, struct mu_error *err)
{
    const struct channel *channel = &nccl->channels[scope];
    const struct mu_cuda *cuda = mu_pool_cuda(sum->pool);
    MU_ASSERT(cuda && cuda->stream == stream); /* additions come after the partials */
    enum mu_status status = taken(nccl, scope, spread_partials(nccl, channel, data, count, sum->staging, stream), err);
    size_t own = block_size(count, channel->size, channel->index);
    return status == MU_OK && own > 0 ? add_partials(nccl, channel, sum->pool, own, err) : status;
}

/* NCCL scatters equal blocks only. */
static ncclResult_t scatter_fast(const struct channel *channel, float *data, size_t count, cudaStream_t stream)
{
    float *own = data + mu_nccl_block_offset(count, channel->size, channel->index);
    if (count % channel->size == 0)
        return ncclReduceScatter(data, own, count / channel->size, ncclFloat32, ncclSum, channel->comm, stream);
    ncclResult_t result = ncclGroupStart();
    for (uint32_t i = 0; i < channel->size && going(result); i++) {
        float *block = data + mu_nccl_block_offset(count, channel->size, i);
        size_t size = block_size(count, channel->size, i);
        if (size > 0)
            result = ncclReduce(block, block, size, ncclFloat32, ncclSum, (int)i, channel->comm, stream);
    }
    return end_group(result);
}

/* Every member's block to all. */
static ncclResult_t gather_blocks(const struct channel *channel, float *data, size_t count, cudaStream_t stream)
{
    const float *own = data + mu_nccl_block_offset(count, channel->size, channel->index);
    if (count % channel->size == 0)
        return ncclAllGather(own, data, count / channel->size, ncclFloat32, channel->comm, stream);
    ncclResult_t result = ncclGroupStart();
    for (uint32_t i = 0; i < channel->size && going(result); i++) {
        float *block = data + mu_nccl_block_offset(count, channel->size, i);
        size_t size = block_size(count, channel->size, i);
        if (size > 0)
            result = ncclBroadcast(block, block, size, ncclFloat32, (int)i, channel->comm, stream);
    }
    return end_group(result);
}

enum mu_status mu_nccl_reduce_scatter(struct mu_nccl *nccl, enum mu_nccl_scope scope, const struct mu_nccl_sum *sum,
                                      float *data, size_t count, cudaStream_t stream, struct mu_error *err)
{
    bool idle;
    enum mu_status status = begin(nccl, scope, "reduce-scatter", count * sizeof *data, stream, &idle, err);
    if (status != MU_OK || idle)
        return status;
    if (sum->exact)
        return scatter_exact(nccl, scope, sum, data, count, stream, err);
    return taken(nccl, scope, scatter_fast(&nccl->channels[scope], data, count, stream), err);
}

enum mu_status mu_nccl_all_reduce(struct mu_nccl *nccl, enum mu_nccl_scope scope, const struct mu_nccl_sum *sum,
                                  float *data, size_t count, cudaStream_t stream, struct mu_error *err)
{
    const struct channel *channel = &nccl->channels[scope];
    bool idle;
    enum mu_status status = begin(nccl, scope, "all-reduce", count * sizeof *data, stream, &idle, err);
    if (status != MU_OK || idle)
        return status;
    if (!sum->exact)
        return taken(nccl, scope, ncclAllReduce(data, data, count, ncclFloat32, ncclSum, channel->comm, stream), err);
    status = scatter_exact(nccl, scope, sum, data, count, stream, err);
    return status == MU_OK ? taken(nccl, scope, gather_blocks(channel, data, count, stream), err) : status;
}
