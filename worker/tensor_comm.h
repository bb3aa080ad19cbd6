/* Blocks between the ranks of a tensor group (struct mu_tensor_group of worker/model.h) over the data plane.
 *
 * Every rank of the group makes the same calls in the same order; the calls are counted, and the count is the exchange
 * number. Bytes only: the model adds. Engine's thread; blocking, with progress for everything else that is under way.
 */
#ifndef MU_WORKER_TENSOR_COMM_H
#define MU_WORKER_TENSOR_COMM_H

#include <stdbool.h>
#include <stdint.h>

#include "worker/comm.h"
#include "worker/nccl_link.h"
#include "worker/model.h"

struct mu_tensor_comm;

struct mu_tensor_comm_config {
    struct mu_comm_group *group; /* connected to all of `ranks`; must be closed before mu_tensor_comm_free */
    const uint32_t *ranks;       /* [size] of the group, by tensor index */
    uint32_t size, index;
    struct mu_device *device;                 /* where the blocks lie; NULL: the host */
    const struct mu_nccl_link *link;          /* NULL, or none open: over the sockets */
    void (*waiting)(void *ctx, bool waiting); /* around what may wait for a peer; may be NULL */
    void *waiting_ctx;
};

enum mu_status mu_tensor_comm_new(const struct mu_tensor_comm_config *config, struct mu_tensor_comm **ret_comm,
                                  struct mu_error *err) MU_WARN_UNUSED;
void mu_tensor_comm_free(struct mu_tensor_comm *comm); /* NULL is fine */

/* As in worker/model.h. MU_ERR_CANCELLED, MU_ERR_UNAVAILABLE as from the group; see mu_tensor_comm_error. */
enum mu_status mu_tensor_comm_all_gather(struct mu_tensor_comm *comm, void *blocks, size_t block_bytes) MU_WARN_UNUSED;
enum mu_status mu_tensor_comm_all_to_all(struct mu_tensor_comm *comm, const void *send, void *recv,
                                         size_t block_bytes) MU_WARN_UNUSED;

/* What the last call that failed says; the status alone passes through the model. */
const struct mu_error *mu_tensor_comm_error(const struct mu_tensor_comm *comm);
/* Microseconds spent in the calls so far. */
uint64_t mu_tensor_comm_spent_us(const struct mu_tensor_comm *comm);

#endif
