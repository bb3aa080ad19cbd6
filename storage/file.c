#include "storage/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/id.h"
#include "common/xxh3.h"
#include "storage/file_writer.h"

enum {
    PATH_BYTES_MAX = 4096,
    UNSTAGED_MIN_BYTES = 256 << 10, /* less is not worth a write of its own */
};

enum mu_status mu_file_out_open(struct mu_file_out *out, const char *dir, const char *name, uint64_t size_bytes,
                                struct mu_error *err)
{
    memset(out, 0, sizeof *out);
    out->dir_fd = out->fd = -1;
    out->size_bytes = size_bytes;
    if (strlen(name) >= sizeof out->name)
        return mu_fail(err, MU_ERR_LIMIT, "'%s/%s': a file name of %zu bytes is not allowed: at most %zu", dir, name,
                       strlen(name), sizeof out->name - 1);
    snprintf(out->label, sizeof out->label, "%s/%s", dir, name);
    snprintf(out->name, sizeof out->name, "%s", name);
    /* Unique per writer: two of them (one may be a zombie) never write into one file. */
    snprintf(out->temporary, sizeof out->temporary, ".%s.%016llx.tmp", name, (unsigned long long)mu_id_random().low);

    if (posix_memalign((void **)&out->stage, MU_FILE_PAGE_BYTES, MU_FILE_BLOCK_BYTES) != 0) {
        out->stage = NULL;
        return mu_fail(err, MU_ERR_NO_MEMORY, "'%s/%s': no memory for a write buffer", dir, name);
    }
    out->hash = XXH3_createState();
    if (!out->hash)
        return mu_fail(err, MU_ERR_NO_MEMORY, "'%s/%s': no memory for a checksum", dir, name);
    XXH3_128bits_reset(out->hash);

