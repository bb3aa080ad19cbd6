#include "storage/manifest.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/hash.h"
#include "storage/file.h"
#include "storage/json_load.h"
#include "storage/piece_format.h"

/* The file: one line of fixed form, then the body it vouches for. The braces of the two make one JSON document. */
#define HASH_KEY    "\"xxh3\":\""
#define HEAD_FORMAT "{\"format\":\"muster-checkpoint-%d\"," HASH_KEY "%s\",\"manifest\":\n"
#define TAIL        "}\n"
enum { HEAD_SIZE = 128, NONCE_TEXT_SIZE = 33 };

struct mu_manifest *mu_manifest_new(void)
{
    return calloc(1, sizeof(struct mu_manifest));
}

void mu_manifest_free(struct mu_manifest *manifest)
{
    if (!manifest)
        return;
    for (size_t i = 0; i < manifest->piece_count; i++)
        free(manifest->pieces[i].entries);
    free(manifest->pieces);
    free(manifest->job_record);
    free(manifest);
}

enum mu_status mu_manifest_set_job_record(struct mu_manifest *manifest, const char *text)
{
    if (strlen(text) > MU_MANIFEST_JOB_RECORD_BYTES_MAX)
        return MU_ERR_LIMIT;
    char *copy = strdup(text);
    if (!copy)
        return MU_ERR_NO_MEMORY;
    free(manifest->job_record);
    manifest->job_record = copy;
    return MU_OK;
}

/* Doubles an array that is full. */
static enum mu_status grow(void **array, size_t count, size_t *capacity, size_t element_bytes)
{
    if (count < *capacity)
        return MU_OK;
    size_t wanted = *capacity ? *capacity * 2 : 8;
    void *grown = realloc(*array, wanted * element_bytes);
    if (!grown)
        return MU_ERR_NO_MEMORY;
    *array = grown;
    *capacity = wanted;
    return MU_OK;
}

enum mu_status mu_manifest_add_piece(struct mu_manifest *manifest, const char *file, uint64_t size_bytes,
                                     struct mu_hash128 xxh3)
{
    if (!mu_piece_file_name_is_valid(file))
        return MU_ERR_INVALID;
    if (manifest->piece_count >= MU_MANIFEST_PIECES_MAX)
        return MU_ERR_LIMIT;
    void *array = manifest->pieces;
    enum mu_status status = grow(&array, manifest->piece_count, &manifest->piece_capacity, sizeof *manifest->pieces);
    manifest->pieces = array;
    if (status != MU_OK)
        return status;
    struct mu_manifest_piece *piece = &manifest->pieces[manifest->piece_count++];
    *piece = (struct mu_manifest_piece){.size_bytes = size_bytes, .xxh3 = xxh3};
    strcpy(piece->file, file);
    return MU_OK;
}

enum mu_status mu_manifest_add_entry(struct mu_manifest *manifest, const struct mu_manifest_entry *entry)
{
    MU_ASSERT(manifest->piece_count > 0);
    if (entry->kind >= MU_PIECE_KIND_COUNT || !mu_piece_cell_name_is_valid(entry->cell_name) ||
        entry->chunk_count == 0 || entry->chunk_count >= UINT32_MAX - entry->first_chunk)
        return MU_ERR_INVALID;
    struct mu_manifest_piece *piece = &manifest->pieces[manifest->piece_count - 1];
    if (piece->entry_count >= MU_PIECE_ENTRIES_MAX)
        return MU_ERR_LIMIT;
    void *array = piece->entries;
    enum mu_status status = grow(&array, piece->entry_count, &piece->entry_capacity, sizeof *piece->entries);
    piece->entries = array;
    if (status == MU_OK)
        piece->entries[piece->entry_count++] = *entry;
    return status;
}

