/* Nodes: what an operator has ordered of a host, for all workers on it, now and later.
 *
 *      cordon  no worker of it that holds nothing gets a rank; those that have one go on
 *      drain   its workers leave at the next boundary and stay away; who has not left by the deadline is given up
 *      resume  lifts either, and says that its slow workers are well (speeds.c)
 *
 * Orders are of the host, not of its workers: one that is started there tomorrow is bound by them too. */
#include "coordinator/core/internal.h"

#include <string.h>

static uint32_t index_of(const struct mu_coord *coord, const char *host)
{
    uint32_t at = 0;
    while (at < coord->node_count && strcmp(coord->nodes[at].record.name, host) != 0)
        at++;
    return at;
}

const struct mu_node_record *find_node(const struct mu_coord *coord, const char *host)
{
    uint32_t at = index_of(coord, host);
    return at < coord->node_count ? &coord->nodes[at].record : NULL;
}

/* Found or added; NULL: the table is full. */
static struct node *note_node(struct mu_coord *coord, const char *host)
{
    uint32_t at = index_of(coord, host);
    if (at == NODES_MAX)
        return NULL;
    if (at == coord->node_count)
        coord->node_count++;
    return &coord->nodes[at];
}

bool restore_node(struct mu_coord *coord, const struct mu_node_record *record)
{
    struct node *node = note_node(coord, record->name);
    if (node)
        node->record = *record;
    return node != NULL;
}

/* Deadlines are of the wall clock where they outlive the process, else of the lease clock. */
void date_nodes(struct mu_coord *coord)
{
    for (uint32_t i = 0; i < coord->node_count; i++) {
        uint64_t wall_us = coord->nodes[i].record.deadline_wall_us;
        uint64_t left_us = wall_us > coord->wall_us ? wall_us - coord->wall_us : 0;
        coord->nodes[i].deadline_us = wall_us ? lease_now(coord) + left_us : 0;
        if (coord->nodes[i].record.revision == 0) /* recorded before there were revisions */
            coord->nodes[i].record.revision = first_revision(coord);
    }
}

/* ---- workers that are bound by it ---- */

static void drain_worker(struct mu_coord *coord, struct worker *worker, const struct mu_node_record *record)
{
    char reason[MU_TEXT_SIZE];
    format_into(reason, sizeof reason, "node %s is drained: %s", record->name, record->reason);
    drain(coord, worker, reason);
}

static void undrain_worker(struct mu_coord *coord, struct worker *worker)
{
    const struct mu_worker_record *own = find_worker_record(coord, worker->name);
    bool drained_itself = worker->leaving || (own && own->draining);
    if (!worker->draining || drained_itself)
        return;
    worker->draining = false;
    worker->reason[0] = 0;
    count_ready(coord, worker);
    settle(coord, job_of(coord, worker));
}

static void bind(struct mu_coord *coord, struct worker *worker, const struct mu_node_record *record)
{
    bool was_cordoned = worker->cordoned;
    worker->cordoned = record && record->order == MU_NODE_CORDON;
    if (record && record->order == MU_NODE_DRAIN) {
        if (!worker->draining)
            drain_worker(coord, worker, record);
        return;
    }
    undrain_worker(coord, worker);
    struct job *job = job_of(coord, worker);
    if (was_cordoned == worker->cordoned || worker->rank != NONE)
        return;
    if (worker->cordoned && job->phase == MU_JP_PLANNING)
        park_all(coord, job); /* the plan may count on it */
    else if (!worker->cordoned)
        settle(coord, job);
}

static void bind_all(struct mu_coord *coord, const char *host, const struct mu_node_record *record)
{
    for (uint32_t slot = 0; slot < coord->worker_high; slot++) {
        struct worker *worker = &coord->workers[slot];
        if (worker->used && !worker->lost && strcmp(worker->host, host) == 0)
            bind(coord, worker, record);
    }
}

void bind_to_node(struct mu_coord *coord, struct worker *worker)
{
    const struct mu_node_record *record = find_node(coord, worker->host);
    worker->cordoned = record && record->order == MU_NODE_CORDON;
    if (!record || record->order != MU_NODE_DRAIN || worker->draining)
        return;
    worker->draining = true; /* it holds what others may need: it leaves as any other one */
    format_into(worker->reason, sizeof worker->reason, "node %s is drained: %s", record->name, record->reason);
}

