/* cuda_fp16.h of the emulation: NCCL's header asks for it, and uses nothing of it. */
#ifndef CUDASIM_CUDA_FP16_H
#define CUDASIM_CUDA_FP16_H
#endif
