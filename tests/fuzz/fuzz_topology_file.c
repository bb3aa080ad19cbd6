/* links: mu_job_file */
/* Topology files: Slurm's topology.conf and topology.yaml, topograph's JSON. What is accepted is a forest whose levels
 * rise, and whose counts agree.
 *
 * Input: s (topology.conf), y (topology.yaml) or j (topograph), then the file. */
#include "cli/topology_file.h"
#include "tests/fuzz/fuzz.h"

static void judge(const struct mu_topology *t)
{
    uint32_t present = 0, under = 0, counted = 0;
    for (uint32_t i = 0; i < t->node_count; i++) {
        present += !t->nodes[i].absent;
        under += t->nodes[i].parent != MU_TOPOLOGY_NONE;
        MU_ASSERT(t->nodes[i].parent == MU_TOPOLOGY_NONE || t->nodes[i].parent < t->switch_count);
        MU_ASSERT(mu_topology_find_node(t, t->node_names.names[i]) == i);
    }
    for (uint32_t i = 0; i < t->switch_count; i++) {
        const struct mu_topology_switch *s = &t->switches[i];
        MU_ASSERT(s->level < MU_TOPOLOGY_LEVELS_MAX);
        if (s->parent == MU_TOPOLOGY_NONE)
            counted += s->nodes;
        else
            MU_ASSERT(s->parent < t->switch_count && t->switches[s->parent].level > s->level);
    }
    MU_ASSERT(present == t->present_count && counted == under);
}

/* A cluster takes it over, and is checked like one. */
static void use(struct mu_topology *t)
{
    struct mu_cluster cluster;
    struct mu_error err = {0};
    mu_cluster_init(&cluster);
    cluster.device = *mu_device_type_named("h100-sxm");
    cluster.nodes = t->present_count;
    MU_ASSERT(mu_cluster_set_topology(&cluster, t, &err) == MU_OK);
    enum mu_status status = mu_cluster_check(&cluster, &err);
    if (status == MU_OK)
        MU_ASSERT(mu_cluster_nic_rate(&cluster, 2, 1) > 0);
    else
        fuzz_judge(status, &err);
    mu_cluster_fini(&cluster);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size_bytes)
{
    struct fuzz_input input = {data, size_bytes};
    struct mu_topology *t = NULL;
    struct mu_error err = {0};
    uint8_t which = fuzz_byte(&input);
    enum mu_topology_format format = which == 'y'   ? MU_TOPOLOGY_SLURM_YAML
                                     : which == 'j' ? MU_TOPOLOGY_TOPOGRAPH
                                                    : MU_TOPOLOGY_SLURM;
    enum mu_status status = mu_topology_file_parse("file", format, (const char *)input.at, input.left, &t, &err);
    if (status != MU_OK) {
        fuzz_judge(status, &err);
        return 0;
    }
    status = mu_topology_finish(t, &err);
    fuzz_judge(status, &err);
    if (status == MU_OK) {
        judge(t);
        use(t);
    } else {
        mu_topology_free(t);
    }
    return 0;
}
