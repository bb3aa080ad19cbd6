#include "worker/nvml.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "worker/nvml_abi.h"

enum {
    SLICE_MS = 100, /* a stop is seen after at most this */
    STOP_MS = 500,
    BUS_ID_SIZE = 32,
};

#define DECLARE(name, arguments) int(*name) arguments;
struct library {
    void *handle;
    const char *(*nvmlErrorString)(int);
    NVML_FUNCTIONS(DECLARE)
};
#undef DECLARE

/* Shared by the owner and the thread; the last one to leave frees it. */
struct mu_nvml {
    char library_name[256], bus_id[BUS_ID_SIZE];
    uint32_t interval_ms;
    int alarm_fd;

    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct mu_gpu_sample sample;
    uint64_t sampled_us;
    bool stopping, ended, abandoned; /* asked to end; the thread has; it hangs, and frees this when it comes back */

    /* the thread's own */
    struct library api;
    nvmlDevice_t device;
    nvmlEventSet_t events; /* NULL: this GPU has none */
};

/* ---- what the thread tells ---- */

static void tell(struct mu_nvml *nvml, enum mu_gpu_watch watch, const char *fmt, ...) MU_PRINTF(3, 4);
static void tell(struct mu_nvml *nvml, enum mu_gpu_watch watch, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    pthread_mutex_lock(&nvml->lock);
    nvml->sample.watch = watch;
    vsnprintf(nvml->sample.text, sizeof nvml->sample.text, fmt, args);
    pthread_mutex_unlock(&nvml->lock);
    va_end(args);
}

/* The first reason stays, and is the one that raises the alarm: not any more where nobody waits for it. */
static void tell_unhealthy(struct mu_nvml *nvml, const char *fmt, ...) MU_PRINTF(2, 3);
static void tell_unhealthy(struct mu_nvml *nvml, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    pthread_mutex_lock(&nvml->lock);
    if (!nvml->sample.unhealthy) {
        int used = snprintf(nvml->sample.text, sizeof nvml->sample.text, "GPU %s: ", nvml->bus_id);
        vsnprintf(nvml->sample.text + used, sizeof nvml->sample.text - (size_t)used, fmt, args);
        nvml->sample.unhealthy = true;
        if (nvml->alarm_fd >= 0 && !nvml->abandoned)
            (void)!write(nvml->alarm_fd, &(uint64_t){1}, sizeof(uint64_t));
    }
    pthread_mutex_unlock(&nvml->lock);
    va_end(args);
}

/* ---- readings ---- */

/* Of one round: told at once at its end. */
struct round {
    struct mu_nvml *nvml;
    uint64_t known, values[MU_GPU_READINGS];
};

/* Keeps a value if the call worked. What a GPU does not have is no error. */
static void take(struct round *round, enum mu_gpu_reading reading, int result, uint64_t value)
{
    if (result == NVML_ERROR_GPU_IS_LOST)
        tell_unhealthy(round->nvml, "the driver has lost it (fallen off the bus)");
    if (result == NVML_ERROR_RESET_REQUIRED)
        tell_unhealthy(round->nvml, "the driver says that it must be reset");
    if (result != NVML_SUCCESS)
        return;
    round->known |= 1ull << reading;
    round->values[reading] = value;
}

/* Calls a function of the library if there is one. */
#define CALL(name, ...) (api->name ? api->name(__VA_ARGS__) : NVML_ERROR_NOT_SUPPORTED)

static void read_rates(struct round *round)
{
    const struct library *api = &round->nvml->api;
    nvmlDevice_t device = round->nvml->device;
    nvmlUtilization_t rates = {0};
    nvmlMemory_t memory = {0};
    unsigned int value = 0;
    unsigned long long reasons = 0;
    int result = CALL(nvmlDeviceGetUtilizationRates, device, &rates);
    take(round, MU_GPU_UTILISATION_PERCENT, result, rates.gpu);
    take(round, MU_GPU_MEMORY_UTILISATION_PERCENT, result, rates.memory);
    result = CALL(nvmlDeviceGetMemoryInfo, device, &memory);
    take(round, MU_GPU_MEMORY_USED_BYTES, result, memory.used);
    take(round, MU_GPU_MEMORY_TOTAL_BYTES, result, memory.total);
    result = CALL(nvmlDeviceGetPowerUsage, device, &value);
    take(round, MU_GPU_POWER_MW, result, value);
    result = CALL(nvmlDeviceGetEnforcedPowerLimit, device, &value);
    take(round, MU_GPU_POWER_LIMIT_MW, result, value);
    result = CALL(nvmlDeviceGetTemperature, device, NVML_TEMPERATURE_GPU, &value);
    take(round, MU_GPU_TEMPERATURE_C, result, value);
    result = CALL(nvmlDeviceGetClockInfo, device, NVML_CLOCK_SM, &value);
    take(round, MU_GPU_SM_CLOCK_MHZ, result, value);
    result = CALL(nvmlDeviceGetClockInfo, device, NVML_CLOCK_MEM, &value);
    take(round, MU_GPU_MEMORY_CLOCK_MHZ, result, value);
    result = CALL(nvmlDeviceGetCurrentClocksThrottleReasons, device, &reasons);
    take(round, MU_GPU_THROTTLE_REASONS, result, reasons);
    result = CALL(nvmlDeviceGetPcieThroughput, device, NVML_PCIE_UTIL_TX_BYTES, &value);
    take(round, MU_GPU_PCIE_SENT_KIB_PER_S, result, value);
    result = CALL(nvmlDeviceGetPcieThroughput, device, NVML_PCIE_UTIL_RX_BYTES, &value);
    take(round, MU_GPU_PCIE_RECEIVED_KIB_PER_S, result, value);
}

