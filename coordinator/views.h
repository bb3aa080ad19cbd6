/* What the core shows of itself, as messages of the service. Messages borrow from the views they are made from and from
 * the arena. */
#ifndef MU_COORDINATOR_VIEWS_H
#define MU_COORDINATOR_VIEWS_H

#include "coordinator/core/core.h"
#include "coordinator/sessions.h"
#include "proto/wire_pb.h"

/* NULL and err: no memory, or a text that may not be sent. */
Muster__V1__Job *mu_view_job(struct mu_wire_arena *arena, const struct mu_job_view *view, struct mu_error *err);
Muster__V1__Worker *mu_view_worker(struct mu_wire_arena *arena, const struct mu_worker_view *view,
                                   struct mu_error *err);
/* Adds the vital signs of that worker, if it has told any. */
enum mu_status mu_view_vitals(struct mu_wire_arena *arena, const struct mu_coord *coord, struct mu_sessions *sessions,
                              const struct mu_worker_view *view, Muster__V1__Worker *worker,
                              struct mu_error *err) MU_WARN_UNUSED;
Muster__V1__Checkpoint *mu_view_checkpoint(struct mu_wire_arena *arena, const struct mu_checkpoint_record *record,
                                           struct mu_error *err);
Muster__V1__Estimate *mu_view_estimate(struct mu_wire_arena *arena, const struct mu_job_spec *spec,
                                       struct mu_error *err);
Muster__V1__Timing *mu_view_timing(struct mu_wire_arena *arena, const struct mu_timing_view *view,
                                   struct mu_error *err);
/* Accounts of `job` from *slot on, at most `limit`; *slot: where the next page begins, 0: none. */
Muster__V1__GetGoodputResponse *mu_view_goodput(struct mu_wire_arena *arena, const struct mu_coord *coord,
                                                const struct mu_job_view *job, uint64_t now_us, uint32_t limit,
                                                uint64_t *slot, struct mu_error *err);
/* view_probe.c */
Muster__V1__ReadProbeResponse *mu_view_probe(struct mu_wire_arena *arena, const struct mu_probe_view *view,
                                             struct mu_error *err);

#endif
