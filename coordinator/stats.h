/* What the coordinator's shell measures of itself, for /metrics. Core thread. */
#ifndef MU_COORDINATOR_STATS_H
#define MU_COORDINATOR_STATS_H

#include "common/histogram.h"
#include "coordinator/core/core.h"

/* The file system that a job's newest checkpoint was written to, as seen from here. */
struct mu_checkpoint_space {
    char job[MU_JOB_NAME_SIZE];
    uint64_t free_bytes, size_bytes; /* after it was published; of the checkpoint */
};

struct mu_stats {
    struct mu_histogram turns; /* of the core thread's loop, without its waits */
    struct mu_checkpoint_space *spaces;
    uint32_t space_count, space_capacity;
    uint64_t network_errors;                        /* of the workers' hosts, told by them */
    uint64_t malformed_hellos;                      /* first messages of streams that are none */
    uint64_t gpu_xids, gpu_failures;                /* errors of the driver; GPUs that are of no more use */
    uint64_t store_free_bytes, store_reserve_bytes; /* 0: in memory */
};

#endif
