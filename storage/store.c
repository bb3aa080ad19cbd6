#include "storage/store.h"

#include <stdlib.h>
#include <string.h>

void mu_store_batch_init(struct mu_store_batch *batch)
{
    memset(batch, 0, sizeof *batch);
}

void mu_store_batch_fini(struct mu_store_batch *batch)
{
    free(batch->ops);
    free(batch->bytes);
    mu_store_batch_init(batch);
}

void mu_store_batch_clear(struct mu_store_batch *batch)
{
    batch->op_count = 0;
    batch->size_bytes = 0;
    batch->failed = MU_OK;
}

/* Makes room for `ops` more operations and `bytes` more bytes, within the limits of a batch. */
static enum mu_status make_room(struct mu_store_batch *batch, size_t ops, size_t bytes)
{
    if (ops > MU_STORE_BATCH_OPS_MAX - batch->op_count || bytes > MU_STORE_BATCH_BYTES_MAX - batch->size_bytes)
        return MU_ERR_LIMIT;
    if (batch->op_count + ops > batch->op_capacity) {
        size_t capacity = batch->op_capacity ? batch->op_capacity : 16;
        while (capacity < batch->op_count + ops)
            capacity *= 2;
        struct mu_store_op *grown = realloc(batch->ops, capacity * sizeof *grown);
        if (!grown)
            return MU_ERR_NO_MEMORY;
        batch->ops = grown;
        batch->op_capacity = capacity;
    }
    if (batch->size_bytes + bytes > batch->capacity_bytes) {
        size_t capacity = batch->capacity_bytes ? batch->capacity_bytes : 1024;
        while (capacity < batch->size_bytes + bytes)
            capacity *= 2;
        uint8_t *grown = realloc(batch->bytes, capacity);
        if (!grown)
            return MU_ERR_NO_MEMORY;
        batch->bytes = grown;
        batch->capacity_bytes = capacity;
    }
    return MU_OK;
}

static enum mu_status add(struct mu_store_batch *batch, bool is_delete, const void *key, size_t key_bytes,
                          const void *value, size_t value_bytes)
{
    if (batch->failed != MU_OK)
        return batch->failed;
    if (key_bytes == 0 || key_bytes > MU_STORE_KEY_BYTES_MAX || value_bytes > MU_STORE_VALUE_BYTES_MAX)
        return batch->failed = MU_ERR_LIMIT;
    batch->failed = make_room(batch, 1, key_bytes + value_bytes);
    if (batch->failed != MU_OK)
        return batch->failed;
    batch->ops[batch->op_count++] = (struct mu_store_op){.is_delete = is_delete,
                                                         .key_bytes = (uint32_t)key_bytes,
                                                         .value_bytes = (uint32_t)value_bytes,
                                                         .key_at = batch->size_bytes};
    memcpy(batch->bytes + batch->size_bytes, key, key_bytes);
    if (value_bytes > 0)
        memcpy(batch->bytes + batch->size_bytes + key_bytes, value, value_bytes);
    batch->size_bytes += key_bytes + value_bytes;
    return MU_OK;
}

enum mu_status mu_store_batch_put(struct mu_store_batch *batch, const void *key, size_t key_bytes, const void *value,
                                  size_t value_bytes)
{
    return add(batch, false, key, key_bytes, value, value_bytes);
}

enum mu_status mu_store_batch_delete(struct mu_store_batch *batch, const void *key, size_t key_bytes)
{
    return add(batch, true, key, key_bytes, NULL, 0);
}

enum mu_status mu_store_batch_append(struct mu_store_batch *into, const struct mu_store_batch *from)
{
    if (into->failed != MU_OK || from->failed != MU_OK)
        return into->failed != MU_OK ? into->failed : from->failed;
    enum mu_status status = make_room(into, from->op_count, from->size_bytes);
    if (status != MU_OK)
        return status;
    for (size_t i = 0; i < from->op_count; i++) {
        struct mu_store_op op = from->ops[i];
        op.key_at += into->size_bytes;
        into->ops[into->op_count++] = op;
    }
    if (from->size_bytes > 0)
        memcpy(into->bytes + into->size_bytes, from->bytes, from->size_bytes);
    into->size_bytes += from->size_bytes;
    return MU_OK;
}

enum mu_status mu_store_write(struct mu_store *store, const struct mu_store_batch *batch, struct mu_error *err)
{
    if (batch->failed != MU_OK)
        return mu_fail(
            err, batch->failed,
            "store: a batch was refused (%s): keys 1 to %d bytes, values up to %d, %d operations and %d bytes in all",
            mu_status_name(batch->failed), MU_STORE_KEY_BYTES_MAX, MU_STORE_VALUE_BYTES_MAX, MU_STORE_BATCH_OPS_MAX,
            MU_STORE_BATCH_BYTES_MAX);
    if (batch->op_count == 0)
        return MU_OK;
    return store->ops->write(store, batch, err);
}

enum mu_status mu_store_get(struct mu_store *store, const void *key, size_t key_bytes, uint8_t **ret_value,
                            size_t *ret_value_bytes, struct mu_error *err)
{
    if (key_bytes == 0 || key_bytes > MU_STORE_KEY_BYTES_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "store: a key of %zu bytes is not allowed: 1 to %d", key_bytes,
                       MU_STORE_KEY_BYTES_MAX);
    return store->ops->get(store, key, key_bytes, ret_value, ret_value_bytes, err);
}

enum mu_status mu_store_scan(struct mu_store *store, const void *prefix, size_t prefix_bytes, const void *after_key,
                             size_t after_bytes, size_t limit, mu_store_scan_fn fn, void *arg, struct mu_error *err)
{
    if (prefix_bytes > MU_STORE_KEY_BYTES_MAX || (after_key && after_bytes > MU_STORE_KEY_BYTES_MAX))
        return mu_fail(err, MU_ERR_LIMIT, "store: a scan bound of %zu bytes is not allowed: at most %d",
                       prefix_bytes > MU_STORE_KEY_BYTES_MAX ? prefix_bytes : after_bytes, MU_STORE_KEY_BYTES_MAX);
    return store->ops->scan(store, prefix, prefix_bytes, after_key, after_bytes, limit, fn, arg, err);
}

enum mu_status mu_store_check(struct mu_store *store, struct mu_error *err)
{
    return store->ops->check(store, err);
}

void mu_store_free(struct mu_store *store)
{
    if (store)
        store->ops->free(store);
}
