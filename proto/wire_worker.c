/* Worker -> coordinator. */
#include "proto/wire_pb.h"

#include <string.h>

/* The phases, reasons, ... of session.h against their numbers on the wire: equal, or one more where zero is taken
 * there. */
_Static_assert(MUSTER__V1__WORKER_PHASE__WORKER_PHASE_SPARE == (int)MU_PHASE_SPARE + 1, "phase");
_Static_assert(MUSTER__V1__WORKER_PHASE__WORKER_PHASE_PARKED == (int)MU_PHASE_PARKED + 1, "phase");
_Static_assert((int)MU_PHASE_PARKED + 1 == (int)MU_PHASE_COUNT, "phase");
_Static_assert(MUSTER__V1__PARK_REASON__PARK_REASON_ENGINE == (int)MU_PARK_ENGINE, "park reason");
_Static_assert(MUSTER__V1__PEER_FAILURE__PEER_FAILURE_PROTOCOL == (int)MU_PEER_FAILURE_PROTOCOL, "peer failure");
_Static_assert(MUSTER__V1__CODE__CODE_INTERNAL == (int)MU_ERR_INTERNAL, "code");
_Static_assert((int)MU_ERR_INTERNAL + 1 == (int)MU_STATUS_COUNT, "code");
_Static_assert(offsetof(Muster__V1__Vitals, n_links) ==
                   offsetof(Muster__V1__Vitals, cpu_us) + MU_VITAL_COUNT * sizeof(uint64_t),
               "vitals");

/* ---- encode ---- */

/* Every message a worker message can consist of, in one piece. */
struct parts {
    Muster__V1__WorkerMessage message;
    union {
        Muster__V1__Hello hello;
        Muster__V1__Heartbeat heartbeat;
        Muster__V1__StepReport step;
        Muster__V1__PieceReport piece;
        Muster__V1__EvalReport eval;
        Muster__V1__Goodbye goodbye;
        Muster__V1__Kept kept;
    };
    Muster__V1__WorkerStatus status;
    Muster__V1__Held held;
    Muster__V1__HeldShare shares[MU_HELD_SHARES_MAX];
    Muster__V1__HeldShare *share_pointers[MU_HELD_SHARES_MAX];
    Muster__V1__StepResult result;
};

static enum mu_status no_memory(struct mu_error *err)
{
    return mu_fail(err, MU_ERR_NO_MEMORY, "WorkerMessage: no memory");
}

static enum mu_status put_held(struct mu_wire_arena *arena, const struct mu_held *held, struct parts *parts,
                               struct mu_error *err)
{
    Muster__V1__Held *pb = &parts->held;
    muster__v1__held__init(pb);
    pb->has_state = held->has_state;
    pb->has_gradient = held->has_gradient;
    pb->has_result = held->has_result;
    pb->step = held->step;
    if (held->has_result) {
        mu_wire_result_to_pb(&held->result, &parts->result);
        pb->result = &parts->result;
    }
    if (held->share_count > MU_HELD_SHARES_MAX || held->has_state != (held->share_count > 0))
        return mu_fail(err, MU_ERR_INVALID, "Held.shares: %u of them are not allowed: 1 to %d with state, 0 without",
                       held->share_count, MU_HELD_SHARES_MAX);
    for (uint32_t i = 0; i < held->share_count; i++) {
        Muster__V1__HeldShare *share = &parts->shares[i];
        muster__v1__held_share__init(share);
        share->rank = held->shares[i].rank;
        share->owned_only = held->shares[i].owned_only;
        parts->share_pointers[i] = share;
        enum mu_status status =
            mu_wire_layout_to_pb(arena, &held->shares[i].layout, "HeldShare.layout", &share->layout, err);
        if (status)
            return status;
    }
    pb->n_shares = held->share_count;
    pb->shares = parts->share_pointers;
    return MU_OK;
}

