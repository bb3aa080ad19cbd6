/* What the memory model (plan/memory.h) says of one worker of a GPT-2 job, in MiB: while it trains, and at its peak.
 *
 *   memory_model LAYERS HEADS CHANNELS CONTEXT VOCAB SEQUENCES MICRO LENGTH WORLD THREADS */
#include <stdio.h>
#include <stdlib.h>

#include "plan/memory.h"

enum { ARGUMENTS = 10 };

int main(int argc, char **argv)
{
    uint32_t n[ARGUMENTS] = {0};
    for (int i = 0; i < ARGUMENTS && i + 1 < argc; i++)
        n[i] = (uint32_t)strtoul(argv[i + 1], NULL, 10);
    struct mu_job_spec spec;
    struct mu_error err;
    mu_job_spec_init(&spec);
    snprintf(spec.name, sizeof spec.name, "bench");
    snprintf(spec.data.path, sizeof spec.data.path, "/bench/data");
    spec.model.layers = n[0];
    spec.model.heads = n[1];
    spec.model.channels = n[2];
    spec.model.context = n[3];
    spec.model.vocab = n[4];
    spec.batch.sequences = n[5];
    spec.batch.micro = n[6];
    spec.batch.length = n[7];
    spec.steps = 1;
    if (argc != ARGUMENTS + 1 || mu_job_spec_check(&spec, &err) != MU_OK || n[8] < 1 || n[8] > mu_job_leaves(&spec)) {
        fprintf(stderr, "memory_model: %s\n", argc == ARGUMENTS + 1 ? err.text : "10 numbers are needed");
        return 2;
    }
    struct mu_memory_need need = mu_memory_of_worker(&spec, n[8], n[9]);
    printf("%.1f %.1f\n", (double)need.total_bytes / (1 << 20), (double)need.peak_bytes / (1 << 20));
    return 0;
}
