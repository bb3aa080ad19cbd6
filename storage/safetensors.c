#include "storage/safetensors.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "storage/file.h"
#include "storage/json_load.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tensors are written as they lie in memory");

enum { LENGTH_BYTES = 8, NAME_SHOWN_BYTES = 80 };

static const struct {
    const char *name;
    uint8_t bytes;
} dtypes[MU_ST_COUNT] = {
    [MU_ST_BOOL] = {"BOOL", 1},       [MU_ST_U8] = {"U8", 1},           [MU_ST_I8] = {"I8", 1},
    [MU_ST_F8_E5M2] = {"F8_E5M2", 1}, [MU_ST_F8_E4M3] = {"F8_E4M3", 1}, [MU_ST_U16] = {"U16", 2},
    [MU_ST_I16] = {"I16", 2},         [MU_ST_F16] = {"F16", 2},         [MU_ST_BF16] = {"BF16", 2},
    [MU_ST_U32] = {"U32", 4},         [MU_ST_I32] = {"I32", 4},         [MU_ST_F32] = {"F32", 4},
    [MU_ST_U64] = {"U64", 8},         [MU_ST_I64] = {"I64", 8},         [MU_ST_F64] = {"F64", 8},
};

size_t mu_safetensors_dtype_bytes(enum mu_safetensors_dtype dtype)
{
    return dtypes[dtype].bytes;
}

const char *mu_safetensors_dtype_name(enum mu_safetensors_dtype dtype)
{
    return dtypes[dtype].name;
}

/* shape product * element size; false on overflow. */
static bool size_of(const struct mu_safetensors_tensor *tensor, uint64_t *ret_bytes)
{
    uint64_t bytes = dtypes[tensor->dtype].bytes;
    bool has_zero = false;
    for (uint32_t i = 0; i < tensor->rank; i++)
        has_zero |= tensor->shape[i] == 0;
    for (uint32_t i = 0; i < tensor->rank; i++) {
        uint64_t factor = has_zero ? 0 : tensor->shape[i];
        if (__builtin_mul_overflow(bytes, factor, &bytes))
            return false;
    }
    *ret_bytes = bytes;
    return true;
}

/* --- writing --- */

static json_t *encode_tensor(const struct mu_safetensors_tensor *tensor)
{
    json_t *shape = json_array();
    for (uint32_t i = 0; i < tensor->rank; i++)
        if (json_array_append_new(shape, json_integer((json_int_t)tensor->shape[i])) != 0) {
            json_decref(shape);
            return NULL;
        }
    return json_pack("{s:s, s:o, s:[I,I]}", "dtype", dtypes[tensor->dtype].name, "shape", shape, "data_offsets",
                     (json_int_t)tensor->offset_bytes, (json_int_t)(tensor->offset_bytes + tensor->size_bytes));
}

static enum mu_status place_tensor(struct mu_safetensors_tensor *tensor, uint64_t *data_bytes, struct mu_error *err)
{
    size_t name_bytes = strlen(tensor->name);
    if (name_bytes == 0 || name_bytes > MU_SAFETENSORS_NAME_BYTES_MAX || strcmp(tensor->name, "__metadata__") == 0)
        return mu_fail(err, MU_ERR_INVALID,
                       "safetensors: the tensor name '%.*s' is not allowed: 1 to %d bytes, not __metadata__",
                       NAME_SHOWN_BYTES, tensor->name, MU_SAFETENSORS_NAME_BYTES_MAX);
    if (tensor->rank > MU_SAFETENSORS_RANK_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "safetensors: tensor '%.*s': rank %u is not allowed: at most %d",
                       NAME_SHOWN_BYTES, tensor->name, tensor->rank, MU_SAFETENSORS_RANK_MAX);
    uint64_t end;
    if (!size_of(tensor, &tensor->size_bytes) || __builtin_add_overflow(*data_bytes, tensor->size_bytes, &end) ||
        end > INT64_MAX / 2)
        return mu_fail(err, MU_ERR_LIMIT, "safetensors: tensor '%.*s': its size does not fit into a file",
                       NAME_SHOWN_BYTES, tensor->name);
    tensor->offset_bytes = *data_bytes;
    *data_bytes = end;
    return MU_OK;
}

