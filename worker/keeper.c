#include "worker/keeper.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "common/fault.h"
#include "common/log.h"
#include "storage/catalog.h"
#include "storage/commit.h"
#include "storage/manifest.h"
#include "storage/piece_copy.h"
#include "worker/files.h"
#include "worker/holder.h"

struct order {
    struct mu_keep_order order;
    struct order *next;
    struct mu_written_piece pieces[];
};

struct mu_keeper {
    struct mu_job_spec spec;
    struct mu_hash128 numeric_identity;
    char host[MU_WORKER_NAME_SIZE], root[MU_PATH_SIZE];
    mu_keeper_done_fn *done;
    void *ctx;
    struct mu_files *files;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct order *first, *last; /* under lock */
    uint32_t waiting;
    bool stop;
    atomic_bool abort;
};

/* One order at work: the checkpoint's directory on this host. */
struct work {
    struct mu_keeper *keeper;
    const struct mu_keep_order *order;
    char dir[MU_PATH_SIZE];
    const char *name;     /* in dir */
    uint64_t own, before; /* whose pieces are here */
};

/* ---- copies ---- */

struct copy_sink {
    const char *dir, *file;
    uint64_t expected_bytes;
    struct mu_piece_copy *copy;
};

static enum mu_status take_block(void *ctx, uint64_t size_bytes, const void *block, size_t block_bytes,
                                 struct mu_error *err)
{
    struct copy_sink *sink = ctx;
    if (block)
        return mu_piece_copy_append(sink->copy, block, block_bytes, err);
    if (size_bytes != sink->expected_bytes)
        return mu_fail(err, MU_ERR_CORRUPT, "piece '%s' has %" PRIu64 " bytes there, its writer reported %" PRIu64,
                       sink->file, size_bytes, sink->expected_bytes);
    return mu_piece_copy_new(sink->dir, sink->file, size_bytes, &sink->copy, err);
}

static enum mu_status copy_piece(const struct work *work, const struct mu_holder *from, const char *file,
                                 uint64_t size_bytes, struct mu_hash128 checksum, struct mu_error *err)
{
    struct copy_sink sink = {.dir = work->dir, .file = file, .expected_bytes = size_bytes};
    enum mu_status status = mu_files_fetch(from, work->name, file, take_block, &sink, &work->keeper->abort, err);
    MU_FAULT("worker.keep.copied");
    if (status == MU_OK)
        status = mu_piece_copy_finish(sink.copy, checksum, err);
    mu_piece_copy_free(sink.copy);
    return status;
}

static bool is_here(const void *ctx, const char *file)
{
    const struct work *work = ctx;
    uint64_t host_id = mu_holder_of_file(file);
    return host_id == work->own || host_id == work->before;
}

/* ---- publish ---- */

static enum mu_status copy_missing(const struct work *work, struct mu_error *err)
{
    const struct mu_keep_order *order = work->order;
    enum mu_status status = MU_OK;
    for (uint32_t i = 0; i < order->piece_count && status == MU_OK; i++) {
        const struct mu_written_piece *piece = &order->pieces[i];
        char path[MU_PATH_SIZE + sizeof piece->file + 1];
        struct stat st;
        if (work->before == work->own || mu_holder_of_file(piece->file) != work->before)
            continue;
        snprintf(path, sizeof path, "%s/%s", work->dir, piece->file);
        bool there = stat(path, &st) == 0 && (uint64_t)st.st_size == piece->size_bytes; /* it appears whole or not */
        if (!there)
            status = copy_piece(work, &order->before, piece->file, piece->size_bytes, piece->checksum, err);
    }
    return status;
}

static uint64_t own_bytes(const struct work *work)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < work->order->piece_count; i++) {
        const struct mu_written_piece *piece = &work->order->pieces[i];
        bytes += mu_holder_of_file(piece->file) == work->own ? piece->size_bytes : 0;
    }
    return bytes;
}

