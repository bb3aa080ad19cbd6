/* links: mu_records mu_storage mu_plan */
/* A job's records made again from its checkpoints' manifests. */
#include "storage_testing.h"

#include "coordinator/rebuild.h"
#include "coordinator/snapshot.h"
#include "plan/amend.h"
#include "storage/catalog.h"
#include "storage/job_json.h"
#include "storage/manifest.h"

#define ROOT_JOB "kjv"
enum { WALL_US = 12345 };

static const struct mu_id nonce = {.high = 0x0123456789abcdef, .low = 0xfedcba9876543210};

static void make_spec(struct mu_job_spec *spec, uint32_t most_workers)
{
    mu_job_spec_init(spec);
    strcpy(spec->name, ROOT_JOB);
    spec->model = (struct mu_model_config){
        .family = MU_FAMILY_GPT2, .layers = 2, .heads = 2, .channels = 32, .context = 16, .vocab = 256};
    mu_model_config_resolve(&spec->model);
    strcpy(spec->data.path, "/data/text");
    strcpy(spec->checkpoint.path, "/where/it/was");
    spec->batch.sequences = 16, spec->batch.micro = 2, spec->batch.length = 16;
    spec->steps = 1000;
    spec->workers.max = most_workers;
    struct mu_error err;
    assert_ok(mu_job_spec_check(spec, &err), &err);
}

/* A manifest of two pieces whose job record is `text`. Returns its directory. */
static void commit(const char *root, uint64_t number, uint64_t step, uint64_t generation, const char *text,
                   char path[MU_PATH_SIZE])
{
    struct mu_error err;
    struct mu_manifest *manifest = mu_manifest_new();
    assert_ok(mu_catalog_create(root, ROOT_JOB, number, step, nonce, path, &err), &err);
    manifest->identity = (struct mu_checkpoint_identity){.seq = number, .step = step, .generation = generation};
    strcpy(manifest->identity.job, ROOT_JOB);
    manifest->nonce = nonce;
    manifest->created_wall_us = 7 * number;
    manifest->chunk_count = 1;
    assert_int_equal(mu_manifest_set_job_record(manifest, text), MU_OK);
    for (uint64_t piece = 0; piece < 2; piece++) {
        const struct mu_manifest_entry entry = {.kind = MU_PIECE_PARAMETERS, .cell_name = "E.0", .chunk_count = 1};
        assert_int_equal(mu_manifest_add_piece(manifest, piece ? "q" : "p", 100 + piece, (struct mu_hash128){0, 0}),
                         MU_OK);
        assert_int_equal(mu_manifest_add_entry(manifest, &entry), MU_OK);
    }
    assert_ok(mu_manifest_write(path, manifest, &err), &err);
    mu_manifest_free(manifest);
}

static void commit_spec(const char *root, uint64_t number, uint64_t step, uint64_t generation, uint32_t most_workers)
{
    struct mu_job_spec spec;
    char path[MU_PATH_SIZE];
    make_spec(&spec, most_workers);
    char *text = mu_job_spec_to_text(&spec);
    assert_non_null(text);
    commit(root, number, step, generation, text, path);
    free(text);
}

/* What the store has. */
struct found {
    struct mu_job_record job;
    struct mu_checkpoint_record checkpoints[MU_CHECKPOINTS_MAX];
    uint32_t jobs, count;
};

static enum mu_status note(void *arg, const struct mu_record *record, struct mu_error *err)
{
    struct found *found = arg;
    (void)err;
    if (record->kind == MU_RECORD_JOB) {
        found->job = *record->job;
        found->jobs++;
    } else {
        assert_int_equal(record->kind, MU_RECORD_CHECKPOINT);
        assert_true(found->count < MU_CHECKPOINTS_MAX);
        found->checkpoints[found->count++] = *record->checkpoint;
    }
    return MU_OK;
}

static struct found *load(struct mu_store *store)
{
    struct mu_error err;
    struct found *found = calloc(1, sizeof *found);
    assert_non_null(found);
    assert_ok(mu_records_load(store, note, found, &err), &err);
    return found;
}

static void test_job_is_what_its_newest_manifest_says(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_store *store = mu_store_memory_new();
    struct mu_rebuild_report report;
    struct mu_error err;
    commit_spec(scratch.path, 3, 30, 4, 5);
    commit_spec(scratch.path, 9, 70, (1ull << MU_EPOCH_SHIFT) + 6, 8);
    assert_ok(mu_rebuild_job(scratch.path, ROOT_JOB, WALL_US, store, &report, &err), &err);
    assert_true(report.checkpoints == 2 && report.newest_step == 70 && report.problem_count == 0);
    struct found *found = load(store);
    const struct mu_job_record *job = &found->job;
    assert_true(found->jobs == 1 && found->count == 2 && job->state == MU_JOB_RUNNING && job->checkpoint_seen);
    assert_string_equal(job->spec.name, ROOT_JOB);
    assert_string_equal(job->spec.checkpoint.path, scratch.path); /* where they are now */
    assert_true(job->spec.workers.max == 8 && job->submitted_workers.max == 8 && job->spec.steps == 1000);
    assert_true(job->steps_done == 70 && job->created_wall_us == WALL_US && !mu_id_is_zero(job->uid));
    /* Nothing that was numbered before is numbered again. */
    assert_true(job->generation >= (1ull << MU_EPOCH_SHIFT) + 6 && job->next_checkpoint >= 9);
    assert_true(job->command.number == job->generation && !job->command.open);
    for (uint32_t i = 0; i < 2; i++) {
        const struct mu_checkpoint_record *record = &found->checkpoints[i];
        assert_true(record->number == (i ? 9 : 3) && record->step == (i ? 70 : 30) && record->size_bytes == 201);
        assert_true(record->state == MU_CKPT_COMMITTED && !record->verified && record->wall_us == 7 * record->number);
        assert_true(mu_id_equal(record->job_uid, job->uid) && mu_id_equal(record->nonce, nonce));
        assert_true(strncmp(record->dir, scratch.path, strlen(scratch.path)) == 0);
    }
    free(found);
    assert_fails(mu_rebuild_job(scratch.path, ROOT_JOB, WALL_US, store, &report, &err), MU_ERR_EXISTS, &err,
                 "has a job 'kjv' already");
    mu_store_free(store);
    scratch_remove(&scratch);
}

