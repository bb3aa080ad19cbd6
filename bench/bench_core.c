/* How fast the coordinator's core alone joins, plans and assigns: N workers of one job, no network, no store.
 *
 *   bench_core [workers = 16384]
 *
 * Prints milliseconds per phase, bytes of core memory touched per worker, and the largest number of peers named in one
 * Assign; then what it costs each second to be observed: a report of each worker (with its account of time), and a
 * sample of the series, as percent of the core's thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "common/clock.h"
#include "coordinator/series.h"
#include "tests/lib/crowd.h"

static enum mu_status take_row(void *ctx, const void *key, size_t key_bytes, const void *value, size_t value_bytes)
{
    (void)key, (void)value;
    *(size_t *)ctx += key_bytes + value_bytes;
    return MU_OK;
}

static double phase_ms(uint64_t *mark)
{
    uint64_t now = mu_clock_mono_us(), before = *mark;
    *mark = now;
    return (double)(now - before) * 1e-3;
}

int main(int argc, char **argv)
{
    uint32_t workers = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 16384;
    struct crowd crowd = {.job = "big", .workers = "w", .first_session = 1};
    struct rusage before;
    getrusage(RUSAGE_SELF, &before);
    uint64_t mark = mu_clock_mono_us();
    crowd_new(&crowd, workers);
    phase_ms(&mark);
    for (uint32_t w = 0; w < workers; w++)
        crowd_join(&crowd, w, false);
    for (uint32_t w = 0; w < workers; w++)
        crowd_join(&crowd, w, true);
    double join_ms = phase_ms(&mark);
    crowd_plan(&crowd);
    double plan_ms = phase_ms(&mark);
    crowd_assign(&crowd);
    double assign_ms = phase_ms(&mark);
    crowd_go(&crowd, workers);
    double go_ms = phase_ms(&mark);
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    if (!crowd.planned || crowd.assigns != workers || crowd.gos != workers) {
        fprintf(stderr, "bench_core: %llu of %u workers assigned, %llu told to go\n", (unsigned long long)crowd.assigns,
                workers, (unsigned long long)crowd.gos);
        return 1;
    }
    printf("workers  join ms  plan ms  assign ms  go ms  total ms  peers per Assign  KiB per worker\n");
    printf("%7u  %7.1f  %7.1f  %9.1f  %5.1f  %8.1f  %16llu  %14.1f\n", workers, join_ms, plan_ms, assign_ms, go_ms,
           join_ms + plan_ms + assign_ms, (unsigned long long)crowd.most_peers,
           (double)(usage.ru_maxrss - before.ru_maxrss) / workers);
    struct mu_series *series = mu_series_new(1, workers);
    size_t written = 0;
    double report_ms = 0, sample_ms = 0;
    enum { SECONDS = 20 };
    for (uint64_t second = 1; series && second <= SECONDS; second++) {
        phase_ms(&mark);
        for (uint32_t w = 0; w < workers; w++)
            crowd_report(&crowd, w, second);
        report_ms += phase_ms(&mark);
        mu_series_sample(series, crowd.coord, NULL, mark + second * 1000000, mu_clock_wall_us() + second * 1000000,
                         take_row, &written);
        sample_ms += phase_ms(&mark);
    }
    printf("observed: reports %.2f ms a second, samples %.2f ms a second: %.2f %% of a thread, %zu bytes written in %d "
           "s\n",
           report_ms / SECONDS, sample_ms / SECONDS, (report_ms + sample_ms) / SECONDS / 10, written, SECONDS);
    mu_series_free(series);
    crowd_free(&crowd);
    return 0;
}
