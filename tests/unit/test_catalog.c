/* links: mu_storage mu_plan */
#include "storage_testing.h"

#include "storage/catalog.h"

static const struct mu_id nonce = {.high = 0x0123456789abcdef, .low = 0xfedcba9876543210};

static bool exists(const char *dir, const char *name)
{
    char path[512];
    struct stat st;
    path_join(path, dir, name);
    return lstat(path, &st) == 0;
}

static void create(const char *root, const char *job, uint64_t seq, char path[MU_PATH_SIZE])
{
    struct mu_error err;
    assert_ok(mu_catalog_create(root, job, seq, seq * 100, nonce, path, &err), &err);
}

static void put_file(const char *dir, const char *name)
{
    char path[512];
    path_join(path, dir, name);
    file_write(path, "x", 1);
}

/* A committed checkpoint as far as the catalog cares: a whole manifest. */
static void commit(const char *path, const char *job, uint64_t seq, uint64_t step)
{
    struct mu_manifest *manifest = mu_manifest_new();
    struct mu_error err;
    manifest->identity = (struct mu_checkpoint_identity){.seq = seq, .step = step, .generation = 1};
    strcpy(manifest->identity.job, job);
    manifest->nonce = nonce;
    manifest->chunk_count = 1;
    assert_int_equal(mu_manifest_set_job_record(manifest, "{}"), MU_OK);
    assert_int_equal(mu_manifest_add_piece(manifest, "p", 1, (struct mu_hash128){0, 0}), MU_OK);
    struct mu_manifest_entry entry = {.kind = MU_PIECE_PARAMETERS, .cell_name = "E.0", .chunk_count = 1};
    assert_int_equal(mu_manifest_add_entry(manifest, &entry), MU_OK);
    assert_ok(mu_manifest_write(path, manifest, &err), &err);
    mu_manifest_free(manifest);
}

static void test_names_sort_and_read_back(void **state)
{
    (void)state;
    char name[MU_CATALOG_NAME_SIZE], next[MU_CATALOG_NAME_SIZE];
    uint64_t seq, step;
    struct mu_id read;
    mu_catalog_name(12, 1200, nonce, name);
    assert_string_equal(name, "0000000012-0000001200-0123456789abcdeffedcba9876543210");
    assert_true(mu_catalog_parse_name(name, &seq, &step, &read));
    assert_true(seq == 12 && step == 1200 && mu_id_equal(read, nonce));
    mu_catalog_name(100, 5, nonce, next);
    assert_true(strcmp(name, next) < 0);
    mu_catalog_name(UINT64_MAX, UINT64_MAX, nonce, name);
    assert_true(mu_catalog_parse_name(name, &seq, &step, &read) && seq == UINT64_MAX && step == UINT64_MAX);
    mu_catalog_name(0, 0, nonce, name);
    assert_true(mu_catalog_parse_name(name, &seq, &step, &read) && seq == 0);
}

static void test_other_names_are_not_ours(void **state)
{
    (void)state;
    static const char *const names[] = {
        "",
        ".",
        "..",
        "ckpt",
        "0000000012",
        "0000000012-0000001200",
        "0000000012-0000001200-0123456789abcdeffedcba987654321",   /* one digit short */
        "0000000012-0000001200-0123456789abcdeffedcba98765432100", /* one too many */
        "0000000012-0000001200-0123456789ABCDEFfedcba9876543210",
        "12-1200-0123456789abcdeffedcba9876543210",
        "00000000012-0000001200-0123456789abcdeffedcba9876543210", /* padded once too often */
        "0000000012-0000001200-0123456789abcdeffedcba9876543210.tmp",
        " 000000012-0000001200-0123456789abcdeffedcba9876543210",
        "+000000012-0000001200-0123456789abcdeffedcba9876543210",
        "99999999999999999999-0000001200-0123456789abcdeffedcba9876543210",
        "0000000012-0000001200-0123456789abcdeffedcba9876543210/..",
    };
    uint64_t seq, step;
    struct mu_id read;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (mu_catalog_parse_name(names[i], &seq, &step, &read))
            fail_msg("'%s' was taken for a checkpoint", names[i]);
}

