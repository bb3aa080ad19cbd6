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

enum mu_gpu_reading {
    MU_GPU_UTILISATION_PERCENT,
    MU_GPU_MEMORY_UTILISATION_PERCENT,
    MU_GPU_MEMORY_USED_BYTES,
    MU_GPU_MEMORY_TOTAL_BYTES,
    MU_GPU_POWER_MW,
    MU_GPU_POWER_LIMIT_MW,
    MU_GPU_TEMPERATURE_C,
    MU_GPU_MEMORY_TEMPERATURE_C,
    MU_GPU_SM_CLOCK_MHZ,
    MU_GPU_MEMORY_CLOCK_MHZ,
    MU_GPU_THROTTLE_REASONS, /* bits, see mu_gpu_throttle_text */
    MU_GPU_ECC_CORRECTED,    /* since the driver was loaded */
    MU_GPU_ECC_UNCORRECTED,
    MU_GPU_ROWS_REMAPPED_CORRECTABLE,
    MU_GPU_ROWS_REMAPPED_UNCORRECTABLE,
    MU_GPU_ROW_REMAP_PENDING, /* 1: takes place at the next reset */
    MU_GPU_ROW_REMAP_FAILED,
    MU_GPU_NVLINK_CRC_ERRORS, /* of all links */
    MU_GPU_NVLINK_REPLAYS,
    MU_GPU_NVLINK_RECOVERIES,
    MU_GPU_NVLINK_SENT_KIB,
    MU_GPU_NVLINK_RECEIVED_KIB,
    MU_GPU_PCIE_SENT_KIB_PER_S,
    MU_GPU_PCIE_RECEIVED_KIB_PER_S,
    MU_GPU_PCIE_REPLAYS,
    MU_GPU_RECOVERY_ACTION, /* that the driver wants; 0: none */
    MU_GPU_READINGS
};
/* As in metrics: "utilisation_percent", ... */
const char *mu_gpu_reading_name(enum mu_gpu_reading reading);

enum mu_gpu_watch {
    MU_GPU_STARTING, /* no sample yet */
    MU_GPU_WATCHED,
    MU_GPU_UNWATCHED, /* no driver, no such GPU, ...: `text` says why; nothing will come */
};

struct mu_gpu_sample {
    enum mu_gpu_watch watch;
    uint64_t age_us; /* since the last sample; grows while the driver hangs */
    uint64_t known;  /* bit i: values[i] was told by this driver for this GPU */
    uint64_t values[MU_GPU_READINGS];
    uint64_t xid_count; /* so far */
    uint32_t last_xid;  /* 0: none */
    bool unhealthy;     /* for good: do not begin another collective. `text` says why */
    char driver[32], text[192];
};

struct mu_nvml_config {
    const char *library;    /* NULL: libnvidia-ml.so.1 */
    const char *pci_bus_id; /* as cudaDeviceGetPCIBusId says it; copied */
    uint32_t interval_ms;   /* between samples; 0: 1000 */
};

struct mu_nvml;

enum mu_status mu_nvml_start(const struct mu_nvml_config *config, struct mu_nvml **ret_nvml,
                             struct mu_error *err) MU_WARN_UNUSED;
void mu_nvml_read(struct mu_nvml *nvml, struct mu_gpu_sample *ret_sample);
/* Waits for at most half a second. NULL is fine. */
void mu_nvml_stop(struct mu_nvml *nvml);

/* "power cap, thermal slowdown by hardware", or "none"; `out` of at least 128 bytes is enough. */
void mu_gpu_throttle_text(uint64_t reasons, char *out, size_t size);

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
