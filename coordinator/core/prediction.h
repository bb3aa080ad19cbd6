/* What a step was predicted to take, term by term, beside what it takes.
 *
 * With the first report of a generation the model of costs (plan/cost.h) says what a step will take at one rank: of
 * the slowest stage, the one whose worker is expected to compute longest. The model has the speed that this worker
 * showed in earlier generations (one that is new: the slowest of the others), or its default rates where nobody was
 * measured (`calibrated` is false). The rank's reports,
 * but for the first ones, are summed up over windows; the terms of a window add up to its steps. Who is off by more
 * than 15 % of the predicted step, in the whole or in one term, in two windows in a row, is said once a generation; off
 * is over after two windows below 10 %. Pure. */
#ifndef MU_COORDINATOR_CORE_PREDICTION_H
#define MU_COORDINATOR_CORE_PREDICTION_H

#include "plan/session.h"

enum mu_step_term {
    MU_TERM_COMPUTE,  /* forward, backward, sums of leaves */
    MU_TERM_TENSOR,   /* exchanges within the tensor group */
    MU_TERM_PIPELINE, /* transfers between stages, and waits for them that the bubble does not explain */
    MU_TERM_BUBBLE,   /* the pipeline fills and drains: micro-batches that others compute alone */
    MU_TERM_REPLICAS, /* gradients, parameters, tied copies, buddies: what nothing was computed behind */
    MU_TERM_VOTE,     /* over all ranks; also waits for who is slower */
    MU_TERM_OPTIMIZER,
    MU_TERM_CHECKPOINT, /* copies at boundaries; predicted for those that were taken */
    MU_TERM_DATA,       /* not predicted */
    MU_TERM_OTHER,      /* the rest of the step; not predicted */
    MU_TERM_COUNT
};

/* "compute", "tensor", ...: in metrics, messages and reports. */
extern const char *const mu_step_term_names[MU_TERM_COUNT];

struct mu_prediction {
    uint64_t generation; /* 0: none was made */
    uint32_t rank, slot; /* measured there; of its worker */
    bool calibrated, off;
    uint64_t steps; /* of the last whole window; 0: there was none in this generation */
    double predicted_s[MU_TERM_COUNT], measured_s[MU_TERM_COUNT]; /* of a step; measured: mean over the window */
};

/* The steps of a report, in seconds by term. `pp`, `micros`: stages, micro-batches of a step. */
void mu_prediction_split(const struct mu_step_report *report, uint32_t pp, uint64_t micros,
                         double ret_s[MU_TERM_COUNT]);

#endif
