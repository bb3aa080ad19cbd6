/* Where a worker stands, from what it answered to a recall. */
#ifndef MU_PROTO_STANDING_H
#define MU_PROTO_STANDING_H

#include "common/verdict.h"
#include "muster/v1/recall.pb-c.h"

/* At the end of its records. Without memory as if there were none. */
struct mu_standing mu_standing_of_answer(const Muster__V1__ReadRecallResponse *answer);
/* At `until_us` of the worker's clock, or before it heard, in the step it was in then, that a peer has failed. */
struct mu_standing mu_standing_before(const Muster__V1__ReadRecallResponse *answer, uint64_t until_us);

/* `doing`, `number`, `step` and whom it waits for, which points into *standing; names are the caller's. */
Muster__V1__Standing mu_standing_shown(const struct mu_standing *standing);

#endif
