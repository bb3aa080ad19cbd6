/* Sums over rows, and the exact sum of squares. */
#include "kernels/cuda/device.h"

extern "C" {
#include "plan/model_spec.h"
}

/* ---- column sums ---- */

enum { SUM_COLUMNS = 64, UNROLL_ROWS = 8 };

/* A chain of additions from +0 over one chunk of rows, for each column of a block. */
__global__ void chunk_sums_kernel(uint32_t rows, uint32_t n, const float *a, size_t lda, uint32_t first_chunk,
                                  uint32_t across, float *partial)
{
    const uint32_t column = blockIdx.x % across * SUM_COLUMNS + threadIdx.x, chunk = blockIdx.x / across;
    const size_t first = (size_t)(first_chunk + chunk) * MU_GEMM_CHUNK;
    const uint32_t count = least(rows - (uint32_t)first, MU_GEMM_CHUNK);
    if (column >= n)
        return;
    a += first * lda + column;
    float sum = 0.0f;
#pragma unroll 8
    for (uint32_t i = 0; i < count; i++, a += lda)
        sum += *a;
    partial[(size_t)chunk * n + column] = sum;
}

__global__ void join_chunks_kernel(uint32_t chunks, uint32_t n, const float *partial, bool accumulate, float *out)
{
    const uint32_t column = blockIdx.x * SUM_COLUMNS + threadIdx.x;
    if (column >= n)
        return;
    float total = accumulate ? out[column] : 0.0f;
#pragma unroll 8
    for (uint32_t c = 0; c < chunks; c++)
        total += partial[(size_t)c * n + column];
    out[column] = total;
}

extern "C" enum mu_status mu_cuda_column_sum(struct mu_pool *pool, uint32_t rows, uint32_t n, const float *a,
                                             size_t lda, bool accumulate, float *out)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    const uint32_t across = div_up(n, SUM_COLUMNS), chunks = div_up(rows, MU_GEMM_CHUNK);
    const size_t fit = cuda->workspace_bytes / (n * sizeof(float));
    float *partial = (float *)cuda->workspace;
    uint32_t done = 0;
    MU_ASSERT(n > 0 && fit > 0);
    do { /* more chunks than fit are added in turns, in the same order */
        uint32_t count = chunks - done < fit ? chunks - done : (uint32_t)fit;
        if (count > 0)
            MU_LAUNCH(chunk_sums_kernel, dim3(across * count), dim3(SUM_COLUMNS), 0, cuda->stream, rows, n, a, lda,
                      done, across, partial);
        MU_LAUNCH(join_chunks_kernel, dim3(across), dim3(SUM_COLUMNS), 0, cuda->stream, count, n,
                  (const float *)partial, accumulate || done > 0, out);
        done += count;
    } while (done < chunks);
    return launched(cuda, "column_sum");
}

/* ---- squares ---- */

enum {
    SQUARE_THREADS = 256,
    BLOCKS_AT_ONCE = SQUARE_THREADS / LANES, /* norm blocks that a thread block sums side by side */
    WORDS = MU_EXACT_SUM_DIGITS + 1,         /* digits and flags of an exact sum */
};

/* Adds what `value` has in digit `digit` of an exact sum (the three digits that mu_exact_sum_add touches). */
MU_INLINE int64_t digit_of(double value, int digit, uint32_t &flags)
{
    uint64_t bits = (uint64_t)__double_as_longlong(value), mantissa = bits & ((1ull << 52) - 1);
    uint32_t exponent = (uint32_t)(bits >> 52) & 0x7ff;
    bool negative = bits >> 63;
    if (exponent == 0x7ff) {
        flags |= mantissa ? MU_EXACT_NAN : negative ? MU_EXACT_MINUS_INF : MU_EXACT_PLUS_INF;
        return 0;
    }
    if (exponent)
        mantissa |= 1ull << 52;
    else
        exponent = 1;
    uint32_t position = exponent - 1, shift = position % 32;
    int part = digit - (int)(position / 32);
    uint64_t low = (mantissa & 0xffffffffu) << shift, high = (mantissa >> 32) << shift;
    int64_t word = part == 0   ? (int64_t)(low & 0xffffffffu)
                   : part == 1 ? (int64_t)((low >> 32) + (high & 0xffffffffu))
                   : part == 2 ? (int64_t)(high >> 32)
                               : 0;
    return negative ? -word : word;
}