/* Damaged manifests are told, and the next older one serves. */
/* Kept for a branch, or not deleted in time: a later manifest tells that it was undone. */
static void test_what_a_roll_back_made_void_is_left_out(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_store *store = mu_store_memory_new();
    struct mu_rebuild_report report;
    struct mu_error err;
    struct mu_job_spec spec;
    char path[MU_PATH_SIZE];
    for (uint64_t number = 1; number <= 3; number++)
        commit_spec(scratch.path, number, 10 * number, 1, 4);
    make_spec(&spec, 4);
    const struct mu_amendment back = {.fields = MU_AMEND_ROLL_BACK, .back = {1, 4, 35}};
    assert_ok(mu_amend_add(&spec, &back, 10, &err), &err);
    mu_amend_settle(&spec);
    char *text = mu_job_spec_to_text(&spec);
    commit(scratch.path, 4, 40, 2, text, path);
    free(text);
    assert_ok(mu_rebuild_job(scratch.path, ROOT_JOB, WALL_US, store, &report, &err), &err);
    struct found *found = load(store);
    assert_true(report.checkpoints == 2 && found->count == 2);
    assert_true(found->checkpoints[0].number == 1 && found->checkpoints[1].number == 4);
    assert_int_equal(mu_amend_era(&found->job.spec.amendments), 1);
    free(found);
    mu_store_free(store);
    scratch_remove(&scratch);
}

static void test_what_cannot_be_read_is_told_and_left_out(void **state)
{
    (void)state;
    struct scratch scratch = scratch_make();
    struct mu_store *store = mu_store_memory_new();
    struct mu_rebuild_report report;
    struct mu_error err;
    char path[MU_PATH_SIZE], file[MU_PATH_SIZE + 32];
    assert_fails(mu_rebuild_job(scratch.path, ROOT_JOB, WALL_US, store, &report, &err), MU_ERR_NOT_FOUND, &err,
                 "holds no checkpoint of job 'kjv' that can be read");
    commit_spec(scratch.path, 1, 10, 2, 5);
    commit(scratch.path, 2, 20, 2, "{\"name\":\"kjv\"}", path);
    commit(scratch.path, 3, 30, 2, "{}", path);
    snprintf(file, sizeof file, "%s/manifest.json", path);
    file_write(file, "{", 1);
    assert_ok(mu_rebuild_job(scratch.path, ROOT_JOB, WALL_US, store, &report, &err), &err);
    assert_true(report.checkpoints == 1 && report.newest_step == 10 && report.problem_count == 2);
    assert_non_null(strstr(report.problems[0].text, "0000000002"));
    assert_non_null(strstr(report.problems[1].text, "0000000003"));
    struct found *found = load(store);
    assert_true(found->jobs == 1 && found->count == 1 && found->job.generation == 1ull << MU_EPOCH_SHIFT);
    free(found);
    mu_store_free(store);
    scratch_remove(&scratch);
}

/* The newest half of what a job may have: there must be room for new ones. */
static void test_of_many_checkpoints_the_newest_are_taken(void **state)
{
    (void)state;
    enum { COUNT = MU_CHECKPOINTS_MAX + 9 };
    struct scratch scratch = scratch_make();
    struct mu_store *store = mu_store_memory_new();
    struct mu_rebuild_report report;
    struct mu_error err;
    for (uint64_t number = 1; number <= COUNT; number++)
        commit_spec(scratch.path, number, 10 * number, 2, 5);
    assert_ok(mu_rebuild_job(scratch.path, ROOT_JOB, WALL_US, store, &report, &err), &err);
    assert_true(report.checkpoints == MU_CHECKPOINTS_MAX / 2 && report.newest_step == 10 * COUNT);
    struct found *found = load(store);
    assert_int_equal(found->count, MU_CHECKPOINTS_MAX / 2);
    for (uint32_t i = 0; i < found->count; i++)
        assert_int_equal(found->checkpoints[i].number, COUNT - found->count + 1 + i);
    free(found);
    mu_store_free(store);
    scratch_remove(&scratch);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_job_is_what_its_newest_manifest_says),
        cmocka_unit_test(test_what_a_roll_back_made_void_is_left_out),
        cmocka_unit_test(test_what_cannot_be_read_is_told_and_left_out),
        cmocka_unit_test(test_of_many_checkpoints_the_newest_are_taken),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
