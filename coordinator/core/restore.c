/* From records back to memory. */
#include "coordinator/core/internal.h"

#include <string.h>

static enum mu_status restore_job(struct mu_coord *coord, const struct mu_job_record *record, struct mu_error *err)
{
    struct job *job = find_job(coord, record->spec.name);
    if (job)
        return mu_fail(err, MU_ERR_CORRUPT, "job '%s' is recorded twice", record->spec.name);
    job = add_job(coord, record->spec.name);
    if (!job)
        return mu_fail(err, MU_ERR_LIMIT, "more than --max-jobs %u jobs are recorded: raise it",
                       coord->config.max_jobs);
    job->record = *record;
    if (MU_MUTANT(MU_MUT_FORGET_AMENDMENTS))
        job->record.spec.amendments.count = 0;
    job->leaves = mu_job_leaves(&record->spec);
    mu_model_spec_init(&job->model, &record->spec.model);
    job->steps_done = record->steps_done;
    bool over = record->state != MU_JOB_PENDING && record->state != MU_JOB_RUNNING;
    job->phase = over ? MU_JP_OVER : MU_JP_WAITING;
    return MU_OK;
}

/* The layout of a generation or an intent. `recorded`: its dp is 0 where it was written before there were layouts. */
static enum mu_status restore_layout(const struct job *job, const struct mu_layout *recorded, uint32_t ranks,
                                     const char *what, struct mu_layout *ret_layout, struct mu_error *err)
{
    if (recorded->dp == 0 || MU_MUTANT(MU_MUT_FORGET_LAYOUT)) {
        mu_layout_init(ret_layout, ranks, job->model.config.layers);
        return MU_OK;
    }
    if (mu_layout_check(recorded, &job->record.spec, err) != MU_OK || mu_layout_world(recorded) != ranks)
        return mu_fail(err, MU_ERR_CORRUPT, "job '%s': %s is recorded with a layout that does not fit it (%u ranks)",
                       job->record.spec.name, what, ranks);
    *ret_layout = *recorded;
    return MU_OK;
}

static void restore_leaf_counts(struct job *job, const struct mu_generation_record *record)
{
    for (uint32_t d = 0; !record->equal_leaves && d < job->layout.dp && d < MU_COUNTED_REPLICAS_MAX; d++)
        job->leaf_counts[d] = record->members[mu_layout_rank(&job->layout, (struct mu_coords){.d = d})].leaf_count;
}

/* A generation whose Go is durable may be stepping right now; one without it, nobody has ever stepped: its members,
 * wherever they stand, park and the next one is planned from what they hold. */
static enum mu_status restore_generation(struct mu_coord *coord, const struct mu_generation_record *record,
                                         struct mu_error *err)
{
    struct job *job = find_job(coord, record->job);
    if (!job)
        return mu_fail(err, MU_ERR_CORRUPT, "generation %llu belongs to an unknown job '%s'",
                       (unsigned long long)record->generation, record->job);
    if (!mu_id_equal(job->record.uid, record->job_uid) || job->phase == MU_JP_OVER)
        return MU_OK; /* of an earlier job of that name, or not needed any more */
    if (record->generation != job->record.generation)
        return mu_fail(err, MU_ERR_CORRUPT, "job '%s' is at generation %llu, but its members are recorded for %llu",
                       record->job, (unsigned long long)job->record.generation, (unsigned long long)record->generation);
    if (record->world > coord->config.max_members)
        return mu_fail(err, MU_ERR_LIMIT, "job '%s' has %u members, --max-workers is %u: raise it", record->job,
                       record->world, coord->config.max_members);
    enum mu_status status = restore_layout(job, &record->layout, record->world, "its generation", &job->layout, err);
    if (status)
        return status;
    job->has_generation = true;
    job->reformed = true;
    job->go = record->go;
    job->equal_leaves = record->equal_leaves;
    job->start_step = record->start_step;
    job->command_base = record->command_base;
    job->world = record->world;
    memcpy(job->secret, record->secret, sizeof job->secret);
    restore_leaf_counts(job, record);
    for (uint32_t rank = 0; rank < record->world; rank++) {
        const struct mu_member_record *member = &record->members[rank];
        struct worker *worker = add_worker(coord, job, member->name, member->incarnation);
        if (!worker)
            return mu_fail(err, MU_ERR_LIMIT, "more than --max-workers %u workers are recorded: raise it",
                           coord->config.max_workers);
        memcpy(worker->address, member->address, sizeof worker->address);
        worker->rank = rank;
        worker->leaf_count = member->leaf_count;
        worker->seconds_per_layer = (double)member->layer_ns * 1e-9;
        worker->status.phase = record->go ? MU_PHASE_RUNNING : MU_PHASE_PREPARING;
        worker->status.generation = record->generation;
        worker->status.rank = rank;
        job->members[rank] = (uint32_t)(worker - coord->workers);
    }
    bool wanted = record->go && !is_rolled_back(job), stepping = wanted && !job->record.command.open;
    job->phase = stepping ? MU_JP_STEPPING : MU_JP_PARKING;
    job->revoked = !wanted;
    return MU_OK;
}

