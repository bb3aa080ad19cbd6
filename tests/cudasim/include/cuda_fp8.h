/* cuda_fp8.h of the emulation: NCCL's header asks for it, and uses nothing of it. */
#ifndef CUDASIM_CUDA_FP8_H
#define CUDASIM_CUDA_FP8_H
#endif