enum mu_status mu_manifest_add_runs(struct mu_manifest *manifest, const struct mu_model_spec *spec, const char *file,
                                    uint64_t size_bytes, struct mu_hash128 xxh3, const struct mu_chunk_run *runs,
                                    uint32_t run_count)
{
    size_t count = mu_piece_entries_of_runs(spec, runs, run_count, NULL, 0);
    struct mu_piece_entry *entries = calloc(count ? count : 1, sizeof *entries);
    if (!entries)
        return MU_ERR_NO_MEMORY;
    mu_piece_entries_of_runs(spec, runs, run_count, entries, count);
    enum mu_status status = mu_manifest_add_piece(manifest, file, size_bytes, xxh3);
    for (size_t i = 0; i < count && status == MU_OK; i++) {
        struct mu_manifest_entry entry = {.kind = entries[i].kind,
                                          .cell = entries[i].cell,
                                          .first_chunk = entries[i].first_chunk,
                                          .chunk_count = entries[i].chunk_count};
        strcpy(entry.cell_name, entries[i].cell_name);
        status = mu_manifest_add_entry(manifest, &entry);
    }
    free(entries);
    return status;
}

enum mu_status mu_manifest_add_chunks(struct mu_manifest *manifest, const struct mu_model_spec *spec, const char *file,
                                      uint64_t size_bytes, struct mu_hash128 xxh3, uint32_t first_chunk,
                                      uint32_t chunk_count)
{
    struct mu_chunk_run run = {.first = first_chunk, .count = chunk_count};
    return mu_manifest_add_runs(manifest, spec, file, size_bytes, xxh3, &run, 1);
}

/* --- encoding --- */

static json_t *encode_u64(uint64_t value)
{
    char text[24];
    snprintf(text, sizeof text, "%" PRIu64, value);
    return json_string(text);
}

static json_t *encode_piece(const struct mu_manifest_piece *piece)
{
    json_t *entries = json_array();
    for (size_t i = 0; i < piece->entry_count; i++) {
        const struct mu_manifest_entry *entry = &piece->entries[i];
        struct mu_piece_entry named = {
            .kind = entry->kind, .first_chunk = entry->first_chunk, .chunk_count = entry->chunk_count};
        char name[MU_PIECE_TENSOR_NAME_SIZE];
        strcpy(named.cell_name, entry->cell_name);
        mu_piece_tensor_name(&named, name);
        if (json_array_append_new(entries, json_pack("{s:s, s:I}", "tensor", name, "cell", (json_int_t)entry->cell)) !=
            0) {
            json_decref(entries);
            return NULL;
        }
    }
    char hash[MU_HASH_TEXT_SIZE];
    mu_hash128_text(piece->xxh3, hash);
    return json_pack("{s:s, s:o, s:s, s:o}", "file", piece->file, "size_bytes", encode_u64(piece->size_bytes), "xxh3",
                     hash, "entries", entries);
}

static json_t *encode_body(const struct mu_manifest *manifest)
{
    json_t *pieces = json_array();
    for (size_t i = 0; i < manifest->piece_count; i++)
        if (json_array_append_new(pieces, encode_piece(&manifest->pieces[i])) != 0) {
            json_decref(pieces);
            return NULL;
        }
    char nonce[NONCE_TEXT_SIZE];
    snprintf(nonce, sizeof nonce, "%016" PRIx64 "%016" PRIx64, manifest->nonce.high, manifest->nonce.low);
    return json_pack("{s:s, s:o, s:o, s:o, s:s, s:o, s:s, s:I, s:s, s:o}", "job", manifest->identity.job, "seq",
                     encode_u64(manifest->identity.seq), "step", encode_u64(manifest->identity.step), "generation",
                     encode_u64(manifest->identity.generation), "nonce", nonce, "created_wall_us",
                     encode_u64(manifest->created_wall_us), "numeric_identity", manifest->numeric_identity,
                     "chunk_count", (json_int_t)manifest->chunk_count, "job_record", manifest->job_record, "pieces",
                     pieces);
}

static void make_head(const char *rest, size_t rest_bytes, char head[HEAD_SIZE])
{
    char hash[MU_HASH_TEXT_SIZE];
    mu_hash128_text(mu_xxh3_128(rest, rest_bytes), hash);
    snprintf(head, HEAD_SIZE, HEAD_FORMAT, MU_MANIFEST_FORMAT_VERSION, hash);
}

