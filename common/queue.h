/* Bounded multi-producer queue with an eventfd, for hand-over between threads.
 * Any thread pushes and pops; `mu_queue_fd` becomes readable while items wait. Items are pointers; ownership moves with
 * them. */
#ifndef MU_COMMON_QUEUE_H
#define MU_COMMON_QUEUE_H

#include <stdbool.h>
#include <stddef.h>

#include "common/status.h"

struct mu_queue;

/* NULL when memory or file descriptors are out. */
struct mu_queue *mu_queue_new(size_t capacity);
/* The queue must be empty or hold only items that the caller does not own. NULL is fine. */
void mu_queue_free(struct mu_queue *queue);

/* MU_ERR_BUSY when full; never blocks. */
enum mu_status mu_queue_push(struct mu_queue *queue, void *item) MU_WARN_UNUSED;
/* Blocks until there is room (for producers that may wait, such as completion-queue pollers). */
void mu_queue_push_wait(struct mu_queue *queue, void *item);
/* NULL when nothing came within timeout_ms (0: do not wait, -1: for ever). */
void *mu_queue_pop(struct mu_queue *queue, int timeout_ms);
size_t mu_queue_count(struct mu_queue *queue);
int mu_queue_fd(struct mu_queue *queue);

#endif