static enum mu_status put_status(struct mu_wire_arena *arena, const struct mu_worker_status *status,
                                 struct parts *parts, struct mu_error *err)
{
    Muster__V1__WorkerStatus *pb = &parts->status;
    muster__v1__worker_status__init(pb);
    pb->phase = (Muster__V1__WorkerPhase)((int)status->phase + 1);
    pb->generation = status->generation;
    pb->rank = status->rank;
    pb->command_received = status->command_received;
    pb->command_executed = status->command_executed;
    pb->checkpoint_taken = status->checkpoint_taken;
    pb->era = status->era;
    pb->park_reason = (Muster__V1__ParkReason)status->park_reason;
    pb->peer_rank = status->peer_rank;
    pb->peer_failure = (Muster__V1__PeerFailure)status->peer_failure;
    pb->bad_checkpoint = status->bad_checkpoint;
    pb->feed = status->feed;
    pb->fed_by = status->fed_by;
    pb->feed_state = (Muster__V1__FeedState)status->feed_state;
    pb->text = mu_wire_put_text(arena, status->text, sizeof status->text);
    pb->weights_sha256 = mu_wire_put_bytes32(status->weights_sha256);
    pb->weights_unfinite = status->weights_unfinite;
    if (!pb->text)
        return no_memory(err);

    pb->held = &parts->held;
    return put_held(arena, &status->held, parts, err);
}

static enum mu_status put_hello(struct mu_wire_arena *arena, const struct mu_hello *hello, struct parts *parts,
                                struct mu_error *err)
{
    Muster__V1__Hello *pb = &parts->hello;
    muster__v1__hello__init(pb);
    pb->protocol_version = hello->protocol_version;
    pb->incarnation = mu_wire_put_id(arena, hello->incarnation);
    pb->pid = hello->pid;
    pb->threads = hello->threads;
    pb->memory_bytes = hello->memory_bytes;
    pb->nccl_version = hello->nccl_version;
    pb->computes_bf16 = hello->computes_bf16;
    pb->gpu = mu_wire_put_text(arena, hello->gpu, sizeof hello->gpu);
    pb->prepared_job = hello->prepared_job;
    pb->job_uid = mu_wire_put_id(arena, hello->job_uid);
    pb->numeric_identity = mu_wire_put_hash(arena, hello->numeric_identity);
    pb->data_hash = mu_wire_put_hash(arena, hello->data_hash);
    pb->status = &parts->status;
    pb->n_inventory = hello->inventory_count;
    pb->inventory = (uint64_t *)hello->inventory;
    if (hello->files_address[0])
        pb->files_secret =
            (ProtobufCBinaryData){.len = sizeof hello->files_secret, .data = (uint8_t *)hello->files_secret};
    enum mu_status status = MU_OK;
    if ((status = mu_wire_put_string(hello->files_address, MU_WIRE_TEXT, "Hello.files_address",
                                     sizeof hello->files_address, &pb->files_address, err)) ||
        (status =
             mu_wire_identity_to_pb(arena, &hello->identity_parts, &pb->n_identity_parts, &pb->identity_parts, err)) ||
        (status = mu_wire_put_string(hello->software_version, MU_WIRE_TEXT, "Hello.software_version",
                                     sizeof hello->software_version, &pb->software_version, err)) ||
        (status = mu_wire_put_string(hello->job, MU_WIRE_NAME, "Hello.job", sizeof hello->job, &pb->job, err)) ||
        (status =
             mu_wire_put_string(hello->name, MU_WIRE_NAME_EMPTY, "Hello.name", sizeof hello->name, &pb->name, err)) ||
        (status = mu_wire_put_string(hello->host, MU_WIRE_TEXT, "Hello.host", sizeof hello->host, &pb->host, err)) ||
        (status = mu_wire_put_string(hello->address, MU_WIRE_TEXT, "Hello.address", sizeof hello->address, &pb->address,
                                     err)) ||
        (status = mu_wire_put_string(hello->backend, MU_WIRE_WORD, "Hello.backend", sizeof hello->backend, &pb->backend,
                                     err)))
        return status;
    return put_status(arena, &hello->status, parts, err);
}

static void put_step(const struct mu_step_report *step, struct parts *parts)
{
    Muster__V1__StepReport *pb = &parts->step;
    muster__v1__step_report__init(pb);
    mu_wire_result_to_pb(&step->result, &parts->result);
    pb->steps_done = step->steps_done;
    pb->result = &parts->result;
    pb->step_count = step->step_count;
    pb->leaf_count = step->leaf_count;
    pb->tokens = step->tokens;
    pb->total_us = step->total_us;
    pb->data_us = step->data_us;
    pb->forward_us = step->forward_us;
    pb->backward_us = step->backward_us;
    pb->communicate_us = step->communicate_us;
    pb->wait_us = step->wait_us;
    pb->optimizer_us = step->optimizer_us;
    pb->snapshot_us = step->snapshot_us;
    pb->tensor_us = step->tensor_us;
    pb->pipeline_us = step->pipeline_us;
    pb->replicas_us = step->replicas_us;
    pb->vote_us = step->vote_us;
}

