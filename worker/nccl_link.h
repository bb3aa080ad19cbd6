/* The communicators of a generation as the exchanges of a step use them, also in a program that is built without NCCL.
 *
 * Operations of NCCL stand in the order of a track (kernels/device.h): those of a tensor group on the main one, between
 * kernels that wait for them; the others on tracks of their own, so that they move while kernels compute. An exchange
 * there comes after all that the main track was given before it; the main one follows a point where it needs what has
 * come, or writes again to what has gone. The host waits for none of it. */
#ifndef MU_WORKER_NCCL_LINK_H
#define MU_WORKER_NCCL_LINK_H

#include "worker/comm_nccl.h"

/* Points of the device (kernels/device.h). */
enum {
    LINK_POINT_MAIN = 0, /* + track: where the main one was at its newest exchange */
    LINK_POINT_STAGES = MU_TRACKS,
    LINK_POINTS_STAGES = 8, /* blocks between stages have come, or gone */
    LINK_POINT_TIED = LINK_POINT_STAGES + LINK_POINTS_STAGES,
    LINK_POINTS_TIED = 4,                                     /* head chains; the copy */
    LINK_POINT_REPLICAS = LINK_POINT_TIED + LINK_POINTS_TIED, /* sums of gradients, updated parameters */
    LINK_POINTS
};
_Static_assert((int)LINK_POINTS <= (int)MU_DEVICE_POINTS, "points of the device");

struct mu_nccl_link {
    const struct mu_nccl_ops *ops;
    struct mu_nccl *nccl; /* NULL: there are none, exchanges go over the sockets */
    struct mu_device *device;
    struct CUstream_st *streams[MU_TRACKS];
};

/* NULL: over the sockets. */
static inline const struct mu_nccl_link *mu_nccl_link_open(const struct mu_nccl_link *link)
{
    return link && link->nccl ? link : NULL;
}

/* Moves on a track beside the main one, after all that this one was given so far. */
enum mu_status mu_nccl_link_exchange(const struct mu_nccl_link *link, enum mu_nccl_scope scope, enum mu_track track,
                                     const struct mu_nccl_move *moves, size_t count,
                                     struct mu_error *err) MU_WARN_UNUSED;

#endif
