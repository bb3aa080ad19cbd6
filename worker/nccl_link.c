#include "worker/nccl_link.h"

enum mu_status mu_nccl_link_exchange(const struct mu_nccl_link *link, enum mu_nccl_scope scope, enum mu_track track,
                                     const struct mu_nccl_move *moves, size_t count, struct mu_error *err)
{
    MU_ASSERT(track != MU_TRACK_MAIN);
    mu_device_signal(link->device, MU_TRACK_MAIN, LINK_POINT_MAIN + (uint32_t)track);
    mu_device_follow(link->device, track, LINK_POINT_MAIN + (uint32_t)track);
    return link->ops->exchange(link->nccl, scope, moves, count, link->streams[track], err);
}
