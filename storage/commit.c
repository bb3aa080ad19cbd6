#include "storage/commit.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/fault.h"
#include "common/log.h"
#include "storage/catalog.h"
#include "storage/job_json.h"
#include "storage/manifest.h"

/* A checkpoint's directory in its parts. */
struct place {
    char root[MU_PATH_SIZE];
    const char *name; /* inside `dir` */
    uint64_t seq, ordered_step;
    struct mu_id nonce;
};

static bool split(const char *dir, struct place *out)
{
    const char *slash = strrchr(dir, '/');
    if (!slash || slash == dir || !mu_catalog_parse_name(slash + 1, &out->seq, &out->ordered_step, &out->nonce))
        return false;
    size_t length = (size_t)(slash - dir);
    if (length >= sizeof out->root)
        return false;
    memcpy(out->root, dir, length);
    out->root[length] = 0;
    out->name = slash + 1;
    return true;
}

static enum mu_status find_place(const char *dir, const char *job, uint64_t number, struct place *out,
                                 struct mu_error *err)
{
    if (split(dir, out) && out->seq == number)
        return MU_OK;
    return mu_fail(err, MU_ERR_INVALID, "checkpoint %" PRIu64 " of job %s: '%s' is not the name of its directory",
                   number, job, dir);
}

bool mu_checkpoint_root(const char *dir, char ret_root[MU_PATH_SIZE])
{
    struct place place;
    if (!split(dir, &place))
        return false;
    memcpy(ret_root, place.root, sizeof place.root);
    return true;
}

static bool has_manifest(const char *dir)
{
    char path[MU_PATH_SIZE + MU_CATALOG_NAME_SIZE + 32];
    struct stat st;
    snprintf(path, sizeof path, "%s/" MU_MANIFEST_FILE, dir);
    return lstat(path, &st) == 0;
}

enum mu_status mu_checkpoint_make_dir(const char *dir, const char *job, uint64_t number, struct mu_error *err)
{
    struct place place;
    char path[MU_PATH_SIZE];
    enum mu_status status = find_place(dir, job, number, &place, err);
    if (status || has_manifest(dir))
        return status;
    return mu_catalog_create(place.root, job, number, place.ordered_step, place.nonce, path, err);
}

/* ---- publish ---- */

enum mu_status mu_piece_file_check(const char *path, uint64_t size_bytes, struct mu_error *err)
{
    struct stat st;
    if (lstat(path, &st) != 0)
        return mu_fail_errno(err, errno, "checkpoint piece '%s' was reported written but is not there", path);
    if (!S_ISREG(st.st_mode) || (uint64_t)st.st_size != size_bytes)
        return mu_fail(err, MU_ERR_CORRUPT, "checkpoint piece '%s' has %lld bytes, its writer reported %" PRIu64, path,
                       (long long)st.st_size, size_bytes);
    return MU_OK;
}

static bool same_entry(const struct mu_piece_entry *a, const struct mu_piece_entry *b)
{
    return a->kind == b->kind && a->cell == b->cell && a->first_chunk == b->first_chunk &&
           a->chunk_count == b->chunk_count && a->offset == b->offset && a->size == b->size;
}

/* The chunks that a piece is to hold. */
struct part {
    struct mu_chunk_run runs[MU_RUNS_MAX];
    uint32_t count;
};

static enum mu_status check_entries(const char *path, const struct mu_model_spec *model, const struct part *part,
                                    const struct mu_piece_entry *entries, size_t entry_count, struct mu_error *err)
{
    size_t wanted_count = mu_piece_entries_of_runs(model, part->runs, part->count, NULL, 0);
    struct mu_piece_entry *wanted = calloc(wanted_count ? wanted_count : 1, sizeof *wanted);
    if (!wanted)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory to check '%s'", path);
    mu_piece_entries_of_runs(model, part->runs, part->count, wanted, wanted_count);
    bool same = wanted_count == entry_count;
    for (size_t i = 0; same && i < entry_count; i++)
        same = same_entry(&wanted[i], &entries[i]);
    free(wanted);
    if (same)
        return MU_OK;
    return mu_fail(err, MU_ERR_CORRUPT,
                   "checkpoint piece '%s' does not hold the chunks that are its part (%u runs, from chunk %u on)", path,
                   part->count, part->count ? part->runs[0].first : 0);
}

