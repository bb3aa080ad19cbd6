/* Slow workers whose places spares have taken: the coordinator's list of them changes by one at a time, each change
 * with its event, for a reason that is so; nobody on it works while another one could; and nothing is forgotten over a
 * restart. Judged when the coordinator says it, not when it is durable: then what it knows can be seen. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "tests/sim/oracle.h"

enum { SETTLED_US = 30000000 }; /* after a change of speed: it is certainly measured */

static bool is_listed(const struct mu_sim_slow *slow, struct mu_id incarnation)
{
    for (uint32_t i = 0; i < slow->count; i++) {
        if (mu_id_equal(slow->demoted[i], incarnation))
            return true;
    }
    return false;
}

/* What the coordinator knows of the worker; false: nothing (any more). */
static bool view_of(struct mu_sim *sim, struct mu_id incarnation, struct mu_worker_view *ret)
{
    for (uint32_t slot = 0; slot < mu_coord_worker_slots(sim->coord.core); slot++) {
        if (mu_coord_worker_view(sim->coord.core, slot, ret) && mu_id_equal(ret->incarnation, incarnation))
            return true;
    }
    return false;
}

/* Could take a rank of the next generation, and has none in this one. */
static bool is_free(const struct mu_worker_view *view)
{
    bool still = view->phase == MU_PHASE_SPARE || view->phase == MU_PHASE_PARKED;
    return view->state == MU_WS_SPARE && view->session && still && view->rank == UINT32_MAX;
}

/* ---- how fast they are ---- */

static const struct mu_sim_worker *process_of(const struct mu_sim *sim, struct mu_id incarnation)
{
    for (uint32_t slot = 0; slot < sim->params.slots; slot++) {
        const struct mu_sim_worker *worker = &sim->workers[slot];
        if (mu_sim_worker_alive(sim, slot) && mu_id_equal(mu_worker_incarnation(worker->core), incarnation))
            return worker;
    }
    return NULL;
}

/* How many times as long as another member it takes, that at least half of the others do not undercut. 0: not to be
 * told: somebody is gone, or has changed not long ago, or what the stages cost is estimated. */
static double slowness_of(struct mu_sim *sim, struct mu_id incarnation)
{
    struct mu_job_view job;
    struct mu_worker_view view;
    uint32_t speeds[16], count = 0, faster = 0;
    const struct mu_sim_worker *self = process_of(sim, incarnation);
    if (!self || !mu_coord_job_find(sim->coord.core, sim->spec.name, &job) || job.layout.pp > 1)
        return 0;
    for (uint32_t slot = 0; slot < mu_coord_worker_slots(sim->coord.core); slot++) {
        if (!mu_coord_worker_view(sim->coord.core, slot, &view) || !view.has_coords)
            continue;
        const struct mu_sim_worker *worker = process_of(sim, view.incarnation);
        if (!worker || worker->speed_changed_us + SETTLED_US > sim->now_us || count == 16)
            return 0;
        speeds[count++] = worker->speed_percent;
    }
    uint32_t usual = self->speed_percent;
    for (uint32_t i = 0; i < count; i++) { /* the lower median */
        faster = 0;
        for (uint32_t k = 0; k < count; k++)
            faster += speeds[k] < speeds[i] || (speeds[k] == speeds[i] && k < i);
        usual = faster == (count - 1) / 2 ? speeds[i] : usual;
    }
    return (double)self->speed_percent / usual;
}

/* ---- relief comes ---- */

/* What a step takes at best, in time of the fastest worker for all its leaves: leaves go by speed, and somebody
 * ordinary stands in for the slowest. */
struct relief {
    double now, then; /* parts of a leaf's time that all replicas together take for one */
    bool spare;       /* somebody else is there for it */
};

static struct relief relief_of(struct mu_sim *sim)
{
    struct relief relief = {0};
    struct mu_worker_view view;
    double rates[16], slowest = 1e9;
    uint32_t count = 0;
    for (uint32_t slot = 0; slot < mu_coord_worker_slots(sim->coord.core); slot++) {
        if (!mu_coord_worker_view(sim->coord.core, slot, &view))
            continue;
        const struct mu_sim_worker *worker = process_of(sim, view.incarnation);
        if (!worker || count == 16)
            return (struct relief){0};
        double slowness = view.has_coords ? slowness_of(sim, view.incarnation) : 1;
        if (view.has_coords && !(slowness > 0))
            return (struct relief){0};
        /* One that was slow while it had a rank is known to be, whatever it is now. */
        relief.spare =
            relief.spare || (is_free(&view) && !is_listed(&sim->oracle->slow, view.incarnation) && !worker->was_slow);
        if (view.has_coords)
            rates[count++] = 1 / slowness;
    }
    for (uint32_t i = 0; i < count; i++)
        slowest = rates[i] < slowest ? rates[i] : slowest;
    for (uint32_t i = 0; i < count; i++)
        relief.now += rates[i];
    relief.then = relief.now - slowest + 1;
    return relief;
}

