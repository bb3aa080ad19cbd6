/* manifest.json: what a committed checkpoint consists of. A directory without one is not a checkpoint.
 *
 * The first line of the file holds the XXH3-128 of all that follows, so every changed or missing byte is found. 64-bit
 * numbers are decimal strings (as in protobuf's JSON). Publishing is atomic and durable: temporary name, fsync, rename,
 * fsync of the directory and of its parent. The reader takes hostile files. No threads; a manifest is a heap object
 * owned by the caller. */
#ifndef MU_STORAGE_MANIFEST_H
#define MU_STORAGE_MANIFEST_H

#include <stddef.h>
#include <stdint.h>

#include "common/id.h"
#include "common/status.h"
#include "plan/model_spec.h"
#include "storage/pieces.h"

#define MU_MANIFEST_FILE "manifest.json"
enum {
    MU_MANIFEST_FORMAT_VERSION = 1,
    MU_MANIFEST_BYTES_MAX = 64 << 20,
    MU_MANIFEST_PIECES_MAX = 65536,
    MU_MANIFEST_ENTRIES_MAX = 1 << 18, /* over all pieces */
    MU_MANIFEST_JOB_RECORD_BYTES_MAX = 1 << 20,
    MU_NUMERIC_IDENTITY_SIZE = 128, /* text, with the terminating 0 */
};

struct mu_manifest_entry {
    enum mu_piece_kind kind;
    uint32_t cell;
    char cell_name[MU_PIECE_CELL_NAME_SIZE];
    uint32_t first_chunk, chunk_count;
};
struct mu_manifest_piece {
    char file[MU_PIECE_FILE_NAME_SIZE];
    uint64_t size_bytes;
    struct mu_hash128 xxh3;
    struct mu_manifest_entry *entries;
    size_t entry_count, entry_capacity;
};
struct mu_manifest {
    struct mu_checkpoint_identity identity;
    struct mu_id nonce;
    uint64_t created_wall_us; /* for display only */
    char numeric_identity[MU_NUMERIC_IDENTITY_SIZE];
    char *job_record;                 /* canonical JSON text, opaque here; owned; never NULL in a read manifest */
    uint32_t chunk_count;             /* of the whole model */
    char sha256[MU_SHA256_TEXT_SIZE]; /* of the file, in hexadecimal; set in a read manifest */
    struct mu_manifest_piece *pieces;
    size_t piece_count, piece_capacity;
};

struct mu_manifest *mu_manifest_new(void); /* NULL: no memory */
void mu_manifest_free(struct mu_manifest *manifest);
enum mu_status mu_manifest_set_job_record(struct mu_manifest *manifest, const char *text) MU_WARN_UNUSED;
/* Adds a piece that covers kinds p, m, v of a range of chunks (what mu_piece_entries_of_chunks writes). */
enum mu_status mu_manifest_add_chunks(struct mu_manifest *manifest, const struct mu_model_spec *spec, const char *file,
                                      uint64_t size_bytes, struct mu_hash128 xxh3, uint32_t first_chunk,
                                      uint32_t chunk_count) MU_WARN_UNUSED;
/* The same for several runs of chunks, ascending and disjoint (a share of plan/layout.h). */
enum mu_status mu_manifest_add_runs(struct mu_manifest *manifest, const struct mu_model_spec *spec, const char *file,
                                    uint64_t size_bytes, struct mu_hash128 xxh3, const struct mu_chunk_run *runs,
                                    uint32_t run_count) MU_WARN_UNUSED;
/* Adds an empty piece, then entries to the last piece. */
enum mu_status mu_manifest_add_piece(struct mu_manifest *manifest, const char *file, uint64_t size_bytes,
                                     struct mu_hash128 xxh3) MU_WARN_UNUSED;
enum mu_status mu_manifest_add_entry(struct mu_manifest *manifest,
                                     const struct mu_manifest_entry *entry) MU_WARN_UNUSED;

/* Proves that every chunk of every cell is in exactly one piece, for p, m and v; the error names the first gap or
 * overlap. With a spec, also that cell numbers, names and chunk ranges are the model's; without one (NULL), against the
 * manifest's own chunk_count. */
enum mu_status mu_manifest_check_tiling(const struct mu_manifest *manifest, const struct mu_model_spec *spec,
                                        struct mu_error *err) MU_WARN_UNUSED;

/* The file's text; *ret_text is from malloc and terminated. Judges every field as the reader does. */
enum mu_status mu_manifest_encode(const struct mu_manifest *manifest, char **ret_text, size_t *ret_size_bytes,
                                  struct mu_error *err) MU_WARN_UNUSED;
