#include "storage/catalog.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "storage/file.h"
#include "storage/piece_format.h"

enum { OWNER_BYTES_MAX = 256, DIGITS_MIN = 10 };
#define OWNER_FORMAT "muster checkpoint of job %s\n"

void mu_catalog_name(uint64_t seq, uint64_t step, struct mu_id nonce, char out[MU_CATALOG_NAME_SIZE])
{
    snprintf(out, MU_CATALOG_NAME_SIZE, "%0*" PRIu64 "-%0*" PRIu64 "-%016" PRIx64 "%016" PRIx64, DIGITS_MIN, seq,
             DIGITS_MIN, step, nonce.high, nonce.low);
}

static bool parse_padded(const char *text, size_t length, uint64_t *ret_value)
{
    char digits[24];
    if (length < DIGITS_MIN || length >= sizeof digits)
        return false;
    memcpy(digits, text, length);
    digits[length] = 0;
    const char *first = digits;
    while (first[0] == '0' && first[1])
        first++;
    return mu_parse_u64(first, ret_value);
}

bool mu_catalog_parse_name(const char *name, uint64_t *ret_seq, uint64_t *ret_step, struct mu_id *ret_nonce)
{
    uint64_t seq, step;
    struct mu_hash128 bits;
    char again[MU_CATALOG_NAME_SIZE];
    const char *second = strchr(name, '-'), *third = second ? strchr(second + 1, '-') : NULL;
    if (!third || !parse_padded(name, (size_t)(second - name), &seq) ||
        !parse_padded(second + 1, (size_t)(third - second - 1), &step) || !mu_hash128_parse(third + 1, &bits))
        return false;
    struct mu_id nonce = {.high = bits.high, .low = bits.low};
    mu_catalog_name(seq, step, nonce, again);
    if (strcmp(again, name) != 0)
        return false;
    *ret_seq = seq;
    *ret_step = step;
    *ret_nonce = nonce;
    return true;
}

/* --- ownership --- */

enum ownership { OWNED, FOREIGN, UNMARKED };

