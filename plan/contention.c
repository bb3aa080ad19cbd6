#include "plan/contention.h"

#include <stdlib.h>

#include "plan/fairness.h"

#define NONE MU_TOPOLOGY_NONE

/* ---- flows ---- */

enum { PATH_MAX_LINKS = 2 * MU_TOPOLOGY_LEVELS_MAX };

struct flows {
    const struct mu_topology *topology;
    double *capacities; /* [2 switches]: up, down */
    struct mu_fair_flow *flows;
    double *devices; /* [flows]: among so many a flow is divided */
    uint32_t *links, *to;
    double *rates;
    uint32_t count, room, link_count, link_room;
    uint32_t last_from;
};

static double capacity_of(const struct mu_cluster *c, const struct mu_topology_switch *s)
{
    double width = (double)s->nodes * c->device.per_node * c->device.nic_bytes_per_second / mu_cluster_imbalance(c);
    for (uint32_t i = 0; i <= s->level && i < c->level_count; i++)
        width /= c->levels[i].oversubscription;
    return width;
}

static bool flows_init(struct flows *f, const struct mu_cluster *cluster, const struct mu_topology *topology)
{
    *f = (struct flows){.topology = topology};
    f->capacities = malloc(((size_t)topology->switch_count * 2 + 1) * sizeof *f->capacities);
    for (uint32_t i = 0; f->capacities && i < topology->switch_count; i++)
        f->capacities[2 * i] = f->capacities[2 * i + 1] = capacity_of(cluster, &topology->switches[i]);
    return f->capacities != NULL;
}

static void flows_fini(struct flows *f)
{
    free(f->capacities);
    free(f->flows);
    free(f->devices);
    free(f->links);
    free(f->rates);
    free(f->to);
}

static void *grown(void *old, uint32_t room, size_t size)
{
    return realloc(old, (size_t)room * size);
}

static bool make_room(struct flows *f)
{
    if (f->count < f->room && f->link_count + PATH_MAX_LINKS <= f->link_room)
        return true;
    uint32_t room = f->room ? 2 * f->room : 64, link_room = room * 4 + PATH_MAX_LINKS;
    link_room = link_room > 2 * f->link_room ? link_room : 2 * f->link_room;
    void *flows = grown(f->flows, room, sizeof *f->flows);
    f->flows = flows ? flows : f->flows;
    void *devices = grown(f->devices, room, sizeof *f->devices);
    f->devices = devices ? devices : f->devices;
    void *rates = grown(f->rates, room, sizeof *f->rates);
    f->rates = rates ? rates : f->rates;
    void *to = grown(f->to, room, sizeof *f->to);
    f->to = to ? to : f->to;
    void *links = grown(f->links, link_room, sizeof *f->links);
    f->links = links ? links : f->links;
    if (!flows || !devices || !rates || !to || !links)
        return false;
    f->room = room;
    f->link_room = link_room;
    return true;
}

/* Up from one node and down to the other, as far as their paths differ. */
static uint32_t put_path(struct flows *f, uint32_t from, uint32_t to)
{
    const struct mu_topology *t = f->topology;
    uint32_t a = t->nodes[from].parent, b = t->nodes[to].parent, first = f->link_count;
    while (a != b) {
        bool up = b == NONE || (a != NONE && t->switches[a].level <= t->switches[b].level);
        uint32_t *at = up ? &a : &b;
        f->links[f->link_count++] = 2 * *at + !up;
        *at = t->switches[*at].parent;
    }
    return f->link_count - first;
}

/* `weight`: bytes, in any unit; `most`: what the cards can; `devices`: the rate is told of one of so many. */
static bool add_flow(struct flows *f, uint32_t from, uint32_t to, double weight, double most, double devices)
{
    if (from == to)
        return true;
    if (!make_room(f))
        return false;
    uint32_t first = f->link_count, count = put_path(f, from, to);
    f->flows[f->count] = (struct mu_fair_flow){first, count, weight, most};
    f->to[f->count] = to;
    f->devices[f->count++] = devices;
    f->last_from = from;
    return true;
}

/* The same once more between the same two nodes. */
static bool widen_last(struct flows *f, uint32_t from, uint32_t to, double weight, double most)
{
    if (f->count == 0 || f->last_from != from || f->to[f->count - 1] != to)
        return false;
    f->flows[f->count - 1].weight += weight;
    f->flows[f->count - 1].most += most;
    f->devices[f->count - 1] += weight;
    return true;
}

/* What a device of the slowest flow gets; 0: nothing flows. Forgets the flows. */
static enum mu_status slowest(struct flows *f, double *ret_rate)
{
    double least = 0;
    enum mu_status status =
        mu_fair_rates(f->capacities, f->topology->switch_count * 2, f->flows, f->count, f->links, f->rates);
    for (uint32_t i = 0; status == MU_OK && i < f->count; i++) {
        double rate = f->rates[i] / f->devices[i];
        least = i == 0 || rate < least ? rate : least;
    }
    *ret_rate = least;
    f->count = f->link_count = 0;
    return status;
}

/* ---- where the ranks are ---- */

