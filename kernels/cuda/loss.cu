/* Cross-entropy, whole and in the three phases of a sliced vocabulary. One thread block owns a row.
 *
 * Sixteen threads sum one block of MU_SOFTMAX_BLOCK columns, the blocks of a row side by side; their sums are added in
 * order. A row is read three times, but only once from memory: the rows being worked on fit the second-level cache. */
#include "kernels/cuda/device.h"

#define MU_FMATH_INLINE static __device__ __forceinline__
#include "common/fmath_log.h"

enum {
    LOSS_THREADS = 512,
    GROUPS = LOSS_THREADS / LANES,
    WARPS = LOSS_THREADS / WARP,
};

/* ln(x) as mu_fmath_log. */
MU_INLINE double log_of(double x)
{
    if (x != x || x == HUGE_VAL)
        return x;
    if (x == 0.0)
        return -HUGE_VAL;
    return x < 0.0 ? NAN : log_pair(x).high;
}

/* The largest value of a row, known to all threads. A NaN may hide here; it shows in the sum. */
MU_INLINE float block_max(const float *x, uint32_t size)
{
    __shared__ float of_warp[WARPS];
    float highest = x[0];
#pragma unroll 8
    for (uint32_t i = threadIdx.x; i < size; i += LOSS_THREADS)
        highest = v_max(highest, x[i]);
    for (int half = WARP / 2; half > 0; half /= 2)
        highest = v_max(highest, __shfl_xor_sync(0xffffffffu, highest, half, WARP));
    if (threadIdx.x % WARP == 0)
        of_warp[threadIdx.x / WARP] = highest;
    __syncthreads();
    highest = of_warp[0];
    for (uint32_t w = 1; w < WARPS; w++)
        highest = v_max(highest, of_warp[w]);
    return highest;
}

/* Sum of exp(x - highest), known to all threads; the exponentials replace x when `store`. */
MU_INLINE double block_exp_sum(float *x, uint32_t size, float highest, bool store)
{
    __shared__ float sums[GROUPS];
    const uint32_t lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    double total = 0.0;
    for (uint32_t first = 0; first < size; first += GROUPS * MU_SOFTMAX_BLOCK) {
        uint32_t start = first + group * MU_SOFTMAX_BLOCK;
        uint32_t end = start + MU_SOFTMAX_BLOCK < size ? start + MU_SOFTMAX_BLOCK : size;
        float sum = 0.0f;
#pragma unroll 8
        for (uint32_t i = start; i < end; i += LANES) {
            bool here = i + lane < end;
            float e = here ? v_exp(x[i + lane] - highest) : 0.0f;
            if (here && store)
                x[i + lane] = e;
            sum += e;
        }
        sum = fold_sum(sum);
        if (lane == 0)
            sums[group] = sum;
        __syncthreads();
        for (uint32_t g = 0; g < GROUPS && first + g * MU_SOFTMAX_BLOCK < size; g++)
            total += (double)sums[g];
        __syncthreads();
    }
    return total;
}

struct loss_args {
    uint32_t first, vocab; /* vocabulary row of the first column; columns */
    size_t ld;
    float *logits;
    const int32_t *targets;
    float scale;
    bool gradient;
    const float *highest; /* joined */
    const double *total;  /* joined */
    double *sum, *loss;
};

MU_INLINE void clear_row(float *x, uint32_t size)
{
    for (uint32_t i = threadIdx.x; i < size; i += LOSS_THREADS)
        x[i] = 0.0f;
}

__global__ void loss_kernel(struct loss_args a)
{
    const size_t row = blockIdx.x;
    float *logits = a.logits + row * a.ld;
    const int32_t target = a.targets[row];
    if (target < 0) {
        if (a.gradient)
            clear_row(logits, a.vocab);
        if (threadIdx.x == 0)
            a.loss[row] = 0.0;
        return;
    }
    const float aim = logits[target], highest = block_max(logits, a.vocab);
    const double sum = block_exp_sum(logits, a.vocab, highest, false);
    const float factor = (float)((double)a.scale / sum);
    /* the exponentials are computed again: cheaper than to store and load them */
#pragma unroll 4
    for (uint32_t i = threadIdx.x; a.gradient && i < a.vocab; i += LOSS_THREADS) {
        float x = v_exp(logits[i] - highest) * factor;
        logits[i] = i == (uint32_t)target ? x - a.scale : x;
    }
    if (threadIdx.x == 0)
        a.loss[row] = ((double)highest - (double)aim) + log_of(sum);
}

__global__ void slice_max_kernel(uint32_t vocab, size_t ld, const float *logits, float *highest)
{
    float result = block_max(logits + blockIdx.x * ld, vocab);
    if (threadIdx.x == 0)
        highest[blockIdx.x] = result;
}

/* The row's target in this slice, or -1. */
MU_INLINE int32_t target_here(const struct loss_args &a, size_t row)
{
    int32_t target = a.targets[row];
    return target < 0 || (uint32_t)target < a.first || (uint32_t)target - a.first >= a.vocab
               ? -1
               : target - (int32_t)a.first;
}

