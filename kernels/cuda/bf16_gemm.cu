/* Matrix products on tensor cores by cublasLt: operands are rounded to bf16 in the workspace, sums are fp32.
 *
 * The workspace: cublasLt's scratch, then a quarter for the partial sums of slices, then the rounded operands. Operands
 * that do not fit are taken in blocks of rows of op(A) and columns of op(B); blocks, like everything here, are a
 * function of the shape alone, and k is never cut. Slices are products of their own, added by the tree. */
#include "kernels/cuda/epilogue.h"
#include "kernels/cuda/plan.h"
#include "kernels/cuda/rounding.h"

enum { ROUND_THREADS = 256, OF_THREAD = 8, STACK_LEVELS = 7 /* log2 of MU_GEMM_SLICES_MAX and one */ };

/* ---- rounding ---- */

/* out[rows][ld_out] = x[rows][columns], zeros beyond; a thread rounds eight. ld_out is a multiple of eight. */
__global__ void round_kernel(uint32_t rows, uint32_t columns, const float *x, size_t ld, bool vector,
                             __nv_bfloat16 *out, uint32_t ld_out)
{
    const size_t thread = (size_t)blockIdx.x * ROUND_THREADS + threadIdx.x, groups = ld_out / OF_THREAD;
    const size_t row = thread / groups;
    const uint32_t column = (uint32_t)(thread % groups) * OF_THREAD;
    if (row >= rows)
        return;
    const float *from = x + row * ld + column;
    float v[OF_THREAD];
    if (vector && column + OF_THREAD <= columns) {
        *(float4 *)v = *(const float4 *)from;
        *(float4 *)(v + 4) = *(const float4 *)(from + 4);
    } else {
#pragma unroll
        for (uint32_t i = 0; i < OF_THREAD; i++)
            v[i] = column + i < columns ? from[i] : 0.0f;
    }
    *(uint4 *)(out + row * ld_out + column) =
        make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}

static uint32_t round_up(uint32_t x, uint32_t to)
{
    return div_up(x, to) * to;
}

/* A block of an operand in bf16, rows `ld` apart. */
struct rounded {
    const __nv_bfloat16 *at;
    uint32_t ld;
};

/* The block as it lies in the parameters' shadow, or rounded to `out`. */
static struct rounded round_operand(struct mu_cuda *cuda, uint32_t rows, uint32_t columns, const float *x, size_t ld,
                                    __nv_bfloat16 *out)
{
    const uint16_t *shadow = shadow_of(cuda, x, (rows - 1) * ld + columns);
    struct rounded r = {(const __nv_bfloat16 *)shadow, (uint32_t)ld};
    if (shadow && (uintptr_t)shadow % 16 == 0 && ld % OF_THREAD == 0)
        return r;
    r.at = out;
    r.ld = round_up(columns, OF_THREAD);
    const size_t threads = (size_t)rows * (r.ld / OF_THREAD);
    MU_LAUNCH(round_kernel, dim3(div_up(threads, ROUND_THREADS)), dim3(ROUND_THREADS), 0, cuda->stream, rows, columns,
              x, ld, aligned16(x, ld), out, r.ld);
    return r;
}

/* ---- epilogue ---- */

__global__ void finish_kernel(uint32_t m, uint32_t n, const float *x, size_t ldx, struct epilogue end, float *c,
                              size_t ldc)
{
    const size_t thread = (size_t)blockIdx.x * ROUND_THREADS + threadIdx.x, row = thread / n;
    const uint32_t column = (uint32_t)(thread % n);
    if (row < m)
        c[row * ldc + column] = finish_value(end, row, column, x[row * ldx + column]);
}

static void finish(struct mu_cuda *cuda, uint32_t m, uint32_t n, const float *x, size_t ldx, const struct epilogue *end,
                   float *c, size_t ldc)
{
    MU_LAUNCH(finish_kernel, dim3(div_up((size_t)m * n, ROUND_THREADS)), dim3(ROUND_THREADS), 0, cuda->stream, m, n, x,
              ldx, *end, c, ldc);
}

/* ---- one product ---- */

/* The parts of the workspace. */
struct room {
    void *scratch;
    float *partial;
    __nv_bfloat16 *rounded;
    size_t scratch_bytes, partial_floats, rounded_size;
};

