/* The job record as JSON, for manifests and for programs that read the command line's output.
 *
 * Lossless: reals survive a dump with 17 significant digits (jansson's default) and `seed`, which may exceed 2^53, is a
 * decimal string. Canonical when dumped with JSON_COMPACT | JSON_SORT_KEYS: equal records give equal bytes. Pure apart
 * from memory. */
#ifndef MU_STORAGE_JOB_JSON_H
#define MU_STORAGE_JOB_JSON_H

#include <jansson.h>
#include <stddef.h>

#include "plan/job.h"

/* A new reference, owned by the caller; NULL when memory is out. The spec must have passed mu_job_spec_check. */
json_t *mu_job_spec_to_json(const struct mu_job_spec *spec);

/* Strict: every key must be there with its type (those that came after the first version may be absent and then have
 * their defaults), no other key may be, and the record must pass mu_job_spec_check. The error line names the key, e.g.
 * "optimizer.lr: missing". `json` stays the caller's. */
enum mu_status mu_job_spec_from_json(const json_t *json, struct mu_job_spec *ret_spec,
                                     struct mu_error *err) MU_WARN_UNUSED;

/* The canonical text (compact, sorted keys), as manifests hold it; from malloc, owned by the caller; NULL when memory
 * is out. */
char *mu_job_spec_to_text(const struct mu_job_spec *spec);
/* Reads such a text; also strict about duplicate keys and trailing bytes (MU_ERR_CORRUPT when it is no JSON object).
 * `what` names the text in errors. */
enum mu_status mu_job_spec_from_text(const char *text, size_t size_bytes, const char *what,
                                     struct mu_job_spec *ret_spec, struct mu_error *err) MU_WARN_UNUSED;

#endif
