/* NCCL's XML of one node (NCCL_TOPO_DUMP_FILE): which GPUs, how NVLink joins them, how fast the network cards are.
 *
 *   <system><cpu ...><pci busid="..." class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
 *     <gpu dev="0" sm="90"><nvlink target="..." count="18" tclass="0x068000"/></gpu></pci>
 *   <nic><net name="mlx5_0" speed="400000"/></nic></cpu></system>
 *
 * Only these tags and attributes are looked at. A link of NVLink gives 25 GB/s each way up to H100, 50 from B200 on;
 * PCIe about 80 % of its signalling rate. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/topology_file.h"

enum { DEPTH_MAX = 32, GPUS_MAX = MU_NODE_DEVICES_MAX, LINKS_MAX = 4096, VALUE_SIZE = 64 };
#define PCIE_SHARE   0.8
#define NVLINK_OLD   25e9
#define NVLINK_NEW   50e9
#define SM_NEW       100
#define CLASS_SWITCH "0x0680" /* PCI class of an NVSwitch, its first digits */

struct gpu {
    char busid[VALUE_SIZE];
    uint32_t sm, island;
    double links, host_rate;
};
struct link {
    uint32_t gpu;
    char target[VALUE_SIZE];
    bool to_switch;
};
struct scan {
    const char *at, *end;
    uint32_t line;
    struct mu_error *err;
    uint32_t depth;
    char open[DEPTH_MAX][VALUE_SIZE]; /* names of the tags around */
    char busid[DEPTH_MAX][VALUE_SIZE];
    double pci_rate[DEPTH_MAX]; /* of the pci tags around */
    struct gpu gpus[GPUS_MAX];
    struct link links[LINKS_MAX];
    uint32_t gpu_count, link_count;
    double nic_rate;
};

static enum mu_status bad(const struct scan *s, const char *what, const char *value)
{
    return mu_fail(s->err, MU_ERR_INVALID, "%u: %s%.60s", s->line, what, value);
}

/* ---- XML ---- */

struct tag {
    char name[VALUE_SIZE];
    const char *attributes, *attributes_end;
    bool closing, empty;
};

static void skip_to(struct scan *s, const char *at)
{
    for (; s->at < at; s->at++)
        s->line += *s->at == '\n';
}

/* The next tag; *ret_found false at the end of the text. Comments and declarations are skipped. */
static enum mu_status next_tag(struct scan *s, struct tag *tag, bool *ret_found)
{
    for (;;) {
        const char *open = memchr(s->at, '<', (size_t)(s->end - s->at));
        *ret_found = open != NULL;
        if (!open)
            return MU_OK;
        skip_to(s, open);
        bool comment = strncmp(open, "<!--", 4) == 0;
        const char *close = comment ? strstr(open, "-->") : strchr(open, '>');
        if (!close)
            return bad(s, "not XML: a tag or comment does not end", "");
        if (open[1] == '!' || open[1] == '?') {
            skip_to(s, close + (comment ? 3 : 1));
            continue;
        }
        tag->closing = open[1] == '/';
        const char *name = open + 1 + tag->closing;
        size_t length = strcspn(name, " \t\r\n/>");
        if (length == 0 || length >= sizeof tag->name)
            return bad(s, "not XML: a tag without a name, or with a very long one", "");
        memcpy(tag->name, name, length);
        tag->name[length] = 0;
        tag->empty = close[-1] == '/';
        tag->attributes = name + length;
        tag->attributes_end = close;
        skip_to(s, close + 1);
        return MU_OK;
    }
}

/* The value of an attribute, "" when it is not there. */
static void attribute(const struct tag *tag, const char *name, char out[VALUE_SIZE])
{
    size_t length = strlen(name);
    out[0] = 0;
    for (const char *at = tag->attributes; at + length + 2 < tag->attributes_end; at++) {
        if (!strchr(" \t\r\n", *at) || strncmp(at + 1, name, length) != 0 || strncmp(at + 1 + length, "=\"", 2) != 0)
            continue;
        const char *begin = at + length + 3;
        size_t size = strcspn(begin, "\"");
        size = size < VALUE_SIZE ? size : VALUE_SIZE - 1;
        memcpy(out, begin, size);
        out[size] = 0;
        return;
    }
}

