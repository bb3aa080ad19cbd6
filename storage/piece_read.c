#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/xxh3.h"
#include "storage/file.h"
#include "storage/piece_index.h"
#include "storage/safetensors.h"

static struct mu_hash128 digest(const XXH3_state_t *state)
{
    XXH128_hash_t hash = XXH3_128bits_digest(state);
    return (struct mu_hash128){.low = hash.low64, .high = hash.high64};
}

/* A chain: each link is the hash of the one before it and one line of text. */
static struct mu_hash128 add_line(struct mu_hash128 chain, const char *line)
{
    char link[2 * MU_HASH_TEXT_SIZE + 512];
    char hash[MU_HASH_TEXT_SIZE];
    mu_hash128_text(chain, hash);
    int length = snprintf(link, sizeof link, "%s %s", hash, line);
    return mu_xxh3_128(link, (size_t)length);
}

struct mu_hash128 mu_piece_index_hash(const struct mu_checkpoint_identity *identity,
                                      const struct mu_piece_entry *entries, size_t count)
{
    char line[512], name[MU_PIECE_TENSOR_NAME_SIZE], hash[MU_HASH_TEXT_SIZE];
    snprintf(line, sizeof line, "%s %" PRIu64 " %" PRIu64 " %" PRIu64, identity->job, identity->seq, identity->step,
             identity->generation);
    struct mu_hash128 chain = add_line((struct mu_hash128){0, 0}, line);
    for (size_t i = 0; i < count; i++) {
        mu_piece_tensor_name(&entries[i], name);
        mu_hash128_text(entries[i].xxh3, hash);
        snprintf(line, sizeof line, "%s %" PRIu64 " " MU_PIECE_VALUE_FORMAT, name, entries[i].size, entries[i].cell,
                 entries[i].offset, hash);
        chain = add_line(chain, line);
    }
    return chain;
}

static enum mu_status read_identity(const struct mu_safetensors *file, const char *path,
                                    struct mu_checkpoint_identity *ret_identity, struct mu_error *err)
{
    uint64_t version;
    if (!mu_parse_u64(mu_safetensors_metadata(file, MU_PIECE_KEY_VERSION), &version))
        return mu_fail(err, MU_ERR_CORRUPT,
                       "'%s': not a checkpoint piece (no " MU_PIECE_KEY_VERSION " in its metadata)", path);
    if (version != MU_PIECE_FORMAT_VERSION)
        return mu_fail(err, MU_ERR_INVALID, "'%s': piece format %" PRIu64 " is not known here, only %d", path, version,
                       MU_PIECE_FORMAT_VERSION);
    const char *job = mu_safetensors_metadata(file, MU_PIECE_KEY_JOB);
    if (!mu_job_name_is_valid(job) ||
        !mu_parse_u64(mu_safetensors_metadata(file, MU_PIECE_KEY_SEQ), &ret_identity->seq) ||
        !mu_parse_u64(mu_safetensors_metadata(file, MU_PIECE_KEY_STEP), &ret_identity->step) ||
        !mu_parse_u64(mu_safetensors_metadata(file, MU_PIECE_KEY_GENERATION), &ret_identity->generation))
        return mu_fail(err, MU_ERR_CORRUPT, "'%s': its metadata lack a valid job, seq, step or generation", path);
    strcpy(ret_identity->job, job);
    return MU_OK;
}

/* "cell=3 offset=4096 xxh3=..." as written: whatever parses must format back to the same text. */
static bool parse_value(const char *text, struct mu_piece_entry *entry)
{
    char hash[MU_HASH_TEXT_SIZE], again[160];
    if (!text ||
        sscanf(text, "cell=%" SCNu32 " offset=%" SCNu64 " xxh3=%32s", &entry->cell, &entry->offset, hash) != 3 ||
        !mu_hash128_parse(hash, &entry->xxh3))
        return false;
    snprintf(again, sizeof again, MU_PIECE_VALUE_FORMAT, entry->cell, entry->offset, hash);
    return strcmp(again, text) == 0;
}

