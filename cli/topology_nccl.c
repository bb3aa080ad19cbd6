/* NCCL's XML of one node (NCCL_TOPO_DUMP_FILE): which GPUs, how NVLink joins them, how fast the network cards are.
 *
 *   <system><cpu ...><pci busid="..." class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
 *     <gpu dev="0" sm="90"><nvlink target="..." count="18" tclass="0x068000"/></gpu></pci>
 *   <nic><net name="mlx5_0" speed="400000"/></nic></cpu></system>
 *
 * Only these tags and attributes are looked at. A link of NVLink gives 25 GB/s each way up to H100, 50 from B200 on. */
#include <stdlib.h>
#include <string.h>

#include "cli/node_xml.h"

enum { LINKS_MAX = 4096 };
#define NVLINK_OLD   25e9
#define NVLINK_NEW   50e9
#define SM_NEW       100
#define CLASS_SWITCH "0x0680" /* PCI class of an NVSwitch, its first digits */

struct link {
    uint32_t gpu;
    char target[XML_VALUE_SIZE];
    bool to_switch;
};
struct scan {
    struct xml *x;
    struct node_parts *parts;
    char busid[XML_DEPTH_MAX][XML_VALUE_SIZE]; /* of the pci tags around */
    double pci_rate[XML_DEPTH_MAX];
    double nvlink_rate; /* of a link of the newest GPU */
    struct link links[LINKS_MAX];
    uint32_t link_count;
};

/* ---- the tags ---- */

static enum mu_status see_pci(struct scan *s, const struct xml_tag *tag)
{
    char speed[XML_VALUE_SIZE], width[XML_VALUE_SIZE];
    xml_attribute(tag, "busid", s->busid[s->x->depth]);
    xml_attribute(tag, "link_speed", speed);
    xml_attribute(tag, "link_width", width);
    double rate = strtod(speed, NULL) * strtod(width, NULL) / 8 * 1e9 * NODE_PCIE_SHARE;
    s->pci_rate[s->x->depth] = rate > 0 && rate < 1e15 ? rate : 0;
    return MU_OK;
}

static enum mu_status see_gpu(struct scan *s, const struct xml_tag *tag)
{
    double sm;
    struct node_gpu *gpu;
    uint32_t depth = s->x->depth;
    enum mu_status status = xml_number(s->x, tag, "sm", 1, &sm);
    if (status == MU_OK)
        status = node_add_gpu(s->parts, s->x, depth > 0 ? s->busid[depth - 1] : "", &gpu);
    if (status != MU_OK)
        return status;
    gpu->host_bytes_per_second = depth > 0 ? s->pci_rate[depth - 1] : 0;
    s->nvlink_rate = sm >= SM_NEW ? NVLINK_NEW : NVLINK_OLD;
    return MU_OK;
}

static enum mu_status see_nvlink(struct scan *s, const struct xml_tag *tag)
{
    char class[XML_VALUE_SIZE];
    double count;
    enum mu_status status = xml_number(s->x, tag, "count", 1, &count);
    if (status != MU_OK)
        return status;
    if (s->x->depth == 0 || strcmp(s->x->open[s->x->depth - 1], "gpu") != 0)
        return xml_bad(s->x, "nvlink outside of a gpu", "");
    if (s->link_count == LINKS_MAX)
        return mu_fail(s->x->err, MU_ERR_LIMIT, "%u: more than %d NVLinks are not allowed", s->x->line, LINKS_MAX);
    struct link *link = &s->links[s->link_count++];
    link->gpu = s->parts->gpu_count - 1;
    xml_attribute(tag, "target", link->target);
    xml_attribute(tag, "tclass", class);
    link->to_switch = strncmp(class, CLASS_SWITCH, strlen(CLASS_SWITCH)) == 0;
    s->parts->gpus[link->gpu].link_bytes_per_second += count * s->nvlink_rate;
    return MU_OK;
}

static enum mu_status see_net(struct scan *s, const struct xml_tag *tag)
{
    double megabits;
    enum mu_status status = xml_number(s->x, tag, "speed", 1, &megabits);
    if (status == MU_OK) {
        s->parts->nic_bytes_per_second += megabits * 1e6 / 8;
        s->parts->cards++;
    }
    return status;
}

static enum mu_status see(void *ctx, const struct xml_tag *tag)
{
    static const struct {
        const char *name;
        enum mu_status (*see)(struct scan *s, const struct xml_tag *tag);
    } known[] = {{"pci", see_pci}, {"gpu", see_gpu}, {"nvlink", see_nvlink}, {"net", see_net}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (strcmp(tag->name, known[i].name) == 0)
            return known[i].see(ctx, tag);
    return MU_OK;
}

/* GPUs on NVSwitches are all joined; the others with the GPU whose bus id their link names. */
static void join_islands(struct scan *s)
{
    const struct link *first = NULL;
    for (uint32_t i = 0; i < s->link_count; i++) {
        const struct link *link = &s->links[i];
        if (link->to_switch) {
            first = first ? first : link;
            node_join(s->parts, link->gpu, first->gpu);
            continue;
        }
        for (uint32_t k = 0; k < s->parts->gpu_count; k++)
            if (link->target[0] && strcmp(s->parts->gpus[k].busid, link->target) == 0)
                node_join(s->parts, link->gpu, k);
    }
}

enum mu_status node_read_nccl(struct xml *x, struct node_parts *parts)
{
    struct scan *s = calloc(1, sizeof *s);
    if (!s)
        return mu_fail(x->err, MU_ERR_NO_MEMORY, "0: out of memory");
    s->x = x;
    s->parts = parts;
    enum mu_status status = xml_walk(x, "system", see, s);
    if (status == MU_OK && parts->gpu_count == 0)
        status = xml_bad(x, "no <gpu> in a <system>", "");
    if (status == MU_OK)
        join_islands(s);
    free(s);
    return status;
}
