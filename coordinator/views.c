#include "coordinator/views.h"

#include <stddef.h>
#include <string.h>

#include "common/clock.h"
#include "coordinator/records.h"
#include "coordinator/vitals.h"
#include "plan/estimate.h"

_Static_assert(MUSTER__V1__JOB_PHASE__JOB_PHASE_OVER == (int)MU_JP_COUNT, "job phase");
_Static_assert(MUSTER__V1__TIME_CLASS__TIME_CLASS_UNREPORTED == (int)MU_TIME_CLASS_COUNT, "time class");
_Static_assert(sizeof(Muster__V1__TimeByClass) == sizeof(ProtobufCMessage) + MU_TIME_CLASS_COUNT * sizeof(double),
               "time classes");
_Static_assert(offsetof(Muster__V1__VitalSigns, age_us) ==
                   offsetof(Muster__V1__VitalSigns, cpus) + MU_VITAL_COUNT * sizeof(double),
               "vital signs");
_Static_assert(MUSTER__V1__WORKER_STATE__WORKER_STATE_LOST == (int)MU_WS_STATE_COUNT, "worker state");

static void *no_memory(struct mu_error *err)
{
    mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the answer");
    return NULL;
}

Muster__V1__Job *mu_view_job(struct mu_wire_arena *arena, const struct mu_job_view *view, struct mu_error *err)
{
    struct {
        Muster__V1__Job job;
        Muster__V1__StepResult result;
        Muster__V1__Origin origin;
    } *all = mu_wire_arena_alloc(arena, sizeof *all);
    if (!all)
        return no_memory(err);
    Muster__V1__Job *pb = &all->job;
    muster__v1__job__init(pb);
    if (mu_wire_spec_to_pb(arena, &view->record.spec, &pb->spec, err) != MU_OK)
        return NULL;
    pb->name = pb->spec->name;
    pb->uid = mu_wire_put_id(arena, view->record.uid);
    pb->state = (Muster__V1__JobState)((int)view->record.state + 1);
    pb->phase = (Muster__V1__JobPhase)((int)view->phase + 1);
    pb->text = view->record.text[0] ? mu_wire_put_text(arena, view->record.text, sizeof view->record.text)
                                    : mu_wire_put_text(arena, view->waiting_text, sizeof view->waiting_text);
    if (view->world && mu_wire_layout_to_pb(arena, &view->layout, "Job.layout", &pb->layout, err) != MU_OK)
        return NULL;
    pb->generation = view->generation;
    pb->world = view->world;
    pb->attached = view->attached;
    pb->spares = view->spares;
    pb->steps_done = view->steps_done;
    pb->has_result = view->has_result;
    if (view->has_result) {
        mu_wire_result_to_pb(&view->result, &all->result);
        pb->result = &all->result;
    }
    pb->tokens_per_second = view->tokens_per_second;
    pb->eval_step = view->eval_step;
    pb->eval_loss = view->eval_loss;
    pb->last_checkpoint = view->last_checkpoint;
    pb->last_checkpoint_step = view->last_checkpoint_step;
    pb->last_checkpoint_wall_us = view->last_checkpoint_wall_us;
    pb->workers_lost = view->workers_lost;
    pb->generations = view->generations;
    pb->replayed_steps = view->replayed_steps;
    pb->revision = view->record.revision;
    pb->origin = mu_origin_to_pb(arena, &view->record, &all->origin);
    pb->steps = mu_job_end(&view->record.spec);
    pb->created_wall_us = view->record.created_wall_us;
    pb->ended_wall_us = view->record.ended_wall_us;
    pb->weights_sha256 = mu_wire_put_bytes32(view->record.weights_sha256);
    pb->leaves = mu_job_leaves(&view->record.spec);
    pb->checkpoint_every = view->checkpoint_every;
    pb->checkpoint_stall_seconds = view->checkpoint_stall_s;
    pb->checkpoint_write_seconds = view->checkpoint_write_s;
    pb->checkpoint_failure_seconds = view->checkpoint_failure_s;
    pb->checkpoint_every_reason =
        mu_wire_put_text(arena, view->checkpoint_every_reason, sizeof view->checkpoint_every_reason);
    return pb;
}

