#include "plan/cluster.h"

#include <stddef.h>
#include <string.h>

/* Data sheets, dense rates: NVIDIA A100 80GB SXM (DS-10031: 312 TFLOP/s bf16, 19.5 fp32, 2,039 GB/s, NVLink 600 GB/s
 * both ways), H100 SXM (989.4, 67, 3,350 GB/s, 900 GB/s), H200 SXM (the same with 141 GB at 4,800 GB/s), B200 of HGX
 * (2,250, 80, 180 GB at 8,000 GB/s, 1,800 GB/s). Network: one 200 Gb/s card for each A100 (DGX A100), 400 Gb/s for the
 * others (DGX H100, B200). PCIe 4.0 and 5.0 x16: about 25 and 50 GB/s in practice.
 * NVLink domains of a rack, of whose figures each of the 72 GPUs has a part: GB200 NVL72 (180 PFLOP/s bf16 without
 * sparsity, 5,760 TFLOP/s fp32, 13.4 TB at 576 TB/s, NVLink 130 TB/s both ways; a 400 Gb/s ConnectX-7 for each GPU) and
 * GB300 NVL72 (the same rates with 20 TB; an 800 Gb/s ConnectX-8 each). NVLink-C2C to Grace: 900 GB/s both ways for two
 * GPUs. Their "node" is the domain of 18 trays. */
static const struct mu_device_type types[] = {
    {"a100-80g", 312e12, 19.5e12, 80e9, 2.039e12, 300e9, 25e9, 25e9, 8, 1},
    {"h100-sxm", 989.4e12, 67e12, 80e9, 3.35e12, 450e9, 50e9, 50e9, 8, 1},
    {"h200-sxm", 989.4e12, 67e12, 141e9, 4.8e12, 450e9, 50e9, 50e9, 8, 1},
    {"b200-sxm", 2250e12, 80e12, 180e9, 8e12, 900e9, 50e9, 50e9, 8, 1},
    {"gb200-nvl72", 2500e12, 80e12, 186e9, 8e12, 900e9, 50e9, 225e9, 72, 1},
    {"gb300-nvl72", 2500e12, 80e12, 279e9, 8e12, 900e9, 100e9, 225e9, 72, 1},
};

const struct mu_device_type *mu_device_type_named(const char *name)
{
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
        if (strcmp(types[i].name, name) == 0)
            return &types[i];
    return NULL;
}

const char *mu_device_type_names(void)
{
    return "a100-80g, h100-sxm, h200-sxm, b200-sxm, gb200-nvl72, gb300-nvl72";
}

/* Rates: InfiniBand 4x HDR, NDR and XDR 200, 400 and 800 Gb/s (IBTA's roadmap), Ethernet as it is named, all after
 * encoding. Payload, from the packet formats at messages of the largest MTU, 4096 bytes: InfiniBand adds 26 bytes (LRH
 * 8, BTH 12, ICRC 4, VCRC 2: InfiniBand Architecture Specification, volume 1, chapter 5), RoCEv2 82 (preamble and gap
 * 20, Ethernet 18, IPv4 20, UDP 8, BTH 12, ICRC 4: its annex A17). Switches: 130 ns (Quantum, QM8700's data sheet; none
 * is published that says more of NDR and XDR, for which the same is taken), 300 ns (Spectrum-2, Linley Newsletter of
 * 31 July 2017), 500 ns (Spectrum-4, as pingdo.net's comparison takes it). Quantum's adaptive routing chooses a port
 * for each packet; Ethernet hashes flows unless it is set up otherwise. */
#define IB_PAYLOAD   (4096.0 / 4122)
#define ROCE_PAYLOAD (4096.0 / 4178)
static const struct mu_fabric_type fabrics[] = {
    {"ib-hdr", 25e9, IB_PAYLOAD, 130e-9, MU_ROUTING_ADAPTIVE},
    {"ib-ndr", 50e9, IB_PAYLOAD, 130e-9, MU_ROUTING_ADAPTIVE},
    {"ib-xdr", 100e9, IB_PAYLOAD, 130e-9, MU_ROUTING_ADAPTIVE},
    {"roce-100", 12.5e9, ROCE_PAYLOAD, 300e-9, MU_ROUTING_STATIC},
    {"roce-200", 25e9, ROCE_PAYLOAD, 300e-9, MU_ROUTING_STATIC},
    {"roce-400", 50e9, ROCE_PAYLOAD, 500e-9, MU_ROUTING_STATIC},
    {"roce-800", 100e9, ROCE_PAYLOAD, 500e-9, MU_ROUTING_STATIC},
};

const struct mu_fabric_type *mu_fabric_type_named(const char *name)
{
    for (size_t i = 0; i < sizeof fabrics / sizeof fabrics[0]; i++)
        if (strcmp(fabrics[i].name, name) == 0)
            return &fabrics[i];
    return NULL;
}

