/* The key-value store of the coordinator, as a vtable: RocksDB in production, memory for tests and for `muster up
 * --volatile`, and a twin that loses unsynced writes for the simulator.
 *
 * Keys and values are bytes; keys are ordered as by memcmp, a shorter key before its extensions. A write is one batch:
 * after MU_OK all of it is on stable storage, after any error none of it is visible. A later operation of a batch wins
 * over an earlier one on the same key. Threads: one thread at a time may use a store (the storage thread, once there is
 * one); stores share nothing with each other. Ownership: batches belong to the caller and are not changed; a store is
 * freed by mu_store_free. */
#ifndef MU_STORAGE_STORE_H
#define MU_STORAGE_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

enum {
    MU_STORE_KEY_BYTES_MAX = 512,        /* 1 to this */
    MU_STORE_VALUE_BYTES_MAX = 16 << 20, /* 0 to this */
    MU_STORE_BATCH_OPS_MAX = 1 << 17,    /* puts and deletes of one batch */
    MU_STORE_BATCH_BYTES_MAX = 64 << 20, /* keys and values of one batch */
    MU_STORE_RESERVE_BYTES_DEFAULT = 256 << 20,
    MU_STORE_BALLAST_BYTES_DEFAULT = 64 << 20,
};

/* A list of puts and deletes. `mu_store_batch_init` an embedded one; all bytes are copied in. The first error sticks:
 * later additions return it too and the store refuses the batch, so that a caller may check once. */
struct mu_store_op {
    bool is_delete;
    uint32_t key_bytes, value_bytes;
    size_t key_at; /* index into bytes; the value follows the key */
};
struct mu_store_batch {
    struct mu_store_op *ops;
    size_t op_count, op_capacity;
    uint8_t *bytes;
    size_t size_bytes, capacity_bytes;
    enum mu_status failed;
};

void mu_store_batch_init(struct mu_store_batch *batch);
void mu_store_batch_fini(struct mu_store_batch *batch);
void mu_store_batch_clear(struct mu_store_batch *batch); /* keeps the memory */
/* MU_ERR_LIMIT: a named limit above; MU_ERR_NO_MEMORY. */
enum mu_status mu_store_batch_put(struct mu_store_batch *batch, const void *key, size_t key_bytes, const void *value,
                                  size_t value_bytes) MU_WARN_UNUSED;
enum mu_status mu_store_batch_delete(struct mu_store_batch *batch, const void *key, size_t key_bytes) MU_WARN_UNUSED;
/* Appends all operations of `from`. On error `into` is unchanged and not marked as failed. */
enum mu_status mu_store_batch_append(struct mu_store_batch *into, const struct mu_store_batch *from) MU_WARN_UNUSED;
static inline const uint8_t *mu_store_op_key(const struct mu_store_batch *batch, const struct mu_store_op *op)
{
    return batch->bytes + op->key_at;
}
static inline const uint8_t *mu_store_op_value(const struct mu_store_batch *batch, const struct mu_store_op *op)
{
    return batch->bytes + op->key_at + op->key_bytes;
}

/* Called for each pair in key order; the bytes are valid during the call. Returns false to end the scan. The callback
 * must not write. */
typedef bool (*mu_store_scan_fn)(void *arg, const uint8_t *key, size_t key_bytes, const uint8_t *value,
                                 size_t value_bytes);

struct mu_store;
struct mu_store_ops {
    const char *name; /* "rocksdb", "memory", "lossy" */
    enum mu_status (*write)(struct mu_store *store, const struct mu_store_batch *batch, struct mu_error *err);
    enum mu_status (*get)(struct mu_store *store, const void *key, size_t key_bytes, uint8_t **ret_value,
                          size_t *ret_value_bytes, struct mu_error *err);
    enum mu_status (*scan)(struct mu_store *store, const void *prefix, size_t prefix_bytes, const void *after_key,
                           size_t after_bytes, size_t limit, mu_store_scan_fn fn, void *arg, struct mu_error *err);
    enum mu_status (*check)(struct mu_store *store, struct mu_error *err);
    void (*free)(struct mu_store *store);
};
struct mu_store {
    const struct mu_store_ops *ops;
};

/* One atomic, synced batch. MU_ERR_NO_SPACE: refused before anything was written, may be retried when space was freed;
 * any other error of the device is final for this open store (close it, open it again). An empty batch is MU_OK and
 * touches nothing. */
