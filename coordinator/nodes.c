#include "coordinator/nodes.h"

#include <stdlib.h>
#include <string.h>

/* What one worker, order or record says about a host. */
struct trait {
    char host[MU_WORKER_NAME_SIZE];
    enum { WORKER, ORDER, QUARANTINE } kind;
    enum mu_worker_state state; /* WORKER */
    bool has_rank;
    uint32_t index; /* ORDER, QUARANTINE: of the record */
};

static int by_host(const void *a, const void *b)
{
    const struct trait *x = a, *y = b;
    int order = strcmp(x->host, y->host);
    return order ? order : x->index < y->index ? -1 : x->index > y->index;
}

static size_t collect(const struct mu_coord *coord, struct trait *traits, size_t most)
{
    size_t count = 0;
    struct mu_worker_view worker;
    struct mu_node_record node;
    struct mu_worker_record record;
    for (uint32_t slot = 0; slot < mu_coord_worker_slots(coord) && count < most; slot++) {
        if (!mu_coord_worker_view(coord, slot, &worker) || !worker.host[0])
            continue;
        traits[count] =
            (struct trait){.kind = WORKER, .state = worker.state, .has_rank = worker.rank != UINT32_MAX, .index = slot};
        memcpy(traits[count++].host, worker.host, sizeof worker.host);
    }
    for (uint32_t i = 0; mu_coord_node_view(coord, i, &node) && count < most; i++) {
        traits[count] = (struct trait){.kind = ORDER, .index = i};
        memcpy(traits[count++].host, node.name, sizeof node.name);
    }
    for (uint32_t i = 0; mu_coord_worker_record_view(coord, i, &record) && count < most; i++) {
        if (!record.quarantined || !record.host[0])
            continue;
        traits[count] = (struct trait){.kind = QUARANTINE, .index = i};
        memcpy(traits[count++].host, record.host, sizeof record.host);
    }
    return count;
}

static size_t count_traits(const struct mu_coord *coord)
{
    size_t count = mu_coord_worker_slots(coord);
    struct mu_node_record node;
    struct mu_worker_record record;
    for (uint32_t i = 0; mu_coord_node_view(coord, i, &node); i++)
        count++;
    for (uint32_t i = 0; mu_coord_worker_record_view(coord, i, &record); i++)
        count++;
    return count;
}

static Muster__V1__NodeState state_of(const Muster__V1__Node *node, const uint32_t states[MU_WS_STATE_COUNT],
                                      bool drained)
{
    if (drained)
        return node->workers || states[MU_WS_LOST] ? MUSTER__V1__NODE_STATE__NODE_STATE_DRAINING
                                                   : MUSTER__V1__NODE_STATE__NODE_STATE_DRAINED;
    if (node->workers == 0)
        return node->quarantined && !states[MU_WS_LOST] ? MUSTER__V1__NODE_STATE__NODE_STATE_QUARANTINED
                                                        : MUSTER__V1__NODE_STATE__NODE_STATE_DOWN;
    if (states[MU_WS_SUSPECT])
        return MUSTER__V1__NODE_STATE__NODE_STATE_SUSPECT;
    if (states[MU_WS_DRAINING] == node->workers)
        return MUSTER__V1__NODE_STATE__NODE_STATE_DRAINING;
    if (node->busy)
        return MUSTER__V1__NODE_STATE__NODE_STATE_BUSY;
    return states[MU_WS_SPARE] ? MUSTER__V1__NODE_STATE__NODE_STATE_READY : MUSTER__V1__NODE_STATE__NODE_STATE_JOINING;
}

static void take_order(struct mu_wire_arena *arena, const struct mu_node_record *record, Muster__V1__Node *node)
{
    node->cordoned = record->order == MU_NODE_CORDON;
    node->reason = mu_wire_put_text(arena, record->reason, sizeof record->reason);
    node->by = mu_wire_put_text(arena, record->by, sizeof record->by);
    node->since_wall_us = record->since_wall_us;
    node->deadline_wall_us = record->deadline_wall_us;
    node->revision = record->revision;
}

/* Texts are borrowed, so what they come from lies in the arena. */
struct sources {
    Muster__V1__Node node;
    struct mu_node_record order;
    struct mu_worker_record quarantine;
};

/* One host, from all that is said about it. NULL: no memory. */
static Muster__V1__Node *make_node(struct mu_wire_arena *arena, const struct mu_coord *coord,
                                   const struct trait *traits, size_t count)
{
    uint32_t states[MU_WS_STATE_COUNT] = {0};
    bool has_order = false;
    struct sources *all = mu_wire_arena_alloc(arena, sizeof *all);
    if (!all)
        return NULL;
    Muster__V1__Node *node = &all->node;
    muster__v1__node__init(node);
    node->name = mu_wire_put_text(arena, traits[0].host, sizeof traits[0].host);
    for (size_t i = 0; i < count; i++) {
        const struct trait *trait = &traits[i];
        if (trait->kind == WORKER) {
            states[trait->state]++;
            node->workers += trait->state != MU_WS_LOST;
            node->busy += trait->state != MU_WS_LOST && trait->has_rank;
        } else if (trait->kind == ORDER) {
            has_order = mu_coord_node_view(coord, trait->index, &all->order);
        } else if (mu_coord_worker_record_view(coord, trait->index, &all->quarantine)) {
            node->quarantined++;
        }
    }
    if (has_order) /* comes before a quarantine */
        take_order(arena, &all->order, node);
    else
        node->reason = mu_wire_put_text(arena, all->quarantine.reason, sizeof all->quarantine.reason);
    node->state = state_of(node, states, has_order && all->order.order == MU_NODE_DRAIN);
    return node;
}

enum mu_status mu_nodes_list(struct mu_wire_arena *arena, const struct mu_coord *coord, Muster__V1__Node ***ret_nodes,
                             size_t *ret_count, struct mu_error *err)
{
    size_t most = count_traits(coord), count = 0;
    struct trait *traits = mu_wire_arena_alloc(arena, (most + 1) * sizeof *traits);
    Muster__V1__Node **nodes = mu_wire_arena_alloc(arena, (most + 1) * sizeof *nodes);
    if (!traits || !nodes)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the list of nodes");
    most = collect(coord, traits, most);
    qsort(traits, most, sizeof *traits, by_host);
    for (size_t first = 0, end; first < most; first = end) {
        for (end = first + 1; end < most && strcmp(traits[end].host, traits[first].host) == 0;)
            end++;
        nodes[count] = make_node(arena, coord, traits + first, end - first);
        if (!nodes[count++])
            return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the list of nodes");
    }
    *ret_nodes = nodes;
    *ret_count = count;
    return MU_OK;
}
