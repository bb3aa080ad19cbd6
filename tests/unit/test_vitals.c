/* links: mu_vitals mu_coordinator mu_wire mu_plan */
/* How a worker and its host are: read from files of a host that is made up, carried by a message, made into rates. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "coordinator/vitals.h"
#include "proto/wire.h"
#include "worker/vitals.h"

static char root[64];

static void put_file(const char *path, const char *text)
{
    char command[512], name[256];
    snprintf(name, sizeof name, "%s%s", root, path);
    snprintf(command, sizeof command, "mkdir -p \"$(dirname %s)\"", name);
    assert_int_equal(system(command), 0);
    FILE *file = fopen(name, "w");
    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

static int make_host(void **state)
{
    (void)state;
    strcpy(root, "/tmp/muster-vitals-XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int drop_host(void **state)
{
    char command[128];
    (void)state;
    snprintf(command, sizeof command, "rm -r %s", root);
    return system(command);
}

static void test_files_of_a_host_become_numbers(void **state)
{
    (void)state;
    struct mu_vitals vitals;
    put_file("/proc/self/statm", "900 25 3 1 0 4 0\n");
    put_file("/proc/self/io", "rchar: 9\nwchar: 8\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 1\n");
    put_file("/proc/stat", "cpu  100 20 30 4000 500 6 4 40 7 8\ncpu0 1 1 1 1\ncpu1 1 1 1 1\nintr 5\n");
    put_file("/proc/meminfo", "MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:   250 kB\n");
    put_file(
        "/proc/net/dev",
        "Inter-|   Receive | Transmit\n face |bytes packets errs drop fifo frame compressed multicast|bytes packets "
        "errs drop fifo colls carrier compressed\n"
        "    lo: 77 1 7 7 0 0 0 0 77 1 7 7 0 0 0 0\n  eth0: 1000 9 1 2 0 0 0 0 2000 9 3 4 0 0 0 0\n"
        " bond0: 1000 9 1 2 0 0 0 0 2000 9 3 4 0 0 0 0\n");
    put_file("/sys/class/net/eth0/device", "");
    put_file("/proc/pressure/memory", "some avg10=0.00 avg60=0.00 avg300=0.00 total=1234\nfull avg10=0.00 total=99\n");
    put_file("/sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data", "100\n");
    put_file("/sys/class/infiniband/mlx5_0/ports/2/counters/port_rcv_data", "11\n");
    put_file("/sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error", "3\n");
    mu_vitals_read(root, "/tmp/there-is/no-such/directory", &vitals);
    const uint64_t *values = vitals.values;
    assert_int_equal(values[MU_VITAL_MEMORY_BYTES], 25 * sysconf(_SC_PAGESIZE));
    assert_int_equal(values[MU_VITAL_READ_BYTES], 4096);
    assert_int_equal(values[MU_VITAL_WRITTEN_BYTES], 8192);
    assert_int_equal(values[MU_VITAL_HOST_CPU_US], 200 * 1000000 / sysconf(_SC_CLK_TCK) / 2);
    assert_int_equal(values[MU_VITAL_HOST_MEMORY_PPM], 750000);
    assert_int_equal(values[MU_VITAL_RECEIVED_BYTES], 1000);
    assert_int_equal(values[MU_VITAL_SENT_BYTES], 2000);
    assert_int_equal(values[MU_VITAL_NETWORK_ERRORS], 10);
    assert_int_equal(values[MU_VITAL_STALL_MEMORY_US], 1234);
    assert_int_equal(values[MU_VITAL_STALL_IO_US], 0);
    assert_int_equal(values[MU_VITAL_RDMA_RECEIVED_BYTES], 444);
    assert_int_equal(values[MU_VITAL_RDMA_ERRORS], 3);
    assert_true(values[MU_VITAL_DISK_FREE_BYTES] > 0 && values[MU_VITAL_CPU_US] > 0);
}

static void test_a_host_that_tells_nothing_is_all_zero(void **state)
{
    (void)state;
    struct mu_vitals vitals;
    mu_vitals_read("/there/is/nothing", "", &vitals);
    for (int i = 0; i < MU_VITAL_COUNT; i++) {
        if (i != MU_VITAL_CPU_US && i != MU_VITAL_CLOCK_SYNCHRONISED && i != MU_VITAL_CLOCK_ERROR_US)
            assert_int_equal(vitals.values[i], 0);
    }
}

static void test_they_ride_on_any_message(void **state)
{
    (void)state;
    struct mu_vitals vitals = {.mono_us = 7, .link_count = MU_VITAL_LINKS_MAX};
    struct mu_worker_message message = {.kind = MU_WM_HEARTBEAT, .vitals = &vitals}, decoded = {0};
    struct mu_wire_arena arena;
    struct mu_error err;
    const void *data;
    size_t size_bytes;
    for (int i = 0; i < MU_VITAL_COUNT; i++)
        vitals.values[i] = 1000u + (uint64_t)i;
    for (uint32_t i = 0; i < MU_VITAL_LINKS_MAX; i++)
        vitals.links[i] = (struct mu_vital_link){i, 10 + i, 20 + i, 30 + i, 40 + i, 50 + i};
    mu_wire_arena_init(&arena);
    assert_int_equal(mu_wire_encode_worker(&arena, &message, &data, &size_bytes, &err), MU_OK);
    assert_true(size_bytes < 600);
    assert_int_equal(mu_wire_decode_worker(&arena, data, size_bytes, &decoded, &err), MU_OK);
    assert_non_null(decoded.vitals);
    assert_memory_equal(decoded.vitals->values, vitals.values, sizeof vitals.values);
    assert_int_equal(decoded.vitals->link_count, MU_VITAL_LINKS_MAX);
    for (uint32_t i = 0; i < MU_VITAL_LINKS_MAX; i++) {
        assert_int_equal(decoded.vitals->links[i].rank, i);
        assert_int_equal(decoded.vitals->links[i].retransmits, 50 + i);
    }
    mu_wire_arena_fini(&arena);
}

static void test_a_gpu_rides_along(void **state)
{
    (void)state;
    struct mu_gpu_sample gpu = {.watch = MU_GPU_WATCHED, .age_us = 3, .known = 1ull << MU_GPU_READINGS | 5};
    struct mu_vitals vitals = {.mono_us = 7, .gpu = &gpu};
    struct mu_worker_message message = {.kind = MU_WM_STATUS, .vitals = &vitals}, decoded = {0};
    struct mu_wire_arena arena;
    struct mu_error err;
    const void *data;
    size_t size_bytes;
    for (int i = 0; i < MU_GPU_READINGS; i++)
        gpu.values[i] = 10u + (uint64_t)i;
    gpu.xid_count = 4;
    gpu.last_xid = 79;
    gpu.unhealthy = true;
    strcpy(gpu.driver, "580.82.07");
    strcpy(gpu.text, "fell");
    mu_wire_arena_init(&arena);
    assert_int_equal(mu_wire_encode_worker(&arena, &message, &data, &size_bytes, &err), MU_OK);
    assert_int_equal(mu_wire_decode_worker(&arena, data, size_bytes, &decoded, &err), MU_OK);
    const struct mu_gpu_sample *heard = decoded.vitals->gpu;
    assert_non_null(heard);
    assert_memory_equal(heard->values, gpu.values, sizeof gpu.values);
    assert_int_equal(heard->known, 5); /* no more than there are */
    assert_int_equal(heard->watch, MU_GPU_WATCHED);
    assert_true(heard->age_us == 3 && heard->xid_count == 4 && heard->last_xid == 79 && heard->unhealthy);
    assert_string_equal(heard->driver, "580.82.07");
    assert_string_equal(heard->text, "fell");
    gpu.watch = (enum mu_gpu_watch)7;
    assert_int_equal(mu_wire_encode_worker(&arena, &message, &data, &size_bytes, &err), MU_OK);
    assert_int_equal(mu_wire_decode_worker(&arena, data, size_bytes, &decoded, &err), MU_ERR_INVALID);
    mu_wire_arena_fini(&arena);
}

