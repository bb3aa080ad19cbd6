/* Rates from measured micro-batches: what a micro-batch takes is linear in 1 / flops, slice_cost / flops,
 * 1 / rows_bytes_per_second and fixed_s, none of which is negative. */
#include "plan/cost.h"
#include "plan/model_spec.h"

enum { UNKNOWNS = 4, SWEEPS = 20000 };
static const double NEVER = 1e300, FASTEST = 1e18;

/* Without the sums over leaves, which need no model. */
static double micro_seconds(const struct mu_job_spec *spec, const struct mu_cost_rates *rates)
{
    struct mu_layout one = {.tp = 1, .pp = 1, .dp = 1};
    one.stage_first[1] = (uint16_t)spec->model.layers;
    struct mu_cost cost = mu_cost_of_leaves(spec, &one, rates, 1);
    return cost.compute_s / spec->batch.accumulate;
}

/* What each unknown costs in the sample, over what the sample takes. */
static void row_of(const struct mu_cost_sample *sample, double ret_row[UNKNOWNS])
{
    struct mu_cost_rates none = {.flops = NEVER,
                                 .memory_bytes_per_second = NEVER,
                                 .rows_bytes_per_second = NEVER,
                                 .link_bytes_per_second = NEVER};
    struct mu_cost_rates each[UNKNOWNS] = {none, none, none, none};
    each[0].flops = 1;
    each[1].flops = 1;
    each[1].slice_cost = 1;
    each[2].rows_bytes_per_second = 1;
    each[3].fixed_s = 1;
    for (int i = 0; i < UNKNOWNS; i++)
        ret_row[i] = micro_seconds(sample->spec, &each[i]) / sample->seconds;
    ret_row[1] -= ret_row[0];
}

/* Coordinate descent on the squares: each unknown in turn is the best one there is beside the others. */
static void solve(double rows[][UNKNOWNS], uint32_t count, double x[UNKNOWNS])
{
    double left[MU_COST_SAMPLES_MAX], squares[UNKNOWNS] = {0};
    for (uint32_t s = 0; s < count; s++) {
        left[s] = 1;
        for (int i = 0; i < UNKNOWNS; i++) {
            left[s] -= rows[s][i] * x[i];
            squares[i] += rows[s][i] * rows[s][i];
        }
    }
    for (int sweep = 0; sweep < SWEEPS; sweep++)
        for (int i = 0; i < UNKNOWNS; i++) {
            double along = 0;
            for (uint32_t s = 0; s < count; s++)
                along += rows[s][i] * left[s];
            double next = squares[i] > 0 ? x[i] + along / squares[i] : x[i];
            next = next > 0 ? next : 0;
            for (uint32_t s = 0; s < count; s++)
                left[s] -= rows[s][i] * (next - x[i]);
            x[i] = next;
        }
}

double mu_cost_fit(struct mu_cost_rates *rates, const struct mu_cost_sample *samples, uint32_t count)
{
    double rows[MU_COST_SAMPLES_MAX][UNKNOWNS], off = 0;
    double rows_rate = rates->rows_bytes_per_second > 0 ? rates->rows_bytes_per_second : rates->memory_bytes_per_second;
    double x[UNKNOWNS] = {1 / rates->flops, rates->slice_cost / rates->flops, 1 / rows_rate, rates->fixed_s};
    MU_ASSERT(count > 0 && count <= MU_COST_SAMPLES_MAX);
    for (uint32_t s = 0; s < count; s++)
        row_of(&samples[s], rows[s]);
    solve(rows, count, x);
    rates->flops = x[0] > 1 / FASTEST ? 1 / x[0] : FASTEST;
    rates->slice_cost = x[0] > 0 ? x[1] / x[0] : 0;
    rates->rows_bytes_per_second = x[2] > 1 / FASTEST ? 1 / x[2] : FASTEST;
    rates->fixed_s = x[3];
    for (uint32_t s = 0; s < count; s++) {
        double apart = micro_seconds(samples[s].spec, rates) / samples[s].seconds - 1;
        off += apart < 0 ? -apart : apart;
    }
    return off / count;
}
