#include "cli/yaml_reader.h"

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

enum {
    VALUE_SHOWN_SIZE = 64, /* most of a value that an error line repeats */
    NAME_SHOWN_SIZE = MU_YAML_NAME_SHOWN_SIZE,
    LOG_LINE_SIZE = MU_YAML_LOG_LINE_SIZE,
    TYPO_DISTANCE_MAX = 3, /* edits between an unknown key and the known one that is suggested */
};

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

static void place(const struct mu_yaml_reader *r, uint32_t line, char *out, size_t out_size)
{
    if (line > 0)
        snprintf(out, out_size, "%s:%" PRIu32, r->name, line);
    else
        snprintf(out, out_size, "%s", r->name);
}

/* Puts FILE:LINE before a message that begins with the path of a field. */
static enum mu_status locate(struct mu_yaml_reader *r, uint32_t line)
{
    char where[NAME_SHOWN_SIZE + 16];
    place(r, line, where, sizeof where);
    return mu_error_prefix(r->err, "%s", where);
}

enum mu_status mu_yaml_refuse(struct mu_yaml_reader *r, const char *field, const char *value, const char *allowed,
                              const char *advice)
{
    char shown[VALUE_SHOWN_SIZE];
    copy_shown(shown, sizeof shown, value, false);
    bool empty = shown[0] == 0;
    mu_fail(r->err, MU_ERR_INVALID, "%s: value %s is not allowed: %s; %s", field, empty ? "(empty)" : shown, allowed,
            advice);
    return locate(r, mu_yaml_index_line(&r->index, field));
}

enum mu_status mu_yaml_missing(struct mu_yaml_reader *r, const char *field, const char *advice)
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
    struct mu_yaml_reader *r = context;
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

static const cyaml_schema_field_t *top_fields(const struct mu_yaml_reader *r)
{
    return ((const cyaml_schema_value_t *)r->kind->schema)->mapping.fields;
}

static const cyaml_schema_field_t *fields_of(const struct mu_yaml_reader *r, const char *group)
{
    if (!group[0])
        return top_fields(r);
    for (const cyaml_schema_field_t *field = top_fields(r); field->key; field++)
        if (strcmp(field->key, group) == 0 && field->value.type == CYAML_MAPPING)
            return field->value.mapping.fields;
    return top_fields(r);
}

/* Finds the known key nearest to `key`: first in its own group, then anywhere. Writes "group.key" or "key"; false when
 * none is near. */