static void test_news_of_a_gpu_are_counted_once(void **state)
{
    (void)state;
    struct mu_vitals_heard *heard = NULL;
    struct mu_gpu_sample gpu = {.watch = MU_GPU_WATCHED};
    struct mu_vitals vitals = {.mono_us = 1000000};
    vitals.values[MU_VITAL_CPU_US] = 5000000;
    assert_int_equal(mu_vitals_hear(&heard, &vitals, 1).gpu_xids, 0);
    assert_null(heard->newest.gpu);
    vitals.gpu = &gpu; /* the first that is told of it */
    vitals.mono_us += 1000000;
    vitals.values[MU_VITAL_CPU_US] += 500000;
    gpu.xid_count = 2;
    assert_int_equal(mu_vitals_hear(&heard, &vitals, 2).gpu_xids, 2);
    gpu.xid_count = 3;
    gpu.unhealthy = true;
    struct mu_vitals_news news = mu_vitals_hear(&heard, &vitals, 3); /* the same once more, for the GPU's sake */
    assert_true(news.gpu_xids == 1 && news.gpu_failures == 1 && news.network_errors == 0);
    assert_true(heard->newest.gpu->xid_count == 3 && fabs(heard->signs[MU_VITAL_CPU_US] - 0.5) < 1e-12);
    news = mu_vitals_hear(&heard, &vitals, 4);
    assert_true(news.gpu_xids == 0 && news.gpu_failures == 0);
    vitals.gpu = NULL;
    vitals.mono_us += 1000000;
    mu_vitals_hear(&heard, &vitals, 5);
    assert_int_equal(heard->newest.gpu->xid_count, 3); /* what was last heard */
    free(heard);
}

