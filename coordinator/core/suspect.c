/* Checkpoints that load without a fault and still cannot be trained from.
 *
 * A step whose loss or norm is not finite changes nothing (everybody skips the update), so one such step is no evidence
 * against anything. A state that holds such values itself is: no step from it is finite any more, at the latest a few
 * updates after it was loaded. And a checkpoint from which several generations could not even be prepared, though every
 * peer was there, is no better. Both go, and all ranks go back to an older one together; the seed is never an answer.
 *
 *   (none) --loaded--> suspect --a finite report, MU_SUSPECT_STEPS later--> (none)
 *                         |  MU_SUSPECT_REPORTS in a row are not finite, or the final weights are not
 *                         +--> condemned: its generation, and those after it until one goes; what they hold counts for
 *                              nothing, whoever says it and however late
 *
 * While it is a suspect no older checkpoint is deleted (retain_checkpoints). */
#include "coordinator/core/internal.h"

#include <string.h>

/* State of a generation that was condemned, or of one that was to begin after it and did not. */
static bool is_condemned(const struct job *job, uint64_t generation)
{
    return job->condemned > 0 && generation <= job->condemned && !MU_MUTANT(MU_MUT_BELIEVE_CONDEMNED);
}

void suspect_status(const struct job *job, struct worker *worker)
{
    const struct mu_worker_status *status = &worker->status;
    if (is_condemned(job, status->fed_by > status->generation ? status->fed_by : status->generation))
        worker->status.held = (struct mu_held){0};
}

/* Does its state come from a checkpoint, whatever generations carry it on? From here on, and not when it goes: if it
 * never does, the next one has what its members have loaded. */
void suspect_assign(struct mu_coord *coord, struct job *job)
{
    bool loaded = false, continued = false;
    for (uint32_t rank = 0; rank < job->world; rank++) {
        const struct worker *worker = member_at(coord, job, rank);
        loaded = loaded || worker->source == MU_SOURCE_CHECKPOINT;
        continued = continued || worker->source != MU_SOURCE_INIT;
    }
    if (loaded) {
        job->suspect = job->plan_checkpoint;
        job->suspect_step = job->judged_step = job->start_step;
        job->unfinite_reports = 0;
    } else if (!continued) {
        job->suspect = 0;
    }
    if (job->condemned > 0 && job->condemned + 1 == job->record.generation)
        job->condemned++; /* whoever never gets to prepare it still holds what it held */
}

void suspect_go(struct job *job)
{
    if (job->condemned > 0 && job->condemned == job->record.generation)
        job->condemned--; /* this one is sound */
}

static bool has_another(const struct job *job, uint64_t number)
{
    for (uint32_t i = 0; i < job->checkpoint_count; i++) {
        if (job->checkpoints[i].record.state == MU_CKPT_COMMITTED && job->checkpoints[i].record.number < number)
            return true;
    }
    return false;
}

/* What was committed since then has the same state in it, and so has everybody. */
static void discard(struct mu_coord *coord, struct job *job, const char *why)
{
    uint64_t suspect = job->suspect;
    job->suspect = 0;
    job->unfinite_reports = 0;
    job->condemned = job->record.generation;
    persist_tally(coord, job);
    for (struct worker *w = next_worker(coord, job, NULL); w; w = next_worker(coord, job, w))
        suspect_status(job, w);
    if (job->intent)
        abandon_checkpoint(coord, job, "the state that it is of is not finite", false);
    for (uint32_t i = 0; i < job->checkpoint_count; i++) {
        uint64_t number = job->checkpoints[i].record.number;
        if (number >= suspect)
            mark_checkpoint_bad(coord, job, number, why);
    }
    note_break(coord, job, why);
    park_all(coord, job);
}

/* A report may sum up several short steps, and some are never heard (the coordinator was down): only a finite one that
 * comes late enough proves that what is wrong later began later. */
void suspect_result(struct mu_coord *coord, struct job *job)
{
    if (job->suspect == 0 || job->phase != MU_JP_STEPPING || job->steps_done <= job->judged_step)
        return; /* a report that is kept over restarts counts once */
    job->judged_step = job->steps_done;
    uint64_t suspect = job->suspect;
    uint32_t before = job->unfinite_reports;
    job->unfinite_reports = job->result.finite ? 0 : job->unfinite_reports + 1;
    if (job->result.finite && job->steps_done >= job->suspect_step + MU_SUSPECT_STEPS)
        job->suspect = 0; /* it has proved itself */
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

/* An update that is not finite is skipped, so weights that are not came with the state. */
bool suspect_end(struct mu_coord *coord, struct job *job)
{
    bool finite = true;
    for (uint32_t rank = 0; rank < job->world; rank++) {
        const struct worker *worker = member_at(coord, job, rank);
        finite = finite && !(worker && !worker->lost && worker->status.weights_unfinite);
    }
    if (finite || MU_MUTANT(MU_MUT_END_SUSPECT))
        return false;
    if (job->suspect && has_another(job, job->suspect)) {
        char why[MU_TEXT_SIZE];
        format_into(why, sizeof why, "the final weights are not finite, %llu steps after checkpoint %llu was loaded",
                    (unsigned long long)(mu_job_end(&job->record.spec) - job->suspect_step),
                    (unsigned long long)job->suspect);
        discard(coord, job, why);
    } else {
        finish_job(coord, job, MU_JOB_FAILED, 1, "the final weights are not finite, and no older checkpoint is left");
    }
    return true;
}

/* After a restart: it was condemned, and the order to park was not heard by all. */
void suspect_tick(struct mu_coord *coord, struct job *job)
{
    if (job->phase == MU_JP_STEPPING && is_condemned(job, job->record.generation))
        park_all(coord, job);
}

/* Only where there is an older one: a job is not given up because its workers could not start. */
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