/* A number from `least` up; text behind it ("16.0 GT/s PCIe") does not matter. */
static enum mu_status number(const struct scan *s, const struct tag *tag, const char *name, double least,
                             double *ret_value)
{
    char text[VALUE_SIZE], *end, what[2 * VALUE_SIZE];
    attribute(tag, name, text);
    double value = strtod(text, &end);
    if (end == text || !(value >= least && value <= 1e9)) {
        snprintf(what, sizeof what, "%s: %s of the value ", tag->name, name);
        return bad(s, what, text[0] ? text : "(missing)");
    }
    *ret_value = value;
    return MU_OK;
}

/* ---- the tags ---- */

static enum mu_status see_pci(struct scan *s, const struct tag *tag)
{
    char speed[VALUE_SIZE], width[VALUE_SIZE];
    attribute(tag, "busid", s->busid[s->depth]);
    attribute(tag, "link_speed", speed);
    attribute(tag, "link_width", width);
    double rate = strtod(speed, NULL) * strtod(width, NULL) / 8 * 1e9 * PCIE_SHARE;
    s->pci_rate[s->depth] = rate > 0 && rate < 1e15 ? rate : 0;
    return MU_OK;
}

static enum mu_status see_gpu(struct scan *s, const struct tag *tag)
{
    double sm;
    enum mu_status status = number(s, tag, "sm", 1, &sm);
    if (status != MU_OK)
        return status;
    if (s->gpu_count == GPUS_MAX)
        return mu_fail(s->err, MU_ERR_LIMIT, "%u: more than %d GPUs are not allowed", s->line, GPUS_MAX);
    struct gpu *gpu = &s->gpus[s->gpu_count];
    *gpu = (struct gpu){.sm = (uint32_t)sm, .island = s->gpu_count};
    s->gpu_count++;
    if (s->depth > 0) {
        memcpy(gpu->busid, s->busid[s->depth - 1], sizeof gpu->busid);
        gpu->host_rate = s->pci_rate[s->depth - 1];
    }
    for (uint32_t i = 0; i + 1 < s->gpu_count; i++)
        if (gpu->busid[0] && strcmp(s->gpus[i].busid, gpu->busid) == 0)
            return bad(s, "two GPUs have the busid ", gpu->busid);
    return MU_OK;
}

static enum mu_status see_nvlink(struct scan *s, const struct tag *tag)
{
    char class[VALUE_SIZE];
    double count;
    enum mu_status status = number(s, tag, "count", 1, &count);
    if (status != MU_OK)
        return status;
    if (s->depth == 0 || strcmp(s->open[s->depth - 1], "gpu") != 0)
        return bad(s, "nvlink outside of a gpu", "");
    if (s->link_count == LINKS_MAX)
        return mu_fail(s->err, MU_ERR_LIMIT, "%u: more than %d NVLinks are not allowed", s->line, LINKS_MAX);
    struct link *link = &s->links[s->link_count++];
    link->gpu = s->gpu_count - 1;
    attribute(tag, "target", link->target);
    attribute(tag, "tclass", class);
    link->to_switch = strncmp(class, CLASS_SWITCH, strlen(CLASS_SWITCH)) == 0;
    s->gpus[link->gpu].links += count;
    return MU_OK;
}

static enum mu_status see_net(struct scan *s, const struct tag *tag)
{
    double megabits;
    enum mu_status status = number(s, tag, "speed", 1, &megabits);
    if (status == MU_OK)
        s->nic_rate += megabits * 1e6 / 8;
    return status;
}