Muster__V1__Worker *mu_view_worker(struct mu_wire_arena *arena, const struct mu_worker_view *view, struct mu_error *err)
{
    struct {
        Muster__V1__Worker worker;
        Muster__V1__Coordinates coordinates;
    } *all = mu_wire_arena_alloc(arena, sizeof *all);
    if (!all)
        return no_memory(err);
    Muster__V1__Worker *pb = &all->worker;
    muster__v1__worker__init(pb);
    pb->idle = view->idle;
    if (view->has_coords) {
        muster__v1__coordinates__init(&all->coordinates);
        all->coordinates.dp = view->coords.d;
        all->coordinates.tp = view->coords.t;
        all->coordinates.pp = view->coords.p;
        pb->coordinates = &all->coordinates;
    }
    if (mu_wire_put_string(view->name, MU_WIRE_NAME, "Worker.name", sizeof view->name, &pb->name, err) != MU_OK ||
        mu_wire_put_string(view->job, MU_WIRE_NAME_EMPTY, "Worker.job", sizeof view->job, &pb->job, err) != MU_OK)
        return NULL;
    pb->host = mu_wire_put_text(arena, view->host, sizeof view->host);
    pb->address = mu_wire_put_text(arena, view->address, sizeof view->address);
    pb->backend = mu_wire_put_text(arena, view->backend, sizeof view->backend);
    pb->incarnation = mu_wire_put_id(arena, view->incarnation);
    pb->state = (Muster__V1__WorkerState)((int)view->state + 1);
    pb->phase = (Muster__V1__WorkerPhase)((int)view->phase + 1);
    pb->generation = view->generation;
    pb->rank = view->rank == UINT32_MAX ? 0 : view->rank;
    pb->leaves = view->leaf_count;
    pb->step = view->step;
    pb->age_us = view->age_us;
    pb->pid = view->pid;
    pb->threads = view->threads;
    pb->memory_bytes = view->memory_bytes;
    pb->seconds_per_leaf = view->seconds_per_leaf;
    pb->revision = view->revision;
    pb->reason = mu_wire_put_text(arena, view->reason, sizeof view->reason);
    return pb;
}

/* Who has which of the links' ranks in the generation that `view` is of. */
static void name_ranks(const struct mu_coord *coord, const struct mu_worker_view *view, struct mu_worker_view *other,
                       const Muster__V1__VitalSigns *pb)
{
    for (uint32_t slot = 0; pb->n_links > 0 && slot < mu_coord_worker_slots(coord); slot++) {
        if (!mu_coord_worker_view(coord, slot, other) || other->generation != view->generation ||
            strcmp(other->job, view->job) != 0)
            continue;
        for (size_t i = 0; i < pb->n_links; i++) {
            if (pb->links[i]->rank == other->rank)
                memcpy(pb->links[i]->worker, other->name, sizeof other->name);
        }
    }
}

enum mu_status mu_view_vitals(struct mu_wire_arena *arena, const struct mu_coord *coord, struct mu_sessions *sessions,
                              const struct mu_worker_view *view, Muster__V1__Worker *worker, struct mu_error *err)
{
    const struct mu_vitals_heard *heard = mu_vitals_of(sessions, view->session);
    if (!heard)
        return MU_OK;
    struct {
        Muster__V1__VitalSigns signs;
        Muster__V1__LinkSigns links[MU_VITAL_LINKS_MAX];
        Muster__V1__LinkSigns *pointers[MU_VITAL_LINKS_MAX];
        char names[MU_VITAL_LINKS_MAX][MU_WORKER_NAME_SIZE];
        struct mu_worker_view other;
    } *pb = mu_wire_arena_alloc(arena, sizeof *pb);
    if (!pb) {
        no_memory(err);
        return MU_ERR_NO_MEMORY;
    }
    muster__v1__vital_signs__init(&pb->signs);
    memcpy(&pb->signs.cpus, heard->signs, sizeof heard->signs);
    pb->signs.age_us = mu_clock_mono_us() - heard->at_us;
    pb->signs.n_links = heard->newest.link_count;
    pb->signs.links = pb->pointers;
    for (uint32_t i = 0; i < heard->newest.link_count; i++) {
        const struct mu_vital_link *link = &heard->newest.links[i];
        pb->pointers[i] = &pb->links[i];
        pb->names[i][0] = 0;
        muster__v1__link_signs__init(&pb->links[i]);
        pb->links[i].rank = link->rank;
        pb->links[i].worker = pb->names[i];
        pb->links[i].received_bytes_per_second = (double)link->received_bytes_per_second;
        pb->links[i].sent_bytes_per_second = (double)link->sent_bytes_per_second;
        pb->links[i].wait_ratio = (double)link->wait_ppm * 1e-6;
        pb->links[i].latency_seconds = (double)link->latency_us * 1e-6;
        pb->links[i].retransmits = link->retransmits;
    }
    name_ranks(coord, view, &pb->other, &pb->signs);
    worker->vitals = &pb->signs;
    return heard->newest.gpu ? mu_wire_gpu_to_pb(arena, heard->newest.gpu, &pb->signs.gpu, err) : MU_OK;
}

