/* Reads a job file (YAML, docs/job-file.md) into a job record.
 *
 * libcyaml loads the document by a schema; every value is then converted here, so that each refusal is one line
 * "FILE:LINE: field: value V is not allowed: <what is>; <what to do>". Nothing is written to standard error and the
 * result is untouched on failure. Relative paths are taken from the directory of the job file. When the job starts from
 * a checkpoint (init.path), its manifest is read: it must be of the same model, and its hash goes into the record.
 * Thread-safe. */
#ifndef MU_CLI_JOB_FILE_H
#define MU_CLI_JOB_FILE_H

#include <stddef.h>

#include "plan/job.h"

enum { MU_JOB_FILE_SIZE_MAX = 64 * 1024 }; /* bytes */

/* Reads, converts and judges (mu_job_spec_check) the file at `path`. Errors: MU_ERR_NOT_FOUND, MU_ERR_DENIED, MU_ERR_IO
 * when it cannot be read, MU_ERR_INVALID when it is not a valid job file, MU_ERR_LIMIT when it is larger than
 * MU_JOB_FILE_SIZE_MAX. */
enum mu_status mu_job_file_read(const char *path, struct mu_job_spec *ret_spec, struct mu_error *err) MU_WARN_UNUSED;

/* The same for text in memory: `name` stands for FILE in messages, `directory` (absolute) is where relative paths
 * start. */
enum mu_status mu_job_file_parse(const char *name, const char *directory, const void *text, size_t size_bytes,
                                 struct mu_job_spec *ret_spec, struct mu_error *err) MU_WARN_UNUSED;

#endif
