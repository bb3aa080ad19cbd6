/* What a worker says of the feed that it takes (struct mu_feed_order), in its status. Internal to worker/core. */
#ifndef MU_WORKER_CORE_TAKING_H
#define MU_WORKER_CORE_TAKING_H

#include "plan/session.h"

/* An order to take, given to the members of `generation`: a spare takes, and what it holds from an earlier
 * generation makes room; a member what it needs beside its own share in `layout`, the one it steps in. False: it does
 * not suit this worker, which does nothing. Nobody waits for it but the other side, and that not for long. */
bool taking_begins(struct mu_worker_status *status, const struct mu_layout *layout, uint64_t generation,
                   const struct mu_feed_order *order);
/* How far it has come. False: it is not the feed that is taken, or no longer. */
bool taking_goes_on(struct mu_worker_status *status, uint64_t number, enum mu_feed_state state,
                    const struct mu_held *held, const char text[MU_TEXT_SIZE]);
/* An Assign ends it. */
void taking_is_over(struct mu_worker_status *status);

/* It was assigned, or is fed, by members of this era: what was computed before the job was rolled back is not held. */
void holding_enters_era(struct mu_worker_status *status, uint32_t era);

#endif
