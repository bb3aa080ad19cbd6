/* The phases of a job: see the diagram in core.h. */
#include "coordinator/core/internal.h"

#include <string.h>

enum { RETRY_DOUBLINGS = 6 }; /* of settle_ms, after generations that could not be prepared */

void set_phase(struct mu_coord *coord, struct job *job, enum mu_job_phase phase)
{
    interval_count_workers(coord, job);
    job->phase = phase;
    job->phase_since_us = lease_now(coord);
    goodput_note_job(coord, job);
}

bool is_still(const struct worker *worker)
{
    return worker->status.phase == MU_PHASE_SPARE || worker->status.phase == MU_PHASE_PARKED;
}

bool is_kept_off(const struct worker *worker)
{
    return worker->cordoned && worker->rank == NONE && !worker->status.held.has_state &&
           !MU_MUTANT(MU_MUT_IGNORE_CORDON);
}

bool may_take_part(const struct worker *worker)
{
    return worker->ready && !worker->lost && worker->session != 0 && !worker->draining && is_still(worker) &&
           !is_kept_off(worker);
}

/* What broke this generation, each thing once, is told when the next one goes. */
void note_break(struct mu_coord *coord, struct job *job, const char *text)
{
    if (job->broken_us == 0)
        job->broken_us = coord->now_us;
    size_t length = strnlen(job->broken_text, sizeof job->broken_text);
    if (!strstr(job->broken_text, text) && length + strlen(text) + 3 < sizeof job->broken_text)
        format_into(job->broken_text + length, sizeof job->broken_text - length, "%s%s", length ? "; " : "", text);
}

/* ---- planning ---- */

void wait_for_workers(struct mu_coord *coord, struct job *job, const char *why)
{
    set_phase(coord, job, MU_JP_WAITING);
    if (strcmp(job->waiting_text, why) == 0)
        return; /* said already, and nothing has changed */
    copy_text(job->waiting_text, sizeof job->waiting_text, why);
    event(coord, MU_EVENT_INFO, "job_waiting", job, NULL, "job %s waits: %s", job->record.spec.name, why);
}

/* Workers that could be in a generation now, and whether one of them is about to leave. */
uint32_t count_candidates(struct mu_coord *coord, const struct job *job, bool *ret_leaving)
{
    uint32_t count = 0;
    *ret_leaving = false;
    for (struct worker *w = next_worker(coord, job, NULL); w; w = next_worker(coord, job, w)) {
        if (w->lost || is_kept_off(w))
            continue;
        if (w->draining)
            *ret_leaving = *ret_leaving || w->rank != NONE;
        else if (w->ready && (w->rank != NONE || (w->session != 0 && is_still(w))))
            count++;
    }
    return count;
}

/* WAITING: plan soon, or at once when no further worker could change the plan. The exact count costs a walk over the
 * workers, so the upper bound `ready_count` is asked first: N workers join in O(N). */
static void settle_waiting(struct mu_coord *coord, struct job *job)
{
    bool leaving;
    uint32_t most = most_ranks(job, UINT32_MAX);
    if (job->settle_until_us && job->ready_count < most)
        return;
    if (most_ranks(job, job->ready_count) == 0) { /* too few: the plan says what is short, once for each number */
        if (job->ready_count > 0 && job->ready_count != job->told_short)
            job->settle_until_us = lease_now(coord) + (uint64_t)coord->config.settle_ms * 1000;
        job->told_short = job->ready_count;
        return;
    }
    uint32_t world = most_ranks(job, count_candidates(coord, job, &leaving));
    if (world >= most)
        job->settle_until_us = lease_now(coord);
    else if (world > 0 && job->settle_until_us == 0)
        job->settle_until_us = lease_now(coord) + (uint64_t)coord->config.settle_ms * 1000;
}

