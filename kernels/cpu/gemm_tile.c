/* One tile of a matrix product: packing, register kernel, epilogue. Compiled once per instruction set.
 *
 *   for each chunk of 256 k:             B block [256, <= 384] packed into the lane's scratch (stays in L2)
 *     for each group of 64 rows of C:    A^T block packed too when A is stored transposed; else rows of A are read in
 * place for each panel of 8 rows:        A panel [8, 256], 8 KiB (stays in L1) for each panel of 48 columns:  8 x 48
 * block of C in registers, fma over k from 0; then stored, or added to C epilogue over the tile
 *
 * This is the definition of the product in kernels.h itself, so no tile size, edge or instruction set shows in the
 * bits. */
#include "kernels/cpu/isa.h"

#include "kernels/cpu/transpose.h"

enum { PR = MU_GEMM_PANEL_ROWS, PC = MU_GEMM_PANEL_COLUMNS, GROUPS = PC / VL, GROUP_ROWS = MU_GEMM_GROUP_ROWS };
enum { PREFETCH_ROWS = 12 };

/* ---- packing ---- */

/* A stored [k, m]: panels out[panel][k][8] of rows row .. row + rows - 1, k values k0 .. k0 + count - 1; missing rows
 * are zero. */
static void pack_a(const struct mu_gemm *g, uint32_t row, uint32_t rows, uint32_t k0, uint32_t count, float *out)
{
    const float *a = g->a + (size_t)k0 * g->lda + row;
    uint32_t whole = rows / PR * PR;
    for (uint32_t k = 0; k < count; k++, a += g->lda) {
        float *to = out + (size_t)k * PR;
        for (uint32_t i = 0; i < rows; i += VL) /* rows of k lie pages apart: the hardware does not see the pattern */
            __builtin_prefetch(a + PREFETCH_ROWS * g->lda + i);
        for (uint32_t i = 0; i < whole; i += PR, to += (size_t)count * PR)
            memcpy(to, a + i, PR * sizeof(float));
        for (uint32_t i = whole; i < (rows + PR - 1) / PR * PR; i++)
            to[i - whole] = i < rows ? a[i] : 0.0f;
    }
}

/* One panel: out[k][48] = columns column .. column + 47 of op(B); missing columns are zero. */
static void pack_panel(const struct mu_gemm *g, uint32_t column, uint32_t columns, uint32_t k0, uint32_t count,
                       float *out)
{
    if (g->transpose_b) {
        for (uint32_t j = 0; j < PC; j += 8) {
            uint32_t rows = j >= columns ? 0 : columns - j < 8 ? columns - j : 8;
            const float *b = g->b + (size_t)(rows ? column + j : column) * g->ldb + k0;
            for (uint32_t k = 0; k < count; k += 8)
                transpose_8x8(b + k, g->ldb, rows, count - k < 8 ? count - k : 8, out + (size_t)k * PC + j, PC);
        }
        return;
    }
    const float *b = g->b + (size_t)k0 * g->ldb + column;
    for (uint32_t k = 0; k < count; k++, b += g->ldb, out += PC)
        for (uint32_t j = 0; j < PC; j += VL) {
            uint32_t left = j >= columns ? 0 : columns - j;
            v_store(out + j, left >= VL ? v_load(b + j) : left ? v_load_n(b + j, left) : v_zero());
        }
}

/* All panels of a tile: out[panel][k][48], count values of k each. */
static void pack_b(const struct mu_gemm *g, const struct mu_tile *tile, uint32_t k0, uint32_t count, float *out)
{
    for (uint32_t j = 0; j < tile->columns; j += PC)
        pack_panel(g, tile->column + j, tile->columns - j < PC ? tile->columns - j : PC, k0, count,
                   out + (size_t)j * count);
}

/* ---- register kernel ---- */

/* Where the 8 rows of A are: row[i][k * step], step 1 (in place) or 8 (packed). */
struct rows_of_a {
    const float *row[PR];
};