enum mu_status mu_manifest_encode(const struct mu_manifest *manifest, char **ret_text, size_t *ret_size_bytes,
                                  struct mu_error *err)
{
    MU_ASSERT(manifest->job_record);
    json_t *body = encode_body(manifest);
    char *text = NULL, head[HEAD_SIZE];
    enum mu_status status = MU_OK;
    if (!body)
        return mu_fail(err, MU_ERR_INVALID,
                       "manifest of job '%s', checkpoint %" PRIu64 ": a text is not UTF-8, or no memory",
                       manifest->identity.job, manifest->identity.seq);
    size_t body_bytes = json_dumpb(body, NULL, 0, JSON_COMPACT), tail_bytes = strlen(TAIL);
    make_head("", 0, head); /* its length does not depend on the hash */
    size_t head_bytes = strlen(head), size_bytes = head_bytes + body_bytes + tail_bytes;
    if (body_bytes == 0 || size_bytes > MU_MANIFEST_BYTES_MAX)
        status = mu_fail(err, MU_ERR_LIMIT,
                         "manifest of job '%s', checkpoint %" PRIu64 ": %zu bytes are not allowed: at most %d",
                         manifest->identity.job, manifest->identity.seq, size_bytes, MU_MANIFEST_BYTES_MAX);
    else if (!(text = malloc(size_bytes + 1)))
        status = mu_fail(err, MU_ERR_NO_MEMORY, "no memory for a manifest of %zu bytes", size_bytes);
    if (status == MU_OK) {
        json_dumpb(body, text + head_bytes, body_bytes, JSON_COMPACT);
        memcpy(text + head_bytes + body_bytes, TAIL, tail_bytes + 1);
        make_head(text + head_bytes, body_bytes + tail_bytes, head);
        memcpy(text, head, head_bytes);
        /* What the reader would refuse is not written. */
        struct mu_manifest *again;
        status = mu_manifest_decode(text, size_bytes, "manifest to be written", &again, err);
        if (status == MU_OK)
            mu_manifest_free(again);
    }
    json_decref(body);
    if (status != MU_OK) {
        free(text);
        return status;
    }
    *ret_text = text;
    *ret_size_bytes = size_bytes;
    return MU_OK;
}

enum mu_status mu_manifest_write(const char *dir, const struct mu_manifest *manifest, struct mu_error *err)
{
    char *text, parent[4096];
    size_t size_bytes;
    enum mu_status status = mu_manifest_encode(manifest, &text, &size_bytes, err);
    if (status != MU_OK)
        return status;
    status = mu_file_publish(dir, MU_MANIFEST_FILE, text, size_bytes, err);
    free(text);
    mu_file_parent(dir, parent, sizeof parent);
    if (status == MU_OK)
        status = mu_file_sync_dir(parent, err);
    return status;
}

/* --- decoding --- */

struct decoder {
    const char *what;
    struct mu_error *err;
};

static enum mu_status bad(const struct decoder *decoder, const char *field)
{
    return mu_fail(decoder->err, MU_ERR_CORRUPT, "'%s': the field %s is missing or not valid", decoder->what, field);
}

static enum mu_status get_u64(const struct decoder *decoder, const json_t *object, const char *field,
                              uint64_t *ret_value)
{
    return mu_parse_u64(json_string_value(json_object_get(object, field)), ret_value) ? MU_OK : bad(decoder, field);
}

static enum mu_status get_u32(const struct decoder *decoder, const json_t *object, const char *field,
                              uint32_t *ret_value)
{
    const json_t *value = json_object_get(object, field);
    if (!json_is_integer(value) || json_integer_value(value) < 0 || json_integer_value(value) > UINT32_MAX)
        return bad(decoder, field);
    *ret_value = (uint32_t)json_integer_value(value);
    return MU_OK;
}

static enum mu_status get_text(const struct decoder *decoder, const json_t *object, const char *field,
                               size_t limit_bytes, const char **ret_text)
{
    const char *text = json_string_value(json_object_get(object, field));
    if (!text || strlen(text) > limit_bytes)
        return bad(decoder, field);
    *ret_text = text;
    return MU_OK;
}

