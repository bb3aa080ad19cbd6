#include "common/queue.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

struct mu_queue {
    pthread_mutex_t lock;
    pthread_cond_t not_empty, not_full;
    size_t capacity, first, count;
    int fd; /* readable while count > 0 */
    void *items[];
};

struct mu_queue *mu_queue_new(size_t capacity)
{
    struct mu_queue *queue = calloc(1, sizeof *queue + capacity * sizeof queue->items[0]);
    if (!queue)
        return NULL;
    queue->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (queue->fd < 0) {
        free(queue);
        return NULL;
    }
    queue->capacity = capacity;
    pthread_mutex_init(&queue->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&queue->not_empty, &attr);
    pthread_cond_init(&queue->not_full, &attr);
    pthread_condattr_destroy(&attr);
    return queue;
}

void mu_queue_free(struct mu_queue *queue)
{
    if (!queue)
        return;
    close(queue->fd);
    pthread_cond_destroy(&queue->not_empty);
    pthread_cond_destroy(&queue->not_full);
    pthread_mutex_destroy(&queue->lock);
    free(queue);
}

static void put(struct mu_queue *queue, void *item)
{
    queue->items[(queue->first + queue->count++) % queue->capacity] = item;
    if (queue->count == 1) {
        uint64_t one = 1;
        ssize_t ignored = write(queue->fd, &one, sizeof one);
        (void)ignored;
    }
    pthread_cond_signal(&queue->not_empty);
}

enum mu_status mu_queue_push(struct mu_queue *queue, void *item)
{
    enum mu_status status = MU_ERR_BUSY;
    pthread_mutex_lock(&queue->lock);
    if (queue->count < queue->capacity) {
        put(queue, item);
        status = MU_OK;
    }
    pthread_mutex_unlock(&queue->lock);
    return status;
}

void mu_queue_push_wait(struct mu_queue *queue, void *item)
{
    pthread_mutex_lock(&queue->lock);
    while (queue->count == queue->capacity)
        pthread_cond_wait(&queue->not_full, &queue->lock);
    put(queue, item);
    pthread_mutex_unlock(&queue->lock);
}

void *mu_queue_pop(struct mu_queue *queue, int timeout_ms)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += timeout_ms / 1000;
    until.tv_nsec += timeout_ms % 1000 * 1000000L;
    if (until.tv_nsec >= 1000000000L) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000L;
    }
    void *item = NULL;
    pthread_mutex_lock(&queue->lock);
    while (queue->count == 0 && timeout_ms != 0) {
        if (timeout_ms < 0)
            pthread_cond_wait(&queue->not_empty, &queue->lock);
        else if (pthread_cond_timedwait(&queue->not_empty, &queue->lock, &until) != 0)
            break;
    }
    if (queue->count > 0) {
        item = queue->items[queue->first];
        queue->first = (queue->first + 1) % queue->capacity;
        if (--queue->count == 0) {
            uint64_t drained;
            ssize_t ignored = read(queue->fd, &drained, sizeof drained);
            (void)ignored;
        }
        pthread_cond_signal(&queue->not_full);
    }
    pthread_mutex_unlock(&queue->lock);
    return item;
}

size_t mu_queue_count(struct mu_queue *queue)
{
    pthread_mutex_lock(&queue->lock);
    size_t count = queue->count;
    pthread_mutex_unlock(&queue->lock);
    return count;
}

int mu_queue_fd(struct mu_queue *queue)
{
    return queue->fd;
}
