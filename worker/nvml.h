/* Health of one GPU, from NVIDIA's management library (NVML).
 *
 * The library is loaded at run time and called by one thread only, which may hang there for minutes when the driver
 * does: nobody waits for it, callers read the last sample, and stopping leaves a thread that hangs behind. Without a
 * driver there is nothing to read, and that is no error. Any thread may read. */
#ifndef MU_WORKER_NVML_H
#define MU_WORKER_NVML_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"
#include "plan/gpu.h"

struct mu_nvml_config {
    const char *library;    /* NULL: libnvidia-ml.so.1 */
    const char *pci_bus_id; /* as cudaDeviceGetPCIBusId says it; copied */
    uint32_t interval_ms;   /* between samples; 0: 1000 */
    int alarm_fd;           /* an eventfd: counts up once, when the GPU is found unhealthy; -1: none */
};

struct mu_nvml;

enum mu_status mu_nvml_start(const struct mu_nvml_config *config, struct mu_nvml **ret_nvml,
                             struct mu_error *err) MU_WARN_UNUSED;
void mu_nvml_read(struct mu_nvml *nvml, struct mu_gpu_sample *ret_sample);
/* Waits for at most half a second. NULL is fine. */
void mu_nvml_stop(struct mu_nvml *nvml);

/* ---- worker/nvml_xid.c ---- */

enum mu_xid_class {
    MU_XID_UNKNOWN,     /* not in the table: told, nothing is done */
    MU_XID_NOTICE,      /* recorded; work goes on */
    MU_XID_APPLICATION, /* the process on the GPU fails, the GPU is fine */
    MU_XID_FATAL,       /* the GPU must be reset, or its host restarted, before it computes anything right */
};
struct mu_xid {
    uint32_t number;
    enum mu_xid_class class;
    const char *meaning;
};
/* Never NULL. */
const struct mu_xid *mu_xid_find(uint32_t number);

#endif
