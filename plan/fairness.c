#include "plan/fairness.h"

#include <stdbool.h>
#include <stdlib.h>

/* Level: rate over weight, the same for all flows that still grow. */
struct link {
    double left, weight; /* capacity that stopped flows leave; weight of those that grow */
    uint32_t growing;    /* how many */
    uint32_t first_flow; /* in flows_of */
};

struct heap_entry {
    double level;
    uint32_t link;
};

struct order_entry {
    double level; /* at which a flow has all it can use */
    uint32_t flow;
};

struct filling {
    const struct mu_fair_flow *flows;
    const uint32_t *flow_links;
    double *rates;
    struct link *links;
    uint32_t *flows_of; /* by link */
    bool *stopped;      /* by flow */
    struct heap_entry *heap;
    struct order_entry *order;
    uint32_t link_count, flow_count, heap_count;
};

/* ---- a heap of the levels at which links are full, the lowest on top ---- */

static void sift_down(struct filling *f, uint32_t at)
{
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= f->heap_count)
            return;
        child += child + 1 < f->heap_count && f->heap[child + 1].level < f->heap[child].level;
        if (f->heap[at].level <= f->heap[child].level)
            return;
        struct heap_entry moved = f->heap[at];
        f->heap[at] = f->heap[child];
        f->heap[child] = moved;
        at = child;
    }
}

static void drop_top(struct filling *f)
{
    f->heap[0] = f->heap[--f->heap_count];
    sift_down(f, 0);
}

static double full_at(const struct link *link)
{
    double left = link->left > 0 ? link->left : 0; /* rounding */
    return left / link->weight;
}

/* The fullest link: levels in the heap are too low where flows have stopped since, never too high. False: no link with
 * flows that grow is left. */
static bool fullest(struct filling *f, uint32_t *ret_link, double *ret_level)
{
    while (f->heap_count > 0) {
        const struct link *link = &f->links[f->heap[0].link];
        if (link->growing == 0) {
            drop_top(f);
            continue;
        }
        double level = full_at(link);
        if (level <= f->heap[0].level) {
            *ret_link = f->heap[0].link;
            *ret_level = f->heap[0].level;
            return true;
        }
        f->heap[0].level = level;
        sift_down(f, 0);
    }
    return false;
}

/* ---- filling ---- */

static void stop(struct filling *f, uint32_t flow, double rate)
{
    const struct mu_fair_flow *it = &f->flows[flow];
    f->stopped[flow] = true;
    f->rates[flow] = rate;
    for (uint32_t i = 0; i < it->link_count; i++) {
        struct link *link = &f->links[f->flow_links[it->first_link + i]];
        link->left -= rate;
        link->weight -= it->weight;
        link->growing--;
    }
}

static int compare_order(const void *a, const void *b)
{
    const struct order_entry *x = a, *y = b;
    return x->level != y->level ? (x->level < y->level ? -1 : 1) : x->flow < y->flow ? -1 : x->flow > y->flow;
}

static void index_links(struct filling *f)
{
    uint32_t next = 0;
    for (uint32_t i = 0; i < f->flow_count; i++)
        for (uint32_t k = 0; k < f->flows[i].link_count; k++) {
            struct link *link = &f->links[f->flow_links[f->flows[i].first_link + k]];
            link->weight += f->flows[i].weight;
            link->growing++;
        }
    for (uint32_t i = 0; i < f->link_count; i++) {
        f->links[i].first_flow = next;
        next += f->links[i].growing;
        if (f->links[i].growing > 0)
            f->heap[f->heap_count++] = (struct heap_entry){full_at(&f->links[i]), i};
    }
    for (uint32_t i = f->heap_count / 2; i > 0; i--)
        sift_down(f, i - 1);
    for (uint32_t i = 0; i < f->flow_count; i++)
        for (uint32_t k = 0; k < f->flows[i].link_count; k++)
            f->flows_of[f->links[f->flow_links[f->flows[i].first_link + k]].first_flow++] = i;
    for (uint32_t i = 0; i < f->link_count; i++)
        f->links[i].first_flow -= f->links[i].growing;
}

static void fill(struct filling *f)
{
    uint32_t next = 0, full;
    double level;
    for (;;) {
        while (next < f->flow_count && f->stopped[f->order[next].flow])
            next++;
        if (next == f->flow_count)
            return;
        bool link = fullest(f, &full, &level);
        if (!link || f->order[next].level <= level) {
            uint32_t flow = f->order[next].flow;
            stop(f, flow, f->flows[flow].most);
            continue;
        }
        for (uint32_t left = f->links[full].growing, at = f->links[full].first_flow; left > 0; at++) {
            uint32_t flow = f->flows_of[at];
            if (f->stopped[flow])
                continue;
            stop(f, flow, level * f->flows[flow].weight);
            left--;
        }
    }
}

enum mu_status mu_fair_rates(const double *capacities, uint32_t link_count, const struct mu_fair_flow *flows,
                             uint32_t flow_count, const uint32_t *links, double *ret_rates)
{
    size_t crossings = 1;
    for (uint32_t i = 0; i < flow_count; i++)
        crossings += flows[i].link_count;
    struct filling f = {.flows = flows,
                        .flow_links = links,
                        .rates = ret_rates,
                        .link_count = link_count,
                        .flow_count = flow_count,
                        .links = calloc((size_t)link_count + 1, sizeof *f.links),
                        .flows_of = malloc(crossings * sizeof *f.flows_of),
                        .stopped = calloc((size_t)flow_count + 1, sizeof *f.stopped),
                        .heap = malloc(((size_t)link_count + 1) * sizeof *f.heap),
                        .order = malloc(((size_t)flow_count + 1) * sizeof *f.order)};
    enum mu_status status = f.links && f.flows_of && f.stopped && f.heap && f.order ? MU_OK : MU_ERR_NO_MEMORY;
    if (status == MU_OK) {
        for (uint32_t i = 0; i < link_count; i++)
            f.links[i].left = capacities[i];
        for (uint32_t i = 0; i < flow_count; i++)
            f.order[i] = (struct order_entry){flows[i].most / flows[i].weight, i};
        index_links(&f);
        qsort(f.order, flow_count, sizeof *f.order, compare_order);
        fill(&f);
    }
    free(f.links);
    free(f.flows_of);
    free(f.stopped);
    free(f.heap);
    free(f.order);
    return status;
}
