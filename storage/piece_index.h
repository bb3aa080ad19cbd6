/* What a piece's metadata holds and the checksum over it. Internal to storage/: shared by the writer and the reader of
 * pieces. */
#ifndef MU_STORAGE_PIECE_INDEX_H
#define MU_STORAGE_PIECE_INDEX_H

#include <inttypes.h>

#include "storage/piece_format.h"

#define MU_PIECE_KEY_VERSION    "muster.piece"
#define MU_PIECE_KEY_JOB        "muster.job"
#define MU_PIECE_KEY_SEQ        "muster.seq"
#define MU_PIECE_KEY_STEP       "muster.step"
#define MU_PIECE_KEY_GENERATION "muster.generation"
#define MU_PIECE_KEY_INDEX      "muster.index_xxh3"
/* Of each tensor, under its name: cell number, offset in the flat space in elements, checksum of its data. */
#define MU_PIECE_VALUE_FORMAT "cell=%" PRIu32 " offset=%" PRIu64 " xxh3=%s"

/* XXH3-128 of the identity and of every entry's name, cell, offset, size and checksum, in file order. */
struct mu_hash128 mu_piece_index_hash(const struct mu_checkpoint_identity *identity,
                                      const struct mu_piece_entry *entries, size_t count);

#endif
