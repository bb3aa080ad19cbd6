/* The only file that knows RocksDB (C API of 7.8). */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <rocksdb/c.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "storage/file.h"
#include "storage/store.h"

enum {
    PATH_BYTES_MAX = 4096,
    WRITE_BUFFER_BYTES = 16 << 20, /* also bounds what opening after a crash has to write */
    WAL_BYTES_MAX = 64 << 20,
    LOG_BYTES_MAX = 4 << 20,
    LOG_FILES_MAX = 4,
    OPEN_FILES_MAX = 256,
    RECOVERY_TOLERATE_TORN_TAIL = 0, /* the default (2) stops in silence at any corruption, 1 refuses a torn tail */
    LOG_WARNINGS = 2,
    OPENING_BYTES = 2 << 20, /* manifest, options, log of its own */
};
#define LOCK_FILE    "muster.lock"
#define BALLAST_FILE "ballast"

struct rocksdb_store {
    struct mu_store base;
    char *path;
    uint64_t reserve_bytes;
    int lock_fd;
    atomic_bool is_broken; /* a write failed: RocksDB refuses all later ones until it is opened again */
    rocksdb_t *db;
    rocksdb_options_t *options;
    rocksdb_readoptions_t *read_options;
    rocksdb_writeoptions_t *write_options;
    rocksdb_writebatch_t *batch; /* reused */
};

static struct rocksdb_store *of(struct mu_store *store)
{
    return (struct rocksdb_store *)store;
}

/* Makes one line of RocksDB's `message` (which it frees) after ours. */
static enum mu_status fail_rocksdb(struct mu_error *err, char *message, const char *path, const char *what)
{
    enum mu_status status = strncmp(message, "Corruption", 10) == 0 ? MU_ERR_CORRUPT : MU_ERR_IO;
    for (char *c = message; *c; c++)
        if (*c == '\n')
            *c = ' ';
    mu_fail(err, status, "data directory '%s': %s: %s", path, what, message);
    rocksdb_free(message);
    return status;
}

static enum mu_status free_bytes(const char *path, uint64_t *ret_bytes, struct mu_error *err)
{
    struct statvfs fs;
    if (statvfs(path, &fs) != 0)
        return mu_fail_errno(err, errno, "data directory '%s': cannot read the free space", path);
    *ret_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
    return MU_OK;
}

static enum mu_status check_space(const struct rocksdb_store *store, uint64_t wanted_bytes, struct mu_error *err)
{
    if (store->reserve_bytes == 0)
        return MU_OK;
    uint64_t available = 0;
    enum mu_status status = free_bytes(store->path, &available, err);
    if (status != MU_OK)
        return status;
    if (available >= store->reserve_bytes + wanted_bytes)
        return MU_OK;
    return mu_fail(err, MU_ERR_NO_SPACE,
                   "data directory '%s': %.1f MiB free, below the reserve of %.1f MiB, so nothing is written; "
                   "free space on its file system, no restart is needed",
                   store->path, (double)available / 1048576.0, (double)store->reserve_bytes / 1048576.0);
}

static enum mu_status store_check(struct mu_store *base, struct mu_error *err)
{
    struct rocksdb_store *store = of(base);
    if (atomic_load(&store->is_broken))
        return mu_fail(err, MU_ERR_IO, "data directory '%s': an earlier write failed; restart the coordinator",
                       store->path);
    return check_space(store, 0, err);
}

static enum mu_status store_write(struct mu_store *base, const struct mu_store_batch *batch, struct mu_error *err)
{
    struct rocksdb_store *store = of(base);
    enum mu_status status = store_check(base, err);
    if (status == MU_OK)
        status = check_space(store, batch->size_bytes, err);
    if (status != MU_OK)
        return status;
    rocksdb_writebatch_clear(store->batch);
    for (size_t i = 0; i < batch->op_count; i++) {
        const struct mu_store_op *op = &batch->ops[i];
        const char *key = (const char *)mu_store_op_key(batch, op);
        if (op->is_delete)
            rocksdb_writebatch_delete(store->batch, key, op->key_bytes);
        else
            rocksdb_writebatch_put(store->batch, key, op->key_bytes, (const char *)mu_store_op_value(batch, op),
                                   op->value_bytes);
    }
    char *message = NULL;
    rocksdb_write(store->db, store->write_options, store->batch, &message);
    if (!message)
        return MU_OK;
    atomic_store(&store->is_broken, true);
    return fail_rocksdb(err, message, store->path, "a write failed, restart the coordinator");
}

