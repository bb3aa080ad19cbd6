#include "worker/measure.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "plan/session.h"
#include "storage/file.h"

enum { BLOCK_BYTES = 1 << 20, LOOK_NS = 5000000 };

/* Shared with its thread; whoever leaves last frees it. */
struct run {
    atomic_int owners;
    atomic_bool cancel, done;
    char dir[MU_PATH_SIZE];
    bool make;
    uint64_t mib;
    double write_rate, read_rate;
    struct mu_error err; /* status MU_OK: it went well */
};

static void leave(struct run *run)
{
    if (atomic_fetch_sub(&run->owners, 1) == 1)
        free(run);
}

static bool pass(struct run *run, int fd, char *block, bool writes)
{
    for (uint64_t i = 0; i < run->mib && !atomic_load(&run->cancel); i++)
        for (size_t done = 0; done < BLOCK_BYTES;) {
            ssize_t now =
                writes ? write(fd, block + done, BLOCK_BYTES - done) : read(fd, block + done, BLOCK_BYTES - done);
            if (now < 0 && errno == EINTR)
                continue;
            if (now == 0)
                errno = EIO; /* somebody cuts the file */
            if (now <= 0)
                return false;
            done += (size_t)now;
        }
    return true;
}

static double rate_of(const struct run *run, uint64_t begun_us)
{
    uint64_t took_us = mu_clock_mono_us() - begun_us;
    return (double)(run->mib << 20) * 1e6 / (double)(took_us ? took_us : 1);
}

static enum mu_status write_and_read(struct run *run, struct mu_error *err)
{
    char path[MU_PATH_SIZE + 32];
    enum mu_status status = run->make ? mu_file_make_dirs(run->dir, err) : MU_OK;
    if (status != MU_OK)
        return status;
    snprintf(path, sizeof path, "%s/.muster-probe-XXXXXX", run->dir);
    int fd = mkostemp(path, O_CLOEXEC);
    if (fd < 0)
        return mu_fail_errno(err, errno, "%s: cannot write there", run->dir);
    unlink(path);
    char *block = malloc(BLOCK_BYTES);
    for (size_t i = 0; block && i < BLOCK_BYTES; i++)
        block[i] = (char)(i * 2654435761u >> 13); /* what file systems cannot make small */
    uint64_t begun_us = mu_clock_mono_us();
    errno = ENOMEM;
    bool good = block && pass(run, fd, block, true) && fsync(fd) == 0;
    run->write_rate = rate_of(run, begun_us);
    good = good && posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0 && lseek(fd, 0, SEEK_SET) == 0;
    begun_us = mu_clock_mono_us();
    good = good && pass(run, fd, block, false);
    run->read_rate = rate_of(run, begun_us);
    if (!good)
        status = mu_fail_errno(err, errno, "%s: writing and reading %u MiB there", run->dir, (unsigned)run->mib);
    free(block);
    close(fd);
    return status;
}

static void *work(void *arg)
{
    struct run *run = arg;
    pthread_setname_np(pthread_self(), "measure");
    if (write_and_read(run, &run->err) == MU_OK)
        run->err.status = MU_OK;
    atomic_store(&run->done, true);
    leave(run);
    return NULL;
}

enum mu_status mu_measure_storage(const struct mu_measure *m, const char *dir, bool make, uint64_t mib,
                                  double *ret_write_rate, double *ret_read_rate, struct mu_error *err)
{
    pthread_t thread;
    struct run *run = calloc(1, sizeof *run);
    if (!run)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory to measure storage");
    run->make = make;
    run->mib = mib;
    run->owners = 2;
    if ((size_t)snprintf(run->dir, sizeof run->dir, "%s", dir) >= sizeof run->dir) {
        free(run);
        return mu_fail(err, MU_ERR_INVALID, "directory: longer than %d bytes", MU_PATH_SIZE - 1);
    }
    int reason = pthread_create(&thread, NULL, work, run);
    if (reason != 0) {
        free(run);
        return mu_fail_errno(err, reason, "cannot start a thread");
    }
    pthread_detach(thread);
    enum mu_status status = MU_OK;
    while (!atomic_load(&run->done) && (status = mu_measure_goes_on(m, err)) == MU_OK)
        nanosleep(&(struct timespec){.tv_nsec = LOOK_NS}, NULL);
    if (status != MU_OK) {
        atomic_store(&run->cancel, true);
    } else if (run->err.status != MU_OK) {
        *err = run->err;
        status = err->status;
    } else {
        *ret_write_rate = run->write_rate;
        *ret_read_rate = run->read_rate;
    }
    leave(run);
    return status;
}
