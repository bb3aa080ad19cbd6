/* grpc.reflection.v1 and v1alpha: grpcurl and the like learn from the server itself what it serves. The answers are
 * read from the descriptors that were put into the program (proto/served.h). Core thread only. */
#ifndef MU_COORDINATOR_REFLECTION_H
#define MU_COORDINATOR_REFLECTION_H

#include "proto/wire.h"
#include "rpc/server.h"

/* A MESSAGE event of a reflection stream: answers it, or ends the stream. */
void mu_reflection_message(struct mu_wire_arena *arena, struct mu_rpc_call *call, const void *data, size_t size_bytes);

#endif
