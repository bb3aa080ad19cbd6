/* Moves state between the ranks of a generation while it is prepared: executes the moves of plan/reshard.h.
 *
 * The moves from one rank to another are one stream: chunk after chunk, parameters and moments of a chunk apart, each
 * its parts and then a small message with the XXH3-128 of these: both sides hash a part while it is in the cache, right
 * after it moved. All streams run at once, each with a bounded number of requests. A received chunk counts once it is
 * verified; one that goes on to another rank is sent as soon as that is so. Streams are in ascending order of chunks
 * and no chunk moves in a circle, so some stream can always go on.
 *
 * A transfer may be given up in the middle and another one begun for the same step: before a stream begins its receiver
 * tells which of its chunks have come already. Of those only the checksums are sent, and what is here must match them.
 * Engine's thread. */
#ifndef MU_WORKER_TRANSFER_H
#define MU_WORKER_TRANSFER_H

#include <stdatomic.h>

#include "plan/model_spec.h"
#include "plan/reshard.h"
#include "worker/comm.h"

/* Exchange numbers with this bit are the transfer's. */
#define MU_TRANSFER_EXCHANGES (1ull << 63)

struct mu_transfer_config {
    const struct mu_model_spec *model;
    struct mu_comm_group *group; /* connected to every rank that a move names; NULL is fine without moves */
    float *flats[3];             /* flat spaces of parameters, first and second moments: of what is received and sent */
    struct mu_device *device;    /* where these lie; NULL: the host */
    uint64_t step;               /* of the state: both sides must agree */
    uint32_t rank;
    const struct mu_move *moves; /* those from and to `rank`; others are ignored. Must stay until run has returned */
    uint32_t move_count;
    atomic_uint_least64_t *progress; /* counts chunks sent and received */
    /* [chunks]: MU_MOVE_* of what transfers of this step have brought to these spaces; grows as chunks come, and says
     * what is here also after an error. NULL: of no interest. */
    uint8_t *arrived;
};

struct mu_transfer;

/* MU_ERR_INVALID: a move outside the model, to its own source, without kinds, or a chunk that would come twice. */
enum mu_status mu_transfer_new(const struct mu_transfer_config *config, struct mu_transfer **ret_transfer,
                               struct mu_error *err) MU_WARN_UNUSED;
/* Until everything is received, verified and sent. MU_ERR_CORRUPT: a chunk does not match its checksum, or the peer
 * serves another step or another chunk; MU_ERR_CANCELLED, MU_ERR_UNAVAILABLE as from the group. After an error what was
 * received and does not count as arrived is undefined; what was there before is as it was. */
enum mu_status mu_transfer_run(struct mu_transfer *transfer, struct mu_error *err) MU_WARN_UNUSED;
/* After a run that failed: only once the group is closed, which may still know the requests. NULL is fine. */
void mu_transfer_free(struct mu_transfer *transfer);

#endif