const char *mu_fabric_type_names(void)
{
    return "ib-hdr, ib-ndr, ib-xdr, roce-100, roce-200, roce-400, roce-800";
}

void mu_cluster_init(struct mu_cluster *cluster)
{
    *cluster = (struct mu_cluster){.name = "cluster",
                                   .routing = MU_ROUTING_ADAPTIVE,
                                   .flows_per_pair = 1,
                                   .slow_device = 1,
                                   .storage_write_bytes_per_second = 100e9,
                                   .storage_read_bytes_per_second = 100e9,
                                   .device_mtbf_hours = 50677,
                                   .restart_s = 120,
                                   .weibull_shape = 1,
                                   .repair_hours = 24,
                                   .power_nodes = 1};
}

/* ---- what is allowed ---- */

struct bound {
    const char *field;
    double value, least, most;
};

static enum mu_status check_bounds(const struct bound *bounds, size_t count, struct mu_error *err)
{
    for (size_t i = 0; i < count; i++)
        if (!(bounds[i].value >= bounds[i].least && bounds[i].value <= bounds[i].most)) /* also refuses NaN */
            return mu_fail(err, MU_ERR_INVALID, "%s: value %g is not allowed: a number from %g to %g", bounds[i].field,
                           bounds[i].value, bounds[i].least, bounds[i].most);
    return MU_OK;
}

static enum mu_status check_levels(const struct mu_cluster *c, struct mu_error *err)
{
    uint32_t below = 1, switches = 0;
    for (uint32_t i = 0; i < c->level_count; i++) {
        const struct mu_fabric_level *level = &c->levels[i];
        if (level->nodes < below || level->nodes > MU_CLUSTER_NODES_MAX)
            return mu_fail(err, MU_ERR_INVALID,
                           "fabric.nodes[%u]: value %u is not allowed: levels ascend, at least %u nodes here", i,
                           level->nodes, below);
        if (!(level->oversubscription >= 1 && level->oversubscription <= 1000))
            return mu_fail(err, MU_ERR_INVALID,
                           "fabric.oversubscription[%u]: value %g is not allowed: a number from 1 to 1000", i,
                           level->oversubscription);
        switches += (c->nodes + level->nodes - 1) / level->nodes;
        if (!c->topology && switches > MU_TOPOLOGY_SWITCHES_MAX)
            return mu_fail(err, MU_ERR_INVALID,
                           "fabric.nodes[%u]: value %u is not allowed: %u nodes make more than %d switches", i,
                           level->nodes, c->nodes, MU_TOPOLOGY_SWITCHES_MAX);
        below = level->nodes + !c->topology;
    }
    return MU_OK;
}

enum mu_status mu_cluster_check(const struct mu_cluster *c, struct mu_error *err)
{
    const struct mu_device_type *d = &c->device;
    const struct bound bounds[] = {
        {"device.flops_bf16", d->flops_bf16, 1e6, 1e18},
        {"device.flops_fp32", d->flops_fp32, 1e6, 1e18},
        {"device.memory", d->memory_bytes, 1e6, 1e15},
        {"device.memory_rate", d->memory_bytes_per_second, 1e6, 1e16},
        {"device.link_rate", d->link_bytes_per_second, 1e3, 1e15},
        {"device.nic_rate", d->nic_bytes_per_second, 1e3, 1e15},
        {"device.host_rate", d->host_bytes_per_second, 1e3, 1e15},
        {"device.per_node", d->per_node, 1, MU_NODE_DEVICES_MAX},
        {"nodes", c->nodes, 1, MU_CLUSTER_NODES_MAX},
        {"fabric.levels", c->level_count, 0, MU_FABRIC_LEVELS_MAX},
        {"slow_device", c->slow_device, 1, 1000},
        {"fabric.switch_s", c->switch_s, 0, 1},
        {"fabric.flows_per_pair", c->flows_per_pair, 1, 1024},
        {"storage.write_rate", c->storage_write_bytes_per_second, 1e3, 1e15},
        {"storage.read_rate", c->storage_read_bytes_per_second, 1e3, 1e15},
        {"failures.device_mtbf_hours", c->device_mtbf_hours, 1e-3, 1e9},
        {"failures.restart_s", c->restart_s, 0, 1e6},
        {"failures.weibull_shape", c->weibull_shape, 0.3, 10},
        {"failures.repair_hours", c->repair_hours, 0, 1e6},
        {"failures.transient_share", c->transient_share, 0, 1},
        {"failures.switch_mtbf_hours", c->switch_mtbf_hours, c->switch_mtbf_hours == 0 ? 0 : 1, 1e9}, /* 0: never */
        {"failures.power_mtbf_hours", c->power_mtbf_hours, c->power_mtbf_hours == 0 ? 0 : 1, 1e9},
        {"failures.power_nodes", c->power_nodes, 1, MU_CLUSTER_NODES_MAX},
        {"spare_nodes", c->spare_nodes, 0, c->nodes > 0 ? c->nodes - 1.0 : 0},
    };
    enum mu_status status = check_bounds(bounds, sizeof bounds / sizeof bounds[0], err);
    if (status == MU_OK && (uint64_t)c->nodes * d->per_node > MU_CLUSTER_DEVICES_MAX)
        return mu_fail(err, MU_ERR_INVALID,
                       "nodes: value %u is not allowed: of %u devices each, they have more than %d", c->nodes,
                       d->per_node, MU_CLUSTER_DEVICES_MAX);
    return status == MU_OK ? check_levels(c, err) : status;
}

