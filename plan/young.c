#include "plan/young.h"

#include "common/fmath.h"
#include "common/status.h"

double mu_young_interval_s(double cost_s, double mtbf_s)
{
    MU_ASSERT(cost_s > 0.0 && mtbf_s > 0.0);
    return mu_fmath_sqrt(2.0 * cost_s * mtbf_s);
}

double mu_young_daly_interval_s(double cost_s, double mtbf_s)
{
    MU_ASSERT(cost_s > 0.0 && mtbf_s > 0.0);
    if (!(cost_s < 2.0 * mtbf_s))
        return mtbf_s;
    double ratio = cost_s / (2.0 * mtbf_s);
    return mu_fmath_sqrt(2.0 * cost_s * mtbf_s) * (1.0 + mu_fmath_sqrt(ratio) / 3.0 + ratio / 9.0) - cost_s;
}

/* e^x - 1 without the loss of digits near 0: a short series there (x < 2^-10, four terms reach 2^-50). */
static double exp_minus_one(double x)
{
    if (x >= 0x1p-10)
        return mu_fmath_exp(x) - 1.0;
    return x * (1.0 + x / 2.0 * (1.0 + x / 3.0 * (1.0 + x / 4.0 * (1.0 + x / 5.0))));
}

double mu_young_goodput(double interval_s, double cost_s, double mtbf_s, double restart_s)
{
    MU_ASSERT(interval_s > 0.0 && cost_s > 0.0 && mtbf_s > 0.0 && restart_s >= 0.0);
    double goodput =
        interval_s / mtbf_s / mu_fmath_exp(restart_s / mtbf_s) / exp_minus_one((interval_s + cost_s) / mtbf_s);
    return goodput > 0.0 ? goodput : 0.0;
}
