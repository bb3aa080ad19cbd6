/* Immutable, reference-counted bytes: one payload may be queued on many streams at once and is copied by none of them.
 *
 * Fill the memory before the first send, then never write to it again. Reference counts are thread-safe. Like the gRPC
 * core underneath, allocation never returns NULL: the process aborts when memory is out (sizes are bounded by the
 * message limits of the caller). */
#ifndef MU_RPC_BYTES_H
#define MU_RPC_BYTES_H

#include <stddef.h>

struct mu_rpc_bytes;

/* One reference, owned by the caller. *ret_data is where to write size_bytes (may be 0) bytes. */
struct mu_rpc_bytes *mu_rpc_bytes_new(size_t size_bytes, void **ret_data);
struct mu_rpc_bytes *mu_rpc_bytes_copy(const void *data, size_t size_bytes);
struct mu_rpc_bytes *mu_rpc_bytes_ref(struct mu_rpc_bytes *bytes);
void mu_rpc_bytes_unref(struct mu_rpc_bytes *bytes); /* NULL is fine */

const void *mu_rpc_bytes_data(const struct mu_rpc_bytes *bytes);
size_t mu_rpc_bytes_size(const struct mu_rpc_bytes *bytes);

#endif