/* STEPPING: regroup for who leaves or is too many, at once, and for who would make the world larger, soon. */
static void settle_stepping(struct mu_coord *coord, struct job *job)
{
    bool leaving;
    uint32_t candidates = count_candidates(coord, job, &leaving) - count_isolated_spares(coord, job);
    if (candidates < job->considered)
        job->considered = candidates; /* who comes in place of who left may change the plan again */
    bool too_many = mu_layout_working(&job->layout) > job->record.spec.workers.max; /* it was scaled down */
    if (leaving || too_many ||
        job->layout.idle > 0) { /* idle ranks have given away what they held: nothing keeps them */
        /* Regrouping helps who leaves only if its state can go somewhere: to others, or to a checkpoint. */
        bool state_can_go =
            job->record.spec.checkpoint.path[0] || most_ranks(job, candidates) > 0 || staying_are_whole(coord, job);
        if (state_can_go) {
            job->regroup_for_leaving = true;
            job->settle_until_us = lease_now(coord);
            return;
        }
    }
    if (candidates > job->considered && most_ranks(job, candidates) > mu_layout_working(&job->layout) &&
        job->settle_until_us == 0)
        job->settle_until_us = lease_now(coord) + (uint64_t)coord->config.settle_ms * 1000;
}

void settle(struct mu_coord *coord, struct job *job)
{
    bool due = job->settle_until_us && lease_now(coord) >= job->settle_until_us;
    if (job->phase == MU_JP_WAITING && !due)
        settle_waiting(coord, job);
    else if (job->phase == MU_JP_STEPPING)
        settle_stepping(coord, job);
}

/* ---- arriving: the members of a phase are counted as they reach what it waits for ---- */

static void go(struct mu_coord *coord, struct job *job);

static void all_arrived(struct mu_coord *coord, struct job *job)
{
    switch (job->phase) {
    case MU_JP_PREPARING:
        go(coord, job);
        break;
    case MU_JP_STEPPING:
        checkpoint_after_park(coord, job); /* one may have been ordered when the last boundary was past already */
        if (!all_finished(coord, job))
            break;
        if (final_state_is_safe(coord, job))
            finalize(coord, job);
        else
            park_all(coord, job);
        break;
    case MU_JP_PARKING:
        if (feed_pending(coord, job))
            break; /* parked_waits_no_more goes on */
        feed_over(job);
        job->record.command.open = false;
        judge_links(coord, job);
        checkpoint_after_park(coord, job);
        if (all_finished(coord, job) && final_state_is_safe(coord, job))
            finalize(coord, job);
        else
            request_plan(coord, job);
        break;
    default:
        break;
    }
}

static void arrive(struct mu_coord *coord, struct job *job, struct worker *worker)
{
    if (worker->arrived)
        return;
    worker->arrived = true;
    bool early = MU_MUTANT(MU_MUT_GO_BEFORE_ALL_PREPARED) && job->phase == MU_JP_PREPARING && job->world > 1;
    if (++job->arrived == job->world - early)
        all_arrived(coord, job);
}

/* Starts counting: lost members and those already there count at once. `notify` is told to everyone else. */
static void await_still(struct mu_coord *coord, struct job *job, const struct mu_coord_message *notify)
{
    set_phase(coord, job, MU_JP_PARKING);
    job->change_begun_us = lease_now(coord);
    job->arrived = 0;
    job->settle_until_us = 0;
    for (uint32_t rank = 0; rank < job->world; rank++) {
        struct worker *worker = member_at(coord, job, rank);
        if (!worker) {
            job->arrived++;
            continue;
        }
        worker->arrived =
            worker->lost || (worker->session != 0 && is_still(worker)) || MU_MUTANT(MU_MUT_PLAN_BEFORE_PARKED);
        job->arrived += worker->arrived;
        if (!worker->arrived && notify)
            send_to(coord, worker, notify);
    }
    if (job->arrived == job->world)
        all_arrived(coord, job);
}

void parked_waits_no_more(struct mu_coord *coord, struct job *job)
{
    if (job->phase == MU_JP_PARKING && job->feed_until_us && job->arrived == job->world && !feed_pending(coord, job))
        all_arrived(coord, job);
}

void park_all(struct mu_coord *coord, struct job *job)
{
    feed_over(job); /* with the generation */
    job->revoked = true;
    await_still(coord, job, &(struct mu_coord_message){.kind = MU_CM_REVOKE, .generation = job->record.generation});
}