void scan_nodes(struct mu_coord *coord)
{
    for (uint32_t i = 0; i < coord->node_count; i++) {
        struct node *node = &coord->nodes[i];
        if (node->deadline_us == 0 || lease_now(coord) < node->deadline_us)
            continue;
        node->deadline_us = 0;
        for (uint32_t slot = 0; slot < coord->worker_high; slot++) {
            struct worker *worker = &coord->workers[slot];
            if (worker->used && !worker->lost && worker->draining && strcmp(worker->host, node->record.name) == 0)
                declare_lost(coord, worker, "its node is drained, and the deadline for that is over");
        }
    }
}

void node_left(struct mu_coord *coord, const struct worker *worker)
{
    const struct mu_node_record *record = worker->draining ? find_node(coord, worker->host) : NULL;
    if (!record || record->order != MU_NODE_DRAIN)
        return;
    for (uint32_t slot = 0; slot < coord->worker_high; slot++) {
        const struct worker *other = &coord->workers[slot];
        if (other != worker && other->used && strcmp(other->host, worker->host) == 0)
            return;
    }
    event(coord, MU_EVENT_INFO, "node_drained", NULL, NULL, "node %s is drained (%s, by %s): no worker is left on it",
          record->name, record->reason, record->by);
}

/* ---- orders ---- */

static void resume(struct mu_coord *coord, const struct mu_coord_event *request)
{
    const char *host = request->request.node;
    const struct mu_node_record *found = find_node(coord, host);
    for (uint32_t slot = 0; slot < coord->worker_high; slot++) {
        struct worker *worker = &coord->workers[slot];
        if (worker->used && strcmp(worker->host, host) == 0)
            (void)restore_demoted(coord, worker, request->request.by);
    }
    if (!found)
        return; /* asked again, or never ordered: it is as it should be */
    struct mu_node_record record = *found;
    emit(coord, &(struct mu_coord_action){.kind = MU_CA_FORGET, .record = {.kind = MU_RECORD_NODE, .node = &record}});
    uint32_t at = index_of(coord, host);
    coord->nodes[at] = coord->nodes[--coord->node_count];
    event(coord, MU_EVENT_INFO, "node_resumed", NULL, NULL, "node %s may work again, by %s (it was %s: %s)", host,
          request->request.by, record.order == MU_NODE_DRAIN ? "drained" : "cordoned", record.reason);
    bind_all(coord, host, NULL);
}

void order_node(struct mu_coord *coord, const struct mu_coord_event *request, struct answer *answer)
{
    const struct mu_node_record *now = find_node(coord, request->request.node);
    if (!is_expected_of("node", request->request.node, now ? now->revision : 0, request->expected_revision, answer))
        return;
    if (request->request.order == MU_NODE_RESUME) {
        resume(coord, request);
        return;
    }
    struct node *node = note_node(coord, request->request.node);
    if (!node) {
        refuse(answer, MU_ERR_LIMIT, MU_REASON_LIMIT_REACHED,
               "%d nodes are cordoned or drained, the most that are remembered: resume some", NODES_MAX);
        return;
    }
    struct mu_node_record *record = &node->record;
    *record = (struct mu_node_record){
        .order = request->request.order, .since_wall_us = coord->wall_us, .revision = coord->last_event + 1};
    copy_text(record->name, sizeof record->name, request->request.node);
    copy_text(record->reason, sizeof record->reason, request->request.reason);
    copy_text(record->by, sizeof record->by, request->request.by);
    bool limited = record->order == MU_NODE_DRAIN && request->request.deadline_us;
    record->deadline_wall_us = limited ? coord->wall_us + request->request.deadline_us : 0;
    node->deadline_us = limited ? lease_now(coord) + request->request.deadline_us : 0;
    emit(coord, &(struct mu_coord_action){.kind = MU_CA_PERSIST, .record = {.kind = MU_RECORD_NODE, .node = record}});
    event(coord, MU_EVENT_INFO, record->order == MU_NODE_DRAIN ? "node_draining" : "node_cordoned", NULL, NULL,
          "node %s is %s by %s (%s)", record->name, record->order == MU_NODE_DRAIN ? "being drained" : "cordoned",
          record->by, record->reason);
    bind_all(coord, record->name, record);
}
