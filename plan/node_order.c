#include "plan/node_order.h"

#include <stdlib.h>
#include <string.h>

#include "common/hash.h"
#include "common/rng.h"

#define NONE MU_TOPOLOGY_NONE

/* A switch with what is present below it. */
struct place {
    uint64_t shape;       /* equal for subtrees that look the same */
    uint32_t present;     /* nodes below */
    uint32_t first_child; /* in `children`, child_count switches */
    uint32_t child_count;
    uint32_t first_own, own_count; /* nodes directly below, in `own` */
    uint32_t first;                /* of its nodes in `packed` */
};

struct mu_node_map {
    const struct mu_topology *topology;
    struct place *places; /* [switches + 1]: the last is above the roots */
    uint32_t *children;   /* switches by parent, in order */
    uint32_t *own;        /* present nodes by parent */
    uint32_t *packed;     /* present nodes as the tree stands */
    uint32_t *position;   /* by node: in `packed` */
    uint32_t *by_name;    /* present nodes */
    uint32_t packed_count;
};

static uint32_t place_of(const struct mu_node_map *m, uint32_t parent)
{
    return parent == NONE ? m->topology->switch_count : parent;
}

/* ---- shapes ---- */

static uint64_t mix(uint64_t a, uint64_t b)
{
    const uint64_t both[] = {a, b};
    return mu_xxh3_64(both, sizeof both, 0);
}

/* Upward, level by level; sums do not know an order. */
static void find_shapes(struct mu_node_map *m)
{
    const struct mu_topology *t = m->topology;
    for (uint32_t i = 0; i < t->node_count; i++) {
        struct place *p = &m->places[place_of(m, t->nodes[i].parent)];
        p->shape += mix(1, t->nodes[i].absent);
        p->own_count += !t->nodes[i].absent;
        p->present += !t->nodes[i].absent;
    }
    for (uint32_t level = 0; level < t->level_count; level++)
        for (uint32_t i = 0; i < t->switch_count; i++) {
            if (t->switches[i].level != level)
                continue;
            struct place *p = &m->places[i], *up = &m->places[place_of(m, t->switches[i].parent)];
            p->shape = mix(2 + level, p->shape);
            up->shape += p->shape;
            up->present += p->present;
        }
}

struct child {
    uint64_t shape;
    uint32_t parent, present, index;
};

/* By parent; larger ones first, then by shape: those that look the same are as good as each other. */
static int compare_children(const void *a, const void *b)
{
    const struct child *x = a, *y = b;
    if (x->parent != y->parent)
        return x->parent < y->parent ? -1 : 1;
    if (x->present != y->present)
        return x->present > y->present ? -1 : 1;
    if (x->shape != y->shape)
        return x->shape < y->shape ? -1 : 1;
    return x->index < y->index ? -1 : x->index > y->index;
}

static bool sort_children(struct mu_node_map *m)
{
    const struct mu_topology *t = m->topology;
    struct child *list = malloc(((size_t)t->switch_count + 1) * sizeof *list);
    if (!list)
        return false;
    for (uint32_t i = 0; i < t->switch_count; i++)
        list[i] = (struct child){m->places[i].shape, place_of(m, t->switches[i].parent), m->places[i].present, i};
    qsort(list, t->switch_count, sizeof *list, compare_children);
    for (uint32_t i = 0; i < t->switch_count; i++) {
        struct place *up = &m->places[list[i].parent];
        up->first_child = up->child_count++ ? up->first_child : i;
        m->children[i] = list[i].index;
    }
    free(list);
    return true;
}

static void sort_own(struct mu_node_map *m)
{
    const struct mu_topology *t = m->topology;
    uint32_t next = 0;
    for (uint32_t i = 0; i <= t->switch_count; i++) {
        m->places[i].first_own = next;
        next += m->places[i].own_count;
        m->places[i].own_count = 0;
    }
    for (uint32_t i = 0; i < t->node_count; i++) {
        struct place *p = &m->places[place_of(m, t->nodes[i].parent)];
        if (!t->nodes[i].absent)
            m->own[p->first_own + p->own_count++] = i;
    }
}

