/* hwloc's XML of one node (`lstopo node.xml`, versions 2 and 3): which GPUs, how NVLink joins them, which network
 * cards.
 *
 *   <topology version="2.0"><object type="Machine" ...>
 *     <object type="PCIDev" gp_index="5" pci_busid="0000:34:00.0" pci_type="0302 [10de:2330] ..."
 * pci_link_speed="63.0"> <object type="OSDev" gp_index="9" name="nvml0" osdev_type="1"/></object> <object type="PCIDev"
 * ...><object type="OSDev" name="mlx5_0" osdev_type="3"/></object></object> <distances2 type="OSDev" nbobjs="2"
 * name="NVLinkBandwidth" indexing="gp"> <indexes length="4">9 10 </indexes><u64values length="...">1000000 450000
 * 450000 1000000 </u64values></distances2>
 *   </topology>
 *
 * A GPU is a display or 3D controller of NVIDIA's or AMD's; a card for the job's network is one with an OpenFabrics
 * device, whose rate hwloc does not know. The matrix, in MB/s, is there where lstopo was built with NVML; where objects
 * are of several types (NVSwitches), their indexes read "OSDev:9", and the tag is distances2hetero. The speed of a PCIe
 * link is in GB/s, as the link stood just then: one that saves power says less than it can. */
#include <stdlib.h>
#include <string.h>

#include "cli/node_xml.h"

enum {
    THINGS_MAX = 4096, /* PCI and OS devices */
    ENDS_MAX = 1024,   /* rows of a matrix */
    OPENFABRICS_2 = 3, /* osdev_type of version 2; of version 3 it is a set of bits: */
    OPENFABRICS_3 = 1 << 5,
};
#define NONE           UINT32_MAX
#define PCIE_SIGNALLED (130.0 / 128) /* over the rate that hwloc says */
#define LINK_MOST      1e9           /* MB/s */

/* A PCI device, or an OS device on it. */
struct thing {
    uint64_t index; /* gp_index */
    uint32_t gpu;   /* NONE: it is none */
    bool is_switch;
};
struct scan {
    struct xml *x;
    struct node_parts *parts;
    bool bits; /* version 3 */
    struct thing things[THINGS_MAX];
    uint32_t thing_count;
    uint32_t device[XML_DEPTH_MAX]; /* the PCI device (its thing) that is open at each depth, or NONE */
    bool has_card[THINGS_MAX];      /* counted already */
    /* the matrix of NVLinks being read */
    bool in_matrix;
    uint32_t ends[ENDS_MAX], end_count; /* things, or NONE */
    uint64_t value_count;
    uint32_t on_switch; /* the first GPU that is on one, or NONE */
};

/* ---- objects ---- */

static enum mu_status add_thing(struct scan *s, const struct xml_tag *tag, struct thing **ret_thing)
{
    char index[XML_VALUE_SIZE];
    if (s->thing_count == THINGS_MAX)
        return mu_fail(s->x->err, MU_ERR_LIMIT, "%u: more than %d devices are not allowed", s->x->line, THINGS_MAX);
    xml_attribute(tag, "gp_index", index);
    *ret_thing = &s->things[s->thing_count++];
    **ret_thing = (struct thing){.index = strtoull(index, NULL, 10), .gpu = NONE};
    return MU_OK;
}

/* "0302 [10de:1db8] ...": class, vendor. */
static bool is_gpu(const char *type)
{
    bool display = strncmp(type, "0300", 4) == 0 || strncmp(type, "0302", 4) == 0 || strncmp(type, "0380", 4) == 0;
    return (display && strncmp(type + 4, " [10de:", 7) == 0) ||
           ((display || strncmp(type, "1200", 4) == 0) && strncmp(type + 4, " [1002:", 7) == 0);
}

static enum mu_status see_pci(struct scan *s, const struct xml_tag *tag)
{
    char type[XML_VALUE_SIZE], busid[XML_VALUE_SIZE], speed[XML_VALUE_SIZE], subtype[XML_VALUE_SIZE];
    struct thing *thing;
    struct node_gpu *gpu;
    enum mu_status status = add_thing(s, tag, &thing);
    if (status != MU_OK)
        return status;
    s->device[s->x->depth] = s->thing_count - 1;
    xml_attribute(tag, "pci_type", type);
    xml_attribute(tag, "pci_busid", busid);
    xml_attribute(tag, "pci_link_speed", speed);
    xml_attribute(tag, "subtype", subtype);
    thing->is_switch = strcmp(subtype, "NVSwitch") == 0;
    if (!is_gpu(type))
        return MU_OK;
    thing->gpu = s->parts->gpu_count;
    status = node_add_gpu(s->parts, s->x, busid, &gpu);
    double rate = strtod(speed, NULL) * 1e9 * PCIE_SIGNALLED * NODE_PCIE_SHARE;
    if (status == MU_OK)
        gpu->host_bytes_per_second = rate > 0 && rate < 1e15 ? rate : 0;
    return status;
}