static enum mu_status build_json(struct mu_safetensors_tensor *tensors, size_t tensor_count,
                                 const struct mu_safetensors_pair *metadata, size_t metadata_count,
                                 uint64_t *ret_data_bytes, json_t **ret_root, struct mu_error *err)
{
    enum mu_status status = MU_OK;
    json_t *root = json_object(), *pairs = json_object();
    uint64_t data_bytes = 0;
    bool is_built = root && pairs && json_object_set_new(pairs, "format", json_string("pt")) == 0;
    for (size_t i = 0; is_built && i < metadata_count; i++)
        is_built = json_object_set_new(pairs, metadata[i].key, json_string(metadata[i].value)) == 0;
    if (is_built) {
        is_built = json_object_set_new(root, "__metadata__", pairs) == 0;
        pairs = NULL; /* taken, also on failure */
    }
    for (size_t i = 0; is_built && status == MU_OK && i < tensor_count; i++) {
        status = place_tensor(&tensors[i], &data_bytes, err);
        if (status == MU_OK && json_object_get(root, tensors[i].name))
            status = mu_fail(err, MU_ERR_INVALID, "safetensors: two tensors are named '%.*s'", NAME_SHOWN_BYTES,
                             tensors[i].name);
        if (status == MU_OK)
            is_built = json_object_set_new(root, tensors[i].name, encode_tensor(&tensors[i])) == 0;
    }
    if (status == MU_OK && !is_built)
        status = mu_fail(err, MU_ERR_INVALID,
                         "safetensors: cannot build a header of %zu tensors (a name or value that is not UTF-8, "
                         "or no memory)",
                         tensor_count);
    json_decref(pairs);
    if (status != MU_OK) {
        json_decref(root);
        return status;
    }
    *ret_root = root;
    *ret_data_bytes = data_bytes;
    return MU_OK;
}

enum mu_status mu_safetensors_header_encode(struct mu_safetensors_tensor *tensors, size_t tensor_count,
                                            const struct mu_safetensors_pair *metadata, size_t metadata_count,
                                            size_t align_bytes, uint8_t **ret_bytes, size_t *ret_size_bytes,
                                            uint64_t *ret_data_bytes, struct mu_error *err)
{
    MU_ASSERT(align_bytes >= 8 && align_bytes % 8 == 0);
    if (tensor_count > MU_SAFETENSORS_TENSORS_MAX || metadata_count > MU_SAFETENSORS_METADATA_MAX)
        return mu_fail(err, MU_ERR_LIMIT,
                       "safetensors: %zu tensors and %zu metadata pairs are not allowed: at most %d and %d",
                       tensor_count, metadata_count, MU_SAFETENSORS_TENSORS_MAX, MU_SAFETENSORS_METADATA_MAX);
    json_t *root;
    uint64_t data_bytes;
    enum mu_status status = build_json(tensors, tensor_count, metadata, metadata_count, &data_bytes, &root, err);
    if (status != MU_OK)
        return status;
    uint8_t *bytes = NULL;
    size_t json_bytes = json_dumpb(root, NULL, 0, JSON_COMPACT);
    size_t size_bytes = (LENGTH_BYTES + json_bytes + align_bytes - 1) / align_bytes * align_bytes;
    if (json_bytes == 0 || size_bytes - LENGTH_BYTES > MU_SAFETENSORS_HEADER_BYTES_MAX)
        status = mu_fail(err, MU_ERR_LIMIT, "safetensors: a header of %zu bytes is not allowed: at most %d", json_bytes,
                         MU_SAFETENSORS_HEADER_BYTES_MAX);
    else if (!(bytes = malloc(size_bytes)))
        status = mu_fail(err, MU_ERR_NO_MEMORY, "safetensors: no memory for a header of %zu bytes", size_bytes);
    if (status == MU_OK) {
        for (int i = 0; i < LENGTH_BYTES; i++)
            bytes[i] = (uint8_t)((uint64_t)(size_bytes - LENGTH_BYTES) >> (8 * i));
        memset(bytes + LENGTH_BYTES, ' ', size_bytes - LENGTH_BYTES);
        json_dumpb(root, (char *)bytes + LENGTH_BYTES, json_bytes, JSON_COMPACT);
        *ret_bytes = bytes;
        *ret_size_bytes = size_bytes;
        *ret_data_bytes = data_bytes;
    }
    json_decref(root);
    return status;
}

