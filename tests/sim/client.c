/* The user: submits the job, orders checkpoints, drains and cancels; and the supervisors, who tell how workers ended.
 * Both ask again when the coordinator did not answer.
 * With `repeats` also when it did: each request has an id then, and whatever happened meanwhile, the answer to a change
 * that was made stays the same. */
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

struct request {
    enum mu_coord_event_kind kind;
    char worker[MU_WORKER_NAME_SIZE];
    struct mu_id incarnation; /* EXITED */
    enum mu_node_order order; /* NODE: `worker` is its name */
    uint64_t deadline_us;
    uint32_t max;                  /* SCALE */
    struct mu_amendment amendment; /* AMEND */
    bool done;
    bool made; /* answered with OK: */
    bool existed;
    uint64_t checkpoint;
};

struct mu_sim_client {
    struct request *requests; /* cookie - 1 */
    uint32_t count, capacity;
    bool submitted, cancelled;
};

static void ask(struct mu_sim *sim, struct mu_sim_event *event)
{
    uint64_t cookie = event->a;
    struct request request = sim->client->requests[cookie - 1];
    bool repeats = sim->params.repeats;
    if ((request.done && !(repeats && request.made)) || mu_sim_oracle_job_over(sim))
        return;
    bool once = request.kind == MU_CE_CHECKPOINT || request.kind == MU_CE_AMEND || request.kind == MU_CE_PROBE;
    if (!once || repeats)
        mu_sim_after(sim, mu_sim_delay(sim, 2 * MU_SIM_S), MU_SIM_NODE_NONE, ask, NULL, cookie, 0);
    if (!mu_sim_coord_up(sim) || sim->nodes[MU_SIM_NODE_COORDINATOR].stopped)
        return;
    struct mu_coord_event out = {.kind = request.kind};
    if (repeats)
        out.once = (struct mu_coord_once){.id = {.high = 1, .low = cookie}, .body = {.low = cookie}};
    if (request.kind == MU_CE_SUBMIT) {
        out.submit.cookie = cookie;
        out.submit.spec = &sim->spec;
        out.submit.preflight = sim->params.preflight;
    } else if (request.kind == MU_CE_NODE) {
        out.request.cookie = cookie;
        out.request.order = request.order;
        out.request.node = request.worker;
        out.request.reason = "dust";
        out.request.by = "operator";
        out.request.deadline_us = request.deadline_us;
    } else if (request.kind == MU_CE_PROBE) {
        static const uint8_t secret[32] = "probe";
        out.probe.cookie = cookie;
        out.probe.job = cookie % 2 ? "" : sim->spec.name;
        out.probe.quick = cookie % 3;
        out.probe.storage_bytes = cookie % 5 ? 0 : 1 << 20;
        out.probe.secret = secret;
    } else if (request.kind == MU_CE_EXITED) {
        out.exited.cookie = cookie;
        out.exited.exit = (struct mu_process_exit){.job = sim->spec.name,
                                                   .worker = request.worker,
                                                   .host = "h",
                                                   .incarnation = request.incarnation,
                                                   .signal = 9,
                                                   .text = "was killed by signal 9 (SIGKILL)"};
    } else {
        out.request.cookie = cookie;
        out.request.job = sim->spec.name;
        out.request.worker = request.worker;
        out.request.reason = out.request.by = "operator";
        out.request.amendment = &request.amendment;
        out.request.workers = (struct mu_worker_policy){.max = request.max, .spares = UINT32_MAX};
    }
    mu_sim_coord_event(sim, &out);
}

static struct request *add_later(struct mu_sim *sim, enum mu_coord_event_kind kind, const char *worker,
                                 uint64_t after_us)
{
    struct mu_sim_client *client = sim->client;
    client->requests = mu_sim_grow(client->requests, client->count, &client->capacity, sizeof *client->requests);
    struct request *request = &client->requests[client->count++];
    memset(request, 0, sizeof *request);
    request->kind = kind;
    if (worker)
        snprintf(request->worker, sizeof request->worker, "%s", worker);
    mu_sim_after(sim, after_us, MU_SIM_NODE_NONE, ask, NULL, client->count, 0);
    return request;
}

static void add(struct mu_sim *sim, enum mu_coord_event_kind kind, const char *worker)
{
    add_later(sim, kind, worker, mu_sim_delay(sim, sim->params.net_us));
}

static void order_node(struct mu_sim *sim, enum mu_node_order order, const char *name)
{
    struct request *request = add_later(sim, MU_CE_NODE, name, mu_sim_delay(sim, sim->params.net_us));
    request->order = order;
    request->deadline_us = mu_sim_below(sim, 2) ? mu_sim_between(sim, MU_SIM_S, 20 * MU_SIM_S) : 0;
}

