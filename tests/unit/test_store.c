/* links: mu_storage mu_plan */
/* One conformance test for every store, and what only the lossy twin has. */
#include "storage_testing.h"

#include "common/rng.h"
#include "storage/store.h"

struct fixture {
    const char *name;
    struct scratch scratch;
    struct mu_store *store;
};

static struct mu_store *open_rocksdb(const char *path)
{
    struct mu_store *store;
    struct mu_error err;
    struct mu_store_rocksdb_config config = {.path = path};
    assert_ok(mu_store_rocksdb_open(&config, &store, NULL, &err), &err);
    return store;
}

static int setup(void **state, const char *name)
{
    struct fixture *fixture = calloc(1, sizeof *fixture);
    fixture->name = name;
    fixture->scratch = scratch_make();
    if (strcmp(name, "rocksdb") == 0)
        fixture->store = open_rocksdb(fixture->scratch.path);
    else
        fixture->store = strcmp(name, "memory") == 0 ? mu_store_memory_new() : mu_store_lossy_new();
    assert_non_null(fixture->store);
    assert_string_equal(fixture->store->ops->name, name);
    *state = fixture;
    return 0;
}

static int setup_memory(void **state)
{
    return setup(state, "memory");
}

static int setup_lossy(void **state)
{
    return setup(state, "lossy");
}

static int setup_rocksdb(void **state)
{
    return setup(state, "rocksdb");
}

static int teardown(void **state)
{
    struct fixture *fixture = *state;
    mu_store_free(fixture->store);
    scratch_remove(&fixture->scratch);
    free(fixture);
    return 0;
}

static struct mu_store *store_of(void **state)
{
    return ((struct fixture *)*state)->store;
}

static void put(struct mu_store *store, const char *key, const char *value)
{
    struct mu_error err;
    struct mu_store_batch batch;
    mu_store_batch_init(&batch);
    assert_int_equal(mu_store_batch_put(&batch, key, strlen(key), value, strlen(value)), MU_OK);
    assert_ok(mu_store_write(store, &batch, &err), &err);
    mu_store_batch_fini(&batch);
}

static void assert_value(struct mu_store *store, const char *key, const char *wanted)
{
    uint8_t *value;
    size_t size_bytes;
    struct mu_error err;
    if (!wanted) {
        assert_fails(mu_store_get(store, key, strlen(key), &value, &size_bytes, &err), MU_ERR_NOT_FOUND, &err,
                     "no such key");
        return;
    }
    assert_ok(mu_store_get(store, key, strlen(key), &value, &size_bytes, &err), &err);
    assert_int_equal(size_bytes, strlen(wanted));
    assert_memory_equal(value, wanted, size_bytes);
    free(value);
}

struct collected {
    char text[4096]; /* "key=value " of each pair */
    size_t stop_after;
    size_t count;
};

static bool collect(void *arg, const uint8_t *key, size_t key_bytes, const uint8_t *value, size_t value_bytes)
{
    struct collected *collected = arg;
    size_t at = strlen(collected->text);
    snprintf(collected->text + at, sizeof collected->text - at, "%.*s=%.*s ", (int)key_bytes, (const char *)key,
             (int)value_bytes, (const char *)value);
    return ++collected->count != collected->stop_after;
}

static void assert_scan(struct mu_store *store, const char *prefix, const char *after, size_t limit, const char *wanted)
{
    struct collected collected = {.stop_after = 0};
    struct mu_error err;
    assert_ok(mu_store_scan(store, prefix, strlen(prefix), after, after ? strlen(after) : 0, limit, collect, &collected,
                            &err),
              &err);
    assert_string_equal(collected.text, wanted);
}

static void test_get_after_put_and_delete_sees_the_last_write(void **state)
{
    struct mu_store *store = store_of(state);
    struct mu_error err;
    struct mu_store_batch batch;
    put(store, "a", "1");
    put(store, "b", "");
    assert_value(store, "a", "1");
    assert_value(store, "b", "");
    assert_value(store, "c", NULL);
    /* Within one batch the later operation wins. */
    mu_store_batch_init(&batch);
    assert_int_equal(mu_store_batch_put(&batch, "a", 1, "2", 1), MU_OK);
    assert_int_equal(mu_store_batch_delete(&batch, "a", 1), MU_OK);
    assert_int_equal(mu_store_batch_delete(&batch, "c", 1), MU_OK);
    assert_int_equal(mu_store_batch_put(&batch, "c", 1, "3", 1), MU_OK);
    assert_int_equal(mu_store_batch_delete(&batch, "absent", 6), MU_OK);
    assert_ok(mu_store_write(store, &batch, &err), &err);
    mu_store_batch_fini(&batch);
    assert_value(store, "a", NULL);
    assert_value(store, "c", "3");
    assert_ok(mu_store_check(store, &err), &err);
}

