/* A copy of a piece's file that comes from elsewhere, block by block: under its name only when it is whole, has the
 * checksum that its writer reported, and is on stable storage. */
#ifndef MU_STORAGE_PIECE_COPY_H
#define MU_STORAGE_PIECE_COPY_H

#include <stddef.h>
#include <stdint.h>

#include "common/hash.h"
#include "common/status.h"

struct mu_piece_copy;

/* In a directory that exists. */
enum mu_status mu_piece_copy_new(const char *dir, const char *file, uint64_t size_bytes,
                                 struct mu_piece_copy **ret_copy, struct mu_error *err) MU_WARN_UNUSED;
/* The block need not stay. */
enum mu_status mu_piece_copy_append(struct mu_piece_copy *copy, const void *block, size_t block_bytes,
                                    struct mu_error *err) MU_WARN_UNUSED;
/* MU_ERR_CORRUPT: it is another file than the one that was written. Replaces one that is there. */
enum mu_status mu_piece_copy_finish(struct mu_piece_copy *copy, struct mu_hash128 checksum,
                                    struct mu_error *err) MU_WARN_UNUSED;
void mu_piece_copy_free(struct mu_piece_copy *copy); /* an unfinished one leaves nothing; NULL is fine */

#endif
