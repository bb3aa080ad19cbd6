/* What needs the manifest and the pieces together: the proof of the tiling, verification, loading. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "storage/manifest.h"
#include "storage/piece_format.h"

enum { PATH_BYTES_MAX = 4096, TILED_KINDS = 3 };

/* --- tiling --- */

struct tile {
    const struct mu_manifest_entry *entry;
    const char *file;
};

static int by_kind_and_chunk(const void *a, const void *b)
{
    const struct mu_manifest_entry *left = ((const struct tile *)a)->entry, *right = ((const struct tile *)b)->entry;
    if (left->kind != right->kind)
        return left->kind < right->kind ? -1 : 1;
    if (left->first_chunk != right->first_chunk)
        return left->first_chunk < right->first_chunk ? -1 : 1;
    if (left->chunk_count != right->chunk_count)
        return left->chunk_count < right->chunk_count ? -1 : 1;
    return left->cell < right->cell ? -1 : left->cell > right->cell;
}

static enum mu_status check_cell(const struct mu_manifest_entry *entry, const char *file,
                                 const struct mu_model_spec *spec, struct mu_error *err)
{
    struct mu_cell cell = {.name = "?"};
    if (entry->cell < spec->cell_count)
        cell = mu_model_cell(spec, entry->cell);
    if (strcmp(cell.name, entry->cell_name) == 0 && entry->first_chunk >= cell.first_chunk &&
        entry->first_chunk - cell.first_chunk < cell.chunk_count &&
        entry->chunk_count <= cell.chunk_count - (entry->first_chunk - cell.first_chunk))
        return MU_OK;
    return mu_fail(err, MU_ERR_CORRUPT,
                   "piece '%s': chunks %" PRIu32 "-%" PRIu32 " of cell %s (number %" PRIu32
                   ") are not the model's: that cell is %s, chunks "
                   "%" PRIu32 "-%" PRIu32,
                   file, entry->first_chunk, entry->first_chunk + entry->chunk_count - 1, entry->cell_name, entry->cell,
                   cell.name, cell.first_chunk, cell.first_chunk + cell.chunk_count - 1);
}

static enum mu_status fail_gap(int kind, uint64_t chunk, const struct mu_model_spec *spec, struct mu_error *err)
{
    char where[64] = "";
    if (spec)
        snprintf(where, sizeof where, " (cell %s)",
                 mu_model_cell(spec, mu_model_chunk(spec, (uint32_t)chunk).cell).name);
    return mu_fail(err, MU_ERR_CORRUPT,
                   "the pieces do not cover the model: chunk %" PRIu64 "%s of kind %s is in no piece", chunk, where,
                   mu_piece_kind_name((enum mu_piece_kind)kind));
}

/* `tiles` are sorted: each kind must run from chunk 0 to chunk_count without a step aside. */
static enum mu_status sweep(const struct tile *tiles, size_t tile_count, uint32_t chunk_count,
                            const struct mu_model_spec *spec, struct mu_error *err)
{
    size_t i = 0;
    for (int kind = MU_PIECE_PARAMETERS; kind <= MU_PIECE_MOMENT2; kind++) {
        uint64_t next = 0;
        const char *previous = "";
        for (; i < tile_count && (int)tiles[i].entry->kind == kind; i++) {
            const struct mu_manifest_entry *entry = tiles[i].entry;
            if (entry->first_chunk > next && next < chunk_count)
                return fail_gap(kind, next, spec, err);
            if ((uint64_t)entry->first_chunk + entry->chunk_count > chunk_count)
                return mu_fail(err, MU_ERR_CORRUPT,
                               "piece '%s': chunk %" PRIu64 " of kind %s is beyond the model's %" PRIu32 " chunks",
                               tiles[i].file, (uint64_t)entry->first_chunk + entry->chunk_count - 1,
                               mu_piece_kind_name(entry->kind), chunk_count);
            if (entry->first_chunk < next)
                return mu_fail(err, MU_ERR_CORRUPT,
                               "chunk %" PRIu32 " (cell %s) of kind %s is in two places: piece '%s' and piece '%s'",
                               entry->first_chunk, entry->cell_name, mu_piece_kind_name(entry->kind), previous,
                               tiles[i].file);
            next = (uint64_t)entry->first_chunk + entry->chunk_count;
            previous = tiles[i].file;
        }
        if (next < chunk_count)
            return fail_gap(kind, next, spec, err);
    }
    return MU_OK;
}

