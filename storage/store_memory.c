#include <pthread.h>
#include <stdlib.h>

#include "storage/ordmap.h"
#include "storage/store.h"

struct memory_store {
    struct mu_store base;
    struct mu_ordmap *map;
    pthread_mutex_t lock; /* scans come from any thread */
};

static struct memory_store *of(struct mu_store *store)
{
    return (struct memory_store *)store;
}

static enum mu_status memory_write(struct mu_store *store, const struct mu_store_batch *batch, struct mu_error *err)
{
    pthread_mutex_lock(&of(store)->lock);
    enum mu_status status = mu_ordmap_apply(of(store)->map, batch);
    pthread_mutex_unlock(&of(store)->lock);
    if (status != MU_OK)
        return mu_fail(err, status, "store: no memory for a batch of %zu bytes", batch->size_bytes);
    return MU_OK;
}

static enum mu_status memory_get(struct mu_store *store, const void *key, size_t key_bytes, uint8_t **ret_value,
                                 size_t *ret_value_bytes, struct mu_error *err)
{
    pthread_mutex_lock(&of(store)->lock);
    enum mu_status status = mu_ordmap_get_copy(of(store)->map, key, key_bytes, ret_value, ret_value_bytes, err);
    pthread_mutex_unlock(&of(store)->lock);
    return status;
}

static enum mu_status memory_scan(struct mu_store *store, const void *prefix, size_t prefix_bytes,
                                  const void *after_key, size_t after_bytes, size_t limit, mu_store_scan_fn fn,
                                  void *arg, struct mu_error *err)
{
    (void)err;
    pthread_mutex_lock(&of(store)->lock);
    mu_ordmap_scan(of(store)->map, prefix, prefix_bytes, after_key, after_bytes, limit, fn, arg);
    pthread_mutex_unlock(&of(store)->lock);
    return MU_OK;
}

static enum mu_status memory_check(struct mu_store *store, struct mu_error *err)
{
    (void)store;
    (void)err;
    return MU_OK;
}

static void memory_free(struct mu_store *store)
{
    mu_ordmap_free(of(store)->map);
    pthread_mutex_destroy(&of(store)->lock);
    free(store);
}

static const struct mu_store_ops memory_ops = {
    .name = "memory",
    .write = memory_write,
    .get = memory_get,
    .scan = memory_scan,
    .check = memory_check,
    .free = memory_free,
};

struct mu_store *mu_store_memory_new(void)
{
    struct memory_store *store = calloc(1, sizeof *store);
    if (!store)
        return NULL;
    store->base.ops = &memory_ops;
    pthread_mutex_init(&store->lock, NULL);
    store->map = mu_ordmap_new();
    if (!store->map) {
        pthread_mutex_destroy(&store->lock);
        free(store);
        return NULL;
    }
    return &store->base;
}
