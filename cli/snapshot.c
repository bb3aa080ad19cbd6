/* muster snapshot, muster catalog: the coordinator's records to a file, and a data directory from one, or from what
 * checkpoints say. */
#include "cli/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/clock.h"
#include "coordinator/rebuild.h"
#include "coordinator/snapshot.h"
#include "storage/file.h"

static enum mu_status fail_file(struct mu_error *err, const char *path, const char *what)
{
    return mu_fail(err, errno == ENOSPC ? MU_ERR_NO_SPACE : MU_ERR_IO, "%s: %s: %s", path, what, strerror(errno));
}

static enum mu_status write_all(int fd, const char *path, const uint8_t *data, size_t size_bytes, struct mu_error *err)
{
    while (size_bytes > 0) {
        ssize_t done = write(fd, data, size_bytes);
        if (done < 0 && errno != EINTR)
            return fail_file(err, path, "cannot be written");
        if (done > 0) {
            data += done;
            size_bytes -= (size_t)done;
        }
    }
    return MU_OK;
}

/* Page by page into the open file. */
static enum mu_status fetch(struct mu_cli *cli, int fd, const char *path, uint64_t *ret_size_bytes,
                            struct mu_error *err)
{
    Muster__V1__SaveSnapshotRequest request = MUSTER__V1__SAVE_SNAPSHOT_REQUEST__INIT;
    const ProtobufCMessage *base;
    uint64_t size_bytes = 0;
    do {
        mu_wire_arena_reset(&cli->arena);
        enum mu_status status =
            mu_cli_call(cli, "SaveSnapshot", &request, &muster__v1__save_snapshot_response__descriptor, &base, err);
        if (status)
            return status;
        const Muster__V1__SaveSnapshotResponse *reply = (const Muster__V1__SaveSnapshotResponse *)base;
        if (reply->data.len == 0)
            return mu_fail(err, MU_ERR_CORRUPT, "the coordinator sends an empty page of its snapshot");
        status = write_all(fd, path, reply->data.data, reply->data.len, err);
        if (status)
            return status;
        request.snapshot = reply->snapshot;
        request.offset += reply->data.len;
        size_bytes = reply->size_bytes;
    } while (request.offset < size_bytes);
    *ret_size_bytes = size_bytes;
    return MU_OK;
}

/* Under a temporary name until it is whole and on the disk; for the owner's eyes only. */
static enum mu_status save_to(struct mu_cli *cli, const char *path, uint64_t *ret_size_bytes, struct mu_error *err)
{
    char temporary[4096], parent[4096];
    if ((size_t)snprintf(temporary, sizeof temporary, "%s.tmp.%ld", path, (long)getpid()) >= sizeof temporary)
        return mu_fail(err, MU_ERR_INVALID, "%s: the name is too long", path);
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return fail_file(err, temporary, "cannot be created");
    enum mu_status status = fetch(cli, fd, temporary, ret_size_bytes, err);
    if (status == MU_OK && fsync(fd) != 0)
        status = fail_file(err, temporary, "cannot be synced");
    if (close(fd) != 0 && status == MU_OK)
        status = fail_file(err, temporary, "cannot be closed");
    if (status == MU_OK && rename(temporary, path) != 0)
        status = fail_file(err, path, "cannot be named");
    if (status) {
        unlink(temporary);
        return status;
    }
    mu_file_parent(path, parent, sizeof parent);
    return mu_file_sync_dir(parent, err);
}

static int save(struct mu_cli *cli, const char *path)
{
    struct mu_error err;
    uint64_t size_bytes = 0;
    int code = mu_cli_open(cli);
    if (code != MU_EXIT_OK)
        return code;
    if (save_to(cli, path, &size_bytes, &err) != MU_OK)
        return mu_cli_fail(&err);
    printf("%s: %" PRIu64 " bytes\n", path, size_bytes);
    return MU_EXIT_OK;
}

/* What fills a data directory is tried in memory first: one that fails leaves no directory behind. */
typedef enum mu_status fill_fn(void *arg, struct mu_store *store, struct mu_error *err);

static enum mu_status fill(const char *data_dir, fill_fn *fn, void *arg, struct mu_error *err)
{
    const struct mu_store_rocksdb_config config = {.path = data_dir, .reserve_bytes = MU_STORE_RESERVE_BYTES_DEFAULT};
    struct mu_store *trial = mu_store_memory_new(), *store = NULL;
    enum mu_status status = trial ? fn(arg, trial, err) : mu_fail(err, MU_ERR_NO_MEMORY, "no memory for a store");
    mu_store_free(trial);
    if (status == MU_OK)
        status = mu_store_rocksdb_open(&config, &store, NULL, err);
    if (status == MU_OK)
        status = fn(arg, store, err);
    mu_store_free(store);
    return status;
}

