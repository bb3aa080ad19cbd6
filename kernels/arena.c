#include "kernels/arena.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

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
