/* The gRPC side of bytes. Internal to rpc/. */
#ifndef MU_RPC_BYTES_INTERNAL_H
#define MU_RPC_BYTES_INTERNAL_H

#include <grpc/byte_buffer.h>
#include <grpc/slice.h>
#include <stdbool.h>

#include "rpc/bytes.h"

/* A byte buffer that shares the memory of `bytes`. The caller destroys it when the send is complete. */
grpc_byte_buffer *mu_rpc_bytes_to_buffer(struct mu_rpc_bytes *bytes);

/* False: the peer compressed it. We never ask for that (it turns a small message into gigabytes), but a peer may do it
 * all the same. */
bool mu_rpc_buffer_is_plain(const grpc_byte_buffer *buffer);

/* The content of a plain `buffer` in one piece (shared when it is in one piece already), and destroys `buffer`. The
 * caller unrefs the slice. */
grpc_slice mu_rpc_slice_of_buffer(grpc_byte_buffer *buffer);

/* Takes over the reference to `slice`. */
struct mu_rpc_bytes *mu_rpc_bytes_of_slice(grpc_slice slice);

#endif