static enum mu_status put_piece(struct mu_wire_arena *arena, const struct mu_piece_report *piece, struct parts *parts,
                                struct mu_error *err)
{
    Muster__V1__PieceReport *pb = &parts->piece;
    muster__v1__piece_report__init(pb);
    pb->checkpoint = piece->checkpoint;
    pb->piece = piece->piece;
    pb->step = piece->step;
    pb->code = (Muster__V1__Code)piece->status;
    pb->size_bytes = piece->size_bytes;
    pb->checksum = mu_wire_put_hash(arena, piece->checksum);
    pb->stall_us = piece->stall_us;
    pb->write_us = piece->write_us;
    pb->text = mu_wire_put_text(arena, piece->text, sizeof piece->text);
    if (!pb->text)
        return no_memory(err);
    return mu_wire_put_string(piece->file, MU_WIRE_FILE, "PieceReport.file", sizeof piece->file, &pb->file, err);
}

static enum mu_status put_kept(struct mu_wire_arena *arena, const struct mu_kept_report *kept, struct parts *parts,
                               struct mu_error *err)
{
    Muster__V1__Kept *pb = &parts->kept;
    muster__v1__kept__init(pb);
    pb->kind = (Muster__V1__KeepKind)kept->kind;
    pb->checkpoint = kept->checkpoint;
    pb->code = (Muster__V1__Code)kept->status;
    pb->size_bytes = kept->size_bytes;
    pb->text = mu_wire_put_text(arena, kept->text, sizeof kept->text);
    return pb->text ? MU_OK : no_memory(err);
}

static enum mu_status put_message(struct mu_wire_arena *arena, const struct mu_worker_message *message,
                                  struct parts *parts, struct mu_error *err)
{
    Muster__V1__WorkerMessage *pb = &parts->message;
    muster__v1__worker_message__init(pb);
    pb->generation = message->generation;
    switch (message->kind) {
    case MU_WM_HELLO:
        pb->kind_case = MUSTER__V1__WORKER_MESSAGE__KIND_HELLO;
        pb->hello = &parts->hello;
        return put_hello(arena, &message->hello, parts, err);
    case MU_WM_HEARTBEAT:
        pb->kind_case = MUSTER__V1__WORKER_MESSAGE__KIND_HEARTBEAT;
        pb->heartbeat = &parts->heartbeat;
        muster__v1__heartbeat__init(&parts->heartbeat);
        parts->heartbeat.progress = message->heartbeat.progress;
        parts->heartbeat.phase = (Muster__V1__WorkerPhase)((int)message->heartbeat.phase + 1);
        parts->heartbeat.step = message->heartbeat.step;
        parts->heartbeat.waiting = message->heartbeat.waiting;
        return MU_OK;
    case MU_WM_STATUS:
        pb->kind_case = MUSTER__V1__WORKER_MESSAGE__KIND_STATUS;
        pb->status = &parts->status;
        return put_status(arena, &message->status, parts, err);
    case MU_WM_STEP:
        pb->kind_case = MUSTER__V1__WORKER_MESSAGE__KIND_STEP;
        pb->step = &parts->step;
        put_step(&message->step, parts);
        return MU_OK;
    case MU_WM_PIECE:
        pb->kind_case = MUSTER__V1__WORKER_MESSAGE__KIND_PIECE;
        pb->piece = &parts->piece;
        return put_piece(arena, &message->piece, parts, err);
    case MU_WM_EVAL:
        pb->kind_case = MUSTER__V1__WORKER_MESSAGE__KIND_EVAL;
        pb->eval = &parts->eval;
        muster__v1__eval_report__init(&parts->eval);
        parts->eval.step = message->eval.step;
        parts->eval.loss = message->eval.loss;
        return MU_OK;
    case MU_WM_GOODBYE:
        pb->kind_case = MUSTER__V1__WORKER_MESSAGE__KIND_GOODBYE;
        pb->goodbye = &parts->goodbye;
        muster__v1__goodbye__init(&parts->goodbye);
        parts->goodbye.reason = mu_wire_put_text(arena, message->goodbye.reason, sizeof message->goodbye.reason);
        return parts->goodbye.reason ? MU_OK : no_memory(err);
    case MU_WM_KEPT:
        pb->kind_case = MUSTER__V1__WORKER_MESSAGE__KIND_KEPT;
        pb->kept = &parts->kept;
        return put_kept(arena, &message->kept, parts, err);
    case MU_WM_PROBED:
        pb->kind_case = MUSTER__V1__WORKER_MESSAGE__KIND_PROBED;
        return mu_wire_probed_to_pb(arena, &message->probed, &pb->probed, err);
    case MU_WM_COUNT:
        break;
    }
    return mu_fail(err, MU_ERR_INVALID, "WorkerMessage.kind: value %d is not allowed", (int)message->kind);
}