enum mu_status mu_manifest_check_tiling(const struct mu_manifest *manifest, const struct mu_model_spec *spec,
                                        struct mu_error *err)
{
    if (spec && spec->chunk_count != manifest->chunk_count)
        return mu_fail(err, MU_ERR_CORRUPT,
                       "the manifest is of a model of %" PRIu32 " chunks, this job's model has %" PRIu32,
                       manifest->chunk_count, spec->chunk_count);
    size_t tile_count = 0;
    for (size_t i = 0; i < manifest->piece_count; i++)
        tile_count += manifest->pieces[i].entry_count;
    struct tile *tiles = calloc(tile_count ? tile_count : 1, sizeof *tiles);
    if (!tiles)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory to check %zu entries of a manifest", tile_count);
    enum mu_status status = MU_OK;
    tile_count = 0;
    for (size_t i = 0; i < manifest->piece_count && status == MU_OK; i++) {
        const struct mu_manifest_piece *piece = &manifest->pieces[i];
        for (size_t j = 0; j < piece->entry_count && status == MU_OK; j++) {
            if (piece->entries[j].kind > MU_PIECE_MOMENT2)
                continue;
            if (spec)
                status = check_cell(&piece->entries[j], piece->file, spec, err);
            tiles[tile_count++] = (struct tile){.entry = &piece->entries[j], .file = piece->file};
        }
    }
    if (status == MU_OK) {
        qsort(tiles, tile_count, sizeof *tiles, by_kind_and_chunk);
        status = sweep(tiles, tile_count, manifest->chunk_count, spec, err);
    }
    free(tiles);
    return status;
}

/* --- the pieces against the manifest --- */

static enum mu_status piece_path(const char *dir, const char *file, char path[PATH_BYTES_MAX], struct mu_error *err)
{
    if ((size_t)snprintf(path, PATH_BYTES_MAX, "%s/%s", dir, file) < PATH_BYTES_MAX)
        return MU_OK;
    return mu_fail(err, MU_ERR_INVALID, "a checkpoint directory path of %zu bytes is not allowed", strlen(dir));
}

/* What is asked about every entry of a piece while it is read: ticks off the manifest's list, which may be in another
 * order, and finds the place. */
struct matcher {
    const struct mu_manifest_entry **listed; /* sorted by kind, chunks, cell */
    size_t listed_count, seen_count;
    const struct mu_model_spec *spec;      /* NULL: nothing is wanted */
    const struct mu_checkpoint_want *want; /* likewise */
    bool is_foreign;                       /* an entry that the manifest or the model does not have */
    char foreign[MU_PIECE_TENSOR_NAME_SIZE];
};

static int compare_entries(const void *a, const void *b)
{
    struct tile left = {.entry = *(const struct mu_manifest_entry *const *)a},
                right = {.entry = *(const struct mu_manifest_entry *const *)b};
    return by_kind_and_chunk(&left, &right);
}

static bool is_listed(const struct matcher *matcher, const struct mu_piece_entry *entry)
{
    const struct mu_manifest_entry key = {
        .kind = entry->kind, .cell = entry->cell, .first_chunk = entry->first_chunk, .chunk_count = entry->chunk_count};
    const struct mu_manifest_entry *wanted = &key;
    const struct mu_manifest_entry **found =
        matcher->listed_count
            ? bsearch(&wanted, matcher->listed, matcher->listed_count, sizeof(void *), compare_entries)
            : NULL;
    if (!found || strcmp((*found)->cell_name, entry->cell_name) != 0)
        return false;
    if (entry->kind > MU_PIECE_MOMENT2)
        return true;
    return matcher->spec ? mu_piece_entry_fits(entry, matcher->spec)
                         : (entry->size + MU_CHUNK_ELEMENTS - 1) / MU_CHUNK_ELEMENTS == entry->chunk_count;
}

