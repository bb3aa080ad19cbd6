#include "cli/job_file.h"

#include <cyaml/cyaml.h>
#include <stdlib.h>
#include <string.h>

#include "cli/job_file_internal.h"
#include "storage/manifest.h"

/* ---- What libcyaml may load. ---- */

#define OPTIONAL               (CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL)
#define TEXT(parent, member)   CYAML_FIELD_STRING_PTR(#member, OPTIONAL, struct parent, member, 0, CYAML_UNLIMITED)
#define GROUP(member, schema_) CYAML_FIELD_MAPPING_PTR(#member, OPTIONAL, struct job_text, member, schema_)

static const cyaml_schema_field_t model_schema[] = {TEXT(model_text, family),
                                                    TEXT(model_text, layers),
                                                    TEXT(model_text, heads),
                                                    TEXT(model_text, kv_heads),
                                                    TEXT(model_text, channels),
                                                    TEXT(model_text, hidden),
                                                    TEXT(model_text, context),
                                                    TEXT(model_text, vocab),
                                                    TEXT(model_text, dropout),
                                                    TEXT(model_text, rope_base),
                                                    CYAML_FIELD_END};
static const cyaml_schema_field_t data_schema[] = {TEXT(data_text, path), TEXT(data_text, tokens),
                                                   TEXT(data_text, holdout), CYAML_FIELD_END};
static const cyaml_schema_field_t batch_schema[] = {TEXT(batch_text, sequences), TEXT(batch_text, micro),
                                                    TEXT(batch_text, accumulate), TEXT(batch_text, length),
                                                    CYAML_FIELD_END};
static const cyaml_schema_value_t beta_schema = {CYAML_VALUE_STRING(CYAML_FLAG_POINTER, char, 0, CYAML_UNLIMITED)};
static const cyaml_schema_field_t optimizer_schema[] = {
    TEXT(optimizer_text, kind),
    TEXT(optimizer_text, lr),
    TEXT(optimizer_text, min_lr),
    TEXT(optimizer_text, warmup),
    CYAML_FIELD_SEQUENCE("betas", OPTIONAL, struct optimizer_text, betas, &beta_schema, 2, 2),
    TEXT(optimizer_text, eps),
    TEXT(optimizer_text, weight_decay),
    TEXT(optimizer_text, clip),
    CYAML_FIELD_END};
static const cyaml_schema_field_t parallel_schema[] = {TEXT(parallel_text, tp),
                                                       TEXT(parallel_text, pp),
                                                       TEXT(parallel_text, dp),
                                                       TEXT(parallel_text, slices),
                                                       TEXT(parallel_text, optimizer_sharding),
                                                       TEXT(parallel_text, recompute),
                                                       TEXT(parallel_text, redundancy),
                                                       CYAML_FIELD_END};
static const cyaml_schema_field_t workers_schema[] = {TEXT(workers_text, min), TEXT(workers_text, max),
                                                      TEXT(workers_text, spares), CYAML_FIELD_END};
static const cyaml_schema_field_t checkpoint_schema[] = {TEXT(checkpoint_text, path),       TEXT(checkpoint_text, kind),
                                                         TEXT(checkpoint_text, every),      TEXT(checkpoint_text, keep),
                                                         TEXT(checkpoint_text, keep_every), CYAML_FIELD_END};
static const cyaml_schema_field_t eval_schema[] = {TEXT(eval_text, every), TEXT(eval_text, sequences), CYAML_FIELD_END};
static const cyaml_schema_field_t init_schema[] = {TEXT(init_text, path), CYAML_FIELD_END};
static const cyaml_schema_field_t job_schema[] = {TEXT(job_text, job),
                                                  GROUP(model, model_schema),
                                                  GROUP(data, data_schema),
                                                  GROUP(batch, batch_schema),
                                                  TEXT(job_text, steps),
                                                  GROUP(optimizer, optimizer_schema),
                                                  GROUP(parallel, parallel_schema),
                                                  GROUP(workers, workers_schema),
                                                  GROUP(checkpoint, checkpoint_schema),
                                                  GROUP(eval, eval_schema),
                                                  GROUP(init, init_schema),
                                                  TEXT(job_text, numerics),
                                                  TEXT(job_text, compute),
                                                  TEXT(job_text, data_tls),
                                                  TEXT(job_text, seed),
                                                  CYAML_FIELD_END};
static const cyaml_schema_value_t top_schema = {CYAML_VALUE_MAPPING(CYAML_FLAG_POINTER, struct job_text, job_schema)};

static const struct mu_yaml_kind job_kind = {.noun = "job file",
                                             .needs = "job, model, data, batch and steps",
                                             .begin = "write a line job: NAME and so on",
                                             .list = "a list of two numbers",
                                             .list_advice = "write [0.9, 0.95]",
                                             .docs = "see docs/job-file.md",
                                             .schema = &top_schema,
                                             .size_max = MU_JOB_FILE_SIZE_MAX};

/* Notes which checkpoint the job starts from. Its model is compared last: that the job's own is sound comes first. */
static enum mu_status judge(struct mu_yaml_reader *r, struct mu_job_spec *spec)
{
    struct mu_manifest *manifest = NULL;
    const char *dir = spec->init.path;
    enum mu_status status = MU_OK;
    if (dir[0]) {
        status = mu_manifest_read(dir, &manifest, r->err);
        if (status != MU_OK) {
            mu_error_prefix(r->err, "init.path");
            return mu_yaml_locate(r);
        }
        memcpy(spec->init.sha256, manifest->sha256, sizeof spec->init.sha256);
    }
    status = mu_job_spec_check(spec, r->err);
    if (status == MU_OK && manifest)
        status = mu_manifest_check_model(manifest, &spec->model, dir, r->err);
    mu_manifest_free(manifest);
    return status == MU_OK ? MU_OK : mu_yaml_locate(r);
}

enum mu_status mu_job_file_parse(const char *name, const char *directory, const void *text, size_t size_bytes,
                                 struct mu_job_spec *ret_spec, struct mu_error *err)
{
    struct mu_error own_err;
    struct mu_yaml_reader r = {.kind = &job_kind, .directory = directory, .err = err ? err : &own_err};
    void *document = NULL;
    enum mu_status status = mu_yaml_load(&r, name, text, size_bytes, &document);
    if (status != MU_OK)
        return status;
    struct mu_job_spec spec;
    status = job_file_read_fields(&r, document, &spec);
    if (status == MU_OK)
        status = judge(&r, &spec);
    if (status == MU_OK)
        *ret_spec = spec;
    mu_yaml_free(&r, document);
    return status;
}

enum mu_status mu_job_file_read(const char *path, struct mu_job_spec *ret_spec, struct mu_error *err)
{
    char *directory, *text;
    size_t size;
    enum mu_status status = mu_yaml_read_file(path, &job_kind, &directory, &text, &size, err);
    if (status != MU_OK)
        return status;
    status = mu_job_file_parse(path, directory, text, size, ret_spec, err);
    free(directory);
    free(text);
    return status;
}
