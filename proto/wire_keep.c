/* Checkpoints of kind local: holders, orders to keep, answers. */
#include <string.h>

#include "proto/wire_pb.h"

static enum mu_status no_memory(struct mu_error *err)
{
    return mu_fail(err, MU_ERR_NO_MEMORY, "no memory to encode or decode a message about a checkpoint's holders");
}

/* ---- encode ---- */

static enum mu_status put_holder(const struct mu_holder *holder, Muster__V1__Holder *pb, struct mu_error *err)
{
    muster__v1__holder__init(pb);
    if (holder->address[0])
        pb->secret = (ProtobufCBinaryData){.len = sizeof holder->secret, .data = (uint8_t *)holder->secret};
    enum mu_status status =
        mu_wire_put_string(holder->host, MU_WIRE_TEXT, "Holder.host", sizeof holder->host, &pb->host, err);
    if (status)
        return status;
    return mu_wire_put_string(holder->address, MU_WIRE_TEXT, "Holder.address", sizeof holder->address, &pb->address,
                              err);
}

enum mu_status mu_wire_holders_to_pb(struct mu_wire_arena *arena, const struct mu_holder *holders, uint32_t count,
                                     size_t *ret_count, Muster__V1__Holder ***ret_pb, struct mu_error *err)
{
    Muster__V1__Holder *pb = mu_wire_arena_alloc(arena, sizeof *pb * count);
    Muster__V1__Holder **pointers = mu_wire_arena_alloc(arena, sizeof *pointers * count);
    enum mu_status status = MU_OK;
    if (!pb || !pointers)
        return no_memory(err);
    for (uint32_t i = 0; i < count && status == MU_OK; i++) {
        pointers[i] = &pb[i];
        status = put_holder(&holders[i], &pb[i], err);
    }
    *ret_count = count;
    *ret_pb = pointers;
    return status;
}

static enum mu_status put_pieces(struct mu_wire_arena *arena, const struct mu_keep_order *order, Muster__V1__Keep *pb,
                                 struct mu_error *err)
{
    Muster__V1__WrittenPiece *pieces = mu_wire_arena_alloc(arena, sizeof *pieces * order->piece_count);
    Muster__V1__WrittenPiece **pointers = mu_wire_arena_alloc(arena, sizeof *pointers * order->piece_count);
    if (!pieces || !pointers)
        return no_memory(err);
    for (uint32_t i = 0; i < order->piece_count; i++) {
        const struct mu_written_piece *piece = &order->pieces[i];
        pointers[i] = &pieces[i];
        muster__v1__written_piece__init(&pieces[i]);
        pieces[i].size_bytes = piece->size_bytes;
        pieces[i].checksum = mu_wire_put_hash(arena, piece->checksum);
        enum mu_status status = mu_wire_put_string(piece->file, MU_WIRE_FILE, "WrittenPiece.file", sizeof piece->file,
                                                   &pieces[i].file, err);
        if (status)
            return status;
    }
    pb->n_pieces = order->piece_count;
    pb->pieces = pointers;
    return MU_OK;
}

enum mu_status mu_wire_keep_to_pb(struct mu_wire_arena *arena, const struct mu_keep_order *order,
                                  Muster__V1__Keep **ret_pb, struct mu_error *err)
{
    Muster__V1__Keep *pb = mu_wire_arena_alloc(arena, sizeof *pb);
    Muster__V1__Holder *holders = mu_wire_arena_alloc(arena, 2 * sizeof *holders);
    enum mu_status status = MU_OK;
    if (!pb || !holders)
        return no_memory(err);
    *ret_pb = pb;
    muster__v1__keep__init(pb);
    pb->kind = (Muster__V1__KeepKind)order->kind;
    pb->checkpoint = order->checkpoint;
    pb->before = &holders[0];
    pb->after = &holders[1];
    if ((status = mu_wire_put_string(order->dir, MU_WIRE_TEXT, "Keep.dir", sizeof order->dir, &pb->dir, err)) ||
        (status = put_holder(&order->before, pb->before, err)) || (status = put_holder(&order->after, pb->after, err)))
        return status;
    if (order->kind != MU_KEEP_PUBLISH)
        return MU_OK;
    pb->step = order->step;
    pb->generation = order->generation;
    pb->wall_us = order->wall_us;
    status = mu_wire_layout_to_pb(arena, &order->layout, "Keep.layout", &pb->layout, err);
    return status ? status : put_pieces(arena, order, pb, err);
}

/* ---- decode ---- */