/* How many of the chunks are wanted. */
static uint32_t wanted_chunks(const struct mu_checkpoint_want *want, enum mu_piece_kind kind, uint32_t first,
                              uint32_t count)
{
    uint32_t wanted = 0, last = first + count, end;
    if (!want || kind > MU_PIECE_MOMENT2 || !want->flats[kind])
        return 0;
    for (uint32_t chunk = first; chunk < last; chunk = end) {
        bool is_in = mu_runs_have(want->runs[kind], want->run_counts[kind], chunk, &end);
        end = end < last ? end : last;
        wanted += is_in ? end - chunk : 0;
    }
    return wanted;
}

static bool wants_entry(void *arg, const struct mu_piece_entry *entry)
{
    struct matcher *matcher = arg;
    bool is_known = is_listed(matcher, entry);
    matcher->seen_count++;
    if (!is_known && !matcher->is_foreign) {
        matcher->is_foreign = true;
        mu_piece_tensor_name(entry, matcher->foreign);
    }
    return is_known && wanted_chunks(matcher->want, entry->kind, entry->first_chunk, entry->chunk_count) > 0;
}

/* An entry lies in one cell and begins with a chunk, and all chunks of a cell but the last are of one size. */
static float *place_block(void *arg, const struct mu_piece_entry *entry, uint64_t first, uint64_t *count)
{
    const struct mu_checkpoint_want *want = ((struct matcher *)arg)->want;
    uint32_t chunk = entry->first_chunk + (uint32_t)(first / MU_CHUNK_ELEMENTS), end;
    bool is_in = mu_runs_have(want->runs[entry->kind], want->run_counts[entry->kind], chunk, &end);
    uint64_t most = (uint64_t)(end - entry->first_chunk) * MU_CHUNK_ELEMENTS - first;
    *count = *count < most ? *count : most;
    return is_in ? want->flats[entry->kind] + entry->offset + first : NULL;
}

enum piece_use { PIECE_UNUSED, PIECE_IN_PART, PIECE_WHOLE };

static enum piece_use piece_use(const struct mu_manifest_piece *piece, const struct mu_checkpoint_want *want)
{
    bool any = false, all = true;
    for (size_t i = 0; i < piece->entry_count; i++) {
        const struct mu_manifest_entry *entry = &piece->entries[i];
        uint32_t wanted = wanted_chunks(want, entry->kind, entry->first_chunk, entry->chunk_count);
        any |= wanted > 0;
        all &= wanted == entry->chunk_count;
    }
    return !want || (any && all) ? PIECE_WHOLE : any ? PIECE_IN_PART : PIECE_UNUSED;
}

static enum mu_status read_file(const char *path, enum piece_use use, const struct mu_manifest *manifest,
                                const struct mu_manifest_piece *piece, const struct mu_model_spec *spec,
                                const struct mu_checkpoint_want *want, const atomic_bool *abort,
                                atomic_uint_least64_t *progress, struct mu_error *err)
{
    struct matcher matcher = {.spec = spec, .listed_count = piece->entry_count, .want = want};
    matcher.listed = calloc(piece->entry_count ? piece->entry_count : 1, sizeof(void *));
    if (!matcher.listed)
        return mu_fail(err, MU_ERR_NO_MEMORY, "'%s': no memory for %zu entries", path, piece->entry_count);
    for (size_t i = 0; i < piece->entry_count; i++)
        matcher.listed[i] = &piece->entries[i];
    qsort(matcher.listed, piece->entry_count, sizeof(void *), compare_entries);
    struct mu_piece_expected expected = {
        .size_bytes = piece->size_bytes, .xxh3 = piece->xxh3, .identity = &manifest->identity};
    struct mu_piece_read_options options = {.wants = wants_entry,
                                            .place = place_block,
                                            .arg = &matcher,
                                            .expected = &expected,
                                            .partial = use == PIECE_IN_PART,
                                            .abort = abort,
                                            .progress = progress};
    enum mu_status status = mu_piece_read(path, &options, NULL, err);
    if (status == MU_OK && matcher.is_foreign)
        status = mu_fail(err, MU_ERR_CORRUPT, "'%s': entry %s is not what the manifest or the model says", path,
                         matcher.foreign);
    else if (status == MU_OK && matcher.seen_count != piece->entry_count)
        status = mu_fail(err, MU_ERR_CORRUPT, "'%s': holds %zu entries, the manifest says %zu", path,
                         matcher.seen_count, piece->entry_count);
    free(matcher.listed);
    return status;
}

