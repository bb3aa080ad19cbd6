/* What other programs ask for. Every request is answered by exactly one REPLY, which waits for what it depends on.
 *
 * A change that was made is remembered by its request's id, in the same batch of records as the change itself: so
 * whoever has lost the answer, to a broken connection or to a crash of the coordinator, asks again and gets it. What
 * was refused has changed nothing and is not remembered: asked again, it is judged again. */
#include "coordinator/core/internal.h"

#include <string.h>

/* As it was submitted, also if it was scaled or amended since. (A branch was not submitted.) */
static bool same_spec(const struct mu_job_record *record, const struct mu_job_spec *spec)
{
    struct mu_job_spec submitted;
    memcpy(&submitted, &record->spec, sizeof submitted);
    submitted.workers = record->submitted_workers;
    memset(&submitted.amendments, 0, sizeof submitted.amendments);
    /* specs start as zeros and strings are copied whole: no stray bytes */
    return !record->origin.job[0] && memcmp(&submitted, spec, sizeof submitted) == 0;
}

static void forget_old_job(struct mu_coord *coord, struct job *job)
{
    for (struct worker *w = next_worker(coord, job, NULL), *next; w; w = next) {
        next = next_worker(coord, job, w);
        close_session(coord, w->session);
        free_worker(coord, w);
    }
    goodput_forget_job(coord, job);
    for (uint32_t i = 0; i < job->checkpoint_count; i++) /* the files stay: they belong to whoever ran the old job */
        emit(coord, &(struct mu_coord_action){
                        .kind = MU_CA_FORGET,
                        .record = {.kind = MU_RECORD_CHECKPOINT, .checkpoint = &job->checkpoints[i].record}});
    forget_generation(coord, job);
    struct mu_tally_record tally = {0};
    memcpy(tally.job, job->record.spec.name, sizeof tally.job);
    emit(coord, &(struct mu_coord_action){.kind = MU_CA_FORGET, .record = {.kind = MU_RECORD_TALLY, .tally = &tally}});
}

/* The table is full: the job that ended longest ago makes room. NULL: all are active. */
static struct job *replace_oldest_over(struct mu_coord *coord, const char *name)
{
    struct job *oldest = NULL;
    for (uint32_t i = 0; i < coord->job_count; i++) {
        struct job *job = &coord->jobs[i];
        if (is_over(job) && (!oldest || job->record.ended_wall_us < oldest->record.ended_wall_us))
            oldest = job;
    }
    if (!oldest)
        return NULL;
    forget_old_job(coord, oldest);
    emit(coord,
         &(struct mu_coord_action){.kind = MU_CA_FORGET, .record = {.kind = MU_RECORD_JOB, .job = &oldest->record}});
    clear_job(oldest);
    rename_job(coord, oldest, name);
    return oldest;
}

/* Where two operators may collide, each says what it has seen. */
static bool is_expected(const struct job *job, const char *name, uint64_t expected, struct answer *answer)
{
    uint64_t revision = job ? job->record.revision : 0;
    if (expected == 0 || expected == revision)
        return true;
    answer->reply.reason_value = revision;
    if (job)
        refuse(answer, MU_ERR_STALE, MU_REASON_REVISION_CHANGED,
               "expected_revision: job '%s' was changed since %llu, its revision is %llu: look at it again", name,
               (unsigned long long)expected, (unsigned long long)revision);
    else
        refuse(answer, MU_ERR_STALE, MU_REASON_REVISION_CHANGED,
               "expected_revision: there is no job '%s' any more, of revision %llu or another", name,
               (unsigned long long)expected);
    return false;
}

bool is_expected_of(const char *what, const char *name, uint64_t revision, uint64_t expected, struct answer *answer)
{
    if (expected == 0 || (expected == MU_REVISION_NONE ? 0 : expected) == revision)
        return true;
    answer->reply.reason_value = revision;
    refuse(answer, MU_ERR_STALE, MU_REASON_REVISION_CHANGED,
           "expected_revision: what is ordered of %s '%s' was changed since %llu, its revision is %llu (0: nothing is "
           "ordered): look at it again",
           what, name, (unsigned long long)(expected == MU_REVISION_NONE ? 0 : expected), (unsigned long long)revision);
    return false;
}