static enum mu_status publish(const struct work *work, uint64_t *ret_size_bytes, struct mu_error *err)
{
    const struct mu_keep_order *order = work->order;
    const struct mu_keeper *keeper = work->keeper;
    uint64_t here_bytes;
    enum mu_status status = mu_checkpoint_make_dir(work->dir, keeper->spec.name, order->checkpoint, err);
    if (status == MU_OK)
        status = copy_missing(work, err);
    if (status == MU_OK)
        status = mu_publish(&(struct mu_publication){.dir = work->dir,
                                                     .spec = &keeper->spec,
                                                     .numeric_identity = keeper->numeric_identity,
                                                     .number = order->checkpoint,
                                                     .step = order->step,
                                                     .generation = order->generation,
                                                     .wall_us = order->wall_us,
                                                     .layout = &order->layout,
                                                     .pieces = order->pieces,
                                                     .piece_count = order->piece_count,
                                                     .is_here = is_here,
                                                     .ctx = work},
                            &here_bytes, err);
    if (status != MU_OK)
        return status;
    *ret_size_bytes = own_bytes(work);
    /* One checkpoint of a job is under way at a time, and this is the newest: what has no manifest was given up. */
    mu_checkpoint_sweep(keeper->root, keeper->spec.name, order->checkpoint, NULL, 0);
    return MU_OK;
}

/* ---- check ---- */

/* Reads slowly: training goes first. */
static void pause_for(const struct work *work, uint64_t size_bytes)
{
    uint64_t left_ms = size_bytes * 1000 / MU_KEEPER_CHECK_BYTES_PER_SECOND;
    while (left_ms > 0 && !atomic_load(&work->keeper->abort)) {
        uint64_t nap_ms = left_ms < 50 ? left_ms : 50;
        nanosleep(&(struct timespec){.tv_nsec = (long)nap_ms * 1000000}, NULL);
        left_ms -= nap_ms;
    }
}

static enum mu_status check_piece(const struct work *work, const struct mu_manifest *manifest,
                                  const struct mu_manifest_piece *piece, struct mu_error *err)
{
    char path[MU_PATH_SIZE + sizeof piece->file + 1];
    struct mu_piece_expected expected = {
        .size_bytes = piece->size_bytes, .xxh3 = piece->xxh3, .identity = &manifest->identity};
    struct mu_piece_read_options options = {.expected = &expected, .abort = &work->keeper->abort};
    struct mu_error here, there;
    snprintf(path, sizeof path, "%s/%s", work->dir, piece->file);
    enum mu_status status = mu_piece_read(path, &options, NULL, &here);
    if (status == MU_OK)
        pause_for(work, piece->size_bytes);
    if (status == MU_OK || status == MU_ERR_CANCELLED || status == MU_ERR_NO_MEMORY)
        return status ? mu_fail(err, status, "%s", here.text) : MU_OK;
    bool is_own = mu_holder_of_file(piece->file) == work->own;
    const struct mu_holder *other = is_own ? &work->order->after : &work->order->before;
    bool alone = mu_host_id(other->host) == work->own;
    enum mu_status copied =
        alone ? status : copy_piece(work, other, piece->file, piece->size_bytes, piece->xxh3, &there);
    if (copied == MU_OK) {
        MU_LOGW("checkpoint %" PRIu64 ": copied again from host %s: %s", work->order->checkpoint, other->host,
                here.text);
        return MU_OK;
    }
    if (alone)
        return mu_fail(err, MU_ERR_CORRUPT, "%s; there is no other copy", here.text);
    enum mu_status worst = copied == MU_ERR_NOT_FOUND || copied == MU_ERR_CORRUPT ? MU_ERR_CORRUPT : copied;
    return mu_fail(err, worst, "%s; and from host %s: %s", here.text, other->host, there.text);
}