/* Of a copy that does not read: one that could not be reached may be good, and one that is wrong says more than one
 * that is not there. */
static int weight(enum mu_status status)
{
    return status == MU_OK ? 0 : status == MU_ERR_NOT_FOUND ? 1 : status == MU_ERR_UNAVAILABLE ? 3 : 2;
}

/* The first copy that reads well. */
static enum mu_status read_copies(enum piece_use use, const struct mu_manifest *manifest,
                                  const struct mu_manifest_piece *piece, const struct mu_model_spec *spec,
                                  const struct mu_checkpoint_want *want, const atomic_bool *abort,
                                  atomic_uint_least64_t *progress, struct mu_error *err)
{
    const struct mu_piece_source *source = want->source;
    struct mu_error problem;
    char path[PATH_BYTES_MAX];
    enum mu_status worst = MU_OK;
    for (uint32_t attempt = 0;; attempt++) {
        enum mu_status status = source->open(source->ctx, piece, attempt, path, sizeof path, &problem);
        if (status == MU_ERR_LIMIT)
            return worst ? worst : mu_fail(err, MU_ERR_NOT_FOUND, "piece '%s' is nowhere", piece->file);
        if (status == MU_OK) {
            status = read_file(path, use, manifest, piece, spec, want, abort, progress, &problem);
            source->close(source->ctx);
        }
        if (status == MU_OK)
            return MU_OK;
        if (weight(status) > weight(worst)) {
            worst = status;
            *err = problem;
        }
        if (status == MU_ERR_CANCELLED || status == MU_ERR_NO_MEMORY)
            return mu_fail(err, status, "%s", problem.text);
    }
}

/* `want` NULL: only verified, as a whole. */
static enum mu_status read_piece(const char *dir, const struct mu_manifest *manifest,
                                 const struct mu_manifest_piece *piece, const struct mu_model_spec *spec,
                                 const struct mu_checkpoint_want *want, const atomic_bool *abort,
                                 atomic_uint_least64_t *progress, struct mu_error *err)
{
    char path[PATH_BYTES_MAX];
    enum piece_use use = piece_use(piece, want);
    if (use == PIECE_UNUSED)
        return MU_OK;
    if (want && want->source)
        return read_copies(use, manifest, piece, spec, want, abort, progress, err);
    enum mu_status status = piece_path(dir, piece->file, path, err);
    return status ? status : read_file(path, use, manifest, piece, spec, want, abort, progress, err);
}

enum mu_status mu_checkpoint_load_runs(const char *dir, const struct mu_manifest *manifest,
                                       const struct mu_model_spec *spec, const struct mu_checkpoint_want *want,
                                       const atomic_bool *abort, atomic_uint_least64_t *progress, struct mu_error *err)
{
    enum mu_status status = mu_manifest_check_tiling(manifest, spec, err);
    if (status != MU_OK)
        mu_error_prefix(err, "'%s'", dir);
    for (size_t i = 0; i < manifest->piece_count && status == MU_OK; i++)
        status = read_piece(dir, manifest, &manifest->pieces[i], spec, want, abort, progress, err);
    return status;
}

enum mu_status mu_checkpoint_load(const char *dir, const struct mu_manifest *manifest, const struct mu_model_spec *spec,
                                  float *parameters, float *moment1, float *moment2, const atomic_bool *abort,
                                  struct mu_error *err)
{
    const struct mu_chunk_run all = {.first = 0, .count = spec->chunk_count};
    struct mu_checkpoint_want want = {.flats = {parameters, moment1, moment2}};
    for (int kind = 0; kind < TILED_KINDS; kind++) {
        want.runs[kind] = &all;
        want.run_counts[kind] = want.flats[kind] ? 1 : 0;
    }
    return mu_checkpoint_load_runs(dir, manifest, spec, &want, abort, NULL, err);
}

static void note(struct mu_checkpoint_report *report, const struct mu_error *problem)
{
    if (report->problem_count < MU_VERIFY_PROBLEMS_MAX)
        report->problems[report->problem_count] = *problem;
    report->problem_count++;
}

