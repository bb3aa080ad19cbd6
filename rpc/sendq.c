#include "rpc/sendq.h"

#include <stdlib.h>

struct mu_rpc_sendq_node {
    struct mu_rpc_sendq_node *next;
    struct mu_rpc_bytes *message;
};

void mu_rpc_sendq_init(struct mu_rpc_sendq *queue, size_t max_count, size_t max_bytes)
{
    *queue = (struct mu_rpc_sendq){.max_count = max_count, .max_bytes = max_bytes};
    queue->last = &queue->first;
}

static struct mu_rpc_bytes *pop(struct mu_rpc_sendq *queue)
{
    struct mu_rpc_sendq_node *node = queue->first;
    struct mu_rpc_bytes *message = node->message;
    queue->first = node->next;
    if (!queue->first)
        queue->last = &queue->first;
    free(node);
    return message;
}

void mu_rpc_sendq_clear(struct mu_rpc_sendq *queue)
{
    while (queue->first)
        mu_rpc_bytes_unref(pop(queue));
    queue->count = queue->on_wire ? 1 : 0;
    queue->size_bytes = queue->on_wire ? queue->wire_bytes : 0;
    queue->refused = false;
}

enum mu_status mu_rpc_sendq_push(struct mu_rpc_sendq *queue, struct mu_rpc_bytes *message)
{
    size_t size_bytes = mu_rpc_bytes_size(message);
    bool fits = queue->count < queue->max_count && size_bytes <= queue->max_bytes - queue->size_bytes;
    if (queue->size_bytes > queue->max_bytes)
        fits = false;
    if (!fits && queue->count > 0) {
        queue->refused = true;
        return MU_ERR_LIMIT;
    }
    struct mu_rpc_sendq_node *node = malloc(sizeof *node);
    MU_ASSERT(node);
    node->next = NULL;
    node->message = mu_rpc_bytes_ref(message);
    *queue->last = node;
    queue->last = &node->next;
    queue->count++;
    queue->size_bytes += size_bytes;
    return MU_OK;
}

struct mu_rpc_bytes *mu_rpc_sendq_take(struct mu_rpc_sendq *queue)
{
    if (queue->on_wire || !queue->first)
        return NULL;
    struct mu_rpc_bytes *message = pop(queue);
    queue->on_wire = true;
    queue->wire_bytes = mu_rpc_bytes_size(message);
    return message;
}

bool mu_rpc_sendq_done(struct mu_rpc_sendq *queue)
{
    MU_ASSERT(queue->on_wire);
    queue->on_wire = false;
    queue->count--;
    queue->size_bytes -= queue->wire_bytes;
    bool writable = queue->refused && queue->count <= queue->max_count / 2 && queue->size_bytes <= queue->max_bytes / 2;
    if (writable)
        queue->refused = false;
    return writable;
}
