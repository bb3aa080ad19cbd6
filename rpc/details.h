/* Why a call failed, for programs: struct mu_error <-> the trailer "grpc-status-details-bin" (muster/v1/error.proto).
 * Pure, thread-safe. Internal to rpc/. */
#ifndef MU_RPC_DETAILS_H
#define MU_RPC_DETAILS_H

#include <stddef.h>
#include <stdint.h>

#include "rpc/code.h"

#define MU_RPC_DETAILS_KEY "grpc-status-details-bin"
enum { MU_RPC_DETAILS_BYTES_MAX = 4096 };

/* Returns the size: never more than there is room for, because every text of it has a limit. */
size_t mu_rpc_details_encode(enum mu_rpc_code code, const struct mu_error *err, uint8_t out[MU_RPC_DETAILS_BYTES_MAX]);

/* Fills err->reason and err->value; leaves them alone when the bytes are not ours, or not understood. */
void mu_rpc_details_decode(const void *data, size_t size_bytes, struct mu_error *err);

#endif