static bool nearest_key(const struct mu_yaml_reader *r, const char *key, char *out, size_t out_size)
{
    unsigned best = TYPO_DISTANCE_MAX + 1;
    const cyaml_schema_field_t *own = fields_of(r, r->path);
    for (const cyaml_schema_field_t *field = own; field->key; field++) {
        unsigned distance = edit_distance(key, field->key);
        if (distance < best && distance < strlen(field->key)) {
            best = distance;
            snprintf(out, out_size, "%s", field->key);
        }
    }
    for (const cyaml_schema_field_t *top = top_fields(r); top->key; top++) {
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

static enum mu_status unknown_key(struct mu_yaml_reader *r)
{
    const char *colon = strstr(r->message, ": ");
    const char *key = colon ? colon + 2 : "";
    char shown[VALUE_SHOWN_SIZE], field[MU_YAML_PATH_SIZE + VALUE_SHOWN_SIZE + 2], suggestion[64];
    copy_shown(shown, sizeof shown, key, false);
    snprintf(field, sizeof field, "%s%s%s", r->path, r->path[0] ? "." : "", shown);
    uint32_t line = mu_yaml_index_line(&r->index, field);
    if (nearest_key(r, key, suggestion, sizeof suggestion)) {
        mu_fail(r->err, MU_ERR_INVALID, "%s: unknown key; did you mean %s?", field, suggestion);
        return locate(r, line);
    }
    char known[256] = "";
    size_t length = 0;
    for (const cyaml_schema_field_t *f = fields_of(r, r->path); f->key && length < sizeof known; f++)
        length += (size_t)snprintf(known + length, sizeof known - length, "%s%s", length ? ", " : "", f->key);
    mu_fail(r->err, MU_ERR_INVALID, "%s: unknown key; allowed here: %s", field, known);
    return locate(r, line);
}

static enum mu_status wrong_shape(struct mu_yaml_reader *r)
{
    const char *field = r->path[0] ? r->path : "the file";
    const char *allowed = "a single value", *advice = "write field: value";
    if (strstr(r->message, "Expecting MAPPING")) {
        allowed = "a group of fields";
        advice = r->path[0] ? "write group: {field: value, ...}, or leave the group out" : r->kind->begin;
    } else if (strstr(r->message, "SEQUENCE") && !strstr(r->message, "Expecting STRING")) {
        allowed = r->kind->list;
        advice = r->kind->list_advice;
    }
    const char *got = strstr(r->message, "got event: SCALAR")           ? "a single value"
                      : strstr(r->message, "got event: SEQUENCE_START") ? "a list"
                      : strstr(r->message, "got event: MAPPING_START")  ? "a group"
                                                                        : r->message;
    mu_fail(r->err, MU_ERR_INVALID, "%s: %s is not allowed: %s; %s", field, got, allowed, advice);
    return locate(r, r->line);
}

static enum mu_status refused_by_cyaml(struct mu_yaml_reader *r, cyaml_err_t code)
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
        mu_fail(r->err, MU_ERR_INVALID, "%s: a list of another length is not allowed: %s; %s", field, r->kind->list,
                r->kind->list_advice);
        return locate(r, mu_yaml_index_line(&r->index, field));
    default:
        break;
    }
    if (strstr(r->message, "already seen")) {
        mu_fail(r->err, MU_ERR_INVALID, "%s: given twice, first at line %" PRIu32 "; keep one of the two", field,
                mu_yaml_index_first_line(&r->index, field));
        return locate(r, mu_yaml_index_line(&r->index, field));
    }
    mu_fail(r->err, MU_ERR_INVALID, "%s: %s; %s", field, r->message[0] ? r->message : cyaml_strerror(code),
            r->kind->docs);
    return locate(r, r->line);
}

/* The message begins with the path of a field: the line number follows from it. */
enum mu_status mu_yaml_locate(struct mu_yaml_reader *r)
{
    char field[MU_YAML_PATH_SIZE];
    size_t length = strcspn(r->err->text, ":");
    snprintf(field, sizeof field, "%.*s", (int)(length < sizeof field ? length : 0), r->err->text);
    return locate(r, mu_yaml_index_line(&r->index, field));
}

/* ---- The whole document. ---- */

static enum mu_status check_text(const struct mu_yaml_reader *r, const char *text, size_t size_bytes)
{
    const struct mu_yaml_kind *kind = r->kind;
    if (size_bytes > kind->size_max)
        return mu_fail(r->err, MU_ERR_LIMIT, "%s: larger than %zu bytes, which no %s is; give the path of a %s, %s",
                       r->name, kind->size_max, kind->noun, kind->noun, kind->docs);
    if (memchr(text, 0, size_bytes))
        return mu_fail(r->err, MU_ERR_INVALID, "%s: contains zero bytes; a %s is YAML text in UTF-8, %s", r->name,
                       kind->noun, kind->docs);
    size_t blank = 0;
    while (blank < size_bytes && strchr(" \t\r\n", text[blank]))
        blank++;
    if (blank == size_bytes)
        return mu_fail(r->err, MU_ERR_INVALID, "%s: empty; a %s has at least %s, %s", r->name, kind->noun, kind->needs,
                       kind->docs);
    return MU_OK;
}

static cyaml_config_t config_of(struct mu_yaml_reader *r)
{
    return (cyaml_config_t){.log_fn = capture_log,
                            .log_ctx = r,
                            .log_level = CYAML_LOG_NOTICE,
                            .mem_fn = cyaml_mem,
                            .flags = CYAML_CFG_NO_ALIAS};
}

