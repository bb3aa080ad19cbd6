#include "worker/holder.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { COPIES = 2, ROUNDS_MAX = 40, ROUND_PAUSE_MS = 250 }; /* an unreachable holder is tried for 10 s */

enum mu_status mu_holder_path(const char *path, const char *host, char ret_path[MU_PATH_SIZE], struct mu_error *err)
{
    size_t used = 0;
    for (const char *at = path; *at; at++) {
        bool is_host = at[0] == '%' && at[1] == 'h';
        size_t length = is_host ? strlen(host) : 1;
        if (used + length >= MU_PATH_SIZE)
            return mu_fail(err, MU_ERR_LIMIT, "checkpoint.path '%s' is too long on host %s: at most %d bytes", path,
                           host, MU_PATH_SIZE - 1);
        if (is_host) {
            for (size_t i = 0; i < length; i++) /* a name is one part of the path */
                ret_path[used + i] = host[i] == '/' ? '_' : host[i];
            at++;
        } else {
            ret_path[used] = *at;
        }
        used += length;
    }
    ret_path[used] = 0;
    return MU_OK;
}

void mu_holder_suffix(const char *host, char ret_suffix[MU_HOLDER_SUFFIX_SIZE])
{
    snprintf(ret_suffix, MU_HOLDER_SUFFIX_SIZE, "-h%016" PRIx64, mu_host_id(host));
}

uint64_t mu_holder_of_file(const char *file)
{
    const char *end = strstr(file, ".safetensors");
    uint64_t host_id = 0;
    if (!end || end - file < MU_HOLDER_SUFFIX_SIZE - 1 || end[-18] != '-' || end[-17] != 'h')
        return 0;
    for (const char *at = end - 16; at < end; at++) {
        int digit = *at >= '0' && *at <= '9' ? *at - '0' : *at >= 'a' && *at <= 'f' ? *at - 'a' + 10 : -1;
        if (digit < 0)
            return 0;
        host_id = host_id << 4 | (uint64_t)digit;
    }
    return host_id;
}

static const char *name_in(const char *dir)
{
    const char *slash = strrchr(dir, '/');
    return slash ? slash + 1 : dir;
}

/* ---- pieces ---- */

struct memory_sink {
    int fd;
    uint64_t expected_bytes;
    const char *file;
};

static enum mu_status take_into_memory(void *ctx, uint64_t size_bytes, const void *block, size_t block_bytes,
                                       struct mu_error *err)
{
    const struct memory_sink *sink = ctx;
    if (size_bytes != sink->expected_bytes)
        return mu_fail(err, MU_ERR_CORRUPT, "piece '%s' has %" PRIu64 " bytes there, the manifest says %" PRIu64,
                       sink->file, size_bytes, sink->expected_bytes);
    for (size_t done = 0; done < block_bytes;) {
        ssize_t written = write(sink->fd, (const char *)block + done, block_bytes - done);
        if (written < 0)
            return mu_fail_errno(err, errno, "no memory for piece '%s'", sink->file);
        done += (size_t)written;
    }
    return MU_OK;
}

static enum mu_status fetch(struct mu_holder_source *source, const struct mu_holder *holder,
                            const struct mu_manifest_piece *piece, char *ret_path, size_t path_size,
                            struct mu_error *err)
{
    int fd = memfd_create("muster-piece", MFD_CLOEXEC);
    if (fd < 0)
        return mu_fail_errno(err, errno, "no memory for piece '%s'", piece->file);
    struct memory_sink sink = {.fd = fd, .expected_bytes = piece->size_bytes, .file = piece->file};
    enum mu_status status =
        mu_files_fetch(holder, name_in(source->dir), piece->file, take_into_memory, &sink, source->abort, err);
    if (status != MU_OK) {
        close(fd);
        return status;
    }
    source->fd = fd;
    snprintf(ret_path, path_size, "/proc/self/fd/%d", fd);
    return MU_OK;
}

static const struct mu_holder *holder_of(const struct mu_holder_source *source, const char *file, uint32_t copy)
{
    uint64_t host_id = mu_holder_of_file(file);
    for (uint32_t i = 0; i < source->holder_count; i++) {
        if (mu_host_id(source->holders[i].host) == host_id)
            return &source->holders[(i + copy) % source->holder_count];
    }
    return NULL;
}

