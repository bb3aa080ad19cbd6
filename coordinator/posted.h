/* What other threads of the coordinator post to its core thread: the first member of each, so that the core can tell
 * them apart. */
#ifndef MU_COORDINATOR_POSTED_H
#define MU_COORDINATOR_POSTED_H

#include "rpc/server.h"

enum mu_posted_kind { MU_POSTED_PLANNED, MU_POSTED_CHECKPOINT, MU_POSTED_QUESTION };

struct mu_posted {
    struct mu_rpc_item item; /* first */
    enum mu_posted_kind kind;
};

#endif
