/* links: mu_storage mu_plan */
#include "storage_testing.h"

#include <pthread.h>

#include "storage/writer.h"

/* A store whose writes wait at a gate, so that a test decides what piles up behind it. */
struct gated_store {
    struct mu_store base;
    struct mu_store *inner;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int allowed;      /* writes that may still pass; -1: all */
    int waiting;      /* a write stands at the gate */
    int refuse_space; /* so many writes are answered MU_ERR_NO_SPACE; -1: all */
    enum mu_status fail_with;
    size_t writes, ops_of_last;
};

static struct gated_store *gated(struct mu_store *store)
{
    return (struct gated_store *)store;
}

static enum mu_status gated_write(struct mu_store *base, const struct mu_store_batch *batch, struct mu_error *err)
{
    struct gated_store *store = gated(base);
    enum mu_status status = MU_OK;
    pthread_mutex_lock(&store->lock);
    store->waiting++;
    pthread_cond_broadcast(&store->changed);
    while (store->allowed == 0)
        pthread_cond_wait(&store->changed, &store->lock);
    if (store->allowed > 0)
        store->allowed--;
    store->waiting--;
    if (store->refuse_space != 0) {
        if (store->refuse_space > 0)
            store->refuse_space--;
        status = mu_fail(err, MU_ERR_NO_SPACE, "no space in the test");
    } else if (store->fail_with != MU_OK) {
        status = mu_fail(err, store->fail_with, "broken in the test");
    } else {
        store->writes++;
        store->ops_of_last = batch->op_count;
    }
    pthread_mutex_unlock(&store->lock);
    return status == MU_OK ? mu_store_write(store->inner, batch, err) : status;
}

static const struct mu_store_ops gated_ops = {.name = "gated", .write = gated_write};

static void gate_init(struct gated_store *store, int allowed)
{
    *store = (struct gated_store){.base.ops = &gated_ops, .inner = mu_store_memory_new(), .allowed = allowed};
    assert_non_null(store->inner);
    pthread_mutex_init(&store->lock, NULL);
    pthread_cond_init(&store->changed, NULL);
}

static void gate_fini(struct gated_store *store)
{
    mu_store_free(store->inner);
    pthread_cond_destroy(&store->changed);
    pthread_mutex_destroy(&store->lock);
}

static void gate_await_waiting(struct gated_store *store)
{
    pthread_mutex_lock(&store->lock);
    while (store->waiting == 0)
        pthread_cond_wait(&store->changed, &store->lock);
    pthread_mutex_unlock(&store->lock);
}

static void gate_set(struct gated_store *store, int allowed, int refuse_space, enum mu_status fail_with)
{
    pthread_mutex_lock(&store->lock);
    store->allowed = allowed;
    store->refuse_space = refuse_space;
    store->fail_with = fail_with;
    pthread_cond_broadcast(&store->changed);
    pthread_mutex_unlock(&store->lock);
}

/* What the callbacks saw. */
struct seen {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t cookies[8192];
    enum mu_status status[8192];
    size_t count, calls;
    int stalls, resumes;
    char text[MU_ERROR_TEXT_SIZE];
};

static void on_done(void *arg, const uint64_t *cookies, size_t count, enum mu_status status, const struct mu_error *err)
{
    struct seen *seen = arg;
    pthread_mutex_lock(&seen->lock);
    for (size_t i = 0; i < count; i++) {
        seen->cookies[seen->count] = cookies[i];
        seen->status[seen->count++] = status;
    }
    seen->calls++;
    if (err)
        strcpy(seen->text, err->text);
    pthread_cond_broadcast(&seen->changed);
    pthread_mutex_unlock(&seen->lock);
}

static void on_stalled(void *arg, const struct mu_error *err)
{
    struct seen *seen = arg;
    pthread_mutex_lock(&seen->lock);
    if (err) {
        seen->stalls++;
        strcpy(seen->text, err->text);
    } else {
        seen->resumes++;
    }
    pthread_cond_broadcast(&seen->changed);
    pthread_mutex_unlock(&seen->lock);
}

static struct seen *seen_new(void)
{
    struct seen *seen = calloc(1, sizeof *seen);
    pthread_mutex_init(&seen->lock, NULL);
    pthread_cond_init(&seen->changed, NULL);
    return seen;
}

