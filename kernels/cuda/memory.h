/* What a context has for the memory of its GPU. Private to kernels/cuda. */
#ifndef MU_KERNELS_CUDA_MEMORY_H
#define MU_KERNELS_CUDA_MEMORY_H

#include "kernels/cuda/cuda.h"

/* Makes cuda->base a device, once the context has its stream. fini takes what a failed init has left, too. */
cudaError_t mu_cuda_memory_init(struct mu_cuda *cuda);
void mu_cuda_memory_fini(struct mu_cuda *cuda);

#endif
