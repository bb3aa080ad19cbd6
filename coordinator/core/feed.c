/* Feeds: who will have another share in the next generation gets what it lacks of it while the present one steps
 * (struct mu_feed_order): who is new, and members that are to have other cells or chunks.
 *
 *   trial plan --somebody lacks something--> feeding --all LIVE--> Park command --parked, takers WHOLE--> plan, Assign
 *                                             |   ^
 *                                 one FAILED  v   |  FEED_ATTEMPTS_MAX times; then state moves while all stand still
 *
 * Nothing of it is recorded and nothing depends on it: a taker counts as holding nothing of it until it says WHOLE, and
 * what it holds then is planned with like anything else. After a restart feeds are known again as takers say Hello. A
 * failure of a member ends the feeds together with their generation. */
#include "coordinator/core/internal.h"

#include <stdlib.h>
#include <string.h>

#include "plan/feeding.h"
#include "plan/memory.h"

enum {
    FEED_ATTEMPTS_MAX = 3,    /* feeds that failed, before the change goes on without */
    FEED_END_LIMIT_MS = 2000, /* and two steps: from the last member's parking to the takers' last update */
};

static bool is_fed(const struct worker *worker)
{
    enum mu_feed_state state = worker->status.feed_state;
    return !worker->lost && !worker->draining && (state == MU_FEED_FILLING || state == MU_FEED_LIVE);
}

/* What a spare holds from an earlier boundary makes room: the whole state comes again, since nobody keeps the gradients
 * of the steps between. */
static bool is_taker(const struct job *job, const struct worker *worker)
{
    const struct mu_held *held = &worker->status.held;
    if (is_fed(worker))
        return false;
    if (worker->rank == NONE)
        return may_take_part(worker) &&
               (!held->has_state || held->step < job->steps_done || MU_MUTANT(MU_MUT_FEED_OVER_NEWEST));
    return worker->ready && !worker->lost && !worker->draining && worker->session != 0;
}

static uint32_t count_fed(struct mu_coord *coord, const struct job *job, enum mu_feed_state state)
{
    uint32_t count = 0;
    for (const struct worker *w = next_worker(coord, job, NULL); w; w = next_worker(coord, job, w))
        count += is_fed(w) && w->status.feed_state == state;
    return count;
}

static bool has_new_taker(struct mu_coord *coord, const struct job *job)
{
    for (const struct worker *w = next_worker(coord, job, NULL); w; w = next_worker(coord, job, w)) {
        if (w->rank == NONE && is_taker(job, w))
            return true;
    }
    return false;
}

bool feed_possible(struct mu_coord *coord, const struct job *job)
{
    if (job->feed_attempts >= FEED_ATTEMPTS_MAX || job->layout.idle > 0)
        return false;
    return !job->feeding || job->feed_again || has_new_taker(coord, job);
}

/* ---- who gives what ---- */

/* The feed that a rank of the next layout is to get; `count` 0: it lacks nothing. */
struct need {
    struct worker *taker;
    struct mu_feeding feeding;
    struct mu_move *moves; /* ascending by giver */
    uint32_t count;
};

static bool next_giver(const struct need *need, uint32_t *at, uint32_t *ret_rank)
{
    if (*at == need->count)
        return false;
    *ret_rank = need->moves[*at].from;
    while (*at < need->count && need->moves[*at].from == *ret_rank)
        ++*at;
    return true;
}

/* The need of a rank; the caller frees its moves. False: no memory. */
static bool need_of(struct mu_coord *coord, struct job *job, const struct mu_plan *plan, const struct mu_layout *to,
                    uint32_t rank, struct need *out)
{
    struct worker *worker = &coord->workers[job->plan_slots[plan->ranks[rank].member]];
    *out = (struct need){.taker = worker,
                         .feeding = {.from = &job->layout, .old_rank = worker->rank, .to = to, .rank = rank}};
    if (!worker->used || job_of(coord, worker) != job || !is_taker(job, worker))
        return true;
    return mu_feeding_moves(&job->model, &out->feeding, &out->moves, &out->count) == MU_OK;
}

