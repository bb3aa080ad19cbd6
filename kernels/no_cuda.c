/* A build without GPU support says so. */
#include "kernels/device.h"

enum mu_status mu_device_open_cuda(uint32_t index, size_t workspace_bytes, struct mu_error *err,
                                   struct mu_device **ret_device)
{
    (void)workspace_bytes;
    (void)ret_device;
    return mu_fail(
        err, MU_ERR_INVALID,
        "device cuda:%u: this program was built without GPU support; build it where the CUDA toolkit and NCCL "
        "are, or use cpu",
        index);
}

uint32_t mu_device_count_cuda(void)
{
    return 0;
}
