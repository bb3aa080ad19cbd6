/* The end of a job, of a generation that nobody is left of, and of a worker's time in it. */
#include "coordinator/core/internal.h"

#include <string.h>

#include "plan/amend.h"

/* ---- leaving ---- */

/* Workers that are on their way out and belong to no generation any more. What they hold is free to go once a
 * generation runs without them (or has been judged useless: `all`, which nobody can judge before it holds still). */
void release_drained(struct mu_coord *coord, struct job *job, bool all)
{
    for (struct worker *w = next_worker(coord, job, NULL), *next; w; w = next) {
        next = next_worker(coord, job, w);
        bool superseded = job->go && w->status.generation != job->record.generation;
        if (w->draining && !w->lost && w->rank == NONE && w->session &&
            ((all && is_still(w)) || superseded || !w->status.held.has_state))
            send_release(coord, w, 0, w->reason);
    }
}

/* ---- the last step ---- */

bool has_finished(const struct job *job, const struct worker *worker)
{
    if (worker->status.phase != MU_PHASE_PARKED || worker->status.park_reason != MU_PARK_FINISHED)
        return false;
    if (mu_amend_pending(&job->record.spec))
        return false; /* there may be more steps, or fewer */
    bool idle = job->has_generation && worker->rank != NONE && mu_layout_is_idle(&job->layout, worker->rank);
    return idle || (worker->status.held.has_state && worker->status.held.step >= mu_job_end(&job->record.spec));
}

bool all_finished(struct mu_coord *coord, const struct job *job)
{
    bool any = false;
    for (uint32_t rank = 0; rank < job->world; rank++) {
        const struct worker *worker = member_at(coord, job, rank);
        if (!worker || worker->lost)
            continue;
        if (!has_finished(job, worker))
            return false;
        any = any || worker->status.held.has_state;
    }
    return any;
}

/* The last state can be saved, or is. (Where it was held in parts, a part may be gone: then steps are done again.) */
bool final_state_is_safe(struct mu_coord *coord, const struct job *job)
{
    bool any;
    const struct checkpoint *newest = newest_committed(job);
    if (job->record.spec.checkpoint.path[0] == 0 || (newest && newest->record.step >= mu_job_end(&job->record.spec)))
        return true;
    return newest_whole_step(coord, job, &any) >= mu_job_end(&job->record.spec);
}

void finish_job(struct mu_coord *coord, struct job *job, enum mu_job_state state, uint32_t exit_code, const char *text)
{
    if (job->intent)
        abandon_checkpoint(coord, job, "the job is over", false);
    job->record.state = state;
    job->record.steps_done = job->steps_done;
    job->record.ended_wall_us = coord->wall_us;
    job->record.command.open = false;
    copy_text(job->record.text, sizeof job->record.text, text);
    set_phase(coord, job, MU_JP_OVER);
    job->settle_until_us = 0;
    revise(coord, job);
    persist_job(coord, job);
    enum mu_event_severity severity = state == MU_JOB_FAILED ? MU_EVENT_ERROR : MU_EVENT_INFO;
    const char *kind = state == MU_JOB_FINISHED ? "job_finished"
                       : state == MU_JOB_FAILED ? "job_failed"
                                                : "job_cancelled";
    event(coord, severity, kind, job, NULL, "job %s %s at step %llu%s%s", job->record.spec.name, kind + 4,
          (unsigned long long)job->steps_done, text[0] ? ": " : "", text);
    for (struct worker *w = next_worker(coord, job, NULL), *next; w; w = next) {
        next = next_worker(coord, job, w);
        if (w->session && !w->lost)
            send_release(coord, w, exit_code, text);
        else
            free_worker(coord, w);
    }
    drop_moves(job);
    job->has_generation = false;
    job->world = 0;
    return_borrowed(coord, job);
}

/* Every living member holds the final state. The job is over when a checkpoint of it is committed (where it has
 * checkpoints). */
void finalize(struct mu_coord *coord, struct job *job)
{
    static const uint8_t unknown[32]; /* a rank with a part of the model need not know the whole */
    const uint8_t *sha256 = unknown;
    if (suspect_end(coord, job))
        return;
    for (uint32_t rank = 0; rank < job->world; rank++) {
        const struct worker *worker = member_at(coord, job, rank);
        if (!worker || worker->lost || memcmp(worker->status.weights_sha256, unknown, 32) == 0)
            continue;
        if (sha256 != unknown && memcmp(sha256, worker->status.weights_sha256, 32) != 0) {
            finish_job(coord, job, MU_JOB_FAILED, 1,
                       "ranks hold different final weights: one of these machines computes or copies wrongly");
            return;
        }
        sha256 = worker->status.weights_sha256;
    }
    memcpy(job->record.weights_sha256, sha256, 32);
    job->steps_done = mu_job_end(&job->record.spec);
    set_phase(coord, job, MU_JP_FINALIZING);
    for (uint32_t rank = 0; MU_MUTANT(MU_MUT_RELEASE_EARLY) && rank < job->world; rank++) {
        if (member_at(coord, job, rank))
            send_release(coord, member_at(coord, job, rank), 0, "");
    }
    job_tick(coord, job);
}

