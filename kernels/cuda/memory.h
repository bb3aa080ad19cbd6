/* What a context has for the memory of its GPU. Private to kernels/cuda. */
#ifndef MU_KERNELS_CUDA_MEMORY_H
#define MU_KERNELS_CUDA_MEMORY_H

#include "kernels/cuda/cuda.h"

/* Makes cuda->base a device, once the context has its stream. fini takes what a failed init has left, too. */
cudaError_t mu_cuda_memory_init(struct mu_cuda *cuda);
/* As kernels/device.h says. */
bool mu_cuda_replay(struct mu_device *device, const struct mu_device_key *key);
bool mu_cuda_record_end(struct mu_device *device, enum mu_status *status);
void mu_cuda_forget(struct mu_device *device);
bool mu_cuda_records(const struct mu_device *device);
void mu_cuda_set_recording(struct mu_device *device, bool on);
void mu_cuda_recordings_fini(struct mu_cuda *cuda);
void mu_cuda_memory_fini(struct mu_cuda *cuda);

#endif
