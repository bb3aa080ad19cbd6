/* Recalls: workers are asked what they remember (proto/muster/v1/recall.proto), and their answers are kept, in memory,
 * until newer ones need the room. Nothing here touches training: questions go beside the core's messages, answers come
 * by calls of their own. Core thread only. */
#ifndef MU_COORDINATOR_RECALL_H
#define MU_COORDINATOR_RECALL_H

#include "coordinator/core/core.h"
#include "coordinator/sessions.h"
#include "muster/v1/recall.pb-c.h"
#include "proto/wire.h"
#include "rpc/server.h"

enum {
    MU_RECALLS_KEPT = 8,
    MU_RECALL_WORKERS_MAX = 4096,     /* of one recall that somebody calls for */
    MU_RECALLS_BYTES_MAX = 256 << 20, /* of all answers that are kept */
    MU_RECALL_PARTS_MAX = 32,         /* of one answer */
};

struct mu_recalls;

enum mu_status mu_recalls_new(const struct mu_coord *coord, struct mu_sessions *sessions,
                              struct mu_recalls **ret_recalls, struct mu_error *err) MU_WARN_UNUSED;
void mu_recalls_free(struct mu_recalls *recalls); /* NULL is fine */

/* For a report: asks the attached workers of a job for records and threads. Its members that are not attached count,
 * too. */
enum mu_status mu_recalls_begin(struct mu_recalls *recalls, const char *job, uint32_t flight_records,
                                uint64_t *ret_number, struct mu_error *err) MU_WARN_UNUSED;
/* How many were asked, 0: it is no longer kept; have all answered that can? */
uint32_t mu_recalls_count(struct mu_recalls *recalls, uint64_t number, bool *ret_complete);
/* What one of them has answered so far, in the arena; names are valid until the next recall. */
enum mu_status mu_recalls_read(struct mu_recalls *recalls, struct mu_wire_arena *arena, uint64_t number, uint32_t index,
                               Muster__V1__ReadRecallResponse **ret_answer, struct mu_error *err) MU_WARN_UNUSED;

/* A CALL event of RECALL, READ_RECALL or RECOLLECT. */
void mu_recalls_call(struct mu_recalls *recalls, struct mu_rpc_call *call, const void *data, size_t size_bytes);

#endif