enum mu_status mu_safetensors_write(const char *path, struct mu_safetensors_tensor *tensors, size_t tensor_count,
                                    const struct mu_safetensors_pair *metadata, size_t metadata_count,
                                    struct mu_error *err)
{
    uint8_t *header;
    size_t header_bytes;
    uint64_t data_bytes;
    enum mu_status status = mu_safetensors_header_encode(tensors, tensor_count, metadata, metadata_count, 8, &header,
                                                         &header_bytes, &data_bytes, err);
    if (status != MU_OK)
        return status;
    char dir[4096];
    mu_file_parent(path, dir, sizeof dir);
    const char *slash = strrchr(path, '/');
    struct mu_file_out out;
    status = mu_file_out_open(&out, dir, slash ? slash + 1 : path, header_bytes + data_bytes, err);
    if (status == MU_OK)
        status = mu_file_out_append(&out, header, header_bytes, err);
    for (size_t i = 0; status == MU_OK && i < tensor_count; i++)
        status = mu_file_out_append(&out, tensors[i].data, (size_t)tensors[i].size_bytes, err);
    if (status == MU_OK)
        status = mu_file_out_sync(&out, err);
    if (status == MU_OK)
        status = mu_file_out_rename(&out, err);
    if (status == MU_OK)
        status = mu_file_out_sync_dir(&out, err);
    mu_file_out_fini(&out);
    free(header);
    return status;
}

/* --- reading --- */

struct mu_safetensors {
    int fd; /* -1: parsed from memory */
    char *what;
    json_t *root; /* owns every string */
    json_t *metadata;
    struct mu_safetensors_tensor *tensors; /* by offset */
    const struct mu_safetensors_tensor **by_name;
    size_t tensor_count;
    uint64_t data_start;
};

static int by_offset(const void *a, const void *b)
{
    const struct mu_safetensors_tensor *left = a, *right = b;
    if (left->offset_bytes != right->offset_bytes)
        return left->offset_bytes < right->offset_bytes ? -1 : 1;
    /* Empty tensors share an offset with their successor and come before it. */
    if (left->size_bytes != right->size_bytes)
        return left->size_bytes < right->size_bytes ? -1 : 1;
    return strcmp(left->name, right->name);
}

static int by_name(const void *a, const void *b)
{
    return strcmp((*(const struct mu_safetensors_tensor *const *)a)->name,
                  (*(const struct mu_safetensors_tensor *const *)b)->name);
}

/* A name from the file as it may be shown: a hostile one must not write to a terminal. */
static const char *shown(const char *name, char out[NAME_SHOWN_BYTES + 1])
{
    size_t i = 0;
    for (; name[i] && i < NAME_SHOWN_BYTES; i++)
        out[i] = (unsigned char)name[i] < ' ' || (unsigned char)name[i] >= 127 ? '?' : name[i];
    out[i] = 0;
    return out;
}

static enum mu_status bad_tensor(const struct mu_safetensors *file, const char *name, struct mu_error *err,
                                 const char *reason)
{
    char text[NAME_SHOWN_BYTES + 1];
    return mu_fail(err, MU_ERR_CORRUPT, "'%s': safetensors header: tensor '%s': %s", file->what, shown(name, text),
                   reason);
}

static bool read_uint(const json_t *value, uint64_t *ret)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return false;
    *ret = (uint64_t)json_integer_value(value);
    return true;
}

static enum mu_status parse_tensor(const struct mu_safetensors *file, const char *name, const json_t *value,
                                   uint64_t data_bytes, struct mu_safetensors_tensor *tensor, struct mu_error *err)
{
    tensor->name = name;
    if (strlen(name) == 0 || strlen(name) > MU_SAFETENSORS_NAME_BYTES_MAX)
        return bad_tensor(file, name, err, "its name is empty or too long");
    const char *dtype = json_string_value(json_object_get(value, "dtype"));
    const json_t *shape = json_object_get(value, "shape"), *offsets = json_object_get(value, "data_offsets");
    if (!dtype || !json_is_array(shape) || !json_is_array(offsets) || json_array_size(offsets) != 2 ||
        json_object_size(value) != 3)
        return bad_tensor(file, name, err, "it must have dtype, shape and data_offsets [begin, end], and nothing else");
    int known = 0;
    while (known < MU_ST_COUNT && strcmp(dtype, dtypes[known].name) != 0)
        known++;
    if (known == MU_ST_COUNT)
        return bad_tensor(file, name, err, "its dtype is unknown");
    tensor->dtype = (enum mu_safetensors_dtype)known;
    if (json_array_size(shape) > MU_SAFETENSORS_RANK_MAX)
        return bad_tensor(file, name, err, "its shape has too many dimensions");
    tensor->rank = (uint32_t)json_array_size(shape);
    for (uint32_t i = 0; i < tensor->rank; i++)
        if (!read_uint(json_array_get(shape, i), &tensor->shape[i]))
            return bad_tensor(file, name, err, "a dimension is not a whole number from 0");
    uint64_t end, wanted_bytes;
    if (!read_uint(json_array_get(offsets, 0), &tensor->offset_bytes) || !read_uint(json_array_get(offsets, 1), &end) ||
        end < tensor->offset_bytes || end > data_bytes)
        return bad_tensor(file, name, err, "its data_offsets are outside the file");
    tensor->size_bytes = end - tensor->offset_bytes;
    if (!size_of(tensor, &wanted_bytes) || wanted_bytes != tensor->size_bytes)
        return bad_tensor(file, name, err, "its data_offsets do not match its shape and dtype");
    return MU_OK;
}

