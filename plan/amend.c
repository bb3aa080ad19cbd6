#include "plan/amend.h"

#include <inttypes.h>
#include <string.h>

#define POSITION_MAX (1ull << 60)

/* The spec as if the terms of that boundary had been submitted. */
static void spec_at(const struct mu_job_spec *spec, uint64_t step, struct mu_job_spec *ret)
{
    const struct mu_job_terms terms = mu_job_terms(spec, step);
    memcpy(ret, spec, sizeof *ret);
    ret->amendments.count = ret->amendments.newest = 0;
    ret->optimizer.lr = terms.lr;
    ret->optimizer.min_lr = terms.min_lr;
    ret->optimizer.warmup = terms.warmup;
    ret->steps = terms.steps;
    ret->checkpoint.every = terms.every;
    ret->checkpoint.keep_every = terms.keep_every;
    ret->checkpoint.keep = terms.keep;
}

/* Ranges that overlap would count some sequences twice. */
static enum mu_status check_skip(const struct mu_amendments *all, uint32_t index, struct mu_error *err)
{
    const struct mu_amendment *one = &all->list[index];
    if (one->skip_count == 0 || one->skip_count > POSITION_MAX || one->skip_first > POSITION_MAX)
        return mu_fail(err, MU_ERR_INVALID,
                       "skip: %" PRIu64 " sequences from %" PRIu64 " on are not allowed: at least 1, up to 2^60",
                       one->skip_count, one->skip_first);
    for (uint32_t i = 0; i < index; i++) {
        const struct mu_amendment *other = &all->list[i];
        if (other->fields & MU_AMEND_SKIP && one->skip_first < other->skip_first + other->skip_count &&
            other->skip_first < one->skip_first + one->skip_count)
            return mu_fail(err, MU_ERR_INVALID,
                           "skip: %" PRIu64 " sequences from %" PRIu64 " on are not allowed: amendment %" PRIu32
                           " skips %" PRIu64 " from %" PRIu64 " on; leave those out",
                           one->skip_count, one->skip_first, other->version, other->skip_count, other->skip_first);
    }
    return MU_OK;
}

static bool is_before(const struct mu_amendment *a, const struct mu_amendment *b)
{
    return a->at_step != b->at_step ? a->at_step < b->at_step : a->version < b->version;
}

static bool in_range(const struct mu_amendment *one)
{
    const struct mu_job_terms *terms = &one->terms;
    bool lr = !(one->fields & MU_AMEND_LR) || (terms->lr > 0 && terms->lr <= 10);
    bool min_lr = !(one->fields & MU_AMEND_MIN_LR) || (terms->min_lr >= 0 && terms->min_lr <= 10);
    bool steps = !(one->fields & MU_AMEND_STEPS) || (terms->steps >= 1 && terms->steps <= MU_STEPS_MAX);
    bool every = terms->every <= MU_STEPS_MAX || terms->every == MU_EVERY_AUTO;
    bool keep = !(one->fields & MU_AMEND_KEEP) || (terms->keep >= 1 && terms->keep <= MU_KEEP_MAX);
    return lr && min_lr && steps && every && keep && terms->warmup <= MU_STEPS_MAX &&
           terms->keep_every <= MU_STEPS_MAX && one->at_step <= MU_STEPS_MAX &&
           (!(one->fields & MU_AMEND_ROLL_BACK) || one->back.checkpoint < one->back.void_before);
}

/* Each field alone: how they go together was judged when they were made, and where two of them have changed places
 * since, because one got a later step, what they make is odd and no less defined. */
enum mu_status mu_amend_check(const struct mu_job_spec *spec, struct mu_error *err)
{
    const struct mu_amendments *all = &spec->amendments;
    if (all->count > MU_AMENDMENTS_MAX)
        return mu_fail(err, MU_ERR_INVALID, "amendments: %" PRIu32 " of them are not allowed: at most %d", all->count,
                       MU_AMENDMENTS_MAX);
    for (uint32_t i = 0; i < all->count; i++) {
        const struct mu_amendment *one = &all->list[i];
        bool known = one->version >= 1 && one->version <= all->newest && !(one->fields & ~(uint32_t)MU_AMEND_ALL);
        bool ordered = i == 0 || !is_before(one, &all->list[i - 1]);
        if (!known || !ordered || !in_range(one))
            return mu_fail(err, MU_ERR_INVALID,
                           "amendments: version %" PRIu32 " at step %" PRIu64
                           " is not allowed: known fields within their ranges, ascending steps",
                           one->version, one->at_step);
        enum mu_status status = one->fields & MU_AMEND_SKIP ? check_skip(all, i, err) : MU_OK;
        if (status)
            return status;
    }
    return MU_OK;
}