static struct mu_coord_message park_command(const struct job *job)
{
    struct mu_coord_message message = {.kind = MU_CM_COMMAND, .generation = job->record.generation};
    message.command.number = job->record.command.number;
    message.command.kind = MU_COMMAND_PARK;
    message.command.first_open = first_open_command(job);
    return message;
}

void regroup(struct mu_coord *coord, struct job *job)
{
    job->revoked = job->regroup_for_leaving = false;
    job->record.command =
        (struct mu_command_record){.number = job->record.command.number + 1, .kind = MU_COMMAND_PARK, .open = true};
    persist_job(coord, job);
    struct mu_coord_message message = park_command(job);
    await_still(coord, job, &message);
}

/* ---- a generation begins ---- */

static uint32_t leaves_of_rank(const struct job *job, const struct mu_plan *plan, uint32_t rank)
{
    uint32_t count = 0;
    if (mu_layout_is_idle(&plan->layout, rank))
        return 0;
    uint32_t replica = mu_layout_coords(&plan->layout, rank).d;
    if (!plan->equal_leaves)
        return plan->leaf_counts[replica];
    mu_plan_leaf_range(job->leaves, plan->layout.dp, NULL, replica, &count);
    return count;
}

/* Old members step back; new ones take their ranks. Slots of the lost are free from here on. */
static void install_members(struct mu_coord *coord, struct job *job, const struct mu_plan *plan)
{
    speeds_end(coord, job);
    for (uint32_t rank = 0; rank < job->world; rank++) {
        struct worker *worker = member_at(coord, job, rank);
        if (!worker)
            continue;
        if (worker->lost)
            free_worker(coord, worker);
        else
            worker->rank = NONE;
    }
    job->has_generation = true;
    job->layout = plan->layout;
    job->world = mu_layout_world(&plan->layout);
    job->arrived = 0;
    for (uint32_t rank = 0; rank < job->world; rank++) {
        const struct mu_plan_rank *planned = &plan->ranks[rank];
        uint32_t slot = job->plan_slots[planned->member];
        struct worker *worker = &coord->workers[slot];
        job->members[rank] = slot;
        worker->rank = rank;
        worker->arrived = false;
        worker->leaf_count = leaves_of_rank(job, plan, rank);
        worker->seconds_per_leaf = 0;
        worker->speed_reports = 0;
        worker->source = planned->source;
        worker->accuser = NONE;
        worker->progress_us = lease_now(coord);
    }
}

/* "; state from mirrors, 0 steps replayed, 52488 bytes moved" */
static void note_start(struct job *job, const struct mu_plan *plan, uint64_t lost_steps)
{
    char source[48];
    switch (plan->ranks[0].source) {
    case MU_SOURCE_CHECKPOINT:
        job->start_source = MU_START_CHECKPOINT;
        format_into(source, sizeof source, "checkpoint %llu", (unsigned long long)job->plan_checkpoint);
        break;
    case MU_SOURCE_INIT:
        job->start_source = MU_START_SEED;
        format_into(source, sizeof source, "the seed");
        break;
    default:
        job->start_source = plan->from_mirrors ? MU_START_MIRRORS : MU_START_HOLDERS;
        format_into(source, sizeof source, plan->from_mirrors ? "mirrors" : "its holders");
    }
    format_into(job->start_text, sizeof job->start_text, "; state from %s, %llu steps replayed, %llu bytes moved",
                source, (unsigned long long)lost_steps, (unsigned long long)plan->reshard.bytes);
}

