/* links: mu_job_file */
/* Cluster files. */
#include "cli/cluster_file.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size_bytes)
{
    static struct mu_cluster cluster;
    struct mu_error err = {0};
    fuzz_judge(mu_cluster_file_parse("cluster.yaml", data, size_bytes, &cluster, &err), &err);
    return 0;
}
