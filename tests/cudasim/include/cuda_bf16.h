/* bfloat16: the upper half of a float, rounded to nearest even. */
#ifndef CUDASIM_CUDA_BF16_H
#define CUDASIM_CUDA_BF16_H

#include "cuda_runtime.h"

typedef struct {
    unsigned short x;
} __nv_bfloat16_raw;

#ifdef __cplusplus
extern "C++" {

namespace cudasim
{
static inline unsigned short bf16_bits(float value)
{
    unsigned int bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return 0x7fff; /* CUDA's canonical NaN */
    return (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
} // namespace cudasim

struct alignas(2) __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float value) : bits(cudasim::bf16_bits(value)) {}
    __nv_bfloat16(const __nv_bfloat16_raw &raw) : bits(raw.x) {}
    operator float() const
    {
        return __uint_as_float((unsigned int)bits << 16);
    }
    operator __nv_bfloat16_raw() const
    {
        return {bits};
    }
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
    __nv_bfloat162() = default;
    __nv_bfloat162(__nv_bfloat16 x_, __nv_bfloat16 y_) : x(x_), y(y_) {}
};
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

static inline float __bfloat162float(__nv_bfloat16 value)
{
    return value;
}
static inline __nv_bfloat16 __float2bfloat16(float value)
{
    return value;
}
static inline __nv_bfloat16 __float2bfloat16_rn(float value)
{
    return value;
}
static inline __nv_bfloat16 __double2bfloat16(double value)
{
    return (float)value;
}
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y)
{
    return __nv_bfloat162(x, y);
}
static inline __nv_bfloat162 __float22bfloat162_rn(float2 pair)
{
    return __nv_bfloat162(pair.x, pair.y);
}
static inline float2 __bfloat1622float2(__nv_bfloat162 pair)
{
    return make_float2(pair.x, pair.y);
}
static inline float __low2float(__nv_bfloat162 pair)
{
    return pair.x;
}
static inline float __high2float(__nv_bfloat162 pair)
{
    return pair.y;
}
static inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 low, __nv_bfloat16 high)
{
    return __nv_bfloat162(low, high);
}
static inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 low, __nv_bfloat16 high)
{
    return __nv_bfloat162(low, high);
}
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value)
{
    return value.bits;
}
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits)
{
    return __nv_bfloat16(__nv_bfloat16_raw{bits});
}

} /* extern "C++" */
#else
typedef __nv_bfloat16_raw __nv_bfloat16;
#endif
#endif