static void node_orders(struct mu_sim *sim, struct mu_sim_event *event)
{
    char name[MU_WORKER_NAME_SIZE];
    (void)event;
    if (sim->faults_over)
        return;
    snprintf(name, sizeof name, "h%u", (unsigned)mu_sim_below(sim, sim->params.slots));
    order_node(sim, (enum mu_node_order)mu_sim_below(sim, MU_NODE_ORDER_COUNT), name);
    mu_sim_after(sim, mu_sim_below(sim, 4 * MU_SIM_S), MU_SIM_NODE_NONE, node_orders, NULL, 0, 0);
}

static void probes(struct mu_sim *sim, struct mu_sim_event *event)
{
    (void)event;
    if (sim->faults_over)
        return;
    add(sim, MU_CE_PROBE, NULL);
    mu_sim_after(sim, mu_sim_below(sim, 4 * MU_SIM_S), MU_SIM_NODE_NONE, probes, NULL, 0, 0);
}

void mu_sim_client_init(struct mu_sim *sim)
{
    sim->client = mu_sim_alloc(sizeof *sim->client);
    add(sim, MU_CE_SUBMIT, NULL);
    if (sim->params.node_orders)
        mu_sim_after(sim, MU_SIM_S, MU_SIM_NODE_NONE, node_orders, NULL, 0, 0);
    if (sim->params.probes)
        mu_sim_after(sim, MU_SIM_S / 4, MU_SIM_NODE_NONE, probes, NULL, 0, 0);
}

void mu_sim_client_fini(struct mu_sim *sim)
{
    if (!sim->client)
        return;
    free(sim->client->requests);
    free(sim->client);
}

/* A change that was made stays made. */
static void same_answer(struct mu_sim *sim, uint64_t cookie, const struct request *request, enum mu_status status,
                        bool existed, uint64_t checkpoint)
{
    if (status != MU_OK || existed != request->existed || checkpoint != request->checkpoint)
        mu_sim_violate(sim, "request %llu was made (checkpoint %llu) and is answered anew with %s (checkpoint %llu)",
                       (unsigned long long)cookie, (unsigned long long)request->checkpoint, mu_status_name(status),
                       (unsigned long long)checkpoint);
}

void mu_sim_client_reply(struct mu_sim *sim, uint64_t cookie, enum mu_status status, bool existed, uint64_t checkpoint,
                         const char *text)
{
    struct mu_sim_client *client = sim->client;
    if (cookie == 0 || cookie > client->count) {
        mu_sim_violate(sim, "a reply for cookie %llu that nobody asked for", (unsigned long long)cookie);
        return;
    }
    struct request *request = &client->requests[cookie - 1];
    mu_sim_trace(sim, "reply to request %llu (kind %d): %s %s", (unsigned long long)cookie, (int)request->kind,
                 mu_status_name(status), text);
    request->done = true;
    if (sim->params.repeats && request->made) {
        same_answer(sim, cookie, request, status, existed, checkpoint);
        return;
    }
    request->made = status == MU_OK;
    request->existed = existed;
    request->checkpoint = checkpoint;
    if (request->kind == MU_CE_SUBMIT) {
        if (status != MU_OK)
            mu_sim_violate(sim, "submit refused: %s %s", mu_status_name(status), text);
        if (client->submitted && !existed)
            mu_sim_violate(sim, "the same job was accepted as new twice");
        client->submitted = true;
    }
}

/* To any checkpoint that the client can see, most often with another rate. */
static void roll_back(struct mu_sim *sim, struct mu_amendment *one)
{
    uint64_t numbers[MU_CHECKPOINTS_MAX];
    uint32_t count = 0;
    for (uint32_t i = 0; i < mu_sim_store_count(sim->store) && count < MU_CHECKPOINTS_MAX; i++) {
        const struct mu_record *record = mu_sim_store_at(sim->store, i);
        if (record->kind == MU_RECORD_CHECKPOINT && record->checkpoint->state == MU_CKPT_COMMITTED)
            numbers[count++] = record->checkpoint->number;
    }
    if (count == 0)
        return;
    one->fields |= MU_AMEND_ROLL_BACK;
    one->back.checkpoint = numbers[mu_sim_below(sim, count)];
    one->at_step = 0;
    if (mu_sim_below(sim, 4) == 0)
        *one = (struct mu_amendment){.fields = MU_AMEND_ROLL_BACK, .back = one->back};
}

