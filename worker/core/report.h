/* Reports that wait: step reports, merged because steps are short, and pieces of checkpoints, until they are known to
 * be durable. Internal to worker/core. */
#ifndef MU_WORKER_CORE_REPORT_H
#define MU_WORKER_CORE_REPORT_H

#include "plan/session.h"

/* `step` follows directly on what `sum` holds. */
void step_report_add(struct mu_step_report *sum, const struct mu_step_report *step);

enum { PENDING_PIECES_MAX = 8 };
struct pending_pieces {
    struct mu_piece_report reports[PENDING_PIECES_MAX];
    uint32_t count;
};
void pieces_add(struct pending_pieces *pending, const struct mu_piece_report *piece); /* the oldest makes room */
void pieces_acknowledged(struct pending_pieces *pending, uint64_t checkpoint, uint32_t piece);

#endif
