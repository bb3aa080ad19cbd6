#include "simulate/failures.h"

#include <stdlib.h>

#include "common/fmath.h"
#include "common/rng.h"

#define NEVER 1e300

/* What fails as one: a node (kind NODE), the nodes under a leaf switch, the nodes of a power domain. */
enum kind { NODE, SWITCH, POWER };

struct source {
    enum kind kind;
    uint32_t index; /* of the node, of the switch; first node by name of the domain, in by_name */
    double fails_s;
};

struct mu_failures {
    const struct mu_cluster *cluster;
    const struct mu_topology *topology;
    uint64_t random;
    struct source *sources;
    uint32_t source_count;
    double *back_s;    /* [nodes]: when it is repaired; NEVER: it is up */
    uint32_t *by_name; /* [present nodes] */
};

static double uniform(struct mu_failures *f)
{
    return ((double)(mu_splitmix64(&f->random) >> 11) + 0.5) * 0x1p-53;
}

/* ln of gamma(x), x >= 1: Lanczos, g = 7, n = 9 (relative error below 1e-14). */
static double ln_gamma(double x)
{
    static const double c[] = {0.99999999999980993,  676.5203681218851,     -1259.1392167224028,
                               771.32342877765313,   -176.61502916214059,   12.507343278686905,
                               -0.13857109526572012, 9.9843695780195716e-6, 1.5056327351493116e-7};
    double sum = c[0], t = x + 6.5;
    for (int i = 1; i < 9; i++)
        sum += c[i] / (x - 1 + i);
    return 0.91893853320467274 + (x - 0.5) * mu_fmath_log(t) - t + mu_fmath_log(sum);
}

double mu_failures_draw(double mean_s, double shape, double u)
{
    double e = -mu_fmath_log(u);
    if (shape == 1)
        return mean_s * e;
    return mean_s * mu_fmath_exp(mu_fmath_log(e) / shape - ln_gamma(1 + 1 / shape));
}

/* From now on; devices of a node, each with its own time, fail as one of that rate. */
static double next_failure(struct mu_failures *f, enum kind kind, double now_s)
{
    const struct mu_cluster *c = f->cluster;
    double hours = kind == NODE     ? c->device_mtbf_hours / c->device.per_node
                   : kind == SWITCH ? c->switch_mtbf_hours
                                    : c->power_mtbf_hours;
    if (!(hours > 0))
        return NEVER;
    return now_s + mu_failures_draw(hours * 3600, kind == NODE ? c->weibull_shape : 1, uniform(f));
}

static void add_source(struct mu_failures *f, enum kind kind, uint32_t index)
{
    struct source *s = &f->sources[f->source_count++];
    *s = (struct source){kind, index, next_failure(f, kind, 0)};
}

struct named {
    const char *name;
    uint32_t node;
};

static int compare_named(const void *a, const void *b)
{
    return mu_topology_compare_names(((const struct named *)a)->name, ((const struct named *)b)->name);
}

static bool sort_by_name(struct mu_failures *f)
{
    const struct mu_topology *t = f->topology;
    struct named *list = malloc((t->present_count + (size_t)1) * sizeof *list);
    uint32_t count = 0;
    if (!list)
        return false;
    for (uint32_t i = 0; i < t->node_count; i++)
        if (!t->nodes[i].absent)
            list[count++] = (struct named){t->node_names.names[i], i};
    qsort(list, count, sizeof *list, compare_named);
    for (uint32_t i = 0; i < count; i++)
        f->by_name[i] = list[i].node;
    free(list);
    return true;
}