static void assign(struct mu_coord *coord, struct job *job, const struct mu_plan *plan, const uint8_t *secret)
{
    bool back = job->has_generation && plan->start_step < job->steps_done;
    uint64_t lost_steps = back ? job->steps_done - plan->start_step : 0;
    note_start(job, plan, lost_steps);
    if (back) {
        job->replayed_steps += lost_steps;
        if (job->replay_until < job->steps_done)
            job->replay_until = job->steps_done;
        event(coord, MU_EVENT_WARNING, "steps_replayed", job, NULL,
              "no worker holds step %llu; going back %llu steps to %llu (%s)", (unsigned long long)job->steps_done,
              (unsigned long long)lost_steps, (unsigned long long)plan->start_step,
              job->plan_checkpoint ? "newest checkpoint or holder" : "from the seed");
    }
    job->steps_done = plan->start_step;
    place_amendments(coord, job);
    install_members(coord, job, plan);
    if (!MU_MUTANT(MU_MUT_REUSE_GENERATION) || job->go || job->record.generation == 0)
        job->record.generation++;
    job->record.steps_done = plan->start_step;
    job->go = false;
    job->considered = job->plan_staying > plan->left_out ? job->plan_staying - plan->left_out : 0;
    job->regroup_for_leaving = job->plan_without_state = false;
    job->feed_attempts = 0;
    job->has_next_layout = false;
    job->equal_leaves = plan->equal_leaves;
    if (!plan->equal_leaves)
        memcpy(job->leaf_counts, plan->leaf_counts, plan->layout.dp * sizeof job->leaf_counts[0]);
    job->start_step = plan->start_step;
    job->roll_forward = plan->roll_forward;
    suspect_assign(coord, job);
    job->command_base = job->record.command.number;
    job->generations++;
    job->next_due_step = 0;
    if (job->interval.base > plan->start_step)
        job->interval.base = plan->start_step;
    memcpy(job->secret, secret, sizeof job->secret);
    set_phase(coord, job, MU_JP_PREPARING);
    persist_job(coord, job);
    persist_generation(coord, job);
    persist_tally(coord, job);
    probe_gives_way(coord, job);
    for (uint32_t rank = 0; rank < job->world; rank++)
        send_assign(coord, job, member_at(coord, job, rank));
    for (uint32_t rank = mu_layout_working(&job->layout); MU_MUTANT(MU_MUT_FREE_IDLE_EARLY) && rank < job->world;
         rank++)
        send_release(coord, member_at(coord, job, rank), 0, "");
}

/* More workers have come than the last plan could choose from, somebody is to leave, or some are slow: a change is
 * worth it only for a larger world, without those that leave, or for stages that save more than it takes. Who lacks
 * something in it gets that first. */
static void trial_planned(struct mu_coord *coord, struct job *job, const struct mu_plan *plan, const uint8_t *secret)
{
    job->trial_ticket = 0;
    if (job->phase != MU_JP_STEPPING || job->arrived > 0)
        return;
    bool good = plan->status == MU_OK;
    bool larger = good && mu_layout_working(&plan->layout) > mu_layout_working(&job->layout);
    bool pays = good && !larger && !job->regroup_for_leaving && speeds_change_pays(coord, job, plan);
    if (!larger && !job->regroup_for_leaving && !pays) {
        feed_nothing_new(coord, job);
        return;
    }
    job->feed_again = false;
    if (!good || !feed_begin(coord, job, plan, secret))
        regroup(coord, job);
}

/* Somebody is to leave: at once, unless another one gets his place and its state before. */
static void regroup_for_leaving(struct mu_coord *coord, struct job *job)
{
    if (job->trial_ticket)
        return;
    if (feed_possible(coord, job))
        request_trial(coord, job);
    else if (!job->feeding)
        regroup(coord, job);
}

/* More than an Assign can tell, or than there is memory for. A checkpoint needs no moves. */
static void moves_impossible(struct mu_coord *coord, struct job *job, const char *why)
{
    bool had_state = !job->plan_without_state;
    drop_moves(job);
    job->plan_without_state = had_state && newest_committed(job);
    if (!job->plan_without_state) {
        wait_for_workers(coord, job, why);
        return;
    }
    event(coord, MU_EVENT_WARNING, "state_not_moved", job, NULL, "%s; starting from the newest checkpoint instead",
          why);
    request_plan(coord, job);
}

