/* Element-wise operations on flat ranges: activations, sums, optimizer, initial values.
 *
 * All are bound by memory: a thread moves VECTORS 16-byte vectors of each operand with all loads in flight before the
 * first is used, warps touch whole 512-byte runs. Bytes per element are in kernels/cuda/cost.h. */
#include "kernels/cuda/memory.h"
#include "kernels/cuda/rounding.h"

enum { RANGE_THREADS = 256, VECTORS = 4, OF_BLOCK = RANGE_THREADS * VECTORS * 4 };

/* Four elements at i, those beyond size as 0; `vector`: one access. */
MU_INLINE float4 load4(const float *x, size_t i, size_t size, bool vector)
{
    if (vector && i + 4 <= size)
        return *(const float4 *)(x + i);
    return make_float4(i < size ? x[i] : 0.0f, i + 1 < size ? x[i + 1] : 0.0f, i + 2 < size ? x[i + 2] : 0.0f,
                       i + 3 < size ? x[i + 3] : 0.0f);
}

MU_INLINE void store4(float *x, size_t i, size_t size, bool vector, float4 v)
{
    if (vector && i + 4 <= size) {
        *(float4 *)(x + i) = v;
        return;
    }
    const float each[4] = {v.x, v.y, v.z, v.w};
    for (uint32_t j = 0; j < 4 && i + j < size; j++)
        x[i + j] = each[j];
}

/* out = f(a, b) for each element; what f does not read may be any readable pointer. */
template <typename F>
__global__ void map_kernel(F f, size_t size, bool vector, const float *a, const float *b, float *out)
{
    float4 x[VECTORS], y[VECTORS];
    const size_t first = (size_t)blockIdx.x * OF_BLOCK + threadIdx.x * 4;
#pragma unroll
    for (uint32_t v = 0; v < VECTORS; v++) {
        size_t i = first + (size_t)v * RANGE_THREADS * 4;
        x[v] = F::reads > 0 ? load4(a, i, size, vector) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        y[v] = F::reads > 1 ? load4(b, i, size, vector) : x[v];
    }
#pragma unroll
    for (uint32_t v = 0; v < VECTORS; v++) {
        size_t i = first + (size_t)v * RANGE_THREADS * 4;
        store4(out, i, size, vector,
               make_float4(f(x[v].x, y[v].x), f(x[v].y, y[v].y), f(x[v].z, y[v].z), f(x[v].w, y[v].w)));
    }
}

struct gelu_of {
    enum { reads = 1 };
    __device__ float operator()(float x, float) const
    {
        return v_gelu(x);
    }
};
struct gelu_gradient {
    enum { reads = 2 };
    __device__ float operator()(float x, float dy) const
    {
        return dy * v_gelu_grad(x);
    }
};
struct sum_of {
    enum { reads = 2 };
    __device__ float operator()(float into, float from) const
    {
        return into + from;
    }
};
struct value_of {
    enum { reads = 0 };
    float value;
    __device__ float operator()(float, float) const
    {
        return value;
    }
};

template <typename F>
static enum mu_status map(struct mu_pool *pool, const char *what, F f, size_t size, const float *a, const float *b,
                          float *out)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    if (size == 0)
        return MU_OK;
    bool vector = aligned16(a, 0) && aligned16(b, 0) && aligned16(out, 0);
    MU_LAUNCH(map_kernel<F>, dim3(div_up(size, OF_BLOCK)), dim3(RANGE_THREADS), 0, cuda->stream, f, size, vector, a, b,
              out);
    return launched(cuda, what);
}

extern "C" enum mu_status mu_cuda_gelu_forward(struct mu_pool *pool, size_t size, const float *x, float *y)
{
    return map(pool, "gelu_forward", gelu_of(), size, x, x, y);
}

extern "C" enum mu_status mu_cuda_gelu_backward(struct mu_pool *pool, size_t size, const float *x, const float *dy,
                                                float *dx)
{
    return map(pool, "gelu_backward", gelu_gradient(), size, x, dy, dx);
}

extern "C" enum mu_status mu_cuda_add(struct mu_pool *pool, size_t size, float *into, const float *from)
{
    return map(pool, "add", sum_of(), size, into, from, into);
}

extern "C" enum mu_status mu_cuda_fill(struct mu_pool *pool, size_t size, float value, float *x)
{
    struct value_of f = {value};
    return map(pool, "fill", f, size, x, x, x);
}

/* ---- optimizer ---- */

MU_INLINE void adamw_element(const struct mu_adamw &a, float &p, float &m, float &v, float g)
{
    float gradient = g * a.gradient_scale;
    m = fmaf(a.beta1, m, a.rest1 * gradient);
    v = fmaf(a.beta2, v, a.rest2 * gradient * gradient);
    float direction = m * a.correction1 / (sqrtf(v * a.correction2) + a.eps);
    p = fmaf(-a.lr, fmaf(a.weight_decay, p, direction), p);
}

enum { ADAMW_OF_BLOCK = RANGE_THREADS * 4 };

/* Four elements of the shadow. */
MU_INLINE void store_bf16(uint16_t *shadow, size_t i, size_t size, bool vector, float4 v)
{
    const uint2 bits = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
    if (vector && i + 4 <= size) {
        *(uint2 *)(shadow + i) = bits;
        return;
    }
    const uint32_t each[4] = {bits.x, bits.x >> 16, bits.y, bits.y >> 16};
    for (uint32_t j = 0; j < 4 && i + j < size; j++)
        shadow[i + j] = (uint16_t)each[j];
}

