#include "plan/plan.h"

#include <stdlib.h>
#include <string.h>

#include "common/mutant.h"

#include "plan/balance.h"
#include "plan/buddies.h"
#include "plan/cost.h"
#include "plan/forecast.h"
#include "plan/memory.h"
#include "plan/placement.h"
#include "plan/share_index.h"
#include "plan/text.h"

#define NONE UINT32_MAX

/* Ranks that the degrees given in the job need at least. */
static uint32_t given_ranks(const struct mu_job_spec *spec)
{
    uint32_t tp = spec->parallel.tp, pp = spec->parallel.pp, dp = spec->parallel.dp;
    return (tp ? tp : 1) * (pp ? pp : 1) * (dp ? dp : 1);
}

uint32_t mu_plan_wanted(const struct mu_job_spec *spec, uint32_t eligible)
{
    uint32_t wanted = eligible > spec->workers.spares ? eligible - spec->workers.spares : 0;
    uint32_t given = given_ranks(spec); /* come before spares */
    if (wanted < spec->workers.min)
        wanted = spec->workers.min;
    if (wanted < given)
        wanted = given;
    if (wanted > spec->workers.max)
        wanted = spec->workers.max;
    return wanted <= eligible ? wanted : 0;
}

/* Where everybody is to start, and who has that state. */
struct start {
    bool found, from_checkpoint;
    uint64_t step;
    bool has_result; /* of the update step - 1 -> step */
    struct mu_step_result result;
};

struct planning {
    const struct mu_plan_input *input;
    struct mu_plan *plan;
    struct mu_model_spec model;
    struct start start;
    struct mu_held_share *shares;      /* [members][MU_HELD_SHARES_MAX]: what holders point to */
    struct mu_reshard_holder *holders; /* [members]: what they have of the start step */
    bool *in;                          /* [members] */
    bool has_coverage;                 /* the state comes from members: */
    struct mu_coverage coverage;       /* of those that are in */
    uint32_t *chosen;                  /* [members]: member of each rank */
    struct mu_cost_rates rates;
    uint64_t memory_bytes; /* of the smallest worker; 0: not known */
    bool is_next;          /* the layout is input->next_layout */
};

static enum mu_status no_memory(struct mu_plan *plan)
{
    struct mu_text text;
    mu_text_init(&text, plan->text, sizeof plan->text);
    mu_text_put(&text, "no memory for a plan");
    return MU_ERR_NO_MEMORY;
}

static bool from_members(const struct start *start)
{
    return start->found && !start->from_checkpoint;
}

/* The start */

static const struct mu_step_result *known_result(const struct mu_plan_input *input, uint64_t update)
{
    for (uint32_t i = 0; i < input->member_count; i++) {
        const struct mu_held *held = &input->members[i].held;
        if (held->has_result && held->result.step == update)
            return &held->result;
    }
    return NULL;
}

static enum mu_state_source source_of(const struct mu_held *held, const struct start *start)
{
    if (!start->found)
        return MU_SOURCE_INIT;
    if (start->from_checkpoint)
        return MU_SOURCE_CHECKPOINT;
    if (held->has_state && held->step == start->step)
        return MU_SOURCE_HELD;
    if (held->has_state && held->has_gradient && held->step + 1 == start->step && start->has_result)
        return MU_SOURCE_ROLL_FORWARD;
    return MU_SOURCE_PEER;
}

/* What each member has of the start step. An update that is rolled forward changes the share that it was made for, and
 * of that only what the member itself updates; its tied copies stay behind. */
static void fill_holders(struct planning *p)
{
    for (uint32_t i = 0; i < p->input->member_count; i++) {
        const struct mu_held *held = &p->input->members[i].held;
        struct mu_held_share *shares = &p->shares[(size_t)i * MU_HELD_SHARES_MAX];
        enum mu_state_source source = source_of(held, &p->start);
        uint32_t count = 0;
        if (source == MU_SOURCE_HELD)
            count = held->share_count < MU_HELD_SHARES_MAX ? held->share_count : MU_HELD_SHARES_MAX;
        else if (source == MU_SOURCE_ROLL_FORWARD)
            count = held->share_count > 0;
        if (MU_MUTANT(MU_MUT_IGNORE_PARTIAL) && count > 0 && held->shares[0].layout.pp > 1)
            count = 0;
        memcpy(shares, held->shares, count * sizeof *shares);
        if (source == MU_SOURCE_ROLL_FORWARD && shares->layout.sharded)
            shares->owned_only = !MU_MUTANT(MU_MUT_ROLL_FORWARD_WHOLE);
        p->holders[i] = (struct mu_reshard_holder){.shares = shares,
                                                   .share_count = count,
                                                   .host = p->input->members[i].host,
                                                   .stale_copies = source == MU_SOURCE_ROLL_FORWARD};
    }
}