/* The manifest of the first directory that has one; a directory with another one does not take part. */
static struct mu_manifest *read_manifests(const char *const *dirs, size_t dir_count, bool *takes_part,
                                          struct mu_checkpoint_report *report)
{
    struct mu_manifest *first = NULL;
    const char *first_dir = NULL;
    for (size_t i = 0; i < dir_count; i++) {
        struct mu_manifest *manifest = NULL;
        struct mu_error problem;
        takes_part[i] = mu_manifest_read(dirs[i], &manifest, &problem) == MU_OK;
        if (takes_part[i] && !first) {
            first = manifest;
            first_dir = dirs[i];
            continue;
        }
        if (takes_part[i] && strcmp(manifest->sha256, first->sha256) != 0) {
            takes_part[i] = false;
            mu_fail(&problem, MU_ERR_CONFLICT,
                    "'%s' is not of the checkpoint in '%s': their manifests differ (checkpoint %" PRIu64
                    " of job %s at "
                    "step %" PRIu64 "); give directories of one checkpoint",
                    dirs[i], first_dir, manifest->identity.seq, manifest->identity.job, manifest->identity.step);
        }
        if (!takes_part[i])
            note(report, &problem);
        mu_manifest_free(manifest);
    }
    return first;
}

/* Every copy of a piece is read. Missing here is wrong only when it is nowhere. */
static void verify_piece(const char *const *dirs, size_t dir_count, const bool *takes_part,
                         const struct mu_manifest *manifest, size_t piece, struct mu_checkpoint_report *report)
{
    struct mu_error problem, missing = {0};
    uint32_t good_count = 0, bad_count = 0;
    for (size_t i = 0; i < dir_count; i++) {
        if (!takes_part[i])
            continue;
        enum mu_status status =
            read_piece(dirs[i], manifest, &manifest->pieces[piece], NULL, NULL, NULL, NULL, &problem);
        if (status == MU_OK) {
            good_count++;
            report->here_counts[i]++;
            report->size_bytes += manifest->pieces[piece].size_bytes;
        } else if (status != MU_ERR_NOT_FOUND) {
            bad_count++;
            note(report, &problem);
        } else if (missing.status == MU_OK) {
            missing = problem;
        }
    }
    if (good_count + bad_count == 0)
        note(report, &missing);
    report->bad_piece_count += bad_count > 0 || good_count == 0;
    report->single_piece_count += good_count == 1;
}

enum mu_status mu_checkpoint_verify_copies(const char *const *dirs, size_t dir_count,
                                           struct mu_checkpoint_report *ret_report, struct mu_error *err)
{
    struct mu_checkpoint_report report = {.piece_count = 0};
    bool takes_part[MU_VERIFY_DIRS_MAX];
    struct mu_error problem;
    if (dir_count == 0 || dir_count > MU_VERIFY_DIRS_MAX) {
        mu_fail(&problem, MU_ERR_LIMIT, "%zu directories of one checkpoint are not allowed: 1 to %d", dir_count,
                (int)MU_VERIFY_DIRS_MAX);
        note(&report, &problem);
        dir_count = 0;
    }
    struct mu_manifest *manifest = read_manifests(dirs, dir_count, takes_part, &report);
    if (manifest) {
        report.identity = manifest->identity;
        report.piece_count = manifest->piece_count;
        if (mu_manifest_check_tiling(manifest, NULL, &problem) != MU_OK) {
            size_t first = 0;
            while (!takes_part[first])
                first++;
            mu_error_prefix(&problem, "'%s'", dirs[first]);
            note(&report, &problem);
        }
        for (size_t i = 0; i < manifest->piece_count; i++)
            verify_piece(dirs, dir_count, takes_part, manifest, i, &report);
        mu_manifest_free(manifest);
    }
    if (ret_report)
        *ret_report = report;
    if (report.problem_count == 0)
        return MU_OK;
    return mu_fail(err, report.problems[0].status, "%s", report.problems[0].text);
}

enum mu_status mu_checkpoint_verify(const char *dir, struct mu_checkpoint_report *ret_report, struct mu_error *err)
{
    return mu_checkpoint_verify_copies(&dir, 1, ret_report, err);
}
