/* Checkpoint records <-> protobuf: a part of coordinator/records.c, and used only there. */
#ifndef MU_COORDINATOR_RECORD_CHECKPOINT_H
#define MU_COORDINATOR_RECORD_CHECKPOINT_H

#include "coordinator/core/core.h"
#include "proto/wire_pb.h"

enum mu_status mu_checkpoint_record_put(struct mu_wire_arena *arena, const struct mu_checkpoint_record *checkpoint,
                                        Muster__V1__CheckpointRecord **ret_pb, struct mu_error *err) MU_WARN_UNUSED;
/* What the record points to lies in the arena. */
enum mu_status mu_checkpoint_record_get(struct mu_wire_arena *arena, const Muster__V1__CheckpointRecord *pb,
                                        struct mu_checkpoint_record *out, struct mu_error *err) MU_WARN_UNUSED;

#endif