/* Is all of the state at `step` among the members? Then this is the start, and the coverage that of all members. */
static enum mu_status try_step(struct planning *p, uint64_t step, bool *ret_complete)
{
    const struct mu_step_result *result = step > 0 ? known_result(p->input, step - 1) : NULL;
    p->start = (struct start){.found = true, .step = step, .has_result = result != NULL};
    if (result)
        p->start.result = *result;
    fill_holders(p);
    enum mu_status status = mu_coverage_init(&p->coverage, &p->model, p->holders, p->input->member_count);
    if (status)
        return status;
    *ret_complete = mu_coverage_complete(&p->coverage);
    if (!*ret_complete)
        mu_coverage_fini(&p->coverage);
    p->has_coverage = *ret_complete;
    return MU_OK;
}

static int newest_first(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x > y ? -1 : x < y;
}

/* The newest step for which the members have everything together, after rolling forward where the result of the next
 * update is known (whoever has a result proves that every rank held the complete gradient). */
static enum mu_status find_members_start(struct planning *p)
{
    const struct mu_plan_input *input = p->input;
    uint64_t *steps = malloc((2 * (size_t)input->member_count + 1) * sizeof *steps);
    uint32_t count = 0;
    bool complete = false;
    enum mu_status status = MU_OK;
    if (!steps)
        return MU_ERR_NO_MEMORY;
    for (uint32_t i = 0; i < input->member_count; i++) {
        const struct mu_held *held = &input->members[i].held;
        if (held->has_state)
            steps[count++] = held->step;
        if (held->has_state && held->has_gradient)
            steps[count++] = held->step + 1;
    }
    qsort(steps, count, sizeof *steps, newest_first);
    for (uint32_t i = 0; i < count && !complete && !status; i++) {
        if (input->checkpoint && steps[i] < input->checkpoint_step)
            break;
        if (i == 0 || steps[i] != steps[i - 1])
            status = try_step(p, steps[i], &complete);
    }
    free(steps);
    if (!complete)
        p->start = (struct start){0};
    return status;
}

static void start_elsewhere(struct planning *p)
{
    if (p->has_coverage)
        mu_coverage_fini(&p->coverage);
    p->has_coverage = false;
    p->start = (struct start){0};
    if (p->input->checkpoint)
        p->start = (struct start){.found = true, .from_checkpoint = true, .step = p->input->checkpoint_step};
    fill_holders(p);
}

/* Who takes part */

/* Takes a member out, unless nobody else has something that it holds. */
static bool drop(struct planning *p, uint32_t member)
{
    if (p->has_coverage && !mu_coverage_remove(&p->coverage, member))
        return false;
    p->in[member] = false;
    return true;
}

/* Leaving members stay only for what nobody else has. */
static void drop_leaving(struct planning *p)
{
    for (uint32_t i = p->input->member_count; i-- > 0;) {
        if (p->input->members[i].leaving)
            drop(p, i);
    }
}

static uint32_t bad_links_of(const struct planning *p, uint32_t member)
{
    uint32_t degree = 0;
    for (uint32_t k = 0; k < p->input->bad_link_count && p->in[member]; k++) {
        const struct mu_plan_link *link = &p->input->bad_links[k];
        degree += (link->a == member && p->in[link->b]) || (link->b == member && p->in[link->a]);
    }
    return degree;
}

/* A member with bad links stays out when the others can do without it: repeatedly the one with most bad links to
 * members still in (ties: one that holds nothing, then the least preferred). Greedy vertex cover; the last source of
 * anything is never left out. */
