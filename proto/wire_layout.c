/* Layouts and the parts of numeric identities: in messages of both directions, in records and in views. */
#include "proto/wire_pb.h"

#include <string.h>

static enum mu_status no_memory(const char *field, struct mu_error *err)
{
    return mu_fail(err, MU_ERR_NO_MEMORY, "%s: no memory", field);
}

/* What must hold whatever the job is; whether a layout fits a job is for its core to judge (mu_layout_check). */
static enum mu_status check_layout(const struct mu_layout *layout, const char *field, struct mu_error *err)
{
    bool power_of_two = layout->tp && (layout->tp & (layout->tp - 1)) == 0;
    if (!power_of_two || layout->tp > MU_SLICES_MAX || layout->pp == 0 || layout->pp > MU_STAGES_MAX ||
        layout->dp == 0 || layout->dp > MU_WORKERS_MAX || layout->idle > MU_WORKERS_MAX)
        return mu_fail(err, MU_ERR_INVALID,
                       "%s: tp %u x pp %u x dp %u with %u idle is not allowed: tp a power of two up to %d, pp 1 to %d, "
                       "dp 1 to %d",
                       field, layout->tp, layout->pp, layout->dp, layout->idle, MU_SLICES_MAX, MU_STAGES_MAX,
                       MU_WORKERS_MAX);
    uint64_t ranks = (uint64_t)layout->tp * layout->pp * layout->dp + layout->idle;
    if (ranks > MU_WORKERS_MAX)
        return mu_fail(err, MU_ERR_INVALID, "%s: %llu ranks are not allowed: at most %d", field,
                       (unsigned long long)ranks, MU_WORKERS_MAX);
    if (layout->buddy_shift > 0 && layout->buddy_shift >= mu_layout_buddy_group(layout))
        return mu_fail(err, MU_ERR_INVALID,
                       "%s.buddy_shift: value %u is not allowed: below %u, the ranks that guard each other", field,
                       layout->buddy_shift, mu_layout_buddy_group(layout));
    for (uint32_t stage = 0; stage < layout->pp; stage++) {
        uint32_t first = layout->stage_first[stage], end = layout->stage_first[stage + 1];
        if ((stage == 0 && first != 0) || end <= first || end > MU_LAYERS_MAX)
            return mu_fail(err, MU_ERR_INVALID,
                           "%s.stage_first: stage %u with layers %u to %u is not allowed: from 0 on, ascending, at "
                           "most %d",
                           field, stage, first, end, MU_LAYERS_MAX);
    }
    return MU_OK;
}

enum mu_status mu_wire_layout_to_pb(struct mu_wire_arena *arena, const struct mu_layout *layout, const char *field,
                                    Muster__V1__Layout **ret_pb, struct mu_error *err)
{
    enum mu_status status = check_layout(layout, field, err);
    if (status)
        return status;
    uint32_t stages = layout->pp + 1;
    Muster__V1__Layout *pb = mu_wire_arena_alloc(arena, sizeof *pb);
    uint32_t *firsts = mu_wire_arena_alloc(arena, sizeof *firsts * stages);
    if (!pb || !firsts)
        return no_memory(field, err);
    muster__v1__layout__init(pb);
    pb->tp = layout->tp;
    pb->pp = layout->pp;
    pb->dp = layout->dp;
    pb->idle = layout->idle;
    pb->sharded = layout->sharded;
    pb->buddy_shift = layout->buddy_shift;
    for (uint32_t i = 0; i < stages; i++)
        firsts[i] = layout->stage_first[i];
    pb->n_stage_first = stages;
    pb->stage_first = firsts;
    *ret_pb = pb;
    return MU_OK;
}

enum mu_status mu_wire_layout_from_pb(const Muster__V1__Layout *pb, const char *field, struct mu_layout *ret_layout,
                                      struct mu_error *err)
{
    if (!pb)
        return mu_fail(err, MU_ERR_INVALID, "%s: is missing", field);
    struct mu_layout layout;
    memset(&layout, 0, sizeof layout); /* with what lies between the fields: layouts are compared as bytes in tests */
    layout.tp = pb->tp;
    layout.pp = pb->pp;
    layout.dp = pb->dp;
    layout.idle = pb->idle;
    layout.sharded = pb->sharded;
    layout.buddy_shift = pb->buddy_shift;
    if (pb->n_stage_first != (size_t)pb->pp + 1 || pb->n_stage_first > MU_STAGES_MAX + 1)
        return mu_fail(err, MU_ERR_INVALID,
                       "%s.stage_first: %zu of them are not allowed: pp + 1 (%llu), and at most %d", field,
                       pb->n_stage_first, (unsigned long long)pb->pp + 1, MU_STAGES_MAX + 1);
    for (size_t i = 0; i < pb->n_stage_first; i++) {
        if (pb->stage_first[i] > MU_LAYERS_MAX)
            return mu_fail(err, MU_ERR_INVALID, "%s.stage_first: layer %u is not allowed: at most %d", field,
                           pb->stage_first[i], MU_LAYERS_MAX);
        layout.stage_first[i] = (uint16_t)pb->stage_first[i];
    }
    enum mu_status status = check_layout(&layout, field, err);
    if (status == MU_OK)
        memcpy(ret_layout, &layout, sizeof layout);
    return status;
}

enum mu_status mu_wire_identity_to_pb(struct mu_wire_arena *arena, const struct mu_identity_parts *parts,
                                      size_t *ret_count, Muster__V1__IdentityPart ***ret_pb, struct mu_error *err)
{
    *ret_count = 0;
    *ret_pb = NULL;
    if (parts->count == 0)
        return MU_OK;
    if (parts->count > MU_IDENTITY_PARTS_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "identity_parts: %u of them are not allowed: at most %d", parts->count,
                       MU_IDENTITY_PARTS_MAX);
    Muster__V1__IdentityPart *all = mu_wire_arena_alloc(arena, sizeof *all * parts->count);
    Muster__V1__IdentityPart **pointers = mu_wire_arena_alloc(arena, sizeof *pointers * parts->count);
    if (!all || !pointers)
        return no_memory("identity_parts", err);
    for (uint32_t i = 0; i < parts->count; i++) {
        muster__v1__identity_part__init(&all[i]);
        pointers[i] = &all[i];
        all[i].hash = parts->parts[i].hash;
        enum mu_status status = mu_wire_put_string(parts->parts[i].name, MU_WIRE_WORD, "IdentityPart.kernel",
                                                   MU_IDENTITY_NAME_SIZE, &all[i].kernel, err);
        if (status)
            return status;
    }
    *ret_count = parts->count;
    *ret_pb = pointers;
    return MU_OK;
}

enum mu_status mu_wire_identity_from_pb(size_t count, Muster__V1__IdentityPart *const *pb,
                                        struct mu_identity_parts *ret_parts, struct mu_error *err)
{
    if (count > MU_IDENTITY_PARTS_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "identity_parts: %zu of them are not allowed: at most %d", count,
                       MU_IDENTITY_PARTS_MAX);
    memset(ret_parts, 0, sizeof *ret_parts);
    for (size_t i = 0; i < count; i++) {
        enum mu_status status = mu_wire_get_string(pb[i]->kernel, MU_WIRE_WORD, "IdentityPart.kernel",
                                                   ret_parts->parts[i].name, MU_IDENTITY_NAME_SIZE, err);
        if (status)
            return status;
        ret_parts->parts[i].hash = pb[i]->hash;
    }
    ret_parts->count = (uint32_t)count;
    return MU_OK;
}
