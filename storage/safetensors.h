/* The safetensors format: u64 little-endian N | N bytes of JSON | tensors, packed, row-major, little-endian.
 *
 * The reader is strict and meant for hostile files: header at most MU_SAFETENSORS_HEADER_BYTES_MAX, known types, shapes
 * that match the sizes, data that is contiguous from 0 to the end of the file with no hole, overlap or tail, no
 * duplicate name. The writer makes files that other readers accept ("format":"pt" in the metadata). No threads; objects
 * belong to the caller. */
#ifndef MU_STORAGE_SAFETENSORS_H
#define MU_STORAGE_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

enum {
    MU_SAFETENSORS_HEADER_BYTES_MAX = 100000000,
    MU_SAFETENSORS_RANK_MAX = 8,
    MU_SAFETENSORS_NAME_BYTES_MAX = 1024, /* of a tensor or a metadata key */
    MU_SAFETENSORS_TENSORS_MAX = 1 << 17,
    MU_SAFETENSORS_METADATA_MAX = 1 << 17, /* pairs */
};

enum mu_safetensors_dtype {
    MU_ST_BOOL,
    MU_ST_U8,
    MU_ST_I8,
    MU_ST_F8_E5M2,
    MU_ST_F8_E4M3,
    MU_ST_U16,
    MU_ST_I16,
    MU_ST_F16,
    MU_ST_BF16,
    MU_ST_U32,
    MU_ST_I32,
    MU_ST_F32,
    MU_ST_U64,
    MU_ST_I64,
    MU_ST_F64,
    MU_ST_COUNT
};
size_t mu_safetensors_dtype_bytes(enum mu_safetensors_dtype dtype);
const char *mu_safetensors_dtype_name(enum mu_safetensors_dtype dtype);

struct mu_safetensors_tensor {
    const char *name; /* UTF-8 */
    enum mu_safetensors_dtype dtype;
    uint32_t rank; /* 0: a scalar */
    uint64_t shape[MU_SAFETENSORS_RANK_MAX];
    uint64_t offset_bytes; /* from the start of the data; set by the reader and by header_encode, ignored on input */
    uint64_t size_bytes;   /* likewise */
    const void *data;      /* writer only */
};
struct mu_safetensors_pair {
    const char *key, *value;
};

/* The first 8 + N bytes of a file with these tensors in this order, padded with spaces so that the data starts at a
 * multiple of align_bytes (a multiple of 8). Sets offset_bytes and size_bytes of each tensor. *ret_bytes is from
 * malloc. */
enum mu_status mu_safetensors_header_encode(struct mu_safetensors_tensor *tensors, size_t tensor_count,
                                            const struct mu_safetensors_pair *metadata, size_t metadata_count,
                                            size_t align_bytes, uint8_t **ret_bytes, size_t *ret_size_bytes,
                                            uint64_t *ret_data_bytes, struct mu_error *err) MU_WARN_UNUSED;

/* Writes one file durably: temporary name, fsync, rename, fsync of the directory. `path` keeps its old content on any
 * error. */
enum mu_status mu_safetensors_write(const char *path, struct mu_safetensors_tensor *tensors, size_t tensor_count,
                                    const struct mu_safetensors_pair *metadata, size_t metadata_count,
                                    struct mu_error *err) MU_WARN_UNUSED;

struct mu_safetensors; /* an open file whose header was judged */
enum mu_status mu_safetensors_open(const char *path, struct mu_safetensors **ret_file,
                                   struct mu_error *err) MU_WARN_UNUSED;
/* Judges a header in memory: `bytes` is what follows the 8-byte length, `data_bytes` the size of the data part. `what`
 * names it in errors. The result has no file: everything but `read` works. */
enum mu_status mu_safetensors_parse(const void *bytes, size_t size_bytes, uint64_t data_bytes, const char *what,
                                    struct mu_safetensors **ret_file, struct mu_error *err) MU_WARN_UNUSED;
void mu_safetensors_close(struct mu_safetensors *file); /* NULL is fine */

size_t mu_safetensors_count(const struct mu_safetensors *file);
/* In order of their data. The pointer lives as long as the file. */
const struct mu_safetensors_tensor *mu_safetensors_at(const struct mu_safetensors *file, size_t index);
const struct mu_safetensors_tensor *mu_safetensors_find(const struct mu_safetensors *file,
                                                        const char *name);               /* NULL: none */
const char *mu_safetensors_metadata(const struct mu_safetensors *file, const char *key); /* NULL: none */
size_t mu_safetensors_metadata_count(const struct mu_safetensors *file);
uint64_t mu_safetensors_data_start(const struct mu_safetensors *file); /* bytes from the start of the file */
/* Reads a whole tensor into `dst` (tensor->size_bytes). */
enum mu_status mu_safetensors_read(struct mu_safetensors *file, const struct mu_safetensors_tensor *tensor, void *dst,
                                   struct mu_error *err) MU_WARN_UNUSED;
/* Bytes of the file itself: for reading a tensor in parts (from data_start + its offset_bytes) and for hashing the
 * whole. */
enum mu_status mu_safetensors_read_at(struct mu_safetensors *file, uint64_t file_offset_bytes, void *dst,
                                      size_t size_bytes, struct mu_error *err) MU_WARN_UNUSED;

#endif
