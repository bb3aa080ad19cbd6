/* GpuSigns: from a worker with its vital signs, and to whoever asks for them. */
#include "proto/wire_pb.h"

#include <string.h>

_Static_assert(offsetof(Muster__V1__GpuSigns, age_us) ==
                   offsetof(Muster__V1__GpuSigns, utilisation_percent) + MU_GPU_READINGS * sizeof(uint64_t),
               "readings of a GPU");
_Static_assert(MUSTER__V1__GPU_WATCH__GPU_WATCH_UNWATCHED == (int)MU_GPU_UNWATCHED, "watch of a GPU");

enum mu_status mu_wire_gpu_to_pb(struct mu_wire_arena *arena, const struct mu_gpu_sample *sample,
                                 Muster__V1__GpuSigns **ret_pb, struct mu_error *err)
{
    Muster__V1__GpuSigns *pb = mu_wire_arena_alloc(arena, sizeof *pb);
    if (!pb)
        return mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the signs of a GPU");
    muster__v1__gpu_signs__init(pb);
    pb->known = sample->known;
    memcpy(&pb->utilisation_percent, sample->values, sizeof sample->values);
    pb->age_us = sample->age_us;
    pb->xid_count = sample->xid_count;
    pb->last_xid = sample->last_xid;
    pb->unhealthy = sample->unhealthy;
    pb->watch = (Muster__V1__GpuWatch)sample->watch;
    pb->driver = mu_wire_put_text(arena, sample->driver, sizeof sample->driver);
    pb->text = mu_wire_put_text(arena, sample->text, sizeof sample->text);
    *ret_pb = pb;
    return pb->driver && pb->text ? MU_OK : mu_fail(err, MU_ERR_NO_MEMORY, "no memory for the signs of a GPU");
}

enum mu_status mu_wire_gpu_from_pb(const Muster__V1__GpuSigns *pb, struct mu_gpu_sample *ret_sample,
                                   struct mu_error *err)
{
    int watch = 0;
    enum mu_status status = MU_OK;
    *ret_sample = (struct mu_gpu_sample){.known = pb->known & ((1ull << MU_GPU_READINGS) - 1),
                                         .age_us = pb->age_us,
                                         .xid_count = pb->xid_count,
                                         .last_xid = pb->last_xid,
                                         .unhealthy = pb->unhealthy};
    memcpy(ret_sample->values, &pb->utilisation_percent, sizeof ret_sample->values);
    if ((status = mu_wire_get_enum((int)pb->watch, MU_GPU_STARTING, MU_GPU_UNWATCHED, "GpuSigns.watch", &watch, err)) ||
        (status = mu_wire_get_string(pb->driver, MU_WIRE_TEXT, "GpuSigns.driver", ret_sample->driver,
                                     sizeof ret_sample->driver, err)) ||
        (status = mu_wire_get_string(pb->text, MU_WIRE_TEXT, "GpuSigns.text", ret_sample->text, sizeof ret_sample->text,
                                     err)))
        return status;
    ret_sample->watch = (enum mu_gpu_watch)watch;
    return MU_OK;
}
