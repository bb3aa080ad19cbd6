/* Reads a YAML file of ours (a job, a cluster) by a schema of libcyaml, so that each refusal is one line
 * "FILE:LINE: field: value V is not allowed: <what is>; <what to do>".
 *
 * libcyaml loads the document with every value as a string, NULL when absent; the caller converts the strings with the
 * functions below, which name the field. Nothing is written to standard error. Thread-safe: a reader belongs to its
 * caller. */
#ifndef MU_CLI_YAML_READER_H
#define MU_CLI_YAML_READER_H

#include <stddef.h>
#include <stdint.h>

#include "cli/yaml_index.h"
#include "common/status.h"
#include "plan/job.h"

enum {
    MU_YAML_NAME_SHOWN_SIZE = 128, /* most of the file's name, its end */
    MU_YAML_LOG_LINE_SIZE = 256,   /* of libcyaml's messages */
};

/* A kind of file: what error lines call it, and its schema. */
struct mu_yaml_kind {
    const char *noun;               /* "job file" */
    const char *needs;              /* its required fields, in words */
    const char *begin;              /* advice where the file is no mapping */
    const char *list, *list_advice; /* what a list may be, and an example */
    const char *docs;               /* "see docs/..." */
    const void *schema;             /* cyaml_schema_value_t of the top mapping */
    size_t size_max;                /* bytes */
};

/* One reading. The caller sets the first three. */
struct mu_yaml_reader {
    const struct mu_yaml_kind *kind;
    const char *directory; /* absolute: where relative paths start */
    struct mu_error *err;
    char name[MU_YAML_NAME_SHOWN_SIZE]; /* FILE in messages */
    struct mu_yaml_index index;
    /* What libcyaml logged: its first message, the path and line of its backtrace. */
    char message[MU_YAML_LOG_LINE_SIZE];
    char path[MU_YAML_PATH_SIZE];
    uint32_t line;
};

/* The file's text (free it) and its absolute directory (free it). MU_ERR_NOT_FOUND, MU_ERR_DENIED, MU_ERR_IO; one byte
 * more than size_max is read, so that mu_yaml_load sees what is too large. */
enum mu_status mu_yaml_read_file(const char *path, const struct mu_yaml_kind *kind, char **ret_directory,
                                 char **ret_text, size_t *ret_size, struct mu_error *err) MU_WARN_UNUSED;
/* The document, as the schema's struct; end it with mu_yaml_free. MU_ERR_INVALID, MU_ERR_LIMIT. */
enum mu_status mu_yaml_load(struct mu_yaml_reader *r, const char *name, const void *text, size_t size_bytes,
                            void **ret_document) MU_WARN_UNUSED;
void mu_yaml_free(struct mu_yaml_reader *r, void *document);

/* ---- Refusals. Each returns its status. ---- */

/* "FILE:LINE: field: value V is not allowed: <allowed>; <advice>". */
enum mu_status mu_yaml_refuse(struct mu_yaml_reader *r, const char *field, const char *value, const char *allowed,
                              const char *advice);
/* "FILE:LINE: field: is missing; <advice>". */
enum mu_status mu_yaml_missing(struct mu_yaml_reader *r, const char *field, const char *advice);
/* Puts FILE:LINE before r->err, whose text begins with the path of a field. */
enum mu_status mu_yaml_locate(struct mu_yaml_reader *r);

/* ---- Values. A NULL text leaves the default in place. ---- */

struct mu_yaml_choice { /* a list of them ends with a NULL name */
    const char *name;
    int value;
};

enum mu_status mu_yaml_read_u64(struct mu_yaml_reader *r, const char *field, const char *text,
                                uint64_t *ret_value) MU_WARN_UNUSED;
enum mu_status mu_yaml_read_u32(struct mu_yaml_reader *r, const char *field, const char *text,
                                uint32_t *ret_value) MU_WARN_UNUSED;
enum mu_status mu_yaml_read_real(struct mu_yaml_reader *r, const char *field, const char *text,
                                 double *ret_value) MU_WARN_UNUSED;
enum mu_status mu_yaml_read_choice(struct mu_yaml_reader *r, const char *field, const char *text,
                                   const struct mu_yaml_choice *choices, const char *allowed,
                                   int *ret_value) MU_WARN_UNUSED;
/* Made absolute by r->directory. */
enum mu_status mu_yaml_read_path(struct mu_yaml_reader *r, const char *field, const char *text,
                                 char ret_path[MU_PATH_SIZE]) MU_WARN_UNUSED;
/* A number of at least 1; `word` (may be NULL) leaves the default in place too. */
enum mu_status mu_yaml_read_positive(struct mu_yaml_reader *r, const char *field, const char *text, const char *word,
                                     uint32_t *ret_value) MU_WARN_UNUSED;

#endif
