/* links: mu_coordinator mu_wire mu_plan m */
/* /metrics of a coordinator with 10,000 members of one job: what is on the page, and that it stays below its bound. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "coordinator/metrics.h"
#include "coordinator/vitals.h"
#include "tests/lib/crowd.h"

enum { WORKERS = 10000, PER_WORKER = 5 };

static struct world {
    struct crowd crowd;
    struct mu_sessions *sessions;
    struct mu_store *store;
    struct mu_outbox *outbox;
    struct mu_events *events;
    struct mu_rpc_server *server;
    struct mu_stats stats;
} world;

static void ignore(void *arg)
{
    (void)arg;
}

static void open_parts(void)
{
    static const struct mu_rpc_method methods[] = {{"/test/Unary", MU_RPC_UNARY, 0, MU_RPC_CHANGE}};
    struct mu_error err;
    struct mu_rpc_server_config config = mu_rpc_server_config_default();
    config.listen = "127.0.0.1:0";
    config.methods = methods;
    config.method_count = 1;
    world.store = mu_store_memory_new();
    assert_non_null(world.store);
    assert_int_equal(mu_outbox_new(world.store, ignore, NULL, NULL, &world.outbox, &err), MU_OK);
    assert_int_equal(mu_events_new(MU_EVENTS_KEPT_MIN, &world.events, &err), MU_OK);
    assert_int_equal(mu_rpc_server_new(&config, &err, &world.server), MU_OK);
    assert_int_equal(mu_sessions_new(WORKERS, &world.sessions, &err), MU_OK);
}

/* Every worker has told its vital signs; the counters are those of worker 0 plus its number. */
static void tell_vitals(uint32_t worker)
{
    struct mu_session *session = mu_sessions_open(world.sessions, NULL, 0);
    struct mu_vitals vitals = {.mono_us = 1};
    assert_non_null(session);
    if (worker == 0)
        world.crowd.first_session = session->number;
    assert_true(session->number == world.crowd.first_session + worker);
    for (int i = 0; i < MU_VITAL_COUNT; i++)
        vitals.values[i] = 123456789000 + worker;
    vitals.values[MU_VITAL_CPU_US] = worker == 0 ? 7 : 3600000001;
    mu_vitals_hear(&session->vitals, &vitals, 1);
}

static void fill(const char *job, const char *workers)
{
    memset(&world, 0, sizeof world);
    open_parts();
    world.crowd = (struct crowd){.job = job, .workers = workers};
    crowd_new(&world.crowd, WORKERS);
    for (uint32_t w = 0; w < WORKERS; w++) {
        tell_vitals(w);
        crowd_join(&world.crowd, w, false);
    }
    for (uint32_t w = 0; w < WORKERS; w++)
        crowd_join(&world.crowd, w, true);
    crowd_plan(&world.crowd);
    crowd_assign(&world.crowd);
    crowd_go(&world.crowd, WORKERS);
    for (uint32_t w = 0; w < WORKERS; w++)
        crowd_report(&world.crowd, w, 1);
    assert_int_equal(world.crowd.gos, WORKERS);
}

static void empty(void)
{
    crowd_free(&world.crowd);
    mu_sessions_free(world.sessions);
    mu_rpc_server_free(world.server);
    mu_events_free(world.events);
    mu_outbox_free(world.outbox);
    mu_store_free(world.store);
}

static char *scrape(uint32_t worker_series, size_t *ret_size)
{
    char *page = NULL;
    const struct mu_question_sources sources = {.coord = world.crowd.coord,
                                                .events = world.events,
                                                .outbox = world.outbox,
                                                .server = world.server,
                                                .sessions = world.sessions,
                                                .stats = &world.stats,
                                                .worker_series = worker_series};
    FILE *out = open_memstream(&page, ret_size);
    assert_non_null(out);
    mu_metrics_write(out, &sources);
    assert_int_equal(fclose(out), 0);
    return page;
}

static bool has(const char *page, const char *line)
{
    const char *found = strstr(page, line);
    return found && (found == page || found[-1] == '\n') && found[strlen(line)] == '\n';
}

