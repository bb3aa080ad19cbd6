/* Feeds: who will be new in the next generation gets its state while the present one steps (struct mu_feed_order).
 *
 *   trial plan --somebody lacks a share--> feeding --all LIVE--> Park command --parked, takers WHOLE--> plan, Assign
 *                                           |   ^
 *                               one FAILED  v   |  FEED_ATTEMPTS_MAX times; then state moves while all stand still
 *
 * Nothing of it is recorded and nothing depends on it: a taker counts as holding nothing until it says WHOLE, and what
 * it holds then is planned with like anything else. After a restart feeds are known again as takers say Hello. A
 * failure of a member ends the feeds together with their generation. */
#include "coordinator/core/internal.h"

#include <string.h>

enum {
    FEED_ATTEMPTS_MAX = 3,    /* feeds that failed, before the change goes on without */
    FEEDS_PER_GIVER = 4,      /* at one time */
    FEED_END_LIMIT_MS = 2000, /* and two steps: from the last member's parking to the takers' last update */
};

static bool is_fed(const struct worker *worker)
{
    enum mu_feed_state state = worker->status.feed_state;
    return worker->rank == NONE && !worker->lost && !worker->draining &&
           (state == MU_FEED_FILLING || state == MU_FEED_LIVE);
}

static bool is_taker(const struct worker *worker)
{
    return worker->rank == NONE && may_take_part(worker) && !worker->status.held.has_state && !is_fed(worker);
}

static uint32_t count_fed(struct mu_coord *coord, const struct job *job, enum mu_feed_state state)
{
    uint32_t count = 0;
    for (const struct worker *w = next_worker(coord, job, NULL); w; w = next_worker(coord, job, w))
        count += is_fed(w) && w->status.feed_state == state;
    return count;
}

bool feed_has_takers(struct mu_coord *coord, const struct job *job)
{
    for (const struct worker *w = next_worker(coord, job, NULL); w; w = next_worker(coord, job, w)) {
        if (is_taker(w))
            return job->feed_attempts < FEED_ATTEMPTS_MAX;
    }
    return false;
}

/* A giver has a whole column, and nothing of it is anywhere else on its way. */
static bool can_feed(const struct job *job, const struct mu_layout *to)
{
    const struct mu_layout *from = &job->layout;
    bool copies = from->pp > 1 && mu_model_is_tied(&job->record.spec.model);
    return (!from->sharded || from->dp == 1) && !copies && from->idle == 0 && same_columns(from, to);
}

static void send_order(struct mu_coord *coord, struct job *job, const struct worker *to, const struct worker *other,
                       const struct mu_feed_order *order, enum mu_feed_role role)
{
    struct mu_coord_message message = {.kind = MU_CM_FEED, .generation = job->record.generation, .feed = *order};
    message.feed.role = role;
    message.feed.other = other->incarnation;
    memcpy(message.feed.address, other->address, sizeof message.feed.address);
    send_to(coord, to, &message);
}

/* The k-th new replica of a column is fed by its k-th old one, round and round. */
static bool order_feed(struct mu_coord *coord, struct job *job, struct worker *taker, struct mu_coords at, uint32_t k,
                       const uint8_t *secret)
{
    const struct mu_layout *from = &job->layout;
    struct mu_feed_order order = {.layout = *from};
    order.rank = mu_layout_rank(from, (struct mu_coords){at.t, k % from->dp, at.p});
    struct worker *giver = member_at(coord, job, order.rank);
    if (k / from->dp >= FEEDS_PER_GIVER || !giver || giver->lost || giver->session == 0)
        return false;
    order.number = MU_FEED_BIT | (coord->random.low + (uint64_t)(taker - coord->workers));
    memcpy(order.secret, secret, sizeof order.secret);
    taker->feed = order.number;
    taker->status.feed = order.number;
    taker->status.feed_state = MU_FEED_FILLING;
    taker->progress_us = lease_now(coord);
    send_order(coord, job, taker, giver, &order, MU_FEED_TAKE);
    send_order(coord, job, giver, taker, &order, MU_FEED_GIVE);
    event(coord, MU_EVENT_INFO, "state_fed", job, taker, "worker %s gets its state from %s while %u workers step",
          taker->name, giver->name, job->world);
    return true;
}