static enum mu_status check(const struct work *work, struct mu_error *err)
{
    const struct mu_keep_order *order = work->order;
    const struct mu_holder others[2] = {order->before, order->after};
    struct mu_holder_source source = {.dir = work->dir,
                                      .host = work->keeper->host,
                                      .holders = others,
                                      .holder_count = 2,
                                      .abort = &work->keeper->abort};
    struct mu_manifest *manifest = NULL;
    uint64_t seq, ordered_step;
    struct mu_id nonce;
    enum mu_status status = mu_holder_manifest(&source, &manifest, err);
    if (status != MU_OK)
        return status;
    if (!mu_catalog_parse_name(work->name, &seq, &ordered_step, &nonce) || manifest->identity.seq != seq ||
        !mu_id_equal(manifest->nonce, nonce) || strcmp(manifest->identity.job, work->keeper->spec.name) != 0)
        status = mu_fail(err, MU_ERR_CORRUPT, "the manifest in '%s' belongs to another checkpoint", work->dir);
    if (status == MU_OK)
        status = mu_manifest_check_tiling(manifest, NULL, err);
    if (status == MU_OK)
        status = mu_checkpoint_make_dir(work->dir, work->keeper->spec.name, seq, err);
    for (size_t i = 0; i < manifest->piece_count && status == MU_OK; i++) {
        if (is_here(work, manifest->pieces[i].file))
            status = check_piece(work, manifest, &manifest->pieces[i], err);
    }
    if (status == MU_OK && mu_manifest_write(work->dir, manifest, err) != MU_OK)
        status = err->status;
    mu_manifest_free(manifest);
    return status;
}

/* ---- orders ---- */

static enum mu_status work_off(struct mu_keeper *keeper, const struct mu_keep_order *order,
                               struct mu_kept_report *report, struct mu_error *err)
{
    struct work work = {
        .keeper = keeper, .order = order, .own = mu_host_id(keeper->host), .before = mu_host_id(order->before.host)};
    char root[MU_PATH_SIZE];
    enum mu_status status = mu_holder_path(order->dir, keeper->host, work.dir, err);
    if (status)
        return status;
    if (!mu_checkpoint_root(work.dir, root) || strcmp(root, keeper->root) != 0)
        return mu_fail(err, MU_ERR_INVALID, "'%s' is not a directory of a checkpoint below '%s'", work.dir,
                       keeper->root);
    work.name = strrchr(work.dir, '/') + 1;
    switch (order->kind) {
    case MU_KEEP_PUBLISH:
        MU_FAULT("worker.keep.publish");
        return publish(&work, &report->size_bytes, err);
    case MU_KEEP_CHECK:
        return check(&work, err);
    case MU_KEEP_DISCARD:
        MU_FAULT("worker.keep.discard");
        return mu_checkpoint_remove(work.dir, keeper->spec.name, order->checkpoint, err);
    case MU_KEEP_KIND_END:
        break;
    }
    return mu_fail(err, MU_ERR_INVALID, "an order of kind %d is not known", (int)order->kind);
}

static struct order *take_order(struct mu_keeper *keeper)
{
    struct order *order = keeper->first;
    keeper->first = order->next;
    if (!keeper->first)
        keeper->last = NULL;
    keeper->waiting--;
    return order;
}

static void *keeper_main(void *arg)
{
    struct mu_keeper *keeper = arg;
    pthread_setname_np(pthread_self(), "keeper");
    pthread_mutex_lock(&keeper->lock);
    for (;;) {
        while (!keeper->first && !keeper->stop)
            pthread_cond_wait(&keeper->changed, &keeper->lock);
        if (!keeper->first)
            break;
        struct order *order = take_order(keeper);
        bool silent = keeper->stop;
        pthread_mutex_unlock(&keeper->lock);
        struct mu_kept_report report = {.kind = order->order.kind, .checkpoint = order->order.checkpoint};
        struct mu_error err = {0};
        if (!silent || order->order.kind == MU_KEEP_DISCARD)
            report.status = work_off(keeper, &order->order, &report, &err);
        snprintf(report.text, sizeof report.text, "%.*s", (int)sizeof report.text - 1, err.text);
        pthread_mutex_lock(&keeper->lock);
        silent = keeper->stop;
        pthread_mutex_unlock(&keeper->lock);
        if (!silent)
            keeper->done(keeper->ctx, &report);
        free(order);
        pthread_mutex_lock(&keeper->lock);
    }
    pthread_mutex_unlock(&keeper->lock);
    return NULL;
}

