#include "coordinator/records.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/record_account.h"
#include "coordinator/record_checkpoint.h"

const char mu_record_prefixes[MU_RECORD_KIND_COUNT][3] = {
    [MU_RECORD_JOB] = "j/",   [MU_RECORD_GENERATION] = "g/", [MU_RECORD_CHECKPOINT] = "c/", [MU_RECORD_WORKER] = "w/",
    [MU_RECORD_TALLY] = "t/", [MU_RECORD_DEATH] = "d/",      [MU_RECORD_REQUEST] = "r/",    [MU_RECORD_ACCOUNT] = "a/",
    [MU_RECORD_EVENT] = "e/", [MU_RECORD_NODE] = "n/",
};

_Static_assert(MUSTER__V1__JOB_STATE__JOB_STATE_CANCELLED == (int)MU_JOB_STATE_COUNT, "job state");
_Static_assert(MUSTER__V1__CHECKPOINT_STATE__CHECKPOINT_STATE_VOID == (int)MU_CKPT_STATE_COUNT, "checkpoint state");
_Static_assert(MUSTER__V1__NODE_ORDER__NODE_ORDER_RESUME == (int)MU_NODE_RESUME + 1, "order");
_Static_assert(MUSTER__V1__EVENT_SEVERITY__EVENT_SEVERITY_ERROR == (int)MU_EVENT_ERROR + 1, "severity");

/* ---- keys ---- */

static size_t put_number(uint8_t *out, uint64_t number)
{
    for (int i = 0; i < 8; i++)
        out[i] = (uint8_t)(number >> (56 - 8 * i));
    return 8;
}

static size_t put_name(uint8_t *out, const char *name, size_t capacity)
{
    size_t length = strnlen(name, capacity - 1);
    memcpy(out, name, length);
    return length;
}

size_t mu_record_key(const struct mu_record *record, uint8_t out[MU_RECORD_KEY_SIZE])
{
    MU_ASSERT((unsigned)record->kind < MU_RECORD_KIND_COUNT);
    memcpy(out, mu_record_prefixes[record->kind], 2);
    size_t size = 2;
    switch (record->kind) {
    case MU_RECORD_JOB:
        size += put_name(out + size, record->job->spec.name, MU_JOB_NAME_SIZE);
        break;
    case MU_RECORD_GENERATION:
        size += put_name(out + size, record->generation->job, MU_JOB_NAME_SIZE);
        break;
    case MU_RECORD_CHECKPOINT:
        size += put_name(out + size, record->checkpoint->job, MU_JOB_NAME_SIZE);
        out[size++] = '/';
        size += put_number(out + size, record->checkpoint->number);
        break;
    case MU_RECORD_WORKER:
        size += put_name(out + size, record->worker->name, MU_WORKER_NAME_SIZE);
        break;
    case MU_RECORD_TALLY:
        size += put_name(out + size, record->tally->job, MU_JOB_NAME_SIZE);
        break;
    case MU_RECORD_DEATH:
        size += put_number(out + size, record->death->number % MU_DEATHS_KEPT);
        break;
    case MU_RECORD_NODE:
        size += put_name(out + size, record->node->name, MU_WORKER_NAME_SIZE);
        break;
    case MU_RECORD_REQUEST:
        size += put_number(out + size, record->request->number % MU_REQUESTS_KEPT);
        break;
    case MU_RECORD_ACCOUNT:
        size += put_name(out + size, record->account->job, MU_JOB_NAME_SIZE);
        out[size++] = '/';
        size += put_name(out + size, record->account->worker, MU_WORKER_NAME_SIZE);
        break;
    case MU_RECORD_EVENT:
        size += put_number(out + size, record->event->number);
        break;
    case MU_RECORD_KIND_COUNT:
        break;
    }
    return size;
}

/* A key as text, for errors: numbers in hexadecimal. */
static const char *show_key(const uint8_t *key, size_t key_bytes, char out[2 * MU_RECORD_KEY_SIZE])
{
    size_t used = 0;
    for (size_t i = 0; i < key_bytes && used + 4 < 2 * MU_RECORD_KEY_SIZE; i++) {
        if (key[i] > 0x20 && key[i] < 0x7f)
            out[used++] = (char)key[i];
        else
            used += (size_t)snprintf(out + used, 2 * MU_RECORD_KEY_SIZE - used, "%02x", key[i]);
    }
    out[used] = 0;
    return out;
}

/* ---- encode ---- */

static enum mu_status no_memory(struct mu_error *err)
{
    return mu_fail(err, MU_ERR_NO_MEMORY, "StoredRecord: no memory");
}