static enum mu_status leave_out_bad_links(struct planning *p)
{
    uint32_t count = p->input->member_count;
    bool *needed = p->input->bad_link_count ? calloc(count, sizeof *needed) : NULL;
    if (p->input->bad_link_count == 0)
        return MU_OK;
    if (!needed)
        return MU_ERR_NO_MEMORY;
    for (;;) {
        uint32_t worst = NONE, worst_degree = 0;
        for (uint32_t i = 0; i < count; i++) {
            uint32_t degree = needed[i] ? 0 : bad_links_of(p, i);
            if (degree == 0 || degree < worst_degree)
                continue;
            bool tie = degree == worst_degree && worst != NONE;
            if (tie && p->holders[i].share_count > 0 && p->holders[worst].share_count == 0)
                continue;
            worst = i;
            worst_degree = degree;
        }
        if (worst == NONE)
            break;
        if (drop(p, worst))
            p->plan->left_out++;
        else
            needed[worst] = true;
    }
    free(needed);
    return MU_OK;
}

static uint32_t count_eligible(const struct planning *p)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < p->input->member_count; i++)
        count += p->in[i] && !p->input->members[i].leaving;
    return count;
}

struct host_memory {
    uint32_t host;
    uint64_t bytes;
};

static int by_host(const void *a, const void *b)
{
    uint32_t x = ((const struct host_memory *)a)->host, y = ((const struct host_memory *)b)->host;
    return x < y ? -1 : x > y;
}

/* What a worker may use, the least of all; 0: not known of any. Workers of one host share its memory: as many of them
 * as may get a rank, since spares give back what a rank needs. */
static enum mu_status smallest_memory(const struct planning *p, uint32_t wanted, uint64_t *ret_bytes)
{
    struct host_memory *all = malloc(((size_t)p->input->member_count + 1) * sizeof *all);
    uint32_t count = 0;
    uint64_t bytes = 0;
    if (!all)
        return MU_ERR_NO_MEMORY;
    for (uint32_t i = 0; i < p->input->member_count; i++) {
        const struct mu_plan_member *member = &p->input->members[i];
        if (p->in[i] && !member->leaving && member->memory_bytes)
            all[count++] =
                (struct host_memory){member->own_memory ? UINT32_MAX - i : member->host, member->memory_bytes};
    }
    qsort(all, count, sizeof *all, by_host);
    for (uint32_t first = 0, end; first < count; first = end) {
        uint64_t least = all[first].bytes;
        for (end = first + 1; end < count && all[end].host == all[first].host; end++)
            least = all[end].bytes < least ? all[end].bytes : least;
        uint32_t sharing = end - first < wanted ? end - first : wanted;
        bytes = bytes == 0 || least / sharing < bytes ? least / sharing : bytes;
    }
    free(all);
    *ret_bytes = bytes;
    return MU_OK;
}

/* The model of costs with what the job's workers measured, at the speed of the slowest of the previous generation. */
static void measured_rates(struct planning *p)
{
    const struct mu_plan_input *input = p->input;
    double slowest = 0, layers = 0;
    mu_cost_rates_of_job(&p->rates, input->spec);
    if (input->rates)
        p->rates = *input->rates;
    p->rates.embedding_layers = (double)input->costs.embedding / MU_STAGE_COST_UNIT;
    p->rates.head_layers = (double)input->costs.head / MU_STAGE_COST_UNIT;
    for (uint32_t i = 0; i < input->member_count; i++) {
        const struct mu_plan_member *member = &input->members[i];
        if (member->old_rank != UINT32_MAX && member->seconds_per_layer > slowest)
            slowest = member->seconds_per_layer;
    }
    for (uint32_t stage = 0; input->has_old_layout && stage < input->old_layout.pp; stage++) {
        double own = mu_cost_stage_layers(input->spec, &p->model, &p->rates, &input->old_layout, stage);
        layers = own > layers ? own : layers;
    }
    if (input->has_old_layout)
        mu_cost_calibrate(&p->rates, input->spec, &input->old_layout, slowest * layers);
}

/* A job that is only replicated uses every worker that it may have (workers.max and spares say how many), whether or
 * not the model of costs sees a gain in it: each is another copy of the state. */
