/* Robust statistics on what a probe has measured. */
#include "plan/probe.h"

#include <stdlib.h>
#include <string.h>

#include "common/fmath.h"

static const double RATE_LEAST = 0.8;       /* of the usual: above it nothing stands out */
static const double ROUND_TRIP_LEAST = 0.5; /* of the usual speed of a message: round trips scatter more */
static const double NORMAL_MAD = 1.4826;    /* standard deviation over median deviation, of a normal distribution */
enum { COMPARED_MIN = 3, DEVIATIONS = 3, TEXT_SIZE = 24 };

struct findings {
    struct mu_probe_finding *all;
    uint32_t count, capacity;
    bool failed;                   /* no memory */
    struct mu_probe_finding spare; /* then: never read */
};

/* ---- numbers ---- */

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double mu_probe_median(double *values, uint32_t count)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < count; i++)
        if (values[i] > 0)
            values[kept++] = values[i];
    qsort(values, kept, sizeof *values, compare_doubles);
    return kept ? values[(kept - 1) / 2] : 0;
}

/* Of few numbers the median deviation says too little: Croux, Rousseeuw, Time-efficient algorithms for two highly
 * robust estimators of scale (COMPSTAT 1992). */
static double few_factor(uint32_t count)
{
    static const double factors[] = {1.196, 1.495, 1.363, 1.206, 1.200, 1.140, 1.129, 1.107}; /* 2 to 9 */
    return count < 2 ? 1 : count < 10 ? factors[count - 2] : count / (count - 0.8);
}

/* What lies below stands out, of numbers that are logarithms; reorders them. -1e300: nothing does. */
static double bound_of(double *logs, uint32_t count, double least)
{
    if (count < COMPARED_MIN)
        return -1e300;
    qsort(logs, count, sizeof *logs, compare_doubles);
    double usual = logs[(count - 1) / 2];
    for (uint32_t i = 0; i < count; i++)
        logs[i] = logs[i] > usual ? logs[i] - usual : usual - logs[i];
    qsort(logs, count, sizeof *logs, compare_doubles);
    double spread = DEVIATIONS * NORMAL_MAD * few_factor(count) * logs[count / 2], share = -mu_fmath_log(least);
    return usual - (spread > share ? spread : share);
}

static void format_rate(double rate, const char *unit, char out[TEXT_SIZE])
{
    static const char prefixes[] = {' ', 'k', 'M', 'G', 'T', 'P'};
    int prefix = 0;
    while (rate >= 999.5 && prefix < 5) {
        rate *= 1e-3;
        prefix++;
    }
    __builtin_snprintf(out, TEXT_SIZE, "%.3g %.*s%s", rate, prefix > 0, &prefixes[prefix], unit);
}

static void format_time(double seconds, char out[TEXT_SIZE])
{
    if (seconds < 1e-3)
        __builtin_snprintf(out, TEXT_SIZE, "%.3g us", seconds * 1e6);
    else
        __builtin_snprintf(out, TEXT_SIZE, "%.3g ms", seconds * 1e3);
}

static struct mu_probe_finding *add(struct findings *found, enum mu_probe_finding_kind kind, uint32_t a, uint32_t b,
                                    double share)
{
    if (found->count == found->capacity) {
        uint32_t capacity = found->capacity ? 2 * found->capacity : 16;
        struct mu_probe_finding *all = realloc(found->all, capacity * sizeof *all);
        if (!all) {
            found->failed = true;
            return &found->spare;
        }
        found->all = all;
        found->capacity = capacity;
    }
    struct mu_probe_finding *finding = &found->all[found->count++];
    *finding = (struct mu_probe_finding){.kind = kind, .a = a, .b = b, .share = share};
    return finding;
}

/* ---- workers by themselves ---- */

static double products_of(const struct mu_probe_member *m)
{
    return m->has_alone ? mu_probe_flops(&m->alone) : 0;
}

static double memory_of(const struct mu_probe_member *m)
{
    return m->has_alone ? m->alone.memory_rate : 0;
}