/* While one generation steps on, half as long again as it must with a spare, the spare's time comes. Leaves are moved
 * first, more and more rarely, and a step may take ten times as long as usual. */
void mu_sim_slow_decided(struct mu_sim *sim, uint64_t generation, uint64_t step)
{
    enum { RELIEF_US = 90000000, STEPS_LEFT = 100 };
    struct mu_sim_slow *slow = &sim->oracle->slow;
    if (sim->params.slow_workers == 0 || !mu_sim_coord_up(sim) || sim->nodes[MU_SIM_NODE_COORDINATOR].stopped)
        return;
    struct relief relief = relief_of(sim);
    bool due = relief.spare && relief.then > relief.now * 1.5 && mu_job_end(&sim->law) > step + STEPS_LEFT &&
               sim->params.rebalance_ms > 0;
    if (!due || slow->due_generation != generation)
        slow->due_us = sim->now_us;
    slow->due_generation = generation;
    if (due && sim->now_us - slow->due_us > RELIEF_US)
        mu_sim_violate(sim, "for %.0f s a spare would have made steps %.2f times as short, and did not get the place",
                       (double)(sim->now_us - slow->due_us) * 1e-6, relief.then / relief.now);
}

/* ---- changes of the list ---- */

static void demoted(struct mu_sim *sim, const char *name)
{
    struct mu_worker_view view;
    bool member = false, spare = false;
    for (uint32_t slot = 0; slot < mu_coord_worker_slots(sim->coord.core); slot++) {
        if (!mu_coord_worker_view(sim->coord.core, slot, &view))
            continue;
        spare = spare || (is_free(&view) && !is_listed(&sim->oracle->slow, view.incarnation));
        if (!view.has_coords || strcmp(view.name, name) != 0)
            continue;
        double slowness = slowness_of(sim, view.incarnation);
        member = is_listed(&sim->oracle->slow, view.incarnation);
        if (slowness > 0 && slowness < 1.1)
            mu_sim_violate(sim, "worker %s is demoted, and takes %.2f times as long as usual", name, slowness);
    }
    if (!member)
        mu_sim_violate(sim, "worker %s is demoted, and has no rank or is not remembered", name);
    if (!spare)
        mu_sim_violate(sim, "worker %s is demoted, and there is nobody better to take its place", name);
}

static void restored(struct mu_sim *sim, struct mu_id incarnation, const struct mu_event_record *event)
{
    struct mu_worker_view view;
    double slowness = slowness_of(sim, incarnation);
    if (!view_of(sim, incarnation, &view) || mu_sim_client_called_well(sim, event->worker))
        return;
    if (!view.has_coords)
        mu_sim_violate(sim, "worker %s is demoted no more, and nobody has asked or measured", event->worker);
    else if (slowness > 1.3)
        mu_sim_violate(sim, "worker %s is demoted no more, and takes %.2f times as long as usual", event->worker,
                       slowness);
}

static void event_said(struct mu_sim *sim, const struct mu_event_record *event)
{
    struct mu_sim_slow *slow = &sim->oracle->slow;
    struct mu_worker_view view;
    bool down = strcmp(event->kind, "worker_demoted") == 0, up = strcmp(event->kind, "worker_restored") == 0;
    bool named = slow->change == 0 || !view_of(sim, slow->changed, &view) || strcmp(view.name, event->worker) == 0;
    if ((slow->change > 0 && !down) || (slow->change < 0 && !up) || (up && slow->change == 0) || !named)
        mu_sim_violate(sim, "whether a worker is demoted changes by %d with event %s of %s", slow->change, event->kind,
                       event->worker);
    else if (down) /* again, if it had to get a rank meanwhile */
        demoted(sim, event->worker);
    else if (slow->change < 0)
        restored(sim, slow->changed, event);
    slow->change = 0;
}