    out->dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (out->dir_fd < 0)
        return mu_fail_errno(err, errno, "cannot open directory '%s'", dir);
    out->fd = openat(out->dir_fd, out->temporary, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (out->fd < 0)
        return mu_fail_errno(err, errno, "cannot create a file in '%s'", dir);
    /* Not posix_fallocate: where the file system cannot allocate, that would write zeros. */
    if (size_bytes > 0 && fallocate(out->fd, 0, 0, (off_t)size_bytes) != 0 && errno != EOPNOTSUPP && errno != ENOSYS)
        return mu_fail_errno(err, errno, "'%s/%s': cannot allocate %llu bytes", dir, name,
                             (unsigned long long)size_bytes);
    if (size_bytes >= MU_FILE_DIRECT_BYTES)
        out->writer = mu_file_writer_new(out->fd, out->label);
    return MU_OK;
}

static enum mu_status push(struct mu_file_out *out, uint64_t block_end, unsigned flags, struct mu_error *err)
{
    off_t offset = (off_t)(block_end - MU_FILE_BLOCK_BYTES);
    if (sync_file_range(out->fd, offset, MU_FILE_BLOCK_BYTES, flags) == 0 || errno == ENOSYS || errno == EINVAL ||
        errno == ESPIPE || errno == EOPNOTSUPP)
        return MU_OK;
    /* It takes the write error that fsync would have reported, so it must count here. */
    return mu_fail_errno(err, errno, "'%s': cannot write back at byte %llu", out->label, (unsigned long long)offset);
}

static enum mu_status write_buffered(struct mu_file_out *out, const uint8_t *data, size_t data_bytes,
                                     struct mu_error *err)
{
    bool is_direct = false;
    enum mu_status status = mu_file_write_at(out->fd, out->label, data, data_bytes, out->handed_bytes, &is_direct, err);
    if (status == MU_OK)
        out->handed_bytes += data_bytes;
    return status;
}

/* One whole block to the file; the disk starts on it now, and at most MU_FILE_WRITEBACK_BLOCKS are on their way.
 * Without this the final fsync would find the whole file still in memory, and nothing would overlap. */
static enum mu_status write_block(struct mu_file_out *out, const uint8_t *block, struct mu_error *err)
{
    enum mu_status status = write_buffered(out, block, MU_FILE_BLOCK_BYTES, err);
    if (status == MU_OK)
        status = push(out, out->handed_bytes, SYNC_FILE_RANGE_WRITE, err);
    uint64_t behind = (uint64_t)MU_FILE_WRITEBACK_BLOCKS * MU_FILE_BLOCK_BYTES;
    if (status == MU_OK && out->handed_bytes > behind)
        status = push(out, out->handed_bytes - behind,
                      SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER, err);
    return status;
}

static enum mu_status hand_over(struct mu_file_out *out, const uint8_t *data, size_t data_bytes, struct mu_error *err)
{
    enum mu_status status = mu_file_writer_put(out->writer, data, data_bytes, out->handed_bytes, err);
    if (status == MU_OK)
        out->handed_bytes += data_bytes;
    return status;
}

static size_t staged_bytes(const struct mu_file_out *out)
{
    return (size_t)(out->appended_bytes - out->handed_bytes);
}

/* The stage, which is whole pages, to the file; it is free when this returns. */
static enum mu_status flush_stage(struct mu_file_out *out, struct mu_error *err)
{
    if (staged_bytes(out) == 0)
        return MU_OK;
    if (!out->writer)
        return write_block(out, out->stage, err);
    enum mu_status status = hand_over(out, out->stage, staged_bytes(out), err);
    return status == MU_OK ? mu_file_writer_drain(out->writer, err) : status;
}

/* How many bytes may go to the file from where they lie; 0: through the stage. */
static size_t unstaged_part(const struct mu_file_out *out, const uint8_t *source, size_t data_bytes)
{
    size_t most = data_bytes < MU_FILE_BLOCK_BYTES ? data_bytes : MU_FILE_BLOCK_BYTES;
    if (out->transient)
        return 0;
    if (!out->writer)
        return staged_bytes(out) == 0 && most == MU_FILE_BLOCK_BYTES ? most : 0;
    bool at_pages = staged_bytes(out) % MU_FILE_PAGE_BYTES == 0 && (uintptr_t)source % MU_FILE_PAGE_BYTES == 0;
    return at_pages && most >= UNSTAGED_MIN_BYTES ? most / MU_FILE_PAGE_BYTES * MU_FILE_PAGE_BYTES : 0;
}

/* The checksum is over what is in memory, before it is written. */
static void count_appended(struct mu_file_out *out, const uint8_t *source, size_t size_bytes)
{
    XXH3_128bits_update(out->hash, source, size_bytes);
    out->appended_bytes += size_bytes;
}

static enum mu_status append_unstaged(struct mu_file_out *out, const uint8_t *source, size_t part, struct mu_error *err)
{
    enum mu_status status = flush_stage(out, err);
    if (status != MU_OK)
        return status;
    count_appended(out, source, part);
    return out->writer ? hand_over(out, source, part, err) : write_block(out, source, err);
}

enum mu_status mu_file_out_append(struct mu_file_out *out, const void *data, size_t data_bytes, struct mu_error *err)
{
    const uint8_t *source = data;
    enum mu_status status = MU_OK;
    if (data_bytes > out->size_bytes - out->appended_bytes)
        return mu_fail(err, MU_ERR_INTERNAL, "'%s': more bytes than the %llu announced", out->label,
                       (unsigned long long)out->size_bytes);
    while (data_bytes > 0 && status == MU_OK) {
        size_t part = unstaged_part(out, source, data_bytes);
        if (part > 0) {
            status = append_unstaged(out, source, part, err);
        } else {
            size_t staged = staged_bytes(out);
            part = MU_FILE_BLOCK_BYTES - staged < data_bytes ? MU_FILE_BLOCK_BYTES - staged : data_bytes;
            memcpy(out->stage + staged, source, part);
            count_appended(out, source, part);
            if (staged + part == MU_FILE_BLOCK_BYTES)
                status = flush_stage(out, err);
        }
        source += part;
        data_bytes -= part;
    }
    return status;
}

/* What is left in the stage: whole pages like the rest of the file, the last bytes always through the page cache. */
static enum mu_status write_rest(struct mu_file_out *out, struct mu_error *err)
{
    size_t staged = staged_bytes(out), pages = staged / MU_FILE_PAGE_BYTES * MU_FILE_PAGE_BYTES;
    if (!out->writer)
        return write_buffered(out, out->stage, staged, err);
    enum mu_status status = hand_over(out, out->stage, pages, err);
    if (status == MU_OK)
        status = mu_file_writer_drain(out->writer, err);
    mu_file_writer_free(out->writer);
    out->writer = NULL;
    return status == MU_OK ? write_buffered(out, out->stage + pages, staged - pages, err) : status;
}

enum mu_status mu_file_out_sync(struct mu_file_out *out, struct mu_error *err)
{
    if (out->appended_bytes != out->size_bytes)
        return mu_fail(err, MU_ERR_INTERNAL, "'%s': %llu bytes appended, %llu announced", out->label,
                       (unsigned long long)out->appended_bytes, (unsigned long long)out->size_bytes);
    enum mu_status status = write_rest(out, err);
    if (status != MU_OK)
        return status;
    if (fsync(out->fd) != 0)
        return mu_fail_errno(err, errno, "'%s': fsync failed", out->label);
    int fd = out->fd;
    out->fd = -1;
    if (close(fd) != 0 && errno != EINTR) /* NFS reports late errors here */
        return mu_fail_errno(err, errno, "'%s': close failed", out->label);
    return MU_OK;
}

enum mu_status mu_file_out_rename(struct mu_file_out *out, struct mu_error *err)
{
    if (renameat(out->dir_fd, out->temporary, out->dir_fd, out->name) != 0)
        return mu_fail_errno(err, errno, "'%s': cannot rename the finished file", out->label);
    out->is_renamed = true;
    return MU_OK;
}

enum mu_status mu_file_out_sync_dir(struct mu_file_out *out, struct mu_error *err)
{
    if (fsync(out->dir_fd) != 0)
        return mu_fail_errno(err, errno, "'%s': directory fsync failed", out->label);
    out->is_published = true;
    return MU_OK;
}

struct mu_hash128 mu_file_out_hash(const struct mu_file_out *out)
{
    XXH128_hash_t hash = XXH3_128bits_digest(out->hash);
    return (struct mu_hash128){.low = hash.low64, .high = hash.high64};
}

void mu_file_out_fini(struct mu_file_out *out)
{
    mu_file_writer_free(out->writer);
    if (out->fd >= 0)
        close(out->fd);
    if (out->dir_fd >= 0) {
        if (!out->is_renamed)
            unlinkat(out->dir_fd, out->temporary, 0);
        else if (!out->is_published && out->withdraw)
            unlinkat(out->dir_fd, out->name, 0);
        close(out->dir_fd);
    }
    free(out->stage);
    if (out->hash)
        XXH3_freeState(out->hash);
    memset(out, 0, sizeof *out);
    out->fd = out->dir_fd = -1;
}

enum mu_status mu_file_publish(const char *dir, const char *name, const void *data, size_t data_bytes,
                               struct mu_error *err)
{
    struct mu_file_out out;
    enum mu_status status = mu_file_out_open(&out, dir, name, data_bytes, err);
    out.withdraw = true;
    if (status == MU_OK)
        status = mu_file_out_append(&out, data, data_bytes, err);
    if (status == MU_OK)
        status = mu_file_out_sync(&out, err);
    if (status == MU_OK)
        status = mu_file_out_rename(&out, err);
    if (status == MU_OK)
        status = mu_file_out_sync_dir(&out, err);
    mu_file_out_fini(&out);
    return status;
}

enum mu_status mu_file_sync_dir(const char *path, struct mu_error *err)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return mu_fail_errno(err, errno, "cannot open directory '%s'", path);
    enum mu_status status = fsync(fd) == 0 ? MU_OK : mu_fail_errno(err, errno, "directory '%s': fsync failed", path);
    close(fd);
    return status;
}

