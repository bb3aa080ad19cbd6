#include "rpc/bytes_internal.h"

#include <grpc/byte_buffer_reader.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "common/status.h"

struct mu_rpc_bytes {
    atomic_uint ref_count;
    grpc_slice slice; /* small contents live inside it */
};

struct mu_rpc_bytes *mu_rpc_bytes_of_slice(grpc_slice slice)
{
    struct mu_rpc_bytes *bytes = malloc(sizeof *bytes);
    MU_ASSERT(bytes);
    atomic_init(&bytes->ref_count, 1);
    bytes->slice = slice;
    return bytes;
}

struct mu_rpc_bytes *mu_rpc_bytes_new(size_t size_bytes, void **ret_data)
{
    struct mu_rpc_bytes *bytes = mu_rpc_bytes_of_slice(grpc_slice_malloc(size_bytes));
    *ret_data = GRPC_SLICE_START_PTR(bytes->slice);
    return bytes;
}

struct mu_rpc_bytes *mu_rpc_bytes_copy(const void *data, size_t size_bytes)
{
    void *to;
    struct mu_rpc_bytes *bytes = mu_rpc_bytes_new(size_bytes, &to);
    if (size_bytes > 0)
        memcpy(to, data, size_bytes);
    return bytes;
}

struct mu_rpc_bytes *mu_rpc_bytes_ref(struct mu_rpc_bytes *bytes)
{
    atomic_fetch_add_explicit(&bytes->ref_count, 1, memory_order_relaxed);
    return bytes;
}

void mu_rpc_bytes_unref(struct mu_rpc_bytes *bytes)
{
    if (!bytes || atomic_fetch_sub_explicit(&bytes->ref_count, 1, memory_order_acq_rel) != 1)
        return;
    grpc_slice_unref(bytes->slice);
    free(bytes);
}

const void *mu_rpc_bytes_data(const struct mu_rpc_bytes *bytes)
{
    return GRPC_SLICE_START_PTR(bytes->slice);
}

size_t mu_rpc_bytes_size(const struct mu_rpc_bytes *bytes)
{
    return GRPC_SLICE_LENGTH(bytes->slice);
}

grpc_byte_buffer *mu_rpc_bytes_to_buffer(struct mu_rpc_bytes *bytes)
{
    return grpc_raw_byte_buffer_create(&bytes->slice, 1); /* takes its own reference */
}

bool mu_rpc_buffer_is_plain(const grpc_byte_buffer *buffer)
{
    return buffer->type == GRPC_BB_RAW && buffer->data.raw.compression == GRPC_COMPRESS_NONE;
}

grpc_slice mu_rpc_slice_of_buffer(grpc_byte_buffer *buffer)
{
    MU_ASSERT(mu_rpc_buffer_is_plain(buffer));
    grpc_slice slice;
    if (buffer->data.raw.slice_buffer.count == 1) {
        slice = grpc_slice_ref(buffer->data.raw.slice_buffer.slices[0]);
    } else {
        grpc_byte_buffer_reader reader;
        MU_ASSERT(grpc_byte_buffer_reader_init(&reader, buffer));
        slice = grpc_byte_buffer_reader_readall(&reader);
        grpc_byte_buffer_reader_destroy(&reader);
    }
    grpc_byte_buffer_destroy(buffer);
    return slice;
}
