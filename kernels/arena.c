#include "kernels/arena.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct mu_arena {
    char *base;
    size_t size_bytes, used_bytes;
};

enum { HUGE_PAGE_BYTES = 2 << 20 };

size_t mu_arena_piece_bytes(size_t size_bytes)
{
    return (size_bytes + MU_ARENA_ALIGN - 1) / MU_ARENA_ALIGN * MU_ARENA_ALIGN;
}

enum mu_status mu_arena_new(size_t size_bytes, struct mu_error *err, struct mu_arena **ret_arena)
{
    struct mu_arena *arena = calloc(1, sizeof *arena);
    if (!arena)
        return mu_fail(err, MU_ERR_NO_MEMORY, "arena: out of memory");
    size_t unit = size_bytes >= HUGE_PAGE_BYTES ? HUGE_PAGE_BYTES : 4096;
    arena->size_bytes = (size_bytes + unit) / unit * unit;
    void *base =
        mmap(NULL, arena->size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        int saved = errno;
        free(arena);
        return mu_fail_errno(err, saved,
                             "arena: cannot map %zu MiB; use a smaller model or micro-batch, or more memory",
                             size_bytes >> 20);
    }
    (void)madvise(base, arena->size_bytes,
                  MADV_HUGEPAGE); /* advice: a kernel without huge pages is slower, not wrong */
    memset(base, 0, arena->size_bytes);
    arena->base = base;
    *ret_arena = arena;
    return MU_OK;
}

void mu_arena_free(struct mu_arena *arena)
{
    if (!arena)
        return;
    munmap(arena->base, arena->size_bytes);
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
    char *base;
    size_t size_bytes, page_bytes;
    uint64_t committed_pages;
    uint8_t *backed; /* a bit for each page */
};

static size_t bitmap_bytes(const struct mu_space *space)
{
    return space->size_bytes / space->page_bytes / 8 + 1;
}

enum mu_status mu_space_new(size_t size_bytes, struct mu_error *err, struct mu_space **ret_space)
{
    MU_ASSERT(size_bytes > 0);
    struct mu_space *space = calloc(1, sizeof *space);
    if (!space)
        return mu_fail(err, MU_ERR_NO_MEMORY, "space: out of memory");
    space->page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    space->size_bytes = (size_bytes + space->page_bytes - 1) / space->page_bytes * space->page_bytes;
    void *base =
        mmap(NULL, space->size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        int saved = errno;
        free(space);
        return mu_fail_errno(err, saved,
                             "space: cannot reserve %zu MiB of addresses; raise the limit of virtual memory (ulimit "
                             "-v) or use a smaller model",
                             size_bytes >> 20);
    }
    space->backed = calloc(bitmap_bytes(space), 1);
    if (!space->backed) {
        munmap(base, space->size_bytes);
        free(space);
        return mu_fail(err, MU_ERR_NO_MEMORY, "space: out of memory");
    }
    (void)madvise(base, space->size_bytes, MADV_NOHUGEPAGE); /* a huge page would back neighbours nobody asked for */
    space->base = base;
    *ret_space = space;
    return MU_OK;
}

void mu_space_free(struct mu_space *space)
{
    if (!space)
        return;
    munmap(space->base, space->size_bytes);
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

static void set_backed(struct mu_space *space, size_t page, bool backed)
{
    uint8_t bit = (uint8_t)(1u << (page % 8));
    space->backed[page / 8] = (uint8_t)(backed ? space->backed[page / 8] | bit : space->backed[page / 8] & ~bit);
    space->committed_pages += backed ? 1 : (uint64_t)-1;
}

/* Huge pages where whole ones fit [first, end). */
static void advise_huge(const struct mu_space *space, size_t first_page, size_t end_page)
{
    uintptr_t unit = HUGE_PAGE_BYTES, first = (uintptr_t)space->base + first_page * space->page_bytes,
              end = (uintptr_t)space->base + end_page * space->page_bytes;
    first = (first + unit - 1) / unit * unit;
    end = end / unit * unit;
    if (first < end)
        (void)madvise((void *)first, end - first, MADV_HUGEPAGE);
}

/* Backs pages [first, end), none of which is. */
static enum mu_status back_pages(struct mu_space *space, size_t first, size_t end, struct mu_error *err)
{
    char *start = space->base + first * space->page_bytes;
    size_t size = (end - first) * space->page_bytes;
    advise_huge(space, first, end);
    if (madvise(start, size, MADV_POPULATE_WRITE) != 0) {
        int saved = errno;
        if (saved != EINVAL) /* older kernels: touched one by one below */
            return mu_fail(err, MU_ERR_NO_MEMORY,
                           "space: no memory for %zu MiB (%s); use a smaller model or more workers, or more memory",
                           size >> 20, strerror(saved));
        for (size_t i = 0; i < size; i += space->page_bytes)
            *(volatile char *)(start + i) = 0;
    }
    for (size_t page = first; page < end; page++)
        set_backed(space, page, true);
    return MU_OK;
}

enum mu_status mu_space_commit(struct mu_space *space, size_t offset, size_t size_bytes, struct mu_error *err)
{
    MU_ASSERT(offset <= space->size_bytes && size_bytes <= space->size_bytes - offset);
    if (size_bytes == 0)
        return MU_OK;
    size_t page = offset / space->page_bytes, end = (offset + size_bytes + space->page_bytes - 1) / space->page_bytes;
    while (page < end) {
        if (is_backed(space, page)) {
            page++;
            continue;
        }
        size_t first = page;
        while (page < end && !is_backed(space, page))
            page++;
        enum mu_status status = back_pages(space, first, page, err);
        if (status != MU_OK)
            return status;
    }
    return MU_OK;
}

void mu_space_release(struct mu_space *space, size_t offset, size_t size_bytes)
{
    MU_ASSERT(offset <= space->size_bytes && size_bytes <= space->size_bytes - offset);
    size_t first = (offset + space->page_bytes - 1) / space->page_bytes,
           end = (offset + size_bytes) / space->page_bytes;
    if (first >= end)
        return;
    char *start = space->base + first * space->page_bytes;
    size_t size = (end - first) * space->page_bytes;
    (void)madvise(start, size, MADV_NOHUGEPAGE);    /* else the kernel may join them into a huge page again */
    if (madvise(start, size, MADV_DONTNEED) != 0) { /* locked pages cannot be given back: they still read as zeros */
        memset(start, 0, size);
        return;
    }
    for (size_t page = first; page < end; page++)
        if (is_backed(space, page))
            set_backed(space, page, false);
}

uint64_t mu_space_committed_bytes(const struct mu_space *space)
{
    return space->committed_pages * space->page_bytes;
}