/* Depth first; as deep as a topology has levels. */
static void pack(struct mu_node_map *m, uint32_t at)
{
    struct place *p = &m->places[at];
    p->first = m->packed_count;
    for (uint32_t i = 0; i < p->child_count; i++)
        pack(m, m->children[p->first_child + i]);
    memcpy(m->packed + m->packed_count, m->own + p->first_own, p->own_count * sizeof *m->own);
    m->packed_count += p->own_count;
}

struct named {
    const char *name;
    uint32_t node;
};

static int compare_named(const void *a, const void *b)
{
    return mu_topology_compare_names(((const struct named *)a)->name, ((const struct named *)b)->name);
}

static bool sort_names(struct mu_node_map *m)
{
    const struct mu_topology *t = m->topology;
    struct named *list = malloc(((size_t)t->present_count + 1) * sizeof *list);
    uint32_t count = 0;
    if (!list)
        return false;
    for (uint32_t i = 0; i < t->node_count; i++)
        if (!t->nodes[i].absent)
            list[count++] = (struct named){t->node_names.names[i], i};
    qsort(list, count, sizeof *list, compare_named);
    for (uint32_t i = 0; i < count; i++)
        m->by_name[i] = list[i].node;
    free(list);
    return true;
}

struct mu_node_map *mu_node_map_new(const struct mu_topology *t)
{
    struct mu_node_map *m = calloc(1, sizeof *m);
    if (!m)
        return NULL;
    m->topology = t;
    m->places = calloc((size_t)t->switch_count + 1, sizeof *m->places);
    m->children = calloc((size_t)t->switch_count + 1, sizeof *m->children);
    m->own = calloc((size_t)t->node_count + 1, sizeof *m->own);
    m->packed = calloc((size_t)t->present_count + 1, sizeof *m->packed);
    m->by_name = calloc((size_t)t->present_count + 1, sizeof *m->by_name);
    m->position = calloc((size_t)t->node_count + 1, sizeof *m->position);
    bool good = m->places && m->children && m->own && m->packed && m->by_name && m->position;
    if (good) {
        find_shapes(m);
        sort_own(m);
        good = sort_children(m) && sort_names(m);
    }
    if (!good) {
        mu_node_map_free(m);
        return NULL;
    }
    pack(m, t->switch_count);
    for (uint32_t i = 0; i < m->packed_count; i++)
        m->position[m->packed[i]] = i;
    return m;
}

void mu_node_map_free(struct mu_node_map *m)
{
    if (!m)
        return;
    free(m->places);
    free(m->children);
    free(m->own);
    free(m->packed);
    free(m->by_name);
    free(m->position);
    free(m);
}

const struct mu_topology *mu_node_map_topology(const struct mu_node_map *map)
{
    return map->topology;
}

bool mu_node_site_of(const struct mu_node_map *m, const char *name, struct mu_node_site *ret_site)
{
    const struct mu_topology *t = m->topology;
    uint32_t node = mu_topology_find_node(t, name);
    if (node == NONE || t->nodes[node].absent)
        return false;
    uint32_t parent = t->nodes[node].parent;
    *ret_site = (struct mu_node_site){m->position[node], parent == NONE ? t->switch_count + node : parent};
    return true;
}

/* ---- orders ---- */

/* Among the places that have room those of the lowest level, of these the one with the fewest free nodes, then the
 * first in the packed order. */
static uint32_t closest_with(const struct mu_node_map *m, const uint32_t *free_nodes, uint32_t wanted)
{
    const struct mu_topology *t = m->topology;
    uint32_t best = t->switch_count, best_level = MU_TOPOLOGY_LEVELS_MAX;
    for (uint32_t i = 0; i < t->switch_count; i++) {
        uint32_t level = t->switches[i].level;
        if (free_nodes[i] < wanted || level > best_level)
            continue;
        if (level < best_level || free_nodes[i] < free_nodes[best] ||
            (free_nodes[i] == free_nodes[best] && m->places[i].first < m->places[best].first)) {
            best = i;
            best_level = level;
        }
    }
    return best;
}

