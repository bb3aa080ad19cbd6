/* links: mu_storage mu_plan */
/* RocksDB where it hurts: another process, a full disk, kill -9, damaged files. Child processes are this program again
 * (a forked RocksDB has lost its threads). */
#include "storage_testing.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/wait.h>

#include "common/rng.h"
#include "storage/store.h"

enum { VALUE_BYTES = 32 << 10, MIB = 1 << 20 };

static enum mu_status open_at(const char *path, uint64_t reserve_bytes, uint64_t ballast_bytes,
                              struct mu_store **ret_store, struct mu_error *notice, struct mu_error *err)
{
    struct mu_store_rocksdb_config config = {
        .path = path, .reserve_bytes = reserve_bytes, .ballast_bytes = ballast_bytes};
    return mu_store_rocksdb_open(&config, ret_store, notice, err);
}

static void key_of(uint32_t number, char key[16])
{
    snprintf(key, 16, "key-%08u", number);
}

/* Bytes that do not compress, a function of the number. */
static void value_of(uint32_t number, uint8_t value[VALUE_BYTES])
{
    uint64_t random = number;
    for (size_t i = 0; i < VALUE_BYTES; i += 8) {
        uint64_t bits = mu_splitmix64(&random);
        memcpy(value + i, &bits, 8);
    }
}

static enum mu_status put_number(struct mu_store *store, uint32_t number, struct mu_error *err)
{
    static uint8_t value[VALUE_BYTES];
    char key[16];
    struct mu_store_batch batch;
    key_of(number, key);
    value_of(number, value);
    mu_store_batch_init(&batch);
    enum mu_status status = mu_store_batch_put(&batch, key, strlen(key), value, sizeof value);
    if (status == MU_OK)
        status = mu_store_write(store, &batch, err);
    mu_store_batch_fini(&batch);
    return status;
}

static bool has_number(struct mu_store *store, uint32_t number)
{
    static uint8_t wanted[VALUE_BYTES];
    char key[16];
    uint8_t *value;
    size_t size_bytes;
    key_of(number, key);
    if (mu_store_get(store, key, strlen(key), &value, &size_bytes, NULL) != MU_OK)
        return false;
    value_of(number, wanted);
    bool is_same = size_bytes == sizeof wanted && memcmp(value, wanted, sizeof wanted) == 0;
    free(value);
    return is_same;
}

/* --- children --- */

/* Writes until it cannot; says each acknowledged number on standard output. */
static int child_write(const char *path)
{
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    struct mu_store *store;
    if (open_at(path, 0, 0, &store, NULL, NULL) != MU_OK)
        return 3;
    for (uint32_t number = 0; put_number(store, number, NULL) == MU_OK; number++)
        if (write(STDOUT_FILENO, &number, sizeof number) != sizeof number)
            _exit(4);
    _exit(5); /* a store whose write failed on a full disk is not worth closing */
}

/* Opens, says so, and holds it until standard input ends. */
static int child_hold(const char *path)
{
    struct mu_store *store;
    char byte = 'x';
    if (open_at(path, 0, 0, &store, NULL, NULL) != MU_OK || write(STDOUT_FILENO, &byte, 1) != 1)
        return 3;
    ssize_t ignored = read(STDIN_FILENO, &byte, 1);
    (void)ignored;
    mu_store_free(store);
    return 0;
}

struct child {
    pid_t pid;
    int to, from;
};

static struct child start_child(const char *mode, const char *path)
{
    int to[2], from[2];
    assert_int_equal(pipe2(to, O_CLOEXEC), 0);
    assert_int_equal(pipe2(from, O_CLOEXEC), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        dup2(to[0], STDIN_FILENO);
        dup2(from[1], STDOUT_FILENO);
        int null = open("/dev/null", O_WRONLY);
        dup2(null, STDERR_FILENO); /* an abort is expected here, its words are not of interest */
        execl("/proc/self/exe", "test_store_rocksdb", mode, path, (char *)NULL);
        _exit(127);
    }
    close(to[0]);
    close(from[1]);
    return (struct child){.pid = pid, .to = to[1], .from = from[0]};
}

static int end_child(struct child *child)
{
    int how;
    close(child->to);
    close(child->from);
    assert_int_equal(waitpid(child->pid, &how, 0), child->pid);
    return how;
}

/* --- tests --- */

static void test_directory_in_use_is_told_in_one_line(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_store *store;
    struct mu_error err;
    char byte, pid[32];
    struct child child = start_child("child-hold", scratch.path);
    assert_int_equal(read(child.from, &byte, 1), 1);
    snprintf(pid, sizeof pid, "pid %d", (int)child.pid);
    assert_fails(open_at(scratch.path, 0, 0, &store, NULL, &err), MU_ERR_BUSY, &err, pid);
    assert_non_null(strstr(err.text, scratch.path));
    assert_true(WIFEXITED(end_child(&child)));
    /* Also within one process. */
    struct mu_store *second;
    assert_ok(open_at(scratch.path, 0, 0, &store, NULL, &err), &err);
    assert_fails(open_at(scratch.path, 0, 0, &second, NULL, &err), MU_ERR_BUSY, &err, "in use by another process");
    mu_store_free(store);
    assert_ok(open_at(scratch.path, 0, 0, &store, NULL, &err), &err);
    mu_store_free(store);
    scratch_remove(&scratch);
}

