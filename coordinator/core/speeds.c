/* How fast each worker is, apart from what its stage costs, and when layers or leaves had better be divided anew.
 *
 * A report says how long a worker computed on a leaf. Over what its stage costs, in layers (mu_cost_stage_layers), that
 * is the worker's speed, which stays its own when stages change. What embedding and head cost is what the model of
 * costs says, until a worker has been measured in two stages of different parts: the ratio of its two times does not
 * depend on how fast it is, so it tells the cost of what differs. */
#include "coordinator/core/internal.h"

#include "plan/cost.h"

enum {
    REPORTS_MIN = 4,     /* of a generation, before its times are believed */
    QUIET_DOUBLINGS = 2, /* looks that found nothing make the next one later, up to so often */
};
static const double SECONDS_MAX = 1e6; /* a longer report is a mistake */
static const double CHANGE_S = 1;      /* of a change of generation, before one was measured */
static const double LAYERS_MAX = 4096; /* that embedding or head may cost */
static const double DISTINCT = 0.25;   /* parts of two stages that differ by less than this tell nothing */

static struct mu_cost_rates rates_of(const struct job *job)
{
    struct mu_cost_rates rates;
    mu_cost_rates_init(&rates);
    rates.embedding_layers = (double)job->record.costs.embedding / MU_STAGE_COST_UNIT;
    rates.head_layers = (double)job->record.costs.head / MU_STAGE_COST_UNIT;
    return rates;
}

static bool is_working(const struct job *job, const struct worker *worker)
{
    return job->has_generation && worker->rank != NONE && !mu_layout_is_idle(&job->layout, worker->rank);
}

/* ---- what a generation tells about embedding and head ---- */

static struct stage_time time_of(const struct job *job, const struct worker *worker)
{
    uint32_t stage = mu_layout_coords(&job->layout, worker->rank).p;
    return (struct stage_time){.tp = job->layout.tp,
                               .layers = job->layout.stage_first[stage + 1] - job->layout.stage_first[stage],
                               .embedding = stage == 0,
                               .head = stage + 1 == job->layout.pp,
                               .seconds = worker->seconds_per_leaf};
}

/* With x the cost of embedding or head in layers, y that of the other one: a.layers + a.x x + a.y y goes with a's
 * seconds as b's does with b's. 0: they do not tell. */
static double solve(const struct stage_time *a, const struct stage_time *b, bool head, double other)
{
    double ratio = b->seconds / a->seconds;
    double ax = head ? a->head : a->embedding, bx = head ? b->head : b->embedding;
    double rest_a = a->layers + (head ? a->embedding : a->head) * other;
    double rest_b = b->layers + (head ? b->embedding : b->head) * other;
    double factor = bx - ratio * ax;
    if (a->tp != b->tp || (factor > -DISTINCT && factor < DISTINCT))
        return 0;
    return (ratio * rest_a - rest_b) / factor;
}

struct estimate {
    double usual, sum; /* layers: as believed until now; of all estimates */
    uint32_t count;
};

/* One measurement moves a belief to its half or its double at most. */
static void add_estimate(struct estimate *estimate, double layers)
{
    if (!(layers > 0))
        return;
    double low = estimate->usual / 2, high = estimate->usual * 2 < LAYERS_MAX ? estimate->usual * 2 : LAYERS_MAX;
    estimate->sum += layers < low ? low : layers > high ? high : layers;
    estimate->count++;
}

static void learn(uint32_t *cost, const struct estimate *estimate)
{
    if (estimate->count == 0)
        return;
    double layers = (estimate->usual + estimate->sum / estimate->count) / 2;
    *cost = (uint32_t)(layers * MU_STAGE_COST_UNIT + 0.5);
    if (*cost == 0)
        *cost = 1;
}

/* What the embedding (a stage of a layer and it, less the layer) and the head cost as believed now, at the tp of the
 * generation. */
