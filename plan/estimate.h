/* What a job's layout choices cost, told before it runs: by the model of costs (plan/cost.h) at its default rates.
 * Pure. */
#ifndef MU_PLAN_ESTIMATE_H
#define MU_PLAN_ESTIMATE_H

#include "plan/layout.h"

struct mu_estimate {
    uint32_t slices, tp_max; /* tp can be any power of two up to tp_max; only that one when the job gives it */
    bool tp_given;
    double slices_percent;         /* that the slices add to a step of one worker */
    uint32_t vocab_rows;           /* of each slice; */
    uint32_t vocab_rows_last;      /* of the last one: fewer where slices do not divide the vocabulary */
    bool fits;                     /* there is a layout of `workers` workers: the rest is about that */
    uint32_t workers;              /* the fewest with which the job runs */
    struct mu_layout layout;       /* that would be chosen for them */
    double step_s;                 /* there */
    uint64_t memory_bytes;         /* of its neediest rank */
    double recompute_percent;      /* of a step, that recomputation adds */
    double redundancy_percent;     /* that buddies add */
    uint64_t sharding_saved_bytes; /* of a rank, by sharding the optimizer */
};

/* The spec must have passed mu_job_spec_check. */
void mu_estimate_of(const struct mu_job_spec *spec, struct mu_estimate *ret);

enum { MU_ESTIMATE_LINE_SIZE = 320 };
/* One line each. */
void mu_estimate_slices_line(const struct mu_estimate *estimate, char out[MU_ESTIMATE_LINE_SIZE]);
void mu_estimate_layout_line(const struct mu_estimate *estimate, char out[MU_ESTIMATE_LINE_SIZE]);

#endif
