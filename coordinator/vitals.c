#include "coordinator/vitals.h"

#include <math.h>
#include <stdlib.h>

#define PER_SECOND 1e-6 /* of what is counted in microseconds: seconds a second */
const struct mu_vital_law mu_vital_laws[MU_VITAL_COUNT] = {
    [MU_VITAL_CPU_US] = {true, PER_SECOND},        [MU_VITAL_MEMORY_BYTES] = {false, 1},
    [MU_VITAL_HOST_CPU_US] = {true, PER_SECOND},   [MU_VITAL_HOST_MEMORY_PPM] = {false, 1e-6},
    [MU_VITAL_RECEIVED_BYTES] = {true, 1},         [MU_VITAL_SENT_BYTES] = {true, 1},
    [MU_VITAL_NETWORK_ERRORS] = {true, 1},         [MU_VITAL_READ_BYTES] = {true, 1},
    [MU_VITAL_WRITTEN_BYTES] = {true, 1},          [MU_VITAL_DISK_FREE_BYTES] = {false, 1},
    [MU_VITAL_STALL_CPU_US] = {true, PER_SECOND},  [MU_VITAL_STALL_MEMORY_US] = {true, PER_SECOND},
    [MU_VITAL_STALL_IO_US] = {true, PER_SECOND},   [MU_VITAL_RDMA_RECEIVED_BYTES] = {true, 1},
    [MU_VITAL_RDMA_SENT_BYTES] = {true, 1},        [MU_VITAL_RDMA_ERRORS] = {true, 1},
    [MU_VITAL_CLOCK_SYNCHRONISED] = {false, 1},    [MU_VITAL_CLOCK_ERROR_US] = {false, 1e-6},
    [MU_VITAL_PLANE_RECEIVED_BYTES] = {true, 1},   [MU_VITAL_PLANE_SENT_BYTES] = {true, 1},
    [MU_VITAL_PLANE_WAIT_US] = {true, PER_SECOND}, [MU_VITAL_LATENCY_US] = {false, 1e-6},
};

const char *mu_vital_name(enum mu_vital vital)
{
    return muster__v1__vital_signs__descriptor.fields[vital].name;
}

/* Room for a GPU is made with the first report of one. */
static bool make_room(struct mu_vitals_heard **heard, bool with_gpu)
{
    bool is_first = !*heard;
    if (!is_first && (!with_gpu || (*heard)->newest.gpu))
        return true;
    struct mu_vitals_heard *grown = realloc(*heard, sizeof *grown + with_gpu * sizeof grown->gpu[0]);
    if (!grown)
        return false;
    if (is_first)
        *grown = (struct mu_vitals_heard){.at_us = 0};
    if (with_gpu)
        grown->gpu[0] = (struct mu_gpu_sample){.watch = MU_GPU_STARTING};
    *heard = grown;
    return true;
}

static void hear_gpu(struct mu_vitals_heard *heard, const struct mu_gpu_sample *gpu, struct mu_vitals_news *news)
{
    struct mu_gpu_sample *before = &heard->gpu[0];
    news->gpu_xids = gpu->xid_count > before->xid_count ? gpu->xid_count - before->xid_count : 0;
    news->gpu_failures = gpu->unhealthy && !before->unhealthy;
    *before = *gpu;
}

struct mu_vitals_news mu_vitals_hear(struct mu_vitals_heard **heard, const struct mu_vitals *vitals, uint64_t now_us)
{
    struct mu_vitals_news news = {0};
    bool is_first = !*heard;
    if (!make_room(heard, vitals->gpu))
        return news;
    const struct mu_vitals *before = &(*heard)->newest;
    double *signs = (*heard)->signs, apart_s = (double)(vitals->mono_us - before->mono_us) * 1e-6;
    bool has_rates = !is_first && vitals->mono_us > before->mono_us;
    if (!is_first && !has_rates) /* said again, for the sake of the GPU: rates stay */
        apart_s = 0;
    for (int i = 0; i < MU_VITAL_COUNT && (is_first || has_rates); i++) {
        const struct mu_vital_law *law = &mu_vital_laws[i];
        if (!law->is_rate)
            signs[i] = (double)vitals->values[i] * law->unit;
        else if (has_rates && vitals->values[i] >= before->values[i])
            signs[i] = (double)(vitals->values[i] - before->values[i]) * law->unit / apart_s;
        else
            signs[i] = NAN; /* the first, or an interface has gone and its counters with it */
    }
    double errors = (signs[MU_VITAL_NETWORK_ERRORS] + signs[MU_VITAL_RDMA_ERRORS]) * apart_s;
    news.network_errors = errors > 0 ? (uint64_t)(errors + 0.5) : 0;
    bool has_gpu = vitals->gpu || (*heard)->newest.gpu;
    (*heard)->at_us = now_us;
    (*heard)->newest = *vitals;
    (*heard)->newest.gpu = has_gpu ? (*heard)->gpu : NULL;
    if (vitals->gpu)
        hear_gpu(*heard, vitals->gpu, &news);
    return news;
}

const struct mu_vitals_heard *mu_vitals_of(struct mu_sessions *sessions, uint64_t session)
{
    const struct mu_session *found = sessions ? mu_sessions_find(sessions, session) : NULL;
    return found ? found->vitals : NULL;
}
