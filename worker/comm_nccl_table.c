/* The functions of comm_nccl.h as a table, for the engine, which is built once for all programs. */
#include <nccl.h>

#include "kernels/cuda/cuda.h"
#include "worker/comm_nccl.h"

static uint32_t version(void)
{
    int number = 0;
    return ncclGetVersion(&number) == ncclSuccess && number > 0 ? (uint32_t)number : 0;
}

static struct CUstream_st *stream_of(struct mu_device *gpu, enum mu_track track)
{
    return ((struct mu_cuda *)gpu)->tracks[track];
}

const struct mu_nccl_ops *mu_nccl_ops(void)
{
    static const struct mu_nccl_ops ops = {.version = version,
                                           .stream = stream_of,
                                           .meeting_new = mu_nccl_meeting_new,
                                           .meeting_run = mu_nccl_meeting_run,
                                           .meeting_ids = mu_nccl_meeting_ids,
                                           .meeting_free = mu_nccl_meeting_free,
                                           .open = mu_nccl_open,
                                           .abort = mu_nccl_abort,
                                           .free = mu_nccl_free,
                                           .progress = mu_nccl_progress,
                                           .wait = mu_nccl_wait,
                                           .exchange = mu_nccl_exchange,
                                           .all_gather = mu_nccl_all_gather,
                                           .all_to_all = mu_nccl_all_to_all};
    return &ops;
}