static enum mu_status see(struct scan *s, const struct tag *tag)
{
    static const struct {
        const char *name;
        enum mu_status (*see)(struct scan *s, const struct tag *tag);
    } known[] = {{"pci", see_pci}, {"gpu", see_gpu}, {"nvlink", see_nvlink}, {"net", see_net}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (strcmp(tag->name, known[i].name) == 0)
            return known[i].see(s, tag);
    return MU_OK;
}

static enum mu_status take(struct scan *s, const struct tag *tag)
{
    if (tag->closing) {
        if (s->depth == 0 || strcmp(s->open[s->depth - 1], tag->name) != 0)
            return bad(s, "not XML: nothing is open that this closes: ", tag->name);
        s->depth--;
        return MU_OK;
    }
    if (s->depth == DEPTH_MAX)
        return mu_fail(s->err, MU_ERR_LIMIT, "%u: more than %d tags inside each other", s->line, DEPTH_MAX);
    if (s->depth == 0 && strcmp(tag->name, "system") != 0)
        return bad(s, "<system> is expected, not ", tag->name);
    memcpy(s->open[s->depth], tag->name, sizeof tag->name);
    enum mu_status status = see(s, tag);
    s->depth += !tag->empty;
    return status;
}

/* ---- the node ---- */

static void merge(struct scan *s, uint32_t from, uint32_t to)
{
    for (uint32_t i = 0; i < s->gpu_count; i++)
        if (s->gpus[i].island == from)
            s->gpus[i].island = to;
}

/* GPUs on NVSwitches are all joined; the others with the GPU whose bus id their link names. */
static void join_islands(struct scan *s)
{
    const struct link *first = NULL;
    for (uint32_t i = 0; i < s->link_count; i++) {
        const struct link *link = &s->links[i];
        if (link->to_switch) {
            first = first ? first : link;
            merge(s, s->gpus[link->gpu].island, s->gpus[first->gpu].island);
            continue;
        }
        for (uint32_t k = 0; k < s->gpu_count; k++)
            if (link->target[0] && strcmp(s->gpus[k].busid, link->target) == 0)
                merge(s, s->gpus[link->gpu].island, s->gpus[k].island);
    }
}

static struct mu_node_file summed_up(struct scan *s)
{
    struct mu_node_file node = {.devices = s->gpu_count, .nic_bytes_per_second = s->nic_rate / s->gpu_count};
    bool seen[GPUS_MAX] = {false};
    join_islands(s);
    for (uint32_t i = 0; i < s->gpu_count; i++) {
        const struct gpu *gpu = &s->gpus[i];
        double link = gpu->links * (gpu->sm >= SM_NEW ? NVLINK_NEW : NVLINK_OLD);
        node.islands += !seen[gpu->island];
        seen[gpu->island] = true;
        link = link > 0 ? link : gpu->host_rate; /* without NVLink over PCIe */
        if (i == 0 || link < node.link_bytes_per_second)
            node.link_bytes_per_second = link;
        if (i == 0 || gpu->host_rate < node.host_bytes_per_second)
            node.host_bytes_per_second = gpu->host_rate;
    }
    return node;
}

static enum mu_status scan_all(struct scan *s, struct mu_node_file *ret_node)
{
    struct tag tag;
    bool found;
    enum mu_status status;
    while ((status = next_tag(s, &tag, &found)) == MU_OK && found)
        if ((status = take(s, &tag)) != MU_OK)
            return status;
    if (status != MU_OK)
        return status;
    if (s->depth > 0)
        return bad(s, "not XML: this is not closed: ", s->open[s->depth - 1]);
    if (s->gpu_count == 0)
        return bad(s, "no <gpu> in a <system>", "");
    *ret_node = summed_up(s);
    return MU_OK;
}

enum mu_status mu_node_file_parse(const char *name, const char *text, size_t size_bytes, struct mu_node_file *ret_node,
                                  struct mu_error *err)
{
    struct mu_error own;
    err = err ? err : &own;
    struct scan *s = calloc(1, sizeof *s);
    char *copy = malloc(size_bytes + 1); /* ends with a 0 */
    enum mu_status status = s && copy ? MU_OK : mu_fail(err, MU_ERR_NO_MEMORY, "0: out of memory");
    if (status == MU_OK) {
        memcpy(copy, text, size_bytes);
        copy[size_bytes] = 0;
        s->at = copy;
        s->end = copy + size_bytes;
        s->line = 1;
        s->err = err;
        status = memchr(copy, 0, size_bytes) ? bad(s, "zero bytes are not allowed", "") : scan_all(s, ret_node);
    }
    free(copy);
    free(s);
    return status == MU_OK ? MU_OK : topology_located(name, err);
}