static void use_all(struct planning *p, uint32_t wanted)
{
    struct mu_layout *layout = &p->plan->layout, wider;
    struct mu_job_spec spec = *p->input->spec;
    uint32_t leaves = mu_job_leaves(&spec);
    char text[MU_TEXT_SIZE];
    if (layout->tp * layout->pp != 1 || layout->sharded || spec.parallel.dp)
        return;
    spec.parallel.tp = spec.parallel.pp = 1;
    spec.parallel.dp = wanted < leaves ? wanted : leaves;
    if (mu_layout_choose(&spec, &p->rates, wanted, p->memory_bytes, 1, NULL, &wider, text, sizeof text) == MU_OK) {
        *layout = wider;
        memcpy(p->plan->text, text, sizeof text);
    }
}

static bool fits_in_memory(const struct planning *p, const struct mu_layout *layout)
{
    return p->memory_bytes == 0 || mu_memory_of_layout(p->input->spec, layout, 1, NULL).total_bytes <= p->memory_bytes;
}

/* Speeds are measured anew all the time, and a choice that was close may be another one now: what members have been fed
 * for stays. */
static void take_next(struct planning *p)
{
    const struct mu_layout *next = &p->input->next_layout;
    p->is_next = p->input->has_next_layout && mu_layout_check(next, p->input->spec, NULL) == MU_OK &&
                 mu_layout_working(next) == mu_layout_working(&p->plan->layout) && fits_in_memory(p, next);
    if (p->is_next)
        p->plan->layout = *next;
}

/* The layout for as many workers as there may be, on the smallest of them. */
static enum mu_status choose_layout(struct planning *p, uint32_t eligible)
{
    const struct mu_plan_input *input = p->input;
    struct mu_plan *plan = p->plan;
    struct mu_text text;
    mu_text_init(&text, plan->text, sizeof plan->text);
    uint32_t wanted = mu_plan_wanted(input->spec, eligible);
    if (wanted == 0) {
        mu_text_put_uint(&text, eligible);
        mu_text_put(&text, eligible == 1 ? " worker can take part" : " workers can take part");
        uint32_t given = given_ranks(input->spec);
        bool by_degrees = given > input->spec->workers.min;
        mu_text_put(&text, by_degrees ? ", parallel (tp * pp * dp as given) needs " : ", workers.min is ");
        mu_text_put_uint(&text, by_degrees ? given : input->spec->workers.min);
        return MU_ERR_UNAVAILABLE;
    }
    measured_rates(p);
    enum mu_status status = smallest_memory(p, wanted, &p->memory_bytes);
    if (status)
        return status;
    status = mu_layout_choose(input->spec, &p->rates, wanted, p->memory_bytes, 1,
                              input->has_old_layout ? &input->old_layout : NULL, &plan->layout, plan->text,
                              sizeof plan->text);
    if (status)
        return status;
    use_all(p, wanted);
    take_next(p);
    plan->layout.buddy_shift = 0; /* chosen when every rank has its member */
    MU_ASSERT(mu_layout_working(&plan->layout) <= eligible);
    return MU_OK;
}

/* Stages */

/* A stage that takes so little more or less than usual is as fast as the others. */
static const double STAGE_NOISE = 0.05;
enum { SLOWNESS_STEPS = 32, SLOWNESS_MAX = 16 };

/* Seconds a layer of the workers of each old stage. A replica's part of a stage is as slow as its slowest worker, and
 * a stage as slow as more than half of its replicas are: of a single slow one leaves are taken, of a slow stage layers.
 */
static enum mu_status stage_speeds(const struct planning *p, double seconds[MU_STAGES_MAX])
{
    const struct mu_layout *old = &p->input->old_layout;
    double *all = calloc((size_t)old->pp * old->dp, sizeof *all);
    if (!all)
        return MU_ERR_NO_MEMORY;
    for (uint32_t i = 0; i < p->input->member_count; i++) {
        const struct mu_plan_member *member = &p->input->members[i];
        if (!p->in[i] || member->leaving || member->old_rank >= mu_layout_working(old))
            continue;
        struct mu_coords at = mu_layout_coords(old, member->old_rank);
        double *slowest = &all[(size_t)at.p * old->dp + at.d];
        *slowest = member->seconds_per_layer > *slowest ? member->seconds_per_layer : *slowest;
    }
    for (uint32_t stage = 0; stage < old->pp; stage++)
        seconds[stage] = mu_balance_median(old->dp, &all[(size_t)stage * old->dp]);
    free(all);
    return MU_OK;
}

/* Members keep their stages as far as these stay. So where the old degrees stay, layers go from the stages whose
 * workers are slow to the others, when that is worth it. */