static enum mu_status parse_metadata(struct mu_safetensors *file, struct mu_error *err)
{
    const char *key;
    json_t *value;
    file->metadata = json_object_get(file->root, "__metadata__");
    if (!file->metadata)
        return MU_OK;
    if (!json_is_object(file->metadata) || json_object_size(file->metadata) > MU_SAFETENSORS_METADATA_MAX)
        return mu_fail(err, MU_ERR_CORRUPT,
                       "'%s': safetensors header: __metadata__ must be an object of at most %d strings", file->what,
                       MU_SAFETENSORS_METADATA_MAX);
    json_object_foreach(file->metadata, key, value)
    {
        char text[NAME_SHOWN_BYTES + 1];
        if (!json_is_string(value) || strlen(key) > MU_SAFETENSORS_NAME_BYTES_MAX)
            return mu_fail(err, MU_ERR_CORRUPT,
                           "'%s': safetensors header: __metadata__ '%s' is not a string or its key is too long",
                           file->what, shown(key, text));
    }
    return MU_OK;
}

static enum mu_status parse_tensors(struct mu_safetensors *file, uint64_t data_bytes, struct mu_error *err)
{
    size_t count = json_object_size(file->root) - (file->metadata ? 1 : 0);
    if (count > MU_SAFETENSORS_TENSORS_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "'%s': safetensors header: %zu tensors are not allowed: at most %d",
                       file->what, count, MU_SAFETENSORS_TENSORS_MAX);
    file->tensors = calloc(count ? count : 1, sizeof *file->tensors);
    file->by_name = calloc(count ? count : 1, sizeof(void *));
    if (!file->tensors || !file->by_name)
        return mu_fail(err, MU_ERR_NO_MEMORY, "'%s': no memory for %zu tensors", file->what, count);
    const char *name;
    json_t *value;
    json_object_foreach(file->root, name, value)
    {
        if (value == file->metadata)
            continue;
        enum mu_status status = parse_tensor(file, name, value, data_bytes, &file->tensors[file->tensor_count], err);
        if (status != MU_OK)
            return status;
        file->tensor_count++;
    }
    qsort(file->tensors, file->tensor_count, sizeof *file->tensors, by_offset);
    uint64_t expected = 0;
    for (size_t i = 0; i < file->tensor_count; i++) {
        if (file->tensors[i].offset_bytes != expected)
            return bad_tensor(file, file->tensors[i].name, err,
                              file->tensors[i].offset_bytes > expected ? "there is a hole before its data"
                                                                       : "its data overlap another's");
        expected += file->tensors[i].size_bytes;
        file->by_name[i] = &file->tensors[i];
    }
    if (expected != data_bytes)
        return mu_fail(err, MU_ERR_CORRUPT, "'%s': safetensors: %" PRIu64 " bytes after the last tensor", file->what,
                       data_bytes - expected);
    qsort(file->by_name, file->tensor_count, sizeof(void *), by_name);
    return MU_OK;
}

enum mu_status mu_safetensors_parse(const void *bytes, size_t size_bytes, uint64_t data_bytes, const char *what,
                                    struct mu_safetensors **ret_file, struct mu_error *err)
{
    if (size_bytes > MU_SAFETENSORS_HEADER_BYTES_MAX || size_bytes < 2 || *(const char *)bytes != '{')
        return mu_fail(err, MU_ERR_CORRUPT,
                       "'%s': not a safetensors file (a header of %zu bytes must be 2 to %d and start with '{')", what,
                       size_bytes, MU_SAFETENSORS_HEADER_BYTES_MAX);
    struct mu_safetensors *file = calloc(1, sizeof *file);
    if (!file || !(file->what = strdup(what))) {
        free(file);
        return mu_fail(err, MU_ERR_NO_MEMORY, "'%s': no memory", what);
    }
    file->fd = -1;
    file->data_start = LENGTH_BYTES + (uint64_t)size_bytes;
    enum mu_status status = mu_json_load(bytes, size_bytes, what, &file->root, err);
    if (status == MU_OK)
        status = parse_metadata(file, err);
    if (status == MU_OK)
        status = parse_tensors(file, data_bytes, err);
    if (status != MU_OK) {
        mu_safetensors_close(file);
        return status;
    }
    *ret_file = file;
    return MU_OK;
}