struct restoring {
    const char *path;
    char *bytes;
    size_t size_bytes;
    uint64_t epoch;
    struct mu_snapshot_report report;
};

static enum mu_status restore_into(void *arg, struct mu_store *store, struct mu_error *err)
{
    struct restoring *r = arg;
    enum mu_status status = mu_snapshot_restore((const uint8_t *)r->bytes, r->size_bytes, r->epoch, mu_clock_wall_us(),
                                                store, &r->report, err);
    return status == MU_OK ? MU_OK : mu_error_prefix(err, "%s", r->path);
}

static int restore(const char *path, const char *data_dir, uint64_t epoch)
{
    struct mu_error err;
    struct restoring r = {.path = path, .epoch = epoch};
    enum mu_status status = mu_file_read_all(path, MU_SNAPSHOT_BYTES_MAX, &r.bytes, &r.size_bytes, &err);
    if (status == MU_OK)
        status = fill(data_dir, restore_into, &r, &err);
    free(r.bytes);
    if (status)
        return mu_cli_fail(&err);
    printf("%s: %" PRIu64 " records restored, epoch %" PRIu64 "; start: musterd --data-dir %s\n", data_dir,
           r.report.records, r.report.epoch, data_dir);
    return MU_EXIT_OK;
}

int mu_cmd_snapshot(struct mu_cli *cli, int argc, char **argv)
{
    const char *data_dir = "", *number = "0";
    const struct mu_cli_option options[] = {{"--data-dir", &data_dir, NULL}, {"--epoch", &number, NULL}};
    uint64_t epoch;
    if (mu_cli_parse("snapshot", argc, argv, options, 2, 2, 2) < 0 ||
        !mu_cli_number("snapshot", "--epoch", number, 0, MU_EPOCH_MAX, &epoch))
        return MU_EXIT_USAGE;
    if (strcmp(argv[0], "save") == 0)
        return save(cli, argv[1]);
    if (strcmp(argv[0], "restore") != 0)
        return mu_cli_usage("snapshot", "'%s' is not known: save FILE, or restore FILE --data-dir DIR", argv[0]);
    if (!data_dir[0])
        return mu_cli_usage("snapshot", "restore needs --data-dir DIR, a new directory");
    return restore(argv[1], data_dir, epoch);
}

struct rebuilding {
    const char *root, *job;
    struct mu_rebuild_report report;
};

static enum mu_status rebuild_into(void *arg, struct mu_store *store, struct mu_error *err)
{
    struct rebuilding *r = arg;
    return mu_rebuild_job(r->root, r->job, mu_clock_wall_us(), store, &r->report, err);
}

/* An existing data directory is fine: other jobs stay as they are. */
static int rebuild(const char *root, const char *job, const char *data_dir)
{
    struct mu_error err;
    struct rebuilding r = {.root = root, .job = job};
    const struct mu_rebuild_report *report = &r.report;
    enum mu_status status = fill(data_dir, rebuild_into, &r, &err);
    for (uint32_t i = 0; i < report->problem_count && i < MU_REBUILD_PROBLEMS_MAX; i++)
        fprintf(stderr, "muster: left out: %s\n", report->problems[i].text);
    if (status)
        return mu_cli_fail(&err);
    printf("%s: job %s with %u checkpoints, the newest of step %" PRIu64 "; start: musterd --data-dir %s\n", data_dir,
           job, report->checkpoints, report->newest_step, data_dir);
    return MU_EXIT_OK;
}

int mu_cmd_catalog(struct mu_cli *cli, int argc, char **argv)
{
    (void)cli;
    char root[MU_PATH_SIZE];
    const char *data_dir = "", *job = "";
    const struct mu_cli_option options[] = {{"--data-dir", &data_dir, NULL}, {"--job", &job, NULL}};
    if (mu_cli_parse("catalog", argc, argv, options, 2, 2, 2) < 0)
        return MU_EXIT_USAGE;
    if (strcmp(argv[0], "rebuild") != 0)
        return mu_cli_usage("catalog", "'%s' is not known: rebuild DIR --job JOB --data-dir DIR", argv[0]);
    if (!data_dir[0] || !job[0])
        return mu_cli_usage("catalog", "rebuild needs --job JOB and --data-dir DIR");
    char *absolute = realpath(argv[1], NULL); /* workers open it under this name */
    if (!absolute || strlen(absolute) >= sizeof root) {
        fprintf(stderr, "muster: %s: %s\n", argv[1], absolute ? "the name is too long" : strerror(errno));
        free(absolute);
        return MU_EXIT_NOT_FOUND;
    }
    snprintf(root, sizeof root, "%s", absolute);
    free(absolute);
    return rebuild(root, job, data_dir);
}
