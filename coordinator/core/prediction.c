#include "coordinator/core/prediction.h"

#include "coordinator/core/internal.h"
#include "plan/cost.h"

enum {
    FIRST_REPORTS = 4,  /* of the rank in the generation: caches and connections are cold */
    WINDOW_REPORTS = 8, /* at least, and */
    WINDOW_STEPS = 20,  /* steps at least */
    WINDOWS_SURE = 2,   /* in a row, before anything is believed */
};
static const double OFF = 0.15, NO_MORE = 0.10; /* of the predicted step */

const char *const mu_step_term_names[MU_TERM_COUNT] = {"compute", "tensor",    "pipeline",   "bubble", "replicas",
                                                       "vote",    "optimizer", "checkpoint", "data",   "other"};

static double sum_of(const double terms[MU_TERM_COUNT])
{
    double sum = 0;
    for (int i = 0; i < MU_TERM_COUNT; i++)
        sum += terms[i];
    return sum;
}

static double magnitude(double x)
{
    return x < 0 ? -x : x;
}

/* ---- the prediction ---- */

/* How long the slowest of the members whose speed is known takes for a layer; 0: it is known of none. */
static double slowest_known(struct mu_coord *coord, const struct job *job)
{
    double slowest = 0;
    for (uint32_t rank = 0; rank < mu_layout_working(&job->layout); rank++) {
        const struct worker *worker = member_at(coord, job, rank);
        if (worker && worker->seconds_per_layer > slowest)
            slowest = worker->seconds_per_layer;
    }
    return slowest;
}

/* Of the slowest stage, the worker that is expected to compute longest in a step; who was never measured is taken to be
 * as slow as the slowest. *ret_speed: seconds for a layer, 0: not known. NULL: nobody is there. */
static const struct worker *find_busiest(struct mu_coord *coord, const struct job *job, uint32_t stage,
                                         double *ret_speed)
{
    const struct worker *busiest = NULL;
    double most = -1, slowest = slowest_known(coord, job);
    for (uint32_t rank = 0; rank < mu_layout_working(&job->layout); rank++) {
        const struct worker *worker = member_at(coord, job, rank);
        if (!worker || mu_layout_coords(&job->layout, rank).p != stage)
            continue;
        double speed = worker->seconds_per_layer > 0 ? worker->seconds_per_layer : slowest;
        double seconds = worker->leaf_count * (speed > 0 ? speed : 1);
        if (seconds <= most)
            continue;
        busiest = worker;
        most = seconds;
        *ret_speed = speed;
    }
    return busiest;
}

static void predict(struct mu_coord *coord, struct job *job)
{
    const struct mu_job_spec *spec = &job->record.spec;
    struct prediction *p = &job->prediction;
    struct mu_cost_rates rates = speeds_rates(coord, job);
    uint32_t stage = mu_cost_of_layout(spec, &job->layout, &rates).slowest_stage;
    double speed = 0;
    const struct worker *busiest = find_busiest(coord, job, stage, &speed);
    *p = (struct prediction){.view = {.generation = job->record.generation}, .told = p->told};
    if (!busiest)
        return;
    p->view.rank = busiest->rank;
    p->view.slot = (uint32_t)(busiest - coord->workers);
    p->view.calibrated = speed > 0 || speeds_given(coord, job);
    double layers = mu_cost_stage_layers(spec, &job->model, &rates, &job->layout, stage);
    mu_cost_calibrate(&rates, spec, &job->layout, speed * layers);
    struct mu_cost cost = mu_cost_of_leaves(spec, &job->layout, &rates, busiest->leaf_count ? busiest->leaf_count : 1);
    double *terms = p->view.predicted_s;
    terms[MU_TERM_COMPUTE] = cost.compute_s - cost.bubble_s - cost.tensor_s + cost.leaf_sum_s;
    terms[MU_TERM_TENSOR] = cost.tensor_s;
    terms[MU_TERM_PIPELINE] = cost.transfer_s;
    terms[MU_TERM_BUBBLE] = cost.bubble_s - cost.transfer_s;
    terms[MU_TERM_REPLICAS] = cost.reduce_s + cost.tied_s;
    terms[MU_TERM_VOTE] = cost.vote_s;
    terms[MU_TERM_OPTIMIZER] = cost.update_s;
    p->snapshot_s = cost.snapshot_s;
}

/* ---- what was measured ---- */

