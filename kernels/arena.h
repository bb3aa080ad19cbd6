/* Arena: one large block of memory, mapped and pre-faulted once, handed out in 256-byte aligned pieces and freed as a
 * whole.
 *
 * First-touch page faults are very slow on virtual machines, so steps must never allocate: everything a step touches
 * lives in an arena made at preparation. Huge pages are asked for (madvise). Not thread-safe; the owner frees it. */
#ifndef MU_KERNELS_ARENA_H
#define MU_KERNELS_ARENA_H

#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

enum { MU_ARENA_ALIGN = 256 };

struct mu_arena;

/* Rounds a piece up to what mu_arena_take consumes. */
size_t mu_arena_piece_bytes(size_t size_bytes);

/* Maps `size_bytes` (zeroed) and touches every page. */
enum mu_status mu_arena_new(size_t size_bytes, struct mu_error *err, struct mu_arena **ret_arena) MU_WARN_UNUSED;
void mu_arena_free(struct mu_arena *arena);
/* The next piece, zeroed, MU_ARENA_ALIGN aligned. Taking more than the arena holds is a programmer error (asserted). */
void *mu_arena_take(struct mu_arena *arena, size_t size_bytes);
size_t mu_arena_size_bytes(const struct mu_arena *arena);

#endif
