/* Amendments: in job specs, in assignments and in requests. */
#include "proto/wire_pb.h"

static void put_amendment(const struct mu_amendment *from, Muster__V1__Amendment *pb)
{
    muster__v1__amendment__init(pb);
    pb->version = from->version;
    pb->at_step = from->at_step;
    pb->settled = from->settled;
    pb->lr = from->terms.lr;
    if (from->fields & MU_AMEND_MIN_LR)
        pb->optional_min_lr_case = MUSTER__V1__AMENDMENT__OPTIONAL_MIN_LR_MIN_LR;
    pb->min_lr = from->terms.min_lr;
    if (from->fields & MU_AMEND_WARMUP)
        pb->optional_warmup_case = MUSTER__V1__AMENDMENT__OPTIONAL_WARMUP_WARMUP;
    pb->warmup = from->terms.warmup;
    pb->steps = from->terms.steps;
    if (from->fields & MU_AMEND_EVERY && from->terms.every == MU_EVERY_AUTO) {
        pb->optional_every_case = MUSTER__V1__AMENDMENT__OPTIONAL_EVERY_CHECKPOINT_EVERY_AUTO;
        pb->checkpoint_every_auto = true;
    } else if (from->fields & MU_AMEND_EVERY) {
        pb->optional_every_case = MUSTER__V1__AMENDMENT__OPTIONAL_EVERY_CHECKPOINT_EVERY;
        pb->checkpoint_every = from->terms.every;
    }
    pb->checkpoint_keep = from->terms.keep;
    if (from->fields & MU_AMEND_KEEP_EVERY)
        pb->optional_keep_every_case = MUSTER__V1__AMENDMENT__OPTIONAL_KEEP_EVERY_CHECKPOINT_KEEP_EVERY;
    pb->checkpoint_keep_every = from->terms.keep_every;
    pb->skip_first = from->skip_first;
    pb->skip_count = from->skip_count;
    pb->roll_back_to = from->back.checkpoint;
    pb->rolled_back_from_step = from->back.from_step;
    pb->void_before = from->back.void_before;
}

enum mu_status mu_wire_amendments_to_pb(struct mu_wire_arena *arena, const struct mu_amendments *amendments,
                                        size_t *ret_count, Muster__V1__Amendment ***ret_pb, struct mu_error *err)
{
    uint32_t count = amendments ? amendments->count : 0;
    if (count == 0)
        return MU_OK;
    Muster__V1__Amendment *pb = mu_wire_arena_alloc(arena, sizeof *pb * count);
    Muster__V1__Amendment **pointers = mu_wire_arena_alloc(arena, sizeof *pointers * count);
    if (!pb || !pointers)
        return mu_fail(err, MU_ERR_NO_MEMORY, "amendments: no memory");
    for (uint32_t i = 0; i < count; i++) {
        put_amendment(&amendments->list[i], &pb[i]);
        pointers[i] = &pb[i];
    }
    *ret_count = count;
    *ret_pb = pointers;
    return MU_OK;
}

static uint32_t given(bool is_given, enum mu_amend_field field)
{
    return is_given ? (uint32_t)field : 0;
}

void mu_wire_amendment_from_pb(const Muster__V1__Amendment *pb, struct mu_amendment *out)
{
    struct mu_job_terms *terms = &out->terms;
    bool is_auto = pb->optional_every_case == MUSTER__V1__AMENDMENT__OPTIONAL_EVERY_CHECKPOINT_EVERY_AUTO;
    memset(out, 0, sizeof *out); /* padding too: specs are compared as bytes */
    out->version = pb->version;
    out->at_step = pb->at_step;
    out->settled = pb->settled != 0;
    out->fields = given(pb->lr != 0, MU_AMEND_LR) | given(pb->optional_min_lr_case, MU_AMEND_MIN_LR) |
                  given(pb->optional_warmup_case, MU_AMEND_WARMUP) | given(pb->steps, MU_AMEND_STEPS) |
                  given(pb->optional_every_case, MU_AMEND_EVERY) | given(pb->checkpoint_keep, MU_AMEND_KEEP) |
                  given(pb->optional_keep_every_case, MU_AMEND_KEEP_EVERY) | given(pb->skip_count, MU_AMEND_SKIP) |
                  given(pb->roll_back_to, MU_AMEND_ROLL_BACK);
    terms->lr = pb->lr;
    terms->min_lr = pb->optional_min_lr_case ? pb->min_lr : 0;
    terms->warmup = pb->optional_warmup_case ? pb->warmup : 0;
    terms->steps = pb->steps;
    if (is_auto)
        terms->every = MU_EVERY_AUTO;
    else if (pb->optional_every_case) /* a number that is far too large is refused as one */
        terms->every = pb->checkpoint_every == MU_EVERY_AUTO ? MU_EVERY_AUTO - 1 : pb->checkpoint_every;
    terms->keep = pb->checkpoint_keep;
    terms->keep_every = pb->optional_keep_every_case ? pb->checkpoint_keep_every : 0;
    out->skip_first = pb->skip_count ? pb->skip_first : 0;
    out->skip_count = pb->skip_count;
    if (pb->roll_back_to == 0)
        return;
    out->back.checkpoint = pb->roll_back_to;
    out->back.from_step = pb->rolled_back_from_step;
    out->back.void_before = pb->void_before;
}

/* mu_job_spec_check judges what it makes of a job. */
enum mu_status mu_wire_amendments_from_pb(size_t count, Muster__V1__Amendment *const *pb, uint32_t newest,
                                          struct mu_amendments *out, struct mu_error *err)
{
    if (count > MU_AMENDMENTS_MAX)
        return mu_fail(err, MU_ERR_INVALID, "amendments: %zu of them are not allowed: at most %d", count,
                       MU_AMENDMENTS_MAX);
    memset(out, 0, sizeof *out);
    out->count = (uint32_t)count;
    out->newest = newest;
    for (size_t i = 0; i < count; i++)
        mu_wire_amendment_from_pb(pb[i], &out->list[i]);
    return MU_OK;
}