static double to_host_of(const struct mu_probe_member *m)
{
    return m->has_alone ? m->alone.to_host_rate : 0;
}

static double to_device_of(const struct mu_probe_member *m)
{
    return m->has_alone ? m->alone.to_device_rate : 0;
}

static double write_of(const struct mu_probe_member *m)
{
    return m->write_rate;
}

static double read_of(const struct mu_probe_member *m)
{
    return m->read_rate;
}

static const struct quality {
    double (*of)(const struct mu_probe_member *m);
    const char *what, *unit;
} qualities[] = {
    {products_of, "products", "FLOP/s"},         {memory_of, "memory", "B/s"},
    {to_host_of, "copies from its GPU", "B/s"},  {to_device_of, "copies to its GPU", "B/s"},
    {write_of, "writing to its storage", "B/s"}, {read_of, "reading from its storage", "B/s"},
};

static bool of_backend(const struct mu_probe_member *m, const char *backend)
{
    return strcmp(m->backend, backend) == 0;
}

static void judge_quality(const struct mu_probe_result *r, const struct quality *q, const char *backend,
                          double *scratch, struct findings *found)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < r->member_count; i++)
        if (of_backend(&r->members[i], backend) && q->of(&r->members[i]) > 0)
            scratch[count++] = mu_fmath_log(q->of(&r->members[i]));
    double bound = bound_of(scratch, count, RATE_LEAST), usual = 0;
    for (uint32_t i = count = 0; i < r->member_count; i++)
        if (of_backend(&r->members[i], backend))
            scratch[count++] = q->of(&r->members[i]);
    usual = mu_probe_median(scratch, count);
    for (uint32_t i = 0; i < r->member_count; i++) {
        const struct mu_probe_member *m = &r->members[i];
        double value = of_backend(m, backend) ? q->of(m) : 0;
        if (value <= 0 || mu_fmath_log(value) >= bound)
            continue;
        char own[TEXT_SIZE], others[TEXT_SIZE];
        format_rate(value, q->unit, own);
        format_rate(usual, q->unit, others);
        struct mu_probe_finding *f = add(found, MU_PROBE_SLOW_WORKER, i, i, value / usual);
        __builtin_snprintf(f->text, sizeof f->text, "worker %s on %s: %s of %s, %.0f %% of the usual %s", m->name,
                           m->host, own, q->what, 100 * f->share, others);
    }
}

static void judge_alone(const struct mu_probe_result *r, double *scratch, struct findings *found)
{
    for (uint32_t i = 0; i < r->member_count; i++) {
        const char *backend = r->members[i].backend;
        uint32_t first = 0;
        while (!of_backend(&r->members[first], backend))
            first++;
        for (size_t q = 0; first == i && q < sizeof qualities / sizeof qualities[0]; q++)
            judge_quality(r, &qualities[q], backend, scratch, found);
    }
}

/* ---- links ---- */

/* Links inside hosts, or between them, by rate or by round trip. */
struct view {
    const struct mu_probe_result *r;
    bool inside, by_time;
    uint32_t *first, *links; /* those of member i: links[first[i]] up to links[first[i + 1]] */
    double *levels;          /* [members]: what a worker gets on its links as a whole; 0: not known */
    double *scratch;         /* as many as there are links, or members */
    double usual;            /* median of what is known of them */
};

/* first: zeros. */
static void index_links(const struct view *v)
{
    const struct mu_probe_result *r = v->r;
    for (uint32_t i = 0; i < r->link_count; i++) {
        v->first[r->links[i].a]++;
        v->first[r->links[i].b]++;
    }
    for (uint32_t i = 0, sum = 0; i <= r->member_count; i++) {
        sum += v->first[i];
        v->first[i] = sum;
    }
    for (uint32_t i = 0; i < r->link_count; i++) {
        v->links[--v->first[r->links[i].a]] = i;
        v->links[--v->first[r->links[i].b]] = i;
    }
}

