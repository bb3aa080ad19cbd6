/* Invariants of plans and layouts: every chunk has one primary owner, every share can be filled, no newer step could be
 * brought back. Whether the planner's own helpers (plan/reshard.c, plan/plan.c) say so is not asked. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "tests/sim/oracle.h"

/* ---- layouts ---- */

/* With buddies every chunk is held twice wherever there are two ranks. */
static void check_mirrors(struct mu_sim *sim, uint64_t number, const struct mu_layout *layout)
{
    uint64_t once = 0, twice = 0;
    for (uint32_t rank = 0; rank < mu_layout_working(layout); rank++) {
        struct mu_sim_mask holds = mu_sim_share_mask(sim, layout, rank);
        uint64_t chunks = holds.params & holds.moments;
        twice |= once & chunks;
        once |= chunks;
    }
    if (mu_layout_working(layout) > 1 && twice != sim->all_chunks)
        mu_sim_violate(sim, "generation %" PRIu64 ": some chunk has one holder in spite of buddies", number);
}

void mu_sim_oracle_check_layout(struct mu_sim *sim, uint64_t number, const struct mu_layout *layout)
{
    uint64_t primary = 0, moments = 0, copies = 0;
    struct mu_error err = {0};
    if (mu_layout_check(layout, &sim->spec, &err) != MU_OK) {
        mu_sim_violate(sim, "generation %" PRIu64 ": %s", number, err.text);
        return;
    }
    for (uint32_t rank = 0; rank < mu_layout_working(layout); rank++) {
        uint64_t own = mu_sim_share_chunks(sim, layout, rank, MU_SHARE_PRIMARY);
        uint64_t all = mu_sim_share_chunks(sim, layout, rank, MU_SHARE_PARAMS);
        uint64_t owned = mu_sim_share_chunks(sim, layout, rank, MU_SHARE_OWNED);
        if (own & primary)
            mu_sim_violate(sim, "generation %" PRIu64 ": rank %u owns a chunk that another one owns", number, rank);
        if (own & ~owned || owned & ~all)
            mu_sim_violate(sim, "generation %" PRIu64 ": rank %u owns a chunk that it does not hold", number, rank);
        primary |= own;
        moments |= mu_sim_share_chunks(sim, layout, rank, MU_SHARE_MOMENTS);
        copies |= mu_sim_share_chunks(sim, layout, rank, MU_SHARE_COPY);
    }
    if (sim->params.buddies)
        check_mirrors(sim, number, layout);
    if (primary != sim->all_chunks || moments != sim->all_chunks)
        mu_sim_violate(sim, "generation %" PRIu64 ": some chunk belongs to nobody", number);
    if (copies != (layout->pp > 1 ? sim->tied_chunks : 0))
        mu_sim_violate(sim, "generation %" PRIu64 ": the last stage copies other chunks than the tied ones", number);
}

/* ---- plans ---- */

struct check {
    struct mu_sim *sim;
    const struct mu_plan_input *input;
    const struct mu_plan *plan;
    uint32_t world;
    struct mu_sim_mask *have; /* [world] at the start step, growing by moves */
    uint64_t *copies;         /* [world] chunks of the tied embedding: for nobody else */
};

static const struct mu_plan_member *member_of(const struct check *check, uint32_t rank)
{
    return &check->input->members[check->plan->ranks[rank].member];
}

static bool copies_state(const struct check *check)
{
    enum mu_state_source source = check->plan->ranks[0].source;
    return source != MU_SOURCE_CHECKPOINT && source != MU_SOURCE_INIT;
}

static void check_members(const struct check *check)
{
    struct mu_sim *sim = check->sim;
    const struct mu_plan *plan = check->plan;
    const struct mu_job_spec *spec = &sim->spec;
    uint32_t working = mu_layout_working(&plan->layout);
    for (uint32_t rank = 0; rank < check->world; rank++) {
        if (plan->ranks[rank].member >= check->input->member_count)
            mu_sim_violate(sim, "a plan gives rank %u to nobody", rank);
        for (uint32_t other = 0; other < rank && check->world < 200; other++) {
            if (plan->ranks[rank].member == plan->ranks[other].member)
                mu_sim_violate(sim, "a plan gives ranks %u and %u to one worker", other, rank);
        }
    }
    for (uint32_t rank = 0; rank < working && !sim->failed; rank++) {
        if (member_of(check, rank)->leaving)
            mu_sim_violate(sim, "a plan gives rank %u, which works, to a worker that leaves", rank);
    }
    const struct mu_worker_policy *workers = &check->input->spec->workers; /* it may have been scaled */
    if (working < workers->min || working > workers->max)
        mu_sim_violate(sim, "a plan has %u working ranks; the job allows %u to %u", working, workers->min,
                       workers->max);
    if ((spec->parallel.tp && plan->layout.tp != spec->parallel.tp) ||
        (spec->parallel.pp && plan->layout.pp != spec->parallel.pp) ||
        (spec->parallel.dp && plan->layout.dp > spec->parallel.dp))
        mu_sim_violate(sim, "a plan has tp %u pp %u dp %u, the job %u, %u and %u", plan->layout.tp, plan->layout.pp,
                       plan->layout.dp, spec->parallel.tp, spec->parallel.pp, spec->parallel.dp);
}