void on_planned(struct mu_coord *coord, uint64_t ticket, const struct mu_plan *plan, const uint8_t *secret)
{
    uint64_t slot = ticket & UINT16_MAX;
    if (slot >= coord->job_count)
        return;
    struct job *job = &coord->jobs[slot];
    if (job->trial_ticket && job->trial_ticket == ticket) {
        trial_planned(coord, job, plan, secret);
        return;
    }
    if (job->plan_ticket != ticket || job->phase != MU_JP_PLANNING)
        return; /* overtaken by events */
    const struct checkpoint *newest = usable_checkpoint(coord, job);
    if (newest && newest->record.number != job->plan_checkpoint && newest->record.step > plan->start_step &&
        !MU_MUTANT(MU_MUT_START_FROM_SEED)) {
        request_plan(coord, job); /* committed while the plan was made: nobody need go back that far */
        return;
    }
    char why[MU_TEXT_SIZE];
    switch (plan->status) {
    case MU_OK:
        if (probe_first(coord, job, plan, secret))
            break;
        if (take_moves(coord, job, plan, why))
            assign(coord, job, plan, secret);
        else
            moves_impossible(coord, job, why);
        break;
    case MU_ERR_NOT_FOUND:
        finish_job(coord, job, MU_JOB_FAILED, 1,
                   "no workers hold its whole state and no checkpoint of it can be read, though there were some: a "
                   "silent fresh start is refused");
        break;
    default:
        wait_for_workers(coord, job, plan->text);
        if (job->told_short && job->told_short != job->ready_count)
            settle(coord, job); /* more came while that was found out */
        break;
    }
}

void send_go(struct mu_coord *coord, const struct job *job, const struct worker *worker)
{
    send_simple(coord, worker, MU_CM_GO, job->record.generation);
}

/* "tp 2 x pp 2 x dp 1, optimizer sharded, with buddies, 1 idle" */
static void format_layout(const struct mu_layout *layout, char *out, size_t size)
{
    char idle[24] = "";
    if (layout->idle)
        format_into(idle, sizeof idle, ", %u idle", layout->idle);
    format_into(out, size, "tp %u x pp %u x dp %u%s%s%s", layout->tp, layout->pp, layout->dp,
                layout->sharded ? ", optimizer sharded" : "", layout->buddy_shift ? ", with buddies" : "", idle);
}

/* The end of the line is never cut: what broke gives way to it. */
static void tell_go(struct mu_coord *coord, struct job *job)
{
    char layout[96], after[48] = "", outcome[MU_EVENT_TEXT_SIZE];
    format_layout(&job->layout, layout, sizeof layout);
    if (job->broken_us) {
        coord->counters.recoveries[job->start_source]++;
        coord->counters.recovery_us[job->start_source] += coord->now_us - job->broken_us;
        format_into(after, sizeof after, " after %.0f ms", (double)(coord->now_us - job->broken_us) * 1e-3);
    }
    const char *verb = job->reformed ? "continue" : "start";
    uint32_t working = mu_layout_working(&job->layout);
    format_into(outcome, sizeof outcome, "%u worker%s %s%s as %s at step %llu%s (generation %llu)%s", working,
                working == 1 ? "" : "s", verb, working == 1 ? "s" : "", layout, (unsigned long long)job->start_step,
                after, (unsigned long long)job->record.generation, job->reformed ? job->start_text : "");
    size_t room = sizeof outcome - strlen(outcome) - sizeof "...; ", length = strlen(job->broken_text);
    bool fits = length <= room;
    event(coord, MU_EVENT_INFO, "generation_go", job, NULL, "%.*s%s%s", (int)(fits ? length : room), job->broken_text,
          length == 0 ? ""
          : fits      ? "; "
                      : "...; ",
          outcome);
    job->reformed = true;
    job->waiting_text[0] = 0;
    job->told_short = 0;
    job->broken_us = 0;
    job->broken_text[0] = 0;
}

/* One rotation for all, the best there is: where hosts are too unequal, or stand in too odd an order, it leaves some.
 */
static void tell_buddies(struct mu_coord *coord, const struct job *job)
{
    uint32_t together = 0, working = mu_layout_working(&job->layout);
    for (uint32_t rank = 0; rank < working && job->layout.buddy_shift > 0; rank++) {
        const struct worker *worker = member_at(coord, job, rank),
                            *buddy = member_at(coord, job, mu_layout_buddy(&job->layout, rank));
        together += worker && buddy && strcmp(worker->host, buddy->host) == 0;
    }
    if (together > 0)
        event(coord, MU_EVENT_INFO, "buddies_together", job, NULL,
              "%u of %u workers have their buddy on their own host: if it vanishes, the job goes back to a checkpoint",
              together, working);
}