static void sort(struct mu_amendments *all)
{
    for (uint32_t i = 1; i < all->count; i++) {
        const struct mu_amendment one = all->list[i];
        uint32_t at = i;
        for (; at > 0 && is_before(&one, &all->list[at - 1]); at--)
            all->list[at] = all->list[at - 1];
        all->list[at] = one;
    }
}

static void remove_at(struct mu_amendments *all, uint32_t index)
{
    all->count--;
    memmove(&all->list[index], &all->list[index + 1], (all->count - index) * sizeof all->list[0]);
    memset(&all->list[all->count], 0, sizeof all->list[0]); /* specs are compared as bytes */
}

/* What was trained on before the amendment's step has been trained on. */
static void clip_skip(struct mu_job_spec *spec, struct mu_amendment *one)
{
    one->fields &= ~(uint32_t)MU_AMEND_SKIP; /* the ranges of the others say where the step begins */
    uint64_t begin = mu_job_position(spec, one->at_step * spec->batch.sequences);
    uint64_t end = one->skip_first + one->skip_count;
    one->skip_first = one->skip_first > begin ? one->skip_first : begin;
    one->skip_count = end > one->skip_first ? end - one->skip_first : 0;
    if (one->skip_count > 0)
        one->fields |= MU_AMEND_SKIP;
    else
        one->skip_first = 0;
}

void mu_amend_place(struct mu_job_spec *spec, uint64_t boundary)
{
    struct mu_amendments *all = &spec->amendments;
    for (uint32_t i = 0; i < all->count; i++) {
        struct mu_amendment *one = &all->list[i];
        if (one->settled)
            continue;
        one->at_step = one->at_step > boundary ? one->at_step : boundary;
        if (one->fields & MU_AMEND_SKIP)
            clip_skip(spec, one);
    }
    sort(all);
}

void mu_amend_settle(struct mu_job_spec *spec)
{
    for (uint32_t i = 0; i < spec->amendments.count; i++)
        spec->amendments.list[i].settled = true;
}

bool mu_amend_pending(const struct mu_job_spec *spec)
{
    for (uint32_t i = 0; i < spec->amendments.count; i++) {
        if (!spec->amendments.list[i].settled)
            return true;
    }
    return false;
}

void mu_amend_cut(struct mu_job_spec *spec, uint64_t step)
{
    for (uint32_t i = spec->amendments.count; i-- > 0;) {
        const struct mu_amendment *one = &spec->amendments.list[i];
        bool is_final = one->settled || one->fields & MU_AMEND_ROLL_BACK;
        if (one->at_step > step || !is_final)
            remove_at(&spec->amendments, i);
    }
}

uint32_t mu_amend_era(const struct mu_amendments *amendments)
{
    uint32_t era = 0;
    for (uint32_t i = 0; i < amendments->count; i++) {
        const struct mu_amendment *one = &amendments->list[i];
        if (one->fields & MU_AMEND_ROLL_BACK && one->version > era)
            era = one->version;
    }
    return era;
}

bool mu_amend_rolls_back(const struct mu_job_spec *spec)
{
    for (uint32_t i = 0; i < spec->amendments.count; i++) {
        if (spec->amendments.list[i].fields & MU_AMEND_ROLL_BACK && !spec->amendments.list[i].settled)
            return true;
    }
    return false;
}

static enum mu_status check_fields(const struct mu_job_spec *spec, const struct mu_amendment *amendment, uint64_t now,
                                   struct mu_error *err)
{
    uint64_t end = mu_job_end(spec), from = amendment->at_step > now ? amendment->at_step : now;
    if (amendment->fields == 0)
        return mu_fail(err, MU_ERR_INVALID, "amendment: nothing to change: give at least one field");
    if (spec->amendments.count == MU_AMENDMENTS_MAX)
        return mu_fail_for(err, MU_ERR_LIMIT, MU_REASON_LIMIT_REACHED, 0,
                           "job '%s' has %d amendments, the most that are possible: branch a new job from a checkpoint",
                           spec->name, MU_AMENDMENTS_MAX);
    if (amendment->at_step && amendment->at_step <= now)
        return mu_fail(err, MU_ERR_INVALID,
                       "at_step: value %" PRIu64 " is not allowed: more than %" PRIu64
                       ", which is done; leave it out for the next boundary",
                       amendment->at_step, now);
    if (amendment->at_step > end)
        return mu_fail(err, MU_ERR_INVALID,
                       "at_step: value %" PRIu64 " is not allowed: up to %" PRIu64 ", where the job ends",
                       amendment->at_step, end);
    if (amendment->fields & MU_AMEND_STEPS && amendment->terms.steps < from)
        return mu_fail(err, MU_ERR_INVALID,
                       "steps: value %" PRIu64 " is not allowed: at least %" PRIu64 ", where it takes effect",
                       amendment->terms.steps, from);
    return MU_OK;
}