Muster__V1__Checkpoint *mu_view_checkpoint(struct mu_wire_arena *arena, const struct mu_checkpoint_record *record,
                                           struct mu_error *err)
{
    Muster__V1__Checkpoint *pb = mu_wire_arena_alloc(arena, sizeof *pb);
    if (!pb)
        return no_memory(err);
    muster__v1__checkpoint__init(pb);
    if (mu_wire_put_string(record->job, MU_WIRE_NAME, "Checkpoint.job", sizeof record->job, &pb->job, err) != MU_OK)
        return NULL;
    pb->number = record->number;
    pb->step = record->step;
    pb->generation = record->generation;
    pb->state = (Muster__V1__CheckpointState)((int)record->state + 1);
    pb->dir = mu_wire_put_text(arena, record->dir, sizeof record->dir);
    pb->size_bytes = record->size_bytes;
    pb->pieces = record->piece_count;
    pb->ordered_wall_us = record->ordered_wall_us;
    pb->committed_wall_us = record->wall_us;
    pb->text = mu_wire_put_text(arena, record->text, sizeof record->text);
    pb->nonce = mu_wire_put_id(arena, record->nonce);
    pb->verified = record->verified;
    pb->borrowed_from = mu_wire_put_text(arena, record->owner, sizeof record->owner);
    return pb;
}

Muster__V1__Estimate *mu_view_estimate(struct mu_wire_arena *arena, const struct mu_job_spec *spec,
                                       struct mu_error *err)
{
    struct {
        Muster__V1__Estimate pb;
        uint32_t tp_degrees[8];
        char slices_line[MU_ESTIMATE_LINE_SIZE], layout_line[MU_ESTIMATE_LINE_SIZE];
    } *all = mu_wire_arena_alloc(arena, sizeof *all);
    struct mu_estimate estimate;
    if (!all)
        return no_memory(err);
    Muster__V1__Estimate *pb = &all->pb;
    muster__v1__estimate__init(pb);
    mu_estimate_of(spec, &estimate);
    pb->slices_percent = estimate.slices_percent;
    pb->tp_degrees = all->tp_degrees;
    for (uint32_t tp = spec->parallel.tp ? spec->parallel.tp : 1; tp <= estimate.tp_max; tp *= 2)
        pb->tp_degrees[pb->n_tp_degrees++] = tp;
    pb->vocab_rows = estimate.vocab_rows;
    pb->vocab_rows_last = estimate.vocab_rows_last;
    pb->workers = estimate.workers;
    pb->seconds_per_step = estimate.step_s;
    pb->memory_bytes = estimate.memory_bytes;
    pb->recompute_percent = estimate.recompute_percent;
    pb->redundancy_percent = estimate.redundancy_percent;
    pb->sharding_saved_bytes = estimate.sharding_saved_bytes;
    mu_estimate_slices_line(&estimate, all->slices_line);
    mu_estimate_layout_line(&estimate, all->layout_line);
    pb->slices_line = all->slices_line;
    pb->layout_line = all->layout_line;
    if (estimate.fits && mu_wire_layout_to_pb(arena, &estimate.layout, "Estimate.layout", &pb->layout, err) != MU_OK)
        return NULL;
    return pb;
}

Muster__V1__Timing *mu_view_timing(struct mu_wire_arena *arena, const struct mu_timing_view *view, struct mu_error *err)
{
    Muster__V1__Timing *pb = mu_wire_arena_alloc(arena, sizeof *pb);
    if (!pb)
        return no_memory(err);
    muster__v1__timing__init(pb);
    const struct mu_step_report *report = &view->report;
    pb->worker = mu_wire_put_text(arena, view->worker, sizeof view->worker);
    pb->generation = view->generation;
    pb->rank = view->rank;
    pb->steps_done = report->steps_done;
    pb->step_count = report->step_count;
    pb->leaf_count = report->leaf_count;
    pb->tokens = report->tokens;
    pb->total_us = report->total_us;
    pb->data_us = report->data_us;
    pb->forward_us = report->forward_us;
    pb->backward_us = report->backward_us;
    pb->communicate_us = report->communicate_us;
    pb->wait_us = report->wait_us;
    pb->optimizer_us = report->optimizer_us;
    pb->snapshot_us = report->snapshot_us;
    pb->loss = report->result.loss;
    return pb;
}

static double put_time(const uint64_t us[MU_TIME_CLASS_COUNT], Muster__V1__TimeByClass *pb, double *ret_lost_s)
{
    double total_s = 0, *seconds = &pb->useful;
    *ret_lost_s = 0;
    for (int k = 0; k < MU_TIME_CLASS_COUNT; k++) {
        seconds[k] = (double)us[k] * 1e-6;
        total_s += seconds[k];
        *ret_lost_s += mu_time_class_is_lost((enum mu_time_class)k) ? seconds[k] : 0;
    }
    return total_s;
}

