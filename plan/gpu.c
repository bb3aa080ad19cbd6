#include "plan/gpu.h"

#include <stdio.h>

void mu_gpu_throttle_text(uint64_t reasons, char *out, size_t size)
{
    static const struct {
        uint64_t bit;
        const char *text;
    } names[] = {/* what lets clocks fall because there is nothing to do is not one here */
                 {MU_GPU_THROTTLE_POWER_CAP, "power cap"},
                 {MU_GPU_THROTTLE_HARDWARE, "slowdown by hardware"},
                 {MU_GPU_THROTTLE_SYNC_BOOST, "sync boost"},
                 {MU_GPU_THROTTLE_THERMAL_SOFTWARE, "thermal slowdown by software"},
                 {MU_GPU_THROTTLE_THERMAL_HARDWARE, "thermal slowdown by hardware"},
                 {MU_GPU_THROTTLE_POWER_BRAKE, "power brake"}};
    size_t used = 0;
    snprintf(out, size, "none");
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if ((reasons & names[i].bit) && used < size)
            used += (size_t)snprintf(out + used, size - used, "%s%s", used > 0 ? ", " : "", names[i].text);
}