static void test_scan_is_ordered_and_bounded(void **state)
{
    struct mu_store *store = store_of(state);
    static const char *const keys[] = {"job/b", "job/a", "joc", "job/", "job/ab", "jo", "z", "job/\xff"};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        put(store, keys[i], "v");
    assert_scan(store, "job/", NULL, 0, "job/=v job/a=v job/ab=v job/b=v job/\xff=v ");
    assert_scan(store, "job/", NULL, 2, "job/=v job/a=v ");
    assert_scan(store, "job/", "job/a", 0, "job/ab=v job/b=v job/\xff=v ");
    assert_scan(store, "job/", "job/aa", 2, "job/ab=v job/b=v ");
    assert_scan(store, "job/", "a", 1, "job/=v "); /* a position before the prefix */
    assert_scan(store, "job/", "zz", 0, "");       /* and one behind it */
    assert_scan(store, "job/", "job/\xff", 0, "");
    assert_scan(store, "job/c", NULL, 0, "");
    assert_scan(store, "", NULL, 0, "jo=v job/=v job/a=v job/ab=v job/b=v job/\xff=v joc=v z=v ");
    assert_scan(store, "", "job/b", 0, "job/\xff=v joc=v z=v ");
    struct collected collected = {.stop_after = 3};
    struct mu_error err;
    assert_ok(mu_store_scan(store, "", 0, NULL, 0, 0, collect, &collected, &err), &err);
    assert_int_equal(collected.count, 3);
}

static void test_bytes_with_zeros_are_kept(void **state)
{
    struct mu_store *store = store_of(state);
    struct mu_error err;
    struct mu_store_batch batch;
    uint8_t *value;
    size_t size_bytes;
    mu_store_batch_init(&batch);
    assert_int_equal(mu_store_batch_put(&batch, "k\0a", 3, "\0v\0", 3), MU_OK);
    assert_int_equal(mu_store_batch_put(&batch, "k", 1, "other", 5), MU_OK);
    assert_ok(mu_store_write(store, &batch, &err), &err);
    mu_store_batch_fini(&batch);
    assert_ok(mu_store_get(store, "k\0a", 3, &value, &size_bytes, &err), &err);
    assert_int_equal(size_bytes, 3);
    assert_memory_equal(value, "\0v\0", 3);
    free(value);
}

static void test_limits_refuse_and_change_nothing(void **state)
{
    struct mu_store *store = store_of(state);
    struct mu_error err;
    struct mu_store_batch batch;
    char key[MU_STORE_KEY_BYTES_MAX + 1];
    uint8_t *value;
    size_t size_bytes;
    memset(key, 'k', sizeof key);
    put(store, "a", "1");

    mu_store_batch_init(&batch);
    assert_int_equal(mu_store_batch_delete(&batch, "a", 1), MU_OK);
    assert_int_equal(mu_store_batch_put(&batch, key, sizeof key, "v", 1), MU_ERR_LIMIT);
    assert_int_equal(mu_store_batch_put(&batch, "ok", 2, "v", 1), MU_ERR_LIMIT); /* sticks */
    assert_fails(mu_store_write(store, &batch, &err), MU_ERR_LIMIT, &err, "keys 1 to 512");
    assert_value(store, "a", "1");
    mu_store_batch_clear(&batch);
    assert_int_equal(mu_store_batch_put(&batch, "", 0, "v", 1), MU_ERR_LIMIT);
    mu_store_batch_clear(&batch);
    assert_int_equal(mu_store_batch_put(&batch, key, MU_STORE_KEY_BYTES_MAX, "v", 1), MU_OK);
    assert_ok(mu_store_write(store, &batch, &err), &err);
    mu_store_batch_clear(&batch);
    assert_ok(mu_store_write(store, &batch, &err), &err); /* empty */
    mu_store_batch_fini(&batch);
    assert_fails(mu_store_get(store, key, sizeof key, &value, &size_bytes, &err), MU_ERR_LIMIT, &err, "513 bytes");
    assert_fails(mu_store_scan(store, key, sizeof key, NULL, 0, 0, collect, NULL, &err), MU_ERR_LIMIT, &err,
                 "513 bytes");
}

/* A list so plain that it cannot be wrong, against the store, over many random batches. */
struct model {
    char keys[64][8];
    char values[64][16];
    size_t count;
};

static void model_set(struct model *model, const char *key, const char *value)
{
    size_t i = 0;
    while (i < model->count && strcmp(model->keys[i], key) < 0)
        i++;
    bool exists = i < model->count && strcmp(model->keys[i], key) == 0;
    if (value && !exists) {
        memmove(model->keys[i + 1], model->keys[i], (model->count - i) * sizeof model->keys[0]);
        memmove(model->values[i + 1], model->values[i], (model->count - i) * sizeof model->values[0]);
        strcpy(model->keys[i], key);
        model->count++;
    }
    if (value)
        strcpy(model->values[i], value);
    if (!value && exists) {
        model->count--;
        memmove(model->keys[i], model->keys[i + 1], (model->count - i) * sizeof model->keys[0]);
        memmove(model->values[i], model->values[i + 1], (model->count - i) * sizeof model->values[0]);
    }
}

