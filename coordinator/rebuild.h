/* The record of a job whose data directory is lost, made again from its checkpoints alone.
 *
 * Each manifest holds the job's specification. The newest one's becomes a job that is running and has all committed
 * checkpoints: it goes on from the newest as soon as workers come. It is another job of the same name (another uid), so
 * workers of the lost one leave. What only the lost store knew is gone: events, losses, identities (the first worker
 * binds the job anew). Files are not changed. */
#ifndef MU_COORDINATOR_REBUILD_H
#define MU_COORDINATOR_REBUILD_H

#include "coordinator/records.h"

enum { MU_REBUILD_PROBLEMS_MAX = 8 };

struct mu_rebuild_report {
    uint32_t checkpoints;
    uint64_t newest_step;
    uint32_t problem_count; /* manifests that cannot be read; the first of them below */
    struct mu_error problems[MU_REBUILD_PROBLEMS_MAX];
};

/* MU_ERR_NOT_FOUND: no checkpoint of the job below `root` (absolute). MU_ERR_EXISTS: the store has a job of the name.
 * The report's problems are set in any case. */
enum mu_status mu_rebuild_job(const char *root, const char *job, uint64_t wall_us, struct mu_store *store,
                              struct mu_rebuild_report *ret_report, struct mu_error *err) MU_WARN_UNUSED;

#endif
