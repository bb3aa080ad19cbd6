#include "plan/gpu.h"

#include <string.h>

static size_t put(char *out, size_t size, size_t used, const char *text)
{
    size_t length = strlen(text);
    if (used >= size)
        return used;
    if (length > size - 1 - used)
        length = size - 1 - used;
    memcpy(out + used, text, length);
    out[used + length] = 0;
    return used + length;
}

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
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (!(reasons & names[i].bit))
            continue;
        if (used > 0)
            used = put(out, size, used, ", ");
        used = put(out, size, used, names[i].text);
    }
    if (used == 0)
        put(out, size, 0, "none");
}
