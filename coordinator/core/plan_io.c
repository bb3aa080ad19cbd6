/* From a job's workers to the input of a plan, and from a plan to what each rank is told. */
#include "coordinator/core/internal.h"

#include <stdlib.h>
#include <string.h>

#include "plan/amend.h"

/* ---- how many ---- */

static uint32_t given(uint32_t degree)
{
    return degree ? degree : 1;
}

/* Degrees that the job gives are met exactly. */
uint32_t fewest_ranks(const struct job *job)
{
    const struct mu_job_spec *spec = &job->record.spec;
    uint64_t ranks = (uint64_t)given(spec->parallel.tp) * given(spec->parallel.pp) * given(spec->parallel.dp);
    ranks = ranks > spec->workers.min ? ranks : spec->workers.min;
    return ranks < MU_WORKERS_MAX ? (uint32_t)ranks : MU_WORKERS_MAX;
}

uint32_t most_ranks(const struct job *job, uint32_t eligible)
{
    const struct mu_job_spec *spec = &job->record.spec;
    uint32_t columns = given(spec->parallel.tp) * given(spec->parallel.pp), fewest = fewest_ranks(job);
    uint64_t tp = spec->parallel.tp ? spec->parallel.tp : job->model.config.slices;
    uint64_t pp = spec->parallel.pp ? spec->parallel.pp : job->model.config.layers;
    uint64_t dp = spec->parallel.dp ? spec->parallel.dp : job->leaves;
    uint64_t most = (tp ? tp : 1) * pp * dp;
    uint32_t wanted = eligible > spec->workers.spares ? eligible - spec->workers.spares : 0;
    if (wanted < fewest)
        wanted = fewest;
    if (wanted > spec->workers.max)
        wanted = spec->workers.max;
    if (wanted > most)
        wanted = (uint32_t)most;
    wanted -= wanted % columns;
    return eligible >= fewest && wanted <= eligible ? wanted : 0;
}

/* ---- the input ---- */

/* While it steps every member has its share of the same step, and nobody else anything. */
static struct mu_held held_in_trial(const struct job *job, const struct worker *worker)
{
    struct mu_held held = {.step = job->steps_done};
    if (worker->rank == NONE || mu_layout_is_idle(&job->layout, worker->rank))
        return held;
    held.has_state = true;
    held.share_count = 1;
    held.shares[0] = (struct mu_held_share){.layout = job->layout, .rank = worker->rank};
    return held;
}

static void add_member(struct mu_coord *coord, struct job *job, const struct worker *worker, const struct mu_held *held,
                       bool leaving)
{
    if (job->plan_count == coord->config.max_members)
        return;
    struct mu_plan_member *member = &coord->plan_members[job->plan_count];
    member->held = *held;
    member->seconds_per_layer = worker->seconds_per_layer;
    member->memory_bytes = worker->memory_bytes;
    member->own_memory = strncmp(worker->backend, "cuda", sizeof worker->backend) == 0;
    member->old_rank = worker->rank;
    member->old_leaf_count = worker->rank == NONE ? 0 : worker->leaf_count;
    member->host = host_number(worker);
    member->domain = worker->domain;
    member->leaving = leaving;
    member->demoted = is_demoted(job, worker) && !MU_MUTANT(MU_MUT_PREFER_DEMOTED);
    job->plan_staying += !leaving;
    job->plan_slots[job->plan_count++] = (uint32_t)(worker - coord->workers);
}

/* Who could not prepare would fail again, and others need nothing of it. */
static bool is_dispensable(const struct job *job, const struct worker *worker)
{
    return worker->rank == NONE && !worker->status.held.has_state && is_faulty(job, worker->incarnation, worker->name);
}

/* Draining workers are there to copy from, unless the rest cannot go on without them (`draining_stay`). */
static void consider(struct mu_coord *coord, struct job *job, const struct worker *worker, bool draining_stay,
                     bool trial)
{
    bool still = trial ? worker->rank != NONE || is_still(worker) : is_still(worker);
    if (!worker->ready || worker->lost || worker->session == 0 || !still || is_kept_off(worker))
        return;
    if (!trial && job->plan_without_faulty && is_dispensable(job, worker))
        return;
    struct mu_held held = {0};
    if (!job->plan_without_state)
        held = trial ? held_in_trial(job, worker) : worker->status.held;
    if (!worker->draining || draining_stay)
        add_member(coord, job, worker, &held, false);
    else if (held.has_state && !MU_MUTANT(MU_MUT_RELEASE_LAST_HOLDER))
        add_member(coord, job, worker, &held, true);
}

