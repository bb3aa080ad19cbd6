/* links: mu_fuzz_coordinator */
/* What lies in the coordinator's store: any records, however they contradict each other, are refused with one line, or
 * start a coordinator that works, and what that one stores starts the next.
 *
 * Input: (key, value)* as they lie in the store. They are tried there, and as restored from a snapshot. */
#include "coordinator/snapshot.h"
#include "tests/fuzz/coordinator.h"

static struct mu_store *fill(struct fuzz_input input)
{
    struct mu_store *store = mu_store_memory_new();
    struct mu_store_batch batch;
    struct mu_error err = {0};
    mu_store_batch_init(&batch);
    enum mu_status status = mu_records_write_format(store, &err);
    MU_ASSERT(store && status == MU_OK);
    while (input.left > 0) {
        size_t key_bytes, value_bytes;
        uint8_t *key = fuzz_part(&input, &key_bytes), *value = fuzz_part(&input, &value_bytes);
        if (key_bytes > 0 && key_bytes <= MU_STORE_KEY_BYTES_MAX)
            status = mu_store_batch_put(&batch, key, key_bytes, value, value_bytes);
        MU_ASSERT(status == MU_OK);
        free(key);
        free(value);
    }
    status = mu_store_write(store, &batch, &err);
    MU_ASSERT(status == MU_OK);
    mu_store_batch_fini(&batch);
    return store;
}

static void run_on(struct mu_store *store)
{
    static struct fuzz_coordinator coordinator;
    struct mu_error err = {0};
    if (fuzz_coordinator_init(&coordinator, store, &err)) {
        for (int i = 0; i < 8; i++)
            fuzz_coordinator_pass(&coordinator, 30000000);
        fuzz_coordinator_check_restart(&coordinator);
    }
    fuzz_coordinator_fini(&coordinator);
}

/* Restoring judges the same records on another way, and changes their numbers. */
static struct mu_store *restore(struct mu_store *store)
{
    uint8_t *bytes = NULL;
    size_t size_bytes = 0;
    struct mu_error err = {0};
    struct mu_snapshot_report report;
    struct mu_store *next = mu_store_memory_new();
    enum mu_status status = mu_snapshot_take(store, &bytes, &size_bytes, &err);
    MU_ASSERT(next && status == MU_OK);
    status = mu_snapshot_restore(bytes, size_bytes, 0, 1700000000000000, next, &report, &err);
    fuzz_judge(status, &err);
    free(bytes);
    if (status == MU_OK)
        return next;
    mu_store_free(next);
    return NULL;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size_bytes)
{
    struct mu_store *store = fill((struct fuzz_input){data, size_bytes});
    struct mu_store *restored = restore(store);
    run_on(store);
    if (restored)
        run_on(restored);
    return 0;
}
