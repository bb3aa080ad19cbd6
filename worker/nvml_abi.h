/* What worker/nvml.c uses of NVIDIA's management library, as in its nvml.h: the library comes with the driver and is
 * loaded at run time, so that neither its header nor the library is needed to build or to start. The layouts are part
 * of its stable binary interface. Shared with the stand-in of the tests. */
#ifndef MU_WORKER_NVML_ABI_H
#define MU_WORKER_NVML_ABI_H

enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_TIMEOUT = 10,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_RESET_REQUIRED = 16,
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18,
    NVML_ERROR_UNKNOWN = 999,
};

typedef struct nvmlDevice_st *nvmlDevice_t;
typedef struct nvmlEventSet_st *nvmlEventSet_t;

typedef struct {
    unsigned int gpu, memory; /* percent */
} nvmlUtilization_t;

typedef struct {
    unsigned long long total, free, used; /* bytes */
} nvmlMemory_t;

typedef union {
    double d;
    int i;
    unsigned int u;
    unsigned long ul;
    unsigned long long ull;
    long long ll;
    unsigned short us;
} nvmlValue_t;

enum {
    NVML_VALUE_TYPE_DOUBLE = 0,
    NVML_VALUE_TYPE_UNSIGNED_INT = 1,
    NVML_VALUE_TYPE_UNSIGNED_LONG = 2,
    NVML_VALUE_TYPE_UNSIGNED_LONG_LONG = 3,
    NVML_VALUE_TYPE_SIGNED_LONG_LONG = 4,
    NVML_VALUE_TYPE_SIGNED_INT = 5,
    NVML_VALUE_TYPE_UNSIGNED_SHORT = 6,
};

typedef struct {
    unsigned int fieldId, scopeId;
    long long timestamp, latencyUsec;
    int valueType;  /* an enumeration there */
    int nvmlReturn; /* likewise */
    nvmlValue_t value;
} nvmlFieldValue_t;

enum {
    NVML_FI_DEV_ECC_SBE_VOL_TOTAL = 3,
    NVML_FI_DEV_ECC_DBE_VOL_TOTAL = 4,
    NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL = 38,
    NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL = 52,
    NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL = 59,
    NVML_FI_DEV_MEMORY_TEMP = 82,
    NVML_FI_DEV_PCIE_REPLAY_COUNTER = 94,
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138,
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 139,
    NVML_FI_DEV_REMAPPED_COR = 142,
    NVML_FI_DEV_REMAPPED_UNC = 143,
    NVML_FI_DEV_REMAPPED_PENDING = 144,
    NVML_FI_DEV_REMAPPED_FAILURE = 145,
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230,
};

enum { /* nvmlDeviceGpuRecoveryAction_t */
       NVML_GPU_RECOVERY_ACTION_NONE = 0,
       NVML_GPU_RECOVERY_ACTION_GPU_RESET = 1,
       NVML_GPU_RECOVERY_ACTION_NODE_REBOOT = 2,
       NVML_GPU_RECOVERY_ACTION_DRAIN_P2P = 3,
       NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET = 4,
       NVML_GPU_RECOVERY_ACTION_RECOVER_IMEX_DOMAIN = 5,
       NVML_GPU_RECOVERY_ACTION_BUS_RESET = 6,
       NVML_GPU_RECOVERY_ACTION_SYSTEM_REBOOT = 7,
};

typedef struct {
    nvmlDevice_t device;
    unsigned long long eventType, eventData;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlEventData_t;

enum { NVML_EVENT_XID_CRITICAL_ERROR = 8 };
enum { NVML_TEMPERATURE_GPU = 0 };
enum { NVML_CLOCK_SM = 1, NVML_CLOCK_MEM = 2 };
enum { NVML_PCIE_UTIL_TX_BYTES = 0, NVML_PCIE_UTIL_RX_BYTES = 1 };

/* The functions: name and arguments. Enumerations are int. */
#define NVML_FUNCTIONS(X)                                                                                              \
    X(nvmlInit_v2, (void))                                                                                             \
    X(nvmlSystemGetDriverVersion, (char *version, unsigned int length))                                                \
    X(nvmlDeviceGetHandleByPciBusId_v2, (const char *bus, nvmlDevice_t *device))                                       \
    X(nvmlDeviceGetUtilizationRates, (nvmlDevice_t device, nvmlUtilization_t * rates))                                 \
    X(nvmlDeviceGetMemoryInfo, (nvmlDevice_t device, nvmlMemory_t * memory))                                           \
    X(nvmlDeviceGetPowerUsage, (nvmlDevice_t device, unsigned int *mw))                                                \
    X(nvmlDeviceGetEnforcedPowerLimit, (nvmlDevice_t device, unsigned int *mw))                                        \
    X(nvmlDeviceGetTemperature, (nvmlDevice_t device, int sensor, unsigned int *celsius))                              \
    X(nvmlDeviceGetClockInfo, (nvmlDevice_t device, int type, unsigned int *mhz))                                      \
    X(nvmlDeviceGetCurrentClocksThrottleReasons, (nvmlDevice_t device, unsigned long long *reasons))                   \
    X(nvmlDeviceGetPcieThroughput, (nvmlDevice_t device, int counter, unsigned int *kib_per_s))                        \
    X(nvmlDeviceGetFieldValues, (nvmlDevice_t device, int count, nvmlFieldValue_t *values))                            \
    X(nvmlEventSetCreate, (nvmlEventSet_t * set))                                                                      \
    X(nvmlDeviceRegisterEvents, (nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set))                   \
    X(nvmlEventSetWait_v2, (nvmlEventSet_t set, nvmlEventData_t * event, unsigned int timeout_ms))

#endif