static uint64_t whole(const nvmlFieldValue_t *field)
{
    switch (field->valueType) {
    case NVML_VALUE_TYPE_DOUBLE:
        return (uint64_t)field->value.d;
    case NVML_VALUE_TYPE_UNSIGNED_INT:
        return field->value.u;
    case NVML_VALUE_TYPE_UNSIGNED_LONG:
        return field->value.ul;
    case NVML_VALUE_TYPE_SIGNED_INT:
        return (uint64_t)field->value.i;
    case NVML_VALUE_TYPE_UNSIGNED_SHORT:
        return field->value.us;
    default:
        return field->value.ull;
    }
}

static void read_fields(struct round *round)
{
    static const struct {
        enum mu_gpu_reading reading;
        unsigned int field, scope;
    } wanted[] = {
        {MU_GPU_MEMORY_TEMPERATURE_C, NVML_FI_DEV_MEMORY_TEMP, 0},
        {MU_GPU_ECC_CORRECTED, NVML_FI_DEV_ECC_SBE_VOL_TOTAL, 0},
        {MU_GPU_ECC_UNCORRECTED, NVML_FI_DEV_ECC_DBE_VOL_TOTAL, 0},
        {MU_GPU_ROWS_REMAPPED_CORRECTABLE, NVML_FI_DEV_REMAPPED_COR, 0},
        {MU_GPU_ROWS_REMAPPED_UNCORRECTABLE, NVML_FI_DEV_REMAPPED_UNC, 0},
        {MU_GPU_ROW_REMAP_PENDING, NVML_FI_DEV_REMAPPED_PENDING, 0},
        {MU_GPU_ROW_REMAP_FAILED, NVML_FI_DEV_REMAPPED_FAILURE, 0},
        {MU_GPU_NVLINK_CRC_ERRORS, NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, 0},
        {MU_GPU_NVLINK_REPLAYS, NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, 0},
        {MU_GPU_NVLINK_RECOVERIES, NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL, 0},
        {MU_GPU_NVLINK_SENT_KIB, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ~0u}, /* scope: all links */
        {MU_GPU_NVLINK_RECEIVED_KIB, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ~0u},
        {MU_GPU_PCIE_REPLAYS, NVML_FI_DEV_PCIE_REPLAY_COUNTER, 0},
        {MU_GPU_RECOVERY_ACTION, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 0},
    };
    enum { COUNT = sizeof wanted / sizeof wanted[0] };
    const struct library *api = &round->nvml->api;
    nvmlFieldValue_t fields[COUNT] = {0};
    for (int i = 0; i < COUNT; i++) {
        fields[i].fieldId = wanted[i].field;
        fields[i].scopeId = wanted[i].scope;
    }
    int result = CALL(nvmlDeviceGetFieldValues, round->nvml->device, COUNT, fields);
    for (int i = 0; i < COUNT; i++)
        take(round, wanted[i].reading, result != NVML_SUCCESS ? result : fields[i].nvmlReturn, whole(&fields[i]));
}

