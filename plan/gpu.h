/* Health of one GPU, as the driver tells it to its worker (worker/nvml.h), which tells the coordinator along with its
 * vital signs (plan/session.h). Plain values. */
#ifndef MU_PLAN_GPU_H
#define MU_PLAN_GPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* In the order of the fields of GpuSigns (proto/muster/v1/job.proto). */
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

/* MU_GPU_THROTTLE_REASONS: nvmlClocksEventReasons. */
enum {
    MU_GPU_THROTTLE_POWER_CAP = 0x4,
    MU_GPU_THROTTLE_HARDWARE = 0x8,
    MU_GPU_THROTTLE_SYNC_BOOST = 0x10,
    MU_GPU_THROTTLE_THERMAL_SOFTWARE = 0x20,
    MU_GPU_THROTTLE_THERMAL_HARDWARE = 0x40,
    MU_GPU_THROTTLE_POWER_BRAKE = 0x80,
    /* Not what it does under full load anyway, but what somebody should look after. */
    MU_GPU_THROTTLE_FAULTS = MU_GPU_THROTTLE_HARDWARE | MU_GPU_THROTTLE_THERMAL_SOFTWARE |
                             MU_GPU_THROTTLE_THERMAL_HARDWARE | MU_GPU_THROTTLE_POWER_BRAKE
};

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

static inline bool mu_gpu_knows(const struct mu_gpu_sample *sample, enum mu_gpu_reading reading)
{
    return sample->known >> reading & 1;
}

/* "power cap, thermal slowdown by hardware", or "none"; `out` of at least 128 bytes is enough. */
void mu_gpu_throttle_text(uint64_t reasons, char *out, size_t size);

#endif
