/* Branches: a new job that begins with a checkpoint of another one.
 *
 * Its record is the origin's up to that step, then amended: so its weights are those of a job that had always had that
 * record. The checkpoint stays the origin's, and its directory is only read. The branch's own record of it, which says
 * whose it is, is all that keeps it: it is stored with the branch, and forgotten in the batch of the branch's first own
 * commit, or of its end. While there is one the origin deletes nothing of that checkpoint. */
#include "coordinator/core/internal.h"

#include <string.h>

#include "plan/amend.h"

bool is_borrowed(const struct mu_coord *coord, const struct checkpoint *checkpoint)
{
    return mu_coord_borrowers(coord, &checkpoint->record) > 0;
}

/* Who is loading from it has it until it goes. */
void return_borrowed(struct mu_coord *coord, struct job *job)
{
    const struct checkpoint *newest = newest_committed(job);
    bool needed = job->phase == MU_JP_PREPARING || !newest || newest->record.owner[0];
    uint32_t at = 0;
    if (mu_id_is_zero(job->borrowed) || (needed && !is_over(job)))
        return;
    while (!job->checkpoints[at].record.owner[0])
        at++;
    const struct mu_checkpoint_record borrowed = job->checkpoints[at].record;
    forget_checkpoint(coord, job, &job->checkpoints[at]);
    job->borrowed = (struct mu_id){0};
    struct job *origin = find_job(coord, borrowed.owner);
    const struct checkpoint *there = origin ? find_checkpoint(origin, borrowed.number) : NULL;
    if (!there || !mu_id_equal(there->record.nonce, borrowed.nonce))
        return; /* it was replaced: its files stay */
    retain_checkpoints(coord, origin);
    delete_void(coord, origin);
}

static bool may_branch(const struct job *origin, const struct checkpoint *from, const struct mu_coord_event *request,
                       struct answer *answer)
{
    const char *name = origin->record.spec.name;
    if (strcmp(request->request.new_job, name) == 0)
        refuse(answer, MU_ERR_INVALID, MU_REASON_FIELD_INVALID,
               "name: '%s' is not allowed: it is the job to branch from; choose another one", name);
    else if (is_local(origin))
        refuse(answer, MU_ERR_INVALID, MU_REASON_FIELD_INVALID,
               "checkpoint: those of job '%s' are on its hosts' own disks (checkpoint.kind local): bring one together, "
               "and submit a job with init.path",
               name);
    else if (request->request.rebase && !origin->record.identity_set)
        refuse(
            answer, MU_ERR_INVALID, MU_REASON_FIELD_INVALID,
            "rebase: is not allowed: no worker has given job '%s' a numeric identity yet, so there is none to leave; "
            "start its workers",
            name);
    else if (request->request.compute && !request->request.rebase)
        refuse(answer, MU_ERR_INVALID, MU_REASON_FIELD_INVALID,
               "compute: is not allowed in a branch, which keeps its origin's numeric identity; rebase the job");
    else if (!from || from->record.state != MU_CKPT_COMMITTED)
        refuse(answer, MU_ERR_NOT_FOUND, MU_REASON_CHECKPOINT_UNKNOWN,
               "job '%s' has no committed checkpoint %llu (see: muster checkpoints %s)", name,
               (unsigned long long)request->request.checkpoint, name);
    else
        return true;
    return false;
}

/* The origin's record up to the step, amended. */
static bool branch_spec(const struct job *origin, uint64_t step, const struct mu_coord_event *request,
                        struct mu_job_spec *spec, struct answer *answer)
{
    struct mu_error err = {0};
    enum mu_status status = MU_OK;
    memcpy(spec, &origin->record.spec, sizeof *spec);
    memset(spec->name, 0, sizeof spec->name); /* specs are compared as bytes */
    copy_text(spec->name, sizeof spec->name, request->request.new_job);
    if (request->request.path[0]) {
        memset(spec->checkpoint.path, 0, sizeof spec->checkpoint.path);
        copy_text(spec->checkpoint.path, sizeof spec->checkpoint.path, request->request.path);
    }
    if (request->request.compute)
        spec->compute = request->request.compute;
    mu_amend_cut(spec, step);
    if (request->request.amendment && request->request.amendment->fields & MU_AMEND_ROLL_BACK)
        status = mu_fail(&err, MU_ERR_INVALID, "roll_back_to: is not allowed in a branch: it begins with `checkpoint`");
    else if (request->request.amendment)
        status = mu_amend_add(spec, request->request.amendment, step, &err);
    if (status == MU_OK)
        status = mu_job_spec_check(spec, &err);
    if (status == MU_OK && mu_job_end(spec) <= step)
        status = mu_fail(&err, MU_ERR_INVALID,
                         "steps: value %llu is not allowed: more than %llu, which the checkpoint has already",
                         (unsigned long long)mu_job_end(spec), (unsigned long long)step);
    if (status != MU_OK)
        refuse(answer, status, err.reason, "%s", err.text);
    return status == MU_OK;
}