static void test_counters_become_rates_and_the_first_report_has_none(void **state)
{
    (void)state;
    struct mu_vitals_heard *heard = NULL;
    struct mu_vitals vitals = {.mono_us = 1000000};
    vitals.values[MU_VITAL_NETWORK_ERRORS] = 100;
    vitals.values[MU_VITAL_CPU_US] = 5000000;
    vitals.values[MU_VITAL_HOST_MEMORY_PPM] = 500000;
    assert_int_equal(mu_vitals_hear(&heard, &vitals, 1).network_errors, 0);
    assert_true(isnan(heard->signs[MU_VITAL_CPU_US]) && fabs(heard->signs[MU_VITAL_HOST_MEMORY_PPM] - 0.5) < 1e-12);
    vitals.mono_us += 4000000;
    vitals.values[MU_VITAL_NETWORK_ERRORS] += 12;
    vitals.values[MU_VITAL_CPU_US] += 6000000;
    assert_int_equal(mu_vitals_hear(&heard, &vitals, 2).network_errors, 12);
    assert_true(fabs(heard->signs[MU_VITAL_CPU_US] - 1.5) < 1e-12);
    assert_true(fabs(heard->signs[MU_VITAL_NETWORK_ERRORS] - 3) < 1e-12);
    vitals.mono_us += 1000000;
    vitals.values[MU_VITAL_NETWORK_ERRORS] = 0; /* the interface has gone */
    assert_int_equal(mu_vitals_hear(&heard, &vitals, 3).network_errors, 0);
    assert_true(isnan(heard->signs[MU_VITAL_NETWORK_ERRORS]));
    assert_string_equal(mu_vital_name(MU_VITAL_CPU_US), "cpus");
    assert_string_equal(mu_vital_name(MU_VITAL_LATENCY_US), "latency_seconds");
    free(heard);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_files_of_a_host_become_numbers, make_host, drop_host),
        cmocka_unit_test(test_a_host_that_tells_nothing_is_all_zero),
        cmocka_unit_test(test_they_ride_on_any_message),
        cmocka_unit_test(test_a_gpu_rides_along),
        cmocka_unit_test(test_news_of_a_gpu_are_counted_once),
        cmocka_unit_test(test_counters_become_rates_and_the_first_report_has_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