enum mu_status mu_keeper_order(struct mu_keeper *keeper, const struct mu_keep_order *order, struct mu_error *err)
{
    size_t bytes = order->kind == MU_KEEP_PUBLISH ? order->piece_count * sizeof order->pieces[0] : 0;
    struct order *copy = calloc(1, sizeof *copy + bytes);
    if (!copy)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for an order about checkpoint %" PRIu64, order->checkpoint);
    copy->order = *order;
    copy->order.pieces = copy->pieces;
    if (bytes)
        memcpy(copy->pieces, order->pieces, bytes);
    pthread_mutex_lock(&keeper->lock);
    bool full = keeper->waiting == MU_KEEPER_ORDERS_MAX;
    if (!full) {
        if (keeper->last)
            keeper->last->next = copy;
        else
            keeper->first = copy;
        keeper->last = copy;
        keeper->waiting++;
        pthread_cond_signal(&keeper->changed);
    }
    pthread_mutex_unlock(&keeper->lock);
    if (!full)
        return MU_OK;
    free(copy);
    return mu_fail(err, MU_ERR_BUSY, "more than %d orders about checkpoints wait", MU_KEEPER_ORDERS_MAX);
}

enum mu_status mu_keeper_new(const struct mu_keeper_config *config, struct mu_keeper **ret_keeper, struct mu_error *err)
{
    struct mu_keeper *keeper = calloc(1, sizeof *keeper);
    if (!keeper)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory to keep checkpoints of this host");
    keeper->spec = *config->spec;
    keeper->numeric_identity = config->numeric_identity;
    keeper->done = config->done;
    keeper->ctx = config->ctx;
    snprintf(keeper->host, sizeof keeper->host, "%s", config->host);
    pthread_mutex_init(&keeper->lock, NULL);
    pthread_cond_init(&keeper->changed, NULL);
    enum mu_status status = mu_holder_path(config->spec->checkpoint.path, config->host, keeper->root, err);
    if (status == MU_OK)
        status = mu_files_new(config->ip, keeper->spec.data_tls, keeper->root, &keeper->files, err);
    if (status == MU_OK) {
        int reason = pthread_create(&keeper->thread, NULL, keeper_main, keeper);
        status = reason ? mu_fail_errno(err, reason, "no thread to keep checkpoints of this host") : MU_OK;
    }
    if (status == MU_OK) {
        *ret_keeper = keeper;
        return MU_OK;
    }
    mu_files_free(keeper->files);
    free(keeper);
    return status;
}

void mu_keeper_free(struct mu_keeper *keeper)
{
    if (!keeper)
        return;
    atomic_store(&keeper->abort, true);
    pthread_mutex_lock(&keeper->lock);
    keeper->stop = true;
    pthread_cond_signal(&keeper->changed);
    pthread_mutex_unlock(&keeper->lock);
    pthread_join(keeper->thread, NULL);
    mu_files_free(keeper->files);
    pthread_mutex_destroy(&keeper->lock);
    pthread_cond_destroy(&keeper->changed);
    free(keeper);
}

struct inventory {
    uint64_t *nonces;
    uint32_t count;
};

static bool note_checkpoint(void *arg, uint64_t seq, uint64_t step, struct mu_id nonce)
{
    struct inventory *inventory = arg;
    (void)seq;
    (void)step;
    if (inventory->count == MU_INVENTORY_MAX) /* ascending: the oldest goes */
        memmove(inventory->nonces, inventory->nonces + 1, --inventory->count * sizeof *inventory->nonces);
    inventory->nonces[inventory->count++] = nonce.low;
    return true;
}

uint32_t mu_keeper_inventory(const struct mu_keeper *keeper, uint64_t ret_nonces[MU_INVENTORY_MAX])
{
    struct inventory inventory = {.nonces = ret_nonces};
    mu_checkpoint_list(keeper->root, note_checkpoint, &inventory);
    return inventory.count;
}

const char *mu_keeper_address(const struct mu_keeper *keeper)
{
    return mu_files_address(keeper->files);
}

const uint8_t *mu_keeper_secret(const struct mu_keeper *keeper)
{
    return mu_files_secret(keeper->files);
}