static double believed(const struct job *job, bool head)
{
    struct mu_cost_rates rates = rates_of(job);
    struct mu_layout two = {.tp = job->layout.tp, .pp = 3, .dp = 1, .stage_first = {0, 1, 2, 3}};
    const struct mu_job_spec *spec = &job->record.spec;
    double layer = mu_cost_stage_layers(spec, &job->model, &rates, &two, 1);
    return mu_cost_stage_layers(spec, &job->model, &rates, &two, head ? 2 : 0) / layer - 1;
}

void speeds_end(struct mu_coord *coord, struct job *job)
{
    struct estimate embedding = {0}, head = {0};
    if (!job->has_generation)
        return;
    embedding.usual = believed(job, false);
    head.usual = believed(job, true);
    for (uint32_t rank = 0; rank < mu_layout_working(&job->layout); rank++) {
        struct worker *worker = member_at(coord, job, rank);
        if (!worker || worker->speed_reports < REPORTS_MIN || !(worker->seconds_per_leaf > 0))
            continue;
        struct stage_time now = time_of(job, worker);
        const struct stage_time *before = &worker->before;
        if (before->seconds > 0 && (now.head || before->head))
            add_estimate(&head, solve(before, &now, true, embedding.usual));
        else if (before->seconds > 0 && (now.embedding || before->embedding))
            add_estimate(&embedding, solve(before, &now, false, head.usual));
        worker->before = now;
    }
    learn(&job->record.costs.embedding, &embedding);
    learn(&job->record.costs.head, &head);
}

/* ---- reports ---- */

static double mixed(double before, double now)
{
    return before > 0 ? 0.8 * before + 0.2 * now : now;
}

/* Looks whether another division pays, more and more rarely while nothing is found. */
static void look(struct mu_coord *coord, struct job *job)
{
    if (coord->config.rebalance_ms == 0 || job->phase != MU_JP_STEPPING || job->layout.pp == 1 || job->arrived > 0 ||
        job->trial_ticket || job->settle_until_us || job->feeding || lease_now(coord) < job->look_us)
        return;
    uint32_t doublings = job->quiet_looks < QUIET_DOUBLINGS ? job->quiet_looks++ : QUIET_DOUBLINGS;
    job->look_us = lease_now(coord) + ((uint64_t)coord->config.rebalance_ms * 1000 << doublings);
    request_trial(coord, job);
}

void speeds_report(struct mu_coord *coord, struct job *job, struct worker *worker, const struct mu_step_report *report)
{
    double seconds = (double)(report->data_us + report->forward_us + report->backward_us) * 1e-6;
    if (report->leaf_count == 0 || !(seconds > 0) || seconds > SECONDS_MAX || !is_working(job, worker))
        return;
    struct mu_cost_rates rates = rates_of(job);
    uint32_t stage = mu_layout_coords(&job->layout, worker->rank).p;
    double layers = mu_cost_stage_layers(&job->record.spec, &job->model, &rates, &job->layout, stage);
    seconds /= report->leaf_count;
    worker->seconds_per_leaf = mixed(worker->seconds_per_leaf, seconds);
    worker->seconds_per_layer = mixed(worker->seconds_per_layer, seconds / layers);
    worker->speed_reports++;
    if (worker->rank == 0 && worker->speed_reports >= REPORTS_MIN)
        look(coord, job);
}

void speeds_begin(struct mu_coord *coord, struct job *job)
{
    job->quiet_looks = 0;
    job->look_us = lease_now(coord) + (uint64_t)coord->config.rebalance_ms * 1000;
    if (job->change_begun_us)
        job->change_s = (double)(lease_now(coord) - job->change_begun_us) * 1e-6;
    job->change_begun_us = 0;
}

bool speeds_change_pays(const struct job *job, const struct mu_plan *plan)
{
    uint64_t end = mu_job_end(&job->record.spec), left = end > job->steps_done ? end - job->steps_done : 0;
    double change_s = job->change_s > 0 ? job->change_s : CHANGE_S;
    return plan->saved_s > 0 && plan->saved_s * (double)left > change_s;
}
