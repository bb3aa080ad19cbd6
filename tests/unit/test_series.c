/* links: mu_coordinator mu_worker_core mu_wire mu_plan PkgConfig::JANSSON */
/* Time series: what the buckets say, that they never grow, what they cost, and who reads them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <jansson.h>
#include <math.h>

#include "coordinator/series.h"
#include "core_testing.h"

enum { STEPS = 1000000000, DAY_S = 86400, JOB_TIER = 0, WORKER_TIER = 16 };

static struct series_box {
    struct box box;
    struct mu_series *series;
    struct mu_store *store;
    struct mu_sessions *sessions; /* NULL: nobody tells vital signs */
    size_t written_bytes;
} world;

static uint64_t wall_us(void)
{
    return world.box.now_us + 1000;
}

static enum mu_status put(void *ctx, const void *key, size_t key_bytes, const void *value, size_t value_bytes)
{
    struct mu_store_batch batch;
    struct mu_error err;
    struct series_box *own = ctx;
    mu_store_batch_init(&batch);
    assert_int_equal(mu_store_batch_put(&batch, key, key_bytes, value, value_bytes), MU_OK);
    assert_int_equal(mu_store_write(own->store, &batch, &err), MU_OK);
    mu_store_batch_fini(&batch);
    own->written_bytes += key_bytes + value_bytes;
    return MU_OK;
}

static void begin(uint32_t workers)
{
    struct mu_job_spec spec;
    memset(&world, 0, sizeof world);
    box_spec(&spec, 1, 1);
    spec.steps = STEPS;
    box_init(&world.box, &spec);
    world.series = mu_series_new(4, 64);
    world.store = mu_store_memory_new();
    assert_true(world.series && world.store);
    for (uint32_t i = 0; i < workers; i++)
        box_add_worker(&world.box, i);
    box_settle(&world.box);
    box_advance(&world.box, 300);
}

static void finish(void)
{
    mu_series_free(world.series);
    mu_store_free(world.store);
    box_fini(&world.box);
}

/* One step each, and a look at it. Time in which nobody could run is forgiven, so nobody is lost in it. */
static void run(uint32_t steps, uint32_t apart_ms)
{
    for (uint32_t i = 0; i < steps; i++) {
        world.box.now_us += apart_ms * 1000ull;
        assert_true(box_train(&world.box, STEPS));
        for (uint32_t k = 0; k < BOX_WORKERS_MAX; k++) { /* what was summed up is sent */
            if (world.box.workers[k].core)
                box_engine(&world.box, k, &(struct mu_worker_event){.kind = MU_WE_TICK});
        }
        box_settle(&world.box);
        mu_series_sample(world.series, world.box.coord, world.sessions, world.box.now_us, wall_us(), put, &world);
    }
}

static json_t *query(const char *worker, uint32_t seconds)
{
    struct mu_series_query query = {.job = "job", .seconds = seconds, .now_wall_us = wall_us()};
    struct mu_error err;
    char *text = NULL;
    size_t size = 0;
    strcpy(query.worker, worker);
    assert_int_equal(mu_series_read(world.store, &query, &text, &size, &err), MU_OK);
    json_t *json = json_loads(text, 0, NULL);
    assert_non_null(json);
    free(text);
    return json;
}

static size_t row_count(const json_t *json)
{
    return json_array_size(json_object_get(json, "rows"));
}

/* NAN: null. */
static double cell(const json_t *json, size_t row, const char *column)
{
    const json_t *columns = json_object_get(json, "columns");
    for (size_t i = 0; i < json_array_size(columns); i++) {
        if (strcmp(json_string_value(json_array_get(columns, i)), column) == 0) {
            const json_t *value = json_array_get(json_array_get(json_object_get(json, "rows"), row), i);
            return json_is_null(value) ? (double)NAN : json_number_value(value);
        }
    }
    fail_msg("no column '%s'", column);
    return 0;
}

struct count {
    size_t rows;
    int tier; /* -1: all */
};

static bool count_one(void *arg, const uint8_t *key, size_t key_bytes, const uint8_t *value, size_t value_bytes)
{
    struct count *count = arg;
    (void)value, (void)value_bytes;
    count->rows += count->tier < 0 || key[key_bytes - 5] == count->tier;
    return true;
}

static size_t rows_of(int tier)
{
    struct count count = {.tier = tier};
    struct mu_error err;
    assert_int_equal(mu_store_scan(world.store, "s/job/", 6, NULL, 0, 0, count_one, &count, &err), MU_OK);
    return count.rows;
}

/* ---- tests ---- */

static void test_buckets_are_the_means_of_what_was_reported(void **state)
{
    (void)state;
    begin(2);
    world.box.step_us = 2000;
    run(600, 1000);
    json_t *job = query("", 600), *worker = query("w1", 600);
    assert_int_equal(json_integer_value(json_object_get(job, "bucket_seconds")), 2);
    assert_in_range(row_count(job), 290, 301);
    for (size_t i = 10; i < row_count(job); i++) { /* two steps a bucket: x and x + 1 */
        assert_true(fabs(cell(job, i, "step") - cell(job, i - 1, "step") - 2) < 1e-6);
        assert_true(cell(job, i, "time") - cell(job, i - 1, "time") == 2);
        assert_true(cell(job, i, "world") == 2 && cell(job, i, "loss") == 1);
        assert_true(fabs(cell(job, i, "forward_s") - 100e-6) < 1e-9);
        assert_true(cell(job, i, "useful") > 0.99 || isnan(cell(job, i, "useful")));
    }
    assert_int_equal(json_integer_value(json_object_get(worker, "bucket_seconds")), 60);
    assert_in_range(row_count(worker), 8, 10);
    assert_true(fabs(cell(worker, 3, "total_s") - 2e-3) < 1e-8);
    assert_true(fabs(cell(worker, 3, "step") - cell(worker, 2, "step") - 60) < 1e-6);
    json_decref(job);
    json_decref(worker);
    job = query("nobody", 600);
    assert_int_equal(row_count(job), 0);
    json_decref(job);
    finish();
}