static enum mu_status decode_entries(const struct decoder *decoder, struct mu_manifest *manifest, const json_t *entries,
                                     size_t *entry_total)
{
    size_t i;
    json_t *object;
    json_array_foreach(entries, i, object)
    {
        struct mu_piece_entry named;
        struct mu_manifest_entry entry = {.cell = 0};
        if (++*entry_total > MU_MANIFEST_ENTRIES_MAX)
            return mu_fail(decoder->err, MU_ERR_LIMIT, "'%s': more than %d entries are not allowed", decoder->what,
                           MU_MANIFEST_ENTRIES_MAX);
        if (json_object_size(object) != 2 ||
            !mu_piece_parse_tensor_name(json_string_value(json_object_get(object, "tensor")), &named))
            return bad(decoder, "pieces[].entries[].tensor");
        enum mu_status status = get_u32(decoder, object, "cell", &entry.cell);
        if (status != MU_OK)
            return status;
        entry.kind = named.kind;
        entry.first_chunk = named.first_chunk;
        entry.chunk_count = named.chunk_count;
        strcpy(entry.cell_name, named.cell_name);
        status = mu_manifest_add_entry(manifest, &entry);
        if (status != MU_OK)
            return mu_fail(decoder->err, status, "'%s': an entry was refused (%s)", decoder->what,
                           mu_status_name(status));
    }
    return MU_OK;
}

static enum mu_status decode_pieces(const struct decoder *decoder, struct mu_manifest *manifest, const json_t *body)
{
    size_t i, entry_total = 0;
    json_t *object;
    const json_t *pieces = json_object_get(body, "pieces");
    if (!json_is_array(pieces) || json_array_size(pieces) == 0 || json_array_size(pieces) > MU_MANIFEST_PIECES_MAX)
        return bad(decoder, "pieces");
    json_array_foreach(pieces, i, object)
    {
        uint64_t size_bytes;
        struct mu_hash128 xxh3;
        const char *file = json_string_value(json_object_get(object, "file"));
        const json_t *entries = json_object_get(object, "entries");
        if (json_object_size(object) != 4 || !mu_piece_file_name_is_valid(file) || strcmp(file, MU_MANIFEST_FILE) == 0)
            return bad(decoder, "pieces[].file");
        if (!mu_hash128_parse(json_string_value(json_object_get(object, "xxh3")), &xxh3))
            return bad(decoder, "pieces[].xxh3");
        if (!json_is_array(entries) || json_array_size(entries) == 0)
            return bad(decoder, "pieces[].entries");
        enum mu_status status = get_u64(decoder, object, "size_bytes", &size_bytes);
        if (status != MU_OK)
            return status;
        status = mu_manifest_add_piece(manifest, file, size_bytes, xxh3);
        if (status != MU_OK)
            return mu_fail(decoder->err, status, "'%s': a piece was refused (%s)", decoder->what,
                           mu_status_name(status));
        status = decode_entries(decoder, manifest, entries, &entry_total);
        if (status != MU_OK)
            return status;
    }
    return MU_OK;
}

static enum mu_status decode_body(const struct decoder *decoder, struct mu_manifest *manifest, const json_t *body)
{
    const char *job = NULL, *nonce = NULL, *numeric = NULL, *record = NULL;
    struct mu_hash128 nonce_bits;
    enum mu_status status = json_is_object(body) && json_object_size(body) == 10 ? MU_OK : bad(decoder, "manifest");
    if (status == MU_OK)
        status = get_text(decoder, body, "job", MU_JOB_NAME_SIZE - 1, &job);
    if (status == MU_OK && !mu_job_name_is_valid(job))
        status = bad(decoder, "job");
    if (status == MU_OK)
        status = get_u64(decoder, body, "seq", &manifest->identity.seq);
    if (status == MU_OK)
        status = get_u64(decoder, body, "step", &manifest->identity.step);
    if (status == MU_OK)
        status = get_u64(decoder, body, "generation", &manifest->identity.generation);
    if (status == MU_OK)
        status = get_text(decoder, body, "nonce", NONCE_TEXT_SIZE - 1, &nonce);
    if (status == MU_OK && !mu_hash128_parse(nonce, &nonce_bits))
        status = bad(decoder, "nonce");
    if (status == MU_OK)
        status = get_u64(decoder, body, "created_wall_us", &manifest->created_wall_us);
    if (status == MU_OK)
        status = get_text(decoder, body, "numeric_identity", MU_NUMERIC_IDENTITY_SIZE - 1, &numeric);
    if (status == MU_OK)
        status = get_u32(decoder, body, "chunk_count", &manifest->chunk_count);
    if (status == MU_OK)
        status = get_text(decoder, body, "job_record", MU_MANIFEST_JOB_RECORD_BYTES_MAX, &record);
    if (status == MU_OK && mu_manifest_set_job_record(manifest, record) != MU_OK)
        status = mu_fail(decoder->err, MU_ERR_NO_MEMORY, "'%s': no memory", decoder->what);
    if (status != MU_OK)
        return status;
    strcpy(manifest->identity.job, job);
    strcpy(manifest->numeric_identity, numeric);
    manifest->nonce = (struct mu_id){.high = nonce_bits.high, .low = nonce_bits.low};
    return decode_pieces(decoder, manifest, body);
}

