/* Launches and dynamic shared memory, which CUDA has special syntax for: real CUDA under nvcc, function calls where
 * tests emulate it on the CPU (tests/cudasim). */
#ifndef MU_KERNELS_CUDA_LAUNCH_H
#define MU_KERNELS_CUDA_LAUNCH_H

#include <cuda_runtime.h>

#ifdef MU_CUDA_EMULATED

#define MU_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                                      \
    cudasim::launch({#kernel, __FILE__, __LINE__}, grid, block, shared_bytes, stream, kernel __VA_OPT__(, ) __VA_ARGS__)
#define MU_DYNAMIC_SHARED(type, name) type *name = static_cast<type *>(cudasim_dynamic_shared())

#else

/* What went wrong is told by cudaGetLastError. */
#define MU_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                                      \
    kernel<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__)
/* `name` points at the dynamic shared memory of the block; 128-byte aligned. */
#define MU_DYNAMIC_SHARED(type, name)                                                                                  \
    extern __shared__ __align__(128) unsigned char mu_dynamic_shared[];                                                \
    type *name = reinterpret_cast<type *>(mu_dynamic_shared)

#endif

#endif
