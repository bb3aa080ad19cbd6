/* What workers on this host take for their work and for messages to each other: rates of the model of costs
 * (plan/cost.h), measured with the workers' own model, kernels and data plane, in threads of this process that do the
 * same at the same time. */
#ifndef MU_CLI_PROBE_WORKER_H
#define MU_CLI_PROBE_WORKER_H

#include "plan/cost.h"

enum { MU_PROBE_WORKERS_MAX = 16 };

struct mu_probed_worker {
    struct mu_cost_rates rates;
    uint32_t workers, samples;
    double apart; /* mean relative error of the rates on the micro-batches they come from */
};

/* `workers` of `threads` threads each; one worker: the rates between workers stay the default ones. */
enum mu_status mu_probe_worker(uint32_t workers, uint32_t threads, struct mu_probed_worker *ret,
                               struct mu_error *err) MU_WARN_UNUSED;

#endif
