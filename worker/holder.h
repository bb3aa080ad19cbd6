/* Checkpoints of kind local, as a worker sees them: which host a piece belongs to, where the own host's directory is,
 * and how a piece is read that may lie on another host. */
#ifndef MU_WORKER_HOLDER_H
#define MU_WORKER_HOLDER_H

#include <stdatomic.h>

#include "storage/manifest.h"
#include "worker/files.h"

/* The path on this host: %h stands for its name. MU_ERR_LIMIT: longer than MU_PATH_SIZE. */
enum mu_status mu_holder_path(const char *path, const char *host, char ret_path[MU_PATH_SIZE],
                              struct mu_error *err) MU_WARN_UNUSED;

/* The end of the name of a piece that a worker of this host wrote ("-h0123456789abcdef"), and back; 0: it has none. */
enum { MU_HOLDER_SUFFIX_SIZE = 19 };
void mu_holder_suffix(const char *host, char ret_suffix[MU_HOLDER_SUFFIX_SIZE]);
uint64_t mu_holder_of_file(const char *file);

/* Reads pieces from the own directory, else from the two holders that have them. */
struct mu_holder_source {
    const char *dir; /* on this host, of the checkpoint */
    const char *host;
    const struct mu_holder *holders; /* the ring */
    uint32_t holder_count;
    const atomic_bool *abort;
    /* private */
    int fd;
    bool unavailable;
};
void mu_holder_source_init(struct mu_holder_source *source, struct mu_piece_source *ret_source);

/* The manifest, from the own directory or any holder that has one. */
enum mu_status mu_holder_manifest(const struct mu_holder_source *source, struct mu_manifest **ret_manifest,
                                  struct mu_error *err) MU_WARN_UNUSED;

#endif