/* How far from those that were lost, whose ranks they are likely to get; else where they stand. */
static uint32_t distance_of(const struct worker *worker, const uint32_t *lost_places, uint32_t lost_count)
{
    uint32_t nearest = NONE;
    for (uint32_t i = 0; i < lost_count && worker->place != NONE; i++) {
        uint32_t a = worker->place, b = lost_places[i], apart = a > b ? a - b : b - a;
        nearest = apart < nearest ? apart : nearest;
    }
    return lost_count ? nearest : worker->place;
}

static int compare_newcomers(const void *a, const void *b)
{
    const struct newcomer *x = a, *y = b;
    if (x->distance != y->distance)
        return x->distance < y->distance ? -1 : 1;
    return x->age < y->age ? -1 : x->age > y->age;
}

/* Who has no rank: by the places of their hosts where these are known, then by age. */
static uint32_t sort_newcomers(struct mu_coord *coord, struct job *job)
{
    enum { LOST_LOOKED_AT = 8 };
    uint32_t lost_places[LOST_LOOKED_AT], lost_count = 0, count = 0;
    for (uint32_t rank = 0; rank < job->world && lost_count < LOST_LOOKED_AT; rank++) {
        const struct worker *worker = member_at(coord, job, rank);
        if (worker && worker->lost && worker->place != NONE)
            lost_places[lost_count++] = worker->place;
    }
    for (const struct worker *w = next_worker(coord, job, NULL); w; w = next_worker(coord, job, w)) {
        if (w->rank == NONE) {
            coord->newcomers[count] =
                (struct newcomer){distance_of(w, lost_places, lost_count), count, (uint32_t)(w - coord->workers)};
            count++;
        }
    }
    if (count > 0)
        qsort(coord->newcomers, count, sizeof coord->newcomers[0], compare_newcomers);
    return count;
}

/* Members keep their order, then the others: ranks move as little as they can. Last come those too slow for them. */
static void collect_members(struct mu_coord *coord, struct job *job, bool draining_stay, bool trial)
{
    uint32_t newcomers = sort_newcomers(coord, job);
    bool any_demoted = false;
    job->plan_count = job->plan_staying = 0;
    for (int demoted = 0; demoted <= any_demoted; demoted++) {
        for (uint32_t i = 0; i < job->world + newcomers; i++) {
            const struct worker *worker =
                i < job->world ? member_at(coord, job, i) : &coord->workers[coord->newcomers[i - job->world].slot];
            bool is_last = worker && is_demoted(job, worker) != MU_MUTANT(MU_MUT_PREFER_DEMOTED);
            any_demoted = any_demoted || is_last;
            if (worker && is_last == demoted)
                consider(coord, job, worker, draining_stay, trial);
        }
    }
}

static uint32_t member_index(const struct mu_coord *coord, const struct job *job, struct mu_id incarnation)
{
    for (uint32_t i = 0; i < job->plan_count; i++) {
        if (mu_id_equal(coord->workers[job->plan_slots[i]].incarnation, incarnation))
            return i;
    }
    return NONE;
}

static uint32_t collect_bad_links(struct mu_coord *coord, const struct job *job)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < job->bad_link_count; i++) {
        const struct bad_link *link = &job->bad_links[i];
        if (lease_now(coord) >= link->until_us)
            continue;
        uint32_t a = member_index(coord, job, link->a), b = member_index(coord, job, link->b);
        if (a != NONE && b != NONE)
            coord->plan_links[count++] = (struct mu_plan_link){.a = a, .b = b};
    }
    return count;
}

/* `trial`: what would be, if all parked at this boundary. */
static uint64_t emit_plan(struct mu_coord *coord, struct job *job, bool trial)
{
    const struct checkpoint *newest = usable_checkpoint(coord, job);
    if (MU_MUTANT(MU_MUT_START_FROM_SEED))
        newest = NULL;
    uint64_t ticket = ++coord->plan_count << 16 | (uint64_t)(job - coord->jobs);
    struct mu_plan_input input = {
        .spec = &job->record.spec,
        .costs = job->record.costs,
        .rates = speeds_given(coord, job),
        .members = coord->plan_members,
        .member_count = job->plan_count,
        .bad_links = coord->plan_links,
        .bad_link_count = collect_bad_links(coord, job),
        .checkpoint = newest ? newest->record.number : 0,
        .checkpoint_step = newest ? newest->record.step : 0,
        .may_initialise = trial || !job->record.checkpoint_seen || MU_MUTANT(MU_MUT_START_FROM_SEED),
        .has_old_layout = job->has_generation,
        .old_layout = job->layout,
        .has_next_layout = job->has_next_layout,
        .next_layout = job->next_layout,
    };
    emit(coord, &(struct mu_coord_action){.kind = MU_CA_PLAN, .plan = {.ticket = ticket, .input = &input}});
    return ticket;
}

