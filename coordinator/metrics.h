/* The coordinator's state as a page for Prometheus (text exposition format 0.0.4). Names and labels:
 * docs/operations.md. Label values are bounded: jobs, states, phases; never a generation or a step; workers only as far
 * as --worker-series permits. */
#ifndef MU_COORDINATOR_METRICS_H
#define MU_COORDINATOR_METRICS_H

#include <stdio.h>

#include "coordinator/question.h"
#include "coordinator/vitals.h"

enum { MU_METRICS_BYTES_MAX = 5000000 }; /* longer than that only for jobs, of which there are few */

/* O(workers log workers + jobs). */
void mu_metrics_write(FILE *out, const struct mu_question_sources *sources);

/* Parts of it. */
void mu_metrics_head(FILE *out, const char *name, const char *type, const char *help);
void mu_metrics_vitals(FILE *out, const struct mu_question_sources *sources);

/* A worker that has told of itself. */
struct mu_told {
    char worker[MU_WORKER_NAME_SIZE];
    const char *job; /* the same address for all of a job */
    uint64_t host;
    const struct mu_vitals_heard *heard;
};
/* Those of a job stand side by side. */
void mu_metrics_gpus(FILE *out, const struct mu_told *told, uint32_t count);
/* Of each worker, while there are at most `most` and the page stays that short. Returns how many metrics were left out.
 */
int mu_metrics_worker_gpus(FILE *out, const struct mu_told *told, uint32_t count, uint32_t most, size_t bytes_max);

#endif