/* The slot for a new job of that name; what an earlier one leaves behind is its numbers. NULL: refused. */
static struct job *make_room(struct mu_coord *coord, struct job *job, const char *name, struct answer *answer)
{
    if (job) {
        /* numbers go on, so that nothing of the old job can be taken for the new one's */
        uint64_t generation = job->record.generation, checkpoint = job->record.next_checkpoint;
        uint64_t command = job->record.command.number;
        forget_old_job(coord, job);
        clear_job(job);
        job->record =
            (struct mu_job_record){.generation = generation, .next_checkpoint = checkpoint, .command.number = command};
        return job;
    }
    job = add_job(coord, name);
    if (!job)
        job = replace_oldest_over(coord, name);
    if (!job)
        refuse(answer, MU_ERR_LIMIT, MU_REASON_LIMIT_REACHED,
               "this coordinator runs %u jobs already, its limit (--max-jobs)", coord->config.max_jobs);
    return job;
}

struct job *new_job(struct mu_coord *coord, struct job *place, const struct mu_job_spec *spec, struct answer *answer)
{
    struct job *job = make_room(coord, place, spec->name, answer);
    if (!job)
        return NULL;
    job->record.uid = answer->reply.job_uid = coord->random;
    job->record.state = MU_JOB_PENDING;
    job->record.created_wall_us = coord->wall_us;
    memcpy(&job->record.spec, spec, sizeof *spec);
    job->record.submitted_workers = spec->workers;
    job->leaves = mu_job_leaves(spec);
    mu_model_spec_init(&job->model, &spec->model);
    job->phase = MU_JP_WAITING;
    job->phase_since_us = lease_now(coord);
    return job;
}

static void submit(struct mu_coord *coord, const struct mu_coord_event *request, struct answer *answer)
{
    struct mu_error err;
    const struct mu_job_spec *spec = request->submit.spec;
    if (mu_job_spec_check(spec, &err) != MU_OK) {
        refuse(answer, MU_ERR_INVALID, err.reason, "%s", err.text);
        return;
    }
    if (spec->amendments.count || spec->amendments.newest) {
        refuse(answer, MU_ERR_INVALID, MU_REASON_FIELD_INVALID,
               "amendments: are not allowed in a new job: submit it as it is to begin, and amend it");
        return;
    }
    struct job *job = find_job(coord, spec->name);
    if (!is_expected(job, spec->name, request->expected_revision, answer))
        return;
    if (job && !is_over(job)) {
        answer->reply.existed = same_spec(&job->record, spec);
        answer->reply.job_uid = job->record.uid;
        if (!answer->reply.existed)
            refuse(answer, MU_ERR_EXISTS, MU_REASON_JOB_EXISTS,
                   "job '%s' is there already with another specification and is not over: choose another name, or "
                   "cancel it first",
                   spec->name);
        return;
    }
    job = new_job(coord, job, spec, answer);
    if (!job)
        return;
    job->record.preflight = request->submit.preflight;
    revise(coord, job);
    persist_job(coord, job);
    event(coord, MU_EVENT_INFO, "job_submitted", job, NULL, "job %s submitted: %llu steps, %u leaves, %u to %u workers",
          spec->name, (unsigned long long)spec->steps, job->leaves, spec->workers.min, spec->workers.max);
}

static void cancel(struct mu_coord *coord, struct job *job, const char *reason, struct answer *answer)
{
    if (job->record.state == MU_JOB_CANCELLED)
        return;
    if (is_over(job)) {
        refuse(answer, MU_ERR_CONFLICT, MU_REASON_JOB_OVER, "job '%s' is over already", job->record.spec.name);
        return;
    }
    char text[MU_TEXT_SIZE];
    format_into(text, sizeof text, "cancelled%s%s", reason && reason[0] ? ": " : "", reason ? reason : "");
    finish_job(coord, job, MU_JOB_CANCELLED, 0, text);
}

static void checkpoint_now(struct mu_coord *coord, struct job *job, struct answer *answer)
{
    const char *name = job->record.spec.name;
    if (job->record.spec.checkpoint.path[0] == 0) {
        refuse(answer, MU_ERR_INVALID, MU_REASON_CHECKPOINTS_OFF, "job '%s' has no checkpoint.path in its job file",
               name);
    } else if (job->intent) {
        refuse(answer, MU_ERR_CONFLICT, MU_REASON_CHECKPOINT_UNDER_WAY,
               "checkpoint %llu of job '%s' is under way: wait for it", (unsigned long long)job->intent, name);
    } else if (is_over(job)) {
        refuse(answer, MU_ERR_CONFLICT, MU_REASON_JOB_OVER, "job '%s' is not stepping now: it is over", name);
    } else if (job->phase != MU_JP_STEPPING) {
        refuse(answer, MU_ERR_CONFLICT, MU_REASON_JOB_NOT_STEPPING,
               "job '%s' is not stepping now: it is waiting or between generations, try again", name);
    } else {
        answer->reply.checkpoint = order_checkpoint(coord, job, 0, false);
        if (!answer->reply.checkpoint)
            refuse(answer, MU_ERR_LIMIT, MU_REASON_LIMIT_REACHED,
                   "job '%s' has %u checkpoints, the most that are kept track of: lower checkpoint.keep", name,
                   job->checkpoint_count);
    }
}