static enum mu_status get_holder(const Muster__V1__Holder *pb, struct mu_holder *out, struct mu_error *err)
{
    if (!pb)
        return mu_fail(err, MU_ERR_INVALID, "Keep: before or after is missing");
    enum mu_status status = mu_wire_get_string(pb->host, MU_WIRE_TEXT, "Holder.host", out->host, sizeof out->host, err);
    if (status == MU_OK)
        status =
            mu_wire_get_string(pb->address, MU_WIRE_TEXT, "Holder.address", out->address, sizeof out->address, err);
    if (status)
        return status;
    if (pb->secret.len != (out->address[0] ? sizeof out->secret : 0))
        return mu_fail(err, MU_ERR_INVALID, "Holder.secret: %zu bytes are not allowed: %d with an address, else none",
                       pb->secret.len, (int)sizeof out->secret);
    if (pb->secret.len)
        memcpy(out->secret, pb->secret.data, sizeof out->secret);
    return MU_OK;
}

enum mu_status mu_wire_holders_from_pb(struct mu_wire_arena *arena, size_t count, Muster__V1__Holder *const *pb,
                                       const struct mu_holder **ret_holders, uint32_t *ret_count, struct mu_error *err)
{
    if (count > MU_HOLDERS_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "Assign.holders: %zu of them are not allowed: at most %d", count,
                       MU_HOLDERS_MAX);
    struct mu_holder *holders = mu_wire_arena_alloc(arena, sizeof *holders * count);
    enum mu_status status = MU_OK;
    if (!holders)
        return no_memory(err);
    for (size_t i = 0; i < count && status == MU_OK; i++)
        status = get_holder(pb[i], &holders[i], err);
    *ret_holders = count ? holders : NULL;
    *ret_count = (uint32_t)count;
    return status;
}

static enum mu_status get_pieces(struct mu_wire_arena *arena, const Muster__V1__Keep *pb, struct mu_keep_order *out,
                                 struct mu_error *err)
{
    if (pb->n_pieces != mu_layout_working(&out->layout))
        return mu_fail(err, MU_ERR_INVALID, "Keep.pieces: %zu of them are not allowed: the layout has %u", pb->n_pieces,
                       mu_layout_working(&out->layout));
    struct mu_written_piece *pieces = mu_wire_arena_alloc(arena, sizeof *pieces * pb->n_pieces);
    enum mu_status status = MU_OK;
    if (!pieces)
        return no_memory(err);
    for (size_t i = 0; i < pb->n_pieces && status == MU_OK; i++) {
        const Muster__V1__WrittenPiece *piece = pb->pieces[i];
        pieces[i].size_bytes = piece->size_bytes;
        status = mu_wire_get_string(piece->file, MU_WIRE_FILE, "WrittenPiece.file", pieces[i].file,
                                    sizeof pieces[i].file, err);
        if (status == MU_OK)
            status = mu_wire_get_hash(piece->checksum, "WrittenPiece.checksum", &pieces[i].checksum, err);
    }
    out->pieces = pieces;
    out->piece_count = (uint32_t)pb->n_pieces;
    return status;
}

enum mu_status mu_wire_keep_from_pb(struct mu_wire_arena *arena, const Muster__V1__Keep *pb, struct mu_keep_order *out,
                                    struct mu_error *err)
{
    int kind = 0;
    enum mu_status status = MU_OK;
    if ((status = mu_wire_get_enum((int)pb->kind, MU_KEEP_PUBLISH, MU_KEEP_DISCARD, "Keep.kind", &kind, err)) ||
        (status = mu_wire_get_string(pb->dir, MU_WIRE_TEXT, "Keep.dir", out->dir, sizeof out->dir, err)) ||
        (status = get_holder(pb->before, &out->before, err)) || (status = get_holder(pb->after, &out->after, err)))
        return status;
    if (out->dir[0] != '/')
        return mu_fail(err, MU_ERR_INVALID, "Keep.dir: '%s' is not allowed: an absolute path", out->dir);
    out->kind = (enum mu_keep_kind)kind;
    out->checkpoint = pb->checkpoint;
    if (kind != MU_KEEP_PUBLISH)
        return MU_OK;
    if (pb->step > MU_STEPS_MAX)
        return mu_fail(err, MU_ERR_INVALID, "Keep.step: value %llu is not allowed: at most %llu",
                       (unsigned long long)pb->step, (unsigned long long)MU_STEPS_MAX);
    out->step = pb->step;
    out->generation = pb->generation;
    out->wall_us = pb->wall_us;
    status = mu_wire_layout_from_pb(pb->layout, "Keep.layout", &out->layout, err);
    return status ? status : get_pieces(arena, pb, out, err);
}