static void test_random_batches_agree_with_a_model(void **state)
{
    struct mu_store *store = store_of(state);
    struct model *model = calloc(1, sizeof *model);
    struct mu_store_batch batch;
    struct mu_error err;
    uint64_t random = 7;
    mu_store_batch_init(&batch);
    for (int round = 0; round < 60; round++) {
        mu_store_batch_clear(&batch);
        for (uint64_t ops = mu_splitmix64(&random) % 9; ops > 0; ops--) {
            char key[8], value[16];
            uint64_t bits = mu_splitmix64(&random);
            snprintf(key, sizeof key, "%0*u", bits & 1 ? 2 : 1, (unsigned)(bits >> 8) % 40);
            snprintf(value, sizeof value, "%u", (unsigned)(bits >> 32) % 1000);
            bool is_delete = (bits >> 1 & 3) == 0;
            assert_int_equal(is_delete ? mu_store_batch_delete(&batch, key, strlen(key))
                                       : mu_store_batch_put(&batch, key, strlen(key), value, strlen(value)),
                             MU_OK);
            model_set(model, key, is_delete ? NULL : value);
        }
        assert_ok(mu_store_write(store, &batch, &err), &err);
        char wanted[4096] = "";
        for (size_t i = 0; i < model->count; i++)
            snprintf(wanted + strlen(wanted), sizeof wanted - strlen(wanted), "%s=%s ", model->keys[i],
                     model->values[i]);
        assert_scan(store, "", NULL, 0, wanted);
    }
    assert_true(model->count > 10);
    mu_store_batch_fini(&batch);
    free(model);
}

static void test_rocksdb_keeps_everything_over_a_reopen(void **state)
{
    struct fixture *fixture = *state;
    put(fixture->store, "a", "1");
    put(fixture->store, "b", "2");
    mu_store_free(fixture->store);
    fixture->store = open_rocksdb(fixture->scratch.path);
    assert_scan(fixture->store, "", NULL, 0, "a=1 b=2 ");
}

/* --- lossy --- */

static void submit(struct mu_store *store, const char *key, const char *value, uint64_t cookie)
{
    struct mu_error err;
    struct mu_store_batch batch;
    mu_store_batch_init(&batch);
    assert_int_equal(mu_store_batch_put(&batch, key, strlen(key), value, strlen(value)), MU_OK);
    assert_ok(mu_store_lossy_submit(store, &batch, cookie, &err), &err);
    mu_store_batch_fini(&batch);
}

static void test_lossy_crash_loses_what_was_not_completed(void **state)
{
    struct mu_store *store = store_of(state);
    uint64_t cookies[4];
    put(store, "base", "0");
    submit(store, "a", "1", 101);
    submit(store, "a", "2", 102);
    submit(store, "b", "3", 103);
    assert_scan(store, "", NULL, 0, "a=2 b=3 base=0 "); /* written, not synced */
    assert_int_equal(mu_store_lossy_complete(store, 1, cookies), 1);
    assert_int_equal(cookies[0], 101);
    assert_int_equal(mu_store_lossy_pending(store), 2);
    mu_store_lossy_crash(store);
    assert_scan(store, "", NULL, 0, "a=1 base=0 ");
    assert_int_equal(mu_store_lossy_pending(store), 0);
    assert_int_equal(mu_store_lossy_complete(store, 4, cookies), 0);
    submit(store, "c", "4", 104);
    assert_int_equal(mu_store_lossy_complete(store, 4, cookies), 1);
    assert_int_equal(cookies[0], 104);
    mu_store_lossy_crash(store);
    assert_scan(store, "", NULL, 0, "a=1 base=0 c=4 ");
}

static void test_lossy_crash_may_keep_a_prefix_that_nobody_was_told_of(void **state)
{
    struct mu_store *store = store_of(state);
    submit(store, "a", "1", 1);
    submit(store, "b", "2", 2);
    submit(store, "a", "3", 3);
    mu_store_lossy_crash_keeping(store, 2);
    assert_scan(store, "", NULL, 0, "a=1 b=2 ");
}

static void test_lossy_synced_write_takes_earlier_submissions_along(void **state)
{
    struct mu_store *store = store_of(state);
    uint64_t cookies[2];
    submit(store, "a", "1", 1);
    submit(store, "b", "1", 2);
    put(store, "a", "2");
    submit(store, "b", "3", 3);
    assert_int_equal(mu_store_lossy_pending(store), 3);
    /* Its cookie is still to come, but must not bring the old value back. */
    assert_int_equal(mu_store_lossy_complete(store, 1, cookies), 1);
    assert_int_equal(cookies[0], 1);
    mu_store_lossy_crash(store);
    assert_scan(store, "", NULL, 0, "a=2 b=1 ");
}