static enum mu_status put_vitals(struct mu_wire_arena *arena, const struct mu_vitals *vitals,
                                 Muster__V1__Vitals **ret_pb, struct mu_error *err)
{
    struct {
        Muster__V1__Vitals vitals;
        Muster__V1__LinkVitals links[MU_VITAL_LINKS_MAX];
        Muster__V1__LinkVitals *pointers[MU_VITAL_LINKS_MAX];
    } *pb = mu_wire_arena_alloc(arena, sizeof *pb);
    if (!pb)
        return no_memory(err);
    muster__v1__vitals__init(&pb->vitals);
    pb->vitals.mono_us = vitals->mono_us;
    memcpy(&pb->vitals.cpu_us, vitals->values, sizeof vitals->values);
    pb->vitals.certificate_end_s = vitals->certificate_end_s;
    for (uint32_t i = 0; i < vitals->link_count; i++) {
        const struct mu_vital_link *link = &vitals->links[i];
        pb->pointers[i] = &pb->links[i];
        muster__v1__link_vitals__init(&pb->links[i]);
        pb->links[i].rank = link->rank;
        pb->links[i].received_bytes_per_second = link->received_bytes_per_second;
        pb->links[i].sent_bytes_per_second = link->sent_bytes_per_second;
        pb->links[i].wait_ppm = link->wait_ppm;
        pb->links[i].latency_us = link->latency_us;
        pb->links[i].retransmits = link->retransmits;
    }
    pb->vitals.n_links = vitals->link_count;
    pb->vitals.links = pb->pointers;
    *ret_pb = &pb->vitals;
    return vitals->gpu ? mu_wire_gpu_to_pb(arena, vitals->gpu, &pb->vitals.gpu, err) : MU_OK;
}

enum mu_status mu_wire_encode_worker(struct mu_wire_arena *arena, const struct mu_worker_message *message,
                                     const void **ret_data, size_t *ret_size_bytes, struct mu_error *err)
{
    struct parts parts;
    enum mu_status status = put_message(arena, message, &parts, err);
    if (status == MU_OK && message->vitals)
        status = put_vitals(arena, message->vitals, &parts.message.vitals, err);
    if (status)
        return status;
    return mu_wire_pack(arena, &parts.message.base, MU_WIRE_WORKER_BYTES_MAX, ret_data, ret_size_bytes, err);
}

/* ---- decode ---- */

static enum mu_status get_step(uint64_t value, const char *field, uint64_t *ret_value, struct mu_error *err)
{
    if (value > MU_STEPS_MAX)
        return mu_fail(err, MU_ERR_INVALID, "%s: value %llu is not allowed: at most %llu", field,
                       (unsigned long long)value, (unsigned long long)MU_STEPS_MAX);
    *ret_value = value;
    return MU_OK;
}

static enum mu_status get_rank(uint32_t value, const char *field, uint32_t *ret_value, struct mu_error *err)
{
    if (value >= MU_WORKERS_MAX && value != UINT32_MAX)
        return mu_fail(err, MU_ERR_INVALID, "%s: value %u is not allowed: less than %d", field, value, MU_WORKERS_MAX);
    *ret_value = value;
    return MU_OK;
}

static enum mu_status get_phase(int value, const char *field, enum mu_worker_phase *ret_phase, struct mu_error *err)
{
    int number = 0;
    enum mu_status status = mu_wire_get_enum(value, 1, MU_PHASE_COUNT, field, &number, err);
    if (status == MU_OK)
        *ret_phase = (enum mu_worker_phase)(number - 1);
    return status;
}

