#include "cli/cluster_file.h"

#include <cyaml/cyaml.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/hostlist.h"
#include "cli/topology_file.h"
#include "cli/yaml_reader.h"

/* ---- The document as libcyaml loads it: every value a string, NULL when absent. ---- */

struct device_text {
    char *type, *per_node, *flops_bf16, *flops_fp32, *memory, *memory_rate, *link_rate, *nic_rate, *host_rate;
};
struct fabric_text {
    char **nodes, **oversubscription;
    uint32_t nodes_count, oversubscription_count;
    char *type, *cards, *routing, *flows_per_pair, *fat_tree;
};
struct storage_text {
    char *write_rate, *read_rate;
};
struct failures_text {
    char *device_mtbf_hours, *restart_s, *weibull_shape, *repair_hours, *transient_share, *switch_mtbf_hours,
        *power_mtbf_hours, *power_nodes;
};
struct topology_text {
    char *slurm, *topograph, *nccl, *hwloc, *hosts;
};
struct worker_text {
    char *flops, *memory_rate, *rows_rate, *link_rate, *latency_s, *fixed_s, *slice_cost;
};
struct cluster_text {
    char *cluster, *nodes, *spare_nodes;
    struct topology_text *topology;
    struct device_text *device;
    struct fabric_text *fabric;
    struct storage_text *storage;
    struct failures_text *failures;
    struct worker_text *worker;
};