static enum mu_status read_entries(const struct mu_safetensors *file, const char *path, struct mu_piece_entry *entries,
                                   struct mu_error *err)
{
    for (size_t i = 0; i < mu_safetensors_count(file); i++) {
        const struct mu_safetensors_tensor *tensor = mu_safetensors_at(file, i);
        struct mu_piece_entry *entry = &entries[i];
        if (!mu_piece_parse_tensor_name(tensor->name, entry) || tensor->dtype != MU_ST_F32 || tensor->rank != 1 ||
            tensor->shape[0] == 0)
            return mu_fail(err, MU_ERR_CORRUPT,
                           "'%s': tensor %zu is not a one-dimensional F32 tensor named cell/kind/first-last", path, i);
        if (!parse_value(mu_safetensors_metadata(file, tensor->name), entry))
            return mu_fail(err, MU_ERR_CORRUPT, "'%s': entry %s has no valid offset and checksum in the metadata", path,
                           tensor->name);
        entry->size = tensor->shape[0];
    }
    return MU_OK;
}

/* Opens a piece and judges all that its header says; the caller closes the file and frees the entries. */
static enum mu_status open_piece(const char *path, struct mu_safetensors **ret_file,
                                 struct mu_checkpoint_identity *ret_identity, struct mu_piece_entry **ret_entries,
                                 size_t *ret_count, struct mu_error *err)
{
    struct mu_safetensors *file;
    struct mu_checkpoint_identity identity;
    enum mu_status status = mu_safetensors_open(path, &file, err);
    if (status != MU_OK)
        return status;
    size_t count = mu_safetensors_count(file);
    struct mu_piece_entry *entries = NULL;
    status = read_identity(file, path, &identity, err);
    if (status == MU_OK && (count == 0 || count > MU_PIECE_ENTRIES_MAX))
        status =
            mu_fail(err, MU_ERR_LIMIT, "'%s': %zu entries are not allowed: 1 to %d", path, count, MU_PIECE_ENTRIES_MAX);
    if (status == MU_OK && !(entries = calloc(count, sizeof *entries)))
        status = mu_fail(err, MU_ERR_NO_MEMORY, "'%s': no memory for %zu entries", path, count);
    if (status == MU_OK)
        status = read_entries(file, path, entries, err);
    struct mu_hash128 said, actual;
    if (status == MU_OK && !mu_hash128_parse(mu_safetensors_metadata(file, MU_PIECE_KEY_INDEX), &said))
        status = mu_fail(err, MU_ERR_CORRUPT, "'%s': no valid " MU_PIECE_KEY_INDEX " in its metadata", path);
    if (status == MU_OK && !mu_hash128_equal(said, actual = mu_piece_index_hash(&identity, entries, count))) {
        char expected_text[MU_HASH_TEXT_SIZE], actual_text[MU_HASH_TEXT_SIZE];
        mu_hash128_text(said, expected_text);
        mu_hash128_text(actual, actual_text);
        status = mu_fail(err, MU_ERR_CORRUPT, "'%s': the checksum of its index is %s, expected %s", path, actual_text,
                         expected_text);
    }
    if (status != MU_OK) {
        free(entries);
        mu_safetensors_close(file);
        return status;
    }
    *ret_file = file;
    *ret_identity = identity;
    *ret_entries = entries;
    *ret_count = count;
    return MU_OK;
}

static enum mu_status compare_identity(const char *path, const struct mu_checkpoint_identity *actual,
                                       const struct mu_checkpoint_identity *expected, struct mu_error *err)
{
    if (strcmp(actual->job, expected->job) == 0 && actual->seq == expected->seq && actual->step == expected->step)
        return MU_OK;
    return mu_fail(err, MU_ERR_CORRUPT,
                   "'%s': belongs to job %s, checkpoint %" PRIu64 ", step %" PRIu64
                   "; expected job %s, checkpoint %" PRIu64 ", step %" PRIu64,
                   path, actual->job, actual->seq, actual->step, expected->job, expected->seq, expected->step);
}