static enum mu_status restore_checkpoint(struct mu_coord *coord, const struct mu_checkpoint_record *record,
                                         struct mu_error *err)
{
    struct job *job = find_job(coord, record->job);
    if (!job || !mu_id_equal(job->record.uid, record->job_uid))
        return MU_OK; /* of an earlier job of that name */
    if (job->checkpoint_count == MU_CHECKPOINTS_MAX || record->piece_count > MU_PIECES_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "job '%s' has more checkpoints or pieces recorded than %d or %d", record->job,
                       MU_CHECKPOINTS_MAX, MU_PIECES_MAX);
    struct mu_layout layout = {0};
    if (record->state == MU_CKPT_INTENT) {
        enum mu_status status = restore_layout(job, &record->layout, record->piece_count, "a checkpoint", &layout, err);
        if (status)
            return status;
    }
    uint32_t at = job->checkpoint_count++;
    for (; at > 0 && job->checkpoints[at - 1].record.number > record->number; at--)
        job->checkpoints[at] = job->checkpoints[at - 1];
    job->checkpoints[at] = (struct checkpoint){0};
    struct mu_checkpoint_record *own = &job->checkpoints[at].record;
    *own = *record;
    own->layout = layout;
    if (own->owner[0])
        job->borrowed = own->nonce;
    own->holders = NULL;
    own->holder_count = 0;
    for (uint32_t i = 0; i < record->holder_count && !MU_MUTANT(MU_MUT_FORGET_HOLDERS); i++) {
        if (!add_holder(own, record->holders[i].host))
            return mu_fail(err, MU_ERR_LIMIT, "job '%s': no memory for the hosts of checkpoint %llu, or over %d",
                           record->job, (unsigned long long)record->number, MU_HOLDERS_MAX);
    }
    if (record->state == MU_CKPT_INTENT) {
        memcpy(job->pieces, record->pieces, record->piece_count * sizeof job->pieces[0]);
        own->pieces = job->pieces;
    } else {
        own->pieces = NULL;
        own->piece_count = 0;
    }
    return MU_OK;
}