static void seen_free(struct seen *seen)
{
    pthread_cond_destroy(&seen->changed);
    pthread_mutex_destroy(&seen->lock);
    free(seen);
}

static void await_count(struct seen *seen, size_t count)
{
    pthread_mutex_lock(&seen->lock);
    while (seen->count < count)
        pthread_cond_wait(&seen->changed, &seen->lock);
    pthread_mutex_unlock(&seen->lock);
}

static void await_stall(struct seen *seen)
{
    pthread_mutex_lock(&seen->lock);
    while (seen->stalls == 0)
        pthread_cond_wait(&seen->changed, &seen->lock);
    pthread_mutex_unlock(&seen->lock);
}

static struct mu_writer *writer_on(struct mu_store *store, size_t capacity, struct seen *seen)
{
    struct mu_writer *writer;
    struct mu_error err;
    struct mu_writer_config config = {
        .capacity = capacity, .retry_ms = 1, .done = on_done, .stalled = on_stalled, .arg = seen};
    assert_ok(mu_writer_new(store, &config, &writer, &err), &err);
    return writer;
}

static enum mu_status submit(struct mu_writer *writer, const char *key, const char *value, uint64_t cookie)
{
    struct mu_store_batch batch;
    mu_store_batch_init(&batch);
    assert_int_equal(mu_store_batch_put(&batch, key, strlen(key), value, strlen(value)), MU_OK);
    enum mu_status status = mu_writer_submit(writer, &batch, cookie);
    assert_int_equal(batch.op_count, status == MU_OK ? 0 : 1); /* taken, or still the caller's */
    mu_store_batch_fini(&batch);
    return status;
}

static void assert_value(struct mu_store *store, const char *key, const char *wanted)
{
    uint8_t *value;
    size_t size_bytes;
    struct mu_error err;
    assert_ok(mu_store_get(store, key, strlen(key), &value, &size_bytes, &err), &err);
    assert_int_equal(size_bytes, strlen(wanted));
    assert_memory_equal(value, wanted, size_bytes);
    free(value);
}

static void test_waiting_batches_share_one_write(void **state)
{
    (void)state;
    struct gated_store store;
    struct seen *seen = seen_new();
    gate_init(&store, 0);
    struct mu_writer *writer = writer_on(&store.base, 16, seen);
    assert_int_equal(submit(writer, "a", "0", 1), MU_OK);
    gate_await_waiting(&store); /* the first write holds only the first batch */
    for (uint64_t cookie = 2; cookie <= 6; cookie++)
        assert_int_equal(submit(writer, "a", (char[]){(char)('0' + cookie), 0}, cookie), MU_OK);
    assert_int_equal(mu_writer_pending(writer), 6);
    gate_set(&store, -1, 0, MU_OK);
    await_count(seen, 6);
    assert_int_equal(seen->calls, 2);
    assert_int_equal(store.writes, 2);
    assert_int_equal(store.ops_of_last, 5);
    for (size_t i = 0; i < 6; i++) {
        assert_int_equal(seen->cookies[i], i + 1);
        assert_int_equal(seen->status[i], MU_OK);
    }
    assert_value(store.inner, "a", "6"); /* order within the group */
    struct mu_writer_stats stats;
    mu_writer_stats(writer, &stats);
    assert_int_equal(stats.batches, 6);
    assert_int_equal(stats.writes, 2);
    mu_writer_free(writer);
    gate_fini(&store);
    seen_free(seen);
}

static void test_full_queue_refuses_and_keeps_the_batch(void **state)
{
    (void)state;
    struct gated_store store;
    struct seen *seen = seen_new();
    gate_init(&store, 0);
    struct mu_writer *writer = writer_on(&store.base, 2, seen);
    assert_int_equal(submit(writer, "a", "1", 1), MU_OK);
    gate_await_waiting(&store);
    assert_int_equal(submit(writer, "a", "2", 2), MU_OK);
    assert_int_equal(submit(writer, "a", "3", 3), MU_ERR_BUSY);
    gate_set(&store, -1, 0, MU_OK);
    await_count(seen, 2);
    assert_int_equal(submit(writer, "a", "4", 4), MU_OK);
    mu_writer_free(writer); /* writes what waits */
    assert_int_equal(seen->count, 3);
    assert_int_equal(seen->cookies[2], 4);
    assert_value(store.inner, "a", "4");
    gate_fini(&store);
    seen_free(seen);
}

