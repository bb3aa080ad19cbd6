/* Texts of checkpoints, shared by pieces, manifests and the catalog: strict in both directions, so that a text that
 * reads back is the one text that is written. Pure; internal to storage/. */
#ifndef MU_STORAGE_PIECE_FORMAT_H
#define MU_STORAGE_PIECE_FORMAT_H

#include <stdbool.h>
#include <stdint.h>

#include "storage/pieces.h"

/* Decimal digits only, no leading zero, within 64 bits. NULL text is false. */
bool mu_parse_u64(const char *text, uint64_t *ret_value);

enum { MU_HASH_TEXT_SIZE = 33 };
void mu_hash128_text(struct mu_hash128 hash,
                     char out[MU_HASH_TEXT_SIZE]); /* 32 lower-case hexadecimal digits, high half first */
bool mu_hash128_parse(const char *text, struct mu_hash128 *ret_hash);
static inline bool mu_hash128_equal(struct mu_hash128 a, struct mu_hash128 b)
{
    return a.low == b.low && a.high == b.high;
}

bool mu_job_name_is_valid(const char *name);        /* [a-z0-9][a-z0-9._-]*, under MU_JOB_NAME_SIZE */
bool mu_piece_cell_name_is_valid(const char *name); /* [A-Za-z0-9][A-Za-z0-9._]*, under MU_PIECE_CELL_NAME_SIZE */

/* Fills kind, cell_name, first_chunk and chunk_count; true only for exactly what mu_piece_tensor_name makes. */
bool mu_piece_parse_tensor_name(const char *name, struct mu_piece_entry *ret_entry);

#endif