Muster__V1__Origin *mu_origin_to_pb(struct mu_wire_arena *arena, const struct mu_job_record *job,
                                    Muster__V1__Origin *pb)
{
    if (!job->origin.job[0])
        return NULL;
    muster__v1__origin__init(pb);
    pb->job = mu_wire_put_text(arena, job->origin.job, sizeof job->origin.job);
    pb->uid = mu_wire_put_id(arena, job->origin.uid);
    pb->checkpoint = job->origin.checkpoint;
    pb->step = job->origin.step;
    if (job->origin.rebased) {
        pb->rebased_from = mu_wire_put_hash(arena, job->origin.rebased_from);
        pb->rebased_by = mu_wire_put_text(arena, job->origin.rebased_by, sizeof job->origin.rebased_by);
        if (job->identity_set)
            pb->rebased_to = mu_wire_put_hash(arena, job->numeric_identity);
    }
    return pb;
}

static enum mu_status get_origin(const Muster__V1__Origin *pb, struct mu_job_record *out, struct mu_error *err)
{
    if (!pb)
        return MU_OK;
    out->origin.checkpoint = pb->checkpoint;
    out->origin.step = pb->step;
    enum mu_status status =
        mu_wire_get_string(pb->job, MU_WIRE_NAME, "Origin.job", out->origin.job, sizeof out->origin.job, err);
    if (status == MU_OK)
        status = mu_wire_get_id(pb->uid, "Origin.uid", &out->origin.uid, err);
    out->origin.rebased = pb->rebased_from.len > 0;
    if (status || !out->origin.rebased)
        return status;
    status = mu_wire_get_hash(pb->rebased_from, "Origin.rebased_from", &out->origin.rebased_from, err);
    return status ? status
                  : mu_wire_get_string(pb->rebased_by, MU_WIRE_TEXT, "Origin.rebased_by", out->origin.rebased_by,
                                       sizeof out->origin.rebased_by, err);
}

static enum mu_status put_job(struct mu_wire_arena *arena, const struct mu_job_record *job,
                              Muster__V1__JobRecord **ret_pb, struct mu_error *err)
{
    struct {
        Muster__V1__JobRecord job;
        Muster__V1__CommandRecord command;
        Muster__V1__WorkerPolicy workers;
        Muster__V1__Origin origin;
    } *pb = mu_wire_arena_alloc(arena, sizeof *pb);
    if (!pb)
        return no_memory(err);
    muster__v1__job_record__init(&pb->job);
    muster__v1__command_record__init(&pb->command);
    muster__v1__worker_policy__init(&pb->workers);
    pb->job.uid = mu_wire_put_id(arena, job->uid);
    pb->job.revision = job->revision;
    pb->job.submitted_workers = &pb->workers;
    pb->workers.min = job->submitted_workers.min;
    pb->workers.max = job->submitted_workers.max;
    pb->workers.spares = job->submitted_workers.spares;
    pb->job.state = (Muster__V1__JobState)((int)job->state + 1);
    pb->job.generation = job->generation;
    pb->job.next_checkpoint = job->next_checkpoint;
    pb->job.checkpoint_seen = job->checkpoint_seen;
    pb->job.preflight = job->preflight;
    pb->job.command = &pb->command;
    pb->command.number = job->command.number;
    pb->command.kind = (Muster__V1__CommandKind)job->command.kind;
    pb->command.not_before_step = job->command.not_before_step;
    pb->command.open = job->command.open;
    pb->job.steps_done = job->steps_done;
    pb->job.created_wall_us = job->created_wall_us;
    pb->job.ended_wall_us = job->ended_wall_us;
    pb->job.weights_sha256 = mu_wire_put_bytes32(job->weights_sha256);
    pb->job.identity_set = job->identity_set;
    pb->job.numeric_identity = mu_wire_put_hash(arena, job->numeric_identity);
    pb->job.data_hash = mu_wire_put_hash(arena, job->data_hash);
    pb->job.embedding_cost = job->costs.embedding;
    pb->job.head_cost = job->costs.head;
    pb->job.text = mu_wire_put_text(arena, job->text, sizeof job->text);
    pb->job.origin = mu_origin_to_pb(arena, job, &pb->origin);
    *ret_pb = &pb->job;
    enum mu_status status =
        mu_wire_identity_to_pb(arena, &job->identity_parts, &pb->job.n_identity_parts, &pb->job.identity_parts, err);
    if (status)
        return status;
    return mu_wire_spec_to_pb(arena, &job->spec, &pb->job.spec, err);
}

/* dp = 0: there is none. */
static enum mu_status put_layout(struct mu_wire_arena *arena, const struct mu_layout *layout, const char *field,
                                 Muster__V1__Layout **ret_pb, struct mu_error *err)
{
    return layout->dp ? mu_wire_layout_to_pb(arena, layout, field, ret_pb, err) : MU_OK;
}

static enum mu_status get_layout(const Muster__V1__Layout *pb, const char *field, struct mu_layout *out,
                                 struct mu_error *err)
{
    return pb ? mu_wire_layout_from_pb(pb, field, out, err) : MU_OK;
}

