/* How often to take a checkpoint, and what share of the time then is progress. All times in seconds. Pure.
 *
 *   cost     delta: by how much one checkpoint delays the training
 *   mtbf     M: mean time between failures of the whole job
 *   restart  R: from a failure until training goes on, without the lost work */
#ifndef MU_PLAN_YOUNG_H
#define MU_PLAN_YOUNG_H

/* Young's interval sqrt(2 delta M) (CACM 17(9), 1974). Arguments must be > 0 (asserted), as in all functions here but
 * restart >= 0. */
double mu_young_interval_s(double cost_s, double mtbf_s);

/* Daly's higher-order estimate (FGCS 22(3), 2006, eq. 37): sqrt(2 delta M) (1 + sqrt(delta / 2M) / 3 + delta / 18M) -
 * delta when delta < 2M, else M. The compute time between two checkpoints. */
double mu_young_daly_interval_s(double cost_s, double mtbf_s);

/* Share of the time that is progress when `interval_s` of computing lie between checkpoints: tau / (M e^(R/M) (e^((tau
 * + delta)/M) - 1)) (Daly, eq. 20). Between 0 and 1. */
double mu_young_goodput(double interval_s, double cost_s, double mtbf_s, double restart_s);

#endif
