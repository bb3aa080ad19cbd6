#include "simulate/outlook.h"

#include <stdlib.h>
#include <string.h>

#include "simulate/failures.h"

#define SECONDS_PER_DAY  86400.0
#define PLANNED_CHANGE_S 1.0 /* a generation that nothing forced: processes live, connections are new */
#define MICROS           1e6
#define BOOT_S           1e9 /* of what comes before the job's first step nothing is counted; longer it cannot take */

const char *const mu_outlook_class_names[MU_OUTLOOK_CLASSES] = {"progress", "lost work",   "detection",   "restart",
                                                                "loading",  "checkpoints", "fewer nodes", "waiting"};
const char *const mu_outlook_source_names[MU_FLEET_SOURCES] = {"seed", "checkpoint", "mirrors", "holders"};

/* One stretch of steps in a generation. */
struct stretch {
    bool open;
    double begun_s, step_s;
    uint64_t first_step;
    uint64_t every; /* steps between checkpoints; 0: none */
    uint64_t saved; /* checkpoints of it that the core has */
};

struct run {
    const struct mu_outlook_question *q;
    struct mu_outlook *out;
    struct mu_fleet *fleet;
    struct mu_failures *failures;
    uint32_t *nodes, *index_of; /* scratch; a topology's node -> the fleet's */
    uint32_t node_count;
    double now_s, start_s, end_s; /* counting begins with the first step */
    uint64_t generation;          /* the newest one seen */
    double ready_s, fixed_s;      /* PREPARING: when all are ready; what of it is not loading */
    double failed_s;              /* the newest loss of a member that no generation has followed; < 0: none */
    double nominal_leaves;        /* of a replica with all nodes */
    struct stretch stretch;
};

/* ---- the job that the core is given ---- */

/* Tensor groups that a node carries. */
static uint32_t groups_of(const struct mu_cluster *c, const struct mu_forecast_plan *plan)
{
    return c->device.per_node / plan->tp;
}

enum mu_status mu_outlook_check(const struct mu_cluster *c, const struct mu_forecast_model *model,
                                const struct mu_candidate *candidate, uint32_t *ret_nodes, struct mu_error *err)
{
    const struct mu_forecast_plan *plan = &candidate->plan;
    if (plan->tp > c->device.per_node)
        return mu_fail(err, MU_ERR_INVALID, "tensor groups of %u on nodes of %u devices cannot be simulated; give --tp",
                       plan->tp, c->device.per_node);
    uint32_t groups = groups_of(c, plan);
    if (plan->dp % groups != 0)
        return mu_fail(err, MU_ERR_INVALID, "%u replicas on nodes that carry %u each cannot be simulated; give --dp",
                       plan->dp, groups);
    uint64_t nodes = (uint64_t)plan->dp / groups * plan->pp, leaf = (uint64_t)plan->micro * groups;
    if (c->nodes > MU_FLEET_NODES_MAX || plan->pp > MU_STAGES_MAX || model->sequences / leaf > MU_LEAVES_MAX)
        return mu_fail(err, MU_ERR_LIMIT,
                       "%u nodes in %u stages with %llu parts of a batch cannot be simulated: at most %d, %d and %d",
                       c->nodes, plan->pp, (unsigned long long)(model->sequences / leaf), MU_FLEET_NODES_MAX,
                       MU_STAGES_MAX, MU_LEAVES_MAX);
    *ret_nodes = (uint32_t)nodes;
    return MU_OK;
}

static struct mu_job_spec spec_of(const struct run *r)
{
    const struct mu_forecast_plan *plan = &r->q->candidate->plan;
    struct mu_job_spec spec = *r->q->spec;
    spec.model.slices = 1;
    spec.batch.micro = plan->micro;
    spec.batch.accumulate = groups_of(r->q->cluster, plan);
    spec.parallel.tp = 1;
    spec.parallel.pp = plan->pp;
    spec.parallel.dp = 0;
    spec.workers.min = plan->pp;
    spec.workers.max = plan->pp * (plan->dp / groups_of(r->q->cluster, plan));
    spec.workers.spares = 0;
    spec.steps = MU_STEPS_MAX - 1;
    spec.optimizer.warmup = 0;
    spec.eval.every = 0;
    spec.init.path[0] = spec.init.sha256[0] = 0;
    return spec;
}

/* ---- the clock ---- */

/* A step on this layout: what grows with the leaves of the busiest replica, and what does not. */
static double step_of(const struct run *r, const struct mu_fleet_generation *g)
{
    const struct mu_forecast *f = &r->q->candidate->forecast;
    double scaled =
        f->compute_s + f->attention_s + f->rows_s + f->recompute_s + f->head_s + f->tensor_s + f->pipeline_s;
    double whole = scaled + f->bubble_s + f->data_s + f->update_s + f->tied_s;
    return f->step_s * (1 + scaled / whole * (g->most_leaves / r->nominal_leaves - 1));
}