/* Numbers go on from the origin's, so that the one that is borrowed is older than all its own. */
static void borrow(struct job *job, const struct mu_job_record *origin, const struct mu_checkpoint_record *from,
                   const struct mu_coord_event *request)
{
    struct checkpoint *checkpoint = &job->checkpoints[job->checkpoint_count++];
    struct mu_checkpoint_record *record = &checkpoint->record;
    memset(checkpoint, 0, sizeof *checkpoint);
    *record = *from;
    record->job_uid = job->record.uid;
    memcpy(record->job, job->record.spec.name, sizeof record->job);
    if (!record->owner[0])
        memcpy(record->owner, origin->spec.name, sizeof record->owner);
    record->unprepared = 0;
    record->failed_generation = 0;
    job->borrowed = record->nonce;
    if (job->record.next_checkpoint < origin->next_checkpoint)
        job->record.next_checkpoint = origin->next_checkpoint;
    job->record.checkpoint_seen = true;
    job->record.steps_done = job->steps_done = job->interval.base = record->step;
    memcpy(job->record.origin.job, origin->spec.name, sizeof job->record.origin.job);
    job->record.origin.uid = origin->uid;
    job->record.origin.checkpoint = record->number;
    job->record.origin.step = record->step;
    job->record.data_hash = origin->data_hash;
    if (request->request.rebase) {
        job->record.origin.rebased = true;
        job->record.origin.rebased_from = origin->numeric_identity;
        copy_text(job->record.origin.rebased_by, sizeof job->record.origin.rebased_by, request->request.by);
        return;
    }
    job->record.identity_set = origin->identity_set;
    job->record.numeric_identity = origin->numeric_identity;
    job->record.identity_parts = origin->identity_parts;
}

void branch_job(struct mu_coord *coord, struct job *from_job, const struct mu_coord_event *request,
                struct answer *answer)
{
    const struct checkpoint *found = find_checkpoint(from_job, request->request.checkpoint);
    struct mu_job_spec spec;
    char what[MU_AMENDMENT_TEXT_SIZE] = "";
    if (!may_branch(from_job, found, request, answer) ||
        !branch_spec(from_job, found->record.step, request, &spec, answer))
        return;
    struct job *job = find_job(coord, spec.name);
    if (job && !is_over(job)) {
        refuse(answer, MU_ERR_EXISTS, MU_REASON_JOB_EXISTS,
               "job '%s' is there already and is not over: choose another name, or cancel it first", spec.name);
        return;
    }
    /* Copies: room for the branch may be made by forgetting its origin. */
    const struct mu_checkpoint_record from = found->record;
    const struct mu_job_record origin = from_job->record;
    job = new_job(coord, job, &spec, answer);
    if (!job)
        return;
    borrow(job, &origin, &from, request);
    revise(coord, job);
    persist_job(coord, job);
    persist_checkpoint(coord, &job->checkpoints[0].record);
    if (request->request.amendment)
        mu_amend_describe(request->request.amendment, what);
    event(coord, MU_EVENT_INFO, "job_branched", job, NULL,
          "job %s is branched from checkpoint %llu of job %s at step %llu by %s%s%s%s%s%s", spec.name,
          (unsigned long long)from.number, origin.spec.name, (unsigned long long)from.step, request->request.by,
          request->request.rebase ? ", to go on under the numeric identity of its first worker" : "",
          spec.compute != origin.spec.compute ? ", in " : "",
          spec.compute != origin.spec.compute ? mu_compute_name(spec.compute) : "", what[0] ? ": " : "", what);
}
