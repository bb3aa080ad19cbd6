/* links: mu_storage mu_plan */
#include "pieces_testing.h"

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>

/* This program's own fsync and renameat stand before the C library's: they fail on demand. */
static int fsync_fails_at, rename_fails;
static int fsync_calls;

int fsync(int fd)
{
    fsync_calls++;
    if (fsync_fails_at == fsync_calls) {
        errno = EIO;
        return -1;
    }
    return (int)syscall(SYS_fsync, fd);
}

/* How pwrite behaves on descriptors with O_DIRECT, and how many bytes went over them from `watched`. */
static enum { DIRECT_WORKS, DIRECT_REFUSED, DIRECT_SHORT, DIRECT_FAILS } direct_quirk;
static const uint8_t *watched;
static size_t watched_size, direct_bytes, unstaged_bytes;

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset)
{
    if (fcntl(fd, F_GETFL) & O_DIRECT) {
        if (direct_quirk == DIRECT_REFUSED || direct_quirk == DIRECT_FAILS) {
            errno = direct_quirk == DIRECT_FAILS ? EIO : EINVAL;
            return -1;
        }
        if ((uintptr_t)data % 512 || size % 512 || offset % 512) {
            errno = EINVAL;
            return -1;
        }
        direct_bytes += size;
        if ((const uint8_t *)data >= watched && (const uint8_t *)data < watched + watched_size)
            unstaged_bytes += size;
    }
    if (direct_quirk == DIRECT_SHORT && size > 5000)
        size = 5000 - (size_t)(offset / 4096 % 7);
    return (ssize_t)syscall(SYS_pwrite64, fd, data, size, offset);
}

int renameat(int old_dir, const char *old_name, int new_dir, const char *new_name)
{
    if (rename_fails) {
        errno = EIO;
        return -1;
    }
    return (int)syscall(SYS_renameat2, old_dir, old_name, new_dir, new_name, 0);
}

/* Larger than several blocks, with odd sizes, so that the staged and the direct path of the writer meet. */
static void test_entries_across_blocks_read_back(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_error err;
    struct mu_piece_result result;
    char path[512];
    static const size_t sizes[] = {1, 5u << 20, 1000003, 3, (2u << 20) - 1, 2u << 20};
    enum { COUNT = sizeof sizes / sizeof sizes[0] };
    struct mu_piece_entry entries[COUNT];
    uint64_t random = 9;
    for (size_t i = 0; i < COUNT; i++) {
        uint32_t *data = malloc(sizes[i] * sizeof *data);
        for (size_t j = 0; j < sizes[i]; j++)
            data[j] = (uint32_t)mu_splitmix64(&random);
        entries[i] = (struct mu_piece_entry){.kind = MU_PIECE_META,
                                             .cell_name = "state",
                                             .first_chunk = (uint32_t)i,
                                             .chunk_count = 1,
                                             .size = sizes[i],
                                             .data = (const float *)data};
    }
    assert_ok(mu_piece_write(scratch.path, "p", &identity, entries, COUNT, NULL, &result, &err), &err);
    path_join(path, scratch.path, "p");
    struct mu_piece_expected expected = {.size_bytes = result.size_bytes, .xxh3 = result.xxh3};
    assert_ok(mu_piece_read(path, &(struct mu_piece_read_options){.expected = &expected}, NULL, &err), &err);
    size_t size_bytes;
    uint8_t *bytes = file_read(path, &size_bytes);
    size_t at = size_bytes;
    for (size_t i = COUNT; i-- > 0;) {
        at -= sizes[i] * sizeof(float);
        assert_memory_equal(bytes + at, entries[i].data, sizes[i] * sizeof(float));
        free((void *)entries[i].data);
    }
    assert_int_equal(at % MU_PIECE_DATA_ALIGN_BYTES, 0);
    free(bytes);
    scratch_remove(&scratch);
}

/* Entries that lie side by side from a page on, as a snapshot has them: their whole pages go to the disk from where
 * they are; where the file system refuses, or takes only a part, the file comes out the same. */
