/* links: mu_coordinator */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <ftw.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/log.h"
#include "coordinator/checkpoint_io.h"
#include "storage/catalog.h"
#include "storage/manifest.h"

enum { PIECES = 3, PIECES_MAX = 16, WAIT_US = 120000000 };

struct fixture {
    char root[64];
    struct mu_rpc_server *server;
    struct mu_checkpoint_io *io;
    struct mu_job_record job;
    struct mu_model_spec model;
    struct mu_checkpoint_record checkpoint;
    struct mu_piece_record pieces[PIECES_MAX];
    float *state;
};

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

/* tp slices of two, pp stages of one layer each, the rest replicas. */
static struct mu_layout layout_of(uint32_t tp, uint32_t pp, uint32_t dp)
{
    struct mu_layout layout;
    memset(&layout, 0, sizeof layout);
    layout.tp = tp;
    layout.pp = pp;
    layout.dp = dp;
    for (uint32_t stage = 1; stage <= pp; stage++)
        layout.stage_first[stage] = (uint16_t)(stage * 2 / pp);
    return layout;
}

static void set_up_for(struct fixture *f, struct mu_layout layout)
{
    static const struct mu_rpc_method none[] = {{"/t/None", MU_RPC_UNARY, 1, MU_RPC_QUESTION}};
    struct mu_rpc_server_config config = mu_rpc_server_config_default();
    char name[MU_CATALOG_NAME_SIZE];
    memset(f, 0, sizeof *f);
    strcpy(f->root, "/tmp/muster-test-XXXXXX");
    assert_non_null(mkdtemp(f->root));
    config.listen = "127.0.0.1:0";
    config.methods = none;
    config.method_count = 1;
    assert_int_equal(mu_rpc_server_new(&config, NULL, &f->server), MU_OK);
    assert_int_equal(mu_checkpoint_io_new(f->server, 16, &f->io, NULL), MU_OK);

    mu_job_spec_init(&f->job.spec);
    strcpy(f->job.spec.name, "job");
    f->job.spec.model = (struct mu_model_config){
        .family = MU_FAMILY_GPT2, .layers = 2, .heads = 2, .channels = 64, .context = 32, .vocab = 300};
    f->job.spec.model.slices = layout.tp;
    mu_model_config_resolve(&f->job.spec.model);
    strcpy(f->job.spec.data.path, "/data/text");
    f->job.spec.batch.sequences = 8, f->job.spec.batch.micro = 1, f->job.spec.batch.length = 32;
    f->job.spec.steps = 100;
    snprintf(f->job.spec.checkpoint.path, sizeof f->job.spec.checkpoint.path, "%s", f->root);
    f->job.numeric_identity = (struct mu_hash128){1, 2};
    mu_model_spec_init(&f->model, &f->job.spec.model);
    f->state = calloc(f->model.flat_size, sizeof *f->state);

    f->checkpoint = (struct mu_checkpoint_record){.job = "job",
                                                  .number = 4,
                                                  .nonce = {7, 8},
                                                  .step = 42,
                                                  .generation = 3,
                                                  .state = MU_CKPT_INTENT,
                                                  .layout = layout,
                                                  .piece_count = mu_layout_working(&layout),
                                                  .pieces = f->pieces};
    mu_catalog_name(4, 40, f->checkpoint.nonce, name);
    snprintf(f->checkpoint.dir, sizeof f->checkpoint.dir, "%s/%s", f->root, name);
    assert_int_equal(mkdir(f->checkpoint.dir, 0755), 0); /* as a worker does, without an owner file */
}

static void set_up(struct fixture *f)
{
    set_up_for(f, layout_of(1, 1, PIECES));
}