struct seating {
    const struct mu_forecast_plan *plan;
    const uint32_t *order;
    uint32_t per_node, groups_per_node; /* devices; tensor groups, 1 when one takes several nodes */
    uint32_t parts;                     /* nodes of a tensor group */
    double nic;
};

static struct seating seating_of(const struct mu_cluster *cluster, const struct mu_forecast_plan *plan,
                                 const uint32_t *order)
{
    uint32_t per_node = cluster->device.per_node;
    return (struct seating){.plan = plan,
                            .order = order,
                            .per_node = per_node,
                            .groups_per_node = plan->tp <= per_node ? per_node / plan->tp : 1,
                            .parts = (plan->tp + per_node - 1) / per_node,
                            .nic = cluster->device.nic_bytes_per_second};
}

static uint32_t node_at(const struct seating *s, uint32_t stage, uint32_t replica, uint32_t part)
{
    uint32_t group = stage * s->plan->dp + replica;
    return s->order[s->parts == 1 ? group / s->groups_per_node : group * s->parts + part];
}

/* Devices of a tensor group on its `part`-th node. */
static double width_of(const struct seating *s, uint32_t part)
{
    uint32_t left = s->plan->tp - part * s->per_node;
    return left < s->per_node ? left : s->per_node;
}

/* ---- the three exchanges ---- */

struct stop {
    uint32_t node, members;
};

/* From one node of a ring to the next. A node with fewer replicas has fewer cards in it; where it has more than NVLink
 * joins, they send one after the other. */
static bool add_hop(struct flows *f, const struct seating *s, struct stop from, struct stop to, double width,
                    double typical)
{
    double cards = from.members < to.members ? from.members : to.members;
    cards = cards < typical ? cards : typical;
    return add_flow(f, from.node, to.node, width, cards * width * s->nic, typical * width);
}

/* A ring over the nodes of a stage's replicas. */
static bool add_ring(struct flows *f, const struct seating *s, const struct mu_device_type *device, uint32_t stage,
                     uint32_t part)
{
    double width = width_of(s, part), typical = mu_forecast_in_node(device, s->plan->dp, s->plan->tp);
    struct stop first = {NONE, 0}, before = first, here = first;
    bool good = true;
    for (uint32_t d = 0; d <= s->plan->dp && good; d++) {
        uint32_t node = d < s->plan->dp ? node_at(s, stage, d, part) : NONE;
        if (node == here.node) {
            here.members++;
            continue;
        }
        if (here.node != NONE && before.node != NONE)
            good = add_hop(f, s, before, here, width, typical);
        first = first.node == NONE ? here : first;
        before = here;
        here = (struct stop){node, 1};
    }
    return good && add_hop(f, s, before, first, width, typical);
}

static bool add_gradients(struct flows *f, const struct seating *s, const struct mu_device_type *device)
{
    for (uint32_t stage = 0; stage < s->plan->pp; stage++)
        for (uint32_t part = 0; part < s->parts; part++)
            if (!add_ring(f, s, device, stage, part))
                return false;
    return true;
}

static bool add_activations(struct flows *f, const struct seating *s)
{
    for (uint32_t stage = 0; stage + 1 < s->plan->pp; stage++)
        for (uint32_t d = 0; d < s->plan->dp; d++)
            for (uint32_t part = 0; part < s->parts; part++) {
                uint32_t from = node_at(s, stage, d, part), to = node_at(s, stage + 1, d, part);
                double width = width_of(s, part);
                if (from != to && !widen_last(f, from, to, width, width * s->nic) &&
                    !add_flow(f, from, to, width, width * s->nic, width))
                    return false;
            }
    return true;
}

static bool add_tensor_rings(struct flows *f, const struct seating *s)
{
    uint32_t groups = s->plan->pp * s->plan->dp;
    for (uint32_t group = 0; group < groups && s->parts > 1; group++)
        for (uint32_t part = 0; part < s->parts; part++) {
            uint32_t next = (part + 1) % s->parts, from = s->order[group * s->parts + part];
            double here = width_of(s, part), there = width_of(s, next);
            if (!add_flow(f, from, s->order[group * s->parts + next], 1, (here < there ? here : there) * s->nic,
                          s->per_node))
                return false;
        }
    return true;
}

enum mu_status mu_contention_of(const struct mu_cluster *cluster, const struct mu_topology *topology,
                                const struct mu_forecast_plan *plan, const uint32_t *order,
                                struct mu_forecast_network *ret_network)
{
    struct seating s = seating_of(cluster, plan, order);
    struct mu_forecast_network network = {0};
    struct flows f;
    enum mu_status status = flows_init(&f, cluster, topology) ? MU_OK : MU_ERR_NO_MEMORY;
    if (status == MU_OK)
        status = add_gradients(&f, &s, &cluster->device) ? slowest(&f, &network.data) : MU_ERR_NO_MEMORY;
    if (status == MU_OK)
        status = add_activations(&f, &s) ? slowest(&f, &network.stage) : MU_ERR_NO_MEMORY;
    if (status == MU_OK)
        status = add_tensor_rings(&f, &s) ? slowest(&f, &network.tensor) : MU_ERR_NO_MEMORY;
    flows_fini(&f);
    if (status == MU_OK)
        *ret_network = network;
    return status;
}