static enum mu_status see_os(struct scan *s, const struct xml_tag *tag)
{
    char type[XML_VALUE_SIZE];
    struct thing *thing;
    enum mu_status status = add_thing(s, tag, &thing);
    uint32_t device = s->x->depth > 0 ? s->device[s->x->depth - 1] : NONE;
    if (status != MU_OK || device == NONE)
        return status;
    xml_attribute(tag, "osdev_type", type);
    unsigned long kind = strtoul(type, NULL, 10);
    thing->gpu = s->things[device].gpu;
    if ((s->bits ? (kind & OPENFABRICS_3) != 0 : kind == OPENFABRICS_2) && !s->has_card[device]) {
        s->has_card[device] = true;
        s->parts->cards++;
    }
    return MU_OK;
}

static enum mu_status see_object(struct scan *s, const struct xml_tag *tag)
{
    char type[XML_VALUE_SIZE];
    s->device[s->x->depth] = NONE;
    xml_attribute(tag, "type", type);
    return strcmp(type, "PCIDev") == 0 ? see_pci(s, tag) : strcmp(type, "OSDev") == 0 ? see_os(s, tag) : MU_OK;
}

/* ---- the matrix ---- */

static uint32_t find_thing(const struct scan *s, uint64_t index)
{
    for (uint32_t i = 0; i < s->thing_count; i++)
        if (s->things[i].index == index)
            return i;
    return NONE;
}

/* "9 10 " or "OSDev:9 PCIDev:449 ". */
static enum mu_status see_ends(struct scan *s, const struct xml_tag *tag)
{
    for (const char *at = tag->text; at < tag->text_end;) {
        size_t length = strcspn(at, " \t\r\n<");
        const char *digits = at;
        for (size_t i = 0; i < length; i++)
            digits = at[i] == ':' ? at + i + 1 : digits;
        if (length > 0 && s->end_count == ENDS_MAX)
            return mu_fail(s->x->err, MU_ERR_LIMIT, "%u: more than %d ends of NVLinks are not allowed", s->x->line,
                           ENDS_MAX);
        if (length > 0)
            s->ends[s->end_count++] = find_thing(s, strtoull(digits, NULL, 10));
        at += length + 1;
    }
    return MU_OK;
}

/* `from` sends so much to `to`. */
static void link_ends(struct scan *s, uint32_t from, uint32_t to, double megabytes)
{
    if (from == NONE || to == NONE || s->things[from].gpu == NONE || from == to)
        return;
    uint32_t gpu = s->things[from].gpu, other = s->things[to].gpu;
    if (s->things[to].is_switch) { /* all of these are joined */
        s->on_switch = s->on_switch == NONE ? gpu : s->on_switch;
        node_join(s->parts, gpu, s->on_switch);
    } else if (other != NONE && other != gpu) {
        node_join(s->parts, gpu, other);
    } else {
        return; /* to a processor: no way to its neighbours */
    }
    s->parts->gpus[gpu].link_bytes_per_second += megabytes * 1e6;
}

static enum mu_status see_values(struct scan *s, const struct xml_tag *tag)
{
    for (const char *at = tag->text; at < tag->text_end;) {
        char *end;
        double value = strtod(at, &end);
        if (end == at || end > tag->text_end) {
            at++;
            continue;
        }
        if (!(value >= 0 && value <= LINK_MOST))
            return mu_fail(s->x->err, MU_ERR_INVALID, "%u: NVLinkBandwidth: the value %g is not allowed: 0 to %g MB/s",
                           s->x->line, value, LINK_MOST);
        uint64_t place = s->value_count++;
        if (place >= (uint64_t)s->end_count * s->end_count)
            return xml_bad(s->x, "NVLinkBandwidth: more values than pairs of its ends", "");
        if (value > 0)
            link_ends(s, s->ends[place / s->end_count], s->ends[place % s->end_count], value);
        at = end;
    }
    return MU_OK;
}

static enum mu_status see(void *ctx, const struct xml_tag *tag)
{
    struct scan *s = ctx;
    char name[XML_VALUE_SIZE];
    if (strcmp(tag->name, "topology") == 0) {
        xml_attribute(tag, "version", name);
        s->bits = strtod(name, NULL) >= 3;
        if (s->x->depth == 0 && !(strtod(name, NULL) >= 2))
            return xml_bad(s->x, "topology: this version of the format is not read: ", name[0] ? name : "(none)");
    } else if (strcmp(tag->name, "object") == 0) {
        return see_object(s, tag);
    } else if (strncmp(tag->name, "distances2", 10) == 0) {
        xml_attribute(tag, "name", name);
        s->in_matrix = strcmp(name, "NVLinkBandwidth") == 0;
        s->end_count = 0;
        s->value_count = 0;
    } else if (s->in_matrix && strcmp(tag->name, "indexes") == 0) {
        return see_ends(s, tag);
    } else if (s->in_matrix && strcmp(tag->name, "u64values") == 0) {
        return see_values(s, tag);
    }
    return MU_OK;
}

enum mu_status node_read_hwloc(struct xml *x, struct node_parts *parts)
{
    struct scan *s = calloc(1, sizeof *s);
    if (!s)
        return mu_fail(x->err, MU_ERR_NO_MEMORY, "0: out of memory");
    s->x = x;
    s->parts = parts;
    s->on_switch = NONE;
    enum mu_status status = xml_walk(x, "topology", see, s);
    if (status == MU_OK && parts->gpu_count == 0)
        status =
            xml_bad(x, "no GPU of NVIDIA's or AMD's among the PCI devices; lstopo shows them with its I/O objects", "");
    free(s);
    return status;
}
