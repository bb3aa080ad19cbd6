#include "storage/piece_format.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const char *const kind_names[MU_PIECE_KIND_COUNT] = {
    [MU_PIECE_PARAMETERS] = "p",
    [MU_PIECE_MOMENT1] = "m",
    [MU_PIECE_MOMENT2] = "v",
    [MU_PIECE_META] = "meta",
};

const char *mu_piece_kind_name(enum mu_piece_kind kind)
{
    return kind_names[kind];
}

bool mu_parse_u64(const char *text, uint64_t *ret_value)
{
    uint64_t value = 0;
    if (!text || !*text || (text[0] == '0' && text[1]))
        return false;
    for (; *text; text++) {
        if (*text < '0' || *text > '9' || __builtin_mul_overflow(value, (uint64_t)10, &value) ||
            __builtin_add_overflow(value, (uint64_t)(*text - '0'), &value))
            return false;
    }
    *ret_value = value;
    return true;
}

void mu_hash128_text(struct mu_hash128 hash, char out[MU_HASH_TEXT_SIZE])
{
    snprintf(out, MU_HASH_TEXT_SIZE, "%016" PRIx64 "%016" PRIx64, hash.high, hash.low);
}

bool mu_hash128_parse(const char *text, struct mu_hash128 *ret_hash)
{
    if (!text || strlen(text) != MU_HASH_TEXT_SIZE - 1 || strspn(text, "0123456789abcdef") != MU_HASH_TEXT_SIZE - 1)
        return false;
    uint64_t half[2] = {0, 0};
    for (int i = 0; i < MU_HASH_TEXT_SIZE - 1; i++) {
        unsigned digit = text[i] <= '9' ? (unsigned)(text[i] - '0') : (unsigned)(text[i] - 'a') + 10;
        half[i / 16] = half[i / 16] << 4 | digit;
    }
    *ret_hash = (struct mu_hash128){.high = half[0], .low = half[1]};
    return true;
}

#define LOWER  "abcdefghijklmnopqrstuvwxyz"
#define UPPER  "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
#define DIGITS "0123456789"

static bool is_name(const char *name, size_t size, const char *first, const char *rest)
{
    return name && name[0] && strlen(name) < size && strchr(first, name[0]) && name[strspn(name, rest)] == 0;
}

bool mu_job_name_is_valid(const char *name)
{
    return is_name(name, MU_JOB_NAME_SIZE, LOWER DIGITS, LOWER DIGITS "._-");
}

bool mu_piece_file_name_is_valid(const char *name)
{
    return is_name(name, MU_PIECE_FILE_NAME_SIZE, LOWER UPPER DIGITS, LOWER UPPER DIGITS "._-");
}

bool mu_piece_cell_name_is_valid(const char *name)
{
    return is_name(name, MU_PIECE_CELL_NAME_SIZE, LOWER UPPER DIGITS, LOWER UPPER DIGITS "._");
}

void mu_piece_tensor_name(const struct mu_piece_entry *entry, char out[MU_PIECE_TENSOR_NAME_SIZE])
{
    snprintf(out, MU_PIECE_TENSOR_NAME_SIZE, "%s/%s/%" PRIu32 "-%" PRIu64, entry->cell_name, kind_names[entry->kind],
             entry->first_chunk, (uint64_t)entry->first_chunk + entry->chunk_count - 1);
}

bool mu_piece_parse_tensor_name(const char *name, struct mu_piece_entry *ret_entry)
{
    char parts[MU_PIECE_TENSOR_NAME_SIZE];
    if (!name || strlen(name) >= sizeof parts)
        return false;
    strcpy(parts, name);
    char *kind = strchr(parts, '/'), *first = kind ? strchr(kind + 1, '/') : NULL,
         *last = first ? strchr(first + 1, '-') : NULL;
    if (!last)
        return false;
    *kind++ = *first++ = *last++ = 0;
    int known = 0;
    while (known < MU_PIECE_KIND_COUNT && strcmp(kind, kind_names[known]) != 0)
        known++;
    uint64_t first_chunk, last_chunk;
    if (known == MU_PIECE_KIND_COUNT || !mu_piece_cell_name_is_valid(parts) || !mu_parse_u64(first, &first_chunk) ||
        !mu_parse_u64(last, &last_chunk) || last_chunk < first_chunk || last_chunk >= UINT32_MAX)
        return false;
    ret_entry->kind = (enum mu_piece_kind)known;
    strcpy(ret_entry->cell_name, parts);
    ret_entry->first_chunk = (uint32_t)first_chunk;
    ret_entry->chunk_count = (uint32_t)(last_chunk - first_chunk + 1);
    return true;
}

