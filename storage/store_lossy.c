/* Two maps: what a reader sees now (`visible`), and what is on the imagined disk (`durable`). Between them lies the
 * queue of submitted batches; a crash replaces the first map by a copy of the second. */
#include <stdlib.h>
#include <string.h>

#include "storage/ordmap.h"
#include "storage/store.h"

struct pending {
    struct pending *next;
    struct mu_store_batch batch;
    uint64_t cookie;
    bool is_durable; /* a later synced write took it along; only its cookie is outstanding */
};

struct lossy_store {
    struct mu_store base;
    struct mu_ordmap *visible, *durable;
    struct pending *oldest, **newest_link;
    size_t pending_count;
    uint64_t fail_in; /* 0: disarmed */
    enum mu_status fail_status;
    uint64_t write_count;
};

static struct lossy_store *of(const struct mu_store *store)
{
    return (struct lossy_store *)store;
}

static enum mu_status accept_write(struct lossy_store *store, struct mu_error *err)
{
    if (store->fail_in > 0 && --store->fail_in == 0)
        return mu_fail(err, store->fail_status, "store: write failed as told (%s)", mu_status_name(store->fail_status));
    return MU_OK;
}

/* The twin is a test's tool: out of memory ends the test. */
static void persist(struct lossy_store *store, struct pending *pending)
{
    if (!pending->is_durable) {
        enum mu_status status = mu_ordmap_apply(store->durable, &pending->batch);
        MU_ASSERT(status == MU_OK);
        pending->is_durable = true;
    }
}

static void persist_oldest(struct lossy_store *store, size_t count)
{
    for (struct pending *pending = store->oldest; pending && count > 0; pending = pending->next, count--)
        persist(store, pending);
}

static void pop_oldest(struct lossy_store *store)
{
    struct pending *pending = store->oldest;
    store->oldest = pending->next;
    if (!store->oldest)
        store->newest_link = &store->oldest;
    store->pending_count--;
    mu_store_batch_fini(&pending->batch);
    free(pending);
}

static enum mu_status lossy_write(struct mu_store *base, const struct mu_store_batch *batch, struct mu_error *err)
{
    struct lossy_store *store = of(base);
    enum mu_status status = accept_write(store, err);
    if (status != MU_OK)
        return status;
    status = mu_ordmap_apply(store->visible, batch);
    if (status != MU_OK)
        return mu_fail(err, status, "store: no memory for a batch of %zu bytes", batch->size_bytes);
    persist_oldest(store, store->pending_count);
    status = mu_ordmap_apply(store->durable, batch);
    MU_ASSERT(status == MU_OK);
    store->write_count++;
    return MU_OK;
}

enum mu_status mu_store_lossy_submit(struct mu_store *base, const struct mu_store_batch *batch, uint64_t cookie,
                                     struct mu_error *err)
{
    struct lossy_store *store = of(base);
    enum mu_status status = accept_write(store, err);
    if (status != MU_OK)
        return status;
    struct pending *pending = calloc(1, sizeof *pending);
    if (!pending)
        return mu_fail(err, MU_ERR_NO_MEMORY, "store: no memory for a submitted batch");
    pending->cookie = cookie;
    mu_store_batch_init(&pending->batch);
    status = mu_store_batch_append(&pending->batch, batch);
    if (status == MU_OK)
        status = mu_ordmap_apply(store->visible, batch);
    if (status != MU_OK) {
        mu_store_batch_fini(&pending->batch);
        free(pending);
        return mu_fail(err, status, "store: a submitted batch was refused (%s)", mu_status_name(status));
    }
    *store->newest_link = pending;
    store->newest_link = &pending->next;
    store->pending_count++;
    store->write_count++;
    return MU_OK;
}

size_t mu_store_lossy_complete(struct mu_store *base, size_t count, uint64_t *ret_cookies)
{
    struct lossy_store *store = of(base);
    size_t done = 0;
    for (; done < count && store->oldest; done++) {
        persist(store, store->oldest);
        if (ret_cookies)
            ret_cookies[done] = store->oldest->cookie;
        pop_oldest(store);
    }
    return done;
}

size_t mu_store_lossy_pending(const struct mu_store *base)
{
    return of(base)->pending_count;
}

void mu_store_lossy_crash_keeping(struct mu_store *base, size_t keep)
{
    struct lossy_store *store = of(base);
    for (struct pending *pending = store->oldest; pending && keep > 0; pending = pending->next)
        if (!pending->is_durable) {
            persist(store, pending);
            keep--;
        }
    while (store->oldest)
        pop_oldest(store);
    mu_ordmap_free(store->visible);
    store->visible = mu_ordmap_copy(store->durable);
    MU_ASSERT(store->visible);
}

void mu_store_lossy_crash(struct mu_store *base)
{
    mu_store_lossy_crash_keeping(base, 0);
}

void mu_store_lossy_fail_at(struct mu_store *base, uint64_t nth, enum mu_status status)
{
    of(base)->fail_in = nth;
    of(base)->fail_status = status;
}

uint64_t mu_store_lossy_write_count(const struct mu_store *base)
{
    return of(base)->write_count;
}

static enum mu_status lossy_get(struct mu_store *base, const void *key, size_t key_bytes, uint8_t **ret_value,
                                size_t *ret_value_bytes, struct mu_error *err)
{
    return mu_ordmap_get_copy(of(base)->visible, key, key_bytes, ret_value, ret_value_bytes, err);
}

static enum mu_status lossy_scan(struct mu_store *base, const void *prefix, size_t prefix_bytes, const void *after_key,
                                 size_t after_bytes, size_t limit, mu_store_scan_fn fn, void *arg, struct mu_error *err)
{
    (void)err;
    mu_ordmap_scan(of(base)->visible, prefix, prefix_bytes, after_key, after_bytes, limit, fn, arg);
    return MU_OK;
}

static enum mu_status lossy_check(struct mu_store *base, struct mu_error *err)
{
    const struct lossy_store *store = of(base);
    if (store->fail_in == 1 && store->fail_status == MU_ERR_NO_SPACE)
        return mu_fail(err, MU_ERR_NO_SPACE, "store: no space, as told");
    return MU_OK;
}

static void lossy_free(struct mu_store *base)
{
    struct lossy_store *store = of(base);
    while (store->oldest)
        pop_oldest(store);
    mu_ordmap_free(store->visible);
    mu_ordmap_free(store->durable);
    free(store);
}

static const struct mu_store_ops lossy_ops = {
    .name = "lossy",
    .write = lossy_write,
    .get = lossy_get,
    .scan = lossy_scan,
    .check = lossy_check,
    .free = lossy_free,
};

struct mu_store *mu_store_lossy_new(void)
{
    struct lossy_store *store = calloc(1, sizeof *store);
    if (!store)
        return NULL;
    store->base.ops = &lossy_ops;
    store->newest_link = &store->oldest;
    store->visible = mu_ordmap_new();
    store->durable = mu_ordmap_new();
    if (!store->visible || !store->durable) {
        lossy_free(&store->base);
        return NULL;
    }
    return &store->base;
}