static enum mu_status open_header(int fd, uint64_t file_bytes, const char *path, struct mu_safetensors **ret_file,
                                  struct mu_error *err)
{
    uint8_t length[LENGTH_BYTES];
    if (file_bytes < LENGTH_BYTES + 2)
        return mu_fail(err, MU_ERR_CORRUPT, "'%s': not a safetensors file (only %" PRIu64 " bytes)", path, file_bytes);
    enum mu_status status = mu_file_read_at(fd, path, 0, length, sizeof length, err);
    if (status != MU_OK)
        return status;
    uint64_t header_bytes = 0;
    for (int i = 0; i < LENGTH_BYTES; i++)
        header_bytes |= (uint64_t)length[i] << (8 * i);
    if (header_bytes > MU_SAFETENSORS_HEADER_BYTES_MAX || header_bytes > file_bytes - LENGTH_BYTES)
        return mu_fail(err, MU_ERR_CORRUPT,
                       "'%s': safetensors: a header of %" PRIu64 " bytes is not possible in a file of %" PRIu64
                       " (at most %d)",
                       path, header_bytes, file_bytes, MU_SAFETENSORS_HEADER_BYTES_MAX);
    char *header = malloc((size_t)header_bytes + 1);
    if (!header)
        return mu_fail(err, MU_ERR_NO_MEMORY, "'%s': no memory for a header of %" PRIu64 " bytes", path, header_bytes);
    status = mu_file_read_at(fd, path, LENGTH_BYTES, header, (size_t)header_bytes, err);
    if (status == MU_OK)
        status = mu_safetensors_parse(header, (size_t)header_bytes, file_bytes - LENGTH_BYTES - header_bytes, path,
                                      ret_file, err);
    free(header);
    return status;
}

enum mu_status mu_safetensors_open(const char *path, struct mu_safetensors **ret_file, struct mu_error *err)
{
    int fd;
    uint64_t file_bytes;
    enum mu_status status = mu_file_open_regular(path, &fd, &file_bytes, err);
    if (status != MU_OK)
        return status;
    struct mu_safetensors *file;
    status = open_header(fd, file_bytes, path, &file, err);
    if (status != MU_OK) {
        close(fd);
        return status;
    }
    file->fd = fd;
    *ret_file = file;
    return MU_OK;
}

void mu_safetensors_close(struct mu_safetensors *file)
{
    if (!file)
        return;
    if (file->fd >= 0)
        close(file->fd);
    json_decref(file->root);
    free(file->tensors);
    free(file->by_name);
    free(file->what);
    free(file);
}

size_t mu_safetensors_count(const struct mu_safetensors *file)
{
    return file->tensor_count;
}

const struct mu_safetensors_tensor *mu_safetensors_at(const struct mu_safetensors *file, size_t index)
{
    MU_ASSERT(index < file->tensor_count);
    return &file->tensors[index];
}

const struct mu_safetensors_tensor *mu_safetensors_find(const struct mu_safetensors *file, const char *name)
{
    const struct mu_safetensors_tensor key = {.name = name}, *wanted = &key;
    const struct mu_safetensors_tensor **found =
        bsearch(&wanted, file->by_name, file->tensor_count, sizeof(void *), by_name);
    return found ? *found : NULL;
}

const char *mu_safetensors_metadata(const struct mu_safetensors *file, const char *key)
{
    return json_string_value(json_object_get(file->metadata, key));
}

size_t mu_safetensors_metadata_count(const struct mu_safetensors *file)
{
    return json_object_size(file->metadata);
}

uint64_t mu_safetensors_data_start(const struct mu_safetensors *file)
{
    return file->data_start;
}

enum mu_status mu_safetensors_read_at(struct mu_safetensors *file, uint64_t file_offset_bytes, void *dst,
                                      size_t size_bytes, struct mu_error *err)
{
    MU_ASSERT(file->fd >= 0);
    return mu_file_read_at(file->fd, file->what, file_offset_bytes, dst, size_bytes, err);
}

enum mu_status mu_safetensors_read(struct mu_safetensors *file, const struct mu_safetensors_tensor *tensor, void *dst,
                                   struct mu_error *err)
{
    enum mu_status status =
        mu_safetensors_read_at(file, file->data_start + tensor->offset_bytes, dst, (size_t)tensor->size_bytes, err);
    char text[NAME_SHOWN_BYTES + 1];
    if (status != MU_OK)
        mu_error_prefix(err, "tensor '%s'", shown(tensor->name, text));
    return status;
}
