/* The core's life and its one entry. */
#include "coordinator/core/internal.h"

#include <stdlib.h>
#include <string.h>

void mu_coord_config_init(struct mu_coord_config *config)
{
    *config = (struct mu_coord_config){
        .max_jobs = 256,
        .max_workers = 16384,
        .max_members = 16384,
        .heartbeat_ms = 1000,
        .suspect_ms = 3000,
        .lost_ms = 6000,
        .reattach_grace_ms = 1000,
        .settle_ms = 200,
        .rebalance_ms = 10000,
        .prepare_limit_ms = 60000,
        .hang_floor_ms = 30000,
        .link_retry_ms = 10000,
        .scrub_again_s = 604800, /* a week */
        .crash_limit = 5,
        .crash_window_ms = 600000,
    };
}

enum mu_status mu_coord_config_check(const struct mu_coord_config *config, struct mu_error *err)
{
    if (config->heartbeat_ms < 10 || config->heartbeat_ms > 60000)
        return mu_fail(err, MU_ERR_INVALID, "--heartbeat-ms %u is not allowed: 10 to 60000", config->heartbeat_ms);
    if (config->suspect_ms < 2 * config->heartbeat_ms)
        return mu_fail(err, MU_ERR_INVALID, "--suspect-ms %u is not allowed: at least two heartbeats (%u)",
                       config->suspect_ms, 2 * config->heartbeat_ms);
    if (config->lost_ms <= config->suspect_ms)
        return mu_fail(err, MU_ERR_INVALID, "--lost-ms %u is not allowed: more than --suspect-ms (%u)", config->lost_ms,
                       config->suspect_ms);
    if (config->reattach_grace_ms < 100 || config->reattach_grace_ms > config->lost_ms)
        return mu_fail(err, MU_ERR_INVALID, "--reattach-grace-ms %u is not allowed: 100 to --lost-ms (%u)",
                       config->reattach_grace_ms, config->lost_ms);
    if (config->scrub_again_s < 1)
        return mu_fail(err, MU_ERR_INVALID, "--scrub-again-s %u is not allowed: at least 1", config->scrub_again_s);
    if (config->max_jobs == 0 || config->max_jobs > UINT16_MAX)
        return mu_fail(err, MU_ERR_INVALID, "--max-jobs %u is not allowed: 1 to 65535", config->max_jobs);
    if (config->max_workers == 0 || config->max_workers > MU_WORKERS_MAX || config->max_members > config->max_workers)
        return mu_fail(err, MU_ERR_INVALID, "--max-workers %u is not allowed: 1 to %d", config->max_workers,
                       MU_WORKERS_MAX);
    return MU_OK;
}

static bool allocate_jobs(struct mu_coord *coord)
{
    const struct mu_coord_config *config = &coord->config;
    coord->jobs = calloc(config->max_jobs, sizeof coord->jobs[0]);
    coord->job_order = calloc(config->max_jobs, sizeof coord->job_order[0]);
    if (!coord->jobs || !coord->job_order)
        return false;
    for (uint32_t i = 0; i < config->max_jobs; i++) { /* address space only: untouched pages cost nothing */
        struct job *job = &coord->jobs[i];
        job->members = calloc(config->max_members, sizeof job->members[0]);
        job->plan_slots = calloc(config->max_members, sizeof job->plan_slots[0]);
        job->pieces = calloc(MU_PIECES_MAX, sizeof job->pieces[0]);
        job->piece_slots = calloc(MU_PIECES_MAX, sizeof job->piece_slots[0]);
        if (!job->members || !job->plan_slots || !job->pieces || !job->piece_slots)
            return false;
    }
    return true;
}