static struct room room_of(const struct mu_cuda *cuda)
{
    struct room r;
    char *start = (char *)cuda->workspace;
    const size_t quarter = cuda->workspace_bytes / 4 / 256 * 256;
    r.scratch = start;
    r.scratch_bytes = mu_cuda_plan_scratch(cuda);
    r.partial = (float *)(start + r.scratch_bytes);
    r.partial_floats = quarter / sizeof(float);
    r.rounded = (__nv_bfloat16 *)(start + r.scratch_bytes + quarter);
    r.rounded_size = (cuda->workspace_bytes - r.scratch_bytes - quarter) / sizeof(__nv_bfloat16);
    return r;
}

template <typename T>
static cublasStatus_t point(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, T *pointer)
{
    return cublasLtMatmulDescSetAttribute(desc, attribute, &pointer, sizeof pointer);
}

static enum mu_status run_plan(struct mu_cuda *cuda, const struct room *room, const struct mu_gemm *g,
                               const struct rounded *a, const struct rounded *b)
{
    const bool bias = g->epilogue == MU_EPILOGUE_BIAS || g->epilogue == MU_EPILOGUE_BIAS_GELU,
               aux = g->epilogue == MU_EPILOGUE_BIAS_GELU || g->epilogue == MU_EPILOGUE_GELU_GRAD;
    const float one = 1.0f, beta = g->accumulate ? 1.0f : 0.0f;
    struct plan_key key = {};
    key.m = g->m;
    key.n = g->n;
    key.k = g->k;
    key.lda = a->ld;
    key.ldb = b->ld;
    key.transpose_a = g->transpose_a;
    key.transpose_b = g->transpose_b;
    key.accumulate = g->accumulate;
    key.epilogue = g->epilogue;
    key.ldc = g->ldc;
    key.ldaux = aux ? g->ldaux : 0;
    key.aligned = aligned16(g->c, g->ldc) && (!bias || aligned16(g->bias, 0)) &&
                  (!aux || (aligned16(g->before, 0) && aligned16(g->aux, 0)));
    if (aux && (g->n % 8 || g->ldaux % 8 || !key.aligned)) /* cublasLt's rule for what it keeps or reads beside C */
        key.epilogue = MU_EPILOGUE_NONE;
    struct mu_cuda_plan *plan;
    enum mu_status status = mu_cuda_plan_for(cuda, &key, &plan);
    if (status != MU_OK)
        return status;
    const bool fused = plan->fused && key.epilogue == g->epilogue;
    cublasStatus_t blas = CUBLAS_STATUS_SUCCESS;
    if (fused && bias)
        blas = point(plan->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, g->bias);
    if (blas == CUBLAS_STATUS_SUCCESS && fused && aux)
        blas = point(plan->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
                     g->epilogue == MU_EPILOGUE_GELU_GRAD ? g->aux : (const float *)g->before);
    if (blas == CUBLAS_STATUS_SUCCESS)
        blas = cublasLtMatmul(cuda->blas, plan->desc, &one, b->at, plan->a, a->at, plan->b, &beta, g->c, plan->c, g->c,
                              plan->c, &plan->algo, room->scratch, room->scratch_bytes, cuda->stream);
    status = mu_cuda_blas_status(cuda, "matrix product", blas);
    if (status == MU_OK && g->epilogue != MU_EPILOGUE_NONE && !fused) {
        const struct epilogue end = epilogue_of(g);
        finish(cuda, g->m, g->n, g->c, g->ldc, &end, g->c, g->ldc);
    }
    return status;
}

/* The part of a product that gives rows [row, row + m) and columns [column, column + n) of C. */
static struct mu_gemm part_of(const struct mu_gemm *g, uint32_t row, uint32_t m, uint32_t column, uint32_t n)
{
    struct mu_gemm part = *g;
    part.m = m;
    part.n = n;
    part.a += g->transpose_a ? row : row * g->lda;
    part.b += g->transpose_b ? column * g->ldb : column;
    part.c += row * g->ldc + column;
    part.bias = g->bias ? g->bias + column : NULL;
    part.aux = g->aux ? g->aux + row * g->ldaux + column : NULL;
    part.before = g->before ? g->before + row * g->ldaux + column : NULL;
    return part;
}

