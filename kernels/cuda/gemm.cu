/* The exact fp32 matrix product: the definition of kernels.h (chunks of 256 k, fma chains, slices by the tree) on tiles
 * in shared memory and blocks of registers. Tiles never show in the bits, so their size follows the size of C.
 *
 * A thread block owns a tile of C. It walks k in steps of STEP through two buffers in shared memory: while one is
 * multiplied, the next step's operands are on their way to registers, 16 bytes at a time where alignment allows. Per
 * step a thread of the large tile does 1024 fma on 256 floats from shared memory. The sums of slices form a stack as in
 * a binary counter; it is touched once per slice. 2 m n k FLOPs; the bytes are in kernels/cuda/cost.h. */
#include "kernels/cuda/epilogue.h"

enum { STEP = 16, PAD = 4, LEVELS = 6 };
static_assert(1 << LEVELS == MU_GEMM_SLICES_MAX, "the stack holds the tree");
static_assert(MU_GEMM_CHUNK % STEP == 0, "chunks end where steps do");

/* op(X) as rows of the tile times k: how it lies in memory. */
struct operand {
    const float *x;
    size_t ld, slice;
    uint32_t first, rows; /* first row of the tile, rows of the matrix */
    bool along_k;         /* k is contiguous */
    bool vector;          /* every group of four that begins at a multiple of four is aligned */
};

/* Where a walk over slices and k is. */
struct walk {
    uint32_t slice, k;
};

struct slices {
    uint32_t count, k, k_last;
};

MU_INLINE uint32_t slice_k(const struct slices &s, uint32_t slice)
{
    return slice + 1 == s.count ? s.k_last : s.k;
}

MU_INLINE struct walk next_step(const struct slices &s, struct walk at)
{
    struct walk next = {at.slice, at.k + STEP};
    if (next.k >= slice_k(s, at.slice)) {
        next.slice++;
        next.k = 0;
    }
    return next;
}

/* A thread's share of SIDE rows times STEP k: groups of four, contiguous in memory. */
template <int SIDE, int THREADS> struct share {
    enum { GROUPS = SIDE * STEP / 4 / THREADS };
    float4 group[GROUPS];

    /* Row and k of group g. */
    static __device__ __forceinline__ void place(bool along_k, uint32_t g, uint32_t *ret_row, uint32_t *ret_k)
    {
        uint32_t number = threadIdx.x + g * THREADS;
        *ret_row = along_k ? number / (STEP / 4) : number % (SIDE / 4) * 4;
        *ret_k = along_k ? number % (STEP / 4) * 4 : number / (SIDE / 4);
    }

    __device__ __forceinline__ void fetch(const struct operand &o, const struct slices &s, struct walk at)
    {
        const uint32_t left_k = slice_k(s, at.slice) - at.k;
#pragma unroll
        for (uint32_t g = 0; g < GROUPS; g++) {
            uint32_t row, k;
            place(o.along_k, g, &row, &k);
            const uint32_t left_rows = o.rows > o.first + row ? o.rows - o.first - row : 0;
            const uint32_t inside = k >= left_k || left_rows == 0 ? 0 : o.along_k ? left_k - k : left_rows;
            const float *x =
                o.x + at.slice * o.slice +
                (o.along_k ? (size_t)(o.first + row) * o.ld + at.k + k : (at.k + k) * o.ld + o.first + row);
            if (o.vector && inside >= 4)
                group[g] = *(const float4 *)x;
            else
                group[g] = make_float4(inside > 0 ? x[0] : 0.0f, inside > 1 ? x[1] : 0.0f, inside > 2 ? x[2] : 0.0f,
                                       inside > 3 ? x[3] : 0.0f);
        }
    }

    /* To tile[k][row]. */
    __device__ __forceinline__ void store(bool along_k, float (*tile)[SIDE + PAD]) const
    {
#pragma unroll
        for (uint32_t g = 0; g < GROUPS; g++) {
            uint32_t row, k;
            place(along_k, g, &row, &k);
            if (!along_k) {
                *(float4 *)&tile[k][row] = group[g];
                continue;
            }
            tile[k][row] = group[g].x;
            tile[k + 1][row] = group[g].y;
            tile[k + 2][row] = group[g].z;
            tile[k + 3][row] = group[g].w;
        }
    }
};

/* A thread's block of C: TM x TN in groups of four rows and columns, the groups a fraction of the tile apart so that
 * neighbouring threads read neighbouring addresses. */
template <int TM, int TN> struct block_of_c {
    float v[TM][TN];
};