void mu_prediction_split(const struct mu_step_report *report, uint32_t pp, uint64_t micros, double ret_s[MU_TERM_COUNT])
{
    uint64_t compute_us = report->forward_us + report->backward_us;
    double bubble_us = pp > 1 && micros > 0 ? (double)compute_us * (pp - 1) / (double)micros : 0;
    if (bubble_us > report->pipeline_us)
        bubble_us = report->pipeline_us;
    const double us[MU_TERM_COUNT] = {
        [MU_TERM_COMPUTE] = (double)compute_us,
        [MU_TERM_TENSOR] = report->tensor_us,
        [MU_TERM_PIPELINE] = report->pipeline_us - bubble_us,
        [MU_TERM_BUBBLE] = bubble_us,
        [MU_TERM_REPLICAS] = report->replicas_us,
        [MU_TERM_VOTE] = report->vote_us,
        [MU_TERM_OPTIMIZER] = (double)report->optimizer_us,
        [MU_TERM_CHECKPOINT] = (double)report->snapshot_us,
        [MU_TERM_DATA] = (double)report->data_us,
    };
    for (int i = 0; i < MU_TERM_COUNT; i++)
        ret_s[i] = us[i] * 1e-6;
    double rest_s = (double)report->total_us * 1e-6 - sum_of(ret_s);
    ret_s[MU_TERM_OTHER] = rest_s > 0 ? rest_s : 0;
}

static void tell(struct mu_coord *coord, struct job *job, int worst)
{
    struct prediction *p = &job->prediction;
    const struct mu_layout *layout = &job->layout;
    double predicted = sum_of(p->view.predicted_s), measured = sum_of(p->view.measured_s);
    p->told = p->view.generation;
    enum mu_event_severity severity = p->view.calibrated ? MU_EVENT_WARNING : MU_EVENT_INFO;
    event(
        coord, severity, "prediction_off", job, &coord->workers[p->view.slot],
        "tp %u x pp %u x dp %u: a step takes %.3g s, predicted were %.3g s (%s); most of the difference is %s: %.3g s "
        "instead of %.3g s; 'muster report %s' has all terms, and the line with which 'muster plan --measured' "
        "recalibrates",
        layout->tp, layout->pp, layout->dp, measured, predicted,
        p->view.calibrated ? "by measured rates" : "by default rates", mu_step_term_names[worst],
        p->view.measured_s[worst], p->view.predicted_s[worst], job->record.spec.name);
    persist_tally(coord, job);
}

/* A window is whole. */
static void judge(struct mu_coord *coord, struct job *job)
{
    struct prediction *p = &job->prediction;
    int worst = 0;
    for (int i = 0; i < MU_TERM_COUNT; i++)
        p->view.measured_s[i] = p->sums_s[i] / (double)p->steps;
    p->view.predicted_s[MU_TERM_CHECKPOINT] = p->snapshot_s * p->snapshots / (double)p->steps;
    p->view.steps = p->steps;
    p->steps = p->reports = p->snapshots = 0;
    memset(p->sums_s, 0, sizeof p->sums_s);
    double predicted = sum_of(p->view.predicted_s);
    double whole = magnitude(sum_of(p->view.measured_s) - predicted), most = 0;
    for (int i = 0; i < MU_TERM_COUNT; i++) {
        double apart = magnitude(p->view.measured_s[i] - p->view.predicted_s[i]);
        worst = apart > most ? i : worst;
        most = apart > most ? apart : most;
    }
    double apart = (whole > most ? whole : most) / predicted;
    bool against = p->view.off ? apart < NO_MORE : apart > OFF;
    p->in_a_row = against ? p->in_a_row + 1 : 0;
    if (p->in_a_row < WINDOWS_SURE)
        return;
    p->in_a_row = 0;
    p->view.off = !p->view.off;
    if (p->view.off && p->told != p->view.generation)
        tell(coord, job, worst);
}

void prediction_report(struct mu_coord *coord, struct job *job, const struct worker *worker,
                       const struct mu_step_report *report)
{
    struct prediction *p = &job->prediction;
    if (worker->rank == NONE || job->phase != MU_JP_STEPPING)
        return;
    if (p->view.generation != job->record.generation)
        predict(coord, job);
    bool counts = worker == &coord->workers[p->view.slot] && worker->rank == p->view.rank && report->step_count > 0 &&
                  report->total_us > 0 && p->view.predicted_s[MU_TERM_COMPUTE] > 0;
    if (!counts || ++p->reports <= FIRST_REPORTS * !p->warm)
        return;
    if (!p->warm)
        p->reports = 1;
    p->warm = true;
    double terms[MU_TERM_COUNT];
    mu_prediction_split(report, job->layout.pp, (uint64_t)worker->leaf_count * job->record.spec.batch.accumulate,
                        terms);
    for (int i = 0; i < MU_TERM_COUNT; i++)
        p->sums_s[i] += terms[i];
    p->steps += report->step_count;
    p->snapshots += report->snapshot_us > 0;
    if (p->reports >= WINDOW_REPORTS && p->steps >= WINDOW_STEPS)
        judge(coord, job);
}