static void tally_said(struct mu_sim *sim, const struct mu_tally_record *tally)
{
    struct mu_sim_slow *slow = &sim->oracle->slow, next = *slow;
    uint32_t more = 0, fewer = 0;
    next.count = tally->demoted_count;
    memcpy(next.demoted, tally->demoted, sizeof next.demoted);
    for (uint32_t i = 0; i < next.count; i++) {
        if (!is_listed(slow, next.demoted[i])) {
            next.changed = next.demoted[i];
            more++;
        }
    }
    for (uint32_t i = 0; i < slow->count; i++) {
        if (!is_listed(&next, slow->demoted[i])) {
            next.changed = slow->demoted[i];
            fewer++;
        }
    }
    if (more + fewer > 1 || (slow->change && more + fewer > 0))
        mu_sim_violate(sim, "%u workers are demoted at a time, %u are so no more", more, fewer);
    next.change = more ? 1 : fewer ? -1 : slow->change;
    *slow = next;
}

void mu_sim_slow_restart(struct mu_sim *sim)
{
    struct mu_sim_slow *slow = &sim->oracle->slow;
    slow->count = slow->offered_count = 0;
    slow->change = 0;
    for (uint32_t i = 0; i < mu_sim_store_count(sim->store); i++) {
        const struct mu_record *record = mu_sim_store_at(sim->store, i);
        if (record->kind != MU_RECORD_TALLY)
            continue;
        slow->count = record->tally->demoted_count;
        memcpy(slow->demoted, record->tally->demoted, sizeof slow->demoted);
    }
}

/* ---- who works ---- */

/* Those that the plan which is asked for now may choose from. */
static void plan_asked(struct mu_sim *sim)
{
    struct mu_sim_slow *slow = &sim->oracle->slow;
    struct mu_worker_view view;
    slow->offered_count = 0;
    for (uint32_t slot = 0; slot < mu_coord_worker_slots(sim->coord.core); slot++) {
        if (!mu_coord_worker_view(sim->coord.core, slot, &view) || view.state == MU_WS_LOST)
            continue;
        slow->offered = mu_sim_grow(slow->offered, slow->offered_count, &slow->offered_capacity, sizeof *slow->offered);
        slow->offered[slow->offered_count++] = view.incarnation;
    }
}

static bool was_offered(const struct mu_sim_slow *slow, struct mu_id incarnation)
{
    for (uint32_t i = 0; i < slow->offered_count; i++) {
        if (mu_id_equal(slow->offered[i], incarnation))
            return true;
    }
    return false;
}

/* A generation is assigned: nobody on the list works in it while somebody else could. Not where links are bad: then a
 * plan leaves people out. */
static void generation_said(struct mu_sim *sim, const struct mu_generation_record *record)
{
    const struct mu_sim_slow *slow = &sim->oracle->slow;
    struct mu_worker_view view;
    uint32_t listed = UINT32_MAX;
    bool links = sim->stats.faults[MU_SIM_FAULT_RESET_LINK] == 0 && sim->params.connect_fail_ppm == 0;
    for (uint32_t rank = 0; rank < mu_layout_working(&record->layout) && listed == UINT32_MAX; rank++)
        listed = is_listed(slow, record->members[rank].incarnation) ? rank : UINT32_MAX;
    if (listed == UINT32_MAX || record->go || !links)
        return;
    for (uint32_t slot = 0; slot < mu_coord_worker_slots(sim->coord.core); slot++) {
        if (mu_coord_worker_view(sim->coord.core, slot, &view) && is_free(&view) &&
            was_offered(slow, view.incarnation) && !is_listed(slow, view.incarnation))
            mu_sim_violate(sim, "generation %" PRIu64 ": %s works, which is demoted, while %s is a spare",
                           record->generation, record->members[listed].name, view.name);
    }
}

void mu_sim_slow_said(struct mu_sim *sim, const struct mu_coord_action *action)
{
    const struct mu_record *record = action->kind == MU_CA_PERSIST ? &action->record : NULL;
    if (sim->params.slow_workers == 0)
        return;
    if (action->kind == MU_CA_PLAN)
        plan_asked(sim);
    else if (record && record->kind == MU_RECORD_TALLY)
        tally_said(sim, record->tally);
    else if (record && record->kind == MU_RECORD_EVENT)
        event_said(sim, record->event);
    else if (record && record->kind == MU_RECORD_GENERATION)
        generation_said(sim, record->generation);
}