struct mu_coord *mu_coord_new(const struct mu_coord_config *config)
{
    struct mu_coord *coord = calloc(1, sizeof *coord);
    if (!coord)
        return NULL;
    coord->config = *config;
    coord->free_worker = NONE;
    coord->scrub_next_us = UINT64_MAX;
    coord->account_capacity = 2 * config->max_workers;
    coord->accounts = calloc(coord->account_capacity, sizeof coord->accounts[0]);
    coord->workers = calloc(config->max_workers, sizeof coord->workers[0]);
    coord->member_records = calloc(config->max_members, sizeof coord->member_records[0]);
    coord->plan_members = calloc(config->max_members, sizeof coord->plan_members[0]);
    coord->assign_moves = calloc(MU_MOVES_MAX, sizeof coord->assign_moves[0]);
    coord->shares = calloc((size_t)config->max_workers * MU_HELD_SHARES_MAX, sizeof coord->shares[0]);
    coord->newcomers = calloc(config->max_workers, sizeof coord->newcomers[0]);
    coord->holders = calloc(config->max_workers, sizeof coord->holders[0]);
    coord->column_holders = calloc(MU_SLICES_MAX * MU_STAGES_MAX, sizeof coord->column_holders[0]);
    coord->written = calloc(MU_PIECES_MAX, sizeof coord->written[0]);
    coord->assign_holders = calloc(MU_HOLDERS_MAX, sizeof coord->assign_holders[0]);
    bool ok = coord->written && coord->assign_holders && coord->workers && coord->member_records &&
              coord->plan_members && coord->assign_moves && coord->shares && coord->newcomers && coord->holders &&
              coord->column_holders && coord->accounts && allocate_jobs(coord);
    ok = map_init(&coord->by_session, config->max_workers) && ok;
    ok = map_init(&coord->by_name, config->max_workers) && ok;
    ok = map_init(&coord->by_gpu, config->max_workers) && ok;
    ok = map_init(&coord->by_account, coord->account_capacity) && ok;
    if (!ok) {
        mu_coord_free(coord);
        return NULL;
    }
    return coord;
}

void mu_coord_free(struct mu_coord *coord)
{
    if (!coord)
        return;
    for (uint32_t i = 0; coord->jobs && i < coord->config.max_jobs; i++) {
        free(coord->jobs[i].members);
        free(coord->jobs[i].plan_slots);
        free(coord->jobs[i].pieces);
        free(coord->jobs[i].piece_slots);
        drop_moves(&coord->jobs[i]);
        for (uint32_t k = 0; k < coord->jobs[i].checkpoint_count; k++)
            free_holders(&coord->jobs[i].checkpoints[k].record);
    }
    probe_fini(coord);
    free(coord->written);
    free(coord->assign_holders);
    free(coord->jobs);
    free(coord->job_order);
    free(coord->workers);
    free(coord->accounts);
    free(coord->member_records);
    free(coord->plan_members);
    free(coord->assign_moves);
    free(coord->shares);
    free(coord->holders);
    free(coord->newcomers);
    free(coord->column_holders);
    map_fini(&coord->by_session);
    map_fini(&coord->by_name);
    map_fini(&coord->by_gpu);
    map_fini(&coord->by_account);
    free(coord);
}

/* ---- time ---- */

uint64_t mu_coord_next_deadline(const struct mu_coord *coord)
{
    uint64_t next = UINT64_MAX;
    bool any_live = false;
    for (uint32_t i = 0; i < coord->job_count; i++) {
        const struct job *job = &coord->jobs[i];
        if (job->phase == MU_JP_OVER && job->worker_count == 0)
            continue;
        any_live = any_live || job->worker_count > 0 || job->phase == MU_JP_FINALIZING;
        if (job->settle_until_us && job->settle_until_us < next)
            next = job->settle_until_us;
    }
    if (coord->probe.is_running && coord->probe.until_us < next)
        next = coord->probe.until_us;
    if (any_live && coord->next_scan_us < next)
        next = coord->next_scan_us;
    if (!coord->scrub_number && coord->scrub_next_us < next)
        next = coord->scrub_next_us;
    return next == UINT64_MAX ? next : next + coord->forgiven_us;
}

/* Time during which the core could not run counts against nobody: the lease clock stands still for it. (It never runs
 * backwards: what was seen at the last event stays in the past.) */
static void take_time(struct mu_coord *coord, const struct mu_coord_event *event)
{
    enum { LATE_US = 50000 };
    uint64_t due_us = coord->deadline_us > coord->now_us ? coord->deadline_us : coord->now_us;
    if (coord->deadline_us != UINT64_MAX && event->now_us > due_us + LATE_US && !MU_MUTANT(MU_MUT_NO_FORGIVENESS)) {
        uint64_t late_us = event->now_us - due_us;
        coord->forgiven_us += late_us;
        coord->counters.forgiven_us += late_us;
    }
    coord->now_us = event->now_us;
    coord->wall_us = event->wall_us;
    coord->random = event->random;
}

static void tick(struct mu_coord *coord)
{
    scan_leases(coord);
    for (uint32_t i = 0; i < coord->job_count; i++) {
        if (coord->jobs[i].used && !is_over(&coord->jobs[i]))
            job_tick(coord, &coord->jobs[i]);
    }
    if (lease_now(coord) >= coord->scrub_next_us)
        scrub_next(coord);
    probe_tick(coord);
    goodput_tick(coord);
}

