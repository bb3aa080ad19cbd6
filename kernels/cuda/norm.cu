/* Norms: residual addition, dropout and norm in one pass over memory; the backward pass in two.
 *
 * Sixteen threads own a row, one virtual lane each. Forward, a row of up to 16 * STEPS channels stays in their
 * registers: all its loads are in flight at once, and each operand is read once. Longer rows are read again from where
 * the same thread has just written them. Backward, a first kernel takes the sums of each row; the second owns columns
 * of blocks of MU_NORM_ROWS rows, as the definition of the weights' gradients asks, and writes the rows' gradients on
 * the way. */
#include "kernels/cuda/device.h"

enum { NORM_THREADS = 128, ROWS_OF_BLOCK = NORM_THREADS / LANES };

/* A row of mu_norm_forward in registers, or in memory when STEPS is 0. */
template <int STEPS> struct row_values {
    float x[STEPS > 0 ? STEPS : 1];
};

struct forward_args {
    struct mu_norm_forward n;
    struct site drop;
};

enum { TOGETHER = 4 }; /* steps whose loads are in flight at once at least: one dropout counter serves them */

/* residual + dropped branch at TOGETHER steps from s on; 0 beyond the row. */
MU_INLINE void load_steps(const struct forward_args &a, uint32_t row, uint32_t s, uint32_t lane, float x[TOGETHER])
{
    const struct mu_norm_forward &n = a.n;
    const uint32_t first = s * LANES + lane, position = n.first_row + row;
    const size_t at = (size_t)row * n.channels + first;
    float branch[TOGETHER];
    struct random4 random;
#pragma unroll
    for (uint32_t j = 0; j < TOGETHER; j++) {
        const bool inside = first + j * LANES < n.channels;
        x[j] = inside ? n.residual[at + j * LANES] : 0.0f;
        branch[j] = inside && n.branch ? n.branch[at + j * LANES] : 0.0f;
    }
    if (!n.branch)
        return;
    if (a.drop.threshold)
        random = site_random(a.drop, position / n.length, position % n.length, s / TOGETHER, lane);
#pragma unroll
    for (uint32_t j = 0; j < TOGETHER; j++) {
        const bool inside = first + j * LANES < n.channels;
        x[j] = a.drop.threshold ? fmaf(branch[j], inside ? site_factor(a.drop, random.word[j]) : 0.0f, x[j])
                                : x[j] + branch[j];
    }
}

/* Stores TOGETHER steps of residual_out and adds them, or their squares, to the lane's sum; steps beyond the row's last
 * are no part of the sum. */
MU_INLINE float keep_steps(const struct mu_norm_forward &n, uint32_t row, uint32_t s, uint32_t lane,
                           const float x[TOGETHER], float sum)
{
#pragma unroll
    for (uint32_t j = 0; j < TOGETHER; j++) {
        const uint32_t first = (s + j) * LANES;
        if (first >= n.channels)
            break;
        sum = n.rms ? fmaf(x[j], x[j], sum) : sum + x[j];
        if (first + lane < n.channels)
            n.residual_out[(size_t)row * n.channels + first + lane] = x[j];
    }
    return sum;
}

template <int STEPS>
MU_INLINE float value_at(const struct mu_norm_forward &n, const struct row_values<STEPS> &row, size_t start, int s,
                         uint32_t lane)
{
    if (STEPS > 0)
        return row.x[s];
    uint32_t i = (uint32_t)s * LANES + lane;
    return i < n.channels ? n.residual_out[start + i] : 0.0f;
}

/* The sums of a row and what is stored of it: y, mean, rstd. */
template <int STEPS>
MU_INLINE void finish_row(const struct mu_norm_forward &n, const struct row_values<STEPS> &values, float sum,
                          uint32_t row, uint32_t lane, bool inside)
{
    const int steps = (int)((n.channels + LANES - 1) / LANES), limit = STEPS > 0 ? STEPS : steps;
    const size_t start = (size_t)row * n.channels;
    float mean = 0.0f, square = sum;
    if (!n.rms) {
        mean = fold_sum(sum) / (float)n.channels;
        square = 0.0f;
#pragma unroll
        for (int s = 0; s < limit; s++) {
            if (s >= steps)
                break;
            float d = (uint32_t)s * LANES + lane < n.channels ? value_at(n, values, start, s, lane) - mean : 0.0f;
            square = fmaf(d, d, square);
        }
    }
    float r = 1.0f / sqrtf(fold_sum(square) / (float)n.channels + MU_NORM_EPS);
#pragma unroll
    for (int s = 0; s < limit; s++) {
        uint32_t i = (uint32_t)s * LANES + lane;
        if (!inside || i >= n.channels)
            break;
        float x = value_at(n, values, start, s, lane);
        n.y[start + i] = n.rms ? x * r * n.weight[i] : fmaf((x - mean) * r, n.weight[i], n.bias[i]);
    }
    if (inside && lane == 0) {
        if (!n.rms)
            n.mean[row] = mean;
        n.rstd[row] = r;
    }
}

