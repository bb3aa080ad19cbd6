/* The shared file system of the checkpoints: pieces appear whole or not at all, a manifest makes a directory a
 * checkpoint. */
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

struct mu_hash128 mu_sim_piece_checksum(const struct mu_sim_piece *piece)
{
    struct {
        uint64_t step;
        struct mu_sim_state state;
    } bytes = {piece->step, piece->state};
    struct mu_hash128 sum = mu_xxh3_128(&bytes, sizeof bytes);
    if (piece->corrupt)
        sum.low ^= 1;
    return sum;
}

void mu_sim_files_free(struct mu_sim_files *files)
{
    for (uint32_t i = 0; i < files->count; i++)
        free(files->directories[i].pieces);
    free(files->directories);
}

struct mu_sim_directory *mu_sim_files_find(struct mu_sim_files *files, const char *path)
{
    for (uint32_t i = 0; i < files->count; i++) {
        if (strcmp(files->directories[i].path, path) == 0)
            return &files->directories[i];
    }
    return NULL;
}

struct mu_sim_directory *mu_sim_files_make(struct mu_sim_files *files, const char *path)
{
    struct mu_sim_directory *directory = mu_sim_files_find(files, path);
    if (directory)
        return directory;
    files->directories = mu_sim_grow(files->directories, files->count, &files->capacity, sizeof *files->directories);
    directory = &files->directories[files->count++];
    memset(directory, 0, sizeof *directory);
    strcpy(directory->path, path);
    return directory;
}

static enum mu_status io_luck(struct mu_sim *sim)
{
    if (sim->now_us < sim->files.full_until_us)
        return MU_ERR_NO_SPACE;
    if (!sim->faults_over && mu_sim_chance(sim, sim->params.io_error_ppm))
        return mu_sim_below(sim, 2) ? MU_ERR_NO_SPACE : MU_ERR_IO;
    return MU_OK;
}

struct mu_sim_piece *mu_sim_files_piece(struct mu_sim_directory *directory, const char *file)
{
    for (uint32_t i = 0; directory && i < directory->piece_count; i++) {
        if (strcmp(directory->pieces[i].file, file) == 0)
            return &directory->pieces[i];
    }
    return NULL;
}

enum mu_status mu_sim_files_write(struct mu_sim *sim, const struct mu_sim_piece *piece)
{
    enum mu_status status = io_luck(sim);
    if (status != MU_OK)
        return status;
    struct mu_sim_directory *directory = mu_sim_files_make(&sim->files, piece->dir);
    struct mu_sim_piece *place = mu_sim_files_piece(directory, piece->file);
    if (!place) {
        directory->pieces = mu_sim_grow(directory->pieces, directory->piece_count, &directory->piece_capacity,
                                        sizeof *directory->pieces);
        place = &directory->pieces[directory->piece_count++];
    }
    *place = *piece;
    return MU_OK;
}

bool mu_sim_files_complete(struct mu_sim *sim, const struct mu_checkpoint_record *record, bool allow_corrupt,
                           const char **ret_why)
{
    if (mu_sim_is_local(record->dir))
        return mu_sim_local_complete(sim, record, ret_why);
    struct mu_sim_directory *directory = mu_sim_files_find(&sim->files, record->dir);
    struct mu_sim_mask found = {0, 0};
    *ret_why = "the directory is not there";
    if (!directory)
        return false;
    for (uint32_t i = 0; i < record->piece_count; i++) {
        const struct mu_piece_record *expected = &record->pieces[i];
        const struct mu_sim_piece *piece = mu_sim_files_piece(directory, expected->file);
        *ret_why = "a piece has not been reported";
        if (!expected->done)
            return false;
        if (expected->file[0] == 0 && expected->size_bytes == 0) /* of a rank that owns no chunk */
            continue;
        *ret_why = "a piece is not there";
        if (!piece)
            return false;
        struct mu_sim_piece clean = *piece;
        if (allow_corrupt)
            clean.corrupt = false;
        struct mu_hash128 sum = mu_sim_piece_checksum(&clean);
        *ret_why = "a piece does not match its checksum";
        if (sum.low != expected->checksum.low || sum.high != expected->checksum.high)
            return false;
        *ret_why = "a piece is of another step";
        if (piece->step != record->step)
            return false;
        *ret_why = "the pieces do not tile the state";
        if (found.params & piece->state.has.params || found.moments & piece->state.has.moments)
            return false;
        found = mu_sim_mask_or(found, piece->state.has);
    }
    *ret_why = "the pieces do not tile the state";
    return found.params == sim->all_chunks && found.moments == sim->all_chunks;
}

enum mu_status mu_sim_files_publish(struct mu_sim *sim, const struct mu_checkpoint_record *record,
                                    const char **ret_text)
{
    enum mu_status status = io_luck(sim);
    *ret_text = "cannot write manifest.json";
    if (status != MU_OK)
        return status;
    /* A mutated coordinator has a mutated shell: the invariant of the commit must find it. */
    if (!mu_sim_files_complete(sim, record, false, ret_text) && !MU_MUTANT(MU_MUT_COMMIT_MISSING_PIECE))
        return MU_ERR_CORRUPT;
    struct mu_sim_directory *directory = mu_sim_files_make(&sim->files, record->dir);
    directory->manifest = true;
    for (uint32_t i = 0; i < record->piece_count; i++) {
        struct mu_sim_piece *piece = mu_sim_files_piece(directory, record->pieces[i].file);
        if (piece)
            piece->listed = true;
    }
    *ret_text = "";
    return MU_OK;
}

enum mu_status mu_sim_files_delete(struct mu_sim *sim, const char *path)
{
    enum mu_status status = io_luck(sim);
    struct mu_sim_directory *directory = mu_sim_files_find(&sim->files, path);
    if (status == MU_ERR_NO_SPACE)
        status = MU_OK; /* deleting needs none */
    if (status != MU_OK || !directory)
        return status;
    free(directory->pieces);
    *directory = sim->files.directories[--sim->files.count];
    return MU_OK;
}

bool mu_sim_files_load(struct mu_sim *sim, const char *path, uint64_t *ret_step, struct mu_sim_values *ret_values)
{
    if (mu_sim_is_local(path))
        return mu_sim_local_load_any(sim, path, ret_step, ret_values);
    struct mu_sim_directory *directory = mu_sim_files_find(&sim->files, path);
    struct mu_sim_state all = {.has = {0, 0}};
    if (!directory || !directory->manifest)
        return false;
    for (uint32_t i = 0; i < directory->piece_count; i++) {
        const struct mu_sim_piece *piece = &directory->pieces[i];
        if (!piece->listed) /* of a writer that was replaced */
            continue;
        if (piece->corrupt || (!mu_sim_mask_empty(all.has) && piece->step != *ret_step))
            return false;
        mu_sim_state_take(&all, &piece->state, piece->state.has);
        *ret_step = piece->step;
    }
    *ret_values = all.values;
    return all.has.params == sim->all_chunks && all.has.moments == sim->all_chunks;
}