static void test_lossy_fails_the_write_it_was_told_to(void **state)
{
    struct mu_store *store = store_of(state);
    struct mu_error err;
    struct mu_store_batch batch;
    mu_store_lossy_fail_at(store, 2, MU_ERR_NO_SPACE);
    put(store, "a", "1");
    assert_int_equal(mu_store_check(store, &err), MU_ERR_NO_SPACE);
    mu_store_batch_init(&batch);
    assert_int_equal(mu_store_batch_put(&batch, "a", 1, "2", 1), MU_OK);
    assert_fails(mu_store_write(store, &batch, &err), MU_ERR_NO_SPACE, &err, "as told");
    assert_value(store, "a", "1");
    mu_store_lossy_fail_at(store, 1, MU_ERR_IO);
    assert_fails(mu_store_lossy_submit(store, &batch, 9, &err), MU_ERR_IO, &err, "as told");
    assert_int_equal(mu_store_lossy_pending(store), 0);
    assert_ok(mu_store_write(store, &batch, &err), &err);
    assert_value(store, "a", "2");
    assert_int_equal(mu_store_lossy_write_count(store), 2);
    mu_store_batch_fini(&batch);
}

static void test_batch_append_respects_limits_and_order(void **state)
{
    (void)state;
    struct mu_store_batch a, b;
    mu_store_batch_init(&a);
    mu_store_batch_init(&b);
    char *big = calloc(1, MU_STORE_VALUE_BYTES_MAX + 1);
    assert_int_equal(mu_store_batch_put(&a, "k", 1, big, (size_t)MU_STORE_VALUE_BYTES_MAX + 1), MU_ERR_LIMIT);
    mu_store_batch_clear(&a);
    for (int i = 0; i < 3; i++)
        assert_int_equal(mu_store_batch_put(&a, "k", 1, big, MU_STORE_VALUE_BYTES_MAX), MU_OK);
    assert_int_equal(mu_store_batch_put(&b, "k", 1, big, MU_STORE_VALUE_BYTES_MAX - 4), MU_OK);
    assert_int_equal(mu_store_batch_append(&a, &b), MU_OK); /* 4 keys and 4 values less 4 bytes: exactly the limit */
    assert_int_equal(a.size_bytes, MU_STORE_BATCH_BYTES_MAX);
    assert_int_equal(mu_store_batch_append(&a, &b), MU_ERR_LIMIT);
    assert_int_equal(a.op_count, 4);
    assert_int_equal(a.failed, MU_OK); /* append leaves the target usable */
    mu_store_batch_clear(&a);
    mu_store_batch_clear(&b);
    assert_int_equal(mu_store_batch_put(&a, "x", 1, "1", 1), MU_OK);
    assert_int_equal(mu_store_batch_put(&b, "yy", 2, "22", 2), MU_OK);
    assert_int_equal(mu_store_batch_append(&a, &b), MU_OK);
    assert_memory_equal(mu_store_op_key(&a, &a.ops[1]), "yy", 2);
    assert_memory_equal(mu_store_op_value(&a, &a.ops[1]), "22", 2);
    mu_store_batch_fini(&a);
    mu_store_batch_fini(&b);
    free(big);
}

#define CONFORMANCE(test)                                                                                              \
    {"memory: " #test, test, setup_memory, teardown, NULL}, {"lossy: " #test, test, setup_lossy, teardown, NULL},      \
    {                                                                                                                  \
        "rocksdb: " #test, test, setup_rocksdb, teardown, NULL                                                         \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        CONFORMANCE(test_get_after_put_and_delete_sees_the_last_write),
        CONFORMANCE(test_scan_is_ordered_and_bounded),
        CONFORMANCE(test_bytes_with_zeros_are_kept),
        CONFORMANCE(test_limits_refuse_and_change_nothing),
        CONFORMANCE(test_random_batches_agree_with_a_model),
        cmocka_unit_test_setup_teardown(test_rocksdb_keeps_everything_over_a_reopen, setup_rocksdb, teardown),
        cmocka_unit_test_setup_teardown(test_lossy_crash_loses_what_was_not_completed, setup_lossy, teardown),
        cmocka_unit_test_setup_teardown(test_lossy_crash_may_keep_a_prefix_that_nobody_was_told_of, setup_lossy,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_lossy_synced_write_takes_earlier_submissions_along, setup_lossy, teardown),
        cmocka_unit_test_setup_teardown(test_lossy_fails_the_write_it_was_told_to, setup_lossy, teardown),
        cmocka_unit_test(test_batch_append_respects_limits_and_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
