/* The parts of the cost model that a search over many layouts computes once (plan/cost.c, plan/choose.c). */
#ifndef MU_PLAN_COST_INTERNAL_H
#define MU_PLAN_COST_INTERNAL_H

#include "plan/cost.h"
#include "plan/model_spec.h"

/* Seconds of one micro-batch, forward; what follows from the job and tp alone. */
struct mu_cost_unit {
    double layer, head, embedding; /* products and rows, without exchanges */
    double exchange;               /* of all rows between the tensor ranks; 0 without */
    double head_exchanges;         /* of small messages about the loss, forward and backward */
    double transfer;               /* of own rows to the next stage */
    double backward;               /* times of a layer's forward pass that its backward pass takes */
    double exchange_count;         /* of a layer, forward and backward */
};
struct mu_cost_unit mu_cost_unit_of(const struct mu_job_spec *spec, const struct mu_model_spec *model,
                                    const struct mu_cost_rates *rates, uint32_t tp);
void mu_cost_balance(const struct mu_cost_unit *unit, uint32_t layers, uint32_t pp, const double *slowness,
                     uint16_t *ret_stage_first);

/* What does not depend on dp, for one tp and one set of stages. */
struct mu_cost_grid {
    struct mu_cost_unit unit;
    double sum_s, slowest_s; /* forward and backward of one micro-batch: all stages, the slowest one */
    double tensor_s;         /* tensor exchanges in the slowest */
    uint32_t slowest_stage;  /* the first of them */
    double column, tied;     /* elements: of the largest column, of the tied copy */
};
struct mu_cost_grid mu_cost_grid_of(const struct mu_job_spec *spec, const struct mu_model_spec *model,
                                    const struct mu_layout *layout, const struct mu_cost_rates *rates);

/* Subtree roots of all replicas together, as far as the cost needs them. */
double mu_cost_roots(const struct mu_job_spec *spec, uint32_t dp);
/* Where leaves are divided as evenly as can be. */
uint32_t mu_cost_busiest(const struct mu_job_spec *spec, uint32_t dp);
struct mu_cost mu_cost_of_grid(const struct mu_job_spec *spec, const struct mu_cost_grid *grid,
                               const struct mu_layout *layout, double roots, uint32_t busiest,
                               const struct mu_cost_rates *rates);

#endif