static enum mu_status put_members(struct mu_wire_arena *arena, const struct mu_generation_record *generation,
                                  Muster__V1__GenerationRecord *pb, struct mu_error *err)
{
    Muster__V1__MemberRecord *members = mu_wire_arena_alloc(arena, sizeof *members * generation->world);
    Muster__V1__MemberRecord **pointers = mu_wire_arena_alloc(arena, sizeof *pointers * generation->world);
    if (!members || !pointers)
        return no_memory(err);
    for (uint32_t rank = 0; rank < generation->world; rank++) {
        const struct mu_member_record *member = &generation->members[rank];
        muster__v1__member_record__init(&members[rank]);
        members[rank].incarnation = mu_wire_put_id(arena, member->incarnation);
        members[rank].leaf_count = member->leaf_count;
        members[rank].layer_ns = member->layer_ns;
        enum mu_status status = MU_OK;
        if ((status = mu_wire_put_string(member->name, MU_WIRE_NAME, "MemberRecord.name", sizeof member->name,
                                         &members[rank].name, err)) ||
            (status = mu_wire_put_string(member->address, MU_WIRE_TEXT, "MemberRecord.address", sizeof member->address,
                                         &members[rank].address, err)))
            return status;
        pointers[rank] = &members[rank];
    }
    pb->n_members = generation->world;
    pb->members = pointers;
    return MU_OK;
}

static enum mu_status put_generation(struct mu_wire_arena *arena, const struct mu_generation_record *generation,
                                     Muster__V1__GenerationRecord **ret_pb, struct mu_error *err)
{
    Muster__V1__GenerationRecord *pb = mu_wire_arena_alloc(arena, sizeof *pb);
    if (!pb)
        return no_memory(err);
    muster__v1__generation_record__init(pb);
    pb->job_uid = mu_wire_put_id(arena, generation->job_uid);
    pb->generation = generation->generation;
    pb->go = generation->go;
    pb->equal_leaves = generation->equal_leaves;
    pb->start_step = generation->start_step;
    pb->command_base = generation->command_base;
    pb->secret = mu_wire_put_bytes32(generation->secret);
    *ret_pb = pb;
    enum mu_status status = MU_OK;
    if ((status = mu_wire_put_string(generation->job, MU_WIRE_NAME, "GenerationRecord.job", sizeof generation->job,
                                     &pb->job, err)) ||
        (status = put_layout(arena, &generation->layout, "GenerationRecord.layout", &pb->layout, err)))
        return status;
    return put_members(arena, generation, pb, err);
}

static enum mu_status put_worker(struct mu_wire_arena *arena, const struct mu_worker_record *worker,
                                 Muster__V1__WorkerRecord **ret_pb, struct mu_error *err)
{
    Muster__V1__WorkerRecord *pb = mu_wire_arena_alloc(arena, sizeof *pb);
    if (!pb)
        return no_memory(err);
    muster__v1__worker_record__init(pb);
    pb->quarantined = worker->quarantined;
    pb->draining = worker->draining;
    pb->reason = mu_wire_put_text(arena, worker->reason, sizeof worker->reason);
    pb->host = mu_wire_put_text(arena, worker->host, sizeof worker->host);
    pb->revision = worker->revision;
    *ret_pb = pb;
    return mu_wire_put_string(worker->name, MU_WIRE_NAME, "WorkerRecord.name", sizeof worker->name, &pb->name, err);
}

static enum mu_status put_tally(struct mu_wire_arena *arena, const struct mu_tally_record *tally,
                                Muster__V1__TallyRecord **ret_pb, struct mu_error *err)
{
    struct {
        Muster__V1__TallyRecord tally;
        Muster__V1__IntervalTally interval;
        ProtobufCBinaryData hung[MU_HUNG_KEPT], demoted[MU_DEMOTED_KEPT];
    } *pb = mu_wire_arena_alloc(arena, sizeof *pb);
    if (!pb)
        return no_memory(err);
    muster__v1__tally_record__init(&pb->tally);
    muster__v1__interval_tally__init(&pb->interval);
    pb->tally.job_uid = mu_wire_put_id(arena, tally->job_uid);
    pb->tally.workers_lost = tally->workers_lost;
    pb->tally.generations = tally->generations;
    pb->tally.replayed_steps = tally->replayed_steps;
    pb->tally.replay_until = tally->replay_until;
    pb->tally.suspect = tally->suspect;
    pb->tally.suspect_step = tally->suspect_step;
    pb->tally.unfinite_reports = tally->unfinite_reports;
    pb->tally.judged_step = tally->judged_step;
    pb->tally.condemned = tally->condemned;
    pb->tally.interval = &pb->interval;
    pb->interval.steps = tally->interval.steps;
    pb->interval.told_steps = tally->interval.told_steps;
    pb->interval.base_step = tally->interval.base;
    pb->interval.worker_us = tally->interval.worker_us;
    pb->interval.cost_s = tally->interval.cost_s;
    pb->interval.write_s = tally->interval.write_s;
    pb->interval.failure_s = tally->interval.failure_s;
    pb->interval.stall_s = tally->interval.stall_s;
    pb->interval.slow_s = tally->interval.slow_s;
    pb->interval.seconds_per_step = tally->interval.step_s;
    pb->interval.reason = mu_wire_put_text(arena, tally->interval.reason, sizeof tally->interval.reason);
    pb->tally.prediction_told = tally->prediction_told;
    pb->tally.hung_count = tally->hung_count;
    pb->tally.n_hung = tally->hung_count < MU_HUNG_KEPT ? tally->hung_count : MU_HUNG_KEPT;
    pb->tally.hung = pb->hung;
    for (size_t i = 0; i < pb->tally.n_hung; i++)
        pb->hung[i] = mu_wire_put_id(arena, tally->hung[i]);
    pb->tally.n_demoted = tally->demoted_count;
    pb->tally.demoted = pb->demoted;
    for (size_t i = 0; i < pb->tally.n_demoted; i++)
        pb->demoted[i] = mu_wire_put_id(arena, tally->demoted[i]);
    *ret_pb = &pb->tally;
    return mu_wire_put_string(tally->job, MU_WIRE_NAME, "TallyRecord.job", sizeof tally->job, &pb->tally.job, err);
}