#define OPTIONAL               (CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL)
#define TEXT(parent, member)   CYAML_FIELD_STRING_PTR(#member, OPTIONAL, struct parent, member, 0, CYAML_UNLIMITED)
#define GROUP(member, schema_) CYAML_FIELD_MAPPING_PTR(#member, OPTIONAL, struct cluster_text, member, schema_)
#define LIST(parent, member)                                                                                           \
    CYAML_FIELD_SEQUENCE(#member, OPTIONAL, struct parent, member, &number_schema, 1, MU_FABRIC_LEVELS_MAX)

static const cyaml_schema_value_t number_schema = {CYAML_VALUE_STRING(CYAML_FLAG_POINTER, char, 0, CYAML_UNLIMITED)};
static const cyaml_schema_field_t device_schema[] = {TEXT(device_text, type),       TEXT(device_text, per_node),
                                                     TEXT(device_text, flops_bf16), TEXT(device_text, flops_fp32),
                                                     TEXT(device_text, memory),     TEXT(device_text, memory_rate),
                                                     TEXT(device_text, link_rate),  TEXT(device_text, nic_rate),
                                                     TEXT(device_text, host_rate),  CYAML_FIELD_END};
static const cyaml_schema_field_t fabric_schema[] = {LIST(fabric_text, nodes),    LIST(fabric_text, oversubscription),
                                                     TEXT(fabric_text, routing),  TEXT(fabric_text, flows_per_pair),
                                                     TEXT(fabric_text, fat_tree), TEXT(fabric_text, type),
                                                     TEXT(fabric_text, cards),    CYAML_FIELD_END};
static const cyaml_schema_field_t storage_schema[] = {TEXT(storage_text, write_rate), TEXT(storage_text, read_rate),
                                                      CYAML_FIELD_END};
static const cyaml_schema_field_t failures_schema[] = {TEXT(failures_text, device_mtbf_hours),
                                                       TEXT(failures_text, restart_s),
                                                       TEXT(failures_text, weibull_shape),
                                                       TEXT(failures_text, repair_hours),
                                                       TEXT(failures_text, transient_share),
                                                       TEXT(failures_text, switch_mtbf_hours),
                                                       TEXT(failures_text, power_mtbf_hours),
                                                       TEXT(failures_text, power_nodes),
                                                       CYAML_FIELD_END};
static const cyaml_schema_field_t topology_schema[] = {TEXT(topology_text, slurm), TEXT(topology_text, topograph),
                                                       TEXT(topology_text, nccl),  TEXT(topology_text, hwloc),
                                                       TEXT(topology_text, hosts), CYAML_FIELD_END};
static const cyaml_schema_field_t worker_schema[] = {TEXT(worker_text, flops),      TEXT(worker_text, memory_rate),
                                                     TEXT(worker_text, rows_rate),  TEXT(worker_text, link_rate),
                                                     TEXT(worker_text, latency_s),  TEXT(worker_text, fixed_s),
                                                     TEXT(worker_text, slice_cost), CYAML_FIELD_END};
static const cyaml_schema_field_t cluster_schema[] = {GROUP(topology, topology_schema), TEXT(cluster_text, cluster),
                                                      GROUP(device, device_schema),     TEXT(cluster_text, nodes),
                                                      GROUP(fabric, fabric_schema),     GROUP(storage, storage_schema),
                                                      GROUP(failures, failures_schema), GROUP(worker, worker_schema),
                                                      TEXT(cluster_text, spare_nodes),  CYAML_FIELD_END};
static const cyaml_schema_value_t top_schema = {
    CYAML_VALUE_MAPPING(CYAML_FLAG_POINTER, struct cluster_text, cluster_schema)};

static const struct mu_yaml_kind cluster_kind = {.noun = "cluster file",
                                                 .needs = "device and nodes",
                                                 .begin = "write a line nodes: NUMBER and so on",
                                                 .list = "a list of 1 to 4 numbers, one for each level",
                                                 .list_advice = "write [16, 128]",
                                                 .docs = "see docs/planning.md",
                                                 .schema = &top_schema,
                                                 .size_max = MU_CLUSTER_FILE_SIZE_MAX};

/* ---- Groups of fields. ---- */

static bool has_node_file(const struct topology_text *t)
{
    return t && (t->nccl || t->hwloc);
}

/* What NCCL or hwloc says of the node, before the fields that say it better. */
static enum mu_status read_node_file(struct mu_yaml_reader *r, const struct topology_text *t,
                                     struct mu_device_type *device, struct mu_node_file *ret_node)
{
    char path[MU_PATH_SIZE];
    struct mu_node_file node = {0};
    *ret_node = node;
    if (!has_node_file(t))
        return MU_OK;
    if (t->nccl && t->hwloc)
        return mu_yaml_refuse(r, "topology.hwloc", t->hwloc, "one of nccl and hwloc", "leave one of them out");
    enum mu_status status =
        mu_yaml_read_path(r, t->nccl ? "topology.nccl" : "topology.hwloc", t->nccl ? t->nccl : t->hwloc, path);
    if (status == MU_OK)
        status = mu_node_file_read(path, t->nccl ? MU_NODE_NCCL_XML : MU_NODE_HWLOC_XML, &node, r->err);
    if (status != MU_OK)
        return status;
    device->per_node = node.devices;
    device->islands = node.islands;
    double *rates[] = {&device->link_bytes_per_second, &device->nic_bytes_per_second, &device->host_bytes_per_second};
    const double said[] = {node.link_bytes_per_second, node.nic_bytes_per_second, node.host_bytes_per_second};
    for (size_t i = 0; i < sizeof rates / sizeof rates[0]; i++)
        if (said[i] > 0)
            *rates[i] = said[i];
    *ret_node = node;
    return MU_OK;
}

/* What a profile of the network says, before the fields that say it better: what a device gets of the node's cards, of
 * which it has one each unless somebody counts them. */
static enum mu_status read_fabric_type(struct mu_yaml_reader *r, const struct fabric_text *t,
                                       const struct mu_node_file *node, struct mu_cluster *c)
{
    struct mu_device_type *device = &c->device;
    uint32_t cards = node->cards ? node->cards : device->per_node;
    if (!t || (!t->type && !t->cards))
        return MU_OK;
    if (!t->type)
        return mu_yaml_missing(r, "fabric.type", "cards are those of a kind of network: give both");
    const struct mu_fabric_type *type = mu_fabric_type_named(t->type);
    if (!type)
        return mu_yaml_refuse(r, "fabric.type", t->type, mu_fabric_type_names(),
                              "write one of these, or leave it out and give device.nic_rate");
    enum mu_status status = mu_yaml_read_positive(r, "fabric.cards", t->cards, NULL, &cards);
    if (status != MU_OK)
        return status;
    if (cards > MU_NODE_DEVICES_MAX)
        return mu_yaml_refuse(r, "fabric.cards", t->cards, "a number from 1 to 128", "count the cards of one node");
    bool said = node->nic_bytes_per_second > 0 && !t->cards; /* by NCCL, of these very cards */
    double line = said ? node->nic_bytes_per_second : type->line_bytes_per_second * cards / device->per_node;
    device->nic_bytes_per_second = line * type->payload;
    c->switch_s = type->switch_s;
    c->routing = type->routing;
    return MU_OK;
}

static enum mu_status read_device(struct mu_yaml_reader *r, const struct cluster_text *all, struct mu_cluster *c)
{
    static const char advice[] = "give device: {type: h100-sxm}, or all of its rates";
    const struct device_text *t = all->device;
    struct mu_device_type *device = &c->device;
    struct mu_node_file node;
    enum mu_status status;
    if (!t)
        return mu_yaml_missing(r, "device", advice);
    if (t->type) {
        const struct mu_device_type *known = mu_device_type_named(t->type);
        if (!known)
            return mu_yaml_refuse(r, "device.type", t->type, mu_device_type_names(),
                                  "write one of these, or leave it out and give all rates");
        *device = *known;
    } else {
        snprintf(device->name, sizeof device->name, "device");
    }
    if ((status = read_node_file(r, all->topology, device, &node)))
        return status;
    uint32_t devices = device->per_node;
    if ((status = mu_yaml_read_positive(r, "device.per_node", t->per_node, NULL, &device->per_node)) ||
        (status = read_fabric_type(r, all->fabric, &node, c)) ||
        (status = mu_yaml_read_real(r, "device.flops_bf16", t->flops_bf16, &device->flops_bf16)) ||
        (status = mu_yaml_read_real(r, "device.flops_fp32", t->flops_fp32, &device->flops_fp32)) ||
        (status = mu_yaml_read_real(r, "device.memory", t->memory, &device->memory_bytes)) ||
        (status = mu_yaml_read_real(r, "device.memory_rate", t->memory_rate, &device->memory_bytes_per_second)) ||
        (status = mu_yaml_read_real(r, "device.link_rate", t->link_rate, &device->link_bytes_per_second)) ||
        (status = mu_yaml_read_real(r, "device.nic_rate", t->nic_rate, &device->nic_bytes_per_second)) ||
        (status = mu_yaml_read_real(r, "device.host_rate", t->host_rate, &device->host_bytes_per_second)))
        return status;
    if (!t->type && (!t->per_node || !t->flops_bf16 || !t->flops_fp32 || !t->memory || !t->memory_rate ||
                     !t->link_rate || !(device->nic_bytes_per_second > 0) || !t->host_rate))
        return mu_yaml_missing(r, "device.type", advice);
    if (has_node_file(all->topology) && t->per_node && device->per_node != devices)
        return mu_yaml_refuse(r, "device.per_node", t->per_node,
                              "the file of topology.nccl or topology.hwloc has another number of GPUs",
                              "leave it out, or give the right file");
    return MU_OK;
}

/* Of switches with k ports: k/2 nodes at an edge switch, k/2 of these in a pod, k pods; nothing blocks (Al-Fares et
 * al., SIGCOMM 2008). */
static enum mu_status read_fat_tree(struct mu_yaml_reader *r, const struct fabric_text *t, bool topology,
                                    struct mu_cluster *c)
{
    uint32_t ports = 0;
    if (!t->fat_tree)
        return MU_OK;
    enum mu_status status = mu_yaml_read_positive(r, "fabric.fat_tree", t->fat_tree, NULL, &ports);
    if (status != MU_OK)
        return status;
    if (topology || t->nodes_count + t->oversubscription_count > 0)
        return mu_yaml_refuse(r, "fabric.fat_tree", t->fat_tree, "it stands for the lists of levels and for a topology",
                              "leave one of them out");
    if (ports % 2 != 0 || ports < 4 || ports > 256)
        return mu_yaml_refuse(r, "fabric.fat_tree", t->fat_tree, "an even number of ports, 4 to 256",
                              "give the ports of a switch");
    c->levels[0] = (struct mu_fabric_level){ports / 2, 1};
    c->levels[1] = (struct mu_fabric_level){ports * ports / 4, 1};
    c->level_count = 2;
    return MU_OK;
}

static enum mu_status check_fat_tree(struct mu_yaml_reader *r, const struct fabric_text *t, const struct mu_cluster *c)
{
    char allowed[64];
    uint64_t most = t && t->fat_tree ? (uint64_t)c->levels[0].nodes * 2 * c->levels[1].nodes : UINT64_MAX;
    if (c->nodes <= most)
        return MU_OK;
    snprintf(allowed, sizeof allowed, "a tree of such switches joins %llu nodes", (unsigned long long)most);
    return mu_yaml_refuse(r, "fabric.fat_tree", t->fat_tree, allowed, "give more ports or fewer nodes");
}

static enum mu_status read_fabric(struct mu_yaml_reader *r, const struct fabric_text *t, bool topology,
                                  struct mu_cluster *c)
{
    static const struct mu_yaml_choice routings[] = {
        {"adaptive", MU_ROUTING_ADAPTIVE}, {"static", MU_ROUTING_STATIC}, {NULL, 0}};
    enum mu_status status = MU_OK;
    int routing = c->routing;
    char field[64];
    if (!t)
        return MU_OK;
    if (topology && t->nodes_count > 0)
        return mu_yaml_refuse(r, "fabric.nodes", "(list)", "the topology file says what is under which switch",
                              "leave it out, fabric.oversubscription stays");
    if (!topology && t->nodes_count != t->oversubscription_count)
        return mu_yaml_missing(r,
                               t->nodes_count < t->oversubscription_count ? "fabric.nodes" : "fabric.oversubscription",
                               "both lists have one number for each level of switches");
    c->level_count = t->oversubscription_count;
    for (uint32_t i = 0; i < c->level_count && status == MU_OK; i++) {
        snprintf(field, sizeof field, "fabric.nodes[%u]", i);
        if (!topology)
            status = mu_yaml_read_positive(r, field, t->nodes[i], NULL, &c->levels[i].nodes);
        snprintf(field, sizeof field, "fabric.oversubscription[%u]", i);
        if (status == MU_OK)
            status = mu_yaml_read_real(r, field, t->oversubscription[i], &c->levels[i].oversubscription);
    }
    if (status == MU_OK)
        status = read_fat_tree(r, t, topology, c);
    if (status == MU_OK)
        status = mu_yaml_read_choice(r, "fabric.routing", t->routing, routings, "adaptive or static", &routing);
    if (status == MU_OK)
        status = mu_yaml_read_positive(r, "fabric.flows_per_pair", t->flows_per_pair, NULL, &c->flows_per_pair);
    c->routing = (enum mu_routing)routing;
    return status;
}

/* ---- Topology. ---- */

static bool has_file(const struct topology_text *t)
{
    return t && (t->slurm || t->topograph);
}

static enum mu_status expect_host(void *ctx, const char *name, size_t length, struct mu_error *err)
{
    struct mu_topology *t = ctx;
    uint32_t node, before = t->node_count;
    enum mu_status status = mu_topology_node_of(t, name, length, 0, &node, err);
    if (status != MU_OK)
        return status;
    if (t->node_count == before) /* known */
        t->nodes[node].repeated = !t->nodes[node].absent || t->nodes[node].repeated;
    t->nodes[node].absent = false;
    return MU_OK;
}

/* The cluster has the hosts of this list, whatever the topology file names. */
static enum mu_status read_hosts(struct mu_yaml_reader *r, const char *text, struct mu_topology *t)
{
    static const char field[] = "topology.hosts";
    uint32_t line = mu_yaml_index_line(&r->index, field);
    for (uint32_t i = 0; i < t->node_count; i++)
        t->nodes[i].absent = true;
    enum mu_status status = mu_hostlist_walk(text, strlen(text), line, expect_host, t, r->err);
    return status == MU_OK ? MU_OK : topology_located(r->name, r->err);
}

static enum mu_status complete_topology(struct mu_yaml_reader *r, const struct cluster_text *t, const char *path,
                                        struct mu_topology *topology, struct mu_cluster *c)
{
    enum mu_status status = t->topology->hosts ? read_hosts(r, t->topology->hosts, topology) : MU_OK;
    if (status != MU_OK)
        return status;
    if (t->nodes)
        status = mu_topology_expect(topology, c->nodes, r->err);
    if (status == MU_OK)
        status = mu_topology_finish(topology, r->err);
    if (status != MU_OK)
        return topology_located(path, r->err);
    c->nodes = topology->present_count;
    status = mu_cluster_set_topology(c, topology, r->err);
    return status == MU_OK ? MU_OK : mu_yaml_locate(r);
}

static enum mu_status read_topology(struct mu_yaml_reader *r, const struct cluster_text *t, struct mu_cluster *c)
{
    const struct topology_text *files = t->topology;
    struct mu_topology *topology;
    char path[MU_PATH_SIZE];
    if (!files || !has_file(files))
        return !files || !files->hosts ? MU_OK
                                       : mu_yaml_missing(r, "topology.slurm", "hosts are looked up in a topology file");
    if (files->slurm && files->topograph)
        return mu_yaml_refuse(r, "topology.topograph", files->topograph, "one of slurm and topograph",
                              "leave one of them out");
    bool slurm = files->slurm != NULL;
    enum mu_status status = mu_yaml_read_path(r, slurm ? "topology.slurm" : "topology.topograph",
                                              slurm ? files->slurm : files->topograph, path);
    if (status == MU_OK)
        status = mu_topology_file_read(path, slurm ? MU_TOPOLOGY_SLURM : MU_TOPOLOGY_TOPOGRAPH, &topology, r->err);
    if (status != MU_OK)
        return status;
    status = complete_topology(r, t, path, topology, c);
    if (status != MU_OK)
        mu_topology_free(topology);
    return status;
}

static enum mu_status read_failures(struct mu_yaml_reader *r, const struct failures_text *t, struct mu_cluster *c)
{
    const struct {
        const char *field, *text;
        double *value;
    } numbers[] = {{"failures.device_mtbf_hours", t->device_mtbf_hours, &c->device_mtbf_hours},
                   {"failures.restart_s", t->restart_s, &c->restart_s},
                   {"failures.weibull_shape", t->weibull_shape, &c->weibull_shape},
                   {"failures.repair_hours", t->repair_hours, &c->repair_hours},
                   {"failures.transient_share", t->transient_share, &c->transient_share},
                   {"failures.switch_mtbf_hours", t->switch_mtbf_hours, &c->switch_mtbf_hours},
                   {"failures.power_mtbf_hours", t->power_mtbf_hours, &c->power_mtbf_hours}};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        enum mu_status status = mu_yaml_read_real(r, numbers[i].field, numbers[i].text, numbers[i].value);
        if (status != MU_OK)
            return status;
    }
    return mu_yaml_read_positive(r, "failures.power_nodes", t->power_nodes, NULL, &c->power_nodes);
}