static void test_packed_entries_are_written_directly_or_else_all_the_same(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_error err;
    struct mu_piece_result first, again;
    static const size_t sizes[] = {3, 5u << 20, 1000003, (2u << 20) - 1, 77};
    enum { COUNT = sizeof sizes / sizeof sizes[0] };
    struct mu_piece_entry entries[COUNT];
    size_t total = 0;
    for (size_t i = 0; i < COUNT; i++)
        total += sizes[i];
    uint32_t *data;
    assert_int_equal(posix_memalign((void **)&data, 4096, total * sizeof *data), 0);
    uint64_t random = 19;
    for (size_t i = 0; i < total; i++)
        data[i] = (uint32_t)mu_splitmix64(&random);
    for (size_t i = 0, at = 0; i < COUNT; at += sizes[i++])
        entries[i] = (struct mu_piece_entry){.kind = MU_PIECE_META,
                                             .cell_name = "state",
                                             .first_chunk = (uint32_t)i,
                                             .chunk_count = 1,
                                             .size = sizes[i],
                                             .data = (const float *)data + at};
    watched = (const uint8_t *)data;
    watched_size = total * sizeof *data;
    direct_bytes = unstaged_bytes = 0;
    assert_ok(mu_piece_write(scratch.path, "p", &identity, entries, COUNT, NULL, &first, &err), &err);
    if (direct_bytes == 0)
        print_message("no direct output on this file system\n");
    else
        assert_true(unstaged_bytes > watched_size - 4096 && unstaged_bytes <= watched_size);
    for (direct_quirk = DIRECT_REFUSED; direct_quirk <= DIRECT_SHORT; direct_quirk++) {
        assert_ok(mu_piece_write(scratch.path, "p", &identity, entries, COUNT, NULL, &again, &err), &err);
        assert_true(again.xxh3.low == first.xxh3.low && again.xxh3.high == first.xxh3.high);
        char path[512];
        path_join(path, scratch.path, "p");
        struct mu_piece_expected expected = {.size_bytes = again.size_bytes, .xxh3 = again.xxh3};
        assert_ok(mu_piece_read(path, &(struct mu_piece_read_options){.expected = &expected}, NULL, &err), &err);
    }
    direct_quirk = DIRECT_FAILS;
    if (direct_bytes > 0)
        assert_fails(mu_piece_write(scratch.path, "q", &identity, entries, COUNT, NULL, &again, &err), MU_ERR_IO, &err,
                     "cannot write at byte");
    direct_quirk = DIRECT_WORKS;
    watched = NULL;
    assert_int_equal(count_files(scratch.path), 1);
    free(data);
    scratch_remove(&scratch);
}

static void test_large_piece_on_a_file_system_without_direct_output(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_error err;
    struct mu_piece_result result;
    if (!mount_tmpfs(scratch.path, "size=64m")) {
        scratch_remove(&scratch);
        skip();
    }
    size_t size = 5u << 20;
    float *data = calloc(size, sizeof *data);
    for (size_t i = 0; i < size; i++)
        data[i] = (float)i;
    struct mu_piece_entry entry = {
        .kind = MU_PIECE_META, .cell_name = "E.0", .first_chunk = 0, .chunk_count = 1, .size = size, .data = data};
    assert_ok(mu_piece_write(scratch.path, "p", &identity, &entry, 1, NULL, &result, &err), &err);
    char path[512];
    path_join(path, scratch.path, "p");
    struct mu_piece_expected expected = {.size_bytes = result.size_bytes, .xxh3 = result.xxh3};
    assert_ok(mu_piece_read(path, &(struct mu_piece_read_options){.expected = &expected}, NULL, &err), &err);
    free(data);
    unmount(scratch.path);
    scratch_remove(&scratch);
}