static enum mu_status restore_tally(struct mu_coord *coord, const struct mu_tally_record *record, struct mu_error *err)
{
    struct job *job = find_job(coord, record->job);
    if (!job)
        return mu_fail(err, MU_ERR_CORRUPT, "a tally belongs to an unknown job '%s'", record->job);
    if (!mu_id_equal(job->record.uid, record->job_uid) || MU_MUTANT(MU_MUT_FORGET_TALLY))
        return MU_OK; /* of an earlier job of that name */
    job->workers_lost = record->workers_lost;
    job->generations = record->generations;
    job->replayed_steps = record->replayed_steps;
    job->replay_until = record->replay_until;
    job->suspect = record->suspect;
    job->suspect_step = record->suspect_step;
    job->unfinite_reports = record->unfinite_reports;
    job->judged_step = record->judged_step;
    job->condemned = MU_MUTANT(MU_MUT_FORGET_CONDEMNED) ? 0 : record->condemned;
    job->interval = (struct interval){.steps = record->interval.steps,
                                      .told_steps = record->interval.told_steps,
                                      .base = record->interval.base,
                                      .worker_us = record->interval.worker_us,
                                      .cost_s = record->interval.cost_s,
                                      .write_s = record->interval.write_s,
                                      .failure_s = record->interval.failure_s,
                                      .stall_s = record->interval.stall_s,
                                      .slow_s = record->interval.slow_s,
                                      .step_s = record->interval.step_s};
    memcpy(job->interval.reason, record->interval.reason, sizeof job->interval.reason);
    job->prediction.told = record->prediction_told;
    job->hung_count = record->hung_count;
    memcpy(job->hung, record->hung, sizeof job->hung);
    job->demoted_count = MU_MUTANT(MU_MUT_FORGET_DEMOTED) ? 0 : record->demoted_count;
    memcpy(job->demoted, record->demoted, sizeof job->demoted);
    return MU_OK;
}

/* Its age becomes known at the start, which brings the time. */
static void restore_death(struct mu_coord *coord, const struct mu_death_record *record)
{
    if (MU_MUTANT(MU_MUT_FORGET_DEATHS))
        return;
    coord->deaths[record->number % MU_DEATHS_KEPT].name_hash = record->name_hash;
    coord->deaths[record->number % MU_DEATHS_KEPT].lease_us = record->wall_us;
    coord->deaths[record->number % MU_DEATHS_KEPT].incarnation = record->incarnation;
    if (record->number >= coord->death_count)
        coord->death_count = record->number + 1;
}

static void restore_request(struct mu_coord *coord, const struct mu_request_record *record)
{
    if (MU_MUTANT(MU_MUT_FORGET_REQUESTS))
        return;
    coord->requests[record->number % MU_REQUESTS_KEPT] = *record;
    if (record->number >= coord->request_count)
        coord->request_count = record->number + 1;
}

enum mu_status mu_coord_restore(struct mu_coord *coord, const struct mu_record *record, struct mu_error *err)
{
    struct mu_worker_record *worker;
    switch (record->kind) {
    case MU_RECORD_JOB:
        return restore_job(coord, record->job, err);
    case MU_RECORD_GENERATION:
        return restore_generation(coord, record->generation, err);
    case MU_RECORD_CHECKPOINT:
        return restore_checkpoint(coord, record->checkpoint, err);
    case MU_RECORD_WORKER:
        worker = note_worker(coord, record->worker->name);
        if (!worker)
            return mu_fail(err, MU_ERR_LIMIT, "more than %d drained or quarantined workers are recorded",
                           WORKER_RECORDS_MAX);
        *worker = *record->worker;
        return MU_OK;
    case MU_RECORD_TALLY:
        return restore_tally(coord, record->tally, err);
    case MU_RECORD_DEATH:
        restore_death(coord, record->death);
        return MU_OK;
    case MU_RECORD_NODE:
        return restore_node(coord, record->node)
                   ? MU_OK
                   : mu_fail(err, MU_ERR_LIMIT, "more than %d cordoned or drained nodes are recorded", NODES_MAX);
    case MU_RECORD_REQUEST:
        restore_request(coord, record->request);
        return MU_OK;
    case MU_RECORD_ACCOUNT:
        goodput_restore(coord, record->account);
        return MU_OK;
    case MU_RECORD_EVENT:
        if (record->event->number > coord->last_event && !MU_MUTANT(MU_MUT_REUSE_EVENT_NUMBER))
            coord->last_event = record->event->number;
        return MU_OK;
    case MU_RECORD_KIND_COUNT:
        break;
    }
    return mu_fail(err, MU_ERR_CORRUPT, "a record has the unknown kind %d", (int)record->kind);
}
