/* How fast each worker is, apart from what its stage costs; when layers or leaves had better be divided anew, and when
 * a spare had better take the place of a slow worker.
 *
 * A report says how long a worker computed on a leaf. Over what its stage costs, in layers (mu_cost_stage_layers), that
 * is the worker's speed, which stays its own when stages change. What embedding and head cost is what the model of
 * costs says, until a worker has been measured in two stages of different parts: the ratio of its two times does not
 * depend on how fast it is, so it tells the cost of what differs.
 *
 * A slow worker whose place a spare has taken is *demoted*: it gets a rank only where there are too few others. That is
 * recorded of its process (its incarnation), and holds until one of three things happens: it had to get a rank after
 * all, and was measured there to be as fast as the others; an operator says that it is well (`muster undrain`, `muster
 * node resume`); its process is started anew. */
#include "coordinator/core/internal.h"

#include "plan/balance.h"
#include "plan/cost.h"
#include "plan/forecast.h"

enum {
    REPORTS_MIN = 4,     /* of a generation, before its times are believed, and between two looks at the speeds */
    QUIET_DOUBLINGS = 2, /* looks that found nothing make the next one later, up to so often */
    ODD_REPORTS = 3,     /* in a row that are FAR off to one side are a change of speed */
    LOOKS = 16,          /* at leaves in rebalance_ms, at most */
    LEAF_DOUBLINGS = 6,  /* moves of leaves make the next one later, up to so often */
};
static const double FAR = 1.25;
static const double RELIEF_MIN = 1.2;  /* a spare must shorten the computation by so much to replace a slow member */
static const double ORDINARY = 1.15;   /* times as long as usual: as mu_balance_by_seconds takes it */
static const double SECONDS_MAX = 1e6; /* a longer report is a mistake */
static const double CHANGE_S = 1;      /* of a change of generation, before one was measured */
static const double LAYERS_MAX = 4096; /* that embedding or head may cost */
static const double DISTINCT = 0.25;   /* parts of two stages that differ by less than this tell nothing */

const struct mu_cost_rates *speeds_given(const struct mu_coord *coord, const struct job *job)
{
    return job->record.spec.compute == MU_COMPUTE_BF16 ? coord->config.rates_bf16 : coord->config.rates;
}

