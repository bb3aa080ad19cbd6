/* The processors of this process's affinity mask, divided among workers on one host. No threads. */
#ifndef MU_WORKER_CPUS_H
#define MU_WORKER_CPUS_H

#include <sched.h>
#include <stdint.h>

#include "common/status.h"

/* Where a processor is: its memory node, its package, and the core that it may share with a sibling. */
struct mu_cpu {
    uint32_t cpu, node, package, core;
};

/* Reads the mask and the machine's topology; what the system does not tell is 0. `ret_cpus` holds CPU_SETSIZE. Returns
 * the count, ordered by node, package, core, so that neighbours in the list are near to each other; 0: the machine has
 * more than CPU_SETSIZE of them, nobody should be bound to any. */
uint32_t mu_cpus_read(struct mu_cpu *ret_cpus);
/* Memory nodes among them. */
uint32_t mu_cpus_nodes(const struct mu_cpu *cpus, uint32_t count);
/* Share `slot` of `slots`: disjoint runs of the list, whose lengths differ by at most one; with fewer processors than
 * slots each gets one, and some have the same. Without any it is empty. */
void mu_cpus_share(const struct mu_cpu *cpus, uint32_t count, uint32_t slots, uint32_t slot, cpu_set_t *ret_share);

#endif
