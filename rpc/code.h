/* gRPC status codes as this project sees them, and their translation from and to `enum mu_status`: the only place where
 * it is done. Pure, thread-safe. The numbers are those of the wire. */
#ifndef MU_RPC_CODE_H
#define MU_RPC_CODE_H

#include "common/status.h"

enum mu_rpc_code {
    MU_RPC_OK = 0,
    MU_RPC_CANCELLED = 1,
    MU_RPC_UNKNOWN = 2,
    MU_RPC_INVALID_ARGUMENT = 3,
    MU_RPC_DEADLINE_EXCEEDED = 4,
    MU_RPC_NOT_FOUND = 5,
    MU_RPC_ALREADY_EXISTS = 6,
    MU_RPC_PERMISSION_DENIED = 7,
    MU_RPC_RESOURCE_EXHAUSTED = 8,
    MU_RPC_FAILED_PRECONDITION = 9,
    MU_RPC_ABORTED = 10,
    MU_RPC_OUT_OF_RANGE = 11,
    MU_RPC_UNIMPLEMENTED = 12,
    MU_RPC_INTERNAL = 13,
    MU_RPC_UNAVAILABLE = 14,
    MU_RPC_DATA_LOSS = 15,
    MU_RPC_UNAUTHENTICATED = 16,
    MU_RPC_CODE_COUNT
};

/* "NOT_FOUND". Never NULL ("UNKNOWN" for a number outside the table). */
const char *mu_rpc_code_name(enum mu_rpc_code code);

/* What a server answers for a status of its own. STALE is ABORTED; BUSY, NO_MEMORY, NO_SPACE and LIMIT are
 * RESOURCE_EXHAUSTED; CONFLICT is FAILED_PRECONDITION; CORRUPT is DATA_LOSS; IO is INTERNAL. */
enum mu_rpc_code mu_rpc_code_of_status(enum mu_status status);

/* What a client reports for a code on the wire. */
enum mu_status mu_rpc_status_of_code(enum mu_rpc_code code);

/* Fills `err` with one line for a failed call of `method` at `address`: "cannot connect to ADDR: Connection refused",
 * "connection to ADDR lost: ...", "ADDR does not know METHOD ...", or the text that the server sent. Returns
 * mu_rpc_status_of_code(code). code is not OK. */
enum mu_status mu_rpc_fail(struct mu_error *err, enum mu_rpc_code code, const char *text, const char *address,
                           const char *method);

#endif
