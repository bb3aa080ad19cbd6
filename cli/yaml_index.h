/* Where things stand in a YAML text: the line of every key, and what a job file may not contain.
 *
 * libcyaml says nothing about lines once a value has been loaded; this pass over libyaml's events fills that in. It
 * also finds what libcyaml accepts silently: anchors, tags, further documents. No ownership beyond the caller's struct;
 * not shared between threads. */
#ifndef MU_CLI_YAML_INDEX_H
#define MU_CLI_YAML_INDEX_H

#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

enum {
    MU_YAML_KEYS_MAX = 256,
    MU_YAML_DEPTH_MAX = 4,
    MU_YAML_PATH_SIZE = 96, /* "optimizer.betas[1]"; longer paths are cut */
};

struct mu_yaml_index {
    uint32_t count;
    struct {
        char path[MU_YAML_PATH_SIZE];
        uint32_t line; /* from 1 */
    } keys[MU_YAML_KEYS_MAX];
};

/* Fails with one line (without a file name: "LINE: ...") on a syntax error, an anchor, alias or tag, a second document,
 * a complex key, nesting deeper than MU_YAML_DEPTH_MAX or more than MU_YAML_KEYS_MAX keys. */
enum mu_status mu_yaml_index_build(const void *text, size_t size_bytes, struct mu_yaml_index *ret_index,
                                   struct mu_error *err) MU_WARN_UNUSED;

/* Line of the last key with this path, or of its nearest ancestor that is there; 0 when none is. */
uint32_t mu_yaml_index_line(const struct mu_yaml_index *index, const char *path);
/* Line of the first key with exactly this path, or 0. */
uint32_t mu_yaml_index_first_line(const struct mu_yaml_index *index, const char *path);

#endif
