/* What makes a directory a checkpoint, and what removes one.
 *
 * A checkpoint's directory is <path>/<seq>-<step as ordered>-<nonce> (storage/catalog.h). Where all hosts share it the
 * coordinator calls this; of a checkpoint of kind local (plan/session.h) one worker of each host does, for the
 * directory of its host. Blocking; no state; idempotent, so that it can be repeated after a crash of either side. */
#ifndef MU_STORAGE_COMMIT_H
#define MU_STORAGE_COMMIT_H

#include "common/status.h"
#include "plan/session.h"

/* The directory, marked as the job's, unless it is a checkpoint already. */
enum mu_status mu_checkpoint_make_dir(const char *dir, const char *job, uint64_t number,
                                      struct mu_error *err) MU_WARN_UNUSED;

struct mu_publication {
    const char *dir;
    const struct mu_job_spec *spec;
    struct mu_hash128 numeric_identity;
    uint64_t number, step, generation;
    uint64_t wall_us; /* for display */
    const struct mu_layout *layout;
    const struct mu_written_piece *pieces; /* [piece_count], by the layout's working ranks */
    uint32_t piece_count;
    bool (*is_here)(const void *ctx, const char *file); /* NULL: all are; those elsewhere are taken as reported */
    const void *ctx;
};

/* Proves that the files that should be here are, that they hold the chunks that are their parts, and that all pieces
 * together tile the model; then writes the manifest. *ret_here_bytes: of the files that are here. */
enum mu_status mu_publish(const struct mu_publication *publication, uint64_t *ret_here_bytes,
                          struct mu_error *err) MU_WARN_UNUSED;

/* A file of a piece: there, and of that size. */
enum mu_status mu_piece_file_check(const char *path, uint64_t size_bytes, struct mu_error *err) MU_WARN_UNUSED;

/* Removes checkpoint `number` of that job, complete or not; MU_OK also when it is gone already, or never was. */
enum mu_status mu_checkpoint_remove(const char *dir, const char *job, uint64_t number,
                                    struct mu_error *err) MU_WARN_UNUSED;

/* The remains of what was given up: directories of that job below `root` without a manifest and with smaller numbers
 * than `before`, but for the `known` ones; and what interrupted deletes left. Failures are logged. */
void mu_checkpoint_sweep(const char *root, const char *job, uint64_t before, const uint64_t *known, size_t known_count);

/* Directories below `root` that have a manifest, ascending by number; the manifests are not read. */
void mu_checkpoint_list(const char *root, bool (*fn)(void *arg, uint64_t seq, uint64_t step, struct mu_id nonce),
                        void *arg);

/* The directory above a checkpoint's own; false: `dir` is not the name of one. */
bool mu_checkpoint_root(const char *dir, char ret_root[MU_PATH_SIZE]);

#endif