template <int SIDE, int T> MU_INLINE uint32_t place_in_tile(uint32_t thread, uint32_t i)
{
    return i / 4 * (SIDE / (T / 4)) + thread * 4 + i % 4;
}

template <int BM, int BN, int TM, int TN>
MU_INLINE void multiply_step(uint32_t count, const float (*a)[BM + PAD], const float (*b)[BN + PAD], uint32_t down,
                             uint32_t across, struct block_of_c<TM, TN> &acc)
{
#pragma unroll
    for (uint32_t k = 0; k < STEP; k++) {
        if (k >= count) /* no zeros are added beyond the end: they would turn -0 into +0 */
            break;
        float x[TM], y[TN];
#pragma unroll
        for (uint32_t i = 0; i < TM; i += 4)
            *(float4 *)&x[i] = *(const float4 *)&a[k][place_in_tile<BM, TM>(down, i)];
#pragma unroll
        for (uint32_t j = 0; j < TN; j += 4)
            *(float4 *)&y[j] = *(const float4 *)&b[k][place_in_tile<BN, TN>(across, j)];
#pragma unroll
        for (uint32_t i = 0; i < TM; i++)
#pragma unroll
            for (uint32_t j = 0; j < TN; j++)
                acc.v[i][j] = fmaf(x[i], y[j], acc.v[i][j]);
    }
}

/* What a product does beyond multiplying, as kernel arguments. */
struct gemm_args {
    struct operand a, b;
    struct slices slices;
    uint32_t m, n, tiles_down;
    float *c;
    size_t ldc;
    struct epilogue end;
    bool accumulate, vector; /* vector: rows of c are 16-byte aligned */
};

template <int BM, int BN, int TM, int TN>
MU_INLINE void store_block(const struct gemm_args &g, uint32_t first_row, uint32_t first_column, uint32_t down,
                           uint32_t across, const struct block_of_c<TM, TN> &sum)
{
#pragma unroll
    for (uint32_t i = 0; i < TM; i++) {
        const uint32_t row = first_row + place_in_tile<BM, TM>(down, i);
        if (row >= g.m)
            continue;
#pragma unroll
        for (uint32_t j = 0; j < TN; j += 4) {
            const uint32_t column = first_column + place_in_tile<BN, TN>(across, j);
            float v[4];
#pragma unroll
            for (uint32_t e = 0; e < 4; e++)
                v[e] = column + e < g.n ? finish_value(g.end, row, column + e, sum.v[i][j + e]) : 0.0f;
            float *c = g.c + row * g.ldc + column;
            if (g.vector && column + 4 <= g.n)
                *(float4 *)c = make_float4(v[0], v[1], v[2], v[3]);
            else
                for (uint32_t e = 0; e < 4 && column + e < g.n; e++)
                    c[e] = v[e];
        }
    }
}

/* total = what there is so far + acc; acc = +0. `begins`: there is nothing so far but C, when accumulating. */
template <int BM, int BN, int TM, int TN>
MU_INLINE void end_chunk(const struct gemm_args &g, bool begins, uint32_t first_row, uint32_t first_column,
                         uint32_t down, uint32_t across, struct block_of_c<TM, TN> &acc,
                         struct block_of_c<TM, TN> &total)
{
#pragma unroll
    for (uint32_t i = 0; i < TM; i++)
#pragma unroll
        for (uint32_t j = 0; j < TN; j++) {
            float x = acc.v[i][j];
            acc.v[i][j] = 0.0f;
            if (!begins) {
                x = total.v[i][j] + x;
            } else if (g.accumulate) {
                const uint32_t row = first_row + place_in_tile<BM, TM>(down, i),
                               column = first_column + place_in_tile<BN, TN>(across, j);
                if (row < g.m && column < g.n)
                    x = g.c[row * g.ldc + column] + x;
            }
            total.v[i][j] = x;
        }
}

/* Slice `s` is complete: adds the equal subtrees before it and stacks the sum. The result of the last is at the
 * bottom. */
template <int TM, int TN>
MU_INLINE void end_slice(uint32_t s, struct block_of_c<TM, TN> *stack, struct block_of_c<TM, TN> &total)
{
    uint32_t depth = (uint32_t)__popc(s);
    for (uint32_t bits = s; bits & 1; bits >>= 1) {
        depth--;
#pragma unroll
        for (uint32_t i = 0; i < TM; i++)
#pragma unroll
            for (uint32_t j = 0; j < TN; j++)
                total.v[i][j] = stack[depth].v[i][j] + total.v[i][j];
    }
    stack[depth] = total;
}

