/* Sets of chunks, one bit each: what a rank of a layout is to hold, what somebody holds, what moves.
 *
 * The runs of a share come from plan/layout.c; that they tile the model is checked in oracle_plan.c for every
 * generation. Whether several holders together have everything is answered here by itself, not by plan/reshard.c. */
#include <stdlib.h>

#include "tests/sim/sim.h"

static uint64_t run_mask(struct mu_chunk_run run)
{
    MU_ASSERT(run.first + run.count <= MU_SIM_CHUNKS_MAX);
    uint64_t ones = run.count == 64 ? UINT64_MAX : (UINT64_C(1) << run.count) - 1;
    return ones << run.first;
}

uint64_t mu_sim_share_chunks(const struct mu_sim *sim, const struct mu_layout *layout, uint32_t rank,
                             enum mu_share share)
{
    struct mu_chunk_run runs[MU_RUNS_MAX];
    uint64_t chunks = 0;
    if (rank >= mu_layout_working(layout))
        return 0;
    uint32_t count = mu_layout_runs(&sim->model, layout, rank, share, runs);
    for (uint32_t i = 0; i < count; i++)
        chunks |= run_mask(runs[i]);
    return chunks;
}

struct mu_sim_mask mu_sim_share_mask(const struct mu_sim *sim, const struct mu_layout *layout, uint32_t rank)
{
    uint64_t mirror = mu_sim_share_chunks(sim, layout, rank, MU_SHARE_MIRROR);
    return (struct mu_sim_mask){mu_sim_share_chunks(sim, layout, rank, MU_SHARE_PARAMS) | mirror,
                                mu_sim_share_chunks(sim, layout, rank, MU_SHARE_MOMENTS) | mirror};
}

struct mu_sim_mask mu_sim_update_mask(const struct mu_sim *sim, const struct mu_layout *layout, uint32_t rank)
{
    uint64_t chunks = mu_sim_share_chunks(sim, layout, rank, layout->sharded ? MU_SHARE_OWNED : MU_SHARE_PARAMS) |
                      mu_sim_share_chunks(sim, layout, rank, MU_SHARE_MIRROR);
    return (struct mu_sim_mask){chunks, chunks};
}

struct mu_sim_mask mu_sim_held_mask(const struct mu_sim *sim, const struct mu_held *held, uint64_t step)
{
    struct mu_sim_mask mask = {0, 0};
    if (!held->has_state)
        return mask;
    if (held->step + 1 == step && held->has_gradient) /* of what it stepped with; roll forward drops the rest */
        return mu_sim_update_mask(sim, &held->shares[0].layout, held->shares[0].rank);
    for (uint32_t i = 0; i < held->share_count && held->step == step; i++) {
        const struct mu_held_share *share = &held->shares[i];
        struct mu_sim_mask all = mu_sim_share_mask(sim, &share->layout, share->rank);
        if (share->owned_only)
            all.params = mu_sim_share_chunks(sim, &share->layout, share->rank, MU_SHARE_OWNED) |
                         mu_sim_share_chunks(sim, &share->layout, share->rank, MU_SHARE_MIRROR);
        mask = mu_sim_mask_or(mask, all);
    }
    return mask;
}

uint64_t mu_sim_held_copies(const struct mu_sim *sim, const struct mu_held *held, uint64_t step)
{
    uint64_t chunks = 0;
    for (uint32_t i = 0; i < held->share_count && held->step == step; i++) {
        const struct mu_held_share *share = &held->shares[i];
        if (!share->owned_only)
            chunks |= mu_sim_share_chunks(sim, &share->layout, share->rank, MU_SHARE_COPY);
    }
    return chunks;
}

struct mu_sim_mask mu_sim_mask_or(struct mu_sim_mask a, struct mu_sim_mask b)
{
    return (struct mu_sim_mask){a.params | b.params, a.moments | b.moments};
}

bool mu_sim_mask_covers(struct mu_sim_mask a, struct mu_sim_mask b)
{
    return (b.params & ~a.params) == 0 && (b.moments & ~a.moments) == 0;
}

bool mu_sim_mask_empty(struct mu_sim_mask a)
{
    return a.params == 0 && a.moments == 0;
}

struct mu_sim_mask mu_sim_move_mask(const struct mu_move *move)
{
    uint64_t chunks = run_mask(move->run);
    return (struct mu_sim_mask){move->kinds & MU_MOVE_PARAMS ? chunks : 0, move->kinds & MU_MOVE_MOMENTS ? chunks : 0};
}

void mu_sim_state_take(struct mu_sim_state *to, const struct mu_sim_state *from, struct mu_sim_mask what)
{
    for (uint32_t c = 0; c < MU_SIM_CHUNKS_MAX; c++) {
        if (what.params >> c & 1)
            to->values.params[c] = from->values.params[c];
        if (what.moments >> c & 1)
            to->values.moments[c] = from->values.moments[c];
    }
    to->has = mu_sim_mask_or(to->has, what);
}

/* ---- several holders ---- */

void mu_sim_union_add(struct mu_sim_union *u, const struct mu_held *held)
{
    if (!held->has_state && !held->has_result)
        return; /* an idle rank holds nothing, but knows the result of the vote */
    u->held = mu_sim_grow(u->held, u->count, &u->capacity, sizeof *u->held);
    u->held[u->count++] = held;
}

static bool result_is_known(const struct mu_sim_union *u, uint64_t update)
{
    for (uint32_t i = 0; i < u->count; i++) {
        if (u->held[i]->has_result && u->held[i]->result.step == update)
            return true;
    }
    return false;
}

static bool is_complete(const struct mu_sim *sim, const struct mu_sim_union *u, uint64_t step)
{
    struct mu_sim_mask mask = {0, 0};
    bool may_roll = step > 0 && result_is_known(u, step - 1);
    for (uint32_t i = 0; i < u->count; i++) {
        if (u->held[i]->step == step || may_roll)
            mask = mu_sim_mask_or(mask, mu_sim_held_mask(sim, u->held[i], step));
    }
    return mu_sim_mask_covers(mask, (struct mu_sim_mask){sim->all_chunks, sim->all_chunks});
}

bool mu_sim_union_newest(const struct mu_sim *sim, const struct mu_sim_union *u, uint64_t *ret_step)
{
    bool found = false;
    for (uint32_t i = 0; i < u->count; i++) {
        if (!u->held[i]->has_state)
            continue;
        for (uint64_t step = u->held[i]->step; step <= u->held[i]->step + u->held[i]->has_gradient; step++) {
            if ((!found || step > *ret_step) && is_complete(sim, u, step)) {
                *ret_step = step;
                found = true;
            }
        }
    }
    return found;
}