static uint32_t count_staying(struct mu_coord *coord, const struct job *job)
{
    uint32_t count = 0;
    for (const struct worker *w = next_worker(coord, job, NULL); w; w = next_worker(coord, job, w))
        count += may_take_part(w);
    return count;
}

/* Those who leave have the only copy. Others copy it from them where there are enough others; else it goes to a
 * checkpoint, and else they must stay. *ret_wait: the checkpoint comes first. */
static bool draining_must_stay(struct mu_coord *coord, struct job *job, bool *ret_wait)
{
    *ret_wait = false;
    if (!draining_are_needed(coord, job) || most_ranks(job, count_staying(coord, job)) > 0)
        return false;
    if (job->record.spec.checkpoint.path[0] == 0)
        return true;
    bool any;
    uint64_t held = newest_whole_step(coord, job, &any);
    const struct checkpoint *newest = newest_committed(job);
    if (newest && newest->record.step >= held)
        return false;
    *ret_wait = job->intent != 0 || can_order_parked(coord, job, held);
    return !*ret_wait;
}

/* Nobody holds the state, and of the newest checkpoint of kind local too few hosts are there. */
static bool waits_for_holders(struct mu_coord *coord, struct job *job)
{
    bool any;
    const struct checkpoint *newest = newest_committed(job);
    if (!newest || usable_checkpoint(coord, job))
        return false;
    uint64_t held = newest_whole_step(coord, job, &any);
    if (any && held >= newest->record.step && !job->plan_without_state)
        return false;
    char text[MU_TEXT_SIZE], hosts[160];
    describe_missing(coord, job, &newest->record, hosts, sizeof hosts);
    format_into(text, sizeof text, "checkpoint %llu at step %llu cannot be read: %s",
                (unsigned long long)newest->record.number, (unsigned long long)newest->record.step, hosts);
    wait_for_workers(coord, job, text);
    return true;
}

/* After a generation that could not be prepared: the others are enough, and nobody whose fault it was has what they
 * lack. It may join again when they step. Not where a checkpoint is to be loaded, or after as many as are remembered:
 * then it may be nobody's own fault. */
static bool others_are_enough(struct mu_coord *coord, struct job *job)
{
    uint32_t count = 0;
    bool any;
    if (job->unprepared == 0 || job->unprepared > FAULTS_KEPT)
        return false;
    newest_whole_step(coord, job, &any);
    if (!any && usable_checkpoint(coord, job))
        return false;
    for (const struct worker *w = next_worker(coord, job, NULL); w; w = next_worker(coord, job, w)) {
        bool faulty = is_faulty(job, w->incarnation, w->name);
        if (faulty && may_take_part(w) && !is_dispensable(job, w))
            return false;
        count += !faulty && may_take_part(w);
    }
    return most_ranks(job, count) > 0;
}

/* See note_unprepared. */
static bool waits_to_retry(struct mu_coord *coord, struct job *job)
{
    char why[MU_TEXT_SIZE];
    uint64_t now_us = lease_now(coord);
    if (job->unprepared == 0 || job->plan_without_faulty || now_us >= job->retry_us)
        return false;
    format_into(why, sizeof why, "%u generations in a row could not be prepared; the next is planned in %.1f s",
                job->unprepared, (double)(job->retry_us - now_us) * 1e-6);
    wait_for_workers(coord, job, why);
    job->settle_until_us = job->retry_us;
    return true;
}

void request_plan(struct mu_coord *coord, struct job *job)
{
    for (uint32_t rank = 0; rank < job->world; rank++) {
        const struct worker *worker = member_at(coord, job, rank);
        if (worker && !worker->lost && (worker->session == 0 || !is_still(worker))) {
            park_all(coord, job); /* its state may be the newest: wait for it, or for its loss */
            return;
        }
    }
    bool wait, draining_stay = draining_must_stay(coord, job, &wait);
    job->saving_first = wait;
    if (wait) {
        wait_for_workers(coord, job, "the only holder of its state is leaving; saving it first");
        return; /* waiting_tick orders the checkpoint; planning goes on from there */
    }
    job->plan_without_faulty = others_are_enough(coord, job);
    if (waits_for_holders(coord, job) || waits_to_retry(coord, job))
        return;
    collect_members(coord, job, draining_stay, false);
    const struct checkpoint *newest = usable_checkpoint(coord, job);
    job->plan_checkpoint = newest && !MU_MUTANT(MU_MUT_START_FROM_SEED) ? newest->record.number : 0;
    job->phase = MU_JP_PLANNING;
    job->phase_since_us = lease_now(coord);
    job->trial_ticket = 0;
    job->plan_ticket = emit_plan(coord, job, false);
}

