/* links: mu_coordinator mu_worker_core mu_wire mu_plan */
/* A store restored from an older snapshot, and what comes of the workers that are ahead of it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "core_testing.h"
#include "coordinator/snapshot.h"

enum { STEPS = 100000, FLOOR_SHIFT = MU_EPOCH_SHIFT };

static void begin(struct box *box, uint32_t workers)
{
    struct mu_job_spec spec;
    box_spec(&spec, 1, 1);
    strcpy(spec.checkpoint.path, "/ckpt");
    spec.checkpoint.keep = 5;
    box_init(box, &spec);
    for (uint32_t i = 0; i < workers; i++)
        box_add_worker(box, i);
    box_settle(box);
    box_advance(box, 1000);
    assert_true(box_all_run(box));
}

static void train(struct box *box, int steps)
{
    for (int i = 0; i < steps; i++) {
        box_train(box, STEPS);
        box_advance(box, 300);
    }
}

/* The coordinator dies, and the next one opens a store made from the snapshot. */
static uint64_t restore(struct box *box, const uint8_t *bytes, size_t size_bytes, uint64_t epoch)
{
    struct mu_error err;
    struct mu_snapshot_report report;
    box_kill_coord(box);
    mu_store_free(box->store);
    box->store = mu_store_memory_new();
    if (mu_snapshot_restore(bytes, size_bytes, epoch, 77, box->store, &report, &err) != MU_OK)
        fail_msg("%s", err.text);
    box_start_coord(box);
    return report.epoch;
}

static void take(struct box *box, uint8_t **ret_bytes, size_t *ret_size_bytes)
{
    struct mu_error err;
    if (mu_snapshot_take(box->store, ret_bytes, ret_size_bytes, &err) != MU_OK)
        fail_msg("%s", err.text);
}

static void test_workers_ahead_of_the_snapshot_go_on_from_what_they_hold(void **state)
{
    (void)state;
    static struct box box;
    uint8_t *bytes = NULL;
    size_t size_bytes = 0;
    begin(&box, 2);
    train(&box, 5);
    take(&box, &bytes, &size_bytes);
    box_add_worker(&box, 2); /* whom the snapshot does not know */
    train(&box, 10);
    assert_int_equal(box_view(&box).world, 3);
    box_kill_worker(&box, 0);
    box_advance(&box, 5000);
    train(&box, 10);
    struct mu_job_view ahead = box_view(&box);
    uint64_t last_event = mu_coord_last_event(box.coord);
    assert_true(ahead.world == 2 && ahead.record.generation == 3);

    assert_int_equal(restore(&box, bytes, size_bytes, 0), 1);
    assert_true(mu_coord_last_event(box.coord) > (1ull << FLOOR_SHIFT) && last_event < (1ull << FLOOR_SHIFT));
    box_advance(&box, 20000); /* worker 0, which it knows, never comes */
    struct mu_job_view view = box_view(&box);
    assert_true(box_all_run(&box) && view.world == 2);
    assert_true(box_said(&box, "worker_returned: worker w2 came back with"));
    assert_true(view.record.generation == (1ull << FLOOR_SHIFT) + 1);
    assert_true(view.steps_done == ahead.steps_done && view.replayed_steps == 0);
    train(&box, 5);
    assert_true(box_view(&box).steps_done == ahead.steps_done + 5);
    free(bytes);
    box_fini(&box);
}

