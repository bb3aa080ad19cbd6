#include "storage/interchange.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "common/clock.h"
#include "storage/file.h"
#include "storage/interchange_internal.h"
#include "storage/job_json.h"
#include "storage/manifest.h"

enum {
    PIECE_CHUNKS = 4096, /* in one file of an import: 1 GiB of parameters */
    IMPORT_LENGTH = 64,  /* batch.length of the record: valid for any model, and cheap to check */
};
#define IMPORT_JOB  "imported"
#define IMPORT_DATA "/imported" /* data.path of the record: an import knows no data, and nobody reads this */

enum mu_interchange_format mu_interchange_format_named(const char *name)
{
    static const char *const names[MU_INTERCHANGE_COUNT] = {"hf-gpt2", "hf-llama", "llm.c"};
    int format = 0;
    while (format < MU_INTERCHANGE_COUNT && strcmp(names[format], name) != 0)
        format++;
    return (enum mu_interchange_format)format;
}

/* ---- the model in memory ---- */

/* A valid job record around the model, for whoever reads the checkpoint without a job (generate, export, init): they
 * look at the model and at whether tokens are bytes. */
static void import_spec(const struct mu_model_config *config, struct mu_job_spec *spec)
{
    mu_job_spec_init(spec);
    strcpy(spec->name, IMPORT_JOB);
    spec->model = *config;
    strcpy(spec->data.path, IMPORT_DATA);
    spec->data.tokens = MU_TOKENS_LLMC; /* tokens are numbers: no word of them is known here */
    spec->batch.length = config->context < IMPORT_LENGTH ? config->context : IMPORT_LENGTH;
    spec->batch.micro = config->slices;
    spec->batch.sequences = config->slices;
    spec->steps = 1;
}

enum mu_status interchange_model_new(struct interchange_model *model, const struct mu_model_config *config,
                                     const char *what, struct mu_error *err)
{
    struct mu_model_config resolved = *config;
    struct mu_job_spec spec;
    mu_model_config_resolve(&resolved);
    import_spec(&resolved, &spec);
    if (mu_job_spec_check(&spec, err) != MU_OK)
        return mu_error_prefix(err, "'%s'", what);
    mu_model_spec_init(&model->spec, &resolved);
    model->parameters = calloc(model->spec.flat_size, sizeof(float));
    if (!model->parameters)
        return mu_fail(err, MU_ERR_NO_MEMORY, "'%s': its model needs %.1f GB of memory", what,
                       (double)model->spec.flat_size * 4e-9);
    return MU_OK;
}

/* Where element (row, column) of the logical tensor is in the part; false: not in it. */
static bool foreign_index(const struct interchange_part *part, uint64_t row, uint64_t column, uint64_t *ret_index)
{
    if (column < part->first || column - part->first >= part->columns)
        return false;
    column -= part->first;
    *ret_index = part->is_transposed ? column * part->rows + row : row * part->columns + column;
    return true;
}

typedef void move_fn(float *own, float *foreign);

static void own_from_foreign(float *own, float *foreign)
{
    *own = *foreign;
}

static void foreign_from_own(float *own, float *foreign)
{
    *foreign = *own;
}

static void for_each_element(const struct mu_model_spec *spec, float *parameters, const struct interchange_part *part,
                             float *foreign, move_fn *move)
{
    uint32_t slices = mu_model_is_sliced(part->role) ? spec->config.slices : 1;
    for (uint32_t slice = 0; slice < slices; slice++) {
        struct mu_tensor tensor = mu_model_role(spec, part->layer, slice, part->role);
        for (uint64_t row = 0; row < tensor.rows; row++) {
            for (uint64_t column = 0; column < tensor.columns; column++) {
                uint64_t full = mu_tensor_full_index(&tensor, row, column), index;
                if (foreign_index(part, full / tensor.full_columns, full % tensor.full_columns, &index))
                    move(parameters + tensor.offset + row * tensor.columns + column, foreign + index);
            }
        }
    }
}

void interchange_put(struct interchange_model *model, const struct interchange_part *part, const float *foreign)
{
    for_each_element(&model->spec, model->parameters, part, (float *)(uintptr_t)foreign /* only read */,
                     own_from_foreign);
}

void interchange_get(const struct interchange_model *model, const struct interchange_part *part, float *foreign)
{
    for_each_element(&model->spec, model->parameters, part, foreign, foreign_from_own);
}