static enum mu_status get_shares(const Muster__V1__Held *pb, struct mu_held *out, struct mu_error *err)
{
    if (pb->n_shares > MU_HELD_SHARES_MAX || pb->has_state != (pb->n_shares > 0))
        return mu_fail(err, MU_ERR_INVALID, "Held.shares: %zu of them are not allowed: 1 to %d with state, 0 without",
                       pb->n_shares, MU_HELD_SHARES_MAX);
    for (size_t i = 0; i < pb->n_shares; i++) {
        struct mu_held_share *share = &out->shares[i];
        enum mu_status status = mu_wire_layout_from_pb(pb->shares[i]->layout, "HeldShare.layout", &share->layout, err);
        if (status)
            return status;
        uint32_t working = share->layout.tp * share->layout.pp * share->layout.dp;
        if (pb->shares[i]->rank >= working)
            return mu_fail(err, MU_ERR_INVALID, "HeldShare.rank: value %u is not allowed: less than %u",
                           pb->shares[i]->rank, working);
        share->rank = pb->shares[i]->rank;
        share->owned_only = pb->shares[i]->owned_only;
    }
    out->share_count = (uint32_t)pb->n_shares;
    return MU_OK;
}

/* `out` is all zero. */
static enum mu_status get_held(const Muster__V1__Held *pb, struct mu_held *out, struct mu_error *err)
{
    if (!pb)
        return MU_OK;
    if (pb->has_result && !pb->result)
        return mu_fail(err, MU_ERR_INVALID, "Held.result: is missing although has_result is set");
    out->has_state = pb->has_state;
    out->has_gradient = pb->has_gradient;
    out->has_result = pb->has_result;
    enum mu_status status = get_step(pb->step, "Held.step", &out->step, err);
    if (status == MU_OK && out->has_result) {
        mu_wire_result_from_pb(pb->result, &out->result);
        status = get_step(out->result.step, "StepResult.step", &out->result.step, err);
    }
    return status ? status : get_shares(pb, out, err);
}

static enum mu_status get_status(const Muster__V1__WorkerStatus *pb, struct mu_worker_status *out, struct mu_error *err)
{
    if (!pb)
        return mu_fail(err, MU_ERR_INVALID, "Hello.status: is missing");
    int park_reason = 0, peer_failure = 0, feed_state = 0;
    enum mu_status status = MU_OK;
    if ((status = get_phase((int)pb->phase, "WorkerStatus.phase", &out->phase, err)) ||
        (status = get_rank(pb->rank, "WorkerStatus.rank", &out->rank, err)) ||
        (status = get_held(pb->held, &out->held, err)) ||
        (status = mu_wire_get_enum((int)pb->park_reason, MU_PARK_NONE, MU_PARK_ENGINE, "WorkerStatus.park_reason",
                                   &park_reason, err)) ||
        (status = mu_wire_get_enum((int)pb->feed_state, MU_FEED_NONE, MU_FEED_FAILED, "WorkerStatus.feed_state",
                                   &feed_state, err)) ||
        (status = get_rank(pb->peer_rank, "WorkerStatus.peer_rank", &out->peer_rank, err)) ||
        (status = mu_wire_get_enum((int)pb->peer_failure, MU_PEER_FAILURE_NONE, MU_PEER_FAILURE_PROTOCOL,
                                   "WorkerStatus.peer_failure", &peer_failure, err)) ||
        (status = mu_wire_get_string(pb->text, MU_WIRE_TEXT, "WorkerStatus.text", out->text, sizeof out->text, err)) ||
        (status = mu_wire_get_bytes32(pb->weights_sha256, "WorkerStatus.weights_sha256", out->weights_sha256, err)))
        return status;
    out->generation = pb->generation;
    out->command_received = pb->command_received;
    out->command_executed = pb->command_executed;
    out->checkpoint_taken = pb->checkpoint_taken;
    out->era = pb->era;
    out->park_reason = (enum mu_park_reason)park_reason;
    out->peer_failure = (enum mu_peer_failure)peer_failure;
    out->bad_checkpoint = pb->bad_checkpoint;
    out->weights_unfinite = pb->weights_unfinite;
    out->feed = pb->feed;
    out->fed_by = pb->fed_by;
    out->feed_state = (enum mu_feed_state)feed_state;
    return MU_OK;
}