/* Between attempts to save the state of parked workers, who do nothing meanwhile: 1 s, doubling with each failure. */
static uint64_t checkpoint_pause_us(const struct job *job)
{
    enum { FIRST_US = 1000000, MOST_US = 10000000 };
    uint64_t pause_us = (uint64_t)FIRST_US << (job->checkpoint_failures < 4 ? job->checkpoint_failures : 4);
    return pause_us < MOST_US ? pause_us : MOST_US;
}

void finalizing_tick(struct mu_coord *coord, struct job *job)
{
    const struct checkpoint *newest = newest_committed(job);
    bool saved = newest && newest->record.step >= mu_job_end(&job->record.spec);
    if (saved && discards_pending(job))
        return; /* by those who leave next */
    if (job->record.spec.checkpoint.path[0] == 0 || saved) {
        finish_job(coord, job, MU_JOB_FINISHED, 0, "");
        return;
    }
    if (job->intent || lease_now(coord) < job->checkpoint_retry_us)
        return;
    job->checkpoint_retry_us = lease_now(coord) + checkpoint_pause_us(job);
    if (order_checkpoint(coord, job, mu_job_end(&job->record.spec), true))
        return;
    job->checkpoint_failures++;
    event(coord, MU_EVENT_WARNING, "checkpoint_failed", job, NULL,
          "the final checkpoint cannot be ordered of those who are left: they go on in a layout of their own first");
    request_plan(coord, job); /* what is left is whole, but in parts that fit no one layout */
}

/* Nobody of it is left: after a restart nobody is waited for. */
static void end_generation(struct mu_coord *coord, struct job *job)
{
    for (uint32_t rank = 0; rank < job->world; rank++) {
        struct worker *worker = member_at(coord, job, rank);
        if (worker)
            free_worker(coord, worker);
    }
    forget_generation(coord, job);
    drop_moves(job);
    job->has_generation = job->go = false;
    job->world = job->arrived = 0;
}

static void let_go(struct mu_coord *coord, struct job *job)
{
    bool anybody_stays = false;
    for (uint32_t rank = 0; rank < job->world; rank++) {
        struct worker *worker = member_at(coord, job, rank);
        if (worker && worker->draining && !worker->lost && worker->session && is_still(worker)) {
            worker->rank = NONE;
            job->members[rank] = NONE;
            job->arrived--;
        } else if (worker && !worker->lost) {
            anybody_stays = true;
        }
    }
    if (!anybody_stays && job->has_generation)
        end_generation(coord, job);
    release_drained(coord, job, true);
}

/* Who wants to leave may go, but the last holder's state goes to a checkpoint first, where the job has a place for one.
 * Planning is tried again now and then: what kept it from succeeding (a bad link, a silent member) may be over. */
void waiting_tick(struct mu_coord *coord, struct job *job)
{
    bool leaving, any;
    uint64_t now = lease_now(coord);
    uint32_t candidates = count_candidates(coord, job, &leaving);
    for (const struct worker *w = next_worker(coord, job, NULL); w && !leaving; w = next_worker(coord, job, w))
        leaving = w->draining && !w->lost && w->session && w->status.held.has_state; /* a spare that still holds some */
    if (leaving && !job->intent) {
        uint64_t held = newest_whole_step(coord, job, &any);
        const struct checkpoint *newest = newest_committed(job);
        bool saved = !any || held == 0 || (newest && newest->record.step >= held);
        if (saved || !draining_are_needed(coord, job)) {
            let_go(coord, job);
        } else if (job->record.spec.checkpoint.path[0]) {
            if (now < job->checkpoint_retry_us)
                return;
            job->checkpoint_retry_us = now + checkpoint_pause_us(job);
            if (!order_checkpoint(coord, job, held, true))
                request_plan(coord, job); /* some of them must roll forward first: in a generation */
            return;
        }
    }
    if (job->intent == 0 && job->settle_until_us == 0 && now - job->phase_since_us > 1000000 &&
        most_ranks(job, candidates) > 0)
        request_plan(coord, job);
}
