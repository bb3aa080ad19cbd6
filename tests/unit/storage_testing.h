/* Helpers shared by the tests of storage/: scratch directories, small file systems, damaged files. */
#ifndef MU_TESTS_STORAGE_TESTING_H
#define MU_TESTS_STORAGE_TESTING_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/status.h"

#define MAYBE_UNUSED __attribute__((unused))

/* Fails the test with the error's own line. */
#define assert_ok(call, err)                                                                                           \
    do {                                                                                                               \
        (err)->text[0] = 0;                                                                                            \
        enum mu_status assert_ok_status = (call);                                                                      \
        if (assert_ok_status != MU_OK)                                                                                 \
            fail_msg("%s: %s: %s", #call, mu_status_name(assert_ok_status), (err)->text);                              \
    } while (0)

/* The call failed with that status, and its line is one line that holds `part`. */
#define assert_fails(call, wanted, err, part)                                                                          \
    do {                                                                                                               \
        (err)->text[0] = 0;                                                                                            \
        enum mu_status assert_fails_status = (call);                                                                   \
        if (assert_fails_status != (wanted) || !strstr((err)->text, (part)) || strchr((err)->text, '\n'))              \
            fail_msg("%s: got %s '%s', wanted %s with '%s'", #call, mu_status_name(assert_fails_status), (err)->text,  \
                     mu_status_name(wanted), (part));                                                                  \
    } while (0)

struct scratch {
    char path[256];
};

static MAYBE_UNUSED struct scratch scratch_make(void)
{
    struct scratch scratch;
    const char *base = getenv("TMPDIR");
    snprintf(scratch.path, sizeof scratch.path, "%s/muster-test-XXXXXX", base && strlen(base) < 200 ? base : "/tmp");
    assert_non_null(mkdtemp(scratch.path));
    return scratch;
}

static MAYBE_UNUSED int scratch_remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st;
    (void)type;
    (void)ftw;
    return remove(path);
}

static MAYBE_UNUSED void scratch_remove(const struct scratch *scratch)
{
    nftw(scratch->path, scratch_remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static MAYBE_UNUSED void path_join(char out[512], const char *dir, const char *name)
{
    assert_true(snprintf(out, 512, "%s/%s", dir, name) < 512);
}

static MAYBE_UNUSED void file_write(const char *path, const void *bytes, size_t size_bytes)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size_bytes, file), size_bytes);
    assert_int_equal(fclose(file), 0);
}

static MAYBE_UNUSED uint8_t *file_read(const char *path, size_t *ret_size_bytes)
{
    struct stat st;
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    assert_int_equal(fstat(fileno(file), &st), 0);
    uint8_t *bytes = malloc((size_t)st.st_size + 1);
    assert_non_null(bytes);
    assert_int_equal(fread(bytes, 1, (size_t)st.st_size, file), (size_t)st.st_size);
    fclose(file);
    *ret_size_bytes = (size_t)st.st_size;
    return bytes;
}

static MAYBE_UNUSED size_t count_files(const char *path)
{
    size_t count = 0;
    DIR *dir = opendir(path);
    assert_non_null(dir);
    for (struct dirent *item; (item = readdir(dir));)
        count += strcmp(item->d_name, ".") != 0 && strcmp(item->d_name, "..") != 0;
    closedir(dir);
    return count;
}

/* A file system of our own, seen by this process alone. False (with a printed reason) where that is not permitted. */
static MAYBE_UNUSED bool mount_tmpfs(const char *path, const char *options)
{
    static bool is_private;
    if (!is_private && (unshare(CLONE_NEWNS) != 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0)) {
        print_message("skipped: a private mount namespace is not permitted here (%s)\n", strerror(errno));
        return false;
    }
    is_private = true;
    if (mount("muster-test", path, "tmpfs", 0, options) != 0) {
        print_message("skipped: mounting a tmpfs is not permitted here (%s)\n", strerror(errno));
        return false;
    }
    return true;
}

static MAYBE_UNUSED void make_read_only(const char *path)
{
    assert_int_equal(mount("muster-test", path, NULL, MS_REMOUNT | MS_RDONLY, NULL), 0);
}

static MAYBE_UNUSED void unmount(const char *path)
{
    assert_int_equal(umount2(path, MNT_DETACH), 0);
}

#endif