template <int STEPS> __global__ void norm_forward_kernel(struct forward_args a)
{
    const uint32_t lane = threadIdx.x % LANES, number = blockIdx.x * ROWS_OF_BLOCK + threadIdx.x / LANES;
    const bool inside = number < a.n.rows;
    const uint32_t row = inside ? number : a.n.rows - 1; /* rows beyond the last only take part in the folds */
    const uint32_t steps = (a.n.channels + LANES - 1) / LANES;
    struct row_values<STEPS> values;
    float sum = 0.0f;
    if constexpr (STEPS > 0) {
#pragma unroll
        for (uint32_t s = 0; s < STEPS; s += TOGETHER)
            if (s < steps)
                load_steps(a, row, s, lane, values.x + s);
#pragma unroll
        for (uint32_t s = 0; s < STEPS; s += TOGETHER)
            if (s < steps && inside)
                sum = keep_steps(a.n, row, s, lane, values.x + s, sum);
    } else {
        for (uint32_t s = 0; s < steps && inside; s += TOGETHER) {
            float x[TOGETHER];
            load_steps(a, row, s, lane, x);
            sum = keep_steps(a.n, row, s, lane, x, sum);
        }
    }
    finish_row(a.n, values, sum, row, lane, inside);
}

extern "C" enum mu_status mu_cuda_norm_forward(struct mu_pool *pool, const struct mu_norm_forward *norm)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    struct forward_args a = {*norm, site_of(norm->drop)};
    const uint32_t steps = div_up(norm->channels, LANES);
    void (*kernel)(struct forward_args) = steps <= 16    ? norm_forward_kernel<16>
                                          : steps <= 48  ? norm_forward_kernel<48>
                                          : steps <= 64  ? norm_forward_kernel<64>
                                          : steps <= 104 ? norm_forward_kernel<104>
                                                         : norm_forward_kernel<0>;
    if (norm->rows == 0)
        return MU_OK;
    MU_LAUNCH(kernel, dim3(div_up(norm->rows, ROWS_OF_BLOCK)), dim3(NORM_THREADS), 0, cuda->stream, a);
    return launched(cuda, "norm_forward");
}

/* ---- backward ---- */

struct backward_args {
    struct mu_norm_backward n;
    struct site drop;
    float *row_means; /* [rows][2]: mean of weighted dy, of weighted dy * normal */
};

__global__ void norm_sums_kernel(struct backward_args a)
{
    const struct mu_norm_backward &n = a.n;
    const uint32_t lane = threadIdx.x % LANES, number = blockIdx.x * ROWS_OF_BLOCK + threadIdx.x / LANES;
    const bool inside = number < n.rows;
    const size_t start = (size_t)(inside ? number : 0) * n.channels;
    const float mean = inside && !n.rms ? n.mean[number] : 0.0f, r = inside ? n.rstd[number] : 0.0f;
    float sum = 0.0f, sum_normal = 0.0f;
#pragma unroll 8
    for (uint32_t s = 0; s < n.channels; s += LANES) {
        const bool here = inside && s + lane < n.channels;
        float g = here ? n.dy[start + s + lane] : 0.0f, x = here ? n.residual[start + s + lane] : 0.0f;
        float normal = n.rms ? x * r : (x - mean) * r;
        float weighted = g * (here ? n.weight[s + lane] : 0.0f);
        sum += weighted;
        sum_normal = fmaf(weighted, normal, sum_normal);
    }
    sum = fold_sum(sum) / (float)n.channels;
    sum_normal = fold_sum(sum_normal) / (float)n.channels;
    if (inside && lane == 0) {
        a.row_means[2 * (size_t)number] = sum;
        a.row_means[2 * (size_t)number + 1] = sum_normal;
    }
}

enum { COLUMN_THREADS = 64, COLUMNS_OF_BLOCK = COLUMN_THREADS * 4 };

/* Four columns of a row, sixteen apart. */
struct columns {
    float x[4], g[4], before[4];
};

MU_INLINE struct columns load_columns(const struct mu_norm_backward &n, uint32_t row, uint32_t column)
{
    const size_t start = (size_t)row * n.channels + column;
    struct columns c;
#pragma unroll
    for (uint32_t w = 0; w < 4; w++) {
        const bool here = row < n.rows && column + w * LANES < n.channels;
        c.x[w] = here ? n.residual[start + w * LANES] : 0.0f;
        c.g[w] = here ? n.dy[start + w * LANES] : 0.0f;
        c.before[w] = here && !n.first ? n.dresidual[start + w * LANES] : 0.0f;
    }
    return c;
}

