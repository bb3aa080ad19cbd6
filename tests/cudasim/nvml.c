/* Values, errors, events and hangs of tests/cudasim/nvml.h. */
#include "tests/cudasim/nvml.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "worker/nvml_abi.h"

enum { ENTRIES = 64, FIELDS = 256, XIDS = 16 };

struct entry {
    char name[64];
    unsigned long long value;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct entry values[ENTRIES], failures[ENTRIES];
static unsigned long long fields[FIELDS];
static unsigned int xids[XIDS];
static int xid_count, hung_count;
static char hanging[64];

nvml_sim_set_field cudasim_nvml_set_field;
nvml_sim_set cudasim_nvml_set;
nvml_sim_fail cudasim_nvml_fail;
nvml_sim_xid cudasim_nvml_xid;
nvml_sim_hang cudasim_nvml_hang;
nvml_sim_hung cudasim_nvml_hung;

static unsigned long long find(const struct entry *entries, const char *name)
{
    for (int i = 0; i < ENTRIES; i++)
        if (strcmp(entries[i].name, name) == 0)
            return entries[i].value;
    return 0;
}

static void store(struct entry *entries, const char *name, unsigned long long value)
{
    pthread_mutex_lock(&lock);
    int at = 0;
    while (at < ENTRIES - 1 && entries[at].name[0] && strcmp(entries[at].name, name) != 0)
        at++;
    snprintf(entries[at].name, sizeof entries[at].name, "%s", name);
    entries[at].value = value;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void obey(const char *line)
{
    char word[16], name[64];
    unsigned long long value = 0;
    if (sscanf(line, "%15s %63s %llu", word, name, &value) < 2)
        return;
    if (strcmp(word, "xid") == 0)
        cudasim_nvml_xid((unsigned int)strtoul(name, NULL, 10));
    else if (strcmp(word, "field") == 0)
        cudasim_nvml_set_field((unsigned int)strtoul(name, NULL, 10), value);
    else if (strcmp(word, "set") == 0)
        cudasim_nvml_set(name, value);
    else if (strcmp(word, "fail") == 0)
        cudasim_nvml_fail(name, (int)value);
    else if (strcmp(word, "hang") == 0)
        cudasim_nvml_hang(name);
}

/* What has been written to the file since. */
static void look_into_file(void)
{
    static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
    static long done;
    const char *path = getenv("CUDASIM_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[128];
    if (!file)
        return;
    pthread_mutex_lock(&one_at_a_time);
    fseek(file, done, SEEK_SET);
    while (fgets(line, sizeof line, file) && strchr(line, '\n')) {
        done = ftell(file);
        obey(line);
    }
    pthread_mutex_unlock(&one_at_a_time);
    fclose(file);
}

/* First line of every call: waits while it is to hang. Returns its error. */
static int enter(const char *function)
{
    look_into_file();
    pthread_mutex_lock(&lock);
    hung_count++;
    if (strcmp(hanging, function) == 0)
        fprintf(stderr, "cudasim: %s hangs\n", function);
    while (strcmp(hanging, function) == 0)
        pthread_cond_wait(&changed, &lock);
    hung_count--;
    int code = (int)find(failures, function);
    pthread_mutex_unlock(&lock);
    return code;
}

static unsigned long long value_of(const char *name)
{
    pthread_mutex_lock(&lock);
    unsigned long long value = find(values, name);
    pthread_mutex_unlock(&lock);
    return value;
}

/* ---- steering ---- */

void cudasim_nvml_set_field(unsigned int field, unsigned long long value)
{
    pthread_mutex_lock(&lock);
    fields[field % FIELDS] = value;
    pthread_mutex_unlock(&lock);
}

void cudasim_nvml_set(const char *name, unsigned long long value)
{
    store(values, name, value);
}

void cudasim_nvml_fail(const char *function, int code)
{
    store(failures, function, (unsigned long long)code);
}

void cudasim_nvml_xid(unsigned int number)
{
    pthread_mutex_lock(&lock);
    if (xid_count < XIDS)
        xids[xid_count++] = number;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

void cudasim_nvml_hang(const char *function)
{
    pthread_mutex_lock(&lock);
    snprintf(hanging, sizeof hanging, "%s", function ? function : "");
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

int cudasim_nvml_hung(void)
{
    pthread_mutex_lock(&lock);
    int count = hanging[0] ? hung_count : 0;
    pthread_mutex_unlock(&lock);
    return count;
}

/* ---- the library ---- */

#define DECLARE(name, arguments) int name arguments;
NVML_FUNCTIONS(DECLARE)
const char *nvmlErrorString(int result);

const char *nvmlErrorString(int result)
{
    return result == NVML_SUCCESS                         ? "Success"
           : result == NVML_ERROR_DRIVER_NOT_LOADED       ? "Driver Not Loaded"
           : result == NVML_ERROR_NOT_FOUND               ? "Not Found"
           : result == NVML_ERROR_GPU_IS_LOST             ? "GPU is lost"
           : result == NVML_ERROR_LIB_RM_VERSION_MISMATCH ? "Driver/library version mismatch"
                                                          : "Unknown Error";
}

int nvmlInit_v2(void)
{
    return enter("nvmlInit_v2");
}

int nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    snprintf(version, length, "580.82.07");
    return enter("nvmlSystemGetDriverVersion");
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, nvmlDevice_t *device)
{
    static int gpu;
    int code = enter("nvmlDeviceGetHandleByPciBusId_v2");
    *device = (nvmlDevice_t)(void *)&gpu;
    int missing = strncmp(bus, CUDASIM_NVML_BUS_ID, 5) != 0; /* any of its domain */
    return code ? code : missing ? NVML_ERROR_NOT_FOUND : NVML_SUCCESS;
}

int nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates)
{
    (void)device;
    rates->gpu = (unsigned int)value_of("nvmlDeviceGetUtilizationRates");
    rates->memory = (unsigned int)value_of("memory");
    return enter("nvmlDeviceGetUtilizationRates");
}

int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    (void)device;
    memory->used = value_of("used");
    memory->total = value_of("total");
    memory->free = memory->total - memory->used;
    return enter("nvmlDeviceGetMemoryInfo");
}

/* A number that needs nothing but the device. */
static int simple(const char *function, unsigned int *value)
{
    *value = (unsigned int)value_of(function);
    return enter(function);
}

int nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *mw)
{
    (void)device;
    return simple("nvmlDeviceGetPowerUsage", mw);
}

int nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned int *mw)
{
    (void)device;
    return simple("nvmlDeviceGetEnforcedPowerLimit", mw);
}

int nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned int *celsius)
{
    (void)device;
    (void)sensor;
    return simple("nvmlDeviceGetTemperature", celsius);
}

int nvmlDeviceGetClockInfo(nvmlDevice_t device, int type, unsigned int *mhz)
{
    (void)device;
    return simple(type == NVML_CLOCK_SM ? "sm clock" : "memory clock", mhz);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    (void)device;
    *reasons = value_of("nvmlDeviceGetCurrentClocksThrottleReasons");
    return enter("nvmlDeviceGetCurrentClocksThrottleReasons");
}

int nvmlDeviceGetPcieThroughput(nvmlDevice_t device, int counter, unsigned int *kib_per_s)
{
    (void)device;
    return simple(counter == NVML_PCIE_UTIL_TX_BYTES ? "pcie sent" : "pcie received", kib_per_s);
}

int nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *asked)
{
    (void)device;
    for (int i = 0; i < count; i++) {
        char name[32];
        snprintf(name, sizeof name, "field:%u", asked[i].fieldId);
        asked[i].nvmlReturn = enter(name);
        pthread_mutex_lock(&lock);
        unsigned long long value = fields[asked[i].fieldId % FIELDS];
        pthread_mutex_unlock(&lock);
        /* Types differ from field to field in the real one too. */
        asked[i].valueType = asked[i].fieldId % 2 ? NVML_VALUE_TYPE_UNSIGNED_INT : NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
        memset(&asked[i].value, 0xff, sizeof asked[i].value);
        if (asked[i].fieldId % 2)
            asked[i].value.u = (unsigned int)value;
        else
            asked[i].value.ull = value;
    }
    return enter("nvmlDeviceGetFieldValues");
}

int nvmlEventSetCreate(nvmlEventSet_t *set)
{
    static int events;
    *set = (nvmlEventSet_t)(void *)&events;
    return enter("nvmlEventSetCreate");
}

int nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
    (void)device;
    (void)types;
    (void)set;
    return enter("nvmlDeviceRegisterEvents");
}

int nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *event, unsigned int timeout_ms)
{
    (void)set;
    int code = enter("nvmlEventSetWait_v2");
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += (long)timeout_ms * 1000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&lock);
    int waited = 0;
    while (code == 0 && xid_count == 0 && waited == 0)
        waited = pthread_cond_timedwait(&changed, &lock, &until);
    bool got = code == 0 && xid_count > 0;
    if (got) {
        event->eventType = NVML_EVENT_XID_CRITICAL_ERROR;
        event->eventData = xids[0];
        memmove(xids, xids + 1, (size_t)--xid_count * sizeof xids[0]);
    }
    pthread_mutex_unlock(&lock);
    return got ? NVML_SUCCESS : code ? code : NVML_ERROR_TIMEOUT;
}
