/* How often checkpoints are taken where the job says `every: auto`: never so seldom that a failure costs much more than
 * the interval that pays (Daly's, of what the job's tally says of costs and losses), and never so often that they cost
 * more than they save. Neither is sharp: steps take now and then ten times as long. */
#include <inttypes.h>

#include "plan/young.h"
#include "tests/sim/oracle.h"

static const double FIRST_S = 60; /* before the first one */

/* Of the newest tally. 0: nothing was committed yet. */
static double interval_that_pays_s(const struct mu_sim_pace *pace)
{
    const struct mu_tally_record *tally = &pace->tally;
    if (tally->interval.steps == 0 || pace->world == 0)
        return 0;
    double worker_s = (double)tally->interval.worker_us * 1e-6, month_s = 30 * 24 * 3600;
    double each_s = tally->workers_lost  ? worker_s / (double)tally->workers_lost
                    : worker_s > month_s ? worker_s
                                         : month_s;
    double between_s = each_s / pace->world > 1e-3 ? each_s / pace->world : 1e-3;
    double daly_s = mu_young_daly_interval_s(tally->interval.cost_s, between_s);
    return daly_s > tally->interval.write_s ? daly_s : tally->interval.write_s;
}

void mu_sim_pace_tally(struct mu_sim *sim, const struct mu_tally_record *tally)
{
    struct mu_sim_pace *pace = &sim->oracle->pace;
    bool chosen = pace->tally.interval.steps != tally->interval.steps;
    pace->tally = *tally;
    if (chosen)
        pace->interval_s = interval_that_pays_s(pace);
}

void mu_sim_pace_go(struct mu_sim *sim, uint32_t world)
{
    sim->oracle->pace.world = world;
    sim->oracle->pace.interval_s = interval_that_pays_s(&sim->oracle->pace);
}

/* One at a time, and it takes as long as it takes. */
static bool is_writing(const struct mu_sim *sim)
{
    for (uint32_t i = 0; i < mu_sim_store_count(sim->store); i++) {
        const struct mu_record *record = mu_sim_store_at(sim->store, i);
        if (record->kind == MU_RECORD_CHECKPOINT && record->checkpoint->state == MU_CKPT_INTENT)
            return true;
    }
    return false;
}

/* Seldom: all the work since the newest checkpoint would be lost. */
void mu_sim_pace_decided(struct mu_sim *sim, uint64_t generation, uint64_t step)
{
    enum { LATE_S = 20 }; /* ordered ahead, written, one step or another of ten times the length */
    struct mu_sim_pace *pace = &sim->oracle->pace;
    uint64_t at_risk_us = 0;
    bool next = pace->generation == generation && pace->step + 1 == step;
    if (pace->generation != generation || is_writing(sim))
        pace->begun_us = sim->now_us;
    pace->step_us[step] = next ? sim->now_us - pace->decided_us : 0;
    pace->generation = generation;
    pace->decided_us = sim->now_us;
    pace->step = step;
    if (!sim->params.every_auto)
        return;
    for (uint64_t s = mu_sim_oracle_committed_step(sim); s <= step; s++)
        at_risk_us += pace->step_us[s];
    double most_s = pace->interval_s > 0 ? pace->interval_s : FIRST_S, write_s = 2 * pace->tally.interval.write_s;
    bool chance = (double)(sim->now_us - pace->begun_us) * 1e-6 > write_s + LATE_S;
    if (chance && (double)at_risk_us * 1e-6 > 2 * most_s + write_s + LATE_S)
        mu_sim_violate(sim, "%.0f s of work are in no checkpoint, one pays every %.0f s", (double)at_risk_us * 1e-6,
                       most_s);
}

/* Often: by the policy, and not because one was asked for or failed. The interval was chosen in steps, and those of the
 * time before may have been ten times as long. */
void mu_sim_pace_ordered(struct mu_sim *sim, const struct mu_checkpoint_record *record)
{
    const struct mu_sim_pace *pace = &sim->oracle->pace;
    uint64_t base = mu_sim_oracle_committed_step(sim), longest_us = 0;
    if (!sim->params.every_auto || base == 0 || record->command == 0 || record->not_before_step == 0 ||
        record->attempt > 0 || pace->interval_s <= 0)
        return;
    for (uint64_t s = base; s <= pace->step; s++)
        longest_us = pace->step_us[s] > longest_us ? pace->step_us[s] : longest_us;
    double after_s = (double)(record->not_before_step - base) * (double)longest_us * 1e-6;
    if (longest_us > 0 && after_s < pace->interval_s / 16)
        mu_sim_violate(sim,
                       "checkpoint %" PRIu64 " is ordered %" PRIu64 " steps (at most %.1f s) after the one before, one "
                       "pays every %.1f s",
                       record->number, record->not_before_step - base, after_s, pace->interval_s);
}