static enum mu_status put_death(struct mu_wire_arena *arena, const struct mu_death_record *death,
                                Muster__V1__DeathRecord **ret_pb, struct mu_error *err)
{
    Muster__V1__DeathRecord *pb = mu_wire_arena_alloc(arena, sizeof *pb);
    if (!pb)
        return no_memory(err);
    muster__v1__death_record__init(pb);
    pb->number = death->number;
    pb->name_hash = death->name_hash;
    pb->wall_us = death->wall_us;
    pb->incarnation = mu_wire_put_id(arena, death->incarnation);
    *ret_pb = pb;
    return MU_OK;
}

static enum mu_status put_request(struct mu_wire_arena *arena, const struct mu_request_record *request,
                                  Muster__V1__RequestRecord **ret_pb, struct mu_error *err)
{
    Muster__V1__RequestRecord *pb = mu_wire_arena_alloc(arena, sizeof *pb);
    if (!pb)
        return no_memory(err);
    muster__v1__request_record__init(pb);
    pb->number = request->number;
    pb->id = mu_wire_put_id(arena, request->id);
    pb->body = mu_wire_put_hash(arena, request->body);
    pb->job_uid = mu_wire_put_id(arena, request->job_uid);
    pb->checkpoint = request->checkpoint;
    pb->existed = request->existed;
    *ret_pb = pb;
    return MU_OK;
}

enum mu_status mu_event_to_pb(struct mu_wire_arena *arena, const struct mu_event_record *event, Muster__V1__Event *pb,
                              struct mu_error *err)
{
    muster__v1__event__init(pb);
    pb->number = event->number;
    pb->wall_us = event->wall_us;
    pb->severity = (Muster__V1__EventSeverity)((int)event->severity + 1);
    pb->generation = event->generation;
    pb->step = event->step;
    pb->text = mu_wire_put_text(arena, event->text, sizeof event->text);
    if (!pb->text)
        return no_memory(err);
    enum mu_status status = MU_OK;
    if ((status = mu_wire_put_string(event->kind, MU_WIRE_WORD, "Event.kind", sizeof event->kind, &pb->kind, err)) ||
        (status = mu_wire_put_string(event->job, MU_WIRE_NAME_EMPTY, "Event.job", sizeof event->job, &pb->job, err)))
        return status;
    return mu_wire_put_string(event->worker, MU_WIRE_NAME_EMPTY, "Event.worker", sizeof event->worker, &pb->worker,
                              err);
}

static enum mu_status put_node(struct mu_wire_arena *arena, const struct mu_node_record *node,
                               Muster__V1__NodeRecord **ret_pb, struct mu_error *err)
{
    Muster__V1__NodeRecord *pb = mu_wire_arena_alloc(arena, sizeof *pb);
    if (!pb)
        return no_memory(err);
    muster__v1__node_record__init(pb);
    pb->order = (Muster__V1__NodeOrder)((int)node->order + 1);
    pb->since_wall_us = node->since_wall_us;
    pb->deadline_wall_us = node->deadline_wall_us;
    pb->revision = node->revision;
    pb->reason = mu_wire_put_text(arena, node->reason, sizeof node->reason);
    pb->by = mu_wire_put_text(arena, node->by, sizeof node->by);
    *ret_pb = pb;
    return mu_wire_put_string(node->name, MU_WIRE_TEXT, "NodeRecord.name", sizeof node->name, &pb->name, err);
}