static void test_no_space_is_waited_out(void **state)
{
    (void)state;
    struct gated_store store;
    struct seen *seen = seen_new();
    gate_init(&store, -1);
    gate_set(&store, -1, 3, MU_OK);
    struct mu_writer *writer = writer_on(&store.base, 16, seen);
    assert_int_equal(submit(writer, "a", "1", 1), MU_OK);
    await_count(seen, 1);
    assert_int_equal(seen->status[0], MU_OK);
    assert_int_equal(seen->stalls, 1);
    assert_int_equal(seen->resumes, 1);
    assert_string_equal(seen->text, "no space in the test");
    assert_value(store.inner, "a", "1");
    mu_writer_free(writer);
    gate_fini(&store);
    seen_free(seen);
}

static void test_end_while_there_is_no_space_completes_with_no_space(void **state)
{
    (void)state;
    struct gated_store store;
    struct seen *seen = seen_new();
    gate_init(&store, -1);
    gate_set(&store, -1, -1, MU_OK);
    struct mu_writer *writer = writer_on(&store.base, 16, seen);
    assert_int_equal(submit(writer, "a", "1", 1), MU_OK);
    await_stall(seen);
    assert_int_equal(submit(writer, "b", "1", 2), MU_OK);
    mu_writer_free(writer);
    assert_int_equal(seen->count, 2);
    assert_int_equal(seen->status[0], MU_ERR_NO_SPACE);
    assert_int_equal(seen->status[1], MU_ERR_NO_SPACE);
    gate_fini(&store);
    seen_free(seen);
}

static void test_failure_is_final_for_all_later_batches(void **state)
{
    (void)state;
    struct gated_store store;
    struct seen *seen = seen_new();
    gate_init(&store, -1);
    struct mu_writer *writer = writer_on(&store.base, 16, seen);
    assert_int_equal(submit(writer, "a", "1", 1), MU_OK);
    await_count(seen, 1);
    gate_set(&store, -1, 0, MU_ERR_IO);
    assert_int_equal(submit(writer, "a", "2", 2), MU_OK);
    await_count(seen, 2);
    gate_set(&store, -1, 0, MU_OK); /* the device is well again, but batch 3 may rest on batch 2 */
    assert_int_equal(submit(writer, "a", "3", 3), MU_OK);
    await_count(seen, 3);
    assert_int_equal(seen->status[0], MU_OK);
    assert_int_equal(seen->status[1], MU_ERR_IO);
    assert_int_equal(seen->status[2], MU_ERR_IO);
    assert_string_equal(seen->text, "broken in the test");
    assert_value(store.inner, "a", "1");
    mu_writer_free(writer);
    gate_fini(&store);
    seen_free(seen);
}

static void test_large_batches_are_spread_over_several_writes(void **state)
{
    (void)state;
    struct gated_store store;
    struct seen *seen = seen_new();
    gate_init(&store, 0);
    struct mu_writer *writer = writer_on(&store.base, 16, seen);
    char *big = calloc(1, MU_STORE_VALUE_BYTES_MAX);
    assert_int_equal(submit(writer, "first", "", 0), MU_OK);
    gate_await_waiting(&store);
    for (uint64_t cookie = 1; cookie <= 5; cookie++) {
        struct mu_store_batch batch;
        mu_store_batch_init(&batch);
        assert_int_equal(mu_store_batch_put(&batch, &cookie, sizeof cookie, big, MU_STORE_VALUE_BYTES_MAX), MU_OK);
        assert_int_equal(mu_writer_submit(writer, &batch, cookie), MU_OK);
        mu_store_batch_fini(&batch);
    }
    gate_set(&store, -1, 0, MU_OK);
    await_count(seen, 6);
    assert_int_equal(store.writes, 3); /* 1; then three of 16 MiB and their keys fit into 64 MiB; then two */
    for (size_t i = 0; i < 6; i++)
        assert_int_equal(seen->cookies[i], i);
    mu_writer_free(writer);
    free(big);
    gate_fini(&store);
    seen_free(seen);
}

