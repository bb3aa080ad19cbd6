/* The embedding's gradient: rows of dx sorted by token, then added to the table by one owner per element, ascending.
 *
 * The sort is stable, by digits of 8 bits of the token (least significant first); in each pass a thread owns a digit
 * and walks the tile's items in order, so equal digits keep their order without atomics. Items whose token lies outside
 * the wanted rows of the table sort to the end. */
#include "kernels/cuda/device.h"

enum {
    DIGIT_BITS = 8,
    DIGITS = 1 << DIGIT_BITS, /* and threads of a block */
    TILE_ITEMS = 1024,
    ADD_COLUMNS = 128, /* columns of one owner block */
};

/* An item: its token relative to the first wanted row, `count` beyond them, and its row of dx. */
struct items {
    uint32_t *key, *row;
};

__global__ void number_kernel(uint32_t rows, const int32_t *tokens, uint32_t first, uint32_t count, struct items out)
{
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows)
        return;
    uint32_t key = (uint32_t)tokens[i] - first; /* wraps to a large number below the first */
    out.key[i] = key < count ? key : count;
    out.row[i] = i;
}

/* Loads the digits of a tile; returns how many items it has. */
MU_INLINE uint32_t load_tile(uint32_t rows, const uint32_t *key, uint32_t shift, uint8_t *digit)
{
    const uint32_t start = blockIdx.x * TILE_ITEMS, size = least(rows - start, TILE_ITEMS);
    for (uint32_t i = threadIdx.x; i < size; i += DIGITS)
        digit[i] = (uint8_t)(key[start + i] >> shift);
    __syncthreads();
    return size;
}

/* counts[tile][digit] */
__global__ void count_kernel(uint32_t rows, const uint32_t *key, uint32_t shift, uint32_t *counts)
{
    __shared__ uint8_t digit[TILE_ITEMS];
    const uint32_t size = load_tile(rows, key, shift, digit);
    uint32_t own = 0;
    for (uint32_t i = 0; i < size; i++)
        own += digit[i] == threadIdx.x;
    counts[blockIdx.x * DIGITS + threadIdx.x] = own;
}

/* counts become the places of each tile's first item with each digit: over digits, then tiles. One block. */
__global__ void places_kernel(uint32_t tiles, uint32_t *counts)
{
    __shared__ uint32_t totals[DIGITS];
    uint32_t sum = 0;
    for (uint32_t tile = 0; tile < tiles; tile++)
        sum += counts[tile * DIGITS + threadIdx.x];
    totals[threadIdx.x] = sum;
    __syncthreads();
    uint32_t place = 0;
    for (uint32_t d = 0; d < threadIdx.x; d++)
        place += totals[d];
    for (uint32_t tile = 0; tile < tiles; tile++) {
        uint32_t own = counts[tile * DIGITS + threadIdx.x];
        counts[tile * DIGITS + threadIdx.x] = place;
        place += own;
    }
}

__global__ void move_kernel(uint32_t rows, struct items in, uint32_t shift, const uint32_t *places, struct items out)
{
    __shared__ uint8_t digit[TILE_ITEMS];
    const uint32_t size = load_tile(rows, in.key, shift, digit), start = blockIdx.x * TILE_ITEMS;
    uint32_t place = places[blockIdx.x * DIGITS + threadIdx.x];
    for (uint32_t i = 0; i < size; i++) {
        if (digit[i] != threadIdx.x)
            continue;
        out.key[place] = in.key[start + i];
        out.row[place] = in.row[start + i];
        place++;
    }
}

/* The end of the run of keys equal to the one at `first`. */
MU_INLINE uint32_t run_end(const uint32_t *key, uint32_t first, uint32_t rows)
{
    uint32_t low = first + 1, high = rows;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (key[middle] == key[first])
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The first item of a run of equal keys owns the row of the table. Where the run ends is known before the first row is
 * added, so several rows are in flight. */
__global__ void add_runs_kernel(uint32_t rows, uint32_t channels, uint32_t across, struct items sorted, uint32_t count,
                                const float *dx, float *dtable)
{
    const uint32_t item = blockIdx.x / across, key = sorted.key[item];
    const uint32_t column = blockIdx.x % across * ADD_COLUMNS + threadIdx.x;
    if (key >= count || (item > 0 && sorted.key[item - 1] == key) || column >= channels)
        return;
    const uint32_t end = run_end(sorted.key, item, rows);
    float sum = dtable[(size_t)key * channels + column];
#pragma unroll 8
    for (uint32_t i = item; i < end; i++)
        sum += dx[(size_t)sorted.row[i] * channels + column];
    dtable[(size_t)key * channels + column] = sum;
}

extern "C" enum mu_status mu_cuda_embedding_backward(struct mu_pool *pool, uint32_t rows, uint32_t channels,
                                                     const int32_t *tokens, const float *dx, uint32_t first,
                                                     uint32_t count, float *dtable)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    const uint32_t tiles = div_up(rows, TILE_ITEMS), across = div_up(channels, ADD_COLUMNS);
    uint32_t *scratch = (uint32_t *)cuda->workspace, *counts = scratch + 4 * (size_t)rows;
    struct items in = {scratch, scratch + rows}, out = {scratch + 2 * (size_t)rows, scratch + 3 * (size_t)rows};
    const size_t bytes = (4 * (size_t)rows + (size_t)tiles * DIGITS) * sizeof *scratch;
    enum mu_status status = need_workspace(cuda, "embedding_backward", bytes);
    if (status != MU_OK || rows == 0 || count == 0)
        return status;
    MU_LAUNCH(number_kernel, dim3(div_up(rows, DIGITS)), dim3(DIGITS), 0, cuda->stream, rows, tokens, first, count, in);
    for (uint32_t shift = 0; shift < 32 && count >> shift; shift += DIGIT_BITS) {
        struct items swap = in;
        MU_LAUNCH(count_kernel, dim3(tiles), dim3(DIGITS), 0, cuda->stream, rows, (const uint32_t *)in.key, shift,
                  counts);
        MU_LAUNCH(places_kernel, dim3(1), dim3(DIGITS), 0, cuda->stream, tiles, counts);
        MU_LAUNCH(move_kernel, dim3(tiles), dim3(DIGITS), 0, cuda->stream, rows, in, shift, (const uint32_t *)counts,
                  out);
        in = out;
        out = swap;
    }
    MU_LAUNCH(add_runs_kernel, dim3(rows * across), dim3(ADD_COLUMNS), 0, cuda->stream, rows, channels, across, in,
              count, dx, dtable);
    return launched(cuda, "embedding_backward");
}
