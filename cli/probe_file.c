/* What a probe of attached workers has found, as a cluster file. Of several backends the one with most workers stands
 * for all, since the file has one device type. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/probe_attached.h"

struct writer {
    char *text;
    size_t used;
};

static void MU_PRINTF(2, 3) put(struct writer *w, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    int length = vsnprintf(w->text + w->used, MU_PROBE_FILE_SIZE - w->used, fmt, args);
    va_end(args);
    if (length > 0 && w->used + (size_t)length < MU_PROBE_FILE_SIZE)
        w->used += (size_t)length;
}

/* The measured workers that stand for all. */
struct survey {
    const struct mu_probe_result *result;
    const char *backend;
    uint32_t workers, others, hosts, per_host; /* others: of other backends; per_host: at most */
    double *scratch;
};

static bool counts(const struct survey *s, const struct mu_probe_member *m)
{
    return m->has_alone && strcmp(m->backend, s->backend) == 0;
}

static void count_all(struct survey *s)
{
    const struct mu_probe_member *members = s->result->members;
    uint32_t here = 0, most = 0;
    for (uint32_t i = 0; i < s->result->member_count; i++) {
        uint32_t count = 0;
        for (uint32_t k = 0; k < s->result->member_count; k++)
            count += members[k].has_alone && strcmp(members[k].backend, members[i].backend) == 0;
        if (members[i].has_alone && count > most) {
            most = count;
            s->backend = members[i].backend;
        }
    }
    for (uint32_t i = 0; i < s->result->member_count && most > 0; i++) {
        if (i == 0 || strcmp(members[i].host, members[i - 1].host) != 0)
            here = 0;
        s->others += members[i].has_alone && !counts(s, &members[i]);
        if (!counts(s, &members[i]))
            continue;
        s->workers++;
        s->hosts += here == 0;
        here++;
        s->per_host = here > s->per_host ? here : s->per_host;
    }
}

static double median_of(const struct survey *s, double (*of)(const struct mu_probe_alone *alone))
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < s->result->member_count; i++)
        if (counts(s, &s->result->members[i]))
            s->scratch[count++] = of(&s->result->members[i].alone);
    return mu_probe_median(s->scratch, count);
}

enum which { INSIDE = 1, BETWEEN = 2, ANY = 3 };

/* Of links inside hosts, between hosts, or all: rate, or (by_time) round trip. 0: there is none. */
static double median_link(const struct survey *s, enum which which, bool by_time)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < s->result->link_count; i++) {
        const struct mu_probe_link *link = &s->result->links[i];
        const struct mu_probe_member *a = &s->result->members[link->a], *b = &s->result->members[link->b];
        const struct mu_probe_pair *p = &link->pair;
        enum which is = strcmp(a->host, b->host) == 0 ? INSIDE : BETWEEN;
        if (link->state == MU_PROBE_LINK_GOOD && which & is)
            s->scratch[count++] = by_time ? p->round_trip_s : p->out_rate < p->in_rate ? p->out_rate : p->in_rate;
    }
    return mu_probe_median(s->scratch, count);
}

static double memory_bytes_of(const struct mu_probe_alone *a)
{
    return a->memory_bytes;
}

static double memory_rate_of(const struct mu_probe_alone *a)
{
    return a->memory_rate;
}

static double to_host_of(const struct mu_probe_alone *a)
{
    return a->to_host_rate;
}

static double product_rate_of(const struct mu_probe_alone *a)
{
    return a->rates.flops;
}

static double flat_rate_of(const struct mu_probe_alone *a)
{
    return a->rates.memory_bytes_per_second;
}

static double rows_rate_of(const struct mu_probe_alone *a)
{
    return a->rates.rows_bytes_per_second;
}

static double fixed_of(const struct mu_probe_alone *a)
{
    return a->rates.fixed_s;
}

static double slice_cost_of(const struct mu_probe_alone *a)
{
    return a->rates.slice_cost;
}

static double apart_of(const struct mu_probe_alone *a)
{
    return a->rates_apart;
}