__global__ void slice_sum_kernel(struct loss_args a)
{
    const size_t row = blockIdx.x;
    float *logits = a.logits + row * a.ld;
    const int32_t target = target_here(a, row);
    if (a.targets[row] < 0) {
        if (threadIdx.x == 0)
            a.sum[row] = 0.0;
        return;
    }
    const float highest = a.highest[row], aim = target >= 0 ? logits[target] : 0.0f;
    if (!MU_GPU_MUTANT(MU_GPU_MUT_NO_BARRIER))
        __syncthreads(); /* the target's logit is read before it becomes an exponential */
    const double sum = block_exp_sum(logits, a.vocab, highest, a.gradient);
    if (threadIdx.x > 0)
        return;
    a.sum[row] = sum;
    if (target >= 0)
        a.loss[row] = (double)highest - (double)aim;
}

__global__ void slice_gradient_kernel(struct loss_args a)
{
    const size_t row = blockIdx.x;
    float *logits = a.logits + row * a.ld;
    const int32_t target = target_here(a, row);
    const bool counts = a.targets[row] >= 0;
    const float factor = counts ? (float)((double)a.scale / a.total[row]) : 0.0f;
    if (a.gradient && !counts)
        clear_row(logits, a.vocab);
#pragma unroll 4
    for (uint32_t i = threadIdx.x; a.gradient && counts && i < a.vocab; i += LOSS_THREADS) {
        float x = logits[i] * factor;
        logits[i] = (int32_t)i == target ? x - a.scale : x;
    }
    if (threadIdx.x == 0 && target >= 0)
        a.loss[row] += log_of(a.total[row]);
}

static enum mu_status launch_loss(struct mu_pool *pool, const char *what, void (*kernel)(struct loss_args),
                                  uint32_t rows, const struct loss_args *a)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    MU_ASSERT(a->vocab > 0);
    if (rows == 0)
        return MU_OK;
    MU_LAUNCH(kernel, dim3(rows), dim3(LOSS_THREADS), 0, cuda->stream, *a);
    return launched(cuda, what);
}

extern "C" enum mu_status mu_cuda_cross_entropy(struct mu_pool *pool, uint32_t rows, uint32_t vocab, size_t ld,
                                                float *logits, const int32_t *targets, float scale, bool gradient,
                                                double *loss)
{
    struct loss_args a = {0, vocab, ld, logits, targets, scale, gradient, NULL, NULL, NULL, loss};
    return launch_loss(pool, "cross_entropy", loss_kernel, rows, &a);
}

extern "C" enum mu_status mu_cuda_cross_entropy_max(struct mu_pool *pool, uint32_t rows, uint32_t vocab, size_t ld,
                                                    const float *logits, float *highest)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    MU_ASSERT(vocab > 0);
    if (rows == 0)
        return MU_OK;
    MU_LAUNCH(slice_max_kernel, dim3(rows), dim3(LOSS_THREADS), 0, cuda->stream, vocab, ld, logits, highest);
    return launched(cuda, "cross_entropy_max");
}

extern "C" enum mu_status mu_cuda_cross_entropy_sum(struct mu_pool *pool, uint32_t rows, uint32_t first, uint32_t vocab,
                                                    size_t ld, float *logits, const int32_t *targets,
                                                    const float *highest, bool gradient, double *sum, double *loss)
{
    struct loss_args a = {first, vocab, ld, logits, targets, 0.0f, gradient, highest, NULL, sum, loss};
    return launch_loss(pool, "cross_entropy_sum", slice_sum_kernel, rows, &a);
}

extern "C" enum mu_status mu_cuda_cross_entropy_gradient(struct mu_pool *pool, uint32_t rows, uint32_t first,
                                                         uint32_t vocab, size_t ld, float *logits,
                                                         const int32_t *targets, const double *sum, float scale,
                                                         bool gradient, double *loss)
{
    struct loss_args a = {first, vocab, ld, logits, targets, scale, gradient, NULL, sum, NULL, loss};
    return launch_loss(pool, "cross_entropy_gradient", slice_gradient_kernel, rows, &a);
}

/* ---- joins over slices ---- */

__global__ void join_max_kernel(uint32_t slices, uint32_t rows, float *highest)
{
    uint32_t row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows)
        return;
    float result = highest[row];
    for (uint32_t s = 1; s < slices; s++)
        result = v_max(result, highest[(size_t)s * rows + row]);
    highest[row] = result;
}

/* The balanced tree, level by level in place. */
__global__ void join_sums_kernel(uint32_t slices, uint32_t rows, double *sums)
{
    uint32_t row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows)
        return;
    for (uint32_t step = 1; step < slices; step *= 2)
        for (uint32_t s = 0; s < slices; s += 2 * step)
            sums[(size_t)s * rows + row] += sums[(size_t)(s + step) * rows + row];
}

enum { JOIN_THREADS = 128 };

extern "C" enum mu_status mu_cuda_join_max(struct mu_pool *pool, uint32_t slices, uint32_t rows, float *highest)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    MU_LAUNCH(join_max_kernel, dim3(div_up(rows, JOIN_THREADS)), dim3(JOIN_THREADS), 0, cuda->stream, slices, rows,
              highest);
    return launched(cuda, "join_max");
}

extern "C" enum mu_status mu_cuda_join_sums(struct mu_pool *pool, uint32_t slices, uint32_t rows, double *sums)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    MU_ASSERT(slices > 0 && (slices & (slices - 1)) == 0);
    MU_LAUNCH(join_sums_kernel, dim3(div_up(rows, JOIN_THREADS)), dim3(JOIN_THREADS), 0, cuda->stream, slices, rows,
              sums);
    return launched(cuda, "join_sums");
}
