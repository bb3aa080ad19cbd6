/* What other programs ask for. Every request is answered by exactly one REPLY, which waits for what it depends on. */
#include "coordinator/core/internal.h"

#include <string.h>

static bool same_spec(const struct mu_job_spec *a, const struct mu_job_spec *b)
{
    return memcmp(a, b, sizeof *a) == 0; /* specs start as zeros and strings are copied whole: no stray bytes */
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
    struct mu_generation_record generation = {0};
    memcpy(generation.job, job->record.spec.name, sizeof generation.job);
    emit(coord, &(struct mu_coord_action){.kind = MU_CA_FORGET,
                                          .record = {.kind = MU_RECORD_GENERATION, .generation = &generation}});
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

void on_submit(struct mu_coord *coord, uint64_t cookie, const struct mu_job_spec *spec)
{
    struct mu_error err;
    if (mu_job_spec_check(spec, &err) != MU_OK) {
        reply(coord, cookie, MU_ERR_INVALID, "%s", err.text);
        return;
    }
    struct job *job = find_job(coord, spec->name);
    if (job && !is_over(job)) {
        if (same_spec(&job->record.spec, spec))
            emit(coord, &(struct mu_coord_action){.kind = MU_CA_REPLY, .reply = {.cookie = cookie, .existed = true}});
        else
            reply(coord, cookie, MU_ERR_EXISTS,
                  "job '%s' is there already with another specification and is not over: choose another name, or "
                  "cancel it first",
                  spec->name);
        return;
    }
    uint64_t generation = 0, checkpoint = 0, command = 0;
    if (job) {
        generation =
            job->record.generation; /* numbers go on, so that nothing of the old job can be taken for the new one's */
        checkpoint = job->record.next_checkpoint;
        command = job->record.command.number;
        forget_old_job(coord, job);
        clear_job(job);
    } else {
        job = add_job(coord, spec->name);
        if (!job)
            job = replace_oldest_over(coord, spec->name);
        if (!job) {
            reply(coord, cookie, MU_ERR_LIMIT, "this coordinator runs %u jobs already, its limit (--max-jobs)",
                  coord->config.max_jobs);
            return;
        }
    }
    job->record = (struct mu_job_record){.uid = coord->random,
                                         .state = MU_JOB_PENDING,
                                         .generation = generation,
                                         .next_checkpoint = checkpoint,
                                         .created_wall_us = coord->wall_us};
    memcpy(&job->record.spec, spec, sizeof *spec);
    job->record.command.number = command;
    job->leaves = mu_job_leaves(spec);
    mu_model_spec_init(&job->model, &spec->model);
    job->phase = MU_JP_WAITING;
    job->phase_since_us = lease_now(coord);
    persist_job(coord, job);
    event(coord, MU_EVENT_INFO, "job_submitted", job, NULL, "job %s submitted: %llu steps, %u leaves, %u to %u workers",
          spec->name, (unsigned long long)spec->steps, job->leaves, spec->workers.min, spec->workers.max);
    reply(coord, cookie, MU_OK, "%s", "");
}

static void cancel(struct mu_coord *coord, uint64_t cookie, struct job *job, const char *reason)
{
    if (job->record.state == MU_JOB_CANCELLED) {
        reply(coord, cookie, MU_OK, "%s", "");
        return;
    }
    if (is_over(job)) {
        reply(coord, cookie, MU_ERR_CONFLICT, "job '%s' is over already", job->record.spec.name);
        return;
    }
    char text[MU_TEXT_SIZE];
    format_into(text, sizeof text, "cancelled%s%s", reason && reason[0] ? ": " : "", reason ? reason : "");
    finish_job(coord, job, MU_JOB_CANCELLED, 0, text);
    reply(coord, cookie, MU_OK, "%s", "");
}

static void checkpoint_now(struct mu_coord *coord, uint64_t cookie, struct job *job)
{
    const char *name = job->record.spec.name;
    if (job->record.spec.checkpoint.path[0] == 0) {
        reply(coord, cookie, MU_ERR_INVALID, "job '%s' has no checkpoint.path in its job file", name);
    } else if (job->intent) {
        reply(coord, cookie, MU_ERR_CONFLICT, "checkpoint %llu of job '%s' is under way: wait for it",
              (unsigned long long)job->intent, name);
    } else if (job->phase != MU_JP_STEPPING) {
        reply(coord, cookie, MU_ERR_CONFLICT, "job '%s' is not stepping now: it is %s", name,
              is_over(job) ? "over" : "waiting or between generations, try again");
    } else {
        uint64_t number = order_checkpoint(coord, job, 0, false);
        if (number)
            emit(coord,
                 &(struct mu_coord_action){.kind = MU_CA_REPLY, .reply = {.cookie = cookie, .checkpoint = number}});
        else
            reply(coord, cookie, MU_ERR_LIMIT,
                  "job '%s' has %u checkpoints, the most that are kept track of: lower checkpoint.keep", name,
                  job->checkpoint_count);
    }
}

static void drain_request(struct mu_coord *coord, const struct mu_coord_event *request)
{
    uint64_t cookie = request->request.cookie;
    const char *name = request->request.worker, *reason = request->request.reason;
    struct worker *worker = find_worker(coord, name);
    const struct mu_worker_record *drained = find_worker_record(coord, name);
    if ((!worker || worker->lost) && drained && drained->draining) { /* asked again; it is gone already */
        reply(coord, cookie, MU_OK, "%s", "");
        return;
    }
    if (!worker || worker->lost) {
        reply(coord, cookie, MU_ERR_NOT_FOUND, "no worker '%s' is attached (see: muster workers)", name);
        return;
    }
    struct mu_worker_record *record = note_worker(coord, name);
    if (!record) {
        reply(coord, cookie, MU_ERR_LIMIT,
              "%u workers are drained or quarantined, the most that are remembered: undrain some", WORKER_RECORDS_MAX);
        return;
    }
    record->draining = true;
    copy_text(record->reason, sizeof record->reason, reason);
    persist_worker(coord, record);
    event(coord, MU_EVENT_INFO, "worker_draining", job_of(coord, worker), worker, "worker %s is being drained (%s)",
          name, reason);
    if (!worker->draining)
        drain(coord, worker, reason);
    reply(coord, cookie, MU_OK, "%s", "");
}

static void undrain(struct mu_coord *coord, const struct mu_coord_event *request)
{
    struct mu_worker_record *record = find_worker_record(coord, request->request.worker);
    if (!record) {
        reply(coord, request->request.cookie, MU_ERR_NOT_FOUND, "worker '%s' is neither drained nor quarantined",
              request->request.worker);
        return;
    }
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
    reply(coord, request->request.cookie, MU_OK, "%s", "");
}

void on_request(struct mu_coord *coord, const struct mu_coord_event *request)
{
    if (request->kind == MU_CE_DRAIN) {
        drain_request(coord, request);
        return;
    }
    if (request->kind == MU_CE_UNDRAIN) {
        undrain(coord, request);
        return;
    }
    struct job *job = find_job(coord, request->request.job);
    if (!job)
        reply(coord, request->request.cookie, MU_ERR_NOT_FOUND, "no job '%s' (see: muster status)",
              request->request.job);
    else if (request->kind == MU_CE_CANCEL)
        cancel(coord, request->request.cookie, job, request->request.reason);
    else
        checkpoint_now(coord, request->request.cookie, job);
}