static enum mu_status read_worker(struct mu_yaml_reader *r, const struct worker_text *t, struct mu_cluster *c)
{
    struct mu_cost_rates *rates = &c->worker;
    if (!t)
        return MU_OK;
    mu_cost_rates_init(rates);
    c->has_worker = true;
    const struct {
        const char *field, *text;
        double *value;
        bool may_be_zero;
    } numbers[] = {{"worker.flops", t->flops, &rates->flops, false},
                   {"worker.memory_rate", t->memory_rate, &rates->memory_bytes_per_second, false},
                   {"worker.rows_rate", t->rows_rate, &rates->rows_bytes_per_second, true},
                   {"worker.link_rate", t->link_rate, &rates->link_bytes_per_second, false},
                   {"worker.latency_s", t->latency_s, &rates->latency_s, true},
                   {"worker.fixed_s", t->fixed_s, &rates->fixed_s, true},
                   {"worker.slice_cost", t->slice_cost, &rates->slice_cost, true}};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        enum mu_status status = mu_yaml_read_real(r, numbers[i].field, numbers[i].text, numbers[i].value);
        if (status != MU_OK)
            return status;
        if (*numbers[i].value < 0 || (*numbers[i].value == 0 && !numbers[i].may_be_zero) || *numbers[i].value > 1e18)
            return mu_yaml_refuse(r, numbers[i].field, numbers[i].text,
                                  numbers[i].may_be_zero ? "0 to 1e18" : "above 0, at most 1e18",
                                  "take what muster probe printed");
    }
    return MU_OK;
}