/* The larger the better; 0: not one of these. */
static double good_of(const struct view *v, const struct mu_probe_link *link)
{
    bool inside = strcmp(v->r->members[link->a].host, v->r->members[link->b].host) == 0;
    const struct mu_probe_pair *p = &link->pair;
    if (link->state != MU_PROBE_LINK_GOOD || inside != v->inside)
        return 0;
    if (v->by_time)
        return p->round_trip_s > 0 ? 1 / p->round_trip_s : 0;
    return p->out_rate < p->in_rate ? p->out_rate : p->in_rate;
}

static uint32_t goods_of_member(const struct view *v, uint32_t member)
{
    uint32_t count = 0;
    for (uint32_t i = v->first[member]; i < v->first[member + 1]; i++) {
        double good = good_of(v, &v->r->links[v->links[i]]);
        if (good > 0)
            v->scratch[count++] = good;
    }
    return count;
}

static void format_good(const struct view *v, double good, char out[TEXT_SIZE])
{
    if (v->by_time)
        format_time(1 / good, out);
    else
        format_rate(good, "B/s", out);
}

/* The upper quartile, of two or more: a single one says nothing about which of its ends it is. */
static void find_levels(struct view *v)
{
    uint32_t known = 0;
    for (uint32_t i = 0; i < v->r->member_count; i++) {
        uint32_t count = goods_of_member(v, i);
        qsort(v->scratch, count, sizeof *v->scratch, compare_doubles);
        v->levels[i] = count >= 2 ? v->scratch[3 * count / 4] : 0;
    }
    for (uint32_t i = 0; i < v->r->member_count; i++)
        if (v->levels[i] > 0)
            v->scratch[known++] = v->levels[i];
    v->usual = mu_probe_median(v->scratch, known);
}

static void judge_levels(const struct view *v, struct findings *found)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < v->r->member_count; i++)
        if (v->levels[i] > 0)
            v->scratch[count++] = mu_fmath_log(v->levels[i]);
    double bound = bound_of(v->scratch, count, v->by_time ? ROUND_TRIP_LEAST : RATE_LEAST);
    for (uint32_t i = 0; i < v->r->member_count; i++) {
        if (v->levels[i] <= 0 || mu_fmath_log(v->levels[i]) >= bound)
            continue;
        const struct mu_probe_member *m = &v->r->members[i];
        char own[TEXT_SIZE], others[TEXT_SIZE];
        uint32_t links = goods_of_member(v, i);
        format_good(v, v->levels[i], own);
        format_good(v, v->usual, others);
        struct mu_probe_finding *f = add(found, MU_PROBE_SLOW_WORKER, i, i, v->levels[i] / v->usual);
        __builtin_snprintf(f->text, sizeof f->text,
                           "worker %s on %s: its %u links %s are slow as a whole: %s%s, usual is %s", m->name, m->host,
                           links, v->inside ? "inside the host" : "to other hosts", v->by_time ? "round trips of " : "",
                           own, others);
    }
}

/* What the slower of its ends gets as a whole. */
static double expected_of(const struct view *v, const struct mu_probe_link *link, double otherwise)
{
    double a = v->levels[link->a] > 0 ? v->levels[link->a] : otherwise;
    double b = v->levels[link->b] > 0 ? v->levels[link->b] : otherwise;
    return a < b ? a : b;
}

static void tell_link(const struct view *v, const struct mu_probe_link *link, double good, double expected,
                      struct findings *found)
{
    const char *a = v->r->members[link->a].name, *b = v->r->members[link->b].name;
    char out[TEXT_SIZE], in[TEXT_SIZE], usual[TEXT_SIZE];
    struct mu_probe_finding *f = add(found, MU_PROBE_SLOW_LINK, link->a, link->b, good / expected);
    format_good(v, expected, usual);
    if (v->by_time) {
        format_good(v, good, out);
        __builtin_snprintf(f->text, sizeof f->text, "link %s - %s: a round trip takes %s; both have %s elsewhere", a, b,
                           out, usual);
        return;
    }
    format_rate(link->pair.out_rate, "B/s", out);
    format_rate(link->pair.in_rate, "B/s", in);
    __builtin_snprintf(f->text, sizeof f->text,
                       "link %s - %s: %s from %s, %s from %s: %.2g %% of the %s that both get elsewhere", a, b, out, a,
                       in, b, 100 * f->share, usual);
}