static void test_create_makes_parents_and_may_be_repeated(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_error err;
    char root[512], path[MU_PATH_SIZE], again[MU_PATH_SIZE];
    path_join(root, scratch.path, "a/b/ckpt");
    create(root, "kjv", 3, path);
    assert_true(exists(path, MU_CATALOG_OWNER));
    assert_int_equal(count_files(path), 1);
    create(root, "kjv", 3, again);
    assert_string_equal(path, again);
    assert_fails(mu_catalog_create(root, "web", 3, 300, nonce, again, &err), MU_ERR_EXISTS, &err,
                 "not a checkpoint of job 'web'");
    assert_fails(mu_catalog_create(root, "../x", 3, 300, nonce, again, &err), MU_ERR_INVALID, &err, "job name");
    /* A crash after mkdir: the owner file is missing, and comes with the repetition. */
    char owner[512];
    path_join(owner, path, MU_CATALOG_OWNER);
    assert_int_equal(unlink(owner), 0);
    create(root, "kjv", 3, again);
    assert_true(exists(path, MU_CATALOG_OWNER));
    commit(path, "kjv", 3, 300);
    assert_fails(mu_catalog_create(root, "kjv", 3, 300, nonce, again, &err), MU_ERR_CONFLICT, &err, "committed");
    scratch_remove(&scratch);
}

static void test_create_where_it_cannot_be_is_told(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_error err;
    char root[512], path[MU_PATH_SIZE], long_root[MU_PATH_SIZE + 1];
    path_join(root, scratch.path, "file");
    file_write(root, "x", 1);
    assert_fails(mu_catalog_create(root, "kjv", 1, 1, nonce, path, &err), MU_ERR_INVALID, &err, "is not a directory");
    path_join(root, scratch.path, "file/below");
    assert_fails(mu_catalog_create(root, "kjv", 1, 1, nonce, path, &err), MU_ERR_IO, &err, "cannot create directory");
    memset(long_root, 'a', sizeof long_root - 1);
    long_root[sizeof long_root - 1] = 0;
    assert_fails(mu_catalog_create(long_root, "kjv", 1, 1, nonce, path, &err), MU_ERR_LIMIT, &err, "too long");
    if (mount_tmpfs(scratch.path, "size=1m")) {
        make_read_only(scratch.path);
        assert_fails(mu_catalog_create(scratch.path, "kjv", 1, 1, nonce, path, &err), MU_ERR_DENIED, &err, "Read-only");
        unmount(scratch.path);
    }
    scratch_remove(&scratch);
}

static void test_delete_removes_ours_and_only_ours(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_error err;
    char path[MU_PATH_SIZE], name[MU_CATALOG_NAME_SIZE], other[512];
    const char *root = scratch.path;
    create(root, "kjv", 1, path);
    put_file(path, "piece-0");
    commit(path, "kjv", 1, 100);
    mu_catalog_name(1, 100, nonce, name);
    assert_ok(mu_catalog_delete(root, name, &err), &err);
    assert_false(exists(root, name));
    path_join(other, root, MU_CATALOG_TRASH);
    assert_int_equal(count_files(other), 0);
    assert_fails(mu_catalog_delete(root, name, &err), MU_ERR_NOT_FOUND, &err, name);

    put_file(root, "notes");
    assert_fails(mu_catalog_delete(root, "notes", &err), MU_ERR_INVALID, &err,
                 "does not have the name of a checkpoint");
    assert_fails(mu_catalog_delete(root, "../x", &err), MU_ERR_INVALID, &err, "does not have the name");
    /* Our name on things that are not ours. */
    put_file(root, name);
    assert_fails(mu_catalog_delete(root, name, &err), MU_ERR_INVALID, &err, "not a directory");
    path_join(other, root, name);
    assert_int_equal(unlink(other), 0);
    assert_int_equal(symlink("/etc", other), 0);
    assert_fails(mu_catalog_delete(root, name, &err), MU_ERR_INVALID, &err, "not a directory");
    assert_int_equal(unlink(other), 0);
    assert_int_equal(mkdir(other, 0755), 0);
    put_file(other, "thesis");
    assert_fails(mu_catalog_delete(root, name, &err), MU_ERR_DENIED, &err, "no 'owner' file");
    assert_true(exists(other, "thesis"));
    scratch_remove(&scratch);
}