static enum mu_status read_rest(struct mu_yaml_reader *r, const struct cluster_text *t, struct mu_cluster *c)
{
    static const struct storage_text no_storage;
    static const struct failures_text no_failures;
    const struct storage_text *storage = t->storage ? t->storage : &no_storage;
    const struct failures_text *failures = t->failures ? t->failures : &no_failures;
    enum mu_status status;
    if (!t->nodes && !has_file(t->topology))
        return mu_yaml_missing(r, "nodes", "set the number of nodes");
    if (t->cluster && t->cluster[0] == 0)
        return mu_yaml_refuse(r, "cluster", "", "1 to 63 characters", "choose a name, or leave the line out");
    if (t->cluster && strlen(t->cluster) >= sizeof c->name)
        return mu_yaml_refuse(r, "cluster", t->cluster, "at most 63 characters", "choose a shorter name");
    if (t->cluster)
        memcpy(c->name, t->cluster, strlen(t->cluster) + 1);
    if ((status = mu_yaml_read_positive(r, "nodes", t->nodes, NULL, &c->nodes)) ||
        (status = mu_yaml_read_u32(r, "spare_nodes", t->spare_nodes, &c->spare_nodes)) ||
        (status =
             mu_yaml_read_real(r, "storage.write_rate", storage->write_rate, &c->storage_write_bytes_per_second)) ||
        (status = mu_yaml_read_real(r, "storage.read_rate", storage->read_rate, &c->storage_read_bytes_per_second)) ||
        (status = read_failures(r, failures, c)) || (status = read_worker(r, t->worker, c)))
        return status;
    return MU_OK;
}