static double loading_of(const struct run *r, const struct mu_fleet_generation *g)
{
    const struct mu_device_type *d = &r->q->cluster->device;
    if (g->source == MU_FLEET_CHECKPOINT)
        return r->q->candidate->goodput.state_bytes / r->q->cluster->storage_read_bytes_per_second;
    return g->receivers ? g->moved_bytes / g->receivers / (d->nic_bytes_per_second * d->per_node) : 0;
}

static void count(struct run *r, enum mu_outlook_class class, double seconds)
{
    if (r->start_s >= 0)
        r->out->seconds[class] += seconds;
}

/* When the core wants to hear of time, on a clock of microseconds. */
static double deadline_of(const struct run *r)
{
    double at_s = (double)mu_fleet_deadline(r->fleet) / MICROS;
    return at_s > r->now_s ? at_s : r->now_s;
}

static void go_to(struct run *r, double to_s)
{
    r->now_s = to_s;
    mu_fleet_advance(r->fleet, (uint64_t)(to_s * MICROS + 0.5));
}

static void note_point(struct run *r, uint32_t nodes)
{
    struct mu_outlook *o = r->out;
    if (o->point_count == o->point_room) {
        o->point_room = o->point_room ? 2 * o->point_room : 256;
        o->points = realloc(o->points, o->point_room * sizeof *o->points);
        MU_ASSERT(o->points);
    }
    o->points[o->point_count++] = (struct mu_outlook_point){(r->now_s - r->start_s) / SECONDS_PER_DAY, nodes};
}

/* ---- stretches of steps ---- */

/* Where a stretch is `elapsed_s` after its begin. */
struct place {
    uint64_t steps;     /* done */
    uint64_t taken;     /* checkpoints taken, */
    uint64_t committed; /* written by then */
    double partial_s;   /* of a step, or of a stall */
};

static struct place place_in(const struct run *r, double elapsed_s)
{
    const struct stretch *s = &r->stretch;
    const struct mu_goodput *g = &r->q->candidate->goodput;
    struct place p = {.steps = 0};
    double cycle_s = (double)s->every * s->step_s + g->stall_s, rest_s = elapsed_s;
    if (s->every > 0) {
        p.taken = (uint64_t)(elapsed_s / cycle_s);
        rest_s = elapsed_s - (double)p.taken * cycle_s;
        uint64_t written = elapsed_s > g->write_s ? (uint64_t)((elapsed_s - g->write_s) / cycle_s) : 0;
        p.committed = written < p.taken ? written : p.taken;
    }
    uint64_t more = (uint64_t)(rest_s / s->step_s);
    if (s->every > 0 && more > s->every)
        more = s->every;
    p.steps = p.taken * s->every + more;
    p.partial_s = rest_s - (double)more * s->step_s;
    return p;
}

/* The core learns how far the steps are, and takes the newest checkpoint if it has not. */
static struct place sync(struct run *r)
{
    struct stretch *s = &r->stretch;
    struct place p = place_in(r, r->now_s - s->begun_s);
    if (p.committed > s->saved) {
        mu_fleet_stepped(r->fleet, s->first_step + p.committed * s->every);
        if (mu_fleet_checkpoint(r->fleet, s->first_step + p.committed * s->every))
            s->saved = p.committed;
    }
    mu_fleet_stepped(r->fleet, s->first_step + p.steps);
    return p;
}

static void open_stretch(struct run *r)
{
    const struct mu_fleet_generation *g = mu_fleet_generation(r->fleet);
    struct mu_outlook *o = r->out;
    if (r->start_s < 0) { /* the first one: from here on it counts */
        r->start_s = r->now_s;
        r->end_s = r->now_s + r->q->days * SECONDS_PER_DAY;
    } else if (r->failed_s >= 0) {
        o->recoveries[g->source]++;
    } else {
        o->planned_changes++;
    }
    r->failed_s = -1;
    double every = o->interval_s / step_of(r, g);
    uint64_t whole = (uint64_t)every;
    whole += (double)whole < every;
    bool saves = r->q->spec->checkpoint.path[0] && r->q->spec->checkpoint.every > 0;
    bool given = r->q->spec->checkpoint.every != MU_EVERY_AUTO;
    r->stretch = (struct stretch){.open = true,
                                  .begun_s = r->now_s,
                                  .step_s = step_of(r, g),
                                  .first_step = g->start_step,
                                  .every = !saves  ? 0
                                           : given ? r->q->spec->checkpoint.every
                                                   : whole};
    note_point(r, mu_layout_working(&g->layout));
}

