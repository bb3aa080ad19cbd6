/* How many leaves each replica computes: contiguous ranges in order, by measured speed, all done as early as possible.
 * "Rank" here is a replica, which is as fast as its slowest member; `world` is the number of replicas.
 *
 * Rank i needs t_i(b) = a_i + b_i * b seconds for b leaves; the smallest T is sought with sum of floor((T - a_i) / b_i)
 * >= leaves (the fewest seconds until the slowest rank is done). Among the splits that reach this T, one is taken whose
 * ranges are made of few subtrees of the summation tree (plan/tree.h), since every subtree root costs one more
 * exchange. The bits of a sum do not depend on the split. Pure and deterministic: IEEE additions, multiplications and
 * divisions only. */
#ifndef MU_PLAN_BALANCE_H
#define MU_PLAN_BALANCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "plan/session.h"

struct mu_balance_rank {
    double fixed_seconds;    /* a: per step, whatever the leaves; 0 or more */
    double seconds_per_leaf; /* b: measured compute time; 0 = not measured: the mean of the measured ranks is taken */
    uint32_t leaves_max;     /* 0 = no bound */
};

enum {
    MU_BALANCE_WARNING_SIZE = 400,   /* bytes for the text of a warning */
    MU_BALANCE_GAIN_MIN_PERCENT = 3, /* smaller gains are not worth a new generation */
};

/* Fills ret_counts[world], each >= 1, sum = leaves. world <= leaves. When no rank has a measurement the counts are
 * equal, the first (leaves mod world) ranks one more (mu_plan_leaf_range with NULL). Values that are negative, infinite
 * or NaN count as not measured. Bounds that leave too little room (sum of leaves_max < leaves) are all ignored. */
void mu_balance_leaves(uint32_t leaves, uint32_t world, const struct mu_balance_rank *ranks, uint32_t *ret_counts);

/* The same with at most runs_max (at least 2) runs of neighbours with equal counts. Where the speeds ask for more,
 * neighbours are taken together in blocks, each as fast as its slowest rank; the last resort are equal counts. */
void mu_balance_leaves_in_runs(uint32_t leaves, uint32_t world, const struct mu_balance_rank *ranks, uint32_t runs_max,
                               struct mu_balance_rank *blocks, uint32_t *ret_counts); /* blocks: room for [world] */
uint32_t mu_balance_run_count(uint32_t world, const uint32_t *counts);

/* The same for at most MU_COUNTED_REPLICAS_MAX replicas by what a leaf takes each (0: not measured), in runs that an
 * Assign can name. Who is within 15 % of the median counts as ordinary. */
void mu_balance_by_seconds(uint32_t leaves, uint32_t replicas, const double *seconds, uint32_t *ret_counts);
double mu_balance_median(uint32_t count, double *seconds); /* the lower one of those above 0, else 0; sorts them */

/* Seconds until the slowest replica has computed its leaves; who is not measured takes no time. */
double mu_balance_step_seconds(uint32_t replicas, const double *seconds, const uint32_t *counts);
/* What `next` saves of each step against `now`; 0 when that is less than MU_BALANCE_GAIN_MIN_PERCENT. Who is within the
 * 15 % counts with its own time here, so that counts which were moved come back only for a gain. */
double mu_balance_saved(uint32_t replicas, const double *seconds, const uint32_t *now, const uint32_t *next);

/* Subtree roots of all ranks together: each is one partial sum that travels. At least `world`; a ring moves as much as
 * `world` of them. counts NULL: equal counts. */
uint32_t mu_balance_root_count(uint32_t leaves, uint32_t world, const uint32_t *counts);

/* Is `leaves` a poor number for `world` equally fast workers? True when more than 5 % of the compute time is spent
 * waiting or the exchange moves more than 1.5 times what a ring would; `out` then holds one line that says which, and
 * names a better number. `out` is cut to size_bytes; it is empty when the answer is false. */
bool mu_plan_leaf_warning(uint32_t leaves, uint32_t world, char *out, size_t size_bytes);

#endif