static void tear_down(struct fixture *f)
{
    mu_checkpoint_io_free(f->io);
    mu_rpc_server_free(f->server);
    free(f->state);
    nftw(f->root, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static void write_piece_in(struct fixture *f, uint32_t number, uint64_t step, uint64_t generation)
{
    struct mu_checkpoint_identity identity = {.job = "job", .seq = 4, .step = step, .generation = generation};
    struct mu_piece_entry entries[64];
    struct mu_piece_result result;
    struct mu_error err;
    struct mu_chunk_run runs[MU_RUNS_MAX];
    struct mu_piece_record *piece = &f->pieces[number];
    uint32_t run_count = mu_layout_runs(&f->model, &f->checkpoint.layout, number, MU_SHARE_PRIMARY, runs);
    size_t entry_count = mu_piece_entries_of_runs(&f->model, runs, run_count, entries, 64);
    assert_true(entry_count <= 64);
    piece->done = true;
    if (entry_count == 0)
        return; /* a rank without chunks has no file */
    for (size_t i = 0; i < entry_count; i++)
        entries[i].data = f->state + entries[i].offset;
    snprintf(piece->file, sizeof piece->file, "piece-%u.safetensors", number);
    if (mu_piece_write(f->checkpoint.dir, piece->file, &identity, entries, entry_count, NULL, &result, &err) != MU_OK)
        fail_msg("%s", err.text);
    piece->size_bytes = result.size_bytes;
    piece->checksum = result.xxh3;
}

static void write_piece(struct fixture *f, uint32_t number, uint64_t step)
{
    write_piece_in(f, number, step, 3);
}

static void write_all(struct fixture *f)
{
    for (uint32_t i = 0; i < f->checkpoint.piece_count; i++)
        write_piece(f, i, 42);
}

/* The posted result; the caller frees it. */
static struct mu_checkpoint_done *await_done(struct fixture *f)
{
    struct mu_rpc_event event;
    do
        assert_true(mu_rpc_server_next(f->server, mu_clock_mono_us() + WAIT_US, &event));
    while (event.type != MU_RPC_EVENT_ITEM);
    return (struct mu_checkpoint_done *)event.item;
}

static enum mu_status run(struct fixture *f, struct mu_checkpoint_task *task, char text[MU_ERROR_TEXT_SIZE],
                          uint64_t *ret_step)
{
    assert_non_null(task);
    mu_checkpoint_io_submit(f->io, task);
    struct mu_checkpoint_done *done = await_done(f);
    enum mu_status status = done->result.status;
    assert_string_equal(done->job, "job");
    assert_int_equal(done->checkpoint, 4);
    strcpy(text, status == MU_OK ? "" : done->result.text);
    if (ret_step)
        *ret_step = done->step;
    free(done);
    return status;
}

static enum mu_status publish(struct fixture *f, bool probe, char text[MU_ERROR_TEXT_SIZE], uint64_t *ret_step)
{
    return run(f, mu_checkpoint_task_publish(&f->job, &f->checkpoint, probe), text, ret_step);
}

static void test_whole_checkpoint_is_published_and_verifies(void **state)
{
    (void)state;
    struct fixture f;
    char text[MU_ERROR_TEXT_SIZE];
    struct mu_error err;
    uint64_t step = 0;
    set_up(&f);
    write_all(&f);
    assert_int_equal(publish(&f, true, text, NULL), MU_ERR_NOT_FOUND); /* no manifest yet */
    assert_int_equal(publish(&f, false, text, &step), MU_OK);
    assert_int_equal(step, 42);
    struct mu_checkpoint_report report;
    if (mu_checkpoint_verify(f.checkpoint.dir, &report, &err) != MU_OK)
        fail_msg("%s", err.text);
    assert_int_equal(report.piece_count, PIECES);
    assert_int_equal(publish(&f, false, text, &step), MU_OK); /* again is the same */
    assert_int_equal(publish(&f, true, text, &step), MU_OK);
    assert_int_equal(step, 42);
    tear_down(&f);
}

static void test_pieces_of_any_layout_are_published(void **state)
{
    (void)state;
    static const uint32_t degrees[][3] = {{2, 1, 1}, {1, 2, 2}, {2, 2, 2}, {2, 2, 4}}; /* the last: more than chunks */
    for (size_t i = 0; i < sizeof degrees / sizeof degrees[0]; i++) {
        struct fixture f;
        char text[MU_ERROR_TEXT_SIZE];
        struct mu_error err;
        uint64_t step = 0;
        set_up_for(&f, layout_of(degrees[i][0], degrees[i][1], degrees[i][2]));
        write_all(&f);
        if (publish(&f, false, text, &step) != MU_OK)
            fail_msg("%s", text);
        assert_int_equal(step, 42);
        struct mu_checkpoint_report report;
        if (mu_checkpoint_verify(f.checkpoint.dir, &report, &err) != MU_OK)
            fail_msg("%s", err.text);
        assert_true(report.piece_count > 0 && report.piece_count <= f.checkpoint.piece_count);
        tear_down(&f);
    }
}

/* Who came back with its state of the last step is parked in the generation that it was lost from. */
static void test_a_piece_of_an_older_generation_is_published(void **state)
{
    (void)state;
    struct fixture f;
    char text[MU_ERROR_TEXT_SIZE];
    struct mu_checkpoint_report report;
    struct mu_error err;
    set_up(&f);
    write_all(&f);
    write_piece_in(&f, 1, 42, 1);
    if (publish(&f, false, text, NULL) != MU_OK)
        fail_msg("%s", text);
    if (mu_checkpoint_verify(f.checkpoint.dir, &report, &err) != MU_OK)
        fail_msg("%s", err.text);
    assert_int_equal(report.piece_count, PIECES);
    tear_down(&f);
}

static void test_layout_that_does_not_fit_is_not_published(void **state)
{
    (void)state;
    struct fixture f;
    char text[MU_ERROR_TEXT_SIZE];
    set_up(&f);
    write_all(&f);
    f.checkpoint.layout.dp = PIECES + 1;
    assert_int_equal(publish(&f, false, text, NULL), MU_ERR_INVALID);
    f.checkpoint.layout = layout_of(2, 1, 1); /* the job has one slice */
    f.checkpoint.piece_count = 2;
    assert_int_equal(publish(&f, false, text, NULL), MU_ERR_INVALID);
    tear_down(&f);
}

static void expect_not_published(struct fixture *f, const char *wanted)
{
    char text[MU_ERROR_TEXT_SIZE];
    struct mu_manifest *manifest = NULL;
    assert_int_not_equal(publish(f, false, text, NULL), MU_OK);
    if (!strstr(text, wanted))
        fail_msg("'%s' does not say '%s'", text, wanted);
    assert_int_equal(mu_manifest_read(f->checkpoint.dir, &manifest, NULL), MU_ERR_NOT_FOUND);
}

static void test_missing_cut_or_foreign_pieces_are_not_published(void **state)
{
    (void)state;
    struct fixture f;
    char path[MU_PATH_SIZE + 128];
    set_up(&f);
    write_all(&f);
    snprintf(path, sizeof path, "%s/%s", f.checkpoint.dir, f.pieces[1].file);
    f.pieces[1].size_bytes--;
    expect_not_published(&f, "reported");
    f.pieces[1].size_bytes++;
    f.pieces[2].done = false;
    expect_not_published(&f, "not written");
    f.pieces[2].done = true;
    assert_int_equal(unlink(path), 0);
    expect_not_published(&f, "not there");
    write_piece(&f, 1, 41);
    expect_not_published(&f, "step 41");
    write_piece(&f, 1, 42);
    struct mu_piece_record swapped = f.pieces[1];
    f.pieces[1] = f.pieces[0]; /* a piece twice, another not at all */
    expect_not_published(&f, "chunks");
    f.pieces[1] = swapped;
    char text[MU_ERROR_TEXT_SIZE];
    assert_int_equal(publish(&f, false, text, NULL), MU_OK);
    tear_down(&f);
}

static void test_delete_removes_a_committed_and_an_aborted_directory(void **state)
{
    (void)state;
    struct fixture f;
    char text[MU_ERROR_TEXT_SIZE];
    struct stat st;
    set_up(&f);
    write_piece(&f, 0, 42);
    assert_int_equal(run(&f, mu_checkpoint_task_delete(&f.checkpoint), text, NULL), MU_OK); /* aborted */
    assert_int_not_equal(lstat(f.checkpoint.dir, &st), 0);
    assert_int_equal(run(&f, mu_checkpoint_task_delete(&f.checkpoint), text, NULL), MU_OK); /* gone already */
    assert_int_equal(mkdir(f.checkpoint.dir, 0755), 0);
    write_all(&f);
    assert_int_equal(publish(&f, false, text, NULL), MU_OK);
    assert_int_equal(run(&f, mu_checkpoint_task_delete(&f.checkpoint), text, NULL), MU_OK);
    assert_int_not_equal(lstat(f.checkpoint.dir, &st), 0);
    tear_down(&f);
}

static void test_delete_of_a_directory_with_another_name_is_refused(void **state)
{
    (void)state;
    struct fixture f;
    char text[MU_ERROR_TEXT_SIZE], name[MU_CATALOG_NAME_SIZE];
    struct stat st;
    set_up(&f);
    char kept[MU_PATH_SIZE];
    strcpy(kept, f.checkpoint.dir);
    mu_catalog_name(5, 40, f.checkpoint.nonce, name);
    snprintf(f.checkpoint.dir, sizeof f.checkpoint.dir, "%s/%s", f.root, name);
    assert_int_equal(run(&f, mu_checkpoint_task_delete(&f.checkpoint), text, NULL), MU_ERR_INVALID);
    snprintf(f.checkpoint.dir, sizeof f.checkpoint.dir, "%s", f.root);
    assert_int_equal(run(&f, mu_checkpoint_task_delete(&f.checkpoint), text, NULL), MU_ERR_INVALID);
    assert_int_equal(lstat(kept, &st), 0);
    tear_down(&f);
}

static bool exists(const struct fixture *f, uint64_t seq)
{
    char name[MU_CATALOG_NAME_SIZE], path[MU_PATH_SIZE + 128];
    struct stat st;
    mu_catalog_name(seq, 0, (struct mu_id){1, seq}, name);
    snprintf(path, sizeof path, "%s/%s", f->root, name);
    return lstat(path, &st) == 0;
}

static void test_sweep_removes_only_old_aborted_unknown_ones(void **state)
{
    (void)state;
    struct fixture f;
    char text[MU_ERROR_TEXT_SIZE], path[MU_PATH_SIZE];
    set_up(&f);
    write_all(&f);
    assert_int_equal(publish(&f, false, text, NULL), MU_OK); /* number 4: committed, not in the records */
    for (uint64_t seq = 1; seq <= 6; seq++) {
        if (seq != 4)
            assert_int_equal(mu_catalog_create(f.root, "job", seq, 0, (struct mu_id){1, seq}, path, NULL), MU_OK);
    }
    const uint64_t known[] = {2};
    struct mu_checkpoint_task *task = mu_checkpoint_task_sweep(f.root, "job", 6, known, 1);
    assert_non_null(task);
    mu_checkpoint_io_submit(f.io, task);
    assert_int_equal(publish(&f, true, text, NULL), MU_OK); /* done after the sweep; and still there */
    assert_false(exists(&f, 1));
    assert_true(exists(&f, 2)); /* known */
    assert_false(exists(&f, 3));
    assert_false(exists(&f, 5));
    assert_true(exists(&f, 6)); /* newer than the start */
    tear_down(&f);
}

/* Flips one bit of a file, at a byte. */
static void flip(const struct fixture *f, const char *file, long at)
{
    char path[MU_PATH_SIZE + 128];
    snprintf(path, sizeof path, "%s/%s", f->checkpoint.dir, file);
    FILE *stream = fopen(path, "r+b");
    assert_non_null(stream);
    assert_int_equal(fseek(stream, at, at < 0 ? SEEK_END : SEEK_SET), 0);
    int byte = fgetc(stream);
    assert_true(byte >= 0);
    assert_int_equal(fseek(stream, -1, SEEK_CUR), 0);
    fputc(byte ^ 0x10, stream);
    assert_int_equal(fclose(stream), 0);
}

static void expect_scrub(struct fixture *f, enum mu_status wanted, const char *words)
{
    char text[MU_ERROR_TEXT_SIZE];
    assert_int_equal(run(f, mu_checkpoint_task_scrub(&f->checkpoint), text, NULL), wanted);
    if (!strstr(text, words))
        fail_msg("'%s' does not say '%s'", text, words);
}

static void test_re_reading_finds_any_changed_bit(void **state)
{
    (void)state;
    struct fixture f;
    char text[MU_ERROR_TEXT_SIZE], path[MU_PATH_SIZE + 128], away[MU_PATH_SIZE + 128];
    set_up(&f);
    write_all(&f);
    assert_int_equal(publish(&f, false, text, NULL), MU_OK);
    expect_scrub(&f, MU_OK, "");
    const long places[] = {0, 9, 5000, -1};
    for (uint32_t piece = 0; piece < PIECES; piece++) {
        for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
            flip(&f, f.pieces[piece].file, places[i]);
            expect_scrub(&f, MU_ERR_CORRUPT, f.pieces[piece].file);
            flip(&f, f.pieces[piece].file, places[i]);
        }
    }
    flip(&f, MU_MANIFEST_FILE, -3);
    expect_scrub(&f, MU_ERR_CORRUPT, MU_MANIFEST_FILE);
    flip(&f, MU_MANIFEST_FILE, -3);
    expect_scrub(&f, MU_OK, "");
    snprintf(path, sizeof path, "%s/%s", f.checkpoint.dir, f.pieces[1].file);
    assert_int_equal(truncate(path, (off_t)f.pieces[1].size_bytes - 1), 0);
    expect_scrub(&f, MU_ERR_CORRUPT, "its manifest says");
    assert_int_equal(unlink(path), 0);
    expect_scrub(&f, MU_ERR_CORRUPT, "not there");
    snprintf(away, sizeof away, "%s.away", f.checkpoint.dir); /* as a file system that is not mounted: no evidence */
    assert_int_equal(rename(f.checkpoint.dir, away), 0);
    expect_scrub(&f, MU_ERR_NOT_FOUND, "");
    assert_int_equal(rename(away, f.checkpoint.dir), 0);
    tear_down(&f);
}

/* A file of several blocks is read no faster than allowed, and other work is done in between. */
static void test_re_reading_gives_way(void **state)
{
    (void)state;
    struct fixture f;
    char text[MU_ERROR_TEXT_SIZE];
    set_up(&f);
    write_all(&f);
    assert_int_equal(publish(&f, false, text, NULL), MU_OK);
    uint64_t began_us = mu_clock_mono_us();
    for (uint32_t i = 0; i < 2; i++) /* the second one while the first is read, or after it: both are right */
        mu_checkpoint_io_submit(f.io, mu_checkpoint_task_scrub(&f.checkpoint));
    mu_checkpoint_io_submit(f.io, mu_checkpoint_task_publish(&f.job, &f.checkpoint, true));
    uint32_t whole = 0, busy = 0, others = 0;
    uint64_t size_bytes = 0;
    for (uint32_t i = 0; i < 3; i++) {
        struct mu_checkpoint_done *done = await_done(&f);
        others += !done->scrubbed;
        whole += done->scrubbed && done->result.status == MU_OK;
        busy += done->scrubbed && done->result.status == MU_ERR_BUSY;
        if (done->scrubbed && done->result.status == MU_OK)
            size_bytes = done->size_bytes;
        free(done);
    }
    uint64_t took_us = mu_clock_mono_us() - began_us, total_bytes = 0;
    for (uint32_t i = 0; i < PIECES; i++)
        total_bytes += f.pieces[i].size_bytes;
    assert_true(others == 1 && whole >= 1 && whole + busy == 2);
    assert_true(size_bytes == total_bytes);
    /* Each pause is rounded down to a millisecond; none follows the last block. */
    uint64_t least_us = (total_bytes - f.pieces[PIECES - 1].size_bytes) * 1000000 / MU_SCRUB_BYTES_PER_SECOND;
    assert_true(took_us + PIECES * 1000 >= least_us);
    tear_down(&f);
}

int main(void)
{
    mu_log_init("test", MU_LOG_ERROR);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole_checkpoint_is_published_and_verifies),
        cmocka_unit_test(test_pieces_of_any_layout_are_published),
        cmocka_unit_test(test_a_piece_of_an_older_generation_is_published),
        cmocka_unit_test(test_layout_that_does_not_fit_is_not_published),
        cmocka_unit_test(test_missing_cut_or_foreign_pieces_are_not_published),
        cmocka_unit_test(test_delete_removes_a_committed_and_an_aborted_directory),
        cmocka_unit_test(test_delete_of_a_directory_with_another_name_is_refused),
        cmocka_unit_test(test_re_reading_finds_any_changed_bit),
        cmocka_unit_test(test_re_reading_gives_way),
        cmocka_unit_test(test_sweep_removes_only_old_aborted_unknown_ones),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