enum mu_status mu_cluster_file_parse(const char *name, const char *directory, const void *text, size_t size_bytes,
                                     struct mu_cluster *ret_cluster, struct mu_error *err)
{
    struct mu_error own_err;
    struct mu_yaml_reader r = {.kind = &cluster_kind, .directory = directory, .err = err ? err : &own_err};
    struct mu_cluster cluster;
    void *document = NULL;
    enum mu_status status = mu_yaml_load(&r, name, text, size_bytes, &document);
    if (status != MU_OK)
        return status;
    const struct cluster_text *t = document;
    mu_cluster_init(&cluster);
    if (!(status = read_device(&r, t, &cluster)) &&
        !(status = read_fabric(&r, t->fabric, has_file(t->topology), &cluster)) &&
        !(status = read_rest(&r, t, &cluster)) && !(status = check_fat_tree(&r, t->fabric, &cluster)) &&
        !(status = read_topology(&r, t, &cluster))) {
        status = mu_cluster_check(&cluster, r.err);
        if (status != MU_OK)
            mu_yaml_locate(&r);
    }
    mu_yaml_free(&r, document);
    if (status == MU_OK)
        *ret_cluster = cluster;
    else
        mu_cluster_fini(&cluster);
    return status;
}

enum mu_status mu_cluster_file_read(const char *path, struct mu_cluster *ret_cluster, struct mu_error *err)
{
    char *directory, *text;
    size_t size;
    enum mu_status status = mu_yaml_read_file(path, &cluster_kind, &directory, &text, &size, err);
    if (status != MU_OK)
        return status;
    status = mu_cluster_file_parse(path, directory, text, size, ret_cluster, err);
    free(directory);
    free(text);
    return status;
}