/* From the wall clock to the lease clock. (It may have begun later than they happened: ages are differences.) */
static void date_deaths(struct mu_coord *coord)
{
    for (uint32_t i = 0; i < MU_DEATHS_KEPT; i++) {
        uint64_t then = coord->deaths[i].lease_us;
        coord->deaths[i].lease_us = lease_now(coord) - (coord->wall_us > then ? coord->wall_us - then : 0);
    }
}

void mu_coord_start(struct mu_coord *coord, uint64_t now_us, uint64_t wall_us, const struct mu_coord_sink *sink)
{
    coord->sink = sink;
    coord->now_us = now_us;
    coord->wall_us = wall_us;
    coord->deadline_us = UINT64_MAX;
    coord->started_us = coord->last_attach_us = lease_now(coord);
    date_deaths(coord);
    date_nodes(coord);
    for (uint32_t slot = 0; slot < coord->worker_high;
         slot++) { /* members of the recorded generations: may re-attach until then */
        struct worker *worker = &coord->workers[slot];
        worker->suspect = worker->awaited = true;
        worker->seen_us = worker->progress_us = lease_now(coord);
        worker->suspect_until_us = lease_now(coord) + (uint64_t)coord->config.lost_ms * 1000;
        copy_text(worker->reason, sizeof worker->reason, "did not re-attach after the coordinator's restart");
    }
    for (uint32_t i = 0; i < coord->worker_record_count; i++) {
        if (coord->worker_records[i].revision == 0)
            coord->worker_records[i].revision = first_revision(coord);
    }
    for (uint32_t i = 0; i < coord->job_count; i++) {
        struct job *job = &coord->jobs[i];
        job->phase_since_us = job->progress_us = job->interval.counted_us = lease_now(coord);
        if (job->record.revision == 0) /* recorded before there were revisions */
            job->record.revision = first_revision(coord);
        probe_intents(coord, job);
    }
    scrub_start(coord);
    goodput_start(coord);
    coord->next_scan_us = lease_now(coord);
    coord->deadline_us = mu_coord_next_deadline(coord);
    coord->sink = NULL;
}

void mu_coord_step(struct mu_coord *coord, const struct mu_coord_event *event, const struct mu_coord_sink *sink)
{
    coord->sink = sink;
    take_time(coord, event);
    struct job *job;
    switch (event->kind) {
    case MU_CE_TICK:
        tick(coord);
        break;
    case MU_CE_MESSAGE:
        on_worker_message(coord, event->message.session, event->message.message);
        goodput_heard(coord, event->message.session, event->message.message);
        break;
    case MU_CE_DISCONNECTED:
        on_disconnected(coord, event->disconnected.session, event->disconnected.end, event->disconnected.reason);
        break;
    case MU_CE_PLANNED:
        on_planned(coord, event->planned.ticket, event->planned.plan, event->planned.secret);
        break;
    case MU_CE_PUBLISHED:
        job = find_job(coord, event->checkpoint_io.job);
        if (job)
            on_published(coord, job, event->checkpoint_io.checkpoint, event->checkpoint_io.status,
                         event->checkpoint_io.step, event->checkpoint_io.size_bytes, event->checkpoint_io.text);
        break;
    case MU_CE_DELETED:
        job = find_job(coord, event->checkpoint_io.job);
        if (job)
            on_deleted(coord, job, event->checkpoint_io.checkpoint, event->checkpoint_io.status,
                       event->checkpoint_io.text);
        break;
    case MU_CE_SCRUBBED:
        on_scrubbed(coord, find_job(coord, event->checkpoint_io.job), event->checkpoint_io.checkpoint,
                    event->checkpoint_io.status, event->checkpoint_io.text);
        break;
    case MU_CE_SUBMIT:
    case MU_CE_CANCEL:
    case MU_CE_DRAIN:
    case MU_CE_UNDRAIN:
    case MU_CE_CHECKPOINT:
    case MU_CE_SCALE:
    case MU_CE_AMEND:
    case MU_CE_BRANCH:
    case MU_CE_NODE:
        on_request(coord, event);
        break;
    case MU_CE_PROBE:
        on_probe(coord, event);
        break;
    case MU_CE_EXITED:
        on_exited(coord, event->exited.cookie, &event->exited.exit);
        break;
    }
    probe_go_on(coord);
    coord->deadline_us = mu_coord_next_deadline(coord);
    coord->sink = NULL;
}