/* What a worker of the host may use: those that have, or will have, a rank share its memory. */
static uint64_t memory_of(struct mu_coord *coord, const struct job *job, const struct worker *worker)
{
    uint64_t sharing = 0;
    for (const struct worker *w = next_worker(coord, job, NULL); w; w = next_worker(coord, job, w))
        sharing += !w->lost && strcmp(w->host, worker->host) == 0 && (w->rank != NONE || is_taker(job, w));
    return worker->memory_bytes / (sharing ? sharing : 1);
}

/* What a rank needs at most, as the planner counts it: now, and in the next layout. */
struct steps_need {
    uint64_t now_bytes, next_bytes;
};

static struct steps_need steps_need_of(const struct job *job, const struct mu_layout *to)
{
    const struct mu_job_spec *spec = &job->record.spec;
    return (struct steps_need){mu_memory_of_layout(spec, &job->layout, 1, NULL).total_bytes,
                               mu_memory_of_layout(spec, to, 1, NULL).total_bytes};
}

/* Beside what its steps need; who does not step yet has the memory of its next rank. */
static bool has_room(struct mu_coord *coord, struct job *job, const struct need *need, const struct steps_need *steps)
{
    const struct worker *worker = need->taker;
    bool member = worker->rank != NONE;
    if (worker->memory_bytes == 0)
        return true;
    uint64_t bytes = (member ? steps->now_bytes : steps->next_bytes) +
                     mu_memory_feed_bytes(&job->model, need->moves, need->count, member);
    uint64_t room = memory_of(coord, job, worker);
    if (bytes <= room)
        return true;
    event(coord, MU_EVENT_INFO, "state_not_fed", job, worker,
          "worker %s would need %llu MiB to get its next state while others step, and has %llu: all will stand still "
          "while state moves",
          worker->name, (unsigned long long)(bytes >> 20), (unsigned long long)(room >> 20));
    return false;
}

/* Every giver is there, and nobody takes part in too many feeds. feeds[world]: given by each rank, counted here. */
static bool can_be_fed(struct mu_coord *coord, struct job *job, const struct need *need, const struct steps_need *steps,
                       uint32_t *feeds)
{
    uint32_t at = 0, rank = 0, parts = 0;
    while (next_giver(need, &at, &rank)) {
        const struct worker *giver = member_at(coord, job, rank);
        if (!giver || giver->lost || giver->session == 0 || ++feeds[rank] > MU_FEED_PARTS_MAX ||
            ++parts > MU_FEED_PARTS_MAX)
            return false;
    }
    return need->count == 0 || has_room(coord, job, need, steps);
}

/* ---- orders ---- */

static void send_order(struct mu_coord *coord, struct job *job, const struct worker *to, const struct worker *other,
                       const struct mu_feed_order *order, enum mu_feed_role role)
{
    struct mu_coord_message message = {.kind = MU_CM_FEED, .generation = job->record.generation, .feed = *order};
    message.feed.role = role;
    message.feed.other = other->incarnation;
    memcpy(message.feed.address, other->address, sizeof message.feed.address);
    send_to(coord, to, &message);
}

static void makes_room(struct worker *taker)
{
    if (taker->rank == NONE)
        taker->status.held = (struct mu_held){0};
}

static void order_feed(struct mu_coord *coord, struct job *job, const struct need *need, const uint8_t *secret)
{
    struct worker *taker = need->taker, *giver = NULL;
    uint32_t at = 0;
    struct mu_feed_order order = {.layout = job->layout,
                                  .taker = taker->rank,
                                  .next = *need->feeding.to,
                                  .next_rank = need->feeding.rank,
                                  .amendments = MU_MUTANT(MU_MUT_FEED_OLD_TERMS) ? NULL : &job->record.spec.amendments};
    uint64_t number = (coord->random.low + (uint64_t)(taker - coord->workers)) * MU_FEED_PARTS_MAX;
    order.number = MU_FEED_BIT | number;
    memcpy(order.secret, secret, sizeof order.secret);
    probe_left(coord, taker, "it gets state for its next rank");
    taker->feed = taker->status.feed = order.number;
    taker->status.feed_state = MU_FEED_FILLING;
    taker->progress_us = lease_now(coord);
    makes_room(taker);
    while (next_giver(need, &at, &order.rank))
        order.parts++;
    for (at = 0; next_giver(need, &at, &order.rank); order.part++) {
        giver = member_at(coord, job, order.rank);
        send_order(coord, job, taker, giver, &order, MU_FEED_TAKE);
        send_order(coord, job, giver, taker, &order, MU_FEED_GIVE);
    }
    char from[MU_WORKER_NAME_SIZE + 16];
    format_into(from, sizeof from, order.parts == 1 ? "%s" : "%s and %u others", giver->name, order.parts - 1);
    event(coord, MU_EVENT_INFO, "state_fed", job, taker, "worker %s gets its state from %s while %u workers step",
          taker->name, from, job->world);
}

