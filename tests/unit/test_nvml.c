/* links: mu_nvml mu_test_nvml */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "tests/cudasim/nvml.h"
#include "worker/nvml.h"
#include "worker/nvml_abi.h"

enum { PATIENCE_US = 120 * 1000000 };

/* The stand-in, in the same object that the watch loads. */
static struct {
    void *handle;
    nvml_sim_set_field *set_field;
    nvml_sim_set *set;
    nvml_sim_fail *fail_with;
    nvml_sim_xid *xid;
    nvml_sim_hang *hang;
    nvml_sim_hung *hung;
} sim;

static int load_stand_in(void **state)
{
    (void)state;
    sim.handle = dlopen(MU_NVML_STAND_IN, RTLD_NOW | RTLD_LOCAL);
    if (!sim.handle)
        print_error("%s\n", dlerror());
    *(void **)&sim.set_field = dlsym(sim.handle, "cudasim_nvml_set_field");
    *(void **)&sim.set = dlsym(sim.handle, "cudasim_nvml_set");
    *(void **)&sim.fail_with = dlsym(sim.handle, "cudasim_nvml_fail");
    *(void **)&sim.xid = dlsym(sim.handle, "cudasim_nvml_xid");
    *(void **)&sim.hang = dlsym(sim.handle, "cudasim_nvml_hang");
    *(void **)&sim.hung = dlsym(sim.handle, "cudasim_nvml_hung");
    return sim.handle && sim.hung ? 0 : -1;
}

static int alarm_fd = -1;

static struct mu_nvml *start(const char *library, const char *bus_id)
{
    struct mu_nvml *nvml = NULL;
    struct mu_nvml_config config = {.library = library, .pci_bus_id = bus_id, .interval_ms = 1, .alarm_fd = alarm_fd};
    assert_int_equal(mu_nvml_start(&config, &nvml, NULL), MU_OK);
    return nvml;
}

#define UNTIL(nvml, sample, condition)                                                                                 \
    do {                                                                                                               \
        uint64_t until_us = mu_clock_mono_us() + PATIENCE_US;                                                          \
        for (mu_nvml_read(nvml, &(sample)); !(condition); mu_nvml_read(nvml, &(sample))) {                             \
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);                                                   \
            if (mu_clock_mono_us() > until_us)                                                                         \
                fail_msg("did not happen: %s; \"%s\"", #condition, (sample).text);                                     \
        }                                                                                                              \
    } while (0)