void request_trial(struct mu_coord *coord, struct job *job)
{
    collect_members(coord, job, false, true);
    job->considered = job->plan_staying;
    job->trial_ticket = emit_plan(coord, job, true);
}

/* ---- moves ---- */

void drop_moves(struct job *job)
{
    free(job->moves.moves);
    job->moves = (struct moves){0};
}

static bool copy_moves(struct moves *out, const struct mu_plan *plan)
{
    uint32_t count = plan->reshard.move_count, world = mu_layout_world(&plan->layout);
    size_t moves_bytes = count * sizeof *out->moves;
    uint8_t *memory = calloc(1, moves_bytes + ((size_t)count + world + 2) * sizeof *out->by_from);
    if (!memory)
        return false;
    *out = (struct moves){
        .moves = (struct mu_move *)memory, .by_from = (uint32_t *)(void *)(memory + moves_bytes), .count = count};
    out->first_from = out->by_from + count;
    if (count)
        memcpy(out->moves, plan->reshard.moves, moves_bytes);
    /* Sorted by counting: sizes first, one place further, so that filling moves each start to its place. */
    for (uint32_t i = 0; i < count; i++)
        out->first_from[out->moves[i].from + 2]++;
    for (uint32_t rank = 0; rank < world; rank++)
        out->first_from[rank + 2] += out->first_from[rank + 1];
    for (uint32_t i = 0; i < count; i++)
        out->by_from[out->first_from[out->moves[i].from + 1]++] = i;
    return true;
}

static uint32_t first_to(const struct moves *moves, uint32_t rank)
{
    uint32_t low = 0, high = moves->count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (moves->moves[middle].to < rank)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Those from or to the rank, in the plan's order. Returns how many there are; fills at most MU_MOVES_MAX. */
static uint32_t moves_of(const struct moves *moves, uint32_t rank, struct mu_move *out)
{
    if (moves->count == 0)
        return 0;
    uint32_t to = first_to(moves, rank), to_end = first_to(moves, rank + 1);
    uint32_t from = moves->first_from[rank], from_end = moves->first_from[rank + 1], count = 0;
    while (to < to_end || from < from_end) {
        bool take_to = from == from_end || (to < to_end && to < moves->by_from[from]);
        uint32_t index = take_to ? to++ : moves->by_from[from++];
        if (count < MU_MOVES_MAX)
            out[count] = moves->moves[index];
        count++;
    }
    return count;
}

/* Puts a rank into the ascending list; false: it is full. */
static bool add_peer(uint32_t *peers, uint32_t *count, uint32_t rank)
{
    uint32_t low = 0, high = *count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (peers[middle] < rank)
            low = middle + 1;
        else
            high = middle;
    }
    if (low < *count && peers[low] == rank)
        return true;
    if (*count == MU_PEERS_MAX)
        return false;
    memmove(&peers[low + 1], &peers[low], (*count - low) * sizeof *peers);
    peers[low] = rank;
    ++*count;
    return true;
}

/* Whom a rank exchanges messages with. False: more than can be told. */
static bool peers_of(const struct job *job, const struct mu_layout *layout, uint32_t rank, const struct mu_move *moves,
                     uint32_t move_count, uint32_t peers[MU_PEERS_MAX], uint32_t *ret_count)
{
    _Static_assert((int)MU_LAYOUT_NEIGHBOURS_MAX <= (int)MU_PEERS_MAX, "neighbours fit");
    *ret_count = mu_layout_neighbours(&job->model, layout, rank, peers);
    for (uint32_t i = 0; i < move_count; i++) {
        if (!add_peer(peers, ret_count, moves[i].from == rank ? moves[i].to : moves[i].from))
            return false;
    }
    return true;
}

