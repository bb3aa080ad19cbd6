/* `checkpoint.every: auto`: how many steps lie between two checkpoints, from what was measured.
 *
 * Daly's interval (plan/young.h) of two numbers: by how much one checkpoint delays the training (the longest copy at
 * the boundary, plus what steps took longer while it was written), and the mean time between failures of the job (the
 * losses of its workers over the time that they worked; as long as nothing was lost, one loss in PRIOR_WORKER_S is
 * taken). It is never shorter than writing one takes. Chosen anew after each commit and when a generation goes, since
 * somebody may have been lost; before the first commit, when nothing is known of the cost, FIRST_S pass, or half the
 * time between failures where that is shorter. On the lease clock; what was measured is recorded with each choice
 * (persist_tally), so a restart forgets none of it. */
#include "coordinator/core/internal.h"

#include "plan/young.h"

enum { FIRST_S = 60, PRIOR_WORKER_S = 30 * 24 * 3600 };
static const double COST_LEAST_S = 1e-3; /* of the clock's and the reports' grain */
static const double TOLD_CHANGE = 0.1;   /* smaller changes of the interval are not told again */

bool interval_is_auto(const struct job *job)
{
    return terms_now(job).every == MU_EVERY_AUTO;
}

static uint64_t steps_in(const struct job *job, double seconds)
{
    double step_s = job->interval.step_s > 0 ? job->interval.step_s : job->seconds_per_step;
    if (!(step_s > 0))
        return 0;
    double steps = seconds / step_s;
    if (!(steps < (double)MU_STEPS_MAX))
        return MU_STEPS_MAX;
    uint64_t whole = (uint64_t)steps;
    whole += (double)whole < steps;
    return whole ? whole : 1;
}

/* Of the job: its workers together. */
static double between_failures_s(const struct job *job)
{
    double worker_s = (double)job->interval.worker_us * 1e-6, losses = (double)job->workers_lost;
    double each_s = losses > 0 ? worker_s / losses : worker_s > PRIOR_WORKER_S ? worker_s : PRIOR_WORKER_S;
    double all_s = each_s / (job->world ? job->world : 1);
    return all_s > COST_LEAST_S ? all_s : COST_LEAST_S;
}

uint64_t interval_steps(const struct job *job)
{
    if (!interval_is_auto(job))
        return terms_now(job).every;
    if (job->interval.steps)
        return job->interval.steps;
    double half_s = between_failures_s(job) / 2;
    return steps_in(job, half_s < FIRST_S ? half_s : FIRST_S);
}

/* Counted from the newest checkpoint, or from the last one that was due and failed. */
uint64_t interval_due(const struct job *job)
{
    const struct checkpoint *newest = newest_committed(job);
    uint64_t base = job->interval.base;
    if (newest && newest->record.step > base)
        base = newest->record.step;
    uint64_t due = base + interval_steps(job);
    return due > job->steps_done ? due : job->steps_done + 1;
}

void interval_count_workers(struct mu_coord *coord, struct job *job)
{
    uint64_t now = lease_now(coord);
    if (job->phase == MU_JP_STEPPING)
        job->interval.worker_us += (now - job->interval.counted_us) * job->world;
    job->interval.counted_us = now;
}

static void tell(struct mu_coord *coord, struct job *job)
{
    struct interval *in = &job->interval;
    double change = (double)in->steps - (double)in->told_steps;
    change = change < 0 ? -change : change;
    if (in->told_steps && change <= TOLD_CHANGE * (double)in->told_steps)
        return;
    in->told_steps = in->steps;
    event(coord, MU_EVENT_INFO, "checkpoint_interval", job, NULL, "a checkpoint every %llu steps: %s",
          (unsigned long long)in->steps, in->reason);
}

static void choose(struct mu_coord *coord, struct job *job)
{
    struct interval *in = &job->interval;
    uint32_t world = job->world ? job->world : 1;
    interval_count_workers(coord, job);
    in->failure_s = between_failures_s(job);
    double interval_s = mu_young_daly_interval_s(in->cost_s, in->failure_s);
    bool by_write = interval_s < in->write_s;
    if (by_write)
        interval_s = in->write_s;
    if (MU_MUTANT(MU_MUT_INTERVAL_IGNORES_COST))
        interval_s = COST_LEAST_S;
    uint64_t steps = steps_in(job, interval_s);
    if (steps == 0)
        return; /* no step was timed yet */
    in->steps = steps;
    char loss[64];
    double worker_s = (double)in->worker_us * 1e-6;
    if (job->workers_lost)
        format_into(loss, sizeof loss, "%llu lost in %.1f worker hours", (unsigned long long)job->workers_lost,
                    worker_s / 3600);
    else
        format_into(loss, sizeof loss, "none lost in %.1f worker hours", worker_s / 3600);
    format_into(in->reason, sizeof in->reason,
                "%.1f s; one delays by %.3f s, takes %.2f s to write%s; %u worker%s every %.1f h (%s)", interval_s,
                in->cost_s, in->write_s, by_write ? ", the least" : "", world, world == 1 ? " fails" : "s fail",
                in->failure_s / 3600, loss);
    tell(coord, job);
    persist_tally(coord, job);
}

/* Of the newest checkpoint, as far as it has been reported. */
static void take_cost(struct interval *in)
{
    double cost_s = in->stall_s + (in->slow_s > 0 ? in->slow_s : 0);
    in->cost_s = cost_s > COST_LEAST_S ? cost_s : COST_LEAST_S;
}

void interval_report(struct mu_coord *coord, struct job *job, const struct worker *worker,
                     const struct mu_step_report *report)
{
    struct interval *in = &job->interval;
    double copy_s = (double)report->snapshot_us * 1e-6;
    bool open = job->intent != 0, longer = copy_s > in->stall_s;
    if (longer)
        in->stall_s = copy_s;
    if (report->snapshot_us > 0 && open && in->taken_us == 0)
        in->taken_us = lease_now(coord);
    if (worker->rank == 0 && report->step_count > 0 && report->total_us > report->snapshot_us) {
        double seconds = (double)(report->total_us - report->snapshot_us) * 1e-6, each = seconds / report->step_count;
        if (!open && report->snapshot_us == 0)
            in->step_s = in->step_s > 0 ? 0.8 * in->step_s + 0.2 * each : each;
        else if (open && in->step_s > 0 && in->taken_us)
            in->slow_s += seconds - in->step_s * report->step_count;
    }
    if (longer && !open && in->steps &&
        interval_is_auto(job)) { /* told after the commit, as reports of short steps are */
        take_cost(in);
        choose(coord, job);
    }
}

void interval_ordered(struct mu_coord *coord, struct job *job)
{
    job->interval.ordered_us = lease_now(coord);
    job->interval.taken_us = 0;
    job->interval.stall_s = job->interval.slow_s = 0;
}

void interval_committed(struct mu_coord *coord, struct job *job)
{
    struct interval *in = &job->interval;
    uint64_t since_us = in->taken_us ? in->taken_us : in->ordered_us;
    if (!interval_is_auto(job) || since_us == 0)
        return; /* ordered before a restart */
    in->write_s = (double)(lease_now(coord) - since_us) * 1e-6;
    take_cost(in);
    choose(coord, job);
}

void interval_go(struct mu_coord *coord, struct job *job)
{
    if (interval_is_auto(job) && job->interval.steps && !MU_MUTANT(MU_MUT_INTERVAL_ONCE))
        choose(coord, job);
}
