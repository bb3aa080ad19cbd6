/* The planner thread: runs mu_plan_make on deep copies of its input, so that a large plan never delays a heartbeat.
 * Plans come back to the core thread as posted items; a stale one is the core's to drop. */
#ifndef MU_COORDINATOR_PLANNER_H
#define MU_COORDINATOR_PLANNER_H

#include "coordinator/posted.h"
#include "plan/plan.h"

enum { MU_PLANNER_QUEUE_MAX = 1024 };

/* The posted result. The core thread frees it with mu_planned_free. */
struct mu_planned {
    struct mu_posted posted;
    uint64_t ticket;
    struct mu_plan plan;
    uint8_t secret[32]; /* from getrandom */
};
void mu_planned_free(struct mu_planned *planned);

struct mu_planner;
enum mu_status mu_planner_new(struct mu_rpc_server *server, struct mu_planner **ret_planner,
                              struct mu_error *err) MU_WARN_UNUSED;
/* Copies the input. Blocks only while the queue is full, which the planner empties by itself. */
enum mu_status mu_planner_submit(struct mu_planner *planner, uint64_t ticket, const struct mu_plan_input *input,
                                 struct mu_error *err) MU_WARN_UNUSED;
/* Waits for the plan being made; the rest is dropped. NULL is fine. */
void mu_planner_free(struct mu_planner *planner);

#endif
