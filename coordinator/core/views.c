/* Reading. */
#include "coordinator/core/internal.h"

#include <string.h>

uint32_t mu_coord_job_count(const struct mu_coord *coord)
{
    return coord->job_count;
}

static const char *degree(uint32_t value, char out[12])
{
    format_into(out, 12, value ? "%u" : "auto", value);
    return out;
}

/* What a job waits for that has not even been planned. */
static void view_waiting(const struct job *job, char out[MU_TEXT_SIZE])
{
    const struct mu_job_spec *spec = &job->record.spec;
    char texts[3][12];
    uint32_t needed = fewest_ranks(job);
    if (job->ready_count >= needed || job->saving_first)
        copy_text(out, MU_TEXT_SIZE, job->waiting_text);
    else
        format_into(out, MU_TEXT_SIZE,
                    "%u worker%s can take part, %u are needed (workers.min %u, tp %s x pp %s x dp %s)",
                    job->ready_count, job->ready_count == 1 ? "" : "s", needed, spec->workers.min,
                    degree(spec->parallel.tp, texts[0]), degree(spec->parallel.pp, texts[1]),
                    degree(spec->parallel.dp, texts[2]));
}

static void view_job(const struct mu_coord *coord, const struct job *job, struct mu_job_view *ret)
{
    memset(ret, 0, sizeof *ret);
    ret->record = job->record;
    ret->phase = job->phase;
    ret->generation = job->has_generation ? job->record.generation : 0;
    ret->world =
        job->phase == MU_JP_STEPPING || job->phase == MU_JP_PARKING || job->phase == MU_JP_PREPARING ? job->world : 0;
    ret->layout = job->layout;
    if (job->phase == MU_JP_WAITING)
        view_waiting(job, ret->waiting_text);
    for (uint32_t slot = job->first_worker; slot != NONE; slot = coord->workers[slot].next) {
        const struct worker *worker = &coord->workers[slot];
        ret->attached += worker->session != 0;
        ret->spares += worker->session != 0 && worker->rank == NONE && worker->ready;
    }
    ret->steps_done = job->steps_done;
    ret->result = job->result;
    ret->has_result = job->has_result;
    ret->tokens_per_second = job->phase == MU_JP_STEPPING ? job->tokens_per_second : 0;
    const struct checkpoint *newest = newest_committed(job);
    if (newest) {
        ret->last_checkpoint = newest->record.number;
        ret->last_checkpoint_step = newest->record.step;
        ret->last_checkpoint_wall_us = newest->record.wall_us;
    }
    ret->checkpoint_steps = job->record.spec.checkpoint.path[0] ? interval_steps(job) : 0;
    if (interval_is_auto(job) && job->interval.steps) {
        ret->checkpoint_every = job->interval.steps;
        ret->checkpoint_stall_s = job->interval.cost_s;
        ret->checkpoint_write_s = job->interval.write_s;
        ret->checkpoint_failure_s = job->interval.failure_s;
        memcpy(ret->checkpoint_every_reason, job->interval.reason, sizeof ret->checkpoint_every_reason);
    }
    ret->eval_step = job->eval_step;
    ret->eval_loss = job->eval_loss;
    ret->workers_lost = job->workers_lost;
    ret->generations = job->generations;
    ret->replayed_steps = job->replayed_steps;
    ret->checkpoint_failures = job->checkpoint_failures;
    ret->unfinite_reports = job->unfinite_reports;
    for (uint32_t i = 0; i < job->bad_link_count; i++)
        ret->bad_links += job->bad_links[i].until_us > lease_now(coord);
    ret->seconds_per_step = job->seconds_per_step;
}

bool mu_coord_job_view(const struct mu_coord *coord, uint32_t index, struct mu_job_view *ret)
{
    if (index >= coord->job_count)
        return false;
    view_job(coord, &coord->jobs[coord->job_order[index]], ret);
    return true;
}

const struct mu_step_phases *mu_coord_step_phases(const struct mu_coord *coord, uint32_t index)
{
    return index < coord->job_count ? &coord->jobs[coord->job_order[index]].step_phases : NULL;
}

bool mu_coord_job_find(const struct mu_coord *coord, const char *name, struct mu_job_view *ret)
{
    const struct job *job = find_job((struct mu_coord *)(uintptr_t)coord, name);
    if (job)
        view_job(coord, job, ret);
    return job != NULL;
}

bool mu_coord_prediction_view(const struct mu_coord *coord, const char *name, struct mu_prediction *ret)
{
    const struct job *job = find_job((struct mu_coord *)(uintptr_t)coord, name);
    if (!job || job->prediction.view.generation != job->record.generation ||
        !(job->prediction.view.predicted_s[MU_TERM_COMPUTE] > 0))
        return false;
    *ret = job->prediction.view;
    return true;
}

