/* Measured steps of a job on a cluster, to calibrate a forecast with: lines of TP,PP,DP,MICRO,RECOMPUTE,SECONDS (a line
 * that begins with # or "tp" is none). */
#ifndef MU_CLI_MEASURED_H
#define MU_CLI_MEASURED_H

#include "cli/plan_question.h"

enum { PLAN_MEASURED_MAX = 256, PLAN_MEASURED_SIZE_MAX = 64 * 1024 };

struct plan_measured {
    uint32_t count;
    double error_before, error_after; /* mean of |forecast / measured - 1| */
};

/* Changes q->rates to fit the file's steps (mu_forecast_calibrate). Refuses with "FILE:LINE: ...". */
enum mu_status plan_calibrate(const char *path, struct plan_question *q, struct plan_measured *ret_measured,
                              struct mu_error *err) MU_WARN_UNUSED;
/* The same for text in memory, which ends with a 0. */
enum mu_status plan_calibrate_by(const char *name, const char *text, struct plan_question *q,
                                 struct plan_measured *ret_measured, struct mu_error *err) MU_WARN_UNUSED;

#endif