static void go(struct mu_coord *coord, struct job *job)
{
    job->go = true;
    job->unprepared = 0;
    job->arrived = 0;
    drop_moves(job);
    job->record.state = MU_JOB_RUNNING;
    set_phase(coord, job, MU_JP_STEPPING);
    speeds_begin(coord, job);
    job->progress_us = lease_now(coord);
    settle_amendments(coord, job);
    persist_job(coord, job);
    persist_generation(coord, job);
    struct checkpoint *start = find_checkpoint(job, job->plan_checkpoint);
    suspect_go(job);
    interval_go(coord, job);
    persist_tally(coord, job);
    bool loaded = start != NULL; /* by all: then every byte of it was read and verified */
    for (uint32_t rank = 0; rank < job->world; rank++) {
        struct worker *worker = member_at(coord, job, rank);
        loaded = loaded && (worker->source == MU_SOURCE_CHECKPOINT || mu_layout_is_idle(&job->layout, rank));
        worker->arrived = false;
        forget_fault(job, worker);
        worker->status.phase = MU_PHASE_RUNNING;
        holds_own_share(job, worker, job->start_step);
        worker->progress_us = lease_now(coord);
        send_go(coord, job, worker);
    }
    if (loaded && start->record.state == MU_CKPT_COMMITTED)
        note_verified(coord, start);
    tell_go(coord, job);
    tell_buddies(coord, job);
    release_drained(coord, job, true);
    delete_void(coord, job);
    return_borrowed(coord, job);
    settle(coord, job);
    checkpoint_policy(coord, job);
}

/* ---- a generation breaks ---- */

/* Once may be chance. What fails again may lack somebody who is about to come: two hosts that need each other's pieces
 * of a checkpoint, each alone at its turn, would go on like that for ever. So the next plans come later and later. */
static void note_unprepared(struct mu_coord *coord, struct job *job)
{
    job->unprepared++;
    uint32_t doublings = job->unprepared < RETRY_DOUBLINGS ? job->unprepared : RETRY_DOUBLINGS;
    if (job->unprepared > 1)
        job->retry_us = lease_now(coord) + ((uint64_t)coord->config.settle_ms * 1000 << doublings);
}

/* A member parked without being told to. */
static void member_parked(struct mu_coord *coord, struct job *job, struct worker *worker)
{
    const struct mu_worker_status *status = &worker->status;
    char text[MU_EVENT_TEXT_SIZE];
    if (status->bad_checkpoint)
        mark_checkpoint_bad(coord, job, status->bad_checkpoint, status->text);
    if (status->park_reason == MU_PARK_ENGINE || (status->park_reason == MU_PARK_PREPARE && !status->bad_checkpoint &&
                                                  status->peer_failure == MU_PEER_FAILURE_NONE)) {
        if (status->park_reason == MU_PARK_PREPARE) {
            note_unprepared(coord, job);
            suspect_unprepared(coord, job, worker);
        }
        format_into(text, sizeof text, "worker %s cannot go on: %s", worker->name, status->text);
        note_break(coord, job, text);
        note_fault(job, worker);
        declare_lost(coord, worker, "%s", status->text);
        return;
    }
    uint64_t generation = job->record.generation;
    if (status->peer_failure != MU_PEER_FAILURE_NONE)
        judge_peer(coord, job, worker);
    bool still_there =
        job->record.generation == generation && (job->phase == MU_JP_PREPARING || job->phase == MU_JP_STEPPING);
    if (still_there)
        park_all(coord, job);
}

