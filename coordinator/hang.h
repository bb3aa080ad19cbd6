/* Reports of hangs and losses. When the core gives up a member, or somebody demands it, all members of the job are
 * asked what they remember (recall.h), and what comes back within two seconds becomes a report: where each stood, who
 * waited for whom, who held the others up. Recovery does not wait for it. The newest reports are stored ("h/<number>");
 * one that was being made when the coordinator died is lost. Core thread only. */
#ifndef MU_COORDINATOR_HANG_H
#define MU_COORDINATOR_HANG_H

#include "coordinator/outbox.h"
#include "coordinator/recall.h"

enum {
    MU_HANG_REPORTS_KEPT = 32,
    MU_HANG_STANDINGS_MAX = 1024,
    MU_HANG_THREADS_BYTES_MAX = 1 << 20, /* what threads were doing, of all ranks of a report */
};

struct mu_hangs;

/* Reads the reports that are stored. */
enum mu_status mu_hangs_new(const struct mu_coord *coord, struct mu_store *store, struct mu_outbox *outbox,
                            struct mu_recalls *recalls, struct mu_hangs **ret_hangs,
                            struct mu_error *err) MU_WARN_UNUSED;
void mu_hangs_free(struct mu_hangs *hangs); /* NULL is fine */

/* An EXAMINE action. */
void mu_hangs_examine(struct mu_hangs *hangs, const struct mu_coord_action *action);
/* A report of every job that has members. */
void mu_hangs_examine_all(struct mu_hangs *hangs);
/* Makes reports of what has come. When it wants to be called next: UINT64_MAX: never. */
void mu_hangs_tick(struct mu_hangs *hangs, uint64_t now_us);
uint64_t mu_hangs_next_us(const struct mu_hangs *hangs);

/* A CALL event of LIST_HANG_REPORTS or GET_HANG_REPORT. */
void mu_hangs_call(struct mu_hangs *hangs, struct mu_rpc_call *call, const void *data, size_t size_bytes);

#endif
