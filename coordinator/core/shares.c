/* Who holds what: whether some workers together have the whole state of a step. Asked only when somebody leaves, comes
 * back or saves, never in a step's way. */
#include "coordinator/core/internal.h"

#include <string.h>

enum { STEPS_TRIED = 8 }; /* steps are at most one apart in a generation; older states may lie around in spares */

bool shares_fit(const struct job *job, const struct mu_held *held, struct mu_error *err)
{
    for (uint32_t i = 0; i < held->share_count; i++) {
        if (mu_layout_check(&held->shares[i].layout, &job->record.spec, err) != MU_OK)
            return false;
        if (held->shares[i].rank >= mu_layout_working(&held->shares[i].layout)) {
            (void)mu_fail(err, MU_ERR_INVALID, "rank %u of %u working ones", held->shares[i].rank,
                          mu_layout_working(&held->shares[i].layout));
            return false;
        }
    }
    return true;
}

void holds_own_share(const struct job *job, struct worker *worker, uint64_t step)
{
    bool idle = mu_layout_is_idle(&job->layout, worker->rank);
    struct mu_held *held = &worker->status.held;
    held->has_state = !idle;
    held->has_gradient = false;
    held->step = step;
    held->share_count = idle ? 0 : 1;
    held->shares[0] = (struct mu_held_share){.layout = job->layout, .rank = worker->rank};
    suspect_status(job, worker);
}

/* What of `held` is, or becomes by rolling forward, state of `step`. */
static uint32_t shares_at(const struct mu_held *held, uint64_t step, bool may_roll_forward,
                          struct mu_held_share out[MU_HELD_SHARES_MAX])
{
    if (!held->has_state)
        return 0;
    if (held->step == step) {
        memcpy(out, held->shares, held->share_count * sizeof *out);
        return held->share_count;
    }
    if (held->step + 1 != step || !held->has_gradient || !may_roll_forward)
        return 0;
    out[0] = held->shares[0];
    out[0].owned_only = out[0].owned_only || out[0].layout.sharded; /* what the others update is not sent again */
    return 1;
}

static bool is_everything(const struct mu_held_share *share)
{
    return share->layout.tp == 1 && share->layout.pp == 1 && !share->layout.sharded && !share->owned_only;
}

typedef bool holder_filter(const struct worker *worker, const struct worker *but);

/* One of them knows the result of the update from `step`: then every rank that has its gradient can apply it. (What
 * only one knows who leaves is gone with him.) */
static bool result_is_known(struct mu_coord *coord, const struct job *job, uint64_t step, holder_filter *counts,
                            const struct worker *but)
{
    for (const struct worker *w = next_worker(coord, job, NULL); w; w = next_worker(coord, job, w)) {
        const struct mu_held *held = &w->status.held;
        if (!w->lost && counts(w, but) && held->has_result && held->result.step == step)
            return true;
    }
    return false;
}

/* Do those that the filter lets through have everything of `step`? */
static bool are_whole(struct mu_coord *coord, const struct job *job, uint64_t step, holder_filter *counts,
                      const struct worker *but)
{
    bool may_roll_forward = step > 0 && result_is_known(coord, job, step - 1, counts, but);
    uint32_t count = 0, used = 0;
    for (const struct worker *w = next_worker(coord, job, NULL); w; w = next_worker(coord, job, w)) {
        if (w->lost || !counts(w, but))
            continue;
        struct mu_held_share *own = &coord->shares[used];
        uint32_t share_count = shares_at(&w->status.held, step, may_roll_forward, own);
        if (share_count == 0)
            continue;
        for (uint32_t i = 0; i < share_count; i++) {
            if (is_everything(&own[i]))
                return true;
        }
        coord->holders[count++] = (struct mu_reshard_holder){.shares = own, .share_count = share_count};
        used += share_count;
    }
    return count > 0 && mu_reshard_complete(&job->model, coord->holders, count);
}

static bool holds_still(const struct worker *worker, const struct worker *but)
{
    (void)but;
    return worker->session != 0 && is_still(worker);
}

static bool stays(const struct worker *worker, const struct worker *but)
{
    (void)but;
    return may_take_part(worker);
}

static bool stays_and_runs(const struct worker *worker, const struct worker *but)
{
    (void)but;
    return worker->ready && worker->session != 0 && !worker->draining;
}

