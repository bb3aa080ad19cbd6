/* Hosts as the service shows them: made from the workers on them, the orders about them, and the names on them that
 * crashed too often. Core thread. */
#ifndef MU_COORDINATOR_NODES_H
#define MU_COORDINATOR_NODES_H

#include "coordinator/core/core.h"
#include "proto/wire_pb.h"

/* All of them, ascending by name, in the arena. */
enum mu_status mu_nodes_list(struct mu_wire_arena *arena, const struct mu_coord *coord, Muster__V1__Node ***ret_nodes,
                             size_t *ret_count, struct mu_error *err) MU_WARN_UNUSED;

#endif