static void test_interrupted_delete_is_finished_later(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_error err;
    char path[MU_PATH_SIZE], name[MU_CATALOG_NAME_SIZE], trash[512], trashed[512];
    const char *root = scratch.path;
    size_t removed = 9;
    assert_ok(mu_catalog_empty_trash("/nonexistent/muster", &removed, &err), &err);
    assert_int_equal(removed, 0);
    create(root, "kjv", 1, path);
    put_file(path, "piece-0");
    mu_catalog_name(1, 100, nonce, name);
    path_join(trash, root, MU_CATALOG_TRASH);
    path_join(trashed, trash, name);
    assert_int_equal(mkdir(trash, 0755), 0);
    assert_int_equal(rename(path, trashed), 0); /* killed right after the rename */
    put_file(trash, "not ours");
    /* The same name again, and deleted again: the old one in the trash is no obstacle. */
    create(root, "kjv", 1, path);
    put_file(path, "piece-1");
    assert_ok(mu_catalog_delete(root, name, &err), &err);
    assert_false(exists(trash, name));

    create(root, "kjv", 1, path);
    put_file(path, "piece-2");
    assert_int_equal(rename(path, trashed), 0);
    assert_ok(mu_catalog_empty_trash(root, &removed, &err), &err);
    assert_int_equal(removed, 1);
    assert_int_equal(count_files(trash), 1);
    assert_true(exists(trash, "not ours"));
    scratch_remove(&scratch);
}

static bool known_above(void *arg, uint64_t seq, uint64_t step, struct mu_id id)
{
    assert_int_equal(step, seq * 100);
    assert_true(mu_id_equal(id, nonce));
    return seq > *(uint64_t *)arg;
}

static void test_sweep_takes_only_unknown_directories_of_the_job(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_error err;
    char path[MU_PATH_SIZE], name[MU_CATALOG_NAME_SIZE], other[512];
    const char *root = scratch.path;
    uint64_t limit = 3;
    size_t removed = 9;
    assert_ok(mu_catalog_sweep("/nonexistent/muster", "kjv", known_above, &limit, &removed, &err), &err);
    assert_int_equal(removed, 0);
    for (uint64_t seq = 1; seq <= 5; seq++) {
        create(root, "kjv", seq, path);
        put_file(path, ".piece-0.0123.tmp");
    }
    struct mu_id other_nonce = {1, 2};
    assert_ok(mu_catalog_create(root, "web", 1, 100, other_nonce, path, &err),
              &err); /* another job in the same place */
    mu_catalog_name(2, 200, other_nonce, name);
    path_join(other, root, name);
    assert_int_equal(mkdir(other, 0755), 0); /* our name, but nobody's */
    put_file(other, "thesis");
    put_file(root, "notes");
    assert_ok(mu_catalog_sweep(root, "kjv", known_above, &limit, &removed, &err), &err);
    assert_int_equal(removed, 3);
    for (uint64_t seq = 1; seq <= 5; seq++) {
        mu_catalog_name(seq, seq * 100, nonce, name);
        assert_int_equal(exists(root, name), seq > 3);
    }
    assert_true(exists(path, MU_CATALOG_OWNER));
    assert_true(exists(other, "thesis"));
    assert_true(exists(root, "notes"));
    scratch_remove(&scratch);
}

static void test_sweep_goes_on_after_one_it_cannot_remove(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_error err;
    char path[MU_PATH_SIZE], inner[512];
    uint64_t limit = 9;
    size_t removed;
    create(scratch.path, "kjv", 1, path);
    path_join(inner, path, "somebody's directory");
    assert_int_equal(mkdir(inner, 0755), 0);
    put_file(inner, "thesis");
    create(scratch.path, "kjv", 2, path);
    assert_int_equal(mu_catalog_sweep(scratch.path, "kjv", known_above, &limit, &removed, &err), MU_ERR_IO);
    assert_non_null(strstr(err.text, "somebody's directory"));
    assert_int_equal(removed, 1);
    assert_false(exists(path, MU_CATALOG_OWNER));
    scratch_remove(&scratch);
}

