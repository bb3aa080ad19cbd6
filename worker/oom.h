/* Did the kernel kill a process of ours for want of memory? A death by SIGKILL does not say so by itself; the kernel
 * counts such deaths by cgroup (memory.events; memory.oom_control of the first version), and of the whole machine where
 * there is none. */
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

/* Deaths from now on. `root` is "", or for tests a folder that stands for /. */
void mu_oom_init(struct mu_oom *oom, const char *root);
/* Of a process of ours that died by SIGKILL: has a death been counted that explains it? Each explains one. */
bool mu_oom_explains(struct mu_oom *oom);

#endif