static void test_kill_loses_nothing_acknowledged(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct child child = start_child("child-write", scratch.path);
    uint32_t last = 0;
    while (last < 60)
        assert_int_equal(read(child.from, &last, sizeof last), sizeof last);
    kill(child.pid, SIGKILL);
    for (uint32_t number; read(child.from, &number, sizeof number) == sizeof number;)
        last = number;
    assert_true(WIFSIGNALED(end_child(&child)));

    struct mu_store *store;
    struct mu_error err;
    assert_ok(open_at(scratch.path, 0, 0, &store, NULL, &err), &err);
    for (uint32_t number = 0; number <= last; number++)
        assert_true(has_number(store, number));
    mu_store_free(store);
    scratch_remove(&scratch);
}

static void newest_log(const char *dir, char out[512])
{
    char newest[256] = "";
    DIR *list = opendir(dir);
    assert_non_null(list);
    for (struct dirent *item; (item = readdir(list));) {
        size_t length = strlen(item->d_name);
        if (length > 4 && strcmp(item->d_name + length - 4, ".log") == 0 && strcmp(item->d_name, newest) > 0)
            snprintf(newest, sizeof newest, "%s", item->d_name);
    }
    closedir(list);
    assert_true(newest[0]);
    path_join(out, dir, newest);
}

static void test_torn_tail_of_the_log_is_tolerated(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct child child = start_child("child-write", scratch.path);
    uint32_t last = 0;
    while (last < 10)
        assert_int_equal(read(child.from, &last, sizeof last), sizeof last);
    kill(child.pid, SIGKILL);
    end_child(&child);
    /* A record whose end never reached the disk: only part of the last one in the file is there. */
    char log[512];
    struct stat st;
    newest_log(scratch.path, log);
    assert_int_equal(stat(log, &st), 0);
    assert_int_equal(truncate(log, (off_t)9 * VALUE_BYTES + VALUE_BYTES / 2), 0);
    struct mu_store *store;
    struct mu_error err;
    assert_ok(open_at(scratch.path, 0, 0, &store, NULL, &err), &err);
    for (uint32_t number = 0; number < 9; number++)
        assert_true(has_number(store, number));
    assert_false(has_number(store, 10));
    assert_ok(put_number(store, 10, &err), &err);
    mu_store_free(store);
    scratch_remove(&scratch);
}

static void write_filler(const char *dir, size_t size_bytes)
{
    char path[512];
    path_join(path, dir, "filler");
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    assert_true(fd >= 0);
    assert_int_equal(posix_fallocate(fd, 0, (off_t)size_bytes), 0);
    close(fd);
}

static void remove_filler(const char *dir)
{
    char path[512];
    path_join(path, dir, "filler");
    assert_int_equal(unlink(path), 0);
}

static uint64_t available_bytes(const char *path)
{
    struct statvfs fs;
    assert_int_equal(statvfs(path, &fs), 0);
    return (uint64_t)fs.f_bavail * fs.f_frsize;
}

static void test_full_disk_without_reserve_loses_nothing_acknowledged(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    char data[512];
    if (!mount_tmpfs(scratch.path, "size=64m")) {
        scratch_remove(&scratch);
        skip();
    }
    path_join(data, scratch.path, "db");
    write_filler(scratch.path, 32 * MIB);
    struct child child = start_child("child-write", data);
    uint32_t count = 0;
    for (uint32_t number; read(child.from, &number, sizeof number) == sizeof number;)
        count = number + 1;
    int how = end_child(&child);
    print_message("the disk was full after %u batches: %s %d\n", count, WIFSIGNALED(how) ? "signal" : "exit",
                  WIFSIGNALED(how) ? WTERMSIG(how) : WEXITSTATUS(how));
    assert_true(WIFSIGNALED(how) ? WTERMSIG(how) == SIGABRT : WEXITSTATUS(how) == 5);
    assert_true(count > 100);

    remove_filler(scratch.path);
    struct mu_store *store;
    struct mu_error err;
    assert_ok(open_at(data, 0, 0, &store, NULL, &err), &err);
    for (uint32_t number = 0; number < count; number++)
        assert_true(has_number(store, number));
    assert_ok(put_number(store, count + 1, &err), &err);
    mu_store_free(store);
    unmount(scratch.path);
    scratch_remove(&scratch);
}

