/* Recalls: workers are asked what they remember (proto/muster/v1/recall.proto), and their answers are kept, in memory,
 * until newer ones need the room. Nothing here touches training: questions go beside the core's messages, answers come
 * by calls of their own. Core thread only. */
#ifndef MU_COORDINATOR_RECALL_H
#define MU_COORDINATOR_RECALL_H

#include "coordinator/core/core.h"
#include "coordinator/sessions.h"
#include "rpc/server.h"

enum {
    MU_RECALLS_KEPT = 8,
    MU_RECALL_WORKERS_MAX = 4096,     /* of one recall */
    MU_RECALLS_BYTES_MAX = 256 << 20, /* of all answers that are kept */
    MU_RECALL_PARTS_MAX = 32,         /* of one answer */
};

struct mu_recalls;

enum mu_status mu_recalls_new(const struct mu_coord *coord, struct mu_sessions *sessions,
                              struct mu_recalls **ret_recalls, struct mu_error *err) MU_WARN_UNUSED;
void mu_recalls_free(struct mu_recalls *recalls); /* NULL is fine */

/* A CALL event of RECALL, READ_RECALL or RECOLLECT. */
void mu_recalls_call(struct mu_recalls *recalls, struct mu_rpc_call *call, const void *data, size_t size_bytes);

#endif