void interchange_widen_bf16(const uint16_t *from, uint64_t count, float *to)
{
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(&to[i], &bits, sizeof bits);
    }
}

void interchange_widen_f16(const uint16_t *from, uint64_t count, float *to)
{
    for (uint64_t i = 0; i < count; i++) {
        uint32_t sign = (uint32_t)(from[i] & 0x8000u) << 16, exponent = from[i] >> 10 & 31u, fraction = from[i] & 1023u;
        uint32_t bits = sign | fraction << 13;
        if (exponent == 31) { /* infinity, NaN */
            bits |= 0x7f800000u;
        } else if (exponent > 0) {
            bits |= (exponent + 112) << 23;
        } else if (fraction > 0) { /* denormal there, normal here */
            uint32_t shift = (uint32_t)__builtin_clz(fraction) - 21;
            bits = sign | (113 - shift) << 23 | (fraction << shift & 1023u) << 13;
        }
        memcpy(&to[i], &bits, sizeof bits);
    }
}

/* ---- import ---- */

static enum mu_status check_empty(const char *path, struct mu_error *err)
{
    DIR *dir = opendir(path);
    if (!dir)
        return errno == ENOENT ? MU_OK : mu_fail_errno(err, errno, "cannot open directory '%s'", path);
    enum mu_status status = MU_OK;
    for (struct dirent *item; status == MU_OK && (item = readdir(dir));) {
        if (strcmp(item->d_name, ".") != 0 && strcmp(item->d_name, "..") != 0)
            status = mu_fail(err, MU_ERR_EXISTS, "'%s' is not empty (%s); give a new directory", path, item->d_name);
    }
    closedir(dir);
    return status;
}

static enum mu_status write_piece(const struct interchange_model *model, const char *dir, uint32_t piece,
                                  uint32_t pieces, const float *zeros, struct mu_manifest *manifest,
                                  struct mu_error *err)
{
    uint32_t first, chunks;
    char name[MU_PIECE_FILE_NAME_SIZE];
    mu_model_owned_chunks(&model->spec, pieces, piece, &first, &chunks);
    size_t count = mu_piece_entries_of_chunks(&model->spec, first, chunks, NULL, NULL, NULL, NULL, 0);
    struct mu_piece_entry *entries = calloc(count, sizeof *entries);
    if (!entries)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for %zu entries of a piece", count);
    mu_piece_entries_of_chunks(&model->spec, first, chunks, model->parameters, NULL, NULL, entries, count);
    for (size_t i = 0; i < count; i++) {
        if (entries[i].kind != MU_PIECE_PARAMETERS)
            entries[i].data = zeros;
    }
    snprintf(name, sizeof name, "piece-%05" PRIu32 "-of-%05" PRIu32 ".safetensors", piece, pieces);
    struct mu_piece_result result;
    enum mu_status status = mu_piece_write(dir, name, &manifest->identity, entries, count, NULL, &result, err);
    free(entries);
    if (status == MU_OK &&
        mu_manifest_add_chunks(manifest, &model->spec, name, result.size_bytes, result.xxh3, first, chunks) != MU_OK)
        status = mu_fail(err, MU_ERR_LIMIT, "piece '%s' does not fit into the manifest", name);
    return status;
}