static void test_bad_arguments_are_refused_before_anything_is_written(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_error err;
    struct mu_piece_result result;
    float data[4] = {1};
    struct mu_piece_entry good = {.kind = MU_PIECE_META,
                                  .cell_name = "E.0",
                                  .first_chunk = 0,
                                  .chunk_count = 1,
                                  .size = 4,
                                  .data = data},
                          bad;
    static const char *const names[] = {"", ".", "..", "../p", "a/b", ".hidden", "a b", "\xff"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        assert_fails(mu_piece_write(scratch.path, names[i], &identity, &good, 1, NULL, &result, &err), MU_ERR_INVALID,
                     &err, "piece name");
    struct mu_checkpoint_identity no_job = {.job = ""};
    assert_fails(mu_piece_write(scratch.path, "p", &no_job, &good, 1, NULL, &result, &err), MU_ERR_INVALID, &err,
                 "job name");
    assert_fails(mu_piece_write(scratch.path, "p", &identity, &good, 0, NULL, &result, &err), MU_ERR_LIMIT, &err,
                 "0 entries");
    bad = good, bad.data = NULL;
    assert_fails(mu_piece_write(scratch.path, "p", &identity, &bad, 1, NULL, &result, &err), MU_ERR_INVALID, &err,
                 "entry 0");
    bad = good, strcpy(bad.cell_name, "a/b");
    assert_fails(mu_piece_write(scratch.path, "p", &identity, &bad, 1, NULL, &result, &err), MU_ERR_INVALID, &err,
                 "entry 0");
    bad = good, bad.chunk_count = 0;
    assert_fails(mu_piece_write(scratch.path, "p", &identity, &bad, 1, NULL, &result, &err), MU_ERR_INVALID, &err,
                 "entry 0");
    struct mu_piece_entry twice[] = {good, good};
    assert_fails(mu_piece_write(scratch.path, "p", &identity, twice, 2, NULL, &result, &err), MU_ERR_INVALID, &err,
                 "two tensors");
    assert_int_equal(count_files(scratch.path), 0);
    scratch_remove(&scratch);
}

static void test_failed_sync_or_rename_leaves_no_file(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct model model;
    struct mu_error err;
    struct mu_piece_result result;
    size_t count;
    model_init(&model);
    struct mu_piece_entry *entries = entries_of(&model, 0, model.spec.chunk_count, &count);
    for (int at = 1; at <= 2; at++) { /* of the file, of the directory */
        fsync_calls = 0;
        fsync_fails_at = at;
        assert_fails(mu_piece_write(scratch.path, "p", &identity, entries, count, NULL, &result, &err), MU_ERR_IO, &err,
                     "fsync failed");
        assert_int_equal(fsync_calls, at); /* never tried again on the same file */
        assert_int_equal(count_files(scratch.path), 0);
    }
    fsync_fails_at = 0;
    rename_fails = 1;
    assert_fails(mu_piece_write(scratch.path, "p", &identity, entries, count, NULL, &result, &err), MU_ERR_IO, &err,
                 "cannot rename");
    assert_int_equal(count_files(scratch.path), 0);
    rename_fails = 0;
    assert_ok(mu_piece_write(scratch.path, "p", &identity, entries, count, NULL, &result, &err),
              &err); /* again, from memory */
    assert_int_equal(count_files(scratch.path), 1);
    free(entries);
    model_fini(&model);
    scratch_remove(&scratch);
}

static void test_full_disk_is_told_early_and_leaves_no_file(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct model model;
    struct mu_error err;
    struct mu_piece_result result;
    size_t count;
    if (!mount_tmpfs(scratch.path, "size=1m")) {
        scratch_remove(&scratch);
        skip();
    }
    model_init(&model);
    struct mu_piece_entry *entries = entries_of(&model, 0, model.spec.chunk_count, &count);
    assert_fails(mu_piece_write(scratch.path, "p", &identity, entries, count, NULL, &result, &err), MU_ERR_NO_SPACE,
                 &err, "cannot allocate");
    assert_non_null(strstr(err.text, "No space left on device"));
    assert_int_equal(count_files(scratch.path), 0);
    make_read_only(scratch.path);
    assert_fails(mu_piece_write(scratch.path, "p", &identity, entries, count, NULL, &result, &err), MU_ERR_DENIED, &err,
                 "Read-only file system");
    unmount(scratch.path);
    free(entries);
    model_fini(&model);
    scratch_remove(&scratch);
}

static void test_impossible_directories_are_told(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_error err;
    struct mu_piece_result result;
    float data[4] = {1};
    char path[512];
    struct mu_piece_entry entry = {
        .kind = MU_PIECE_META, .cell_name = "E.0", .first_chunk = 0, .chunk_count = 1, .size = 4, .data = data};
    path_join(path, scratch.path, "file");
    file_write(path, "x", 1);
    assert_fails(mu_piece_write(path, "p", &identity, &entry, 1, NULL, &result, &err), MU_ERR_IO, &err,
                 "Not a directory");
    path_join(path, scratch.path, "absent");
    assert_fails(mu_piece_write(path, "p", &identity, &entry, 1, NULL, &result, &err), MU_ERR_NOT_FOUND, &err, path);
    scratch_remove(&scratch);
}

#ifdef MU_FAULTS
/* Killed at each named point: under the piece's name there is either nothing or a whole file, and a later write
 * succeeds. */
static void test_kill_at_every_fault_point_publishes_nothing_partial(void **state)
{
    (void)state;
    static const char *const points[] = {"worker.piece.open", "worker.piece.write", "worker.piece.fsync",
                                         "worker.piece.rename", "worker.piece.dirsync"};
    struct model model;
    size_t count;
    model_init(&model);
    struct mu_piece_entry *entries = entries_of(&model, 0, model.spec.chunk_count, &count);
    for (size_t i = 0; i < sizeof points / sizeof points[0]; i++) {
        struct scratch scratch = scratch_make();
        struct mu_piece_result result;
        struct mu_error err;
        char path[512];
        int how;
        pid_t pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) {
            setenv("MU_FAULT_AT", points[i], 1);
            _exit(mu_piece_write(scratch.path, "p", &identity, entries, count, NULL, &result, NULL) != MU_OK);
        }
        assert_int_equal(waitpid(pid, &how, 0), pid);
        assert_true(WIFSIGNALED(how) && WTERMSIG(how) == SIGKILL); /* the point was reached */
        path_join(path, scratch.path, "p");
        bool is_there = access(path, F_OK) == 0;
        assert_int_equal(is_there, i == 4);
        if (is_there)
            assert_ok(mu_piece_read(path, &(struct mu_piece_read_options){.expected = NULL}, NULL, &err), &err);
        assert_ok(mu_piece_write(scratch.path, "p", &identity, entries, count, NULL, &result, &err), &err);
        assert_ok(mu_piece_read(path, &(struct mu_piece_read_options){.expected = NULL}, NULL, &err), &err);
        scratch_remove(&scratch);
    }
    free(entries);
    model_fini(&model);
}
#endif