static enum mu_status put_record(struct mu_wire_arena *arena, const struct mu_record *record,
                                 Muster__V1__StoredRecord *pb, struct mu_error *err)
{
    switch (record->kind) {
    case MU_RECORD_JOB:
        pb->kind_case = MUSTER__V1__STORED_RECORD__KIND_JOB;
        return put_job(arena, record->job, &pb->job, err);
    case MU_RECORD_GENERATION:
        pb->kind_case = MUSTER__V1__STORED_RECORD__KIND_GENERATION;
        return put_generation(arena, record->generation, &pb->generation, err);
    case MU_RECORD_CHECKPOINT:
        pb->kind_case = MUSTER__V1__STORED_RECORD__KIND_CHECKPOINT;
        return mu_checkpoint_record_put(arena, record->checkpoint, &pb->checkpoint, err);
    case MU_RECORD_WORKER:
        pb->kind_case = MUSTER__V1__STORED_RECORD__KIND_WORKER;
        return put_worker(arena, record->worker, &pb->worker, err);
    case MU_RECORD_TALLY:
        pb->kind_case = MUSTER__V1__STORED_RECORD__KIND_TALLY;
        return put_tally(arena, record->tally, &pb->tally, err);
    case MU_RECORD_DEATH:
        pb->kind_case = MUSTER__V1__STORED_RECORD__KIND_DEATH;
        return put_death(arena, record->death, &pb->death, err);
    case MU_RECORD_NODE:
        pb->kind_case = MUSTER__V1__STORED_RECORD__KIND_NODE;
        return put_node(arena, record->node, &pb->node, err);
    case MU_RECORD_REQUEST:
        pb->kind_case = MUSTER__V1__STORED_RECORD__KIND_REQUEST;
        return put_request(arena, record->request, &pb->request, err);
    case MU_RECORD_ACCOUNT:
        pb->kind_case = MUSTER__V1__STORED_RECORD__KIND_ACCOUNT;
        return mu_account_record_put(arena, record->account, &pb->account, err);
    case MU_RECORD_EVENT:
        pb->kind_case = MUSTER__V1__STORED_RECORD__KIND_EVENT;
        pb->event = mu_wire_arena_alloc(arena, sizeof *pb->event);
        return pb->event ? mu_event_to_pb(arena, record->event, pb->event, err) : no_memory(err);
    case MU_RECORD_KIND_COUNT:
        break;
    }
    return mu_fail(err, MU_ERR_INVALID, "StoredRecord.kind: value %d is not allowed", (int)record->kind);
}

enum mu_status mu_record_encode(struct mu_wire_arena *arena, const struct mu_record *record, const void **ret_data,
                                size_t *ret_size_bytes, struct mu_error *err)
{
    Muster__V1__StoredRecord pb = MUSTER__V1__STORED_RECORD__INIT;
    pb.version = MU_RECORD_VERSION;
    enum mu_status status = put_record(arena, record, &pb, err);
    if (status)
        return status;
    return mu_wire_pack(arena, &pb.base, MU_STORE_VALUE_BYTES_MAX, ret_data, ret_size_bytes, err);
}

/* ---- decode ---- */

static enum mu_status get_job(const Muster__V1__JobRecord *pb, struct mu_job_record *out, struct mu_error *err)
{
    int state = 0, command = 0;
    enum mu_status status = MU_OK;
    if ((status = mu_wire_get_id(pb->uid, "JobRecord.uid", &out->uid, err)) ||
        (status = mu_wire_spec_from_pb(pb->spec, &out->spec, err)) ||
        (status = mu_wire_get_enum((int)pb->state, 1, MU_JOB_STATE_COUNT, "JobRecord.state", &state, err)) ||
        (status = mu_wire_get_bytes32(pb->weights_sha256, "JobRecord.weights_sha256", out->weights_sha256, err)) ||
        (status = mu_wire_get_hash(pb->numeric_identity, "JobRecord.numeric_identity", &out->numeric_identity, err)) ||
        (status = mu_wire_get_hash(pb->data_hash, "JobRecord.data_hash", &out->data_hash, err)) ||
        (status = mu_wire_identity_from_pb(pb->n_identity_parts, pb->identity_parts, &out->identity_parts, err)) ||
        (status = mu_wire_get_string(pb->text, MU_WIRE_TEXT, "JobRecord.text", out->text, sizeof out->text, err)) ||
        (status = get_origin(pb->origin, out, err)))
        return status;
    if (pb->command) {
        status = mu_wire_get_enum((int)pb->command->kind, 0, MU_COMMAND_PARK, "CommandRecord.kind", &command, err);
        if (status)
            return status;
        out->command = (struct mu_command_record){.number = pb->command->number,
                                                  .kind = (enum mu_command_kind)command,
                                                  .not_before_step = pb->command->not_before_step,
                                                  .open = pb->command->open};
    }
    out->state = (enum mu_job_state)(state - 1);
    out->revision = pb->revision;
    out->submitted_workers = out->spec.workers; /* recorded before jobs could be scaled */
    if (pb->submitted_workers)
        out->submitted_workers = (struct mu_worker_policy){.min = pb->submitted_workers->min,
                                                           .max = pb->submitted_workers->max,
                                                           .spares = pb->submitted_workers->spares};
    out->generation = pb->generation;
    out->next_checkpoint = pb->next_checkpoint;
    out->checkpoint_seen = pb->checkpoint_seen;
    out->preflight = pb->preflight;
    out->steps_done = pb->steps_done;
    out->created_wall_us = pb->created_wall_us;
    out->ended_wall_us = pb->ended_wall_us;
    out->identity_set = pb->identity_set;
    out->costs = (struct mu_stage_costs){.embedding = pb->embedding_cost, .head = pb->head_cost};
    return MU_OK;
}