static enum mu_status store_get(struct mu_store *base, const void *key, size_t key_bytes, uint8_t **ret_value,
                                size_t *ret_value_bytes, struct mu_error *err)
{
    struct rocksdb_store *store = of(base);
    char *message = NULL;
    rocksdb_pinnableslice_t *slice = rocksdb_get_pinned(store->db, store->read_options, key, key_bytes, &message);
    if (message)
        return fail_rocksdb(err, message, store->path, "a read failed");
    if (!slice)
        return mu_fail(err, MU_ERR_NOT_FOUND, "store: no such key (%zu bytes)", key_bytes);
    size_t size_bytes;
    const char *value = rocksdb_pinnableslice_value(slice, &size_bytes);
    uint8_t *copy = malloc(size_bytes ? size_bytes : 1);
    if (copy) {
        memcpy(copy, value, size_bytes);
        *ret_value = copy;
        *ret_value_bytes = size_bytes;
    }
    rocksdb_pinnableslice_destroy(slice);
    return copy ? MU_OK : mu_fail(err, MU_ERR_NO_MEMORY, "store: no memory for a value of %zu bytes", size_bytes);
}

static enum mu_status store_scan(struct mu_store *base, const void *prefix, size_t prefix_bytes, const void *after_key,
                                 size_t after_bytes, size_t limit, mu_store_scan_fn fn, void *arg, struct mu_error *err)
{
    struct rocksdb_store *store = of(base);
    rocksdb_iterator_t *it = rocksdb_create_iterator(store->db, store->read_options);
    rocksdb_iter_seek(it, prefix_bytes ? prefix : "", prefix_bytes);
    if (after_key && rocksdb_iter_valid(it)) {
        size_t key_bytes;
        const char *key = rocksdb_iter_key(it, &key_bytes);
        size_t common = key_bytes < after_bytes ? key_bytes : after_bytes;
        int order = common ? memcmp(key, after_key, common) : 0;
        if (order < 0 || (order == 0 && key_bytes <= after_bytes)) {
            rocksdb_iter_seek(it, after_key, after_bytes);
            if (rocksdb_iter_valid(it)) {
                key = rocksdb_iter_key(it, &key_bytes);
                if (key_bytes == after_bytes && memcmp(key, after_key, key_bytes) == 0)
                    rocksdb_iter_next(it);
            }
        }
    }
    for (size_t count = 0; rocksdb_iter_valid(it) && (limit == 0 || count < limit); rocksdb_iter_next(it), count++) {
        size_t key_bytes, value_bytes;
        const char *key = rocksdb_iter_key(it, &key_bytes);
        const char *value = rocksdb_iter_value(it, &value_bytes);
        if (key_bytes < prefix_bytes || (prefix_bytes && memcmp(key, prefix, prefix_bytes) != 0))
            break;
        if (!fn(arg, (const uint8_t *)key, key_bytes, (const uint8_t *)value, value_bytes))
            break;
    }
    char *message = NULL;
    rocksdb_iter_get_error(it, &message);
    rocksdb_iter_destroy(it);
    return message ? fail_rocksdb(err, message, store->path, "a scan failed") : MU_OK;
}

static void store_free(struct mu_store *base)
{
    struct rocksdb_store *store = of(base);
    if (store->db)
        rocksdb_close(store->db);
    if (store->batch)
        rocksdb_writebatch_destroy(store->batch);
    if (store->write_options)
        rocksdb_writeoptions_destroy(store->write_options);
    if (store->read_options)
        rocksdb_readoptions_destroy(store->read_options);
    if (store->options)
        rocksdb_options_destroy(store->options);
    if (store->lock_fd >= 0)
        close(store->lock_fd);
    free(store->path);
    free(store);
}

static const struct mu_store_ops rocksdb_ops = {
    .name = "rocksdb",
    .write = store_write,
    .get = store_get,
    .scan = store_scan,
    .check = store_check,
    .free = store_free,
};

/* Our own lock stands before RocksDB's: the ballast is handled before the database is open, and flock also tells two
 * stores of one process apart. The holder's process id is in the file, for the message. */