/* Takes effect with the next generation, which is made at once when there are too many workers now, or when there may
 * be more. */
static void scale(struct mu_coord *coord, struct job *job, const struct mu_worker_policy *wanted, struct answer *answer)
{
    struct mu_error err;
    struct mu_job_spec spec;
    const struct mu_worker_policy before = job->record.spec.workers;
    memcpy(&spec, &job->record.spec, sizeof spec);
    spec.workers.min = wanted->min ? wanted->min : before.min;
    spec.workers.max = wanted->max ? wanted->max : before.max;
    spec.workers.spares = wanted->spares != UINT32_MAX ? wanted->spares : before.spares;
    answer->reply.job_uid = job->record.uid;
    if (is_over(job)) {
        refuse(answer, MU_ERR_CONFLICT, MU_REASON_JOB_OVER, "job '%s' is over", spec.name);
        return;
    }
    if (mu_job_spec_check(&spec, &err) != MU_OK) {
        refuse(answer, MU_ERR_INVALID, err.reason, "%s", err.text);
        return;
    }
    if (memcmp(&spec.workers, &before, sizeof before) == 0)
        return;
    job->record.spec.workers = spec.workers;
    revise(coord, job);
    persist_job(coord, job);
    event(coord, MU_EVENT_INFO, "job_scaled", job, NULL,
          "job %s is scaled to %u to %u workers, %u spares (from %u to %u, %u)", spec.name, spec.workers.min,
          spec.workers.max, spec.workers.spares, before.min, before.max, before.spares);
    job->considered = 0; /* whoever is there may change the plan now */
    job->told_short = 0;
    settle(coord, job);
}

static void drain_worker(struct mu_coord *coord, const char *name, const char *reason, struct answer *answer)
{
    struct worker *worker = find_worker(coord, name);
    const struct mu_worker_record *drained = find_worker_record(coord, name);
    if ((!worker || worker->lost) && drained && drained->draining)
        return; /* asked again; it is gone already */
    if (!worker || worker->lost) {
        refuse(answer, MU_ERR_NOT_FOUND, MU_REASON_WORKER_UNKNOWN, "no worker '%s' is attached (see: muster workers)",
               name);
        return;
    }
    struct mu_worker_record *record = note_worker(coord, name);
    if (!record) {
        refuse(answer, MU_ERR_LIMIT, MU_REASON_LIMIT_REACHED,
               "%u workers are drained or quarantined, the most that are remembered: undrain some", WORKER_RECORDS_MAX);
        return;
    }
    record->draining = true;
    record->revision = coord->last_event + 1;
    copy_text(record->host, sizeof record->host, worker->host);
    copy_text(record->reason, sizeof record->reason, reason);
    persist_worker(coord, record);
    event(coord, MU_EVENT_INFO, "worker_draining", job_of(coord, worker), worker, "worker %s is being drained (%s)",
          name, reason);
    if (!worker->draining)
        drain(coord, worker, reason);
}

static void undrain_worker(struct mu_coord *coord, const char *name, struct answer *answer)
{
    struct mu_worker_record *record = find_worker_record(coord, name);
    struct worker *slow = find_worker(coord, name);
    bool restored = slow && restore_demoted(coord, slow, "an operator");
    if (!record && !restored)
        refuse(answer, MU_ERR_NOT_FOUND, MU_REASON_WORKER_UNKNOWN,
               "worker '%s' is neither drained nor quarantined nor demoted", name);
    if (!record)
        return;
    emit(coord,
         &(struct mu_coord_action){.kind = MU_CA_FORGET, .record = {.kind = MU_RECORD_WORKER, .worker = record}});
    uint64_t hash = mu_xxh3_64(record->name, strlen(record->name), 1) | 1;
    for (uint32_t i = 0; i < MU_DEATHS_KEPT; i++) {
        if (coord->deaths[i].name_hash != hash)
            continue;
        coord->deaths[i].name_hash = 0;
        emit(coord, &(struct mu_coord_action){
                        .kind = MU_CA_FORGET,
                        .record = {.kind = MU_RECORD_DEATH, .death = &(struct mu_death_record){.number = i}}});
    }
    event(coord, MU_EVENT_INFO, "worker_undrained", NULL, NULL, "worker %s may attach again", record->name);
    struct worker *worker = find_worker(coord, record->name);
    if (worker && worker->draining && !worker->leaving && !worker->lost) { /* not gone yet: it stays */
        worker->draining = false;
        count_ready(coord, worker);
        settle(coord, job_of(coord, worker));
    }
    *record = coord->worker_records[--coord->worker_record_count];
}