static enum mu_status get_members(struct mu_wire_arena *arena, const Muster__V1__GenerationRecord *pb,
                                  struct mu_generation_record *out, struct mu_error *err)
{
    if (pb->n_members == 0 || pb->n_members > MU_WORKERS_MAX)
        return mu_fail(err, MU_ERR_INVALID, "GenerationRecord.members: %zu of them are not allowed: 1 to %d",
                       pb->n_members, MU_WORKERS_MAX);
    struct mu_member_record *members = mu_wire_arena_alloc(arena, sizeof *members * pb->n_members);
    if (!members)
        return no_memory(err);
    enum mu_status status = MU_OK;
    for (size_t rank = 0; rank < pb->n_members && status == MU_OK; rank++) {
        const Muster__V1__MemberRecord *from = pb->members[rank];
        struct mu_member_record *to = &members[rank];
        to->leaf_count = from->leaf_count;
        to->layer_ns = from->layer_ns;
        if ((status =
                 mu_wire_get_string(from->name, MU_WIRE_NAME, "MemberRecord.name", to->name, sizeof to->name, err)) ||
            (status = mu_wire_get_string(from->address, MU_WIRE_TEXT, "MemberRecord.address", to->address,
                                         sizeof to->address, err)) ||
            (status = mu_wire_get_id(from->incarnation, "MemberRecord.incarnation", &to->incarnation, err)))
            break;
    }
    out->members = members;
    out->world = (uint32_t)pb->n_members;
    return status;
}

static enum mu_status get_generation(struct mu_wire_arena *arena, const Muster__V1__GenerationRecord *pb,
                                     struct mu_generation_record *out, struct mu_error *err)
{
    enum mu_status status = MU_OK;
    if ((status = mu_wire_get_id(pb->job_uid, "GenerationRecord.job_uid", &out->job_uid, err)) ||
        (status = mu_wire_get_string(pb->job, MU_WIRE_NAME, "GenerationRecord.job", out->job, sizeof out->job, err)) ||
        (status = mu_wire_get_bytes32(pb->secret, "GenerationRecord.secret", out->secret, err)) ||
        (status = get_layout(pb->layout, "GenerationRecord.layout", &out->layout, err)))
        return status;
    if (out->layout.dp && mu_layout_world(&out->layout) != pb->n_members)
        return mu_fail(err, MU_ERR_INVALID, "GenerationRecord.members: %zu of them are not allowed: %u by its layout",
                       pb->n_members, mu_layout_world(&out->layout));
    out->generation = pb->generation;
    out->go = pb->go;
    out->equal_leaves = pb->equal_leaves;
    out->start_step = pb->start_step;
    out->command_base = pb->command_base;
    return get_members(arena, pb, out, err);
}

static enum mu_status get_worker(const Muster__V1__WorkerRecord *pb, struct mu_worker_record *out, struct mu_error *err)
{
    out->quarantined = pb->quarantined;
    out->draining = pb->draining;
    out->revision = pb->revision;
    enum mu_status status =
        mu_wire_get_string(pb->name, MU_WIRE_NAME, "WorkerRecord.name", out->name, sizeof out->name, err);
    if (status == MU_OK)
        status =
            mu_wire_get_string(pb->reason, MU_WIRE_TEXT, "WorkerRecord.reason", out->reason, sizeof out->reason, err);
    return status ? status
                  : mu_wire_get_string(pb->host, MU_WIRE_TEXT, "WorkerRecord.host", out->host, sizeof out->host, err);
}

static void get_interval(const Muster__V1__IntervalTally *pb, struct mu_tally_record *out)
{
    out->interval.steps = pb->steps;
    out->interval.told_steps = pb->told_steps;
    out->interval.base = pb->base_step;
    out->interval.worker_us = pb->worker_us;
    out->interval.cost_s = pb->cost_s;
    out->interval.write_s = pb->write_s;
    out->interval.failure_s = pb->failure_s;
    out->interval.stall_s = pb->stall_s;
    out->interval.slow_s = pb->slow_s;
    out->interval.step_s = pb->seconds_per_step;
}