struct listing {
    uint64_t seqs[8];
    bool is_problem[8];
    size_t count, stop_after;
    char text[MU_ERROR_TEXT_SIZE];
};

static bool list(void *arg, const char *path, const struct mu_manifest *manifest, const struct mu_error *problem)
{
    struct listing *listing = arg;
    assert_non_null(path);
    assert_true(!manifest == !!problem);
    listing->seqs[listing->count] = manifest ? manifest->identity.seq : 0;
    listing->is_problem[listing->count++] = problem != NULL;
    if (problem)
        strcpy(listing->text, problem->text);
    return listing->count != listing->stop_after;
}

static void test_enumerate_rebuilds_the_list_in_order(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_error err;
    char path[MU_PATH_SIZE];
    const char *root = scratch.path;
    struct listing listing = {.count = 0};
    assert_ok(mu_catalog_enumerate("/nonexistent/muster", "kjv", list, &listing, &err), &err);
    assert_int_equal(listing.count, 0);
    static const uint64_t seqs[] = {10, 2, 9, 1};
    for (size_t i = 0; i < 4; i++) {
        create(root, "kjv", seqs[i], path);
        if (seqs[i] != 9)                                                         /* aborted before its manifest */
            commit(path, "kjv", seqs[i], seqs[i] * 100 + (seqs[i] == 2 ? 7 : 0)); /* one taken later than ordered */
    }
    assert_ok(mu_catalog_create(root, "web", 3, 300, (struct mu_id){1, 2}, path, &err), &err);
    commit(path, "web", 3, 300);
    assert_ok(mu_catalog_enumerate(root, "kjv", list, &listing, &err), &err);
    assert_int_equal(listing.count, 3);
    assert_true(listing.seqs[0] == 1 && listing.seqs[1] == 2 && listing.seqs[2] == 10);
    listing = (struct listing){.stop_after = 2};
    assert_ok(mu_catalog_enumerate(root, "kjv", list, &listing, &err), &err);
    assert_int_equal(listing.count, 2);
    scratch_remove(&scratch);
}

static void test_enumerate_reports_manifests_it_cannot_trust(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_error err;
    char path[MU_PATH_SIZE], manifest[MU_PATH_SIZE + 32];
    struct listing listing = {.count = 0};
    create(scratch.path, "kjv", 1, path);
    snprintf(manifest, sizeof manifest, "%s/%s", path, MU_MANIFEST_FILE);
    commit(path, "kjv", 1, 100);
    assert_int_equal(truncate(manifest, 100), 0);
    create(scratch.path, "kjv", 2, path);
    commit(path, "kjv", 3, 200); /* copied from elsewhere */
    assert_ok(mu_catalog_enumerate(scratch.path, "kjv", list, &listing, &err), &err);
    assert_int_equal(listing.count, 2);
    assert_true(listing.is_problem[0] && listing.is_problem[1]);
    assert_non_null(strstr(listing.text, "belongs to another directory"));
    scratch_remove(&scratch);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names_sort_and_read_back),
        cmocka_unit_test(test_other_names_are_not_ours),
        cmocka_unit_test(test_create_makes_parents_and_may_be_repeated),
        cmocka_unit_test(test_create_where_it_cannot_be_is_told),
        cmocka_unit_test(test_delete_removes_ours_and_only_ours),
        cmocka_unit_test(test_interrupted_delete_is_finished_later),
        cmocka_unit_test(test_sweep_takes_only_unknown_directories_of_the_job),
        cmocka_unit_test(test_sweep_goes_on_after_one_it_cannot_remove),
        cmocka_unit_test(test_enumerate_rebuilds_the_list_in_order),
        cmocka_unit_test(test_enumerate_reports_manifests_it_cannot_trust),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