__global__ void adamw_kernel(struct mu_adamw a, size_t size, bool vector, float *p, float *m, float *v, const float *g,
                             uint16_t *shadow)
{
    size_t i = (size_t)blockIdx.x * ADAMW_OF_BLOCK + threadIdx.x * 4;
    float4 x = load4(p, i, size, vector), m1 = load4(m, i, size, vector), v1 = load4(v, i, size, vector),
           d = load4(g, i, size, vector);
    adamw_element(a, x.x, m1.x, v1.x, d.x);
    adamw_element(a, x.y, m1.y, v1.y, d.y);
    adamw_element(a, x.z, m1.z, v1.z, d.z);
    adamw_element(a, x.w, m1.w, v1.w, d.w);
    store4(m, i, size, vector, m1);
    store4(v, i, size, vector, v1);
    store4(p, i, size, vector, x);
    if (shadow)
        store_bf16(shadow, i, size, vector, x);
}

/* Whether four elements of the shadow can be stored at once wherever four parameters can. */
static bool shadow_vector(const uint16_t *shadow)
{
    return !shadow || (uintptr_t)shadow % 8 == 0;
}

extern "C" enum mu_status mu_cuda_adamw(struct mu_pool *pool, const struct mu_adamw *adamw, size_t size, float *p,
                                        float *m, float *v, const float *g)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    if (size == 0)
        return MU_OK;
    uint16_t *shadow = shadow_of(cuda, p, size);
    bool vector = aligned16(p, 0) && aligned16(m, 0) && aligned16(v, 0) && aligned16(g, 0) && shadow_vector(shadow);
    MU_LAUNCH(adamw_kernel, dim3(div_up(size, ADAMW_OF_BLOCK)), dim3(RANGE_THREADS), 0, cuda->stream, *adamw, size,
              vector, p, m, v, g, shadow);
    return launched(cuda, "adamw");
}

__global__ void shadow_kernel(size_t size, bool vector, const float *params, uint16_t *shadow)
{
    size_t i = (size_t)blockIdx.x * ADAMW_OF_BLOCK + threadIdx.x * 4;
    store_bf16(shadow, i, size, vector, load4(params, i, size, vector));
}

void mu_cuda_shadow_set(struct mu_cuda *cuda, const float *params, size_t size, uint16_t *bf16)
{
    mu_cuda_forget(&cuda->base);
    cuda->shadow = {params, size, bf16};
}

enum mu_status mu_cuda_shadow_refresh(struct mu_pool *pool, const float *params, size_t size)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    uint16_t *shadow = shadow_of(cuda, params, size);
    if (!shadow || size == 0)
        return MU_OK;
    MU_LAUNCH(shadow_kernel, dim3(div_up(size, ADAMW_OF_BLOCK)), dim3(RANGE_THREADS), 0, cuda->stream, size,
              aligned16(params, 0) && shadow_vector(shadow), params, shadow);
    return launched(cuda, "shadow_refresh");
}

/* ---- initial values ---- */

struct init_args {
    uint32_t key[2], tensor;
    uint64_t first, first_group, groups;
    size_t size;
    float std, *x;
};

/* One lane of a group of 64 values. */
__global__ void init_kernel(struct init_args a)
{
    uint64_t thread = (uint64_t)blockIdx.x * RANGE_THREADS + threadIdx.x, counter = a.first_group * LANES + thread;
    uint64_t group = a.first_group + thread / LANES;
    uint32_t random[4], lane = (uint32_t)(thread % LANES);
    if (thread / LANES >= a.groups)
        return;
    v_philox(a.key, (uint32_t)counter, (uint32_t)((group * LANES) >> 32), a.tensor, MU_INIT_TAG, random);
    for (uint32_t w = 0; w < 2; w++) {
        float u1 = (float)(int32_t)((random[2 * w] >> 8) + 1) * 0x1p-24f;
        float u2 = (float)(int32_t)(random[2 * w + 1] >> 8) * 0x1p-24f;
        float radius = sqrtf(-2.0f * v_log(u1)), cosine, sine;
        v_cos_sin_turns(u2, &cosine, &sine);
        uint64_t element = group * DROPOUT_FEATURES + 2 * w * LANES + lane;
        if (element >= a.first && element - a.first < a.size)
            a.x[element - a.first] = a.std * (radius * cosine);
        element += LANES;
        if (element >= a.first && element - a.first < a.size)
            a.x[element - a.first] = a.std * (radius * sine);
    }
}

extern "C" enum mu_status mu_cuda_init_normal(struct mu_pool *pool, uint64_t seed, uint32_t tensor, uint64_t first,
                                              size_t size, float std, float *x)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    if (size == 0)
        return MU_OK;
    struct init_args a = {
        {(uint32_t)seed, (uint32_t)(seed >> 32)}, tensor, first, first / DROPOUT_FEATURES, 0, size, std, x};
    a.groups = (first + size - 1) / DROPOUT_FEATURES - a.first_group + 1;
    MU_LAUNCH(init_kernel, dim3(div_up(a.groups * LANES, RANGE_THREADS)), dim3(RANGE_THREADS), 0, cuda->stream, a);
    return launched(cuda, "init_normal");
}