static Muster__V1__Account *view_account(struct mu_wire_arena *arena, const struct mu_account_record *record,
                                         struct mu_error *err)
{
    struct {
        Muster__V1__Account account;
        Muster__V1__TimeByClass seconds;
        char worker[MU_WORKER_NAME_SIZE];
    } *pb = mu_wire_arena_alloc(arena, sizeof *pb);
    if (!pb)
        return no_memory(err);
    muster__v1__account__init(&pb->account);
    muster__v1__time_by_class__init(&pb->seconds);
    memcpy(pb->worker, record->worker, sizeof pb->worker);
    pb->account.worker = pb->worker;
    pb->account.now = record->open ? (Muster__V1__TimeClass)((int)record->now + 1) : 0;
    pb->account.began_wall_us = record->began_wall_us;
    pb->account.seconds = &pb->seconds;
    pb->account.total_seconds = put_time(record->us, &pb->seconds, &pb->account.lost_seconds);
    return &pb->account;
}

static Muster__V1__StepTerms put_terms(const double seconds[MU_TERM_COUNT])
{
    Muster__V1__StepTerms pb = MUSTER__V1__STEP_TERMS__INIT;
    for (int i = 0; i < MU_TERM_COUNT; i++)
        (&pb.compute)[i] = seconds[i];
    return pb;
}

/* *ret_pb stays NULL where there is none. */
static enum mu_status view_prediction(struct mu_wire_arena *arena, const struct mu_coord *coord,
                                      const struct mu_job_view *job, Muster__V1__Prediction **ret_pb,
                                      struct mu_error *err)
{
    struct {
        Muster__V1__Prediction prediction;
        Muster__V1__StepTerms predicted, measured;
        struct mu_worker_view worker;
    } * pb;
    struct mu_prediction view;
    if (!mu_coord_prediction_view(coord, job->record.spec.name, &view))
        return MU_OK;
    pb = mu_wire_arena_alloc(arena, sizeof *pb);
    if (!pb)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the answer");
    muster__v1__prediction__init(&pb->prediction);
    pb->predicted = put_terms(view.predicted_s);
    pb->measured = put_terms(view.measured_s);
    pb->prediction.generation = view.generation;
    pb->prediction.rank = view.rank;
    if (mu_coord_worker_view(coord, view.slot, &pb->worker) && pb->worker.rank == view.rank)
        pb->prediction.worker = pb->worker.name;
    pb->prediction.micro = job->record.spec.batch.micro;
    pb->prediction.recompute = (Muster__V1__Recompute)job->record.spec.parallel.recompute;
    pb->prediction.calibrated = view.calibrated;
    pb->prediction.off = view.off;
    pb->prediction.steps = view.steps;
    pb->prediction.predicted = &pb->predicted;
    pb->prediction.measured = view.steps ? &pb->measured : NULL;
    *ret_pb = &pb->prediction;
    return mu_wire_layout_to_pb(arena, &job->layout, "Prediction.layout", &pb->prediction.layout, err);
}

Muster__V1__GetGoodputResponse *mu_view_goodput(struct mu_wire_arena *arena, const struct mu_coord *coord,
                                                const struct mu_job_view *job, uint64_t now_us, uint32_t limit,
                                                uint64_t *slot, struct mu_error *err)
{
    struct {
        Muster__V1__GetGoodputResponse response;
        Muster__V1__TimeByClass total;
    } *pb = mu_wire_arena_alloc(arena, sizeof *pb);
    Muster__V1__Account **accounts = mu_wire_arena_alloc(arena, sizeof(Muster__V1__Account *) * limit);
    uint64_t total[MU_TIME_CLASS_COUNT] = {0}, first = *slot;
    if (!pb || !accounts)
        return no_memory(err);
    muster__v1__get_goodput_response__init(&pb->response);
    muster__v1__time_by_class__init(&pb->total);
    pb->response.total = &pb->total;
    pb->response.accounts = accounts;
    *slot = 0;
    for (uint32_t i = 0; i < mu_coord_account_slots(coord); i++) {
        struct mu_account_record record;
        if (!mu_coord_account_view(coord, i, now_us, &record) || strcmp(record.job, job->record.spec.name) != 0)
            continue;
        for (int k = 0; k < MU_TIME_CLASS_COUNT; k++)
            total[k] += record.us[k];
        if (i < first || *slot)
            continue;
        if (pb->response.n_accounts == limit)
            *slot = i;
        else if (!(accounts[pb->response.n_accounts++] = view_account(arena, &record, err)))
            return NULL;
    }
    if (view_prediction(arena, coord, job, &pb->response.prediction, err) != MU_OK)
        return NULL;
    pb->response.total_seconds = put_time(total, &pb->total, &pb->response.lost_seconds);
    return &pb->response;
}
