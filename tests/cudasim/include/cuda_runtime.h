/* cuda_runtime.h of the emulation: the runtime and, in C++, what device code is written in. */
#ifndef CUDASIM_CUDA_RUNTIME_H
#define CUDASIM_CUDA_RUNTIME_H

#include "cuda_runtime_api.h"
#ifdef __cplusplus
#include "cudasim/device.h"
#endif

#endif