static enum mu_status choose_stages(struct planning *p)
{
    const struct mu_job_spec *spec = p->input->spec;
    const struct mu_layout *old = &p->input->old_layout;
    struct mu_layout *layout = &p->plan->layout, cut = *layout;
    uint32_t stages = layout->pp;
    double seconds[MU_STAGES_MAX], sorted[MU_STAGES_MAX], slowest = 0;
    if (stages == 1 || !p->input->has_old_layout || old->pp != stages || old->tp != layout->tp)
        return MU_OK;
    if (stage_speeds(p, seconds))
        return MU_ERR_NO_MEMORY;
    memcpy(sorted, seconds, stages * sizeof *sorted);
    double usual = mu_balance_median(stages, sorted);
    if (!(usual > 0))
        return MU_OK;
    for (uint32_t stage = 0; stage < stages; stage++) {
        double relative = seconds[stage] > 0 ? seconds[stage] / usual : 1;
        relative = relative < SLOWNESS_MAX ? relative : SLOWNESS_MAX;
        bool noise = relative > 1 - STAGE_NOISE && relative < 1 + STAGE_NOISE;
        slowest = seconds[stage] > slowest ? seconds[stage] : slowest;
        seconds[stage] = noise ? 1 : (double)(uint32_t)(relative * SLOWNESS_STEPS + 1) / SLOWNESS_STEPS;
    }
    mu_cost_balance_stages(spec, &p->rates, layout->tp, stages, seconds, cut.stage_first);
    double now = mu_cost_of_stages(spec, layout, &p->rates, seconds);
    double next = mu_cost_of_stages(spec, &cut, &p->rates, seconds);
    if (!p->is_next && next < now * (1 - MU_CHOICE_GAIN_MIN_PERCENT / 100.0) && fits_in_memory(p, &cut))
        *layout = cut;
    if (memcmp(layout->stage_first, old->stage_first, (stages + 1) * sizeof old->stage_first[0]) != 0)
        p->plan->saved_s =
            (mu_cost_of_stages(spec, old, &p->rates, seconds) - mu_cost_of_stages(spec, layout, &p->rates, seconds)) *
            usual / slowest; /* the rates are those of the slowest */
    return MU_OK;
}

/* The least preferred go while there are more than the layout has room for. A demoted one takes no room: if only it has
 * something, others get that from it. */
static void drop_surplus(struct planning *p, uint32_t wanted)
{
    uint32_t eligible = count_eligible(p);
    for (uint32_t i = p->input->member_count; i-- > 0 && eligible > wanted;) {
        if (p->in[i] && !p->input->members[i].leaving)
            eligible -= drop(p, i) || p->input->members[i].demoted;
    }
}

/* Replicas of everything, now and before: who holds state holds all of it, and any rank suits anybody. */
static bool is_plain(const struct planning *p)
{
    const struct mu_layout *layout = &p->plan->layout;
    if (layout->tp * layout->pp != 1 || layout->sharded)
        return false;
    for (uint32_t i = 0; i < p->input->member_count; i++) {
        for (uint32_t k = 0; k < p->holders[i].share_count; k++) {
            const struct mu_held_share *share = &p->holders[i].shares[k];
            if (share->layout.tp * share->layout.pp != 1 || share->layout.sharded || share->owned_only)
                return false;
        }
    }
    return true;
}

/* Members get their ranks, demoted ones only where there are too few others; those in surplus go, except where nobody
 * else has what they hold: they and leaving ones become idle ranks. */
static enum mu_status choose_ranks(struct planning *p)
{
    struct mu_layout *layout = &p->plan->layout;
    const struct mu_plan_member *members = p->input->members;
    uint32_t count = p->input->member_count, working = mu_layout_working(layout);
    bool *candidates = calloc(count ? count : 1, sizeof *candidates);
    if (!candidates)
        return MU_ERR_NO_MEMORY;
    if (is_plain(p))
        drop_surplus(p, working); /* by preference alone */
    uint32_t surplus = count_eligible(p) - working;
    for (uint32_t i = count; i-- > 0;) {
        candidates[i] = p->in[i] && !members[i].leaving && !(members[i].demoted && surplus > 0);
        surplus -= p->in[i] && !members[i].leaving && !candidates[i];
    }
    enum mu_status status = mu_placement_make(&p->model, layout, p->holders, candidates, count, p->chosen);
    memcpy(candidates, p->in, count * sizeof *candidates);
    for (uint32_t rank = 0; rank < working && !status; rank++)
        candidates[p->chosen[rank]] = false;
    for (uint32_t i = count; i-- > 0 && !status;) {
        if (candidates[i] && !members[i].leaving)
            drop(p, i);
    }
    for (uint32_t i = 0; i < count && !status; i++) {
        if (p->in[i] && candidates[i])
            p->chosen[working + layout->idle++] = i;
    }
    free(candidates);
    return status;
}