/* Five days: each tier fills its ring and no more, and is read as far back as asked. */
static void test_what_is_kept_never_grows_and_coarser_tiers_reach_further(void **state)
{
    (void)state;
    begin(1);
    run(4000, 2000);
    run(2 * DAY_S / 30, 30000);
    run(3 * DAY_S / 60, 60000);
    size_t kept = rows_of(-1);
    assert_int_equal(rows_of(JOB_TIER), 1800);
    assert_int_equal(rows_of(JOB_TIER + 1), 2880);
    assert_int_equal(rows_of(WORKER_TIER), 1440);
    assert_in_range(rows_of(WORKER_TIER + 1), 5 * DAY_S / 600, 5 * DAY_S / 600 + 15);
    run(2 * 1440, 60000);
    assert_in_range(rows_of(-1), kept, kept + 2 * (2 * DAY_S / 600) + 4); /* only the tiers of days are not full */
    const struct {
        uint32_t seconds, bucket_s;
    } asked[] = {{3600, 2}, {3601, 30}, {DAY_S, 30}, {DAY_S + 1, 600}, {400000000, 600}};
    for (size_t i = 0; i < sizeof asked / sizeof asked[0]; i++) {
        json_t *json = query("", asked[i].seconds);
        double now = (double)(wall_us() / 1000000);
        assert_int_equal(json_integer_value(json_object_get(json, "bucket_seconds")), asked[i].bucket_s);
        assert_true(row_count(json) > 50);
        for (size_t k = 0; k < row_count(json); k++)
            assert_true(cell(json, k, "time") >= now - asked[i].seconds && cell(json, k, "time") <= now);
        json_decref(json);
    }
    finish();
}

/* The numbers of docs/operations.md. */
static void test_a_day_costs_what_is_documented(void **state)
{
    (void)state;
    begin(8);
    run(600, 1000); /* until everybody's first bucket is over */
    world.written_bytes = 0;
    run(DAY_S / 10, 10000);
    size_t eight = world.written_bytes;
    finish();
    begin(1);
    run(600, 1000);
    world.written_bytes = 0;
    run(DAY_S / 10, 10000);
    size_t one = world.written_bytes;
    size_t each = (eight - one) / 7;
    assert_in_range(each, 124000, 138000); /* names of 2 bytes: 1,584 buckets of 83 */
    assert_in_range(one, each, 3 * 1024 * 1024);
    finish();
}

static void test_rows_that_are_damaged_or_of_another_version_are_passed_over(void **state)
{
    (void)state;
    begin(1);
    run(600, 1000);
    json_t *before = query("", 600), *worker_before = query("w0", 600);
    size_t rows = row_count(before), worker_rows = row_count(worker_before);
    static const struct {
        const char *key;
        size_t key_bytes;
        const char *value;
        size_t value_bytes;
    } bad[] = {{"s/job/\0\0\0\6\1", 11, "", 0},
               {"s/job/\0\0\0\6\2", 11, "\2abcdef", 7},
               {"s/job/\0\0\0\6\3", 11, "\1\1\0\0\0xyz", 8},
               {"s/job/\20\0\0\6\4", 11, "\1\1\0\0\0\377", 6},
               {"s/job/\20\0\0\6\5", 11, "\1\1\0\0\0\2w0", 8}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        put(&world, bad[i].key, bad[i].key_bytes, bad[i].value, bad[i].value_bytes);
    json_t *after = query("", 600), *worker_after = query("w0", 600);
    assert_int_equal(row_count(after), rows);
    assert_int_equal(row_count(worker_after), worker_rows);
    json_decref(before);
    json_decref(after);
    json_decref(worker_before);
    json_decref(worker_after);
    finish();
}

static void drop_one(void *ctx, const void *key, size_t key_bytes)
{
    struct mu_store_batch *batch = ctx;
    assert_int_equal(mu_store_batch_delete(batch, key, key_bytes), MU_OK);
}

static void test_a_forgotten_job_leaves_nothing_behind(void **state)
{
    (void)state;
    struct mu_store_batch batch;
    struct mu_error err;
    begin(1);
    run(600, 1000);
    put(&world, "s/jobs", 6, "", 0); /* of others */
    mu_store_batch_init(&batch);
    assert_int_equal(mu_series_forget(world.store, "job", 100000, drop_one, &batch, &err), MU_OK);
    assert_int_equal(batch.op_count, rows_of(-1));
    assert_int_equal(mu_store_write(world.store, &batch, &err), MU_OK);
    mu_store_batch_fini(&batch);
    assert_int_equal(rows_of(-1), 0);
    finish();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_buckets_are_the_means_of_what_was_reported),
        cmocka_unit_test(test_what_is_kept_never_grows_and_coarser_tiers_reach_further),
        cmocka_unit_test(test_a_day_costs_what_is_documented),
        cmocka_unit_test(test_rows_that_are_damaged_or_of_another_version_are_passed_over),
        cmocka_unit_test(test_a_forgotten_job_leaves_nothing_behind),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