enum mu_status mu_yaml_load(struct mu_yaml_reader *r, const char *name, const void *text, size_t size_bytes,
                            void **ret_document)
{
    copy_shown(r->name, sizeof r->name, name, true);
    enum mu_status status = check_text(r, text, size_bytes);
    if (status)
        return status;
    status = mu_yaml_index_build(text, size_bytes, &r->index, r->err);
    if (status) {
        char full[MU_ERROR_TEXT_SIZE]; /* the message begins with its line number */
        snprintf(full, sizeof full, "%s:%.*s", r->name, (int)(sizeof full - NAME_SHOWN_SIZE - 2), r->err->text);
        return mu_fail(r->err, status, "%s", full);
    }
    if (r->index.count == 0)
        return mu_fail(r->err, MU_ERR_INVALID, "%s: holds no fields; a %s has at least %s, %s", r->name, r->kind->noun,
                       r->kind->needs, r->kind->docs);
    cyaml_config_t config = config_of(r);
    cyaml_err_t code = cyaml_load_data(text, size_bytes, &config, r->kind->schema, (cyaml_data_t **)ret_document, NULL);
    if (code != CYAML_OK)
        return refused_by_cyaml(r, code);
    MU_ASSERT(*ret_document);
    return MU_OK;
}

void mu_yaml_free(struct mu_yaml_reader *r, void *document)
{
    cyaml_config_t config = config_of(r);
    cyaml_free(&config, r->kind->schema, document, 0);
}

/* ---- Values. ---- */

static enum mu_status read_u64_up_to(struct mu_yaml_reader *r, const char *field, const char *text, uint64_t max,
                                     uint64_t *ret_value)
{
    if (!text)
        return MU_OK;
    char allowed[64];
    snprintf(allowed, sizeof allowed, "a whole number from 0 to %" PRIu64, max);
    size_t length = strlen(text);
    if (length == 0 || strspn(text, "0123456789") != length)
        return mu_yaml_refuse(r, field, text, allowed, "write digits only");
    errno = 0;
    unsigned long long value = strtoull(text, NULL, 10);
    if (errno == ERANGE || value > max)
        return mu_yaml_refuse(r, field, text, allowed, "write a smaller number");
    *ret_value = value;
    return MU_OK;
}

enum mu_status mu_yaml_read_u64(struct mu_yaml_reader *r, const char *field, const char *text, uint64_t *ret_value)
{
    return read_u64_up_to(r, field, text, UINT64_MAX, ret_value);
}

enum mu_status mu_yaml_read_u32(struct mu_yaml_reader *r, const char *field, const char *text, uint32_t *ret_value)
{
    uint64_t value = *ret_value;
    enum mu_status status = read_u64_up_to(r, field, text, UINT32_MAX, &value);
    if (status == MU_OK)
        *ret_value = (uint32_t)value;
    return status;
}

/* [+-] digits [. digits] [e [+-] digits], nothing that strtod accepts beside (nan, inf, hexadecimal, blanks). */
static bool is_decimal(const char *text)
{
    text += *text == '+' || *text == '-';
    size_t whole = strspn(text, "0123456789"), fraction = 0;
    text += whole;
    if (*text == '.') {
        fraction = strspn(text + 1, "0123456789");
        text += 1 + fraction;
    }
    if (whole + fraction == 0)
        return false;
    if (*text == 'e' || *text == 'E') {
        text++;
        text += *text == '+' || *text == '-';
        size_t exponent = strspn(text, "0123456789");
        if (exponent == 0)
            return false;
        text += exponent;
    }
    return *text == 0;
}

enum mu_status mu_yaml_read_real(struct mu_yaml_reader *r, const char *field, const char *text, double *ret_value)
{
    if (!text)
        return MU_OK;
    if (!is_decimal(text))
        return mu_yaml_refuse(r, field, text, "a finite decimal number", "write it as 0.1 or 6.0e-4");
    errno = 0;
    double value = strtod(text, NULL);
    if (errno == ERANGE)
        return mu_yaml_refuse(r, field, text, "a number that a double can hold", "write one between 1e-300 and 1e300");
    *ret_value = value;
    return MU_OK;
}

enum mu_status mu_yaml_read_choice(struct mu_yaml_reader *r, const char *field, const char *text,
                                   const struct mu_yaml_choice *choices, const char *allowed, int *ret_value)
{
    if (!text)
        return MU_OK;
    for (; choices->name; choices++) {
        if (strcmp(text, choices->name) == 0) {
            *ret_value = choices->value;
            return MU_OK;
        }
    }
    return mu_yaml_refuse(r, field, text, allowed, "write one of these words");
}

