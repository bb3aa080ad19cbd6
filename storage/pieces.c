#include "storage/pieces.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/clock.h"
#include "common/fault.h"
#include "storage/file.h"
#include "storage/piece_index.h"
#include "storage/safetensors.h"

enum { THROTTLE_NAP_US = 20000, VALUE_SIZE = 128 };

static enum mu_status check_arguments(const char *dir, const char *file_name,
                                      const struct mu_checkpoint_identity *identity,
                                      const struct mu_piece_entry *entries, size_t entry_count, struct mu_error *err)
{
    if (!mu_piece_file_name_is_valid(file_name))
        return mu_fail(err, MU_ERR_INVALID,
                       "'%s': the piece name '%s' is not allowed: [A-Za-z0-9][A-Za-z0-9._-]*, up to %d characters", dir,
                       file_name, MU_PIECE_FILE_NAME_SIZE - 1);
    if (!mu_job_name_is_valid(identity->job))
        return mu_fail(err, MU_ERR_INVALID, "'%s/%s': the job name '%s' is not allowed", dir, file_name, identity->job);
    if (entry_count == 0 || entry_count > MU_PIECE_ENTRIES_MAX)
        return mu_fail(err, MU_ERR_LIMIT, "'%s/%s': %zu entries are not allowed: 1 to %d", dir, file_name, entry_count,
                       MU_PIECE_ENTRIES_MAX);
    for (size_t i = 0; i < entry_count; i++) {
        const struct mu_piece_entry *entry = &entries[i];
        if (entry->kind >= MU_PIECE_KIND_COUNT || !mu_piece_cell_name_is_valid(entry->cell_name) ||
            entry->chunk_count == 0 || entry->chunk_count >= UINT32_MAX - entry->first_chunk || entry->size == 0 ||
            entry->size > INT64_MAX / 8 || !entry->data)
            return mu_fail(err, MU_ERR_INVALID, "'%s/%s': entry %zu has no data, size, chunks or valid cell name", dir,
                           file_name, i);
    }
    return MU_OK;
}

/* The header: tensors in the order of the entries, and metadata that lets the file be judged alone. */
static enum mu_status encode_header(const struct mu_checkpoint_identity *identity, const struct mu_piece_entry *entries,
                                    size_t count, uint8_t **ret_header, size_t *ret_header_bytes,
                                    uint64_t *ret_data_bytes, struct mu_error *err)
{
    enum { FIXED = 6 };
    struct mu_safetensors_tensor *tensors = calloc(count, sizeof *tensors);
    struct mu_safetensors_pair *pairs = calloc(count + FIXED, sizeof *pairs);
    char(*names)[MU_PIECE_TENSOR_NAME_SIZE] = calloc(count, sizeof *names);
    char(*values)[VALUE_SIZE] = calloc(count + FIXED, sizeof *values);
    enum mu_status status;
    if (!tensors || !pairs || !names || !values) {
        status = mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the header of %zu entries", count);
        goto done;
    }
    char hash[MU_HASH_TEXT_SIZE];
    snprintf(values[0], VALUE_SIZE, "%d", MU_PIECE_FORMAT_VERSION);
    snprintf(values[1], VALUE_SIZE, "%s", identity->job);
    snprintf(values[2], VALUE_SIZE, "%" PRIu64, identity->seq);
    snprintf(values[3], VALUE_SIZE, "%" PRIu64, identity->step);
    snprintf(values[4], VALUE_SIZE, "%" PRIu64, identity->generation);
    mu_hash128_text(mu_piece_index_hash(identity, entries, count), values[5]);
    static const char *const keys[FIXED] = {MU_PIECE_KEY_VERSION, MU_PIECE_KEY_JOB,        MU_PIECE_KEY_SEQ,
                                            MU_PIECE_KEY_STEP,    MU_PIECE_KEY_GENERATION, MU_PIECE_KEY_INDEX};
    for (size_t i = 0; i < FIXED; i++)
        pairs[i] = (struct mu_safetensors_pair){.key = keys[i], .value = values[i]};
    for (size_t i = 0; i < count; i++) {
        const struct mu_piece_entry *entry = &entries[i];
        mu_piece_tensor_name(entry, names[i]);
        mu_hash128_text(entry->xxh3, hash);
        snprintf(values[FIXED + i], VALUE_SIZE, MU_PIECE_VALUE_FORMAT, entry->cell, entry->offset, hash);
        pairs[FIXED + i] = (struct mu_safetensors_pair){.key = names[i], .value = values[FIXED + i]};
        tensors[i] =
            (struct mu_safetensors_tensor){.name = names[i], .dtype = MU_ST_F32, .rank = 1, .shape = {entry->size}};
    }
    status = mu_safetensors_header_encode(tensors, count, pairs, count + FIXED, MU_PIECE_DATA_ALIGN_BYTES, ret_header,
                                          ret_header_bytes, ret_data_bytes, err);
done:
    free(tensors);
    free(pairs);
    free(names);
    free(values);
    return status;
}

struct pace {
    const struct mu_piece_write_options *options;
    uint64_t start_us, bytes;
};