bool feed_begin(struct mu_coord *coord, struct job *job, const struct mu_plan *plan, const uint8_t *secret)
{
    struct mu_layout to = plan->layout;
    uint32_t ordered = 0;
    bool good = job->feed_attempts < FEED_ATTEMPTS_MAX && job->layout.idle == 0;
    uint32_t *feeds = good ? calloc(job->world, sizeof *feeds) : NULL;
    to.idle = 0; /* whoever gives what nobody else has will have given it */
    const struct steps_need steps = steps_need_of(job, &to);
    for (int pass = 0; pass < 2 && feeds; pass++) {
        for (uint32_t rank = 0; rank < mu_layout_working(&to) && good; rank++) {
            struct need need;
            good = need_of(coord, job, plan, &to, rank, &need);
            if (good && pass == 0)
                good = can_be_fed(coord, job, &need, &steps, feeds);
            else if (good && need.count > 0) {
                order_feed(coord, job, &need, secret);
                ordered++;
            }
            free(need.moves);
        }
    }
    free(feeds);
    if (ordered > 0) {
        job->has_next_layout = true;
        job->next_layout = to;
    }
    job->feeding = ordered > 0 || count_fed(coord, job, MU_FEED_FILLING) > 0;
    return job->feeding;
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
    job->feeding = job->feed_again = false;
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
    if (fresh_stream) {
        worker->feed = worker->status.feed;
        return;
    }
    worker->status.feed = worker->feed;
    worker->status.feed_state = worker->feed ? MU_FEED_FILLING : MU_FEED_NONE;
    if (worker->feed)
        makes_room(worker);
}

/* Nobody waits for more: those that got their state take their places. */
static void feed_finish(struct mu_coord *coord, struct job *job)
{
    if (count_fed(coord, job, MU_FEED_FILLING) > 0)
        return;
    if (count_fed(coord, job, MU_FEED_LIVE) > 0) {
        regroup(coord, job);
        return;
    }
    feed_over(job); /* all are gone */
    job->has_next_layout = false;
    if (job->feed_attempts >= FEED_ATTEMPTS_MAX || job->regroup_for_leaving)
        job->settle_until_us = lease_now(coord);
    else
        job->considered = mu_layout_working(&job->layout);
    settle(coord, job);
}

void feed_advance(struct mu_coord *coord, struct job *job, struct worker *worker)
{
    bool again = worker && worker->status.feed_state == MU_FEED_FAILED;
    if (again)
        failed(coord, job, worker, worker->status.text);
    else if (job->feeding && worker && worker->rank == NONE && worker->status.feed_state == MU_FEED_NONE)
        again = has_new_taker(coord, job);
    if (worker && is_fed(worker) && job->phase == MU_JP_STEPPING)
        job->feeding = true; /* a coordinator that was restarted learns of it */
    parked_waits_no_more(coord, job);
    if (!job->feeding || job->phase != MU_JP_STEPPING || job->arrived > 0)
        return;
    if (job->feed_attempts >= FEED_ATTEMPTS_MAX || !(again || job->feed_again)) {
        feed_finish(coord, job);
    } else if (!job->feed_again && count_fed(coord, job, MU_FEED_FILLING) == 0) {
        job->feed_again = true; /* once more for the rest */
        job->settle_until_us = lease_now(coord) + (uint64_t)coord->config.settle_ms * 1000;
    }
}

void feed_nothing_new(struct mu_coord *coord, struct job *job)
{
    job->feed_again = false;
    if (job->feeding)
        feed_finish(coord, job);
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
