#include "cli/job_file.h"

#include <cyaml/cyaml.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/job_file_internal.h"
#include "storage/manifest.h"

enum {
    VALUE_SHOWN_SIZE = 64, /* most of a value that an error line repeats */
    NAME_SHOWN_SIZE = JOB_FILE_NAME_SHOWN_SIZE,
    LOG_LINE_SIZE = JOB_FILE_LOG_LINE_SIZE,
    TYPO_DISTANCE_MAX = 3, /* edits between an unknown key and the known one that is suggested */
};

static const char see_docs[] = "see docs/job-file.md";

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
                                                  TEXT(job_text, seed),
                                                  CYAML_FIELD_END};
static const cyaml_schema_value_t top_schema = {CYAML_VALUE_MAPPING(CYAML_FLAG_POINTER, struct job_text, job_schema)};

/* ---- One reading. ---- */

/* A byte inside a UTF-8 character: no place to cut. */
static bool is_continuation(char byte)
{
    return ((unsigned char)byte & 0xc0) == 0x80;
}

/* Copies what may be shown in one line: control characters replaced, the rest cut (from the front when `keep_end`). */
static void copy_shown(char *out, size_t out_size, const char *text, bool keep_end)
{
    size_t length = strlen(text);
    bool cut = length > out_size - 1;
    size_t copied = cut ? out_size - 4 : length; /* room for "..." */
    size_t at = 0;
    if (cut && keep_end) {
        memcpy(out, "...", 3);
        at = 3;
        text += length - copied;
        for (; is_continuation(*text); text++)
            copied--;
    } else {
        while (cut && is_continuation(text[copied]))
            copied--;
    }
    for (size_t i = 0; i < copied; i++)
        out[at++] = (unsigned char)text[i] < 0x20 || text[i] == 0x7f ? '?' : text[i];
    if (cut && !keep_end) {
        memcpy(out + at, "...", 3);
        at += 3;
    }
    out[at] = 0;
}

static void place(const struct job_file_reader *r, uint32_t line, char *out, size_t out_size)
{
    if (line > 0)
        snprintf(out, out_size, "%s:%" PRIu32, r->name, line);
    else
        snprintf(out, out_size, "%s", r->name);
}

/* Puts FILE:LINE before a message that begins with the path of a field. */
static enum mu_status locate(struct job_file_reader *r, uint32_t line)
{
    char where[NAME_SHOWN_SIZE + 16];
    place(r, line, where, sizeof where);
    return mu_error_prefix(r->err, "%s", where);
}

enum mu_status job_file_refuse(struct job_file_reader *r, const char *field, const char *value, const char *allowed,
                               const char *advice)
{
    char shown[VALUE_SHOWN_SIZE];
    copy_shown(shown, sizeof shown, value, false);
    bool empty = shown[0] == 0;
    mu_fail(r->err, MU_ERR_INVALID, "%s: value %s is not allowed: %s; %s", field, empty ? "(empty)" : shown, allowed,
            advice);
    return locate(r, mu_yaml_index_line(&r->index, field));
}

enum mu_status job_file_missing(struct job_file_reader *r, const char *field, const char *advice)
{
    mu_fail(r->err, MU_ERR_INVALID, "%s: is missing; %s", field, advice);
    return locate(r, mu_yaml_index_line(&r->index, field));
}

/* ---- What libcyaml refuses. ---- */

/* libcyaml logs one message, then a backtrace from the innermost place outwards:
 *   Load: Unexpected key: lay
 *   Load: Backtrace:
 *     in mapping (line: 2, column: 17)
 *     in mapping field 'model' (line: 2, column: 8) */
static void capture_log(cyaml_log_t level, void *context, const char *fmt, va_list args) MU_PRINTF(3, 0);
static void capture_log(cyaml_log_t level, void *context, const char *fmt, va_list args)
{
    (void)level;
    struct job_file_reader *r = context;
    char line[LOG_LINE_SIZE];
    vsnprintf(line, sizeof line, fmt, args);
    line[strcspn(line, "\n")] = 0;
    char *position = strstr(line, " (line: ");
    if (strncmp(line, "  in ", 5) == 0 && position) {
        if (r->line == 0)
            r->line = (uint32_t)strtoul(position + strlen(" (line: "), NULL, 10);
        char *begin = strchr(line, '\''), *end = begin ? strchr(begin + 1, '\'') : NULL;
        if (!end || strncmp(line, "  in mapping field", strlen("  in mapping field")) != 0)
            return;
        *end = 0;
        char path[sizeof r->path];
        if (snprintf(path, sizeof path, "%s%s%s", begin + 1, r->path[0] ? "." : "", r->path) < (int)sizeof path)
            memcpy(r->path, path, sizeof path);
    } else if (strncmp(line, "Load: ", 6) == 0 && r->message[0] == 0 && strcmp(line, "Load: Backtrace:") != 0) {
        copy_shown(r->message, sizeof r->message, line + 6, false);
    }
}

