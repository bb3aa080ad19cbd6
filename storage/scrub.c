#include "storage/scrub.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/xxh3.h"
#include "storage/file.h"

struct mu_scrub {
    char dir[MU_PATH_SIZE];
    struct mu_manifest *manifest;
    size_t piece; /* being read, or next */
    int fd;       /* of that piece; -1: not open */
    char path[MU_PATH_SIZE + MU_PIECE_FILE_NAME_SIZE];
    uint64_t offset, read_bytes;
    XXH3_state_t *hash;
    uint8_t *block;
};

void mu_scrub_free(struct mu_scrub *scrub)
{
    if (!scrub)
        return;
    if (scrub->fd >= 0)
        close(scrub->fd);
    mu_manifest_free(scrub->manifest);
    XXH3_freeState(scrub->hash);
    free(scrub->block);
    free(scrub);
}

uint64_t mu_scrub_bytes(const struct mu_scrub *scrub)
{
    return scrub->read_bytes;
}

static enum mu_status read_manifest(struct mu_scrub *scrub, const char *job, uint64_t number, struct mu_id nonce,
                                    struct mu_error *err)
{
    enum mu_status status = mu_manifest_read(scrub->dir, &scrub->manifest, err);
    if (status)
        return status;
    const struct mu_manifest *manifest = scrub->manifest;
    if (strcmp(manifest->identity.job, job) != 0 || manifest->identity.seq != number ||
        !mu_id_equal(manifest->nonce, nonce))
        return mu_fail(err, MU_ERR_CORRUPT, "the manifest in '%s' belongs to another checkpoint", scrub->dir);
    return mu_manifest_check_tiling(manifest, NULL, err);
}

enum mu_status mu_scrub_new(const char *dir, const char *job, uint64_t number, struct mu_id nonce,
                            struct mu_scrub **ret_scrub, struct mu_error *err)
{
    struct mu_scrub *scrub = calloc(1, sizeof *scrub);
    if (!scrub)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory to re-read '%s'", dir);
    scrub->fd = -1;
    scrub->hash = XXH3_createState();
    scrub->block = malloc(MU_SCRUB_BLOCK_BYTES);
    enum mu_status status = MU_OK;
    if (!scrub->hash || !scrub->block)
        status = mu_fail(err, MU_ERR_NO_MEMORY, "no memory to re-read '%s'", dir);
    else if ((size_t)snprintf(scrub->dir, sizeof scrub->dir, "%s", dir) >= sizeof scrub->dir)
        status = mu_fail(err, MU_ERR_INVALID, "'%s' is longer than %d bytes", dir, MU_PATH_SIZE - 1);
    else
        status = read_manifest(scrub, job, number, nonce, err);
    if (status) {
        mu_scrub_free(scrub);
        return status;
    }
    *ret_scrub = scrub;
    return MU_OK;
}

static enum mu_status open_piece(struct mu_scrub *scrub, struct mu_error *err)
{
    const struct mu_manifest_piece *piece = &scrub->manifest->pieces[scrub->piece];
    uint64_t size_bytes = 0;
    snprintf(scrub->path, sizeof scrub->path, "%s/%s", scrub->dir, piece->file);
    enum mu_status status = mu_file_open_regular(scrub->path, &scrub->fd, &size_bytes, err);
    if (status) {
        scrub->fd = -1;
        if (status == MU_ERR_NOT_FOUND || status == MU_ERR_INVALID)
            status = mu_fail(err, MU_ERR_CORRUPT, "checkpoint piece '%s' is not there, or is not a file", scrub->path);
        return status;
    }
    if (size_bytes != piece->size_bytes)
        return mu_fail(err, MU_ERR_CORRUPT, "checkpoint piece '%s' has %" PRIu64 " bytes, its manifest says %" PRIu64,
                       scrub->path, size_bytes, piece->size_bytes);
    (void)posix_fadvise(scrub->fd, 0, 0, POSIX_FADV_DONTNEED); /* a hint: some file systems have no such cache */
    XXH3_128bits_reset(scrub->hash);
    scrub->offset = 0;
    return MU_OK;
}

static enum mu_status end_piece(struct mu_scrub *scrub, struct mu_error *err)
{
    const struct mu_hash128 wanted = scrub->manifest->pieces[scrub->piece].xxh3;
    XXH128_hash_t found = XXH3_128bits_digest(scrub->hash);
    (void)posix_fadvise(scrub->fd, 0, 0, POSIX_FADV_DONTNEED); /* nobody else wants it there */
    close(scrub->fd);
    scrub->fd = -1;
    scrub->piece++;
    if (found.low64 == wanted.low && found.high64 == wanted.high)
        return MU_OK;
    return mu_fail(err, MU_ERR_CORRUPT,
                   "checkpoint piece '%s' has checksum %016" PRIx64 "%016" PRIx64 ", its manifest says %016" PRIx64
                   "%016" PRIx64,
                   scrub->path, (uint64_t)found.high64, (uint64_t)found.low64, wanted.high, wanted.low);
}

enum mu_status mu_scrub_step(struct mu_scrub *scrub, size_t *ret_bytes, bool *ret_done, struct mu_error *err)
{
    *ret_bytes = 0;
    *ret_done = scrub->piece == scrub->manifest->piece_count;
    if (*ret_done)
        return MU_OK;
    const uint64_t size_bytes = scrub->manifest->pieces[scrub->piece].size_bytes;
    enum mu_status status = scrub->fd < 0 ? open_piece(scrub, err) : MU_OK;
    if (status)
        return status;
    uint64_t left = size_bytes - scrub->offset;
    size_t part = left < MU_SCRUB_BLOCK_BYTES ? (size_t)left : MU_SCRUB_BLOCK_BYTES;
    status = mu_file_read_at(scrub->fd, scrub->path, scrub->offset, scrub->block, part, err);
    if (status)
        return status;
    XXH3_128bits_update(scrub->hash, scrub->block, part);
    scrub->offset += part;
    scrub->read_bytes += part;
    *ret_bytes = part;
    if (scrub->offset == size_bytes)
        status = end_piece(scrub, err);
    *ret_done = status == MU_OK && scrub->piece == scrub->manifest->piece_count;
    return status;
}