bool feed_begin(struct mu_coord *coord, struct job *job, const struct mu_plan *plan, const uint8_t *secret)
{
    const struct mu_layout *to = &plan->layout;
    bool any = count_fed(coord, job, MU_FEED_FILLING) + count_fed(coord, job, MU_FEED_LIVE) > 0;
    if (job->feed_attempts >= FEED_ATTEMPTS_MAX || !can_feed(job, to))
        return false;
    for (uint32_t column = 0; column < to->tp * to->pp; column++) {
        struct mu_coords at = {.t = column % to->tp, .p = column / to->tp};
        for (uint32_t k = 0; at.d < to->dp; at.d++) {
            uint32_t slot = job->plan_slots[plan->ranks[mu_layout_rank(to, at)].member];
            struct worker *worker = &coord->workers[slot];
            if (worker->used && job_of(coord, worker) == job && is_taker(worker))
                any = order_feed(coord, job, worker, at, k++, secret) || any;
        }
    }
    job->feeding = any;
    return any;
}

/* After a planned change always; after a failure only if nobody else has the newest step: a taker may have got the end
 * of a feed whose giver has died since. */
static bool is_worth_waiting(struct mu_coord *coord, const struct job *job)
{
    bool any;
    if (count_fed(coord, job, MU_FEED_LIVE) == 0)
        return false;
    return !job->revoked || newest_whole_step(coord, job, &any) < job->steps_done || !any;
}

bool feed_pending(struct mu_coord *coord, struct job *job)
{
    uint64_t now = lease_now(coord);
    if (!is_worth_waiting(coord, job))
        return false;
    uint64_t limit_us = job->revoked ? (uint64_t)coord->config.prepare_limit_ms * 1000
                                     : FEED_END_LIMIT_MS * 1000ull + (uint64_t)(job->seconds_per_step * 2e6);
    if (job->feed_until_us == 0)
        job->feed_until_us = now + limit_us;
    return now < job->feed_until_us;
}

void feed_over(struct job *job)
{
    job->feeding = false;
    job->feed_until_us = 0;
}

static void failed(struct mu_coord *coord, struct job *job, struct worker *worker, const char *why)
{
    worker->feed = worker->status.feed = 0;
    worker->status.feed_state = MU_FEED_NONE;
    if (!job->feeding)
        return;
    job->feed_attempts++;
    event(coord, MU_EVENT_WARNING, "feed_failed", job, worker, "worker %s did not get its state while others step: %s",
          worker->name, why);
}

/* Who was told to take and says something else has not got the order yet, or never will. */
void feed_note_status(struct worker *worker, bool fresh_stream)
{
    if (worker->feed == worker->status.feed)
        return;
    if (fresh_stream || worker->rank != NONE) {
        worker->feed = worker->status.feed;
        return;
    }
    worker->status.feed = worker->feed;
    worker->status.feed_state = worker->feed ? MU_FEED_FILLING : MU_FEED_NONE;
}

void feed_advance(struct mu_coord *coord, struct job *job, struct worker *worker)
{
    if (worker && worker->rank == NONE && worker->status.feed_state == MU_FEED_FAILED)
        failed(coord, job, worker, worker->status.text);
    if (worker && is_fed(worker) && job->phase == MU_JP_STEPPING)
        job->feeding = true; /* a coordinator that was restarted learns of it */
    parked_waits_no_more(coord, job);
    if (!job->feeding || job->phase != MU_JP_STEPPING || job->arrived > 0)
        return;
    bool again = feed_has_takers(coord, job);
    uint32_t filling = count_fed(coord, job, MU_FEED_FILLING), live = count_fed(coord, job, MU_FEED_LIVE);
    if (filling > 0)
        return;
    if (again && worker && worker->status.feed_state == MU_FEED_NONE) {
        job->settle_until_us = lease_now(coord) + (uint64_t)coord->config.settle_ms * 1000; /* once more for the rest */
        return;
    }
    if (live > 0) {
        regroup(coord, job);
        return;
    }
    feed_over(job); /* all are gone */
    if (job->feed_attempts >= FEED_ATTEMPTS_MAX || job->regroup_for_leaving)
        job->settle_until_us = lease_now(coord);
    else
        job->considered = mu_layout_working(&job->layout);
    settle(coord, job);
}

/* STEPPING: a feed that does not get on is no feed. */
void feed_tick(struct mu_coord *coord, struct job *job)
{
    uint64_t limit_us = (uint64_t)coord->config.prepare_limit_ms * 1000;
    for (struct worker *w = job->feeding ? next_worker(coord, job, NULL) : NULL; w; w = next_worker(coord, job, w)) {
        if (w->status.feed_state != MU_FEED_FILLING || !is_fed(w) || lease_now(coord) - w->progress_us <= limit_us)
            continue;
        failed(coord, job, w, "no progress");
        feed_advance(coord, job, w);
        return;
    }
}
