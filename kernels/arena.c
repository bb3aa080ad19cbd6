#include "kernels/arena.h"

#include <stdlib.h>
#include <unistd.h>

struct mu_arena {
    struct mu_device *device;
    enum mu_memory kind;
    char *base;
    size_t size_bytes, used_bytes;
};

size_t mu_arena_piece_bytes(size_t size_bytes)
{
    return (size_bytes + MU_ARENA_ALIGN - 1) / MU_ARENA_ALIGN * MU_ARENA_ALIGN;
}

enum mu_status mu_arena_new(size_t size_bytes, struct mu_error *err, struct mu_arena **ret_arena)
{
    return mu_arena_new_on(mu_host_device(), MU_MEMORY_DEVICE, size_bytes, err, ret_arena);
}

enum mu_status mu_arena_new_on(struct mu_device *device, enum mu_memory kind, size_t size_bytes, struct mu_error *err,
                               struct mu_arena **ret_arena)
{
    struct mu_arena *arena = calloc(1, sizeof *arena);
    if (!arena)
        return mu_fail(err, MU_ERR_NO_MEMORY, "arena: out of memory");
    void *base;
    arena->device = device;
    arena->kind = kind;
    arena->size_bytes = mu_arena_piece_bytes(size_bytes > 0 ? size_bytes : 1);
    enum mu_status status = mu_device_allocate(device, kind, arena->size_bytes, err, &base);
    if (status != MU_OK) {
        free(arena);
        return status;
    }
    arena->base = base;
    *ret_arena = arena;
    return MU_OK;
}

void mu_arena_free(struct mu_arena *arena)
{
    if (!arena)
        return;
    mu_device_release(arena->device, arena->kind, arena->base, arena->size_bytes);
    free(arena);
}

void *mu_arena_take(struct mu_arena *arena, size_t size_bytes)
{
    size_t piece = mu_arena_piece_bytes(size_bytes);
    MU_ASSERT(piece >= size_bytes && piece <= arena->size_bytes - arena->used_bytes);
    void *start = arena->base + arena->used_bytes;
    arena->used_bytes += piece;
    return start;
}

size_t mu_arena_size_bytes(const struct mu_arena *arena)
{
    return arena->size_bytes;
}

/* ---- space ---- */

struct mu_space {
    struct mu_device *device;
    char *base;
    size_t asked_bytes, size_bytes, page_bytes; /* size: of whole pages */
    uint64_t committed_pages;
    uint8_t *backed; /* a bit for each page */
};

static size_t bitmap_bytes(const struct mu_space *space)
{
    return space->size_bytes / space->page_bytes / 8 + 1;
}

enum mu_status mu_space_new(size_t size_bytes, struct mu_error *err, struct mu_space **ret_space)
{
    return mu_space_new_on(mu_host_device(), size_bytes, err, ret_space);
}

enum mu_status mu_space_new_on(struct mu_device *device, size_t size_bytes, struct mu_error *err,
                               struct mu_space **ret_space)
{
    MU_ASSERT(size_bytes > 0);
    struct mu_space *space = calloc(1, sizeof *space);
    if (!space)
        return mu_fail(err, MU_ERR_NO_MEMORY, "space: out of memory");
    void *base;
    space->device = device ? device : mu_host_device();
    space->page_bytes = space->device->page_bytes ? space->device->page_bytes : (size_t)sysconf(_SC_PAGESIZE);
    space->asked_bytes = size_bytes;
    space->size_bytes = (size_bytes + space->page_bytes - 1) / space->page_bytes * space->page_bytes;
    enum mu_status status = space->device->ops->reserve(space->device, space->size_bytes, err, &base);
    if (status != MU_OK) {
        free(space);
        return status;
    }
    space->base = base;
    space->backed = calloc(bitmap_bytes(space), 1);
    if (!space->backed) {
        mu_space_free(space);
        return mu_fail(err, MU_ERR_NO_MEMORY, "space: out of memory");
    }
    *ret_space = space;
    return MU_OK;
}

void mu_space_free(struct mu_space *space)
{
    if (!space)
        return;
    if (space->backed && !mu_device_is_host(space->device)) /* the host's go with their addresses */
        mu_space_release(space, 0, space->size_bytes);
    space->device->ops->unreserve(space->device, space->base, space->size_bytes);
    free(space->backed);
    free(space);
}

void *mu_space_base(const struct mu_space *space)
{
    return space->base;
}

static bool is_backed(const struct mu_space *space, size_t page)
{
    return space->backed[page / 8] >> (page % 8) & 1;
}

static void set_backed(struct mu_space *space, size_t first, size_t end, bool backed)
{
    for (size_t page = first; page < end; page++) {
        uint8_t bit = (uint8_t)(1u << (page % 8));
        space->backed[page / 8] = (uint8_t)(backed ? space->backed[page / 8] | bit : space->backed[page / 8] & ~bit);
    }
    space->committed_pages = backed ? space->committed_pages + (end - first) : space->committed_pages - (end - first);
}

/* The next run of pages in [*first, end) that are backed (or not); false: there is none. */
static bool next_run(const struct mu_space *space, bool backed, size_t end, size_t *first, size_t *ret_end)
{
    while (*first < end && is_backed(space, *first) != backed)
        (*first)++;
    *ret_end = *first;
    while (*ret_end < end && is_backed(space, *ret_end) == backed)
        (*ret_end)++;
    return *first < end;
}

enum mu_status mu_space_commit(struct mu_space *space, size_t offset, size_t size_bytes, struct mu_error *err)
{
    MU_ASSERT(offset <= space->size_bytes && size_bytes <= space->size_bytes - offset);
    if (size_bytes == 0)
        return MU_OK;
    size_t end = (offset + size_bytes + space->page_bytes - 1) / space->page_bytes, stop;
    for (size_t page = offset / space->page_bytes; next_run(space, false, end, &page, &stop); page = stop) {
        enum mu_status status = space->device->ops->back(space->device, space->base + page * space->page_bytes,
                                                         (stop - page) * space->page_bytes, err);
        if (status != MU_OK)
            return status;
        set_backed(space, page, stop, true);
    }
    return MU_OK;
}

static bool unback(struct mu_space *space, size_t first, size_t end)
{
    return space->device->ops->unback(space->device, space->base + first * space->page_bytes,
                                      (end - first) * space->page_bytes);
}

void mu_space_release(struct mu_space *space, size_t offset, size_t size_bytes)
{
    MU_ASSERT(offset <= space->size_bytes && size_bytes <= space->size_bytes - offset);
    bool to_the_end = offset + size_bytes >= space->asked_bytes; /* nobody has the rest of the last page */
    size_t first = (offset + space->page_bytes - 1) / space->page_bytes,
           end = (to_the_end ? space->size_bytes : offset + size_bytes) / space->page_bytes, stop;
    bool gone = true, host = mu_device_is_host(space->device);
    if (host && first < end) /* with what was only read in it */
        gone = unback(space, first, end);
    for (size_t page = first; gone && next_run(space, true, end, &page, &stop); page = stop)
        if (host || unback(space, page, stop))
            set_backed(space, page, stop, false);
}

uint64_t mu_space_committed_bytes(const struct mu_space *space)
{
    return space->committed_pages * space->page_bytes;
}