/* Edits that turn a into b (Levenshtein); more than TYPO_DISTANCE_MAX for anything long. */
static unsigned edit_distance(const char *a, const char *b)
{
    enum { LENGTH_MAX = 24 };
    size_t rows = strlen(a), columns = strlen(b);
    if (rows > LENGTH_MAX || columns > LENGTH_MAX)
        return TYPO_DISTANCE_MAX + 1;
    unsigned row[LENGTH_MAX + 1];
    for (size_t j = 0; j <= columns; j++)
        row[j] = (unsigned)j;
    for (size_t i = 1; i <= rows; i++) {
        unsigned diagonal = row[0];
        row[0] = (unsigned)i;
        for (size_t j = 1; j <= columns; j++) {
            unsigned best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            best = row[j] + 1 < best ? row[j] + 1 : best;
            row[j] = row[j - 1] + 1 < best ? row[j - 1] + 1 : best;
        }
    }
    return row[columns];
}

static const cyaml_schema_field_t *fields_of(const char *group)
{
    if (!group[0])
        return job_schema;
    for (const cyaml_schema_field_t *field = job_schema; field->key; field++)
        if (strcmp(field->key, group) == 0 && field->value.type == CYAML_MAPPING)
            return field->value.mapping.fields;
    return job_schema;
}

/* Finds the known key nearest to `key`: first in its own group, then anywhere. Writes "group.key" or "key"; false when
 * none is near. */
static bool nearest_key(const char *group, const char *key, char *out, size_t out_size)
{
    unsigned best = TYPO_DISTANCE_MAX + 1;
    const cyaml_schema_field_t *own = fields_of(group);
    for (const cyaml_schema_field_t *field = own; field->key; field++) {
        unsigned distance = edit_distance(key, field->key);
        if (distance < best && distance < strlen(field->key)) {
            best = distance;
            snprintf(out, out_size, "%s", field->key);
        }
    }
    for (const cyaml_schema_field_t *top = job_schema; top->key; top++) {
        if (strcmp(key, top->key) == 0) {
            snprintf(out, out_size, "%s at the top level", top->key);
            return true;
        }
        for (const cyaml_schema_field_t *field = top->value.type == CYAML_MAPPING ? top->value.mapping.fields : NULL;
             field && field->key; field++) {
            if (strcmp(key, field->key) == 0 && best > 1) {
                snprintf(out, out_size, "%s inside %s", field->key, top->key);
                return true;
            }
        }
    }
    return best <= TYPO_DISTANCE_MAX;
}

static enum mu_status unknown_key(struct job_file_reader *r)
{
    const char *colon = strstr(r->message, ": ");
    const char *key = colon ? colon + 2 : "";
    char shown[VALUE_SHOWN_SIZE], field[MU_YAML_PATH_SIZE + VALUE_SHOWN_SIZE + 2], suggestion[64];
    copy_shown(shown, sizeof shown, key, false);
    snprintf(field, sizeof field, "%s%s%s", r->path, r->path[0] ? "." : "", shown);
    uint32_t line = mu_yaml_index_line(&r->index, field);
    if (nearest_key(r->path, key, suggestion, sizeof suggestion)) {
        mu_fail(r->err, MU_ERR_INVALID, "%s: unknown key; did you mean %s?", field, suggestion);
        return locate(r, line);
    }
    char known[256] = "";
    size_t length = 0;
    for (const cyaml_schema_field_t *f = fields_of(r->path); f->key && length < sizeof known; f++)
        length += (size_t)snprintf(known + length, sizeof known - length, "%s%s", length ? ", " : "", f->key);
    mu_fail(r->err, MU_ERR_INVALID, "%s: unknown key; allowed here: %s", field, known);
    return locate(r, line);
}

