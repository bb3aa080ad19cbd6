#include "coordinator/record_checkpoint.h"

static enum mu_status no_memory(struct mu_error *err)
{
    return mu_fail(err, MU_ERR_NO_MEMORY, "CheckpointRecord: no memory");
}

static enum mu_status put_pieces(struct mu_wire_arena *arena, const struct mu_checkpoint_record *checkpoint,
                                 Muster__V1__CheckpointRecord *pb, struct mu_error *err)
{
    Muster__V1__PieceRecord *pieces = mu_wire_arena_alloc(arena, sizeof *pieces * checkpoint->piece_count);
    Muster__V1__PieceRecord **pointers = mu_wire_arena_alloc(arena, sizeof *pointers * checkpoint->piece_count);
    if (!pieces || !pointers)
        return no_memory(err);
    for (uint32_t i = 0; i < checkpoint->piece_count; i++) {
        const struct mu_piece_record *piece = &checkpoint->pieces[i];
        muster__v1__piece_record__init(&pieces[i]);
        pieces[i].writer = mu_wire_put_id(arena, piece->writer);
        pieces[i].done = piece->done;
        pieces[i].reassigned = piece->reassigned;
        pieces[i].size_bytes = piece->size_bytes;
        pieces[i].checksum = mu_wire_put_hash(arena, piece->checksum);
        enum mu_status status = MU_OK;
        if ((status = mu_wire_put_string(piece->writer_name, MU_WIRE_NAME_EMPTY, "PieceRecord.writer_name",
                                         sizeof piece->writer_name, &pieces[i].writer_name, err)) ||
            (status = mu_wire_put_string(piece->file, MU_WIRE_FILE, "PieceRecord.file", sizeof piece->file,
                                         &pieces[i].file, err)))
            return status;
        pointers[i] = &pieces[i];
    }
    pb->n_pieces = checkpoint->piece_count;
    pb->pieces = pointers;
    return MU_OK;
}

enum mu_status mu_checkpoint_record_put(struct mu_wire_arena *arena, const struct mu_checkpoint_record *checkpoint,
                                        Muster__V1__CheckpointRecord **ret_pb, struct mu_error *err)
{
    Muster__V1__CheckpointRecord *pb = mu_wire_arena_alloc(arena, sizeof *pb);
    if (!pb)
        return no_memory(err);
    muster__v1__checkpoint_record__init(pb);
    pb->job_uid = mu_wire_put_id(arena, checkpoint->job_uid);
    pb->number = checkpoint->number;
    pb->nonce = mu_wire_put_id(arena, checkpoint->nonce);
    pb->step = checkpoint->step;
    pb->generation = checkpoint->generation;
    pb->command = checkpoint->command;
    pb->not_before_step = checkpoint->not_before_step;
    pb->state = (Muster__V1__CheckpointState)((int)checkpoint->state + 1);
    pb->ordered_wall_us = checkpoint->ordered_wall_us;
    pb->wall_us = checkpoint->wall_us;
    pb->verified = checkpoint->verified;
    pb->size_bytes = checkpoint->size_bytes;
    pb->text = mu_wire_put_text(arena, checkpoint->text, sizeof checkpoint->text);
    pb->attempt = checkpoint->attempt;
    pb->unprepared = checkpoint->unprepared;
    pb->failed_generation = checkpoint->failed_generation;
    *ret_pb = pb;
    enum mu_status status = MU_OK;
    if ((checkpoint->layout.dp &&
         (status = mu_wire_layout_to_pb(arena, &checkpoint->layout, "CheckpointRecord.layout", &pb->layout, err))) ||
        (status = mu_wire_put_string(checkpoint->job, MU_WIRE_NAME, "CheckpointRecord.job", sizeof checkpoint->job,
                                     &pb->job, err)) ||
        (status = mu_wire_put_string(checkpoint->dir, MU_WIRE_TEXT, "CheckpointRecord.dir", sizeof checkpoint->dir,
                                     &pb->dir, err)) ||
        (status = mu_wire_put_string(checkpoint->owner, MU_WIRE_NAME_EMPTY, "CheckpointRecord.owner",
                                     sizeof checkpoint->owner, &pb->owner, err)))
        return status;
    pb->holders = mu_wire_arena_alloc(arena, sizeof *pb->holders * checkpoint->holder_count);
    pb->n_holders = checkpoint->holder_count;
    if (!pb->holders)
        return no_memory(err);
    for (uint32_t i = 0; i < checkpoint->holder_count && status == MU_OK; i++)
        status = mu_wire_put_string(checkpoint->holders[i].host, MU_WIRE_TEXT, "CheckpointRecord.holders",
                                    sizeof checkpoint->holders[i].host, &pb->holders[i], err);
    if (status)
        return status;
    return checkpoint->pieces ? put_pieces(arena, checkpoint, pb, err) : MU_OK;
}