static void judge_links(const struct view *v, struct findings *found)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < v->r->link_count; i++)
        if (good_of(v, &v->r->links[i]) > 0)
            v->scratch[count++] = good_of(v, &v->r->links[i]);
    double otherwise = v->usual > 0 ? v->usual : mu_probe_median(v->scratch, count);
    for (uint32_t i = count = 0; i < v->r->link_count; i++) {
        double good = good_of(v, &v->r->links[i]);
        if (good > 0)
            v->scratch[count++] = mu_fmath_log(good / expected_of(v, &v->r->links[i], otherwise));
    }
    double bound = bound_of(v->scratch, count, v->by_time ? ROUND_TRIP_LEAST : RATE_LEAST);
    for (uint32_t i = 0; i < v->r->link_count; i++) {
        const struct mu_probe_link *link = &v->r->links[i];
        double good = good_of(v, link), expected = expected_of(v, link, otherwise);
        if (good > 0 && mu_fmath_log(good / expected) < bound)
            tell_link(v, link, good, expected, found);
    }
}

/* ---- all of it ---- */

static void judge_failures(const struct mu_probe_result *r, struct findings *found)
{
    for (uint32_t i = 0; i < r->member_count; i++) {
        const struct mu_probe_member *m = &r->members[i];
        if (!m->out)
            continue;
        struct mu_probe_finding *f = add(found, MU_PROBE_OUT, i, i, 0);
        __builtin_snprintf(f->text, sizeof f->text, "worker %s on %s: left out: %s", m->name, m->host, m->text);
    }
    for (uint32_t i = 0; i < r->link_count; i++) {
        const struct mu_probe_link *link = &r->links[i];
        if (link->state != MU_PROBE_LINK_FAILED)
            continue;
        struct mu_probe_finding *f = add(found, MU_PROBE_BROKEN, link->a, link->b, 0);
        __builtin_snprintf(f->text, sizeof f->text, "link %s - %s: %s", r->members[link->a].name,
                           r->members[link->b].name, link->text);
    }
}

static int compare_findings(const void *a, const void *b)
{
    const struct mu_probe_finding *x = a, *y = b;
    if (x->share < y->share || x->share > y->share)
        return x->share < y->share ? -1 : 1;
    if (x->kind != y->kind)
        return x->kind < y->kind ? -1 : 1;
    if (x->a != y->a)
        return x->a < y->a ? -1 : 1;
    return (x->b > y->b) - (x->b < y->b);
}

enum mu_status mu_probe_judge(const struct mu_probe_result *result, struct mu_probe_finding **ret_findings,
                              uint32_t *ret_count)
{
    struct findings found = {.all = NULL};
    uint32_t most = result->link_count > result->member_count ? result->link_count : result->member_count;
    struct view view = {.r = result,
                        .first = calloc((size_t)result->member_count + 1, sizeof(uint32_t)),
                        .links = calloc(2 * (size_t)result->link_count + 1, sizeof(uint32_t)),
                        .levels = calloc((size_t)result->member_count + 1, sizeof(double)),
                        .scratch = calloc((size_t)most + 1, sizeof(double))};
    found.failed = !view.first || !view.links || !view.levels || !view.scratch;
    if (!found.failed) {
        index_links(&view);
        judge_failures(result, &found);
        judge_alone(result, view.scratch, &found);
    }
    for (int i = 0; i < 4 && !found.failed; i++) {
        view.inside = i & 1;
        view.by_time = i & 2;
        find_levels(&view);
        judge_levels(&view, &found);
        judge_links(&view, &found);
    }
    free(view.first);
    free(view.links);
    free(view.levels);
    free(view.scratch);
    if (found.failed) {
        free(found.all);
        return MU_ERR_NO_MEMORY;
    }
    if (found.count > 0)
        qsort(found.all, found.count, sizeof *found.all, compare_findings);
    *ret_findings = found.all;
    *ret_count = found.count;
    return MU_OK;
}
