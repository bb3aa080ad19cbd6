/* Step reports that are merged because steps are short. Internal to worker/core. */
#ifndef MU_WORKER_CORE_REPORT_H
#define MU_WORKER_CORE_REPORT_H

#include "plan/session.h"

/* `step` follows directly on what `sum` holds. */
void step_report_add(struct mu_step_report *sum, const struct mu_step_report *step);

#endif
