/* What comes from the coordinator, judged by the job, which the wire does not know. Internal to worker/core. */
#ifndef MU_WORKER_CORE_JUDGE_H
#define MU_WORKER_CORE_JUDGE_H

#include "plan/session.h"

/* The job is as amended from now on; NULL: as it was submitted. */
enum mu_status take_amendments(struct mu_job_spec *spec, const struct mu_amendments *amendments,
                               struct mu_error *err) MU_WARN_UNUSED;
/* Takes the amendments, too. */
enum mu_status judge_assign(struct mu_job_spec *spec, uint32_t chunk_count, const struct mu_assign *assign,
                            struct mu_error *err) MU_WARN_UNUSED;

#endif