static enum mu_status get_tally(const Muster__V1__TallyRecord *pb, struct mu_tally_record *out, struct mu_error *err)
{
    uint32_t hung = pb->hung_count < MU_HUNG_KEPT ? pb->hung_count : MU_HUNG_KEPT;
    if (pb->n_hung != hung)
        return mu_fail(err, MU_ERR_INVALID, "TallyRecord.hung: %zu of them are not allowed: %u by hung_count",
                       pb->n_hung, hung);
    if (pb->n_demoted > MU_DEMOTED_KEPT)
        return mu_fail(err, MU_ERR_INVALID, "TallyRecord.demoted: %zu of them are not allowed: at most %d",
                       pb->n_demoted, MU_DEMOTED_KEPT);
    enum mu_status status = MU_OK;
    if ((status = mu_wire_get_id(pb->job_uid, "TallyRecord.job_uid", &out->job_uid, err)) ||
        (status = mu_wire_get_string(pb->job, MU_WIRE_NAME, "TallyRecord.job", out->job, sizeof out->job, err)))
        return status;
    if (pb->interval) {
        get_interval(pb->interval, out);
        status = mu_wire_get_string(pb->interval->reason, MU_WIRE_TEXT, "IntervalTally.reason", out->interval.reason,
                                    sizeof out->interval.reason, err);
    }
    out->workers_lost = pb->workers_lost;
    out->generations = pb->generations;
    out->replayed_steps = pb->replayed_steps;
    out->replay_until = pb->replay_until;
    out->suspect = pb->suspect;
    out->suspect_step = pb->suspect_step;
    out->unfinite_reports = pb->unfinite_reports;
    out->prediction_told = pb->prediction_told;
    out->judged_step = pb->judged_step;
    out->condemned = pb->condemned;
    out->hung_count = pb->hung_count;
    for (size_t i = 0; i < hung && status == MU_OK; i++)
        status = mu_wire_get_id(pb->hung[i], "TallyRecord.hung", &out->hung[i], err);
    out->demoted_count = (uint32_t)pb->n_demoted;
    for (size_t i = 0; i < pb->n_demoted && status == MU_OK; i++)
        status = mu_wire_get_id(pb->demoted[i], "TallyRecord.demoted", &out->demoted[i], err);
    return status;
}

static enum mu_status get_request(const Muster__V1__RequestRecord *pb, struct mu_request_record *out,
                                  struct mu_error *err)
{
    out->number = pb->number;
    out->checkpoint = pb->checkpoint;
    out->existed = pb->existed;
    enum mu_status status = MU_OK;
    if ((status = mu_wire_get_id(pb->id, "RequestRecord.id", &out->id, err)) ||
        (status = mu_wire_get_hash(pb->body, "RequestRecord.body", &out->body, err)))
        return status;
    return mu_wire_get_id(pb->job_uid, "RequestRecord.job_uid", &out->job_uid, err);
}

static enum mu_status get_event(const Muster__V1__Event *pb, struct mu_event_record *out, struct mu_error *err)
{
    int severity = 0;
    enum mu_status status = MU_OK;
    if ((status = mu_wire_get_enum((int)pb->severity, 1, MU_EVENT_ERROR + 1, "Event.severity", &severity, err)) ||
        (status = mu_wire_get_string(pb->kind, MU_WIRE_WORD, "Event.kind", out->kind, sizeof out->kind, err)) ||
        (status = mu_wire_get_string(pb->job, MU_WIRE_NAME_EMPTY, "Event.job", out->job, sizeof out->job, err)) ||
        (status = mu_wire_get_string(pb->worker, MU_WIRE_NAME_EMPTY, "Event.worker", out->worker, sizeof out->worker,
                                     err)) ||
        (status = mu_wire_get_string(pb->text, MU_WIRE_TEXT, "Event.text", out->text, sizeof out->text, err)))
        return status;
    out->number = pb->number;
    out->wall_us = pb->wall_us;
    out->severity = (enum mu_event_severity)(severity - 1);
    out->generation = pb->generation;
    out->step = pb->step;
    return MU_OK;
}

static enum mu_status get_node(const Muster__V1__NodeRecord *pb, struct mu_node_record *out, struct mu_error *err)
{
    int order = 0;
    enum mu_status status;
    if ((status = mu_wire_get_enum((int)pb->order, 1, MU_NODE_DRAIN + 1, "NodeRecord.order", &order, err)) ||
        (status = mu_wire_get_string(pb->name, MU_WIRE_TEXT, "NodeRecord.name", out->name, sizeof out->name, err)) ||
        (status =
             mu_wire_get_string(pb->reason, MU_WIRE_TEXT, "NodeRecord.reason", out->reason, sizeof out->reason, err)))
        return status;
    out->order = (enum mu_node_order)(order - 1);
    out->since_wall_us = pb->since_wall_us;
    out->deadline_wall_us = pb->deadline_wall_us;
    out->revision = pb->revision;
    return mu_wire_get_string(pb->by, MU_WIRE_TEXT, "NodeRecord.by", out->by, sizeof out->by, err);
}

