/* links: mu_job_file */
/* NCCL's and hwloc's XML of one node. What is accepted has devices, at most one island for each, and rates that are
 * numbers. */
#include <math.h>

#include "cli/topology_file.h"
#include "tests/fuzz/fuzz.h"

static void read_as(enum mu_node_format format, const uint8_t *data, size_t size_bytes)
{
    struct mu_node_file node = {0};
    struct mu_error err = {0};
    enum mu_status status = mu_node_file_parse("file", format, (const char *)data, size_bytes, &node, &err);
    fuzz_judge(status, &err);
    if (status != MU_OK)
        return;
    MU_ASSERT(node.devices >= 1 && node.devices <= MU_NODE_DEVICES_MAX);
    MU_ASSERT(node.islands >= 1 && node.islands <= node.devices);
    MU_ASSERT(isfinite(node.link_bytes_per_second) && node.link_bytes_per_second >= 0);
    MU_ASSERT(isfinite(node.nic_bytes_per_second) && node.nic_bytes_per_second >= 0);
    MU_ASSERT(isfinite(node.host_bytes_per_second) && node.host_bytes_per_second >= 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size_bytes)
{
    read_as(MU_NODE_NCCL_XML, data, size_bytes);
    read_as(MU_NODE_HWLOC_XML, data, size_bytes);
    return 0;
}