static enum mu_status get_pieces(struct mu_wire_arena *arena, const Muster__V1__CheckpointRecord *pb,
                                 struct mu_checkpoint_record *out, struct mu_error *err)
{
    if (pb->n_pieces > MU_PIECES_MAX)
        return mu_fail(err, MU_ERR_INVALID, "CheckpointRecord.pieces: %zu of them are not allowed: at most %d",
                       pb->n_pieces, MU_PIECES_MAX);
    struct mu_piece_record *pieces = mu_wire_arena_alloc(arena, sizeof *pieces * pb->n_pieces);
    if (!pieces)
        return no_memory(err);
    enum mu_status status = MU_OK;
    for (size_t i = 0; i < pb->n_pieces && status == MU_OK; i++) {
        const Muster__V1__PieceRecord *from = pb->pieces[i];
        struct mu_piece_record *to = &pieces[i];
        to->done = from->done;
        to->reassigned = from->reassigned;
        to->size_bytes = from->size_bytes;
        if ((status = mu_wire_get_id(from->writer, "PieceRecord.writer", &to->writer, err)) ||
            (status = mu_wire_get_string(from->writer_name, MU_WIRE_NAME_EMPTY, "PieceRecord.writer_name",
                                         to->writer_name, sizeof to->writer_name, err)) ||
            (status = mu_wire_get_hash(from->checksum, "PieceRecord.checksum", &to->checksum, err)) ||
            (status = mu_wire_get_string(from->file, MU_WIRE_FILE, "PieceRecord.file", to->file, sizeof to->file, err)))
            break;
    }
    out->pieces = pieces;
    out->piece_count = (uint32_t)pb->n_pieces;
    return status;
}

static enum mu_status get_holders(struct mu_wire_arena *arena, const Muster__V1__CheckpointRecord *pb,
                                  struct mu_checkpoint_record *out, struct mu_error *err)
{
    if (pb->n_holders > MU_HOLDERS_MAX)
        return mu_fail(err, MU_ERR_INVALID, "CheckpointRecord.holders: %zu of them are not allowed: at most %d",
                       pb->n_holders, MU_HOLDERS_MAX);
    out->holders = mu_wire_arena_alloc(arena, sizeof *out->holders * pb->n_holders);
    if (!out->holders)
        return no_memory(err);
    out->holder_count = (uint32_t)pb->n_holders;
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; i < out->holder_count && status == MU_OK; i++)
        status = mu_wire_get_string(pb->holders[i], MU_WIRE_TEXT, "CheckpointRecord.holders", out->holders[i].host,
                                    sizeof out->holders[i].host, err);
    return status;
}

enum mu_status mu_checkpoint_record_get(struct mu_wire_arena *arena, const Muster__V1__CheckpointRecord *pb,
                                        struct mu_checkpoint_record *out, struct mu_error *err)
{
    int state = 0;
    enum mu_status status = MU_OK;
    if ((status = mu_wire_get_id(pb->job_uid, "CheckpointRecord.job_uid", &out->job_uid, err)) ||
        (status = mu_wire_get_string(pb->job, MU_WIRE_NAME, "CheckpointRecord.job", out->job, sizeof out->job, err)) ||
        (status = mu_wire_get_id(pb->nonce, "CheckpointRecord.nonce", &out->nonce, err)) ||
        (status = mu_wire_get_enum((int)pb->state, 1, MU_CKPT_STATE_COUNT, "CheckpointRecord.state", &state, err)) ||
        (status = mu_wire_get_string(pb->dir, MU_WIRE_TEXT, "CheckpointRecord.dir", out->dir, sizeof out->dir, err)) ||
        (status = mu_wire_get_string(pb->owner, MU_WIRE_NAME_EMPTY, "CheckpointRecord.owner", out->owner,
                                     sizeof out->owner, err)) ||
        (status =
             mu_wire_get_string(pb->text, MU_WIRE_TEXT, "CheckpointRecord.text", out->text, sizeof out->text, err)) ||
        (pb->layout && (status = mu_wire_layout_from_pb(pb->layout, "CheckpointRecord.layout", &out->layout, err))))
        return status;
    out->attempt = pb->attempt;
    out->unprepared = pb->unprepared;
    out->failed_generation = pb->failed_generation;
    out->state = (enum mu_checkpoint_state)(state - 1);
    out->number = pb->number;
    out->step = pb->step;
    out->generation = pb->generation;
    out->command = pb->command;
    out->not_before_step = pb->not_before_step;
    out->ordered_wall_us = pb->ordered_wall_us;
    out->wall_us = pb->wall_us;
    out->verified = pb->verified;
    out->size_bytes = pb->size_bytes;
    status = get_holders(arena, pb, out, err);
    return status ? status : get_pieces(arena, pb, out, err);
}