struct mu_failures *mu_failures_new(const struct mu_cluster *cluster, const struct mu_topology *t, uint64_t seed)
{
    struct mu_failures *f = calloc(1, sizeof *f);
    if (!f)
        return NULL;
    *f = (struct mu_failures){.cluster = cluster, .topology = t, .random = seed};
    f->sources = calloc(2 * (size_t)t->present_count + t->switch_count + 1, sizeof *f->sources);
    f->back_s = calloc(t->node_count + (size_t)1, sizeof *f->back_s);
    f->by_name = calloc(t->present_count + (size_t)1, sizeof *f->by_name);
    if (!f->sources || !f->back_s || !f->by_name || !sort_by_name(f)) {
        mu_failures_free(f);
        return NULL;
    }
    for (uint32_t i = 0; i < t->node_count; i++)
        f->back_s[i] = NEVER;
    for (uint32_t i = 0; i < t->present_count; i++)
        add_source(f, NODE, f->by_name[i]);
    for (uint32_t i = 0; i < t->switch_count && cluster->switch_mtbf_hours > 0; i++)
        if (t->switches[i].level == 0 && t->switches[i].nodes > 0)
            add_source(f, SWITCH, i);
    for (uint32_t i = 0; i < t->present_count && cluster->power_mtbf_hours > 0; i += cluster->power_nodes)
        add_source(f, POWER, i);
    return f;
}

void mu_failures_free(struct mu_failures *f)
{
    if (!f)
        return;
    free(f->sources);
    free(f->back_s);
    free(f->by_name);
    free(f);
}

static struct source *first_source(const struct mu_failures *f)
{
    struct source *first = &f->sources[0];
    for (uint32_t i = 1; i < f->source_count; i++)
        first = f->sources[i].fails_s < first->fails_s ? &f->sources[i] : first;
    return first;
}

static double first_back_s(const struct mu_failures *f)
{
    double first = NEVER;
    for (uint32_t i = 0; i < f->topology->node_count; i++)
        first = f->back_s[i] < first ? f->back_s[i] : first;
    return first;
}

double mu_failures_next_s(const struct mu_failures *f)
{
    double fails = first_source(f)->fails_s, back = first_back_s(f);
    return fails < back ? fails : back;
}

/* It is down until then at least; true: it was up. */
static bool take_down(struct mu_failures *f, uint32_t node, double back_s)
{
    bool was_up = f->back_s[node] == NEVER;
    if (was_up || f->back_s[node] < back_s)
        f->back_s[node] = back_s;
    return was_up;
}

static uint32_t fail(struct mu_failures *f, struct source *s, uint32_t *nodes)
{
    const struct mu_cluster *c = f->cluster;
    const struct mu_topology *t = f->topology;
    double now_s = s->fails_s, back_s = now_s + c->repair_hours * 3600;
    uint32_t count = 0;
    if (s->kind == NODE) {
        bool transient = c->transient_share > 0 && uniform(f) < c->transient_share;
        if (take_down(f, s->index, transient ? now_s + c->restart_s : back_s))
            nodes[count++] = s->index;
    } else if (s->kind == SWITCH) {
        for (uint32_t i = 0; i < t->node_count; i++)
            if (t->nodes[i].parent == s->index && !t->nodes[i].absent && take_down(f, i, back_s))
                nodes[count++] = i;
    } else {
        for (uint32_t i = s->index; i < t->present_count && i < s->index + c->power_nodes; i++)
            if (take_down(f, f->by_name[i], back_s))
                nodes[count++] = f->by_name[i];
    }
    s->fails_s = next_failure(f, s->kind, s->kind == NODE ? f->back_s[s->index] : back_s);
    return count;
}

uint32_t mu_failures_take(struct mu_failures *f, uint32_t *nodes, bool *ret_down)
{
    struct source *first = first_source(f);
    double back = first_back_s(f);
    *ret_down = first->fails_s < back;
    if (*ret_down)
        return fail(f, first, nodes);
    uint32_t count = 0;
    for (uint32_t i = 0; i < f->topology->node_count; i++)
        if (f->back_s[i] == back) {
            f->back_s[i] = NEVER;
            nodes[count++] = i;
        }
    return count;
}