static enum mu_status lock_directory(struct rocksdb_store *store, struct mu_error *err)
{
    char path[PATH_BYTES_MAX];
    snprintf(path, sizeof path, "%s/" LOCK_FILE, store->path);
    store->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (store->lock_fd < 0)
        return mu_fail_errno(err, errno, "data directory '%s': cannot open " LOCK_FILE, store->path);
    if (flock(store->lock_fd, LOCK_EX | LOCK_NB) != 0) {
        int reason = errno;
        char holder[32] = "";
        ssize_t length = pread(store->lock_fd, holder, sizeof holder - 1, 0);
        if (length > 0)
            holder[strcspn(holder, "\n")] = 0;
        if (reason != EWOULDBLOCK)
            return mu_fail_errno(err, reason, "data directory '%s': cannot lock " LOCK_FILE, store->path);
        return mu_fail(
            err, MU_ERR_BUSY,
            "data directory '%s' is in use by another process (pid %s); stop it, or choose another directory",
            store->path, holder[0] ? holder : "unknown");
    }
    char line[32];
    int length = snprintf(line, sizeof line, "%d\n", (int)getpid());
    /* For the message only: on a full disk the lock holds without it. */
    ssize_t ignored = ftruncate(store->lock_fd, 0) == 0 ? pwrite(store->lock_fd, line, (size_t)length, 0) : 0;
    (void)ignored;
    return MU_OK;
}

/* Opening after a crash writes (log to tables, a new log). Too little space for that would abort again, so the ballast
 * goes first. */
static enum mu_status release_ballast(const struct rocksdb_store *store, uint64_t ballast_bytes,
                                      struct mu_error *notice, struct mu_error *err)
{
    uint64_t available = 0;
    enum mu_status status = free_bytes(store->path, &available, err);
    if (status != MU_OK || available >= ballast_bytes)
        return status;
    char path[PATH_BYTES_MAX];
    snprintf(path, sizeof path, "%s/" BALLAST_FILE, store->path);
    if (unlink(path) == 0)
        mu_fail(notice, MU_ERR_NO_SPACE,
                "data directory '%s': only %.1f MiB free, so its ballast file was given up to open the database; "
                "free space on its file system",
                store->path, (double)available / 1048576.0);
    return MU_OK;
}

/* What opening writes: the logs' content as tables, and new files of its own. With less RocksDB would abort half-way.
 */
static enum mu_status check_opening_space(const struct rocksdb_store *store, struct mu_error *err)
{
    uint64_t available = 0, needed = OPENING_BYTES;
    enum mu_status status = free_bytes(store->path, &available, err);
    DIR *dir = status == MU_OK ? opendir(store->path) : NULL;
    for (struct dirent *item; dir && (item = readdir(dir));) {
        const char *dot = strrchr(item->d_name, '.');
        struct stat st;
        if (dot && strcmp(dot, ".log") == 0 && fstatat(dirfd(dir), item->d_name, &st, 0) == 0)
            needed += (uint64_t)st.st_size;
    }
    if (dir)
        closedir(dir);
    if (status != MU_OK || available >= needed)
        return status;
    return mu_fail(
        err, MU_ERR_NO_SPACE,
        "data directory '%s': %.1f MiB free, %.1f MiB are needed to open the database; nothing is lost, free "
        "space on its file system and start again",
        store->path, (double)available / 1048576.0, (double)needed / 1048576.0);
}

/* Best effort: without a ballast everything works, only a full disk is harder to get out of. */
static void make_ballast(const struct rocksdb_store *store, uint64_t ballast_bytes)
{
    char path[PATH_BYTES_MAX];
    snprintf(path, sizeof path, "%s/" BALLAST_FILE, store->path);
    struct stat st;
    if (stat(path, &st) == 0 && (uint64_t)st.st_size == ballast_bytes)
        return;
    unlink(path);
    uint64_t available = 0;
    if (free_bytes(store->path, &available, NULL) != MU_OK || available < store->reserve_bytes + 2 * ballast_bytes)
        return;
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0)
        return;
    if (posix_fallocate(fd, 0, (off_t)ballast_bytes) != 0)
        unlink(path);
    close(fd);
}

/* RocksDB would make a new, empty database where the file CURRENT is missing, also in the middle of the files of an old
 * one. */
static enum mu_status check_not_beheaded(const struct rocksdb_store *store, bool *ret_is_new, struct mu_error *err)
{
    DIR *dir = opendir(store->path);
    if (!dir)
        return mu_fail_errno(err, errno, "data directory '%s': cannot list it", store->path);
    bool has_current = false, has_data = false;
    for (struct dirent *item; (item = readdir(dir));) {
        const char *dot = strrchr(item->d_name, '.');
        has_current |= strcmp(item->d_name, "CURRENT") == 0;
        has_data |= dot && (strcmp(dot, ".sst") == 0 || strcmp(dot, ".log") == 0);
    }
    closedir(dir);
    if (has_data && !has_current)
        return mu_fail(err, MU_ERR_CORRUPT,
                       "data directory '%s': it holds database files but CURRENT is missing; "
                       "restore it from a copy, or choose an empty directory",
                       store->path);
    *ret_is_new = !has_current;
    return MU_OK;
}

