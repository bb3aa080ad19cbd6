/* Everything the core says goes through here. */
#include "coordinator/core/internal.h"

#include <stdarg.h>
#include <string.h>

/* The core formats texts for people but does no I/O: vsnprintf is declared by hand through the compiler's builtin. */
#define FORMAT_INTO(out, size, fmt)                                                                                    \
    do {                                                                                                               \
        va_list args;                                                                                                  \
        va_start(args, fmt);                                                                                           \
        __builtin_vsnprintf(out, size, fmt, args);                                                                     \
        va_end(args);                                                                                                  \
    } while (0)

uint64_t lease_now(const struct mu_coord *coord)
{
    return coord->now_us - coord->forgiven_us;
}

void emit(struct mu_coord *coord, const struct mu_coord_action *action)
{
    coord->sink->emit(coord->sink->ctx, action);
}

void copy_text(char *out, size_t size, const char *text)
{
    size_t length = text ? strnlen(text, size - 1) : 0;
    if (length)
        memmove(out, text, length);
    out[length] = 0;
}

void format_into(char *out, size_t size, const char *fmt, ...)
{
    FORMAT_INTO(out, size, fmt);
}

void send_to(struct mu_coord *coord, const struct worker *worker, const struct mu_coord_message *message)
{
    if (worker->session == 0)
        return; /* what it needs to know is worked out again when it re-attaches */
    emit(coord,
         &(struct mu_coord_action){.kind = MU_CA_SEND, .send = {.session = worker->session, .message = message}});
}

void send_simple(struct mu_coord *coord, const struct worker *worker, enum mu_coord_message_kind kind,
                 uint64_t generation)
{
    send_to(coord, worker, &(struct mu_coord_message){.kind = kind, .generation = generation});
}

void close_session(struct mu_coord *coord, uint64_t session)
{
    if (session)
        emit(coord, &(struct mu_coord_action){.kind = MU_CA_CLOSE, .close = {.session = session}});
}

void send_release(struct mu_coord *coord, struct worker *worker, uint32_t exit_code, const char *text)
{
    struct mu_coord_message message = {.kind = MU_CM_RELEASE};
    message.release.exit_code = exit_code;
    copy_text(message.release.text, sizeof message.release.text, text);
    send_to(coord, worker, &message);
}

void reject(struct mu_coord *coord, uint64_t session, enum mu_reject_reason reason, const char *fmt, ...)
{
    struct mu_coord_message message = {.kind = MU_CM_REJECT};
    message.reject.reason = reason;
    FORMAT_INTO(message.reject.text, sizeof message.reject.text, fmt);
    coord->counters.refused_hellos[reason]++;
    emit(coord, &(struct mu_coord_action){.kind = MU_CA_SEND, .send = {.session = session, .message = &message}});
    close_session(coord, session);
}

static void persist(struct mu_coord *coord, struct mu_record record)
{
    emit(coord, &(struct mu_coord_action){.kind = MU_CA_PERSIST, .record = record});
}

void persist_job(struct mu_coord *coord, const struct job *job)
{
    persist(coord, (struct mu_record){.kind = MU_RECORD_JOB, .job = &job->record});
}

void forget_generation(struct mu_coord *coord, const struct job *job)
{
    struct mu_generation_record record = {.generation = job->record.generation};
    memcpy(record.job, job->record.spec.name, sizeof record.job);
    emit(coord, &(struct mu_coord_action){.kind = MU_CA_FORGET,
                                          .record = {.kind = MU_RECORD_GENERATION, .generation = &record}});
}

uint64_t first_revision(const struct mu_coord *coord)
{
    return coord->last_event ? coord->last_event : 1;
}

void revise(struct mu_coord *coord, struct job *job)
{
    job->record.revision = coord->last_event + 1;
}

void persist_generation(struct mu_coord *coord, const struct job *job)
{
    for (uint32_t rank = 0; rank < job->world; rank++) {
        const struct worker *worker = &coord->workers[job->members[rank]];
        struct mu_member_record *member = &coord->member_records[rank];
        memcpy(member->name, worker->name, sizeof member->name);
        memcpy(member->address, worker->address, sizeof member->address);
        member->incarnation = worker->incarnation;
        member->leaf_count = worker->leaf_count;
        member->layer_ns = (uint64_t)(worker->seconds_per_layer * 1e9);
    }
    struct mu_generation_record record = {
        .job_uid = job->record.uid,
        .generation = job->record.generation,
        .go = job->go,
        .equal_leaves = job->equal_leaves,
        .layout = job->layout,
        .start_step = job->start_step,
        .command_base = job->command_base,
        .world = job->world,
        .members = coord->member_records,
    };
    memcpy(record.job, job->record.spec.name, sizeof record.job);
    memcpy(record.secret, job->secret, sizeof record.secret);
    if (MU_MUTANT(job->go ? MU_MUT_SKIP_PERSIST_GO : MU_MUT_SKIP_PERSIST_GENERATION))
        return;
    persist(coord, (struct mu_record){.kind = MU_RECORD_GENERATION, .generation = &record});
}

