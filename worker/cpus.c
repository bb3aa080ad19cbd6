#include "worker/cpus.h"

#include <dirent.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TOPOLOGY "/sys/devices/system/cpu/cpu%u"

static uint32_t read_number(uint32_t cpu, const char *name)
{
    char path[128];
    unsigned value = 0;
    snprintf(path, sizeof path, TOPOLOGY "/topology/%s", cpu, name);
    FILE *file = fopen(path, "re");
    if (!file)
        return 0;
    bool found = fscanf(file, "%u", &value) == 1;
    fclose(file);
    return found ? value : 0;
}

/* The folder of a processor has a link "node3" to its memory node. */
static uint32_t read_node(uint32_t cpu)
{
    char path[64];
    unsigned node = 0;
    snprintf(path, sizeof path, TOPOLOGY, cpu);
    DIR *dir = opendir(path);
    if (!dir)
        return 0;
    for (struct dirent *entry; (entry = readdir(dir));) {
        if (strncmp(entry->d_name, "node", 4) == 0 && sscanf(entry->d_name + 4, "%u", &node) == 1)
            break;
    }
    closedir(dir);
    return node;
}

static int by_place(const void *a, const void *b)
{
    const struct mu_cpu *x = a, *y = b;
    const uint32_t keys[4][2] = {{x->node, y->node}, {x->package, y->package}, {x->core, y->core}, {x->cpu, y->cpu}};
    for (unsigned i = 0; i < 4; i++) {
        if (keys[i][0] != keys[i][1])
            return keys[i][0] < keys[i][1] ? -1 : 1;
    }
    return 0;
}

uint32_t mu_cpus_read(struct mu_cpu *ret_cpus)
{
    cpu_set_t mask;
    uint32_t count = 0;
    CPU_ZERO(&mask);
    if (sched_getaffinity(0, sizeof mask, &mask) != 0)
        return 0;
    for (uint32_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &mask))
            ret_cpus[count++] = (struct mu_cpu){.cpu = cpu,
                                                .node = read_node(cpu),
                                                .package = read_number(cpu, "physical_package_id"),
                                                .core = read_number(cpu, "core_id")};
    }
    qsort(ret_cpus, count, sizeof *ret_cpus, by_place);
    return count;
}

uint32_t mu_cpus_nodes(const struct mu_cpu *cpus, uint32_t count)
{
    uint32_t nodes = count > 0;
    for (uint32_t i = 1; i < count; i++)
        nodes += cpus[i].node != cpus[i - 1].node;
    return nodes;
}

void mu_cpus_share(const struct mu_cpu *cpus, uint32_t count, uint32_t slots, uint32_t slot, cpu_set_t *ret_share)
{
    MU_ASSERT(slot < slots);
    CPU_ZERO(ret_share);
    if (count == 0)
        return;
    if (count < slots) {
        CPU_SET(cpus[slot % count].cpu, ret_share);
        return;
    }
    uint64_t first = (uint64_t)count * slot / slots, end = (uint64_t)count * (slot + 1) / slots;
    for (uint64_t i = first; i < end; i++)
        CPU_SET(cpus[i].cpu, ret_share);
}