/* With buddies: each one on another host than whom it guards, and under another switch, as far as these allow. Who
 * holds nothing may stand anywhere. */
static enum mu_status choose_buddies(struct planning *p)
{
    struct mu_layout *layout = &p->plan->layout;
    uint32_t working = mu_layout_working(layout);
    if (p->input->spec->parallel.redundancy != MU_REDUNDANCY_BUDDY)
        return MU_OK;
    uint32_t *numbers = malloc(4 * (size_t)working * sizeof *numbers);
    uint32_t *hosts = numbers, *domains = numbers + working, *order = numbers + 2 * (size_t)working,
             *before = numbers + 3 * (size_t)working;
    bool *is_free = malloc(working * sizeof *is_free);
    enum mu_status status = numbers && is_free ? MU_OK : MU_ERR_NO_MEMORY;
    for (uint32_t rank = 0; rank < working && !status; rank++) {
        const struct mu_plan_member *member = &p->input->members[p->chosen[rank]];
        hosts[rank] = member->host;
        domains[rank] = member->domain;
        is_free[rank] = p->holders[p->chosen[rank]].share_count == 0;
    }
    if (!status)
        status = mu_buddies_place(layout, hosts, domains, is_free, order);
    if (!status) {
        memcpy(before, p->chosen, working * sizeof *before);
        for (uint32_t rank = 0; rank < working; rank++)
            p->chosen[rank] = before[order[rank]];
    }
    free(numbers);
    free(is_free);
    return status;
}

/* Leaves */

/* A replica is as fast as the slowest of its members with what its stage computes; 0 when none was measured. */
static double replica_seconds(const struct planning *p, const double *stage_layers, uint32_t d)
{
    const struct mu_layout *layout = &p->plan->layout;
    double slowest = 0;
    for (uint32_t stage = 0; stage < layout->pp; stage++) {
        for (uint32_t t = 0; t < layout->tp; t++) {
            uint32_t rank = mu_layout_rank(layout, (struct mu_coords){.t = t, .d = d, .p = stage});
            double seconds = p->input->members[p->chosen[rank]].seconds_per_layer * stage_layers[stage];
            slowest = seconds > slowest ? seconds : slowest;
        }
    }
    return slowest;
}

/* What counts other than the present ones save of each step, where nothing else changes; 0: too little to move any. */
static double leaves_saved(const struct planning *p, const double *seconds)
{
    const struct mu_plan *plan = p->plan;
    uint32_t replicas = plan->layout.dp, now[MU_COUNTED_REPLICAS_MAX];
    if (!p->input->has_old_layout || !mu_layout_equal(&p->input->old_layout, &plan->layout))
        return 0;
    for (uint32_t d = 0; d < replicas; d++) {
        uint32_t rank = mu_layout_rank(&plan->layout, (struct mu_coords){.d = d});
        const struct mu_plan_member *member = &p->input->members[p->chosen[rank]];
        now[d] = member->old_leaf_count;
        if (member->old_rank != rank)
            return 0;
    }
    return mu_balance_saved(replicas, seconds, now, plan->leaf_counts);
}

/* By measured speed, in runs that an Assign can name; of very many replicas, equal. */
static void choose_leaves(struct planning *p)
{
    uint32_t replicas = p->plan->layout.dp;
    p->plan->equal_leaves = replicas > MU_COUNTED_REPLICAS_MAX;
    if (p->plan->equal_leaves)
        return;
    double seconds[MU_COUNTED_REPLICAS_MAX], stage_layers[MU_STAGES_MAX];
    for (uint32_t stage = 0; stage < p->plan->layout.pp; stage++)
        stage_layers[stage] = mu_cost_stage_layers(p->input->spec, &p->model, &p->rates, &p->plan->layout, stage);
    for (uint32_t d = 0; d < replicas; d++)
        seconds[d] = replica_seconds(p, stage_layers, d);
    mu_balance_by_seconds(mu_job_leaves(p->input->spec), replicas, seconds, p->plan->leaf_counts);
    if (!(p->plan->saved_s > 0))
        p->plan->saved_s = leaves_saved(p, seconds);
}

