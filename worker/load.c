#include "worker/load.h"

#include <string.h>

#include "storage/manifest.h"
#include "worker/holder.h"

/* What a job starts from: any checkpoint, or the one that had that manifest when the job was submitted. */
static enum mu_status check_start(const struct mu_load_config *config, const struct mu_manifest *manifest,
                                  struct mu_error *err)
{
    if (!config->sha256)
        return MU_OK;
    if (strcmp(config->sha256, manifest->sha256) != 0)
        return mu_fail(err, MU_ERR_CORRUPT,
                       "'%s' is not the checkpoint that the job was submitted with: the SHA-256 of its manifest is "
                       "%.16s..., not %.16s...; bring the other one back, or submit another job",
                       config->dir, manifest->sha256, config->sha256);
    return mu_manifest_check_model(manifest, &config->model->config, config->dir, err);
}

static enum mu_status check_identity(const struct mu_load_config *config, const struct mu_manifest *manifest,
                                     struct mu_error *err)
{
    const struct mu_checkpoint_identity *identity = &manifest->identity;
    if (!config->job)
        return check_start(config, manifest, err);
    if (strcmp(identity->job, config->job) == 0 && identity->seq == config->checkpoint &&
        identity->step == config->step)
        return MU_OK;
    return mu_fail(err, MU_ERR_CORRUPT,
                   "'%s' holds checkpoint %llu of job '%s' at step %llu, not checkpoint %llu of job '%s' at step %llu",
                   config->dir, (unsigned long long)identity->seq, identity->job, (unsigned long long)identity->step,
                   (unsigned long long)config->checkpoint, config->job, (unsigned long long)config->step);
}

/* Gaps between cells are in no piece: zero, as after initialisation. */
static void zero_gaps(const struct mu_model_spec *model, const struct mu_chunk_run *run, float *flat)
{
    uint32_t cell = mu_model_chunk(model, run->first).cell,
             last = mu_model_chunk(model, run->first + run->count - 1).cell;
    for (; cell < last; cell++) {
        struct mu_cell before = mu_model_cell(model, cell);
        uint64_t begin = before.offset + before.size, end = mu_model_cell(model, cell + 1).offset;
        memset(flat + begin, 0, (size_t)(end - begin) * sizeof(float));
    }
}

enum mu_status mu_load_checkpoint(const struct mu_load_config *config, struct mu_error *err)
{
    struct mu_checkpoint_want want = {
        .runs = {config->params, config->moments, config->moments},
        .run_counts = {config->params_count, config->moments_count, config->moments_count},
        .flats = {config->flats[0], config->flats[1], config->flats[2]},
    };
    for (int kind = 0; kind < 3; kind++) {
        for (uint32_t i = 0; i < want.run_counts[kind]; i++)
            zero_gaps(config->model, &want.runs[kind][i], want.flats[kind]);
    }
    struct mu_holder_source copies = {.dir = config->dir,
                                      .host = config->host,
                                      .holders = config->holders,
                                      .holder_count = config->holder_count,
                                      .abort = config->cancel};
    struct mu_piece_source source;
    if (config->holders) {
        mu_holder_source_init(&copies, &source);
        want.source = &source;
    }
    struct mu_manifest *manifest = NULL;
    enum mu_status status =
        config->holders ? mu_holder_manifest(&copies, &manifest, err) : mu_manifest_read(config->dir, &manifest, err);
    if (status == MU_OK)
        status = check_identity(config, manifest, err);
    if (status == MU_OK)
        status =
            mu_checkpoint_load_runs(config->dir, manifest, config->model, &want, config->cancel, config->progress, err);
    mu_manifest_free(manifest);
    return status;
}