/* A thread's share of the sums over a block of rows. */
struct column_sums {
    float weight[4], dweight[4], dbias[4];
};

/* Adds one row to the sums of the weights' gradients and writes the gradients of the row. */
MU_INLINE void backward_row(const struct backward_args &a, uint32_t row, uint32_t column, const struct columns &c,
                            struct column_sums &sums)
{
    const struct mu_norm_backward &n = a.n;
    const float mean = n.rms ? 0.0f : n.mean[row], r = n.rstd[row];
    const float mean_weighted = a.row_means[2 * (size_t)row], mean_normal = a.row_means[2 * (size_t)row + 1];
    const size_t start = (size_t)row * n.channels + column;
    const uint32_t position = n.first_row + row;
    const bool dropped = n.dbranch && a.drop.threshold;
    struct random4 random;
    if (dropped)
        random = site_random(a.drop, position / n.length, position % n.length, column / DROPOUT_FEATURES,
                             column % DROPOUT_FEATURES);
#pragma unroll
    for (uint32_t w = 0; w < 4; w++) {
        if (column + w * LANES >= n.channels)
            break;
        float normal = n.rms ? c.x[w] * r : (c.x[w] - mean) * r;
        float weighted = c.g[w] * sums.weight[w];
        sums.dweight[w] = fmaf(c.g[w], normal, sums.dweight[w]);
        sums.dbias[w] = c.g[w] + sums.dbias[w];
        float dx = fmaf(-normal, mean_normal, n.rms ? weighted : weighted - mean_weighted) * r;
        if (!n.first)
            dx = c.before[w] + dx;
        n.dresidual[start + w * LANES] = dx;
        if (n.dbranch)
            n.dbranch[start + w * LANES] = dropped ? dx * site_factor(a.drop, random.word[w]) : dx;
    }
}

__global__ void norm_backward_kernel(struct backward_args a, uint32_t column_blocks)
{
    const struct mu_norm_backward &n = a.n;
    const uint32_t block = blockIdx.x / column_blocks;
    const uint32_t column =
        (blockIdx.x % column_blocks) * COLUMNS_OF_BLOCK + threadIdx.x / LANES * DROPOUT_FEATURES + threadIdx.x % LANES;
    const uint32_t first = block * MU_NORM_ROWS, end = first + least(n.rows - first, MU_NORM_ROWS);
    struct column_sums sums = {};
#pragma unroll
    for (uint32_t w = 0; w < 4; w++)
        sums.weight[w] = column + w * LANES < n.channels ? n.weight[column + w * LANES] : 0.0f;
    struct columns now = load_columns(n, first, column);
    for (uint32_t row = first; row < end; row++) {
        const struct columns next = load_columns(n, row + 1, column); /* on its way while this row is computed */
        backward_row(a, row, column, now, sums);
        now = next;
    }
    float *partial = n.workspace + (size_t)block * 2 * n.channels;
#pragma unroll
    for (uint32_t w = 0; w < 4; w++) {
        if (column + w * LANES >= n.channels)
            break;
        partial[column + w * LANES] = sums.dweight[w];
        partial[n.channels + column + w * LANES] = sums.dbias[w];
    }
}

extern "C" enum mu_status mu_cuda_norm_backward(struct mu_pool *pool, const struct mu_norm_backward *norm)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    struct backward_args a = {*norm, site_of(norm->drop), (float *)cuda->workspace};
    const uint32_t blocks = div_up(norm->rows, MU_NORM_ROWS), across = div_up(norm->channels, COLUMNS_OF_BLOCK);
    const size_t stride = 2 * (size_t)norm->channels;
    enum mu_status status = need_workspace(cuda, "norm_backward", (size_t)norm->rows * 2 * sizeof(float));
    if (status != MU_OK)
        return status;
    if (norm->rows > 0) {
        MU_LAUNCH(norm_sums_kernel, dim3(div_up(norm->rows, ROWS_OF_BLOCK)), dim3(NORM_THREADS), 0, cuda->stream, a);
        MU_LAUNCH(norm_backward_kernel, dim3(blocks * across), dim3(COLUMN_THREADS), 0, cuda->stream, a, across);
    }
    status = launched(cuda, "norm_backward");
    if (status == MU_OK)
        status =
            mu_cuda_column_sum(pool, blocks, norm->channels, norm->workspace, stride, norm->accumulate, norm->dweight);
    if (status != MU_OK || norm->rms)
        return status;
    return mu_cuda_column_sum(pool, blocks, norm->channels, norm->workspace + norm->channels, stride, norm->accumulate,
                              norm->dbias);
}
