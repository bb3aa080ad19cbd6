/* JSON from files that may be hostile: bounded in memory before the parser builds anything. Pure. */
#ifndef MU_STORAGE_JSON_LOAD_H
#define MU_STORAGE_JSON_LOAD_H

#include <jansson.h>
#include <stddef.h>

#include "common/status.h"

enum {
    MU_JSON_MARKS_MAX = 1 << 21
}; /* brackets, braces, commas outside strings: each may cost the parser some 100 bytes */

/* An object without duplicate keys; MU_ERR_CORRUPT otherwise. `what` names the text in errors; the caller decrefs
 * *ret_root. */
enum mu_status mu_json_load(const char *text, size_t size_bytes, const char *what, json_t **ret_root,
                            struct mu_error *err) MU_WARN_UNUSED;

#endif