void persist_checkpoint(struct mu_coord *coord, const struct mu_checkpoint_record *record)
{
    persist(coord, (struct mu_record){.kind = MU_RECORD_CHECKPOINT, .checkpoint = record});
}

void persist_tally(struct mu_coord *coord, const struct job *job)
{
    const struct interval *in = &job->interval;
    struct mu_tally_record record = {
        .job_uid = job->record.uid,
        .workers_lost = job->workers_lost,
        .generations = job->generations,
        .replayed_steps = job->replayed_steps,
        .replay_until = job->replay_until,
        .suspect = job->suspect,
        .suspect_step = job->suspect_step,
        .unfinite_reports = job->unfinite_reports,
        .judged_step = job->judged_step,
        .condemned = job->condemned,
        .interval = {.steps = in->steps,
                     .told_steps = in->told_steps,
                     .base = in->base,
                     .worker_us = in->worker_us,
                     .cost_s = in->cost_s,
                     .write_s = in->write_s,
                     .failure_s = in->failure_s,
                     .stall_s = in->stall_s,
                     .slow_s = in->slow_s,
                     .step_s = in->step_s},
        .prediction_told = job->prediction.told,
        .hung_count = job->hung_count,
        .demoted_count = job->demoted_count,
    };
    memcpy(record.job, job->record.spec.name, sizeof record.job);
    memcpy(record.interval.reason, in->reason, sizeof record.interval.reason);
    memcpy(record.hung, job->hung, sizeof record.hung);
    memcpy(record.demoted, job->demoted, sizeof record.demoted);
    persist(coord, (struct mu_record){.kind = MU_RECORD_TALLY, .tally = &record});
}

void persist_death(struct mu_coord *coord, const struct mu_death_record *record)
{
    persist(coord, (struct mu_record){.kind = MU_RECORD_DEATH, .death = record});
}

void persist_request(struct mu_coord *coord, const struct mu_request_record *record)
{
    persist(coord, (struct mu_record){.kind = MU_RECORD_REQUEST, .request = record});
}

void persist_worker(struct mu_coord *coord, const struct mu_worker_record *record)
{
    persist(coord, (struct mu_record){.kind = MU_RECORD_WORKER, .worker = record});
}

static void tell(struct mu_coord *coord, enum mu_event_severity severity, const char *kind, const struct job *job,
                 const char *worker, const char *text)
{
    struct mu_event_record record = {.number = ++coord->last_event, .wall_us = coord->wall_us, .severity = severity};
    copy_text(record.kind, sizeof record.kind, kind);
    if (job) {
        memcpy(record.job, job->record.spec.name, sizeof record.job);
        record.generation = job->record.generation;
        record.step = job->steps_done;
    }
    copy_text(record.worker, sizeof record.worker, worker);
    copy_text(record.text, sizeof record.text, text);
    persist(coord, (struct mu_record){.kind = MU_RECORD_EVENT, .event = &record});
    emit(coord, &(struct mu_coord_action){.kind = MU_CA_EVENT, .event = &record});
}

void event(struct mu_coord *coord, enum mu_event_severity severity, const char *kind, const struct job *job,
           const struct worker *worker, const char *fmt, ...)
{
    char text[MU_EVENT_TEXT_SIZE];
    FORMAT_INTO(text, sizeof text, fmt);
    tell(coord, severity, kind, job, worker ? worker->name : NULL, text);
}

void event_of_name(struct mu_coord *coord, enum mu_event_severity severity, const char *kind, const struct job *job,
                   const char *worker, const char *fmt, ...)
{
    char text[MU_EVENT_TEXT_SIZE];
    FORMAT_INTO(text, sizeof text, fmt);
    tell(coord, severity, kind, job, worker, text);
}

void refuse(struct answer *answer, enum mu_status status, enum mu_reason reason, const char *fmt, ...)
{
    FORMAT_INTO(answer->text, sizeof answer->text, fmt);
    answer->reply.status = status;
    answer->reply.reason = reason;
    answer->reply.text = answer->text;
}
