#include "storage/file_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/thread.h"

enum { UNDER_WAY_MAX = 2 };

struct block {
    const void *data;
    size_t data_bytes;
    uint64_t offset;
};

struct mu_file_writer {
    int fd;
    const char *label;
    bool is_direct; /* the thread's */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* Under lock. */
    struct block blocks[UNDER_WAY_MAX]; /* blocks[0] is being written */
    unsigned count;
    bool stop;
    struct mu_error failure; /* the first one; what comes after it is not written */
};

static bool set_direct(int fd, bool direct)
{
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && fcntl(fd, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
}

enum mu_status mu_file_write_at(int fd, const char *label, const void *data, size_t data_bytes, uint64_t offset,
                                bool *is_direct, struct mu_error *err)
{
    const uint8_t *from = data;
    while (data_bytes > 0) {
        ssize_t written = pwrite(fd, from, data_bytes, (off_t)offset);
        if (written < 0 && errno == EINTR)
            continue;
        if (written < 0 && errno == EINVAL && *is_direct && set_direct(fd, false)) {
            *is_direct = false;
            continue;
        }
        if (written <= 0)
            return mu_fail_errno(err, written < 0 ? errno : EIO, "'%s': cannot write at byte %llu", label,
                                 (unsigned long long)offset);
        from += written;
        data_bytes -= (size_t)written;
        offset += (uint64_t)written;
    }
    return MU_OK;
}

static void *writer_main(void *arg)
{
    struct mu_file_writer *writer = arg;
    pthread_mutex_lock(&writer->lock);
    for (;;) {
        while (writer->count == 0 && !writer->stop)
            pthread_cond_wait(&writer->changed, &writer->lock);
        if (writer->stop)
            break;
        struct block block = writer->blocks[0];
        struct mu_error failure = writer->failure;
        pthread_mutex_unlock(&writer->lock);
        if (failure.status == MU_OK && mu_file_write_at(writer->fd, writer->label, block.data, block.data_bytes,
                                                        block.offset, &writer->is_direct, &failure) != MU_OK)
            MU_ASSERT(failure.status != MU_OK);
        pthread_mutex_lock(&writer->lock);
        writer->failure = failure;
        writer->count--;
        for (unsigned i = 0; i < writer->count; i++)
            writer->blocks[i] = writer->blocks[i + 1];
        pthread_cond_broadcast(&writer->changed);
    }
    pthread_mutex_unlock(&writer->lock);
    return NULL;
}

struct mu_file_writer *mu_file_writer_new(int fd, const char *label)
{
    struct mu_file_writer *writer = calloc(1, sizeof *writer);
    if (!writer)
        return NULL;
    writer->fd = fd;
    writer->label = label;
    writer->is_direct = true;
    pthread_mutex_init(&writer->lock, NULL);
    pthread_cond_init(&writer->changed, NULL);
    if (set_direct(fd, true)) {
        if (mu_thread_start(&writer->thread, writer_main, writer) == 0)
            return writer;
        (void)set_direct(fd, false);
    }
    pthread_mutex_destroy(&writer->lock);
    pthread_cond_destroy(&writer->changed);
    free(writer);
    return NULL;
}

static enum mu_status failed(const struct mu_file_writer *writer, struct mu_error *err)
{
    return writer->failure.status == MU_OK ? MU_OK : mu_fail(err, writer->failure.status, "%s", writer->failure.text);
}

enum mu_status mu_file_writer_put(struct mu_file_writer *writer, const void *data, size_t data_bytes, uint64_t offset,
                                  struct mu_error *err)
{
    MU_ASSERT((uintptr_t)data % MU_FILE_PAGE_BYTES == 0 && data_bytes % MU_FILE_PAGE_BYTES == 0 &&
              offset % MU_FILE_PAGE_BYTES == 0);
    pthread_mutex_lock(&writer->lock);
    while (writer->count == UNDER_WAY_MAX)
        pthread_cond_wait(&writer->changed, &writer->lock);
    enum mu_status status = failed(writer, err);
    if (status == MU_OK && data_bytes > 0) {
        writer->blocks[writer->count++] = (struct block){.data = data, .data_bytes = data_bytes, .offset = offset};
        pthread_cond_broadcast(&writer->changed);
    }
    pthread_mutex_unlock(&writer->lock);
    return status;
}

enum mu_status mu_file_writer_drain(struct mu_file_writer *writer, struct mu_error *err)
{
    pthread_mutex_lock(&writer->lock);
    while (writer->count > 0)
        pthread_cond_wait(&writer->changed, &writer->lock);
    enum mu_status status = failed(writer, err);
    pthread_mutex_unlock(&writer->lock);
    return status;
}

void mu_file_writer_free(struct mu_file_writer *writer)
{
    if (!writer)
        return;
    pthread_mutex_lock(&writer->lock);
    writer->stop = true;
    pthread_cond_broadcast(&writer->changed);
    pthread_mutex_unlock(&writer->lock);
    pthread_join(writer->thread, NULL);
    (void)set_direct(writer->fd, false);
    pthread_mutex_destroy(&writer->lock);
    pthread_cond_destroy(&writer->changed);
    free(writer);
}