static enum mu_status check_piece(const struct mu_publication *publication, const struct mu_written_piece *piece,
                                  const struct mu_model_spec *model, const struct part *part, struct mu_error *err)
{
    char path[MU_PATH_SIZE + sizeof piece->file + 1];
    snprintf(path, sizeof path, "%s/%s", publication->dir, piece->file);
    enum mu_status status = mu_piece_file_check(path, piece->size_bytes, err);
    if (status)
        return status;
    struct mu_checkpoint_identity identity;
    struct mu_piece_entry *entries = NULL;
    size_t entry_count = 0;
    status = mu_piece_list(path, &identity, &entries, &entry_count, err);
    if (status)
        return status;
    /* Not the generation: a writer may be parked in an older one, with the same state of the step. */
    if (strcmp(identity.job, publication->spec->name) != 0 || identity.seq != publication->number ||
        identity.step != publication->step)
        status = mu_fail(err, MU_ERR_CORRUPT,
                         "checkpoint piece '%s' is of job %s, checkpoint %" PRIu64 ", step %" PRIu64
                         "; wanted %s, %" PRIu64 ", %" PRIu64,
                         path, identity.job, identity.seq, identity.step, publication->spec->name, publication->number,
                         publication->step);
    else
        status = check_entries(path, model, part, entries, entry_count, err);
    free(entries);
    return status;
}

static enum mu_status begin_manifest(const struct mu_publication *publication, const struct mu_model_spec *model,
                                     struct mu_id nonce, struct mu_manifest *manifest, struct mu_error *err)
{
    snprintf(manifest->identity.job, sizeof manifest->identity.job, "%s", publication->spec->name);
    manifest->identity.seq = publication->number;
    manifest->identity.step = publication->step;
    manifest->identity.generation = publication->generation;
    manifest->nonce = nonce;
    manifest->created_wall_us = publication->wall_us;
    manifest->chunk_count = model->chunk_count;
    snprintf(manifest->numeric_identity, sizeof manifest->numeric_identity, "%016" PRIx64 "%016" PRIx64,
             publication->numeric_identity.high, publication->numeric_identity.low);
    char *text = mu_job_spec_to_text(publication->spec);
    enum mu_status status = text ? mu_manifest_set_job_record(manifest, text) : MU_ERR_NO_MEMORY;
    free(text);
    if (status)
        return mu_fail(err, status, "no memory for the manifest of checkpoint %" PRIu64, publication->number);
    return MU_OK;
}

static enum mu_status add_piece(const struct mu_publication *publication, uint32_t number,
                                const struct mu_model_spec *model, struct mu_manifest *manifest, uint64_t *here_bytes,
                                struct mu_error *err)
{
    const struct mu_written_piece *piece = &publication->pieces[number];
    struct part part;
    part.count = mu_layout_runs(model, publication->layout, number, MU_SHARE_PRIMARY, part.runs);
    if (part.count == 0)
        return MU_OK; /* more ranks than chunks: it has no file */
    if (piece->file[0] == 0)
        return mu_fail(err, MU_ERR_CORRUPT, "piece %u of checkpoint %" PRIu64 " is not written", number,
                       publication->number);
    enum mu_status status = MU_OK;
    if (!publication->is_here || publication->is_here(publication->ctx, piece->file)) {
        status = check_piece(publication, piece, model, &part, err);
        *here_bytes += piece->size_bytes;
    }
    if (status)
        return status;
    status =
        mu_manifest_add_runs(manifest, model, piece->file, piece->size_bytes, piece->checksum, part.runs, part.count);
    return status ? mu_fail(err, status, "piece '%s' does not fit into the manifest", piece->file) : MU_OK;
}

static enum mu_status build_manifest(const struct mu_publication *publication, struct mu_id nonce,
                                     struct mu_manifest *manifest, uint64_t *ret_here_bytes, struct mu_error *err)
{
    struct mu_model_spec model;
    mu_model_spec_init(&model, &publication->spec->model);
    *ret_here_bytes = 0;
    enum mu_status status = mu_layout_check(publication->layout, publication->spec, err);
    if (status)
        return status;
    if (mu_layout_working(publication->layout) != publication->piece_count)
        return mu_fail(err, MU_ERR_INVALID, "checkpoint %" PRIu64 " has %u pieces, its layout %u", publication->number,
                       publication->piece_count, mu_layout_working(publication->layout));
    status = begin_manifest(publication, &model, nonce, manifest, err);
    for (uint32_t i = 0; i < publication->piece_count && status == MU_OK; i++)
        status = add_piece(publication, i, &model, manifest, ret_here_bytes, err);
    return status ? status : mu_manifest_check_tiling(manifest, &model, err);
}