/* What the readings say about the GPU itself. */
static void judge(const struct round *round)
{
    const uint64_t *values = round->values; /* 0 when not known */
    if (values[MU_GPU_ROW_REMAP_FAILED])
        tell_unhealthy(round->nvml, "a row of its memory could not be remapped: replace it");
    switch (values[MU_GPU_RECOVERY_ACTION]) {
    case NVML_GPU_RECOVERY_ACTION_GPU_RESET:
    case NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET:
    case NVML_GPU_RECOVERY_ACTION_BUS_RESET:
        tell_unhealthy(round->nvml, "the driver wants it to be reset (recovery action %u)",
                       (unsigned)values[MU_GPU_RECOVERY_ACTION]);
        break;
    case NVML_GPU_RECOVERY_ACTION_NODE_REBOOT:
    case NVML_GPU_RECOVERY_ACTION_SYSTEM_REBOOT:
        tell_unhealthy(round->nvml, "the driver wants the host to be restarted (recovery action %u)",
                       (unsigned)values[MU_GPU_RECOVERY_ACTION]);
        break;
    default:
        break;
    }
}

static void sample_once(struct mu_nvml *nvml)
{
    struct round round = {.nvml = nvml};
    read_rates(&round);
    read_fields(&round);
    judge(&round);
    pthread_mutex_lock(&nvml->lock);
    nvml->sample.watch = MU_GPU_WATCHED;
    nvml->sample.known = round.known;
    memcpy(nvml->sample.values, round.values, sizeof round.values);
    nvml->sampled_us = mu_clock_mono_us();
    pthread_mutex_unlock(&nvml->lock);
}

/* ---- events ---- */

static void note_xid(struct mu_nvml *nvml, uint32_t number)
{
    const struct mu_xid *xid = mu_xid_find(number);
    pthread_mutex_lock(&nvml->lock);
    nvml->sample.last_xid = number;
    nvml->sample.xid_count++;
    pthread_mutex_unlock(&nvml->lock);
    if (xid->class == MU_XID_FATAL)
        tell_unhealthy(nvml, "Xid %u, %s", number, xid->meaning);
}

static bool stopping(struct mu_nvml *nvml)
{
    pthread_mutex_lock(&nvml->lock);
    bool stop = nvml->stopping;
    pthread_mutex_unlock(&nvml->lock);
    return stop;
}

/* Waits for events until the next sample is due. */
static void listen(struct mu_nvml *nvml, uint64_t until_us)
{
    const struct library *api = &nvml->api;
    for (uint64_t now_us = mu_clock_mono_us(); !stopping(nvml) && now_us < until_us; now_us = mu_clock_mono_us()) {
        unsigned int slice_ms =
            until_us - now_us < SLICE_MS * 1000 ? (unsigned int)((until_us - now_us) / 1000) + 1 : SLICE_MS;
        nvmlEventData_t event = {0};
        int result = nvml->events ? CALL(nvmlEventSetWait_v2, nvml->events, &event, slice_ms) : NVML_ERROR_UNKNOWN;
        if (result == NVML_SUCCESS && event.eventType == NVML_EVENT_XID_CRITICAL_ERROR)
            note_xid(nvml, (uint32_t)event.eventData);
        if (result == NVML_ERROR_GPU_IS_LOST)
            tell_unhealthy(nvml, "the driver has lost it (fallen off the bus)");
        if (result != NVML_SUCCESS && result != NVML_ERROR_TIMEOUT) { /* no events: sleep instead */
            struct timespec slice = {.tv_nsec = (long)slice_ms * 1000000};
            nanosleep(&slice, NULL);
        }
    }
}

/* ---- the thread ---- */

static bool load(struct mu_nvml *nvml)
{
    struct library *api = &nvml->api;
    api->handle = dlopen(nvml->library_name, RTLD_NOW | RTLD_LOCAL);
    if (!api->handle) {
        tell(nvml, MU_GPU_UNWATCHED, "health of GPUs is not watched: %s (it comes with NVIDIA's driver)", dlerror());
        return false;
    }
    /* A function pointer from dlsym, without a cast that C does not define. */
#define LOAD(name, arguments) *(void **)(&api->name) = dlsym(api->handle, #name);
    NVML_FUNCTIONS(LOAD)
    LOAD(nvmlErrorString, )
#undef LOAD
    if (api->nvmlInit_v2 && api->nvmlDeviceGetHandleByPciBusId_v2 && api->nvmlErrorString)
        return true;
    tell(nvml, MU_GPU_UNWATCHED, "health of GPUs is not watched: %s is not NVIDIA's management library",
         nvml->library_name);
    return false;
}