static void change_worker(struct mu_coord *coord, const struct mu_coord_event *request, struct answer *answer)
{
    const char *name = request->request.worker;
    const struct mu_worker_record *record = find_worker_record(coord, name);
    if (!is_expected_of("worker", name, record ? record->revision : 0, request->expected_revision, answer))
        return;
    if (request->kind == MU_CE_DRAIN)
        drain_worker(coord, name, request->request.reason, answer);
    else
        undrain_worker(coord, name, answer);
}

static void change_job(struct mu_coord *coord, const struct mu_coord_event *request, struct answer *answer)
{
    const char *name = request->request.job;
    struct job *job = find_job(coord, name);
    if (!job)
        refuse(answer, MU_ERR_NOT_FOUND, MU_REASON_JOB_UNKNOWN, "no job '%s' (see: muster status)", name);
    else if (!is_expected(job, name, request->expected_revision, answer))
        return;
    else if (request->kind == MU_CE_CANCEL)
        cancel(coord, job, request->request.reason, answer);
    else if (request->kind == MU_CE_CHECKPOINT)
        checkpoint_now(coord, job, answer);
    else if (request->kind == MU_CE_AMEND)
        amend_job(coord, job, request->request.amendment, request->request.by, answer);
    else if (request->kind == MU_CE_BRANCH)
        branch_job(coord, job, request, answer);
    else
        scale(coord, job, &request->request.workers, answer);
}

/* ---- once ---- */

/* True: the change was made before, or never will be; `answer` says it. */
static bool answer_again(const struct mu_coord *coord, const struct mu_coord_once *once, struct answer *answer)
{
    if (mu_id_is_zero(once->id) || MU_MUTANT(MU_MUT_CHANGE_TWICE))
        return false;
    for (uint32_t i = 0; i < MU_REQUESTS_KEPT; i++) {
        const struct mu_request_record *made = &coord->requests[i];
        if (!mu_id_equal(made->id, once->id))
            continue;
        if (made->body.high != once->body.high || made->body.low != once->body.low) {
            refuse(answer, MU_ERR_INVALID, MU_REASON_REQUEST_ID_REUSED,
                   "request_id: it belongs to another change, which was made: draw a new one for each change");
            return true;
        }
        answer->reply.checkpoint = made->checkpoint;
        answer->reply.existed = made->existed;
        answer->reply.job_uid = made->job_uid;
        return true;
    }
    return false;
}

static void remember(struct mu_coord *coord, const struct mu_coord_once *once, const struct mu_coord_reply *reply)
{
    if (mu_id_is_zero(once->id))
        return;
    struct mu_request_record *made = &coord->requests[coord->request_count % MU_REQUESTS_KEPT];
    *made = (struct mu_request_record){.number = coord->request_count++,
                                       .id = once->id,
                                       .body = once->body,
                                       .job_uid = reply->job_uid,
                                       .checkpoint = reply->checkpoint,
                                       .existed = reply->existed};
    persist_request(coord, made);
}

void on_request(struct mu_coord *coord, const struct mu_coord_event *request)
{
    bool is_submit = request->kind == MU_CE_SUBMIT;
    struct answer answer = {.reply.cookie = is_submit ? request->submit.cookie : request->request.cookie};
    if (!answer_again(coord, &request->once, &answer)) {
        if (is_submit)
            submit(coord, request, &answer);
        else if (request->kind == MU_CE_DRAIN || request->kind == MU_CE_UNDRAIN)
            change_worker(coord, request, &answer);
        else if (request->kind == MU_CE_NODE)
            order_node(coord, request, &answer);
        else
            change_job(coord, request, &answer);
        if (answer.reply.status == MU_OK)
            remember(coord, &request->once, &answer.reply);
    }
    emit(coord, &(struct mu_coord_action){.kind = MU_CA_REPLY, .reply = answer.reply});
}
