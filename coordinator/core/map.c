#include "coordinator/core/internal.h"

#include <stdlib.h>

bool map_init(struct map *map, uint32_t entries)
{
    uint64_t size = 16;
    while (size < (uint64_t)entries * 2)
        size *= 2;
    map->keys = calloc(size, sizeof map->keys[0]);
    map->values = calloc(size, sizeof map->values[0]);
    map->mask = size - 1;
    return map->keys && map->values;
}

void map_fini(struct map *map)
{
    free(map->keys);
    free(map->values);
}

static uint64_t home(const struct map *map, uint64_t key)
{
    key *= 0x9E3779B97F4A7C15u;
    return (key ^ key >> 32) & map->mask;
}

static uint64_t position(const struct map *map, uint64_t key)
{
    uint64_t at = home(map, key);
    while (map->keys[at] != 0 && map->keys[at] != key)
        at = (at + 1) & map->mask;
    return at;
}

uint32_t map_get(const struct map *map, uint64_t key)
{
    uint64_t at = position(map, key);
    return key && map->keys[at] == key ? map->values[at] : NONE;
}

void map_put(struct map *map, uint64_t key, uint32_t value)
{
    MU_ASSERT(key != 0);
    uint64_t at = position(map, key);
    map->keys[at] = key;
    map->values[at] = value;
}

/* Linear probing without tombstones: later entries of the run move back into the hole when that is nearer to their
 * home. */
void map_remove(struct map *map, uint64_t key)
{
    uint64_t hole = position(map, key);
    if (map->keys[hole] != key)
        return;
    for (uint64_t at = (hole + 1) & map->mask; map->keys[at] != 0; at = (at + 1) & map->mask) {
        uint64_t distance = (at - home(map, map->keys[at])) & map->mask;
        if (distance >= ((at - hole) & map->mask)) {
            map->keys[hole] = map->keys[at];
            map->values[hole] = map->values[at];
            hole = at;
        }
    }
    map->keys[hole] = 0;
}
