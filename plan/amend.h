/* Amendments: changes of a job that runs, each of them from a step on.
 *
 * The law holds for the amended record: the result is a function of the spec with its amendments, and of the data. An
 * amendment takes effect at a boundary that nobody has passed, so it gets its step when all are parked: `at_step`, or
 * the boundary where they stand if that is later. It is settled when a generation goes that knows it: from then on
 * whatever is done again, from whichever checkpoint, is done by the same record. Pure. */
#ifndef MU_PLAN_AMEND_H
#define MU_PLAN_AMEND_H

#include "plan/job.h"

/* Adds it, with the next version, to the spec: not settled, unless it is policy alone, which workers need not know.
 * `now`: the newest step that is known to be done; at_step 0 becomes it. Refused, with one line and nothing changed,
 * where a field or what all amendments together make of the job is not allowed. */
enum mu_status mu_amend_add(struct mu_job_spec *spec, const struct mu_amendment *amendment, uint64_t now,
                            struct mu_error *err) MU_WARN_UNUSED;

/* Gives those that are not settled their step: at least `boundary`. Of a range to skip, what was trained on before
 * drops out. Puts all into their order. */
void mu_amend_place(struct mu_job_spec *spec, uint64_t boundary);
void mu_amend_settle(struct mu_job_spec *spec);

/* There is one that is not settled. */
bool mu_amend_pending(const struct mu_job_spec *spec);

/* What became of the job after `step` is undone: amendments that take effect later go, and those whose step is not
 * settled (that of a roll back always is). */
void mu_amend_cut(struct mu_job_spec *spec, uint64_t step);

/* The era of a job that was rolled back: the version of the newest amendment that did it; 0: none did. State is of the
 * era in which it was computed, and counts in that era only. */
uint32_t mu_amend_era(const struct mu_amendments *amendments);
/* It was rolled back, and no generation has gone since. */
bool mu_amend_rolls_back(const struct mu_job_spec *spec);

/* Part of mu_job_spec_check: what a record or a message may have. */
enum mu_status mu_amend_check(const struct mu_job_spec *spec, struct mu_error *err) MU_WARN_UNUSED;

/* "lr 0.001, steps 2000": what it changes, for people. */
enum { MU_AMENDMENT_TEXT_SIZE = 256 };
void mu_amend_describe(const struct mu_amendment *amendment, char out[MU_AMENDMENT_TEXT_SIZE]);

#endif