/* c[8][48] (row stride ldc) = or += sum over k of a[8][k] b[k][48], a chain of fma from +0 per element. */
#if MU_ISA_LEVEL == 2
MU_INLINE void block_kernel(uint32_t count, const struct rows_of_a *a, const size_t step, const float *b, float *c,
                            size_t ldc, bool add)
{
    __m512 acc[PR][GROUPS];
    const float *row[PR];
    for (int i = 0; i < PR; i++) {
        row[i] = a->row[i];
        for (int j = 0; j < GROUPS; j++) {
            _mm_prefetch((const char *)(c + (size_t)i * ldc + j * VL), _MM_HINT_T0);
            acc[i][j] = _mm512_setzero_ps();
        }
    }
    for (size_t k = 0; k < count; k++, b += PC) {
        __m512 b0 = _mm512_loadu_ps(b), b1 = _mm512_loadu_ps(b + VL), b2 = _mm512_loadu_ps(b + 2 * VL);
#pragma GCC unroll 8
        for (int i = 0; i < PR; i++) {
            __m512 ai = _mm512_set1_ps(row[i][k * step]);
            acc[i][0] = _mm512_fmadd_ps(ai, b0, acc[i][0]);
            acc[i][1] = _mm512_fmadd_ps(ai, b1, acc[i][1]);
            acc[i][2] = _mm512_fmadd_ps(ai, b2, acc[i][2]);
        }
    }
    for (int i = 0; i < PR; i++, c += ldc)
        for (int j = 0; j < GROUPS; j++) {
            __m512 x = acc[i][j];
            if (add)
                x = _mm512_add_ps(_mm512_loadu_ps(c + j * VL), x);
            _mm512_storeu_ps(c + j * VL, x);
        }
}
#elif MU_ISA_LEVEL == 1
/* 4 x 24: sixteen registers hold twelve sums. */
MU_INLINE void quarter_kernel(uint32_t count, const float *const *a, const size_t step, const float *b, float *c,
                              size_t ldc, bool add)
{
    __m256 acc[4][3];
    const float *row[4];
    for (int i = 0; i < 4; i++) {
        row[i] = a[i];
        for (int j = 0; j < 3; j++)
            acc[i][j] = _mm256_setzero_ps();
    }
    for (size_t k = 0; k < count; k++, b += PC) {
        __m256 b0 = _mm256_loadu_ps(b), b1 = _mm256_loadu_ps(b + 8), b2 = _mm256_loadu_ps(b + 16);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            __m256 ai = _mm256_broadcast_ss(row[i] + k * step);
            acc[i][0] = _mm256_fmadd_ps(ai, b0, acc[i][0]);
            acc[i][1] = _mm256_fmadd_ps(ai, b1, acc[i][1]);
            acc[i][2] = _mm256_fmadd_ps(ai, b2, acc[i][2]);
        }
    }
    for (int i = 0; i < 4; i++, c += ldc)
        for (int j = 0; j < 3; j++) {
            __m256 x = acc[i][j];
            if (add)
                x = _mm256_add_ps(_mm256_loadu_ps(c + j * 8), x);
            _mm256_storeu_ps(c + j * 8, x);
        }
}

MU_INLINE void block_kernel(uint32_t count, const struct rows_of_a *a, const size_t step, const float *b, float *c,
                            size_t ldc, bool add)
{
    for (uint32_t j = 0; j < PC; j += PC / 2)
        for (uint32_t i = 0; i < PR; i += PR / 2)
            quarter_kernel(count, a->row + i, step, b + j, c + i * ldc + j, ldc, add);
}
#else
MU_INLINE void block_kernel(uint32_t count, const struct rows_of_a *a, const size_t step, const float *b, float *c,
                            size_t ldc, bool add)
{
    float acc[PR][PC] = {{0}};
    for (size_t k = 0; k < count; k++, b += PC)
        for (uint32_t i = 0; i < PR; i++)
            for (uint32_t j = 0; j < PC; j++)
                acc[i][j] = fmaf(a->row[i][k * step], b[j], acc[i][j]);
    for (uint32_t i = 0; i < PR; i++)
        for (uint32_t j = 0; j < PC; j++)
            c[i * ldc + j] = add ? c[i * ldc + j] + acc[i][j] : acc[i][j];
}
#endif

static void block_in_place(uint32_t count, const struct rows_of_a *a, const float *b, float *c, size_t ldc, bool add)
{
    block_kernel(count, a, 1, b, c, ldc, add);
}

static void block_packed(uint32_t count, const struct rows_of_a *a, const float *b, float *c, size_t ldc, bool add)
{
    block_kernel(count, a, PR, b, c, ldc, add);
}