size_t mu_piece_entries_of_runs(const struct mu_model_spec *spec, const struct mu_chunk_run *runs, uint32_t run_count,
                                struct mu_piece_entry *entries, size_t capacity)
{
    size_t count = 0;
    for (size_t item = 0; item < (size_t)run_count * (MU_PIECE_MOMENT2 + 1); item++) {
        enum mu_piece_kind kind = (enum mu_piece_kind)(item / run_count);
        struct mu_chunk_run run = runs[item % run_count];
        MU_ASSERT(run.first <= spec->chunk_count && run.count <= spec->chunk_count - run.first);
        for (uint32_t chunk = run.first; chunk < run.first + run.count; count++) {
            struct mu_chunk first = mu_model_chunk(spec, chunk);
            struct mu_cell cell = mu_model_cell(spec, first.cell);
            uint32_t end = cell.first_chunk + cell.chunk_count;
            if (end > run.first + run.count)
                end = run.first + run.count;
            struct mu_chunk last = mu_model_chunk(spec, end - 1);
            if (count < capacity) {
                struct mu_piece_entry *entry = &entries[count];
                *entry = (struct mu_piece_entry){.kind = kind,
                                                 .cell = first.cell,
                                                 .first_chunk = chunk,
                                                 .chunk_count = end - chunk,
                                                 .offset = first.offset,
                                                 .size = last.offset + last.size - first.offset};
                snprintf(entry->cell_name, sizeof entry->cell_name, "%s", cell.name);
            }
            chunk = end;
        }
    }
    return count;
}

size_t mu_piece_entries_of_chunks(const struct mu_model_spec *spec, uint32_t first_chunk, uint32_t chunk_count,
                                  const float *parameters, const float *moment1, const float *moment2,
                                  struct mu_piece_entry *entries, size_t capacity)
{
    const float *const flat[] = {
        [MU_PIECE_PARAMETERS] = parameters, [MU_PIECE_MOMENT1] = moment1, [MU_PIECE_MOMENT2] = moment2};
    struct mu_chunk_run run = {.first = first_chunk, .count = chunk_count};
    size_t count = mu_piece_entries_of_runs(spec, &run, 1, entries, capacity);
    for (size_t i = 0; i < count && i < capacity; i++) {
        const float *start = flat[entries[i].kind];
        entries[i].data = start ? start + entries[i].offset : NULL;
    }
    return count;
}

bool mu_runs_have(const struct mu_chunk_run *runs, uint32_t run_count, uint32_t chunk, uint32_t *ret_end)
{
    uint32_t low = 0, high = run_count; /* the first run that begins after `chunk` */
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (runs[middle].first <= chunk)
            low = middle + 1;
        else
            high = middle;
    }
    const struct mu_chunk_run *before = low > 0 ? &runs[low - 1] : NULL;
    bool is_in = before && chunk - before->first < before->count;
    *ret_end = is_in ? before->first + before->count : low < run_count ? runs[low].first : UINT32_MAX;
    return is_in;
}

bool mu_piece_entry_fits(const struct mu_piece_entry *entry, const struct mu_model_spec *spec)
{
    if (entry->kind > MU_PIECE_MOMENT2 || entry->cell >= spec->cell_count || entry->chunk_count == 0)
        return false;
    struct mu_cell cell = mu_model_cell(spec, entry->cell);
    if (strcmp(cell.name, entry->cell_name) != 0 || entry->first_chunk < cell.first_chunk ||
        entry->first_chunk - cell.first_chunk >= cell.chunk_count ||
        entry->chunk_count > cell.chunk_count - (entry->first_chunk - cell.first_chunk))
        return false;
    struct mu_chunk first = mu_model_chunk(spec, entry->first_chunk);
    struct mu_chunk last = mu_model_chunk(spec, entry->first_chunk + entry->chunk_count - 1);
    return entry->offset == first.offset && entry->size == last.offset + last.size - first.offset;
}