/* What the owner file of root/name says. `job` NULL: any job of ours will do. */
static enum ownership owner_of(int root_fd, const char *name, const char *job)
{
    char path[MU_CATALOG_NAME_SIZE + 16], text[OWNER_BYTES_MAX + 1], wanted[OWNER_BYTES_MAX];
    snprintf(path, sizeof path, "%s/" MU_CATALOG_OWNER, name);
    int fd = openat(root_fd, path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return errno == ENOENT ? UNMARKED : FOREIGN;
    ssize_t length = read(fd, text, OWNER_BYTES_MAX);
    close(fd);
    text[length > 0 ? length : 0] = 0;
    snprintf(wanted, sizeof wanted, OWNER_FORMAT, job ? job : "");
    if (job)
        return strcmp(text, wanted) == 0 ? OWNED : FOREIGN;
    wanted[strlen(wanted) - 1] = 0; /* the line's end comes after a name */
    return strncmp(text, wanted, strlen(wanted)) == 0 ? OWNED : FOREIGN;
}

static bool is_directory(int parent_fd, const char *name)
{
    struct stat st;
    return fstatat(parent_fd, name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(st.st_mode);
}

static int open_dir_at(int parent_fd, const char *name)
{
    return openat(parent_fd, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
}

/* --- create --- */

enum mu_status mu_catalog_create(const char *root, const char *job, uint64_t seq, uint64_t step, struct mu_id nonce,
                                 char *ret_path, struct mu_error *err)
{
    char name[MU_CATALOG_NAME_SIZE], path[MU_PATH_SIZE], manifest[MU_CATALOG_NAME_SIZE + 16], owner[OWNER_BYTES_MAX];
    if (!mu_job_name_is_valid(job))
        return mu_fail(err, MU_ERR_INVALID, "checkpoint directory '%s': the job name '%s' is not allowed", root, job);
    mu_catalog_name(seq, step, nonce, name);
    if ((size_t)snprintf(path, sizeof path, "%s/%s", root, name) >= sizeof path)
        return mu_fail(err, MU_ERR_LIMIT,
                       "checkpoint directory '%.60s...': a path of %zu characters is too long: at most %zu", root,
                       strlen(root), sizeof path - sizeof name);
    enum mu_status status = mu_file_make_dirs(root, err);
    if (status != MU_OK)
        return status;
    int root_fd = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root_fd < 0)
        return mu_fail_errno(err, errno, "cannot open checkpoint directory '%s'", root);
    bool is_new = mkdirat(root_fd, name, 0755) == 0;
    if (!is_new && errno != EEXIST)
        status = mu_fail_errno(err, errno, "cannot create checkpoint directory '%s'", path);
    enum ownership ownership = status == MU_OK && is_directory(root_fd, name) ? owner_of(root_fd, name, job) : FOREIGN;
    if (status == MU_OK && ownership == FOREIGN)
        status = mu_fail(err, MU_ERR_EXISTS, "'%s' is there already and is not a checkpoint of job '%s'", path, job);
    snprintf(manifest, sizeof manifest, "%s/" MU_MANIFEST_FILE, name);
    if (status == MU_OK && faccessat(root_fd, manifest, F_OK, AT_SYMLINK_NOFOLLOW) == 0)
        status = mu_fail(err, MU_ERR_CONFLICT, "'%s' is a committed checkpoint and is never written again", path);
    if (status == MU_OK && ownership == UNMARKED) {
        snprintf(owner, sizeof owner, OWNER_FORMAT, job);
        status = mu_file_publish(path, MU_CATALOG_OWNER, owner, strlen(owner), err);
    }
    if (status == MU_OK && fsync(root_fd) != 0)
        status = mu_fail_errno(err, errno, "directory '%s': fsync failed", root);
    if (status != MU_OK && is_new)
        unlinkat(root_fd, name, AT_REMOVEDIR); /* only if it is empty */
    close(root_fd);
    if (status == MU_OK)
        strcpy(ret_path, path);
    return status;
}

/* --- delete --- */

static enum mu_status unlink_all(int dir_fd, const char *where, struct mu_error *err)
{
    int list_fd = dup(dir_fd);
    DIR *dir = list_fd >= 0 ? fdopendir(list_fd) : NULL;
    if (!dir) {
        int reason = errno;
        if (list_fd >= 0)
            close(list_fd);
        return mu_fail_errno(err, reason, "cannot list '%s'", where);
    }
    enum mu_status status = MU_OK;
    unlinkat(dir_fd, MU_MANIFEST_FILE, 0); /* first: what is left does not look whole */
    for (struct dirent *item; status == MU_OK && (errno = 0, item = readdir(dir));) {
        if (strcmp(item->d_name, ".") == 0 || strcmp(item->d_name, "..") == 0)
            continue;
        if (unlinkat(dir_fd, item->d_name, 0) != 0 && errno != ENOENT)
            status = mu_fail_errno(err, errno, "cannot remove '%s/%s' (if it is a directory, Muster did not make it)",
                                   where, item->d_name);
    }
    closedir(dir);
    return status;
}

static enum mu_status remove_trashed(int trash_fd, const char *root, const char *name, struct mu_error *err)
{
    char where[MU_PATH_SIZE + MU_CATALOG_NAME_SIZE];
    snprintf(where, sizeof where, "%s/" MU_CATALOG_TRASH "/%s", root, name);
    int dir_fd = open_dir_at(trash_fd, name);
    if (dir_fd < 0)
        return errno == ENOENT ? MU_OK : mu_fail_errno(err, errno, "cannot open '%s'", where);
    enum mu_status status = unlink_all(dir_fd, where, err);
    close(dir_fd);
    if (status == MU_OK && unlinkat(trash_fd, name, AT_REMOVEDIR) != 0 && errno != ENOENT)
        status = mu_fail_errno(err, errno, "cannot remove '%s'", where);
    return status;
}

/* A directory is deleted if it is one of ours, or if it is empty (its creation was interrupted). */
static enum mu_status check_deletable(int root_fd, const char *root, const char *name, struct mu_error *err)
{
    uint64_t seq, step;
    struct mu_id nonce;
    struct stat st;
    if (!mu_catalog_parse_name(name, &seq, &step, &nonce))
        return mu_fail(err, MU_ERR_INVALID, "'%s/%s' does not have the name of a checkpoint, so it is not deleted",
                       root, name);
    if (fstatat(root_fd, name, &st, AT_SYMLINK_NOFOLLOW) != 0)
        return mu_fail_errno(err, errno, "cannot delete '%s/%s'", root, name);
    if (!S_ISDIR(st.st_mode))
        return mu_fail(err, MU_ERR_INVALID, "'%s/%s' is not a directory, so it is not deleted", root, name);
    enum ownership ownership = owner_of(root_fd, name, NULL);
    if (ownership == OWNED || (ownership == UNMARKED && unlinkat(root_fd, name, AT_REMOVEDIR) == 0))
        return MU_OK;
    return mu_fail(err, MU_ERR_DENIED, "'%s/%s' has no '%s' file of Muster's, so it is not deleted", root, name,
                   MU_CATALOG_OWNER);
}

static enum mu_status move_to_trash(int root_fd, int trash_fd, const char *root, const char *name, struct mu_error *err)
{
    /* One of that name may lie there from an interrupted delete. */
    enum mu_status status = remove_trashed(trash_fd, root, name, err);
    if (status != MU_OK)
        return status;
    if (renameat(root_fd, name, trash_fd, name) != 0)
        return mu_fail_errno(err, errno, "cannot move '%s/%s' to the trash", root, name);
    if (fsync(trash_fd) != 0 || fsync(root_fd) != 0)
        return mu_fail_errno(err, errno, "directory '%s': fsync failed", root);
    return MU_OK;
}

enum mu_status mu_catalog_delete(const char *root, const char *name, struct mu_error *err)
{
    int root_fd = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC), trash_fd = -1;
    if (root_fd < 0)
        return mu_fail_errno(err, errno, "cannot open checkpoint directory '%s'", root);
    enum mu_status status = check_deletable(root_fd, root, name, err);
    if (status != MU_OK || !is_directory(root_fd, name)) /* an empty one is gone by now */
        goto done;
    if (mkdirat(root_fd, MU_CATALOG_TRASH, 0755) != 0 && errno != EEXIST) {
        status = mu_fail_errno(err, errno, "cannot create '%s/" MU_CATALOG_TRASH "'", root);
        goto done;
    }
    trash_fd = open_dir_at(root_fd, MU_CATALOG_TRASH);
    if (trash_fd < 0) {
        status = mu_fail_errno(err, errno, "cannot open '%s/" MU_CATALOG_TRASH "'", root);
        goto done;
    }
    status = move_to_trash(root_fd, trash_fd, root, name, err);
    if (status == MU_OK)
        status = remove_trashed(trash_fd, root, name, err);
done:
    if (trash_fd >= 0)
        close(trash_fd);
    close(root_fd);
    return status;
}

/* --- listing --- */

struct listed {
    char name[MU_CATALOG_NAME_SIZE];
    uint64_t seq, step;
    struct mu_id nonce;
};

static int by_seq(const void *a, const void *b)
{
    const struct listed *left = a, *right = b;
    if (left->seq != right->seq)
        return left->seq < right->seq ? -1 : 1;
    return strcmp(left->name, right->name);
}

/* The directories of checkpoint name below `path`, ascending by seq; nothing when it does not exist. *ret_fd is the
 * open directory (-1 when missing), *ret_list from malloc. */
static enum mu_status list_directory(const char *path, int *ret_fd, struct listed **ret_list, size_t *ret_count,
                                     struct mu_error *err)
{
    *ret_fd = -1;
    *ret_list = NULL;
    *ret_count = 0;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT ? MU_OK : mu_fail_errno(err, errno, "cannot open checkpoint directory '%s'", path);
    int list_fd = dup(fd);
    DIR *dir = list_fd >= 0 ? fdopendir(list_fd) : NULL;
    struct listed *list = NULL;
    size_t count = 0, capacity = 0;
    enum mu_status status = dir ? MU_OK : mu_fail_errno(err, errno, "cannot list checkpoint directory '%s'", path);
    for (struct dirent *item; status == MU_OK && (errno = 0, item = readdir(dir));) {
        struct listed entry;
        if (!mu_catalog_parse_name(item->d_name, &entry.seq, &entry.step, &entry.nonce) ||
            !is_directory(fd, item->d_name))
            continue;
        strcpy(entry.name, item->d_name);
        if (count == MU_CATALOG_ENTRIES_MAX) {
            status = mu_fail(err, MU_ERR_LIMIT, "'%s' holds more than %d checkpoints", path, MU_CATALOG_ENTRIES_MAX);
        } else if (count == capacity) {
            capacity = capacity ? capacity * 2 : 64;
            struct listed *grown = realloc(list, capacity * sizeof *grown);
            if (grown)
                list = grown;
            else
                status = mu_fail(err, MU_ERR_NO_MEMORY, "no memory to list '%s'", path);
        }
        if (status == MU_OK)
            list[count++] = entry;
    }
    if (status == MU_OK && errno != 0)
        status = mu_fail_errno(err, errno, "cannot list checkpoint directory '%s'", path);
    if (dir)
        closedir(dir);
    else if (list_fd >= 0)
        close(list_fd);
    if (status != MU_OK) {
        close(fd);
        free(list);
        return status;
    }
    if (count > 0)
        qsort(list, count, sizeof *list, by_seq);
    *ret_fd = fd;
    *ret_list = list;
    *ret_count = count;
    return MU_OK;
}

enum mu_status mu_catalog_empty_trash(const char *root, size_t *ret_removed, struct mu_error *err)
{
    char trash[MU_PATH_SIZE + 16];
    struct listed *list;
    size_t count, removed = 0;
    int trash_fd;
    snprintf(trash, sizeof trash, "%s/" MU_CATALOG_TRASH, root);
    struct stat st;
    if (lstat(trash, &st) == 0 && !S_ISDIR(st.st_mode))
        return mu_fail(err, MU_ERR_INVALID, "'%s' is not a directory", trash);
    enum mu_status status = list_directory(trash, &trash_fd, &list, &count, err);
    if (status != MU_OK)
        return status;
    for (size_t i = 0; i < count; i++) {
        struct mu_error problem;
        enum mu_status one = remove_trashed(trash_fd, root, list[i].name, &problem);
        if (one == MU_OK)
            removed++;
        else if (status == MU_OK)
            status = mu_fail(err, one, "%s", problem.text);
    }
    if (trash_fd >= 0)
        close(trash_fd);
    free(list);
    if (ret_removed)
        *ret_removed = removed;
    return status;
}

enum mu_status mu_catalog_sweep(const char *root, const char *job,
                                bool (*known)(void *arg, uint64_t seq, uint64_t step, struct mu_id nonce), void *arg,
                                size_t *ret_removed, struct mu_error *err)
{
    struct listed *list;
    size_t count, removed = 0;
    int root_fd;
    enum mu_status status = list_directory(root, &root_fd, &list, &count, err);
    if (status != MU_OK)
        return status;
    for (size_t i = 0; i < count; i++) {
        struct mu_error problem;
        if (owner_of(root_fd, list[i].name, job) != OWNED || known(arg, list[i].seq, list[i].step, list[i].nonce))
            continue;
        enum mu_status one = mu_catalog_delete(root, list[i].name, &problem);
        if (one == MU_OK)
            removed++;
        else if (status == MU_OK)
            status = mu_fail(err, one, "%s", problem.text);
    }
    if (root_fd >= 0)
        close(root_fd);
    free(list);
    if (ret_removed)
        *ret_removed = removed;
    return status;
}

/* False: not a committed checkpoint of this job. Otherwise *ret_manifest, or NULL and `problem`. */
static bool read_committed(int root_fd, const char *path, const struct listed *entry, const char *job,
                           struct mu_manifest **ret_manifest, struct mu_error *problem)
{
    struct mu_manifest *manifest = NULL;
    enum mu_status status = mu_manifest_read(path, &manifest, problem);
    *ret_manifest = NULL;
    if (status == MU_ERR_NOT_FOUND)
        return false;
    if (status != MU_OK)
        return owner_of(root_fd, entry->name, job) == OWNED;
    if (strcmp(manifest->identity.job, job) != 0) {
        mu_manifest_free(manifest);
        return false;
    }
    /* The name has the step as ordered: the first boundary at which all could take it may be a later one. */
    if (manifest->identity.seq != entry->seq || manifest->identity.step < entry->step ||
        !mu_id_equal(manifest->nonce, entry->nonce)) {
        mu_fail(problem, MU_ERR_CORRUPT,
                "'%s': its manifest is of checkpoint %" PRIu64 ", step %" PRIu64 ", and belongs to another directory",
                path, manifest->identity.seq, manifest->identity.step);
        mu_manifest_free(manifest);
        return true;
    }
    *ret_manifest = manifest;
    return true;
}

enum mu_status mu_catalog_enumerate(const char *root, const char *job, mu_catalog_fn fn, void *arg,
                                    struct mu_error *err)
{
    struct listed *list;
    size_t count;
    int root_fd;
    enum mu_status status = list_directory(root, &root_fd, &list, &count, err);
    if (status != MU_OK)
        return status;
    bool goes_on = true;
    for (size_t i = 0; i < count && goes_on; i++) {
        char path[MU_PATH_SIZE + MU_CATALOG_NAME_SIZE];
        struct mu_manifest *manifest;
        struct mu_error problem;
        snprintf(path, sizeof path, "%s/%s", root, list[i].name);
        if (!read_committed(root_fd, path, &list[i], job, &manifest, &problem))
            continue;
        goes_on = fn(arg, path, manifest, manifest ? NULL : &problem);
        mu_manifest_free(manifest);
    }
    if (root_fd >= 0)
        close(root_fd);
    free(list);
    return MU_OK;
}