static void check_leaves(const struct check *check)
{
    const struct mu_plan *plan = check->plan;
    uint64_t leaves = 0;
    if (plan->equal_leaves)
        return;
    for (uint32_t d = 0; d < plan->layout.dp; d++) {
        leaves += plan->leaf_counts[d];
        if (plan->leaf_counts[d] == 0)
            mu_sim_violate(check->sim, "a plan gives replica %u no leaf", d);
    }
    if (leaves != check->sim->params.leaves)
        mu_sim_violate(check->sim, "a plan spreads %" PRIu64 " of %u leaves", leaves, check->sim->params.leaves);
}

/* The newest step that these members can bring back together, or the checkpoint's. */
static void check_start(const struct check *check)
{
    const struct mu_plan_input *input = check->input;
    const struct mu_plan *plan = check->plan;
    struct mu_sim_union u = {0};
    uint64_t newest = 0;
    for (uint32_t i = 0; i < input->member_count; i++)
        mu_sim_union_add(&u, &input->members[i].held);
    bool found = mu_sim_union_newest(check->sim, &u, &newest);
    free(u.held);
    if (input->checkpoint && (!found || input->checkpoint_step > newest)) {
        newest = input->checkpoint_step;
        found = true;
    }
    if (plan->status == MU_ERR_NOT_FOUND && (found || input->may_initialise))
        mu_sim_violate(check->sim, "a plan finds no state although step %" PRIu64 " can be brought back", newest);
    if (plan->status == MU_OK && plan->start_step != newest)
        mu_sim_violate(check->sim, "a plan starts at step %" PRIu64 ", the newest that can be brought back is %" PRIu64,
                       plan->start_step, newest);
    if (plan->status == MU_OK && !found && !input->may_initialise)
        mu_sim_violate(check->sim, "a plan starts from the seed although it may not");
}

static void check_sources(const struct check *check)
{
    struct mu_sim *sim = check->sim;
    const struct mu_plan *plan = check->plan;
    for (uint32_t rank = 0; rank < check->world; rank++) {
        const struct mu_held *held = &member_of(check, rank)->held;
        enum mu_state_source source = plan->ranks[rank].source;
        bool rolls = source == MU_SOURCE_ROLL_FORWARD;
        bool joins = source == MU_SOURCE_HELD || rolls;
        if (joins && (!held->has_state || held->step + rolls != plan->start_step || (rolls && !held->has_gradient)))
            mu_sim_violate(sim, "a plan lets rank %u start from a state that it does not hold", rank);
        if (rolls && plan->roll_forward.step + 1 != plan->start_step)
            mu_sim_violate(sim, "a plan rolls rank %u forward with the result of another step", rank);
        if (joins != (joins && copies_state(check)))
            mu_sim_violate(sim, "a plan mixes state of workers with a checkpoint");
        if (joins)
            check->have[rank] = mu_sim_held_mask(sim, held, plan->start_step);
        if (joins)
            check->copies[rank] = mu_sim_held_copies(sim, held, plan->start_step);
    }
}