enum mu_status mu_store_write(struct mu_store *store, const struct mu_store_batch *batch,
                              struct mu_error *err) MU_WARN_UNUSED;
/* MU_ERR_NOT_FOUND when absent. *ret_value is from malloc (never NULL on success, also when empty); the caller frees
 * it. */
enum mu_status mu_store_get(struct mu_store *store, const void *key, size_t key_bytes, uint8_t **ret_value,
                            size_t *ret_value_bytes, struct mu_error *err) MU_WARN_UNUSED;
/* Pairs whose key starts with `prefix` (may be empty) and comes after `after_key` (NULL: from the first), ascending, at
 * most `limit` (0: all), as of one moment. The
 * scans of RocksDB and memory may be called from any thread. */
enum mu_status mu_store_scan(struct mu_store *store, const void *prefix, size_t prefix_bytes, const void *after_key,
                             size_t after_bytes, size_t limit, mu_store_scan_fn fn, void *arg,
                             struct mu_error *err) MU_WARN_UNUSED;
/* Would a small write be accepted now? MU_ERR_NO_SPACE with the line to show when free space is below the reserve. For
 * refusing requests at the door. Unlike the rest, callable from any thread. */
enum mu_status mu_store_check(struct mu_store *store, struct mu_error *err) MU_WARN_UNUSED;
/* Everything acknowledged is durable already; this only closes. NULL is fine. */
void mu_store_free(struct mu_store *store);

/* --- RocksDB (store_rocksdb.c) --- */
struct mu_store_rocksdb_config {
    const char *path;       /* directory, created with its parents when absent; one process at a time */
    uint64_t reserve_bytes; /* writes are refused while less is free on its file system; 0 turns the check off (tests
                               only) */
    uint64_t
        ballast_bytes; /* size of the file `ballast` in it, given up when there is too little space to open; 0: none */
};
/* RocksDB 7.8 aborts the process when its file system is full. So writes are refused below the reserve, and after an
 * abort nothing that was acknowledged is missing. MU_ERR_BUSY: another process holds the directory. MU_ERR_CORRUPT: it
 * cannot be read. *ret_notice, if not NULL, receives a line for the log when the ballast was given up ("" otherwise).
 */
enum mu_status mu_store_rocksdb_open(const struct mu_store_rocksdb_config *config, struct mu_store **ret_store,
                                     struct mu_error *ret_notice, struct mu_error *err) MU_WARN_UNUSED;

/* --- memory (store_memory.c) --- */
struct mu_store *mu_store_memory_new(void); /* NULL: no memory */

/* --- the twin that loses unsynced writes (store_lossy.c) --- */
struct mu_store *mu_store_lossy_new(void); /* NULL: no memory */

/* Accepts a batch without syncing it: visible to get and scan, lost in a crash until completed. Counts as a write for
 * fail_at, which makes the submission itself fail. The batch is copied. */
enum mu_status mu_store_lossy_submit(struct mu_store *store, const struct mu_store_batch *batch, uint64_t cookie,
                                     struct mu_error *err) MU_WARN_UNUSED;
/* Makes the oldest `count` submitted batches durable (at most as many as there are); writes their cookies, oldest
 * first, to `ret_cookies` (room for `count`, or NULL). Returns how many. A mu_store_write syncs everything submitted
 * before it, as one log does, but the cookies stay to be collected here. */
size_t mu_store_lossy_complete(struct mu_store *store, size_t count, uint64_t *ret_cookies);
size_t mu_store_lossy_pending(const struct mu_store *store); /* submitted and not completed */
/* Power loss: whatever was not synced is gone, no cookie of it is ever delivered. The store then behaves as freshly
 * opened. */
void mu_store_lossy_crash(struct mu_store *store);
/* As above, but the oldest `keep` unsynced batches had reached the disk although nobody was told. */
void mu_store_lossy_crash_keeping(struct mu_store *store, size_t keep);
/* The n-th write or submit from now (1 = the next) fails with `status` and leaves no trace; 0 disarms. */
void mu_store_lossy_fail_at(struct mu_store *store, uint64_t nth, enum mu_status status);
uint64_t mu_store_lossy_write_count(const struct mu_store *store); /* writes and submits that were accepted */

#endif