/* State */

static int compare_u32(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static uint32_t count_distinct(uint32_t *values, uint32_t count)
{
    uint32_t distinct = 0;
    qsort(values, count, sizeof *values, compare_u32);
    for (uint32_t i = 0; i < count; i++)
        distinct += i == 0 || values[i] != values[i - 1];
    return distinct;
}

/* Everybody whom a rank exchanges messages or state with fits into its Assign. */
static enum mu_status check_peers(struct planning *p, bool *ret_fits)
{
    const struct mu_reshard *reshard = &p->plan->reshard;
    uint32_t world = mu_layout_world(&p->plan->layout), most = 0;
    uint32_t *first = calloc((size_t)world + 2, sizeof *first);
    uint32_t *partners = malloc((2 * (size_t)reshard->move_count + 1) * sizeof *partners), *list = NULL;
    enum mu_status status = first && partners ? MU_OK : MU_ERR_NO_MEMORY;
    *ret_fits = true;
    for (uint32_t i = 0; i < reshard->move_count && !status; i++) {
        first[reshard->moves[i].to + 2]++;
        first[reshard->moves[i].from + 2]++;
    }
    for (uint32_t rank = 0; rank < world && !status; rank++) {
        most = first[rank + 2] > most ? first[rank + 2] : most;
        first[rank + 2] += first[rank + 1];
    }
    for (uint32_t i = 0; i < reshard->move_count && !status; i++) {
        partners[first[reshard->moves[i].to + 1]++] = reshard->moves[i].from;
        partners[first[reshard->moves[i].from + 1]++] = reshard->moves[i].to;
    }
    list = malloc(((size_t)most + MU_LAYOUT_NEIGHBOURS_MAX) * sizeof *list);
    if (!list)
        status = MU_ERR_NO_MEMORY;
    for (uint32_t rank = 0; rank < world && !status && *ret_fits; rank++) {
        uint32_t count = first[rank + 1] - first[rank];
        if (count + MU_LAYOUT_NEIGHBOURS_MAX <= MU_PEERS_MAX)
            continue;
        memcpy(list, partners + first[rank], count * sizeof *list);
        count += mu_layout_neighbours(&p->model, &p->plan->layout, rank, list + count);
        *ret_fits = count_distinct(list, count) <= MU_PEERS_MAX;
    }
    free(first);
    free(partners);
    free(list);
    return status;
}

static enum mu_status choose_moves(struct planning *p, bool *ret_fits)
{
    uint32_t world = mu_layout_world(&p->plan->layout);
    *ret_fits = true;
    if (!from_members(&p->start))
        return MU_OK;
    struct mu_reshard_holder *holders = malloc(world * sizeof *holders);
    if (!holders)
        return MU_ERR_NO_MEMORY;
    for (uint32_t rank = 0; rank < world; rank++)
        holders[rank] = p->holders[p->chosen[rank]];
    enum mu_status status = mu_reshard_plan(&p->model, &p->plan->layout, holders, &p->plan->reshard);
    free(holders);
    MU_ASSERT(status != MU_ERR_NOT_FOUND); /* nobody was dropped whose state only he has */
    return status ? status : check_peers(p, ret_fits);
}

static void choose_sources(struct planning *p)
{
    struct mu_plan *plan = p->plan;
    for (uint32_t rank = 0; rank < mu_layout_world(&plan->layout); rank++) {
        uint32_t member = p->chosen[rank];
        enum mu_state_source source = source_of(&p->input->members[member].held, &p->start);
        if (source == MU_SOURCE_ROLL_FORWARD && MU_MUTANT(MU_MUT_FORGET_ROLL_FORWARD))
            source = MU_SOURCE_HELD;
        plan->ranks[rank] = (struct mu_plan_rank){.member = member, .source = source};
    }
    plan->start_step = p->start.found ? p->start.step : 0;
    if (p->start.has_result)
        plan->roll_forward = p->start.result;
}

/* Would the state that the generation starts from be whole without mirrors? */
static enum mu_status ask_mirrors(struct planning *p)
{
    struct mu_coverage coverage;
    bool any = false;
    p->plan->from_mirrors = false;
    for (uint32_t i = 0; i < p->input->member_count && from_members(&p->start); i++) {
        for (uint32_t k = 0; k < p->holders[i].share_count; k++) {
            struct mu_held_share *share = &p->shares[(size_t)i * MU_HELD_SHARES_MAX + k];
            any = any || share->layout.buddy_shift > 0;
            share->layout.buddy_shift = 0; /* nobody looks at it any more */
        }
    }
    if (!any)
        return MU_OK;
    enum mu_status status = mu_coverage_init(&coverage, &p->model, p->holders, p->input->member_count);
    if (status)
        return status;
    p->plan->from_mirrors = !mu_coverage_complete(&coverage);
    mu_coverage_fini(&coverage);
    return MU_OK;
}

/* A plan from p->start. *ret_fits: false when it would need more connections than a rank may have. */
static enum mu_status plan_from_start(struct planning *p, bool *ret_fits)
{
    struct mu_plan *plan = p->plan;
    *ret_fits = true;
    plan->left_out = 0;
    for (uint32_t i = 0; i < p->input->member_count; i++)
        p->in[i] = true;
    drop_leaving(p);
    enum mu_status status = leave_out_bad_links(p);
    if (status)
        return no_memory(plan);
    status = choose_layout(p, count_eligible(p));
    if (status)
        return status;
    if (!p->start.found && !p->input->may_initialise) {
        struct mu_text text;
        mu_text_init(&text, plan->text, sizeof plan->text);
        mu_text_put(&text, "no checkpoint is usable, and the workers do not hold the whole state together");
        return MU_ERR_NOT_FOUND;
    }
    if (choose_stages(p) || choose_ranks(p) || choose_buddies(p) || choose_moves(p, ret_fits) || ask_mirrors(p))
        return no_memory(plan);
    choose_sources(p);
    choose_leaves(p);
    return MU_OK;
}

static enum mu_status plan_all(struct planning *p)
{
    struct mu_plan *plan = p->plan;
    bool fits;
    if (find_members_start(p))
        return no_memory(plan);
    if (!from_members(&p->start))
        start_elsewhere(p);
    enum mu_status status = plan_from_start(p, &fits);
    if (status || fits)
        return status;
    mu_reshard_fini(&plan->reshard);
    if (p->input->checkpoint) {
        start_elsewhere(p);
        return plan_from_start(p, &fits);
    }
    struct mu_text text;
    mu_text_init(&text, plan->text, sizeof plan->text);
    mu_text_put(&text, "a rank would have to copy state from or to more than ");
    mu_text_put_uint(&text, MU_PEERS_MAX);
    mu_text_put(&text, " others to change the layout, and there is no checkpoint; set parallel.tp and parallel.pp");
    return MU_ERR_UNAVAILABLE;
}

void mu_plan_make(const struct mu_plan_input *input, struct mu_plan *plan)
{
    struct planning p = {.input = input, .plan = plan};
    size_t count = input->member_count ? input->member_count : 1;
    plan->text[0] = 0;
    plan->layout = (struct mu_layout){0};
    plan->start_step = 0;
    plan->equal_leaves = false;
    plan->left_out = 0;
    plan->saved_s = 0;
    plan->from_mirrors = false;
    plan->roll_forward = (struct mu_step_result){0};
    plan->reshard = (struct mu_reshard){0};
    mu_model_spec_init(&p.model, &input->spec->model);
    p.shares = malloc(count * MU_HELD_SHARES_MAX * sizeof *p.shares);
    p.holders = malloc(count * sizeof *p.holders);
    p.in = malloc(count * sizeof *p.in);
    p.chosen = malloc(count * sizeof *p.chosen);
    plan->status = p.shares && p.holders && p.in && p.chosen ? plan_all(&p) : no_memory(plan);
    if (plan->status)
        mu_reshard_fini(&plan->reshard);
    if (p.has_coverage)
        mu_coverage_fini(&p.coverage);
    free(p.shares);
    free(p.holders);
    free(p.in);
    free(p.chosen);
}

void mu_plan_fini(struct mu_plan *plan)
{
    mu_reshard_fini(&plan->reshard);
}
