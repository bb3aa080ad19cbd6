/* The CUDA backend: the operations of kernels/kernels.h on one GPU.
 *
 * mu_cuda_ops holds them as functions mu_cuda_X with the signatures of mu_kernel_X. Their pool is bound to a GPU
 * (mu_pool_bind to the device in a struct mu_cuda). They enqueue their work on its stream and return at once;
 * a returned MU_OK says that it was enqueued. What they read and write is device memory, except:
 *   - structures passed by pointer (struct mu_gemm, struct mu_dropout, struct mu_adamw, ...) and the array
 *     mu_vocab_slices.slices are host memory, read during the call; the arrays that their members point to (and
 *     mu_dropout.samples) are device memory, as are tokens, targets and losses;
 *   - mu_cuda_square_sum adds to a host object: it waits for the stream.
 * Pinned host memory is device memory in this sense, since it has the same addresses on both sides.
 *
 * `exact` in fp32: every operation is the definition in kernels.h itself, so the bits are those of the CPU backend.
 * bf16: matrix products and attention round their operands to bf16 and accumulate in fp32 on tensor cores; everything
 * else is as in fp32. Bits are then those of one GPU class and one version of cublasLt, see mu_cuda_identity.
 *
 * A context belongs to one thread at a time, the owner of its pool. Nothing allocates after mu_cuda_init; scratch is
 * the context's workspace, whose content lives for one operation. (Recordings, mu_device_replay, allocate when they are
 * made.) */
#ifndef MU_KERNELS_CUDA_CUDA_H
#define MU_KERNELS_CUDA_CUDA_H

#include <cuda_runtime_api.h>

#ifdef __cplusplus
#include <atomic> /* before what C's headers make of it */
extern "C" {
#endif

#include "kernels/device.h"
#include "kernels/kernels.h"

enum {
    MU_CUDA_WORKSPACE_BYTES = 512 << 20, /* unless asked for otherwise; what is larger is done in parts */
    MU_CUDA_PINNED_BYTES = MU_DEVICE_READ_MAX,
    MU_CUDA_MARKS = 256,     /* that may be ahead of the GPU */
    MU_CUDA_PLANS_MAX = 256, /* shapes of matrix products that a context remembers the algorithm of */
};

struct mu_cuda_plan; /* a matrix product as cublasLt runs it: kernels/cuda/bf16_gemm.cu */

/* A copy of the parameters rounded to bf16, so that products need not round them each time. */
struct mu_cuda_shadow {
    const float *params; /* NULL: there is none */
    size_t size;
    uint16_t *bf16; /* device, [size], 16-byte aligned as params are */
};

struct mu_cuda {
    struct mu_device base; /* first: one is the other */
    int device;
    enum mu_dtype dtype;
    uint32_t multiprocessors;
    uint32_t shared_bytes_max; /* of one block, when asked for */
    cudaStream_t stream;       /* of the track in use: operations are enqueued here */
    cudaStream_t tracks[MU_TRACKS];
    cudaStream_t side; /* copies beside the order of the operations */
    cudaEvent_t events[MU_CUDA_MARKS], points[MU_DEVICE_POINTS];
    cudaEvent_t span_ends[2 * MU_DEVICE_SPANS]; /* begin and end of each span */
    uint8_t span_works[MU_DEVICE_SPANS];
    uint32_t span_count[MU_WORKS], spans; /* of each work; measured ones of all */
    bool in_span;                         /* and it is measured */
    uint64_t marks, marks_passed;
    struct cublasLtContext *blas; /* bf16 only, else NULL */
    void *workspace;              /* device, 256-byte aligned */
    size_t workspace_bytes;
    void *pinned;               /* host, MU_CUDA_PINNED_BYTES; for one operation */
    void *view;                 /* host, MU_DEVICE_READ_MAX: what the host looks at */
    struct mu_cuda_plan *plans; /* [MU_CUDA_PLANS_MAX] */
    uint32_t plan_count;
    struct mu_cuda_shadow shadow;
    struct mu_cuda_recordings *recordings; /* kernels/cuda/recording.cu; NULL: none yet */
    struct mu_error error;                 /* what the first operation that did not return MU_OK met */
};

/* Takes GPU `device` for the calling thread; cuda->base is then the device. See mu_device_open_cuda for one that is not
 * known to be fit. workspace_bytes 0: MU_CUDA_WORKSPACE_BYTES. On failure nothing is held. */
enum mu_status mu_cuda_init(struct mu_cuda *cuda, int device, enum mu_dtype dtype, size_t workspace_bytes,
                            struct mu_error *err) MU_WARN_UNUSED;
void mu_cuda_fini(struct mu_cuda *cuda);
/* mu_device_compute. */
enum mu_status mu_cuda_compute(struct mu_device *device, enum mu_dtype dtype, struct mu_error *err) MU_WARN_UNUSED;

/* How often a recording was given. */
uint64_t mu_cuda_replays(const struct mu_cuda *cuda);

/* The GPU that a pool is bound to; NULL when it computes on the CPU. */
struct mu_cuda *mu_pool_cuda(struct mu_pool *pool);

/* cudaStreamSynchronize and cudaEventSynchronize, with the device's watch. */
cudaError_t mu_cuda_await_stream(const struct mu_cuda *cuda, cudaStream_t stream);
cudaError_t mu_cuda_await_event(const struct mu_cuda *cuda, cudaEvent_t event);

/* Waits until everything enqueued is done. MU_ERR_IO with the reason in cuda->error when the GPU failed. */
enum mu_status mu_cuda_wait(struct mu_cuda *cuda) MU_WARN_UNUSED;

/* bf16: products whose operand lies in params[0 .. size) take it from `bf16` from now on. mu_cuda_adamw keeps the copy
 * up to date; whoever else writes parameters (loading, gathering from other ranks) rounds them anew with
 * mu_cuda_shadow_refresh before the next product. Bits are the same with and without. params NULL: no copy. */
void mu_cuda_shadow_set(struct mu_cuda *cuda, const float *params, size_t size, uint16_t *bf16);
enum mu_status mu_cuda_shadow_refresh(struct mu_pool *pool, const float *params, size_t size) MU_WARN_UNUSED;

/* mu_kernels_identity of a GPU's pool: the battery in pinned memory, through the pool's operations. In fp32 it is the
 * CPU's when the bits are; in bf16 the GPU's architecture, the version of cublasLt and the algorithms that it chose for
 * the job's layers are part of it. */
enum mu_status mu_cuda_identity(struct mu_pool *pool, const struct mu_kernel_shapes *shapes, struct mu_error *err,
                                struct mu_kernel_identity *ret_identity) MU_WARN_UNUSED;

extern const struct mu_kernel_ops mu_cuda_ops;      /* exact fp32 */
extern const struct mu_kernel_ops mu_cuda_bf16_ops; /* the same but for products and attention */

#ifdef __cplusplus
}
#endif

#endif