/* The moments of every entry are the same zeros: never touched, so they cost no memory. */
static enum mu_status write_pieces(const struct interchange_model *model, const char *dir, struct mu_manifest *manifest,
                                   struct mu_error *err)
{
    uint32_t pieces = (model->spec.chunk_count + PIECE_CHUNKS - 1) / PIECE_CHUNKS;
    size_t zero_bytes = 0;
    for (uint32_t i = 0; i < model->spec.cell_count; i++) {
        size_t cell_bytes = (size_t)mu_model_cell(&model->spec, i).size * sizeof(float);
        zero_bytes = cell_bytes > zero_bytes ? cell_bytes : zero_bytes;
    }
    void *zeros = mmap(NULL, zero_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (zeros == MAP_FAILED)
        return mu_fail_errno(err, errno, "no address space for %zu bytes of zeros", zero_bytes);
    enum mu_status status = MU_OK;
    for (uint32_t piece = 0; piece < pieces && status == MU_OK; piece++)
        status = write_piece(model, dir, piece, pieces, zeros, manifest, err);
    munmap(zeros, zero_bytes);
    return status;
}

static enum mu_status write_checkpoint(const struct interchange_model *model, const char *dir, struct mu_error *err)
{
    struct mu_job_spec spec;
    import_spec(&model->spec.config, &spec);
    struct mu_manifest *manifest = mu_manifest_new();
    char *record = mu_job_spec_to_text(&spec);
    enum mu_status status = manifest && record ? mu_manifest_set_job_record(manifest, record) : MU_ERR_NO_MEMORY;
    free(record);
    if (status != MU_OK) {
        mu_manifest_free(manifest);
        return mu_fail(err, status, "no memory for the manifest of '%s'", dir);
    }
    strcpy(manifest->identity.job, IMPORT_JOB);
    manifest->identity.seq = 1;
    manifest->nonce = mu_id_random();
    manifest->created_wall_us = mu_clock_wall_us();
    manifest->chunk_count = model->spec.chunk_count;
    strcpy(manifest->numeric_identity, IMPORT_JOB);
    status = mu_file_make_dirs(dir, err);
    if (status == MU_OK)
        status = write_pieces(model, dir, manifest, err);
    if (status == MU_OK)
        status = mu_manifest_write(dir, manifest, err);
    mu_manifest_free(manifest);
    return status;
}

enum mu_status mu_interchange_import(const char *from, enum mu_interchange_format format, uint32_t slices,
                                     const char *out, struct mu_interchange_model *ret_model, struct mu_error *err)
{
    struct interchange_model model = {.parameters = NULL};
    enum mu_status status = check_empty(out, err);
    if (status != MU_OK)
        return status;
    switch (format) {
    case MU_INTERCHANGE_HF_GPT2:
        status = interchange_hf_read(from, MU_FAMILY_GPT2, slices, &model, err);
        break;
    case MU_INTERCHANGE_HF_LLAMA:
        status = interchange_hf_read(from, MU_FAMILY_LLAMA, slices, &model, err);
        break;
    case MU_INTERCHANGE_LLMC:
        status = interchange_llmc_read(from, slices, &model, err);
        break;
    case MU_INTERCHANGE_COUNT:
        status = mu_fail(err, MU_ERR_INVALID, "this format is not known");
        break;
    }
    if (status == MU_OK)
        status = write_checkpoint(&model, out, err);
    if (status == MU_OK && ret_model)
        *ret_model =
            (struct mu_interchange_model){.config = model.spec.config, .parameter_count = model.spec.parameter_count};
    free(model.parameters);
    return status;
}

/* ---- export ---- */

static enum mu_status read_checkpoint(const char *dir, struct interchange_model *model, struct mu_error *err)
{
    struct mu_manifest *manifest;
    struct mu_job_spec spec;
    enum mu_status status = mu_manifest_read(dir, &manifest, err);
    if (status != MU_OK)
        return status;
    status = mu_job_spec_from_text(manifest->job_record, strlen(manifest->job_record), dir, &spec, err);
    if (status == MU_OK)
        status = interchange_model_new(model, &spec.model, dir, err);
    if (status == MU_OK)
        status = mu_checkpoint_load(dir, manifest, &model->spec, model->parameters, NULL, NULL, NULL, err);
    mu_manifest_free(manifest);
    return status;
}

static enum mu_status check_family(const struct interchange_model *model, enum mu_model_family wanted, const char *dir,
                                   struct mu_error *err)
{
    if (model->spec.config.family == wanted)
        return MU_OK;
    return mu_fail(err, MU_ERR_INVALID, "'%s' holds a model of family %s; export it as %s", dir,
                   wanted == MU_FAMILY_GPT2 ? "llama" : "gpt2",
                   wanted == MU_FAMILY_GPT2 ? "hf-llama" : "hf-gpt2 or llm.c");
}

enum mu_status mu_interchange_export(const char *checkpoint_dir, enum mu_interchange_format format, const char *out,
                                     struct mu_error *err)
{
    struct interchange_model model = {.parameters = NULL};
    bool is_llmc = format == MU_INTERCHANGE_LLMC;
    enum mu_status status = is_llmc ? MU_OK : check_empty(out, err);
    if (status == MU_OK)
        status = read_checkpoint(checkpoint_dir, &model, err);
    if (status == MU_OK)
        status = check_family(&model, format == MU_INTERCHANGE_HF_LLAMA ? MU_FAMILY_LLAMA : MU_FAMILY_GPT2,
                              checkpoint_dir, err);
    if (status == MU_OK)
        status = is_llmc ? interchange_llmc_write(&model, out, err) : interchange_hf_write(&model, out, err);
    free(model.parameters);
    return status;
}