struct reader {
    const char *path;
    const struct mu_piece_read_options *options;
    struct mu_safetensors *file;
    uint8_t *scratch; /* one block */
    XXH3_state_t *entry_hash;
    XXH3_state_t *whole_hash; /* NULL: not wanted */
};

static enum mu_status hash_header(struct reader *reader, struct mu_error *err)
{
    uint64_t left_bytes = mu_safetensors_data_start(reader->file);
    for (uint64_t at = 0; left_bytes > 0;) {
        size_t part = left_bytes < MU_PIECE_BLOCK_BYTES ? (size_t)left_bytes : MU_PIECE_BLOCK_BYTES;
        enum mu_status status = mu_safetensors_read_at(reader->file, at, reader->scratch, part, err);
        if (status != MU_OK)
            return status;
        XXH3_128bits_update(reader->whole_hash, reader->scratch, part);
        at += part;
        left_bytes -= part;
    }
    return MU_OK;
}

/* At most a block of the entry, from element `first` on: to its place, or to the scratch buffer. *ret_count receives
 * how many elements that were. */
static enum mu_status read_block(struct reader *reader, const struct mu_piece_entry *entry, uint64_t at, uint64_t first,
                                 bool is_wanted, uint64_t *ret_count, struct mu_error *err)
{
    const struct mu_piece_read_options *options = reader->options;
    const uint64_t block = MU_PIECE_BLOCK_BYTES / sizeof(float);
    if (options->abort && atomic_load_explicit(options->abort, memory_order_relaxed))
        return mu_fail(err, MU_ERR_CANCELLED, "'%s': the read was aborted on request", reader->path);
    uint64_t count = entry->size - first < block ? entry->size - first : block;
    float *destination = is_wanted ? options->place(options->arg, entry, first, &count) : NULL;
    void *to = destination && !options->copy ? (void *)destination : reader->scratch;
    size_t size_bytes = (size_t)count * sizeof(float);
    enum mu_status status = mu_safetensors_read_at(reader->file, at + first * sizeof(float), to, size_bytes, err);
    if (status != MU_OK)
        return status;
    XXH3_128bits_update(reader->entry_hash, to, size_bytes);
    if (reader->whole_hash)
        XXH3_128bits_update(reader->whole_hash, to, size_bytes);
    if (options->progress)
        atomic_fetch_add_explicit(options->progress, 1, memory_order_relaxed);
    *ret_count = count;
    if (!destination || !options->copy)
        return MU_OK;
    status = options->copy(options->copy_ctx, destination, to, size_bytes);
    return status == MU_OK ? MU_OK : mu_fail(err, status, "'%s': what was read cannot be passed on", reader->path);
}

static enum mu_status read_entry(struct reader *reader, const struct mu_piece_entry *entry, uint64_t at, bool is_wanted,
                                 struct mu_error *err)
{
    XXH3_128bits_reset(reader->entry_hash);
    for (uint64_t first = 0, count = 0; first < entry->size; first += count) {
        enum mu_status status = read_block(reader, entry, at, first, is_wanted, &count, err);
        if (status != MU_OK)
            return status;
    }
    struct mu_hash128 actual = digest(reader->entry_hash);
    if (mu_hash128_equal(actual, entry->xxh3))
        return MU_OK;
    char name[MU_PIECE_TENSOR_NAME_SIZE], expected_text[MU_HASH_TEXT_SIZE], actual_text[MU_HASH_TEXT_SIZE];
    mu_piece_tensor_name(entry, name);
    mu_hash128_text(entry->xxh3, expected_text);
    mu_hash128_text(actual, actual_text);
    return mu_fail(err, MU_ERR_CORRUPT, "'%s': entry %s: checksum is %s, expected %s", reader->path, name, actual_text,
                   expected_text);
}