/* One chunk and kind at a time comes from one source, and is not moved to who has it. */
static void check_arrivals(const struct check *check)
{
    struct mu_sim *sim = check->sim;
    const struct mu_plan *plan = check->plan;
    const struct mu_reshard *reshard = &plan->reshard;
    struct mu_sim_mask *comes = mu_sim_alloc(check->world * sizeof *comes);
    for (uint32_t i = 0; i < reshard->move_count; i++) {
        const struct mu_move *move = &reshard->moves[i];
        if (move->from >= check->world || move->to >= check->world || move->from == move->to) {
            mu_sim_violate(sim, "a plan moves state from rank %u to rank %u", move->from, move->to);
            break;
        }
        struct mu_sim_mask mask = mu_sim_move_mask(move), had = mu_sim_mask_or(comes[move->to], check->have[move->to]);
        had.params |= check->copies[move->to];
        if (mask.params & had.params || mask.moments & had.moments)
            mu_sim_violate(sim, "a plan moves chunks to rank %u that it has, or twice", move->to);
        comes[move->to] = mu_sim_mask_or(comes[move->to], mask);
    }
    for (uint32_t rank = 0; rank < check->world && copies_state(check); rank++) {
        struct mu_sim_mask gets = mu_sim_mask_or(comes[rank], check->have[rank]);
        struct mu_sim_mask wants = mu_sim_share_mask(sim, &plan->layout, rank);
        wants.params |= mu_sim_share_chunks(sim, &plan->layout, rank, MU_SHARE_COPY);
        gets.params |= check->copies[rank];
        if (!mu_sim_mask_covers(gets, wants))
            mu_sim_violate(sim, "a plan leaves rank %u without a part of its share", rank);
    }
    free(comes);
}

/* What moves is there, or comes before by another move. */
static void check_moves(const struct check *check)
{
    const struct mu_reshard *reshard = &check->plan->reshard;
    if (reshard->move_count && !copies_state(check))
        mu_sim_violate(check->sim, "a plan moves state beside a checkpoint");
    bool all = false;
    for (uint32_t round = 0; round <= check->world && !all; round++) {
        all = true;
        for (uint32_t i = 0; i < reshard->move_count; i++) {
            const struct mu_move *move = &reshard->moves[i];
            struct mu_sim_mask mask = mu_sim_move_mask(move), from = check->have[move->from];
            all = all && mu_sim_mask_covers(from, mask);
            mask.params &= from.params;
            mask.moments &= from.moments;
            check->have[move->to] = mu_sim_mask_or(check->have[move->to], mask);
        }
    }
    if (!all)
        mu_sim_violate(check->sim, "a plan moves chunks from a rank that never has them");
}

/* No rank sends a chunk more than MU_FAN_OUT times. */
static void check_fan_out(const struct check *check)
{
    const struct mu_reshard *reshard = &check->plan->reshard;
    uint32_t *sent = mu_sim_alloc(check->world * MU_SIM_CHUNKS_MAX * 2 * sizeof *sent);
    for (uint32_t i = 0; i < reshard->move_count; i++) {
        const struct mu_move *move = &reshard->moves[i];
        struct mu_sim_mask mask = mu_sim_move_mask(move);
        for (uint32_t c = 0; c < MU_SIM_CHUNKS_MAX; c++) {
            uint32_t *count = &sent[2 * (move->from * MU_SIM_CHUNKS_MAX + c)];
            count[0] += (uint32_t)(mask.params >> c & 1);
            count[1] += (uint32_t)(mask.moments >> c & 1);
            if (count[0] > MU_FAN_OUT || count[1] > MU_FAN_OUT) {
                mu_sim_violate(check->sim, "a plan lets rank %u send chunk %u more than %d times", move->from, c,
                               MU_FAN_OUT);
                c = MU_SIM_CHUNKS_MAX - 1;
                i = reshard->move_count - 1;
            }
        }
    }
    free(sent);
}

void mu_sim_oracle_planned(struct mu_sim *sim, const struct mu_plan_input *input, const struct mu_plan *plan)
{
    struct check check = {.sim = sim, .input = input, .plan = plan};
    if (sim->params.slots < 200 && !MU_MUTANT(MU_MUT_FORGET_ROLL_FORWARD))
        check_start(&check);
    if (plan->status != MU_OK || sim->failed)
        return;
    mu_sim_oracle_check_layout(sim, 0, &plan->layout);
    if (sim->failed)
        return;
    check.world = mu_layout_world(&plan->layout);
    check.have = mu_sim_alloc(check.world * sizeof *check.have);
    check.copies = mu_sim_alloc(check.world * sizeof *check.copies);
    check_members(&check);
    check_leaves(&check);
    if (!sim->failed && sim->params.slots < 200)
        check_sources(&check);
    if (!sim->failed && sim->params.slots < 200)
        check_arrivals(&check);
    if (!sim->failed && sim->params.slots < 200) {
        check_moves(&check);
        check_fan_out(&check);
    }
    free(check.have);
    free(check.copies);
}
