/* One piece of a distributed checkpoint: a safetensors file that holds some chunks of some cells.
 *
 * A piece is a list of entries, each a run of chunks of one cell and one kind, stored as the F32 tensor
 * "<cell>/<kind>/<first>-<last>", e.g. "L3.0/m/12-15". The metadata holds the identity (job, seq, step, generation),
 * and of each entry its offset in the flat space and its XXH3-128, and a checksum over all of these, so that one file
 * can be judged alone. Writing: the checksums of the entries are made on the snapshot before anything is written; the
 * file appears under its name only when it is whole and synced. Threads: none of its own; the abort flag may be set by
 * any. Source and destination buffers belong to the caller. */
#ifndef MU_STORAGE_PIECES_H
#define MU_STORAGE_PIECES_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/hash.h"
#include "common/status.h"
#include "plan/job.h"
#include "plan/layout.h"
#include "plan/model_spec.h"

enum {
    MU_PIECE_FORMAT_VERSION = 1,
    MU_PIECE_ENTRIES_MAX = 1 << 16,
    MU_PIECE_CELL_NAME_SIZE = 32,
    MU_PIECE_FILE_NAME_SIZE = 96,     /* [A-Za-z0-9][A-Za-z0-9._-]*, with the terminating 0 */
    MU_PIECE_BLOCK_BYTES = 8 << 20,   /* one write, one read */
    MU_PIECE_DATA_ALIGN_BYTES = 4096, /* data starts on a page */
};

struct mu_checkpoint_identity {
    char job[MU_JOB_NAME_SIZE];
    uint64_t seq; /* sequence number: the only order of checkpoints */
    uint64_t step, generation;
};

enum mu_piece_kind { MU_PIECE_PARAMETERS, MU_PIECE_MOMENT1, MU_PIECE_MOMENT2, MU_PIECE_META, MU_PIECE_KIND_COUNT };
const char *mu_piece_kind_name(enum mu_piece_kind kind); /* "p", "m", "v", "meta" */

struct mu_piece_entry {
    enum mu_piece_kind kind;
    uint32_t cell; /* index of the cell in the model */
    char cell_name[MU_PIECE_CELL_NAME_SIZE];
    uint32_t first_chunk, chunk_count; /* job-wide chunk numbers; chunk_count >= 1 */
    uint64_t offset;                   /* elements from the start of the flat space */
    uint64_t size;                     /* elements, contiguous */
    const float *data;                 /* write: the snapshot */
    struct mu_hash128 xxh3;            /* set by write and by read */
};

/* The entries of the parameters and both moments for chunks [first_chunk, first_chunk + chunk_count): kinds p, m, v
 * outermost, one entry per cell touched. The three pointers are the starts of the flat spaces (NULL leaves `data`
 * NULL). Returns how many entries there are; fills at most `capacity` of them (call with 0 to learn the count). */
size_t mu_piece_entries_of_chunks(const struct mu_model_spec *spec, uint32_t first_chunk, uint32_t chunk_count,
                                  const float *parameters, const float *moment1, const float *moment2,
                                  struct mu_piece_entry *entries, size_t capacity);

/* The same for several runs of chunks, ascending and disjoint (a share of plan/layout.h). */
size_t mu_piece_entries_of_runs(const struct mu_model_spec *spec, const struct mu_chunk_run *runs, uint32_t run_count,
                                struct mu_piece_entry *entries, size_t capacity);

/* Is `chunk` in the runs (ascending, disjoint)? *ret_end: where that changes; UINT32_MAX: never again. */
bool mu_runs_have(const struct mu_chunk_run *runs, uint32_t run_count, uint32_t chunk, uint32_t *ret_end);

/* The entry's cell, name, chunks, offset and size are what this model says (kinds p, m, v). For whoever lets a file
 * choose where to write. */
bool mu_piece_entry_fits(const struct mu_piece_entry *entry, const struct mu_model_spec *spec);

/* "L3.0/m/12-15". */
enum { MU_PIECE_TENSOR_NAME_SIZE = 96 };
void mu_piece_tensor_name(const struct mu_piece_entry *entry, char out[MU_PIECE_TENSOR_NAME_SIZE]);

/* [A-Za-z0-9][A-Za-z0-9._-]*, under MU_PIECE_FILE_NAME_SIZE: never a path. */
bool mu_piece_file_name_is_valid(const char *name);

struct mu_piece_write_options {
    const atomic_bool *abort;      /* checked before every block; NULL: never */
    uint64_t throttle_bytes_per_s; /* 0: as fast as it goes */
};
struct mu_piece_result {
    uint64_t size_bytes;
    struct mu_hash128 xxh3; /* of the whole file */
    uint64_t checksum_us, write_us, sync_us;
};

/* Writes <dir>/<file_name>, replacing one that is there. Sets entries[].xxh3. MU_OK means: on stable storage under its
 * name. On any error no file of that name was added and the temporary one is gone (or, if even unlink fails, is left
 * under a name nobody reads). MU_ERR_CANCELLED: the abort flag; MU_ERR_NO_SPACE, MU_ERR_DENIED, MU_ERR_IO ... from the
 * file system. After an error, write again from memory: a new call makes a new file. options may be NULL. */
enum mu_status mu_piece_write(const char *dir, const char *file_name, const struct mu_checkpoint_identity *identity,
                              struct mu_piece_entry *entries, size_t entry_count,
                              const struct mu_piece_write_options *options, struct mu_piece_result *ret_result,
                              struct mu_error *err) MU_WARN_UNUSED;

struct mu_piece_expected {
    uint64_t size_bytes;
    struct mu_hash128 xxh3;
    /* NULL: not compared. The generation never is: a snapshot of a step is valid whoever made it. */
    const struct mu_checkpoint_identity *identity;
};
struct mu_piece_read_options {
    /* Is anything of the entry wanted? Asked once for each, in file order. false: it is verified all the same unless
     * `partial`. NULL: nothing is wanted, verify only. */
    bool (*wants)(void *arg, const struct mu_piece_entry *entry);
    /* Where elements [first, first + *count) of a wanted entry go; NULL: nowhere. May lower *count (not to 0), the rest
     * is asked for again. The destination holds unverified bytes until mu_piece_read has returned MU_OK. */
    float *(*place)(void *arg, const struct mu_piece_entry *entry, uint64_t first, uint64_t *count);
    void *arg;
    const struct mu_piece_expected *expected; /* NULL: judge the file by its own checksums */
    bool partial; /* read and verify only the entries that are wanted (their own checksums; size and identity, not the
                     whole) */
    const atomic_bool *abort;
    atomic_uint_least64_t *progress; /* counts blocks; NULL: nobody looks */
};
/* Reads and verifies; the error line names the file, the entry, and the expected and actual value. *ret_identity may be
 * NULL. */
enum mu_status mu_piece_read(const char *path, const struct mu_piece_read_options *options,
                             struct mu_checkpoint_identity *ret_identity, struct mu_error *err) MU_WARN_UNUSED;

/* The entries a piece file declares (header only, index checksum verified); *ret_entries is from malloc. */
enum mu_status mu_piece_list(const char *path, struct mu_checkpoint_identity *ret_identity,
                             struct mu_piece_entry **ret_entries, size_t *ret_count,
                             struct mu_error *err) MU_WARN_UNUSED;

#endif