typedef void block_fn(uint32_t count, const struct rows_of_a *a, const float *b, float *c, size_t ldc, bool add);

/* A block at the edge of C goes through a full-size buffer. */
static void edge_block(block_fn *block, uint32_t count, const struct rows_of_a *a, const float *b, float *c, size_t ldc,
                       bool add, uint32_t rows, uint32_t columns)
{
    _Alignas(64) float whole[PR * PC];
    block(count, a, b, whole, PC, false);
    for (uint32_t i = 0; i < rows; i++)
        for (uint32_t j = 0; j < columns; j++)
            c[i * ldc + j] = add ? c[i * ldc + j] + whole[i * PC + j] : whole[i * PC + j];
}

/* ---- epilogue ---- */

static void epilogue(const struct mu_gemm *g, uint32_t row, uint32_t rows, uint32_t column, uint32_t columns)
{
    for (uint32_t i = row; i < row + rows; i++)
        for (uint32_t j = column; j < column + columns; j += VL) {
            uint32_t n = column + columns - j < VL ? column + columns - j : VL;
            float *c = g->c + (size_t)i * g->ldc + j;
            vf x = v_load_n(c, n);
            if (g->epilogue == MU_EPILOGUE_GELU_GRAD)
                x = v_mul(x, v_gelu_grad(v_load_n(g->aux + (size_t)i * g->ldaux + j, n)));
            else
                x = v_add(x, v_load_n(g->bias + j, n));
            if (g->epilogue == MU_EPILOGUE_BIAS_GELU) {
                v_store_n(g->before + (size_t)i * g->ldaux + j, x, n);
                x = v_gelu(x);
            }
            v_store_n(c, x, n);
        }
}

/* ---- tile ---- */

static void row_panel(const struct mu_gemm *g, const struct mu_tile *tile, uint32_t row, uint32_t k0, uint32_t count,
                      const float *packed_a, const float *packed_b)
{
    uint32_t rows = tile->row + tile->rows - row < PR ? tile->row + tile->rows - row : PR;
    bool add = g->accumulate || k0 > 0;
    struct rows_of_a a;
    for (uint32_t i = 0; i < PR; i++) /* beyond the edge: any valid row, the result is not used */
        a.row[i] = g->transpose_a ? packed_a + i : g->a + (size_t)(row + (i < rows ? i : 0)) * g->lda + k0;
    block_fn *block = g->transpose_a ? block_packed : block_in_place;
    for (uint32_t j = 0; j < tile->columns; j += PC, packed_b += (size_t)count * PC) {
        uint32_t columns = tile->columns - j < PC ? tile->columns - j : PC;
        float *c = g->c + (size_t)row * g->ldc + tile->column + j;
        if (rows == PR && columns == PC)
            block(count, &a, packed_b, c, g->ldc, add);
        else
            edge_block(block, count, &a, packed_b, c, g->ldc, add, rows, columns);
    }
    if (g->epilogue != MU_EPILOGUE_NONE && k0 + count == g->k)
        epilogue(g, row, rows, tile->column, tile->columns);
}

void MU_ISA_FN(mu_gemm_tile)(const struct mu_gemm *g, const struct mu_tile *tile, const struct mu_lane *lane)
{
    float *packed_a = lane->scratch;
    float *packed_b = packed_a + MU_GEMM_CHUNK * GROUP_ROWS;
    for (uint32_t k0 = 0; k0 < g->k; k0 += MU_GEMM_CHUNK) {
        if (mu_lane_pause(lane))
            return;
        uint32_t count = g->k - k0 < MU_GEMM_CHUNK ? g->k - k0 : MU_GEMM_CHUNK;
        pack_b(g, tile, k0, count, packed_b);
        for (uint32_t i = 0; i < tile->rows; i += PR) {
            uint32_t rows = tile->rows - i < GROUP_ROWS ? tile->rows - i : GROUP_ROWS;
            if (g->transpose_a && i % GROUP_ROWS == 0)
                pack_a(g, tile->row + i, rows, k0, count, packed_a);
            row_panel(g, tile, tile->row + i, k0, count, packed_a + (size_t)(i % GROUP_ROWS) * count, packed_b);
        }
    }
}