void member_lost(struct mu_coord *coord, struct job *job, struct worker *worker)
{
    char text[MU_EVENT_TEXT_SIZE];
    format_into(text, sizeof text, "worker %s lost (%s)", worker->name, worker->reason);
    note_break(coord, job, text);
    switch (job->phase) {
    case MU_JP_PREPARING:
    case MU_JP_STEPPING:
    case MU_JP_PLANNING: /* its plan may build on what the lost one held */
        park_all(coord, job);
        break;
    case MU_JP_PARKING:
        if (!job->revoked) /* the boundary of the command may never come */
            park_all(coord, job);
        else
            arrive(coord, job, worker);
        break;
    case MU_JP_FINALIZING:
        if (!all_finished(coord, job) || !final_state_is_safe(coord, job))
            park_all(coord, job); /* nobody is left with the result: plan again */
        break;
    case MU_JP_WAITING:
    case MU_JP_OVER:
    case MU_JP_COUNT:
        break;
    }
}

void member_silent(struct mu_coord *coord, struct job *job, struct worker *worker)
{
    if (job->phase == MU_JP_PLANNING) {
        park_all(coord, job); /* wait for it, or for its loss, before building on it */
    } else if (worker->arrived && (job->phase == MU_JP_PARKING || job->phase == MU_JP_PREPARING)) {
        worker->arrived = false;
        job->arrived--;
    }
}

/* ---- what a worker needs, and what its state means ---- */

static void reconcile_preparing(struct mu_coord *coord, struct job *job, struct worker *worker)
{
    const struct mu_worker_status *status = &worker->status;
    if (status->generation < job->record.generation) {
        if (is_still(worker))
            send_assign(coord, job, worker);
        else
            send_simple(coord, worker, MU_CM_REVOKE, status->generation);
    } else if (status->phase == MU_PHASE_PREPARED) {
        arrive(coord, job, worker);
    } else if (status->phase == MU_PHASE_PARKED) {
        member_parked(coord, job, worker);
    }
}

static void reconcile_stepping(struct mu_coord *coord, struct job *job, struct worker *worker)
{
    const struct mu_worker_status *status = &worker->status;
    if (status->generation != job->record.generation || status->phase == MU_PHASE_SPARE ||
        status->phase == MU_PHASE_PREPARING) {
        declare_lost(coord, worker, "it stands in generation %llu, the job in %llu",
                     (unsigned long long)status->generation, (unsigned long long)job->record.generation);
    } else if (status->phase == MU_PHASE_PREPARED) {
        send_go(coord, job, worker);
        resend_checkpoint(coord, job, worker);
    } else if (status->phase == MU_PHASE_RUNNING) {
        resend_checkpoint(coord, job, worker);
    } else if (has_finished(job, worker)) {
        arrive(coord, job, worker);
    } else if (status->phase == MU_PHASE_PARKED) {
        member_parked(coord, job, worker);
    }
}

static void reconcile_parking(struct mu_coord *coord, struct job *job, struct worker *worker)
{
    const struct mu_worker_status *status = &worker->status;
    if (is_still(worker)) {
        bool by_failure = status->generation == job->record.generation && status->peer_failure != MU_PEER_FAILURE_NONE;
        if (status->bad_checkpoint)
            mark_checkpoint_bad(coord, job, status->bad_checkpoint, status->text);
        if (!job->revoked && status->park_reason != MU_PARK_COMMAND && status->park_reason != MU_PARK_FINISHED) {
            member_parked(coord, job, worker); /* a failure overtook the command */
            if (job->phase == MU_JP_PARKING && !job->revoked && !worker->lost)
                park_all(coord, job);
            return;
        }
        uint64_t generation = job->record.generation;
        if (by_failure)
            judge_peer(coord, job, worker);
        if (job->phase == MU_JP_PARKING && job->record.generation == generation && !worker->lost)
            arrive(coord, job, worker);
    } else if (job->revoked || status->generation != job->record.generation || !job->go) {
        send_simple(coord, worker, MU_CM_REVOKE, status->generation);
    } else if (status->phase == MU_PHASE_PREPARED || status->phase == MU_PHASE_RUNNING) {
        if (status->phase == MU_PHASE_PREPARED)
            send_go(coord, job, worker);
        resend_checkpoint(coord, job, worker);
        if (status->command_received < job->record.command.number) {
            struct mu_coord_message message = park_command(job);
            send_to(coord, worker, &message);
        }
    }
}