static void *set_flag(void *arg)
{
    atomic_store((atomic_bool *)arg, true);
    return NULL;
}

static void test_abort_ends_a_throttled_write_and_leaves_no_file(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_error err;
    struct mu_piece_result result;
    atomic_bool abort_flag = false;
    size_t size = 3 * MU_PIECE_BLOCK_BYTES / sizeof(float);
    float *data = calloc(size, sizeof *data);
    struct mu_piece_entry entry = {
        .kind = MU_PIECE_META, .cell_name = "E.0", .first_chunk = 0, .chunk_count = 1, .size = size, .data = data};
    /* At a byte a second the second block would wait for three months. */
    struct mu_piece_write_options options = {.abort = &abort_flag, .throttle_bytes_per_s = 1};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, set_flag, &abort_flag), 0);
    assert_fails(mu_piece_write(scratch.path, "p", &identity, &entry, 1, &options, &result, &err), MU_ERR_CANCELLED,
                 &err, "aborted on request");
    pthread_join(thread, NULL);
    assert_int_equal(count_files(scratch.path), 0);
    atomic_store(&abort_flag, false);
    options.throttle_bytes_per_s = 1ull << 28; /* 24 MiB: at least 62 ms for the first two blocks */
    assert_ok(mu_piece_write(scratch.path, "p", &identity, &entry, 1, &options, &result, &err), &err);
    assert_true(result.write_us >= 62000);
    char path[512];
    path_join(path, scratch.path, "p");
    atomic_store(&abort_flag, true);
    assert_fails(mu_piece_read(path, &(struct mu_piece_read_options){.abort = &abort_flag}, NULL, &err),
                 MU_ERR_CANCELLED, &err, path);
    free(data);
    scratch_remove(&scratch);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_entries_across_blocks_read_back),
        cmocka_unit_test(test_packed_entries_are_written_directly_or_else_all_the_same),
        cmocka_unit_test(test_large_piece_on_a_file_system_without_direct_output),
        cmocka_unit_test(test_bad_arguments_are_refused_before_anything_is_written),
        cmocka_unit_test(test_failed_sync_or_rename_leaves_no_file),
        cmocka_unit_test(test_full_disk_is_told_early_and_leaves_no_file),
        cmocka_unit_test(test_impossible_directories_are_told),
#ifdef MU_FAULTS
        cmocka_unit_test(test_kill_at_every_fault_point_publishes_nothing_partial),
#endif
        cmocka_unit_test(test_abort_ends_a_throttled_write_and_leaves_no_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
