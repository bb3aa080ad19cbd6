/* The coordinator's state as a page for Prometheus (text exposition format 0.0.4). Names and labels:
 * docs/operations.md. Label values are bounded: jobs, states, phases; never a generation or a step; workers only as far
 * as --worker-series permits. */
#ifndef MU_COORDINATOR_METRICS_H
#define MU_COORDINATOR_METRICS_H

#include <stdio.h>

#include "coordinator/question.h"

enum { MU_METRICS_BYTES_MAX = 5000000 }; /* longer than that only for jobs, of which there are few */

/* O(workers log workers + jobs). */
void mu_metrics_write(FILE *out, const struct mu_question_sources *sources);

/* Parts of it. */
void mu_metrics_head(FILE *out, const char *name, const char *type, const char *help);
void mu_metrics_vitals(FILE *out, const struct mu_question_sources *sources);

#endif