static void test_bad_batches_and_sizes_are_refused_at_the_door(void **state)
{
    (void)state;
    struct seen *seen = seen_new();
    struct mu_store *store = mu_store_memory_new();
    struct mu_store_batch batch;
    struct mu_writer *writer;
    struct mu_error err;
    struct mu_writer_config config = {.capacity = 0, .retry_ms = 1, .done = on_done, .arg = seen};
    assert_fails(mu_writer_new(store, &config, &writer, &err), MU_ERR_INVALID, &err, "0 batches");
    writer = writer_on(store, 4, seen);
    mu_store_batch_init(&batch);
    assert_int_equal(mu_store_batch_put(&batch, "", 0, "", 0), MU_ERR_LIMIT);
    assert_int_equal(mu_writer_submit(writer, &batch, 1), MU_ERR_LIMIT);
    mu_store_batch_clear(&batch);
    assert_int_equal(mu_writer_submit(writer, &batch, 2), MU_OK); /* empty: a barrier */
    await_count(seen, 1);
    assert_int_equal(seen->cookies[0], 2);
    mu_writer_free(writer);
    mu_writer_free(NULL);
    mu_store_batch_fini(&batch);
    mu_store_free(store);
    seen_free(seen);
}

enum { PRODUCERS = 4, PER_PRODUCER = 500 };

struct producer {
    struct mu_writer *writer;
    struct seen *seen;
    uint64_t id;
};

static void *produce(void *arg)
{
    struct producer *producer = arg;
    for (uint64_t i = 0; i < PER_PRODUCER; i++) {
        char key[32];
        struct mu_store_batch batch;
        mu_store_batch_init(&batch);
        snprintf(key, sizeof key, "p%u", (unsigned)producer->id);
        if (mu_store_batch_put(&batch, key, strlen(key), &i, sizeof i) != MU_OK)
            abort();
        pthread_mutex_lock(&producer->seen->lock);
        while (mu_writer_submit(producer->writer, &batch, producer->id << 32 | i) == MU_ERR_BUSY)
            pthread_cond_wait(&producer->seen->changed, &producer->seen->lock);
        pthread_mutex_unlock(&producer->seen->lock);
        mu_store_batch_fini(&batch);
    }
    return NULL;
}

static void test_many_producers_complete_in_their_own_order(void **state)
{
    (void)state;
    struct seen *seen = seen_new();
    struct mu_store *store = mu_store_memory_new();
    struct mu_writer *writer = writer_on(store, 8, seen);
    struct producer producers[PRODUCERS];
    pthread_t threads[PRODUCERS];
    for (uint64_t i = 0; i < PRODUCERS; i++) {
        producers[i] = (struct producer){.writer = writer, .seen = seen, .id = i};
        assert_int_equal(pthread_create(&threads[i], NULL, produce, &producers[i]), 0);
    }
    for (size_t i = 0; i < PRODUCERS; i++)
        pthread_join(threads[i], NULL);
    mu_writer_free(writer);
    assert_int_equal(seen->count, PRODUCERS * PER_PRODUCER);
    uint64_t next[PRODUCERS] = {0};
    for (size_t i = 0; i < seen->count; i++) {
        assert_int_equal(seen->cookies[i] & UINT32_MAX, next[seen->cookies[i] >> 32]);
        next[seen->cookies[i] >> 32]++;
    }
    mu_store_free(store);
    seen_free(seen);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_waiting_batches_share_one_write),
        cmocka_unit_test(test_full_queue_refuses_and_keeps_the_batch),
        cmocka_unit_test(test_no_space_is_waited_out),
        cmocka_unit_test(test_end_while_there_is_no_space_completes_with_no_space),
        cmocka_unit_test(test_failure_is_final_for_all_later_batches),
        cmocka_unit_test(test_large_batches_are_spread_over_several_writes),
        cmocka_unit_test(test_bad_batches_and_sizes_are_refused_at_the_door),
        cmocka_unit_test(test_many_producers_complete_in_their_own_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