/* Of another protocol version only the version is looked at, so that its worker is told so and not that some field is
 * wrong. */
static enum mu_status get_hello(const Muster__V1__Hello *pb, struct mu_hello *out, struct mu_error *err)
{
    out->protocol_version = pb->protocol_version;
    if (pb->protocol_version != MU_PROTOCOL_VERSION) {
        if (mu_wire_text_ok(pb->software_version, sizeof out->software_version))
            memcpy(out->software_version, pb->software_version, strlen(pb->software_version) + 1);
        return MU_OK;
    }
    enum mu_status status = MU_OK;
    if ((status = mu_wire_get_id(pb->incarnation, "Hello.incarnation", &out->incarnation, err)) ||
        (status = mu_wire_get_string(pb->software_version, MU_WIRE_TEXT, "Hello.software_version",
                                     out->software_version, sizeof out->software_version, err)) ||
        (status = mu_wire_get_string(pb->job, MU_WIRE_NAME, "Hello.job", out->job, sizeof out->job, err)) ||
        (status = mu_wire_get_string(pb->name, MU_WIRE_NAME_EMPTY, "Hello.name", out->name, sizeof out->name, err)) ||
        (status = mu_wire_get_string(pb->host, MU_WIRE_TEXT, "Hello.host", out->host, sizeof out->host, err)) ||
        (status =
             mu_wire_get_string(pb->address, MU_WIRE_TEXT, "Hello.address", out->address, sizeof out->address, err)) ||
        (status =
             mu_wire_get_string(pb->backend, MU_WIRE_WORD, "Hello.backend", out->backend, sizeof out->backend, err)) ||
        (status = mu_wire_get_id(pb->job_uid, "Hello.job_uid", &out->job_uid, err)) ||
        (status = mu_wire_get_hash(pb->numeric_identity, "Hello.numeric_identity", &out->numeric_identity, err)) ||
        (status = mu_wire_identity_from_pb(pb->n_identity_parts, pb->identity_parts, &out->identity_parts, err)) ||
        (status = mu_wire_get_hash(pb->data_hash, "Hello.data_hash", &out->data_hash, err)) ||
        (status = mu_wire_get_string(pb->files_address, MU_WIRE_TEXT, "Hello.files_address", out->files_address,
                                     sizeof out->files_address, err)) ||
        (status = mu_wire_get_string(pb->gpu, MU_WIRE_TEXT, "Hello.gpu", out->gpu, sizeof out->gpu, err)) ||
        (status = mu_wire_get_bytes32(pb->files_secret, "Hello.files_secret", out->files_secret, err)))
        return status;
    if (pb->files_secret.len && !out->files_address[0])
        return mu_fail(err, MU_ERR_INVALID, "Hello.files_secret: is not allowed without files_address");
    if (mu_id_is_zero(out->incarnation))
        return mu_fail(err, MU_ERR_INVALID, "Hello.incarnation: is missing; it must be 16 random bytes");
    if (pb->n_inventory > MU_INVENTORY_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "Hello.inventory: %zu checkpoints are not allowed: at most %d",
                       pb->n_inventory, MU_INVENTORY_MAX);
    out->inventory_count = (uint32_t)pb->n_inventory;
    if (pb->n_inventory)
        memcpy(out->inventory, pb->inventory, pb->n_inventory * sizeof out->inventory[0]);
    out->pid = pb->pid;
    out->threads = pb->threads;
    out->memory_bytes = pb->memory_bytes;
    out->nccl_version = pb->nccl_version;
    out->computes_bf16 = pb->computes_bf16 != 0;
    out->prepared_job = pb->prepared_job;
    return get_status(pb->status, &out->status, err);
}

static enum mu_status get_step_report(const Muster__V1__StepReport *pb, struct mu_step_report *out,
                                      struct mu_error *err)
{
    if (!pb->result)
        return mu_fail(err, MU_ERR_INVALID, "StepReport.result: is missing");
    mu_wire_result_from_pb(pb->result, &out->result);
    enum mu_status status = MU_OK;
    if ((status = get_step(pb->steps_done, "StepReport.steps_done", &out->steps_done, err)) ||
        (status = get_step(out->result.step, "StepResult.step", &out->result.step, err)))
        return status;
    out->step_count = pb->step_count;
    out->leaf_count = pb->leaf_count;
    out->tokens = pb->tokens;
    out->total_us = pb->total_us;
    out->data_us = pb->data_us;
    out->forward_us = pb->forward_us;
    out->backward_us = pb->backward_us;
    out->communicate_us = pb->communicate_us;
    out->wait_us = pb->wait_us;
    out->optimizer_us = pb->optimizer_us;
    out->snapshot_us = pb->snapshot_us;
    out->tensor_us = pb->tensor_us;
    out->pipeline_us = pb->pipeline_us;
    out->replicas_us = pb->replicas_us;
    out->vote_us = pb->vote_us;
    return MU_OK;
}

