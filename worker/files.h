/* Files of checkpoints of kind local, from one host to another.
 *
 * A worker gives out what lies below its host's checkpoint directory: manifests and pieces, one file for a connection.
 * Who asks proves with the secret that its coordinator gave it the address for that (plan/session.h, struct mu_holder):
 *
 *      <-- nonce[32]
 *      directory, file, HMAC-SHA256(secret, nonce directory file) -->
 *      <-- status, size in bytes, then the file
 *
 * With TLS (worker/secure.h) its hand-shake comes first, its key made of the secret; the address then begins with
 * "tls:". Without, nothing is encrypted. What arrives is judged by its checksum by whoever asked. The service has a
 * thread that accepts and one for each connection, at most MU_FILES_CONNECTIONS_MAX; a peer that is silent for
 * MU_FILES_SILENCE_MS is cut off. */
#ifndef MU_WORKER_FILES_H
#define MU_WORKER_FILES_H

#include <stdatomic.h>

#include "common/status.h"
#include "plan/session.h"

enum { MU_FILES_CONNECTIONS_MAX = 64, MU_FILES_SILENCE_MS = 10000, MU_FILES_BLOCK_BYTES = 1 << 20 };

struct mu_files;

/* Listens on `ip` (literal, without port) and gives out files of directories below `root`, which need not exist yet. */
enum mu_status mu_files_new(const char *ip, bool encrypted, const char *root, struct mu_files **ret_files,
                            struct mu_error *err) MU_WARN_UNUSED;
void mu_files_free(struct mu_files *files); /* cuts off who is being served; NULL is fine */
const char *mu_files_address(const struct mu_files *files);
const uint8_t *mu_files_secret(const struct mu_files *files); /* 32 bytes */

/* Receives what is fetched, block by block; not MU_OK ends the transfer. The block must not be kept. */
typedef enum mu_status mu_files_take_fn(void *ctx, uint64_t size_bytes, const void *block, size_t block_bytes,
                                        struct mu_error *err);

/* Fetches <root>/<directory>/<file> of that holder. `take` is called once with no block when the size is known, then
 * with each block. MU_ERR_UNAVAILABLE: it cannot be reached, or breaks off; MU_ERR_NOT_FOUND: it has no such file;
 * MU_ERR_CANCELLED: `abort` (may be NULL). */
enum mu_status mu_files_fetch(const struct mu_holder *holder, const char *directory, const char *file,
                              mu_files_take_fn *take, void *ctx, const atomic_bool *abort,
                              struct mu_error *err) MU_WARN_UNUSED;

#endif