struct mu_cost_rates speeds_rates(const struct mu_coord *coord, const struct job *job)
{
    struct mu_cost_rates rates;
    mu_cost_rates_of_job(&rates, &job->record.spec);
    if (speeds_given(coord, job))
        rates = *speeds_given(coord, job);
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
static double believed(const struct mu_coord *coord, const struct job *job, bool head)
{
    struct mu_cost_rates rates = speeds_rates(coord, job);
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
    embedding.usual = believed(coord, job, false);
    head.usual = believed(coord, job, true);
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

/* ---- who should do how much ---- */

static uint64_t rebalance_us(const struct mu_coord *coord)
{
    return (uint64_t)coord->config.rebalance_ms * 1000;
}

/* Other stages: a trial plan tells, more and more rarely while nothing is found. */
static void look_at_stages(struct mu_coord *coord, struct job *job)
{
    if (job->layout.pp == 1 || lease_now(coord) < job->look_us)
        return;
    uint32_t doublings = job->quiet_looks < QUIET_DOUBLINGS ? job->quiet_looks++ : QUIET_DOUBLINGS;
    job->look_us = lease_now(coord) + (rebalance_us(coord) << doublings);
    request_trial(coord, job);
}

/* What the slowest worker of each replica takes for a leaf, and the leaves of each. */
struct replicas {
    double seconds[MU_COUNTED_REPLICAS_MAX];
    uint32_t leaves[MU_COUNTED_REPLICAS_MAX];
};

/* As if `replaced` (NULL: nobody) took `factor` times as long. */
static void measure(struct mu_coord *coord, const struct job *job, const struct worker *replaced, double factor,
                    struct replicas *out)
{
    memset(out->seconds, 0, job->layout.dp * sizeof out->seconds[0]);
    for (uint32_t rank = 0; rank < mu_layout_working(&job->layout); rank++) {
        const struct worker *worker = member_at(coord, job, rank);
        if (!worker)
            continue;
        uint32_t d = mu_layout_coords(&job->layout, rank).d;
        double seconds = worker->seconds_per_leaf * (worker == replaced ? factor : 1);
        out->seconds[d] = seconds > out->seconds[d] ? seconds : out->seconds[d];
        out->leaves[d] = worker->leaf_count;
    }
}

/* The slowest member, and what half of the members take for a layer; *ret_count: of so many. */
static struct worker *slowest_member(struct mu_coord *coord, const struct job *job, double *ret_usual_s,
                                     uint32_t *ret_count)
{
    double all[MU_COUNTED_REPLICAS_MAX];
    uint32_t working = mu_layout_working(&job->layout), count = 0;
    struct worker *slowest = NULL;
    for (uint32_t rank = 0; rank < working; rank++) {
        struct worker *worker = member_at(coord, job, rank);
        if (!worker || !(worker->seconds_per_leaf > 0))
            continue;
        if (count < MU_COUNTED_REPLICAS_MAX)
            all[count++] = worker->seconds_per_layer;
        double longer_s = slowest ? worker->seconds_per_layer - slowest->seconds_per_layer : 1;
        if (MU_MUTANT(MU_MUT_DEMOTE_FASTEST) ? longer_s < 0 || !slowest : longer_s > 0)
            slowest = worker;
    }
    *ret_usual_s = mu_balance_median(count, all);
    *ret_count = count;
    return slowest;
}

/* ---- who others come before ---- */

static uint32_t demotion_of(const struct job *job, const struct worker *worker)
{
    uint32_t at = 0;
    while (at < job->demoted_count && !mu_id_equal(job->demoted[at], worker->incarnation))
        at++;
    return at;
}

bool is_demoted(const struct job *job, const struct worker *worker)
{
    return demotion_of(job, worker) < job->demoted_count;
}

static void forget_demotion(struct job *job, uint32_t at)
{
    job->demoted_count--;
    memmove(&job->demoted[at], &job->demoted[at + 1], (job->demoted_count - at) * sizeof job->demoted[0]);
}

static void demote(struct mu_coord *coord, struct job *job, const struct worker *worker)
{
    if (is_demoted(job, worker))
        return;
    if (job->demoted_count == MU_DEMOTED_KEPT)
        forget_demotion(job, 0);
    job->demoted[job->demoted_count++] = worker->incarnation;
    persist_tally(coord, job);
}

static void restore(struct mu_coord *coord, struct job *job, const struct worker *worker, const char *why)
{
    forget_demotion(job, demotion_of(job, worker));
    persist_tally(coord, job);
    event(coord, MU_EVENT_INFO, "worker_restored", job, worker, "worker %s gets a rank like any other again: %s",
          worker->name, why);
}

bool restore_demoted(struct mu_coord *coord, struct worker *worker, const char *by)
{
    char why[MU_TEXT_SIZE];
    struct job *job = job_of(coord, worker);
    if (worker->lost || !is_demoted(job, worker))
        return false;
    format_into(why, sizeof why, "%s says that it is well", by);
    restore(coord, job, worker, why);
    worker->seconds_per_layer = 0; /* what was measured counts no more */
    worker->odd_reports = 0;
    worker->before = (struct stage_time){0};
    return true;
}

/* Those that had to get a rank after all, and are as fast as the others there. */
static void restore_measured(struct mu_coord *coord, struct job *job)
{
    double usual_s;
    uint32_t count;
    if (job->demoted_count == 0)
        return;
    (void)slowest_member(coord, job, &usual_s, &count);
    for (uint32_t rank = 0; rank < mu_layout_working(&job->layout) && count > 1; rank++) {
        const struct worker *worker = member_at(coord, job, rank);
        if (!worker || !is_demoted(job, worker))
            continue;
        bool measured = worker->speed_reports >= REPORTS_MIN && worker->seconds_per_layer <= usual_s * ORDINARY;
        if (!measured && !MU_MUTANT(MU_MUT_RESTORE_UNMEASURED))
            continue;
        char why[MU_TEXT_SIZE];
        format_into(why, sizeof why, "it takes %.2f times as long as usual", worker->seconds_per_layer / usual_s);
        restore(coord, job, worker, why);
    }
}

static bool repays(const struct job *job, double saved_s)
{
    uint64_t end = mu_job_end(&job->record.spec), left = end > job->steps_done ? end - job->steps_done : 0;
    double change_s = job->change_s > 0 ? job->change_s : CHANGE_S;
    return saved_s > 0 && saved_s * (double)left > change_s;
}

/* A spare that is not known to be as slow. */
static const struct worker *find_substitute(struct mu_coord *coord, const struct job *job, const struct worker *slow)
{
    for (const struct worker *w = next_worker(coord, job, NULL); w; w = next_worker(coord, job, w)) {
        bool last = is_demoted(job, w) && !MU_MUTANT(MU_MUT_SUBSTITUTE_DEMOTED);
        if (w->rank == NONE && !last && may_take_part(w) && w->seconds_per_layer * RELIEF_MIN < slow->seconds_per_layer)
            return w;
    }
    return NULL;
}

/* What a step takes with an ordinary worker in the place of one that takes `times` as long as usual. */
static double relieved_s(struct mu_coord *coord, const struct job *job, const struct worker *slow, double times)
{
    struct replicas then;
    uint32_t counts[MU_COUNTED_REPLICAS_MAX];
    measure(coord, job, slow, 1 / times, &then);
    mu_balance_by_seconds(job->leaves, job->layout.dp, then.seconds, counts);
    return mu_balance_step_seconds(job->layout.dp, then.seconds, counts);
}

static void give_place(struct mu_coord *coord, struct job *job, const struct worker *slow, double times,
                       const struct worker *spare)
{
    job->beyond_us = 0;
    demote(coord, job, slow);
    job->regroup_for_leaving = true;
    job->settle_until_us = lease_now(coord);
    event(coord, MU_EVENT_WARNING, "worker_demoted", job, slow,
          "worker %s takes %.1f times as long as usual, which moving work to others does not make up for: spare %s "
          "takes its place",
          slow->name, times, spare->name);
}

/* Leaves are divided as well as can be, in `divided_s`. With an ordinary worker in the place of the slowest one it
 * would be much better: when that has been so for a while, a spare gets the place. */
static void look_beyond_leaves(struct mu_coord *coord, struct job *job, double divided_s)
{
    double usual_s;
    uint32_t count;
    struct worker *slowest = slowest_member(coord, job, &usual_s, &count);
    double times = slowest ? slowest->seconds_per_layer / usual_s : 1;
    const struct worker *spare = times > RELIEF_MIN ? find_substitute(coord, job, slowest) : NULL;
    if (spare) {
        double then_s = relieved_s(coord, job, slowest, times);
        spare = then_s * RELIEF_MIN < divided_s && repays(job, divided_s - then_s) ? spare : NULL;
    }
    if (!spare || job->beyond_us == 0)
        job->beyond_us = spare ? lease_now(coord) : 0;
    else if (lease_now(coord) - job->beyond_us >= 2 * rebalance_us(coord))
        give_place(coord, job, slowest, times, spare);
}

/* One that was demoted before, had to get a rank, and is still slow: somebody better has come. */
static bool relieve_demoted(struct mu_coord *coord, struct job *job, double now_s)
{
    double usual_s;
    uint32_t count;
    if (job->demoted_count == 0)
        return false;
    (void)slowest_member(coord, job, &usual_s, &count);
    for (uint32_t rank = 0; rank < mu_layout_working(&job->layout); rank++) {
        const struct worker *slow = member_at(coord, job, rank);
        double times = slow ? slow->seconds_per_layer / usual_s : 1;
        if (!slow || !is_demoted(job, slow) || slow->speed_reports < REPORTS_MIN || times <= ORDINARY)
            continue;
        const struct worker *spare = find_substitute(coord, job, slow);
        if (!spare || !repays(job, now_s - relieved_s(coord, job, slow, times)))
            continue;
        give_place(coord, job, slow, times, spare);
        return true;
    }
    return false;
}

static uint32_t leaf_doublings(const struct job *job)
{
    return job->leaf_moves < LEAF_DOUBLINGS ? job->leaf_moves : LEAF_DOUBLINGS;
}

/* Other leaf counts must pay twice in a row, because a trial plan costs something. */
static void look_at_leaves(struct mu_coord *coord, struct job *job)
{
    struct replicas now;
    uint32_t best[MU_COUNTED_REPLICAS_MAX], dp = job->layout.dp;
    if (job->equal_leaves || lease_now(coord) < job->leaves_us)
        return;
    job->leaves_us = lease_now(coord) + rebalance_us(coord) / LOOKS;
    if (lease_now(coord) - job->phase_since_us > rebalance_us(coord) << (leaf_doublings(job) + QUIET_DOUBLINGS))
        job->leaf_moves = 0;
    measure(coord, job, NULL, 1, &now);
    if (relieve_demoted(coord, job, mu_balance_step_seconds(dp, now.seconds, now.leaves)))
        return;
    mu_balance_by_seconds(job->leaves, dp, now.seconds, best);
    bool before = job->leaves_pay;
    job->leaves_pay = repays(job, mu_balance_saved(dp, now.seconds, now.leaves, best));
    if (!job->leaves_pay) {
        look_beyond_leaves(coord, job, mu_balance_step_seconds(dp, now.seconds, now.leaves));
    } else if (before) {
        job->leaves_us = lease_now(coord) + rebalance_us(coord);
        request_trial(coord, job);
    }
}

static void look(struct mu_coord *coord, struct job *job)
{
    if (coord->config.rebalance_ms == 0 || job->phase != MU_JP_STEPPING || job->arrived > 0 || job->trial_ticket ||
        job->settle_until_us || job->feeding)
        return;
    restore_measured(coord, job);
    look_at_stages(coord, job);
    if (!job->trial_ticket)
        look_at_leaves(coord, job);
}

/* ---- reports ---- */

/* A mean over about five reports. Several in a row that are far off to the same side are no noise: it begins anew. */
static void add_report(struct worker *worker, double leaf_s, double layer_s)
{
    double before = worker->seconds_per_layer;
    int side = before > 0 ? (layer_s > before * FAR) - (layer_s * FAR < before) : 0;
    worker->odd_reports = (int8_t)(side * worker->odd_reports > 0 ? worker->odd_reports + side : side);
    bool anew = worker->odd_reports >= ODD_REPORTS || worker->odd_reports <= -ODD_REPORTS;
    worker->odd_reports = anew ? 0 : worker->odd_reports;
    worker->seconds_per_layer = anew || !(before > 0) ? layer_s : 0.8 * before + 0.2 * layer_s;
    before = worker->seconds_per_leaf;
    worker->seconds_per_leaf = anew || !(before > 0) ? leaf_s : 0.8 * before + 0.2 * leaf_s;
    worker->speed_reports++;
}

void speeds_report(struct mu_coord *coord, struct job *job, struct worker *worker, const struct mu_step_report *report)
{
    double seconds = (double)(report->data_us + report->forward_us + report->backward_us) * 1e-6;
    if (report->leaf_count == 0 || !(seconds > 0) || seconds > SECONDS_MAX || !is_working(job, worker))
        return;
    struct mu_cost_rates rates = speeds_rates(coord, job);
    uint32_t stage = mu_layout_coords(&job->layout, worker->rank).p;
    double layers = mu_cost_stage_layers(&job->record.spec, &job->model, &rates, &job->layout, stage);
    seconds /= report->leaf_count;
    add_report(worker, seconds, seconds / layers);
    if (worker->rank == 0 && worker->speed_reports % REPORTS_MIN == 0)
        look(coord, job);
}

/* ---- changes ---- */

void speeds_begin(struct mu_coord *coord, struct job *job)
{
    uint32_t doublings = leaf_doublings(job);
    job->quiet_looks = 0;
    job->look_us = lease_now(coord) + rebalance_us(coord);
    job->leaves_us = lease_now(coord) + (doublings ? rebalance_us(coord) << (doublings - 1) : 0);
    job->leaves_pay = false;
    job->beyond_us = 0;
    if (job->change_begun_us)
        job->change_s = (double)(lease_now(coord) - job->change_begun_us) * 1e-6;
    job->change_begun_us = 0;
}

/* Of the replica whose leaf count changes most. */
static void tell_leaves(struct mu_coord *coord, struct job *job, const struct mu_plan *plan)
{
    struct replicas now;
    uint32_t most = 0, dp = job->layout.dp;
    const struct worker *slowest = NULL;
    measure(coord, job, NULL, 1, &now);
    for (uint32_t d = 0; d < dp; d++) {
        int64_t change = (int64_t)plan->leaf_counts[d] - now.leaves[d];
        int64_t before = (int64_t)plan->leaf_counts[most] - now.leaves[most];
        most = change * change > before * before ? d : most;
    }
    for (uint32_t rank = 0; rank < mu_layout_working(&job->layout); rank++) {
        const struct worker *worker = member_at(coord, job, rank);
        if (worker && mu_layout_coords(&job->layout, rank).d == most &&
            (!slowest || worker->seconds_per_leaf > slowest->seconds_per_leaf))
            slowest = worker;
    }
    double seconds = now.seconds[most], usual = mu_balance_median(dp, now.seconds);
    event(coord, MU_EVENT_INFO, "leaves_moved", job, slowest,
          "worker %s takes %.2f times as long as usual for a leaf: it computes %u leaves of a step instead of %u, "
          "which saves %.1f ms of each step",
          slowest ? slowest->name : "", seconds / usual, plan->leaf_counts[most], now.leaves[most],
          plan->saved_s * 1e3);
}

bool speeds_change_pays(struct mu_coord *coord, struct job *job, const struct mu_plan *plan)
{
    bool leaves = same_columns(&plan->layout, &job->layout);
    if (!repays(job, plan->saved_s) || (leaves && !job->leaves_pay))
        return false;
    if (job->feeding)
        return true; /* told already */
    if (leaves) {
        job->leaf_moves++;
        tell_leaves(coord, job, plan);
        return true;
    }
    event(coord, MU_EVENT_INFO, "layers_moved", job, NULL,
          "workers of some stages are slower than those of others: layers move to the faster ones, which saves %.1f ms "
          "of each step",
          plan->saved_s * 1e3);
    return true;
}