/* The first line must be, byte for byte, what would be written before this rest. */
static enum mu_status check_head(const char *text, size_t size_bytes, const char *what, struct mu_error *err)
{
    char head[HEAD_SIZE];
    make_head("", 0, head);
    size_t head_bytes = strlen(head);
    const char *up_to_version = "{\"format\":\"muster-checkpoint-";
    if (size_bytes < head_bytes || memcmp(text, up_to_version, strlen(up_to_version)) != 0)
        return mu_fail(err, MU_ERR_CORRUPT, "'%s': not a checkpoint manifest (%zu bytes)", what, size_bytes);
    make_head(text + head_bytes, size_bytes - head_bytes, head);
    if (memcmp(text, head, head_bytes) == 0)
        return MU_OK;
    char start[HEAD_SIZE];
    memcpy(start, text, head_bytes);
    start[head_bytes] = 0;
    unsigned version = 0;
    if (sscanf(start + strlen(up_to_version), "%4u", &version) == 1 && version > MU_MANIFEST_FORMAT_VERSION)
        return mu_fail(err, MU_ERR_CORRUPT,
                       "'%s': manifest format %u is not known here (or the file is damaged), only up to %d", what,
                       version, MU_MANIFEST_FORMAT_VERSION);
    const char *actual = strstr(head, HASH_KEY) + strlen(HASH_KEY);
    char expected[MU_HASH_TEXT_SIZE];
    memcpy(expected, start + (actual - head), sizeof expected - 1);
    expected[sizeof expected - 1] = 0;
    struct mu_hash128 ignored;
    return mu_fail(err, MU_ERR_CORRUPT, "'%s': the manifest is damaged or cut: checksum is %.32s, expected %s", what,
                   actual, mu_hash128_parse(expected, &ignored) ? expected : "one in the first line");
}

enum mu_status mu_manifest_decode(const void *text, size_t size_bytes, const char *what,
                                  struct mu_manifest **ret_manifest, struct mu_error *err)
{
    if (size_bytes > MU_MANIFEST_BYTES_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "'%s': a manifest of %zu bytes is not allowed: at most %d", what, size_bytes,
                       MU_MANIFEST_BYTES_MAX);
    enum mu_status status = check_head(text, size_bytes, what, err);
    if (status != MU_OK)
        return status;
    json_t *root;
    status = mu_json_load(text, size_bytes, what, &root, err);
    if (status != MU_OK)
        return status;
    struct decoder decoder = {.what = what, .err = err};
    struct mu_manifest *manifest = mu_manifest_new();
    if (!manifest)
        status = mu_fail(err, MU_ERR_NO_MEMORY, "'%s': no memory", what);
    else
        status = decode_body(&decoder, manifest, json_object_get(root, "manifest"));
    json_decref(root);
    if (status != MU_OK) {
        mu_manifest_free(manifest);
        return status;
    }
    uint8_t digest[32];
    struct mu_sha256 *sha = mu_sha256_new();
    mu_sha256_update(sha, text, size_bytes);
    mu_sha256_final_free(sha, digest);
    mu_hex(digest, sizeof digest, manifest->sha256);
    *ret_manifest = manifest;
    return MU_OK;
}

enum mu_status mu_manifest_read(const char *dir, struct mu_manifest **ret_manifest, struct mu_error *err)
{
    char path[4096], *text;
    size_t size_bytes;
    if ((size_t)snprintf(path, sizeof path, "%s/" MU_MANIFEST_FILE, dir) >= sizeof path)
        return mu_fail(err, MU_ERR_INVALID, "a checkpoint directory path of %zu bytes is not allowed", strlen(dir));
    enum mu_status status = mu_file_read_all(path, MU_MANIFEST_BYTES_MAX, &text, &size_bytes, err);
    if (status != MU_OK)
        return status;
    status = mu_manifest_decode(text, size_bytes, path, ret_manifest, err);
    free(text);
    return status;
}