static enum mu_status fit(const struct mu_node_map *m, uint32_t stages, uint32_t stage_nodes, uint32_t *order)
{
    const struct mu_topology *t = m->topology;
    uint32_t *free_nodes = malloc(((size_t)t->switch_count + 1) * sizeof *free_nodes), count = 0;
    bool *taken = calloc((size_t)m->packed_count + 1, sizeof *taken);
    enum mu_status status = free_nodes && taken ? MU_OK : MU_ERR_NO_MEMORY;
    for (uint32_t i = 0; status == MU_OK && i <= t->switch_count; i++)
        free_nodes[i] = m->places[i].present;
    for (uint32_t stage = 0; status == MU_OK && stage <= stages; stage++) { /* the last round takes what is left */
        bool rest = stage == stages;
        uint32_t at = rest ? t->switch_count : closest_with(m, free_nodes, stage_nodes);
        uint32_t wanted = rest ? m->packed_count - count : stage_nodes;
        for (uint32_t i = m->places[at].first; wanted > 0; i++) {
            if (taken[i])
                continue;
            taken[i] = true;
            wanted--;
            order[count++] = m->packed[i];
            for (uint32_t up = t->nodes[m->packed[i]].parent; up != NONE; up = t->switches[up].parent)
                free_nodes[up]--;
            free_nodes[t->switch_count]--;
        }
    }
    free(free_nodes);
    free(taken);
    return status;
}

struct thin {
    uint32_t own, first, place;
};

/* Places with few nodes first; of equals the last in the packed order. */
static int compare_thin(const void *a, const void *b)
{
    const struct thin *x = a, *y = b;
    if (x->own != y->own)
        return x->own < y->own ? -1 : 1;
    return x->first > y->first ? -1 : x->first < y->first;
}

/* Packed, but the nodes that are not used are those under the switches that have fewest: they are behind the narrowest
 * links of all. */
static enum mu_status leave_thin(const struct mu_node_map *m, uint32_t used, uint32_t *order)
{
    const struct mu_topology *t = m->topology;
    struct thin *list = malloc(((size_t)t->switch_count + 1) * sizeof *list);
    bool *left = calloc((size_t)t->node_count + 1, sizeof *left);
    uint32_t surplus = m->packed_count - used, kept = 0, dropped = used;
    enum mu_status status = list && left ? MU_OK : MU_ERR_NO_MEMORY;
    for (uint32_t i = 0; status == MU_OK && i < t->switch_count; i++)
        list[i] = (struct thin){m->places[i].own_count, m->places[i].first, i};
    if (status == MU_OK)
        qsort(list, t->switch_count, sizeof *list, compare_thin);
    for (uint32_t i = 0; status == MU_OK && i < t->switch_count && surplus > 0; i++)
        for (uint32_t k = list[i].own; k > 0 && surplus > 0; k--, surplus--)
            left[m->own[m->places[list[i].place].first_own + k - 1]] = true;
    for (uint32_t i = 0; status == MU_OK && i < m->packed_count; i++) {
        bool keep = !left[m->packed[i]] && kept < used;
        order[keep ? kept++ : dropped++] = m->packed[i];
    }
    free(list);
    free(left);
    return status;
}

static void spread(const struct mu_node_map *m, uint32_t stages, uint32_t stage_nodes, uint32_t *order)
{
    uint32_t used = stages * stage_nodes;
    for (uint32_t i = 0; i < used; i++)
        order[i] = m->packed[i % stage_nodes * stages + i / stage_nodes];
    memcpy(order + used, m->packed + used, (m->packed_count - used) * sizeof *order);
}

static void shuffle(const struct mu_node_map *m, uint64_t seed, uint32_t *order)
{
    for (uint32_t i = 0; i < m->packed_count; i++)
        order[i] = m->packed[mu_permute(seed, 0, i, m->packed_count)];
}

enum mu_status mu_node_order(const struct mu_node_map *m, enum mu_node_way way, uint32_t used, uint32_t stages,
                             uint32_t stage_nodes, uint64_t seed, uint32_t *order)
{
    MU_ASSERT((uint64_t)stages * stage_nodes <= used && used <= m->packed_count);
    switch (way) {
    case MU_WAY_FITTED:
        return fit(m, stages, stage_nodes, order);
    case MU_WAY_DENSE:
        return leave_thin(m, used, order);
    case MU_WAY_ACROSS:
        spread(m, stages, stage_nodes, order);
        return MU_OK;
    case MU_WAY_RANDOM:
        shuffle(m, seed, order);
        return MU_OK;
    default:
        memcpy(order, way == MU_WAY_BY_NAME ? m->by_name : m->packed, m->packed_count * sizeof *order);
        return MU_OK;
    }
}