/* Rate, steps (longer or shorter, where that is allowed), or a range to skip, at once or later. */
static void amend(struct mu_sim *sim)
{
    add(sim, MU_CE_AMEND, NULL);
    struct mu_amendment *one = &sim->client->requests[sim->client->count - 1].amendment;
    switch (mu_sim_below(sim, 4)) {
    case 0:
        one->fields = MU_AMEND_STEPS;
        one->terms.steps = mu_sim_between(sim, sim->spec.steps / 2, sim->spec.steps * 3 / 2);
        break;
    case 1:
        one->fields = MU_AMEND_SKIP;
        one->skip_first = mu_sim_below(sim, sim->spec.steps * sim->spec.batch.sequences);
        one->skip_count = mu_sim_between(sim, 1, 3 * sim->spec.batch.sequences);
        break;
    default:
        one->fields = MU_AMEND_LR;
        one->terms.lr = (double)mu_sim_between(sim, 100, 1000) * 1e-5;
    }
    if (mu_sim_below(sim, 2))
        one->at_step = mu_sim_between(sim, 1, sim->spec.steps);
    if (sim->params.rolls_back && mu_sim_below(sim, 2))
        roll_back(sim, one);
}

/* With `amends`, every other time the job is amended instead. With `repeats`, every third time the job is scaled
 * instead. */
void mu_sim_client_checkpoint(struct mu_sim *sim)
{
    if (sim->params.amends && mu_sim_below(sim, 2)) {
        amend(sim);
        return;
    }
    bool scale = sim->params.repeats && sim->client->count % 3 == 0;
    add(sim, scale ? MU_CE_SCALE : MU_CE_CHECKPOINT, NULL);
    if (scale)
        sim->client->requests[sim->client->count - 1].max =
            (uint32_t)mu_sim_between(sim, sim->params.min_workers, sim->params.slots);
}

void mu_sim_client_cancel(struct mu_sim *sim)
{
    sim->client->cancelled = true;
    add(sim, MU_CE_CANCEL, NULL);
}

bool mu_sim_client_cancelled(const struct mu_sim *sim)
{
    return sim->client->cancelled;
}

void mu_sim_client_drain(struct mu_sim *sim, const char *worker)
{
    add(sim, MU_CE_DRAIN, worker);
}

void mu_sim_client_demoted(struct mu_sim *sim, const char *worker)
{
    if (mu_sim_below(sim, 4) == 0)
        add_later(sim, MU_CE_UNDRAIN, worker, mu_sim_between(sim, MU_SIM_S, 30 * MU_SIM_S));
}

bool mu_sim_client_called_well(const struct mu_sim *sim, const char *worker)
{
    for (uint32_t i = 0; i < sim->client->count; i++) {
        const struct request *request = &sim->client->requests[i];
        if (request->kind == MU_CE_UNDRAIN && strcmp(request->worker, worker) == 0)
            return true;
    }
    return false;
}

/* Mostly at once; now and then only when another process has the name already, or twice, because the answer was lost.
 */
void mu_sim_client_exited(struct mu_sim *sim, const char *worker, struct mu_id incarnation)
{
    if (!worker[0])
        return;
    bool late = mu_sim_below(sim, 4) == 0, twice = mu_sim_below(sim, 8) == 0;
    uint64_t after_us = mu_sim_delay(sim, late ? 3 * MU_SIM_S : MU_SIM_MS);
    add_later(sim, MU_CE_EXITED, worker, after_us)->incarnation = incarnation;
    if (twice)
        add_later(sim, MU_CE_EXITED, worker, 2 * after_us)->incarnation = incarnation;
}

/* Also lifts quarantines: every name that a record keeps out. */
void mu_sim_client_undrain_all(struct mu_sim *sim)
{
    struct mu_sim_client *client = sim->client;
    for (uint32_t i = 0; i < client->count; i++)
        client->requests[i].done =
            client->requests[i].done || client->requests[i].kind == MU_CE_DRAIN ||
            (client->requests[i].kind == MU_CE_NODE && client->requests[i].order != MU_NODE_RESUME);
    for (uint32_t i = 0; i < mu_sim_store_count(sim->store); i++) {
        const struct mu_record *record = mu_sim_store_at(sim->store, i);
        if (record->kind == MU_RECORD_WORKER && (record->worker->quarantined || record->worker->draining))
            add(sim, MU_CE_UNDRAIN, record->worker->name);
        if (record->kind == MU_RECORD_NODE)
            order_node(sim, MU_NODE_RESUME, record->node->name);
    }
}