static enum mu_status open_database(struct rocksdb_store *store, struct mu_error *err)
{
    char *message = NULL;
    bool is_new = false;
    enum mu_status status = check_not_beheaded(store, &is_new, err);
    if (status != MU_OK)
        return status;
    store->options = rocksdb_options_create();
    store->read_options = rocksdb_readoptions_create();
    store->write_options = rocksdb_writeoptions_create();
    store->batch = rocksdb_writebatch_create();
    rocksdb_options_t *base = rocksdb_options_create();
    /* Not in the C API of 7.8. They come first: this call resets nothing but starts from `base`. */
    rocksdb_get_options_from_string(base, "track_and_verify_wals_in_manifest=true;paranoid_file_checks=true",
                                    store->options, &message);
    rocksdb_options_destroy(base);
    if (message)
        return fail_rocksdb(err, message, store->path, "options are not accepted");
    rocksdb_options_set_create_if_missing(store->options, is_new);
    rocksdb_options_set_paranoid_checks(store->options, 1);
    rocksdb_options_set_wal_recovery_mode(store->options, RECOVERY_TOLERATE_TORN_TAIL);
    rocksdb_options_set_write_buffer_size(store->options, WRITE_BUFFER_BYTES);
    rocksdb_options_set_max_total_wal_size(store->options, WAL_BYTES_MAX);
    rocksdb_options_set_max_open_files(store->options, OPEN_FILES_MAX);
    rocksdb_options_set_info_log_level(store->options, LOG_WARNINGS);
    rocksdb_options_set_max_log_file_size(store->options, LOG_BYTES_MAX);
    rocksdb_options_set_keep_log_file_num(store->options, LOG_FILES_MAX);
    rocksdb_writeoptions_set_sync(store->write_options, 1);
    store->db = rocksdb_open(store->options, store->path, &message);
    if (!message)
        return MU_OK;
    if (strstr(message, "lock file") || strstr(message, "lock hold")) {
        mu_fail(err, MU_ERR_BUSY,
                "data directory '%s' is in use by another program; stop it, or choose another directory (%.200s)",
                store->path, message);
        rocksdb_free(message);
        return MU_ERR_BUSY;
    }
    return fail_rocksdb(
        err, message, store->path,
        "cannot open the database (keep a copy of the directory; it can be rebuilt from the checkpoints' manifests)");
}

enum mu_status mu_store_rocksdb_open(const struct mu_store_rocksdb_config *config, struct mu_store **ret_store,
                                     struct mu_error *ret_notice, struct mu_error *err)
{
    if (ret_notice)
        *ret_notice = (struct mu_error){.status = MU_OK};
    struct rocksdb_store *store = calloc(1, sizeof *store);
    if (!store)
        return mu_fail(err, MU_ERR_NO_MEMORY, "store: no memory");
    store->base.ops = &rocksdb_ops;
    store->lock_fd = -1;
    store->reserve_bytes = config->reserve_bytes;
    store->path = strdup(config->path);
    enum mu_status status = store->path ? MU_OK : mu_fail(err, MU_ERR_NO_MEMORY, "store: no memory");
    if (status == MU_OK && (config->path[0] == 0 || strlen(config->path) > PATH_BYTES_MAX - 32))
        status = mu_fail(err, MU_ERR_INVALID, "data directory: a path of %zu bytes is not allowed: 1 to %d",
                         strlen(config->path), PATH_BYTES_MAX - 32);
    if (status == MU_OK && (status = mu_file_make_dirs(config->path, err)) != MU_OK)
        mu_error_prefix(err, "data directory");
    if (status == MU_OK)
        status = lock_directory(store, err);
    if (status == MU_OK && config->ballast_bytes > 0)
        status = release_ballast(store, config->ballast_bytes, ret_notice, err);
    if (status == MU_OK)
        status = check_opening_space(store, err);
    if (status == MU_OK)
        status = open_database(store, err);
    if (status != MU_OK) {
        store_free(&store->base);
        return status;
    }
    if (config->ballast_bytes > 0)
        make_ballast(store, config->ballast_bytes);
    *ret_store = &store->base;
    return MU_OK;
}
