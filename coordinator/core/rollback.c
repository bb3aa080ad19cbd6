/* Rolling a job back, in place, to a checkpoint of it.
 *
 * What was done after that checkpoint belongs to a future that is given up. It is told from what comes by the era: the
 * version of the amendment that rolled back. State is of the era in which it was computed; of another era it is not
 * held, whoever says so and whenever. Later checkpoints are void with the request itself, and are deleted when a
 * generation has gone that begins with the one gone back to: if that cannot be loaded, older ones are there. */
#include "coordinator/core/internal.h"

#include <string.h>

#include "plan/amend.h"

bool is_rolled_back(const struct job *job)
{
    return mu_amend_rolls_back(&job->record.spec);
}

void void_state(const struct job *job, struct worker *worker)
{
    struct mu_worker_status *status = &worker->status;
    if (status->era == mu_amend_era(&job->record.spec.amendments) || MU_MUTANT(MU_MUT_COUNT_VOID_STATE))
        return;
    status->held = (struct mu_held){0};
    status->feed = 0;
    status->feed_state = MU_FEED_NONE;
}

void delete_void(struct mu_coord *coord, struct job *job)
{
    for (uint32_t i = 0; i < job->checkpoint_count && !is_rolled_back(job); i++) {
        struct checkpoint *checkpoint = &job->checkpoints[i];
        if (checkpoint->record.state == MU_CKPT_VOID && !is_borrowed(coord, checkpoint))
            start_deleting(coord, job, checkpoint);
    }
}

static bool may_roll_back(const struct job *job, const struct checkpoint *to, const struct mu_amendment *amendment,
                          struct answer *answer)
{
    const char *name = job->record.spec.name;
    if (is_over(job) && job->record.state != MU_JOB_FAILED)
        refuse(answer, MU_ERR_CONFLICT, MU_REASON_JOB_OVER,
               "job '%s' is over: branch a new job from its checkpoint (muster job branch)", name);
    else if (!to || (to->record.state != MU_CKPT_COMMITTED && to->record.state != MU_CKPT_BAD))
        refuse(answer, MU_ERR_NOT_FOUND, MU_REASON_CHECKPOINT_UNKNOWN,
               "job '%s' has no checkpoint %llu to go back to (see: muster checkpoints %s)", name,
               (unsigned long long)amendment->back.checkpoint, name);
    else if (amendment->at_step)
        refuse(answer, MU_ERR_INVALID, MU_REASON_FIELD_INVALID,
               "at_step: is not allowed with roll_back_to: what is changed holds from the checkpoint's step on");
    else
        return true;
    return false;
}

/* One that was quarantined is taken at the operator's word: it may have been the rate that made the loss infinite. Its
 * bytes are verified as it is loaded, like those of any other. */
static void take_as_start(struct mu_coord *coord, struct checkpoint *to)
{
    if (to->record.state != MU_CKPT_BAD)
        return;
    to->record.state = MU_CKPT_COMMITTED;
    to->record.unprepared = 0;
    to->record.failed_generation = 0;
    to->record.text[0] = 0;
    to->scrub_due_us = 0;
    persist_checkpoint(coord, &to->record);
}

static uint32_t void_later(struct mu_coord *coord, struct job *job, uint64_t number)
{
    uint32_t count = 0;
    if (job->intent)
        abandon_checkpoint(coord, job, "the job is rolled back", false);
    for (uint32_t i = 0; i < job->checkpoint_count && !MU_MUTANT(MU_MUT_START_FROM_VOID); i++) {
        struct mu_checkpoint_record *record = &job->checkpoints[i].record;
        if (record->number <= number || (record->state != MU_CKPT_COMMITTED && record->state != MU_CKPT_BAD))
            continue;
        record->state = MU_CKPT_VOID;
        persist_checkpoint(coord, record);
        count++;
    }
    return count;
}

/* What is known of steps that are undone. */
static void forget_steps(struct mu_coord *coord, struct job *job, uint64_t step)
{
    if (job->steps_done > step)
        job->replayed_steps += job->steps_done - step;
    if (job->replay_until < job->steps_done)
        job->replay_until = job->steps_done;
    job->steps_done = job->record.steps_done = step;
    job->has_result = false;
    if (job->eval_step > step)
        job->eval_step = 0;
    job->suspect = 0;
    job->unfinite_reports = 0;
    job->checkpoint_wanted = false;
    job->checkpoint_failures = job->checkpoint_attempt = 0;
    job->checkpoint_retry_us = 0;
    job->next_due_step = 0;
    if (job->interval.base > step)
        job->interval.base = step;
    job->has_next_layout = job->plan_without_state = false;
    for (struct worker *w = next_worker(coord, job, NULL); w; w = next_worker(coord, job, w)) {
        w->feed = 0;
        void_state(job, w);
    }
}

/* Its workers were released: who has not gone yet comes back as a new one. */
static void revive(struct mu_coord *coord, struct job *job)
{
    if (!is_over(job))
        return;
    for (struct worker *w = next_worker(coord, job, NULL), *next; w; w = next) {
        next = next_worker(coord, job, w);
        close_session(coord, w->session);
        free_worker(coord, w);
    }
    forget_generation(coord, job);
    job->record.state = MU_JOB_RUNNING;
    job->record.ended_wall_us = 0;
    memset(job->record.text, 0, sizeof job->record.text);
    job->waiting_text[0] = 0;
    job->saving_first = false;
    set_phase(coord, job, MU_JP_WAITING);
}

void roll_back(struct mu_coord *coord, struct job *job, const struct mu_amendment *amendment, const char *by,
               struct answer *answer)
{
    struct mu_error err;
    struct mu_job_spec changed;
    struct checkpoint *to = find_checkpoint(job, amendment->back.checkpoint);
    char what[MU_AMENDMENT_TEXT_SIZE];
    if (!may_roll_back(job, to, amendment, answer))
        return;
    const uint64_t step = to->record.step, from_step = job->steps_done;
    struct mu_amendment own = *amendment;
    own.back.void_before = job->record.next_checkpoint + 1;
    own.back.from_step = from_step;
    memcpy(&changed, &job->record.spec, sizeof changed);
    if (!MU_MUTANT(MU_MUT_KEEP_UNDONE_TERMS))
        mu_amend_cut(&changed, step);
    enum mu_status status = mu_amend_add(&changed, &own, step, &err);
    if (status != MU_OK) {
        refuse(answer, status, err.reason, "%s", err.text);
        return;
    }
    memcpy(&job->record.spec, &changed, sizeof changed);
    revive(coord, job);
    take_as_start(coord, to);
    uint32_t void_count = void_later(coord, job, amendment->back.checkpoint);
    forget_steps(coord, job, step);
    revise(coord, job);
    persist_job(coord, job);
    persist_tally(coord, job);
    own.fields &= ~(uint32_t)MU_AMEND_ROLL_BACK;
    mu_amend_describe(&own, what);
    event(coord, MU_EVENT_WARNING, "job_rolled_back", job, NULL,
          "job %s is rolled back from step %llu to step %llu, checkpoint %llu, by %s (amendment %u); %u later "
          "checkpoint%s void%s%s",
          job->record.spec.name, (unsigned long long)from_step, (unsigned long long)step,
          (unsigned long long)amendment->back.checkpoint, by, changed.amendments.newest, void_count,
          void_count == 1 ? " is" : "s are", own.fields ? "; " : "", own.fields ? what : "");
    if (job->phase == MU_JP_WAITING)
        settle(coord, job);
    else
        park_all(coord, job);
}