static void test_values_are_read_and_what_is_missing_is_unknown(void **state)
{
    (void)state;
    struct mu_gpu_sample s;
    static const struct {
        enum mu_gpu_reading reading;
        const char *name;
        unsigned int field;
        uint64_t value;
    } values[] = {
        {MU_GPU_UTILISATION_PERCENT, "nvmlDeviceGetUtilizationRates", 0, 97},
        {MU_GPU_MEMORY_UTILISATION_PERCENT, "memory", 0, 41},
        {MU_GPU_MEMORY_USED_BYTES, "used", 0, 139ull << 30},
        {MU_GPU_MEMORY_TOTAL_BYTES, "total", 0, 141ull << 30},
        {MU_GPU_POWER_MW, "nvmlDeviceGetPowerUsage", 0, 698123},
        {MU_GPU_POWER_LIMIT_MW, "nvmlDeviceGetEnforcedPowerLimit", 0, 700000},
        {MU_GPU_TEMPERATURE_C, "nvmlDeviceGetTemperature", 0, 61},
        {MU_GPU_SM_CLOCK_MHZ, "sm clock", 0, 1980},
        {MU_GPU_MEMORY_CLOCK_MHZ, "memory clock", 0, 3201},
        {MU_GPU_THROTTLE_REASONS, "nvmlDeviceGetCurrentClocksThrottleReasons", 0, 0x44},
        {MU_GPU_PCIE_SENT_KIB_PER_S, "pcie sent", 0, 1000},
        {MU_GPU_PCIE_RECEIVED_KIB_PER_S, "pcie received", 0, 2000},
        {MU_GPU_MEMORY_TEMPERATURE_C, NULL, NVML_FI_DEV_MEMORY_TEMP, 70},
        {MU_GPU_ECC_CORRECTED, NULL, NVML_FI_DEV_ECC_SBE_VOL_TOTAL, 12},
        {MU_GPU_ECC_UNCORRECTED, NULL, NVML_FI_DEV_ECC_DBE_VOL_TOTAL, 1},
        {MU_GPU_ROWS_REMAPPED_CORRECTABLE, NULL, NVML_FI_DEV_REMAPPED_COR, 3},
        {MU_GPU_ROWS_REMAPPED_UNCORRECTABLE, NULL, NVML_FI_DEV_REMAPPED_UNC, 2},
        {MU_GPU_ROW_REMAP_PENDING, NULL, NVML_FI_DEV_REMAPPED_PENDING, 1},
        {MU_GPU_NVLINK_CRC_ERRORS, NULL, NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, 5},
        {MU_GPU_NVLINK_REPLAYS, NULL, NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, 6},
        {MU_GPU_NVLINK_RECOVERIES, NULL, NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL, 7},
        {MU_GPU_NVLINK_SENT_KIB, NULL, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, 1ull << 40},
        {MU_GPU_NVLINK_RECEIVED_KIB, NULL, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, 12345},
        {MU_GPU_PCIE_REPLAYS, NULL, NVML_FI_DEV_PCIE_REPLAY_COUNTER, 8},
    };
    enum { COUNT = sizeof values / sizeof values[0] };
    for (size_t i = 0; i < COUNT; i++) {
        if (values[i].name)
            sim.set(values[i].name, values[i].value);
        else
            sim.set_field(values[i].field, values[i].value);
    }
    struct mu_nvml *nvml = start(MU_NVML_STAND_IN, CUDASIM_NVML_BUS_ID);
    UNTIL(nvml, s, s.watch == MU_GPU_WATCHED);
    for (size_t i = 0; i < COUNT; i++) {
        if (!mu_gpu_knows(&s, values[i].reading) || s.values[values[i].reading] != values[i].value)
            fail_msg("reading %d is %llu", (int)values[i].reading, (unsigned long long)s.values[values[i].reading]);
    }
    assert_string_equal(s.driver, "580.82.07");
    assert_false(s.unhealthy);
    assert_int_equal(s.known, (1ull << MU_GPU_READINGS) - 1);
    sim.fail_with("nvmlDeviceGetPowerUsage", NVML_ERROR_NOT_SUPPORTED);
    sim.fail_with("field:82", NVML_ERROR_NOT_SUPPORTED);
    UNTIL(nvml, s, !mu_gpu_knows(&s, MU_GPU_POWER_MW) && !mu_gpu_knows(&s, MU_GPU_MEMORY_TEMPERATURE_C));
    assert_true(mu_gpu_knows(&s, MU_GPU_POWER_LIMIT_MW) && mu_gpu_knows(&s, MU_GPU_ECC_CORRECTED));
    sim.fail_with("nvmlDeviceGetFieldValues", NVML_ERROR_UNKNOWN);
    UNTIL(nvml, s, !mu_gpu_knows(&s, MU_GPU_ECC_CORRECTED));
    assert_true(mu_gpu_knows(&s, MU_GPU_UTILISATION_PERCENT) && !s.unhealthy);
    mu_nvml_stop(nvml);
    sim.fail_with("nvmlDeviceGetPowerUsage", 0);
    sim.fail_with("nvmlDeviceGetFieldValues", 0);
    sim.fail_with("field:82", 0);
}