/* `what` names the text in errors. */
enum mu_status mu_manifest_decode(const void *text, size_t size_bytes, const char *what,
                                  struct mu_manifest **ret_manifest, struct mu_error *err) MU_WARN_UNUSED;

/* Publishes <dir>/manifest.json. Replaces one that is there (rolling forward writes the same again). */
enum mu_status mu_manifest_write(const char *dir, const struct mu_manifest *manifest,
                                 struct mu_error *err) MU_WARN_UNUSED;
/* MU_ERR_NOT_FOUND: the directory has no manifest, so it is not a checkpoint. */
enum mu_status mu_manifest_read(const char *dir, struct mu_manifest **ret_manifest,
                                struct mu_error *err) MU_WARN_UNUSED;

/* Whether parameters of this checkpoint are parameters of `model`: MU_ERR_INVALID with a line that begins with the job
 * file's field that differs ("model.layers: value 4 is not allowed: ..."). Dropout may differ, and llama's context.
 * `dir` names the checkpoint when its record cannot be read. */
enum mu_status mu_manifest_check_model(const struct mu_manifest *manifest, const struct mu_model_config *model,
                                       const char *dir, struct mu_error *err) MU_WARN_UNUSED;

enum { MU_VERIFY_PROBLEMS_MAX = 8, MU_VERIFY_DIRS_MAX = 1024 };
struct mu_checkpoint_report {
    struct mu_checkpoint_identity identity;
    size_t piece_count, bad_piece_count;      /* bad: nowhere, or any copy is wrong */
    size_t single_piece_count;                /* of which there is one good copy */
    uint32_t here_counts[MU_VERIFY_DIRS_MAX]; /* good pieces in each directory */
    uint64_t size_bytes;                      /* read and hashed, over all copies */
    size_t problem_count;                     /* all; the first few have text */
    struct mu_error problems[MU_VERIFY_PROBLEMS_MAX];
};
/* Files alone: reads the manifest, proves the tiling, re-reads every piece and compares its size, checksums, identity
 * and entries. Goes on after a bad piece. MU_OK only if nothing is wrong; otherwise the status and line of the first
 * problem. ret_report (may be NULL) is filled in both cases. */
enum mu_status mu_checkpoint_verify(const char *dir, struct mu_checkpoint_report *ret_report,
                                    struct mu_error *err) MU_WARN_UNUSED;
/* The same of one checkpoint that lies in several directories, each with its manifest and some of the pieces: all
 * manifests are equal, every piece is in one of them at least, and every copy is right. */
enum mu_status mu_checkpoint_verify_copies(const char *const *dirs, size_t dir_count,
                                           struct mu_checkpoint_report *ret_report,
                                           struct mu_error *err) MU_WARN_UNUSED;

/* Where the file of a piece is, when it is not simply in the directory. */
struct mu_piece_source {
    /* Try 0, 1, 2, ... until one reads well: a path that stays until `close`. MU_ERR_LIMIT: there is no such try. */
    enum mu_status (*open)(void *ctx, const struct mu_manifest_piece *piece, uint32_t attempt, char *ret_path,
                           size_t path_size, struct mu_error *err);
    void (*close)(void *ctx);
    void *ctx;
};

/* What is wanted of a checkpoint. */
struct mu_checkpoint_want {
    const struct mu_piece_source *source; /* NULL: the directory has all files */
    const struct mu_chunk_run *runs[3];   /* of parameters, first and second moments: ascending, disjoint */
    uint32_t run_counts[3];
    float *flats[3]; /* flat spaces; only the chunks of the runs are written to */
};

/* Fills part of the flat spaces from a checkpoint of any layout: proves the tiling against the model, then reads what
 * is wanted and verifies all that is read. A piece of which everything is wanted is verified as a whole, of others the
 * wanted entries; one that holds nothing of use is not opened. The gaps between cells are not touched; on error the
 * contents are undefined. `progress` counts blocks; it and `abort` may be NULL. */
enum mu_status mu_checkpoint_load_runs(const char *dir, const struct mu_manifest *manifest,
                                       const struct mu_model_spec *spec, const struct mu_checkpoint_want *want,
                                       const atomic_bool *abort, atomic_uint_least64_t *progress,
                                       struct mu_error *err) MU_WARN_UNUSED;
/* The whole model. Each destination holds spec->flat_size floats; of a kind whose destination is NULL nothing is read.
 */
enum mu_status mu_checkpoint_load(const char *dir, const struct mu_manifest *manifest, const struct mu_model_spec *spec,
                                  float *parameters, float *moment1, float *moment2, const atomic_bool *abort,
                                  struct mu_error *err) MU_WARN_UNUSED;

#endif
