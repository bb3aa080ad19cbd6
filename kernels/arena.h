/* Memory of the steps: mapped and pre-faulted at preparation, because first-touch page faults are very slow on virtual
 * machines and steps must never allocate.
 *
 * Arena: one block, handed out in 256-byte aligned pieces and freed as a whole. Space: a large range of addresses of
 * which only the parts in use are backed by memory; positions in it never move. Both are the host's, where huge pages
 * are asked for (madvise), or on a device. Not thread-safe; the owner frees them. */
#ifndef MU_KERNELS_ARENA_H
#define MU_KERNELS_ARENA_H

#include <stddef.h>
#include <stdint.h>

#include "common/status.h"
#include "kernels/device.h"

enum { MU_ARENA_ALIGN = 256 };

struct mu_arena;

/* Rounds a piece up to what mu_arena_take consumes. */
size_t mu_arena_piece_bytes(size_t size_bytes);

/* Maps `size_bytes` (zeroed) and touches every page. */
enum mu_status mu_arena_new(size_t size_bytes, struct mu_error *err, struct mu_arena **ret_arena) MU_WARN_UNUSED;
enum mu_status mu_arena_new_on(struct mu_device *device, enum mu_memory kind, size_t size_bytes, struct mu_error *err,
                               struct mu_arena **ret_arena) MU_WARN_UNUSED;
void mu_arena_free(struct mu_arena *arena);
/* The next piece, zeroed, MU_ARENA_ALIGN aligned. Taking more than the arena holds is a programmer error (asserted). */
void *mu_arena_take(struct mu_arena *arena, size_t size_bytes);
size_t mu_arena_size_bytes(const struct mu_arena *arena);

struct mu_space;

/* Reserves `size_bytes` (> 0) of addresses; nothing is backed until committed. What is not committed reads as zeros (on
 * other devices than the host: not at all) and must not be written. */
enum mu_status mu_space_new(size_t size_bytes, struct mu_error *err, struct mu_space **ret_space) MU_WARN_UNUSED;
enum mu_status mu_space_new_on(struct mu_device *device, size_t size_bytes, struct mu_error *err,
                               struct mu_space **ret_space) MU_WARN_UNUSED;
void mu_space_free(struct mu_space *space);
/* Start of the space, on a page boundary; the same for its whole life. */
void *mu_space_base(const struct mu_space *space);
/* Backs every page that [offset, offset + size_bytes) touches; new ones are zero, others keep what they hold. The range
 * must lie inside the space (asserted). MU_ERR_NO_MEMORY: what was new in this call may be backed or not; release it.
 */
enum mu_status mu_space_commit(struct mu_space *space, size_t offset, size_t size_bytes,
                               struct mu_error *err) MU_WARN_UNUSED;
/* Gives back the pages that lie wholly inside [offset, offset + size_bytes); they read as zeros again. Pages that the
 * range covers in part keep everything: release maximal ranges, since neighbours share the pages at their border. One
 * that goes to the end of the size that was asked for includes the rest of the last page. */
void mu_space_release(struct mu_space *space, size_t offset, size_t size_bytes);
uint64_t mu_space_committed_bytes(const struct mu_space *space);

#endif