/* ---- placement ---- */

struct question {
    const struct mu_forecast_model *model;
    const struct mu_cluster *cluster;
    const struct mu_forecast_rates *rates;
    const struct mu_node_map *map;
    const struct mu_forecast_plan *plan;
};

static enum mu_status try_way(const struct question *q, enum mu_node_way way, uint64_t seed, uint32_t *order,
                              struct mu_forecast *ret_forecast)
{
    struct seating s = seating_of(q->cluster, q->plan, order);
    uint32_t stage_nodes = s.parts > 1 ? q->plan->dp * s.parts : q->plan->dp / s.groups_per_node;
    uint32_t groups = q->plan->pp * q->plan->dp;
    uint32_t used = s.parts > 1 ? groups * s.parts : (groups + s.groups_per_node - 1) / s.groups_per_node;
    struct mu_forecast_network network;
    enum mu_status status = mu_node_order(q->map, way, used, q->plan->pp, stage_nodes, seed, order);
    if (status == MU_OK)
        status = mu_contention_of(q->cluster, mu_node_map_topology(q->map), q->plan, order, &network);
    if (status == MU_OK)
        *ret_forecast = mu_forecast_of(q->model, q->cluster, q->plan, q->rates, &network);
    return status;
}

/* Stages on whole nodes: without that the ways that look at stages mean nothing. */
static bool stages_fill_nodes(const struct question *q)
{
    struct seating s = seating_of(q->cluster, q->plan, NULL);
    return q->plan->pp > 1 && (s.parts > 1 || q->plan->dp % s.groups_per_node == 0);
}

enum mu_status mu_contention_place(const struct mu_forecast_model *model, const struct mu_cluster *cluster,
                                   const struct mu_forecast_rates *rates, const struct mu_node_map *map,
                                   struct mu_candidate *candidate, enum mu_node_way *ret_way, uint32_t *order)
{
    struct question q = {model, cluster, rates, map, &candidate->plan};
    enum mu_node_way best = MU_WAY_PACKED, ways = stages_fill_nodes(&q) ? MU_WAYS_BY_TOPOLOGY : MU_WAY_FITTED;
    struct mu_forecast forecast, least = {0};
    for (enum mu_node_way way = MU_WAY_PACKED; way < ways; way++) {
        enum mu_status status = try_way(&q, way, 0, order, &forecast);
        if (status != MU_OK)
            return status;
        if (way == MU_WAY_PACKED || forecast.step_s < least.step_s) {
            best = way;
            least = forecast;
        }
    }
    enum mu_status status = try_way(&q, best, 0, order, &candidate->forecast);
    if (status != MU_OK)
        return status;
    mu_search_weigh(model, cluster, candidate);
    *ret_way = best;
    return MU_OK;
}

enum mu_status mu_contention_compare(const struct mu_forecast_model *model, const struct mu_cluster *cluster,
                                     const struct mu_forecast_rates *rates, const struct mu_node_map *map,
                                     const struct mu_candidate *candidate, enum mu_node_way way,
                                     struct mu_contention_gain *ret_gain)
{
    struct question q = {model, cluster, rates, map, &candidate->plan};
    struct mu_contention_gain gain = {.way = way, .step_s = candidate->forecast.step_s};
    struct mu_forecast forecast;
    uint32_t *order = malloc(((size_t)mu_node_map_topology(map)->present_count + 1) * sizeof *order);
    enum mu_status status = order ? try_way(&q, MU_WAY_BY_NAME, 0, order, &forecast) : MU_ERR_NO_MEMORY;
    gain.by_name_s = status == MU_OK ? forecast.step_s : 0;
    for (uint64_t seed = 1; seed <= MU_CONTENTION_SHUFFLES && status == MU_OK; seed++) {
        status = try_way(&q, MU_WAY_RANDOM, seed, order, &forecast);
        gain.random_s += status == MU_OK ? forecast.step_s / MU_CONTENTION_SHUFFLES : 0;
    }
    free(order);
    if (status == MU_OK)
        *ret_gain = gain;
    return status;
}

enum mu_status mu_contention_rank(const struct mu_forecast_model *model, const struct mu_cluster *cluster,
                                  const struct mu_forecast_rates *rates, const struct mu_node_map *map,
                                  struct mu_candidate *candidates, uint32_t count)
{
    uint32_t *order = malloc(((size_t)mu_node_map_topology(map)->present_count + 1) * sizeof *order);
    enum mu_status status = order ? MU_OK : MU_ERR_NO_MEMORY;
    enum mu_node_way way;
    for (uint32_t i = 0; i < count && status == MU_OK; i++) {
        struct mu_candidate placed = candidates[i];
        status = mu_contention_place(model, cluster, rates, map, &placed, &way, order);
        uint32_t at = i;
        for (; at > 0 && mu_search_better(&placed, &candidates[at - 1]); at--)
            candidates[at] = candidates[at - 1];
        candidates[at] = placed;
    }
    free(order);
    return status;
}
