#include "coordinator/rebuild.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "coordinator/snapshot.h"
#include "plan/amend.h"
#include "storage/catalog.h"
#include "storage/job_json.h"

enum { CHECKPOINTS_TAKEN = MU_CHECKPOINTS_MAX / 2 }; /* there must be room for new ones */

struct rebuild {
    const char *root, *name;
    struct mu_rebuild_report *report;
    struct mu_job_record job;
    struct mu_checkpoint_record checkpoints[MU_CHECKPOINTS_MAX]; /* the newest; ring by `found` */
    uint32_t found;
    uint64_t newest_number; /* of checkpoints and generations */
    struct mu_wire_arena arena;
};

static void note_problem(struct rebuild *rebuild, const struct mu_error *problem)
{
    if (rebuild->report->problem_count < MU_REBUILD_PROBLEMS_MAX)
        rebuild->report->problems[rebuild->report->problem_count] = *problem;
    rebuild->report->problem_count++;
}

static uint64_t later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* Ascending by number: the last one that can be read says what the job is. */
static bool note_checkpoint(void *arg, const char *path, const struct mu_manifest *manifest,
                            const struct mu_error *problem)
{
    struct rebuild *rebuild = arg;
    struct mu_job_spec spec;
    struct mu_error err;
    if (!manifest) {
        note_problem(rebuild, problem);
        return true;
    }
    if (mu_job_spec_from_text(manifest->job_record, strlen(manifest->job_record), path, &spec, &err) != MU_OK) {
        note_problem(rebuild, &err);
        return true;
    }
    rebuild->job.spec = spec;
    struct mu_checkpoint_record *record = &rebuild->checkpoints[rebuild->found++ % MU_CHECKPOINTS_MAX];
    *record = (struct mu_checkpoint_record){.number = manifest->identity.seq,
                                            .nonce = manifest->nonce,
                                            .step = manifest->identity.step,
                                            .generation = manifest->identity.generation,
                                            .state = MU_CKPT_COMMITTED,
                                            .wall_us = manifest->created_wall_us};
    for (size_t i = 0; i < manifest->piece_count; i++)
        record->size_bytes += manifest->pieces[i].size_bytes;
    snprintf(record->job, sizeof record->job, "%s", rebuild->name);
    snprintf(record->dir, sizeof record->dir, "%s", path);
    rebuild->newest_number = later(rebuild->newest_number, later(record->number, record->generation));
    rebuild->job.steps_done = record->step;
    return true;
}

static enum mu_status refuse_known(void *arg, const struct mu_record *record, struct mu_error *err)
{
    const struct rebuild *rebuild = arg;
    if (record->kind == MU_RECORD_JOB && strcmp(record->job->spec.name, rebuild->name) == 0)
        return mu_fail(err, MU_ERR_EXISTS, "the data directory has a job '%s' already", rebuild->name);
    return MU_OK;
}

static enum mu_status add(struct rebuild *rebuild, struct mu_store_batch *batch, const struct mu_record *record,
                          struct mu_error *err)
{
    uint8_t key[MU_RECORD_KEY_SIZE];
    const void *value = NULL;
    size_t key_bytes = mu_record_key(record, key), value_bytes = 0;
    enum mu_status status = mu_record_encode(&rebuild->arena, record, &value, &value_bytes, err);
    if (status == MU_OK && (status = mu_store_batch_put(batch, key, key_bytes, value, value_bytes)))
        mu_fail(err, status, "no memory for the records of job '%s'", rebuild->name);
    mu_wire_arena_reset(&rebuild->arena);
    return status;
}

/* Of what was undone: later ones tell of it. */
static bool is_void(const struct mu_amendments *all, uint64_t number)
{
    for (uint32_t i = 0; i < all->count; i++) {
        const struct mu_amendment *one = &all->list[i];
        if (one->fields & MU_AMEND_ROLL_BACK && number > one->back.checkpoint && number < one->back.void_before)
            return true;
    }
    return false;
}

static enum mu_status write_job(struct rebuild *rebuild, struct mu_store *store, uint64_t wall_us, struct mu_error *err)
{
    struct mu_job_record *job = &rebuild->job;
    struct mu_store_batch batch;
    if (getrandom(&job->uid, sizeof job->uid, 0) != (ssize_t)sizeof job->uid)
        return mu_fail(err, MU_ERR_IO, "no random bytes");
    snprintf(job->spec.checkpoint.path, sizeof job->spec.checkpoint.path, "%s", rebuild->root);
    job->submitted_workers = job->spec.workers;
    job->state = MU_JOB_RUNNING;
    job->checkpoint_seen = true;
    job->created_wall_us = wall_us;
    job->generation = job->next_checkpoint = job->command.number =
        later(1ull << MU_EPOCH_SHIFT, rebuild->newest_number);
    mu_store_batch_init(&batch);
    enum mu_status status = add(rebuild, &batch, &(struct mu_record){.kind = MU_RECORD_JOB, .job = job}, err);
    uint32_t there = rebuild->found < MU_CHECKPOINTS_MAX ? rebuild->found : MU_CHECKPOINTS_MAX, count = 0;
    for (uint32_t back = 1; back <= there && count < CHECKPOINTS_TAKEN && status == MU_OK; back++) {
        struct mu_checkpoint_record *record = &rebuild->checkpoints[(rebuild->found - back) % MU_CHECKPOINTS_MAX];
        if (is_void(&job->spec.amendments, record->number))
            continue;
        count++;
        record->job_uid = job->uid;
        status = add(rebuild, &batch, &(struct mu_record){.kind = MU_RECORD_CHECKPOINT, .checkpoint = record}, err);
    }
    if (status == MU_OK)
        status = mu_store_write(store, &batch, err);
    mu_store_batch_fini(&batch);
    rebuild->report->checkpoints = count;
    rebuild->report->newest_step = job->steps_done;
    return status;
}

enum mu_status mu_rebuild_job(const char *root, const char *job, uint64_t wall_us, struct mu_store *store,
                              struct mu_rebuild_report *ret_report, struct mu_error *err)
{
    *ret_report = (struct mu_rebuild_report){0};
    struct rebuild *rebuild = calloc(1, sizeof *rebuild);
    if (!rebuild)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for a list of checkpoints");
    *rebuild = (struct rebuild){.root = root, .name = job, .report = ret_report};
    mu_wire_arena_init(&rebuild->arena);
    enum mu_status status = mu_records_load(store, refuse_known, rebuild, err);
    if (status == MU_OK)
        status = mu_catalog_enumerate(root, job, note_checkpoint, rebuild, err);
    if (status == MU_OK && rebuild->found == 0)
        status = mu_fail(err, MU_ERR_NOT_FOUND, "%s holds no checkpoint of job '%s' that can be read", root, job);
    if (status == MU_OK)
        status = write_job(rebuild, store, wall_us, err);
    mu_wire_arena_fini(&rebuild->arena);
    free(rebuild);
    return status;
}
