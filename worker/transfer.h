/* Copies the whole state (parameters and both moments) from a rank that has it to ranks that need it, while a
 * generation is prepared.
 *
 * Blocks of chunks follow a small message with the XXH3-128 of each chunk; a receiver verifies every chunk before it
 * counts, and passes a block on to the ranks that copy from it while the next ones are under way. Engine thread. */
#ifndef MU_WORKER_TRANSFER_H
#define MU_WORKER_TRANSFER_H

#include <stdatomic.h>
#include <stdbool.h>

#include "plan/model_spec.h"
#include "worker/comm.h"

struct mu_transfer_config {
    const struct mu_model_spec *model;
    struct mu_comm_group *group;
    float *flats[3]; /* parameters, first and second moments */
    uint64_t step;   /* of the state: both sides must agree */
    bool receive;    /* from source_rank; else this rank has it */
    uint32_t source_rank;
    const uint32_t *serve_ranks; /* ranks that copy from this one; must stay until run has returned */
    uint32_t serve_count;
    atomic_uint_least64_t *progress; /* counts blocks */
};

struct mu_transfer;

enum mu_status mu_transfer_new(const struct mu_transfer_config *config, struct mu_transfer **ret_transfer,
                               struct mu_error *err) MU_WARN_UNUSED;
/* Until everything is received, verified and sent. MU_ERR_CORRUPT: a chunk does not match its checksum, or the peer
 * serves another step; MU_ERR_CANCELLED, MU_ERR_UNAVAILABLE as from the group. After an error what was received is
 * undefined. */
enum mu_status mu_transfer_run(struct mu_transfer *transfer, struct mu_error *err) MU_WARN_UNUSED;
/* After a run that failed: only once the group is closed, which may still know the requests. NULL is fine. */
void mu_transfer_free(struct mu_transfer *transfer);

#endif