/* Line by line: a sanitizer's strstr looks at the whole page each time. */
static uint32_t worker_lines(const char *page, size_t size)
{
    static const char any[] = "muster_worker_", other[] = "muster_worker_series_";
    uint32_t count = 0;
    for (const char *at = page, *end = page + size; at < end;
         at = (const char *)memchr(at, '\n', (size_t)(end - at)) + 1)
        count += strncmp(at, any, sizeof any - 1) == 0 && strncmp(at, other, sizeof other - 1) != 0;
    return count;
}

static void test_ten_thousand_members_are_all_on_the_page(void **state)
{
    size_t size;
    (void)state;
    fill("pretraining-7b", "gpu-node-0123-");
    char *page = scrape(WORKERS, &size);
    assert_true(size < MU_METRICS_BYTES_MAX);
    assert_int_equal(worker_lines(page, size), PER_WORKER * WORKERS);
    assert_true(has(page, "muster_workers{state=\"member\"} 10000"));
    assert_true(has(page, "muster_job_world_size{job=\"pretraining-7b\"} 10000"));
    assert_true(has(page, "muster_worker_series_left_out 0"));
    assert_true(has(page, "muster_job_step_phase_duration_seconds_count{job=\"pretraining-7b\",phase=\"wait\"} 10000"));
    assert_true(
        has(page,
            "muster_job_step_phase_duration_seconds_bucket{job=\"pretraining-7b\",phase=\"data\",le=\"+Inf\"} 10000"));
    const char *age = strstr(page, "\nmuster_job_heartbeat_age_seconds{job=\"pretraining-7b\"} ");
    assert_non_null(age); /* of worker 0, who has spoken before all others did */
    assert_true(strtod(strchr(age + 1, ' '), NULL) > 0);
#define OF(metric, worker) "muster_worker_" metric "{job=\"pretraining-7b\",worker=\"gpu-node-0123-" worker "\"} "
    assert_true(has(page, OF("cpu_seconds_total", "0") "0.000007"));
    assert_true(has(page, OF("cpu_seconds_total", "9999") "3600.000001"));
    assert_true(has(page, OF("memory_bytes", "9999") "123456798999"));
    assert_true(has(page, OF("network_errors_total", "1") "246913578002"));
    assert_true(has(page, OF("latency_seconds", "10") "123456.789010"));
    free(page);

    page = scrape(WORKERS - 1, &size); /* one worker too many */
    assert_int_equal(worker_lines(page, size), 0);
    assert_true(has(page, "muster_worker_series_left_out 5"));
    assert_true(size < 40000);
    free(page);
    page = scrape(0, &size); /* switched off */
    assert_int_equal(worker_lines(page, size), 0);
    assert_true(has(page, "muster_job_memory_bytes{job=\"pretraining-7b\"} 1.23456794e+15"));
    free(page);
    empty();
}

/* Names as long as they may be: the page would have ten megabytes. */
static void test_the_page_is_bounded_whatever_the_names_are(void **state)
{
    size_t size;
    char job[MU_JOB_NAME_SIZE], workers[MU_WORKER_NAME_SIZE];
    (void)state;
    memset(job, 'j', sizeof job);
    job[sizeof job - 1] = 0;
    memset(workers, 'w', sizeof workers);
    workers[sizeof workers - 1 - 4] = 0;
    fill(job, workers);
    char *page = scrape(WORKERS, &size);
    assert_true(size < MU_METRICS_BYTES_MAX);
    uint32_t lines = worker_lines(page, size);
    assert_true(lines > 0 && lines < PER_WORKER * WORKERS && lines % WORKERS == 0);
    char expected[64];
    snprintf(expected, sizeof expected, "muster_worker_series_left_out %u", PER_WORKER - lines / WORKERS);
    assert_true(has(page, expected));
    free(page);
    empty();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ten_thousand_members_are_all_on_the_page),
        cmocka_unit_test(test_the_page_is_bounded_whatever_the_names_are),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
