#include "plan/plan.h"

#include <string.h>

#include "common/mutant.h"

#include "plan/balance.h"

uint32_t mu_plan_world(const struct mu_job_spec *spec, uint32_t eligible)
{
    uint32_t leaves = mu_job_leaves(spec);
    uint32_t most = spec->workers.max < leaves ? spec->workers.max : leaves;
    uint32_t wanted = eligible > spec->workers.spares ? eligible - spec->workers.spares : 0;
    if (wanted < spec->workers.min)
        wanted = spec->workers.min;
    if (wanted > most)
        wanted = most;
    return wanted <= eligible ? wanted : 0;
}

/* Where everybody is to start, and who has that state. */
struct start {
    bool found, from_checkpoint;
    uint64_t step;
    bool has_result; /* of the update step - 1 -> step */
    struct mu_step_result result;
};

static const struct mu_step_result *known_result(const struct mu_plan_input *input, uint64_t update)
{
    for (uint32_t i = 0; i < input->member_count; i++) {
        const struct mu_held *held = &input->members[i].held;
        if (held->has_result && held->result.step == update)
            return &held->result;
    }
    return NULL;
}

/* The newest step for which somebody has all cells, after rolling forward where the result of the next update is known
 * (whoever has a result proves that every rank held the complete gradient). */
static struct start find_start(const struct mu_plan_input *input)
{
    struct start start = {0};
    for (uint32_t i = 0; i < input->member_count; i++) {
        const struct mu_held *held = &input->members[i].held;
        if (!held->has_state)
            continue;
        uint64_t reach = held->step + (held->has_gradient && known_result(input, held->step) ? 1 : 0);
        if (!start.found || reach > start.step)
            start.step = reach;
        start.found = true;
    }
    if (input->checkpoint && (!start.found || input->checkpoint_step > start.step)) {
        start = (struct start){.found = true, .from_checkpoint = true, .step = input->checkpoint_step};
    } else if (start.found && start.step > 0) {
        const struct mu_step_result *result = known_result(input, start.step - 1);
        start.has_result = result != NULL;
        if (result)
            start.result = *result;
    }
    return start;
}

static enum mu_state_source source_of(const struct mu_held *held, const struct start *start)
{
    if (start->from_checkpoint)
        return MU_SOURCE_CHECKPOINT;
    if (held->has_state && held->step == start->step)
        return MU_SOURCE_HELD;
    if (held->has_state && held->has_gradient && held->step + 1 == start->step && start->has_result)
        return MU_MUTANT(MU_MUT_FORGET_ROLL_FORWARD) ? MU_SOURCE_HELD : MU_SOURCE_ROLL_FORWARD;
    return MU_SOURCE_PEER;
}

static bool is_holder(const struct mu_plan_member *member, const struct start *start)
{
    enum mu_state_source source = source_of(&member->held, start);
    return source == MU_SOURCE_HELD || source == MU_SOURCE_ROLL_FORWARD;
}

/* A member with bad links stays out when the others can do without it: repeatedly the one with most bad links to
 * members still in (ties: one that holds nothing, then the least preferred). Greedy vertex cover; `out[i]` marks those
 * left out. */
static uint32_t leave_out_bad_links(const struct mu_plan_input *input, const struct start *start,
                                    struct mu_plan_rank *scratch)
{
    uint32_t left_out = 0, holders = 0; /* the last holder of the state is never left out */
    bool needs_holder = start->found && !start->from_checkpoint;
    for (uint32_t i = 0; i < input->member_count; i++) {
        scratch[i].member = 1; /* 1: in */
        holders += is_holder(&input->members[i], start);
    }
    for (;;) {
        uint32_t worst = UINT32_MAX, worst_degree = 0;
        for (uint32_t i = 0; i < input->member_count && input->bad_link_count > 0; i++) {
            uint32_t degree = 0;
            for (uint32_t k = 0; k < input->bad_link_count; k++) {
                const struct mu_plan_link *link = &input->bad_links[k];
                degree += (link->a == i && scratch[link->b].member) || (link->b == i && scratch[link->a].member);
            }
            if (!scratch[i].member || degree == 0 || degree < worst_degree)
                continue;
            if (needs_holder && holders == 1 && is_holder(&input->members[i], start))
                continue;
            bool tie = degree == worst_degree && worst != UINT32_MAX;
            if (tie && is_holder(&input->members[i], start) && !is_holder(&input->members[worst], start))
                continue;
            worst = i;
            worst_degree = degree;
        }
        if (worst == UINT32_MAX)
            return left_out;
        scratch[worst].member = 0;
        holders -= is_holder(&input->members[worst], start);
        left_out++;
    }
}

/* Ranks in order of preference; one holder of the state is always among them. */
static void choose_members(const struct mu_plan_input *input, const struct start *start, struct mu_plan *plan)
{
    uint32_t chosen = 0, first_holder = UINT32_MAX;
    bool have_holder = start->from_checkpoint || !start->found;
    for (uint32_t i = 0; i < input->member_count; i++) {
        bool in = plan->ranks[i].member == 1; /* read before entry `chosen` <= i is overwritten */
        bool holder = is_holder(&input->members[i], start);
        if (!in)
            continue;
        if (holder && first_holder == UINT32_MAX)
            first_holder = i;
        if (chosen < plan->world) {
            have_holder = have_holder || holder;
            plan->ranks[chosen++].member = i;
        }
    }
    if (!have_holder && first_holder != UINT32_MAX)
        plan->ranks[plan->world - 1].member = first_holder;
}