static void test_xids_are_told_and_fatal_ones_make_it_unhealthy(void **state)
{
    (void)state;
    struct mu_gpu_sample s;
    uint64_t alarms = 0;
    alarm_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    struct mu_nvml *nvml = start(MU_NVML_STAND_IN, CUDASIM_NVML_BUS_ID);
    sim.xid(13);
    sim.xid(63);
    UNTIL(nvml, s, s.xid_count == 2);
    assert_int_equal(s.last_xid, 63);
    assert_false(s.unhealthy);
    assert_int_equal(read(alarm_fd, &alarms, sizeof alarms), -1); /* nobody is woken for these */
    sim.xid(79);
    sim.xid(45); /* comes after it, and does not hide it */
    UNTIL(nvml, s, s.xid_count == 4);
    assert_true(s.unhealthy);
    assert_string_equal(s.text, "GPU 0000:10:00.0: Xid 79, GPU has fallen off the bus");
    assert_int_equal(read(alarm_fd, &alarms, sizeof alarms), sizeof alarms);
    assert_int_equal(alarms, 1);
    mu_nvml_stop(nvml);
    close(alarm_fd);
    alarm_fd = -1;
}

static void test_a_gpu_that_wants_a_reset_is_unhealthy(void **state)
{
    (void)state;
    struct mu_gpu_sample s;
    static const struct {
        unsigned int field;
        uint64_t value;
        bool unhealthy;
        const char *text;
    } cases[] = {
        {NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, NVML_GPU_RECOVERY_ACTION_DRAIN_P2P, false, ""},
        {NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, NVML_GPU_RECOVERY_ACTION_GPU_RESET, true, "reset (recovery action 1)"},
        {NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, NVML_GPU_RECOVERY_ACTION_NODE_REBOOT, true, "the host to be restarted"},
        {NVML_FI_DEV_REMAPPED_FAILURE, 1, true, "could not be remapped"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        sim.set_field(cases[i].field, cases[i].value);
        struct mu_nvml *nvml = start(MU_NVML_STAND_IN, CUDASIM_NVML_BUS_ID);
        UNTIL(nvml, s, s.watch == MU_GPU_WATCHED);
        assert_int_equal(s.unhealthy, cases[i].unhealthy);
        assert_non_null(strstr(s.text, cases[i].text));
        mu_nvml_stop(nvml);
        sim.set_field(cases[i].field, 0);
    }
    sim.fail_with("nvmlDeviceGetTemperature", NVML_ERROR_GPU_IS_LOST);
    struct mu_nvml *nvml = start(MU_NVML_STAND_IN, CUDASIM_NVML_BUS_ID);
    UNTIL(nvml, s, s.unhealthy);
    assert_non_null(strstr(s.text, "fallen off the bus"));
    mu_nvml_stop(nvml);
    sim.fail_with("nvmlDeviceGetTemperature", 0);
}

static void test_without_a_driver_nothing_is_watched(void **state)
{
    (void)state;
    struct mu_gpu_sample s;
    struct mu_nvml *nvml = start("/nonexistent/libnvidia-ml.so.1", CUDASIM_NVML_BUS_ID);
    UNTIL(nvml, s, s.watch == MU_GPU_UNWATCHED);
    assert_non_null(strstr(s.text, "it comes with NVIDIA's driver"));
    assert_false(s.unhealthy);
    mu_nvml_stop(nvml);

    sim.fail_with("nvmlInit_v2", NVML_ERROR_LIB_RM_VERSION_MISMATCH);
    nvml = start(MU_NVML_STAND_IN, CUDASIM_NVML_BUS_ID);
    UNTIL(nvml, s, s.watch == MU_GPU_UNWATCHED);
    assert_non_null(strstr(s.text, "restart the host"));
    mu_nvml_stop(nvml);
    sim.fail_with("nvmlInit_v2", 0);

    nvml = start(MU_NVML_STAND_IN, "0001:77:00.0");
    UNTIL(nvml, s, s.watch == MU_GPU_UNWATCHED);
    assert_non_null(strstr(s.text, "GPU 0001:77:00.0"));
    mu_nvml_stop(nvml);

    nvml = start("libm.so.6", CUDASIM_NVML_BUS_ID);
    UNTIL(nvml, s, s.watch == MU_GPU_UNWATCHED);
    assert_non_null(strstr(s.text, "not NVIDIA's management library"));
    mu_nvml_stop(nvml);
}

static void test_events_may_be_missing(void **state)
{
    (void)state;
    struct mu_gpu_sample s;
    sim.fail_with("nvmlDeviceRegisterEvents", NVML_ERROR_NOT_SUPPORTED);
    sim.set("nvmlDeviceGetTemperature", 33);
    struct mu_nvml *nvml = start(MU_NVML_STAND_IN, CUDASIM_NVML_BUS_ID);
    UNTIL(nvml, s, s.watch == MU_GPU_WATCHED);
    sim.set("nvmlDeviceGetTemperature", 34);
    UNTIL(nvml, s, s.values[MU_GPU_TEMPERATURE_C] == 34);
    mu_nvml_stop(nvml);
    sim.fail_with("nvmlDeviceRegisterEvents", 0);
}

static void test_a_driver_that_hangs_makes_samples_old_and_holds_nobody(void **state)
{
    (void)state;
    struct mu_gpu_sample s;
    struct mu_nvml *nvml = start(MU_NVML_STAND_IN, CUDASIM_NVML_BUS_ID);
    UNTIL(nvml, s, s.watch == MU_GPU_WATCHED);
    sim.hang("nvmlDeviceGetPowerUsage");
    while (sim.hung() == 0)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    mu_nvml_read(nvml, &s);
    uint64_t age_us = s.age_us;
    UNTIL(nvml, s, s.age_us > age_us + 10000);
    assert_false(s.unhealthy);
    mu_nvml_stop(nvml); /* returns, and the thread frees everything when it comes back */
    sim.hang(NULL);

    sim.hang("nvmlInit_v2"); /* from the beginning */
    nvml = start(MU_NVML_STAND_IN, CUDASIM_NVML_BUS_ID);
    while (sim.hung() == 0)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    mu_nvml_read(nvml, &s);
    assert_int_equal(s.watch, MU_GPU_STARTING);
    mu_nvml_stop(nvml);
    sim.hang(NULL);
}

static void test_names(void **state)
{
    (void)state;
    char text[128];
    mu_gpu_throttle_text(0x1, text, sizeof text);
    assert_string_equal(text, "none");
    mu_gpu_throttle_text(0x44, text, sizeof text);
    assert_string_equal(text, "power cap, thermal slowdown by hardware");
    mu_gpu_throttle_text(UINT64_MAX, text, sizeof text);
    assert_non_null(strstr(text, "power brake"));
    mu_gpu_throttle_text(UINT64_MAX, text, 10);
    assert_string_equal(text, "power cap");
}

static void test_the_table_of_xids(void **state)
{
    (void)state;
    static const uint32_t fatal[] = {46, 48, 54, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158};
    static const uint32_t harmless[] = {8, 13, 31, 43, 45, 63, 68, 92, 94, 121, 149, 154};
    uint32_t count = 0;
    for (size_t i = 0; i < sizeof fatal / sizeof fatal[0]; i++)
        assert_int_equal(mu_xid_find(fatal[i])->class, MU_XID_FATAL);
    for (size_t i = 0; i < sizeof harmless / sizeof harmless[0]; i++)
        assert_true(mu_xid_find(harmless[i])->class == MU_XID_NOTICE ||
                    mu_xid_find(harmless[i])->class == MU_XID_APPLICATION);
    for (uint32_t number = 0; number < 1000; number++)
        count += mu_xid_find(number)->class == MU_XID_FATAL;
    assert_int_equal(count, sizeof fatal / sizeof fatal[0]);
    assert_int_equal(mu_xid_find(999)->class, MU_XID_UNKNOWN);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values_are_read_and_what_is_missing_is_unknown),
        cmocka_unit_test(test_xids_are_told_and_fatal_ones_make_it_unhealthy),
        cmocka_unit_test(test_a_gpu_that_wants_a_reset_is_unhealthy),
        cmocka_unit_test(test_without_a_driver_nothing_is_watched),
        cmocka_unit_test(test_events_may_be_missing),
        cmocka_unit_test(test_a_driver_that_hangs_makes_samples_old_and_holds_nobody),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_the_table_of_xids),
    };
    return cmocka_run_group_tests(tests, load_stand_in, NULL);
}