union any_record {
    struct mu_job_record job;
    struct mu_generation_record generation;
    struct mu_checkpoint_record checkpoint;
    struct mu_worker_record worker;
    struct mu_tally_record tally;
    struct mu_death_record death;
    struct mu_node_record node;
    struct mu_request_record request;
    struct mu_account_record account;
    struct mu_event_record event;
};

static enum mu_status get_record(struct mu_wire_arena *arena, const Muster__V1__StoredRecord *pb, struct mu_record *out,
                                 struct mu_error *err)
{
    union any_record *any = mu_wire_arena_alloc(arena, sizeof *any);
    if (!any)
        return no_memory(err);
    out->job = &any->job; /* all members of both unions start at the same place */
    switch (pb->kind_case) {
    case MUSTER__V1__STORED_RECORD__KIND_JOB:
        out->kind = MU_RECORD_JOB;
        return get_job(pb->job, &any->job, err);
    case MUSTER__V1__STORED_RECORD__KIND_GENERATION:
        out->kind = MU_RECORD_GENERATION;
        return get_generation(arena, pb->generation, &any->generation, err);
    case MUSTER__V1__STORED_RECORD__KIND_CHECKPOINT:
        out->kind = MU_RECORD_CHECKPOINT;
        return mu_checkpoint_record_get(arena, pb->checkpoint, &any->checkpoint, err);
    case MUSTER__V1__STORED_RECORD__KIND_WORKER:
        out->kind = MU_RECORD_WORKER;
        return get_worker(pb->worker, &any->worker, err);
    case MUSTER__V1__STORED_RECORD__KIND_TALLY:
        out->kind = MU_RECORD_TALLY;
        return get_tally(pb->tally, &any->tally, err);
    case MUSTER__V1__STORED_RECORD__KIND_DEATH:
        out->kind = MU_RECORD_DEATH;
        any->death = (struct mu_death_record){
            .number = pb->death->number, .name_hash = pb->death->name_hash, .wall_us = pb->death->wall_us};
        return mu_wire_get_id(pb->death->incarnation, "DeathRecord.incarnation", &any->death.incarnation, err);
    case MUSTER__V1__STORED_RECORD__KIND_NODE:
        out->kind = MU_RECORD_NODE;
        return get_node(pb->node, &any->node, err);
    case MUSTER__V1__STORED_RECORD__KIND_REQUEST:
        out->kind = MU_RECORD_REQUEST;
        return get_request(pb->request, &any->request, err);
    case MUSTER__V1__STORED_RECORD__KIND_ACCOUNT:
        out->kind = MU_RECORD_ACCOUNT;
        return mu_account_record_get(pb->account, &any->account, err);
    case MUSTER__V1__STORED_RECORD__KIND_EVENT:
        out->kind = MU_RECORD_EVENT;
        return get_event(pb->event, &any->event, err);
    default:
        return mu_fail(err, MU_ERR_INVALID, "StoredRecord: has no kind that this version knows");
    }
}

enum mu_status mu_record_decode(struct mu_wire_arena *arena, const void *key, size_t key_bytes, const void *data,
                                size_t size_bytes, struct mu_record *ret_record, struct mu_error *err)
{
    char shown[2 * MU_RECORD_KEY_SIZE];
    const ProtobufCMessage *unpacked = NULL;
    struct mu_record record = {0};
    enum mu_status status = mu_wire_unpack(arena, &muster__v1__stored_record__descriptor, data, size_bytes,
                                           MU_STORE_VALUE_BYTES_MAX, &unpacked, err);
    if (status == MU_OK) {
        const Muster__V1__StoredRecord *pb = (const Muster__V1__StoredRecord *)unpacked;
        if (pb->version == 0 || pb->version > MU_RECORD_VERSION)
            status = mu_fail(err, MU_ERR_INVALID, "version %u is not one that this program reads (up to %d)",
                             pb->version, MU_RECORD_VERSION);
        else
            status = get_record(arena, pb, &record, err);
    }
    if (status == MU_OK) {
        uint8_t own_key[MU_RECORD_KEY_SIZE];
        size_t own_bytes = mu_record_key(&record, own_key);
        if (own_bytes != key_bytes || memcmp(own_key, key, key_bytes) != 0)
            status = mu_fail(err, MU_ERR_INVALID, "the value belongs to another key");
    }
    if (status == MU_OK) {
        *ret_record = record;
        return MU_OK;
    }
    if (err) {
        mu_error_prefix(err, "data directory: record %s cannot be read", show_key(key, key_bytes, shown));
        err->status = status == MU_ERR_NO_MEMORY ? status : MU_ERR_CORRUPT;
    }
    return status == MU_ERR_NO_MEMORY ? status : MU_ERR_CORRUPT;
}
