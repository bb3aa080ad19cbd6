/* Re-reads a committed checkpoint a block at a time, so that whoever has other work can do it in between: the manifest
 * (by its own checksum), then every byte of every piece against the checksum that the manifest has of it. What the page
 * cache still has of a piece is dropped first: what is judged is what the storage gives back.
 *
 * MU_ERR_CORRUPT is evidence against the checkpoint: bytes that are not what was written, or a piece that is not there
 * though the manifest is. Any other error says nothing about it (no memory, a file system that is away). One thread per
 * object; blocking file system calls. */
#ifndef MU_STORAGE_SCRUB_H
#define MU_STORAGE_SCRUB_H

#include "storage/manifest.h"

enum { MU_SCRUB_BLOCK_BYTES = 1 << 20 };

struct mu_scrub;

/* Reads the manifest, which must belong to this checkpoint. */
enum mu_status mu_scrub_new(const char *dir, const char *job, uint64_t number, struct mu_id nonce,
                            struct mu_scrub **ret_scrub, struct mu_error *err) MU_WARN_UNUSED;
void mu_scrub_free(struct mu_scrub *scrub); /* NULL is fine */

/* Reads at most one block; *ret_bytes says how much. *ret_done: everything was read and is right. */
enum mu_status mu_scrub_step(struct mu_scrub *scrub, size_t *ret_bytes, bool *ret_done,
                             struct mu_error *err) MU_WARN_UNUSED;
uint64_t mu_scrub_bytes(const struct mu_scrub *scrub); /* read so far */

#endif