static enum mu_status wrong_shape(struct job_file_reader *r)
{
    const char *field = r->path[0] ? r->path : "the file";
    const char *allowed = "a single value", *advice = "write field: value";
    if (strstr(r->message, "Expecting MAPPING")) {
        allowed = "a group of fields";
        advice = r->path[0] ? "write group: {field: value, ...}, or leave the group out"
                            : "write a line job: NAME and so on";
    } else if (strstr(r->message, "SEQUENCE") && !strstr(r->message, "Expecting STRING")) {
        allowed = "a list of two numbers";
        advice = "write [0.9, 0.95]";
    }
    const char *got = strstr(r->message, "got event: SCALAR")           ? "a single value"
                      : strstr(r->message, "got event: SEQUENCE_START") ? "a list"
                      : strstr(r->message, "got event: MAPPING_START")  ? "a group"
                                                                        : r->message;
    mu_fail(r->err, MU_ERR_INVALID, "%s: %s is not allowed: %s; %s", field, got, allowed, advice);
    return locate(r, r->line);
}

static enum mu_status refused_by_cyaml(struct job_file_reader *r, cyaml_err_t code)
{
    const char *field = r->path[0] ? r->path : "the file";
    switch (code) {
    case CYAML_ERR_OOM:
        return mu_fail(r->err, MU_ERR_NO_MEMORY, "%s: out of memory", r->name);
    case CYAML_ERR_INVALID_KEY:
        return unknown_key(r);
    case CYAML_ERR_INVALID_VALUE:
        return wrong_shape(r);
    case CYAML_ERR_SEQUENCE_ENTRIES_MIN:
    case CYAML_ERR_SEQUENCE_ENTRIES_MAX:
    case CYAML_ERR_SEQUENCE_FIXED_COUNT:
        mu_fail(r->err, MU_ERR_INVALID, "%s: a list of another length is not allowed: two numbers; write [0.9, 0.95]",
                field);
        return locate(r, mu_yaml_index_line(&r->index, field));
    default:
        break;
    }
    if (strstr(r->message, "already seen")) {
        mu_fail(r->err, MU_ERR_INVALID, "%s: given twice, first at line %" PRIu32 "; keep one of the two", field,
                mu_yaml_index_first_line(&r->index, field));
        return locate(r, mu_yaml_index_line(&r->index, field));
    }
    mu_fail(r->err, MU_ERR_INVALID, "%s: %s; %s", field, r->message[0] ? r->message : cyaml_strerror(code), see_docs);
    return locate(r, r->line);
}

/* The message begins with the path of a field: the line number follows from it. */
static enum mu_status locate_field(struct job_file_reader *r)
{
    char field[MU_YAML_PATH_SIZE];
    size_t length = strcspn(r->err->text, ":");
    snprintf(field, sizeof field, "%.*s", (int)(length < sizeof field ? length : 0), r->err->text);
    return locate(r, mu_yaml_index_line(&r->index, field));
}

/* Notes which checkpoint the job starts from. Its model is compared last: that the job's own is sound comes first. */
static enum mu_status judge(struct job_file_reader *r, struct mu_job_spec *spec)
{
    struct mu_manifest *manifest = NULL;
    const char *dir = spec->init.path;
    enum mu_status status = MU_OK;
    if (dir[0]) {
        status = mu_manifest_read(dir, &manifest, r->err);
        if (status != MU_OK) {
            mu_error_prefix(r->err, "init.path");
            return locate_field(r);
        }
        memcpy(spec->init.sha256, manifest->sha256, sizeof spec->init.sha256);
    }
    status = mu_job_spec_check(spec, r->err);
    if (status == MU_OK && manifest)
        status = mu_manifest_check_model(manifest, &spec->model, dir, r->err);
    mu_manifest_free(manifest);
    return status == MU_OK ? MU_OK : locate_field(r);
}

static enum mu_status check_text(const struct job_file_reader *r, const char *text, size_t size_bytes)
{
    if (size_bytes > MU_JOB_FILE_SIZE_MAX)
        return mu_fail(r->err, MU_ERR_LIMIT,
                       "%s: larger than %d bytes, which no job file is; give the path of a job file, %s", r->name,
                       MU_JOB_FILE_SIZE_MAX, see_docs);
    if (memchr(text, 0, size_bytes))
        return mu_fail(r->err, MU_ERR_INVALID, "%s: contains zero bytes; a job file is YAML text in UTF-8, %s", r->name,
                       see_docs);
    size_t blank = 0;
    while (blank < size_bytes && strchr(" \t\r\n", text[blank]))
        blank++;
    if (blank == size_bytes)
        return mu_fail(r->err, MU_ERR_INVALID,
                       "%s: empty; a job file has at least job, model, data, batch and steps, %s", r->name, see_docs);
    return MU_OK;
}

