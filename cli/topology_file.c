#include "cli/topology_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/yaml_reader.h"

static const struct mu_yaml_kind topology_kind = {.noun = "topology file", .size_max = MU_TOPOLOGY_FILE_SIZE_MAX};

/* "LINE: text" becomes "FILE:LINE: text", "0: text" "FILE: text". */
enum mu_status topology_located(const char *name, struct mu_error *err)
{
    char full[MU_ERROR_TEXT_SIZE];
    const char *text = err->text;
    size_t length = strlen(name), most = MU_YAML_NAME_SHOWN_SIZE;
    bool cut = length > most;
    if (strncmp(text, "0: ", 3) == 0)
        text += 1;
    snprintf(full, sizeof full, "%s%s%s%.*s", cut ? "..." : "", name + (cut ? length - most : 0),
             text[0] == ':' ? "" : ":", (int)(sizeof full - most - 5), text);
    return mu_fail(err, err->status, "%s", full);
}

static enum mu_status parse(struct mu_topology *t, enum mu_topology_format format, const char *text, size_t size_bytes,
                            struct mu_error *err)
{
    static const char mark[] = "\xef\xbb\xbf"; /* of UTF-8 */
    if (size_bytes > MU_TOPOLOGY_FILE_SIZE_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "0: larger than %d bytes", MU_TOPOLOGY_FILE_SIZE_MAX);
    if (memchr(text, 0, size_bytes))
        return mu_fail(err, MU_ERR_INVALID, "0: contains zero bytes; a topology file is text");
    if (strncmp(text, mark, 3) == 0) {
        text += 3;
        size_bytes -= 3;
    }
    return format == MU_TOPOLOGY_SLURM        ? topology_read_slurm(t, text, size_bytes, err)
           : format == MU_TOPOLOGY_SLURM_YAML ? topology_read_slurm_yaml(t, text, size_bytes, err)
                                              : topology_read_topograph(t, text, size_bytes, err);
}

enum mu_status mu_topology_file_parse(const char *name, enum mu_topology_format format, const char *text,
                                      size_t size_bytes, struct mu_topology **ret_topology, struct mu_error *err)
{
    struct mu_error own;
    err = err ? err : &own;
    struct mu_topology *t = mu_topology_new();
    char *copy = malloc(size_bytes + 1); /* ends with a 0 */
    enum mu_status status = MU_ERR_NO_MEMORY;
    if (t && copy) {
        memcpy(copy, text, size_bytes);
        copy[size_bytes] = 0;
        status = parse(t, format, copy, size_bytes, err);
    } else {
        mu_fail(err, MU_ERR_NO_MEMORY, "0: out of memory");
    }
    free(copy);
    if (status == MU_OK)
        *ret_topology = t;
    else
        mu_topology_free(t);
    return status == MU_OK ? MU_OK : topology_located(name, err);
}

static bool ends_with(const char *text, const char *end)
{
    size_t length = strlen(text), tail = strlen(end);
    return length >= tail && strcmp(text + length - tail, end) == 0;
}

enum mu_status mu_topology_file_read(const char *path, enum mu_topology_format format,
                                     struct mu_topology **ret_topology, struct mu_error *err)
{
    char *directory, *text;
    size_t size;
    enum mu_status status = mu_yaml_read_file(path, &topology_kind, &directory, &text, &size, err);
    if (status != MU_OK)
        return status;
    if (format == MU_TOPOLOGY_SLURM && (ends_with(path, ".yaml") || ends_with(path, ".yml")))
        format = MU_TOPOLOGY_SLURM_YAML;
    status = mu_topology_file_parse(path, format, text, size, ret_topology, err);
    free(directory);
    free(text);
    return status;
}

enum mu_status mu_topology_file_load(const char *path, struct mu_topology **ret_topology, struct mu_error *err)
{
    struct mu_topology *t;
    enum mu_status status =
        mu_topology_file_read(path, ends_with(path, ".json") ? MU_TOPOLOGY_TOPOGRAPH : MU_TOPOLOGY_SLURM, &t, err);
    if (status != MU_OK)
        return status;
    status = mu_topology_finish(t, err);
    if (status == MU_OK) {
        *ret_topology = t;
        return MU_OK;
    }
    mu_topology_free(t);
    return topology_located(path, err);
}

enum mu_status mu_node_file_read(const char *path, enum mu_node_format format, struct mu_node_file *ret_node,
                                 struct mu_error *err)
{
    char *directory, *text;
    size_t size;
    enum mu_status status = mu_yaml_read_file(path, &topology_kind, &directory, &text, &size, err);
    if (status != MU_OK)
        return status;
    status = mu_node_file_parse(path, format, text, size, ret_node, err);
    free(directory);
    free(text);
    return status;
}