bool take_moves(struct mu_coord *coord, struct job *job, const struct mu_plan *plan, char why[MU_TEXT_SIZE])
{
    uint32_t peers[MU_PEERS_MAX], peer_count = 0;
    drop_moves(job);
    if (!copy_moves(&job->moves, plan)) {
        format_into(why, MU_TEXT_SIZE, "no memory for a plan of %u moves", plan->reshard.move_count);
        return false;
    }
    for (uint32_t rank = 0; job->moves.count && rank < mu_layout_world(&plan->layout); rank++) {
        uint32_t count = moves_of(&job->moves, rank, coord->assign_moves);
        if (count > MU_MOVES_MAX) {
            format_into(why, MU_TEXT_SIZE, "rank %u would take part in %u moves of state, at most %d are possible",
                        rank, count, MU_MOVES_MAX);
            return false;
        }
        if (!peers_of(job, &plan->layout, rank, coord->assign_moves, count, peers, &peer_count)) {
            format_into(why, MU_TEXT_SIZE, "rank %u would need more than %d peers to move its state", rank,
                        MU_PEERS_MAX);
            return false;
        }
    }
    return true;
}

/* ---- Assign ---- */

static void note_assigned(const struct job *job, struct worker *worker)
{
    worker->status.phase = MU_PHASE_PREPARING; /* as it will be; its next Hello or Status tells what came of it */
    worker->status.generation = job->record.generation;
    worker->status.era = mu_amend_era(&job->record.spec.amendments);
    worker->status.rank = worker->rank;
    worker->status.command_received = worker->status.command_executed = job->command_base;
    worker->status.park_reason = MU_PARK_NONE;
    worker->status.peer_failure = MU_PEER_FAILURE_NONE;
    worker->status.bad_checkpoint = 0;
    worker->feed = worker->status.feed = 0; /* it drops what has not ended */
    worker->status.feed_state = MU_FEED_NONE;
    worker->assigned_generation = job->record.generation;
    worker->assigned_session = worker->session;
}

/* The same answer for all of them: of who is there, which stays while the generation lasts. */
static bool all_have_nccl(struct mu_coord *coord, const struct job *job)
{
    uint32_t working = job->world - job->layout.idle, version = 0;
    for (uint32_t rank = 0; rank < working; rank++) {
        const struct worker *member = member_at(coord, job, rank);
        if (!member || member->nccl_version == 0 || (version && member->nccl_version != version))
            return false;
        version = member->nccl_version;
    }
    return true;
}

/* Also sent again when a worker re-attaches that never got it. */
void send_assign(struct mu_coord *coord, struct job *job, struct worker *worker)
{
    uint32_t ranks[MU_PEERS_MAX];
    struct mu_peer peers[MU_PEERS_MAX];
    struct mu_coord_message message = {.kind = MU_CM_ASSIGN, .generation = job->record.generation};
    struct mu_assign *assign = &message.assign;
    assign->layout = job->layout;
    assign->rank = worker->rank;
    assign->start_step = job->start_step;
    memcpy(assign->secret, job->secret, sizeof assign->secret);
    assign->moves = coord->assign_moves;
    assign->move_count = moves_of(&job->moves, worker->rank, coord->assign_moves);
    MU_ASSERT(assign->move_count <= MU_MOVES_MAX);
    bool fits =
        peers_of(job, &job->layout, worker->rank, assign->moves, assign->move_count, ranks, &assign->peer_count);
    MU_ASSERT(fits);
    assign->peers = peers;
    for (uint32_t i = 0; i < assign->peer_count; i++) {
        const struct worker *peer = member_at(coord, job, ranks[i]);
        if (!peer)
            return; /* lost meanwhile: this generation is being given up */
        peers[i] = (struct mu_peer){
            .rank = ranks[i], .incarnation = peer->incarnation, .name = peer->name, .address = peer->address};
    }
    if (!job->equal_leaves && job->layout.dp <= MU_COUNTED_REPLICAS_MAX)
        assign->leaf_counts = job->leaf_counts;
    assign->source = worker->source;
    assign->roll_forward = job->roll_forward;
    if (worker->source == MU_SOURCE_CHECKPOINT) {
        const struct checkpoint *checkpoint = find_checkpoint(job, job->plan_checkpoint);
        assign->checkpoint = job->plan_checkpoint;
        if (checkpoint) {
            memcpy(assign->checkpoint_dir, checkpoint->record.dir, sizeof assign->checkpoint_dir);
            memcpy(assign->checkpoint_job, checkpoint->record.owner, sizeof assign->checkpoint_job);
            list_holders(coord, job, &checkpoint->record, assign);
        }
    }
    assign->command_base = job->command_base;
    assign->nccl = !job->record.spec.data_tls && worker->nccl_version && all_have_nccl(coord, job);
    if (!MU_MUTANT(MU_MUT_AMEND_NOT_ALL) || worker->rank == 0)
        assign->amendments = &job->record.spec.amendments;
    note_assigned(job, worker);
    send_to(coord, worker, &message);
}
