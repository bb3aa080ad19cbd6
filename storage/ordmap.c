#include "storage/ordmap.h"

#include <stdlib.h>
#include <string.h>

#include "common/rng.h"

enum { LEVELS_MAX = 20 }; /* p = 1/4: good for 4^20 pairs */

struct mu_ordmap_node {
    uint8_t *bytes; /* key, then value */
    uint32_t key_bytes, value_bytes;
    uint32_t levels;
    struct mu_ordmap_node *next[];
};

struct mu_ordmap {
    uint64_t random; /* fixed seed: a run of the simulator is a function of its own seed alone */
    size_t count;
    struct mu_ordmap_node *head; /* LEVELS_MAX levels, no key */
};

static struct mu_ordmap_node *node_new(uint32_t levels, const uint8_t *key_and_value, size_t key_bytes,
                                       size_t value_bytes)
{
    struct mu_ordmap_node *node = calloc(1, sizeof *node + levels * sizeof node->next[0]);
    if (!node)
        return NULL;
    node->levels = levels;
    node->key_bytes = (uint32_t)key_bytes;
    node->value_bytes = (uint32_t)value_bytes;
    if (key_bytes + value_bytes > 0) {
        node->bytes = malloc(key_bytes + value_bytes);
        if (!node->bytes) {
            free(node);
            return NULL;
        }
        memcpy(node->bytes, key_and_value, key_bytes + value_bytes);
    }
    return node;
}

static void node_free(struct mu_ordmap_node *node)
{
    if (node)
        free(node->bytes);
    free(node);
}

struct mu_ordmap *mu_ordmap_new(void)
{
    struct mu_ordmap *map = calloc(1, sizeof *map);
    if (!map)
        return NULL;
    map->random = 0x9e3779b97f4a7c15u;
    map->head = node_new(LEVELS_MAX, NULL, 0, 0);
    if (!map->head) {
        free(map);
        return NULL;
    }
    return map;
}

void mu_ordmap_free(struct mu_ordmap *map)
{
    if (!map)
        return;
    for (struct mu_ordmap_node *node = map->head, *next; node; node = next) {
        next = node->next[0];
        node_free(node);
    }
    free(map);
}

struct mu_ordmap *mu_ordmap_copy(const struct mu_ordmap *map)
{
    struct mu_ordmap *copy = mu_ordmap_new();
    if (!copy)
        return NULL;
    struct mu_ordmap_node *last[LEVELS_MAX];
    for (uint32_t level = 0; level < LEVELS_MAX; level++)
        last[level] = copy->head;
    for (const struct mu_ordmap_node *node = map->head->next[0]; node; node = node->next[0]) {
        struct mu_ordmap_node *twin = node_new(node->levels, node->bytes, node->key_bytes, node->value_bytes);
        if (!twin) {
            mu_ordmap_free(copy);
            return NULL;
        }
        for (uint32_t level = 0; level < twin->levels; level++) {
            last[level]->next[level] = twin;
            last[level] = twin;
        }
        copy->count++;
    }
    copy->random = map->random;
    return copy;
}

size_t mu_ordmap_count(const struct mu_ordmap *map)
{
    return map->count;
}

static int compare(const struct mu_ordmap_node *node, const void *key, size_t key_bytes)
{
    size_t common = node->key_bytes < key_bytes ? node->key_bytes : key_bytes;
    int order = common ? memcmp(node->bytes, key, common) : 0;
    if (order)
        return order;
    return node->key_bytes < key_bytes ? -1 : node->key_bytes > key_bytes;
}

/* The last node of each level whose key is < key (<= key when `after`). */
static struct mu_ordmap_node *descend(const struct mu_ordmap *map, const void *key, size_t key_bytes, bool after,
                                      struct mu_ordmap_node *last[LEVELS_MAX])
{
    struct mu_ordmap_node *node = map->head;
    for (uint32_t level = LEVELS_MAX; level-- > 0;) {
        while (node->next[level] && compare(node->next[level], key, key_bytes) < (after ? 1 : 0))
            node = node->next[level];
        if (last)
            last[level] = node;
    }
    return node;
}

static uint32_t draw_levels(struct mu_ordmap *map)
{
    uint64_t bits = mu_splitmix64(&map->random);
    uint32_t levels = 1;
    for (; levels < LEVELS_MAX && (bits & 3) == 0; bits >>= 2)
        levels++;
    return levels;
}

static void remove_key(struct mu_ordmap *map, const void *key, size_t key_bytes)
{
    struct mu_ordmap_node *last[LEVELS_MAX];
    descend(map, key, key_bytes, false, last);
    struct mu_ordmap_node *node = last[0]->next[0];
    if (!node || compare(node, key, key_bytes) != 0)
        return;
    for (uint32_t level = 0; level < node->levels; level++)
        last[level]->next[level] = node->next[level];
    node_free(node);
    map->count--;
}