/* The same snapshot again: its next epoch is in use. Nobody drops what he holds, until it is done right. */
static void test_the_same_snapshot_twice_is_told_and_repaired(void **state)
{
    (void)state;
    static struct box box;
    uint8_t *bytes = NULL;
    size_t size_bytes = 0;
    begin(&box, 2);
    train(&box, 5);
    take(&box, &bytes, &size_bytes);
    restore(&box, bytes, size_bytes, 0);
    box_advance(&box, 10000);
    box_kill_worker(&box, 1);
    box_advance(&box, 5000);
    train(&box, 5);
    uint64_t steps = box_view(&box).steps_done;
    restore(&box, bytes, size_bytes, 0);
    box_advance(&box, 10000);
    assert_int_equal(box_view(&box).attached, 0);
    assert_true(box.workers[0].running && box.workers[0].held.step == steps);
    assert_int_equal(restore(&box, bytes, size_bytes, 2), 2);
    box_advance(&box, 20000);
    assert_true(box_all_run(&box) && box_view(&box).steps_done == steps);
    assert_true(box_view(&box).record.generation == (2ull << FLOOR_SHIFT) + 1);
    free(bytes);
    box_fini(&box);
}

static void test_damaged_snapshots_are_refused_and_leave_nothing_that_could_be_opened(void **state)
{
    (void)state;
    static struct box box;
    struct mu_error err;
    struct mu_snapshot_report report;
    uint8_t *bytes = NULL;
    size_t size_bytes = 0;
    begin(&box, 2);
    train(&box, 3);
    take(&box, &bytes, &size_bytes);
    struct mu_store *store = mu_store_memory_new();
    for (size_t at = 0; at < size_bytes; at += 1 + size_bytes / 300) {
        bytes[at] ^= 0x10;
        assert_int_equal(mu_snapshot_restore(bytes, size_bytes, 0, 0, store, &report, &err), MU_ERR_CORRUPT);
        bytes[at] ^= 0x10;
        assert_int_equal(mu_snapshot_restore(bytes, at, 0, 0, store, &report, &err), MU_ERR_CORRUPT);
    }
    assert_int_equal(mu_snapshot_restore(bytes, size_bytes, MU_EPOCH_MAX + 1, 0, store, &report, &err), MU_ERR_INVALID);
    assert_int_equal(mu_snapshot_restore(bytes, size_bytes, 0, 0, store, &report, &err), MU_OK);
    assert_int_equal(mu_snapshot_restore(bytes, size_bytes, 0, 0, store, &report, &err), MU_ERR_EXISTS);
    mu_store_free(store);
    store = mu_store_lossy_new();
    mu_store_lossy_fail_at(store, 2, MU_ERR_IO); /* after the records, before the format */
    assert_int_equal(mu_snapshot_restore(bytes, size_bytes, 0, 0, store, &report, &err), MU_ERR_IO);
    assert_int_equal(mu_records_load(store, box_restore, &box, &err), MU_ERR_CORRUPT);
    assert_non_null(strstr(err.text, "not a coordinator's"));
    mu_store_free(store);
    free(bytes);
    box_fini(&box);
}

/* One that was used after the snapshot would be good again. */
static void test_join_tokens_are_not_restored(void **state)
{
    (void)state;
    static struct box box;
    uint8_t *bytes = NULL, *value = NULL;
    size_t size_bytes = 0;
    struct mu_error err;
    struct mu_store_batch batch;
    begin(&box, 1);
    mu_store_batch_init(&batch);
    assert_int_equal(mu_store_batch_put(&batch, MU_TOKEN_KEY_PREFIX "0123456789abcdef", 18, "x", 1), MU_OK);
    assert_int_equal(mu_store_write(box.store, &batch, &err), MU_OK);
    mu_store_batch_fini(&batch);
    take(&box, &bytes, &size_bytes);
    assert_int_equal(restore(&box, bytes, size_bytes, 0), 1);
    assert_int_equal(mu_store_get(box.store, MU_TOKEN_KEY_PREFIX "0123456789abcdef", 18, &value, &size_bytes, &err),
                     MU_ERR_NOT_FOUND);
    free(bytes);
    box_fini(&box);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_join_tokens_are_not_restored),
        cmocka_unit_test(test_workers_ahead_of_the_snapshot_go_on_from_what_they_hold),
        cmocka_unit_test(test_the_same_snapshot_twice_is_told_and_repaired),
        cmocka_unit_test(test_damaged_snapshots_are_refused_and_leave_nothing_that_could_be_opened),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