template <int BM, int BN, int TM, int TN, bool SLICED>
__global__ void __launch_bounds__((BM / TM) * (BN / TN)) gemm_kernel(struct gemm_args g)
{
    enum { THREADS = (BM / TM) * (BN / TN) };
    __shared__ __align__(16) float tile_a[2][STEP][BM + PAD], tile_b[2][STEP][BN + PAD];
    const uint32_t first_row = blockIdx.x % g.tiles_down * BM, first_column = blockIdx.x / g.tiles_down * BN;
    const uint32_t across = threadIdx.x % (BN / TN), down = threadIdx.x / (BN / TN);
    struct block_of_c<TM, TN> acc = {}, total = {}, stack[SLICED ? LEVELS : 1];
    struct share<BM, THREADS> a;
    struct share<BN, THREADS> b;
    struct walk at = {0, 0};
    uint32_t buffer = 0;
    g.a.first = first_row;
    g.b.first = first_column;
    a.fetch(g.a, g.slices, at);
    b.fetch(g.b, g.slices, at);
    while (at.slice < g.slices.count) {
        const struct walk next = next_step(g.slices, at);
        const uint32_t count = least(slice_k(g.slices, at.slice) - at.k, STEP);
        a.store(g.a.along_k, tile_a[buffer]);
        b.store(g.b.along_k, tile_b[buffer]);
        __syncthreads(); /* the other buffer has been read by all: it is free for the next step */
        if (next.slice < g.slices.count) {
            a.fetch(g.a, g.slices, next);
            b.fetch(g.b, g.slices, next);
        }
        multiply_step<BM, BN, TM, TN>(count, tile_a[buffer], tile_b[buffer], down, across, acc);
        if (next.k % MU_GEMM_CHUNK == 0) /* also where a slice ends */
            end_chunk<BM, BN, TM, TN>(g, at.k < MU_GEMM_CHUNK, first_row, first_column, down, across, acc, total);
        if (SLICED && next.k == 0)
            end_slice(at.slice, stack, total);
        buffer ^= 1;
        at = next;
    }
    store_block<BM, BN, TM, TN>(g, first_row, first_column, down, across, SLICED ? stack[0] : total);
}

static struct operand operand_of(const float *x, size_t ld, size_t slice, uint32_t rows, bool along_k)
{
    struct operand o = {x, ld, slice, 0, rows, along_k, aligned16(x, ld) && slice % 4 == 0};
    return o;
}

template <int BM, int BN, int TM, int TN> static void launch_gemm(struct mu_cuda *cuda, struct gemm_args *g)
{
    void (*kernel)(struct gemm_args) =
        g->slices.count > 1 ? gemm_kernel<BM, BN, TM, TN, true> : gemm_kernel<BM, BN, TM, TN, false>;
    g->tiles_down = div_up(g->m, BM);
    MU_LAUNCH(kernel, dim3(g->tiles_down * div_up(g->n, BN)), dim3((BM / TM) * (BN / TN)), 0, cuda->stream, *g);
}

extern "C" enum mu_status mu_cuda_gemm(struct mu_pool *pool, const struct mu_gemm *gemm)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    const uint32_t slices = gemm->slices > 1 ? gemm->slices : 1;
    MU_ASSERT(gemm->m > 0 && gemm->n > 0 && gemm->k > 0 && gemm->k_last <= gemm->k);
    MU_ASSERT(!gemm->accumulate || (gemm->epilogue == MU_EPILOGUE_NONE && slices == 1));
    MU_ASSERT(slices <= MU_GEMM_SLICES_MAX && (slices & (slices - 1)) == 0);
    struct gemm_args g = {};
    g.a = operand_of(gemm->a, gemm->lda, gemm->a_slice, gemm->m, !gemm->transpose_a);
    g.b = operand_of(gemm->b, gemm->ldb, gemm->b_slice, gemm->n, gemm->transpose_b);
    g.slices = {slices, gemm->k, gemm->k_last ? gemm->k_last : gemm->k};
    g.m = gemm->m;
    g.n = gemm->n;
    g.c = gemm->c;
    g.ldc = gemm->ldc;
    g.end = epilogue_of(gemm);
    g.accumulate = gemm->accumulate;
    g.vector = aligned16(gemm->c, gemm->ldc);
    if ((size_t)div_up(g.m, 128) * div_up(g.n, 128) >= cuda->multiprocessors)
        launch_gemm<128, 128, 8, 8>(cuda, &g);
    else if ((size_t)div_up(g.m, 64) * div_up(g.n, 64) >= cuda->multiprocessors)
        launch_gemm<64, 64, 8, 4>(cuda, &g);
    else
        launch_gemm<32, 32, 4, 4>(cuda, &g);
    return launched(cuda, "gemm");
}