static void put_device(const struct survey *s, struct writer *w)
{
    bool is_cpu = strcmp(s->backend, "cpu") == 0;
    double flops = median_of(s, mu_probe_flops), memory_rate = median_of(s, memory_rate_of);
    double inside = median_link(s, INSIDE, false), between = median_link(s, BETWEEN, false);
    double to_host = median_of(s, to_host_of), link = inside > 0 ? inside : between;
    double nic = between > 0 ? between : link;
    if (!is_cpu)
        put(w,
            "# flops_bf16 is what products in fp32 get, and links are those of sockets: for bf16 and NVLink take the "
            "data sheet's.\n");
    put(w, "device: {per_node: %u, flops_bf16: %.3e, flops_fp32: %.3e, memory: %.3e, memory_rate: %.3e, ", s->per_host,
        flops, flops, median_of(s, memory_bytes_of), memory_rate);
    if (link > 0)
        put(w, "link_rate: %.3e, nic_rate: %.3e, ", link, nic);
    put(w, "host_rate: %.3e}\nnodes: %u\n", to_host > 0 ? to_host : memory_rate / 2, s->hosts);
    if (!(link > 0))
        put(w, "# One worker: nothing is known of links. Give device.link_rate and device.nic_rate.\n");
}

static void put_storage(const struct survey *s, struct writer *w)
{
    double write_rate = 0, read_rate = 0;
    for (uint32_t i = 0; i < s->result->member_count; i++) {
        write_rate += s->result->members[i].write_rate;
        read_rate += s->result->members[i].read_rate;
    }
    if (write_rate > 0 && read_rate > 0)
        put(w, "storage: {write_rate: %.3e, read_rate: %.3e}\n", write_rate, read_rate);
}

static void put_worker(const struct survey *s, struct writer *w)
{
    struct mu_cost_rates r;
    double flops = median_of(s, product_rate_of), link = median_link(s, ANY, false);
    if (!(flops > 0))
        return;
    mu_cost_rates_init(&r); /* of links, where there is one worker */
    double latency_s = link > 0 ? median_link(s, ANY, true) / 2 : r.latency_s;
    put(w,
        "worker: {flops: %.4g, memory_rate: %.4g, rows_rate: %.4g, link_rate: %.4g, latency_s: %.4g, fixed_s: %.4g, "
        "slice_cost: %.4g}\n",
        flops, median_of(s, flat_rate_of), median_of(s, rows_rate_of), link > 0 ? link : r.link_bytes_per_second,
        latency_s, median_of(s, fixed_of), median_of(s, slice_cost_of));
    put(w, "# worker: for musterd --rates; %.1f %% off for the micro-batches it was taken from\n",
        100 * median_of(s, apart_of));
}

char *mu_probe_cluster_file(const struct mu_probe_result *result, struct mu_error *err)
{
    struct survey s = {.result = result, .backend = ""};
    uint32_t most = result->member_count > result->link_count ? result->member_count : result->link_count;
    struct writer w = {.text = malloc(MU_PROBE_FILE_SIZE)};
    s.scratch = calloc((size_t)most + 1, sizeof *s.scratch);
    count_all(&s);
    if (!w.text || !s.scratch || s.workers == 0) {
        if (!w.text || !s.scratch)
            mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the cluster file");
        else
            mu_fail(err, MU_ERR_NOT_FOUND, "no worker was measured: there is nothing to write");
        free(w.text);
        w.text = NULL;
    } else {
        put(&w,
            "# Measured by muster probe: %u worker%s (%s) on %u host%s, medians; storage is that of all together. For "
            "muster plan.\n",
            s.workers, s.workers == 1 ? "" : "s", s.backend, s.hosts, s.hosts == 1 ? "" : "s");
        if (s.others > 0)
            put(&w, "# %u workers of another kind are not in it.\n", s.others);
        put_device(&s, &w);
        put_storage(&s, &w);
        put_worker(&s, &w);
    }
    free(s.scratch);
    return w.text;
}