static bool is_aborted(const struct pace *pace)
{
    return pace->options && pace->options->abort && atomic_load_explicit(pace->options->abort, memory_order_relaxed);
}

/* Before each block: gives up when told to, and sleeps while the file is ahead of its rate. */
static enum mu_status keep_pace(struct pace *pace, struct mu_error *err)
{
    while (!is_aborted(pace)) {
        uint64_t rate = pace->options ? pace->options->throttle_bytes_per_s : 0;
        uint64_t due_us = rate ? (uint64_t)((double)pace->bytes * 1e6 / (double)rate) : 0;
        uint64_t elapsed_us = mu_clock_mono_us() - pace->start_us;
        if (elapsed_us >= due_us)
            return MU_OK;
        uint64_t nap_us = due_us - elapsed_us < THROTTLE_NAP_US ? due_us - elapsed_us : THROTTLE_NAP_US;
        nanosleep(&(struct timespec){.tv_nsec = (long)nap_us * 1000}, NULL);
    }
    return mu_fail(err, MU_ERR_CANCELLED, "the write was aborted on request");
}

static enum mu_status write_entries(struct mu_file_out *out, const struct mu_piece_entry *entries, size_t count,
                                    const struct mu_piece_write_options *options, struct mu_error *err)
{
    struct pace pace = {.options = options, .start_us = mu_clock_mono_us()};
    for (size_t i = 0, next; i < count; i = next) {
        const uint8_t *source = (const uint8_t *)entries[i].data;
        uint64_t left_bytes = entries[i].size * sizeof(float);
        /* What lies side by side in memory is written as one: it stays at page boundaries then. */
        for (next = i + 1; next < count && (const uint8_t *)entries[next].data == source + left_bytes; next++)
            left_bytes += entries[next].size * sizeof(float);
        while (left_bytes > 0) {
            size_t part = left_bytes < MU_PIECE_BLOCK_BYTES ? (size_t)left_bytes : MU_PIECE_BLOCK_BYTES;
            enum mu_status status = keep_pace(&pace, err);
            MU_FAULT("worker.piece.write");
            if (status == MU_OK)
                status = mu_file_out_append(out, source, part, err);
            if (status != MU_OK)
                return status;
            source += part;
            left_bytes -= part;
            pace.bytes += part;
        }
    }
    return MU_OK;
}

static enum mu_status publish(struct mu_file_out *out, struct mu_error *err)
{
    MU_FAULT("worker.piece.fsync");
    enum mu_status status = mu_file_out_sync(out, err);
    if (status != MU_OK)
        return status;
    MU_FAULT("worker.piece.rename");
    status = mu_file_out_rename(out, err);
    if (status != MU_OK)
        return status;
    MU_FAULT("worker.piece.dirsync");
    return mu_file_out_sync_dir(out, err);
}

enum mu_status mu_piece_write(const char *dir, const char *file_name, const struct mu_checkpoint_identity *identity,
                              struct mu_piece_entry *entries, size_t entry_count,
                              const struct mu_piece_write_options *options, struct mu_piece_result *ret_result,
                              struct mu_error *err)
{
    enum mu_status status = check_arguments(dir, file_name, identity, entries, entry_count, err);
    if (status != MU_OK)
        return status;
    uint64_t start_us = mu_clock_mono_us();
    for (size_t i = 0; i < entry_count; i++) {
        if (is_aborted(&(struct pace){.options = options}))
            return mu_fail(err, MU_ERR_CANCELLED, "'%s/%s': the write was aborted on request", dir, file_name);
        entries[i].xxh3 = mu_xxh3_128(entries[i].data, (size_t)entries[i].size * sizeof(float));
    }
    uint8_t *header = NULL;
    size_t header_bytes;
    uint64_t data_bytes;
    status = encode_header(identity, entries, entry_count, &header, &header_bytes, &data_bytes, err);
    if (status != MU_OK) {
        mu_error_prefix(err, "'%s/%s'", dir, file_name);
        return status;
    }
    uint64_t checksummed_us = mu_clock_mono_us();

    struct mu_file_out out;
    status = mu_file_out_open(&out, dir, file_name, header_bytes + data_bytes, err);
    out.withdraw = true;
    MU_FAULT("worker.piece.open");
    if (status == MU_OK)
        status = mu_file_out_append(&out, header, header_bytes, err);
    if (status == MU_OK && (status = write_entries(&out, entries, entry_count, options, err)) == MU_ERR_CANCELLED)
        mu_error_prefix(err, "'%s/%s'", dir, file_name);
    uint64_t written_us = mu_clock_mono_us();
    if (status == MU_OK)
        status = publish(&out, err);
    if (status == MU_OK)
        *ret_result = (struct mu_piece_result){.size_bytes = header_bytes + data_bytes,
                                               .xxh3 = mu_file_out_hash(&out),
                                               .checksum_us = checksummed_us - start_us,
                                               .write_us = written_us - checksummed_us,
                                               .sync_us = mu_clock_mono_us() - written_us};
    mu_file_out_fini(&out);
    free(header);
    return status;
}
