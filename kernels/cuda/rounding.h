/* bf16 values and the shadow of the parameters. Private to kernels/cuda. */
#ifndef MU_KERNELS_CUDA_ROUNDING_H
#define MU_KERNELS_CUDA_ROUNDING_H

#include <cuda_bf16.h>

#include "kernels/cuda/device.h"

/* Two floats rounded to nearest even; the first in the lower half. */
MU_INLINE uint32_t pack_bf16(float low, float high)
{
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

/* Where the shadow of these parameters begins; NULL when not all of them have one. */
static inline uint16_t *shadow_of(const struct mu_cuda *cuda, const float *params, size_t size)
{
    const struct mu_cuda_shadow *shadow = &cuda->shadow;
    if (!shadow->params || params < shadow->params || params + size > shadow->params + shadow->size)
        return NULL;
    return shadow->bf16 + (params - shadow->params);
}

#endif
