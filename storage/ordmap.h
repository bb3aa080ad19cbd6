/* Ordered map of byte strings in memory (a skip list), under the memory and the lossy store. One thread at a time. */
#ifndef MU_STORAGE_ORDMAP_H
#define MU_STORAGE_ORDMAP_H

#include <stddef.h>
#include <stdint.h>

#include "storage/store.h"

struct mu_ordmap;
struct mu_ordmap_node; /* a pair in the map; valid until it is replaced or deleted */

struct mu_ordmap *mu_ordmap_new(void); /* NULL: no memory */
void mu_ordmap_free(struct mu_ordmap *map);
struct mu_ordmap *mu_ordmap_copy(const struct mu_ordmap *map); /* NULL: no memory */
size_t mu_ordmap_count(const struct mu_ordmap *map);

/* Applies a whole batch, or nothing when memory runs out. */
enum mu_status mu_ordmap_apply(struct mu_ordmap *map, const struct mu_store_batch *batch) MU_WARN_UNUSED;

const struct mu_ordmap_node *mu_ordmap_find(const struct mu_ordmap *map, const void *key, size_t key_bytes);
/* The first pair with a key >= `key`, or > `key` when `after`; NULL: none. */
const struct mu_ordmap_node *mu_ordmap_seek(const struct mu_ordmap *map, const void *key, size_t key_bytes, bool after);
const struct mu_ordmap_node *mu_ordmap_next(const struct mu_ordmap_node *node);
const uint8_t *mu_ordmap_key(const struct mu_ordmap_node *node, size_t *ret_bytes);
const uint8_t *mu_ordmap_value(const struct mu_ordmap_node *node, size_t *ret_bytes);

/* The get and scan of a store over a map. */
enum mu_status mu_ordmap_get_copy(const struct mu_ordmap *map, const void *key, size_t key_bytes, uint8_t **ret_value,
                                  size_t *ret_value_bytes, struct mu_error *err) MU_WARN_UNUSED;
void mu_ordmap_scan(const struct mu_ordmap *map, const void *prefix, size_t prefix_bytes, const void *after_key,
                    size_t after_bytes, size_t limit, mu_store_scan_fn fn, void *arg);

#endif