static enum mu_status read_data(struct reader *reader, const struct mu_piece_entry *entries, size_t count,
                                struct mu_error *err)
{
    const struct mu_piece_read_options *options = reader->options;
    enum mu_status status = reader->whole_hash ? hash_header(reader, err) : MU_OK;
    for (size_t i = 0; i < count && status == MU_OK; i++) {
        bool is_wanted = options->wants && options->wants(options->arg, &entries[i]);
        if (is_wanted || !options->partial) {
            uint64_t at = mu_safetensors_data_start(reader->file) + mu_safetensors_at(reader->file, i)->offset_bytes;
            status = read_entry(reader, &entries[i], at, is_wanted, err);
        }
    }
    if (status != MU_OK || !reader->whole_hash)
        return status;
    struct mu_hash128 actual = digest(reader->whole_hash);
    if (mu_hash128_equal(actual, options->expected->xxh3))
        return MU_OK;
    char expected_text[MU_HASH_TEXT_SIZE], actual_text[MU_HASH_TEXT_SIZE];
    mu_hash128_text(options->expected->xxh3, expected_text);
    mu_hash128_text(actual, actual_text);
    return mu_fail(err, MU_ERR_CORRUPT, "'%s': checksum of the file is %s, expected %s", reader->path, actual_text,
                   expected_text);
}

/* A size that differs is told before the header is looked at: "truncated" says more than whatever the parser would
 * stumble on. */
static enum mu_status compare_size(const char *path, uint64_t expected_bytes, struct mu_error *err)
{
    int fd;
    uint64_t size_bytes;
    enum mu_status status = mu_file_open_regular(path, &fd, &size_bytes, err);
    if (status != MU_OK)
        return status;
    close(fd);
    if (size_bytes == expected_bytes)
        return MU_OK;
    return mu_fail(err, MU_ERR_CORRUPT, "'%s': size is %" PRIu64 " bytes, expected %" PRIu64, path, size_bytes,
                   expected_bytes);
}

enum mu_status mu_piece_read(const char *path, const struct mu_piece_read_options *options,
                             struct mu_checkpoint_identity *ret_identity, struct mu_error *err)
{
    const struct mu_piece_expected *expected = options->expected;
    struct reader reader = {.path = path, .options = options};
    struct mu_checkpoint_identity identity;
    struct mu_piece_entry *entries = NULL;
    size_t count = 0;
    enum mu_status status = expected ? compare_size(path, expected->size_bytes, err) : MU_OK;
    if (status == MU_OK)
        status = open_piece(path, &reader.file, &identity, &entries, &count, err);
    if (status == MU_OK && expected && expected->identity)
        status = compare_identity(path, &identity, expected->identity, err);
    if (status != MU_OK)
        goto done;
    reader.scratch = malloc(MU_PIECE_BLOCK_BYTES);
    reader.entry_hash = XXH3_createState();
    if (expected && !options->partial) {
        reader.whole_hash = XXH3_createState();
        if (reader.whole_hash)
            XXH3_128bits_reset(reader.whole_hash);
    }
    if (!reader.scratch || !reader.entry_hash || (expected && !options->partial && !reader.whole_hash)) {
        status = mu_fail(err, MU_ERR_NO_MEMORY, "'%s': no memory for a read buffer", path);
        goto done;
    }
    status = read_data(&reader, entries, count, err);
    if (status == MU_OK && ret_identity)
        *ret_identity = identity;
done:
    free(reader.scratch);
    XXH3_freeState(reader.entry_hash);
    XXH3_freeState(reader.whole_hash);
    mu_safetensors_close(reader.file);
    free(entries);
    return status;
}

enum mu_status mu_piece_list(const char *path, struct mu_checkpoint_identity *ret_identity,
                             struct mu_piece_entry **ret_entries, size_t *ret_count, struct mu_error *err)
{
    struct mu_safetensors *file;
    struct mu_checkpoint_identity identity;
    enum mu_status status = open_piece(path, &file, &identity, ret_entries, ret_count, err);
    if (status != MU_OK)
        return status;
    mu_safetensors_close(file);
    if (ret_identity)
        *ret_identity = identity;
    return MU_OK;
}