static void choose_sources(const struct mu_plan_input *input, const struct start *start, struct mu_plan *plan)
{
    uint32_t next_source = 0;
    for (uint32_t rank = 0; rank < plan->world; rank++) {
        struct mu_plan_rank *own = &plan->ranks[rank];
        own->source = start->found ? source_of(&input->members[own->member].held, start) : MU_SOURCE_INIT;
    }
    uint32_t neighbours[MU_NEIGHBOURS_MAX];
    for (uint32_t rank = 0; rank < plan->world; rank++) {
        struct mu_plan_rank *own = &plan->ranks[rank];
        if (own->source != MU_SOURCE_PEER)
            continue;
        /* Joiners spread over the neighbours that hold the state; along a tree the parent passes on what it got itself.
         */
        uint32_t count = mu_plan_neighbours(plan->world, plan->mesh, rank, neighbours);
        own->source_rank = rank == 0 ? 0 : neighbours[0];
        for (uint32_t k = 0; k < count; k++) {
            uint32_t candidate = neighbours[(k + next_source) % count];
            enum mu_state_source source = plan->ranks[candidate].source;
            if (source == MU_SOURCE_HELD || source == MU_SOURCE_ROLL_FORWARD) {
                own->source_rank = candidate;
                break;
            }
        }
        next_source++;
    }
}

/* Along a tree the root must hold the state, so that it can flow to everyone: a holder becomes rank 0. */
static void put_holder_first(const struct mu_plan_input *input, const struct start *start, struct mu_plan *plan)
{
    for (uint32_t rank = 0; rank < plan->world; rank++) {
        if (!is_holder(&input->members[plan->ranks[rank].member], start))
            continue;
        uint32_t member = plan->ranks[0].member;
        plan->ranks[0].member = plan->ranks[rank].member;
        plan->ranks[rank].member = member;
        return;
    }
}

/* Speeds that differ by less than this from the median are noise: the split is then the one with the fewest subtree
 * roots. */
static const double SPEED_NOISE = 0.15;

static double median_speed(const struct mu_plan_input *input, const struct mu_plan *plan)
{
    double sorted[MU_COUNTED_WORLD_MAX];
    uint32_t count = 0;
    for (uint32_t rank = 0; rank < plan->world; rank++) {
        double seconds = input->members[plan->ranks[rank].member].seconds_per_leaf;
        if (!(seconds > 0))
            continue;
        uint32_t at = count++;
        for (; at > 0 && sorted[at - 1] > seconds; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = seconds;
    }
    return count ? sorted[count / 2] : 0;
}

/* By measured speed, where the counts of all ranks can be told to all; else equal. */
static void choose_leaves(const struct mu_plan_input *input, struct mu_plan *plan)
{
    uint32_t leaves = mu_job_leaves(input->spec);
    plan->equal_leaves = plan->world > MU_COUNTED_WORLD_MAX;
    if (plan->equal_leaves) {
        for (uint32_t rank = 0; rank < plan->world; rank++)
            mu_plan_leaf_range(leaves, plan->world, NULL, rank, &plan->ranks[rank].leaf_count);
        return;
    }
    struct mu_balance_rank speeds[MU_COUNTED_WORLD_MAX];
    uint32_t counts[MU_COUNTED_WORLD_MAX];
    double median = median_speed(input, plan);
    for (uint32_t rank = 0; rank < plan->world; rank++) {
        double relative = median > 0 ? input->members[plan->ranks[rank].member].seconds_per_leaf / median : 0;
        bool ordinary = !(relative > 0) || (relative > 1 - SPEED_NOISE && relative < 1 + SPEED_NOISE);
        speeds[rank] = (struct mu_balance_rank){.seconds_per_leaf = ordinary ? 1 : relative};
    }
    mu_balance_leaves(leaves, plan->world, speeds, counts);
    for (uint32_t rank = 0; rank < plan->world; rank++)
        plan->ranks[rank].leaf_count = counts[rank];
}

void mu_plan_make(const struct mu_plan_input *input, struct mu_plan *plan)
{
    struct start start = find_start(input);
    plan->left_out = leave_out_bad_links(input, &start, plan->ranks);
    plan->world = mu_plan_world(input->spec, input->member_count - plan->left_out);
    if (plan->world == 0) {
        plan->status = MU_ERR_UNAVAILABLE;
        return;
    }
    if (!start.found && !input->may_initialise) {
        plan->status = MU_ERR_NOT_FOUND;
        return;
    }
    plan->status = MU_OK;
    plan->mesh = plan->world <= MU_MESH_WORLD_MAX;
    plan->start_step = start.found ? start.step : 0;
    memset(&plan->roll_forward, 0, sizeof plan->roll_forward);
    if (start.has_result)
        plan->roll_forward = start.result;
    choose_members(input, &start, plan);
    if (!plan->mesh && start.found && !start.from_checkpoint)
        put_holder_first(input, &start, plan);
    choose_leaves(input, plan);
    choose_sources(input, &start, plan);
}