enum mu_status mu_job_file_parse(const char *name, const char *directory, const void *text, size_t size_bytes,
                                 struct mu_job_spec *ret_spec, struct mu_error *err)
{
    struct mu_error own_err;
    struct job_file_reader r = {.directory = directory, .err = err ? err : &own_err};
    copy_shown(r.name, sizeof r.name, name, true);
    enum mu_status status = check_text(&r, text, size_bytes);
    if (status)
        return status;
    status = mu_yaml_index_build(text, size_bytes, &r.index, r.err);
    if (status) {
        char full[MU_ERROR_TEXT_SIZE]; /* the message begins with its line number */
        snprintf(full, sizeof full, "%s:%.*s", r.name, (int)(sizeof full - NAME_SHOWN_SIZE - 2), r.err->text);
        return mu_fail(r.err, status, "%s", full);
    }
    if (r.index.count == 0)
        return mu_fail(r.err, MU_ERR_INVALID,
                       "%s: holds no fields; a job file has at least job, model, data, batch and steps, %s", r.name,
                       see_docs);

    struct job_text *document = NULL;
    const cyaml_config_t config = {.log_fn = capture_log,
                                   .log_ctx = &r,
                                   .log_level = CYAML_LOG_NOTICE,
                                   .mem_fn = cyaml_mem,
                                   .flags = CYAML_CFG_NO_ALIAS};
    cyaml_err_t code = cyaml_load_data(text, size_bytes, &config, &top_schema, (cyaml_data_t **)&document, NULL);
    if (code != CYAML_OK)
        return refused_by_cyaml(&r, code);
    MU_ASSERT(document);
    struct mu_job_spec spec;
    status = job_file_read_fields(&r, document, &spec);
    if (status == MU_OK)
        status = judge(&r, &spec);
    if (status == MU_OK)
        *ret_spec = spec;
    cyaml_free(&config, &top_schema, document, 0);
    return status;
}

/* ---- Files. ---- */

/* The whole file, at most one byte more than the limit, so that too large is seen as such. */
static enum mu_status slurp(const char *path, const char *shown, char *buffer, size_t *ret_size, struct mu_error *err)
{
    enum mu_status status = MU_OK;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return mu_fail_errno(err, errno, "%s: cannot open the job file", shown);
    struct stat info;
    size_t size = 0;
    if (fstat(fd, &info) != 0) {
        status = mu_fail_errno(err, errno, "%s: cannot read the job file", shown);
        goto out_close;
    }
    if (S_ISDIR(info.st_mode)) {
        status = mu_fail(err, MU_ERR_INVALID, "%s: is a directory; give the path of a job file in it", shown);
        goto out_close;
    }
    while (size <= MU_JOB_FILE_SIZE_MAX) {
        ssize_t got = read(fd, buffer + size, MU_JOB_FILE_SIZE_MAX + 1 - size);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0) {
            status = mu_fail_errno(err, errno, "%s: cannot read the job file", shown);
            goto out_close;
        }
        if (got == 0)
            break;
        size += (size_t)got;
    }
    *ret_size = size;
out_close:
    close(fd);
    return status;
}

/* The absolute directory that holds the file. */
static enum mu_status directory_of(const char *path, const char *shown, char **ret_directory, struct mu_error *err)
{
    const char *slash = strrchr(path, '/');
    char *parent = !slash ? strdup(".") : slash == path ? strdup("/") : strndup(path, (size_t)(slash - path));
    if (!parent)
        return mu_fail(err, MU_ERR_NO_MEMORY, "%s: out of memory", shown);
    char *directory = realpath(parent, NULL);
    enum mu_status status = MU_OK;
    if (directory)
        *ret_directory = directory;
    else
        status = mu_fail_errno(err, errno, "%s: cannot find the directory of the job file", shown);
    free(parent);
    return status;
}

enum mu_status mu_job_file_read(const char *path, struct mu_job_spec *ret_spec, struct mu_error *err)
{
    char shown[NAME_SHOWN_SIZE];
    copy_shown(shown, sizeof shown, path, true);
    enum mu_status status = MU_OK;
    char *directory = NULL;
    size_t size = 0;
    char *buffer = malloc(MU_JOB_FILE_SIZE_MAX + 1);
    if (!buffer)
        return mu_fail(err, MU_ERR_NO_MEMORY, "%s: out of memory", shown);
    if ((status = slurp(path, shown, buffer, &size, err)) || (status = directory_of(path, shown, &directory, err)))
        goto out;
    status = mu_job_file_parse(path, directory, buffer, size, ret_spec, err);
out:
    free(directory);
    free(buffer);
    return status;
}