/* Try 0: the own directory; then the holders, in turn, again and again while one cannot be reached: it may be that the
 * coordinator is about to tell that it is gone. */
static enum mu_status open_piece(void *ctx, const struct mu_manifest_piece *piece, uint32_t attempt, char *ret_path,
                                 size_t path_size, struct mu_error *err)
{
    struct mu_holder_source *source = ctx;
    if (attempt == 0) {
        source->unavailable = false;
        snprintf(ret_path, path_size, "%s/%s", source->dir, piece->file);
        return access(ret_path, R_OK) == 0 ? MU_OK : mu_fail(err, MU_ERR_NOT_FOUND, "'%s' is not there", ret_path);
    }
    uint32_t copy = (attempt - 1) % COPIES, round = (attempt - 1) / COPIES;
    if (copy == 0 && round > 0) {
        if (!source->unavailable || round == ROUNDS_MAX)
            return MU_ERR_LIMIT;
        source->unavailable = false;
        nanosleep(&(struct timespec){.tv_nsec = ROUND_PAUSE_MS * 1000000}, NULL);
    }
    const struct mu_holder *holder = holder_of(source, piece->file, copy);
    if (!holder)
        return mu_fail(err, MU_ERR_NOT_FOUND, "no host of the checkpoint has piece '%s'", piece->file);
    if (strcmp(holder->host, source->host) == 0)
        return mu_fail(err, MU_ERR_NOT_FOUND, "'%s/%s' is not there", source->dir, piece->file);
    enum mu_status status = fetch(source, holder, piece, ret_path, path_size, err);
    source->unavailable = source->unavailable || status == MU_ERR_UNAVAILABLE;
    return status;
}

static void close_piece(void *ctx)
{
    struct mu_holder_source *source = ctx;
    if (source->fd >= 0)
        close(source->fd);
    source->fd = -1;
}

void mu_holder_source_init(struct mu_holder_source *source, struct mu_piece_source *ret_source)
{
    source->fd = -1;
    *ret_source = (struct mu_piece_source){.open = open_piece, .close = close_piece, .ctx = source};
}

/* ---- the manifest ---- */

struct text_sink {
    char *text;
    size_t size_bytes, done;
};

static enum mu_status take_text(void *ctx, uint64_t size_bytes, const void *block, size_t block_bytes,
                                struct mu_error *err)
{
    struct text_sink *sink = ctx;
    if (!block) {
        if (size_bytes > MU_MANIFEST_BYTES_MAX)
            return mu_fail(err, MU_ERR_CORRUPT, "a manifest of %" PRIu64 " bytes is not allowed", size_bytes);
        sink->size_bytes = (size_t)size_bytes;
        sink->text = malloc(sink->size_bytes + 1);
        return sink->text ? MU_OK : mu_fail(err, MU_ERR_NO_MEMORY, "no memory for a manifest");
    }
    memcpy(sink->text + sink->done, block, block_bytes);
    sink->done += block_bytes;
    return MU_OK;
}

enum mu_status mu_holder_manifest(const struct mu_holder_source *source, struct mu_manifest **ret_manifest,
                                  struct mu_error *err)
{
    enum mu_status status = mu_manifest_read(source->dir, ret_manifest, err);
    for (uint32_t i = 0; i < source->holder_count && status != MU_OK && status != MU_ERR_CANCELLED; i++) {
        struct text_sink sink = {0};
        if (strcmp(source->holders[i].host, source->host) == 0 || source->holders[i].address[0] == 0)
            continue;
        status = mu_files_fetch(&source->holders[i], name_in(source->dir), MU_MANIFEST_FILE, take_text, &sink,
                                source->abort, err);
        if (status == MU_OK)
            status = mu_manifest_decode(sink.text, sink.size_bytes, "the manifest of another host", ret_manifest, err);
        free(sink.text);
    }
    bool nothing_known = status == MU_ERR_NOT_FOUND || status == MU_ERR_IO;
    return nothing_known ? (err->status = MU_ERR_UNAVAILABLE) : status;
}
