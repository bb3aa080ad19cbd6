/* Amendments of a job that runs: recorded before anybody hears of them, placed while all hold still, and settled when a
 * generation that knows them goes. So none takes effect at a step that somebody has passed: who holds a later step than
 * the generation starts from is superseded when it goes, and what a checkpoint holds was passed. */
#include "coordinator/core/internal.h"

#include "plan/amend.h"

struct mu_job_terms terms_now(const struct job *job)
{
    return mu_job_terms(&job->record.spec, job->steps_done);
}

/* The newest step that may still be started from. */
static uint64_t passed_step(const struct job *job)
{
    uint64_t step = job->steps_done;
    for (uint32_t i = 0; i < job->checkpoint_count; i++) {
        const struct mu_checkpoint_record *record = &job->checkpoints[i].record;
        if (record->step > step && record->state != MU_CKPT_VOID && record->state != MU_CKPT_DELETING)
            step = record->step;
    }
    return step;
}

/* All of it is planned anew, from the boundary where they park. */
static void make_effective(struct mu_coord *coord, struct job *job)
{
    if (!mu_amend_pending(&job->record.spec))
        return;
    if (job->phase == MU_JP_STEPPING)
        regroup(coord, job);
    else if (job->phase == MU_JP_PREPARING)
        park_all(coord, job);
}

void amendments_tick(struct mu_coord *coord, struct job *job)
{
    make_effective(coord, job); /* recorded, and then the coordinator was started anew */
}

static const struct mu_amendment *newest(const struct job *job)
{
    const struct mu_amendments *all = &job->record.spec.amendments;
    uint32_t i = 0;
    while (all->list[i].version != all->newest)
        i++;
    return &all->list[i];
}

void amend_job(struct mu_coord *coord, struct job *job, const struct mu_amendment *amendment, const char *by,
               struct answer *answer)
{
    struct mu_error err;
    char what[MU_AMENDMENT_TEXT_SIZE], when[48];
    const char *name = job->record.spec.name;
    answer->reply.job_uid = job->record.uid;
    if (amendment->fields & MU_AMEND_ROLL_BACK) {
        roll_back(coord, job, amendment, by, answer);
        return;
    }
    if (is_over(job) || job->phase == MU_JP_FINALIZING) {
        refuse(answer, MU_ERR_CONFLICT, MU_REASON_JOB_OVER, "job '%s' is over, or has done all its steps", name);
        return;
    }
    enum mu_status status = mu_amend_add(&job->record.spec, amendment, passed_step(job), &err);
    if (status) {
        refuse(answer, status, err.reason, "%s", err.text);
        return;
    }
    const struct mu_amendment *made = newest(job);
    mu_amend_describe(made, what);
    if (amendment->at_step)
        format_into(when, sizeof when, "at step %llu", (unsigned long long)made->at_step);
    else
        format_into(when, sizeof when, "at the next boundary");
    job->next_due_step = 0;
    revise(coord, job);
    persist_job(coord, job);
    event(coord, MU_EVENT_INFO, "job_amended", job, NULL, "job %s is amended (%u) %s: %s", name, made->version, when,
          what);
    make_effective(coord, job);
}

/* A checkpoint of which only a manifest may know the step, from before a restart, cannot be told from one that is made
 * by the amended record. */
static void give_up_unknown_step(struct mu_coord *coord, struct job *job)
{
    const struct checkpoint *checkpoint = job->intent ? find_checkpoint(job, job->intent) : NULL;
    if (checkpoint && job->publishing && checkpoint->record.step == 0)
        abandon_checkpoint(coord, job, "whether it was finished before a restart is not known, and the job is amended",
                           true);
}

void place_amendments(struct mu_coord *coord, struct job *job)
{
    if (!mu_amend_pending(&job->record.spec))
        return;
    give_up_unknown_step(coord, job);
    mu_amend_place(&job->record.spec, MU_MUTANT(MU_MUT_AMEND_IN_PASSING) ? 0 : passed_step(job));
}

void settle_amendments(struct mu_coord *coord, struct job *job)
{
    struct mu_amendments *all = &job->record.spec.amendments;
    char what[MU_AMENDMENT_TEXT_SIZE];
    for (uint32_t i = 0; i < all->count; i++) {
        const struct mu_amendment *one = &all->list[i];
        if (one->settled)
            continue;
        mu_amend_describe(one, what);
        event(coord, MU_EVENT_INFO, "amendment_settled", job, NULL, "amendment %u holds from step %llu on: %s",
              one->version, (unsigned long long)one->at_step, what);
    }
    mu_amend_settle(&job->record.spec);
}
