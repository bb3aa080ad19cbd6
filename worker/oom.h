/* Memory as the kernel gives it to this process's cgroup: the limit, and who was killed at it. A death by SIGKILL does
 * not say so by itself; the kernel counts such deaths by cgroup (memory.events; memory.oom_control of the first
 * version), and of the whole machine where there is none. */
#ifndef MU_WORKER_OOM_H
#define MU_WORKER_OOM_H

#include <stdbool.h>
#include <stdint.h>

enum { MU_OOM_PATH_SIZE = 512 };

struct mu_oom {
    char path[MU_OOM_PATH_SIZE]; /* the file that counts; empty: nothing does */
    bool whole_machine;
    uint64_t seen; /* deaths already explained */
};

/* The least limit of this process's cgroup and of those that it lies in (memory.max; memory.limit_in_bytes of the first
 * version), bytes; UINT64_MAX: none, or it cannot be read. Within a container as far as it shows them. `root` as below.
 */
uint64_t mu_oom_limit_bytes(const char *root);
/* What is left of them: limit less what is used (memory.current; memory.usage_in_bytes), where pages of files that
 * nobody has looked at for a while (inactive_file) count as free. */
uint64_t mu_oom_left_bytes(const char *root);

/* Deaths from now on. `root` is "", or for tests a folder that stands for /. */
void mu_oom_init(struct mu_oom *oom, const char *root);
/* Of a process of ours that died by SIGKILL: has a death been counted that explains it? Each explains one. */
bool mu_oom_explains(struct mu_oom *oom);

#endif