static void test_below_the_reserve_writes_are_refused_until_there_is_space(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    char data[512];
    if (!mount_tmpfs(scratch.path, "size=96m")) {
        scratch_remove(&scratch);
        skip();
    }
    path_join(data, scratch.path, "a/b/db"); /* parents are made */
    struct mu_store *store;
    struct mu_error err;
    assert_ok(open_at(data, 32 * MIB, 0, &store, NULL, &err), &err);
    assert_ok(put_number(store, 0, &err), &err);
    assert_ok(mu_store_check(store, &err), &err);
    write_filler(scratch.path, available_bytes(scratch.path) - 31 * MIB);
    assert_fails(put_number(store, 1, &err), MU_ERR_NO_SPACE, &err, "below the reserve of 32.0 MiB");
    assert_fails(mu_store_check(store, &err), MU_ERR_NO_SPACE, &err, data);
    assert_true(has_number(store, 0));
    assert_false(has_number(store, 1));
    remove_filler(scratch.path);
    assert_ok(mu_store_check(store, &err), &err);
    assert_ok(put_number(store, 1, &err), &err); /* the same store, no restart */
    assert_true(has_number(store, 1));
    mu_store_free(store);
    unmount(scratch.path);
    scratch_remove(&scratch);
}

static void test_ballast_is_given_up_to_open_and_made_again(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    char data[512], ballast[512];
    if (!mount_tmpfs(scratch.path, "size=96m")) {
        scratch_remove(&scratch);
        skip();
    }
    path_join(data, scratch.path, "db");
    path_join(ballast, data, "ballast");
    struct mu_store *store;
    struct mu_error err, notice;
    struct stat st;
    assert_ok(open_at(data, 8 * MIB, 16 * MIB, &store, &notice, &err), &err);
    assert_int_equal(notice.status, MU_OK);
    assert_int_equal(stat(ballast, &st), 0);
    assert_int_equal(st.st_size, 16 * MIB);
    assert_true(st.st_blocks * 512 >= 16 * MIB); /* real space, not a hole */
    assert_ok(put_number(store, 0, &err), &err);
    mu_store_free(store);

    write_filler(scratch.path, available_bytes(scratch.path) - 64 * 1024);
    assert_ok(open_at(data, 32 * MIB, 16 * MIB, &store, &notice, &err), &err);
    assert_int_equal(notice.status, MU_ERR_NO_SPACE);
    assert_non_null(strstr(notice.text, "ballast"));
    assert_int_equal(stat(ballast, &st), -1);
    assert_true(has_number(store, 0)); /* it can be read and asked, only not written */
    assert_fails(put_number(store, 1, &err), MU_ERR_NO_SPACE, &err, "reserve");
    mu_store_free(store);

    remove_filler(scratch.path);
    assert_ok(open_at(data, 8 * MIB, 16 * MIB, &store, &notice, &err), &err);
    assert_int_equal(notice.status, MU_OK);
    assert_int_equal(stat(ballast, &st), 0);
    mu_store_free(store);
    unmount(scratch.path);
    scratch_remove(&scratch);
}

static void test_damaged_database_is_refused_in_one_line(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_store *store;
    struct mu_error err;
    char current[512];
    path_join(current, scratch.path, "CURRENT");
    assert_ok(open_at(scratch.path, 0, 0, &store, NULL, &err), &err);
    assert_ok(put_number(store, 0, &err), &err);
    mu_store_free(store);
    file_write(current, "garbage", 7);
    assert_fails(open_at(scratch.path, 0, 0, &store, NULL, &err), MU_ERR_CORRUPT, &err, scratch.path);
    /* A missing CURRENT must not become a new, empty database. */
    assert_int_equal(unlink(current), 0);
    assert_fails(open_at(scratch.path, 0, 0, &store, NULL, &err), MU_ERR_CORRUPT, &err, "CURRENT is missing");
    scratch_remove(&scratch);
}

static void test_impossible_paths_are_refused(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_store *store;
    struct mu_error err;
    char file[512], below[512];
    path_join(file, scratch.path, "file");
    path_join(below, file, "db");
    file_write(file, "x", 1);
    assert_fails(open_at(below, 0, 0, &store, NULL, &err), MU_ERR_IO, &err, "data directory: cannot create directory");
    assert_fails(open_at(file, 0, 0, &store, NULL, &err), MU_ERR_INVALID, &err, "is not a directory");
    assert_fails(open_at("", 0, 0, &store, NULL, &err), MU_ERR_INVALID, &err, "0 bytes");
    if (mount_tmpfs(scratch.path, "size=1m")) {
        make_read_only(scratch.path);
        path_join(below, scratch.path, "db");
        assert_fails(open_at(below, 0, 0, &store, NULL, &err), MU_ERR_DENIED, &err, "Read-only file system");
        unmount(scratch.path);
    }
    scratch_remove(&scratch);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "child-write") == 0)
        return child_write(argv[2]);
    if (argc == 3 && strcmp(argv[1], "child-hold") == 0)
        return child_hold(argv[2]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_directory_in_use_is_told_in_one_line),
        cmocka_unit_test(test_kill_loses_nothing_acknowledged),
        cmocka_unit_test(test_torn_tail_of_the_log_is_tolerated),
        cmocka_unit_test(test_full_disk_without_reserve_loses_nothing_acknowledged),
        cmocka_unit_test(test_below_the_reserve_writes_are_refused_until_there_is_space),
        cmocka_unit_test(test_ballast_is_given_up_to_open_and_made_again),
        cmocka_unit_test(test_damaged_database_is_refused_in_one_line),
        cmocka_unit_test(test_impossible_paths_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