void mu_file_parent(const char *path, char *out, size_t out_size)
{
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/')
        length--;
    while (length > 0 && path[length - 1] != '/')
        length--;
    while (length > 1 && path[length - 1] == '/')
        length--;
    if (length == 0)
        snprintf(out, out_size, ".");
    else
        snprintf(out, out_size, "%.*s", (int)length, path);
}

enum mu_status mu_file_make_dirs(const char *path, struct mu_error *err)
{
    char partial[PATH_BYTES_MAX], parent[PATH_BYTES_MAX];
    size_t length = strlen(path);
    if (length == 0 || length >= sizeof partial)
        return mu_fail(err, MU_ERR_INVALID, "a directory path of %zu bytes is not allowed: 1 to %zu", length,
                       sizeof partial - 1);
    memcpy(partial, path, length + 1);
    for (size_t i = 1; i <= length; i++) {
        if (path[i] != '/' && path[i] != 0)
            continue;
        partial[i] = 0;
        if (mkdir(partial, 0755) == 0) {
            mu_file_parent(partial, parent, sizeof parent);
            enum mu_status status = mu_file_sync_dir(parent, err);
            if (status != MU_OK)
                return status;
        } else if (errno != EEXIST) {
            /* EROFS and EACCES also come for a directory that is there already. */
            int reason = errno;
            struct stat st;
            if (stat(partial, &st) != 0 || !S_ISDIR(st.st_mode))
                return mu_fail_errno(err, reason, "cannot create directory '%s'", partial);
        }
        partial[i] = path[i];
    }
    struct stat st;
    if (stat(path, &st) != 0)
        return mu_fail_errno(err, errno, "cannot open directory '%s'", path);
    if (!S_ISDIR(st.st_mode))
        return mu_fail(err, MU_ERR_INVALID, "'%s' is not a directory", path);
    return MU_OK;
}

