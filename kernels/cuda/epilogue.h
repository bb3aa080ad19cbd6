/* What a matrix product does to a value of C at the end. Private to kernels/cuda. */
#ifndef MU_KERNELS_CUDA_EPILOGUE_H
#define MU_KERNELS_CUDA_EPILOGUE_H

#include "kernels/cuda/device.h"

struct epilogue {
    enum mu_epilogue kind;
    const float *bias, *aux;
    float *before;
    size_t ldaux;
};

static inline struct epilogue epilogue_of(const struct mu_gemm *g)
{
    struct epilogue end = {g->epilogue, g->bias, g->aux, g->before, g->ldaux};
    return end;
}

MU_INLINE float finish_value(const struct epilogue &end, size_t row, uint32_t column, float x)
{
    if (end.kind == MU_EPILOGUE_GELU_GRAD)
        return x * v_gelu_grad(end.aux[row * end.ldaux + column]);
    if (end.kind != MU_EPILOGUE_NONE)
        x += end.bias[column];
    if (end.kind == MU_EPILOGUE_BIAS_GELU) {
        end.before[row * end.ldaux + column] = x;
        x = v_gelu(x);
    }
    return x;
}

#endif