static enum mu_status get_piece(const Muster__V1__PieceReport *pb, struct mu_piece_report *out, struct mu_error *err)
{
    int code = 0;
    enum mu_status status = MU_OK;
    if ((status = get_rank(pb->piece, "PieceReport.piece", &out->piece, err)) ||
        (status = get_step(pb->step, "PieceReport.step", &out->step, err)) ||
        (status = mu_wire_get_enum((int)pb->code, MU_OK, MU_ERR_INTERNAL, "PieceReport.code", &code, err)) ||
        (status = mu_wire_get_hash(pb->checksum, "PieceReport.checksum", &out->checksum, err)) ||
        (status = mu_wire_get_string(pb->file, MU_WIRE_FILE, "PieceReport.file", out->file, sizeof out->file, err)) ||
        (status = mu_wire_get_string(pb->text, MU_WIRE_TEXT, "PieceReport.text", out->text, sizeof out->text, err)))
        return status;
    out->checkpoint = pb->checkpoint;
    out->status = (enum mu_status)code;
    out->size_bytes = pb->size_bytes;
    out->stall_us = pb->stall_us;
    out->write_us = pb->write_us;
    return MU_OK;
}

static enum mu_status get_kept(const Muster__V1__Kept *pb, struct mu_kept_report *out, struct mu_error *err)
{
    int kind = 0, code = 0;
    enum mu_status status = MU_OK;
    if ((status = mu_wire_get_enum((int)pb->kind, MU_KEEP_PUBLISH, MU_KEEP_DISCARD, "Kept.kind", &kind, err)) ||
        (status = mu_wire_get_enum((int)pb->code, MU_OK, MU_ERR_INTERNAL, "Kept.code", &code, err)) ||
        (status = mu_wire_get_string(pb->text, MU_WIRE_TEXT, "Kept.text", out->text, sizeof out->text, err)))
        return status;
    out->kind = (enum mu_keep_kind)kind;
    out->status = (enum mu_status)code;
    out->checkpoint = pb->checkpoint;
    out->size_bytes = pb->size_bytes;
    return MU_OK;
}

static enum mu_status get_message(const Muster__V1__WorkerMessage *pb, struct mu_worker_message *out,
                                  struct mu_error *err)
{
    enum mu_status status = MU_OK;
    out->generation = pb->generation;
    switch (pb->kind_case) {
    case MUSTER__V1__WORKER_MESSAGE__KIND_HELLO:
        out->kind = MU_WM_HELLO;
        return get_hello(pb->hello, &out->hello, err);
    case MUSTER__V1__WORKER_MESSAGE__KIND_HEARTBEAT:
        out->kind = MU_WM_HEARTBEAT;
        out->heartbeat.progress = pb->heartbeat->progress;
        out->heartbeat.waiting = pb->heartbeat->waiting;
        status = get_phase((int)pb->heartbeat->phase, "Heartbeat.phase", &out->heartbeat.phase, err);
        return status ? status : get_step(pb->heartbeat->step, "Heartbeat.step", &out->heartbeat.step, err);
    case MUSTER__V1__WORKER_MESSAGE__KIND_STATUS:
        out->kind = MU_WM_STATUS;
        return get_status(pb->status, &out->status, err);
    case MUSTER__V1__WORKER_MESSAGE__KIND_STEP:
        out->kind = MU_WM_STEP;
        return get_step_report(pb->step, &out->step, err);
    case MUSTER__V1__WORKER_MESSAGE__KIND_PIECE:
        out->kind = MU_WM_PIECE;
        return get_piece(pb->piece, &out->piece, err);
    case MUSTER__V1__WORKER_MESSAGE__KIND_EVAL:
        out->kind = MU_WM_EVAL;
        out->eval.loss = pb->eval->loss;
        return get_step(pb->eval->step, "EvalReport.step", &out->eval.step, err);
    case MUSTER__V1__WORKER_MESSAGE__KIND_GOODBYE:
        out->kind = MU_WM_GOODBYE;
        return mu_wire_get_string(pb->goodbye->reason, MU_WIRE_TEXT, "Goodbye.reason", out->goodbye.reason,
                                  sizeof out->goodbye.reason, err);
    case MUSTER__V1__WORKER_MESSAGE__KIND_KEPT:
        out->kind = MU_WM_KEPT;
        return get_kept(pb->kept, &out->kept, err);
    case MUSTER__V1__WORKER_MESSAGE__KIND_PROBED:
        out->kind = MU_WM_PROBED;
        return mu_wire_probed_from_pb(pb->probed, &out->probed, err);
    default:
        return mu_fail(err, MU_ERR_INVALID, "WorkerMessage: has no kind that this version knows");
    }
}