enum mu_status mu_file_open_regular(const char *path, int *ret_fd, uint64_t *ret_size_bytes, struct mu_error *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd < 0)
        return mu_fail_errno(err, errno, "cannot open '%s'", path);
    struct stat st;
    enum mu_status status = MU_OK;
    if (fstat(fd, &st) != 0)
        status = mu_fail_errno(err, errno, "cannot stat '%s'", path);
    else if (!S_ISREG(st.st_mode))
        status = mu_fail(err, MU_ERR_INVALID, "'%s' is not a regular file", path);
    if (status != MU_OK) {
        close(fd);
        return status;
    }
    *ret_fd = fd;
    *ret_size_bytes = (uint64_t)st.st_size;
    return MU_OK;
}

enum mu_status mu_file_read_at(int fd, const char *path, uint64_t offset, void *dst, size_t size_bytes,
                               struct mu_error *err)
{
    uint8_t *to = dst;
    while (size_bytes > 0) {
        size_t part = size_bytes < MU_FILE_BLOCK_BYTES ? size_bytes : MU_FILE_BLOCK_BYTES;
        ssize_t got = pread(fd, to, part, (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return mu_fail_errno(err, errno, "'%s': cannot read at byte %llu", path, (unsigned long long)offset);
        if (got == 0)
            return mu_fail(err, MU_ERR_CORRUPT, "'%s': the file ends at byte %llu, %zu bytes too early", path,
                           (unsigned long long)offset, size_bytes);
        to += got;
        size_bytes -= (size_t)got;
        offset += (uint64_t)got;
    }
    return MU_OK;
}

enum mu_status mu_file_read_all(const char *path, size_t limit_bytes, char **ret_bytes, size_t *ret_size_bytes,
                                struct mu_error *err)
{
    int fd;
    uint64_t size_bytes;
    enum mu_status status = mu_file_open_regular(path, &fd, &size_bytes, err);
    if (status != MU_OK)
        return status;
    char *bytes = NULL;
    if (size_bytes > limit_bytes)
        status = mu_fail(err, MU_ERR_LIMIT, "'%s': a size of %llu bytes is not allowed: at most %zu", path,
                         (unsigned long long)size_bytes, limit_bytes);
    else if (!(bytes = malloc((size_t)size_bytes + 1)))
        status = mu_fail(err, MU_ERR_NO_MEMORY, "'%s': no memory for %llu bytes", path, (unsigned long long)size_bytes);
    else
        status = mu_file_read_at(fd, path, 0, bytes, (size_t)size_bytes, err);
    close(fd);
    if (status != MU_OK) {
        free(bytes);
        return status;
    }
    bytes[size_bytes] = 0;
    *ret_bytes = bytes;
    *ret_size_bytes = (size_t)size_bytes;
    return MU_OK;
}