/* The time since its begin is divided up. */
static void close_stretch(struct run *r, struct place p)
{
    const struct stretch *s = &r->stretch;
    double nominal = (double)p.steps * r->out->step_s;
    count(r, MU_OUTLOOK_PROGRESS, nominal);
    count(r, MU_OUTLOOK_FEWER, (double)p.steps * s->step_s - nominal);
    count(r, MU_OUTLOOK_CHECKPOINTS, (double)p.taken * r->q->candidate->goodput.stall_s);
    count(r, MU_OUTLOOK_LOST, p.partial_s);
    r->out->steps = s->first_step + p.steps;
    r->stretch.open = false;
    note_point(r, 0);
}

/* ---- what happens ---- */

/* A generation was assigned: how long it takes to get ready, and what is done again. */
static void see_generation(struct run *r)
{
    const struct mu_fleet_generation *g = mu_fleet_generation(r->fleet);
    double restart_s = r->q->cluster->restart_s - (r->now_s - r->failed_s);
    r->generation = mu_fleet_generations(r->fleet);
    r->fixed_s = r->failed_s < 0 ? PLANNED_CHANGE_S : restart_s > 0 ? restart_s : 0;
    r->ready_s = r->now_s + r->fixed_s + loading_of(r, g);
    if (g->start_step < r->out->steps) {
        double again_s = (double)(r->out->steps - g->start_step) * r->out->step_s;
        count(r, MU_OUTLOOK_PROGRESS, -again_s);
        count(r, MU_OUTLOOK_LOST, again_s);
        r->out->steps = g->start_step;
    }
}

static void take_change(struct run *r)
{
    bool down, hit = false;
    uint32_t count = mu_failures_take(r->failures, r->nodes, &down);
    struct place p = {0};
    bool was_open = r->stretch.open;
    if (was_open)
        p = sync(r);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t node = r->index_of[r->nodes[i]];
        if (!down) {
            mu_fleet_attach(r->fleet, node);
            continue;
        }
        hit = hit || mu_fleet_is_member(r->fleet, node);
        mu_fleet_kill(r->fleet, node);
        r->out->nodes_lost++;
    }
    if (was_open && (hit || mu_fleet_state(r->fleet) != MU_FLEET_STEPPING))
        close_stretch(r, p);
    if (!hit)
        return;
    r->failed_s = r->now_s;
    r->out->interruptions++;
}

/* Until `limit_s` or until something changes by itself. */
static void let_step(struct run *r, double limit_s)
{
    double deadline_s = deadline_of(r), to_s = deadline_s < limit_s ? deadline_s : limit_s;
    bool core_acts = deadline_s < limit_s + 2 / MICROS; /* its clock is rounded */
    struct place p = {0};
    if (!r->stretch.open) { /* members are gone, the core waits for them to come back */
        count(r, MU_OUTLOOK_DETECTION, to_s - r->now_s);
        go_to(r, to_s);
        return;
    }
    r->now_s = to_s;
    if (core_acts)
        p = sync(r);
    go_to(r, to_s);
    if (core_acts && mu_fleet_state(r->fleet) != MU_FLEET_STEPPING)
        close_stretch(r, p);
}

static void get_ready(struct run *r, double limit_s)
{
    if (mu_fleet_generations(r->fleet) != r->generation)
        see_generation(r);
    double to_s = r->ready_s < limit_s ? r->ready_s : limit_s, took_s = to_s - r->now_s;
    double fixed_s = took_s < r->fixed_s ? took_s : r->fixed_s;
    count(r, MU_OUTLOOK_RESTART, fixed_s);
    count(r, MU_OUTLOOK_LOADING, took_s - fixed_s);
    r->fixed_s -= fixed_s;
    go_to(r, to_s);
    if (to_s < r->ready_s)
        return;
    mu_fleet_prepared(r->fleet);
    if (mu_fleet_state(r->fleet) == MU_FLEET_STEPPING)
        open_stretch(r);
}