/* One slice, in blocks that fit. */
static enum mu_status product(struct mu_cuda *cuda, const struct room *room, const struct mu_gemm *g)
{
    enum { ROWS_MIN = 256 };
    const size_t lines = room->rounded_size / (g->k + OF_THREAD); /* rows of op(A) and columns of op(B) that fit */
    if (lines < 8 * OF_THREAD)                                    /* not even a block of a few rows and columns */
        return need_workspace(cuda, "matrix product", (size_t)32 * OF_THREAD * (g->k + OF_THREAD));
    const uint32_t fit = lines - 4 * OF_THREAD < UINT32_MAX / 2 ? (uint32_t)lines - 4 * OF_THREAD : UINT32_MAX / 2;
    const uint32_t down = g->m < ROWS_MIN ? g->m : (uint32_t)ROWS_MIN;
    const uint32_t across = g->n <= fit - down && fit > down ? g->n : fit / 2 / OF_THREAD * OF_THREAD;
    const uint32_t left = fit - across, rows = g->m <= left ? g->m : left / OF_THREAD * OF_THREAD;
    __nv_bfloat16 *const to_a = room->rounded, *const to_b =
                                                   to_a +
                                                   ((size_t)(rows + OF_THREAD) * (g->k + OF_THREAD) + 127) / 128 * 128;
    enum mu_status status = MU_OK;
    for (uint32_t column = 0; column < g->n && status == MU_OK; column += across) {
        const uint32_t n = g->n - column < across ? g->n - column : across;
        const struct mu_gemm strip = part_of(g, 0, g->m, column, n);
        const struct rounded b =
            round_operand(cuda, g->transpose_b ? n : g->k, g->transpose_b ? g->k : n, strip.b, g->ldb, to_b);
        for (uint32_t row = 0; row < g->m && status == MU_OK; row += rows) {
            const uint32_t m = g->m - row < rows ? g->m - row : rows;
            const struct mu_gemm block = part_of(&strip, row, m, 0, n);
            const struct rounded a =
                round_operand(cuda, g->transpose_a ? g->k : m, g->transpose_a ? m : g->k, block.a, g->lda, to_a);
            status = run_plan(cuda, room, &block, &a, &b);
        }
    }
    return status;
}

/* ---- slices ---- */

/* Rows [row, row + m) of the sum over slices: a stack of partial sums as in a binary counter, then the epilogue. */
static enum mu_status sliced_rows(struct mu_pool *pool, const struct room *room, const struct mu_gemm *g, uint32_t row,
                                  uint32_t m)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    const size_t size = (size_t)m * g->n;
    enum mu_status status = MU_OK;
    uint32_t depth = 0;
    const struct mu_gemm rows = part_of(g, row, m, 0, g->n);
    for (uint32_t s = 0; s < g->slices && status == MU_OK; s++) {
        struct mu_gemm slice = rows;
        slice.a += s * g->a_slice;
        slice.b += s * g->b_slice;
        slice.k = s + 1 == g->slices && g->k_last ? g->k_last : g->k;
        slice.c = room->partial + depth * size;
        slice.ldc = g->n;
        slice.epilogue = MU_EPILOGUE_NONE;
        status = product(cuda, room, &slice);
        for (uint32_t bits = s; bits & 1 && status == MU_OK; bits >>= 1, depth--)
            status = mu_cuda_add(pool, size, room->partial + (depth - 1) * size, room->partial + depth * size);
        depth++;
    }
    const struct epilogue end = epilogue_of(&rows);
    if (status == MU_OK)
        finish(cuda, m, g->n, room->partial, g->n, &end, rows.c, g->ldc);
    return status;
}

extern "C" enum mu_status mu_cuda_bf16_gemm(struct mu_pool *pool, const struct mu_gemm *gemm)
{
    struct mu_cuda *cuda = mu_pool_cuda(pool);
    const struct room room = room_of(cuda);
    enum mu_status status = MU_OK;
    MU_ASSERT(gemm->m > 0 && gemm->n > 0 && gemm->k > 0 && gemm->k_last <= gemm->k);
    MU_ASSERT(!gemm->accumulate || (gemm->epilogue == MU_EPILOGUE_NONE && gemm->slices <= 1));
    if (gemm->slices <= 1) {
        struct mu_gemm g = *gemm;
        g.k = gemm->k_last ? gemm->k_last : gemm->k;
        status = product(cuda, &room, &g);
    } else {
        const size_t fit = room.partial_floats / STACK_LEVELS / gemm->n;
        if (fit == 0)
            return need_workspace(cuda, "sliced product",
                                  4 * STACK_LEVELS * gemm->n * sizeof(float) + cuda->workspace_bytes);
        const uint32_t rows = fit < gemm->m ? (uint32_t)fit : gemm->m;
        for (uint32_t row = 0; row < gemm->m && status == MU_OK; row += rows)
            status = sliced_rows(pool, &room, gemm, row, gemm->m - row < rows ? gemm->m - row : rows);
    }
    return status == MU_OK ? launched(cuda, "gemm") : status;
}
