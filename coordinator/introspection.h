/* What the coordinator tells of itself to who is asked for help: its metrics and the newest lines of its log. Core
 * thread. */
#ifndef MU_COORDINATOR_INTROSPECTION_H
#define MU_COORDINATOR_INTROSPECTION_H

#include "coordinator/question.h"
#include "proto/wire_pb.h"

/* A CALL event of READ_COORDINATOR. */
void mu_introspection_call(struct mu_wire_arena *arena, const struct mu_question_sources *sources,
                           struct mu_rpc_call *call, const void *data, size_t size_bytes);

#endif