static void turn(struct run *r)
{
    double next_s = mu_failures_next_s(r->failures);
    if (r->start_s < 0) /* failures begin to count with the first step */
        next_s = BOOT_S;
    else
        next_s += r->start_s;
    double limit_s = next_s < r->end_s ? next_s : r->end_s, deadline_s = deadline_of(r);
    double to_s = deadline_s < limit_s ? deadline_s : limit_s;
    switch (mu_fleet_state(r->fleet)) {
    case MU_FLEET_STEPPING:
        let_step(r, limit_s);
        break;
    case MU_FLEET_PREPARING:
        get_ready(r, limit_s);
        break;
    case MU_FLEET_WAITING:
        count(r, MU_OUTLOOK_WAITING, to_s - r->now_s);
        go_to(r, to_s);
        break;
    case MU_FLEET_CHANGING:
        count(r, MU_OUTLOOK_DETECTION, to_s - r->now_s);
        go_to(r, to_s);
        break;
    case MU_FLEET_FAILED:
        r->out->failed = true;
        r->out->failed_day = (r->now_s - r->start_s) / SECONDS_PER_DAY;
        count(r, MU_OUTLOOK_WAITING, r->end_s - r->now_s);
        r->now_s = r->end_s;
        return;
    }
    if (r->now_s >= next_s && r->now_s < r->end_s)
        take_change(r);
}

/* ---- the whole ---- */

static void fill_plan(struct run *r)
{
    const struct mu_candidate *c = r->q->candidate;
    struct mu_outlook *o = r->out;
    uint32_t groups = groups_of(r->q->cluster, &c->plan), replicas = c->plan.dp / groups;
    r->nominal_leaves = (double)r->q->model->sequences / (c->plan.micro * groups) / replicas;
    o->step_s = c->forecast.step_s;
    o->stall_s = c->goodput.stall_s;
    o->interval_s = c->goodput.interval_s;
}

static enum mu_status begin(struct run *r, const char **names, struct mu_error *err)
{
    const struct mu_topology *t = mu_node_map_topology(r->q->map);
    for (uint32_t i = 0; i < t->node_count; i++) {
        if (t->nodes[i].absent)
            continue;
        r->index_of[i] = r->node_count;
        names[r->node_count++] = t->node_names.names[i];
    }
    r->fleet = mu_fleet_new(names, r->node_count, r->q->map);
    r->failures = mu_failures_new(r->q->cluster, t, r->q->seed);
    if (!r->fleet || !r->failures)
        return mu_fail(err, MU_ERR_NO_MEMORY, "out of memory for %u nodes", r->node_count);
    r->now_s = 1;
    const struct mu_job_spec spec = spec_of(r);
    enum mu_status status = mu_fleet_submit(r->fleet, &spec, err);
    for (uint32_t i = 0; status == MU_OK && i < r->node_count; i++)
        mu_fleet_attach(r->fleet, i);
    return status;
}

static void sum_up(struct run *r)
{
    struct mu_outlook *o = r->out;
    if (r->stretch.open)
        close_stretch(r, place_in(r, r->now_s - r->stretch.begun_s));
    o->goodput = o->seconds[MU_OUTLOOK_PROGRESS] / (r->q->days * SECONDS_PER_DAY);
    o->interval_steps = r->stretch.every;
    o->generations = mu_fleet_generations(r->fleet);
    o->messages = mu_fleet_messages(r->fleet);
    if (o->failed)
        strncpy(o->text, mu_fleet_text(r->fleet), sizeof o->text - 1);
}

enum mu_status mu_outlook_run(const struct mu_outlook_question *question, struct mu_outlook *ret_outlook,
                              struct mu_error *err)
{
    const struct mu_topology *t = mu_node_map_topology(question->map);
    struct mu_outlook out = {.goodput = 0};
    struct run r = {.q = question, .out = &out, .start_s = -1, .end_s = BOOT_S, .failed_s = -1};
    const char **names = calloc(t->present_count + (size_t)1, sizeof *names);
    r.nodes = calloc(t->node_count + (size_t)1, sizeof *r.nodes);
    r.index_of = calloc(t->node_count + (size_t)1, sizeof *r.index_of);
    enum mu_status status = MU_ERR_NO_MEMORY;
    fill_plan(&r);
    if (names && r.nodes && r.index_of)
        status = begin(&r, names, err);
    else
        mu_fail(err, status, "out of memory for %u nodes", t->present_count);
    while (status == MU_OK && r.now_s < r.end_s)
        turn(&r);
    if (status == MU_OK && r.start_s < 0)
        status = mu_fail(err, MU_ERR_UNAVAILABLE, "the job does not start: %s", mu_fleet_text(r.fleet));
    if (status == MU_OK) {
        sum_up(&r);
        *ret_outlook = out;
    } else {
        mu_outlook_fini(&out);
    }
    mu_fleet_free(r.fleet);
    mu_failures_free(r.failures);
    free(names);
    free(r.nodes);
    free(r.index_of);
    return status;
}

void mu_outlook_fini(struct mu_outlook *outlook)
{
    free(outlook->points);
    outlook->points = NULL;
    outlook->point_count = outlook->point_room = 0;
}
