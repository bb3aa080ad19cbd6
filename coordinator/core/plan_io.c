/* From a job's workers to the input of a plan, and from a plan to what each rank is told. */
#include "coordinator/core/internal.h"

#include <string.h>

uint64_t newest_held_step(struct mu_coord *coord, const struct job *job, bool *ret_any)
{
    uint64_t newest = 0;
    *ret_any = false;
    for (const struct worker *w = next_worker(coord, job, NULL); w; w = next_worker(coord, job, w)) {
        const struct mu_held *held = &w->status.held;
        if (w->lost || w->session == 0 || !is_still(w) || !held->has_state)
            continue;
        if (!*ret_any || held->step > newest)
            newest = held->step;
        *ret_any = true;
    }
    return newest;
}

/* Draining workers stay out, unless nobody else has what they hold: then they are needed once more. */
bool draining_are_needed(struct mu_coord *coord, const struct job *job)
{
    bool any;
    uint64_t newest = newest_held_step(coord, job, &any);
    if (MU_MUTANT(MU_MUT_RELEASE_LAST_HOLDER))
        return false;
    for (const struct worker *w = any ? next_worker(coord, job, NULL) : NULL; w; w = next_worker(coord, job, w)) {
        const struct mu_held *held = &w->status.held;
        if (may_take_part(w) && held->has_state &&
            (held->step >= newest || (held->step + 1 == newest && held->has_gradient)))
            return false;
    }
    return any;
}

static bool takes_part(struct worker *worker, bool with_draining)
{
    bool draining = worker->draining;
    worker->draining = draining && !with_draining;
    bool yes = may_take_part(worker);
    worker->draining = draining;
    return yes;
}

static void add_member(struct mu_coord *coord, struct job *job, const struct worker *worker)
{
    if (job->plan_count == coord->config.max_members)
        return;
    struct mu_plan_member *member = &coord->plan_members[job->plan_count];
    member->held = worker->status.held;
    member->seconds_per_leaf = worker->seconds_per_leaf;
    member->old_rank = worker->rank;
    member->old_leaf_count = worker->rank == NONE ? 0 : worker->leaf_count;
    member->host = (uint32_t)mu_xxh3_64(worker->host, strnlen(worker->host, sizeof worker->host), 0);
    job->plan_slots[job->plan_count++] = (uint32_t)(worker - coord->workers);
}

/* Members keep their order, then the others by age: ranks move as little as they can. */
static void collect_members(struct mu_coord *coord, struct job *job, bool with_draining)
{
    job->plan_count = 0;
    for (uint32_t rank = 0; rank < job->world; rank++) {
        struct worker *worker = member_at(coord, job, rank);
        if (worker && takes_part(worker, with_draining))
            add_member(coord, job, worker);
    }
    for (struct worker *w = next_worker(coord, job, NULL); w; w = next_worker(coord, job, w)) {
        if (w->rank == NONE && takes_part(w, with_draining))
            add_member(coord, job, w);
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

void request_plan(struct mu_coord *coord, struct job *job)
{
    for (uint32_t rank = 0; rank < job->world; rank++) {
        const struct worker *worker = member_at(coord, job, rank);
        if (worker && !worker->lost && (worker->session == 0 || !is_still(worker))) {
            park_all(coord, job); /* its state may be the newest: wait for it, or for its loss */
            return;
        }
    }
    bool needed = draining_are_needed(coord, job);
    if (needed && job->record.spec.checkpoint.path[0]) {
        const struct checkpoint *newest = newest_committed(job);
        bool any;
        if (!newest || newest->record.step < newest_held_step(coord, job, &any)) {
            wait_for_workers(coord, job, "the only holder of its state is leaving; saving it first");
            return; /* waiting_tick orders the checkpoint; planning goes on from there */
        }
        needed = false;
    }
    collect_members(coord, job, needed);
    const struct checkpoint *newest = newest_committed(job);
    if (MU_MUTANT(MU_MUT_START_FROM_SEED))
        newest = NULL;
    job->plan_checkpoint = newest ? newest->record.number : 0;
    struct mu_plan_input input = {
        .spec = &job->record.spec,
        .members = coord->plan_members,
        .member_count = job->plan_count,
        .bad_links = coord->plan_links,
        .bad_link_count = collect_bad_links(coord, job),
        .checkpoint = job->plan_checkpoint,
        .checkpoint_step = newest ? newest->record.step : 0,
        .may_initialise = !job->record.checkpoint_seen || MU_MUTANT(MU_MUT_START_FROM_SEED),
    };
    job->phase = MU_JP_PLANNING;
    job->phase_since_us = lease_now(coord);
    job->plan_ticket = ++coord->plan_count << 16 | (uint64_t)(job - coord->jobs);
    emit(coord, &(struct mu_coord_action){.kind = MU_CA_PLAN, .plan = {.ticket = job->plan_ticket, .input = &input}});
}

/* Also sent again when a worker re-attaches that never got it. */
void send_assign(struct mu_coord *coord, struct job *job, struct worker *worker)
{
    uint32_t neighbours[MU_NEIGHBOURS_MAX], serve[MU_NEIGHBOURS_MAX];
    struct mu_peer peers[MU_NEIGHBOURS_MAX];
    struct mu_coord_message message = {.kind = MU_CM_ASSIGN, .generation = job->record.generation};
    struct mu_assign *assign = &message.assign;
    assign->rank = worker->rank;
    assign->world = job->world;
    assign->start_step = job->start_step;
    memcpy(assign->secret, job->secret, sizeof assign->secret);
    assign->mesh = job->mesh;
    assign->peer_count = mu_plan_neighbours(job->world, job->mesh, worker->rank, neighbours);
    assign->peers = peers;
    assign->serve_ranks = serve;
    for (uint32_t i = 0; i < assign->peer_count; i++) {
        const struct worker *peer = member_at(coord, job, neighbours[i]);
        if (!peer)
            return; /* lost meanwhile: this generation is being given up */
        peers[i] = (struct mu_peer){
            .rank = neighbours[i], .incarnation = peer->incarnation, .name = peer->name, .address = peer->address};
        if (peer->source == MU_SOURCE_PEER && peer->source_rank == worker->rank)
            serve[assign->serve_count++] = neighbours[i];
    }
    if (!job->equal_leaves && job->world <= MU_COUNTED_WORLD_MAX) {
        for (uint32_t rank = 0; rank < job->world; rank++)
            coord->leaf_counts[rank] = coord->workers[job->members[rank]].leaf_count;
        assign->leaf_counts = coord->leaf_counts;
    }
    assign->source = worker->source;
    assign->source_rank = worker->source_rank;
    assign->roll_forward = job->roll_forward;
    if (worker->source == MU_SOURCE_CHECKPOINT) {
        const struct checkpoint *checkpoint = find_checkpoint(job, job->plan_checkpoint);
        assign->checkpoint = job->plan_checkpoint;
        if (checkpoint)
            memcpy(assign->checkpoint_dir, checkpoint->record.dir, sizeof assign->checkpoint_dir);
    }
    assign->command_base = job->command_base;
    worker->status.phase = MU_PHASE_PREPARING; /* as it will be; its next Hello or Status tells what came of it */
    worker->status.generation = job->record.generation;
    worker->status.rank = worker->rank;
    worker->status.command_received = worker->status.command_executed = job->command_base;
    worker->status.park_reason = MU_PARK_NONE;
    worker->status.peer_failure = MU_PEER_FAILURE_NONE;
    worker->status.bad_checkpoint = 0;
    worker->assigned_generation = job->record.generation;
    worker->assigned_session = worker->session;
    send_to(coord, worker, &message);
}