static void insert(struct mu_ordmap *map, struct mu_ordmap_node *node)
{
    struct mu_ordmap_node *last[LEVELS_MAX];
    remove_key(map, node->bytes, node->key_bytes);
    descend(map, node->bytes, node->key_bytes, false, last);
    for (uint32_t level = 0; level < node->levels; level++) {
        node->next[level] = last[level]->next[level];
        last[level]->next[level] = node;
    }
    map->count++;
}

enum mu_status mu_ordmap_apply(struct mu_ordmap *map, const struct mu_store_batch *batch)
{
    /* All memory first, so that the second pass cannot fail half-way. */
    struct mu_ordmap_node **made = calloc(batch->op_count ? batch->op_count : 1, sizeof *made);
    if (!made)
        return MU_ERR_NO_MEMORY;
    enum mu_status status = MU_OK;
    for (size_t i = 0; i < batch->op_count && status == MU_OK; i++) {
        const struct mu_store_op *op = &batch->ops[i];
        if (op->is_delete)
            continue;
        made[i] = node_new(draw_levels(map), mu_store_op_key(batch, op), op->key_bytes, op->value_bytes);
        if (!made[i])
            status = MU_ERR_NO_MEMORY;
    }
    for (size_t i = 0; i < batch->op_count; i++) {
        const struct mu_store_op *op = &batch->ops[i];
        if (status != MU_OK)
            node_free(made[i]);
        else if (op->is_delete)
            remove_key(map, mu_store_op_key(batch, op), op->key_bytes);
        else
            insert(map, made[i]);
    }
    free(made);
    return status;
}

const struct mu_ordmap_node *mu_ordmap_seek(const struct mu_ordmap *map, const void *key, size_t key_bytes, bool after)
{
    return descend(map, key, key_bytes, after, NULL)->next[0];
}

const struct mu_ordmap_node *mu_ordmap_find(const struct mu_ordmap *map, const void *key, size_t key_bytes)
{
    const struct mu_ordmap_node *node = mu_ordmap_seek(map, key, key_bytes, false);
    return node && compare(node, key, key_bytes) == 0 ? node : NULL;
}

const struct mu_ordmap_node *mu_ordmap_next(const struct mu_ordmap_node *node)
{
    return node->next[0];
}

const uint8_t *mu_ordmap_key(const struct mu_ordmap_node *node, size_t *ret_bytes)
{
    *ret_bytes = node->key_bytes;
    return node->bytes;
}

const uint8_t *mu_ordmap_value(const struct mu_ordmap_node *node, size_t *ret_bytes)
{
    *ret_bytes = node->value_bytes;
    return node->bytes + node->key_bytes;
}

enum mu_status mu_ordmap_get_copy(const struct mu_ordmap *map, const void *key, size_t key_bytes, uint8_t **ret_value,
                                  size_t *ret_value_bytes, struct mu_error *err)
{
    const struct mu_ordmap_node *node = mu_ordmap_find(map, key, key_bytes);
    if (!node)
        return mu_fail(err, MU_ERR_NOT_FOUND, "store: no such key (%zu bytes)", key_bytes);
    uint8_t *copy = malloc(node->value_bytes ? node->value_bytes : 1);
    if (!copy)
        return mu_fail(err, MU_ERR_NO_MEMORY, "store: no memory for a value of %u bytes", node->value_bytes);
    memcpy(copy, node->bytes + node->key_bytes, node->value_bytes);
    *ret_value = copy;
    *ret_value_bytes = node->value_bytes;
    return MU_OK;
}

void mu_ordmap_scan(const struct mu_ordmap *map, const void *prefix, size_t prefix_bytes, const void *after_key,
                    size_t after_bytes, size_t limit, mu_store_scan_fn fn, void *arg)
{
    const struct mu_ordmap_node *node = mu_ordmap_seek(map, prefix, prefix_bytes, false);
    if (after_key && node && compare(node, after_key, after_bytes) <= 0)
        node = mu_ordmap_seek(map, after_key, after_bytes, true);
    for (size_t count = 0; node && (limit == 0 || count < limit); node = node->next[0], count++) {
        if (node->key_bytes < prefix_bytes || (prefix_bytes && memcmp(node->bytes, prefix, prefix_bytes) != 0))
            return;
        if (!fn(arg, node->bytes, node->key_bytes, node->bytes + node->key_bytes, node->value_bytes))
            return;
    }
}