static bool is_another(const struct worker *worker, const struct worker *but)
{
    return worker != but && worker->session != 0;
}

bool others_are_whole(struct mu_coord *coord, const struct job *job, const struct worker *but, uint64_t step)
{
    /* A running member moves on: that it is beyond the step is as good. */
    for (const struct worker *w = next_worker(coord, job, NULL); w; w = next_worker(coord, job, w)) {
        if (!w->lost && is_another(w, but) && w->status.held.has_state && w->status.held.step > step)
            return true;
    }
    return are_whole(coord, job, step, is_another, but);
}

bool staying_are_whole(struct mu_coord *coord, const struct job *job)
{
    uint32_t count = 0;
    for (uint32_t rank = 0; rank < job->world; rank++) {
        const struct worker *worker = member_at(coord, job, rank);
        if (!worker || worker->lost || !stays_and_runs(worker, NULL) || mu_layout_is_idle(&job->layout, rank))
            continue;
        coord->shares[count] = (struct mu_held_share){.layout = job->layout, .rank = rank};
        if (is_everything(&coord->shares[count]))
            return true;
        coord->holders[count] = (struct mu_reshard_holder){.shares = &coord->shares[count], .share_count = 1};
        count++;
    }
    return count > 0 && mu_reshard_complete(&job->model, coord->holders, count);
}

/* The newest step below `limit` that anybody's state is of, or would be after rolling forward. */
static bool next_step_down(struct mu_coord *coord, const struct job *job, uint64_t limit, uint64_t *ret_step)
{
    bool any = false;
    for (const struct worker *w = next_worker(coord, job, NULL); w; w = next_worker(coord, job, w)) {
        const struct mu_held *held = &w->status.held;
        if (w->lost || !holds_still(w, NULL) || !held->has_state)
            continue;
        for (uint64_t step = held->step; step <= held->step + held->has_gradient; step++) {
            if (step < limit && (!any || step > *ret_step)) {
                *ret_step = step;
                any = true;
            }
        }
    }
    return any;
}

uint64_t newest_whole_step(struct mu_coord *coord, const struct job *job, bool *ret_any)
{
    uint64_t step = 0, limit = UINT64_MAX;
    *ret_any = false;
    for (int tried = 0; tried < STEPS_TRIED && next_step_down(coord, job, limit, &step); tried++) {
        if (are_whole(coord, job, step, holds_still, NULL)) {
            *ret_any = true;
            return step;
        }
        limit = step;
    }
    return 0;
}

/* Draining workers stay out, unless nobody else has what they hold: then they are needed once more. */
bool draining_are_needed(struct mu_coord *coord, const struct job *job)
{
    bool any = false;
    if (MU_MUTANT(MU_MUT_RELEASE_LAST_HOLDER))
        return false;
    for (const struct worker *w = next_worker(coord, job, NULL); w && !any; w = next_worker(coord, job, w))
        any = w->draining && !w->lost && w->status.held.has_state;
    if (!any)
        return false;
    uint64_t newest = newest_whole_step(coord, job, &any);
    return any && !are_whole(coord, job, newest, stays, NULL);
}

bool same_columns(const struct mu_layout *a, const struct mu_layout *b)
{
    return a->tp == b->tp && a->pp == b->pp &&
           memcmp(a->stage_first, b->stage_first, (a->pp + 1u) * sizeof a->stage_first[0]) == 0;
}

bool holds_piece(const struct worker *worker, const struct mu_layout *layout, uint32_t piece, uint64_t step)
{
    const struct mu_held *held = &worker->status.held;
    if (worker->lost || worker->session == 0 || worker->status.phase != MU_PHASE_PARKED || !held->has_state ||
        held->step != step)
        return false;
    if (MU_MUTANT(MU_MUT_PIECE_FROM_ANYONE))
        return true;
    struct mu_coords wanted = mu_layout_coords(layout, piece);
    for (uint32_t i = 0; i < held->share_count; i++) {
        const struct mu_held_share *share = &held->shares[i];
        struct mu_coords own = mu_layout_coords(&share->layout, share->rank);
        if (is_everything(share))
            return true;
        if (share->owned_only || !same_columns(&share->layout, layout) || own.t != wanted.t || own.p != wanted.p)
            continue;
        bool same_part = layout->sharded && share->layout.dp == layout->dp && own.d == wanted.d;
        if (!share->layout.sharded || same_part)
            return true;
    }
    return false;
}