uint32_t mu_coord_worker_slots(const struct mu_coord *coord)
{
    return coord->worker_high;
}

static enum mu_worker_state state_of(const struct worker *worker)
{
    if (worker->lost)
        return MU_WS_LOST;
    if (worker->draining)
        return MU_WS_DRAINING;
    if (worker->suspect)
        return MU_WS_SUSPECT;
    if (!worker->ready)
        return MU_WS_ATTACHING;
    return worker->rank == NONE ? MU_WS_SPARE : MU_WS_MEMBER;
}

bool mu_coord_worker_view(const struct mu_coord *coord, uint32_t slot, struct mu_worker_view *ret)
{
    if (slot >= coord->worker_high || !coord->workers[slot].used)
        return false;
    const struct worker *worker = &coord->workers[slot];
    const struct job *job = &coord->jobs[worker->job];
    memset(ret, 0, sizeof *ret);
    memcpy(ret->name, worker->name, sizeof ret->name);
    memcpy(ret->host, worker->host, sizeof ret->host);
    memcpy(ret->job, job->record.spec.name, sizeof ret->job);
    memcpy(ret->address, worker->address, sizeof ret->address);
    memcpy(ret->backend, worker->backend, sizeof ret->backend);
    memcpy(ret->reason, worker->reason, sizeof ret->reason);
    if (!ret->reason[0] && is_demoted(job, worker))
        copy_text(ret->reason, sizeof ret->reason, "demoted: it is slow, others come first");
    ret->incarnation = worker->incarnation;
    ret->state = state_of(worker);
    ret->phase = worker->status.phase;
    ret->generation = worker->status.generation;
    ret->pid = worker->pid;
    ret->memory_bytes = worker->memory_bytes;
    ret->session = worker->session;
    ret->rank = worker->rank;
    ret->leaf_count = worker->rank == NONE ? 0 : worker->leaf_count;
    bool member = worker->rank != NONE && job->has_generation;
    ret->idle = member && mu_layout_is_idle(&job->layout, worker->rank);
    ret->has_coords = member && !ret->idle;
    if (ret->has_coords)
        ret->coords = mu_layout_coords(&job->layout, worker->rank);
    ret->threads = worker->threads;
    ret->step = worker->status.held.step;
    ret->age_us = lease_now(coord) - worker->seen_us;
    ret->seconds_per_leaf = worker->seconds_per_leaf;
    const struct mu_worker_record *record = find_worker_record((struct mu_coord *)(uintptr_t)coord, worker->name);
    ret->revision = record ? record->revision : 0;
    return true;
}

bool mu_coord_checkpoint_view(const struct mu_coord *coord, const char *job_name, uint32_t index,
                              struct mu_checkpoint_record *ret)
{
    const struct job *job = find_job((struct mu_coord *)(uintptr_t)coord, job_name);
    if (!job || index >= job->checkpoint_count)
        return false;
    *ret = job->checkpoints[index].record;
    ret->pieces = NULL;
    return true;
}

uint32_t mu_coord_borrowers(const struct mu_coord *coord, const struct mu_checkpoint_record *checkpoint)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < coord->job_count && !checkpoint->owner[0]; i++)
        count += mu_id_equal(coord->jobs[i].borrowed, checkpoint->nonce);
    return count;
}

bool mu_coord_timing_view(const struct mu_coord *coord, uint32_t slot, uint32_t back, struct mu_timing_view *ret)
{
    if (slot >= coord->worker_high || !coord->workers[slot].used)
        return false;
    const struct worker *worker = &coord->workers[slot];
    if (back >= MU_TIMINGS_KEPT || back >= worker->timing_count)
        return false;
    const struct timing *timing = &worker->timings[(worker->timing_count - 1 - back) % MU_TIMINGS_KEPT];
    *ret = (struct mu_timing_view){.generation = timing->generation, .rank = timing->rank, .report = timing->report};
    memcpy(ret->worker, worker->name, sizeof ret->worker);
    return true;
}

uint64_t mu_coord_last_event(const struct mu_coord *coord)
{
    return coord->last_event;
}

struct mu_coord_counters mu_coord_counters(const struct mu_coord *coord)
{
    struct mu_coord_counters counters = coord->counters;
    for (uint32_t i = 0; i < coord->worker_record_count; i++)
        counters.quarantined += coord->worker_records[i].quarantined;
    return counters;
}

bool mu_coord_node_view(const struct mu_coord *coord, uint32_t index, struct mu_node_record *ret)
{
    if (index < coord->node_count)
        *ret = coord->nodes[index].record;
    return index < coord->node_count;
}

bool mu_coord_worker_record_view(const struct mu_coord *coord, uint32_t index, struct mu_worker_record *ret)
{
    if (index < coord->worker_record_count)
        *ret = coord->worker_records[index];
    return index < coord->worker_record_count;
}