static enum mu_status get_vitals(struct mu_wire_arena *arena, const Muster__V1__Vitals *pb,
                                 const struct mu_vitals **ret_vitals, struct mu_error *err)
{
    if (pb->n_links > MU_VITAL_LINKS_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "Vitals.links: %zu of them are not allowed: at most %d", pb->n_links,
                       MU_VITAL_LINKS_MAX);
    struct mu_vitals *vitals = mu_wire_arena_alloc(arena, sizeof *vitals);
    if (!vitals)
        return no_memory(err);
    vitals->mono_us = pb->mono_us;
    memcpy(vitals->values, &pb->cpu_us, sizeof vitals->values);
    vitals->certificate_end_s = pb->certificate_end_s;
    vitals->link_count = (uint32_t)pb->n_links;
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; i < vitals->link_count && status == MU_OK; i++) {
        const Muster__V1__LinkVitals *link = pb->links[i];
        vitals->links[i] = (struct mu_vital_link){.received_bytes_per_second = link->received_bytes_per_second,
                                                  .sent_bytes_per_second = link->sent_bytes_per_second,
                                                  .wait_ppm = link->wait_ppm,
                                                  .latency_us = link->latency_us,
                                                  .retransmits = link->retransmits};
        status = get_rank(link->rank, "LinkVitals.rank", &vitals->links[i].rank, err);
    }
    struct mu_gpu_sample *gpu = pb->gpu ? mu_wire_arena_alloc(arena, sizeof *gpu) : NULL;
    if (pb->gpu && !gpu)
        return no_memory(err);
    vitals->gpu = gpu;
    if (gpu && status == MU_OK)
        status = mu_wire_gpu_from_pb(pb->gpu, gpu, err);
    *ret_vitals = vitals;
    return status;
}

/* What of the union each kind uses. Clearing no more keeps heartbeats cheap. */
static size_t message_bytes(const Muster__V1__WorkerMessage *pb)
{
    bool small = pb->kind_case == MUSTER__V1__WORKER_MESSAGE__KIND_HEARTBEAT ||
                 pb->kind_case == MUSTER__V1__WORKER_MESSAGE__KIND_STEP ||
                 pb->kind_case == MUSTER__V1__WORKER_MESSAGE__KIND_EVAL;
    size_t head_bytes = offsetof(struct mu_worker_message, hello);
    return small ? head_bytes + sizeof(struct mu_step_report) : sizeof(struct mu_worker_message);
}

enum mu_status mu_wire_decode_worker(struct mu_wire_arena *arena, const void *data, size_t size_bytes,
                                     struct mu_worker_message *ret_message, struct mu_error *err)
{
    const ProtobufCMessage *unpacked = NULL;
    enum mu_status status = mu_wire_unpack(arena, &muster__v1__worker_message__descriptor, data, size_bytes,
                                           MU_WIRE_WORKER_BYTES_MAX, &unpacked, err);
    if (status)
        return status;
    const Muster__V1__WorkerMessage *pb = (const Muster__V1__WorkerMessage *)unpacked;
    struct mu_worker_message message;
    memset(&message, 0, message_bytes(pb));
    status = get_message(pb, &message, err);
    if (status == MU_OK && pb->vitals)
        status = get_vitals(arena, pb->vitals, &message.vitals, err);
    if (status == MU_OK)
        memcpy(ret_message, &message, message_bytes(pb));
    return status;
}