/* Sixteen threads sum the squares of one norm block, in double, one virtual lane each; then each digit of the exact sum
 * has a thread that adds all blocks' parts of it. Integer sums: no order shows. */
__global__ void square_kernel(size_t size, const float *g, int64_t *digits)
{
    __shared__ double sums[BLOCKS_AT_ONCE];
    const uint32_t lane = threadIdx.x % LANES, place = threadIdx.x / LANES;
    const size_t blocks = (size + MU_NORM_BLOCK - 1) / MU_NORM_BLOCK;
    int64_t digit = 0;
    uint32_t flags = 0;
    for (size_t first = (size_t)blockIdx.x * BLOCKS_AT_ONCE; first < blocks;
         first += (size_t)gridDim.x * BLOCKS_AT_ONCE) {
        size_t start = (first + place) * MU_NORM_BLOCK,
               end = start + MU_NORM_BLOCK < size ? start + MU_NORM_BLOCK : size;
        double sum = 0.0;
#pragma unroll 16
        for (size_t i = start; i < end; i += LANES) {
            double x = i + lane < end ? (double)g[i + lane] : 0.0;
            sum = fma(x, x, sum);
        }
        sum = fold_sum(sum);
        if (lane == 0)
            sums[place] = sum; /* 0 beyond the last block */
        __syncthreads();
        for (uint32_t b = 0; b < BLOCKS_AT_ONCE && threadIdx.x < MU_EXACT_SUM_DIGITS; b++)
            digit += digit_of(sums[b], (int)threadIdx.x, flags);
        __syncthreads();
    }
    if (threadIdx.x < MU_EXACT_SUM_DIGITS)
        digits[(size_t)blockIdx.x * WORDS + threadIdx.x] = digit;
    if (threadIdx.x == 0)
        digits[(size_t)blockIdx.x * WORDS + MU_EXACT_SUM_DIGITS] = flags;
}

/* Adds the thread blocks' digits; flags are joined. */
__global__ void join_digits_kernel(uint32_t count, const int64_t *digits, int64_t *out)
{
    int64_t sum = 0;
    if (threadIdx.x >= WORDS)
        return;
    for (uint32_t b = 0; b < count; b++) {
        int64_t word = digits[(size_t)b * WORDS + threadIdx.x];
        sum = threadIdx.x == MU_EXACT_SUM_DIGITS ? sum | word : sum + word;
    }
    out[threadIdx.x] = sum;
}

extern "C" enum mu_status mu_cuda_square_sum(struct mu_pool *pool, size_t size, const float *g,
                                             struct mu_exact_sum *sum)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    const size_t wanted =
        (size + (size_t)MU_NORM_BLOCK * BLOCKS_AT_ONCE - 1) / ((size_t)MU_NORM_BLOCK * BLOCKS_AT_ONCE);
    const uint32_t most = 4 * cuda->multiprocessors, count = wanted < most ? (uint32_t)wanted : most;
    int64_t *digits = (int64_t *)cuda->workspace, *joined = (int64_t *)cuda->pinned;
    struct mu_exact_sum part;
    if (size == 0)
        return MU_OK;
    MU_LAUNCH(square_kernel, dim3(count), dim3(SQUARE_THREADS), 0, cuda->stream, size, g, digits);
    MU_LAUNCH(join_digits_kernel, dim3(1), dim3(3 * WARP), 0, cuda->stream, count, (const int64_t *)digits, joined);
    enum mu_status status = launched(cuda, "square_sum");
    if (status == MU_OK)
        status = mu_cuda_wait(cuda);
    if (status != MU_OK)
        return status;
    mu_exact_sum_init(&part);
    for (int i = 0; i < MU_EXACT_SUM_DIGITS; i++)
        part.digits[i] = joined[i];
    part.flags = (uint32_t)joined[MU_EXACT_SUM_DIGITS];
    mu_exact_sum_merge(sum, &part);
    return MU_OK;
}