static struct mu_amendment *find(struct mu_amendments *all, uint32_t version)
{
    uint32_t i = 0;
    while (all->list[i].version != version)
        i++;
    return &all->list[i];
}

/* From each of them on the job is one that could have been submitted so. */
static enum mu_status check_together(const struct mu_job_spec *spec, struct mu_error *err)
{
    enum mu_status status = mu_amend_check(spec, err);
    for (uint32_t i = 0; i < spec->amendments.count && status == MU_OK; i++) {
        struct mu_job_spec then;
        spec_at(spec, spec->amendments.list[i].at_step, &then);
        status = mu_job_spec_check(&then, err);
    }
    return status;
}

enum mu_status mu_amend_add(struct mu_job_spec *spec, const struct mu_amendment *amendment, uint64_t now,
                            struct mu_error *err)
{
    struct mu_job_spec changed;
    enum mu_status status = check_fields(spec, amendment, now, err);
    if (status)
        return status;
    memcpy(&changed, spec, sizeof changed);
    struct mu_amendment *one = &changed.amendments.list[changed.amendments.count++];
    memcpy(one, amendment, sizeof *one);
    uint32_t version = one->version = ++changed.amendments.newest;
    one->settled = false;
    mu_amend_place(&changed, now);
    one = find(&changed.amendments, version);
    if (amendment->fields & MU_AMEND_SKIP && !(one->fields & MU_AMEND_SKIP))
        return mu_fail(err, MU_ERR_INVALID,
                       "skip: %" PRIu64 " sequences from %" PRIu64 " on are not allowed: they were trained on before",
                       amendment->skip_count, amendment->skip_first);
    if ((status = check_together(&changed, err)))
        return status;
    one->settled = (one->fields & ~(uint32_t)MU_AMEND_POLICY) == 0;
    memcpy(spec, &changed, sizeof *spec);
    return MU_OK;
}

/* No I/O: the builtin, so that <stdio.h> stays out of here. */
void mu_amend_describe(const struct mu_amendment *amendment, char out[MU_AMENDMENT_TEXT_SIZE])
{
    const struct mu_job_terms *terms = &amendment->terms;
    const struct {
        uint32_t field;
        const char *name;
        uint64_t value;
    } numbers[] = {{MU_AMEND_WARMUP, "warmup", terms->warmup},
                   {MU_AMEND_STEPS, "steps", terms->steps},
                   {MU_AMEND_EVERY, "checkpoint.every", terms->every},
                   {MU_AMEND_KEEP, "checkpoint.keep", terms->keep},
                   {MU_AMEND_KEEP_EVERY, "checkpoint.keep_every", terms->keep_every}};
    size_t used = 0, size = MU_AMENDMENT_TEXT_SIZE;
    out[0] = 0;
    if (amendment->fields & MU_AMEND_ROLL_BACK)
        used += (size_t)__builtin_snprintf(out + used, size - used,
                                           ", rolled back to checkpoint %" PRIu64 " from step %" PRIu64,
                                           amendment->back.checkpoint, amendment->back.from_step);
    if (amendment->fields & MU_AMEND_LR)
        used += (size_t)__builtin_snprintf(out + used, size - used, ", lr %g", terms->lr);
    if (amendment->fields & MU_AMEND_MIN_LR)
        used += (size_t)__builtin_snprintf(out + used, size - used, ", min_lr %g", terms->min_lr);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        if (!(amendment->fields & numbers[i].field))
            continue;
        bool is_auto = numbers[i].field == MU_AMEND_EVERY && numbers[i].value == MU_EVERY_AUTO;
        used += is_auto ? (size_t)__builtin_snprintf(out + used, size - used, ", %s auto", numbers[i].name)
                        : (size_t)__builtin_snprintf(out + used, size - used, ", %s %" PRIu64, numbers[i].name,
                                                     numbers[i].value);
    }
    if (amendment->fields & MU_AMEND_SKIP)
        __builtin_snprintf(out + used, size - used, ", skip %" PRIu64 " sequences from %" PRIu64 " on",
                           amendment->skip_count, amendment->skip_first);
    if (out[0])
        memmove(out, out + 2, strlen(out + 2) + 1);
    else
        __builtin_snprintf(out, size, "nothing (what it was to skip was trained on before)");
}
