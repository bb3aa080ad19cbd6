/* A job's checkpoint directory on disk: <root>/<seq>-<step>-<nonce>/, numbers zero-padded so that a listing is in
 * order.
 *
 * The database says what exists; this module only carries it out, and can rebuild the list when the database is lost.
 * It touches nothing but directories of exactly that name that carry our owner file for this job; anything else under
 * the root is foreign and ignored. Deleting: rename into <root>/.trash/, then unlink, which any later call can finish.
 * Symbolic links are never followed below the root. No threads; blocking file system calls. */
#ifndef MU_STORAGE_CATALOG_H
#define MU_STORAGE_CATALOG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/id.h"
#include "common/status.h"
#include "storage/manifest.h"

#define MU_CATALOG_TRASH ".trash"
#define MU_CATALOG_OWNER "owner" /* file in each checkpoint directory: whose it is */
enum {
    MU_CATALOG_NAME_SIZE = 80,
    MU_CATALOG_ENTRIES_MAX = 1 << 20, /* names looked at in one root */
};

/* "0000000012-0000001200-<32 hexadecimal digits>". */
void mu_catalog_name(uint64_t seq, uint64_t step, struct mu_id nonce, char out[MU_CATALOG_NAME_SIZE]);
/* True only for exactly what mu_catalog_name makes. */
bool mu_catalog_parse_name(const char *name, uint64_t *ret_seq, uint64_t *ret_step, struct mu_id *ret_nonce);

/* Makes the directory (and the root with its parents), its owner file, and syncs them. Already there for this job:
 * MU_OK (the command was repeated). Already there for another: MU_ERR_EXISTS; committed: MU_ERR_CONFLICT. ret_path
 * holds MU_PATH_SIZE. */
enum mu_status mu_catalog_create(const char *root, const char *job, uint64_t seq, uint64_t step, struct mu_id nonce,
                                 char *ret_path, struct mu_error *err) MU_WARN_UNUSED;

/* Moves one directory to the trash (durable when this returns), then unlinks its files. MU_ERR_NOT_FOUND: no such
 * directory (an earlier call may have moved it: mu_catalog_empty_trash finishes it). */
enum mu_status mu_catalog_delete(const char *root, const char *name, struct mu_error *err) MU_WARN_UNUSED;
/* Finishes interrupted deletes. A missing root or trash is MU_OK. */
enum mu_status mu_catalog_empty_trash(const char *root, size_t *ret_removed, struct mu_error *err) MU_WARN_UNUSED;

/* Removes what aborted checkpoints of this job left: for each of its directories, with or without a manifest, `known`
 * decides; false deletes it. Goes on after a directory that cannot be removed and returns the first error. ret_removed
 * may be NULL. */
enum mu_status mu_catalog_sweep(const char *root, const char *job,
                                bool (*known)(void *arg, uint64_t seq, uint64_t step, struct mu_id nonce), void *arg,
                                size_t *ret_removed, struct mu_error *err) MU_WARN_UNUSED;

/* Every committed checkpoint of the job in order of seq, by its manifest: for rebuilding a lost database. `manifest` is
 * NULL and `problem` says why when a manifest is there but cannot be read or belongs to another directory. The callback
 * returns false to stop. A missing root holds nothing. */
typedef bool (*mu_catalog_fn)(void *arg, const char *path, const struct mu_manifest *manifest,
                              const struct mu_error *problem);
enum mu_status mu_catalog_enumerate(const char *root, const char *job, mu_catalog_fn fn, void *arg,
                                    struct mu_error *err) MU_WARN_UNUSED;

#endif