enum mu_status mu_publish(const struct mu_publication *publication, uint64_t *ret_here_bytes, struct mu_error *err)
{
    const char *job = publication->spec->name;
    struct place place;
    enum mu_status status = find_place(publication->dir, job, publication->number, &place, err);
    if (status == MU_OK) /* its owner file makes it deletable one day */
        status = mu_checkpoint_make_dir(publication->dir, job, publication->number, err);
    if (status)
        return status;
    struct mu_manifest *manifest = mu_manifest_new();
    if (!manifest)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the manifest of checkpoint %" PRIu64, publication->number);
    status = build_manifest(publication, place.nonce, manifest, ret_here_bytes, err);
    MU_FAULT("coord.publish.manifest.before");
    if (status == MU_OK)
        status = mu_manifest_write(publication->dir, manifest, err);
    MU_FAULT("coord.publish.manifest.after");
    mu_manifest_free(manifest);
    return status;
}

/* ---- list ---- */

static int only_checkpoints(const struct dirent *entry)
{
    uint64_t seq, step;
    struct mu_id nonce;
    return mu_catalog_parse_name(entry->d_name, &seq, &step, &nonce);
}

void mu_checkpoint_list(const char *root, bool (*fn)(void *arg, uint64_t seq, uint64_t step, struct mu_id nonce),
                        void *arg)
{
    struct dirent **entries = NULL;
    int count = scandir(root, &entries, only_checkpoints, alphasort); /* numbers have leading zeros */
    bool going = true;
    for (int i = 0; i < count; i++) {
        char dir[MU_PATH_SIZE + MU_CATALOG_NAME_SIZE];
        struct mu_id nonce;
        uint64_t seq, step;
        snprintf(dir, sizeof dir, "%s/%.*s", root, MU_CATALOG_NAME_SIZE - 1, entries[i]->d_name);
        if (going && mu_catalog_parse_name(entries[i]->d_name, &seq, &step, &nonce) && has_manifest(dir))
            going = fn(arg, seq, step, nonce);
        free(entries[i]);
    }
    free(entries);
}

/* ---- delete and sweep ---- */

enum mu_status mu_checkpoint_remove(const char *dir, const char *job, uint64_t number, struct mu_error *err)
{
    struct place place;
    struct stat st;
    enum mu_status status = find_place(dir, job, number, &place, err);
    if (status)
        return status;
    if (lstat(dir, &st) == 0) {
        status = mu_checkpoint_make_dir(dir, job, number, err); /* aborted before it was marked as ours? */
        if (status == MU_OK)
            status = mu_catalog_delete(place.root, place.name, err);
    } else if (errno == ENOENT) {
        status = mu_catalog_empty_trash(place.root, NULL, err); /* an earlier try may have come as far as the trash */
    } else if (errno != ENOTDIR) { /* ENOTDIR: its parent is a file, so it was never made */
        status = mu_fail_errno(err, errno, "cannot look at checkpoint directory '%s'", dir);
    }
    return status == MU_ERR_NOT_FOUND ? MU_OK : status;
}

struct sweep {
    const char *root;
    uint64_t before;
    const uint64_t *known;
    size_t known_count;
};

static bool keep_in_sweep(void *arg, uint64_t seq, uint64_t step, struct mu_id nonce)
{
    const struct sweep *sweep = arg;
    char name[MU_CATALOG_NAME_SIZE], dir[MU_PATH_SIZE + MU_CATALOG_NAME_SIZE];
    if (seq >= sweep->before)
        return true;
    for (size_t i = 0; i < sweep->known_count; i++) {
        if (sweep->known[i] == seq)
            return true;
    }
    /* Committed ones are never swept: they may be all that is left of a job whose records were lost or replaced. */
    mu_catalog_name(seq, step, nonce, name);
    snprintf(dir, sizeof dir, "%s/%s", sweep->root, name);
    return has_manifest(dir);
}

void mu_checkpoint_sweep(const char *root, const char *job, uint64_t before, const uint64_t *known, size_t known_count)
{
    struct sweep sweep = {.root = root, .before = before, .known = known, .known_count = known_count};
    struct mu_error err = {0};
    size_t removed = 0;
    if (mu_catalog_empty_trash(root, NULL, &err) != MU_OK)
        MU_LOGW("job %s: an interrupted delete of a checkpoint could not be finished: %s", job, err.text);
    if (mu_catalog_sweep(root, job, keep_in_sweep, &sweep, &removed, &err) != MU_OK)
        MU_LOGW("job %s: what an aborted checkpoint left could not be removed: %s", job, err.text);
    if (removed)
        MU_LOGI("job %s: removed the remains of %zu aborted checkpoints below %s", job, removed, root);
}
