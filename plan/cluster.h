/* A cluster as the planner sees it: nodes of one device type, joined by a fabric of switch levels.
 *
 * A plain value, read from cluster.yaml by cli/cluster_file.c (docs/planning.md has every field). Rates are of one
 * device and one direction, bytes per second, unless said otherwise. Pure. */
#ifndef MU_PLAN_CLUSTER_H
#define MU_PLAN_CLUSTER_H

#include <stdint.h>

#include "common/status.h"
#include "plan/cost.h"
#include "plan/topology.h"

enum {
    MU_CLUSTER_NAME_SIZE = 64, /* with the terminating 0 */
    MU_FABRIC_LEVELS_MAX = 4,  /* leaf, spine, core and one more */
    MU_NODE_DEVICES_MAX = 128, /* of one NVLink domain */
    MU_CLUSTER_NODES_MAX = 1 << 20,
    MU_CLUSTER_DEVICES_MAX = 1 << 22,
};

/* One type of accelerator with what is around it in its node. */
struct mu_device_type {
    char name[MU_CLUSTER_NAME_SIZE];
    double flops_bf16, flops_fp32;  /* dense, without sparsity, of the data sheet */
    double memory_bytes;            /* of the device */
    double memory_bytes_per_second; /* of its own memory, reading and writing together */
    double link_bytes_per_second;   /* to its neighbours in the node (NVLink): all links together */
    double nic_bytes_per_second;    /* its share of the node's network cards */
    double host_bytes_per_second;   /* to the host's memory (PCIe) */
    uint32_t per_node;
    uint32_t islands; /* groups of a node's devices that NVLink joins; 0 or 1: all of them */
};

/* Profiles by name ("a100-80g", "h100-sxm", ...); the sources stand in cluster.c. NULL: none. */
const struct mu_device_type *mu_device_type_named(const char *name);
/* The names, for messages: "a100-80g, h100-sxm, ...". */
const char *mu_device_type_names(void);

/* How flows that cross a level find their way. STATIC: each flow is hashed to one uplink (ECMP). */
enum mu_routing { MU_ROUTING_ADAPTIVE = 1, MU_ROUTING_STATIC = 2 };

/* A kind of network between nodes: one port of a card, and the switches. */
struct mu_fabric_type {
    char name[MU_CLUSTER_NAME_SIZE];
    double line_bytes_per_second; /* of a port */
    double payload;               /* share of it that is data of messages */
    double switch_s;              /* through one switch */
    enum mu_routing routing;      /* what its switches do unless told otherwise */
};
/* Profiles by name ("ib-ndr", "roce-400", ...), as above. */
const struct mu_fabric_type *mu_fabric_type_named(const char *name);
const char *mu_fabric_type_names(void);

/* One level of switches, the lowest first. */
struct mu_fabric_level {
    uint32_t nodes;          /* under one switch (or one group of switches) of this level; ascending */
    double oversubscription; /* of its uplinks: capacity from below over capacity upward, >= 1 */
};

struct mu_cluster {
    char name[MU_CLUSTER_NAME_SIZE];
    struct mu_device_type device;
    uint32_t nodes;
    uint32_t level_count; /* 0: one switch that blocks nothing */
    struct mu_fabric_level levels[MU_FABRIC_LEVELS_MAX];
    enum mu_routing routing;
    double switch_s;         /* what each switch on the way adds to a hop; 0: not known */
    double slow_device;      /* one device takes so many times as long, >= 1; 1: none */
    uint32_t flows_per_pair; /* queue pairs of one connection, which STATIC routing spreads; >= 1 */
    double storage_write_bytes_per_second, storage_read_bytes_per_second; /* of all nodes together */
    double device_mtbf_hours; /* mean time between failures that stop a job, of one device and its part of the node */
    double restart_s;         /* from a failure until state is loaded, without the loading */
    double weibull_shape;     /* of the times between failures of a node; 1: exponential */
    double repair_hours;      /* until a node or switch is back, but for the transient_share of nodes: restart_s */
    double transient_share;
    double switch_mtbf_hours, power_mtbf_hours; /* of a leaf switch, of a power domain: all nodes there; 0: never */
    uint32_t power_nodes;                       /* neighbours by name that share a power domain */
    uint32_t spare_nodes;                       /* of `nodes`: not used while nothing fails */
    bool has_worker;
    struct mu_cost_rates worker;  /* of one CPU worker, where muster probe measured them */
    struct mu_topology *topology; /* of `nodes` present nodes, which `levels` sum up; NULL: `levels` say all. Shared by
                                     copies; mu_cluster_fini of one of them frees it */
};

/* Adaptive routing, one level, H100 failure rate of Llama 3 (arXiv 2407.21783: 419 interruptions in 54 days on 16,384
 * GPUs: 50,677 hours), 100 GB/s of storage, 120 s to restart. No device type and no nodes. */
void mu_cluster_init(struct mu_cluster *cluster);
/* MU_ERR_INVALID: "field: value V is not allowed: ..."; nonsense (zero or negative rates, levels that do not ascend,
 * more spares than nodes) is refused. */
enum mu_status mu_cluster_check(const struct mu_cluster *cluster, struct mu_error *err) MU_WARN_UNUSED;

/* Takes over a finished topology: its levels become those of the cluster, with the mean number of nodes under a switch
 * each (they need not ascend then). Before it, level_count and the oversubscription of each level are set (0 levels:
 * nothing blocks); above them nothing blocks. MU_ERR_INVALID: more levels are given than the topology has; then the
 * topology stays the caller's. */
enum mu_status mu_cluster_set_topology(struct mu_cluster *cluster, struct mu_topology *topology,
                                       struct mu_error *err) MU_WARN_UNUSED;
void mu_cluster_fini(struct mu_cluster *cluster);

uint32_t mu_cluster_devices(const struct mu_cluster *cluster); /* in use: without spares */

/* Tensor groups of `tp` devices that fit into the nodes in use, none of them on more nodes than it must be. */
uint32_t mu_cluster_groups(const struct mu_cluster *cluster, uint32_t tp);

/* What one device gets through the fabric in a ring (or between two) of `members` nodes, `stride` nodes apart, while
 * every other device of the cluster does the same in a ring of its own. Of each switch's nodes, `inside` belong to the
 * ring, so every inside-th of its devices sends across the level: the NIC's rate times inside / (oversubscription so
 * far x imbalance), never more than the NIC's. */
double mu_cluster_nic_rate(const struct mu_cluster *cluster, uint32_t members, uint32_t stride);
/* What the switches on the longest way in such a ring add to a hop: up to the level where all members meet, and down.
 */
double mu_cluster_switches_s(const struct mu_cluster *cluster, uint32_t members, uint32_t stride);
/* Load of the fullest uplink over the mean, with flows_per_pair flows hashed to uplinks. 1 for adaptive routing. */
double mu_cluster_imbalance(const struct mu_cluster *cluster);

#endif