static bool attach(struct mu_nvml *nvml)
{
    const struct library *api = &nvml->api;
    int result = api->nvmlInit_v2();
    const char *hint =
        result == NVML_ERROR_LIB_RM_VERSION_MISMATCH ? " (the driver was updated: restart the host)" : "";
    if (result != NVML_SUCCESS) {
        tell(nvml, MU_GPU_UNWATCHED, "health of GPUs is not watched: %s%s", api->nvmlErrorString(result), hint);
        return false;
    }
    result = api->nvmlDeviceGetHandleByPciBusId_v2(nvml->bus_id, &nvml->device);
    if (result != NVML_SUCCESS) {
        tell(nvml, MU_GPU_UNWATCHED, "health of GPU %s is not watched: %s", nvml->bus_id, api->nvmlErrorString(result));
        if (result == NVML_ERROR_GPU_IS_LOST)
            tell_unhealthy(nvml, "the driver has lost it (fallen off the bus)");
        return false;
    }
    char driver[sizeof nvml->sample.driver] = "";
    (void)CALL(nvmlSystemGetDriverVersion, driver, sizeof driver);
    pthread_mutex_lock(&nvml->lock);
    memcpy(nvml->sample.driver, driver, sizeof driver);
    pthread_mutex_unlock(&nvml->lock);
    if (CALL(nvmlEventSetCreate, &nvml->events) != NVML_SUCCESS ||
        CALL(nvmlDeviceRegisterEvents, nvml->device, NVML_EVENT_XID_CRITICAL_ERROR, nvml->events) != NVML_SUCCESS)
        nvml->events = NULL;
    return true;
}

static void destroy(struct mu_nvml *nvml)
{
    pthread_cond_destroy(&nvml->changed);
    pthread_mutex_destroy(&nvml->lock);
    free(nvml);
}

/* Neither the library nor what it made is given back: other threads of the process may use it, and it may hang. */
static void *watch(void *arg)
{
    struct mu_nvml *nvml = arg;
    if (load(nvml) && attach(nvml)) {
        while (!stopping(nvml)) {
            uint64_t begun_us = mu_clock_mono_us();
            sample_once(nvml);
            listen(nvml, begun_us + nvml->interval_ms * 1000ull);
        }
    }
    pthread_mutex_lock(&nvml->lock);
    bool abandoned = nvml->abandoned;
    nvml->ended = true;
    pthread_cond_signal(&nvml->changed);
    pthread_mutex_unlock(&nvml->lock);
    if (abandoned)
        destroy(nvml);
    return NULL;
}

static void init_condition(pthread_cond_t *condition)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

enum mu_status mu_nvml_start(const struct mu_nvml_config *config, struct mu_nvml **ret_nvml, struct mu_error *err)
{
    struct mu_nvml *nvml = calloc(1, sizeof *nvml);
    pthread_t thread;
    pthread_attr_t attributes;
    if (!nvml)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the watch of a GPU");
    snprintf(nvml->library_name, sizeof nvml->library_name, "%s",
             config->library ? config->library : "libnvidia-ml.so.1");
    snprintf(nvml->bus_id, sizeof nvml->bus_id, "%s", config->pci_bus_id);
    nvml->interval_ms = config->interval_ms > 0 ? config->interval_ms : 1000;
    nvml->alarm_fd = config->alarm_fd;
    nvml->sampled_us = mu_clock_mono_us();
    pthread_mutex_init(&nvml->lock, NULL);
    init_condition(&nvml->changed);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    int error = pthread_create(&thread, &attributes, watch, nvml);
    pthread_attr_destroy(&attributes);
    if (error != 0) {
        destroy(nvml);
        return mu_fail_errno(err, error, "no thread for the watch of a GPU");
    }
    *ret_nvml = nvml;
    return MU_OK;
}

void mu_nvml_read(struct mu_nvml *nvml, struct mu_gpu_sample *ret_sample)
{
    uint64_t now_us = mu_clock_mono_us();
    pthread_mutex_lock(&nvml->lock);
    *ret_sample = nvml->sample;
    ret_sample->age_us = now_us > nvml->sampled_us ? now_us - nvml->sampled_us : 0;
    pthread_mutex_unlock(&nvml->lock);
}

void mu_nvml_stop(struct mu_nvml *nvml)
{
    if (!nvml)
        return;
    uint64_t deadline_us = mu_clock_mono_us() + STOP_MS * 1000ull;
    struct timespec until = {.tv_sec = (time_t)(deadline_us / 1000000),
                             .tv_nsec = (long)(deadline_us % 1000000) * 1000};
    pthread_mutex_lock(&nvml->lock);
    nvml->stopping = true;
    int waited = 0;
    while (!nvml->ended && waited == 0)
        waited = pthread_cond_timedwait(&nvml->changed, &nvml->lock, &until);
    bool ended = nvml->ended;
    nvml->abandoned = !ended;
    pthread_mutex_unlock(&nvml->lock);
    if (ended)
        destroy(nvml);
}