/* ---- the fabric ---- */

uint32_t mu_cluster_devices(const struct mu_cluster *cluster)
{
    return (cluster->nodes - cluster->spare_nodes) * cluster->device.per_node;
}

uint32_t mu_cluster_groups(const struct mu_cluster *cluster, uint32_t tp)
{
    uint32_t nodes = cluster->nodes - cluster->spare_nodes, per_node = cluster->device.per_node;
    return tp <= per_node ? nodes * (per_node / tp) : nodes / ((tp + per_node - 1) / per_node);
}

/* Mean number of nodes under the switches of a level, absent ones too. */
static uint32_t mean_nodes(const struct mu_topology *t, uint32_t level)
{
    uint64_t nodes = 0, switches = 0;
    for (uint32_t i = 0; i < t->switch_count; i++)
        if (t->switches[i].level == level && t->switches[i].nodes > 0) {
            nodes += t->switches[i].nodes;
            switches++;
        }
    return switches ? (uint32_t)((nodes + switches / 2) / switches) : 0;
}

enum mu_status mu_cluster_set_topology(struct mu_cluster *c, struct mu_topology *topology, struct mu_error *err)
{
    if (c->level_count > topology->level_count)
        return mu_fail(err, MU_ERR_INVALID,
                       "fabric.oversubscription: %u levels are not allowed: the topology has %u levels of switches",
                       c->level_count, topology->level_count);
    for (uint32_t i = 0; i < topology->level_count; i++) {
        uint32_t nodes = mean_nodes(topology, i), below = i > 0 ? c->levels[i - 1].nodes : 1;
        c->levels[i] = (struct mu_fabric_level){nodes > below ? nodes : below,
                                                i < c->level_count ? c->levels[i].oversubscription : 1};
    }
    c->level_count = topology->level_count;
    c->topology = topology;
    return MU_OK;
}

void mu_cluster_fini(struct mu_cluster *cluster)
{
    mu_topology_free(cluster->topology);
    cluster->topology = NULL;
}

/* 32 connections of q flows each, hashed to 32 uplinks: 3.53, 2.15, 1.55, 1.26 for q = 1, 4, 16, 64, the mean of
 * simulations (16 uplinks: 3.13, 1.98, 1.46, 1.23). The next lower q of the table counts. */
double mu_cluster_imbalance(const struct mu_cluster *cluster)
{
    static const double excess[] = {2.53, 1.15, 0.55, 0.26};
    if (cluster->routing == MU_ROUTING_ADAPTIVE)
        return 1;
    uint32_t step = 0, q = 1;
    while (step < 3 && q * 4 <= cluster->flows_per_pair) {
        q *= 4;
        step++;
    }
    return 1 + excess[step];
}

/* Nodes of such a ring under one switch of a level. */
static uint32_t inside_of(const struct mu_cluster *cluster, uint32_t level, uint32_t stride)
{
    return cluster->levels[level].nodes / stride;
}

double mu_cluster_switches_s(const struct mu_cluster *cluster, uint32_t members, uint32_t stride)
{
    uint32_t meet = 0;
    while (meet < cluster->level_count && inside_of(cluster, meet, stride) < members)
        meet++;
    return cluster->switch_s * (2 * meet + 1);
}

double mu_cluster_nic_rate(const struct mu_cluster *cluster, uint32_t members, uint32_t stride)
{
    double rate = cluster->device.nic_bytes_per_second, slowest = rate, narrow = mu_cluster_imbalance(cluster);
    for (uint32_t i = 0; i < cluster->level_count; i++) {
        const struct mu_fabric_level *level = &cluster->levels[i];
        uint32_t inside = inside_of(cluster, i, stride);
        if (inside >= members)
            break;
        narrow *= level->oversubscription;
        double here = rate * (inside > 1 ? inside : 1) / narrow;
        slowest = here < slowest ? here : slowest;
    }
    return slowest;
}