static void reconcile_outside(struct mu_coord *coord, struct job *job, struct worker *worker)
{
    if (!is_still(worker) && worker->status.phase != MU_PHASE_PARKING)
        send_simple(coord, worker, MU_CM_REVOKE, worker->status.generation);
    else if (worker->draining && worker->rank == NONE)
        release_drained(coord, job, false);
    else if (worker->ready)
        settle(coord, job);
}

static void reconcile_member(struct mu_coord *coord, struct job *job, struct worker *worker)
{
    switch (job->phase) {
    case MU_JP_PREPARING:
        reconcile_preparing(coord, job, worker);
        break;
    case MU_JP_STEPPING:
        reconcile_stepping(coord, job, worker);
        break;
    case MU_JP_PARKING:
        reconcile_parking(coord, job, worker);
        break;
    case MU_JP_FINALIZING:
        resend_checkpoint(coord, job, worker);
        break;
    case MU_JP_WAITING:
    case MU_JP_PLANNING:
        resend_checkpoint(coord, job, worker);
        reconcile_outside(coord, job, worker);
        break;
    case MU_JP_OVER:
    case MU_JP_COUNT:
        break;
    }
}

void reconcile(struct mu_coord *coord, struct worker *worker)
{
    struct job *job = job_of(coord, worker);
    if (is_over(job)) {
        send_release(coord, worker, job->record.state == MU_JOB_FAILED, job->record.text);
        return;
    }
    if (worker->rank == NONE) {
        feed_advance(coord, job, worker);
        if (worker->rank == NONE)
            reconcile_outside(coord, job, worker);
        return;
    }
    reconcile_member(coord, job, worker);
    if (worker->used && !worker->lost && worker->rank != NONE)
        feed_advance(coord, job, worker);
}

/* Nobody hangs by himself (each waits for another one), and still no step is done. */
static bool is_stuck(const struct mu_coord *coord, const struct job *job)
{
    uint64_t since_us = job->progress_us > job->phase_since_us ? job->progress_us : job->phase_since_us;
    uint64_t hang_us = 3ull * coord->config.hang_floor_ms * 1000;
    return lease_now(coord) - since_us > hang_us + (uint64_t)(job->seconds_per_step * 60e6);
}

void job_tick(struct mu_coord *coord, struct job *job)
{
    uint64_t now = lease_now(coord);
    if (job->settle_until_us && now >= job->settle_until_us) {
        job->settle_until_us = 0;
        if (job->phase == MU_JP_WAITING)
            request_plan(coord, job);
        else if (job->phase == MU_JP_STEPPING && job->regroup_for_leaving)
            regroup_for_leaving(coord, job);
        else if (job->phase == MU_JP_STEPPING)
            request_trial(coord, job);
    }
    suspect_tick(coord, job);
    switch (job->phase) {
    case MU_JP_STEPPING:
        if (job->arrived == 0 && is_stuck(coord, job)) {
            note_break(coord, job, "no step completed, everybody waits for everybody");
            park_all(coord, job);
            break;
        }
        for (uint32_t i = 0; i < job->bad_link_count; i++) { /* probe again */
            if (job->bad_links[i].until_us && now >= job->bad_links[i].until_us) {
                job->bad_links[i].until_us = 0;
                settle(coord, job);
            }
        }
        if (mu_layout_working(&job->layout) > job->record.spec.workers.max && !job->regroup_for_leaving)
            settle(coord, job); /* scaled down while the generation was made, or before a restart */
        checkpoint_policy(coord, job);
        feed_tick(coord, job);
        amendments_tick(coord, job);
        break;
    case MU_JP_PARKING:
        parked_waits_no_more(coord, job);
        if (job->phase == MU_JP_PARKING && !job->revoked && is_stuck(coord, job)) {
            note_break(coord, job, "the boundary of a command does not come, everybody waits for everybody");
            park_all(coord, job);
        }
        break;
    case MU_JP_FINALIZING:
        finalizing_tick(coord, job);
        break;
    case MU_JP_WAITING:
        waiting_tick(coord, job);
        break;
    default:
        break;
    }
}