/* Makes `text` absolute by the directory of the job file. */
enum mu_status mu_yaml_read_path(struct mu_yaml_reader *r, const char *field, const char *text,
                                 char ret_path[MU_PATH_SIZE])
{
    if (!text)
        return MU_OK;
    if (text[0] == 0)
        return mu_yaml_refuse(r, field, text, "a path", "write a path, absolute or relative to the job file");
    if (text[0] == '~')
        return mu_yaml_refuse(r, field, text, "a path without ~, which is not expanded",
                              "write the path out, or ./~name for such a name");
    bool absolute = text[0] == '/', slash = strcmp(r->directory, "/") == 0;
    if (strncmp(text, "./", 2) == 0)
        text += 2;
    char path[MU_PATH_SIZE];
    int length = snprintf(path, sizeof path, "%s%s%s", absolute ? "" : r->directory,
                          absolute || slash ? (absolute ? "" : "/") : "/", text);
    if (length < 0 || (size_t)length >= sizeof path) {
        char allowed[64];
        snprintf(allowed, sizeof allowed, "at most %d bytes as an absolute path", MU_PATH_SIZE - 1);
        return mu_yaml_refuse(r, field, text, allowed, "choose a shorter one");
    }
    memcpy(ret_path, path, (size_t)length + 1);
    return MU_OK;
}

/* A number of at least 1; `word` (may be NULL) leaves the default in place, as an absent field does. */
enum mu_status mu_yaml_read_positive(struct mu_yaml_reader *r, const char *field, const char *text, const char *word,
                                     uint32_t *ret_value)
{
    if (!text || (word && strcmp(text, word) == 0))
        return MU_OK;
    char allowed[80];
    snprintf(allowed, sizeof allowed, "%s%sa whole number of at least 1", word ? word : "", word ? ", or " : "");
    size_t length = strlen(text), digits = strspn(text, "0123456789");
    errno = 0;
    unsigned long long value = strtoull(text, NULL, 10);
    if (length > 0 && digits == length && value >= 1) {
        if (errno == 0 && value <= UINT32_MAX) {
            *ret_value = (uint32_t)value;
            return MU_OK;
        }
        snprintf(allowed, sizeof allowed, "at most %" PRIu32, UINT32_MAX);
    }
    return mu_yaml_refuse(r, field, text, allowed,
                          word ? "write one of these, or leave the field out" : "leave the field out for its default");
}

/* ---- Files. ---- */

/* The whole file, at most one byte more than the limit, so that too large is seen as such. */
static enum mu_status slurp(const char *path, const char *shown, const struct mu_yaml_kind *kind, char *buffer,
                            size_t *ret_size, struct mu_error *err)
{
    enum mu_status status = MU_OK;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return mu_fail_errno(err, errno, "%s: cannot open the %s", shown, kind->noun);
    struct stat info;
    size_t size = 0;
    if (fstat(fd, &info) != 0) {
        status = mu_fail_errno(err, errno, "%s: cannot read the %s", shown, kind->noun);
        goto out_close;
    }
    if (S_ISDIR(info.st_mode)) {
        status = mu_fail(err, MU_ERR_INVALID, "%s: is a directory; give the path of a %s in it", shown, kind->noun);
        goto out_close;
    }
    while (size <= kind->size_max) {
        ssize_t got = read(fd, buffer + size, kind->size_max + 1 - size);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0) {
            status = mu_fail_errno(err, errno, "%s: cannot read the %s", shown, kind->noun);
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
static enum mu_status directory_of(const char *path, const char *shown, const struct mu_yaml_kind *kind,
                                   char **ret_directory, struct mu_error *err)
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
        status = mu_fail_errno(err, errno, "%s: cannot find the directory of the %s", shown, kind->noun);
    free(parent);
    return status;
}

enum mu_status mu_yaml_read_file(const char *path, const struct mu_yaml_kind *kind, char **ret_directory,
                                 char **ret_text, size_t *ret_size, struct mu_error *err)
{
    char shown[NAME_SHOWN_SIZE];
    copy_shown(shown, sizeof shown, path, true);
    char *text = malloc(kind->size_max + 1);
    if (!text)
        return mu_fail(err, MU_ERR_NO_MEMORY, "%s: out of memory", shown);
    enum mu_status status = slurp(path, shown, kind, text, ret_size, err);
    if (status == MU_OK)
        status = directory_of(path, shown, kind, ret_directory, err);
    if (status == MU_OK)
        *ret_text = text;
    else
        free(text);
    return status;
}
