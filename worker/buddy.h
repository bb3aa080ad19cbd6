/* One replica (dp = 1): the complete gradient of a rank's column goes to its buddy too (plan/layout.h, mirrors), layer
 * by layer as the backward pass completes them, into the same place of the buddy's gradient buffer; there the same
 * update is made. With several replicas of a sharded column worker/reduce.h does this itself.
 *
 *   guarded rank: cell complete --> sent --> ... --> next backward pass begins
 *   buddy:        posted --> received (before it votes) --> updated with
 *
 * A buddy votes only when it has received everything. So whoever knows the result of a vote knows that every buddy can
 * make the update, and what was sent has left: nothing is acknowledged beside that.
 *
 * What is received does not meet own work: cells that both ranks update are not sent. Where the last stage keeps head
 * chains of a tied embedding in the buffer, they have left before the first stage has the complete gradient. Engine's
 * thread. */
#ifndef MU_WORKER_BUDDY_H
#define MU_WORKER_BUDDY_H

#include <stdbool.h>
#include <stdint.h>

#include "plan/layout.h"
#include "worker/comm.h"

struct mu_buddy;

struct mu_buddy_config {
    const struct mu_model_spec *model; /* must outlive it */
    const struct mu_layout *layout;    /* dp 1, with a buddy_shift; copied */
    uint32_t rank;
    struct mu_comm_group *group; /* must be closed before mu_buddy_free */
};

enum mu_status mu_buddy_new(const struct mu_buddy_config *config, struct mu_buddy **ret_buddy,
                            struct mu_error *err) MU_WARN_UNUSED;
void mu_buddy_free(struct mu_buddy *buddy); /* NULL is fine */

/* A step begins: posts what comes. `sequence` counts steps of the generation. `grads`: the flat buffer in which
 * complete gradients appear; it must stay until sent and received, or the group is closed. */
enum mu_status mu_buddy_begin(struct mu_buddy *buddy, uint64_t sequence, float *grads,
                              struct mu_error *err) MU_WARN_UNUSED;
/* A cell of the own column is complete in `grads`: its layer is sent when all of it is that the buddy mirrors. */
enum mu_status mu_buddy_send(struct mu_buddy *buddy, uint32_t cell, struct mu_error *err) MU_WARN_UNUSED;
/* Waits until everything of the guarded rank is here. */
enum mu_status mu_buddy_received(struct mu_buddy *buddy, struct mu_error *err) MU_WARN_UNUSED;
/* Waits until everything has left: after the vote that is so. */
enum mu_status mu_buddy_sent(struct mu_buddy *buddy, struct mu_error *err) MU_WARN_UNUSED;

#endif
