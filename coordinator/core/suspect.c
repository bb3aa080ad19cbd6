/* Checkpoints that load without a fault and still cannot be trained from.
 *
 * A step whose loss or norm is not finite changes nothing (everybody skips the update), so one such step is no evidence
 * against anything. A state that holds such values itself is: no step from it is finite any more, at the latest a few
 * updates after it was loaded. And a checkpoint from which several generations could not even be prepared, though every
 * peer was there, is no better. Both go, and all ranks go back to an older one together; the seed is never an answer.
 */
#include "coordinator/core/internal.h"

#include <string.h>

/* Does its state come from a checkpoint, whatever generations have carried it on since? */
void suspect_go(struct mu_coord *coord, struct job *job)
{
    bool loaded = false, continued = false;
    for (uint32_t rank = 0; rank < job->world; rank++) {
        const struct worker *worker = member_at(coord, job, rank);
        loaded = loaded || worker->source == MU_SOURCE_CHECKPOINT;
        continued = continued || worker->source != MU_SOURCE_INIT;
    }
    if (loaded) {
        job->suspect = job->plan_checkpoint;
        job->suspect_step = job->start_step;
        job->unfinite_reports = 0;
    } else if (!continued) {
        job->suspect = 0;
    }
}

/* What was committed since then has the same state in it. */
static void discard(struct mu_coord *coord, struct job *job, const char *why)
{
    uint64_t suspect = job->suspect;
    job->suspect = 0;
    job->unfinite_reports = 0;
    persist_tally(coord, job);
    if (job->intent)
        abandon_checkpoint(coord, job, "the state that it is of is not finite", false);
    for (uint32_t i = 0; i < job->checkpoint_count; i++) {
        uint64_t number = job->checkpoints[i].record.number;
        if (number >= suspect)
            mark_checkpoint_bad(coord, job, number, why);
    }
    job->plan_without_state = true;
    note_break(coord, job, why);
    park_all(coord, job);
}

/* A report may sum up several short steps: its result is the newest one's, and what is wrong with it began in any. */
static void judge_result(struct job *job, uint32_t step_count)
{
    bool proved = job->steps_done > job->suspect_step + MU_SUSPECT_STEPS;
    bool late = job->unfinite_reports == 0 && job->steps_done > job->suspect_step + MU_SUSPECT_STEPS + step_count;
    job->unfinite_reports = job->result.finite || late ? 0 : job->unfinite_reports + 1;
    if (job->result.finite ? proved : late)
        job->suspect = 0; /* it has proved itself, or what is wrong began too late to be its fault */
}

void suspect_result(struct mu_coord *coord, struct job *job, uint32_t step_count)
{
    if (job->suspect == 0 || job->phase != MU_JP_STEPPING)
        return;
    uint64_t suspect = job->suspect;
    uint32_t before = job->unfinite_reports;
    judge_result(job, step_count);
    if (job->suspect != suspect || job->unfinite_reports != before)
        persist_tally(coord, job);
    if (job->unfinite_reports < MU_SUSPECT_REPORTS)
        return;
    char why[MU_TEXT_SIZE];
    format_into(
        why, sizeof why,
        "loss or gradient norm is not finite in %d reports in a row up to step %llu, %llu steps after checkpoint "
        "%llu was loaded",
        MU_SUSPECT_REPORTS, (unsigned long long)job->steps_done,
        (unsigned long long)(job->steps_done - job->suspect_step), (unsigned long long)job->suspect);
    discard(coord, job, why);
}

/* Only where there is an older one: a job is not given up because its workers could not start. */
static bool has_another(const struct job *job, uint64_t number)
{
    for (uint32_t i = 0; i < job->checkpoint_count; i++) {
        if (job->checkpoints[i].record.state == MU_CKPT_COMMITTED && job->checkpoints[i].record.number < number)
            return true;
    }
    return false;
}

/* (Of kind local it may be that a host could not be reached.) */
void suspect_unprepared(struct mu_coord *coord, struct job *job, const struct worker *worker)
{
    struct checkpoint *checkpoint =
        worker->source == MU_SOURCE_CHECKPOINT && !is_local(job) ? find_checkpoint(job, job->plan_checkpoint) : NULL;
    if (!checkpoint || checkpoint->record.state != MU_CKPT_COMMITTED ||
        checkpoint->record.failed_generation == job->record.generation)
        return;
    checkpoint->record.failed_generation = job->record.generation;
    checkpoint->record.unprepared++;
    persist_checkpoint(coord, &checkpoint->record);
    if (checkpoint->record.unprepared < MU_SUSPECT_UNPREPARED || !has_another(job, checkpoint->record.number))
        return;
    char why[MU_TEXT_SIZE];
    format_into(why, sizeof why, "%u generations could not be prepared from it, the last time: %s",
                checkpoint->record.unprepared, worker->status.text);
    mark_checkpoint_bad(coord, job, checkpoint->record.number, why);
}
